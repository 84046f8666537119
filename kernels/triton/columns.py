"""Update a weight's columns whose states are rows: AdamW on them, and the way there and back, a launch each; definitions in
kernels/reference/columns.py.

A program holds a tile of some columns and some rows of the weight. Of the weight and the gradient it takes a row's elements in a
warp, so that neighbouring columns come in one sector of 32 bytes; of the states it takes a column's; the transposition between goes
through shared memory. Programs side by side have the same rows and the next columns: what lies in a sector that two of them need
is in the L2 cache, and memory is read once, in whatever order the columns are.

Bytes of an update, for the share k of the columns, W and the gradient of b bytes an element: states 24 k; of the gradient each
sector with one of the columns, (1 - (1 - k)^(32 / b)) b an element if they lie anywhere; of the weight the same sectors written,
and read before that where not all of a sector is new. For bfloat16 and k = .1 that is 2.4 + 1.6 + 3.3 bytes a parameter of the
weight. The weight itself is never read: its float32 rows are what it is written from.

torch's index_select and index_copy_ of the transposed weight go along its rows too, but then each thread writes to (or reads
from) another column of the states: a sector an element, 16 times the traffic of the L2 cache. So these are kernels as well.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from surokit.kernels.reference.columns import corrections

from .rows import check_dtypes

COLUMNS, ELEMENTS = 32, 2048  # of a tile, at most


@torch.no_grad()
def update_columns_(
    W_OI: Tensor,
    g_OI: Tensor,
    index_C: Tensor,
    w_CO: Tensor,
    m_CO: Tensor,
    v_CO: Tensor,
    clocks_C: Tensor,
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Update W's columns, w, m, v and the clocks in place, in one launch; never read a value on the host.

    The arguments are the definition's; w, m and v contiguous. lr, grad_scale and found_inf, where they are tensors, are on the
    weight's device.
    """
    check_dtypes(W_OI, g_OI)
    _check(W_OI, index_C, w_CO, m_CO, v_CO)
    if g_OI.shape != W_OI.shape:
        raise ValueError(f"The gradient {list(g_OI.shape)} needs the shape of its weight {list(W_OI.shape)}.")
    if clocks_C.dtype != torch.int32 or clocks_C.shape != index_C.shape or not clocks_C.is_contiguous():
        raise ValueError(
            f"{len(index_C)} columns have contiguous int32 clocks [{len(index_C)}], not {clocks_C.dtype} {list(clocks_C.shape)}."
        )
    for state in (w_CO, m_CO, v_CO):
        if state.dtype != torch.float32:
            raise TypeError(f"States of columns are float32, not {state.dtype}.")
    C, O = w_CO.shape  # noqa: E741
    if not C or not O:
        clocks_C += 1 if found_inf is None else (found_inf == 0).to(torch.int32)
        return
    table_2T = corrections(beta1, beta2, W_OI.device)
    programs, shape = _tiles(C, O)
    update_tile[(programs,)](
        W_OI,
        g_OI,
        index_C,
        w_CO,
        m_CO,
        v_CO,
        clocks_C,
        _arrivals(W_OI.device, C),
        table_2T,
        table_2T.shape[1],
        C,
        O,
        *W_OI.stride(),
        *g_OI.stride(),
        lr if isinstance(lr, Tensor) else float(lr),
        grad_scale,
        found_inf,
        1.0 - beta1,
        float(beta2),
        1.0 - beta2,
        float(weight_decay),
        float(eps),
        LR_LOADED=isinstance(lr, Tensor),
        **shape,
    )


def gather(src_OI: Tensor, index_C: Tensor, out_CO: Tensor) -> None:
    """Set out = src[:, index]', rounded to nearest where out's dtype is narrower; out is contiguous."""
    _move(gather_tile, src_OI, index_C, out_CO)


def scatter_(dst_OI: Tensor, index_C: Tensor, rows_CO: Tensor) -> None:
    """Write dst[:, index] = rows', rounded to nearest in dst's dtype; rows contiguous, no column twice."""
    _move(scatter_tile, dst_OI, index_C, rows_CO)


def _move(kernel: Any, weight_OI: Tensor, index_C: Tensor, rows_CO: Tensor) -> None:
    check_dtypes(weight_OI, rows_CO)
    _check(weight_OI, index_C, rows_CO)
    C, O = rows_CO.shape  # noqa: E741
    if C and O:
        programs, shape = _tiles(C, O)
        kernel[(programs,)](weight_OI, index_C, rows_CO, C, O, *weight_OI.stride(), **shape)


def _tiles(C: int, O: int) -> tuple[int, dict[str, int]]:  # noqa: E741
    """Return the programs of a launch and, as its keywords, columns and rows of a tile."""
    columns = min(triton.next_power_of_2(C), COLUMNS)
    rows = ELEMENTS // columns
    return triton.cdiv(C, columns) * triton.cdiv(O, rows), {"COLUMNS": columns, "ROWS": rows, "num_warps": 4}


def _check(weight_OI: Tensor, index_C: Tensor, *rows: Tensor) -> None:
    """Raise ValueError for shapes or strides with which a kernel would read or write out of bounds."""
    shape = (*index_C.shape, weight_OI.shape[0])
    if index_C.dtype not in (torch.int32, torch.int64) or index_C.ndim != 1 or not index_C.is_contiguous():
        raise ValueError(
            f"An index of columns is contiguous int32 or int64 [C], not {index_C.dtype} {list(index_C.shape)}."
        )
    for x in rows:
        if x.shape != shape or not x.is_contiguous():
            raise ValueError(
                f"Rows of {len(index_C)} columns of a weight {list(weight_OI.shape)} are contiguous {list(shape)}, "
                f"not {list(x.shape)} with strides {x.stride()}."
            )


_counters: dict[tuple[torch.device, Any], Tensor] = {}


def _arrivals(device: torch.device, C: int) -> Tensor:
    """Return int32 counters, at least one for each block of columns; they are zero, and a launch leaves them zero.

    Each stream has its own counters, because only launches on one stream wait for one another.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
    counters = _counters.get((device, stream))
    if counters is None or len(counters) < C:
        length = triton.next_power_of_2(max(C, 1 << 14))
        counters = _counters[device, stream] = torch.zeros(length, dtype=torch.int32, device=device)
    return counters


@triton.jit
def places(index, C, O, row_stride, column_stride, COLUMNS: tl.constexpr, ROWS: tl.constexpr):  # noqa: E741
    """Return a program's columns c and rows o, and its offsets [ROWS, COLUMNS] in the weight and [COLUMNS, ROWS] in the states."""
    across = tl.cdiv(C, COLUMNS)
    c = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    o = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.load(index + c, mask=c < C, other=0).to(tl.int64)
    return c, o, o[:, None] * row_stride + column[None, :] * column_stride, c[:, None].to(tl.int64) * O + o[None, :]


@triton.jit
def gather_tile(src, index, out, C, O, row_stride, column_stride, COLUMNS: tl.constexpr, ROWS: tl.constexpr):  # noqa: E741
    c, o, at_src, at = places(index, C, O, row_stride, column_stride, COLUMNS, ROWS)
    x = tl.load(src + at_src, mask=(o[:, None] < O) & (c[None, :] < C), other=0)
    if x.dtype != out.dtype.element_ty:
        x = x.to(tl.float32)
    tl.store(out + at, tl.trans(x), mask=(c[:, None] < C) & (o[None, :] < O))


@triton.jit
def scatter_tile(dst, index, rows, C, O, row_stride, column_stride, COLUMNS: tl.constexpr, ROWS: tl.constexpr):  # noqa: E741
    c, o, at_dst, at = places(index, C, O, row_stride, column_stride, COLUMNS, ROWS)
    x = tl.load(rows + at, mask=(c[:, None] < C) & (o[None, :] < O), other=0)
    x = x.to(tl.float32).to(dst.dtype.element_ty)
    tl.store(dst + at_dst, tl.trans(x), mask=(o[:, None] < O) & (c[None, :] < C))


@triton.jit(do_not_specialize=["clocks_known"])
def update_tile(
    W, grad, index, w, m, v, clocks, arrivals, table, clocks_known, C, O, W_row_stride, W_column_stride,  # noqa: E741
    grad_row_stride, grad_column_stride, lr, grad_scale, found_inf,
    one_minus_beta1, beta2, one_minus_beta2, weight_decay, eps,
    LR_LOADED: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    masked = 0.0
    if found_inf is not None:
        masked = tl.load(found_inf).to(tl.float32)
    if masked == 0:
        rate = lr
        if LR_LOADED:
            rate = tl.load(lr).to(tl.float32)
        c, o, at_grad, at = places(index, C, O, grad_row_stride, grad_column_stride, COLUMNS, ROWS)
        there, there_t = (o[:, None] < O) & (c[None, :] < C), (c[:, None] < C) & (o[None, :] < O)
        g = tl.trans(tl.load(grad + at_grad, mask=there, other=0).to(tl.float32))
        if grad_scale is not None:
            g = tl.div_rn(g, tl.zeros_like(g) + tl.load(grad_scale).to(tl.float32))
        t = tl.load(clocks + c, mask=c < C, other=0) + 1
        entry = table + tl.minimum(t, clocks_known - 1)
        size, root = rate * tl.load(entry), tl.load(entry + clocks_known)
        m_old = tl.load(m + at, mask=there_t, other=0)
        m_new = m_old + one_minus_beta1 * (g - m_old)
        tl.store(m + at, m_new, mask=there_t)
        v_new = beta2 * tl.load(v + at, mask=there_t, other=0) + one_minus_beta2 * g * g
        tl.store(v + at, v_new, mask=there_t)
        w_old = tl.load(w + at, mask=there_t, other=0)
        w_new = w_old * (1 - rate * weight_decay) - size[:, None] * m_new / (tl.sqrt_rn(v_new) * root[:, None] + eps)
        tl.store(w + at, w_new, mask=there_t)
        _, _, at_W, _ = places(index, C, O, W_row_stride, W_column_stride, COLUMNS, ROWS)
        tl.store(W + at_W, tl.trans(w_new.to(W.dtype.element_ty)), mask=there)
        # the last program of a block of columns advances the clocks: by then all have read them
        tl.debug_barrier()
        block = tl.program_id(0) % tl.cdiv(C, COLUMNS)
        if tl.atomic_add(arrivals + block, 1) == tl.cdiv(O, ROWS) - 1:
            tl.store(clocks + c, t, mask=c < C)
            tl.store(arrivals + block, 0)
