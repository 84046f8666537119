"""Plan which layers of a stage share the codes of x, a product, a product in backward, the codes of frozen weights.

Layers that quantize x alike are a group, and x is quantized once for it. Those of a group whose weights lie side by side are one
product where they can be quantized as one: where that gives each its own codes, or where a scale of a tensor or a row is then
shared, as if they were one layer. In backward that has to hold for dy too, which is quantized along another dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from surokit.fusion import Fusion
from surokit.nn.delayed import DelayedScales
from surokit.nn.gathered import Gathered
from surokit.nn.joint import lie_side_by_side, side_by_side
from surokit.nn.linear import AdapterMatrix, Linear
from surokit.nn.linear_gemms import SLOTS, UNQUANTIZED, Operand, Products, weight
from surokit.nn.prologues import Normed, Plain, Source
from surokit.nn.weight_cache import LayerIndices, QuantizedWeightCache, can_stay, in_one_process, is_own
from surokit.quantizer import Quantizer
from surokit.recipe import Recipe
from surokit.torch_private import always_called_hooks, forward_hooks, is_hooked, parameters_of


class LayerTensors(NamedTuple):
    """A LayerTensors has the tensors of a layer; an adapter that is not computed here is not among them."""

    w: Any
    bias: Any = None
    A: Any = None
    B: Any = None
    scales: tuple[Any, ...] = ()  # of a stored weight


class LayerState(NamedTuple):
    """A LayerState has all that a plan depends on of a layer: values, no tensors, so that a plan that is kept holds no memory."""

    rows: int
    columns: int
    recipe: Recipe | None
    scales_number: int  # of the layer's delayed scales; -1 without them
    first_slot: int
    storage: Quantizer | None  # of codes that the products are given
    scale_count: int  # tensors of scales
    training: bool
    trains: bool  # the weight wants a gradient
    has_bias: bool
    is_adapted: bool  # the adapter is computed here
    is_shown_x: bool  # forward hooks, or an adapter that is called as it is, see x
    scale: float  # of the adapter


class PlanKey(NamedTuple):
    """A PlanKey has all that a plan depends on; None stands for a layer that is called as it is."""

    layers: tuple[LayerState | None, ...]
    source: type[Source]
    tensors: int  # of the source
    fusion: Fusion
    grad: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class InputGroup:
    """An InputGroup has layers that quantize x in the same way, and so share its codes.

    outputs: which of them are one product in forward; backward: into which products each of these falls in backward.
    kept: what codes of the group's frozen weights depend on beside them, to be compared; None where no codes are kept.
    """

    recipe: Recipe
    plain: bool  # neither quantized nor stored
    record: bool
    members: LayerIndices
    outputs: tuple[LayerIndices, ...]
    backward: dict[LayerIndices, tuple[LayerIndices, ...]]
    trains: bool
    kept: tuple[Any, ...] | None
    w_slots: LayerIndices  # where delayed scaling keeps the amaxes of the weights
    keeps_transposed: bool

    @property
    def keeps_codes(self) -> bool:
        """Return whether grad_weight takes codes of x'."""
        return self.trains and self.recipe.grad_weight.b is not None


class Shared(NamedTuple):
    """A Shared holds the objects, beside the plan, that the layers of a group share in one forward and its backward."""

    scales: DelayedScales | None
    frozen: QuantizedWeightCache | None


@dataclass(frozen=True)
class StagePlan:
    """A StagePlan says how a stage is computed. It is made of a PlanKey and the answers in `lies`, and valid as long as they
    are the same."""

    key: PlanKey
    lies: dict[LayerIndices, bool]  # layers that may be one product, and whether their weights lie side by side
    layers: tuple[LayerState, ...]
    groups: tuple[InputGroup, ...]
    adapted: LayerIndices
    columns: int  # K
    has_stream: bool
    shows_x: bool
    recomputes: bool

    def products(self, group: InputGroup, shared: Shared, members: LayerIndices) -> Products:
        firsts = [self.layers[i].first_slot for i in members]
        return Products(group.recipe, shared.scales, firsts, group.record, self.key.dtype)

    def weight(self, held: Sequence[LayerTensors], members: LayerIndices) -> Operand:
        """Return the weight [N_i, K] of one layer, or of several one above the other."""
        first = members[0]
        if len(members) == 1:
            scales: Sequence[Tensor] = held[first].scales
        else:
            scales = [stacked(parts) for parts in zip(*(held[i].scales for i in members))]
        shape = sum(self.layers[i].rows for i in members), self.columns
        return weight(stacked([held[i].w for i in members]), scales, self.layers[first].storage, shape)

    def parts(self, members: LayerIndices, joint: Tensor, dimension: int) -> dict[int, Tensor]:
        """Split a tensor that has the rows of all members along a dimension into the part of each layer."""
        if len(members) == 1:
            return {members[0]: joint}
        return dict(zip(members, joint.split([self.layers[i].rows for i in members], dimension)))

    def split(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return y of every layer, from those of every product."""
        parts: dict[int, Tensor] = {}
        for members, y in zip((members for group in self.groups for members in group.outputs), outputs, strict=True):
            parts |= self.parts(members, y, -1)
        return [parts[i] for i in range(len(self.layers))]


# -- what a layer is now


def look(layer: nn.Module, like: Tensor, fusion: Fusion) -> tuple[LayerState, LayerTensors] | None:
    """Read what a layer is and holds; None where it has to be called as it is. Every forward does this for every layer."""
    if not is_ours(layer, like):
        return None
    w, bias, precision, storage = _tensor(layer, "weight"), _tensor(layer, "bias"), layer.precision, layer.storage
    scales: tuple[Tensor, ...] = ()
    if storage is not None:
        if (
            layer.keeps_now
        ):  # a weight that is decoded once is an ordinary one, which the products keep as they would any
            w, storage = layer.decoded_weight(like.dtype), None
        else:
            scales = layer.stored_scales
    A = B = None
    factor = 0.0
    has_adapter = layer.has_adapter
    if has_adapter:
        factor = layer.lora_alpha / layer.lora_rank
        if fusion.adapters:
            A, B = _adapter(layer, like)
    delayed = None if precision is None else precision.scales
    state = LayerState(
        layer.out_features,
        layer.in_features,
        None if precision is None else precision.recipe,
        -1 if delayed is None else delayed.number,
        0 if precision is None else precision.first_slot,
        storage,
        len(scales),
        layer.training,
        w.requires_grad,
        bias is not None,
        A is not None,
        bool(forward_hooks(layer)) or (has_adapter and A is None),
        factor,
    )
    return state, LayerTensors(w, bias, A, B, scales)


def is_ours(layer: nn.Module, like: Tensor) -> TypeGuard[Linear]:
    """Return whether a layer computes what its fields say, in the dtype of x."""
    if type(layer) is not Linear or is_hooked(layer, but_forward_hooks=True) or always_called_hooks(layer):
        return False
    for p in parameters_of(layer).values():  # no other subclasses: shards, tensors without data
        if p is not None and type(p) not in (nn.Parameter, Gathered):
            return False
    if layer.compute_dtype not in (None, like.dtype):
        return False
    bias = _tensor(layer, "bias")
    return (layer.storage is not None or _is_like(_tensor(layer, "weight"), like)) and (
        bias is None or _is_like(bias, like)
    )


def _tensor(layer: nn.Module, name: str) -> Any:
    """Return an attribute that is a parameter as a rule; to ask the module for it takes several times as long."""
    parameters = parameters_of(layer)
    return parameters[name] if name in parameters else getattr(layer, name)


def _is_like(t: Tensor, like: Tensor) -> bool:
    return t.dtype == like.dtype and t.device == like.device


def _adapter(layer: Linear, like: Tensor) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return A and B where their matrices are ours, in the dtype of x, and nobody looks on."""
    pair = layer.lora_A, layer.lora_B
    for m in pair:
        if type(m) is not AdapterMatrix or is_hooked(m):
            return None, None
    A, B = _tensor(pair[0], "weight"), _tensor(pair[1], "weight")
    ordinary = type(A) is nn.Parameter and type(B) is nn.Parameter
    return (A, B) if ordinary and _is_like(A, like) and _is_like(B, like) else (None, None)


# -- the plan


# the latest ways to call a stage: training and evaluation, with gradients and without, as when backward computes forward again
KEPT_PLANS = 4


def plan_for(keeper: Linear, key: PlanKey, held: Sequence[LayerTensors]) -> StagePlan:
    """Return the plan of this key that the first layer keeps if the weights lie as they did, else a new one, which it keeps.

    The list stays the same object, so that what rests on the layer's attributes, as a CUDA graph does, sees no change.
    """

    def lie(members: LayerIndices) -> bool:
        return lie_side_by_side([held[i].w for i in members])

    if keeper.plans is None:
        keeper.plans = []
    plans = keeper.plans
    plan = next(
        (p for p in plans if p.key == key and all(lie(members) == was for members, was in p.lies.items())), None
    )
    if plan is None:
        plan = plan_of(key, lie)
    if not plans or plan is not plans[0]:  # the latest first; at once, as other threads may do so too
        plans[:] = [plan, *(other for other in plans if other.key != key)][:KEPT_PLANS]
    return plan


def plan_of(key: PlanKey, lie: Callable[[LayerIndices], bool]) -> StagePlan:
    """Make a plan of nothing but its key and of what `lie` says: whether the weights of these layers lie side by side."""
    layers = tuple(layer for layer in key.layers if layer is not None)
    answers: dict[LayerIndices, bool] = {}

    def asked(members: LayerIndices) -> bool:
        return answers.setdefault(members, lie(members))

    groups = tuple(_group(key, layers, members, asked) for members in _alike(layers))
    return StagePlan(
        key=key,
        lies=answers,
        layers=layers,
        groups=groups,
        adapted=tuple(i for i, layer in enumerate(layers) if layer.is_adapted),
        columns=layers[0].columns,
        has_stream=key.source is Normed,
        shows_x=len(layers) < len(key.layers) or any(layer.is_shown_x for layer in layers),
        recomputes=key.fusion.recompute == "selective" and key.source is not Plain,
    )


def _alike(layers: Sequence[LayerState]) -> list[LayerIndices]:
    """Group the layers by what decides how x and the weights are quantized and noted."""
    found: list[tuple[Any, list[int]]] = []
    for i, layer in enumerate(layers):
        what = (layer.recipe, layer.scales_number, layer.storage, layer.training)
        members = next((members for other, members in found if other == what), None)
        if members is None:
            found.append((what, [i]))
        else:
            members.append(i)
    return [tuple(members) for _, members in found]


def _group(
    key: PlanKey, every: Sequence[LayerState], members: LayerIndices, lie: Callable[[LayerIndices], bool]
) -> InputGroup:
    layers = [every[i] for i in members]
    first, recipe = layers[0], layers[0].recipe or UNQUANTIZED
    trains = {key.grad and layer.trains for layer in layers}
    outputs: tuple[LayerIndices, ...] = tuple((i,) for i in members)
    backward: dict[LayerIndices, tuple[LayerIndices, ...]] = {one: (one,) for one in outputs}
    alike = len(trains) == 1 and len({layer.has_bias for layer in layers}) == 1
    if key.fusion.joint and len(members) > 1 and alike and _may_be_one_product(recipe, layers) and lie(members):
        backward = {members: (members,) if _is_one_in_backward(recipe, layers, any(trains)) else outputs}
        outputs = (members,)
    delayed = any(q and q.delayed for q in (recipe.forward.b, recipe.grad_input.b))
    slots = tuple(layer.first_slot + SLOTS["w"] for layer in layers) if delayed else ()
    keeps = _keeps_codes(recipe, first, slots, key.fusion)
    return InputGroup(
        recipe=recipe,
        plain=first.recipe is None and first.storage is None,
        record=first.training and key.grad,
        members=members,
        outputs=outputs,
        backward=backward,
        trains=any(trains),
        kept=(recipe.gemms, first.storage, outputs, slots, key.fusion.frozen) if keeps else None,
        w_slots=slots,
        keeps_transposed=key.fusion.frozen == "transposed",
    )


def _may_be_one_product(recipe: Recipe, layers: Sequence[LayerState]) -> bool:
    """Return whether the weights, if they lie side by side, are quantized as one: what is stored has its own codes."""
    sizes = [layer.rows for layer in layers]
    storage, b = layers[0].storage, recipe.forward.b
    return (storage is None or storage.separates(0, sizes)) and (b is None or b.joins(0, sizes))


def _is_one_in_backward(recipe: Recipe, layers: Sequence[LayerState], trains: bool) -> bool:
    """Return whether dy of all layers is quantized as one, and the weights' transposes are."""
    sizes = [layer.rows for layer in layers]
    dx = all(q is None or q.joins(1, sizes) for q in (recipe.grad_input.a, recipe.grad_input.b))
    q = recipe.grad_weight.a
    return dx and (not trains or q is None or q.joins(0, sizes))


def _keeps_codes(recipe: Recipe, first: LayerState, slots: LayerIndices, fusion: Fusion) -> bool:
    """Return whether codes of frozen weights are worth keeping, and the same in each step."""
    b, b_t, storage = recipe.forward.b, recipe.grad_input.b, first.storage
    worth = b is not None or (b_t is not None and fusion.frozen == "transposed")
    if storage is not None:  # it holds its codes; others beside them would cost the memory that storing it saved
        codes = b_t is not None and b_t.transposable and storage.same_codes(b_t)
        turned = storage.scaling.varies_along_sum and not storage.packed  # its scales are, where W' is a view
        worth = codes and (fusion.frozen == "transposed" or turned)
    same = not slots or (first.scales_number >= 0 and b == b_t and DelayedScales.spaced(slots))
    return fusion.frozen != "no" and worth and same and can_stay(b) and can_stay(b_t)


def shared_by(group: InputGroup, inside: Sequence[Linear], held: Sequence[LayerTensors]) -> Shared:
    """Return the delayed scales of the group's layers, and the codes of their weights, which the first of them keeps."""
    keeper = inside[group.members[0]]
    scales = None if keeper.precision is None else keeper.precision.scales
    if group.kept is not None:
        weights = [held[i].w for i in group.members] + [s for i in group.members for s in held[i].scales]
        if is_own(weights) and in_one_process():
            frozen, delayed = keeper.frozen, scales if group.w_slots else None
            if frozen is None or not frozen.serves(weights, group.kept, delayed):
                frozen = keeper.frozen = QuantizedWeightCache(weights, group.kept, delayed, group.w_slots)
            return Shared(scales, frozen)
    if keeper.frozen is not None:
        keeper.frozen = None
    return Shared(scales, None)


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Put tensors one above the other; without a copy where they lie so."""
    if len(tensors) == 1:
        return tensors[0]
    there = side_by_side(tensors)
    return torch.cat(list(tensors)) if there is None else there
