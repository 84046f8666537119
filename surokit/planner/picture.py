"""Draw the memory of plans with matplotlib, one stacked bar for each.

    plot_memory({"all weights": plan, "LoRA": plan.but(recipe="qfp8")}, gib=80)

Terms are gathered into a few groups so that plans of different recipes can be compared by colour; what follows exactly from
shapes and dtypes is solid, what is approximate is hatched. The length of a bar is the memory that `plan.fits` compares, at the
fullest moment of a step, so a term that comes later is short or missing. The line is the GPU's memory.
Colours are Okabe and Ito's (2008) as far as they go, which stay apart for the common kinds of colour blindness.

`parts_of` gives the same groups as numbers, for any other view.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from surokit import arguments, units
from surokit.planner.counts.memory import Memory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from surokit.planner.planning import Plan

_INK, _SOFT, _GRID = "#1c1f23", "#5f6670", "#e4e7eb"
# group -> (colour, first words of the terms' names in it), in the order in which a bar stacks them
_GROUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "weights": ("#0072B2", ("weights",)),
    "copies of weights": ("#56B4E9", ("dequantized", "quantized", "gathered", "codes")),
    "adapter": ("#CC79A7", ("adapter",)),
    "gradients": ("#D55E00", ("gradient",)),
    "optimizer": ("#009E73", ("optimizer", "master")),
    "activations": ("#B58900", ("activation",)),
    "logits and loss": ("#E5C76B", ("logit", "loss")),
    "KV cache": ("#7A5195", ("KV",)),
    "workspace": ("#4B5563", ("workspace", "amax")),
    "other": ("#8A8F98", ()),
    "slack": ("#c9ced6", ("slack",)),
}
_PALE = ("copies of weights", "logits and loss", "slack")  # they take dark figures
_NAMED = 0.06  # of the axis: a narrower part carries no figure of its own


@dataclass(frozen=True)
class BarPart:
    """A BarPart holds the GiB of one group of terms, the exact or the approximate ones."""

    group: str
    exact: bool
    gib: float


def parts_of(memory: Memory) -> tuple[BarPart, ...]:
    """Sum the counted terms by group, exact before approximate, in the order of a bar; empty parts are left out."""
    sums: dict[tuple[str, bool], float] = {}
    for term in memory.terms:
        if term.counted and term.bytes > 0:
            key = (_group(term.name), term.exact)
            sums[key] = sums.get(key, 0.0) + term.gib
    return tuple(BarPart(g, e, sums[g, e]) for g in _GROUPS for e in (True, False) if (g, e) in sums)


def _group(name: str) -> str:
    return next((group for group, (_, starts) in _GROUPS.items() if starts and name.startswith(starts)), "other")


def plot_memory(plans: Mapping[str, Plan] | Plan, gib: float | Sequence[float] | None = None) -> Figure:
    """Draw a bar of memory for each plan: exact terms solid, approximate ones hatched, the total beside it.

    plans: name -> Plan, drawn from top to bottom; or one plan. gib: the memory of one GPU in GiB, drawn as a line, or several;
    without it that of the plans' own GPUs. A bar beyond the only line is marked as too large. Returns the figure, not yet shown.

    Raises ValueError for no plans or a memory that is not above zero, TypeError for anything that is not a plan.
    """
    named = plans if isinstance(plans, Mapping) else {"": plans}
    if not named:
        raise ValueError("plot_memory() got no plans: pass {'name': sk.plan(...), ...}.")
    for name, plan in named.items():
        if not isinstance(getattr(plan, "memory", None), Memory):
            raise TypeError(
                f"plot_memory() got a {type(plan).__name__} as {name!r}: pass {{'name': sk.plan(...), ...}}."
            )
    limits = _limits(named, gib)

    from matplotlib import pyplot as plt

    longest = max(plan.memory.gib for plan in named.values())
    unit, scale = ("MiB", 1024.0) if longest < 0.5 else ("GiB", 1.0)
    shown_limits = [limit for limit in set(limits.values()) if limit <= 8 * longest]
    reach = scale * max([longest, *shown_limits])
    height = 1.25 + 0.5 * len(named)
    figure, ax = plt.subplots(figsize=(9.0, height), layout="constrained")
    figure.set_facecolor("white")
    plt.close(figure)  # the caller shows what is returned; pyplot would show it a second time

    seen: dict[str, None] = {}
    for row, plan in enumerate(named.values()):
        for part in _draw_bar(ax, row, plan.memory, scale, reach):
            seen[part.group] = None
        limit = limits.get(row) if gib is None or not isinstance(gib, Sequence) else None
        _name_total(ax, row, plan.memory, limit, scale, reach)
    _draw_limits(ax, limits, gib, scale, reach, len(named))

    ax.set_yticks(range(len(named)), ["\n".join(wrap(name, 26)) for name in named])
    ax.set_ylim(len(named) - 0.45, -0.62)
    ax.set_xlim(0, 1.24 * reach)
    peak = " at its peak" if any(plan.memory.phases for plan in named.values()) else ""
    ax.set_xlabel(f"memory of one GPU{peak}, {unit}", color=_SOFT)
    ax.tick_params(colors=_SOFT, length=0)
    ax.tick_params(axis="y", labelcolor=_INK, labelsize=10)
    ax.grid(axis="x", color=_GRID)
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color(_SOFT)
    _legend(figure, [group for group in _GROUPS if group in seen])
    return figure


def _limits(named: Mapping[str, Plan], gib: float | Sequence[float] | None) -> dict[int, float]:
    """Return the memory in GiB that each bar is compared with, by row; several given ones are lines through all bars."""
    if gib is None:
        own = {row: plan.room_gib for row, plan in enumerate(named.values())}
        return {row: limit for row, limit in own.items() if limit is not None}
    if isinstance(gib, Sequence):
        return dict(enumerate(arguments.number("gib", each) for each in gib))
    return dict.fromkeys(range(len(named)), arguments.number("gib", gib))


def _draw_bar(ax: Any, row: int, memory: Memory, scale: float, reach: float) -> tuple[BarPart, ...]:
    parts = parts_of(memory)
    left = 0.0
    for part in parts:
        width = part.gib * scale
        color = _GROUPS[part.group][0]
        hatch = None if part.exact else "////"
        ax.barh(row, width, left=left, height=0.62, color=color, edgecolor="white", linewidth=0.6, hatch=hatch)
        if width >= _NAMED * reach and part.group != "slack":
            ink = _INK if part.group in _PALE else "white"
            place = {"ha": "center", "va": "center", "fontsize": 9, "color": ink, "zorder": 4}
            text = ax.text(left + width / 2, row, f"{width:.3g}", **place)
            text.set_bbox({"facecolor": color, "edgecolor": "none", "pad": 1.2})
        left += width
    return parts


def _name_total(ax: Any, row: int, memory: Memory, limit: float | None, scale: float, reach: float) -> None:
    """Write the total beside the bar, and whether it fits."""
    total = memory.gib
    words = units.gib(total)
    if memory.left_out:
        words += " without activations"
    fits = limit is None or total <= limit
    if limit is not None and not (fits and memory.left_out):
        words += ", fits" if fits else ", too large"
    drawn = sum(part.gib for part in parts_of(memory))
    text = ax.text(
        scale * max(total, drawn) + 0.012 * reach,
        row,
        words,
        va="center",
        fontsize=10,
        color=_INK if fits else "#B3300B",
        fontweight="normal" if fits else "bold",
        zorder=4,
    )
    text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1.0})


def _draw_limits(
    ax: Any, limits: Mapping[int, float], gib: float | Sequence[float] | None, scale: float, reach: float, rows: int
) -> None:
    """Draw one line through all bars for a memory that all have, else a mark at each bar's own."""
    line: dict[str, Any] = {"color": _INK, "linewidth": 1.2, "linestyle": (0, (4, 3)), "zorder": 3}
    values = sorted(set(limits.values()))
    if gib is not None or (len(values) == 1 and len(limits) == rows):
        for value in values:
            if value * scale <= 1.2 * reach:
                ax.axvline(value * scale, **line)
                ax.annotate(
                    units.gib(value) if value < 10 else f"{value:g} GiB",
                    (value * scale, 1),
                    xycoords=("data", "axes fraction"),
                    xytext=(0, 3),
                    textcoords="offset points",
                    ha="center",
                    fontsize=9,
                    color=_INK,
                )
        return
    for row, value in limits.items():
        if value * scale <= 1.2 * reach:
            ax.plot([value * scale] * 2, [row - 0.42, row + 0.42], **line)


def _legend(figure: Any, groups: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=_GROUPS[group][0], label=group) for group in groups]
    handles += [
        Patch(facecolor="#8A8F98", edgecolor="white", label="exact"),
        Patch(facecolor="#8A8F98", edgecolor="white", hatch="////", label="approximate"),
    ]
    columns = -(-len(handles) // -(-len(handles) // 6))  # rows of at most six, alike in length
    figure.legend(
        handles=[handle for column in range(columns) for handle in handles[column::columns]],  # read row by row
        loc="outside upper left",
        ncols=columns,
        frameon=False,
        fontsize=9,
        labelcolor=_INK,
        handlelength=1.6,
        columnspacing=1.4,
    )
