"""This module tells a session's subscribers of records once their values have arrived, and of the reason of a step that was masked.

Values arrive some steps after their step, and nothing here waits for them unless it is asked to. A subscriber that raises is
dropped with a warning: no front end can stop a run.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from surokit.nn.delayed import kept_amaxes
from surokit.runs.records import Record
from surokit.train.diagnose import Finding, find_first_bad, first_of
from surokit.train.errors import NonFiniteError, NoTargetsError
from surokit.train.prefetch import AHEAD
from surokit.train.random_state import RandomState, kept
from surokit.train.stream import Batch

if TYPE_CHECKING:
    from surokit.train.session import Session


class Subscriber(Protocol):
    """A Subscriber is told of every step once its values have arrived, and of the end of a run: "done", "interrupted", "stopped:
    <by whom or why>" or "failed: <Type: message>".

    A subscriber may also have on_info(info), what the run is, when it subscribes, when a run begins and when more is known;
    on_start(total), the step a run is planned to end at; on_eval(step, loss); on_sample(sample) for what `numerics` measured;
    on_note(step, text); on_event(event) for what runs slower than was asked for; on_pause(paused); on_health(phase, events), how
    the run is doing, when it subscribes, and before a step in which another phase begins or something happens. All are called in
    the thread that trains, but for on_note, the first on_info and the first on_health. Of a race's turns nobody is told: it begins
    and ends once. A subscriber that raises is dropped with a warning.
    """

    def on_step(self, record: Record) -> None: ...

    def on_end(self, reason: str) -> None: ...


class Subscribers:
    """A Subscribers object holds those who are told what happens in a session."""

    def __init__(self) -> None:
        self._all: list[Subscriber] = []

    def add(self, subscriber: Subscriber) -> None:
        self._all.append(subscriber)

    def remove(self, subscriber: Subscriber) -> None:
        """Remove a subscriber; one that was dropped already is no error."""
        with suppress(ValueError):
            self._all.remove(subscriber)

    def have(self, method: str) -> bool:
        """Return whether one of them has `method`."""
        return any(hasattr(subscriber, method) for subscriber in self._all)

    def emit(self, method: str, *args: Any) -> None:
        """Call `method` of those who have it."""
        for subscriber in list(self._all):
            self.emit_to(subscriber, method, *args)

    def emit_to(self, subscriber: Subscriber, method: str, *args: Any) -> None:
        try:
            if (call := getattr(subscriber, method, None)) is not None:
                call(*args)
        except Exception as error:
            self.remove(subscriber)
            warnings.warn(
                f"The subscriber {type(subscriber).__name__} failed and is dropped ({type(error).__name__}: {error}); "
                "training goes on.",
                stacklevel=2,
            )


class Arrivals:
    """An Arrivals holds the steps of one session whose values are on their way, with what it takes to look into a bad one."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._replayable: dict[int, tuple[Sequence[Batch], RandomState]] = {}
        self._bad_in_a_row = self._empty_in_a_row = 0

    def expect(self, record: Record, batches: Sequence[Batch], random: RandomState) -> None:
        """Hold a step's batches, and the random state that it began with, until its record has arrived."""
        self._replayable[record.step] = (batches, random)

    def drain(self, wait: bool = False) -> None:
        """Pass on the records that have arrived, and look into those whose step was masked. NonFiniteError after several in a row,
        NoTargetsError after as many in which no label counted."""
        session = self._session
        if wait:
            session.measuring.settle(session)
        if session.processes.are_several and not wait:
            # what is seen of a step is seen after the same step in all processes, so that they do the same about it
            arrived = session.records.drain(wait=True, leave=AHEAD if session.device.type == "cuda" else 0)
        else:
            arrived = session.records.drain(wait)
        for record in arrived:
            batches, random = (
                self._replayable.pop(record.step) if record.step in self._replayable else ((), session.random.state)
            )
            verdict = session.journal.judge(record)  # first, so that a picture has a step and what happened in it
            session.subscribers.emit("on_step", record)
            session.journal.take_in(record, verdict)
            for sample in [watcher.arrived(record.step) for watcher in session.measuring.watchers]:
                if sample is not None:
                    session.subscribers.emit("on_sample", sample)
            if not record.skipped:
                self._bad_in_a_row = self._empty_in_a_row = 0
                continue
            if not record.targets:
                self._bad_in_a_row = 0
                self._empty_in_a_row += 1
                if self._empty_in_a_row >= session.max_skipped:
                    self._empty_in_a_row = 0
                    raise NoTargetsError(session.max_skipped)
                continue
            self._empty_in_a_row = 0
            self._bad_in_a_row += 1
            if self._bad_in_a_row == 1:
                self.explain(record.step, batches, random)
            if self._bad_in_a_row >= session.max_skipped:
                self._bad_in_a_row = 0
                raise NonFiniteError(
                    f"{session.max_skipped} steps in a row were not finite, first {session.findings[-1]}. None of them changed "
                    "the model: save() and evaluate() work. Lower the learning rate, look at the data, or keep that "
                    "layer in bf16 with recipe.keep()."
                )

    def _find(self, batches: Sequence[Batch], step: int) -> Finding:
        processes = self._session.processes
        if processes.layout.is_sharded:  # a replay that ends where something is found would leave the others waiting
            return Finding(step, "not replayed", type(self._session.model).__name__)
        found = find_first_bad(self._session.model, batches, step, are_several=processes.are_several)
        return first_of(processes.gather(found))

    def explain(self, step: int, batches: Sequence[Batch], random: RandomState) -> None:
        """Replay a step to find the layer and product that went bad first; nothing of the run changes."""
        session = self._session
        with kept(session.device), kept_amaxes(session.model):
            random.restore()
            finding = session.engine.retry_on_oom(self._find, batches, step)
        session.findings.append(finding)
        session.measuring.restart()
        if len(session.findings) == 1:
            warnings.warn(
                f"A step that is not finite was left out, {finding}. Later ones are in session.findings; "
                f"{session.max_skipped} in a row end the run.",
                stacklevel=2,
            )
