"""Quantize and dequantize with one scale for each tile, in as few passes over the operand as its tiles allow.

    a block of 1 x C or R x C     one read: amax and codes of a tile stay in one program; both orientations from that read
    a row                         one read (long rows: a second one, of which the cache serves most)
    the tensor, with its amax     one read, which can also record the amax for delayed scaling
    the tensor, without           two reads: amax (partial maxima meet in an atomic maximum), then codes
    rows and columns of both orientations    two reads: amax of rows and columns, then codes twice

A magnitude is compared as the integer of its bits: non-negative floats are ordered like their bits, atomics on integers are one
instruction, and NaN, larger than inf as an integer, wins as it does in the reference. Scale arithmetic is that of
kernels/reference/quantize.py, operation by operation (div_rn is the correctly rounded division).

Inputs may be strided. Offsets are 64-bit: an operand may have more than 2^31 elements.

Shapes: M rows, K columns, R x C the grid of tiles.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from surokit.formats import Format
from surokit.kernels.reference.quantize import DTYPES, empty_scales, grid_of_tiles, tile_shape

from .random import random_uniform

NEEDS = (8, 9)  # compute capability: before it Triton has no E4M3, and in version 3.6 no E5M2
# A program's tile of elements: enough loads in flight, few enough registers
ELEMENTS = 4096
LONGEST = 16384  # elements of a row that stay in registers between amax and codes


@triton.jit
def magnitude_bits(x):
    """Return the bits of |x| as int32: ordered like the magnitudes, NaN largest."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def encode_scale(amax, floor, MAX: tl.constexpr, POW2: tl.constexpr):
    """Return the scale MAX / amax; 1 where the amax is zero or infinite."""
    amax = tl.where(amax < floor, floor, amax)  # a comparison with NaN is false: NaN stays
    scale = tl.div_rn(tl.full(amax.shape, MAX, tl.float32), amax)
    scale = tl.where(scale > 3.4028234663852886e38, 3.4028234663852886e38, scale)
    if POW2:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    usable = ((amax > 0) & (amax < float("inf"))) | (amax != amax)
    return tl.where(usable, scale, 1.0)


@triton.jit
def decode_scale(scale, amax):
    """Return 1 / scale; NaN where the amax is not finite."""
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale) + (amax - amax)


@triton.jit
def round_stochastic(y, draw, MAX: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr):
    """Round in-range numbers to the format's grid, up with P = (|y| - low) / (high - low); LOWEST is the least normal exponent."""
    bits = magnitude_bits(y)
    exponent = tl.maximum((bits >> 23) - 127, LOWEST) - MANTISSA  # of the step
    step = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    steps = bits.to(tl.float32, bitcast=True) * ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    rounded = tl.minimum(tl.floor(steps + draw) * step, MAX)
    sign = y.to(tl.int32, bitcast=True) & -0x80000000
    signed = (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return tl.where(y == y, signed, y)


@triton.jit
def round_nearest(y, MANTISSA: tl.constexpr, LOWEST: tl.constexpr):
    """Round in-range numbers to the format's grid, to nearest even: adding 2^23 steps leaves float32 no bits below a step."""
    bits = magnitude_bits(y)
    room = ((tl.maximum((bits >> 23) - 127, LOWEST) - MANTISSA + 23 + 127) << 23).to(tl.float32, bitcast=True)
    rounded = ((bits.to(tl.float32, bitcast=True) + room) - room).to(tl.int32, bitcast=True)
    signed = (rounded | (y.to(tl.int32, bitcast=True) & -0x80000000)).to(tl.float32, bitcast=True)
    return tl.where(y == y, signed, y)


@triton.jit
def cast_scaled(y, index, key, out, MAX: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, KEY: tl.constexpr):
    """Cast scaled numbers to the dtype of `out`: clamped, then rounded (with KEY stochastically, by the draws of `index`)."""
    y = tl.clamp(y, -MAX, MAX, propagate_nan=tl.PropagateNan.ALL)
    if KEY:
        y = round_stochastic(y, random_uniform(index, tl.load(key), tl.load(key + 1)), MAX, MANTISSA, LOWEST)
    elif not tl.target_info.cuda_capability_geq(9, 0):
        # Before Hopper the compiled cast rounds to float16 first, or wrongly (triton pull request 11753). Every cast of
        # a number on the grid is right.
        y = round_nearest(y, MANTISSA, LOWEST)
    return y.to(out.dtype.element_ty)


@triton.jit
def amax_kernel(
    x, amax, M, K, stride_m, stride_k, rows, columns, C, down, across,
    BM: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, ATOMIC: tl.constexpr,
):  # fmt: skip
    """Compute the amax of tiles: in blocks of BM x BK, `down` x `across` a tile; with ROWS (tiles of one row) BM tiles at once."""
    at = tl.program_id(0)
    j, at = at % across, at // across
    c, at = at % C, at // C
    i, r = at % down, at // down
    row, last_row = r * rows + i * BM + tl.arange(0, BM), tl.minimum(M, (r + 1) * rows)
    if ROWS:
        row, last_row = r * BM + tl.arange(0, BM), M
    column, last_column = c * columns + j * BK + tl.arange(0, BK), tl.minimum(K, (c + 1) * columns)
    inside = (row < last_row)[:, None] & (column < last_column)[None, :]
    at_x = row[:, None].to(tl.int64) * stride_m + column[None, :].to(tl.int64) * stride_k
    bits = magnitude_bits(tl.load(x + at_x, mask=inside, other=0))
    if ROWS:
        at_amax, top, valid = row.to(tl.int64) * C + c, tl.max(bits, axis=1), row < M
    else:
        at_amax, top, valid = r.to(tl.int64) * C + c, tl.max(tl.max(bits, axis=1), axis=0), r >= 0
    if ATOMIC:
        tl.atomic_max(amax + at_amax, top, mask=valid, sem="relaxed")
    else:
        tl.store(amax + at_amax, top, mask=valid)


@triton.jit
def amax_both_kernel(
    x, amax_rows, amax_columns, M, K, stride_m, stride_k, BM: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr
):
    """Compute the amax of every column, and with ROWS of every row, in one read."""
    blocks = tl.cdiv(K, BK)
    row = tl.program_id(0) // blocks * BM + tl.arange(0, BM)
    column = tl.program_id(0) % blocks * BK + tl.arange(0, BK)
    inside = (row < M)[:, None] & (column < K)[None, :]
    at_x = row[:, None].to(tl.int64) * stride_m + column[None, :].to(tl.int64) * stride_k
    bits = magnitude_bits(tl.load(x + at_x, mask=inside, other=0))
    if ROWS:
        tl.atomic_max(amax_rows + row, tl.max(bits, axis=1), mask=row < M, sem="relaxed")
    tl.atomic_max(amax_columns + column, tl.max(bits, axis=0), mask=column < K, sem="relaxed")


@triton.jit
def encode_kernel(
    x, amax, codes, scale_inv, amax_t, codes_t, scale_inv_t, record, key, floor, M, K, stride_m, stride_k,
    amax_r, amax_c, scale_r, scale_c, rows, columns,
    MAX: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, POW2: tl.constexpr, KEY: tl.constexpr,
    MANY_R: tl.constexpr, MANY_C: tl.constexpr, TRANSPOSED: tl.constexpr, RECORD: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Store codes and decode scales; the amax of each tile is given.

    MANY_R, MANY_C: whether R and C are above 1. TRANSPOSED: "" none, "same" the codes once more as [K, M], "columns" codes [K, M]
    with scales of their own from amax_t [K]. RECORD: the amax of all elements is merged into `record`.
    """
    blocks = tl.cdiv(K, BK)
    m, k = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    row, column = m * BM + tl.arange(0, BM), k * BK + tl.arange(0, BK)
    inside = (row < M)[:, None] & (column < K)[None, :]
    wide_row, wide_column = row[:, None].to(tl.int64), column[None, :].to(tl.int64)
    x_tile = tl.load(x + wide_row * stride_m + wide_column * stride_k, mask=inside, other=0).to(tl.float32)
    if RECORD:
        tl.atomic_max(record, tl.max(tl.max(magnitude_bits(x_tile), axis=1), axis=0), sem="relaxed")

    # the tiles' scales, [1, 1], [BM, 1], [1, BK] or [BM, BK]; who holds a tile's first element writes its decode scale
    at = tl.zeros([1, 1], tl.int64)
    at_amax = tl.zeros([1, 1], tl.int64)
    valid, first = at == 0, at == 0
    if MANY_R:
        at += (row // rows)[:, None].to(tl.int64) * scale_r
        at_amax += (row // rows)[:, None].to(tl.int64) * amax_r
        valid &= (row < M)[:, None]
        first &= (row % rows == 0)[:, None]
    else:
        first &= m == 0
    if MANY_C:
        at += (column // columns)[None, :].to(tl.int64) * scale_c
        at_amax += (column // columns)[None, :].to(tl.int64) * amax_c
        valid &= (column < K)[None, :]
        first &= (column % columns == 0)[None, :]
    else:
        first &= k == 0
    top = tl.load(amax + at_amax, mask=valid, other=0)
    scale = encode_scale(top, floor, MAX, POW2)
    tl.store(scale_inv + at, decode_scale(scale, top), mask=valid & first)

    index = wide_row * K + wide_column
    tile = cast_scaled(x_tile * scale, index, key, codes, MAX, MANTISSA, LOWEST, KEY)
    tl.store(codes + index, tile, mask=inside)
    if TRANSPOSED == "columns":
        top = tl.load(amax_t + column, mask=column < K, other=0)[None, :]
        scale = encode_scale(top, floor, MAX, POW2)
        tl.store(scale_inv_t + column[None, :], decode_scale(scale, top), mask=(column < K)[None, :] & (m == 0))
        tile = cast_scaled(x_tile * scale, index, key, codes, MAX, MANTISSA, LOWEST, False)
    if TRANSPOSED != "":
        at_t = column[:, None].to(tl.int64) * M + row[None, :]
        tl.store(codes_t + at_t, tl.trans(tile), mask=(column < K)[:, None] & (row < M)[None, :])


@triton.jit
def row_kernel(
    x, codes, scale_inv, key, floor, M, K, stride_m, stride_k,
    MAX: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, POW2: tl.constexpr, KEY: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """Quantize BM whole rows. ONCE: BK spans the row, which is then read once; else chunks of BK are read twice."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    wide_row = row[:, None].to(tl.int64)
    column = tl.arange(0, BK)
    inside = (row < M)[:, None] & (column < K)[None, :]
    at_x = x + wide_row * stride_m + column[None, :].to(tl.int64) * stride_k
    x_tile = tl.load(at_x, mask=inside, other=0).to(tl.float32)
    bits = magnitude_bits(x_tile)
    if not ONCE:
        for k in range(BK, K, BK):
            column = k + tl.arange(0, BK)
            inside = (row < M)[:, None] & (column < K)[None, :]
            at_x = x + wide_row * stride_m + column[None, :].to(tl.int64) * stride_k
            bits = tl.maximum(bits, magnitude_bits(tl.load(at_x, mask=inside, other=0)))
    top = tl.max(bits, axis=1).to(tl.float32, bitcast=True)
    scale = encode_scale(top, floor, MAX, POW2)
    tl.store(scale_inv + row, decode_scale(scale, top), mask=row < M)
    if ONCE:
        index = wide_row * K + column[None, :]
        tile = cast_scaled(x_tile * scale[:, None], index, key, codes, MAX, MANTISSA, LOWEST, KEY)
        tl.store(codes + index, tile, mask=inside)
    else:
        for k in range(0, K, BK):
            column = k + tl.arange(0, BK)
            inside = (row < M)[:, None] & (column < K)[None, :]
            at_x = x + wide_row * stride_m + column[None, :].to(tl.int64) * stride_k
            y = tl.load(at_x, mask=inside, other=0).to(tl.float32) * scale[:, None]
            index = wide_row * K + column[None, :]
            tl.store(codes + index, cast_scaled(y, index, key, codes, MAX, MANTISSA, LOWEST, KEY), mask=inside)


@triton.jit
def tile_kernel(
    x, codes, scale_inv, codes_t, scale_inv_t, key, floor, M, K, stride_m, stride_k, R, C,
    MAX: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, POW2: tl.constexpr, KEY: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TRANSPOSED: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Quantize the tiles that one program holds: one of ROWS x COLUMNS, or, where a tile is 1 x COLUMNS, as many as BM has rows.

    TRANSPOSED: the codes of x' as well. Its tiles are the transposed tiles if ROWS = COLUMNS; for 1 x COLUMNS they are
    columns of COLUMNS elements, and the program takes that many rows.
    """
    r, c = tl.program_id(0) // C, tl.program_id(0) % C
    STEP: tl.constexpr = ROWS if ROWS > 1 else (COLUMNS if TRANSPOSED else BM)
    in_row, in_column = tl.arange(0, BM), tl.arange(0, BK)
    row, column = r * STEP + in_row, c * COLUMNS + in_column
    mask_m, mask_k = (row < M) & (in_row < STEP), (column < K) & (in_column < COLUMNS)
    inside = mask_m[:, None] & mask_k[None, :]
    wide_row, wide_column = row[:, None].to(tl.int64), column[None, :].to(tl.int64)
    x_tile = tl.load(x + wide_row * stride_m + wide_column * stride_k, mask=inside, other=0).to(tl.float32)
    bits = magnitude_bits(x_tile)
    index = wide_row * K + wide_column

    top = tl.max(bits, axis=1).to(tl.float32, bitcast=True)[:, None]
    if ROWS > 1:
        top = tl.max(tl.max(bits, axis=1, keep_dims=True), axis=0, keep_dims=True).to(tl.float32, bitcast=True)
    scale = encode_scale(top, floor, MAX, POW2)
    tile = cast_scaled(x_tile * scale, index, key, codes, MAX, MANTISSA, LOWEST, KEY)
    tl.store(codes + index, tile, mask=inside)
    inverse = decode_scale(scale, top)
    if ROWS > 1:
        one = tl.zeros([1, 1], tl.int64)
        tl.store(scale_inv + (one + r) * C + c, inverse)
        if TRANSPOSED:
            tl.store(scale_inv_t + (one + c) * R + r, inverse)
    else:
        tl.store(scale_inv + c.to(tl.int64) * M + row[:, None], inverse, mask=mask_m[:, None])
        if TRANSPOSED:
            top = tl.max(bits, axis=0).to(tl.float32, bitcast=True)[None, :]
            scale = encode_scale(top, floor, MAX, POW2)
            tile = cast_scaled(x_tile * scale, index, key, codes, MAX, MANTISSA, LOWEST, False)
            tl.store(scale_inv_t + r.to(tl.int64) * K + column[None, :], decode_scale(scale, top), mask=mask_k[None, :])
    if TRANSPOSED:
        at_t = column[:, None].to(tl.int64) * M + row[None, :]
        tl.store(codes_t + at_t, tl.trans(tile), mask=mask_k[:, None] & mask_m[None, :])


@triton.jit
def decode_kernel(
    codes, scale_inv, out, M, K, stride_m, stride_k, scale_m, scale_k, rows, columns,
    MANY_R: tl.constexpr, MANY_C: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(K, BK)
    row = tl.program_id(0) // blocks * BM + tl.arange(0, BM)
    column = tl.program_id(0) % blocks * BK + tl.arange(0, BK)
    inside = (row < M)[:, None] & (column < K)[None, :]
    wide_row, wide_column = row[:, None].to(tl.int64), column[None, :].to(tl.int64)
    tile = tl.load(codes + wide_row * stride_m + wide_column * stride_k, mask=inside, other=0.0)
    at = tl.zeros([1, 1], tl.int64)
    valid = at == 0
    if MANY_R:
        at += (row // rows)[:, None].to(tl.int64) * scale_m
        valid &= (row < M)[:, None]
    if MANY_C:
        at += (column // columns)[None, :].to(tl.int64) * scale_k
        valid &= (column < K)[None, :]
    y = tile.to(tl.float32) * tl.load(scale_inv + at, mask=valid, other=0.0)
    tl.store(out + wide_row * K + wide_column, y.to(out.dtype.element_ty), mask=inside)


def block_shape(x_MK: Tensor, elements: int = ELEMENTS, longest: int = 1024) -> tuple[int, int]:
    """Return the rows and columns of a program's block, longer along the dimension that is contiguous in memory: loads are wide."""
    M, K = (triton.next_power_of_2(n) for n in x_MK.shape)
    if x_MK.stride(1) > 1 and x_MK.stride(0) == 1:
        BM = min(M, 128)
        return BM, min(K, elements // BM)
    BK = min(K, longest)
    return min(M, elements // BK), BK


def format_constants(format: Format) -> dict[str, Any]:
    return {"MAX": format.max, "MANTISSA": format.mantissa_bits, "LOWEST": 1 - format.bias}


def quantize(
    x_MK: Tensor,
    format: Format,
    rows: int = 0,
    columns: int = 0,
    pow2: bool = False,
    amax: Tensor | None = None,
    floor: float = 0.0,
    key: Tensor | None = None,
    record: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the codes [M, K] and decode scales [R, C] as kernels/reference/quantize.py has them.

    record: float32 [1, 1], not negative; takes the maximum of itself and of x's amax in the same pass, which is what delayed
    scaling wants to know (only together with `amax`).
    """
    if record is not None and amax is None:
        raise ValueError(
            "`record` keeps the amax of a pass whose scale comes from elsewhere: give `amax` too, or call amax()."
        )
    M, K = x_MK.shape
    codes = torch.empty((M, K), dtype=DTYPES[format], device=x_MK.device)
    scales = empty_scales(x_MK, rows, columns)
    if not x_MK.numel():
        return codes, scales.fill_(1.0)
    options: dict[str, Any] = {**format_constants(format), "POW2": pow2, "KEY": key is not None}
    if amax is not None or not _local(rows, columns):
        if amax is None:
            amax = _amax(x_MK, rows, columns)
        _encode(x_MK, amax, codes, scales, rows, columns, floor, options, key=key, record=record)
    elif (rows, columns) == (1, 0):
        BM, BK = block_shape(x_MK, longest=LONGEST)
        BM = max(1, BM)
        row_kernel[(triton.cdiv(M, BM),)](
            x_MK, codes, scales, key, floor, M, K, *x_MK.stride(), **options,
            BM=BM, BK=BK, ONCE=BK >= K, num_warps=_warps(BM * BK),
        )  # fmt: skip
    else:
        _tiles(x_MK, codes, scales, None, None, key, floor, rows, columns, options)
    return codes, scales


def quantize_both(
    x_MK: Tensor, format: Format, rows: int = 0, columns: int = 0, pow2: bool = False, floor: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return quantize(x) and quantize(x'), each as codes and decode scales: [M, K], [R, C], [K, M], [R', C']."""
    M, K = x_MK.shape
    square = rows == columns
    if not square and not (rows == 1 and columns <= 128):  # no tile of x serves both
        forward = quantize(x_MK, format, rows, columns, pow2, floor=floor)
        return *forward, *quantize(x_MK.t(), format, rows, columns, pow2, floor=floor)
    codes = torch.empty((M, K), dtype=DTYPES[format], device=x_MK.device)
    codes_t = torch.empty((K, M), dtype=DTYPES[format], device=x_MK.device)
    scales, scales_t = empty_scales(x_MK, rows, columns), empty_scales(x_MK.t(), rows, columns)
    if not x_MK.numel():
        return codes, scales.fill_(1.0), codes_t, scales_t.fill_(1.0)
    options: dict[str, Any] = {**format_constants(format), "POW2": pow2, "KEY": False}
    if columns and _local(rows, columns):
        _tiles(x_MK, codes, scales, codes_t, scales_t, None, floor, rows, columns, options)
        return codes, scales, codes_t, scales_t
    if square:
        tops = _amax(x_MK, rows, columns)
        _encode(x_MK, tops, codes, scales, rows, columns, floor, options, codes_t=codes_t)
        return codes, scales, codes_t, scales_t.copy_(scales.t())  # an operation's results share no memory
    top_rows, top_columns = x_MK.new_zeros(M + K, dtype=torch.float32).split((M, K))
    _amax_both(x_MK, top_rows, top_columns)
    _encode(x_MK, top_rows.view(M, 1), codes, scales, 1, 0, floor, options, top_columns, codes_t, scales_t)
    return codes, scales, codes_t, scales_t


def amax(x_MK: Tensor, rows: int = 0, columns: int = 0) -> Tensor:
    """Return the largest magnitude of each tile, float32 [R, C]; NaN where a tile holds one."""
    M, K = x_MK.shape
    R, C = grid_of_tiles(x_MK, rows, columns)
    if not x_MK.numel():
        return x_MK.new_zeros((R, C), dtype=torch.float32)
    if rows == 0 and columns == 1:  # whole columns; a tile each would read across the rows
        tops = x_MK.new_zeros((1, K), dtype=torch.float32)
        _amax_both(x_MK, None, tops)
        return tops
    rows, columns = tile_shape(x_MK, rows, columns)
    BM, BK = block_shape(x_MK, 16384, 2048)
    BM, BK = (BM if rows == 1 else min(BM, triton.next_power_of_2(rows))), min(BK, triton.next_power_of_2(columns))
    down, across = (1 if rows == 1 else triton.cdiv(rows, BM)), triton.cdiv(columns, BK)
    atomic = down * across > 1
    make = x_MK.new_zeros if atomic else x_MK.new_empty
    tops = make((R, C), dtype=torch.float32)
    grid = ((triton.cdiv(M, BM) if rows == 1 else R) * down * C * across,)
    amax_kernel[grid](
        x_MK, tops.view(torch.int32), M, K, *x_MK.stride(), rows, columns, C, down, across,
        BM=BM, BK=BK, ROWS=rows == 1, ATOMIC=atomic, num_warps=_warps(BM * BK),
    )  # fmt: skip
    return tops


_amax = amax  # a parameter of `quantize` has the same name


def decode(
    codes_MK: Tensor, scale_inv_RC: Tensor, rows: int = 0, columns: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return codes * scale_inv in float32, rounded to `dtype`."""
    M, K = codes_MK.shape
    out = torch.empty((M, K), dtype=dtype, device=codes_MK.device)
    if out.numel():
        BM, BK = block_shape(codes_MK)
        R, C = scale_inv_RC.shape
        rows, columns = tile_shape(codes_MK, rows, columns)
        decode_kernel[(triton.cdiv(M, BM) * triton.cdiv(K, BK),)](
            codes_MK, scale_inv_RC, out, M, K, *codes_MK.stride(), *scale_inv_RC.stride(), rows, columns,
            MANY_R=R > 1, MANY_C=C > 1, BM=BM, BK=BK,
        )  # fmt: skip
    return out


def _local(rows: int, columns: int) -> bool:
    """Return whether one program can hold a tile (rows of any length count: it goes over them twice)."""
    if (rows, columns) == (1, 0):
        return True
    return rows > 0 and columns > 0 and triton.next_power_of_2(rows) * triton.next_power_of_2(columns) <= 16384


def _warps(elements: int) -> int:
    """Return the warps that give each thread 32 elements: more would not leave registers for a second program on the same
    multiprocessor."""
    return max(4, min(16, elements // 1024))


def _tiles(
    x_MK: Tensor, codes: Tensor, scales: Tensor, codes_t: Tensor | None, scales_t: Tensor | None,
    key: Tensor | None, floor: float, rows: int, columns: int, options: dict[str, Any],
) -> None:  # fmt: skip
    M, K = x_MK.shape
    R, C = triton.cdiv(M, columns if rows == 1 else rows), scales.shape[1]
    BK = triton.next_power_of_2(columns)
    if rows > 1:
        BM = triton.next_power_of_2(rows)
    elif codes_t is not None:
        BM = BK
    else:
        BM = min(max(1, ELEMENTS // BK), triton.next_power_of_2(M))
        R = triton.cdiv(M, BM)
    tile_kernel[(R * C,)](
        x_MK, codes, scales, codes_t, scales_t, key, floor, M, K, *x_MK.stride(), R, C, **options,
        ROWS=rows, COLUMNS=columns, TRANSPOSED=codes_t is not None, BM=BM, BK=BK, num_warps=_warps(BM * BK),
    )  # fmt: skip


def _amax_both(x_MK: Tensor, tops_rows: Tensor | None, tops_columns: Tensor) -> None:
    M, K = x_MK.shape
    BM, BK = min(64, triton.next_power_of_2(M)), min(128, triton.next_power_of_2(K))
    amax_both_kernel[(triton.cdiv(M, BM) * triton.cdiv(K, BK),)](
        x_MK, None if tops_rows is None else tops_rows.view(torch.int32), tops_columns.view(torch.int32), M, K, *x_MK.stride(),
        BM=BM, BK=BK, ROWS=tops_rows is not None, num_warps=_warps(BM * BK),
    )  # fmt: skip


def _encode(
    x_MK: Tensor, amax_RC: Tensor, codes: Tensor, scales: Tensor, rows: int, columns: int, floor: float, options: dict[str, Any],
    amax_t: Tensor | None = None, codes_t: Tensor | None = None, scales_t: Tensor | None = None,
    key: Tensor | None = None, record: Tensor | None = None,
) -> None:  # fmt: skip
    M, K = x_MK.shape
    R, C = scales.shape
    amax_RC = amax_RC.expand(R, C)
    rows, columns = tile_shape(x_MK, rows, columns)
    if codes_t is None:
        BM, BK = block_shape(x_MK)
    else:
        BM, BK = min(128, triton.next_power_of_2(M)), min(128, triton.next_power_of_2(K))
    encode_kernel[(triton.cdiv(M, BM) * triton.cdiv(K, BK),)](
        x_MK, amax_RC, codes, scales, amax_t, codes_t, scales_t,
        None if record is None else record.view(torch.int32), key, floor, M, K, *x_MK.stride(),
        *amax_RC.stride(), *scales.stride(), rows, columns, **options,
        MANY_R=R > 1, MANY_C=C > 1, TRANSPOSED="" if codes_t is None else "same" if amax_t is None else "columns",
        RECORD=record is not None, BM=BM, BK=BK, num_warps=_warps(BM * BK),
    )  # fmt: skip
