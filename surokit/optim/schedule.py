"""Define learning-rate schedules: functions from a step to a factor of the base rate.

Any callable int -> float serves; a schedule that is a dataclass of this file is also written into checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from surokit.optim.spec import with_plain_numbers

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class Cosine:
    """Cosine is a linear warm-up over `warmup` steps to 1, then half a cosine down to `floor` at `steps`, constant afterwards.

    The first step is step 0 and has the factor 1 / warmup; step `warmup` has the factor 1.
    """

    warmup: int = 20
    steps: int = 500
    floor: float = 0.1

    def __post_init__(self) -> None:
        vars(self).update(with_plain_numbers(vars(self)))
        if self.warmup < 0 or self.steps <= self.warmup:
            raise ValueError(f"Cosine({self.warmup}, {self.steps}): steps must be larger than warmup >= 0.")
        if not 0 <= self.floor <= 1:
            raise ValueError(f"Cosine(floor={self.floor}): the floor is a share of the learning rate, between 0 and 1.")

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        progress = min(1.0, (step - self.warmup) / (self.steps - self.warmup))
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * progress))


_KNOWN = {"Cosine": Cosine}


def schedule_to_dict(schedule: Schedule | None) -> dict[str, Any] | None:
    """Return plain data for a checkpoint; a callable of the user's is named, not stored."""
    if schedule is None:
        return None
    for name, kind in _KNOWN.items():
        if type(schedule) is kind:
            return {"name": name, **asdict(schedule)}
    return {"name": repr(schedule), "custom": True}


def schedule_from_dict(data: dict[str, Any] | None) -> Schedule | None:
    """Return the schedule that `schedule_to_dict` wrote; ValueError where the schedule was a callable of the user's."""
    if data is None:
        return None
    if data.get("custom"):
        raise ValueError(f"The checkpoint's schedule {data['name']} was a function, which is not stored: pass it.")
    options = {key: value for key, value in data.items() if key != "name"}
    return _KNOWN[data["name"]](**options)
