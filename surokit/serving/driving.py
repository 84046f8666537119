"""Send a workload to a server: when each request is due, progress while it runs, and how much the client itself delayed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from surokit.serving.client import Answer, Client
from surokit.serving.workload import Workload

TICK_S = 0.01  # between two looks at the loop's own delay
TELL_S = 0.5  # between two messages of progress
BUSY, LATE_MS = 0.9, 10.0  # share of a core, and delay in 1 of 100 looks, from which the client measures itself
Tell = Callable[[Mapping[int, Answer], float], None]  # answers by the number of their request, seconds


@dataclass(frozen=True)
class Delay:
    """A Delay says how much the client itself delayed what it measured.

    late_ms: by how much it came too late to an event that was due, of 100 looks in the 50th and 99th; cpu: share of one core that
    its process used.
    """

    late_p50_ms: float
    late_p99_ms: float
    cpu: float

    @property
    def is_saturated(self) -> bool:
        """Return whether times are the client's more than the server's."""
        return self.cpu > BUSY or self.late_p99_ms > LATE_MS


@dataclass
class _Looks:
    late_s: list[float] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)
    cpu: float = field(default_factory=time.process_time)

    def delay(self) -> Delay:
        wall = time.perf_counter() - self.began
        p50, p99 = np.quantile(self.late_s or [0.0], (0.5, 0.99)) * 1e3
        return Delay(float(p50), float(p99), (time.process_time() - self.cpu) / wall if wall else 0.0)


async def drive(
    client: Client,
    path: str,
    bodies: Sequence[Mapping[str, Any]],
    workload: Workload,
    tell: Tell | None = None,
    keep: Callable[[Answer], object] | None = None,
) -> tuple[list[Answer], Delay]:
    """Send all requests of a workload, and return their answers in the order of the requests, with the client's own delay.

    tell: is called twice a second; keep: with each answer as it comes.
    """
    clock = asyncio.get_running_loop().time
    answers: dict[int, Answer] = {}

    def take(answer: Answer) -> None:
        answers[answer.number] = answer
        if keep is not None:
            keep(answer)

    async with _watching(answers, tell) as looks:
        zero = clock()
        if workload.concurrency is not None:
            await _closed(client, path, bodies, workload.concurrency, zero, take)
        else:
            await _open(client, path, bodies, workload.arrivals().tolist(), zero, take)
    return [answers[number] for number in sorted(answers)], looks.delay()


async def _open(
    client: Client,
    path: str,
    bodies: Sequence[Mapping[str, Any]],
    offsets: Sequence[float],
    zero: float,
    take: Callable[[Answer], None],
) -> None:
    """Send each request when it is due, whether or not earlier ones were answered."""
    clock = asyncio.get_running_loop().time

    async def one(number: int, due: float) -> None:
        take(await client.answer(path, bodies[number], number, due, zero))

    async with asyncio.TaskGroup() as group:
        for number, offset in enumerate(offsets):
            if (wait := zero + offset - clock()) > 0:
                await asyncio.sleep(wait)
            group.create_task(one(number, zero + offset))


async def _closed(
    client: Client,
    path: str,
    bodies: Sequence[Mapping[str, Any]],
    concurrency: int,
    zero: float,
    take: Callable[[Answer], None],
) -> None:
    """Keep so many requests unanswered: each answer is followed by the next request."""
    left = iter(enumerate(bodies))

    async def worker() -> None:
        for number, body in left:
            take(await client.answer(path, body, number, None, zero))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(bodies))):
            group.create_task(worker())


@asynccontextmanager
async def _watching(answers: Mapping[int, Answer], tell: Tell | None) -> AsyncIterator[_Looks]:
    """Look at the loop's delay while the block runs, and tell of progress."""
    clock, looks = asyncio.get_running_loop().time, _Looks()

    async def look() -> None:
        began = told = clock()
        while True:
            due = clock() + TICK_S
            await asyncio.sleep(TICK_S)
            now = clock()
            looks.late_s.append(max(0.0, now - due))
            if tell is not None and now - told >= TELL_S:
                told = now
                tell(answers, now - began)

    task = asyncio.create_task(look())
    try:
        yield looks
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):  # what progress shows is worth no measurement
            await task


__all__ = ["BUSY", "LATE_MS", "Delay", "drive"]
