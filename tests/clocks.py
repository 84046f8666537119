"""Time in tests: a clock of the test's own, and waiting until something holds. No test waits for a time or asserts one.

tests/test_tests.py finds what sleeps or compares measured times, and lists where that is meant.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable


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


def until(true: Callable[[], object], patience_s: float = 120.0) -> None:
    """Looks again and again until `true()` holds, which another thread or process brings about. The patience, far longer than that
    takes on a busy machine, only ends a test that would fail anyway."""
    deadline = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < deadline, f"it does not come in {patience_s:g} s"
        time.sleep(0.001)
