"""Lay weights of sibling layers side by side in one storage, so that layers that read one input can be one product.

Parameters stay what they are: the same objects under the same names, so optimizers, checkpoints and wrappers see no difference.
Only their memory is another: consecutive rows of one block, which `side_by_side` gives as one tensor. Whether it still is so is
told by the addresses each time. Whatever moves a parameter (a copy, a conversion, a load that assigns) takes it out again, and
its layers are then separate products until they are laid anew; nothing is ever computed from a stale block.

N_i rows of each tensor, K whatever follows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from surokit.fusion import Fusion
from surokit.nn.linear import Linear
from surokit.torch_private import children_of, parameters_of

LAID = "_surokit_laid"  # in the first of sibling layers: the addresses at which they were last looked at
_ALIGNMENT = 16  # bytes: products on tensor cores want their operands to begin at a multiple


def lie_side_by_side(tensors: Sequence[Tensor]) -> bool:
    """Return whether the tensors [N_i, K] are consecutive rows of one storage; one tensor alone always is."""
    if len(tensors) == 1:
        return True
    first = tensors[0]
    if not _plain(first):
        return False
    # addresses cost little; two storages may touch, so that all has to be within the extent of the first one
    start = end = first.data_ptr()
    dtype, width = first.dtype, first.shape[1:]
    for t in tensors:
        if t.data_ptr() != end or t.dtype != dtype or t.shape[1:] != width or not _plain(t):
            return False
        end += t.nbytes
    if start == end:
        return False
    storage = first.untyped_storage()
    return end <= storage.data_ptr() + storage.nbytes()


def side_by_side(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the tensors [N_i, K] as one [sum N_i, K] that shares their memory, without gradient; None where they lie apart."""
    first = tensors[0].detach()
    if len(tensors) == 1:
        return first
    if not lie_side_by_side(tensors):
        return None
    return first.as_strided((sum(len(t) for t in tensors), *first.shape[1:]), first.stride())


@torch.no_grad()
def pack_sibling_weights(parameters: Sequence[Tensor]) -> Tensor | None:
    """Move the parameters [N_i, K] into one storage, row after row, unless they are there; returns what `side_by_side` does.

    The parameters hold the same values in the same objects; a view of the old memory, such as an entry of an earlier
    state_dict(), no longer follows them, as after `.to()`. Left alone, with None: tensors of several dtypes, devices or widths;
    on the meta device; shards (DTensors); parts of a larger block, and what other processes share; bytes that are no multiple of
    16; and everything in inference mode or while a CUDA graph is being captured.
    """
    joint = side_by_side(parameters)
    if joint is not None or not _can_lie(parameters):
        return joint
    first = parameters[0]
    joint = torch.empty((sum(len(p) for p in parameters), *first.shape[1:]), dtype=first.dtype, device=first.device)
    for parameter, rows in zip(parameters, joint.split([len(p) for p in parameters])):
        rows.copy_(parameter)
        parameter.data = rows
    return joint


def lay(layers: Sequence[nn.Module], chosen: Fusion | None) -> None:
    """Lay sibling layers after they were made, moved or filled: where `chosen` says joint, and by default on CUDA."""
    weight = getattr(layers[0], "weight", None)
    if isinstance(weight, Tensor) and (chosen.joint if chosen is not None else weight.is_cuda):
        lay_layers(layers)


def lay_in_forward(layers: Sequence[nn.Module], fusion: Fusion) -> None:
    """Lay sibling layers as a forward begins, if a recipe, a load or a copy has taken them apart since.

    Nothing is moved in a process group: a sharded model's parameters are whole for a moment only, in memory that is not theirs.
    Nor in inference mode, where nothing could be; the first forward outside it does.
    """
    if not fusion.joint or torch.is_inference_mode_enabled() or (dist.is_available() and dist.is_initialized()):
        return
    seen = vars(layers[0])
    if seen.get(LAID) != _addresses(layers):  # every forward comes by here
        lay_layers(layers)
        seen[LAID] = _addresses(layers)


def lay_layers(layers: Sequence[nn.Module]) -> None:
    """Lay what sibling layers hold: weights (or their codes and scales), biases, and the A of adapters of ours.

    Layers of another class, for example PEFT's, are left alone; so is each kind of tensor that not all of them have.
    """
    linears = [layer for layer in layers if type(layer) is Linear]
    if len(linears) < len(layers) or len(layers) < 2:
        return
    if len({layer.storage for layer in linears}) == 1:
        for name in parameters_of(linears[0]):
            _lay([parameters_of(layer).get(name) for layer in linears])
    if all(layer.has_adapter for layer in linears):
        _lay([parameters_of(layer.lora_A).get("weight") for layer in linears])


def _addresses(layers: Sequence[nn.Module]) -> list[int]:
    """Return the addresses of the layers' weights and of their adapters' A, which tell cheaply whether something was moved."""
    found = []
    for layer in layers:
        for owner in (layer, children_of(layer).get("lora_A")):
            weight = parameters_of(owner).get("weight") if owner is not None else None
            if type(weight) is nn.Parameter:
                found.append(weight.data_ptr())
    return found


def _lay(parameters: Sequence[Tensor | None]) -> None:
    there = [p for p in parameters if isinstance(p, nn.Parameter)]
    if len(there) == len(parameters):
        pack_sibling_weights(there)


def _plain(t: Tensor) -> bool:
    """Return whether a tensor is a block of ordinary memory: no subclass that holds something else, no lack of data."""
    return type(t) in (Tensor, nn.Parameter) and t.ndim > 0 and not t.is_meta and t.is_contiguous()


def _can_lie(parameters: Sequence[Tensor]) -> bool:
    first = parameters[0]
    alike = all(
        _plain(p) and (p.dtype, p.device, p.shape[1:]) == (first.dtype, first.device, first.shape[1:])
        for p in parameters
    )
    return (
        alike
        and all(p.nbytes and p.nbytes % _ALIGNMENT == 0 for p in parameters)
        # a block of its own each: what is part of another is somebody's arrangement
        and all(p.untyped_storage().nbytes() == p.nbytes for p in parameters)
        and not any(p.is_shared() for p in parameters if not p.is_cuda)  # torch says so of every CUDA tensor
        and len({p.data_ptr() for p in parameters}) == len(parameters)
        and not torch.is_inference_mode_enabled()
        and not (first.is_cuda and torch.cuda.is_current_stream_capturing())
    )
