"""SwiGLU keeps gate and up for backward, not silu(gate) beside them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from surokit.kernels import best
from surokit.kernels.reference import swiglu as reference


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up, any equal shapes, one dtype."""
    if torch.compiler.is_compiling():  # the compiler fuses the definition, and decides itself what to compute again
        return F.silu(gate) * up
    y: Tensor = _SwiGLU.apply(gate, up)
    return y


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return best(reference.forward, gate.device)(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        return best(reference.backward, dy.device)(dy, gate, up)
