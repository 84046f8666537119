"""Recipes raced on one device: in turns, with equal work enforced, and figures that say how far they can be trusted.

start: `race`. entries (the sessions) -> equal (do they do the same work?) -> driving (who goes when) -> runs (what happened, as
plain values) -> statistics, outcome (what follows from it) -> result: `Race`; picture, folder. parking: models that do not fit on
the device together. predicted: the gain that was to be expected. statistics knows numbers only.
"""

from __future__ import annotations

from surokit.racing.equal import UnequalWork
from surokit.racing.result import Race
from surokit.racing.start import race

__all__ = ["Race", "UnequalWork", "race"]
