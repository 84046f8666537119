"""This module keeps what each step measured: a Record a step, a bounded ring of them in memory, an append-only file beside it.

Reading them is safe from any thread while another trains.

Loss, gradient norm and the like are produced on the device and arrive on the host some steps later; nothing here waits
for them except `Record.loss` and its siblings. On a CPU they are there at once.

jsonl.py defines what the lines of the file mean.
"""

from __future__ import annotations

import math
import os
import time
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from surokit.runs.jsonl import COLUMNS, INTEGERS, append, read, table, written
from surokit.runs.locks import Lock

if TYPE_CHECKING:
    import pandas as pd

_HOST = ("step", "lr", "tokens", "tokens_per_s", "wall_ms", "stall_ms", "peak_gib", "elapsed_s")
_MAY_BE_NAN = ("loss", "grad_norm")  # elsewhere NaN says that nothing was measured


def without_means_of_nothing(values: Mapping[str, float]) -> dict[str, float]:
    """Return a step's values, without the loss and the gradient norm where no label counted: there they mean nothing."""
    return {name: v for name, v in values.items() if name not in ("loss", "grad_norm") or values.get("targets") != 0}


def pinned(values: Tensor) -> Tensor:
    """Copy values from a GPU to pinned host memory without waiting; a tensor on the CPU is returned as it is."""
    if values.device.type != "cuda":
        return values
    there = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    return there.copy_(values, non_blocking=True)


class Deferred:
    """A Deferred holds the values of one step on their way from the device: 0-d tensors in, floats out.

    On CUDA the values are copied to pinned memory without waiting, followed by an event; `start` and `end` are timing
    events around the step's device work and `before` the `end` of the step before it, where there was one.
    """

    def __init__(
        self,
        values: Mapping[str, Tensor],
        host: Mapping[str, float],
        start: torch.cuda.Event | None = None,
        end: torch.cuda.Event | None = None,
        before: torch.cuda.Event | None = None,
    ) -> None:
        self._names = tuple(values)
        self._host = dict(host)
        self._events = (before, start, end)
        row = torch.stack([v.detach().float().reshape(()) for v in values.values()]) if values else torch.empty(0)
        self._arrived = end
        self._row = pinned(row)
        if row.device.type == "cuda":
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(row.device))
        self._values: dict[str, float] | None = None

    def ready(self) -> bool:
        """Return whether the values have arrived; never waits."""
        return self._arrived is None or self._arrived.query()

    def wait(self) -> dict[str, float]:
        """Return the values, waiting for them if need be. idle_frac is among them where it was measured by events."""
        if self._values is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            values = {**self._host, **dict(zip(self._names, self._row.tolist()))}
            before, start, end = self._events
            if before is not None and start is not None and end is not None:
                span_ms, gap_ms = start.elapsed_time(end), before.elapsed_time(start)
                waited_ms = values.get("offload_ms", 0.0)  # some of it a step late, as the device passed it
                values["idle_frac"] = min((max(0.0, gap_ms) + waited_ms) / max(gap_ms + span_ms, 1e-9), 1.0)
            self._values = without_means_of_nothing(values)
        return self._values


@dataclass(frozen=True, eq=False)
class Record:
    """A Record holds one optimizer step's measurements. Reading `loss`, `grad_norm`, `skipped`, `targets`, `idle_frac` and `meters`
    may wait.

    step: number of steps done, from 1. lr: of the first parameter group. tokens: elements of input_ids, accumulation
    included. targets: labels that count. wall_ms: host time since the end of the step before (or since run() began); of that,
    evaluate(), save(), sample() and chat() are no step's. The first step() of a loop of your own has only its own time. On CUDA the
    host is two steps ahead: what it waits for the device before one of these, or at the end of run(), is the next two steps' time.
    stall_ms: the part of it that waited for a batch of the session's data. idle_frac: the share of it without forward, backward
    or optimizer work, a lower bound of the idle time (other gaps inside the step are the profiler's business). meters have
    offload_ms where the optimizer offloads, a part of the idle time too: how long the device was without work for a transfer or
    the host's update; on CUDA of the waits that it had passed when the step was given, so some count a step later. peak_gib: of the
    device memory on CUDA, of the process on a CPU. elapsed_s: wall_ms summed over the run. skipped: the step changed nothing, since
    it was not finite or no label counted (targets is 0); in the latter case loss and grad_norm are NaN here, and empty in
    `records.frame()` and in the file. A record of a file that lacks a column has NaN there; tokens and targets are 0 then, and
    skipped is False.
    """

    step: int
    lr: float
    tokens: int
    wall_ms: float
    stall_ms: float
    peak_gib: float
    elapsed_s: float
    late: Deferred = field(repr=False)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_ms * 1e3 if self.wall_ms > 0 else math.nan

    @property
    def loss(self) -> float:
        return self.late.wait().get("loss", math.nan)

    @property
    def grad_norm(self) -> float:
        """Return the L2 norm over all gradients, before clipping."""
        return self.late.wait().get("grad_norm", math.nan)

    @property
    def skipped(self) -> bool:
        return self.late.wait().get("skipped", 0.0) != 0

    @property
    def targets(self) -> int:
        """Return how many labels counted; 0 where the file that was read does not say."""
        return int(self.late.wait().get("targets", 0.0))

    @property
    def idle_frac(self) -> float:
        return self.late.wait().get("idle_frac", math.nan)

    @property
    def meters(self) -> dict[str, float]:
        """Return what the session's meters measured, by name."""
        return {name: value for name, value in self.late.wait().items() if name not in COLUMNS}

    def known(self) -> dict[str, float]:
        """Return the values that the host knows without waiting."""
        return {name: getattr(self, name) for name in _HOST}

    def to_dict(self) -> dict[str, float]:
        """Return every column; waits for late values."""
        return {**self.known(), **self.late.wait()}


class Records:
    """A Records keeps the last `capacity` steps in memory, one array a column, and all of them in the file `path`, if given."""

    def __init__(self, path: Path | None = None, capacity: int = 1 << 16, flush_s: float = 1.0) -> None:
        if capacity < 1:
            raise ValueError(f"Records(capacity={capacity}): the ring holds at least one step.")
        self.path = path
        self._capacity = capacity
        self._flush_s = flush_s
        self._size = min(1024, capacity)
        self._count = 0
        self._columns: dict[str, NDArray[np.float64]] = {name: self._empty() for name in COLUMNS}
        self._pending: deque[tuple[int, Record]] = deque()
        self._lines: list[str] = []
        self._lock = Lock()
        self._flushed_at = time.monotonic()
        self._warned = False
        self._keeper: weakref.finalize[..., Records] | None = None

    def __len__(self) -> int:
        """Return the number of steps in memory."""
        return min(self._count, self._capacity)

    @overload
    def __getitem__(self, index: int) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...

    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        """Return the records in memory, oldest first; their late values may wait when read."""
        with self._lock:
            if isinstance(index, slice):
                return [self._at(i) for i in range(*index.indices(len(self)))]
            return self._at(index)

    def _at(self, index: int) -> Record:
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"There is no record {index}: {len(self)} steps are in memory.")
        place += self._count - len(self)
        for at, record in self._pending:
            if at == place:
                return record
        row = {name: float(column[place % self._size]) for name, column in self._columns.items()}
        late = {name: value for name, value in row.items() if name not in _HOST}
        missing = [name for name, value in late.items() if math.isnan(value) and name not in _MAY_BE_NAN]
        for name in missing:
            del late[name]
        return Record(
            step=int(row["step"]),
            lr=row["lr"],
            tokens=0 if math.isnan(row["tokens"]) else int(row["tokens"]),
            wall_ms=row["wall_ms"],
            stall_ms=row["stall_ms"],
            peak_gib=row["peak_gib"],
            elapsed_s=row["elapsed_s"],
            late=Deferred({}, late),
        )

    def __iter__(self) -> Iterator[Record]:
        return (self[i] for i in range(len(self)))

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the columns, meters last."""
        return tuple(self._columns)

    # -- in

    def append(self, record: Record) -> None:
        """Add a step's record; its late values follow through `drain`."""
        with self._lock:
            if self._count == self._size < self._capacity:
                self._grow()
            index = self._count
            self._count += 1
            for column in self._columns.values():
                column[index % self._size] = np.nan
            self._write(index, record.known())
            self._pending.append((index, record))

    def drain(self, wait: bool = False, leave: int = 0) -> Iterator[Record]:
        """Yield the records whose values have arrived since the last call, in order; `wait=True` waits for all but the last
        `leave`."""
        while len(self._pending) > leave and (wait or self._pending[0][1].late.ready()):
            index, record = self._pending[0]
            values = record.late.wait()
            with self._lock:
                if index >= self._count - self._size:
                    self._write(index, values)
                self._line({**record.known(), **values})
                self._pending.popleft()  # last, so that an interrupt loses no line
            yield record

    def update(self, step: int, **values: float) -> None:
        """Add values to a step that is there already, for example eval_loss."""
        with self._lock:
            for index in range(self._count - 1, max(-1, self._count - self._size - 1), -1):
                if self._columns["step"][index % self._size] == step:
                    self._write(index, values)
                    break
            self._line({"step": step, **values})

    def restore(self, rows: Mapping[str, NDArray[np.float64]]) -> None:
        """Fill the ring with rows read from a file; writes nothing."""
        with self._lock:
            self._count = count = len(rows.get("step", ()))
            self._size = min(max(count, self._size), self._capacity)
            kept = np.arange(max(0, count - self._size), count)
            for name in dict.fromkeys((*self._columns, *rows)):
                self._columns[name] = self._empty()
                if name in rows:
                    self._columns[name][kept % self._size] = rows[name][kept]

    def resume(self, step: int) -> tuple[float, float]:
        """Fill the ring with the file's steps up to `step`; return the milliseconds of these, and of those that are taken again."""
        if self.path is None:
            raise ValueError("Records without a path have no file to resume from.")
        found = table(self.path)
        rows = found.columns()
        count = int(np.searchsorted(rows["step"], step, side="right"))
        self.restore({name: column[:count] for name, column in rows.items()})
        wall_ms = rows["wall_ms"]
        return float(wall_ms[:count].sum()), float(wall_ms[count:].sum()) + found.void_ms

    def _write(self, index: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if name not in self._columns:
                self._columns[name] = self._empty()
            self._columns[name][index % self._size] = value

    def _empty(self) -> NDArray[np.float64]:
        return np.full(self._size, np.nan)

    def _grow(self) -> None:
        old, self._size = self._size, min(2 * self._size, self._capacity)
        for name, column in self._columns.items():
            self._columns[name] = self._empty()
            self._columns[name][:old] = column

    # -- the file

    def _line(self, values: Mapping[str, float]) -> None:
        if self.path is None:
            return
        self._lines.append(written(values))
        if self._keeper is None:  # writes the lines that still wait when the program ends
            self._keeper = weakref.finalize(self, _write_last, self.path, self._lines, self._lock, os.getpid())
        if time.monotonic() - self._flushed_at > self._flush_s:
            self.flush()

    def flush(self) -> None:
        """Write the lines that wait. A full disk costs one warning; the lines are kept and tried again."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        if self.path is None or not self._lines:
            return
        self._flushed_at = time.monotonic()
        try:
            append(self.path, self._lines)
        except OSError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"Records cannot be written to {self.path} ({error.strerror}); training goes on and the lines are "
                    "kept in memory until it works again.",
                    stacklevel=2,
                )

    # -- out

    def column(self, name: str) -> NDArray[np.float64]:
        """Return a copy of one column over the steps in memory, oldest first; NaN where a value is missing or late."""
        if name not in self._columns:
            raise KeyError(f"There is no column {name!r} in the records; there are {', '.join(self._columns)}.")
        with self._lock:
            column, count = self._columns[name], self._count
            return column[:count].copy() if count <= len(column) else np.roll(column, -(count % len(column)))

    def frame(self) -> pd.DataFrame:
        """Return a DataFrame, one row a step; steps that have left memory are read back from the file. Never waits."""
        import pandas as pd

        with self._lock:
            rows = {name: self.column(name) for name in self._columns}
            self.flush()
        if self._count > self._size and self.path is not None and self.path.exists():
            first = rows["step"][0]
            older = read(self.path)
            keep = older["step"] < first
            names = dict.fromkeys((*rows, *older))
            rows = {
                name: np.concatenate(
                    [
                        older[name][keep] if name in older else np.full(int(keep.sum()), np.nan),
                        rows.get(name, np.full(self._size, np.nan)),
                    ]
                )
                for name in names
            }
        frame = pd.DataFrame(rows)
        return frame.astype(dict.fromkeys(INTEGERS, "int64"))


def _write_last(path: Path, lines: list[str], lock: Lock, pid: int) -> None:
    """Write the lines that wait when the records go, or the program ends; not in a process that was forked from theirs."""
    if lines and os.getpid() == pid:
        with suppress(OSError), lock:
            append(path, lines)
