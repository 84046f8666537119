"""`sk.Live` shows a panel around a training loop that is not ours.

    with sk.Live("my model", total=1000) as live:
        for batch in loader:
            ...
            live.log(loss=loss, tokens=batch["input_ids"].numel())
            if live.stop_asked:
                break

Given the model and its optimizer it needs no line inside the loop: each step of the optimizer is a step of the panel, however
many parts are accumulated, with the loss that the model returns, its tokens, the labels that count, memory and idle share.

    with sk.Live("my model", model=model, optimizer=optimizer) as live:
        for batch in live.batches(loader):
            ...

Nobody but the loop can stop it, so what the panel's buttons ask is kept until the loop looks: `stop_asked`, `save_asked`,
`wait_while_paused()`. With a `run_dir` the numbers are written as a session writes its own, `sk.watch` follows them from anywhere,
and files ask what the buttons do.

`log` never makes the host wait for the device. A value on a GPU is copied to pinned memory behind the work that
computes it, and read some steps later, when an event says that it has arrived. A value on the CPU is read at once:
there is nothing to wait for, and the caller may change the tensor in place afterwards.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from surokit.runs.control import RunControl
from surokit.runs.jsonl import read
from surokit.runs.records import Deferred, Records
from surokit.runs.requests import PAUSE, SAVE, STOP
from surokit.runs.status import EVERY_S, RunInfo, Status, StatusFile, read_status
from surokit.train.errors import NoTargetsError
from surokit.train.marks import Mark, event_on
from surokit.train.measuring import host_idle_frac
from surokit.train.observing import Observer, Seen
from surokit.train.run_info import FLOPS, device_name, gpus_of, light_of_foreign, world_size
from surokit.train.setup import claim_folder, peak_gib
from surokit.widgets.panel import Panel, View, ViewName
from surokit.widgets.state import PanelState

if TYPE_CHECKING:
    import pandas as pd

Item = TypeVar("Item")
KEEP = 1 << 16  # rows in memory; the oldest leave first
EMPTY_STEPS = 5  # in a row, in which no label counts


class LoopControl(RunControl):
    """A LoopControl keeps what is asked of a loop, from any thread or by a file, until the loop looks. A panel's buttons call it.

    What the loop has never looked for cannot be done: RuntimeError names the line that the loop needs, and the request stays.

    driver: the module whose functions run the loop, for `interruptible`; once none of them runs, an interrupt is no longer the
    loop's. answer: what an interrupt is answered with.
    """

    def __init__(self, live: Live) -> None:
        super().__init__(live)
        self._live = live
        self.driver = ""
        self.answer = "stopping after this step; interrupt again to stop at once"
        self._looked_for: set[str] = set()
        self.begin()

    def stop(self, reason: str = "stopped: by live.control.stop()") -> None:
        super().stop(reason)
        self._expect(STOP, "if live.stop_asked: break")

    def pause(self) -> None:
        super().pause()
        self._expect(PAUSE, "live.wait_while_paused()")

    def save(self) -> None:
        super().save()
        self._expect(SAVE, "if live.save_asked: ...")

    def _expect(self, name: str, line: str) -> None:
        if name not in self._looked_for:
            raise RuntimeError(
                f"Asked, but this loop has not looked for it so far. It takes a line in the loop: {line}"
            )

    # -- for the loop

    def again(self) -> None:
        """Begin another loop."""
        self.end()
        self.begin()

    def stop_wanted(self) -> bool:
        self._look_for(STOP)
        return bool(self._reason)

    def save_wanted(self) -> bool:
        """Return True once for each checkpoint that was asked for."""
        self._look_for(SAVE)
        return self.take_save()

    def wait_while_paused(self) -> None:
        self._look_for(PAUSE)
        if self._pause_wanted():
            self._wait()

    def _look_for(self, name: str) -> None:
        self._looked_for.add(name)
        self._look()

    def _serve(self) -> None:
        self._live._beat()

    def _tell_pause(self, paused: bool) -> None:
        self._live._tell_pause(paused)

    def _drives(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_globals.get("__name__") == self.driver:
                return True
            frame = frame.f_back
        return not self.driver

    def _stopping(self) -> str:
        return self.answer


class Live:
    """A Live is a panel that is fed by hand; it keeps the numbers that it was given.

    title: first words of the panel. every: shortest time between two pictures, in seconds. total: number of steps planned, for
    progress and time left. usd_per_gpu_hour: what a GPU costs, for dollars so far; never assumed. run_dir: folder for the
    records, which `sk.watch` follows; None writes nothing. exist: where it has content already, "new" takes the next free name,
    "resume" goes on in it, in its time too, and a step at or before its last one replaces what came after. view: "auto",
    "widget", "svg", "text" or a View. buttons: False where the loop cannot be stopped from here. model: counts tokens and labels
    by hooks on it, and knows its FLOPs a token, for the share of the peak; `info.flops` names their convention. optimizer: each
    of its steps is logged as one; `log` without a number then adds to the one that is worked at, or to the last one. gpus: how
    many work on the run, where that is not one a process, as with DataParallel. clock: for tests.

    Of several processes that one counts which has the panel, and takes the others for equal: tokens, rates, GPU hours and dollars
    are of all. Where processes share a batch, as in tensor parallelism, `log(tokens=)` says how many there are.

    Shows loss, tokens/s (steps/s where `tokens` is never given) and, if `idle_frac` is logged, the idle share; goodput and
    lost time only if that or `stall_ms` (waiting for a batch) is. Close it, or use it in a `with` block, for the final picture; in
    a notebook the end of a cell that fails closes it too.
    `control` is what the buttons call: stop(), pause(), resume(), save().
    """

    def __init__(
        self,
        title: str | None = None,
        every: float = 0.25,
        *,
        total: int | None = None,
        recipe: str = "",
        usd_per_gpu_hour: float | None = None,
        run_dir: str | Path | None = None,
        exist: Literal["new", "resume"] = "new",
        view: View | ViewName | None = "auto",
        buttons: bool = True,
        model: torch.nn.Module | None = None,
        optimizer: Any = None,
        gpus: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if every <= 0:
            raise ValueError(f"Live(every={every}): the time between two pictures is in seconds and positive.")
        if exist not in ("new", "resume"):
            raise ValueError(f"Live(exist={exist!r}): 'new' or 'resume'.")
        if model is not None and not isinstance(model, torch.nn.Module):
            raise TypeError(f"Live(model={type(model).__name__}): a torch.nn.Module is needed.")
        if gpus is not None and gpus < 1:
            raise ValueError(f"Live(gpus={gpus}): how many GPUs work on the run, at least 1.")
        inner = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper steps it once for all parts
        if inner is not None and not hasattr(inner, "register_step_post_hook"):
            raise TypeError(f"Live(optimizer={type(optimizer).__name__}): an optimizer of torch or surokit is needed.")
        self._clock, self._gpus = clock, gpus
        self.run_dir = claim_folder(run_dir, exist).folder
        self._records: Records | None = None
        self._status: StatusFile | None = None
        if self.run_dir is not None:
            self._records, self._status = Records(self.run_dir / "records.jsonl"), StatusFile(self.run_dir)
        self._earlier = _Earlier() if self.run_dir is None else _Earlier.of(self.run_dir)
        self.control = LoopControl(self)
        self.info = RunInfo(
            title or "",
            numerics=recipe,
            total=total,
            usd_per_gpu_hour=usd_per_gpu_hour,
            run_dir=None if self.run_dir is None else str(self.run_dir),
            pid=os.getpid(),
            host=socket.gethostname(),
            started=time.time(),
            ran_s=self._earlier.run_s,
        )
        state = PanelState(title or "", recipe=recipe, total=total)
        self._panel = Panel(state, view=view, control=self.control if buttons else None, every_s=every, clock=clock)
        self._rows: deque[dict[str, float]] = deque(maxlen=KEEP)
        self._late: deque[tuple[dict[str, float], dict[str, float], list[Deferred]]] = deque()
        self._step = self._empty_steps = 0
        self._nothing_counts = False  # in several steps in a row, and nobody was told yet
        self._logged_s: float | None = clock()
        self._opened_s = clock()  # since when the loop runs
        self._ran_s = 0.0  # how long it had run before it was closed
        self._paused_at_s = 0.0
        self._elapsed_s = 0.0
        self._before = self._began = Mark(
            clock(), None
        )  # ends of work: of the last step, and of what came before this one
        self._stall_ms: float | None = None
        self._closing: list[Callable[[], object]] = []  # to do at the end
        self.observer: Observer | None = None
        self._steps_by_optimizer = inner is not None
        self._waiting: list[_Waiting] = []  # for the optimizer's step
        self._shows = self._logs_before = (
            False  # whether steps show as they begin; else, whether the loop logs before their end
        )
        self._closed = False
        self._standing, self._beat_at = "running", 0.0
        self._shell: Any = None
        self._watch_cell()
        self._panel.on_info(self.info)
        self._panel.open()
        self._beat("running")
        if model is not None:
            self.observer = Observer(model)
            self.at_close(self.observer.remove)
        if inner is not None:
            self.at_close(inner.register_step_post_hook(lambda *_: self._next()).remove)

    @property
    def state(self) -> PanelState:
        """Return what the panel shows; its `health` and `events` say how the loop is doing."""
        return self._panel.state

    def log(
        self,
        loss: float | torch.Tensor | None = None,
        tokens: float | torch.Tensor | None = None,
        step: int | None = None,
        *,
        targets: float | torch.Tensor | None = None,
        **more: float | torch.Tensor | None,
    ) -> None:
        """Log one step's numbers: floats, or tensors of one element on any device; None is left out. Never waits.

        step: its number, by default one more than the last. The same number again adds to that step, after the end too, as an
        evaluation does (which then waits for its value). Where an optimizer makes the steps, it is by default the step that is
        worked at, since a batch came or the model was called: what is logged before the optimizer's step waits for it. tokens:
        trained on in this step, by all processes. targets: how many of its labels count, such as (labels[:, 1:] != -100).sum(); at
        0 the step has no loss, and a warning stands on the panel. more: further columns of `frame()`; `eval_loss` (held-out loss),
        `lr`, `grad_norm`, `peak_gib` and `idle_frac` (0..1) are drawn.

        Raises TypeError for what is not a number, ValueError for a tensor of more elements or a step that goes back, NoTargetsError
        once no label counted in 5 steps in a row; what was logged is kept.
        """
        values = {"loss": loss, "tokens": tokens, "targets": targets, **more}
        if self._steps_by_optimizer and (self._works() if step is None else step == self._step + 1):
            self._wait_for_step(values)
            return
        if step is None:
            step = max(self._step, 1) if self._steps_by_optimizer else self._step + 1
        self._log(int(step), values)

    def _begun(self) -> bool:
        """Return whether a batch has come, or the model was called, since the optimizer's last step."""
        return self._stall_ms is not None or (self.observer is not None and self.observer.called)

    def _works(self) -> bool:
        """Return whether a step is worked at that the optimizer has not taken yet; where no step shows, as it was at the first."""
        if self._closed:
            return False
        if not self._rows:
            self._logs_before = True
        return self._begun() or not self._rows or (self._logs_before and not self._shows)

    def _wait_for_step(self, values: Mapping[str, float | torch.Tensor | None]) -> None:
        """Keep values for the step that the optimizer takes next."""
        new = _Waiting({name for name, value in values.items() if value is not None}, *_arriving(values))
        self._waiting = [old for old in self._waiting if not old.names <= new.names] + [new]

    def _next(self) -> None:
        """Log a step that the optimizer has taken, with what waited for it."""
        if self._closed:
            return
        self._shows = self._shows or self._begun()
        seen = Seen() if self.observer is None else self.observer.take()
        waiting, self._waiting = self._waiting, []
        given = set().union(*(w.names for w in waiting))
        values: dict[str, Any] = {"loss": seen.loss}
        for name, count in (("tokens", seen.tokens), ("targets", seen.targets)):
            values[name] = None if count is None else count * world_size()
        try:
            self._log(self._step + 1, {name: value for name, value in values.items() if name not in given})
        finally:  # where no label counts, too
            for one in waiting:
                self._record(self._step, one.known, one.late)

    def _log(self, step: int, values: Mapping[str, float | torch.Tensor | None]) -> None:
        self._record(step, *_arriving(values))

    def _record(self, step: int, known: dict[str, float], coming: list[Deferred]) -> None:
        again = step == self._step and bool(self._rows)
        if step < self._step:
            raise ValueError(
                f"log(step={step}) after step {self._step}: steps only go up; make a new sk.Live for a new run."
            )
        late = []
        if not again:
            if not self._rows:
                self._elapsed_s = self._earlier.elapsed_s(before=step)
            known = {"step": step, **self._time(), **known}
            if not self._rows or self._is_longer_or_shorter():
                self._find_device()
            late = self._measure(known)
            self._step = step
            self._rows.append({})
        row = self._rows[-1]
        row.update(known)
        # Rows reach the panel whole and in order: what is late holds back what comes after it.
        news = {"step": step, **known}
        late += coming
        if late or self._late:
            self._late.append((row, news, late))
        else:
            self._arrived(row, news)
        self.state.run_s = self._run_s()
        self._drain(wait=self._closed or len(self._late) > KEEP)
        if self._closed and self._records is not None:
            self._records.flush()
        self._beat()
        if self._nothing_counts:
            self._nothing_counts, self._empty_steps = False, 0
            raise NoTargetsError(EMPTY_STEPS)

    # -- where the time of a loop goes

    def batches(self, data: Iterable[Item]) -> Iterator[Item]:
        """Yield the items of `data`, and measure the time that the loop waits for each, as `stall_ms` of its step. A step's work
        begins with its first batch, so the idle share is measured too."""
        source = iter(data)
        while True:
            began = self._clock()
            try:
                item = next(source)
            except StopIteration:
                return
            self.begin_step(1e3 * (self._clock() - began))
            yield item

    def begin_step(self, stall_ms: float = 0.0) -> None:
        """Say that the work of a step, or of a further part of it, begins now, after a wait of `stall_ms` for its batch: what no
        step has worked at since the last `log` is idle time."""
        if self._stall_ms is None:
            self._began = self._mark()
        else:  # a further part: on a CPU its wait is no work either
            self._began = self._began._replace(host_s=self._began.host_s + stall_ms / 1e3)
        self._stall_ms = (self._stall_ms or 0.0) + stall_ms

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave the time of the block, such as an evaluation or a checkpoint, out of the steps; it counts in goodput."""
        began = self._clock()
        try:
            yield
        finally:
            self.leave_out(self._clock() - began)

    def leave_out(self, seconds: float) -> None:
        """Leave `seconds` that have passed since the last `log` out of the next step's time; they count in goodput."""
        if self._logged_s is not None:
            self._logged_s += seconds
            self._before = Mark(self._before.host_s, None)

    def _mark(self) -> Mark:
        return Mark(self._clock(), event_on(_device()))

    def _measure(self, known: dict[str, float]) -> list[Deferred]:
        """Put into `known` what is measured of the step that ends now; return what the device has to tell of it."""
        if self.observer is not None:
            known.setdefault("peak_gib", peak_gib(_device()))
        if self._stall_ms is None:
            return []
        before, begin, end = self._before, self._began, self._mark()
        known.setdefault("stall_ms", self._stall_ms)
        self._before, self._stall_ms = end, None
        if "idle_frac" in known or not known.get("wall_ms"):
            return []
        if end.event is None:
            known["idle_frac"] = host_idle_frac(end.host_s - begin.host_s, known["wall_ms"] / 1e3)
            return []
        return [] if before.event is None else [Deferred({}, {}, begin.event, end.event, before.event)]

    # -- what others ask of the loop

    @property
    def stop_asked(self) -> bool:
        """Return whether the loop shall end: `if live.stop_asked: break`. It is asked by a button, `control.stop()` or a file
        `run_dir`/stop."""
        return self.control.stop_wanted()

    @property
    def save_asked(self) -> bool:
        """Return whether the loop shall write a checkpoint now; True once for each time it was asked."""
        return self.control.save_wanted()

    def wait_while_paused(self) -> None:
        """Wait while the loop is paused, by a button, `control.pause()` or a file "pause" in `run_dir`; else return at once.

        The wait counts as no step's time. A stop ends it too.
        """
        self.control.wait_while_paused()

    def _tell_pause(self, paused: bool) -> None:
        """Show that the loop waits, once all that it has logged is told and written, or that it goes on."""
        if paused:
            self._paused_at_s = self._clock()
            self._drain(wait=True)
            if self._records is not None:
                self._records.flush()
        elif self._logged_s is not None:
            self._logged_s += self._clock() - self._paused_at_s
        self._panel.on_pause(paused)
        self._beat("paused" if paused else "running")

    def note(self, text: str) -> None:
        """Put a word of yours beside the step that was logged last: on the panel and, with a `run_dir`, in run.json."""
        self._panel.on_note(self._step, text)
        self._beat(now=True)

    # -- the end

    def at_close(self, call: Callable[[], object]) -> None:
        """Call `call` when the panel is closed: by hand, at the end of a `with` block, or with a notebook's cell that fails."""
        self._closing.append(call)

    def close(self, reason: str | None = None) -> None:
        """Take in the last values (waits for them) and leave the final picture. reason: "done", "interrupted", "stopped: ...",
        "failed: ..." or a sentence of your own; None is "done", or what the loop was asked to stop for. Closing twice does nothing;
        `log` after it opens a new panel."""
        if self._closed:
            return
        self.state.run_s = self._ran_s = self._run_s()
        self._closed = True
        self._logged_s = None
        self._unwatch_cell()
        while self._closing:
            self._closing.pop()()
        try:
            self._drain(wait=True)
            waiting, self._waiting = self._waiting, []
            for one in (
                waiting if self._rows else ()
            ):  # no step came for these: the last one has them, where it has none
                if not one.names & self._rows[-1].keys():
                    self._record(self._step, one.known, one.late)
        finally:
            if self._records is not None:
                self._records.flush()
            reason = reason or self.control.reason or "done"
            self._panel.on_end(reason)
            self._beat(reason)

    def frame(self) -> pd.DataFrame:
        """Return a DataFrame, one row a step (the last 65,536): step, wall_ms, elapsed_s, loss, tokens and what else was logged.
        Never waits: a value still on its way from the device is NaN."""
        import pandas as pd

        self._drain()
        return pd.DataFrame(list(self._rows))

    def __enter__(self) -> Live:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(None if error is None else ending_of(error))

    def _run_s(self) -> float:
        """Return the seconds that the loop has run so far, with all that is no step."""
        return self._ran_s + (0.0 if self._closed else self._clock() - self._opened_s)

    def _time(self) -> dict[str, float]:
        """Return the wall time since the last step, or since the panel was opened."""
        now = self._clock()
        if self._closed:  # a loop that goes on
            self._closed, self._opened_s = False, now
            self._watch_cell()
            self.control.again()
            self._beat("running")
        seconds = now - self._logged_s if self._logged_s is not None else None
        self._logged_s = now
        if seconds is None:
            return {"elapsed_s": self._elapsed_s}
        self._elapsed_s += seconds
        return {"wall_ms": 1e3 * seconds, "elapsed_s": self._elapsed_s}

    def _drain(self, wait: bool = False) -> None:
        while self._late and (wait or all(late.ready() for late in self._late[0][2])):
            row, news, lates = self._late.popleft()
            for late in lates:
                row.update(late.wait())
                news.update(late.wait())
            self._arrived(row, news)
        self._panel.tick()

    def _arrived(self, row: dict[str, float], news: dict[str, float]) -> None:
        """Pass on what has come of a step, whose row has it already."""
        if row.get("targets") == 0:  # said now, or earlier of the same step
            for values in (row, news):
                values.pop("loss", None)
                values.pop("grad_norm", None)
        if "targets" in news:
            self._empty_steps = self._empty_steps + 1 if news["targets"] == 0 else 0
            self._nothing_counts = self._nothing_counts or self._empty_steps >= EMPTY_STEPS
        if self._closed and self.state.reason is not None:  # beside the last step of a loop that is over, and stays so
            self.state.add_row(news)
        else:
            self._panel.on_step(news)
        if self._records is not None:
            values = {name: value for name, value in news.items() if name != "step"}
            if not math.isfinite(values.get("tokens", 0.0)):  # a whole number, in the file
                del values["tokens"]
            if "elapsed_s" in values:  # a step, even one that nobody timed
                values = {"wall_ms": math.nan, **values}
            self._records.update(int(news["step"]), **values)

    def _find_device(self) -> None:
        """Find the loop's device and what it could do: by now a loop on a GPU has touched it, and asking wakes none that it leaves
        alone."""
        device = _device()
        self.info = replace(self.info, device=device_name(device), gpus=gpus_of(device, self._gpus))
        if self.observer is not None:
            found = light_of_foreign(self.observer.model, device, self.observer.lengths.note())
            flops = FLOPS if found.flops_per_token else ""
            self.info = replace(self.info, **found._asdict(), flops=flops, model=type(self.observer.model).__name__)
        self._panel.on_info(self.info)

    def _is_longer_or_shorter(self) -> bool:
        """Return whether the FLOPs a token that are known are those of another length than the mean of the loop so far."""
        seen, known = self.observer, self.info.flops_per_token is not None
        return known and seen is not None and seen.lengths.moved

    def _beat(self, state: str | None = None, now: bool = False) -> None:
        """Write run.json: a new state at once, a sign of life at most every two seconds or `now`."""
        if self._status is None:
            return
        seconds = time.monotonic()
        if state is not None:
            self._standing = state
        elif not now and seconds < self._beat_at:
            return
        self._beat_at = seconds + EVERY_S
        events = [event.to_dict() for event in self.state.events]
        step = self._step if self._rows else self._earlier.step
        run_s = self._earlier.run_s + self._run_s()
        self._status.beat(self.info, self._standing, step, events, now=True, run_s=run_s)

    # -- the notebook cell: its end is the last chance for a picture when a loop fails without closing

    def _watch_cell(self) -> None:
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython is not None else None
        if shell is not None:
            self._shell = shell
            shell.events.register("post_run_cell", self._cell_ended)

    def _unwatch_cell(self) -> None:
        if self._shell is not None:
            self._shell.events.unregister("post_run_cell", self._cell_ended)
            self._shell = None

    def _cell_ended(self, result: Any) -> None:
        error = result.error_in_exec or result.error_before_exec
        if error is not None:
            self.close(ending_of(error))
        else:
            self._drain()
            self._panel.refresh()


def ending_of(error: BaseException) -> str:
    """Return the reason that the panel shows for a loop that `error` ended."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return f"failed: {type(error).__name__}: {error}"


def _device() -> torch.device:
    """Return the device that the loop computes on, as far as that shows."""
    return torch.device("cuda" if torch.cuda.is_initialized() else "cpu")


class _Earlier(NamedTuple):
    """An _Earlier holds what a folder says of a loop that goes on in it: its last step, its wall time, when its steps ended."""

    step: int = 0
    run_s: float = 0.0
    ends: tuple[NDArray[np.float64], NDArray[np.float64]] = (np.empty(0), np.empty(0))  # steps and their elapsed_s

    @classmethod
    def of(cls, run_dir: Path) -> _Earlier:
        """Return what the folder says; nothing of an empty one."""
        path, status = run_dir / "records.jsonl", read_status(run_dir) or Status()
        columns = read(path) if path.exists() else {}
        found = cls(
            status.step, status.run_s or 0.0, (columns["step"], columns["elapsed_s"]) if columns else cls().ends
        )
        return found._replace(run_s=max(found.run_s, found.elapsed_s()))  # where there is no run.json

    def elapsed_s(self, before: float = math.inf) -> float:
        """Return the seconds of all steps before one."""
        steps, elapsed_s = self.ends
        return float(np.fmax.reduce(elapsed_s[steps < before], initial=0.0))


class _Waiting(NamedTuple):
    """A _Waiting holds what was logged before the optimizer's step: what is known, and what is late."""

    names: set[str]
    known: dict[str, float]
    late: list[Deferred]


def _arriving(values: Mapping[str, float | torch.Tensor | None]) -> tuple[dict[str, float], list[Deferred]]:
    """Return the values that are known, and those that are on their way from their devices."""
    known: dict[str, float] = {}
    coming: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, value in values.items():
        if value is not None:
            _sort(name, value, known, coming)
    return known, [Deferred(there, {}) for there in coming.values()]


def _sort(name: str, value: Any, known: dict[str, float], coming: dict[torch.device, dict[str, torch.Tensor]]) -> None:
    """Put a value where it belongs: numbers and CPU tensors with what is known, device tensors with what is coming."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            shape = tuple(value.shape)
            raise ValueError(f"log({name}=tensor of shape {shape}): log one element, for example its .mean().")
        if value.device.type == "cpu":
            known[name] = float(value.detach())
        else:
            coming.setdefault(value.device, {})[name] = value.detach()
        return
    if isinstance(value, str | bytes):
        raise TypeError(f"log({name}={value!r}): a number or a tensor of one element is needed.")
    try:
        known[name] = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"log({name}={type(value).__name__}): a number or a tensor of one element is needed."
        ) from error
