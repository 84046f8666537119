"""Define updates of a weight's columns whose states are rows: AdamW on them, and the way there and back.

A weight W [O, I] is row-major, and of some of its columns float32 states are kept transposed, [C, O]: a master w of the weight and
the two moments. `index` says which columns they are. Every column has a clock t of its own: the updates it has had.

    t = t + 1
    g = grad[:, index]' / grad_scale
    m = m + (1 - beta1) (g - m)                 v = beta2 v + (1 - beta2) g g
    w = w (1 - lr weight_decay) - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    W[:, index] = w'

Arithmetic is in float32; only W is rounded to a dtype of its own. Where `found_inf` is not 0 nothing changes, t included.

    C columns; O output rows of the weight; I its input columns; T clocks
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

_LONGEST = 1 << 24  # clocks of a table of corrections: 128 MiB


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
    """Update W's columns, w, m, v and the clocks in place; never read a value on the host.

    W, g: [O, I], floating point. index_C: int32 or int64, no column twice. w, m, v: float32 [C, O]. clocks_C: int32.
    lr: a float, or 0-d on the device. grad_scale: 0-d, gradients are divided by it (None: 1). found_inf: 0-d, what is not 0 masks
    the whole step (None: 0).
    """
    device = w_CO.device
    keep = torch.zeros((), dtype=torch.bool, device=device) if found_inf is None else found_inf.to(device) != 0
    t_C = clocks_C + 1
    table_2T = corrections(beta1, beta2, device)
    size_C, root_C = table_2T.index_select(1, t_C.clamp(max=table_2T.shape[1] - 1))
    lr_ = lr.to(device, torch.float32) if isinstance(lr, Tensor) else torch.tensor(lr, device=device)
    g = torch.empty_like(w_CO)
    gather(g_OI, index_C, g)
    if grad_scale is not None:
        g = g / grad_scale.to(device)
    m = m_CO + (1 - beta1) * (g - m_CO)
    v = beta2 * v_CO + (1 - beta2) * g * g
    root = v.double().sqrt().float()  # to nearest, which torch's float32 root is not on every CPU
    w = w_CO * (1 - lr_ * weight_decay) - (lr_ * size_C)[:, None] * m / (root * root_C[:, None] + eps)
    for old, new in ((w_CO, w), (m_CO, m), (v_CO, v), (clocks_C, t_C)):
        old.copy_(torch.where(keep, old, new))
    before = torch.empty_like(w_CO, dtype=W_OI.dtype)
    gather(W_OI, index_C, before)
    scatter_(W_OI, index_C, torch.where(keep, before, w.to(W_OI.dtype)))


def gather(src_OI: Tensor, index_C: Tensor, out_CO: Tensor) -> None:
    """Write out = src[:, index]', in out's dtype; rounded to nearest where that is narrower."""
    out_CO.copy_(src_OI.t().index_select(0, index_C))


def scatter_(dst_OI: Tensor, index_C: Tensor, rows_CO: Tensor) -> None:
    """Write dst[:, index] = rows', rounded to nearest in dst's dtype; no column twice."""
    dst_OI.t().index_copy_(0, index_C.long(), rows_CO.to(dst_OI.dtype))


@cache
def corrections(beta1: float, beta2: float, device: torch.device) -> Tensor:
    """Return float32 [2, T]: 1 / (1 - beta1^t) and 1 / sqrt(1 - beta2^t) for the clocks t < T, from where on both are 1.

    T is 345 for betas of .9 and .95, 17,000 for a beta of .999. The entry of t = 0 is of no use. ValueError for a beta so near
    to 1 that T would exceed 2^24.
    """
    beta = max(beta1, beta2)
    last = 1 if beta == 0 else math.ceil(25 * math.log(2) / -math.log(beta)) + 1
    if last >= _LONGEST:
        raise ValueError(
            f"betas of {beta1} and {beta2} need {last:,} steps until their bias corrections have faded, "
            f"and clocks of columns have tables of {_LONGEST:,}: use betas up to 0.999998."
        )
    t_T = torch.arange(last + 1, dtype=torch.float64).clamp(min=1)
    first, second = (-torch.expm1(t_T * (math.log(b) if b else -math.inf)) for b in (beta1, beta2))
    return torch.stack((1 / first, second.rsqrt())).float().to(device, non_blocking=True)
