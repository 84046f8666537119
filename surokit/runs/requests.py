"""This module reads the files by which any process asks something of a run: stop, pause and save in its folder.

    stop     the run ends; the file's first line says why, or where the file was says it
    pause    the run waits for as long as the file is there
    save     the run writes a checkpoint

A disk that does not answer asks for nothing. A file that cannot be removed is somebody else's, and is heard once.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Protocol

STOP, PAUSE, SAVE = "stop", "pause", "save"
LOOK_EVERY_S = 0.5  # at files, while steps are taken
WAIT_S = 0.05  # between two looks while a run is paused


class HasFolder(Protocol):
    @property
    def run_dir(self) -> Path | None: ...


class Files:
    """A Files object reads and removes the files in the owner's folder, wherever that is at the time; without a folder nothing
    is asked."""

    def __init__(self, owner: HasFolder) -> None:
        self._owner = owner
        self._deaf: set[str] = set()

    def forget(self) -> None:
        """Remove what was asked of an earlier run: it does not hold for the one that begins."""
        self._deaf.clear()
        for name in (STOP, PAUSE, SAVE):
            self.remove(name)

    def remove(self, name: str) -> None:
        if (folder := self._owner.run_dir) is None:
            return
        try:
            (folder / name).unlink(missing_ok=True)
        except OSError:
            self._deaf.add(name)

    @property
    def pause(self) -> bool:
        return self._there(PAUSE)

    @property
    def save(self) -> bool:
        return self._there(SAVE)

    def take_stop(self) -> str:
        """Return why the run shall end and remove the file that says so; "" where it goes on."""
        folder = self._owner.run_dir
        if folder is None or not self._there(STOP):
            return ""
        reason = reason_in(folder / STOP)
        self.remove(STOP)
        return reason

    def _there(self, name: str) -> bool:
        folder = self._owner.run_dir
        with suppress(OSError):
            return folder is not None and name not in self._deaf and (folder / name).exists()
        return False


def reason_in(file: Path) -> str:
    """Return the reason of an end that the file `stop` asked for: its first line, or where the file was."""
    line = ""
    with suppress(OSError), file.open(encoding="utf-8", errors="replace") as text:
        line = "".join(filter(str.isprintable, text.readline(200))).strip()
    return f"stopped: {line or f'by the file {file.name} in {file.parent}'}"
