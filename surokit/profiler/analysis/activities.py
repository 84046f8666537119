"""Sum the time of a step by what ran: operators on a CPU, kernels and copies on a GPU, collectives by their size, and nothing."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from surokit.profiler.analysis import timeline as tl
from surokit.profiler.analysis.attribution import outermost_around
from surokit.profiler.analysis.collectives import collectives
from surokit.profiler.analysis.roles import Observed, Table, ms, table
from surokit.profiler.analysis.timeline import Int
from surokit.profiler.record.recording import Recording
from surokit.units import size

IDLE = "idle"


def activities_table(recording: Recording) -> Table:
    """Build the table `activities`: activity, calls and ms a step; ms sums to the wall time.

    An operator has the time in which it calls no other one. What two threads or streams do at once counts for the one that was
    there first. A collective is called by its kind and bytes: on a GPU it is its kernel; with gloo it has the time in which
    its range is on and no operator runs. What is left is idle. Where nothing was recorded the table is empty.
    """
    o = Observed(recording)
    if not o.seen:  # nothing recorded is not nothing done
        return table("activity calls ms", [])
    found = collectives(o)
    label_C = [
        f"{name}, {size(nbytes)}" if nbytes > 0 else name for name, nbytes in zip(found.names, found.nbytes_C.tolist())
    ]
    on_host = found.activity_C < 0
    start, end = tl.own_part(found.start_C[on_host], found.end_C[on_host], o.begin, o.stop)
    waited = tl.covered(o.start_G, o.end_G, start, end)

    own_A = o.own_A if o.on_gpu else _own_of_operators(o)
    asked_A = o.asked_in_steps()
    names = [*o.names, *label_C]
    name_A = o.active.name_E.astype(np.int64)
    name_A[found.activity_C[~on_host]] = len(o.names) + np.flatnonzero(~on_host)
    name_P = np.concatenate((name_A, len(o.names) + np.flatnonzero(on_host)))
    ns = np.bincount(name_P, np.concatenate((own_A, waited)), minlength=len(names))
    calls = np.bincount(name_P, np.concatenate((asked_A, np.ones(len(waited)))), minlength=len(names))

    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for i in np.flatnonzero((ns > 0) | (calls > 0)).tolist():
        sums[names[i]][0] += calls[i] / o.steps
        sums[names[i]][1] += ms(ns[i]) / o.steps
    idle = int((o.end_G - o.start_G).sum() - waited.sum())
    rows = [(name, *both) for name, both in sorted(sums.items(), key=lambda item: -item[1][1])]
    return table("activity calls ms", [*rows, (IDLE, None, ms(idle) / o.steps)])


def _own_of_operators(o: Observed) -> Int:
    """Return the share of each operator in the busy time: its time without the operators that it calls, and of time that two
    threads work at once only what the outermost operator around it has."""
    a = o.active
    top_A = outermost_around(a)
    inside = top_A >= 0
    alone_A = np.where(inside, tl.self_time(a.start_E, a.end_E, a.thread_E), 0)
    share, whole = (np.bincount(top_A[inside], of[inside], minlength=len(a)) for of in (o.own_A, alone_A))
    return np.where(inside, alone_A * (share / np.maximum(whole, 1))[top_A], 0.0) if len(a) else alone_A


__all__ = ["IDLE", "activities_table"]
