"""A PanelState holds all that the panel knows of a run: it is fed a step at a time, and any view can draw it.

Memory is bounded whatever the length of the run. A `Series` keeps at most `limit` points: of equal runs of neighbouring steps it
keeps the lowest, the highest, the first NaN and the first infinity; when it is full, neighbouring runs merge.
So a curve of ten million steps still shows every extreme at the right place, and no NaN disappears. The complete record
is the run's file, not this.

Nothing here knows a notebook, a tensor or a clock.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from surokit.runs.smoothing import LossMean

if TYPE_CHECKING:
    from surokit.runs.health import Event, Health, Phase
    from surokit.runs.records import Record
    from surokit.runs.status import RunInfo

Point = tuple[float, float]
Standing = Literal["waiting", "running", "paused", "done", "interrupted", "stopped", "failed", "lost", "replaced"]
REPLACED = "replaced"  # the reason of a panel whose run goes on in another

EVENTS = 64
# kinds of events that are warnings, worst first, and their words
KINDS = {
    "diverging": "diverging",
    "skipped": "step skipped, not finite: weights untouched",
    "nonfinite": "loss not finite (NaN or infinite)",
    "no_targets": "nothing to learn from",
    "unstable": "unstable",
    "spike": "loss spike",
    "grad_spike": "gradient spike",
    "plateau": "plateau with a high learning rate",
    "slower": "slower than asked for",
}
_RANK = {kind: rank for rank, kind in enumerate((*KINDS, "note", "phase"))}
ROUTING = ("balance_loss", "expert_load_max", "expert_load_min")  # columns of a model with experts
SLOWEST = ("slowest_rank", "slowest_ms", "median_ms")  # columns of a run on several processes
LAST = {"1 s": 1.0, "1 min": 60.0, "10 min": 600.0}  # spans over which the panel tells the rate


class Series:
    """A Series keeps a curve in bounded memory: append points in ascending x, read at most `limit` of them back.

    It keeps of every run of neighbours the lowest and the highest finite y, the first NaN and the first infinity, each with its own
    x. Appending costs constant time on average. Raises ValueError for a limit under 8.
    """

    __slots__ = ("_high", "_kept", "_low", "_open", "_plain", "_runs", "_span", "last", "limit")

    def __init__(self, limit: int = 1000) -> None:
        if limit < 8:
            raise ValueError(f"a series needs room for at least 8 points, got limit={limit}")
        self.limit = limit
        self.last: Point | None = None
        self._runs: list[list[Point]] = []  # each holds 1 to 4 points in order of x; the last one is open
        self._span = 1  # appended points a run covers
        self._open = 1  # appended points that the open run covers
        self._low, self._high = math.inf, -math.inf  # finite extremes of the open run
        self._plain = True  # whether all of the open run is finite
        self._kept = 0

    def append(self, x: float, y: float) -> None:
        point = (x, y)
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

    @property
    def count(self) -> int:
        """Return the number of points ever appended."""
        return (len(self._runs) - 1) * self._span + self._open if self._runs else 0

    def __len__(self) -> int:
        return self._kept

    def points(self) -> tuple[list[float], list[float]]:
        """Return the lists x and y of the points kept, in order of x; at most `limit` points."""
        kept = [p for run in self._runs for p in run]
        return [p[0] for p in kept], [p[1] for p in kept]

    def since(self, after: float = -math.inf, limit: int = 1000) -> list[Point]:
        """Return at most `limit` (8 or more) of the points with x above `after`, the last one included; if there are more, they are
        decimated as in the series itself."""
        runs: list[list[Point]] = []
        for run in reversed(self._runs):
            if run[0][0] > after:
                runs.append(run)
                continue
            if run[-1][0] > after:
                runs.append([p for p in run if p[0] > after])
            break
        runs.reverse()
        kept = [p for run in runs for p in run]
        span = math.ceil(len(kept) / limit)
        while len(kept) >= limit:
            span += 1
            kept = [p for i in range(0, len(runs), span) for p in _reduce([q for r in runs[i : i + span] for q in r])]
        if self.last is not None and self.last[0] > (kept[-1][0] if kept else after):
            kept.append(self.last)
        return kept


def _reduce(points: list[Point]) -> list[Point]:
    """Return the lowest, the highest, the first NaN and the first infinite of points that are in order of x, in that order too."""
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


def _x(point: tuple[float, ...]) -> float:
    return point[0]


class Recent:
    """A Recent keeps the rate (work a second) of the last steps that together take `span_s`, in bounded memory: steps are kept in
    runs of a 64th of the span, so the rate covers at most a run and a step more than the span."""

    __slots__ = ("_open_seconds", "_open_work", "_run_s", "_runs", "_seconds", "_work", "span_s")

    def __init__(self, span_s: float) -> None:
        self.span_s = span_s
        self._run_s = span_s / 64
        self._runs: deque[tuple[float, float]] = deque()  # seconds, work; closed ones
        self._seconds = self._work = 0.0  # sums over the closed runs
        self._open_seconds = self._open_work = 0.0

    def add(self, seconds: float, work: float) -> None:
        self._open_work += work
        self._open_seconds = open_s = self._open_seconds + seconds
        if open_s < self._run_s:
            return
        runs = self._runs
        runs.append((open_s, self._open_work))
        self._seconds += open_s
        self._work += self._open_work
        self._open_seconds = self._open_work = 0.0
        while self._seconds - runs[0][0] >= self.span_s:
            oldest_s, oldest = runs.popleft()
            self._seconds -= oldest_s
            self._work -= oldest

    @property
    def rate(self) -> float | None:
        """Return the work a second; None before the steps take `span_s`."""
        seconds = self._seconds + self._open_seconds
        return (self._work + self._open_work) / seconds if seconds >= self.span_s * (1 - 1e-9) else None


class Ruler:
    """A Ruler converts a step to tokens and to seconds of run time, by straight lines between at most `limit` knots.

    Knots are equally many steps apart; when there are too many, every other one is dropped. The last step is always known.
    """

    __slots__ = ("_knots", "_left", "_span", "last", "limit")

    def __init__(self, limit: int = 256) -> None:
        self.limit = limit
        self.last: tuple[float, float, float] | None = None  # step, tokens, seconds
        self._knots: list[tuple[float, float, float]] = []
        self._span = self._left = 1  # steps a knot is apart, and until the next one

    def add(self, step: float, tokens: float, seconds: float) -> None:
        self.last = knot = (step, tokens, seconds)
        self._left -= 1
        if self._left == 0:
            self._knots.append(knot)
            if len(self._knots) > self.limit:
                self._knots = self._knots[::2]
                self._span *= 2
            self._left = self._span

    def since(self, after: float = -math.inf) -> list[tuple[float, float, float]]:
        """Return the knots of steps above `after`, and the last step's."""
        kept = self._knots[bisect_right(self._knots, after, key=_x) :]
        if self.last is not None and self.last[0] > (kept[-1][0] if kept else after):
            kept.append(self.last)
        return kept

    def at(self, step: float) -> tuple[float, float]:
        """Return (tokens, seconds) at a step; before the first knot those of the first, after the last those of the last. (0, 0)
        without knots."""
        knots = self.since()
        if not knots:
            return 0.0, 0.0
        place = bisect_right(knots, step, key=_x)
        if place in (0, len(knots)):
            return knots[min(place, len(knots) - 1)][1:]
        (x0, t0, s0), (x1, t1, s1) = knots[place - 1 : place + 1]
        share = (step - x0) / (x1 - x0)
        return t0 + share * (t1 - t0), s0 + share * (s1 - s0)


class Runs(dict[str, "PanelState"]):
    """Runs holds the states of several runs by their names. headline: a line on what they are together and how that stands, such as
    a race and its round; "" for none."""

    headline = ""


class PanelState:
    """A PanelState holds everything that a view draws: curves, totals, events, and why the run ended.

    title: the first words of the head line, normally the recipe, followed by `recipe` (its algebra, native or
    emulated). total: the step at which the planned work ends, None if unknown (then no ETA).
    resumes: whether an interrupted run can simply go on, so that the panel may say so. `info`, if it is set, has the devices,
    their price and their peak; without it no GPU hours, dollars or speed of light are known.

    Curves over steps (`Series`): loss, loss_mean, held_out; rate, rate_sustained (tokens/s, or steps/s where tokens are
    unknown); idle, idle_mean (shares of the step's time, lower bounds) and idle_data (the share that waits for a batch,
    smoothed as idle_mean is); memory (GiB, the highest so far), lr, grad_norm. `ruler` turns steps into tokens and seconds.
    `health` has the run's phase and gives the `events`, of which the worst and the latest are kept. It judges the steps that are
    added, unless the trainer of the run judges them and passes its verdicts (`take_health`): a step is judged once.

    The smoothed loss is that of runs/smoothing.py: an EMA over `smoothing.over_steps` steps. The sustained rates divide two
    decaying sums (half-life `half_life_s` of run time), work over seconds, so a pause counts in full.

    Goodput and lost time are those of profiler/monitoring/sustained.py, step by step. Goodput is the share of the run's wall time
    (`run_s` if it is set, else the steps') that was neither skipped nor waiting for a batch or offload; lost time is the wall time
    that was not busy work of steps that count. Both are None if no step ever said how long it waited, and if `run_s` is NaN.
    GPU hours and dollars are of that wall time and of `before_s`, what the run had run before.
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
        self.info: RunInfo | None = None
        self.paused = False
        self.tokens = 0
        self.elapsed_s = 0.0
        self.run_s = 0.0  # wall time of the run, with what is no step; 0: that of the steps; NaN: nobody knows
        self.before_s = 0.0  # wall time of the run before that, of which the state has seen nothing
        self.recent = {name: Recent(span_s) for name, span_s in LAST.items()}
        self._recent = tuple(self.recent.values())
        self.loss, self.loss_mean, self.held_out = Series(limit), Series(limit), Series(limit)
        self.rate, self.rate_sustained = Series(limit), Series(limit)  # tokens/s, or steps/s where tokens are unknown
        self.idle, self.idle_mean, self.idle_data = Series(limit), Series(limit), Series(limit)
        self.memory, self.lr, self.grad_norm = Series(limit), Series(limit), Series(limit)
        self.ruler = Ruler()
        self.busy: float | None = None  # share of the time in which the device worked, where a meter sampled it
        self.launches: float | None = None  # kernel launches a step, likewise
        # load of the most and the least used expert, and the load-balancing loss, of the last step that had them
        self.routing: tuple[float, float, float | None] | None = None
        # of several processes the slowest one's number, and ms of a step that it and the median one compute or wait for data
        self.slowest: tuple[int, float, float] | None = None
        self.health = _health()
        self._judges = True
        self.events: list[Event] = []
        self.warnings: dict[str, _Count] = {}
        self.layers: list[tuple[str, str]] = []  # layer and product, and its figures: the worst of the last sample
        self.layers_step = 0
        self.first_bad = ""
        self._waits = False  # whether any step said how long it waited
        self.smoothing = LossMean()
        self._stall_sum = 0.0
        self._step_s = self._good_s = self._busy_s = self._rate_s = self._rate_work = 0.0
        self._seconds_sum = self._work_sum = self._idle_sum = self._idle_seconds = self._steps_sum = 0.0
        self._offload_sum: float | None = None

    @classmethod
    def from_records(cls, records: Any, title: str = "", **options: Any) -> PanelState:
        """Make the state of a run that is over from a pandas DataFrame or an iterable of mappings with the columns of
        `records.frame()`; columns may be missing.
        """
        state = cls(title, **options)
        rows: Iterable[Mapping[str, Any]] = records.to_dict("records") if hasattr(records, "to_dict") else records
        for number, row in enumerate(rows, 1):
            state.add_row(row, default_step=number)
        return state

    def add_row(self, row: Mapping[str, Any], default_step: int = 0) -> None:
        """Add one row with the columns of `records.frame()`. A NaN outside `loss` and `grad_norm` means: not measured."""

        def known(name: str) -> float | None:
            value = row.get(name)
            if value is None or value != value or (name in ("tokens", "wall_ms", "elapsed_s") and math.isinf(value)):
                return None
            return float(value)

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
            targets=known("targets"),
            stall=None if (stall_ms := known("stall_ms")) is None else stall_ms / 1e3,
            lr=known("lr"),
            grad_norm=None if (norm := row.get("grad_norm")) is None else float(norm),
            memory=known("peak_gib"),
            busy=known("busy_frac"),
            launches=known("launches"),
            offload=None if (offload_ms := known("offload_ms")) is None else offload_ms / 1e3,
            balance_loss=known("balance_loss"),
            expert_load_max=known("expert_load_max"),
            expert_load_min=known("expert_load_min"),
            slowest_rank=known("slowest_rank"),
            slowest_ms=known("slowest_ms"),
            median_ms=known("median_ms"),
        )

    def add_record(self, record: Record, late: Mapping[str, float]) -> None:
        """Add one step's Record, with those of its late values that have arrived ({} for none)."""
        self.add(
            record.step,
            loss=late.get("loss"),
            tokens=record.tokens,
            seconds=record.wall_ms / 1e3,
            elapsed=record.elapsed_s,
            idle=late.get("idle_frac"),
            skipped=late.get("skipped", 0.0) != 0.0,
            targets=late.get("targets"),
            stall=record.stall_ms / 1e3,
            lr=record.lr,
            grad_norm=late.get("grad_norm"),
            memory=record.peak_gib,
            busy=late.get("busy_frac"),
            launches=late.get("launches"),
            offload=None if (offload_ms := late.get("offload_ms")) is None else offload_ms / 1e3,
            balance_loss=late.get("balance_loss"),
            expert_load_max=late.get("expert_load_max"),
            expert_load_min=late.get("expert_load_min"),
            slowest_rank=late.get("slowest_rank"),
            slowest_ms=late.get("slowest_ms"),
            median_ms=late.get("median_ms"),
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
        targets: float | None = None,
        stall: float | None = None,
        lr: float | None = None,
        grad_norm: float | None = None,
        memory: float | None = None,
        busy: float | None = None,
        launches: float | None = None,
        offload: float | None = None,
        balance_loss: float | None = None,
        expert_load_max: float | None = None,
        expert_load_min: float | None = None,
        slowest_rank: float | None = None,
        slowest_ms: float | None = None,
        median_ms: float | None = None,
        steps: int = 1,
    ) -> None:
        """Add one step's numbers; None means not measured.

        seconds: wall time since the step before. elapsed: seconds of the whole run so far, by default the sum of those. idle: share
        of the step's time, 0..1. stall: seconds of it that waited for a batch. memory: the highest so far, in GiB. busy: share of
        the time in which the device worked, 0..1, and launches: kernel launches a step, if a meter sampled them. offload: seconds
        of it that the device waited for an offloading optimizer, idle time as well. balance_loss, expert_load_max, expert_load_min:
        of the routers of experts, as in the record. slowest_rank, slowest_ms, median_ms: which of several processes is slowest,
        and what it and the median one do alone in a step. steps: how many steps up to this one the
        numbers stand for: the means of their losses, norms and shares, the sums of their tokens and seconds. Health judges single
        steps only.

        The same step may come again with further numbers. Costs a few microseconds, on average the same in a long run.
        """
        self.step = step
        if self.first_step is None:
            self.first_step = step
        if self._judges and steps == 1 and (loss is not None or skipped or grad_norm is not None or targets == 0):
            for event in self.health.add(step, loss=loss, grad_norm=grad_norm, lr=lr, skipped=skipped, targets=targets):
                self.happened(event)
        if targets == 0:
            skipped = True  # it is no step that counts
        elif loss is not None:
            self._add_loss(step, loss, skipped, steps)
        elif skipped:
            self._warn("skipped", step)
        if grad_norm is not None:
            self.grad_norm.append(step, grad_norm)
        if lr is not None:
            self.lr.append(step, lr)
        if memory is not None:
            self.memory.append(step, memory)
        if busy is not None:
            self.busy, self.launches = busy, launches
        if expert_load_max is not None and expert_load_min is not None:
            self.routing = expert_load_max, expert_load_min, balance_loss
        if slowest_rank is not None and slowest_ms is not None and median_ms is not None:
            self.slowest = int(slowest_rank), slowest_ms, median_ms
        if held_out is not None:
            self.held_out.append(step, held_out)
        if tokens is not None:
            self.tokens += int(tokens)
        if stall is None:
            stall = 0.0
            self._waits = self._waits or (idle is not None and idle == idle)
        else:
            self._waits = True
        if seconds is not None and seconds > 0.0:
            self._add_rate(step, tokens, seconds, idle, stall, offload, steps)
            self._step_s += seconds
            if not skipped:
                waited = stall + (offload or 0.0)
                idle_s = waited if idle is None or idle != idle else idle * seconds
                self._good_s += seconds - min(waited, idle_s)
                self._busy_s += seconds - idle_s
        if elapsed is not None:
            self.elapsed_s = elapsed
        if seconds is not None:
            if self.ruler.last is None:
                self.ruler.add(step - steps, 0.0, self.elapsed_s - seconds)
            self.ruler.add(step, self.tokens, self.elapsed_s)

    def note(self, step: int, text: str) -> None:
        """Add a remark of the user's, which is marked on the loss curve."""
        from surokit.runs.health import Event

        self.happened(Event(step, "note", text))

    def take_health(self, phase: Phase, events: Iterable[Event]) -> None:
        """Take the phase and the events from somebody who judges every step; from then on the state's own health judges none."""
        self._judges = False
        self.health.phase = phase
        for event in events:
            self.happened(event)

    def happened(self, event: Event) -> None:
        """Note an event: keep it with the others, and count it among the warnings if its kind is one."""
        events = self.events
        events.append(event)
        if event.kind in KINDS and event.kind not in ("skipped", "nonfinite"):  # those are counted step by step
            self._warn(event.kind, event.step, event.text)
        if len(events) > EVENTS:  # drop the second of the least bad kind: its first and its latest stay
            least = max(_RANK[e.kind] for e in events)
            places = [i for i, e in enumerate(events) if _RANK[e.kind] == least]
            del events[places[len(places) > 1]]

    def add_layers(self, step: int, rows: Iterable[Any], first_bad: str) -> None:
        """Replace the worst layers by those of a sample taken at `step`. rows: worst first, with layer, gemm, sqnr_db, clipped and
        underflow. first_bad: which layer ever went bad first, as a sentence, or "".
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

    def _add_loss(self, step: int, loss: float, skipped: bool, steps: int) -> None:
        self.loss.append(step, loss)
        if skipped or loss - loss != 0.0:
            self._warn("skipped" if skipped else "nonfinite", step)
        if loss - loss != 0.0:
            return
        self.smoothing.add(loss, steps)
        self.loss_mean.append(step, self.smoothing.value)

    def _add_rate(
        self,
        step: int,
        tokens: float | None,
        seconds: float,
        idle: float | None,
        stall: float,
        offload: float | None,
        steps: int,
    ) -> None:
        self.elapsed_s += seconds
        work = float(steps) if tokens is None else tokens
        if step == self.first_step:
            return  # the first step pays for allocation, compilation and the data's start; it is no rate
        decay = 0.5 ** (seconds / self.half_life_s)
        self._seconds_sum = decay * self._seconds_sum + seconds
        self._work_sum = decay * self._work_sum + work
        self._steps_sum = decay * self._steps_sum + steps
        self._rate_s += seconds
        self._rate_work += work
        for recent in self._recent:
            recent.add(seconds, work)
        self.rate.append(step, work / seconds)
        self._stall_sum = decay * self._stall_sum + stall
        if offload is not None:
            self._offload_sum = decay * (self._offload_sum or 0.0) + offload
        self.rate_sustained.append(step, self._work_sum / self._seconds_sum)
        if self._stall_sum > 0.0:
            self.idle_data.append(step, self._stall_sum / self._seconds_sum)
        if idle is not None and idle == idle:
            self._idle_seconds = decay * self._idle_seconds + seconds
            self._idle_sum = decay * self._idle_sum + idle * seconds
            self.idle.append(step, idle)
            self.idle_mean.append(step, self._idle_sum / self._idle_seconds)

    def _warn(self, kind: str, step: int, text: str = "") -> None:
        count = self.warnings.setdefault(kind, _Count())
        count.times += 1
        count.last, count.text = step, text

    @property
    def eta_s(self) -> float | None:
        """Return the seconds left at the present pace; None without a total, a pace, or once the run has ended."""
        if self.total is None or self.reason is not None or self._steps_sum == 0.0:
            return None
        return max(self.total - self.step, 0) * self._seconds_sum / self._steps_sum

    @property
    def overall_rate(self) -> float | None:
        """Return the work a second over all steps but the first; None before the second."""
        return self._rate_work / self._rate_s if self._rate_s else None

    @property
    def goodput(self) -> float | None:
        """Return the time of steps that count, without waiting for data or offload, over the wall time of the run; None before the
        first step, and if it is not known where the time went."""
        return self._good_s / max(self.run_s, self._step_s) if self._step_s and self._accounted else None

    @property
    def lost_s(self) -> float | None:
        """Return the least wall time that was lost, in seconds: the run's less the busy time of the steps that count. None where
        `goodput` is."""
        return None if self.goodput is None else max(self.run_s, self._step_s) - self._busy_s

    @property
    def _accounted(self) -> bool:
        """True if it is known where the run's time went."""
        return self._waits and self.run_s == self.run_s

    @property
    def standing(self) -> Standing:
        """Return a word for the run's standing, such as "running" or "done"."""
        if self.reason is None:
            return "paused" if self.paused else "waiting" if self.first_step is None else "running"
        for word in ("done", "interrupted", "failed", "lost", "replaced"):
            if self.reason.startswith(word):
                return word
        return "stopped"

    @property
    def idle_causes(self) -> dict[str, float]:
        """Return the shares of the present time in which the device is idle, 0..1, by cause: "data", waiting for a batch;
        "offload", waiting for an optimizer whose state is on the host; "between steps", other gaps between steps, if idle time is
        measured; "inside steps", between kernels, if a meter samples it. A cause that is not known is left out.
        """
        causes: dict[str, float] = {}
        idle = (
            1.0 if self.idle_mean.last is None else self.idle_mean.last[1]
        )  # the host may wait while the device computes
        if self._seconds_sum and (self._stall_sum > 0.0 or self.idle_mean.last is not None):
            causes["data"] = min(self._stall_sum / self._seconds_sum, idle)
        if self._offload_sum is not None and self._seconds_sum:
            causes["offload"] = min(self._offload_sum / self._seconds_sum, idle - causes.get("data", 0.0))
        outside = sum(causes.values())
        if self.idle_mean.last is not None:
            causes["between steps"] = max(0.0, idle - outside)
            outside += causes["between steps"]
        if self.busy is not None:
            causes["inside steps"] = max(0.0, 1.0 - self.busy - outside)
        return causes

    @property
    def light_per_rate(self) -> float | None:
        """Return one token a second as a share of the devices' peak; None if the operations a token or the peak are not known."""
        info = self.info
        if info is None or not info.flops_per_token or not info.peak_tflops or not self.tokens:
            return None
        return info.flops_per_token / (max(info.gpus, 1) * info.peak_tflops * 1e12)

    @property
    def light(self) -> float | None:
        """Return the sustained rate as a share of the devices' peak (the speed of light; with a model's operations an MFU)."""
        factor, rate = self.light_per_rate, self.rate_sustained.last
        return None if factor is None or rate is None else factor * rate[1]

    @property
    def gpu_hours(self) -> float | None:
        """Return the wall time of the run times the number of its GPUs, in hours; None if it is not known, or on a CPU."""
        if self.info is None or not self.info.gpus:
            return None
        return self.info.gpus * self._paid_s / 3600

    @property
    def _paid_s(self) -> float:
        """Return the wall time of the run, in seconds: not `elapsed_s`, which a fork goes on from its parent's."""
        return self.before_s + max(self._step_s, self.run_s)  # max(number, NaN) is the number

    @property
    def usd_per_s(self) -> float | None:
        """Return the price of a second of this run, in dollars; None without a price."""
        price = None if self.info is None else self.info.usd_per_gpu_hour
        if self.info is None or price is None or not math.isfinite(price) or not self.info.gpus:
            return None
        return price * self.info.gpus / 3600

    @property
    def usd(self) -> float | None:
        """Return GPU hours times their price; None without one."""
        price = self.usd_per_s
        return None if price is None else price * self._paid_s

    def warning_lines(self) -> list[str]:
        """Return the warnings as sentences, worst first."""
        out = [f"first to go bad: {self.first_bad}"] if self.first_bad else []
        for kind, text in KINDS.items():
            count = self.warnings.get(kind)
            if count is not None:
                where = (
                    f"at step {count.last:,}"
                    if count.times == 1
                    else f"{count.times:,} times, last at step {count.last:,}"
                )
                out.append(f"{text}, {where}" + (f": {count.text}" if count.text else ""))
        return out


def worst(events: Iterable[Event], count: int) -> list[Event]:
    """Return the `count` worst events, of equally bad ones the latest; in order of their steps, at one step the worst first."""
    ranked = sorted(events, key=lambda event: (_RANK[event.kind], -event.step))[:count]
    return sorted(ranked, key=lambda event: (event.step, _RANK[event.kind]))


def _health() -> Health:
    from surokit.runs.health import (
        Health,
    )  # not at the top: the package around it loads torch, which a figure does not need

    return Health()


class _Count:
    """A _Count holds how often a warning came, and the step and the words of the last one."""

    __slots__ = ("last", "text", "times")

    def __init__(self) -> None:
        self.times = self.last = 0
        self.text = ""
