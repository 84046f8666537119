"""Find the layers of a model that a recipe can be applied to, and say why others are left.

These are torch's linear layers, ours, those whose weights another library has quantized (`prequantized`), and the weights of
experts (nn/experts.py). Adapters (ours and PEFT's) are never quantized, and a class with a forward of its own keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import MethodType
from typing import Any, TypeAlias, overload

import torch
from torch import nn

from surokit.applied import host_streams, is_adapter, recipe_of
from surokit.nn.experts import Experts, ExpertsLinear, adopt_experts, is_experts, unsupported, weights_of
from surokit.nn.linear import Linear
from surokit.prequantized import codes_of, library_of
from surokit.recipe import Recipe, within_block

Layer: TypeAlias = nn.Linear | ExpertsLinear  # what a recipe is applied to
OwnLayer: TypeAlias = Linear | ExpertsLinear  # and what it becomes


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield every linear layer but adapters. Subclasses that others made keep their own forward and are left alone."""
    for name, module in model.named_modules():
        if type(module) in (nn.Linear, Linear) and not is_adapter(name) and not _has_own_forward(module):
            yield name, module


def recipe_layers(model: nn.Module) -> Iterator[tuple[str, Layer]]:
    """Yield what `linear_layers` does, layers whose weights another library quantized, and the weights of experts."""
    plain = dict(linear_layers(model))
    for name, module in model.named_modules():
        if name in plain:
            yield name, plain[name]
        elif is_adapter(name):
            continue
        elif library := library_of(module):
            if _has_own_forward(module) and not library.replaced_forward(module):
                continue
            if shapes := library.shapes(module):
                for weight, size in shapes.items():
                    yield f"{name}.{weight}".lstrip("."), ExpertsLinear(module, weight, size)
            else:
                assert isinstance(module, nn.Linear)
                yield name, module
        elif isinstance(module, Experts) or (
            is_experts(module) and not unsupported(module) and not adapted_by_peft(name)
        ):
            for weight, layer in weights_of(module).items():
                yield f"{name}.{weight}".lstrip("."), layer


def adapted_by_peft(name: str) -> bool:
    """Return whether PEFT stands around experts of this name, and puts its sums in the place of their weights."""
    return name.endswith(".base_layer")


def parameter_of(name: str, layer: Layer) -> str:
    """Return the name of the parameter that holds the weight of a layer of this name."""
    return name if isinstance(layer, ExpertsLinear) else f"{name}.weight".lstrip(".")


def module_of(layer: Layer) -> nn.Module:
    """Return the module that holds the parameters of a layer."""
    return layer.module if isinstance(layer, ExpertsLinear) else layer


def check_taken_over(model: nn.Module, who: str) -> None:
    """Raise ValueError for weights that another library quantized and no recipe took over. who: the function that was asked."""
    for name, module in model.named_modules():
        if library := library_of(module):
            raise ValueError(
                f"{who}() needs layers that a recipe can compute, and {name} is quantized by {library.name}: "
                "surokit.apply(model, recipe) takes its weights over, with their codes where the recipe stores weights in the same "
                "way."
            )


@overload
def adopt(layer: nn.Linear) -> Linear: ...
@overload
def adopt(layer: Layer) -> OwnLayer: ...
def adopt(layer: Layer) -> OwnLayer:
    """Return the same object with our forward: whoever holds the layer or its parameters keeps holding them."""
    if isinstance(layer, ExpertsLinear):
        return adopt_experts(layer.module).projections[layer.name]
    if not isinstance(layer, Linear):
        layer.__class__ = Linear
        if hidden := vars(layer).get("_old_forward"):  # accelerate's hooks call the forward that they found
            assert isinstance(hidden, MethodType)
            vars(layer)["_old_forward"] = MethodType(Linear.forward, layer)
    assert isinstance(layer, Linear)
    return layer


def _has_own_forward(layer: nn.Module) -> bool:
    """Return whether a layer calls a forward that stands in the place of its class': another class would change nothing."""
    forward = vars(layer).get("forward")
    if forward is None or isinstance(layer, Linear) or getattr(forward, "follows_class", False):
        return False
    hidden = vars(layer).get("_old_forward")  # of accelerate: a method of the class, or of whoever came before
    return not (isinstance(hidden, MethodType) and hidden.__func__ is type(layer).forward)


def adapter_of(layer: OwnLayer) -> Iterator[torch.Tensor]:
    """Yield A and B of a layer's adapter; nothing without one."""
    if not layer.has_adapter:
        return
    if isinstance(layer, ExpertsLinear):
        yield from (layer.lora_A, layer.lora_B)
    else:
        yield from (layer.lora_A.weight, layer.lora_B.weight)


def shape_of(layer: Layer) -> tuple[int, ...]:
    """Return the shape of the weight as products see it: [N, K], or [E, N, K] of experts."""
    experts = (layer.experts,) if isinstance(layer, ExpertsLinear) else ()
    return *experts, layer.out_features, layer.in_features


def rows_of(layer: Layer, tokens: int) -> float | None:
    """Return how many rows a product of this layer has in a step of `tokens`; of experts each one's share, None if not known."""
    if not isinstance(layer, ExpertsLinear):
        return float(tokens)
    chosen = getattr(getattr(layer.module, "config", None), "num_experts_per_tok", None)
    return tokens * chosen / layer.experts if chosen else None


# -- what has to be done first


def check_convertible(model: nn.Module, recipe: Recipe, layers: Sequence[tuple[str, Layer]], blocks: int) -> None:
    """Raise ValueError where a recipe cannot be applied to this model, or would not have the effect that it promises."""
    kinds = {c.__name__: c.__module__.partition(".")[0] for m in model.modules() for c in type(m).__mro__}
    own = recipe_of(model)
    changes = recipe.frozen_base and not (own and own.has_parameters_of(recipe))  # parameters come and go
    if kinds.get("OptimizedModule") == "torch":
        raise ValueError(
            "The model is compiled, and its graphs hold the layers as they were: apply the recipe to the model that was given to "
            "torch.compile (model._orig_mod), and compile it afterwards."
        )
    if kinds.get("FullyShardedDataParallel") == "torch":
        raise ValueError(
            "The model is wrapped in FullyShardedDataParallel, which holds its weights flat and in parts: apply the recipe "
            "before wrapping it."
        )
    if changes and kinds.get("DistributedDataParallel") == "torch":
        raise ValueError(
            "The model is wrapped in DistributedDataParallel, which would not exchange the gradients of new adapters: apply the "
            "recipe to model.module before wrapping it."
        )
    if changes and any(type(p).__name__ == "DTensor" for p in model.parameters()):
        raise ValueError("The weights are sharded already (DTensor): apply the recipe before fully_shard().")
    _check_devices(model)
    if recipe.storage and any(".lora_magnitude_vector." in name for name, _ in model.named_parameters()):
        raise ValueError(
            "The model has DoRA adapters of PEFT, which compute with the numbers of a weight and not with its codes: take LoRA, or "
            "a recipe without storage."
        )
    foreign = [
        (name, module, codes)
        for name, module in model.named_modules()
        if not is_adapter(name) and library_of(module) is None and (codes := _foreign_codes(module))
    ]
    if unkept := [one for one in foreign if not recipe.kept_by(one[0], blocks)]:
        name, module, codes = unkept[0]
        more = f" (and {len(unkept) - 1} more layers)" if len(unkept) > 1 else ""
        patterns = ", ".join(f'"{each}"' for each in sorted({within_block(name) for name, _, _ in unkept}))
        raise ValueError(
            f"{name}{more} is a {_class(module)} with {codes} codes, which surokit cannot read: load the model without this "
            f"quantization, or leave such layers as they are, without adapters, with recipe.keep({patterns})."
        )
    for name, module in model.named_modules():
        if recipe.storage and isinstance(module, Experts) and adapted_by_peft(name):
            raise ValueError(
                f"PEFT adapts {name.removesuffix('.base_layer')} by target_parameters, which weights stored as codes cannot "
                "have: take recipe.lora(targets=(...)) in its place."
            )
    if recipe.storage:
        _check_shared(recipe, layers, blocks)


def is_left_quantized(module: nn.Module) -> bool:
    """Return whether another library holds a quantized weight here, one that we can read or not."""
    return library_of(module) is not None or bool(_foreign_codes(module))


def _foreign_codes(module: nn.Module) -> str:
    return "" if isinstance(module, Linear | Experts) else codes_of(module)


def _check_devices(model: nn.Module) -> None:
    on: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        on.setdefault(str(parameter.device), name)
    if any(True for _ in host_streams(model)):  # surokit.offload_weights brings what lies elsewhere
        return
    if "meta" in on and any(hasattr(m, "_hf_hook") for m in model.modules()):
        raise ValueError(
            f"Weights are offloaded by accelerate, which brings them for each forward ({on['meta']} is one): load the model "
            "without device_map, and let surokit.offload_weights() offload it."
        )
    if len(on) < 2:
        return
    where = " and ".join(f"{device} ({name})" for device, name in list(on.items())[:2])
    raise ValueError(
        f"The weights of the model lie on {where}: put them on one device first, for example by model.to(device)."
    )


def _check_shared(recipe: Recipe, layers: Sequence[tuple[str, Layer]], blocks: int) -> None:
    seen: dict[int, str] = {}
    for name, layer in layers:
        if recipe.kept_by(name, blocks):
            continue
        first = seen.setdefault(id(layer.weight), name)
        if first != name:
            raise ValueError(
                f"{first} and {name} share one weight, which would be stored twice: leave one of them with "
                f'recipe.keep("{name}").'
            )


# -- what is left


def left_alone(model: nn.Module, taken: Iterable[Layer]) -> Iterator[tuple[str, nn.Module, int, str]]:
    """Yield every module with weights that are not those of the layers `taken`: name, module, bytes, and why it is left."""
    held = {id(p) for layer in taken for p in layer.parameters()}
    for name, module in model.named_modules(remove_duplicate=True):
        own = [p for p in module.parameters(recurse=False) if id(p) not in held]
        own += [b for b in module.buffers(recurse=False) if _foreign_codes(module)]
        held |= {id(p) for p in own}
        if nbytes := sum(p.nbytes for p in own):
            yield name, module, nbytes, _why_left(name, module, own)


def _why_left(name: str, module: nn.Module, own: Sequence[torch.Tensor]) -> str:
    if is_adapter(name):
        return "adapters are not quantized"
    if isinstance(module, nn.Embedding):
        return "looked up, not multiplied"
    if library := library_of(module):
        replaced = _has_own_forward(module) and not library.replaced_forward(module)
        return "another replaced its forward" if replaced else f"codes of {library.name}, kept by a rule"
    if codes := _foreign_codes(module):
        return f"{codes} codes, kept by a rule"
    if type(module) is nn.Linear:
        return "another replaced its forward"
    if is_experts(module):
        return unsupported(module) or "PEFT adapts its weights by target_parameters"
    if type(module).__name__.endswith("Router"):
        return "routers stay as they are"
    if all(p.dim() < 2 for p in own):
        return "vectors"
    if isinstance(module, nn.Linear):
        return f"a {_class(module)} has a forward of its own"
    return f"no recipe knows a {type(module).__name__}"


def _class(module: nn.Module) -> str:
    kind: Any = type(module)
    return f"{kind.__name__} of {kind.__module__.partition('.')[0]}"
