"""What a plan says: the seed case exactly, published runs, inputs of every kind, and one sentence for what cannot be meant."""

import dataclasses
import inspect
import json
import subprocess
import sys

import pytest

from surokit import planner, units
from surokit.hardware.linear import linear_seconds
from surokit.planner import Gpu, find_gpu, judge_hours, read_shape, register
from surokit.planner.compare.published import published
from surokit.planner.inputs.question import Question
from surokit.recipe import BF16, FP4, FP8, FP8_BLOCK, FP8_ROWWISE, MXFP4, MXFP8, PROJECTIONS, QFP8
from tests.planner.families import LLAMA_1B
from tests.refusals import refused


def plan(what, **given):
    """Untyped, so that figures that may be None are used as they are."""
    return planner.plan(what, **given)


def seed_case(**more):
    given = {"tokens": 15.6e12, "gpus": 16000, "gpu": "H100", "tflops_per_gpu": 400, "usd_per_gpu_hour": 2.0}
    return plan(405e9, **{**given, **more})


def test_the_405b_case_exactly():
    p = seed_case()
    assert p.flops == 3.7908e25
    assert p.days == 68.5546875
    assert p.gpu_hours == 26.325e6
    assert p.usd == 52.65e6
    assert p.time.mfu == pytest.approx(400 / 989)


def test_goodput_and_mfu():
    assert seed_case(goodput=0.9).gpu_hours == pytest.approx(26.325e6 / 0.9)
    by_mfu = seed_case(tflops_per_gpu=None, mfu=0.4)
    assert by_mfu.time.rate_tflops == pytest.approx(395.6)
    assert by_mfu.gpu_hours == pytest.approx(3.7908e25 / (395.6e12 * 3600))


def test_the_text_names_every_term_and_its_kind():
    text = repr(seed_case())
    for line in (
        "FLOPs, 6ND",
        "3.7908e25 FLOP  approximate",
        "400 TFLOPS  given        MFU 40.4% of H100 dense BF16, 989 TFLOPS",
        "68.55 days  prediction",
        "26.325 M GPU hours  prediction",
        "52.65 M USD  prediction",
        "754.4 GiB  exact",
        "give zero=1, 2 or 3",
    ):
        assert line in text
    html = seed_case()._repr_html_()
    assert "26.325 M GPU hours" in html
    assert html.count("<tr>") == html.count("</tr>")
    assert html.index("<div>Takes 68.55 days") < html.index("<table>")


def test_the_answers_come_first():
    """Does it fit, how long, how much."""

    def said(**given):
        p = plan(LLAMA_1B, **{"batch": 2, "length": 1024, "gpu": "H100", **given})
        return str(p).partition("\n\n")[0].splitlines()[1:]

    run = {"tokens": 1e12, "gpus": 8, "mfu": 0.4}
    fits, takes, costs = said(**run, usd_per_gpu_hour=(1.8, 3.2))
    assert fits.startswith("  Fits: ")
    assert "of the 78.7 GiB that H100 offers at its peak in the loss, most of it " in fits
    p = plan(LLAMA_1B, length=1024, gpu="H100", **run)
    assert (
        takes == f"  Takes {p.days:.2f} days on 8 GPUs, {p.gpu_hours:,.0f} GPU hours, at the given 395.6 TFLOPS of each"
    )
    low, high = 1.8 * p.gpu_hours, 3.2 * p.gpu_hours
    assert costs == f"  Costs {low:,.0f} to {high:,.0f} USD: GPU hours at 1.8 to 3.2 USD"
    assert tuple(f"  {answer}" for answer in p.but(batch=2, usd_per_gpu_hour=(1.8, 3.2)).answers) == (
        fits,
        takes,
        costs,
    )
    (large, step) = said(batch=512)
    assert large.startswith("  Does not fit: ")
    assert large.endswith("plan.fitting() says what helps")
    assert step.startswith("  A step likely takes ")
    assert step.endswith(" published runs of H100, eager")
    # sharding is named where it suffices
    assert said(batch=512, gpus=8)[0].startswith("  Does not fit: ")
    whole = plan(LLAMA_1B, batch=24, length=2048, gpu="H100", gpus=8, master=True, state_dtype="fp32")
    assert not whole.fits()
    assert whole.but(zero=3).fits()
    assert whole.answers[0].startswith("Does not fit unsharded: ")
    # streamed weights are not sharded
    streamed = said(batch=64, length=8192, gpus=8, offload_weights=True)
    assert streamed[0].startswith("  Does not fit: ")
    assert said(tokens=1e12)[1].startswith("  Likely takes ")
    assert said(tokens=1e12, usd_per_gpu_hour=2)[2].startswith("  Likely costs ")
    assert said(tokens=1e12, batch=None)[1].startswith("  Takes at least ")
    assert said(mfu=0.4)[1].endswith("at the given 395.6 TFLOPS of each GPU")
    assert said(gpu=None)[0].startswith("  Holds ")
    assert said(length=None)[0].startswith("  Holds ")  # whether that fits is not known


@pytest.mark.parametrize("recipe", [None, "fp8", "qfp8", "mxfp8"])
def test_what_is_printed_is_short_and_the_table_has_all(recipe):
    p = plan(LLAMA_1B, batch=2, length=1024, gpu="H100", gpus=64, zero=3, tokens=1e12, mfu=0.4, recipe=recipe)
    lines = str(p).partition("\n  note:")[0].splitlines()
    assert max(map(len, lines)) <= 138
    full = dict(zip(p.table()["term"], p.table()["how"]))
    assert full["activations"].endswith("(form of arXiv 2205.05198)")
    assert "arXiv" not in str(p)
    assert "FLOPs / 64 GPUs / rate / goodput" in str(p)
    assert "KV cache" not in full  # of generation: no part of the total
    assert sum(p.memory[name].gib for name in full if name in {t.name for t in p.memory.terms}) == pytest.approx(
        p.memory.gib
    )


def test_a_rate_that_no_run_reaches_is_said():
    assert "no run is that fast, 1,500 TFLOPS is beyond 100 % of H100 dense BF16" in repr(
        seed_case(tflops_per_gpu=1500)
    )
    assert "no run is that fast" not in repr(seed_case(tflops_per_gpu=1500, recipe="fp8"))
    assert "no run is that fast" not in repr(seed_case(tflops_per_gpu=None, mfu=1.0, goodput=0.5))


def test_table_has_a_row_a_term():
    p = seed_case()
    table = p.table()
    assert list(table.columns) == ["group", "term", "value", "unit", "kind", "how"]
    assert len(table) == len(p.lines())
    assert set(table["kind"]) <= {"given", "exact", "approximate", "prediction", "bound"}
    assert table.set_index("term")["value"]["GPU hours"] == 26.325e6


def test_without_a_rate_only_a_bound():
    p = plan(8e9, tokens=1e12, gpus=8, gpu="H100", usd_per_gpu_hour=2)
    assert (p.days, p.gpu_hours, p.usd) == (None, None, None)
    assert p.time.floor_days == pytest.approx(6 * 8e9 * 1e12 / (989e12 * 86400) / 8)
    assert "time, at least" in repr(p)
    assert "no time and cost is predicted without a rate" in repr(p)
    assert plan(8e9, tokens=1e12).time.floor_days is None
    assert "give tflops_per_gpu=, or gpu=sk.calibrate()" in repr(
        plan(8e9, gpu="cpu")
    )  # it has no peak to take a share of


def test_the_bound_takes_each_product_at_its_own_peak():
    bf16 = plan(LLAMA_1B, batch=2, length=2048, gpu="H100", recipe=BF16)
    fp8 = plan(LLAMA_1B, batch=2, length=2048, gpu="H100", recipe=FP8)
    assert bf16.time.floor_step_ms == pytest.approx(bf16.flops_per_step / 989e12 * 1e3)
    quantized = (
        sum(p.forward + p.backward for p in fp8.compute.products if p.kinds == ("tensor",) * 3) / fp8.compute.model
    )
    assert 0.5 < quantized < 0.9
    assert fp8.time.floor_step_ms == pytest.approx(bf16.time.floor_step_ms * (1 - quantized + quantized * 989 / 1979))
    emulated = plan(LLAMA_1B, batch=2, length=2048, gpu="A100", recipe=FP8)
    assert emulated.time.floor_step_ms == pytest.approx(emulated.flops_per_step / 312e12 * 1e3)
    assert "emulated" in repr(emulated)


NATIVE = {  # what docs/recipes.md says: the GPUs of the table that multiply a recipe's operands themselves
    "fp8": {"L40S", "H100", "H200", "B200"},
    "fp8-current": {"L40S", "H100", "H200", "B200"},
    "fp8-rowwise": {"L40S", "H100", "H200", "B200"},
    "fp8-block": {"H100", "H200"},
    "qfp8": {"H100", "H200"},
    "mxfp8": {"B200"},
    "fp4": {"B200"},
    "mxfp4": set(),
    "quartet-ii": {"B200"},
    "bf16": set(),
}


@pytest.mark.parametrize("gpu", ["A100", "L40S", "H100", "H200", "B200"])
@pytest.mark.parametrize("recipe", NATIVE)
def test_a_recipe_has_a_faster_peak_only_where_it_is_native(recipe, gpu):
    native = gpu in NATIVE[recipe]
    for what in (8e9, LLAMA_1B):
        planned, bf16 = (
            plan(what, tokens=1e12, gpu=gpu, recipe=r, length=128)
            for r in (recipe, BF16.lora() if recipe == "qfp8" else BF16)
        )
        assert (planned.time.floor_days < bf16.time.floor_days * 0.999) is native
        assert ("(emulated: no product for" in repr(planned)) is (not native and recipe not in ("bf16", "qfp8"))
        assert ("says little with products at" in repr(planned)) is native


def test_the_note_says_where_a_product_would_be_native():
    def note(recipe, gpu):
        return next(n for n in plan(8e9, gpu=gpu, recipe=recipe).notes if "peak" in n and "without a rate" not in n)

    where = "count at H100's BF16 peak (emulated: no product for them there, native on"
    assert note("mxfp8", "H100") == f"products of e4m3 MX blocks of 32 {where} compute capability 10.0 and up)"
    assert note("mxfp4", "H100") == f"products of e2m1 MX blocks of 32 {where} no GPU)"
    assert "e4m3 1x128 blocks and e4m3 128x128 blocks" in note("fp8-block", "B200")
    assert "compute capability 9.0, CUDA 12.9)" in note("fp8-block", "B200")
    assert note("fp4", "B300") == "B300 has no known peak for 4-bit operands: they count at its BF16 peak"


@pytest.mark.parametrize("gpu", ["L40S", "H100", "B200"])
@pytest.mark.parametrize("recipe", [FP8, FP8_ROWWISE, FP8_BLOCK, MXFP8, FP4, MXFP4], ids=lambda r: r.name)
def test_a_layer_is_faster_only_where_its_products_are_native(recipe, gpu):
    own, bf16 = (linear_seconds(r, 8192, 8192, 16384, trains=True, gpu=find_gpu(gpu)) for r in (recipe, BF16))
    assert (own < bf16) is (gpu in NATIVE[recipe.name])


def test_a_gpu_without_a_capability_has_the_products_whose_peak_is_given():
    mine = Gpu("Mine", bf16_tflops=100, fp8_tflops=200)
    assert [mine.multiplies(kind) for kind in ("tensor", "row", "block", "mx", "nv", None)] == [True] * 4 + [False] * 2
    assert mine.peak("mx") == (200, "Mine dense FP8")
    assert mine.peak("nv") == mine.peak() == (100, "Mine dense BF16")
    assert not dataclasses.replace(mine, capability=(9, 0)).multiplies("mx")


def test_a_step():
    p = plan(LLAMA_1B, batch=2, length=1024, gpus=4, gpu="A100", mfu=0.5)
    assert p.flops_per_step == p.flops_per_token * 2 * 1024 * 4
    assert p.time.step_ms == pytest.approx(p.flops_per_step / (4 * 156e12) * 1e3)
    assert p.time.tokens_per_s == pytest.approx(2 * 1024 * 4 / (p.time.step_ms / 1e3))
    assert p.flops is None
    assert "need tokens=" in repr(p)


def test_recompute_is_hardware_not_model():
    plain = plan(LLAMA_1B, batch=1, length=512, gpu="H100", mfu=0.4)
    again = plan(LLAMA_1B, batch=1, length=512, gpu="H100", mfu=0.4, recompute="full")
    assert again.flops_per_step == plain.flops_per_step
    assert again.time.hfu == pytest.approx(0.4 * again.compute.hardware / again.compute.model)
    assert again.memory["activations"].most < plain.memory["activations"].most / 4


@pytest.mark.parametrize("case", published(), ids=lambda c: c.model)
def test_published_cases(case):
    if case.flop is not None:
        assert plan(case.parameters, tokens=case.tokens).flops == pytest.approx(case.flop, rel=1e-3)
        return
    verdict = judge_hours(case.parameters, case.tokens, case.gpu, case.gpu_hours)
    assert verdict.mfu * 100 == pytest.approx(case.mfu_eff_pct, abs=0.06)
    assert verdict.plausible is case.plausible
    assert ("far below other published runs" in str(verdict)) is not case.plausible


def test_hours_that_are_too_few():
    assert "more than any published run" in str(judge_hours(70e9, 2e12, "A100", 3e5))


def test_every_kind_of_what(tmp_path):
    from_dict = read_shape(LLAMA_1B)[0]
    assert from_dict.parameters == 1_235_814_400  # Llama-3.2-1B
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_1B), encoding="utf-8")

    @dataclasses.dataclass
    class Ours:
        layers: int = 16
        width: int = 2048
        heads: int = 32
        kv_heads: int = 8
        vocab: int = 128256
        ffn: int = 8192
        head_dim: int | None = None
        tied: bool = True
        qkv_bias: bool = False
        qk_norm: bool = False

    class Model:
        config = Ours()

    for what in (tmp_path, str(tmp_path), tmp_path / "config.json", Ours(), Model(), {"text_config": LLAMA_1B}):
        assert plan(what).parameters == from_dict.parameters
    qwen2 = read_shape({**LLAMA_1B, "model_type": "qwen2"})[0]
    assert qwen2.parameters - from_dict.parameters == 16 * (2048 + 2 * 512)


def test_a_family_that_is_not_known_is_said():
    assert "counted as if it were a Llama-family decoder" in repr(plan({**LLAMA_1B, "model_type": "olmo9"}, length=64))
    assert "model_type" not in repr(plan(LLAMA_1B, length=64))


def test_a_mixture_of_experts_counts_what_a_token_passes():
    mixtral = {
        **{"model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000},
        **{"num_local_experts": 8, "num_experts_per_tok": 2},
    }
    p = plan(mixtral, tokens=1e12, length=4096, gpu="H100", mfu=0.4)
    assert p.parameters == 46_702_792_704  # 46.7 B held and 12.9 B used a token: arXiv 2401.04088
    assert p.subject.active == pytest.approx(12.9e9, rel=0.005)
    terms = {line.term: line.value for line in p.lines()}
    assert terms["FLOPs, 6ND"] == 6 * p.subject.active * 1e12
    assert terms["  active"] == p.subject.active
    assert p.memory["weights"].bytes == 2 * p.parameters
    assert "gate and up of an expert are planned as two layers" in repr(p)


def test_a_plan_can_be_asked_again():
    p = plan(LLAMA_1B, batch=2, length=1024, gpu="H100", recipe="fp8")
    again = p.but(batch=4, recipe=None)
    assert again == plan(LLAMA_1B, batch=4, length=1024, gpu="H100")
    assert p.but() == p
    assert again.but(batch=2, recipe="fp8") == p
    for name in ("bitch", "Batch"):
        with pytest.raises(TypeError, match=name):
            p.but(**{name: None})
    # None takes an argument back, also one whose default is another
    other = p.but(gpus=8, zero=3, optimizer="sgd", accumulate=2, training=False, slack=0.05)
    assert other.but(gpus=None, zero=None, optimizer=None, accumulate=None, training=None, slack=None) == p


def test_micro_batches():
    one, four = (plan(LLAMA_1B, batch=2, length=1024, gpu="A100", mfu=0.5, accumulate=n) for n in (1, 4))
    assert four.flops_per_step == 4 * one.flops_per_step
    assert four.time.tokens_per_s == pytest.approx(one.time.tokens_per_s)
    assert "2 x 1024 x 4 tokens a step" in repr(four)


def test_a_calibrated_gpu_predicts_without_a_given_rate():
    gpu = dataclasses.replace(
        find_gpu("H100"), ceilings=planner.Ceilings("one machine", bf16_tflops=700, bandwidth_tb_s=3.0, launch_us=4.0)
    )
    p = plan(LLAMA_1B, tokens=1e12, batch=8, length=2048, gpu=gpu)
    assert p.estimate.kind == "prediction"
    assert p.time.step_ms == pytest.approx(p.estimate.step_ms)
    assert p.time.rate_tflops == pytest.approx(p.estimate.tflops)
    assert p.time.mfu == pytest.approx(p.estimate.mfu)
    assert p.days == pytest.approx(p.estimate.step_ms / 1e3 * 1e12 / (8 * 2048) / 86400)
    assert "predicted, rates measured on one machine" in repr(p)
    # a datasheet's rates are no prediction: they stand apart, and no time follows from them
    optimistic = plan(LLAMA_1B, tokens=1e12, batch=8, length=2048, gpu="H100")
    assert (optimistic.days, optimistic.estimate.kind) == (None, "optimistic")
    assert optimistic.estimate.step_ms < p.estimate.step_ms
    assert plan(LLAMA_1B, tokens=1e12, batch=8, length=2048, gpu=gpu, mfu=0.1).time.mfu == pytest.approx(0.1)


def test_energy_is_bounded_by_the_power_limit():
    p = plan(8e9, tokens=1e12, gpus=8, gpu="H100", mfu=0.4)
    assert p.kwh == pytest.approx(p.gpu_hours * 0.7)
    assert "energy, at most" in repr(p)
    assert plan(8e9, tokens=1e12).kwh is None


def test_offload_from_a_plan():
    p = plan(LLAMA_1B, batch=8, length=2048, gpu="H100", mfu=0.4)
    host = planner.Host(link_gb_s=50, adam_params_s=2e9)
    found = p.offload(host)
    assert found.none_ms == p.time.step_ms
    assert found.parameters == p.parameters
    assert found.choice == "none"  # it fits
    assert p.offload(host, fits=False).choice == "zenflow"
    likely = p.offload()
    assert likely.kind == "likely"
    assert likely.host.link_gb_s == pytest.approx(0.75 * 64, rel=0.1)
    with refused(ValueError):
        p.but(gpu="GB200").offload()
    with refused(ValueError):
        plan(8e9).offload(host)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"what": 405}, ValueError),
        ({"what": 8}, ValueError),
        ({"what": 405e18}, ValueError),
        ({"what": 0}, ValueError),
        ({"what": -8e9}, ValueError),
        ({"what": float("nan")}, ValueError),
        ({"what": True}, TypeError),
        ({"what": None}, TypeError),
        ({"what": "no/such/folder"}, FileNotFoundError),
        ({"what": "405B"}, FileNotFoundError),
        ({"tokens": 15.6}, ValueError),
        ({"tokens": 300}, ValueError),
        ({"tokens": float("inf")}, ValueError),
        ({"tokens": 1e20}, ValueError),
        ({"gpus": 0}, ValueError),
        ({"gpus": 1.5}, ValueError),
        ({"gpus": 1e9}, ValueError),
        ({"gpu": "H10O"}, ValueError),
        ({"gpu": "abacus"}, ValueError),
        ({"gpu": 100}, TypeError),
        ({"tflops_per_gpu": 400e12}, ValueError),
        ({"tflops_per_gpu": 0.4}, ValueError),
        ({"tflops_per_gpu": 4000}, ValueError),
        ({"tflops_per_gpu": None, "mfu": 40}, ValueError),
        ({"mfu": 0.4}, ValueError),
        ({"tflops_per_gpu": None, "mfu": 0.4, "gpu": None}, ValueError),
        ({"tflops_per_gpu": None, "mfu": 0.4, "gpu": planner.Gpu("Blank")}, ValueError),
        ({"goodput": 90}, ValueError),
        ({"goodput": 0}, ValueError),
        ({"usd_per_gpu_hour": -2}, ValueError),
        ({"usd_per_gpu_hour": 50_000}, ValueError),
        ({"usd_per_gpu_hour": "2"}, TypeError),
        ({"batch": 0}, ValueError),
        ({"length": 2048.5}, ValueError),
        ({"recipe": "fp9"}, ValueError),
        ({"recipe": 8}, TypeError),
        ({"attention": "half"}, ValueError),
        ({"graphs": "maybe"}, ValueError),
        ({"graphs": "auto"}, ValueError),
        ({"master": "fp32"}, ValueError),
        ({"training": 0}, ValueError),
        ({"slack": False}, TypeError),
        ({"recompute": True}, ValueError),
        ({"optimizer": "lion"}, ValueError),
        ({"dtype": "int8"}, ValueError),
        ({"zero": 4}, ValueError),
        ({"layers": "theirs"}, ValueError),
        ({"accumulate": 0}, ValueError),
        ({"slack": 10}, ValueError),
        ({"slack": -0.1}, ValueError),
        ({"between_gb_s": 0}, ValueError),
    ],
)
def test_what_cannot_be_meant(change, error):
    given = {"what": 405e9, "tokens": 15.6e12, "gpus": 16, "gpu": "H100", "tflops_per_gpu": 400, **change}
    with refused(error) as caught:
        plan(given.pop("what"), **given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        {k: v for k, v in LLAMA_1B.items() if k not in ("hidden_size", "vocab_size")},
        {**LLAMA_1B, "num_local_experts": 8},
        {**LLAMA_1B, "num_key_value_heads": 5},
        {**LLAMA_1B, "num_attention_heads": 30, "num_key_value_heads": 10},
        {**LLAMA_1B, "num_hidden_layers": 0},
        {**LLAMA_1B, "vocab_size": "many"},
    ],
)
def test_configs_that_cannot_be_read(config, tmp_path):
    with refused((ValueError, TypeError)):
        plan(config)


def test_a_damaged_config(tmp_path):
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="not valid JSON"):
        plan(tmp_path)
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with refused(ValueError):
        plan(tmp_path)


def test_gpus_are_found_by_what_torch_calls_them():
    names = {
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA H200": "H200",
        "NVIDIA A100-SXM4-80GB": "A100",
        "NVIDIA H100 PCIe": "H100-PCIe",
        "NVIDIA RTX A6000": "A6000",
        "h100": "H100",
    }
    assert {name: find_gpu(name).name for name in names} == names


def test_the_table_gives_the_source_of_every_figure():
    for gpu in planner.GPUS.values():
        assert gpu.source
        assert gpu.fp8_tflops is None or gpu.bf16_tflops is None or gpu.fp8_tflops >= gpu.bf16_tflops


def test_compute_capabilities_are_nvidias():
    published = {
        (7, 0): {"V100"},
        (7, 5): {"T4"},
        (8, 0): {"A100", "A100-40GB", "A100-PCIe", "A800", "A30"},
        (8, 6): {"A6000", "A40", "A10", "RTX-3090"},
        (8, 9): {"L40S", "L40", "L20", "L4", "RTX-6000-Ada", "RTX-4090"},
        (9, 0): {"H100", "H100-PCIe", "H100-NVL", "H100-HBM2e", "H800", "H200", "H20", "GH200"},
        (10, 0): {"B200", "GB200"},
        (10, 3): {"B300", "GB300"},
        (12, 0): {"RTX-PRO-6000", "RTX-5090", "RTX-5060-Ti"},
        None: {"MI300X", "MI325X"},
    }
    assert {gpu.name: gpu.capability for gpu in planner.GPUS.values()} == {
        n: c for c, names in published.items() for n in names
    }


def test_a_gpu_of_ones_own(monkeypatch):
    mine = Gpu("Mine", memory_gib=24, bf16_tflops=100)
    assert plan(8e9, tokens=1e9, gpu=mine, mfu=0.5).time.rate_tflops == 50
    monkeypatch.setattr("surokit.hardware.gpus._TABLE", dict(planner.GPUS))
    register(mine)
    assert find_gpu("mine") is mine
    with refused(TypeError):
        register("Mine")  # type: ignore[arg-type]
    with refused(ValueError):
        Gpu("Bad", bf16_tflops=-1)
    with refused(ValueError):
        Gpu(" ")


def test_a_plan_is_a_value_and_needs_neither_torch_nor_pandas():
    assert seed_case() == seed_case()
    with pytest.raises(dataclasses.FrozenInstanceError):
        seed_case().title = "other"
    program = (
        "import sys; sys.modules['pandas'] = None\n"
        "from surokit.planner import plan\n"
        "p = plan(8e9, tokens=1e12, recipe='qfp8'); print(p); p._repr_html_()\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "try: p.table()\n"
        "except ModuleNotFoundError as error: assert 'pip install pandas' in str(error)\n"
        "else: raise AssertionError\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_memory_of_a_gpu_has_a_unit():
    with refused(ValueError):
        plan(LLAMA_1B, batch=1, length=64).fits(80e9)
    with refused(ValueError):
        plan(LLAMA_1B, batch=1, length=64).fits()


def test_forms_without_training():
    p = plan(LLAMA_1B, batch=1, length=128, training=False)
    assert p.compute.backward == 0
    assert p.memory["KV cache"].counted
    with refused(KeyError):
        p.memory["gradients"]
    with refused(ValueError):
        plan(8e9).gemms()
    assert "nothing trains" in repr(plan(8e9, recipe=dataclasses.replace(QFP8, adapter=None)))


def test_adapters_by_pattern_are_those_by_name():
    def adapted(*targets):
        return plan(LLAMA_1B, batch=1, length=2048, gpu="H100", recipe=BF16.lora(16, targets=targets))

    named, matched = adapted("q_proj", "k_proj", "v_proj", "o_proj"), adapted("self_attn.*")
    assert matched.trained_parameters == named.trained_parameters > 0
    assert (matched.compute, matched.memory) == (named.compute, named.memory)
    assert matched.step_time == named.step_time
    assert not any("target" in note for note in matched.notes)


def test_layers_below_the_first_adapter_cost_no_backward():
    def adapted(*targets, **given):
        given = {"recompute": "full", **given}
        return plan(LLAMA_1B, batch=1, length=2048, gpu="H100", recipe=BF16.lora(16, targets=targets), **given)

    layers = adapted("q_proj").shape.layers
    last, every = adapted(f"layers.{layers - 1}.*"), adapted("*_proj")
    assert last.trained_parameters * layers == every.trained_parameters
    assert last.compute.recompute * layers == pytest.approx(every.compute.recompute, rel=1e-9)

    def back(p):
        return sum(r.bytes for r in p.estimate.rows if r.step in ("backward", "recompute") and r.group == "elementwise")

    shared = next(p.grad_input for p in every.compute.products if p.module == "lm_head")
    assert last.compute.backward - shared < (every.compute.backward - shared) / layers
    assert back(last) < 3 * back(every) / layers  # the last norm is in both


def test_a_target_that_means_no_layer_is_a_note():
    def notes(what, *targets):
        return repr(plan(what, batch=1, length=64, recipe=BF16.lora(16, targets=targets)).notes)

    assert "the adapter's target in_proj matches no layer" in notes(LLAMA_1B, "q_proj", "in_proj")
    assert "nothing trains: no linear layer that is planned is called in_proj" in notes(LLAMA_1B, "in_proj")
    gpt2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 1000, "n_positions": 128}
    assert "nothing trains" in notes(gpt2, *PROJECTIONS)


def test_an_optimizer_waiting_for_its_parameters_is_understood():
    import torch

    import surokit as sk

    def moments(optimizer):
        return next(
            t for t in sk.plan(1e9, tokens=1e9, optimizer=optimizer).memory.terms if t.name == "optimizer"
        ).bytes

    assert moments(sk.AdamW(lr=1e-3)) == moments("adamw")
    assert moments(sk.AdamW(lr=1e-3, state_dtype=torch.float32)) == 2 * moments("adamw")


def test_a_number_as_a_command_line_has_it():
    assert plan("8e9") == plan(8e9)
    with refused(FileNotFoundError):
        plan("8B")


def test_a_family_that_is_not_read_is_not_exact():
    kinds = {line.term: line.kind for line in plan({**LLAMA_1B, "model_type": "olmo9"}, length=64).lines()}
    assert kinds["parameters"] == kinds["FLOPs a token"] == "approximate"


def test_what_full_training_holds_is_said():
    assert "no float32 masters" in repr(plan(LLAMA_1B, batch=1, length=64))
    assert "no float32 masters" not in repr(plan(LLAMA_1B, batch=1, length=64, state_dtype="fp32", master=True))
    assert "no float32 masters" not in repr(plan(LLAMA_1B, batch=1, length=64, recipe=QFP8))
    assert "zero=2 shards nothing on one GPU" in repr(plan(8e9, zero=2))


@pytest.mark.parametrize(("gpu", "fp16_tflops", "fp32_tflops"), [("T4", 65, 8.1), ("V100", 125, 15.7)])
def test_a_gpu_without_bf16_is_planned_in_fp16_or_fp32(gpu, fp16_tflops, fp32_tflops):
    """What it cannot multiply is said, and a step has a time in every dtype."""
    p = plan("llama-3.2-1b", gpu=gpu, batch=1, length=512)
    assert p.setup.dtype == "fp16"
    assert any(f"{gpu} does not multiply bf16" in note and "fp16 is planned" in note for note in p.notes)
    assert any("kernels begin at compute capability 8.0" in note for note in p.notes)
    assert p.time.floor_how == f"100 % of {gpu} dense FP16, {fp16_tflops:g} TFLOPS"
    assert p.compute is not None
    for dtype, tflops in (("fp16", fp16_tflops), ("fp32", fp32_tflops), ("bf16", fp32_tflops)):
        again = p.but(dtype=dtype)
        assert again.setup.dtype == dtype
        assert again.estimate is not None
        # all FLOPs at that rate take no longer than the step
        assert again.estimate.step_ms > p.compute.model * 512 / tflops / 1e9
        assert again.estimate.rates.products[None] == tflops
    assert any("bf16 is computed as float32" in note for note in p.but(dtype="bf16").notes)
    assert plan("llama-3.2-1b", gpu=gpu, mfu=0.4).time.rate_tflops == pytest.approx(0.4 * fp16_tflops)
    assert plan("llama-3.2-1b", gpu="A100").setup.dtype == "bf16"


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-14B"])
@pytest.mark.parametrize(
    "given", [{}, {"recipe": "qfp8"}, {"training": False}, {"recompute": "full", "optimizer": "adamw8bit"}]
)
def test_a_plan_by_number_counts_activations_as_of_a_typical_shape(name, given):
    """Within a tenth of what the model itself is planned to take, and said to be an approximation."""
    own = plan(name, batch=2, length=2048, gpu="H100", **given)
    number = plan(own.parameters, batch=2, length=2048, gpu="H100", **given)
    assert number.memory.gib == pytest.approx(own.memory.gib, rel=0.1)
    assert number.memory.left_out == ()
    assert not any(term.exact for term in number.memory.terms)
    assert f"about {units.gib(number.memory.gib)}" in number.answers[0]
    assert any(note.startswith("memory is that of a typical shape, after ") for note in number.notes)


def test_a_headline_without_activations_says_so():
    for what, wanted in ((494e6, "give batch= and length="), (1e6, "give a config in place of a number of parameters")):
        given = {"batch": 1, "length": 128} if what == 1e6 else {}
        p = plan(what, gpu="H100", **given)
        assert p.answers[0].startswith(f"Holds at least {units.gib(p.memory.gib)}, without activations, of the 78.7")
        assert any(wanted in note for note in p.notes)


def test_a_plan_for_a_cpu_is_held_against_the_machine(monkeypatch):
    monkeypatch.setattr("surokit.planner.planning.machine_gib", lambda: 16.0)
    p = plan("llama-3.2-1b", gpu="cpu", batch=1, length=512)
    assert p.room_gib == 16.0
    assert p.answers[0].startswith("Fits: ")
    assert "of the machine's 16 GiB" in p.answers[0]
    assert p.fits()
    large = plan("llama-3.1-8b", gpu="cpu", batch=1, length=512)
    assert large.answers[0].startswith("Does not fit: ")
    assert large.fitting().room_gib == 16.0
    # another host: a Gpu that is a CPU, with its memory
    server = large.but(gpu=planner.Gpu("server", memory_gib=512, device="cpu"))
    assert server.fits()
    assert "of the machine's 512 GiB" in server.answers[0]
    # where the system does not say, nothing is compared
    monkeypatch.setattr("surokit.planner.planning.machine_gib", lambda: None)
    assert large.but(length=256).answers[0].startswith("Holds ")
    assert "GPU" not in str(plan("llama-3.2-1b", gpu="cpu", batch=1, length=512, tokens=1e6, tflops_per_gpu=1).answers)


def test_a_plan_for_a_cpu_says_hours():
    p = plan("llama-3.2-1b", gpu="cpu", batch=1, length=512, tokens=1e9, tflops_per_gpu=0.5, usd_per_gpu_hour=1)
    words = "\n".join([*p.answers, *(f"{line.group} {line.term} {line.text}" for line in p.lines())])
    assert "GPU" not in words
    assert "hours" in words


def test_a_question_has_the_arguments_of_plan():
    parameters = inspect.signature(planner.plan).parameters
    assert {name: p.default for name, p in parameters.items() if name != "what"} == {
        f.name: f.default for f in dataclasses.fields(Question) if f.name != "what"
    }
    assert next(iter(parameters)) == "what"


def test_a_question_is_asked_again_with_other_arguments():
    asked = plan(8e9, gpus=8, zero=2, gpu="H100").asked.question
    assert asked.but(zero=3).zero == 3
    assert (asked.but(gpus=None, gpu=None).gpus, asked.but(gpu=None).gpu) == (1, None)
    assert asked.given == {
        "goodput": 1.0,
        "gpus": 8,
        "gpu": "H100",
        "zero": 2,
        "attention": "causal",
        "master": False,
        "slack": 0.1,
        "training": True,
        "optimizer_in_backward": False,
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "expert_parallel": 1,
        "virtual_stages": 1,
        "offload_states": False,
    }
    with pytest.raises(TypeError, match="unexpected keyword argument 'size'"):
        plan(8e9).but(size=3)
    with pytest.raises(TypeError, match="multiple values for argument 'what'"):
        plan(8e9).but(what=9e9)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"gpus": 8, "zero": 3}, "ZeRO-3, 8 x H100"),
        ({"gpus": 8, "tensor_parallel": 8, "zero": 3}, "tensor parallel over 8"),
        ({"recompute": "full", "recompute_blocks": 4}, "recompute full of 4 blocks"),
        ({"recompute": "mlp", "layers": "transformers"}, "recompute mlp"),
        ({"optimizer": "adamw8bit"}, ", adamw8bit, "),
        ({"optimizer": "sgd"}, ", SGD, "),
    ],
)
def test_a_title_says_how_a_step_is_made(given, says):
    title = plan("llama-3.1-8b", gpu="H100", batch=1, length=2048, **given).title
    assert says in title
    plain = plan("llama-3.1-8b", gpu="H100", batch=1, length=2048).title
    assert not any(word in plain for word in ("ZeRO", "recompute", "adamw", "parallel"))
    assert "recompute" not in plan("llama-3.1-8b", gpu="H100", training=False, batch=1, length=2048).title
