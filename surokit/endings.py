"""Order what is done as the interpreter ends: first runs in threads are stopped and saved, and then what works beside them ends."""

from __future__ import annotations

import atexit
from collections.abc import Callable

_last: list[Callable[[], None]] = []


def stop_at_exit(call: Callable[[], None]) -> None:
    """Call this as the interpreter ends, before anything that `end_at_exit` was given. `atexit.unregister` takes it back."""
    atexit.register(call)


def end_at_exit(call: Callable[[], None]) -> None:
    """Call this as the interpreter ends, after all that `stop_at_exit` was given, whenever that was."""
    _last.append(call)


@atexit.register  # before any other here: what is registered first is called last
def _end() -> None:
    for call in _last:
        call()
