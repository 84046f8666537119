"""AdamW's definition against scalar arithmetic in Python's floats. (Session's optimizer against it: tests/train.)"""

from __future__ import annotations

import math

import pytest
import torch

from surokit.kernels.reference.adamw import adamw_

LR, BETA1, BETA2, DECAY, EPS = 0.03, 0.9, 0.95, 0.1, 1e-8


def by_hand(p: float, grads: list[float], scale: float) -> tuple[float, float, float]:
    m = v = 0.0
    for t, grad in enumerate(grads, 1):
        g = grad / scale
        m = BETA1 * m + (1 - BETA1) * g
        v = BETA2 * v + (1 - BETA2) * g * g
        p -= LR * DECAY * p
        p -= LR * (m / (1 - BETA1**t)) / (math.sqrt(v / (1 - BETA2**t)) + EPS)
    return p, m, v


@pytest.mark.parametrize("scale", [1.0, 7.5])
@pytest.mark.parametrize("grads", [[0.0] * 4, [1.0, -2.0, 0.5], [1e-12, 3e-9], [1e15, 1.0, -1e15], [0.3] * 40])
def test_equals_scalar_arithmetic(grads: list[float], scale: float) -> None:
    p, m, v, t = torch.tensor([[0.7]]), torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(())
    for grad in grads:
        adamw_(
            [p],
            [torch.tensor([[grad]])],
            [m],
            [v],
            [t],
            lr=LR,
            beta1=BETA1,
            beta2=BETA2,
            weight_decay=DECAY,
            eps=EPS,
            grad_scale=torch.tensor(scale),
        )
    expected = by_hand(0.7, grads, scale)
    assert (p.item(), m.item(), v.item()) == pytest.approx(expected, rel=2e-5, abs=1e-30)
    assert t.item() == len(grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_dtypes_stay_and_a_mask_keeps_every_bit(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    p = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    m, v, t = torch.full((3, 5), 0.5, dtype=state_dtype), torch.full((3, 5), 0.25, dtype=state_dtype), torch.tensor(4.0)
    options = {"lr": LR, "beta1": BETA1, "beta2": BETA2, "weight_decay": DECAY, "eps": EPS}
    before = [x.clone() for x in (p, m, v, t)]
    bad = torch.full((3, 5), math.nan, dtype=dtype)
    adamw_([p], [bad], [m], [v], [t], found_inf=torch.tensor(1.0), **options)
    assert all(torch.equal(x, old) for x, old in zip((p, m, v, t), before))
    adamw_([p], [torch.ones(3, 5, dtype=dtype)], [m], [v], [t], found_inf=torch.tensor(0.0), **options)
    assert (p.dtype, m.dtype, v.dtype, t.item()) == (dtype, state_dtype, state_dtype, 5.0)
    assert not torch.equal(p, before[0])


def test_lists_of_different_lengths() -> None:
    one = [torch.ones(2)]
    with pytest.raises(ValueError, match="shorter|longer"):
        adamw_(one, [], one, one, one, lr=LR, beta1=BETA1, beta2=BETA2, weight_decay=DECAY, eps=EPS)
