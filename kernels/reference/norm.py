"""RMSNorm and its gradient, computed in float32 from the inputs as stored (Zhang and Sennrich, 2019).

    r_T1 = 1 / sqrt(mean(x_TK^2) + eps)          y = x r w
    with h = x r and g = dy w:                   dx = r (g - h mean(g h))       dw = sum_T dy h

Rows go through in blocks, in float32 buffers that are allocated once a call: on a CPU a fresh allocation of some
megabytes costs more in page faults than the arithmetic does (measured: 3.6 ms at once, 0.8 ms in blocks, for the gradient
of 2048 x 512). T rows, K the width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surokit.formats import E4M3, Format

from . import quantize

BLOCK_ELEMENTS = 64 * 1024  # a thread: 256 KiB of float32, which stays in a core's cache


def forward(x_TK: Tensor, w_K: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y [T, K] in the dtype of x, and r [T, 1] in float32."""
    T, K = x_TK.shape
    w = w_K.float()
    y_TK = torch.empty_like(x_TK, memory_format=torch.contiguous_format)
    r_T1 = x_TK.new_empty((T, 1), dtype=torch.float32)
    rows = _rows(T, K)
    buffer = x_TK.new_empty((rows, K), dtype=torch.float32)
    for first in range(0, T, rows):
        last = min(first + rows, T)
        h = buffer[: last - first].copy_(x_TK[first:last])
        mean_square = torch.linalg.vector_norm(h, dim=-1, keepdim=True).square_().div_(K)
        r = torch.rsqrt(mean_square.add_(eps), out=r_T1[first:last])
        y_TK[first:last] = h.mul_(r).mul_(w)
    return y_TK, r_T1


def forward_quantized(
    x_TK: Tensor,
    w_K: Tensor,
    eps: float,
    format: Format = E4M3,
    amax: Tensor | None = None,
    floor: float = 0.0,
    record: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [T, K] of y, their decode scales, and r [T, 1] for backward.

    amax None: a scale a row, a power of two, [T, 1]. amax [1, 1]: the one scale comes from it, [1, 1] (delayed scaling).
    floor: the least amax that counts. record: float32 [1, 1], not negative; takes the maximum of itself and y's amax.
    """
    y_TK, r_T1 = forward(x_TK, w_K, eps)
    if record is not None and y_TK.numel():
        torch.maximum(record, quantize.amax(y_TK), out=record)
    codes_TK, scale_inv = quantize.quantize(y_TK, format, int(amax is None), 0, amax is None, amax, floor)
    return codes_TK, scale_inv, r_T1


def backward(dy_TK: Tensor, x_TK: Tensor, w_K: Tensor, r_T1: Tensor) -> tuple[Tensor, Tensor]:
    """dx [T, K] and dw [K], in the dtypes of x and w."""
    T, K = x_TK.shape
    w = w_K.float()
    dx_TK = torch.empty_like(x_TK, memory_format=torch.contiguous_format)
    dw_K = torch.zeros_like(w)
    rows = _rows(T, K)
    h_buffer, g_buffer, p_buffer = x_TK.new_empty((3, rows, K), dtype=torch.float32)
    for first in range(0, T, rows):
        last = min(first + rows, T)
        r = r_T1[first:last]
        h = h_buffer[: last - first].copy_(x_TK[first:last]).mul_(r)
        g = g_buffer[: last - first].copy_(dy_TK[first:last])
        p = torch.mul(g, h, out=p_buffer[: last - first])
        dw_K += p.sum(0)
        mean_gh = torch.mv(p, w).div_(K).unsqueeze(1)
        dx_TK[first:last] = g.mul_(w).addcmul_(h, mean_gh, value=-1).mul_(r)
    return dx_TK, dw_K.to(w_K.dtype)


def _rows(T: int, K: int) -> int:
    return max(1, min(T, BLOCK_ELEMENTS * torch.get_num_threads() // max(K, 1)))
