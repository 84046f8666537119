"""Make queries and keys ready for attention in one pass each way; the definition stands in kernels/reference/qk.py.

A program takes whole tokens: all query heads, then all key heads, so that cos and sin are read once a token. Heads may lie anywhere
as long as the elements of one are adjacent: parts of a joint projection are read, and parts of its gradient written, in place.

Everything is computed in float32 and rounded where the two steps round, so only the order of sums can tell them apart. The
gradients of the two weights are summed in two stages, a few programs a multiprocessor first, so they are the same in every run.

B batch, T tokens, H query heads, G key heads, D head width, E = D/2, P programs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rows import unit_columns

ELEMENTS = 2048  # of each half of the heads that a program holds at once
ELEMENTS_BACK = 1024  # in backward, which holds three times as much
PROGRAMS_PER_MULTIPROCESSOR = 4  # of the pass that sums the weights' gradients


def forward(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    cos_TE: Tensor,
    sin_TE: Tensor,
    wq_D: Tensor | None = None,
    wk_D: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return q [B, T, H, D] and k [B, T, G, D], and for backward 1 / rms of each head, [B, T, H] and [B, T, G], None without a
    weight.

    cos and sin are [T, E] or [B, T, E].
    """
    q, k = unit_columns(q_BTHD, k_BTGD)
    tables, launch = _checked(q, k, cos_TE, sin_TE, wq_D, wk_D, ELEMENTS)
    made = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k)]
    rq, rk = (None if w is None else x.new_empty(x.shape[:-1], dtype=torch.float32) for x, w in ((q, wq_D), (k, wk_D)))
    if tokens := q.shape[0] * q.shape[1]:
        forward_tokens[(tokens,)](
            q, *q.stride()[:3], k, *k.stride()[:3], *made, _unit(wq_D), _unit(wk_D), rq, rk, *tables, eps, **launch
        )
    return made[0], made[1], rq, rk


def backward(
    dq_BTHD: Tensor,
    dk_BTGD: Tensor,
    q_BTHD: Tensor | None,
    k_BTGD: Tensor | None,
    cos_TE: Tensor,
    sin_TE: Tensor,
    wq_D: Tensor | None = None,
    wk_D: Tensor | None = None,
    rq_BTH: Tensor | None = None,
    rk_BTG: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    need_dw: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of q_in, k_in and of the two weights, those None without a weight or unless `need_dw`.

    q, k: what forward was given; needed, with its rq and rk, where there is a weight. out: where to write the first two, of any
    strides as long as the elements of a head are adjacent, in the dtypes of dq and dk (None: new ones).
    """
    dq, dk = unit_columns(dq_BTHD, dk_BTGD)
    tables, launch = _checked(dq, dk, cos_TE, sin_TE, wq_D, wk_D, ELEMENTS_BACK)
    q, rq = _kept(dq, q_BTHD, wq_D, rq_BTH)
    k, rk = _kept(dk, k_BTGD, wk_D, rk_BTG)
    dq_in, dk_in = out or [torch.empty_like(dy, memory_format=torch.contiguous_format) for dy in (dq, dk)]
    for dx, dy in ((dq_in, dq), (dk_in, dk)):
        if dx.shape != dy.shape or dx.dtype != dy.dtype or dx.stride(-1) != 1:
            raise ValueError(
                f"`out` takes gradients of {dy.dtype} {list(dy.shape)} with adjacent elements of a head, "
                f"not {dx.dtype} {list(dx.shape)} with strides {list(dx.stride())}."
            )
    tokens, D = dq.shape[0] * dq.shape[1], dq.shape[3]
    programs, parts_P2D = tokens, None
    if need_dw and not (wq_D is None and wk_D is None):
        programs = min(tokens, PROGRAMS_PER_MULTIPROCESSOR * _multiprocessors(dq.device))
        parts_P2D = dq.new_empty((programs, 2, D), dtype=torch.float32)
    if tokens:
        backward_tokens[(programs,)](
            dq, *dq.stride()[:3], dk, *dk.stride()[:3], q, *_strides(q), k, *_strides(k),
            dq_in, *dq_in.stride()[:3], dk_in, *dk_in.stride()[:3],
            _unit(wq_D), _unit(wk_D), rq, rk, *tables, parts_P2D, tokens, **launch,
        )  # fmt: skip
    sums = (None, None) if parts_P2D is None else parts_P2D.sum(0)
    dwq, dwk = (None if w is None or dw is None else dw.to(w.dtype) for dw, w in zip(sums, (wq_D, wk_D)))
    return dq_in, dk_in, dwq, dwk


def _checked(
    q: Tensor, k: Tensor, cos_TE: Tensor, sin_TE: Tensor, wq_D: Tensor | None, wk_D: Tensor | None, elements: int
) -> tuple[tuple[Any, ...], dict[str, int]]:
    """Return cos, sin and their strides; sizes, tiles and warps of a launch that holds `elements` of each half at once."""
    B, T, H, D = q.shape
    G, E = k.shape[2], D // 2
    if k.shape != (B, T, G, D):
        raise ValueError(
            f"Queries and keys differ in their number of heads only, not {list(q.shape)} and {list(k.shape)}."
        )
    if any(w is not None and w.shape != (D,) for w in (wq_D, wk_D)):
        raise ValueError(f"Heads of {D} elements need weights of shape [{D}].")
    cos_TE, sin_TE = unit_columns(cos_TE, sin_TE)
    if D % 2 or any(
        t.shape[-2:] != (T, E) or t.dim() > 3 or t.shape[:-2] not in ((), (1,), (B,)) for t in (cos_TE, sin_TE)
    ):
        raise ValueError(
            f"Heads of {D} elements at {T} positions need cos and sin of shape [{T}, D/2] (or [{B}, {T}, D/2]) with an "
            f"even D, not {list(cos_TE.shape)} and {list(sin_TE.shape)}."
        )
    cos_BTE, sin_BTE = cos_TE.expand(B, T, E), sin_TE.expand(B, T, E)
    columns = triton.next_power_of_2(E)
    heads_q, heads_k = (min(triton.next_power_of_2(n), max(1, elements // columns)) for n in (H, G))
    launch = {"T": T, "H": H, "G": G, "E": E, "HEADS_Q": heads_q, "HEADS_K": heads_k, "COLUMNS": columns}
    launch["num_warps"] = min(max(heads_q * columns // 256, 1), 4)
    return (cos_BTE, *cos_BTE.stride()[:2], sin_BTE, *sin_BTE.stride()[:2]), launch


def _kept(dy: Tensor, x: Tensor | None, w: Tensor | None, r: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the input of a norm and its 1 / rms, None where there is no norm."""
    if w is None:
        return None, None
    if x is None or r is None:
        raise ValueError("The gradient of a norm needs its input and its 1 / rms: pass q, k, rq and rk of forward.")
    if x.shape != dy.shape or r.shape != dy.shape[:-1]:
        raise ValueError(
            f"A gradient of shape {list(dy.shape)} needs an input of that shape and a 1 / rms a head, "
            f"not {list(x.shape)} and {list(r.shape)}."
        )
    return unit_columns(x)[0], r.contiguous()


def _unit(w: Tensor | None) -> Tensor | None:
    return None if w is None else unit_columns(w)[0]


def _strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else x.stride()[:3]


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def turn(x1, x2, c, s):
    """Rotate both halves by the angle of cos c and sin s, rounded as rope.py is when a compiler fuses its multiply-adds."""
    return tl.fma(x1, c, -(x2 * s)), tl.fma(x1, s, x2 * c)


@triton.jit
def forward_heads(x, x_H, y, w, r, at_r, c, s, N, E, eps, HEADS: tl.constexpr, COLUMNS: tl.constexpr):
    """Normalize and rotate the N heads of one token from x to y, and store r from `at_r` on; w and r None: no norm."""
    columns = tl.arange(0, COLUMNS)[None, :]
    for first in range(0, N, HEADS):
        head = first + tl.arange(0, HEADS)
        heads = head[:, None].to(tl.int64)
        inside = (heads < N) & (columns < E)
        at_x = x + heads * x_H + columns
        x1 = tl.load(at_x, mask=inside, other=0.0).to(tl.float32)
        x2 = tl.load(at_x + E, mask=inside, other=0.0).to(tl.float32)
        if w is not None:
            w1 = tl.load(w + columns, mask=columns < E, other=0.0).to(tl.float32)
            w2 = tl.load(w + E + columns, mask=columns < E, other=0.0).to(tl.float32)
            mean_square = tl.sum(x1 * x1 + x2 * x2, axis=1) / (2 * E)
            r_head = tl.div_rn(tl.full(mean_square.shape, 1.0, tl.float32), tl.sqrt_rn(mean_square + eps))
            tl.store(r + at_r + head, r_head, mask=head < N)
            x1 = (x1 * r_head[:, None] * w1).to(x.dtype.element_ty).to(tl.float32)
            x2 = (x2 * r_head[:, None] * w2).to(x.dtype.element_ty).to(tl.float32)
        y1, y2 = turn(x1, x2, c, s)
        at_y = y + heads * (2 * E) + columns
        tl.store(at_y, y1, mask=inside)
        tl.store(at_y + E, y2, mask=inside)


@triton.jit
def forward_tokens(
    q, q_B, q_T, q_H, k, k_B, k_T, k_H, q_out, k_out, wq, wk, rq, rk, cos, cos_B, cos_T, sin, sin_B, sin_T, eps,
    T, H, G, E, HEADS_Q: tl.constexpr, HEADS_K: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    b, t = token // T, token % T
    columns = tl.arange(0, COLUMNS)[None, :]
    c = tl.load(cos + b * cos_B + t * cos_T + columns, mask=columns < E, other=0.0).to(tl.float32)
    s = tl.load(sin + b * sin_B + t * sin_T + columns, mask=columns < E, other=0.0).to(tl.float32)
    at_q, at_k = token * H, token * G
    forward_heads(q + b * q_B + t * q_T, q_H, q_out + at_q * (2 * E), wq, rq, at_q, c, s, H, E, eps, HEADS_Q, COLUMNS)
    forward_heads(k + b * k_B + t * k_T, k_H, k_out + at_k * (2 * E), wk, rk, at_k, c, s, G, E, eps, HEADS_K, COLUMNS)


@triton.jit
def backward_heads(
    dy, dy_H, x, at_x, x_H, dx, dx_H, w, r, at_r, c, s, dw1, dw2, N, E, HEADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store the gradient of the N heads of one token in dx; return the sums dw1 and dw2 [HEADS, COLUMNS] with these heads added.

    x is read from `at_x` on and r from `at_r` on; both are None where there is no norm.
    """
    columns = tl.arange(0, COLUMNS)[None, :]
    for first in range(0, N, HEADS):
        head = first + tl.arange(0, HEADS)
        heads = head[:, None].to(tl.int64)
        inside = (heads < N) & (columns < E)
        at_dy = dy + heads * dy_H + columns
        dy1 = tl.load(at_dy, mask=inside, other=0.0).to(tl.float32)
        dy2 = tl.load(at_dy + E, mask=inside, other=0.0).to(tl.float32)
        g1, g2 = turn(dy1, dy2, c, s)
        if w is not None:
            g1 = g1.to(dy.dtype.element_ty).to(tl.float32)
            g2 = g2.to(dy.dtype.element_ty).to(tl.float32)
            x_heads = x + at_x + heads * x_H + columns
            r_head = tl.load(r + at_r + head, mask=head < N, other=0.0)[:, None]
            h1 = tl.load(x_heads, mask=inside, other=0.0).to(tl.float32) * r_head
            h2 = tl.load(x_heads + E, mask=inside, other=0.0).to(tl.float32) * r_head
            dw1 += g1 * h1
            dw2 += g2 * h2
            g1 *= tl.load(w + columns, mask=columns < E, other=0.0).to(tl.float32)
            g2 *= tl.load(w + E + columns, mask=columns < E, other=0.0).to(tl.float32)
            mean_gh = (tl.sum(g1 * h1 + g2 * h2, axis=1) / (2 * E))[:, None]
            g1 = (g1 - h1 * mean_gh) * r_head
            g2 = (g2 - h2 * mean_gh) * r_head
        at_dx = dx + heads * dx_H + columns
        tl.store(at_dx, g1, mask=inside)
        tl.store(at_dx + E, g2, mask=inside)
    return dw1, dw2


@triton.jit
def store_sums(parts, dw1, dw2, E, COLUMNS: tl.constexpr):
    columns = tl.arange(0, COLUMNS)
    tl.store(parts + columns, tl.sum(dw1, axis=0), mask=columns < E)
    tl.store(parts + E + columns, tl.sum(dw2, axis=0), mask=columns < E)


@triton.jit
def backward_tokens(
    dq, dq_B, dq_T, dq_H, dk, dk_B, dk_T, dk_H, q, q_B, q_T, q_H, k, k_B, k_T, k_H,
    dq_in, dq_in_B, dq_in_T, dq_in_H, dk_in, dk_in_B, dk_in_T, dk_in_H,
    wq, wk, rq, rk, cos, cos_B, cos_T, sin, sin_B, sin_T, parts, tokens,
    T, H, G, E, HEADS_Q: tl.constexpr, HEADS_K: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, COLUMNS)[None, :]
    dwq1 = tl.zeros((HEADS_Q, COLUMNS), tl.float32)
    dwq2 = tl.zeros((HEADS_Q, COLUMNS), tl.float32)
    dwk1 = tl.zeros((HEADS_K, COLUMNS), tl.float32)
    dwk2 = tl.zeros((HEADS_K, COLUMNS), tl.float32)
    for number in range(tl.program_id(0), tokens, tl.num_programs(0)):
        token = tl.cast(number, tl.int64)
        b, t = token // T, token % T
        c = tl.load(cos + b * cos_B + t * cos_T + columns, mask=columns < E, other=0.0).to(tl.float32)
        # back is the same rotation with the opposite sine
        s = -tl.load(sin + b * sin_B + t * sin_T + columns, mask=columns < E, other=0.0).to(tl.float32)
        dwq1, dwq2 = backward_heads(
            dq + b * dq_B + t * dq_T, dq_H, q, b * q_B + t * q_T, q_H, dq_in + b * dq_in_B + t * dq_in_T, dq_in_H,
            wq, rq, token * H, c, s, dwq1, dwq2, H, E, HEADS_Q, COLUMNS,
        )  # fmt: skip
        dwk1, dwk2 = backward_heads(
            dk + b * dk_B + t * dk_T, dk_H, k, b * k_B + t * k_T, k_H, dk_in + b * dk_in_B + t * dk_in_T, dk_in_H,
            wk, rk, token * G, c, s, dwk1, dwk2, G, E, HEADS_K, COLUMNS,
        )  # fmt: skip
    if parts is not None:
        parts += tl.program_id(0) * (4 * E)
        store_sums(parts, dwq1, dwq2, E, COLUMNS)
        store_sums(parts + 2 * E, dwk1, dwk2, E, COLUMNS)
