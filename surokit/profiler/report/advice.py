"""Turn the tables of a profile into advice by rules: each piece with its evidence, the line where there is one, and the
milliseconds a step that it may bring.

A rule is a function from the tables (`Seen`) to rows. It gives a row only where its gain is worth it (1 % of the step, more
where the evidence is indirect), or where it found something that never belongs in a training loop: a read of a device
value, anomaly mode, more threads than cores. A gain is an upper bound from this profile, never more than the lost or busy
time that it rests on, less the profiler's own share of it; `Profile.verify` measures one. Two rules may claim the same
milliseconds, and then each says so.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from surokit.profiler.analysis.roles import DATA_RANGES, Table, place_text

WORTH = 0.01  # share of the step below which a rule keeps silent
MOST_OF_IT = 0.5  # the least own share: on a busy machine the profiler's costs come out too high
TINY_MS = 0.01  # an operator that takes less on a CPU does next to nothing
LARGE = 0.25  # share of the step from which a part is named though nothing of it is lost
SLOWEST_WORTH = 0.03  # share of the step that ranks wait for the slowest, below which it is not named
EVERY = 20  # steps between two reads of a value that is only shown


@dataclass(frozen=True)
class AdviceRow:
    """An AdviceRow is one piece of advice; `parts` are the parts of the step (causes, or "busy") that its milliseconds come from,
    the main one first."""

    rule: str
    advice: str
    evidence: str
    gain_ms: float
    parts: tuple[str, ...]
    file: str = ""
    line: int = 0


@dataclass(frozen=True)
class Seen:
    """A Seen holds the tables of one profile, and answers the questions of the rules. Times are milliseconds a step."""

    summary: Mapping[str, Any]
    tables: Mapping[str, Table]
    settings: Mapping[str, str]

    @property
    def wall(self) -> float:
        return float(self.summary["wall_ms"])

    @property
    def on_gpu(self) -> bool:
        return bool(self.summary["activity"] == "gpu")

    def worth(self, ms: float, times: float = 1) -> bool:
        return ms >= times * WORTH * self.wall

    def held(self, *parts: str) -> float:
        """Return the milliseconds in some parts of the step: causes of lost time, or "busy"."""
        lost = self.tables["lost"]
        by_part = dict(zip(lost["cause"], lost["ms_per_step"])) | {"busy": self.summary["busy_ms"]}
        return sum(float(by_part.get(part, 0.0)) for part in parts)

    def phase(self, name: str) -> float:
        return float(self.summary["phases_ms"].get(name, 0.0))

    def own_share(self, part: str) -> float:
        """Return the share of a part of the step that is left without the profiler, which slows operators and launches
        about evenly."""
        slowed = part == "launches" or (part == "busy" and not self.on_gpu)
        return max(1 - self.summary.get("overhead_ms", 0.0) / self.wall, MOST_OF_IT) if slowed else 1.0

    def rows(self, table: str, columns: str) -> Iterator[tuple[Any, ...]]:
        return zip(*(self.tables[table][column] for column in columns.split()))

    @cached_property
    def calls(self) -> dict[str, float]:
        """Return the calls a step of each operator on the host."""
        return dict(self.rows("ops", "op calls"))

    def called(self, *operators: str) -> float:
        return sum(self.calls.get(f"aten::{name}", 0.0) for name in operators)

    def spent(self, operators: str, kernels: str, column: str = "ms", table: str = "ops") -> float:
        """Return the time in operators with these names on a CPU; on a GPU that of the kernels whose names match, with the
        launching of the operators as far as launches cost anything."""
        names = {f"aten::{name}" for name in operators.split()}
        on_host = sum(ms for name, ms in self.rows(table, f"op {column}") if name in names)
        if not self.on_gpu:
            return float(on_host)
        on_device = sum(ms for name, ms in self.rows("kernels", "kernel self_ms") if re.search(kernels, name))
        return float(on_device + min(on_host, self.held("launches")))

    def modules_like(self, pattern: str) -> float:
        """Return the own time of the modules whose class name matches."""
        return float(sum(ms for kind, ms in self.rows("modules", "type self_ms") if re.search(pattern, kind, re.I)))

    def place_inside(self, ranges: tuple[str, ...]) -> tuple[str, int]:
        """Return the line that lost most in gaps inside ranges named so; ("", 0) when none was sampled."""
        lost: dict[tuple[str, int], float] = defaultdict(float)
        for file, line, ms, inside in self.rows("lines", "file line ms inside"):
            if file and inside.startswith(ranges):
                lost[file, line] += ms
        return max(lost, key=lambda place: lost[place], default=("", 0))


Rule = Callable[[Seen], Iterator[AdviceRow]]


def advise(summary: Mapping[str, Any], tables: Mapping[str, Table], settings: Mapping[str, str] | None = None) -> Table:
    """Return the advice table, largest gain first: rule, advice, evidence, gain_ms, file, line. `settings` are a
    Recording's, as a dict."""
    rows: list[AdviceRow] = []
    if summary["wall_ms"] and summary["activity"] != "unknown":
        seen = Seen(summary, tables, settings or {})
        found = [_bounded(seen, row) for rule in RULES for row in rule(seen)]
        found.sort(key=lambda row: -row.gain_ms)
        rows = [replace(row, evidence=row.evidence + _claimed_too(seen, row, found)) for row in found]
    return _table(rows)


def _table(rows: list[AdviceRow]) -> Table:
    columns = ("rule", "advice", "evidence", "gain_ms", "file", "line")
    return {name: [getattr(row, name) for row in rows] for name in columns}


def nothing_to_win(summary: Mapping[str, Any], advice: Table) -> str:
    """Return a sentence that says what the step is made of, where no advice is worth anything; "" where some is."""
    wall, phases = summary["wall_ms"], summary["phases_ms"]
    if not wall or summary["activity"] == "unknown" or max(advice["gain_ms"], default=0.0) >= WORTH * wall:
        return ""
    phase, ms = max(phases.items(), key=lambda item: float(item[1]))
    most = f"most of it is {phase} ({ms / wall:.0%})"
    return f"no advice can win {WORTH:.0%} of the step: {most}, which less work, fewer bits or a faster device make shorter"


def _bounded(seen: Seen, row: AdviceRow) -> AdviceRow:
    return replace(row, gain_ms=min(row.gain_ms * seen.own_share(row.parts[0]), seen.held(*row.parts), seen.wall))


def _claimed_too(seen: Seen, row: AdviceRow, rows: list[AdviceRow]) -> str:
    """Name the other rules with which this one claims more than the parts hold that both draw on."""
    others = []
    for other in rows:
        common = set(row.parts) & set(other.parts)
        if other.rule != row.rule and common and row.gain_ms + other.gain_ms > seen.held(*common) * (1 + 1e-9):
            others.append(other.rule)
    return f"; may be partly the same time as: {', '.join(dict.fromkeys(others))}" if others else ""


# ------------------------------------------------------------------------------------------------------------------- syncs

_SHAPED_BY_VALUES = ("nonzero", "masked_select", "unique")
_REMEDY_INSIDE = (  # where a library reads a value -> what the user can do about it
    ("torch/nn/utils/clip_grad", "leave out error_if_nonfinite=True and look at the norm it returns every {n} steps"),
    ("torch/amp/grad_scaler", "train in bfloat16, which needs no GradScaler"),
    ("torch/optim/", "make the optimizer with fused=True or capturable=True, which keep its counters on the device"),
    ("torch/_tensor", "print or format the value every {n} steps"),
    ("torch/autograd/", "it is the backward of an index by a mask: use torch.where, or multiply by the mask"),
    ("transformers/trainer", "raise logging_steps and set logging_nan_inf_filter=False in TrainingArguments"),
)


def sync(seen: Seen) -> Iterator[AdviceRow]:
    """Find the reads of a device value in every step. On a CPU one costs next to nothing, so it is reported whatever its size, but
    for those of surokit's own lines, which on a GPU may not be there."""
    table = seen.tables["syncs"]
    lost, total = seen.held("syncs"), sum(table["ms"]) or 1.0
    for file, line, call, count, ms, inside in seen.rows("syncs", "file line call count ms inside"):
        if count < 0.5 or (seen.on_gpu and not seen.worth(ms) and not seen.worth(lost)):
            continue
        if inside.startswith("surokit/") and not seen.on_gpu:
            continue
        waits = f"waits {ms:.3g} ms a step" if seen.on_gpu else "costs little on a CPU, but would make a GPU run dry"
        if inside:
            rule, where = "library sync", f"`{call}` in {inside}, called at {place_text(file, line)},"
        elif call.endswith("ynchronize"):
            rule, where = "synchronize", f"`{call}` at {place_text(file, line)}"
        else:
            rule, where = "sync", f"`{call}` at {place_text(file, line)}"
        advice = f"{where} {waits}: {_sync_remedy(call, inside, rule)}"
        yield AdviceRow(rule, advice, f"{count:.3g} calls a step", lost * ms / total, ("syncs",), file, line)


def _sync_remedy(call: str, inside: str, rule: str) -> str:
    for prefix, remedy in _REMEDY_INSIDE:
        if inside.startswith(prefix):
            return remedy.format(n=EVERY)
    if inside:
        return "the library does it: look for a setting of it that reads less often"
    if rule == "synchronize":
        return "leave it out; to time a part, record CUDA events and read them at the end"
    if call in _SHAPED_BY_VALUES:
        return "its result has a shape that only the device knows: use torch.where or a mask of fixed shape"
    if call in ("aten::copy_", "aten::_to_copy", "aten::to", "cudaMemcpy"):
        return "copy with non_blocking=True, to or from pinned memory, and use the copy a step later"
    return f"keep the value on the device and read it every {EVERY} steps (in surokit: session.records)"


# ---------------------------------------------------------------------------------------------------------- host and loader


def data(seen: Seen) -> Iterator[AdviceRow]:
    """Find a loop that waits for its data loader."""
    ms = seen.phase("data")
    if not seen.worth(ms):
        return
    loader = seen.settings.get("loader", "")
    workers = re.search(r"workers=(\d+)", loader)
    cores = int(seen.settings.get("cores") or 0)
    if workers and int(workers[1]):
        remedy = f"its {workers[1]} workers are too slow: prepare the data once, before training, or add workers"
    else:
        number = f"num_workers={min(4, cores - 1)}" if cores > 1 else "num_workers >= 1"
        remedy = f"load ahead with {number} and persistent_workers=True"
    if seen.on_gpu and "pin_memory=True" not in loader:
        remedy += ", with pin_memory=True"
    evidence = f"{ms / seen.wall:.0%} of the step in data loading" + (f" ({loader})" if loader else "")
    advice = f"the loop waits {ms:.3g} ms a step for the data loader: {remedy}"
    gain, place = min(ms, seen.summary["idle_ms"]), seen.place_inside(DATA_RANGES)
    yield AdviceRow("data", advice, evidence, gain, ("host", "launches"), *place)


def host_gap(seen: Seen) -> Iterator[AdviceRow]:
    """Find lines of the user's on which nothing but Python ran."""
    by_place: dict[tuple[str, int], list[tuple[float, float, float]]] = defaultdict(list)
    for file, line, inside, *found in seen.rows("lines", "file line inside ms count longest_ms"):
        if file and not inside.startswith(DATA_RANGES):
            by_place[file, line].append((found[0], found[1], found[2]))
    device = "the GPU waits" if seen.on_gpu else "no operator runs"
    for (file, line), rows in by_place.items():
        ms, count, longest = sum(r[0] for r in rows), sum(r[1] for r in rows), max(r[2] for r in rows)
        if seen.worth(ms, 2):
            where = f"{device} {ms:.3g} ms a step while {place_text(file, line)} runs"
            advice = f"{where}: move that work out of the step or to a thread"
            yield AdviceRow(
                "host gap", advice, f"{count:.3g} gaps a step, the longest {longest:.3g} ms", ms, ("host",), file, line
            )


def garbage(seen: Seen) -> Iterator[AdviceRow]:
    """Find runs of Python's garbage collector inside the steps."""
    ms = seen.summary.get("collect_ms") or 0.0
    if seen.worth(ms):
        advice = (
            f"Python's garbage collector takes {ms:.3g} ms a step: call gc.freeze() once the model is built, and gc.disable()"
            " with a gc.collect() every few hundred steps"
        )
        parts = ("host", "launches", "syncs") if seen.on_gpu else ("host", "launches", "busy")
        yield AdviceRow("garbage", advice, f"{ms / seen.wall:.1%} of the step in collections", ms, parts)


def recompiles(seen: Seen) -> Iterator[AdviceRow]:
    """Find compilations by torch.compile while steps were measured."""
    for name, calls, ms in seen.rows("ops", "op calls ms"):
        if name.startswith("_compile.compile_inner") and seen.worth(ms):
            count = calls * seen.summary["steps"]
            advice = (
                f"torch.compile compiles during the steps, {ms:.3g} ms a step: give inputs of one shape (pad), or compile with"
                " dynamic=True; TORCH_LOGS=recompiles says which guard failed"
            )
            yield AdviceRow("recompile", advice, f"{count:.0f} compilations in {seen.summary['steps']} steps", ms, _ANY)


def threads(seen: Seen) -> Iterator[AdviceRow]:
    """Find more threads for operators than cores to run them."""
    has, cores = (int(seen.settings.get(name) or 0) for name in ("threads", "cores"))
    if not seen.on_gpu and has > cores > 0:
        advice = f"{has} threads share {cores} cores: torch.set_num_threads({cores})"
        gain = seen.summary["busy_ms"] * (1 - cores / has)
        yield AdviceRow("threads", advice, f"torch.get_num_threads() is {has}", gain, ("busy",))


# -------------------------------------------------------------------------------------------------------- launches, optimizer


def launches(seen: Seen) -> Iterator[AdviceRow]:
    """Find many launches whose cost is that of launching."""
    lost, count = seen.held("launches"), seen.summary["launches_per_step"]
    if not (seen.worth(lost, 2) and count >= 50):
        return
    table = "kernels" if seen.on_gpu else "ops"
    name, calls = max(seen.rows(table, f"{table[:-1]} calls"), key=lambda row: row[1], default=("nothing", 0.0))
    remedy = "torch.compile, a fused optimizer, larger batches"
    if seen.on_gpu and not seen.summary.get("graph_launches_per_step"):
        remedy += ", or a CUDA graph of the step"
    what = "launches" if seen.on_gpu else "operators"
    advice = f"{count:.0f} {what} a step leave {lost:.3g} ms between them: fuse them ({remedy})"
    yield AdviceRow("launches", advice, f"most often {name}, {calls:.0f} a step", lost, ("launches",))


# how often an update moves a tensor of the parameters' size: in the fused form, which reads parameter, gradient and states once and
# writes all but the gradient, and operator by operator (torch/optim, with weight decay and momentum)
_MOVED = {"Adam": (7, 20), "AdamW": (7, 20), "Adagrad": (5, 11), "SGD": (5, 8)}
_MOVED_BY = {"addcdiv_": 4, "addcmul_": 3, "lerp_": 3}  # the same of an operator that only optimizers call


def optimizer(seen: Seen) -> Iterator[AdviceRow]:
    """Find an optimizer that walks its parameters one by one, or in groups, where one fused operator would do; and one that
    cannot be faster and takes much of the step."""
    ms, said = seen.phase("optimizer"), seen.settings.get("optimizer", "")
    kind = said.partition(" ")[0]
    loops = seen.called("addcdiv_")
    grouped = sum(calls for name, calls in seen.calls.items() if name.startswith("aten::_foreach_addc"))
    tensors = float(match[1]) if (match := re.search(r"(\d+) tensors", said)) else 0.0
    fused = "fused=True" in said or any(name.startswith("aten::_fused_") for name in seen.calls)
    many = max(loops, tensors if kind in _MOVED else 0.0)
    busy = sum(own for name, own in seen.rows("modules", "module self_ms") if name == "(optimizer)")
    parts = ("launches", "host", "busy")
    # the host's time behind a busy GPU is free
    taken = min(ms, seen.summary["idle_ms"] + busy) if seen.on_gpu else ms
    gain = taken - _fused_takes(seen, kind, min(busy, taken), many)
    if not fused and (many or grouped) and seen.worth(gain, 2):
        how = "in groups" if grouped else "one by one"
        fix = f"torch.optim.{kind}(..., fused=True)" if kind in _MOVED else "fused=True where it has one"
        advice = f"the optimizer updates {many or grouped:.0f} tensors {how} in {ms:.3g} ms: {fix}, or sk.AdamW"
        calls = f"{loops:.0f} x aten::addcdiv_" if loops else said or f"{grouped:.0f} foreach operators"
        yield AdviceRow("optimizer", advice, f"{calls} a step, {ms / seen.wall:.0%} of the step", gain, parts)
    elif taken >= LARGE * seen.wall:
        word = "fused" if fused else "as it is"
        advice = (
            f"the optimizer, {word}, takes {ms:.3g} ms of {seen.wall:.3g}: let one update serve two batches or more (a larger "
            "batch, accumulation), which trains differently"
        )
        if kind == "AdamW8bit" and not seen.on_gpu:
            advice += ", or take sk.AdamW: moments in 8 bits are slow on a CPU"
        yield AdviceRow("optimizer share", advice, f"{ms / seen.wall:.0%} of the step; {said}", taken / 2, parts)


def _fused_takes(seen: Seen, kind: str, busy_ms: float, tensors: float) -> float:
    """Return the least that a fused update would still take: moving the tensors once. On a CPU at the speed of the fastest
    operator of the update that is there; where operators are so short that only their number counts, nothing."""
    moved, moved_apart = _MOVED.get(kind, (0, 1))
    if seen.on_gpu:
        return busy_ms * moved / moved_apart
    own = dict(seen.rows("ops", "op self_ms"))
    each = [own[f"aten::{name}"] / times for name, times in _MOVED_BY.items() if own.get(f"aten::{name}")]
    if each:
        return min(busy_ms, moved * min(each))
    # without such an operator, as in SGD, the fused form is no faster where the tensors are large
    return busy_ms if moved and busy_ms > moved_apart * TINY_MS * max(tensors, 1) else 0.0


_OFFLOAD_REMEDIES = {  # what an offloading optimizer waits for most -> what to change
    "adam": "the host's Adam takes longer than a window: raise update_interval, give it cores (a smaller pt_reserved_cores_perc)",
    "slot": "gradients come faster than the link or the host takes them: raise topk_ratio; more slots help where it is bursts",
    "landing": "weights cross the link: raise update_interval or topk_ratio",
    "selection": "scores and statistics come late: raise select_interval, or take a fixed update_interval",
}


def offload(seen: Seen) -> Iterator[AdviceRow]:
    """Find an optimizer that keeps its state on the host, and whose host part takes longer than the device's step."""
    ms = seen.held("offload")
    waits = list(seen.rows("offload", "wait count ms"))
    if not (waits and seen.worth(ms, 5)):
        return
    if "OffloadAdamW" in seen.settings.get("optimizer", ""):
        remedy = (
            "OffloadAdamW hides none of it. surokit.ZenFlow leaves most of it to the steps that follow, which learns differently; "
            "a larger batch or more accumulation makes it a smaller share"
        )
    else:
        remedy = _OFFLOAD_REMEDIES.get(waits[0][0], "look at optimizer.report()")
        remedy += "; a larger batch or more accumulation gives it more time in any case"
    advice = f"the step waits {ms:.3g} ms for the optimizer's part on the host: {remedy}"
    yield AdviceRow(
        "offload", advice, ", ".join(f"{count:.3g} x {name}: {t:.3g} ms" for name, count, t in waits), ms, ("offload",)
    )


def clipping(seen: Seen) -> Iterator[AdviceRow]:
    """Find gradient norms that are taken tensor by tensor."""
    count = seen.called("linalg_vector_norm")
    ms = seen.spent("linalg_vector_norm", r"NormTwoOps|norm_kernel|NormOps")
    if count >= 8 and not seen.called("_foreach_norm") and seen.worth(ms):
        advice = f"gradient norms of {count:.0f} tensors are taken one by one in {ms:.3g} ms: clip_grad_norm_(..., foreach=True)"
        yield AdviceRow("clipping", advice, f"{count:.0f} x aten::linalg_vector_norm a step", ms, ("busy", "launches"))


def zero_grad(seen: Seen) -> Iterator[AdviceRow]:
    """Find gradients that are filled with zeros where they could be dropped. Only fills that no operator asked for count:
    those of a backward are its own."""
    said = re.search(r"(\d+) tensors", seen.settings.get("optimizer", ""))
    direct = dict(seen.rows("outermost", "op calls"))
    zeroed, grouped = direct.get("aten::zero_", 0.0), direct.get("aten::_foreach_zero_", 0.0)
    names = ("_foreach_zero_", "ZeroFunctor") if grouped else ("zero_", "FillFunctor")
    ms = seen.spent(*names, table="outermost")
    if (grouped or (said and zeroed >= max(0.9 * int(said[1]), 4))) and seen.worth(ms):
        advice = (
            f"zero_grad fills the gradients with zeros in {ms:.3g} ms: zero_grad(set_to_none=True), torch's default"
        )
        yield AdviceRow("zero_grad", advice, f"{zeroed or grouped:.0f} fills a step", ms, ("busy", "launches"))


# ------------------------------------------------------------------------------------------------------------------ copies


def copies(seen: Seen) -> Iterator[AdviceRow]:
    """Find copies between host and device that are slow: from pageable memory, in many small pieces, or not hidden by other
    work."""
    columns = "copy direction count bytes ms gb_per_s pinned exposed_ms"
    for name, direction, count, size, ms, rate, pinned, exposed in seen.rows("copies", columns):
        if pinned is None:  # within a device, or on a CPU
            continue
        evidence = f"{count:.3g} x {name}, {size / 2**20:.3g} MiB" + (f" at {rate:.3g} GB/s" if rate else "")
        ways = "from" if direction == "host to device" else "to"
        if count >= EVERY and size / count < 2**16 and seen.worth(max(ms, seen.held("copies"))):
            advice = (
                f"{count:.0f} small copies {direction} a step: stack them into one, or make the values on the device"
            )
            yield AdviceRow("small copies", advice, evidence, seen.held("copies"), ("copies",))
        elif not pinned and seen.worth(ms):
            advice = (
                f"{count:.3g} copies a step {ways} pageable memory take {ms:.3g} ms: pin_memory() and non_blocking=True"
            )
            yield AdviceRow("pageable copy", advice, evidence, ms, ("copies",))
        elif pinned and seen.worth(exposed):
            advice = (
                f"nothing runs under {exposed:.3g} ms of pinned copies {direction} a step: copy the next batch on a stream of its"
                " own (non_blocking=True) while this one is computed"
            )
            yield AdviceRow("exposed copy", advice, evidence, exposed, ("copies",))


# as torch names its kernels: by the function of Copy.cu, and by whether they convert what they load
_LAYOUTS = r"direct_copy_kernel(?!.*WithCast)"
_CASTS = r"float(?:16|8)_copy_kernel|copy_kernel.*LoadWithCast"


def casts(seen: Seen) -> Iterator[AdviceRow]:
    """Find conversions of dtype: those of autocast, which casts the same weights again in each step, and the user's own."""
    count, autocast = seen.called("_to_copy"), seen.settings.get("autocast", "")
    ms = seen.spent("_to_copy", _CASTS)
    in_optimizer = not autocast and count <= 6 * seen.called("addcdiv_")  # an optimizer's loop converts its own numbers
    single = not seen.on_gpu and ms < TINY_MS * count  # counters and masks of a few elements: the price of an operator
    if count < 4 or in_optimizer or single or not seen.worth(ms, 2):
        return
    if autocast:
        advice = (
            f"autocast converts weights and activations to {autocast} anew in each step, {ms:.3g} ms: hold the weights in"
            f" {autocast}, with sk.AdamW(state_dtype=torch.float32, rounding='stochastic')"
        )
    else:
        advice = f"{count:.0f} conversions a step take {ms:.3g} ms: make tensors in the dtype and on the device where they are used"
    yield AdviceRow("casts", advice, f"{count:.0f} x aten::_to_copy a step", ms, ("busy", "launches"))


def layout_copies(seen: Seen) -> Iterator[AdviceRow]:
    """Find copies that only change the order of elements in memory."""
    count, ms = seen.called("clone", "contiguous"), seen.spent("clone", _LAYOUTS)
    if count >= 2 and seen.worth(ms, 2):
        advice = (
            f"copies that only change the order in memory (.contiguous(), .clone(), .reshape() of a transpose) take {ms:.3g} ms a"
            " step: choose the layout once, or pass views"
        )
        yield AdviceRow(
            "layout copies", advice, f"{count:.0f} x aten::clone or contiguous a step", ms, ("busy", "launches")
        )


def communication(seen: Seen) -> Iterator[AdviceRow]:
    """Find collectives that no other work hides."""
    ms, whole = seen.held("communication"), seen.summary.get("comm_ms") or 0.0
    if seen.worth(ms):
        advice = (
            f"{ms:.3g} ms of communication a step run with nothing under them: let gradients travel during backward (DDP: smaller"
            " bucket_cap_mb; FSDP: prefetch), and none in accumulation steps (no_sync())"
        )
        yield AdviceRow(
            "communication", advice, f"{ms / max(whole, ms):.0%} of {whole:.3g} ms is exposed", ms, ("communication",)
        )


_ALLOCATIONS = re.compile(r"(cuda(Malloc|Free|HostAlloc|FreeHost)|cuMem(Create|Map|Unmap|Release))(_v\d+)?")


def allocator(seen: Seen) -> Iterator[AdviceRow]:
    """Find memory calls of the driver inside steps; the caching allocator makes them only while it grows, fragments or was
    emptied."""
    found = [row for row in seen.rows("calls", "call calls ms") if _ALLOCATIONS.fullmatch(row[0])]
    ms = sum(row[2] for row in found)
    if found and seen.worth(ms):
        conf = seen.settings.get("allocator", "")
        grow = "" if "expandable_segments" in conf else ", set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        advice = (
            f"memory calls of the driver take {ms:.3g} ms a step: drop empty_cache() and keep shapes constant{grow}"
        )
        yield AdviceRow("allocator", advice, ", ".join(f"{calls:.3g} x {call}" for call, calls, _ in found), ms, _ANY)


# ---------------------------------------------------------------------------------------------------------------- busy time

# s1688gemm and tf32f32 run on tensor cores, fp16_sgemm multiplies halves
_PLAIN_FLOAT32 = r"(?<!\d)(?<!fp16_)(?<!bf16_)sgemm|gemm_f32f32_f32f32|gemm.*<float, ?float"
_CONVOLUTIONS = r"(?i)conv(?!ert)|wgrad|dgrad|fprop|winograd"


def float32_products(seen: Seen) -> Iterator[AdviceRow]:
    """Find products in full float32, which leave a GPU's tensor cores unused."""
    products = [row for row in seen.rows("kernels", "kernel self_ms") if re.search(_PLAIN_FLOAT32, row[0])]
    ms = sum(ms for name, ms in products if not re.search(_CONVOLUTIONS, name))  # those have a switch of their own
    if seen.settings.get("float32_matmul_precision") == "highest" and seen.worth(ms, 5):
        advice = (
            f"matrix products in full float32 take {ms:.3g} ms a step: torch.set_float32_matmul_precision('high') runs them on"
            " tensor cores, bfloat16 is faster still"
        )
        yield AdviceRow(
            "float32", advice, f"{ms / seen.summary['busy_ms']:.0%} of busy time in such kernels", ms, ("busy",)
        )


def cudnn_benchmark(seen: Seen) -> Iterator[AdviceRow]:
    """Find convolutions whose algorithm is guessed, not measured. The bound is half of their time: a guess seldom costs more."""
    ms = sum(ms for name, ms in seen.rows("kernels", "kernel self_ms") if re.search(_CONVOLUTIONS, name))
    count = seen.called("convolution")
    if seen.settings.get("cudnn.benchmark") == "False" and count >= 1 and seen.worth(ms, 5):
        advice = (
            f"{count:.0f} convolutions a step take {ms:.3g} ms with algorithms chosen unmeasured: where input shapes stay the same,"
            " torch.backends.cudnn.benchmark = True"
        )
        yield AdviceRow("cudnn.benchmark", advice, f"{count:.0f} x aten::convolution a step", ms / 2, ("busy",))


def anomaly(seen: Seen) -> Iterator[AdviceRow]:
    """Find anomaly mode, which keeps a stack for each node and looks for NaN after each."""
    if seen.settings.get("anomaly") == "True":
        checks = seen.called("isnan")
        ms = seen.spent("isnan _is_any_true", r"CompareEqFunctor|or_kernel_cuda")  # isnan is x != x
        gain = ms + seen.held("launches", "syncs", "host")
        advice = "anomaly mode is on, and slows every node of backward: turn it off unless you look for a NaN"
        yield AdviceRow("anomaly", advice, f"{checks:.0f} x aten::isnan a step", gain, _ANY)


_DETERMINISTIC = "fill_ index_put_ _index_put_impl_ index_add_ scatter_ scatter_add_ embedding_dense_backward cumsum"


def deterministic(seen: Seen) -> Iterator[AdviceRow]:
    """Find deterministic algorithms, slower where many terms are added to one place; they also fill all new memory."""
    ms = seen.spent(
        _DETERMINISTIC, r"(?i)FillFunctor|index(?!Select)|scatter|sort|embedding_backward|cumsum", "self_ms"
    )
    if seen.settings.get("deterministic") == "True" and seen.worth(ms):
        advice = (
            f"deterministic algorithms: operators that have faster forms, and fills of new memory, take {ms:.3g} ms a step:"
            " use_deterministic_algorithms(False), or torch.utils.deterministic.fill_uninitialized_memory = False"
        )
        evidence = f"{seen.called(*_DETERMINISTIC.split()):.0f} such operators a step"
        yield AdviceRow("deterministic", advice, evidence, ms, ("busy", "launches"))


_SOFTMAX = r"(?i)^(?!.*logsoftmax).*softmax"  # not a loss's


def attention(seen: Seen) -> Iterator[AdviceRow]:
    """Find attention that writes its whole matrix of weights to memory."""
    by_math = seen.called("_scaled_dot_product_attention_math")
    softmax, products = seen.called("_softmax"), seen.called("bmm", "baddbmm")
    by_hand = softmax >= 1 and products >= 2 * softmax and not seen.called("scaled_dot_product_attention")
    if not (by_math or by_hand):
        return
    operators = "_scaled_dot_product_attention_math" if by_math else "bmm baddbmm _softmax _softmax_backward_data"
    ms = seen.modules_like("attention|attn") or seen.spent(operators, _SOFTMAX)
    if seen.worth(ms, 2):
        how = "falls back to the unfused path" if by_math else "is written out as products and a softmax"
        advice = (
            f"attention {how}, {ms:.3g} ms a step: scaled_dot_product_attention with is_causal=True in place of a mask, and a head"
            " size and dtype that a fused kernel takes"
        )
        name, count = ("_scaled_dot_product_attention_math", by_math) if by_math else ("_softmax", softmax)
        yield AdviceRow("attention", advice, f"{count:.0f} x aten::{name} a step", ms, ("busy", "launches"))


def loss(seen: Seen) -> Iterator[AdviceRow]:
    """Find a cross entropy over logits that are held, read and written several times."""
    operators = "_log_softmax _log_softmax_backward_data nll_loss_forward nll_loss_backward"
    ms = seen.spent(operators, r"LogSoftMax|nll_loss")
    if seen.called("_log_softmax") and seen.worth(ms, 5):
        advice = (
            f"the loss reads and writes the logits in {ms:.3g} ms a step: a fused product and cross entropy never holds them"
            " (surokit.nn.loss.linear_cross_entropy)"
        )
        evidence = f"{seen.called('_log_softmax'):.0f} x aten::_log_softmax a step, its backward and nll_loss"
        yield AdviceRow("loss", advice, evidence, ms, ("busy", "launches"))


_WRITTEN_OUT = (  # what is written out, its operators, the classes it is found in, and the remedy
    ("norms", ("rsqrt", "pow"), "norm", "torch.nn.functional.rms_norm, surokit.nn.norm.RMSNorm or torch.compile"),
    ("GELU activations", ("tanh", "pow"), "gelu", "torch.nn.functional.gelu(x, approximate='tanh')"),
)


def written_out(seen: Seen) -> Iterator[AdviceRow]:
    """Find norms and activations made of many small operators."""
    for what, operators, kinds, remedy in _WRITTEN_OUT:
        counts = [seen.called(name) for name in operators]
        ms = seen.modules_like(kinds)
        if min(counts) >= 1 and seen.worth(ms, 2):
            evidence = ", ".join(f"{count:.0f} x aten::{name}" for count, name in zip(counts, operators)) + " a step"
            advice = f"{what} written out as several operators take {ms:.3g} ms a step: {remedy}"
            yield AdviceRow("written out", advice, evidence, ms, ("busy", "launches"))


# --------------------------------------------------------------------------------------------------------------- many ranks


def advise_ranks(summary: Mapping[str, Any], ranks: Table) -> Table:
    """Return the advice on ranks that train together, as `advise` does: the rank that the others wait for, where that costs a
    few percent of the step.

    summary: of `RankProfiles`. ranks: its table. The gain is what all ranks lose on average in waiting for that rank, less
    what it waits itself.
    """
    rows: list[AdviceRow] = []
    wall, lost, number = summary["wall_ms"], summary["slowest_ms"], summary["slowest_rank"]
    if number is not None and wall and lost >= SLOWEST_WORTH * wall:
        at = ranks["rank"].index(number)
        others = [i for i in range(len(ranks["rank"])) if i != at]

        def more(column: str) -> tuple[float, str]:
            mine, mean = ranks[column][at], sum(ranks[column][i] for i in others) / len(others)
            return mine - mean, f"{mine:.3g} ms a step, {mean:.3g} on the others"

        (computes, computing), (idles, idling) = more("compute_ms"), more("idle_ms")
        if computes >= idles:
            evidence = f"it computes {computing}"
            remedy = (
                "give all ranks as much to compute (equal tokens), and look at its clock and at what else runs there"
            )
        else:
            evidence = f"it idles {idling}, outside communication"
            remedy = "its host is slower: its own profile says what it loses that time to"
        waits = (
            f"the others wait {ranks['caused_ms'][at]:.3g} ms a step for it in all, it waits {ranks['skew_ms'][at]:.3g}"
        )
        advice = f"rank {number} is the slowest: {waits}: {remedy}"
        rows.append(AdviceRow("slowest rank", advice, evidence, lost, ("communication",)))
    return _table(rows)


_ANY = ("launches", "syncs", "host", "busy")
RULES: tuple[Rule, ...] = (
    *(sync, data, host_gap, garbage, recompiles, threads),
    *(launches, optimizer, offload, clipping, zero_grad),
    *(copies, casts, layout_copies, communication, allocator),
    *(float32_products, cudnn_benchmark, anomaly, deterministic, attention, loss, written_out),
)
