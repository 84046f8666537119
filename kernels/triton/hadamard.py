"""Compute the randomised Hadamard transform of blocks along K: y_blk = x_blk diag(s) H / sqrt(block), with fixed signs or drawn
ones. See kernels/reference/hadamard.py.

A tile is loaded with the operand's own strides, so rotating x' makes no transposed copy, and its blocks meet the matrix in a
product of K = block: entries +-2^-n are exact in bfloat16 and float16, so that tensor cores serve these; float32 stays in float32
multiply-adds. The matrix is made in registers from its indices: entry (i, j) is (-1)^popcount(i & j), times the fixed sign of row
i. Registers have room for 64 x 64 of it: of a block of 128 the halves are rotated, and their sum and difference are taken.

Programs of two warps: Triton then takes the warp-wide mma.sync on every architecture. With four it takes instructions that go
through shared or tensor memory, and triton 3.7.1 cannot compile that for sm_100: its pass over tensor memory's layouts fails on
the reshape and reduction that follow.

Every product is exact, and so are the sums of bfloat16 unless a block spans more than some 12 powers of two. Beyond, the last
bit depends on the order of the sums, in the reference too, whose order is its BLAS's; a GPU's tensor cores have their own.

Shapes: M rows, K columns; BM x BK a tile.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from surokit.kernels.reference.hadamard import SIGNS

from .random import random_bits

_NEGATIVE: tl.constexpr = tl.constexpr(sum(1 << i for i, sign in enumerate(SIGNS) if sign < 0))


@triton.jit
def rotated_tile(x, signs, BLOCK: tl.constexpr, BACK: tl.constexpr, POWER: tl.constexpr, LAST: tl.constexpr):
    """Rotate each block of BLOCK elements of the rows of x [BM, BK], zeros beyond the edge; x's dtype, rounded once.

    signs: a key of drawn signs, int32 [2], or None for the fixed ones. POWER, LAST: 1 / sqrt(BLOCK) as a power of two, which the
    matrix takes, times the rest, which multiplies the sums.
    """
    PART: tl.constexpr = BLOCK if BLOCK < 64 else 64
    rows: tl.constexpr = x.shape[0] * x.shape[1] // PART
    i, j = tl.arange(0, PART)[:, None], tl.arange(0, PART)[None, :]
    odd = i & j
    odd = odd ^ (odd >> 4)
    odd = odd ^ (odd >> 2)
    odd = odd ^ (odd >> 1)
    if signs is None:
        odd = odd ^ (_NEGATIVE >> ((j if BACK else i) & 15))
    elif not BACK:
        x = _signed(x, signs, BLOCK)
    H = tl.where((odd & 1) != 0, -POWER, POWER).to(x.dtype)
    y = tl.dot(tl.reshape(x, (rows, PART)), H, input_precision="ieee")
    if BLOCK == 128:
        low, high = tl.split(tl.permute(tl.reshape(y, (rows // 2, 2, PART)), (0, 2, 1)))
        y = tl.permute(tl.join(low + high, low - high), (0, 2, 1))
    y = tl.reshape((y * LAST).to(x.dtype), x.shape)  # a sum of zeros is +0, as it starts there
    if signs is not None and BACK:
        y = _signed(y, signs, BLOCK)
    return y


@triton.jit
def _signed(x, signs, BLOCK: tl.constexpr):
    """Negate the columns of x [BM, BK] whose place in a block has a drawn sign of -1: the highest bit of its draw."""
    place = tl.arange(0, x.shape[1])[None, :] % BLOCK
    negative = random_bits(place, tl.load(signs), tl.load(signs + 1)) >> 31
    return (x.to(tl.float32) * tl.where(negative != 0, -1.0, 1.0)).to(x.dtype)  # of zeros too


@triton.jit
def rotate_kernel(
    x,
    y,
    signs,
    M,
    K,
    stride_m,
    stride_k,
    BLOCK: tl.constexpr,
    BACK: tl.constexpr,
    POWER: tl.constexpr,
    LAST: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    columns = tl.cdiv(K, BLOCK) * BLOCK
    tiles = tl.cdiv(columns, BK)
    m = (tl.program_id(0) // tiles) * BM + tl.arange(0, BM)[:, None]
    k = (tl.program_id(0) % tiles) * BK + tl.arange(0, BK)[None, :]
    tile = tl.load(x + m.to(tl.int64) * stride_m + k.to(tl.int64) * stride_k, mask=(m < M) & (k < K), other=0.0)
    tile = rotated_tile(tile, signs, BLOCK, BACK, POWER, LAST)
    tl.store(y + m.to(tl.int64) * columns + k, tile, mask=(m < M) & (k < columns))


def refuse_unknown(dtype: torch.dtype, block: int) -> None:
    if dtype not in (torch.bfloat16, torch.float16, torch.float32) or block not in (16, 32, 64, 128):
        raise ValueError(
            f"the kernel rotates bfloat16, float16 and float32 in blocks of 16, 32, 64 or 128, not {dtype} in {block}: "
            "take the reference"
        )


def factors(block: int) -> tuple[float, float]:
    """Return 1 / sqrt(block) as a power of two and the rest."""
    power = 2.0 ** -(block.bit_length() // 2)
    return power, 1 / power / math.sqrt(block)


def rotate(x_MK: Tensor, block: int, back: bool = False) -> Tensor:
    """Rotate x to y [M, ceil(K/block) * block] in x's dtype. `back` undoes the rotation, up to rounding. block: 16, 32, 64 or
    128."""
    return _rotate(x_MK, block, None, back)


def rotate_drawn(x_MK: Tensor, block: int, key: Tensor, back: bool = False) -> Tensor:
    """Return `rotate` with signs drawn from `key`, int32 [2], in place of the fixed ones."""
    return _rotate(x_MK, block, key, back)


def _rotate(x_MK: Tensor, block: int, signs: Tensor | None, back: bool) -> Tensor:
    refuse_unknown(x_MK.dtype, block)
    M, K = x_MK.shape
    columns = -(-K // block) * block
    y = x_MK.new_empty((M, columns))
    if y.numel():
        power, last = factors(block)
        BK = max(block, 64)
        grid = (triton.cdiv(M, 32) * triton.cdiv(columns, BK),)
        rotate_kernel[grid](
            x_MK, y, signs, M, K, x_MK.stride(0), x_MK.stride(1), BLOCK=block, BACK=back, POWER=power, LAST=last,
            BM=32, BK=BK, num_warps=2, enable_fp_fusion=False,
        )  # fmt: skip
    return y
