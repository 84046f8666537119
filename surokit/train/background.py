"""This module runs a training in a thread of its own, so that a notebook's other cells, and a panel's buttons, work meanwhile.

The thread takes over what torch keeps for each: the caller's default device, CUDA device and stream, and autocast. Gradients are on
there, whatever the caller has switched off. The random generators are the process's: random_state.py says what that means.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from surokit.endings import stop_at_exit
from surokit.runs.control import RunControl
from surokit.train.random_state import turn


class Running:
    """A Running is a run that goes on. Wait for it with `wait()`, or with `await` where other work of the event loop shall go on.

    Either raises what ended the run. An interrupt of the waiting (a cancellation, of `await`) asks the run to stop at the end of
    its step and waits on; a second one gives up waiting. A program that ends without waiting stops the run in the same way.

    what, goes_on: what is said of the work ("the run") and of how it goes on after a stop ("run()").
    """

    def __init__(
        self,
        work: Callable[[], None],
        control: RunControl,
        device: torch.device,
        title: str,
        what: str = "the run",
        goes_on: str = "run()",
    ) -> None:
        self._control, self._title, self._what, self._goes_on = control, title, what, goes_on
        self._over = threading.Event()  # an interrupted Thread.join() takes the thread for ended (CPython 3.11)
        self._error: BaseException | None = None
        context = contextvars.copy_context()  # in a notebook, prints go to the cell that began the run
        run = partial(context.run, self._run, work, _callers(device))
        self._thread = threading.Thread(target=run, name="surokit-run", daemon=True)
        control.begin()
        stop_at_exit(self._leave)
        try:
            self._thread.start()
        except BaseException:
            if self._thread.ident is None:  # there is none
                self._ended()
                control.end()
            raise

    def _run(self, work: Callable[[], None], around: Callable[[], ExitStack]) -> None:
        begun = False
        try:
            with around():
                begun = True
                work()
        except BaseException as error:
            self._error = error
            print(f"surokit: {self._what} has failed, {type(error).__name__}: {error}", file=sys.stderr)
        finally:
            if not begun:
                self._control.end()
            self._ended()

    def _ended(self) -> None:
        atexit.unregister(self._leave)
        self._over.set()

    def _leave(self) -> None:
        """Stop the run when the program ends. A forked process has no such thread."""
        if self._thread.is_alive():
            self._control.stop("stopped: the program ended")
            self._over.wait()

    @property
    def running(self) -> bool:
        return not self._over.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end of the run, at most `timeout` seconds; return whether it has ended."""
        if threading.current_thread() is self._thread:
            raise RuntimeError(f"{self._what.capitalize()} cannot wait for itself: call wait() from another thread.")
        if turn.mine and self.running:
            raise RuntimeError(
                f"{self._what.capitalize()} waits for the work that is being done here: call wait() outside of another session's "
                "step."
            )
        deadline = None if timeout is None else time.monotonic() + timeout
        asked = False
        while True:
            try:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not self._over.wait(left):
                    return False
                break
            except KeyboardInterrupt:
                if asked:
                    raise
                asked = True
                self._stop()
        self._raise()
        return True

    def __await__(self) -> Generator[Any, None, None]:
        return self._waiting().__await__()

    async def _waiting(self) -> None:
        asked = False
        while self.running:
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:  # a notebook's interrupt
                if asked:
                    raise
                asked = True
                task = asyncio.current_task()
                if task is not None and hasattr(task, "uncancel"):
                    task.uncancel()
                self._stop()
        self._raise()

    def _stop(self) -> None:
        print(f"\nsurokit: stopping after this step; {self._goes_on} goes on from there", file=sys.stderr)
        self._control.stop("interrupted")

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def __repr__(self) -> str:
        if self.running:
            return f"<Running {self._title}: {self._control.state}>"
        return f"<Running {self._title}: {f'failed, {self._error!r}' if self._error is not None else 'over'}>"


def _callers(device: torch.device) -> Callable[[], ExitStack]:
    """Return a function that another thread calls for a context with the torch settings of this thread."""
    settings: list[Callable[[], Any]] = []
    default = torch.get_default_device()
    if default.type != "cpu":
        settings.append(lambda: default)
    if device.type == "cuda":
        index, stream = torch.cuda.current_device(), torch.cuda.current_stream(device)
        settings += [lambda: torch.cuda.stream(stream), lambda: torch.cuda.device(index)]  # a stream brings its device
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        settings.append(lambda: torch.autocast(device.type, dtype=dtype))

    def entered() -> ExitStack:
        stack = ExitStack()
        for setting in settings:
            stack.enter_context(setting())
        return stack

    return entered
