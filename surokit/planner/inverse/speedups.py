"""Find ways to make a step faster, and the memory that each takes: fusing, CUDA graphs, less recompute, W' cached, a recipe.

Each way is planned on top of those taken before it, the least demanding first; one is taken where it saves time and still fits, or
takes no more memory than a plan that does not fit. The fastest recipe comes last, and is not taken: whether it trains as well is
for a race to say. Times are those that plans are compared by (`Space.step_time`): likely ones, or predictions at measured rates.

    fusion='fused'             853.6 ms    -76.3 ms    +0.0 GiB  taken
    transposed='cached'        597.1 ms    -13.8 ms    +6.9 GiB  taken
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surokit import units
from surokit.planner.counts.flops import frozen
from surokit.planner.inverse.budgets import Space, known_memory_budget, space_of
from surokit.planner.inverse.changes import saving_time
from surokit.planner.inverse.recipe_choice import candidates, label_of, products_on
from surokit.planner.offload.formulas import Host
from surokit.planner.times.cost import StepTime
from surokit.planner.times.roofline import why_no_estimate
from surokit.tables import data_frame, html_table, text_table

if TYPE_CHECKING:
    import pandas as pd

    from surokit.planner.planning import Plan

_LEAST = 0.001  # of a step; a way that saves less is not worth its memory
#: Of a step, what a recipe, or a change more to make a plan fit, has to save: less is within the error of a likely time's order.
LEAST_GAIN = 0.02


@dataclass(frozen=True)
class FasterWay:
    """A FasterWay is one change: how to write it, the step and the memory with it, the difference that it makes to both, and
    whether it is taken, or why not."""

    how: str
    changes: Mapping[str, Any]
    step_ms: float
    saves_ms: float
    gib: float
    adds_gib: float
    taken: bool
    why: str

    @property
    def words(self) -> str:
        """Say the way in a line, as in "transposed='cached': +6.9 GiB, -13.8 ms"."""
        return f"{self.how}: {self.adds_gib:+.1f} GiB, {-self.saves_ms:+.1f} ms"


@dataclass(frozen=True, repr=False)
class Faster:
    """A Faster holds the ways, each on top of those taken before it, and the plan with all that are taken.

    `kind` is that of the times; `fits` says whether that plan fits, None where the memory to fit into is not known.
    """

    step_ms: float
    ways: tuple[FasterWay, ...]
    plan: Plan
    kind: str
    fits: bool | None = None

    @property
    def taken(self) -> tuple[FasterWay, ...]:
        """Return the ways that are taken."""
        return tuple(way for way in self.ways if way.taken)

    @property
    def counted(self) -> tuple[FasterWay, ...]:
        """Return the ways that are taken, and last the recipe that is fastest then, where there is one."""
        return tuple(way for way in self.ways if way.taken or "recipe" in way.changes)

    @property
    def in_recipe(self) -> bool:
        """True if another recipe would make the step faster."""
        return any("recipe" in way.changes for way in self.ways)

    @property
    def least_ms(self) -> float:
        """Return the ms of a step with all that is `counted`."""
        return self.counted[-1].step_ms if self.counted else self.step_ms

    @property
    def sentence(self) -> str:
        """Say what is taken and what it gains, which recipe would be faster still, and whether the plan fits."""
        taken, before = self.taken, units.value(self.step_ms, "ms")
        if taken:
            gain = self.step_ms / taken[-1].step_ms
            to = f"{before} to {units.value(taken[-1].step_ms, 'ms')} ({self.kind})"
            said = f"{', '.join(way.how for way in taken)}: {to}, {gain:.2f} times as fast"
        elif any(way.saves_ms > _LEAST * self.step_ms and "recipe" not in way.changes for way in self.ways):
            said = f"what makes a step of {before} ({self.kind}) faster takes more memory than there is"
        else:
            said = f"a step of {before} ({self.kind}) gets no faster by any of these"
        if self.in_recipe:
            said += f"; {units.value(self.least_ms, 'ms')} with {self.counted[-1].how}"
        return f"{said}; the plan does not fit, plan.fitting() says what helps" if self.fits is False else said

    def table(self) -> pd.DataFrame:
        """Return the ways as a DataFrame, one a row: way, step_ms, saves_ms, gib, adds_gib, taken, why."""
        columns = ("step_ms", "saves_ms", "gib", "adds_gib", "taken", "why")
        return data_frame([{"way": w.how, **{c: getattr(w, c) for c in columns}} for w in self.ways])

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (w.how, units.value(w.step_ms, "ms"), _signed(-w.saves_ms), f"{w.adds_gib:+.2f} GiB", w.why)
            for w in self.ways
        ]

    _HEADER = ("one after the other", "step", "", "memory", "")

    def __repr__(self) -> str:
        rows = [text_table(self._rows(), header=self._HEADER, right=(1, 2, 3))] if self.ways else []
        return "\n".join([self.sentence, *rows])

    def _repr_html_(self) -> str:
        return html_table(self._rows(), header=self._HEADER, right=(1, 2, 3), title=self.sentence)


def faster(plan: Plan, *, gib: float | None = None, host: Host | None = None, host_gib: float | None = None) -> Faster:
    """Find what makes a plan's step faster within `gib` (the GPU's own memory without it; unlimited where neither is known).

    `host` and `host_gib` are as for `fitting`. Raises ValueError where a step's time cannot be estimated, with what is missing,
    TypeError for a host that is not a Host.
    """
    room, now = known_memory_budget(plan, gib), plan
    space = space_of("faster", plan, math.inf if room is None else room, host, host_gib)
    if missing := why_no_estimate(plan.shape, plan.compute, plan.setup, plan.gpu):
        raise ValueError(f"faster() cannot tell: {missing}")
    ways = []
    for change in saving_time(plan):
        how, changes = change.how, change.arguments
        if "transposed" in changes and not now.setup.fusion.fuses:
            continue  # only a fused step keeps W'
        tried = change.of(now)
        before, after = _time(now, space), _time(tried, space)
        saves = before.ms - after.ms
        fits = space.suffices(tried.memory, now.memory)
        worth = saves > _LEAST * before.ms
        why = "taken" if worth and fits else "does not fit" if worth else "no faster here"
        more = tried.memory.gib - now.memory.gib
        ways.append(FasterWay(how, changes, before.ms - saves, saves, tried.memory.gib, more, worth and fits, why))
        now = tried if worth and fits else now
    if (recipe := _fastest_recipe(now, space)) is not None:
        ways.append(recipe)
    first = _time(plan, space)
    return Faster(first.ms, tuple(ways), now, first.kind, None if room is None else space.holds(now.memory))


def _signed(ms: float) -> str:
    return "0 ms" if abs(ms) < 1e-3 else f"{ms:+,.3g} ms"


def _time(plan: Plan, space: Space) -> StepTime:
    """Return the time of a step; without what is kept on the host, where that is not known: it is the same in every way."""
    found = space.step_time(plan) or plan.computing_time
    assert found is not None
    return found


def _fastest_recipe(plan: Plan, space: Space) -> FasterWay | None:
    """Return the way with the fastest recipe that trains as much, not taken; None where none that fits saves enough.

    What a GPU emulates is left out: it tells about the loss, and gains what its storage happens to.
    """
    found = []
    for recipe, _ in candidates(plan):
        if recipe.frozen_base != frozen(plan.recipe) or products_on(recipe, plan.gpu)[0] in ("emulated", ""):
            continue
        tried = plan.but(recipe=recipe)
        if space.suffices(tried.memory, plan.memory):
            found.append((_time(tried, space).ms, recipe, tried.memory.gib))
    if not found:
        return None
    ms, best, gib = min(found, key=lambda each: each[0])
    saves = _time(plan, space).ms - ms
    if saves <= LEAST_GAIN * ms:
        return None
    why = "trains with other products: a race tells how well" if plan.setup.training else "other products"
    return FasterWay(f"recipe {label_of(best)}", {"recipe": best}, ms, saves, gib, gib - plan.memory.gib, False, why)
