"""SwiGLU, y = silu(gate) up, and its gradient (Shazeer, 2020). torch's own silu kernels compute in float32 inside.

    dgate = silu'(gate) (dy up)          dup = silu(gate) dy

silu(gate) is computed again in backward: keeping it would cost a third tensor of the feed-forward width. All shapes equal.
"""

from __future__ import annotations

import torch
from torch import Tensor


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """y in the dtype of gate."""
    return torch.nn.functional.silu(gate).mul_(up)


def backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """dgate and dup; two tensors are allocated, both are returned."""
    dup = torch.nn.functional.silu(gate).mul_(dy)
    dsilu = dy * up
    dgate: Tensor = torch.ops.aten.silu_backward.grad_input(dsilu, gate, grad_input=dsilu)
    return dgate, dup
