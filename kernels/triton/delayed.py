"""Quantize by delayed scaling in one pass over the operand; the definition stands in kernels/reference/delayed.py.

Two launches, and nothing that has to be cleared before them:

    1  where nothing is in force yet (decided on the device): the largest magnitude that each program sees. Else: nothing.
    2  codes by the amax in force, or by the largest of those parts. What the programs see on the way raises the open slots.

The decode scale is known before the pass: launch 1 stores it where an amax is in force, launch 2 where none was, and a program
that meets an inf or a NaN overwrites it with NaN. Program 0 of launch 2 puts a first amax in force, which is why the others read
what launch 1 found there. So no third launch is needed, and no order among programs matters.

The codes of x' have the same scale, and are stored from the same tile (`quantize_both`).

Kernels that quantize what they have just computed (norm, SwiGLU) do the same with `unknown`, `amax_in_force` and `settle`. A
magnitude is compared as the integer of its bits, as in quantize.py; an open slot without anything holds -1, whose bits are
below those of any magnitude.

M rows, K columns, S siblings.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from surokit.formats import Format
from surokit.kernels.reference import delayed as reference
from surokit.kernels.reference.quantize import DTYPES

from .quantize import block_shape, cast_scaled, decode_scale, encode_scale, format_constants, magnitude_bits

NEEDS = (8, 9)  # compute capability: before it Triton has no E4M3, and in version 3.6 no E5M2
PARTS = 256  # programs of the first launch, at most
SIDE = 64  # of a block that is stored in both orientations: whole sectors of 32 bytes either way
SLOTS_LIE_ANYWHERE = ("in_force", "opened")  # one compiled kernel for slots at multiples of 16 bytes and for others


def quantize(
    x_MK: Tensor,
    format: Format,
    in_force_S: Tensor,
    opened_S: Tensor,
    record: bool,
    pow2: bool = False,
    floor: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the codes [M, K] in the format's dtype and their decode scale [1, 1] float32.

    in_force_S, opened_S: float32 [S] of one stride, the amaxes in force (0: none) and the open slots of all layers that read x;
    written in place with `record`. Where x holds an inf or a NaN the decode scale is NaN and the codes are of no account.
    """
    if not x_MK.numel():
        return reference.quantize(x_MK, format, in_force_S, opened_S, record, pow2, floor)
    codes = torch.empty(x_MK.shape, dtype=DTYPES[format], device=x_MK.device)
    return codes, _quantize(x_MK, format, in_force_S, opened_S, record, pow2, floor, codes, None, block_shape(x_MK))


def quantize_both(
    x_MK: Tensor,
    format: Format,
    in_force_S: Tensor,
    opened_S: Tensor,
    record: bool,
    pow2: bool = False,
    floor: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the results of `quantize(x)`, then the codes of x' [K, M] from the same read, with the same decode scale."""
    if not x_MK.numel():
        return reference.quantize_both(x_MK, format, in_force_S, opened_S, record, pow2, floor)
    M, K = x_MK.shape
    codes, codes_t = (torch.empty(shape, dtype=DTYPES[format], device=x_MK.device) for shape in ((M, K), (K, M)))
    block = min(SIDE, triton.next_power_of_2(M)), min(SIDE, triton.next_power_of_2(K))
    scale_inv = _quantize(x_MK, format, in_force_S, opened_S, record, pow2, floor, codes, codes_t, block)
    return codes, scale_inv, codes_t, scale_inv


def _quantize(
    x_MK: Tensor, format: Format, in_force_S: Tensor, opened_S: Tensor, record: bool, pow2: bool, floor: float,
    codes: Tensor, codes_t: Tensor | None, block: tuple[int, int],
) -> Tensor:  # fmt: skip
    """Fill the codes, in blocks of this shape, and return their decode scale."""
    M, K = x_MK.shape
    scale_inv = torch.empty((1, 1), dtype=torch.float32, device=x_MK.device)
    BM, BK = block
    blocks = triton.cdiv(M, BM) * triton.cdiv(K, BK)
    launch = amaxes(in_force_S, opened_S, record, blocks)
    options: dict[str, Any] = {
        **launch, **format_constants(format), "scale_inv": scale_inv, "floor": floor, "POW2": pow2, "BM": BM, "BK": BK,
    }  # fmt: skip
    strides = x_MK.stride()
    amax_parts[(launch["PARTS"],)](x_MK, M, K, *strides, blocks, **options)
    encode_and_record[(blocks,)](x_MK, codes, codes_t, M, K, *strides, **options)
    return scale_inv


def amaxes(in_force_S: Tensor, opened_S: Tensor, record: bool, blocks: int) -> dict[str, Any]:
    """Return the keyword arguments for the slots, for both launches of a quantization. `blocks`: programs of the second.

    PARTS is the grid of the first launch, and `parts` [PARTS + 1] takes the amaxes that its programs find.
    """
    for name, slots in (("in_force", in_force_S), ("opened", opened_S)):
        if slots.dim() != 1 or not len(slots) or slots.dtype != torch.float32:
            raise ValueError(
                f"`{name}_S` is float32 with a slot for each layer, not {slots.dtype} {list(slots.shape)}."
            )
    if (in_force_S.shape, in_force_S.stride()) != (opened_S.shape, opened_S.stride()):
        raise ValueError("`in_force_S` and `opened_S` are views of the same slots: give them one shape and stride.")
    parts = min(PARTS, triton.next_power_of_2(blocks))
    return {
        "in_force": in_force_S,
        "opened": opened_S.view(torch.int32),
        "slot_stride": in_force_S.stride(0),
        "parts": torch.empty(parts + 1, dtype=torch.int32, device=in_force_S.device),
        "PARTS": parts,
        "SLOTS": len(in_force_S),
        "RECORD": record,
    }


@triton.jit
def unknown(in_force, parts, scale_inv, floor, MAX: tl.constexpr, POW2: tl.constexpr, PARTS: tl.constexpr):
    """Return whether no amax is in force yet, so that `parts[program]` has to be filled.

    Every program of launch 1 calls it once. Program 0 also stores the amax in force (0 for none) behind the parts, and the
    decode scale if an amax in force already determines it.
    """
    given = tl.load(in_force)
    known = given > 0
    if tl.program_id(0) == 0:
        tl.store(parts + PARTS, tl.where(known, given, 0.0).to(tl.int32, bitcast=True))
        tl.store(scale_inv, decode_scale(encode_scale(given, floor, MAX, POW2), given), mask=known)
    return known == 0


@triton.jit
def amax_in_force(parts, PARTS: tl.constexpr):
    """Return, in launch 2, the amax that quantizes now; NaN where it is the operand's own and not finite."""
    used = tl.load(parts + PARTS).to(tl.float32, bitcast=True)
    if used == 0:
        own = tl.max(tl.load(parts + tl.arange(0, PARTS)), axis=0).to(tl.float32, bitcast=True)
        used = own + (own - own)
    return used


@triton.jit
def settle(
    top, used, in_force, opened, slot_stride, parts, scale_inv, floor,
    MAX: tl.constexpr, POW2: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr, RECORD: tl.constexpr,
):  # fmt: skip
    """Update the slots and the decode scale with a program's largest magnitude (its bits, int32).

    Every program of launch 2 calls it once.
    """
    if (tl.program_id(0) == 0) & (tl.load(parts + PARTS) == 0):
        tl.store(scale_inv, decode_scale(encode_scale(used, floor, MAX, POW2), used))
        if RECORD:
            for s in tl.static_range(SLOTS):
                slot = in_force + s * slot_stride
                tl.store(slot, used, mask=(used > 0) & ((tl.load(slot) > 0) == 0))
    if top >= 0x7F800000:
        tl.store(scale_inv, float("nan"))
    if RECORD:
        for s in tl.static_range(SLOTS):
            slot = opened + s * slot_stride
            # what is there by then can only be more
            tl.atomic_max(slot, top, mask=top > tl.load(slot), sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=SLOTS_LIE_ANYWHERE)
def amax_parts(
    x, M, K, stride_m, stride_k, blocks, in_force, opened, slot_stride, parts, scale_inv, floor,
    PARTS: tl.constexpr, SLOTS: tl.constexpr, RECORD: tl.constexpr, MAX: tl.constexpr, MANTISSA: tl.constexpr,
    LOWEST: tl.constexpr, POW2: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Run launch 1: store each program's largest magnitude where no amax is in force yet."""
    if unknown(in_force, parts, scale_inv, floor, MAX, POW2, PARTS):
        across = tl.cdiv(K, BK)
        bits = tl.zeros([BM, BK], tl.int32)
        for block in range(tl.program_id(0), blocks, PARTS):
            row = block // across * BM + tl.arange(0, BM)
            column = block % across * BK + tl.arange(0, BK)
            inside = (row < M)[:, None] & (column < K)[None, :]
            at_x = row[:, None].to(tl.int64) * stride_m + column[None, :].to(tl.int64) * stride_k
            bits = tl.maximum(bits, magnitude_bits(tl.load(x + at_x, mask=inside, other=0)))
        tl.store(parts + tl.program_id(0), tl.max(tl.max(bits, axis=1), axis=0))


@triton.jit(do_not_specialize_on_alignment=SLOTS_LIE_ANYWHERE)
def encode_and_record(
    x, codes, codes_t, M, K, stride_m, stride_k, in_force, opened, slot_stride, parts, scale_inv, floor,
    PARTS: tl.constexpr, SLOTS: tl.constexpr, RECORD: tl.constexpr, MAX: tl.constexpr, MANTISSA: tl.constexpr,
    LOWEST: tl.constexpr, POW2: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Run launch 2: store codes and raise the open slots. codes_t: None, or the codes of x' [K, M], which are stored too."""
    across = tl.cdiv(K, BK)
    row = tl.program_id(0) // across * BM + tl.arange(0, BM)
    column = tl.program_id(0) % across * BK + tl.arange(0, BK)
    inside = (row < M)[:, None] & (column < K)[None, :]
    wide_row, wide_column = row[:, None].to(tl.int64), column[None, :].to(tl.int64)
    x_tile = tl.load(x + wide_row * stride_m + wide_column * stride_k, mask=inside, other=0).to(tl.float32)
    top = tl.max(tl.max(magnitude_bits(x_tile), axis=1), axis=0)
    used = amax_in_force(parts, PARTS)
    scale = encode_scale(used, floor, MAX, POW2)
    tile = cast_scaled(x_tile * scale, None, None, codes, MAX, MANTISSA, LOWEST, False)
    tl.store(codes + wide_row * K + wide_column, tile, mask=inside)
    if codes_t is not None:
        at_t = column[:, None].to(tl.int64) * M + row[None, :]
        tl.store(codes_t + at_t, tl.trans(tile), mask=(column < K)[:, None] & (row < M)[None, :])
    settle(top, used, in_force, opened, slot_stride, parts, scale_inv, floor, MAX, POW2, PARTS, SLOTS, RECORD)
