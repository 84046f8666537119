"""Count what processes send each other for a step of one batch: weights that are gathered, gradients that are added up.

FSDP2 gathers the parameters of a block, or of what is outside of all blocks, as they are held. Weights that a recipe stores are
codes and scales, which are final: they move as they are, and no scale has to be agreed on. Weights that train move in their own
dtype, and so do gradients.

    gathered   the padded shard of each parameter, to every other process of its shards: once for forward, once more for backward
               where weights are not kept gathered (ZeRO-3)
    reduced    the gradient of each parameter that trains: its padded shards to those that keep them, then over the copies

Each process sends and receives as many bytes: of R processes that gather shards of n bytes, (R - 1) n.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from surokit.applied import is_adapter
from surokit.layers import OwnLayer, recipe_layers
from surokit.parallel.layout import Parallel
from surokit.parallel.processes import Processes
from surokit.tables import html_table, text_table


@dataclass(frozen=True)
class Flow:
    """A Flow is what one kind of parameters sends in a step: bytes that each process receives.

    elements: of the weights, whatever they are stored in. gathered, reduced: bytes a step. per_element: bytes that an element
    takes when it is gathered.
    """

    what: str
    elements: int
    gathered: int
    reduced: int
    per_element: float


@dataclass(frozen=True)
class Wire:
    """A Wire says what each process receives from others in a step of one batch, by kind of parameter. It prints as a table.

    layout: how the model is divided. gathers: of a block's weights in a step.
    """

    layout: Parallel
    gathers: int
    flows: tuple[Flow, ...]

    @property
    def gathered(self) -> int:
        """Return the bytes of weights."""
        return sum(flow.gathered for flow in self.flows)

    @property
    def reduced(self) -> int:
        """Return the bytes of gradients."""
        return sum(flow.reduced for flow in self.flows)

    def _cells(self) -> list[list[str]]:
        rows = [
            [f.what, f"{f.elements:,}", f"{f.per_element:.2f}", _mb(f.gathered), _mb(f.reduced)] for f in self.flows
        ]
        return [*rows, ["all", "", "", _mb(self.gathered), _mb(self.reduced)]]

    def __repr__(self) -> str:
        return f"What a process receives in a step of one batch\n{text_table(self._cells(), header=_HEADER, right=range(1, 5))}"

    def _repr_html_(self) -> str:
        return html_table(
            self._cells(), header=_HEADER, right=range(1, 5), title="What a process receives in a step of one batch"
        )


def _mb(n: int) -> str:
    return f"{n / 1e6:,.3f} MB"


_HEADER = ("parameters", "elements", "bytes each", "gathered", "gradients")


def wire(model: nn.Module, processes: Processes) -> Wire:
    """Count what the processes that train a model send each other; from shapes alone, nothing is exchanged."""
    layout = processes.layout
    shards, copies = layout.shard or 1, layout.replicate or 1
    again = 2 if layout.is_sharded and layout.reshard else 1
    kinds = _kinds(model)
    found: dict[str, list[int]] = {}
    for name, p, in_block in _parameters(model):
        what, elements = kinds.get(name, (f"weights in {str(p.dtype).removeprefix('torch.')}", p.numel()))
        flow = found.setdefault(what, [0, 0, 0, 0])
        shard = _shard_bytes(p, shards)
        flow[0] += elements
        flow[3] += p.numel() * p.itemsize
        if layout.is_sharded:
            flow[1] += (shards - 1) * shard * (again if in_block else 1)
        if p.requires_grad:
            flow[2] += (shards - 1) * shard + (2 * (copies - 1) * shard // copies if copies > 1 else 0)
    flows = (Flow(what, n, gathered, reduced, held / n) for what, (n, gathered, reduced, held) in found.items())
    return Wire(layout, again, tuple(flows))


def _parameters(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield each parameter with its name, and whether it is gathered with a block, not with the rest of the model."""
    blocks = [name for name, m in model.named_modules() if name and isinstance(m, FSDPModule)]
    for name, p in model.named_parameters():
        yield name, p, any(name.startswith(f"{block}.") for block in blocks)


def _shard_bytes(p: Tensor, shards: int) -> int:
    """Return the bytes of a padded shard: FSDP2 divides the first dimension."""
    rows = p.shape[0] if p.ndim else 1
    return -(-rows // shards) * (p.numel() // max(rows, 1)) * p.itemsize


def _kinds(model: nn.Module) -> dict[str, tuple[str, int]]:
    """Return what the parameters of stored layers and adapters are called, and how many elements each stands for."""
    kinds: dict[str, tuple[str, int]] = {}
    for path, layer in recipe_layers(model):
        if isinstance(layer, OwnLayer) and layer.storage is not None and isinstance(layer, nn.Module):
            what = f"stored as {layer.storage}"
            kinds[f"{path}.weight"] = what, layer.out_features * layer.in_features
            kinds |= {f"{path}.{name}": (what, 0) for name in layer.storage.scaling.stored_as}
    kinds |= {name: ("adapters", p.numel()) for name, p in model.named_parameters() if is_adapter(name)}
    return kinds


__all__ = ["Flow", "Wire", "wire"]
