"""Define products of quantized matrices, y_MN = a_MK @ b_NK': the emulation of what a tensor core computes.

Products of two float8 numbers have at most 8 significant bits, and an E2M1 code times its E4M3 block scale at most 6: bfloat16
factors with float32 accumulation give what a tensor core for the format gives, up to the order of the sums. Scales that vary
along K multiply the factors, which is exact where they are E4M3 or powers of two; the others multiply the sum.

Shapes: M x K and N x K matrices, both with the contracted dimension last; scales [M or 1, 1] and [N or 1, 1].
"""

from __future__ import annotations

import torch
from torch import Tensor

from surokit.formats import NF4, Codebook

from . import nf4, nvfp4
from .matmul import addmm_, mm
from .quantize import decode


def scaled_mm(
    a_MK: Tensor,
    a_scale: Tensor,
    b_NK: Tensor,
    b_scale: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    pow2: bool = False,
) -> Tensor:
    """Return [M, N] = (a * a_scale) @ (b * b_scale)', scaled in float32 and rounded once to `out_dtype`.

    a_MK, b_NK: bfloat16, the values of codes or codes times scales that vary along K. `pow2` promises that a_scale and
    b_scale are powers of two. They may then multiply the bfloat16 factors, which is exact within bfloat16's range and lets a
    CPU use its bfloat16 product.
    """
    if pow2 and out_dtype == torch.bfloat16 and a_scale.numel() * b_scale.numel() > 1:
        return mm(a_MK * a_scale.to(a_MK.dtype), (b_NK * b_scale.to(b_NK.dtype)).t())
    scale = a_scale * b_scale.t()
    if a_MK.device.type == "cuda" and a_MK.dtype == b_NK.dtype:
        return torch.mm(a_MK, b_NK.t(), out_dtype=torch.float32).mul_(scale).to(out_dtype)
    if scale.numel() == 1 and out_dtype == torch.bfloat16:
        # alpha meets the float32 sum before it is rounded; reading it costs nothing where there is no device to wait for
        y_MN = a_MK.new_empty((len(a_MK), len(b_NK)))
        return addmm_(y_MN, a_MK, b_NK.t(), beta=0.0, alpha=scale.item())
    return (a_MK.float() @ b_NK.float().t()).mul_(scale).to(out_dtype)


def dequantize_mm_nvfp4(
    x_TC: Tensor, packed: Tensor, scales: Tensor, scale: Tensor, rows: int, transposed: bool = False, columns: int = 0
) -> Tensor:
    """Return x_TK @ W_NK' for a frozen weight, or `transposed` x_TN @ W_NK, where `columns` says K if that is odd."""
    K = (columns or 2 * packed.shape[1]) if transposed else x_TC.shape[1]
    w_NK = nvfp4.factors(packed, scales, rows, K)
    return scaled_mm(x_TC, torch.ones_like(scale), w_NK.t() if transposed else w_NK, scale, x_TC.dtype)


def dequantize_mm_nf4(
    x_TC: Tensor,
    codes: Tensor,
    scales: Tensor,
    second: tuple[Tensor, ...],
    shape: tuple[int, int],
    transposed: bool = False,
    format: Codebook = NF4,
) -> Tensor:
    """Return x_TK @ W_NK' for a frozen weight of `shape` (N, K), or `transposed` x_TN @ W_NK."""
    w_NK = nf4.dequantize(codes, scales, second, shape, x_TC.dtype, format)
    return mm(x_TC, w_NK if transposed else w_NK.t())


def dequantize_mm_fp8(
    x_TC: Tensor, codes_NK: Tensor, scale_inv: Tensor, rows: int = 0, columns: int = 0, transposed: bool = False
) -> Tensor:
    """Return x_TK @ W_NK' for a frozen weight in float8, or `transposed` x_TN @ W_NK."""
    w_NK = decode(codes_NK, scale_inv, rows, columns, x_TC.dtype)
    return mm(x_TC, w_NK if transposed else w_NK.t())
