"""Turn a Recording into the tables of a profile: steps, lost time by cause, modules, operators, kernels, copies, sync
points, gaps.

A `Recording` is plain data (numpy arrays and tuples), whether it was captured live or read from a trace file. Every sum
here is built on `timeline`, and the parts of a window add up to it exactly. `roles` sorts a recording and cuts its
steps, `causes` divides lost time, `owners` and `modules` say who asked for the work, `graphs` finds the modules of the
kernels of CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np

from surokit.profiler.analysis import timeline as tl
from surokit.profiler.analysis.causes import (
    CAUSES,
    Waited,
    collect_ns,
    divide,
    exposed_copies,
    gaps_table,
    lines_table,
    lost_table,
    offload_table,
    syncs_table,
)
from surokit.profiler.analysis.modules import Modules
from surokit.profiler.analysis.phases import PHASES, Phases, phases
from surokit.profiler.analysis.roles import Observed, Table, is_operator, ms, short_file, table
from surokit.profiler.analysis.timeline import Bool, Int, Kind, Timeline
from surokit.profiler.record.recording import Recording

__all__ = ["CAUSES", "PHASES", "Analysis", "Table", "analyse", "is_operator", "short_file"]

_COPY_OPS = ("aten::copy_", "aten::_to_copy", "aten::clone", "aten::contiguous")
_DIRECTIONS = {
    "HtoD": "host to device",
    "DtoH": "device to host",
    "DtoD": "device to device",
    "PtoP": "device to device",
}


@dataclass(frozen=True, eq=False)
class Analysis:
    """An Analysis holds plain tables (column -> values), ready to be stored or shown."""

    summary: dict[str, Any]
    tables: dict[str, Table]
    windows: tuple[tuple[int, int], ...]  # of each step, on device time
    notes: tuple[str, ...]


def analyse(recording: Recording, named_by: Recording | None = None, waited: Sequence[Waited] = ()) -> Analysis:
    """Compute every table of a profile but the advice; "lines", "calls", "outermost" and "offload" serve only the advice.

    named_by: the recording of a step without CUDA graphs, from which the kernels of replayed graphs get their modules.
    waited: what the exposed communication was waiting for other ranks, which becomes causes of its own.
    """
    o = Observed(recording)
    modules = Modules(o, named_by)
    divided = divide(o)
    by_phase = phases(o, modules)
    own_op_E, tops = tl.self_time(o.ops.start_E, o.ops.end_E, o.ops.thread_E), modules.owners.tops
    copying_E = o.named(o.ops, lambda n: n in _COPY_OPS) & o.in_steps(o.ops.start_E)
    tables = {
        "steps": _steps(o, by_phase.by_step()),
        "gaps": gaps_table(o, divided),
        "lines": lines_table(o, divided),
        "syncs": syncs_table(o),
        "offload": offload_table(o),
        "modules": modules.table(),
        "ops": _by_name(o, o.ops, o.in_steps(o.ops.start_E), own_op_E, "op"),
        "outermost": _by_name(o, tops, o.in_steps(tops.start_E), tops.duration_E(), "op"),
        "kernels": _kernels(o),
        "calls": _by_name(o, o.calls, o.in_steps(o.calls.start_E), o.calls.duration_E(), "call"),
        "copies": _device_copies(o) if o.on_gpu else _host_copies(o, copying_E, own_op_E),
    }
    in_copies_ns = exposed_copies(o) if o.on_gpu else (int(own_op_E[copying_E].sum()), 0)
    tables["lost"] = lost_table(o, divided, tables, in_copies_ns, waited)
    if not o.seen:  # nothing recorded is not nothing done
        tables |= {name: {column: [] for column in tables[name]} for name in ("gaps", "lines", "lost")}
    return Analysis(_summary(o, modules, tables["steps"], by_phase), tables, o.windows, tuple(o.notes))


# ---------------------------------------------------------------------------------------------------------------- tables


def _steps(o: Observed, by_phase: dict[str, Int]) -> Table:
    wall_K = np.diff(np.array(o.windows)).ravel()
    columns = {"wall": wall_K, "busy": o.busy_K, "idle": wall_K - o.busy_K}
    columns |= {f"{name}_wait": o.by_step(waits_G) for name, waits_G in _waits(o).items()}
    steps: Table = {"step": list(range(o.steps))}
    return steps | {f"{name}_ms": (ns_K / 1e6).tolist() for name, ns_K in (columns | by_phase).items()}


def _waits(o: Observed) -> dict[str, Int]:
    return {"host": o.host_G, "kernel": o.kernel_G, "other": o.other_G}


def _by_name(o: Observed, events: Timeline, here: Bool, own_E: Int, label: str) -> Table:
    names = events.name_E[here]
    size = len(o.names)
    count = np.bincount(names, minlength=size)
    own = np.bincount(names, own_E[here], minlength=size)
    whole = np.bincount(names, events.duration_E()[here], minlength=size)
    order = sorted(np.flatnonzero(count).tolist(), key=lambda n: -own[n])
    rows = [
        (o.names[i], count[i] / o.steps, ms(own[i]) / o.steps, ms(whole[i]) / o.steps, whole[i] / count[i] / 1e3)
        for i in order
    ]
    return table(f"{label} calls self_ms ms mean_us", rows)


def _kernels(o: Observed) -> Table:
    here = o.active.is_kind(Kind.KERNEL) & o.asked_in_steps()  # on a CPU there are none
    return _by_name(o, o.active, here, o.own_A, "kernel")


_COPIES = "copy direction count bytes ms gb_per_s pinned exposed_ms"


def _host_copies(o: Observed, copying_E: Bool, own_E: Int) -> Table:
    """List the operators of a CPU that move data, without their bytes."""
    ops = _by_name(o, o.ops, copying_E, own_E, "copy")
    rows = zip(ops["copy"], ops["calls"], ops["self_ms"])
    return table(_COPIES, [(name, "host to host", calls, None, own, None, None, None) for name, calls, own in rows])


def _device_copies(o: Observed) -> Table:
    """List the copies by kind, per step. `exposed_ms` is the part under which no kernel runs."""
    asked = o.asked_in_steps()
    copies = o.active.take(o.active.is_kind(Kind.MEMCPY) & asked)
    rest = o.active.take(~o.active.is_kind(Kind.MEMCPY))
    exposed = copies.duration_E() - tl.covered(rest.start_E, rest.end_E, copies.start_E, copies.end_E)
    rows = []
    for name in np.unique(copies.name_E).tolist():
        chosen = copies.name_E == name
        size, ns, words = int(copies.nbytes_E[chosen].sum()), int(copies.duration_E()[chosen].sum()), o.names[name]
        pinned = "Pageable" not in words if "HtoD" in words or "DtoH" in words else None
        direction = next((d for k, d in _DIRECTIONS.items() if k in words), "other")
        counted = int(chosen.sum()) / o.steps, size / o.steps, ms(ns) / o.steps
        rows.append((words, direction, *counted, size / max(ns, 1), pinned, ms(exposed[chosen].sum()) / o.steps))
    rows.sort(key=lambda row: -row[4])
    return table(_COPIES, rows)


# --------------------------------------------------------------------------------------------------------------- summary


def _summary(o: Observed, modules: Modules, steps: Table, by_phase: Phases) -> dict[str, Any]:
    n, r = o.steps, o.r
    wall, busy = ms(o.wall_ns) / n, ms(o.busy_K.sum()) / n if o.seen else nan
    p5, p50, p95 = np.percentile(steps["wall_ms"], [5, 50, 95]).tolist()
    waits = int(o.in_steps(o.waits.start_E).sum())
    gflop = None if modules.flop is None else float(modules.flop.sum()) / 1e9
    communicating, exposed = _communication(o)
    return {
        "device": r.device,
        "activity": ("gpu" if o.on_gpu else "cpu") if o.seen else "unknown",
        "steps": n,
        "warmup": o.skipped,
        "wall_ms": wall,
        "busy_ms": busy,
        "idle_ms": wall - busy,
        **{f"{name}_wait_ms": ms(waits_G.sum()) / n if o.seen else nan for name, waits_G in _waits(o).items()},
        "busy_frac": busy / wall if wall else 0.0,
        "wall_p5_ms": p5,
        "wall_p50_ms": p50,
        "wall_p95_ms": p95,
        "tokens_per_s": r.tokens_per_step / wall * 1e3 if r.tokens_per_step and wall else None,
        "gflop_per_step": gflop,
        "tflops": gflop / wall if gflop is not None and wall else None,  # 1e9 / 1e-3 s
        "launches_per_step": o.launches() / n,
        "graph_launches_per_step": int((o.graph_calls() & o.in_steps(o.calls.start_E)).sum()) / n,
        "launch_delay_us": _launch_delay(o),
        "syncs_per_step": (waits if o.on_gpu and waits else len(o.reads_in_steps())) / n,
        "h2d_bytes": _copied_bytes(o, "HtoD") / n,
        "d2h_bytes": _copied_bytes(o, "DtoH") / n,
        "comm_ms": ms(communicating) / n,
        "comm_exposed_ms": ms(exposed) / n,
        "collect_ms": ms(collect_ns(o)) / n,
        "peak_gib": r.peak_bytes / 2**30,
        "phases_ms": {p: sum(steps[f"{p}_ms"]) / n for p in PHASES},
        "phases_exposed_ms": _by_phase(o, by_phase.exposed_KP),
        "phases_idle_ms": _by_phase(o, by_phase.idle_KP),
        "phases_overlapped_ms": _by_phase(o, by_phase.overlapped_KP),
        "overhead_ms": ms(_overhead(o)) / n,
        "unprofiled_ms": ms(r.unprofiled_ns) if r.unprofiled_ns is not None else None,
    }


def _by_phase(o: Observed, sums_KP: Int) -> dict[str, float]:
    return {p: ms(ns) / o.steps if o.seen else nan for p, ns in zip(PHASES, sums_KP.sum(axis=0))}


def _launch_delay(o: Observed) -> float | None:
    """Return the median time from the end of a launch call to the start of its kernel, us; 0 for a kernel that starts
    before the call returns."""
    if o.launch_end_A is None:
        return None
    chosen = (o.launch_end_A >= 0) & o.asked_in_steps() & o.active.is_kind(Kind.KERNEL)
    delay = np.maximum(o.active.start_E[chosen] - o.launch_end_A[chosen], 0)
    return float(np.median(delay)) / 1e3 if len(delay) else None


def _communication(o: Observed) -> tuple[int, int]:
    """Return the time in which the devices exchange data, and the part of it in which nothing else runs."""
    start, end = tl.clip(*o.communication(), o.begin, o.stop)
    length = tl.total(start, end)
    return length, length - tl.overlap(*o.computation(), start, end)


def _copied_bytes(o: Observed, direction: str) -> int:
    chosen = o.active.is_kind(Kind.MEMCPY) & o.asked_in_steps() & o.named(o.active, lambda n: direction in n)
    return int(o.active.nbytes_E[chosen].sum())


def _overhead(o: Observed) -> float:
    """Estimate what the profiler itself cost in the steps, nanoseconds, from its calibrated costs."""
    r, costs = o.r, o.r.costs
    events = int(o.in_steps(o.ops.start_E).sum() + o.in_steps(o.calls.start_E).sum())
    spans, samples = int(o.in_steps(r.start_S).sum()), int(o.in_steps(r.time_P).sum())
    watched = sum(o.hosts[0] <= s.start_ns < o.hosts[-1] for s in r.syncs)
    return events * costs.event_ns + spans * costs.module_ns + watched * costs.read_ns + samples * costs.sample_ns
