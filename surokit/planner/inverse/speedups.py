"""Find ways to make a step faster, and the memory that each takes: fusing, CUDA graphs, less recompute, W' cached.

Each way is planned on top of those taken before it, the least demanding first; one is taken where it saves time and still fits.
Times are those that plans are compared by (`Plan.step_time`): likely ones, or predictions at measured rates.

    fusion='fused'             853.6 ms    -76.3 ms    +0.0 GiB  taken
    transposed='cached'        597.1 ms    -13.8 ms    +6.9 GiB  taken
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surokit.planner.inverse.budgets import known_memory_budget
from surokit.planner.inverse.changes import saving_time
from surokit.planner.times.cost import StepTime
from surokit.planner.times.roofline import why_no_estimate
from surokit.tables import data_frame, html_table, text_table

if TYPE_CHECKING:
    import pandas as pd

    from surokit.planner.planning import Plan

_LEAST = 0.001  # of a step; a way that saves less is not worth its memory


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
    """A Faster holds the ways, each on top of those taken before it, and the plan with all that are taken; `kind` is that of the
    times."""

    step_ms: float
    ways: tuple[FasterWay, ...]
    plan: Plan
    kind: str

    @property
    def sentence(self) -> str:
        taken = [way.how for way in self.ways if way.taken]
        if not taken:
            return f"a step of {self.step_ms:,.4g} ms ({self.kind}) gets no faster by any of these"
        last = [way for way in self.ways if way.taken][-1]
        gain = self.step_ms / last.step_ms
        return f"{', '.join(taken)}: {self.step_ms:,.4g} ms to {last.step_ms:,.4g} ms ({self.kind}), {gain:.2f} times as fast"

    def table(self) -> pd.DataFrame:
        """Return the ways as a DataFrame, one a row: way, step_ms, saves_ms, gib, adds_gib, taken, why."""
        columns = ("step_ms", "saves_ms", "gib", "adds_gib", "taken", "why")
        return data_frame([{"way": w.how, **{c: getattr(w, c) for c in columns}} for w in self.ways])

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (w.how, f"{w.step_ms:,.4g} ms", f"{-w.saves_ms:+,.3g} ms", f"{w.adds_gib:+.2f} GiB", w.why)
            for w in self.ways
        ]

    _HEADER = ("one after the other", "step", "", "memory", "")

    def __repr__(self) -> str:
        rows = [text_table(self._rows(), header=self._HEADER, right=(1, 2, 3))] if self.ways else []
        return "\n".join([self.sentence, *rows])

    def _repr_html_(self) -> str:
        return html_table(self._rows(), header=self._HEADER, right=(1, 2, 3), title=self.sentence)


def _time(plan: Plan) -> StepTime:
    """Return the time of a step; without what is kept on the host, where that is not known: it is the same in every way."""
    found = plan.step_time or plan.computing_time
    assert found is not None
    return found


def faster(plan: Plan, *, gib: float | None = None) -> Faster:
    """Find what makes a plan's step faster within `gib` (the GPU's own memory without it; unlimited where neither is known).

    Raises ValueError where a step's time cannot be estimated, with what is missing.
    """
    room, now = known_memory_budget(plan, gib), plan
    if missing := why_no_estimate(plan.shape, plan.compute, plan.setup, plan.gpu):
        raise ValueError(f"faster() cannot tell: {missing}")
    ways = []
    for change in saving_time(plan):
        how, changes = change.how, change.arguments
        if "transposed" in changes and not now.setup.fusion.fuses:
            continue  # only a fused step keeps W'
        tried = change.of(now)
        before, after = _time(now), _time(tried)
        saves = before.ms - after.ms
        fits = room is None or tried.memory.gib <= room
        worth = saves > _LEAST * before.ms
        why = "taken" if worth and fits else "does not fit" if worth else "no faster here"
        more = tried.memory.gib - now.memory.gib
        ways.append(FasterWay(how, changes, before.ms - saves, saves, tried.memory.gib, more, worth and fits, why))
        now = tried if worth and fits else now
    first = _time(plan)
    return Faster(first.ms, tuple(ways), now, first.kind)
