"""The three formulas of offload against figures worked out elsewhere, and the choice between them."""

from __future__ import annotations

import dataclasses
import inspect
import time
from contextlib import closing
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import surokit as sk
from surokit import planner
from surokit.bench.offload_emulated import Sleeper, link_of
from surokit.hardware.gpus import Ceilings, Gpu, find_gpu
from surokit.offload import adamw, columns, link
from surokit.offload.columns import Columns
from surokit.planner.offload import formulas
from surokit.planner.offload.formulas import (
    GIB,
    Host,
    Room,
    device_bytes,
    host_bytes,
    host_of,
    largest_on_host,
    predict_offload,
    stall_gain,
)
from surokit.planner.planning import Plan
from tests.refusals import refused

# host AdamW of 1.7e9 parameters in 408 ms, its adding up in 136 ms
HOST = Host(link_gb_s=50, adam_params_s=1.7e9 / 0.408, memory_gib=500)


def plan(what, **options):
    """Untyped, so that figures that may be None are used as they are."""
    return planner.plan(what, **options)


def predicted(compute_ms=360.0, parameters=1.7e9, host=HOST, **given):
    return predict_offload(compute_ms, parameters, host, **given)


def test_the_formulas_by_hand():
    o = predicted(90.0)
    link = 2 * 1.7e9 / 50e9 * 1e3  # 68 ms
    assert o.none_ms == 90
    # AdamW is the slowest of the three, in transfers of 64 MiB; what goes down before it and up behind it is one transfer each
    transfers = 2 * 1.7e9 / 2**26
    assert o.synchronous_ms == pytest.approx(90 + 408 + 2 * link / transfers)
    few = predicted(90.0, parameters=1e7)
    assert few.synchronous_ms == pytest.approx(90 + 2.4 + 2 * 0.4 / 16)
    # a tenth is hot; the rest goes down each step and up every fourth, which nothing hides
    assert o.traffic == 1.125
    assert o.landing_ms == pytest.approx(0.9 * 68 / 4)
    # .9 x 68 = 61.2 ms down, .9 x 408 / 4 = 91.8 of AdamW, .9 x 136 = 122.4 of adding up: more than the 90 of compute
    assert o.zenflow_ms == pytest.approx(122.4 + 15.3)
    assert o.binds == "adding"
    assert HOST.adds_params_s == pytest.approx(1.7e9 / 0.136)
    # with enough tokens a step nothing stalls
    big = predicted(360.0)
    assert (big.zenflow_ms, big.binds) == (pytest.approx(360 + 15.3), "compute")
    assert big.removed == pytest.approx(1 - 15.3 / (big.synchronous_ms - 360))
    assert big.use == "surokit.ZenFlow(topk_ratio=0.1, update_interval=4)"


def test_without_overlap_all_of_the_hosts_update_is_waited_for():
    """At a window's end the last gradients come down and are added, AdamW updates all cold columns, and they land."""
    adam, adding, link = 0.9 * 408, 0.9 * 136, 0.9 * 68
    for compute, interval, binds in ((90.0, 1, "AdamW"), (90.0, 4, "adding"), (360.0, 4, "compute")):
        o = predicted(compute, update_interval=interval, overlap_step=False)
        window = compute + (interval - 1) * max(compute, adding) + adding + adam + link
        assert o.zenflow_ms == pytest.approx(window / interval)
        assert o.landing_ms == pytest.approx(link / interval)
        assert o.zenflow_ms == pytest.approx(max(compute, adding) + o.update_ms + o.landing_ms)
        assert o.zenflow_ms > predicted(compute, update_interval=interval).zenflow_ms
        assert o.binds == binds
    assert predicted().update_ms == 0
    assert o.use == "surokit.ZenFlow(topk_ratio=0.1, update_interval=4, overlap_step=False)"


@pytest.mark.soak  # it compares seconds, which needs a machine that does nothing else
@pytest.mark.parametrize("overlap", [True, False])
def test_a_steps_time_on_an_emulated_device(overlap, monkeypatch):
    """A device that sleeps, a slow link, and a host whose AdamW takes its time. What else runs here makes it slower at times, and
    never faster."""
    compute_s, link_s, adam_s, update = 0.1, 0.08, 0.12, Columns.update_cold

    def update_slowly(*args: Any) -> Any:
        time.sleep(adam_s)
        return update(*args)

    monkeypatch.setattr(Columns, "update_cold", update_slowly)
    device, weight = Sleeper(compute_s), torch.nn.Parameter(torch.randn(128, 128))
    weight.grad = torch.randn(128, 128)
    gb_s, n = 4 * weight.numel() / 1e9 / link_s, weight.numel()
    options: dict[str, Any] = {"topk_ratio": 0.25, "update_interval": 2, "overlap_step": overlap}

    def window_ms() -> float:
        begun = time.perf_counter()
        for _ in range(2):
            device.compute()
            optimizer.step()
        return (time.perf_counter() - begun) * 1e3

    with closing(link_of(device, gb_s)) as link, closing(sk.ZenFlow([weight], link=link, **options)) as optimizer:
        window_ms()  # makes the states
        took_ms = min(window_ms() for _ in range(3)) / 2
    host = Host(gb_s, 0.75 * n / adam_s, accumulate_params_s=1e12)
    o = predict_offload(1e3 * compute_s, n, host, gradient_bytes=4, **options)
    assert took_ms == pytest.approx(o.zenflow_ms, rel=0.1)


@pytest.mark.parametrize(
    ("host", "binds", "ms"),
    [
        (Host(1.0, 1e12), "link", 1.125 * 3.4e3),
        (Host(1e3, 1e8, accumulate_params_s=1e12), "AdamW", 0.9 * 17e3 / 4 + 0.765),
        (Host(1e3, 1e8), "adding", 0.9 * 17e3 / 3 + 0.765),
        (Host(1e3, 1e12), "compute", 90.765),
    ],
)
def test_what_binds(host, binds, ms):
    """Where the link does, both directions together are its traffic."""
    o = predicted(90.0, host=host)
    assert o.binds == binds
    assert o.zenflow_ms == pytest.approx(ms)


def test_gain_of_a_stall():
    assert stall_gain(0.5, 0.85) == pytest.approx(1.74, abs=0.005)
    assert stall_gain(0.93, 0.85) == pytest.approx(4.8, abs=0.03)
    assert stall_gain(1 - 0.5 / 7, 1.0) == pytest.approx(14)  # 0.5 s became 7 s
    for stalled, removed in ((1.5, 0.5), (-0.1, 0.5), (0.5, 2)):
        with refused(ValueError):
            stall_gain(stalled, removed)
    with refused(ValueError):
        stall_gain(1.0, 1.0)


@given(
    compute=st.floats(1, 1e4),
    parameters=st.floats(1e7, 1e11),
    link=st.floats(1, 1000),
    rate=st.floats(1e8, 1e11),
    k=st.floats(0, 0.99),
    s=st.integers(1, 64),
)
def test_the_gain_is_the_ratio_of_the_two(compute, parameters, link, rate, k, s):
    o = predicted(compute, parameters, Host(link, rate), topk_ratio=k, update_interval=s)
    assert o.zenflow_ms >= o.none_ms
    assert o.none_ms < o.synchronous_ms
    assert o.removed <= 1
    assert o.gain == pytest.approx(1 / (1 - o.removed * o.stalled), rel=1e-6)
    if o.removed >= 0:  # a link that binds carries both directions at once the synchronous way
        assert o.gain == pytest.approx(stall_gain(o.stalled, o.removed), rel=1e-6)
    else:
        assert o.choice == "synchronous"
        assert o.binds != "compute" or o.landing_ms > o.synchronous_ms - o.none_ms
    assert o.traffic == pytest.approx((1 - k) * (1 + 1 / s))


def test_without_deferral_traffic_is_the_models_twice():
    assert predicted(topk_ratio=0, update_interval=1).traffic == 2.0


def test_memory_of_the_host():
    # 8B with three slots of bf16 gradients and updated weights that wait: 28 bytes of what is not hot
    qwen3_8b = 8.19e9
    assert host_bytes(qwen3_8b) / GIB == pytest.approx(213.6, abs=0.05)
    assert host_bytes(qwen3_8b, 0.1) / GIB == pytest.approx(192.2, abs=0.05)
    assert largest_on_host(213.57) == pytest.approx(qwen3_8b, rel=0.001)
    assert host_bytes(1.0, 0.1) == pytest.approx(0.9 * (12 + 8 + 3 * 2 + 2))
    assert host_bytes(qwen3_8b, None) / GIB == pytest.approx(12 * qwen3_8b / GIB + 6 / 16)
    assert host_bytes(1e6, None) == pytest.approx(12e6 + 6 * 2e6 / 16)
    o = predicted(parameters=qwen3_8b, compute_ms=1e4)
    assert o.device_gib["none"] == pytest.approx(12 * qwen3_8b / GIB)
    # states; gradients on their way; what comes back through three buffers, and the synchronous way's three transfers each way
    assert o.device_gib["zenflow"] == pytest.approx((0.1 * 12 + 0.9 * 2) * qwen3_8b / GIB + 3 / 16)
    assert o.device_gib["synchronous"] == pytest.approx(6 / 16)
    assert device_bytes(1e6, 0.1) == pytest.approx(1.2e6 + 4 * 1.8e6)
    assert device_bytes(1e6, None) == pytest.approx(6 * 2e6 / 16)
    assert o.host_gib["synchronous"] < o.host_gib["zenflow"]  # no sums, no slots


def test_the_planners_sizes_are_the_optimizers():
    """The planner knows no torch, so it cannot ask."""
    assert (formulas._TRANSFER_BYTES, formulas._STAGED) == (columns.TRANSFER_BYTES, link._BUFFERS)
    assert (formulas._RING, formulas.TRANSFERS) == (2 * adamw._RING, adamw.TRANSFERS)
    settings = inspect.signature(sk.ZenFlow.__init__).parameters
    for name, value in (
        ("slots", formulas.SLOTS),
        ("topk_ratio", formulas.HOT),
        ("update_interval", formulas.INTERVAL),
    ):
        assert settings[name].default == value


@given(memory=st.floats(0.01, 4096), k=st.none() | st.floats(0, 0.9), slots=st.integers(1, 20), overlap=st.booleans())
def test_the_largest_model_fills_the_host(memory, k, slots, overlap):
    most = largest_on_host(memory, k, slots=slots, overlap=overlap)
    assert host_bytes(most, k, slots=slots, overlap=overlap) / GIB == pytest.approx(memory)


def test_the_choice_and_its_reason():
    assert predicted(fits=True).choice == "none"
    assert predicted(fits=True).why == "the GPU's memory suffices, and offload only adds time"
    flow = predicted(fits=False)
    assert flow.choice == "zenflow"
    assert flow.why.startswith(
        f"ZenFlow's step is {flow.synchronous_ms / (360 + 15.3):.2f} times as fast as OffloadAdamW's, bound by compute; deferred"
    )
    long = predicted(compute_ms=1e5)
    assert (long.choice, long.use) == ("synchronous", "surokit.OffloadAdamW")
    assert "computes what AdamW does" in long.why
    assert long.why.startswith("not known whether it fits without: ")
    small = dataclasses.replace(HOST, memory_gib=16)
    none = predicted(host=small)
    assert none.choice is None
    assert none.use == ""
    assert "the host's 16.0 GiB hold no more than 1.398 B trained parameters" in none.why
    assert "train an adapter" in none.why
    room = Room(11.0, {"none": 20.0, "synchronous": 10.0, "zenflow": 12.0})
    tight = predicted(room=room)
    assert tight.choice == "synchronous"
    assert "lower topk_ratio to use it" in tight.why
    assert tight.fits == {"none": False, "synchronous": True, "zenflow": False}
    states = dataclasses.replace(HOST, memory_gib=host_bytes(1.7e9, None) / GIB)  # no sums, no slots
    assert predicted(host=states).choice == "synchronous"
    assert "ZenFlow's sums and slots" in predicted(host=states).why
    half = dataclasses.replace(HOST, memory_gib=host_bytes(1.7e9, 0.7) / GIB)  # less than all states take
    assert predicted(host=half, topk_ratio=0.7).choice == "zenflow"
    assert predicted(host=half, topk_ratio=0.7, compute_ms=1e5).choice == "zenflow"
    lost = predicted(host=half, topk_ratio=0.7, room=room)
    assert lost.choice is None
    assert "lower topk_ratio" in lost.why


def test_the_table():
    frame = predicted().table()
    assert list(frame.way) == ["none", "synchronous", "zenflow"]
    assert frame.gpu_gib.isna().all()
    assert list(frame.way[frame.chosen]) == ["zenflow"]
    assert frame.speed[0] == 1.0


def test_a_host_from_a_calibration():
    ceilings = Ceilings("a machine", host_gb_s=25.0, host_adam_params_s=3e9, host_accumulate_params_s=8e9)
    assert host_of(Gpu("Mine", ceilings=ceilings), 256) == Host(25.0, 3e9, 256, 8e9)
    assert host_of(Gpu("Mine", host_gb_s=25.0)) is None  # nobody measured the host's AdamW


def test_a_plan_of_an_optimizer_that_offloads():
    """On the device hot states, and cold gradients until they have left. The prediction takes the plan's k, and none of fitting."""
    options: dict[str, Any] = {"tokens": 1e9, "dtype": "bf16", "gpu": "H100", "mfu": 0.4}
    whole, flow, synchronous = (plan(1e9, optimizer=name, **options) for name in ("adamw", "zenflow", "offloadadamw"))
    assert flow.memory["optimizer"].bytes == pytest.approx(1.2e9 + 0.9 * 2e9 + 3 * 2**26)
    assert synchronous.memory["optimizer"].bytes == 6 * 2**26
    assert whole.memory["optimizer"].bytes == 4e9
    spec = plan(1e9, optimizer=sk.ZenFlow(topk_ratio=0.25), **options)
    assert spec.memory["optimizer"].bytes == pytest.approx(3e9 + 0.75 * 2e9 + 3 * 2**26)
    assert spec.but(gpus=2).memory["optimizer"].bytes == pytest.approx(4.5e9 + 3 * 2**26)
    assert "25%" in spec.memory["optimizer"].how


def test_a_plan_of_a_session_that_offloads():
    """The session's own k; on a CPU both sides are the same memory."""
    model = sk.Decoder(sk.DecoderConfig(layers=2, width=32, heads=2, kv_heads=1, vocab=64, ffn=48))
    ids = torch.zeros(2, 16, dtype=torch.int64)
    session = sk.Session(model, [{"input_ids": ids, "labels": ids}], optimizer=sk.ZenFlow(topk_ratio=0.5))
    there = sk.plan(session, gpu="H100", mfu=0.4)
    trained = there.trained_parameters
    assert there.setup.hot == 0.5
    assert (
        there.memory["optimizer"].bytes == (6 + 4 * 0.5 * 4) * trained
    )  # small: what stages weights holds all of them
    formulas = there.offload(HOST)
    assert formulas.topk_ratio == 0.5
    assert (formulas.choice, formulas.fits["none"]) == ("none", True)
    assert there.offload(HOST, fits=False).choice == "zenflow"
    here = sk.plan(session)
    assert here.memory["optimizer"].bytes == pytest.approx(6 * trained + host_bytes(trained, 0.5, 4))


def test_a_session_holds_what_its_plan_says():
    """On a CPU both sides are the same memory. What columns change sides through is not planned, and the same for all three."""
    held, planned = [], []
    ids = torch.randint(512, (2, 32))
    settings: list[dict[str, Any]] = [{}, {"overlap_step": False}, {"slots": 8}]
    for own in settings:
        torch.manual_seed(0)
        model = sk.Decoder(sk.DecoderConfig(layers=1, width=128, heads=4, kv_heads=2, vocab=512, ffn=352))
        session = sk.Session(model, [{"input_ids": ids, "labels": ids}] * 9, optimizer=sk.ZenFlow(lr=1e-3, **own))
        session.run(9)
        optimizer: Any = session.optimizer
        report = optimizer.report()
        held.append(report.host_bytes + report.device_bytes)
        planned.append(sk.plan(session).memory["optimizer"].bytes)
    for more in (1, 2):
        assert planned[more] - planned[0] == pytest.approx(held[more] - held[0], rel=0.01)
        assert planned[more] == pytest.approx(held[more], rel=0.1)


# -- asked of a plan

QWEN_8B = {
    **{"model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936},
}
STEP: dict[str, Any] = {"batch": 4, "length": 4096, "mfu": 0.4, "recipe": "bf16"}
FAST = Host(link_gb_s=50, adam_params_s=5e9)


def test_every_way_is_held_against_the_gpus_memory():
    """Weights and gradients alone are more than there is: no way is advised, and what is left is named."""
    for what, gpu in ((QWEN_8B, "RTX4090"), ("8e9", "RTX4090"), ("70e9", "H100")):
        o = plan(what, gpu=gpu, **STEP).offload(FAST)
        assert (o.choice, o.use) == (None, "")
        assert set(o.fits.values()) == {False}
        for said in ("none of these fits", "an adapter", "sk.offload_weights", "sk.offload_activations", "more GPUs"):
            assert said in o.why
    # what fits is taken, and by the plan's own count of memory
    p = plan(QWEN_8B, gpu="H100", recompute="full", state_dtype="fp32", master=True, **STEP)
    o = p.offload(FAST)
    assert o.fits == {"none": False, "synchronous": True, "zenflow": True}
    assert o.choice == "zenflow"
    assert o.gpu_gib["zenflow"] == p.but(optimizer=sk.ZenFlow(topk_ratio=0.1)).memory.gib < 80 < p.memory.gib
    assert o.gpu_gib["synchronous"] == p.but(optimizer="offloadadamw").memory.gib
    # too much for ZenFlow, and not for the synchronous way
    tight = p.but(gpu=Gpu("Small", memory_gib=50, bf16_tflops=989)).offload(FAST)
    assert (tight.choice, tight.fits["zenflow"]) == ("synchronous", False)


def test_what_a_number_does_not_tell():
    """A number near a known model has the activations of a typical shape; of another they are not known, and that is said."""
    tiny = plan("1e6", gpu="H100", **STEP).offload(HOST)
    assert (tiny.choice, tiny.use) == ("none", "surokit.AdamW")
    assert "fits but for the activations, which a number of parameters does not tell" in tiny.why
    small = plan("1e9", gpu="H100", **STEP).offload(HOST)
    assert small.fits["none"]
    assert small.why == "the GPU's memory suffices, and offload only adds time"
    large = plan("8e9", gpu="H100", **STEP).offload(HOST)
    assert large.fits["none"] is False
    unknown = plan(QWEN_8B, tflops_per_gpu=400, batch=4, length=4096).offload(HOST)
    assert "not known whether it fits without: the plan names no GPU" in unknown.why


def test_states_are_those_of_the_plans_optimizer():
    """Not 12 bytes a parameter where moments are in bf16, or in 8 bits."""
    n = plan(QWEN_8B).parameters
    p = plan(QWEN_8B, gpu="H200", **STEP)
    for changes, each in (
        ({}, 4),
        ({"state_dtype": "fp32"}, 8),
        ({"state_dtype": "fp32", "master": True}, 12),
        ({"optimizer": "adamw8bit"}, 2 * (1 + 4 / 256)),
        ({"optimizer": "zenflow"}, 4),
    ):
        o = p.but(**changes).offload(FAST)
        assert o.device_gib["none"] == pytest.approx(each * n / GIB)
    assert p.but(optimizer="adamw8bit", recompute="full").offload(FAST).use == "surokit.AdamW8bit"
    # masters and moments in float32 are the host's then
    assert "master weights" not in [t.name for t in p.but(optimizer="offloadadamw", master=True).memory.terms]


def test_zenflows_settings_are_the_plans():
    p = plan(QWEN_8B, gpu="H100", optimizer=sk.ZenFlow(update_interval=8, topk_ratio=0.05), **STEP)
    o = p.offload(FAST)
    assert (o.update_interval, o.topk_ratio) == (8, 0.05)
    assert p.offload(FAST, update_interval=2).update_interval == 2
    own = p.but(optimizer=sk.ZenFlow(overlap_step=False, slots=8))
    found = own.offload(FAST)
    assert (found.overlap_step, found.slots) == (False, 8)
    assert found.host_gib["zenflow"] == pytest.approx(0.9 * (12 + 4 + 9 * 2) * p.parameters / GIB)
    assert found.host_gib["zenflow"] == pytest.approx(own.memory.host_gib)
    assert found.zenflow_ms > p.offload(FAST, topk_ratio=0.1, update_interval=4).zenflow_ms
    built = sk.ZenFlow([torch.nn.Parameter(torch.ones(2, 2))], slots=8, overlap_step=False)
    assert p.but(optimizer=built).memory.host_gib == own.memory.host_gib
    assert plan(QWEN_8B, gpu="H100", dtype="fp32", **STEP).offload(FAST).landing_ms > o.landing_ms  # 4 bytes a gradient


def test_windows_by_the_auto_rule_are_taken_to_have_four_steps_and_that_is_said():
    p = plan(QWEN_8B, gpu="H100", optimizer=sk.ZenFlow(update_interval="auto"), **STEP)
    said = "windows by the 'auto' rule are is not known"
    assert any(said in note for note in p.notes)
    o = p.offload(FAST)
    assert o.update_interval == 4
    assert said in o.why
    assert said not in p.offload(FAST, update_interval=4).why
    assert not any(said in note for note in p.but(optimizer="zenflow").notes)


def test_all_hot_is_no_offload():
    p = plan(QWEN_8B, gpu="H100", optimizer=sk.ZenFlow(topk_ratio=1.0), **STEP)
    with refused(ValueError):
        p.offload(FAST)
    assert p.offload(FAST, topk_ratio=0.1).topk_ratio == 0.1
    assert p.memory.host_gib == 0


def calibrated(**rates):
    """A GPU whose rates were measured, and of its host those given."""
    ceilings = Ceilings("one machine", bf16_tflops=700, bandwidth_tb_s=3.0, launch_us=4.0, **rates)
    return dataclasses.replace(find_gpu("H100"), ceilings=ceilings)


def test_a_time_says_whether_it_counts_the_offload():
    given = plan(QWEN_8B, gpu="H100", optimizer="offloadadamw", **STEP)
    assert "at the given 395.6 TFLOPS of each GPU, without the offload" in repr(given)
    assert any(
        "plan.offload(planner.Host(link_gb_s=50, adam_params_s=2e9)) predicts a step with it" in n for n in given.notes
    )
    assert "without the offload" not in repr(given.but(optimizer="adamw"))
    likely = plan(QWEN_8B, batch=4, length=4096, gpu="H100", optimizer="zenflow")
    assert "without the offload" not in repr(likely)
    assert any("the likely step counts what ZenFlow's states on the host add" in note for note in likely.notes)
    unknown = likely.but(gpu="GB200")  # whose link to the host is not known
    assert "without the offload" in repr(unknown)
    step: dict[str, Any] = {"batch": 4, "length": 4096, "recompute": "full", "tokens": 1e9, "usd_per_gpu_hour": 2.0}
    gpu = calibrated(host_gb_s=25.0, host_adam_params_s=3e9)
    waiting = sk.ZenFlow(overlap_step=False, update_interval="auto")
    for name, ms in (("offloadadamw", "synchronous_ms"), ("zenflow", "zenflow_ms"), (waiting, "zenflow_ms")):
        p = plan(QWEN_8B, gpu=gpu, optimizer=name, **step)
        o = p.offload()
        assert o.none_ms == p.estimate.step_ms
        assert p.time.step_ms == pytest.approx(getattr(o, ms))
        alone = plan(QWEN_8B, gpu=calibrated(), optimizer=name, **step)  # nobody measured the host
        slower = p.time.step_ms / alone.time.step_ms
        assert slower == pytest.approx(getattr(o, ms) / o.none_ms)
        assert slower > 1
        for figure in ("days", "gpu_hours", "usd"):
            assert getattr(p, figure) == pytest.approx(slower * getattr(alone, figure))
        assert p.time.tokens_per_s == pytest.approx(alone.time.tokens_per_s / slower)
        assert "without the offload" not in repr(p)
        assert "without the offload" in repr(alone)
        assert any("on the host add, at calibrated rates" in note for note in p.notes)


def test_hosts_memory_is_the_plans_own_count():
    for changes in ({}, {"gpus": 8, "zero": 2}, {"recipe": sk.BF16.lora()}, {"dtype": "fp32"}):
        p = plan(QWEN_8B, gpu="H100", **STEP).but(**changes)
        o = p.offload(FAST)
        for way, optimizer in (("synchronous", "offloadadamw"), ("zenflow", "zenflow")):
            assert o.host_gib[way] == pytest.approx(p.but(optimizer=optimizer).memory.host_gib)


def test_little_or_nothing_that_trains():
    gpu, step = calibrated(host_gb_s=25.0, host_adam_params_s=3e9), {"batch": 4, "length": 64}
    tiny = sk.DecoderConfig(layers=1, width=16, heads=2, kv_heads=1, vocab=32, ffn=32)
    for what, optimizer in ((tiny, "zenflow"), (tiny, "offloadadamw"), (QWEN_8B, sk.ZenFlow(topk_ratio=1))):
        p = plan(what, gpu=gpu, optimizer=optimizer, **step)
        assert p.time.step_ms == pytest.approx(p.estimate.step_ms)
        assert p.time.waits_ms == 0
    for options in ({"training": False}, {"recipe": sk.QFP8}):
        with refused(ValueError):
            plan(8e9, gpu="H100", **{**STEP, **options}).offload(FAST)


def test_graphs_are_left_out_beside_an_offload():
    p = plan(QWEN_8B, gpu="H100", optimizer="zenflow", graphs=True, **STEP)
    assert not p.setup.graphs
    assert any("graphs=True is left out" in note for note in p.notes)


def test_it_prints():
    o = plan(QWEN_8B, gpu="B200", **STEP).offload(FAST)
    text, html = repr(o), o._repr_html_()
    assert text.startswith("Offload of 8.191 B trained parameters: take surokit.AdamW\n  the GPU's memory suffices")
    assert [line.split()[0] for line in text.splitlines()[4:]] == ["AdamW", "OffloadAdamW", "ZenFlow(topk_ratio=0.1,"]
    assert text.splitlines()[4].split()[-2:] == ["MiB", "taken"]
    assert html.count("<tr>") == html.count("</tr>") == 4
    assert html.startswith("<b>Offload of 8.191 B trained parameters: take surokit.AdamW</b><div>the GPU&#x27;s memory")
    assert repr(plan("70e9", gpu="H100", **STEP).offload(FAST)).startswith(
        "Offload of 70 B trained parameters: no choice\n"
    )


def test_advice_holds_against_the_host():
    """No way is advised that its memory has no room for, and the table says which it has."""
    p = plan(QWEN_8B, gpu=Gpu("Small", memory_gib=36, bf16_tflops=989), state_dtype="fp32", master=True, **STEP)
    small = dataclasses.replace(FAST, memory_gib=64)
    o, free = p.offload(small), p.offload(FAST)
    assert o.choice is free.choice is None
    streams = "offload_weights=True, optimizer='adamw' makes it fit"
    assert streams in free.why
    assert streams not in o.why
    assert p.fitting(host=small).sentence in o.why
    assert "sk.offload_weights" in free.why
    assert o.hosted == {"none": True, "synchronous": False, "zenflow": False}
    assert free.hosted == dict.fromkeys(o.hosted)
    assert [line.count("does not fit") for line in repr(o).splitlines()[-3:]] == [1, 2, 2]
    assert [line.count("does not fit") for line in repr(free).splitlines()[-3:]] == [1, 1, 1]
    assert list(o.table().hosted) == [True, False, False]


def test_times_at_a_datasheets_rates_say_so(monkeypatch):
    """As the plan's own estimate does; at a rate that was given, and at measured ones, they are predictions."""
    step: dict[str, Any] = {"batch": 4, "length": 4096}
    p = plan(QWEN_8B, gpu="H100", **step)
    assert set(p.offload(FAST).table().kind) == {"likely"}
    assert "  times are likely: rates that published runs reached\n" in repr(p.offload(FAST))
    assert "  times are likely: rates that published runs reached, with a host as published runs had it\n" in repr(
        p.offload()
    )
    monkeypatch.setattr(Plan, "has_published_rates", False)
    p = plan(QWEN_8B, gpu="H100", **step)
    said = "optimistic: rates of the datasheet of H100, which few runs reach"
    assert said.startswith(f"{p.estimate.kind}: {p.estimate.how.partition(';')[0]}")
    o = p.offload(FAST)
    assert f"  times are {said}\n" in repr(o)
    assert f"<div>times are {said}</div>" in o._repr_html_()
    assert set(o.table().kind) == {"optimistic"}
    measured = calibrated(host_gb_s=25.0, host_adam_params_s=3e9)
    for sure in (p.but(mfu=0.4).offload(FAST), plan(QWEN_8B, gpu=measured, **step).offload()):
        assert "optimistic" not in repr(sure)
        assert set(sure.table().kind) == {"prediction"}


@pytest.mark.parametrize(
    ("what", "options", "give"),
    [
        (7e9, {"gpu": "H100", "mfu": 0.4, "tokens": 1e9}, "give batch= and length=."),
        (7e9, {"gpu": "H100", "batch": 4, "length": 2048}, "give a rate, mfu= or tflops_per_gpu=."),
        (7e9, {"batch": 4}, "give length= and a rate, gpu= with mfu= or tflops_per_gpu=."),
        (QWEN_8B, {"gpu": "H100", "mfu": 0.4, "batch": 4}, "give length=."),
        (QWEN_8B, {"batch": 4, "length": 2048}, "give gpu= or tflops_per_gpu=."),
        (QWEN_8B, {"batch": 4, "length": 64, "gpu": Gpu("Mine", 80)}, "The BF16 rate of Mine is not known"),
    ],
)
def test_what_a_steps_time_lacks(what, options, give):
    """Only that, and not what was given."""
    with refused(ValueError) as no:
        plan(what, **options).offload(FAST)
    assert str(no.value).startswith(f"The prediction needs a step's time: {give}")


def test_a_cpu_has_no_link_to_itself():
    processor = Gpu(
        "cpu: mine", 64, device="cpu", ceilings=Ceilings("today", fp32_tflops=1, bf16_tflops=1, bandwidth_tb_s=0.1)
    )
    p = plan(QWEN_8B, gpu=processor, batch=1, length=64, optimizer="zenflow")
    for ask in (p.offload, p.but(optimizer="adamw").streamed):
        with refused(ValueError) as no:
            ask()
        assert "calibrate" not in str(no.value)
    assert p.answers[1].endswith(", without the offload")
    note = next(note for note in p.notes if "ZenFlow's states on the host add" in note)
    assert "a CPU has no link to itself" in note
    assert "calibrate" not in note
    with refused(ValueError):
        plan(QWEN_8B, gpu=calibrated(host_gb_s=25.0), batch=1, length=64).offload()


def test_what_is_no_host():
    p = plan(QWEN_8B, gpu="H100", **STEP)
    for ask in (p.offload, p.streamed):
        with refused(TypeError):
            ask("big")
    with refused(TypeError):
        Host(memory_gib=512)
    with refused(TypeError):
        Host(50)


@pytest.mark.parametrize(
    "call",
    [
        lambda: Host(0, 1e9),
        lambda: Host(25, 2),
        lambda: Host(25, 2e9, memory_gib=-1),
        lambda: Host(50e9, 2e9),
        lambda: Host(50e3, 2e9),
        lambda: Host(50, 2e18),
        lambda: Host(50, 2e9, accumulate_params_s=6),
        lambda: Host(50, 2e9, memory_gib=512 * 2**30),
        lambda: Host(50, 2e9, memory_gib=512 * 1024),
        lambda: predicted(compute_ms=0),
        lambda: predicted(parameters=8),
        lambda: predicted(topk_ratio=10),
        lambda: predicted(topk_ratio=-0.1),
        lambda: predicted(topk_ratio=1),
        lambda: predicted(topk_ratio="a tenth"),
        lambda: largest_on_host(512, topk_ratio=2),
        lambda: largest_on_host(512, topk_ratio=1),
        lambda: predicted(overlap_step="no"),
        lambda: predicted(slots=0),
        lambda: predicted(update_interval=0),
        lambda: predicted(update_interval=1.5),
    ],
)
def test_wrong_figures_are_refused(call):
    with refused(ValueError):
        call()
