"""Quantize the shard of a weight before FSDP2 gathers it, and put the codes and scales of the whole weight together after it.

What is computed is what the layer would compute of the gathered numbers, bit for bit: a tile of whole rows has its own scale
wherever it is, and the amaxes of all others are reduced over the shards first. The host issues that reduction right before the
gather, prefetched or not, so it is in the same order in all processes. On a GPU the kernels and the reduction run on the stream
that FSDP2 copies on, for which the stream of the gather waits.

N out_features, K in_features, R processes with a shard each, C rows of a shard, T rows of a tile, S tiles that a shard has part of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from surokit import kernels
from surokit.nn.gathered import Gathered, GatheredCodes
from surokit.nn.linear_gemms import SLOTS, Precision
from surokit.quantized import quantize
from surokit.quantizer import PerTensor, Quantizer
from surokit.torch_private import extend_gather, gathers_for, padded_shard

Reduced = Literal["", "cut blocks", "whole weight", "without a past"]


class StoredShard:
    """A StoredShard is gathered as the bytes that it holds: codes or scales of a stored weight, in whatever dtype they are."""

    def __init__(self, shard: Any) -> None:
        self.shard = shard

    def extend(self) -> None:
        extend_gather(self.shard, self.before, self.after)

    def before(self, mesh: Any) -> tuple[tuple[Tensor, ...], None]:
        """Return the bytes of this process' rows. Called by torch."""
        return (padded_shard(self.shard).view(torch.uint8),), None

    def after(
        self, outputs: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the whole parameter, which shares the memory of what was gathered: nothing is left to do for `out`. Called by
        torch, whose dtype is the one that it would have cast to."""
        return (outputs[0].view(self.shard.sharded_param.dtype), ()) if out is None else None


@dataclass(frozen=True)
class Tiling:
    """A Tiling says where the codes and scales of shards lie in what is gathered, and where in the whole weight [N, K].

    Each shard gives the scales of all tiles that it has part of; of a tile that several shards have, the first one's count.
    """

    quantizer: Quantizer
    rows: int  # N
    columns: int  # K
    ranks: int  # R
    shard: int  # C

    @staticmethod
    def of(quantizer: Quantizer, shard: Any, ranks: int) -> Tiling:
        N, K = shard.sharded_param.shape
        return Tiling(quantizer, N, K, ranks, shard.padded_sharded_param_size[0])

    @property
    def tile(self) -> int:
        """Return T, 0 where the whole weight is one tile."""
        return self.quantizer.scaling.tile()[0]

    @property
    def cuts(self) -> bool:
        """Return whether a shard ends within a tile that goes on in the next one."""
        return self.tile > 1 and self.shard < self.rows and self.shard % self.tile != 0

    def first(self, rank: int) -> int:
        """Return the first tile that a shard has part of."""
        return rank * self.shard // self.tile if self.tile else 0

    def above(self, rank: int) -> int:
        """Return the rows of a shard's first tile that belong to the shards before it."""
        return rank * self.shard % self.tile if self.tile else 0

    @cached_property
    def slots(self) -> int:
        """Return S, of the shard that has most."""
        return max(-(-(self.above(rank) + self.shard) // self.tile) for rank in range(self.ranks)) if self.tile else 1

    @cached_property
    def picked(self) -> list[int] | None:
        """Return which of the R x S gathered rows of scales are those of the whole weight; None where they are the first ones."""
        tiles = range(-(-self.rows // self.tile) if self.tile else 1)
        ranks = [tile * self.tile // self.shard for tile in tiles]
        found = [rank * self.slots + tile - self.first(rank) for tile, rank in zip(tiles, ranks)]
        return None if found == [*tiles] else found

    @cached_property
    def parts(self) -> tuple[Tensor, ...]:
        """Return codes, scales and scales of the scales of C rows, as tensors without data."""
        return quantize(torch.empty(self.shard, self.columns, device="meta"), self.quantizer).parts

    @property
    def grid(self) -> tuple[int, int]:
        """Return how many tiles lie below and beside each other in all shards, their padding included."""
        return self.first(self.ranks - 1) + self.slots, self.parts[1].shape[1]

    @property
    def nbytes(self) -> int:
        """Return the bytes that each shard gives to a gather."""
        codes, scales, *second = self.parts
        own = 4 if self.quantizer.delayed else 0
        return (
            codes.nbytes
            + self.slots * math.prod(scales.shape[1:]) * scales.itemsize
            + sum(t.nbytes for t in second)
            + own
        )

    @property
    def amax_bytes(self) -> int:
        """Return the bytes of the amaxes that a reduction takes: of all blocks where some are cut, else of the whole weight."""
        return 4 * math.prod(self.grid) if self.cuts else 4


class CodesOfShard:
    """A CodesOfShard quantizes the rows [C, K] of a weight that are here as its layer would the whole.

    both: codes serve backward too, which else gets the numbers. precision: the layer's, which has the past of delayed scaling.
    """

    def __init__(
        self,
        group: Any,
        shard: Any,
        tiling: Tiling,
        dtype: torch.dtype,
        both: bool,
        reduced: Reduced,
        precision: Precision,
    ) -> None:
        self.group, self.shard, self.tiling, self.dtype = group, shard, tiling, dtype
        self.both, self.reduced, self.precision = both, reduced, precision
        self._gathered_codes: bool | None = None  # the last gather
        self._asked: tuple[int, int] | None = None  # when it was looked up whether the scale has a past
        self._has_past = False
        self._picked: Tensor | None = None

    def extend(self) -> None:
        extend_gather(self.shard, self.before, self.after)

    def before(self, mesh: Any) -> tuple[tuple[Tensor, ...], bool]:
        """Return what this process gives to the gather, and whether that is codes. Called by torch."""
        wanted = gathers_for(self.group)
        is_enough = self.both or self.group.post_forward_mesh_info is not None
        codes = is_enough and (wanted == "forward" or (wanted == "backward" and self.both))
        if self._gathered_codes not in (None, codes):
            self.shard.all_gather_outputs = []  # torch makes them anew, for other sizes
        self._gathered_codes = codes
        w_CK = padded_shard(self.shard).to(self.dtype)
        return (self._quantized(w_CK, mesh.get_group()) if codes else (w_CK,)), codes

    def after(
        self, outputs: tuple[Tensor, ...], codes: bool, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the weight for its layer's turn, or put what was gathered into `out`, the weight of earlier turns. Called by
        torch."""
        held = self._whole(outputs) if codes else outputs[0][: self.tiling.rows]
        if out is None:
            return Gathered(held, self.dtype), ()
        assert isinstance(out, Gathered)
        out.held = held
        return None

    def _quantized(self, w_CK: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
        """Return codes, scales, scales of the scales, and for delayed scaling the shard's own amax."""
        q, tiling = self.tiling.quantizer, self.tiling
        own: tuple[Tensor, ...] = ()
        above, amax = 0, None
        if self.reduced == "without a past":
            amax, own = self._in_force(w_CK, group)
        elif self.reduced == "whole weight":
            amax = _largest(kernels.amax(w_CK), group)
        elif self.reduced == "cut blocks":
            above, first = tiling.above(group.rank()), tiling.first(group.rank())
            w_CK = F.pad(w_CK, (0, 0, above, 0))
            own_SC = kernels.amax(w_CK, *q.scaling.tile())
            every_RC = own_SC.new_zeros(tiling.grid)
            every_RC[first : first + len(own_SC)] = own_SC
            amax = _largest(every_RC, group)[first : first + len(own_SC)]
        Q = quantize(w_CK, q, amax=amax)
        scales = Q.scales.contiguous()
        if len(scales) < tiling.slots:
            scales = torch.cat([scales, scales.new_zeros((tiling.slots - len(scales), *scales.shape[1:]))])
        return Q.codes[above:].contiguous().view(torch.uint8), scales, *Q.second, *own

    def _in_force(self, w_CK: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the amax that quantizes the weight, and the shard's own, for the layer to note.

        Until its slot has a past, a weight is quantized by its own amax, and all processes must agree that it is so. They look
        after the same steps, when the slot is the same everywhere. A look waits for the device; once there is a past, none
        follows (a weight of zeros gets none, and is looked at in each step).
        """
        scales, slot = self.precision.scales, self.precision.first_slot + SLOTS["w"]
        assert scales is not None
        own = kernels.amax(w_CK)
        now = scales.rolled, scales.rewound
        if self._asked is None or self._asked[1] != scales.rewound or not (self._has_past or self._asked == now):
            self._asked, self._has_past = now, bool(scales.views(slot, own.device)[0] > 0)
        return scales.in_force(slot, own if self._has_past else _largest(own, group)), (own,)

    def _whole(self, outputs: tuple[Tensor, ...]) -> GatheredCodes:
        tiling, amax = self.tiling, None
        codes, scales, *rest = outputs
        if self.reduced == "without a past":
            amax = _joined(rest.pop())
        if isinstance(tiling.quantizer.scaling, PerTensor):
            scales = _joined(scales)
        elif tiling.picked is None:
            scales = scales[: -(-tiling.rows // tiling.tile)]
        else:
            if self._picked is None:
                self._picked = torch.tensor(tiling.picked, device=scales.device)
            scales = scales.view(torch.uint8)[self._picked].view(scales.dtype)
        codes = codes[: tiling.rows].view(tiling.parts[0].dtype)
        second = tuple(_joined(t) for t in rest)
        return GatheredCodes(codes, scales, tiling.quantizer, tiling.columns, second, tiling.rows, amax)


def _joined(each_R1: Tensor) -> Tensor:
    """Return the largest of the shards' numbers [1, 1]: they are the same, or amaxes, but for the NaN of a shard that has one."""
    return each_R1.amax(0, keepdim=True)


def _largest(amax: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return amaxes over all shards. Not every backend lets a NaN win: inf gives the same scale, NaN."""
    amax = amax.nan_to_num(nan=torch.inf, posinf=torch.inf)
    dist.all_reduce(amax, dist.ReduceOp.MAX, group)
    return amax
