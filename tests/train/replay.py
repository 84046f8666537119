"""A stand-in for CUDA graphs on a CPU: what a session does around them can be tested without a GPU, bit for bit.

Recorded are the operations below autograd, with the memory they read and write. As on a GPU

- recording does nothing: what was there before keeps its values, what came into being is full of ones (0xFF) until a replay
- a replay repeats the operations in the same memory; what the host decided while recording is frozen
- memory that nobody holds any more when recording ends is gone: each replay has its own
- a host that reads the device raises, while rehearsing (`torch.cuda.set_sync_debug_mode("error")`) and while recording
- random numbers are drawn at each replay, from the generator as it is then
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from surokit.kernels import OPERATIONS, only_reference
from surokit.train.engine import Engine
from surokit.train.session import Session

aten = torch.ops.aten
_READS = {
    aten._local_scalar_dense,
    aten.item,
    aten.is_nonzero,
    aten.equal,
    aten.nonzero,
    aten.nonzero_numpy,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
}


class NoReads(TorchDispatchMode):
    """Raises where a device would be waited for: a value, or a size that depends on values, comes to the host."""

    def __init__(self, said: str = "called a synchronizing CUDA operation") -> None:
        super().__init__()
        self.said = said
        self.definitions: list[
            Any
        ] = []  # one for each time that it was entered: an operation's own are looked at within

    def __enter__(self) -> Any:
        # C++ for a CPU is no operation of torch, and no part of what a device records
        self.definitions.append(only_reference())
        self.definitions[-1].__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self.definitions.pop().__exit__(*raised)

    def check(self, func: Any, args: Any) -> None:
        sized_by_values = func in (aten.index.Tensor, aten.index_put_.default) and any(
            isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1] if i is not None
        )
        repeats = func is aten.repeat_interleave.Tensor
        if func.overloadpacket in _READS or sized_by_values or repeats:
            raise RuntimeError(self.said)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.check(func, args)
        inner = _inside(func)
        if inner is not None:
            with self:
                return inner(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _inside(func: Any) -> Callable[..., Any] | None:
    """Our own operations are Python: what they consist of is what happens on a device. What a CPU does its own way stays whole."""
    whole = "_cpu" in func.name() or "emulated_mm" in func.name()
    if func.namespace != "surokit" or whole:
        return None
    if operation := OPERATIONS.get(func.overloadpacket.__name__):
        return operation.definition
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key):
        return lambda *args, **kwargs: func._op_dk(key, *args, **kwargs)
    return None


class _Place(NamedTuple):
    """A tensor as a piece of memory: a number for what recording made, the storage itself for what was there before."""

    memory: int | torch.UntypedStorage
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def tensor(self, made: dict[int, torch.UntypedStorage]) -> Tensor:
        storage = made[self.memory] if isinstance(self.memory, int) else self.memory
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


class _Recorder(NoReads):
    def __init__(self) -> None:
        super().__init__("operation not permitted when stream is capturing")
        self.calls: list[tuple[Any, Any, Any, Any, list[int]]] = []
        self.made: list[StorageWeakRef] = []
        self.numbers: dict[int, int] = {}  # by address of the storage object, while it lives
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def number(self, t: Tensor) -> int | None:
        n = self.numbers.get(t.untyped_storage()._cdata)
        return None if n is None or self.made[n].expired() else n

    def place(self, t: Tensor) -> _Place:
        n = self.number(t)
        memory = t.untyped_storage() if n is None else n
        return _Place(memory, t.dtype, tuple(t.shape), t.stride(), int(t.storage_offset()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.check(func, args)
        if (inner := _inside(func)) is not None:
            with self:
                return inner(*args, **kwargs)
        for argument, value in zip(func._schema.arguments, args):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.keep(value)
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name in kwargs:
                self.keep(kwargs[argument.name])
        there = tree_map_only(Tensor, self.place, (args, kwargs))
        given = {p.memory if isinstance(p.memory, int) else p.memory._cdata for p in _places(there)}
        out = func(*args, **kwargs)
        new: list[int] = []

        def result(t: Tensor) -> _Place:
            n = self.number(t)
            if n is None and t.untyped_storage()._cdata not in given:
                n = len(self.made)
                self.made.append(StorageWeakRef(t.untyped_storage()))
                self.numbers[t.untyped_storage()._cdata] = n
                new.append(n)
            return self.place(t)

        self.calls.append((func, *there, tree_map_only(Tensor, result, out), new))
        return out

    def keep(self, value: Any) -> None:
        for t in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(t, Tensor) and self.number(t) is None:
                storage = t.untyped_storage()
                self.before.setdefault(storage._cdata, (storage, storage.clone()))


def _places(tree: Any) -> list[_Place]:
    leaves = torch.utils._pytree.tree_leaves(tree, is_leaf=lambda x: isinstance(x, _Place))
    return [leaf for leaf in leaves if isinstance(leaf, _Place)]


def _filled(tree: Any, made: dict[int, torch.UntypedStorage]) -> Any:
    return torch.utils._pytree.tree_map(
        lambda x: x.tensor(made) if isinstance(x, _Place) else x, tree, is_leaf=lambda x: isinstance(x, _Place)
    )


class Replays:
    """The device's part of capturing (capture.DeviceGraphs), on a CPU. `free` bytes are left; `launched` counts replays."""

    mended = 0

    def __init__(self, free: int = 1 << 40) -> None:
        self.free = free
        self.launched = 0
        self.recorded: list[list[str]] = []  # each graph's operations, by name

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        with NoReads():
            yield

    def record(self, work: Callable[[], Any]) -> Callable[[], None]:
        recorder = _Recorder()
        random = torch.get_rng_state()
        try:
            with recorder:
                work()
        finally:
            torch.set_rng_state(random)
            for storage, before in recorder.before.values():
                storage.copy_(before)
        alive = {n: _storage(ref) for n, ref in enumerate(recorder.made) if not ref.expired()}
        for storage in alive.values():
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)
        self.recorded.append([func.overloadpacket.__name__ for func, *_ in recorder.calls])
        calls = recorder.calls

        @torch.no_grad()
        def replay() -> None:
            self.launched += 1
            made = dict(alive)
            for func, args, kwargs, results, new in calls:
                out = func(*_filled(args, made), **_filled(kwargs, made))
                for place, t in zip(_places(results), _tensors(out), strict=True):
                    if place.memory in new:
                        if place.memory in alive:
                            place.tensor(made).copy_(t)
                        else:
                            made[place.memory] = t.untyped_storage()

        return replay

    def clear(self) -> None:
        pass

    def free_bytes(self) -> int:
        return self.free


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(ref: StorageWeakRef) -> torch.UntypedStorage:
    return torch.UntypedStorage._new_with_weak_ptr(ref.cdata)


def graphed(session: Session, device: Replays | None = None) -> Session:
    """The session with graphs of the stand-in."""
    session.engine = Engine(session.model, session.optimizer, session.clip, "auto", device or Replays())
    return session
