"""Show the accuracy study as a table and a picture: held-out loss of each recipe against bfloat16 over paired seeds.

The raw file, docs/measurements/recipes.json, comes from tests/soak/test_recipes.py: a loss for every seed and recipe, and for
each recipe the interval of the mean relative gap with the gate that it is held to. Recipes of products are paired with "bf16",
those that store weights with "bf16-lora". Everything here follows from that file: the same file gives the same bytes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surokit.bench.gap_picture import ROW_INCHES, GapRow, draw_gaps
from surokit.bench.result import fingerprint, markdown, save_picture
from surokit.recipe import recipes
from surokit.statistics import Interval, judged

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASELINES = ("bf16", "bf16-lora")


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
    """Say where the interval lies: "inside" the gate, "outside" it, "undecided" across its edge; "" without one."""
    if interval is None:
        return ""
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
                verdict(interval) or "not known before the last seed",
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

    rows = []
    for name in names(data):
        interval, values = data["intervals"].get(name), gaps(data, name)
        low, high = (interval["low"], interval["high"]) if interval else (math.nan, math.nan)
        gate = interval["gate"] if interval else None
        rows.append(GapRow(name, [values], Interval(low, statistics.mean(values), high), gate, verdict(interval)))
    with rc_context({"font.family": "DejaVu Sans", "font.size": 9}):
        picture = Picture(figsize=(9, 0.9 + ROW_INCHES * len(rows)), layout="constrained")
        draw_gaps(
            picture.add_subplot(),
            rows,
            "Held-out loss against bfloat16, % of it: seeds, mean, 95 % interval; the grey band is the gate",
        )
        picture.draw_without_rendering()  # texts take their font from here
    return picture
