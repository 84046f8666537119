"""Say a plan in words: the answers first, then every term with its kind (exact, approximate, bound, predicted), then the notes.

Of how a figure comes about only the first clause is printed; `plan.table()` has all of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from surokit import units
from surokit.formats import TENSOR_CORES
from surokit.hardware.gpus import BF16_FROM, Gpu
from surokit.planner.compare.published import PLAUSIBLE_MFU, USUAL_MFU
from surokit.planner.counts.flops import (
    frozen,
    gemms_of,
    on_gpu,
    operand_bits,
    product_kinds,
    trained_parameters,
    unmet_targets,
)
from surokit.planner.counts.memory import Memory, Setup
from surokit.planner.counts.transformers_activations import PLAIN_ATTENTION
from surokit.planner.inputs.configs import FAMILIES
from surokit.planner.inputs.fusion import read_fusion
from surokit.planner.inputs.question import Question
from surokit.planner.inputs.typical import typical_shape
from surokit.planner.offload.formulas import INTERVAL, OFFLOADING
from surokit.planner.times.cost import Time
from surokit.planner.times.likely import Likely
from surokit.recipe import PROJECTIONS
from surokit.tables import html_table, text_table

if TYPE_CHECKING:
    from surokit.planner.planning import Plan

_SEEN = {"causal": "a token sees half the sequence", "full": "every token sees the whole sequence"}
_BRIEF = 72  # characters


@dataclass(frozen=True)
class Line:
    """A Line is one row of a plan's table. `kind` is given, exact, approximate, prediction or bound."""

    group: str
    term: str
    value: float
    unit: str
    kind: str
    how: str

    @property
    def text(self) -> str:
        """Return the value with its unit."""
        return units.value(self.value, self.unit)

    @property
    def brief(self) -> str:
        """Return the first clause of `how`, without what stands in brackets."""
        return shorten(self.how.partition("; ")[0].partition(" (")[0], _BRIEF, placeholder=" …")


def verdict(plan: Plan) -> tuple[str, bool]:
    """Return a sentence that says whether the plan fits, and True if it does not fit."""
    memory = plan.memory
    needed = units.gib(memory.gib)
    if memory.left_out:
        needed = f"at least {needed}, without {memory.left_out[0].partition(',')[0]},"
    elif plan.shape is None:
        needed = f"about {needed}"
    peak = "" if memory.peak_phase is None else f" at its peak in the {memory.peak_phase}"
    most = f"{peak}, most of it {memory.largest.name}"
    limit, on_cpu = plan.room_gib, _on_cpu(plan)
    if limit is None:
        return f"Holds {needed} on {'the CPU' if on_cpu else 'each GPU'}{most}", False
    room = f"of the machine's {limit:g} GiB"
    if not on_cpu and plan.gpu is not None:
        room = f"of the {units.gib(limit)} that {plan.gpu.name} offers"
    if memory.gib > limit:
        return f"Does not fit: {needed} {room}{most}", True
    word = "Holds" if memory.left_out else "Fits:"
    return f"{word} {needed} {room}{most}", False


def plan_source(question: Question, setup: Setup, recipe: Any) -> str:
    """Say in a line what was taken from a live model or session because it was not given; "" where nothing live is planned."""
    own, given = question.what.own, question.given
    if not own.source:
        return ""
    said = []
    if "recipe" not in given:
        rank = getattr(getattr(recipe, "adapter", None), "rank", 0)
        whose = "PEFT's adapters" if own.trained and own.trained.peft else "adapters"
        said.append(f"recipe {recipe.name}" if recipe is not None else "no recipe")
        said += [f"{whose} of rank {rank}"] if rank else []
    if setup.trained is not None:
        said.append(f"{setup.trained.parameters:,} parameters train")
    if "fusion" not in given:
        how = str(own.arguments["fusion"]) if "fusion" in own.arguments else "as a Decoder on CUDA is"
        said.append(f"fused ({how})" if setup.fusion.fuses else "not fused")
    if setup.recompute != getattr(own.arguments.get("fusion"), "recompute", "none") and "recompute" not in given:
        said.append(f"recompute {setup.recompute}")
    host = {"offload_weights": setup.prefetch, "offload_activations": setup.offload_activations}
    for name, planned in host.items():
        what = name.removeprefix("offload_")
        if name not in given and (planned or (setup.device == "cpu" and own.arguments.get(name))):
            said.append(f"{what} on the host" if planned else f"{what} streamed, within the CPU's own memory")
    said += [] if "dtype" in given else [setup.dtype]
    said += [] if "gpu" in given else [f"on a {'CPU' if setup.device == 'cpu' else 'GPU'}"]
    if "optimizer" in own.arguments and "optimizer" not in given:
        said.append(f"optimizer {'sgd' if setup.optimizer == 'none' else setup.optimizer}")
    if "batch" in own.arguments and not {"batch", "length"} & set(given):
        said.append(f"{setup.batch} x {setup.length} tokens")
    if "accumulate" in own.arguments and "accumulate" not in given:
        said.append(f"accumulate {setup.accumulate}")
    said += ["in CUDA graphs"] if setup.graphs and "graphs" not in given else []
    return f"Taken from {own.source}: {', '.join(said)}" if said else ""


def _other_than_live(plan: Plan) -> Iterator[str]:
    """Yield where a given argument differs from what the live model or session has, and what of it a plan cannot follow."""
    own, setup = plan.subject.own, plan.setup
    if "recipe" in plan.given and own.source and not own.has(plan.recipe):
        yield f"recipe {plan.recipe.name} is planned as given; {own.source} has {_with_rank(own.arguments.get('recipe'))}"
    fusion = own.arguments.get("fusion") if "fusion" in plan.given else None
    if fusion is not None and setup.fusion != read_fusion(fusion, None, None)[0]:
        yield f"the fusion is planned as given; {own.source} has: {fusion}"
    if plan.subject.dtype not in (None, setup.dtype):
        yield f"{setup.dtype} is planned as given; {own.source} is in {plan.subject.dtype}"
    if setup.trained is not None and setup.trained.peft and setup.fusion.fuses:
        yield (
            "layers that PEFT wraps compute by themselves: memory is planned as if nothing were fused but the loss, "
            "time as if they were fused too"
        )
    every = trained_parameters(plan.shape, plan.parameters, plan.recipe)
    if setup.trained is not None and setup.division.divides and setup.trained.parameters != every:
        yield f"what trains of {own.source} is taken to be spread evenly over the GPUs that share it"
    yield from own.notes if setup.trained is not None or plan.given.get("recipe") is None else ()


def _with_rank(recipe: Any) -> str:
    if recipe is None:
        return "none"
    return recipe.name + (f" with adapters of rank {recipe.adapter.rank}" if recipe.adapter else "")


def plan_answers(plan: Plan) -> Iterator[str]:
    """Yield whether the plan fits, how long it takes and what it costs, a line each where it is known."""
    words, too_large = verdict(plan)
    # blocks that are streamed come whole
    shardable = plan.setup.replicas > 1 and not plan.setup.zero and not plan.setup.prefetch
    if too_large and shardable and not verdict(plan.but(zero=3))[1]:
        words = words.replace("Does not fit", "Does not fit unsharded")
    yield f"{words}; plan.fitting() says what helps" if too_large else words
    t, estimate = plan.time, plan.estimate
    alone = ", without the offload" if plan.setup.offloads and t.waits_ms is None else ""
    rate = f"at the {t.rate_kind if t.rate_kind == 'given' else 'predicted'} {t.rate_tflops or 0:,.4g} TFLOPS"
    if t.days is not None and t.gpu_hours is not None:
        hours = "" if _on_cpu(plan) else f"{units.value(t.gpu_hours, 'GPU hours')}, "
        yield f"Takes {units.days(t.days)} on {_gpus(plan)}, {hours}{rate}{' of each' * (not _on_cpu(plan))}{alone}"
    elif plan.likely is not None and (found := plan.likely_days) is not None:
        days, low, high = found
        within = f"eight of ten runs within {units.days(low)} to {units.days(high)}"
        yield f"Likely takes {units.days(days)} on {_gpus(plan)}, {within}: {plan.likely.how}"
        if plan.price is not None:
            gpu_hours = [each * 24 * plan.setup.gpus for each in found]
            usd = units.span(gpu_hours[1] * plan.price.low, gpu_hours[2] * plan.price.high, "USD")
            yield f"Likely costs {usd}: {units.span(gpu_hours[1], gpu_hours[2], 'GPU hours')} at {plan.price}"
    elif t.floor_days is not None:
        yield f"Takes at least {units.days(t.floor_days)} on {_gpus(plan)}; a prediction needs a rate"
    elif t.step_ms is not None:
        yield f"A step takes {units.value(t.step_ms, 'ms')} {rate}{' of each GPU' * (not _on_cpu(plan))}{alone}"
    elif plan.likely is not None and plan.parts and (time := plan.step_time) is not None:
        each = [units.value(part.step_time.ms, "ms") for _, part in plan.parts if part.step_time is not None]
        said = f"{units.value(time.ms, 'ms')} in the mean over the run ({', then '.join(each)})"
        if any(math.isnan(share) for share, _ in plan.parts):  # of a run whose steps nobody told
            said = ", then ".join(each)
        yield f"A step likely takes {said}: {plan.likely.how}"
    elif plan.likely is not None:
        yield f"A step likely takes {units.value(plan.likely.step_ms, 'ms')}, {_within(plan.likely)}: {plan.likely.how}"
    elif estimate is not None:
        yield f"A step takes {units.value(estimate.step_ms, 'ms')} ({estimate.kind}): {estimate.how.partition(';')[0]}{alone}"
    for change, (share, _) in zip(plan.recipe.later if plan.parts else (), plan.parts[1:]):
        if share == 0 and plan.flops and plan.flops_per_step:
            steps = math.ceil(plan.flops / plan.flops_per_step)
            yield f"The change to {change.recipe.name} {change} never comes: the run ends after {steps:,}"
    if plan.usd_range is not None:
        yield f"Costs {units.span(*plan.usd_range, 'USD')}: {_hours(plan)} at {plan.price}"


def _within(likely: Likely) -> str:
    return f"eight of ten runs within {units.span(likely.low_ms, likely.high_ms, 'ms')}"


def plan_lines(plan: Plan) -> Iterator[Line]:
    """Yield the lines of the table: model, compute, time and cost, memory."""
    how, kind = "as given", "given"
    if (s := plan.shape) is not None:
        kind = _counted(plan)
        how = s.words
    yield Line("model", "parameters", plan.parameters, "parameters", kind, how)
    if s is not None and s.experts is not None:
        yield Line("model", "  active", s.active_parameters, "parameters", kind, "what a token passes: the N of 6ND")
    yield from _compute(plan)
    yield from _time(plan)
    yield from _estimate(plan)
    yield from _memory(plan.memory, f"memory of one {_device(plan)}")


def _counted(plan: Plan) -> str:
    """Return the kind of what is counted from shapes: exact for a family whose configs are read as its models are built."""
    return "exact" if plan.shape is not None and plan.shape.family in FAMILIES else "approximate"


def _compute(plan: Plan) -> Iterator[Line]:
    line = partial(Line, "compute")
    rule, times = f"{plan.factor}ND", f"{plan.factor} x parameters x tokens"
    compute, kind = plan.compute, _counted(plan)
    if compute is None:
        if plan.flops is not None:
            yield line(f"FLOPs, {rule}", plan.flops, "FLOP", "approximate", f"{times}; leaves attention's products out")
        how = f"{plan.factor} x parameters; leaves attention's products out"
        yield line(f"FLOPs a token, {plan.factor}N", plan.flops_per_token, "FLOP", "approximate", how)
        return
    if plan.flops is not None and plan.tokens is not None:
        yield line("FLOPs", plan.flops, "FLOP", kind, "FLOPs a token x tokens")
        rough = plan.factor * plan.subject.active * plan.tokens
        yield line(f"FLOPs, {rule}", rough, "FLOP", "approximate", f"{times}, to compare")
    share = compute.attention_share
    how = f"attention {share:.1%}, {_SEEN[compute.attention]}" if share else "attention left out"
    yield line("FLOPs a token", plan.flops_per_token, "FLOP", kind, f"product by product, {how}")
    yield line("  forward", compute.forward, "FLOP", kind, "")
    if compute.backward:
        how = "no weight gradient of the frozen base" if frozen(plan.recipe) else ""
        yield line("  backward", compute.backward, "FLOP", kind, how)
    if compute.recompute:
        how = f"{compute.recomputed}; hardware FLOPs, not model FLOPs"
        yield line("  recompute", compute.recompute, "FLOP", kind, how)
    if plan.flops_per_step is not None:
        yield line("FLOPs a step", plan.flops_per_step, "FLOP", kind, _gpus(plan))


def _time(plan: Plan) -> Iterator[Line]:
    line, t = partial(Line, "time and cost"), plan.time
    if t.rate_tflops is not None:
        how = t.rate_how
        if how == "as given" and t.mfu is not None:
            how = f"MFU {t.mfu:.1%} of {t.peak}, {t.peak_tflops:g} TFLOPS"
        if t.hfu is not None and t.mfu is not None and t.hfu > t.mfu:
            how += f", HFU {t.hfu:.1%}"
        yield line(f"rate of one {_device(plan)}", t.rate_tflops, "TFLOPS", t.rate_kind, how)
    if t.goodput < 1:
        yield line("goodput", t.goodput, "share", "given", "share of the hours that makes progress")
    if t.days is not None and t.gpu_hours is not None:
        yield line("time", t.days, "days", "prediction", f"FLOPs / {_gpus(plan)} / rate / goodput")
        yield line(_hours(plan), t.gpu_hours, _hours(plan), "prediction", f"time x {_device(plan)}s")
    if t.usd is not None:
        how = f"{_hours(plan)} x {plan.price}, as given"
        low, high = plan.usd_range or (t.usd, t.usd)
        if low < high:
            how = f"the middle of {units.span(low, high, 'USD')}; {how}"
        yield line("cost", t.usd, "USD", "prediction", how)
    if plan.kwh is not None:
        how = f"GPU hours x {plan.gpu.watts if plan.gpu else 0:g} W, the GPU's power limit; hosts left out"
        yield line("energy, at most", plan.kwh, "kWh", "bound", how)
    if t.step_ms is not None and t.tokens_per_s is not None:
        yield line("step", t.step_ms, "ms", "prediction", f"FLOPs a step / {_gpus(plan)} / rate")
        yield line("tokens a second", t.tokens_per_s, "tokens/s", "prediction", _gpus(plan))
    if t.rate_tflops is None and t.floor_days is not None:
        how = ", then ".join(dict.fromkeys(part.time.floor_how for _, part in plan.parts)) or t.floor_how
        yield line("time, at least", t.floor_days, "days", "bound", how)
    if t.rate_tflops is None and t.floor_step_ms is not None:
        yield line("step, at least", t.floor_step_ms, "ms", "bound", t.floor_how)


def _estimate(plan: Plan) -> Iterator[Line]:
    if (likely := plan.likely) is not None:
        line = partial(Line, f"a step, likely{_of_the_first(plan)}")
        how = f"{_within(likely)}; {likely.how}"
        yield line("step, likely", likely.step_ms, "ms", "prediction", how)
        yield line(
            "tokens a second, likely", likely.tokens_per_s, "tokens/s", "prediction", f"{_gpus(plan)}; {likely.how}"
        )
        for name, ms in likely.made_of.items():
            yield line(f"  {name}", ms, "ms", "prediction", f"{ms / likely.step_ms:.0%} of the step")
    if plan.estimate is not None:
        for term, value, unit, kind, how in plan.estimate.lines():
            yield Line(f"a step, by what it does{_of_the_first(plan)}", term, value, unit, kind, how)


def _of_the_first(plan: Plan) -> str:
    return ", before the recipe changes" if plan.parts else ""


def _gpus(plan: Plan) -> str:
    return f"{plan.setup.gpus:,} {_device(plan)}{'' if plan.setup.gpus == 1 else 's'}"


def _on_cpu(plan: Plan) -> bool:
    return plan.setup.device == "cpu"


def _device(plan: Plan) -> str:
    return "CPU" if _on_cpu(plan) else "GPU"


def _hours(plan: Plan) -> str:
    return "hours" if _on_cpu(plan) else "GPU hours"


def _memory(memory: Memory, group: str) -> Iterator[Line]:
    line = partial(Line, group)
    for term in memory.terms:
        if term.counted:
            how = term.how
            if term.bytes < 0.99 * term.most:
                how = f"{units.gib(term.most_gib)} at its fullest: {how.partition('; at the peak')[0]}"
            yield line(term.name, term.gib, "GiB", "exact" if term.exact else "approximate", how)
    how = f"exact {units.gib(memory.exact_gib)} + approximate {units.gib(memory.approximate_gib)}"
    if memory.left_out:
        how += f"; without {memory.left_out[0].partition(':')[0]}"
    yield line("total", memory.gib, "GiB", "approximate", how)
    for term in memory.host:
        yield Line("memory of the host", term.name, term.gib, "GiB", "exact" if term.exact else "approximate", term.how)


def narrow_moments(plan: Plan) -> str:
    """Say that moments are as narrow as the weights that they update; "" where they are not, or nothing of the base trains."""
    setup = plan.setup
    name = {"adamw": "sk.AdamW", "muon": "sk.Muon"}.get(setup.optimizer)
    narrow = name is not None and setup.state_dtype == setup.dtype != "fp32"
    if not setup.training or not narrow or frozen(plan.recipe):
        return ""
    return f"moments are in {setup.dtype} and there are no float32 masters, as {name} has it"


def plan_notes(plan: Plan) -> Iterator[str]:
    """Yield what a reader must know beside the figures: what is left out, assumed, or out of the ordinary."""
    shape, setup, time, gpu = plan.shape, plan.setup, plan.time, plan.gpu
    yield from _other_than_live(plan)
    for text in plan.memory.left_out:
        yield f"memory leaves out {text}"
    if shape is None and not plan.memory.left_out and (typical := typical_shape(plan.parameters)) is not None:
        yield f"memory is that of a typical shape, after {typical[1]}: {typical[0].words}; a config gives the model's own"
    if setup.replicas > 1 and not setup.zero:
        yield "every GPU is taken to hold all states: give zero=1, 2 or 3 to shard them over the GPUs"
    if setup.replicas == 1 and setup.zero:
        yield f"zero={setup.zero} shards nothing on one {'GPU' if setup.gpus == 1 else 'replica'}: give gpus="
    if setup.fusion.fuses and (setup.recompute == "mlp" or setup.recompute_blocks):
        yield "sk.fuse computes again what recompute='selective' or 'full' says, in all blocks: this step is of other programs"
    if moments := narrow_moments(plan):
        yield f"{moments}: state_dtype='fp32', master=True adds them"
    if gpu is not None and not gpu.has_bf16:
        yield from _without_bf16(gpu, setup)
    if shape is not None and setup.length is None:
        yield "attention's products are left out of the FLOPs: give length="
    if shape is None and frozen(plan.recipe) and setup.training:
        yield "an adapter's own FLOPs need a config and are left out; the frozen base makes 4ND"
    if setup.training and frozen(plan.recipe) and getattr(plan.recipe, "adapter", None) is None:
        yield f"nothing trains: {plan.recipe.name} freezes the base and has no adapter; add one with .lora()"
    if setup.training and shape is not None and (unmet := unmet_targets(shape, plan.recipe)):
        targets = plan.recipe.adapter.targets
        if unmet == targets:
            yield f"nothing trains: no linear layer that is planned is called {', '.join(unmet)}"
        elif targets != PROJECTIONS:
            yield f"the adapter's target {', '.join(unmet)} matches no layer that is planned"
    if setup.offloads:
        yield from _offloaded(plan)
    plain = shape is not None and shape.family in PLAIN_ATTENTION and setup.engine != "fused"
    if plain and "attention_kernel" not in plan.given and plan.estimate is not None:
        yield (
            "attention is plain operations on all scores in transformers' layers of this family; memory counts them, and times are "
            "those of a fused kernel: expect longer steps, or say by attention_kernel= which one computes it"
        )
    if time.rate_tflops is None and not plan.has_likely:
        wanted = ["tflops_per_gpu="]
        if gpu is None or gpu.plain_tflops is not None:
            wanted.append("mfu=" + ("" if gpu else " with gpu="))
        if (shape is not None and setup.training) or len(wanted) == 1:
            wanted.append("gpu=sk.calibrate()")
        cost = " and cost" if plan.price is not None else ""
        yield f"no time{cost} is predicted without a rate: give {', or '.join(wanted)}{_usual(plan)}"
    elif plan.tokens is None:
        yield "time and cost of the run need tokens="
    if _too_fast(time):
        rate = f"{time.rate_tflops:,.4g} TFLOPS"
        yield f"no run is that fast, {rate} is beyond {time.floor_how}: give a lower rate, or the recipe that has fewer bits"
    elif time.mfu is not None and time.mfu > PLAUSIBLE_MFU[1]:
        yield f"MFU {time.mfu:.0%} of {time.peak} is above what published steps reach, mostly {_USUAL}"
    if gpu is not None and gpu.plain_tflops is not None:
        yield from _peaks(on_gpu(plan.recipe, gpu), gpu)


def _without_bf16(gpu: Gpu, setup: Setup) -> Iterator[str]:
    """Yield what has to be known of a GPU that does not multiply bf16."""
    older = f"{gpu.name} does not multiply bf16 (compute capability {_dotted(gpu.capability)}; from {_dotted(BF16_FROM)} on)"
    if setup.dtype == "fp16":
        yield f"{older}: fp16 is planned, and training in it needs loss scaling; dtype='fp32' plans float32"
    elif setup.dtype == "bf16":
        yield f"{older}: bf16 is computed as float32, and counts at that peak; dtype='fp16' uses its tensor cores"
    yield f"surokit's kernels begin at compute capability {_dotted(BF16_FROM)} too: plain PyTorch runs there, slower than estimated"


def _dotted(capability: tuple[int, int] | None) -> str:
    return ".".join(map(str, capability or ()))


def _offloaded(plan: Plan) -> Iterator[str]:
    """Yield whether the times count what a step waits for the host, and how to predict it where they do not."""
    setup, time = plan.setup, plan.time
    asks = "streamed" if setup.prefetch else "offload"
    if time.waits_ms is not None:
        waits = units.value(time.waits_ms, "ms")
        yield f"times count {waits} a step that {setup.offloads} on the host add, at calibrated rates; the estimate is without"
    elif time.step_ms is not None or time.days is not None or plan.estimate is not None:
        host = "planner.Host(link_gb_s=50, adam_params_s=2e9)"
        predicts = "gpu=sk.calibrate() measures the rates"
        if setup.prefetch or setup.optimizer in OFFLOADING:
            predicts = f"plan.{asks}({host}) predicts a step with it, and {predicts}"
        if setup.device == "cpu":
            predicts = "a CPU has no link to itself whose rate could be known; plan with gpu='H100' or the like"
        if time.step_ms is None and plan.has_likely:
            yield f"the likely step counts what {setup.offloads} on the host add, as published hosts had it; {predicts}"
            return
        yield f"times are without what {setup.offloads} on the host add: {predicts}"
    if plan.deferral.get("update_interval") == "auto":
        yield f"how long ZenFlow's windows by the 'auto' rule are is not known: they are taken to have {INTERVAL} steps"
    if plan.given.get("graphs"):
        yield "steps with something on the host are not recorded as CUDA graphs: graphs=True is left out"


def _too_fast(time: Time) -> bool:
    """True if the rate is beyond what the products can reach, by more than a thousandth, which rounding may make."""
    run = None if time.days is None else time.days * time.goodput
    pairs = ((run, time.floor_days), (time.step_ms, time.floor_step_ms))
    return any(own is not None and least is not None and own < 0.999 * least for own, least in pairs)


def _peaks(recipe: Any, gpu: Gpu) -> Iterator[str]:
    """Yield the peaks that the quantized products of a recipe are counted at."""
    emulated: dict[str, dict[str, None]] = {}
    unknown, known = set(), set()
    for gemm in gemms_of(recipe):
        if (bits := operand_bits(gemm)) == 16:
            continue
        _, peak = gpu.peak(gemm.kind)
        if not gpu.multiplies(gemm.kind):
            where = f"native on {TENSOR_CORES[gemm.kind].where}" if gemm.kind else "native on no GPU"
            emulated.setdefault(where, {}).update({f"{q.format} {q.scaling}": None for q in (gemm.a, gemm.b)})
        elif peak == gpu.peak()[1]:
            unknown.add(f"{bits}-bit")
        else:
            known.add(peak)
    for where, operands in emulated.items():
        what = " and ".join(operands)
        yield f"products of {what} count at {gpu.name}'s {gpu.plain} peak (emulated: no product for them there, {where})"
    if unknown:
        yield f"{gpu.name} has no known peak for {' and '.join(sorted(unknown))} operands: they count at its {gpu.plain} peak"
    if known:
        peaks = " and ".join(sorted(known))
        yield f"a share of the {gpu.plain} peak says little with products at {peaks}; a bound takes each at its own"


_USUAL = f"{USUAL_MFU[0]:.0%} to {USUAL_MFU[1]:.0%}"


def _usual(plan: Plan) -> str:
    """Say what published rates would make of it; only where every product runs at the BF16 peak, which they are shares of."""
    gpu, floor = plan.gpu, plan.time.floor_days
    if gpu is None or floor is None or any(gpu.peak(k) != gpu.peak() for k in product_kinds(on_gpu(plan.recipe, gpu))):
        return ""
    low, high = (units.days(floor / share) for share in reversed(USUAL_MFU))
    return f"; at the {_USUAL} of the {gpu.plain} peak at which most published steps run it would be {low} to {high}"


def as_text(title: str, answers: Iterable[str], lines: Sequence[Line], notes: Sequence[str]) -> str:
    """Return the answers, the lines by group, in one alignment, and the notes."""
    body = text_table([(line.term, line.text, line.kind, line.brief) for line in lines], right=(1,), indent="    ")
    parts, group = [title, *(f"  {answer}" for answer in answers)], ""
    for line, row in zip(lines, body.splitlines()):
        if line.group != group:
            group = line.group
            parts += ["", f"  {group}"]
        parts.append(row)
    if notes:
        parts += ["", *(f"  note: {note}" for note in notes)]
    return "\n".join(parts)


def as_html(title: str, answers: Iterable[str], lines: Sequence[Line], notes: Sequence[str]) -> str:
    """Return the plan as an HTML table and a list of notes."""
    rows: list[tuple[str, ...]] = []
    group = ""
    for line in lines:
        if line.group != group:
            group = line.group
            rows.append((group,))
        rows.append((line.term.replace("  ", "\u2003"), line.text, line.kind, line.brief))
    head = "".join(f"<div>{escape(answer)}</div>" for answer in answers)
    table = f"<b>{escape(title)}</b>{head}" + html_table(rows, header=("", "", "kind", "how"), right=(1,))
    return table + ("<ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>" if notes else "")
