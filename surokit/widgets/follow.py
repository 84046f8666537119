"""`sk.watch`: the panel of runs that another kernel, process or machine trains, from their folders alone.

A run's folder has records.jsonl, a line a step, which is read as it grows, and run.json, which says what the run is, how it
stands and when it last gave a sign of life (train/status.py). Nothing but files goes between the two sides, so a folder that
two machines share will do; the buttons write files too.

records.jsonl is read from where the last look ended, to the last whole line. A file that shrank, or is no longer what was read, is
read anew. A step at or before the last one is a resume: what came after it never happened (train/records.py). The state is then
put back to a copy from before, a few of which are kept, and the file read again from there without the void lines.

A long file is read in columns, and of its older part neighbouring steps are folded into one: their mean loss, their time and
tokens together, the lowest and the highest loss and rate in the curves at steps of their own. So a million steps cost seconds,
and no extreme is lost. What happened in a folded part is taken from run.json, not judged again.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from surokit.train.health import Event, Kind
from surokit.train.status import FILE, Status, read_status
from surokit.widgets.front import shown
from surokit.widgets.panel import Panel, View, ViewName, front_end
from surokit.widgets.picture import bundle, summary_text
from surokit.widgets.state import PanelState

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Columns = dict[str, NDArray[np.float64]]

RECORDS = "records.jsonl"
BLOCK_BYTES = 4 << 20
FIRST_BYTES = 1 << 18  # the first block of a file, and blocks too small for columns
RECENT_BYTES = 2 << 20  # the end of a file, whose steps are never folded
FOLDED = 20_000  # rows that the older part of a long file becomes, about
SEAM_BYTES = 64
COPIES = 12

EVERY_S, SLOWEST_S = 0.5, 5.0  # between two looks: while there is news, and while there is none
LOOK_SHARE = 0.1  # of the time, at most, goes into looking
KINDS = get_args(Kind)
SILENT_S = 30.0  # a heartbeat older than that is no sign of life


@dataclass(frozen=True)
class _Copy:
    """A state as it was when the file had been read up to `offset`."""

    offset: int = 0
    last: float = -math.inf  # step
    seam: bytes = b""
    state: bytes = b""


class Reader:
    """A PanelState that keeps up with a records file. make: a new state, for the beginning and for a file that was replaced."""

    def __init__(self, path: Path, make: Callable[[], PanelState] = PanelState) -> None:
        self.path = path
        self._make = make
        self._begin()

    def _begin(self) -> None:
        self._set(_Copy())
        self._size = 0  # of the file when it was last read to its end, with what may be torn there
        self._cuts: list[tuple[int, int]] = []  # (offset, step): a line at `offset` takes the run back to before `step`
        self._copies: list[_Copy] = []
        self._fold = 1
        self.step_s = 0.0  # what the last step took

    def _set(self, copy: _Copy) -> None:
        self.offset, self._last, self._seam = (
            copy.offset,
            copy.last,
            copy.seam,
        )  # the seam stands just before the offset
        self.state: PanelState = pickle.loads(copy.state) if copy.state else self._make()

    def read(self, budget_s: float = math.inf) -> bool:
        """Takes in what is new, for about so long, and says whether there was anything. OSError where it cannot be read."""
        until = time.monotonic() + budget_s
        news = False
        with self.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, self.offset - len(self._seam)))
            if size < self.offset or file.read(len(self._seam)) != self._seam:
                self._begin()
                news = True
            while data := self._block(file):
                news = True
                self._take(data, size - self.offset)
                if time.monotonic() >= until:
                    break
            else:
                self._size = size
        return news

    @property
    def behind(self) -> bool:
        """Whether the file has something that has not been looked at."""
        try:
            return self.path.stat().st_size != self._size
        except OSError:
            return False

    def _block(self, file: Any) -> bytes:
        """The next whole lines, none of which stands on the other side of a cut."""
        file.seek(self.offset)
        most = min([cut for cut, _ in self._cuts if cut > self.offset], default=math.inf) - self.offset
        data: bytes = file.read(int(min(most, BLOCK_BYTES if self.offset else FIRST_BYTES)))
        whole = data[: data.rfind(b"\n") + 1]
        return whole if whole or len(data) < FIRST_BYTES else data  # no line of ours is as long as that

    def _take(self, data: bytes, left: int) -> None:
        void = min([step for cut, step in self._cuts if cut > self.offset], default=math.inf)
        columns = _columns(data) if len(data) > FIRST_BYTES else None
        if columns is not None and self._in_order(columns, void):
            if left > RECENT_BYTES and self._fold > 1:
                self._add_folded(columns)
            else:
                for row in _rows(columns):
                    self._add(row)
        else:
            offset = self.offset
            lines = data.splitlines(keepends=True)
            for line in lines:
                values = _row(line)
                if values is not None and values["step"] < void:
                    if "wall_ms" in values and values["step"] <= self._last:
                        self._rewind(offset, int(values["step"]))
                        return
                    self._add(values)
                offset += len(line)
            if self.offset == 0:
                self._fold = max(1, round(left / len(data) * len(lines) / FOLDED))
        self.offset += len(data)
        self._seam = data[-SEAM_BYTES:]
        if self.offset - (self._copies[-1].offset if self._copies else 0) >= BLOCK_BYTES:
            self._copies.append(_Copy(self.offset, self._last, self._seam, pickle.dumps(self.state, 5)))
            if len(self._copies) > COPIES:
                del self._copies[:-1:2]

    def _rewind(self, offset: int, step: int) -> None:
        """Back to before `step`, as a line at `offset` says."""
        self._cuts.append((offset, step))
        while self._copies and self._copies[-1].last >= step:
            self._copies.pop()
        self._set(self._copies[-1] if self._copies else _Copy())

    def _in_order(self, columns: Columns, void: float) -> bool:
        """Whether every step is above the one before it and none is void."""
        import numpy as np

        steps = columns["step"][~np.isnan(columns["wall_ms"])]
        if not len(steps):
            return False
        return bool(steps[0] > self._last and (np.diff(steps) > 0).all() and columns["step"].max() < void)

    def _add(self, row: Mapping[str, Any]) -> None:
        step, state = int(row["step"]), self.state
        if "wall_ms" in row:
            self._last = step
            self.step_s = row["wall_ms"] / 1e3 if math.isfinite(row["wall_ms"]) else 0.0
            state.add_row(row)
        elif step == self._last:
            state.add_row(row)
        elif "eval_loss" in row and step >= (state.held_out.last or (-math.inf,))[0]:
            state.held_out.append(step, row["eval_loss"])

    def _add_folded(self, columns: Columns) -> None:
        """The block's steps, `_fold` of them as one; one by one where a step was skipped."""
        import numpy as np

        is_step = ~np.isnan(columns["wall_ms"])
        steps = {name: column[is_step] for name, column in columns.items()}
        if np.nansum(steps["skipped"]):
            for row in _rows(columns):
                self._add(row)
            return
        for curves, values in _folded(steps, self._fold):
            for name, points in curves.items():
                series = getattr(self.state, name)
                for x, y in points:
                    series.append(x, y)
            self.state.add(**values)
        self._last = float(steps["step"][-1])
        held_out = ~np.isnan(columns["eval_loss"])
        for step, loss in zip(columns["step"][held_out].tolist(), columns["eval_loss"][held_out].tolist()):
            self._add({"step": step, "eval_loss": loss})


# -- lines to rows and columns

COLUMNS = (
    *("step", "loss", "lr", "grad_norm", "tokens", "wall_ms", "stall_ms", "peak_gib", "elapsed_s"),
    *("skipped", "idle_frac", "eval_loss", "busy_frac", "launches"),
)


def _row(line: bytes) -> dict[str, float] | None:
    """A line's values; None for a line that a kill cut short, or that is no record."""
    try:
        row = {name: float(value) for name, value in json.loads(line).items()}
        return row if math.isfinite(row["step"]) else None
    except (ValueError, TypeError, AttributeError, KeyError):
        return None


def _columns(data: bytes) -> Columns | None:
    """Lines as columns, NaN where a value is missing; None where they have to be read one by one: without pyarrow, and where a
    line is broken or a value is no number (NaN is written as a string)."""
    try:
        import pyarrow as pa
        import pyarrow.json as pj
    except ImportError:
        return None
    schema = pa.schema([(name, pa.float64()) for name in COLUMNS])
    try:
        table = pj.read_json(
            io.BytesIO(data),
            read_options=pj.ReadOptions(block_size=1 << 20),
            parse_options=pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        )
    except pa.ArrowInvalid:
        return None
    columns = {name: table.column(name).to_numpy() for name in COLUMNS}
    return None if (columns["step"] != columns["step"]).any() else columns


def _rows(columns: Mapping[str, NDArray[Any]]) -> Iterable[dict[str, Any]]:
    """The lines that columns were made of."""
    for values in zip(*(column.tolist() for column in columns.values())):
        yield {name: value for name, value in zip(columns, values) if value == value}


def _folded(steps: Columns, count: int) -> Iterable[tuple[dict[str, list[tuple[float, float]]], dict[str, Any]]]:
    """Of every `count` neighbours the extremes, by curve and in order of steps, and what `PanelState.add` takes for them."""
    import numpy as np

    first = np.arange(0, len(steps["step"]), count)
    last = np.append(first[1:], len(steps["step"])) - 1
    x, wall_ms, tokens = steps["step"], steps["wall_ms"], steps["tokens"]

    def mean(values: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
        known = ~np.isnan(values) * weights
        with np.errstate(invalid="ignore"):
            return np.add.reduceat(np.nan_to_num(values) * known, first) / np.add.reduceat(known, first)

    def extremes(values: NDArray[np.float64]) -> Iterable[list[tuple[float, float]]]:
        groups = np.append(values, np.full(-len(values) % count, np.nan)).reshape(-1, count)
        known = ~np.isnan(groups)
        low = first + np.where(known, groups, np.inf).argmin(1)
        high = first + np.where(known, groups, -np.inf).argmax(1)
        both = np.sort(np.stack([low, high], 1), 1)
        for (a, b), xs, ys in zip(both.tolist(), x[both].tolist(), values[both].tolist()):
            yield [(x, y) for x, y in list(zip(xs, ys))[a == b :] if y == y]

    each = np.ones_like(wall_ms)
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = np.where(wall_ms > 0, (each if np.isnan(tokens).all() else tokens) / wall_ms * 1e3, np.nan)
    curves = {"loss": steps["loss"], "rate": rate, "grad_norm": steps["grad_norm"], "idle": steps["idle_frac"]}
    values = {
        "step": x[last].astype(np.int64),
        "steps": last - first + 1,
        "lr": steps["lr"][last],
        "memory": steps["peak_gib"][last],
        "elapsed": steps["elapsed_s"][last],
        "tokens": np.add.reduceat(tokens, first),
        "seconds": np.add.reduceat(np.nan_to_num(wall_ms), first) / 1e3,
        "stall": np.add.reduceat(np.nan_to_num(steps["stall_ms"]), first) / 1e3,
        "loss": mean(steps["loss"], each),
        "grad_norm": mean(steps["grad_norm"], each),
        "busy": mean(steps["busy_frac"], each),
        "launches": mean(steps["launches"], each),
        "idle": mean(steps["idle_frac"], np.nan_to_num(wall_ms)),
    }
    for points, row in zip(zip(*map(extremes, curves.values())), _rows(values)):
        yield dict(zip(curves, points)), row


# -- a folder, and the runs of a panel


class RunFolder:
    """One run as its folder tells it: `look` takes in what is new.

    clock: seconds since 1970. FileNotFoundError or ValueError, in a sentence, where the folder is no run's.
    """

    def __init__(self, path: str | Path, name: str = "", clock: Callable[[], float] = time.time) -> None:
        self.path = Path(path)
        self.name = name or self.path.resolve().name
        self.status: Status | None = None
        self.trouble = ""  # why the folder could not be read the last time
        self._clock = clock
        self._heard = (-1.0, clock())  # the last sign of life by its own clock, and when it came by ours
        self._told: set[tuple[Any, ...]] = set()  # events of run.json that the state has
        _check(self.path)
        self.reader = Reader(self.path / RECORDS, lambda: PanelState(self.name))

    @property
    def state(self) -> PanelState:
        return self.reader.state

    @property
    def over(self) -> bool:
        """Whether nothing more is to be expected: the run has ended, or its process has, and all of its records are here."""
        ended = self.status is not None and (self.status.over or (self._silent and self._process_gone))
        return ended and not self.reader.behind

    @property
    def goes_on(self) -> bool:
        """Whether there is a run that could be asked to stop; one that is silent may still hear."""
        return not self.over and not (self.status is not None and self.status.over)

    def look(self, budget_s: float = math.inf) -> bool:
        """Takes in what is new, for about so long; whether there was anything."""
        before = (self.status, self.trouble, self.state.reason)
        status = read_status(self.path)  # first: a run that says it has ended has written its records
        news, state = False, self.state
        self.trouble = ""
        try:
            news = self.reader.read(budget_s)
        except OSError as error:
            if not self.path.is_dir():
                self.trouble = f"the folder {self.path} has gone"
            elif not isinstance(error, FileNotFoundError):
                self.trouble = f"{self.path / RECORDS} cannot be read just now ({error.strerror})"
        self.status = status or self.status
        if state is not self.state:
            self._told.clear()
        self._hear()
        self._tell()
        return news or before != (self.status, self.trouble, self.state.reason)

    def _hear(self) -> None:
        """A sign of life is a heartbeat that changed. Until one is seen to change its own time has to do."""
        if self.status is not None:
            beat = self.status.heartbeat
        else:
            try:
                beat = (self.path / RECORDS).stat().st_mtime
            except OSError:
                return
        now = self._clock()
        if self._heard[0] != beat:
            self._heard = (beat, min(beat, now) if self._heard[0] < 0 else now)

    @property
    def _silent_s(self) -> float:
        return self._clock() - self._heard[1]

    @property
    def _silent(self) -> bool:
        """A step that takes long is silence too, so five of them have to have passed."""
        return self._silent_s > max(SILENT_S, 5 * self.reader.step_s)

    @property
    def _process_gone(self) -> bool:
        """Whether the run's process is known to have ended; False on another machine, which cannot be asked."""
        info = self.status.info if self.status is not None else None
        if info is None or info.pid <= 0 or info.host != socket.gethostname() or os.name != "posix":
            return False
        try:
            os.kill(info.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return False

    def _tell(self) -> None:
        """What run.json and the clock say, to the state."""
        state, status = self.state, self.status
        state.reason = None
        if status is not None:
            info = status.info
            state.info, state.total, state.resumes = info, info.total, info.resumes
            state.title, state.recipe = info.title or self.name, info.numerics or info.recipe
            state.paused = status.state == "paused"
            self._told.update((event.step, event.kind, event.text) for event in state.events)
            for said in status.events:
                step, kind, text = said.get("step"), said.get("kind"), said.get("text")
                if not isinstance(step, int) or kind not in KINDS or not isinstance(text, str):
                    continue  # of another version
                if (step, kind, text) not in self._told:
                    self._told.add((step, kind, text))
                    state.happened(Event(step, cast(Kind, kind), text, str(said.get("suggestion", ""))))
            if status.over and not self.reader.behind:
                state.reason = status.state
                return
        if self._silent:
            when = time.strftime(
                "%H:%M" if self._silent_s < 20 * 3600 else "%d %b %H:%M", time.localtime(self._heard[1])
            )
            what = "heartbeat" if status is not None else "last record"
            why = "the kernel is gone or its machine sleeps"
            if self._process_gone:
                why = "its process has ended"
            elif status is None:
                why = f"without a {FILE} nobody says whether it has ended"
            state.reason = f"lost: no sign of life since {when} ({what} {_about(self._silent_s)} old): {why}"


def _about(seconds: float) -> str:
    """A span in words that change as seldom as they can."""
    for unit, length in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds // 10 * 10:.0f} s"


def _check(path: Path) -> None:
    """A folder that is a run's, or could become one."""
    if not path.exists():
        raise FileNotFoundError(f"There is no folder {path}: give the run_dir of a session, as seen from here.")
    if not path.is_dir():
        raise ValueError(f"{path} is a file: give the folder that it is in, the run_dir of a session.")
    inside = {entry.name for entry in path.iterdir()}
    if inside & {RECORDS, FILE, "checkpoints"} or not inside:
        return
    runs = sorted(name for name in inside if (path / name / RECORDS).exists() or (path / name / FILE).exists())
    hint = f" It has folders of runs: {', '.join(runs[:8])}{' …' if len(runs) > 8 else ''}." if runs else ""
    raise ValueError(f"{path} is not the folder of a run: it has neither {RECORDS} nor {FILE}.{hint}")


class FileControl:
    """The panel's buttons for runs that somebody else trains: each writes a file that the run looks for between two steps."""

    def __init__(self, folders: Iterable[RunFolder]) -> None:
        self._folders = list(folders)

    def stop(self) -> None:
        """Every run that goes on ends at its next step boundary."""
        self._ask("stop")

    def pause(self) -> None:
        """Every run that goes on waits at its next step boundary, for as long as the file is there."""
        self._ask("pause")

    def resume(self) -> None:
        self._ask("pause", there=False)

    def save(self) -> None:
        """Every run that goes on writes a checkpoint at its next step boundary."""
        self._ask("save")

    def _ask(self, word: str, there: bool = True) -> None:
        folders = [folder for folder in self._folders if folder.goes_on or not there]
        if not folders:
            raise ValueError(f"There is no run to {word}: as far as its folder says, it is over.")
        for folder in folders:
            try:
                (folder.path / word).touch() if there else (folder.path / word).unlink(missing_ok=True)
            except OSError as error:
                raise PermissionError(
                    f"The run cannot be reached: {folder.path / word} cannot be written from here ({error.strerror})."
                ) from error


class Watch:
    """What `watch` returns. Following goes on in a thread until every run is over; `await` or `.wait()` stays with it."""

    def __init__(
        self,
        folders: Iterable[RunFolder],
        follow: bool = True,
        every_s: float = EVERY_S,
        view: View | ViewName = "auto",
    ) -> None:
        self.folders = {folder.name: folder for folder in folders}
        self.states: dict[str, PanelState] = {}
        self.control = FileControl(self.folders.values())
        self._every_s = every_s
        self._asked = threading.Event()
        self._thread: threading.Thread | None = None
        self._look(math.inf if not follow else 1.0)
        goes_on = follow and not self.over
        if view == "auto" and not goes_on:
            view = "svg" if front_end() == "notebook" else "text"
        self._panel = Panel(self.states, view=view, control=self.control if goes_on else None)
        self._panel.ends = False
        self._panel.refresh(final=not goes_on)
        self._shown_in = _cell()
        if goes_on:
            self._thread = threading.Thread(target=self._follow, name="surokit-watch", daemon=True)
            self._thread.start()

    @property
    def over(self) -> bool:
        """Whether every run is over."""
        return all(folder.over for folder in self.folders.values())

    @property
    def following(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def stop_following(self) -> None:
        """Leaves the picture as it is; the runs go on."""
        self._asked.set()
        self.wait()

    def wait(self, timeout: float | None = None) -> bool:
        """Until every run is over, or so many seconds; whether following has ended. An interrupt ends the waiting only."""
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
        for name, folder in self.folders.items():
            news |= folder.look(budget_s / len(self.folders))
            if folder.trouble and folder.state.reason is None:
                folder.state.reason = f"lost: {folder.trouble}"
            self.states[name] = folder.state
        return news

    def _follow(self) -> None:
        pause_s = self._every_s
        try:
            while not self._asked.wait(pause_s):
                began = time.monotonic()
                news = self._look(self._every_s)
                took_s = time.monotonic() - began
                self._panel.news |= news
                self._panel.tick()
                if self.over:
                    break
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
        """Shows itself, but not twice in the cell that opened it."""
        if self._shown_in is None or self._shown_in != _cell():
            from IPython.display import display

            display(self._repr_mimebundle_(), raw=True)


def _cell() -> int | None:
    """The number of the cell that runs; None outside a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return None if shell is None else int(shell.execution_count)


def watch(*folders: str | Path, follow: bool = True, every_s: float = EVERY_S, view: View | ViewName = "auto") -> Watch:
    """A panel of the runs in these folders, written by whichever kernel, process or machine: `sk.watch("runs/a", "runs/b")`.

    A run that is over gives its final picture at once. One that goes on is followed in a thread, so the cell ends and other cells
    can be used; `await sk.watch(...)` keeps the cell busy until it is over. The panel's buttons write the files "stop", "pause" and
    "save" into the folder, and so do `.control.stop()` and its siblings; `.stop_following()` ends the looking and nothing else.

    follow: False takes one look. every_s: between two looks, in seconds; fewer while nothing comes, and where looking takes long.
    view: "auto", "widget", "svg" or "text".

    FileNotFoundError where there is no such folder; ValueError where it is no run's, or where nothing is written in it yet and
    nobody follows.
    """
    if not folders:
        raise ValueError('watch() needs the folder of a run: sk.watch("runs/a").')
    if not every_s > 0:
        raise ValueError(f"watch(every_s={every_s}): the time between two looks is in seconds and positive.")
    paths = list(dict.fromkeys(Path(folder).expanduser().resolve() for folder in folders))
    found = [RunFolder(path, name) for path, name in zip(paths, _names(paths))]
    empty = [folder.path for folder in found if not (folder.path / RECORDS).exists()]
    if empty and not follow:
        raise ValueError(
            f"No step is written in {empty[0]} yet: the run has not begun. With follow=True the panel waits for it."
        )
    return Watch(found, follow, every_s, view)


def _names(paths: Iterable[Path]) -> list[str]:
    """The ends of the paths that tell them apart."""
    parts = [path.parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return names
