"""Ask a plan what serving takes: how many sequences fit beside the weights, how long each token takes, and what a million cost.

    first token     the forward of the prompts, as the plan's estimate has it; the head sees the last token of each
    every other     a step of decoding (times/decoding.py) at the mean length of a sequence, prompt + output / 2
    concurrency     (memory - slack - weights - workspace) / KV cache of prompt + output tokens
    tokens a second B output / (prefill of B prompts + (output - 1) steps)
    USD a million   price / (3600 x tokens a second) x 1e6

The GPU does nothing else: B sequences begin together, their prompts are computed and then their tokens, and the next B follow
without a pause. A server that mixes prompts into steps of decoding does the same work, and waits for requests besides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import ceil
from typing import TYPE_CHECKING

from surokit import arguments, units
from surokit.planner.counts.flops import count_flops
from surokit.planner.counts.memory import GIB
from surokit.planner.inputs.configs import FAMILIES
from surokit.planner.inverse.budgets import known_memory_budget
from surokit.planner.inverse.questions import solve
from surokit.planner.times.decoding import Decoding, decoding
from surokit.planner.times.roofline import estimate_step, why_no_estimate
from surokit.planner.words import Line, as_html, as_text
from surokit.tables import data_frame

if TYPE_CHECKING:
    import pandas as pd

    from surokit.planner.planning import Plan
    from surokit.planner.times.cost import Price
    from surokit.planner.times.roofline import Estimate

_USD = "USD a million"
# Tokens of prompts that are computed at a time where there are so many: their products are bound by FLOPs, and more would take
# memory without being faster.
_CHUNK = 2048
_MOST = 10**9  # sequences


@dataclass(frozen=True, repr=False)
class Serving:
    """A Serving holds what is predicted of one GPU that serves a model, `concurrency` sequences at once; `plan` is a forward's.

    most        sequences of prompt + output tokens that fit at once; None where the GPU's memory is not known
    kv_bytes    of one sequence of prompt + output tokens; kv_token_bytes of its first token
    weight_bytes, workspace_bytes   memory beside the KV cache; the slack is apart, a share of all of it
    decoding    what a step of decoding asks for
    notes       what the figures assume
    """

    title: str
    prompt: int
    output: int
    concurrency: int
    most: int | None
    kv_bytes: float
    kv_token_bytes: float
    weight_bytes: float
    workspace_bytes: float
    decoding: Decoding
    notes: tuple[str, ...]
    plan: Plan = field(compare=False)

    def at(self, concurrency: int) -> Serving:
        """Predict the same with another number of sequences at once."""
        return replace(self, concurrency=arguments.integer("concurrency", concurrency))

    @property
    def kind(self) -> str:
        """Return the kind of the times: a prediction at measured rates, optimistic at a datasheet's."""
        return self.decoding.estimate.kind

    @property
    def fits(self) -> bool | None:
        """Return whether so many sequences fit at once; None where the GPU's memory is not known."""
        return None if self.most is None else self.concurrency <= self.most

    # -- prompts

    @property
    def prefill_flop(self) -> float:
        """Return the FLOPs of one prompt's forward."""
        return self._prefill(1)[0]

    @cached_property
    def prefill_ms(self) -> float:
        """Return the milliseconds to the first token of one request that waits for no other."""
        return self._prefill(1)[1]

    @cached_property
    def prefill_batch_ms(self) -> float:
        """Return the milliseconds to the first tokens of `concurrency` requests whose prompts are computed together."""
        return self._prefill(self.concurrency)[1]

    def _prefill(self, batch: int) -> tuple[float, float]:
        """Return FLOPs and milliseconds of a forward of `batch` prompts, of which the head sees the last tokens only."""
        whole = _estimated(self.plan.but(batch=batch, length=self.prompt))
        last = _estimated(self.plan.but(batch=batch, length=1))
        rows = [row for row in whole.rows if not row.module.startswith("lm_head")]
        rows += [row for row in last.rows if row.module.startswith("lm_head")]
        return sum(row.flop for row in rows), replace(whole, rows=tuple(rows)).step_ms

    # -- tokens after the first

    @property
    def token_ms(self) -> float:
        """Return the milliseconds from one token of a sequence to its next (TPOT): a step of decoding."""
        return self.decoding.step(self.concurrency).step_ms

    @property
    def binds(self) -> str:
        """Say what a step of decoding waits for most: bytes, products or launches."""
        return self.decoding.binds(self.concurrency)

    @property
    def turning_batch(self) -> float | None:
        """Return the concurrency at which a step's bytes and products take equally long; None where bytes always take longer."""
        return self.decoding.turning_batch

    @property
    def request_tokens_per_s(self) -> float:
        """Return the tokens a second that one request sees after its first token."""
        return 1e3 / self.token_ms

    @property
    def decode_tokens_per_s(self) -> float:
        """Return the tokens a second that the GPU decodes while it computes no prompts."""
        return self.concurrency * self.request_tokens_per_s

    # -- requests as a whole

    @property
    def request_ms(self) -> float:
        """Return the milliseconds of a request, from its prompt to its last token, where `concurrency` of them begin together."""
        return self.prefill_batch_ms + (self.output - 1) * self.token_ms

    @property
    def tokens_per_s(self) -> float:
        """Return the output tokens a second that the GPU sustains, prompts included."""
        return self.concurrency * self.output / self.request_ms * 1e3

    @property
    def price(self) -> Price | None:
        """Return the price of a GPU hour; None where the plan has none."""
        return self.plan.price

    @property
    def usd_per_million_output(self) -> float | None:
        """Return US dollars for a million output tokens, their prompts included, at the middle of a price's range; None without a
        price."""
        return None if self.price is None else self._usd(self.price.middle)

    @property
    def usd_per_million_output_range(self) -> tuple[float, float] | None:
        """Return US dollars for a million output tokens from the low to the high end of the price; None without one."""
        return None if self.price is None else (self._usd(self.price.low), self._usd(self.price.high))

    @property
    def usd_per_million_tokens(self) -> float | None:
        """Return US dollars for a million tokens in and out, counted together; None without a price."""
        found = self.usd_per_million_output
        return None if found is None else found * self.output / (self.prompt + self.output)

    def _usd(self, usd_per_gpu_hour: float) -> float:
        return usd_per_gpu_hour / (3600 * self.tokens_per_s * self.plan.time.goodput) * 1e6

    # -- shown

    def by_concurrency(self) -> pd.DataFrame:
        """Return a row for 1, 2, 4, ... sequences at once, and for as many as fit (without a known memory, as are served), as a
        DataFrame: concurrency, token_ms, request_tokens_per_s, tokens_per_s, binds, usd_per_million_output."""
        last = self.most or self.concurrency
        counts = [*(2**i for i in range(last.bit_length()) if 2**i < last), last]
        columns = ("concurrency", "token_ms", "request_tokens_per_s", "tokens_per_s", "binds", "usd_per_million_output")
        return data_frame([[getattr(self.at(n), c) for c in columns] for n in counts], columns)

    def lines(self) -> tuple[Line, ...]:
        """Return the lines of the table, in order."""
        return tuple(_lines(self))

    def table(self) -> pd.DataFrame:
        """Return the lines as a DataFrame: group, term, value, unit, kind, how."""
        return data_frame([line.__dict__ for line in self.lines()])

    @property
    def answers(self) -> tuple[str, ...]:
        """Say whether so many sequences fit, how fast their tokens come and what they cost, a line each; they are printed first."""
        return tuple(_answers(self))

    def __repr__(self) -> str:
        return as_text(f"Serving, predicted: {self.title}", self.answers, self.lines(), self.notes)

    def _repr_html_(self) -> str:
        return as_html(f"Serving, predicted: {self.title}", self.answers, self.lines(), self.notes)


def serving(
    plan: Plan, *, prompt: int, output: int, concurrency: int | None = None, gib: float | None = None
) -> Serving:
    """Predict one GPU that serves the plan's model; `Plan.serving` says what the arguments mean."""
    prompt, output = arguments.integer("prompt", prompt), arguments.integer("output", output)
    concurrency = None if concurrency is None else arguments.integer("concurrency", concurrency)
    length, mean = prompt + output, prompt + output // 2
    if plan.shape is not None and 0 < plan.shape.positions < length:
        raise ValueError(
            f"prompt={prompt} and output={output} make {length:,} tokens, and the model has {plan.shape.positions:,} positions: "
            "give fewer of either."
        )
    if plan.setup.prefetch:
        raise ValueError(
            "serving() reads weights from the GPU at every token, and offload_weights keeps them on the host: leave it out."
        )
    step_of_one = {"training": False, "logits": "fused", "batch": 1, "length": prompt, "accumulate": 1}
    of_training = ("tokens", "recompute", "offload_activations", "offload_states")
    of_many = ("gpus", "zero", "tensor_parallel", "pipeline_parallel", "expert_parallel", "virtual_stages")
    forward = plan.but(**step_of_one, **dict.fromkeys((*of_training, *of_many)))
    if missing := why_no_estimate(forward.shape, forward.compute, forward.setup, forward.gpu):
        raise ValueError(f"serving() cannot tell: {missing}")
    shape, gpu = forward.shape, forward.gpu
    assert shape is not None
    assert gpu is not None
    weights = [term for term in forward.memory.terms if term.exact and term.name != "KV cache"]
    weight_bytes, kv_bytes = sum(term.bytes for term in weights), _kv_bytes(forward, length)
    compute = count_flops(shape, length=mean, recipe=forward.asked.carried, attention="full", training=False)
    setup = replace(forward.setup, length=1)
    one = estimate_step(shape, compute, forward.recipe, setup, gpu, trained_parameters=0.0)
    assert one is not None
    step = decoding(shape, forward.recipe, setup.dtype, weights, _kv_bytes(forward, mean), one)
    room = known_memory_budget(forward, gib)
    most, prompts = None, _workspace(forward, ceil(_CHUNK / prompt), prompt)

    def workspace(sequences: int) -> float:
        return max(prompts, _workspace(forward, sequences, 1))

    if room is not None:

        def excess(sequences: int) -> float:
            held = weight_bytes + workspace(sequences) + sequences * kv_bytes
            return held * (1 + setup.slack) / GIB - room

        if (missing_gib := excess(1)) > 0:
            raise ValueError(
                f"No sequence of {length:,} tokens fits: with weights it takes {units.gib(room + missing_gib)} of {room:g} GiB; "
                "take a recipe that stores weights in fewer bits, such as qfp8 or qnf4, fewer tokens, or a GPU with more memory."
            )
        most = solve(excess, 1, _MOST)
    elif concurrency is None:
        raise ValueError(
            f"The memory of {gpu.name} is not known, nor how many sequences fit: give gib= or concurrency=."
        )
    return Serving(
        title=_title(forward, prompt, output),
        prompt=prompt,
        output=output,
        concurrency=concurrency or most or 1,
        most=most,
        kv_bytes=kv_bytes,
        kv_token_bytes=_kv_bytes(forward, 1),
        weight_bytes=weight_bytes,
        workspace_bytes=workspace(max(most or 1, concurrency or 1)),
        decoding=step,
        notes=tuple(_notes(plan, forward, step, mean)),
        plan=forward,
    )


def _estimated(plan: Plan) -> Estimate:
    found = plan.estimate
    assert found is not None, "serving() has asked whether there is one"
    return found


def _kv_bytes(forward: Plan, length: int) -> float:
    """Return the bytes of one sequence's KV cache, of which windows drop the oldest tokens, as transformers has it."""
    return forward.but(length=length, layers="transformers", fusion="none").memory["KV cache"].bytes


def _workspace(forward: Plan, batch: int, length: int) -> float:
    """Return the bytes of tensors that come and go with a forward."""
    memory = forward.but(batch=batch, length=length).memory
    return sum(term.bytes for term in memory.terms if not term.exact and term.name != "slack")


def _title(forward: Plan, prompt: int, output: int) -> str:
    recipe = "" if forward.recipe is None else f", recipe {forward.recipe.name}"
    assert forward.gpu is not None
    return f"{forward.subject.name}{recipe}, {prompt:,} tokens in and {output:,} out, 1 x {forward.gpu.name}"


def _answers(s: Serving) -> Iterator[str]:
    """Yield whether so many sequences fit, how fast their tokens come and what they cost, a line each where it is known."""
    gpu = s.plan.gpu.name if s.plan.gpu else "GPU"
    if s.most is not None:
        room = f"room for {_sequences(s.most)} of {s.prompt + s.output:,} tokens in {gpu}'s memory beside the weights"
        yield f"Does not fit: {_sequences(s.concurrency)} at once, and {room}" if not s.fits else f"Fits: {room}"
    yield (
        f"{_sequences(s.concurrency)} at once: {units.value(s.tokens_per_s, 'tokens/s')} in all, "
        f"{units.value(s.token_ms, 'ms')} a token after {units.value(s.prefill_batch_ms, 'ms')}, bound by {s.binds} ({s.kind})"
    )
    if (usd := s.usd_per_million_output_range) is not None:
        yield f"Costs {units.span(*usd, _USD)} output tokens: GPU hours at {s.price}"


def _sequences(n: int) -> str:
    return f"{n:,} sequence{'' if n == 1 else 's'}"


def _lines(s: Serving) -> Iterator[Line]:
    """Yield the lines of the table: memory, prompts, tokens, cost."""
    step, kind, length, n = s.decoding, s.kind, s.prompt + s.output, s.concurrency
    counted = "exact" if s.plan.shape is not None and s.plan.shape.family in FAMILIES else "approximate"
    line = partial(Line, "memory")
    yield line("weights", s.weight_bytes / GIB, "GiB", "exact", "as they are held, scales included")
    yield line("KV cache a token", s.kv_token_bytes, "bytes", "exact", "keys and values of every layer")
    yield line("KV cache a sequence", s.kv_bytes / GIB, "GiB", "exact", f"of {length:,} tokens")
    how = "tensors of prompts that are computed together, or of a step"
    yield line("workspace", s.workspace_bytes / GIB, "GiB", "approximate", how)
    if s.most is not None:
        how = "memory without slack, weights and workspace, by the KV cache a sequence"
        yield line("sequences that fit", s.most, "at once", "approximate", how)
    line = partial(Line, "prompts")
    yield line(
        "FLOPs a prompt",
        s.prefill_flop,
        "FLOP",
        "exact",
        f"{s.prompt:,} tokens product by product, the head for the last",
    )
    how = f"{s.decoding.estimate.how.partition(';')[0]}"
    yield line("first token, alone", s.prefill_ms, "ms", kind, how)
    if n > 1:
        yield line(f"first token, {n:,} together", s.prefill_batch_ms, "ms", kind, "the last of them; without queueing")
    line = partial(Line, f"a step of decoding, {_sequences(n)}")
    how = "every weight once"
    if step.expert_bytes:
        how = f"{1 - step.idle**n:.0%} of the experts, routed at random"
    yield line(
        "bytes of weights", step.weight_bytes(n) / GIB, "GiB", "approximate" if step.expert_bytes else "exact", how
    )
    yield line(
        "bytes of KV cache",
        n * step.kv_bytes / GIB,
        "GiB",
        "exact",
        f"sequences of {s.prompt + s.output // 2:,} tokens",
    )
    yield line("FLOPs", n * step.token_flop, "FLOP", counted, "of its tokens")
    yield line("bytes take", step.memory_ms(n), "ms", kind, f"at {step.estimate.rates.bandwidth_tb_s:g} TB/s")
    yield line("products take", step.products_ms(n), "ms", kind, "at the rates of their formats")
    if (added := step.step(n).by_bound()["launch"]) or step.estimate.rates.launch_us is not None:
        yield line("launches add", added, "ms", kind, f"{step.launches:,.0f} kernels")
    yield line("a token", s.token_ms, "ms", kind, f"bound by {s.binds}")
    if step.turning_batch is not None:
        how = "bytes and products take equally long there"
        yield line("turns to products at", step.turning_batch, "at once", kind, how)
    line = partial(Line, "tokens a second")
    yield line("of a request", s.request_tokens_per_s, "tokens/s", kind, "after its first token")
    yield line("in all, decoding", s.decode_tokens_per_s, "tokens/s", kind, _sequences(n))
    yield line("in all", s.tokens_per_s, "tokens/s", kind, "output tokens, with the time of their prompts")
    yield line("time of a request", s.request_ms / 1e3, "s", kind, f"{s.output:,} tokens after its prompt")
    if s.price is not None and s.usd_per_million_output is not None and s.usd_per_million_tokens is not None:
        line = partial(Line, "cost")
        how = f"GPU hours x {s.price}, as given"
        if s.price.low < s.price.high:
            how = f"at the middle of {s.price.low:g} to {s.price.high:g} USD a GPU hour, as given"
        yield line("output tokens", s.usd_per_million_output, _USD, "prediction", f"{how}; their prompts are in it")
        yield line("tokens in and out", s.usd_per_million_tokens, _USD, "prediction", "the same hours, over all tokens")


def _notes(plan: Plan, forward: Plan, step: Decoding, mean: int) -> Iterator[str]:
    """Yield what the figures assume."""
    shape, recipe, rates = forward.shape, forward.recipe, step.estimate.rates
    assert shape is not None
    yield from forward.subject.notes
    if step.turning_batch is None:
        keys = f"the KV cache of {mean:,} tokens"
        yield f"bytes bound a step of any number of sequences: {keys} takes longer to read than a token's products to compute"
    if not rates.measured:
        yield f"{rates.how.partition(';')[0]}: a server gets slower tokens, and pauses between requests"
    if getattr(recipe, "storage", None) is not None:
        yield (
            "a step reads stored codes and decodes them within the product, as kernels of servers do; surokit's own layers decode "
            "a weight before its product, which takes longer"
        )
    elif getattr(recipe, "quantized", False):
        yield f"{recipe.name} quantizes weights for their products and holds them in {forward.setup.dtype}: qfp8 reads fewer bytes"
    if getattr(recipe, "adapter", None) is not None:
        yield "adapters are read and computed beside the weights, as they train; merged into them they take no time"
    if shape.sliding_window is not None and forward.setup.layers == "surokit":
        yield "a window's KV cache drops what no token sees any more; surokit's own layers keep it"
    if shape.latent is not None:
        yield "attention multiplies the latent itself in a step of decoding, and expands it for prompts"
    if plan.setup.gpus > 1:
        yield f"each of the {plan.setup.gpus:,} GPUs serves by itself and holds the whole model: figures are of one"
    if plan.asked.run.has_rate:
        yield "the rate that was given for the run is not used: times are at the rates of the GPU"
    yield from step.estimate.notes
