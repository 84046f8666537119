"""FLOPs against torch's own counter, and against the figures of published rooflines."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from surokit import planner
from surokit.planner.flops import count_flops
from surokit.planner.shape import Shape, read_shape
from surokit.recipe import BF16, FP8, PROJECTIONS, QFP8

QWEN3: dict[str, dict[str, Any]] = {
    "0.6B": {"layers": 28, "width": 1024, "heads": 16, "ffn": 3072, "tied": True},
    "1.7B": {"layers": 28, "width": 2048, "heads": 16, "ffn": 6144, "tied": True},
    "4B": {"layers": 36, "width": 2560, "heads": 32, "ffn": 9728, "tied": True},
    "8B": {"layers": 36, "width": 4096, "heads": 32, "ffn": 12288, "tied": False},
}


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
    adapter = sum(p.forward for p in compute.products if "lora" in p.module)
    assert compute.recompute - adapter == pytest.approx(1.12e9, rel=0.005)
    assert compute.hardware == compute.model + compute.recompute
    selective = count_flops(qwen3("0.6B"), length=2048, recompute="selective")
    assert selective.recompute == sum(p.forward for p in selective.products if p.module.startswith("attention"))


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
    p = plan({**LLAMA, "vocab_size": 320}, batch=2, length=64, recompute="full", recipe=BF16.lora(4))
    modules, gemms = p.modules(), p.gemms()
    assert modules["forward"].sum() + modules["backward"].sum() == p.flops_per_token
    assert modules["share"].sum() == pytest.approx(1)
    assert gemms["recompute"].sum() == modules["recompute"].sum() == p.compute.recompute
    assert list(modules["module"]) == ["self_attn", "mlp", "lm_head", "attention"]


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 176,
    "vocab_size": 320,
    "max_position_embeddings": 256,
}


class Adapted(torch.nn.Module):
    """y = W x + B A x with a frozen W, in plain torch."""

    def __init__(self, base, rank):
        super().__init__()
        self.base = base
        self.a = torch.nn.Linear(base.in_features, rank, bias=False)
        self.b = torch.nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def counted(config, *, tied, batch, length, adapter=False):
    """FLOPs of one training step of transformers' own model, as torch counts them.

    Attention runs as plain products ("eager"), so every score is counted, masked or not: the convention "full". (The fused CPU
    kernel is not counted at all, and fused GPU kernels count the scores that their backward forms again.)
    """
    transformers = pytest.importorskip("transformers")
    kind = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config}
    fields = {k: v for k, v in config.items() if k != "model_type"}
    hf = kind[config["model_type"]](**fields, tie_word_embeddings=tied, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(hf, attn_implementation="eager")
    if adapter:
        model.requires_grad_(False)
        for layer in model.model.layers:
            for block in (layer.self_attn, layer.mlp):
                for name in [n for n in PROJECTIONS if hasattr(block, n)]:
                    setattr(block, name, Adapted(getattr(block, name), rank=8))
    ids = torch.randint(0, config["vocab_size"], (batch, length))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    return counter.get_total_flops(), hf


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_against_torchs_flop_counter(family, tied):
    config = {**LLAMA, "model_type": family, **({"head_dim": 32} if family == "qwen3" else {})}
    flops, hf = counted(config, tied=tied, batch=2, length=64)
    planned = plan(hf, batch=2, length=64, attention="full")
    assert planned.flops_per_step == flops
    assert planned.shape == read_shape({**config, "tie_word_embeddings": tied})[0]


def test_an_adapter_against_torchs_flop_counter():
    flops, hf = counted(LLAMA, tied=False, batch=1, length=64, adapter=True)
    planned = plan(hf, batch=1, length=64, attention="full", recipe=BF16.lora(8))
    assert planned.flops_per_step == flops


def test_parameters_equal_the_models_own():
    transformers = pytest.importorskip("transformers")
    for kind in (transformers.LlamaConfig, transformers.Qwen2Config, transformers.Qwen3Config):
        config = kind(
            **{k: v for k, v in LLAMA.items() if k not in ("model_type",)}, head_dim=16, tie_word_embeddings=True
        )
        model = transformers.AutoModelForCausalLM.from_config(config)
        planned = plan(model, batch=1, length=8)
        assert planned.parameters == sum(p.numel() for p in model.parameters())
        assert planned.setup.dtype == "fp32"
