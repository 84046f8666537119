"""A file of answers, a line each: {"key": ..., "answer": ...}. An answer that is refused, or warns, is an answer too."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from tests.answers.walk import plain, text


class Book:
    """Writes answers under keys that are used once."""

    def __init__(self, path: Path) -> None:
        self.path, self._keys = path, set[str]()
        path.write_text("")

    def write(self, key: str, ask: Any) -> Any:
        """Ask, and write what came: the answer as plain data, or the error, and beside it the warnings. Gives back the answer, or
        None."""
        key = text(key)
        if key in self._keys:
            raise ValueError(f"Two answers are called {key!r}.")
        self._keys.add(key)
        found, said = None, {}
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            try:
                found = ask()
                said = {"answer": plain(found)}
            except Exception as error:
                said = {"refused": f"{type(error).__name__}: {text(str(error))}"}
        if heard:
            said["warnings"] = sorted({f"{each.category.__name__}: {text(str(each.message))}" for each in heard})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, **said}) + "\n")
        return found


def shown(value: Any) -> dict[str, Any]:
    """What a value says and holds: its text, its page in a notebook, its table and frame where it has them, its parts."""
    page = getattr(value, "_repr_html_", None)
    found = {"text": str(value), "html": page() if page else None, "parts": value}
    for name in ("table", "frame"):
        if callable(getattr(value, name, None)):
            found[name] = getattr(value, name)()
    return found
