"""Define AdamW with moments of eight bits (Dettmers et al., 2022, arXiv 2110.02861, as bitsandbytes has it).

A moment is kept as one code a number, and the largest magnitude of each block of 256 in float32:

    encode   r = x (1 / absmax);   code = how many midpoints between neighbours in the map lie below r
    decode   x = map[code] absmax

so a tie takes the lower code. Blocks run through the elements in row-major order; the last one may be short. The map is
dynamic: it divides each decade from 1e-6 to 1 evenly, the decade [10^-(e+1), 10^-e] in 2^(6 - e) parts for each sign, or
in 2^(7 - e) where there is none, and takes their middles; 0 and 1 are added. One step, all in float32:

    m  = beta1 decode(m) + (1 - beta1) g          v = beta2 decode(v) + (1 - beta2) g g          g = grad / grad_scale
    p  = p (1 - lr weight_decay) - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)

with m and v as they are before they are encoded again. exp_avg takes the signed map, exp_avg_sq the unsigned one.
Everything else is as in adamw.py. A NaN makes its whole block NaN.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from .adamw import stochastic_bf16
from .dynamic8bit import numbers

BLOCK = 256
_MIN_ABSMAX = 2.0**-126  # the smallest normal number: below it the inverse would overflow
# elements at a time, powers of two: what a CPU's cache holds, and what a GPU needs
_CHUNK_CPU, _CHUNK = 1 << 16, 1 << 24


@cache
def dynamic_map(signed: bool, device: torch.device) -> Tensor:
    """Return the 256 values of the codes, ascending, float32."""
    return torch.tensor(numbers(signed), dtype=torch.float32, device=device)


@cache
def midpoints(signed: bool, device: torch.device) -> Tensor:
    """Return the 255 borders between codes, float32: code c is nearest from border c - 1, exclusive, to border c, inclusive."""
    values = dynamic_map(signed, device)
    return (values[:-1] + values[1:]) / 2


def quantize(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Return codes, uint8 of x's shape, and absmax, float32 [ceil(n / 256)]."""
    flat = x.reshape(-1).float()
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    absmax = blocks.abs().amax(1)
    ratios = blocks * absmax.clamp_min(_MIN_ABSMAX).reciprocal()[:, None]
    # torch.bucketize counts the borders that are not >= r, so a NaN gets code 255
    codes = torch.bucketize(ratios, midpoints(signed, x.device), out_int32=True).to(torch.uint8)
    return codes.view(-1)[: flat.numel()].view(x.shape), absmax


def dequantize(codes: Tensor, absmax: Tensor, signed: bool) -> Tensor:
    """Return float32 numbers of the codes' shape."""
    flat = torch.index_select(dynamic_map(signed, codes.device), 0, codes.reshape(-1).int())
    full = flat.numel() // BLOCK
    flat[: full * BLOCK].view(full, BLOCK).mul_(absmax[:full, None])
    flat[full * BLOCK :].mul_(absmax[full:])  # the short block's one absmax, or nothing times nothing
    return flat.view(codes.shape)


@torch.no_grad()
def adamw8bit_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    absmaxes: list[Tensor],
    absmax_sqs: list[Tensor],
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
    """Update all lists but grads in place; never read a value on the host.

    exp_avgs, exp_avg_sqs: codes, contiguous uint8 of the parameters' shapes; absmaxes, absmax_sqs: their float32 scales.
    The rest is as in adamw.py.
    """
    moments = zip(exp_avgs, absmaxes, exp_avg_sqs, absmax_sqs, strict=True)
    for i, (p, grad, (m, m_max, v, v_max), t) in enumerate(zip(params, grads, moments, steps, strict=True)):
        keep = torch.zeros((), dtype=torch.bool, device=p.device) if found_inf is None else found_inf.to(p.device) != 0
        scale = None if grad_scale is None else grad_scale.to(p.device)
        t_new = t + 1
        size, correction = lr / (1 - beta1**t_new), 1 - beta2**t_new
        p_flat, g_flat = p.contiguous().view(-1), grad.contiguous().view(-1)
        m_flat, v_flat = m.view(-1), v.view(-1)
        chunk = _CHUNK_CPU if p.device.type == "cpu" else _CHUNK
        for start in range(0, p.numel(), chunk):
            part, blocks = slice(start, start + chunk), slice(start // BLOCK, (start + chunk) // BLOCK)
            old = p_flat[part], m_flat[part], m_max[blocks], v_flat[part], v_max[blocks]
            g = g_flat[part].float()
            if scale is not None:
                g = g / scale
            m_new = dequantize(old[1], old[2], signed=True).mul_(beta1).add_(g * (1 - beta1))
            v_new = dequantize(old[3], old[4], signed=False).mul_(beta2).add_((1 - beta2) * g * g)
            denominator = (v_new / correction).sqrt_().add_(eps)
            p_new = (old[0].float() * (1 - lr * weight_decay)).sub_((size * m_new).div_(denominator))
            if keys is not None and p.dtype == torch.bfloat16:
                p_new = stochastic_bf16(p_new, keys[i], start)
            new = p_new.to(p.dtype), *quantize(m_new, signed=True), *quantize(v_new, signed=False)
            for before, after in zip(old, new):
                before.copy_(torch.where(keep, before, after))
        if not p.is_contiguous():
            p.copy_(p_flat.view(p.shape))
        t.copy_(torch.where(keep, t, t_new))
