"""Define NF4 storage: 4-bit codes for 16 quantiles of a normal distribution, a scale for each 64 elements.

bitsandbytes' FP4 is the same with another table (`surokit.formats.BNB_FP4`).

    absmax = largest magnitude of a block          q = nearest of the 16 numbers to x / absmax          x' = number[q] absmax

Blocks run over the flattened matrix, the last may be partial. A midpoint goes to the lower code; the even element lies in the
HIGH nibble (E2M1 has it the other way round). Full blocks multiply by 1 / absmax, the partial one divides: bitsandbytes' way,
kept because a checkpoint should come out the same.

Double quantization holds the scales in a byte: their mean is subtracted, blocks of 256 of what is left are divided by their own
absmax and take the nearest of the 256 numbers of dynamic8bit.py. A NaN or inf makes its block's absmax NaN, and the block
decodes to NaN; with double quantization the mean becomes NaN, and with it the whole matrix. (On a CPU bitsandbytes takes the
number nearest to a grid point near the quotient; so about one in 500 of its codes of scales is the second nearest.)

Shapes: M rows, K columns, B blocks of 64. Sources: QLoRA (Dettmers et al., 2023); bitsandbytes for the order of operations.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from surokit.formats import NF4, Codebook

from .dynamic8bit import numbers
from .fp4 import look_up_pairs, table

BLOCK = 64
DOUBLE = 256  # scales in a block of double quantization
CPU_PIECE = 256 * 1024  # elements decoded at once: what is between codes and numbers stays in the cache
LEAST = 1e-38  # of an absmax that is divided by: below, 1 / absmax would overflow


@cache
def midpoints(format: Codebook) -> tuple[float, ...]:
    """Return the numbers halfway between neighbours of the table, in ascending order."""
    return tuple(0.5 * (low + high) for low, high in pairwise(format.values[code] for code in format.ascending))


def quantize(x_MK: Tensor, double: int = 0, format: Codebook = NF4) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return the packed codes, scales, and what decodes the scales.

    Codes uint8 [M, K/2] ([1, ceil(MK/2)] where K is odd). Scales [M, K/64] ([1, B] where K is no multiple of 64): float32
    absmax with double = 0; uint8 codes with double = 256, and then the third is their absmax float32 [ceil(B/256)] and their
    mean float32 [1].
    """
    if double not in (0, DOUBLE):
        raise ValueError(
            f"NF4 quantizes its scales in blocks of {DOUBLE}, or not at all: double = {double} is neither {DOUBLE} nor 0"
        )
    M, K = x_MK.shape
    y, absmax = _normalized(x_MK.reshape(-1).float(), BLOCK)
    q = torch.full(y.shape, len(format.ascending) - 1, dtype=torch.uint8, device=y.device)
    for midpoint in midpoints(format):
        q -= (y <= midpoint).view(torch.uint8)
    if format != NF4:  # its codes are not in the order of its numbers
        q = table(format.ascending, torch.uint8, q.device)[q.int()]
    if q.numel() % 2:
        q = torch.nn.functional.pad(q, (0, 1), value=format.values.index(0.0))
    codes = (q[::2] << 4 | q[1::2]).view((1, -1) if K % 2 else (M, K // 2))
    shape = (1, -1) if K % BLOCK else (M, K // BLOCK)
    if not double:
        return codes, absmax.view(shape), ()
    q, second = quantize_scales(absmax)
    return codes, q.view(shape), second


def quantize_scales(absmax: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return what double quantization gives: 8-bit codes of the absmaxes [B] less their mean; their own absmax [ceil(B/256)] and
    the mean [1]."""
    offset = absmax.mean().view(1)
    y, second = _normalized(absmax - offset, DOUBLE)
    values = table(numbers(signed=True), torch.float32, y.device)
    q = torch.bucketize(y, 0.5 * (values[:-1] + values[1:]), out_int32=True).to(torch.uint8)
    return q, (second, offset)


def dequantize(
    codes: Tensor,
    scales: Tensor,
    second: tuple[Tensor, ...],
    shape: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    format: Codebook = NF4,
) -> Tensor:
    """Return number[q] absmax [M, K] in float32, rounded to `dtype`."""
    elements = shape[0] * shape[1]
    absmax = scales.reshape(-1)
    if second:
        absmax = (
            _times_(table(numbers(signed=True), torch.float32, codes.device)[absmax.int()], second[0], DOUBLE)
            + second[1]
        )
    codes = codes.reshape(-1)
    y = torch.empty(elements, dtype=dtype, device=codes.device)
    piece = CPU_PIECE if codes.device.type == "cpu" else max(1, elements)
    for first in range(0, elements, piece):
        last = min(first + piece, elements)
        q = look_up_pairs(codes[first // 2 : (last + 1) // 2], format.values, torch.float32, high_first=True)
        y[first:last] = _times_(q[: last - first], absmax[first // BLOCK :], BLOCK)
    return y.view(shape)


def _normalized(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return x [n] over the absmax of its block, and the absmaxes [ceil(n/block)], NaN where one is not finite."""
    n = x.numel()
    full, rest = x[: n - n % block].view(-1, block), x[n - n % block :]
    absmax = full.abs().amax(dim=1)
    y = (full * absmax.clamp(min=LEAST).reciprocal()[:, None]).view(-1)
    if len(rest):
        last = rest.abs().amax().view(1)
        absmax, y = torch.cat((absmax, last)), torch.cat((y, torch.div(rest, last.clamp(min=LEAST))))
    return y, absmax + (absmax - absmax)


def _times_(x: Tensor, scales: Tensor, block: int) -> Tensor:
    """Return x [n], each block times its scale, in place."""
    n = x.numel()
    full = n // block
    x[: full * block].view(-1, block).mul_(scales[:full, None])
    if n % block:
        x[full * block :] *= scales[full]
    return x
