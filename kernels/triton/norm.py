"""RMSNorm, its gradient, and its result quantized as it is made; the formulas stand in kernels/reference/norm.py.

Everything is computed in float32 and rounded once. A row is read once in each direction. The quantized form rounds y to the
dtype of x first, so that fused and unfused runs have the same codes. The gradient of the weight is summed in two stages, a few
programs a multiprocessor first, so it is the same in every run on a device.

T rows, K the width, P programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surokit.formats import E4M3, Format

from .rows import quantization, same_shape, store_quantized, tile, unit_columns

PROGRAMS_PER_MULTIPROCESSOR = 2  # of the backward pass: enough loads in flight, and little to add up afterwards


def forward(x_TK: Tensor, w_K: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y [T, K] in the dtype of x, and r [T, 1] in float32."""
    T, K = x_TK.shape
    x_TK, w_K = _checked(x_TK, w_K)
    y_TK = torch.empty_like(x_TK, memory_format=torch.contiguous_format)
    r_T1 = x_TK.new_empty((T, 1), dtype=torch.float32)
    if y_TK.numel():
        shape = tile(T, K)
        forward_rows[(triton.cdiv(T, shape["ROWS"]),)](x_TK, w_K, y_TK, r_T1, x_TK.stride(0), T, K, eps, **shape)
    return y_TK, r_T1


def forward_quantized(
    x_TK: Tensor,
    w_K: Tensor,
    eps: float,
    format: Format = E4M3,
    amax: Tensor | None = None,
    floor: float = 0.0,
    record: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [T, K] of y, their decode scales, and r [T, 1] for backward.

    amax None: a scale a row, a power of two, [T, 1]. amax [1, 1]: the one scale comes from it, [1, 1] (delayed scaling).
    floor: the least amax that counts. record: float32 [1, 1], not negative; takes the maximum of itself and y's amax.
    """
    T, K = x_TK.shape
    x_TK, w_K = _checked(x_TK, w_K)
    r_T1 = x_TK.new_empty((T, 1), dtype=torch.float32)
    codes_TK, scale_inv, outputs = quantization(x_TK, format, amax, floor, record)
    shape = tile(T, K)
    forward_rows_quantized[(max(1, triton.cdiv(T, shape["ROWS"])),)](
        x_TK, w_K, r_T1, x_stride=x_TK.stride(0), T=T, K=K, eps=eps, **outputs, **shape
    )
    return codes_TK, scale_inv, r_T1


def backward(dy_TK: Tensor, x_TK: Tensor, w_K: Tensor, r_T1: Tensor) -> tuple[Tensor, Tensor]:
    """dx [T, K] and dw [K], in the dtypes of x and w."""
    T, K = x_TK.shape
    same_shape(x_TK, dy_TK)
    x_TK, w_K = _checked(x_TK, w_K)
    (dy_TK,) = unit_columns(dy_TK)
    dx_TK = torch.empty_like(x_TK, memory_format=torch.contiguous_format)
    if dx_TK.numel() == 0:
        return dx_TK, torch.zeros_like(w_K)
    shape = tile(T, K)
    programs = min(triton.cdiv(T, shape["ROWS"]), PROGRAMS_PER_MULTIPROCESSOR * _multiprocessors(x_TK.device))
    parts_PK = x_TK.new_empty((programs, K), dtype=torch.float32)
    backward_rows[(programs,)](
        dy_TK, x_TK, w_K, r_T1.contiguous(), dx_TK, parts_PK, dy_TK.stride(0), x_TK.stride(0), T, K, **shape
    )
    return dx_TK, parts_PK.sum(0).to(w_K.dtype)


def _checked(x_TK: Tensor, w_K: Tensor) -> list[Tensor]:
    if w_K.shape != x_TK.shape[1:]:
        raise ValueError(
            f"Rows of {x_TK.shape[1]} elements need a weight of shape [{x_TK.shape[1]}], not {list(w_K.shape)}."
        )
    return unit_columns(x_TK, w_K)


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def normalize(x, w, r, x_stride, rows, columns, T, K, eps, DTYPE: tl.constexpr):
    """y [ROWS, COLUMNS] in float32 as rounded to DTYPE; stores r. Elements outside are zeros (or their row's NaN)."""
    inside = (rows[:, None] < T) & (columns[None, :] < K)
    x_tile = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    w_row = tl.load(w + columns, mask=columns < K, other=0.0).to(tl.float32)
    mean_square = tl.sum(x_tile * x_tile, axis=1) / K
    # tl.rsqrt would take a subnormal number for zero
    r_rows = tl.div_rn(tl.full(mean_square.shape, 1.0, tl.float32), tl.sqrt_rn(mean_square + eps))
    tl.store(r + rows, r_rows, mask=rows < T)
    return (x_tile * r_rows[:, None] * w_row[None, :]).to(DTYPE).to(tl.float32)


@triton.jit
def forward_rows(x, w, y, r, x_stride, T, K, eps, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    y_tile = normalize(x, w, r, x_stride, rows, columns, T, K, eps, x.dtype.element_ty)
    tl.store(y + rows[:, None] * K + columns[None, :], y_tile, mask=(rows[:, None] < T) & (columns[None, :] < K))


@triton.jit
def forward_rows_quantized(
    x,
    w,
    r,
    codes,
    scale_inv,
    amax,
    record,
    floor,
    x_stride,
    T,
    K,
    eps,
    MAX: tl.constexpr,
    MANTISSA: tl.constexpr,
    LOWEST: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    y_tile = normalize(x, w, r, x_stride, rows, columns, T, K, eps, x.dtype.element_ty)
    store_quantized(y_tile, rows, columns, codes, scale_inv, amax, record, floor, T, K, MAX, MANTISSA, LOWEST, GROUP)


@triton.jit
def backward_rows(dy, x, w, r, dx, parts, dy_stride, x_stride, T, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    program = tl.program_id(0)
    columns = tl.arange(0, COLUMNS)
    w_row = tl.load(w + columns, mask=columns < K, other=0.0).to(tl.float32)
    dw = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(program * ROWS, T, tl.num_programs(0) * ROWS):
        rows = first + tl.arange(0, ROWS).to(tl.int64)
        inside = (rows[:, None] < T) & (columns[None, :] < K)
        r_rows = tl.load(r + rows, mask=rows < T, other=0.0)
        h = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        h *= r_rows[:, None]
        g = tl.load(dy + rows[:, None] * dy_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        dw += g * h
        g *= w_row[None, :]
        mean_gh = tl.sum(g * h, axis=1) / K
        dx_tile = (g - h * mean_gh[:, None]) * r_rows[:, None]
        tl.store(dx + rows[:, None] * K + columns[None, :], dx_tile, mask=inside)
    tl.store(parts + program * K + columns, tl.sum(dw, axis=0), mask=columns < K)
