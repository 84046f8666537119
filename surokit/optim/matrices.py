"""Decide which parameters of a model are hidden matrices, for an optimizer that treats a matrix as one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from surokit.optim.states import check_trains
from surokit.optim.tensors import is_sharded, is_vector

_TABLES = (nn.Embedding, nn.EmbeddingBag)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def muon_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups of what trains in a model: hidden matrices (use_muon=True), other matrices, and vectors, which get no
    weight decay.

    Hidden is every parameter of two dimensions, and of three (one matrix for each expert), but those of embeddings, of the output
    head, also where both share a weight, of convolutions, and biases, of which experts have a row each. Adapters of a hidden
    matrix are hidden matrices. The head is what `get_output_embeddings()` gives, or a module called lm_head, or else the only one
    that has the shape of the embedding.
    ValueError where there is no such module, or where nothing trains.
    """
    check_trains("Muon", list(model.parameters()))
    others = [*_embeddings(model), *_heads(model), *(m for m in model.modules() if isinstance(m, _CONVOLUTIONS))]
    outer = {id(p) for module in others for p in module.parameters()}
    groups: dict[str, list[Tensor]] = {"hidden": [], "others": [], "vectors": []}
    named = dict(model.named_parameters())
    for name, p in named.items():
        if p.requires_grad:
            is_hidden = p.ndim in (2, 3) and id(p) not in outer
            kind = "vectors" if is_vector(name, p, named) else "hidden" if is_hidden else "others"
            groups[kind].append(p)
    return [
        {"params": params, "use_muon": kind == "hidden", "weight_decay": 0.0 if kind == "vectors" else weight_decay}
        for kind, params in groups.items()
        if params
    ]


def why_no_matrix(p: Tensor) -> str:
    """Return in a clause why a parameter is neither a matrix nor a matrix for each expert; "" where it is."""
    if p.ndim not in (2, 3):
        return "has not two dimensions, or three with the experts first"
    if p.ndim == 3 and is_sharded(p) and any(each.is_shard() and not each.is_shard(0) for each in p.placements):  # type: ignore[attr-defined]
        return "is divided among processes within its experts, and only whole ones can be updated"
    return ""


def _stated(model: nn.Module, method: str) -> Iterator[nn.Module]:
    """Yield the modules that the model and those in it, if it is wrapped, state by a method of transformers."""
    for module in model.modules():
        with suppress(NotImplementedError):
            found = getattr(module, method, lambda: None)()
            if isinstance(found, nn.Module):
                yield found


def _embeddings(model: nn.Module) -> list[nn.Module]:
    return [*_stated(model, "get_input_embeddings"), *(m for m in model.modules() if isinstance(m, _TABLES))]


def _heads(model: nn.Module) -> list[nn.Module]:
    named = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "lm_head"]
    if stated := [*_stated(model, "get_output_embeddings"), *named]:
        return stated
    tables = [m for m in _embeddings(model) if isinstance(getattr(m, "weight", None), Tensor)]
    shape = max((_shape(m) for m in tables), default=None)
    alike = [m for m in model.modules() if m not in tables and _shape(m) == shape]
    if shape is None or len(alike) != 1:
        raise ValueError(
            f"Muon cannot tell which matrix of this {type(model).__name__} is its output head, which is AdamW's as embeddings are: "
            'give parameter groups, {"params": [...], "use_muon": True} for the hidden matrices and False for all else.'
        )
    return alike


def _shape(module: Any) -> tuple[int, ...]:
    weight = getattr(module, "weight", None)
    return tuple(weight.shape) if isinstance(weight, Tensor) else ()
