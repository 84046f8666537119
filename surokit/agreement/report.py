"""Hold what was found, and show it: one sentence, one row a module, a picture.

A difference is relative: of outputs that of the token where it is largest, of gradients that of all parameters of the module.
"""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surokit.tables import data_frame, html_table, text_table

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_SHOWN = 12


@dataclass(frozen=True)
class ModuleParity:
    """A ModuleParity says how far the outputs and the gradients of one module lie apart, and how far rounding puts them apart.

    gradient is NaN where the module has no parameters that train, recipe (the difference with quantized products) where neither
    model has them.
    """

    module: str
    kind: str  # of class, or "A / B"
    forward: float
    explained: float
    gradient: float = math.nan
    gradient_explained: float = math.nan
    recipe: float = math.nan
    recipe_explained: float = math.nan

    @property
    def parts(self) -> bool:
        """Return whether the outputs differ by more than rounding explains."""
        return not self.forward <= self.explained

    @property
    def gradient_parts(self) -> bool:
        """Return whether the gradients differ by more than rounding explains."""
        return self.gradient > self.gradient_explained


@dataclass(frozen=True)
class Pair:
    """A Pair is one number of both models, such as the loss, and the absolute difference that rounding explains."""

    a: float
    b: float
    explained: float

    @property
    def parts(self) -> bool:
        return not abs(self.a - self.b) <= self.explained


@dataclass(frozen=True)
class Parity:
    """A Parity says whether two models do the same with one batch: `verdict` is the answer in one sentence.

    rows: one a module that both have, in the order in which they end. agree: whether rounding, or the recipe, explains every
    difference. inputs, parameters, notes: what was found of these, in lines. step: the largest relative difference of a parameter's
    first step, what rounding explains of it, and the parameter.
    """

    verdict: str
    agree: bool
    rows: tuple[ModuleParity, ...]
    loss: Pair
    grad_norm: Pair
    step: tuple[float, float, str]
    inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    notes: tuple[str, ...]
    dtype: str

    def frame(self) -> pd.DataFrame:
        """Return a DataFrame with the columns module, class, forward, explained, gradient, gradient_explained, recipe,
        recipe_explained."""
        columns = [
            "module",
            "class",
            "forward",
            "explained",
            "gradient",
            "gradient_explained",
            "recipe",
            "recipe_explained",
        ]
        rows = [
            (r.module, r.kind, r.forward, r.explained, r.gradient, r.gradient_explained, r.recipe, r.recipe_explained)
            for r in self.rows
        ]
        return data_frame(rows, columns)

    def plot(self) -> Figure:
        """Plot the differences of outputs and gradients by depth, with what rounding explains, as a matplotlib figure."""
        from surokit.widgets.curves import plot_parity

        return plot_parity(self.rows, self.verdict)

    _HEADER = ("module", "class", "output", "explained", "gradient", "explained")

    def _table(self) -> list[tuple[str, ...]]:
        """Return the rows that matter most: those that part, then those nearest to it, in the order of the model."""
        order = sorted(
            self.rows, key=lambda r: -max(_share(r.forward, r.explained), _share(r.gradient, r.gradient_explained))
        )
        kept = {id(row) for row in order[:_SHOWN]}
        return [
            (r.module, r.kind, short(r.forward), short(r.explained), short(r.gradient), short(r.gradient_explained))
            for r in self.rows
            if id(r) in kept
        ]

    def _lines(self) -> list[str]:
        loss, norm, (apart, explained, where) = self.loss, self.grad_norm, self.step
        lines = [*self.inputs, *self.parameters]
        lines.append(f"loss: {loss.a:.6g} and {loss.b:.6g}; {self.dtype} explains {short(loss.explained)}")
        lines.append(f"gradient norm: {norm.a:.6g} and {norm.b:.6g}")
        if where:
            lines.append(f"first step: differs by {short(apart)} at most, at {where}; explained {short(explained)}")
        left = len(self.rows) - _SHOWN
        return [*lines, *self.notes, *([f"{left} more modules: .frame() has all"] if left > 0 else [])]

    def __repr__(self) -> str:
        table = text_table(self._table(), header=self._HEADER, right=(2, 3, 4, 5), indent="")
        return "\n".join([self.verdict, *(f"  {line}" for line in self._lines()), table])

    def _repr_html_(self) -> str:
        table = html_table(self._table(), header=self._HEADER, right=(2, 3, 4, 5), title="Two stacks, one answer")
        lines = "".join(f"<br><code>{html.escape(line)}</code>" for line in self._lines())
        return f"<div><b>{html.escape(self.verdict)}</b>{lines}{table}</div>"


def short(value: float) -> str:
    """Return a difference as text: two digits, "" for NaN, which stands for nothing to compare."""
    return "" if math.isnan(value) else f"{value:.2g}"


def _share(value: float, explained: float) -> float:
    return 0.0 if math.isnan(value) else value / max(explained, 1e-300)
