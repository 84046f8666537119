"""Compute SwiGLU, y = silu(gate) up, its gradient, and y quantized as it is made; the formulas stand in
kernels/reference/swiglu.py.

Everything is computed in float32 and rounded once. gate and up may be the two halves of one product: rows with any stride need
no copy. The quantized form rounds y to the inputs' dtype first, so that fused and unfused runs have the same codes. Nothing but
their scales ties the elements of y together, so a program may hold a tile that is stored in both orientations.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from surokit.formats import E4M3, Format
from surokit.kernels.reference.rows import quantized

from .delayed import unknown
from .rows import apart, largest, programs, quantization, same_shape, store_quantized, tile, unit_columns

BLOCK = 1024
# tiles that are stored in both orientations: whole sectors of 32 bytes either way
UPRIGHT = {"ROWS": 32, "COLUMNS": 128, "num_warps": 8}
SQUARE = {"ROWS": 128, "COLUMNS": 128, "num_warps": 16}


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """Return y in the dtype of gate."""
    y = torch.empty_like(gate, memory_format=torch.contiguous_format)
    gate, up = _as_rows(gate, up)
    if y.numel():
        M, K = gate.shape
        forward_blocks[(M * triton.cdiv(K, BLOCK),)](gate, up, y, gate.stride(0), up.stride(0), K, BLOCK=BLOCK)
    return y


def backward(dy: Tensor, gate: Tensor, up: Tensor, joint: bool = False, values: bool = False) -> tuple[Tensor, ...]:
    """Return dgate and dup [..., K], or with `joint` the one tensor [..., 2K] that holds dgate before dup; and y again if
    `values`."""
    made: tuple[Tensor, ...]
    if joint:
        K = gate.shape[-1]
        gradients = gate.new_empty((*gate.shape[:-1], 2 * K))
        dgate, dup, made = gradients[..., :K], gradients[..., K:], (gradients,)
    else:
        dgate, dup = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (gate, up))
        made = dgate, dup
    y = torch.empty_like(gate, memory_format=torch.contiguous_format) if values else None
    dy, gate, up = _as_rows(dy, gate, up, whole=not joint)
    if gate.numel():
        M, K = gate.shape
        strides = dy.stride(0), gate.stride(0), up.stride(0), 2 * K if joint else K
        backward_blocks[(M * triton.cdiv(K, BLOCK),)](dy, gate, up, dgate, dup, y, *strides, K, BLOCK=BLOCK)
    return made if y is None else (*made, y)


def forward_quantized(
    gate_TK: Tensor, up_TK: Tensor, format: Format = E4M3, *, values: bool = False, **scaling: Any
) -> tuple[Any, ...]:
    """Return the codes [T, K] of y and their decode scales, with `both` those of y' [K, T] too; then y if `values`. Backward needs
    gate and up only.

    scaling: columns, pow2, floor, in_force, opened, record, both, as `quantized` in kernels/reference/rows.py has them; `both` with
    delayed scales or blocks of 16 to 128 columns.
    """
    if apart(gate_TK):
        y = forward(gate_TK, up_TK)
        return *quantized(y, format, **scaling), y if values else None
    same_shape(gate_TK, up_TK)
    gate_TK, up_TK = unit_columns(gate_TK, up_TK)
    T, K = gate_TK.shape
    columns = scaling.get("columns", 0)
    whole_rows = scaling.get("in_force") is None and (not columns or columns > BLOCK)
    shape = tile(K) if whole_rows else tile(K, BLOCK)
    if shape["COLUMNS"] == 16384:  # 32 warps fill a multiprocessor, which then loads nothing while they compute
        shape["num_warps"] = 16
    if scaling.get("both"):
        shape = SQUARE if columns == 128 else {**UPRIGHT, "ROWS": columns} if 16 <= columns < 128 else UPRIGHT
    tiles = programs(gate_TK, shape)
    parts, first, outputs = quantization(gate_TK, shape, format, **scaling)
    y_TK = torch.empty_like(gate_TK, memory_format=torch.contiguous_format) if values else None
    strides = {"gate_stride": gate_TK.stride(0), "up_stride": up_TK.stride(0)}
    inputs = {"gate": gate_TK, "up": up_TK, **strides, "T": T, "K": K}
    if first:
        amax_tiles[(first["PARTS"],)](**inputs, **first, tiles=tiles, **shape)
    forward_tiles_quantized[(tiles,)](**inputs, y=y_TK, **outputs, **shape)
    return *parts, y_TK


def _as_rows(*tensors: Tensor, whole: bool = True) -> list[Tensor]:
    """Return views [rows, columns]: if `whole`, one long row where all are contiguous; else the last dimension is kept."""
    same_shape(*tensors)
    columns = max(1, tensors[0].shape[-1])
    tensors_2d = [t.reshape(t.numel() // columns, columns) for t in unit_columns(*tensors)]
    flat = whole and all(t.is_contiguous() for t in tensors_2d)
    return [t.view(1, -1) for t in tensors_2d] if flat else tensors_2d


@triton.jit
def product(gate, up, DTYPE: tl.constexpr):
    """Return silu(gate) up in float32, rounded to DTYPE."""
    return (gate * tl.sigmoid(gate) * up).to(DTYPE).to(tl.float32)


@triton.jit
def forward_blocks(gate, up, y, gate_stride, up_stride, K, BLOCK: tl.constexpr):
    blocks = tl.cdiv(K, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < K
    g = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * K + columns, product(g, u, y.dtype.element_ty), mask=inside)


@triton.jit
def backward_blocks(
    dy, gate, up, dgate, dup, y, dy_stride, gate_stride, up_stride, out_stride, K, BLOCK: tl.constexpr
):  # fmt: skip
    blocks = tl.cdiv(K, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < K
    d = tl.load(dy + row * dy_stride + columns, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(dgate + row * out_stride + columns, d * u * s * (1 + g * (1 - s)), mask=inside)
    tl.store(dup + row * out_stride + columns, d * g * s, mask=inside)
    if y is not None:
        tl.store(y + row * K + columns, product(g, u, y.dtype.element_ty), mask=inside)


@triton.jit
def product_tile(gate, up, gate_stride, up_stride, rows, columns, T, K):
    """Compute y [ROWS, COLUMNS] in float32, rounded to the dtype of gate; zero outside [T, K]."""
    inside = (rows[:, None] < T) & (columns[None, :] < K)
    g = tl.load(gate + rows[:, None] * gate_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + rows[:, None] * up_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    return product(g, u, gate.dtype.element_ty)


@triton.jit
def amax_tiles(
    gate, up, gate_stride, up_stride, T, K, tiles, in_force, parts, scale_inv, floor,
    MAX: tl.constexpr, POW2: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Run the first launch of delayed scaling."""
    if unknown(in_force, parts, scale_inv, floor, MAX, POW2, PARTS):
        across = tl.cdiv(K, COLUMNS)
        top = 0
        for at in range(tl.program_id(0), tiles, PARTS):
            rows = at // across * ROWS + tl.arange(0, ROWS).to(tl.int64)
            columns = at % across * COLUMNS + tl.arange(0, COLUMNS)
            y_tile = product_tile(gate, up, gate_stride, up_stride, rows, columns, T, K)
            top = tl.maximum(top, largest(y_tile, rows, T))
        tl.store(parts + tl.program_id(0), top)


@triton.jit
def forward_tiles_quantized(
    gate, up, y, codes, scale_inv, codes_t, scale_inv_t, in_force, opened, slot_stride, parts, floor,
    gate_stride, up_stride, T, K,
    MAX: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, POW2: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr, RECORD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(K, COLUMNS)
    rows = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(0) % across * COLUMNS
    columns = first + tl.arange(0, COLUMNS)
    y_tile = product_tile(gate, up, gate_stride, up_stride, rows, columns, T, K)
    if y is not None:
        tl.store(y + rows[:, None] * K + columns[None, :], y_tile, mask=(rows[:, None] < T) & (columns[None, :] < K))
    store_quantized(
        y_tile, rows, first, codes, scale_inv, codes_t, scale_inv_t, in_force, opened, slot_stride, parts, floor, T, K,
        MAX, MANTISSA, LOWEST, POW2, BLOCK, GROUP, PARTS, SLOTS, RECORD,
    )  # fmt: skip
