"""Define the randomised Hadamard transform: it spreads an outlier over its block, so that a coarse format loses less.

    y = x diag(s) H / sqrt(b)          x = y H diag(s) / sqrt(b)          for each block of b elements of a row

H is Sylvester's matrix of order b (+-1, symmetric, H H = b) and s signs, fixed or drawn. The matrix is orthogonal, so a product
along the rotated dimension does not change when both operands are rotated by the same signs. K is filled up with zeros to whole
blocks.

The sums are formed in float32 (float64 for float64) and rounded once. Where 1 / sqrt(b) is no power of two, the part that is
none comes last, so that the matrix' entries are exact in every dtype.

Shapes: M rows, K columns. Source of the fixed signs: NVIDIA TransformerEngine's NVFP4 recipe (16 of them; for 32 they repeat).
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from .random import bits

SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def rotate(x_MK: Tensor, block: int, back: bool = False) -> Tensor:
    """Return [M, ceil(K/block) * block] in x's dtype. `back` undoes the rotation, up to its rounding. block: a power of two from
    16."""
    x_MK = _filled_up(x_MK, block)
    dtype = torch.promote_types(x_MK.dtype, torch.float32)
    H = matrix(block, dtype, x_MK.device)
    y = _multiplied(x_MK.reshape(-1, block).to(dtype), H.t() if back else H)
    return y.to(x_MK.dtype).view(x_MK.shape)


def rotate_drawn(x_MK: Tensor, block: int, key: Tensor, back: bool = False) -> Tensor:
    """Return `rotate` with signs drawn from `key`, int32 [2], in place of the fixed ones. block: a power of two."""
    x_MK = _filled_up(x_MK, block)
    dtype = torch.promote_types(x_MK.dtype, torch.float32)
    H, signs = _sylvester(block, dtype, x_MK.device), drawn_signs(block, key).to(dtype)
    x = x_MK.reshape(-1, block).to(dtype)
    y = _multiplied(x, H) * signs if back else _multiplied(x * signs, H)
    return y.to(x_MK.dtype).view(x_MK.shape)


def drawn_signs(block: int, key: Tensor) -> Tensor:
    """Return int32 [block] of 1 and -1: the highest bit of the draw at each position, -1 where it is set."""
    return bits(block, key).bitwise_right_shift_(31).bitwise_or_(1)


@cache
def matrix(block: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return diag(s) H, divided by the power of two next to sqrt(block)."""
    with torch.inference_mode(False):
        signs = torch.tensor(SIGNS * (block // len(SIGNS)), dtype=dtype, device=device)
        return signs[:, None] * _sylvester(block, dtype, device)


@cache
def _sylvester(block: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return H, divided by the power of two next to sqrt(block)."""
    with torch.inference_mode(False):
        H = torch.ones(1, 1, dtype=dtype)
        while len(H) < block:
            H = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=dtype), H)
        return (H / _power_of_two(block)).to(device)


def _filled_up(x_MK: Tensor, block: int) -> Tensor:
    return torch.nn.functional.pad(x_MK, (0, -x_MK.shape[1] % block)) if x_MK.shape[1] % block else x_MK


def _multiplied(x: Tensor, H: Tensor) -> Tensor:
    """Return x H / sqrt(b), H being divided by the power of two next to it already."""
    y = x @ H
    y *= _power_of_two(len(H)) / math.sqrt(len(H))
    y += 0.0  # a sum of zeros is +0 in whichever order it is formed
    return y


def _power_of_two(block: int) -> float:
    return 2.0 ** (block.bit_length() // 2)
