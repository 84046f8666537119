"""Draw what came of the study of recipes: gaps with seeds and gates, and how they grow with tokens, a panel for each size."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surokit.bench.evidence_plan import BATCH, FROM_SCRATCH, GATES, LENGTH, SIZES
from surokit.bench.evidence_table import ALL, TRAINED, by_recipe, gaps
from surokit.bench.gap_picture import INK, ROW_INCHES, SOFT, GapRow, draw_gaps, in_percent
from surokit.bench.result import fingerprint, save_picture
from surokit.statistics import Interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# of recipes, told apart without red and green
_COLORS = ("#c3c8ce", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#5f6670")
_NOTHING = "No recipe has a run beside its baseline yet: the study has to go on before it can be drawn."


def digest(data: Mapping[str, Any]) -> str:
    """Return a fingerprint of the data that the pictures show."""
    return fingerprint({"gates": GATES, **{key: run["curve"] for key, run in data["evidence"].items()}})


def draw(data: Mapping[str, Any], path: Path) -> None:
    """Write a picture as PNG: how gaps grow where the file's name says "growth", else all gaps with their gates."""
    from matplotlib import rc_context

    with rc_context({"font.family": "DejaVu Sans", "font.size": 9}):
        picture = growth(data) if "growth" in path.stem else all_gaps(data)
        picture.draw_without_rendering()  # texts take their font from here
    save_picture(picture, path, digest(data))


def all_gaps(data: Mapping[str, Any]) -> Figure:
    """Draw a panel for training from scratch, one for fine-tuning and one for what is quantized alone; of a recipe a line of seeds
    for each size, and the mean over sizes."""
    shown: dict[str, list[GapRow]] = {}
    for (kind, recipe), of_sizes in by_recipe(data).items():
        whole = of_sizes[ALL]
        groups = [gaps(data, kind, size, recipe) for size in SIZES if size in of_sizes]
        mean = Interval(whole["low"], whole["mean"], whole["high"])
        shown.setdefault(kind, []).append(GapRow(recipe, groups, mean, whole["gate"], whole["verdict"]))
    if not shown:
        raise ValueError(_NOTHING)
    counts = [len(rows) for rows in shown.values()]
    picture = _blank(9, 0.7 * len(shown) + ROW_INCHES * sum(counts))
    panels = picture.subplots(len(shown), 1, squeeze=False, height_ratios=counts)[:, 0]
    for axes, (kind, rows) in zip(panels, shown.items(), strict=True):
        draw_gaps(axes, rows, f"{TRAINED[kind]}: held-out loss against bfloat16, % of it".capitalize())
    return picture


def growth(data: Mapping[str, Any]) -> Figure:
    """Draw the mean gap of each recipe from scratch over the tokens seen, with the lowest and the highest seed."""
    recipes = FROM_SCRATCH[1:]
    counts = {size: [len(gaps(data, "scratch", size, recipe)) for recipe in recipes] for size in SIZES}
    sizes = [size for size in SIZES if any(counts[size])]
    if not sizes:
        raise ValueError(_NOTHING)
    picture = _blank(3.6 * len(sizes) + 1.4, 3.6)
    panels = picture.subplots(1, len(sizes), squeeze=False, sharey=True)[0]
    for axes, size in zip(panels, sizes, strict=True):
        for recipe, color, count in zip(recipes, _COLORS, counts[size], strict=True):
            if not count:
                continue
            at = _steps_of(data, size, recipe)
            values = [[100 * gap for gap in gaps(data, "scratch", size, recipe, step)] for step in at]
            tokens = [step * BATCH * LENGTH / 1e6 for step in at]
            axes.fill_between(tokens, [*map(min, values)], [*map(max, values)], color=color, alpha=0.15, linewidth=0)
            axes.plot(tokens, [*map(statistics.mean, values)], "o-", color=color, markersize=3, label=recipe)
        axes.axhline(0, color=SOFT, linewidth=0.8)
        least, most = min(filter(None, counts[size])), max(counts[size])
        seeds = f"{least} to {most} seeds" if least < most else f"{most} seeds"
        axes.set_title(f"{size} parameters, {seeds}", loc="left", fontsize=10, color=INK)
        axes.set_xlabel("million tokens", color=SOFT)
        in_percent(axes, "y")
    panels[0].set_ylabel("gap to bfloat16, %: mean, lowest, highest", color=SOFT)
    handles = {name: handle for axes in panels for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    picture.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False)
    return picture


def _blank(width: float, height: float) -> Figure:
    """Return an empty figure of so many inches that a notebook shows: one of pyplot's, which does not keep it."""
    from matplotlib import pyplot

    picture = pyplot.figure(figsize=(width, height), layout="constrained")
    pyplot.close(picture)
    return picture


def _steps_of(data: Mapping[str, Any], size: str, recipe: str) -> list[int]:
    """Return the steps at which all runs of a recipe were measured: one that changes was only after its change."""
    curves = [
        run["curve"]
        for run in data["evidence"].values()
        if (run["kind"], run["size"], run["recipe"]) == ("scratch", size, recipe)
    ]
    return sorted(set.intersection(*({int(row[0]) for row in curve} for curve in curves)))
