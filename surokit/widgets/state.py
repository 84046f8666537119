"""What the panel knows: one plain state, fed a step at a time, which any view can draw.

Memory is bounded whatever the length of the run. A `Series` keeps at most `limit` points: equal runs of neighbouring
steps, of each its lowest, its highest and its first NaN and first infinity; when it is full, neighbouring runs merge.
So a curve of ten million steps still shows every extreme at the right place, and no NaN disappears. The complete record
is the run's file, not this.

Nothing here knows a notebook, a tensor or a clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

Point = tuple[float, float]

MEAN_STEPS = 10.0
MEAN_SHARE = 1 / 40
LAST = {"1 s": 1.0, "1 min": 60.0, "10 min": 600.0}  # spans over which the panel tells the rate


class Series:
    """A curve in bounded memory: append points in ascending x, read at most `limit` of them back.

    Kept of every run of neighbours: the lowest and the highest finite y, the first NaN, the first infinity, each with
    its own x. Appending costs constant time on average. Raises ValueError for a limit under 8.
    """

    def __init__(self, limit: int = 1000) -> None:
        if limit < 8:
            raise ValueError(f"a series needs room for at least 8 points, got limit={limit}")
        self.limit = limit
        self.count = 0  # points ever appended
        self.last: Point | None = None
        self._runs: list[list[Point]] = []  # each holds 1 to 4 points in order of x; the last one is open
        self._span = 1  # appended points a run covers
        self._open = 1  # of them, how many the open run has
        self._low, self._high = math.inf, -math.inf  # finite extremes of the open run
        self._plain = True  # whether all of the open run is finite
        self._kept = 0

    def append(self, x: float, y: float) -> None:
        point = (x, y)
        self.count += 1
        self.last = point
        if self._open == self._span:
            self._runs.append([point])
            self._open = 1
            self._kept += 1
            self._plain = y - y == 0.0
            self._low, self._high = (y, y) if self._plain else (math.inf, -math.inf)
            if self._kept > self.limit:
                self._merge()
            return
        self._open += 1
        if self._low <= y <= self._high:  # the usual case in a long run: nothing new
            return
        run = self._runs[-1]
        if self._plain and y - y == 0.0:  # _reduce, for the usual case: a new lowest or highest of finite points
            if len(run) == 2:
                high_first = run[0][1] == self._high
                run[0] = run[0] if high_first == (y < self._low) else run[1]
                run[1] = point
            else:
                run.append(point)
                self._kept += 1
        else:
            self._runs[-1] = reduced = _reduce([*run, point])
            self._kept += len(reduced) - len(run)
            self._plain = False
        if y - y == 0.0:
            self._low, self._high = min(self._low, y), max(self._high, y)
        if self._kept > self.limit:
            self._merge()

    def _merge(self) -> None:
        """Join neighbouring runs, two by two, until there is room."""
        while self._kept > self.limit:
            runs = self._runs
            self._runs = [_reduce([p for run in runs[i : i + 2] for p in run]) for i in range(0, len(runs), 2)]
            if len(runs) % 2 == 0:
                self._open += self._span
            self._span *= 2
            self._kept = sum(map(len, self._runs))
        finite = [y for _, y in self._runs[-1] if y - y == 0.0]
        self._plain = len(finite) == len(self._runs[-1])
        self._low, self._high = (min(finite), max(finite)) if finite else (math.inf, -math.inf)

    def __len__(self) -> int:
        return self._kept

    def points(self) -> tuple[list[float], list[float]]:
        """(x, y) of the points kept, in order of x; at most `limit`."""
        kept = [p for run in self._runs for p in run]
        return [p[0] for p in kept], [p[1] for p in kept]


def _reduce(points: list[Point]) -> list[Point]:
    """Of points in order of x: the lowest, the highest, the first NaN, the first infinity; in order of x."""
    low = high = nan = infinite = None
    for point in points:
        y = point[1]
        if y - y != 0.0:  # NaN or infinite; faster than two calls of math
            if y != y:
                nan = nan or point
            else:
                infinite = infinite or point
        elif low is None or high is None:
            low = high = point
        elif y < low[1]:
            low = point
        elif y > high[1]:
            high = point
    chosen = [low, None if high is low else high, nan, infinite]
    return sorted((p for p in chosen if p is not None), key=_x)


def _x(point: Point) -> float:
    return point[0]


class Recent:
    """Work over seconds of the last steps that together take `span_s`, in bounded memory: steps are kept in runs of a 64th of
    the span, so that the rate is over at most a run and a step more than that."""

    def __init__(self, span_s: float) -> None:
        self.span_s = span_s
        self._runs: deque[tuple[float, float]] = deque()  # seconds, work; closed ones
        self._seconds = self._work = 0.0  # of all of them and the open one
        self._open_seconds = self._open_work = 0.0

    def add(self, seconds: float, work: float) -> None:
        self._seconds += seconds
        self._work += work
        self._open_seconds += seconds
        self._open_work += work
        if self._open_seconds < self.span_s / 64:
            return
        runs = self._runs
        runs.append((self._open_seconds, self._open_work))
        self._open_seconds = self._open_work = 0.0
        while self._seconds - runs[0][0] >= self.span_s:
            oldest_s, oldest = runs.popleft()
            self._seconds -= oldest_s
            self._work -= oldest

    @property
    def rate(self) -> float | None:
        """None before the steps take `span_s`."""
        return self._work / self._seconds if self._seconds >= self.span_s * (1 - 1e-9) else None


class PanelState:
    """Everything a view draws: curves, totals, warnings, and why the run ended.

    title: the first words of the head line, normally the recipe, followed by `recipe` (its algebra, native or
    emulated). total: the step at which the planned work ends, None if unknown (then no ETA).
    resumes: whether an interrupted run can simply go on, so that the panel may say so.

    The smoothed loss is an exponential moving average over about a fortieth of the steps so far, at least ten: with a =
    1 / that number, m <- m + a (loss - m) and w <- w + a (1 - w) from zero, shown bias-corrected as m / w (Adam's
    correction, for an `a` that changes). Losses that are not finite are left out of it. The sustained rates divide two
    decaying sums (half-life `half_life_s` of run time), work over seconds, so a pause counts in full.

    Goodput and lost time are those of profiler/sustained.py, step by step: of the run's wall time (`run_s`, where somebody
    says it, else the steps'), what was neither skipped nor waiting for a batch, and what was not busy work that counts.
    """

    def __init__(
        self,
        title: str = "",
        *,
        recipe: str = "",
        total: int | None = None,
        resumes: bool = False,
        half_life_s: float = 20.0,
        limit: int = 1000,
    ) -> None:
        self.title = title
        self.recipe = recipe
        self.total = total
        self.resumes = resumes
        self.half_life_s = half_life_s
        self.reason: str | None = None  # why the run ended; None while it runs
        self.step = 0
        self.first_step: int | None = None
        self.tokens = 0
        self.elapsed_s = 0.0
        self.run_s = 0.0  # wall time of the run, with what is no step; 0 where nobody says it
        self.recent = {name: Recent(span_s) for name, span_s in LAST.items()}
        self.loss, self.loss_mean, self.held_out = Series(limit), Series(limit), Series(limit)
        self.rate, self.rate_sustained = Series(limit), Series(limit)  # tokens/s, or steps/s where tokens are unknown
        self.idle, self.idle_mean = Series(limit), Series(limit)
        self.warnings: dict[str, _Count] = {}
        self.layers: list[tuple[str, str]] = []  # layer and product, and its figures: the worst of the last sample
        self.layers_step = 0
        self.first_bad = ""
        self._losses = 0
        self._sum = self._weight = self._deviation = 0.0
        self._step_s = self._good_s = self._busy_s = self._rate_s = self._rate_work = 0.0
        self._seconds_sum = self._work_sum = self._idle_sum = self._idle_seconds = self._steps_sum = 0.0

    @classmethod
    def from_records(cls, records: Any, title: str = "", **options: Any) -> PanelState:
        """The state of a run that is over: from a pandas DataFrame or an iterable of mappings with the columns of
        `records.frame()` (step, loss, tokens, wall_ms, elapsed_s, idle_frac, eval_loss, skipped; missing ones are left
        out).
        """
        state = cls(title, **options)
        rows: Iterable[Mapping[str, Any]] = records.to_dict("records") if hasattr(records, "to_dict") else records
        for number, row in enumerate(rows, 1):
            state.add_row(row, default_step=number)
        return state

    def add_row(self, row: Mapping[str, Any], default_step: int = 0) -> None:
        """One row with the columns of `records.frame()`. A NaN outside `loss` means: not measured."""

        def known(name: str) -> float | None:
            value = row.get(name)
            return None if value is None or value != value else float(value)

        wall_ms, loss = known("wall_ms"), row.get("loss")
        self.add(
            int(row.get("step", default_step)),
            loss=None if loss is None else float(loss),
            tokens=known("tokens"),
            seconds=None if wall_ms is None else wall_ms / 1e3,
            elapsed=known("elapsed_s"),
            idle=known("idle_frac"),
            held_out=known("eval_loss"),
            skipped=bool(known("skipped")),
            stall=(known("stall_ms") or 0.0) / 1e3,
        )

    def add(
        self,
        step: int,
        *,
        loss: float | None = None,
        tokens: float | None = None,
        seconds: float | None = None,
        elapsed: float | None = None,
        idle: float | None = None,
        held_out: float | None = None,
        skipped: bool = False,
        stall: float = 0.0,
    ) -> None:
        """One step's numbers; None means not measured. seconds: wall time since the step before. elapsed: seconds of the
        whole run so far, by default the sum of those. idle: share of the step's time, 0..1. stall: seconds of it that waited
        for a batch.

        The same step may come again with further numbers. Costs a few microseconds, on average the same in a long run.
        """
        self.step = step
        if self.first_step is None:
            self.first_step = step
        if loss is not None:
            self._add_loss(step, loss, skipped)
        elif skipped:
            self._warn("skipped", step)
        if held_out is not None:
            self.held_out.append(step, held_out)
        if tokens is not None:
            self.tokens += int(tokens)
        if seconds is not None and seconds > 0.0:
            self._add_rate(step, tokens, seconds, idle)
            self._step_s += seconds
            if not skipped:
                idle_s = stall if idle is None or idle != idle else idle * seconds
                self._good_s += seconds - min(stall, idle_s)
                self._busy_s += seconds - idle_s
        if elapsed is not None:
            self.elapsed_s = elapsed

    def add_layers(self, step: int, rows: Iterable[Any], first_bad: str) -> None:
        """The worst layers of a sample taken at `step`, worst first, with layer, gemm, sqnr_db, clipped and underflow; and
        which ever went bad first, as a sentence, or "".
        """
        self.layers_step = step
        self.layers = [
            (
                f"{row.layer} {row.gemm}",
                f"{row.sqnr_db:.1f} dB · {100 * row.clipped:.2g} % clipped · {100 * row.underflow:.2g} % underflow",
            )
            for row in rows
        ]
        self.first_bad = first_bad

    def _add_loss(self, step: int, loss: float, skipped: bool) -> None:
        self.loss.append(step, loss)
        if skipped or loss - loss != 0.0:
            self._warn("skipped" if skipped else "nonfinite", step)
        if loss - loss != 0.0:
            return
        self._losses += 1
        new = 1.0 / max(MEAN_STEPS, MEAN_SHARE * self._losses)
        if self._weight:
            mean = self._sum / self._weight
            above = loss - mean
            # Six mean deviations and a tenth of the loss itself: a rule of thumb that stays quiet on ordinary noise.
            if self._losses > 20 and above > 6.0 * self._deviation and above > 0.1 * abs(mean):
                self._warn("spike", step)
            self._deviation += max(new, 1.0 / self._losses) * (abs(above) - self._deviation)
        self._sum += new * (loss - self._sum)
        self._weight += new * (1.0 - self._weight)
        self.loss_mean.append(step, self._sum / self._weight)

    def _add_rate(self, step: int, tokens: float | None, seconds: float, idle: float | None) -> None:
        self.elapsed_s += seconds
        work = 1.0 if tokens is None else tokens
        if step == self.first_step:
            return  # the first step pays for allocation, compilation and the data's start; it is no rate
        decay = 0.5 ** (seconds / self.half_life_s)
        self._seconds_sum = decay * self._seconds_sum + seconds
        self._work_sum = decay * self._work_sum + work
        self._steps_sum = decay * self._steps_sum + 1.0
        self._rate_s += seconds
        self._rate_work += work
        for recent in self.recent.values():
            recent.add(seconds, work)
        self.rate.append(step, work / seconds)
        self.rate_sustained.append(step, self._work_sum / self._seconds_sum)
        if idle is not None and idle == idle:
            self._idle_seconds = decay * self._idle_seconds + seconds
            self._idle_sum = decay * self._idle_sum + idle * seconds
            self.idle.append(step, idle)
            self.idle_mean.append(step, self._idle_sum / self._idle_seconds)

    def _warn(self, kind: str, step: int) -> None:
        count = self.warnings.get(kind)
        if count is None:
            self.warnings[kind] = _Count(step)
        else:
            count.times += 1
            count.last = step

    @property
    def eta_s(self) -> float | None:
        """Seconds left at the present pace; None without a total, a pace, or once the run has ended."""
        if self.total is None or self.reason is not None or self._steps_sum == 0.0:
            return None
        return max(self.total - self.step, 0) * self._seconds_sum / self._steps_sum

    @property
    def overall_rate(self) -> float | None:
        """Work a second over all steps but the first."""
        return self._rate_work / self._rate_s if self._rate_s else None

    @property
    def goodput(self) -> float | None:
        """Time of steps that count, without waiting for data, over the wall time of the run; None before the first."""
        return self._good_s / max(self.run_s, self._step_s) if self._step_s else None

    @property
    def lost_s(self) -> float:
        """Wall time of the run less the busy time of the steps that count; at least."""
        return max(self.run_s, self._step_s) - self._busy_s

    def warning_lines(self) -> list[str]:
        """The warnings as sentences, worst first."""
        words = {
            "skipped": "step skipped, not finite: weights untouched",
            "nonfinite": "loss not finite (NaN or infinite)",
            "spike": "loss spike",
        }
        out = [f"first to go bad: {self.first_bad}"] if self.first_bad else []
        for kind, text in words.items():
            count = self.warnings.get(kind)
            if count is not None:
                where = (
                    f"at step {count.last:,}"
                    if count.times == 1
                    else f"{count.times:,} times, last at step {count.last:,}"
                )
                out.append(f"{text}, {where}")
        return out


class _Count:
    """How often a warning came, and when last."""

    __slots__ = ("last", "times")

    def __init__(self, step: int) -> None:
        self.times = 1
        self.last = step
