"""AdamW, the definition: decoupled weight decay (Loshchilov and Hutter, 2019), one step over lists of tensors.

    t  = t + 1
    g  = grad / grad_scale
    m  = m + (1 - beta1) (g - m)                 v = beta2 v + (1 - beta2) g g
    p  = p (1 - lr weight_decay) - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)

Everything is computed in float32 from the values as stored; p, m and v are then rounded once to their own dtypes,
which may differ. Where `found_inf` is 1 nothing changes, t included. torch's fused kernel computes the same where all
dtypes are equal.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
) -> None:
    """Updates params, exp_avgs, exp_avg_sqs and steps (0-d float32) in place; never reads a value on the host.

    grad_scale: 0-d, the gradients are divided by it (None: 1). found_inf: 0-d, 1.0 masks the whole step (None: 0).
    """
    for p, grad, m, v, t in zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True):
        keep = torch.zeros((), dtype=torch.bool, device=p.device) if found_inf is None else found_inf.to(p.device) != 0
        t_new = t + 1
        g = grad.float() if grad_scale is None else grad.float() / grad_scale.to(p.device)
        m_new = m.float().lerp(g, 1 - beta1)
        v_new = beta2 * v.float() + (1 - beta2) * g * g
        size = lr / (1 - beta1**t_new)
        denominator = (v_new / (1 - beta2**t_new)).sqrt() + eps
        p_new = p.float() * (1 - lr * weight_decay) - size * m_new / denominator
        for old, new in ((p, p_new), (m, m_new), (v, v_new), (t, t_new)):
            old.copy_(torch.where(keep, old, new.to(old.dtype)))
