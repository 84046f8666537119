"""Quantize to NVFP4 on a CPU: quantize.cpp behind the names and the meaning of kernels/reference/nvfp4.py.

What is not finite, other dtypes and empty matrices are left to the reference.

Shapes: M rows, K columns, R x C the grid of blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surokit.formats import E2M1, E4M3

from ..reference import hadamard
from ..reference import nvfp4 as reference
from ..reference.quantize import grid_of_tiles
from .library import call, call_with, is_built, is_on_cpu, row_by_row, takes
from .library import why as why

_EDEN, _FOUR_OVER_SIX = 1, {None: 0, "mse": 2, "mae": 3}  # how quantize.cpp makes the scales


def quantize(
    x_MK: Tensor,
    rows: int,
    four_over_six: reference.ErrorOf | None = None,
    amax: Tensor | None = None,
    key: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the packed codes uint8 [M, ceil(K/2)], block scales e4m3 [R, C], scale float32 [1, 1]."""
    scale_max = E4M3.max if four_over_six is None else 256.0
    made = _quantized(x_MK, rows, E2M1.max, scale_max, amax, key, _FOUR_OVER_SIX[four_over_six])
    return made or reference.quantize(x_MK, rows, four_over_six, amax, key)


def quantize_rotated(x_MK: Tensor, block: int = 16, key: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return `quantize` of the rotated x, in blocks of 1 x 16."""
    return quantize(hadamard.rotate(row_by_row(x_MK), block), 1, key=key)


def quantize_eden(x_MK: Tensor, block: int, rotation: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed codes, block scales and scale of x rotated by the signs of `rotation`: MS-EDEN."""
    if block % reference.COLUMNS == 0 and takes(x_MK, key):
        y_MK = hadamard.rotate_drawn(row_by_row(x_MK), block, rotation)
        if made := _quantized(y_MK, 1, reference.EDEN_REACH, 256.0, None, key, _EDEN):
            return made
    return reference.quantize_eden(x_MK, block, rotation, key)


def factors(packed: Tensor, scales_RC: Tensor, rows: int, columns: int) -> Tensor:
    """Return q S_blk in bfloat16 [M, columns], exactly."""
    q_MK = packed.new_empty((packed.shape[0], columns), dtype=torch.bfloat16)
    fits = is_on_cpu(packed, torch.uint8, (len(packed), -(-columns // 2)))
    fits = fits and is_on_cpu(scales_RC, torch.float8_e4m3fn, grid_of_tiles(q_MK, rows, reference.COLUMNS))
    if fits and is_built() and call("factors_nv", packed.contiguous(), *q_MK.shape, rows, scales_RC.contiguous(), q_MK):
        return q_MK
    return reference.factors(packed, scales_RC, rows, columns)


def dequantize(
    packed: Tensor, scales_RC: Tensor, scale: Tensor, rows: int, columns: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return q S_blk scale [M, columns], rounded to `dtype`."""
    return factors(packed, scales_RC, rows, columns).float().mul_(scale).to(dtype)


def _quantized(
    x_MK: Tensor, rows: int, reach: float, scale_max: float, amax: Tensor | None, key: Tensor | None, how: int
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the codes and scales, None where the reference has to make them. reach: what a block's amax is scaled to."""
    if rows not in (1, 16) or not takes(x_MK, key) or (amax is not None and not _is_usual(amax)):
        return None
    x_MK = row_by_row(x_MK)
    packed = x_MK.new_empty((x_MK.shape[0], -(-x_MK.shape[1] // 2)), dtype=torch.uint8)
    scales_RC = x_MK.new_empty(grid_of_tiles(x_MK, rows, reference.COLUMNS), dtype=torch.float8_e4m3fn)
    scale = x_MK.new_empty((1, 1), dtype=torch.float32)
    given = None if amax is None else amax.float()
    done = call_with(x_MK, "quantize_nv", rows, reach * scale_max, 1 / reach, given, key, how, packed, scales_RC, scale)
    return (packed, scales_RC, scale) if done else None


def _is_usual(amax: Tensor) -> bool:
    """Return whether a given amax is one number that an amax can be."""
    return is_on_cpu(amax, amax.dtype) and amax.numel() == 1 and bool((amax >= 0) & amax.isfinite())
