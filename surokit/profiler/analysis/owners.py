"""Find the owner of a piece of work: a module, or one of the pseudo-rows for work outside modules.

(optimizer): inside torch's "Optimizer." ranges. (clip): between a backward and the optimizer's step, from the first norm
or clamp of gradients to the last operator that scales them. (data): inside a data loader. (loss): operators that autograd
differentiates outside any module, or that are losses by name, and their backward nodes; without modules the
differentiated ones are (forward). (communication): collectives. (copies): the device's copies. (cuda graph): kernels of a
replayed graph that nobody names. (backward): the rest of the backward pass, (outside modules): the rest.
"""

from __future__ import annotations

import re
from functools import cached_property

import numpy as np

from surokit.profiler.analysis import timeline as tl
from surokit.profiler.analysis.attribution import Attribution, on_threads, pick
from surokit.profiler.analysis.roles import DATA_RANGES, OPTIMIZER_RANGES, Observed
from surokit.profiler.analysis.timeline import Bool, Int, Kind, Timeline
from surokit.profiler.record.recording import Recording

PSEUDO = (
    "(outside modules)",
    "(backward)",
    "(loss)",
    "(clip)",
    "(optimizer)",
    "(data)",
    "(communication)",
    "(copies)",
    "(cuda graph)",
    "(forward)",
)
OUTSIDE, BACKWARD, LOSS, CLIP, OPTIMIZER, DATA, COMMUNICATION, COPIES, GRAPH, FORWARD = range(-1, -11, -1)
_LOSS = re.compile(r"loss|cross_entropy|logsoftmax|log_softmax|kl_div", re.IGNORECASE)
_NORM = re.compile(
    r"^aten::(_foreach_norm|linalg_vector_norm|norm|_foreach_clamp\w*|clamp_|_amp_foreach_non_finite\w*)$"
)
_SCALE = re.compile(r"^aten::(_foreach_mul_|mul_)$")


class Owners:
    """Owners finds the owner of a host moment, from the events of one timeline: the recording's, unless another is given.

    An owner is an index into the recording's modules, or -1 - p for PSEUDO[p].
    """

    def __init__(self, recording: Recording, timeline: Timeline | None = None) -> None:
        events = recording.timeline if timeline is None else timeline
        self.r = recording
        self.attribution = Attribution(recording, timeline)
        self.ops, self.nodes = self.attribution.ops, self.attribution.nodes
        self.ranges = events.take(events.is_kind(Kind.ANNOTATION))
        self.tops = self.ops.take(tl.outermost(self.ops.start_E, self.ops.end_E, self.ops.thread_E))

    def at(self, thread_Q: Int, at_Q: Int) -> tuple[Int, Bool]:
        """Return the owner at each of these host moments, and whether it is in a backward pass."""
        owner, node = self.attribution.module_and_node_at(thread_Q, at_Q)
        out = np.flatnonzero(owner < 0)  # most work belongs to modules: only the rest is looked at closer
        thread, at, node_Q = thread_Q[out], at_Q[out], node[out]
        forward = node_Q < 0
        top = np.where(forward, self.top_at(thread, at), -1)
        loss = _mask_at(self._loss_T, top) | _mask_at(self._loss_N, node_Q)
        owner[out] = np.select(
            [
                _within(self._ranges(OPTIMIZER_RANGES), at),
                _within(self.clipping, at),
                _within(self._ranges(DATA_RANGES), at),
                loss,
                _mask_at(self.differentiated, top),
                ~forward,
            ],
            [OPTIMIZER, CLIP, DATA, LOSS, FORWARD, BACKWARD],
            OUTSIDE,
        )
        return owner, node >= 0

    def _ranges(self, beginnings: tuple[str, ...]) -> tuple[Int, Int]:
        chosen = self.ranges.take(self.ranges.is_named(n.startswith(beginnings) for n in self.ranges.names))
        return chosen.start_E, chosen.end_E

    def top_at(self, thread_Q: Int, at_Q: Int) -> Int:
        """Return the outermost operator that runs at each of these host moments, an index into `tops`; -1 where none does."""
        return on_threads(self.tops.thread_E, self.tops.start_E, self.tops.end_E, thread_Q, at_Q)

    @cached_property
    def _top_of_maker_N(self) -> Int:
        """Return for each autograd node the outermost operator in which its maker ran."""
        maker, ops = self.attribution.maker_N, self.ops
        return self.top_at(pick(ops.thread_E, maker), pick(ops.start_E, maker))

    @cached_property
    def differentiated(self) -> Bool:
        """Return for each outermost forward operator whether autograd made a node for it outside any module."""
        found = np.zeros(len(self.tops), bool)
        top = self._top_of_maker_N[self.attribution.module_N < 0]
        found[top[top >= 0]] = True
        return found

    @cached_property
    def _loss_T(self) -> Bool:
        by_name = self.tops.is_named(bool(_LOSS.search(n)) for n in self.tops.names)
        return by_name | self.differentiated if len(self.r.module_S) else by_name

    @cached_property
    def _loss_N(self) -> Bool:
        by_name = self.nodes.is_named(bool(_LOSS.search(n)) for n in self.nodes.names)
        return by_name | _mask_at(self._loss_T, self._top_of_maker_N)

    @cached_property
    def clipping(self) -> tuple[Int, Int]:
        """Return the intervals in which gradients are clipped, before each optimizer step."""
        tops, found = self.tops, []
        norm = tops.start_E[tops.is_named(bool(_NORM.search(n)) for n in tops.names)]
        ends = np.sort(tops.end_E[tops.is_named(bool(_NORM.search(n) or _SCALE.search(n)) for n in tops.names)])
        backward, after = np.sort(self.nodes.end_E), -1
        for start in self._ranges(("Optimizer.step",))[0].tolist():
            last = np.searchsorted(backward, start, "right")
            after = max(after, int(backward[last - 1])) if last else after
            first, over = np.searchsorted(norm, after), np.searchsorted(ends, start, "right")
            if last and first < len(norm) and norm[first] < start:
                found.append((norm[first], ends[over - 1]))
            after = start
        table = np.array(found, np.int64).reshape(-1, 2)
        return table[:, 0], table[:, 1]


def owners_of(o: Observed) -> tuple[Owners, Int, Bool]:
    """Return the owner of each activity and whether it is backward work."""
    owners = Owners(o.r)
    owner, backward = owners.at(o.host_thread_A, o.host_time_A)
    owner[o.in_graph_A & ((owner == OUTSIDE) | (owner == BACKWARD))] = GRAPH
    if o.on_gpu:
        owner[o.active.is_kind(Kind.MEMCPY)] = COPIES
    owner[o.communicates_A] = COMMUNICATION
    return owners, owner, backward


def _mask_at(mask: Bool, index_Q: Int) -> Bool:
    return np.where(index_Q >= 0, mask[index_Q], False) if len(mask) else np.zeros(len(index_Q), bool)


def _within(ranges: tuple[Int, Int], at_Q: Int) -> Bool:
    return tl.covered(*ranges, at_Q, at_Q + 1) > 0
