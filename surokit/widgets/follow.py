"""`sk.watch` shows the panel of runs that another kernel, process or machine trains, from their folders alone.

The two sides exchange nothing but files (folder.py), so a folder that two machines share is enough; the buttons write files too.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import warnings
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from surokit.widgets.folder import RACE, RECORDS, TURN, FileControl, RaceFolder, RunFolder, runs_in
from surokit.widgets.front import shown
from surokit.widgets.panel import Panel, View, ViewName, in_notebook
from surokit.widgets.picture import bundle, summary_text
from surokit.widgets.state import Runs

EVERY_S, SLOWEST_S = 0.5, 5.0  # between two looks: while there is news, and while there is none
LOOK_SHARE = 0.1  # the share of the time that may go into looking


class Watch:
    """A Watch is what `watch` returns: it follows runs in a thread until every one is over; `await` or `.wait()` waits for that.

    `states` has the states that are drawn, `reasons` how each run stands, and `control` the methods behind the buttons.
    """

    def __init__(
        self,
        folders: Iterable[RunFolder],
        follow: bool = True,
        every_s: float = EVERY_S,
        view: View | ViewName = "auto",
        races: Mapping[str, RaceFolder] = MappingProxyType({}),
    ) -> None:
        self.folders = {folder.name: folder for folder in folders}
        self.races = dict(races)
        self.states = Runs()
        self.control = FileControl([*self.folders.values(), *self.races.values()])
        self._every_s = every_s
        self._asked = threading.Event()
        self._thread: threading.Thread | None = None
        self._look(math.inf if not follow else 1.0)
        goes_on = follow and not self.over
        if view == "auto" and not goes_on:
            view = "svg" if in_notebook() else "text"
        self._panel = Panel(self.states, view=view, control=self.control if goes_on else None)
        self._panel.ends = False
        self._panel.refresh(final=not goes_on)
        self._shown_in = _cell()
        if goes_on:
            self._thread = threading.Thread(target=self._follow, name="surokit-watch", daemon=True)
            self._thread.start()

    @property
    def over(self) -> bool:
        """True if every run is over: it has said so, or its process is known to have ended; `reasons` tells which."""
        begins = any(race.goes_on and not path.exists() for race in self.races.values() for path in race.runs.values())
        return not begins and all(folder.over for folder in self.folders.values())

    @property
    def reasons(self) -> dict[str, str | None]:
        """Return the reason why each run ended, by its name: None while it goes on; "done", "interrupted", "stopped: ..." or
        "failed: ..." if it said so itself; "lost: ..." if there is no sign of life or its process or folder is gone."""
        return {name: state.reason for name, state in self.states.items()}

    @property
    def following(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def stop_following(self) -> None:
        """Stop following and leave the picture as it is; the runs go on."""
        self._asked.set()
        self.wait()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every run is over, or for `timeout` seconds, and return whether following has ended. An interrupt ends the
        waiting only."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self.following

    def __await__(self) -> Generator[Any, None, Watch]:
        return self._awaited().__await__()

    async def _awaited(self) -> Watch:
        import asyncio

        while self.following:
            await asyncio.sleep(0.05)
        return self

    def _look(self, budget_s: float) -> bool:
        news = False
        racing: dict[str, list[str]] = {}
        for label, race in self.races.items():
            news |= race.look()
            racing[label] = self._who_races(label, race)
        for name, folder in self.folders.items():
            news |= folder.look(budget_s / len(self.folders))
            if folder.trouble and folder.state.reason is None:
                folder.state.reason = f"lost: {folder.trouble}"
            self.states[name] = folder.state
        for race in self.races.values():  # once more: it says how it ended before its runs do, which may just have
            news |= race.look()
        heads = {label: race.words(self.states[name] for name in racing[label]) for label, race in self.races.items()}
        self.states.headline = " | ".join(f"{label}: {words}" if label else words for label, words in heads.items())
        return news

    def _who_races(self, label: str, race: RaceFolder) -> list[str]:
        """Return the names of a race's runs that have a folder. Runs may begin while the race is watched: a RunFolder is made for
        each new one, and each is told how the race stands."""
        found = []
        for title, path in race.runs.items():
            name = f"{label}/{title}" if label else title
            if name not in self.folders and path.is_dir():
                self.folders[name] = RunFolder(path, name, title=name)
            if name in self.folders:
                self.folders[name].ended, self.folders[name].beat = "" if race.goes_on else race.state, race.beat
                found.append(name)
        return found

    def _follow(self) -> None:
        pause_s = self._every_s
        try:
            while not self._asked.wait(pause_s):
                began = time.monotonic()
                news = self._look(self._every_s)
                took_s = time.monotonic() - began
                self._panel.news |= news
                if self.over:
                    break
                self._panel.tick()
                behind = any(folder.reader.behind for folder in self.folders.values())
                quiet_s = (
                    self._every_s if news or self._panel.news else min(1.5 * pause_s, max(SLOWEST_S, self._every_s))
                )
                pause_s = 0.0 if news and behind else max(quiet_s, took_s / LOOK_SHARE)
        except Exception as error:
            warnings.warn(f"Following ended ({type(error).__name__}: {error}); the runs go on.", stacklevel=2)
        self._panel.refresh(final=True)

    def __repr__(self) -> str:
        return summary_text(shown(self.states))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return bundle(shown(self.states))

    def _ipython_display_(self) -> None:
        """Display the panel, but not a second time in the cell that opened it."""
        if self._shown_in is None or self._shown_in != _cell():
            from IPython.display import display

            display(self._repr_mimebundle_(), raw=True)


def _cell() -> int | None:
    """Return the execution count of the cell that runs; None outside IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return None if shell is None else int(shell.execution_count)


def watch(*folders: str | Path, follow: bool = True, every_s: float = EVERY_S, view: View | ViewName = "auto") -> Watch:
    """Show a panel of the runs in these folders, written by whichever kernel, process or machine: `sk.watch("runs/a", "runs/b")`.
    A race's folder stands for its runs, under the names that they have there, and a line says how the race stands; any other
    folder that contains folders of runs stands for those that are in it now.

    A run that is over gives its final picture at once. One that goes on is followed in a thread, so the cell ends and other cells
    can be used; `await sk.watch(...)` keeps the cell busy until it is over. The panel's buttons write the files "stop", "pause" and
    "save" into the folder of the run or the race, and so do `.control.stop()` and its siblings; `.stop_following()` ends the
    looking and nothing else.

    follow: False takes one look. every_s: seconds between two looks; more while nothing comes, and where looking takes long.
    view: "auto", "widget", "svg" or "text".

    Raises FileNotFoundError if there is no such folder; ValueError if it is not the folder of a run, or if nothing is written in
    it yet and `follow` is False.
    """
    if not folders:
        raise ValueError('watch() needs the folder of a run: sk.watch("runs/a").')
    if not every_s > 0:
        raise ValueError(f"watch(every_s={every_s}): the time between two looks is in seconds and positive.")
    given = [Path(folder).expanduser().resolve() for folder in folders]
    labels = _names(given) if len(given) > 1 else [""]
    races = {label: RaceFolder(path) for label, path in zip(labels, given) if _is_race(path)}
    raced = {path for race in races.values() for path in (race.path, *race.runs.values())}
    paths = list(dict.fromkeys(run for path in given if path not in raced for run in runs_in(path)))
    found = [RunFolder(path, name) for path, name in zip(paths, _names(paths))]
    all_of_them = [*paths, *(path for race in races.values() for path in race.runs.values())]
    empty = [path for path in all_of_them if not (path / RECORDS).exists()]
    if empty and not follow:
        raise ValueError(
            f"No step is written in {empty[0]} yet: the run has not begun. With follow=True the panel waits for it."
        )
    return Watch(found, follow, every_s, view, races)


def _is_race(path: Path) -> bool:
    try:
        return any((path / name).exists() for name in (TURN, RACE)) and bool(RaceFolder(path))
    except ValueError:
        return False


def _names(paths: Iterable[Path]) -> list[str]:
    """Return the shortest ends of the paths, of equally many parts, that tell them apart."""
    parts = [path.parts for path in paths]
    if not parts:
        return []
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return names
