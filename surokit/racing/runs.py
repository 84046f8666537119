"""This module holds what a race is made of, as plain values: the turns and steps of each run, kept while it runs, written to a
folder and read back.

The clock of a run is its own: `warm_seconds` counts the time that its steps take, not the other runs' turns. Steps that were not
timed (the warm-up, and the first of each turn, in which the machine changes over) count as the mean of the timed ones next to them,
so that time is what the run would take alone once it is warm. What the warm-up really took stands beside.
"""

from __future__ import annotations

import json
import re
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surokit.places import write_whole
from surokit.runs.jsonl import read
from surokit.runs.records import Record

Floats = NDArray[np.float64]
COLUMNS = ("step", "loss", "grad_norm", "lr", "tokens", "wall_ms", "idle_frac", "skipped")


@dataclass(frozen=True)
class Turn:
    """A Turn describes steps of one run without a break: `untimed` ones, then `steps` that took `seconds` and `tokens`.

    last: the number of the last step. at_s: when it began, in seconds of the race. whole: False where a stop cut it short, or it
    had no untimed step, so that it is in no ratio.
    """

    round: int
    untimed: int
    steps: int
    last: int
    tokens: int
    seconds: float
    at_s: float
    whole: bool = True

    @property
    def rate(self) -> float:
        """Return tokens a second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class WarmUp:
    """A WarmUp tells of the steps before the first turn: their number, how long they took (with the profile of the baseline that
    predictions rest on), the first of them alone (which a user waits for), and how long a step took at the end."""

    steps: int
    first_step_s: float
    seconds: float
    step_s: float


@dataclass(frozen=True)
class Prediction:
    """A Prediction says how much faster than the baseline a recipe is expected to be; None where it could not be told, with `why`.

    share: the part of the baseline's step in products that the two compute differently. products: how many times as fast these
    are, quantization left out. quantization: what it takes, as a share of the baseline's step. All three measured apart, and kept
    where they contradict each other, so that there is no ratio.
    """

    ratio: float | None
    share: float | None = None
    products: float | None = None
    quantization: float | None = None
    why: str = ""

    def __str__(self) -> str:
        if self.ratio is None or self.share is None or self.products is None or self.quantization is None:
            return f"no prediction: {self.why}"
        return (
            f"predicted {self.ratio:.2f} x: {self.share:.0%} of the baseline's step is products that change, {self.products:.2f} x "
            f"as fast here, and quantization takes {self.quantization:.0%} of it"
        )


class Steps:
    """A Steps object holds one row a step, in order, for all steps of a run of any length."""

    def __init__(self, columns: Mapping[str, Iterable[float]] | None = None) -> None:
        self._columns = {name: array("d", (columns or {}).get(name, ())) for name in COLUMNS}

    def add(self, record: Record) -> None:
        row = record.to_dict()
        for name, column in self._columns.items():
            column.append(row.get(name, float("nan")))

    def copy(self) -> Steps:
        """Return a copy of the rows that are there, also while another thread adds one: its last column is the last to grow."""
        count = len(self._columns[COLUMNS[-1]])
        return Steps({name: column[:count] for name, column in self._columns.items()})

    def __len__(self) -> int:
        return len(self._columns["step"])

    def __getitem__(self, name: str) -> Floats:
        """Return a copy of a column."""
        return np.array(self._columns[name], np.float64)


@dataclass
class Run:
    """A Run is one entry of a race. algebra: its recipe in a line. numerics: "native", what is emulated, or "". work: what it
    does, as `SessionWork` has it. held_out: (step, loss). goals: (steps made, what the race's goal is judged by). reached: the
    steps that it had made when it was found at the goal. changes: after which steps its recipe goes over to its next part.
    peak_gib: its own peak of device memory; None on a CPU."""

    name: str
    algebra: str = ""
    numerics: str = ""
    recipe: dict[str, Any] | None = None
    changes: list[int] = field(default_factory=list)
    work: dict[str, Any] = field(default_factory=dict)
    warm_up: WarmUp | None = None
    turns: list[Turn] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    goals: list[tuple[int, float]] = field(default_factory=list)
    reached: int | None = None
    peak_gib: float | None = None
    prediction: Prediction | None = None
    batches: str = ""  # digest of all that it was given
    steps: Steps = field(default_factory=Steps)

    def copy(self) -> Run:
        """Return a copy as it is now, also while another thread makes the run go on: turns are read first, since a turn's steps
        are there before it."""
        turns, held_out, goals = list(self.turns), list(self.held_out), list(self.goals)
        return replace(self, turns=turns, held_out=held_out, goals=goals, steps=self.steps.copy())

    @property
    def whole_turns(self) -> list[Turn]:
        """Return the turns that ratios are taken of: no stop cut them short, and one part of the recipe computed all of them."""
        return [
            turn for turn in self.turns if turn.whole and self.part_at(turn.last - turn.steps + 1) == self.part_of(turn)
        ]

    def part_at(self, step: int) -> int:
        """Return which part of its recipe computed a step, by the step's number; 0 where the recipe does not change."""
        return bisect_left(self.changes, step)

    def part_of(self, turn: Turn) -> int:
        """Return which part of its recipe a turn ended in."""
        return self.part_at(turn.last)

    def warm_seconds(self) -> Floats:
        """Return the seconds that each step takes, one a row of `steps`; nan before anything was timed."""
        step, wall = self.steps["step"], self.steps["wall_ms"]
        cost = np.full(len(step), np.nan)
        for turn in self.turns:
            if turn.steps and turn.seconds > 0:
                timed = (step > turn.last - turn.steps) & (step <= turn.last)
                before = (step > turn.last - turn.steps - turn.untimed) & (step <= turn.last - turn.steps)
                total = wall[timed].sum()
                cost[timed] = turn.seconds * (wall[timed] / total if total > 0 else 1 / turn.steps)
                cost[before] = turn.seconds / turn.steps
        timed_turns = [turn for turn in self.turns if turn.steps and turn.seconds > 0]
        if timed_turns:
            cost[np.isnan(cost)] = timed_turns[0].seconds / timed_turns[0].steps
        return cost

    # -- as data

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the steps as plain values."""
        plain = ("name", "algebra", "numerics", "recipe", "changes", "work", "peak_gib", "batches", "reached")
        return {
            **{name: getattr(self, name) for name in plain},
            "warm_up": asdict(self.warm_up) if self.warm_up else None,
            "prediction": asdict(self.prediction) if self.prediction else None,
            "turns": [asdict(turn) for turn in self.turns],
            "held_out": [list(point) for point in self.held_out],
            "goals": [list(point) for point in self.goals],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], steps: Steps) -> Run:
        values = {name: data[name] for name in ("name", "algebra", "numerics", "recipe", "work", "peak_gib", "batches")}
        return cls(
            **values,
            warm_up=WarmUp(**data["warm_up"]) if data["warm_up"] else None,
            prediction=Prediction(**data["prediction"]) if data["prediction"] else None,
            turns=[Turn(**turn) for turn in data["turns"]],
            held_out=[(int(step), float(loss)) for step, loss in data["held_out"]],
            goals=[(int(step), float(value)) for step, value in data.get("goals", ())],
            reached=data.get("reached"),
            changes=list(data.get("changes", ())),
            steps=steps,
        )


def write_steps(steps: Steps, path: Path) -> None:
    """Write the steps as a records.jsonl, which `read_steps` and every other reader of records takes."""
    columns = {name: steps[name].tolist() for name in COLUMNS}
    whole, lines = ("step", "tokens"), []
    for row in zip(*columns.values()):
        values = {name: int(v) if name in whole else v if v - v == 0 else str(v) for name, v in zip(columns, row)}
        lines.append(json.dumps(values) + "\n")
    write_whole(path, "".join(lines))


def read_steps(path: Path) -> Steps:
    columns = read(path)
    return Steps({name: columns[name] for name in COLUMNS if name in columns})


def rounds_of(runs: Sequence[Run]) -> list[int]:
    """Return the rounds in which every run had a whole turn."""
    sets = [{turn.round for turn in run.whole_turns} for run in runs]
    return sorted(set.intersection(*sets)) if sets else []


def optimizer_in_short(words: str) -> str:
    """Return an optimizer's class and learning rates, of what a run's work says of it."""
    rates = dict.fromkeys(re.findall(r"\blr=([^,;)]+)", words))
    return f"{words.partition('(')[0]} at lr={' and '.join(rates)}"
