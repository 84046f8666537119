"""Compute a run's figures over minutes and hours: sustained rates with their spread and drift, goodput, lost time.

This is pure arithmetic on one row a step, whoever measured it: `Session.summary()` and `Monitor` give their numbers, this file
gives the figures. `History` holds the rows of a run of any length in the same memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from surokit.units import number, percent

Floats = NDArray[np.float64]

WARM_UP = 10  # steps, or a tenth of the run if that is less
MIN_WINDOWS = 20


@dataclass(frozen=True)
class Sustained:
    """Sustained holds the figures of a run; rates are without its first `warmup_steps`, everything else is of the whole
    run.

    run_s: wall time of the run; step_s: the part of it in steps, with what happens between them; warmup_s: in the warm-up.
    tokens_per_s_1s, _1min, _10min: over the last steps that together take that long, NaN in a shorter run. tokens_per_s_p5
    ... p95: over windows of one second, or over steps in a run of fewer than 20 s (`windows` says which). drift: speed of
    the last tenth of the steps over the first tenth, less 1. idle_frac: share of the step time, NaN where nothing measured
    it. goodput: step time that was neither skipped nor stalled over run_s. lost_gpu_hours: run_s less the busy time of
    steps that were not skipped: idle time, skipped steps and all time outside steps, on each GPU of the run; it is a lower
    bound, because idle time is one. lost_usd: the lost hours times a price, None without one.
    """

    run_s: float
    step_s: float
    warmup_steps: int
    warmup_s: float
    tokens_per_s: float
    tokens_per_s_1s: float
    tokens_per_s_1min: float
    tokens_per_s_10min: float
    tokens_per_s_p5: float
    tokens_per_s_p50: float
    tokens_per_s_p95: float
    windows: str
    drift: float
    idle_frac: float
    goodput: float
    lost_gpu_hours: float
    lost_usd: float | None


def sustain(
    wall_ms: ArrayLike,
    tokens: ArrayLike,
    *,
    idle_frac: ArrayLike = math.nan,
    skipped: ArrayLike = 0.0,
    stall_ms: ArrayLike = 0.0,
    run_s: float = 0.0,
    usd_per_gpu_hour: float | None = None,
    gpus: int = 1,
) -> Sustained:
    """Compute the figures of a run from one row a step, in order; idle_frac is NaN where it was not measured.

    run_s: wall time of the whole run, if it is more than its steps. gpus: how many take these steps together. A stall counts where
    the device was idle meanwhile, as far as that was measured. Raises ValueError without a step that took time, and for a price
    that is negative or not finite.
    """
    if usd_per_gpu_hour is not None and not 0 <= usd_per_gpu_hour < math.inf:
        raise ValueError(f"usd_per_gpu_hour={usd_per_gpu_hour}: a price is a finite number >= 0.")
    wall, work, idle, skip, stall = (
        np.asarray(a, np.float64) for a in np.broadcast_arrays(wall_ms, tokens, idle_frac, skipped, stall_ms)
    )
    if not wall.sum() > 0:
        raise ValueError("There are no sustained figures before the first step: take a step first.")
    warm = min(WARM_UP, len(wall) // 10) or int(len(wall) > 1)
    known = np.isfinite(idle)
    idle_ms = np.where(known, idle, 0.0) * wall
    stalled_ms = np.where(known, np.minimum(stall, idle_ms), stall)
    good = np.nan_to_num(skip) == 0
    run_ms = max(run_s * 1e3, float(wall.sum()))
    lost_ms = run_ms - float((wall - np.where(known, idle_ms, stalled_ms))[good].sum())
    hours = gpus * lost_ms / 3.6e6
    rate_wall, rate_work = wall[warm:], work[warm:]
    rates, windows = _windows(rate_wall, rate_work)
    p5, p50, p95 = (float(p) for p in np.percentile(rates, (5, 50, 95)))
    return Sustained(
        run_s=run_ms / 1e3,
        step_s=float(wall.sum()) / 1e3,
        warmup_steps=warm,
        warmup_s=float(wall[:warm].sum()) / 1e3,
        tokens_per_s=_rate(rate_wall, rate_work),
        tokens_per_s_1s=rate_of_last(1, rate_wall, rate_work),
        tokens_per_s_1min=rate_of_last(60, rate_wall, rate_work),
        tokens_per_s_10min=rate_of_last(600, rate_wall, rate_work),
        tokens_per_s_p5=p5,
        tokens_per_s_p50=p50,
        tokens_per_s_p95=p95,
        windows=windows,
        drift=_drift(rate_wall, rate_work),
        idle_frac=_share(idle_ms[warm:][known[warm:]], rate_wall[known[warm:]]),
        goodput=float((wall - stalled_ms)[good].sum()) / run_ms,
        lost_gpu_hours=hours,
        lost_usd=None if usd_per_gpu_hour is None else hours * usd_per_gpu_hour,
    )


def rate_of_last(seconds: float, wall_ms: Floats, tokens: Floats) -> float:
    """Return tokens/s over the fewest last steps that together take `seconds`; NaN where all of them take less."""
    back = np.cumsum(wall_ms[::-1])
    count = int(np.searchsorted(back, seconds * 1e3)) + 1
    return float(tokens[-count:].sum() / back[count - 1] * 1e3) if count <= len(back) else math.nan


def _rate(wall_ms: Floats, tokens: Floats) -> float:
    return float(tokens.sum() / wall_ms.sum() * 1e3) if wall_ms.sum() > 0 else math.nan


def _windows(wall_ms: Floats, tokens: Floats) -> tuple[Floats, str]:
    """Return tokens/s over windows of at least one second, or over steps where there would be too few windows."""
    ends = np.cumsum(wall_ms)
    if ends[-1] < MIN_WINDOWS * 1e3:
        return tokens / np.maximum(wall_ms, 1e-9) * 1e3, "steps"
    window = (ends // 1e3).astype(int)
    last = np.append(window[1:] != window[:-1], True)
    totals, times = np.cumsum(tokens)[last], ends[last]
    return np.diff(totals, prepend=0.0) / np.diff(times, prepend=0.0) * 1e3, "windows of 1 s"


def _drift(wall_ms: Floats, tokens: Floats) -> float:
    tenth = len(tokens) // 10
    if not tenth:
        return math.nan
    first, last = _rate(wall_ms[:tenth], tokens[:tenth]), _rate(wall_ms[-tenth:], tokens[-tenth:])
    return last / first - 1 if first > 0 else math.nan


def _share(part: Floats, whole: Floats) -> float:
    return float(part.sum() / whole.sum()) if whole.sum() > 0 else math.nan


# -------------------------------------------------------------------------------------------------------------------- text


def rows(
    s: Any, unit: str = "tokens/s", lost: str = "at least", waits: str = "data", *, on_gpu: bool = True
) -> list[tuple[str, str]]:
    """Format a Sustained, or an object with the same fields, as rows of a small table. `unit` says what the rates count,
    `lost` how the lost hours are meant, `waits` what a stall waited for, `on_gpu` whether they are hours of a GPU."""
    hours = "GPU hours" if on_gpu else "hours"
    warm_up = "the first step" if s.warmup_steps == 1 else f"the first {s.warmup_steps} steps"
    left_out = f", without {warm_up} ({number(s.warmup_s)} s)" if s.warmup_steps else ""
    drift = percent(s.drift, "+")
    price = "" if s.lost_usd is None else f", {s.lost_usd:,.2f} USD"
    return [
        (f"{unit}, sustained", number(s.tokens_per_s) + left_out),
        (
            "last 1 s  1 min  10 min",
            "  ".join(_dash(v) for v in (s.tokens_per_s_1s, s.tokens_per_s_1min, s.tokens_per_s_10min)),
        ),
        (
            "p5  p50  p95",
            "  ".join(number(v) for v in (s.tokens_per_s_p5, s.tokens_per_s_p50, s.tokens_per_s_p95))
            + f", over {s.windows}",
        ),
        ("drift", drift if math.isnan(s.drift) else f"{drift} from the first to the last tenth"),
        ("goodput", f"{percent(s.goodput)} of the wall in steps that count, not waiting for {waits}"),
        (f"{hours} lost", f"{number(s.lost_gpu_hours)}, {lost}{price}"),
    ]


def _dash(value: float) -> str:
    return "–" if math.isnan(value) else number(value)


# ----------------------------------------------------------------------------------------------------------------- history


class History:
    """A History holds rows of numbers that add up, in bounded memory: when `capacity` is reached, neighbouring rows are
    added together two by two, and later rows cover as many steps. The first WARM_UP rows stay as they are. Column "steps"
    says how many a row covers."""

    def __init__(self, columns: Sequence[str], capacity: int = 1 << 14) -> None:
        if capacity < 2 * WARM_UP:
            raise ValueError(f"History(capacity={capacity}): there is room for at least {2 * WARM_UP} rows.")
        self.names = ("steps", *columns)
        self.steps = 0
        self._table = np.zeros((capacity, len(self.names)))
        self._rows = 0
        self._span = 1  # steps that a row covers
        self._open = 1  # steps in the last row

    def append(self, values: Sequence[float]) -> None:
        """Add one step's values, in the order of the columns."""
        self.steps += 1
        if self._rows == len(self._table) and self._open == self._span:
            self._merge()
        if self._open < self._span:
            self._table[self._rows - 1] += (1.0, *values)
            self._open += 1
        else:
            self._table[self._rows] = (1.0, *values)
            self._rows += 1
            self._open = 1 if self._rows > WARM_UP else self._span

    def _merge(self) -> None:
        late = self._table[WARM_UP:].copy()
        pairs, odd = len(late) // 2, len(late) % 2
        merged = [late[: 2 * pairs : 2] + late[1 : 2 * pairs : 2], late[2 * pairs :]]
        self._rows = WARM_UP + pairs + odd
        self._table[WARM_UP : self._rows] = np.concatenate(merged)
        self._open, self._span = (1 if odd else 2) * self._span, 2 * self._span

    def table(self) -> dict[str, Floats]:
        """Return a copy of the columns, oldest first."""
        return {name: self._table[: self._rows, i].copy() for i, name in enumerate(self.names)}


def with_rows(table: dict[str, Floats], more: Sequence[Sequence[float]]) -> dict[str, Floats]:
    """Return the columns of a history with more rows appended, which have not joined it yet."""
    if not more:
        return table
    tail: NDArray[Any] = np.array([(1.0, *row) for row in more], np.float64)
    return {name: np.concatenate([column, tail[:, i]]) for i, (name, column) in enumerate(table.items())}
