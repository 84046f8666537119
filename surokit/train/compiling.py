"""This module gives up at once a step that compiles, where that is asked, and says why a compilation failed. Compiling takes a
minute or more, most of it in C++ compilers.

    compilation = Compilation()
    with compilation:               # in the thread that trains
        model(**batch)
    compilation.give_up()           # from a signal's handler or any thread: GivenUp is raised in the block above

Processes that work for the compilation are ended too: torch's workers and the compilers that it has started.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from surokit.runs.locks import Lock

COMPILERS = {"g++", "gcc", "c++", "cc", "clang", "clang++", "nvcc", "cc1plus", "collect2", "ld", "as"}


class GivenUp(KeyboardInterrupt):
    """A GivenUp is raised where somebody did not want to wait for the compiler."""


class Compilation:
    """A Compilation is a piece of a step that may compile. Outside of it there is nothing to give up."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._thread: int | None = None
        self._given_up = False

    def __enter__(self) -> None:
        with self._lock:
            self._thread, self._given_up = threading.get_ident(), False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._close()
        except GivenUp:
            self._close()
            raise
        if isinstance(error, KeyboardInterrupt):
            end_workers()
        elif self._given_up:
            raise GivenUp from error

    def _close(self) -> None:
        with self._lock:
            thread, self._thread = self._thread, None
            if self._given_up:
                _raise_in(thread, None)  # an exception that was on its way to this thread has come, or comes now

    @property
    def goes_on(self) -> bool:
        return self._thread is not None and not self._given_up

    def give_up(self) -> None:
        """End the block that goes on, if one does, with GivenUp; in the block's own thread that is raised here."""
        with self._lock:
            if not self.goes_on:
                return
            self._given_up = True
            if self._thread == threading.get_ident():
                raise GivenUp
            _raise_in(self._thread, GivenUp)
        end_workers()  # the thread may wait for them, and an exception comes to it when it runs again


def _raise_in(thread: int | None, kind: type[BaseException] | None) -> None:
    """Raise an exception in another thread at its next line of Python; None takes back what has not come yet."""
    if thread is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread), None if kind is None else ctypes.py_object(kind)
        )


def end_workers() -> None:
    """End torch's compile workers, and the compilers that this process has started. Does nothing where nobody has compiled."""
    workers = sys.modules.get("torch._inductor.async_compile")
    if workers is None:
        return
    with suppress(Exception):  # torch's own affairs, which another version arranges otherwise
        threads = workers.AsyncCompile.pool
        if threads.cache_info().currsize:
            threads().shutdown(wait=False, cancel_futures=True)  # compilations that wait for their turn are not begun
            threads.cache_clear()
    for pid in _compilers():
        with suppress(OSError):
            os.kill(
                pid, signal.SIGINT
            )  # as Ctrl-C in a terminal does, at which they remove what they have half written
    with suppress(Exception):
        workers.shutdown_compile_workers()


def _compilers() -> list[int]:
    """Return the compilers among the processes below this one, the lowest first; found on Linux only. Elsewhere they end by
    themselves."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            head, _, rest = entry.read_text().rpartition(")")
            pid = int(entry.parent.name)
            names[pid], parents[pid] = head.partition("(")[2], int(rest.split()[1])
    depths = {}
    for pid in parents:
        depth, above = 0, pid
        while above in parents and above != os.getpid() and depth < len(parents):
            above, depth = parents[above], depth + 1
        if above == os.getpid() and depth:
            depths[pid] = depth
    return sorted((pid for pid in depths if names[pid] in COMPILERS), key=lambda pid: -depths[pid])


def why_it_failed(error: BaseException) -> str:
    """Return the compiler's own words in a line, without what torch puts around them."""
    inner = getattr(error, "inner_exception", None) or error
    lines = [
        line.strip()[:200] for line in str(inner).splitlines() if line.strip() and not line.startswith("Set TORCH")
    ]
    return (
        f"{type(inner).__name__}: {' ... '.join(dict.fromkeys([lines[0], lines[-1]])) if lines else 'no reason given'}"
    )
