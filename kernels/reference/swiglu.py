"""Define SwiGLU, y = silu(gate) up, and its gradient (Shazeer, 2020). torch's own silu kernels compute in float32 inside.

    dgate = silu'(gate) (dy up)          dup = silu(gate) dy

silu(gate) is computed again in backward: keeping it would cost a third tensor of the feed-forward width. All shapes equal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from surokit.formats import E4M3, Format

from .rows import quantized


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """Return y in the dtype of gate."""
    return torch.nn.functional.silu(gate).mul_(up)


def forward_quantized(
    gate_TK: Tensor, up_TK: Tensor, format: Format = E4M3, *, values: bool = False, **scaling: Any
) -> tuple[Any, ...]:
    """Return the codes [T, K] of y and their decode scales, with `both` those of y' [K, T] too; then y if `values`. Backward needs
    gate and up only.

    scaling: columns, pow2, floor, in_force, opened, record, both, as `quantized` in rows.py has them.
    """
    y_TK = forward(gate_TK, up_TK)
    return *quantized(y_TK, format, **scaling), y_TK if values else None


def backward(dy: Tensor, gate: Tensor, up: Tensor, joint: bool = False, values: bool = False) -> tuple[Tensor, ...]:
    """Return dgate and dup [..., K], or with `joint` the one tensor [..., 2K] that holds dgate before dup; and y again if `values`.

    Without a joint tensor nothing is allocated but what is returned; with one, at most y's size beside it.
    """
    silu = torch.nn.functional.silu(gate)
    if joint:
        K = gate.shape[-1]
        both = gate.new_empty((*gate.shape[:-1], 2 * K))
        dgate, dup = torch.mul(dy, up, out=both[..., :K]), torch.mul(silu, dy, out=both[..., K:])
    else:
        dgate, dup = dy * up, silu * dy if values else silu.mul_(dy)
    torch.ops.aten.silu_backward.grad_input(dgate, gate, grad_input=dgate)
    made = (both,) if joint else (dgate, dup)
    return (*made, silu.mul_(up)) if values else made
