"""End a process that makes no step for too long, and write down where each of its threads is."""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from surokit.ranks import rank_here

EVERY_S = 1.0  # arming costs a thread's start, some 30 us


class Watchdog:
    """A Watchdog ends the process unless `beat` is called at least every `seconds`; it needs no lock and no running Python."""

    def __init__(self, seconds: float, file: TextIO) -> None:
        self._seconds, self._file = seconds, file
        self._armed = 0.0
        self.beat()

    def beat(self) -> None:
        """Say that a step was made."""
        now = time.monotonic()
        if now - self._armed >= min(EVERY_S, self._seconds / 4):
            self._armed = now
            faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._file)

    def end(self) -> None:
        """Let the process take as long as it likes."""
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def watched() -> Iterator[Watchdog | None]:
    """Watch over the block, if whoever started the process asked for it; None else. A process that is ended for another's sake
    leaves its stack too."""
    here = rank_here()
    if here.hang_s is None or threading.current_thread() is not threading.main_thread():
        yield None
        return
    path = None if here.folder is None else here.folder / f"stack-{here.number}.txt"
    file = sys.__stderr__ if path is None else path.open("w")
    assert file is not None
    faulthandler.register(signal.SIGTERM, file=file, all_threads=True, chain=True)
    dog = Watchdog(here.hang_s, file)
    try:
        yield dog
    finally:
        dog.end()
        faulthandler.unregister(signal.SIGTERM)
        if path is not None:
            file.close()
            path.unlink(missing_ok=True)
