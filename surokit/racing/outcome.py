"""Compute what follows from a race: the rows of its table, and the sentences under it. It follows from the runs, and is not stored.

ratio: geometric mean over the rounds of tokens/s over the baseline's, with its bootstrap interval. Of a recipe that changes on the
way each part has such a mean, and the ratio is that of the time of all steps: 1 / (sum of a part's share of the steps / its mean).
matched: the ratio, up to there, times the baseline's tokens to the target loss over this run's: progress, not speed. The target is
given, or the lowest smoothed loss that every run has reached; in a race to a goal it is the goal, and steps are those after which a
run was found to have reached it. All runs see the same batches, so that the noise of these cancels when two losses are compared.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from surokit.racing.runs import Floats, Run, Turn, rounds_of
from surokit.racing.statistics import drift, reached_by_all, smoothed, smoothing, steps_to
from surokit.statistics import ROUNDS, Interval, bootstrap_interval, harmonic_interval, spread
from surokit.units import counted, elapsed

HOUR_S, DAY_S = 3600.0, 86400.0
GoalKind = Literal["held_out", "accuracy"]


@dataclass(frozen=True)
class RunOutcome:
    """A RunOutcome holds one run's figures; None or nan where there is nothing to say.

    Times are the run's own (`Run.warm_seconds`).

    loss: smoothed, after the last step. loss_at: smoothed, when `at_s` of its own time had passed, which is as long as every run
    has. loss_hour: after an hour of its own time, where it ran that long. accuracy: in a race to one, when it was judged last.
    to_target: (steps, tokens, seconds, USD). steps_per_day: of own time, at the speed of the whole turns.
    """

    name: str
    tokens_per_s: float
    low: float
    high: float
    ratio: Interval
    matched: Interval | None
    predicted: float | None
    loss: float
    held_out: float | None
    accuracy: float | None
    to_target: tuple[int, int, float, float | None] | None
    loss_at: float
    loss_hour: float | None
    idle_frac: float
    drift: float
    steps_per_day: float
    first_step_s: float
    warm_up_s: float
    peak_gib: float | None


@dataclass(frozen=True)
class Outcome:
    """An Outcome holds the whole result: rows in the order of the entries (the baseline first, its twin last), and what it rests
    on."""

    rows: tuple[RunOutcome, ...]
    rounds: int
    span: int  # steps over which losses are averaged
    target: float
    target_given: bool
    at_s: float
    timed_s: float
    goodput: float  # share of the race's clock, from its first turn to the end of its last, that was somebody's turn
    control: Interval | None
    seed: int
    goal: GoalKind | None = None

    @property
    def has_goal(self) -> bool:
        return self.goal is not None

    def __getitem__(self, name: str) -> RunOutcome:
        return next(row for row in self.rows if row.name == name)

    @property
    def trusted(self) -> bool | None:
        """Return whether the baseline's twin came out as fast as itself; None without a twin or with too few rounds."""
        return None if self.control is None or not self.control.known else self.control.holds(1.0)

    def control_words(self) -> str:
        """Say how far the ratios can be trusted: by the number of rounds, and by the A/A control."""
        all_there = self.has_goal and all(row.to_target is not None for row in self.rows)
        remedy = "take shorter turns" if all_there else "let the race go on"
        if self.rounds < ROUNDS:
            few = (
                f"{counted(self.rounds, 'round')} of turns {'is' if self.rounds == 1 else 'are'} too few to trust a ratio (an "
                f"interval needs {ROUNDS}): {remedy}."
            )
            return few if self.control is not None else f"{few} There was no A/A control."
        if self.control is None:
            return "There was no A/A control, so nothing says how far these intervals can be trusted."
        if self.trusted is None:
            what = "on its twin's way to the goal" if self.has_goal else "in a part of its recipe"
            return (
                f"The baseline against itself came out without an interval, since {what} there were too few turns, so nothing says "
                f"how far these intervals can be trusted: {remedy}."
            )
        if self.trusted:
            width = max(self.control.high - 1, 1 - self.control.low)
            return (
                f"A/A control: the baseline against itself came out at {self.control}, which holds 1: differences of more than "
                f"about {width:.1%} can be seen here."
            )
        return (
            f"The intervals are not to be trusted: the baseline against itself came out at {self.control}, which does not hold 1. "
            "Something else was at work (other programs, heat); one race in twenty says so by chance. Let it go on, or race again."
        )


def outcome(
    runs: Mapping[str, Run],
    baseline: str,
    twin: str | None = None,
    target_loss: float | None = None,
    usd_per_hour: float | None = None,
    seed: int = 0,
    goal: GoalKind | None = None,
) -> Outcome:
    """Compute the figures of the runs so far; nan or None where a run has had no turn yet.

    goal: what the runs are trained to, which takes the place of a target loss; None in a race without a goal.
    """
    has_goal = goal is not None
    names = list(runs)
    rounds = rounds_of(list(runs.values()))
    shared = dict.fromkeys(names, rounds)
    if has_goal:  # who has reached it rests, and the others have rounds of their own with the baseline
        shared = {name: rounds_of([run, runs[baseline]]) for name, run in runs.items()}
        rounds = max((shared[name] for name in names if name != baseline), key=len, default=rounds)
    rates = {name: [turn.rate for turn in _of_rounds(runs[name], shared[name])] for name in names}
    losses = {name: run.steps["loss"] for name, run in runs.items()}
    seconds = {name: np.cumsum(run.warm_seconds()) for name, run in runs.items()}
    span = smoothing(max(map(len, losses.values())))
    target = target_loss
    if target is None:
        target = math.nan if has_goal else reached_by_all(list(losses.values()), span)
    at_s = float(np.min([s[-1] if len(s) else math.nan for s in seconds.values()]))  # nan where one of them is
    needed = {name: run.reached if has_goal else steps_to(losses[name], target, span) for name, run in runs.items()}
    price = None if usd_per_hour is None else usd_per_hour / HOUR_S
    rows = []
    for name, run in runs.items():
        ratio = _ratio(run, runs[baseline], shared[name], len(run.steps), seed)
        timed = rates[name] or [turn.rate for turn in run.turns if turn.steps] or [math.nan]
        low, mid, high = spread(timed)
        if len(set(map(run.part_of, run.whole_turns))) > 1:  # a median would be that of one part
            mid = float(run.steps["tokens"].sum() / seconds[name][-1])
        n, base_n = needed[name], needed[baseline]
        mean = smoothed(losses[name], span)
        to_target = None
        if n is not None:
            own_s = float(seconds[name][n - 1])
            to_target = n, _tokens(run, n), own_s, None if price is None else own_s * price
        rows.append(
            RunOutcome(
                name=name,
                tokens_per_s=mid,
                low=low,
                high=high,
                ratio=ratio,
                matched=None
                if n is None or base_n is None
                else _ratio(run, runs[baseline], shared[name], n, seed).times(
                    _tokens(runs[baseline], base_n) / _tokens(run, n)
                ),
                predicted=run.prediction.ratio if run.prediction else None,
                loss=float(mean[-1]) if len(mean) else math.nan,
                held_out=run.held_out[-1][1] if run.held_out and run.held_out[-1][0] == _last_step(run) else None,
                accuracy=run.goals[-1][1] if run.goals and goal == "accuracy" else None,
                to_target=to_target,
                loss_at=_at(mean, seconds[name], at_s),
                loss_hour=_at(mean, seconds[name], HOUR_S) if len(mean) and seconds[name][-1] >= HOUR_S else None,
                idle_frac=_idle(run),
                drift=drift(_of_longest_part(run, shared[name])),
                steps_per_day=_steps_per_day(run),
                first_step_s=run.warm_up.first_step_s if run.warm_up else math.nan,
                warm_up_s=run.warm_up.seconds if run.warm_up else math.nan,
                peak_gib=run.peak_gib,
            )
        )
    control = next((row.ratio for row in rows if row.name == twin), None)
    timed_s = sum(turn.seconds for run in runs.values() for turn in run.turns)
    return Outcome(
        tuple(rows),
        len(rounds),
        span,
        target,
        target_loss is not None,
        at_s,
        timed_s,
        _goodput(runs),
        control,
        seed,
        goal,
    )


def _ratio(run: Run, baseline: Run, rounds: Sequence[int], steps: int, seed: int) -> Interval:
    """Return a run's speed over the baseline's, for its first `steps` steps."""
    found: dict[tuple[int, int], list[float]] = {}  # part of either recipe -> ratios of turns
    for own, base in zip(_of_rounds(run, rounds), _of_rounds(baseline, rounds), strict=True):
        found.setdefault((run.part_of(own), baseline.part_of(base)), []).append(own.rate / base.rate)
    if len(found) < 2:
        return bootstrap_interval([ratio for part in found.values() for ratio in part], seed=seed)
    made = Counter(
        (run.part_at(step), baseline.part_at(step)) for step in run.steps["step"][:steps].astype(int).tolist()
    )
    timed = {
        part: count for part, count in made.items() if part in found
    }  # one without a whole turn counts as the others do
    return harmonic_interval([found[part] for part in timed], list(timed.values()))


def _tokens(run: Run, steps: int) -> int:
    return int(run.steps["tokens"][:steps].sum())


def _of_longest_part(run: Run, rounds: Sequence[int]) -> list[float]:
    """Return tokens/s of the turns of that part of a run's recipe which has the most."""
    turns = _of_rounds(run, rounds)
    (longest, _), *_ = Counter(map(run.part_of, turns)).most_common(1) or [(0, 0)]
    return [turn.rate for turn in turns if run.part_of(turn) == longest]


def _of_rounds(run: Run, rounds: Sequence[int]) -> list[Turn]:
    by_round = {turn.round: turn for turn in run.whole_turns}
    return [by_round[number] for number in rounds]


def _last_step(run: Run) -> int:
    return int(run.steps["step"][-1]) if len(run.steps) else -1


def _at(mean: Floats, seconds: Floats, at_s: float) -> float:
    """Return the smoothed loss when so many seconds had passed; nan before the first step's end, and where the time is not
    known."""
    if math.isnan(at_s):
        return math.nan
    done = int(np.searchsorted(seconds, at_s * (1 + 1e-9), side="right"))
    return float(mean[done - 1]) if done else math.nan


def _steps_per_day(run: Run) -> float:
    """Return how many steps a day of the run's own time has, by its whole turns; nan before there is one."""
    seconds = sum(turn.seconds for turn in run.whole_turns)
    return DAY_S * sum(turn.steps for turn in run.whole_turns) / seconds if seconds else math.nan


def _goodput(runs: Mapping[str, Run]) -> float:
    """Return the share of the race's clock in which steps were taken: the rest went to looking, saving and changing over.

    Untimed steps count as the mean of the timed ones of their turn. The clock stands between two calls of a race that is gone on
    with. nan before there is a whole turn.
    """
    turns = sorted((turn for run in runs.values() for turn in run.whole_turns), key=lambda turn: turn.at_s)
    if not turns:
        return math.nan
    taken = [turn.seconds * (turn.untimed + turn.steps) / turn.steps for turn in turns]
    clock_s = turns[-1].at_s + taken[-1] - turns[0].at_s
    return min(1.0, sum(taken) / clock_s) if clock_s > 0 else math.nan


def _idle(run: Run) -> float:
    """Return a lower bound of the idle share of the step time, over the steps that were timed."""
    step, wall, idle = run.steps["step"], run.steps["wall_ms"], run.steps["idle_frac"]
    timed = np.zeros(len(step), bool)
    for turn in run.turns:
        timed |= (step > turn.last - turn.steps) & (step <= turn.last)
    known = timed & np.isfinite(idle)
    return float((idle * wall)[known].sum() / wall[known].sum()) if wall[known].sum() > 0 else math.nan


# -- as a table

COLUMNS = {
    "tokens_per_s": "median of the turns, of a recipe that changes the mean over its steps",
    "low": "slowest turn",
    "high": "fastest turn",
    "ratio": "tokens/s over the baseline's",
    "ratio_low": "its interval, 95 %",
    "ratio_high": "",
    "predicted": "ratio that was predicted",
    "matched": "ratio at equal loss",
    "matched_low": "its interval, tokens to it taken as exact",
    "matched_high": "",
    "loss": "smoothed training loss after the last step",
    "held_out": "loss on held-out data",
    "accuracy": "share of a task that was right when last judged",
    "steps_to_target": "",
    "tokens_to_target": "",
    "s_to_target": "own time",
    "usd_to_target": "",
    "loss_at_equal_time": "",
    "loss_after_an_hour": "",
    "idle_frac": "at least",
    "drift": "last third of the turns over the first, of a recipe that changes within its longest part",
    "steps_per_day": "of own time",
    "first_step_s": "",
    "warm_up_s": "of the baseline with its profile, where gains are predicted",
    "peak_gib": "of the device, the run's own",
}


def record_of(row: RunOutcome) -> dict[str, Any]:
    """Return a row as a dict with the columns of the table; None where there is nothing."""
    matched = row.matched or Interval(math.nan, math.nan, math.nan)
    steps, tokens, seconds, usd = row.to_target or (None, None, None, None)
    return {
        "tokens_per_s": row.tokens_per_s,
        "low": row.low,
        "high": row.high,
        "ratio": row.ratio.mid,
        "ratio_low": row.ratio.low,
        "ratio_high": row.ratio.high,
        "predicted": row.predicted,
        "matched": matched.mid,
        "matched_low": matched.low,
        "matched_high": matched.high,
        "loss": row.loss,
        "held_out": row.held_out,
        "accuracy": row.accuracy,
        "steps_to_target": steps,
        "tokens_to_target": tokens,
        "s_to_target": seconds,
        "usd_to_target": usd,
        "loss_at_equal_time": row.loss_at,
        "loss_after_an_hour": row.loss_hour,
        "idle_frac": row.idle_frac,
        "drift": row.drift,
        "steps_per_day": row.steps_per_day,
        "first_step_s": row.first_step_s,
        "warm_up_s": row.warm_up_s,
        "peak_gib": row.peak_gib,
    }


HEADER = (
    "run",
    "tokens/s",
    "x baseline (95 %)",
    "predicted",
    "at equal loss",
    "held out",
    "accuracy",
    "to target",
    "idle",
    "drift",
    "first step",
)


def header_of(found: Outcome) -> tuple[str, ...]:
    """Return the words over the columns: in a race to a goal, those of the goal."""
    goals = {"at equal loss": "at the goal", "to target": "to the goal"} if found.has_goal else {}
    return tuple(goals.get(word, word) for word in HEADER if word in _columns(found))


def cells_of(row: RunOutcome, found: Outcome) -> tuple[str, ...]:
    """Return a row as words, under `header_of`."""
    is_baseline = row is found.rows[0]
    ratio = "baseline" if is_baseline else "" if math.isnan(row.ratio.mid) else str(row.ratio)
    cells = (
        row.name,
        "" if math.isnan(row.tokens_per_s) else f"{row.tokens_per_s:,.0f} ({row.low:,.0f} to {row.high:,.0f})",
        ratio,
        "" if row.predicted is None or is_baseline else f"{row.predicted:.2f}",
        "" if row.matched is None or is_baseline else _mid_words(row.matched),
        "" if row.held_out is None else f"{row.held_out:.4f}",
        "" if row.accuracy is None else f"{row.accuracy:.1%}",
        "" if math.isnan(found.target) and not found.has_goal else _target_words(row.to_target),
        "" if math.isnan(row.idle_frac) else f"{row.idle_frac:.1%}",
        "" if math.isnan(row.drift) else f"{row.drift:+.1%}",
        "" if math.isnan(row.first_step_s) else f"{row.first_step_s:.2f} s",
    )
    return tuple(cell for word, cell in zip(HEADER, cells, strict=True) if word in _columns(found))


def _columns(found: Outcome) -> tuple[str, ...]:
    """Return the words of HEADER that a race has something for: what share of a task is right where that is its goal."""
    return tuple(word for word in HEADER if word != "accuracy" or found.goal == "accuracy")


def _mid_words(ratio: Interval) -> str:
    if math.isnan(ratio.mid):
        return ""
    return f"{ratio.mid:.3f}" if ratio.known else str(ratio)


def _target_words(to_target: tuple[int, int, float, float | None] | None) -> str:
    if to_target is None:
        return "not reached"
    steps, _, seconds, usd = to_target
    if math.isnan(seconds):
        return f"{steps:,} steps"
    return f"{steps:,} steps, {elapsed(seconds)}" + ("" if usd is None else f", {usd:.3g} USD")
