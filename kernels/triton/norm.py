"""Compute RMSNorm, its gradient, and its result quantized as it is made; the formulas stand in kernels/reference/norm.py.

Everything is computed in float32 and rounded once. A row is read once in each direction, and the residual sum before the norm
and the residual's gradient after it are part of that read. The quantized form rounds y to the dtype of x first, so that fused
and unfused runs have the same codes. In both orientations a program makes a few rows one after the other and then turns their
codes, which a cache still holds: nothing but the second codes is moved more. The gradient of the weight is summed in two
stages, a few programs a multiprocessor first, so it is the same in every run on a device.

T rows, K the width, P programs.
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

WARPS = 16  # of a multiprocessor for the weight's gradient: what its registers hold, and few parts to add up afterwards
HIGH = 16  # rows of a program that stores transposed codes too: 16 bytes of a column at once
PREFETCHED = 8192  # longest row of which the next one is fetched meanwhile: three of float32 fill shared memory


def forward(x_TK: Tensor, w_K: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return y [T, K] in the dtype of x, and r [T, 1] in float32."""
    _, y_TK, r_T1 = _forward(x_TK, None, w_K, eps)
    return y_TK, r_T1


def add_forward(x_TK: Tensor, delta_TK: Tensor, w_K: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + delta [T, K], rounded to the dtype of x, then its y and r as `forward` gives them."""
    sum_TK, y_TK, r_T1 = _forward(x_TK, delta_TK, w_K, eps)
    assert sum_TK is not None
    return sum_TK, y_TK, r_T1


def recompute(x_TK: Tensor, w_K: Tensor, r_T1: Tensor) -> Tensor:
    """Compute the y of `forward` once more, bit for bit, from the tensors that backward keeps."""
    return _forward(x_TK, None, w_K, 0.0, r_T1.contiguous())[1]


def forward_quantized(
    x_TK: Tensor,
    w_K: Tensor,
    eps: float,
    format: Format = E4M3,
    *,
    delta: Tensor | None = None,
    values: bool = False,
    **scaling: Any,
) -> tuple[Any, ...]:
    """Return the codes [T, K] of y, their decode scales, and r [T, 1]; then x + delta [T, K] where a delta is given, and y if
    `values`.

    scaling: columns, pow2, floor, in_force, opened, record, both, as `quantized` in kernels/reference/rows.py has them. `both` is
    for delayed scales; codes [K, T] and their decode scale then come before r.
    """
    if apart(x_TK):
        sum_TK, y, r_T1 = _forward(x_TK, delta, w_K, eps)
        return *quantized(y, format, **scaling), r_T1, sum_TK, y if values else None
    shape = tile(x_TK.shape[1])
    inputs, sum_TK = _inputs(x_TK, delta, w_K, eps)
    tiles = programs(x_TK, shape)
    parts, first, outputs = quantization(x_TK, shape, format, **scaling)
    r_T1 = x_TK.new_empty((len(x_TK), 1), dtype=torch.float32)
    y_TK = _like(x_TK) if values else None
    if first:
        amax_rows[(first["PARTS"],)](**inputs, **first, tiles=tiles, **shape)
    outputs |= {"total": sum_TK, "y": y_TK, "r": r_T1}
    if scaling.get("both"):
        high = max(HIGH, shape["ROWS"])
        chunk = min(shape["COLUMNS"], 512 * shape["num_warps"] // high)  # 16 codes a thread
        stages = 2 if shape["COLUMNS"] <= PREFETCHED else 1
        grid = (triton.cdiv(len(x_TK), high),)
        forward_rows_both[grid](**inputs, **outputs, **shape, HIGH=high, CHUNK=chunk, STAGES=stages)
    else:
        forward_rows_quantized[(tiles,)](**inputs, **outputs, **shape)
    return *parts, r_T1, sum_TK, y_TK


def backward(
    dy_TK: Tensor,
    x_TK: Tensor,
    w_K: Tensor,
    r_T1: Tensor,
    residual: Tensor | None = None,
    need_dw: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return dx [T, K] and dw [K], in the dtypes of x and w; dw is None unless `need_dw`.

    residual [T, K]: another gradient of x, which is added before dx is rounded.
    """
    T, K = x_TK.shape
    same_shape(x_TK, dy_TK, *(() if residual is None else (residual,)))
    x_TK, w_K = _checked(x_TK, w_K)
    (dy_TK,) = unit_columns(dy_TK)
    if residual is not None:
        (residual,) = unit_columns(residual)
    dx_TK = _like(x_TK)
    if dx_TK.numel() == 0:
        return dx_TK, torch.zeros_like(w_K) if need_dw else None
    shape = tile(K)
    count = programs(x_TK, shape)
    parts_PK = None
    if need_dw:
        count = min(count, max(1, WARPS // shape["num_warps"]) * _multiprocessors(x_TK.device))
        parts_PK = x_TK.new_empty((count, K), dtype=torch.float32)
    strides = dy_TK.stride(0), x_TK.stride(0), 0 if residual is None else residual.stride(0)
    stages = 2 if need_dw and shape["COLUMNS"] <= PREFETCHED else 1
    backward_rows[(count,)](
        dy_TK, x_TK, w_K, r_T1.contiguous(), residual, dx_TK, parts_PK, *strides, T, K, STAGES=stages, **shape
    )
    if parts_PK is None:
        return dx_TK, None
    dw_K = torch.empty_like(w_K)
    sum_parts[(triton.cdiv(K, 32),)](parts_PK, dw_K, count, K, ROWS=128, COLUMNS=32)
    return dx_TK, dw_K


def _forward(
    x_TK: Tensor, delta_TK: Tensor | None, w_K: Tensor, eps: float, r_T1: Tensor | None = None
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return x + delta where there is a delta, y, and r, which is computed unless it is given."""
    inputs, sum_TK = _inputs(x_TK, delta_TK, w_K, eps)
    known = r_T1 is not None
    y_TK = _like(x_TK)
    r_T1 = x_TK.new_empty((len(x_TK), 1), dtype=torch.float32) if r_T1 is None else r_T1
    if y_TK.numel():
        shape = tile(x_TK.shape[1])
        grid = (programs(x_TK, shape),)
        forward_rows[grid](**inputs, total=sum_TK, y=y_TK, r=r_T1, KNOWN=known, **shape)
    return sum_TK, y_TK, r_T1


def _inputs(x_TK: Tensor, delta_TK: Tensor | None, w_K: Tensor, eps: float) -> tuple[dict[str, Any], Tensor | None]:
    """Return the inputs of every forward kernel, as keywords, and an empty tensor for x + delta if there is a delta."""
    x_TK, w_K = _checked(x_TK, w_K)
    inputs = {"x": x_TK, "w": w_K, "x_stride": x_TK.stride(0), "T": len(x_TK), "K": len(w_K), "eps": eps}
    if delta_TK is None:
        return {**inputs, "delta": None, "delta_stride": 0}, None
    same_shape(x_TK, delta_TK)
    (delta_TK,) = unit_columns(delta_TK)
    return {**inputs, "delta": delta_TK, "delta_stride": delta_TK.stride(0)}, _like(x_TK)


def _checked(x_TK: Tensor, w_K: Tensor) -> list[Tensor]:
    if w_K.shape != x_TK.shape[1:]:
        raise ValueError(
            f"Rows of {x_TK.shape[1]} elements need a weight of shape [{x_TK.shape[1]}], not {list(w_K.shape)}."
        )
    return unit_columns(x_TK, w_K)


def _like(x_TK: Tensor) -> Tensor:
    return torch.empty_like(x_TK, memory_format=torch.contiguous_format)


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def normalize(x, delta, total, w, r, x_stride, delta_stride, rows, columns, T, K, eps, KNOWN: tl.constexpr):
    """Return y [ROWS, COLUMNS] in float32, rounded to the dtype of x. Elements outside are zeros (or their row's NaN).

    delta: None, or added to x. total: None, or where x + delta is stored. r: None, or where r is stored, or with KNOWN read.
    """
    inside = (rows[:, None] < T) & (columns[None, :] < K)
    x_tile = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    w_row = tl.load(w + columns, mask=columns < K, other=0.0).to(tl.float32)
    if delta is not None:
        at = delta + rows[:, None] * delta_stride + columns[None, :]
        x_tile += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        x_tile = x_tile.to(x.dtype.element_ty).to(tl.float32)
        if total is not None:
            tl.store(total + rows[:, None] * K + columns[None, :], x_tile, mask=inside)
    if KNOWN:
        r_rows = tl.load(r + rows, mask=rows < T, other=0.0)
    else:
        mean_square = tl.sum(x_tile * x_tile, axis=1) / K
        # tl.rsqrt would take a subnormal number for zero
        r_rows = tl.div_rn(tl.full(mean_square.shape, 1.0, tl.float32), tl.sqrt_rn(mean_square + eps))
        if r is not None:
            tl.store(r + rows, r_rows, mask=rows < T)
    return (x_tile * r_rows[:, None] * w_row[None, :]).to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def forward_rows(
    x, delta, total, w, y, r, x_stride, delta_stride, T, K, eps,
    KNOWN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    y_tile = normalize(x, delta, total, w, r, x_stride, delta_stride, rows, columns, T, K, eps, KNOWN)
    tl.store(y + rows[:, None] * K + columns[None, :], y_tile, mask=(rows[:, None] < T) & (columns[None, :] < K))


@triton.jit
def amax_rows(
    x, delta, w, x_stride, delta_stride, T, K, eps, tiles, in_force, parts, scale_inv, floor,
    MAX: tl.constexpr, POW2: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Run the first launch of delayed scaling."""
    if unknown(in_force, parts, scale_inv, floor, MAX, POW2, PARTS):
        columns = tl.arange(0, COLUMNS)
        top = 0
        for at in range(tl.program_id(0), tiles, PARTS):
            rows = at * ROWS + tl.arange(0, ROWS).to(tl.int64)
            y_tile = normalize(x, delta, None, w, None, x_stride, delta_stride, rows, columns, T, K, eps, False)
            top = tl.maximum(top, largest(y_tile, rows, T))
        tl.store(parts + tl.program_id(0), top)


@triton.jit
def forward_rows_quantized(
    x, delta, total, w, y, r, codes, scale_inv, codes_t, scale_inv_t, in_force, opened, slot_stride, parts, floor,
    x_stride, delta_stride, T, K, eps,
    MAX: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, POW2: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr, RECORD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    y_tile = normalize(x, delta, total, w, r, x_stride, delta_stride, rows, columns, T, K, eps, False)
    if y is not None:
        tl.store(y + rows[:, None] * K + columns[None, :], y_tile, mask=(rows[:, None] < T) & (columns[None, :] < K))
    store_quantized(
        y_tile, rows, 0, codes, scale_inv, codes_t, scale_inv_t, in_force, opened, slot_stride, parts, floor, T, K,
        MAX, MANTISSA, LOWEST, POW2, BLOCK, GROUP, PARTS, SLOTS, RECORD,
    )  # fmt: skip


@triton.jit
def forward_rows_both(
    x, delta, total, w, y, r, codes, scale_inv, codes_t, scale_inv_t, in_force, opened, slot_stride, parts, floor,
    x_stride, delta_stride, T, K, eps,
    MAX: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, POW2: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr, RECORD: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, HIGH: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Do what forward_rows_quantized does for HIGH rows a program, then transpose their codes, which a cache still holds."""
    first = tl.program_id(0).to(tl.int64) * HIGH
    columns = tl.arange(0, COLUMNS)
    for row in tl.range(first, tl.minimum(first + HIGH, T), ROWS, num_stages=STAGES):
        rows = row + tl.arange(0, ROWS)
        y_tile = normalize(x, delta, total, w, r, x_stride, delta_stride, rows, columns, T, K, eps, False)
        if y is not None:
            tl.store(
                y + rows[:, None] * K + columns[None, :], y_tile, mask=(rows[:, None] < T) & (columns[None, :] < K)
            )
        store_quantized(
            y_tile, rows, 0, codes, scale_inv, None, None, in_force, opened, slot_stride, parts, floor, T, K,
            MAX, MANTISSA, LOWEST, POW2, BLOCK, GROUP, PARTS, SLOTS, RECORD,
        )  # fmt: skip
    tl.debug_barrier()  # what other threads of the program stored is there to be read
    down = first + tl.arange(0, HIGH)
    for column in range(0, K, CHUNK):
        across = column + tl.arange(0, CHUNK)
        inside = (down[:, None] < T) & (across[None, :] < K)
        # in groups as they were stored, for the reason that stands in store_quantized
        at = tl.max_contiguous(down[:, None] * K + across[None, :], (1, GROUP))
        tile = tl.load(codes + at, mask=inside, other=0.0)
        at_t = across[:, None].to(tl.int64) * T + down[None, :]
        tl.store(codes_t + at_t, tl.trans(tile), mask=(across[:, None] < K) & (down[None, :] < T))


@triton.jit
def backward_rows(
    dy, x, w, r, residual, dx, parts, dy_stride, x_stride, residual_stride, T, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dx, and into `parts` each program's sum for the gradient of the weight.

    parts None: no gradient of the weight, and a program for each tile. STAGES: 2 fetches the next rows meanwhile.
    """
    program = tl.program_id(0)
    columns = tl.arange(0, COLUMNS)
    if STAGES > 1:
        w_row = tl.load(w + columns, mask=columns < K, other=0.0).to(tl.float32)
    if parts is not None:
        dw = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in tl.range(program * ROWS, T, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = first + tl.arange(0, ROWS).to(tl.int64)
        inside = (rows[:, None] < T) & (columns[None, :] < K)
        r_rows = tl.load(r + rows, mask=rows < T, other=0.0)
        h = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        h *= r_rows[:, None]
        g = tl.load(dy + rows[:, None] * dy_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        if parts is not None:
            dw += g * h
        if STAGES == 1:  # a cache holds it as well, and the registers serve more warps
            w_row = tl.load(w + columns, mask=columns < K, other=0.0).to(tl.float32)
        g *= w_row[None, :]
        mean_gh = tl.sum(g * h, axis=1) / K
        dx_tile = (g - h * mean_gh[:, None]) * r_rows[:, None]
        if residual is not None:
            at = residual + rows[:, None] * residual_stride + columns[None, :]
            dx_tile += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + rows[:, None] * K + columns[None, :], dx_tile, mask=inside)
    if parts is not None:
        tl.store(parts + program * K + columns, tl.sum(dw, axis=0), mask=columns < K)


@triton.jit
def sum_parts(parts, dw, P, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, P, ROWS):
        rows = first + tl.arange(0, ROWS)
        inside = (rows[:, None] < P) & (columns[None, :] < K)
        total += tl.load(parts + rows[:, None] * K + columns[None, :], mask=inside, other=0.0)
    tl.store(dw + columns, tl.sum(total, axis=0), mask=columns < K)
