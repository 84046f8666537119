"""Write a dissection as a report in Markdown, with its picture and its raw cells beside it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surokit.dissection.cell import FORMAT, as_json
from surokit.places import make_folder, write_whole
from surokit.tables import markdown_table

if TYPE_CHECKING:
    from surokit.dissection.dissection import Dissection


def write(found: Dissection, folder: Path) -> Path:
    """Write report.md, step.png and cells.json in a folder, and return the first."""
    make_folder(folder, "a report")
    found.plot().savefig(folder / "step.png", dpi=150)
    write_whole(folder / "cells.json", as_json({"format": FORMAT, "cells": [asdict(cell) for cell in found.cells]}))
    lines = [f"# {found.title}", "", *_head(found), "", *sections(found), "", "![the step by parts](step.png)", ""]
    lines += ["Raw values: [cells.json](cells.json).", ""]
    file = folder / "report.md"
    write_whole(file, "\n".join(lines))
    return file


def sections(found: Dissection, heading: str = "##") -> list[str]:
    """Return the tables by step, phase and module as lines of Markdown, under headings of this level."""
    rows = found.text_rows()
    lines = [
        markdown_table(rows, header=found.header, right=range(1, len(found.header) - 1)),
        "",
        *(f"- {note}" for note in found.notes),
    ]
    phase = found.table("phase")
    if len(phase):
        shown = {name: words for name, words in _PHASES.items() if name in _ALWAYS or phase[name].any()}
        cells = [
            [row["cell"], row["phase"], *(f"{row[name]:.1f}" for name in shown)] for row in phase.to_dict("records")
        ]
        header = ["cell", "phase", *shown.values()]
        lines += ["", f"{heading} By phase, ms", "", markdown_table(cells, header=header, right=range(2, len(header)))]
    module = found.table("module")
    if len(module):
        cells = [[str(part), *(f"{value:.1f}" for value in row)] for part, row in zip(module.index, module.to_numpy())]
        cells.append(["step", *(f"{value:.1f}" for value in module.sum())])
        header = ["part", *map(str, module.columns)]
        lines += ["", f"{heading} By module, ms", "", markdown_table(cells, header=header, right=range(1, len(header)))]
    return lines


_PHASES = {
    "wall_ms": "wall",
    "busy_ms": "busy",
    "exposed_ms": "exposed communication",
    "idle_ms": "idle",
    "overlapped_ms": "overlapped communication",
}
_ALWAYS = ("wall_ms", "busy_ms", "idle_ms")  # the others where processes exchange data


def _head(found: Dissection) -> list[str]:
    head: dict[str, Any] = found.head
    versions = head.get("environment", {})
    return [
        f"{name}: {value}  "
        for name, value in {
            "Model": head.get("model"),
            "Steps that were timed": head.get("steps"),
            "Machine": head.get("machine"),
            "torch": versions.get("torch"),
            "Date": versions.get("date"),
        }.items()
        if value is not None
    ]
