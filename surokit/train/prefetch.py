"""This module copies batches to the device while it computes, from pinned memory on a stream of their own, one or two steps
ahead of it.

The host launches a step without waiting for the one before, so the next batch is drawn and copied while the device still works.
Drawing stays in the order of the steps, and no batch is drawn before its step begins: a position, a random state and what a
resumed run draws are what they are without. How far the host may run ahead is bounded: graphs are launched in no time, and
otherwise a stop, a record or a step that is not finite would come hundreds of steps late.

On a CPU nothing of this happens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from surokit.train.stream import Batch

AHEAD = 2  # steps that are launched and not done when the next is launched


class Prefetch:
    """A Prefetch takes batches to `device`: called with a batch, it returns it there. `begin` and `launched` around each step pace
    the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._launched: deque[torch.cuda.Event] = deque()

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch on the device, for what is launched from now on; nothing waits here."""
        if self._stream is None:
            return {
                name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in batch.items()
            }
        current = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._stream):
            there = {name: self._sent(value, current) for name, value in batch.items()}
        current.wait_stream(self._stream)
        return there

    def _sent(self, value: Any, reader: torch.cuda.Stream) -> Any:
        if not isinstance(value, Tensor) or value.device == self.device:
            return value
        if value.device.type == "cpu" and not value.is_pinned():  # a copy from there would wait for the driver's own
            value = value.pin_memory()
        there = value.to(self.device, non_blocking=True)
        there.record_stream(reader)  # its memory is not given away before `reader` has read it
        return there

    def begin(self, waiting: Callable[[], AbstractContextManager[None]] = nullcontext) -> bool:
        """Let the device come within AHEAD steps of the host before a step. Return whether it had run out of work, so that it too
        waited for what the host waited for (a batch).

        waiting: a context around a wait.
        """
        idle = not self._launched or self._launched[-1].query()
        while len(self._launched) >= AHEAD:
            launched = self._launched.popleft()
            with nullcontext() if launched.query() else waiting():
                launched.synchronize()
        return idle

    def launched(self) -> None:
        """Note that a step's last work has been launched."""
        if self._stream is not None:
            event = torch.cuda.Event(blocking=True)  # a host that waits leaves its core to others
            event.record(torch.cuda.current_stream(self.device))
            self._launched.append(event)
