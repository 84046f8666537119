"""Define the randomised Hadamard transform: it spreads an outlier over its block, so that a coarse format loses less.

    y = x diag(s) H / sqrt(b)          x = y H diag(s) / sqrt(b)          for each block of b elements of a row

H is Sylvester's matrix of order b (+-1, symmetric, H H = b) and s fixed signs. The matrix is orthogonal, so a product along the
rotated dimension does not change when both operands are rotated. K is filled up with zeros to whole blocks.

The sums are formed in float32 (float64 for float64) and rounded once. Where 1 / sqrt(b) is no power of two, the part that is
none comes last, so that the matrix' entries are exact in every dtype.

Shapes: M rows, K columns. Source of the signs: NVIDIA TransformerEngine's NVFP4 recipe (16 of them; for 32 they repeat).
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def rotate(x_MK: Tensor, block: int, back: bool = False) -> Tensor:
    """Return [M, ceil(K/block) * block] in x's dtype. `back` undoes the rotation, up to its rounding. block: a power of two from
    16."""
    if x_MK.shape[1] % block:
        x_MK = torch.nn.functional.pad(x_MK, (0, -x_MK.shape[1] % block))
    dtype = torch.promote_types(x_MK.dtype, torch.float32)
    H = matrix(block, dtype, x_MK.device)
    y = x_MK.reshape(-1, block).to(dtype) @ (H.t() if back else H)
    y *= _power_of_two(block) / math.sqrt(block)
    y += 0.0  # a sum of zeros is +0 in whichever order it is formed
    return y.to(x_MK.dtype).view(x_MK.shape)


@cache
def matrix(block: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return diag(s) H, divided by the power of two next to sqrt(block)."""
    with torch.inference_mode(False):
        H = torch.ones(1, 1, dtype=dtype)
        while len(H) < block:
            H = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=dtype), H)
        signs = torch.tensor(SIGNS * (block // len(SIGNS)), dtype=dtype)
        return (signs[:, None] * H / _power_of_two(block)).to(device)


def _power_of_two(block: int) -> float:
    return 2.0 ** (block.bit_length() // 2)
