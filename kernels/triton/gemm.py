"""Multiply by a frozen, quantized weight: y_TN = x_TK @ W_NK' and dx_TK = dy_TN @ W_NK, decoded tile by tile.

The weight stays in its codes in memory. Each program decodes the tile that it is about to multiply into bfloat16 and adds the
product in float32, so neither a decoded weight nor a transposed copy ever exists; both directions read the same codes. A tile
holds what the reference decodes, bit for bit:

    NVFP4   q S_blk, exact in bfloat16; the weight's one float32 scale multiplies the sum
    NF4     number[q] absmax, rounded once; absmax is decoded on the way where it is quantized too
    FP8     q scale_inv of its tile, rounded once

Every block of tokens decodes the tiles anew: with few tokens this reads a quarter or half of the bytes, with many it can be faster
to decode once for a bfloat16 product.

Shapes: T tokens, N x K the weight; L is the one of N and K that stays in the result, C the one that is contracted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surokit.formats import NF4, Codebook

from .fp4 import decode_nibbles
from .nf4 import block_scale, tables
from .nvfp4 import decode_e4m3

_WHOLE = 1 << 30  # the extent of a tile that spans the matrix


@triton.jit
def _repeat(x, TIMES: tl.constexpr):
    """Repeat each column of x [A, B] TIMES times: [A, B * TIMES]."""
    wide = tl.broadcast_to(x[:, :, None], (x.shape[0], x.shape[1], TIMES))
    return tl.reshape(wide, (x.shape[0], x.shape[1] * TIMES))


@triton.jit
def _side_by_side(even, odd):
    """Interleave the columns of two tiles [A, B]: [A, 2B]."""
    return tl.reshape(tl.join(even, odd), (even.shape[0], 2 * even.shape[1]))


@triton.jit
def nvfp4_tile(codes, scales, n, k0, N, bytes, blocks, ROWS: tl.constexpr, BK: tl.constexpr):
    """Decode q S_blk in float32 [BN, BK] for rows n [BN, 1] and columns from k0 on; zeros beyond the edge, as in the others."""
    byte, c = k0 // 2 + tl.arange(0, BK // 2)[None, :], k0 // 16 + tl.arange(0, BK // 16)[None, :]
    packed = tl.load(codes + n.to(tl.int64) * bytes + byte, mask=(n < N) & (byte < bytes), other=0).to(tl.int32)
    inside = (n < N) & (c < blocks)
    s = _repeat(decode_e4m3(tl.load(scales + (n // ROWS).to(tl.int64) * blocks + c, mask=inside, other=0)), 8)
    return _side_by_side(decode_nibbles(packed & 15) * s, decode_nibbles(packed >> 4) * s)


@triton.jit
def nf4_tile(
    codes, scales, second, offset, numbers, map, n, k0, N, K, bytes, blocks,
    DOUBLE: tl.constexpr, ALIGNED: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Decode number[q] absmax in float32 [BN, BK]. ALIGNED: 64 divides K; else blocks, and bytes too, run across rows' ends."""
    if ALIGNED:
        byte, c = k0 // 2 + tl.arange(0, BK // 2)[None, :], k0 // 64 + tl.arange(0, BK // 64)[None, :]
        packed = tl.load(codes + n.to(tl.int64) * bytes + byte, mask=(n < N) & (byte < bytes), other=0).to(tl.int32)
        inside = (n < N) & (c < blocks)
        s = _repeat(block_scale(scales, second, offset, map, n.to(tl.int64) * blocks + c, inside, DOUBLE), 32)
        return _side_by_side(tl.load(numbers + (packed >> 4)) * s, tl.load(numbers + (packed & 15)) * s)
    else:
        k = k0 + tl.arange(0, BK)[None, :]
        at = n.to(tl.int64) * K + k
        inside = (n < N) & (k < K)
        packed = tl.load(codes + at // 2, mask=inside, other=0).to(tl.int32)
        q = tl.where(at % 2 == 0, packed >> 4, packed & 15)
        return tl.load(numbers + q) * block_scale(scales, second, offset, map, at // 64, inside, DOUBLE)


@triton.jit
def fp8_tile(codes, scales, n, k0, N, K, blocks, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BK: tl.constexpr):
    """Decode q scale_inv in float32 [BN, BK]."""
    k = k0 + tl.arange(0, BK)[None, :]
    inside = (n < N) & (k < K)
    q = decode_e4m3(tl.load(codes + n.to(tl.int64) * K + k, mask=inside, other=0))
    row = scales + (n // ROWS).to(tl.int64) * blocks
    if COLUMNS % BK == 0:  # as k0 is a multiple of BK, a row of the tile has one scale
        return q * tl.load(row + k0 // COLUMNS, mask=n < N, other=0.0)
    else:
        return q * tl.load(row + k // COLUMNS, mask=inside, other=0.0)


@triton.jit
def dequantize_mm_kernel(
    x, codes, scales, second, offset, numbers, map, y, T, N, K, stride_t, stride_c, bytes, blocks,
    FORMAT: tl.constexpr, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DOUBLE: tl.constexpr, ALIGNED: tl.constexpr, BT: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Compute y_TL = x_TC @ W.

    L, C = N, K and W is W_NK'; TRANSPOSED: L, C = K, N and W is W_NK. bytes, blocks: bytes of codes and number of scales in a row.
    """
    L, C = N, K
    if TRANSPOSED:
        L, C = K, N
    BN: tl.constexpr = BC if TRANSPOSED else BL
    BK: tl.constexpr = BL if TRANSPOSED else BC
    # programs that share a tile of the weight run side by side, so all but the first find its codes in the cache
    blocks_t = tl.cdiv(T, BT)
    t = (tl.program_id(0) % blocks_t) * BT + tl.arange(0, BT)[:, None]
    l0 = (tl.program_id(0) // blocks_t) * BL
    total = tl.zeros([BT, BL], dtype=tl.float32)
    for c0 in range(0, C, BC):
        c = c0 + tl.arange(0, BC)[None, :]
        at = t.to(tl.int64) * stride_t + c.to(tl.int64) * stride_c
        part = tl.load(x + at, mask=(t < T) & (c < C), other=0.0)
        n0, k0 = l0, c0
        if TRANSPOSED:
            n0, k0 = c0, l0
        n = n0 + tl.arange(0, BN)[:, None]
        if FORMAT == "nvfp4":
            w = nvfp4_tile(codes, scales, n, k0, N, bytes, blocks, ROWS, BK)
        elif FORMAT == "nf4":
            w = nf4_tile(
                codes, scales, second, offset, numbers, map, n, k0, N, K, bytes, blocks, DOUBLE, ALIGNED, BK
            )  # fmt: skip
        else:
            w = fp8_tile(codes, scales, n, k0, N, K, blocks, ROWS, COLUMNS, BK)
        w = w.to(part.dtype)
        if TRANSPOSED:
            total = tl.dot(part, w, total)
        else:
            total = tl.dot(part, tl.trans(w), total)
    if FORMAT == "nvfp4":
        total *= tl.load(second)
    column = l0 + tl.arange(0, BL)[None, :]
    tl.store(y + t.to(tl.int64) * L + column, total.to(y.dtype.element_ty), mask=(t < T) & (column < L))


def dequantize_mm_nvfp4(
    x_TC: Tensor, packed: Tensor, scales: Tensor, scale: Tensor, rows: int, transposed: bool = False, columns: int = 0
) -> Tensor:
    """Return x_TK @ W_NK', or `transposed` x_TN @ W_NK; then `columns` is K, which has to be given if it is odd."""
    K = (columns or 2 * packed.shape[1]) if transposed else x_TC.shape[1]
    shape = packed.shape[0], K
    return _launch(x_TC, packed, scales.view(torch.uint8), shape, "nvfp4", transposed, second=scale, rows=rows)


def dequantize_mm_nf4(
    x_TC: Tensor,
    codes: Tensor,
    scales: Tensor,
    second: tuple[Tensor, ...],
    shape: tuple[int, int],
    transposed: bool = False,
    format: Codebook = NF4,
) -> Tensor:
    """Return x_TK @ W_NK' for a weight of `shape` (N, K), or `transposed` x_TN @ W_NK."""
    absmax_scale, offset = second or (None, None)
    numbers, map = tables(x_TC.device, format)
    return _launch(x_TC, codes, scales, shape, "nf4", transposed, absmax_scale, offset, numbers, map)


def dequantize_mm_fp8(
    x_TC: Tensor, codes_NK: Tensor, scale_inv: Tensor, rows: int = 0, columns: int = 0, transposed: bool = False
) -> Tensor:
    """Return x_TK @ W_NK', or `transposed` x_TN @ W_NK. W: E4M3 and a scale for each tile of rows x columns, 0 for the whole
    extent."""
    N, K = codes_NK.shape
    return _launch(x_TC, codes_NK.view(torch.uint8), scale_inv, (N, K), "fp8", transposed, rows=rows, columns=columns)


def _launch(
    x_TC: Tensor,
    codes: Tensor,
    scales: Tensor,
    shape: tuple[int, int],
    format: str,
    transposed: bool,
    second: Tensor | None = None,
    offset: Tensor | None = None,
    numbers: Tensor | None = None,
    map: Tensor | None = None,
    rows: int = 0,
    columns: int = 0,
) -> Tensor:
    if x_TC.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"the kernel multiplies bfloat16 and float16, not {x_TC.dtype}: cast it, or take the reference")
    (T, C), (N, K) = x_TC.shape, shape
    if (N if transposed else K) != C:
        raise ValueError(
            f"a weight of {N} x {K} has no {'rows' if transposed else 'columns'} for the {C} columns of the operand"
        )
    L = K if transposed else N
    y_TL = x_TC.new_empty((T, L))
    if y_TL.numel():
        BT, BL, BC = min(128, max(16, triton.next_power_of_2(T))), 128, 64
        dequantize_mm_kernel[(triton.cdiv(T, BT) * triton.cdiv(L, BL),)](
            x_TC, codes.contiguous(), scales.contiguous(), second, offset, numbers, map, y_TL,
            T, N, K, x_TC.stride(0), x_TC.stride(1), codes.shape[1], scales.shape[1],
            FORMAT=format, TRANSPOSED=transposed, ROWS=rows or _WHOLE, COLUMNS=columns or _WHOLE,
            DOUBLE=offset is not None, ALIGNED=K % 64 == 0, BT=BT, BL=BL, BC=BC,
            num_warps=8 if BT == 128 else 4, num_stages=3, enable_fp_fusion=False,
        )  # fmt: skip
    return y_TL
