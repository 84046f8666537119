"""Draw gaps to a baseline, a row for each: every seed, the mean with its interval, and the gate that it is held to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surokit.statistics import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, SOFT, BAND = "#1c1f23", "#5f6670", "#e4e7eb"
COLORS = {"inside": "#0072B2", "better": "#0072B2", "undecided": "#B58900", "outside": "#D55E00", "": "#8A8F98"}
ROW_INCHES = 0.42


@dataclass(frozen=True)
class GapRow:
    """A GapRow is the gaps of one recipe, as shares: of each seed in groups, of which the first is drawn on top, their mean with
    its interval, the gate and where the interval lies ("inside", "better", "undecided", "outside"; "" without)."""

    name: str
    groups: Sequence[Sequence[float]]
    gap: Interval
    gate: float | None = None
    verdict: str = ""


def draw_gaps(axes: Axes, rows: Sequence[GapRow], title: str) -> None:
    """Draw the rows from top to bottom, in percent."""
    reach = [100 * value for row in rows for group in row.groups for value in group]
    reach += [100 * end for row in rows if row.gap.known for end in (row.gap.low, row.gap.high)]
    reach += [100 * row.gate for row in rows if row.gate]
    low, high = min(reach), max(reach)
    low = min(low, -0.2 * high)
    for y, row in enumerate(rows):
        color, words = COLORS[row.verdict], f"{100 * row.gap.mid:+.3f} %"
        if row.gate:
            axes.barh(y, 200 * row.gate, left=-100 * row.gate, height=0.72, color=BAND)
        if row.gap.known:
            ends = [100 * row.gap.low, 100 * row.gap.high]
            axes.plot(ends, [y, y], color=color, linewidth=5, solid_capstyle="butt")
            words += f"   {ends[0]:+.3f} to {ends[1]:+.3f}"
        if row.gate:
            words += f"   gate {100 * row.gate:g}"
        for line, group in enumerate(row.groups):
            at = y + 0.24 * (line - (len(row.groups) - 1) / 2)
            axes.plot([100 * value for value in group], [at] * len(group), "o", color=INK, alpha=0.25, ms=3.5, mew=0)
        axes.plot(100 * row.gap.mid, y, "D", color="white", markeredgecolor=color, markeredgewidth=1.8, markersize=6)
        axes.annotate(
            words, (1.01, y), xycoords=("axes fraction", "data"), va="center", color=INK, annotation_clip=False
        )
    axes.axvline(0, color=SOFT, linewidth=0.8)
    axes.set_xlim(low - 0.03 * (high - low), high + 0.03 * (high - low))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [row.name for row in rows], color=INK)
    in_percent(axes, "x")
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.tick_params(axis="y", labelcolor=INK)
    axes.spines["left"].set_visible(False)


def in_percent(axes: Axes, which: str) -> None:
    """Give an axis of percents signed numbers, and the axes few lines."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(lambda value, _: f"{value:+g}" if abs(value) > 1e-9 else "0")
    axes.tick_params(colors=SOFT, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)
