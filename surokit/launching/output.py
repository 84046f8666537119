"""Read what the processes of a launch print, line by line, from the files that it goes to."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal, TextIO

Shown = Literal["all", "first", "none"]


class Output:
    """An Output prints new lines of all processes with their number: [rank 1] ...; of a progress bar only what it ends with.

    shown: "all", "first" for the first process' alone, or "none"; errors of all are told at the end in any case.
    """

    def __init__(self, folder: Path, shown: Shown, write: Callable[[str, bool], None] | None = None) -> None:
        self._folder, self._shown = folder, shown
        self._read: dict[Path, int] = {}
        self._open: dict[Path, bytes] = {}
        self._write = write or _to_streams

    def pump(self, end: bool = False) -> None:
        """Print the lines that have come since the last call; with `end`, also those that are not finished."""
        for path in sorted(self._folder.glob("*-*.???")):  # by attempt, then by rank
            rank = int(path.stem.rpartition("-")[2]) if path.suffix in (".out", ".err") else None
            if rank is None or self._shown == "none" or (self._shown == "first" and rank):
                continue
            with suppress(OSError), path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = self._open.pop(path, b"") + file.read()
                self._read[path] = file.tell()
                *lines, rest = data.split(b"\n")
                if end and rest:
                    lines, rest = [*lines, rest], b""
                if rest:  # of a progress bar, what it shows now
                    self._open[path] = rest[rest.rstrip(b"\r").rfind(b"\r") + 1 :]
                for line in lines:
                    text = line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
                    self._write(f"[rank {rank}] {text}\n", path.suffix == ".err")


def _to_streams(text: str, is_error: bool) -> None:
    stream: TextIO = sys.stderr if is_error else sys.stdout
    stream.write(text)
    stream.flush()
