"""Two files of answers, compared exactly; what differs is named by the answer's key and the place in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

_WIDTH = 100


def read(path: Path) -> dict[str, Any]:
    """The answers of a file by their keys."""
    lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return {line.pop("key"): line for line in lines}


def differences(base: dict[str, Any], working: dict[str, Any], but: tuple[str, ...] = ()) -> list[str]:
    """A sentence for each difference, in the order of the answers; none where all are equal. Places that match a pattern of `but`
    (key: place) are let through."""
    found = []
    for key in {**base, **working}:
        for place, old, new in _places(base.get(key, _NONE), working.get(key, _NONE), ""):
            name = f"{key}: {place.lstrip('.')}" if place else key
            if not any(fnmatch(name, pattern) for pattern in but):
                found.append(f"{name}: {_told(old, new)}")
    return found


class _Missing:
    pass


_NONE = _Missing()


def _places(old: Any, new: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in {**old, **new}:
            yield from _places(old.get(name, _NONE), new.get(name, _NONE), f"{place}.{name}")
    elif isinstance(old, list) and isinstance(new, list):
        for i in range(max(len(old), len(new))):
            yield from _places(old[i] if i < len(old) else _NONE, new[i] if i < len(new) else _NONE, f"{place}[{i}]")
    elif old is _NONE or new is _NONE or json.dumps(old) != json.dumps(new):  # as text: 1 is not 1.0, and nan is nan
        yield place, old, new


def _told(old: Any, new: Any) -> str:
    if new is _NONE:
        return f"only BASE has it ({_short(old)})"
    if old is _NONE:
        return f"only the working copy has it ({_short(new)})"
    if isinstance(old, str) and isinstance(new, str) and ("\n" in old or len(old) > _WIDTH):
        return _line_told(old, new)
    return f"{_short(old)} in BASE, {_short(new)} in the working copy"


def _line_told(old: str, new: str) -> str:
    """Of two long texts the first line that differs, from a little before the difference."""
    before, after = old.splitlines(), new.splitlines()
    i = next((i for i, (a, b) in enumerate(zip(before, after)) if a != b), min(len(before), len(after)))
    a, b = (lines[i] if i < len(lines) else "(it ends)" for lines in (before, after))
    at = next((k for k, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    start = max(0, at - _WIDTH // 3)
    return f"line {i + 1}: {_short(a[start:])} in BASE, {_short(b[start:])} in the working copy"


def _short(value: Any) -> str:
    told = json.dumps(value, ensure_ascii=False)
    return told if len(told) <= _WIDTH else f"{told[: _WIDTH - 1]}…"
