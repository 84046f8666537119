"""Start a process that ends with the one that started it, and end it with all that it started in turn."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress

# looked up beforehand: between a fork and its program nothing may wait for a lock that another thread held
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1
ENDS_S = 10.0  # for a process to end by itself once it is told to


def end_with_parent() -> None:
    """Let the system end this process with the one that started it, however that one ends; on Linux, elsewhere it does nothing."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_group(process: subprocess.Popen[bytes], asks: signal.Signals = signal.SIGINT, ends_s: float = ENDS_S) -> None:
    """End a process that was started in a session of its own, and its group: first by asking with a signal, then by force."""
    try:
        if process.poll() is None:
            _signal(process, asks)
            process.wait(ends_s)
    except subprocess.TimeoutExpired:
        pass
    finally:  # also where the wait is interrupted
        _signal(process, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(ends_s)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


__all__ = ["ENDS_S", "end_group", "end_with_parent"]
