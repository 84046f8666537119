"""The report of an offloading optimizer: against arithmetic, and on a simulated link."""

from __future__ import annotations

import copy
import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import surokit as sk
from surokit.offload.counters import CAUSES, Accounts
from surokit.offload.report import report_of, staleness_bound
from surokit.planner.offload.formulas import host_bytes
from tests.offload.runs import Run, throttled


def made_up(**accounts: Any) -> Any:
    """A weight of 4 x 10 whose first two columns are hot, and a bias."""
    W, bias = nn.Parameter(torch.zeros(4, 10)), nn.Parameter(torch.zeros(4))
    state = {
        W: {
            **{name: torch.zeros(2, 4) for name in ("w_hot", "m_hot", "v_hot")},
            **{"hot": torch.arange(2, dtype=torch.int32), "cold": torch.arange(2, 10, dtype=torch.int32)},
            **{name: torch.zeros(8, 4) for name in ("w", "m", "v")},
        },
        bias: {name: torch.zeros(1, 4) for name in ("w_hot", "m_hot", "v_hot")},
    }
    return SimpleNamespace(
        accounts=Accounts(**accounts),
        state=state,
        param_groups=[{"params": [W]}, {"params": [bias]}],
        link=SimpleNamespace(device_stall_ms=lambda: 30.0),
        settings={"update_interval": 4, "overlap_step": True},
    )


def test_a_report_of_nothing_that_was_updated() -> None:
    for make, said in ((sk.ZenFlow, "none yet"), (sk.OffloadAdamW, "0 a step")):
        empty: Any = nn.Parameter(torch.zeros(6, 0))
        empty.grad = torch.zeros_like(empty)
        optimizer: Any = make([empty])
        optimizer.step()
        assert optimizer.report().staleness == {}
        assert said in repr(optimizer.report())


def test_figures_against_arithmetic() -> None:
    optimizer = made_up(model_bytes=176, steps=8, windows=2)
    accounts = optimizer.accounts
    accounts.moved("gradients", 8 * 128, 0)
    accounts.moved("weights", 0, 2 * 128)
    accounts.moved("migration", 48, 96)
    accounts.moved("setup", 999, 0)
    accounts.staleness.update({0: 30, 4: 10})
    accounts.intervals[4] = 2
    accounts.stall_by_cause["adam"] = 16.0
    none = dict.fromkeys(CAUSES, 0.0)
    accounts._stalls.extend([(3, none | {"adam": 12.0}), (7, none | {"adam": 4.0})])
    found = report_of(optimizer, buffers=[torch.zeros(10)])
    assert not found.synchronous
    assert found.hot_share == pytest.approx(12 / 44)
    assert found.down == pytest.approx(128 / 176)
    assert found.traffic == pytest.approx(128 / 176 * 1.25) == pytest.approx(found.expected)
    assert found.migration == pytest.approx((6 / 176, 12 / 176))
    assert found.staleness == {0: 0.75, 4: 0.25}
    assert found.staleness_bound == 7
    assert found.interval == 4
    assert found.device_stall_ms == 30 / 8
    waits = {stall.cause: stall for stall in found.stalls}
    assert waits["adam"].mean_ms == 2
    assert 4 < waits["adam"].p95_ms < 12
    assert waits["slot"] == type(found.stall)("slot", 0.0, 0.0)
    assert found.stall.p95_ms == waits["adam"].p95_ms
    assert found.device_bytes == 4 * (6 * 4 + 10 + 3 * 4)
    assert found.host_bytes == 4 * (3 * 32 + 10)
    assert math.isnan(found.selected)
    assert not found.warnings


def test_selected_energy_is_weighted_by_energy() -> None:
    optimizer = made_up(steps=1)
    (W,), (bias,) = (group["params"] for group in optimizer.param_groups)
    accounts = optimizer.accounts
    accounts.call([("layers.0.mlp.weight", W)])
    for step in (1, 2, 3, 4):
        accounts.selected(step, W, torch.tensor([27.0, 1.0, 1.0, 1.0]), 0.9, 1, 1)
        assert not report_of(optimizer).warnings
        accounts.selected(step, bias, torch.full((100,), 0.1), 0.1, 10, 0)
    found = report_of(optimizer)
    assert found.selected == pytest.approx((0.9 * 30 + 0.1 * 10) / 40)
    assert found.selected_mean == pytest.approx(0.5)
    assert [weight.name for weight in found.energy.weights] == ["layers.0.mlp.weight", "parameter 1 [4]"]
    assert found.energy.weights[0].captured(0.5) == pytest.approx(28 / 30)
    (warning,) = found.warnings
    assert "parameter 1 [4]" in warning
    assert warning in repr(found)
    assert "on average; at random 10.6%" in found._repr_html_()  # 1 of 4 columns, and 10 of 100


@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        ({}, 0),
        ({"update_interval": 4, "overlap_step": False}, 3),
        ({"update_interval": 4, "overlap_step": True}, 7),
        ({"update_interval": "auto", "max_interval": 16, "overlap_step": True}, 31),
    ],
)
def test_how_old_a_gradient_may_become(settings: dict[str, Any], bound: int) -> None:
    assert staleness_bound(settings) == bound


def test_nothing_has_happened_yet() -> None:
    optimizer: Any = sk.ZenFlow([nn.Parameter(torch.randn(4, 8))], lr=1e-3)
    found = optimizer.report()
    assert (found.steps, found.traffic, found.host_bytes, len(found.energy)) == (0, 0, 0, 0)
    assert "age of gradients" in repr(found)
    assert json.loads(json.dumps(found.as_dict()))["steps"] == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_of_a_run(overlap: bool) -> None:
    """Bytes are the link's, the histogram the oracle's."""
    link = throttled()
    run = Run([(16, 40), (8, 80)], torch.bfloat16, link=link, topk_ratio=0.1, select_interval=8, overlap_step=overlap)
    for _ in range(24):
        run.step()
    found = run.optimizer.report()
    model = sum(p.nbytes for p in run.params)
    assert found.model_bytes == model
    moved = 24 * model * (found.down + found.migration[0]) + 24 * model * (found.up + found.migration[1])
    assert round(moved) == link.bytes_down + link.bytes_up - found_setup(run)
    assert found.traffic == pytest.approx(0.9 * (1 + (5 if overlap else 6) / 24))
    assert found.expected == pytest.approx(1.125)
    landed = sum(run.oracle.staleness.values())
    assert found.staleness == {age: n / landed for age, n in sorted(run.oracle.staleness.items())}
    assert max(found.staleness) <= found.staleness_bound
    assert found.hot_share == pytest.approx(0.1)
    assert 0.1 < found.selected <= 1
    assert set(found.threads) > {"training"}
    assert found.stall.mean_ms == pytest.approx(run.optimizer.accounts.stall_ms / 24)


@pytest.mark.parametrize("how", ["loaded", "copied"])
def test_of_a_run_that_goes_on_with_a_parameter_more(how: str) -> None:
    params = [nn.Parameter(torch.randn(16, 40)) for _ in range(2)]
    optimizer: Any = sk.ZenFlow(params, lr=1e-3)
    for step in range(3):
        params[0].grad = torch.randn(16, 40)
        params[1].grad = torch.randn(16, 40) if step == 2 else None
        if step == 1 and how == "loaded":
            optimizer.load_state_dict(optimizer.state_dict())
        if step == 1 and how == "copied":
            grads = [p.grad for p in params]
            optimizer = copy.deepcopy(optimizer)
            params = optimizer.param_groups[0]["params"]
            for p, g in zip(params, grads):
                p.grad = g
        optimizer.step()
    found = optimizer.report()
    assert found.model_bytes == 2 * 16 * 40 * 4
    assert found.down == pytest.approx(0.9 * (1 + 2) / 2 / 2), "two steps, with one and with both of two parameters"


@pytest.mark.parametrize("topk_ratio", [0.25, None])
def test_memory_is_what_the_planner_says(topk_ratio: float | None) -> None:
    """Sums, slots, results and states of ZenFlow; states and transfers of the synchronous way."""
    W = nn.Parameter(torch.randn(2048, 4096).bfloat16())
    optimizer: Any = sk.OffloadAdamW([W]) if topk_ratio is None else sk.ZenFlow([W], topk_ratio=topk_ratio)
    for _ in range(3 if topk_ratio else 1):  # as many as there are slots
        W.grad = torch.ones_like(W)
        optimizer.step()
    found = optimizer.report()
    assert found.host_bytes == pytest.approx(host_bytes(W.numel(), topk_ratio), rel=1e-3)
    assert found.device_bytes == pytest.approx(12 * (topk_ratio or 0) * W.numel(), rel=1e-3)
    optimizer.state_dict()


def test_the_synchronous_ways_report() -> None:
    optimizer: Any = sk.OffloadAdamW(params := [nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))])
    for _ in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    found = optimizer.report()
    assert (found.steps, found.windows, found.intervals) == (3, 3, {1: 3})
    assert found.traffic == found.expected == 2
    assert (found.staleness, found.staleness_bound, found.hot_share) == ({0: 1.0}, 0, 0.0)
    assert found.stall.mean_ms == pytest.approx(sum(stall.mean_ms for stall in found.stalls))
    assert len(found.energy) == 0
    for word in ("energy", "hot", "windows", "age of", "columns", "(1 - k)", "slot"):
        assert word not in repr(found)
    assert "2 x; all gradients and all weights are 2" in repr(found)
    assert "transfers each way" in found._repr_html_()
    table = found.table()
    assert table.columns.tolist() == ["first", "parameters", "elements", "bytes_down", "bytes_up", "lr"]
    assert table["first"].tolist() == ["parameter 0 [8, 8]", "parameter 1 [8]"]
    assert table["bytes_down"].tolist() == table["bytes_up"].tolist() == [256, 32]
    assert found.as_dict()["transfers"] == table.to_dict("records")
    before_a_step: Any = sk.OffloadAdamW(params)
    assert "transfers each way  0 a step" in repr(before_a_step.report())
    assert before_a_step.report().table().empty


def test_a_synchronous_report_knows_names_groups_and_dtypes() -> None:
    W, b = nn.Parameter(torch.randn(8, 4).bfloat16()), nn.Parameter(torch.randn(8))
    optimizer: Any = sk.OffloadAdamW([{"params": [W], "lr": 0.5}, {"params": [b]}], lr=0.25)
    optimizer.accounts.call([("up.weight", W), ("up.bias", b)])
    W.grad, b.grad = torch.ones_like(W), torch.ones_like(b)
    optimizer.step()
    found = optimizer.report()
    assert [(m.first, m.bytes_down, m.bytes_up, m.lr) for m in found.transfers] == [
        ("up.weight", 64, 64, 0.5),
        ("up.bias", 32, 32, 0.25),
    ]


def found_setup(run: Run) -> int:
    """Bytes before the first step."""
    down, up = run.optimizer.accounts.bytes["setup"]
    return int(down + up)


def test_before_the_first_step_nothing_is_not_a_number() -> None:
    for make in (sk.ZenFlow, sk.OffloadAdamW):
        text = repr(make(nn.Linear(4, 4).parameters(), lr=0.1).report())
        assert "nan" not in text
