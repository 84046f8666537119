"""Keep events as columns, and compute with their intervals: merge, busy, gaps, attribution.

Pure numpy, no torch: a live recording and a trace file both become a `Timeline`, and every number of a profile is a sum
of intervals. All times are int64 nanoseconds, all intervals half open [start, end). Suffixes: E events, I intervals, G
gaps, Q query points.

Definitions (after HolisticTraceAnalysis, with a step-wide window and a measured back-to-back gap):
busy is the union of device activity over all streams; idle is the window minus busy; each gap belongs to the activity
that starts next. A gap is cut at the end of that activity's launch call. Before the cut it is *host wait*: the device
had nothing to do. After it the first `back_to_back_ns` are *kernel wait* and the rest is *other wait* (stream and event
dependencies). The three parts sum to idle exactly. On a CPU the activity is the operators, nothing is launched, and all
idle time is host wait: time outside operators.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Int = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


class Kind(IntEnum):
    """A Kind says what an event is."""

    OP = 0
    RUNTIME = 1  # CUDA calls on the host
    KERNEL = 2
    MEMCPY = 3
    MEMSET = 4
    ANNOTATION = 5  # ranges named by the framework or the user


# torch's and Chrome traces' categories
CATEGORIES = {
    "cpu_op": Kind.OP,
    "cuda_runtime": Kind.RUNTIME,
    "cuda_driver": Kind.RUNTIME,
    "kernel": Kind.KERNEL,
    "concurrent_kernel": Kind.KERNEL,
    "gpu_memcpy": Kind.MEMCPY,
    "gpu_memset": Kind.MEMSET,
    "user_annotation": Kind.ANNOTATION,
    # other devices, and torch before 1.13
    "xpu_runtime": Kind.RUNTIME,
    "privateuse1_runtime": Kind.RUNTIME,
    "operator": Kind.OP,
    "runtime": Kind.RUNTIME,
    "memcpy": Kind.MEMCPY,
    "memset": Kind.MEMSET,
}


@dataclass(frozen=True)
class Event:
    """An Event is one row of a Timeline. `thread` is a host thread, or the stream of a device activity; `correlation` joins
    a runtime call to the activity it launched; `external` is the operator that contains a runtime call; -1 where there is
    none."""

    kind: Kind
    name: str
    start_ns: int
    end_ns: int
    thread: int = 0
    correlation: int = -1
    external: int = -1
    sequence: int = -1
    nbytes: int = 0


@dataclass(frozen=True, eq=False)
class Timeline:
    """A Timeline holds events sorted by start, the longer first where two start together (so a parent precedes its children)."""

    names: tuple[str, ...]
    kind_E: npt.NDArray[np.uint8]
    name_E: npt.NDArray[np.int32]
    start_E: Int
    end_E: Int
    thread_E: Int
    correlation_E: Int
    external_E: Int
    sequence_E: Int
    nbytes_E: Int
    damaged: int = field(default=0)  # events left out: negative duration or unreadable

    @classmethod
    def of(cls, events: Iterable[Event]) -> Timeline:
        """Build a Timeline from rows in any order; rows that end before they start are left out and counted in `damaged`."""
        index: dict[str, int] = {}
        rows: list[tuple[int, ...]] = []
        damaged = 0
        for e in events:
            if e.end_ns < e.start_ns:
                damaged += 1
                continue
            name = index.setdefault(e.name, len(index))
            rows.append((e.kind, name, e.start_ns, e.end_ns, e.thread, e.correlation, e.external, e.sequence, e.nbytes))
        table = np.array(rows, dtype=np.int64).reshape(-1, 9)
        return cls.from_columns(tuple(index), table.T, damaged)

    @classmethod
    def from_columns(cls, names: tuple[str, ...], columns: npt.ArrayLike, damaged: int = 0) -> Timeline:
        """Build a Timeline from a [9, E] array of kind, name, start, end, thread, correlation, external, sequence, nbytes."""
        table = np.asarray(columns, dtype=np.int64)
        order = np.lexsort((-table[3], table[2]))
        kind, name, start, end, thread, correlation, external, sequence, nbytes = table[:, order]
        kinds, ids = kind.astype(np.uint8), name.astype(np.int32)
        return cls(names, kinds, ids, start, end, thread, correlation, external, sequence, nbytes, damaged)

    def columns(self) -> Int:
        """Return the [9, E] array that `from_columns` reads."""
        return np.stack(
            [
                self.kind_E.astype(np.int64),
                self.name_E.astype(np.int64),
                self.start_E,
                self.end_E,
                self.thread_E,
                self.correlation_E,
                self.external_E,
                self.sequence_E,
                self.nbytes_E,
            ]
        )

    def __len__(self) -> int:
        return len(self.start_E)

    def take(self, which_E: Int | Bool) -> Timeline:
        """Return the chosen events, in the same order."""
        return Timeline(
            self.names,
            self.kind_E[which_E],
            self.name_E[which_E],
            self.start_E[which_E],
            self.end_E[which_E],
            self.thread_E[which_E],
            self.correlation_E[which_E],
            self.external_E[which_E],
            self.sequence_E[which_E],
            self.nbytes_E[which_E],
            self.damaged,
        )

    def is_kind(self, *kinds: Kind) -> Bool:
        """Return a mask of the events of these kinds."""
        return np.isin(self.kind_E, [int(k) for k in kinds])

    def is_named(self, chosen: Iterable[bool]) -> Bool:
        """Return a mask of the events with a chosen name; `chosen` has one truth value for each of `names`."""
        return np.fromiter(chosen, bool, len(self.names))[self.name_E] if self.names else np.zeros(len(self), bool)

    def duration_E(self) -> Int:
        return self.end_E - self.start_E


# ----------------------------------------------------------------------------------------------------------------
# intervals


def merge(start_I: Int, end_I: Int) -> tuple[Int, Int]:
    """Return the union as sorted, disjoint, non-touching intervals; empty ones are dropped."""
    keep = end_I > start_I
    start, end = start_I[keep], end_I[keep]
    if not len(start):
        return start, end
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate(([True], start[1:] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return start[first], reach[last]


def clip(start_I: Int, end_I: Int, begin: int, stop: int) -> tuple[Int, Int]:
    """Cut each interval to [begin, stop); one outside becomes empty."""
    start = np.clip(start_I, begin, stop)
    return start, np.clip(end_I, start, stop)


def total(start_I: Int, end_I: Int) -> int:
    """Return the length of the union."""
    start, end = merge(start_I, end_I)
    return int((end - start).sum())


def covered(start_I: Int, end_I: Int, begin_Q: Int, stop_Q: Int) -> Int:
    """Return for each query [begin, stop) how much of it the union of the intervals covers."""
    start, end = merge(start_I, end_I)
    if not len(start):
        return np.zeros(len(begin_Q), np.int64)
    before = np.concatenate(([0], np.cumsum(end - start)))

    def up_to(t_Q: Int) -> Int:
        i = np.searchsorted(start, t_Q, side="right") - 1  # the last interval that starts at or before t
        inside = np.minimum(t_Q, end[i]) - start[i]
        return np.where(i < 0, 0, before[i] + inside)

    return up_to(np.maximum(stop_Q, begin_Q)) - up_to(begin_Q)


def overlap(start_I: Int, end_I: Int, start_J: Int, end_J: Int) -> int:
    """Return the length of the intersection of two unions."""
    start, end = merge(start_J, end_J)
    return int(covered(start_I, end_I, start, end).sum())


def own_part(start_I: Int, end_I: Int, begin: int, stop: int) -> tuple[Int, Int]:
    """Return for each interval its part of [begin, stop) that no earlier-started one covers. The parts are disjoint and make up
    the union, so time that two streams are busy together is counted once, for the one that was there first."""
    start, end = clip(start_I, end_I, begin, stop)
    order = np.lexsort((-end, start))
    reach = np.maximum.accumulate(end[order]) if len(order) else end
    before = np.concatenate(([begin], reach[:-1])) if len(order) else reach
    start[order] = np.minimum(np.maximum(start[order], before), end[order])
    return start, end


def own_time(start_I: Int, end_I: Int, begin: int, stop: int) -> Int:
    """Return the lengths of the intervals' own parts, which sum to `total` exactly."""
    start, end = own_part(start_I, end_I, begin, stop)
    return end - start


def cut(*layers: tuple[Int, Int]) -> tuple[Int, Int]:
    """Cut the time from the first edge of these layers of intervals to the last one into pieces, at every edge."""
    edges = np.unique(np.concatenate([edge for layer in layers for edge in layer]))
    return edges[:-1], edges[1:]


def gaps(start_I: Int, end_I: Int, begin: int, stop: int) -> tuple[Int, Int, Int]:
    """Find the gaps in [begin, stop), where nothing runs: their starts, their ends, and for each the index of the interval
    that starts at its end (-1 for a last gap that reaches `stop`)."""
    live = np.flatnonzero((end_I > begin) & (start_I < stop) & (end_I > start_I))
    live = live[np.argsort(start_I[live], kind="stable")]
    reach = np.maximum.accumulate(np.concatenate(([begin], end_I[live])))
    following = np.concatenate((start_I[live], [stop]))
    is_gap = following > reach
    return reach[is_gap], following[is_gap], np.concatenate((live, [-1]))[is_gap].astype(np.int64)


def outermost(start_I: Int, end_I: Int, thread_I: Int) -> Bool:
    """Return a mask of the calls inside no other call of their thread. Calls are sorted by start, parents first."""
    found = np.zeros(len(start_I), bool)
    for thread in np.unique(thread_I).tolist():
        here = np.flatnonzero(thread_I == thread)
        reach = np.maximum.accumulate(end_I[here])
        found[here] = np.concatenate(([True], start_I[here][1:] >= reach[:-1]))
    return found


def innermost(start_I: Int, end_I: Int, at_Q: Int) -> Int:
    """Return the index of the innermost interval that contains each query point, -1 outside all. It is meant for intervals
    that are nested or disjoint, as calls are; of others, it gives the one that started last among those that contain the
    point."""
    order = np.lexsort((-end_I, start_I))
    started_Q = np.searchsorted(start_I[order], at_Q, side="right") - 1
    found_Q = _last_above(end_I[order], started_Q, at_Q)
    return np.where(found_Q < 0, -1, order[found_Q]) if len(order) else found_Q


def self_time(start_I: Int, end_I: Int, thread_I: Int) -> Int:
    """Return the duration of each call minus that of its direct children on the same thread. Calls are sorted by start,
    parents first."""
    own = end_I - start_I
    order = np.argsort(thread_I, kind="stable")
    for here in np.split(order, np.flatnonzero(np.diff(thread_I[order])) + 1):
        start, end = start_I[here], end_I[here]
        parent = _last_above(end, np.arange(len(here)) - 1, start)  # the last call before it that ends after its start
        child = np.flatnonzero(parent >= 0)
        parent = parent[child]
        np.subtract.at(own, here[parent], np.minimum(end[child], end[parent]) - start[child])
    return own


def _last_above(value_I: Int, upto_Q: Int, bound_Q: Int) -> Int:
    """Return for each query the last index <= upto whose value is above the bound, -1 when there is none: a search in a
    pyramid of maxima over pairs, pairs of pairs, and so on."""
    found_Q = np.full(len(upto_Q), -1, np.int64)
    near = (upto_Q >= 0) & (value_I[upto_Q] > bound_Q) if len(value_I) else np.zeros(len(upto_Q), bool)
    found_Q[near] = upto_Q[near]
    rest = np.flatnonzero(~near & (upto_Q > 0))  # queries still open
    if not len(rest):
        return found_Q
    levels = [value_I]
    while len(levels[-1]) > 1:
        below = levels[-1]
        levels.append(np.maximum.reduceat(below, np.arange(0, len(below), 2)))
    bound, count = bound_Q[rest], upto_Q[rest] + 1  # the blocks 0 to count - 1 of this level are before the query
    block, height = np.full(len(rest), -1, np.int64), np.zeros(len(rest), np.int64)
    going = np.arange(len(rest))
    for level, top in enumerate(levels):
        odd = count[going] % 2 == 1  # the last block has no partner on this side, so it is looked at here
        last = count[going] - 1
        hit = odd & (top[last] > bound[going])
        block[going[hit]], height[going[hit]] = last[hit], level
        count[going] //= 2
        going = going[~hit & (count[going] > 0)]
    for level in range(len(levels) - 2, -1, -1):  # down again, to the right one of two where it has such a value
        inner = np.flatnonzero(height > level)
        right = np.minimum(2 * block[inner] + 1, len(levels[level]) - 1)
        block[inner] = np.where(levels[level][right] > bound[inner], right, 2 * block[inner])
    found_Q[rest] = block
    return found_Q


# ----------------------------------------------------------------------------------------------------------- busy and idle


@dataclass(frozen=True, eq=False)
class Breakdown:
    """A Breakdown divides one window: busy_ns + host_wait + kernel_wait + other_wait = stop - begin, in nanoseconds, exactly."""

    begin: int
    stop: int
    busy_ns: int
    gap_start_G: Int
    gap_end_G: Int
    next_G: Int  # index of the activity that ends the gap, -1 at the end of the window
    host_wait_G: Int
    kernel_wait_G: Int
    other_wait_G: Int

    @property
    def wall_ns(self) -> int:
        return self.stop - self.begin

    @property
    def idle_ns(self) -> int:
        return int((self.gap_end_G - self.gap_start_G).sum())


def breakdown(
    start_I: Int, end_I: Int, begin: int, stop: int, launch_end_I: Int | None = None, back_to_back_ns: int = 1000
) -> Breakdown:
    """Divide [begin, stop) into busy and idle time, each gap split as the module's docstring says.

    `launch_end_I` is the end of the host call that launched each activity (-1: not recorded, so the wait is not counted as
    the host's); None means that nothing is launched (a CPU run): all idle time is host wait. A last gap with no next
    activity is host wait.
    """
    start_G, end_G, next_G = gaps(start_I, end_I, begin, stop)
    length_G = end_G - start_G
    if launch_end_I is None or not len(launch_end_I):
        host_G = length_G.copy()
    else:
        launched_G = np.where(next_G < 0, end_G, launch_end_I[next_G])
        host_G = np.clip(launched_G - start_G, 0, length_G)
    kernel_G = np.minimum(length_G - host_G, back_to_back_ns)
    return Breakdown(
        begin,
        stop,
        max(stop - begin, 0) - int(length_G.sum()),
        start_G,
        end_G,
        next_G,
        host_G,
        kernel_G,
        length_G - host_G - kernel_G,
    )
