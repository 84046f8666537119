"""Write a session's records to another tool as well: TensorBoard, Weights & Biases, trackio.

    session.subscribe(sk.integrations.mirrors.TensorBoard("logs"))

A mirror is a subscriber. It puts each record on a bounded list, and its own thread takes them from there and writes; so a step
pays for an append, and a service that is slow, full or gone can neither delay nor end a run: it costs one warning. The
session's own records hold the measurements in any case.

Names: train/<column> (loss, lr, grad_norm, tokens_per_s, idle_frac, peak_gib, ...), meters/<name>, eval/loss; over steps. Each
run() opens the tool's run and closes it at its end; the next run() of the session goes on with the same one.
"""

from __future__ import annotations

import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections import deque
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surokit.runs.records import Record
    from surokit.runs.status import RunInfo

WAITING = 10_000  # records on the list; beyond it the oldest are left out, and the end says how many
WRITE_S = 0.5  # between two times that the list is taken from
CLOSE_S = 10.0  # how long the end of a run waits for what is still to be written

_MIRRORED = (
    "loss",
    "lr",
    "grad_norm",
    "tokens_per_s",
    "idle_frac",
    "peak_gib",
    "stall_ms",
    "skipped",
    "power_w",
    "sm_mhz",
)
_NOT = {"step", "tokens", "targets", "wall_ms", "elapsed_s", "eval_loss", "throttled"}


class Mirror(ABC):
    """A Mirror is the base of all mirrors: it has the list, the thread and the one warning. every: mirror one step in so
    many, from the first on.

    A mirror of your own defines `open(info, step)`, `write(step, values, time_s)` and `close(reason)`; they are called in the
    mirror's thread. info: what the run is. step, of open: steps from there on are new, even if some were written before.
    time_s: when the values arrived, in seconds since 1970.
    """

    def __init__(self, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"{type(self).__name__}(every={every}): of so many steps one is mirrored, at least 1.")
        self._every = every
        self._info: RunInfo | None = None
        self._waiting: deque[tuple[int, Record | float, float]] = deque(maxlen=WAITING)
        self._left_out = 0
        self._thread: threading.Thread | None = None  # of the run that goes on
        self._latest: threading.Thread | None = None  # which may still write what an earlier one left
        self._ending = threading.Event()
        self._running = False
        self._reason = ""
        self._trouble = ""
        self._told = False

    @abstractmethod
    def open(self, info: RunInfo | None, step: int) -> None: ...

    @abstractmethod
    def write(self, step: int, values: dict[str, float], time_s: float) -> None: ...

    def flush(self) -> None:  # noqa: B027
        """Flush the tool's buffers; called twice a second, after the values that were waiting."""

    @abstractmethod
    def close(self, reason: str) -> None: ...

    # -- from the session; nothing here waits but the end

    def on_info(self, info: RunInfo) -> None:
        self._info = info

    def on_start(self, total: int | None) -> None:
        self._running = True

    def on_step(self, record: Record) -> None:
        if (record.step - 1) % self._every == 0:
            self._put(record.step, record)

    def on_eval(self, step: int, loss: float) -> None:
        alone = self._thread is None and not self._running
        self._put(step, loss)
        if alone:  # nobody else ends it
            self.on_end("done")

    def on_end(self, reason: str) -> None:
        """Wait until all records are written, at most CLOSE_S."""
        thread, self._thread, self._running = self._thread, None, False
        self._reason = reason
        self._ending.set()
        if thread is None:
            return
        thread.join(CLOSE_S)
        if thread.is_alive() and not self._trouble:
            self._trouble = f"{len(self._waiting):,} records were not taken within {CLOSE_S:.0f} s of the run's end"
        self._tell()
        if self._left_out and not self._trouble:
            left_out, self._left_out = self._left_out, 0
            warnings.warn(
                f"{type(self).__name__} was slower than the run: {left_out:,} records are not mirrored. The run's own are whole.",
                RuntimeWarning,
                stacklevel=3,
            )

    def _put(self, step: int, what: Record | float) -> None:
        if self._trouble:
            self._tell()
            return
        self._left_out += len(self._waiting) == WAITING
        self._waiting.append((step, what, time.time()))
        if self._thread is None:
            self._ending = threading.Event()
            work = (self._ending, self._latest)
            self._thread = self._latest = threading.Thread(
                target=self._work, args=work, name="surokit-mirror", daemon=True
            )
            self._thread.start()

    def _tell(self) -> None:
        if self._trouble and not self._told:
            self._told = True
            warnings.warn(
                f"The records are no longer mirrored by {type(self).__name__}: {self._trouble}. The run and its own records go on.",
                RuntimeWarning,
                stacklevel=4,
            )

    # -- in the mirror's thread

    def _work(self, ending: threading.Event, before: threading.Thread | None) -> None:
        try:
            if before is not None:
                before.join()
            opened = over = False
            while not over:
                over = ending.wait(WRITE_S)  # first: what is on the list now is the last
                while self._waiting:
                    step, what, time_s = self._waiting.popleft()
                    if not opened:
                        self.open(self._info, step + isinstance(what, float))  # an evaluation belongs to a step before
                        opened = True
                    self.write(step, _values(what), time_s)
                if opened:
                    self.flush()
            if opened:
                self.close(self._reason)
        except Exception as error:
            self._trouble = f"{type(error).__name__}: {error}"
            self._waiting.clear()


def _values(what: Record | float) -> dict[str, float]:
    if isinstance(what, float):
        return {"eval/loss": what}
    values = what.to_dict()
    return {
        f"{'train' if name in _MIRRORED else 'meters'}/{name}": float(value)
        for name, value in values.items()
        if name not in _NOT
    }


class TensorBoard(Mirror):
    """A TensorBoard mirror writes event files to `logdir`, for `tensorboard --logdir`. A run that goes back to an earlier
    step hides what it had written from there on."""

    def __init__(self, logdir: str | Path, *, every: int = 1) -> None:
        super().__init__(every)
        _need("tensorboard", "TensorBoard")
        self.logdir = Path(logdir)
        self._writer: Any = None

    def open(self, info: RunInfo | None, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.logdir), purge_step=step)
        if info is not None:
            rows = "\n".join(
                f"| {name} | {value} |" for name, value in info.to_dict().items() if value not in (None, "")
            )
            self._writer.add_text("run", f"| | |\n| --- | --- |\n{rows}", step)

    def write(self, step: int, values: dict[str, float], time_s: float) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, time_s)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, reason: str) -> None:
        self._writer.close()


class Wandb(Mirror):
    """A Wandb mirror writes to a run of Weights & Biases. options: further arguments of `wandb.init`, mode="offline" for
    example."""

    def __init__(self, project: str, name: str | None = None, *, every: int = 1, **options: Any) -> None:
        super().__init__(every)
        _need("wandb", "Wandb")
        self._options = {"project": project, "name": name, **options}
        self.run: Any = None  # the latest, as wandb.init gave it

    def open(self, info: RunInfo | None, step: int) -> None:
        import wandb

        again = {} if self.run is None else {"id": self.run.id, "resume": "allow"}
        config = None if info is None else info.to_dict()
        self.run = wandb.init(**{"config": config, "reinit": "create_new", **self._options, **again})
        self.run.define_metric("*", step_metric="step")  # a resume may go back, which wandb's own steps may not

    def write(self, step: int, values: dict[str, float], time_s: float) -> None:
        self.run.log({"step": step, **values})

    def close(self, reason: str) -> None:
        self.run.finish(exit_code=int(reason.startswith("failed")))


class Trackio(Mirror):
    """A Trackio mirror writes to a run of trackio. options: further arguments of `trackio.init`."""

    def __init__(self, project: str, name: str | None = None, *, every: int = 1, **options: Any) -> None:
        super().__init__(every)
        _need("trackio", "Trackio")
        self._options = {"project": project, "name": name, "resume": "allow", **options}
        self.run: Any = None  # the latest, as trackio.init gave it

    def open(self, info: RunInfo | None, step: int) -> None:
        import trackio

        again = {} if self.run is None else {"name": self.run.name}
        self.run = trackio.init(**{"config": None if info is None else info.to_dict(), **self._options, **again})

    def write(self, step: int, values: dict[str, float], time_s: float) -> None:
        self.run.log(values, step=step)

    def close(self, reason: str) -> None:
        self.run.finish()


def _need(package: str, name: str) -> None:
    if find_spec(package) is None:
        raise ModuleNotFoundError(f"{name} needs the package {package}, which is not installed: pip install {package}.")
