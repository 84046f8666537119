"""Rows of host state: each is updated as torch's fused AdamW would alone, whatever lies beside it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from surokit.kernels.reference import columns as reference
from surokit.offload import rows
from surokit.offload.rows import (
    add_rows_,
    fading,
    gather,
    regrouped,
    runs,
    scatter_,
    update_columns_,
    update_rows_,
)

BETAS = (0.9, 0.95)
OPTIONS: dict[str, Any] = {"lr": 3e-2, "betas": BETAS, "weight_decay": 0.1, "eps": 1e-8}
B, F = torch.bfloat16, torch.float32


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def state(C: int, O: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # noqa: E741
    """w, m, v, g"""
    w, m, v, g = (normal(C, O, seed=i) for i in range(4))
    return w, m / 10, v.square() / 100, g


def int32(*clocks: int) -> Tensor:
    return torch.tensor(clocks, dtype=torch.int32)


def fused(
    w: Tensor, m: Tensor, v: Tensor, g: Tensor, step: float, *, scale: float | None = None, **options: Any
) -> None:
    """torch's kernel on one tensor, as its own optimizer calls it."""
    torch._fused_adamw_(
        [w],
        [g],
        [m],
        [v],
        [],
        [torch.tensor(float(step))],
        lr=options["lr"],
        beta1=options["betas"][0],
        beta2=options["betas"][1],
        weight_decay=options["weight_decay"],
        eps=options["eps"],
        amsgrad=False,
        maximize=False,
        grad_scale=None if scale is None else torch.tensor(scale),
    )


# -- runs


@pytest.mark.parametrize(
    ("clocks", "lengths"),
    [
        ([], []),
        ([5], [1]),
        ([5, 5, 5], [3]),
        ([1, 2, 2, 1], [1, 2, 1]),
        ([9000, 99999, 8, 10**6], [2, 1, 1]),
        ([0, 0, 1], [2, 1]),
    ],
)
def test_runs_are_neighbours_with_equal_clocks(clocks: list[int], lengths: list[int]) -> None:
    for given in (clocks, int32(*clocks)):
        found = runs(given, BETAS)
        assert [s.stop - s.start for s in found] == lengths
        assert [i for s in found for i in range(s.start, s.stop)] == list(range(len(clocks)))


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.99, 0.9), (0.0, 0.5)])
def test_faded_clocks_no_longer_matter(betas: tuple[float, float]) -> None:
    last = fading(betas)
    assert all(1 - beta**last == 1.0 for beta in betas)
    assert any(1 - beta ** (0.95 * last) < 1.0 for beta in betas), "and no earlier than that"
    assert fading((0.0, 0.0)) == 1


# -- updates


@pytest.mark.parametrize("divide_by", [None, 3, 2.5, torch.tensor(2.5)])
@pytest.mark.parametrize("out", [16, 64, 1040, 1, 7, 23])
def test_a_row_is_updated_as_it_would_be_alone(out: int, divide_by: Any) -> None:
    """Bit for bit, with clocks in any order; some as far as makes no difference, some in runs."""
    clocks = int32(0, 0, 0, 4, 4, 7, 0, 5000, 6000, 4)
    C = len(clocks)
    ours, alone = state(C, out), [list(x.unbind()) for x in state(C, out)]
    start = clocks.clone()
    scale = None if divide_by is None else float(divide_by)
    for step in range(3):
        ours[3].copy_(normal(C, out, seed=100 + step))
        g = ours[3].clone()
        update_rows_(*ours, clocks, **OPTIONS, divide_by=divide_by)
        for i in range(C):
            w_O, m_O, v_O = (x[i] for x in alone[:3])
            fused(w_O, m_O, v_O, g[i], int(start[i]) + step + 1, scale=scale, **OPTIONS)
    for x, rows_alone in zip(ours[:3], alone):
        assert torch.equal(x, torch.stack(rows_alone))
    assert torch.equal(clocks, start + 3)


@pytest.mark.parametrize("out", [16, 48, 7])
def test_order_and_threads_change_no_bit(out: int) -> None:
    clocks = int32(*(i % 5 for i in range(40)))
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    results = []
    threads = torch.get_num_threads()
    try:
        for permuted, number in ((False, 1), (True, 1), (False, 2)):
            torch.set_num_threads(number)
            w, m, v, g = (t[order] if permuted else t for t in state(40, out))
            t = clocks[order] if permuted else clocks.clone()
            update_rows_(w, m, v, g, t, **OPTIONS)
            back = order.argsort() if permuted else slice(None)
            results.append([a[back] for a in (w, m, v, t)])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


def test_one_run_is_adamw_of_the_whole_tensor() -> None:
    ours, whole = state(12, 32), state(12, 32)
    update_rows_(*ours, torch.full((12,), 6, dtype=torch.int32), **OPTIONS)
    fused(*whole, 7, **OPTIONS)
    assert all(torch.equal(a, b) for a, b in zip(ours[:3], whole))


def test_an_update_for_several_steps() -> None:
    """elapsed=n: moments decay by betas^n, the corrections are those of the clock, lr is the sum over the steps."""
    w, m, v, g = (x.double() for x in state(3, 16))
    ours, clocks = state(3, 16), int32(0, 4, 40)
    update_rows_(*ours, clocks, **{**OPTIONS, "lr": 0.06}, elapsed=4)
    assert clocks.tolist() == [4, 8, 44]
    b1, b2 = BETAS[0] ** 4, BETAS[1] ** 4
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    t = clocks.double()[:, None]
    root = (v / (1 - BETAS[1] ** t)).sqrt() + 1e-8
    w = w * (1 - 0.06 * 0.1) - 0.06 / (1 - BETAS[0] ** t) * m / root
    for mine, exact in zip(ours, (w, m, v)):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-7)


def test_nothing_to_update() -> None:
    empty = torch.empty(0, 8)
    update_rows_(empty, empty, empty, empty, int32(), **OPTIONS)
    clocks, none = int32(1, 2), torch.empty(2, 0)
    update_rows_(none, none, none, none, clocks, **OPTIONS)
    assert clocks.tolist() == [2, 3], "a shard without rows counts as the others do"


# -- rows change places


@pytest.mark.parametrize("seed", range(5))
def test_regrouped_rows_are_a_run_a_clock(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    clocks = torch.randint(0, 6, (200,), generator=generator, dtype=torch.int32) * 300
    to, source = regrouped(clocks, BETAS)
    assert sorted(to.tolist()) == sorted(source.tolist()), "rows take each other's places"
    moved = clocks.clone()
    moved[to] = clocks[source]
    assert len(runs(moved, BETAS)) == len(clocks.clamp(max=fading(BETAS)).unique()) < len(runs(clocks, BETAS))
    assert regrouped(moved, BETAS)[0].numel() == 0, "and then stay"


def test_few_rows_move_for_a_few_newcomers() -> None:
    clocks = int32(*[10] * 500, *[20] * 300, *[30] * 200)
    clocks[[3, 50, 99]] = 20
    clocks[[700, 701]] = 30
    assert len(regrouped(clocks, BETAS)[0]) <= 3 * 5


# -- sums


@pytest.mark.parametrize("dtype", [B, F, torch.float16])
@pytest.mark.parametrize("scale", [None, 3.7])
def test_sums_of_gradients(dtype: torch.dtype, scale: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = [normal(9, 50, seed=i).to(dtype) for i in range(3)]
    kept = [slot.clone() for slot in slots]
    expected = torch.zeros(9, 50)
    for i, slot in enumerate(slots):
        part = slot.float() if scale is None else slot.float() / scale
        expected = part if i == 0 else expected + part
    for size in (1 << 17, 64):  # in one block and in many
        monkeypatch.setattr(rows, "_BLOCK", size)
        monkeypatch.setattr(rows, "scratch", type(rows.scratch)())
        acc = torch.full((9, 50), math.nan)
        for i, slot in enumerate(slots):
            add_rows_(acc, slot, scale, first=i == 0)
        assert torch.equal(acc, expected)
    assert all(torch.equal(a, b) for a, b in zip(slots, kept))


@pytest.mark.parametrize("first", [False, True])
def test_a_sum_gives_a_sign_of_life_for_each_block(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[None] = []
    monkeypatch.setattr(rows, "beat", lambda: beats.append(None))
    monkeypatch.setattr("surokit.offload.rows._BLOCK", 64)
    add_rows_(torch.zeros(9, 64 * torch.get_num_threads()), torch.zeros(9, 64 * torch.get_num_threads()), None, first)
    assert len(beats) == 9


# -- columns of a weight


@pytest.mark.parametrize("order", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [B, F])
def test_columns_on_a_cpu_are_rows(dtype: torch.dtype, order: torch.dtype) -> None:
    """The same bits as `update_rows_` of the gathered gradient, and next to the kernel's definition."""
    W, g = normal(16, 9).to(dtype), normal(16, 9, seed=1).to(dtype)
    index = torch.tensor([8, 2, 5], dtype=order)
    at = index.long()
    w = W.t()[at].float().contiguous()
    m, v = state(3, 16)[1:3]
    clocks, scale = int32(0, 3, 3), torch.tensor(1.7)
    w_rows, m_rows, v_rows, t = (x.clone() for x in (w, m, v, clocks))
    update_rows_(w_rows, m_rows, v_rows, g.t()[at].float(), t, **OPTIONS, divide_by=scale)
    defined = [x.clone() for x in (W, g, index, w, m, v, clocks)]
    options = {"lr": OPTIONS["lr"], "beta1": BETAS[0], "beta2": BETAS[1], "weight_decay": 0.1, "eps": 1e-8}
    reference.update_columns_(*defined, **options, grad_scale=scale)
    before = W.clone()
    update_columns_(W, g, index, w, m, v, clocks, **OPTIONS, grad_scale=scale, found_inf=torch.tensor(0.0))
    assert all(torch.equal(a, b) for a, b in zip((w, m, v, clocks), (w_rows, m_rows, v_rows, t)))
    assert torch.equal(W[:, at], w.t().to(dtype))
    rest = [i for i in range(9) if i not in index.tolist()]
    assert torch.equal(W[:, rest], before[:, rest])
    for mine, theirs in zip((w, m, v), defined[3:6]):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert torch.equal(clocks, defined[6])


def test_a_masked_step_changes_nothing() -> None:
    W, index = normal(16, 5), torch.tensor([0, 4])
    x = [*state(2, 16)[:3], int32(0, 2)]
    before = [t.clone() for t in (W, *x)]
    g = torch.full((16, 5), math.inf)
    for found in (1.0, math.nan):
        update_columns_(W, g, index, *x, **OPTIONS, found_inf=torch.tensor(found))
    assert all(torch.equal(a, b) for a, b in zip((W, *x), before))
    update_columns_(W, torch.ones(16, 5), index, *x, **OPTIONS, found_inf=torch.tensor(0.0))
    assert not torch.equal(W, before[0])


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("src", "rows"), [(B, B), (B, F), (F, F)], ids=str)
@pytest.mark.parametrize(
    ("shape", "C"), [((150, 9), 3), ((150, 40), 4), ((5, 7), 7), ((3000, 1), 1), ((0, 4), 2), ((4, 6), 0)]
)
def test_gather_and_scatter(
    shape: tuple[int, int], C: int, src: torch.dtype, rows: torch.dtype, turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the definition, in any number of parts."""
    monkeypatch.setattr("surokit.offload.rows._BLOCK", 1024)
    W = normal(*shape).to(src)
    W = W.t().contiguous().t() if turned else W
    index = torch.randperm(shape[1], generator=torch.Generator().manual_seed(0))[:C].int()
    out, expected = torch.full((C, shape[0]), math.nan, dtype=rows), torch.empty(C, shape[0], dtype=rows)
    gather(W, index, out)
    reference.gather(W, index, expected)
    assert torch.equal(out, expected)
    ours, theirs = W.clone(), W.clone()
    for x, function in ((ours, scatter_), (theirs, reference.scatter_)):
        function(x, index, -2 * out)
    assert torch.equal(ours, theirs)
    assert torch.equal(ours, W) == (not ours.numel() or not C)
