"""Find the module that asked for a piece of work: the one whose code ran on the host at that moment, forward or backward.

Hooks give the modules' spans on the host. Backward work runs on autograd's thread, outside any module: a backward node
belongs to the module whose forward operator made it, since autograd gives both the same sequence number. A node may
compute a graph of its own and differentiate it, as a checkpoint does: nodes in there are made in there, and where that was in no
module they belong to that of the node around them.
"""

from __future__ import annotations

import numpy as np

from surokit.profiler.analysis import timeline as tl
from surokit.profiler.analysis.timeline import Int, Kind, Timeline
from surokit.profiler.record.recording import Recording

_NODE = "autograd::engine::evaluate_function"


class Attribution:
    """An Attribution finds the module of a host moment, from the operators of one timeline: the recording's, unless another
    is given. Suffix N: autograd's nodes."""

    def __init__(self, recording: Recording, timeline: Timeline | None = None) -> None:
        self.r = recording
        events = recording.timeline if timeline is None else timeline
        self.ops = events.take(events.is_kind(Kind.OP))
        self.nodes = self.ops.take(self.ops.is_named(n.startswith(_NODE) for n in events.names))
        nodes = self.nodes
        # the outermost node around each node, itself where there is none
        self._around_N = outermost_around(nodes)
        self.maker_N = self._makers()
        makers = self.ops.take(np.maximum(self.maker_N, 0)) if len(self.ops) else self.ops
        module_N = np.where(self.maker_N >= 0, self._span_module(makers.thread_E, makers.start_E), -1)
        self.module_N = np.where(module_N < 0, pick(module_N, self._around_N), module_N)

    def module_and_node_at(self, thread_Q: Int, at_Q: Int) -> tuple[Int, Int]:
        """Return the module at each of these host moments and the autograd node (an index into `nodes`), each -1 where
        there is none."""
        nodes = self.nodes
        module = self._span_module(thread_Q, at_Q)  # first: a checkpoint runs modules again inside a node
        node = on_threads(nodes.thread_E, nodes.start_E, nodes.end_E, thread_Q, at_Q)
        return np.where((module < 0) & (node >= 0), pick(self.module_N, node), module), node

    def _span_module(self, thread_Q: Int, at_Q: Int) -> Int:
        r = self.r
        return pick(r.module_S, on_threads(r.thread_S, r.start_S, r.end_S, thread_Q, at_Q))

    def _makers(self) -> Int:
        """Return the operator that made each node (-1: not recorded): the last forward one with the node's sequence number.
        A node without a number accumulates the gradient that the node before it on its thread has computed, and gets the
        same maker as that node."""
        ops, nodes = self.ops, self.nodes
        node_O = on_threads(nodes.thread_E, nodes.start_E, nodes.end_E, ops.thread_E, ops.start_E)
        forward = np.flatnonzero((ops.sequence_E >= 0) & (node_O < 0))[::-1]
        maker = pick(forward, lookup(ops.sequence_E[forward], nodes.sequence_E))
        # of a node in another one: what ran in that one, and in no further node, with the same number
        inner = np.flatnonzero((ops.sequence_E >= 0) & (node_O >= 0) & (pick(self._around_N, node_O) == node_O))[::-1]
        size = int(max(ops.sequence_E.max(initial=0), nodes.sequence_E.max(initial=0))) + 1
        nested = (self._around_N >= 0) & (self._around_N != np.arange(len(nodes)))
        wanted = np.where(nested & (nodes.sequence_E >= 0), self._around_N * size + nodes.sequence_E, -1)
        own = pick(inner, lookup(node_O[inner] * size + ops.sequence_E[inner], wanted))
        maker = np.where(nested, np.where(own >= 0, own, pick(maker, self._around_N)), maker)
        for thread in np.unique(nodes.thread_E).tolist():
            here = np.flatnonzero(nodes.thread_E == thread)
            numbered = np.where(nodes.sequence_E[here] >= 0, np.arange(len(here)), -1)
            before = np.maximum.accumulate(numbered)
            maker[here] = pick(maker[here], before)
        return maker


def pick(values: Int, index_Q: Int) -> Int:
    """Return values[index], with -1 where the index is -1."""
    return np.where(index_Q >= 0, values[index_Q], -1) if len(values) else np.full(len(index_Q), -1, np.int64)


def on_threads(thread_I: Int, start_I: Int, end_I: Int, thread_Q: Int, at_Q: Int) -> Int:
    """Apply `timeline.innermost` to each thread by itself."""
    found = np.full(len(at_Q), -1, np.int64)
    for thread in np.unique(thread_I).tolist():
        here = np.flatnonzero(thread_I == thread)
        asked = np.flatnonzero(thread_Q == thread)
        if len(asked):
            found[asked] = pick(here, tl.innermost(start_I[here], end_I[here], at_Q[asked]))
    return found


def shown_path(path: str, paths: tuple[tuple[str, str], ...]) -> str:
    """Return a module's path as the user's own model names it: without the outermost module, unless several outermost
    modules have children. `paths` are a recording's modules."""
    trunks = {p.partition(".")[0] for p, _ in paths if "." in p}
    return path.partition(".")[2] or path if len(trunks) == 1 else path


def outermost_around(calls: Timeline) -> Int:
    """Return for each call the index of the outermost one around it on its thread, its own where there is none; -1 for one without
    duration."""
    outer = np.flatnonzero(tl.outermost(calls.start_E, calls.end_E, calls.thread_E))
    alone = calls.take(outer)
    return pick(outer, on_threads(alone.thread_E, alone.start_E, alone.end_E, calls.thread_E, calls.start_E))


def lookup(keys: Int, wanted_Q: Int) -> Int:
    """Return the index into `keys` of each wanted id: the first of equal ones, -1 where the id is absent or negative."""
    if not len(keys):
        return np.full(len(wanted_Q), -1, np.int64)
    order = np.argsort(keys, kind="stable")
    at = np.minimum(np.searchsorted(keys[order], wanted_Q), len(keys) - 1)
    found = order[at]
    return np.where((keys[found] == wanted_Q) & (wanted_Q >= 0), found, -1).astype(np.int64)
