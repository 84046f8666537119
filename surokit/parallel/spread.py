"""Divide a model among the processes of a layout: DistributedDataParallel where each holds it whole, FSDP2 where they share it.

    recipe, fusion, adapters -> the first process' values everywhere -> parallelize -> optimizer

Shards are made of what is there, so a recipe comes before and an optimizer after.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from surokit.blocks import blocks_of
from surokit.nn.delayed import amaxes_of, banks_of
from surokit.optim.tensors import is_sharded
from surokit.parallel.gather import prepare
from surokit.parallel.layout import Parallel
from surokit.parallel.processes import ALONE, Processes, join

Reduce = Literal["mean", "sum"]


@dataclass(frozen=True, eq=False)
class Spread:
    """A Spread is a model over processes.

    forward: what is called, the model itself unless it is copied. accumulating: a context for the backward of a part that is not
    a step's last, in which gradients that are whole anyway are not exchanged; those of shards always are, since a whole one would
    have to be kept otherwise.
    """

    forward: nn.Module
    processes: Processes

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        if last or not isinstance(self.forward, DistributedDataParallel):
            return nullcontext()
        return self.forward.no_sync()


def parallelize(model: nn.Module, parallel: Parallel | None = None) -> nn.Module:
    """Divide a model among the processes that were started together, and return the module to call in a loop of your own.

    Gradients are means over the processes, as torch's are. A recipe comes before, the optimizer after, on model.parameters();
    surokit.Muon takes the module that is returned. The values of the first process count. The model moves to this process' GPU, if
    there is one. `Session(parallel=...)` does this by itself.

    parallel: None divides the weights among all. ValueError for a layout that does not fit the number of processes, and for
    a model that is divided already.
    """
    processes = join(parallel or Parallel())
    return spread(model, processes, "mean").forward


def spread(model: nn.Module, processes: Processes, reduce: Reduce) -> Spread:
    """Divide the model among `processes`; gradients become their mean or their sum."""
    if any(is_sharded(p) for p in model.parameters()) and processes.are_several:
        raise ValueError("The model is divided among processes already: give the whole one, or leave out parallel=.")
    deferred = is_deferred(model)
    if not deferred and processes is not ALONE:
        model.to(processes.device)
    if processes.are_several and not deferred:
        _send_first(model)
    if processes.layout.is_sharded:
        _shard(model, processes, reduce)
    if deferred:
        _fill(model, processes)
    share_scales(model, processes)
    if not processes.are_several or processes.layout.is_sharded:
        return Spread(model, processes)
    return Spread(_copied(model, reduce), processes)


def share_scales(model: nn.Module, processes: Processes) -> None:
    """Let the processes of a model have the same delayed scales."""
    for bank in banks_of(model):
        bank.shared = processes.are_several


def is_deferred(model: nn.Module) -> bool:
    """Return whether a model has no values yet. ValueError where nothing says where they come from."""
    name = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if name is not None and getattr(model, "deferred", None) is None:
        raise ValueError(
            f"{type(model).__name__} is on the meta device ({name}), and only a surokit.Decoder knows where its values come from: "
            'load it with surokit.load(folder, device="meta"), or give a model with values.'
        )
    return name is not None


@torch.no_grad()
def _fill(model: nn.Module, processes: Processes) -> None:
    """Give the model memory, and each process its part of the values, which it makes whole layer by layer."""
    source: Any = model.deferred
    model.to_empty(device=processes.device)
    for bank in banks_of(model):
        bank.begin_on(processes.device)
    there = dict(model.named_parameters())
    with _drawing_as_the_first(processes):
        for name, whole in source.parts(model, processes.device):
            p = there.pop(name)
            if is_sharded(p):
                assert isinstance(p, DTensor)
                _put(p, whole)
            else:
                p.copy_(whole)
    assert not there, f"without values: {', '.join(there)}"
    model.deferred = None  # type: ignore[assignment]


def _put(p: DTensor, whole: Tensor) -> None:
    # no exchange: all processes have the whole tensor
    part = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None).to_local()
    p.to_local().copy_(part)


@contextmanager
def _drawing_as_the_first(processes: Processes) -> Iterator[None]:
    """Let all processes draw the same numbers in the block, those that the first would; the others' states come back."""
    devices = [processes.device] if processes.device.type == "cuda" else []
    states = processes.first_does(lambda: _states(devices))
    if processes.is_first:
        yield
        return
    with torch.random.fork_rng(devices=devices):
        torch.set_rng_state(states[0])
        for device, state in zip(devices, states[1:]):
            torch.cuda.set_rng_state(state, device)
        yield


def _states(devices: list[torch.device]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


def _shard(model: nn.Module, processes: Processes, reduce: Reduce) -> None:
    """Shard block by block, so that a block's weights are gathered while the one before computes; then the rest."""
    reshard = processes.layout.reshard
    for block in blocks_of(model):
        fully_shard(block, mesh=processes.mesh, reshard_after_forward=reshard)
    # FSDP2 looks for tensors in what the model returns, to be called in backward, and passes over objects of a class that it does
    # not know; gradients would stay each process' own
    model.register_forward_hook(_with_tensors)
    fully_shard(model, mesh=processes.mesh, reshard_after_forward=None if reshard else False)
    model.register_forward_hook(_without_tensors)
    prepare(model, processes.layout.communicate)
    if reduce == "sum":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)


class _Held:
    """A _Held is what a model returned, out of sight."""

    def __init__(self, output: Any) -> None:
        self.output = output


def _with_tensors(model: nn.Module, args: Any, output: Any) -> Any:
    if isinstance(output, Tensor | dict | list | tuple):
        return output
    loss = getattr(output, "loss", None)
    others = getattr(output, "__dict__", {}).values()
    found = [loss] if isinstance(loss, Tensor) else [t for t in others if isinstance(t, Tensor)]
    return _Held(output), found


def _without_tensors(model: nn.Module, args: Any, output: Any) -> Any:
    held = output[0] if isinstance(output, tuple) and output else None
    return held.output if isinstance(held, _Held) else output


def _copied(model: nn.Module, reduce: Reduce) -> nn.Module:
    # gloo moves no 8-bit floats, so torch's own first exchange is left out: _send_first was before
    taken = inspect.signature(DistributedDataParallel.__init__).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in taken else "broadcast_buffers"  # the older name
    options: Any = {"init_sync": False, "gradient_as_bucket_view": True, buffers: False}
    copied = DistributedDataParallel(model, **options)
    if reduce == "sum":
        copied.register_comm_hook(None, lambda state, bucket: _sum(bucket.buffer()))
    return copied


def _sum(gradients: Tensor) -> Any:
    work: Any = dist.all_reduce(gradients, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


@torch.no_grad()
def _send_first(model: nn.Module) -> None:
    """Give all processes the values that the first one has: parameters, buffers, delayed scales."""
    for t in (*model.parameters(), *model.buffers(), *amaxes_of(model)):
        values = t.detach()
        whole = values if values.is_contiguous() else values.contiguous()
        dist.broadcast(whole.reshape(-1).view(torch.uint8), src=0)
        if whole is not values:
            values.copy_(whole)
