"""Peers are the processes that train one model together, and agree on what becomes of its checkpoints.

They talk over a process group of their own on the CPU, made once in a process and not for each checkpoint, so that a thread can
write one while the training thread's groups are busy with gradients. All that is done with it runs in one thread, in the order
in which it was asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from surokit.train.errors import CheckpointError

T = TypeVar("T")


class PeerError(RuntimeError):
    """A PeerError says that something failed in one of several processes, and in which."""


class Peers:
    """Peers are this process and those that it agrees with, in a group that a thread may use; None for a process that is alone."""

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)

    @property
    def is_first(self) -> bool:
        """Return whether this process writes what is the same in all."""
        return self.rank == 0

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="surokit-checkpoint")

    def __getstate__(self) -> dict[str, Any]:
        """Leave the thread out of a copy of a session, which begins one of its own."""
        return {name: value for name, value in vars(self).items() if name != "_thread"}

    def later(self, work: Callable[[], T]) -> Future[T]:
        """Do the work in the thread, after what was asked for and what was launched on the GPU before; the interpreter does not
        end before it is done."""
        if not torch.cuda.is_initialized():
            return self._thread.submit(work)
        device, launched = torch.cuda.current_device(), torch.cuda.Event()
        launched.record()

        def on_device() -> T:
            torch.cuda.set_device(device)  # a thread has its own
            launched.synchronize()
            return work()

        return self._thread.submit(on_device)

    def now(self, work: Callable[[], T]) -> T:
        """Do the work, after what was asked for before, and return what it gives."""
        return work() if self.group is None else self.later(work).result()

    def agree(self, work: Callable[[], T]) -> list[T]:
        """Do the work in every process; return what each got, by rank. To be called within `now` or `later`.

        Where it fails in one process it raises in all: a CheckpointError as it is, anything else as a PeerError.
        """
        if self.group is None:
            return [work()]
        own: Exception | None = None
        mine: tuple[T | None, type[CheckpointError] | None, str] = (None, None, "")
        try:
            mine = work(), None, ""
        except CheckpointError as error:
            own, mine = error, (None, type(error), str(error))
        except Exception as error:
            words = str(error) if isinstance(error, PeerError) else f"{cause_of(error)} (rank {self.rank})"
            own, mine = error, (None, None, words)
        every: list[Any] = [None] * self.world
        dist.all_gather_object(every, mine, group=self.group)
        for _, kind, words in every:
            if words:
                raise (kind or PeerError)(words) from own
        return [value for value, _, _ in every]

    def together(self, work: Callable[[], T]) -> T:
        """Do the work in this thread, in every process; where it fails in one it raises in all, as `agree` does.

        Nothing in the work may wait for a peer.
        """
        found: list[T] = []
        failed: Exception | None = None
        try:
            found.append(work())
        except Exception as error:
            failed = error

        def look() -> None:
            if failed is not None:
                raise failed

        self.now(lambda: self.agree(look))
        return found[0]

    def first(self, work: Callable[[], T]) -> T:
        """Do the work in the first process only, and return in all what it gave. To be called within `now` or `later`."""
        return self.agree(lambda: work() if self.is_first else None)[0]  # type: ignore[return-value]


ALONE = Peers()
_made: tuple[Any, Peers] = (None, ALONE)  # for which default group; one of another time is let go


def peers_of(model: nn.Module, together: bool = False) -> Peers:
    """Return the processes that train this model together: all of the default group where it is sharded, or wrapped in
    DistributedDataParallel, or `together` says so; else this one alone. The first call makes the group, in all processes."""
    global _made
    if not together and not is_spread(model):
        return ALONE
    world = dist.group.WORLD
    if _made[0] is not world:
        _made = world, Peers(dist.new_group(backend="gloo"))
    return _made[1]


def is_spread(model: nn.Module) -> bool:
    """Return whether several processes train this model together."""
    return is_sharded_model(model) or (_has_group() and any(isinstance(m, _wrapper()) for m in model.modules()))


def is_sharded_model(model: nn.Module) -> bool:
    """Return whether processes hold parts of the model's weights; those of FSDP2 may be gathered just now."""
    if not _has_group():
        return False
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(m, FSDPModule) for m in model.modules()) or any(
        hasattr(p, "to_local") for p in model.parameters()
    )


def class_of(model: nn.Module) -> type:
    """Return the model's class as it was before FSDP2 put one of its own over it."""
    if not is_sharded_model(model):
        return type(model)
    from torch.distributed.fsdp import FSDPModule

    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _wrapper() -> type[nn.Module]:
    return nn.parallel.DistributedDataParallel


def cause_of(error: BaseException) -> str:
    """Return an error's cause in a line: the system's words where it has some."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return next(iter(str(error).splitlines()), type(error).__name__)
