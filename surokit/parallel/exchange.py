"""Tell all processes what each of them has to say, without waiting: at every step one learns what all said a step ago.

So a run on many processes stops, waits or saves after the same step everywhere, whichever of them was asked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from surokit.parallel.processes import Processes


class Exchange:
    """An Exchange sends some numbers of each process to all, a call after the other; every process makes as many calls."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._on_its_way: tuple[list[Tensor], dist.Work] | None = None

    def take(self) -> Tensor | None:
        """Return what was sent last, float64 [ranks, numbers]; None where nothing was."""
        if self._on_its_way is None:
            return None
        values, work = self._on_its_way
        self._on_its_way = None
        work.wait()
        return torch.stack(values)

    def send(self, values: Sequence[float]) -> None:
        """Send this process' numbers; whoever calls `take` next gets them, with all others'."""
        own = torch.tensor(values, dtype=torch.float64, device="cpu")
        found = [torch.empty_like(own) for _ in range(self._processes.world)]
        work = dist.all_gather(found, own, group=self._processes.on_host, async_op=True)
        assert work is not None
        self._on_its_way = found, work
