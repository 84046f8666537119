"""Quantize with a scale for each tile on a CPU: quantize.cpp behind the names and the meaning of kernels/reference/quantize.py.

What is not finite, narrow tiles, other dtypes and empty matrices are left to the reference.

Shapes: M rows, K columns, R x C the grid of tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surokit.formats import E4M3, Format

from ..reference import quantize as reference
from .library import call_with, is_on_cpu, takes
from .library import why as why

_NARROW = 16  # columns of a tile below which its loops do not pay


def amax(x_MK: Tensor, rows: int = 0, columns: int = 0) -> Tensor:
    """Return the largest magnitude of each tile, float32 [R, C]; NaN where a tile holds one."""
    whole = rows == columns == 0  # torch has it in one pass, in all threads
    if whole or 0 < columns < _NARROW or not takes(x_MK):
        return reference.amax(x_MK, rows, columns)
    amax_RC = x_MK.new_empty(reference.grid_of_tiles(x_MK, rows, columns), dtype=torch.float32)
    done = call_with(x_MK.contiguous(), "amax", *reference.tile_shape(x_MK, rows, columns), amax_RC)
    return amax_RC if done else reference.amax(x_MK, rows, columns)


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
    if takes(x_MK, key) and not 0 < columns < _NARROW:
        x_MK = x_MK.contiguous()
        own_RC = _amax(x_MK, rows, columns)
        amax_RC = own_RC if amax is None else amax
        usual = is_on_cpu(amax_RC, torch.float32, tuple(own_RC.shape))
        if usual and own_RC.isfinite().all() and (amax is None or amax.isfinite().all()):
            scale_RC = reference.encode_scale(amax_RC, format, pow2, floor)
            codes_MK = x_MK.new_empty(x_MK.shape, dtype=reference.DTYPES[format])
            tile, exponent_bits = reference.tile_shape(x_MK, rows, columns), 4 if format == E4M3 else 5
            if call_with(x_MK, "encode", *tile, scale_RC.contiguous(), exponent_bits, key, codes_MK):
                scale_inv = reference.decode_scale(scale_RC, amax_RC)
                return codes_MK, reference.empty_scales(x_MK, rows, columns).copy_(scale_inv)
    return reference.quantize(x_MK, format, rows, columns, pow2, amax, floor, key)


_amax = amax  # a parameter of `quantize` has the same name


def quantize_both(
    x_MK: Tensor, format: Format, rows: int = 0, columns: int = 0, pow2: bool = False, floor: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return quantize(x) and quantize(x'), each as codes and decode scales."""
    codes_MK, scales = quantize(x_MK, format, rows, columns, pow2, floor=floor)
    codes_KM, scales_t = quantize(x_MK.t(), format, rows, columns, pow2, floor=floor)
    return codes_MK, scales, codes_KM.contiguous(), scales_t
