"""Quantize with a scale for each tile on a CPU: quantize.cpp behind the names and the meaning of kernels/reference/quantize.py.

What is not finite, narrow tiles, other dtypes and empty matrices are left to the reference.

Shapes: M rows, K columns, R x C the grid of tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surokit.formats import Format

from ..reference import quantize as reference
from .library import call, call_with, is_built, is_on_cpu, row_by_row, takes
from .library import why as why

_NARROW = 16  # columns of a tile below which its loops do not pay


def amax(x_MK: Tensor, rows: int = 0, columns: int = 0) -> Tensor:
    """Return the largest magnitude of each tile, float32 [R, C]; NaN where a tile holds one."""
    if _takes_tiles(x_MK, columns):
        amax_RC = x_MK.new_empty(reference.grid_of_tiles(x_MK, rows, columns), dtype=torch.float32)
        if call_with(row_by_row(x_MK), "amax", *reference.tile_shape(x_MK, rows, columns), amax_RC):
            return amax_RC
    return reference.amax(x_MK, rows, columns)


def quantize(
    x_MK: Tensor,
    format: Format,
    rows: int = 0,
    columns: int = 0,
    pow2: bool = False,
    amax: Tensor | None = None,
    floor: float = 0.0,
    key: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the codes [M, K] in the format's dtype and decode scales [R, C] float32."""
    grid = reference.grid_of_tiles(x_MK, rows, columns)
    usual = (amax is None or is_on_cpu(amax, torch.float32, grid)) and floor <= reference.FLT_MAX
    if usual and _takes_tiles(x_MK, columns, key):
        x_MK = row_by_row(x_MK)
        codes_MK = x_MK.new_empty(x_MK.shape, dtype=reference.DTYPES[format])
        scales_RC = reference.empty_scales(x_MK, rows, columns)
        tile, given = reference.tile_shape(x_MK, rows, columns), None if amax is None else amax.contiguous()
        made = codes_MK, scales_RC, *scales_RC.stride()
        if call_with(x_MK, "quantize", *tile, pow2, floor, given, format.exponent_bits, key, *made):
            return codes_MK, scales_RC
    return reference.quantize(x_MK, format, rows, columns, pow2, amax, floor, key)


def _takes_tiles(x_MK: Tensor, columns: int, key: Tensor | None = None) -> bool:
    return takes(x_MK, key) and not 0 < columns < _NARROW


def decode(
    codes_MK: Tensor, scale_inv_RC: Tensor, rows: int = 0, columns: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return codes * scale_inv in float32, rounded to `dtype`."""
    return reference.times_tiles_(values(codes_MK).float(), scale_inv_RC, rows, columns).to(dtype)


def values(codes: Tensor) -> Tensor:
    """Return the codes' own values in bfloat16, exactly, in memory as the codes are."""
    usual = codes.dtype in reference.DTYPES.values() and codes.device.type == "cpu" and codes.numel() > 0
    whole = codes.is_contiguous() or (codes.ndim == 2 and codes.t().is_contiguous())
    if usual and whole and is_built():
        found = torch.empty_like(codes, dtype=torch.bfloat16)
        if call("values", codes, codes.numel(), 4 if codes.dtype == torch.float8_e4m3fn else 5, found):
            return found
    return reference.values(codes)


def quantize_both(
    x_MK: Tensor, format: Format, rows: int = 0, columns: int = 0, pow2: bool = False, floor: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return quantize(x) and quantize(x'), each as codes and decode scales."""
    given = format, rows, columns, pow2, None, floor
    return *quantize(x_MK, *given), *quantize(x_MK.t(), *given)
