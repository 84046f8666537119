"""What only a CUDA device can show: native float8 products, casts, and steps without a host sync.

Needs torch, triton, numpy, safetensors and pytest; run by `make test-gpu`.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import surokit as sk
from surokit import kernels
from surokit.kernels.reference import gemm as reference
from surokit.quantized import sqnr_db

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

GOLDEN = Path(__file__).parents[1] / "golden"


def gaussian(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def needs_native_fp8():
    if not kernels.native_fp8(torch.device("cuda", 0)):
        pytest.skip(f"{torch.cuda.get_device_name()} has no float8 tensor cores")


@pytest.mark.parametrize("scaling", [sk.PerTensor(), sk.PerRow()], ids=str)
@pytest.mark.parametrize("formats", [(sk.E4M3, sk.E4M3), (sk.E5M2, sk.E4M3)], ids=str)
@pytest.mark.parametrize("shape", [(16, 16, 16), (33, 70, 129), (512, 1024, 384), (1, 17, 5)])
@pytest.mark.parametrize("fast", [False, True])
def test_the_native_product_equals_the_emulated_one(scaling, formats, shape, fast):
    needs_native_fp8()
    M, K, N = shape
    a = sk.quantize(gaussian(M, K), sk.Quantizer(formats[0], scaling))
    b = sk.quantize(gaussian(N, K, seed=1), sk.Quantizer(formats[1], scaling))
    arguments = (a.codes, a.scales, b.codes, b.scales)
    native = kernels.scaled_mm(*arguments, out_dtype=torch.bfloat16, pow2=scaling.pow2, fast_accumulation=fast)
    emulated = reference.scaled_mm(*arguments, torch.float32)
    assert native.shape == (M, N)
    wide = kernels.scaled_mm(*arguments, out_dtype=torch.float32, pow2=scaling.pow2, fast_accumulation=fast)
    assert wide.dtype == torch.float32
    assert sqnr_db(emulated, wide) > 35
    # bfloat16's own rounding is at 50 dB; fast accumulation keeps 14 bits or so of the sum
    assert sqnr_db(emulated, native) > (35 if fast else 48)


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


@pytest.mark.parametrize(
    "recipe", [sk.BF16, sk.FP8, sk.FP8_CURRENT, sk.FP8_ROWWISE, sk.QFP8.lora(rank=4)], ids=lambda r: r.name
)
def test_a_run_on_the_gpu_follows_the_run_on_the_cpu(recipe):
    losses = {}
    for device in ("cpu", "cuda"):
        session = sk.Session(decoder().to(device), batches(), optimizer=sk.AdamW(lr=1e-3), recipe=recipe, schedule=None)
        session.run(8)
        losses[device] = session.records.column("loss").tolist()
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=5e-3)


# torch says once that the mode is a prototype
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("recipe", [sk.BF16, sk.FP8, sk.FP8_ROWWISE, sk.QFP8.lora(rank=4)], ids=lambda r: r.name)
def test_a_step_never_waits_for_the_device(recipe):
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


def test_the_benchmark_writes_its_raw_result(tmp_path):
    import json

    from surokit.bench.__main__ import main

    out = tmp_path / "gpu.json"
    assert (
        main(["gpu", "--recipes", "bf16", "fp8", "--rounds", "1", "--steps", "1", "--layers", "2", "--out", str(out)])
        == 0
    )
    data = json.loads(out.read_text())
    assert [s["name"] for s in data["systems"]] == ["bf16", "fp8"]
    assert all(s["tokens_per_s"][0] > 0 and 0 <= s["idle"] <= 1 for s in data["systems"])
