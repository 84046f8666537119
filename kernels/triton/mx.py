"""Quantize to MX formats in one read of the operand: a power-of-two scale for every 32 elements, of rows and, if asked for, of
columns.

A program holds whole blocks of both directions, so that the codes of x and of x' leave it after one load. Scales are found with
the integer arithmetic of kernels/reference/mx.py on the bits of the amax.

Shapes: M rows, K columns, C = ceil(K/32) blocks in a row; BM x BK the elements of a program.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from surokit.formats import E2M1, Format
from surokit.kernels.reference.mx import BLOCK, Rule
from surokit.kernels.reference.quantize import DTYPES

from .fp4 import decode_nibbles, encode_nibbles, pack_pairs, unpack_pairs
from .quantize import cast_scaled, format_constants, magnitude_bits, round_stochastic
from .random import random_uniform

NEEDS = (8, 9)  # compute capability: before it Triton has no E4M3


@triton.jit
def scale_bytes(top, MAX: tl.constexpr, MANTISSA: tl.constexpr, EMAX: tl.constexpr, RULE: tl.constexpr):
    """Compute the E8M0 bytes (int32) from the bits of the blocks' amaxes."""
    rounded = top
    if RULE == "rceil":
        amax = top.to(tl.float32, bitcast=True)
        bits = tl.div_rn(amax, tl.full(amax.shape, MAX, tl.float32)).to(tl.int32, bitcast=True)
        # up to the next exponent unless it is a power of two; of the subnormals, 2^-127 and below have byte 0
        exponent = tl.where(bits > 0x00400000, bits + 0x7FFFFF, bits) >> 23
    else:
        if RULE == "even":
            rounded = top + (1 << (22 - MANTISSA))
        exponent = (rounded >> 23) - EMAX
    not_finite = (top >= 0x7F800000) | (rounded >= 0x7F800000)
    return tl.where(not_finite, 255, tl.maximum(exponent, 0))


@triton.jit
def encode_factor(byte):
    """Return 2^(127 - byte), built from its exponent; NaN for 255."""
    return tl.where(byte == 255, float("nan"), ((254 - byte) << 23).to(tl.float32, bitcast=True))


@triton.jit
def cast_codes(
    y, index, key, out,
    MAX: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, KEY: tl.constexpr, FP4: tl.constexpr,
):  # fmt: skip
    """Cast scaled numbers to codes: float8, or nibbles in int32."""
    if FP4:
        y = tl.clamp(y, -MAX, MAX, propagate_nan=tl.PropagateNan.ALL)
        if KEY:
            y = round_stochastic(y, random_uniform(index, tl.load(key), tl.load(key + 1)), MAX, MANTISSA, LOWEST)
        return encode_nibbles(y)
    else:
        return cast_scaled(y, index, key, out, MAX, MANTISSA, LOWEST, KEY)


@triton.jit
def store_codes(out, codes, row0, column0, M, K, width, FP4: tl.constexpr):
    """Store a tile at (row0, column0) of the [M, K] codes, which have `width` bytes a row."""
    if FP4:
        codes = pack_pairs(codes)
        column0 = column0 // 2
    row = (row0 + tl.arange(0, codes.shape[0]))[:, None]
    column = (column0 + tl.arange(0, codes.shape[1]))[None, :]
    tl.store(out + row.to(tl.int64) * width + column, codes, mask=(row < M) & (column < width))


@triton.jit
def quantize_kernel(
    x, codes, scales, codes_t, scales_t, key, M, K, stride_m, stride_k, C, C_t, width, width_t,
    MAX: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, EMAX: tl.constexpr, RULE: tl.constexpr,
    KEY: tl.constexpr, FP4: tl.constexpr, TRANSPOSED: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(K, BK)
    row0, column0 = tl.program_id(0) // blocks * BM, tl.program_id(0) % blocks * BK
    row, column = row0 + tl.arange(0, BM), column0 + tl.arange(0, BK)
    wide_row, wide_column = row[:, None].to(tl.int64), column[None, :].to(tl.int64)
    inside = (row < M)[:, None] & (column < K)[None, :]
    x_tile = tl.load(x + wide_row * stride_m + wide_column * stride_k, mask=inside, other=0).to(tl.float32)
    index = wide_row * K + wide_column
    bits = magnitude_bits(x_tile)

    byte = scale_bytes(tl.max(tl.reshape(bits, (BM, BK // 32, 32)), axis=2), MAX, MANTISSA, EMAX, RULE)
    y = tl.reshape(x_tile, (BM, BK // 32, 32)) * encode_factor(byte)[:, :, None]
    tile = cast_codes(tl.reshape(y, (BM, BK)), index, key, codes, MAX, MANTISSA, LOWEST, KEY, FP4)
    store_codes(codes, tile, row0, column0, M, K, width, FP4)
    c = column0 // 32 + tl.arange(0, BK // 32)
    tl.store(scales + wide_row * C + c[None, :], byte.to(tl.uint8), mask=(row < M)[:, None] & (c < C)[None, :])

    if TRANSPOSED:
        byte = scale_bytes(tl.max(tl.reshape(bits, (BM // 32, 32, BK)), axis=1), MAX, MANTISSA, EMAX, RULE)
        y = tl.reshape(x_tile, (BM // 32, 32, BK)) * encode_factor(byte)[:, None, :]
        tile = cast_codes(tl.reshape(y, (BM, BK)), index, key, codes, MAX, MANTISSA, LOWEST, False, FP4)
        store_codes(codes_t, tl.trans(tile), column0, row0, K, M, width_t, FP4)
        c = row0 // 32 + tl.arange(0, BM // 32)
        tl.store(
            scales_t + wide_column * C_t + c[:, None],
            byte.to(tl.uint8),
            mask=(column < K)[None, :] & (c < C_t)[:, None],
        )


@triton.jit
def dequantize_kernel(codes, scales, out, M, K, C, width, FP4: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    blocks = tl.cdiv(K, BK)
    row0, column0 = tl.program_id(0) // blocks * BM, tl.program_id(0) % blocks * BK
    row, column = (row0 + tl.arange(0, BM))[:, None], (column0 + tl.arange(0, BK))[None, :]
    wide_row = row.to(tl.int64)
    if FP4:
        at = column0 // 2 + tl.arange(0, BK // 2)[None, :]
        q = decode_nibbles(unpack_pairs(tl.load(codes + wide_row * width + at, mask=(row < M) & (at < width), other=0)))
    else:
        q = tl.load(codes + wide_row * width + column, mask=(row < M) & (column < K), other=0.0).to(tl.float32)
    c = column0 // 32 + tl.arange(0, BK // 32)[None, :]
    byte = tl.load(scales + wide_row * C + c, mask=(row < M) & (c < C), other=0).to(tl.int32)
    # 2^(byte - 127): its exponent field is the byte, but for the subnormal 2^-127 and for NaN
    scale = tl.where(byte == 0, 0x00400000, tl.where(byte == 255, 0x7FC00000, byte << 23)).to(tl.float32, bitcast=True)
    y = tl.reshape(tl.reshape(q, (BM, BK // 32, 32)) * scale[:, :, None], (BM, BK))
    tl.store(out + wide_row * K + column, y.to(out.dtype.element_ty), mask=(row < M) & (column < K))


def quantize(x_MK: Tensor, format: Format, rule: Rule, key: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the codes (float8 [M, K], or packed uint8 [M, ceil(K/2)] for E2M1) and scales, float8_e8m0fnu [M, C]."""
    codes, scales = _empty(x_MK, format)
    _quantize(x_MK, format, rule, key, codes, scales, None, None)
    return codes, scales


def quantize_both(x_MK: Tensor, format: Format, rule: Rule) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return quantize(x) and quantize(x'), from one read of x."""
    codes, scales = _empty(x_MK, format)
    codes_t, scales_t = _empty(x_MK.t(), format)
    _quantize(x_MK, format, rule, None, codes, scales, codes_t, scales_t)
    return codes, scales, codes_t, scales_t


def dequantize(
    codes: Tensor, scales_MC: Tensor, columns: int, format: Format, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return q 2^(byte - 127) [M, columns], rounded to `dtype`."""
    M = codes.shape[0]
    out = torch.empty((M, columns), dtype=dtype, device=codes.device)
    if out.numel():
        BK = max(BLOCK, min(128, triton.next_power_of_2(columns)))
        BM = min(4096 // BK, triton.next_power_of_2(M))
        dequantize_kernel[(triton.cdiv(M, BM) * triton.cdiv(columns, BK),)](
            codes.contiguous(), scales_MC.view(torch.uint8).contiguous(), out, M, columns, scales_MC.shape[1], codes.shape[1],
            FP4=format == E2M1, BM=BM, BK=BK,
        )  # fmt: skip
    return out


def _empty(x_MK: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    M, K = x_MK.shape
    shape, dtype = ((M, triton.cdiv(K, 2)), torch.uint8) if format == E2M1 else ((M, K), DTYPES[format])
    scales = torch.empty((M, triton.cdiv(K, BLOCK)), dtype=torch.float8_e8m0fnu, device=x_MK.device)
    return torch.empty(shape, dtype=dtype, device=x_MK.device), scales


def _quantize(
    x_MK: Tensor, format: Format, rule: Rule, key: Tensor | None,
    codes: Tensor, scales: Tensor, codes_t: Tensor | None, scales_t: Tensor | None,
) -> None:  # fmt: skip
    M, K = x_MK.shape
    if not x_MK.numel():
        return
    constants: dict[str, Any] = {**format_constants(format), "EMAX": format.max_exponent, "RULE": rule}
    tall, wide = triton.next_power_of_2(M), max(BLOCK, triton.next_power_of_2(K))
    if codes_t is not None and scales_t is not None:
        BM, BK = max(BLOCK, min(64, tall)), min(64, wide)
        width_t, C_t, bytes_t = codes_t.shape[1], scales_t.shape[1], scales_t.view(torch.uint8)
    else:
        # the longer side of the block along the dimension that lies contiguous in memory
        along_m = x_MK.stride(0) == 1 and x_MK.stride(1) > 1
        BK = BLOCK if along_m else min(128, wide)
        BM = min(4096 // BK, tall)
        width_t, C_t, bytes_t = 0, 0, None
    quantize_kernel[(triton.cdiv(M, BM) * triton.cdiv(K, BK),)](
        x_MK, codes, scales.view(torch.uint8), codes_t, bytes_t, key, M, K, *x_MK.stride(),
        scales.shape[1], C_t, codes.shape[1], width_t, **constants,
        KEY=key is not None, FP4=format == E2M1, TRANSPOSED=codes_t is not None, BM=BM, BK=BK,
        num_warps=4,
    )  # fmt: skip
