"""`race`: from what a user gives to a race that has been run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from surokit.racing import equal, folder
from surokit.racing.driving import Driver
from surokit.racing.entries import Builder, Source, grid
from surokit.racing.result import Race, check_time
from surokit.racing.runs import Run
from surokit.train import AdamW, Cosine, Session
from surokit.train.optim import Spec
from surokit.train.schedule import Schedule, schedule_to_dict
from surokit.train.setup import claim_folder
from surokit.train.stream import Batch

FEWEST = 3  # steps: of warm-up, untimed, timed
MORE = 40
_ADAMW = Spec(AdamW, {"lr": 3e-4})
_NOT_HERE = (
    "save_every",
    "eval_every",
    "keep",
    "exist",
    "recipe",
)  # settings of a Session that a race has its own way with


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
    target_loss: float | None = None,
    usd_per_gpu_hour: float | None = None,
    run_dir: str | Path | None = None,
    live: bool = True,
    allow: Iterable[str] = (),
    together: bool | None = None,
    predict: bool = True,
    like: Race | None = None,
    thread: bool = False,
    **session_settings: Any,
) -> Race:
    """Race recipes, or any sessions, on one device: in turns, with equal work enforced.

    entries: {name: Recipe, name of a recipe, or Session}, or a list of recipes; the first is the baseline.
    model, data: for recipes. A module is copied for each, a folder loaded, a function called.
    optimizer: a specification such as surokit.AdamW(lr=3e-4), or a function from parameters to an optimizer.
    minutes: of the race's wall clock after the warm-up. steps: of each run, warm-up included. Whichever ends first.
    schedule: "auto" is a cosine over `steps`, without them a constant rate after 20 steps of warm-up.
    control: the baseline races against itself too, which says how far the intervals can be trusted.
    turn_s: seconds of the slowest run's turn; without it, short enough for twelve rounds or more, at most 10 s.
    target_loss: for time to it; without one it is the lowest smoothed loss that every run reaches.
    usd_per_gpu_hour: the price of an hour of a run's own time; without one nothing is told in dollars.
    run_dir: a folder for everything, which another person can run again; `race.save` writes one later.
    live: show a panel of all runs meanwhile.
    allow: differences that are wanted, by the name that a refusal gives them; the table names them.
    together: whether all models stay on the device; None: if they fit, else each is parked on the host between its turns.
    predict: also say what gain the recipe was expected to have, which takes a profile of the baseline and a few seconds.
    thread: True lets it go on in a thread and returns the Race at once: `await race`, or call its wait(). Meanwhile other cells,
        `race.stop()`, `race.pause()` and a panel's buttons work, and printing the race says how far it is.
    like: a race whose weights and data these have to be; `Race.rerun` gives it.
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
    _check_numbers(turn_s, target_loss, usd_per_gpu_hour)
    if schedule == "auto":
        schedule = Cosine(20, 500, floor=1.0) if steps is None else Cosine(min(20, max(1, steps // 10)), max(2, steps))
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
    allowed = equal.check_allowed(allow)
    builder = Builder(who, model, data, settings, together, None)
    builder.check()
    where, _ = claim_folder(run_dir, "new")
    built = Race(
        {name: Run(name) for name in who.names},
        who.baseline,
        who.twin,
        {
            "minutes": minutes,
            "steps": steps,
            "turn_s": turn_s,
            "target_loss": target_loss,
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
    driver = Driver(built, replace(builder, run_dir=where), allowed, live, like)
    built.driven_by(driver)

    def work() -> None:
        driver.warm_up(steps)
        driver.go_on(minutes, None if steps is None else driver.left)

    built.go(work, thread)
    return built


def _check_numbers(turn_s: float | None, target_loss: float | None, usd_per_gpu_hour: float | None) -> None:
    if turn_s is not None and not 0 < turn_s < math.inf:
        raise ValueError(f"race(turn_s={turn_s!r}): a number of seconds above 0.")
    if target_loss is not None and not math.isfinite(target_loss):
        raise ValueError(f"race(target_loss={target_loss!r}): a finite loss.")
    if usd_per_gpu_hour is not None and not 0 <= usd_per_gpu_hour < math.inf:
        raise ValueError(f"race(usd_per_gpu_hour={usd_per_gpu_hour!r}): a price is a finite number >= 0.")
