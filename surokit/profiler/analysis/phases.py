"""Sort each moment of a step into a phase: data, copies, forward, backward, optimizer, sync, other.

On a CPU a moment's phase is what the host does in it. On a GPU a busy moment has the phase of whoever asked for the
activity; in a gap, host wait has the phase of what the host does, and the other waits that of the activity that follows.
So a step's phases sum to its wall time exactly. A loss counts as forward, clipping as optimizer.
"""

from __future__ import annotations

import numpy as np

from surokit.profiler.analysis import timeline as tl
from surokit.profiler.analysis.causes import Layer, cumulative
from surokit.profiler.analysis.modules import Modules
from surokit.profiler.analysis.owners import CLIP, COPIES, DATA, FORWARD, LOSS, OPTIMIZER
from surokit.profiler.analysis.roles import DATA_RANGES, OPTIMIZER_RANGES, Observed
from surokit.profiler.analysis.timeline import Int

BACKWARD_BRIDGE_NS = 200_000  # autograd nodes closer than this belong to one backward pass
PHASES = ("sync", "data", "copies", "optimizer", "backward", "forward", "other")


def phases(o: Observed, modules: Modules) -> tuple[dict[str, Int], dict[str, Int]]:
    """Return the nanoseconds of each step by phase, and those of them in which the device was idle."""
    unions = cumulative(_host_layers(o, modules))
    idle_KP = np.zeros((o.steps, len(PHASES)), np.int64)
    if not o.on_gpu:
        begin, stop = np.array(o.windows).T
        sums_KP = _layered(unions, begin, stop)
        np.add.at(idle_KP, o.step_G, _layered(unions, o.start_G, o.end_G))
    else:
        np.add.at(idle_KP, o.step_G, _layered(unions, o.start_G, o.start_G + o.host_G))
        phase_A, follows = _phase_of_activities(modules), o.next_G >= 0  # the last gap of a window is all host wait
        asked = phase_A[o.next_G[follows]]
        np.add.at(idle_KP, (o.step_G[follows], asked), (o.kernel_G + o.other_G)[follows])
        sums_KP = idle_KP.copy()
        for sums_P, here, own in zip(sums_KP, o.within, o.own):
            np.add.at(sums_P, phase_A[here], own)
    return dict(zip(PHASES, sums_KP.T)), dict(zip(PHASES, idle_KP.T))


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


def _phase_of_activities(modules: Modules) -> Int:
    """Return for each activity the index of its phase in PHASES."""
    owner, number = modules.owner_A, {name: i for i, name in enumerate(PHASES)}
    return np.select(
        [
            owner == COPIES,
            owner == DATA,
            (owner == OPTIMIZER) | (owner == CLIP),
            modules.backward_A,
            (owner >= 0) | (owner == LOSS) | (owner == FORWARD),
        ],
        [number[p] for p in ("copies", "data", "optimizer", "backward", "forward")],
        number["other"],
    )
