"""Define rotary position embedding (Su et al., 2021) in the half-split layout of Llama: element i turns with element i + D/2.

    y1 = x1 cos - x2 sin          y2 = x2 cos + x1 sin

The gradient is the same rotation by the opposite angle. B batch, T tokens, H heads, D head width, E = D/2.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x_BTHD: Tensor, cos_TE: Tensor, sin_TE: Tensor, back: bool = False) -> Tensor:
    """Return y [B, T, H, D]; cos and sin are [T, E] or [B, T, E]. `back` turns by the opposite angle."""
    x1, x2 = x_BTHD.chunk(2, dim=-1)
    cos, sin = cos_TE.unsqueeze(-2), sin_TE.unsqueeze(-2)
    y_BTHD = torch.empty_like(x_BTHD, memory_format=torch.contiguous_format)
    y1, y2 = y_BTHD.chunk(2, dim=-1)
    sign = 1 if back else -1
    torch.mul(x1, cos, out=y1).addcmul_(x2, sin, value=sign)
    torch.mul(x2, cos, out=y2).addcmul_(x1, sin, value=-sign)
    return y_BTHD
