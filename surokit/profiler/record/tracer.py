"""Drive torch's profiler for a capture: start it anew for each part of a block, read it from memory, on the host's clock.

A part that is not needed is dropped unread, so warm-up costs no memory, and one part can record the operators' shapes, which
is too slow for the others. torch follows the thread that starts it and autograd's own.

A range that is open when a tracer stops must have closed before another starts: torch 2.13 would write the range's end into
memory that it has freed. `stopped` remembers such ranges, and no tracer of this package starts before they have closed
(`ranges_left`). An optimizer's post hook is inside such a range. Ranges that opened without a tracer are not seen, and do
no harm.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.autograd import profiler as torch_profiler
from torch.profiler import ProfilerActivity

from surokit.profiler.analysis.timeline import CATEGORIES, Event, Kind
from surokit.profiler.analysis.work import Inputs, inputs_of
from surokit.profiler.record.messages import Message, is_noting, message_of
from surokit.torch_private import in_backward, profiler_runs, profiler_runs_anywhere, quick_range

LEAVES_OUT = torch.__version__ < "2.13"  # what torch records is without the ranges that are open as it stops
_CLOCK = "surokit::clock"
_CHATTER = (b"USDT:", b"ERROR: External init callback must run in same thread as registerClient")
wait_for_device = torch.cuda.synchronize  # torch's own, also while the user's calls are noted or left out


@dataclass(frozen=True, eq=False)
class RawTrace:
    """A RawTrace holds what was recorded between a start and a stop, unread until it is needed."""

    results: Any  # torch's own
    clocks_ns: tuple[tuple[int, int, int], ...]  # the host's time before, inside and behind each range named _CLOCK
    start_ns: int
    end_ns: int
    shaped: bool
    unended: tuple[str, int] | None = None  # where LEAVES_OUT: name and start of the range that was open at the end

    @cached_property
    def rows(self) -> list[Event]:
        """Return the events, on the host's clock. Those that ran before `start_ns` are calibration."""
        return [event for event, _ in self._pairs]

    @property
    def inputs(self) -> list[tuple[Event, Inputs]]:
        """Return the operators with their arguments, and the ranges, which have none; parents first, as a Timeline sorts them."""
        nothing: Inputs = ((), (), ())
        found = [
            (e, inputs_of(raw) if e.kind == Kind.OP else nothing)
            for e, raw in self._pairs
            if e.kind in (Kind.OP, Kind.ANNOTATION) and self.start_ns <= e.start_ns <= e.end_ns
        ]
        return sorted(found, key=lambda pair: (pair[0].start_ns, -pair[0].end_ns))

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """Return what was noted of the collectives."""
        found: list[Message | None] = []
        for event, raw in self._pairs:
            if raw is not None and is_noting(event.name) and event.start_ns >= self.start_ns:
                with suppress(TypeError, ValueError):  # a note of another form than this package knows
                    found.append(message_of(event, _arguments(raw)))
        return tuple(message for message in found if message is not None)

    @cached_property
    def _pairs(self) -> list[tuple[Event, Any]]:
        raw = self.results.events()
        clocks = [e for e in raw if e.name() == _CLOCK]
        edges = [(e.start_ns(), e.end_ns()) for e in clocks]
        offset = clock_offset(list(zip(self.clocks_ns, edges)))
        pairs = [pair for pair in read_events(raw, offset) if pair[0].name != _CLOCK]
        if self.unended is not None and clocks:
            name, start_ns = self.unended
            thread = clocks[0].device_resource_id()
            pairs.append((Event(Kind.ANNOTATION, name, start_ns, self.end_ns, thread=thread), None))
        return pairs


class Tracer:
    """A Tracer starts and stops torch's profiler; `running` is false where it could not start and when other code took the
    profiler away."""

    def __init__(self, gpu: bool) -> None:
        self.gpu = gpu
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
        self._trace: Any = None
        self._clocks_ns: tuple[tuple[int, int, int], ...] = ()
        self._step: tuple[str, int] | None = None  # the range of an optimizer's step, and when it began

    def step_begins(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Note that an optimizer's step begins, where `LEAVES_OUT`: a part often ends inside that range."""
        self._step = f"Optimizer.step#{type(optimizer).__name__}.step", time.time_ns()

    @property
    def traced(self) -> bool:
        """Return whether the tracer was started and not yet stopped, even if another profiler has taken torch's profiler away."""
        return self._trace is not None

    @property
    def running(self) -> bool:
        return self._trace is not None and profiler_runs()

    def start(self, shaped: bool = False) -> bool:
        """Start the tracer, and return whether it started: another profiler that runs is left alone, and ranges that are left open
        must close first."""
        if profiling() or ranges_left():
            return False
        trace = new_trace(self._activities, shaped)
        with suppress(RuntimeError):
            start(trace)
            self._trace, self._shaped, self._clocks_ns = trace, shaped, ()
            self.begin()
        return self._trace is not None

    def begin(self) -> None:
        """Begin the recording that counts; the events before it are calibration."""
        self._clocks_ns += tuple(_read_clocks() for _ in range(5))
        self._start_ns = time.time_ns()

    def stop(self) -> RawTrace | None:
        """Stop, and return the part since the start; None when another profiler took it away."""
        running, trace, self._trace = self.running, self._trace, None
        if not running:
            return None
        end_ns = time.time_ns()
        results = stopped(trace, end_ns)
        step = self._step if self._step and self._step[0] in {getattr(found(), "name", "") for found in _left} else None
        return results and RawTrace(results, self._clocks_ns, self._start_ns, end_ns, self._shaped, step)


def new_trace(activities: Sequence[ProfilerActivity], shaped: bool = False) -> torch.profiler.profile:
    """Make torch's profiler, to be started by `start`. Unless it keeps the events of earlier cycles, torch 2.11 warns that
    they are cleared, though this one has one cycle."""
    return torch.profiler.profile(activities=activities, record_shapes=shaped, acc_events=True)


def start(trace: torch.profiler.profile) -> None:
    with without_chatter():
        trace.start()
    assert trace.profiler is not None
    trace.profiler.acc_events = False  # else all events become Python objects as it stops, also where nobody reads them


def profiling() -> bool:
    """Return whether a torch profiler runs, on this thread or, as far as Python knows, on another."""
    return profiler_runs_anywhere()


def backward_runs() -> bool:
    return in_backward()


def ranges_open() -> int:
    """Count the ranges that are open, or may be, as Python sees it: at most this many (20 ms). A running backward pass
    counts as many."""
    return 1 << 30 if backward_runs() else len(_ranges())


def _ranges() -> list[Any]:
    kind = torch_profiler.record_function
    return [found for found in gc.get_referrers(kind) if type(found) is kind and found.record is not None]


_left: list[weakref.ref[Any]] = []  # ranges that were open, or may have been, when a tracer stopped
_last: tuple[Any, int] = None, 0  # what that tracer recorded, and when it stopped


def stopped(trace: torch.profiler.profile, now_ns: int, saw_ranges: bool = True) -> Any:
    """Stop torch's profiler and return what it recorded, or None; remember the ranges that it leaves open (20 ms), which it
    sees where it records the CPU."""
    global _last
    with without_chatter():
        trace.stop()
    results = trace.profiler.kineto_results if trace.profiler is not None else None
    if saw_ranges:
        _left[:] = map(weakref.ref, _ranges())
        _last = (results if _left else None), now_ns
    return results


def ranges_left() -> bool:
    """Return whether a range that `stopped` remembered is still open. A range is closed once no reference to it is left; of
    those that are still referenced, only ranges that had no end when the tracer stopped count, by their name (all of them
    where `LEAVES_OUT`)."""
    global _last
    _left[:] = [found for found in _left if found() is not None]
    results, now_ns = _last
    if _left and results is not None and not LEAVES_OUT:
        endless = {e.name() for e in results.events() if e.start_ns() + e.duration_ns() > now_ns - 100_000}
        _left[:] = [found for found in _left if getattr(found(), "name", None) in endless]
    _last = None, 0
    return bool(_left)


def _read_clocks() -> tuple[int, int, int]:
    mark = quick_range(_CLOCK)
    before = time.time_ns()
    with mark:
        inside = time.time_ns()
    return before, inside, time.time_ns()


def clock_offset(readings: Sequence[tuple[tuple[int, int, int], tuple[int, int]]]) -> int:
    """Return the nanoseconds from torch's clock to the host's, 0 without readings. Each reading holds the host's time before,
    inside and behind a range, and the range's start and end by torch's clock.

    The range starts and ends between two readings of the host's clock, which bounds the offset from both sides; a thread that had
    to wait for a processor only widens the bounds of that reading. The middle of the narrowest bounds is right to .1 us.
    """
    if not readings:
        return 0
    lower = max(host - own for (before, inside, _), edges in readings for host, own in zip((before, inside), edges))
    upper = min(host - own for (_, inside, behind), edges in readings for host, own in zip((inside, behind), edges))
    return (lower + upper) // 2


# ----------------------------------------------------------------------------------------------------------------
# torch's events


def read_events(events: Sequence[Any], offset: int = 0) -> Iterator[tuple[Event, Any]]:
    """Yield torch's in-memory events as rows, each with the event itself; events of other kinds are skipped. offset:
    nanoseconds from torch's clock to the host's."""
    for e in events:
        kind = _kind(e)
        if kind is None:
            continue
        start = e.start_ns() + offset
        on_device = kind in (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET)
        own = e.correlation_id()
        row = Event(
            kind,
            e.name(),
            start,
            start + e.duration_ns(),
            thread=e.device_resource_id(),
            correlation=own if kind == Kind.RUNTIME or on_device else -1,
            external=own if kind == Kind.OP else e.linked_correlation_id() or -1,
            sequence=e.sequence_nr(),
            nbytes=max(e.nbytes(), 0) if on_device else 0,
        )
        yield row, e


def _arguments(e: Any) -> dict[str, Any]:
    """Return an event's arguments that say something of a collective, named as in a trace file."""
    noted = e.extra_meta() if hasattr(e, "extra_meta") else {}  # not in every version of torch
    shapes, dtypes, _ = inputs_of(e)
    return {**noted, **({"Input Dims": shapes, "Input type": dtypes} if len(shapes) else {})}


def _kind(e: Any) -> Kind | None:
    if hasattr(e, "activity_type"):
        return CATEGORIES.get(e.activity_type())
    if e.is_user_annotation():  # older torch: the category from what the event says about itself
        return Kind.ANNOTATION if e.device_type() == torch.profiler.DeviceType.CPU else None
    name = e.name()
    if name in _SYNCS:
        return None
    if e.device_type() == torch.profiler.DeviceType.CPU:
        return Kind.RUNTIME if name.startswith(("cuda", "cu")) and "::" not in name else Kind.OP
    return Kind.MEMCPY if name.startswith("Memcpy") else Kind.MEMSET if name.startswith("Memset") else Kind.KERNEL


# Kineto's names of the category cuda_sync, which are waits and no work of the device
_SYNCS = frozenset(f"{what} Sync" for what in ("Event", "Stream", "Context", "Unknown")) | {"Stream Wait Event"}


# ----------------------------------------------------------------------------------------------------------------
# the device


def fill_queue() -> None:
    """Run short kernels behind a long one: the gaps between them are the device's own, whatever the host does."""
    if not torch.cuda.is_initialized():
        return
    with suppress(RuntimeError):
        short = torch.empty(16, device="cuda")
        wait_for_device()
        torch.cuda._sleep(4_000_000)  # cycles: about 2 ms, and no memory
        for _ in range(64):
            short.zero_()
        wait_for_device()


def back_to_back(calibration: list[Event]) -> int:
    """Return the median gap between short activities behind a full queue, in nanoseconds; 1000 where none was measured."""
    device = sorted((e for e in calibration if e.kind in (Kind.KERNEL, Kind.MEMSET)), key=lambda e: e.start_ns)[-48:]
    between = [after.start_ns - before.end_ns for before, after in pairwise(device)]
    return int(np.clip(np.median(between), 100, 20_000)) if len(between) >= 16 else 1000


def capturing() -> bool:
    """Return whether a CUDA graph is being captured, which a wait would break."""
    return torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def synchronize() -> None:
    """Wait for the device, if one is in use. A device error belongs to the user's code, which has raised it already or will."""
    if torch.cuda.is_available() and torch.cuda.is_initialized() and not capturing():
        with suppress(RuntimeError):
            wait_for_device()


@contextmanager
def without_chatter() -> Iterator[None]:
    """Catch the lines that torch's tracer prints. torch 2.13's prints "USDT:..." lines to the error stream when it starts
    and stops, and one about its daemon, which is not used here, when it first starts in a thread. They are caught at the
    file descriptor, the only place where C++ output can be; anything else that was printed meanwhile is passed on."""
    try:
        saved = os.dup(2)
    except OSError:  # no error stream
        yield
        return
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            caught.seek(0)
            for line in caught:
                if not line.startswith(_CHATTER):
                    os.write(2, line)
