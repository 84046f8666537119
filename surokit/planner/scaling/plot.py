"""Draw a fitted scaling law: the runs over the curves with their intervals, and the best loss for a budget.

Curves are dashed where the law is extrapolated. Sizes go from dark to light, so that their order shows without colours too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from surokit import units

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from surokit.planner.scaling.fit import ScalingFit
    from surokit.planner.scaling.laws import Predicted

    Array = NDArray[np.float64]

_INK, _SOFT, _GRID, _ACCENT = "#1c1f23", "#5f6670", "#e4e7eb", "#D55E00"


def draw(fit: ScalingFit) -> Figure:
    """Draw one panel for a law of one number, two for a law of both; return the figure, not yet shown."""
    import numpy as np
    from matplotlib import pyplot as plt

    both = fit.law.surface.has_parameters and fit.law.surface.has_tokens
    figure, axes = plt.subplots(
        1, 2 if both else 1, figsize=(10.0 if both else 6.0, 4.0), layout="constrained", squeeze=False
    )
    figure.set_facecolor("white")
    plt.close(figure)  # the caller shows what is returned; pyplot would show it a second time
    if not both:
        _draw_one(fit, axes[0, 0])
        return figure
    left, right = axes[0]
    sizes = sorted({run.parameters for run in fit.runs})
    shown = [sizes[round(i)] for i in np.linspace(0, len(sizes) - 1, min(5, len(sizes)))]
    tokens = np.geomspace(*fit.law.tokens, 60)
    for i, size in enumerate(shown):
        color = plt.get_cmap("viridis")(0.75 * i / max(len(shown) - 1, 1))
        mine = [run for run in fit.runs if min(shown, key=lambda s: abs(math.log(s / run.parameters))) == size]
        _band(left, fit, tokens, [fit.loss(size, d) for d in tokens], color)
        left.plot(
            [r.tokens for r in mine], [r.loss for r in mine], "o", color=color, markeredgecolor="white", markersize=6
        )
        left.annotate(
            units.count(size, 3),
            (tokens[-1], float(fit.loss(size, tokens[-1]))),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=color,
        )
    left.margins(x=0.12)
    _dress(left, "Loss against tokens, by parameters", "tokens")

    flops = [run.flops for run in fit.runs]
    budgets = np.geomspace(min(flops), 100 * max(flops), 80)
    best = [fit.optimal(c) for c in budgets]
    measured = budgets <= max(flops)
    _band(right, fit, budgets, [b.loss for b in best], _ACCENT, dashed=~measured)
    right.plot(flops, [r.loss for r in fit.runs], "o", color=_SOFT, markeredgecolor="white", markersize=5, label="runs")
    right.plot([], [], color=_ACCENT, label="best split of a budget")
    right.plot([], [], color=_ACCENT, linestyle="--", label="beyond the largest run")
    right.legend(frameon=False, labelcolor=_INK, loc="upper right")
    _dress(right, f"Loss against FLOPs (6ND), {fit.level:.0%} interval", "FLOPs of the run")
    return figure


def _draw_one(fit: ScalingFit, axes: Any) -> None:
    """Draw the only term that was fitted, up to ten times the largest run."""
    import numpy as np

    word = "parameters" if fit.law.surface.has_parameters else "tokens"
    low, high = getattr(fit.law, word)
    x = np.geomspace(low, 10 * high, 80)
    _band(axes, fit, x, [fit.loss(**{word: value}) for value in x], _ACCENT, dashed=x > high)
    axes.plot(
        [getattr(r, word) for r in fit.runs],
        [r.loss for r in fit.runs],
        "o",
        color=_SOFT,
        markeredgecolor="white",
        label="runs",
    )
    axes.plot([], [], color=_ACCENT, label=f"fit, {fit.level:.0%} interval")
    axes.plot([], [], color=_ACCENT, linestyle="--", label="beyond the runs")
    axes.legend(frameon=False, labelcolor=_INK, loc="upper right")
    _dress(axes, f"Loss against {word}", word)


def _band(axes: Any, fit: ScalingFit, x: Array, losses: Sequence[Predicted], color: Any, dashed: Any = None) -> None:
    """Draw a curve with its interval, dashed where it is extrapolated."""
    import numpy as np

    y = np.array([float(loss) for loss in losses])
    axes.fill_between(x, [v.low for v in losses], [v.high for v in losses], color=color, alpha=0.18, linewidth=0)
    if dashed is None or not dashed.any():
        axes.plot(x, y, color=color, linewidth=1.6)
        return
    solid = ~dashed
    axes.plot(x[solid], y[solid], color=color, linewidth=1.6)
    from_here = max(int(solid.sum()) - 1, 0)
    axes.plot(x[from_here:], y[from_here:], color=color, linewidth=1.6, linestyle="--")


def _dress(axes: Any, title: str, label: str) -> None:
    axes.set_xscale("log")
    axes.set_facecolor("white")
    axes.set_title(title, loc="left", fontsize=11, color=_INK)
    axes.set_xlabel(label, color=_SOFT)
    axes.set_ylabel("nats a token", color=_SOFT)
    axes.tick_params(colors=_SOFT, length=0, which="both")
    axes.grid(axis="y", color=_GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_SOFT)
