"""Linear: one layer for every recipe. Precision happens in `_Product`; a layer differs from another only by what it holds.

    y_TN  = x_TK w_NK'       forward
    dx_TK = dy_TN w_NK       grad_input
    dw_NK = dy_TN' x_TK      grad_weight

Each product is computed as a_MK b_NK' with the contracted dimension last, whatever its letters are, and each operand goes
through its own quantizer first. What forward keeps for backward is x as grad_weight will want it: its codes (one byte an
element in FP8), or nothing where the weight is frozen. The weight is quantized again in backward: it is there anyway, and
keeping its codes would cost a byte a parameter.

The layer is a torch.nn.Linear with the same state-dict keys. A stored (frozen, quantized) weight keeps the name `weight` for
its codes and adds the scales of its checkpoint format (`weight_scale_inv`, or `weight_scale` and so on: `Scaling.stored_as`);
an adapter adds `lora_A.weight` and `lora_B.weight`.

T tokens (all leading dimensions), K in_features, N out_features, r rank of the adapter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from surokit.nn.delayed import DelayedScales
from surokit.product import product
from surokit.quantized import Quantized, quantize, quantize_both
from surokit.quantizer import Quantizer
from surokit.recipe import Lora, Recipe


@dataclass(frozen=True, eq=False)
class Precision:
    """How a layer computes its three products: quantizers, and where the delayed ones keep their amaxes (x, w, dy)."""

    recipe: Recipe
    scales: DelayedScales | None = None
    first_slot: int = 0


class Linear(nn.Linear):
    """y = x w' + bias, with operands quantized as `precision` says, a weight that may be stored quantized, and an adapter.

    Shapes: x [..., K], weight [N, K], y [..., N]. Made by hand it computes like torch.nn.Linear; `surokit.apply` sets the rest.
    """

    # class-level defaults, so that an nn.Linear adopted by `convert` needs no construction
    precision: Precision | None = None
    storage: Quantizer | None = None
    lora_alpha: float = 0.0
    # submodules that are there only with an adapter; a class-level default would hide them
    lora_A: nn.Linear
    lora_B: nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.precision is None and self.storage is None:
            y = F.linear(x, self.weight, self.bias)
        else:
            y = self._quantized(x)
        if self.has_adapter:
            h = self.lora_A(x) * (self.lora_alpha / self.lora_rank)
            y = y + self.lora_B(h)
        return y

    def _quantized(self, x: Tensor) -> Tensor:
        w: Tensor = self.weight
        bias: Tensor | None = self.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x = x.to(dtype)
            if self.storage is None:  # codes stay codes
                w = w.to(dtype)
            bias = bias.to(dtype) if bias is not None else None
        x_TK = x.reshape(-1, x.shape[-1])
        record = self.training and torch.is_grad_enabled()
        shape_NK = self.out_features, self.in_features
        y_TN = _Product.apply(x_TK, w, shape_NK, self.storage, self.precision, record, *self.stored_scales)
        y = y_TN.view(*x.shape[:-1], -1)
        return y if bias is None else y + bias

    # -- a stored weight

    def store(self, quantizer: Quantizer) -> None:
        """Replace the weight by its codes and scales, frozen; the high-precision weight is let go."""
        if self.storage is None:
            self.set_stored(quantize(self.weight.detach(), quantizer))

    def set_stored(self, Q: Quantized) -> None:
        """Take a quantized weight [N, K] as it is, for example from a checkpoint."""
        self.drop_stored()
        for name, part in zip(("weight", *Q.quantizer.scaling.stored_as), Q.parts):
            setattr(self, name, nn.Parameter(part, requires_grad=False))
        self.storage = Q.quantizer

    def drop_stored(self) -> None:
        """Forget a stored weight's scales; `weight` is then for the caller to set."""
        if self.storage is not None:
            for name in self.storage.scaling.stored_as:
                self._parameters.pop(name, None)
            self.storage = None

    @property
    def stored_scales(self) -> tuple[Tensor, ...]:
        """Scales of a stored weight, and scales of the scales; empty without one."""
        if self.storage is None:
            return ()
        return tuple(getattr(self, name) for name in self.storage.scaling.stored_as if name in self._parameters)

    @property
    def stored(self) -> Quantized | None:
        """The stored weight [N, K], or None."""
        if self.storage is None:
            return None
        return Quantized.of(self.storage, (self.weight, *self.stored_scales), (self.out_features, self.in_features))

    def dense_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight [N, K] as the products see it: itself, or dequantized (bfloat16 unless `dtype` is given)."""
        stored = self.stored
        if stored is None:
            return self.weight.to(dtype or self.weight.dtype)
        return stored.dequantize(dtype or torch.bfloat16)

    # -- an adapter

    @property
    def has_adapter(self) -> bool:
        return "lora_A" in self._modules

    @property
    def lora_rank(self) -> int:
        """Rank of the adapter, 0 without one."""
        return self.lora_A.out_features if self.has_adapter else 0

    def add_adapter(self, lora: Lora, dtype: torch.dtype | None = None) -> None:
        """Add y += alpha / rank * B A x: A Kaiming-uniform, B zero as in Hu et al. (2021), so that y is unchanged at first.

        A and B take `dtype`; without it the weight's own, or bfloat16 where the weight is stored.
        """
        dtype = dtype or (torch.bfloat16 if self.storage else self.weight.dtype)
        device = self.weight.device
        self.lora_A = nn.Linear(self.in_features, lora.rank, bias=False, device=device, dtype=dtype)
        self.lora_B = nn.Linear(lora.rank, self.out_features, bias=False, device=device, dtype=dtype)
        # drawn on the CPU, so that a seed gives the same adapter on every device
        a = nn.init.kaiming_uniform_(torch.empty(lora.rank, self.in_features), a=math.sqrt(5))
        with torch.no_grad():
            self.lora_A.weight.copy_(a)
        nn.init.zeros_(self.lora_B.weight)
        self.lora_alpha = lora.alpha
        self.lora_A.requires_grad_(True)
        self.lora_B.requires_grad_(True)

    def remove_adapter(self) -> None:
        """Drop the adapter without merging it."""
        del self.lora_A, self.lora_B

    @torch.no_grad()
    def merge_adapter(self) -> None:
        """Add the adapter to the weight and drop it; needs a weight that is not stored quantized."""
        if not self.has_adapter:
            return
        if self.storage is not None:
            raise ValueError(
                "The weight is stored quantized, so the adapter cannot be merged: apply surokit.BF16 first."
            )
        delta = self.lora_B.weight.float() @ self.lora_A.weight.float()
        self.weight += (delta * (self.lora_alpha / self.lora_rank)).to(self.weight.dtype)
        self.remove_adapter()

    def extra_repr(self) -> str:
        parts = [super().extra_repr()]
        if self.precision is not None:
            parts.append(f"recipe={self.precision.recipe.name}")
        if self.storage is not None:
            parts.append(f"W={self.storage}")
        if self.has_adapter:
            parts.append(f"lora r={self.lora_rank}")
        return ", ".join(parts)


def compile_around() -> None:
    """Make torch.compile leave quantized layers as they are and compile what lies between them.

    Tracing them would bake amax histories and scales into the graph as constants of each layer and recompile without end.
    """
    if not hasattr(Linear._quantized, "_torchdynamo_disable"):
        Linear._quantized = torch.compiler.disable(Linear._quantized)  # type: ignore[method-assign]


class _Product(torch.autograd.Function):
    """The three products of a layer. `w` holds codes where `storage` is given (its scales beside it), else the weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TK: Tensor,
        w: Tensor,
        shape_NK: tuple[int, int],
        storage: Quantizer | None,
        precision: Precision | None,
        record: bool,
        *w_scales: Tensor,
    ) -> Tensor:
        ctx.shape_NK, ctx.storage, ctx.precision, ctx.record = shape_NK, storage, precision, record
        operand = _Operands(precision, record, x_TK.dtype)
        recipe = operand.recipe
        w_NK = _weight(w, w_scales, storage, shape_NK)
        wants_dw = w.requires_grad
        x_q, x_kept = operand.both_ways("x", recipe.forward.a, recipe.grad_weight.b, x_TK, wants_dw)
        y_TN = product(x_q, operand("w", recipe.forward.b, w_NK), x_TK.dtype, recipe.forward.fast_accumulation)
        # what grad_weight needs of x' [K, T]: codes and scales, or x itself
        ctx.kept = x_kept.quantizer if isinstance(x_kept, Quantized) else None
        kept = x_kept.parts if isinstance(x_kept, Quantized) else (x_TK,) if wants_dw else ()
        ctx.save_for_backward(w, *w_scales, *kept)
        ctx.scales = len(w_scales)
        return y_TN

    @staticmethod
    def backward(ctx: Any, dy_TN: Tensor) -> Any:
        w, *rest = ctx.saved_tensors
        w_scales, kept = tuple(rest[: ctx.scales]), tuple(rest[ctx.scales :])
        dy_TN = dy_TN.contiguous()
        operand = _Operands(ctx.precision, ctx.record, dy_TN.dtype)
        recipe = operand.recipe
        wants_dx, wants_dw = ctx.needs_input_grad[:2]
        dx_TK = dw_NK = None
        dy_q, dy_t = operand.both_ways("dy", recipe.grad_input.a, recipe.grad_weight.a, dy_TN, wants_dw, wants_dx)
        if wants_dx:
            gemm = recipe.grad_input
            w_NK = _weight(w, w_scales, ctx.storage, ctx.shape_NK)
            w_KN = operand.transposed("w", gemm.b, w_NK, recorded=_delayed(recipe.forward.b))
            dx_TK = product(dy_q, w_KN, dy_TN.dtype, gemm.fast_accumulation)
        if wants_dw:
            gemm = recipe.grad_weight
            x_KT = Quantized.of(ctx.kept, kept, (ctx.shape_NK[1], dy_TN.shape[0])) if ctx.kept else kept[0].t()
            dw_NK = product(dy_t, x_KT, w.dtype, gemm.fast_accumulation)
        return dx_TK, dw_NK, None, None, None, None, *(None for _ in w_scales)


def _weight(
    w: Tensor, scales: tuple[Tensor, ...], storage: Quantizer | None, shape_NK: tuple[int, int]
) -> Tensor | Quantized:
    return w if storage is None else Quantized.of(storage, (w, *scales), shape_NK)


def _delayed(q: Quantizer | None) -> bool:
    return q is not None and q.delayed


_SLOTS = {"x": 0, "w": 1, "dy": 2}
_UNQUANTIZED = Recipe("bf16")

Operand = Tensor | Quantized


class _Operands:
    """Quantizes the operands of one layer, the delayed ones by the amax in force."""

    def __init__(self, precision: Precision | None, record: bool, dtype: torch.dtype) -> None:
        self.recipe = precision.recipe if precision else _UNQUANTIZED
        self.precision = precision
        self.record = record
        self.dtype = dtype

    def __call__(self, role: str, q: Quantizer | None, x_MK: Operand, recorded: bool = False) -> Operand:
        """The operand as `q` wants it. `recorded` says that the amax of this very tensor was recorded before."""
        if q is None:
            return x_MK
        if isinstance(x_MK, Quantized):  # a stored weight: its codes serve where they are what q would make
            if x_MK.quantizer.same_codes(q):
                return x_MK
            x_MK = x_MK.dequantize(self.dtype)
        amax = None
        if q.delayed and self.precision is not None and self.precision.scales is not None:
            amax = self.precision.scales.amax(
                self.precision.first_slot + _SLOTS[role], x_MK, self.record and not recorded
            )
        return quantize(x_MK, q, amax=amax)

    def transposed(self, role: str, q: Quantizer | None, x_MK: Operand, recorded: bool = False) -> Operand:
        """The operand x' [K, M]. Quantizing and transposing commute where the tiles are square."""
        if q is not None and q.transposable:
            return self(role, q, x_MK, recorded).t()
        if isinstance(x_MK, Quantized):
            x_MK = x_MK.dequantize(self.dtype)
        return self(role, q, x_MK.t(), recorded)

    def both_ways(
        self,
        role: str,
        q: Quantizer | None,
        q_t: Quantizer | None,
        x_MK: Tensor,
        wants_transposed: bool,
        wants_plain: bool = True,
    ) -> tuple[Operand, Operand]:
        """x [M, K] as one product wants it and x' [K, M] as another does, in one pass over x where that is possible."""
        if wants_plain and wants_transposed and q is not None and q == q_t and q.both_in_one_pass:
            return quantize_both(x_MK, q)
        plain: Operand = self(role, q, x_MK) if wants_plain else x_MK
        if not wants_transposed:
            return plain, x_MK
        if isinstance(plain, Quantized) and plain.quantizer == q_t and q_t.transposable:
            return plain, plain.t()
        return plain, self.transposed(role, q_t, x_MK, recorded=wants_plain and _delayed(q))
