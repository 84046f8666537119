"""Keep weights on the host: those of each block come to the device for its turn, while the block before computes.

    forward    block 0   block 1   ...   block L-1        fetched in this order, `prefetch` ahead
    backward   block L-1  ...            block 0          fetched again, computed again, their gradients sent down

The weights of a block are one piece of pinned host memory and one copy. A block is a checkpoint (torch.utils.checkpoint): of
its forward only the inputs are kept. So the device has the weights of at most prefetch + 1 blocks, and the activations of one.
Parameters stay the objects they are, with host memory and, after backward, host gradients: an optimizer updates them there.
The blocks that forward ends with are those that backward begins with, and are not fetched twice.

    L blocks; p `prefetch`; bytes(b) of a block: those of its tensors, each rounded up to 16
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from surokit.applied import HostStream
from surokit.blocks import blocks_of, is_block
from surokit.offload.forwards import Forward, forwards_of, link_to
from surokit.offload.link import Arrival, Link, PendingCopy
from surokit.places import check_module
from surokit.torch_private import (
    accumulated_hooks,
    backward_number,
    call_after_backward,
    gradient_hooks,
    in_backward,
    parameters_of,
    version_of,
)

ALIGNMENT = 16  # bytes: products on tensor cores want their operands to begin at a multiple, and joint ones touch
_SPARES = 2  # host buffers for gradients that are added to others


def offload_weights(
    model: nn.Module,
    device: torch.device | str | None = None,
    *,
    blocks: Iterable[nn.Module] | None = None,
    prefetch: int = 1,
    link: Link | None = None,
) -> WeightStream:
    """Keep the weights of the model's blocks on the host and stream them through `device`; everything else moves there.

    model: any torch module whose blocks are called one after the other. Recipes, fusion and adapters may come before or
    after, and
        so may an optimizer that has made no step; a Session comes after. A second call replaces the first. Weights that a call of
        model.to(...) moves come back to the host in the next forward.
    device: where the model computes; None takes CUDA if there is one, else the CPU, where this only simulates. blocks: in
    the order in which they are called; None takes the items of the model's lists of like modules (torch.nn.ModuleList).
    prefetch: blocks that are fetched ahead; the device holds the weights of at most prefetch + 1. link: makes the copies;
    None takes a lean CudaLink or, on a CPU, a HostLink.

    The blocks' parameters are streamed, codes and scales of quantized storage among them. These stay on the device:
    buffers; parameters that other modules share; and in a block with frozen matrices all trained parameters, such as
    adapters. In training a block is computed again in backward, once, also where `recompute="full"` or transformers'
    gradient checkpointing ask for the same.

    Gradients arrive in `.grad` by the end of backward(), where hooks run that were registered for after that
    (register_post_accumulate_grad_hook). Hooks of a parameter (register_hook) are given the gradient of one call of its
    block, on the host. torch.autograd.grad and backward(inputs=...) see nothing of streamed parameters. The memory of a
    gradient is written again by the next backward after `.grad = None`.

    Raises ValueError for a model without such blocks, blocks that are not the model's or lie in one another, parameters
    that are no plain memory (shards, tensor subclasses, the meta device), prefetch < 1, and a link of another device;
    TypeError for an object that is no module. In backward, RuntimeError where weights were changed in place since their
    forward.
    """
    check_module(model, "offload_weights")
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 1:
        raise ValueError(f"offload_weights(prefetch={prefetch!r}): a whole number of blocks, at least 1.")
    link = link_to("offload_weights", device, link)
    streamed = blocks_of(model) if blocks is None else _checked(model, blocks)
    if not streamed:
        raise ValueError(
            f"{type(model).__name__} has no list of like blocks (a torch.nn.ModuleList whose items are called): say which modules "
            "are streamed, blocks=[...], in the order in which they are called."
        )
    for module in model.modules():
        for forward in forwards_of(module, Streamed):
            forward.stream.close()
    stream = WeightStream(streamed, link, prefetch)
    stream.settle_in(model)
    return stream


@dataclass(eq=False)
class _Pending:
    """A _Pending holds gradients of a block on their way to the host."""

    block: Streamed
    where: list[tuple[Tensor, Tensor]]  # parameter, and where its gradient arrives
    ticket: PendingCopy
    spare: Tensor | None  # it arrives here, to be added
    end: weakref.ref[_End]  # of the backward pass that it is of


class _End:
    """An _End is the callback of autograd at the end of a backward pass. Autograd holds it as long as the pass goes on, and
    drops it if that fails."""

    def __init__(self, stream: WeightStream) -> None:
        self._stream = stream

    def __call__(self) -> None:
        self._stream.finish()


class WeightStream(HostStream):
    """A WeightStream is the result of `offload_weights`; the model keeps it. It prints what it does.

    device, prefetch, link: as given. blocks: how many. host_bytes, block_bytes: of streamed weights, all and the largest
    block's. resident_blocks, peak_blocks, peak_bytes: whose weights the device has now, and at most had at a time.
    bytes_up, bytes_down: so far. A training step moves up (2 L - min(L, p + 1)) bytes(b), and once the trained bytes down.
    """

    keeps = "weights"

    def __init__(self, blocks: Sequence[nn.Module], link: Link, prefetch: int) -> None:
        self.link, self.prefetch = link, prefetch
        self._blocks = [Streamed(module, number, self) for number, module in enumerate(blocks)]
        self._forget()

    def _forget(self) -> None:
        """Reset to the state before the first pass."""
        self.bytes_up = self.bytes_down = self.peak_blocks = self.peak_bytes = 0
        self._there: dict[int, Arrival | Tensor] = {}  # by block: on its way, or landed and kept
        self._alive: list[tuple[StorageWeakRef, int]] = []  # device memory that was given out, and its bytes
        self._arrival: Arrival | None = None  # the latest of a forward
        self._latest = -1  # block that forward came to; -1: a pass begins
        self._pending: deque[_Pending] = deque()
        self._spares: list[Tensor] = []
        self._reading: object = None  # gradients that the link reads
        self._ends: dict[int, weakref.ref[_End]] = {}  # by backward pass

    @property
    def device(self) -> torch.device:
        return self.link.device

    # -- what there is

    @property
    def blocks(self) -> int:
        return len(self._blocks)

    @property
    def block_bytes(self) -> int:
        return max(block.pack.nbytes for block in self._blocks)

    @property
    def host_bytes(self) -> int:
        return sum(block.pack.nbytes for block in self._blocks)

    @property
    def resident_blocks(self) -> int:
        self._alive = [(storage, nbytes) for storage, nbytes in self._alive if not storage.expired()]
        return len(self._alive)

    def __repr__(self) -> str:
        return (
            f"weights of {self.blocks} blocks on the host ({_mib(self.host_bytes)}, at most {_mib(self.block_bytes)} a block), "
            f"streamed through {self.device}, {self.prefetch} ahead\n"
            f"so far {_mib(self.bytes_up)} up, {_mib(self.bytes_down)} down; at most {self.peak_blocks} blocks "
            f"({_mib(self.peak_bytes)}) on the device at a time"
        )

    # -- beginning and end

    def settle_in(self, model: nn.Module) -> None:
        """Move the weights of blocks into host memory, and all else to the device."""
        users: dict[Tensor, set[int]] = {}
        number_of = {module: block.number for block in self._blocks for module in block.module.modules()}
        for module in model.modules():
            for p in _plain(module):
                users.setdefault(p, set()).add(number_of.get(module, -1))
        for block in self._blocks:
            block.shared = {p for p, numbers in users.items() if len(numbers) > 1}
            block.lay()
        streamed = {p for block in self._blocks for p in block.pack.params}
        _move(model, self.device, streamed)
        for block in self._blocks:
            block.module.computes_on = self.device  # type: ignore[assignment]

    def remove(self) -> None:
        """End streaming: all weights move to the device, and gradients with them. It does nothing where a later call
        replaced this."""
        if not self._closed:
            self.close()
            for block in self._blocks:
                _move(block.module, self.device, set())

    @property
    def _closed(self) -> bool:
        return self._blocks[0].removed

    def close(self) -> None:
        """End streaming, and leave the weights where they are."""
        if self._closed:
            return
        self._drop({})
        self._give_up_failed()
        self.link.close()
        for block in self._blocks:
            block.remove()
            vars(block.module).pop("computes_on", None)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies, without transfers on their way, addresses of memory and counters."""
        self._give_up_failed()
        return {name: vars(self)[name] for name in ("link", "prefetch", "_blocks")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    # -- weights up

    def take(self, block: Streamed) -> Tensor:
        """Return the block's weights on the device, uint8 [bytes]; those of the blocks to come are on their way then."""
        backward, number = in_backward(), block.number
        if self._latest < 0 or (not backward and number <= self._latest):
            self._begin_pass(backward)
        # a step follows backward, which makes all of this old (and torch's fused optimizers do not count it as a change)
        self._latest = -1 if backward and not self._before(number) else max(number, self._latest)
        wanted, again = self._coming(number, backward)
        self._drop(wanted)
        here = self._landed(number)
        for coming in wanted:
            if coming != number and coming not in self._there:
                self._there[coming] = self._fetch(coming)
        if again:
            self._there[number] = here
        return here

    def taken(self, block: Streamed) -> None:
        """Note that the device was given all of the block's forward. After the last block the host waits for the copies,
        which are all but done then: weights may be changed after it."""
        if block.number == len(self._blocks) - 1 and self._arrival is not None and not in_backward():
            self._arrival.wait()
            self._arrival = None

    def _coming(self, number: int, backward: bool) -> tuple[dict[int, None], bool]:
        """Return (this block and the next ones, prefetch + 1 in all; whether this one comes again before any other has to
        be fetched)."""
        order: Iterable[int] = self._before(number) if backward else range(number + 1, len(self._blocks))
        if not backward and torch.is_grad_enabled():
            order = [*order, *self._before(len(self._blocks))]
        wanted, again = {number: None}, False
        for coming in order:
            if coming not in wanted and len(wanted) > self.prefetch:
                break
            wanted[coming] = None
            again = again or coming == number
        return wanted, again

    def _before(self, number: int) -> list[int]:
        """Return the blocks that backward comes to after this one."""
        return [n for n in range(number - 1, -1, -1) if self._blocks[n].differentiated]

    def _begin_pass(self, backward: bool) -> None:
        self._drop({})
        if not backward:
            self._give_up_failed()

    def _drop(self, wanted: dict[int, None]) -> None:
        for number in [n for n in self._there if n not in wanted]:
            there = self._there.pop(number)
            if not isinstance(there, Tensor):
                there.land()  # memory goes back in the order of the main stream

    def _landed(self, number: int) -> Tensor:
        there = self._there.pop(number, None)
        if there is None:
            there = self._fetch(number)
        if isinstance(there, Tensor):
            return there
        here = there.land()
        self._alive.append((StorageWeakRef(here.untyped_storage()), here.nbytes))
        return here

    def _fetch(self, number: int) -> Arrival:
        block = self._blocks[number]
        block.lay()
        with _ordinary_tensors():
            arrival = self.link.fetch(block.pack.host)
        self._arrival = None if in_backward() else arrival
        self.bytes_up += block.pack.nbytes
        coming = [self._blocks[n].pack.nbytes for n, there in self._there.items() if not isinstance(there, Tensor)]
        blocks = self.resident_blocks + len(coming) + 1
        self.peak_blocks = max(self.peak_blocks, blocks)
        nbytes = sum(nbytes for _, nbytes in self._alive) + sum(coming) + block.pack.nbytes
        self.peak_bytes = max(self.peak_bytes, nbytes)
        return arrival

    # -- gradients down

    def send(
        self, block: Streamed, params: Sequence[Tensor], grads: Sequence[Tensor], together: Sequence[Tensor]
    ) -> None:
        """Send the gradients of some of the block's parameters into `.grad`. together: all whose gradients share its memory."""
        end = self._end()
        self._read()
        if any(pending.block is block for pending in self._pending):
            self.settle()
        offsets, nbytes = _offsets(grads)
        spare = self._spare(nbytes) if any(p.grad is not None for p in together) else None
        to = (block.gradients(nbytes) if spare is None else spare)[:nbytes]

        def fill(staging: Tensor) -> None:
            for grad, there in zip(grads, _pieces(staging, grads, offsets)):
                there.copy_(grad)

        where = list(zip(params, _pieces(to, params, offsets)))
        self._pending.append(_Pending(block, where, self.link.down(fill, to), spare, end))
        self._reading = grads
        self.bytes_down += nbytes

    def _end(self) -> weakref.ref[_End]:
        """Return the end of the backward pass that is going on."""
        number = backward_number()
        if number not in self._ends:
            self._give_up_failed()
            call_after_backward(end := _End(self))
            self._ends[number] = weakref.ref(end)
        return self._ends[number]

    def _give_up_failed(self) -> None:
        """Drop the gradients of backward passes that failed."""
        self._ends = {number: end for number, end in self._ends.items() if end() is not None}
        for pending in [pending for pending in self._pending if pending.end() is None]:
            pending.ticket.wait()
            self._pending.remove(pending)

    def settle(self) -> None:
        """Wait until all gradients that are on their way are in `.grad`."""
        while self._pending:
            self._settle_one()

    @torch.no_grad()
    def _settle_one(self) -> None:
        pending = self._pending.popleft()
        pending.ticket.wait()
        for p, grad in pending.where:
            for changed in gradient_hooks(p):
                grad = grad if (new := changed(grad)) is None else new
            grad = grad.to(p.device)  # streaming may have ended between forward and backward
            if p.grad is not None:
                p.grad.add_(grad)
            else:
                p.grad = grad if pending.spare is None else grad.clone()
            for hook in accumulated_hooks(p):
                hook(p)
        if pending.spare is not None:
            self._spares.append(pending.spare)

    def _spare(self, nbytes: int) -> Tensor:
        while sum(pending.spare is not None for pending in self._pending) >= _SPARES:
            self._settle_one()
        spare = self._spares.pop() if self._spares else None
        return spare if spare is not None and spare.nbytes >= nbytes else self.link.buffer((nbytes,), torch.uint8)

    def _read(self) -> None:
        """Let the device go on when the link has read the gradients that it was given last; their memory is free then."""
        if self._reading is not None:
            self.link.fence()
            self._reading = None

    def finish(self) -> None:
        """Complete the gradients at the end of backward."""
        self._read()
        self.settle()


@dataclass(eq=False)
class _Pack:
    """A _Pack holds the streamed parameters of a block, in one piece of host memory, and where modules hold them."""

    params: list[Tensor]
    offsets: list[int]
    host: Tensor  # uint8 [bytes]
    # a module's parameters, and which of these is there by which name
    holders: list[tuple[dict[str, Any], dict[str, int]]]

    @property
    def nbytes(self) -> int:
        return self.host.nbytes

    def putting(self, tensors: Sequence[Tensor]) -> Callable[[], object]:
        """Return a call that puts tensors in the parameters' places: one call without Python in it, so that no Ctrl-C comes
        between."""
        each = [{name: tensors[k] for name, k in names.items()} for _, names in self.holders]
        return partial(deque, map(dict.update, [held for held, _ in self.holders], each), 0)


class Streamed(Forward):
    """A Streamed is a block whose weights are on the device for its turn only. differentiated: whether backward needs its
    latest forward."""

    stream: WeightStream

    def __init__(self, module: nn.Module, number: int, stream: WeightStream) -> None:
        super().__init__(module)
        self.number, self.stream = number, stream
        self.shared: set[Tensor] = set()  # with modules elsewhere: not streamed
        self.differentiated = True
        self._pack: _Pack | None = None
        self._laid: list[tuple[int, int, bool]] = []
        self._gradients: Tensor | None = None

    def around(self, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        self._check_device(given)
        if not torch.is_grad_enabled():
            return self._turn([], *args, **kwargs)
        self.differentiated = any(p.requires_grad for p in self.module.parameters()) or any(
            isinstance(t, Tensor) and t.requires_grad for t in given
        )
        if not self.differentiated:
            return self._turn([], *args, **kwargs)
        args, kwargs = _without_caches(args, kwargs)
        return checkpoint(self._turn, [], *args, use_reentrant=False, **kwargs)

    def _turn(self, seen: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        """Compute the block. seen: empty in a forward, which leaves its parameters' versions there for backward."""
        if self.removed:  # since that first turn; the weights may be another stream's now
            other = next(forwards_of(self.module, Streamed), None)
            return other._turn(seen, *args, **kwargs) if other is not None else self.__wrapped__(*args, **kwargs)
        flat = self.stream.take(self)
        pack = self.pack
        self._check_versions(seen)
        borrow, give_back = pack.putting(self._on_device(flat)), pack.putting(pack.params)
        del flat
        try:
            borrow()
            del borrow  # what autograd does not keep is gone with the forward
            return self.__wrapped__(*args, **kwargs)
        finally:
            give_back()
            self.stream.taken(self)

    def _check_device(self, given: Sequence[Any]) -> None:
        tensors = [t for t in given if isinstance(t, Tensor) and t.ndim]
        if tensors and all(t.device != self.stream.device for t in tensors):
            raise RuntimeError(
                f"A block whose weights are streamed to {self.stream.device} was given a tensor on {tensors[0].device}: move the "
                f"model back with model.to({str(self.stream.device)!r}), or call offload_weights anew for where it is now."
            )

    def _check_versions(self, seen: list[list[int]]) -> None:
        versions = [version_of(p) for p in self.pack.params]
        if seen and seen != [versions]:
            raise RuntimeError(
                f"Weights of block {self.number} were changed after its forward, and backward would compute it again from others: "
                "call backward() before whatever changes weights."
            )
        seen[:] = [versions]

    def _on_device(self, flat: Tensor) -> list[Tensor]:
        """Return the parameters, in memory of the device."""
        pack = self.pack
        trained = [k for k, p in enumerate(pack.params) if p.requires_grad and torch.is_grad_enabled()]
        here = list(_pieces(flat, pack.params, pack.offsets))
        params = [pack.params[k] for k in trained]
        if trained:
            grows = torch.empty(0, device=flat.device, requires_grad=True)
            fetched = _Fetched.apply(grows, self, params, [here[k] for k in trained])
            for k, t in zip(trained, fetched):
                here[k] = t
        for t in here:
            t.__class__ = nn.Parameter  # for who asks whether a weight is an ordinary one
            t.borrowed = True  # type: ignore[attr-defined]  # nothing made of it is to be kept (nn/grouping.py)
        return here

    # -- host memory

    @property
    def pack(self) -> _Pack:
        if self._pack is None:
            self.lay()
        assert self._pack is not None
        return self._pack

    def lay(self) -> None:
        """Put the streamed parameters into one piece of host memory, unless they lie there, and the others on the device:
        at first, and after a call that moved or replaced one."""
        if self._laid and self._laid == self._places():
            return
        params, holders = self._choose()
        offsets, nbytes = _offsets(params)
        with _ordinary_tensors():
            host = self.stream.link.buffer((nbytes,), torch.uint8)
            for p, there in zip(params, _pieces(host, params, offsets)):
                there.copy_(p.detach())
                p.data = there
                if p.grad is not None:
                    p.grad = p.grad.to(there.device)
            self._pack = _Pack(params, offsets, host, holders)
            _move(self.module, self.stream.device, {*params})
        self._laid = self._places()

    def remove(self) -> None:
        super().remove()
        self._pack, self._laid, self._gradients = None, [], None

    def gradients(self, nbytes: int) -> Tensor:
        """Return host memory for the gradients, the same each time."""
        if self._gradients is None or self._gradients.nbytes < nbytes:
            self._gradients = self.stream.link.buffer((nbytes,), torch.uint8)
        return self._gradients

    def _places(self) -> list[tuple[int, int, bool]]:
        return [
            (id(p), p.data_ptr(), p.requires_grad)
            for module in self.module.modules()
            for p in parameters_of(module).values()
            if p is not None
        ]

    def _choose(self) -> tuple[list[Tensor], list[tuple[dict[str, Any], dict[str, int]]]]:
        """Return the parameters to stream, and the modules that hold them; by names, so that the weights of layers that lie
        side by side still do."""
        held = [
            (parameters_of(m), name, p)
            for m in self.module.modules()
            for name, p in parameters_of(m).items()
            if p is not None
        ]
        beside = any(p.ndim > 1 and not p.requires_grad for _, _, p in held)  # adapters and the like stay on the device
        held = [entry for entry in held if entry[2] not in self.shared and not (beside and entry[2].requires_grad)]
        kinds = list(dict.fromkeys(name for _, name, _ in held))
        held.sort(key=lambda entry: kinds.index(entry[1]))
        for _, name, p in held:
            _check_plain(name, p)
        number = {p: k for k, p in enumerate(dict.fromkeys(p for _, _, p in held))}
        holders: dict[int, tuple[dict[str, Any], dict[str, int]]] = {}
        for where, name, p in held:
            holders.setdefault(id(where), (where, {}))[1][name] = number[p]
        return list(number), list(holders.values())

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies: their parameters lie elsewhere, and are laid anew."""
        return vars(self) | {"_pack": None, "_laid": [], "_gradients": None}


class _Fetched(torch.autograd.Function):
    """A _Fetched gives autograd the tensors that were fetched for parameters on the host, and sends their gradients back to
    them.

    The parameters are no inputs: autograd would take them for reached, without a gradient, before theirs has arrived.
    """

    @staticmethod
    def forward(
        ctx: Any, grows: Tensor, block: Streamed, params: list[Tensor], here: list[Tensor]
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.block, ctx.params, ctx.together = block, params, block.pack.params
        return tuple(here)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        found = [(p, grad) for p, grad in zip(ctx.params, grads) if grad is not None]
        if found:
            ctx.block.stream.send(ctx.block, [p for p, _ in found], [grad for _, grad in found], ctx.together)
        return None, None, None, None


# -- small things


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


def _ordinary_tensors() -> AbstractContextManager[object]:
    """Leave torch.inference_mode(), for tensors that outlive it."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def _offsets(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return the offset of each tensor, one after the other and aligned, and the bytes of all."""
    offsets, end = [], 0
    for t in tensors:
        offsets.append(end)
        end += -(-t.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def _pieces(flat: Tensor, likes: Sequence[Tensor], offsets: Sequence[int]) -> Iterator[Tensor]:
    """Yield tensors of these shapes and dtypes in the memory of flat, uint8 [bytes]; none is a view to autograd."""
    storage, start = flat.untyped_storage(), flat.storage_offset()
    for like, offset in zip(likes, offsets):
        empty = torch.empty(0, dtype=like.dtype, device=flat.device)
        yield empty.set_(storage, (start + offset) // like.itemsize, like.shape)  # type: ignore[call-overload]


def _checked(model: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Return `blocks` as a list, if the model can be streamed by them."""
    chosen = list(blocks) if isinstance(blocks, Iterable) else []
    if not chosen or not all(isinstance(block, nn.Module) and is_block(block) for block in chosen):
        raise ValueError(
            "offload_weights(blocks=...): modules with parameters and a forward, in the order in which they are called."
        )
    if len(set(chosen)) < len(chosen):
        raise ValueError("offload_weights(blocks=...) names a block twice: name each once.")
    if not {*chosen} <= {*model.modules()}:
        raise ValueError("offload_weights(blocks=...): some are no modules of this model: take them from it.")
    if any(inner in chosen for block in chosen for inner in list(block.modules())[1:]):
        raise ValueError("offload_weights(blocks=...) names a block and one inside it: name one of them.")
    return chosen


def _plain(module: nn.Module) -> Iterator[Tensor]:
    return (p for p in parameters_of(module).values() if p is not None)


def _check_plain(name: str, p: Tensor) -> None:
    if type(p) is not nn.Parameter or type(p.data) is not Tensor or p.is_meta or hasattr(p, "to_local"):
        what = "on the meta device" if p.is_meta else f"a {type(p if type(p) is not nn.Parameter else p.data).__name__}"
        raise ValueError(
            f"A parameter {name!r} of shape {list(p.shape)} is {what}, and only plain memory is streamed: load the weights first, "
            "store quantized ones with a recipe of ours, and shard with FSDP's own offloading."
        )


@torch.no_grad()
def _move(model: nn.Module, device: torch.device, but: set[Tensor]) -> None:
    """Move parameters, their gradients and buffers to the device; the objects stay the same."""
    stay = {id(t) for p in but for t in (p, p.grad) if t is not None}
    for module in model.modules():
        module._apply(lambda t: t if id(t) in stay else t.to(device), recurse=False)


def _without_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace transformers' cache of keys and values by None, as its own checkpointing does: a second forward must not
    extend it again."""
    if any(_is_cache(given) and given.get_seq_length() for given in (*args, *kwargs.values())):
        raise ValueError(
            "A block whose weights are streamed cannot train behind a prefix of keys and values: call the model without "
            "past_key_values, or inside torch.no_grad()."
        )
    kwargs = {name: None if _is_cache(given) else given for name, given in kwargs.items()}
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    return tuple(None if _is_cache(given) else given for given in args), kwargs


def _is_cache(given: Any) -> bool:
    return not isinstance(given, Tensor) and hasattr(given, "get_seq_length")
