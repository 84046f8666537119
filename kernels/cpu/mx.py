"""Quantize to the MX formats on a CPU: quantize.cpp behind the names and the meaning of kernels/reference/mx.py.

What is not finite, other dtypes and empty matrices are left to the reference.

Shapes: M rows, K columns, C = ceil(K/32) blocks in a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surokit.formats import E2M1, E4M3, E5M2, Format

from ..reference import mx as reference
from ..reference.quantize import DTYPES
from .build import built
from .library import FLOATS, SOURCE, call, call_with, takes
from .library import why as why

_FORMATS = (E2M1, E4M3, E5M2)  # in the order of quantize.cpp, as the rules are
_RULES: tuple[reference.Rule, ...] = ("rceil", "floor", "even")


def quantize(x_MK: Tensor, format: Format, rule: reference.Rule, key: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the codes (float8 [M, K], or packed uint8 [M, ceil(K/2)] for E2M1) and scales, float8_e8m0fnu [M, C]."""
    if takes(x_MK):
        M, K = x_MK.shape
        codes = torch.empty((M, -(-K // 2)) if format == E2M1 else (M, K), dtype=DTYPES.get(format, torch.uint8))
        scales_MC = torch.empty((M, -(-K // reference.BLOCK)), dtype=torch.float8_e8m0fnu)
        names = _FORMATS.index(format), _RULES.index(rule)
        if call_with(x_MK.contiguous(), "quantize_mx", *names, key, codes, scales_MC):
            return codes, scales_MC
    return reference.quantize(x_MK, format, rule, key)


def quantize_both(x_MK: Tensor, format: Format, rule: reference.Rule) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return quantize(x) and quantize(x'): codes and scales of each."""
    return *quantize(x_MK, format, rule), *quantize(x_MK.t(), format, rule)


def dequantize(
    codes: Tensor, scales_MC: Tensor, columns: int, format: Format, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return q 2^(byte - 127) [M, columns], rounded to `dtype`."""
    if dtype in FLOATS and built(SOURCE).library is not None:
        x_MK = torch.empty((codes.shape[0], columns), dtype=dtype)
        given = _FORMATS.index(format), scales_MC.contiguous(), x_MK, int(dtype == torch.float32)
        if call("dequantize_mx", codes.contiguous(), *x_MK.shape, *given):
            return x_MK
    return reference.dequantize(codes, scales_MC, columns, format, dtype)
