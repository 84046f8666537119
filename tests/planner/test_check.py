"""A plan beside what was measured: real sessions and profiles, figures by hand, the sentence, and the plan that learns."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import surokit as sk
from surokit.hardware.gpus import Ceilings, Gpu
from surokit.planner import plan as make
from surokit.planner.compare import check as checking
from surokit.planner.planning import Plan
from tests.planner.families import LLAMA_1B
from tests.refusals import refused

TINY = sk.DecoderConfig(layers=2, width=64, heads=4, kv_heads=2, vocab=256, ffn=128)
H100 = "NVIDIA H100 80GB HBM3"


def plan(what=LLAMA_1B, **more):
    """Untyped, so that figures that may be None are used as they are."""
    given = {"tokens": 1e9, "batch": 2, "length": 1024, "gpus": 4, "gpu": "H100", "mfu": 0.4, **more}
    return make(what, **given)


def check(p, measured) -> Any:
    return checking.check(p, measured)


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    torch.manual_seed(0)
    ids = torch.randint(256, (2, 32))
    model = sk.Decoder(TINY).to(torch.bfloat16)
    folder = tmp_path_factory.mktemp("run")
    s = sk.Session(
        model,
        [{"input_ids": ids, "labels": ids}],
        optimizer=sk.AdamW(lr=1e-3),
        recipe=sk.FP8,
        run_dir=folder,
        compile=False,
    )
    s.run(5)
    return s


def tiny(**more):
    return plan(TINY, **{"batch": 2, "length": 32, "gpus": 1, "gpu": None, "mfu": None, "tflops_per_gpu": 0.01, **more})


def test_a_session(session):
    p = tiny(recipe="fp8", usd_per_gpu_hour=1.0)
    c = check(p, session)
    summary = session.summary()
    assert c["step"].measured == pytest.approx(64 / summary.tokens_per_s * 1e3)
    assert c["step"].expected == p.time.step_ms
    assert c["tokens a second"].measured == summary.tokens_per_s
    assert c["tokens a second"].ratio == pytest.approx(1 / c["step"].ratio)
    assert c["memory, process"].measured == summary.peak_gib
    # tensors of a few MiB beside Python and torch: nothing that compares
    assert c["memory, process"].ratio is None
    assert "with Python and its libraries, so not compared with the " in c["memory, process"].how
    assert c["loss"].ratio is None
    assert {row.kind for row in c.rows if row.expected is None} == {"measured"}
    # a toy in emulated FP8 takes far longer than 0.01 TFLOPS say
    assert c.worst.term == "step"
    assert "likely because the device has no products of its own for them (emulated on cpu" in c.verdict
    assert not c.ok


def test_a_plan_is_compared_with_one_processes_share_of_a_session(session):
    one, p = session.summary(), tiny(recipe="fp8")
    two = replace(one, processes=2, tokens=2 * one.tokens, tokens_per_s=2 * one.tokens_per_s)
    assert check(p, two)["step"].measured == pytest.approx(check(p, one)["step"].measured)
    assert check(p, two)["tokens a second"].measured == pytest.approx(one.tokens_per_s)


def test_of_a_model_that_is_divided_a_gpu_has_a_share_of_the_tokens():
    p = plan(gpus=8, tensor_parallel=8, batch=8)
    found = check(p, {"step_ms": p.time.step_ms})
    assert found["step"].ratio == pytest.approx(1)
    assert found["tokens a second"].measured == pytest.approx(8 * 1024 / 8 / p.time.step_ms * 1e3)
    assert found["tokens a second"].ratio == pytest.approx(1)
    assert found.ok
    assert found.recalibrated.days == pytest.approx(p.days)


def test_a_session_teaches_the_plan(session):
    p = tiny(usd_per_gpu_hour=1.0)
    now = check(p, session).recalibrated
    speed = session.summary().tokens_per_s
    assert now.days == pytest.approx(1e9 / speed / 86400)
    assert now.usd == pytest.approx(1e9 / speed / 3600)
    assert now.time.tokens_per_s == pytest.approx(speed)
    assert now.setup == p.setup  # memory of a process corrects no slack
    assert check(now, session)["step"].ratio == pytest.approx(1)


SLOW = Ceilings("a test", bf16_tflops=1e-5, bandwidth_tb_s=1e-6, launch_us=1)  # seconds a step, on any machine
FAST = Ceilings("a test", bf16_tflops=1e3, bandwidth_tb_s=1e2, launch_us=1e-3)


def calibrated(ceilings, **more):
    return tiny(gpu=Gpu("cpu: mine", ceilings=ceilings, device="cpu"), tflops_per_gpu=None, **more)


def test_a_calibrated_processor(session):
    """No rate was given, so none is said to be; and there is one expectation of the step, not two."""
    fast, slow = (check(calibrated(c), session) for c in (FAST, SLOW))
    for c in (fast, slow):
        assert [row.term for row in c.rows if row.unit == "ms"] == ["step"]
        assert c["step"].how == "rates measured on a test"
        assert c["step"].kind == "prediction"
        assert "given" not in repr(c)
        assert c["rate of one GPU"].expected == pytest.approx(c.plan.estimate.tflops)
        step_ms = 64 / session.summary().tokens_per_s * 1e3
        assert c.recalibrated.time.step_ms == pytest.approx(step_ms)
    assert slow["step"].ratio < 1 < fast["step"].ratio
    # slow as emulation is, which the session knows
    assert "likely because the device has no products of its own" in fast.verdict
    assert slow.verdict.endswith(" times the plan.")
    by_hand = check(calibrated(FAST), {"step_ms": 50.0, "device": "cpu"})
    assert "because layers reach less than the large products of a calibration" in by_hand.verdict
    assert "profile a few steps, and check(profile) says where." in by_hand.verdict


def test_a_processors_quantizing_is_not_predicted(session):
    c = check(calibrated(FAST, recipe="fp8"), {"step_ms": 50.0, "device": "cpu"})
    assert c["step"].kind == "optimistic"
    assert "times an optimistic estimate" in c.verdict
    assert "datasheet" not in repr(c)
    assert c.ok


def test_a_plan_that_expects_nothing_says_so(session):
    c = check(tiny(tflops_per_gpu=None), session)
    assert c.verdict.startswith("Nothing that was measured can be compared")


def test_a_profile(session):
    ids = torch.randint(256, (2, 32))
    with sk.profile(steps=2, warmup=1) as profile:
        for _ in range(3):
            session.step({"input_ids": ids, "labels": ids})
    p = tiny()
    c = check(p, profile)
    s = profile.summary
    step_ms = s["unprofiled_ms"] or s["wall_ms"]
    assert c["step"].measured == pytest.approx(step_ms)
    assert c["tokens a second"].measured == pytest.approx(64 / step_ms * 1e3)
    assert "a profile of 2 steps on cpu" in repr(c)
    assert c.recalibrated.time.step_ms == pytest.approx(step_ms)
    with refused(ValueError):
        check(p.but(batch=4), profile)


def test_another_step_is_refused(session):
    with refused(ValueError) as caught:
        check(tiny(accumulate=2), session)
    assert "\n" not in str(caught.value)
    check(tiny(batch=1, length=64), session)  # the same tokens


def test_another_model_is_refused(session):
    other = sk.DecoderConfig(layers=4, width=64, heads=4, kv_heads=2, vocab=256, ffn=128)
    with refused(ValueError):
        check(plan(other, batch=2, length=32, gpus=1, gpu=None, mfu=None), session)
    with refused(ValueError):
        check(plan(), {"parameters": 8e9})


def test_another_device_teaches_nothing(session):
    p = plan(TINY, batch=2, length=32, gpus=1)
    c = check(p, session)
    assert "because cpu was measured, H100 is planned" in c.verdict
    assert "note: cpu was measured, H100 is planned" in repr(c)
    assert "at the measured rate" not in repr(c)
    with refused(ValueError):
        _ = c.recalibrated
    assert "MFU" not in [row.term for row in c.rows]
    reached = Gpu("cpu: mine", ceilings=Ceilings("now", bf16_tflops=0.1), device="cpu")
    assert check(tiny(gpu=reached), session).recalibrated.gpu == reached


def test_figures_by_hand():
    p = plan(usd_per_gpu_hour=2.0)
    slower = p.time.step_ms * 1.25
    c = check(p, {"step_ms": slower, "device": H100})
    assert c["step"].ratio == pytest.approx(1.25)
    assert c["tokens a second"].measured == pytest.approx(2 * 1024 / slower * 1e3)  # of one GPU, not of four
    assert c["tokens a second"].expected == pytest.approx(p.time.tokens_per_s / 4)
    assert c["MFU"].measured == pytest.approx(0.4 / 1.25)
    assert c["rate of one GPU"].measured == pytest.approx(0.4 * 989 / 1.25)
    now = c.recalibrated
    assert (now.days, now.usd) == pytest.approx((p.days * 1.25, p.usd * 1.25))
    assert now.time.mfu == pytest.approx(0.32)
    assert now.memory == p.memory
    assert f"(planned: {p.days * 24:.2f} hours)" in repr(c)
    assert "395.6 TFLOPS were given and 316.5 were reached" in c.verdict


def test_the_step_follows_from_the_speed():
    p = plan()
    per_gpu = p.time.tokens_per_s / 4
    c = check(p, {"tokens_per_s": per_gpu / 2})
    assert c["step"].measured == pytest.approx(2 * p.time.step_ms)
    with refused(ValueError):
        check(p, {"tokens_per_s": per_gpu, "step_ms": p.time.step_ms / 2})


def test_memory_and_slack():
    p = plan()
    tensors = getattr(p.memory, "peak_gib", None) or p.memory.gib / (1 + p.setup.slack)
    c = check(p, {"peak_gib": tensors * 1.3, "device": H100})
    assert c["memory, tensors"].ratio == pytest.approx(1.3)
    assert c.slack == pytest.approx(1.3 * (1 + p.setup.slack) - 1)
    assert c.recalibrated.memory.gib == pytest.approx(1.3 * p.memory.gib)
    assert c.recalibrated.days == p.days
    assert "the largest approximate term" in c.verdict
    # what the allocator held says the slack outright
    held = check(p, {"peak_gib": tensors, "reserved_gib": tensors * 1.07})
    assert held.slack == pytest.approx(0.07)
    assert held.recalibrated.memory.gib == pytest.approx(tensors * 1.07)
    assert check(p, {"peak_gib": tensors / 10}).slack == 0  # never below what is predicted
    on_cpu = p.but(gpu=None, mfu=None)
    assert check(on_cpu, {"peak_gib": on_cpu.memory.gib, "device": "cpu"}).slack > p.setup.slack


def test_a_time_that_cannot_be_is_said():
    p = plan(gpus=1)
    c = check(p, {"step_ms": p.flops_per_step / 4000e12 * 1e3, "device": H100})
    assert (
        "4,000 TFLOPS are above H100's fastest dense peak of 1979, so the time is wrong: wait for the device" in repr(c)
    )
    with refused(ValueError) as caught:
        _ = c.recalibrated
    assert "\n" not in str(caught.value)


def test_memory_that_no_slack_explains():
    p = plan()
    c = check(p, {"peak_gib": p.memory.gib * 3, "step_ms": p.time.step_ms})
    assert c.recalibrated.memory == p.memory
    assert "more than any slack explains" in repr(c)


def test_a_recipes_peak_may_be_passed_and_a_toy_may_crawl():
    fp8 = plan(recipe="fp8", gpus=1)
    fast = check(fp8, {"step_ms": fp8.flops_per_step / 1200e12 * 1e3})
    assert fast.recalibrated.time.rate_tflops == pytest.approx(1200)
    toy = plan(TINY, batch=2, length=32, gpus=1)
    crawl = check(toy, {"step_ms": 5.0, "device": H100})
    assert crawl.tflops_per_gpu < 989 / 1000
    assert crawl.recalibrated.time.step_ms == pytest.approx(5.0)


def test_the_worst_miss_stands_first():
    p = plan(gpus=1)
    tensors = getattr(p.memory, "peak_gib", None) or p.memory.gib / (1 + p.setup.slack)
    step = p.time.step_ms
    slow = check(p, {"step_ms": step * 1.5, "peak_gib": tensors * 1.2})
    assert (slow.rows[0].term, slow.worst.term) == ("step", "step")
    large = check(p, {"step_ms": step * 1.2, "peak_gib": tensors * 0.5})  # a half is further off than 1.2
    assert large.rows[0].term == "memory, tensors"
    misses = [round(row.miss, 6) for row in slow.rows if row.kind not in ("bound", "measured", "optimistic")]
    assert misses == sorted(misses, reverse=True)


def test_within_a_tenth():
    p = plan(gpus=1)
    c = check(p, {"step_ms": p.time.step_ms * 1.04})
    assert c.ok
    assert c.verdict.startswith("Every prediction is met within 10%; most off is the step")


def test_idle_time_is_named_before_the_rate():
    p = plan(gpus=1)
    c = check(p, {"step_ms": p.time.step_ms * 2, "idle_frac": 0.45})
    assert "likely because the device idled 45% of the step" in c.verdict
    wall = p.time.step_ms * 2
    profile = SimpleNamespace(
        summary={
            "wall_ms": wall,
            "idle_ms": wall / 2,
            "host_wait_ms": wall / 2,
            "kernel_wait_ms": 0.0,
            "other_wait_ms": 0.0,
            "unprofiled_ms": None,
            "overhead_ms": 0.1 * wall,
            "tokens_per_s": 2048 / wall * 1e3,
            "peak_gib": 10.0,
            "steps": 3,
            "device": H100,
            "activity": "gpu",
        }
    )
    c = check(p, profile)
    assert f"idled 50% of the step, {wall / 2:.3g} ms of it for the host" in c.verdict
    assert "the profiler's own share" in repr(c)
    assert c["memory, tensors"].measured == 10


def test_without_a_rate_there_is_a_bound():
    p = plan(gpus=1, mfu=None)
    c = check(p, {"step_ms": 2.5 * p.time.floor_step_ms, "device": H100})
    assert c["step"].kind in ("bound", "optimistic")
    assert "Nothing was predicted; the step is " in c.verdict
    assert "plan with gpu=calibrate() for a prediction" in c.verdict
    assert c.ok  # nothing predicted was missed
    assert c["rate of one GPU"].expected is None
    assert c.recalibrated.time.step_ms == pytest.approx(2.5 * p.time.floor_step_ms)


def test_an_estimate_stands_beside_the_given_rate(monkeypatch):
    estimate = SimpleNamespace(step_ms=50.0, kind="prediction", how="at measured rates")
    monkeypatch.setattr(Plan, "estimate", estimate, raising=False)
    c = check(plan(gpus=1), {"step_ms": 75.0})
    assert c["step, estimated"].ratio == pytest.approx(1.5)
    assert c["step"].how == "at the given rate"
    assert check(plan(gpus=1, mfu=None), {"step_ms": 75.0})["step"].expected == 50


def profile_of(modules, step_ms):
    """A profile's summary and its table of modules: (path, depth, own ms)."""
    names, depths, own = zip(*modules)
    return SimpleNamespace(
        summary={
            "wall_ms": step_ms,
            "tokens_per_s": 2048 / step_ms * 1e3,
            "steps": 3,
            "device": H100,
            "activity": "gpu",
        },
        modules={"module": names, "depth": depths, "self_ms": own},
    )


def test_a_profile_beside_an_estimate_module_by_module(monkeypatch):
    by_module = {
        "mlp.down_proj": 10.0,
        "attention": 4.0,
        "rope": 1.0,
        "norm": 2.0,
        "last norm": 0.5,
        "lm_head": 3.0,
        "loss": 2.0,
    }
    by_module |= {"optimizer": 5.0, "residual": 1.5}
    estimate = SimpleNamespace(step_ms=29.0, kind="prediction", how="at measured rates", by_module=lambda: by_module)
    monkeypatch.setattr(Plan, "estimate", estimate, raising=False)
    modules = [
        ("LlamaForCausalLM", 0, 2.5),  # the loss
        ("lm_head", 1, 3.5),
        ("model", 1, 0.25),
        ("model.layers.0", 2, 0.75),
        ("model.layers.0.mlp.down_proj", 4, 5.5),
        ("model.layers.1.mlp.down_proj", 4, 6.5),
        ("model.layers.0.self_attn", 3, 14.0),
        ("model.layers.0.input_layernorm", 3, 2.0),
        ("model.layers.0.self_attn.q_norm", 4, 0.5),
        ("model.norm", 2, 0.5),
        ("(optimizer)", 0, 4.25),
        ("(clip)", 0, 0.25),
        ("(loss)", 0, 0.5),
        ("(backward)", 0, 0.5),
    ]
    c = check(plan(gpus=1, mfu=None), profile_of(modules, 41.0))
    measured = {row.term: row.measured for row in c.modules}
    assert measured == {
        "attention and rope": 14.0,
        "mlp.down_proj": 12.0,
        "head and loss": 6.5,
        "norms": 3.0,
        "optimizer": 4.5,
        "all else": 1.5,
    }
    assert sum(measured.values()) == sum(ms for _, _, ms in modules)
    assert sum(row.expected for row in c.modules) == sum(by_module.values())
    assert [row.term for row in c.modules[:2]] == ["attention and rope", "mlp.down_proj"]  # 9 ms and 2 ms are missed
    assert c["attention and rope"].ratio == pytest.approx(14 / 5)
    assert "likely in attention and rope, 14 ms where 5 ms were expected, the most of any module." in c.verdict
    assert set(c.table()["group"]) == {"run", "module"}
    assert "by module" in repr(c)
    assert c._repr_html_().count("<tr>") == c._repr_html_().count("</tr>")


def test_a_number_of_parameters():
    p = make(8e9, tokens=1e12, gpus=8, gpu="H100", tflops_per_gpu=400)
    c = check(p, {"tokens_per_s": 10_000})
    assert c["rate of one GPU"].measured == pytest.approx(6 * 8e9 * 1e4 / 1e12)
    assert c.recalibrated.days == pytest.approx(1e12 / (8 * 1e4) / 86400)
    assert check(p, {"peak_gib": 70.0})["memory, tensors"].expected is None  # activations are left out
    with refused(ValueError):
        _ = check(p, {"peak_gib": 70.0}).recalibrated


def test_flops_of_a_counter():
    p = plan(gpus=2)
    c = check(p, {"flops": p.flops_per_step / 2 * 1.5})
    assert c["FLOPs a step"].ratio == pytest.approx(1.5)
    assert "the plan counts attention as causal" in c.verdict


def test_forms():
    c = check(plan(usd_per_gpu_hour=2.0), {"step_ms": 100.0, "loss": 2.5, "device": H100})
    table = c.table()
    assert list(table.columns) == ["group", "term", "expected", "measured", "ratio", "unit", "kind", "how"]
    assert len(table) == len(c.rows)
    html = c._repr_html_()
    assert html.count("<tr>") == html.count("</tr>")
    assert "likely" in html
    for row in c.rows:
        assert row.term in repr(c)
    with refused(KeyError):
        c["speed"]


def test_recipes_that_differ_are_said(session):
    assert "recipe fp8 was measured, bf16 is planned" in repr(check(tiny(recipe="bf16"), session))


@pytest.mark.parametrize(
    ("measured", "error"),
    [
        (None, TypeError),
        (3.5, TypeError),
        ({}, ValueError),
        ({"device": "cpu"}, ValueError),
        ({"step": 3}, ValueError),
        ({"step_ms": "3"}, TypeError),
        ({"step_ms": True}, TypeError),
        ({"step_ms": 0}, ValueError),
        ({"peak_gib": math.nan}, ValueError),
        ({"idle_frac": 40}, ValueError),
        ({"step_ms": 3, "device": 0}, TypeError),
        ({"tokens": 4096, "step_ms": 3}, ValueError),
        (SimpleNamespace(summary={"wall_ms": None}), ValueError),
    ],
)
def test_what_cannot_be_compared(measured, error):
    with refused(error) as caught:
        check(plan(), measured)
    assert "\n" not in str(caught.value)


def test_a_session_that_has_not_run_says_so(tmp_path):
    ids = torch.randint(256, (2, 32))
    batches = [{"input_ids": ids, "labels": ids}]
    s = sk.Session(sk.Decoder(TINY), batches, optimizer=sk.AdamW(lr=1e-3), run_dir=tmp_path, compile=False)
    with refused(ValueError):
        check(tiny(), s)


@settings(max_examples=30, deadline=None)
@given(times=st.floats(0.5, 50), more=st.floats(1, 1.8))
def test_a_plan_that_learned_meets_what_it_learned_from(times, more):
    p = plan(gpus=1, mfu=0.3)
    tensors = getattr(p.memory, "peak_gib", None) or p.memory.gib / (1 + p.setup.slack)
    measured = {"step_ms": p.time.step_ms * times, "peak_gib": tensors * more, "device": H100}
    now = check(p, measured).recalibrated
    assert now.time.step_ms == pytest.approx(measured["step_ms"])
    assert now.memory.gib == pytest.approx(tensors * more * (1 + p.setup.slack))
    assert now.days == pytest.approx(p.days * times)
