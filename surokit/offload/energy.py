"""Measure how much of a gradient's energy, its squared norm, lies in how few columns: the curve on which ZenFlow depends.

Hot columns are updated at once and cold ones late, so it pays where few columns hold most of the energy. The curve of a
weight is the share of the squared norm in its k largest columns, from the scores of the latest choice.

    weight               columns  hot   captured  largest 1 %  10 %   50 %
    layers.0.mlp.up      4,096    10 %  62 %      31 %         62 %   91 %

    I columns of a weight
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from surokit.tables import data_frame, html_table, text_table

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# Of the energy that columns taken at random would leave to the host, a choice that takes less than this share is no choice: cold
# columns then matter almost as much as hot ones, and all of them learn late.
CONCENTRATED = 0.1
# What is said of a weight needs evidence. The largest of few columns hold much or little by chance: so many have to be hot. A
# model's first gradients are flatter than later ones: its first choice does not count, and so many in a row have to agree. Noise
# of scores lifts what the largest columns hold, never what columns at random do, so it hides a flat weight rather than making one.
HOT, CHOICES = 10, 3
KS = (0.01, 0.1, 0.5)
_POINTS = 100  # of a curve in a table or a picture
_TICKS = (0.0001, 0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_INK, _SOFT, _GRID, _LINE, _ACCENT = "#1c1f23", "#5f6670", "#e4e7eb", "#0072B2", "#D55E00"
_BEHIND = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}  # a label


@dataclass(frozen=True, eq=False)
class WeightEnergy:
    """A WeightEnergy describes a weight's latest choice of hot columns.

    step: whose gradient was looked at. share: of its squared norm in the `hot` columns that were chosen. entered: how many
    of these had been cold. curve_I: float64, share of the squared norm in the largest column, in the largest two, and so
    on. shares: of all choices that are remembered, the latest last.
    """

    name: str
    step: int
    columns: int
    hot: int
    share: float
    entered: int
    curve_I: NDArray[np.float64]
    shares: tuple[float, ...] = ()

    def captured(self, k: float) -> float:
        """Return the share of the squared norm in the max(1, floor(k * columns)) largest columns; 0 for k = 0, ValueError
        outside [0, 1]."""
        if not 0 <= k <= 1:
            raise ValueError(f"captured(k={k}): a share of the columns, from 0 to 1.")
        return float(self.curve_I[max(1, math.floor(k * self.columns)) - 1]) if k else 0.0

    @property
    def concentration(self) -> float:
        """Return (share - k) / (1 - k), k the share of columns that are hot: 0 as for random columns, 1 where hot ones hold
        everything."""
        return self._concentration(self.share)

    def _concentration(self, share: float) -> float:
        k = self.hot / self.columns
        return (share - k) / (1 - k) if k < 1 else 1.0

    @property
    def judged(self) -> bool:
        """Return whether there is evidence enough to call it flat: ten hot columns or more, and three choices after the first."""
        return self.hot >= HOT and len(self.shares) > CHOICES

    @property
    def flat(self) -> bool:
        """Return whether its energy is not concentrated: in each of the last three choices hot columns took less than a
        tenth of the share that random columns would leave. False where it is not `judged`."""
        return self.judged and all(self._concentration(share) < CONCENTRATED for share in self.shares[-CHOICES:])


def curve(scores: ArrayLike) -> NDArray[np.float64]:
    """Return the curve of [I] scores, sums of squares of each column: float64 [I], the share of their sum in the largest
    column, the largest two, ..."""
    ordered = np.sort(np.asarray(scores, np.float64))[::-1]
    total = ordered.sum()
    return np.cumsum(ordered) / total if total > 0 else np.full(len(ordered), np.nan)


@dataclass(frozen=True, repr=False, eq=False)
class Energy:
    """An Energy holds the weights whose columns are chosen, at the latest choice. It prints as a table, and is empty before
    the first one."""

    weights: tuple[WeightEnergy, ...]

    def __len__(self) -> int:
        return len(self.weights)

    def flat(self) -> tuple[WeightEnergy, ...]:
        """Return the weights whose energy is not concentrated, as WeightEnergy.flat says."""
        return tuple(weight for weight in self.weights if weight.flat)

    def table(self) -> pd.DataFrame:
        """Return a row a weight: weight, step, columns, hot, captured, entered, concentration, and top_1, top_10, top_50:
        the share in the largest so many percent of its columns."""
        columns = ("step", "columns", "hot", "share", "entered", "concentration")
        names = ("weight", "step", "columns", "hot", "captured", "entered", "concentration", *map(_top, KS))
        rows = [(w.name, *(getattr(w, c) for c in columns), *(w.captured(k) for k in KS)) for w in self.weights]
        return data_frame(rows, names)

    def curves(self) -> pd.DataFrame:
        """Return the curves, a row a point: weight, k (share of the columns), captured; at most 100 points a weight."""
        return data_frame(
            [(w.name, k, captured) for w in self.weights for k, captured in zip(*_points(w))],
            ("weight", "k", "captured"),
        )

    def plot(self) -> Figure:
        """Plot captured energy against k, a line a weight, those of `flat` in a colour of their own, with the names of the
        most and the least concentrated; the figure is not yet shown. Raises ValueError before the first choice."""
        if not self.weights:
            raise ValueError("There is no choice of columns to draw yet: take as many steps as the first one needs.")
        return _draw(self)

    _HEADER = ("weight", "columns", "hot", "captured", *(f"top {k:.0%}" for k in KS))

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (w.name, f"{w.columns:,}", f"{w.hot:,}", f"{w.share:.1%}", *(f"{w.captured(k):.1%}" for k in KS))
            for w in self.weights
        ]

    def __repr__(self) -> str:
        if not self.weights:
            return "no choice of columns yet"
        return text_table(self._rows(), header=self._HEADER, right=range(1, 4 + len(KS)))

    def _repr_html_(self) -> str:
        return html_table(self._rows(), header=self._HEADER, right=range(1, 4 + len(KS)), title="Energy in columns")


def warning_of(energy: Energy) -> str:
    """Return a sentence that warns where hot columns hold little more than their number does; "" where energy is
    concentrated, or nothing is known."""
    flat = energy.flat()
    if not flat:
        return ""
    named = ", ".join(w.name for w in flat[:3]) + (f" and {len(flat) - 3} more" if len(flat) > 3 else "")
    worst = min(flat, key=lambda w: w.concentration)
    judged = sum(weight.judged for weight in energy.weights)
    wrong = 2 * len(flat) > judged
    remedy = (
        "here ZenFlow is the wrong tool: surokit.OffloadAdamW updates all columns in every step"
        if wrong
        else 'put them in a parameter group with "offload": False, or raise topk_ratio'
    )
    return (
        f"In {len(flat)} of {judged} weights the gradient's energy is not concentrated in columns ({named}): in "
        f"{worst.name} the {worst.hot / worst.columns:.1%} that are hot hold {worst.share:.1%} of it, and in each of the last "
        f"{CHOICES} choices less than {CONCENTRATED:.0%} of the way from what columns at random hold to everything. What is "
        f"deferred matters as much as what is not; {remedy}."
    )


def _top(k: float) -> str:
    return f"top_{100 * k:.0f}"


def _points(weight: WeightEnergy) -> tuple[Sequence[float], Sequence[float]]:
    """Return (k, captured), from the first column to the last, closer together where k is small."""
    count = weight.columns
    at = np.unique(np.geomspace(1, count, min(count, _POINTS)).round().astype(int))
    return (at / count).tolist(), weight.curve_I[at - 1].tolist()


def _end_of(name: str) -> str:
    """Return the end of a long path, which says more than its beginning."""
    name = name.removesuffix(".weight")
    return name if len(name) <= 40 else "…" + name[-39:]


def _draw(energy: Energy) -> Figure:
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullFormatter, PercentFormatter

    figure, ax = plt.subplots(figsize=(7.6, 4.4), layout="constrained")
    figure.set_facecolor("white")
    plt.close(figure)  # the caller shows what is returned; pyplot would show it a second time
    ranked = sorted(energy.weights, key=lambda w: w.concentration)
    named = {ranked[0], ranked[-1]}
    for weight in ranked[::-1]:  # the flattest on top
        k, captured = _points(weight)
        width, alpha = (2.0, 1.0) if weight in named else (1.0, 0.45)
        color, kind = (_ACCENT, "not concentrated") if weight.flat else (_LINE, "a weight")
        ax.plot(k, captured, color=color, alpha=alpha, linewidth=width, label=kind)
        ax.plot(weight.hot / weight.columns, weight.share, "o", color=color, alpha=alpha, markersize=5)
    fewest = min(1 / w.columns for w in energy.weights)
    at = np.geomspace(fewest, 1, _POINTS)
    ax.plot(at, at, color=_SOFT, linestyle="--", linewidth=1, label="columns at random")
    ax.plot([], [], "o", color=_LINE, markersize=5, label="what is hot")
    for weight, (x, y), place in (
        (ranked[-1], (-7, 3), {"ha": "right", "va": "bottom"}),
        (ranked[0], (7, -4), {"ha": "left", "va": "top"}),
    )[: len(named)]:
        ax.annotate(
            _end_of(weight.name), (weight.hot / weight.columns, weight.share), (x, y), fontsize=9,
            textcoords="offset points", color=_ACCENT if weight.flat else _LINE, bbox=_BEHIND, **place,
        )  # fmt: skip
    handles = {line.get_label(): line for line in ax.lines if not str(line.get_label()).startswith("_")}
    order = [name for name in ("a weight", "not concentrated", "what is hot", "columns at random") if name in handles]
    ax.legend([handles[name] for name in order], order, frameon=False, labelcolor=_INK, loc="upper left", fontsize=9)
    ax.set_xscale("log")
    ax.set_xlim(fewest, 1.02)
    ax.set_xticks([tick for tick in _TICKS if tick >= fewest])
    ax.xaxis.set_major_formatter(lambda k, _: f"{100 * k:g} %")
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.yaxis.set_major_formatter(PercentFormatter(1, 0, symbol=" %"))
    ax.set_ylim(0, 1.02)
    ax.set_facecolor("white")
    ax.set_title("Energy of the gradient in its largest columns", loc="left", fontsize=11, color=_INK)
    ax.set_xlabel("largest columns, share of all", color=_SOFT)
    ax.set_ylabel("share of the squared norm", color=_SOFT)
    ax.tick_params(colors=_SOFT, length=0, which="both")
    ax.grid(axis="y", color=_GRID)
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color(_SOFT)
    return figure
