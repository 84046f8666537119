"""What a session says of itself while a race lets it run: a turn is a few steps of `Session.run`, and its end is not the run's.

Who reads the run's folder (`surokit.watch`) is told the race's number of steps, and "running" until the race ends. An interrupt is
the race's, which asks the session to stop and says how to go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from surokit.train import Session
from surokit.train.status import RunInfo

_OF_A_TURN = ("running", "paused")


@contextmanager
def as_part_of(session: Session, total: int | None) -> Iterator[None]:
    """Runs of the session within it are parts of one that ends at step `total`, None where that is planned by time."""
    journal, control = session.journal, session.control
    begin, beat, describe = journal.begin, journal.beat, journal.describe

    def begin_turn(_total: int | None) -> None:
        begin(total)

    def beat_in_turn(state: str | None = None, now: bool = False) -> None:
        beat(state if state in _OF_A_TURN else None, now)

    def describe_turn() -> RunInfo:
        return replace(describe(), resumes=False)  # not by run()

    own = {
        (journal, "begin"): begin_turn,
        (journal, "beat"): beat_in_turn,
        (journal, "describe"): describe_turn,
        (control, "interruptible"): nullcontext,
    }
    for (what, name), done in own.items():
        setattr(what, name, done)
    try:
        yield
    finally:
        for what, name in own:
            delattr(what, name)
