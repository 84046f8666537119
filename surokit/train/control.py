"""What others ask of a run: to stop, to wait, to save, or to let them do something. Done between two steps, never inside one.

    another thread   session.control.stop(), .pause(), .resume(), .save(), .between_steps(f): a cell, a panel's button
    an interrupt     of the main thread, while it trains (Ctrl-C, the notebook's stop button): the first asks for a stop, the second
                     raises, and the step in the making is undone; one that compiles is given up at the first
    a file           stop, pause (it waits while that exists) or save in the run's folder, from any process that sees it; the first
                     line of stop, where it has one, says who asks or why

A step looks at one attribute and at the time; files are looked at every half second.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, TypeVar

from surokit.runs.locks import Lock
from surokit.runs.requests import LOOK_EVERY_S, PAUSE, SAVE, WAIT_S, Files
from surokit.train.compiling import Compilation
from surokit.train.random_state import turn

if TYPE_CHECKING:
    from surokit.train.session import Session

T = TypeVar("T")
P = ParamSpec("P")
State = Literal["idle", "running", "paused"]


class _Asked(Generic[T]):
    """A piece of work for another thread, and what became of it."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._over = threading.Event()
        self._value: T
        self._error: BaseException | None = None

    def do(self) -> None:
        work, self._work = self._work, None
        if work is None:  # who asked has gone
            return
        try:
            self._value = work()
        except BaseException as error:
            self._error = error
            if not isinstance(error, Exception):  # an interrupt is the run's too
                raise
        finally:
            self._over.set()

    def result(self) -> T:
        """Waits for it."""
        try:
            self._over.wait()
        except BaseException:
            self._work = None
            raise
        if self._error is not None:
            raise self._error
        return self._value


class Control:
    """What is asked of the runs of one session, from any thread; nothing here waits but `between_steps`.

    `stop` and `pause` are asked of the run that goes on. Where none does they do nothing: the next run() goes
    its way.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.files = Files(session)
        self._state: State = "idle"
        self._worker: int | None = None  # the thread that trains
        self._lock = Lock()  # for beginning and ending: held while an idle session works for somebody
        self._asked: deque[_Asked[Any]] = deque()
        self.midway = False  # of a step: neither before it nor after, so there is nothing whole to look at or to save
        self.compilation = Compilation()  # of a step, which a stop does not wait for
        self.final = False  # of a step: what changes cannot be undone by halves; a second interrupt waits for its end
        self._forget()

    def _forget(self) -> None:
        """What was asked of an earlier run does not hold for the one that begins."""
        self._news = False  # no lock: stop() may be called where a signal came in, whatever that thread was doing
        self._reason = ""
        self._pause_asked = self._pause_file = self._save_asked = False
        self._paused_s = 0.0
        self._look_at = float("inf") if self._session.run_dir is None else 0.0

    # -- from any thread

    @property
    def state(self) -> State:
        """ "paused" once a run has come to a boundary and waits there."""
        return self._state

    @property
    def reason(self) -> str:
        """Why the run that goes on, or went on last, was asked to end; "" where it was not."""
        return self._reason

    def _is_idle(self) -> bool:
        return self._state == "idle"

    def stop(self, reason: str = "stopped: by session.control.stop()") -> None:
        """Ends the run that is going on at the end of its step. Nothing where none goes on.

        reason: what subscribers and run.json are told, "stopped: " and who asked or why; the first one that is given holds.
        """
        if self._state != "idle":
            self._reason = self._reason or reason
            self._news = True
            self.compilation.give_up()

    def pause(self) -> None:
        """The run waits from the end of its step until `resume` or `stop`. Its clock, and minutes=, stand still meanwhile.

        Nothing where none goes on.
        """
        if self._state != "idle":
            self._pause_asked = True
            self._news = True

    def resume(self) -> None:
        """Ends a pause, whoever asked for it."""
        self._pause_asked = self._pause_file = False
        self.files.remove(PAUSE)
        self._news = True

    def save(self) -> None:
        """A checkpoint at the end of the step; where nothing runs, at once. One that fails in a run costs a warning.

        ValueError without a run_dir.
        """
        if self._session.run_dir is None:
            raise ValueError("There is nowhere to save to: give Session(run_dir=...).")
        with self._lock:  # so that the run does not end between the look and the asking
            if self._state != "idle":
                self._save_asked = self._news = True
                return
        self._session.save()

    def between_steps(self, f: Callable[[], T]) -> T:
        """What `f` gives, called between two steps, in the thread that trains; at once where nothing runs. Waits for it.

        An exception of f is the caller's, and the run goes on. f draws from random states that are not the run's. No other
        session takes a step meanwhile, so f must not wait for one.
        """
        while True:
            if threading.get_ident() == self._worker:
                return self._now(f)
            if self._is_idle():
                with turn, self._lock:  # who takes steps by hand has the turn for each
                    if self._is_idle():
                        return self._now(f)
            if turn.mine:
                raise RuntimeError(
                    "This session trains in another thread and waits for the work that is being done here: ask for "
                    "evaluate(), save() and the like outside of another session's step."
                )
            asked = _Asked(f)
            with self._lock:
                if not self._is_idle():
                    self._asked.append(asked)
                    self._news = True
                    break
        return asked.result()

    def _now(self, f: Callable[[], T]) -> T:
        if self.midway:
            raise RuntimeError(
                "A step is in the making here: from a signal's handler or a hook, call session.control.save(), .stop() or "
                ".pause(), which wait for its end."
            )
        return f()

    def only_here(self) -> None:
        """RuntimeError where another thread trains."""
        if self._state != "idle" and threading.get_ident() != self._worker:
            raise self._busy()

    def _busy(self) -> RuntimeError:
        return RuntimeError(
            f"This session is {self._state} already, {self._session.steps} steps done: wait for the run that goes on, or end it "
            "with session.stop()."
        )

    # -- from the run

    def begin(self) -> None:
        """A run begins, in this thread or in one that is started now. RuntimeError where one goes on."""
        with self._lock:
            if self._state != "idle":
                raise self._busy()
            self._forget()
            if not self._session.journal.in_parts:
                self.files.forget()  # between the parts of one run they hold
            self._state = "running"

    def enter(self) -> None:
        """This is the thread that trains."""
        self._worker = threading.get_ident()

    def finish(self) -> None:
        """The last step is done; what was asked until now is done too."""
        self._serve()

    def end(self) -> None:
        """The run is over. What was asked while its end was told is done before another can begin."""
        self.enter()  # a run that did not come to begin has no other
        try:
            while not self._rests():
                self._serve()
        except BaseException:
            self.end()
            raise

    def _rests(self) -> bool:
        with self._lock:
            if not (self._asked or self._save_asked):
                self._state, self._worker = "idle", None
            return self._state == "idle"

    def attend(self) -> str:
        """Between two steps: does what is asked. Why the run shall end, "" where it goes on."""
        if self._news or time.monotonic() >= self._look_at:
            self._attend()
        return self._reason

    @property
    def paused_s(self) -> float:
        """Of this run, seconds it has waited."""
        return self._paused_s

    def _attend(self) -> None:
        self._news = False  # first, so that what comes from now on is seen the next time
        self._look()
        self._serve()
        if self._pause_wanted():
            self._wait()

    def _pause_wanted(self) -> bool:
        return (self._pause_asked or self._pause_file) and not self._reason

    def _wait(self) -> None:
        session, began = self._session, time.monotonic()
        session.arrivals.harvest(wait=True)  # so that the device rests, and panels show where it does
        session.records.flush()
        try:
            with session.random.aside():  # who sees a pause may draw, so it is seen only in here
                self._state = "paused"
                try:
                    session.journal.beat("paused")
                    session.subscribers.tell("on_pause", True)
                    while self._pause_wanted():
                        time.sleep(WAIT_S)
                        self._look()
                        self._serve()
                finally:
                    self._state = "running"
        finally:
            self._paused_s += time.monotonic() - began
            session.measuring.restart()
            session.journal.beat("running")
            session.subscribers.tell("on_pause", False)

    def _look(self) -> None:
        """At the files, and now and then says that the run is alive."""
        if (now := time.monotonic()) < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        self._session.journal.beat()
        self._pause_file = self.files.pause
        self._save_asked = self.files.save or self._save_asked
        why = self.files.take_stop()
        self._reason = self._reason or why

    def _serve(self) -> None:
        """Does what others wait for, and saves where that was asked. The random state is theirs meanwhile."""
        if self._asked:
            with self._session.random.aside(), turn:  # what they draw is no other session's either
                while self._asked:
                    self._asked.popleft().do()
            self._session.measuring.restart()
        if self._save_asked:
            self._save_asked = False
            self._save()

    def _save(self) -> None:
        session = self._session
        try:
            session.save()
        except Exception as error:
            warnings.warn(f"The checkpoint that was asked for is not there: {error} Training goes on.", stacklevel=2)
        finally:
            self.files.remove(SAVE)
            session.measuring.restart()

    # -- interrupts

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step, which says itself how far it is, in `midway` and `final`."""
        self.midway = True
        try:
            yield
        finally:
            self.midway = self.final = False

    @contextmanager
    def by_hand(self) -> Iterator[None]:
        """Around a step that the user's own loop takes: an interrupt that comes while weights change is raised once they have."""
        previous = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(previous):
            yield
            return

        waiting: list[tuple[int, Any]] = []

        def handler(number: int, frame: Any) -> None:
            if self.final:
                waiting.append((number, frame))
            else:
                previous(number, frame)

        try:
            signal.signal(signal.SIGINT, handler)
            yield
        finally:
            signal.signal(signal.SIGINT, previous)
            if waiting:
                previous(*waiting[0])

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """The first interrupt asks for a stop, the second raises. Only the main thread receives signals; of a run in parts they are
        the whole's."""
        previous = signal.getsignal(signal.SIGINT)
        main = threading.current_thread() is threading.main_thread() and previous not in (None, signal.SIG_IGN)
        if not main or self._session.journal.in_parts:
            yield
            return

        interrupted = False

        def handler(_signal: int, _frame: Any) -> None:
            nonlocal interrupted
            if interrupted and not self.final:
                raise KeyboardInterrupt
            interrupted = True
            self._reason = self._reason or "interrupted"
            what = "giving up the compilation" if self.compilation.goes_on else "stopping after this step"
            print(f"\nsurokit: {what}; run() goes on from there", file=sys.stderr)
            self.compilation.give_up()

        signal.signal(signal.SIGINT, handler)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)


def at_a_boundary(
    method: Callable[Concatenate[Session, P], T],
) -> Callable[Concatenate[Session, P], T]:
    """A method of Session that, called while another thread trains, happens between two of its steps."""

    @wraps(method)
    def between(session: Session, /, *args: P.args, **options: P.kwargs) -> T:
        return session.control.between_steps(lambda: method(session, *args, **options))

    return between
