"""Normalize and rotate queries and keys between their projection and attention, in one pass each way.

Where one product made q, k and v they are parts of one tensor, and their gradients are written into one, so that nothing is
gathered for the product's own gradients. Backward keeps that tensor and one number a head for the norms; without norms it keeps
the rotation's tables alone, and v is copied out so that q and k before the rotation can go.

B batch, T tokens, H query heads, G key heads, D head width, E = D/2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from surokit.fusion import Fusion
from surokit.kernels import best
from surokit.kernels.reference import qk as reference
from surokit.nn.norm import RMSNorm
from surokit.nn.rope import apply_rope
from surokit.torch_private import is_hooked


def split_heads(
    parts: tuple[Tensor, ...],
    joint: Tensor | None,
    head_dim: int,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[RMSNorm, RMSNorm] | None,
    fusion: Fusion,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [B, T, H, D] and k [B, T, G, D], normalized where there are norms and rotated, and v [B, T, G, D].

    parts: the projections q [B, T, H D], k and v [B, T, G D]. joint: the one tensor [B, T, (H + 2 G) D] that they are views of,
    or None. cos and sin: [T, E] or [B, T, E].
    """
    q, k, v = (p.view(*p.shape[:-1], -1, head_dim) for p in parts)
    if not fusion.qk or (norms is not None and not _fuses(*norms)):
        if norms is not None:
            q, k = norms[0](q), norms[1](k)
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v
    wq, wk, eps = (norms[0].weight, norms[1].weight, norms[0].eps) if norms is not None else (None, None, 0.0)
    if joint is None:
        q, k = _Apart.apply(q, k, cos, sin, wq, wk, eps)
    else:
        q, k, v = _Joint.apply(joint, cos, sin, wq, wk, eps, q.shape[-2], head_dim)
    return q, k, v


def _fuses(q_norm: RMSNorm, k_norm: RMSNorm) -> bool:
    """Return whether both norms are what the kernel computes: ours, of one eps, and nobody's hook looks on."""
    ours = all(type(norm).forward is RMSNorm.forward and not is_hooked(norm) for norm in (q_norm, k_norm))
    return ours and q_norm.eps == k_norm.eps


class _Apart(torch.autograd.Function):
    """q and k from two tensors."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, wq: Tensor | None, wk: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        q_out, k_out, rq, rk = best(reference.forward, q.device)(q, k, cos, sin, wq, wk, eps)
        kept = (q, k, wq, wk, rq, rk) if wq is not None else ()
        ctx.save_for_backward(cos, sin, *kept)
        return q_out, k_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> Any:
        cos, sin, *kept = ctx.saved_tensors
        q, k, wq, wk, rq, rk = kept or (None,) * 6
        need_dw = any(ctx.needs_input_grad[4:6])
        backward = best(reference.backward, dq.device)
        dq, dk, dwq, dwk = backward(dq, dk, q, k, cos, sin, wq, wk, rq, rk, need_dw=need_dw)
        return dq, dk, None, None, dwq, dwk, None


class _Joint(torch.autograd.Function):
    """q, k and v from the one tensor that they are parts of, whose gradient is one tensor too."""

    @staticmethod
    def forward(
        ctx: Any,
        joint: Tensor,
        cos: Tensor,
        sin: Tensor,
        wq: Tensor | None,
        wk: Tensor | None,
        eps: float,
        heads: int,
        head_dim: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = _parts(joint, heads, head_dim)
        q_out, k_out, rq, rk = best(reference.forward, joint.device)(q, k, cos, sin, wq, wk, eps)
        if wq is None:
            v = v.contiguous()
            ctx.save_for_backward(cos, sin)
        else:
            ctx.save_for_backward(cos, sin, joint, wq, wk, rq, rk)
        ctx.heads, ctx.shape = heads, joint.shape
        return q_out, k_out, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> Any:
        cos, sin, *kept = ctx.saved_tensors
        joint, wq, wk, rq, rk = kept or (None,) * 5
        head_dim = dq.shape[-1]
        q, k, _ = (None, None, None) if joint is None else _parts(joint, ctx.heads, head_dim)
        gradient = dq.new_empty(ctx.shape)
        to_q, to_k, to_v = _parts(gradient, ctx.heads, head_dim)
        need_dw = any(ctx.needs_input_grad[3:5])
        backward = best(reference.backward, dq.device)
        _, _, dwq, dwk = backward(dq, dk, q, k, cos, sin, wq, wk, rq, rk, out=(to_q, to_k), need_dw=need_dw)
        to_v.copy_(dv)
        return gradient, None, None, dwq, dwk, None, None, None


def _parts(joint: Tensor, heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of q [B, T, H, D], k and v [B, T, G, D] in [B, T, (H + 2 G) D]."""
    every = joint.view(*joint.shape[:-1], -1, head_dim)
    groups = (every.shape[-2] - heads) // 2
    q, k, v = every.split((heads, groups, groups), dim=-2)
    return q, k, v
