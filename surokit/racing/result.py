"""`Race`: what happened so far, what follows from it, and the way to go on."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from surokit.racing import folder
from surokit.racing.entries import Source
from surokit.racing.outcome import COLUMNS, HEADER, RIGHT, Outcome, cells_of, counted, outcome, record_of, span_words
from surokit.racing.runs import Run
from surokit.racing.statistics import TOO_FEW
from surokit.tables import data_frame, html_table, text_table
from surokit.train import Session
from surokit.train.stream import Batch

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from surokit.racing.driving import Driver
    from surokit.train.running import Running

Axis = Literal["steps", "tokens", "time", "usd"]
_SO_FAR = ("run", "steps", "last loss")


class Race:
    """What happened so far, and the sessions that go on, where it was not loaded from a folder.

    runs: every run's turns, steps and losses by name. sessions: by name, ready to be used between calls; `bring(name)` first where
    models are parked. reason: why it ended last, "" while it goes on. `await race`, or race.wait(): until one that goes on in a
    thread is over.
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
        self.command: list[str] | None = None  # of the command line that began it
        self.notes = list(notes)
        self._environment = environment
        self._driver: Driver | None = None
        self._running: Running | None = None  # where it goes on in a thread, or did

    # -- going on

    def driven_by(self, driver: Driver) -> None:
        """From now on the race can go on."""
        self._driver = driver

    def go_on(self, minutes: float | None = None, steps: int | None = None, *, thread: bool = False) -> Race:
        """Rounds for so many more minutes, or until every run has made so many more steps, whichever ends first; with neither, to
        the number of steps that the race was given. A turn that a stop cut short is finished first. Returns the race.

        thread: as in `race`. RuntimeError where the race goes on already, and where it ended in its warm-up.
        """
        driver = self._drive()
        if not self.running and any(run.warm_up is None for run in self.runs.values()):
            raise RuntimeError(self._way_on())
        to_the_end = minutes is None and steps is None and self.settings["steps"] is not None
        if not to_the_end:
            check_time(minutes, steps)
        self.go(lambda: driver.go_on(minutes, driver.left if to_the_end else steps), thread)
        return self

    def go(self, work: Callable[[], None], thread: bool) -> None:
        """What `race` and `go_on` do, in this thread or in one of its own."""
        driver = self._drive()
        if thread:
            self._running = driver.start(work)
        else:
            driver.drive(work)
            self._running = None

    @property
    def running(self) -> bool:
        """Whether the race goes on now."""
        return self._driver is not None and self._driver.state != "idle"

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end of a race that goes on in a thread, at most `timeout` seconds; whether it has ended.

        Raises what ended it. An interrupt of the waiting asks the race to stop and waits on; a second one gives up waiting.
        """
        return self._running is None or self._running.wait(timeout)

    def __await__(self) -> Generator[Any, None, Race]:
        """The race, when it is over; the same as `wait` where other work of the event loop shall go on."""
        if self._running is not None:
            yield from self._running.__await__()
        return self

    def stop(self) -> None:
        """Ends the race from another thread, at the end of a step; `go_on` goes on. Nothing where it does not go on."""
        self._drive().stop()

    def pause(self) -> None:
        """The race waits before the next turn; the wait is nobody's time."""
        self._drive().pause()

    def resume(self) -> None:
        self._drive().resume()

    @property
    def runs(self) -> dict[str, Run]:
        """By name; while another thread makes the race go on, copies as they are now."""
        if self._driver is None or not self._driver.elsewhere:
            return self._runs
        return {name: run.copy() for name, run in self._runs.items()}

    @property
    def sessions(self) -> dict[str, Session]:
        return dict(self._free().sessions)

    def bring(self, name: str) -> Session:
        """The session of that name, on its device: for evaluating, saving or going on with it, between two calls."""
        driver = self._free()
        driver.parking.bring(name)
        return driver.sessions[name]

    def _free(self) -> Driver:
        """The driver, where its sessions are nobody's at the moment: what they do within a turn would count as its time."""
        driver = self._drive()
        if driver.elsewhere:
            raise RuntimeError(
                "The race goes on, and its sessions take turns: call race.wait() first, or race.stop(). race.runs has their steps."
            )
        return driver

    def _drive(self) -> Driver:
        if self._driver is None:
            raise RuntimeError(
                "This race was loaded from a folder and has no models: rerun(model=..., data=...) races again with its settings."
            )
        return self._driver

    # -- what came of it

    @property
    def environment(self) -> dict[str, Any]:
        if self._environment is None:
            from surokit.environment import environment

            self._environment = environment()
        return self._environment

    @property
    def outcome(self) -> Outcome:
        """All figures as values. ValueError before every run has had a turn."""
        runs = self.runs
        if not runs or any(not run.turns for run in runs.values()):
            raise ValueError(
                "The race has no result before every run has had a turn: let it go on with race.go_on(minutes=1)."
            )
        return self.figures(runs)

    def figures(self, runs: Mapping[str, Run]) -> Outcome:
        """The figures of these runs of the race, also before every one has had a turn: nan or None where nothing is known."""
        settings = self.settings
        return outcome(
            runs,
            self.baseline,
            self.twin,
            settings["target_loss"],
            settings["usd_per_gpu_hour"],
            settings["seed"],
        )

    def table(self) -> pd.DataFrame:
        """A row a run, the baseline first; the columns are described in surokit/racing/outcome.py."""
        found = self.outcome
        return data_frame([{"run": row.name, **record_of(row)} for row in found.rows], ["run", *COLUMNS]).set_index(
            "run"
        )

    def words(self) -> list[str]:
        """What has to be said beside the table, a sentence each: how it was raced, what may be trusted, what differs."""
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
                f"{counted(found.rounds, 'round')} of turns, each {size} after an untimed one, {span_words(found.timed_s)} timed "
                f"in all on {self.environment['device']}, after a warm-up of {counted(first.warm_up.steps, 'step')} each."
            )
        if found.timed_s < 60 * len(found.rows):
            said.append("Less than a minute each: whether a speed is sustained takes minutes to see.")
        if found.rounds:
            said.append(found.control_words())
        given = "given" if found.target_given else "the lowest that all have reached"
        if not math.isnan(found.target):
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

    @staticmethod
    def _loss_words(found: Outcome) -> str:
        hours = [f"{row.name} {row.loss_hour:.4f}" for row in found.rows if row.loss_hour is not None]
        if hours:
            return f"Loss after an hour of own time: {', '.join(hours)}."
        losses = ", ".join(f"{row.name} {row.loss_at:.4f}" for row in found.rows)
        return f"Loss after {span_words(found.at_s)} of own time: {losses} (nothing is extrapolated to an hour)."

    def _how_far(self) -> list[str]:
        return [self._driver.words()] if self._driver is not None and self.running else []

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
        """What can be done after an early end."""
        when = "early"
        if self._driver is not None and self._driver.all_made:
            when = "after its last step, but before its held-out losses and predictions were all taken"
        ended = f"The race ended {when} ({self.reason})"
        if self.command is not None:
            return f"{ended}. " + (
                "Without --run-dir nothing of it was kept, and the same command races again from the start."
                if self.run_dir is None
                else f"A new process cannot go on: python {self.run_dir / 'rerun.py'} races again from the start."
            )
        if self._driver is not None and any(run.warm_up is None for run in self.runs.values()):
            return f"The race ended in its warm-up ({self.reason}): race again."
        if self._driver is not None:
            return f"{ended}: race.go_on() goes on from there."
        return f"{ended}: race.rerun() races again from the start."

    def _so_far(self) -> list[tuple[str, ...]]:
        """What there is without a result, under _SO_FAR."""
        losses = {name: run.steps["loss"] for name, run in self.runs.items()}
        return [(name, str(len(loss)), f"{loss[-1]:.4f}" if len(loss) else "") for name, loss in losses.items()]

    def plot(self, x: Axis = "time") -> Figure:
        """Draws loss against "steps", "tokens", "time" (a run's own) or "usd", and each turn's ratio to the baseline beside it.

        Before every run has had a turn it draws what is known, and says what is missing.
        """
        from surokit.racing.picture import plot

        return plot(self, x)

    def __repr__(self) -> str:
        return self.text()

    def text(self) -> str:
        """The table and what has to be said beside it."""
        try:
            found = self.outcome
        except ValueError as error:
            return "\n".join(
                [text_table(self._so_far(), header=_SO_FAR, right=(1, 2), indent=""), "", self._no_result(error)]
            )
        rows = [cells_of(row, found) for row in found.rows]
        return "\n".join([text_table(rows, header=HEADER, right=RIGHT, indent=""), "", *self.words()])

    def _repr_html_(self) -> str:
        try:
            found = self.outcome
        except ValueError as error:
            table = html_table(self._so_far(), header=_SO_FAR, right=(1, 2))
            return f"<div>{table}<small>{escape(self._no_result(error))}</small></div>"
        rows = [cells_of(row, found) for row in found.rows]
        words = "".join(f"<br>{escape(line)}" for line in self.words())
        return f"<div>{html_table(rows, header=HEADER, right=RIGHT)}<small>{words[4:]}</small></div>"

    # -- a folder

    def save(self, path: str | Path | None = None) -> Path:
        """Writes the race as a folder: race.json, each run's records.jsonl, rerun.py. None: its run_dir."""
        where = Path(path) if path is not None else self.run_dir
        if where is None:
            raise ValueError("There is nowhere to save to: race.save(folder), or race(run_dir=...).")
        return folder.write(self, where)

    @classmethod
    def load(cls, path: str | Path) -> Race:
        """A race that was saved: the same table and plots. FileNotFoundError or ValueError for what is none."""
        return folder.read(cls, Path(path))

    def rerun(self, *, model: Source, data: Iterable[Batch], **changes: Any) -> Race:
        """The same race again: same recipes, settings, seed, and as many steps.

        changes: arguments of `race` that shall differ, and those a folder cannot hold. UnequalWork where the weights, or the data
        by its fingerprint, are others than in this race, unless `allow` has "weights" or "data"; batches that turn out to be others
        are told under the table.
        """
        return folder.rerun(self, model=model, data=data, **changes)


def check_time(minutes: float | None, steps: int | None) -> None:
    if minutes is None and steps is None:
        raise ValueError("A race needs an end: minutes= or steps=.")
    if minutes is not None and not 0 <= minutes < math.inf:
        raise ValueError(f"minutes={minutes!r}: a finite number >= 0.")
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise ValueError(f"steps={steps!r}: a whole number of at least 1.")
