"""Compute a linear layer and the cross-entropy on its output, in chunks of tokens; the formula stands in kernels/reference/loss.py.

The products are torch's. One kernel turns a chunk's logits into losses and, in place, into dl = softmax - onehot: a program
takes a row, reads it once for the largest logit and the sum (rescaled as the largest grows: Milakov and Gimelshein, 2018), once
more, mostly from cache, to write dl. So no second buffer of logits is needed, and the row of a token that does not count is
only filled with zeros. A label that is neither in the vocabulary nor -100 makes the loss NaN.

C tokens a chunk, T tokens, K width, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surokit.kernels.reference.loss import IGNORED, chunk_rows

from .rows import check_dtypes

MAX_BLOCK = 8192


def forward(
    x_TK: Tensor, w_VK: Tensor, labels_T: Tensor, need_dx: bool, need_dw: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the mean loss (0-d float32) over labels other than -100, and if needed dx [T, K] and dw [V, K], in the dtypes of x and
    w."""
    T, V = x_TK.shape[0], w_VK.shape[0]
    check_dtypes(x_TK, w_VK)
    if labels_T.shape != (T,):
        raise ValueError(f"{T} tokens need labels of shape [{T}], not {list(labels_T.shape)}.")
    rows = chunk_rows(T, V, x_TK.device.type, x_TK.element_size())
    n = (labels_T != IGNORED).sum().clamp(min=1).float()
    losses_T = x_TK.new_empty(T, dtype=torch.float32)
    dx_TK = torch.empty_like(x_TK, memory_format=torch.contiguous_format) if need_dx else None
    part_VK = torch.empty_like(w_VK, memory_format=torch.contiguous_format) if need_dw else None
    # the sum over chunks; a single chunk needs none
    dw_VK = torch.zeros_like(part_VK, dtype=torch.float32) if part_VK is not None and rows != T else part_VK
    logits_buffer = x_TK.new_empty((rows, V))
    for first in range(0, T, rows):
        last = min(first + rows, T)
        logits = torch.mm(x_TK[first:last], w_VK.t(), out=logits_buffer[: last - first])
        _cross_entropy_(logits, labels_T[first:last], losses_T[first:last], gradient=need_dx or need_dw)
        dl = logits
        if dx_TK is not None:
            torch.mm(dl, w_VK, out=dx_TK[first:last])
        if part_VK is not None and dw_VK is not None:
            torch.mm(dl.t(), x_TK[first:last], out=part_VK)
            if dw_VK is not part_VK:
                dw_VK += part_VK
    # here and not in dl, which keeps its full range; n as a matrix, since a 0-d tensor would take part in bfloat16
    n_11 = n.view(1, 1)
    if dx_TK is not None:
        dx_TK.div_(n_11)
    if dw_VK is not None:
        dw_VK = dw_VK.div_(n_11).to(w_VK.dtype)
    return losses_T.sum() / n, dx_TK, dw_VK


def _cross_entropy_(logits_CV: Tensor, labels_C: Tensor, losses_C: Tensor, gradient: bool) -> None:
    """Write each row's loss, 0 where ignored; with `gradient` overwrite the logits with dl."""
    C, V = logits_CV.shape
    block = min(triton.next_power_of_2(V), MAX_BLOCK)
    cross_entropy_row[(C,)](
        logits_CV,
        labels_C,
        losses_C,
        V,
        labels_C.stride(0),
        IGNORED=IGNORED,
        GRADIENT=gradient,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )


@triton.jit
def cross_entropy_row(
    logits, labels, losses, V, label_stride, IGNORED: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row * label_stride)
    logits += row * V
    block = tl.arange(0, BLOCK)
    if label == IGNORED:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            for first in range(0, V, BLOCK):
                tl.store(logits + first + block, tl.zeros((BLOCK,), tl.float32), mask=first + block < V)
    else:
        # read before the reductions below, whose barriers keep the gradient's stores behind it
        wanted = tl.load(logits + label, mask=(label >= 0) & (label < V), other=float("nan")).to(tl.float32)
        largest = float("-inf")
        total = 0.0
        for first in range(0, V, BLOCK):
            z = tl.load(logits + first + block, mask=first + block < V, other=float("-inf")).to(tl.float32)
            larger = tl.maximum(largest, tl.max(z))
            base = tl.where(larger == float("-inf"), 0.0, larger)  # nothing but -inf so far: inf - inf is no number
            total = total * tl.exp(largest - base) + tl.sum(tl.exp(z - base))
            largest = larger
        tl.store(losses + row, largest - wanted + tl.log(total))
        if GRADIENT:
            scale = 1 / total
            for first in range(0, V, BLOCK):
                z = tl.load(logits + first + block, mask=first + block < V, other=float("-inf")).to(tl.float32)
                dl = tl.exp(z - largest) * scale - tl.where(first + block == label, 1.0, 0.0)
                tl.store(logits + first + block, dl, mask=first + block < V)
