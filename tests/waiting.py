"""How a test waits for another thread or process: until something is so. No test waits for a time to pass; the patience is only
there to end one that would hang. And clocks that a test moves."""

from __future__ import annotations

import asyncio
import linecache
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

PATIENCE_S = 120.0


def wait_for(what: Callable[[], object]) -> None:
    deadline, tick = time.perf_counter() + PATIENCE_S, threading.Event()
    while not what():
        assert time.perf_counter() < deadline, "it never came"
        tick.wait(0.002)


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


class Clock:
    """Goes on as the real one, and jumps where the test says so: monkeypatch.setattr(time, "monotonic", Clock(time.monotonic))."""

    def __init__(self, real: Callable[[], float]) -> None:
        self._real, self.ahead_s = real, 0.0

    def __call__(self) -> float:
        return self._real() + self.ahead_s


async def comes(what: Callable[[], object]) -> None:
    """As `wait_for`, where other work of the event loop goes on."""
    deadline = time.perf_counter() + PATIENCE_S
    while not what():
        assert time.perf_counter() < deadline, "it never came"
        await asyncio.sleep(0.002)
