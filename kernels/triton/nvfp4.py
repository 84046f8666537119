"""Quantize to NVFP4 in kernels: an E4M3 scale for each block of 16, one float32 scale for the tensor. See
kernels/reference/nvfp4.py.

Two passes over x: the tensor's amax, unless it is given, then everything else. Both passes can rotate what they load
(`quantize_rotated`, and `quantize_eden` with drawn signs): neither the rotated tensor nor a transposed copy is ever in memory.

The bits are the reference's because the order of operations is. What a GPU could do otherwise, and what is done about it:

  amax         magnitudes are compared as integers: the same order, and a NaN is the largest
  divisions    tl.div_rn
  x*s - x'     the errors of four over six would be fused into multiply-adds: compiled with enable_fp_fusion=False
  sums         the errors of a block are added in the reference's order, not in the compiler's, as MS-EDEN's lengths are
  E4M3         scales are rounded by integer arithmetic: no conversion rounds twice, and sm_80, which has none, can join in

Shapes: M rows, K columns; BM x BK a tile of R x C blocks, each ROWS x 16.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from surokit.formats import E4M3
from surokit.kernels.reference.nvfp4 import COLUMNS, EDEN_REACH, ErrorOf

from .fp4 import decode_nibbles, encode_nibbles, pack_pairs, unpack_pairs
from .hadamard import factors as hadamard_factors
from .hadamard import refuse_unknown, rotated_tile
from .quantize import format_constants, round_stochastic
from .random import random_uniform

_FLT_MAX: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def encode_e4m3(x):
    """Encode float32 numbers from 0 to 448 as E4M3 codes (int32), to nearest even; NaN gives 0x7F."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # next to 2^14 float32 steps by 2^-9, as the subnormal codes do
    subnormal = (x + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(x != x, 0x7F, tl.where(x < 0.015625, subnormal, normal))


@triton.jit
def decode_e4m3(codes):
    """Decode uint8 E4M3 codes to float32: place exponent and mantissa in float32's fields, then multiply by 2^(127 - 7)."""
    codes = codes.to(tl.int32)
    bits = (codes & 0x80) << 24 | (codes & 0x7F) << 20
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), bits.to(tl.float32, bitcast=True) * 1.329227995784916e36)


@triton.jit
def _load_tile(
    x,
    m,
    k,
    M,
    K,
    stride_m,
    stride_k,
    signs,
    HADAMARD: tl.constexpr,
    POWER: tl.constexpr,
    LAST: tl.constexpr,
):
    """Load a tile as float32 [BM, BK], zeros beyond the edge; rotate it if HADAMARD, the length of a block, is not 0.

    signs: a key of drawn signs, None for the fixed ones.
    """
    tile = tl.load(x + m.to(tl.int64) * stride_m + k.to(tl.int64) * stride_k, mask=(m < M) & (k < K), other=0.0)
    if HADAMARD:
        tile = rotated_tile(tile, signs, HADAMARD, False, POWER, LAST)
    return tile.to(tl.float32)


@triton.jit
def _magnitude_bits(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _halves(x):
    """Split x [N, L] into its even and its odd columns."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def _sum16(x):
    """Sum x [N, 16] to [N] from left to right: columns are split by the bits of their number, lowest first."""
    x0, x1 = _halves(x)
    x00, x01 = _halves(x0)
    x10, x11 = _halves(x1)
    a0, a4 = _halves(x00)
    a2, a6 = _halves(x01)
    a1, a5 = _halves(x10)
    a3, a7 = _halves(x11)
    c0, c8 = tl.split(a0)
    c1, c9 = tl.split(a1)
    c2, c10 = tl.split(a2)
    c3, c11 = tl.split(a3)
    c4, c12 = tl.split(a4)
    c5, c13 = tl.split(a5)
    c6, c14 = tl.split(a6)
    c7, c15 = tl.split(a7)
    return c0 + c1 + c2 + c3 + c4 + c5 + c6 + c7 + c8 + c9 + c10 + c11 + c12 + c13 + c14 + c15


@triton.jit
def _fold(x):
    """Add the second half of the rows to the first: [R, 2H, C] to [R, H, C]."""
    R: tl.constexpr = x.shape[0]
    H: tl.constexpr = x.shape[1] // 2
    low, high = tl.split(tl.permute(tl.reshape(x, (R, 2, H, x.shape[2])), (0, 2, 3, 1)))
    return low + high


@triton.jit
def _over_blocks(scales):
    return scales[:, None, :, None]


@triton.jit
def _divided(x, codes, encode):
    """Divide x by the decode scale S_blk / S_enc; do not clamp yet."""
    one = tl.full([1, 1], 1.0, tl.float32)
    decode = decode_e4m3(codes) * tl.div_rn(one, encode)
    inverse = tl.div_rn(tl.full(decode.shape, 1.0, tl.float32), decode)
    return x * _over_blocks(tl.where(inverse > _FLT_MAX, _FLT_MAX, inverse))


@triton.jit
def _error(x, codes, encode, amax, BOUND: tl.constexpr, ERROR: tl.constexpr):
    """Sum the errors of each block: [R, C]."""
    q = decode_nibbles(encode_nibbles(_divided(x, codes, encode)))
    error = q * _over_blocks(decode_e4m3(codes) * amax * (1 / BOUND)) - x
    error = error * error if ERROR == "mse" else tl.abs(error)
    R: tl.constexpr = x.shape[0]
    ROWS: tl.constexpr = x.shape[1]
    C: tl.constexpr = x.shape[2]
    sums = tl.reshape(_sum16(tl.reshape(error, (R * ROWS * C, 16))), (R, ROWS, C))
    if ROWS == 16:
        sums = _fold(_fold(_fold(_fold(sums))))
    return tl.reshape(sums, (R, C))


@triton.jit
def amax_kernel(
    x,
    amax,
    M,
    K,
    stride_m,
    stride_k,
    signs,
    HADAMARD: tl.constexpr,
    POWER: tl.constexpr,
    LAST: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """Merge the tile's amax into `amax`, an int32 that holds a float32's bits."""
    tiles = tl.maximum(tl.cdiv(K, BK), 1)
    m = (tl.program_id(0) // tiles) * BM + tl.arange(0, BM)[:, None]
    k = (tl.program_id(0) % tiles) * BK + tl.arange(0, BK)[None, :]
    x_tile = _load_tile(x, m, k, M, K, stride_m, stride_k, signs, HADAMARD, POWER, LAST)
    tl.atomic_max(amax, tl.max(tl.max(_magnitude_bits(x_tile), axis=1), axis=0), sem="relaxed")


@triton.jit
def quantize_kernel(
    x,
    packed,
    scales,
    scale,
    amax,
    key,
    M,
    K,
    stride_m,
    stride_k,
    columns,
    bytes,
    blocks,
    HADAMARD: tl.constexpr,
    POWER: tl.constexpr,
    LAST: tl.constexpr,
    ROWS: tl.constexpr,
    BOUND: tl.constexpr,
    ERROR: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """Quantize a tile: packed codes, block scales, and the scale of the tensor.

    columns, bytes, blocks: how many a row of the operand, of its packed codes and of its scales has (arguments, so that Triton
    knows a multiple of 16 as such). BOUND: 6 times the largest block scale. ERROR: the error that decides four over six, or None.
    """
    R: tl.constexpr = BM // ROWS
    C: tl.constexpr = BK // 16
    tiles = tl.maximum(tl.cdiv(columns, BK), 1)  # a matrix without columns has a scale too
    m0 = (tl.program_id(0) // tiles) * BM
    k0 = (tl.program_id(0) % tiles) * BK
    m, k = m0 + tl.arange(0, BM)[:, None], k0 + tl.arange(0, BK)[None, :]
    tile = tl.reshape(_load_tile(x, m, k, M, K, stride_m, stride_k, None, HADAMARD, POWER, LAST), (R, ROWS, C, 16))
    block_amax = tl.max(tl.max(_magnitude_bits(tile), axis=3), axis=1).to(tl.float32, bitcast=True)

    total = tl.load(amax + tl.zeros([1, 1], tl.int32))
    encode = _encode_scale(total, BOUND)
    poison = block_amax - block_amax  # NaN where a block is not finite
    if ERROR is None:
        wanted = block_amax * (encode * (1 / 6))
        codes = encode_e4m3(tl.where(wanted > 448.0, 448.0, wanted) + poison)
    else:
        six = tl.div_rn(block_amax, tl.full(block_amax.shape, 6.0, tl.float32)) * encode
        four = six * 1.5
        codes = encode_e4m3(tl.where(six > 448.0, 448.0, six) + poison)
        larger = encode_e4m3(tl.where(four > 448.0, 448.0, four) + poison)
        better = _error(tile, larger, encode, total, BOUND, ERROR) < _error(tile, codes, encode, total, BOUND, ERROR)
        codes = tl.where(better, larger, codes)
    y = tl.reshape(_divided(tile, codes, encode), (BM, BK))
    if STOCHASTIC:
        index = m.to(tl.int64) * columns + k
        y = tl.clamp(y, -6.0, 6.0, propagate_nan=tl.PropagateNan.ALL)
        y = round_stochastic(y, random_uniform(index, tl.load(key), tl.load(key + 1)), 6.0, 1, 0)  # to E2M1
    byte = k0 // 2 + tl.arange(0, BK // 2)[None, :]
    tl.store(packed + m.to(tl.int64) * bytes + byte, pack_pairs(encode_nibbles(y)), mask=(m < M) & (byte < bytes))
    r, c = m0 // ROWS + tl.arange(0, R)[:, None], k0 // 16 + tl.arange(0, C)[None, :]
    tl.store(scales + r.to(tl.int64) * blocks + c, codes.to(tl.uint8), mask=(r < tl.cdiv(M, ROWS)) & (c < blocks))
    if tl.program_id(0) == 0:
        _store_scale(scale, total, BOUND)


@triton.jit
def eden_kernel(
    x,
    packed,
    scales,
    scale,
    amax,
    signs,
    key,
    M,
    K,
    stride_m,
    stride_k,
    columns,
    bytes,
    blocks,
    HADAMARD: tl.constexpr,
    POWER: tl.constexpr,
    LAST: tl.constexpr,
    REACH: tl.constexpr,
    MAX: tl.constexpr,
    MANTISSA: tl.constexpr,
    LOWEST: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """Quantize a tile by MS-EDEN: codes to nearest, and block scales that make up for what this lost, rounded stochastically.

    REACH: to which the amax of a block is scaled. MAX, MANTISSA, LOWEST: of E4M3.
    """
    C: tl.constexpr = BK // 16
    tiles = tl.maximum(tl.cdiv(columns, BK), 1)  # a matrix without columns has a scale too
    m0 = (tl.program_id(0) // tiles) * BM
    k0 = (tl.program_id(0) % tiles) * BK
    m, k = m0 + tl.arange(0, BM)[:, None], k0 + tl.arange(0, BK)[None, :]
    tile = tl.reshape(_load_tile(x, m, k, M, K, stride_m, stride_k, signs, HADAMARD, POWER, LAST), (BM, 1, C, 16))
    block_amax = tl.max(tl.max(_magnitude_bits(tile), axis=3), axis=1).to(tl.float32, bitcast=True)
    total = tl.load(amax + tl.zeros([1, 1], tl.int32))
    encode = _encode_scale(total, REACH * 256)
    wanted = block_amax * (encode * (1 / REACH))
    codes = encode_e4m3(tl.where(wanted > MAX, MAX, wanted) + (block_amax - block_amax))
    nibbles = encode_nibbles(_divided(tile, codes, encode))

    block_scales = decode_e4m3(codes)
    scaled = tl.reshape(tile * tl.reshape(encode, (1, 1, 1, 1)), (BM * C, 16))
    rounded = tl.reshape(decode_nibbles(nibbles) * _over_blocks(block_scales), (BM * C, 16))
    length = tl.reshape(_sum16(scaled * scaled), (BM, C))
    kept = tl.reshape(_sum16(scaled * rounded), (BM, C))
    corrected = block_scales * tl.where(kept == 0, 1.0, tl.div_rn(length, kept))
    r, c = m0 + tl.arange(0, BM)[:, None], k0 // 16 + tl.arange(0, C)[None, :]
    place = r.to(tl.int64) * blocks + c
    draw = random_uniform(place, tl.load(key), tl.load(key + 1))
    drawn = round_stochastic(tl.where(corrected > MAX, MAX, corrected), draw, MAX, MANTISSA, LOWEST)

    byte = k0 // 2 + tl.arange(0, BK // 2)[None, :]
    pairs = pack_pairs(tl.reshape(nibbles, (BM, BK)))
    tl.store(packed + m.to(tl.int64) * bytes + byte, pairs, mask=(m < M) & (byte < bytes))
    tl.store(scales + place, encode_e4m3(drawn).to(tl.uint8), mask=(r < M) & (c < blocks))
    if tl.program_id(0) == 0:
        _store_scale(scale, total, REACH * 256)


@triton.jit
def _encode_scale(total, BOUND: tl.constexpr):
    """Return S_enc [1, 1], by which the tensor's amax becomes BOUND."""
    encode = tl.div_rn(tl.full([1, 1], BOUND, tl.float32), total)
    encode = tl.where(encode > _FLT_MAX, _FLT_MAX, encode)
    return tl.where((total == 0) | (encode == 0), 1.0, encode)


@triton.jit
def _store_scale(scale, total, BOUND: tl.constexpr):
    """Store the scale of the tensor; NaN where its amax is not finite."""
    decode = tl.div_rn(total, tl.full([1, 1], BOUND, tl.float32))
    decode = tl.where(decode < 2.938735877055719e-39, 2.938735877055719e-39, decode)  # 2^-128
    tl.store(scale + tl.zeros([1, 1], tl.int32), decode + (total - total))


@triton.jit
def dequantize_kernel(
    packed,
    scales,
    scale,
    y,
    M,
    K,
    bytes,
    blocks,
    ROWS: tl.constexpr,
    SCALED: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """Compute q * S_blk, and times scale if SCALED; the first product is exact."""
    tiles = tl.cdiv(K, BK)
    m0 = (tl.program_id(0) // tiles) * BM
    k0 = (tl.program_id(0) % tiles) * BK
    m = m0 + tl.arange(0, BM)[:, None]
    byte = k0 // 2 + tl.arange(0, BK // 2)[None, :]
    codes = tl.load(packed + m.to(tl.int64) * bytes + byte, mask=(m < M) & (byte < bytes), other=0)
    r, c = m0 // ROWS + tl.arange(0, BM // ROWS)[:, None], k0 // 16 + tl.arange(0, BK // 16)[None, :]
    inside = (r < tl.cdiv(M, ROWS)) & (c < blocks)
    s = decode_e4m3(tl.load(scales + r.to(tl.int64) * blocks + c, mask=inside, other=0))
    q = tl.reshape(decode_nibbles(unpack_pairs(codes)), (BM // ROWS, ROWS, BK // 16, 16))
    values = tl.reshape(q * _over_blocks(s), (BM, BK))
    if SCALED:
        values = values * tl.load(scale)
    k = k0 + tl.arange(0, BK)[None, :]
    tl.store(y + m.to(tl.int64) * K + k, values.to(y.dtype.element_ty), mask=(m < M) & (k < K))


def quantize(
    x_MK: Tensor,
    rows: int,
    four_over_six: ErrorOf | None = None,
    amax: Tensor | None = None,
    key: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the packed codes uint8 [M, ceil(K/2)], block scales e4m3 [R, C], scale float32 [1, 1] (a decode multiplier)."""
    return _quantize(x_MK, rows, four_over_six, amax, key)


def quantize_rotated(x_MK: Tensor, block: int = 16, key: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return quantize(rotate(x, block), rows=1) without storing the rotated tensor; `scale` is from the rotated tensor's amax."""
    refuse_unknown(x_MK.dtype, block)
    return _quantize(x_MK, 1, None, None, key, block)


def quantize_eden(x_MK: Tensor, block: int, rotation: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed codes, block scales and scale, as `quantize` does, of x rotated by the signs of `rotation`: MS-EDEN.

    block: 16, 32, 64 or 128. rotation, key: int32 [2] each, of the signs and of the draws that round block scales.
    """
    refuse_unknown(x_MK.dtype, block)
    packed, scales, scale = _empty(x_MK, 1, columns := -(-x_MK.shape[1] // block) * block)
    operand, rotated, options, grid = _launch(x_MK, columns, block)
    bits = x_MK.new_zeros((1, 1), dtype=torch.int32)
    amax_kernel[grid](x_MK, bits, *operand, rotation, **rotated, **options)
    widths = columns, packed.shape[1], scales.shape[1]
    eden_kernel[grid](
        x_MK, packed, scales.view(torch.uint8), scale, bits.view(torch.float32), rotation, key, *operand, *widths,
        **rotated, REACH=EDEN_REACH, **format_constants(E4M3), **options,
    )  # fmt: skip
    return packed, scales, scale


def dequantize(
    packed: Tensor, scales_RC: Tensor, scale: Tensor, rows: int, columns: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return q S_blk scale [M, columns]: one product in float32 (the first is exact), rounded to `dtype`."""
    return _dequantize(packed, scales_RC, scale, rows, columns, dtype)


def factors(packed: Tensor, scales_RC: Tensor, rows: int, columns: int) -> Tensor:
    """Return q S_blk in bfloat16 [M, columns], exactly."""
    return _dequantize(packed, scales_RC, None, rows, columns, torch.bfloat16)


def _quantize(
    x_MK: Tensor, rows: int, four_over_six: ErrorOf | None, amax: Tensor | None, key: Tensor | None, hadamard: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    K = x_MK.shape[1]
    columns = -(-K // hadamard) * hadamard if hadamard else K
    packed, scales, scale = _empty(x_MK, rows, columns)
    operand, rotation, options, grid = _launch(x_MK, columns, hadamard)
    if amax is None:
        bits = x_MK.new_zeros((1, 1), dtype=torch.int32)
        amax_kernel[grid](x_MK, bits, *operand, None, **rotation, **options)
        amax = bits.view(torch.float32)
    widths = columns, packed.shape[1], scales.shape[1]
    quantize_kernel[grid](
        x_MK, packed, scales.view(torch.uint8), scale, amax.float(), key, *operand, *widths, **rotation,
        ROWS=rows, BOUND=2688.0 if four_over_six is None else 1536.0, ERROR=four_over_six, STOCHASTIC=key is not None,
        **options,
    )  # fmt: skip
    return packed, scales, scale


def _empty(x_MK: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed codes, block scales and scale, to be filled."""
    M = x_MK.shape[0]
    packed = x_MK.new_empty((M, -(-columns // 2)), dtype=torch.uint8)
    scales = x_MK.new_empty((-(-M // rows), -(-columns // COLUMNS)), dtype=torch.float8_e4m3fn)
    return packed, scales, x_MK.new_empty((1, 1), dtype=torch.float32)


def _launch(
    x_MK: Tensor, columns: int, hadamard: int
) -> tuple[tuple[int, ...], dict[str, Any], dict[str, Any], tuple[int]]:
    """Return how a kernel is launched: the arguments of its operand, of its rotation, its options, and the grid."""
    M, K = x_MK.shape
    power, last = hadamard_factors(hadamard) if hadamard else (1.0, 1.0)
    # long rows, unless it is the columns that are contiguous; rotate with two warps (see hadamard.py)
    BM, BK, warps = (32, 128, 4) if x_MK.stride(1) == 1 else (64, 64, 4)
    if hadamard == 128:  # MS-EDEN takes many registers
        BM, BK, warps = (8 if x_MK.stride(1) == 1 else 16, 128, 2)
    elif hadamard:
        BM, BK, warps = (16, 128, 2) if x_MK.stride(1) == 1 else (64, 32 if hadamard < 64 else 64, 2)
    rotation = {"HADAMARD": hadamard, "POWER": power, "LAST": last}
    options = {"BM": BM, "BK": BK, "num_warps": warps, "enable_fp_fusion": False}
    grid = (max(1, triton.cdiv(M, BM) * triton.cdiv(columns, BK)),)
    return (M, K, x_MK.stride(0), x_MK.stride(1)), rotation, options, grid


def _dequantize(
    packed: Tensor, scales_RC: Tensor, scale: Tensor | None, rows: int, columns: int, dtype: torch.dtype
) -> Tensor:
    M = packed.shape[0]
    y = packed.new_empty((M, columns), dtype=dtype)
    if y.numel():
        grid = (triton.cdiv(M, 32) * triton.cdiv(columns, 128),)
        dequantize_kernel[grid](
            packed.contiguous(), scales_RC.contiguous().view(torch.uint8), scale, y,
            M, columns, packed.shape[1], scales_RC.shape[1],
            ROWS=rows, SCALED=scale is not None, BM=32, BK=128, enable_fp_fusion=False,
        )  # fmt: skip
    return y
