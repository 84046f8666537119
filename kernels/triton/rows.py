"""What the row-wise kernels share: a program holds whole rows, several where they are short, and can quantize what it computed.

A row that stays in registers is read once, whatever is computed from it. About 4096 elements a program give every thread 16, in
loads of 16 bytes. T rows, K columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from surokit.formats import Format
from surokit.kernels.reference.quantize import DTYPES

from .quantize import cast_scaled, decode_scale, encode_scale, format_constants, magnitude_bits

ELEMENTS = 4096  # of a program's tile, unless one row is longer
MAX_COLUMNS = 65536  # 64 elements a thread; beyond, nothing of a row would stay in registers
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def tile(T: int, K: int) -> dict[str, int]:
    """Rows and columns (powers of two) of a program's tile and its number of warps, as keywords of a launch."""
    if K > MAX_COLUMNS:
        raise ValueError(f"Rows of {K} elements do not fit a program: use kernels/reference beyond {MAX_COLUMNS}.")
    columns = triton.next_power_of_2(max(K, 1))
    rows = max(1, ELEMENTS // columns)
    return {"ROWS": rows, "COLUMNS": columns, "num_warps": min(max(rows * columns // 512, 1), 32)}


def check_dtypes(*tensors: Tensor) -> None:
    """TypeError for what would not be computed in its own precision."""
    for tensor in tensors:
        if tensor.dtype not in FLOATS:
            raise TypeError(
                f"Triton kernels take float32, bfloat16 or float16, not {tensor.dtype}: use kernels/reference."
            )


def unit_columns(*tensors: Tensor) -> list[Tensor]:
    """The tensors themselves, or copies of those whose last dimension is not contiguous; any strides of the others pass."""
    check_dtypes(*tensors)
    return [t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in tensors]


def same_shape(first: Tensor, *others: Tensor) -> None:
    """ValueError if a shape differs: a kernel would read past the end where torch's operators see the mistake."""
    for other in others:
        if other.shape != first.shape:
            raise ValueError(f"The operands need equal shapes, not {list(first.shape)} and {list(other.shape)}.")


def quantization(
    x_TK: Tensor, format: Format, amax: Tensor | None, floor: float, record: Tensor | None
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Codes and decode scales for a matrix like x [T, K], and the arguments that make `store_quantized` fill them."""
    for name, given in (("amax", amax), ("record", record)):
        if given is not None and (given.numel() != 1 or given.dtype != torch.float32):
            raise ValueError(
                f"`{name}` is one float32 number for the whole tensor, not {given.dtype} {list(given.shape)}."
            )
    codes_TK = torch.empty(x_TK.shape, dtype=DTYPES[format], device=x_TK.device)
    scale_inv = x_TK.new_empty((x_TK.shape[0], 1) if amax is None else (1, 1), dtype=torch.float32)
    return (
        codes_TK,
        scale_inv,
        {
            "codes": codes_TK,
            "scale_inv": scale_inv,
            "amax": amax,
            "record": None if record is None else record.view(torch.int32),
            "floor": floor,
            **format_constants(format),
            "GROUP": min(16 // x_TK.element_size(), triton.next_power_of_2(x_TK.shape[1])),
        },
    )


@triton.jit
def store_quantized(
    y, rows, columns, codes, scale_inv, amax, record, floor, T, K,
    MAX: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Store codes and decode scales of the float32 tile y [ROWS, COLUMNS], which is zero outside [T, K].

    amax None: a scale a row, a power of two; else the number in memory gives the scale of the whole tensor. record: None, or
    bits of the largest magnitude so far, to be raised to that of y.
    """
    bits = tl.max(magnitude_bits(y), axis=1)
    if record is not None:
        tl.atomic_max(record, tl.max(tl.where(rows < T, bits, 0), axis=0), sem="relaxed")
    if amax is None:
        own = bits.to(tl.float32, bitcast=True)
        scale = encode_scale(own, floor, MAX, True)
        tl.store(scale_inv + rows, decode_scale(scale, own), mask=rows < T)
    else:
        earlier = tl.load(amax + rows * 0)
        scale = encode_scale(earlier, floor, MAX, False)
        tl.store(scale_inv + rows, decode_scale(scale, earlier), mask=rows == 0)
    rounded = cast_scaled(y * scale[:, None], None, None, codes, MAX, MANTISSA, LOWEST, False)
    inside = (rows[:, None] < T) & (columns[None, :] < K)
    # The compiler deals elements out to threads by a kernel's widest access. That would be 16 codes here, and a sum that led to y
    # would add in another order than where y itself is stored, and differ in a last bit. So codes go in groups as small as y's.
    at = tl.max_contiguous(rows[:, None] * K + columns[None, :], (1, GROUP))
    tl.store(codes + at, rounded, mask=inside)
