"""Compute AdamW in one pass over a parameter, its gradient and its moments; the formula stands in kernels/reference/adamw.py.

What depends on the step only (the size of a step, the correction of v, the decay) is computed on the device once for all tensors,
in float64; a kernel a tensor does the rest. Nothing is read on the host, and a masked step writes nothing. Parameters in bfloat16
can be rounded stochastically, with the reference's draws.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from surokit.torch_private import foreach_add_

from .random import random_bits
from .rows import check_dtypes, same_shape

BLOCK = 2048


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
    All tensors are on one device; those of a parameter may have any dtypes of float32, bfloat16 and float16.
    """
    tensors = list(zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True))
    for group in tensors:
        same_shape(*group[:4])
        check_dtypes(*group[:4])
    if not tensors:
        return
    factors_N4, scale, masked = begin_step(steps, lr, beta1, beta2, weight_decay, grad_scale, found_inf)
    for i, (p, grad, m, v, _) in enumerate(tensors):
        if p.numel() == 0:
            continue
        dense = [x.contiguous() for x in (p, m, v)]
        update[(triton.cdiv(p.numel(), BLOCK),)](
            *dense,
            grad.contiguous(),
            factors_N4[i],
            scale,
            masked,
            keys[i] if keys is not None and p.dtype == torch.bfloat16 else None,
            p.numel(),
            1 - beta1,
            beta2,
            1 - beta2,
            eps,
            BLOCK=BLOCK,
            num_warps=4,
        )
        for x, copy in zip((p, m, v), dense):
            if copy is not x:
                x.copy_(copy)


def begin_step(
    steps: list[Tensor],
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Count the step, unless it is masked. Return, all float32 on the device:

    [N, 4] lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t), 1 - lr weight_decay and t for every tensor (t only fills 16 bytes, so that all
    rows are aligned alike and one compiled kernel serves them); the gradients' scale; the mask.
    """
    one = torch.ones((), device=steps[0].device)
    masked = torch.zeros_like(one) if found_inf is None else found_inf.to(one.device, torch.float32)
    scale = one if grad_scale is None else grad_scale.to(one.device, torch.float32)
    foreach_add_(steps, [(masked == 0).float()] * len(steps))  # one tensor for all would be read on some devices
    t_N = torch.stack(steps).double()
    # 1 - beta^t loses its digits at the first steps; expm1 does not
    correction1, correction2 = (-torch.expm1(t_N * (math.log(beta) if beta else -math.inf)) for beta in (beta1, beta2))
    lr_N = torch.zeros_like(t_N) + lr
    factors_N4 = torch.stack((lr_N / correction1, correction2.rsqrt(), 1 - lr_N * weight_decay, t_N), 1).float()
    return factors_N4, scale, masked


@triton.jit
def rounded_bf16(x, index, key):
    """Round float32 x to bfloat16 stochastically: add 16 random bits below the bits that are kept, then cut the rest off."""
    drawn = (random_bits(index, tl.load(key), tl.load(key + 1)) >> 16).to(tl.int32)
    finite = tl.clamp(x, -3.3895313892515355e38, 3.3895313892515355e38).to(tl.int32, bitcast=True)
    rounded = ((finite + drawn) & -0x10000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < float("inf"), rounded, x)  # NaN and inf stay


@triton.jit
def moved(p, m, v, index, factors, key, eps):
    """Return the parameter after a step with the moments m and v."""
    size, root, decay = tl.load(factors), tl.load(factors + 1), tl.load(factors + 2)
    p = p * decay - size * m / (tl.sqrt_rn(v) * root + eps)
    if key is not None:
        p = rounded_bf16(p, index, key)
    return p


@triton.jit
def update(
    p,
    m,
    v,
    grad,
    factors,
    grad_scale,
    masked,
    key,
    n,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    BLOCK: tl.constexpr,
):
    if tl.load(masked) == 0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) / tl.load(grad_scale)
        m_old = tl.load(m + at, mask=inside, other=0.0).to(tl.float32)
        v_old = tl.load(v + at, mask=inside, other=0.0).to(tl.float32)
        p_old = tl.load(p + at, mask=inside, other=0.0).to(tl.float32)
        m_new = m_old + one_minus_beta1 * (g - m_old)
        v_new = beta2 * v_old + one_minus_beta2 * g * g
        tl.store(p + at, moved(p_old, m_new, v_new, at, factors, key, eps), mask=inside)
        tl.store(m + at, m_new, mask=inside)
        tl.store(v + at, v_new, mask=inside)
