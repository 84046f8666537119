"""FLOPs against torch's own counter, and against the figures of published rooflines."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from surokit import planner
from surokit.planner.counts.flops import count_flops, placements, repeated_products
from surokit.planner.inputs.configs import read_shape
from surokit.planner.inputs.shape import Shape
from surokit.recipe import BF16, FP8, MXFP8, PROJECTIONS, QFP8
from tests.planner.families import FAMILIES, config_of, fields, model_of

QWEN3: dict[str, dict[str, Any]] = {
    "0.6B": {"layers": 28, "width": 1024, "heads": 16, "ffn": 3072, "tied": True},
    "1.7B": {"layers": 28, "width": 2048, "heads": 16, "ffn": 6144, "tied": True},
    "4B": {"layers": 36, "width": 2560, "heads": 32, "ffn": 9728, "tied": True},
    "8B": {"layers": 36, "width": 4096, "heads": 32, "ffn": 12288, "tied": False},
}


def step_flops(config, *, batch, length, recipe=None):
    """FLOPs of one training step as the planner counts them, by torch's convention."""
    return batch * length * count_flops(read_shape(config)[0], length=length, attention="full", recipe=recipe).model


def plan(what, **given):
    """Untyped, so that figures that may be None are used as they are."""
    return planner.plan(what, **given)


def qwen3(name: str) -> Shape:
    return Shape(**QWEN3[name], kv_heads=8, head_dim=128, vocab=151936, qk_norm=True)


# GFLOP a token at 2048 tokens: full training, LoRA r16 on all seven projections
@pytest.mark.parametrize(
    ("name", "full", "lora"), [("0.6B", 4.28, 3.15), ("1.7B", 11.0, 7.7), ("4B", 25.9, 18.1), ("8B", 47.2, 32.3)]
)
def test_rooflines_of_qwen3(name, full, lora):
    shape = qwen3(name)
    assert count_flops(shape, length=2048).model == pytest.approx(full * 1e9, rel=0.005)
    assert count_flops(shape, length=2048, recipe=BF16.lora(16)).model == pytest.approx(lora * 1e9, rel=0.005)


def test_full_recompute_repeats_the_layers_but_not_the_head():
    compute = count_flops(qwen3("0.6B"), length=2048, recipe=BF16.lora(16), recompute="full")
    adapter = sum(p.recompute for p in compute.products if "lora" in p.module)
    assert compute.recompute - adapter == pytest.approx(1.12e9, rel=0.005)
    # the last product of all is no tensor's that backward reads
    assert [p.module for p in compute.products if not p.recompute] == ["mlp.down_proj.lora_B", "lm_head"]
    assert compute.hardware == compute.model + compute.recompute


def test_selective_recompute_keeps_attention_and_every_second_product():
    """As torchtitan's selective checkpointing by operator."""
    compute = count_flops(qwen3("0.6B"), length=2048, recompute="selective")
    again = ["self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj"]
    assert [p.module for p in compute.products if p.recompute] == again
    assert compute.recompute == sum(p.forward for p in compute.products if p.module in again)


def test_selective_recompute_goes_by_the_products_of_a_layer():
    """A layer with experts begins anew, and a matrix that holds several is one."""
    experts = read_shape(fields("mixtral"))[0]
    again = repeated_products(experts.projections, "selective")
    names = [w.name for w in experts.projections if 0 in w.layers]
    assert again == set(names[1::2])
    assert {name for name in again if "router" in name or "gate" in name.rpartition(".")[2]} <= set(names[1::2])
    mixed = read_shape(fields("deepseek_v2"))[0]
    for layer in range(mixed.layers):
        names = [w.name for w in mixed.projections if layer in w.layers]
        assert {name for name in names if name in repeated_products(mixed.projections, "selective")} == set(names[1::2])
    assert repeated_products(experts.projections, "none") == frozenset()


def test_selective_recompute_of_a_number_is_that_of_a_typical_shape():
    given = {"batch": 1, "length": 2048, "tokens": 1e9, "gpu": "H100", "mfu": 0.4}
    hfu = {how: plan(8e9, recompute=how, **given).time.hfu for how in ("none", "selective", "full")}
    assert hfu["none"] == pytest.approx(0.4)
    whole = 0.4 * 4 / 3
    # torch stops before the product that a layer ends with, about a quarter of it
    assert hfu["full"] == pytest.approx(whole - (whole - 0.4) / 4, rel=0.01)
    assert hfu["selective"] == pytest.approx(0.4 + (whole - 0.4) / 3, rel=0.02)


def test_exact_formula():
    shape, length = qwen3("8B"), 4096
    weights = shape.parameters - shape.lookup_parameters - shape.small_parameters
    attention = shape.layers * length * shape.query_width
    assert count_flops(shape, length=length).model == 6 * weights + 6 * attention
    assert count_flops(shape, length=length, attention="full").model == 6 * weights + 12 * attention
    assert count_flops(shape, length=None).model == 6 * weights
    forward_only = count_flops(shape, length=length, training=False, recompute="full")
    assert (forward_only.model, forward_only.recompute) == (2 * weights + 2 * attention, 0)


def test_a_recipe_shows_in_the_products_it_reaches():
    products = count_flops(qwen3("8B"), length=128, recipe=FP8.keep_last(6)).products
    up = {p.kinds: p.count for p in products if p.module == "mlp.up_proj"}
    assert up == {("tensor",) * 3: 30, (None,) * 3: 6}
    assert {p.kinds for p in products if p.module in ("lm_head", "attention.scores")} == {(None,) * 3}
    stored = count_flops(qwen3("8B"), length=128, recipe=QFP8)
    assert {p.kinds for p in stored.products} == {(None,) * 3}  # QFP8's own products are in bfloat16
    assert all(p.grad_weight == 0 for p in stored.products if "lora" not in p.module)


def test_modules_and_gemms_sum_to_the_plan():
    p = plan(fields("llama"), batch=2, length=64, recompute="full", recipe=BF16.lora(4))
    modules, gemms = p.modules(), p.gemms()
    assert modules["forward"].sum() + modules["backward"].sum() == p.flops_per_token
    assert modules["share"].sum() == pytest.approx(1)
    assert gemms["recompute"].sum() == modules["recompute"].sum() == p.compute.recompute
    assert list(modules["module"]) == ["self_attn", "mlp", "lm_head", "attention"]


# -- against torch's own counter, over transformers' own models


class Adapted(torch.nn.Module):
    """y = W x + B A x with a frozen W, in plain torch."""

    def __init__(self, base, rank):
        super().__init__()
        self.base = base
        self.a = torch.nn.Linear(base.in_features, rank, bias=False)
        self.b = torch.nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def adapt(model, lora):
    """Freeze the model and put adapters on its linear layers that `lora` means."""
    model.requires_grad_(False)
    found = [
        (path, child)
        for path, child in model.named_modules()
        if isinstance(child, torch.nn.Linear) and lora.meant(path)
    ]
    for path, child in found:
        model.set_submodule(path, Adapted(child, lora.rank))
    return len(found)


def counted(model, *, batch, length):
    """FLOPs of one training step as torch counts them.

    Attention runs as plain products ("eager"), so every score is counted, masked or not: the convention "full". (The fused CPU
    kernel is not counted at all, and fused GPU kernels count the scores that their backward forms again.) Experts run one by one
    over the tokens sent to them; grouped kernels are not counted by torch, and batched ones copy weights for each token.
    """
    ids = torch.randint(3, 90, (batch, length))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_against_torchs_flop_counter(family, tied):
    config = config_of(family, tie_word_embeddings=tied)
    assert step_flops(config, batch=2, length=64) == counted(model_of(config), batch=2, length=64)


@settings(max_examples=15, deadline=None)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    layers=st.integers(1, 4),
    ffn=st.integers(1, 70),
    chosen=st.integers(1, 3),
    length=st.integers(2, 20),
    batch=st.integers(1, 3),
)
def test_any_sizes_against_torchs_flop_counter(family, layers, ffn, chosen, length, batch):
    changes = {"num_experts_per_tok": chosen} if "num_experts_per_tok" in FAMILIES[family] else {}
    inner = {"moe_intermediate_size": ffn} if "moe_intermediate_size" in FAMILIES[family] else {}
    config = config_of(family, num_hidden_layers=layers, intermediate_size=ffn, **changes, **inner)
    given = {"batch": batch, "length": length}
    assert step_flops(config, **given) == counted(model_of(config), **given)


LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama", PROJECTIONS),
        ("llama", ("q_proj", "v_proj")),
        ("llama", ("k_proj",)),
        ("llama", ("o_proj",)),  # nothing below it trains: no gradient through the first layer's attention
        ("llama", ("down_proj",)),
        ("llama", ("lm_head",)),
        ("qwen3", PROJECTIONS),
        ("gemma2", ("gate_proj", "up_proj")),
        ("phi3", ("qkv_proj",)),
        ("phi3", PROJECTIONS),  # of which it has o_proj, down_proj, and gate and up in one
        ("llama", ("self_attn.*",)),
        ("llama", ("layers.2.*",)),  # nothing below it trains
        ("llama", ("layers.1.*.q_proj", "layers.2.mlp.*", "layers.0.*.down_proj")),
        ("mixtral", ("layers.1.self_attn.*",)),
        ("qwen3_moe", ("q_proj", "k_proj", "v_proj", "o_proj")),
        ("mixtral", ("v_proj",)),
        ("gpt_oss", ("o_proj",)),
        ("qwen2_moe", ("shared_expert_gate",)),
        ("deepseek_v3", (*LATENT, "o_proj")),
        ("deepseek_v3", ("q_b_proj",)),
        ("deepseek_v3", ("kv_a_proj_with_mqa",)),
        ("deepseek_v3", ("kv_b_proj",)),
    ],
)
def test_adapters_against_torchs_flop_counter(family, targets):
    config = config_of(family)
    model = model_of(config)
    recipe = BF16.lora(8, targets=targets)
    assert adapt(model, recipe.adapter)
    assert step_flops(config, batch=1, length=48, recipe=recipe) == counted(model, batch=1, length=48)


def test_adapters_on_the_matrices_of_experts():
    """By hand: each expert is taken as linear layers with adapters of their own, of which a token passes those it is sent to."""
    shape = read_shape(fields("mixtral"))[0]
    targets = ("gate_proj", "up_proj", "down_proj")
    compute = count_flops(shape, length=None, recipe=BF16.lora(8, targets=targets))
    adapters = [p for p in compute.products if "lora" in p.module]
    layers, experts, chosen, d, f = 3, 4, 2, 64, 176
    assert {p.count for p in adapters} == {layers * experts}
    assert {p.active for p in adapters} == {layers * chosen}
    assert sum(p.forward for p in adapters) == 2 * 8 * 3 * (d + f) * layers * chosen
    # the first layer's gate and up read what nothing below trains: no gradient beyond lora_A there
    a = sum(p.grad_input for p in adapters if p.module.endswith("lora_A"))
    assert a == 2 * 8 * chosen * (2 * d * (layers - 1) + f * layers)


def test_where_no_adapter_goes_nothing_trains():
    compute = count_flops(read_shape(fields("gpt2"))[0], length=64, recipe=BF16.lora(8))
    assert compute.backward == 0
    assert not any("lora" in p.module for p in compute.products)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_6nd_takes_the_active_parameters(family):
    """Without attention's products a token costs 6 FLOPs an active parameter of a matrix: the router's too, not the lookup's."""
    shape = read_shape(fields(family))[0]
    small, experts = shape.small_parameters, shape.experts
    assert experts is not None
    if experts.bias:
        small -= len(experts.layers) * experts.idle * (2 * experts.ffn + shape.width)
    assert count_flops(shape, length=None).model == 6 * (shape.active_parameters - shape.lookup_parameters - small)
    for product in count_flops(shape, length=None).products:
        assert product.forward == 2 * product.n * product.k * product.active


def test_deepseek_v3_by_hand():
    """671B parameters at 4096 tokens, from the numbers of its report (arXiv 2412.19437, section 4.2), in GFLOP a token."""
    shape = read_shape({"model_type": "deepseek_v3", **DEEPSEEK_V3})[0]
    layers, heads, d = 61, 128, 7168
    attention = d * 1536 + 1536 * heads * 192 + d * 576 + 512 * heads * 256 + heads * 128 * d
    dense, routed = 3 * d * 18432, 256 * d + 9 * 3 * d * 2048
    matrices = layers * attention + 3 * dense + 58 * routed + d * 129280
    assert count_flops(shape, length=None).model == 6 * matrices
    products = {p.module: p for p in count_flops(shape, length=4096).products}
    assert products["attention.scores"].forward == layers * 4096 * heads * 192
    assert products["attention.values"].forward == layers * 4096 * heads * 128
    assert shape.cache_width == 576
    # its report: "each token activates 37B"
    assert shape.active_parameters == pytest.approx(37e9, rel=0.02)


DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "vocab_size": 129280,
}


# -- recipes over experts and unusual matrices


def test_what_a_recipe_reaches_of_a_mixture():
    shape = read_shape(fields("qwen3_moe"))[0]  # blocks 0 and 2 are routed
    places = {p.weight.name: p for p in placements(shape, FP8.keep_first(1))}
    assert places["mlp.gate"].quantized == 0  # the router
    expert = places["mlp.experts.up_proj"]
    assert (expert.quantized, expert.layers) == (6, frozenset({2}))
    assert places["mlp.up_proj"].layers == frozenset({1})
    assert places["self_attn.q_proj"].layers == frozenset({1, 2})
    assert places["lm_head"].quantized == 0
    kept = {p.weight.name: p for p in placements(shape, FP8.keep("*.experts.*"))}
    assert kept["mlp.experts.up_proj"].quantized == 0
    assert kept["self_attn.q_proj"].quantized == 3
    kinds = {p.module: p.kinds for p in count_flops(shape, length=8, recipe=MXFP8.also("lm_head")).products}
    assert kinds["mlp.experts.down_proj"] == kinds["lm_head"] == ("mx",) * 3
    assert kinds["mlp.gate"] == (None,) * 3


def test_the_first_layers_missing_gradient_is_booked_where_its_products_are():
    """keep_last(2) leaves the first layer quantized: its q, k and v have no input gradient, those kept in bf16 all have."""
    recipe = MXFP8.keep_last(2).lora(4)
    products = [
        p for p in count_flops(qwen3("0.6B"), length=None, recipe=recipe).products if p.module == "self_attn.q_proj"
    ]
    by_kind = {p.kinds: p for p in products}
    one = 2 * 1024 * 2048
    assert by_kind[("mx",) * 3].grad_input == 25 * one
    assert by_kind[(None,) * 3].grad_input == 2 * one


def test_gpt2s_layers_are_no_linear_layers_and_stay_as_they_are():
    """transformers makes them of Conv1D, which `surokit.apply` leaves alone."""
    places = placements(read_shape(fields("gpt2"))[0], FP8.also("lm_head"))
    assert {p.weight.name for p in places if p.quantized} == {"lm_head"}


# -- sliding windows


def windowed(length, window, convention):
    """Attention's share of the forward pass, one head of width 1 and one layer: keys a token, twice for each of two products."""
    shape = Shape(1, 8, 1, 1, 1, 8, 8, sliding_window=window)
    products = count_flops(shape, length=length, attention=convention).products
    return sum(p.forward for p in products if p.module.startswith("attention")) / 4


@pytest.mark.parametrize(("length", "window"), [(64, 8), (64, 63), (4096, 512), (100, 7)])
def test_a_window_counts_the_band_that_the_mask_leaves(length, window):
    i = torch.arange(length)
    apart = i[:, None] - i[None, :]
    band = ((apart >= 0) & (apart < window)).sum().item() / length
    whole = (apart >= 0).sum().item() / length
    # the diagonal counts half, as length / 2 has it, and so does the band's other edge, where there is one
    edges = 0.5 - 0.5 * (length - window) / length
    assert windowed(length, window, "causal") == pytest.approx(band - edges, abs=0.5)
    assert windowed(length, window, "full") == window
    assert windowed(length, length, "causal") == windowed(length, 9 * length, "causal") == length / 2
    assert windowed(length, None, "causal") == length / 2 == whole - 0.5


def test_windows_of_some_layers_only():
    """Gemma 3 has one full layer in six: at 32 times its window the others cost next to nothing."""
    shape = read_shape(fields("gemma3_text", num_hidden_layers=12, sliding_window=64))[0]
    products = [p for p in count_flops(shape, length=2048).products if p.module == "attention.scores"]
    by_keys = {p.n: p for p in products}
    assert {n: p.count for n, p in by_keys.items()} == {64: 10 * 4, 2048: 2 * 4}
    assert by_keys[2048].forward == 2 * 2048 * 4 * 32
    assert by_keys[64].forward == 10 * round((2 * 64 - 64 * 64 / 2048) * 4 * 32)
    short = count_flops(shape, length=64)
    assert [p.count for p in short.products if p.module == "attention.scores"] == [12 * 4]
    again = {p.module: p.recompute for p in count_flops(shape, length=2048, recompute="full").products}
    assert again["attention.scores"] > 0


def test_parameters_of_a_live_model_and_its_dtype():
    model = model_of(config_of("qwen2", tie_word_embeddings=True))
    planned = plan(model, batch=1, length=8)
    assert planned.parameters == sum(p.numel() for p in model.parameters())
    assert planned.setup.dtype == "fp32"
