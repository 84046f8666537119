"""The oracle itself, before it judges anything: against torch.optim.AdamW, and against figures worked out elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.offload.oracle import Oracle, Settings, hot_columns, largest

SHAPES = [(6, 20), (8,), (4, 10), (3, 2, 5)]
SPLIT: dict[str, Any] = {"topk_ratio": 0.3, "update_interval": 4, "select_interval": 4, "overlap_step": False}


def make_params(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def make_grads(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def rate(step: int) -> float:
    return 0.01 * (1 + 0.5 * (step % 3))


class Torch:
    """torch's AdamW over the same tensors, in float64; vectors do not decay."""

    def __init__(self, settings: Settings) -> None:
        self.params = [torch.nn.Parameter(p.clone()) for p in make_params()]
        groups = [
            {"params": [p for p in self.params if p.dim() > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in self.params if p.dim() == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps)

    def step(self, grads: list[Tensor], lr: float) -> None:
        for p, g in zip(self.params, grads):
            p.grad = g.clone()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()


def gap(oracle: Oracle, other: list[Any]) -> float:
    return max(float((w.shown - p.detach()).abs().max()) for w, p in zip(oracle.weights, other))


@pytest.mark.parametrize(
    "given",
    [
        {"topk_ratio": 1.0},
        {"topk_ratio": 0.0, "update_interval": 1, "overlap_step": False},
        {"topk_ratio": 0.3, "update_interval": 1, "overlap_step": False, "select_interval": 1},
        {"topk_ratio": 0.3, "update_interval": 1, "overlap_step": False, "select_interval": 3},
        {"topk_ratio": 0.3, "full_warm_up_rounds": 24},
    ],
)
def test_it_is_adamw_where_it_has_to_be(given: dict[str, Any]) -> None:
    settings = Settings(**given)
    oracle, torchs = Oracle(make_params(), settings), Torch(settings)
    for step in range(24):
        oracle.step(make_grads(step), rate(step))
        torchs.step(make_grads(step), rate(step))
        assert gap(oracle, torchs.params) < 1e-12


def test_it_is_not_adamw_elsewhere() -> None:
    for given in (SPLIT, {**SPLIT, "update_interval": 1, "overlap_step": True}):
        settings = Settings(**given)
        oracle, torchs = Oracle(make_params(), settings), Torch(settings)
        for step in range(8):
            oracle.step(make_grads(step), rate(step))
            torchs.step(make_grads(step), rate(step))
        assert gap(oracle, torchs.params) > 1e-3


@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_are_conserved_and_their_age_is_bounded(overlap: bool) -> None:
    oracle = Oracle(make_params(), Settings(**{**SPLIT, "overlap_step": overlap, "select_interval": 12}))
    for step in range(30):
        oracle.step(make_grads(step), finite=step not in (5, 13))
        for consumed, applied, due in zip(oracle.consumed, oracle.applied, oracle.due()):
            torch.testing.assert_close(applied + due, consumed)
    assert max(oracle.staleness) == (7 if overlap else 3)
    assert oracle.choices == [1, 13, 25]


def test_traffic_over_whole_windows() -> None:
    for ratio, interval, traffic in ((0.1, 4, 1.125), (0.0, 1, 2.0)):
        weight = torch.zeros(8, 40, dtype=torch.bfloat16)
        settings = Settings(topk_ratio=ratio, update_interval=interval, overlap_step=False)
        oracle = Oracle([weight], settings)
        for step in range(12):
            oracle.step([torch.randn(weight.shape, generator=torch.Generator().manual_seed(step)).bfloat16()])
        assert (oracle.down + oracle.up) / 12 / (weight.numel() * 2) == pytest.approx(traffic, abs=1e-12)


def test_counts_and_ties() -> None:
    assert [hot_columns(r, 40) for r in (0, 0.001, 0.1, 0.5, 1)] == [0, 1, 4, 20, 40]
    assert largest(torch.tensor([1.0, 3.0, 3.0, 2.0, 3.0]), 2).tolist() == [1, 2]


def least_squares(spread: float = 0.5, steps: int = 500, **given: Any) -> float:
    """The final loss of 8 x 20 weights from batches of 64 of 256 rows, whose features fall off like a power."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 20, generator=generator, dtype=torch.float64) * torch.arange(1, 21) ** -spread
    y = x @ torch.randn(8, 20, generator=generator, dtype=torch.float64).T
    oracle = Oracle([torch.zeros(8, 20, dtype=torch.float64)], Settings(lr=2e-2, weight_decay=0.0, **given))
    for _ in range(steps):
        rows = torch.randint(256, (64,), generator=generator)
        error = x[rows] @ oracle.weights[0].W.T - y[rows]
        oracle.step([error.T @ x[rows] / 256])
    return float((x @ oracle.weights[0].w.T - y).square().mean())


def test_what_deferral_costs_on_least_squares() -> None:
    """The study's order: full updates, windows, windows that land late, long ones."""
    losses = [
        least_squares(topk_ratio=1.0),
        least_squares(update_interval=4, overlap_step=False),
        least_squares(update_interval=4),
        least_squares(update_interval=16),
    ]
    assert losses[0] < 0.1 * losses[1]
    assert 1.1 * losses[1] < losses[2] < 0.1 * losses[3]


@pytest.mark.parametrize("interval", [2, 4])
def test_time_correction_is_exact_for_constant_gradients(interval: int) -> None:
    """Without decay, a constant gradient's Adam step is lr at every step, whatever the betas: windows must add up to that."""
    make: Callable[[str], Oracle] = lambda how: Oracle(  # noqa: E731
        [torch.zeros(3, 10, dtype=torch.float64)],
        Settings(lr=0.01, weight_decay=0.0, overlap_step=False, update_interval=interval, cold_update=how),  # type: ignore[arg-type]
    )
    corrected, plain = make("time-corrected"), make("deepspeed")
    for _ in range(12):
        for oracle in (corrected, plain):
            oracle.step([torch.ones(3, 10, dtype=torch.float64)])
    cold = corrected.weights[0].cold
    torch.testing.assert_close(corrected.weights[0].W, torch.full((3, 10), -0.12, dtype=torch.float64))
    torch.testing.assert_close(plain.weights[0].W[:, cold], torch.full((3, 9), -0.12 / interval, dtype=torch.float64))
    assert corrected.weights[0].t.tolist() == [12] * 10


def test_auto_ends_a_window_by_old_statistics() -> None:
    """Equal means: one step is enough, and it is known two steps later. Small cold ones: S_max."""
    lengths = {}
    for size in (1.0, 1e-3):
        oracle = Oracle([torch.zeros(4, 10)], Settings(update_interval="auto", max_interval=6, overlap_step=False))
        for _ in range(12):
            g = torch.full((4, 10), size)
            g[:, 7] = 1.0
            oracle.step([g])
        lengths[size] = oracle.lengths
    assert lengths == {1.0: [3, 3, 3, 3], 1e-3: [6, 6]}
