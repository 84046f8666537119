"""Decide when a window ends: how many steps of gradients one update of the cold columns takes in.

    Fixed    every `interval` steps
    Auto     when the cold gradients have added up to what the hot ones have in a step, for most weights

A window only counts and compares; steps come as numbers, from zenflow.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LAG = 2  # steps from a statistic on the device to the decision that uses it, so that it never depends on timing
Statistics = Mapping[
    int, tuple[float, float]
]  # of a step, for each weight: mean |g| of the cold columns and of the hot ones


@dataclass
class Fixed:
    """Fixed makes windows of `interval` steps."""

    interval: int

    def ends(self, length: int, weights: int) -> bool:
        """Return whether a window of `length` steps is over; there are so many weights with hot and cold columns."""
        return length >= self.interval

    def note(self, statistics: Statistics) -> None:
        """Take in a step of this window."""

    def begin(self) -> None:
        """Begin another window."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


@dataclass
class Auto:
    """Auto makes windows of 1 to `longest` steps. A weight is ready when the sum of the window's mean |cold gradient| is at
    least the mean of its mean |hot gradient|; a window is over when `share` of the weights are. This is DeepSpeed's rule,
    on the steps noted."""

    share: float
    longest: int
    _sums: dict[int, list[float]] = field(default_factory=dict)  # of each weight: cold, hot, steps

    def ends(self, length: int, weights: int) -> bool:
        ready = sum(cold >= hot / steps for cold, hot, steps in self._sums.values())
        return length >= self.longest or (weights > 0 and ready >= self.share * weights)

    def note(self, statistics: Statistics) -> None:
        for weight, (cold, hot) in statistics.items():
            sums = self._sums.setdefault(weight, [0.0, 0.0, 0.0])
            for i, value in enumerate((cold, hot, 1.0)):
                sums[i] += value

    def begin(self) -> None:
        self._sums.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"sums": {weight: list(sums) for weight, sums in self._sums.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sums = {int(weight): list(sums) for weight, sums in state["sums"].items()}
