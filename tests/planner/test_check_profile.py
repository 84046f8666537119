"""A plan beside a profile that recorded shapes: FLOPs of both, and the speed of light module by module."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import surokit as sk
from surokit.hardware.gpus import Ceilings, Gpu
from surokit.planner.compare.measured import read_measured
from surokit.planner.counts.flops import count_flops
from tests.planner.families import config_of
from tests.planner.test_check import TINY, check, plan, profile_of, tiny

#: Slower than any processor, so that a prediction at these rates is a bound that holds.
CPU = Gpu(
    "cpu: mine",
    ceilings=Ceilings("now", bf16_tflops=0.05, fp32_tflops=0.05, bandwidth_tb_s=0.01, launch_us=5.0),
    device="cpu",
)


def count(p):
    """The products of a plan, attention over every key."""
    return count_flops(p.shape, length=p.setup.length, attention="full").products


def profiled(model, ids) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with sk.profile(steps=2, warmup=2) as p:
        for _ in range(4):
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return p


@pytest.fixture(scope="module")
def profile():
    torch.manual_seed(0)
    return profiled(sk.Decoder(TINY), torch.randint(256, (2, 32)))


def test_flops_agree(profile):
    c = check(tiny(dtype="fp32"), profile)
    row = c["FLOPs executed"]
    assert row.measured == pytest.approx(profile.summary["gflop_per_step"] * 1e9)
    assert row.ratio == pytest.approx(1, rel=0.005)
    # by hand: every key, and the scores once more in the backward
    attention = sum(p.forward for p in count(c.plan) if p.module.startswith("attention"))
    other = sum(p.forward for p in count(c.plan) if not p.module.startswith("attention"))
    assert row.expected == 64 * (3 * other + 3.5 * attention)
    assert row.expected > c.plan.flops_per_step
    assert "busy time" not in {each.term for each in c.rows}  # without a device there are no rates


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_flops_of_a_transformers_model(attention):
    import transformers  # takes seconds

    config = config_of("llama")
    ids = torch.randint(3, 90, (2, 48))
    p = profiled(transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention), ids)
    planned = plan(config, batch=2, length=48, gpus=1, gpu=None, mfu=None, tflops_per_gpu=0.01, dtype="fp32")
    row = check(planned, p)["FLOPs executed"]
    # attention that is not fused keeps its scores
    kept = 0 if attention == "sdpa" else 96 * sum(q.forward for q in count(planned) if q.module == "attention.scores")
    assert row.measured + kept == pytest.approx(row.expected, rel=0.002)


def test_accumulation_and_recompute_count(profile):
    twice = check(tiny(batch=1, accumulate=2), profile)
    assert twice["FLOPs executed"].expected == check(tiny(), profile)["FLOPs executed"].expected
    again = check(tiny(recompute="full"), profile)["FLOPs executed"]
    assert again.ratio == pytest.approx(
        0.82, abs=0.03
    )  # three passes of the layers' 3.7: the last product is not repeated


def test_the_speed_of_light_stands_beside_each_module(profile):
    c = check(tiny(gpu=CPU, tflops_per_gpu=None, dtype="fp32"), profile)
    light = profile.speed_of_light(CPU)
    busy = c["busy time"]
    assert (busy.expected, busy.measured) == (light["light_ms"][0], light["self_ms"][0])
    assert busy.kind == "optimistic"
    assert "at the rates of cpu: mine" in busy.how
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
        place = c[f"{'self_attn' if name[1] == '_' else 'mlp'}.{name}"]
        rows = light[light["module"].str.endswith(name)]
        assert len(rows) == 2
        share = rows["light_ms"].sum() / rows["self_ms"].sum()
        assert place.how == f"{rows['gflop'].sum():.3g} GFLOP as planned, {share:.0%} of the speed of light"
    assert "GFLOP as planned" in c["attention and rope"].how
    assert "GFLOP as planned" in c["head and loss"].how
    assert "GFLOP" not in c["embedding"].how
    assert "of the speed of light" in repr(c)


def test_another_device_has_no_light_of_its_own(profile):
    c = check(plan(TINY, batch=2, length=32, gpus=1, tokens=1e9), profile)
    assert "busy time" not in {row.term for row in c.rows}
    assert "cpu was measured, H100 is planned" in c.verdict


def test_a_profile_without_shapes_is_compared_without_them():
    bare = profile_of([("Net", 0, 3.0), ("Net.a", 1, 2.0)], 41.0)
    seen = []

    def light(gpu):
        seen.append(gpu)
        raise ValueError("This profile has no shapes")

    bare.speed_of_light = light
    c = check(plan(gpus=1), bare)
    assert [gpu.name for gpu in seen] == ["H100"]
    assert {"FLOPs executed", "busy time"}.isdisjoint(row.term for row in c.rows)


def test_flops_that_the_plan_does_not_know_are_the_verdict():
    p = plan(gpus=1)
    wall = p.time.step_ms
    summary = {"wall_ms": wall, "tokens_per_s": 2048 / wall * 1e3, "steps": 3, "device": "H100", "activity": "gpu"}
    expected = check(p, SimpleNamespace(summary={**summary, "gflop_per_step": 1.0}))["FLOPs executed"].expected
    c = check(p, SimpleNamespace(summary={**summary, "gflop_per_step": 1.5e-9 * expected}))
    assert c.worst.term == "FLOPs executed"
    assert "1.50 times the plan; likely in work that the plan does not know" in c.verdict
    assert not c.ok


def test_a_plan_without_shapes_expects_none(profile):
    c = check(
        plan(8e9, batch=None, length=None, tokens=1e12, gpus=8, gpu="H100", mfu=0.4),
        SimpleNamespace(summary=dict(profile.summary)),
    )
    assert c["FLOPs executed"].expected is None
    assert c["FLOPs executed"].measured == pytest.approx(profile.summary["gflop_per_step"] * 1e9)


def test_what_a_profile_offers():
    table = {"module": ["Net", "a", "(optimizer)"], "depth": [0, 1, 0], "self_ms": [1.0, 2.0, 3.0]}
    light = {
        "module": ["(whole step)", "a", "Net"],
        "self_ms": [6.0, 2.0, 1.0],
        "light_ms": [2.0, 1.5, 0.5],
        "gflop": [7.0, 7.0, 0.0],
    }
    whole = {"wall_ms": 8.0, "gflop_per_step": 7.0, "steps": 2}
    profile = SimpleNamespace(summary=whole, modules=table, speed_of_light=lambda gpu: light)
    m = read_measured(profile, CPU)
    assert m.executed == 7e9
    assert m.whole == ("", 6.0, 7.0, 2.0)
    assert m.modules == (("", 1.0, 0.0, 0.5), ("a", 2.0, 7.0, 1.5), ("(optimizer)", 3.0, None, None))
    assert read_measured(profile).modules == (
        ("", 1.0, None, None),
        ("a", 2.0, None, None),
        ("(optimizer)", 3.0, None, None),
    )
