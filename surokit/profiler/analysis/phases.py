"""Sort each moment of a step into a phase: data, copies, forward, backward, optimizer, sync, other.

On a CPU a moment's phase is what the host does in it. On a GPU a busy moment has the phase of whoever asked for the
activity, a collective that of the moment in which the host asked for it; in a gap, host wait has the phase of what the host
does, and the other waits that of the activity that follows. So a step's phases sum to its wall time exactly. A loss counts as
forward, clipping as optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from surokit.profiler.analysis import timeline as tl
from surokit.profiler.analysis.causes import Layer, cumulative
from surokit.profiler.analysis.modules import Modules
from surokit.profiler.analysis.owners import CLIP, COPIES, DATA, FORWARD, LOSS, OPTIMIZER
from surokit.profiler.analysis.roles import COLLECTIVE_RANGES, DATA_RANGES, OPTIMIZER_RANGES, Observed
from surokit.profiler.analysis.timeline import Bool, Int

BACKWARD_BRIDGE_NS = 200_000  # autograd nodes closer than this belong to one backward pass
PHASES = ("sync", "data", "copies", "optimizer", "backward", "forward", "other")


@dataclass(frozen=True, eq=False)
class Phases:
    """A Phases holds the nanoseconds of each step K by phase P: wall_KP = computing + exposed_KP + idle_KP.

    exposed_KP: the device, or on a CPU the process, exchanges data or waits for that, and nothing else runs. idle_KP: not even
    that. overlapped_KP: data is exchanged while something runs; it is counted where the exchange was asked for, and the work
    beside it where that was.
    """

    wall_KP: Int
    exposed_KP: Int
    idle_KP: Int
    overlapped_KP: Int

    def by_step(self) -> dict[str, Int]:
        """Return the wall time of each step by phase."""
        return dict(zip(PHASES, self.wall_KP.T))


def phases(o: Observed, modules: Modules) -> Phases:
    """Divide each step by phase."""
    unions = cumulative(_host_layers(o, modules))
    return _on_device(o, modules, unions) if o.on_gpu else _on_host(o, unions)


def _on_host(o: Observed, unions: list[Layer]) -> Phases:
    begin_K, stop_K = np.array(o.windows).T
    computing, talking = o.computation(), o.communication()
    begin, end = tl.cut(tl.merge(*computing), tl.merge(*talking), (begin_K, stop_K))
    inside = (begin >= o.begin) & (end <= o.stop)
    begin, end = begin[inside], end[inside]
    step = np.searchsorted(begin_K, begin, "right") - 1
    computes, talks = (tl.covered(*layer, begin, end) > 0 for layer in (computing, talking))

    def summed(chosen: Bool) -> Int:
        sums_KP = np.zeros((o.steps, len(PHASES)), np.int64)
        np.add.at(sums_KP, step[chosen], _layered(unions, begin[chosen], end[chosen]))
        return sums_KP

    return Phases(
        wall_KP=_layered(unions, begin_K, stop_K),
        exposed_KP=summed(talks & ~computes),
        idle_KP=summed(~talks & ~computes),
        overlapped_KP=summed(talks & computes),
    )


def _on_device(o: Observed, modules: Modules, unions: list[Layer]) -> Phases:
    idle_KP, exposed_KP, overlapped_KP = np.zeros((3, o.steps, len(PHASES)), np.int64)
    np.add.at(idle_KP, o.step_G, _layered(unions, o.start_G, o.start_G + o.host_G))
    phase_A, follows = _phase_of_activities(modules, unions), o.next_G >= 0  # the last gap of a window is all host wait
    asked = phase_A[o.next_G[follows]]
    np.add.at(idle_KP, (o.step_G[follows], asked), (o.kernel_G + o.other_G)[follows])
    wall_KP, computing = idle_KP.copy(), tl.merge(*o.computation())
    for k, (here, own) in enumerate(zip(o.within, o.own)):
        np.add.at(wall_KP[k], phase_A[here], own)
        talk = here[o.communicates_A[here]]
        start, end = tl.own_part(o.active.start_E[talk], o.active.end_E[talk], *o.windows[k])
        hidden = tl.covered(*computing, start, end)
        np.add.at(overlapped_KP[k], phase_A[talk], hidden)
        np.add.at(exposed_KP[k], phase_A[talk], end - start - hidden)
    found = Phases(wall_KP, exposed_KP, idle_KP, overlapped_KP)
    _add_ranges(o, unions, asked, found)
    return found


def _add_ranges(o: Observed, unions: list[Layer], asked: Int, found: Phases) -> None:
    """Count what gloo exchanges on the host, where processes share a GPU: idle time becomes exposed, beside work it is overlapped.

    asked: the phase of the activity after each gap that has one.
    """
    ranges = o.ranges_named(COLLECTIVE_RANGES)
    if not len(ranges[0]):
        return
    waits: Layer = (o.start_G, o.start_G + o.host_G)
    follows = o.next_G >= 0
    computing, talk = o.computation(), o.active.take(o.communicates_A)
    begin_K, stop_K = np.array(o.windows).T
    begin, end = tl.cut(ranges, waits, computing, (talk.start_E, talk.end_E), (begin_K, stop_K))
    inside = (begin >= o.begin) & (end <= o.stop) & (tl.covered(*ranges, begin, end) > 0)
    begin, end = begin[inside], end[inside]
    step, times = np.searchsorted(begin_K, begin, "right") - 1, _layered(unions, begin, end)
    waited, computes = (tl.covered(*layer, begin, end) > 0 for layer in (waits, computing))
    later = tl.covered(*ranges, o.start_G + o.host_G, o.end_G)[follows]
    for sums_KP, sign in ((found.exposed_KP, 1), (found.idle_KP, -1)):
        np.add.at(sums_KP, step[waited], sign * times[waited])
        np.add.at(sums_KP, (o.step_G[follows], asked), sign * later)
    beside = computes & (tl.covered(talk.start_E, talk.end_E, begin, end) == 0)
    np.add.at(found.overlapped_KP, step[beside], times[beside])


def _layered(unions: list[Layer], begin_Q: Int, stop_Q: Int) -> Int:
    """Return [Q, phases], the time of each query in each layer without those before it; the time in no layer comes last."""
    so_far = [tl.covered(*union, begin_Q, stop_Q) for union in unions]
    return np.diff(np.stack([*so_far, np.maximum(stop_Q - begin_Q, 0)], axis=1), axis=1, prepend=0)


def _host_layers(o: Observed, modules: Modules) -> list[Layer]:
    """Return the intervals of host time of each phase but "other", in the order in which they take precedence."""
    owners = modules.owners
    start, end = tl.merge(owners.nodes.start_E, owners.nodes.end_E + BACKWARD_BRIDGE_NS)
    backward = start, end - BACKWARD_BRIDGE_NS
    differentiated = owners.tops.take(owners.differentiated)
    optimizer = _both(o.ranges_named(OPTIMIZER_RANGES), owners.clipping)
    forward = _both((o.r.start_S, o.r.end_S), (differentiated.start_E, differentiated.end_E))
    return [o.sync, o.ranges_named(DATA_RANGES), o.copy_calls(), optimizer, backward, forward]


def _both(a: Layer, b: Layer) -> Layer:
    return np.concatenate((a[0], b[0])), np.concatenate((a[1], b[1]))


def _phase_of_activities(modules: Modules, unions: list[Layer]) -> Int:
    """Return for each activity the index of its phase in PHASES."""
    o = modules.o
    at = o.host_time_A[o.communicates_A]
    asked_A = np.zeros(len(o.active), np.int64)
    asked_A[o.communicates_A] = _layered(unions, at, at + 1).argmax(axis=1)
    owner, number = modules.owner_A, {name: i for i, name in enumerate(PHASES)}
    return np.select(
        [
            o.communicates_A,
            owner == COPIES,
            owner == DATA,
            (owner == OPTIMIZER) | (owner == CLIP),
            modules.backward_A,
            (owner >= 0) | (owner == LOSS) | (owner == FORWARD),
        ],
        [asked_A, *(number[p] for p in ("copies", "data", "optimizer", "backward", "forward"))],
        number["other"],
    )
