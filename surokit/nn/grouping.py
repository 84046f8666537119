"""Which layers of a stage share what: the codes of x, a product, a product in backward, the codes of frozen weights.

Layers that quantize x alike are a group, and x is quantized once for it. Those of a group whose weights lie side by side are one
product where they can be quantized as one: where that gives each its own codes, or where a scale of a tensor or a row is then
shared, as if they were one layer. In backward that has to hold for dy too, which is quantized along another dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from surokit.fusion import Fusion
from surokit.nn.delayed import DelayedScales
from surokit.nn.frozen import Frozen, Members, can_stay, in_one_process, is_own
from surokit.nn.joint import side_by_side
from surokit.nn.linear import AdapterMatrix, Linear
from surokit.nn.products import SLOTS, UNQUANTIZED, Operand, Products, weight
from surokit.nn.sources import Form, Normed, Plain, Source, is_hooked
from surokit.quantizer import Quantizer
from surokit.recipe import Recipe


class Held(NamedTuple):
    """The tensors of a layer; an adapter that is not computed here is not among them."""

    w: Any
    bias: Any = None
    A: Any = None
    B: Any = None


@dataclass(frozen=True, eq=False)
class Layer:
    """What else the stage knows of a layer."""

    rows: int
    storage: Quantizer | None
    w_scales: tuple[Tensor, ...]
    first_slot: int
    scale: float  # of the adapter


@dataclass(frozen=True, eq=False)
class Group:
    """Layers that quantize x in the same way, and so share its codes.

    outputs: which of them are one product in forward; backward: into which products each of these falls in backward.
    """

    recipe: Recipe
    plain: bool  # neither quantized nor stored
    scales: DelayedScales | None
    record: bool
    members: Members
    outputs: tuple[Members, ...]
    backward: dict[Members, tuple[Members, ...]]
    trains: bool
    frozen: Frozen | None
    keeps_transposed: bool

    @property
    def keeps_codes(self) -> bool:
        """Whether grad_weight takes codes of x'."""
        return self.trains and self.recipe.grad_weight.b is not None


@dataclass(frozen=True, eq=False)
class Plan:
    form: Form
    tensors: int  # of the source
    columns: int  # K
    layers: tuple[Layer, ...]
    groups: tuple[Group, ...]
    has_stream: bool
    shows_x: bool
    recomputes: bool
    dtype: torch.dtype

    def products(self, group: Group, members: Members) -> Products:
        firsts = [self.layers[i].first_slot for i in members]
        return Products(group.recipe, group.scales, firsts, group.record, self.dtype)

    def weight(self, held: Sequence[Held], members: Members) -> Operand:
        """The weight [N_i, K] of one layer, or of several one above the other."""
        layers = [self.layers[i] for i in members]
        scales = [stacked(parts) for parts in zip(*(layer.w_scales for layer in layers))]
        shape = sum(layer.rows for layer in layers), self.columns
        return weight(stacked([held[i].w for i in members]), scales, layers[0].storage, shape)

    @property
    def w_scales(self) -> list[Tensor]:
        """The scales of all stored weights, which autograd keeps, not the plan: so they are let go when the weights are."""
        return [scales for layer in self.layers for scales in layer.w_scales]

    def with_scales(self, w_scales: Sequence[Any]) -> Plan:
        """The same with others, or with None in their place."""
        if not w_scales:
            return self
        following = iter(w_scales)
        layers = [replace(layer, w_scales=tuple(next(following) for _ in layer.w_scales)) for layer in self.layers]
        return replace(self, layers=tuple(layers))

    def parts(self, members: Members, joint: Tensor, dimension: int) -> dict[int, Tensor]:
        """What belongs to each layer of a tensor that has all their rows along a dimension."""
        sizes = [self.layers[i].rows for i in members]
        return dict(zip(members, joint.split(sizes, dimension) if len(members) > 1 else (joint,)))

    def split(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """y of every layer, from those of every product."""
        parts: dict[int, Tensor] = {}
        for members, y in zip((members for group in self.groups for members in group.outputs), outputs, strict=True):
            parts |= self.parts(members, y, -1)
        return [parts[i] for i in range(len(self.layers))]


def is_ours(layer: nn.Module, like: Tensor) -> TypeGuard[Linear]:
    """Whether a layer computes what its fields say, in the dtype of x."""
    if type(layer) is not Linear or is_hooked(layer, but_forward_hooks=True) or layer._forward_hooks_always_called:
        return False
    numbers = [layer.bias] if layer.storage else [layer.weight, layer.bias]
    held = [p for p in layer._parameters.values() if p is not None]  # no subclasses: shards, tensors without data
    ordinary = type(like) in (Tensor, nn.Parameter) and all(type(p) is nn.Parameter for p in held)
    return ordinary and all(t is None or _is_like(t, like) for t in numbers)


def _is_like(t: Tensor, like: Tensor) -> bool:
    return t.dtype == like.dtype and t.device == like.device


def tensors_of(layer: Linear, like: Tensor, fusion: Fusion) -> Held:
    # a weight that is decoded once is an ordinary one, which the products keep as they would any
    w = layer.decoded_weight(like.dtype) if layer.keeps_now else layer.weight
    if fusion.adapters and layer.has_adapter:
        pair = layer.lora_A, layer.lora_B
        ordinary = all(type(m) is AdapterMatrix and type(m.weight) is nn.Parameter and not is_hooked(m) for m in pair)
        if ordinary and all(_is_like(m.weight, like) for m in pair):
            return Held(w, layer.bias, pair[0].weight, pair[1].weight)
    return Held(w, layer.bias)


def plan_of(
    source: Source, layers: Sequence[nn.Module], inside: Sequence[Linear], held: Sequence[Held], fusion: Fusion
) -> Plan:
    known = []
    for layer, tensors in zip(inside, held):
        stored = layer.storage is not None and tensors.w is layer.weight  # and not decoded for this step
        slot = layer.precision.first_slot if layer.precision else 0
        scale = layer.lora_alpha / layer.lora_rank if layer.has_adapter else 0.0
        storage, w_scales = (layer.storage, layer.stored_scales) if stored else (None, ())
        known.append(Layer(layer.out_features, storage, w_scales, slot, scale))
    apart = len(inside) < len(layers) or any(a.has_adapter and t.A is None for a, t in zip(inside, held))
    return Plan(
        form=source.form,
        tensors=len(source.tensors),
        columns=inside[0].in_features,
        layers=tuple(known),
        groups=tuple(_group(inside, held, known, members, fusion) for members in _alike(inside, known)),
        has_stream=isinstance(source, Normed),
        shows_x=apart or any(layer._forward_hooks for layer in inside),
        recomputes=fusion.recompute == "selective" and not isinstance(source, Plain),
        dtype=source.tensors[0].dtype,
    )


def _alike(inside: Sequence[Linear], known: Sequence[Layer]) -> list[Members]:
    """The layers by what decides how x and the weights are quantized and noted."""
    found: list[tuple[Any, list[int]]] = []
    for i, layer in enumerate(inside):
        own = layer.precision
        what = (own and own.recipe, own and own.scales, known[i].storage, layer.training)
        members = next((members for other, members in found if other == what), None)
        if members is None:
            found.append((what, [i]))
        else:
            members.append(i)
    return [tuple(members) for _, members in found]


def _group(
    inside: Sequence[Linear], held: Sequence[Held], known: Sequence[Layer], members: Members, fusion: Fusion
) -> Group:
    first, grad = inside[members[0]], torch.is_grad_enabled()
    recipe, scales = (first.precision.recipe, first.precision.scales) if first.precision else (UNQUANTIZED, None)
    tensors, layers = [held[i] for i in members], [known[i] for i in members]
    trains = {bool(grad and t.w.requires_grad) for t in tensors}
    outputs: tuple[Members, ...] = tuple((i,) for i in members)
    backward: dict[Members, tuple[Members, ...]] = {one: (one,) for one in outputs}
    alike = len(trains) == 1 and len({t.bias is None for t in tensors}) == 1
    if fusion.joint and len(members) > 1 and alike and _is_one_product(recipe, tensors, layers):
        backward = {members: (members,) if _is_one_in_backward(recipe, layers, any(trains)) else outputs}
        outputs = (members,)
    return Group(
        recipe=recipe,
        plain=first.precision is None and layers[0].storage is None,
        scales=scales,
        record=first.training and grad,
        members=members,
        outputs=outputs,
        backward=backward,
        trains=any(trains),
        frozen=_frozen(first, recipe, scales, tensors, layers, outputs, fusion),
        keeps_transposed=fusion.frozen == "transposed",
    )


def _is_one_product(recipe: Recipe, tensors: Sequence[Held], layers: Sequence[Layer]) -> bool:
    """Whether the weights lie as one, and are quantized as one: what is stored has its own codes."""
    sizes = [layer.rows for layer in layers]
    storage, b = layers[0].storage, recipe.forward.b
    one = (storage is None or storage.separates(0, sizes)) and (b is None or b.joins(0, sizes))
    return one and side_by_side([t.w for t in tensors]) is not None  # scales are small enough to be copied


def _is_one_in_backward(recipe: Recipe, layers: Sequence[Layer], trains: bool) -> bool:
    """Whether dy of all layers is quantized as one, and the weights' transposes are."""
    sizes = [layer.rows for layer in layers]
    dx = all(q is None or q.joins(1, sizes) for q in (recipe.grad_input.a, recipe.grad_input.b))
    q = recipe.grad_weight.a
    return dx and (not trains or q is None or q.joins(0, sizes))


def _frozen(
    keeper: Linear,
    recipe: Recipe,
    scales: DelayedScales | None,
    tensors: Sequence[Held],
    layers: Sequence[Layer],
    outputs: tuple[Members, ...],
    fusion: Fusion,
) -> Frozen | None:
    """Where the first layer keeps the codes of the group's weights; None where there are none to keep."""
    weights = [t.w for t in tensors] + [s for layer in layers for s in layer.w_scales]
    b, b_t, storage = recipe.forward.b, recipe.grad_input.b, layers[0].storage
    worth = b is not None or (b_t is not None and fusion.frozen == "transposed")
    if storage is not None:  # it holds its codes; others beside them would cost the memory that storing it saved
        codes = b_t is not None and b_t.transposable and storage.same_codes(b_t)
        turned = storage.scaling.varies_along_sum and not storage.packed  # its scales are, where W' is a view
        worth = codes and (fusion.frozen == "transposed" or turned)
    slots = [layer.first_slot + SLOTS["w"] for layer in layers] if any(q and q.delayed for q in (b, b_t)) else []
    same = not slots or (scales is not None and b == b_t and scales.spaced(slots))
    stay = can_stay(b) and can_stay(b_t) and is_own(weights) and in_one_process()
    if fusion.frozen == "no" or not (worth and same and stay):
        keeper.frozen = None
        return None
    what = (recipe.gemms, storage, outputs, slots, fusion.frozen)
    scales = scales if slots else None
    if keeper.frozen is None or not keeper.frozen.serves(weights, what, scales):
        keeper.frozen = Frozen(weights, what, scales, slots)
    return keeper.frozen


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """One above the other; without a copy where they lie so."""
    if len(tensors) == 1:
        return tensors[0]
    there = side_by_side(tensors)
    return torch.cat(list(tensors)) if there is None else there
