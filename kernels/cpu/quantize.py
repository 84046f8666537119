"""Quantize with a scale for each tile on a CPU: quantize.cpp behind the names and the meaning of kernels/reference/quantize.py.

What is not finite, other dtypes and empty matrices are left to the reference.

Shapes: M rows, K columns, R x C the grid of tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surokit.formats import E4M3, Format

from ..reference import quantize as reference
from .library import call_with, takes
from .library import why as why


def amax(x_MK: Tensor, rows: int = 0, columns: int = 0) -> Tensor:
    """Return the largest magnitude of each tile, float32 [R, C]; NaN where a tile holds one."""
    if not takes(x_MK):
        return reference.amax(x_MK, rows, columns)
    amax_RC = torch.empty(reference.grid_of_tiles(x_MK, rows, columns))
    call_with(x_MK.contiguous(), "amax", *reference.tile_shape(x_MK, rows, columns), amax_RC)
    return amax_RC


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
    x_MK = x_MK.contiguous()
    amax_RC = _amax(x_MK, rows, columns)
    if not takes(x_MK) or not amax_RC.isfinite().all():
        return reference.quantize(x_MK, format, rows, columns, pow2, amax, floor, key)
    amax_RC = amax_RC if amax is None else amax
    scale_RC = reference.encode_scale(amax_RC, format, pow2, floor)
    scale_inv = reference.empty_scales(x_MK, rows, columns).copy_(reference.decode_scale(scale_RC, amax_RC))
    codes_MK = torch.empty(x_MK.shape, dtype=reference.DTYPES[format])
    factors_RC = scale_RC.expand(reference.grid_of_tiles(x_MK, rows, columns)).contiguous()
    exponent_bits = 4 if format == E4M3 else 5
    call_with(x_MK, "encode", *reference.tile_shape(x_MK, rows, columns), factors_RC, exponent_bits, key, codes_MK)
    return codes_MK, scale_inv


_amax = amax  # a parameter of `quantize` has the same name


def quantize_both(
    x_MK: Tensor, format: Format, rows: int = 0, columns: int = 0, pow2: bool = False, floor: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return quantize(x) and quantize(x'), each as codes and decode scales."""
    return *quantize(x_MK, format, rows, columns, pow2, floor=floor), *quantize(
        x_MK.t(), format, rows, columns, pow2, floor=floor
    )
