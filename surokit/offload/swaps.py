"""Provide the buffers through which columns change sides between host and device."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from surokit.offload.link import Link
from surokit.offload.workers import Job, Worker

_PAIRS = 4  # of buffers in which columns change sides, of which two are on their way, one is filled and one emptied


class Swaps:
    """Swaps holds pairs of buffers that take turns, for columns that change sides, and a thread that empties them into the
    host's states, one after the other."""

    def __init__(self, link: Link, worker: Worker) -> None:
        self._link, self._worker = link, worker
        self._ring: deque[tuple[Tensor, Job | None]] = deque([(torch.empty(0, device="cpu"), None)] * _PAIRS)
        self.last: Job | None = None

    def pair(self, shape: tuple[int, ...]) -> Tensor:
        """Return float32 [2, *shape] of the host, which is free: its last contents have left and were emptied."""
        self._ring.rotate(-1)
        memory, emptied = self._ring[-1]
        if emptied is not None and not emptied.done():
            with self._link.host_waits():
                emptied.wait()
        size = 2 * math.prod(shape)
        if len(memory) < size:  # of a power of 2, so that it serves the next choice too
            memory = self._link.buffer((1 << (size - 1).bit_length(),), torch.float32)
        self._ring[-1] = memory, None
        return memory[:size].view(2, *shape)

    def emptied_by(self, work: Callable[[], None]) -> None:
        """Submit the work that the thread does before the latest pair is free again."""
        self.then(work)
        self._ring[-1] = self._ring[-1][0], self.last

    def then(self, work: Callable[[], None]) -> None:
        """Submit work that the thread does after all of that so far."""
        self.last = self._worker.submit(work)

    def buffers(self) -> list[Tensor]:
        return [memory for memory, _ in self._ring if len(memory)]
