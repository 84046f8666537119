"""Compute the three products of a linear layer, each operand through its own quantizer.

    y_TN  = x_TK w_NK'       forward
    dx_TK = dy_TN w_NK       grad_input
    dw_NK = dy_TN' x_TK      grad_weight

Each is computed as a_MK b_NK' with the contracted dimension last, whatever its letters are. What forward keeps for backward is
x as grad_weight will want it: its codes (one byte an element in FP8, half a byte in FP4), or nothing where the weight is
frozen. Tensor cores read both operands along the sum, so on such a device the codes of x', dy' and w' are written in rows of
their own by what makes them (`needs_contiguous_transpose`); elsewhere they are views. The weight is quantized again in backward: it
is there anyway, and keeping its codes would cost a byte a parameter (nn/weight_cache.py keeps those of a frozen weight where a
stage is asked to). Where signs of a rotation are drawn, the second operand of a gradient to be quantized takes those of the first:
w' those of dy, and dy' those of x', whose key is kept with its codes.

To torch, forward and backward are one operation each (`torch.ops.surokit.products_forward`, `products_backward`): a compiled
graph holds them whole and knows their shapes by running the same code on tensors without data. A layer's recipe travels as text,
and where delayed scaling keeps the layer's amaxes as two numbers.

A layer on its own is no stage of one layer (nn/stages.py): a stage takes Python objects and keeps codes at its layers, which
torch's compiler cannot hold in a graph, so these two operations would have to stay for compiled models and nothing could go. Nor
is there time to win: forward and backward of a small layer on a CPU took a stage 1.00 (fp8), .98 (fp8-rowwise) and 1.00 (qfp8)
times as long, the median of 25 turns.

T tokens (all leading dimensions), K in_features, N out_features.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from surokit.nn.delayed import DelayedScales, bank
from surokit.nn.gathered import Gathered, GatheredCodes
from surokit.product import computes, product
from surokit.quantized import Quantized, quantize, quantize_both
from surokit.quantizer import Quantizer, Scaling
from surokit.recipe import Gemm, Recipe

UNQUANTIZED = Recipe("bf16")
Operand = Tensor | Quantized

# The operations are told a layer's recipe and storage as text, from which both can be made again in any process that finds the
# compiled graph on disk. A string is what torch's compiler takes for a constant and compares; it takes no recipe and no quantizer.


@cache
def key_of(recipe: Recipe) -> str:
    """Write a recipe's three products as text."""
    return _written([gemm.to_dict() for gemm in recipe.gemms])


@cache
def storage_key_of(storage: Quantizer | None) -> str:
    """Write how a weight is stored as text; "" where it is not."""
    return _written(storage.to_dict()) if storage else ""


def _written(data: Any) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


@cache
def recipe_of(key: str) -> Recipe:
    """Read what `key_of` wrote: a recipe of these products, and of nothing else."""
    forward, grad_input, grad_weight = (Gemm.from_dict(data) for data in json.loads(key))
    return Recipe("products", forward, grad_input, grad_weight)


@cache
def storage_of(key: str) -> Quantizer | None:
    """Read what `storage_key_of` wrote."""
    return Quantizer.from_dict(json.loads(key)) if key else None


_UNQUANTIZED = key_of(UNQUANTIZED)
_MOST_SCALES = max(len(scaling.stored_as) for scaling in Scaling.__subclasses__())


@dataclass(frozen=True, eq=False)
class Precision:
    """A Precision says how a layer computes its three products: the quantizers, and where the delayed ones keep their amaxes (x, w,
    dy)."""

    recipe: Recipe
    scales: DelayedScales | None = None
    first_slot: int = 0
    key: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", key_of(self.recipe))


def three_products(
    x_TK: Tensor,
    w: Tensor,
    out_features: int,
    storage: str,
    w_scales: tuple[Tensor, ...],
    precision: Precision | None,
    record: bool,
) -> Tensor:
    """Compute y [T, N] in the dtype of x, with the gradients that the recipe says.

    w: the weight [N, K], or its codes, with the key of their `storage` and `w_scales`. record: delayed scaling notes the amaxes
    it sees.
    """
    recipe = precision.key if precision else _UNQUANTIZED
    scales, first = (precision.scales, precision.first_slot) if precision else (None, 0)
    amaxes = (scales.number if scales else -1), first
    # always as many arguments: torch's compiler counts them
    padded = (*w_scales, *(None for _ in range(_MOST_SCALES - len(w_scales))))
    wants_dw = w.requires_grad and torch.is_grad_enabled()
    y_TN: Tensor = _Product.apply(x_TK, w, *padded, out_features, recipe, storage, *amaxes, wants_dw, record)
    return y_TN


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TK: Tensor,
        w: Tensor,
        w_scales: Tensor | None,
        w_scales_2: Tensor | None,
        w_scales_3: Tensor | None,
        out_features: int,
        recipe: str,
        storage: str,
        scales: int,
        first_slot: int,
        wants_dw: bool,
        record: bool,
    ) -> Tensor:
        given = [s for s in (w_scales, w_scales_2, w_scales_3) if s is not None]
        y_TN, *kept = torch.ops.surokit.products_forward(
            x_TK, w, given, out_features, recipe, storage, scales, first_slot, wants_dw, record
        )
        if wants_dw and len(kept) == 0:  # grad_weight takes x as it is
            kept = [x_TK]
        ctx.save_for_backward(w, *given, *kept)
        ctx.w_scales = len(given)
        ctx.constants = out_features, x_TK.shape[1], recipe, storage, scales, first_slot
        ctx.record = record
        return y_TN

    @staticmethod
    @once_differentiable  # the rounding of dy has no gradient: an error is better than a wrong one
    def backward(ctx: Any, dy_TN: Tensor) -> Any:
        w, *rest = ctx.saved_tensors
        w_scales, kept = rest[: ctx.w_scales], rest[ctx.w_scales :]
        wants_dx, wants_dw = ctx.needs_input_grad[:2]
        grads = torch.ops.surokit.products_backward(
            dy_TN.contiguous(), w, w_scales, kept, *ctx.constants, wants_dx, wants_dw, ctx.record
        )
        dx_TK = grads[0] if wants_dx else None
        dw_NK = grads[-1] if wants_dw else None
        return dx_TK, dw_NK, *(None for _ in range(10))


# -- the two operations

_LIBRARY = torch.library.Library("surokit", "FRAGMENT")


def _forward(
    x_TK: Tensor,
    w: Tensor,
    w_scales: list[Tensor],
    out_features: int,
    recipe: str,
    storage: str,
    scales: int,
    first_slot: int,
    wants_dw: bool,
    record: bool,
) -> list[Tensor]:
    """Return y [T, N], then the codes and scales of x' [K, T] where grad_weight quantizes it."""
    products = Products(recipe_of(recipe), bank(scales), (first_slot,), record, x_TK.dtype)
    x_q, x_kept = products.x(x_TK, wants_dw)
    w_NK = weight(w, w_scales, storage_of(storage), (out_features, x_TK.shape[1]))
    y_TN = products.forward(x_q, products.w(w_NK))
    return [y_TN, *(x_kept.parts if wants_dw and isinstance(x_kept, Quantized) else ())]


def _backward(
    dy_TN: Tensor,
    w: Tensor,
    w_scales: list[Tensor],
    kept: list[Tensor],
    out_features: int,
    in_features: int,
    recipe: str,
    storage: str,
    scales: int,
    first_slot: int,
    wants_dx: bool,
    wants_dw: bool,
    record: bool,
) -> list[Tensor]:
    """Return dx [T, K] and dw [N, K], those that are wanted."""
    products = Products(recipe_of(recipe), bank(scales), (first_slot,), record, dy_TN.dtype)
    x_KT = products.x_t(kept, (in_features, dy_TN.shape[0])) if wants_dw else None
    dy_q, dy_t = products.dy(dy_TN, wants_dx, wants_dw, x_KT)
    grads = []
    if wants_dx:
        w_NK = weight(w, w_scales, storage_of(storage), (out_features, in_features))
        grads.append(products.grad_input(dy_q, products.w_t(w_NK, dy_q)))
    if x_KT is not None:
        grads.append(products.grad_weight(dy_t, x_KT, w.dtype))
    return grads


def _without_amaxes(function: Callable[..., list[Tensor]], position: int) -> Callable[..., list[Tensor]]:
    """Make a form for tensors without data, where there are no amaxes to read."""
    return lambda *args: function(*args[:position], -1, *args[position + 1 :])


def _with_gathered(function: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """Make a form for weights that were gathered: the same code, which asks them what they hold."""
    return lambda cls, operation, types, args, kwargs: function(*args, **(kwargs or {}))


_LAYER = "str recipe, str storage, int scales, int first_slot"
for _schema, _function, _position in (
    (
        f"products_forward(Tensor x, Tensor w, Tensor[] w_scales, int out_features, {_LAYER}, bool wants_dw, "
        "bool record) -> Tensor[]",
        _forward,
        6,
    ),
    (
        f"products_backward(Tensor dy, Tensor w, Tensor[] w_scales, Tensor[] kept, int out_features, int in_features, "
        f"{_LAYER}, bool wants_dx, bool wants_dw, bool record) -> Tensor[]",
        _backward,
        8,
    ),
):
    _name = _schema.partition("(")[0]
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"surokit::{_name}", _without_amaxes(_function, _position), lib=_LIBRARY)
    torch.library.register_torch_dispatch(f"surokit::{_name}", Gathered, _with_gathered(_function), lib=_LIBRARY)


def weight(w: Tensor, scales: Sequence[Tensor], storage: Quantizer | None, shape_NK: tuple[int, int]) -> Operand:
    """Return a layer's weight [N, K] as it is held: numbers, or the codes and scales of a stored or gathered one."""
    if isinstance(w, Gathered):
        return w.held
    return w if storage is None else Quantized.of(storage, (w, *scales), shape_NK)


def _delayed(q: Quantizer | None) -> bool:
    return q is not None and q.delayed


SLOTS = {"x": 0, "w": 1, "dy": 2}


def needs_contiguous_transpose(gemm: Gemm, device: torch.device) -> bool:
    """Return whether codes of a transpose are to lie in rows of their own: tensor cores read both operands along the sum.

    What makes the codes then writes them so; to turn them afterwards, for every product that takes them, would be another pass.
    """
    return computes(gemm.a, gemm.b, device)


class Products:
    """A Products quantizes the operands of a layer's three products, and computes the products.

    firsts: where the layer keeps its amaxes; those of all layers that read this x, where it is quantized once for them.
    """

    def __init__(
        self, recipe: Recipe, scales: DelayedScales | None, firsts: Sequence[int], record: bool, dtype: torch.dtype
    ) -> None:
        self.recipe, self.dtype = recipe, dtype
        self._operand = _Operands(scales, firsts, record, dtype)

    def x(self, x_TK: Tensor, wants_dw: bool) -> tuple[Operand, Operand]:
        """Return x for forward, and x' for grad_weight where it is wanted."""
        grad_weight = self.recipe.grad_weight
        rows = wants_dw and needs_contiguous_transpose(grad_weight, x_TK.device)
        return self._operand.quantize_rowwise_columnwise(
            "x", self.recipe.forward.a, grad_weight.b, x_TK, rows, wants_dw
        )

    def x_t(self, kept: Sequence[Tensor], shape_KT: tuple[int, int]) -> Operand:
        """Return x' again, from its codes and scales, or from x itself where nothing quantizes it."""
        q = self.recipe.grad_weight.b
        return Quantized.of(q, tuple(kept), shape_KT) if q else kept[0].t()

    def w(self, w_NK: Operand) -> Operand:
        return self._operand("w", self.recipe.forward.b, w_NK)

    def w_t(self, w_NK: Operand, dy_q: Operand) -> Operand:
        """Return w' [K, N] for grad_input, to be multiplied with dy_q."""
        grad_input = self.recipe.grad_input
        rows = isinstance(w_NK, Tensor) and needs_contiguous_transpose(grad_input, w_NK.device)
        recorded = _delayed(self.recipe.forward.b)
        return self._operand.transposed("w", grad_input.b, w_NK, rows, recorded, rotation=_rotation(dy_q))

    def dy(self, dy_TN: Tensor, wants_dx: bool, wants_dw: bool, x_KT: Operand | None = None) -> tuple[Operand, Operand]:
        """Return dy for grad_input, and dy' for grad_weight, to be multiplied with x_KT."""
        into_x, into_w = self.recipe.grad_input.a, self.recipe.grad_weight.a
        rows = wants_dw and needs_contiguous_transpose(self.recipe.grad_weight, dy_TN.device)
        return self._operand.quantize_rowwise_columnwise(
            "dy", into_x, into_w, dy_TN, rows, wants_dw, wants_dx, rotation=_rotation(x_KT)
        )

    def forward(self, x_q: Operand, w_q: Operand, onto: Tensor | None = None) -> Tensor:
        return product(x_q, w_q, self.dtype, self.recipe.forward.fast_accumulation, onto)

    def grad_input(self, dy_q: Operand, w_t: Operand, onto: Tensor | None = None) -> Tensor:
        return product(dy_q, w_t, self.dtype, self.recipe.grad_input.fast_accumulation, onto)

    def grad_weight(self, dy_t: Operand, x_t: Operand, dtype: torch.dtype) -> Tensor:
        return product(dy_t, x_t, dtype, self.recipe.grad_weight.fast_accumulation)


def _rotation(beside: Operand | None) -> Tensor | None:
    """Return the key of the signs that an operand was rotated by, for the one that it meets."""
    return beside.rotation if isinstance(beside, Quantized) else None


class _Operands:
    """An _Operands quantizes the operands of a layer, the delayed ones by the amax in force."""

    def __init__(self, scales: DelayedScales | None, firsts: Sequence[int], record: bool, dtype: torch.dtype) -> None:
        self.scales, self.firsts, self.record, self.dtype = scales, firsts, record, dtype

    def __call__(
        self,
        role: str,
        q: Quantizer | None,
        x_MK: Operand,
        recorded: bool = False,
        rotation: Tensor | None = None,
    ) -> Operand:
        """Return the operand as `q` wants it. `recorded` says that the amax of this very tensor was recorded before; `rotation` is
        of the operand that it will meet."""
        if q is None:
            return x_MK
        slots, record = [first + SLOTS[role] for first in self.firsts], self.record and not recorded
        if isinstance(x_MK, Quantized):  # a stored or gathered weight: its codes serve where they are what q would make
            if x_MK.quantizer.same_codes(q):
                if isinstance(x_MK, GatheredCodes) and x_MK.amax is not None and record and self.scales is not None:
                    self.scales.note(slots, x_MK.amax)
                return x_MK
            x_MK = self._decoded(x_MK)
        if q.delayed and self.scales is not None:
            return self.scales.quantize(slots, x_MK, q, record)
        if rotation is not None and q.rounding == "eden":
            return quantize(x_MK, q, rotation=rotation)
        return quantize(x_MK, q)

    def transposed(
        self,
        role: str,
        q: Quantizer | None,
        x_MK: Operand,
        rows: bool = False,
        recorded: bool = False,
        rotation: Tensor | None = None,
    ) -> Operand:
        """Return the operand x' [K, M], with `rows` in rows of its own.

        Quantizing and transposing commute where the tiles are square.
        """
        if q is not None and q.transposable and (q.packed or not rows):
            return self(role, q, x_MK, recorded).t()
        if isinstance(x_MK, Quantized):
            x_MK = self._decoded(x_MK)
        return self(role, q, x_MK.t(), recorded, rotation)

    def _decoded(self, Q: Quantized) -> Tensor:
        """Return the numbers of a stored weight. Those of a gathered one would be rounded twice, which its own are not."""
        if isinstance(Q, GatheredCodes):
            raise RuntimeError(
                f"A weight was gathered as codes ({Q.quantizer}) and its layer's products want others: set a layer's recipe before "
                "the model is divided, or leave out communicate='codes' of surokit.Parallel."
            )
        return Q.dequantize(self.dtype)

    def quantize_rowwise_columnwise(
        self,
        role: str,
        q: Quantizer | None,
        q_t: Quantizer | None,
        x_MK: Tensor,
        rows: bool,
        wants_transposed: bool,
        wants_plain: bool = True,
        rotation: Tensor | None = None,
    ) -> tuple[Operand, Operand]:
        """Return x [M, K] as one product wants it and x' [K, M] as another does, in one pass over x where that is possible.

        rows: codes of x' that are those of x lie in rows of their own. rotation: of the operand that x' will meet."""
        if wants_plain and wants_transposed and q is not None and q == q_t:
            if q.both_in_one_pass:
                return quantize_both(x_MK, q)
            if rows and q.transposable and not q.packed:
                return self._same_rowwise_columnwise(role, q, x_MK)
        plain: Operand = self(role, q, x_MK) if wants_plain else x_MK
        if not wants_transposed:
            return plain, x_MK
        if isinstance(plain, Quantized) and plain.quantizer == q_t and q_t.transposable:
            return plain, plain.t()
        return plain, self.transposed(role, q_t, x_MK, rows, wants_plain and _delayed(q), rotation)

    def _same_rowwise_columnwise(self, role: str, q: Quantizer, x_MK: Tensor) -> tuple[Quantized, Quantized]:
        slots = [first + SLOTS[role] for first in self.firsts]
        if not q.delayed or self.scales is None:
            return quantize_both(x_MK, q)
        if self.scales.spaced(slots):
            return self.scales.quantize_both(slots, x_MK, q, self.record)
        plain = self.scales.quantize(slots, x_MK, q, self.record)
        return plain, plain.t()
