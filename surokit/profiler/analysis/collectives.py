"""List the collectives of one rank's steps: which they are, of which group, how many bytes, from when to when.

With NCCL a collective is a kernel, which begins when its stream reaches it and waits in there for the other ranks. With gloo it is
a range on one of gloo's threads, which waits likewise; the thread that trains returns from the call and waits in Python, or
goes on. Suffix C: collectives, in the order in which they were asked for.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

from surokit.profiler.analysis import timeline as tl
from surokit.profiler.analysis.attribution import on_threads, pick
from surokit.profiler.analysis.roles import COLLECTIVE_RANGES, Observed, Table, ms, table
from surokit.profiler.analysis.timeline import Int, Kind
from surokit.profiler.record.messages import POINT_TO_POINT, Message, collective_name

_KERNELS = re.compile(r"nccl|rccl", re.IGNORECASE)

Group = tuple[str, tuple[int, ...]]  # name and ranks of a process group, each empty where it is not known


@dataclass(frozen=True, eq=False)
class Collectives:
    """A Collectives holds one rank's collectives, and its steps around them. Times are nanoseconds on the rank's own clock.

    names: the collectives as torch.distributed calls them; point-to-point transfers are among them. step_C: of the step that
    asked for it. sequence_C: its number in its group; nbytes_C: of the larger of input and output on one rank; each -1
    where it is not known. activity_C: the kernel's index among the activities, -1 for one on the host. compute: intervals in
    which the rank computes. communication: in which data moves or is waited for, the collectives and the operators around them.
    windows: the steps.
    """

    rank: int
    names: tuple[str, ...]
    groups: tuple[Group, ...]
    step_C: Int
    sequence_C: Int
    nbytes_C: Int
    activity_C: Int
    start_C: Int
    end_C: Int
    compute: tuple[Int, Int]
    communication: tuple[Int, Int]
    windows: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return len(self.names)

    @property
    def begin(self) -> int:
        return self.windows[0][0]

    @property
    def stop(self) -> int:
        return self.windows[-1][1]


def collectives(o: Observed) -> Collectives:
    """Find the collectives that the steps asked for."""
    kernels = o.active.is_kind(Kind.KERNEL) & o.named(o.active, _KERNELS.search) & o.asked_in_steps()
    ranges = o.named(o.ranges, COLLECTIVE_RANGES) & o.in_steps(o.ranges.start_E)
    on_device, on_host = o.active.take(kernels), o.ranges.take(ranges)
    start_C = np.concatenate((on_device.start_E, on_host.start_E))
    end_C = np.concatenate((on_device.end_E, on_host.end_E))
    asked_C = np.concatenate((o.host_time_A[kernels], on_host.start_E))
    name_C = np.concatenate((on_device.name_E, on_host.name_E)).astype(np.int64)
    note_C = np.concatenate(
        (
            _notes_of_kernels(
                o, on_device.thread_E, on_device.start_E, o.host_thread_A[kernels], o.host_time_A[kernels]
            ),
            _noted(o, Kind.ANNOTATION, on_host.thread_E, on_host.start_E),
        )
    )
    order = np.lexsort((start_C, asked_C))
    start_C, end_C, note_C, on_host_C = start_C[order], end_C[order], note_C[order], order >= len(on_device)
    activity_C = np.concatenate((np.flatnonzero(kernels), np.full(len(on_host), -1, np.int64)))[order]
    step_C = np.clip(np.searchsorted(o.hosts, asked_C[order], side="right") - 1, 0, o.steps - 1)
    notes = [o.r.messages[i] if i >= 0 else None for i in note_C.tolist()]
    names = [note.collective if note else collective_name(o.names[i]) for note, i in zip(notes, name_C[order].tolist())]
    groups = tuple((note.group, note.ranks) if note else ("", ()) for note in notes)
    nbytes_C = np.array([note.nbytes if note else -1 for note in notes], np.int64)
    sizes = np.where(nbytes_C < 0, _sizes_of_shaped(o, names, step_C), nbytes_C)
    is_gather, is_barrier = (np.array([name == kind for name in names], bool) for kind in ("all_gather", "barrier"))
    sizes = np.where(is_gather & on_host_C & (sizes > 0), sizes * o.r.world, sizes)  # gloo notes a rank's part
    sizes = np.where(is_barrier, 0, sizes)
    return Collectives(
        rank=o.r.rank or 0,
        names=tuple(names),
        groups=groups,
        step_C=step_C.astype(np.int64),
        sequence_C=np.array([note.sequence if note else -1 for note in notes], np.int64),
        nbytes_C=sizes,
        activity_C=activity_C,
        start_C=start_C,
        end_C=end_C,
        compute=tl.merge(*o.computation()),
        communication=tl.merge(*o.communication()),
        windows=o.windows,
    )


def by_size(found: Collectives) -> Table:
    """Build the table of collectives by kind and bytes, those that take longest first: collective, bytes, calls and ms a step."""
    took: dict[tuple[str, int], list[int]] = defaultdict(list)
    for name, nbytes, ns in zip(found.names, found.nbytes_C.tolist(), (found.end_C - found.start_C).tolist()):
        took[name, nbytes].append(ns)
    steps = len(found.windows)
    rows = [(*kind, len(each) / steps, ms(sum(each)) / steps) for kind, each in took.items()]
    return table("collective bytes calls ms", sorted(rows, key=lambda row: -row[-1]))


def counts_text(found: Collectives, most: int = 3) -> str:
    """Say how many collectives of which kind a step asks for, the most frequent first."""
    counts = Counter(found.names).most_common(most)
    return "; ".join(f"{count / len(found.windows):.3g} x {name}" for name, count in counts)


def is_matched(name: str) -> bool:
    """Return whether all ranks of a group take part, so that they can be compared."""
    return name not in POINT_TO_POINT


def _noted(o: Observed, kind: Kind, thread_Q: Int, at_Q: Int) -> Int:
    """Return for each moment on a thread the innermost note on an event of this kind around it, an index into the recording's
    messages, -1 where there is none."""
    where = [i for i, m in enumerate(o.r.messages) if m.kind == kind]
    columns = [(o.r.messages[i].thread, o.r.messages[i].start_ns, o.r.messages[i].end_ns) for i in where]
    thread, start, end = np.array(columns, np.int64).reshape(-1, 3).T
    return pick(np.array(where, np.int64), on_threads(thread, start, np.maximum(end, start + 1), thread_Q, at_Q))


def _notes_of_kernels(o: Observed, stream_Q: Int, start_Q: Int, thread_Q: Int, asked_Q: Int) -> Int:
    """Return the notes of kernels: their own, else those of the operators that launched them."""
    own = _noted(o, Kind.KERNEL, stream_Q, start_Q)
    return np.where(own >= 0, own, _noted(o, Kind.OP, thread_Q, asked_Q))


def _sizes_of_shaped(o: Observed, names: list[str], step_C: Int) -> Int:
    """Return the bytes that the step with shapes had for the same collective, by kind and order; -1 where this step has another
    number of that kind."""
    known: dict[str, list[int]] = defaultdict(list)
    messages: tuple[Message, ...] = o.r.shaped.messages if o.r.shaped is not None else ()
    for message in sorted(messages, key=lambda m: m.start_ns):
        known[message.collective].append(message.nbytes)
    sizes = np.full(len(names), -1, np.int64)
    here: dict[tuple[int, str], list[int]] = defaultdict(list)
    for i, (step, name) in enumerate(zip(step_C.tolist(), names)):
        here[step, name].append(i)
    for (_, name), rows in here.items():
        if len(rows) == len(known[name]):
            sizes[rows] = known[name]
    return sizes
