"""This module computes figures of systems that took turns: ratios turn by turn, drift, steps to a loss. Plain functions of
numbers.

A machine's speed wanders: clocks, heat, other programs. Two systems that take turns share most of it, so a ratio is taken within a
round of turns, and how much it varies from round to round says how well it is known (`surokit.statistics`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def drift(rates: Sequence[float]) -> float:
    """Return the mean of the last third of the rates over that of the first third, less 1; nan for fewer than three."""
    third = len(rates) // 3
    return float(np.mean(rates[-third:]) / np.mean(rates[:third])) - 1 if third else math.nan


# -- losses


def smoothing(steps: int) -> int:
    """Return the number of steps over which losses are averaged in a run of `steps`: a tenth, at least 4, at most 50."""
    return max(4, min(50, steps // 10))


def smoothed(losses: Sequence[float] | Floats, span: int) -> Floats:
    """Return the mean of the last `span` losses, or of those so far; a loss that is not finite counts in none. nan before the
    first."""
    values = np.asarray(losses, np.float64)
    good = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(good, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(good)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - span, 0)
    with np.errstate(invalid="ignore"):
        return np.asarray((sums[ends] - sums[starts]) / (counts[ends] - counts[starts]))


def steps_to(losses: Sequence[float] | Floats, level: float, span: int) -> int | None:
    """Return after how many steps the mean of the last `span` losses first is at or below the level; None where it never is."""
    below = np.flatnonzero(smoothed(losses, span)[span - 1 :] <= level)
    return int(below[0]) + span if len(below) else None


def reached_by_all(losses: Sequence[Sequence[float] | Floats], span: int) -> float:
    """Return the lowest loss that every run has been at: the highest of their lowest smoothed losses; nan where one has too few
    steps."""
    lowest = [smoothed(run, span)[span - 1 :] for run in losses]
    if not lowest or any(not np.isfinite(run).any() for run in lowest):
        return math.nan
    return max(float(np.nanmin(run)) for run in lowest)
