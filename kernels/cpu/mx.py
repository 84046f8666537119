"""Quantize to the MX formats on a CPU: quantize.cpp behind the names and the meaning of kernels/reference/mx.py.

What is not finite, other dtypes and empty matrices are left to the reference.

Shapes: M rows, K columns, C = ceil(K/32) blocks in a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surokit.formats import E2M1, E4M3, E5M2, Format

from ..reference import mx as reference
from ..reference.quantize import DTYPES, grid_of_tiles
from .library import call, call_with, is_built, is_on_cpu, row_by_row, takes
from .library import why as why

_FORMATS, _RULES = (E2M1, E4M3, E5M2), ("rceil", "floor", "even")  # in the order of quantize.cpp


def quantize(x_MK: Tensor, format: Format, rule: reference.Rule, key: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the codes (float8 [M, K], or packed uint8 [M, ceil(K/2)] for E2M1) and scales, float8_e8m0fnu [M, C]."""
    if rule in _RULES and takes(x_MK, key):
        x_MK = row_by_row(x_MK)
        shape, dtype = _codes(x_MK.shape, format)
        codes = x_MK.new_empty(shape, dtype=dtype)
        scales_MC = x_MK.new_empty(grid_of_tiles(x_MK, 1, reference.BLOCK), dtype=torch.float8_e8m0fnu)
        names = _FORMATS.index(format), _RULES.index(rule)
        if call_with(x_MK, "quantize_mx", *names, key, codes, scales_MC):
            return codes, scales_MC
    return reference.quantize(x_MK, format, rule, key)


def quantize_both(x_MK: Tensor, format: Format, rule: reference.Rule) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return quantize(x) and quantize(x'): codes and scales of each."""
    return *quantize(x_MK, format, rule), *quantize(x_MK.t(), format, rule)


def dequantize(
    codes: Tensor, scales_MC: Tensor, columns: int, format: Format, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return q 2^(byte - 127) [M, columns], rounded to `dtype`."""
    if dtype in (torch.bfloat16, torch.float32) and is_built():
        x_MK = codes.new_empty((codes.shape[0], columns), dtype=dtype)
        shape, dtype_of_codes = _codes(x_MK.shape, format)
        fits = is_on_cpu(codes, dtype_of_codes, shape)
        fits = fits and is_on_cpu(scales_MC, torch.float8_e8m0fnu, grid_of_tiles(x_MK, 1, reference.BLOCK))
        given = _FORMATS.index(format), scales_MC.contiguous(), x_MK, int(dtype == torch.float32)
        if fits and call("dequantize_mx", codes.contiguous(), *x_MK.shape, *given):
            return x_MK
    return reference.dequantize(codes, scales_MC, columns, format, dtype)


def _codes(shape: torch.Size, format: Format) -> tuple[tuple[int, int], torch.dtype]:
    """Return the shape and dtype of a matrix' codes."""
    M, K = shape
    return ((M, -(-K // 2)), torch.uint8) if format == E2M1 else ((M, K), DTYPES[format])
