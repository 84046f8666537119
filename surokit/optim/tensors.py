"""Handle tensors as an optimizer meets them: shards of a DTensor, their norm, and the scale and mask of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from surokit.torch_private import foreach_norm


def local(tensors: list[Tensor]) -> list[Tensor]:
    """Return the part of each tensor that this process holds: a DTensor's shard, which shares its memory; any other tensor
    itself."""
    return [t.to_local() if is_sharded(t) else t for t in tensors]  # type: ignore[attr-defined]


def gradients_of(params: list[Tensor]) -> list[Tensor]:
    """Return the part of each parameter's gradient that this process holds, of those that have one.

    A DTensor's gradient may be divided in another way than the parameter, or be a part of a sum (Partial): it is brought into
    the parameter's layout first, which every process has to do.
    """
    grads = []
    for p in params:
        g: Any = p.grad
        if is_sharded(p) and g is not None and g.placements != p.placements:  # type: ignore[attr-defined]
            g = g.redistribute(placements=p.placements)  # type: ignore[attr-defined]
        grads.append(g)
    return local([g for g in grads if g is not None])


def memory_order(t: Tensor) -> list[int]:
    """Return the dimensions from the one with the largest stride to the one with the smallest."""
    strides = t.stride()
    return sorted(range(t.ndim), key=lambda d: (-strides[d], d))


def flat(p: Tensor) -> Tensor:
    """Return all that this process holds of a parameter, flat, in the order of its memory, and in its memory. ValueError where
    there are gaps in between."""
    here = local([p])[0].detach()
    ordered = here.permute(memory_order(here))
    if not ordered.is_contiguous():
        raise ValueError(f"A parameter of shape {list(p.shape)} is not dense in memory: make it so with .contiguous().")
    return ordered.view(-1)


def is_vector(name: str, p: Tensor, named: Mapping[str, Tensor]) -> bool:
    """Return whether a parameter is a vector, or a bias that has one for each expert: its weight, which is among the parameters
    that are `named`, has one dimension more."""
    if p.ndim < 2 or not name.endswith("bias"):
        return p.ndim < 2
    weight = named.get(name.removesuffix("_bias") if name.endswith("_bias") else name.removesuffix("bias") + "weight")
    return weight is not None and weight.ndim == p.ndim + 1


def is_sharded(t: Tensor) -> bool:
    """Return whether this is a DTensor, told by what it can do: its module need not be loaded."""
    return hasattr(t, "to_local")


def shard_number(p: Tensor) -> int:
    """Return which of a parameter's shards is here; 0 where it is whole. Replicas of a shard have its number."""
    number = 0
    for axis, placement in enumerate(getattr(p, "placements", ())):
        if not placement.is_replicate():
            mesh = p.device_mesh  # type: ignore[attr-defined]
            number = number * mesh.size(axis) + mesh.get_local_rank(axis)
    return number


def scale_and_mask(optimizer: torch.optim.Optimizer, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Return (grad_scale, found_inf) of this step on the device, None where they are not set. torch's GradScaler takes them away
    after a step, so that an optimizer need not have them.

    The mask is 0 or 1, as torch's fused kernels want it; the scaler gives the sum over devices of what each has found.
    """
    scale, mask = (on_device(device, getattr(optimizer, name, None)) for name in ("grad_scale", "found_inf"))
    return scale, None if mask is None else (mask != 0).float()


def on_device(device: torch.device, value: Tensor | None) -> Tensor | None:
    # to the host it has to be there when it is read
    return None if value is None else value.to(device, non_blocking=device.type != "cpu")


def gradient_norm(grads: list[Tensor]) -> Tensor:
    """Return the L2 norm over all tensors together, 0-d float32 on the first one's device.

    On a CPU the norm of each low-precision tensor is rounded to its dtype, which is six times as fast there. Of a sharded
    gradient the whole counts, so that every process has the same norm.
    """
    groups: dict[tuple[torch.device, torch.dtype, bool], list[Tensor]] = {}
    for grad in grads:
        groups.setdefault((grad.device, grad.dtype, is_sharded(grad)), []).append(grad)
    norms = []
    for (device, _, sharded), tensors in groups.items():
        dtype = None if device.type == "cpu" else torch.float32
        norm: Any = torch.stack(foreach_norm(tensors, 2, dtype=dtype)).float()
        norms.append((norm.full_tensor() if sharded else norm).to(grads[0].device))
    return torch.linalg.vector_norm(torch.cat(norms))
