"""Streamed weights and activations on the host as planned, beside the counters of real ones on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import surokit as sk
from surokit import planner
from surokit.planner.counts.memory import blocks_of
from surokit.planner.offload.formulas import Host
from tests.planner.test_offload import QWEN_8B, STEP, calibrated
from tests.refusals import refused

HOST = Host(link_gb_s=50, adam_params_s=2e9)
IDS = torch.zeros(2, 16, dtype=torch.int64)


def plan(what, **given):
    """Untyped, so that figures that may be None are used as they are."""
    return planner.plan(what, **given)


def session(recipe=None, layers=4, accumulate=1, **offload):
    torch.manual_seed(0)
    config = sk.DecoderConfig(layers=layers, width=64, heads=4, kv_heads=2, vocab=64, ffn=128)
    model = sk.Decoder(config, dtype=torch.bfloat16)
    if recipe is not None:
        sk.apply(model, recipe)
    stream = sk.offload_weights(model, **offload)
    data = [{"input_ids": IDS, "labels": IDS}] * accumulate
    return sk.Session(model, data, optimizer=sk.AdamW(lr=1e-3), accumulate=accumulate), stream


def rounding(stream):
    """What rounding each tensor up to 16 bytes adds to a block, which the prediction leaves out."""
    return sum(-p.nbytes % 16 for p in stream._blocks[0].pack.params)


@pytest.mark.parametrize("recipe", [None, sk.FP8, sk.BF16.lora(4), sk.QFP8.lora(4), sk.QNF4.lora(4)], ids=str)
@pytest.mark.parametrize(("layers", "prefetch", "accumulate"), [(4, 1, 1), (4, 2, 2), (4, 9, 1), (1, 1, 1)])
def test_bytes_are_those_that_a_step_moves(recipe, layers, prefetch, accumulate):
    run, stream = session(recipe, layers, accumulate, prefetch=prefetch)
    run.run(1)
    p = plan(run, gpu="H100", mfu=0.4)
    assert (p.setup.prefetch, p.setup.recompute) == (prefetch, "full")  # read off the live model
    assert "weights on the host" in p.source
    found = p.streamed(HOST)
    passes = accumulate * (2 * layers - min(layers, prefetch + 1))
    assert found.bytes_up + passes * rounding(stream) == stream.bytes_up
    assert found.bytes_down == stream.bytes_down
    assert (stream.bytes_down > 0) == (recipe in (None, sk.FP8))
    assert found.block_bytes + rounding(stream) == stream.block_bytes
    here = min(layers, prefetch + 1)
    blocks: Any = blocks_of(p.shape, p.recipe, p.setup)
    assert blocks.resident(prefetch) + here * rounding(stream) == stream.peak_bytes
    host = {t.name: t.bytes for t in p.memory.host}
    assert host["weights of the blocks"] + layers * rounding(stream) == stream.host_bytes
    trained = sum(p.numel() for b in stream._blocks for p in b.pack.params if p.requires_grad)
    assert host.get("their gradients", 0) == 2 * trained
    assert host.get("their optimizer", 0) == 4 * trained  # two moments in bf16


@pytest.mark.parametrize("recipe", [None, sk.QFP8.lora(4).decode_once(False)], ids=str)
def test_activations_on_the_host_are_what_a_step_sends(recipe):
    torch.manual_seed(0)
    config = sk.DecoderConfig(layers=8, width=128, heads=4, kv_heads=2, vocab=128, ffn=384)
    model = sk.Decoder(config, dtype=torch.bfloat16)
    if recipe is not None:
        sk.apply(model, recipe)
    activations = sk.offload_activations(model, min_bytes=4096)
    ids = torch.zeros(4, 256, dtype=torch.int64)
    run = sk.Session(model, [{"input_ids": ids, "labels": ids}], optimizer=sk.AdamW(lr=1e-3))
    run.run(1)
    p = plan(run, gpu="H100", mfu=0.4)
    assert p.setup.offload_activations
    sent = next(t.bytes for t in p.memory.host if t.name == "activations")
    assert sent == pytest.approx(activations.bytes_down, rel=0.02)
    # the device keeps less of them, whatever the depth
    deep = p.but(offload_activations=False)
    assert p.memory["activations"].bytes <= 0.3 * deep.memory["activations"].most
    assert p.memory.gib < deep.memory.gib


def test_a_live_model_says_what_is_on_the_host():
    run, stream = session()
    activations = sk.offload_activations(run.model.model.layers[0])  # around the same forward
    setup = plan(run, gpu="H100", mfu=0.4).setup
    assert (setup.prefetch, setup.offload_activations) == (1, True)
    own = plan(run, gpu="H100", mfu=0.4, offload_weights=3, offload_activations=False).setup
    assert (own.prefetch, own.offload_activations) == (3, False)
    assert plan(run).setup.offloads == ""  # on a CPU all is the host's
    assert plan(run).setup.recompute == "full"
    said = repr(plan(run)).splitlines()[1]
    assert "weights streamed, within the CPU's own memory, activations streamed, within the CPU's own memory" in said
    activations.remove(), stream.remove()
    setup = plan(run, gpu="H100", mfu=0.4).setup
    assert (setup.prefetch, setup.offload_activations, setup.recompute) == (0, False, "none")


def test_memory_is_what_the_formula_says():
    """What is outside of the blocks, two of them, three blocks' gradients, a block's activations and each one's input."""
    p = plan(QWEN_8B, gpu="H100", offload_weights=True, **STEP)
    terms = {t.name: t.bytes for t in p.memory.terms}
    block = 4096 * (2 * 4096 + 2 * 1024 + 3 * 12288) + 2 * 4096 + 2 * 128
    outside = 2 * 151936 * 4096 + 4096
    assert p.parameters == 36 * block + outside
    assert terms["weights, outside the blocks"] == 2 * outside
    assert terms["weights, blocks at a time"] == 2 * 2 * block
    assert p.memory["gradients"].most == 2 * (outside + 3 * block)
    assert terms["optimizer"] == 4 * outside
    assert p.setup.recompute == "full"
    # the phases hold no gradients but these
    assert max(phase.gib for phase in p.memory.phases) == pytest.approx(p.memory.peak_gib)
    recomputed = plan(QWEN_8B, gpu="H100", recompute="full", **STEP)
    assert p.memory["activations"].most == recomputed.memory["activations"].most
    assert p.compute.recompute == recomputed.compute.recompute > 0
    three = p.but(offload_weights=2).memory.gib - p.memory.gib
    assert three == pytest.approx(1.1 * 2 * block / 2**30)
    lora = plan(QWEN_8B, gpu="H100", offload_weights=True, **{**STEP, "recipe": sk.BF16.lora()})
    assert (
        lora.memory["gradients"].most
        == plan(QWEN_8B, **{**STEP, "mfu": None, "recipe": sk.BF16.lora()}).memory["gradients"].most
    )
    assert [t.name for t in lora.memory.host] == ["weights of the blocks"]


def test_time_by_hand():
    p = plan(QWEN_8B, gpu="H100", **STEP)
    found = p.streamed(HOST)
    block = (p.parameters - 2 * 151936 * 4096 - 4096) / 36
    assert found.bytes_up == pytest.approx((2 * 36 - 2) * 2 * block)
    assert found.bytes_down == pytest.approx(36 * 2 * block)
    again = p.but(recompute="full").compute
    assert found.compute_ms == pytest.approx(p.time.step_ms * (1 + again.recompute / again.model))
    assert found.link_ms == pytest.approx(found.bytes_up / 50e9 * 1e3)
    assert found.exposed_ms == pytest.approx(2 * 2 * block / 50e9 * 1e3)
    assert found.adam_ms == pytest.approx(36 * block / 2e9 * 1e3)
    assert found.step_ms == pytest.approx(found.compute_ms + found.exposed_ms + found.adam_ms)
    assert (found.binds, found.fits, found.gpu_gib) == ("AdamW", True, p.but(offload_weights=True).memory.gib)
    # a plan of such a run asks the same, at the rate that it was given
    own = p.but(offload_weights=True)
    assert own.streamed(HOST).compute_ms == pytest.approx(own.time.step_ms)
    # a slow link binds, and storage in fewer bits makes less of it
    slow = Host(1, 2e9)
    steps = [p.but(recipe=r).streamed(slow) for r in (sk.BF16.lora(), sk.QFP8.lora(), sk.QNF4.lora())]
    assert [s.binds for s in steps] == ["link"] * 3
    assert steps[1].bytes_up / steps[0].bytes_up == pytest.approx(0.5, abs=0.001)
    assert steps[2].bytes_up / steps[0].bytes_up == pytest.approx(4.127 / 16, abs=0.001)
    assert steps[0].step_ms == pytest.approx(steps[0].link_ms + steps[0].exposed_ms)
    assert steps[0].bytes_down == steps[0].adam_ms == 0
    two = p.but(accumulate=2).streamed(HOST)
    assert (two.bytes_up, two.bytes_down) == (2 * found.bytes_up, 2 * found.bytes_down)
    assert two.exposed_ms - found.exposed_ms == pytest.approx(36 * block / HOST.adds_params_s * 1e3)


def test_a_calibrated_host_is_in_the_plans_time():
    gpu = calibrated(host_gb_s=25.0, host_adam_params_s=3e9)
    step: dict[str, Any] = {"gpu": gpu, "batch": 4, "length": 4096}
    p = plan(QWEN_8B, offload_weights=True, **step)
    assert p.time.step_ms == pytest.approx(p.streamed().step_ms)
    plain = plan(QWEN_8B, **step)
    assert plain.streamed().step_ms == pytest.approx(p.time.step_ms)
    sent = plain.but(offload_activations=True)
    link_ms = sent.memory.host[0].bytes / 25e9 * 1e3
    # down while the forward computes, up while the backward does
    forward_ms = sent.estimate.step_ms * sent.estimate.forward_share
    assert link_ms > sent.estimate.step_ms > 2.5 * forward_ms
    assert sent.time.step_ms == pytest.approx(2 * link_ms)
    sends: dict[str, Any] = {"batch": 4, "length": 4096, "offload_activations": True}
    fast = plan(QWEN_8B, gpu=calibrated(host_gb_s=2500.0, host_adam_params_s=3e9), **sends)
    assert fast.time.step_ms == pytest.approx(fast.estimate.step_ms)
    between = calibrated(host_gb_s=25.0 * link_ms / (1.5 * forward_ms), host_adam_params_s=3e9)
    half = plan(QWEN_8B, gpu=between, **sends)  # the forward waits, the backward does not
    assert half.time.step_ms == pytest.approx(half.estimate.step_ms + 0.5 * forward_ms)


def test_it_prints():
    found = plan(QWEN_8B, gpu="H100", **STEP).streamed(Host(50, 2e9, memory_gib=16))
    text, html = repr(found), found._repr_html_()
    assert text.startswith("36 blocks streamed, 1 ahead (bf16): a step of ")
    assert "is predicted, bound by AdamW" in text
    assert "more than 16.0 GiB" in text
    assert html.count("<tr>") == html.count("</tr>") == len(text.splitlines()) - 1
    p = plan(QWEN_8B, gpu="H100", offload_weights=True, **STEP)
    assert "memory of the host" in repr(p)
    assert any(
        "plan.streamed(planner.Host(link_gb_s=50, adam_params_s=2e9)) predicts a step" in note for note in p.notes
    )


def test_a_step_at_a_datasheets_rates_says_so():
    found = plan(QWEN_8B, gpu="H100", batch=4, length=4096).streamed(HOST)
    assert "ms (likely: rates that published runs reached), bound by " in repr(found)
    assert "predicted" not in repr(found)
    assert "is predicted" in repr(plan(QWEN_8B, gpu="H100", **STEP).streamed(HOST))


@pytest.mark.parametrize("optimizer", [sk.ZenFlow, sk.OffloadAdamW])
def test_trained_weights_on_the_host_are_no_offloading_optimizers(optimizer):
    """A plan for a GPU says so, and the optimizer where the host is another device; on a CPU they are the same memory."""
    run, _ = session()
    there = sk.Session(run.model, [{"input_ids": IDS, "labels": IDS}], optimizer=optimizer(lr=1e-3))
    there.run(1)
    assert plan(there).setup.optimizer == optimizer.__name__.lower()

    with refused(ValueError):
        plan(there, gpu="H100")
    here, elsewhere = (torch.nn.Parameter(torch.zeros(4, 4, device=device)) for device in ("cpu", "meta"))
    two = optimizer([here, elsewhere], lr=1e-3)
    here.grad, elsewhere.grad = torch.ones(4, 4), torch.ones(4, 4, device="meta")
    with refused(ValueError):
        two.step()


@pytest.mark.parametrize(
    "call",
    [
        lambda: plan("8e9", offload_weights=True),
        lambda: plan("8e9", gpu="H100", **STEP).streamed(HOST),
        lambda: plan(QWEN_8B, gpu="cpu", offload_weights=True),
        lambda: plan(QWEN_8B, gpu="cpu", offload_activations=True),
        lambda: plan(QWEN_8B, offload_weights=True, gpus=8, zero=3),
        lambda: plan(QWEN_8B, offload_weights=True, optimizer="zenflow"),
        lambda: plan(QWEN_8B, offload_weights=1.5),
        lambda: plan(QWEN_8B, gpu="H100").streamed(HOST),
        lambda: plan(QWEN_8B, gpu="GB200", **STEP).streamed(),
        lambda: plan(QWEN_8B, gpu="H100", offload_weights=True, **STEP).offload(HOST),
    ],
)
def test_what_cannot_be_planned_is_refused(call):
    with refused(ValueError):
        call()
