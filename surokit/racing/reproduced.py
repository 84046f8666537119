"""A Reproduction holds what a race, or a study, said beside what came out when it was run again: figure by figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surokit.statistics import Interval
from surokit.tables import text_table

if TYPE_CHECKING:
    from surokit.racing.result import RaceResult

VERSIONS = ("surokit", "python", "torch", "triton", "cuda", "device", "cpu", "cpu_vectors", "cpu_bf16", "cores")


@dataclass(frozen=True)
class Figure:
    """A Figure is one number of then and now. `then` has an interval where one was stated.

    `verdict` is "inside" or "outside" of that interval; without one "equal", or how far off the number is.
    """

    name: str
    then: Interval
    now: float

    @property
    def verdict(self) -> str:
        if math.isnan(self.now) or math.isnan(self.then.mid):
            return "not comparable"
        if self.then.known:
            return "inside" if self.then.holds(self.now) else "outside"
        return "equal" if self.now == self.then.mid else f"off by {self.now / self.then.mid - 1:+.2%}"


@dataclass(frozen=True)
class Reproduction:
    """A Reproduction says which figures came out again. differences: of versions, machine, weights, data and seeds, in words."""

    figures: tuple[Figure, ...]
    differences: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Return whether no figure is outside of its stated interval."""
        return all(figure.verdict != "outside" for figure in self.figures)

    @property
    def is_exact(self) -> bool:
        """Return whether every figure without a stated interval, such as a loss, is equal to the last bit."""
        return all(figure.verdict == "equal" for figure in self.figures if not figure.then.known)

    def __str__(self) -> str:
        rows = [
            (
                figure.name,
                f"{figure.then.mid:.4f}"
                + (f" ({figure.then.low:.4f} to {figure.then.high:.4f})" if figure.then.known else ""),
                f"{figure.now:.4f}",
                figure.verdict,
            )
            for figure in self.figures
        ]
        inside = sum(figure.verdict == "inside" for figure in self.figures)
        stated = sum(figure.then.known for figure in self.figures)
        exact = sum(figure.verdict == "equal" for figure in self.figures)
        others = len(rows) - stated
        said = [
            f"{inside} of {stated} figures with a stated interval are inside of it; {exact} of {others} others are equal."
        ]
        if self.differences:
            said.append(f"Not as it was then: {'; '.join(self.differences)}.")
        else:
            said.append("Versions, machine, weights and data are those of then.")
        return "\n".join([text_table(rows, header=("figure", "then", "now", ""), right=(1, 2), indent=""), "", *said])


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
    """Compare a race with the one that was run again: ratios by their intervals, losses and steps to the bit.

    ValueError where the two have no run in common.
    """
    before, after = then.outcome, now.outcome
    names = [name for name in then.runs if name in now.runs]
    if not names:
        raise ValueError("The two races have no run of one name: give the folder of the race that was run again.")
    figures, differences = [], differences_of(then.environment, now.environment)
    for name in names:
        old, new = before[name], after[name]
        ratios = {"tokens/s x baseline": (old.ratio, new.ratio), "at equal loss": (old.matched, new.matched)}
        for what, (one, other) in ratios.items():
            if (
                name != then.baseline and one is not None and other is not None and one.known
            ):  # too few rounds say nothing
                figures.append(Figure(f"{name}: {what}", one, other.mid))
        figures.append(Figure(f"{name}: training loss", plain(old.loss), new.loss))
        if old.held_out is not None and new.held_out is not None:
            figures.append(Figure(f"{name}: held-out loss", plain(old.held_out), new.held_out))
        if old.to_target is not None and new.to_target is not None:
            figures.append(Figure(f"{name}: steps to the target", plain(old.to_target[0]), new.to_target[0]))
        works = then.runs[name].work, now.runs[name].work
        differences += [
            f"{what} of {name}" for what in ("weights", "data", "seed") if works[0].get(what) != works[1].get(what)
        ]
    steps = {len(race.runs[names[0]].steps) for race in (then, now)}
    if len(steps) > 1:
        differences.append(f"{max(steps)} steps against {min(steps)}")
    return Reproduction(tuple(figures), tuple(differences))
