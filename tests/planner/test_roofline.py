"""A step's planned time against what torch really launches, against arithmetic by hand, and against another estimate."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import surokit as sk
from surokit.hardware.gpus import Ceilings, Gpu, find_gpu
from surokit.hardware.linear import linear_kernels
from surokit.hardware.rates import L2_SPEED, LAUNCH_US, Rates, rates_of
from surokit.nn import linear_gemms
from surokit.nn.delayed import DelayedScales
from surokit.planner import plan
from surokit.planner.counts.communication import communicate, efficiency, fit_speedup, loss_at_doublings
from surokit.planner.counts.flops import count_flops
from surokit.planner.counts.memory import Setup
from surokit.planner.counts.traffic import data_moves, loads
from surokit.planner.inputs.configs import read_shape
from surokit.planner.inputs.shape import Shape
from surokit.planner.times.energy import energy_kwh
from surokit.planner.times.roofline import estimate_step, recipe_gain, why_no_estimate
from surokit.quantized import Quantized, quantize, quantize_both
from surokit.quantizer import kind_of
from tests.planner.families import FAMILIES, fields
from tests.planner.families import QWEN3_8B as CONFIG_8B
from tests.refusals import refused

QWEN3_06B = Shape(28, 1024, 16, 8, 128, 3072, 151936, tied=True, qk_norm=True, family="qwen3")
QWEN3_8B = Shape(36, 4096, 32, 8, 128, 12288, 151936, qk_norm=True, family="qwen3")
SMALL = Shape(3, 64, 4, 2, 16, 192, 256, family="llama")
RECIPES = [
    sk.BF16,
    sk.FP8,
    sk.FP8_CURRENT,
    sk.FP8_ROWWISE,
    sk.FP8_BLOCK,
    sk.MXFP8,
    sk.FP4,
    sk.QFP8.lora(4),
    sk.QFP4.lora(4),
    sk.QNF4.lora(4),
    sk.QNF4.decode_once().lora(4),
    sk.BF16.lora(4),
]


def reached(bf16: float, **more: float) -> Gpu:
    """An H200 whose products and bandwidth were measured."""
    ceilings = Ceilings("a test", **{"bf16_tflops": bf16, "bandwidth_tb_s": 4.3, **more})
    return dataclasses.replace(find_gpu("H200"), ceilings=ceilings)


def trained(shape, recipe):
    if recipe.storage is None and recipe.adapter is None:
        return shape.parameters
    return recipe.adapter.rank * sum((w.n + w.k) * w.count for w in shape.projections)


def estimate(shape, recipe=sk.BF16, gpu=None, *, recompute="none", batch=2, length=2048, **setup):
    compute = count_flops(shape, length=length, recipe=recipe, recompute=recompute)
    made = Setup(batch=batch, length=length, recompute=recompute, **setup)
    return estimate_step(shape, compute, recipe, made, gpu or reached(790), trained_parameters=trained(shape, recipe))


# -- what is launched


class Everything(Gpu):
    """A GPU that multiplies quantized operands of every kind itself."""

    def multiplies(self, kind):
        return kind is not None


class _Dispatched(TorchDispatchMode):
    """Operators by name and shape of the result, and the bytes of the tensors that they read and write."""

    def __init__(self):
        super().__init__()
        self.calls: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, list | tuple) else out
        if isinstance(first, torch.Tensor):
            name = function.overloadpacket.__name__
            self.calls[name, tuple(first.shape)] += 1
            if function.is_view or "view" in name or name == "empty":
                return out
            for t in tree_leaves((args, kwargs, out)):
                if isinstance(t, torch.Tensor):  # what is expanded is read once
                    self.bytes += min(t.numel() * t.element_size(), t.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("recipe", [sk.BF16, sk.BF16.lora(4)], ids=["full", "lora"])
def test_products_and_sums_are_those_that_torch_launches(recipe, recompute):
    s = SMALL
    model = sk.Decoder(
        sk.DecoderConfig(layers=s.layers, width=s.width, heads=4, kv_heads=2, ffn=s.ffn, vocab=s.vocab, tied=False),
        dtype=torch.float32,
    )
    sk.apply(model, recipe)
    if recompute == "full":
        _checkpointed(model)
    ids = torch.randint(0, s.vocab, (2, 32))
    with _Dispatched() as seen:
        model(ids, labels=ids).loss.backward()
    compute = count_flops(s, length=32, recipe=recipe, recompute=recompute)
    setup = Setup("fp32", batch=2, length=32, recompute=recompute, device="cpu")
    rows = list(loads(s, compute, recipe, setup, reached(790), trained(s, recipe)))

    def planned(*parts):
        return sum(row.launches for row in rows if row.part in parts and row.step != "optimizer")

    assert planned("forward", "grad_input", "grad_weight") == sum(
        n for (name, _), n in seen.calls.items() if name == "mm"
    )
    scales = sum(row.launches for row in rows if row.module == "adapter's scale")
    assert planned("sum") - scales == sum(
        n for (name, shape), n in seen.calls.items() if name == "add" and len(shape) == 3
    )


def _checkpointed(model):
    from torch.utils.checkpoint import checkpoint

    for block in model.model.layers:
        forward = block.forward
        block.forward = lambda x, context, forward=forward: checkpoint(forward, x, context, use_reentrant=False)


@pytest.mark.parametrize("native", [False, True], ids=["emulated", "native"])
@pytest.mark.parametrize(
    ("recipe", "trains"),
    [(r, trains) for r in RECIPES for trains in (True, False) if not (trains and r.frozen_base)],
    ids=str,
)
def test_quantization_is_what_a_layer_really_does(recipe, trains, native, monkeypatch):
    if native:  # as on a GPU that multiplies such codes itself
        monkeypatch.setattr(linear_gemms, "computes", lambda a, b, device: kind_of(a, b) is not None)
    done: Counter[tuple[str, int, int]] = Counter()

    def counted(function, key):
        def wrapper(x, *args, **kwargs):
            done[key(x, args)] += 1
            return function(x, *args, **kwargs)

        return wrapper

    monkeypatch.setattr(linear_gemms, "quantize", counted(quantize, lambda x, args: ("quantize", x.numel(), 1)))
    monkeypatch.setattr(
        linear_gemms, "quantize_both", counted(quantize_both, lambda x, args: ("quantize", x.numel(), 2))
    )
    for name in ("quantize", "quantize_both"):
        delayed = getattr(DelayedScales, name)
        ways = 2 if name == "quantize_both" else 1

        def counting(self, slots, x, *rest, delayed=delayed, ways=ways):
            done["quantize", x.numel(), ways] += 1
            return delayed(self, slots, x, *rest)

        monkeypatch.setattr(DelayedScales, name, counting)
    size = lambda x, args: ("turn", x.rows * x.columns, 1)  # noqa: E731
    monkeypatch.setattr(Quantized, "t", counted(Quantized.t, size))
    monkeypatch.setattr(
        Quantized, "dequantize", counted(Quantized.dequantize, lambda x, args: ("decode", x.rows * x.columns, 1))
    )
    n, k, tokens = 128, 256, 32
    layer = torch.nn.Linear(k, n, bias=False, dtype=torch.bfloat16)
    model = torch.nn.Sequential(torch.nn.Identity(), layer)
    recipe = dataclasses.replace(recipe, adapter=None)  # what an adapter adds is no quantization
    sk.apply(model, recipe.keep_small(0))
    if not trains:
        model[1].weight.requires_grad_(False)
    x = torch.randn(tokens, k, dtype=torch.bfloat16, requires_grad=True)
    done.clear()
    model(x).sum().backward()

    nowhere = Gpu("Nowhere", bf16_tflops=1.0, capability=(8, 0))
    everywhere = Everything("Everywhere", bf16_tflops=1.0)
    sizes = {"x": tokens * k, "w": n * k, "dy": tokens * n}
    expected: Counter[str] = Counter()
    quantized = recipe if recipe.quantized else None
    for kernel in linear_kernels(
        quantized, n, k, tokens, trains=trains, gpu=everywhere if native else nowhere, stored=recipe.storage is not None
    ):
        expected[kernel.part] += 1
    got: Counter[str] = Counter()
    for (part, elements, _), times in done.items():
        assert elements in sizes.values()
        got[part] += times
    # a product that is emulated decodes its operands inside, which is not a call of the layer's
    gemms = recipe.gemms if trains else recipe.gemms[:2]
    emulated = sum(g.a is not None and not (native and g.kind) for g in gemms)
    assert got["quantize"] == expected["quantize"]
    assert got["turn"] == expected["turn"]
    assert got["decode"] == expected["decode"] - emulated


def test_bytes_of_a_layer_by_hand():
    n, k, t = 256, 128, 64
    hopper = find_gpu("H100")
    x, w, dy = t * k, n * k, t * n

    def total(recipe, part, *, trains=True, stored=False):
        kernels = linear_kernels(recipe, n, k, t, trains=trains, gpu=hopper, stored=stored)
        return sum(kernel.bytes for kernel in kernels if kernel.part == part)

    assert total(sk.BF16, "forward") == 2 * (x + w + dy)
    # delayed scales: one read each of x, w, dy and w again, codes written
    # and those of x' and dy' beside; of W' in backward alone
    assert total(sk.FP8, "quantize") == (2 + 1) * (x + w + dy + w) + x + dy
    assert total(sk.FP8, "quantize", trains=False) == (2 + 1) * (x + w + dy + w)
    assert total(sk.FP8, "turn") == 0
    assert total(sk.FP8, "forward") == x + w + 2 * dy
    assert total(sk.FP8, "decode") == 0
    # current scales read twice; rows of both orientations too
    assert total(sk.FP8_CURRENT, "quantize") == (4 + 1) * (x + w + dy + w) + x + dy
    assert total(sk.FP8_ROWWISE, "quantize", trains=False) == pytest.approx((2 + 1) * (x + w + dy + w))
    both = 2 * 2 * (x + dy) + 2 * (x + dy) + (2 + 1) * 2 * w
    assert total(sk.FP8_ROWWISE, "quantize") == pytest.approx(both)
    # turned where the product is emulated, or takes the codes as they are stored
    ampere = linear_kernels(sk.FP8, n, k, t, trains=True, gpu=find_gpu("A100"))
    assert sum(kernel.bytes for kernel in ampere if kernel.part == "turn") == 2 * (x + dy + w)
    stored = sk.QFP8.natively()
    assert total(stored, "turn", trains=False, stored=True) == pytest.approx(2 * w)
    assert total(stored, "turn", trains=False) == 0
    # NF4 in 4.127 bits, decoded before each of two products
    assert total(sk.QNF4, "decode", trains=False, stored=True) == pytest.approx(2 * w * (4.127 / 8 + 2), rel=1e-4)
    # an emulated product decodes both operands and multiplies 16 bits
    assert sum(
        kernel.bytes
        for kernel in linear_kernels(sk.MXFP8, n, k, t, trains=False, gpu=hopper)
        if kernel.part == "decode" and kernel.step == "forward"
    ) == pytest.approx((x + w) * (1 + 1 / 32 + 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_transformers_moves_between_products(dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

    T, K = 256, 1024
    moves = data_moves("transformers", dtype.itemsize)

    def both(function, *xs):
        leaves = [x.to(dtype).clone().requires_grad_() for x in xs]
        with _Dispatched() as there:
            made = function(*leaves)
        out = made if isinstance(made, tuple) else (made,)
        ones = [torch.ones_like(y) for y in out]
        with _Dispatched() as back:
            torch.autograd.backward(out, ones)
        return there.bytes / (T * K), back.bytes / (T * K)

    x, y = torch.randn(1, T, K), torch.randn(1, T, K)
    norm = LlamaRMSNorm(K).to(dtype)
    assert both(norm, x) == pytest.approx((moves["norm"].forward, moves["norm"].trained), rel=0.02)
    norm.weight.requires_grad_(False)
    assert both(norm, x) == pytest.approx((moves["norm"].forward, moves["norm"].backward), rel=0.02)
    gated = both(lambda gate, up: F.silu(gate) * up, x, y)
    assert gated == pytest.approx((moves["swiglu"].forward, moves["swiglu"].backward), rel=0.02)
    q, k, angle = torch.randn(1, 4, T, 128), torch.randn(1, 4, T, 128), torch.randn(1, T, 128, dtype=dtype)
    turned = both(lambda q, k: apply_rotary_pos_emb(q, k, angle, angle), q, k)
    assert turned == pytest.approx((moves["rope"].forward, moves["rope"].backward), rel=0.1)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_rows_compute_the_plans_flops(recipe, recompute, accumulate):
    gpu = find_gpu("B200")
    e = estimate(SMALL, recipe, gpu, recompute=recompute, batch=2, length=64, accumulate=accumulate)
    compute = count_flops(SMALL, length=64, recipe=recipe, recompute=recompute)
    again = sum(p.backward for p in compute.products if p.module.startswith("attention")) / 4
    assert sum(row.flop for row in e.rows) == pytest.approx((compute.hardware + again) * 2 * 64 * accumulate)
    assert e.model_flop == compute.model * 2 * 64 * accumulate
    assert e.tokens == 2 * 64 * accumulate


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("recipe", [sk.BF16, sk.FP8, sk.QNF4.lora(4)], ids=lambda r: r.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_every_family_compute_the_plans_flops(family, recipe, recompute):
    shape, _ = read_shape(fields(family))
    e = estimate(shape, recipe, find_gpu("H100"), recompute=recompute, batch=2, length=64)
    compute = count_flops(shape, length=64, recipe=recipe, recompute=recompute)
    again = sum(p.backward for p in compute.products if p.module.startswith("attention")) / 4
    assert sum(row.flop for row in e.rows) == pytest.approx((compute.hardware + again) * 2 * 64)
    assert all(row.bytes > 0 and row.launches > 0 for row in e.rows)


# -- how long it takes


# Another estimate (ms), made before this code: a micro-batch of 4,096 tokens on an H200, LoRA on all seven projections. It does not
# state its rates. 622 TFLOPS of products was inferred from its own 183 ms for the 8B model, so that figure agrees by construction;
# what is compared is the rest: the 0.6B model's products, and both models' other parts. It is no measurement.
ANOTHER = {
    "0.6B": (
        QWEN3_06B,
        {"products": 11.6, "head and loss": 5.2, "attention": 8.3, "elementwise": 5.5, "adapter": 4.7},
        35,
    ),
    "8B": (QWEN3_8B, {"products": 183, "head and loss": 17, "attention": 21, "elementwise": 22, "adapter": 6}, 250),
}


@pytest.mark.parametrize("case", ANOTHER.values(), ids=ANOTHER)
def test_another_estimate(case):
    shape, parts, total = case
    e = estimate(shape, sk.BF16.lora(16), reached(622))
    got = e.by_group()
    assert got["products"] == pytest.approx(parts["products"], rel=0.02)
    assert got["head and loss"] == pytest.approx(parts["head and loss"], rel=0.06)
    assert got["elementwise"] == pytest.approx(parts["elementwise"], rel=0.2)
    # a sixth more: its backward forms the scores again
    assert got["attention"] == pytest.approx(parts["attention"] * 3.5 / 3, rel=0.03)
    # not compared: the adapter's sums and products as layers of their own, which the other estimate fuses
    assert got["adapter"] > parts["adapter"]
    assert e.device_ms - got["adapter"] == pytest.approx(total - parts["adapter"], rel=0.03)
    assert estimate(shape, sk.BF16.lora(16), reached(790)).device_ms == pytest.approx(total, rel=0.08)


def test_the_rate_that_was_inferred():
    # forward and the gradient of the input, 2 FLOP a weight and token each
    flop = 4 * sum(w.n * w.k * w.count for w in QWEN3_8B.projections) * 4096
    assert flop / 183e-3 / 1e12 == pytest.approx(622, abs=1)


def test_shares_of_flops_promise_more_than_time_gives():
    compute = count_flops(QWEN3_06B, length=2048)
    share = sum(p.forward + p.backward for p in compute.products if "_proj" in p.module) / compute.model
    assert recipe_gain(1.0, share, 2.0) == pytest.approx(1.45, abs=0.005)
    assert recipe_gain(35, 11.6, 11.6 / 6.9, 1.2) == pytest.approx(1.11, abs=0.005)  # the same from times
    bf16, fp8 = (estimate(QWEN3_06B, recipe, reached(790)) for recipe in (sk.BF16, sk.FP8))
    before, after = bf16.by_group(), fp8.by_group()
    gain = bf16.device_ms / fp8.device_ms
    assert gain == pytest.approx(
        recipe_gain(bf16.device_ms, before["products"], before["products"] / after["products"], after["quantization"])
    )
    assert 1.05 < gain < 1.15
    # where products are nearly everything, the two come together
    big = estimate(QWEN3_8B, sk.BF16).device_ms / estimate(QWEN3_8B, sk.FP8).device_ms
    assert gain < big < 1.45


def test_a_gain_by_hand():
    assert recipe_gain(100, 60, 2) == pytest.approx(100 / 70)
    assert recipe_gain(100, 60, 2, 30) == 1.0
    assert recipe_gain(100, 60, 2, 40) < 1
    assert recipe_gain(100, 60, 1) == 1.0
    with refused(ValueError):
        recipe_gain(60, 100, 2)
    with refused(ValueError):
        recipe_gain(100, 60, 2, -1)
    with refused(ValueError):
        recipe_gain(100, 60, 0)


def test_the_bound_of_a_row():
    e = estimate(QWEN3_06B, gpu=reached(790, launch_us=5))
    rows = {(row.module, row.step, row.part): row for row in e.rows}
    up = rows["mlp.up_proj", "forward", "forward"]
    assert up.bound == "compute"
    assert up.ms == up.compute_ms == pytest.approx(28 * 2 * 4096 * 1024 * 3072 / 790e12 * 1e3)
    assert up.launch_ms == pytest.approx(28 * 5e-3)
    glu = rows["swiglu", "forward", "move"]
    assert glu.bound == "memory"
    assert glu.ms == glu.memory_ms == pytest.approx(28 * 3 * 2 * 4096 * 3072 / 4.3e12 * 1e3)
    few = estimate(QWEN3_06B, gpu=reached(790, launch_us=5), batch=1, length=64)
    small = {(row.module, row.step, row.part): row for row in few.rows}["swiglu", "forward", "move"]
    assert small.bound == "launch"
    assert small.ms == pytest.approx(28 * 5e-3)


def test_the_host_delays_a_step_as_a_whole():
    quick, slow = (estimate(QWEN3_06B, gpu=reached(790, launch_us=us)) for us in (2, 50))
    assert quick.launch_ms < quick.device_ms
    assert quick.step_ms == quick.device_ms + quick.gaps_ms
    assert quick.gaps_ms == pytest.approx(quick.launch_ms / 2)  # 1 us of each launch's 2
    assert quick.by_bound()["launch"] == quick.gaps_ms
    assert [term for term, *_ in quick.lines()][-3:-1] == ["  gaps", "  launches"]
    assert slow.step_ms == slow.launch_ms == pytest.approx(25 * quick.launch_ms)
    assert slow.by_bound()["launch"] == pytest.approx(slow.launch_ms - slow.device_ms)
    assert (quick.binds, slow.binds) == ("compute", "launch")
    assert "the host is what the step waits for" in str(slow.lines())
    assert "hidden behind the device" in str(quick.lines())
    for e in (quick, slow):
        assert sum(e.by_bound().values()) == pytest.approx(e.step_ms)
        assert sum(e.by_group().values()) == pytest.approx(e.device_ms)
        assert sum(e.by_pass().values()) == pytest.approx(e.device_ms)
        assert sum(e.by_module().values()) == pytest.approx(e.device_ms)


PROCESSOR = Gpu(
    "cpu: mine", device="cpu", ceilings=Ceilings("a test", bf16_tflops=0.1, bandwidth_tb_s=0.01, launch_us=3.0)
)


def test_a_processor_does_not_launch_ahead_of_itself():
    e = estimate(SMALL, gpu=PROCESSOR, batch=1, length=8)
    assert e.kind == "prediction"
    assert e.launch_ms == pytest.approx(sum(row.launches for row in e.rows) * 3e-3)
    assert e.step_ms == e.device_ms + e.launch_ms
    assert sum(e.by_bound().values()) == pytest.approx(e.step_ms)
    assert e.by_bound()["launch"] == e.launch_ms
    assert "launches of 3 us, added to the rest" in str(e.lines())


@pytest.mark.parametrize("recipe", [sk.FP8, sk.FP4, sk.QFP8.lora(4)], ids=lambda r: r.name)
def test_what_a_processor_quantizes_is_not_predicted(recipe):
    e = estimate(SMALL, recipe, PROCESSOR, batch=1, length=8)
    assert e.kind == "optimistic"
    words = "quantizing is taken at the memory's bandwidth, which a processor does not reach"
    assert e.how == f"rates measured on a test; {words}"
    assert e.notes[0].startswith(f"{words}: the step takes longer")
    assert estimate(SMALL, recipe, batch=1, length=8).kind == "prediction"  # kernels of a GPU are bound by its memory


@pytest.mark.parametrize(
    ("figures", "said"), [({"bf16_tflops": 700}, "products"), ({"bandwidth_tb_s": 4.0}, "bandwidth")]
)
def test_a_calibration_cut_short_is_not_all_datasheet(figures, said):
    gpu = dataclasses.replace(find_gpu("H200"), ceilings=Ceilings("a test", **figures))
    rates = rates_of(gpu)
    assert isinstance(rates, Rates)
    assert rates.how.startswith(f"{said} measured on a test, the rest of the datasheet of H200, which few runs reach")
    assert not rates.measured


def test_measured_rates_predict_and_the_datasheet_is_optimistic():
    told, sheet = estimate(QWEN3_8B, gpu=reached(790)), estimate(QWEN3_8B, gpu=find_gpu("H200"))
    assert (told.kind, sheet.kind) == ("prediction", "optimistic")
    assert told.how.startswith("rates measured on a test; 8-bit products, not measured, at their peak times")
    assert sheet.how == (
        "rates of the datasheet of H200, which few runs reach; attention at the 35% of the peak that is published for it"
    )
    assert sheet.step_ms < told.step_ms
    count = sum(row.launches for row in sheet.rows)
    assert sheet.launch_ms == pytest.approx(count * LAUNCH_US / 1e3)
    assert any("launches of 2 us assumed, hidden behind the device" in how for *_, how in sheet.lines())
    assert sheet.step_ms == pytest.approx(sheet.device_ms + max(sheet.gaps_ms, sheet.launch_ms - sheet.device_ms))
    bound = plan(dict(CONFIG_8B), batch=2, length=2048, gpu="H200").time.floor_step_ms
    assert bound < sheet.step_ms
    assert sheet.speed_of_light == pytest.approx(bound / sheet.step_ms)
    assert sheet.mfu == pytest.approx(sheet.model_flop / (sheet.step_ms / 1e3) / 989e12)
    assert sheet.tokens_per_s == pytest.approx(4096 / sheet.step_ms * 1e3)


def test_rates_of_formats():
    measured = rates_of(reached(790, fp8_tflops=1500))
    assert isinstance(measured, Rates)
    assert measured.products[None] == 790
    assert measured.products["row"] == 1500
    assert measured.products["mx"] == 790  # emulated on Hopper: bfloat16 products
    assert measured.attention_tflops == pytest.approx(0.35 * 989)
    guessed = rates_of(reached(790))
    assert isinstance(guessed, Rates)
    assert guessed.products["row"] == pytest.approx(790 * 1979 / 989)
    full = rates_of(reached(790, fp32_tflops=300), "fp32")
    assert isinstance(full, Rates)
    assert full.products[None] == full.attention_tflops == 300
    assert full.products["row"] == guessed.products["row"]  # never a whole peak beside what was measured
    ampere = rates_of(find_gpu("A100"))
    assert isinstance(ampere, Rates)
    assert ampere.attention_tflops == pytest.approx(0.6 * 312)
    cpu = rates_of(Gpu("cpu", ceilings=Ceilings("a CPU", bf16_tflops=1.0, bandwidth_tb_s=0.01, launch_us=5)))
    assert isinstance(cpu, Rates)
    assert cpu.attention_tflops == 1.0


def test_emulation_costs_and_never_gains():
    bf16 = estimate(QWEN3_8B, sk.BF16)
    for recipe in (sk.MXFP8, sk.FP4):
        e = estimate(QWEN3_8B, recipe)
        assert e.step_ms > bf16.step_ms
        assert e.by_group()["products"] == pytest.approx(bf16.by_group()["products"])
        assert any(row.part == "decode" for row in e.rows)
    blackwell = find_gpu("B200")
    native = estimate(QWEN3_8B, sk.MXFP8, blackwell)
    assert native.step_ms < estimate(QWEN3_8B, sk.BF16, blackwell).step_ms
    assert not any(row.part == "decode" for row in native.rows)


def test_what_a_setting_adds():
    plain = estimate(QWEN3_06B)
    assert (
        estimate(QWEN3_06B, recompute="full").by_pass()["recompute"]
        > 0.8 * plain.by_pass()["forward"] - (plain.by_group()["head and loss"])
    )
    theirs = estimate(QWEN3_06B, layers="transformers", logits="whole")
    assert theirs.by_group()["elementwise"] > 3 * plain.by_group()["elementwise"]
    twice = estimate(QWEN3_06B, accumulate=2)
    optimizer = plain.by_pass()["optimizer"]
    added = sum(row.device_ms for row in twice.rows if row.module == "gradients")
    assert twice.device_ms - added == pytest.approx(2 * (plain.device_ms - optimizer) + optimizer)
    assert added == pytest.approx(QWEN3_06B.parameters * 6 / 4.3e12 * 1e3)
    light = estimate(QWEN3_06B, optimizer="adamw8bit")
    assert light.by_pass()["optimizer"] < optimizer
    assert estimate(QWEN3_06B, zero=1, gpus=8).by_pass()["optimizer"] == pytest.approx(optimizer / 8)


def test_the_optimizer_by_hand():
    rows = {row.module: row for row in estimate(QWEN3_06B).rows if row.step == "optimizer"}
    n = QWEN3_06B.parameters
    assert rows["optimizer"].bytes == n * (2 * 2 + 2 + 4 * 2)  # p and two moments read and written, the gradient read
    assert rows["gradient norm"].bytes == n * 2
    wide = {row.module: row for row in estimate(QWEN3_06B, state_dtype="fp32").rows if row.step == "optimizer"}
    assert wide["optimizer"].bytes == n * ((2 + 4) + (2 + 4) + 28 + (4 + 2))
    # float32 weights are their own masters
    gpu = dataclasses.replace(find_gpu("H100"), fp32_tflops=67.0).multiplying("fp32")
    given = {"gpu": gpu, "dtype": "fp32", "state_dtype": "fp32"}
    own = [estimate(QWEN3_06B, **given, master=master).by_pass()["optimizer"] for master in (False, True)]
    assert own[0] == own[1]


def test_experts_work_for_the_tokens_that_come():
    config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 4,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 1024,
        "moe_intermediate_size": 256,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 1024,
    }
    shape, _ = read_shape(config)
    e = estimate(shape, batch=4, length=1024)
    compute = count_flops(shape, length=1024)
    assert sum(row.flop for row in e.rows if row.group != "attention") == pytest.approx(
        4096 * sum(p.forward + p.backward for p in compute.products if not p.module.startswith("attention"))
    )
    (name,) = {row.module for row in e.rows if row.module.endswith("up_proj")}
    row = next(row for row in e.rows if row.module == name and row.step == "forward" and row.part == "forward")
    # all weights are read, a quarter of them a token: 4 tokens in and out of an expert for one in
    assert row.bytes == pytest.approx(2 * 4 * (16 * 256 * 512 + 4096 * 4 * (512 + 256)))
    assert row.launches == 4  # one grouped product a block


@settings(max_examples=30, deadline=None)
@given(
    batch=st.integers(1, 8),
    length=st.sampled_from([64, 512, 2048]),
    recipe=st.sampled_from(RECIPES),
    faster=st.floats(1.1, 4),
)
def test_time_follows_work_and_rates(batch, length, recipe, faster):
    e = estimate(QWEN3_06B, recipe, reached(500, fp8_tflops=900), batch=batch, length=length)
    assert all(row.ms >= 0 and row.ms == max(row.compute_ms, row.memory_ms, row.launch_ms) for row in e.rows)
    more = estimate(QWEN3_06B, recipe, reached(500, fp8_tflops=900), batch=batch + 1, length=length)
    assert more.device_ms > e.device_ms
    assert more.step_ms >= e.step_ms  # a step that waits for launches takes as long
    gpu = dataclasses.replace(
        reached(500 * faster, fp8_tflops=900 * faster, bandwidth_tb_s=4.3 * faster), bf16_tflops=989 * faster
    )
    assert estimate(QWEN3_06B, recipe, gpu, batch=batch, length=length).device_ms == pytest.approx(e.device_ms / faster)


def test_a_cache_that_holds_what_a_kernel_moves():
    """As on an RTX 4090, whose 72 MiB hold the tensors of a small micro-batch; what is larger comes from the memory."""
    card = find_gpu("RTX-4090")
    small, large = (
        [
            {(row.module, row.step, row.part): row for row in estimate(QWEN3_06B, gpu=gpu, length=n).rows}
            for gpu in (card, dataclasses.replace(card, l2_mib=None))
        ]
        for n in (1024, 16384)
    )
    norm = ("norm", "forward", "move")
    assert small[0][norm].memory_ms == small[1][norm].memory_ms / L2_SPEED
    assert large[0][norm].memory_ms == large[1][norm].memory_ms
    assert all(small[0][key].memory_ms == small[1][key].memory_ms for key in small[0] if key[0] == "optimizer")
    assert small[0][norm].bytes == small[1][norm].bytes
    # where the bandwidth was measured it is that of the memory
    assert isinstance(rates := rates_of(reached(790)), Rates)
    assert rates.l2_mib == 0


def test_a_forward_alone():
    compute = count_flops(QWEN3_06B, length=512, training=False)
    e = estimate_step(
        QWEN3_06B, compute, sk.BF16, Setup(batch=1, length=512, training=False), reached(790), trained_parameters=0
    )
    assert e is not None
    assert {row.step for row in e.rows} == {"forward"}
    assert sum(row.flop for row in e.rows) == pytest.approx(compute.forward * 512)


def test_what_is_missing_is_said():
    compute = count_flops(SMALL, length=64)
    setup = Setup(batch=1, length=64)
    cases = [
        (None, None, setup, reached(790), "plan with a config or a model"),
        (SMALL, compute, Setup(), reached(790), "give batch= and length="),
        (SMALL, compute, setup, None, "give gpu='H100'"),
        (SMALL, compute, setup, Gpu("Mine"), r"BF16 rate of Mine is not known: give Gpu\('Mine', bf16_tflops=...\)"),
        (SMALL, compute, setup, Gpu("Mine", bf16_tflops=1), r"bandwidth of Mine is not known: give .*bandwidth_tb_s"),
        (SMALL, compute, Setup("fp32", batch=1, length=64), find_gpu("H100"), "float32 rate of H100 is not known"),
        (
            SMALL,
            compute,
            setup,
            find_gpu("cpu"),
            r"CPU computes and copies was not measured: .*gpu=sk.calibrate\('cpu'\)",
        ),
    ]
    for shape, products_, given_setup, gpu, message in cases:
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(why_no_estimate(shape, products_, given_setup, gpu))
        assert estimate_step(shape, products_, sk.BF16, given_setup, gpu, trained_parameters=1e6) is None
    assert why_no_estimate(SMALL, compute, setup, reached(790)) == ""


def test_the_table_and_the_lines():
    e = estimate(QWEN3_06B, sk.QFP8.lora(16), reached(790, launch_us=4))
    frame = e.table()
    assert frame[["compute_ms", "memory_ms", "launch_ms"]].max(axis=1).sum() == pytest.approx(frame.ms.sum())
    assert set(frame.bound) <= {"compute", "memory", "launch"}
    assert {"self_attn.q_proj", "self_attn.q_proj.lora_A", "attention", "swiglu", "loss", "optimizer"} <= set(
        frame.module
    )
    terms = [term for term, *_ in e.lines()]
    assert terms[0] == "step, estimated"
    assert terms[-1] == "tokens a second, estimated"
    assert "  quantization" in terms
    assert all(kind == "prediction" for *_, kind, _ in e.lines())


# -- communication


def sent(gpus=8, zero=0, **given):
    arguments = {
        "gradient_bytes": 16e9,
        "weight_bytes": 16e9,
        "trained_bytes": 16e9,
        "forward_ms": 100.0,
        "backward_ms": 200.0,
        "peer_gb_s": 450.0,
    }
    return communicate(gpus=gpus, zero=zero, **{**arguments, **given})


@pytest.mark.parametrize(("zero", "times"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_bytes_of_a_step(zero, times):
    """Two volumes of the model without sharding weights, three with: ZeRO's own figures."""
    c = sent(zero=zero)
    assert c.bytes == pytest.approx(7 / 8 * times * 16e9)
    assert c.ms == pytest.approx(c.bytes / 450e9 * 1e3)
    assert sent(gpus=1, zero=zero).bytes == 0


def test_micro_batches_send_what_they_cannot_keep():
    assert sent(accumulate=4).bytes == sent().bytes
    assert sent(zero=1, accumulate=4).bytes == sent(zero=1).bytes
    assert sent(zero=2, accumulate=4).bytes == pytest.approx(7 / 8 * 5 * 16e9)
    assert sent(zero=3, accumulate=4).bytes == pytest.approx(7 / 8 * 12 * 16e9)


def test_what_hides_behind_the_passes():
    each = 7 / 8 * 16e9 / 450e9 * 1e3  # 31.1 ms
    assert sent().exposed_ms == 0
    assert sent(backward_ms=50.0).exposed_ms == pytest.approx(2 * each - 50)
    assert sent(backward_ms=50.0, accumulate=2).exposed_ms == pytest.approx(2 * each - 25)  # behind the last one
    assert sent(zero=1).exposed_ms == pytest.approx(each)  # the gather after the optimizer hides behind nothing
    assert sent(zero=3).exposed_ms == 0
    assert sent(zero=3, forward_ms=10.0).exposed_ms == pytest.approx(each - 10)


def test_a_slower_link_is_given_or_said():
    many = sent(gpus=16)
    assert many.ms is None
    assert many.exposed_ms is None
    assert many.how.endswith("the rate between nodes is not known: give between_gb_s=")
    # two nodes: half of the volume crosses, over eight cards; 15 of 16 parts go over the links within
    fast, slow = sent(gpus=16, between_gb_s=50.0), sent(gpus=16, between_gb_s=5.0)
    assert (fast.link_gb_s, slow.link_gb_s) == (450, 5)
    assert fast.ms == pytest.approx(15 / 16 * 2 * 16e9 / 450e9 * 1e3)
    assert slow.ms == pytest.approx(1 / 2 / 8 * 2 * 16e9 / 5e9 * 1e3)
    assert sent(gpus=16, between_gb_s=5.0, gpus_a_node=1).ms == pytest.approx(15 / 16 * 2 * 16e9 / 5e9 * 1e3)
    assert sent(gpus=16, gpus_a_node=72).link_gb_s == 450
    assert sent(peer_gb_s=None).how.endswith("the rate between GPUs is not known: give Gpu(peer_gb_s=)")


def test_an_estimate_adds_what_is_exposed():
    gpu = dataclasses.replace(reached(790), peer_gb_s=25.0)
    alone, eight = (estimate(QWEN3_8B, gpu=gpu, gpus=gpus) for gpus in (1, 8))
    c = eight.communication
    assert c.bytes == pytest.approx(2 * 7 / 8 * QWEN3_8B.parameters * 2)
    assert eight.step_ms == pytest.approx(alone.step_ms + c.exposed_ms)
    assert eight.by_bound()["communication"] == c.exposed_ms > 0
    assert eight.tokens == 8 * alone.tokens
    assert any(term == "  communication, exposed" for term, *_ in eight.lines())
    unknown = estimate(QWEN3_8B, gpu=dataclasses.replace(reached(790), peer_gb_s=None), gpus=8)
    assert unknown.exposed_ms is None
    assert "communication is left out of the step's time: the rate between GPUs is not known" in unknown.notes[-1]
    adapter = estimate(QWEN3_8B, sk.QFP8.lora(16), gpu, gpus=8, zero=3)
    stored = sum(w.n * w.k * w.count for w in QWEN3_8B.projections)
    rank = trained(QWEN3_8B, sk.QFP8.lora(16))
    held = stored * (1 + 4 / 128**2) + (QWEN3_8B.parameters - stored) * 2 + rank * 2
    assert adapter.communication.bytes == pytest.approx(7 / 8 * (2 * held + rank * 2), rel=1e-6)


# -- scaling of measured runs


def test_efficiency_by_hand():
    rates = {1: 1000.0, 2: 1900.0, 4: 3600.0, 8: 6000.0}
    assert efficiency(rates) == {1: 1.0, 2: 0.95, 4: 0.9, 8: 0.75}
    assert loss_at_doublings(rates) == pytest.approx({2: 0.05, 4: 1 - 3600 / 3800, 8: 1 - 6000 / 7200})
    # published: Llama2-7B on 8 RTX 4090 at 90.8 %
    assert efficiency({1: 1.0, 8: 8 * 0.908})[8] == pytest.approx(0.908)


@given(serial=st.floats(0, 0.3), crosstalk=st.floats(0, 0.01), one=st.floats(1, 1e5))
def test_a_fit_finds_what_made_the_rates(serial, crosstalk, one):
    rates = {n: n * one / (1 + serial * (n - 1) + crosstalk * n * (n - 1)) for n in (1, 2, 4, 8, 16)}
    fit = fit_speedup(rates)
    assert (fit.serial, fit.crosstalk) == pytest.approx((serial, crosstalk), abs=1e-6)
    assert fit.worst < 1e-5
    assert fit.rate(32) == pytest.approx(32 * one / (1 + serial * 31 + crosstalk * 32 * 31), rel=1e-3)


def test_where_more_gpus_are_slower():
    fit = fit_speedup({1: 1.0, 2: 1.9, 4: 3.3, 8: 4.5})
    best = fit.best
    assert best is not None
    assert fit.rate(best) >= max(fit.rate(n) for n in range(1, 200))
    assert fit_speedup({1: 1.0, 2: 1.8}).best is None
    assert fit_speedup({1: 1.0, 2: 0.5, 4: 0.3}).best == 1  # a second one already slows the first
    assert fit_speedup({1: 1.0, 2: 2.1, 4: 4.3}).serial == 0  # better than linear: no cost is invented


@pytest.mark.parametrize(
    "rates",
    [{2: 1.0, 4: 2.0}, {1: 1.0}, {1: 0.0, 2: 1.0}],
)
def test_scaling_wants_one_gpu(rates):
    for function in (efficiency, loss_at_doublings, fit_speedup):
        with refused(ValueError):
            function(rates)


def test_energy():
    assert energy_kwh(1000, 700) == 700
    assert energy_kwh(1000, 700, utilisation=0.8) == pytest.approx(560)
    assert energy_kwh(26.325e6, Gpu("H100-like", watts=700)) == pytest.approx(18.4275e6)
    assert energy_kwh(1000, Gpu("Mine")) is None
    with refused(ValueError):
        energy_kwh(1000, 700, utilisation=80)
    with refused(ValueError):
        energy_kwh(1000, 0)
