"""This module draws a race with matplotlib: loss against steps, tokens, own time or dollars; and each turn's speed beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from surokit.racing.runs import Floats, Run, rounds_of
from surokit.racing.statistics import smoothed
from surokit.widgets.figure import PALETTE_LIGHT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from surokit.racing.outcome import Outcome
    from surokit.racing.result import RaceResult

_INK, _SOFT, _GRID = "#1c1f23", "#5f6670", "#e4e7eb"
_AXES = ("steps", "tokens", "time", "usd")
_UNITS = ((3600.0, "hours"), (60.0, "minutes"), (0.0, "seconds"))


def plot(race: RaceResult, x: str) -> Figure:
    """Plot the smoothed loss of every run, each step faint behind it, held-out losses as dots, the target or the goal as a line
    with where it was reached; where a run reached an accuracy, which is no loss, stands on its own line. Right: tokens/s over the
    baseline's, turn by turn, with the interval. Returns the figure, not yet shown.

    Before every run has had a turn it draws what is known and says what is missing. Raises ValueError for an axis that there is
    not, and for "usd" without a price.
    """
    if x not in _AXES:
        raise ValueError(f"plot(x={x!r}): the axis is one of {', '.join(_AXES)}.")
    price = race.settings["usd_per_gpu_hour"]
    if x == "usd" and price is None:
        raise ValueError('plot(x="usd") needs a price: race(usd_per_gpu_hour=...).')
    runs = race.runs
    found = race.figures(runs)

    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10.0, 3.9), layout="constrained", gridspec_kw={"width_ratios": [3, 2]}
    )
    figure.set_facecolor("white")
    plt.close(figure)  # the caller shows what is returned
    longest_s = max(float(np.nansum(run.warm_seconds())) for run in runs.values())
    size, unit = next((size, unit) for size, unit in _UNITS if longest_s >= 2 * size)
    until, what = race.settings.get("until"), "goal" if found.has_goal else "target"
    level = found.target if until is None else math.nan if until["task"] else until["at"]
    means, missing = [], []
    drawn = [name for name in runs if name != race.twin]  # whose losses are the baseline's, bit by bit
    for number, name in enumerate(drawn):
        run, color = runs[name], PALETTE_LIGHT[number % len(PALETTE_LIGHT)]
        at = _along(run, x, size or 1.0, price)
        if not np.isfinite(at).any():
            missing.append(name)
        mean = smoothed(run.steps["loss"], found.span)
        means.append(mean[found.span - 1 :])
        broad = {"linewidth": 4.5, "alpha": 0.45} if name == race.baseline else {"linewidth": 1.6}
        left.plot(at, run.steps["loss"], color=color, alpha=0.16, linewidth=0.8)
        last = "" if math.isnan(found[name].loss) else f"  {found[name].loss:.3f}"
        left.plot(at, mean, color=color, label=f"{name}{last}", solid_capstyle="round", **broad)
        for step, loss in run.held_out:
            there = np.flatnonzero(run.steps["step"] == step)
            left.plot(at[there], [loss] * len(there), "o", color=color, markersize=6, markeredgecolor="white")
        reached = found[name].to_target
        if reached is not None:
            last_step = reached[0] - 1
            height = mean[last_step] if math.isnan(level) else level
            left.plot(at[last_step], height, "v", color=color, markersize=8, markeredgecolor="white", zorder=5)
            means.append(np.array([height]))  # to be in the picture, wherever the line is
    if missing:
        timed = x in ("time", "usd") and any(len(runs[name].steps) for name in missing)
        why = "no time before the first turn" if timed else "no step yet"
        instead = '\nplot(x="steps") shows the losses' if timed else ""
        _say(left, f"{', '.join(missing)}: {why}{instead}")
    if any(runs[name].held_out for name in drawn):
        left.plot([], [], "o", color=_SOFT, markersize=6, markeredgecolor="white", label="held out")
    if any(found[name].to_target for name in drawn):
        left.plot([], [], "v", color=_SOFT, markersize=8, markeredgecolor="white", label=f"{what} reached")
    if not math.isnan(level):
        left.axhline(level, color=_SOFT, linewidth=0.8, linestyle=(0, (4, 3)))
        left.annotate(
            f"{what} {level:.3f}",
            (0.01, level),
            xycoords=("axes fraction", "data"),
            color=_SOFT,
            fontsize=8,
            va="bottom",
        )
    values = np.concatenate([m[np.isfinite(m)] for m in means])
    if len(values):
        low, high = float(values.min()), float(values.max())
        left.set_ylim(low - 0.06 * (high - low) - 1e-9, high + 0.06 * (high - low) + 1e-9)
    labels = {"steps": "step", "tokens": "tokens", "time": f"own time, {unit}", "usd": "own time, USD"}
    _dress(left, "Loss, smoothed (last value in the legend)", labels[x])
    if x == "tokens":
        left.xaxis.set_major_formatter(lambda value, _: _short(value))
    left.legend(frameon=False, labelcolor=_INK, loc="upper right")
    _turns(race, runs, found, right, drawn)
    return figure


def _say(axes: Any, words: str) -> None:
    """Write what is missing into the lower left corner of a picture, where a falling loss leaves room."""
    axes.text(0.02, 0.03, words, transform=axes.transAxes, va="bottom", color=_SOFT, fontsize=9)


def _along(run: Run, x: str, size: float, price: float | None) -> Floats:
    if x == "steps":
        return run.steps["step"]
    if x == "tokens":
        return np.cumsum(run.steps["tokens"])
    seconds = np.cumsum(run.warm_seconds())
    return seconds / size if x == "time" else seconds * (price or 0.0) / 3600


def _turns(race: RaceResult, runs: Mapping[str, Run], found: Outcome, axes: Any, drawn: list[str]) -> None:
    """Draw every round's ratio as a dot, its mean and interval at the right; the twin in grey."""
    rounds = rounds_of(list(runs.values()))
    base = {turn.round: turn.rate for turn in runs[race.baseline].whole_turns}
    axes.axhline(1.0, color=PALETTE_LIGHT[0], linewidth=4.5, alpha=0.45)
    others = [name for name in runs if name != race.baseline] if rounds else []
    if not rounds:
        _say(axes, "No round is whole yet:\na ratio takes a whole turn of every run")
    last = len(rounds)
    wide = max(0.6, 0.07 * last)  # width of the place of each mean
    for number, name in enumerate(others):
        color = "#8A8F98" if name == race.twin else PALETTE_LIGHT[drawn.index(name) % len(PALETTE_LIGHT)]
        rates = {turn.round: turn.rate for turn in runs[name].whole_turns}
        axes.plot(
            range(1, last + 1),
            [rates[r] / base[r] for r in rounds],
            "o-",
            color=color,
            markersize=3,
            linewidth=0.7,
            alpha=0.7,
        )
        ratio, at = found[name].ratio, last + wide * (1 + number)
        predicted = found[name].predicted
        said = "" if predicted is None or name == race.twin else f", predicted {predicted:.2f}"
        errors = [[ratio.mid - ratio.low], [ratio.high - ratio.mid]] if ratio.known else None
        axes.errorbar(
            at, ratio.mid, yerr=errors, fmt="s", color=color, capsize=4, markersize=6, label=f"{name}  {ratio}{said}"
        )
        if predicted is not None and name != race.twin:
            axes.plot(
                at + 0.55 * wide,
                predicted,
                marker="_",
                markersize=8,
                markeredgewidth=2,
                color=color,
                linestyle="none",
            )
    _dress(axes, f"tokens/s over {race.baseline}'s, by turn", "round; at the right mean, interval and prediction")
    axes.set_xticks(range(1, last + 1, max(1, math.ceil(last / 8))))
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top + 0.09 * (1 + len(axes.get_legend_handles_labels()[1])) * (top - bottom))
    if others:
        axes.legend(frameon=False, labelcolor=_INK, loc="upper left", fontsize=8)


def _short(value: float) -> str:
    for size, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{sign}"
    return f"{value:g}"


def _dress(axes: Any, title: str, x: str) -> None:
    axes.set_facecolor("white")
    axes.set_title(title, loc="left", fontsize=11, color=_INK)
    axes.set_xlabel(x, color=_SOFT)
    axes.tick_params(colors=_SOFT, length=0)
    axes.grid(axis="y", color=_GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_SOFT)
