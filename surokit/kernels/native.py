"""Products of quantized matrices that a device's tensor cores compute themselves, through torch.

    y_MN = (a * scales) @ (b * scales)'        both operands [rows, K], the contracted dimension last

A kind names the scaling of both operands: "tensor" and "row" (float8), "block" (float8 in 1 x 128 and 128 x 128 blocks),
"mx" (float8 with E8M0 scales) and "nv" (NVFP4). MXFP4 has no kind: torch has no product for it on NVIDIA devices.

The layouts of block scales are those of cuBLAS: for 1 x 128 blocks the scale's first dimension is contiguous, for MX and NV the
scales are swizzled in tiles of 128 rows x 4 columns. Sizes are padded to the hardware's multiples and cut afterwards.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Kind = Literal["tensor", "row", "block", "mx", "nv"]
KINDS: tuple[Kind, ...] = ("tensor", "row", "block", "mx", "nv")

_HARDWARE: dict[Kind, str] = {
    "tensor": "float8 tensor cores (compute capability 8.9 and up)",
    "row": "float8 tensor cores (compute capability 8.9 and up)",
    "block": "float8 block scales (compute capability 9.0, CUDA 12.9)",
    "mx": "Microscaling tensor cores (compute capability 10.0 and up)",
    "nv": "NVFP4 tensor cores (compute capability 10.0 and up)",
}


@cache
def available(kind: Kind, device: torch.device) -> bool:
    """Whether `device` multiplies this kind itself."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    capability = torch.cuda.get_device_capability(device)
    if kind in ("mx", "nv"):
        return capability >= (10, 0) and hasattr(F, "scaled_mm")
    if kind == "block":
        return capability == (9, 0) and _cuda_version() >= (12, 9) and hasattr(F, "scaled_mm")
    return capability >= (8, 9)


def choice(kind: Kind, device: torch.device) -> tuple[str, str]:
    """Backend and reason for products of this kind."""
    if available(kind, device):
        return "torch", _HARDWARE[kind]
    return "emulated", f"{device.type} here has no {_HARDWARE[kind]}: the same numbers from bfloat16 products"


def _cuda_version() -> tuple[int, ...]:
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
    """y_MN = a_MK @ b_NK' for float8 codes whose scales do not vary along K ([1, 1], or [M, 1] with [N, 1])."""
    M, N = a_codes_MK.shape[0], b_codes_NK.shape[0]
    a_codes_MK = _pad(a_codes_MK).contiguous()
    b_codes_NK = _pad(b_codes_NK, rows=16).contiguous()
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
        b_scale = F.pad(b_scales.expand(N, 1), (0, 0, 0, b_codes_NK.shape[0] - N), value=1.0).t().contiguous()
    y_MN = torch._scaled_mm(
        a_codes_MK, b_codes_NK.t(), a_scale, b_scale, out_dtype=out_dtype, use_fast_accum=fast_accumulation
    )
    return y_MN[:, :N]


def _pad(codes: Tensor, columns: int = 16, rows: int = 1) -> Tensor:
    """Zeros up to multiples along K, and along the rows where they become columns: the hardware's condition."""
    M, K = codes.shape
    right, bottom = -K % columns, -M % rows
    if not right and not bottom:
        return codes
    # padding is not implemented for float8: move the bytes
    return F.pad(codes.view(torch.uint8), (0, right, 0, bottom)).view(codes.dtype)
