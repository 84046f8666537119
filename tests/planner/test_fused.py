"""A fused step as planned, against what the fused step really calls, and against arithmetic by hand."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import surokit as sk
from surokit.bench.configurations import MODELS
from surokit.fusion import OFF, Fusion
from surokit.hardware.gpus import find_gpu
from surokit.hardware.rates import GAP_US
from surokit.nn import linear_gemms, norm, prologues, qk, stages, swiglu
from surokit.nn.delayed import DelayedScales
from surokit.planner import plan as planner_plan
from surokit.planner.counts.flops import count_flops
from surokit.planner.counts.fused_traffic import FusedStep
from surokit.planner.counts.memory import Setup
from surokit.planner.counts.traffic import Load, loads
from surokit.planner.inputs.fusion import comes_quantized, read_fusion
from surokit.planner.inputs.shape import Shape
from surokit.planner.inverse.recipe_choice import compare_recipes
from surokit.planner.planning import Plan
from surokit.quantized import Quantized
from surokit.quantizer import kind_of
from surokit.recipe import QFP8
from tests.planner.families import QWEN3_8B as CONFIG_8B
from tests.planner.test_roofline import reached, trained
from tests.refusals import refused

SMALL = Shape(3, 128, 4, 2, 32, 256, 512, qk_norm=True, family="qwen3")
TOKENS = 2 * 64
NATIVE_QFP8 = QFP8.natively()
RECIPES = {
    "bf16": sk.BF16,
    "bf16 + LoRA": sk.BF16.lora(4),
    "bf16 + some LoRA": sk.BF16.lora(4, targets=("layers.1.*_proj",)),
    "fp8": sk.FP8,
    "fp8 + LoRA": sk.FP8.lora(4),
    "fp8-block": sk.FP8_BLOCK,
    "fp8-block + LoRA": sk.FP8_BLOCK.lora(4),
    "qfp8 + LoRA": NATIVE_QFP8.lora(4),
}
FUSIONS = [Fusion(), *(Fusion().without(name) for name in ("norm", "gate", "joint", "adapters", "qk", "frozen"))]
PRODUCTS = ("forward", "grad_input", "grad_weight")


def planned(shape: Shape, recipe: Any, fusion: Any, **setup: Any) -> list[Load]:
    """What a micro-batch is planned to launch, on a GPU with native FP8."""
    fused, recompute = read_fusion(fusion, None, setup.pop("recompute", "none"))
    compute = count_flops(shape, length=64, recipe=recipe, recompute="none" if recompute == "selective" else recompute)
    made = Setup(batch=2, length=64, recompute=recompute, fusion=fused, device="cpu", **setup)
    return list(loads(shape, compute, recipe, made, find_gpu("H100"), trained(shape, recipe), FusedStep))


def launches(rows: list[Load], *parts: str, module: str = "") -> float:
    return sum(r.launches for r in rows if r.part in parts and r.step != "optimizer" and module in r.module)


class Seen(TorchDispatchMode):
    """Calls of operators, and of the kernels behind them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        for module in (prologues, qk, norm, swiglu):
            chosen = module.best
            name = module.__name__.rpartition(".")[2]

            def best(function, device, chosen=chosen, name=name):
                self.calls[f"{name}: {function.__module__.rpartition('.')[2]}.{function.__name__}"] += 1
                return chosen(function, device)

            monkeypatch.setattr(module, "best", best)
        for owner, name in ((linear_gemms, "quantize"), (linear_gemms, "quantize_both"), (Quantized, "t")):
            monkeypatch.setattr(owner, name, self.counted(name, getattr(owner, name)))
        for name in ("quantize", "quantize_both"):
            monkeypatch.setattr(DelayedScales, name, self.counted(name, getattr(DelayedScales, name)))
        # as on a GPU that multiplies such codes itself: those of transposes lie in rows
        monkeypatch.setattr(linear_gemms, "computes", lambda a, b, device: kind_of(a, b) is not None)
        add = stages._Backward.add

        def added(backward, dx):  # what came by way of an x that others read too
            self.calls["sum"] += backward.wants_dx
            add(backward, dx)

        monkeypatch.setattr(stages._Backward, "add", added)

    def counted(self, name, function):
        def wrapper(*args, **kwargs):
            self.calls[name] += 1
            return function(*args, **kwargs)

        return wrapper

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_"):
            self.calls["product"] += 1
        if name == "add" and out.ndim == 3:
            self.calls["sum"] += 1
        return out

    def kernels(self, *names: str) -> int:
        """Calls of kernels whose file and function match."""
        return sum(n for key, n in self.calls.items() if any(name in key for name in names))


def second_step(recipe: Any, fusion: Fusion, monkeypatch: pytest.MonkeyPatch) -> Seen:
    """What the second forward and backward call: by then codes of frozen weights are kept."""
    s = SMALL
    torch.manual_seed(0)
    config = sk.DecoderConfig(
        layers=s.layers,
        width=s.width,
        heads=4,
        kv_heads=2,
        head_dim=32,
        ffn=s.ffn,
        vocab=s.vocab,
        tied=False,
        qk_norm=True,
    )
    model = sk.Decoder(config, dtype=torch.bfloat16)
    sk.apply(model, recipe.keep_small(0))
    sk.fuse(model, fusion)
    ids = torch.randint(0, s.vocab, (2, 64))
    model(ids, labels=ids).loss.backward()
    with monkeypatch.context() as patched, Seen(patched) as seen:
        model(ids, labels=ids).loss.backward()
    return seen


@pytest.mark.parametrize("fusion", FUSIONS, ids=str)
@pytest.mark.parametrize("recipe", ["bf16", "bf16 + LoRA", "bf16 + some LoRA"])
def test_products_and_sums_are_those_that_a_fused_step_calls(recipe, fusion, monkeypatch):
    seen, rows = second_step(RECIPES[recipe], fusion, monkeypatch), planned(SMALL, RECIPES[recipe], fusion)
    assert seen.calls["product"] == launches(rows, *PRODUCTS)
    scales = launches(rows, "sum", module="adapter's scale")
    assert seen.calls["sum"] == launches(rows, "sum") - scales


@pytest.mark.parametrize("fusion", [OFF, *(f for f in FUSIONS if f.qk and f.adapters)], ids=str)
@pytest.mark.parametrize("recipe", ["fp8", "fp8 + LoRA", "fp8-block", "fp8-block + LoRA", "qfp8 + LoRA"])
def test_operands_are_quantized_as_often_as_planned(recipe, fusion, monkeypatch):
    chosen = RECIPES[recipe]
    seen, rows = second_step(chosen, fusion, monkeypatch), planned(SMALL, chosen, fusion)
    assert chosen.forward.a is not None
    delayed = chosen.forward.a.delayed
    asked = seen.calls["quantize"] + seen.calls["quantize_both"]
    assert asked == launches(rows, "quantize") / (2 if delayed else 1)
    assert seen.calls["t"] == launches(rows, "turn")
    # one for each norm and gate that gives codes itself
    assert seen.kernels("forward_quantized") == _gives_codes(rows, fusion, chosen)


def _gives_codes(rows: list[Load], fusion: Fusion, recipe: Any) -> int:
    if not recipe.frozen_base and recipe.grad_weight.b is not None and not recipe.forward.a.transposable:
        return SMALL.layers * fusion.gate  # of values that a norm made, both orientations are made in one pass
    return SMALL.layers * (2 * fusion.norm + fusion.gate)


@pytest.mark.parametrize("fusion", FUSIONS, ids=str)
def test_kernels_between_the_products_are_those_that_are_called(fusion, monkeypatch):
    seen, rows = second_step(sk.BF16.lora(4), fusion, monkeypatch), planned(SMALL, sk.BF16.lora(4), fusion)
    forward = [r for r in rows if r.step == "forward" and r.part == "move"]
    assert seen.kernels("norm.forward", "norm.add_forward") == sum(
        r.launches for r in forward if "norm" in r.module and (r.module != "q and k")
    )
    assert seen.kernels("swiglu.forward") == sum(r.launches for r in forward if r.module == "swiglu")
    assert seen.kernels("qk.forward") == sum(r.launches for r in forward if r.module == "q and k")


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("fusion", FUSIONS, ids=str)
def test_fusing_computes_the_same_and_moves_and_launches_less(recipe, fusion):
    fused, unfused = planned(SMALL, recipe, fusion), planned(SMALL, recipe, OFF)
    everything = planned(SMALL, recipe, Fusion())
    assert sum(r.flop for r in fused) == pytest.approx(sum(r.flop for r in unfused))
    assert all(r.bytes >= 0 and r.launches >= 0 for r in fused)
    for name in ("bytes", "launches"):
        all_, some, none = (sum(getattr(r, name) for r in rows) for rows in (everything, fused, unfused))
        assert all_ <= some <= none


def test_nothing_fused_is_the_step_as_it_was():
    for recipe in RECIPES.values():
        compute = count_flops(SMALL, length=64, recipe=recipe)
        setup, gpu = Setup(batch=2, length=64, fusion=OFF), find_gpu("H100")
        rest = SMALL, compute, recipe, setup, gpu, trained(SMALL, recipe)
        for name in ("bytes", "launches", "flop"):
            plain, off = (sum(getattr(r, name) for r in loads(*rest, kind)) for kind in (None, FusedStep))
            assert off == pytest.approx(plain), (recipe.name, name)


def test_bytes_by_hand():
    """A block's second norm, SwiGLU and QK-norm of an FP8 model whose weights train: values are not written, codes twice."""
    rows = {(r.module, r.step): r for r in planned(SMALL, sk.FP8, Fusion()) if r.group == "elementwise"}
    blocks, K, F, qk_width = 3, 128, 256, 128 + 64
    # stream and delta read, sum and codes written; dy, sum and the stream's gradient read, one gradient written
    assert rows["norm of mlp", "forward"].bytes == TOKENS * blocks * K * (2 + 2 + 2 + 2 * 1)
    assert rows["norm of mlp", "backward"].bytes == TOKENS * blocks * K * 4 * 2
    assert rows["norm of attention", "forward"].bytes == TOKENS * blocks * K * (2 + 2 * 1)
    assert rows["swiglu", "forward"].bytes == TOKENS * blocks * F * (2 + 2 + 2 * 1)
    assert rows["swiglu", "backward"].bytes == TOKENS * blocks * F * 5 * 2
    assert rows["q and k", "forward"].bytes == TOKENS * blocks * qk_width * 2 * 2
    assert rows["q and k", "backward"].bytes == TOKENS * blocks * qk_width * 3 * 2
    assert rows["residual", "forward"].bytes == TOKENS * blocks * K * 3 * 2
    # an adapter reads values
    lora = {(r.module, r.step): r for r in planned(SMALL, sk.FP8.lora(4), Fusion()) if r.group == "elementwise"}
    assert lora["swiglu", "forward"].bytes == TOKENS * blocks * F * (2 + 2 + 1 + 2)
    again = {
        (r.module, r.step): r
        for r in planned(SMALL, sk.FP8.lora(4), Fusion(), recompute="selective")
        if r.step == "recompute"
    }
    assert again["swiglu", "recompute"].bytes == TOKENS * blocks * F * 2
    assert again["norm of mlp", "recompute"].bytes == TOKENS * blocks * K * 2 * 2
    assert [r.launches for r in again.values()] == [3, 3, 0]


def test_codes_of_transposes_by_hand():
    """What makes the codes of an operand stores those of its transpose; where the product is emulated nothing changes."""
    rows = planned(SMALL, sk.FP8, Fusion())
    assert not any(r.part == "turn" for r in rows)
    layer = {(r.step, r.part): r for r in rows if r.module == "mlp.down_proj" and r.part == "quantize"}
    blocks, K, F = 3, 128, 256
    # W' alone is made in backward, dy both ways
    assert layer["forward", "quantize"].bytes == blocks * K * F * (2 + 1)
    backward = sum(r.bytes for r in rows if (r.module, r.step, r.part) == ("mlp.down_proj", "backward", "quantize"))
    assert backward == blocks * (K * F * (2 + 1) + TOKENS * K * (2 + 2 * 1))
    # a gate stores codes with scales of their own both ways, a norm stores values
    blocked = {(r.module, r.step): r for r in planned(SMALL, sk.FP8_BLOCK, Fusion()) if r.group == "elementwise"}
    scale = 4 / 128
    assert blocked["swiglu", "forward"].bytes == TOKENS * blocks * F * (2 + 2 + 2 * (1 + scale))
    assert blocked["norm of mlp", "forward"].bytes == TOKENS * blocks * K * (2 + 2 + 2 + 2)
    compute = count_flops(SMALL, length=64, recipe=sk.FP8)
    setup = Setup(batch=2, length=64, fusion=Fusion(), device="cpu")
    emulated = loads(SMALL, compute, sk.FP8, setup, find_gpu("A100"), trained(SMALL, sk.FP8), FusedStep)
    x, y, w = (
        blocks * (128 + 128 + 128 + 256),
        blocks * (3 * 128 + 2 * 256 + 128),
        3 * sum(q.n * q.k for q in SMALL.projections),
    )
    turned = sum(r.bytes for r in emulated if r.part == "turn")
    assert turned == pytest.approx(2 * (TOKENS * (x + y) + w))


def test_joint_products_and_adapters_by_hand():
    rows = {(r.module, r.part): r for r in planned(SMALL, sk.BF16.lora(4), Fusion())}
    gate, up = rows["mlp.gate_proj", "forward"], rows["mlp.up_proj", "forward"]
    blocks, K, F = 3, 128, 256
    # y is read beside being written: the product adds onto what B wrote
    assert gate.bytes == blocks * 2 * (TOKENS * K + F * K + 2 * TOKENS * F)
    assert up.bytes == blocks * 2 * (F * K + 2 * TOKENS * F)  # x was read with the first
    assert (gate.launches, up.launches) == (3, 0)
    first, second = rows["mlp.gate_proj.lora_A", "forward"], rows["mlp.up_proj.lora_A", "forward"]
    assert first.bytes - second.bytes == blocks * 2 * TOKENS * K
    assert rows["mlp.up_proj.lora_B", "forward"].bytes == blocks * 2 * (TOKENS * 4 + F * 4 + TOKENS * F)
    # in backward too: dx of both adapters was written before the product
    dx, into_dx = rows["mlp.gate_proj", "grad_input"], rows["mlp.gate_proj.lora_A", "grad_input"]
    assert dx.bytes == blocks * 2 * (TOKENS * F + F * K + 2 * TOKENS * K)
    assert into_dx.bytes == blocks * 2 * (TOKENS * 4 + 4 * K + TOKENS * K)
    assert rows["mlp.up_proj", "grad_input"].bytes == blocks * 2 * (TOKENS * F + F * K)


def test_a_product_of_codes_comes_before_the_adapters():
    """It cannot add onto what they wrote: B, and A's gradient, read what they add to."""
    blocks, K, F = 3, 128, 256
    for first, last in ((False, False), (True, False), (False, True)):
        recipe = sk.FP8.lora(4)
        recipe = recipe.keep_first(1) if first else recipe.keep_last(1) if last else recipe
        rows = planned(SMALL, recipe, Fusion())
        plain = first + last  # blocks in bfloat16

        def moved(module: str, part: str) -> float:
            return sum(r.bytes for r in rows if (r.module, r.part) == (module, part))  # noqa: B023

        codes = blocks - plain
        y = codes * (TOKENS * K + F * K + 2 * TOKENS * F) + plain * 2 * (TOKENS * K + F * K + 2 * TOKENS * F)
        assert moved("mlp.gate_proj", "forward") == y
        into_y = blocks * (TOKENS * 4 + F * 4 + TOKENS * F) + codes * TOKENS * F
        assert moved("mlp.gate_proj.lora_B", "forward") == pytest.approx(2 * into_y)
        dx = codes * (TOKENS * F + F * K + 2 * TOKENS * K) + plain * 2 * (TOKENS * F + F * K + 2 * TOKENS * K)
        assert moved("mlp.gate_proj", "grad_input") == dx
        into_dx = blocks * (TOKENS * 4 + 4 * K + TOKENS * K) + codes * TOKENS * K
        assert moved("mlp.gate_proj.lora_A", "grad_input") == pytest.approx(2 * into_dx)


@pytest.mark.parametrize("recipe", [sk.FP8, sk.FP8_CURRENT, sk.FP8_ROWWISE, sk.FP8_BLOCK, QFP8.natively()], ids=str)
def test_fp8_is_planned_no_slower_than_bf16_at_any_size(recipe):
    """Its siblings are one product as well; the gaps between kernels count most in a small model."""

    def ms(config: Any, r: sk.Recipe) -> float:
        setting: dict[str, Any] = {"batch": 2, "length": 2048, "gpu": "H200", "graphs": True, "fusion": "fused"}
        estimate = planner_plan(config, recipe=r.lora(16), **setting).estimate
        assert estimate is not None
        assert estimate.gaps_ms > 0
        return estimate.step_ms

    small, large = sk.DecoderConfig(**MODELS["0.6b"], max_length=2048), CONFIG_8B
    assert ms(large, recipe) <= ms(large, sk.BF16)
    if recipe is sk.FP8_CURRENT:  # the exception: small products save less than reading each operand twice costs
        assert 1 < ms(small, recipe) / ms(small, sk.BF16) < 1.025
    else:
        assert ms(small, recipe) <= ms(small, sk.BF16)


def test_codes_of_frozen_weights_are_not_made_again():
    weights = 3 * sum(w.n * w.k for w in SMALL.projections)

    def moved(recipe, frozen, part):
        rows = planned(SMALL, recipe, dataclasses.replace(Fusion(), frozen=frozen))
        return sum(r.bytes for r in rows if r.part == part)

    fp8 = sk.FP8.lora(4)
    # of W in forward, and in backward where its input wants a gradient
    blind = sum(w.n * w.k for w in SMALL.projections if w.reads == "attention")
    assert moved(fp8, "no", "quantize") - moved(fp8, "codes", "quantize") == (2 + 1) * (2 * weights - blind)
    assert moved(fp8, "codes", "turn") == 2 * (weights - blind)
    assert moved(fp8, "transposed", "turn") == 0
    stored = RECIPES["qfp8 + LoRA"]
    assert moved(stored, "no", "turn") == moved(stored, "codes", "turn") == 2 * (weights - blind)
    assert moved(stored, "transposed", "turn") == 0


# -- as a plan


def plan(what: Any, **options: Any) -> Any:
    """A plan whose parts are known to be there."""
    return planner_plan(what, **options)


QWEN3_8B: dict[str, Any] = dict(CONFIG_8B)
RUN: dict[str, Any] = {"batch": 2, "length": 2048, "accumulate": 4}


def test_a_plan_with_w_transposed_cached():
    lora = sk.QFP8.lora(16)
    folded = plan(QWEN3_8B, recipe=lora, gpu=reached(790), fusion="fused", **RUN)
    cached = folded.but(transposed="cached")
    parameters = sum(w.n * w.k * w.count for w in folded.shape.projections)
    # a byte each, but for those whose input has no gradient: of the first block's attention
    blind = sum(w.n * w.k for w in folded.shape.projections if w.reads == "attention")
    assert cached.memory["codes of W'"].bytes == pytest.approx(parameters - blind, rel=0.001)
    assert cached.memory["codes of W'"].exact
    more = cached.memory.gib - folded.memory.gib
    assert 6.4 < more / 1.1 < 6.5  # less the copy that is turned on the fly
    assert 0.005 < 1 - cached.estimate.step_ms / folded.estimate.step_ms < 0.03
    fp8 = plan(QWEN3_8B, recipe=sk.FP8.lora(16), gpu=reached(790), fusion="fused", transposed="cached", **RUN)
    for name, count in (("codes of frozen weights", parameters), ("codes of W'", parameters - blind)):
        assert fp8.memory[name].bytes == pytest.approx(count, rel=0.001)
    on_the_fly = fp8.but(transposed="on the fly")
    assert on_the_fly.memory["codes of frozen weights"].bytes == fp8.memory["codes of frozen weights"].bytes
    with pytest.raises(KeyError):
        on_the_fly.memory["codes of W'"]
    for recipe in (sk.BF16.lora(16), sk.FP8, sk.QNF4.lora(16)):  # nothing frozen is quantized for its products
        both = [
            plan(QWEN3_8B, recipe=recipe, gpu=reached(790), fusion="fused", transposed=how, **RUN)
            for how in (None, "cached")
        ]
        assert both[0].memory == both[1].memory
        assert both[0].estimate.step_ms == both[1].estimate.step_ms


def test_graphs_cost_the_host_nothing():
    slow = reached(790, launch_us=20)
    eager = plan(QWEN3_8B, recipe=sk.BF16, gpu=slow, batch=1, length=64)
    captured = eager.but(graphs=True)
    count = sum(row.launches for row in eager.estimate.rows)
    assert eager.estimate.launch_ms == pytest.approx(count * 20e-3)
    assert eager.estimate.step_ms == eager.estimate.launch_ms  # the host is slower than the device with its gaps
    assert captured.estimate.launch_ms == 0
    assert captured.estimate.gaps_ms == eager.estimate.gaps_ms == pytest.approx(count * GAP_US / 1e3)
    assert captured.estimate.device_ms == eager.estimate.device_ms
    assert captured.estimate.step_ms == pytest.approx(captured.estimate.device_ms + captured.estimate.gaps_ms)
    assert captured.estimate.step_ms < eager.estimate.step_ms
    assert "kernels of CUDA graphs, a gap of 1 us assumed after each" in str(captured.lines())
    assert "launches of" not in str(captured.lines())
    assert captured.title.endswith("in CUDA graphs, 1 x H200")
    sheet = plan(QWEN3_8B, gpu="H200", batch=1, length=64, graphs=True)
    assert sheet.estimate.gaps_ms > 0  # needs no calibration
    assert sheet.but(graphs=False).estimate.gaps_ms == sheet.estimate.gaps_ms
    quick = plan(QWEN3_8B, gpu=reached(790, launch_us=5), batch=4, length=4096)
    assert quick.but(graphs=True).estimate.step_ms == quick.estimate.step_ms  # launched in time, the gaps are the same
    (found,) = (row for row in quick.faster().ways if row.how == "graphs=True")
    assert (found.saves_ms, found.why) == (0, "no faster here")
    with refused(ValueError):
        plan(QWEN3_8B, gpu="cpu", graphs=True)


def test_what_makes_a_step_faster(monkeypatch):
    unfused = plan(QWEN3_8B, recipe=sk.QFP8.lora(16), gpu=reached(790, launch_us=5), recompute="full", **RUN)
    found = unfused.faster()
    assert [way.how for way in found.ways] == [
        "fusion='fused'",
        "graphs=True",
        "recompute='none'",
        "transposed='cached'",
    ]
    assert [way.taken for way in found.ways] == [True, False, True, True]
    assert found.ways[1].why == "no faster here"
    saved = sum(way.saves_ms for way in found.ways if way.taken)
    assert found.plan.estimate.step_ms == pytest.approx(unfused.estimate.step_ms - saved)
    assert found.plan.memory.gib == pytest.approx(unfused.memory.gib + sum(w.adds_gib for w in found.ways if w.taken))
    assert (
        found.ways[-1].words
        == f"transposed='cached': {found.ways[-1].adds_gib:+.1f} GiB, -{found.ways[-1].saves_ms:.1f} ms"
    )
    text = repr(found)
    assert text.startswith("fusion='fused', recompute='none', transposed='cached': ")
    assert "one after the other" in text
    assert "<table" in found._repr_html_()
    assert list(found.table().columns) == ["way", "step_ms", "saves_ms", "gib", "adds_gib", "taken", "why"]
    # no room for what recompute saved, nor for W'
    tight = unfused.faster(gib=unfused.memory.gib + 1)
    assert [way.why for way in tight.ways] == ["taken", "no faster here", "does not fit", "does not fit"]
    tighter = unfused.faster(gib=unfused.memory.gib - 1)
    assert not any(way.taken for way in tighter.ways)
    assert "fusion='fused'" in [way.how for way in tighter.ways]
    assert "transposed='cached'" not in [way.how for way in tighter.ways]
    assert found.plan.faster().ways[0].how == "graphs=True"
    assert "gets no faster by any of these" in repr(found.plan.faster())
    sheet = unfused.but(gpu="H200")
    assert sheet.faster().kind == "likely"
    assert sheet.faster().ways[1].why in ("taken", "no faster here")
    monkeypatch.setattr(Plan, "has_published_rates", False)
    assert sheet.faster().ways[1].why in ("taken", "no faster here")
    hosted = sheet.but(recipe="fp8", optimizer="offloadadamw")  # whose host is not known: ways are compared without it
    assert hosted.step_time is None
    assert hosted.faster().step_ms == hosted.computing_time.ms == hosted.estimate.step_ms
    slow = unfused.but(gpu=reached(790, launch_us=100)).faster()
    assert slow.ways[1].taken
    # the fastest recipe that fits and trains as much is said, and not taken
    whole = plan(QWEN3_8B, gpu="H200", fusion="fused", optimizer="adamw8bit", **RUN).faster()
    (recipe,) = (way for way in whole.ways if "recipe" in way.changes)
    best = next(c for c in compare_recipes(whole.plan) if c.fastest)
    assert (recipe.how, recipe.step_ms, recipe.taken) == (f"recipe {best.name}", best.step_ms, False)
    assert whole.least_ms == recipe.step_ms < whole.plan.step_time.ms
    assert whole.sentence.endswith(f" ms with recipe {best.name}")
    older = plan(QWEN3_8B, gpu="A100", fusion="fused", **RUN)
    assert not older.faster().in_recipe  # emulates them
    assert older.but(recipe="mxfp4", optimizer="adamw8bit").faster().counted[-1].how == "recipe bf16"
    others = "this step is of other programs"
    assert any(others in note for note in plan(QWEN3_8B, gpu="H100", fusion="fused", recompute="mlp", **RUN).notes)
    some = plan(QWEN3_8B, gpu="H100", fusion="fused", recompute="full", recompute_blocks=8, **RUN)
    assert any(others in note for note in some.notes)
    assert not any(others in note for note in some.but(recompute_blocks=None).notes)
    assert not plan(QWEN3_8B, gpu="H100", recompute="mlp", **RUN).faster().ways[0].changes.get("fusion")
    # what takes no more memory than a plan that does not fit is worth it, and that it does not fit is said
    large = plan(QWEN3_8B, gpu="H100", batch=4, length=8192).faster()
    assert large.ways[0].taken
    assert large.ways[0].adds_gib <= 0
    assert (large.fits, found.fits) == (False, True)
    assert large.sentence.endswith("; the plan does not fit, plan.fitting() says what helps")
    assert "faster takes more memory than there is" in tight.plan.faster(gib=unfused.memory.gib + 1).sentence
    with refused(ValueError):
        plan(QWEN3_8B, gpu="H200").faster()
    with refused(ValueError):
        plan(8e9, gpu="H200").faster()


def test_selective_is_what_our_layers_compute_again():
    """Norms and gates, no product; of layers that are not fused every second product too."""
    ours = plan(QWEN3_8B, recipe="fp8", recompute="selective", fusion="fused", gpu="H200", **RUN)
    assert ours.compute.recompute == 0
    theirs = plan(QWEN3_8B, recompute="selective", layers="transformers", gpu="H200", **RUN)
    assert theirs.compute.recompute > 0
    unfused = plan(QWEN3_8B, recompute="selective", gpu="H200", **RUN)
    assert unfused.compute == theirs.compute
    assert unfused.memory.gib < plan(QWEN3_8B, gpu="H200", **RUN).memory.gib
    none, some, full = (
        plan(QWEN3_8B, recipe=sk.BF16.lora(16), recompute=how, fusion="fused", gpu="H200", **RUN)
        for how in ("none", "selective", "full")
    )
    assert none.memory.gib > some.memory.gib > full.memory.gib
    assert none.estimate.step_ms < some.estimate.step_ms < full.estimate.step_ms
    assert [r.how for r in none.fitting(gib=36).remedies if "recompute" in r.how] == [
        "recompute='selective'",
        "recompute='full'",
    ]


def test_a_fusion_is_read_by_its_fields():
    assert read_fusion("none", None, "full") == (OFF, "full")
    assert read_fusion("fused", None, "none") == (Fusion(), "none")
    assert read_fusion(Fusion(), None, None) == (Fusion(), "none")
    assert read_fusion(OFF, None, None) == (OFF, "none")
    assert not OFF.fuses
    assert not Fusion.OFF.without("norm").fuses
    assert not dataclasses.replace(OFF, recompute="full").fuses
    choices: tuple[dict[str, Any], ...] = tuple({name: True} for name in ("norm", "gate", "joint", "adapters", "qk"))
    assert all(dataclasses.replace(OFF, **choice).fuses for choice in choices)
    assert dataclasses.replace(OFF, frozen="codes").fuses
    chosen = Fusion(gate=False, frozen="transposed", recompute="selective")
    assert read_fusion(chosen, None, None) == (Fusion(gate=False, frozen="transposed"), "selective")
    assert read_fusion(chosen, None, "none")[1] == "none"
    assert read_fusion(chosen, "on the fly", "full") == (Fusion(gate=False), "full")
    assert read_fusion(Fusion(), "cached", "none")[0].frozen == "transposed"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"fusion": "all"}, ValueError),
        ({"fusion": 1}, TypeError),
        ({"transposed": "kept"}, ValueError),
        ({"transposed": "cached"}, ValueError),
    ],
)
def test_what_cannot_be_meant(options, error):
    with refused(error):
        plan(QWEN3_8B, **options)


def test_other_families_are_not_fused():
    config = {**QWEN3_8B, "model_type": "gemma2"}
    with refused(ValueError):
        plan(config, fusion="fused")
    theirs = plan(QWEN3_8B, layers="transformers", fusion="fused", batch=1, length=64, gpu="H100")
    ours = plan(QWEN3_8B, fusion="fused", batch=1, length=64, gpu="H100")
    assert theirs.memory.gib == ours.memory.gib
    assert theirs.estimate.step_ms == ours.estimate.step_ms


@pytest.mark.parametrize("name", sk.recipes)
def test_what_comes_quantized_is_what_the_layers_say(name):
    q = sk.recipes[name].forward.a
    assert comes_quantized(q) == prologues.Coded.possible(q, torch.zeros(1, dtype=torch.bfloat16))
