"""Show the cost of deferral as a table and a picture: held-out loss of ZenFlow's ways against AdamW over paired seeds.

The raw files, docs/measurements/deferral.json from random weights and deferral-finetuning.json from trained ones, come from
tests/soak/test_offload.py: for every seed the held-out loss of every way, and the share of the gradient's squared norm that its
hot columns had. A way is named by its options: `zenflow k=.1 S=4 overlap`, `... time-corrected`, `... lr x2`; the rate that is
doubled is AdamW's best in a sweep on a seed of its own. Everything here follows from such a file.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surokit.bench.result import fingerprint, markdown, save_picture
from surokit.statistics import student_t

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASELINE = "adamw"
_SIZES = ("k=.05 S=4", "k=.1 S=2", "k=.1 S=4", "k=.1 S=8", "k=.1 S=16", "k=.3 S=4")
_WAYS = ("", " overlap", " time-corrected")
NAMES = (
    BASELINE,
    "offload",
    *(f"zenflow {size}{way}" for size, way in product(_SIZES, _WAYS)),
    "zenflow k=.1 S=auto overlap",
    "zenflow k=.1 S=4 overlap lr x2",
    "zenflow k=.1 S=4 overlap lr x4",
    "zenflow k=.1 S=4 time-corrected lr x0.5",
    "adamw lr x2",
    "adamw lr x0.5",
)


def options_of(name: str) -> dict[str, Any]:
    """Return the options that a name of the study stands for: the class as "optimizer", its options, and "lr", a factor of
    the study's rate."""
    options: dict[str, Any] = {
        "optimizer": {"adamw": "AdamW", "offload": "OffloadAdamW"}.get(name.split()[0], "ZenFlow")
    }
    rate = re.search(r"lr x([\d.]+)", name)
    options["lr"] = float(rate[1]) if rate else 1.0
    if options["optimizer"] == "ZenFlow":
        found = re.search(r"k=([\d.]+) S=(\w+)", name)
        assert found is not None, name
        options |= {
            "topk_ratio": float(found[1]),
            "update_interval": found[2] if found[2] == "auto" else int(found[2]),
            "overlap_step": "overlap" in name,
            "cold_update": "time-corrected" if "time-corrected" in name else "deepspeed",
        }
    return options


def tuned_rate(data: Mapping[str, Any]) -> float:
    """Return the rate of the sweep that had AdamW's lowest held-out loss."""
    return float(min(data["sweep"], key=data["sweep"].__getitem__))


def gaps(data: Mapping[str, Any], name: str) -> list[float]:
    """Return for each seed that has both: loss over AdamW's, less 1."""
    losses = [run["loss"] for run in data["deferral"]]
    return [each[name] / each[BASELINE] - 1 for each in losses if name in each]


def names(data: Mapping[str, Any]) -> list[str]:
    """Return the names of the ways that were measured, in the study's order; AdamW first."""
    return [name for name in NAMES if name in data["deferral"][0]["loss"]]


def interval(data: Mapping[str, Any], name: str) -> tuple[float, float, float]:
    """Return (mean, low, high) of the paired gaps: 95 %, Student's t; low and high are nan below two seeds."""
    found = gaps(data, name)
    middle, n = statistics.mean(found), len(found)
    half = student_t(0.975, n - 1) * statistics.stdev(found) / math.sqrt(n) if n > 1 else math.nan
    return middle, middle - half, middle + half


def mean(data: Mapping[str, Any], what: str, name: str) -> float:
    """Return the mean of a way's "loss" or "energy" over the seeds that have it; nan for none."""
    found = [run[what][name] for run in data["deferral"] if name in run[what]]
    return statistics.mean(found) if found else math.nan


def table(data: Mapping[str, Any]) -> str:
    """Make a Markdown table: a row a way, its held-out loss, the mean gap to AdamW with its interval, the energy in hot
    columns. Under it stand the loss before the first step, and the sweep that the rate is from."""
    rows: list[Sequence[str]] = []
    for name in names(data):
        gap, low, high = interval(data, name)
        energy = mean(data, "energy", name)
        cells = [name, f"{mean(data, 'loss', name):.4f}"]
        cells += ["", ""] if name == BASELINE else [f"{gap:+.2%}", f"{low:+.2%} to {high:+.2%}"]
        rows.append([*cells, "" if math.isnan(energy) else f"{energy:.1%}"])
    head = ["optimizer", "held-out loss", "gap to adamw", "95 % interval", "energy in hot columns"]
    seeds = {"paired seeds": len(data["deferral"])}
    shown = {**data, "settings": {**data["settings"], **seeds}}
    at_first = statistics.mean(run["at first"] for run in data["deferral"])
    sweep = ", ".join(f"{loss:.4f} at {rate}" for rate, loss in data["sweep"].items())
    note = f"Held-out loss before the first step: {at_first:.4f}. AdamW's on another seed: {sweep}."
    return f"{markdown(shown, head, rows)}\n\n{note}"


def digest(data: Mapping[str, Any]) -> str:
    """Return a fingerprint of the data that the picture shows."""
    return fingerprint(data["deferral"])


def draw(data: Mapping[str, Any], path: Path) -> None:
    """Write the picture as PNG, with the fingerprint of its data."""
    save_picture(figure(data), path, digest(data))


_COLORS = {"": "#0072B2", " overlap": "#D55E00", " time-corrected": "#009E73"}
_INK, _SOFT = "#1c1f23", "#5f6670"
_TICKS = (-5, -2, -1, 0, 1, 2, 5, 10, 20, 50)  # percent


def figure(data: Mapping[str, Any]) -> Figure:
    """Draw the gap against the window S at k=.1 (left) and against the share k at S=4 (right): seeds, mean, interval."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Picture
    from matplotlib.ticker import NullLocator

    panels = {
        "window S, at k = 0.1": {size.split("S=")[1]: size for size in _SIZES if "k=.1 " in size},
        "share of hot columns k, at S = 4": {size[2:].split()[0]: size for size in _SIZES if size.endswith("S=4")},
    }
    with rc_context({"font.family": "DejaVu Sans", "font.size": 9}):
        picture = Picture(figsize=(9, 3.6), layout="constrained")
        for axes, (label, sizes) in zip(picture.subplots(1, 2, sharey=True), panels.items()):
            for offset, (way, color) in zip((-0.18, 0.0, 0.18), _COLORS.items()):
                shown = [f"zenflow {size}{way}" for size in sizes.values()]
                x = [i + offset for i in range(len(shown))]
                spans = [interval(data, name) for name in shown]
                for at, name in zip(x, shown):
                    each = [100 * gap for gap in gaps(data, name)]
                    axes.plot([at] * len(each), each, "o", color=color, alpha=0.3, markersize=3, mew=0)
                middle, low, high = ([100 * value for value in column] for column in zip(*spans))
                axes.vlines(x, low, high, color=color, linewidth=3, alpha=0.6)
                axes.plot(
                    x, middle, "D-", color=color, markersize=5, linewidth=1.2, label=way.strip() or "without overlap"
                )
            axes.axhline(0, color=_SOFT, linewidth=0.8)
            axes.set_xticks(range(len(sizes)), list(sizes))
            axes.set_xlabel(label, color=_SOFT)
            axes.tick_params(colors=_SOFT, length=0)
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.set_yscale("symlog", linthresh=1)  # the ways differ by fifty times
            axes.margins(y=0.02)
            limits = axes.get_ylim()
            axes.set_yticks(_TICKS)
            axes.set_ylim(limits)
            axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:+g} %" if value else "0")
        first = picture.axes[0]
        title = f"Held-out loss over AdamW's, from {data['settings']['from']}: seeds, mean, 95 % interval"
        first.set_title(title, loc="left", fontsize=10, color=_INK)
        first.legend(labelcolor=_INK, loc="lower right", framealpha=1, edgecolor="none")
        picture.draw_without_rendering()  # texts take their font from here
    return picture
