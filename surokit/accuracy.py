"""How much each recipe's quantization disturbs each product of a model, on the user's own batch, without training.

One forward and backward in bfloat16 gives every layer's x, w and dy. Each recipe's three products are then computed from
these and compared with the float32 product: SQNR in dB, and for the operands the share of elements that were clipped or
fell to zero. Every recipe sees the same operands, so the differences are its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from surokit.convert import _linear_layers, precision
from surokit.nn.linear import Linear
from surokit.product import product
from surokit.quantized import Quantized, quantize, sqnr_db
from surokit.quantizer import Quantizer
from surokit.recipe import Recipe, count_blocks, find_recipe

if TYPE_CHECKING:
    import pandas as pd


def compare(model: nn.Module, batch: Mapping[str, Tensor], *recipes: Recipe | str) -> pd.DataFrame:
    """DataFrame with the columns layer, gemm, recipe, sqnr_db, clipped, underflow; one row a layer, product and recipe.

    `batch` is {"input_ids": [B, T], "labels": [B, T]}. Parameters, gradients and delayed-scaling histories are not touched; a
    delayed recipe is judged with the batch's own amaxes. Layers that a recipe keeps in bfloat16 are left out for it.
    """
    import pandas as pd

    chosen = [find_recipe(r) for r in recipes]
    if not chosen:
        raise ValueError("compare() needs at least one recipe, for example compare(model, batch, surokit.FP8).")
    operands = _operands(model, batch)
    blocks = count_blocks(operands)
    rows = []
    for name, (x_TK, w_NK, dy_TN) in operands.items():
        for recipe in chosen:
            if recipe.kept_by(name, blocks):
                continue
            for gemm, row in _judge(recipe, x_TK, w_NK, dy_TN):
                rows.append({"layer": name, "gemm": gemm, "recipe": recipe.name, **row})
    return pd.DataFrame(rows, columns=["layer", "gemm", "recipe", "sqnr_db", "clipped", "underflow"])


def _operands(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor, Tensor | None]]:
    """x [T, K], w [N, K] and dy [T, N] of every linear layer, from one forward and backward in bfloat16."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    layers = dict(_linear_layers(model))

    def remember(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
            inputs[name], outputs[name] = args[0].detach(), y
            if y.requires_grad:
                y.retain_grad()

        return hook

    handles = [layer.register_forward_hook(remember(name)) for name, layer in layers.items()]
    device = next(model.parameters()).device
    try:
        with precision(model, "bf16"):
            loss = model(**{key: value.to(device) for key, value in batch.items()}).loss
            reached = [y for y in outputs.values() if y.requires_grad]
            if reached:  # gradients go to the layers' outputs only, never into a parameter's .grad
                loss.backward(inputs=reached)
    finally:
        for handle in handles:
            handle.remove()
    found = {}
    for name, layer in layers.items():
        if name not in outputs:
            continue  # a layer that this batch did not reach, such as an idle expert
        weight = layer.dense_weight() if isinstance(layer, Linear) else layer.weight
        dy = outputs[name].grad
        x_TK, dy_TN = inputs[name].flatten(0, -2), dy.flatten(0, -2) if dy is not None else None
        found[name] = (x_TK, weight.detach(), dy_TN)
    return found


def _judge(recipe: Recipe, x_TK: Tensor, w_NK: Tensor, dy_TN: Tensor | None) -> Iterator[tuple[str, dict[str, float]]]:
    """The three products of one layer. A stored weight replaces w in forward and grad_input; it has no grad_weight."""
    f, i, g = recipe.forward, recipe.grad_input, recipe.grad_weight
    exact_w = w_NK
    stored: list[tuple[Quantized, Tensor]] = []
    if recipe.storage:
        Q = quantize(w_NK, recipe.storage)
        stored = [(Q, w_NK)]
        w_NK = Q.dequantize(w_NK.dtype)
    yield "forward", _row(_exact(x_TK, exact_w), (x_TK, f.a), (w_NK, f.b), stored)
    if dy_TN is None:
        return
    yield "grad_input", _row(_exact(dy_TN, exact_w.t()), (dy_TN, i.a), (w_NK.t(), i.b), stored)
    if not recipe.storage:
        dy_NT, x_KT = dy_TN.t(), x_TK.t()
        yield "grad_weight", _row(_exact(dy_NT, x_KT), (dy_NT, g.a), (x_KT, g.b), [])


def _exact(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    return a_MK.float() @ b_NK.float().t()


def _row(
    exact_MN: Tensor,
    a: tuple[Tensor, Quantizer | None],
    b: tuple[Tensor, Quantizer | None],
    stored: list[tuple[Quantized, Tensor]],
) -> dict[str, float]:
    """SQNR of the product, and over all quantized operands the clipped and vanished elements."""
    quantized = list(stored)
    factors = [quantize(x, q) if q else x for x, q in (a, b)]
    quantized += [(Q, x) for Q, (x, _) in zip(factors, (a, b)) if isinstance(Q, Quantized)]
    elements = sum(x.numel() for _, x in quantized) or 1
    return {
        "sqnr_db": sqnr_db(exact_MN, product(factors[0], factors[1], torch.float32)),
        "clipped": sum(Q.clipped(x) * x.numel() for Q, x in quantized) / elements,
        "underflow": sum(Q.underflow(x) * x.numel() for Q, x in quantized) / elements,
    }
