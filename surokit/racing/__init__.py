"""Recipes are raced on one device: in turns, with equal work enforced, and figures that say how far they can be trusted.

start.py          race() and Race: a race is made from what a user gives, run, and gone on with
entries.py        the sessions of a race, all from the same weights, data and settings
comparability.py  whether they do the same work
scheduler.py      whose turn it is, and what is asked of a race meanwhile
model_swap.py     models that do not fit on the device together
goal.py           what every run trains to, where a race has a goal
runs.py           what happened, as plain values
outcome.py, statistics.py, predicted.py  what follows from it; the gain that was to be expected
result.py         RaceResult: the table and its words; picture.py, folder.py
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surokit.racing.comparability import UnequalWork
    from surokit.racing.goal import Goal
    from surokit.racing.start import Race, race

__all__ = ["Goal", "Race", "UnequalWork", "race"]

# A name is imported when it is first used: what only wants `statistics` needs no torch.
_MODULES = {"Goal": "goal", "Race": "start", "UnequalWork": "comparability", "race": "start"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"surokit.racing has no {name!r}")
    value = getattr(import_module(f"surokit.racing.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
