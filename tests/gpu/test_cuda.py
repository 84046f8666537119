"""What only a CUDA device can show: golden codes, whole runs beside the CPU's, and steps without a host sync.

Needs torch, triton, numpy, safetensors and pytest; run by `make test-gpu`.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import surokit as sk
from surokit.data import Batches
from tests.gpu.noise import assert_near

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize(
    ("stem", "mode", "quantizer"),
    [
        ("fp8_tensor", "e4m3", sk.Quantizer(sk.E4M3, sk.PerTensor())),
        ("fp8_tensor", "e5m2", sk.Quantizer(sk.E5M2, sk.PerTensor())),
        ("fp8_rowwise", "row", sk.Quantizer(sk.E4M3, sk.PerRow())),
        ("fp8_block", "1x128", sk.Quantizer(sk.E4M3, sk.Block(1, 128))),
        ("fp8_block", "128x128", sk.Quantizer(sk.E4M3, sk.Block(128, 128))),
    ],
)
def test_codes_equal_the_reference_bit_for_bit(stem, mode, quantizer):
    vectors = load_file(GOLDEN / f"{stem}.safetensors")
    for name in [n for n in vectors if n.endswith(f".{mode}.codes")]:
        case = name.split(".")[0]
        if case == "extreme":  # touches float32 subnormals, which a GPU build may flush
            continue
        codes = sk.quantize(vectors[f"{case}.input"].cuda(), quantizer).codes.view(torch.uint8).cpu()
        assert torch.equal(codes, vectors[name]), case


def test_batches_are_pinned():
    """tests/data/test_batches.py knows the rest of them, and packages that are not everywhere."""
    batches = Batches(np.arange(16, dtype=np.uint32).reshape(4, 4), batch=2)
    assert all(tensor.is_pinned() for tensor in next(iter(batches)).values())


def test_every_bfloat16_casts_as_on_the_cpu():
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[~x.isnan()][None]
    for format in (sk.E4M3, sk.E5M2):
        q = sk.Quantizer(format, sk.PerTensor())
        one = torch.full((1, 1), format.max)
        here, there = sk.quantize(x, q, amax=one), sk.quantize(x.cuda(), q, amax=one.cuda())
        assert torch.equal(here.codes.view(torch.uint8), there.codes.view(torch.uint8).cpu())
        assert torch.equal(here.dequantize(), there.dequantize().cpu())


def decoder(seed=0, layers=2):
    torch.manual_seed(seed)
    config = sk.DecoderConfig(layers=layers, width=256, heads=4, kv_heads=2, vocab=512, ffn=512, max_length=256)
    return sk.Decoder(config).to(torch.bfloat16)


def batches(count=4):
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(512, (2, 128), generator=generator) for _ in range(count)]
    return [{"input_ids": i, "labels": i} for i in ids]


# without the recipes that round stochastically: they draw other numbers on another device
@pytest.mark.parametrize(
    "recipe",
    [
        *(sk.BF16, sk.FP8, sk.FP8_CURRENT, sk.FP8_ROWWISE, sk.FP8_BLOCK, sk.MXFP8),
        *(r.lora(rank=4) for r in (sk.QFP8, sk.QFP4, sk.QNF4)),
    ],
    ids=lambda r: r.name,
)
def test_a_run_on_the_gpu_follows_the_run_on_the_cpu(recipe):
    """Two runs on the GPU show how much of a difference is noise: bits of attention's gradient, which quantizing makes more of."""
    losses = []
    for device in ("cpu", "cuda", "cuda"):
        session = sk.Session(decoder().to(device), batches(), optimizer=sk.AdamW(lr=1e-3), recipe=recipe, schedule=None)
        session.run(8)
        losses.append(session.records.column("loss"))
    cpu, gpu, again = losses
    assert_near(cpu, gpu, again, floor=5e-3, most=2e-2)


# torch says once that the mode is a prototype
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("recipe", sk.recipes.values(), ids=sk.recipes)
def test_a_step_never_waits_for_the_device(recipe):
    recipe = recipe.lora(rank=4) if recipe.storage else recipe
    session = sk.Session(
        decoder().cuda(), batches(), optimizer=sk.AdamW(lr=1e-3), recipe=recipe, schedule=None, compile=False
    )
    session.run(3)
    batch = {key: value.cuda() for key, value in batches(1)[0].items()}
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(2):
            session.step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_logits_equal_the_cpus():
    model = decoder().float()
    ids = batches(1)[0]["input_ids"]
    here = model(ids).logits
    there = model.cuda()(ids.cuda()).logits.cpu()
    torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-3)


def test_a_profile_finds_idle_time_and_its_cause():
    import time

    session = sk.Session(decoder().cuda(), batches(), optimizer=sk.AdamW(lr=1e-3), schedule=None, compile=False)
    session.run(3)
    with sk.profile() as p:
        for batch in batches(4):
            session.step(batch)
            torch.cuda.synchronize()
            time.sleep(0.01)
    assert p.summary["idle_ms"] >= 9
    assert p.summary["busy_ms"] + p.summary["idle_ms"] == pytest.approx(p.summary["wall_ms"], rel=0.01)


def test_the_benchmark_of_the_kernels_finds_all_of_them_right(tmp_path):
    import json

    from surokit.bench.__main__ import main

    out = tmp_path / "kernels.json"
    assert main(["kernels", "--rounds", "2", "--shape", "2048", "4096", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["kernels"]
    assert not [(row["name"], row["error"], row.get("failed")) for row in rows if not row["right"]]
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in rows)


def test_the_benchmark_measures_on_this_device(tmp_path, monkeypatch):
    """Its real path at a small shape: processes, the checks of fused and replayed steps on this device, turns, a profile."""
    from surokit.bench import gpu, gpu_table, systems
    from surokit.bench.configurations import MODELS, BenchGroup, BenchPart, Configuration

    shape = {**MODELS["0.6b"], "layers": 2, "width": 512, "heads": 4, "kv_heads": 2, "ffn": 1024, "vocab": 4096}
    monkeypatch.setattr(systems, "MODELS", {"0.6b": shape})
    pace = gpu.Pace()
    monkeypatch.setattr(gpu, "Pace", lambda: dataclasses.replace(pace, turn_s=0.5, ceilings_s=1.0, check_length=256))
    small = BenchGroup("small", (Configuration("0.6b", "bf16"), Configuration("0.6b", "fp8")), 1)
    monkeypatch.setattr(gpu, "PARTS", {"small": BenchPart("small", "", 1, (small,))})
    data = gpu.run(["small"], out=tmp_path / "gpu.json")
    found = data["gpu"]
    assert not [(key, each["failed"]) for key, each in found.items() if "failed" in each]
    for recipe in ("bf16", "fp8"):
        checked = found[f"correct/0.6b lora {recipe}"]
        assert checked["fused"]["ok"], checked["fused"]
        assert checked["graphs"]["ok"], checked["graphs"]
        assert checked["graphs"]["captured"], checked["graphs"]["reason"]
        turn = found[f"turn/small/0/{recipe}"]
        assert turn["tokens_per_s"] > 0
        assert turn["graphs"] == "captured"
        assert 0 < turn["peak_mib"] <= turn["reserved_mib"]
        profile = found[f"profile/small/{recipe}"]
        assert 0 <= profile["idle"] <= 1
        assert profile["graph_launches"] > 0
    assert "0.6b lora fp8" in gpu_table.table(data)
