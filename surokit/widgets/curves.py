"""This module draws finished work with matplotlib: runs over each other (`plot_runs`), the error of each recipe against layer
(`plot_errors`), loss gap against time (`plot_front`), and how far two models lie apart (`plot_parity`).
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from surokit.runs.smoothing import LossMean
from surokit.widgets.figure import PALETTE_LIGHT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INK, _SOFT, _GRID = "#1c1f23", "#5f6670", "#e4e7eb"
_GEMMS = {"forward": "y = x w'", "grad_input": "dx = dy w", "grad_weight": "dw = dy' x"}
_MARKERS = "osD^vPX*"  # beside the colour, for eyes and printers that know none
_COLORS = (*PALETTE_LIGHT, _INK, "#8A8F98")
_NAMED_LAYERS = 20  # up to so many, each has its name below the axis


def plot_runs(runs: Mapping[str, Any], baseline: str | None = "bf16", smooth: int | None = None) -> Figure:
    """Plot the smoothed loss by step on the left, with each step's own loss faint behind it, and on the right the gap to the
    baseline, in percent of the baseline.

    runs: name -> Session, Live, pandas frame (columns step and loss) or anything with `.records.frame()` or `.frame()`.
    baseline: name of the run that the others are held against; None leaves the right picture out. smooth: steps in the
    average (bias-corrected, exponential), by default those of the panel's smoothed loss.
    The gap is taken step by step, over the steps that both runs have, and then smoothed: with the same data order the
    noise of the batches cancels. Held-out points (eval_loss) are drawn as dots. Returns the figure, not yet shown.

    Raises ValueError for no runs, a baseline that is not among them, or a run without a finite loss.
    """
    if not runs:
        raise ValueError("plot_runs() got no runs; pass {'name': session, ...}.")
    if baseline is not None and baseline not in runs:
        if len(runs) > 1:
            names = ", ".join(repr(name) for name in runs)
            raise ValueError(f"plot_runs(baseline={baseline!r}) is not among the runs {names}; name one, or None.")
        baseline = None
    curves = {name: _curve(name, run) for name, run in runs.items()}
    others = [name for name in curves if name != baseline]
    has_gap = baseline is not None and bool(others)

    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        1,
        2 if has_gap else 1,
        figsize=(10.0 if has_gap else 6.0, 3.8),
        layout="constrained",
        squeeze=False,
        gridspec_kw={"width_ratios": [3, 2]} if has_gap else None,
    )
    figure.set_facecolor("white")
    plt.close(figure)  # the caller shows what is returned; pyplot would show it a second time
    left = axes[0, 0]
    colors = {name: PALETTE_LIGHT[i % len(PALETTE_LIGHT)] for i, name in enumerate(curves)}
    for name, (step, loss, eval_step, eval_loss) in curves.items():
        mean = _smooth(loss, smooth)
        # The others often lie exactly on the baseline: it is drawn broad and pale beneath them, so that both are seen.
        below = has_gap and name == baseline
        line = {"linewidth": 5.0, "alpha": 0.45} if below else {"linewidth": 1.6}
        left.plot(step, loss, color=colors[name], alpha=0.18, linewidth=0.8)
        left.plot(step, mean, color=colors[name], label=f"{name}  {_last(mean):.3f}", solid_capstyle="round", **line)
        if len(eval_step):
            size = 8 if below else 5
            left.plot(eval_step, eval_loss, "o", color=colors[name], markersize=size, markeredgecolor="white")
    _dress(left, "Loss, EMA (last value in the legend)")
    means = np.concatenate([_smooth(loss, smooth) for _, loss, _, _ in curves.values()])
    low, high = np.nanmin(means), np.nanmax(means)
    left.set_ylim(low - 0.06 * (high - low) - 1e-9, high + 0.04 * (high - low) + 1e-9)
    left.legend(frameon=False, labelcolor=_INK, loc="upper right")

    if has_gap and baseline is not None:
        right = axes[0, 1]
        right.axhline(0.0, color=colors[baseline], linewidth=5.0, alpha=0.45)
        base_step, base_loss, _, _ = curves[baseline]
        for name in others:
            step, loss, _, _ = curves[name]
            common, here, there = np.intersect1d(step, base_step, return_indices=True)
            if not len(common):
                raise ValueError(
                    f"The runs {name!r} and {baseline!r} have no step in common; their gap has no meaning."
                )
            difference = loss[here] - base_loss[there]
            gap = 100.0 * _smooth(difference, smooth) / _smooth(base_loss[there], smooth)
            right.plot(common, gap, color=colors[name], linewidth=1.6, label=f"{name}  {_last(gap):+.2f} %")
        _dress(right, f"Gap to {baseline}, % of its loss")
        # Never finer than a tenth of a percent: a zoom into rounding noise reads like a difference. Room for the legend.
        bottom, top = right.get_ylim()
        bottom, top = min(bottom, -0.1), max(top, 0.1)
        right.set_ylim(bottom, top + 0.09 * (1 + len(others)) * (top - bottom))
        right.yaxis.set_major_formatter(lambda value, _: f"{value:+.2g}" if abs(value) > 1e-9 else "0")
        right.legend(frameon=False, labelcolor=_INK, loc="upper left")
    return figure


def plot_errors(frame: Any, title: str = "") -> Figure:
    """Plot error against layer: the SQNR in dB of each recipe's products, one panel a product, the worst layer of each by name.

    frame: what `surokit.compare` returns, or anything with the columns layer, gemm, recipe and sqnr_db; layers stand in the
    frame's order. A product that is exact has no error to draw. Of every recipe the worst layer is ringed. Returns the figure,
    not yet shown.

    Raises ValueError for a frame without these columns or without a finite SQNR.
    """
    columns = [name for name in ("layer", "gemm", "recipe", "sqnr_db") if name not in getattr(frame, "columns", ())]
    if columns:
        raise ValueError(f"plot_errors() misses {', '.join(columns)}: pass what surokit.compare() returns.")
    frame = frame[np.isfinite(frame["sqnr_db"].astype(float))]
    if not len(frame):
        raise ValueError("plot_errors() has no finite SQNR to draw: compare at least one quantized recipe.")
    layers, recipes = list(dict.fromkeys(frame["layer"])), list(dict.fromkeys(frame["recipe"]))
    gemms = [gemm for gemm in _GEMMS if gemm in set(frame["gemm"])]
    place = {layer: i for i, layer in enumerate(layers)}

    from matplotlib import pyplot as plt

    width = min(13.0, 7.0 + 0.03 * len(layers))
    figure, axes = plt.subplots(
        len(gemms), 1, figsize=(width, 0.9 + 2.4 * len(gemms)), layout="constrained", squeeze=False, sharex=True
    )
    figure.set_facecolor("white")
    plt.close(figure)
    for ax, gemm in zip(axes[:, 0], gemms):
        part = frame[frame["gemm"] == gemm]
        for number, recipe in enumerate(recipes):
            rows = part[part["recipe"] == recipe]
            if not len(rows):
                continue
            x = np.array([place[layer] for layer in rows["layer"]])
            y = rows["sqnr_db"].to_numpy(dtype=float)
            x, y = x[np.argsort(x)], y[np.argsort(x)]
            color, marker = _COLORS[number % len(_COLORS)], _MARKERS[number % len(_MARKERS)]
            size = 5.0 if len(layers) <= 60 else 3.0
            # a layer that the recipe keeps in bf16 breaks the line
            at = np.full(len(layers), np.nan)
            at[x] = y
            ax.plot(at, color=color, marker=marker, markersize=size, linewidth=0.9, markeredgewidth=0, label=recipe)
            low = int(np.argmin(y))
            ax.plot(x[low], y[low], "o", markersize=size + 6, markerfacecolor="none", markeredgecolor=color)
        worst = part.loc[part["sqnr_db"].astype(float).idxmin()]
        worst = worst if getattr(worst, "ndim", 1) == 1 else worst.iloc[0]
        _dress(ax, f"{gemm}   {_GEMMS[gemm]}   SQNR, dB")
        ax.set_xlabel("")
        bottom, top = ax.get_ylim()
        ax.set_ylim(bottom - 0.22 * (top - bottom), top + 0.04 * (top - bottom))  # room for the words
        at_x = place[worst["layer"]]
        side = "left" if at_x < 0.5 * len(layers) else "right"
        ax.annotate(
            f"worst: {worst['layer']}  {float(worst['sqnr_db']):.1f} dB ({worst['recipe']})",
            (at_x, float(worst["sqnr_db"])),
            xytext=(9 if side == "left" else -9, -8),
            textcoords="offset points",
            ha=side,
            va="top",
            fontsize=9,
            color=_INK,
        )
    _name_layers(axes[-1, 0], layers)
    handles: dict[str, Any] = {}
    for ax in axes[:, 0]:
        for handle, label in zip(*ax.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    order = [recipe for recipe in recipes if recipe in handles]
    figure.legend(
        [handles[recipe] for recipe in order],
        order,
        loc="outside upper left",
        ncols=min(len(order), 8 if width > 10 else 5),
        frameon=False,
        labelcolor=_INK,
        title=title or None,
        alignment="left",
    )
    return figure


def plot_front(front: Sequence[Any], best: Any, max_gap: float, unit: str) -> Figure:
    """Plot loss gap against planned time, for `surokit.tune`: predicted as a line, measured as dots, the chosen one by name."""
    from matplotlib import pyplot as plt

    figure, ax = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    figure.set_facecolor("white")
    plt.close(figure)
    ax.axhspan(-100 * max_gap, 100 * max_gap, color=_GRID, alpha=0.6, linewidth=0, label=f"within {100 * max_gap:g} %")
    ax.plot([c.time for c in front], [100 * c.gap for c in front], color=_SOFT, linewidth=1.0, label="predicted")
    names = list(dict.fromkeys(c.recipe.name for c in front))
    for number, name in enumerate(names):
        mine = [c for c in front if c.recipe.name == name]
        ax.plot(
            [c.time for c in mine],
            [100 * c.measured for c in mine],
            linestyle="none",
            marker=_MARKERS[number % len(_MARKERS)],
            color=_COLORS[number % len(_COLORS)],
            markeredgecolor="white",
            markersize=8,
            label=f"{name}, measured",
        )
    chosen = next(c for c in front if c.recipe == best)
    _dress(ax, "Loss gap of the batch to bf16, %")
    bottom, top = ax.get_ylim()
    ax.set_ylim(bottom - 0.2 * (top - bottom), top)
    ax.annotate(
        f"best: {best.name}, {chosen.quantized} layers",
        (chosen.time, 100 * chosen.measured),
        xytext=(0.02, 0.05),  # fast mixtures lie above: this corner is free
        textcoords="axes fraction",
        color=_INK,
        arrowprops={"arrowstyle": "-", "color": _SOFT, "linewidth": 0.8, "shrinkB": 5},
    )
    ax.set_xlabel(f"time of the linear layers: {unit}", color=_SOFT)
    ax.set_xlim(left=min(0.0, front[-1].time))
    figure.legend(loc="outside upper left", frameon=False, labelcolor=_INK, ncols=3)
    return figure


def plot_parity(rows: Sequence[Any], verdict: str) -> Figure:
    """Plot the differences of two models' outputs and gradients by depth, for `surokit.parity`, each over what rounding explains.

    rows: with module, forward, explained, gradient, gradient_explained, recipe. The first output that parts is ringed, or where all
    agree the first gradient in backward; a difference of zero has no place on the axis, which is logarithmic.
    """
    from matplotlib import pyplot as plt

    panes = [("Output", "forward", "explained"), ("Gradient", "gradient", "gradient_explained")]
    width = min(13.0, 8.0 + 0.03 * len(rows))
    figure, axes = plt.subplots(2, 1, figsize=(width, 6.4), layout="constrained", sharex=True)
    figure.set_facecolor("white")
    plt.close(figure)
    line = {"linewidth": 0.9, "markersize": 5.0 if len(rows) <= 60 else 3.0, "markeredgewidth": 0}
    ringed = False
    for ax, (title, name, bar) in zip(axes, panes):
        apart, explained = (np.array([getattr(row, each) for row in rows], dtype=float) for each in (name, bar))
        known = np.isfinite(apart) & (apart > 0)
        lowest = 0.3 * np.min(np.concatenate([apart[known], explained]))
        ax.fill_between(range(len(rows)), lowest, explained, color=_GRID, linewidth=0, label="explained by rounding")
        ax.plot(np.where(known, apart, np.nan), color=_COLORS[0], marker="o", label="difference", **line)
        if name == "forward" and any(np.isfinite(row.recipe) for row in rows):
            recipe = [row.recipe or np.nan for row in rows]
            ax.plot(recipe, color=_COLORS[1], marker="s", label="with quantized products", **line)
        parts = np.flatnonzero(known & (apart > explained))
        if len(parts) and not ringed:
            at = parts[0] if name == "forward" else parts[-1]
            ax.plot(at, apart[at], "o", markersize=11, markerfacecolor="none", markeredgecolor=_INK)
            ringed = True
        _dress(ax, f"{title}, relative difference")
        ax.set_yscale("log")
        ax.set_ylim(bottom=lowest)
        ax.set_xlabel("")
    _name_layers(axes[-1], [row.module for row in rows])
    if len(rows) > _NAMED_LAYERS:  # what stands before and behind the blocks has long names
        ticks = zip(axes[-1].get_xticks(), axes[-1].get_xticklabels())
        blocks = [(at, label.get_text()) for at, label in ticks if label.get_text().isdigit()]
        axes[-1].set_xticks([at for at, _ in blocks], [label for _, label in blocks], fontsize=8)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside upper left",
        frameon=False,
        labelcolor=_INK,
        ncols=3,
        title=textwrap.fill(verdict, int(12 * width)),
        title_fontsize=9,
        alignment="left",
    )
    return figure


def _name_layers(axes: Any, layers: Sequence[str]) -> None:
    """Label the axis with the layers' names while they fit; else with the number of each block, or of every so many blocks, where
    it begins."""
    axes.set_xlim(-0.5, len(layers) - 0.5)
    if len(layers) <= _NAMED_LAYERS:
        common = _common(layers)
        axes.set_xticks(
            range(len(layers)), [name[len(common) :] for name in layers], rotation=40, ha="right", fontsize=8
        )
        axes.set_xlabel(f"layer, in {common.rstrip('.')}" if common else "layer", color=_SOFT)
        return
    starts: dict[str, int] = {}
    for i, name in enumerate(layers):
        found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
        starts.setdefault(found[1] if found else name, i)
    every = -(-len(starts) // 32)
    shown = list(starts.items())[::every]
    axes.set_xticks([i for _, i in shown], [block for block, _ in shown], fontsize=8)
    axes.set_xlabel("block, from its first layer", color=_SOFT)


def _common(names: Sequence[str]) -> str:
    """Return the path that all names begin with, up to and with a dot."""
    first, last = min(names), max(names)
    same = next((i for i, (a, b) in enumerate(zip(first, last)) if a != b), min(len(first), len(last)))
    return first[: first.rfind(".", 0, same) + 1]


def _curve(name: str, run: Any) -> tuple[NDArray[np.float64], ...]:
    """Return (steps, losses, steps of the held-out points, their losses) of a run."""
    source = getattr(run, "records", run)
    frame = source.frame() if hasattr(source, "frame") else source
    columns = getattr(frame, "columns", frame)
    if "loss" not in columns:
        raise ValueError(f"The run {name!r} has no column 'loss'; pass a Session, a Live or a frame of records.")
    loss = np.asarray(frame["loss"], dtype=np.float64)
    step = np.asarray(frame["step"], dtype=np.float64) if "step" in columns else np.arange(1.0, len(loss) + 1)
    if not np.isfinite(loss).any():
        raise ValueError(f"The run {name!r} has no finite loss to draw; run some steps first.")
    if "eval_loss" not in columns:
        return step, loss, step[:0], loss[:0]
    held_out = np.asarray(frame["eval_loss"], dtype=np.float64)
    there = np.isfinite(held_out)
    return step, loss, step[there], held_out[there]


def _smooth(values: NDArray[np.float64], steps: int | None) -> NDArray[np.float64]:
    """Return the bias-corrected exponential average over about `steps` steps, by default that of `LossMean`; NaN where the value
    is not finite."""
    out, mean = np.full(len(values), np.nan), LossMean()
    total = weight = 0.0
    new = 1.0 / max(1.0, steps or 1.0)
    for i, value in enumerate(values.tolist()):
        if not np.isfinite(value):
            continue
        if steps is None:
            mean.add(value)
            out[i] = mean.value
        else:
            total += new * (value - total)
            weight += new * (1.0 - weight)
            out[i] = total / weight
    return out


def _last(values: NDArray[np.float64]) -> float:
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else float("nan")


def _dress(axes: Any, title: str) -> None:
    axes.set_facecolor("white")
    axes.set_title(title, loc="left", fontsize=11, color=_INK)
    axes.set_xlabel("step", color=_SOFT)
    axes.tick_params(colors=_SOFT, length=0)
    axes.grid(axis="y", color=_GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_SOFT)
