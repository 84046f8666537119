"""The one door to the kernels: an operation in, the best implementation for its device out.

Every operation has its definition in `kernels/reference` (plain PyTorch, any device). Where a device has something faster
that gives the same numbers, this file takes it. `choices(device)` says what is taken and why.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from surokit.formats import Format
from surokit.kernels.reference import gemm as reference_gemm
from surokit.kernels.reference import quantize as reference_quantize

Tile = tuple[int, int]


@dataclass(frozen=True)
class Choice:
    """What serves an operation on a device, and why."""

    op: str
    backend: str
    why: str


@cache
def native_fp8(device: torch.device) -> bool:
    """Whether the device multiplies float8 matrices itself (CUDA compute capability 8.9 and up)."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def choices(device: torch.device | str | None = None) -> list[Choice]:
    """One row an operation for `device` (default: CUDA if there is one)."""
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if native_fp8(device):
        fp8 = Choice("scaled_mm", "torch", "float8 tensor cores through torch._scaled_mm")
    else:
        fp8 = Choice(
            "scaled_mm", "reference", f"{device.type} has no float8 product here: emulated with the same numbers"
        )
    plain = "the only implementation so far"
    return [fp8, Choice("quantize", "reference", plain), Choice("dequantize", "reference", plain)]


def quantize(
    x_MK: Tensor,
    format: Format,
    tile: Tile,
    *,
    pow2: bool,
    amax: Tensor | None = None,
    stochastic: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes [M, K] and decode scales [R, C]; see kernels/reference/quantize.py for the meaning of every argument."""
    rows, columns = tile
    if amax is None:
        amax = reference_quantize.amax(x_MK, rows, columns)
    # the recipes' sources differ: torchao keeps a row's amax above 1e-12, TransformerEngine takes tensors and blocks as they are
    floor = 1e-12 if (rows, columns) == (1, 0) else 0.0
    scale = reference_quantize.encode_scale(amax, format, pow2, floor)
    codes = reference_quantize.encode(x_MK, scale, format, rows, columns, stochastic, generator)
    return codes, reference_quantize.scale_inv(scale)


def amax(x_MK: Tensor, tile: Tile = (0, 0)) -> Tensor:
    """Largest magnitude of each tile, float32 [R, C]."""
    return reference_quantize.amax(x_MK, *tile)


def dequantize(codes_MK: Tensor, scales_RC: Tensor, tile: Tile, dtype: torch.dtype) -> Tensor:
    """codes * scales, rounded once to `dtype`."""
    return reference_quantize.decode(codes_MK, scales_RC, *tile, dtype=dtype)


def spread(scales_RC: Tensor, like_MK: Tensor, tile: Tile) -> Tensor:
    """Tile scales in a shape that broadcasts against `like_MK`."""
    return reference_quantize.spread(scales_RC, like_MK, *tile)


def scaled_mm(
    a_codes_MK: Tensor,
    a_scales: Tensor,
    b_codes_NK: Tensor,
    b_scales: Tensor,
    *,
    out_dtype: torch.dtype,
    pow2: bool,
    fast_accumulation: bool,
) -> Tensor:
    """y_MN = a_MK @ b_NK' for float8 codes whose scales do not vary along K ([1, 1], or [M, 1] with [N, 1])."""
    if not native_fp8(a_codes_MK.device):
        return reference_gemm.scaled_mm(a_codes_MK, a_scales, b_codes_NK, b_scales, out_dtype, pow2)
    M, N = a_codes_MK.shape[0], b_codes_NK.shape[0]
    a_codes_MK = _pad16(a_codes_MK, rows=False).contiguous()
    b_codes_NK = _pad16(b_codes_NK, rows=True).contiguous()
    per_tensor = a_scales.numel() == b_scales.numel() == 1
    if not per_tensor and out_dtype != torch.bfloat16:  # most devices scale rows for a bfloat16 result only
        one = a_scales.new_ones(())
        y_MN = torch._scaled_mm(
            a_codes_MK, b_codes_NK.t(), one, one, out_dtype=torch.float32, use_fast_accum=fast_accumulation
        )
        return (y_MN[:, :N] * a_scales * b_scales.t()).to(out_dtype)
    if per_tensor:
        a_scale, b_scale = a_scales.reshape(()), b_scales.reshape(())
    else:  # one scale a row on both sides; rows that were padded multiply zeros
        a_scale = a_scales.expand(M, 1).contiguous()
        b_scale = (
            torch.nn.functional.pad(b_scales.expand(N, 1), (0, 0, 0, b_codes_NK.shape[0] - N), value=1.0)
            .t()
            .contiguous()
        )
    y_MN = torch._scaled_mm(
        a_codes_MK, b_codes_NK.t(), a_scale, b_scale, out_dtype=out_dtype, use_fast_accum=fast_accumulation
    )
    return y_MN[:, :N]


def _pad16(codes: Tensor, *, rows: bool) -> Tensor:
    """Zeros up to a multiple of 16 along K, and along the rows where they become columns: the hardware's condition."""
    M, K = codes.shape
    bottom = -M % 16 if rows else 0
    if K % 16 == 0 and bottom == 0:
        return codes
    # padding is not implemented for float8: move the bytes
    return torch.nn.functional.pad(codes.view(torch.uint8), (0, -K % 16, 0, bottom)).view(codes.dtype)
