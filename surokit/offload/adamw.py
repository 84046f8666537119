"""Keep all AdamW states on the host and wait for it in each step: OffloadAdamW, the control for ZenFlow, and exactly AdamW.

Gradients go down in transfers; while one travels, the host updates the weights of the one before it, and the new weights of
the one before that go up. All of it happens between one backward pass and the next forward pass, so that no update is ever
late: the step takes as long as the slowest of the three, not as their sum, but nothing of it is hidden behind the device's
computation (that is plain ZeRO-Offload, arXiv 2101.06840, without its one-step delay).

The host holds a float32 master of every weight and both moments in float32, in ordinary memory: only the transfer buffers
are pinned.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from surokit.errors import OffloadError
from surokit.offload.columns import TRANSFER_BYTES, check_dense, several_devices
from surokit.offload.counters import Accounts
from surokit.offload.link import Arrival, Link, PendingCopy
from surokit.offload.options import check_offloading, link_of
from surokit.offload.pipeline import Slot, whole
from surokit.offload.rows import block, fused_adamw_, widened
from surokit.offload.workers import Job, Worker, beat, split_cores
from surokit.offload.written import Written, sync_master_
from surokit.optim.parts import Held, Rows
from surokit.optim.spec import Parameters, SpecMeta
from surokit.optim.states import adamw_states, decay_groups, given_order, in_groups_of
from surokit.optim.tensors import flat, gradients_of, local, memory_order, scale_and_mask
from surokit.torch_private import declare_amp_scaling, foreach_copy_

if TYPE_CHECKING:
    from surokit.offload.report import OffloadReport

_RING = 3  # transfers each way with memory of their own: one on its way, one being worked on, one to come
TRANSFERS = 16  # of a step, where the model is large enough: the first and the last one are waited for in full
LEAST_BYTES = 1 << 20  # of a transfer, below which its latency counts
_ALIGNED = 64  # elements at whose multiples parameters are cut, so that torch's kernel rounds as for a whole one
_MOMENTS = ("exp_avg", "exp_avg_sq")
STATES = ("master", *_MOMENTS)


class Piece(NamedTuple):
    """A Piece is a range of a parameter's elements, in its memory's order: [start, stop)."""

    p: Tensor
    start: int
    stop: int


@dataclass(eq=False)
class Transfer:
    """A Transfer is a set of pieces that travel together: of one parameter group, of one dtype each way."""

    group: dict[str, Any]
    dtype: torch.dtype  # of the weights
    grad_dtype: torch.dtype
    pieces: list[Piece]

    @property
    def lengths(self) -> list[int]:
        return [piece.stop - piece.start for piece in self.pieces]

    @property
    def numel(self) -> int:
        return sum(self.lengths)


class OffloadAdamW(torch.optim.Optimizer, metaclass=SpecMeta):
    """OffloadAdamW is AdamW with float32 states on the host; every step waits for the host.

    params: tensors or torch's parameter groups, as for surokit.AdamW; absent: a `Spec`. lr: a float or a 0-d tensor on the
    host, read every step. pt_reserved_cores_perc: share of the cores that the host's update leaves to others, such as data
    loading. By default none: the
        training thread waits meanwhile.
    link: between host and device; None is that of the parameters' device.

    The numbers are those of float32 AdamW: each step updates a float32 master of the weight, whatever dtype the weight has
    on the device (float64 too), by torch's fused kernel, and the weight is the master rounded to nearest. As surokit.AdamW
    it divides gradients by `grad_scale` and masks the step where `found_inf` is not 0. Of a sharded parameter (FSDP2) each
    process updates its shard.

    Bytes of an element: 12 on the host. On the device none but those of three transfers each way, of 64 MiB at most; on the
    host the same, pinned.

    A Ctrl-C during `step` is raised when the step is complete, a second one at once. After a second one, and after any
    other error in the middle of a step, the state is partly of the next step, and a state has to be loaded.
    """

    grad_scale: Tensor | None
    found_inf: Tensor | None
    not_recorded = "the optimizer's state is on the host, and its update is not the device's"

    def __init__(
        self,
        params: Parameters | None = None,
        lr: float | Tensor = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
        eps: float = 1e-8,
        *,
        pt_reserved_cores_perc: float = 0.0,
        link: Link | None = None,
    ) -> None:
        assert params is not None, "SpecMeta gives a Spec then"
        self._reserved = pt_reserved_cores_perc
        self._start(link)
        defaults = {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay, "eps": eps}
        super().__init__(decay_groups(self, params, weight_decay), defaults)

    if TYPE_CHECKING:  # a type checker does not see that OffloadAdamW(lr=...) is a Spec

        def build(self, params: nn.Module | Parameters) -> OffloadAdamW: ...

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        """Check the options; raises ValueError that names the option which is out of range."""
        check_offloading(cls.__name__, options)

    def _start(self, link: Link | None) -> None:
        """Set up the state before the first step."""
        declare_amp_scaling(self)
        self.accounts = Accounts(link_ms=0.0 if link is None else link.device_stall_ms())
        self.stall_ms = 0.0  # that the host waited in the last step
        self.device_stall_ms = 0.0  # that the device was without work for it, as far as the last step knows
        self._given_link = link
        self._down: list[Tensor] = []  # bytes, pinned
        self._up: list[Tensor] = []
        self._orders: dict[Tensor, list[int]] = {}  # in which the states of parameters lie: that of their memory
        self._planned_for: Any = None
        self._transfers: list[Transfer] = []
        self._written = Written(type(self).__name__, "give such parameters to surokit.AdamW, or write less often.")
        self._broken: BaseException | None = None

    @functools.cached_property
    def link(self) -> Link:
        """Return the link between host and device."""
        return link_of(self, self._given_link)

    @functools.cached_property
    def _amp(self) -> Slot:
        return Slot(self.link)

    @functools.cached_property
    def _worker(self) -> Worker:
        training, *others = split_cores(self._reserved)
        cores = sorted({core for some in others for core in some} | (set() if self._reserved else set(training)))
        worker = Worker("adam", cores, len(cores))
        weakref.finalize(self, worker.close)
        return worker

    def report(self) -> OffloadReport:
        """Report waits, traffic and memory so far."""
        from surokit.offload.report import report_of

        return report_of(self, (*self._down, *self._up), (self._worker,), self._transfers)

    # -- a step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient once. When it returns the host is done; a CUDA device takes the last
        weights before whatever it is given next."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check()
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        with whole():
            before = self.accounts.stall_ms
            self._adopt(stacklevel=7)  # found, _adopt, step, and torch's wrappers around both
            self._plan(params)
            try:
                self._step(params, self._transfers)
            except BaseException as error:
                self._broken = error
                raise
            self._written.note(p for p, state in self.state.items() if "master" in state)
            self.accounts.steps += 1
            self.stall_ms = self.accounts.stall_ms - before
            self.device_stall_ms = self.accounts.device_waited(self.link)
        return loss

    def _check(self) -> None:
        if self._broken is not None:
            raise OffloadError(
                f"A step of this {type(self).__name__} was cut short by an error, and its state is partly of the next step: "
                "load a state, or make the optimizer anew."
            ) from self._broken

    def _step(self, params: Sequence[Tensor], transfers: Sequence[Transfer]) -> None:
        device = self.link.device
        self._amp.tag(*scale_and_mask(self, device))
        coming = [self._send(i, transfer) for i, transfer in enumerate(transfers[: _RING - 1])]
        with self.accounts.stalled("slot", self.link):
            scale, finite = self._amp.read()
        if not finite:
            with self.accounts.stalled("slot", self.link):
                for ticket in coming:
                    ticket.wait()
            return
        for p in params:
            self.state[p]["step"] += 1
        jobs: list[Job] = []
        going: list[Arrival] = []
        for i, transfer in enumerate(transfers):
            with self.accounts.stalled("slot", self.link):
                coming[i].wait()
            if i >= _RING:
                self._land(transfers[i - _RING], going[i - _RING])
            jobs.append(self._worker.submit(self._update(i, transfer, scale)))
            if i:
                going.append(self._fetch(i - 1, transfers[i - 1], jobs[i - 1]))
            if i + _RING - 1 < len(transfers):  # into the memory of the job that is now done
                coming.append(self._send(i + _RING - 1, transfers[i + _RING - 1]))
        if transfers:
            going.append(self._fetch(len(transfers) - 1, transfers[-1], jobs[-1]))
        for transfer, arrival in list(zip(transfers, going))[-_RING:]:
            self._land(transfer, arrival)
        self.accounts.windows += 1
        self.accounts.intervals[1] += 1
        self.accounts.staleness[0] += sum(transfer.numel for transfer in transfers)

    def _send(self, i: int, transfer: Transfer) -> PendingCopy:
        """Send the gradients of a transfer down."""
        grads = [_gradient(piece.p) for piece in transfer.pieces]
        parts = [g[piece.start : piece.stop] for g, piece in zip(grads, transfer.pieces)]
        to = self._memory(self._down, i, transfer.numel, transfer.grad_dtype)
        self.accounts.moved("gradients", to.nbytes, 0)
        return self.link.down(functools.partial(_fill, parts), to, grads)

    def _update(self, i: int, transfer: Transfer, scale: float | None) -> Callable[[], None]:
        """Return the worker's job: AdamW on the gradients that a transfer brought, and the weights for the way up."""
        grads = self._memory(self._down, i, transfer.numel, transfer.grad_dtype).split(transfer.lengths)
        weights = self._memory(self._up, i, transfer.numel, transfer.dtype).split(transfer.lengths)
        states = [self.state[piece.p] for piece in transfer.pieces]
        options = {name: transfer.group[name] for name in ("betas", "weight_decay", "eps")}
        options |= {"lr": float(transfer.group["lr"]), "divide_by": scale}

        def work() -> None:
            size = block()
            for piece, state, grad, weight in zip(transfer.pieces, states, grads, weights):
                own = [state[name].view(-1)[piece.start : piece.stop].split(size) for name in STATES]
                for w, m, v, g, out in zip(*own, grad.split(size), weight.split(size)):
                    wide = g if g.dtype == torch.float32 else widened(g)
                    fused_adamw_([w], [wide], [m], [v], [state["step"]], **options)
                    out.copy_(w)
                    beat()

        return work

    def _fetch(self, i: int, transfer: Transfer, job: Job) -> Arrival:
        """Send the new weights of a transfer up."""
        with self.accounts.stalled("adam", self.link):
            job.wait()
        source = self._memory(self._up, i, transfer.numel, transfer.dtype)
        self.accounts.moved("weights", 0, source.nbytes)
        return self.link.fetch(source)

    def _land(self, transfer: Transfer, arrival: Arrival) -> None:
        """Copy the arrived weights into the parameters; the memory that they came from is free then."""
        with self.accounts.stalled("landing"):
            staging = arrival.land()
            parts = [flat(piece.p)[piece.start : piece.stop] for piece in transfer.pieces]
            foreach_copy_(parts, list(staging.split(transfer.lengths)))
            arrival.wait()

    def _memory(self, ring: list[Tensor], i: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return [numel] of the ring's memory, for transfer i."""
        return ring[i % _RING][: numel * dtype.itemsize].view(dtype)

    # -- parameters

    def _plan(self, params: Sequence[Tensor]) -> None:
        """Plan the transfers of these parameters' gradients, unless they are as in the step before; new parameters get
        their state."""
        for p in params:
            check_dense(p)
        groups = {p: group for group in self.param_groups for p in group["params"]}
        kinds = [(id(p), id(groups[p]), p.grad.dtype) for p in params if p.grad is not None]
        if kinds == self._planned_for:
            return
        for p in params:
            if "master" not in self.state[p]:
                self._begin(p)
        self._transfers = list(_planned([(p, groups[p]) for p in params]))
        for ring, largest in (
            (self._down, max((t.numel * t.grad_dtype.itemsize for t in self._transfers), default=0)),
            (self._up, max((t.numel * t.dtype.itemsize for t in self._transfers), default=0)),
        ):
            if not ring or ring[0].nbytes < largest or len(ring) < min(_RING, len(self._transfers)):
                ring[:] = [self.link.buffer([largest], torch.uint8) for _ in self._transfers[:_RING]]
        size = sum(t.numel * t.grad_dtype.itemsize for t in self._transfers)
        self.accounts.model_bytes = max(self.accounts.model_bytes, size)
        self._planned_for = kinds  # last: memory may have run out

    def _begin(self, p: Tensor) -> None:
        """Make a parameter's state: its master comes down, in pieces."""
        if p.device != self.link.device:
            raise several_devices(p.device, self.link.device)
        W, state = local([p])[0], self.state[p]
        order = self._orders[p] = memory_order(W)
        master = torch.empty(W.permute(order).shape, device="cpu")
        for wide, shown, ticket in self._read(p, master):
            ticket.wait()
            wide.copy_(shown)
        self.accounts.moved("setup", W.nbytes, 0)
        if not state:
            self.state[p] = {
                "step": torch.zeros((), device="cpu"),
                "master": master,
                **{n: torch.zeros_like(master) for n in _MOMENTS},
            }
        else:  # loaded, of another AdamW
            state |= {"master": master, **{name: state[name].permute(order).contiguous() for name in _MOMENTS}}
        self._written.note([p])  # whether or not there is a step

    @torch.no_grad()
    def _adopt(self, stacklevel: int) -> None:
        """Let masters take over values that were written into weights by hand."""
        self._follow_orders()
        written = self._written.found(stacklevel)
        for p in written:
            for wide, shown, ticket in self._read(p, self.state[p]["master"]):
                with self.accounts.stalled("landing", self.link):
                    ticket.wait()
                    sync_master_(wide, shown)
            self.accounts.moved("adopted", local([p])[0].nbytes, 0)
        self._written.note(written)

    def _follow_orders(self) -> None:
        """Bring states into the order of their weights' memory, where a model has taken another memory format."""
        for p, state in self.state.items():
            if "master" not in state:
                continue
            now = memory_order(local([p])[0])
            before = self._orders.get(p, now)
            self._orders[p] = now
            if before != now:
                state |= {name: state[name].permute([before.index(d) for d in now]).contiguous() for name in STATES}

    def _read(self, p: Tensor, master: Tensor) -> Iterator[tuple[Tensor, Tensor, PendingCopy]]:
        """Yield pieces of the master with those of the weight, which has arrived when its ticket is done; one after the other."""
        weight = flat(p)
        size = max(min(len(weight), TRANSFER_BYTES // weight.element_size()), 1)
        buffer = self.link.buffer([size], weight.dtype)
        for part, wide in zip(weight.split(size), master.view(-1).split(size)):
            shown = buffer[: len(part)]
            yield wide, shown, self.link.down(functools.partial(_fill, [part]), shown, [weight])

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict with float32 states. Each parameter has "step", "master", "exp_avg" and "exp_avg_sq",
        of the shape that this process holds, with dimensions in the order of the parameter's memory. Weights that were
        written by hand are taken over, as by the next step."""
        self._check()
        self._adopt(stacklevel=5)  # found, _adopt with torch's wrapper, and state_dict
        return super().state_dict()

    def held(self, p: Tensor, name: str) -> Held:
        """Return what an entry of a parameter's state is to its shard: see surokit/optim/parts.py."""
        return Rows(0, p.ndim) if name in STATES else "same"

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state and go on bit for bit from where `state_dict` was made. AdamW's state, surokit's or torch's, is
        accepted too, with the weights as they are at the next step. Where torch's and this one were given one iterable of
        the same parameters, all options but the weight decay are that state's. Raises ValueError where the state does not
        fit."""
        state_dict = in_groups_of(self, state_dict)
        saved = {p: state for p, state in adamw_states(self, state_dict).items() if state}
        for state in saved.values():
            if "absmax" in state:
                raise ValueError(f"This state has moments of 8 bits, and those of {type(self).__name__} are float32.")
        # without states, which torch would move to the parameters' device and dtype
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        names = self.accounts.names
        self.close()
        self._start(self._given_link)
        self.accounts.names = names
        for p, state in saved.items():
            self.state[p] = {
                name: local([torch.as_tensor(state[name])])[0].detach().to("cpu", torch.float32, copy=True).contiguous()
                for name in ("step", *STATES)
                if name in state
            }
        self._follow_orders()

    @property
    def workers(self) -> dict[str, Worker]:
        """Return the thread beside the training thread, by name."""
        return {"adam": self._worker}

    def close(self) -> None:
        """End the thread and leave the link; for an optimizer that takes no more steps."""
        if (worker := self.__dict__.pop("_worker", None)) is not None:
            with contextlib.suppress(OffloadError):
                worker.close(at_once=True)
        self.__dict__.pop("_amp", None)
        if (link := self.__dict__.pop("link", None)) is not None:
            self.accounts.left(link, self._given_link)

    def __getstate__(self) -> dict[str, Any]:
        self._check()
        self._adopt(stacklevel=5)
        own = {"_reserved": self._reserved, "_given_link": self._given_link}
        return {**super().__getstate__(), **own, **given_order(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_given_link" in state:  # a copy; load_state_dict comes here without
            self._start(self._given_link)
            self._follow_orders()


def _fill(parts: list[Tensor], staging: Tensor) -> None:
    foreach_copy_(list(staging.split([len(part) for part in parts])), parts)


def _planned(present: Sequence[tuple[Tensor, dict[str, Any]]]) -> Iterator[Transfer]:
    """Yield transfers of about equal size, in the order of the parameters."""
    every = [(p, group, local([p])[0]) for p, group in present]
    total = sum(W.numel() * p.grad.element_size() for p, _, W in every if p.grad is not None)
    limit = min(max(total // TRANSFERS, LEAST_BYTES), TRANSFER_BYTES)
    current: Transfer | None = None
    for p, group, W in every:
        assert p.grad is not None
        kind = W.dtype, p.grad.dtype
        room = limit // max(dtype.itemsize for dtype in kind) // _ALIGNED * _ALIGNED
        start = 0
        while start < W.numel():
            if current is None or (current.dtype, current.grad_dtype) != kind or current.group is not group:
                if current is not None:
                    yield current
                current = Transfer(group, *kind, [])
            stop = min(W.numel(), start + room - current.numel)
            if stop < W.numel():
                stop = start + (stop - start) // _ALIGNED * _ALIGNED
            if stop > start:
                current.pieces.append(Piece(p, start, stop))
                start = stop
            if start < W.numel():  # full
                yield current
                current = None
    if current is not None:
        yield current


def _gradient(p: Tensor) -> Tensor:
    """Return a parameter's gradient, in the order of the parameter's memory."""
    (W,), (g,) = local([p]), gradients_of([p])
    return g.detach().permute(memory_order(W)).reshape(-1)
