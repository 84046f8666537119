"""Profile two steps in every two hundred, keep the sums and drop the trace.

A window is recorded by torch.profiler, on a GPU its activities only, and gives the share of the window in which the device was
busy and the kernels launched. The window is exact: the device is waited for at both of its ends, and nowhere else (the
definitions are those of docs/profiling.md; on a CPU, busy means inside an operator). Many windows give an estimate of the idle
share with a confidence interval: Student's, over the windows' shares.

`Monitor` drives `Windows`; `activity` makes a meter of it for a Session.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.profiler import ProfilerActivity

from surokit.profiler.analysis.timeline import Kind, total
from surokit.profiler.record.tracer import (
    backward_runs,
    capturing,
    new_trace,
    profiling,
    ranges_left,
    read_events,
    start,
    stopped,
    synchronize,
)
from surokit.statistics import student_t
from surokit.torch_private import profiler_runs

# calls of the runtime and the driver that launch kernels: cudaLaunchKernel, cuLaunchKernelEx, cudaGraphLaunch, ...
_LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cuGraphLaunch")
FIRST = 10  # the first window begins behind so many steps: what is built on first use is no example


@dataclass(frozen=True)
class Window:
    """A Window holds the figures of one window; launches is NaN on a CPU."""

    step: int  # the last
    steps: int
    wall_ms: float
    busy_ms: float
    launches: float

    @property
    def idle_frac(self) -> float:
        return 1 - self.busy_ms / self.wall_ms


@dataclass(frozen=True)
class Estimate:
    """An Estimate holds the figures of all windows.

    idle_frac, idle_low, idle_high: the idle share with its 95 % confidence interval (NaN for fewer than two windows).
    launches: kernel launches a step (NaN on a CPU). cost_s: seconds that the windows' starts and ends took themselves.
    """

    windows: int = 0
    idle_frac: float = math.nan
    idle_low: float = math.nan
    idle_high: float = math.nan
    launches: float = math.nan
    cost_s: float = 0.0


class Windows:
    """Windows opens and closes profiled windows: call `tick(step)` at the end of every step; the call that ends a window
    returns it.

    A window that cannot be recorded is left out, and `notes` says why, once.
    """

    def __init__(self, every: int = 200, steps: int = 2) -> None:
        if not 1 <= steps < every:
            raise ValueError(
                f"every={every}, steps={steps}: a window is of at least one step and shorter than its distance."
            )
        self.every, self.steps = every, steps
        self.notes: list[str] = []
        self.off = False
        self._offset = min(FIRST, every - steps) % every
        self._tracer: torch.profiler.profile | None = None
        self._gpu = False  # whether the open window is of a GPU
        self._opened = self._start_ns = 0
        self._count = self._launched_steps = 0
        self._mean = self._squares = self._launches = self._cost_s = 0.0

    def prepare(self) -> None:
        """Let torch set its profiler up, which takes a second the first time, before a step has to wait for it."""
        if not profiling():
            self.tick(self._offset)
            self.drop()
            self._cost_s = 0.0

    def tick(self, step: int) -> Window | None:
        """Mark the end of step number `step`, in the thread that takes the steps."""
        try:
            ends = self._tracer is not None and step - self._opened >= self.steps
            begins = self._tracer is None and step % self.every == self._offset and not self.off
            if (ends or begins) and capturing():
                pass  # nothing may wait while a CUDA graph is recorded
            elif (ends or begins) and backward_runs():  # the pass would bring the profiler of its beginning back
                self._note("the optimizer steps inside the backward pass, where no window begins or ends")
            elif ends:
                return self._close(step)
            elif begins:
                self._open(step)
        except Exception as error:  # the loop goes on; a device error meets its owner at the next call
            self.drop()
            self.off = True
            self._note(f"windows are off: {type(error).__name__}: {error}")
        return None

    def drop(self) -> None:
        """End an open window without a result, because what happens now is no step."""
        if self._tracer is not None:
            with suppress(Exception):  # of the device, which its owner has met already
                self._stop()

    def estimate(self) -> Estimate:
        """Return the idle share so far; NaN before the first window."""
        n = self._count
        mean = self._mean if n else math.nan
        half = student_t(0.975, n - 1) * math.sqrt(self._squares / (n - 1) / n) if n > 1 else math.nan
        launches = self._launches / self._launched_steps if self._launched_steps else math.nan
        low, high = (max(mean - half, 0.0), min(mean + half, 1.0)) if n > 1 else (math.nan, math.nan)
        return Estimate(n, mean, low, high, launches, self._cost_s)

    def _open(self, step: int) -> None:
        if profiling():
            self._note("another torch profiler was running: that window was left out")
            return
        if ranges_left():
            self._note("a range that an earlier window saw is open: that window was left out")
            return
        began, self._gpu = time.perf_counter(), torch.cuda.is_initialized()
        kind = ProfilerActivity.CUDA if self._gpu else ProfilerActivity.CPU
        self._tracer = new_trace([kind])
        start(self._tracer)
        synchronize()
        global _open_windows
        _open_windows = self
        self._opened, self._start_ns = step, time.time_ns()
        self._cost_s += time.perf_counter() - began

    def _close(self, step: int) -> Window | None:
        began = time.perf_counter()
        synchronize()
        end_ns = time.time_ns()
        events = self._stop()
        if events is None:
            self._note("another torch profiler took a window over: that window was left out")
            return None
        window = read_window(events, self._gpu, step, step - self._opened, self._start_ns, end_ns)
        self._cost_s += time.perf_counter() - began
        if self._gpu and not window.busy_ms:
            self.off = True
            self._note(
                "windows are off: the driver let no device activity be recorded (CUPTI refused, or in use elsewhere)"
            )
            return None
        self.add(window)
        return window

    def _stop(self) -> list[Any] | None:
        """End the recording and return torch's events; None where other code ended it before."""
        global _open_windows
        tracer, self._tracer, _open_windows = self._tracer, None, None
        assert tracer is not None
        if not profiler_runs():
            return None
        results = stopped(tracer, time.time_ns(), saw_ranges=not self._gpu)
        return None if results is None else list(results.events())

    def add(self, window: Window) -> None:
        """Update the running mean and sum of squares (Welford's)."""
        self._count += 1
        off = window.idle_frac - self._mean
        self._mean += off / self._count
        self._squares += off * (window.idle_frac - self._mean)
        if window.launches == window.launches:
            self._launches += window.launches
            self._launched_steps += window.steps

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


_open_windows: Windows | None = None  # torch has one profiler at a time


def give_way() -> None:
    """End the window that is open, if there is one, without a result: the caller needs torch's profiler for more."""
    if _open_windows is not None:
        _open_windows.drop()


def read_window(events: Sequence[Any], gpu: bool, step: int, steps: int, start_ns: int, end_ns: int) -> Window:
    """Compute busy time and launches of a window: device activity on a GPU, operators on a CPU."""
    working = (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET) if gpu else (Kind.OP,)
    rows = [row for row, _ in read_events(events)]
    spans = np.array([(r.start_ns, r.end_ns) for r in rows if r.kind in working], np.int64).reshape(-1, 2)
    busy_ns = total(*np.clip(spans, start_ns, end_ns).T)
    launches = sum(r.kind == Kind.RUNTIME and r.name.startswith(_LAUNCHES) for r in rows) if gpu else math.nan
    return Window(step, steps, (end_ns - start_ns) / 1e6, busy_ns / 1e6, launches)


# ------------------------------------------------------------------------------------------------------ in a Session


class _Session(Protocol):
    @property
    def steps(self) -> int: ...


@dataclass(frozen=True)
class Activity:
    """An Activity says how often to sample, and over how many steps; see `activity`. Session gives each run a meter of its own."""

    every: int = 200
    steps: int = 2

    def __post_init__(self) -> None:
        Windows(self.every, self.steps)

    def attach(self) -> ActivityMeter:
        return ActivityMeter(self)


def activity(every: int = 200, *, steps: int = 2) -> Activity:
    """Make a meter for Session(meters=...): the share of time in which the device works, sampled over `steps` steps in
    `every`.

    The last step of each window gets `busy_frac` and, on a GPU, `launches` (kernel launches a step) in the records. This is the
    idle time that `idle_frac` cannot see, gaps between kernels included. Raises ValueError for a window that is not shorter
    than its distance.
    """
    return Activity(every, steps)


class ActivityMeter:
    """An ActivityMeter is the meter of one session. `windows` has the estimate and the notes."""

    def __init__(self, value: Activity) -> None:
        self.value = value
        self.windows = Windows(value.every, value.steps)
        self.__name__ = "activity"

    def __call__(self, session: _Session) -> Mapping[str, float]:
        window = self.windows.tick(session.steps)
        if window is None:
            return {}
        figures = {"busy_frac": 1 - window.idle_frac}
        return figures if math.isnan(window.launches) else {**figures, "launches": window.launches / window.steps}

    def paused(self) -> None:
        """Drop the open window, because something that is no step happened or the run ended."""
        self.windows.drop()
