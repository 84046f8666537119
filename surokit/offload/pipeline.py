"""Define what the training thread and its two workers hand one another: slots, windows, choices, and the workers themselves."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from surokit.offload.columns import Columns
from surokit.offload.link import Link, PendingCopy
from surokit.offload.swaps import Swaps
from surokit.offload.workers import Job, Worker, nothing, split_cores


class Slot:
    """A Slot is host memory for one step's cold gradients, and for the values that travel with them."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.rows: dict[Columns, Tensor] = {}
        self.job: Job | None = None  # that empties it
        self._tags = link.buffer((2,), torch.float32)  # grad_scale, found_inf
        self._tagged: PendingCopy | None = None

    def room(self, columns: Columns, dtype: torch.dtype) -> Tensor:
        """Return the memory for these columns, [C, O]."""
        rows = self.rows.get(columns)
        if rows is None or rows.dtype != dtype:
            rows = self.rows[columns] = self._link.buffer(columns.out.shape, dtype)
        return rows

    def tag(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Send grad_scale, by which the step's gradients are divided, and found_inf, which says whether they are finite.
        Both are 0-d, on the device."""
        self._tagged = None
        if grad_scale is not None or found_inf is not None:
            new = torch.zeros((), device=self._link.device)
            scale, bad = new + 1 if grad_scale is None else grad_scale, new if found_inf is None else found_inf
            tags = torch.stack([scale.float().view(()), bad.float().view(())])
            self._tagged = self._link.copy_down(tags, self._tags)

    def read(self) -> tuple[float | None, bool]:
        """Return (the divisor of the gradients, None where it is 1; whether they count); the host waits."""
        if self._tagged is None:
            return None, True
        self._tagged.wait()
        scale, bad = self._tags.tolist()
        return scale if scale != 1 else None, not bad


@dataclass(eq=False)
class Window:
    """A Window is a run of steps whose cold gradients make one update."""

    b: int  # the sum that they are added to
    steps: int = 0  # that sent gradients
    finite: list[tuple[int, int]] = field(default_factory=list)  # of these, what counts: (step, gradient elements)
    filled: Job | None = None  # its latest step is in the sum
    applied: Job | None = None
    updated: dict[Columns, dict[str, Any]] = field(default_factory=dict)  # whose result is to land: its options

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, when its jobs are done."""
        updated = {columns.number: dict(options) for columns, options in self.updated.items()}
        return {"b": self.b, "steps": self.steps, "finite": list(self.finite), "updated": updated}

    @staticmethod
    def from_dict(data: Mapping[str, Any], by_number: Mapping[int, Columns]) -> Window:
        updated = {by_number[number]: dict(options) for number, options in data["updated"].items()}
        return Window(data["b"], data["steps"], [(step, n) for step, n in data["finite"]], updated=updated)


@dataclass(eq=False)
class ColumnChoice:
    """A ColumnChoice holds hot columns that were chosen and do not hold yet."""

    columns: list[Columns]
    chosen: Tensor  # int32 on the host, of one weight after the other
    clocks: Tensor  # likewise: of the columns that are hot so far
    shares: Tensor  # of each weight's squared norm; NaN: the step was not finite
    tickets: Sequence[PendingCopy] = ()
    step: int = 0
    scores: Sequence[Tensor] = ()

    @staticmethod
    def on_its_way(columns: list[Columns], picked: Sequence[tuple[Tensor, Tensor]], link: Link) -> ColumnChoice:
        """Send a choice to the host, from the results of `Columns.choose`."""
        values = (
            torch.cat([chosen for chosen, _ in picked]),
            torch.cat([each.t_hot for each in columns]),
            torch.stack([share for _, share in picked]),
        )
        to = [link.buffer(value.shape, value.dtype) for value in values]
        tickets = [link.copy_down(value, host) for value, host in zip(values, to)]
        return ColumnChoice(columns, to[0], to[1], to[2], tickets)

    def wait(self) -> None:
        for ticket in self.tickets:
            ticket.wait()

    def __iter__(self) -> Iterator[tuple[Columns, Tensor, Tensor, float]]:
        """Yield for each weight: chosen [H], clocks [H], share. The choice has to have arrived."""
        sizes = [len(columns.hot_order) for columns in self.columns]
        return zip(self.columns, self.chosen.split(sizes), self.clocks.split(sizes), self.shares.tolist())

    def to_dict(self) -> dict[str, Any]:
        """Return tensors and plain data. The choice has to have arrived."""
        tensors = {name: getattr(self, name).clone() for name in ("chosen", "clocks", "shares")}
        return {"columns": [columns.number for columns in self.columns], "step": self.step, **tensors}

    @staticmethod
    def from_dict(data: Mapping[str, Any], by_number: Mapping[int, Columns]) -> ColumnChoice:
        columns = [by_number[number] for number in data["columns"]]
        tensors = [data[name].cpu().clone() for name in ("chosen", "clocks", "shares")]
        return ColumnChoice(columns, tensors[0], tensors[1], tensors[2], step=data["step"])


@dataclass(eq=False)
class Note:
    """A Note holds statistics of a step on their way to the host."""

    weights: list[int]
    values: Tensor  # [weights, 2]; -1 where the step was not finite
    ticket: PendingCopy | None = None

    def read(self) -> dict[int, tuple[float, float]]:
        """Return the statistics by weight; the host waits."""
        if self.ticket is not None:
            self.ticket.wait()
        return {weight: (cold, hot) for weight, (cold, hot) in zip(self.weights, self.values.tolist()) if cold >= 0}

    @staticmethod
    def known(statistics: Mapping[int, tuple[float, float]]) -> Note:
        """Make a Note of statistics that `read` returned."""
        return Note(list(statistics), torch.tensor(list(statistics.values()), device="cpu").view(-1, 2))


class Crew:
    """A Crew is the accumulator, which adds gradients up, the thread with Adam, and the ring of slots between them and the
    training thread.

    Threads begin with their first job.
    """

    def __init__(self, link: Link, slots: int, reserved: float) -> None:
        _, summing, updating = split_cores(reserved)
        self.accumulator = Worker("accumulator", summing, len(summing))
        self.adam = Worker("adam", updating, len(updating))
        self.swaps = Swaps(link, self.adam)
        self._ring = deque(Slot(link) for _ in range(slots))

    def next_slot(self) -> Slot:
        """Return the slot that was used longest ago."""
        self._ring.rotate(-1)
        return self._ring[-1]

    def buffers(self) -> list[Tensor]:
        """Return the memory of slots and swaps."""
        return [rows for slot in self._ring for rows in slot.rows.values()] + self.swaps.buffers()

    def check(self) -> None:
        """Raise the error of a worker that failed."""
        self.accumulator.check()
        self.adam.check()

    def drain(self) -> None:
        """Wait until all submitted jobs are done."""
        self.accumulator.submit(nothing).wait()
        self.adam.submit(nothing).wait()

    def close(self) -> None:
        """End the workers at once, without waiting for a transfer of theirs, which may hang: their results are not needed."""
        try:
            self.accumulator.close(at_once=True)
        finally:
            self.adam.close(at_once=True)


@contextmanager
def whole() -> Iterator[None]:
    """Hold back a Ctrl-C inside the block until its end; a second one is raised at once. Only the main thread receives signals."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or previous is None:
        yield
        return
    held = False

    def hold(_signal: int, _frame: Any) -> None:
        nonlocal held
        if held:
            raise KeyboardInterrupt
        held = True

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if held:
            signal.raise_signal(signal.SIGINT)
