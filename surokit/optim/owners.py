"""Share the work on whole matrices out among the processes that hold them in common: each matrix has an owner, who works for all.

In a turn n processes take n matrices, and each owns one. Where matrices are cut, an all-to-all brings the shards
of each to its owner, and another takes back what the owner made of them; where processes have copies, the owner sends it to the
others. Every process has the same matrices in the same order, so that all of them call the same exchanges.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from surokit.optim.parts import as_shard, place_of
from surokit.optim.tensors import is_sharded

Shape = Sequence[int]  # of a whole matrix


class Holders(Protocol):
    """Holders are the processes that hold matrices in common, and work on `at_a_time` of them in a turn."""

    @property
    def at_a_time(self) -> int: ...

    @property
    def number(self) -> int:
        """Return which matrix of a turn this process owns; there is none where the turn has no more than so many."""

    def bring(self, pieces: Iterable[Tensor], shapes: Sequence[Shape]) -> Tensor | None:
        """Return the whole matrix that this process owns of a turn's; None where it owns none.

        pieces: what this process holds of each; all are taken, and those kept that an owner needs.
        """

    def give(self, made: Tensor | None, shapes: Sequence[Shape], like: Tensor) -> Iterator[Tensor]:
        """Yield this process' piece of what was made of each, in their order.

        made: of the one that it owns. like: a tensor on the device, of the dtype that is made.
        """


@dataclass(frozen=True)
class Alone:
    """Alone is one process, which holds matrices whole and works on them by itself."""

    at_a_time, number = 1, 0

    def bring(self, pieces: Iterable[Tensor], shapes: Sequence[Shape]) -> Tensor | None:
        (whole,) = pieces
        return whole

    def give(self, made: Tensor | None, shapes: Sequence[Shape], like: Tensor) -> Iterator[Tensor]:
        assert made is not None
        yield made


@dataclass(frozen=True, eq=False)
class Gathered:
    """Gathered are processes that hold a matrix cut along more than one dimension of a mesh: each gathers it and works on all."""

    p: Any  # the DTensor of which a piece is the shard here
    at_a_time, number = 1, 0

    def bring(self, pieces: Iterable[Tensor], shapes: Sequence[Shape]) -> Tensor | None:
        (piece,) = pieces
        whole: Tensor = as_shard(self.p, piece).full_tensor()  # type: ignore[attr-defined]
        return whole

    def give(self, made: Tensor | None, shapes: Sequence[Shape], like: Tensor) -> Iterator[Tensor]:
        assert made is not None
        here = self.p.to_local().shape
        yield made[tuple(slice(first, first + size) for first, size in zip(place_of(self.p), here))]


@dataclass(frozen=True)
class Owners:
    """Owners are processes of which each owns one matrix of a turn.

    shards: the group that holds a matrix between them, cut along `dim` as torch.chunk cuts. copies: the group of which each process
    holds the same; the first matrices are owned in the first copy. None for a group of one.
    """

    shards: dist.ProcessGroup | None
    copies: dist.ProcessGroup | None
    dim: int = 0

    @property
    def at_a_time(self) -> int:
        return _size(self.shards) * _size(self.copies)

    @property
    def number(self) -> int:
        return _rank(self.copies) * _size(self.shards) + _rank(self.shards)

    def bring(self, pieces: Iterable[Tensor], shapes: Sequence[Shape]) -> Tensor | None:
        of_copy = self._of_copy(_rank(self.copies), len(shapes))
        held = [piece for number, piece in enumerate(pieces) if number in of_copy]
        if self.shards is None or not held:
            return held[0] if held else None
        cuts = self._cuts(shapes[self.number]) if self.number in of_copy else []
        shards = self._exchange(held, cuts, held[0])
        return torch.cat(shards, self.dim) if shards else None

    def give(self, made: Tensor | None, shapes: Sequence[Shape], like: Tensor) -> Iterator[Tensor]:
        for copy in range(_size(self.copies)):
            here = [self._cuts(shapes[number])[_rank(self.shards)] for number in self._of_copy(copy, len(shapes))]
            if copy != _rank(self.copies):
                pieces = [like.new_empty(cut) for cut in here]
            else:
                shards = [] if made is None else made.split([cut[self.dim] for cut in self._cuts(made.shape)], self.dim)
                pieces = [*shards] if self.shards is None else self._exchange(shards, here, like)
            for piece in pieces:
                sent = piece.contiguous()
                if self.copies is not None:
                    dist.broadcast(sent, dist.get_global_rank(self.copies, copy), self.copies)
                yield sent

    def _exchange(self, sent: Sequence[Tensor], shapes: Sequence[Shape], like: Tensor) -> list[Tensor]:
        """Send each process of a copy one tensor, where there are fewer nothing to the last ones, and return those that came, of so
        many shapes."""
        flat = torch.cat([like.new_empty(0), *(t.reshape(-1) for t in sent)])
        none = [0] * _size(self.shards)
        given, taken = ([*sizes, *none][: len(none)] for sizes in ([t.numel() for t in sent], map(math.prod, shapes)))
        received = flat.new_empty(sum(taken))
        dist.all_to_all_single(received, flat, taken, given, group=self.shards)
        return [part.view(shape) for part, shape in zip(received.split(taken), shapes)]

    def _of_copy(self, copy: int, matrices: int) -> range:
        """Return which of so many matrices are owned in a copy."""
        return range(matrices)[copy * _size(self.shards) : (copy + 1) * _size(self.shards)]

    def _cuts(self, shape: Shape) -> list[tuple[int, ...]]:
        """Return the shapes of a matrix' shards."""
        size, number = shape[self.dim], _size(self.shards)
        full = -(-size // number)
        sizes = [max(0, min(full, size - full * i)) for i in range(number)]
        return [(*shape[: self.dim], each, *shape[self.dim + 1 :]) for each in sizes]


def holders_of(p: Tensor, copies: dist.ProcessGroup | None = None) -> Holders:
    """Return who holds a parameter's matrices: of two dimensions one, of three one for each expert, whole in one process.

    copies: the group of which every process has all parameters that are no DTensor; None where this process has its own.
    """
    if not is_sharded(p):
        return Owners(None, copies) if _size(copies) > 1 else Alone()
    from torch.distributed.tensor import Shard

    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    axes = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    same = [axis for axis in axes if placements[axis].is_replicate()]
    cut = [axis for axis in axes if axis not in same and p.ndim == 2]
    if len(cut) > 1 or any(type(placements[axis]) is not Shard for axis in cut):
        return Gathered(p)
    shards, copies = (mesh.get_group(found[0]) if len(found) == 1 else None for found in (cut, same))
    if shards is None and copies is None:
        return Alone()
    return Owners(shards, copies, placements[cut[0]].dim if cut else 0)


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


def _rank(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else group.rank()
