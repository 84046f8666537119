"""Find the module for each kernel of a replayed CUDA graph.

Hooks do not run in a replay, and all its kernels share one launch. A step recorded before the capture ran the same
kernels in the same order, launched by modules; the two sequences of names are aligned, and a kernel of the replay
belongs to whoever launched its counterpart. Kernels that only one of the two has are skipped.
"""

from __future__ import annotations

import numpy as np

from surokit.profiler.analysis.roles import Observed
from surokit.profiler.analysis.timeline import Int

CELLS = 50_000_000  # of the alignment's table (uint16); a longer stretch without agreement is left unnamed


def repeats(eager: Observed, replay: Observed) -> Int:
    """Return for each activity of `replay` that a CUDA graph ran the activity in the last step of `eager` that it repeats;
    -1 for all others and where there is none."""
    found = np.full(len(replay.active), -1, np.int64)
    source = _launched(eager, len(eager.hosts) - 2)
    index: dict[str, int] = {}
    known = np.array([index.setdefault(eager.names[n], len(index)) for n in eager.active.name_E[source]], np.int64)
    number = np.array([index.get(n, -1) for n in replay.names], np.int64)
    seen: dict[bytes, Int] = {}
    for step in range(replay.steps):
        here = _launched(replay, step)
        here = here[replay.in_graph_A[here]]
        wanted = number[replay.active.name_E[here]]
        key = wanted.tobytes()
        if key not in seen:
            seen[key] = align(known, wanted)
        found[here] = np.where(seen[key] >= 0, source[seen[key]] if len(source) else -1, -1)
    return found


def _launched(o: Observed, step: int) -> Int:
    """Return the activities that one step launched: in the order of their launches, those of one launch by their start."""
    time = o.host_time_A
    here = np.flatnonzero((time >= o.hosts[step]) & (time < o.hosts[step + 1]))
    return here[np.argsort(time[here], kind="stable")]


def align(known: Int, wanted: Int) -> Int:
    """Return for each element of `wanted` the index of its partner in `known` by a longest common subsequence, -1 without one."""
    pairs = np.full(len(wanted), -1, np.int64)
    shorter = min(len(known), len(wanted))
    head = _agreement(known[:shorter], wanted[:shorter])
    tail = _agreement(known[::-1][: shorter - head], wanted[::-1][: shorter - head])
    pairs[:head] = np.arange(head)
    pairs[len(wanted) - tail :] = np.arange(len(known) - tail, len(known))
    rest, asked = known[head : len(known) - tail], wanted[head : len(wanted) - tail]
    if 0 < len(rest) * len(asked) <= CELLS:
        middle = _longest_common(rest, asked)
        pairs[head : len(wanted) - tail] = np.where(middle >= 0, middle + head, -1)
    return pairs


def _agreement(a: Int, b: Int) -> int:
    """Return the number of elements that agree at the start."""
    differ = np.flatnonzero(a != b)
    return int(differ[0]) if len(differ) else len(a)


def _longest_common(known: Int, wanted: Int) -> Int:
    """Pair the elements of a longest common subsequence, one row of the usual table at a time (each row rises by 0 or 1, so
    a running maximum completes it)."""
    length = np.zeros((len(known) + 1, len(wanted) + 1), np.uint16 if len(wanted) < 1 << 16 else np.uint32)
    for i, name in enumerate(known.tolist()):
        above = length[i]
        np.maximum.accumulate(np.maximum(above[1:], above[:-1] + (wanted == name)), out=length[i + 1, 1:])
    pairs = np.full(len(wanted), -1, np.int64)
    i, j = len(known), len(wanted)
    while i and j:
        if length[i, j] == length[i - 1, j]:
            i -= 1
        elif length[i, j] == length[i, j - 1]:
            j -= 1
        else:
            i, j = i - 1, j - 1
            pairs[j] = i
    return pairs
