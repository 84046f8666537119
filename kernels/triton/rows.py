"""This module holds the common parts of the row-wise kernels: a program holds whole rows, several where they are short, and can
quantize what it computed.

A row that stays in registers is read once, whatever is computed from it. Every thread holds 16 elements, or more of long rows, in
loads of 16 bytes; four warps are a program where rows are short. T rows, K columns, C scales a row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from surokit.formats import Format
from surokit.kernels.reference.quantize import DTYPES, empty_scales

from .delayed import amax_in_force, amaxes, settle
from .quantize import cast_scaled, decode_scale, encode_scale, format_constants, magnitude_bits

ELEMENTS = 2048  # of a program's tile, unless one row is longer
MAX_COLUMNS = 65536  # 64 elements a thread; beyond, nothing of a row would stay in registers
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def tile(K: int, longest: int = MAX_COLUMNS) -> dict[str, int]:
    """Return the rows and columns (powers of two) of a program's tile and its number of warps, as keywords of a launch.

    A tile spans rows of K elements, or `longest` columns of them where whole rows are not needed.
    """
    if K > MAX_COLUMNS == longest:
        raise ValueError(f"Rows of {K} elements do not fit a program: use kernels/reference beyond {MAX_COLUMNS}.")
    columns = min(triton.next_power_of_2(max(K, 1)), longest)
    rows = max(1, ELEMENTS // columns)
    return {"ROWS": rows, "COLUMNS": columns, "num_warps": min(max(rows * columns // 512, 1), 32)}


def check_dtypes(*tensors: Tensor) -> None:
    """Raise TypeError for a dtype that the kernels would not compute in its own precision."""
    for tensor in tensors:
        if tensor.dtype not in FLOATS:
            raise TypeError(
                f"Triton kernels take float32, bfloat16 or float16, not {tensor.dtype}: use kernels/reference."
            )


def unit_columns(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors themselves, or copies of those whose last dimension is not contiguous; any strides of the others pass."""
    check_dtypes(*tensors)
    return [t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in tensors]


def same_shape(first: Tensor, *others: Tensor) -> None:
    """Raise ValueError if a shape differs: a kernel would read past the end where torch's operators see the mistake."""
    for other in others:
        if other.shape != first.shape:
            raise ValueError(f"The operands need equal shapes, not {list(first.shape)} and {list(other.shape)}.")


def apart(x_TK: Tensor) -> bool:
    """Return whether the result is quantized in a second step: x is empty, or Triton has no float8 on its device."""
    no_float8 = x_TK.is_cuda and torch.cuda.get_device_capability(x_TK.device) < (8, 9)
    return no_float8 or not x_TK.numel()


def quantization(
    x_TK: Tensor,
    shape: dict[str, int],
    format: Format,
    *,
    columns: int = 0,
    pow2: bool = False,
    floor: float = 0.0,
    in_force: Tensor | None = None,
    opened: Tensor | None = None,
    record: bool = False,
    both: bool = False,
) -> tuple[tuple[Tensor, ...], dict[str, Any], dict[str, Any]]:
    """Allocate codes and decode scales for a matrix like x [T, K]; return them and arguments of the launches that fill them.

    `shape` is that of a tile. The first arguments are for delayed scaling's launch for a first amax, and empty where there is
    none; the second are for `store_quantized`. With `both`, codes and decode scales of the transpose [K, T] follow; blocks are
    then to be as long as tiles are high.
    """
    if columns & (columns - 1):
        raise ValueError(f"Triton kernels take scales of 2^n columns, not of {columns}: use kernels/reference.")
    delayed = in_force is not None or opened is not None
    if both and not delayed and columns != shape["ROWS"]:
        raise ValueError(
            "This kernel gives codes in both orientations with a delayed scale only: compute y and use quantize_both."
        )
    T, K = x_TK.shape
    codes_TK = torch.empty(x_TK.shape, dtype=DTYPES[format], device=x_TK.device)
    codes_KT = torch.empty((K, T), dtype=DTYPES[format], device=x_TK.device) if both else None
    constants = {**format_constants(format), "POW2": pow2}
    outputs: dict[str, Any] = {
        **constants,
        "codes": codes_TK,
        "codes_t": codes_KT,
        "floor": floor,
        "BLOCK": min(columns or shape["COLUMNS"], shape["COLUMNS"]),
        "GROUP": min(16 // x_TK.element_size(), triton.next_power_of_2(K)),
    }
    if not delayed:
        scale_inv = empty_scales(x_TK, 1, columns)
        none: dict[str, Any] = dict.fromkeys(("in_force", "opened", "parts"))
        none |= dict.fromkeys(("slot_stride", "PARTS", "SLOTS", "RECORD"), 0)
        outputs |= {**none, "scale_inv": scale_inv, "scale_inv_t": None}
        if codes_KT is None:
            return (codes_TK, scale_inv), {}, outputs
        scale_inv_t = empty_scales(x_TK.t(), 1, columns)
        return (codes_TK, scale_inv, codes_KT, scale_inv_t), {}, outputs | {"scale_inv_t": scale_inv_t}
    if in_force is None or opened is None:
        raise ValueError(
            "Delayed scaling takes both `in_force` and `opened`, or neither: give the two views of the slots."
        )
    scale_inv = x_TK.new_empty((1, 1), dtype=torch.float32)
    slots = {**amaxes(in_force, opened, record, programs(x_TK, shape)), "scale_inv": scale_inv}
    first = {name: slots[name] for name in ("in_force", "parts", "PARTS", "scale_inv")}
    first |= {"floor": floor, "MAX": constants["MAX"], "POW2": pow2}
    parts = (codes_TK, scale_inv) if codes_KT is None else (codes_TK, scale_inv, codes_KT, scale_inv)
    return parts, first, {**outputs, **slots, "scale_inv_t": None}


def programs(x_TK: Tensor, shape: dict[str, int]) -> int:
    """Return how many tiles a matrix has, one a program."""
    tiles: int = triton.cdiv(x_TK.shape[0], shape["ROWS"]) * triton.cdiv(x_TK.shape[1], shape["COLUMNS"])
    return tiles


@triton.jit
def largest(y, rows, T):
    """Return the bits of the largest magnitude of a tile that is zero (or NaN) outside T rows."""
    return tl.max(tl.where(rows < T, tl.max(magnitude_bits(y), axis=1), 0), axis=0)


@triton.jit
def store_quantized(
    y, rows, first, codes, scale_inv, codes_t, scale_inv_t, in_force, opened, slot_stride, parts, floor, T, K,
    MAX: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, POW2: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr, RECORD: tl.constexpr,
):  # fmt: skip
    """Store codes and decode scales of the float32 tile y [ROWS, COLUMNS] at column `first`, which is zero outside [T, K].

    in_force None: a scale for each BLOCK columns of a row. Else delayed scaling, one scale for all, as in delayed.py.
    codes_t: None, or the transposed codes [K, T], which are stored too; each of their scales is for all ROWS of a column.
    """
    ROWS: tl.constexpr = y.shape[0]
    COLUMNS: tl.constexpr = y.shape[1]
    columns = first + tl.arange(0, COLUMNS)
    if in_force is None:
        blocks = first // BLOCK + tl.arange(0, COLUMNS // BLOCK)
        y_blocks = tl.reshape(y, (ROWS, COLUMNS // BLOCK, BLOCK))
        top = tl.max(magnitude_bits(y_blocks), axis=2).to(tl.float32, bitcast=True)
        scale = encode_scale(top, floor, MAX, POW2)
        there = (rows[:, None] < T) & (blocks[None, :] * BLOCK < K)
        tl.store(scale_inv + blocks[None, :].to(tl.int64) * T + rows[:, None], decode_scale(scale, top), mask=there)
        scaled = tl.reshape(y_blocks * scale[:, :, None], (ROWS, COLUMNS))
    else:
        used = amax_in_force(parts, PARTS)
        scaled = y * encode_scale(used, floor, MAX, POW2)
    rounded = cast_scaled(scaled, None, None, codes, MAX, MANTISSA, LOWEST, False)
    inside = (rows[:, None] < T) & (columns[None, :] < K)
    # The compiler deals elements out to threads by a kernel's widest access. That would be 16 codes here, and a sum that led to y
    # would add in another order than where y itself is stored, and differ in a last bit. So codes go in groups as small as y's.
    at = tl.max_contiguous(rows[:, None] * K + columns[None, :], (1, GROUP))
    tl.store(codes + at, rounded, mask=inside)
    if codes_t is not None:
        if in_force is None:
            top_t = tl.max(magnitude_bits(y), axis=0).to(tl.float32, bitcast=True)
            scale_t = encode_scale(top_t, floor, MAX, POW2)
            block = tl.max(rows, axis=0) // ROWS
            tl.store(scale_inv_t + block * K + columns, decode_scale(scale_t, top_t), mask=columns < K)
            rounded = cast_scaled(y * scale_t[None, :], None, None, codes, MAX, MANTISSA, LOWEST, False)
        at_t = columns[:, None].to(tl.int64) * T + rows[None, :]
        tl.store(codes_t + at_t, tl.trans(rounded), mask=(columns[:, None] < K) & (rows[None, :] < T))
    if in_force is not None:
        top = largest(y, rows, T)
        settle(top, used, in_force, opened, slot_stride, parts, scale_inv, floor, MAX, POW2, PARTS, SLOTS, RECORD)
