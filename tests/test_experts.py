"""Recipes on the experts of transformers' models: what each family gets, what it then computes, adapters as PEFT has them."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from torch import nn
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import surokit as sk
from surokit.convert import load_scaling_state, roll_scales, scaling_state
from surokit.layers import recipe_layers
from surokit.nn.experts import Experts, ExpertsLinear
from tests.refusals import refused

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "pad_token_id": None,
    "head_dim": 32,
}
FEW = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
DEEPSEEK = {
    **{k: v for k, v in SIZES.items() if k != "head_dim"},
    **FEW,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_group": 1,
    "topk_group": 1,
}
FAMILIES: dict[str, Any] = {
    "Mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)),
    "Qwen2-MoE": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**SIZES, **FEW, num_experts=4, shared_expert_intermediate_size=32)
    ),
    "Qwen3-MoE": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **FEW, num_experts=4)),
    "DeepSeek-V2": lambda: DeepseekV2ForCausalLM(DeepseekV2Config(**DEEPSEEK)),
    "DeepSeek-V3": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**DEEPSEEK)),
    "OLMoE": lambda: OlmoeForCausalLM(OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2)),
    "gpt-oss": lambda: GptOssForCausalLM(
        GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"] * 2)
    ),
}
each = pytest.mark.parametrize("family", FAMILIES)
IDS = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(1))


def made(family) -> Any:
    torch.manual_seed(0)
    model = FAMILIES[family]().float().train()
    for name, p in model.named_parameters():  # some families leave biases and routers at values that say nothing
        if p.dim() < 3 and ("bias" in name or "router" in name or name.endswith("gate.weight")):
            nn.init.normal_(p, std=0.05)
    return model


def loss(model):
    return model(input_ids=IDS, labels=IDS, use_cache=False).loss


def experts(model):
    return {name: layer for name, layer in recipe_layers(model) if isinstance(layer, ExpertsLinear)}


@each
@pytest.mark.parametrize("recipe", [sk.FP8_ROWWISE, sk.QFP8.lora(rank=2), sk.BF16.lora(rank=2)], ids=str)
def test_the_report_covers_the_experts(family, recipe):
    model = made(family)
    report = sk.apply(model, recipe)
    rows = [row for row in report.rows if row.experts]
    assert {row.layer.rpartition(".")[2] for row in rows} == {"gate_up_proj", "down_proj"}
    assert len(rows) == 4
    assert all(row.experts == 4 for row in rows)
    assert all(row.converted for row in rows) or not recipe.quantized
    assert all(row.adapter == "r=2" for row in rows) or not recipe.adapter
    assert report.nbytes == sum(p.nbytes for p in model.parameters())
    assert not any("Experts" in row.kind for row in report.left)
    assert "4 of 4 weights of experts" in report.line or not recipe.quantized
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert all("lora_" in name for name in trained) or not recipe.frozen_base


@each
@pytest.mark.parametrize("storage", [sk.QFP8, sk.QFP4, sk.QNF4], ids=lambda r: r.name)
def test_a_stored_model_computes_with_the_dequantized_weights(family, storage):
    model, twin = made(family), made(family)
    sk.apply(model, storage.lora(rank=2))
    layers: dict[str, Any] = dict(recipe_layers(model))
    for name, layer in layers.items():
        assert layer.storage is not None or name == "lm_head"
        if layer.storage is None:
            continue
        dense = layer.dense_weight(torch.float32)
        if isinstance(layer, ExpertsLinear):
            weight = twin.get_parameter(name)
            weight.data = dense.transpose(-2, -1).contiguous() if layer.transposed else dense
        else:
            twin.get_submodule(name).weight.data = dense
    embedded = [m.get_input_embeddings().weight.requires_grad_() for m in (model, twin)]
    ours, exact = loss(model), loss(twin)
    ours.backward()
    exact.backward()
    assert ours.item() == pytest.approx(exact.item(), rel=1e-5)
    a, b = (w.grad.double() for w in embedded)
    assert (a - b).norm() < 1e-4 * b.norm()
    b_grads = [p.grad for n, p in model.named_parameters() if "experts.lora_B" in n]
    assert len(b_grads) == 4
    assert all(g is not None and g.abs().sum() > 0 for g in b_grads)


@each
@pytest.mark.parametrize("recipe", [sk.FP8, sk.MXFP8], ids=lambda r: r.name)
def test_quantized_products_train(family, recipe):
    model = made(family)
    plain = loss(model).item()
    sk.apply(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = []
    for _ in range(3):
        value = loss(model)
        value.backward()
        assert all(layer.weight.grad.abs().sum() > 0 for layer in experts(model).values())
        optimizer.step()
        optimizer.zero_grad()
        found.append(value.item())
    assert found[0] != plain
    assert found[0] == pytest.approx(plain, rel=0.02)
    assert found[-1] < found[0]


def test_bf16_gives_transformers_forward_back():
    model = made("Mixtral")
    plain = loss(model)
    sk.apply(model, sk.FP8)
    assert not torch.equal(loss(model), plain)
    sk.apply(model, sk.BF16)
    assert torch.equal(loss(model), plain)
    with sk.precision(model, sk.FP8_ROWWISE):
        assert not torch.equal(loss(model), plain)
    assert torch.equal(loss(model), plain)


def test_rules_and_targets_name_the_weights():
    model = made("Mixtral")
    report = sk.apply(model, sk.QNF4.keep("experts.down_proj").lora(rank=2, targets=("down_proj", "q_proj")))
    by = {row.layer: row for row in report.rows}
    assert by["model.layers.0.mlp.experts.down_proj"].why == "rule experts.down_proj"
    assert by["model.layers.0.mlp.experts.down_proj"].adapter == "r=2"
    assert by["model.layers.0.mlp.experts.gate_up_proj"].adapter == ""
    assert by["model.layers.0.mlp.experts.gate_up_proj"].storage
    sk.apply(made("Mixtral"), sk.QNF4.lora(rank=2, targets=("gate_up_proj",)))


def test_another_storage_and_none_again():
    model = made("gpt-oss")
    sk.apply(model, sk.QNF4.lora(rank=2))
    held = {name: layer.dense_weight(torch.float32) for name, layer in experts(model).items()}
    report = sk.apply(model, sk.QFP8.lora(rank=2))
    assert sk.QFP8.storage is not None
    for name, layer in experts(model).items():
        again = torch.stack([sk.quantize(w, sk.QFP8.storage).dequantize() for w in held[name]])
        assert torch.equal(layer.dense_weight(torch.float32), again)
    assert sum(row.again for row in report.rows) == report.converted
    sk.apply(model, sk.BF16)
    assert all(layer.weight.requires_grad for layer in experts(model).values())


def test_copies_histories_and_scaling_state():
    model = made("Mixtral")
    sk.apply(model, sk.FP8)
    loss(model).backward()
    roll_scales(model)
    state = scaling_state(model)
    # x, w, dy of 8 linear layers, and of 4 experts of 4 weights
    assert state["in_force"].shape == (3 * (8 + 4 * 4),)
    twin = copy.deepcopy(model)
    assert torch.equal(loss(twin), loss(model))
    fresh = made("Mixtral")
    sk.apply(fresh, sk.FP8)
    load_scaling_state(fresh, state)
    assert torch.equal(loss(fresh), loss(model))


# -- adapters, as PEFT has them for target_parameters


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("family", ["Mixtral", "gpt-oss", "Qwen3-MoE"])
@pytest.mark.parametrize("targets", [("gate_up_proj", "down_proj"), ("down_proj",)], ids=len)
def test_an_adapter_of_ours_is_one_of_pefts(family, targets, tmp_path):
    model = made(family)
    sk.apply(model, sk.BF16.lora(rank=3, alpha=5, targets=(*targets, "q_proj")))
    for layer in experts(model).values():
        if layer.has_adapter:
            nn.init.normal_(layer.lora_B, std=0.1)
    sk.save_adapter(model, tmp_path)
    theirs = PeftModel.from_pretrained(made(family), tmp_path)
    assert not torch.allclose(logits(model), logits(made(family)), atol=1e-3)
    torch.testing.assert_close(logits(model), logits(theirs), atol=1e-5, rtol=1e-4)
    back = made(family)
    sk.apply(back, sk.BF16)
    sk.load_adapter(back, tmp_path)
    assert torch.equal(logits(back), logits(model))


@pytest.mark.parametrize("family", ["Mixtral", "gpt-oss"])
def test_an_adapter_of_pefts_is_read(family, tmp_path):
    where = "mlp.experts"
    config = LoraConfig(
        TaskType.CAUSAL_LM,
        r=2,
        lora_alpha=6,
        target_modules=["q_proj"],
        target_parameters=[f"{where}.gate_up_proj", f"{where}.down_proj"],
    )
    theirs = get_peft_model(made(family), config)
    for name, p in theirs.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    theirs.save_pretrained(tmp_path)
    model = made(family)
    sk.apply(model, sk.BF16)
    sk.load_adapter(model, tmp_path)
    torch.testing.assert_close(logits(model), logits(theirs), atol=1e-5, rtol=1e-4)
    sk.merge(model)
    torch.testing.assert_close(logits(model), logits(theirs), atol=1e-5, rtol=1e-4)
    sk.unmerge(model)
    assert all(layer.has_adapter for layer in experts(model).values())


def test_experts_that_peft_adapts_are_left_to_it():
    config = LoraConfig(TaskType.CAUSAL_LM, r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    model = get_peft_model(made("Mixtral"), config)
    before = loss(model)
    report = sk.apply(model, sk.QNF4.lora(rank=2))
    left = [row for row in report.left if row.kind == "MixtralExperts"]
    assert len(left) == 2
    assert left[0].why == "PEFT adapts its weights by target_parameters"
    assert loss(model).item() == pytest.approx(before.item(), rel=0.05)
    assert not any(isinstance(m, Experts) for m in model.modules())


@pytest.mark.parametrize(
    ("family", "recipe"),
    [("Mixtral", sk.FP8), ("Qwen3-MoE", sk.QNF4.lora(rank=2)), ("gpt-oss", sk.QFP8.lora(rank=2))],
    ids=["Mixtral fp8", "Qwen3-MoE qnf4", "gpt-oss qfp8"],
)
def test_a_session_goes_on_bit_for_bit(family, recipe, tmp_path):
    rows = torch.randint(0, 96, (8, 1, 12), generator=torch.Generator().manual_seed(2))
    data = [{"input_ids": row, "labels": row} for row in rows]
    session = sk.Session(made(family), data, recipe=recipe, schedule=None, run_dir=tmp_path)
    session.run(3)
    session.save()
    session.run(3)
    again = sk.Session.resume(tmp_path, made(family), data=data)
    again.run(3)
    expected = session.records.frame()["loss"].tolist()
    assert again.records.frame()["loss"].tolist()[-3:] == expected[-3:]
    assert len(set(expected)) == 6


# -- what a stranger tried


def test_a_second_adapter_is_asked_for_its_rank_its_alpha_and_its_targets():
    model = made("Mixtral")
    sk.apply(model, sk.QNF4.lora(rank=4, targets=("down_proj",)))
    for recipe in (sk.QNF4.lora(rank=8), sk.QNF4.lora(rank=4, alpha=1), sk.QNF4.lora(rank=4, targets=("nonsense",))):
        with refused(ValueError):
            sk.apply(model, recipe)
    sk.apply(model, sk.QNF4.lora(rank=4))
    assert all(layer.has_adapter for layer in experts(model).values())


@pytest.mark.parametrize("storage", [sk.QNF4, sk.QFP8], ids=lambda recipe: recipe.name)
def test_peft_over_stored_experts_is_refused_in_forward(storage):
    model = made("Mixtral")
    sk.apply(model, storage)
    config = LoraConfig(TaskType.CAUSAL_LM, r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    wrapped = get_peft_model(model, config)
    with refused(RuntimeError):
        loss(wrapped)


def test_peft_over_experts_of_ours_leaves_them_ours():
    model = made("Mixtral")
    plain = loss(model).item()
    sk.apply(model, sk.FP8_CURRENT)
    config = LoraConfig(TaskType.CAUSAL_LM, r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    wrapped = get_peft_model(model, config)
    assert loss(wrapped).item() != plain
    with refused(ValueError):
        sk.apply(wrapped, sk.QNF4)
    sk.apply(wrapped, sk.BF16)
    assert loss(wrapped).item() == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.experts.down_proj", "model.embed_tokens.weight"])
def test_a_part_on_another_device_is_seen(name):
    model = made("Mixtral")
    module, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(module), leaf, nn.Parameter(model.get_parameter(name).to("meta")))
    with refused(ValueError):
        sk.apply(model, sk.FP8)


def test_tuning_keeps_experts_out_of_its_mixtures_and_says_so():
    model = made("Mixtral")
    tuning = sk.tune(model, {"input_ids": IDS, "labels": IDS}, recipes=[sk.FP8_ROWWISE], points=2)
    assert "stays bf16, not measured: 4 weights of experts" in repr(tuning)
    for choice in tuning.front[1:]:
        report = sk.apply(made("Mixtral"), choice.recipe)
        assert not any(row.converted for row in report.rows if row.experts)
        assert report.converted == choice.quantized


def test_experts_alone_are_a_model_too():
    module = made("Mixtral").model.layers[0].mlp.experts
    sk.apply(module, sk.QFP8.lora(rank=2))
    sk.apply(module, sk.BF16)
    assert module.down_proj.requires_grad
