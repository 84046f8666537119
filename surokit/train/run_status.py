"""This module tells of a run what its records do not: what it is, how it stands, what happened in it; and it ends a run on
conditions.

It goes to subscribers and, where the run has a folder, to run.json (runs/status.py). Only arrived records are looked at, so nothing
here waits for the device.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from surokit.runs.health import Event, Health, Phase
from surokit.runs.records import Record
from surokit.runs.status import EVENTS, RunInfo, StatusFile, read_status
from surokit.train.run_info import Light, describe, light_of, ran_s

if TYPE_CHECKING:
    from surokit.train.session import Session

Condition = str | Callable[[Record], bool | str]

AGAIN = 3  # steps within which a function that ends one run after another is taken for one that was forgotten

# a condition's name -> the events that fulfil it; beginning a phase of that name does too
NAMES: dict[str, set[str]] = {
    "diverging": {"diverging"},
    "unstable": {"unstable"},
    "plateau": {"plateau"},
    "nonfinite": {"nonfinite", "skipped"},
    "no_targets": {"no_targets"},
    "spike": {"spike"},
    "grad_spike": {"grad_spike"},
}


class Verdict(NamedTuple):
    """A Verdict is what one record says of the run: what happened in it, and the phase that begins with it, "" where none does."""

    events: Sequence[Event]
    entered: Phase


class Journal:
    """A Journal tells of one session's runs. `info` says what the run that began last is, None before the first."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.info: RunInfo | None = None
        self.events: deque[dict[str, Any]] = deque(maxlen=EVENTS)
        self._file: StatusFile | None = None
        self._state = ""
        self._total: int | None = getattr(session.schedule, "steps", None)
        self._started = 0.0
        self._light: tuple[int | None, Light] | None = None
        self._health = Health()
        self._conditions: tuple[Condition, ...] = ()
        self._ended_by: Condition | None = None  # the run before
        self._began = 0  # at this step

    # -- what the run is

    def describe(self) -> RunInfo:
        """Return the RunInfo as far as it is known now."""
        session = self._session
        if self._light is None or self._light[0] != session.lengths.mean:
            self._light = session.lengths.mean, _light(session)
        return describe(session, self._total, self._started, self._light[1], resumes=not session.control.is_nested)

    def begin(self, total: int | None) -> None:
        """Begin a run() that is planned to end at step `total`."""
        self._began = self._session.steps
        if self._session.control.is_nested:
            self.beat(now=True)
        else:
            self._open(total)

    def end(self, reason: str) -> None:
        """End the run() for `reason`."""
        if not self._session.control.is_nested:
            self._close(reason)

    def begin_group(self, total: int | None) -> None:
        """Begin a run that is made of several run(), as in a race: until `end_group` they are its parts. Beginning and end are told
        of the whole, and an interrupt is for whoever drives it."""
        self._session.control.is_nested = True
        self._session.control.files.forget()
        self._open(total)

    def end_group(self, reason: str) -> None:
        self._session.control.is_nested = False
        self._close(reason)

    def _open(self, total: int | None) -> None:
        session = self._session
        self._total, self._started = total, time.time()
        if session.own_folder is not None:
            self._file = self._file or StatusFile(session.own_folder)
        if self._file is not None or session.subscribers.have("on_info"):
            self._tell_info()
        self.beat("running")
        session.subscribers.emit("on_start", total)

    def _close(self, reason: str) -> None:
        self.beat(reason)
        self._session.subscribers.emit("on_end", reason)

    def _tell_info(self) -> None:
        self.info = self.describe()
        self._session.lengths.note()
        self._session.subscribers.emit("on_info", self.info)

    def changed(self) -> None:
        """Tell anew what the run is, since its recipe has changed."""
        if self.info is not None:
            self._tell_info()

    def beat(self, state: str | None = None, now: bool = False) -> None:
        """Write run.json: a new state at once, a sign of life at most every two seconds or `now`."""
        self._state = state or self._state
        if self._file is not None and self.info is not None:
            events = [*self.events]
            session = self._session
            now = now or state is not None
            self._file.beat(self.info, self._state, session.steps, events, now, run_s=ran_s(session))

    def restore(self) -> None:
        """Restore the events of a run that goes on, up to the step from which it does."""
        session = self._session
        status = None if session.run_dir is None else read_status(session.run_dir)
        if status is not None:
            self.events.extend(e for e in status.events if e.get("step", 0) <= session.steps)

    # -- what happens in it

    def note(self, step: int, text: str, kind: Literal["note", "slower"] = "note") -> None:
        """Note somebody's own words, or what runs slower than was asked for."""
        event = Event(step, kind, str(text))
        self.events.append(event.to_dict())
        if kind == "note":
            self._session.subscribers.emit("on_note", step, event.text)
        else:
            self._session.subscribers.emit("on_event", event)
        if self._session.control.state == "idle":
            self.beat(now=True)

    @property
    def phase(self) -> Phase:
        """Return how the run is doing, by the records that have arrived."""
        return self._health.phase

    def judge(self, record: Record) -> Verdict:
        """Judge how the run is doing with this arrived record, here alone: run.json, panels and conditions have it from here."""
        health, late, before = self._health, record.late.wait(), self._health.phase
        events = health.add(
            record.step,
            loss=late.get("loss"),
            grad_norm=late.get("grad_norm"),
            lr=record.lr,
            skipped=record.skipped,
            targets=late.get("targets"),
        )
        self.events.extend(event.to_dict() for event in events)
        verdict = Verdict(events, health.phase if health.phase != before else "")
        if verdict.events or verdict.entered:
            self._session.subscribers.emit("on_health", health.phase, verdict.events)
        return verdict

    def take_in(self, record: Record, verdict: Verdict) -> None:
        """Take in a record that was judged and told, and stop the run where a condition holds."""
        if self.info is not None and (self.info.tokens_per_step is None or self._is_longer_or_shorter()):
            self._tell_info()  # the first step has shown how many tokens it has
        for condition in self._conditions:
            if why := self._fulfilled(condition, record, verdict):
                again = callable(condition) and condition is self._ended_by and record.step <= self._began + AGAIN
                if not self._session.control.reason:
                    self._ended_by = condition
                self._session.control.stop(f"stopped: {why}" + ", again: stop_when() clears it" * again)

    def _is_longer_or_shorter(self) -> bool:
        """Return whether the FLOPs a token that were told are those of another length than the mean of the run so far."""
        known = self.info is not None and self.info.flops_per_token is not None
        return known and self._session.lengths.moved

    def stop_when(self, conditions: Sequence[Condition]) -> None:
        for condition in conditions:
            if not callable(condition) and condition not in NAMES:
                raise ValueError(
                    f"stop_when({condition!r}): one of {', '.join(NAMES)}, or a function of a Record that returns True or a reason."
                )
            meter = getattr(condition, "meter", None)
            if meter is not None and meter not in self._session.measuring.meters:
                raise ValueError(
                    f"stop_when({condition!r}): this session has no such meter, so that it would never stop: give it in "
                    "Session(meters=[...])."
                )
        self._conditions = tuple(conditions)

    def _fulfilled(self, condition: Condition, record: Record, verdict: Verdict) -> str:
        """Return why the run shall end, "" where it shall not. A function that raises is dropped with a warning."""
        if isinstance(condition, str):
            text = next((event.text for event in verdict.events if event.kind in NAMES[condition]), None)
            if text is None and verdict.entered != condition:
                return ""
            return f"{condition} at step {record.step}" + (f", {text}" if text else "")
        name = getattr(condition, "__name__", type(condition).__name__)
        try:
            answer = condition(record)
        except Exception as error:
            self._conditions = tuple(c for c in self._conditions if c is not condition)
            warnings.warn(
                f"The condition {name} failed and no longer ends the run ({type(error).__name__}: {error}).",
                stacklevel=2,
            )
            return ""
        if isinstance(answer, str):
            return answer
        return f"{name} at step {record.step}" if answer else ""


def _light(session: Session) -> Light:
    """Return the Light of a session; a model that cannot be described has none, and ends no run."""
    try:
        return light_of(session)
    except Exception as error:
        return Light(None, None, f"the model's work is not known ({type(error).__name__}: {error})")
