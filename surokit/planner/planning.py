"""`plan` predicts the FLOPs, the memory, the time and the cost of a run before a GPU is touched.

    plan = sk.plan(405e9, tokens=15.6e12, gpus=16000, gpu="H100", tflops_per_gpu=400, usd_per_gpu_hour=2.0)
    plan.flops, plan.days, plan.gpu_hours, plan.usd        3.7908e25, 68.55, 26.325e6, 52.65e6

A Plan keeps apart what is exact, what is approximate and what is a prediction, and names the peak behind every share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from operator import mul
from typing import TYPE_CHECKING, Any

from surokit import units
from surokit.hardware.gpus import Gpu
from surokit.hardware.machine import machine_gib, room_for_decoded
from surokit.planner import picture
from surokit.planner.compare import check as checking
from surokit.planner.compare.check import Check
from surokit.planner.counts.flops import Attention, Compute, Recompute, count_flops, product_kinds
from surokit.planner.counts.memory import (
    SLACK,
    AttentionKernel,
    Engine,
    Layers,
    Memory,
    OffloadedActivations,
    Setup,
    blocks_of,
    count_memory,
)
from surokit.planner.counts.traffic import step_flops
from surokit.planner.inputs.fusion import Transposed
from surokit.planner.inputs.question import Asked, Logits, Question, read_question
from surokit.planner.inputs.shape import Shape
from surokit.planner.inputs.subject import Subject, read_subject
from surokit.planner.inputs.typical import typical_shape
from surokit.planner.inverse import budgets, offload_plan, questions, recipe_choice, remedies, speedups
from surokit.planner.inverse.serving import Serving, serving
from surokit.planner.offload.formulas import Host, Offload, host_of
from surokit.planner.offload.streaming import Streamed
from surokit.planner.times.cost import ModelFlops, Price, StepTime, Time, count_time, exact, time_in_parts
from surokit.planner.times.energy import energy_kwh
from surokit.planner.times.likely import Likely, likely_step
from surokit.planner.times.roofline import Estimate, estimate_step, why_no_estimate
from surokit.planner.words import Line, as_html, as_text, plan_answers, plan_lines, plan_notes, plan_source
from surokit.tables import data_frame

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from surokit.recipe import Change


@dataclass(frozen=True, repr=False)
class Plan:
    """A Plan holds what is expected of a run. Figures that need an argument that was not given are None, and `notes` say which.

    flops               model FLOPs of the whole run
    days, gpu_hours, usd    predictions; None without a rate (tflops_per_gpu, or mfu with gpu) and, for usd, a price
    time, memory, compute   the parts, with every figure behind these
    source      what was taken from a live model or session, in a line; "" without one
    parts       where the recipe changes on the way: for each part of it, the share of the run's steps and the plan of that part.
                Times of the run are sums over them, `step_time` is the mean over its steps, and the memory is that of the part that
                needs most; what a step is made of is the first part's
    """

    title: str
    parameters: float
    shape: Shape | None
    recipe: Any
    setup: Setup
    tokens: float | None
    gpu: Gpu | None
    price: Price | None
    flops_per_token: float
    flops: float | None
    flops_per_step: float | None
    compute: Compute | None
    time: Time
    memory: Memory
    factor: int
    notes: tuple[str, ...]
    source: str
    asked: Asked = field(compare=False)
    parts: tuple[tuple[float, Plan], ...] = ()

    def but(self, **changes: Any) -> Plan:
        """Plan the same run with other arguments, as in `plan.but(batch=4)`; an argument that is None is taken back."""
        return answer(self.asked.question.but(**changes))

    @property
    def subject(self) -> Subject:
        """Return what is planned, as it was read: its shape or its number of parameters, and what a live model has."""
        return self.asked.subject

    @property
    def given(self) -> Mapping[str, Any]:
        """Return the arguments of `plan` that are not None: those that were given, and those with a default."""
        return self.asked.question.given

    @property
    def days(self) -> float | None:
        """Return the predicted days of the run on all GPUs."""
        return self.time.days

    @property
    def gpu_hours(self) -> float | None:
        """Return the predicted GPU hours of the run."""
        return self.time.gpu_hours

    @property
    def usd(self) -> float | None:
        """Return the predicted cost in US dollars at the given price, at its middle where it is a range."""
        return self.time.usd

    @property
    def usd_range(self) -> tuple[float, float] | None:
        """Return the predicted cost in US dollars from the low to the high end of the given price."""
        return self.time.usd_range

    @property
    def kwh(self) -> float | None:
        """Return the most energy in kWh that the GPUs can draw: GPU hours times the power limit; None where either is not known."""
        return None if self.gpu is None or self.gpu_hours is None else energy_kwh(self.gpu_hours, self.gpu)

    @cached_property
    def estimate(self) -> Estimate | None:
        """Estimate the time of a step, row by row; None where shape, batch, length or the rates of the GPU are missing."""
        return _estimate(self.asked, self.compute)

    @cached_property
    def likely(self) -> Likely | None:
        """Predict the time of a step by what published runs reached, with its interval.

        What is kept on the host counts, at the rates of published hosts. None where `estimate` is None, where rates were measured,
        which predict by themselves, where the link to the host, or between GPUs that share a model, is needed and not known, on a
        CPU, and without training.
        """
        if not self.has_likely or self.estimate is None or self.gpu is None:
            return None
        host = self.on_host if self.setup.offloads else None
        return likely_step(self.estimate, self.gpu, self.setup, host)

    @property
    def has_likely(self) -> bool:
        """True if a likely time of a step can be told; unlike `likely` it counts nothing of a model that is not divided."""
        return self.has_published_rates and not (self.setup.offloads and self.gpu and self.gpu.host_gb_s is None)

    @property
    def has_published_rates(self) -> bool:
        """True if what published runs reached tells how long a step computes."""
        gpu, setup, shape = self.gpu, self.setup, self.shape
        if gpu is None or gpu.ceilings is not None or not setup.training or setup.device == "cpu":
            return False
        return not (why_no_estimate(shape, self.compute, setup, gpu) or self._sends_at_no_known_rate)

    @property
    def _sends_at_no_known_rate(self) -> bool:
        """True if GPUs that share a model would send each other between layers over a link whose rate is not known."""
        return self.setup.division.divides and self.estimate is not None and self.estimate.communication.ms is None

    @cached_property
    def computing_time(self) -> StepTime | None:
        """Return the time of a step without what is kept on the host, of the kinds of `step_time`; None where no estimate is."""
        if (estimate := self.estimate) is None or self.gpu is None:
            return None
        if self.has_published_rates:
            return StepTime(likely_step(estimate, self.gpu, self.setup).step_ms, "likely")
        return StepTime(estimate.step_ms, estimate.kind)

    @cached_property
    def step_time(self) -> StepTime | None:
        """Return the time of a step that plans are compared by: predicted at measured rates, else likely, else optimistic, else a
        bound; None where it is not known, or what is kept on the host adds what is not known. Where the recipe changes it is the
        mean over the run."""
        if self.parts and not any(math.isnan(share) for share, _ in self.parts):
            times = [plan.step_time for _, plan in self.parts]
            known = [time for time in times if time is not None]
            if len(known) < len(times):
                return None
            return StepTime(sum(share * time.ms for (share, _), time in zip(self.parts, known)), known[0].kind)
        if (likely := self.likely) is not None:
            return StepTime(likely.step_ms, "likely")
        if self.setup.offloads:
            host = None if self.gpu is None else host_of(self.gpu)
            return None if host is None else self.step_time_on(host)
        if self.computing_time is not None:
            return self.computing_time
        return None if self.time.floor_step_ms is None else StepTime(self.time.floor_step_ms, "bound")

    def step_time_on(self, host: Host) -> StepTime | None:
        """Return the time of a step whose parts on the host are on this one; None where what it computes is not known."""
        computing = self.computing_time
        return None if computing is None else StepTime(self.on_host(computing.ms, host), computing.kind)

    def on_host(self, computes_ms: float, host: Host) -> float:
        """Return the ms of a step that computes for so long, with what is kept on this host; it needs an `estimate`."""
        assert self.estimate is not None
        return offload_plan.with_offload(self.asked, self.memory, computes_ms, host, self.estimate.forward_share)

    @property
    def likely_days(self) -> tuple[float, float, float] | None:
        """Return the likely days of the run, and those that nine of ten and one of ten runs exceed.

        None without `tokens` or a likely step.
        """
        if self.parts:
            each = [plan.likely_days for _, plan in self.parts]
            days_of = [days for days in each if days is not None]
            if len(days_of) < len(each):
                return None
            shares = [share for share, _ in self.parts]
            days, low, high = (sum(map(mul, shares, column)) for column in zip(*days_of))
            return days, low, high
        if self.flops is None or self.flops_per_step is None or (likely := self.likely) is None:
            return None
        steps = self.flops / self.flops_per_step / self.time.goodput
        days, low, high = (ms * steps / 86_400_000 for ms in (likely.step_ms, likely.low_ms, likely.high_ms))
        return days, low, high

    @property
    def trained_parameters(self) -> float:
        """Return the number of parameters that train, and so have a gradient and optimizer states."""
        return self.asked.trained_parameters

    @property
    def room_gib(self) -> float | None:
        """Return the GiB that the plan has to fit into: what a process can allocate on the GPU; on a CPU, the memory of the Gpu
        given for it or of this machine. None where it is not known."""
        if self.gpu is not None and self.gpu.room_gib is not None:
            return self.gpu.room_gib
        return machine_gib() if self.setup.device == "cpu" else None

    def fits(self, gib: float | None = None) -> bool:
        """True if the memory of one GPU suffices: all terms, exact and approximate, within `gib` (`room_gib` without it).

        Raises ValueError where the answer needs a term that could not be counted.
        """
        fits = self.memory.gib <= budgets.memory_budget(self, gib)
        if fits and self.memory.left_out:
            raise ValueError(f"fits() cannot tell yet, it lacks {self.memory.left_out[0]}.")
        return fits

    @property
    def answers(self) -> tuple[str, ...]:
        """Say whether the plan fits, how long it takes and what it costs, a line each where it is known; they are printed first."""
        return tuple(plan_answers(self))

    # -- asked backwards; see inverse/ for arguments and errors

    def largest(self, what: str, *, gib: float | None = None, multiple: int = 1) -> int:
        """Return the largest "batch", "length" or number of "layers" that fits one GPU, or of "parameters" where a number is
        planned."""
        return questions.largest(self, what, gib=gib, multiple=multiple)

    def gpus_for(self, **goals: Any) -> int:
        """Return the fewest GPUs that finish in `days=`, hold the model with `gib=` each, and cost no more than `usd=`."""
        return questions.gpus_for(self, **goals)

    def tokens_for(self, **budgets: float) -> int:
        """Return the most tokens that can be trained on within `days=`, `gpu_hours=` and `usd=`."""
        return questions.tokens_for(self, **budgets)

    def rate_for(self, **budgets: float) -> float:
        """Return the model TFLOPS that each GPU must achieve to finish within `days=`, `gpu_hours=` and `usd=`."""
        return questions.rate_for(self, **budgets)

    def parameters_for(self, *, law: Any = None, **budgets: float) -> questions.Optimal:
        """Return the number of parameters, and of tokens, that make the most of `days=`, `gpu_hours=`, `usd=` by a scaling law."""
        return questions.parameters_for(self, law=law, **budgets)

    def recipes(self, names: Any = None, *, gib: float | None = None) -> pd.DataFrame:
        """Compare the plan in every recipe: step, speedup, memory, native or emulated, and which is predicted fastest of those
        that fit."""
        return recipe_choice.recipes(self, names, gib=gib)

    def fitting(
        self, *, gib: float | None = None, host: Host | None = None, host_gib: float | None = None
    ) -> remedies.Fitting:
        """Find the changes that make the plan fit into `gib` and, for each GPU, `host_gib` of the host, and what each leaves and
        costs."""
        return remedies.fitting(self, gib=gib, host=host, host_gib=host_gib)

    def faster(
        self, *, gib: float | None = None, host: Host | None = None, host_gib: float | None = None
    ) -> speedups.Faster:
        """Predict what fusing, CUDA graphs, less recompute and a cached W' save of a step, and choose among them; beside them
        what the fastest recipe would save."""
        return speedups.faster(self, gib=gib, host=host, host_gib=host_gib)

    def binds(self) -> remedies.Binds:
        """Name the largest term of memory and of time, and what makes either smaller."""
        return remedies.binds(self)

    def offload(self, host: Host | None = None, **options: Any) -> Offload:
        """Predict a step with the optimizer's states on the host, synchronously and as ZenFlow, beside one without, and choose:
        each way is compared with the memory of the GPU and of the host.

        Without `host`, it is what a calibration of the plan's GPU measured, else as published runs had it. Options are those of
        `predict_offload`; those that are not given are the plan's own optimizer's. Raises ValueError where the host or a step's
        time is not known and for a model that is divided over GPUs, TypeError for a host that is not a Host.
        """
        return offload_plan.offload(self, host, **options)

    def streamed(self, host: Host | None = None, *, prefetch: int | None = None) -> Streamed:
        """Predict memory, bytes and time of a step whose blocks' weights stay on the host (sk.offload_weights).

        `prefetch` blocks are fetched ahead; without it as many as the plan's own, or 1. `host` is as for `offload`. Raises
        ValueError for a number of parameters, which has no blocks, and where the host or a step's time is not known.
        """
        return offload_plan.streamed(self, host, prefetch=prefetch)

    def serving(
        self, prompt: int = 512, output: int = 128, concurrency: int | None = None, *, gib: float | None = None
    ) -> Serving:
        """Predict one GPU that serves the model: time to the first token and to each after it, tokens a second, and their cost.

        prompt, output  tokens in and out of a request; concurrency is how many are served at once, as many as fit without it
        gib             memory to fit into, the GPU's without it

        A plan of a training run is planned again as a forward. Raises ValueError where shapes, rates or memory are missing, for
        more tokens than the model has positions, and where not even one sequence fits.
        """
        return serving(self, prompt=prompt, output=output, concurrency=concurrency, gib=gib)

    @property
    def deferral(self) -> dict[str, Any]:
        """Return ZenFlow's settings that `predict_offload` takes, where the plan's optimizer is a ZenFlow; {} otherwise."""
        return self.asked.deferral

    # -- beside a measurement, and shown

    def check(self, measured: Any) -> Check:
        """Compare the plan with a Session, a Profile or a dict of figures, the misses first; `.recalibrated` is the plan at the
        measured rate and slack."""
        return checking.check(self, measured)

    def plot(self, gib: float | None = None) -> Figure:
        """Draw memory as a bar, exact terms solid, approximate ones hatched; `sk.plot_memory` draws several plans."""
        return picture.plot_memory(self, gib)

    def explore(self) -> Any:
        """Show the plan with sliders in a notebook; print it elsewhere."""
        from surokit.widgets.planning import explore

        return explore(self)

    def lines(self) -> tuple[Line, ...]:
        """Return the lines of the table, in order."""
        return tuple(plan_lines(self))

    def table(self) -> pd.DataFrame:
        """Return the plan as a DataFrame: group, term, value, unit, kind, how."""
        return data_frame([line.__dict__ for line in self.lines()])

    def gemms(self) -> pd.DataFrame:
        """Return the FLOPs a token of every kind of product as a DataFrame: module, n, k, count, forward, grad_input, grad_weight,
        recompute, share of the model FLOPs."""
        compute = self._counted()
        columns = ("module", "n", "k", "count", "forward", "grad_input", "grad_weight", "recompute")
        return data_frame(
            [
                {**{c: getattr(p, c) for c in columns}, "share": (p.forward + p.backward) / compute.model}
                for p in compute.products
            ]
        )

    def modules(self) -> pd.DataFrame:
        """Return the FLOPs a token by module as a DataFrame: module, forward, backward, recompute, share; the rows sum to the
        plan's own."""
        compute = self._counted()
        sums: dict[str, list[int]] = {}
        for p in compute.products:
            row = sums.setdefault(p.module.partition(".")[0], [0, 0, 0])
            for i, flop in enumerate((p.forward, p.backward, p.recompute)):
                row[i] += flop
        return data_frame(
            [
                {"module": name, "forward": f, "backward": b, "recompute": r, "share": (f + b) / compute.model}
                for name, (f, b, r) in sums.items()
            ]
        )

    def _counted(self) -> Compute:
        if self.compute is None:
            raise ValueError("A number of parameters has no products to list: plan with a config or a model.")
        return self.compute

    @property
    def all_notes(self) -> tuple[str, ...]:
        """Return the notes, those of the step's estimate included."""
        return (*self.notes, *(self.estimate.notes if self.estimate else ()))

    def __repr__(self) -> str:
        return as_text(f"Plan: {self.title}", self._opening, self.lines(), self.all_notes)

    def _repr_html_(self) -> str:
        return as_html(f"Plan: {self.title}", self._opening, self.lines(), self.all_notes)

    @property
    def _opening(self) -> tuple[str, ...]:
        return (*([self.source] if self.source else []), *self.answers)


def plan(
    what: Any,
    *,
    tokens: float | None = None,
    gpus: int = 1,
    gpu: str | Gpu | None = None,
    tflops_per_gpu: float | None = None,
    mfu: float | None = None,
    goodput: float = 1.0,
    usd_per_gpu_hour: float | tuple[float, float] | Price | None = None,
    recipe: Any = None,
    batch: int | None = None,
    length: int | None = None,
    attention: Attention = "causal",
    recompute: Recompute | None = None,
    optimizer: Any = None,
    state_dtype: Any = None,
    dtype: Any = None,
    master: bool = False,
    zero: int = 0,
    logits: Logits | None = None,
    accumulate: int | None = None,
    layers: Layers | None = None,
    slack: float = SLACK,
    between_gb_s: float | None = None,
    training: bool = True,
    fusion: Any = None,
    graphs: bool | None = None,
    transposed: Transposed | None = None,
    offload_weights: bool | int | None = None,
    offload_activations: OffloadedActivations | None = None,
    engine: Engine | None = None,
    attention_kernel: AttentionKernel | None = None,
    optimizer_in_backward: bool = False,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    expert_parallel: int = 1,
    virtual_stages: int = 1,
    recompute_blocks: int | None = None,
    offload_states: bool = False,
) -> Plan:
    """Plan a run: FLOPs, time, cost, and the memory of one GPU.

    what        number of parameters (405e9), a config (dict as in config.json, folder, path, DecoderConfig), a live model
                with a .config, or a Session. A live one is planned as it is where no argument says otherwise: its recipe and
                adapters, what trains, fusion and recompute, dtype and device; a session's optimizer, steps and CUDA graphs too
    tokens      of the whole run; `batch` (sequences on one GPU, or on the GPUs that share a model) x `length` (tokens) x `gpus` (or
                such groups) is one step
    gpu         a name in the hardware table, "cpu", or a Gpu; gives peaks and memory, and decides whether a CPU's or a GPU's
                kernels run (without it, those of the device that a live model is on, or a GPU's)
    tflops_per_gpu, mfu     the achieved rate of one GPU in model TFLOPS, or as a share of its dense BF16 peak: one of
                them, or neither
    goodput     share of the hours that makes progress (restarts and evaluation do not)
    usd_per_gpu_hour    a price, a range (1.8, 3.2) or a dated `Price`; none is assumed
    recipe      a Recipe or its name; its adapter and storage decide what trains and how weights are held
    attention   "causal" counts the keys that a token sees, "full" all of them
    recompute   "none" (unless a Fusion says otherwise), "full" (each layer's forward), "mlp" (each feed-forward) or "selective": of
                fused layers the outputs of norm and SwiGLU; else all but attention and every second product (PyTorch's selective
                checkpointing, as torchtitan does it); `recompute_blocks` says how many layers do so, the first, and all without
                it (sk.fuse has neither "mlp" nor a number of blocks)
    optimizer   "adamw" (without it), "adamw8bit", "muon" (of hidden matrices, AdamW of the rest), "sgd" (without
                momentum, and so without state), "zenflow" or "offloadadamw" (states on the host), or an optimizer of ours;
                `state_dtype` is that of its moments, the weights' own without it
    dtype       of weights and gradients (bf16, or fp16 on a GPU without bf16 products; a live model's own); `master` adds float32
                masters
    zero        ZeRO stage over `gpus`, or those of them that are data-parallel: 1 shards optimizer states, 2 gradients too,
                3 weights too
    layers      "surokit" or "transformers": whose layers compute, which decides what is kept for the backward; a live model's own
                without it
    logits      "fused" with the loss, as our layers do, or "whole", as transformers' do
    accumulate  micro-batches of `batch` sequences whose gradients one optimizer step sums
    slack       share on top of the bytes that tensors take: fragmentation and workspace
    between_gb_s    GB/s that one GPU has between nodes, in one direction; a step beyond 8 GPUs communicates over it
    training    False counts a forward pass, and the KV cache in place of training's states
    fusion      "none", "fused" or a Fusion: which operations are computed together (sk.fuse)
    graphs      True: a step is captured as CUDA graphs, and the host launches nothing; the gaps between kernels stay
    transposed  W' of a frozen weight that is quantized for its products: "cached", or transposed "on the fly"; without it,
                `fusion` decides
    offload_weights     True, or how many are fetched ahead: the weights of blocks wait on the host (sk.offload_weights), and each
                block is computed again in backward
    offload_activations     True: what backward needs waits on the host (sk.offload_activations); "inputs": only those of blocks
    offload_states          True: the optimizer's states wait on the host, and the GPU updates with them over the link (as paged
                optimizers of bitsandbytes do); "offloadadamw" updates there
    engine      who makes the kernels, for times (memory is that of eager PyTorch): "eager" PyTorch, "compiled" by torch.compile,
                or "fused" by hand; without it "fused" where `fusion` fuses, else "eager"
    attention_kernel    for times: "sdpa", torch's scaled_dot_product_attention, "flash3": FlashAttention-3 and 4, or cuDNN's (as
                fast as "sdpa" on a GPU without instructions for them), or "triton", FlashAttention's first Triton kernel; without
                it "sdpa", which our layers take too, and "flash3" for another engine that is "fused" by hand
    optimizer_in_backward   True: each weight is updated as its gradient arrives, so that no two gradients are held
    tensor_parallel         GPUs that share each layer, and between its products the tokens (sequence parallel)
    pipeline_parallel       stages of layers, whose micro-batches (`accumulate`) come in the order 1F1B
    virtual_stages          parts of a stage's layers that take turns (interleaved 1F1B)
    expert_parallel         GPUs among the data-parallel ones that each have a part of the experts

    Raises ValueError or TypeError, in one sentence with the remedy, for figures that cannot be meant.
    """
    what = read_subject(what)
    return answer(Question(**locals()))


def answer(question: Question) -> Plan:
    """Answer a question: read it, count a step, take the time of it and of the run, and put the plan together."""
    asked = _as_a_session_decodes(read_question(question))
    run, setup, compute = asked.run, asked.setup, _compute(asked)
    flops = _model_flops(asked, compute)
    memory = count_memory(asked.subject.shape, asked.subject.parameters, asked.counted_recipe, setup)
    predicts = not run.has_rate and asked.gpu is not None and asked.gpu.ceilings is not None
    estimate = _estimate(asked, compute) if predicts else None
    time = count_time(
        flops,
        run,
        gpus=setup.gpus,
        gpu=asked.gpu,
        compute=compute,
        kinds=product_kinds(asked.carried)[: asked.factor // 2],
        estimate=estimate,
        waits_ms=None if estimate is None else _waits_ms(asked, memory, estimate),
    )
    found = Plan(
        title=_title(asked, flops),
        parameters=asked.subject.parameters,
        shape=asked.subject.shape,
        recipe=asked.recipe,
        setup=setup,
        tokens=run.tokens,
        gpu=asked.gpu,
        price=run.price,
        flops_per_token=float(flops.token),
        flops=None if flops.run is None else float(flops.run),
        flops_per_step=None if flops.step is None else float(flops.step),
        compute=compute,
        time=time,
        memory=memory,
        factor=asked.factor,
        notes=asked.subject.notes,
        source=plan_source(question, setup, asked.recipe),
        asked=asked,
    )
    found = replace(found, notes=(*found.notes, *plan_notes(found)))
    return found if asked.recipe is None or not asked.recipe.later else _over_the_run(found)


def _over_the_run(first: Plan) -> Plan:
    """Put the plan of a run together whose recipe changes, from the plans of its parts."""
    recipe = first.recipe
    plans = [first.but(recipe=part) for part in recipe.parts]
    begins = [0.0, *(_begins_at(change, first) for change in recipe.later), 1.0]
    if any(end < begin for begin, end in pairwise(begins)):
        raise ValueError(
            f"The changes of {recipe.name} are not in the order of this run: give them as they come, then(..., at=...)."
        )
    shares = [end - begin for begin, end in pairwise(begins)]
    notes = []
    for change, plan in zip(recipe.later, plans[1:]):
        step = (
            "" if plan.step_time is None else f", a step {units.value(plan.step_time.ms, 'ms')} ({plan.step_time.kind})"
        )
        notes.append(f"{change} the recipe is {change.recipe.name}{step}, {units.gib(plan.memory.gib)}")
    return replace(
        first,
        memory=max((plan.memory for plan in plans), key=lambda memory: memory.gib),
        time=time_in_parts(list(zip(shares, (plan.time for plan in plans)))),
        parts=tuple(zip(shares, plans)),
        notes=(*first.notes, *notes),
    )


def _begins_at(change: Change, plan: Plan) -> float:
    """Return the share of the run's steps after which a change comes; nan where nobody asks for times of a run."""
    if not isinstance(change.at, int):
        return change.at
    if plan.tokens is None:
        return math.nan
    if plan.flops is None or plan.flops_per_step is None:
        raise ValueError(
            f"The recipe changes {change}, and nothing says how many steps the run has: give batch= and length=, or a share of the "
            "run, then(..., at=0.9)."
        )
    return min(1.0, change.at * plan.flops_per_step / plan.flops)


def _as_a_session_decodes(asked: Asked) -> Asked:
    """Decide as a session on a CPU does whether stored weights are decoded once, where the recipe leaves that open."""
    recipe, setup = asked.recipe, asked.setup
    if setup.device != "cpu" or recipe == asked.subject.own.arguments.get("recipe"):
        return asked
    if not setup.training or getattr(recipe, "storage", None) is None or recipe.keeps_decoded is not None:
        return asked
    once = recipe.decode_once()
    terms = count_memory(asked.subject.shape, asked.subject.parameters, once, setup).terms
    decoded = sum(term.bytes for term in terms if term.name == "dequantized weight")
    room = room_for_decoded(asked.gpu.room_gib if asked.gpu else None)
    return replace(asked, recipe=once) if decoded <= room else asked


def _compute(asked: Asked) -> Compute | None:
    """Count the FLOPs of a token, product by product; None for a number of parameters."""
    if (shape := asked.subject.shape) is None:
        return None
    return step_flops(shape, asked.carried, asked.setup, asked.question.attention)


def _model_flops(asked: Asked, compute: Compute | None) -> ModelFlops:
    """Count the FLOPs of a token, a step and the run."""
    setup, tokens, step_tokens = asked.setup, asked.run.tokens, None
    if setup.batch is not None and setup.length is not None:
        step_tokens = setup.batch * setup.length * setup.accumulate * setup.replicas
    if compute is not None:
        token, again = Fraction(compute.model), compute.recompute / compute.model
    else:
        token = asked.factor * exact(asked.subject.active)
        again = _share_repeated(asked)
    return ModelFlops(
        token=token,
        run=None if tokens is None else token * exact(tokens),
        step=None if step_tokens is None else token * step_tokens,
        step_tokens=step_tokens,
        recompute_share=again,
    )


def _share_repeated(asked: Asked) -> float:
    """Return the FLOPs that are recomputed, as a share of the model FLOPs, for a number of parameters: each layer's forward, or
    what a typical shape has of it."""
    setup = asked.setup
    if not setup.training or setup.repeats == "none":
        return 0.0
    if (typical := typical_shape(asked.subject.parameters)) is None:
        return 2 / asked.factor
    some = count_flops(typical[0], length=None, recompute=setup.repeats, early_stop=setup.early_stop)
    whole = count_flops(typical[0], length=None, recompute="full", early_stop=False)
    return 2 / asked.factor * some.recompute / whole.recompute


def _estimate(asked: Asked, compute: Compute | None) -> Estimate | None:
    """Estimate a step's time; None where shape, batch, length or the rates of the GPU are missing."""
    shape, recipe, setup, trained = asked.subject.shape, asked.recipe, asked.setup, asked.trained_parameters
    if (blocks := blocks_of(shape, recipe, setup)) is not None:
        trained -= sum(blocks.trained)  # are updated on the host
    return estimate_step(
        shape, compute, recipe, setup, asked.gpu, trained_parameters=trained, between_gb_s=asked.question.between_gb_s
    )


def _waits_ms(asked: Asked, memory: Memory, estimate: Estimate) -> float | None:
    """Predict what a step waits for the host; None where nothing waits there, or its rates are not known."""
    host = host_of(asked.gpu) if asked.setup.offloads and asked.gpu is not None else None
    if host is None:
        return None
    step_ms = offload_plan.with_offload(asked, memory, estimate.step_ms, host, estimate.forward_share)
    return step_ms - estimate.step_ms


def _title(asked: Asked, flops: ModelFlops) -> str:
    """Say in a line what is planned."""
    recipe, setup, tokens = asked.recipe, asked.setup, asked.run.tokens
    parts = [asked.subject.name]
    if recipe is not None:
        rank = getattr(getattr(recipe, "adapter", None), "rank", 0)
        parts.append(f"recipe {getattr(recipe, 'name', recipe)}{f', LoRA rank {rank}' * bool(rank)}")
    if tokens is not None:
        parts.append(f"{units.count(tokens)} tokens")
    if flops.step_tokens is not None:
        times = f" x {setup.accumulate}" if setup.accumulate > 1 else ""
        of_each = "" if setup.replicas == 1 else " and GPU" if setup.replicas == setup.gpus else " and replica"
        parts.append(f"{setup.batch} x {setup.length}{times} tokens a step{of_each}")
    if setup.division.divides:
        parts.append(setup.division.words)
    if setup.zero and setup.replicas > 1 and setup.training:
        parts.append(f"ZeRO-{setup.zero}")
    if setup.training and setup.recompute != "none":
        blocks = f" of {setup.recompute_blocks} blocks" if setup.recompute_blocks else ""
        parts.append(f"recompute {setup.recompute}{blocks}")
    if setup.training and setup.optimizer != "adamw":
        parts.append("SGD" if setup.optimizer == "none" else setup.optimizer)
    if setup.fusion.fuses or asked.graphs:
        parts.append(" ".join(["fused"] * setup.fusion.fuses + ["in CUDA graphs"] * asked.graphs))
    if asked.gpu is not None or setup.gpus > 1:
        parts.append(f"{setup.gpus:,} x {asked.gpu.name if asked.gpu else 'GPU'}")
    return ", ".join(parts)
