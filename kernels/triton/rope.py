"""Compute rotary position embedding, both halves of every head of a token in one program: cos and sin are read once a token.

Computed in float32 and rounded once. x may have any strides as long as a head's elements are adjacent: heads cut out of one
projection, or transposed, need no copy. B batch, T tokens, H heads, D head width, E = D/2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rows import unit_columns

ELEMENTS = 2048  # of each half in a program


def rotate(x_BTHD: Tensor, cos_TE: Tensor, sin_TE: Tensor, back: bool = False) -> Tensor:
    """Return y [B, T, H, D]; cos and sin are [T, E] or [B, T, E]. `back` turns by the opposite angle."""
    B, T, H, D = x_BTHD.shape
    E = D // 2
    x_BTHD, cos_TE, sin_TE = unit_columns(x_BTHD, cos_TE, sin_TE)
    if D % 2 or any(
        t.shape[-2:] != (T, E) or t.dim() > 3 or t.shape[:-2] not in ((), (1,), (B,)) for t in (cos_TE, sin_TE)
    ):
        raise ValueError(
            f"Heads of {D} elements at {T} positions need cos and sin of shape [{T}, D/2] (or [{B}, {T}, D/2]) with an "
            f"even D, not {list(cos_TE.shape)} and {list(sin_TE.shape)}."
        )
    cos_BTE, sin_BTE = cos_TE.expand(B, T, E), sin_TE.expand(B, T, E)
    y_BTHD = torch.empty_like(x_BTHD, memory_format=torch.contiguous_format)
    if y_BTHD.numel() == 0:
        return y_BTHD
    columns = triton.next_power_of_2(E)
    heads = min(triton.next_power_of_2(H), max(1, ELEMENTS // columns))
    rotate_heads[(B * T * triton.cdiv(H, heads),)](
        x_BTHD,
        cos_BTE,
        sin_BTE,
        y_BTHD,
        *x_BTHD.stride()[:3],
        *cos_BTE.stride()[:2],
        *sin_BTE.stride()[:2],
        T,
        H,
        E,
        SIGN=-1.0 if back else 1.0,
        HEADS=heads,
        COLUMNS=columns,
        num_warps=min(max(heads * columns // 256, 1), 8),
    )
    return y_BTHD


@triton.jit
def rotate_heads(
    x,
    cos,
    sin,
    y,
    x_B,  # strides
    x_T,
    x_H,
    cos_B,
    cos_T,
    sin_B,
    sin_T,
    T,
    H,
    E,
    SIGN: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    groups = tl.cdiv(H, HEADS)
    token = (tl.program_id(0) // groups).to(tl.int64)
    b, t = token // T, token % T
    heads = (tl.program_id(0) % groups) * HEADS + tl.arange(0, HEADS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    inside = (heads < H) & (columns < E)
    c = tl.load(cos + b * cos_B + t * cos_T + columns, mask=columns < E, other=0.0).to(tl.float32)
    s = tl.load(sin + b * sin_B + t * sin_T + columns, mask=columns < E, other=0.0).to(tl.float32) * SIGN
    first = x + b * x_B + t * x_T + heads * x_H + columns
    x1 = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(first + E, mask=inside, other=0.0).to(tl.float32)
    out = y + (token * H + heads) * (2 * E) + columns
    tl.store(out, x1 * c - x2 * s, mask=inside)
    tl.store(out + E, x2 * c + x1 * s, mask=inside)
