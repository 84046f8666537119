"""AdamW on a weight's columns, the definition: against scalar arithmetic and AdamW of whole tensors; no other column is touched."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from surokit.kernels.reference.adamw import adamw_
from surokit.kernels.reference.columns import corrections, gather, scatter_, update_columns_
from tests.kernels.test_adamw import BETA1, BETA2, DECAY, EPS, LR, by_hand
from tests.refusals import refused

OPTIONS: dict[str, Any] = {"lr": LR, "beta1": BETA1, "beta2": BETA2, "weight_decay": DECAY, "eps": EPS}
B, F = torch.bfloat16, torch.float32


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scale", [1.0, 7.5])
@pytest.mark.parametrize("grads", [[0.0] * 4, [1.0, -2.0, 0.5], [1e-12, 3e-9], [1e15, 1.0, -1e15], [0.3] * 40])
def test_equals_scalar_arithmetic(grads: list[float], scale: float) -> None:
    W, w, m, v = torch.full((1, 2), 0.7), torch.full((1, 1), 0.7), torch.zeros(1, 1), torch.zeros(1, 1)
    clocks, index = torch.zeros(1, dtype=torch.int32), torch.tensor([1])
    for grad in grads:
        g = torch.tensor([[math.nan, grad]])
        update_columns_(W, g, index, w, m, v, clocks, **OPTIONS, grad_scale=torch.tensor(scale))
    expected = by_hand(0.7, grads, scale)
    assert (w.item(), m.item(), v.item()) == pytest.approx(expected, rel=2e-5, abs=1e-30)
    assert W[0].tolist() == [pytest.approx(0.7), w.item()]
    assert clocks.tolist() == [len(grads)]


@pytest.mark.parametrize("order", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [F, B])
def test_equals_adamw_column_by_column(dtype: torch.dtype, order: torch.dtype) -> None:
    """Each column as a tensor of its own, with its own clock; the other columns keep every bit."""
    W, index = normal(5, 9).to(dtype), torch.tensor([7, 0, 3], dtype=order)
    w = W.t()[index.long()].float().contiguous()
    m, v = normal(3, 5, seed=1) / 10, normal(3, 5, seed=2).square() / 100
    clocks = torch.tensor([0, 5, 999], dtype=torch.int32)
    ws, ms, vs, ts = (list(x.clone().unbind()) for x in (w, m, v, clocks.float()))
    before = W.clone()
    for step in range(3):
        g = normal(5, 9, seed=10 + step).to(dtype)
        lr = torch.tensor(LR / (step + 1))
        update_columns_(W, g, index, w, m, v, clocks, **{**OPTIONS, "lr": lr})
        adamw_(ws, [g[:, i] for i in index.tolist()], ms, vs, ts, **{**OPTIONS, "lr": lr})
    for ours, columns in zip((w, m, v), (ws, ms, vs)):
        torch.testing.assert_close(ours, torch.stack(columns), rtol=1e-5, atol=1e-7)
    assert clocks.tolist() == [3, 8, 1002]
    assert torch.equal(W[:, index.long()], w.t().to(dtype))
    rest = [i for i in range(9) if i not in index.tolist()]
    assert torch.equal(W[:, rest], before[:, rest])


@pytest.mark.parametrize("found", [1.0, math.nan, 0.0])
def test_a_mask_keeps_every_bit(found: float) -> None:
    W, index = normal(4, 6).to(B), torch.tensor([5, 1])
    states = [normal(2, 4, seed=1), normal(2, 4, seed=2), normal(2, 4, seed=3).square()]
    clocks = torch.tensor([0, 3], dtype=torch.int32)
    before = [x.clone() for x in (W, *states, clocks)]
    g = torch.full((4, 6), math.nan if found else 1.0)
    update_columns_(W, g, index, *states, clocks, **OPTIONS, found_inf=torch.tensor(found))
    for x, old in zip((W, *states, clocks), before):
        assert torch.equal(x, old) == bool(found)


@pytest.mark.parametrize(
    ("src", "out"), [(B, B), (B, F), (F, B), (torch.float16, F)], ids=lambda d: str(d).removeprefix("torch.")
)
def test_gather_and_scatter(src: torch.dtype, out: torch.dtype) -> None:
    W, index = normal(5, 8).to(src), torch.tensor([6, 2, 3], dtype=torch.int32)
    rows = torch.empty(3, 5, dtype=out)
    gather(W, index, rows)
    assert torch.equal(rows, W[:, [6, 2, 3]].t().to(out))
    back = torch.zeros_like(W)
    scatter_(back, index, rows)
    assert torch.equal(back[:, [6, 2, 3]], rows.t().to(src))
    assert back[:, [0, 1, 4, 5, 7]].eq(0).all()


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.0, 0.5), (0.0, 0.0), (0.99, 0.9)])
def test_the_table_of_corrections(betas: tuple[float, float]) -> None:
    table = corrections(*betas, torch.device("cpu"))
    T = table.shape[1]
    for t in {1, min(T - 1, 2), min(T - 1, 100), T - 1}:
        assert table[0, t].item() == pytest.approx(1 / (1 - betas[0] ** t), rel=1e-7)
        assert table[1, t].item() == pytest.approx(1 / math.sqrt(1 - betas[1] ** t), rel=1e-7)
    assert table[:, -1].tolist() == [1.0, 1.0], "the last entry stands for all later clocks"
    assert T == 2 or not bool((table[:, T // 2] == 1).all()), "no longer than it has to be"


def test_betas_next_to_one() -> None:
    with refused(ValueError):
        corrections(0.9, 0.9999999, torch.device("cpu"))
