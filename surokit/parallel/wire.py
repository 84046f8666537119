"""Count what processes send each other for a step of one batch: weights that are gathered, gradients that are added up.

FSDP2 gathers the parameters of a block together, once for forward, and once more for backward where they are not kept (ZeRO-3);
`surokit.parallel.gather` chooses what of them. Gradients are added up in the dtype of the weights.

    gathered    the padded shard of each parameter, to every other process of its shards
    amaxes      what codes need to know of the whole weight before they are made
    gradients   of each parameter that trains: its padded shards to those that keep them, then over the copies

Each process sends and receives as many bytes: of R processes that gather shards of n bytes, (R - 1) n. An amax counts once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import nn

from surokit.parallel.codes import CodesOfShard
from surokit.parallel.gather import ShardedParameter, sharded, way_of
from surokit.parallel.processes import Processes
from surokit.tables import html_table, text_table
from surokit.torch_private import is_resharded_to_fewer
from surokit.units import counted, gib

BF16_BYTES = 2


@dataclass(frozen=True)
class Flow:
    """A Flow is what parameters that are gathered alike send in a step: bytes that each process receives.

    what: is gathered of them, a storage, a quantizer or a dtype. parameters: how many. elements: of the weights, whatever they are
    stored in. whole: bytes of all shards of a gather in forward, padding included. forward, backward: gathers; 0 in backward where
    the weights stayed. amaxes: reduced before the gathers. gradients: added up. without_codes: what the gathers would receive
    as numbers, in bfloat16 for stored weights. why: what there is to say about it.
    """

    what: str
    parameters: int
    elements: int
    whole: int = 0
    forward: int = 0
    backward: int = 0
    amaxes: int = 0
    gradients: int = 0
    without_codes: int = 0
    why: str = ""

    @property
    def gathered(self) -> int:
        """Return the bytes of weights that a step receives, with the amaxes before them."""
        return self.forward + self.backward + self.amaxes

    @property
    def per_element(self) -> float:
        """Return the bytes that an element takes in the gather of forward; 0 where nothing is gathered."""
        return self.whole / self.elements

    def __add__(self, other: Flow) -> Flow:
        """Return both together, which are of one kind."""
        counts = [field.name for field in fields(self) if field.type == "int"]
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in counts})


@dataclass(frozen=True)
class Wire:
    """A Wire says what each process receives from others in a step of one batch, by kind of parameter. It prints as a table.

    processes: how many hold a shard of each copy. flows: a row for each kind, the largest first.
    """

    processes: int
    flows: tuple[Flow, ...]

    @property
    def gathered(self) -> int:
        """Return the bytes of weights that a step receives, with the amaxes before them."""
        return sum(flow.gathered for flow in self.flows)

    @property
    def without_codes(self) -> int:
        """Return the bytes of weights that it would receive as numbers."""
        return sum(flow.without_codes for flow in self.flows)

    @property
    def gradients(self) -> int:
        """Return the bytes of gradients."""
        return sum(flow.gradients for flow in self.flows)

    @property
    def line(self) -> str:
        """Return one line: how much of what a process receives."""
        gradients = f"{_size(self.gradients)} of gradients"
        if self.processes == 1:
            return f"In a step of one batch a process receives {gradients}; it has all weights."
        return (
            f"In a step of one batch a process receives {_size(self.gathered)} of weights "
            f"({_size(self.without_codes)} without codes) and {gradients}."
        )

    def _cells(self) -> list[Sequence[str]]:
        return [
            (
                flow.what,
                counted(flow.parameters, "parameter"),
                f"{flow.elements:,}",
                f"{flow.per_element:.3g}" if self.processes > 1 else "",
                *map(_size, (flow.forward, flow.backward, flow.without_codes, flow.gradients)),
                flow.why,
            )
            for flow in self.flows
        ]

    def __repr__(self) -> str:
        return "\n".join([self.line, text_table(self._cells(), header=_HEADER, right=_RIGHT)])

    def _repr_html_(self) -> str:
        return html_table(self._cells(), header=_HEADER, right=_RIGHT, title=self.line)


_HEADER = ("gathered as", "of", "elements", "bytes each", "forward", "backward", "without codes", "gradients", "")
_RIGHT = range(1, 8)


def _size(nbytes: int) -> str:
    return gib(nbytes / 2**30) if nbytes >= 2**20 else f"{nbytes / 2**10:.3g} KiB" if nbytes else "0"


def wire(model: nn.Module, processes: Processes) -> Wire:
    """Count what the processes that train a model send each other; from shapes alone, nothing is exchanged.

    It is assumed that every parameter that trains gets a gradient.
    """
    shards, copies = processes.layout.shard or 1, processes.layout.replicate or 1
    found: dict[tuple[str, str], Flow] = {}
    for flow in _of_shards(model, copies) if shards > 1 else _of_copies(model, copies):
        kind = flow.what, flow.why
        found[kind] = found[kind] + flow if kind in found else flow
    return Wire(shards, tuple(sorted(found.values(), key=lambda flow: -max(flow.without_codes, flow.gradients))))


def _of_copies(model: nn.Module, copies: int) -> Iterator[Flow]:
    for p in model.parameters():
        gradients = _added_up(p.nbytes, copies) if p.requires_grad else 0
        why = "" if p.requires_grad else "does not train"
        yield Flow(f"not, {_name(p.dtype)}", parameters=1, elements=p.numel(), gradients=gradients, why=why)


def _of_shards(model: nn.Module, copies: int) -> Iterator[Flow]:
    for p in sharded(model):
        others = p.ranks - 1
        again = _received_again(p)
        shard = math.prod(p.shard.padded_sharded_param_size)
        plain = shard * p.dtype.itemsize
        forward, backward, amaxes, numbers = plain, plain, 0, plain
        extension = p.extension
        if p.storage is not None:
            what, why = f"stored as {p.storage}", ""
            numbers = -(-p.numbers // p.ranks) * BF16_BYTES
        elif isinstance(extension, CodesOfShard):
            what, why = f"codes {extension.tiling.quantizer}", _REDUCED.get(extension.reduced, "")
            forward = extension.tiling.nbytes
            backward = forward if extension.both else plain
            if extension.reduced in ("cut blocks", "whole weight"):
                amaxes = extension.tiling.amax_bytes * (1 + (p.reshards and extension.both))
            if not extension.both:
                why = f"{_name(p.dtype)} in backward: it wants other codes" + (f"; {why}" if why else "")
        else:
            way = way_of(p)
            what, why = _name(p.dtype), way.why if way.quantizer is None else "codes were not asked for"
        gradients = 0
        if p.shard.sharded_param.requires_grad:
            reduced = shard * (p.group.mp_policy.reduce_dtype or p.dtype).itemsize
            gradients = reduced * others + _added_up(reduced, copies)
        yield Flow(
            what,
            parameters=1,
            elements=p.numbers,
            whole=forward * p.ranks,
            forward=forward * others,
            backward=backward * again,
            amaxes=amaxes,
            gradients=gradients,
            without_codes=numbers * (others + again),
            why=why,
        )


def _received_again(p: ShardedParameter) -> int:
    """Return how many shards a process receives for backward."""
    if not p.reshards:
        return 0
    if not is_resharded_to_fewer(p.group):
        return p.ranks - 1
    fewer: int = p.group.post_forward_mesh_info.shard_mesh_size  # each holds a larger shard
    return p.ranks // fewer * (fewer - 1)


def _added_up(nbytes: int, copies: int) -> int:
    return 2 * (copies - 1) * nbytes // copies


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_REDUCED = {
    "cut blocks": "amaxes of blocks are reduced, since shards cut them",
    "whole weight": "the weight's amax is reduced",
    "without a past": "an amax is reduced until the scale has a past",
}


__all__ = ["Flow", "Wire", "wire"]
