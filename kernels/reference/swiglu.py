"""SwiGLU, y = silu(gate) up, and its gradient (Shazeer, 2020). torch's own silu kernels compute in float32 inside.

    dgate = silu'(gate) (dy up)          dup = silu(gate) dy

silu(gate) is computed again in backward: keeping it would cost a third tensor of the feed-forward width. All shapes equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surokit.formats import E4M3, Format

from . import quantize


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """y in the dtype of gate."""
    return torch.nn.functional.silu(gate).mul_(up)


def forward_quantized(
    gate_TK: Tensor,
    up_TK: Tensor,
    format: Format = E4M3,
    amax: Tensor | None = None,
    floor: float = 0.0,
    record: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes [T, K] of y and their decode scales; backward needs gate and up only.

    amax None: a scale a row, a power of two, [T, 1]. amax [1, 1]: the one scale comes from it, [1, 1] (delayed scaling).
    floor: the least amax that counts. record: float32 [1, 1], not negative; takes the maximum of itself and y's amax.
    """
    y_TK = forward(gate_TK, up_TK)
    if record is not None and y_TK.numel():
        torch.maximum(record, quantize.amax(y_TK), out=record)
    return quantize.quantize(y_TK, format, int(amax is None), 0, amax is None, amax, floor)


def backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """dgate and dup; two tensors are allocated, both are returned."""
    dup = torch.nn.functional.silu(gate).mul_(dy)
    dsilu = dy * up
    dgate: Tensor = torch.ops.aten.silu_backward.grad_input(dsilu, gate, grad_input=dsilu)
    return dgate, dup
