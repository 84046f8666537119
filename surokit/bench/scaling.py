"""Plan how runs that others published scale, from the smallest number of GPUs that they report, beside what they measured.

The runs are in published_scaling.csv, each with its source: several numbers of GPUs with the same micro-batch on each. The plan
is that of `Scaling.planned`: what a rank takes for a token on the smallest number is taken as it was measured, and the plan says
how much more it takes on others. Nothing is fitted.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from importlib.resources import files
from itertools import groupby
from statistics import median
from typing import Any

from surokit.efficiency.scaling import Rate, Scaling
from surokit.planner import Plan
from surokit.tables import markdown_table

NODE = 8
#: GB/s that one GPU has between nodes: eight links of 400 Gb/s a node of H100s; 4 x 100 Gb/s, as the source of the A100s says.
BETWEEN_GB_S = {"H100": 50.0, "A100": 6.25, "RTX4090": None}
ASSUMED = {
    "rates": "the datasheet's for all, so that computing hides as little of the exchange as it can",
    "between nodes": "50 GB/s for each H100 (the source does not say), 6.25 GB/s for each A100 (4 x 100 Gb/s a node, as it says)",
    "layers": "MPT's as gated ones of as many parameters; ZeRO-1 over all GPUs where the source divides within a node",
}


def runs() -> list[list[dict[str, Any]]]:
    """Return the published runs: for each the rows of its numbers of GPUs, ascending."""
    text = files("surokit.bench").joinpath("published_scaling.csv").read_text(encoding="utf-8")
    rows = [{name: _value(text) for name, text in row.items()} for row in csv.DictReader(io.StringIO(text))]
    return [[*group] for _, group in groupby(rows, lambda row: (row["run"], row["gpu"]))]


def _value(text: str) -> Any:
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number


def run() -> dict[str, Any]:
    """Return the raw result: a row for each number of GPUs beyond the first of each run."""
    from surokit.environment import environment

    return {
        "benchmark": "planned from the smallest number of GPUs, beside what others measured",
        "environment": environment(),
        "assumed": ASSUMED,
        "scaling": [row for rows in runs() for row in _beside(rows)],
    }


def _beside(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    first, *more = rows
    by_gpus = {row["gpus"]: row for row in rows}
    measured = Scaling([Rate(row["gpus"], row["tokens_per_s"]) for row in rows])
    planned = Scaling(measured.rates[:1]).planned(lambda n: _plan(by_gpus[n]), [row["gpus"] for row in more])
    return [
        {
            **{name: row[name] for name in ("run", "gpu", "source", "gpus")},
            "since": first["gpus"],
            "measured": measured.efficiency(row["gpus"]),
            "planned": planned.efficiency(row["gpus"]),
        }
        for row in more
    ]


def _plan(row: Mapping[str, Any]) -> Plan:
    import surokit as sk

    shape = {name: row[name] for name in ("layers", "width", "heads", "kv_heads", "ffn", "vocab")}
    return sk.plan(
        sk.DecoderConfig(**shape, max_length=row["length"]),
        gpu=row["gpu"],
        between_gb_s=BETWEEN_GB_S[row["gpu"]] if row["gpus"] > NODE else None,
        **{name: row[name] for name in ("gpus", "recipe", "recompute", "zero", "batch", "length", "accumulate")},
    )


def table(data: Mapping[str, Any]) -> str:
    """Make Markdown: the efficiency of each run on its largest number of GPUs, and how far the plans are off in all."""
    rows = data["scaling"]
    last = {(row["run"], row["gpu"]): row for row in rows}.values()
    shown = [
        [
            row["run"],
            row["gpu"],
            f"{row['since']} → {row['gpus']}",
            f"{row['measured']:.1%}",
            f"{row['planned']:.1%}",
            row["source"],
        ]
        for row in last
    ]
    off = sorted(row["planned"] - row["measured"] for row in rows)
    near = sum(abs(x) <= 0.05 for x in off)
    words = (
        f"{len(rows)} numbers of GPUs in {len(last)} runs. Planned minus measured efficiency, in points: median "
        f"{100 * median(off):+.1f}, from {100 * off[0]:+.1f} to {100 * off[-1]:+.1f}; {near} of {len(off)} within 5."
    )
    assumed = "\n".join(f"- {name}: {text}" for name, text in data["assumed"].items())
    header = ("run", "GPU", "GPUs", "measured by others", "planned", "source")
    return f"{markdown_table(shown, header=header)}\n\n{words}\n\nAssumed:\n\n{assumed}"
