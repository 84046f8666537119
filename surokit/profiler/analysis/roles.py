"""Sort a Recording into roles: what was active, who launched it, where the host waited, and where the steps lie.

The window is the step. On a GPU it is cut on device time: at the last activity that was launched before the step's mark,
or at the mark itself when the step launched nothing and nothing runs. Every table is a sum over these windows.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from surokit.profiler.analysis import timeline as tl
from surokit.profiler.analysis.attribution import lookup, on_threads, pick
from surokit.profiler.analysis.timeline import Bool, Breakdown, Int, Kind, Timeline
from surokit.profiler.record.recording import Recording, SyncPoint

NOTED_BEFORE_NS = 1_000_000  # a wait belongs to a sync that was noted at most this long before
SKEW_NS = 1_000  # clocks that differ by less are not worth a note
_SYNC_CALLS = (  # without the version that some tracers add, as in cudaMemcpy_v3020
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
    "cudaMemcpy",
)
_COMMUNICATION = re.compile(r"nccl|rccl|^c10d::|^gloo:|record_param_comms|^_c10d_functional::wait", re.IGNORECASE)
COLLECTIVE_RANGES = ("gloo:",)  # a collective on the host, from when a thread of gloo's begins it to its end
DATA_RANGES = ("enumerate(DataLoader)", "data:")
_HOST_STATE = ("torch/optim/", "torch/utils/data/", "surokit/offload/", "surokit/optim/", "surokit/kernels/")
OPTIMIZER_RANGES = ("Optimizer.",)
OFFLOAD_RANGES = (
    "surokit.offload.wait ",
)  # where an optimizer waits for what it keeps on the host; what it waits for follows

Table = dict[str, list[Any]]


def table(columns: str, rows: list[tuple[Any, ...]]) -> Table:
    """Build a table from rows; its columns are named in one string."""
    return {name: [row[i] for row in rows] for i, name in enumerate(columns.split())}


def ms(ns: float) -> float:
    return float(ns) / 1e6


def short_file(file: str) -> str:
    """Return the last part of a path; a name such as `cell [3]` stays whole."""
    return file.replace("\\", "/").rpartition("/")[2]


def place_text(file: str, line: int) -> str:
    return f"{short_file(file)}:{line}" if file else "an unknown line"


def is_operator(name: str) -> bool:
    """Return whether a cpu_op counts as work. Autograd's node wrappers do not: they would hide the Python inside a custom
    backward."""
    return ("::" in name and not name.startswith(("autograd::", "torch::autograd::"))) or name.startswith(
        ("Torch-Compiled Region", "CompiledFunction")
    )


class Observed:
    """Observed holds the arrays that the tables share. Suffix A: activities, which are kernels, copies and fills on a GPU,
    operators on a CPU.

    host_thread_A and host_time_A: where on the host each was asked for. own_A: its share of the busy time of the steps.
    windows: (begin, stop) of each step K on device time; hosts: the marks between steps on the host. G: the gaps of all steps,
    in order. seen: whether anything was recorded whose absence is idle time.
    """

    def __init__(self, recording: Recording) -> None:
        self.r = recording
        self.notes = list(recording.notes)
        every = recording.timeline
        self.names = every.names
        device = every.is_kind(Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET)
        self.on_gpu = bool(device.any())
        self.ops = every.take(every.is_kind(Kind.OP))
        self.calls = every.take(every.is_kind(Kind.RUNTIME))
        self.ranges = every.take(every.is_kind(Kind.ANNOTATION))
        self.active = every.take(device) if self.on_gpu else self.ops.take(self.named(self.ops, is_operator))
        if every.damaged:
            self.notes.append(f"{every.damaged} damaged events were left out")
        self._join_launches()
        self._cut_steps()
        self._break_down()
        self._find_waits()
        # where torch did nothing its idle share would be that of a program that is not seen
        ran = self.ops.start_E[self.named(self.ops, is_operator)]
        self.seen = recording.traced and bool(self.busy_K.any() or self.in_steps(ran).any())
        if recording.traced and not self.seen:
            self.notes.append(
                "no torch operator was recorded in these steps, so their busy and idle time are not known: "
                "the work was done outside of torch, or in another thread or process"
            )

    def named(self, events: Timeline, chosen: Callable[[str], object] | tuple[str, ...]) -> Bool:
        """Return a mask of the events with a chosen name: chosen by a function, or by one of several beginnings."""
        if isinstance(chosen, tuple):
            return events.is_named(n.startswith(chosen) for n in self.names)
        return events.is_named(bool(chosen(n)) for n in self.names)

    # ------------------------------------------------------------------------------------------------ host and device

    def _join_launches(self) -> None:
        a, calls, ops = self.active, self.calls, self.ops
        self.call_A = np.full(len(a), -1, np.int64)
        self.in_graph_A = np.zeros(len(a), bool)
        self.launch_end_A: Int | None = None
        if not self.on_gpu:
            self.host_thread_A, self.host_time_A = a.thread_E, a.start_E
            return
        self.call_A = call = lookup(calls.correlation_E, a.correlation_E)
        known = call >= 0
        launch_end, thread, time = np.full(len(a), -1, np.int64), np.full(len(a), -1, np.int64), a.start_E.copy()
        for target, source in ((launch_end, calls.end_E), (thread, calls.thread_E), (time, calls.start_E)):
            target[known] = source[call[known]]
        # The operator is on the thread that the module hooks saw; the call's own thread id may be another numbering.
        op = lookup(ops.external_E, a.external_E)
        thread[op >= 0] = ops.thread_E[op[op >= 0]]
        only_op = (op >= 0) & ~known
        time[only_op] = ops.start_E[op[only_op]]
        self.host_thread_A, self.host_time_A = thread, time
        # All kernels of a CUDA graph share its launch: only the first can have waited for the host.
        graph = self.graph_calls()
        self.in_graph_A[known] = graph[call[known]]
        nodes = np.flatnonzero(self.in_graph_A)
        _, first = np.unique(call[nodes], return_index=True)
        launch_end[np.delete(nodes, first)] = -1
        self.launch_end_A = launch_end
        early = np.where(known, pick(calls.start_E, call) - a.start_E, 0)
        if (early > SKEW_NS).any() and not any("clock" in note for note in self.notes):
            self.notes.append(
                f"{int((early > SKEW_NS).sum())} of {len(a)} device activities begin before the call that launched them, by "
                f"up to {early.max() / 1e3:.3g} us: the device's clock is behind the host's, and each gap's host wait is "
                "overstated by about that much"
            )

    # ------------------------------------------------------------------------------------------------ steps

    def _cut_steps(self) -> None:
        r, a = self.r, self.active
        marks = [m for m in r.marks_ns if r.start_ns < m <= r.end_ns]
        self.skipped = 0
        if len(marks) < 2:  # without steps, or with a single one, the block is the step
            hosts = [r.start_ns, max(r.end_ns, r.start_ns)]
        else:
            self.skipped = min(r.warmup, len(marks) - 1)
            if self.skipped < r.warmup:
                self.notes.append(
                    f"{len(marks)} steps were seen, so {self.skipped} instead of {r.warmup} count as warm-up"
                )
            hosts = [r.start_ns, *marks]
        cuts = list(hosts)
        if self.on_gpu:
            order = np.argsort(self.host_time_A, kind="stable")
            reach = np.maximum.accumulate(a.end_E[order])
            launched = np.searchsorted(self.host_time_A[order], hosts, side="left").tolist()
            for k in range(1, len(hosts)):
                last = int(reach[launched[k] - 1]) if launched[k] else hosts[k]
                # The block's own end follows a synchronisation, so a single window ends with whichever is later.
                alone = launched[k] == launched[k - 1] or len(marks) < 2
                cuts[k] = max(last, hosts[k]) if alone else last
            cuts = np.maximum.accumulate(cuts).tolist()
        self.hosts, cuts = hosts[self.skipped :], cuts[self.skipped :]
        self.windows = tuple(itertools.pairwise(cuts))
        self.begin, self.stop = cuts[0], cuts[-1]
        self.steps = len(self.windows)

    @property
    def wall_ns(self) -> int:
        return self.stop - self.begin

    def in_steps(self, host_E: Int) -> Bool:
        """Return a mask of the host moments that lie in the measured steps."""
        return (host_E >= self.hosts[0]) & (host_E < self.hosts[-1])

    def asked_in_steps(self) -> Bool:
        return self.in_steps(self.host_time_A)

    def _break_down(self) -> None:
        """Break the steps down into busy and idle time: the gaps of all steps in one row of arrays, and each activity's share."""
        a = self.active
        reach = np.maximum.accumulate(a.end_E)
        self.within: list[Int] = []  # by step: the activities that reach into its window
        self.own: list[Int] = []  # by step: their shares of its busy time
        parts: list[Breakdown] = []
        for begin, stop in self.windows:
            first, last = np.searchsorted(reach, begin, "right"), np.searchsorted(a.start_E, stop, "left")
            here = first + np.flatnonzero(a.end_E[first:last] > begin)
            start, end = a.start_E[here], a.end_E[here]
            launch_end = self.launch_end_A[here] if self.launch_end_A is not None else None
            parts.append(tl.breakdown(start, end, begin, stop, launch_end, self.r.back_to_back_ns))
            self.own.append(tl.own_time(start, end, begin, stop))
            self.within.append(here)
        self.own_A = np.zeros(len(a), np.int64)
        for here, own in zip(self.within, self.own):
            self.own_A[here] += own
        self.busy_K = np.array([p.busy_ns for p in parts], np.int64)
        self.step_G = np.repeat(np.arange(len(parts)), [len(p.next_G) for p in parts])
        self.start_G = np.concatenate([p.gap_start_G for p in parts])
        self.end_G = np.concatenate([p.gap_end_G for p in parts])
        self.host_G = np.concatenate([p.host_wait_G for p in parts])
        self.kernel_G = np.concatenate([p.kernel_wait_G for p in parts])
        self.other_G = np.concatenate([p.other_wait_G for p in parts])
        following = [pick(here, p.next_G) for p, here in zip(parts, self.within)]
        self.next_G = np.concatenate(following)  # the activity that ends the gap, -1 at the end of a window

    def by_step(self, value_G: Int) -> Int:
        """Sum a value of the gaps for each step."""
        sums = np.zeros(self.steps, np.int64)
        np.add.at(sums, self.step_G, value_G)
        return sums

    # ------------------------------------------------------------------------------------------------ what the host did

    def _find_waits(self) -> None:
        """Find the calls in which the host waits for the device: CUDA's own, and the recorded reads of device values."""
        self.waits = self.calls.take(self.named(self.calls, lambda n: n.partition("_")[0] in _SYNC_CALLS))
        if self.on_gpu:
            self.reads = self._with_their_waits([s for s in self.r.syncs if s.device != "cpu"])
        else:  # counters of an optimizer, a loader's seed and what kernels for CPUs read are there on purpose: nobody waits for it
            self.reads = [s for s in self.r.syncs if not s.inside.startswith(_HOST_STATE)]
        start, end = intervals(self.reads)
        self.sync = np.concatenate((self.waits.start_E, start)), np.concatenate((self.waits.end_E, end))

    def _with_their_waits(self, reads: list[SyncPoint]) -> list[SyncPoint]:
        """Complete the syncs that were noted at their start only: the wait that follows gives the length, the operator
        around it the name."""
        at, _ = intervals(reads)
        thread = np.array([s.thread for s in reads], np.int64)
        around = on_threads(self.ops.thread_E, self.ops.start_E, self.ops.end_E, thread, at)
        following = np.searchsorted(self.waits.start_E, at)
        out = []
        for read, op, wait in zip(reads, around.tolist(), following.tolist()):
            if read.start_ns < read.end_ns:
                out.append(read)
                continue
            near = wait < len(self.waits) and self.waits.start_E[wait] < read.start_ns + NOTED_BEFORE_NS
            end = int(self.waits.end_E[wait]) if near else read.end_ns
            call = self.names[self.ops.name_E[op]] if op >= 0 else read.call
            out.append(replace(read, call=call, end_ns=end))
        return out

    def reads_in_steps(self) -> list[SyncPoint]:
        return [s for s in self.reads if self.hosts[0] <= s.start_ns < self.hosts[-1]]

    def ranges_named(self, beginnings: tuple[str, ...]) -> tuple[Int, Int]:
        chosen = self.ranges.take(self.named(self.ranges, beginnings))
        return chosen.start_E, chosen.end_E

    def copy_calls(self) -> tuple[Int, Int]:
        chosen = self.calls.take(self.named(self.calls, ("cudaMemcpy", "cuMemcpy")))
        return chosen.start_E, chosen.end_E

    def launches(self) -> int:
        """Count the device launches in all steps (a CUDA graph is one), or on a CPU the operators called from outside any
        operator."""
        if self.on_gpu:
            launch = self.named(self.calls, lambda n: "Launch" in n and "HostFunc" not in n)
            return int((launch & self.in_steps(self.calls.start_E)).sum())
        return int((self.own_A[self.asked_in_steps()] > 0).sum())

    def graph_calls(self) -> Bool:
        """Return a mask of the calls that launch a CUDA graph."""
        return self.named(self.calls, lambda n: "GraphLaunch" in n)

    @cached_property
    def communicates_A(self) -> Bool:
        """Return a mask of the activities that move data between devices: collectives by name, and what their operators
        asked for. What gloo does on the host is no activity but a range."""
        ops = self.ops.take(self.named(self.ops, _COMMUNICATION.search))
        found = self.named(self.active, _COMMUNICATION.search)
        if len(ops):
            within = on_threads(ops.thread_E, ops.start_E, ops.end_E, self.host_thread_A, self.host_time_A)
            found |= within >= 0
        return found

    def communication(self) -> tuple[Int, Int]:
        """Return the intervals in which data moves between processes, or waits for that: activities and ranges on the host."""
        talk, (start, end) = self.active.take(self.communicates_A), self.ranges_named(COLLECTIVE_RANGES)
        return np.concatenate((talk.start_E, start)), np.concatenate((talk.end_E, end))

    def computation(self) -> tuple[Int, Int]:
        """Return the intervals of all activities that are no communication."""
        rest = self.active.take(~self.communicates_A)
        return rest.start_E, rest.end_E

    def place_in(self, begin: int, stop: int) -> tuple[str, int]:
        """Return the user's line seen most often in an interval of host time; ("", 0) when the sampler saw none."""
        lo, hi = np.searchsorted(self.r.time_P, (begin, stop)).tolist()
        if lo == hi:
            return "", 0
        place, _ = Counter(self.r.place_P[lo:hi].tolist()).most_common(1)[0]
        return self.r.places[place]


def intervals(reads: list[SyncPoint]) -> tuple[Int, Int]:
    return np.array([s.start_ns for s in reads], np.int64), np.array([s.end_ns for s in reads], np.int64)
