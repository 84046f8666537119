"""LoRA adapters in PEFT's layout: PEFT reads ours, we read PEFT's, and both compute the same."""

import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import surokit as sk
from surokit.errors import CheckpointError
from surokit.models.adapter import load_adapter, save_adapter
from surokit.models.checkpoint import load
from tests.models.families import write
from tests.refusals import refused

ADAPTED = sk.BF16.lora(rank=4, alpha=12, targets=("q_proj", "v_proj", "down_proj"))


@pytest.fixture
def ids():
    return torch.randint(96, (2, 20), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def adapted(tmp_path):
    """A loaded model with a random adapter, and transformers' model of the same weights."""
    theirs = write(tmp_path / "base", "qwen3")
    ours = load(tmp_path / "base", dtype=torch.float32, device="cpu")
    sk.apply(ours, ADAPTED)
    for name, parameter in ours.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return ours, theirs


def test_peft_loads_what_we_save(adapted, ids, tmp_path):
    ours, theirs = adapted
    save_adapter(ours, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    assert config["target_modules"] == ["down_proj", "q_proj", "v_proj"]
    keys = load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys()
    assert "base_model.model.model.layers.2.mlp.down_proj.lora_B.weight" in keys
    assert len(keys) == 2 * 3 * 3
    plain = theirs(ids).logits
    wrapped = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter")
    torch.testing.assert_close(wrapped(ids).logits, ours(ids).logits, atol=1e-5, rtol=1e-5)
    assert (wrapped(ids).logits - plain).abs().max() > 0.1


@pytest.mark.parametrize("rslora", [False, True])
def test_we_load_what_peft_saves(adapted, ids, tmp_path, rslora):
    ours, theirs = adapted
    config = peft.LoraConfig(r=8, lora_alpha=4, target_modules=["k_proj", "o_proj"], use_rslora=rslora)
    wrapped = peft.get_peft_model(theirs, config)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    wrapped.save_pretrained(tmp_path / "adapter")
    ours = load(tmp_path / "base", dtype=torch.float32, device="cpu")
    load_adapter(ours, tmp_path / "adapter")
    torch.testing.assert_close(wrapped(ids).logits, ours(ids).logits, atol=1e-5, rtol=1e-5)
    trained = {name for name, p in ours.named_parameters() if p.requires_grad}
    assert trained == {n for n, _ in ours.named_parameters() if "lora_" in n}
    assert len(trained) == 2 * 2 * 3


def test_adapter_goes_round_and_replaces_another(adapted, ids, tmp_path):
    ours, _ = adapted
    logits = ours(ids).logits
    save_adapter(ours, tmp_path / "adapter")
    other = sk.BF16.lora(rank=2, targets=("q_proj", "o_proj"))
    again = load(tmp_path / "base", dtype=torch.float32, device="cpu", recipe=other)
    for name, parameter in again.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    load_adapter(again, tmp_path / "adapter")
    torch.testing.assert_close(again(ids).logits, logits)
    assert {name for name, _ in again.named_parameters()} == {name for name, _ in ours.named_parameters()}


def test_transformers_model_that_we_adapted(adapted, ids, tmp_path):
    ours, theirs = adapted
    sk.apply(theirs, ADAPTED)
    save_adapter(ours, tmp_path / "adapter")
    load_adapter(theirs, tmp_path / "adapter")
    torch.testing.assert_close(theirs(ids).logits, ours(ids).logits, atol=1e-5, rtol=1e-5)
    save_adapter(theirs, tmp_path / "again")
    first, second = (load_file(tmp_path / d / "adapter_model.safetensors") for d in ("adapter", "again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[k], second[k]) for k in first)


def test_some_layers_only(adapted, ids, tmp_path):
    ours, theirs = adapted
    ours.model.layers[1].mlp.down_proj.remove_adapter()
    save_adapter(ours, tmp_path / "adapter")
    wrapped = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter")
    torch.testing.assert_close(wrapped(ids).logits, ours(ids).logits, atol=1e-5, rtol=1e-5)


def test_nothing_to_save(tmp_path):
    write(tmp_path / "base", "llama2")
    model = load(tmp_path / "base", device="cpu")
    with refused(CheckpointError):
        save_adapter(model, tmp_path / "adapter")
    with refused(CheckpointError):
        save_adapter(torch.nn.Linear(2, 2), tmp_path / "adapter")


def test_adapters_that_do_not_fit(adapted, tmp_path):
    ours, _ = adapted
    save_adapter(ours, tmp_path / "adapter")
    ours.model.layers[0].self_attn.q_proj.lora_alpha = 1.0
    with refused(CheckpointError):
        save_adapter(ours, tmp_path / "other")
    with refused(FileNotFoundError):
        load_adapter(ours, tmp_path / "nowhere")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    good = load_file(file)
    bad = dict(good)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    bad[name] = torch.zeros(3, 32)
    bad["base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"] = torch.zeros(4, 32)
    del bad["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"]
    save_file(bad, file)
    before = {n: p.clone() for n, p in ours.named_parameters()}
    with pytest.raises(CheckpointError) as error:
        load_adapter(ours, tmp_path / "adapter")
    text = str(error.value)
    assert "missing: model.layers.1.self_attn.v_proj.lora_B.weight" in text
    assert "extra: model.layers.9.self_attn.q_proj.lora_A.weight" in text
    assert "model.layers.0.self_attn.q_proj.lora_A.weight [3, 32] instead of [4, 32]" in text
    assert all(torch.equal(p, before[n]) for n, p in ours.named_parameters())
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(CheckpointError, match="damaged"):
        load_adapter(ours, tmp_path / "adapter")
    save_file({}, file)
    with refused(CheckpointError):
        load_adapter(ours, tmp_path / "adapter")
    file.unlink()
    with refused(FileNotFoundError):
        load_adapter(ours, tmp_path / "adapter")


@pytest.mark.parametrize("init", ["pissa_niter_4", "olora"])
def test_an_adapter_whose_base_peft_changed(adapted, tmp_path, init):
    ours, _ = adapted
    save_adapter(ours, tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"init_lora_weights": init}))
    with refused(CheckpointError):
        load_adapter(ours, tmp_path / "adapter")


@pytest.mark.parametrize(
    ("change", "match"),
    [({"peft_type": "IA3"}, "IA3"), ({"use_dora": True}, "use_dora=True"), ({"r": None}, "usable r")],
)
def test_adapter_settings_that_are_not_plain(adapted, tmp_path, change, match):
    ours, _ = adapted
    save_adapter(ours, tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=match):
        load_adapter(ours, tmp_path / "adapter")
