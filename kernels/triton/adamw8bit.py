"""AdamW with moments of eight bits in one pass; format and formulas stand in kernels/reference/adamw8bit.py.

A program holds whole blocks of 256: it decodes the moments with the map, updates them, takes each block's new absmax and encodes
them again. Map and borders between codes are the reference's own tables, four kilobytes that stay in cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surokit.kernels.reference.adamw8bit import BLOCK, dynamic_map, midpoints

from .adamw import begin_step, moved
from .quantize import magnitude_bits
from .rows import check_dtypes, same_shape

BLOCKS = 8  # of a program


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
    """Updates all lists but grads in place; never reads a value on the host.

    exp_avgs, exp_avg_sqs: codes, contiguous uint8 of the parameters' shapes; absmaxes, absmax_sqs: their float32 scales.
    The rest is as in adamw.py.
    """
    tensors = list(zip(params, grads, exp_avgs, exp_avg_sqs, absmaxes, absmax_sqs, steps, strict=True))
    for p, grad, m, v, m_max, v_max, _ in tensors:
        same_shape(p, grad)
        check_dtypes(p, grad)
        blocks = triton.cdiv(p.numel(), BLOCK)
        for codes, absmax in ((m, m_max), (v, v_max)):
            if codes.dtype != torch.uint8 or codes.shape != p.shape or not codes.is_contiguous():
                raise ValueError(
                    f"The moments of a parameter {list(p.shape)} are contiguous uint8 codes of its shape, "
                    f"not {codes.dtype} {list(codes.shape)}."
                )
            if absmax.dtype != torch.float32 or absmax.shape != (blocks,) or not absmax.is_contiguous():
                raise ValueError(
                    f"{p.numel()} numbers in blocks of {BLOCK} have {blocks} contiguous float32 scales, "
                    f"not {absmax.dtype} {list(absmax.shape)}."
                )
    if not tensors:
        return
    device = params[0].device
    tables = [table(signed, device) for signed in (True, False) for table in (dynamic_map, midpoints)]
    factors_N4, scale, masked = begin_step(steps, lr, beta1, beta2, weight_decay, grad_scale, found_inf)
    for i, (p, grad, m, v, m_max, v_max, _) in enumerate(tensors):
        if p.numel() == 0:
            continue
        dense = p.contiguous()
        update_blocks[(triton.cdiv(p.numel(), BLOCK * BLOCKS),)](
            dense,
            m,
            v,
            m_max,
            v_max,
            grad.contiguous(),
            *tables,
            factors_N4[i],
            scale,
            masked,
            keys[i] if keys is not None and p.dtype == torch.bfloat16 else None,
            p.numel(),
            beta1,
            1 - beta1,
            beta2,
            1 - beta2,
            eps,
            BLOCKS=BLOCKS,
            BLOCK=BLOCK,
            num_warps=8,
        )
        if dense is not p:
            p.copy_(dense)


@triton.jit
def encode(x, borders, SIGNED: tl.constexpr):
    """Codes and absmax of the blocks x [BLOCKS, BLOCK]: how many borders are not >= x / absmax, so a NaN gets 255.

    The map divides a decade evenly, so arithmetic finds a code that is at most one off; two borders then decide. (A search among
    the borders alone takes eight dependent reads.)
    """
    absmax = tl.max(magnitude_bits(x), axis=1).to(tl.float32, bitcast=True)
    least = 1.1754943508222875e-38  # the smallest normal number: below it the inverse would overflow
    ratio = x * tl.div_rn(tl.full(absmax.shape, 1.0, tl.float32), tl.where(absmax < least, least, absmax))[:, None]
    number = ratio == ratio
    digits = tl.where(number, tl.abs(ratio), 0.0)
    parts = tl.full(x.shape, 64 if SIGNED else 128, tl.int32)  # of the decade that digits are in
    for _ in tl.static_range(6):
        parts = tl.where(digits < 0.1, parts >> 1, parts)
        digits = tl.where(digits < 0.1, digits * 10.0, digits)
    part = ((digits - 0.1) * (1 / 0.9) * parts.to(tl.float32)).to(tl.int32)
    code = parts + tl.minimum(tl.maximum(part, 0), parts - 1)  # below a decade are as many codes as it has parts itself
    if SIGNED:
        code = 127 + tl.where(ratio < 0, -code, code)
    else:
        code -= 1
    code += ((code < 255) & (tl.load(borders + tl.minimum(code, 254)) < ratio)).to(tl.int32)
    code -= ((code > 0) & (tl.load(borders + tl.maximum(code - 1, 0)) >= ratio)).to(tl.int32)
    return tl.where(number, code, 255).to(tl.uint8), absmax


@triton.jit
def update_blocks(
    p,
    m,
    v,
    m_max,
    v_max,
    grad,
    m_map,
    m_borders,
    v_map,
    v_borders,
    factors,
    grad_scale,
    masked,
    key,
    n,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if tl.load(masked) == 0:
        block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
        at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside, valid = at < n, block * BLOCK < n
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) / tl.load(grad_scale)
        m_old = (
            tl.load(m_map + tl.load(m + at, mask=inside, other=0))
            * tl.load(m_max + block, mask=valid, other=0.0)[:, None]
        )
        v_old = (
            tl.load(v_map + tl.load(v + at, mask=inside, other=0))
            * tl.load(v_max + block, mask=valid, other=0.0)[:, None]
        )
        # beyond the end the code 0 decodes to something
        m_new = tl.where(inside, beta1 * m_old + one_minus_beta1 * g, 0.0)
        v_new = tl.where(inside, beta2 * v_old + one_minus_beta2 * g * g, 0.0)
        p_old = tl.load(p + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(p + at, moved(p_old, m_new, v_new, at, factors, key, eps), mask=inside)
        m_code, m_top = encode(m_new, m_borders, True)
        v_code, v_top = encode(v_new, v_borders, False)
        tl.store(m + at, m_code, mask=inside)
        tl.store(v + at, v_code, mask=inside)
        tl.store(m_max + block, m_top, mask=valid)
        tl.store(v_max + block, v_top, mask=valid)
