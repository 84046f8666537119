"""This module reads the files by which any process asks something of a run: stop, pause and save in its folder.

    stop     the run ends; the file's first line says why, or where the file was says it
    pause    the run waits for as long as the file is there
    save     the run writes a checkpoint

The folder of a launch is looked at as well, by the first of its processes: what it asks is asked of every run of the launch, so a
stop stays there. An error in reading counts as no request. A file that cannot be removed counts once.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Protocol

from surokit.ranks import rank_here

STOP, PAUSE, SAVE = "stop", "pause", "save"
LOOK_EVERY_S = 0.5  # at files, while steps are taken
WAIT_S = 0.05  # between two looks while a run is paused


class HasFolder(Protocol):
    @property
    def run_dir(self) -> Path | None: ...


class Files:
    """A Files object reads and removes the files in the owner's folder, wherever that is at the time, and in the launch's; without
    a folder nothing is asked."""

    def __init__(self, owner: HasFolder) -> None:
        self._owner = owner
        here = rank_here()
        self._launch = here.folder if here.is_first else None
        self._deaf: set[Path] = set()

    @property
    def folders(self) -> list[Path]:
        """Return the folders that are looked at."""
        return [folder for folder in (self._owner.run_dir, self._launch) if folder is not None]

    def forget(self) -> None:
        """Remove what was asked of an earlier run: it does not hold for the one that begins."""
        self._deaf.clear()
        for name in (STOP, PAUSE, SAVE):
            self._remove(self._owner.run_dir, name)

    def remove(self, name: str) -> None:
        for folder in self.folders:
            self._remove(folder, name)

    def _remove(self, folder: Path | None, name: str) -> None:
        if folder is None:
            return
        try:
            (folder / name).unlink(missing_ok=True)
        except OSError:
            self._deaf.add(folder / name)

    @property
    def pause(self) -> bool:
        return self._there(PAUSE)

    @property
    def save(self) -> bool:
        return self._there(SAVE)

    def take_stop(self) -> str:
        """Return why the run shall end and remove the file that says so, if it is the run's own; "" where it goes on."""
        file = self._find(STOP)
        if file is None:
            return ""
        reason = reason_in(file)
        if file.parent != self._launch:
            self._remove(file.parent, STOP)
        return reason

    def _there(self, name: str) -> bool:
        return self._find(name) is not None

    def _find(self, name: str) -> Path | None:
        for folder in self.folders:
            file = folder / name
            with suppress(OSError):
                if file not in self._deaf and file.exists():
                    return file
        return None


def reason_in(file: Path) -> str:
    """Return the reason of an end that the file `stop` asked for: its first line, or where the file was."""
    line = ""
    with suppress(OSError), file.open(encoding="utf-8", errors="replace") as text:
        line = "".join(filter(str.isprintable, text.readline(200))).strip()
    return f"stopped: {line or f'by the file {file.name} in {file.parent}'}"
