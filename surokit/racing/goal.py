"""A Goal is what every run of a race trains to, judged between turns: a held-out loss, or an accuracy on a task."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surokit import tasks
from surokit.tasks import Task
from surokit.train import Session


@dataclass(frozen=True)
class Goal:
    """A Goal is reached by a run whose loss on its `eval` is at most `at`, or that gets at least this share of a task right.

    task: what is graded; None takes the held-out loss. problems: of the task; None takes its usual number.

    ValueError for a loss that is not finite, and an accuracy that is no share; TypeError for what is no task.
    """

    at: float
    task: Task | None = None
    problems: int | None = None

    def __post_init__(self) -> None:
        if self.task is None:
            if isinstance(self.at, bool) or not isinstance(self.at, int | float) or not math.isfinite(self.at):
                raise ValueError(
                    f"race(until={self.at!r}): a held-out loss is a finite number, for example until=3.2; a share of a task is "
                    "surokit.Goal(0.9, task)."
                )
        elif not isinstance(self.task, Task):
            raise TypeError(f"Goal(task={self.task!r}): a task such as surokit.Addition(digits=2).")
        elif not 0 < self.at <= 1:
            raise ValueError(
                f"Goal({self.at}, {self.task}): an accuracy is a share above 0 and at most 1, for example 0.9."
            )
        else:
            self.task.held_out(self.problems)  # refused here where there are not as many

    def measure(self, session: Session) -> float:
        """Return the session's held-out loss, or its model's accuracy on the task; waits for the device."""
        return session.evaluate() if self.task is None else self.task.grade(session.model, self.problems).accuracy

    def reached(self, value: float) -> bool:
        return value <= self.at if self.task is None else value >= self.at

    def __str__(self) -> str:
        if self.task is None:
            return f"a held-out loss of {self.at:g} or less"
        return f"{self.at:.1%} or more of {self.task} right"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; a task that is made of more than plain values is told by its repr."""
        task = None if self.task is None else _made(self.task)
        return {"at": self.at, "task": task, "problems": self.problems, "words": str(self)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Goal:
        """Return the goal that `to_dict` wrote; ValueError where its task was not made of plain values."""
        task = data["task"]
        if task is not None and "custom" in task:
            raise ValueError(f"The race was to {task['custom']}, which a folder does not hold: rerun(until=...).")
        again = None if task is None else getattr(tasks, task["name"])(**task["settings"])
        return Goal(data["at"], again, data["problems"])


def _made(task: Task) -> dict[str, Any]:
    """Return how a task is made, as plain data."""
    settings, name = dict(vars(task)), type(task).__name__
    plain = all(isinstance(value, bool | int | float | str) for value in settings.values())
    known = getattr(tasks, name, None) is type(task)
    return {"name": name, "settings": settings} if plain and known else {"custom": repr(task)}


def read_goal(until: Goal | float | None) -> Goal | None:
    """Return what `race(until=...)` was given as a Goal: a number is a held-out loss."""
    return until if until is None or isinstance(until, Goal) else Goal(until)
