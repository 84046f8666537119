"""Divide lost time among its causes, and list the gaps one by one and the lines that wait.

GPU: each gap of the device is divided by what the host did in it. Host wait inside a synchronising call is *syncs*,
inside a copy call *copies*, inside an operator or a launch call *launches* (*syncs* when the queue had run empty behind
a sync), the rest *host*. Kernel wait is *launches*; other wait is *copies* when a copy comes next, else *launches*. So
the four sum to idle; copies that no other work hides are added to *copies*.
CPU: a gap under 0.1 ms between two operators is *launches* (Python and dispatcher), a longer one *host*, and these two
sum to idle; *syncs* and *copies* are time inside operators that read values back or move data.

Two causes are there only where there is something of them. *communication* is what data that moves between processes takes
while nothing else runs: on a GPU busy time of collectives alone, and with gloo the part of a gap in which a thread of gloo's
is in a collective, counted before all others. Where the ranks were merged, the part of it that was waiting for another rank
is a cause by that rank's name. An optimizer that keeps its state on the host adds *offload*: host wait inside its waits,
counted next, and on a GPU the copies that bring its results, as far as no other work hides them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from surokit.profiler.analysis import timeline as tl
from surokit.profiler.analysis.attribution import on_threads, pick
from surokit.profiler.analysis.collectives import collectives, counts_text
from surokit.profiler.analysis.roles import (
    COLLECTIVE_RANGES,
    DATA_RANGES,
    OFFLOAD_RANGES,
    Observed,
    Table,
    intervals,
    ms,
    place_text,
    table,
)
from surokit.profiler.analysis.timeline import Bool, Int, Kind

SHORT_GAP_NS = 100_000  # CPU: a shorter gap between two operators is the price of launching the next one
GAP_ROWS = 200
HALF_PERIOD_NS = 2_500_000  # of the samples of the user's line
WORTH_SAYING = 0.002  # share of the steps
CAUSES = ("launches", "syncs", "copies", "host")
COMMUNICATION, OFFLOAD = "communication", "offload"  # two more, where there is something of them
WAITING = "waiting for rank "  # and with it the rank's number

Layer = tuple[Int, Int]
Divided = dict[str, Int]  # cause -> nanoseconds of each gap


class Waited(NamedTuple):
    """A Waited says what one rank lost to another: the exposed time in which it waited for it, in all steps, and in how many
    collectives."""

    rank: int
    ns: int
    collectives: int


def divide(o: Observed) -> Divided:
    """Divide each gap among the causes, which sum to the gap."""
    host_G, nothing = o.host_G, np.zeros_like(o.host_G)
    start_G, until_G = o.start_G, o.start_G + host_G
    talk = o.ranges_named(COLLECTIVE_RANGES)
    with_talk, with_waits, *in_calls = (tl.covered(*layer, start_G, until_G) for layer in _call_layers(o))
    talk_later = tl.covered(*talk, until_G, o.end_G)  # of what is no host wait
    more = {COMMUNICATION: with_talk + talk_later} if len(talk[0]) or o.communicates_A.any() else {}
    if len(o.ranges_named(OFFLOAD_RANGES)[0]):
        more[OFFLOAD] = with_waits - with_talk
    if not o.on_gpu:
        rest = host_G - with_waits
        in_short = np.where(rest < SHORT_GAP_NS, rest, 0)
        return {"launches": in_short, "syncs": nothing, "copies": nothing, "host": rest - in_short, **more}
    with_sync, with_copy, with_calls = in_calls
    in_sync, in_copy, in_call = with_sync - with_waits, with_copy - with_sync, with_calls - with_copy
    other_G = np.maximum(o.other_G - talk_later, 0)
    kernel_G = o.kernel_G + o.other_G - talk_later - other_G
    drained = tl.covered(*o.sync, start_G - 1, start_G + 1) > 0
    copy_next = (o.next_G >= 0) & (o.active.kind_E[o.next_G] == Kind.MEMCPY)
    return {
        "launches": np.where(drained, 0, in_call) + kernel_G + np.where(copy_next, 0, other_G),
        "syncs": in_sync + np.where(drained, in_call, 0),
        "copies": in_copy + np.where(copy_next, other_G, 0),
        "host": host_G - with_calls,
        **more,
    }


def _call_layers(o: Observed) -> list[Layer]:
    """Return host intervals as cumulative layers: gloo's collectives, waits of an optimizer with state on the host, waits for the
    device, copy calls, any call."""
    calls = np.concatenate((o.ops.start_E, o.calls.start_E)), np.concatenate((o.ops.end_E, o.calls.end_E))
    ranges = [o.ranges_named(names) for names in (COLLECTIVE_RANGES, OFFLOAD_RANGES)]
    return cumulative([*ranges, o.sync, o.copy_calls(), calls])


def cumulative(layers: list[Layer]) -> list[Layer]:
    """Return for each layer its union with all layers before it."""
    out: list[Layer] = []
    start = end = np.empty(0, np.int64)
    for layer_start, layer_end in layers:
        start, end = tl.merge(np.concatenate((start, layer_start)), np.concatenate((end, layer_end)))
        out.append((start, end))
    return out


def exposed_copies(o: Observed) -> tuple[int, int]:
    """Return the copy time on the device, in the steps, during which nothing else runs, as (all other copies, copies that
    were asked for in the waits of an offloading optimizer). Copies that a collective makes are communication."""
    copies = o.active.is_kind(Kind.MEMCPY) & ~o.communicates_A
    waited = tl.covered(*o.ranges_named(OFFLOAD_RANGES), o.host_time_A, o.host_time_A + 1) > 0
    every, landing = (_only_under(o, chosen) for chosen in (copies, copies & waited))
    return every - landing, landing


def _only_under(o: Observed, chosen_A: Bool) -> int:
    """Return the busy time in which nothing but these activities runs."""
    rest = o.active.take(~chosen_A)
    return int(o.busy_K.sum()) - tl.total(*tl.clip(rest.start_E, rest.end_E, o.begin, o.stop))


# ---------------------------------------------------------------------------------------------------------------- tables


def gaps_table(o: Observed, divided: Divided) -> Table:
    """List the longest gaps of all steps."""
    waits = {"host wait": o.host_G, "kernel wait": o.kernel_G, "other wait": o.other_G}
    chosen = np.argsort(o.start_G - o.end_G, kind="stable")[:GAP_ROWS]
    kinds = np.argmax([waits[w][chosen] for w in waits], axis=0)
    names = list(divided)
    causes = np.argmax([divided[c][chosen] for c in names], axis=0)
    around = _ranges_at(o, o.start_G[chosen] + o.host_G[chosen] // 2)
    rows = []
    for g, kind, cause, inside in zip(chosen.tolist(), kinds.tolist(), causes.tolist(), around.tolist()):
        start, following = int(o.start_G[g]), int(o.next_G[g])
        rows.append(
            (
                int(o.step_G[g]),
                ms(start - o.begin),
                ms(o.end_G[g] - start),
                list(waits)[kind],
                names[cause],
                ms(divided["host"][g]),
                *o.place_in(start, start + int(o.host_G[g])),
                o.names[o.active.name_E[following]] if following >= 0 else "",
                o.names[o.ranges.name_E[inside]] if inside >= 0 else "",
            )
        )
    return table("step start_ms ms kind cause host_ms file line next inside", rows)


def lines_table(o: Observed, divided: Divided) -> Table:
    """Sum the host's part of all gaps by the user's line, in ms a step; the file is "" where a gap was too short to be
    sampled. Between two samples the first stands for half of the time, but no more than half a period: a sample that comes
    later waited for Python's lock, and its line held the lock. On a GPU only samples outside calls count, and none in
    gloo's collectives and the waits of an offloading optimizer."""
    until_G, at_P = o.start_G + o.host_G, o.r.time_P
    gap_P = np.searchsorted(o.start_G, at_P, "right") - 1
    within = (at_P < pick(until_G, gap_P)) & (pick(divided["host"], gap_P) > 0)
    working = _call_layers(o)[-1 if o.on_gpu else 1]
    within &= tl.covered(*working, at_P, at_P + 1) == 0
    gap, at, place = gap_P[within], at_P[within], o.r.place_P[within]
    first, last = np.diff(gap, prepend=-1) != 0, np.diff(gap, append=-1) != 0
    change = at + np.minimum(np.diff(at, append=0) // 2, HALF_PERIOD_NS)
    begin = np.where(first, o.start_G[gap], np.roll(change, 1))
    end = np.where(last, until_G[gap], change)
    unseen = np.setdiff1d(np.flatnonzero(divided["host"]), gap)
    gap, place = np.concatenate((gap, unseen)), np.concatenate((place, np.full(len(unseen), -1)))
    begin, end = np.concatenate((begin, o.start_G[unseen])), np.concatenate((end, until_G[unseen]))
    ns = end - begin - tl.covered(*working, begin, end)
    inside = _ranges_at(o, np.concatenate((at, o.start_G[unseen])))
    name = pick(o.ranges.name_E.astype(np.int64), inside)
    found: dict[tuple[int, int], dict[int, int]] = defaultdict(lambda: defaultdict(int))  # line and range, gap -> ns
    for p, n, g, one in zip(place.tolist(), name.tolist(), gap.tolist(), ns.tolist()):
        found[p, n][g] += one
    rows = []
    for (p, n), by_gap in found.items():
        where, each = o.r.places[p] if p >= 0 else ("", 0), by_gap.values()
        within_range = o.names[n] if n >= 0 else ""
        rows.append((*where, within_range, ms(sum(each)) / o.steps, len(each) / o.steps, ms(max(each))))
    rows.sort(key=lambda row: -row[3])
    return table("file line inside ms count longest_ms", rows)


def _ranges_at(o: Observed, at_Q: Int) -> Int:
    """Return the named range that is open at each host moment on the thread that runs the steps. A trace does not say which
    thread that is: then it is the one with the most ranges."""
    threads, counts = np.unique(o.ranges.thread_E, return_counts=True)
    if not len(threads):
        return np.full(len(at_Q), -1, np.int64)
    thread = o.r.thread if o.r.thread in threads else threads[counts.argmax()]
    return on_threads(o.ranges.thread_E, o.ranges.start_E, o.ranges.end_E, np.full(len(at_Q), thread), at_Q)


def syncs_table(o: Observed) -> Table:
    """Count the sync points by the user's line, per step. On a GPU the time is the host's wait in the call."""
    found: dict[tuple[str, int, str, str], list[int]] = defaultdict(lambda: [0, 0])

    def add(file: str, line: int, call: str, inside: str, ns: int) -> None:
        entry = found[file, line, call, inside]
        entry[0] += 1
        entry[1] += ns

    reads = o.reads_in_steps()
    for s in reads:
        add(s.file, s.line, s.call, s.inside, s.end_ns - s.start_ns)
    # Waits that no recorded read explains, such as torch.cuda.synchronize(): the line comes from the sampler.
    waits = o.waits.take(o.in_steps(o.waits.start_E))
    unexplained = waits.take(tl.covered(*intervals(reads), waits.start_E, waits.end_E) == 0)
    for start, end, name in zip(unexplained.start_E.tolist(), unexplained.end_E.tolist(), unexplained.name_E.tolist()):
        add(*o.place_in(start, end), o.names[name], "", end - start)
    rows = [
        (file, line, call, count / o.steps, ms(ns) / o.steps, inside)
        for (file, line, call, inside), (count, ns) in found.items()
    ]
    rows.sort(key=lambda row: (-row[4], row[0], row[1]))
    return table("file line call count ms inside", rows)


def offload_table(o: Observed) -> Table:
    """Sum the waits of an optimizer that keeps its state on the host, by what it waits for, in ms a step of the host."""
    chosen = o.ranges.take(o.named(o.ranges, OFFLOAD_RANGES))
    chosen = chosen.take(o.in_steps(chosen.start_E))
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, ns in zip(chosen.name_E.tolist(), chosen.duration_E().tolist()):
        entry = found[o.names[name].removeprefix(OFFLOAD_RANGES[0])]
        entry[0] += 1
        entry[1] += ns
    rows = [(name, count / o.steps, ms(ns) / o.steps) for name, (count, ns) in found.items()]
    return table("wait count ms", sorted(rows, key=lambda row: -row[2]))


def lost_table(
    o: Observed,
    divided: Divided,
    tables: dict[str, Table],
    in_copies_ns: tuple[int, int],
    waited: Sequence[Waited] = (),
) -> Table:
    """Build the table of causes with their evidence. `in_copies_ns` is the time of the copies themselves (exposed on a GPU,
    in operators on a CPU), and of those that bring an offloading optimizer's results. `waited` are parts of the
    communication."""
    lost = {cause: int(gaps.sum()) for cause, gaps in divided.items()}
    lost["copies"] += in_copies_ns[0]
    if OFFLOAD in lost:
        lost[OFFLOAD] += in_copies_ns[1]
    if COMMUNICATION in lost:
        lost[COMMUNICATION] += _only_under(o, o.communicates_A) - sum(ns for _, ns, _ in waited)
    if not o.on_gpu:
        lost["syncs"] = round(sum(tables["syncs"]["ms"]) * 1e6 * o.steps)
    evidence = {
        "launches": _launch_evidence(o),
        "syncs": _sync_evidence(tables["syncs"]),
        "copies": "; ".join(f"{count:.3g} x {name}" for name, count in _top(tables["copies"], "copy", "count"))
        or "none",
        "host": _host_evidence(o, tables["lines"]),
        COMMUNICATION: counts_text(collectives(o)) if COMMUNICATION in lost else "",
        OFFLOAD: "; ".join(f"{t:.3g} ms in waits for {name}" for name, t in _top(tables["offload"], "wait", "ms")),
    }
    for rank, ns, count in waited:
        lost[f"{WAITING}{rank}"] = ns
        evidence[f"{WAITING}{rank}"] = f"it is the last in {count / o.steps:.3g} collectives a step"
    price = o.r.usd_per_gpu_hour
    rows = []
    for cause in lost:
        share = lost[cause] / max(o.wall_ns, 1)
        usd = None if price is None else 24 * share * price
        rows.append((cause, ms(lost[cause]) / o.steps, share, 24 * share, usd, evidence[cause]))
    return table("cause ms_per_step share gpu_hours_per_day usd_per_day evidence", rows)


def collect_ns(o: Observed) -> int:
    """Return the time in Python's garbage collector during the steps, ns."""
    return tl.total(*tl.clip(o.r.start_C, o.r.end_C, o.hosts[0], o.hosts[-1]))


# -------------------------------------------------------------------------------------------------------------- evidence


def _top(rows: Table, *columns: str) -> list[tuple[object, ...]]:
    return list(zip(*(rows[c][:2] for c in columns)))


def _launch_evidence(o: Observed) -> str:
    count, a, asked = o.launches() / o.steps, o.active, o.asked_in_steps()
    if not o.on_gpu:
        short = (o.own_A > 0) & (a.duration_E() < 10_000) & asked
        return f"{count:.0f} operators a step, {int(short.sum()) / o.steps:.0f} of them under 10 us"
    launched = o.call_A >= 0
    cost = np.zeros(len(a), np.int64)
    cost[launched & ~o.in_graph_A] = o.calls.duration_E()[o.call_A[launched & ~o.in_graph_A]]
    short = a.is_kind(Kind.KERNEL) & (a.duration_E() < cost) & asked
    return f"{count:.0f} launches a step, {int(short.sum()) / o.steps:.0f} kernels shorter than their launch call"


def _sync_evidence(syncs: Table) -> str:
    rows = zip(syncs["count"][:2], syncs["call"], syncs["file"], syncs["line"])
    return "; ".join(f"{count:.3g} x {call} at {place_text(file, line)}" for count, call, file, line in rows) or "none"


def _host_evidence(o: Observed, lines: Table) -> str:
    by_place: dict[str, float] = defaultdict(float)
    for file, line, host_ms in zip(lines["file"], lines["line"], lines["ms"]):
        by_place[place_text(file, line) if file else "lines that no sample hit"] += host_ms
    found = [f"{t:.3g} ms at {place}" for place, t in sorted(by_place.items(), key=lambda item: -item[1])[:2]]
    data = tl.total(*tl.clip(*o.ranges_named(DATA_RANGES), o.hosts[0], o.hosts[-1]))
    for ns, where in ((collect_ns(o), "Python's garbage collector"), (data, "the data loader")):
        if ns >= WORTH_SAYING * o.wall_ns and ns:
            found.append(f"{where} took {ms(ns) / o.steps:.3g} ms in all")
    return "; ".join(found) or "none"
