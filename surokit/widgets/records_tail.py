"""This module reads a records file that somebody else writes, as it grows, into the state of a panel.

The file is read from where the last look ended, to the last whole line. A file that shrank, or no longer has what was read, is
read anew. A step at or before the last one is a resume: the steps from it on are void (runs/jsonl.py). The state is then put back
to a copy from before, a few of which are kept, and the file is read again from there without the void lines.

A long file is read in columns, and of its older part neighbouring steps are folded into one: their mean loss, their time and
tokens together, the lowest and the highest loss and rate in the curves at steps of their own. So a million steps cost seconds,
and no extreme is lost. Single steps are not judged in a folded part.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surokit.runs.jsonl import parsed
from surokit.widgets.state import ROUTING, SLOWEST, PanelState

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Columns = dict[str, NDArray[np.float64]]

BLOCK_BYTES = 4 << 20
FIRST_BYTES = 1 << 18  # the first block of a file, and blocks too small for columns
RECENT_BYTES = 2 << 20  # the end of a file, whose steps are never folded
FOLDED = 20_000  # rows that the older part of a long file becomes, about
SEAM_BYTES = 64
COPIES = 12


@dataclass(frozen=True)
class _Copy:
    """A _Copy holds a state as it was when the file had been read up to `offset`."""

    offset: int = 0
    last: float = -math.inf  # step
    seam: bytes = b""
    state: bytes = b""


class Reader:
    """A Reader keeps a PanelState up to date with a records file. make: returns a new state, for the beginning and for a file that
    was replaced."""

    def __init__(self, path: Path, make: Callable[[], PanelState] = PanelState) -> None:
        self.path = path
        self._make = make
        self._begin()

    def _begin(self) -> None:
        self._set(_Copy())
        self._size = 0  # bytes of the file when it was last read to its end, a torn last line included
        self._cuts: list[tuple[int, int]] = []  # (offset, step): a line at `offset` takes the run back to before `step`
        self.copies: list[_Copy] = []
        self.fold = 1
        self.step_s = 0.0  # seconds of the last step

    def _set(self, copy: _Copy) -> None:
        self.offset, self._last, self._seam = (
            copy.offset,
            copy.last,
            copy.seam,
        )  # the seam stands just before the offset
        self.state: PanelState = pickle.loads(copy.state) if copy.state else self._make()

    def read(self, budget_s: float = math.inf) -> bool:
        """Take in what is new, for about `budget_s` seconds, and return whether there was anything. Raises OSError if the file
        cannot be read."""
        until = time.monotonic() + budget_s
        news = False
        with self.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, self.offset - len(self._seam)))
            if size < self.offset or file.read(len(self._seam)) != self._seam:
                self._begin()
                news = True
            while self.offset < size and (data := self._block(file)):
                news = True
                self.take(data, size - self.offset)
                if time.monotonic() >= until:
                    break
            else:
                self._size = size
        return news

    @property
    def behind(self) -> bool:
        """True if the file has something that has not been read."""
        try:
            return self.path.stat().st_size != self._size
        except OSError:
            return False

    def _block(self, file: Any) -> bytes:
        """Return the next whole lines, up to the next cut at most."""
        file.seek(self.offset)
        most = min([cut for cut, _ in self._cuts if cut > self.offset], default=math.inf) - self.offset
        data: bytes = file.read(int(min(most, BLOCK_BYTES if self.offset else FIRST_BYTES)))
        whole = data[: data.rfind(b"\n") + 1]
        return whole if whole or len(data) < FIRST_BYTES else data  # no line of ours is as long as that

    def take(self, data: bytes, left: int) -> None:
        void = min([step for cut, step in self._cuts if cut > self.offset], default=math.inf)
        columns = _columns(data) if len(data) > FIRST_BYTES else None
        if columns is not None and self._in_order(columns, void):
            if left - len(data) >= RECENT_BYTES and self.fold > 1:
                self._add_folded(columns)
            else:
                for row in _rows(columns):
                    self._add(row)
        else:
            offset = self.offset
            lines = data.splitlines(keepends=True)
            for line in lines:
                values = parsed(line)
                if values is not None and values["step"] < void:
                    if "wall_ms" in values and values["step"] <= self._last:
                        self._rewind(offset, int(values["step"]))
                        return
                    self._add(values)
                offset += len(line)
            if self.offset == 0:
                self.fold = max(1, round(left / len(data) * len(lines) / FOLDED))
        self.offset += len(data)
        self._seam = data[-SEAM_BYTES:]
        if self.offset - (self.copies[-1].offset if self.copies else 0) >= BLOCK_BYTES:
            self.copies.append(_Copy(self.offset, self._last, self._seam, pickle.dumps(self.state, 5)))
            if len(self.copies) > COPIES:
                del self.copies[:-1:2]

    def _rewind(self, offset: int, step: int) -> None:
        """Go back to a state from before `step`, because a line at `offset` resumes the run there."""
        self._cuts.append((offset, step))
        while self.copies and self.copies[-1].last >= step:
            self.copies.pop()
        self._set(self.copies[-1] if self.copies else _Copy())

    def _in_order(self, columns: Columns, void: float) -> bool:
        """Return whether every step is above the one before it and none is void."""
        import numpy as np

        steps = columns["step"][~np.isnan(columns["wall_ms"])]
        if not len(steps):
            return False
        return bool(steps[0] > self._last and (np.diff(steps) > 0).all() and columns["step"].max() < void)

    def _add(self, row: Mapping[str, Any]) -> None:
        step, state = int(row["step"]), self.state
        if "wall_ms" in row:
            self._last = step
            self.step_s = row["wall_ms"] / 1e3 if math.isfinite(row["wall_ms"]) else 0.0
            state.add_row(row)
        elif step == self._last:
            state.add_row(row)
        elif "eval_loss" in row and step >= (state.held_out.last or (-math.inf,))[0]:
            state.held_out.append(step, row["eval_loss"])

    def _add_folded(self, columns: Columns) -> None:
        """Add a block's steps, `fold` of them as one; one by one if any step of the block was skipped or had no targets."""
        import numpy as np

        steps, others = _merged(columns)
        if np.nansum(steps["skipped"]) or (steps["targets"] == 0).any():
            for row in _rows(columns):
                self._add(row)
            return
        for row in _rows(others):
            self._add(row)
        for curves, values in _folded(steps, self.fold):
            for name, points in curves.items():
                series = getattr(self.state, name)
                for x, y in points:
                    series.append(x, y)
            self.state.add(**values)
        self._last = float(steps["step"][-1])
        held_out = ~np.isnan(steps["eval_loss"])
        for step, loss in zip(steps["step"][held_out].tolist(), steps["eval_loss"][held_out].tolist()):
            self._add({"step": step, "eval_loss": loss})


# -- lines to rows and columns

COLUMNS = (
    *("step", "loss", "lr", "grad_norm", "tokens", "wall_ms", "stall_ms", "peak_gib", "elapsed_s"),
    *("skipped", "targets", "idle_frac", "eval_loss", "busy_frac", "launches", "offload_ms"),
    *ROUTING,
    *SLOWEST,
)


def _columns(data: bytes) -> Columns | None:
    """Return lines as columns, with NaN for missing values; None if they have to be read one by one: without pyarrow, or if a line
    is broken or a value is not a number (NaN is written as a string)."""
    try:
        import pyarrow as pa
        import pyarrow.json as pj
    except ImportError:
        return None
    schema = pa.schema([(name, pa.float64()) for name in COLUMNS])
    try:
        table = pj.read_json(
            io.BytesIO(data),
            read_options=pj.ReadOptions(block_size=1 << 20),
            parse_options=pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        )
    except pa.ArrowInvalid:
        return None
    columns = {name: table.column(name).to_numpy() for name in COLUMNS}
    return None if (columns["step"] != columns["step"]).any() else columns


def _rows(columns: Mapping[str, NDArray[Any]]) -> Iterable[dict[str, Any]]:
    """Yield the rows of columns, without their NaNs."""
    for values in zip(*(column.tolist() for column in columns.values())):
        yield {name: value for name, value in zip(columns, values) if value == value}


def _merged(columns: Columns) -> tuple[Columns, Columns]:
    """Return the steps, completed by the later lines that add to them, and the lines that add to none of these steps."""
    import numpy as np

    is_step = ~np.isnan(columns["wall_ms"])
    steps = {name: column[is_step] for name, column in columns.items()}
    others = {name: column[~is_step] for name, column in columns.items()}
    at = np.searchsorted(steps["step"], others["step"]).clip(max=len(steps["step"]) - 1)
    here = steps["step"][at] == others["step"]
    for name, values in others.items():
        known = here & ~np.isnan(values)
        steps[name][at[known]] = values[known]
    return steps, {name: values[~here] for name, values in others.items()}


def _folded(steps: Columns, count: int) -> Iterable[tuple[dict[str, list[tuple[float, float]]], dict[str, Any]]]:
    """Yield for every `count` neighbouring steps their extremes, by curve and in order of steps, and the arguments that
    `PanelState.add` takes for them."""
    import numpy as np

    first = np.arange(0, len(steps["step"]), count)
    last = np.append(first[1:], len(steps["step"])) - 1
    x, wall_ms, tokens = steps["step"], steps["wall_ms"], steps["tokens"]

    def mean(values: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
        known = ~np.isnan(values) * weights
        with np.errstate(invalid="ignore"):
            return np.add.reduceat(np.nan_to_num(values) * known, first) / np.add.reduceat(known, first)

    def total(values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sum the known values of each group; NaN if none is known."""
        none = np.logical_and.reduceat(np.isnan(values), first)
        return np.where(none, np.nan, np.add.reduceat(np.nan_to_num(values), first))

    def extremes(values: NDArray[np.float64]) -> Iterable[list[tuple[float, float]]]:
        groups = np.append(values, np.full(-len(values) % count, np.nan)).reshape(-1, count)
        known = ~np.isnan(groups)
        low = first + np.where(known, groups, np.inf).argmin(1)
        high = first + np.where(known, groups, -np.inf).argmax(1)
        both = np.sort(np.stack([low, high], 1), 1)
        for (a, b), xs, ys in zip(both.tolist(), x[both].tolist(), values[both].tolist()):
            yield [(x, y) for x, y in list(zip(xs, ys))[a == b :] if y == y]

    each = np.ones_like(wall_ms)
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = np.where(wall_ms > 0, (each if np.isnan(tokens).all() else tokens) / wall_ms * 1e3, np.nan)
    curves = {"loss": steps["loss"], "rate": rate, "grad_norm": steps["grad_norm"], "idle": steps["idle_frac"]}
    values = {
        "step": x[last].astype(np.int64),
        "steps": last - first + 1,
        "lr": steps["lr"][last],
        "memory": steps["peak_gib"][last],
        "elapsed": steps["elapsed_s"][last],
        "tokens": np.add.reduceat(tokens, first),
        "seconds": np.add.reduceat(np.nan_to_num(wall_ms), first) / 1e3,
        "stall": total(steps["stall_ms"]) / 1e3,
        "offload": total(steps["offload_ms"]) / 1e3,
        "loss": mean(steps["loss"], each),
        "grad_norm": mean(steps["grad_norm"], each),
        "busy": mean(steps["busy_frac"], each),
        "launches": mean(steps["launches"], each),
        "idle": mean(steps["idle_frac"], np.nan_to_num(wall_ms)),
        **{name: mean(steps[name], each) for name in ROUTING},
        **{name: steps[name][last] for name in SLOWEST},
    }
    for points, row in zip(zip(*map(extremes, curves.values())), _rows(values)):
        yield dict(zip(curves, points)), row
