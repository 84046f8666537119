"""Mark moments of a step: on the host, and where a GPU's work stands then."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch


class Mark(NamedTuple):
    """A Mark is a moment of the host, and where the device's work stood then (CUDA)."""

    host_s: float
    event: torch.cuda.Event | None

    @classmethod
    def on(cls, device: torch.device) -> Mark:
        """Return a mark of this moment."""
        event = event_on(device)
        return cls(time.perf_counter(), event)

    @property
    def reached(self) -> bool:
        """Return whether the device has come here; never waits."""
        return self.event is None or self.event.query()

    def ms_until(self, later: Mark) -> float:
        """Return the milliseconds from here to a later mark that was reached, on the device's clock where it has one."""
        if self.event is None or later.event is None:
            return 1e3 * (later.host_s - self.host_s)
        return self.event.elapsed_time(later.event)


def event_on(device: torch.device) -> torch.cuda.Event | None:
    """Record a timing event behind the work that a GPU was given so far; None on other devices."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
