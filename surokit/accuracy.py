"""Measure how much each recipe's quantization disturbs each product of a model, on the user's own batch, without training.

One forward and backward in the model's own dtype, nothing quantized, gives every layer's x, w and dy. Each recipe's three
products are then computed from these and compared with the float32 product: SQNR in dB, and for the operands what was clipped,
what fell to zero, the largest magnitudes and how far the scales lie apart. Every recipe sees the same operands, so the
differences are its own.

`judge` does this for one layer and waits for no device; `compare` does it for a model, `train/meters.py` during training.

T tokens, K in_features, N out_features; every product is a_MK b_NK' with the contracted dimension last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from surokit import kernels
from surokit.convert import on_device, precision, skip_reason
from surokit.layers import check_taken_over, linear_layers
from surokit.nn.evaluating import evaluating
from surokit.nn.linear import Linear
from surokit.nn.loss import IGNORED
from surokit.places import check_values
from surokit.product import product
from surokit.quantized import Quantized, quantize
from surokit.quantizer import NV, PerTensor, Quantizer
from surokit.recipe import Recipe, count_blocks, find_recipe

if TYPE_CHECKING:
    import pandas as pd

# what `judge` says of a product: amax_a and amax_b are of its two operands in the order of the algebra, scale_spread is the
# wider of theirs: binades from the smallest scale of an operand to its largest, tiles of zeros left out
FIGURES = ("sqnr_db", "clipped", "underflow", "amax_a", "amax_b", "scale_spread")
SEED = 0  # of stochastic rounding, so that the same operands are judged alike


def compare(model: nn.Module, batch: Mapping[str, Tensor], *recipes: Recipe | str) -> pd.DataFrame:
    """Return a DataFrame with the columns layer, gemm, recipe, sqnr_db, clipped, underflow, amax_a, amax_b, scale_spread; one row a
    layer, product and recipe.

    `batch` is {"input_ids": [B, T], "labels": [B, T]}. Parameters, gradients, random states and delayed-scaling histories are
    not touched; a delayed recipe is judged with the batch's own amaxes, stochastic rounding with a fixed seed. Layers that a
    recipe keeps in bfloat16 are left out for it, as is grad_weight where it freezes the weights; weights of experts are left out.
    Of a recipe that changes each part is compared, under its own name.

    The reference is each weight as the model holds it: what storing it has already lost does not show, and a recipe with the
    same storage reports its forward and grad_input as exact (inf) where nothing else is quantized.
    """
    import pandas as pd

    if not isinstance(batch, Mapping):
        raise TypeError(f'compare() takes a batch {{"input_ids": ..., "labels": ...}}, not a {type(batch).__name__}.')
    check_values(model, "compare")
    check_taken_over(model, "compare")
    chosen = list(dict.fromkeys(part for r in recipes for part in find_recipe(r).parts))
    if not chosen:
        raise ValueError("compare() needs at least one recipe, for example compare(model, batch, surokit.FP8).")
    if shared := {r.name for r in chosen if sum(r.name == other.name for other in chosen) > 1}:
        raise ValueError(
            f"compare() got different recipes of one name, {', '.join(sorted(shared))}: "
            'give each its own, for example dataclasses.replace(recipe, name="mine").'
        )
    layers = dict(linear_layers(model))
    blocks = count_blocks(layers)
    rows, figures = [], []
    found = operands_of(model, batch)
    for name in list(found):
        operands = found.pop(name)  # with its float32 products, which are large
        for recipe in chosen:
            if skip_reason(name, layers[name], recipe, blocks):
                continue
            stored = quantize(operands.w_NK, recipe.storage) if recipe.storage else None
            for gemm, values in judge(on_device(recipe, operands.w_NK.device), operands, stored=stored):
                rows.append((name, gemm, recipe.name))
                figures.append(values)
    columns = ["layer", "gemm", "recipe", *FIGURES]
    measured = torch.stack(figures).tolist() if figures else []
    return pd.DataFrame([(*row, *values) for row, values in zip(rows, measured)], columns=columns)


@dataclass(frozen=True, eq=False)
class Operands:
    """Operands holds what the three products of a layer take: x [T, K], w [N, K], and dy [T, N] where a gradient arrived."""

    x_TK: Tensor
    w_NK: Tensor
    dy_TN: Tensor | None = None

    @cached_property
    def exact(self) -> dict[str, Tensor]:
        """Return the products in float32."""
        x, w = self.x_TK.float(), self.w_NK.float()
        if self.dy_TN is None:
            return {"forward": x @ w.t()}
        dy = self.dy_TN.float()
        return {"forward": x @ w.t(), "grad_input": dy @ w, "grad_weight": dy.t() @ x}


@torch.no_grad()
def judge(
    recipe: Recipe,
    operands: Operands,
    *,
    stored: Quantized | None = None,
    amaxes: Mapping[str, Tensor] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (product, its FIGURES as a float32 tensor) for each product of a layer, as `nn/linear_gemms.py` computes it.

    stored: the weight as it is held, which then takes w's place. amaxes: by "x", "w" and "dy", what scales that cover a whole
    tensor come from; without them, from the operands' own. Nothing here waits for the device or draws from its random state.
    """
    amaxes = amaxes or {}
    x, w, dy = operands.x_TK, operands.w_NK, operands.dy_TN
    f, i, g = recipe.forward, recipe.grad_input, recipe.grad_weight

    def plain(role: str, x_MK: Tensor, q: Quantizer | None, beside: _Factor | None = None) -> _Factor:
        if q is None:
            return _Factor(x_MK, x_MK, [])
        seed = SEED + (beside is not None) if q.draws else None  # the second operand has draws of its own
        met = beside.value.rotation if beside is not None and isinstance(beside.value, Quantized) else None
        rotation = met if q.rounding == "eden" else None
        Q = quantize(x_MK, q, amax=_amax(q, amaxes.get(role)), seed=seed, rotation=rotation)
        return _Factor(Q, x_MK, [(Q, x_MK)])

    def weight(q: Quantizer | None, transposed: bool, beside: _Factor) -> _Factor:
        exact = w.t() if transposed else w
        if stored is None:
            return plain("w", exact, q, beside)
        if q and stored.quantizer.same_codes(q) and (not transposed or q.transposable):
            return _Factor(stored.t() if transposed else stored, exact, [(stored, w)])
        dense = stored.dequantize(w.dtype)
        again = plain("w", dense.t() if transposed else dense, q, beside)
        return _Factor(again.value, exact, [(stored, w), *again.quantized])

    x_q = plain("x", x, f.a)
    products = {"forward": (x_q, weight(f.b, False, x_q))}
    if dy is not None:
        dy_q = plain("dy", dy, i.a)
        products["grad_input"] = (dy_q, weight(i.b, True, dy_q))
        if not recipe.frozen_base:
            dy_t = plain("dy", dy.t(), g.a)
            products["grad_weight"] = (dy_t, plain("x", x.t(), g.b, dy_t))
    for gemm, (a, b) in products.items():
        yield gemm, _figures(operands.exact[gemm], a, b)


@dataclass(frozen=True, eq=False)
class _Factor:
    """One operand: as the product takes it, in high precision, and what was quantized on the way with what it was before."""

    value: Tensor | Quantized
    exact: Tensor
    quantized: list[tuple[Quantized, Tensor]]


def _figures(exact_MN: Tensor, a: _Factor, b: _Factor) -> Tensor:
    """Return the FIGURES of one product; clipped and underflow are shares of all elements that were quantized."""
    quantized = a.quantized + b.quantized
    elements = sum(x.numel() for _, x in quantized) or 1
    zero = exact_MN.new_zeros(())
    clipped = sum((Q.was_clipped(x).sum() for Q, x in quantized), zero) / elements
    underflow = sum((Q.vanished(x).sum() for Q, x in quantized), zero) / elements
    spread = zero
    for Q, x in quantized:
        spread = torch.maximum(spread, _spread(Q, x))
    largest = [m.exact.abs().amax() for m in (a, b)]
    noise = sqnr(exact_MN, product(a.value, b.value, torch.float32))
    return torch.stack([t.float() for t in (noise, clipped, underflow, *largest, spread)])


def sqnr(reference: Tensor, approximation: Tensor) -> Tensor:
    """Return 10 log10(|reference|^2 / |reference - approximation|^2) on the device, summed in float64; inf where they are equal."""
    x = reference.double()
    noise = (x - approximation.double()).square().sum()
    return torch.where(noise == 0, torch.inf, 10 * torch.log10(x.square().sum() / noise))


def _spread(Q: Quantized, x_MK: Tensor) -> Tensor:
    """Return the binades between an operand's smallest and largest scale. A scale follows its tile's amax, so the amaxes are
    compared: that leaves tiles of zeros out, whose scale says nothing, and rounding of the scales."""
    rows, columns = Q.quantizer.scaling.tile()
    if not rows and not columns:
        return torch.zeros((), device=x_MK.device)
    amax_RC = kernels.amax(Q.rotated(x_MK), rows, columns)
    smallest = torch.where(amax_RC == 0, torch.inf, amax_RC).amin()
    return torch.where(amax_RC.amax() == 0, 0.0, torch.log2(amax_RC.amax() / smallest))


def _amax(q: Quantizer, amax: Tensor | None) -> Tensor | None:
    """Return `amax` where it decides the scales: not for rows and blocks, and not after a rotation, which changes it."""
    whole = isinstance(q.scaling, PerTensor | NV) and not q.hadamard
    return amax.float().reshape(1, 1) if whole and amax is not None else None


def operands_of(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Operands]:
    """Return the operands of every linear layer that the batch reaches, from one unquantized forward and backward.

    They are in the model's dtype: a float32 model runs in float32. In evaluation mode: dropout would
    draw from the random state, and make every call another one.
    """
    if "labels" in batch and (batch["labels"] == IGNORED).all():
        raise ValueError("No label of the batch counts, all are -100, so it has no gradients: take another batch.")
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    layers = dict(linear_layers(model))

    def remember(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
            inputs[name], outputs[name] = args[0].detach(), y
            if y.requires_grad:
                y.retain_grad()

        return hook

    handles = [layer.register_forward_hook(remember(name)) for name, layer in layers.items()]
    device = next(model.parameters()).device
    try:
        with evaluating(model), torch.enable_grad(), precision(model, "bf16"):
            loss = getattr(model(**{key: value.to(device) for key, value in batch.items()}), "loss", None)
            if loss is None:
                raise ValueError(f"The model gave no loss for a batch of {', '.join(batch)}: it needs labels as well.")
            reached = [y for y in outputs.values() if y.requires_grad]
            if reached:  # gradients go to the layers' outputs only, never into a parameter's .grad
                loss.backward(inputs=reached)
    finally:
        for handle in handles:
            handle.remove()
    found = {}
    for name, y in outputs.items():
        layer = layers[name]
        weight = layer.dense_weight() if isinstance(layer, Linear) else layer.weight
        dy_TN = y.grad.flatten(0, -2) if y.grad is not None else None
        found[name] = Operands(inputs[name].flatten(0, -2), weight.detach(), dy_TN)
    return found
