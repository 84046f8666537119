"""Fit a training to a time: measure a step of every session, then choose the model's size and the number of steps.

    fit = sk.fit_to_time(sizes, new_sessions, seconds=30)     # sizes: by name, the smallest first
    sessions = new_sessions(fit.size, fit.steps)              # the real ones, from the start

One machine takes a hundred times as long for a step as another, and a product that is native here is emulated there. So nothing
is assumed of the machine: short trials of the very sessions say what it does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

Size = TypeVar("Size")

_WARM_UP = 1  # steps of a trial that are not counted: the first compiles, allocates and reads the data
_COUNTED = 2  # steps that are timed together
_FEWEST_TIMES, _TIMES = 3, 7  # the median of them counts, since other programs come and go
_SHARE = 0.02  # of the given time: a session that has taken so long is timed no further than the fewest times


class Trained(Protocol):
    """A Trained has what a trial needs of a session."""

    def run(self, steps: int, /) -> Any: ...


@dataclass(frozen=True, repr=False)
class Fit(Generic[Size]):
    """A Fit holds the size and the number of steps that were chosen, and what they follow from. Prints as sentences.

    name, size: the chosen entry of `sizes`. steps: of every session. step_s: seconds of one step of all sessions together.
    left_s: seconds that were left for the training after the trials. tried: step_s of each size that was tried, None where its
    memory did not suffice. larger: the size that would come next, with the reason why it was not taken; "" after the last.
    """

    name: str
    size: Size
    steps: int
    step_s: float
    left_s: float
    tried: Mapping[str, float | None]
    larger: str = ""

    @property
    def expected_s(self) -> float:
        """Return how many seconds the training of all sessions takes at the measured pace."""
        return self.steps * self.step_s

    def __repr__(self) -> str:
        lines = [
            f"{self.name}, {self.steps} steps: {_seconds(self.step_s)} for a step of all sessions, so about "
            f"{_seconds(self.expected_s)} in all."
        ]
        if self.expected_s > self.left_s:
            lines[0] += f" Only {_seconds(self.left_s)} are left, but no fewer steps were asked for."
        tried = [
            f"{name} {'has no room' if step_s is None else _seconds(step_s)}" for name, step_s in self.tried.items()
        ]
        lines.append(f"Measured, a step: {', '.join(tried)}. {self.larger}".rstrip())
        return "\n".join(lines)


def fit_to_time(
    sizes: Mapping[str, Size],
    new_sessions: Callable[[Size, int], Iterable[Trained]],
    *,
    seconds: float,
    steps: tuple[int, int] = (40, 120),
    clock: Callable[[], float] = time.perf_counter,
) -> Fit[Size]:
    """Choose the largest size whose sessions train `steps[0]` steps within `seconds`, and as many steps as fit, up to `steps[1]`.

    sizes         by name, the smallest first; each a few times the work of the one before
    new_sessions  (a size, a number of steps) -> the sessions to train one after another; those of a trial are thrown away
    seconds       for the trials and the training together; what comes besides, as evaluations, is not counted
    steps         (fewest, most) of every session. A larger size is taken only where it gets the fewest in time; the smallest gets
                  them however long they take
    clock         seconds, monotonic

    A trial runs seven steps of each session, or some more where they are quick. The next larger size is tried only where the one
    before would get all its steps, so that the trials take a small part of the time. A size whose trial is out of memory is too
    large. Raises ValueError without sizes, for a time that is none, and for steps out of order.
    """
    fewest, most = steps
    if not sizes:
        raise ValueError("There is no size to choose from: give sizes={'small': ..., 'large': ...}.")
    if not seconds > 0:
        raise ValueError(f"seconds={seconds!r} must be above zero: it is the time for the trials and the training.")
    if not 1 <= fewest <= most:
        raise ValueError(f"steps={steps!r} must be (fewest, most), with 1 <= fewest <= most.")
    end = clock() + seconds
    chosen, chosen_s = "", float("inf")
    tried: dict[str, float | None] = {}
    larger = ""
    for name, size in sizes.items():
        if chosen and most * chosen_s > end - clock():
            larger = f"The next larger one, {name}, would take too long."
            break
        tried[name] = step_s = _trial(new_sessions, size, most, clock, _SHARE * seconds)
        if chosen and (step_s is None or fewest * step_s > end - clock()):
            larger = (
                f"Of {name}, fewer than {fewest} steps would end in time."
                if step_s
                else f"{name} has no room in memory."
            )
            break
        if step_s is None:
            raise MemoryError(f"Even {name}, the smallest of the sizes, has no room in memory: give a smaller one.")
        chosen, chosen_s = name, step_s
    left_s = max(0.0, end - clock())
    count = max(fewest, min(most, int(left_s / chosen_s)))
    return Fit(chosen, sizes[chosen], count, chosen_s, left_s, tried, larger)


def _trial(
    new_sessions: Callable[[Size, int], Iterable[Trained]],
    size: Size,
    steps: int,
    clock: Callable[[], float],
    patience_s: float,
) -> float | None:
    """Return the seconds of one step of all sessions of a size; None where memory does not suffice."""
    total = 0.0
    try:
        for session in new_sessions(size, steps):
            session.run(_WARM_UP)
            times: list[float] = []
            while len(times) < _FEWEST_TIMES or (len(times) < _TIMES and sum(times) < patience_s):
                began = clock()
                session.run(_COUNTED)
                times.append(clock() - began)
            total += statistics.median(times) / _COUNTED
    except (torch.OutOfMemoryError, MemoryError):
        return None
    except RuntimeError as error:  # a CPU's error for memory that runs out
        if "allocate memory" not in str(error):
            raise
        return None
    return total


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:,.0f} s"
