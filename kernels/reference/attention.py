"""Compute the gradient of causal attention in bfloat16 on a CPU, in blocks of query rows.

    s = scale q k'       p = softmax(s), causal       o = p v
    dv = p' do           dp = do v'                   ds = p (dp - sum(dp p))       dq = scale ds k       dk = scale ds' q

torch's flash kernel for CPUs is slow in backward (20 ms against 11 ms here for 4 x 512 tokens, 8 heads of 64) and sums dk
and dv in bfloat16. Here each block is a few batched products, the softmax is done again instead of kept, and dk and dv are
summed in float32. Keys that no row of a block sees are never touched.

A CPU's batched product rounds s to bfloat16, which costs accuracy where scores are large (error of dq at scores of standard
deviation 6: 1.7 %). Where bfloat16 products go through float32 (matmul.py) a block is float32 throughout, and nothing is lost.
Elsewhere: what the rounding took away is r = scale q k' - s, a second product that is small and so exact enough,
and to first order softmax(s + r) = p + p (r - sum(r p)), the softmax's own derivative: the error is then 0.5 %, the flash
kernel's. It is left out where rows' largest scores, of which every sixteenth is looked at, are small: rounding costs little.

B batch, H query heads, G key heads, R = H/G query heads a key head, N = B G, T tokens, D head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .matmul import through_float32

BLOCK_ROWS = 256
FLOAT32_SHARE = 0.375  # of these rows in float32: with what is converted, a block takes the same memory
GROUP_BYTES = 4 * 1024 * 1024  # of scores held at once
LARGE_SCORE = 6.0
HIDDEN = -30000.0  # far below any score, and finite so that r stays finite too


def causal_backward(
    do_BHTD: Tensor, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq [B, H, T, D], dk and dv [B, G, T, D], laid out as [B, T, H, D]; inputs in one dtype, any strides.

    Query i sees keys 0..i.
    """
    B, H, T, D = q_BHTD.shape
    G = k_BGTD.shape[1]
    N, R = B * G, H // G
    q, do = (x.reshape(N, R, T, D) for x in (q_BHTD, do_BHTD))
    k, v = (x.reshape(N, T, D) for x in (k_BGTD, v_BGTD))
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dtype = torch.float32 if through_float32(q) else q.dtype
    rows = max(1, round(min(BLOCK_ROWS, T) * (FLOAT32_SHARE if dtype == torch.float32 else 1)))
    size = max(1, min(N, GROUP_BYTES // (dtype.itemsize * R * rows * T)))
    buffers = q.new_empty((2, size * R * rows * T), dtype=dtype)
    for first in range(0, N, size):
        group = slice(first, first + size)
        inputs, outputs = [x[group] for x in (do, q, k, v)], [x[group] for x in (dq, dk, dv)]
        _group_backward(inputs, outputs, scale, rows, buffers)
    # the projections around attention read [B, T, H, D]
    return tuple(  # type: ignore[return-value]
        x.view(B, heads, T, D).transpose(1, 2).contiguous().transpose(1, 2) for x, heads in ((dq, H), (dk, G), (dv, G))
    )


def _group_backward(inputs: list[Tensor], outputs: list[Tensor], scale: float, rows: int, buffers: Tensor) -> None:
    """Fill dq [N, R, T, D], dk and dv [N, T, D] of a group of heads. `buffers` has room for two blocks of scores, and the dtype
    that is computed in."""
    do, q, k, v = inputs
    dq, dk, dv = outputs
    N, R, T, D = q.shape
    k, v = k.to(buffers.dtype), v.to(buffers.dtype)
    hidden = torch.full((rows, rows), HIDDEN, dtype=buffers.dtype, device=q.device).triu_(1)
    dk_sum, dv_sum = q.new_zeros((2, N, T, D), dtype=torch.float32)
    for first in range(0, T, rows):
        last = min(first + rows, T)
        n = last - first
        shape = (N, R * n, last)
        s, p = (buffer[: math.prod(shape)].view(shape) for buffer in buffers)
        q_block, do_block = (x[:, :, first:last].reshape(N, R * n, D).to(buffers.dtype) for x in (q, do))
        k_seen, v_seen = k[:, :last], v[:, :last]

        torch.baddbmm(s, q_block, k_seen.transpose(1, 2), beta=0, alpha=scale, out=s)
        s.view(N, R, n, last)[..., first:].add_(hidden[:n, :n])
        torch.softmax(s, -1, out=p)
        if s.dtype != torch.float32 and float(s[:, ::16].amax(-1).abs().amax()) > LARGE_SCORE:
            torch.baddbmm(s, q_block, k_seen.transpose(1, 2), beta=-1, alpha=scale, out=s)
            p += _softmax_backward_(s, p)

        dv_sum[:, :last] += torch.bmm(p.transpose(1, 2), do_block)
        ds = _softmax_backward_(torch.bmm(do_block, v_seen.transpose(1, 2), out=s), p)
        dk_sum[:, :last] += torch.bmm(ds.transpose(1, 2), q_block)
        dq[:, :, first:last] = torch.bmm(ds, k_seen).mul_(scale).view(N, R, n, D)
    dk.copy_(dk_sum.mul_(scale))
    dv.copy_(dv_sum)


def _softmax_backward_(dp: Tensor, p: Tensor) -> Tensor:
    """Return p (dp - sum(dp p)), written over dp."""
    ds: Tensor = torch.ops.aten._softmax_backward_data.out(dp, p, -1, dp.dtype, grad_input=dp)
    return ds
