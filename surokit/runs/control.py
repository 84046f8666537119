"""This module keeps what is asked of a run while it goes on (to stop, to wait, to save) until the one who drives it looks.

    another thread   control.stop(), .pause(), .resume(), .save(): a cell, a panel's button
    an interrupt     of the main thread, while it drives (Ctrl-C, the notebook's stop button): the first asks for a stop, the
                     second raises
    a file           stop, pause or save in the run's folder, from any process that sees it (requests.py)

The driver calls `poll_requests` between two pieces of work: steps of a session, turns of a race. A loop that is not ours looks when
it likes. What only one of them does is in its subclass: train/control.py, racing/scheduler.py, live.py.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Literal

from surokit.runs.locks import Lock
from surokit.runs.requests import LOOK_EVERY_S, PAUSE, SAVE, WAIT_S, Files, HasFolder

State = Literal["idle", "running", "paused"]


class RunControl:
    """A RunControl holds a run's state and what is asked of it, from any thread; nothing here waits but `poll_requests`.

    What is asked while nothing runs is dropped: the next run begins without it.
    owner: whoever knows the run's folder, which may change.
    """

    look_every_s = LOOK_EVERY_S  # at files

    def __init__(self, owner: HasFolder) -> None:
        self.files = Files(owner)
        self.is_nested = False  # this run is a part of another (a race), whose files and interrupts are not its own
        self._owner = owner
        self._state: State = "idle"
        self._worker: int | None = None  # the thread that drives
        self._lock = Lock()  # for beginning and ending
        self._forget()

    def _forget(self) -> None:
        """Forget what was asked of an earlier run."""
        self._news = False  # no lock: stop() may be called where a signal came in, whatever that thread was doing
        self._reason = ""
        self._pause_asked = self._pause_file = self._save_asked = False
        self._paused_s = 0.0
        self._look_at = 0.0 if self.files.folders else float("inf")

    # -- from any thread

    @property
    def state(self) -> State:
        """Return "paused" once a run has come to a boundary and waits there."""
        return self._state

    @property
    def reason(self) -> str:
        """Return why the run that goes on, or went on last, was asked to end; "" where it was not."""
        return self._reason

    @property
    def paused_s(self) -> float:
        """Return how many seconds this run has been paused."""
        return self._paused_s

    @property
    def is_idle(self) -> bool:
        return self._state == "idle"

    @property
    def elsewhere(self) -> bool:
        """Return whether another thread than this one drives."""
        return not self.is_idle and self._worker != threading.get_ident()

    def stop(self, reason: str = "stopped") -> None:
        """Ask the run that goes on to end. The first reason that is given holds."""
        if not self.is_idle:
            self._reason = self._reason or reason
            self._news = True

    def pause(self) -> None:
        """Ask the run that goes on to wait until `resume` or `stop`."""
        if not self.is_idle:
            self._pause_asked = self._news = True

    def resume(self) -> None:
        """End a pause, whoever asked for it."""
        self._pause_asked = self._pause_file = False
        self.files.remove(PAUSE)
        self._news = True

    def save(self) -> None:
        """Ask the run that goes on for a checkpoint."""
        self._save_asked = self._news = True

    # -- from the one who drives

    def begin(self) -> None:
        """Begin a run, in this thread or in one that is started now. RuntimeError where one goes on."""
        with self._lock:
            if not self.is_idle:
                raise self._busy()
            self._forget()
            if not self.is_nested:
                self.files.forget()
            self._state = "running"  # last: what is asked from now on holds

    def enter(self) -> None:
        """Note that this is the thread that drives."""
        self._worker = threading.get_ident()

    def end(self) -> None:
        """End the run."""
        self._state, self._worker = "idle", None

    def poll_requests(self) -> str:
        """Do what is asked, and wait while the run is paused. Return why it shall end, "" where it goes on.

        Costs a look at one attribute and at the time where nothing is asked.
        """
        if self._news or time.monotonic() >= self._look_at:
            self._news = False  # first, so that what comes from now on is seen the next time
            self._look()
            self._serve()
            if self._pause_wanted():
                self._wait()
        return self._reason

    def take_save(self) -> bool:
        """Take a request for a checkpoint: True once for each that was made."""
        asked, self._save_asked = self._save_asked, False
        if asked:
            self.files.remove(SAVE)
        return asked

    def _pause_wanted(self) -> bool:
        return (self._pause_asked or self._pause_file) and not self._reason

    def _look(self) -> None:
        """Look at the files if it is time."""
        if (now := time.monotonic()) < self._look_at:
            return
        self._look_at = now + self.look_every_s
        self._pause_file = self.files.pause
        self._save_asked = self.files.save or self._save_asked
        why = self.files.take_stop()
        self._reason = self._reason or why

    def _wait(self) -> None:
        began = time.monotonic()
        try:
            with self._aside():
                self._state = "paused"
                try:
                    self._tell_pause(True)
                    while self._pause_wanted():
                        time.sleep(WAIT_S)
                        self._look()
                        self._serve()
                finally:
                    self._state = "running"
        finally:
            self._paused_s += time.monotonic() - began
            self._tell_pause(False)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let the first interrupt in the block ask for a stop, and the second raise. Only the main thread receives signals."""
        previous = signal.getsignal(signal.SIGINT)
        main = threading.current_thread() is threading.main_thread() and previous not in (None, signal.SIG_IGN)
        if not main or self.is_nested:
            yield
            return

        interrupted = False

        def handler(number: int, frame: FrameType | None) -> None:
            nonlocal interrupted
            if not self._drives(frame):
                signal.signal(signal.SIGINT, previous)
                if callable(previous):
                    previous(number, frame)
                    return
                raise KeyboardInterrupt
            if interrupted and self._may_raise():
                raise KeyboardInterrupt
            interrupted = True
            print(f"\nsurokit: {self._stopping()}", file=sys.stderr)
            self.stop("interrupted")

        signal.signal(signal.SIGINT, handler)
        try:
            yield
        finally:
            # one that a failed training left open is collected in any thread; its handler gives the signal back by itself
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGINT, previous)

    # -- what a subclass has of its own

    def _busy(self) -> RuntimeError:
        return RuntimeError(f"The run is {self._state} already.")

    def _serve(self) -> None:
        """Do what is asked and can be done now; called again and again in a pause."""

    def _aside(self) -> AbstractContextManager[None]:
        """Return a context manager that is in force while the run waits."""
        return nullcontext()

    def _tell_pause(self, paused: bool) -> None:
        """Tell whoever follows the run that a pause begins or is over."""

    def _drives(self, frame: FrameType | None) -> bool:
        """Return whether the run still goes on where an interrupt came in: False gives the signal back to whoever had it."""
        return True

    def _may_raise(self) -> bool:
        """Return whether an interrupt can raise now and leave nothing half done."""
        return True

    def _stopping(self) -> str:
        """Return the message that answers an interrupt."""
        return "stopping"
