"""This module holds a lock for values that are copied."""

from __future__ import annotations

import threading


class Lock:
    """A Lock is used as threading.RLock in `with`. A copy of what holds one, by copy.deepcopy or pickle, has a free lock of
    its own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[Lock], tuple[()]]:
        return Lock, ()
