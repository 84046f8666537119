"""Turn chunks of a Chrome trace's events into columns: all events that have a time and a kind, whichever tool wrote them.

Complete events (ph "X") are read, and beginnings with their ends ("B", "E"). The kind is the category's; in JAX's traces,
which have none, device streams are known by the names of their threads. Events of other kinds (Python frames, flows,
counters, events that a tool derived) hold no time that is not in these, and are left out. Of the others one that cannot be read
is counted as damaged.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from surokit.profiler.analysis.timeline import CATEGORIES, Event, Int, Kind, Timeline
from surokit.profiler.record.messages import GLOO_RANGE, Message, message_of
from surokit.profiler.record.trace_stream import EventStream

DEVICE = (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET)
UNREADABLE = (KeyError, TypeError, ValueError, OverflowError, AttributeError)  # what odd values raise
_NANOSECONDS_FROM = 10**17  # larger times cannot be microseconds
_MOST_NS = 2**62
_NO_ARGS: dict[str, Any] = {}


class _Interned(dict[Hashable, int]):
    """An _Interned gives numbers to values, made by `number` when a value is first asked for."""

    def __init__(self, number: Callable[[Any], int]) -> None:
        super().__init__()
        self._number = number

    def __missing__(self, key: Hashable) -> int:
        self[key] = value = self._number(key)
        return value


class Columns:
    """A Columns collects a stream's chunks with `add`; then `timeline` holds their events, `messages` what the file notes of
    collectives, and `notes` what to say about them."""

    def __init__(self, stream: EventStream, unit: str | None) -> None:
        self.seen = 0
        self.damaged = 0
        self._stream = stream
        self._unit = unit
        self._scale = {"us": 1000, "ns": 1}.get(unit or "", 0)  # nanoseconds in the file's unit; 0 until it is known
        self._names = _Interned(lambda _: len(self._names))
        self._lanes = _Interned(lambda _: len(self._lanes))
        self._kinds = _Interned(lambda category: CATEGORIES.get(str(category).lower(), -1))
        self._threads = _Interned(lambda tid: tid if isinstance(tid, int) else zlib.crc32(str(tid).encode()))
        self._labels: dict[Hashable, str] = {}  # of processes, and of (process, thread)
        self._devices: set[Hashable] = set()
        self._unknown: set[Hashable] = set()  # categories left out
        self._spans: list[Int] = []  # [9, n]: what Timeline.from_columns takes
        self._messages: list[Message] = []
        self._base = 0  # nanoseconds that the file's times count from
        self._bounds: list[Int] = []  # [11, n]: of beginnings and ends; then whether it is an end, and the lane

    def add(self, items: list[Any]) -> None:
        self.seen += len(items)
        events = [e for e in items if type(e) is dict]
        self.damaged += len(items) - len(events)
        spans = [e for e in events if e.get("ph") == "X"]
        if len(spans) < len(events):
            for e in events:
                if e.get("ph") == "M":
                    self._label(e)
            self._convert([e for e in events if e.get("ph") in ("B", "E")], self._as_bounds, self._bounds)
        self._convert(spans, self._as_spans, self._spans)

    def _convert(self, rows: list[Any], columns: Callable[[list[Any]], Int], out: list[Int]) -> None:
        """Convert all rows at once; where that fails each half by itself, and so on down to the rows that are damaged."""
        if not rows:
            return
        try:
            out.append(columns(rows))
        except UNREADABLE:
            if len(rows) == 1:
                self.damaged += 1
                return
            self._convert(rows[: len(rows) // 2], columns, out)
            self._convert(rows[len(rows) // 2 :], columns, out)

    def _as_spans(self, rows: list[Any]) -> Int:
        kind = [self._kinds[e.get("cat")] for e in rows]
        if min(kind) < 0:
            kind = [k if k >= 0 else self._kind_of_lane(e) for k, e in zip(kind, rows)]
            rows, kind = [e for k, e in zip(kind, rows) if k >= 0], [k for k in kind if k >= 0]
        self._devices.update(e.get("pid") for k, e in zip(kind, rows) if k in DEVICE)
        table = self._table(rows, kind)
        table[3] += self._ns([e["dur"] for e in rows])
        for i, e in enumerate(rows):
            args = e.get("args")
            if args and ("Collective name" in args or str(e.get("name")).startswith(GLOO_RANGE)):
                self._note(str(e.get("name")), table[:, i].tolist(), args)
        return table

    def _note(self, name: str, row: list[int], args: dict[str, Any]) -> None:
        kind, _, start, end, thread, *_ = row
        with suppress(*UNREADABLE):  # the event itself is read all the same
            found = message_of(Event(Kind(kind), name, start, end, thread), args)
            self._messages += [found] if found else []

    def _as_bounds(self, rows: list[Any]) -> Int:
        """Convert ranges written as a beginning and an end. An end need not repeat its beginning's name and category."""
        table = self._table(rows, [self._kinds[e.get("cat")] for e in rows])
        lane = [self._lanes[e.get("pid"), e.get("tid")] for e in rows]
        return np.concatenate([table, np.array([[e["ph"] == "E" for e in rows], lane], np.int64)])

    def _table(self, rows: list[Any], kind: list[int]) -> Int:
        """Return the rows as [9, n], with the same time as start and end of each event."""
        names, threads = self._names, self._threads
        args = [e.get("args") or _NO_ARGS for e in rows]
        table = np.empty((9, len(rows)), np.int64)
        table[0] = kind
        table[1] = [names[e.get("name", "")] for e in rows]
        table[2] = table[3] = self._ns([e["ts"] for e in rows])
        table[4] = [
            a["stream"] if k in DEVICE and "stream" in a else threads[e.get("tid")] for k, e, a in zip(kind, rows, args)
        ]
        table[5] = [a.get("correlation", a.get("correlation_id", -1)) for a in args]
        table[6] = [a.get("External id", a.get("external id", -1)) for a in args]
        table[7] = [a.get("Sequence number", -1) for a in args]
        table[8] = [a.get("bytes", 0) for a in args]
        return table

    def _ns(self, values: list[Any]) -> Int:
        """Convert times of the file to nanoseconds. Raises one of the errors in UNREADABLE."""
        if not self._scale and values:
            self._scale = 1 if float(values[0]) >= _NANOSECONDS_FROM else 1000
        if self._stream.exact:
            return np.array([round(v * self._scale) for v in values], np.int64)
        ns = np.array(values, np.float64) * self._scale
        if not (np.abs(ns) < _MOST_NS).all():
            raise ValueError("a time that is not finite")
        return np.rint(ns).astype(np.int64)

    def _label(self, e: dict[str, Any]) -> None:
        """Note the names of processes and threads, which tell kinds apart where events have no category, as in JAX's traces."""
        with suppress(*UNREADABLE):
            if e["name"] == "process_name":
                self._labels[e["pid"]] = str(e["args"]["name"])
            elif e["name"] == "thread_name":
                self._labels[e["pid"], e["tid"]] = str(e["args"]["name"])

    def _kind_of_lane(self, e: dict[str, Any]) -> int:
        """Return the kind of an event whose category says nothing: -1 unless its thread is a stream of a device."""
        if e.get("cat") is None:
            process, thread = self._labels.get(e.get("pid"), ""), self._labels.get((e.get("pid"), e.get("tid")), "")
            operations = "XLA Ops" if "TPU" in process else "Stream"
            if "/device:" in process and thread.startswith(operations):
                name = str(e.get("name")).lower()
                return Kind.MEMCPY if "memcpy" in name else Kind.MEMSET if "memset" in name else Kind.KERNEL
        self._unknown.add(e.get("cat"))
        return -1

    def timeline(self) -> Timeline:
        """Return the events that were read."""
        table = np.concatenate([*self._spans, self._paired()], axis=1)
        self._spans, self._bounds = [], []
        backwards = table[3] < table[2]
        damaged = self.damaged + self._stream.damaged + int(backwards.sum())
        if damaged:
            table = table[:, ~backwards]
        base = self._stream.meta.get("baseTimeNanoseconds")
        if isinstance(base, int) and 0 < base < _MOST_NS and table.size and table[2:4].max() < _MOST_NS:
            table[2:4] += base
            self._base = base
        return Timeline.from_columns(tuple(map(str, self._names)), table, damaged)

    def messages(self) -> tuple[Message, ...]:
        """Return the notes, on the clock of the timeline, which is made before."""
        base = self._base
        return tuple(replace(m, start_ns=m.start_ns + base, end_ns=m.end_ns + base) for m in self._messages)

    def _paired(self) -> Int:
        """Join beginnings and ends to spans: an end belongs to the last beginning before it on its lane that has none yet,
        which is the one at the same depth of nesting."""
        table = np.concatenate([np.empty((11, 0), np.int64), *self._bounds], axis=1)
        table = table[:, np.lexsort((table[2], table[10]))]
        ends, lane = table[9] == 1, table[10]
        depth = np.cumsum(np.where(ends, -1, 1)) - ~ends
        order = np.lexsort((depth, lane))
        first, second = order[:-1], order[1:]
        fit = ~ends[first] & ends[second] & (depth[first] == depth[second]) & (lane[first] == lane[second])
        spans = table[:9, first[fit]]
        spans[3] = table[2, second[fit]]
        self.damaged += table.shape[1] - 2 * spans.shape[1]
        return spans[:, spans[0] >= 0]

    def notes(self, timeline: Timeline) -> Iterator[str]:
        """Yield notes for the user on how the file was read."""
        meta = self._stream.meta
        if self._scale == 1 and self._unit is None:
            yield "the file's times are nanoseconds, against the format's rule"
        elif self._unit is None and meta.get("displayTimeUnit") == "ns" and "schemaVersion" not in meta:
            fractions = (timeline.start_E % 1000).any() or (timeline.duration_E() % 1000).any()
            if len(timeline) and not fractions:
                yield "times without a fraction were read as microseconds; if they are nanoseconds, pass unit='ns'"
        if not len(timeline) and self._unknown:
            found = ", ".join(sorted(str(c) for c in self._unknown)[:5])
            yield f"no event has a category that says what it is (categories: {found})"
        if len(self._devices) > 1:
            yield f"the trace holds {len(self._devices)} devices, taken as one: busy means that any of them is"
