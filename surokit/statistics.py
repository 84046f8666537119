"""Estimate from few values, with intervals: by drawing again (bootstrap), Student's t, means of ratios.

Nothing here draws a random number that a seed does not give.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

ROUNDS = 5  # from which an interval is given: fewer say next to nothing of how much a ratio varies
TOO_FEW = "too few rounds to trust"  # said wherever a ratio is shown without an interval
RESAMPLES = 4000


class Interval(NamedTuple):
    """An Interval holds an estimate and the ends of its interval, nan where there are too few values for one."""

    low: float
    mid: float
    high: float

    def holds(self, value: float) -> bool:
        """True if the interval has this value inside; False where there is no interval."""
        return self.low <= value <= self.high

    @property
    def known(self) -> bool:
        return not math.isnan(self.low)

    def times(self, factor: float) -> Interval:
        return Interval(self.low * factor, self.mid * factor, self.high * factor)

    def __str__(self) -> str:
        return f"{self.mid:.3f} ({f'{self.low:.3f} to {self.high:.3f}' if self.known else TOO_FEW})"


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return (lowest, median, highest) of the values. Raises ValueError where there are none."""
    if not len(values):
        raise ValueError("spread() needs at least one value.")
    return float(min(values)), float(np.median(values)), float(max(values))


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of the values, nan of none. For ratios it does not matter which number is the denominator."""
    return math.exp(float(np.mean(np.log(values)))) if len(values) else math.nan


def drawn_again(
    values: Any, statistic: Callable[[Any], Any], *, resamples: int = RESAMPLES, seed: int = 0
) -> NDArray[Any]:
    """Return a statistic of many draws of the values with replacement.

    `statistic` takes the draws as an array [resamples, count, ...] and returns [resamples].
    """
    rows = np.asarray(values)
    picks = np.random.default_rng(seed).integers(0, len(rows), (resamples, len(rows)))
    return np.asarray(statistic(rows[picks]))


def percentile_interval(found: Any, level: float = 0.95) -> tuple[float, float]:
    """Return the ends between which `level` of the values lie."""
    tail = (1 - level) / 2
    low, high = np.quantile(found, (tail, 1 - tail))
    return float(low), float(high)


def bootstrap_interval(
    values: Sequence[float], level: float = 0.95, seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """Return the geometric mean of positive ratios and its bootstrap interval.

    Its ends are percentiles of the mean of resampled logarithms. For n values these lie too near to the mean, by sqrt((n - 1) / n),
    and as far as if the spread were known (Hesterberg, 2015, section 4.1): so their distances from the mean are stretched by the
    inverse, and by Student's t over the normal quantile. A simulation in the tests finds the truth inside as often as `level` says,
    from 5 values on. From fewer than ROUNDS values there is no interval. Raises ValueError for values that are not positive, and a
    level outside (0, 1).
    """
    if not 0 < level < 1:
        raise ValueError(f"bootstrap_interval(level={level}): a share between 0 and 1, for example 0.95.")
    if any(not 0 < v < math.inf for v in values):
        raise ValueError("bootstrap_interval() takes ratios: finite numbers above 0.")
    mid, n = geometric_mean(values), len(values)
    if n < ROUNDS:
        return Interval(math.nan, mid, math.nan)
    logs = np.log(np.asarray(values, np.float64))
    means = drawn_again(logs, lambda draws: draws.mean(axis=1), resamples=resamples, seed=seed)
    tail = (1 - level) / 2
    stretch = math.sqrt(n / (n - 1)) * student_t(tail, n - 1) / NormalDist().inv_cdf(tail)
    low, high = np.exp(logs.mean() + stretch * (np.array(percentile_interval(means, level)) - logs.mean()))
    return Interval(float(low), mid, float(high))


def harmonic_interval(groups: Sequence[Sequence[float]], weights: Sequence[float], level: float = 0.95) -> Interval:
    """Return the weighted harmonic mean of the geometric means of groups of positive ratios, and its interval.

    Of speeds in parts of a run, weighted by their steps, that is the speed of the whole. Its logarithm varies as each part's mean
    does, times that part's share of the time; the interval is Student's t with the degrees of freedom of Welch and Satterthwaite.
    There is none from fewer than ROUNDS values, nor where a group has one only.
    """
    logs = [np.log(np.asarray(group, np.float64)) for group in groups]
    times = np.asarray(weights, np.float64) / np.sum(weights) / np.exp([group.mean() for group in logs])
    mid = 1 / float(times.sum())
    if sum(map(len, logs)) < ROUNDS or min(map(len, logs)) < 2:
        return Interval(math.nan, mid, math.nan)
    squares = [
        (time * mid) ** 2 * float(group.var(ddof=1)) / len(group) for time, group in zip(times, logs, strict=True)
    ]
    half = student_t((1 + level) / 2, _welch(squares, [len(group) - 1 for group in logs])) * math.sqrt(sum(squares))
    return Interval(mid * math.exp(-half), mid, mid * math.exp(half))


def _welch(squares: Sequence[float], degrees: Sequence[int]) -> int:
    """Return the degrees of freedom of a sum of squared errors by Welch and Satterthwaite, rounded down."""
    over = sum(square**2 / own for square, own in zip(squares, degrees, strict=True))
    return math.floor(sum(squares) ** 2 / over * (1 + 1e-12)) if over else sum(degrees)


@cache
def student_t(share: float, degrees: int) -> float:
    """Return the quantile of Student's t: the value below which `share` of it lies.

    It is found by bisection of the series for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4); beyond 100
    degrees by the expansion about the normal quantile (26.7.5), which is off by less than 1e-9 of a 97.5 % quantile there.
    """
    if degrees > 100:
        z = NormalDist().inv_cdf(share)
        terms = (
            (z**3 + z) / 4,
            (5 * z**5 + 16 * z**3 + 3 * z) / 96,
            (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
            (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
        )
        return z + sum(term / degrees**power for power, term in enumerate(terms, 1))
    low, high = -1e6, 1e6
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if student_t_below(middle, degrees) < share else (low, middle)
    return middle


def student_t_below(t: float, degrees: int) -> float:
    """Return the share of Student's t distribution that lies below `t`."""
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
    return min(1.0, max(0.0, 0.5 + inside / 2))  # the series may be rounded to more than all


def wilson_interval(right: int, total: int, level: float = 0.95) -> Interval:
    """Return a share, `right` of `total`, with Wilson's score interval (1927).

    Unlike the share plus and minus its standard error, it stays within 0 and 1 and has a width at 0 and at 1 too. Raises ValueError
    for counts that are no share, and a level outside (0, 1).
    """
    if not 0 < level < 1:
        raise ValueError(f"wilson_interval(level={level}): a share between 0 and 1, for example 0.95.")
    if not 0 <= right <= total or total < 1:
        raise ValueError(f"wilson_interval({right}, {total}): so many of at least one.")
    z = NormalDist().inv_cdf((1 + level) / 2)
    share, square = right / total, z * z / total
    middle = (share + square / 2) / (1 + square)
    half = z / (1 + square) * math.sqrt(share * (1 - share) / total + square / (4 * total))
    # at 0 and 1 the two terms are equal, but for roundings
    low, high = (0.0 if right == 0 else middle - half), (1.0 if right == total else middle + half)
    return Interval(low, share, high)


# -- gaps between paired runs


class Gap(NamedTuple):
    """A Gap is the mean of paired differences with its interval, their standard deviation, and how many pairs they come from.

    p: of Student's two-sided t-test that the mean is 0; nan of fewer than two.
    """

    low: float
    mean: float
    high: float
    spread: float
    pairs: int
    p: float

    def within(self, gate: float) -> str:
        """Say where the interval lies, as `judged` does."""
        return judged(self.low, self.high, gate)


def judged(low: float, high: float, gate: float) -> str:
    """Say where an interval lies: "inside" of -gate to gate, "outside" of it, or "undecided" across an end of it."""
    if -gate <= low and high <= gate:
        return "inside"
    return "outside" if low > gate or high < -gate else "undecided"


class Noise(NamedTuple):
    """A Noise says how much a number varies: its variance, and by how many degrees of freedom that is known; nan by none."""

    variance: float
    degrees: int


def residual_noise(cells: Iterable[tuple[Hashable, Hashable, float]]) -> Noise:
    """Return the noise of numbers that are a block's effect, a treatment's effect and noise, all added.

    cells: of block, treatment and number; a block may lack a treatment, or have it several times. What least squares leave is the
    noise, which is taken to be the same everywhere.
    """
    rows = list(cells)
    if not rows:
        return Noise(math.nan, 0)
    effects = {
        effect: i for i, effect in enumerate(dict.fromkeys(e for b, t, _ in rows for e in (("block", b), ("of", t))))
    }
    design = np.zeros((len(rows), len(effects)))
    for row, (block, treatment, _) in zip(design, rows, strict=True):
        row[[effects["block", block], effects["of", treatment]]] = 1
    numbers = np.array([number for _, _, number in rows], np.float64)
    found, _, rank, _ = np.linalg.lstsq(design, numbers, rcond=None)
    degrees = len(rows) - int(rank)
    left = numbers - design @ found
    return Noise(float(left @ left) / degrees if degrees else math.nan, degrees)


def paired_gap(*groups: Sequence[float], level: float = 0.95, noises: Sequence[Noise] | None = None) -> Gap:
    """Return the mean of differences between paired runs, with the interval of Student's t.

    Of several groups, such as sizes of a model, it is the mean of their means. Each group has a spread of its own, of which the
    root mean square is told; the degrees of freedom are those of Welch and Satterthwaite, rounded down. noises: of a difference of
    each group, where more is known than its own differences say. No interval where nothing is, as of one difference only. Raises
    ValueError where a group has none.
    """
    values = [np.asarray(group, np.float64) for group in groups]
    if not values or not all(len(group) for group in values):
        raise ValueError("paired_gap() needs at least one difference, in every group.")
    pairs, mean = sum(map(len, values)), float(np.mean([group.mean() for group in values]))
    if noises is None:
        noises = [Noise(float(group.var(ddof=1)) if len(group) > 1 else math.nan, len(group) - 1) for group in values]
    if not all(noise.degrees for noise in noises):
        return Gap(math.nan, mean, math.nan, math.nan, pairs, math.nan)
    squares = [noise.variance / len(group) for noise, group in zip(noises, values, strict=True)]
    spread = math.sqrt(float(np.mean([noise.variance for noise in noises])))
    error = math.sqrt(sum(squares)) / len(values)
    degrees = _welch(squares, [noise.degrees for noise in noises])
    half = student_t((1 + level) / 2, degrees) * error
    p = 2 * (1 - student_t_below(abs(mean) / error, degrees)) if error else float(mean == 0)
    return Gap(mean - half, mean, mean + half, spread, pairs, p)


def power_of_gate(
    gate: float, gap: float, spread: float, count: int, level: float = 0.95, draws: int = 20_000
) -> float:
    """Return how often a study of `count` pairs finds its whole interval inside of the gate, by simulation.

    The differences are taken to be normal about `gap` with the standard deviation `spread`, in the unit of the gate.
    """
    if count < 2:
        return 0.0
    random = np.random.default_rng(0)
    means = gap + spread / math.sqrt(count) * random.standard_normal(draws)
    spreads = spread * np.sqrt(random.chisquare(count - 1, draws) / (count - 1))
    half = student_t((1 + level) / 2, count - 1) * spreads / math.sqrt(count)
    return float(np.mean(np.abs(means) + half <= gate))


def count_for_gate(gate: float, gap: float, spread: float, power: float = 0.8, most: int = 100) -> int | None:
    """Return the fewest pairs with which a study finds a true `gap` inside of the gate as often as `power` says; None beyond
    `most`."""
    return next((n for n in range(2, most + 1) if power_of_gate(gate, gap, spread, n) >= power), None)
