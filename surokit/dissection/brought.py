"""Read cells that `dissect` did not measure: a JSON file that anyone can write, or a log of Megatron-LM."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from surokit.dissection.cell import FORMAT, Cell

_LINE = re.compile(r"elapsed time per iteration \(ms\):\s*([\d.]+)")
_LOSS = re.compile(r"lm loss:\s*([\d.Ee+-]+)")
_BATCH = re.compile(r"global batch size:\s*(\d+)")
_LENGTH = re.compile(r"^\s*seq_length\s*\.+\s*(\d+)", re.M)
_WORLD = re.compile(r"^\s*world_size\s*\.+\s*(\d+)", re.M)
_MEMORY = re.compile(r"max allocated:\s*([\d.]+)")
FIRST = 2  # iterations of a log that count as warm-up


def brought(path: Path) -> list[Cell]:
    """Return the cells of a file, marked with where they come from. FileNotFoundError, or ValueError for a file that holds none."""
    if not path.is_file():
        raise FileNotFoundError(f"add({str(path)!r}): there is no such file, and no dissection's folder.")
    text = path.read_text(errors="replace")
    if _LINE.search(text):
        return [_of_megatron(text, path)]
    try:
        found = json.loads(text)
        rows = found["cells"] if isinstance(found, Mapping) else found
        if isinstance(found, Mapping) and found.get("format", FORMAT) != FORMAT:
            raise ValueError(f"it has the format {found['format']}, and this package reads {FORMAT}")
        return [_of_row(row, found, path) for row in rows]
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"add({str(path)!r}): the file is no log of Megatron-LM, and no JSON with cells of name, tokens_per_s or step_ms, and "
            f"tokens_per_step ({error})."
        ) from error


def _of_row(row: Mapping[str, Any], whole: Any, path: Path) -> Cell:
    """Return the cell of a row: name, step_ms (one or several of a run) or tokens_per_s, tokens_per_step, optional peak_gib, loss,
    setting."""
    if "state" in row:  # as Cell.save and a report have it
        if row.get("profile") and "activities" not in row["profile"]:
            raise ValueError(f"the cell {row.get('name')!r} is of an older version")
        return replace(Cell.of(row), origin=row.get("origin") or str(path))
    work = dict(row.get("work") or {})
    tokens = row.get("tokens_per_step") or work.get("tokens_per_step")
    given = row.get("step_ms") or []
    steps = given if isinstance(given, list | tuple) else [given]
    if tokens and (steps or row.get("tokens_per_s")):
        steps = [float(np.mean(steps))] if steps else [1e3 * tokens / row["tokens_per_s"]]
        work["tokens_per_step"] = tokens
    elif row.get("tokens_per_s"):
        work["tokens_per_s"], steps = row["tokens_per_s"], []
    else:
        raise ValueError(
            f"the cell {row.get('name', row)!r} has neither tokens_per_s, nor step_ms with tokens_per_step"
        )
    machine = row.get("machine") or (whole.get("machine") if isinstance(whole, Mapping) else "") or path.stem
    peak = row.get("peak_gib")
    memory = {**(row.get("memory") or {}), **({"peak": peak * 2**30} if peak else {})}
    losses = row.get("losses") or ([row["loss"]] if row.get("loss") is not None else [])
    return Cell(
        str(row["name"]),
        "measured",
        dict(row.get("setting") or {}),
        machine=str(machine),
        origin=str(path),
        work=work,
        step_ms=tuple(steps),
        losses=tuple(float(loss) for loss in losses),
        memory=memory,
    )


def _of_megatron(text: str, path: Path) -> Cell:
    """Return the cell of a log: time of each iteration after the first two, the global batch, and its length from the arguments."""
    batch, length, world = (pattern.search(text) for pattern in (_BATCH, _LENGTH, _WORLD))
    if batch is None or length is None:
        raise ValueError(
            f"add({str(path)!r}): the log of Megatron-LM has no 'global batch size' or no 'seq_length' among its arguments: keep "
            "its first lines."
        )
    steps = [float(ms) for ms in _LINE.findall(text)][FIRST:] or [float(ms) for ms in _LINE.findall(text)]
    peak = [float(mib) for mib in _MEMORY.findall(text)]
    return Cell(
        "Megatron-LM",
        "measured",
        {},
        machine=path.stem,
        origin=str(path),
        work={
            "tokens_per_step": int(batch[1]) * int(length[1]),
            "length": int(length[1]),
            "gpus": int(world[1]) if world else 1,
        },
        step_ms=(float(np.mean(steps)),),
        losses=tuple(float(loss) for loss in _LOSS.findall(text)),
        memory={"peak": max(peak) * 2**20} if peak else {},
    )
