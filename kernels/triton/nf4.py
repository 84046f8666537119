"""Store NF4 in kernels: q = nearest of 16 numbers to x / absmax of 64 elements. See kernels/reference/nf4.py.

Blocks run over the flattened matrix, which is made contiguous first: a weight is quantized once. Nothing is fused into
multiply-adds: number[q] scale + offset of double quantization has to round twice, as the reference does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surokit.formats import NF4, Codebook
from surokit.kernels.reference import nf4 as reference
from surokit.kernels.reference.dynamic8bit import numbers
from surokit.kernels.reference.fp4 import table

_LEAST: tl.constexpr = tl.constexpr(reference.LEAST)
_DOUBLE: tl.constexpr = tl.constexpr(reference.DOUBLE)


@triton.jit
def block_scale(scales, second, offset, map, block, mask, DOUBLE: tl.constexpr):
    """Load the float32 absmax of blocks, zeros where masked off; `DOUBLE`: scales are codes of the dynamic map."""
    if DOUBLE:
        code = tl.load(scales + block, mask=mask, other=0).to(tl.int32)
        scale = tl.load(map + code) * tl.load(second + block // _DOUBLE, mask=mask, other=0.0)
        return tl.where(mask, scale + tl.load(offset), 0.0)
    else:
        return tl.load(scales + block, mask=mask, other=0.0)


@triton.jit
def quantize_kernel(
    x, codes, scales, ascending, n, bytes, MIDPOINTS: tl.constexpr, ORDERED: tl.constexpr, ZERO: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Quantize BLOCKS blocks of 64 from the n elements of x. ORDERED: codes ascend with their numbers; else see `ascending`."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * 64 + tl.arange(0, 64)[None, :]
    values = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    # as integers, magnitudes order the same and a NaN is the largest
    absmax = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1).to(tl.float32, bitcast=True)
    divisor = tl.where(absmax < _LEAST, _LEAST, absmax)
    y = values * tl.div_rn(tl.full(absmax.shape, 1.0, tl.float32), divisor)[:, None]
    y = tl.where((block == n // 64)[:, None], tl.div_rn(values, tl.broadcast_to(divisor[:, None], values.shape)), y)
    q = tl.full(values.shape, len(MIDPOINTS), tl.int32)
    for i in tl.static_range(len(MIDPOINTS)):
        q -= (y <= MIDPOINTS[i]).to(tl.int32)
    if not ORDERED:
        q = tl.load(ascending + q).to(tl.int32)
    q = tl.where(at < n, q, ZERO)
    high, low = tl.split(tl.reshape(q, (BLOCKS, 32, 2)))
    byte = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(codes + byte, (high << 4 | low).to(tl.uint8), mask=byte < bytes)
    tl.store(scales + block, absmax + (absmax - absmax), mask=block * 64 < n)


@triton.jit
def dequantize_kernel(
    codes, scales, second, offset, numbers, map, y, n, bytes, DOUBLE: tl.constexpr, BLOCKS: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    byte = block * 32 + tl.arange(0, 32)[None, :]
    packed = tl.load(codes + byte, mask=byte < bytes, other=0).to(tl.int32)
    scale = block_scale(scales, second, offset, map, block, block * 64 < n, DOUBLE)
    pair = tl.join(tl.load(numbers + (packed >> 4)) * scale, tl.load(numbers + (packed & 15)) * scale)
    at = block * 64 + tl.arange(0, 64)[None, :]
    tl.store(y + at, tl.reshape(pair, (BLOCKS, 64)).to(y.dtype.element_ty), mask=at < n)


def tables(device: torch.device, format: Codebook = NF4) -> tuple[Tensor, Tensor]:
    """Return the 16 numbers of the format and the 256 of the dynamic map, float32."""
    return table(format.values, torch.float32, device), table(numbers(signed=True), torch.float32, device)


def quantize(x_MK: Tensor, double: int = 0, format: Codebook = NF4) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return the packed codes, the scales, and the tensors that decode the scales, () unless `double`.

    Scales, 1/64 as many as elements, are quantized by the reference.
    """
    M, K = x_MK.shape
    n = M * K
    codes = x_MK.new_empty((1, (n + 1) // 2) if K % 2 else (M, K // 2), dtype=torch.uint8)
    scales = x_MK.new_empty((1, -(-n // 64)) if K % 64 else (M, K // 64), dtype=torch.float32)
    if n:
        grid = (triton.cdiv(n, 64 * 64),)
        quantize_kernel[grid](
            x_MK.contiguous(), codes, scales, table(format.ascending, torch.uint8, x_MK.device), n, codes.numel(),
            MIDPOINTS=reference.midpoints(format), ORDERED=format == NF4, ZERO=format.values.index(0.0), BLOCKS=64,
            enable_fp_fusion=False,
        )  # fmt: skip
    if not double:
        return codes, scales, ()
    q, second = reference.quantize_scales(scales.view(-1))
    return codes, q.view(scales.shape), second


def dequantize(
    codes: Tensor,
    scales: Tensor,
    second: tuple[Tensor, ...],
    shape: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    format: Codebook = NF4,
) -> Tensor:
    """Return number[q] absmax [M, K] in float32, rounded to `dtype`."""
    y = torch.empty(shape, dtype=dtype, device=codes.device)
    if y.numel():
        numbers, map = tables(codes.device, format)
        absmax_scale, offset = second or (None, None)
        grid = (triton.cdiv(y.numel(), 64 * 64),)
        dequantize_kernel[grid](
            codes.contiguous(), scales.contiguous(), absmax_scale, offset, numbers, map, y, y.numel(), codes.numel(),
            DOUBLE=bool(second), BLOCKS=64, enable_fp_fusion=False,
        )  # fmt: skip
    return y
