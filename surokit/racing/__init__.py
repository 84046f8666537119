"""Recipes raced on one device: in turns, with equal work enforced, and figures that say how far they can be trusted.

start: `race` and `Race`. entries (the sessions) -> equal (do they do the same work?) -> driving (who goes when) -> runs (what
happened, as plain values) -> statistics, outcome (what follows from it) -> result; picture, folder. parking: models that do not fit
on the device together. predicted: the gain that was to be expected. statistics knows numbers only.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surokit.racing.equal import UnequalWork
    from surokit.racing.start import Race, race

__all__ = ["Race", "UnequalWork", "race"]

# A name is imported when it is first used: what only wants `statistics` needs no torch.
_MODULES = {"Race": "start", "UnequalWork": "equal", "race": "start"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"surokit.racing has no {name!r}")
    value = getattr(import_module(f"surokit.racing.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
