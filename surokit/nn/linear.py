"""Linear: one layer for every recipe. Precision happens in `_Product`; a layer differs from another only by what it holds.

    y_TN  = x_TK w_NK'       forward
    dx_TK = dy_TN w_NK       grad_input
    dw_NK = dy_TN' x_TK      grad_weight

Each product is computed as a_MK b_NK' with the contracted dimension last, whatever its letters are, and each operand goes
through its own quantizer first. What forward keeps for backward is x as grad_weight will want it: its codes (one byte an
element in FP8), or nothing where the weight is frozen. The weight is quantized again in backward: it is there anyway, and
keeping its codes would cost a byte a parameter.

The layer is a torch.nn.Linear with the same state-dict keys. A stored (frozen, quantized) weight keeps the name `weight` for
its codes and adds `weight_scale_inv`; an adapter adds `lora_A.weight` and `lora_B.weight`.

T tokens (all leading dimensions), K in_features, N out_features, r rank of the adapter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from surokit import kernels
from surokit.formats import E5M2
from surokit.nn.delayed import DelayedScales
from surokit.quantizer import Block, Quantized, Quantizer, quantize
from surokit.recipe import Gemm, Lora, Recipe


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
        scales = self.weight_scale_inv if self.storage else None
        y_TN = _Product.apply(x_TK, w, scales, self.storage, self.precision, record)
        y = y_TN.view(*x.shape[:-1], -1)
        return y if bias is None else y + bias

    # -- a stored weight

    def store(self, quantizer: Quantizer) -> None:
        """Replace the weight by its codes [N, K] and scales, frozen; the high-precision weight is let go."""
        if self.storage is not None:
            return
        Q = quantize(self.weight.detach(), quantizer)
        self.set_stored(Q.codes, Q.scales, quantizer)

    def set_stored(self, codes_NK: Tensor, scales_RC: Tensor, quantizer: Quantizer) -> None:
        """Take codes and scales as they are, for example from a checkpoint."""
        self.weight = nn.Parameter(codes_NK, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scales_RC, requires_grad=False)
        self.storage = quantizer

    def dense_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight [N, K] as the products see it: itself, or dequantized (bfloat16 unless `dtype` is given)."""
        if self.storage is None:
            return self.weight.to(dtype or self.weight.dtype)
        return Quantized(self.weight, self.weight_scale_inv, self.storage).dequantize(dtype or torch.bfloat16)

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
        w_NK: Tensor,
        w_scales: Tensor | None,
        storage: Quantizer | None,
        precision: Precision | None,
        record: bool,
    ) -> Tensor:
        ctx.storage, ctx.precision, ctx.record = storage, precision, record
        operand = _Operands(precision, record)
        gemm = operand.recipe.forward
        x_q = operand("x", gemm.a, x_TK)
        w_q = operand("w", gemm.b, _dense(w_NK, w_scales, storage, x_TK.dtype))
        y_TN = product(x_q, w_q, x_TK.dtype, gemm)
        kept: tuple[Tensor | None, Tensor | None] = (None, None)
        if w_NK.requires_grad:
            # the second operand of dw: x transposed, as [K, T]
            kept, ctx.kept_quantizer = operand.keep("x", x_q, x_TK, operand.recipe.grad_weight.b)
        ctx.save_for_backward(w_NK, w_scales, *kept)
        return y_TN

    @staticmethod
    def backward(ctx: Any, dy_TN: Tensor) -> Any:
        w_NK, w_scales, kept, kept_scales = ctx.saved_tensors
        dy_TN = dy_TN.contiguous()
        operand = _Operands(ctx.precision, ctx.record)
        recipe = operand.recipe
        dx_TK = dw_NK = None
        dy_q: Tensor | Quantized | None = None
        if ctx.needs_input_grad[0]:
            gemm = recipe.grad_input
            dy_q = operand("dy", gemm.a, dy_TN)
            w = _dense(w_NK, w_scales, ctx.storage, dy_TN.dtype)
            w_q = operand.transposed("w", gemm.b, w, recorded=_delayed(recipe.forward.b))
            dx_TK = product(dy_q, w_q, dy_TN.dtype, gemm)
        if ctx.needs_input_grad[1]:
            gemm = recipe.grad_weight
            if isinstance(dy_q, Quantized) and gemm.a == dy_q.quantizer and dy_q.quantizer.transposable:
                dy_t: Tensor | Quantized = dy_q.t()
            else:
                dy_t = operand.transposed("dy", gemm.a, dy_TN)
            x_t = Quantized(kept, kept_scales, ctx.kept_quantizer) if ctx.kept_quantizer else kept
            dw_NK = product(dy_t, x_t, w_NK.dtype, gemm)
        return dx_TK, dw_NK, None, None, None, None


def _delayed(q: Quantizer | None) -> bool:
    return q is not None and q.delayed


_SLOTS = {"x": 0, "w": 1, "dy": 2}
_UNQUANTIZED = Recipe("bf16")


class _Operands:
    """Quantizes the operands of one layer, the delayed ones by the amax in force."""

    def __init__(self, precision: Precision | None, record: bool) -> None:
        self.recipe = precision.recipe if precision else _UNQUANTIZED
        self.precision = precision
        self.record = record

    def __call__(self, role: str, q: Quantizer | None, x_MK: Tensor, recorded: bool = False) -> Tensor | Quantized:
        """`recorded` says that the amax of this very tensor was recorded before."""
        if q is None:
            return x_MK
        amax = None
        if q.delayed and self.precision is not None and self.precision.scales is not None:
            amax = self.precision.scales.amax(
                self.precision.first_slot + _SLOTS[role], x_MK, self.record and not recorded
            )
        return quantize(x_MK, q, amax=amax)

    def transposed(self, role: str, q: Quantizer | None, x_MK: Tensor, recorded: bool = False) -> Tensor | Quantized:
        """The operand x' [K, M]. Quantizing and transposing commute where the tiles are square."""
        if q is not None and q.transposable:
            turned = self(role, q, x_MK, recorded)
            return turned.t() if isinstance(turned, Quantized) else turned
        return self(role, q, x_MK.t(), recorded)

    def keep(
        self, role: str, x_q: Tensor | Quantized, x_MK: Tensor, q: Quantizer | None
    ) -> tuple[tuple[Tensor, Tensor | None], Quantizer | None]:
        """What backward needs of x' [K, M]: codes and scales (reusing forward's where they serve), or x' itself."""
        if q is None:
            return (x_MK.t(), None), None
        if isinstance(x_q, Quantized) and x_q.quantizer == q and q.transposable:
            turned: Tensor | Quantized = x_q.t()
        else:
            turned = self.transposed(role, q, x_MK, recorded=_delayed(self.recipe.forward.a))
        assert isinstance(turned, Quantized)
        return (turned.codes, turned.scales), q


def _dense(w_NK: Tensor, scales: Tensor | None, storage: Quantizer | None, dtype: torch.dtype) -> Tensor:
    if storage is None or scales is None:
        return w_NK
    return Quantized(w_NK, scales, storage).dequantize(dtype)


def product(a_MK: Tensor | Quantized, b_NK: Tensor | Quantized, dtype: torch.dtype, gemm: Gemm | None = None) -> Tensor:
    """[M, N] = a b' in `dtype`. Two float8 operands go to the scaled product; anything else is dequantized to `dtype` first."""
    if isinstance(a_MK, Quantized) and isinstance(b_NK, Quantized) and scaled(a_MK.quantizer, b_NK.quantizer):
        return kernels.scaled_mm(
            a_MK.codes,
            a_MK.scales,
            b_NK.codes,
            b_NK.scales,
            out_dtype=dtype,
            pow2=a_MK.quantizer.scaling.pow2 and b_NK.quantizer.scaling.pow2,
            fast_accumulation=gemm is not None and gemm.fast_accumulation,
        )
    a, b = (m.dequantize(dtype) if isinstance(m, Quantized) else m.to(dtype) for m in (a_MK, b_NK))
    return a @ b.t()


def scaled(a: Quantizer | None, b: Quantizer | None) -> bool:
    """Whether a product of these operands is a scaled float8 product: scales constant along the sum, not both in E5M2."""
    if a is None or b is None or isinstance(a.scaling, Block) or isinstance(b.scaling, Block):
        return False
    return not (a.format == b.format == E5M2)  # tensor cores take no such pair
