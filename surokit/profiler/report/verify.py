"""Try a piece of advice on the user's own step, and set the measured gain beside the predicted one: `verify`.

The step runs as it is, with the change, and as it is once more, in turns whose order rotates, so that any drift (clocks,
caches, other programs) falls on all three alike. The gain is the difference of the medians, with a 95 % bootstrap interval over
the turns (percentile method: Efron 1979); the step against itself shows this machine's noise. The steps are real:
they train the model they train. Everything that is changed for a trial is put back after each call, also by an exception.

Some changes are made from outside, by the rule's trial below; the rest is the user's to make, as `changed=`.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import Optimizer

from surokit.environment import cores
from surokit.profiler.record import watch as watching
from surokit.profiler.record.tracer import wait_for_device
from surokit.statistics import drawn_again, percentile_interval
from surokit.tables import html_table
from surokit.torch_private import DataLoaderIterator, in_front_of_backends, keys_below_backend_select

Step = Callable[[], object]
Changed = Callable[[], AbstractContextManager[None]]  # entered around each trial call
Times = np.ndarray[Any, np.dtype[np.float64]]  # milliseconds, a row for each turn
_RESAMPLES = 2000
_collect = gc.collect  # as it was: a trial replaces it


@dataclass(frozen=True, repr=False)
class Verdict:
    """A Verdict holds the gain of a piece of advice when it was tried. Times are milliseconds a step: medians before and
    after, their difference with its 95 % interval, and `noise_ms`, the largest difference that the same step plausibly has
    with itself."""

    rule: str
    predicted_ms: float
    before_ms: float
    after_ms: float
    gain_ms: float
    interval: tuple[float, float]
    noise_ms: float
    rounds: int
    steps: int

    @property
    def helps(self) -> bool:
        """Return whether the whole interval lies above zero and the gain above the noise."""
        return self.interval[0] > 0 and self.gain_ms > self.noise_ms

    @property
    def verdict(self) -> str:
        """Return the verdict as one sentence."""
        low, high = self.interval
        said = (
            f"predicted up to {self.predicted_ms:.3g} ms a step, measured {self.gain_ms:.3g} ({low:.3g} to {high:.3g})"
        )
        if self.helps:
            return said
        return f"{said}: it costs time here" if high < -self.noise_ms else f"{said}: no gain beyond the noise"

    def _how(self) -> str:
        one = "1 step" if self.steps == 1 else f"{self.steps} steps"
        return (
            f"{self.rounds} rounds of {one} in turns; the step against itself differs by up to {self.noise_ms:.3g} ms"
        )

    def __repr__(self) -> str:
        times = f"as it is {self.before_ms:.4g} ms, changed {self.after_ms:.4g} ms"
        return f"{self.rule}: {self.verdict}\n  {times}; {self._how()}"

    def _repr_html_(self) -> str:
        rows = [
            ("as it is", f"{self.before_ms:.4g}"),
            ("changed", f"{self.after_ms:.4g}"),
            ("gain", f"{self.gain_ms:.4g}"),
        ]
        table = html_table(rows, header=("", "ms a step"), right=(1,), title=self.rule)
        return f"{table}<p>{escape(self.verdict)}.<br><small>{escape(self._how())}</small></p>"


def verify(
    row: Mapping[str, Any], step: Step, changed: Step | None = None, *, rounds: int = 20, steps: int = 1
) -> Verdict:
    """Try one row of an advice table on `step`, a call that does one step of the user's loop.

    changed: the step with the change made; None lets the rule's own trial make it, where it has one.
    rounds: turns of as it is, changed, as it is. steps: calls in each.
    Raises ValueError for rounds < 2 or steps < 1, and where the change cannot be made from outside and `changed` is missing;
    an exception of a step passes on.
    """
    if rounds < 2 or steps < 1:
        raise ValueError(f"verify() needs rounds >= 2 and steps >= 1, not rounds={rounds}, steps={steps}")
    rule = str(row["rule"])
    if changed is None and rule not in _TRIALS:
        known = ", ".join(_TRIALS)
        raise ValueError(
            f"{rule!r} cannot be tried from outside (only {known} can): pass changed=, the step with the change made"
        )
    _timed(step, nullcontext, 1)  # a first call of each builds what is built on first use
    trial = Trial(nullcontext) if changed is not None else _TRIALS[rule](row, step)
    other = changed or step
    _timed(other, trial.context, 1)
    if not trial.used():
        raise ValueError(
            f"{trial.lacking}, so this cannot be tried from outside: pass changed=, the step with the change made"
        )
    arms: list[tuple[Step, Changed]] = [(step, nullcontext), (other, trial.context), (step, nullcontext)]
    times = np.empty((rounds, 3))
    for turn in range(rounds):
        for arm in np.roll(np.arange(3), turn).tolist():
            times[turn, arm] = _timed(*arms[arm], steps)
    gain, low, high = difference_of(times[:, [0, 2]], times[:, [1]])
    _, *noise = difference_of(times[:, [0]], times[:, [2]])
    return Verdict(
        rule=rule,
        predicted_ms=float(row["gain_ms"]),
        before_ms=float(np.median(times[:, [0, 2]])),
        after_ms=float(np.median(times[:, 1])),
        gain_ms=gain,
        interval=(low, high),
        noise_ms=max(abs(bound) for bound in noise),
        rounds=rounds,
        steps=steps,
    )


def _timed(step: Step, context: Changed, steps: int) -> float:
    """Return the milliseconds of one call, the device's work included; entering and leaving the context is not timed."""
    with context():
        begin = now_ns()
        for _ in range(steps):
            step()
        return (now_ns() - begin) / steps / 1e6


def now_ns() -> int:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        wait_for_device()
    return time.perf_counter_ns()


def difference_of(before: Times, after: Times) -> tuple[float, float, float]:
    """Return how much smaller the median of `after` is, and its 95 % interval over resampled turns (rows)."""

    def difference(turns: Times) -> Times:
        return np.median(before[turns], axis=(1, 2)) - np.median(after[turns], axis=(1, 2))

    low, high = percentile_interval(drawn_again(range(len(before)), difference, resamples=_RESAMPLES))
    return float(np.median(before) - np.median(after)), low, high


# ------------------------------------------------------------------------------------------------------------------ trials


class Trial:
    """A Trial is a change made from outside. `used` says after a warm-up call whether the step ran into the change; if it
    did not, the change cannot be tried on it."""

    def __init__(self, context: Changed, lacking: str = "", used: Callable[[], bool] = lambda: True) -> None:
        self.context, self.lacking, self.used = context, lacking, used


def _setting(read: Callable[[], Any], write: Callable[[Any], object], value: Callable[[], Any]) -> Callable[..., Trial]:
    """Make a trial that only sets one of torch's switches."""

    @contextmanager
    def context() -> Iterator[None]:
        was = read()
        write(value())
        try:
            yield
        finally:
            write(was)

    return lambda row, step: Trial(context)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    was = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, was)


def _no_garbage(row: Mapping[str, Any], step: Step) -> Trial:
    """Turn off automatic collections and the user's own. Young garbage is collected between the calls, so that the steps
    which collect do not pay for those that did not."""

    @contextmanager
    def context() -> Iterator[None]:
        on = gc.isenabled()
        gc.disable()
        try:
            with _replaced(gc, "collect", lambda *args, **kwargs: 0):
                yield
        finally:
            _collect(0)
            if on:
                gc.enable()

    return Trial(context)


def fused_optimizer(row: Mapping[str, Any], step: Step) -> Trial:
    """Set `fused=True` in the groups of every optimizer that steps and has such a form."""
    found: list[Optimizer] = []
    handle = watching.on_optimizer_step(found.append)
    try:
        step()
    finally:
        handle.remove()
    optimizers = {id(o): o for o in found if any(group.get("fused", True) in (None, False) for group in o.param_groups)}

    @contextmanager
    def context() -> Iterator[None]:
        with ExitStack() as stack:
            for optimizer in optimizers.values():
                stack.enter_context(_fused(optimizer))
            yield

    return Trial(context, "the step runs no optimizer whose fused form is off", lambda: bool(optimizers))


@contextmanager
def _fused(optimizer: Optimizer) -> Iterator[None]:
    groups: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (group, {str(name): value for name, value in group.items() if name in ("fused", "foreach")})
        for group in optimizer.param_groups
    ]
    checked = "_need_device_dtype_check_for_fused"  # noted by torch once a fused step has run
    had = {name: value for name, value in vars(optimizer).items() if name == checked}
    counters = []  # fused optimizers keep the step count on the parameter's device, the others on the CPU
    for p, state in optimizer.state.items():
        count = state.get("step")
        if isinstance(count, torch.Tensor) and count.device != p.device:
            counters.append((state, count))
            state["step"] = count.to(p.device, torch.float32)
    try:
        for group, was in groups:
            group.update({name: name == "fused" for name in was})
        yield
    finally:
        for group, was in groups:
            group.update(was)
        for state, count in counters:
            state["step"] = count.copy_(state["step"])
        vars(optimizer).pop(checked, None)
        vars(optimizer).update(had)


def _dropped_gradients(row: Mapping[str, Any], step: Step) -> Trial:
    """Make `zero_grad` drop the gradients, whatever its argument is."""
    met: list[int] = []

    def dropping(plain: Callable[..., None]) -> Callable[..., None]:
        def zero_grad(self: Any, set_to_none: bool = True) -> None:
            met.append(int(not set_to_none))
            plain(self, set_to_none=True)

        return zero_grad

    @contextmanager
    def context() -> Iterator[None]:
        met.clear()
        with ExitStack() as stack:
            for owner in (Optimizer, torch.nn.Module):
                stack.enter_context(_replaced(owner, "zero_grad", dropping(owner.zero_grad)))
            yield

    return Trial(context, "the step calls no zero_grad(set_to_none=False)", lambda: any(met))


def last_batch(row: Mapping[str, Any], step: Step) -> Trial:
    """Let a DataLoader's iterator answer with one batch that its loader gave. Epochs that begin in a trial call keep their
    length; an iterator that was there before does not move, unless it is asked for more than it had left."""
    batches: dict[Any, Any] = {}  # by the sampler that all iterators of a loader share
    left: dict[Any, list[Any]] = {}  # of each iterator in this trial call: batches it has left, whether it began here
    met: list[bool] = []
    plain = DataLoaderIterator.__next__

    def answer(self: Any) -> Any:
        if self not in left:
            try:
                left[self] = [len(self) - self._num_yielded, self._num_yielded == 0]
            except TypeError:  # an IterableDataset may end anywhere
                return plain(self)
        met.append(True)
        state = left[self]
        if state[0] <= 0:
            if state[1]:
                del left[self]  # persistent workers begin their next epoch with the same iterator
                raise StopIteration
            return plain(self)
        state[0] -= 1
        if self._index_sampler not in batches:
            batches[self._index_sampler] = plain(self)
        return batches[self._index_sampler]

    @contextmanager
    def context() -> Iterator[None]:
        left.clear()
        with _replaced(DataLoaderIterator, "__next__", answer):
            yield

    return Trial(context, "the step reads no torch DataLoader of known length", lambda: bool(met))


def old_values(row: Mapping[str, Any], step: Step) -> Trial:
    """Let reads of a single value at the advice's line answer at once with the value that was read there before. This goes
    through the dispatcher, as the profiler sees them; each answer costs a few microseconds of Python."""
    place = (str(row["file"]), int(row["line"]))
    known: dict[torch.dtype, Any] = {}
    met: list[bool] = []
    operator = torch.ops.aten._local_scalar_dense.default
    below = keys_below_backend_select()
    within = threading.local()  # the plain read must not come here again

    def read(keyset: Any, tensor: torch.Tensor) -> Any:
        if getattr(within, "reading", False):
            return operator.redispatch(keyset & below, tensor)
        within.reading = True
        try:
            file, line, _ = watching.user_line(sys._getframe(1))
            here = (watching.name_source(file), line) == place
            if here:
                met.append(True)
            if here and tensor.dtype in known:
                return known[tensor.dtype]
            value = operator.redispatch(keyset & below, tensor)
            if here:
                known[tensor.dtype] = value
            return value
        finally:
            within.reading = False

    @contextmanager
    def context() -> Iterator[None]:
        with in_front_of_backends({"_local_scalar_dense": read}):
            yield

    return Trial(context, f"the step reads no single value at {place[0]}:{place[1]}", lambda: bool(met))


def _without_synchronize(row: Mapping[str, Any], step: Step) -> Trial:
    """Let `torch.cuda.synchronize()` return at once."""
    met: list[bool] = []
    return Trial(
        lambda: _replaced(torch.cuda, "synchronize", lambda device=None: met.append(True)),
        "the step does not call torch.cuda.synchronize()",
        lambda: bool(met),
    )


def _anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def set_cudnn_benchmark(on: bool) -> None:
    torch.backends.cudnn.benchmark = on


_TRIALS: dict[str, Callable[[Mapping[str, Any], Step], Trial]] = {
    "sync": old_values,
    "library sync": old_values,
    "synchronize": _without_synchronize,
    "data": last_batch,
    "garbage": _no_garbage,
    "optimizer": fused_optimizer,
    "zero_grad": _dropped_gradients,
    "anomaly": _setting(_anomaly, lambda was: torch.autograd.set_detect_anomaly(*was), lambda: (False, False)),
    "deterministic": _setting(
        _deterministic, lambda was: torch.use_deterministic_algorithms(was[0], warn_only=was[1]), lambda: (False, False)
    ),
    "float32": _setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, lambda: "high"),
    "cudnn.benchmark": _setting(lambda: torch.backends.cudnn.benchmark, set_cudnn_benchmark, lambda: True),
    "threads": _setting(torch.get_num_threads, torch.set_num_threads, cores),
}
