"""Define AdamW: decoupled weight decay (Loshchilov and Hutter, 2019), one step over lists of tensors.

    t  = t + 1
    g  = grad / grad_scale
    m  = m + (1 - beta1) (g - m)                 v = beta2 v + (1 - beta2) g g
    p  = p (1 - lr weight_decay) - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)

Everything is computed in float32 from the values as stored; p, m and v are then rounded once to their own dtypes,
which may differ. Where `found_inf` is 1 nothing changes, t included. torch's fused kernel computes the same where all
dtypes are equal.

A bfloat16 number moves to its neighbour only by an update of 1/512 of it or more; smaller ones vanish in rounding to
nearest. Rounded stochastically, a number moves with the probability that makes it right on average: 16 random bits are
added below the bits that are kept, and the rest is cut off.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .random import bits

_PIECE = 1 << 22  # elements that draw their bits together, a power of two


@torch.no_grad()
def adamw_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    keys: list[Tensor] | None = None,
) -> None:
    """Update params, exp_avgs, exp_avg_sqs and steps (0-d float32) in place; never read a value on the host.

    grad_scale: 0-d, the gradients are divided by it (None: 1). found_inf: 0-d, 1.0 masks the whole step (None: 0).
    keys: one for each parameter, int32 [2]; those in bfloat16 are rounded stochastically with it (None: to nearest).
    """
    for i, (p, grad, m, v, t) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True)):
        keep = torch.zeros((), dtype=torch.bool, device=p.device) if found_inf is None else found_inf.to(p.device) != 0
        t_new = t + 1
        g = grad.float() if grad_scale is None else grad.float() / grad_scale.to(p.device)
        m_new = m.float().lerp(g, 1 - beta1)
        v_new = beta2 * v.float() + (1 - beta2) * g * g
        size = lr / (1 - beta1**t_new)
        denominator = (v_new / (1 - beta2**t_new)).sqrt() + eps
        p_new = p.float() * (1 - lr * weight_decay) - size * m_new / denominator
        if keys is not None and p.dtype == torch.bfloat16:
            p_new = stochastic_bf16(p_new, keys[i])
        for old, new in ((p, p_new), (m, m_new), (v, v_new), (t, t_new)):
            old.copy_(torch.where(keep, old, new.to(old.dtype)))


def stochastic_bf16(x: Tensor, key: Tensor, start: int = 0) -> Tensor:
    """Return x, float32, as bfloat16: up or down in magnitude, so that the mean over keys is x.

    Position k in row-major order adds the upper half of the random bits of position start + k; `start` is a multiple of a
    power of two that is at least x.numel(), or of 2^22. NaN and infinity stay; what is finite stays finite.
    """
    flat = x.reshape(-1)
    rounded = torch.empty_like(flat, dtype=torch.bfloat16)
    limit = torch.finfo(torch.bfloat16).max
    for begin in range(0, flat.numel(), _PIECE):
        piece = flat[begin : begin + _PIECE]
        # positions and the piece's beginning have no bit in common, so the key can take the beginning on
        first = (start + begin + 2**31) % 2**32 - 2**31
        drawn = bits(piece.numel(), torch.stack((key[0] ^ first, key[1])))
        drawn.bitwise_right_shift_(16).bitwise_and_(0xFFFF)
        drawn.add_(piece.clamp(-limit, limit).view(torch.int32)).bitwise_and_(-0x10000)
        rounded[begin : begin + _PIECE] = torch.where(piece.isfinite(), drawn.view(torch.float32), piece)
    return rounded.view(x.shape)
