"""Compute AdamW with moments of eight bits in one pass; format and formulas stand in kernels/reference/adamw8bit.py.

A program holds whole blocks of 256: it decodes the moments with the map, updates them, takes each block's new absmax and encodes
them again. Map and borders between codes are the reference's own tables, four kilobytes that stay in cache.

A launch takes many tensors, and their addresses as arguments: nothing is copied to the device, and a captured graph holds them
itself. A program picks its own by comparing its number with the first program of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, repeat
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from surokit.kernels.reference.adamw8bit import BLOCK, dynamic_map, midpoints

from .adamw import begin_step, moved
from .quantize import magnitude_bits
from .rows import check_dtypes, same_shape

BLOCKS = 4  # of 256 that a program holds at once
TENSORS = (
    32  # of a launch, at most: with their addresses the arguments stay well below the 4 KiB that every driver takes
)
SPAN = 8  # times as much goes through a program one after the other where there are programs enough
PROGRAMS = 2048  # that are enough: some for every multiprocessor


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
    keys_N2 = None if keys is None else torch.stack(keys)
    for part in _launches(params, grads):
        ps, gs, *moments, _ = zip(*tensors[part])
        dense = [p.contiguous() for p in ps]
        columns = [dense, [g.contiguous() for g in gs], *moments]
        tiles = [triton.cdiv(p.numel(), BLOCK * BLOCKS) for p in ps]
        span = min(max(sum(tiles) // PROGRAMS, 1), SPAN)
        firsts = [0, *accumulate(triton.cdiv(n, span) for n in tiles)]
        if not firsts[-1]:
            continue
        count = triton.next_power_of_2(len(ps))
        part_keys = keys_N2[part] if keys_N2 is not None and ps[0].dtype == torch.bfloat16 else None
        update_blocks[(firsts[-1],)](
            *(_filled(column, count) for column in columns),
            _filled([_odd(p.numel()) for p in ps], count),
            _filled([_odd(first) for first in firsts], count),
            *tables,
            factors_N4[part],
            scale,
            masked,
            part_keys,
            span,
            beta1,
            1 - beta1,
            beta2,
            1 - beta2,
            eps,
            COUNT=count,
            ALIGNED=all(t.data_ptr() % 16 == t.numel() % 16 == 0 for column in columns[:4] for t in column),
            BLOCKS=BLOCKS,
            BLOCK=BLOCK,
            num_warps=4,
            # five programs a multiprocessor, 20 warps of 64; fewer registers would spill with Triton 3.6, and so would draws
            maxnreg=96 if part_keys is None else None,
        )
        for p, copy in zip(ps, dense):
            if copy is not p:
                p.copy_(copy)


def _launches(params: list[Tensor], grads: list[Tensor]) -> Iterator[slice]:
    """Yield runs of neighbouring tensors of the same dtypes, each at most as long as a launch takes."""
    start = 0
    for _, same in groupby((p.dtype, grad.dtype) for p, grad in zip(params, grads)):
        end = start + len(list(same))
        yield from (slice(i, min(i + TENSORS, end)) for i in range(start, end, TENSORS))
        start = end


def _filled(values: Sequence[Any], count: int) -> tuple[Any, ...]:
    """Cut the values to `count`, or repeat the last one until there are `count`."""
    return (*values, *repeat(values[-1], count))[:count]


def _odd(n: int) -> int:
    """Return an odd number above 1 that encodes n: Triton would compile anew for every argument that is 1 or a multiple of 16."""
    return 2 * n + 3


@triton.jit
def encode(x, borders, SIGNED: tl.constexpr):
    """Encode the blocks x [BLOCKS, BLOCK] and return codes and absmax.

    A code is the number of borders that are not >= x / absmax, so a NaN gets 255.

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


@triton.jit(do_not_specialize=["span"])
def update_blocks(
    ps, gs, ms, vs, m_maxes, v_maxes, sizes, firsts, m_map, m_borders, v_map, v_borders, factors, grad_scale, masked, keys, span,
    beta1, one_minus_beta1, beta2, one_minus_beta2, eps,
    COUNT: tl.constexpr, ALIGNED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update `span` times BLOCKS blocks of one of COUNT tensors: the last one whose first program is not behind this program."""
    if tl.load(masked) == 0:
        program = 2 * tl.program_id(0) + 3
        p, grad, m, v, m_max, v_max, n, first = ps[0], gs[0], ms[0], vs[0], m_maxes[0], v_maxes[0], sizes[0], firsts[0]
        at_factors, key = factors, keys
        for i in tl.static_range(1, COUNT):
            here = program >= firsts[i]
            p, grad = tl.where(here, ps[i], p), tl.where(here, gs[i], grad)
            m, v = tl.where(here, ms[i], m), tl.where(here, vs[i], v)
            m_max, v_max = tl.where(here, m_maxes[i], m_max), tl.where(here, v_maxes[i], v_max)
            n, first = tl.where(here, sizes[i], n), tl.where(here, firsts[i], first)
            at_factors = tl.where(here, factors + 4 * i, at_factors)
            if keys is not None:
                key = tl.where(here, keys + 2 * i, key)
        n, start = (n - 3) >> 1, ((program - first) >> 1).to(tl.int64) * span
        if ALIGNED:
            p, grad, m, v = (
                tl.multiple_of(p, 16),
                tl.multiple_of(grad, 16),
                tl.multiple_of(m, 16),
                tl.multiple_of(v, 16),
            )
            n = tl.multiple_of(n, 16)
        for tile in range(start, tl.minimum(start + span, tl.cdiv(n, BLOCKS * BLOCK))):
            update_tile(
                p, m, v, m_max, v_max, grad, m_map, m_borders, v_map, v_borders, at_factors, grad_scale, key, tile, n,
                beta1, one_minus_beta1, beta2, one_minus_beta2, eps, BLOCKS, BLOCK,
            )  # fmt: skip


@triton.jit
def update_tile(
    p, m, v, m_max, v_max, grad, m_map, m_borders, v_map, v_borders, factors, grad_scale, key, tile, n,
    beta1, one_minus_beta1, beta2, one_minus_beta2, eps, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tile * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside, valid = at < n, block * BLOCK < n
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) / tl.load(grad_scale)
    m_old = tl.load(m_map + tl.load(m + at, mask=inside, other=0))
    m_old *= tl.load(m_max + block, mask=valid, other=0.0)[:, None]
    v_old = tl.load(v_map + tl.load(v + at, mask=inside, other=0))
    v_old *= tl.load(v_max + block, mask=valid, other=0.0)[:, None]
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
