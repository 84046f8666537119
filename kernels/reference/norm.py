"""Define RMSNorm and its gradient, computed in float32 from the inputs as stored (Zhang and Sennrich, 2019).

    r_T1 = 1 / sqrt(mean(x_TK^2) + eps)          y = x r w
    with h = x r and g = dy w:                   dx = r (g - h mean(g h))       dw = sum_T dy h

In a block the norm reads what a layer just added to the residual stream, and in backward its gradient meets the one that came
along the stream: `add_forward` and `backward(residual=...)` do both in the norm's own pass.

Rows go through in blocks, in float32 buffers that are allocated once a call: on a CPU a fresh allocation of some
megabytes costs more in page faults than the arithmetic does (measured: 3.6 ms at once, 0.8 ms in blocks, for the gradient
of 2048 x 512). T rows, K the width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from surokit.formats import E4M3, Format

from .rows import quantized

BLOCK_ELEMENTS = 64 * 1024  # a thread: 256 KiB of float32, which stays in a core's cache


def forward(x_TK: Tensor, w_K: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return y [T, K] in the dtype of x, and r [T, 1] in float32."""
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


def add_forward(x_TK: Tensor, delta_TK: Tensor, w_K: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + delta [T, K], rounded to the dtype of x, then its y and r as `forward` gives them."""
    sum_TK = (x_TK + delta_TK).to(x_TK.dtype)
    return sum_TK, *forward(sum_TK, w_K, eps)


def forward_quantized(
    x_TK: Tensor,
    w_K: Tensor,
    eps: float,
    format: Format = E4M3,
    *,
    delta: Tensor | None = None,
    values: bool = False,
    **scaling: Any,
) -> tuple[Any, ...]:
    """Return the codes [T, K] of y, their decode scales, and r [T, 1]; then x + delta [T, K] where a delta is given, and y if
    `values`.

    scaling: columns, pow2, floor, in_force, opened, record, both, as `quantized` in rows.py has them. With `both` codes [K, T] and
    their decode scales come before r.
    """
    sum_TK = None if delta is None else (x_TK + delta).to(x_TK.dtype)
    y_TK, r_T1 = forward(x_TK if sum_TK is None else sum_TK, w_K, eps)
    return *quantized(y_TK, format, **scaling), r_T1, sum_TK, y_TK if values else None


def recompute(x_TK: Tensor, w_K: Tensor, r_T1: Tensor) -> Tensor:
    """Return the y of `forward` once more, bit for bit, from what backward keeps."""
    T, K = x_TK.shape
    w = w_K.float()
    y_TK = torch.empty_like(x_TK, memory_format=torch.contiguous_format)
    rows = _rows(T, K)
    buffer = x_TK.new_empty((rows, K), dtype=torch.float32)
    for first in range(0, T, rows):
        last = min(first + rows, T)
        y_TK[first:last] = buffer[: last - first].copy_(x_TK[first:last]).mul_(r_T1[first:last]).mul_(w)
    return y_TK


def backward(
    dy_TK: Tensor,
    x_TK: Tensor,
    w_K: Tensor,
    r_T1: Tensor,
    residual: Tensor | None = None,
    need_dw: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return dx [T, K] and dw [K], in the dtypes of x and w; dw is None unless `need_dw`.

    residual [T, K]: another gradient of x, which is added before dx is rounded.
    """
    T, K = x_TK.shape
    w = w_K.float()
    dx_TK = torch.empty_like(x_TK, memory_format=torch.contiguous_format)
    dw_K = torch.zeros_like(w) if need_dw else None
    rows = _rows(T, K)
    h_buffer, g_buffer, p_buffer = x_TK.new_empty((3, rows, K), dtype=torch.float32)
    for first in range(0, T, rows):
        last = min(first + rows, T)
        r = r_T1[first:last]
        h = h_buffer[: last - first].copy_(x_TK[first:last]).mul_(r)
        g = g_buffer[: last - first].copy_(dy_TK[first:last])
        p = torch.mul(g, h, out=p_buffer[: last - first])
        if dw_K is not None:
            dw_K += p.sum(0)
        mean_gh = torch.mv(p, w).div_(K).unsqueeze(1)
        dx = g.mul_(w).addcmul_(h, mean_gh, value=-1).mul_(r)
        dx_TK[first:last] = dx if residual is None else dx.add_(residual[first:last])
    return dx_TK, None if dw_K is None else dw_K.to(w_K.dtype)


def _rows(T: int, K: int) -> int:
    return max(1, min(T, BLOCK_ELEMENTS * torch.get_num_threads() // max(K, 1)))
