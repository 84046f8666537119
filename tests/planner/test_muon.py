"""Plans of Muon: states as the optimizer holds them, FLOPs as Newton-Schulz computes them, time, and what cannot be planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import surokit as sk
from surokit import planner
from surokit.planner.counts.muon import Hidden, hidden_matrices, muon_step
from surokit.torch_private import orthogonal
from tests.refusals import refused

LLAMA = "llama-3.1-8b"
STEP: dict[str, Any] = {"gpu": "H100", "batch": 1, "length": 4096}
SMALL: dict[str, Any] = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "vocab": 64, "ffn": 48}


def plan(what: Any, **arguments: Any) -> Any:
    return planner.plan(what, **arguments)


@pytest.mark.parametrize(
    ("changes", "recipe"),
    [
        ({"tied": True}, None),
        ({"tied": False}, None),
        ({"experts": 4, "expert_ffn": 24}, None),
        ({}, sk.BF16.lora(rank=4)),
    ],
    ids=["tied", "untied", "experts", "adapters"],
)
def test_states_are_those_of_the_optimizer(changes: dict[str, Any], recipe: Any) -> None:
    model = sk.Decoder(sk.DecoderConfig(**{**SMALL, **changes}), dtype=torch.bfloat16)
    if recipe is not None:
        sk.apply(model, recipe)
    optimizer: Any = sk.Muon(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizer.step()
    held = sum(v.nbytes for state in optimizer.state.values() for k, v in state.items() if k != "step")
    p = plan(model, optimizer=optimizer)
    assert p.setup.optimizer == "muon"
    assert p.memory["optimizer"].bytes == held
    assert plan(model, optimizer=sk.Muon(state_dtype=torch.float32)).memory["optimizer"].bytes == 2 * held
    hidden = sum(p.numel() for group in optimizer.param_groups if group["use_muon"] for p in group["params"])
    assert sum(each.parameters for each in hidden_matrices(p.shape, recipe)) == hidden


@pytest.mark.parametrize("shape", [(16, 64), (64, 16), (32, 32)])
def test_flops_are_those_of_newton_schulz(shape: tuple[int, int]) -> None:
    w = torch.randn(shape)
    with FlopCounterMode(display=False) as counted:
        orthogonal(w, 5)
    assert Hidden(*shape, count=1).flop == counted.get_total_flops()


class Operations(TorchDispatchMode):
    """Counts what is computed: views and questions about dtypes are not."""

    _VIEWS = ("detach", "permute", "t", "promote_types", "empty_like", "new_empty", "arange", "zeros")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ not in self._VIEWS
        return func(*args, **(kwargs or {}))


def test_launches_are_the_operations_on_a_matrix() -> None:
    """One matrix more takes so many operations more, clipped and masked as in a session."""
    counts = []
    for number in (1, 2):
        params = [nn.Parameter(torch.ones(4, 6, dtype=torch.bfloat16)) for _ in range(number)]
        optimizer: Any = sk.Muon([{"params": params, "use_muon": True}], lr=torch.tensor(0.1))
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
        with Operations() as seen:
            optimizer.step()
        counts.append(seen.count)
    model = plan(LLAMA)
    step = muon_step(model.shape, None)
    matrices = sum(each.count for each in hidden_matrices(model.shape, None))
    assert (step.launches + step.products_launches) / matrices == counts[1] - counts[0]


def test_its_time_is_in_the_step() -> None:
    adamw, muon = (plan(LLAMA, optimizer=name, **STEP) for name in ("adamw", "muon"))
    assert muon.memory["optimizer"].bytes < 0.6 * adamw.memory["optimizer"].bytes
    added = muon.estimate.by_group()["optimizer"] - adamw.estimate.by_group()["optimizer"]
    hidden = hidden_matrices(muon.shape, None)
    at_least = sum(each.flop for each in hidden) / (989.4e12) * 1e3
    assert added > at_least
    assert muon.estimate.step_ms - adamw.estimate.step_ms == pytest.approx(added, rel=0.1)
    # the update is the same with more tokens, so that its share falls
    more = plan(LLAMA, optimizer="muon", **{**STEP, "batch": 8})
    assert more.estimate.by_group()["optimizer"] == pytest.approx(muon.estimate.by_group()["optimizer"])
    assert muon.likely.step_ms > adamw.likely.step_ms + at_least
    made_of, without = muon.likely.made_of, adamw.likely.made_of
    assert made_of["products"] == pytest.approx(without["products"])
    assert made_of["optimizer"] > without["optimizer"] + at_least


@pytest.mark.parametrize("zero", [0, 2])
def test_gpus_share_matrices_out(zero: int) -> None:
    """tests/parallel/test_spread.py compares this with what processes do."""
    one, eight = (plan(LLAMA, optimizer="muon", gpus=n, zero=zero, **STEP) for n in (1, 8))
    adamw = plan(LLAMA, optimizer="adamw", gpus=8, zero=zero, **STEP)
    shards = 8 if zero else 1
    assert eight.memory["optimizer"].bytes == one.memory["optimizer"].bytes / shards
    rows = [{row.part: row for row in p.estimate.rows if row.group == "optimizer"} for p in (one, eight)]
    assert rows[0]["Newton-Schulz"].flop == 8 * rows[1]["Newton-Schulz"].flop
    assert rows[0]["matrices"].bytes == shards * rows[1]["matrices"].bytes
    matrices = 2 * sum(each.parameters for each in hidden_matrices(one.shape, None))
    sent = 2 * matrices / 8 if zero else matrices
    assert eight.estimate.communication.bytes - adamw.estimate.communication.bytes == pytest.approx(sent * 7 / 8)
    assert "Muon" in eight.estimate.communication.how


def test_experts_are_shared_out_among_those_that_have_them() -> None:
    """Whole experts are what ZeRO divides, so that nothing of them is sent."""
    shape = plan("mistralai/Mixtral-8x7B-v0.1").shape
    of = {
        expert: sum(each.flop for each in hidden_matrices(shape, None) if each.expert == expert)
        for expert in (True, False)
    }
    copied, divided = (muon_step(shape, None, 8, 4, zero) for zero in (0, 2))
    assert copied.flop == divided.flop == pytest.approx(of[False] / 8 + of[True] / 4)
    size = {
        expert: sum(each.parameters for each in hidden_matrices(shape, None) if each.expert == expert) for expert in of
    }
    assert copied.sent == 2 * sum(size.values())
    assert divided.sent == pytest.approx(2 * 2 * size[False] / 8)
    assert muon_step(shape, None, zero=2).sent == muon_step(shape, None).sent == 0
    many = muon_step(shape, None, 64, 64, 2)  # of 8 experts: 56 GPUs have none
    assert many.flop == pytest.approx(owned(shape, False, 64) + of[True] / 8)


def owned(shape: Any, expert: bool, n: int) -> int:
    """The FLOPs of the first of n owners, matrix by matrix."""
    each = [h.flop // h.count for h in hidden_matrices(shape, None) for _ in range(h.count) if h.expert == expert]
    return sum(sorted(each, reverse=True)[::n])


@pytest.mark.parametrize("gpus", [1, 8, 30, 64, 512])
def test_the_first_owner_has_the_largest_matrix_of_each_turn(gpus: int) -> None:
    shape: Any = plan(LLAMA).shape
    assert muon_step(shape, None, gpus, gpus, 2).flop == owned(shape, False, gpus)


def test_between_nodes_shards_go_through_a_card_of_each_gpu() -> None:
    given = {"between_gb_s": 50, "gpus": 16, "zero": 2, **STEP}
    adamw, muon = (plan(LLAMA, optimizer=name, **given).estimate.communication for name in ("adamw", "muon"))
    sent = 2 * 2 * sum(each.parameters for each in hidden_matrices(plan(LLAMA).shape, None)) / 16
    assert muon.exposed_ms - adamw.exposed_ms == pytest.approx(sent * (16 - 8) / 16 / 50e9 * 1e3)


@pytest.mark.parametrize(
    "changes", [{"gpus": 8, "zero": 3}, {"recipe": "qfp8", "offload_weights": True}, {"graphs": True}]
)
def test_lines_are_short(changes: dict[str, Any]) -> None:
    p = plan(LLAMA, optimizer="muon", recompute="full", **{**STEP, **changes})
    table = [line for line in str(p).splitlines() if line.startswith("    ")]
    assert max(map(len, table)) <= 138
    assert ", muon" in str(p)


def test_what_cannot_be_planned() -> None:
    for what, given in (
        (8e9, {}),
        (LLAMA, {**STEP, "gpus": 8, "tensor_parallel": 2}),
        (LLAMA, {**STEP, "offload_weights": True}),
    ):
        with refused(ValueError):
            plan(what, optimizer="muon", **given)


def test_what_helps_is_not_another_optimizer() -> None:
    """Nor weights that are updated on the host, where its products would take too long."""
    ways = plan("qwen2.5-14b", optimizer="muon", gpu="H100", batch=4, length=8192, recompute="full").fitting().ways
    assert ways
    assert not [way.how for way in ways if "optimizer" in way.how or "offload_weights" in way.how]


def test_beside_offloaded_adamw() -> None:
    assert plan(LLAMA, optimizer="muon", **STEP).offload().without == "surokit.Muon"
