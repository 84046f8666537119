"""Keep activations on the host: tensors that autograd saves in a forward go down beside it and come back before backward
needs them.

This works through torch's hooks for saved tensors, so for any code. torch.autograd.graph.save_on_cpu does the same while
the device waits for every copy, and copies a tensor as often as it is saved; it serves where time does not matter. Here
copies have streams of their own, tensors that share memory are copied once, and in backward the next ones are fetched while
the latest is used.

A copy is a snapshot. The device keeps a tensor until the next one is on its way, so at most one waits to be read; changing
it in place before that is noticed and raised in backward, as torch does. Changed later, the snapshot stays right.
"""

from __future__ import annotations

import math
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from surokit.applied import HostStream
from surokit.offload.forwards import Forward, forwards_of, link_to
from surokit.offload.link import Arrival, Link, PendingCopy
from surokit.places import check_module
from surokit.torch_private import base_of, storage_id, version_of

MIN_BYTES = 1 << 20
_DEAD = 1024  # entries of the tape that may be for nobody any more
_WASTE = 4  # a view's whole memory is copied for it, and whoever shares it, if it has at most this many times the view's bytes


def offload_activations(
    model: nn.Module | None = None,
    device: torch.device | str | None = None,
    *,
    min_bytes: int = MIN_BYTES,
    prefetch: int = 2,
    link: Link | None = None,
) -> ActivationStream:
    """Keep the tensors that backward needs of a forward on the host.

        sk.offload_activations(model)                 of every forward of the model from now on
        with sk.offload_activations() as stream:      of the computation inside; backward may come after
            loss = anything(x)

    model: whose forward; its parameters and buffers stay where they are and are not copied. device: whose tensors;
    None takes CUDA if there is one, else the CPU, where this only simulates. min_bytes: smaller tensors stay. prefetch: copies
    that are fetched ahead in backward. link: makes the copies; None takes a lean CudaLink or, on a CPU, a HostLink.

    With blocks that are recomputed (recompute="full", `offload_weights`), only the input of a block is saved, and that
    goes to the host. Host memory of a step is used again by the next.

    Without a model and outside of a `with` it does nothing.

    Raises ValueError for prefetch < 0 and min_bytes < 1. In backward, RuntimeError for a tensor that was changed in place
    before it was copied.
    """
    if model is not None:
        check_module(model, "offload_activations")
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise ValueError(f"offload_activations(prefetch={prefetch!r}): a whole number of copies, at least 0.")
    number = isinstance(min_bytes, int | float) and not isinstance(min_bytes, bool)
    if not number or not 1 <= min_bytes < math.inf:
        raise ValueError(f"offload_activations(min_bytes={min_bytes!r}): a number of bytes, at least 1.")
    stream = ActivationStream(link_to("offload_activations", device, link), int(min_bytes), prefetch)
    if model is not None:
        for module in model.modules():
            for before in forwards_of(module, Saving):
                before.remove()
        stream.attached.append(Saving(model, stream))
    return stream


class ActivationStream(HostStream):
    """An ActivationStream is the result of `offload_activations`: a context manager, whose `remove` takes it off the model.
    It prints what it does.

    bytes_down, bytes_up: so far. tensors: those that were saved and large enough; copies: those that were made of them.
    """

    keeps = "activations"

    def __init__(self, link: Link, min_bytes: int, prefetch: int) -> None:
        self.link, self.min_bytes, self.prefetch = link, min_bytes, prefetch
        self.attached: list[Saving] = []
        self._entered: list[Any] = []
        self._forget()

    def _forget(self) -> None:
        """Reset to the state before the first forward."""
        self.bytes_down = self.bytes_up = self.tensors = self.copies = 0
        # numbered in the order of saving; backward asks the other way round
        self._tape: list[tuple[int, weakref.ref[_Copy]]] = []
        self._limit = _DEAD  # of its length, until the dead are forgotten
        self._known: dict[int, list[weakref.ref[_Copy]]] = {}  # by storage
        self._latest: deque[weakref.ref[_Copy]] = deque()  # whose tensors the device has still got
        self._free: list[Tensor] = []  # host memory, the smallest first
        self._returned: deque[Tensor] = deque()  # the same, from finalizers, which may run anywhere in between
        self._own: set[int] = set()  # storages of parameters and buffers

    @property
    def device(self) -> torch.device:
        return self.link.device

    @property
    def device_bytes(self) -> int:
        """Return the bytes of copies and originals that this holds on the device now."""
        copies = {copy for _, ref in self._tape if (copy := ref()) is not None}
        return sum(copy.host.nbytes for copy in copies if copy.here is not None or copy.arrival is not None)

    def __repr__(self) -> str:
        return (
            f"activations of at least {self.min_bytes / 2**20:,.3g} MiB on the host, from {self.device}, {self.prefetch} "
            f"fetched ahead{'' if self.attached or self._entered else '; at present of nothing: give a model, or use it in a with'}"
            f"\nso far {self.copies} copies for {self.tensors} tensors, {self.bytes_down / 2**20:,.1f} MiB down, "
            f"{self.bytes_up / 2**20:,.1f} MiB up"
        )

    def remove(self) -> None:
        """Stop offloading: from now on the model keeps its activations on the device."""
        for forward in self.attached:
            forward.remove()
        self.attached.clear()

    def __enter__(self) -> ActivationStream:
        context = self.saving(None)
        context.__enter__()
        self._entered.append(context)
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)

    @contextmanager
    def saving(self, model: nn.Module | None) -> Iterator[None]:
        """Send the tensors that autograd saves inside the block to the host, except the model's parameters and buffers."""
        if not torch.is_grad_enabled():
            yield
            return
        self._own = (
            set()
            if model is None
            else {storage_id(t.untyped_storage()) for t in (*model.parameters(), *model.buffers())}
        )
        self._begin()
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self.link.fence()  # who comes after may change what was kept

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("link", "min_bytes", "prefetch", "attached")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._entered = []
        self._forget()

    # -- down

    def _pack(self, t: Tensor) -> Tensor | _Saved:
        if not self._goes(t):
            return t
        extent = _extent(t)
        if extent is None:  # a few elements of much
            t = t.detach().contiguous()
            extent = 0, t.nbytes
        copy = self._found(t, extent) or self._send(t, extent)
        copy.uses += 1
        copy.left += 1
        self.tensors += 1
        self._tape.append((self.tensors, weakref.ref(copy)))
        if len(self._tape) > self._limit:
            self._forget_dead()
        offset = int(t.storage_offset()) * t.itemsize - copy.first
        return _Saved(copy, self.tensors, t.dtype, offset, t.shape, t.stride())

    def _goes(self, t: Tensor) -> bool:
        plain = type(t) in (Tensor, nn.Parameter) and t.layout == torch.strided and t.device == self.device
        if not plain or min(t.nbytes, t.untyped_storage().nbytes()) < self.min_bytes or t.is_conj() or t.is_neg():
            return False
        base = base_of(t)
        given = isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad)
        return not given and storage_id(t.untyped_storage()) not in self._own

    def _found(self, t: Tensor, extent: tuple[int, int]) -> _Copy | None:
        for ref in self._known.get(storage_id(t.untyped_storage()), ()):
            copy = ref()
            if copy is not None and copy.holds(t, extent):
                return copy
        return None

    def _send(self, t: Tensor, extent: tuple[int, int]) -> _Copy:
        first, end = extent
        storage, memory = t.untyped_storage(), self._memory(end - first)
        host = memory[: end - first]
        here = _bytes(storage, t.device, first, end - first)
        self.link.fence()  # all that was sent before has been read
        while len(self._latest) >= max(1, self.prefetch):
            if (old := self._latest.popleft()()) is not None:
                old.let_go()
        ticket = self.link.down(lambda staging: _copied(here, staging), host)
        copy = _Copy(self, StorageWeakRef(storage), version_of(t), first, memory, host, ticket, here, t.detach())
        ref = weakref.ref(copy)
        self._latest.append(ref)
        self._known.setdefault(storage_id(storage), []).append(ref)
        self.bytes_down += host.nbytes
        self.copies += 1
        return copy

    def _memory(self, nbytes: int) -> Tensor:
        """Return host memory of at least so many bytes: the smallest that is free, else new memory, in the place of the
        largest that is free. So there are as many pieces as ever waited at a time, whatever lengths sequences have."""
        while self._returned:
            insort(self._free, self._returned.popleft(), key=_nbytes)
        if (k := bisect_left(self._free, nbytes, key=_nbytes)) < len(self._free):
            return self._free.pop(k)
        if self._free:
            self._free.pop()
        return self.link.buffer((nbytes,), torch.uint8)

    def _begin(self) -> None:
        """Begin a forward: drop the device tensors that the latest one left here, which are not needed any more."""
        for ref in self._latest:
            if (copy := ref()) is not None:
                copy.let_go()
        self._latest.clear()
        self._forget_dead()

    def _forget_dead(self) -> None:
        """Drop entries that backward cannot ask for any more."""
        self._tape = [entry for entry in self._tape if entry[1]() is not None]
        self._limit = 2 * len(self._tape) + _DEAD
        for key, refs in list(self._known.items()):
            self._known[key] = [ref for ref in refs if (copy := ref()) is not None and not copy.storage.expired()]
            if not self._known[key]:
                del self._known[key]

    # -- up

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        copy = saved.copy
        copy.left = copy.left or copy.uses  # another backward of the same graph
        here = self._here(copy)
        for coming in self._coming(saved):
            self._fetch(coming)
        copy.left -= 1
        if not copy.left:
            copy.let_go()
        offset = (here.storage_offset() + saved.offset) // saved.dtype.itemsize
        empty = torch.empty(0, dtype=saved.dtype, device=here.device)
        return empty.set_(here.untyped_storage(), offset, saved.shape, saved.stride)

    def _coming(self, saved: _Saved) -> list[_Copy]:
        """Return the next copies, `prefetch` of them, that backward will ask for."""
        coming: dict[_Copy, None] = {}
        for k in reversed(range(bisect_left(self._tape, saved.number, key=_first))):
            if len(coming) == self.prefetch:
                break
            copy = self._tape[k][1]()
            if copy is not None and copy.left and copy is not saved.copy:
                coming[copy] = None
        return list(coming)

    def _here(self, copy: _Copy) -> Tensor:
        copy.check()
        if copy.here is None:
            self._fetch(copy)
            assert copy.arrival is not None
            copy.here, copy.arrival = copy.arrival.land(), None
        return copy.here

    def _fetch(self, copy: _Copy) -> None:
        if copy.here is None and copy.arrival is None:
            copy.ticket.wait()
            copy.arrival = self.link.fetch(copy.host)
            self.bytes_up += copy.host.nbytes

    def back(self, memory: Tensor) -> None:
        """Take back host memory that is free."""
        self._returned.append(memory)


@dataclass(eq=False)
class _Copy:
    """A _Copy holds a stretch of a storage, from byte `first` on, as it was at a version."""

    stream: ActivationStream
    storage: StorageWeakRef
    version: int
    first: int
    memory: Tensor  # uint8, at least
    host: Tensor  # its beginning, uint8 [bytes]
    ticket: PendingCopy
    here: Tensor | None  # the same on the device: the original, or a copy that came back
    original: Tensor | None  # knows the version
    arrival: Arrival | None = None
    uses: int = 0  # saved tensors that lie here
    left: int = 0  # of them, not asked for yet
    changed: bool = False

    def holds(self, t: Tensor, extent: tuple[int, int]) -> bool:
        inside = self.first <= extent[0] and extent[1] <= self.first + self.host.nbytes
        return inside and not self.storage.expired() and version_of(t) == self.version

    def let_go(self) -> None:
        """Release the device's memory."""
        if self.original is not None:
            self.changed = self.changed or version_of(self.original) != self.version
        self.here = self.original = None

    def check(self) -> None:
        if self.changed or (self.original is not None and version_of(self.original) != self.version):
            raise RuntimeError(
                "A tensor that backward needs was changed in place before its copy on the host was made: use an operation that "
                "makes a new tensor."
            )

    def __del__(self) -> None:
        if self.arrival is not None:
            self.arrival.land()  # what is in its memory next waits for it
        self.stream.back(self.memory)


@dataclass(frozen=True, eq=False)
class _Saved:
    """A _Saved is what autograd keeps in a tensor's place."""

    copy: _Copy
    number: int  # on the tape
    dtype: torch.dtype
    offset: int  # bytes, in the copy
    shape: torch.Size
    stride: tuple[int, ...]


class Saving(Forward):
    """A Saving is the forward of a model whose activations wait on the host."""

    stream: ActivationStream

    def __init__(self, module: nn.Module, stream: ActivationStream) -> None:
        super().__init__(module)
        self.stream = stream

    def around(self, *args: Any, **kwargs: Any) -> Any:
        with self.stream.saving(self.module):
            return self.__wrapped__(*args, **kwargs)


def _extent(t: Tensor) -> tuple[int, int] | None:
    """Return (first, end) in bytes of the memory that is copied for t; None where most of it would not be needed."""
    first = int(t.storage_offset()) * t.itemsize
    span = (1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride()))) * t.itemsize
    if span <= t.nbytes:
        return first, first + span
    whole = t.untyped_storage().nbytes()  # others share it, as the parts of a joint product do
    if whole <= _WASTE * t.nbytes:
        return 0, whole
    return None


_nbytes, _first = attrgetter("nbytes"), itemgetter(0)


def _bytes(storage: torch.UntypedStorage, device: torch.device, first: int, count: int) -> Tensor:
    """Return uint8 [count] in the storage; to autograd it is no view."""
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    return empty.set_(storage, first, (count,), (1,))


def _copied(source: Tensor, to: Tensor) -> None:
    to.copy_(source)
