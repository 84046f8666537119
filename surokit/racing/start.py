"""`race` makes a race of what a user gives and runs it; `Race` holds the result, and goes on."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from surokit.optim.schedule import Schedule, schedule_to_dict
from surokit.optim.spec import Spec
from surokit.racing import comparability, folder
from surokit.racing.entries import Builder, Grid, Source, grid
from surokit.racing.goal import Goal, read_goal
from surokit.racing.result import RaceResult, check_time
from surokit.racing.runs import Run
from surokit.racing.scheduler import Driver
from surokit.recipe import Recipe
from surokit.train import AdamW, Cosine, Session
from surokit.train.background import Running
from surokit.train.setup import claim_folder
from surokit.train.stream import Batch

FEWEST = 3  # steps: of warm-up, untimed, timed
MORE = 40
_ADAMW = Spec(AdamW, {"lr": 3e-4})
_CONSTANT = Cosine(20, 500, floor=1.0)
_NOT_HERE = (
    "save_every",
    "eval_every",
    "keep",
    "exist",
    "recipe",
)  # settings of a Session that a race has its own way with


class Race(RaceResult):
    """A Race holds what happened so far, and the sessions that go on, where it was not loaded from a folder.

    runs: every run's turns, steps and losses by name. sessions: by name, ready to be used between calls; `bring(name)` first where
    models are parked. reason: why it ended last, "" while it goes on. `await race`, or race.wait(): until one that goes on in a
    thread is over.
    """

    _driver: Driver | None = None
    _running: Running | None = None  # where it goes on in a thread, or did

    # -- going on

    def driven_by(self, driver: Driver) -> None:
        """Give the race its driver, with which it can go on."""
        self._driver = driver

    def go_on(self, minutes: float | None = None, steps: int | None = None, *, thread: bool = False) -> Race:
        """Run rounds for so many more minutes, or until every run has made so many more steps, whichever ends first; with
        neither, to the number of steps that the race was given. A turn that a stop cut short is finished first. Returns the race.

        thread: as in `race`. RuntimeError where the race goes on already, where it ended in its warm-up, and where every run has
        reached its goal.
        """
        driver = self._drive()
        if not self.running and any(run.warm_up is None for run in self.runs.values()):
            raise RuntimeError(self._way_on())
        if not self.running and all(run.reached is not None for run in self.runs.values()):
            goal = self.settings["until"]["words"]
            raise RuntimeError(f"Every run has reached the race's goal, {goal}: race again with another until=.")
        to_the_end = minutes is None and steps is None and self.settings["steps"] is not None
        if not to_the_end:
            check_time(minutes, steps)
        self.go(lambda: driver.go_on(minutes, driver.left if to_the_end else steps), thread)
        return self

    def go(self, work: Callable[[], None], thread: bool) -> None:
        """Do the work of `race` or `go_on`, in this thread or in one of its own."""
        driver = self._drive()
        if thread:
            self._running = driver.start(work)
        else:
            driver.drive(work)
            self._running = None

    @property
    def running(self) -> bool:
        """Return whether the race goes on now."""
        return self._driver is not None and not self._driver.control.is_idle

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end of a race that goes on in a thread, at most `timeout` seconds; return whether it has ended.

        Raises what ended it. An interrupt of the waiting asks the race to stop and waits on; a second one gives up waiting.
        """
        return self._running is None or self._running.wait(timeout)

    def __await__(self) -> Generator[Any, None, Race]:
        """Return the race when it is over, as `wait` does, but let other work of the event loop go on."""
        if self._running is not None:
            yield from self._running.__await__()
        return self

    def stop(self) -> None:
        """End the race from another thread, at the end of a step; `go_on` goes on. Does nothing where the race does not run."""
        self._drive().control.stop()

    def pause(self) -> None:
        """Let the race wait before the next turn; the wait counts as no run's time, and as no part of `minutes`."""
        self._drive().control.pause()

    def resume(self) -> None:
        self._drive().control.resume()

    @property
    def runs(self) -> Mapping[str, Run]:
        """Return every run by its name; while another thread makes the race go on, copies as they are now."""
        if self._driver is None or not self._driver.control.elsewhere:
            return self._runs
        return {name: run.copy() for name, run in self._runs.items()}

    @property
    def sessions(self) -> dict[str, Session]:
        return dict(self._free().sessions)

    def bring(self, name: str) -> Session:
        """Return the session of that name, on its device: for evaluating, saving or going on with it, between two calls."""
        driver = self._free()
        driver.parking.bring(name)
        return driver.sessions[name]

    def _free(self) -> Driver:
        """Return the driver; RuntimeError while another thread drives: what sessions did within a turn would count as its time."""
        driver = self._drive()
        if driver.control.elsewhere:
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

    def _how_far(self) -> list[str]:
        return [self._driver.words()] if self._driver is not None and self.running else []

    def _way_on(self) -> str:
        if self._driver is None or self.command is not None:
            return super()._way_on()
        if any(run.warm_up is None for run in self.runs.values()):
            return f"The race ended in its warm-up ({self.reason}): race again."
        return f"The race ended {self._when_it_ended} ({self.reason}): {self._driver.goes_on} goes on from there."

    @property
    def _when_it_ended(self) -> str:
        if self._driver is not None and self._driver.all_made:
            return "after its last step, but before its held-out losses and predictions were all taken"
        return super()._when_it_ended

    # -- a folder

    @classmethod
    def load(cls, path: str | Path) -> Race:
        """Load a race that was saved: the same table and plots. FileNotFoundError or ValueError for what is none."""
        return folder.read(cls, Path(path))

    def rerun(self, *, model: Source, data: Iterable[Batch], **changes: Any) -> Race:
        """Run the same race again: same recipes, settings, seed, and as many steps, or as long as `minutes` says.

        changes: arguments of `race` that shall differ, and those a folder cannot hold. UnequalWork where the weights, or the data
        by its fingerprint, are others than in this race, unless `allow` has "weights" or "data"; batches that turn out to be others
        are told under the table.
        """
        return race(model=model, data=data, **{"like": self, **folder.arguments_of(self, changes)})


def race(
    entries: Any,
    *,
    model: Source | None = None,
    data: Iterable[Batch] | None = None,
    minutes: float | None = None,
    steps: int | None = None,
    optimizer: Spec | torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] = _ADAMW,
    schedule: Schedule | Literal["auto"] | None = "auto",
    accumulate: int = 1,
    eval: Iterable[Batch] | None = None,
    seed: int = 0,
    control: bool = True,
    turn_s: float | None = None,
    turn_steps: int | None = None,
    target_loss: float | None = None,
    until: Goal | float | None = None,
    usd_per_gpu_hour: float | None = None,
    run_dir: str | Path | None = None,
    live: bool = True,
    allow: Iterable[str] = (),
    together: bool | None = None,
    predict: bool = True,
    like: Race | None = None,
    command: Sequence[str] | None = None,
    thread: bool = False,
    **session_settings: Any,
) -> Race:
    """Race recipes, or any sessions, on one device: in turns, with equal work enforced.

    entries: {name: Recipe, name of a recipe, or Session}, or a list of recipes; the first is the baseline.
    model, data: for recipes, as all settings of a session are: a Session has its own. A module is copied for each, a folder loaded,
        a function called.
    optimizer: a specification such as surokit.AdamW(lr=3e-4), or a function from parameters to an optimizer.
    minutes: of the race's wall clock after the warm-up. steps: of each run, warm-up included. Whichever ends first.
    schedule: "auto" is a cosine over `steps`, without them a constant rate after 20 steps of warm-up.
    control: the baseline races against itself too, which says how far the intervals can be trusted.
    turn_s: seconds of the slowest run's turn; without it, short enough for twelve rounds or more, at most 10 s. turn_steps: in its
        place the steps of a turn, the first of which is not timed: the same on every machine. A race with a goal keeps those that
        it began with, and is run again with them, so that it is judged after the same steps.
    target_loss: for time to it; without one it is the lowest smoothed loss that every run reaches.
    until: what every run trains to, judged between turns: a held-out loss (`eval` is needed), or surokit.Goal(0.9, task). A run
        that has reached it takes no more turns; minutes or steps end the others. Progress is then told at equal capability.
    usd_per_gpu_hour: the price of an hour of a run's own time; without one nothing is told in dollars.
    run_dir: a folder for everything, which another person can run again; `race.save` writes one later.
    live: show a panel of all runs meanwhile.
    allow: differences that are wanted, by the name that a refusal gives them; the table names them.
    together: whether all models stay on the device; None: if they fit, else each is parked on the host between its turns.
    predict: also say what gain the recipe was expected to have, which takes a profile of the baseline and a few seconds.
    thread: True lets it go on in a thread and returns the Race at once: `await race`, or call its wait(). Meanwhile other cells,
        `race.stop()`, `race.pause()` and a panel's buttons work, and printing the race says how far it is.
    like: a race whose weights and data these have to be; `Race.rerun` gives it.
    command: the words of the command line that this race comes from, which rerun.py gives again; `surokit race` says them.
    session_settings: further arguments of `surokit.Session` (clip, compile, graphs, meters ...).

    An interrupt (Ctrl-C, `race.stop()` from another thread, a file named "stop" in run_dir) ends it; `race.go_on()` goes on.
    Files named "pause" and "save" are heard too.

    Raises UnequalWork, a ValueError, where the entries do not do equal work; ValueError or TypeError for other arguments.
    An error of a run ends the race; the error carries it as its attribute `race`. In a thread it is raised where the race is
    awaited, an UnequalWork too.
    """
    check_time(minutes, steps)
    if steps is not None and steps < FEWEST:
        raise ValueError(
            f"race(steps={steps}) leaves nothing to compare: a step is for warming up, and a turn's first is not timed. "
            f"Give {FEWEST} or more, and {MORE} for an interval and a prediction."
        )
    _check_numbers(turn_s, turn_steps, target_loss, usd_per_gpu_hour)
    if isinstance(command, str):
        raise TypeError(f"race(command={command!r}) is one text: give a list of its words, as shlex.split makes it.")
    goal = read_goal(until)
    if goal is not None and target_loss is not None:
        raise ValueError("race(until=...) is the target of the race: leave out target_loss=.")
    for_recipes = {
        "model": model is not None,
        "data": data is not None,
        "optimizer": optimizer is not _ADAMW,
        "schedule": schedule != "auto",
        "accumulate": accumulate != 1,
        "eval": eval is not None,
        **dict.fromkeys(session_settings, True),
    }
    if schedule == "auto":
        schedule = _CONSTANT if steps is None else Cosine(min(20, max(1, steps // 10)), max(2, steps))
    settings = {
        "optimizer": optimizer,
        "schedule": schedule,
        "accumulate": accumulate,
        "eval": eval,
        "seed": seed,
        **session_settings,
    }
    if theirs := [name for name in _NOT_HERE if name in session_settings]:
        raise ValueError(
            f"race({theirs[0]}=...) is none of its settings: the race itself evaluates and saves, between turns."
        )
    who = grid(entries, control)
    if all(isinstance(entry, Session) for entry in who.entries.values()) and any(for_recipes.values()):
        given = ", ".join(f"{name}=..." for name, is_given in for_recipes.items() if is_given)
        raise ValueError(f"race({given}) is for recipes: every entry is a Session, which has its own.")
    if goal is not None and goal.task is None:
        _check_evaluates(goal, who, eval)
    if steps is None and schedule == _CONSTANT:
        _check_changes(who)
    allowed = comparability.check_allowed(allow)
    builder = Builder(who, model, data, settings, together, None)
    builder.check()
    where = claim_folder(run_dir, "new").folder
    built = Race(
        {name: Run(name) for name in who.names},
        who.baseline,
        who.twin,
        {
            "minutes": minutes,
            "steps": steps,
            "turn_s": turn_s,
            "turn_steps": turn_steps,
            "target_loss": target_loss,
            "until": None if goal is None else goal.to_dict(),
            "usd_per_gpu_hour": usd_per_gpu_hour,
            "seed": seed,
            "accumulate": accumulate,
            "control": control,
            "allow": list(allowed),
            "predict": predict,
            "optimizer": folder.optimizer_to_dict(optimizer),
            "schedule": schedule_to_dict(schedule),
            "sessions": [name for name, entry in who.entries.items() if isinstance(entry, Session)],
            "session": {name: folder.plain(value) for name, value in session_settings.items()},
        },
        run_dir=where,
    )
    built.command = None if command is None else list(command)
    driver = Driver(built, replace(builder, run_dir=where), allowed, live, like, goal)
    built.driven_by(driver)

    def work() -> None:
        driver.warm_up(steps)
        driver.go_on(minutes, None if steps is None else driver.left)

    built.go(work, thread)
    return built


def _check_evaluates(goal: Goal, who: Grid, eval: Iterable[Batch] | None) -> None:
    """Raise ValueError where a goal is a held-out loss and a run has nothing that it could be taken on."""
    for name, entry in who.entries.items():
        if (entry.eval if isinstance(entry, Session) else eval) is None:
            whose = f"the Session {name!r} its " if isinstance(entry, Session) else ""
            raise ValueError(
                f"race(until={goal.at:g}) is a held-out loss: give {whose}eval=, the batches that it is taken on."
            )


def _check_changes(who: Grid) -> None:
    """Raise ValueError for a recipe that changes after a share of the steps, in a race whose steps nobody knows."""
    for name, entry in who.entries.items():
        if isinstance(entry, Recipe) and any(not isinstance(change.at, int) for change in entry.later):
            raise ValueError(
                f"race(): {name!r} changes after a share of the steps, which a race by minutes does not know: give "
                "steps=, or a number of steps, then(..., at=900)."
            )


def _check_numbers(
    turn_s: float | None, turn_steps: int | None, target_loss: float | None, usd_per_gpu_hour: float | None
) -> None:
    if turn_steps is not None and (isinstance(turn_steps, bool) or not isinstance(turn_steps, int) or turn_steps < 2):
        raise ValueError(
            f"race(turn_steps={turn_steps!r}): a whole number of at least 2, the first of which is not timed."
        )
    if turn_steps is not None and turn_s is not None:
        raise ValueError("race(turn_s=..., turn_steps=...): both say how long a turn is, give one of them.")
    if turn_s is not None and not 0 < turn_s < math.inf:
        raise ValueError(f"race(turn_s={turn_s!r}): a number of seconds above 0.")
    if target_loss is not None and not math.isfinite(target_loss):
        raise ValueError(f"race(target_loss={target_loss!r}): a finite loss.")
    if usd_per_gpu_hour is not None and not 0 <= usd_per_gpu_hour < math.inf:
        raise ValueError(f"race(usd_per_gpu_hour={usd_per_gpu_hour!r}): a price is a finite number >= 0.")
