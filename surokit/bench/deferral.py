"""What deferral costs, as a table and a picture: held-out loss of ZenFlow's ways against AdamW over paired seeds.

The raw file, docs/measurements/deferral.json, comes from tests/soak/test_offload.py: for every seed the held-out loss of every way.
A way is named by what it is: `zenflow k=.1 S=4 overlap`, `... time-corrected`, `... lr x2`. Everything here follows from that file.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surokit.bench.result import markdown
from surokit.racing.statistics import student_t

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
    "adamw lr x2",
    "adamw lr x0.5",
)


def options_of(name: str) -> dict[str, Any]:
    """What a name of the study stands for: the class as "optimizer", its options, and "lr", a factor of the study's rate."""
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


def gaps(data: Mapping[str, Any], name: str) -> list[float]:
    """Of each seed: loss over AdamW's, less 1."""
    return [run[name] / run[BASELINE] - 1 for run in data["deferral"]]


def names(data: Mapping[str, Any]) -> list[str]:
    return [name for name in data["deferral"][0] if name != "seed"]


def interval(data: Mapping[str, Any], name: str) -> tuple[float, float, float]:
    """(mean, low, high) of the paired gaps: 95 %, Student's t; low and high are nan below two seeds."""
    found = gaps(data, name)
    mean, n = statistics.mean(found), len(found)
    half = student_t(0.975, n - 1) * statistics.stdev(found) / math.sqrt(n) if n > 1 else math.nan
    return mean, mean - half, mean + half


def table(data: Mapping[str, Any]) -> str:
    """A Markdown table: a row a way, its held-out loss, and the mean gap to AdamW with its interval."""
    rows: list[Sequence[str]] = []
    for name in names(data):
        mean, low, high = interval(data, name)
        gap = "" if name == BASELINE else f"{mean:+.2%}"
        span = "" if name == BASELINE else f"{low:+.2%} to {high:+.2%}"
        rows.append([name, f"{statistics.mean(run[name] for run in data['deferral']):.4f}", gap, span])
    return markdown(data, ["optimizer", "held-out loss", "gap to adamw", "95 % interval"], rows)


def digest(data: Mapping[str, Any]) -> str:
    """A fingerprint of what the picture shows."""
    return hashlib.sha256(json.dumps(data["deferral"], sort_keys=True).encode()).hexdigest()


def draw(data: Mapping[str, Any], path: Path) -> None:
    """Write the picture as PNG; it carries the fingerprint of its data and neither date nor version."""
    figure(data).savefig(path, dpi=110, metadata={"Software": None, "Description": digest(data)})


_COLORS = {"": "#0072B2", " overlap": "#D55E00", " time-corrected": "#009E73"}
_INK, _SOFT = "#1c1f23", "#5f6670"


def figure(data: Mapping[str, Any]) -> Figure:
    """Left: the gap against the window S at k=.1; right: against the share k at S=4. Seeds, mean, interval."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Picture

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
                mean, low, high = ([100 * value for value in column] for column in zip(*spans))
                axes.vlines(x, low, high, color=color, linewidth=3, alpha=0.6)
                axes.plot(
                    x, mean, "D-", color=color, markersize=5, linewidth=1.2, label=way.strip() or "without overlap"
                )
            axes.axhline(0, color=_SOFT, linewidth=0.8)
            axes.set_xticks(range(len(sizes)), list(sizes))
            axes.set_xlabel(label, color=_SOFT)
            axes.tick_params(colors=_SOFT, length=0)
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:+g} %")
        first = picture.axes[0]
        first.set_title("Held-out loss over AdamW's: seeds, mean, 95 % interval", loc="left", fontsize=10, color=_INK)
        first.legend(frameon=False, labelcolor=_INK, loc="upper left")
        picture.draw_without_rendering()  # texts take their font from here
    return picture
