"""compare: dB a layer and product, on the user's own batch, leaving the model as it was."""

import math
from dataclasses import replace

import pytest
import torch

import surokit as sk
from surokit.accuracy import Operands, judge, operands_of, sqnr
from surokit.nn.linear import Linear
from surokit.product import product
from surokit.quantized import sqnr_db
from tests.conftest import Tiny
from tests.refusals import refused

COLUMNS = ["layer", "gemm", "recipe", "sqnr_db", "clipped", "underflow", "amax_a", "amax_b", "scale_spread"]


def test_compare_measures_every_layer_and_product(tiny, batch):
    for p in tiny.parameters():
        p.grad = torch.full_like(p, 7.0)
    frame = sk.compare(tiny, batch, sk.FP8_CURRENT, "fp8-rowwise")
    assert list(frame.columns) == COLUMNS
    assert len(frame) == 4 * 3 * 2  # lm_head is kept by both recipes
    assert frame.sqnr_db.between(15, 45).all()
    assert (frame.clipped == 0).all()
    by = frame.groupby(["recipe", "gemm"]).sqnr_db.mean()
    assert by["fp8-rowwise", "grad_input"] > by["fp8-current", "grad_input"]  # e4m3 against e5m2 gradients
    assert all((p.grad == 7.0).all() for p in tiny.parameters())


def test_of_a_recipe_that_changes_each_part_is_compared(tiny, batch):
    frame = sk.compare(tiny, batch, sk.FP8_CURRENT.then(sk.FP8_ROWWISE, at=0.5), "fp8-rowwise")
    assert list(frame.recipe.unique()) == ["fp8-current", "fp8-rowwise"]
    alone = sk.compare(tiny, batch, "fp8-current", "fp8-rowwise")
    assert frame.equals(alone)


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
    with refused(ValueError):
        sk.compare(tiny, batch)
    with refused(ValueError):
        sk.compare(tiny, batch, sk.FP4, "fp8", sk.FP4.keep_last(0))
    named = replace(sk.FP4.keep_last(0), name="fp4-all")
    assert set(sk.compare(tiny, batch, sk.FP4.keep_last(1), named).recipe) == {"fp4", "fp4-all"}
    assert len(sk.compare(tiny, batch, sk.FP8, "fp8")) == 4 * 3  # twice the same is one


def test_compare_names_what_is_wrong_with_a_batch(tiny, batch):
    with refused(TypeError):
        sk.compare(tiny, batch["input_ids"], sk.FP8)
    with refused(ValueError):
        sk.compare(tiny, {"input_ids": batch["input_ids"]}, sk.FP8)
    assert tiny.training


@pytest.mark.parametrize("recipe", [*sk.recipes, "fp4+qfp4"])
def test_every_recipe_is_judged_alike_twice_and_leaves_no_trace(tiny, batch, recipe):
    chosen = sk.FP4.store(sk.QFP4) if recipe == "fp4+qfp4" else sk.recipes[recipe]
    tiny.embed = torch.nn.Sequential(tiny.embed, torch.nn.Dropout(0.5))  # would draw in training mode
    random, weights = torch.get_rng_state(), {k: v.clone() for k, v in tiny.state_dict().items()}
    first, second = sk.compare(tiny, batch, chosen), sk.compare(tiny, batch, chosen)
    assert first.equals(second)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(module.training for module in tiny.modules())
    assert all(torch.equal(v, weights[k]) for k, v in tiny.state_dict().items())
    assert len(first) == (0 if recipe == "bf16" else (2 if chosen.frozen_base else 3) * 4)
    assert list(first.columns) == COLUMNS


@pytest.mark.parametrize(
    ("recipe", "kept"),
    [(sk.FP8.keep_small(40), "up down"), (sk.FP8.keep("*.up_proj"), "up"), (sk.FP8.keep_first(1), "")],
)
def test_layers_that_apply_would_keep_are_left_out(tiny, batch, recipe, kept):
    layers = set(sk.compare(tiny, batch, recipe).layer)
    converted = {row.layer for row in sk.apply(tiny, recipe).rows if row.converted}
    assert layers == converted
    assert not any(layer.endswith(f"{word}_proj") for layer in layers for word in kept.split())


def test_a_frozen_weight_has_no_grad_weight(tiny, batch):
    assert set(sk.compare(tiny, batch, sk.FP8.lora()).gemm) == {"forward", "grad_input"}


def test_a_batch_from_which_nothing_is_learned_is_refused(tiny, batch):
    nothing = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    with refused(ValueError):
        sk.compare(tiny, nothing, sk.FP8)


def matrices(T=64, K=96, N=32):
    g = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=g).bfloat16() for shape in ((T, K), (N, K), (T, N)))


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block", "mxfp8", "qfp8"])
def test_figures_are_the_layers_own(recipe):
    """Against what a layer in training computes, in its own arithmetic."""
    x, w, dy = matrices()
    recipe = sk.recipes[recipe]
    layer = Linear(96, 32, dtype=torch.bfloat16)
    layer.weight.data = w.clone()
    holder = torch.nn.ModuleDict({"a": layer})
    sk.apply(holder, sk.Recipe.from_dict({**recipe.to_dict(), "adapter": None}))
    x_in = x.float().requires_grad_()  # the product in float32, so that only the quantization differs
    y = layer(x_in)
    y.backward(dy.float())
    stored = layer.stored
    found = dict(judge(recipe, Operands(x, w, dy), stored=stored))
    assert float(found["forward"][0]) == pytest.approx(sqnr_db(x.float() @ w.float().t(), y), abs=0.3)
    assert float(found["grad_input"][0]) == pytest.approx(sqnr_db(dy.float() @ w.float(), x_in.grad), abs=0.3)
    assert float(found["forward"][3]) == float(x.abs().max())
    assert float(found["grad_input"][3]) == float(dy.abs().max())
    assert float(found["forward"][4]) == float(w.abs().max())


def test_stored_codes_serve_the_product_where_they_fit():
    x, w, dy = matrices(K=128, N=128)
    recipe = sk.FP8_BLOCK.store(sk.Quantizer(sk.E4M3, sk.Block(128, 128)))
    assert recipe.storage is not None
    assert recipe.forward.a is not None
    Q = sk.quantize(w, recipe.storage)
    found = dict(judge(recipe, Operands(x, w, dy[:, :1].expand(-1, 128)), stored=Q))
    x_q = sk.quantize(x, recipe.forward.a)
    expected = sqnr_db(x.float() @ w.float().t(), product(x_q, Q, torch.float32))
    assert float(found["forward"][0]) == pytest.approx(expected, abs=1e-4)


def test_a_given_amax_clips():
    x, w, _ = matrices()
    small = {"x": x.abs().amax() / 8}
    own, given = (dict(judge(sk.FP8_CURRENT, Operands(x, w), amaxes=a))["forward"] for a in ({}, small))
    assert float(own[1]) == 0 < float(given[1]) < 1
    assert float(given[0]) < float(own[0]) - 10
    assert float(given[3]) == float(x.abs().max())


@pytest.mark.parametrize(("factor", "spread"), [(1.0, 0.0), (2.0**10, 10.0), (0.0, 0.0)])
def test_scale_spread_counts_binades_between_tiles_that_are_not_zero(factor, spread):
    x = torch.ones(2, 64)
    x[1] *= factor
    found = dict(judge(sk.FP8_ROWWISE, Operands(x, torch.ones(4, 64))))
    assert float(found["forward"][5]) == spread


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf, 1e-40])
def test_figures_of_odd_operands_are_defined(value):
    x, w, dy = matrices(T=5, K=33, N=7)
    x = torch.full_like(x, value)
    for recipe in (sk.FP8_CURRENT, sk.FP8_BLOCK, sk.MXFP8, sk.FP4, sk.MXFP4):
        for gemm, figures in judge(recipe, Operands(x, w, dy)):
            assert figures.shape == (6,)
            if gemm == "grad_input":  # has no x
                assert figures.isfinite().all()
            elif math.isnan(value) or math.isinf(value):
                assert figures[0].isnan()
    assert math.isnan(sqnr(torch.tensor([1.0]), torch.tensor([math.nan])))
    assert sqnr(torch.ones(3), torch.ones(3)) == math.inf


def test_the_reference_is_the_weight_as_held(tiny, batch):
    sk.apply(tiny, sk.QFP8.lora(rank=2))
    same, other = (sk.compare(tiny, batch, recipe) for recipe in (sk.QFP8, sk.QFP4))
    assert (same.sqnr_db == math.inf).all()
    assert other.sqnr_db.between(12, 30).all()


def test_operands_have_the_models_own_dtype(batch):
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        for operands in operands_of(Tiny(dtype=dtype), batch).values():
            assert operands.dy_TN is not None
            assert operands.x_TK.dtype == operands.w_NK.dtype == operands.dy_TN.dtype == dtype
