"""This module takes the measurements of a session's steps: meters, the time between steps, events on the device, the device's own
state.

Nothing here waits for the device. A meter that raises is dropped with a warning: no measurement can stop a run.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from surokit.blocks import blocks_of
from surokit.models.sparse import RouterUse
from surokit.nn.delayed import kept_amaxes
from surokit.runs.records import Deferred, Record
from surokit.train.engine import Engine
from surokit.train.marks import Mark
from surokit.train.meters import Watcher
from surokit.train.pace import Pace
from surokit.train.prefetch import AHEAD
from surokit.train.random_state import kept
from surokit.train.setup import loss_of, peak_gib
from surokit.train.stream import Batch

if TYPE_CHECKING:
    from surokit.profiler.monitoring.device import DeviceWatch
    from surokit.train.session import Session

Meter = Callable[["Session"], Mapping[str, Tensor | float]]

DEVICE_COLUMNS = {"power_w", "sm_mhz", "throttled"}  # further columns of the records on a GPU, where NVML gives them


@runtime_checkable
class Attachable(Protocol):
    """An Attachable holds a meter's settings: each session attaches a meter of its own, which keeps them as `value`. That may also
    have `paused()`, called when something that is no step has happened."""

    def attach(self) -> Meter: ...


def settings_of(meter: Meter) -> Meter | Attachable:
    value = getattr(meter, "value", None)
    return value if isinstance(value, Attachable) else meter


class Measuring:
    """A Measuring holds the meters of one session, and its clock between steps. `watch` reads the device's state in a thread, on a
    GPU. `router_use` has what the routers of a Decoder with experts did since the last step; `pace` what this process does alone,
    None where it is the only one."""

    def __init__(
        self, device: torch.device, meters: Sequence[Meter | Attachable], model: nn.Module, *, are_several: bool
    ) -> None:
        self.device = device
        self.pace = Pace(device) if are_several else None
        self.router_use = _router_use(model)
        self.meters: list[Meter] = [m.attach() if isinstance(m, Attachable) else m for m in meters]
        self.watch = _device_watch(device)
        self._before: Mark | None = None  # the end of the step before, or the beginning of the loop
        # waits for steps in flight, which the next steps have instead of their own
        self._owed_s: deque[float] = deque()

    @property
    def watchers(self) -> list[Watcher]:
        return [meter for meter in self.meters if isinstance(meter, Watcher)]

    # -- time

    @contextmanager
    def loop(self) -> Iterator[None]:
        """Count the time before the first step of the block as that step's; what comes after the block is no step's."""
        if self.watch is not None:
            self.watch.start()
        self._before = Mark(time.perf_counter(), None)
        try:
            yield
        finally:
            self._before = None
            self._pause_meters()
            if self.watch is not None:
                self.watch.stop()

    def settle(self, session: Session) -> None:
        """Wait for the steps in flight before something that is no step, each as long as a later step would have waited for it.

        The host gives a step while the device works at those before, and waits for them: a step's time on the host is the
        device's for an earlier one. After a wait like this the next steps find nothing to wait for, and would look free.
        """
        for record in session.records[-AHEAD:]:
            if self._before is not None and not record.late.ready():
                record.late.wait()
                now_s = time.perf_counter()
                self._owed_s.append(now_s - self._before.host_s)
                self._before = self._before._replace(host_s=now_s)

    def restart(self) -> None:
        """Leave out of the next step's time what was done since the last step."""
        self._pause_meters()
        if self._before is not None:
            self._before = Mark(time.perf_counter(), None)

    def _pause_meters(self) -> None:
        for meter in self.meters:
            if (paused := getattr(meter, "paused", None)) is not None:
                paused()

    def mark(self) -> Mark:
        """Return a mark of this moment."""
        return Mark.on(self.device)

    # -- a step

    @contextmanager
    def watched(self, engine: Engine, step: int, parts: Sequence[Batch]) -> Iterator[None]:
        """Let the watchers that are due see this step's operands.

        A compiled graph calls no hooks: there the step's first part is computed a second time, uncompiled and aside.
        """
        due = [watcher for watcher in self.watchers if watcher.due(step)]
        model = engine.model
        with ExitStack() as stack:
            if self.pace is not None and self.pace.due(step) and not engine.compiled:
                stack.enter_context(self.pace.watch(blocks_of(model) or [model]))
            for watcher in due:
                stack.enter_context(watcher.watch(model))
            if not due or not engine.compiled:
                yield
                return
            with kept(self.device), kept_amaxes(model):
                loss_of(model(**parts[0])).backward()
            model.zero_grad(set_to_none=True)
        yield

    def read(self, session: Session, values: dict[str, Tensor]) -> dict[str, float]:
        """Call the meters: add their tensors to `values`, return their floats."""
        host: dict[str, float] = {}
        if self.router_use is not None:
            values |= self.router_use.take(session.processes.sum)
        for meter in list(self.meters):
            try:
                with torch.no_grad():
                    for name, value in meter(session).items():
                        if isinstance(value, Tensor):
                            values[name] = value.detach().reshape(()).to(self.device)
                        else:
                            host[name] = float(value)
            except Exception as error:
                self.meters.remove(meter)
                warnings.warn(
                    f"The meter {getattr(meter, '__name__', meter)} failed and is left out from step {session.steps} on "
                    f"({type(error).__name__}: {error}).",
                    stacklevel=2,
                )
        return host

    def record(
        self,
        session: Session,
        tokens: int,
        lr: float,
        values: Mapping[str, Tensor],
        host: dict[str, float],
        start: Mark,
        end: Mark,
    ) -> Record:
        """Return the record of the step that the session has just counted, which `start` and `end` enclose."""
        end_s = time.perf_counter()  # with the meters, which are the step's
        before, follows = self._before or start, self._before is not None
        wall_s = end_s - before.host_s + (self._owed_s.popleft() if self._owed_s else 0.0)
        offload_ms: float | None = getattr(session.optimizer, "device_stall_ms", None)
        if offload_ms is not None:  # can exceed the step's time, as waits of others by the same link are in it
            host["offload_ms"] = offload_ms = min(offload_ms, 1e3 * wall_s)
        if self.device.type != "cuda" and follows and wall_s > 0:
            host["idle_frac"] = host_idle_frac(end_s - start.host_s - (offload_ms or 0.0) / 1e3, wall_s)
        if self.watch is not None:
            latest = self.watch.latest  # once: its thread puts another in its place
            host.update((name, latest[name]) for name in DEVICE_COLUMNS & latest.keys())
        stall_ms = session.data.waited_ms if follows else 0.0
        if self.pace is not None:
            self.pace.waited(stall_ms)
            host |= self.pace.columns()
        session.elapsed_s += wall_s
        session.step_s += wall_s
        self._before = Mark(end_s, end.event)
        return Record(
            step=session.steps,
            lr=lr,
            tokens=tokens,
            wall_ms=wall_s * 1e3,
            stall_ms=stall_ms,
            peak_gib=peak_gib(self.device),
            elapsed_s=session.elapsed_s,
            late=Deferred(values, host, start.event, end.event, before.event if follows else None),
        )


def host_idle_frac(busy_s: float, wall_s: float) -> float:
    """Return the idle share of a step on a CPU, which is host and device in one: what is not `busy_s` of its `wall_s` seconds."""
    return min(max(0.0, 1 - busy_s / wall_s), 1.0)


def _router_use(model: nn.Module) -> RouterUse | None:
    """Return what counts the tokens of experts, from zero on; None where the model has none."""
    found = next((module for module in model.modules() if isinstance(module, RouterUse)), None)
    if found is not None:
        found.take()
    return found


def _device_watch(device: torch.device) -> DeviceWatch | None:
    """Return a watch whose thread reads a GPU's power, clock and throttling once a second; None on other devices."""
    if device.type != "cuda":
        return None
    from surokit.profiler.monitoring.device import DeviceWatch

    return DeviceWatch(device.index)
