"""Figures of systems that took turns: ratios turn by turn, their interval, what was needed to a loss. Plain functions of numbers.

A machine's speed wanders: clocks, heat, other programs. Two systems that take turns share most of it, so a ratio is taken within a
round of turns, and how much it varies from round to round says how well it is known. Nothing here draws a random number that a seed
does not give.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

ROUNDS = 5  # from which an interval is given: fewer say next to nothing of how much a ratio varies
TOO_FEW = "too few rounds to trust"  # said wherever a ratio is shown without an interval
RESAMPLES = 4000


class Interval(NamedTuple):
    """An estimate between the ends of its interval; nan ends where there are too few values for one."""

    low: float
    mid: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether the interval has this value inside; False where there is no interval."""
        return self.low <= value <= self.high

    @property
    def known(self) -> bool:
        return not math.isnan(self.low)

    def times(self, factor: float) -> Interval:
        return Interval(self.low * factor, self.mid * factor, self.high * factor)

    def __str__(self) -> str:
        return f"{self.mid:.3f} ({f'{self.low:.3f} to {self.high:.3f}' if self.known else TOO_FEW})"


def ratios(rates: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Each turn's rate over the baseline's of the same round; as many as both have."""
    return [a / b for a, b in zip(rates, baseline)]


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Lowest, median, highest. Raises ValueError for none."""
    if not len(values):
        raise ValueError("spread() needs at least one value.")
    return float(min(values)), float(np.median(values)), float(max(values))


def geometric_mean(values: Sequence[float]) -> float:
    """nan for no values. Of ratios it is the mean that does not depend on which of the two stands below."""
    return math.exp(float(np.mean(np.log(values)))) if len(values) else math.nan


def bootstrap_interval(
    values: Sequence[float], level: float = 0.95, seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """The geometric mean of positive ratios and its bootstrap interval.

    Percentiles of the mean of resampled logarithms. Of n values these lie too near to the mean, by sqrt((n - 1) / n), and as far
    as if the spread were known (Hesterberg, 2015, section 4.1): so their distances from the mean are stretched by the inverse, and
    by Student's t over the normal quantile. A simulation in the tests finds the truth inside as often as `level` says, from 5 on.
    From fewer than ROUNDS values there is no interval. Raises ValueError for values that are not positive, and a level outside
    (0, 1).
    """
    if not 0 < level < 1:
        raise ValueError(f"bootstrap_interval(level={level}): a share between 0 and 1, for example 0.95.")
    if any(not 0 < v < math.inf for v in values):
        raise ValueError("bootstrap_interval() takes ratios: finite numbers above 0.")
    mid, n = geometric_mean(values), len(values)
    if n < ROUNDS:
        return Interval(math.nan, mid, math.nan)
    logs = np.log(np.asarray(values, np.float64))
    means = np.random.default_rng(seed).choice(logs, (resamples, n)).mean(axis=1)
    tail = (1 - level) / 2
    stretch = math.sqrt(n / (n - 1)) * student_t(tail, n - 1) / NormalDist().inv_cdf(tail)
    low, high = np.exp(logs.mean() + stretch * (np.quantile(means, (tail, 1 - tail)) - logs.mean()))
    return Interval(float(low), mid, float(high))


def student_t(share: float, degrees: int) -> float:
    """The quantile of Student's t: the value below which `share` of it lies. From the series for whole degrees of freedom
    (Abramowitz and Stegun, 26.7.3 and 26.7.4) by bisection."""
    low, high = -1e6, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_below(middle, degrees) < share else (low, middle)
    return (low + high) / 2


def _t_below(t: float, degrees: int) -> float:
    angle = math.atan(t / math.sqrt(degrees))
    term, total = 1.0, 0.0
    if degrees % 2:
        term = math.cos(angle)
        for k in range(1, degrees - 1, 2):
            total += term
            term *= math.cos(angle) ** 2 * (k + 1) / (k + 2)
        inside = 2 / math.pi * (angle + math.sin(angle) * total)
    else:
        for k in range(0, degrees - 1, 2):
            total += term
            term *= math.cos(angle) ** 2 * (k + 1) / (k + 2)
        inside = math.sin(angle) * total
    return 0.5 + inside / 2


def drift(rates: Sequence[float]) -> float:
    """Mean of the last third of the rates over that of the first third, less 1; nan for fewer than three."""
    third = len(rates) // 3
    return float(np.mean(rates[-third:]) / np.mean(rates[:third])) - 1 if third else math.nan


# -- losses


def smoothing(steps: int) -> int:
    """Over how many steps losses are averaged in a run of so many: a tenth, at least 4, at most 50."""
    return max(4, min(50, steps // 10))


def smoothed(losses: Sequence[float] | Floats, span: int) -> Floats:
    """The mean of the last `span` losses, or of those so far; a loss that is not finite counts in none. nan before the first."""
    values = np.asarray(losses, np.float64)
    good = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(good, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(good)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - span, 0)
    with np.errstate(invalid="ignore"):
        return np.asarray((sums[ends] - sums[starts]) / (counts[ends] - counts[starts]))


def steps_to(losses: Sequence[float] | Floats, level: float, span: int) -> int | None:
    """Steps until the mean of the last `span` losses is at the level for the first time; None where it never is."""
    below = np.flatnonzero(smoothed(losses, span)[span - 1 :] <= level)
    return int(below[0]) + span if len(below) else None


def reached_by_all(losses: Sequence[Sequence[float] | Floats], span: int) -> float:
    """The lowest loss that every run has been at: the highest of their lowest smoothed losses; nan where one has too few steps."""
    lowest = [smoothed(run, span)[span - 1 :] for run in losses]
    if not lowest or any(not np.isfinite(run).any() for run in lowest):
        return math.nan
    return max(float(np.nanmin(run)) for run in lowest)
