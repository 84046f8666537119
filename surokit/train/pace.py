"""Measure what each process of a run does alone, so that all know which one the others wait for.

Processes that train together end their steps together: the fast ones spend a part of each in collectives, waiting. What a process
does alone is its wait for data, and the forward of its blocks between the gathers; backward takes about twice as long, at the same
pace. Both are measured in every 10th step, without waiting for a device, and travel to all with what the processes are asked for.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median_low
from typing import Any

import torch
from torch import nn

from surokit.torch_private import in_backward
from surokit.train.marks import Mark

EVERY = 10  # steps
FIRST = 2  # step: what is built in the first one is no pace


class Pace:
    """A Pace knows what this process does alone in a step, and what the slowest one does, once all have said it.

    own_ms: of this process, in the last step that was measured; NaN before.
    """

    def __init__(self, device: torch.device) -> None:
        self.own_ms = math.nan
        self._device = device
        self._spans: list[tuple[Mark, Mark]] = []  # of the step whose end the device has perhaps not reached
        self._waited_ms: deque[float] = deque(maxlen=EVERY)  # in the last steps
        self._told: dict[str, float] = {}

    @staticmethod
    def due(step: int) -> bool:
        return step % EVERY == FIRST

    @contextmanager
    def watch(self, blocks: Sequence[nn.Module]) -> Iterator[None]:
        """Measure the forward of the blocks while the block of code runs; where one is computed again in backward, not that."""
        starts: list[Mark] = []
        ends: list[Mark] = []

        def note(marks: list[Mark]) -> Any:
            return lambda *_: None if in_backward() else marks.append(Mark.on(self._device))

        # FSDP2's own hooks come before, and wait for the gather
        handles = [
            h for b in blocks for h in (b.register_forward_pre_hook(note(starts)), b.register_forward_hook(note(ends)))
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._spans = list(zip(starts, ends))

    def waited(self, ms: float) -> None:
        """Take down how long a step waited for its data."""
        self._waited_ms.append(ms)

    def say(self) -> float:
        """Return `own_ms`, to be told to all."""
        if self._spans and self._spans[-1][1].reached and self._waited_ms:
            forward_ms = sum(start.ms_until(end) for start, end in self._spans)
            self.own_ms = forward_ms + sum(self._waited_ms) / len(self._waited_ms)
            self._spans = []
        return self.own_ms

    def hear(self, own_ms: Sequence[float]) -> None:
        """Take what each process has said, in the order of their numbers. Of two the faster one is the median."""
        if not any(map(math.isnan, own_ms)):
            slowest = max(own_ms)
            self._told = {
                "slowest_rank": float(own_ms.index(slowest)),
                "slowest_ms": slowest,
                "median_ms": median_low(own_ms),
            }

    def columns(self) -> dict[str, float]:
        """Return columns for a step's record: the slowest process, and what it and the median one do alone, in ms."""
        return self._told
