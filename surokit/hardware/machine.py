"""Find the memory of this machine that this process may have."""

from __future__ import annotations

import os
from pathlib import Path


def machine_gib() -> float | None:
    """Return the GiB that this process may have: the machine's, or its control group's limit where that is less; None where the
    system does not say."""
    try:
        held = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on every system
        return None
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text(encoding="ascii").strip()).isdigit():
        held = min(held, int(text))
    return round(held / 2**30, 2)


def room_for_decoded(gib: float | None = None) -> float:
    """Return the bytes that decoded weights of all sessions together may take on a CPU: a quarter of `gib`, the machine's memory,
    or of the memory that this process may have."""
    return 0.25 * (gib or machine_gib() or 0.0) * 2**30
