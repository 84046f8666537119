"""RMSNorm takes inputs in the model's dtype, computes in float32, and keeps the input and one number a row for backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from surokit.kernels import best
from surokit.kernels.reference import norm as reference


class RMSNorm(nn.Module):
    """An RMSNorm computes y = x / sqrt(mean(x^2) + eps) * weight over the last dimension; x and y [..., width] in one dtype.

    Computed in float32 and rounded once, where transformers rounds before the multiplication by the weight too.
    """

    def __init__(
        self,
        width: int,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, device=device, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """Compute RMSNorm as a function: x [..., K], weight [K].

    torch's compiler fuses the definition by itself.
    """
    if torch.compiler.is_compiling():
        return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)
    y: Tensor = _RMSNorm.apply(x, weight, eps)
    return y


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x_TK = x.reshape(-1, x.shape[-1])
        y_TK, r_T1 = best(reference.forward, x.device)(x_TK, weight, eps)
        ctx.save_for_backward(x, weight, r_T1)
        return y_TK.view(x.shape)

    @staticmethod
    @once_differentiable  # a kernel's result has no graph: an error is better than a gradient that is silently missing
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, r_T1 = ctx.saved_tensors
        dy_TK, x_TK = (t.reshape(-1, t.shape[-1]) for t in (dy, x))
        backward = best(reference.backward, x.device)
        dx_TK, dw_K = backward(dy_TK, x_TK, weight, r_T1, need_dw=ctx.needs_input_grad[1])
        return dx_TK.view(x.shape), dw_K, None
