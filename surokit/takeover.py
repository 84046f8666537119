"""Take over the weights that other libraries quantized, and say what became of them.

`prequantized` reads such a weight; here its layer becomes ours with it, and the model forgets that it was another's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from surokit.layers import Layer, OwnLayer, adopt, is_left_quantized, module_of
from surokit.nn.experts import ExpertsLinear, StoredExperts, adopt_stored
from surokit.prequantized import Library, library_of
from surokit.quantized import Quantized
from surokit.quantizer import Quantizer
from surokit.recipe import recipes
from surokit.report import mib

# what transformers leaves at a model that a library quantized
_SAID_QUANTIZED = ("hf_quantizer", "is_quantized", "quantization_method", "is_loaded_in_4bit", "is_loaded_in_8bit")


@dataclass(frozen=True)
class Came:
    """A Came is a weight that another library quantized."""

    library: Library
    weight: Quantized | StoredExperts
    compute_dtype: torch.dtype | None

    @property
    def words(self) -> str:
        return f"{self.library.name} {self.weight.quantizer}"


def read(name: str, layer: Layer) -> Came | None:
    """Return the weight of a layer as another library quantized it, or None."""
    library = library_of(module_of(layer))
    if library is None:
        return None
    try:
        if isinstance(layer, ExpertsLinear):
            return Came(library, library.read(layer.module, layer.name), None)
        return Came(library, library.read(layer), library.compute_dtype(layer))
    except ValueError as error:
        raise ValueError(
            f"The weight of {name}, quantized by {library.name}, cannot be taken over: {error}. Load the model without this "
            f'quantization and give a recipe that stores its weights, or leave the layer as it is with recipe.keep("{name}").'
        ) from error


def take_over(
    model: nn.Module, layers: Sequence[tuple[str, Layer]], came: Mapping[str, Came], dtype: torch.dtype
) -> None:
    """Make layers of other libraries ours, with the codes and scales that they have. dtype: of the model."""
    experts: dict[nn.Module, dict[str, Came]] = {}
    for name, layer in layers:
        if name not in came:
            continue
        if isinstance(layer, ExpertsLinear):
            experts.setdefault(layer.module, {})[layer.name] = came[name]
            continue
        library, weight, computes_in = came[name].library, came[name].weight, came[name].compute_dtype
        assert isinstance(weight, Quantized)
        library.forget(layer)
        own = adopt(layer)
        own.set_stored(weight)
        own.compute_dtype = computes_in if computes_in != dtype else None
    for module, weights in experts.items():
        next(iter(weights.values())).library.forget(module)
        adopt_stored(module, {n: one.weight for n, one in weights.items() if isinstance(one.weight, StoredExperts)})
    for library in {one.library for one in came.values()}:
        library.restore(model)
    if not any(is_left_quantized(module) for module in model.modules()):
        _forget_quantizer(model)


def _forget_quantizer(model: nn.Module) -> None:
    """Remove what says that another library quantized the model: its Trainer, .to() and PEFT ask for it.

    A config that others may hold stays as it is: the model gets a copy that does not say it.
    """
    copies: dict[int, Any] = {}
    for module in model.modules():
        config: Any = vars(module).get("config")
        if hasattr(config, "quantization_config"):
            if id(config) not in copies:
                copies[id(config)] = copy.copy(config)
                del copies[id(config)].quantization_config
            vars(module)["config"] = copies[id(config)]
        for name in _SAID_QUANTIZED:
            vars(module).pop(name, None)


def notes_of(
    layers: Sequence[tuple[str, OwnLayer]], came: Mapping[str, Came], again: set[str], whys: Mapping[str, str]
) -> list[str]:
    """Return what became of weights that another library had quantized, what it costs, and how to keep their codes.

    again: the layers whose weights were quantized again. whys: why a layer is not stored, by a rule for example.
    """
    groups: dict[tuple[str, str, str], list[tuple[OwnLayer, Came]]] = {}
    for name, layer in layers:
        if name in came:
            fate = "decoded" if layer.storage is None else "again" if name in again else "kept"
            why = whys.get(name, "") if fate == "decoded" else ""
            groups.setdefault((came[name].words, fate, why), []).append((layer, came[name]))
    notes = []
    for (words, fate, why), members in groups.items():
        who, are = (f"{len(members)} weights of {words}", "are") if len(members) > 1 else (f"1 weight of {words}", "is")
        if fate == "kept":
            notes.append(f"{who} {'keep their' if are == 'are' else 'keeps its'} codes and scales")
            continue
        layer, first = members[0]
        had = sum(one.weight.nbytes for _, one in members)
        has = sum(p.nbytes for layer, _ in members for p in (layer.weight, *layer.stored_scales))
        what = f"decoded to {str(layer.weight.dtype).removeprefix('torch.')}"
        if fate == "again":
            what = f"quantized again as {layer.storage}, so that both roundings count"
        else:
            what += " and may train" * layer.weight.requires_grad
        keeps = (
            f"the {why}"
            if why.startswith("rule")
            else f"recipe.store({_as_code(first.weight.quantizer)}) keeps their codes"
        )
        notes.append(f"{who} {are} {what}: {mib(had)} became {mib(has)}; {keeps}")
    return notes


def _as_code(q: Quantizer) -> str:
    """Return what a user types for the storage `q`."""
    named = next((r for r in recipes.values() if r.storage == q), None)
    if named:
        return f"surokit.{named.name.upper()}"
    return f"surokit.Quantizer(surokit.{q.format.name.upper()}, surokit.{q.scaling!r})"
