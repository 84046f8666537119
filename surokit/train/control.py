"""This module does what others ask of a session's run, as of any run (runs/control.py): between two steps, never inside one.

A session's control also has `between_steps(f)`, by which another thread lets the run's thread do a piece of work there. An
interrupt that raises undoes the step in the making; a step that compiles is given up at the first one.

Of many processes any may be asked. What each was asked travels to all while a step is computed (parallel/exchange.py), so all of
them do it after the same step, one later than a single process would. How fast each is travels with it (pace.py).
"""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

from surokit.parallel.exchange import Exchange
from surokit.runs.control import RunControl
from surokit.runs.requests import SAVE
from surokit.train.compiling import Compilation
from surokit.train.random_state import turn

if TYPE_CHECKING:
    from surokit.train.session import Session

T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True)
class _Nowhere:
    """A _Nowhere is an owner without a folder: the files of a run are the first process' to look at."""

    run_dir: None = None


class _Asked(Generic[T]):
    """An _Asked is a piece of work for another thread, and what became of it."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._over = threading.Event()
        self._value: T
        self._error: BaseException | None = None

    def do(self) -> None:
        work, self._work = self._work, None
        if work is None:  # whoever asked has gone
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
        """Wait until the work is done, and return what it gave or raise its error."""
        try:
            self._over.wait()
        except BaseException:
            self._work = None
            raise
        if self._error is not None:
            raise self._error
        return self._value


class Control(RunControl):
    """A Control keeps what is asked of the runs of one session, from any thread; nothing here waits but `between_steps`.

    `stop` and `pause` are asked of the run that goes on. Where none does they do nothing, to the next run() neither.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._asked: deque[_Asked[Any]] = deque()
        self.midway = False  # in a step, so that there is nothing whole to look at or to save
        self.compilation = Compilation()  # of the step; a stop does not wait for it
        self.final = False  # the step changes weights, which cannot be undone; a second interrupt waits for its end
        processes = session.processes
        self._exchange = Exchange(processes) if processes.are_several else None
        super().__init__(session if processes.is_first else _Nowhere())

    # -- from any thread

    def stop(self, reason: str = "stopped: by session.control.stop()") -> None:
        """End the run that is going on at the end of its step. Does nothing where none goes on.

        reason: what subscribers and run.json are told, "stopped: " and who asked or why; the first one that is given holds.
        """
        super().stop(reason)
        if (
            not self.is_idle and self._exchange is None
        ):  # the others would wait for this process in the step's collectives
            self.compilation.give_up()

    def pause(self) -> None:
        """Let the run wait from the end of its step until `resume` or `stop`. Its clock, and minutes=, stand still meanwhile.

        Does nothing where none goes on.
        """
        super().pause()

    def save(self) -> None:
        """Save a checkpoint at the end of the step; where nothing runs, at once. One that fails in a run costs a warning.

        ValueError without a run_dir.
        """
        if self._session.run_dir is None:
            raise ValueError("There is nowhere to save to: give Session(run_dir=...).")
        with self._lock:  # so that the run does not end between the look and the asking
            if not self.is_idle:
                super().save()
                return
        self._session.save()

    def between_steps(self, f: Callable[[], T]) -> T:
        """Call `f` between two steps, in the thread that trains, and wait for what it returns; where nothing runs, call it at once.

        An exception of f is the caller's, and the run goes on. f draws from random states that are not the run's. No other
        session takes a step meanwhile, so f must not wait for one.
        """
        while True:
            if threading.get_ident() == self._worker:
                return self._now(f)
            if self.is_idle:
                with turn, self._lock:  # whoever takes steps by hand has the turn for each
                    if self.is_idle:
                        return self._now(f)
            if turn.mine:
                raise RuntimeError(
                    "This session trains in another thread and waits for the work that is being done here: ask for "
                    "evaluate(), save() and the like outside of another session's step."
                )
            asked = _Asked(f)
            with self._lock:
                if not self.is_idle:
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
        """Raise RuntimeError where another thread trains."""
        if self.elsewhere:
            raise self._busy()

    def _busy(self) -> RuntimeError:
        return RuntimeError(
            f"This session is {self._state} already, {self._session.steps} steps done: wait for the run that goes on, or end it "
            "with session.stop()."
        )

    # -- from the run

    def poll_requests(self) -> str:
        if self._exchange is None:
            return super().poll_requests()
        if self._news or time.monotonic() >= self._look_at:
            self._news = False
            self._look()
            self._serve()
        reason = self._obey()
        if not reason:
            self._exchange.send(self._wishes())
        return reason

    def _wishes(self) -> tuple[float, ...]:
        """Return what this process was asked for: to stop, to wait, to save; and what it does alone in a step."""
        pace = self._session.measuring.pace
        assert pace is not None
        return bool(self._reason), self._pause_asked or self._pause_file, self._save_asked, pace.say()

    def _obey(self) -> str:
        """Do what any process was asked for when `_wishes` were sent; return why the run shall end."""
        stop, wait = self._heard()
        if stop:
            reasons = self._session.processes.gather(self._reason)
            self._reason = next(filter(None, reasons))
            return self._reason
        if wait and self._pause_wanted():
            self._wait()
        return ""

    def _pause_wanted(self) -> bool:
        if self._exchange is None:
            return super()._pause_wanted()
        self._exchange.send(self._wishes())
        stop, wait = self._heard()
        return wait and not stop

    def _heard(self) -> tuple[bool, bool]:
        """Save if any process was asked to when `_wishes` were sent; return whether any was asked to stop, and to wait."""
        assert self._exchange is not None
        said = self._exchange.take()
        if said is None:
            return False, False
        pace = self._session.measuring.pace
        assert pace is not None
        pace.hear(said[:, 3].tolist())
        stop, wait, save = said[:, :3].amax(0).bool().tolist()
        if save:
            self._save_asked = False
            self._save()
        return stop, wait

    def settle(self) -> None:
        """Do what was asked until the last step's end, on every process; not after an error, since others go on then."""
        if self._exchange is not None:
            self._obey()
            self._exchange.send(self._wishes())
            self._obey()

    def finish(self) -> None:
        """Do what was asked until now, after the last step."""
        self._serve()

    def end(self) -> None:
        """End the run. What was asked while its end was told is done before another can begin."""
        self.enter()  # a run that did not come to begin has no other
        try:
            while not self._rests():
                self._serve()
        except BaseException:
            self.end()
            raise

    def _rests(self) -> bool:
        with self._lock:
            if not (self._asked or (self._save_asked and self._exchange is None)):  # one process alone saves nothing
                super().end()
            return self.is_idle

    def _look(self) -> None:
        super()._look()
        self._session.journal.beat()
        self._session.beat()  # a pause is no hang

    def _wait(self) -> None:
        self._session.arrivals.drain(wait=True)  # so that the device rests, and panels show where it does
        self._session.records.flush()
        super()._wait()

    def _aside(self) -> AbstractContextManager[None]:
        return self._session.random.aside()  # whoever sees a pause may draw random numbers, so it is seen only in here

    def _tell_pause(self, paused: bool) -> None:
        session = self._session
        if not paused:
            session.measuring.restart()
        session.journal.beat("paused" if paused else "running")
        session.subscribers.emit("on_pause", paused)

    def _serve(self) -> None:
        """Do what others wait for, and save where that was asked. The random state is theirs meanwhile."""
        if self._asked:
            with self._session.random.aside(), turn:  # others draw no numbers of another session either
                while self._asked:
                    self._asked.popleft().do()
            self._session.measuring.restart()
        if self._save_asked and self._exchange is None:
            self._save_asked = False
            self._save()

    def _save(self) -> None:
        session = self._session
        try:
            session.save()
        except Exception as error:
            warnings.warn(f"The checkpoint that was asked for is not there: {error} Training goes on.", stacklevel=2)
        finally:
            self.files.remove(SAVE)  # whoever asked by it sees that the checkpoint is there
            session.measuring.restart()

    # -- interrupts

    @contextmanager
    def step(self) -> Iterator[None]:
        """Mark the block as a step: `midway` is True in it, and the step itself sets `final`."""
        self.midway = True
        try:
            yield
        finally:
            self.midway = self.final = False

    @contextmanager
    def by_hand(self) -> Iterator[None]:
        """Let an interrupt wait in the block, a step of the user's own loop, while weights change: it is raised once they have."""
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

    def _may_raise(self) -> bool:
        return not self.final

    def _stopping(self) -> str:
        what = "giving up the compilation" if self.compilation.goes_on else "stopping after this step"
        return f"{what}; run() goes on from there"


def at_a_boundary(
    method: Callable[Concatenate[Session, P], T],
) -> Callable[Concatenate[Session, P], T]:
    """Wrap a method of Session: called while another thread trains, it runs between two of that thread's steps."""

    @wraps(method)
    def between(session: Session, /, *args: P.args, **options: P.kwargs) -> T:
        return session.control.between_steps(lambda: method(session, *args, **options))

    return between
