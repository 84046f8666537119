"""Define what every kind of work shares that a cell can measure: what it did, and whether a batch fits."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from surokit.dissection import memory as memories
from surokit.dissection.job import Job
from surokit.offload.zenflow import UPDATE_EVERY
from surokit.planner import Plan

WARM_UP = 3  # steps before those that are timed: with the third a session records CUDA graphs
PROFILED = UPDATE_EVERY  # steps that are profiled: one of them has ZenFlow's update
BEFORE = 2  # steps before those


def done_at(device: torch.device) -> float:
    """Wait until a device has done all that was asked of it, and return the time in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Work(ABC):
    """A Work is what the process of a cell does: `steps` within the limit of memory, then `observe`.

    model and weights, a digest of what it starts from, are there once it is made.
    """

    model: nn.Module
    weights: str

    def __init__(self, job: Job, device: torch.device) -> None:
        assert isinstance(job.setting.batch, int)  # the largest was searched for before
        self.job, self.device, self.batch = job, device, job.setting.batch

    def facts(self) -> dict[str, Any]:
        """Return what says whether two cells did the same work."""
        s, parameters = self.job.setting, list(self.model.parameters())
        return {
            "weights": self.weights,
            "batch": self.batch,
            "length": s.length,
            "accumulate": s.accumulate,
            "gpus": s.gpus,
            "parameters": sum(p.numel() for p in parameters),
            "trained": sum(p.numel() for p in parameters if p.requires_grad),
        }

    @abstractmethod
    def steps(self) -> dict[str, Any]:
        """Take the steps that are timed, after those of the warm-up; return step_ms, losses and more `work` of a Cell."""

    @abstractmethod
    def observe(self) -> dict[str, Any]:
        """Take a few steps more, and return memory, planned and profile of a Cell: what one holds, and where time goes."""

    def timed(self, steps: Callable[[], object]) -> float:
        """Return the milliseconds that the device takes for what `steps` asks of it."""
        began = done_at(self.device)
        steps()
        return 1e3 * (done_at(self.device) - began)

    @abstractmethod
    def attempt(self, batch: int) -> None:
        """Take a step of this batch and wait for it."""

    @abstractmethod
    def planned(self, **changes: Any) -> Plan:
        """Plan a step with other arguments."""

    def fits(self, batch: int) -> bool:
        """Return whether a step of this batch fits; what it took is given back."""
        try:
            self.attempt(batch)
            return True
        except Exception as error:
            if not memories.is_out_of_memory(error):
                raise
            return False
        finally:
            self.model.zero_grad(set_to_none=True)
            memories.give_back(self.device)

    def planned_batch(self, gib: float | None) -> int:
        """Return the largest batch by plan, 1 where that is not known."""
        try:
            return max(1, self.planned(batch=1, length=self.job.setting.length).largest("batch", gib=gib))
        except (ValueError, TypeError):
            return 1
