"""Runs compared: loss curves over each other, and the gap of each to a baseline, as one matplotlib figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from surokit.widgets.figure import PALETTE_LIGHT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INK, _SOFT, _GRID = "#1c1f23", "#5f6670", "#e4e7eb"


def plot_runs(runs: Mapping[str, Any], baseline: str | None = "bf16", smooth: int | None = None) -> Figure:
    """Left: smoothed loss by step, each step's own faint behind it. Right: the gap to the baseline, in percent of it.

    runs: name -> Session, Live, pandas frame (columns step and loss) or anything with `.records.frame()` or `.frame()`.
    baseline: name of the run that the others are held against; None leaves the right picture out. smooth: steps in the
    average, by default a fortieth of the run, at least ten (bias-corrected exponential average of that length).
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
    _dress(left, "Loss, smoothed (last value in the legend)")
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


def _curve(name: str, run: Any) -> tuple[NDArray[np.float64], ...]:
    """step, loss, and step, value of the held-out points."""
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
    """Bias-corrected exponential average over about `steps`; NaN where the value itself is not finite."""
    count = len(values)
    new = 1.0 / (max(10.0, count / 40) if steps is None else max(1.0, steps))
    out = np.full(count, np.nan)
    total = weight = 0.0
    for i, value in enumerate(values.tolist()):
        if np.isfinite(value):
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
