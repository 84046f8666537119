"""Make queries and keys ready for attention: RMSNorm over each head, then rotary positions; the definition is the two steps.

    q = rotate(norm(q_in, w_q))          k = rotate(norm(k_in, w_k))

A head without a weight is only rotated. Every step rounds to the dtype of its operand, here and in whatever is faster. Inputs,
and the gradients that are given or asked for, may be parts of one joint projection [B, T, (H + 2G) D].

B batch, T tokens, H query heads, G key heads, D head width, E = D/2.
"""

from __future__ import annotations

from torch import Tensor

from . import norm, rope


def forward(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    cos_TE: Tensor,
    sin_TE: Tensor,
    wq_D: Tensor | None = None,
    wk_D: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return q [B, T, H, D] and k [B, T, G, D], and for backward 1 / rms of each head, [B, T, H] and [B, T, G], None without a
    weight.

    cos and sin are [T, E] or [B, T, E].
    """
    made = []
    for x, w in ((q_BTHD, wq_D), (k_BTGD, wk_D)):
        r = None
        if w is not None:
            y, r = norm.forward(x.reshape(-1, x.shape[-1]), w, eps)
            x, r = y.view(x.shape), r.view(x.shape[:-1])
        made.append((rope.rotate(x, cos_TE, sin_TE), r))
    (q, rq), (k, rk) = made
    return q, k, rq, rk


def backward(
    dq_BTHD: Tensor,
    dk_BTGD: Tensor,
    q_BTHD: Tensor | None,
    k_BTGD: Tensor | None,
    cos_TE: Tensor,
    sin_TE: Tensor,
    wq_D: Tensor | None = None,
    wk_D: Tensor | None = None,
    rq_BTH: Tensor | None = None,
    rk_BTG: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    need_dw: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of q_in, k_in and of the two weights, those None without a weight or unless `need_dw`.

    q, k: what forward was given; needed, with its rq and rk, where there is a weight. out: where to write the first two, tensors
    of any strides and the dtypes of dq and dk (None: new ones).
    """
    made = []
    operands = (dq_BTHD, q_BTHD, wq_D, rq_BTH), (dk_BTGD, k_BTGD, wk_D, rk_BTG)
    for i, (dy, x, w, r) in enumerate(operands):
        dx, dw = rope.rotate(dy, cos_TE, sin_TE, back=True), None
        if w is not None:
            if x is None or r is None:
                raise ValueError(
                    "The gradient of a norm needs its input and its 1 / rms: pass q, k, rq and rk of forward."
                )
            D = x.shape[-1]
            dx_TD, dw = norm.backward(dx.view(-1, D), x.reshape(-1, D), w, r.reshape(-1, 1), need_dw=need_dw)
            dx = dx_TD.view(x.shape)
        made.append((dx if out is None else out[i].copy_(dx), dw))
    (dq, dwq), (dk, dwk) = made
    return dq, dk, dwq, dwk
