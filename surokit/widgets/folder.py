"""This module reads a run that somebody else trains from its folder, and writes the files that ask it to stop, pause or save.

records.jsonl has a line a step (records_tail.py); run.json says what the run is, how it stands and when it last gave a sign of life
(runs/status.py). What happened in an older part of a long run is taken from run.json, not judged again; the phase is not in there,
so the steps that are read are judged here.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast, get_args

from surokit.runs.health import Event, Kind
from surokit.runs.status import EVERY_S, FILE, Status, read_status
from surokit.widgets.records_tail import Reader
from surokit.widgets.state import PanelState

RECORDS = "records.jsonl"
RACE, TURN = "race.json", "turn.json"
KINDS = get_args(Kind)
SILENT_S = 30.0  # a heartbeat older than that is no sign of life
# So long without a heartbeat, a process that is not here has ended, and is not that of another machine of this name.
GONE_S = 3 * EVERY_S


class RunFolder:
    """A RunFolder reads one run from its folder: `look` takes in what is new.

    clock: seconds since 1970. Raises FileNotFoundError or ValueError if the folder is not that of a run.
    """

    def __init__(
        self, path: str | Path, name: str = "", clock: Callable[[], float] = time.time, title: str = ""
    ) -> None:
        self.path = Path(path)
        self.name = name or self.path.resolve().name
        self.title = title  # the name that others give the run
        self.ended = ""  # how the run ended, as others say; counts if the run itself does not say
        self.beat = 0.0  # when others last gave a sign of life for it; counts likewise
        self.status: Status | None = None
        self.trouble = ""  # why the folder could not be read the last time
        self._clock = clock
        self._heard = (-1.0, clock())  # the last sign of life by its own clock, and when it came by ours
        self._gone = False  # whether the run's process had ended at the last look
        self._told: set[tuple[Any, ...]] = set()  # events of run.json that the state has
        _check(self.path)
        self.reader = Reader(self.path / RECORDS, lambda: PanelState(self.name))

    @property
    def state(self) -> PanelState:
        return self.reader.state

    @property
    def over(self) -> bool:
        """True if nothing more is to be expected: the run or its process has ended, and all of its records have been read."""
        if self.status is None:
            return bool(self.ended) and not self.reader.behind
        ended = self.status.over or (self._gone and self._silent_s > GONE_S)
        return ended and not self.reader.behind

    @property
    def goes_on(self) -> bool:
        """True if there is a run that could be asked to stop; one that is silent may still hear."""
        return not self.over and not (self.status is not None and self.status.over)

    def look(self, budget_s: float = math.inf) -> bool:
        """Take in what is new, for about `budget_s` seconds, and return whether there was anything."""
        before = (self.status, self.trouble, self.state.reason)
        status = self.status = read_status(self.path) or self.status  # first: who has ended has written its records
        self._gone = self._process_gone
        if self._gone:  # by now it has said what it had to say
            self.status = read_status(self.path) or status
        news, state = False, self.state
        self.trouble = ""
        try:
            news = self.reader.read(budget_s)
        except OSError as error:
            if not self.path.is_dir():
                self.trouble = f"the folder {self.path} has gone"
            elif not isinstance(error, FileNotFoundError):
                self.trouble = f"{self.path / RECORDS} cannot be read just now ({error.strerror})"
        if state is not self.state:
            self._told.clear()
        self._hear()
        self._tell()
        return news or before != (self.status, self.trouble, self.state.reason)

    def _hear(self) -> None:
        """Note when the last sign of life came: a heartbeat that changed. Until one is seen to change, its own time is taken."""
        if self.status is not None:
            beat = self.status.heartbeat
        else:
            signs = [self.beat] if self.beat else []
            with suppress(OSError):
                signs.append((self.path / RECORDS).stat().st_mtime)
            if not signs:
                return
            beat = max(signs)
        now = self._clock()
        if self._heard[0] != beat:
            self._heard = (beat, min(beat, now) if self._heard[0] < 0 else now)

    @property
    def _silent_s(self) -> float:
        return self._clock() - self._heard[1]

    @property
    def _silent(self) -> bool:
        """True if the run has been silent for too long; a long step is silence too, so the time of five must have passed."""
        return self._silent_s > max(SILENT_S, 5 * self.reader.step_s)

    @property
    def _process_gone(self) -> bool:
        """True if the run's process is known to have ended; False for one on another machine, which cannot be asked."""
        info = self.status.info if self.status is not None else None
        if info is None or info.pid <= 0 or info.host != socket.gethostname() or os.name != "posix":
            return False
        try:
            os.kill(info.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return _is_zombie(info.pid)

    @property
    def _run_s(self) -> float:
        """Return the run's wall time at the last step, in seconds: that in run.json and the steps since; NaN if it has none."""
        status = self.status
        if status is None or status.run_s is None or not 0 <= status.run_s < math.inf:
            return math.nan
        return status.run_s + max(0.0, self.state.elapsed_s - self.state.ruler.at(status.step)[1])

    def _tell(self) -> None:
        """Copy into the state what run.json says, and why the run ended if it says so or the clock shows that it is lost."""
        state, status = self.state, self.status
        state.reason, state.run_s = None, self._run_s
        if status is not None:
            info = status.info
            state.info, state.total, state.resumes = info, info.total, info.resumes
            state.title, state.recipe = self.title or info.title or self.name, info.numerics
            state.paused = status.state == "paused"
            self._told.update((event.step, event.kind, event.text) for event in state.events)
            for said in status.events:
                step, kind, text = said.get("step"), said.get("kind"), said.get("text")
                if not isinstance(step, int) or kind not in KINDS or not isinstance(text, str):
                    continue  # of another version
                if (step, kind, text) not in self._told:
                    self._told.add((step, kind, text))
                    state.happened(Event(step, cast(Kind, kind), text, str(said.get("suggestion", ""))))
            if status.over:
                state.reason = None if self.reader.behind else status.state
                return
        elif self.ended:
            state.title, state.reason = self.title or self.name, None if self.reader.behind else self.ended
            return
        if self._silent or self._gone:
            when = time.strftime(
                "%H:%M" if self._silent_s < 20 * 3600 else "%d %b %H:%M", time.localtime(self._heard[1])
            )
            what = "heartbeat" if status is not None else "last record"
            if self._gone:
                state.reason = f"lost: its process has ended without a word; last {what} at {when}"
                return
            why = "the kernel is gone or its machine sleeps"
            if status is None:
                why = f"without a {FILE} nobody says whether it has ended"
            state.reason = f"lost: no sign of life since {when} ({what} {_about(self._silent_s)} old): {why}"


def _is_zombie(pid: int) -> bool:
    """Return whether a process has ended but its parent has not collected it, as in a container without an init; Linux only."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2]
    except OSError:
        return False
    return after_name.split()[:1] == [b"Z"]


def _about(seconds: float) -> str:
    """Return a span of time in words, rounded so that they seldom change."""
    for unit, length in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds // 10 * 10:.0f} s"


def _check(path: Path) -> None:
    """Raise FileNotFoundError or ValueError unless the folder is that of a run or is empty and could become one."""
    if not path.exists():
        raise FileNotFoundError(f"There is no folder {path}: give the run_dir of a session, as seen from here.")
    if not path.is_dir():
        raise ValueError(f"{path} is a file: give the folder that it is in, the run_dir of a session.")
    # a hidden file may be the draft of a run's first
    if any(not each.name.startswith(".") for each in path.iterdir()) and not _is_run(path):
        raise ValueError(f"{path} is not the folder of a run: it has neither {RECORDS} nor {FILE}.")


def _is_run(path: Path) -> bool:
    return any((path / name).exists() for name in (RECORDS, FILE, "checkpoints"))


def begun(path: Path) -> bool:
    """Return whether a path is a file, the folder of a run or of a race, or a folder that contains such a folder."""
    if not path.is_dir():
        return path.exists()
    inside = [path, *path.iterdir()]
    return any(_is_run(each) or (each / TURN).exists() or (each / RACE).exists() for each in inside)


def runs_in(path: Path) -> list[Path]:
    """Return the folders of runs in a folder, in order of their names; the folder itself if it is a run's or has none."""
    if not path.is_dir() or _is_run(path):
        return [path]
    runs = [inside for inside in path.iterdir() if (inside / RECORDS).exists() or (inside / FILE).exists()]
    return sorted(runs) or [path]


class RaceFolder:
    """A RaceFolder reads a race that somebody else drives: which runs it has and how it stands, from turn.json or race.json.

    runs: their folders by name. state: "running", "paused" or how it ended. round: the one that goes on, or was the last. beat:
    when turn.json was written, in seconds since 1970.
    Raises ValueError if the folder is not that of a race.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: dict[str, Path] = {}
        self.state, self.round, self.turn, self.beat = "", 0, "", 0.0
        self.look()
        if not self.runs:
            raise ValueError(f"{path} is not the folder of a race: neither {TURN} nor {RACE} says who races.")

    @property
    def goes_on(self) -> bool:
        return self.state in ("running", "paused")

    def look(self) -> bool:
        """Take in what is new and return whether there was anything. A file that cannot be read just now changes nothing."""
        before = (self.state, self.round, self.turn, *self.runs)
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            if (self.path / TURN).exists():
                self._take_in(**json.loads((self.path / TURN).read_text(encoding="utf-8")))
                self.beat = (self.path / TURN).stat().st_mtime
            else:
                data = json.loads((self.path / RACE).read_text(encoding="utf-8"))
                rounds = [turn["round"] for run in data["runs"] for turn in run["turns"]]
                state = data["reason"] or "saved while it went on"
                self._take_in(data["folders"], state, max(rounds, default=0), "")
        return before != (self.state, self.round, self.turn, *self.runs)

    def _take_in(self, runs: dict[str, str], state: str, round: int, turn: str, **_later: Any) -> None:
        self.runs = {str(name): self.path / str(folder) for name, folder in runs.items()}
        self.state, self.round, self.turn = str(state), int(round), str(turn)

    def words(self, states: Iterable[PanelState]) -> str:
        """Return the headline of the race's picture. states: those of its runs."""
        reasons = [state.reason or "" for state in states]
        lost = self.goes_on and bool(reasons) and all(reason.startswith("lost") for reason in reasons)
        return race_words("lost" if lost else self.state, self.round, self.turn)


def race_words(state: str, round: int, turn: str) -> str:
    """Describe a race in a line: which round and turn it is in, or how it ended."""
    where = f"round {round}" if round else "warm-up"
    if state == "running":
        return " · ".join(["race", where, *([f"{turn}'s turn"] if turn else [])])
    if state in ("paused", "lost"):
        return f"race · {state} in {where}"
    return f"race · over after {where}" if state == "done" else f"race · over in {where}: {state}"


class FileControl:
    """A FileControl does the work of the panel's buttons for runs that somebody else trains: each method writes a file that the
    run looks for between two steps, a race between two turns."""

    def __init__(self, folders: Iterable[RunFolder | RaceFolder]) -> None:
        self._folders = list(folders)

    def stop(self, reason: str = "stopped: by watch(...).control.stop()") -> None:
        """Ask every run that goes on to end at its next step boundary, with this reason."""
        self._ask("stop", text=reason.removeprefix("stopped: "))

    def pause(self) -> None:
        """Ask every run that goes on to wait at its next step boundary, for as long as the file is there."""
        self._ask("pause")

    def resume(self) -> None:
        self._ask("pause", there=False)

    def save(self) -> None:
        """Ask every run that goes on to write a checkpoint at its next step boundary."""
        self._ask("save")

    def _ask(self, word: str, there: bool = True, text: str = "") -> None:
        folders = [folder for folder in self._folders if folder.goes_on or not there]
        if not folders:
            raise ValueError(f"There is no run to {word}: as far as its folder says, it is over.")
        for folder in folders:
            try:
                file = folder.path / word
                file.write_text(text, encoding="utf-8") if there else file.unlink(missing_ok=True)
            except OSError as error:
                raise PermissionError(
                    f"The run cannot be reached: {folder.path / word} cannot be written from here ({error.strerror})."
                ) from error
