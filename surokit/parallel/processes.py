"""Let processes that train together know of each other: their number, their mesh, what each has to say.

torch.distributed does it all. What every process does alike (a count, a norm, a verdict) is exchanged here; gradients and weights
are exchanged by DistributedDataParallel and FSDP2.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from surokit.parallel.layout import Parallel
from surokit.ranks import rank_here

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Processes:
    """A Processes object is this process' view of all that train together.

    layout: how they divide the model, filled in. rank: the number of this one, of `world`. device: where it computes. mesh: of
    one dimension, "shard" or "replicate", or of both; None for a single process, for which everything here does nothing.
    on_host: the group by which they exchange what is on the host.
    """

    layout: Parallel
    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    mesh: DeviceMesh | None = None
    on_host: dist.ProcessGroup | None = None

    @property
    def are_several(self) -> bool:
        return self.world > 1

    @property
    def is_first(self) -> bool:
        """Return whether this process speaks for all: it writes files and shows panels."""
        return self.rank == 0

    def sum(self, value: Tensor) -> Tensor:
        """Add `value` over all processes, in place, on its device; nothing on the host waits for a GPU."""
        if self.are_several:
            dist.all_reduce(value)
        return value

    def first_does(self, work: Callable[[], T]) -> T:
        """Let the first process do `work`; return in all what it gave, or raise its error in all. The value must be picklable."""
        if not self.are_several:
            return work()
        told: list[Any] = [None, None]
        if self.is_first:
            try:
                told[0] = work()
            except Exception as error:
                told[1] = error
        dist.broadcast_object_list(told, src=0, group=self.on_host)
        if told[1] is not None:
            raise told[1]
        value: T = told[0]
        return value

    def gather(self, value: T) -> list[T]:
        """Return every process' `value`, in the order of their numbers; waits for all."""
        if not self.are_several:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.on_host)
        return values

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.are_several:
            dist.barrier(self.on_host)


ALONE = Processes(Parallel(1, 1))


def join(parallel: Parallel | None) -> Processes:
    """Return the processes that train together by `parallel`, which wait for each other here; a single one without it.

    The process group is made where none is: NCCL and gloo on GPUs, gloo on CPUs and where processes share a GPU.
    """
    if parallel is None:
        return ALONE
    here = rank_here()
    world = dist.get_world_size() if _is_on() else here.world
    layout = parallel.over(world)
    if world == 1:
        return Processes(layout, device=_device(here.local))
    device = _device(here.local)
    if not _is_on():
        several_a_gpu = device.type == "cuda" and _ranks_here() > torch.cuda.device_count()
        # NCCL refuses two processes on one GPU
        backend = "gloo" if device.type == "cpu" or several_a_gpu else "cpu:gloo,cuda:nccl"
        store, rank, world = next(rendezvous("env://"))
        # torchelastic keeps its store when it starts processes anew, with the addresses of those that are gone
        store = PrefixStore(f"attempt-{here.restarts}", store)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world, device_id=device if "nccl" in backend else None
        )
        atexit.register(_leave)
    assert layout.shard is not None
    assert layout.replicate is not None
    sizes = {"replicate": layout.replicate, "shard": layout.shard}
    sizes = {name: n for name, n in sizes.items() if n > 1}
    mesh = _mesh(dist.group.WORLD, device.type, tuple(sizes.items()))
    return Processes(layout, dist.get_rank(), world, device, mesh, _host_group(dist.group.WORLD))


def _is_on() -> bool:
    return dist.is_available() and dist.is_initialized()


def _device(local: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _ranks_here() -> int:
    """Return how many processes the launcher started on this machine; 0 where it does not say."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 0))


@cache
def _mesh(world: dist.ProcessGroup | None, kind: str, sizes: tuple[tuple[str, int], ...]) -> DeviceMesh:
    """Return the mesh of all processes in `world` with these dimensions, the same at every call."""
    return init_device_mesh(kind, tuple(n for _, n in sizes), mesh_dim_names=tuple(name for name, _ in sizes))


@cache
def _host_group(world: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return a group of all processes in `world` that moves what is on the host, the same at every call."""
    return None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")


def _leave() -> None:
    if _is_on():
        dist.destroy_process_group()
