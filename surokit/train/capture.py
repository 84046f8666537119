"""This module runs a step as CUDA graphs: recorded once, checked against the eager step, then launched whole. Where that cannot
be, it says why.

    first    forward and backward of a step's first part: gradients are written
    next     forward and backward of each further part: gradients are added
    update   norm, clip, mask, optimizer, and the roll of delayed scales

A graph is kernels with their addresses, so everything a step reads or writes stays where it is: batches are copied into
tensors of the graph's own, gradients are the same tensors every step, and the learning rate is a tensor on the device. What the
host decided while recording (a branch, a number) is frozen. Therefore the first steps of a shape are ordinary ones, hooks and
whatever else would be called only once keep a step eager, and what the graphs rest on (addresses, settings, modes) is compared
before each step: where it changed, they are recorded anew.

A replay draws the random numbers that the eager step would draw: the generator's offset moves on by as much.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from surokit.nn.delayed import amaxes_of, kept_amaxes
from surokit.optim.adamw import AdamW
from surokit.parallel.spread import Spread
from surokit.torch_private import (
    count_dispatch_modes,
    foreach_add_,
    foreach_copy_,
    foreach_zero_,
    handles_amp_scaling,
    has_step_hooks,
)
from surokit.train.cuda_graphs import Refused, Stale, broken_by_others, reason_of
from surokit.train.fingerprint import Fingerprint
from surokit.train.random_state import kept
from surokit.train.setup import mean_over
from surokit.train.stream import Batch

if TYPE_CHECKING:
    from surokit.train.engine import Engine

WARMUP = 2  # eager steps of a shape before it is recorded: lazily made state, tuned and loaded kernels
SHAPES = 4  # that are remembered
NOT_CAPTURED = "Steps do not run as CUDA graphs, so the device may wait for the host between its kernels: {}."
ANEW = 3  # times that graphs are recorded again after something changed under them
TOLERANCE = 0.02  # share of a gradient's norm: atomic additions take another order every time, in the eager step too
NOISE = (
    3.0  # times the gap of two eager runs: rounding to few bits makes much of a little, the more the deeper a model is
)
COMPARED = 3  # eager steps that the first is compared with, at most: in few bits noise is now little, now much
SMALL = 1 << 28  # bytes of gradients that may be there twice


@dataclass(frozen=True)
class Capture:
    """A Capture says whether a session's steps run as CUDA graphs ("on"), will ("waiting") or do not ("off"), and why.

    It is in `session.graphs`.
    """

    state: Literal["off", "waiting", "on"]
    why: str

    def __str__(self) -> str:
        return f"{self.state}: {self.why}"


class DeviceGraphs(Protocol):
    """A DeviceGraphs does what capturing needs of a device. `mended` counts the repairs that make all earlier graphs useless."""

    mended: int

    def rehearsal(self) -> AbstractContextManager[None]:
        """Run the block's work on the stream on which it will be recorded; work that waits for the device raises."""

    def record(self, work: Callable[[], Any]) -> Callable[[], None]:
        """Record what `work` does on the device, without doing it; the function returned does it."""

    def free_bytes(self) -> int:
        """Return the bytes of memory that are left."""

    def clear(self) -> None:
        """Release what was recorded: none of it will be replayed again."""


def why_not(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, spread: Spread | None = None) -> str:
    """Return why a model's steps can never be graphs; "" where no reason is known. An optimizer can say so itself, in
    `not_recorded`."""
    devices = {p.device for p in model.parameters()}
    if len(devices) > 1:
        return f"the model is on several devices ({', '.join(sorted(map(str, devices)))})"
    device = devices.pop()
    if device.type != "cuda":
        return f"CUDA graphs need a CUDA device, and the model is on {device}"
    if any(hasattr(p, "to_local") for p in model.parameters()):
        return "the model's parameters are sharded over processes, and their exchange is not recorded"
    if spread is not None and spread.processes.are_several:
        return "the gradients are exchanged between processes, which is not recorded"
    if said := getattr(optimizer, "not_recorded", ""):
        return f"{type(optimizer).__name__} is not recorded: {said}"
    return ""


class Graphs:
    """A Graphs object holds the graphs of one engine. `ready` before each step says whether they compute it; then `gradients`, and
    `update`."""

    def __init__(self, engine: Engine, device: DeviceGraphs) -> None:
        self._engine, self._device = engine, device
        self._refused = ""  # once that is said, every step is eager
        self._seen: Counter[Hashable] = Counter()
        self._eager: Counter[str] = Counter()
        self._times = 0
        self._loss = torch.zeros((), device=engine.device)
        self._weight = torch.ones((), device=engine.device)  # the weight of the part that is computed now
        self._clear()

    def _clear(self) -> None:
        self._inputs: dict[Hashable, dict[str, Tensor]] = {}
        self._parts: dict[tuple[Hashable, bool], Callable[[], None]] = {}  # by shape, and whether it is a step's first
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._change: Callable[[], None] | None = None
        self._changed: tuple[Tensor, Tensor] | None = None
        self._update_refused = ""
        self._rests_on: Fingerprint | None = None
        self._mended = self._device.mended
        self._error = 0.0
        self._replayed = False

    def _forget(self) -> None:
        self._clear()
        self._device.clear()

    @property
    def capture(self) -> Capture:
        if self._refused:
            return Capture("off", self._refused)
        if not self._parts:
            return Capture("waiting", f"the first {WARMUP} steps of a shape are eager")
        recorded = "forward and backward" if self._update_refused else "forward, backward and update"
        shapes = f" of {len(self._inputs)} shapes" if len(self._inputs) > 1 else ""
        equal = "equal to the eager step" if self._error == 0 else f"within {self._error:.0e} of the eager step"
        said = [f"{recorded}{shapes}, {equal}"]
        if self._update_refused:
            said.append(f"the update is eager: {self._update_refused}")
        said += [f"{n} step{'s' * (n > 1)} eager: {why}" for why, n in self._eager.items()]
        return Capture("on", "; ".join(said))

    # -- a step

    def ready(self, parts: Sequence[Batch]) -> bool:
        """Return whether graphs compute this step's gradients. Records the graphs when it is time to, which leaves no trace in the
        run."""
        self._replayed = False
        if self._refused:
            return False
        keys = [_shape(part) for part in parts]
        wanted = {(key, i == 0): part for i, (key, part) in enumerate(zip(keys, parts))}  # a first one first
        missing = [graph for graph in wanted if graph not in self._parts]
        if missing and any(self._seen[key] < WARMUP for key, _ in missing):
            self._seen.update(set(keys))
            return False
        if why := _in_force(self._engine.device):
            return self._stays_eager(why)
        now = self._look()
        if now.hooked:
            return self._stays_eager(f"hooks on {now.hooked}, which a graph would not call")
        if self._parts and (now != self._rests_on or self._device.mended != self._mended):
            return self._anew("weights, settings or modes changed")
        self._rests_on = now
        if len({key for key, _ in missing} | self._inputs.keys()) > SHAPES:
            return self._stays_eager(f"a shape beyond the {SHAPES} that are remembered")
        return not missing or self._try_to_record(parts, {graph: wanted[graph] for graph in missing})

    def gradients(self, parts: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        """Return mean loss and number of labels that count, as the engine does; the gradients are in the parameters. They are valid
        for one step."""
        targets, weights = self._engine.weights(parts)
        for i, part in enumerate(parts):
            key = _shape(part)
            for name, held in self._inputs[key].items():
                held.copy_(part[name], non_blocking=True)
            self._weight.fill_(1.0) if weights is None else self._weight.copy_(weights[i])
            self._parts[key, i == 0]()
        self._loss.copy_(mean_over(self._loss, targets))
        self._attach()
        self._replayed = True
        return self._loss, targets

    def update(self) -> tuple[Tensor, Tensor] | None:
        """Update by the gradients that `gradients` gave; return their norm and the mask, or None where the engine has to update."""
        if not self._replayed or self._change is None:
            return None
        self._change()
        return self._changed

    def give_up(self, why: str) -> bool:
        """Give up the graphs, with their memory, so that every later step is eager; False where there are none."""
        if not self._parts:
            return False
        self._refused = why
        self._forget()
        return True

    def begin_anew(self) -> None:
        """Forget what was recorded, so that it is recorded again after as many eager steps as at first."""
        self._forget()
        self._seen.clear()

    def _stays_eager(self, why: str) -> bool:
        self._eager[why] += 1
        return False

    def _anew(self, why: str) -> bool:
        """Forget the graphs and let them be recorded again after as many eager steps as at first; refuse where that was too
        often."""
        self._times += 1
        if self._times > ANEW:
            self._refuse(f"{why}, {self._times} times")
            return False
        self.begin_anew()
        return self._stays_eager(f"{why}, and the graphs are recorded anew")

    def _refuse(self, why: str) -> None:
        self._refused = why
        self._forget()
        self._engine.fallbacks.append(NOT_CAPTURED.format(why))

    def _attach(self) -> None:
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient

    # -- recording

    def _try_to_record(self, parts: Sequence[Batch], wanted: dict[tuple[Hashable, bool], Batch]) -> bool:
        try:
            return self._record(parts, wanted) or self._stays_eager("not finite, so graphs could not be checked")
        except Exception as error:
            why, later = reason_of(error), isinstance(error, Stale) or broken_by_others(error)
        except BaseException:
            self._forget()
            raise
        if later:  # out here, where the error does not hold a step's memory
            return self._anew(why)
        self._refuse(why)
        return False

    def _look(self) -> Fingerprint:
        """Return the present fingerprint of what the graphs rest on."""
        if self._rests_on is not None and self._rests_on.unchanged():
            return self._rests_on
        return Fingerprint(self._engine.model, None if self._change is None else self._engine.optimizer)

    def _record(self, parts: Sequence[Batch], wanted: dict[tuple[Hashable, bool], Batch]) -> bool:
        """Run a step twice eagerly, recorded and replayed: the same batches have to give the same, as far as eager runs give the
        same. Where a replay seems to be off, eager runs follow. Everything but the graphs is undone.

        False where a step that is not finite leaves nothing to compare.
        """
        with self._undone():
            loss, found = self._rehearsed(parts)
            if self._look() != self._rests_on:
                raise Refused("a forward changes attributes of the model, which a graph would freeze")
            if any(gradient.layout != torch.strided for gradient in found.values()):
                raise Refused("some gradients are sparse")
            if not torch.stack([t.isfinite().all() for t in (loss, *found.values())]).all():
                return False
            if sum(gradient.nbytes for gradient in found.values()) > SMALL:  # no room for a second set of them
                found = {p: gradient.cpu() for p, gradient in found.items()}
            expected = (loss, found)
        with self._undone():
            noise = _gaps(self._rehearsed(parts), expected)
        with self._undone():
            for (key, first), part in wanted.items():
                self._parts[key, first] = self._record_part(key, first, part)
        with self._undone():
            gaps = _gaps((self.gradients(parts)[0], self._gradients), expected)
        for _ in range(COMPARED - 1):
            if not _beyond(gaps, noise):
                break
            try:
                with self._undone():
                    other = _gaps(self._rehearsed(parts), expected)
            except torch.OutOfMemoryError:  # graphs hold memory by now; then what is known decides
                break
            noise = max(noise[0], other[0]), max(noise[1], other[1])
        if why := _beyond(gaps, noise):
            raise Refused(why)
        self._error = max(self._error, *gaps)
        if self._change is None and not self._update_refused:
            try:
                self._record_update()
            except Refused as why:
                self._change, self._update_refused = None, str(why)
        self._rests_on, self._mended = None, self._device.mended
        self._rests_on = self._look()
        return True

    def _rehearsed(self, parts: Sequence[Batch]) -> tuple[Tensor, dict[nn.Parameter, Tensor]]:
        """Return loss and gradients of an eager step, which may do only what a recorded one may."""
        engine = self._engine
        before = _host_random(engine.device)
        with self._device.rehearsal():
            loss, _ = engine.eager(parts)
        if _host_random(engine.device) != before:
            raise Refused("the model draws random numbers on the host, which a graph would freeze")
        return loss, {p: p.grad for p in engine.parameters() if p.grad is not None}

    def _record_part(self, key: Hashable, first: bool, part: Batch) -> Callable[[], None]:
        """Record one graph. The first makes the gradients, which all others write or add to: small ones together, in few launches,
        large ones where backward makes them, since there is no room for them twice."""
        engine = self._engine
        if key not in self._inputs:
            self._inputs[key] = {name: v.clone() for name, v in part.items() if isinstance(v, Tensor)}
        batch = {**part, **self._inputs[key]}
        held = list(self._gradients.values())
        apart = not held or sum(g.nbytes for g in held) <= SMALL
        there: dict[nn.Parameter, Tensor] = {}
        if not apart:
            self._attach()

        def work() -> None:
            if first:
                self._loss.zero_()
                if not apart:
                    foreach_zero_(held)
            self._loss.add_(engine.part(batch, self._weight))
            there.update((p, p.grad) for p in engine.parameters() if p.grad is not None)
            if held and apart and there.keys() == self._gradients.keys():
                (foreach_copy_ if first else foreach_add_)(held, [there[p] for p in self._gradients])

        replay = self._device.record(work)
        if not held:
            self._gradients = there
        elif there.keys() != self._gradients.keys() or not (
            apart or all(self._gradients[p] is gradient for p, gradient in there.items())
        ):
            raise Refused("which parameters get a gradient, or where, depends on the batch")
        engine.model.zero_grad(set_to_none=True)
        return replay

    def _record_update(self) -> None:
        """Record the update, and compare it with an eager one bit by bit: nothing in an update takes another order."""
        engine = self._engine
        optimizer = engine.optimizer
        if why := _no_update(optimizer):
            raise Refused(why)
        if len(optimizer.param_groups) > len(engine.rates):
            raise Refused("parameter groups were added, whose learning rates are the host's")
        state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        changing = [*(p.detach() for group in optimizer.param_groups for p in group["params"]), *state]
        changing += self._gradients.values()  # torch's fused AdamW leaves them clipped
        size = sum(t.nbytes for t in changing)
        if 3 * size > self._device.free_bytes():
            raise Refused(
                f"there is no room to check it, {3 * size / 2**30:.1f} GiB; it takes few launches of a long step"
            )
        changing += amaxes_of(engine.model)
        before = [t.clone() for t in changing]

        def put_back() -> None:
            for t, old in zip(changing, before):
                t.copy_(old)

        self._attach()
        try:
            try:
                with self._device.rehearsal():
                    norm, bad = engine.change(self._loss)
            except Exception as error:
                raise Refused(reason_of(error)) from error
            expected = [norm.clone(), bad.clone(), *(t.clone() for t in changing)]
            put_back()
            results: list[Tensor] = []
            change = self._device.record(lambda: results.extend(engine.change(self._loss)))
            change()
            if not all(_same_bits(a, b) for a, b in zip([*results, *changing], expected, strict=True)):
                raise Refused("a replayed update differs from the eager one")
        finally:
            put_back()
            engine.model.zero_grad(set_to_none=True)
        self._change, self._changed = change, (results[0], results[1])

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Undo what forward and backward leave behind: buffers, delayed scales, random states, gradients."""
        model = self._engine.model
        buffers = list(model.buffers())
        before = [t.clone() for t in buffers]
        model.zero_grad(set_to_none=True)
        with kept(self._engine.device), kept_amaxes(model):
            try:
                yield
            finally:
                with torch.no_grad():
                    for t, old in zip(buffers, before):
                        t.copy_(old)
                model.zero_grad(set_to_none=True)


def _shape(part: Mapping[str, Any]) -> Hashable:
    """Return the parts of a batch that a graph fixes: shapes, dtypes, and entries that are no tensors."""
    entries: list[Hashable] = []
    for name, value in part.items():
        if isinstance(value, Tensor):
            entries.append((name, tuple(value.shape), value.dtype))
        else:
            entries.append((name, value if isinstance(value, Hashable) else id(value)))
    return tuple(entries)


def _in_force(device: torch.device) -> str:
    """Return why a mode that the caller has switched on rules out graphs; "" where none does."""
    if torch.is_autocast_enabled(device.type):
        return "autocast is on, whose copies of weights a graph would keep"
    if torch.is_anomaly_enabled():
        return "detect_anomaly is on, which a graph would not ask"
    if count_dispatch_modes():
        return "a mode that sees every operation is on, which a graph would not ask"
    return ""


def _no_update(optimizer: torch.optim.Optimizer) -> str:
    """Return why an optimizer's step is not recorded; "" where it can be."""
    name = type(optimizer).__name__
    if has_step_hooks(optimizer):
        return f"{name} has step hooks, which a graph would not call"
    if not handles_amp_scaling(optimizer):
        return f"{name} cannot be masked on the device, so the host reads it every step"
    if not takes_rates(optimizer):
        return f"{name} is recorded with capturable=True only"
    return ""


def takes_rates(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's step reads learning rates from the device: ours, and torch's that are made for graphs."""
    return isinstance(optimizer, AdamW) or all(group.get("capturable") for group in optimizer.param_groups)


def _host_random(device: torch.device) -> list[Any]:
    """Return the host's random states. Where the device is the host, torch's generator is the device's, which a graph follows."""
    numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    torch_cpu = torch.get_rng_state().numpy().tobytes() if device.type != "cpu" else b""
    return [random.getstate(), numpy["state"]["key"].tobytes(), numpy["state"]["pos"], torch_cpu]


def _gaps(
    found: tuple[Tensor, Mapping[nn.Parameter, Tensor]], expected: tuple[Tensor, Mapping[nn.Parameter, Tensor]]
) -> tuple[float, float]:
    """Return how far a loss is from the one expected, and how far the worst gradient is; 0 where every bit is the same.

    Gaps are shares of the expected norm; for a gradient far below the others, of a thousandth of the norm of all. Expected values
    may be on the host.
    """
    if expected[1].keys() != found[1].keys():
        return torch.inf, torch.inf
    rows, same = [], []
    for t, there in [(found[0], expected[0]), *((found[1][p], there) for p, there in expected[1].items())]:
        there = there.to(t.device)  # one after the other, as there may be no room for all
        same.append(_same_bits(t, there))
        rows.append(torch.stack([(t - there).float().norm(), there.float().norm()]))
    gaps, norms = torch.stack(rows).unbind(1)
    shares = gaps[1:] / norms[1:].clamp_min(1e-3 * norms[1:].norm())
    return (
        0.0 if same[0] else float(gaps[0] / norms[0]),
        0.0 if all(same[1:]) else float(shares.max()),
    )


def _beyond(gaps: tuple[float, float], noise: tuple[float, float]) -> str:
    """Return a clause that names the gap of a replay (loss or gradient) that is more than noise; "" where none is."""
    for what, gap, between in zip(("loss", "gradient"), gaps, noise):
        if not gap <= max(TOLERANCE, NOISE * between):  # a NaN is too
            return f"the {what} of a replay is off by {gap:.1g} of its norm, where eager steps differ by {between:.1g}"
    return ""


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(t.detach().contiguous().view(-1).view(torch.uint8) for t in (a, b)))
