"""SwiGLU, y = silu(gate) up, its gradient, and y quantized as it is made; the formulas stand in kernels/reference/swiglu.py.

Everything is computed in float32 and rounded once. gate and up may be the two halves of one product: rows with any stride need
no copy. The quantized form rounds y to the inputs' dtype first, so that fused and unfused runs have the same codes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surokit.formats import E4M3, Format

from .rows import quantization, same_shape, store_quantized, tile, unit_columns

BLOCK = 1024


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """y in the dtype of gate."""
    y = torch.empty_like(gate, memory_format=torch.contiguous_format)
    gate, up = _as_rows(gate, up)
    if y.numel():
        M, K = gate.shape
        forward_blocks[(M * triton.cdiv(K, BLOCK),)](gate, up, y, gate.stride(0), up.stride(0), K, BLOCK=BLOCK)
    return y


def backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """dgate and dup; two tensors are allocated, both are returned."""
    dgate = torch.empty_like(gate, memory_format=torch.contiguous_format)
    dup = torch.empty_like(up, memory_format=torch.contiguous_format)
    dy, gate, up = _as_rows(dy, gate, up)
    if dgate.numel():
        M, K = gate.shape
        backward_blocks[(M * triton.cdiv(K, BLOCK),)](
            dy, gate, up, dgate, dup, dy.stride(0), gate.stride(0), up.stride(0), K, BLOCK=BLOCK
        )
    return dgate, dup


def forward_quantized(
    gate_TK: Tensor,
    up_TK: Tensor,
    format: Format = E4M3,
    amax: Tensor | None = None,
    floor: float = 0.0,
    record: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes [T, K] of y and their decode scales; backward needs gate and up only.

    amax None: a scale a row, a power of two, [T, 1]. amax [1, 1]: the one scale comes from it, [1, 1] (delayed scaling).
    floor: the least amax that counts. record: float32 [1, 1], not negative; takes the maximum of itself and y's amax.
    """
    T, K = gate_TK.shape
    same_shape(gate_TK, up_TK)
    gate_TK, up_TK = unit_columns(gate_TK, up_TK)
    codes_TK, scale_inv, outputs = quantization(gate_TK, format, amax, floor, record)
    shape, strides = tile(T, K), {"gate_stride": gate_TK.stride(0), "up_stride": up_TK.stride(0)}
    forward_rows_quantized[(max(1, triton.cdiv(T, shape["ROWS"])),)](
        gate_TK, up_TK, T=T, K=K, **strides, **outputs, **shape
    )
    return codes_TK, scale_inv


def _as_rows(*tensors: Tensor) -> list[Tensor]:
    """Views [rows, columns]: one long row where all are contiguous, else the last dimension is kept."""
    same_shape(*tensors)
    columns = max(1, tensors[0].shape[-1])
    tensors_2d = [t.reshape(t.numel() // columns, columns) for t in unit_columns(*tensors)]
    return [t.view(1, -1) for t in tensors_2d] if all(t.is_contiguous() for t in tensors_2d) else tensors_2d


@triton.jit
def product(gate, up, DTYPE: tl.constexpr):
    """silu(gate) up in float32 as rounded to DTYPE."""
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
def backward_blocks(dy, gate, up, dgate, dup, dy_stride, gate_stride, up_stride, K, BLOCK: tl.constexpr):
    blocks = tl.cdiv(K, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < K
    d = tl.load(dy + row * dy_stride + columns, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(dgate + row * K + columns, d * u * s * (1 + g * (1 - s)), mask=inside)
    tl.store(dup + row * K + columns, d * g * s, mask=inside)


@triton.jit
def forward_rows_quantized(
    gate,
    up,
    codes,
    scale_inv,
    amax,
    record,
    floor,
    gate_stride,
    up_stride,
    T,
    K,
    MAX: tl.constexpr,
    MANTISSA: tl.constexpr,
    LOWEST: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = (rows[:, None] < T) & (columns[None, :] < K)
    g = tl.load(gate + rows[:, None] * gate_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + rows[:, None] * up_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    y = product(g, u, gate.dtype.element_ty)
    store_quantized(y, rows, columns, codes, scale_inv, amax, record, floor, T, K, MAX, MANTISSA, LOWEST, GROUP)
