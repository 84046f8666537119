"""How a run is stopped: what others ask of it is looked at between two steps, never inside one.

Three ways lead here: `stop()` from another thread, an interrupt of the main thread, and a file in the run's folder.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LOOK_EVERY_S = 0.5  # at files


class Control:
    """What is asked of the runs of one session. `updating` is for the step to set: half an update cannot be undone."""

    def __init__(self) -> None:
        self.updating = False
        self._stop_asked = False
        self._look_at = 0.0

    def stop(self) -> None:
        """Ends the run that is going on, from another thread, at the end of its step."""
        self._stop_asked = True

    def clear(self, run_dir: Path | None) -> None:
        """What was asked of an earlier run does not hold for the one that begins."""
        self._stop_asked = False
        self._look_at = 0.0
        if run_dir is not None:
            (run_dir / "stop").unlink(missing_ok=True)

    def stop_wanted(self, run_dir: Path | None) -> bool:
        now = time.monotonic()
        if run_dir is not None and now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            if (run_dir / "stop").exists():
                (run_dir / "stop").unlink(missing_ok=True)
                return True
        return self._stop_asked

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """The first interrupt asks for a stop, the second raises. Only the main thread receives signals."""
        previous = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or previous in (None, signal.SIG_IGN):
            yield
            return

        interrupted = False

        def handler(_signal: int, _frame: Any) -> None:
            nonlocal interrupted
            if interrupted and not self.updating:  # half an update cannot be undone; it ends within milliseconds
                raise KeyboardInterrupt
            interrupted = self._stop_asked = True
            print("\nsurokit: stopping after this step; run() goes on from there", file=sys.stderr)

        signal.signal(signal.SIGINT, handler)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)
