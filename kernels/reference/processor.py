"""Ask Linux what kind of processor this machine has."""

from __future__ import annotations

from pathlib import Path


def cpuinfo() -> dict[str, str]:
    """Return what Linux says of the first processor, as /proc/cpuinfo has it: "model name", "flags"; empty on other systems."""
    info, told = Path("/proc/cpuinfo"), dict[str, str]()
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            told.setdefault(key.strip(), value.strip())
    return told
