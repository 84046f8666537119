"""A Part is what one process holds of a tensor that is divided over processes, and where it lies in the whole.

Checkpoints are made of parts (train/sharded_files.py), so that any number of processes can read what any other number wrote. A
DTensor says itself where its shard lies. An optimizer keeps more than that of a shard, in tensors of its own; its method
`held(p, name)` says of each entry of the state of parameter `p` what it is:

    None          a DTensor, or the same on every process
    Rows          a plain tensor along the shard's rows
    "own"         of this shard alone, which no other division of the parameter has
    "same"        the same on every process

Torch's optimizers, which have no such method, hold the first kind only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from surokit.optim.tensors import is_sharded, local

Place = tuple[int, ...]  # of a piece's first element in the whole


class Rows(NamedTuple):
    """A Rows says that a tensor has `lead` dimensions of its own and then the first `dims` of the parameter's shard.

    Where there are leading ones, the parameter's are flattened into one.
    """

    lead: int
    dims: int


Held = Rows | Literal["own", "same"] | None


@dataclass(frozen=True, eq=False)
class Part:
    """A Part is some pieces of a tensor of shape `whole`, each a plain tensor at its place. Pieces share the tensor's memory."""

    whole: tuple[int, ...]
    pieces: dict[Place, Tensor]

    @property
    def piece(self) -> Tensor:
        """Return the only piece."""
        (piece,) = self.pieces.values()
        return piece

    @staticmethod
    def of(t: Tensor) -> Part:
        """Return what this process holds of a DTensor, or all of any other tensor."""
        piece = local([t.detach()])[0]
        return Part(tuple(t.shape), {place_of(t): piece})

    def empty_like(self, dtype: torch.dtype) -> Part:
        """Return a part with the same pieces on the host, not filled."""
        return Part(
            self.whole, {place: torch.empty(t.shape, dtype=dtype, device="cpu") for place, t in self.pieces.items()}
        )


def place_of(t: Tensor) -> Place:
    """Return where this process's shard of a DTensor begins; zeros for any other tensor."""
    if not is_sharded(t):
        return (0,) * t.ndim
    (chunk,) = t.__create_chunk_list__()  # type: ignore[attr-defined]
    return tuple(chunk.offsets)


def held_by(optimizer: torch.optim.Optimizer, p: Tensor, name: str) -> Held:
    """Return what an entry of the state of `p` is to its optimizer."""
    held: Any = getattr(optimizer, "held", None)
    return None if held is None else held(p, name)


def rows_part(p: Tensor, value: Tensor, rows: Rows) -> Part:
    """Return the part that a state tensor along the rows of parameter `p` is.

    value: [*lead, product of the shard's first `dims` sizes], or of the shard's shape where nothing leads.
    """
    whole, shape, place = rows_layout(p, value.shape[: rows.lead], rows)
    return Part(whole, {place: value.detach().view(shape)})


def rows_layout(p: Tensor, lead: Sequence[int], rows: Rows) -> tuple[tuple[int, ...], tuple[int, ...], Place]:
    """Return the shape of the whole, of this process's piece, and the piece's place."""
    shard = tuple(local([p])[0].shape[: rows.dims])
    place = (*(0 for _ in lead), *place_of(p)[: rows.dims])
    return (*lead, *p.shape[: rows.dims]), (*lead, *shard), place


def from_rows(piece: Tensor, rows: Rows) -> Tensor:
    """Return a piece of a part as the optimizer holds it."""
    if not rows.lead:
        return piece
    return piece.reshape(*piece.shape[: rows.lead], math.prod(piece.shape[rows.lead :]))


def as_shard(p: Tensor, piece: Tensor) -> Tensor:
    """Return a DTensor divided as `p` is whose shard here is `piece`; the piece itself where `p` is whole."""
    if not is_sharded(p):
        return piece
    from torch.distributed.tensor import DTensor

    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    return DTensor.from_local(piece, mesh, placements, run_check=False, shape=p.shape, stride=p.stride())


def overlaps(place: Place, shape: Sequence[int], other: Place, other_shape: Sequence[int]) -> tuple[slice, ...] | None:
    """Return which elements of the first box are in the second one; None where there are none."""
    cut = []
    for start, size, begin, length in zip(place, shape, other, other_shape, strict=True):
        low, high = max(start, begin), min(start + size, begin + length)
        if low >= high:
            return None
        cut.append(slice(low - start, high - start))
    return tuple(cut)
