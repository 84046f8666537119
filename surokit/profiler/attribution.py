"""Who asked for a piece of work: the module whose code ran on the host at that moment, forward or backward.

Hooks give the modules' spans on the host. Backward work runs on autograd's thread, outside any module: a backward node
belongs to the module whose forward operator made it, since autograd gives both the same sequence number.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from surokit.profiler import timeline as tl
from surokit.profiler.recording import Recording
from surokit.profiler.timeline import Bool, Int, Kind, Timeline

_NODE = "autograd::engine::evaluate_function"


class Attribution:
    """Modules of host moments, for the operators of one timeline: the recording's, unless another is given."""

    def __init__(self, recording: Recording, timeline: Timeline | None = None) -> None:
        self.r = recording
        events = recording.timeline if timeline is None else timeline
        self.ops = events.take(events.is_kind(Kind.OP))
        self.nodes = self.ops.take(self.ops.is_named(n.startswith(_NODE) for n in events.names))

    def module_at(self, thread_Q: Int, at_Q: Int) -> tuple[Int, Bool]:
        """The module that runs at these host moments (-1: none), and whether it is in its backward pass."""
        r = self.r
        span = on_threads(r.thread_S, r.start_S, r.end_S, thread_Q, at_Q)
        module = np.where(span >= 0, r.module_S[span] if len(r.module_S) else -1, -1)
        node = on_threads(self.nodes.thread_E, self.nodes.start_E, self.nodes.end_E, thread_Q, at_Q)
        backward = node >= 0
        if len(self.nodes) and len(r.module_S):
            sequence = np.where(backward, self.nodes.sequence_E[node], -1).tolist()
            via_node = np.array([self._makers.get(s, -1) for s in sequence], np.int64)
            module = np.where(module < 0, via_node, module)
        return module, backward

    @cached_property
    def _makers(self) -> dict[int, int]:
        """Sequence number -> module whose forward made that autograd node: the last operator to carry a number is its
        maker."""
        ops, nodes, r = self.ops, self.nodes, self.r
        node = on_threads(nodes.thread_E, nodes.start_E, nodes.end_E, ops.thread_E, ops.start_E)
        forward = ops.take((ops.sequence_E >= 0) & (node < 0))
        span = on_threads(r.thread_S, r.start_S, r.end_S, forward.thread_E, forward.start_E)
        module = np.where(span >= 0, r.module_S[span], -1)
        return dict(zip(forward.sequence_E.tolist(), module.tolist()))


def on_threads(thread_I: Int, start_I: Int, end_I: Int, thread_Q: Int, at_Q: Int) -> Int:
    """`timeline.innermost`, thread by thread."""
    found = np.full(len(at_Q), -1, np.int64)
    for thread in np.unique(thread_I).tolist():
        here = np.flatnonzero(thread_I == thread)
        asked = np.flatnonzero(thread_Q == thread)
        inner = tl.innermost(start_I[here], end_I[here], at_Q[asked])
        found[asked] = np.where(inner >= 0, here[inner], -1)
    return found


def shown_path(path: str, paths: tuple[tuple[str, str], ...]) -> str:
    """A module's path as the user's own model names it: without the outermost module, unless several outermost
    modules have children. `paths` are a recording's modules."""
    trunks = {p.partition(".")[0] for p, _ in paths if "." in p}
    return path.partition(".")[2] or path if len(trunks) == 1 else path


def lookup(keys: Int, wanted_Q: Int) -> Int:
    """Index into `keys` of each wanted id, -1 where it is absent or negative."""
    if not len(keys):
        return np.full(len(wanted_Q), -1, np.int64)
    order = np.argsort(keys, kind="stable")
    at = np.minimum(np.searchsorted(keys[order], wanted_Q), len(keys) - 1)
    found = order[at]
    return np.where((keys[found] == wanted_Q) & (wanted_Q >= 0), found, -1).astype(np.int64)
