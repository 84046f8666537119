"""Chrome traces in and out: torch.profiler's `export_chrome_trace` files become Recordings, and a Profile becomes a
file for Perfetto.

A trace's times are microseconds (floats); here they are integer nanoseconds. A step in a trace is an "Optimizer.step"
range, else a "ProfilerStep" range, else the whole trace.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from surokit.profiler.recording import Recording, SyncPoint
from surokit.profiler.timeline import CATEGORIES, Event, Kind, Timeline

_DEVICE = (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET)


def read_chrome(path: str | Path) -> Recording:
    """Reads a Chrome trace (.json or .json.gz). Raises FileNotFoundError, or ValueError when it is no readable
    trace."""
    file = Path(path)
    if not file.exists():
        raise FileNotFoundError(f"no trace at {file}; torch.profiler writes one with prof.export_chrome_trace(path)")
    raw = file.read_bytes()
    try:
        document = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{file} is not a complete Chrome trace ({error}); export it again") from None
    items = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(items, list):
        raise ValueError(
            f"{file} holds no list of trace events; it must be a Chrome trace such as torch.profiler exports"
        )
    damaged: list[int] = []
    timeline = Timeline.of(_events(items, damaged))
    device = ""
    if isinstance(document, dict) and document.get("deviceProperties"):
        device = str(document["deviceProperties"][0].get("name", ""))
    steps = sorted(
        timeline.end_E[timeline.is_named(n.startswith("Optimizer.step#") for n in timeline.names)].tolist()
        or timeline.end_E[timeline.is_named(n.startswith("ProfilerStep#") for n in timeline.names)].tolist()
    )
    notes = (f"{len(damaged)} damaged events were left out",) if damaged else ()
    reads = timeline.take(timeline.is_named(n == "aten::_local_scalar_dense" for n in timeline.names))
    syncs = [
        SyncPoint(a, b, t, ".item()", "", "", 0)
        for a, b, t in np.stack([reads.start_E, reads.end_E, reads.thread_E], 1).tolist()
    ]
    return Recording(
        timeline,
        start_ns=int(timeline.start_E.min()) if len(timeline) else 0,
        end_ns=int(timeline.end_E.max()) if len(timeline) else 0,
        marks_ns=tuple(steps),
        syncs=tuple(syncs),
        device=device or "unknown device",
        notes=(f"read from {file.name}: module paths and source lines are not in a trace", *notes),
    )


def _events(items: list[Any], damaged: list[int]) -> Iterator[Event]:
    for position, item in enumerate(items):
        if not isinstance(item, dict) or item.get("ph") != "X":
            continue
        kind = CATEGORIES.get(str(item.get("cat", "")).lower())
        if kind is None:
            continue
        args = item.get("args") or {}
        try:
            start, length = round(float(item["ts"]) * 1000), round(float(item["dur"]) * 1000)
            thread = int(args["stream"]) if kind in _DEVICE and "stream" in args else _number(item.get("tid"))
            row = Event(
                kind,
                str(item.get("name", "")),
                start,
                start + length,
                thread,
                correlation=int(args.get("correlation", -1)),
                external=int(args.get("External id", -1)),
                sequence=int(args.get("Sequence number", -1)),
                nbytes=int(args.get("bytes", 0)),
            )
        except (KeyError, TypeError, ValueError, OverflowError):
            damaged.append(position)
            continue
        yield row


def _number(tid: Any) -> int:
    return tid if isinstance(tid, int) else zlib.crc32(str(tid).encode())


def write_chrome(path: str | Path, recording: Recording, windows: tuple[tuple[int, int], ...]) -> None:
    """Writes a trace that ui.perfetto.dev and chrome://tracing open; gzipped when the path ends in .gz."""
    names, rows = recording.timeline.names, recording.timeline.columns().T.tolist()
    categories = {kind: category for category, kind in reversed(list(CATEGORIES.items()))}
    origin = recording.start_ns
    out: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": label}}
        for pid, label in enumerate(("host", recording.device or "device", "modules", "steps"))
    ]

    def put(pid: int, tid: int, category: str, name: str, start: int, end: int, args: dict[str, Any]) -> None:
        span = {"ts": (start - origin) / 1000, "dur": (end - start) / 1000}
        out.append({"ph": "X", "pid": pid, "tid": tid, "cat": category, "name": name, **span, "args": args})

    for kind, name, start, end, thread, correlation, external, sequence, nbytes in rows:
        args: dict[str, Any] = {}
        if correlation >= 0:
            args["correlation"] = correlation
        if external >= 0:
            args["External id"] = external
        if sequence >= 0:
            args["Sequence number"] = sequence
        on_device = kind in _DEVICE
        if on_device:
            args |= {"stream": thread, "bytes": nbytes}
        put(int(on_device), thread, categories[Kind(kind)], names[name], start, end, args)
    r = recording
    for module, start, end, thread in np.stack([r.module_S, r.start_S, r.end_S, r.thread_S], axis=1).tolist():
        put(2, thread, "module", r.modules[module][0], start, end, {"class": r.modules[module][1]})
    for k, (start, end) in enumerate(windows):
        put(3, 0, "step", f"step {k}", start, end, {})
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": out})
    data = text.encode()
    Path(path).write_bytes(gzip.compress(data) if str(path).endswith(".gz") else data)
