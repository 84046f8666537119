"""This module writes the lines of a run's records.jsonl, and reads them back as columns. No torch here.

A line with "wall_ms" is a step; a line without adds to a step, an evaluation for example. A step at or before one already
read replaces it and all after it, which is what resuming from a checkpoint means. A file is read line by line into columns of
eight bytes a value, so a million steps take about 150 MB.
"""

from __future__ import annotations

import json
import math
from array import array
from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

COLUMNS = (
    "step",
    "loss",
    "lr",
    "grad_norm",
    "tokens",
    "targets",
    "tokens_per_s",
    "wall_ms",
    "idle_frac",
    "stall_ms",
    "peak_gib",
    "elapsed_s",
    "skipped",
    "eval_loss",
)
INTEGERS = ("step", "tokens")
_KNOWN = frozenset(COLUMNS)


def written(values: Mapping[str, float]) -> str:
    """Return the line that holds these values, without the newline."""
    return json.dumps({name: _plain(name, value) for name, value in values.items()})


def _plain(name: str, value: Any) -> int | float | str:
    """Return a value as JSON can hold it: there is no NaN in JSON, so it and infinities become strings that float() reads."""
    if name in INTEGERS:
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else str(number)


def parsed(line: bytes) -> dict[str, float] | None:
    """Return a line's values; None for a line that a kill cut short, or that is no record."""
    try:
        row = {name: float(value) for name, value in json.loads(line.decode("utf-8", "replace")).items()}
        return row if math.isfinite(row["step"]) else None
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError):
        return None


def append(path: Path, lines: list[str]) -> None:
    """Move lines to the end of a file, on a new line where a kill cut the last one short."""
    torn = path.exists() and not _ends_with_newline(path)
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" * torn + "\n".join(lines) + "\n")
    lines.clear()


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(0, 2)
        if file.tell() == 0:
            return True
        file.seek(-1, 2)
        return file.read(1) == b"\n"


class Table:
    """A Table holds lines as columns: a row a step, steps ascending, NaN where a value is missing.

    void_ms: time of steps that were replaced.
    """

    def __init__(self) -> None:
        self.void_ms = 0.0
        self._columns = {name: array("d") for name in COLUMNS}
        self._first: dict[str, int] = {}  # the first row that has a value of a further name

    def add(self, row: Mapping[str, float]) -> None:
        """Add a line that `parsed` gave."""
        steps, step = self._columns["step"], row["step"]
        at = len(steps)
        if at and step <= steps[-1]:
            at = bisect_left(steps, step)
        if "wall_ms" in row:
            if at < len(steps):
                self._cut(at)
            self._name(row, at)
            for name, column in self._columns.items():
                column.append(row.get(name, math.nan))
        elif at < len(steps) and steps[at] == step:
            self._name(row, at)
            for name, value in row.items():
                self._columns[name][at] = value

    def _cut(self, at: int) -> None:
        """Remove the rows from `at` on, and the names that only they have: their steps are taken again."""
        self.void_ms += sum(self._columns["wall_ms"][at:])
        for name in [name for name, first in self._first.items() if first >= at]:
            del self._columns[name], self._first[name]
        for column in self._columns.values():
            del column[at:]

    def _name(self, row: Mapping[str, float], at: int) -> None:
        """Add columns for the names that only some files have."""
        for name in row:
            if name not in _KNOWN:
                if name not in self._columns:
                    self._columns[name] = array("d", [math.nan]) * len(self._columns["step"])
                self._first[name] = min(self._first.get(name, at), at)

    def columns(self) -> dict[str, NDArray[np.float64]]:
        """Return each column as an array on the same memory; add no more lines afterwards."""
        import numpy as np

        return {name: np.asarray(column, np.float64) for name, column in self._columns.items()}


def table(path: Path) -> Table:
    """Read a records file into a Table, line by line; what is no record is passed over."""
    rows = Table()
    with path.open("rb") as file:
        for line in file:
            if (row := parsed(line)) is not None:
                rows.add(row)
    return rows


def read(path: Path) -> dict[str, NDArray[np.float64]]:
    """Return the columns of a records file; a line that a kill cut short is passed over."""
    return table(path).columns()
