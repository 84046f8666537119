"""Time in tests: clocks of the test's own, and waiting until something holds. No test waits for a time or asserts one.

tests/test_tests.py finds what sleeps or compares measured times, and lists where that is meant.
"""

from __future__ import annotations

import asyncio
import linecache
import math
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

PATIENCE_S = (
    120.0  # far longer than what is waited for takes on a busy machine: it only ends a test that would fail anyway
)


class Clock:
    """Takes the place of the module `time` where a test says how time passes: only in `sleep`, and `late_s` longer than asked.

    monkeypatch.setattr(module, "time", Clock())

    `after` does something when so much time has passed. `sleeps` counts.
    """

    def __init__(self, late_s: float = 0.0) -> None:
        self.ns, self.late_s, self.sleeps = 10**18, late_s, 0
        self._lock = threading.Lock()
        self._later: list[tuple[int, Callable[[], object]]] = []

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        self._later.append((self.ns + round(seconds * 1e9), action))

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self.sleeps += 1
            self.ns += math.ceil((seconds + self.late_s) * 1e9)  # up, so that a loop that sleeps what is left ends
            due = [action for ns, action in self._later if ns <= self.ns]
            self._later = [(ns, action) for ns, action in self._later if ns > self.ns]
        for action in due:
            action()

    def time_ns(self) -> int:
        return self.ns

    def time(self) -> float:
        return self.ns / 1e9

    def perf_counter(self) -> float:
        return (self.ns - 10**18) / 1e9

    def perf_counter_ns(self) -> int:
        return self.ns - 10**18

    monotonic = process_time = perf_counter


class HeldClock(Clock):
    """Its time passes only in `pass_s`: who sleeps is held until then. `sleepers` counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.sleepers = 0
        self._passed = threading.Condition()

    def sleep(self, seconds: float) -> None:
        with self._passed:
            self.sleepers += 1
            over = self.ns + math.ceil(seconds * 1e9)
            self._passed.wait_for(lambda: self.ns >= over)
            self.sleepers -= 1

    def pass_s(self, seconds: float) -> None:
        with self._passed:
            self.ns += round(seconds * 1e9)
            self._passed.notify_all()


class JumpingClock:
    """Goes on as the real one, and jumps where the test says so.

    monkeypatch.setattr(time, "monotonic", JumpingClock(time.monotonic))
    """

    def __init__(self, real: Callable[[], float]) -> None:
        self._real, self.ahead_s = real, 0.0

    def __call__(self) -> float:
        return self._real() + self.ahead_s


def until(true: Callable[[], object], what: str = "it", patience_s: float = PATIENCE_S, every_s: float = 0.001) -> None:
    """Looks again and again until `true()` holds, which another thread or process brings about; TimeoutError says what did not."""
    deadline = time.perf_counter() + patience_s
    while not true():
        if time.perf_counter() > deadline:
            raise TimeoutError(f"waited {patience_s:g} s for {what}")
        time.sleep(every_s)


async def until_async(true: Callable[[], object]) -> None:
    """As `until`, where other work of the event loop goes on."""
    deadline = time.perf_counter() + PATIENCE_S
    while not true():
        assert time.perf_counter() < deadline, "it never came"
        await asyncio.sleep(0.002)


def main_thread_waits() -> bool:
    """Whether it stands at a line that takes a lock, as all waits of threading do in the end; its wait for a thread to begin does
    not count."""
    ident = threading.main_thread().ident
    assert ident is not None
    frame: FrameType | None = sys._current_frames()[ident]
    assert frame is not None
    waits = "acquire(" in linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    while frame is not None:
        waits = waits and frame.f_code is not threading.Thread.start.__code__
        frame = frame.f_back
    return waits
