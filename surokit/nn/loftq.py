"""LoftQ begins an adapter with what quantizing its weight lost (Li et al., 2023, arXiv 2310.08659).

The weight W [N, K] is stored as Q, and A and B begin with the numbers whose alpha / rank * B A is the nearest of its rank to

    E = W - dequantize(Q)

in the sum of squares. That is the paper's algorithm with one alternation, which leaves the codes as they are: the adapter fits
every base that was quantized in the same way. Further alternations would quantize W - alpha / rank * B A, so that each adapter had
a base of its own.

The paper divides each singular value evenly between A and B. What 8 or 4 bits lose is so little that both were then much smaller
than an ordinary A, and with them the gradients that each has through the other: such an adapter learns slowly. Here the rows of A
are as long as they are otherwise, B is small, and B A is the same.

N out_features, K in_features, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

LENGTH = 3**-0.5  # of a row of A that is drawn Kaiming-uniform, from -K^-1/2 to K^-1/2


@dataclass(frozen=True)
class TakenUp:
    """A TakenUp says how much of a quantization error an adapter took up when it was initialized.

    before: the sum of squares of E. after: that of E - alpha / rank * B A, with A and B rounded to their dtype.
    """

    before: float
    after: float

    @property
    def share(self) -> float:
        """Return the share of the squared error that the adapter takes up, 0 where quantizing lost nothing."""
        return 1 - self.after / self.before if self.before else 0.0


@torch.no_grad()
def take_up(error_NK: Tensor, a_rK: Tensor, b_Nr: Tensor, scale: float) -> TakenUp:
    """Set A and B in place so that scale * B A is the best approximation of their rank to the error, float32 [N, K].

    With the singular value decomposition E = U S V', the Eckart-Young theorem has U_r S_r V_r' as the nearest; A takes V_r' and B
    the rest, and the largest number of each row of A is positive. U_r are eigenvectors of E E' (or V_r of E' E, whichever is
    smaller), which take a fraction of the time and leave as much to six digits. Rows of A and columns of B beyond the rank of E
    stay as they were, so that they can learn, and so do all where the error is not finite.
    """
    norm = torch.linalg.vector_norm(error_NK)
    before = float(norm)
    if not math.isfinite(before) or before == 0:
        return TakenUp(0.0, 0.0)
    wide = error_NK.shape[0] <= error_NK.shape[1]
    e_MP = (error_NK if wide else error_NK.t()) / norm  # M is the smaller side
    rank = min(len(a_rK), len(e_MP))
    u_Mr = torch.linalg.eigh(e_MP @ e_MP.t()).eigenvectors[:, -rank:].flip(1)  # the largest first
    rest_rP = u_Mr.t() @ e_MP
    singular_r = torch.linalg.vector_norm(rest_rP, dim=1)
    there_r = singular_r > torch.finfo(torch.float32).eps * max(e_MP.shape) * singular_r[0]
    kept = int(there_r.long().cumprod(0).sum())
    v_rP = rest_rP[:kept] / singular_r[:kept, None]
    a, b = (v_rP, u_Mr[:, :kept]) if wide else (u_Mr[:, :kept].t(), v_rP.t())
    sign_r = a.gather(1, a.abs().argmax(1, keepdim=True)).sign().squeeze(1)
    a_rK[:kept] = a * (sign_r * LENGTH)[:, None]
    b_Nr[:, :kept] = b * (sign_r * singular_r[:kept] * norm / (scale * LENGTH))
    left_NK = error_NK - scale * (b_Nr[:, :kept].float() @ a_rK[:kept].float())
    return TakenUp(before**2, float(torch.linalg.vector_norm(left_NK)) ** 2)


def added_up(parts: Iterable[TakenUp]) -> TakenUp:
    """Return the same of several weights together."""
    parts = list(parts)
    return TakenUp(sum(part.before for part in parts), sum(part.after for part in parts))
