"""Functions that are launched: each process imports them from here, or is sent a copy of one that is defined in a test."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import surokit as sk
from surokit.ranks import rank_here
from tests.train.toys import Toy, make_batches

SAVE_EVERY, STEPS = 4, 20
COPIES = sk.Parallel(shard=1)


def together() -> int:
    """The sum over all processes of one each, by a process group of the function's own."""
    dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return int(ones)


def fails(rank: int) -> None:
    """One process fails while the others wait for it."""
    dist.init_process_group("gloo")
    if rank_here().number == rank:
        print("about to fail", file=sys.stderr)
        raise ArithmeticError("seven is not prime")
    dist.barrier()


def is_killed(rank: int) -> None:
    """One process is killed, and the others wait for it."""
    if rank_here().number == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def session_in(folder: Path, layout: sk.Parallel = COPIES, **options: Any) -> sk.Session:
    return sk.Session(
        Toy(dropout=0.0),
        make_batches(13),
        parallel=layout,
        schedule=None,
        run_dir=folder / "run",
        save_every=SAVE_EVERY,
        **options,
    )


class Kills:
    """Ends a process with a signal, each time that the run has come to the next of some steps."""

    def __init__(self, session: sk.Session, at: dict[int, tuple[int, int]]) -> None:
        self._session, self._at = session, at

    def on_step(self, record: Any) -> None:
        here = rank_here()
        if self._at.get(here.restarts) == (record.step, here.number):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_end(self, reason: str) -> None: ...


def trains(
    folder: Path, kills: dict[int, tuple[int, int]], layout: sk.Parallel = COPIES, steps: int = STEPS
) -> dict[str, Any]:
    """Trains in two runs, killed at {restart: (step, rank)}."""
    session = session_in(folder, layout)
    session.subscribe(Kills(session, kills))
    session.run(steps // 2)
    session.run(steps - steps // 2)
    return {"steps": session.steps, "losses": [r.loss for r in session.records], "seconds": session.redone_s}


def begins_late(folder: Path) -> tuple[str, int]:
    """Fails the first time, before it makes its session."""
    if rank_here().restarts == 0:
        raise FileNotFoundError("the data is not there yet")
    session = session_in(folder)
    session.run(3)
    assert session.run_dir is not None
    return session.run_dir.name, session.steps


def waits_for_stop(folder: Path) -> tuple[int, str]:
    """Trains until somebody asks for an end."""
    session = session_in(folder)
    session.live()
    reasons: list[str] = []

    class Told:
        def on_step(self, record: Any) -> None:
            if record.step == 2:
                (folder / "began").touch()

        def on_end(self, reason: str) -> None:
            reasons.append(reason)

    session.subscribe(Told())
    session.run(1_000_000)
    return session.steps, reasons[0]


def hangs(folder: Path) -> None:
    """One process stops between two steps; the other waits for it in a collective."""
    session = session_in(folder)

    class Hangs:
        def on_step(self, record: Any) -> None:
            if record.step == 3 and rank_here().number == 1:
                forgets_to_return()

        def on_end(self, reason: str) -> None: ...

    session.subscribe(Hangs())
    session.run(10)


def forgets_to_return() -> None:
    threading.Event().wait()


def trains_for_scale(steps: int, lengths: Sequence[int] = (12,) * 7) -> sk.Session:
    """Trains on batches of four rows, of these lengths in turn, for each process, and returns the session."""
    batches = [batch for length in lengths for batch in make_batches(1, length=length)]
    session = sk.Session(Toy(), batches, parallel=COPIES, schedule=None)
    session.run(steps)
    return session


LEFT: list[Any] = []


class AbortsAtTheEnd:
    """Ends the process as torch's threads may, when the interpreter is taken down."""

    def __del__(self, abort: Callable[[], None] = os.abort) -> None:
        abort()


def leaves_much_behind(folder: Path) -> None:
    """Leaves a thread, an exit function, and what aborts when the interpreter is taken down; one process asks for its end."""
    rank = rank_here().number
    atexit.register((folder / f"exit{rank}").touch)
    atexit.register(print, "left", rank)

    def ends() -> None:
        threading.main_thread().join()  # returns when the interpreter would end
        (folder / f"thread{rank}").touch()

    threading.Thread(target=ends).start()
    LEFT.append(AbortsAtTheEnd())
    if rank:
        sys.exit(0)
