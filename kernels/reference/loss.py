"""Define a linear layer and the cross-entropy on its output, in chunks of tokens: the logits are never whole.

    l_CV = x_CK w_VK'         loss = sum over counted tokens of (logsumexp(l) - l[label]) / n
    dl = (softmax(l) - onehot(label)) / n         dx = dl w         dw = sum over chunks of dl' x

The gradients are made in the same pass, while a chunk's logits are there. The softmax is float32, the products take dl in the
dtype of x; 1/n and the ignored rows are applied to the small factors (dx, and x in dw), so dl keeps its full range. dw is
summed over chunks in float32. C tokens a chunk, T tokens, K width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .matmul import addmm_, mm

IGNORED = -100
CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 640 << 20}  # of logits: a CPU's caches, a small part of a GPU's memory
MIN_ROWS = 64
# a GPU's product of a chunk wants whole tiles, and enough of them for all multiprocessors; more rows bring nothing
TILE_ROWS, MAX_ROWS = 128, 2048


def chunk_rows(tokens: int, vocabulary: int, device: str, itemsize: int = 4) -> int:
    """Return the number of tokens whose logits, of `itemsize` bytes with all copies, are held at once: few enough for memory,
    enough for a product."""
    rows = max(MIN_ROWS, CHUNK_BYTES.get(device, CHUNK_BYTES["cuda"]) // max(vocabulary * itemsize, 1))
    if device != "cpu" and rows >= TILE_ROWS:
        rows = min(MAX_ROWS, rows - rows % TILE_ROWS)
    return max(1, min(tokens, rows))


def forward(
    x_TK: Tensor, w_VK: Tensor, labels_T: Tensor, need_dx: bool, need_dw: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the mean loss (0-d float32) over labels other than -100, and where asked dx [T, K] and dw [V, K] in their own
    dtypes."""
    T, V = x_TK.shape[0], w_VK.shape[0]
    on_cpu = x_TK.device.type == "cpu"
    rows = chunk_rows(T, V, x_TK.device.type, 4 if on_cpu or x_TK.dtype == torch.float32 else 4 + x_TK.element_size())
    counted_T1 = (labels_T != IGNORED).unsqueeze(1)
    n = counted_T1.sum().clamp(min=1).float()
    share_T1 = counted_T1 / n
    index_T1 = labels_T.where(labels_T != IGNORED, 0).unsqueeze(1)

    loss = x_TK.new_zeros((), dtype=torch.float32)
    dx_TK = torch.empty_like(x_TK) if need_dx else None
    part_VK = torch.empty_like(w_VK) if need_dw else None
    # the sum over chunks; a single chunk needs none
    dw_VK = torch.zeros_like(w_VK, dtype=torch.float32) if need_dw and rows != T else part_VK
    logits_buffer = x_TK.new_empty((rows, V))
    # in float32 one buffer serves as both
    p_buffer = logits_buffer if x_TK.dtype == torch.float32 else x_TK.new_empty((rows, V), dtype=torch.float32)
    minus_one = x_TK.new_full((1, 1), -1.0, dtype=torch.float32)
    for first in range(0, T, rows):
        last = min(first + rows, T)
        x, counted, index = x_TK[first:last], counted_T1[first:last], index_T1[first:last]
        logits = addmm_(logits_buffer[: last - first], x, w_VK.t(), beta=0.0)
        p = p_buffer[: last - first].copy_(logits)
        torch.log_softmax(p, -1, out=p)
        loss -= p.gather(1, index).mul_(counted).sum()
        if not (need_dx or need_dw):
            continue
        dl = logits.copy_(p.exp_().scatter_add_(1, index, minus_one.expand(last - first, 1)))
        if dx_TK is not None:
            dx_TK[first:last] = mm(dl, w_VK) * share_T1[first:last]
        if part_VK is not None and dw_VK is not None:
            addmm_(part_VK, dl.t(), x * counted, beta=0.0)
            if dw_VK is not part_VK:
                dw_VK += part_VK
    if dw_VK is not None:
        # a number of one element, not of none: that would take the dtype of dw, and bfloat16 has no 257
        dw_VK = dw_VK.div_(n.view(1, 1)).to(w_VK.dtype)
    return loss / n, dx_TK, dw_VK
