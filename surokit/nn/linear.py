"""Linear is the one layer for every recipe: precision happens in nn/linear_gemms.py, and layers differ only by what they hold.

The layer is a torch.nn.Linear with the same state-dict keys. A stored (frozen, quantized) weight keeps the name `weight` for
its codes and adds the scales of its checkpoint format (`weight_scale_inv`, or `weight_scale` and so on: `Scaling.stored_as`);
an adapter adds `lora_A.weight` and `lora_B.weight`.

T tokens (all leading dimensions), K in_features, N out_features, r rank of the adapter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from surokit import kernels
from surokit.nn.drawn import note_drawn
from surokit.nn.gathered import Gathered, of_no_tokens
from surokit.nn.linear_gemms import SLOTS, Precision, storage_key_of, three_products
from surokit.nn.loftq import TakenUp, take_up
from surokit.nn.weight_cache import KeepsDecoded, QuantizedWeightCache
from surokit.quantized import Quantized, quantize
from surokit.quantizer import Quantizer
from surokit.recipe import Lora
from surokit.torch_private import is_transformed

if TYPE_CHECKING:
    from surokit.nn.grouping import StagePlan


def linear(x: Tensor, w_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Compute torch.nn.functional.linear: x [..., K] to [..., N]; bfloat16 goes through float32 on a CPU where that is faster."""
    if not _is_plain(x, w_NK, bias_N) or is_transformed():
        return F.linear(x, w_NK, bias_N)
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        x, w_NK, bias_N = x.to(dtype), w_NK.to(dtype), None if bias_N is None else bias_N.to(dtype)
    alike = w_NK.dtype == x.dtype and (bias_N is None or bias_N.dtype == x.dtype) and x.shape[-1:] == w_NK.shape[1:]
    if not alike or not kernels.through_float32(x):
        return F.linear(x, w_NK, bias_N)
    y_TN: Tensor = _ThroughFloat32.apply(x.reshape(-1, x.shape[-1]), w_NK, bias_N)
    return y_TN.view(*x.shape[:-1], len(w_NK))


def _is_plain(*operands: Tensor | None) -> bool:
    """Return whether these are a CPU's own tensors, whose products may go through float32: other kinds (DTensor, quantized weights
    of torchao) have an F.linear of their own, and autocast leaves float64 as it is."""
    return kernels.converts() and all(
        t is None or (type(t) in kernels.PLAIN and t.device.type == "cpu" and t.dtype != torch.float64)
        for t in operands
    )


class _ThroughFloat32(torch.autograd.Function):
    """The gradients of this are products of the same kind, so it can be differentiated as often as torch's own."""

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, w_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        wants_dx, wants_dw, _ = ctx.needs_input_grad
        ctx.save_for_backward(x_TK if wants_dw else None, w_NK if wants_dx else None)
        return kernels.linear(x_TK, w_NK, bias_N)

    @staticmethod
    def backward(ctx: Any, dy_TN: Tensor) -> Any:
        x_TK, w_NK = ctx.saved_tensors
        wants_dx, wants_dw, wants_dbias = ctx.needs_input_grad
        product = _ThroughFloat32.apply if torch.is_grad_enabled() else kernels.linear
        dx_TK = product(dy_TN, w_NK.t(), None) if wants_dx else None
        dw_NK = product(dy_TN.t(), x_TK.t(), None) if wants_dw else None
        return dx_TK, dw_NK, dy_TN.sum(0) if wants_dbias else None


class AdapterMatrix(nn.Linear):
    """An AdapterMatrix is A or B of an adapter: a torch.nn.Linear without a bias, with its products computed as the layer's are."""

    def __init__(self, in_features: int, out_features: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(in_features, out_features, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


@dataclass(frozen=True, eq=False)
class _BeforeMerging:
    """A _BeforeMerging holds what merging an adapter replaced, outside the layer's modules and parameters, so in no state dict."""

    weight: Tensor | Quantized
    lora_A: AdapterMatrix
    lora_B: AdapterMatrix
    lora_alpha: float
    adapter_fits: str
    compute_dtype: torch.dtype | None


KEPT = ("frozen", "kept", "plans")  # attributes of a Linear that belong to it and its weight alone: no copy has them


class Linear(nn.Linear, KeepsDecoded):
    """A Linear computes y = x w' + bias, with operands quantized as `precision` says, a weight that may be stored quantized, and an
    adapter.

    Shapes: x [..., K], weight [N, K], y [..., N]. Made by hand it computes like torch.nn.Linear; `surokit.apply` sets the rest.
    """

    # class-level defaults, so that an nn.Linear adopted by `convert` needs no construction
    precision: Precision | None = None
    storage: Quantizer | None = None
    storage_key: str = ""  # as the products know it
    slots = len(SLOTS)  # of histories that delayed scaling wants
    compute_dtype: torch.dtype | None = None  # of its products, whatever x has, where another library said so
    lora_alpha: float = 0.0
    taken_up: TakenUp | None = None  # by the adapter, where it began with what quantizing the weight lost
    adapter_fits = ""  # the storage whose error it began with, in words, whatever the weight is stored in by now
    _before: _BeforeMerging | None = None
    frozen: QuantizedWeightCache | None = None  # codes of its weight and its siblings', where a stage keeps them
    plans: list[StagePlan] | None = None  # of the stage whose first layer it is, one for each way to call it
    # submodules that are there only with an adapter; a class-level default would hide them
    lora_A: AdapterMatrix
    lora_B: AdapterMatrix

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: what is kept belongs to this layer's weight alone."""
        return {name: value for name, value in self.__dict__.items() if name not in KEPT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.storage_key = storage_key_of(self.storage)  # another version may write it otherwise
        if self.precision is not None and self.precision.scales is not None:  # a copy's histories belong to its layers
            self.precision.scales.layers.add(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Linear:
        self.frozen = self.kept = None
        super()._apply(fn, recurse)
        return self

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        self.frozen = self.kept = None  # torch cannot swap in parameters that are still referred to
        super()._load_from_state_dict(*args, **options)

    def forward(self, x: Tensor) -> Tensor:
        if self.precision is None and self.storage is None:
            y = linear(x, self.weight, self.bias)
        else:
            y = self._quantized(x)
        return y + self.adapter(x) if self.has_adapter else y

    def _quantized(self, x: Tensor) -> Tensor:
        w: Tensor = self.weight
        bias: Tensor | None = self.bias
        given, dtype = x.dtype, self.compute_dtype
        if torch.is_autocast_enabled(x.device.type):
            given = dtype = torch.get_autocast_dtype(x.device.type)
        if dtype is not None:
            x = x.to(dtype)
            if self.storage is None:  # codes stay codes
                w = w.to(dtype)
            bias = bias.to(dtype) if bias is not None else None
        storage, scales = self.storage, self.stored_scales
        if self.keeps_now:  # the products get an ordinary frozen weight, and keep it as they would any
            w, storage, scales = self.decoded_weight(x.dtype), None, ()
        if x.numel() == 0:  # no tokens: nothing to quantize
            if isinstance(w, Gathered):
                y = of_no_tokens(x, w)
                return (y if bias is None else y + bias).to(given)
            return F.linear(x, w if storage is None else self.dense_weight(x.dtype), bias).to(given)
        if self.precision is None and storage is None:
            y = linear(x, w)
        else:
            x_TK = x.reshape(-1, x.shape[-1])
            record = self.training and torch.is_grad_enabled()
            stored = "" if storage is None else self.storage_key
            y_TN = three_products(x_TK, w, self.out_features, stored, scales, self.precision, record)
            y = y_TN.view(*x.shape[:-1], self.out_features)
        y = y if bias is None else y + bias
        return y if dtype is None else y.to(given)

    # -- a stored weight

    def store(self, quantizer: Quantizer) -> bool:
        """Replace the weight by its codes and scales, frozen; the high-precision weight is let go.

        One that is stored already keeps its codes where the quantizer has the same. Else it is quantized again, from float32, and
        both roundings count; returns whether that was so.
        """
        before = self.stored
        if before is None:
            self.set_stored(quantize(self.weight.detach(), quantizer))
            return False
        same = before.renamed(quantizer)
        self.set_stored(same or quantize(before.dequantize(), quantizer))
        return same is None

    def set_stored(self, Q: Quantized) -> None:
        """Take a quantized weight [N, K] as it is, for example from a checkpoint. The dtype of its products stays."""
        Q.quantizer.check_stores()
        dtype = self.compute_dtype
        self.drop_stored()
        self.compute_dtype = dtype
        for name, part in zip(("weight", *Q.quantizer.scaling.stored_as), Q.parts):
            # in rows, as files, shards and siblings side by side hold parameters
            setattr(self, name, nn.Parameter(part.contiguous(), requires_grad=False))
        self.storage, self.storage_key = Q.quantizer, storage_key_of(Q.quantizer)

    def drop_stored(self) -> None:
        """Forget a stored weight's scales; `weight` is then for the caller to set."""
        if self.storage is not None:
            for name in self.storage.scaling.stored_as:
                self._parameters.pop(name, None)
            self.storage = self.kept = self.compute_dtype = self.taken_up = None
            self.storage_key = ""

    @property
    def stored_scales(self) -> tuple[Tensor, ...]:
        """Return scales of a stored weight, and scales of the scales; empty without one."""
        if self.storage is None:
            return ()
        return tuple(getattr(self, name) for name in self.storage.scaling.stored_as if name in self._parameters)

    @property
    def stored(self) -> Quantized | None:
        """Return the stored weight [N, K], or None."""
        if self.storage is None:
            return None
        return Quantized.of(self.storage, (self.weight, *self.stored_scales), (self.out_features, self.in_features))

    def dense_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weight [N, K] as the products see it: itself, or dequantized (bfloat16 unless `dtype` is given)."""
        stored = self.stored
        if stored is None:
            return self.weight.to(dtype or self.weight.dtype)
        return stored.dequantize(dtype or torch.bfloat16)

    # -- an adapter

    def adapter(self, x: Tensor) -> Tensor:
        """Compute alpha / rank * B A x, [..., N]."""
        h = self.lora_A(x) * (self.lora_alpha / self.lora_rank)
        y: Tensor = self.lora_B(h)
        return y

    @property
    def has_adapter(self) -> bool:
        return "lora_A" in self._modules

    @property
    def lora_rank(self) -> int:
        """Return the rank of the adapter, 0 without one."""
        return self.lora_A.out_features if self.has_adapter else 0

    def add_adapter(self, lora: Lora, dtype: torch.dtype | None = None, original: Tensor | None = None) -> None:
        """Add y += alpha / rank * B A x: A Kaiming-uniform, B zero as in Hu et al. (2021), so that y is unchanged at first.

        A and B take `dtype`; without it the weight's own, or bfloat16 where the weight is stored. original: the weight [N, K] as it
        was before it was stored, with which A and B begin as LoftQ says.
        """
        dtype = dtype or (torch.bfloat16 if self.storage else self.weight.dtype)
        device = self.weight.device
        on = torch.device("cpu") if device.type == "meta" else device  # where nothing would be drawn
        self.lora_A = AdapterMatrix(self.in_features, lora.rank, on, dtype).to(device)
        self.lora_B = AdapterMatrix(lora.rank, self.out_features, on, dtype).to(device)
        # drawn on the CPU, so that a seed gives the same adapter on every device
        a = nn.init.kaiming_uniform_(
            torch.empty(lora.rank, self.in_features, dtype=torch.float32, device="cpu"), a=math.sqrt(5)
        )
        with torch.no_grad():
            self.lora_A.weight.copy_(a)
        if device.type == "meta":
            note_drawn(self.lora_A, "weight", a)
            note_drawn(self.lora_B, "weight", torch.zeros(self.lora_B.weight.shape))
        nn.init.zeros_(self.lora_B.weight)
        self.lora_alpha = lora.alpha
        self.lora_A.requires_grad_(True)
        self.lora_B.requires_grad_(True)
        if original is not None:
            error_NK = original.detach().float() - self.dense_weight(torch.float32)
            self.adapter_fits = str(self.storage)
            self.taken_up = take_up(error_NK, self.lora_A.weight, self.lora_B.weight, lora.alpha / lora.rank)

    def remove_adapter(self) -> None:
        """Drop the adapter without merging it."""
        self.adapter_fits = ""
        del self.lora_A, self.lora_B
        self.taken_up = None

    @torch.no_grad()
    def merge_adapter(self, requantize: bool = False, keep: bool = True) -> None:
        """Add alpha / rank * B A to the weight, rounded once, and set the adapter aside; without an adapter, nothing.

        A stored weight is decoded for it and stays so, in the adapter's dtype; requantize=True stores the sum as the weight was
        stored, which rounds the adapter as coarsely as the weight. keep: hold what was replaced (a copy of the weight, or the
        codes), so that `unmerge_adapter` can bring it back.
        """
        if not self.has_adapter:
            return
        before = self.stored
        base = self.dense_weight(torch.float32) if before else self.weight
        wide = torch.promote_types(base.dtype, torch.float32)
        delta = self.lora_B.weight.to(wide) @ self.lora_A.weight.to(wide)
        merged = base.to(wide) + delta * (self.lora_alpha / self.lora_rank)
        if keep:
            weight = before or self.weight.detach().clone()
            adapter = self.lora_A, self.lora_B, self.lora_alpha, self.adapter_fits
            self._before = _BeforeMerging(weight, *adapter, self.compute_dtype)
        else:
            self._before = None
        if before is None:
            self.weight.copy_(merged)  # in place: whoever holds the parameter goes on holding it
        elif requantize:
            self.set_stored(quantize(merged, before.quantizer))
        else:
            self.set_dense(merged.to(self.lora_A.weight.dtype))
        self.remove_adapter()

    @torch.no_grad()
    def unmerge_adapter(self) -> None:
        """Bring back the weight as it was before `merge_adapter`, bit for bit, and the adapter."""
        before = self._before
        if before is None:
            raise ValueError(
                "There is no merged adapter to take out again: merge_adapter(keep=True) keeps what it replaces."
            )
        if self.has_adapter:
            raise ValueError(
                "The layer has got another adapter since it was merged: remove_adapter() first, then unmerge_adapter()."
            )
        if isinstance(before.weight, Quantized):
            Q = before.weight
            parts = tuple(part.to(self.weight.device) for part in Q.parts)
            self.set_stored(Quantized.of(Q.quantizer, parts, Q.shape))
            self.compute_dtype = before.compute_dtype
        elif self.storage is None:
            self.weight.copy_(before.weight)
        else:
            self.set_dense(before.weight.to(self.weight.device))
        self.lora_A, self.lora_B = before.lora_A.to(self.weight.device), before.lora_B.to(self.weight.device)
        self.lora_alpha, self.adapter_fits, self._before = before.lora_alpha, before.adapter_fits, None

    @property
    def can_unmerge(self) -> bool:
        """Return whether `unmerge_adapter` has something to bring back."""
        return self._before is not None

    def set_dense(self, weight: Tensor, requires_grad: bool = False) -> None:
        """Put a weight [N, K] in place of what is held."""
        self.drop_stored()
        self.weight = nn.Parameter(weight, requires_grad=requires_grad)

    def extra_repr(self) -> str:
        parts = [super().extra_repr()]
        if self.precision is not None:
            parts.append(f"recipe={self.precision.recipe.name}")
        if self.storage is not None:
            parts.append(f"W={self.storage}")
        if self.has_adapter:
            parts.append(f"lora r={self.lora_rank}")
        return ", ".join(parts)
