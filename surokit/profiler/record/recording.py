"""Define `Recording`, which holds everything that was observed of a profiled block as plain data, captured live or read
from a trace file.

Times are nanoseconds on one clock. `pack` and `unpack` turn a Recording into JSON values and back.
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from surokit.profiler.analysis.timeline import Int, Kind, Timeline
from surokit.profiler.record.messages import Message


@dataclass(frozen=True)
class SyncPoint:
    """A SyncPoint is a call that reads a device value on the host. `inside` is the library frame that made it, when the
    user's line did so indirectly."""

    start_ns: int
    end_ns: int
    thread: int
    call: str
    device: str
    file: str
    line: int
    inside: str = ""


@dataclass(frozen=True)
class Costs:
    """Costs holds what profiling itself costs, calibrated on this machine just before the profiled code: nanoseconds each."""

    event_ns: float = 0.0
    module_ns: float = 0.0
    read_ns: float = 0.0
    sample_ns: float = 0.0


def _none() -> Int:
    return np.empty(0, np.int64)


#: The product rates that an operator's FLOPs may count against, by the dtype of its operands.
RATES = ("bf16", "fp32", "fp8", "fp4")


@dataclass(frozen=True, eq=False)
class Shaped:
    """A Shaped is one step, the last of the warm-up, recorded with the shapes of its operators, for its FLOPs and bytes.
    Recording shapes is slow, so the times of this step are not used.

    `timeline` holds its operators. flop_E are FLOPs and bytes_E bytes read and written by the operator itself, without those it
    calls; rate_E is an index into RATES, -1 for an operator that is no product. messages: what gloo noted of its collectives.
    size: its tokens over those of a measured step, on average. skipped_E: of flop_E those that a kernel of causal attention skips.
    """

    timeline: Timeline
    flop_E: Int
    bytes_E: Int
    rate_E: Int
    messages: tuple[Message, ...] = ()
    size: float = 1.0
    skipped_E: Int = field(default_factory=_none)  # empty: none


@dataclass(frozen=True, eq=False)
class Recording:
    """A Recording holds everything that was observed. Suffixes: E events, S module spans, P samples of the user's current
    line, C runs of Python's garbage collector."""

    timeline: Timeline
    start_ns: int
    end_ns: int
    marks_ns: tuple[int, ...] = ()  # host time at the end of each step
    warmup: int = 0  # steps to leave out at the start, if there are more
    thread: int = 0  # the host thread that ran the steps
    modules: tuple[tuple[str, str], ...] = ()  # path, class
    module_S: Int = field(default_factory=_none)
    start_S: Int = field(default_factory=_none)
    end_S: Int = field(default_factory=_none)
    thread_S: Int = field(default_factory=_none)
    syncs: tuple[SyncPoint, ...] = ()
    places: tuple[tuple[str, int], ...] = ()  # file, line
    place_P: Int = field(default_factory=_none)
    time_P: Int = field(default_factory=_none)
    tokens_per_step: float | None = None
    device: str = "cpu"
    back_to_back_ns: int = 1000
    costs: Costs = field(default_factory=Costs)
    peak_bytes: int = 0
    unprofiled_ns: int | None = None  # a step without the profiler, where one was timed
    notes: tuple[str, ...] = ()
    traced: bool = True  # whether operators and device activity were recorded; without them busy time is unknown
    shaped: Shaped | None = None
    start_C: Int = field(default_factory=_none)
    end_C: Int = field(default_factory=_none)
    settings: tuple[tuple[str, str], ...] = ()  # of torch and the optimizer, as the block found them: name, value
    usd_per_gpu_hour: float | None = None
    rank: int | None = None  # which of several processes that train together this one is; None where that is not known
    world: int = 1  # how many train together
    messages: tuple[Message, ...] = ()  # what was noted of the collectives


# ---------------------------------------------------------------------------------------------------------------- storage


def pack(recording: Recording) -> dict[str, Any]:
    """Turn a Recording into JSON values; arrays are compressed."""
    out: dict[str, Any] = {f.name: getattr(recording, f.name) for f in fields(recording)}
    out["timeline"] = _pack_timeline(recording.timeline)
    out["syncs"] = [[getattr(s, f.name) for f in fields(s)] for s in recording.syncs]
    out["costs"] = [getattr(recording.costs, f.name) for f in fields(recording.costs)]
    out["messages"] = _pack_messages(recording.messages)
    if (s := recording.shaped) is not None:
        columns = {name: _squeeze(getattr(s, name)) for name in ("flop_E", "bytes_E", "rate_E", "skipped_E")}
        noted = {"messages": _pack_messages(s.messages), "size": s.size}
        out["shaped"] = {"timeline": _pack_timeline(s.timeline), **noted, **columns}
    return {k: _squeeze(v) if isinstance(v, np.ndarray) else v for k, v in out.items()}


def unpack(stored: dict[str, Any]) -> Recording:
    """Turn the values that `pack` made back into a Recording; fields that are missing take their defaults. Raises KeyError,
    TypeError or ValueError."""
    values: dict[str, Any] = {k: _expand(v) if isinstance(v, dict) and "zlib" in v else v for k, v in stored.items()}
    values["timeline"] = _unpack_timeline(stored["timeline"])
    values["syncs"] = tuple(SyncPoint(*row) for row in stored["syncs"])
    values["costs"] = Costs(*stored["costs"])
    if (s := stored.get("shaped")) is not None:
        columns = {name: _expand(s[name]) for name in ("flop_E", "bytes_E", "rate_E", "skipped_E") if name in s}
        noted = _unpack_messages(s.get("messages", ()))
        size = float(s.get("size", 1.0))
        values["shaped"] = Shaped(_unpack_timeline(s["timeline"]), **columns, messages=noted, size=size)
    values["messages"] = _unpack_messages(stored.get("messages", ()))
    for name in ("modules", "places", "settings"):
        values[name] = tuple((str(first), second) for first, second in stored.get(name, ()))
    values["marks_ns"], values["notes"] = tuple(stored["marks_ns"]), tuple(stored["notes"])
    return Recording(**values)


def _pack_messages(messages: tuple[Message, ...]) -> list[list[Any]]:
    return [[getattr(m, f.name) for f in fields(m)] for m in messages]


def _unpack_messages(rows: Any) -> tuple[Message, ...]:
    return tuple(
        Message(Kind(kind), start, end, thread, collective, group, tuple(ranks), sequence, nbytes)
        for kind, start, end, thread, collective, group, ranks, sequence, nbytes in rows
    )


def _pack_timeline(t: Timeline) -> dict[str, Any]:
    return {"names": t.names, "columns": _squeeze(t.columns()), "damaged": t.damaged}


def _unpack_timeline(stored: dict[str, Any]) -> Timeline:
    return Timeline.from_columns(tuple(stored["names"]), _expand(stored["columns"]), stored["damaged"])


def _squeeze(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Write an int64 array as text: little-endian bytes, deflated, base64."""
    data = zlib.compress(np.ascontiguousarray(array, "<i8").tobytes(), 6)
    return {"shape": list(array.shape), "zlib": base64.b64encode(data).decode()}


def _expand(stored: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    data = zlib.decompress(base64.b64decode(stored["zlib"]))
    return np.frombuffer(data, "<i8").astype(np.int64).reshape(stored["shape"])
