"""tune: mixtures on the front of measured loss against planned time, and a model that is left as it was."""

import copy
import math
import sys

import pytest
import torch

import surokit as sk
from surokit.hardware.gpus import Gpu
from surokit.hardware.linear import linear_seconds
from surokit.tuning import LayerMixture, Mixture, pareto, patterns_of, thin, weighted_flop
from tests.conftest import Tiny
from tests.refusals import refused

FAST = Gpu("Fast", bf16_tflops=100, fp8_tflops=200, fp4_tflops=400)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Tiny(width=64, blocks=4)


@pytest.fixture(scope="module")
def batch():
    ids = torch.randint(32, (4, 32), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


@pytest.fixture(scope="module")
def found(model, batch):
    return sk.tune(model, batch, recipes=("fp8", "fp4"), max_gap=0.01)


def test_the_front_begins_with_bf16_and_falls_in_time_as_the_gap_grows(found):
    assert found.front[0].recipe == sk.BF16
    assert found.front[0][1:4] == (0.0, found.front[0].time, 0.0)
    times, gaps = [c.time for c in found.front], [c.gap for c in found.front]
    assert times == sorted(times, reverse=True)
    assert gaps == sorted(gaps)
    assert len(found.front) <= 12
    recipe, gap, time, *_ = found.front[-1]
    assert recipe.name == "fp4"
    assert time < found.front[0].time
    assert gap > 0


def test_each_mixture_quantizes_as_many_layers_as_it_says(found, model):
    for choice in found.front:
        holder = Tiny(width=64, blocks=4)
        report = sk.apply(holder, choice.recipe)
        assert report.converted == choice.quantized
        assert not any("matches no layer" in note for note in report.notes)


def test_measured_gaps_are_those_of_the_recipes(found, model, batch):
    def loss(recipe):
        with torch.no_grad(), sk.precision(model, recipe):
            return float(model(**batch).loss)

    assert found.loss == loss("bf16")
    for choice in found.front:
        assert choice.measured == pytest.approx(loss(choice.recipe) / found.loss - 1, abs=1e-9)


def test_predictions_are_of_the_size_of_what_is_measured(found):
    """Sums of single changes against the change of all together; an untrained model's loss moves by chance."""
    for choice in found.front[1:]:
        assert abs(choice.measured) < 3 * choice.gap + 2e-3
    assert 0 < found.front[-1].gap < 0.05


@pytest.mark.parametrize("max_gap", [0.0, 1e-4, 1.0])
def test_best_is_the_fastest_inside_the_gap(found, max_gap):
    from dataclasses import replace

    value = replace(found, max_gap=max_gap)
    best = next(c for c in value.front if c.recipe == value.best)
    assert abs(best.measured) <= max_gap
    assert all(c.time >= best.time for c in value.front if abs(c.measured) <= max_gap)
    if max_gap == 1.0:
        assert value.best == value.front[-1].recipe


def test_the_model_and_the_random_state_stay_as_they_are(model, batch):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random, forward = torch.get_rng_state(), model.layers[0]["up_proj"]
    first, second = (sk.tune(model, batch, recipes=("mxfp4",), points=3) for _ in range(2))
    assert first.front == second.front  # stochastic rounding and all
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert forward.precision is None
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_a_sensitive_layer_is_kept_first(batch):
    torch.manual_seed(0)
    model = Tiny(width=64, blocks=4)
    with torch.no_grad():
        model.get_parameter("layers.2.down_proj.weight").mul_(60)  # what it adds outweighs the rest
    found = sk.tune(model, batch, recipes=("mxfp4",))
    first = next(c.recipe for c in reversed(found.front) if c.quantized == 7)
    assert [name for name in ("up_proj", "down_proj") if first.kept_by(f"layers.2.{name}", 4)]
    kept = [c.recipe for c in found.front if 0 < c.quantized < 7]
    assert kept
    assert all(recipe.kept_by("layers.2.down_proj", 4) for recipe in kept)


def test_a_format_that_loses_time_stays_out(model, batch):
    slow = Gpu("Slow", bf16_tflops=100, bandwidth_tb_s=1.0)  # no faster peak, and quantizing moves bytes
    found = sk.tune(model, batch, recipes=("fp8",), gpu=slow)
    assert [c.recipe for c in found.front] == [sk.BF16]
    assert found.slower == ["fp8 at up_proj, down_proj"]
    assert "stays bf16, which is no slower: fp8 at up_proj, down_proj" in repr(found)
    assert "planned from the peaks of Slow" in repr(found)


@pytest.mark.parametrize(("recipe", "share"), [(sk.BF16, 1.0), (sk.FP8, 0.5), (sk.FP4, 0.25), (sk.Recipe("a"), 1.0)])
def test_planned_time_follows_the_peaks(recipe, share):
    n, k, t = 512, 256, 1024
    assert weighted_flop(recipe, n, k, t, True) == 6 * n * k * t * share
    assert linear_seconds(recipe, n, k, t, trains=True, gpu=FAST) == pytest.approx(6 * n * k * t * share / 100e12)
    assert linear_seconds(recipe, n, k, t, trains=False, gpu=FAST) == pytest.approx(4 * n * k * t * share / 100e12)


def test_bandwidth_bounds_a_product_and_pays_for_quantizing():
    narrow = Gpu("Narrow", bf16_tflops=1e6, fp8_tflops=2e6, bandwidth_tb_s=1.0)
    n, k, t = 8, 16, 32
    bytes_ = 3 * 2 * (n * k + t * k + t * n)
    assert linear_seconds(sk.BF16, n, k, t, trains=True, gpu=narrow) == pytest.approx(bytes_ / 1e12)
    assert linear_seconds(sk.FP8, n, k, t, trains=True, gpu=narrow) > bytes_ / 1e12


def test_the_front_is_thinned_at_both_ends_and_between():
    mixtures = [Mixture(sk.FP8, gap, 10.0 - gap, (), 0.0) for gap in range(10)]
    worse = Mixture(sk.FP4, 5.0, 9.0, (), 0.0)
    front = pareto([worse, *reversed(mixtures)])
    assert front == mixtures
    assert [m.gap for m in thin(front, 4)] == [0, 3, 6, 9]
    assert thin(front, 20) == front


def test_patterns_name_exactly_these_layers():
    names = [f"model.layers.{i}.mlp.{kind}" for i in range(3) for kind in ("up_proj", "down_proj")] + ["head.up_proj"]
    assert patterns_of(names[1:6:2], names) == ["mlp.down_proj"]
    assert patterns_of([names[0], names[6]], names) == ["model.layers.0.mlp.up_proj", "head.up_proj"]
    for wanted in (names[:2], names[1:6:2], names[:6:2], names):
        recipe = sk.Recipe("r", rules=()).keep(*patterns_of(wanted, names))
        assert [name for name in names if recipe.kept_by(name)] == wanted or set(wanted) == {
            name for name in names if recipe.kept_by(name)
        }


def test_it_shows_itself(found):
    frame = found.frame()
    assert list(frame.columns) == ["recipe", "quantized", "gap", "measured", "time", "speed", "worst_db"]
    assert frame.speed.iloc[0] == 1.0
    assert frame.worst_db.iloc[1:].between(5, 40).all()
    text = repr(found)
    assert text.count("\nbest ") >= 1
    assert "a proxy (no GPU named)" in text
    shown = found._repr_html_()
    assert shown.startswith('<div><img src="data:image/svg+xml;base64,')
    assert "<td" in shown
    assert "planned" in shown
    axes = found.plot().axes[0]
    assert "proxy" in axes.get_xlabel()
    assert axes.texts[0].get_text().startswith(f"best: {found.best.name}")
    assert isinstance(found.front[0], LayerMixture)


@pytest.mark.parametrize(
    "options",
    [
        {"recipes": ()},
        {"recipes": ("qfp8",)},
        {"recipes": (sk.FP8.lora(),)},
        {"recipes": ("fp8", sk.FP8.keep_first(1))},
        {"max_gap": -1},
        {"max_gap": math.nan},
        {"points": 1},
        {"gpu": "V100"},
        {"gpu": "H900"},
    ],
)
def test_what_cannot_be(model, batch, options):
    with refused(ValueError):
        sk.tune(model, batch, **options)


def test_a_batch_without_a_loss(model, batch):
    nothing = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    with refused(ValueError):
        sk.tune(model, nothing, recipes=("fp8",))


def test_a_model_whose_loss_is_no_number(model, batch):
    spoilt = copy.deepcopy(model)
    next(spoilt.parameters()).data[:] = math.nan
    with refused(ValueError):
        sk.tune(spoilt, batch, recipes=("fp8",))


def test_it_shows_itself_without_matplotlib(found, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    assert found._repr_html_().startswith("<div><table>")
