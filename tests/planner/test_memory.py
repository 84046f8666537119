"""Memory: exact terms against a model's own tensors, what passes with a step against what torch keeps and what it allocates.

Measured bytes are those of tensors that live: `Meter` leaves the scratch of products out, which differs from processor to
processor (8 MB for each bf16 product where there are no bf16 instructions), so that every processor gives the same bytes.
"""

import gc
import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surokit.bench import memory as bench
from surokit.bench.memory import Setting, measure, planned
from surokit.convert import apply
from surokit.fusion import Recompute
from surokit.kernels.reference import loss as loss_kernel
from surokit.models import Decoder, DecoderConfig
from surokit.models.decoder import KeyValueCache
from surokit.nn.delayed import banks_of
from surokit.nn.linear import Linear
from surokit.optim.spec import Spec
from surokit.planner import plan
from surokit.planner.counts import memory as module
from surokit.planner.counts import tape
from surokit.planner.counts.activations import loss_rows
from surokit.planner.counts.flops import Placement
from surokit.planner.counts.tape import Tape
from surokit.planner.inputs.shape import Weight
from surokit.profiler.record.allocations import PRODUCTS, Meter
from surokit.recipe import BF16, FP8, FP8_ROWWISE, PROJECTIONS, QFP8
from surokit.train import AdamW, AdamW8bit
from tests.planner import families
from tests.refusals import refused

BATCH, LENGTH = 2, 256
CONFIG = DecoderConfig(layers=4, width=256, heads=8, kv_heads=4, vocab=1024, ffn=704, tied=False, max_length=LENGTH)
SOME = BF16.lora(8, targets=("layers.1.*",))  # nothing below the second block has a gradient


def model_of(recipe, dtype=torch.bfloat16, config=CONFIG):
    torch.manual_seed(0)
    model = Decoder(config, dtype=dtype)
    if recipe is not None:
        apply(model, recipe)
    return model


def kept_bytes(model, batch=BATCH, length=LENGTH):
    """Bytes of the storages that one forward with a loss keeps for backward, the model's own tensors left out."""
    own = {t.untyped_storage().data_ptr() for t in itertools.chain(model.parameters(), model.buffers())}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no other takes its place
        return tensor

    ids = torch.randint(256, (batch, length))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids).loss
    assert loss.requires_grad
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "recipe", [None, FP8, FP8_ROWWISE, QFP8, BF16.lora(8), SOME], ids=lambda r: r.name if r else "none"
)
def test_activations_are_what_the_layers_keep(recipe, dtype):
    model = model_of(recipe, dtype)
    planned = plan(model, recipe=recipe, batch=BATCH, length=LENGTH, dtype=dtype)
    # the fused loss keeps the gradients that its forward has made: the hidden states', and the head's where it trains
    trains_head = recipe is None or recipe.adapter is None
    loss = dtype.itemsize * CONFIG.width * (BATCH * LENGTH + (CONFIG.vocab if trains_head else 0))
    assert planned.memory["activations"].most == pytest.approx(kept_bytes(model) - loss, rel=0.01)


@pytest.mark.parametrize(
    "setting",
    [
        Setting("llama", family="llama"),
        Setting("qwen3, fp32", family="qwen3", dtype="fp32"),
        Setting("qwen3 + LoRA", family="qwen3", recipe="bf16", rank=8),
        Setting("llama fp8", family="llama", recipe="fp8"),
    ],
    ids=lambda setting: setting.name,
)
def test_activations_are_what_transformers_layers_keep(setting):
    model = bench.model_of(setting).train()
    # the loss keeps log-probabilities in float32, the labels and their number
    tokens = setting.batch * setting.length
    loss = tokens * setting.vocab * 4 + tokens * 8 + 4
    kept = kept_bytes(model, setting.batch, setting.length) - loss
    assert planned(setting).memory["activations"].most == pytest.approx(kept, rel=0.015)


@pytest.mark.parametrize("recipe", [None, FP8, QFP8.lora(8), SOME], ids=lambda r: r.name if r else "none")
@pytest.mark.parametrize("tied", [True, False])
def test_states_are_exact(recipe, tied):
    config = DecoderConfig(layers=2, width=128, heads=4, kv_heads=2, vocab=320, ffn=200, tied=tied, qkv_bias=True)
    model = model_of(recipe, config=config)
    memory = plan(model, recipe=recipe, batch=1, length=8).memory
    held = sum(p.nbytes for p in model.parameters())
    weights = [t for t in memory.terms if t.name.startswith(("weights", "adapter"))]
    assert sum(t.bytes for t in weights) == held
    assert all(t.exact for t in weights)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert memory["gradients"].most == sum(p.nbytes for p in trained)
    assert memory["optimizer"].bytes == 2 * memory["gradients"].most
    fp32 = plan(model, recipe=recipe, state_dtype="fp32", master=True).memory
    assert fp32["optimizer"].bytes == 8 * sum(p.numel() for p in trained)
    assert fp32["master weights"].bytes == 4 * sum(p.numel() for p in trained)


def test_delayed_scales_remember_amaxes():
    model = model_of(FP8)
    (bank,) = banks_of(model)
    held = bank.history_HS.nbytes + bank.in_force_S.nbytes + bank.open_S.nbytes
    assert plan(model, recipe=FP8).memory["amax histories"].bytes == held


@pytest.mark.parametrize(("recipe", "each"), [("qfp8", 1.0002), ("qfp4", 0.5625), ("qnf4", 0.5159)])
def test_scales_count_where_only_a_number_of_parameters_is_known(recipe, each):
    weights = plan(8e9, recipe=recipe).memory["weights"]
    assert weights.bytes == pytest.approx(8e9 * each, rel=1e-4)
    assert weights.how.endswith("bytes a parameter, scales included")
    assert plan(8e9).memory["weights"].how == "2 bytes a parameter"


def test_a_stored_weight_of_odd_sizes():
    layer = Linear(130, 257)
    assert QFP8.storage is not None
    layer.store(QFP8.storage)
    held = layer.weight.nbytes + sum(scales.nbytes for scales in layer.stored_scales)
    assert module.stored_bytes(QFP8.storage, 257, 130) == held


def test_the_losss_chunks_are_the_kernels():
    def rows(tokens, vocabulary, device, itemsize, **place):
        weight = Weight("lm_head", n=vocabulary, k=64, count=1)
        head = Placement(weight, place.get("quantized", 0), place.get("rank", 0)) if place else None
        planned = loss_rows(tokens, vocabulary, device, 2, head)
        assert planned == loss_kernel.chunk_rows(tokens, vocabulary, device, itemsize), (tokens, vocabulary, device)
        return planned

    for tokens, vocabulary in itertools.product(
        (1, 100, 2048, 2100, 4096, 8192, 100_000), (64, 32_000, 151_936, 1 << 20, 1 << 25)
    ):
        rows(tokens, vocabulary, "cuda", 2)
        rows(tokens, vocabulary, "cuda", 12, rank=16)
        rows(tokens, vocabulary, "cuda", 12, quantized=1)
        rows(tokens, vocabulary, "cpu", 4)
    assert rows(8192, 151_936, "cuda", 2) == 2048


def test_sharding_divides_what_its_stage_says():
    names = ("optimizer", "gradients", "weights")
    for zero in (0, 1, 2, 3):
        memory = plan(8e9, gpus=8, zero=zero).memory
        plain = plan(8e9).memory
        assert [plain[name].bytes / memory[name].bytes for name in names] == [8 if zero > i else 1 for i in range(3)]


def test_eight_billion_parameters_with_bf16_states():
    # 65 GB of weights, gradients and moments: the figure of a full fine-tune of an 8B model
    assert sum(t.bytes for t in plan(8.19e9).memory.terms if t.exact) / 1e9 == pytest.approx(65.5, abs=0.1)


def test_optimizers():
    states = {name: plan(8e9, optimizer=name).memory for name in ("adamw", "adamw8bit", "sgd")}
    assert states["adamw"]["optimizer"].bytes == 8e9 * 4
    assert states["adamw8bit"]["optimizer"].bytes == pytest.approx(8e9 * 2, rel=0.02)
    with pytest.raises(KeyError):
        states["sgd"]["optimizer"]

    class AdamW:
        state_dtype = torch.float32

    assert plan(8e9, optimizer=AdamW()).memory["optimizer"].bytes == 8e9 * 8


def test_a_full_fine_tune_of_eight_billion_parameters_on_one_gpu():
    """Qwen3-8B in 141 GB with 8-bit moments and bf16 weights that are rounded stochastically, not with float32 moments."""
    config = {
        **{"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936},
        "tie_word_embeddings": False,
    }
    run: dict[str, Any] = {"batch": 4, "length": 4096, "gpu": "H200", "recipe": FP8}
    planned = plan(config, optimizer=AdamW8bit(lr=1e-4, rounding="stochastic"), **run)
    assert planned.fits()
    assert planned.memory.gib * 2**30 / 1e9 == pytest.approx(129.5, abs=0.1)
    held = sum(planned.memory[name].most for name in ("weights", "gradients", "optimizer"))
    assert held / 8.19e9 == pytest.approx(6 + 8 / 256, rel=0.001)
    assert plan(config, optimizer=AdamW(lr=1e-4), **run).memory.gib > 135
    assert not plan(config, optimizer=AdamW(lr=1e-4, state_dtype=torch.float32), **run).fits()
    assert not plan(config, state_dtype="fp32", master=True, **{**run, "batch": 1}).fits()


def test_eight_bit_moments_are_what_the_optimizer_holds():
    model = Decoder(CONFIG)
    optimizer = AdamW8bit(model.parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    held = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    # small tensors keep float32 moments, and each has its step
    assert plan(model, optimizer=optimizer).memory["optimizer"].bytes == pytest.approx(held, rel=0.01)


def test_momentum_of_sgd_is_a_state_that_is_not_planned():
    model = Decoder(CONFIG)
    for momentum in (0.0, 0.9):
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        for optimizer in (plain, Spec(torch.optim.SGD, {"lr": 0.1, "momentum": momentum})):
            assert plan(model, optimizer=optimizer, training=False).memory.gib == plan(model, training=False).memory.gib
            if momentum:
                with refused(ValueError):
                    plan(model, optimizer=optimizer)
            else:
                assert "optimizer" not in {term.name for term in plan(model, optimizer=optimizer).memory.terms}
    first, *rest = model.parameters()
    groups: list[dict[str, Any]] = [{"params": rest}, {"params": [first], "momentum": 0.9}]
    with refused(ValueError):
        plan(model, optimizer=torch.optim.SGD(groups, lr=0.1))


def test_fits():
    planned = plan(CONFIG, batch=1, length=128, gpu="A100")
    assert planned.fits()
    assert planned.fits(planned.memory.gib)
    assert not planned.fits(planned.memory.gib * 0.99)
    assert planned.memory.gib == pytest.approx(planned.memory.exact_gib + planned.memory.approximate_gib)
    assert plan(405e9).fits(80) is False
    with refused(ValueError):
        plan(CONFIG).fits(80)
    with refused(ValueError):  # then it has those of a typical shape
        plan(1e9).fits(80)
    with refused(ValueError):
        plan(CONFIG, batch=1, length=8).fits()
    with refused(ValueError):
        planned.fits(0)


def test_logits_in_pieces_or_whole():
    wide = DecoderConfig(layers=1, width=64, heads=2, kv_heads=2, vocab=50_000, ffn=64)
    fused, whole = (plan(wide, batch=4, length=1024, logits=how).memory["logits"].most for how in ("fused", "whole"))
    # bf16 logits, their float32 copy, float32 log-probabilities, and the loss itself
    assert whole == 4096 * 50_000 * 10 + 4
    assert fused < whole / 8


def test_the_kv_cache_counts_where_it_is_held():
    tokens = BATCH * LENGTH
    training = plan(CONFIG, batch=BATCH, length=LENGTH).memory
    generating = plan(CONFIG, batch=BATCH, length=LENGTH, training=False).memory
    assert training["KV cache"].bytes == generating["KV cache"].bytes == 2 * 4 * 4 * 32 * 2 * tokens
    assert (training["KV cache"].counted, generating["KV cache"].counted) == (False, True)
    assert generating.largest.name == "weights"


def test_a_peak_is_the_fullest_moment_and_its_terms_sum_to_it():
    few = plan(CONFIG, batch=1, length=64).memory
    many = plan(replace(CONFIG, vocab=32_000), batch=64, length=256).memory
    assert few.peak_phase in ("backward", "optimizer")
    assert few["gradients"].bytes > 0.9 * few["gradients"].most
    assert many.peak_phase == "loss"
    assert many["gradients"].bytes == 0  # made by a backward that has not begun
    for memory in (few, many):
        held = [t for t in memory.terms if t.counted and t.name != "slack"]
        assert sum(t.gib for t in held) == pytest.approx(memory.peak_gib)
        assert memory.peak_gib == pytest.approx(max(p.gib for p in memory.phases))
        assert memory.gib == pytest.approx(1.1 * memory.peak_gib)
        assert [p.name for p in memory.phases] == list(module.PHASES)
    assert plan(CONFIG).memory.peak_phase is None


@pytest.mark.parametrize("gpu", [None, "H100"])
@pytest.mark.parametrize("layers", ["surokit", "transformers"])
@pytest.mark.parametrize("what", ["batch", "length"])
def test_more_tokens_never_take_less(gpu, layers, what):
    """What a search for the largest batch relies on. Few tokens may all take the same: the optimizer's step is fuller then."""
    peaks = [
        plan(CONFIG, gpu=gpu, layers=layers, recipe=FP8, **{"batch": 2, "length": 128, what: n}).memory.peak_gib
        for n in (*range(1, 20), *range(20, 5000, 211))
    ]
    assert all(b >= a * (1 - 1e-12) for a, b in itertools.pairwise(peaks))
    assert peaks[-1] > peaks[0]


def test_a_second_micro_batch_meets_the_gradients_of_the_first():
    one, two = (plan(CONFIG, batch=8, length=256, accumulate=n).memory for n in (1, 2))
    assert two["gradients"].bytes == two["gradients"].most == one["gradients"].most
    assert two.peak_gib - one.peak_gib == pytest.approx(one["gradients"].most_gib, rel=0.01)


def test_recompute_keeps_each_layers_input():
    deep = DecoderConfig(layers=40, width=256, heads=8, kv_heads=4, vocab=1024, ffn=704)
    none, full = (plan(deep, batch=2, length=256, recompute=how).memory for how in ("none", "full"))
    assert full["activations"].most == pytest.approx(40 * 512 * 256 * 2, rel=0.05)
    at_loss = [next(p.gib for p in m.phases if p.name == "loss") for m in (none, full)]
    assert at_loss[0] - at_loss[1] == pytest.approx(none["activations"].most_gib - full["activations"].most_gib)


def test_sharded_weights_and_gradients_are_whole_for_a_layer():
    run: dict[str, Any] = {"batch": 1, "length": 256, "gpus": 8}
    stages = [plan(CONFIG, zero=zero, **run).memory for zero in (0, 1, 2, 3)]
    shape = plan(CONFIG).shape
    assert shape is not None
    layer = sum(w.n * w.k for w in shape.projections)
    embeddings = 2 * 1024 * 256 * 2
    assert stages[2]["gathered layers"].bytes == layer * 2
    assert stages[3]["gathered layers"].bytes == 3 * layer * 2 + embeddings
    for low, high in itertools.pairwise(reversed(stages[:2])):
        assert low.peak_gib < high.peak_gib
    with pytest.raises(KeyError):
        stages[1]["gathered layers"]
    assert [m["gradients"].most * shards for m, shards in zip(stages, (1, 1, 8, 8))] == [
        stages[0]["gradients"].most
    ] * 4


def test_float32_states_widen_a_chunk_at_a_time():
    small, large = (plan(n, batch=None, state_dtype="fp32").memory for n in (1e8, 1e9))
    assert large["optimizer"].bytes == 10 * small["optimizer"].bytes
    step = plan(CONFIG, batch=1, length=64, state_dtype="fp32").memory
    plain = plan(CONFIG, batch=1, length=64).memory
    masters = plan(CONFIG, batch=1, length=64, state_dtype="fp32", master=True).memory
    optimizer = [next(p.bytes for p in m.phases if p.name == "optimizer") for m in (step, plain, masters)]
    trained = plan(CONFIG).parameters
    # moments of 4 bytes in place of 2, and float32 copies of weights and gradients while they are updated
    assert optimizer[0] - optimizer[1] == pytest.approx(trained * (2 * 2 + 8))
    # masters are as wide as the moments
    assert optimizer[2] - optimizer[1] == pytest.approx(trained * (2 * 2 + 4))


# -- the tape, by hand


def test_the_tape_of_two_products_by_hand():
    """x (10) -> y = f(x) (20, keeps x) -> z = g(y) (5, keeps y, weight 7)."""
    t = Tape()
    x = t.new(10, needs=True)
    y = t.run((x,), 20, keeps=(x,), drops=(x,))
    z = t.run((y,), 5, keeps=(y,), weight=7, scratch=3, drops=(y,))
    assert t.moments["forward"].bytes == 10 + 20 + 5 + 3
    t.drop(z)
    t.backward(z, 5)
    # x, y, the gradient of z, and what its backward makes: the gradients of y and of the weight
    assert t.moments["backward"].bytes == 10 + 20 + 5 + 20 + 7
    # in the end the gradients of the weight and of x; y went first, then x
    assert t.held == {tape.KEPT: 0, tape.LOGITS: 0, tape.GRADIENTS: 7, tape.PASSING: 10}


def test_the_tape_shares_the_gradient_of_a_sum():
    """z = x + f(x): the sum hands one gradient to both, and f's is added to it in place once f's own has gone."""
    t = Tape()
    x = t.new(10, needs=True)
    y = t.run((x,), 10, keeps=(x,))
    z = t.run((x, y), 10, passes=True, drops=(x, y))
    t.drop(z)
    t.backward(z, 10)
    assert t.moments["backward"].bytes == 10 + 10 + 10  # x, the shared gradient, f's own of x
    assert t.held[tape.PASSING] == 10


SIZES = st.integers(1, 50)


@given(kept=SIZES, inner=SIZES, weight=st.integers(0, 50), scratch=SIZES, times=st.integers(1, 12), again=st.booleans())
def test_like_layers_are_the_same_one_by_one(kept, inner, weight, scratch, times, again):
    def replayed(one_by_one):
        t = Tape()

        def block(x):
            y = t.run((x,), inner, keeps=(x,), extra=kept, weight=weight, scratch=scratch)
            z = t.run((y,), 10, keeps=(y,), back_scratch=scratch, drops=(y,))
            out = t.run((x, z), 10, passes=True, drops=(x, z))
            return out

        def layer(x):
            return t.recomputed(block, x) if again else block(x)

        x = t.new(10, needs=True)
        if one_by_one:
            for _ in range(times):
                x = layer(x)
        else:
            x = t.repeated(layer, x, times)
        loss = t.run((x,), 4, keeps=(x,), drops=(x,))
        t.drop(loss)
        t.backward(loss, 4)
        return {m.phase: m.bytes for m in t.moments.values()}, t.held

    assert replayed(True) == replayed(False)


# -- against the bytes that a step takes


def test_the_meter_counts_what_is_allocated():
    meter = Meter(torch.device("cpu"))
    with meter.listening():
        held = torch.empty(1000, 256)
        meter.mark("first")
        passing = torch.empty(500, 256)
        del passing
        meter.mark("second")
        meter.mark("end")
    assert held.nbytes == 1_024_000
    assert meter.peaks == [("first", 1_024_000 + 512_000), ("second", 1_024_000)]
    assert meter.left == held.nbytes


def test_a_product_counts_by_what_it_leaves():
    def event(name, start, end=None, size=0):
        reading = {"name": name, "start_ns": start, "end_ns": end or start, "nbytes": size}
        return SimpleNamespace(**{key: lambda value=value: value for key, value in reading.items()})

    def allocated(at, *sizes):
        return [event("[memory]", at + i, size=size) for i, size in enumerate(sizes)]

    def peaks(operator):
        meter = Meter(torch.device("cpu"))
        marks = [event("surokit.memory:step", 5), event("surokit.memory:end", 50)]
        product = [event(operator, 10, 20), *allocated(11, 1000, 7, -1000)]  # scratch, the result, scratch released
        meter.read([*marks, *product, *allocated(0, 40), *allocated(30, 3, -3, -40)])
        assert meter.left == 7
        return meter.peaks

    for operator in PRODUCTS:
        assert peaks(operator) == [("step", 40 + 7 + 3)]
    assert peaks("aten::add") == [("step", 40 + 1000 + 7)]


def test_a_model_leaves_nothing_behind():
    """What libraries keep between calls is there when a second model comes; of a leak each model would leave its own."""
    setting = Setting("qnf4 + LoRA", recipe="qnf4", rank=8, layers=1, vocab=256)
    first, second = measure(setting), measure(setting)
    assert second.left == 0
    assert (first.rest, first.phases) == (second.rest, second.phases)


FUSED: dict[str, Any] = {"fusion": "fused", "qk_norm": True, "vocab": 512, "layers": 3}
STEPS: tuple[tuple[str | None, int, int, tuple[Recompute, ...]], ...] = (
    (None, 0, 128, ("none", "full")),
    ("fp8", 0, 128, ("none",)),
    ("bf16", 8, 128, ("selective",)),
    ("qfp8", 8, 256, ("none",)),
)


@pytest.mark.parametrize(
    "setting",
    [
        Setting("bf16", layers=3),
        Setting("fp32, accumulate", dtype="fp32", accumulate=2, layers=2),
        Setting(
            "fp8, adamw8bit, few tokens",
            recipe="fp8",
            optimizer="adamw8bit",
            batch=1,
            length=64,
            layers=2,
            vocab=1024,
        ),
        Setting("qnf4 + LoRA", recipe="qnf4", rank=8, layers=2),
        Setting("float32 moments", states="fp32", batch=1, length=64, layers=2),
        Setting("llama, recompute", family="llama", recompute="full", layers=4, vocab=512, length=128),
        Setting("qwen3 + LoRA", family="qwen3", recipe="bf16", rank=4, layers=2),
        *(
            Setting(f"fused {recipe}, {how}", recipe=recipe, rank=rank, length=length, recompute=how, **FUSED)
            for recipe, rank, length, hows in STEPS
            for how in hows
        ),
        Setting("fused fp8 + LoRA, W' cached", recipe="fp8", rank=8, transposed="cached", **FUSED),
    ],
    ids=lambda setting: setting.name,
)
def test_the_peak_of_a_step(setting):
    measured, memory = measure(setting), planned(setting).memory
    assert memory.peak_gib * 2**30 == pytest.approx(measured.peak, rel=0.05)


UNDROPPED = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
OTHERS: dict[str, dict[str, Any]] = {
    "phi3": {},
    "mixtral": {},
    "qwen3_moe": {},
    "deepseek_v3": {},
    "gpt2": UNDROPPED,
    "gemma2": {"sliding_window": 64},
    "gemma3_text": {"sliding_window": 64, "sliding_window_pattern": 2},
    "gpt_oss": {},
    "mistral": {"sliding_window": 64},
}


def peak_of(model, config, *, batch=4, length=128, **options):
    """Predicted and measured peak, in bytes, of a step of what `model()` makes in bf16, planned by its config."""

    def made():
        torch.manual_seed(0)
        found = model()
        return found if isinstance(found, Decoder) else found.to(torch.bfloat16)

    theirs = not isinstance(config, DecoderConfig)
    setting = Setting("", family="llama" if theirs else "decoder", batch=batch, length=length, vocab=256)
    memory = plan(config, batch=batch, length=length, dtype="bf16", gpu="cpu", **options).memory
    return memory.peak_gib * 2**30, measure(setting, model_of=made).peak


@pytest.mark.parametrize("family", OTHERS)
def test_the_peak_of_other_families(family):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "intermediate_size": 320, "vocab_size": 256}
    config = families.config_of(family, **({} if family == "gpt2" else sizes))
    for name, value in OTHERS[family].items():
        setattr(config, name, value)
    config = type(config)(**{**config.to_dict(), "layer_types": None})

    def model():
        return transformers.AutoModelForCausalLM.from_config(config)

    planned, measured = peak_of(model, config, layers="transformers")
    assert planned == pytest.approx(measured, rel=0.06)


@pytest.mark.parametrize(
    "changes", [{"experts": 4}, {"experts": 8, "expert_ffn": 64, "qk_norm": True, "dense_layers": (0,)}], ids=len
)
def test_the_peak_of_our_own_experts(changes):
    """Their layers are counted as those of transformers, which hold somewhat more; the loss is ours."""
    config = DecoderConfig(**{**asdict(CONFIG), "vocab": 4096, **changes})
    planned, measured = peak_of(lambda: Decoder(config, dtype=torch.bfloat16), config)
    assert measured < planned < 1.15 * measured


def test_the_peak_behind_a_window():
    """A mask, which every layer keeps as numbers, where the window is shorter than the sequence."""
    config = DecoderConfig(**{**asdict(CONFIG), "sliding_window": 64, "max_length": 512})
    planned, measured = peak_of(lambda: Decoder(config, dtype=torch.bfloat16), config, batch=2, length=512)
    assert planned == pytest.approx(measured, rel=0.04)
    masks = [plan(config, batch=2, length=n).memory["activations"].most for n in (64, 128)]
    # on a GPU, each layer: the mask in bf16, and keys and values for 8 heads in place of 4
    assert masks[1] - 2 * masks[0] == 4 * (128 * 128 * 2 + 2 * 256 * 128 * 2)


@pytest.mark.parametrize(
    "recipe",
    [FP8.also("lm_head"), BF16.lora(8, targets=(*PROJECTIONS, "lm_head")), QFP8.also("lm_head").lora(8)],
    ids=lambda r: r.name,
)
def test_the_peak_of_a_head_that_is_more_than_a_weight(recipe):
    recipe = recipe.decode_once(False)
    config = DecoderConfig(**{**asdict(CONFIG), "layers": 1, "vocab": 16_384})

    def model():
        made = Decoder(config, dtype=torch.bfloat16)
        apply(made, recipe)
        return made

    planned, measured = peak_of(model, config, batch=2, length=256, recipe=recipe)
    assert planned == pytest.approx(measured, rel=0.08)


@pytest.mark.parametrize("logits", ["whole", "fused"])
@pytest.mark.parametrize("family", ["decoder", "llama"])
def test_the_peak_of_a_forward_alone(family, logits):
    """Over all tokens with their logits, and as generation begins: with those of the last token, and a cache."""
    setting = Setting("", family=family, batch=4, length=512)
    meter = Meter(torch.device("cpu"))
    with meter.listening(), torch.no_grad():
        model: Any = bench.model_of(setting).eval()
        ids = torch.randint(setting.vocab, (setting.batch, setting.length))

        def forward(model, ids):
            if family == "llama":
                model(input_ids=ids, use_cache=True, logits_to_keep=int(logits == "fused"))
            else:
                cache = KeyValueCache(model.config, 4, 512, model.device, torch.bfloat16)
                hidden = model.model(ids, None, cache)
                model.lm_head(hidden if logits == "whole" else hidden[:, -1])

        forward(model, ids)  # what libraries keep between calls is there from here on
        meter.mark("forward")
        forward(model, ids)
        meter.mark("end")
        del model, ids
        gc.collect()
    options: dict[str, Any] = {"batch": 4, "length": 512, "gpu": "cpu", "logits": logits, "training": False}
    options["layers"] = "transformers" if setting.theirs else "surokit"
    memory = plan(bench.config_of(setting), **options).memory
    assert memory.peak_gib * 2**30 == pytest.approx(meter.peaks[0][1] - meter.left, rel=0.10)
    assert memory.peak_phase == "forward"
    assert memory.gib == pytest.approx(1.1 * memory.phases[0].gib)
    assert {t.name for t in memory.terms}.isdisjoint({"gradients", "optimizer"})


def test_attention_without_a_fused_kernel_on_a_gpu():
    """float32 with grouped heads: ours repeats keys and values (a half of the heads here), transformers keeps all scores."""
    tokens, layers, heads, width = BATCH * LENGTH, 4, 8, 256
    config = {**CONFIG.to_hf(), "model_type": "llama"}
    several = {**config, "num_key_value_heads": heads}

    def kept(config, dtype, layers):
        memory = plan(config, batch=BATCH, length=LENGTH, dtype=dtype, gpu="H100", layers=layers).memory
        return memory["activations"]

    assert kept(config, "fp32", "surokit").most == kept(several, "fp32", "surokit").most
    assert kept(config, "bf16", "surokit").most == kept(several, "bf16", "surokit").most - 2 * layers * tokens * width
    ungrouped = kept(several, "fp32", "transformers")
    scores = kept(config, "fp32", "transformers")
    assert scores.most - ungrouped.most >= layers * tokens * heads * LENGTH * 4 - layers * tokens * heads * 4
    assert "all of attention's scores, for want of a fused kernel" in scores.how
    assert "scores" not in ungrouped.how + kept(config, "bf16", "transformers").how


def test_one_gpu_shards_nothing_and_float32_weights_are_their_own_masters():
    alone = plan(8e9, zero=3, dtype="fp32", master=True).memory
    assert alone.terms == plan(8e9, dtype="fp32").memory.terms
    assert not any("ZeRO" in t.how for t in alone.terms)


RAW, RAW_FUSED = (
    json.loads((Path(__file__).parents[2] / "docs" / "measurements" / name).read_text(encoding="utf-8"))
    for name in ("memory-cpu.json", "memory-fused-cpu.json")
)


@pytest.mark.parametrize(("raw", "settings"), [(RAW, bench.SETTINGS), (RAW_FUSED, bench.FUSED)], ids=["eager", "fused"])
def test_the_committed_measurements_are_many_and_near(raw, settings):
    assert len(raw["memory"]) >= 20
    assert [row["name"] for row in raw["memory"]] == [setting.name for setting in settings]
    ratios = {row["name"]: bench.ratio(row) for row in raw["memory"]}
    if not raw["environment"].get("cpu_bf16"):
        # a processor without bf16 instructions decodes a weight for few tokens in pieces, which a plan takes as whole
        assert ratios.pop("fused qfp8 + LoRA, few tokens", 1.0) < 1.2
    assert {name: r for name, r in ratios.items() if not 0.9 < r < 1.1} == {}
    assert raw["environment"]["torch"]
    assert bench.table(raw).count("\n") > 20


@pytest.mark.parametrize("raw", [RAW, RAW_FUSED], ids=["eager", "fused"])
def test_the_committed_predictions_are_todays(raw):
    for row in raw["memory"]:
        setting = Setting(name=row["name"], **row["setting"])
        assert bench.predicted(setting) == pytest.approx(row["predicted"], rel=1e-3), setting.name
