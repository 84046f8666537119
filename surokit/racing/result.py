"""A RaceResult holds what happened in a race so far, and what follows from it. It knows nothing of what makes a race go on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from surokit.racing import folder
from surokit.racing.outcome import COLUMNS, Outcome, cells_of, header_of, outcome, record_of
from surokit.racing.runs import Run, optimizer_in_short
from surokit.statistics import TOO_FEW
from surokit.tables import data_frame, html_table, text_table
from surokit.units import counted, elapsed

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from surokit.racing.goal import Goal


Axis = Literal["steps", "tokens", "time", "usd"]
SUSTAINED_S = 600.0  # of timed turns, from which steps a day are told


class RaceResult:
    """A RaceResult holds what happened in a race so far, and the figures, tables and pictures that follow from it.

    runs: every run's turns, steps and losses by name. reason: why the race ended last, "" while it goes on.
    """

    def __init__(
        self,
        runs: dict[str, Run],
        baseline: str,
        twin: str | None,
        settings: dict[str, Any],
        *,
        run_dir: Path | None = None,
        environment: dict[str, Any] | None = None,
        notes: Sequence[str] = (),
        reason: str = "",
    ) -> None:
        self._runs, self.baseline, self.twin, self.settings = runs, baseline, twin, settings
        self.run_dir, self.reason = run_dir, reason
        self.command: list[str] | None = None  # the command line that began the race
        self.notes = list(notes)
        self._environment = environment

    @property
    def runs(self) -> Mapping[str, Run]:
        """Return every run by its name."""
        return self._runs

    @property
    def running(self) -> bool:
        """Return whether the race goes on now."""
        return False

    # -- what came of it

    @property
    def environment(self) -> dict[str, Any]:
        if self._environment is None:
            from surokit.environment import environment

            self._environment = environment()
        return self._environment

    @property
    def goal(self) -> Goal | None:
        """Return what every run trains to, None for a race by minutes or steps alone. ValueError where a folder does not hold its
        task."""
        from surokit.racing.goal import Goal  # with torch, which a folder that is read does not need

        found = self.settings.get("until")
        return Goal.from_dict(found) if isinstance(found, Mapping) else None

    @property
    def outcome(self) -> Outcome:
        """Return all figures as values. ValueError before every run has had a turn."""
        runs = self.runs
        if not runs or any(not run.turns for run in runs.values()):
            raise ValueError(
                "The race has no result before every run has had a turn: let it go on with race.go_on(minutes=1)."
            )
        return self.figures(runs)

    def figures(self, runs: Mapping[str, Run]) -> Outcome:
        """Return the figures of these runs of the race, also before every one has had a turn: nan or None where nothing is
        known."""
        settings, until = self.settings, self.settings.get("until")
        return outcome(
            runs,
            self.baseline,
            self.twin,
            settings["target_loss"],
            settings["usd_per_gpu_hour"],
            settings["seed"],
            goal=None if until is None else "held_out" if until["task"] is None else "accuracy",
        )

    def table(self) -> pd.DataFrame:
        """Return a row a run, the baseline first; the columns are described in surokit/racing/outcome.py."""
        found = self.outcome
        return data_frame([{"run": row.name, **record_of(row)} for row in found.rows], ["run", *COLUMNS]).set_index(
            "run"
        )

    def words(self) -> list[str]:
        """Return the sentences that belong beside the table: how it was raced, what may be trusted, what differs."""
        found = self.outcome
        first = self.runs[self.baseline]
        sizes = sorted({turn.steps for turn in first.whole_turns})
        said = self._how_far()
        if not found.rounds:
            said.append(
                "No round is whole yet, so no ratio to the baseline is known: that takes a whole turn of every run."
            )
        elif sizes and first.warm_up is not None:
            size = f"{sizes[0]} to " * (len(sizes) > 1) + counted(sizes[-1], "timed step")
            said.append(
                f"{counted(found.rounds, 'round')} of turns, each {size} after an untimed one, {elapsed(found.timed_s)} timed "
                f"in all on {self.environment['device']}, after a warm-up of {counted(first.warm_up.steps, 'step')} each."
            )
        said += self._trained_by()
        if found.timed_s < 60 * len(found.rows):
            said.append("Less than a minute each: whether a speed is sustained takes minutes to see.")
        if found.timed_s >= SUSTAINED_S:
            days = ", ".join(f"{row.name} {row.steps_per_day:,.0f}" for row in found.rows)
            said.append(f"Steps a day, at this speed: {days}. {found.goodput:.1%} of the race's clock were turns.")
        if found.rounds:
            said.append(found.control_words())
        given = "given" if found.target_given else "the lowest that all have reached"
        if found.has_goal:
            said.append(self._goal_words(found))
        elif not math.isnan(found.target):
            said.append(
                f"Target loss {found.target:.4f} ({given}), mean of {found.span} steps; times are each run's own."
            )
        if not math.isnan(found.at_s):
            said.append(self._loss_words(found))
        for name, run in self.runs.items():
            if run.prediction is not None and name not in (self.baseline, self.twin):
                measured = found[name].ratio
                unknown = run.prediction.ratio is None or math.isnan(measured.mid)
                doubt = "" if measured.known else f" ({TOO_FEW})"
                said.append(f"{name}: {run.prediction}{'' if unknown else f'; measured {measured.mid:.2f} x{doubt}'}.")
        emulated = {name: run.numerics for name, run in self.runs.items() if run.numerics.startswith("emulated")}
        if first.work.get("device") == "cpu":
            said.append(
                "These are a processor's times, where low-precision formats are emulated: they say nothing about a GPU."
            )
        elif emulated:
            said.append(f"Emulated here, so that its time is not the format's: {', '.join(emulated)}.")
        return said + [self._way_on()] * self._ended_early + self.notes

    def _trained_by(self) -> list[str]:
        """Return a sentence on the optimizer, in a list: that of all runs, or each run's own; an empty list where none is kept."""
        kept = {name: words for name, run in self.runs.items() if (words := run.work.get("optimizer"))}
        trained = {name: optimizer_in_short(words) for name, words in kept.items()}
        if len(set(trained.values())) > 1:
            return [f"Trained by: {'; '.join(f'{name} by {words}' for name, words in trained.items())}."]
        return [f"Trained by {words}." for words in set(trained.values())]

    def _goal_words(self, found: Outcome) -> str:
        """Say what the goal is, how often it was looked at, and which runs have not reached it."""
        steps = sorted(
            {later - before for run in self.runs.values() for (before, _), (later, _) in pairwise(run.goals)}
        )
        every = f" every {steps[0]}" + (f" to {steps[-1]}" * (len(steps) > 1)) + " steps" if steps else " once"
        form = ".4f" if self.settings["until"]["task"] is None else ".1%"
        missing = [row.name for row in found.rows if row.to_target is None]
        last = {name: f" ({run.goals[-1][1]:{form}} at last)" for name, run in self.runs.items() if run.goals}
        left = f" Not reached by {', '.join(name + last.get(name, '') for name in missing)}." * bool(missing)
        return f"The goal is {self.settings['until']['words']}, looked at{every}, in no run's time; times are each run's own.{left}"

    @staticmethod
    def _loss_words(found: Outcome) -> str:
        hours = [f"{row.name} {row.loss_hour:.4f}" for row in found.rows if row.loss_hour is not None]
        if hours:
            return f"Loss after an hour of own time: {', '.join(hours)}."
        losses = ", ".join(f"{row.name} {row.loss_at:.4f}" for row in found.rows)
        return f"Loss after {elapsed(found.at_s)} of own time: {losses} (nothing is extrapolated to an hour)."

    def _how_far(self) -> list[str]:
        """Return a sentence that says how far the race is, in a list; an empty list where it does not go on."""
        return []

    @property
    def _ended_early(self) -> bool:
        return self.reason not in ("", "done")

    def _no_result(self, error: ValueError) -> str:
        if self.running:
            return f"{' '.join(self._how_far())} A result takes a turn of every run."
        if not self._ended_early:
            return str(error)
        without = [name for name, run in self.runs.items() if not run.turns]
        missing = f"{', '.join(without)} had none" if len(without) < len(self.runs) else "none had one"
        return f"The race has no result before every run has had a turn: {missing}. {self._way_on()}"

    def _way_on(self) -> str:
        """Return a sentence that says what can be done after an early end."""
        ended = f"The race ended {self._when_it_ended} ({self.reason})"
        if self.command is None:
            return f"{ended}: race.rerun() races again from the start."
        return f"{ended}. " + (
            "Without --run-dir nothing of it was kept, and the same command races again from the start."
            if self.run_dir is None
            else f"A new process cannot go on: python {self.run_dir / 'rerun.py'} races again from the start."
        )

    @property
    def _when_it_ended(self) -> str:
        return "early"

    def _shown(self) -> tuple[list[tuple[str, ...]], tuple[str, ...], list[str]]:
        """Return the table's rows, its header and the sentences under it; the steps so far while there is no result yet."""
        try:
            found = self.outcome
        except ValueError as error:
            losses = {name: run.steps["loss"] for name, run in self.runs.items()}
            rows: list[tuple[str, ...]] = [
                (name, str(len(loss)), f"{loss[-1]:.4f}" if len(loss) else "") for name, loss in losses.items()
            ]
            return rows, ("run", "steps", "last loss"), [self._no_result(error)]
        return [cells_of(row, found) for row in found.rows], header_of(found), self.words()

    def plot(self, x: Axis = "time") -> Figure:
        """Draw loss against "steps", "tokens", "time" (a run's own) or "usd", and each turn's ratio to the baseline beside it.

        Before every run has had a turn it draws what is known, and says what is missing.
        """
        from surokit.racing.picture import plot

        return plot(self, x)

    def __repr__(self) -> str:
        return self.text()

    def text(self) -> str:
        """Return the table and the sentences beside it."""
        rows, header, words = self._shown()
        return "\n".join([text_table(rows, header=header, right=range(1, len(header)), indent=""), "", *words])

    def _repr_html_(self) -> str:
        rows, header, words = self._shown()
        table = html_table(rows, header=header, right=range(1, len(header)))
        return f"<div>{table}<small>{'<br>'.join(map(escape, words))}</small></div>"

    # -- a folder

    def save(self, path: str | Path | None = None) -> Path:
        """Write the race as a folder: race.json, each run's records.jsonl, rerun.py. None: its run_dir."""
        where = Path(path) if path is not None else self.run_dir
        if where is None:
            raise ValueError("There is nowhere to save to: race.save(folder), or race(run_dir=...).")
        return folder.write(self, where)


def check_time(minutes: float | None, steps: int | None) -> None:
    if minutes is None and steps is None:
        raise ValueError("A race needs an end: minutes= or steps=.")
    if minutes is not None and not 0 <= minutes < math.inf:
        raise ValueError(f"minutes={minutes!r}: a finite number >= 0.")
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise ValueError(f"steps={steps!r}: a whole number of at least 1.")
