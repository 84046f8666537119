"""Measure what a training loop sustains and loses, all the time and at next to no cost, whoever wrote the loop: `Monitor`.

    with sk.Monitor(tokens=8192) as m:
        for batch in m.batches(loader):
            ...
    print(m.summary())

Four levels, each of which goes on without the next: the host's clock at the end of each step (an optimizer's step, or
`m.step()`); a CUDA event beside it, read when it has arrived; NVML once a second (device.py); two steps in two hundred
under torch's profiler (windows.py). None of them waits for the device, except at the ends of those windows. Memory is the
same however long the loop runs: see History.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch

from surokit.profiler.monitoring.device import DeviceFigures, DeviceWatch
from surokit.profiler.monitoring.sustained import History, Sustained, rows, sustain, with_rows
from surokit.profiler.monitoring.windows import Estimate, Windows
from surokit.profiler.record.tracer import capturing
from surokit.profiler.record.watch import on_optimizer_step
from surokit.tables import html_table, text_table
from surokit.units import number, percent

if TYPE_CHECKING:
    import pandas as pd

Item = TypeVar("Item")
WAITING = 64  # steps whose events are on their way; beyond it the oldest goes without
_COLUMNS = ("wall_ms", "tokens", "stall_ms", "offload_ms", "device_ms", "gap_ms")


@dataclass(frozen=True)
class MonitorSummary:
    """A MonitorSummary holds the figures of a loop. It prints as a table and shows itself in a notebook.

    sustained: rates, goodput, lost time (see Sustained); `unit` says whether rates count tokens or steps. stall_ms: waited for
    a batch, a step (with `batches`, else NaN). offload_ms: the device was without work for an optimizer whose state is on the
    host, a step (NaN for others). gap_ms: no work of the loop on the device between two steps (with `batches` on a
    GPU, else NaN). device_ms: from the end of one step on the device to the end of the next. activity: the sampled windows'
    estimate. device: power, clocks and PCIe traffic. notes: what was not measured, and why.
    """

    name: str
    steps: int
    unit: str
    sustained: Sustained
    stall_ms: float
    offload_ms: float
    gap_ms: float
    device_ms: float
    activity: Estimate
    device: DeviceFigures
    notes: tuple[str, ...]

    def _rows(self) -> list[tuple[str, str]]:
        s, a, means = self.sustained, self.activity, self.device.means
        out = [
            ("device", self.name),
            ("steps", f"{self.steps:,}"),
            ("wall", f"{s.run_s:.1f} s, of it {s.step_s:.1f} s in steps"),
            *rows(
                s,
                self.unit,
                "by the sampled idle share" if a.windows else "at least",
                "data" if math.isnan(self.offload_ms) else "data or offload",
                on_gpu=self.name != "cpu",
            ),
        ]
        out += [
            (title, f"{value:.3g} ms a step")
            for title, value in (
                ("waiting for data", self.stall_ms),
                ("waiting for offload", self.offload_ms),
                ("gap between steps", self.gap_ms),
            )
            if value == value
        ]
        if a.windows:
            share = percent(a.idle_frac)
            if a.windows > 1:
                share += f" (95 %: {percent(a.idle_low)} to {percent(a.idle_high)})"
            out.append(
                ("idle, sampled", f"{share}, {a.windows} window{'s' * (a.windows > 1)}, {a.cost_s:.2f} s for them")
            )
        if a.launches == a.launches:
            out.append(("kernel launches", f"{number(a.launches)} a step"))
        if "power_w" in means:
            out.append(("power", f"{means['power_w']:.0f} W"))
        if "sm_mhz" in means:
            out.append(("clock", f"{means['sm_mhz']:,.0f} MHz"))
        if "throttled" in means:
            why = ", ".join(f"{reason} {percent(share)}" for reason, share in self.device.reasons.items())
            out.append(("throttled", percent(means["throttled"]) + (f": {why}" if why else "")))
        if "pcie_rx_mib_s" in means and "pcie_tx_mib_s" in means:
            out.append(("PCIe in, out", f"{number(means['pcie_rx_mib_s'])}, {number(means['pcie_tx_mib_s'])} MiB/s"))
        return out + [("note", note) for note in self.notes]

    def __repr__(self) -> str:
        return text_table(self._rows(), indent="")

    def _repr_html_(self) -> str:
        return html_table(self._rows(), title="Monitor")


class _Step(NamedTuple):
    """A step waits here for its events: the end of the step before, the moment its batch was handed out, its own end."""

    wall_ms: float
    tokens: float
    stall_ms: float
    offload_ms: float
    before: Any = None
    start: Any = None
    end: Any = None

    def row(self) -> tuple[float, ...]:
        """Return the columns of the history; NaN where there is no event, or it has not arrived."""
        here = self.end is not None and _arrived(self.end)
        device_ms = _between(self.before, self.end) if here else math.nan
        gap_ms = _between(self.before, self.start) if here else math.nan
        waits = self.stall_ms, self.offload_ms
        return self.wall_ms, self.tokens, *waits, device_ms, gap_ms if gap_ms != gap_ms else max(gap_ms, 0.0)


class Monitor:
    """A Monitor watches a training loop: put `with sk.Monitor() as m:` around it, call `m.summary()` during or after it.

    A step ends where an optimizer steps (of several, the one that steps most often), or where the loop calls `m.step()`.
    tokens: in a step, for tokens/s; None counts steps, unless m.step(tokens=...) says it. usd_per_gpu_hour: for the price of
    what was lost. every: so many steps between two sampled windows of two steps; None samples none.
    Entering it again goes on with the same figures; the time between does not count. Raises RuntimeError when it is entered
    while it runs, ValueError for a price or tokens that are negative or not finite and for every < 3.
    """

    def __init__(
        self,
        *,
        tokens: float | None = None,
        usd_per_gpu_hour: float | None = None,
        every: int | None = 200,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        for name, value in (("tokens", tokens), ("usd_per_gpu_hour", usd_per_gpu_hour)):
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"Monitor({name}={value}): a finite number >= 0.")
        self._tokens, self._price, self._clock = tokens, usd_per_gpu_hour, clock
        self._windows = Windows(every, 2) if every is not None else None
        self._device_watch: DeviceWatch | None = None
        self._history = History(_COLUMNS)
        self._waiting: deque[_Step] = deque()
        self._stack: ExitStack | None = None
        self._steps = 0
        self._run_s = self._began_s = self._marked_s = 0.0
        self._stall_ms = self._offload_ms = math.nan
        self._start: Any = None
        self._end: Any = None
        self._by_user = False
        self._marker: weakref.ref[Any] | None = None
        self._turns: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __enter__(self) -> Monitor:
        if self._stack is not None:
            raise RuntimeError("this Monitor is running already: make another sk.Monitor() for a loop inside it")
        self._stack = ExitStack()
        self._stack.callback(on_optimizer_step(self._on_optimizer).remove)
        if self._device_watch is not None:
            self._stack.enter_context(self._device_watch)
        if self._windows is not None:
            self._windows.prepare()
            self._stack.callback(self._windows.drop)
        self._end = self._start = None
        self._stall_ms = self._offload_ms = math.nan
        self._began_s = self._marked_s = self._clock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run_s = self._wall_s()
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()

    # ------------------------------------------------------------------------------------------------------ the loop

    def step(self, tokens: float | None = None) -> None:
        """End a step of a loop whose optimizer steps do not mark one; from the first call on, only these calls end a step."""
        if self._stack is None:
            return
        if not self._by_user:  # an optimizer has marked this very step
            self._by_user = True
            self._history, self._steps = History(_COLUMNS), 0
            self._waiting.clear()
            self._marked_s = self._began_s
        self._mark(self._tokens if tokens is None else tokens)

    def batches(self, data: Iterable[Item]) -> Iterator[Item]:
        """Yield the items of `data`, and measure the time that the loop waits for each; on a GPU also the device's gap
        between steps."""
        source = iter(data)
        while True:
            began = self._clock()
            try:
                item = next(source)
            except StopIteration:
                return
            waited_ms = (self._clock() - began) * 1e3
            self._stall_ms = _plus(self._stall_ms, waited_ms)
            if self._start is None and self._stack is not None:
                self._start = _event()
            yield item

    def _on_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if capturing():  # recorded into a CUDA graph, which is no step yet
            return
        if (offload_ms := getattr(optimizer, "device_stall_ms", None)) is not None:
            self._offload_ms = _plus(self._offload_ms, offload_ms)
        if self._by_user:
            return
        turns = self._turns[optimizer] = self._turns.get(optimizer, 0) + 1
        marker = self._marker() if self._marker is not None else None
        if marker is not optimizer:
            if marker is not None and turns <= self._turns[marker]:
                return
            self._marker = weakref.ref(optimizer)
        self._mark(self._tokens)

    def _mark(self, tokens: float | None) -> None:
        if self._stack is None:  # a step of another thread, as the block ended
            return
        now = self._clock()
        wall_ms, self._marked_s = (now - self._marked_s) * 1e3, now
        end = _event()
        if end is not None and self._device_watch is None:
            self._device_watch = self._stack.enter_context(DeviceWatch(torch.cuda.current_device()))
        work = math.nan if tokens is None else tokens
        offload_ms = min(self._offload_ms, wall_ms)  # of others besides, where optimizers share a link
        self._waiting.append(_Step(wall_ms, work, self._stall_ms, offload_ms, self._end, self._start, end))
        self._end, self._start, self._stall_ms, self._offload_ms = end, None, math.nan, math.nan
        self._steps += 1
        while self._waiting and (_arrived(self._waiting[0].end) or len(self._waiting) > WAITING):
            self._history.append(self._waiting.popleft().row())
        if self._windows is not None:
            self._windows.tick(self._steps)

    def _wall_s(self) -> float:
        return self._run_s + (self._clock() - self._began_s if self._stack is not None else 0.0)

    # ------------------------------------------------------------------------------------------------------- figures

    def summary(self) -> MonitorSummary:
        """Return the figures so far; never waits for the device. Raises ValueError before the first step."""
        t = self._table()
        known = bool(np.isfinite(t["tokens"]).any())
        work = np.nan_to_num(t["tokens"]) if known else t["steps"]
        activity = self._windows.estimate() if self._windows else Estimate()
        # a stall is idle time where no event says better; sampled windows see the gaps inside steps as well
        offload_ms = np.nan_to_num(t["offload_ms"])
        between_ms = np.where(np.isfinite(t["gap_ms"]), t["gap_ms"], t["stall_ms"])
        idle_ms = np.where(np.isfinite(t["offload_ms"]), np.nan_to_num(between_ms) + offload_ms, between_ms)
        idle_frac = np.minimum(np.fmax(idle_ms / np.maximum(t["wall_ms"], 1e-9), activity.idle_frac), 1.0)
        notes = [
            *(self._device_watch.notes if self._device_watch else ()),
            *(self._windows.notes if self._windows else ()),
        ]
        return MonitorSummary(
            name=torch.cuda.get_device_name() if torch.cuda.is_initialized() else "cpu",
            steps=self._steps,
            unit="tokens/s" if known else "steps/s",
            sustained=sustain(
                t["wall_ms"],
                work,
                idle_frac=idle_frac,
                stall_ms=np.minimum(np.nan_to_num(t["stall_ms"]) + offload_ms, t["wall_ms"]),
                run_s=self._wall_s(),
                usd_per_gpu_hour=self._price,
            ),
            **{name: _mean(t[name], t["steps"]) for name in ("stall_ms", "offload_ms", "gap_ms", "device_ms")},
            activity=activity,
            device=self._device_watch.figures() if self._device_watch else DeviceFigures(),
            notes=tuple(notes),
        )

    def frame(self) -> pd.DataFrame:
        """Return a pandas DataFrame with steps, wall_ms, tokens, stall_ms, offload_ms, device_ms, gap_ms. A row is a step,
        or in a run of more than 16,384 steps the sum of `steps` of them. Never waits: NaN where a value is missing or on
        its way."""
        import pandas as pd

        return pd.DataFrame(self._table()).astype({"steps": "int64"})

    def _table(self) -> dict[str, Any]:
        return with_rows(self._history.table(), [step.row() for step in self._waiting])

    def __repr__(self) -> str:
        return repr(self.summary()) if self._steps else "<Monitor before the first step>"

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_() if self._steps else "<p>Monitor before the first step</p>"


def _plus(so_far: float, more: float) -> float:
    """Add two numbers, of which NaN as the first means that there is nothing yet."""
    return more if math.isnan(so_far) else so_far + more


def _mean(values: Any, steps: Any) -> float:
    known = np.isfinite(values)
    return float(values[known].sum() / steps[known].sum()) if known.any() else math.nan


def _arrived(event: Any) -> bool:
    """Return whether the device has passed the event; None has nothing to wait for. An error of the device is left to the
    code that caused it."""
    try:
        return event is None or bool(event.query())
    except RuntimeError:
        return False


def _between(first: Any, last: Any) -> float:
    """Return the milliseconds between two events; NaN without one, and where they are of two devices or streams that cannot
    be compared."""
    try:
        return math.nan if first is None or last is None else float(first.elapsed_time(last))
    except (RuntimeError, ValueError):
        return math.nan


def _event() -> Any:
    """Record an event behind the work that the device was given so far; None where there is no device, or a graph is being
    captured."""
    if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
