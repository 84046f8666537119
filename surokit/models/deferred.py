"""Give a model on the meta device its values layer by layer, so that whoever divides it never holds all of them.

A layer is made whole in a twin on the meta device, handed on, and let go. What the recipe has made of the model (weights stored as
codes and scales, adapters) is made of the layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from surokit.models.sparse import SparseMLP
from surokit.nn.drawn import take_drawn
from surokit.nn.experts import ExpertsLinear
from surokit.nn.linear import Linear
from surokit.nn.norm import RMSNorm

if TYPE_CHECKING:
    from surokit.models.decoder import Decoder

Part = tuple[str, Tensor]  # the name of a parameter, and its values


class Deferred(Protocol):
    """A Deferred is where the values of a model on the meta device come from."""

    def parts(self, model: Decoder, device: torch.device) -> Iterator[Part]:
        """Yield every parameter of `model` whole, on `device`, layer after layer; a layer's live until the next one's come."""
        ...


class InitialWeights:
    """An InitialWeights draws the first values of a Decoder, as one that has memory draws them (other numbers of the same seed)."""

    @torch.no_grad()
    def parts(self, model: Decoder, device: torch.device) -> Iterator[Part]:
        twin, sparse = twin_of(model), ""
        for name, module in twin.named_modules():
            if (sparse and name.startswith(sparse)) or (model.config.tied and module is twin.lm_head):
                continue
            sparse = f"{name}." if isinstance(module, SparseMLP) else ""
            inside = dict(module.named_modules(prefix=name)) if sparse else {name: module}
            for each in inside.values():
                for key, p in each.named_parameters(recurse=False):
                    setattr(each, key, nn.Parameter(torch.empty_like(p, device=device)))
                    if isinstance(each, RMSNorm):
                        nn.init.ones_(getattr(each, key))
            for path, each in inside.items():
                twin.initialize(path, each)
            yield from handed_on(name, module, model)
        yield from adapters(model, device)


def twin_of(model: Decoder) -> Decoder:
    """Return a Decoder of the same shape on the meta device, without a recipe."""
    return type(model)(model.config, device="meta", dtype=model.model.norm.weight.dtype)


def handed_on(name: str, module: nn.Module, model: Decoder) -> Iterator[Part]:
    """Yield what a layer of the twin holds, in the form that `model` holds it, and let it go."""
    if isinstance(module, SparseMLP):
        targets = model.get_submodule(name).experts.projections  # type: ignore[union-attr]
        for key, weight in module.experts.projections.items():
            as_in(targets[key], weight)  # type: ignore[index]
        parts = [(f"{name}.{key}", p) for key, p in module.named_parameters()]
    else:
        if isinstance(module, Linear):
            as_in(model.get_submodule(name), module)
        parts = [(f"{name}.{key}", p) for key, p in module.named_parameters(recurse=False)]
    for key, p in parts:
        if not p.is_meta:  # a tied head comes with the embedding
            yield key, p.detach()
    if parts:
        module.to("meta")


def as_in(target: Any, layer: Linear | ExpertsLinear) -> None:
    """Store a layer of the twin as the model's own layer is stored, or decode it where that is not."""
    storage = getattr(target, "storage", None)
    if storage is not None:
        layer.store(storage)
    elif layer.storage is not None:
        layer.set_dense(layer.dense_weight(target.weight.dtype))


def adapters(model: Decoder, device: torch.device) -> Iterator[Part]:
    """Yield the first values of the adapters, as they were drawn when the recipe was applied."""
    for name, module in model.named_modules():
        for key, values in take_drawn(module).items():
            yield f"{name}.{key}", values.to(device)
