"""compare: dB a layer and product, on the user's own batch, leaving the model as it was."""

import pytest
import torch

import surokit as sk


def test_compare_measures_every_layer_and_product(tiny, batch):
    for p in tiny.parameters():
        p.grad = torch.full_like(p, 7.0)
    frame = sk.compare(tiny, batch, sk.FP8_CURRENT, "fp8-rowwise")
    assert list(frame.columns) == ["layer", "gemm", "recipe", "sqnr_db", "clipped", "underflow"]
    assert len(frame) == 4 * 3 * 2  # lm_head is kept by both recipes
    assert frame.sqnr_db.between(15, 45).all()
    assert (frame.clipped == 0).all()
    by = frame.groupby(["recipe", "gemm"]).sqnr_db.mean()
    assert by["fp8-rowwise", "grad_input"] > by["fp8-current", "grad_input"]  # e4m3 against e5m2 gradients
    assert all((p.grad == 7.0).all() for p in tiny.parameters())


def test_a_stored_weight_has_no_grad_weight(tiny, batch):
    frame = sk.compare(tiny, batch, sk.QFP8)
    assert set(frame.gemm) == {"forward", "grad_input"}
    assert frame.sqnr_db.min() > 28


def test_underflow_is_counted():
    x = torch.cat([torch.ones(1, 8), torch.full((1, 8), 1e-6)])
    Q = sk.quantize(x, sk.Quantizer(sk.E4M3, sk.PerTensor()))
    assert Q.underflow(x) == 0.5
    assert Q.clipped(x * 3) == 0.5
    assert Q.clipped(x) == 0.0


def test_compare_needs_a_recipe(tiny, batch):
    with pytest.raises(ValueError, match="at least one recipe"):
        sk.compare(tiny, batch)
