"""Read Chrome traces, as torch.profiler, Perfetto, JAX and others write them, into a Recording, and write a Recording as a
file for Perfetto, from which it is read back exactly.

Times. The format's `ts` and `dur` are microseconds, with a fraction for nanoseconds, whatever `displayTimeUnit` says: that
is how a viewer should label them (Kineto has written both "ms" and "ns" over microseconds). A few tools write nanoseconds
nevertheless. They are recognised where they count from 1970, since microseconds would then be beyond the year 5000; else
`unit="ns"` says so. Here all times are integer nanoseconds, from 1970 where `baseTimeNanoseconds` or the times show it.

A step in a trace ends with an "Optimizer.step" range, else with a "ProfilerStep" range, else it is the whole trace. The file is
read as a stream, and takes about as much memory as it has text; damaged events are left out and counted, and a note says so.
"""

from __future__ import annotations

import gc
import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from surokit.profiler.analysis.roles import DATA_RANGES, OPTIMIZER_RANGES
from surokit.profiler.analysis.timeline import CATEGORIES, Kind, Timeline, covered
from surokit.profiler.record.messages import Message
from surokit.profiler.record.recording import Recording, SyncPoint, pack, unpack
from surokit.profiler.record.trace_columns import DEVICE, UNREADABLE, Columns
from surokit.profiler.record.trace_stream import EventStream, uncompressed_bytes

_CATEGORY = {kind: category for category, kind in reversed(CATEGORIES.items())}
_BLOCK = 2_000  # events written at a time


def read_chrome(
    path: str | Path, *, unit: Literal["us", "ns"] | None = None, limit_gib: float | None = None
) -> Recording:
    """Read a Chrome trace, plain or gzipped.

    `unit` is that of the file's times, where it is not the usual one. A trace whose text is larger than `limit_gib`
    (default: the machine's free memory) is refused. Raises FileNotFoundError, or ValueError when it is no trace or too
    large.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"no trace at {file}; torch.profiler writes one with prof.export_chrome_trace(path)")
    if unit not in (None, "us", "ns"):
        raise ValueError(f"unit {unit!r} is none of a trace's units: 'us' or 'ns'")
    size, limit = uncompressed_bytes(file) / 2**30, free_gib() if limit_gib is None else limit_gib
    if size > limit:
        raise ValueError(
            f"{file} holds about {size:.3g} GiB of text, and reading takes as much memory, more than "
            f"{f'the {limit:.3g} GiB that are free' if limit_gib is None else f'limit_gib={limit:g}'}; record fewer steps"
        )
    stream = EventStream(file)
    reader = Columns(stream, unit)
    try:
        with _collector_paused():
            for chunk in stream.chunks():
                reader.add(chunk)
    except ValueError as error:
        raise ValueError(f"{file} {error}; it must be a Chrome trace (JSON) such as torch.profiler exports") from None
    timeline = reader.timeline()
    notes = list(reader.notes(timeline))
    if not stream.complete:
        notes.append(f"{file.name} ends before its list of events does: {reader.seen} complete events were read")
    if stored := stream.meta.get("surokit"):  # written by write_chrome
        with suppress(*UNREADABLE, zlib.error):
            if stream.meta.get("surokitCheck", check := _check(stored)) != check:
                raise ValueError("damaged")
            recording = unpack(stored)
            timeline = replace(timeline, damaged=timeline.damaged + recording.timeline.damaged)
            return replace(recording, timeline=timeline, notes=(*recording.notes, *notes))
        notes.append("what this package had noted in the file is damaged: it is read as any tool's")
    notes = [f"read from {file.name}: module paths and source lines are not in a trace", *notes]
    return _foreign(timeline, stream.meta, tuple(notes), reader.messages())


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector, which would walk all the dicts of a chunk, though they hold no cycles: half of the
    time of reading."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _foreign(
    timeline: Timeline, meta: dict[str, Any], notes: tuple[str, ...], messages: tuple[Message, ...]
) -> Recording:
    """Make a Recording from the trace of another tool."""
    steps = _one_name(_named(timeline, "Optimizer.step#"))
    if not len(steps):
        steps = _named(timeline, "ProfilerStep#")
    on_host = steps.thread_E if len(steps) else timeline.thread_E[timeline.is_kind(Kind.OP)]
    threads, counts = np.unique(on_host, return_counts=True)
    reads = _waiting_reads(timeline)
    device = "unknown device"
    with suppress(*UNREADABLE, IndexError):
        device = str(meta["deviceProperties"][0]["name"])
    rank, world = None, 1
    with suppress(*UNREADABLE):
        rank, world = int(meta["distributedInfo"]["rank"]), int(meta["distributedInfo"]["world_size"])
    return Recording(
        timeline,
        start_ns=int(timeline.start_E.min()) if len(timeline) else 0,
        end_ns=int(timeline.end_E.max()) if len(timeline) else 0,
        marks_ns=tuple(sorted(steps.end_E.tolist())),
        thread=int(threads[counts.argmax()]) if len(threads) else 0,
        syncs=tuple(
            SyncPoint(start, end, thread, ".item()", "", "", 0)
            for start, end, thread in zip(reads.start_E.tolist(), reads.end_E.tolist(), reads.thread_E.tolist())
        ),
        device=device,
        notes=notes,
        rank=rank,
        world=world,
        messages=messages,
    )


def _named(timeline: Timeline, *beginnings: str) -> Timeline:
    return timeline.take(timeline.is_named(n.startswith(beginnings) for n in timeline.names))


def _waiting_reads(timeline: Timeline) -> Timeline:
    """Return the reads of single values that wait for the device. A trace does not say where a value lies: with a device it is one
    whose read copies or waits; without, it is none of an optimizer's own counters or a loader's seed."""
    reads = _named(timeline, "aten::_local_scalar_dense")
    calls = timeline.take(timeline.is_kind(Kind.RUNTIME))
    if len(calls):
        waits = calls.take(calls.is_named("Memcpy" in n or "Synchronize" in n for n in calls.names))
        return reads.take(covered(waits.start_E, waits.end_E, reads.start_E, reads.end_E) > 0)
    own = _named(timeline, *OPTIMIZER_RANGES, *DATA_RANGES)
    return reads.take(covered(own.start_E, own.end_E, reads.start_E, reads.end_E) == 0)


def _check(stored: Any) -> int:
    """Return a checksum of the fields that the file holds beside events: an analysis of damaged arrays could fail anywhere."""
    return zlib.crc32(json.dumps(stored, sort_keys=True).encode())


def _one_name(ranges: Timeline) -> Timeline:
    """Return the ranges of the optimizer that steps most often; of several (a GAN's two, a class that calls its parent's
    step) those of the one that ends last, so that a step is one turn of the loop."""
    if not len(ranges):
        return ranges
    count_N, end_N = np.zeros((2, len(ranges.names)), np.int64)
    np.add.at(count_N, ranges.name_E, 1)
    np.maximum.at(end_N, ranges.name_E, ranges.end_E - ranges.start_E.min())
    return ranges.take(ranges.name_E == np.lexsort((end_N, count_N))[-1])


def free_gib() -> float:
    """Return the free memory of the machine, or of the container where that is smaller; infinity where neither is known."""
    free = float("inf")
    with suppress(OSError, ValueError, IndexError):
        free = int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) / 2**20
    with suppress(OSError, ValueError):
        free = min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()) / 2**30)
    return free


# ---------------------------------------------------------------------------------------------------------------- writing


def write_chrome(path: str | Path, recording: Recording, windows: tuple[tuple[int, int], ...]) -> None:
    """Write a trace that ui.perfetto.dev and chrome://tracing open; gzipped when the path ends in .gz. Beside the events it
    holds the recording's other fields, so `read_chrome` gives back all of it."""
    timeline = recording.timeline
    origin = min(recording.start_ns, int(timeline.start_E.min()) if len(timeline) else recording.start_ns)
    rest = pack(replace(recording, timeline=replace(Timeline.of(()), damaged=timeline.damaged)))
    head = {
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": origin,
        "deviceProperties": [{"id": 0, "name": recording.device}],
        "surokit": rest,
        "surokitCheck": _check(rest),
    }
    target = Path(path)
    with gzip.open(target, "wt") if target.suffix == ".gz" else target.open("w") as file:
        file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
        labels = enumerate(("host", recording.device or "device", "modules", "steps"))
        metadata = ({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for pid, name in labels)
        file.write(",\n".join(json.dumps(m) for m in metadata))
        for text in _lines(recording, windows, origin):
            file.write(",\n" + text)
        file.write("\n]}\n")


def _lines(recording: Recording, windows: tuple[tuple[int, int], ...], origin: int) -> Iterator[str]:
    names = [json.dumps(name) for name in recording.timeline.names]

    def us(ns: int) -> str:
        return f"{ns // 1000}.{ns % 1000:03}"

    def line(pid: int, tid: int, category: str, name: str, start: int, end: int, args: dict[str, Any]) -> str:
        return (
            f'{{"ph": "X", "pid": {pid}, "tid": {tid}, "cat": "{category}", "name": {name}, '
            f'"ts": {us(start - origin)}, "dur": {us(end - start)}, "args": {json.dumps(args)}}}'
        )

    columns = recording.timeline.columns()
    for block in range(0, columns.shape[1], _BLOCK):
        rows = columns[:, block : block + _BLOCK].T.tolist()
        for kind, name, start, end, thread, correlation, external, sequence, nbytes in rows:
            on_device = kind in DEVICE
            args = {"stream": thread} if on_device else {}
            args |= {"bytes": nbytes} if on_device or nbytes else {}
            ids = (("correlation", correlation), ("External id", external), ("Sequence number", sequence))
            args |= {key: value for key, value in ids if value >= 0}
            yield line(int(on_device), thread, _CATEGORY[kind], names[name], start, end, args)
    r = recording
    for module, start, end, thread in np.stack([r.module_S, r.start_S, r.end_S, r.thread_S], axis=1).tolist():
        path, kind = r.modules[module]
        yield line(2, thread, "module", json.dumps(path), start, end, {"class": kind})
    for k, (start, end) in enumerate(windows):
        yield line(3, 0, "step", f'"step {k}"', start, end, {})
