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
from .build import built
from .library import SOURCE, call, call_with, takes
from .library import why as why

_EDEN, _FOUR_OVER_SIX = 1, {"mse": 2, "mae": 3}  # how quantize.cpp makes the scales


def quantize(
    x_MK: Tensor,
    rows: int,
    four_over_six: reference.ErrorOf | None = None,
    amax: Tensor | None = None,
    key: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the packed codes uint8 [M, ceil(K/2)], block scales e4m3 [R, C], scale float32 [1, 1]."""
    how = 0 if four_over_six is None else _FOUR_OVER_SIX[four_over_six]
    made = _quantized(x_MK, rows, E2M1.max, 256.0 if four_over_six else E4M3.max, amax, key, how)
    return made or reference.quantize(x_MK, rows, four_over_six, amax, key)


def quantize_rotated(x_MK: Tensor, block: int = 16, key: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return `quantize` of the rotated x, in blocks of 1 x 16."""
    return quantize(hadamard.rotate(x_MK, block), 1, key=key)


def quantize_eden(x_MK: Tensor, block: int, rotation: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed codes, block scales and scale of x rotated by the signs of `rotation`: MS-EDEN."""
    y_MK = hadamard.rotate_drawn(x_MK, block, rotation)
    made = (
        _quantized(y_MK, 1, reference.EDEN_REACH, 256.0, None, key, _EDEN) if block % reference.COLUMNS == 0 else None
    )
    return made or reference.quantize_eden(x_MK, block, rotation, key)


def factors(packed: Tensor, scales_RC: Tensor, rows: int, columns: int) -> Tensor:
    """Return q S_blk in bfloat16 [M, columns], exactly."""
    packed, scales_RC = packed.contiguous(), scales_RC.contiguous()
    q_MK = torch.empty((packed.shape[0], columns), dtype=torch.bfloat16)
    done = built(SOURCE).library is not None and call("factors_nv", packed, *q_MK.shape, rows, scales_RC, q_MK)
    return q_MK if done else reference.factors(packed, scales_RC, rows, columns)


def dequantize(
    packed: Tensor, scales_RC: Tensor, scale: Tensor, rows: int, columns: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return q S_blk scale [M, columns], rounded to `dtype`."""
    return factors(packed, scales_RC, rows, columns).float().mul_(scale).to(dtype)


def _quantized(
    x_MK: Tensor, rows: int, reach: float, scale_max: float, amax: Tensor | None, key: Tensor | None, how: int
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the codes and scales, None where the reference has to make them. reach: what a block's amax is scaled to."""
    if not takes(x_MK):
        return None
    x_MK = x_MK.contiguous()
    M, K = x_MK.shape
    packed = torch.empty((M, -(-K // 2)), dtype=torch.uint8)
    scales_RC = torch.empty((-(-M // rows), -(-K // reference.COLUMNS)), dtype=torch.float8_e4m3fn)
    scale = torch.empty((1, 1))
    amax = amax if amax is None else amax.float()
    done = call_with(x_MK, "quantize_nv", rows, reach * scale_max, 1 / reach, amax, key, how, packed, scales_RC, scale)
    return (packed, scales_RC, scale) if done else None
