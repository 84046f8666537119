"""Observe a model in a training loop that is not ours: the tokens it is given, the labels that count, what was applied to it.

Hooks around the model add up on its device and never wait for it. A compiled graph calls no hooks, so what torch.compile wraps as a
whole is not counted; nor are DataParallel's copies, each in a thread of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from surokit.applied import HostForward, fusion_of, recipe_of
from surokit.convert import skip_reason
from surokit.layers import Layer, OwnLayer, is_left_quantized, recipe_layers
from surokit.nn.experts import Experts, ExpertsLinear
from surokit.nn.linear import Linear
from surokit.recipe import Recipe, count_blocks
from surokit.train.lengths import Lengths


class Seen(NamedTuple):
    """A Seen holds what a model was given in a step; a count is a tensor where the device has to tell it, None where nothing was.

    tokens: those that an attention mask of one row a sequence keeps, else all elements of input_ids. targets: labels that count.
    loss: the model's own, mean over the calls of a step. nonfinite: how many of them were NaN or infinite.
    """

    tokens: int | Tensor | None = None
    targets: Tensor | None = None
    loss: Tensor | None = None
    nonfinite: Tensor | None = None


class Observer:
    """An Observer counts what a model in training mode is given, from one `take` to the next, until it is removed.

    A causal language model of transformers predicts no first token, so the first label of a row never counts there; of others every
    label that is not -100 does. lengths: of the rows, or of the documents of a row on the mean where it says where they begin.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.lengths = Lengths()
        self.called = False  # since the last `take`
        self._shifts = any(getattr(m, "loss_type", None) == "ForCausalLM" for m in model.modules())
        self._seen, self._losses = Seen(), 0
        self._called: set[str] | None = set()  # modules, in the first step; None once it is over
        self._handles = [
            model.register_forward_pre_hook(self._given, with_kwargs=True),
            model.register_forward_hook(self._returned),
        ]
        modules = dict(model.named_modules())
        linear = [name for name, layer in quantized_layers(model).items() if isinstance(layer, Linear)]
        self._layers = {name: _around(name) for name in linear} if fusion_of(model) is None else {}
        self._layer_handles = [
            modules[name].register_forward_pre_hook(self._call_of(name))
            for name in {*self._layers, *self._layers.values()}
        ]

    def see(self, batch: Any) -> None:
        """Count a batch by hand; from then on calls of the model are not counted."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if isinstance(batch, Mapping):
            self._add((), batch)

    def take(self) -> Seen:
        """Return what was seen since the last call."""
        seen = self._seen
        if seen.loss is not None:
            seen = seen._replace(loss=seen.loss / self._losses)
        self._seen, self._losses, self.called = Seen(), 0, False
        for handle in self._layer_handles:
            handle.remove()
        self._layer_handles = []
        return seen

    def never_called(self) -> list[str]:
        """Return, once after the first step, the quantized layers that it did not call although it called the module around them.

        None where a fusion of ours computes layers together.
        """
        called, self._called = self._called, None
        if called is None:
            return []
        return [name for name, around in self._layers.items() if around in called and name not in called]

    def remove(self) -> None:
        """Take the hooks back."""
        for handle in (*self._handles, *self._layer_handles):
            handle.remove()
        self._handles, self._layer_handles = [], []

    def _given(self, model: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        if self._counts(model):
            self.called = True
            self._add(args, inputs)

    def _add(self, args: tuple[Any, ...], inputs: Mapping[str, Any]) -> None:
        tokens, targets = self._seen.tokens, self._seen.targets
        given = _tokens_in(args, inputs)
        if given is not None:
            count, elements, length = given
            self.lengths.add(elements, length)
            tokens = count if tokens is None else tokens + count
        labels, shifted = inputs.get("labels"), inputs.get("shift_labels")
        if isinstance(shifted, Tensor):
            labels = shifted
        elif self._shifts and isinstance(labels, Tensor) and labels.dim() == 2:
            labels = labels[:, 1:]
        self._seen = self._seen._replace(tokens=tokens, targets=count_targets(targets, labels))

    def _returned(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if self._counts(model) and isinstance(loss, Tensor):
            value, seen = loss.detach().mean(), self._seen
            bad = (~value.isfinite()).int()
            self._seen = seen._replace(
                loss=value if seen.loss is None else seen.loss + value,
                nonfinite=bad if seen.nonfinite is None else seen.nonfinite + bad,
            )
            self._losses += 1

    def _counts(self, model: nn.Module) -> bool:
        replica = getattr(model, "_is_replica", False)  # of DataParallel, in a thread of its own
        return model.training and not replica and not torch.compiler.is_compiling()

    def _call_of(self, name: str) -> Any:
        def called(module: nn.Module, args: tuple[Any, ...]) -> None:
            if self._called is not None and not torch.compiler.is_compiling():
                self._called.add(name)

        return called


def count_targets(count: Tensor | None, labels: Any) -> Tensor | None:
    """Return `count` plus the number of `labels` that are not -100, on their device; `count` itself if they are no classes."""
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return count
    here = (labels != -100).sum()
    return here if count is None else count + here


def _tokens_in(args: tuple[Any, ...], inputs: Mapping[str, Any]) -> tuple[int | Tensor, int, float] | None:
    """Return the tokens in the arguments of a call, how many there are with padding, and the length of their rows; None where
    there are no tokens."""
    ids = inputs.get("input_ids", args[0] if args else None)
    embedded = inputs.get("inputs_embeds")
    if isinstance(ids, Tensor) and not ids.is_floating_point() and ids.dim():
        shape = ids.shape
    elif isinstance(embedded, Tensor) and embedded.dim() > 1:
        shape = embedded.shape[:-1]
    else:
        return None
    mask, begins = inputs.get("attention_mask"), inputs.get("cu_seq_lens_q")
    if isinstance(mask, Tensor) and mask.shape == shape:
        return (mask != 0).sum(), shape.numel(), shape[-1]
    if isinstance(begins, Tensor) and begins.numel() > 1:  # documents in one row, which do not see each other
        return shape.numel(), shape.numel(), shape.numel() / (begins.numel() - 1)
    return shape.numel(), shape.numel(), shape[-1]


# -- what was applied


def quantized_layers(model: nn.Module) -> dict[str, OwnLayer]:
    """Return the layers and weights of experts whose products or weights a recipe quantizes, by their names."""
    layers: dict[str, OwnLayer] = {name: m for name, m in model.named_modules() if isinstance(m, Linear)}
    layers |= _experts(model)
    return {name: layer for name, layer in layers.items() if _quantizes(layer)}


def _quantizes(layer: OwnLayer) -> bool:
    return layer.storage is not None or (layer.precision is not None and layer.precision.recipe.quantized)


class Applied(NamedTuple):
    """An Applied says which recipe holds in the model that trains: in a sentence, and what is wrong with that, in sentences."""

    recipe: Recipe | None
    words: str
    wrong: tuple[str, ...]


def what_is_applied(model: nn.Module) -> Applied:
    """Return which recipe a model got, in how many of its linear layers and weights of experts it holds, and which should hold it
    and do not."""
    got = next((m for m in model.modules() if recipe_of(m) is not None), None)
    recipe = None if got is None else recipe_of(got)
    linear, experts = _linear(model), _experts(model)
    if got is None or recipe is None or not recipe.quantized:
        name = "no recipe is applied" if recipe is None else f"{recipe.name} quantizes nothing"
        all_of = f"{len(linear)} linear layers" + (f" and {len(experts)} weights of experts" if experts else "")
        return Applied(recipe, f"{name}: {all_of} compute in the loop's own precision", ())
    holding = {name: m for name, m in linear.items() if isinstance(m, Linear) and _quantizes(m)}
    inside: dict[str, Layer] = {**_linear(got), **_experts(got)}  # names as the recipe's rules know them
    blocks = count_blocks(map(_bare, inside))
    # the recipe made ours of everything there was, of what it keeps as it is too
    since = [
        name
        for name, layer in inside.items()
        if not _is_ours(layer)
        and not _is_stored_by_others(layer)
        and not skip_reason(_bare(name), layer, recipe, blocks)
    ]
    wrong = []
    if since:
        wrong.append(
            f"{recipe.name} was applied, but in the model that trains it is missing from {_some(since, inside)}: layers were "
            "replaced since. Apply the recipe last, to the model that the Trainer gets."
        )
    other = [name for name, m in holding.items() if _is_overridden(m)]
    if other:
        wrong.append(
            f"{recipe.name} was applied, but another forward stands in the place of that of {_some(other)}: whether it calls the "
            "quantized one is not known. Leave the forward of linear layers as it is, or apply the recipe behind what changes it."
        )
    words = f"{recipe.name} in {len(holding)} of {len(linear)} linear layers"
    if experts:
        words += f" and {sum(map(_quantizes, experts.values()))} of {len(experts)} weights of experts"
    return Applied(recipe, words, tuple(wrong))


def _linear(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers of a model by name, but adapters and what PEFT keeps or trains beside a layer."""
    beside = ("modules_to_save", "original_module")
    return {
        name: m
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear) and not any(part.startswith("lora_") or part in beside for part in name.split("."))
    }


def _experts(model: nn.Module) -> dict[str, ExpertsLinear]:
    """Return the weights of the experts of a model by name."""
    return {name: layer for name, layer in recipe_layers(model) if isinstance(layer, ExpertsLinear)}


def _is_ours(layer: Layer) -> bool:
    return isinstance(layer.module, Experts) if isinstance(layer, ExpertsLinear) else isinstance(layer, Linear)


def _is_stored_by_others(layer: Layer) -> bool:
    """Return whether another library holds a quantized weight here: no recipe changes those once it is applied."""
    if isinstance(layer, ExpertsLinear):
        return is_left_quantized(layer.module)
    return type(layer).__module__.startswith("bitsandbytes")


def bypassed(recipe: Recipe, names: list[str]) -> str:
    """Return the warning on quantized layers that no step calls."""
    return (
        f"{recipe.name} was applied, but the first step did not call {_some(names)}: something computes with their weights "
        "directly, without the recipe. Switch off kernels that replace whole blocks, or apply no recipe."
    )


def _is_overridden(layer: Linear) -> bool:
    """Return whether an instance's own forward hides the class's; ours that fetches weights, and accelerate's hook, call it."""
    forward = vars(layer).get("forward")
    return forward is not None and not isinstance(forward, HostForward) and not hasattr(layer, "_hf_hook")


def _bare(name: str) -> str:
    """Return a layer's name without what PEFT puts around it."""
    return name.removeprefix("base_model.model.").removesuffix(".base_layer")


def _around(name: str) -> str:
    """Return the name of the module whose forward calls a layer, past an adapter around it."""
    return name.removesuffix(".base_layer").rpartition(".")[0]


def _some(names: list[str], layers: Mapping[str, Layer] | None = None) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    experts = layers is not None and isinstance(layers[names[0]], ExpertsLinear)
    return f"the {'weight of experts' if experts else 'linear layer'} {names[0]}{more}"
