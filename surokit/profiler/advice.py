"""Rules that turn the tables of a profile into things to do: each with its evidence, the line, and the milliseconds a
step it may bring.

A rule is a function from the tables to rows; it speaks only where its gain is at least 1 % of the step. Gains are upper
bounds from this profile (the whole lost time of the cause at that place), not promises, and two rules may claim the
same milliseconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from surokit.profiler.analysis import Table, short_file

Row = tuple[str, str, str, float, str, int]  # rule, advice, evidence, gain_ms, file, line
Rule = Callable[[dict[str, Any], dict[str, Table]], Iterator[Row]]
WORTH = 0.01  # share of the step below which a rule keeps silent


def advise(summary: dict[str, Any], tables: dict[str, Table]) -> Table:
    """The advice table, largest gain first: rule, advice, evidence, gain_ms, file, line."""
    names = ["rule", "advice", "evidence", "gain_ms", "file", "line"]
    if not summary["wall_ms"]:
        return {name: [] for name in names}
    rows = [row for rule in RULES for row in rule(summary, tables)]
    rows.sort(key=lambda row: -row[3])
    return {name: [row[i] for row in rows] for i, name in enumerate(names)}


def _lost_ms(tables: dict[str, Table], cause: str) -> float:
    lost = tables["lost"]
    return float(lost["ms_per_step"][lost["cause"].index(cause)])


def _at(file: str, line: int) -> str:
    return f"{short_file(file)}:{line}" if file else "an unknown line"


def sync_in_step(summary: dict[str, Any], tables: dict[str, Table]) -> Iterator[Row]:
    """A read of a device value in every step. On a CPU it costs next to nothing, so it is said whatever its size."""
    syncs, on_gpu = tables["syncs"], summary["activity"] == "gpu"
    total = sum(syncs["ms"]) or 1.0
    lost = _lost_ms(tables, "syncs")
    for file, line, call, count, ms, inside in zip(
        *(syncs[c] for c in ("file", "line", "call", "count", "ms", "inside"))
    ):
        if count < 0.5 or (on_gpu and ms < WORTH * summary["wall_ms"] and lost < WORTH * summary["wall_ms"]):
            continue
        through = f" (in {inside})" if inside else ""
        waits = f"waits {ms:.3g} ms a step" if on_gpu else "costs little on a CPU, but would make a GPU run dry"
        advice = f"{call} at {_at(file, line)}{through} {waits}: keep the value on the device and read it every N steps"
        yield "sync", advice, f"{count:.3g} calls a step", lost * ms / total, file, line


def data_wait(summary: dict[str, Any], tables: dict[str, Table]) -> Iterator[Row]:
    """The loop waits for its data loader."""
    ms = summary["phases_ms"]["data"]
    if ms >= WORTH * summary["wall_ms"]:
        share = ms / summary["wall_ms"]
        advice = (
            f"the loop waits {ms:.3g} ms a step for the data loader: load ahead with num_workers >= 1 and pin_memory"
        )
        yield "data", advice, f"{share:.0%} of the step inside DataLoader.__next__", min(ms, summary["idle_ms"]), "", 0


def host_gap(summary: dict[str, Any], tables: dict[str, Table]) -> Iterator[Row]:
    """Lines of the user's on which nothing but Python ran."""
    gaps = tables["gaps"]
    by_place: dict[tuple[str, int], list[float]] = defaultdict(list)
    for file, line, ms, inside in zip(*(gaps[c] for c in ("file", "line", "host_ms", "inside"))):
        if ms and file and "DataLoader" not in inside:
            by_place[file, line].append(ms)
    device = "the GPU waits" if summary["activity"] == "gpu" else "no operator runs"
    for (file, line), found in by_place.items():
        ms = sum(found) / summary["steps"]
        if ms >= 2 * WORTH * summary["wall_ms"]:
            where = f"{ms:.3g} ms a step while {_at(file, line)} runs"
            advice = f"{device} {where}: move that work out of the step or to another thread"
            yield "host gap", advice, f"{len(found)} gaps, the longest {max(found):.3g} ms", ms, file, line


def tiny_ops(summary: dict[str, Any], tables: dict[str, Table]) -> Iterator[Row]:
    """Many launches whose cost is that of launching."""
    lost = _lost_ms(tables, "launches")
    if lost >= 2 * WORTH * summary["wall_ms"] and summary["launches_per_step"] >= 50:
        table = tables["kernels"] if summary["activity"] == "gpu" else tables["ops"]
        most = max(range(len(table["calls"])), key=lambda i: table["calls"][i])
        name, calls = next(iter(table.values()))[most], table["calls"][most]
        count = f"{summary['launches_per_step']:.0f} launches a step leave {lost:.3g} ms between them"
        advice = f"{count}: fuse them (torch.compile, a fused optimizer, larger batches)"
        yield "launches", advice, f"most often {name}, {calls:.0f} a step", lost, "", 0


def optimizer_loop(summary: dict[str, Any], tables: dict[str, Table]) -> Iterator[Row]:
    """An optimizer that walks its parameters in Python."""
    ms = summary["phases_ms"]["optimizer"]
    ops = dict(zip(tables["ops"]["op"], tables["ops"]["calls"]))
    loops = ops.get("aten::addcdiv_", 0.0)
    if loops >= 8 and ms >= 5 * WORTH * summary["wall_ms"]:
        advice = f"the optimizer updates {loops:.0f} tensors one by one in {ms:.3g} ms: use fused=True, or sk.AdamW"
        yield "optimizer", advice, f"{loops:.0f} x aten::addcdiv_ a step", ms / 2, "", 0


def pageable_copies(summary: dict[str, Any], tables: dict[str, Table]) -> Iterator[Row]:
    """Copies between host and device from memory that is not pinned."""
    copies = tables["copies"]
    for name, pinned, ms, count in zip(*(copies[c] for c in ("copy", "pinned", "ms", "count"))):
        if pinned is False and ms >= WORTH * summary["wall_ms"]:
            advice = (
                f"{count:.3g} copies a step from pageable memory take {ms:.3g} ms: pin_memory() and non_blocking=True"
            )
            yield "pageable copy", advice, name, min(ms, _lost_ms(tables, "copies")), "", 0


RULES: tuple[Rule, ...] = (sync_in_step, data_wait, host_gap, tiny_ops, optimizer_loop, pageable_copies)
