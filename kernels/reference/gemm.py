"""Products of quantized matrices: y_MN = a_MK @ b_NK', the emulation that defines what a tensor core computes.

Products of two float8 numbers have at most 8 significant bits, so bfloat16 factors with float32 accumulation give what a
float8 tensor core gives, up to the order of the sums. Scales that do not vary along K multiply the sum, not the factors.

Shapes: M x K and N x K matrices, both with the contracted dimension last; scales [M or 1, 1] and [N or 1, 1].
"""

from __future__ import annotations

import torch
from torch import Tensor

from .quantize import values


def scaled_mm(
    a_codes_MK: Tensor,
    a_scale_inv: Tensor,
    b_codes_NK: Tensor,
    b_scale_inv: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    pow2: bool = False,
) -> Tensor:
    """[M, N] = (a * a_scale_inv) @ (b * b_scale_inv)', scaled in float32 and rounded once to `out_dtype`.

    `pow2` promises that every scale is a power of two. They may then multiply the bfloat16 factors, which is exact within
    bfloat16's range and lets a CPU use its bfloat16 product.
    """
    a_MK, b_NK = values(a_codes_MK), values(b_codes_NK)
    if pow2 and out_dtype == torch.bfloat16:
        return (a_MK.mul_(a_scale_inv.to(a_MK.dtype))) @ (b_NK.mul_(b_scale_inv.to(b_NK.dtype))).t()
    scale = a_scale_inv * b_scale_inv.t()
    if a_MK.device.type == "cuda":
        return torch.mm(a_MK, b_NK.t(), out_dtype=torch.float32).mul_(scale).to(out_dtype)
    if scale.numel() == 1 and out_dtype == torch.bfloat16:
        # alpha meets the float32 sum before it is rounded; reading it costs nothing where there is no device to wait for
        zero = torch.zeros((), dtype=out_dtype)
        return torch.addmm(zero, a_MK, b_NK.t(), beta=0, alpha=scale.item())
    return (a_MK.float() @ b_NK.float().t()).mul_(scale).to(out_dtype)
