"""Show the accuracy study as a table and a picture: held-out loss of each recipe against bfloat16 over paired seeds.

The raw file, docs/measurements/recipes.json, comes from tests/soak/test_recipes.py: a loss for every seed and recipe, and for
each recipe the interval of the mean relative gap with the gate that it is held to. Recipes of products are paired with "bf16",
those that store weights with "bf16-lora". Everything here follows from that file: the same file gives the same bytes.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surokit.bench.result import fingerprint, markdown, save_picture
from surokit.recipe import recipes
from surokit.statistics import judged

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASELINES = ("bf16", "bf16-lora")
_INK, _SOFT, _BAND = "#1c1f23", "#5f6670", "#e4e7eb"
_COLORS = {"inside": "#0072B2", "undecided": "#B58900", "outside": "#D55E00", "running": "#8A8F98"}


def names(data: Mapping[str, Any]) -> list[str]:
    """Return the recipes of the study in the file's order, baselines left out."""
    return [name for name in data["runs"][0] if name not in ("seed", *BASELINES)]


def baseline(name: str) -> str:
    """Return the run that a recipe is compared with: the one with the same steps and the same trained parameters."""
    return "bf16-lora" if name in recipes and recipes[name].frozen_base else "bf16"


def gaps(data: Mapping[str, Any], name: str) -> list[float]:
    """Return the relative gap of each seed."""
    return [run[name] / run[baseline(name)] - 1 for run in data["runs"]]


def verdict(interval: Mapping[str, float] | None) -> str:
    """Say where the interval lies: "inside" the gate, "outside" it, "undecided" across its edge; "running" without one."""
    if interval is None:
        return "running"
    return judged(interval["low"], interval["high"], interval["gate"])


def table(data: Mapping[str, Any]) -> str:
    """Make a Markdown table: one row a recipe, the mean gap with its interval, the gate, and whether it holds."""
    head = ["recipe", "against", "held-out loss", "mean gap", "95 % interval", "gate", "interval is"]
    rows: list[Sequence[str]] = []
    for name in names(data):
        interval = data["intervals"].get(name)
        rows.append(
            [
                f"`{name}`",
                f"`{baseline(name)}`",
                f"{statistics.mean(run[name] for run in data['runs']):.4f}",
                f"{100 * statistics.mean(gaps(data, name)):+.3f} %",
                f"{100 * interval['low']:+.3f} to {100 * interval['high']:+.3f} %" if interval else "",
                f"{100 * interval['gate']:g} %" if interval else "",
                f"{verdict(interval)}" if interval else "not known before the last seed",
            ]
        )
    steps = data["steps"]
    settings = {
        "paired seeds": len(data["runs"]),
        "steps": " and ".join(f"{n} {kind}" for kind, n in steps.items()) if isinstance(steps, Mapping) else steps,
        "model:": data["settings"],
    }
    return markdown({**data, "benchmark": data["study"], "settings": settings}, head, rows)


def digest(data: Mapping[str, Any]) -> str:
    """Return a fingerprint of the data that the picture shows."""
    shown = {"runs": data["runs"], "intervals": data["intervals"]}
    return fingerprint(shown)


def draw(data: Mapping[str, Any], path: Path) -> None:
    """Write the picture as PNG, with the fingerprint of its data."""
    save_picture(figure(data), path, digest(data))


def figure(data: Mapping[str, Any]) -> Figure:
    """Draw a row a recipe: every seed's gap as a faint dot, the mean with its interval, and the gate as a band."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Picture

    shown = names(data)
    intervals = {name: data["intervals"].get(name) for name in shown}
    points = {name: [100 * gap for gap in gaps(data, name)] for name in shown}
    with rc_context({"font.family": "DejaVu Sans", "font.size": 9}):
        picture = Picture(figsize=(9, 0.9 + 0.42 * len(shown)), layout="constrained")
        axes = picture.add_subplot()
        reach = [x for values in points.values() for x in values]
        reach += [100 * i[end] for i in intervals.values() if i for end in ("low", "high")]
        reach += [100 * i["gate"] for i in intervals.values() if i]
        low, high = min(reach), max(reach)
        low = min(low, -0.2 * high)
        for y, name in enumerate(shown):
            interval, color = intervals[name], _COLORS[verdict(intervals[name])]
            mean = statistics.mean(points[name])
            words = f"{mean:+.3f} %"
            if interval:
                gate = 100 * interval["gate"]
                axes.barh(y, 2 * gate, left=-gate, height=0.72, color=_BAND)
                axes.plot(
                    [100 * interval["low"], 100 * interval["high"]],
                    [y, y],
                    color=color,
                    linewidth=5,
                    solid_capstyle="butt",
                )
                words += f"   {100 * interval['low']:+.3f} to {100 * interval['high']:+.3f}   gate {gate:g}"
            axes.plot(points[name], [y] * len(points[name]), "o", color=_INK, alpha=0.25, markersize=3.5, mew=0)
            axes.plot(mean, y, "D", color="white", markeredgecolor=color, markeredgewidth=1.8, markersize=6)
            axes.annotate(
                words, (1.01, y), xycoords=("axes fraction", "data"), va="center", color=_INK, annotation_clip=False
            )
        axes.axvline(0, color=_SOFT, linewidth=0.8)
        axes.set_xlim(low - 0.03 * (high - low), high + 0.03 * (high - low))
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.set_yticks(range(len(shown)), shown, color=_INK)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:+g}" if abs(value) > 1e-9 else "0")
        axes.set_title(
            "Held-out loss against bfloat16, % of it: seeds, mean, 95 % interval; the grey band is the gate",
            loc="left",
            fontsize=10,
            color=_INK,
        )
        axes.tick_params(colors=_SOFT, length=0)
        axes.tick_params(axis="y", labelcolor=_INK)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(_SOFT)
        picture.draw_without_rendering()  # texts take their font from here
    return picture
