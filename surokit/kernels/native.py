"""Multiply quantized matrices by a device's own tensor cores, through torch.

    y_MN = (a * scales) @ (b * scales)'        both operands [rows, K], the contracted dimension last

A kind names the scaling of both operands: "tensor" and "row" (float8), "block" (float8 in 1 x 128 and 128 x 128 blocks),
"mx" (float8 with E8M0 scales) and "nv" (NVFP4). MXFP4 has no kind: torch has no product for it on NVIDIA devices.

The layouts of block scales are those of cuBLAS, as torch.nn.functional.scaled_mm checks them: for 1 x 128 blocks the scale's
first dimension is contiguous, for 128 x 128 blocks the scales lie along K and are padded to four, for MX and NV they are
swizzled in tiles of 128 rows x 4 columns. Sizes are padded with zeros to the hardware's multiples and cut afterwards.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from surokit.formats import TENSOR_CORES as TENSOR_CORES
from surokit.formats import Kind as Kind  # both are also this file's

KINDS: tuple[Kind, ...] = tuple(TENSOR_CORES)


@cache
def available(kind: Kind, device: torch.device) -> bool:
    """Return whether `device` multiplies this kind itself."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return multiplies(kind, torch.cuda.get_device_capability(device))


def multiplies(kind: Kind | None, capability: tuple[int, int] | None) -> bool:
    """Return whether tensor cores of this compute capability multiply this kind, through this torch and its CUDA."""
    if kind is None or capability is None:
        return False
    cores = TENSOR_CORES[kind]
    through = kind in ("tensor", "row") or hasattr(F, "scaled_mm")
    return cores.on(capability) and (cores.cuda is None or cuda_version() >= cores.cuda) and through


def choice(kind: Kind, device: torch.device) -> tuple[str, str]:
    """Return the backend and the reason for products of this kind."""
    if available(kind, device):
        return "torch", str(TENSOR_CORES[kind])
    return "emulated", f"{device.type} here has no {TENSOR_CORES[kind]}: the same numbers from bfloat16 products"


def cuda_version() -> tuple[int, ...]:
    return tuple(int(part) for part in (torch.version.cuda or "0").split("."))


def scaled_mm(
    a_codes_MK: Tensor,
    a_scales: Tensor,
    b_codes_NK: Tensor,
    b_scales: Tensor,
    *,
    out_dtype: torch.dtype,
    fast_accumulation: bool = False,
) -> Tensor:
    """Return y_MN = a_MK @ b_NK' for float8 codes whose scales do not vary along K ([1, 1], or [M, 1] with [N, 1])."""
    M, N = a_codes_MK.shape[0], b_codes_NK.shape[0]
    a_codes_MK = _rows(_pad(a_codes_MK))
    b_codes_NK = _rows(_pad(b_codes_NK, rows=16))
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
        b_scale = b_scales.expand(N, 1)
        if (missing := b_codes_NK.shape[0] - N) > 0:  # torch copies also where there is nothing to add
            b_scale = F.pad(b_scale, (0, 0, 0, missing), value=1.0)
        b_scale = b_scale.t().contiguous()
    result = _result_type(out_dtype)
    y_MN = torch._scaled_mm(
        a_codes_MK, b_codes_NK.t(), a_scale, b_scale, out_dtype=result, use_fast_accum=fast_accumulation
    )
    return y_MN[:, :N].to(out_dtype)


def block_mm(
    a_codes_MK: Tensor,
    a_scales_MC: Tensor,
    b_codes_NK: Tensor,
    b_scales_RC: Tensor,
    *,
    rows: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """Return y_MN for E4M3 codes, a with a float32 scale for every 1 x 128 block and b for every `rows` x 128, rows 1 or 128.

    cuBLAS sums such blocks in one way only, and refuses fast accumulation.
    """
    M, N = a_codes_MK.shape[0], b_codes_NK.shape[0]
    # cuBLAS takes columns of scales that begin at 16 bytes, so M is padded too
    a_codes_MK, b_codes_NK = _rows(_pad(a_codes_MK, 128, 16)), _rows(_pad(b_codes_NK, 128, max(rows, 16)))
    a_scales = _in_columns(a_scales_MC)
    if rows == 1:
        b_scales, b_scaling = _in_columns(b_scales_RC), F.ScalingType.BlockWise1x128
    else:  # [C rounded up to four, R], and again the first dimension is contiguous
        b_scales, b_scaling = _pad(b_scales_RC, 4).contiguous().t(), F.ScalingType.BlockWise128x128
    y_MN = F.scaled_mm(
        a_codes_MK,
        b_codes_NK.t(),
        a_scales,
        F.ScalingType.BlockWise1x128,
        b_scales,
        b_scaling,
        output_dtype=_result_type(out_dtype),
    )
    return y_MN[:M, :N].to(out_dtype)


def mx_mm(
    a_codes_MK: Tensor, a_scales_MC: Tensor, b_codes_NK: Tensor, b_scales_NC: Tensor, *, out_dtype: torch.dtype
) -> Tensor:
    """Return y_MN for E4M3 codes with an E8M0 scale for every 32 elements of a row."""
    N = b_codes_NK.shape[0]
    y_MN = F.scaled_mm(
        _rows(_pad(a_codes_MK, 32)),
        _rows(_pad(b_codes_NK, 32, 16)).t(),
        swizzled(a_scales_MC),
        F.ScalingType.BlockWise1x32,
        swizzled(_pad(b_scales_NC, 1, 16)),
        F.ScalingType.BlockWise1x32,
        F.SwizzleType.SWIZZLE_32_4_4,
        F.SwizzleType.SWIZZLE_32_4_4,
        output_dtype=_result_type(out_dtype),
    )
    return y_MN[:, :N].to(out_dtype)


def nv_mm(
    a_packed_MK: Tensor,
    a_scales: Tensor,
    a_scale: Tensor,
    b_packed_NK: Tensor,
    b_scales: Tensor,
    b_scale: Tensor,
    *,
    rows: tuple[int, int],
    out_dtype: torch.dtype,
) -> Tensor:
    """Return y_MN for packed E2M1 codes, an E4M3 scale for 16 columns of `rows` (of a and b) rows, and a float32 scale each."""
    M, N = a_packed_MK.shape[0], b_packed_NK.shape[0]
    scaling = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
    swizzles = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
    y_MN = F.scaled_mm(
        _pad(a_packed_MK, 16).contiguous().view(torch.float4_e2m1fn_x2),
        _pad(b_packed_NK, 16, 16).contiguous().view(torch.float4_e2m1fn_x2).t(),
        [swizzled(each_row(a_scales, rows[0], M)), a_scale.reshape(())],
        scaling,
        [swizzled(each_row(b_scales, rows[1], N)), b_scale.reshape(())],
        scaling,
        swizzles,
        swizzles,
        output_dtype=_result_type(out_dtype),
    )
    return y_MN[:, :N].to(out_dtype)


def swizzled(scales_MC: Tensor) -> Tensor:
    """Return one-byte scales in the order in which tensor cores read them, padded with zeros to tiles of 128 rows x 4 columns.

    Tiles follow one another row by row. Within a tile, the scale of row r and column c stands at 16 (r % 32) + 4 (r / 32) + c.
    Source: cuBLAS documentation, "1D Block Scaling Factors Layout".
    """
    padded = _pad(scales_MC, 4, 128).view(torch.uint8)
    tiles = padded.unflatten(1, (-1, 4)).unflatten(0, (-1, 4, 32))  # [tile, r / 32, r % 32, tile, c]
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(scales_MC.dtype)


def each_row(scales_RC: Tensor, rows: int, M: int) -> Tensor:
    """Return [M, C] where `rows` rows share a scale; as bytes, since float8 cannot be repeated on every device."""
    if rows == 1:
        return scales_RC
    return scales_RC.view(torch.uint8).repeat_interleave(rows, 0)[:M].view(scales_RC.dtype)


def _in_columns(scales_MC: Tensor) -> Tensor:
    """Return the scales with their first dimension contiguous and padded to a multiple of 16; no copy if they are made so."""
    return _pad(scales_MC.t()).contiguous().t()


def _result_type(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the product is written: float32 if the hardware cannot write `dtype`."""
    return dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32


def _rows(codes: Tensor) -> Tensor:
    """Return the same codes with contiguous rows; those of a transposed view are transposed by `transpose_fp8`."""
    if codes.is_contiguous():
        # a single row may be the view of a column, whose strides (1, 1) torch takes for a column's: give it a row's
        return codes.view(-1).view(codes.shape)
    turned = codes.t()
    return torch.ops.surokit.transpose_fp8(turned) if turned.is_contiguous() else codes.contiguous()


def _pad(x_MK: Tensor, columns: int = 16, rows: int = 1) -> Tensor:
    """Pad x with zeros to multiples of `rows` and `columns`, which the hardware requires."""
    M, K = x_MK.shape
    right, bottom = -K % columns, -M % rows
    if not right and not bottom:
        return x_MK
    if x_MK.element_size() > 1:
        return F.pad(x_MK, (0, right, 0, bottom))
    # padding is not implemented for float8: move the bytes
    return F.pad(x_MK.view(torch.uint8), (0, right, 0, bottom)).view(x_MK.dtype)
