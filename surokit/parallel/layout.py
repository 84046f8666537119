"""A layout says among how many processes a model is divided, and how many copies of it there are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

Communicate = Literal["numbers", "codes"]
START = "start them with surokit.launch(train, gpus={0}) or torchrun --nproc-per-node {0}"


@dataclass(frozen=True)
class Parallel:
    """A Parallel says how the processes of a run divide a model; each of them trains on batches of its own.

    shard: processes that hold one copy of the weights between them (FSDP2); 1 keeps the weights whole.
    replicate: copies. With shard=1 that is DistributedDataParallel, with both above 1 a two-dimensional mesh (HSDP). A None is
        filled so that the two multiply to the number of processes; of two, shard takes all.
    reshard: True gathers weights for each forward and each backward and keeps a shard between them (ZeRO-3); False gathers them
        once a step and keeps them for backward (ZeRO-2). Gradients and optimizer state are divided in both.
    communicate: "numbers" gathers weights that train in their own dtype; "codes" as the codes and scales that their layers
        make of them, where that is less, for the same losses and gradients bit for bit. Stored weights are gathered as they are.
    """

    shard: int | None = None
    replicate: int | None = None
    reshard: bool = True
    communicate: Communicate = "numbers"

    def __post_init__(self) -> None:
        for name, value in (("shard", self.shard), ("replicate", self.replicate)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(
                    f"Parallel({name}={value!r}): a whole number of processes, at least 1, or None for the rest."
                )
        if not isinstance(self.reshard, bool):
            raise ValueError(f"Parallel(reshard={self.reshard!r}): True (ZeRO-3) or False (ZeRO-2).")
        if self.communicate not in get_args(Communicate):
            raise ValueError(f"Parallel(communicate={self.communicate!r}): 'numbers' or 'codes'.")

    def over(self, world: int) -> Parallel:
        """Return this layout over `world` processes, with both numbers filled in. ValueError where they do not multiply to it."""
        shard, replicate = self.shard, self.replicate
        if shard is None:
            shard = world // (replicate or 1)
        if replicate is None:
            replicate = world // (shard or 1)
        if shard * replicate != world:
            wanted = (self.shard or 1) * (self.replicate or 1)
            there = "there is 1 process" if world == 1 else f"there are {world} processes"
            asked = f"Parallel(shard={self.shard}, replicate={self.replicate})"
            raise ValueError(f"{asked} needs {_number_of(self, wanted)}, and {there}: {START.format(wanted)}.")
        return replace(self, shard=shard, replicate=replicate)

    @property
    def is_sharded(self) -> bool:
        """Return whether weights are divided; for a layout whose numbers are filled in."""
        return (self.shard or 1) > 1

    @property
    def zero(self) -> int:
        """Return ZeRO's stage: 3 or 2 where weights are divided, else 0."""
        return (3 if self.reshard else 2) if self.is_sharded else 0


def _number_of(parallel: Parallel, wanted: int) -> str:
    if parallel.shard is None or parallel.replicate is None:
        return f"a multiple of {wanted} processes"
    return f"{wanted} processes"
