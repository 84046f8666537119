"""Where a processor has no bfloat16 instructions, a whole training step multiplies no bfloat16 matrices."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import surokit as sk
from surokit import kernels
from surokit.kernels.reference import matmul

PRODUCTS = {f"aten::{name}" for name in ("mm", "addmm", "addmm_", "bmm", "baddbmm")}


def products(step):
    """Shapes and dtypes of every product of matrices in a step."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as seen:
        step()
    events = seen.profiler.kineto_results.events()
    return [(e.shapes(), e.dtypes()) for e in events if e.name() in PRODUCTS]


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
@pytest.mark.parametrize(
    "recipe", [sk.BF16, sk.BF16.lora(rank=4), sk.QFP8.lora(rank=4), sk.QNF4.lora(rank=4), sk.FP8], ids=lambda r: r.name
)
def test_a_step_multiplies_no_bfloat16(recipe, fused, monkeypatch):
    monkeypatch.setattr(matmul, "_least_reuse", lambda: 1e-9)  # so that small ones pay as well
    config = sk.DecoderConfig(layers=1, width=64, heads=2, kv_heads=1, vocab=128, ffn=96)
    model = sk.Decoder(config, dtype=torch.bfloat16)
    sk.apply(model, recipe)
    if fused:
        sk.fuse(model)
    ids = torch.randint(128, (2, 16))
    with kernels.converting(True):
        seen = products(lambda: model(input_ids=ids, labels=ids).loss.backward())
    assert len(seen) >= 20
    assert [product for product in seen if "c10::BFloat16" in product[1]] == []
