"""Attention over torch's scaled_dot_product_attention, with a faster gradient where its own is slow: bfloat16 on a CPU.

B batch, H query heads, G key heads (H a multiple of G), T query tokens, S key tokens, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from surokit.kernels.reference import attention as reference


def attention(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    causal: bool = True,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """softmax(scale q k' + mask) v, [B, H, T, D]; scale is 1/sqrt(D) unless given, softmax in float32.

    `mask` is a boolean tensor that broadcasts to [B, H, T, S], True where a query sees a key; it replaces `causal`. Causal
    wants T = S. Query heads h*H/G.. share key head h.
    """
    scale = q_BHTD.shape[-1] ** -0.5 if scale is None else scale
    if causal and mask is None and q_BHTD.dtype == torch.bfloat16 and q_BHTD.device.type == "cpu":
        return _causal_cpu(q_BHTD, k_BGTD, v_BGTD, scale)
    grouped = q_BHTD.shape[1] != k_BGTD.shape[1]
    if grouped and q_BHTD.is_cuda and (mask is not None or q_BHTD.dtype == torch.float32):
        # no fused kernel takes both; without one, all scores would be held at once
        repeats = q_BHTD.shape[1] // k_BGTD.shape[1]
        k_BGTD, v_BGTD = k_BGTD.repeat_interleave(repeats, 1), v_BGTD.repeat_interleave(repeats, 1)
        grouped = False
    return F.scaled_dot_product_attention(
        q_BHTD, k_BGTD, v_BGTD, attn_mask=mask, is_causal=causal and mask is None, scale=scale, enable_gqa=grouped
    )


# Operators rather than an autograd.Function, so that torch.compile does not unroll the blocks of the gradient. Outputs lie
# in memory as [B, T, H, D], which is what the projections around them read.
@torch.library.custom_op("surokit::causal_attention_cpu", mutates_args=())
def _causal_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return y.transpose(1, 2).contiguous().transpose(1, 2)


@torch.library.custom_op("surokit::causal_attention_cpu_backward", mutates_args=())
def _causal_cpu_backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    return reference.causal_backward(dy, q, k, v, scale)


def _like(x_BHTD: Tensor) -> Tensor:
    B, H, T, D = x_BHTD.shape
    return x_BHTD.new_empty((B, T, H, D)).transpose(1, 2)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, ctx.scale = inputs
    ctx.save_for_backward(q, k, v)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    return *_causal_cpu_backward(dy, *ctx.saved_tensors, ctx.scale), None


_causal_cpu.register_fake(lambda q, k, v, scale: _like(q))
_causal_cpu_backward.register_fake(lambda dy, q, k, v, scale: (_like(q), _like(k), _like(v)))
_causal_cpu.register_autograd(_backward, setup_context=_keep)
