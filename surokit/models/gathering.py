"""Gather the tensors of a model that is sharded over processes, one at a time, for the one process that writes them.

A tensor that is not sharded is itself. All processes have to gather the same tensors in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from surokit.errors import CheckpointError

T = TypeVar("T")


def whole(t: Tensor) -> Tensor:
    """Return all of a DTensor, on its device; any other tensor itself. Detached."""
    t = t.detach()
    if not hasattr(t, "full_tensor"):
        return t
    if not (t.itemsize == 1 and t.is_floating_point()):
        gathered: Tensor = t.full_tensor()
        return gathered
    from torch.distributed.tensor import DTensor

    # floats of 8 bits travel as bytes, which every backend moves
    local, mesh, placements = t.to_local().view(torch.uint8), t.device_mesh, t.placements  # type: ignore[attr-defined]
    stored = DTensor.from_local(local, mesh, placements, run_check=False, shape=t.shape, stride=t.stride())
    return stored.full_tensor().view(t.dtype)


def is_sharded(model: nn.Module) -> bool:
    """Return whether processes hold parts of the model's weights. FSDP2 gives up what it has gathered just now."""
    return any(hasattr(t, "full_tensor") for t in model.state_dict().values())


def written_by_first(sharded: bool, tensors: Iterator[T], write: Callable[[Iterator[T]], None]) -> None:
    """Let this process write the tensors as they come, or of a sharded model the first one; the others gather them with it.

    Nobody returns before all is there. CheckpointError in all processes where writing fails.
    """
    if not sharded:
        write(tensors)
        return
    failed: CheckpointError | None = None
    if dist.get_rank() == 0:
        try:
            write(tensors)
        except CheckpointError as error:
            failed = error
    for _ in tensors:  # what is left of them, so that nobody waits for this process
        pass
    said = [str(failed) if failed is not None else ""]
    dist.broadcast_object_list(said, src=0)
    if said[0]:
        raise CheckpointError(said[0]) from failed
