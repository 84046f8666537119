"""A plan asked backwards gives what the plan forwards says, to the last whole number; and every no comes with a remedy."""

import dataclasses
import math
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import surokit as sk
from surokit import planner
from surokit.hardware.gpus import Ceilings
from surokit.planner import Gpu, Plan, read_shape
from surokit.planner.counts.communication import fit_speedup
from surokit.planner.inverse.questions import _in_layers, gpus_for, largest, parameters_for, rate_for, tokens_for
from surokit.planner.inverse.recipe_choice import compare_recipes, recipes
from surokit.planner.inverse.remedies import binds, fitting
from surokit.planner.offload.formulas import Host
from surokit.planner.scaling.laws import CHINCHILLA, KAPLAN
from surokit.recipe import BF16, FP8, QFP8, QNF4
from tests.refusals import refused

LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
SMALL = {**LLAMA_8B, "num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 640, "vocab_size": 4096}
FULL = {"batch": 4, "length": 4096, "gpu": "H100"}
FEW = settings(max_examples=settings().max_examples // 12)  # each takes a second; make soak looks further


def plan(what, **given):
    """Untyped, so that figures that may be None are used as they are."""
    return planner.plan(what, **given)


def seed_case(**more):
    return plan(
        405e9,
        **{"tokens": 15.6e12, "gpus": 16000, "gpu": "H100", "tflops_per_gpu": 400, "usd_per_gpu_hour": 2.0, **more},
    )


# -- what is the most that fits


@FEW
@given(
    what=st.sampled_from(["batch", "length", "layers"]),
    n=st.integers(1, 60),
    times=st.sampled_from([1, 97, 1000]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    optimizer=st.sampled_from(["adamw", "adamw8bit", "sgd"]),
    recipe=st.sampled_from([None, "fp8", "fp4", "qfp8", "qnf4"]),
    layers=st.sampled_from(["surokit", "transformers"]),
    training=st.booleans(),
)
def test_the_largest_is_the_inverse_of_memory(what, n, times, recompute, optimizer, recipe, layers, training):
    p = plan(
        SMALL,
        batch=2,
        length=128,
        recompute=recompute,
        optimizer=optimizer,
        recipe=recipe,
        layers=layers,
        training=training,
    )
    n *= 1 if what == "layers" else times

    def at(n):
        return plan({**SMALL, "num_hidden_layers": n}, **p.given) if what == "layers" else p.but(**{what: n})

    # exactly what n takes is room for n, and for what takes no more; the next takes more
    room = at(n).memory.gib
    found = largest(p, what, gib=room)
    assert found >= n
    assert at(found).memory.gib == room < at(found + 1).memory.gib
    if at(1).memory.gib < room:  # a hair less is no room for n
        assert largest(p, what, gib=math.nextafter(room, 0)) < n


def test_the_largest_number_of_parameters_by_hand():
    # two bytes a parameter, and a tenth for the allocator, with what a forward of 2,048 tokens takes
    served = largest(plan(1e9, training=False), "parameters", gib=80)
    assert 0.9 * 80 * 2**30 / (2 * 1.1) < served < 80 * 2**30 / (2 * 1.1)
    p = plan(1e9, gpus=8, zero=3, slack=0.05)
    n = largest(p, "parameters", gib=80)
    step = {**p.given, "batch": 1, "length": 2048}
    assert plan(n, **step).memory.gib <= 80 < plan(n + 1, **step).memory.gib
    assert n <= 80 * 2**30 / (1.05 * 8 / 8)


def test_a_number_of_parameters_fits_no_more_than_a_model_of_that_size():
    """45 billion in 4 bits are the memory of an RTX 4090, of which activations take a part."""
    given: dict[str, Any] = {"recipe": sk.QNF4.lora(), "gpu": "RTX-4090", "recompute": "full"}
    n = largest(plan(1e9, **given), "parameters")
    assert plan(n, **given).memory.gib < 0.95 * 24
    assert largest(plan(1e9, batch=4, length=2048, **given), "parameters") < n
    assert plan("qwen3-32b", batch=1, length=2048, **given).fits() == (n >= 32.8e9)


def test_the_gpu_has_the_memory_where_none_is_given():
    p = plan(LLAMA_8B, **FULL, recompute="full", optimizer="adamw8bit")
    assert largest(p, "batch") == largest(p, "batch", gib=80)
    assert p.but(batch=largest(p, "batch")).fits()


def test_a_length_ends_at_the_positions_that_a_model_has_learned():
    gpt2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 512, "n_positions": 1000}
    p = plan(gpt2, batch=1, length=8)
    assert largest(p, "length", gib=80) == 1000
    assert largest(p, "length", gib=80, multiple=128) == 896
    assert largest(p, "length", gib=p.but(length=77).memory.gib) == 77
    with refused(ValueError):
        largest(p, "length", gib=80, multiple=1024)


@FEW
@given(gib=st.floats(5, 200), multiple=st.integers(1, 512))
def test_multiples(gib, multiple):
    p = plan(SMALL, batch=1, length=1)
    n = largest(p, "length", gib=gib, multiple=multiple)
    assert n % multiple == 0
    assert n <= largest(p, "length", gib=gib) < n + multiple


def test_experts_and_windows_go_on_in_deeper_models():
    moe = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 6,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 512,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 2,
    }
    shape, _ = read_shape(moe)
    for n in (1, 2, 3, 5, 6, 7, 40):
        assert _in_layers(shape, n) == read_shape({**moe, "num_hidden_layers": n})[0]
    kinds = ["sliding_attention"] * 2 + ["full_attention"]
    windows = {**SMALL, "model_type": "gemma3_text", "sliding_window": 16, "head_dim": 32}
    shape, _ = read_shape({**windows, "num_hidden_layers": 12, "layer_types": kinds * 4})
    deeper, _ = read_shape({**windows, "num_hidden_layers": 24, "layer_types": kinds * 8})
    assert shape.window_layers is not None
    assert _in_layers(shape, 24) == deeper


def test_not_even_the_smallest_fits():
    p = plan(LLAMA_8B, **FULL)
    for room in (24, 40, 60):
        with refused(ValueError) as no:
            largest(p, "batch", gib=room)
        # what the sentence proposes does fit
        found = re.search(r"\); (.*) makes? it fit \(([\d.]+) GiB(?:, and [\d.]+ GiB on the host)?\)\.$", str(no.value))
        assert found is not None
        how, left = found.groups()
        changes = eval(f"dict({how.replace(' with ', ', ')})", {"sk": sk})
        better = p.but(batch=1, **changes)
        assert better.memory.gib == pytest.approx(float(left), abs=0.06)
        assert better.fits(room)
    with refused(ValueError) as no:
        largest(plan(405e9), "parameters", gib=1e-6)
    assert "\n" not in str(no.value)


@pytest.mark.parametrize(
    ("what", "given", "ask"),
    [
        (LLAMA_8B, FULL, {"what": "bath"}),
        (8e9, {}, {"what": "batch", "gib": 80}),
        (LLAMA_8B, FULL, {"what": "parameters"}),
        (LLAMA_8B, {"batch": 2}, {"what": "batch", "gib": 80}),
        (LLAMA_8B, {"batch": 2, "length": 8}, {"what": "batch"}),
        (LLAMA_8B, FULL, {"what": "batch", "gib": 0}),
        (LLAMA_8B, FULL, {"what": "batch", "gib": -80}),
        (LLAMA_8B, FULL, {"what": "batch", "gib": "80"}),
        (LLAMA_8B, FULL, {"what": "batch", "gib": 81920}),
        (LLAMA_8B, FULL, {"what": "batch", "gib": 80 * 2**30}),
        (LLAMA_8B, FULL, {"what": "batch", "gib": 80, "multiple": 0}),
        (SMALL, {"batch": 1, "length": 1, "optimizer": "sgd"}, {"what": "layers", "gib": 19000}),
    ],
)
def test_bad_questions_about_memory(what, given, ask):
    with refused((ValueError, TypeError)) as no:
        largest(plan(what, **given), **ask)
    assert "\n" not in str(no.value)


# -- GPUs, tokens, rates, models


def test_gpus_for_a_deadline_by_hand():
    assert gpus_for(seed_case(), days=68.5546875) == 16000
    assert gpus_for(seed_case(), days=30) == math.ceil(26.325e6 / 24 / 30)
    assert gpus_for(seed_case(), days=30, multiple=8) == 36568
    assert gpus_for(seed_case(), days=1e4) == 110


@FEW
@given(days=st.floats(0.02, 30000), goodput=st.floats(0.05, 1), multiple=st.sampled_from([1, 8, 512]))
def test_the_fewest_gpus_in_time(days, goodput, multiple):
    p = plan(8e9, tokens=1e12, tflops_per_gpu=400, goodput=goodput)
    n = gpus_for(p, days=days, multiple=multiple)
    assert n % multiple == 0
    assert p.but(gpus=n).days <= days
    assert n == multiple or p.but(gpus=n - multiple).days > days


def test_the_fewest_gpus_that_hold_a_model():
    # two bytes a parameter, sharded, and the tenth; a GiB is for activations and a gathered layer
    assert gpus_for(plan(8e9, zero=3, training=False), gib=3) >= math.ceil(8e9 * 2 * 1.1 / 2**30 / 3)
    zero1 = plan(8e9, zero=1)
    n, step = gpus_for(zero1, gib=60), zero1.but(batch=1, length=2048)
    assert step.but(gpus=n).memory.gib <= 60 < step.but(gpus=n - 1).memory.gib
    both = plan(8e9, tokens=1e12, tflops_per_gpu=400, zero=1)
    assert gpus_for(both, gib=60, days=1e4) == n
    assert gpus_for(both, gib=60, days=1) == gpus_for(both, days=1) > n


@pytest.mark.parametrize(("slope", "days"), [(0.0, 40), (1e-4, 40), (1e-4, 20), (1e-3, 90), (1e-3, 120)])
def test_gpus_that_slow_each_other_down(slope, days):
    """Efficiency 1 / (1 + slope n (n - 1)) rises to its best at 1 / sqrt(slope) GPUs and falls after it."""
    p = plan(8e9, tokens=1e11, tflops_per_gpu=400)

    def efficiency(n):
        return 1 / (1 + slope * (n - 1) * n)

    in_time = [n for n in range(1, 400) if p.but(gpus=n).days / efficiency(n) <= days]
    if in_time:
        assert gpus_for(p, days=days, efficiency=efficiency) == in_time[0]
    else:
        with refused(ValueError):
            gpus_for(p, days=days, efficiency=efficiency)


def test_two_gpus_may_lose_to_one_and_more_win():
    p = plan(8e9, tokens=1e11, tflops_per_gpu=400)
    alone = p.but(gpus=1).days

    def efficiency(n):
        return 1.0 if n == 1 else 0.4

    assert gpus_for(p, days=alone, efficiency=efficiency) == 1
    assert gpus_for(p, days=alone / 3.2, efficiency=efficiency) == 8


def test_gpus_of_a_calibrated_kind():
    """The plan's own estimate says how the GPUs' rate falls with their number."""
    measured = Ceilings("one node", bf16_tflops=700, bandwidth_tb_s=3.5, launch_us=4, peer_gb_s=2)
    gpu = Gpu("Mine", memory_gib=80, bandwidth_tb_s=4.0, bf16_tflops=1000, capability=(9, 0), ceilings=measured)
    p = plan(SMALL, batch=1, length=512, tokens=1e12, gpu=gpu, between_gb_s=0.5, usd_per_gpu_hour=2)
    days = [p.but(gpus=n).days for n in range(1, 40)]
    assert days[-1] > days[0] / 39 * 1.01
    for goal in (days[6] * 1.0001, days[20] * 1.0001):
        n = next(i + 1 for i, each in enumerate(days) if each <= goal)
        assert gpus_for(p, days=goal) == n
        assert gpus_for(p, days=goal, usd=p.but(gpus=n).usd * 1.0001) == n
        with refused(ValueError):
            gpus_for(p, days=goal, usd=p.but(gpus=n).usd * 0.9999)
    assert tokens_for(p, days=days[0]) == pytest.approx(1e12)
    assert p.recipes(["bf16", "qnf4"])["kind"].unique() == ["prediction"]
    assert "prediction" in str(binds(p).time)


def test_tokens_for_a_budget_by_hand():
    assert tokens_for(seed_case(), usd=52.65e6) == 15.6e12
    assert tokens_for(seed_case(), gpu_hours=26.325e6) == 15.6e12
    assert tokens_for(seed_case(tokens=None), days=68.5546875) == 15.6e12
    assert tokens_for(seed_case(), usd=1e5) == 29629629629  # 5e4 hours x 3600 s x 400e12 / 6 / 405e9
    assert tokens_for(seed_case(), usd=1e5, days=68) == 29629629629
    assert tokens_for(seed_case(usd_per_gpu_hour=(1.0, 3.0)), usd=1e5) == 29629629629


@FEW
@given(
    usd=st.floats(10, 1e7),
    price=st.floats(0.1, 20),
    mfu=st.floats(0.01, 0.6),
    goodput=st.floats(0.1, 1),
    what=st.sampled_from([8e9, 70e9]),
)
def test_tokens_and_cost_are_inverse(usd, price, mfu, goodput, what):
    p = plan(what, gpu="H100", mfu=mfu, goodput=goodput, usd_per_gpu_hour=price)
    tokens = tokens_for(p, usd=usd)
    assert isinstance(tokens, int)
    assert p.but(tokens=tokens).usd <= usd < p.but(tokens=tokens + 1).usd
    assert p.but(tokens=tokens).usd == pytest.approx(usd, rel=1 / tokens)


@FEW
@given(days=st.floats(70, 2000), gpus=st.integers(1000, 20000), goodput=st.floats(0.6, 1))
def test_rate_and_days_are_inverse(days, gpus, goodput):
    p = seed_case(gpus=gpus, goodput=goodput)
    if p.but(tflops_per_gpu=989).days > days:  # a number's products are BF16
        with pytest.raises(ValueError, match="even at that peak"):
            rate_for(p, days=days)
    else:
        rate = rate_for(p, days=days)
        assert p.but(tflops_per_gpu=rate).days == pytest.approx(days)


def test_rate_by_hand():
    assert rate_for(seed_case(), days=68.5546875) == 400
    assert rate_for(seed_case(tflops_per_gpu=None), usd=52.65e6) == 400

    with refused(ValueError):
        rate_for(seed_case(), days=20)
    assert rate_for(seed_case(recipe="fp8"), days=20) == pytest.approx(400 * 68.5546875 / 20)


def test_the_model_of_a_budget():
    p = plan(8e9, gpu="H100", mfu=0.4, usd_per_gpu_hour=2.5, gpus=8)
    best = parameters_for(p, usd=1e6)
    flops = 1e6 / 2.5 * 3600 * 0.4 * 989e12
    assert best.flops == pytest.approx(flops)
    assert best.parameters == pytest.approx(math.sqrt(flops / 120))
    assert best.tokens == pytest.approx(20 * best.parameters)
    assert "68.9 B parameters on 1.378 T tokens" in str(best)
    again = plan(
        best.parameters, tokens=best.tokens, **{k: p.given[k] for k in ("gpu", "mfu", "usd_per_gpu_hour", "gpus")}
    )
    assert again.usd == pytest.approx(1e6)


def test_the_model_of_a_budget_by_a_law():
    class Even:
        name = "as many tokens as parameters"

        def optimal(self, flops):
            return math.sqrt(flops / 6), math.sqrt(flops / 6)

    best = parameters_for(plan(8e9, tflops_per_gpu=400), gpu_hours=1e5, law=Even())
    assert best.parameters == best.tokens == pytest.approx(math.sqrt(1e5 * 3600 * 400e12 / 6))
    assert best.how.startswith("where as many tokens as parameters")


def test_the_model_of_a_budget_by_published_laws():
    p = plan(8e9, gpu="H100", mfu=0.4)
    best = parameters_for(p, gpu_hours=1e4, law=CHINCHILLA)
    assert (best.parameters, best.tokens) == tuple(CHINCHILLA.optimal(best.flops))
    assert "extrapolated" not in best.how
    far = parameters_for(p, gpu_hours=1e8, law=KAPLAN)
    assert "extrapolated" in far.how
    assert "without embeddings" in far.how


def test_gpus_by_a_measured_speedup():
    p = plan(8e9, tokens=1e11, tflops_per_gpu=400)
    fit = fit_speedup({1: 100.0, 2: 196.0, 4: 376.0, 8: 690.0})
    days = p.but(gpus=1).days * fit.rate(1) / fit.rate(20)
    assert gpus_for(p, days=days * 1.0001, efficiency=fit) == 20
    assert gpus_for(p, days=days * 0.9999, efficiency=fit) == 21
    assert gpus_for(p, days=days) < 20
    priced = p.but(usd_per_gpu_hour=2)
    budget = priced.usd * 1.01
    assert gpus_for(priced, days=days, usd=budget) == gpus_for(p, days=days)
    with refused(ValueError):
        gpus_for(priced, days=days, usd=budget, efficiency=fit)


@pytest.mark.parametrize(
    ("ask", "given", "sentence"),
    [
        (lambda p: gpus_for(p), {}, "give days=, the time there is, or gib="),
        (lambda p: gpus_for(p, days=0), {}, "days=0 must be a finite number above zero"),
        (lambda p: gpus_for(p, days=1e6), {}, "more than a century"),
        (lambda p: gpus_for(p, days=1e-6), {}, "more than there are"),
        (lambda p: gpus_for(p, days=30), {"tokens": None}, "lacks the run: give it tokens="),
        (lambda p: gpus_for(p, days=30), {"tflops_per_gpu": None}, "needs a rate: give the plan tflops_per_gpu="),
        (lambda p: gpus_for(p, gib=80), {}, "without zero= each holds all .* zero=3, recompute='full' make it fit"),
        (lambda p: gpus_for(p, gib=80), {"zero": 1}, "zero=1 leaves .* on each; zero=3"),
        (
            lambda p: gpus_for(p, days=30, usd=1e6),
            {},
            "costs 52.65 M USD on 36,563 GPUs, .* more than 1 M USD: tokens_for",
        ),
        (lambda p: gpus_for(p, days=30, multiple=-8), {}, "multiple=-8 must be a finite number above zero"),
        (lambda p: gpus_for(p, days=30, efficiency=lambda n: 0), {}, r"efficiency\(1\)=0 must be"),
        (
            lambda p: gpus_for(p, days=30, efficiency=0.9),  # type: ignore[arg-type]
            {},
            "efficiency=0.9 must say it for any number of GPUs: give a function",
        ),
        (lambda p: tokens_for(p), {}, "no budget to keep: give days=, gpu_hours= or usd="),
        (lambda p: tokens_for(p, usd=-5), {}, "usd=-5 must be"),
        (lambda p: tokens_for(p, usd=True), {}, "give a number"),
        (lambda p: tokens_for(p, usd=1e-6), {}, "hardly any: check its unit"),
        (lambda p: tokens_for(p, usd=1e12), {}, "more than there is text: check its unit"),
        (lambda p: tokens_for(p, usd=5), {"usd_per_gpu_hour": None}, "needs a price: give the plan usd_per_gpu_hour="),
        (lambda p: tokens_for(p, days=5), {"tflops_per_gpu": None}, "needs a rate"),
        (lambda p: rate_for(p, days=5), {"tokens": None}, "needs the run: give the plan tokens="),
        (lambda p: rate_for(p), {}, "no budget to keep"),
        (lambda p: parameters_for(p), {}, "no budget to keep"),
        (lambda p: parameters_for(p, usd=1e6), {"recipe": "qfp8"}, "qfp8 freezes the model"),
    ],
)
def test_bad_questions_about_time_and_money(ask, given, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence) as no:
        ask(seed_case(**given))
    assert "\n" not in str(no.value)


# -- which recipe


@pytest.fixture
def bounds(monkeypatch):
    """Plans without an estimate: times are bounds."""
    monkeypatch.setattr(Plan, "estimate", property(lambda plan: None))


def by_name(p, *args, **more):
    return recipes(p, *args, **more).set_index("recipe")


def test_every_recipe_is_compared_with_what_trains_the_same(bounds):
    table = by_name(plan(LLAMA_8B, **FULL))
    assert set(table.index) == {*planner_recipes(), "bf16+lora"}
    assert set(table[table["against"] == "bf16+lora"].index) == {"bf16+lora", "qfp8", "qfp4", "qnf4"}
    assert table.loc["bf16", "speedup"] == table.loc["bf16+lora", "speedup"] == 1
    assert table.loc["fp8", "step_ms"] == plan(LLAMA_8B, **FULL, recipe=FP8).time.floor_step_ms
    assert table.loc["fp8", "gib"] == plan(LLAMA_8B, **FULL, recipe=FP8).memory.gib
    assert set(table["kind"]) == {"bound"}


def planner_recipes():
    from surokit.recipe import recipes

    return recipes


def test_native_or_emulated_and_why():
    on = {gpu: by_name(plan(SMALL, batch=1, length=64, gpu=gpu)) for gpu in ("A100", "H100", "B200")}
    assert on["H100"].loc["fp8", "products"] == on["H100"].loc["qfp8", "products"] == "native"
    assert on["H100"].loc["mxfp8", "products"] == "emulated"
    assert "compute capability 10.0 and up" in on["H100"].loc["mxfp8", "why"]
    assert on["B200"].loc["mxfp8", "products"] == on["B200"].loc["fp4", "products"] == "native"
    assert on["B200"].loc["fp8-block", "products"] == "emulated"
    assert on["A100"].loc["fp8", "products"] == "emulated"
    assert on["A100"].loc["qfp8", "products"] == on["H100"].loc["qnf4", "products"] == "bf16"
    assert on["B200"].loc["mxfp4", "products"] == "emulated"
    assert set(by_name(plan(SMALL, batch=1, length=64))["products"]) == {"bf16", ""}
    unknown = Gpu("Blank", bf16_tflops=100, capability=(9, 0), memory_gib=80)
    assert "theirs is not known" in by_name(plan(SMALL, batch=1, length=64, gpu=unknown)).loc["fp8", "why"]


def test_the_fastest_is_native_fits_and_trains_the_same(bounds):
    p = plan(LLAMA_8B, **FULL)
    assert not by_name(p, gib=20)["fastest"].any()  # nothing that trains everything fits
    room = p.but(recipe=FP8).memory.gib
    table = by_name(p, gib=room)
    assert list(table["fits"]) == [p.but(recipe=c.recipe).memory.gib <= room for c in compare_recipes(p)]
    assert list(table[table["fastest"]].index) == ["fp8"]
    assert table.loc["qfp8", "step_ms"] < table.loc["fp8", "step_ms"]
    adapter = by_name(p.but(recipe=QNF4.lora(rank=8)), gib=200)
    assert set(adapter["against"]) == {"bf16+lora"}
    assert adapter["fastest"].sum() == 1
    # on an A100 a bound takes emulated products for as fast as bf16's
    old = by_name(p.but(gpu="A100"), gib=200)
    assert list(old[old["fastest"]].index) == ["bf16"]
    assert old.loc["mxfp4", "speedup"] == 1


def test_an_estimate_is_taken_where_there_is_one(monkeypatch):
    class Estimate:
        kind = "prediction"

        def __init__(self, step_ms):
            self.step_ms = step_ms

    # emulation costs time, which a bound does not see
    times = {"bf16": 100.0, "fp8": 80.0, "mxfp8": 150.0}
    monkeypatch.setattr(Plan, "estimate", property(lambda plan: Estimate(times[plan.recipe.name])))
    monkeypatch.setattr(Plan, "has_published_rates", False)
    table = by_name(plan(LLAMA_8B, **FULL), list(times), gib=500)
    assert list(table["speedup"]) == [1, 1.25, pytest.approx(100 / 150)]
    assert set(table["kind"]) == {"prediction"}
    assert list(table[table["fastest"]].index) == ["fp8"]


def test_recipes_without_a_gpu_or_a_step(bounds):
    table = by_name(plan(LLAMA_8B, batch=4, length=4096))
    assert table["step_ms"].isna().all()
    assert table["fits"].isna().all()
    assert not table["fastest"].any()
    assert by_name(plan(LLAMA_8B, gpu="H100"), "fp8").loc["fp8", "fits"] is None
    assert not by_name(plan(LLAMA_8B, gpu="H100"), "fp8", gib=2).loc["fp8", "fits"]


def test_chosen_recipes():
    p = plan(SMALL, batch=1, length=64, gpu="H100")
    assert [c.name for c in compare_recipes(p, ["fp8", QFP8])] == ["fp8", "qfp8"]
    assert [c.name for c in compare_recipes(p, "FP8")] == ["fp8"]
    mine = FP8.keep_last(2)
    own = compare_recipes(p.but(recipe=BF16.store(QNF4).lora(rank=4)))
    assert own[-1].name == "bf16+qnf4"
    assert all(c.recipe.adapter and c.recipe.adapter.rank == 4 for c in own)
    assert compare_recipes(p, [mine])[0].recipe == mine
    # its name does not say what it keeps
    called = [c.name for c in compare_recipes(p.but(recipe=mine))]
    assert called.count("fp8") == called.count("fp8 (as planned)") == 1
    assert not any("as planned" in c.name for c in compare_recipes(p.but(recipe=FP8.lora(4))))
    with refused(ValueError):
        compare_recipes(p, [])
    with refused(ValueError):
        compare_recipes(p, ["fp88"])


# -- what would make it fit, and what binds


@FEW
@given(
    gib=st.floats(2, 200),
    batch=st.integers(1, 12),
    gpus=st.sampled_from([1, 8]),
    recipe=st.sampled_from([None, "fp8", "qfp8"]),
    master=st.booleans(),
)
def test_the_path_fits_and_no_part_of_it_is_idle(gib, batch, gpus, recipe, master):
    p = plan(LLAMA_8B, batch=batch, length=2048, gpus=gpus, recipe=recipe, master=master)
    found = fitting(p, gib=gib)
    for remedy in found.remedies:
        alone = p.but(**remedy.changes)
        assert remedy.gib == alone.memory.gib
        assert remedy.fits == alone.fits(gib)
        s = alone.setup
        assert alone.flops_per_step is None or s.batch * s.accumulate * s.replicas == batch * gpus
    if p.fits(gib):
        assert found.path == ()
        assert found.plan is p
    elif found.plan is None:
        assert not any(remedy.fits for remedy in found.remedies)
        assert "take a smaller model" in found.sentence
    else:
        assert found.plan.fits(gib)
        taken: dict[str, Any] = {k: v for remedy in found.path for k, v in remedy.changes.items()}
        assert p.but(**taken).memory.gib == found.plan.memory.gib
        for left_out in found.path:
            rest: dict[str, Any] = {k: v for r in found.path if r != left_out for k, v in r.changes.items()}
            assert not p.but(**rest).fits(gib)
        if "batch" in taken:
            larger = [n for n in range(taken["batch"] + 1, batch) if batch % n == 0]
            sums = found.plan.setup.accumulate * taken["batch"]
            assert not any(p.but(**{**taken, "batch": n, "accumulate": sums // n}).fits(gib) for n in larger)


def test_remedies_come_by_their_costs_and_ways_by_their_time():
    p = plan(LLAMA_8B, **FULL, gpus=8)
    assert [r.how for r in fitting(p).remedies] == [
        "batch=1, accumulate=4",
        "zero=1",
        "zero=2",
        "optimizer='adamw8bit'",
        "zero=3",
        "fusion='fused', recompute='selective'",
        "fusion='fused', recompute='full'",
        "offload_activations=True",
        "optimizer='offloadadamw'",
        "optimizer='zenflow'",
        "recipe=sk.BF16.lora()",
        "recipe=sk.QFP8.lora()",
        "recipe=sk.QNF4.lora()",
        *(f"{how}_parallel={n}, accumulate={n}" for how in ("tensor", "pipeline") for n in (2, 4, 8)),
    ]
    found: Any = fitting(p)
    times = [way.step_ms for way in found.ways]
    assert len(times) > 3
    assert times == sorted(times)
    assert found.kind == "likely"
    assert found.plan == found.ways[0].plan
    assert all(way.plan.fits() and way.step_ms == way.plan.step_time.ms for way in found.ways)
    assert list(found.together().step_ms) == times
    # without a GPU no time is known, and the least costly come first
    unknown = fitting(plan(LLAMA_8B, **FULL | {"gpu": None}, gpus=8), gib=80)
    assert not unknown.kind
    assert [r.how for r in unknown.path] == [next(r.how for r in unknown.remedies if r.fits)]
    assert fitting(p, gib=200).sentence == "it fits as it is"
    with refused(ValueError):
        fitting(plan(8e9))


@pytest.mark.parametrize("recipe", [None, "fp8", "fp8+qfp8", QFP8, BF16.lora(8), FP8.lora(8, 16.0, ["q_proj"])])
def test_remedies_can_be_pasted(recipe):
    for remedy in fitting(plan(LLAMA_8B, **FULL, recipe=recipe), gib=10).remedies:
        assert eval(f"dict({remedy.how})", {"sk": sk}) == dict(remedy.changes)


def test_fitting_shows_itself():
    found = fitting(plan(LLAMA_8B, **FULL))
    text = repr(found)
    usual = "and 256.0 GiB of the host's for each GPU (assumed: give host_gib=): "
    assert text.startswith(f"{found.gib:,.1f} GiB into 78.7 GiB, {usual}")
    assert (
        "time: 23% more FLOPs; sk.fuse(model, recompute='full')" in text
    )  # 2 N of 6 N without the head, and with attention
    assert "Decoder" not in repr(fitting(plan(LLAMA_8B, **FULL, layers="transformers")))
    rows = 2 + len(found.remedies) + len(found.ways[:8]) + (len(found.ways) > 8)
    assert found._repr_html_().count("<tr>") == found._repr_html_().count("</tr>") == rows
    assert list(found.table().columns) == ["remedy", "gib", "step_ms", "fits", "host_gib", "hosted", "costs"]
    assert "what fits, the fastest first" in text
    assert "without activations" in fitting(plan(1e9), gib=80).sentence


def test_what_fits_together_is_proposed_by_its_time():
    """8B of transformers' layers, 2 x 8192 on an H100: unless they are fused, streaming the weights is the only remedy alone."""
    p = plan(LLAMA_8B, batch=2, length=8192, gpu="H100", layers="transformers")
    found = fitting(p)
    alone = [r for r in found.remedies if r.fits and "recipe" not in r.changes]
    assert [r.how for r in alone] == ["fusion='fused', recompute='full'", "offload_weights=True, optimizer='adamw'"]
    assert len({way.how for way in found.ways}) == len({frozenset(way.changes.items()) for way in found.ways})
    ways: dict[str, Any] = {way.how: way.step_ms for way in found.ways}
    assert ways[found.ways[0].how] < 0.6 * ways[alone[1].how]
    for pair in ("logits='fused', recompute='full'", "optimizer='adamw8bit', recompute='full'"):
        assert ways[pair] < 0.75 * ways[alone[1].how]
    # activations go down while the forward computes, and not while all of the step does
    assert ways["logits='fused', recompute='full'"] < ways["logits='fused', offload_activations=True"]
    assert all("recipe" not in remedy.changes for way in found.ways for remedy in way.remedies)
    # what a way has more than another saves time
    for way in found.ways:
        fewer = [other.how for other in found.ways if set(other.changes) < set(way.changes)]
        assert all(ways[way.how] < 0.99 * ways[how] for how in fewer)
        for left_out in way.remedies:
            rest: dict[str, Any] = {k: v for r in way.remedies if r != left_out for k, v in r.changes.items()}
            alone = p.but(**rest)
            assert not alone.fits() or alone.step_time.ms > way.step_ms


def test_the_step_of_a_way_gets_faster_still():
    """By fusing and by a recipe, from whichever way becomes the fastest; nothing of it is taken by itself."""
    p = plan(LLAMA_8B, batch=2, length=8192, gpus=4, gpu="H100")
    found = p.fitting()
    ((way, changes),) = found.faster_still
    assert way in found.ways
    assert p.but(**way.changes).memory == way.plan.memory
    fused, recipe = changes
    assert fused.how == "fusion='fused'"
    final = p.but(**way.changes, **fused.changes, **recipe.changes)
    assert final.fits()
    assert final.step_time.ms == recipe.step_ms < found.ways[0].step_ms
    line = next(line for line in repr(found).splitlines() if "faster still" in line)
    assert way.how in line
    assert line.endswith(f"then {recipe.how}: {recipe.step_ms:,.0f} ms (a race tells whether it trains as well)")
    assert "faster still" in found._repr_html_()
    assert not fitting(p, gib=200).faster_still
    assert not p.but(training=False, batch=64).fitting(gib=20).faster_still
    # without another recipe, and with one; both are faster than the first way
    routed = plan("mixtral-8x7b-v0.1", batch=1, length=4096, gpu="H100", gpus=8, graphs=True, fusion="none").fitting()
    assert all(each[-1].step_ms < routed.ways[0].step_ms for _, each in routed.faster_still)
    assert all("graphs" not in change.changes for _, each in routed.faster_still for change in each)
    table = found.together()
    assert (table.low_ms <= table.step_ms).all()
    assert (table.high_ms > table.step_ms).all()
    slow = p.but(gpus=1).fitting(host=Host(10, 1e9)).together()
    # times on this host are not the likely ones
    assert list(slow.low_ms.isna()) == [bool(gib) for gib in slow.host_gib]
    assert "a step (likely, on this host)" in repr(p.but(gpus=1).fitting(host=Host(10, 1e9)))


def test_ways_without_times_come_by_their_costs():
    """None is left out for another that takes less memory, as what it costs is not in these figures."""
    found = plan(8e9, gpu="H100", batch=1, length=2048).fitting(gib=60)
    assert all(way.time is None for way in found.ways)
    assert [way.how for way in found.ways][:2] == ["optimizer='adamw8bit'", "optimizer='offloadadamw'"]
    assert found.path == found.ways[0].remedies


def test_the_hosts_memory_bounds_what_is_faster_too():
    """Its memory as given, as a Host has it, or as assumed; a plan that takes more already may go on taking it."""
    p = plan(
        LLAMA_8B, batch=2, length=8192, gpu="H100", offload_activations=True, fusion="fused", recompute="selective"
    )
    quick = Host(400, 1e11, memory_gib=50)
    less = p.but(recompute="none").memory.host_gib
    assert p.memory.host_gib < 50 < less
    assert "does not fit" in {way.why for way in p.faster(host=quick).ways}
    assert p.faster(host=quick).plan.memory.host_gib < 50
    assert p.faster(host=quick, host_gib=100).plan.memory.host_gib == less
    offloads = plan(LLAMA_70B, batch=8, length=8192, gpu="H100", optimizer="offloadadamw")
    large = offloads.fitting()
    assert large.space.host_gib == offloads.memory.host_gib > 256
    assert large.ways
    assert all(way.host_gib <= large.space.host_gib for way in large.ways)
    assert f"{large.space.host_gib:,.1f} GiB of the host's for each GPU (assumed: give host_gib=)" in repr(large)
    small = p.but(offload_activations=False).fitting(host_gib=8)
    assert not small.space.assumed
    assert all(way.host_gib <= 8 for way in small.ways)
    # what the host has no memory for keeps nothing else from being tried
    masters = plan(LLAMA_8B, batch=2, length=8192, gpu="H100", master=True, state_dtype="fp32", optimizer="adamw8bit")
    for room in (0, 10):
        found = masters.fitting(host_gib=room)
        assert "recipe" not in found.ways[0].changes
        assert found.plan.fits()
        assert found.plan.memory.host_gib <= room
    frozen = plan(LLAMA_70B, batch=8, length=8192, gpu="H100").fitting(host_gib=8)
    assert all(way.remedies[0].how.startswith("recipe=") and way.plan.fits() for way in frozen.ways)
    assert len(frozen.path) > 1
    # blocks that are streamed come whole: no stage that shards them is tried
    streamed = plan(LLAMA_8B, batch=8, length=8192, gpu="RTX 4090", gpus=8, offload_weights=True).fitting()
    assert streamed.plan.fits()
    assert all(way.changes.get("zero", 0) < 2 for way in streamed.ways)
    with refused(ValueError):
        p.fitting(host_gib=-1)


def test_a_model_is_divided_where_that_helps():
    """Over the plan's own GPUs, with as many tokens a step as before, and with what else a divided model can have."""
    p = plan("qwen2.5-32b", batch=2, length=16384, gpu="H100", gpus=8)
    found = p.fitting()
    divided = [way for way in found.ways if way.plan.setup.division.divides]
    assert {way.how for way in divided} >= {
        "tensor_parallel=8, accumulate=8, recompute='full'",
        "tensor_parallel=8, batch=1, accumulate=16",
    }
    for way in divided:
        s = way.plan.setup
        assert s.batch * s.accumulate * s.replicas == 2 * 8
        assert not s.offloads
        assert way.plan.fits()
        assert eval(f"p.but({way.how})", {"p": p}).memory.gib == way.plan.memory.gib
        assert len(way.remedies) == 1 or not p.but(**way.remedies[1].changes).fits()
    routed = plan("mixtral-8x7b-v0.1", batch=1, length=4096, gpu="H100", gpus=8)
    ways = {way.how: way for way in routed.fitting().ways}
    shared = ways["expert_parallel=8, recompute='selective'"]
    assert shared.plan.fits()
    assert shared.step_ms < min(way.step_ms for how, way in ways.items() if "tensor" in how)
    # so large that it takes three: no part of them can be left out, and none changes what trains
    large = plan("llama-3.1-70b", batch=1, length=131072, gpu="H100", gpus=64)
    first = large.fitting().ways[0]
    assert first.how == "tensor_parallel=4, accumulate=4, zero=3, recompute='full'"
    for left_out in first.remedies:
        rest: dict[str, Any] = {k: v for r in first.remedies if r != left_out for k, v in r.changes.items()}
        assert not large.but(**rest).fits()
    for alone in (p.but(gpus=1), p.but(tensor_parallel=2), p.but(training=False), p.but(fusion="fused")):
        assert not {name for r in alone.fitting(gib=20).remedies for name in r.changes if name.endswith("_parallel")}


def test_ways_are_timed_on_the_host_that_is_given():
    p = plan(LLAMA_8B, batch=2, length=8192, gpu="H100", layers="transformers")
    slow, published = p.fitting(host=Host(5, 1e8, memory_gib=2000)), p.fitting()
    streams = "offload_weights=True, optimizer='adamw'"
    times = [{w.how: w.step_ms for w in found.ways}[streams] for found in (slow, published)]
    assert times[0] > 10 * times[1]
    assert times[0] == pytest.approx(p.streamed(Host(5, 1e8)).step_ms, rel=0.01)
    assert "offload" in slow.ways[-1].how


def test_an_optimizer_in_backward_is_not_combined_with_what_needs_gradients():
    p = plan(LLAMA_8B, batch=4, length=4096, gpu="H100", optimizer_in_backward=True)
    assert not {"accumulate", "offloadadamw", "zenflow"} & {
        str(each) for r in p.fitting().remedies for pair in r.changes.items() for each in pair
    }
    assert p.fitting().plan is not None
    assert p.memory["gradients"].bytes == 0
    assert p.but(recompute="full").memory.gib < plan(LLAMA_8B, batch=4, length=4096, recompute="full").memory.gib - 5
    assert not any(row.part == "norm" and row.group == "optimizer" for row in p.estimate.rows)
    for more in ({"accumulate": 2}, {"optimizer": "zenflow"}, {"offload_weights": True}):
        with refused(ValueError):
            p.but(**more)


def test_bounds_order_nothing():
    """A bound does not know what computing again costs."""
    found = fitting(plan(8e9, batch=4, length=4096, gpu="H100"))
    assert found.ways
    assert not found.kind
    assert all(way.step_ms is None for way in found.ways)


def test_what_may_wait_on_the_host_is_a_remedy():
    """With the memory that is left, and the host's; none of them where there is nothing to gain, or no other memory."""
    p = plan(LLAMA_8B, **FULL)
    found = {remedy.how: remedy for remedy in fitting(p).remedies}
    for how in (
        "offload_activations=True",
        "optimizer='offloadadamw'",
        "optimizer='zenflow'",
        "offload_weights=True, optimizer='adamw'",
    ):
        memory = p.but(**found[how].changes).memory
        assert (found[how].gib, found[how].host_gib) == (memory.gib, memory.host_gib)
        assert memory.gib < p.memory.gib
        assert f"{memory.host_gib:.1f} GiB" in repr(fitting(p))
    assert found["fusion='fused', recompute='full'"].host_gib == 0
    assert not {how for how in found if "offload" in how} & {r.how for r in fitting(p.but(gpu="cpu"), gib=80).remedies}
    large = fitting(plan(LLAMA_70B, **FULL), host=Host(50, 2e9, memory_gib=1024))
    assert ["offload_weights=True, optimizer='adamw'"] in [
        [remedy.how for remedy in way.remedies] for way in large.ways
    ]
    assert large.sentence.endswith(" GiB on the host)")
    two = plan(LLAMA_8B, batch=1, length=8192, gpu="RTX-4090", gpus=2, recompute="full")
    assert two.fitting().sentence.endswith(" GiB on the host for each GPU)")
    # with what a step waits for, where the host is known
    ceilings = Ceilings("one machine", bf16_tflops=700, bandwidth_tb_s=3.0, host_gb_s=25.0, host_adam_params_s=3e9)
    known = p.but(gpu=dataclasses.replace(planner.find_gpu("H100"), ceilings=ceilings))
    remedy = next(r for r in fitting(known).remedies if r.how == "optimizer='offloadadamw'")
    waits = known.but(optimizer="offloadadamw").time.waits_ms
    assert f"{waits:,.0f} ms more a step" in remedy.costs


def test_a_remedy_has_to_fit_on_the_host_too(monkeypatch):
    p = plan(LLAMA_70B, batch=2, length=2048, recompute="full", gpu="H100", state_dtype="fp32", master=True)
    streams = "offload_weights=True, optimizer='adamw'"
    assert streams in [way.how for way in p.fitting(host=Host(50, 2e9, memory_gib=1024)).ways]
    # a host whose memory is not known has what is usual
    usual = {r.how: r for r in fitting(p).remedies}[streams]
    assert (usual.fits, usual.hosted, usual.host_gib > 256) == (False, False, True)
    assert all(way.plan.memory.host_gib <= 256 for way in fitting(p).ways)
    host = Host(50, 2e9, memory_gib=512)
    found = p.fitting(host=host)
    turned_down = {r.how: r for r in found.remedies}[streams]
    assert turned_down.gib < 80 < 512 < turned_down.host_gib
    assert (turned_down.fits, turned_down.hosted) == (False, False)
    assert found.path
    assert found.plan.memory.gib <= 80
    assert 0 < found.plan.memory.host_gib <= 512
    assert all("recipe" not in r.changes for r in found.path)
    assert "into 78.7 GiB, and 512.0 GiB of the host's for each GPU: " in repr(found)
    row = next(line for line in repr(found).splitlines() if line.startswith(f"  {streams} "))
    assert "would fit" not in row
    assert f"{turned_down.host_gib:,.1f} GiB  does not fit  time" in row
    # a plan that fits on the GPU alone does not fit, and what no remedy mends says so
    streamed = p.but(offload_weights=True)
    assert streamed.fits()
    assert "it fits as it is" not in streamed.fitting(host=host).sentence
    none = p.fitting(gib=12, host=dataclasses.replace(host, memory_gib=16))
    assert none.plan is None
    assert " on the host, and the host has 16.0 GiB; take a smaller model" in none.sentence
    # a calibrated host needs no saying
    monkeypatch.setattr("surokit.planner.offload.formulas.host_of", lambda gpu: host)
    assert fitting(p) == found
    with refused(TypeError):
        p.fitting(host=512)


def test_only_what_makes_room_is_listed():
    """An option that leaves as much, or more, is none; what fits already is not said to be made fit."""
    small = {**LLAMA_8B, "num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192}
    p = plan(small, batch=2, length=2048, gpu="H100", recompute="full")
    assert p.but(batch=1, accumulate=2).memory.gib > p.memory.gib
    assert p.but(offload_activations=True).memory.gib > 0.99 * p.memory.gib
    found = fitting(p)
    assert found.already
    assert found.remedies
    assert all(r.fits and r.gib <= 0.99 * p.memory.gib for r in found.remedies)
    assert not {"batch=1, accumulate=2", "offload_activations=True"} & {r.how for r in found.remedies}
    assert "would fit" not in repr(found)
    assert "would fit" in repr(fitting(p, gib=10))
    assert not fitting(p, gib=10).already


def test_what_binds(bounds):
    p = plan(LLAMA_8B, **FULL)
    b: Any = binds(p)
    assert b.memory.term == p.memory.largest.name == "activations"
    assert b.memory.share == pytest.approx(p.memory["activations"].gib / p.memory.gib)
    assert "batch=1, accumulate=4 leaves" in b.memory.remedy
    assert f"on one GPU, in its {p.memory.peak_phase} phase" in b.memory.how
    # three matrices of 4096 x 14336 in 32 layers, of all products
    mlp = sum(q.forward + q.backward for q in p.compute.products if q.module.startswith("mlp")) / p.compute.model
    assert b.time.term == "the products of mlp"
    assert b.time.share == pytest.approx(mlp)
    assert repr(b).count("\n") == 1
    assert "activations" in b._repr_html_()
    weights: Any = binds(plan(8e9, optimizer="sgd"))
    assert weights.time is None
    assert weights.memory.term in ("weights", "gradients")
    faster: Any = binds(p.but(gpu="H200", recompute="full")).time
    assert faster.remedy == "recipe fp8 is at most 1.68 times as fast as bf16"
    # as fast as what is planned
    keeping = p.but(gpu="H200", recompute="full", recipe=FP8.keep_first(8).keep_last(8))
    time: Any = binds(keeping).time
    gain = keeping.time.floor_step_ms / keeping.but(recipe=FP8).time.floor_step_ms
    assert 1.02 < gain < 1.5
    assert time.remedy == f"recipe fp8 is at most {gain:.2f} times as fast as fp8 as planned"


def test_a_remedy_says_what_is_left_of_the_same_kind():
    """Quantized weights have another name, and are weights still."""
    served = plan(LLAMA_8B, **{**FULL, "batch": 1, "training": False})
    assert served.memory.largest.name == "weights"
    weights = sum(t.gib for t in served.but(recipe=QFP8).memory.terms if t.name.startswith("weights"))
    remedy = binds(served).memory.remedy
    assert f"recipe=sk.QFP8 leaves {weights:.2f} GiB of weights" in remedy
    assert "trains" not in "".join(r.costs for r in fitting(served, gib=80).remedies)
    assert "recipe=sk.QNF4.lora()" in [r.how for r in fitting(plan(8e9, recipe="qfp8"), gib=80).remedies]
    estimated = str(binds(plan(LLAMA_8B, **FULL, optimizer="sgd", recompute="full")).time)
    assert "(optimistic: rates of the datasheet of H100, which few runs reach)" in estimated
    assert " times as fast as bf16" in estimated
    assert "predicted" not in estimated


def test_what_binds_by_an_estimate(monkeypatch):
    class Estimate:
        kind, how, step_ms = "prediction", "rates measured on a bench", 100.0

        def by_bound(self):
            return {"compute": 30.0, "memory": 60.0, "launch": 10.0}

        def by_module(self):
            return {"mlp": 50.0, "optimizer": 40.0}

    monkeypatch.setattr(Plan, "estimate", property(lambda plan: Estimate()))
    monkeypatch.setattr(Plan, "has_published_rates", False)
    time: Any = binds(plan(LLAMA_8B, **FULL)).time
    assert str(time).startswith(
        "time: memory, most of the time in mlp, 60% of a step of 100 ms (prediction: rates measured"
    )


def test_what_trains_changes_last():
    """Two remedies together that leave the recipe come before one that changes what trains."""
    p = plan(LLAMA_70B, batch=1, length=2560, gpus=8, gpu="H100", zero=3)
    found = p.fitting()
    assert found.plan is not None
    assert all("recipe" not in remedy.changes for remedy in found.path)
    assert len(found.path) == 2
    assert any(r.fits and "recipe" in r.changes for r in found.remedies)  # one change of the recipe would do
    assert "frozen weights too" in next(
        r.costs for r in p.but(zero=0, recipe="qfp8").fitting().remedies if r.how == "zero=3"
    )


def test_a_law_that_is_none():
    with refused(TypeError):
        parameters_for(seed_case(), usd=1e6, law="chinchilla")


LLAMA_70B = {
    **{"model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64},
    **{"num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256},
}
