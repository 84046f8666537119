"""A Reproduction holds what a race said beside what came out when it was run again: figure by figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surokit.racing.statistics import smoothed, smoothing
from surokit.statistics import Interval
from surokit.tables import text_table

if TYPE_CHECKING:
    from surokit.racing.result import RaceResult
    from surokit.racing.runs import Run

VERSIONS = ("surokit", "python", "torch", "triton", "cuda", "device", "cpu", "cpu_vectors", "cpu_bf16", "cores")

_ON_STEPS = ("at equal loss", "held-out loss", "steps to the target")  # figures that rest on how many steps a run made
FAR = 0.02  # by which a loss may differ on another machine or version and count as the same
NOISY = 3  # times as wide as then: an interval of now that says nothing of whether the two agree


@dataclass(frozen=True)
class Figure:
    """A Figure is one number of then and now, each with its interval where it has one; `now` is None where it did not come out.

    `verdict`: "inside" of the interval of then; "agrees" where it is outside, but no further than both intervals together allow;
    "outside" beyond; "too noisy to tell" where it is not beyond, but its interval is more than NOISY times as wide as then. Without
    an interval "equal", or how far off the number is, "far off" for a loss (`is_loss`) beyond FAR. "missing" if there is none now.
    """

    name: str
    then: Interval
    now: Interval | None
    is_loss: bool = False

    @property
    def verdict(self) -> str:
        if self.now is None or math.isnan(self.now.mid):
            return "missing"
        then, now = self.then, self.now
        if then.known:
            halves = [(end.high - end.low) / 2 for end in (then, now) if end.known]
            if not then.holds(now.mid) and abs(now.mid - then.mid) > math.hypot(*halves):
                return "outside"
            if halves[-1] > NOISY * halves[0]:
                return "too noisy to tell"
            return "inside" if then.holds(now.mid) else "agrees"
        if now.mid == then.mid:
            return "equal"
        off = now.mid / then.mid - 1 if then.mid else math.inf
        return f"{'far ' * (self.is_loss and abs(off) > FAR)}off by {off:+.2%}"

    @property
    def fails(self) -> bool:
        return self.verdict in ("outside", "missing") or self.verdict.startswith("far ")


@dataclass(frozen=True)
class Reproduction:
    """A Reproduction says which figures came out again. differences: in words, of what was `compared` beside the figures. notes:
    sentences on what could not be compared."""

    figures: tuple[Figure, ...]
    differences: tuple[str, ...]
    compared: str = "Versions, machine, weights and data"
    notes: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Return whether there are figures and none is missing, outside of what the intervals allow, or a loss that is far off."""
        return bool(self.figures) and not any(figure.fails for figure in self.figures)

    @property
    def is_noisy(self) -> bool:
        """Return whether a figure was measured so much less surely than then that nothing is told of it."""
        return any(figure.verdict == "too noisy to tell" for figure in self.figures)

    @property
    def is_exact(self) -> bool:
        """Return whether every figure without a stated interval, such as a loss, is equal to the last bit."""
        return all(figure.verdict == "equal" for figure in self.figures if not figure.then.known)

    def __str__(self) -> str:
        rows = [
            (
                figure.name,
                _number(figure.then),
                "" if figure.now is None else _number(figure.now),
                figure.verdict,
            )
            for figure in self.figures
        ]
        inside = sum(figure.verdict == "inside" for figure in self.figures)
        stated = sum(figure.then.known for figure in self.figures)
        exact = sum(figure.verdict == "equal" for figure in self.figures)
        others = len(rows) - stated
        told = f"{inside} of {stated} figures with a stated interval are inside of it"
        if not stated:
            told = "No figure had an interval, as speeds have from five rounds on, so that none is compared by one"
        said = [f"{told}; {exact} of {others} others are equal."]
        if self.is_noisy:
            said.append(
                f"Too noisy to tell is what has an interval more than {NOISY} times as wide as then: run it again with nothing "
                "else running."
            )
        if self.differences:
            said.append(f"Not as it was then: {'; '.join(self.differences)}.")
        else:
            said.append(f"{self.compared} are those of then.")
        said += self.notes
        return "\n".join([text_table(rows, header=("figure", "then", "now", ""), right=(1, 2), indent=""), "", *said])


def _number(found: Interval) -> str:
    return f"{found.mid:.4f}" + (f" ({found.low:.4f} to {found.high:.4f})" if found.known else "")


def plain(value: float | None) -> Interval:
    """Return a number that was stated without an interval."""
    return Interval(math.nan, math.nan if value is None else float(value), math.nan)


def differences_of(then: Mapping[str, Any], now: Mapping[str, Any], names: Sequence[str] = VERSIONS) -> list[str]:
    """Return in words what differs between two environments."""
    return [
        f"{name.replace('_', ' ')} {now.get(name)} for {then.get(name)}"
        for name in names
        if then.get(name) != now.get(name)
    ]


def compare_races(then: RaceResult, now: RaceResult) -> Reproduction:
    """Compare a race with the one that was run again: ratios by their intervals, losses and steps to the bit. Of a run that made
    other steps than then, as in a race by minutes, only what does not rest on their number.

    ValueError where the two have no run in common.
    """
    before, after = then.outcome, now.outcome
    if not set(then.runs) & set(now.runs):
        raise ValueError("The two races have no run of one name: give the folder of the race that was run again.")
    figures: list[Figure] = []
    unequal = False
    left_out: set[str] = set()
    differences = differences_of(then.environment, now.environment)
    for name in then.runs:
        old, new = before[name], after[name] if name in now.runs else None
        made = [len(race.runs[name].steps) for race in (then, now) if name in race.runs]
        as_many = min(made) == max(made)
        unequal |= not as_many
        resting = set() if as_many else set(_ON_STEPS)
        if before.has_goal:  # when a run reached a goal does not rest on how long the race went on
            resting &= {"held-out loss"}
        found: dict[str, Figure] = {}
        ratios: dict[str, tuple[Interval | None, Interval | None]] = {}
        ratios["tokens/s x baseline"] = old.ratio, new.ratio if new else None
        ratios["at equal loss"] = old.matched, new.matched if new else None
        for what, (one, other) in ratios.items():
            if name != then.baseline and one is not None and one.known:  # too few rounds say nothing
                found[what] = Figure(f"{name}: {what}", one, other)
        if as_many:
            loss = Figure(f"{name}: training loss", plain(old.loss), plain(new.loss) if new else None, is_loss=True)
        else:
            ended, ends = (plain(_loss_after(race.runs[name], min(made))) for race in (then, now))
            loss = Figure(f"{name}: training loss after {min(made)} steps", ended, ends, is_loss=True)
        found["training loss"] = loss
        if old.held_out is not None:
            held_out = plain(new.held_out) if new else None
            found["held-out loss"] = Figure(f"{name}: held-out loss", plain(old.held_out), held_out, is_loss=True)
        if old.to_target is not None:
            steps = new.to_target[0] if new and new.to_target else None
            found["steps to the target"] = Figure(f"{name}: steps to the target", plain(old.to_target[0]), plain(steps))
        figures += [figure for what, figure in found.items() if what not in resting]
        left_out |= found.keys() & resting
        if new is not None:
            works = then.runs[name].work, now.runs[name].work
            differing = (what for what in ("weights", "data", "seed") if works[0].get(what) != works[1].get(what))
            differences += [f"{what} of {name}" for what in differing]
    steps_made = {len(race.runs[then.baseline].steps) for race in (then, now) if then.baseline in race.runs}
    if len(steps_made) > 1:
        differences.append(f"{max(steps_made)} steps against {min(steps_made)}")
    without = f"; left out: {', '.join(sorted(left_out))}" * bool(left_out)
    note = f"Where a run made another number of steps than then, training losses are compared after the smaller one{without}."
    return Reproduction(tuple(figures), tuple(differences), notes=(note,) * unequal)


def _loss_after(run: Run, steps: int) -> float:
    """Return a run's smoothed loss after so many of its steps, as if these had been all."""
    return float(smoothed(run.steps["loss"][:steps], smoothing(steps))[-1])
