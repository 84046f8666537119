"""Choose what FSDP2 gathers of each weight: codes and scales where its layer quantizes it, else its numbers.

FSDP2 gathers a weight for its layer's turn in forward and again in backward. Where the layer quantizes it anyway, each process can
quantize its own rows first (parallel/codes.py), and the codes that it gathers are those of the whole weight, bit for bit:

    rows, MX blocks, square blocks of whole shards       nothing more is exchanged
    blocks that a shard cuts, a scale for the tensor     their amaxes are reduced over the shards first, a few floats
    delayed scaling                                      the scale is known: an amax is reduced only until it has a past

Codes of square tiles serve grad_input too. Those of rows do not, since backward wants scales along the other dimension: there the
gather in backward takes the numbers. Where a weight stays whole until backward, one gather serves both and takes the numbers.

What is stored quantized (QFP8, QFP4, QNF4) is gathered as the codes and scales that it is; also where a MixedPrecisionPolicy casts
everything else.

The sharded parameter stays an ordinary tensor, for the optimizer, checkpoints and the norm of gradients; only the weight in its
layer's turn is another one (nn/gathered.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from surokit.layers import recipe_layers
from surokit.nn.experts import ExpertsLinear
from surokit.nn.linear import Linear
from surokit.parallel.codes import CodesOfShard, Reduced, StoredShard, Tiling
from surokit.parallel.layout import Communicate
from surokit.quantizer import NV, PerTensor, Quantizer
from surokit.torch_private import extension_of, holders_of, is_compiled, is_resharded_to_fewer, shard_groups


def prepare(model: nn.Module, communicate: Communicate = "codes") -> None:
    """Make FSDP2 gather codes of the weights that layers quantize, or numbers as it does by itself ("numbers").

    To be called once, after `fully_shard` and before the first forward, on a model that has its recipe; parameters may still be on
    the meta device. Losses and gradients stay the same bit for bit. Weights that are stored quantized are gathered as they are,
    whatever is chosen. `surokit.parallel.wire.wire` says what is gathered of each parameter, and why.

    Raises ValueError where the model is not sharded, was prepared or run already, or has stored weights that would be cast.
    """
    parameters = list(sharded(model))
    if not parameters:
        raise ValueError("The model is not sharded, so nothing is gathered: call prepare after fully_shard.")
    if any(p.extension is not None or p.shard.all_gather_outputs for p in parameters):
        raise ValueError("The model was prepared or run already: call prepare once, before the first forward.")
    stored = [p for p in parameters if _keeps_dtype(p)]
    for p in stored:
        StoredShard(p.shard).extend()
    for p in parameters if communicate == "codes" else ():
        way = way_of(p)
        if way.quantizer is not None:
            assert p.layer is not None
            assert p.layer.precision is not None
            tiling = Tiling.of(way.quantizer, p.shard, p.ranks)
            CodesOfShard(p.group, p.shard, tiling, p.dtype, way.both, way.reduced, p.layer.precision).extend()


# -- the parameters of a sharded model


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """A ShardedParameter is one that FSDP2 divides.

    group, shard: what torch knows of it (surokit.torch_private). reshards: the weight is let go after forward, so that backward
    gathers it again. layer: the Linear whose weight it is, if that is not stored. storage: of a stored weight, whose codes or
    scales it is; numbers: how many numbers of the model it holds, 0 for scales. shared: other modules hold it too.
    """

    group: Any
    shard: Any
    reshards: bool
    layer: Linear | None
    storage: Quantizer | None
    numbers: int
    shared: bool
    compiled: bool

    @property
    def ranks(self) -> int:
        """Return how many processes hold a shard."""
        size: int = self.group.mesh_info.shard_mesh_size
        return size

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype in which a layer gets the parameter: that of the MixedPrecisionPolicy where it casts."""
        own: torch.dtype = self.shard.sharded_param.dtype
        cast: torch.dtype | None = self.group.mp_policy.param_dtype
        return own if cast is None or self.storage is not None or not own.is_floating_point else cast

    @property
    def extension(self) -> CodesOfShard | StoredShard | None:
        """Return what `prepare` put around its gathers, if anything."""
        found = extension_of(self.shard)
        return found if isinstance(found, CodesOfShard | StoredShard) else None


def sharded(model: nn.Module) -> Iterator[ShardedParameter]:
    """Yield every parameter that FSDP2 divides, group by group."""
    stored: dict[int, tuple[Quantizer, int]] = {}
    # a layer that is sharded by itself is of a class that torch derives from Linear
    holders: list[Linear | ExpertsLinear] = [module for module in model.modules() if isinstance(module, Linear)]
    holders += [layer for _, layer in recipe_layers(model) if isinstance(layer, ExpertsLinear)]
    for holder in holders:
        if holder.storage is not None:
            experts = len(holder.weight) if isinstance(holder, ExpertsLinear) else 1
            stored[id(holder.weight)] = holder.storage, experts * holder.out_features * holder.in_features
            stored |= {id(scales): (holder.storage, 0) for scales in holder.stored_scales}
    compiled = {inner for module in model.modules() if is_compiled(module) for inner in module.modules()}
    for group, reshards in shard_groups(model):
        for shard in group.fsdp_params:
            places = holders_of(shard)
            module, name = places[0]
            p = shard.sharded_param
            storage, numbers = stored.get(id(p), (None, p.numel()))
            layer = module if isinstance(module, Linear) and name == "weight" and storage is None else None
            yield ShardedParameter(group, shard, reshards, layer, storage, numbers, len(places) > 1, module in compiled)


def _keeps_dtype(p: ShardedParameter) -> bool:
    """Return whether the gather of a stored weight is to be extended, so that it moves bytes: torch casts what is no integer, and
    some backends move no 8-bit floats. ValueError where it would be cast and cannot be extended."""
    own: torch.dtype = p.shard.sharded_param.dtype
    if p.storage is None or not own.is_floating_point:
        return False
    possible = not (is_resharded_to_fewer(p.group) or p.shard.offload_to_cpu)
    if not possible and p.group.mp_policy.param_dtype not in (None, own):
        raise ValueError(
            "A MixedPrecisionPolicy would cast the codes and scales of stored weights, and torch offers no way around it where "
            "shards are kept on the CPU or reshard_after_forward is a number: shard with reshard_after_forward=True, on the device."
        )
    return possible


# -- the choice


@dataclass(frozen=True)
class Way:
    """A Way says how a weight is gathered: as codes of `quantizer`, or as numbers.

    both: the codes serve forward and backward. reduced: which amaxes are reduced over the shards before each gather of codes.
    why: the reason for numbers, in backward or altogether.
    """

    quantizer: Quantizer | None = None
    both: bool = False
    reduced: Reduced = ""
    why: str = ""


def way_of(p: ShardedParameter) -> Way:
    """Choose how a parameter that is not stored is gathered, from shapes and the layer's recipe alone."""
    why = _numbers_because(p)
    if why or p.layer is None or p.layer.precision is None:
        return Way(why=why or "no layer quantizes it")
    recipe = p.layer.precision.recipe
    q = recipe.forward.b
    if q is None:
        return Way(why="forward takes it as it is")
    if q.draws or q.hadamard:
        return Way(why="forward rounds it stochastically or rotates it")
    tiling = Tiling.of(q, p.shard, p.ranks)
    if isinstance(q.scaling, NV) and tiling.cuts:
        return Way(why=f"a shard's rows are no multiple of {tiling.tile}")
    if tiling.nbytes >= p.shard.padded_sharded_param_size.numel() * p.dtype.itemsize:
        return Way(why="codes and scales are no smaller")
    both = recipe.grad_input.b == q and q.transposable
    if not both and not p.reshards:
        return Way(why="one gather serves forward and backward, which want other codes")
    if q.delayed:
        reduced: Reduced = "without a past"
    elif isinstance(q.scaling, PerTensor | NV):
        reduced = "whole weight"
    else:
        reduced = "cut blocks" if tiling.cuts else ""
    return Way(q, both, reduced, "" if both else "backward wants other codes")


def _numbers_because(p: ShardedParameter) -> str:
    """Return why a parameter cannot be gathered as codes, whatever its layer's recipe is; "" where it can."""
    reasons = {
        "one process has all of it": p.ranks == 1,
        "other modules read it too": p.shared,
        "torch's compiler looks on": p.compiled,
        "columns are divided": p.shard.fsdp_placement.dim != 0,
        "the layer is divided by tensor parallelism": p.shard.is_dtensor,
        "shards are kept on the CPU": p.shard.offload_to_cpu,
        "reshard_after_forward is a number": is_resharded_to_fewer(p.group),
        "the layer casts it first": p.layer is not None and p.layer.compute_dtype not in (None, p.dtype),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
