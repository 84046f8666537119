"""Linear: one layer for every recipe. Precision happens in nn/products.py; a layer differs from another only by what it holds.

The layer is a torch.nn.Linear with the same state-dict keys. A stored (frozen, quantized) weight keeps the name `weight` for
its codes and adds the scales of its checkpoint format (`weight_scale_inv`, or `weight_scale` and so on: `Scaling.stored_as`);
an adapter adds `lora_A.weight` and `lora_B.weight`.

T tokens (all leading dimensions), K in_features, N out_features, r rank of the adapter.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from surokit.nn.products import Precision, three_products
from surokit.quantized import Quantized, quantize
from surokit.quantizer import Quantizer
from surokit.recipe import Lora


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
        y_TN = three_products(x_TK, w, self.out_features, self.storage, self.stored_scales, self.precision, record)
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
