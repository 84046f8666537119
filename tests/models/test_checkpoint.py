"""Every family loads from what transformers writes, computes the same, and goes back; damaged folders are refused."""

import json
import sys
from contextlib import suppress

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import surokit as sk
from surokit import hub
from surokit.errors import CheckpointError
from surokit.models.checkpoint import load, save
from tests.models.families import FAMILIES, write
from tests.refusals import refused


@pytest.fixture
def ids():
    return torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(1))


def edit(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps({k: v for k, v in config.items() if v != "gone"}))
    return config


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_loss_and_gradients_equal_transformers(family, tmp_path, ids):
    theirs = write(tmp_path, family)
    ours = load(tmp_path, dtype=torch.float32, device="cpu")
    labels = ids.clone()
    labels[0, 5:9] = -100
    a, b = ours(ids, labels=labels), theirs(ids, labels=labels)
    torch.testing.assert_close(a.loss, b.loss, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(a.logits, b.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours(ids).logits, b.logits, atol=1e-5, rtol=1e-5)
    a.loss.backward()
    b.loss.backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    assert [name for name, _ in ours.named_parameters()] == list(gradients)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_folder_loads_strictly_in_transformers(family, tmp_path, ids):
    theirs = write(tmp_path / "theirs", family)
    save(load(tmp_path / "theirs", dtype=torch.float32, device="cpu"), tmp_path / "ours")
    back, info = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(back) is type(theirs)
    with torch.no_grad():
        assert torch.equal(back(ids).logits, theirs(ids).logits)


def test_a_model_of_ours_loads_in_transformers(tmp_path, ids):
    torch.manual_seed(0)
    model = sk.Decoder(sk.DecoderConfig(layers=2, width=32, heads=4, kv_heads=2, vocab=96, ffn=48, qk_norm=True))
    save(model, tmp_path / "new")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    assert type(back).__name__ == "Qwen3ForCausalLM"
    torch.testing.assert_close(back(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama3", "smollm2", "linear-rope"])
def test_old_rope_config_means_the_same(family, tmp_path, ids):
    theirs = write(tmp_path, family)
    rope = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    scaling = None if kind == "default" else {"type": kind, **rope}
    edit(tmp_path, rope_parameters="gone", rope_theta=theta, rope_scaling=scaling)
    ours = load(tmp_path, dtype=torch.float32, device="cpu")
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, atol=1e-5, rtol=1e-5)


def test_shards_and_tensors_nobody_needs(tmp_path, ids):
    theirs = write(tmp_path / "one", "smollm2")
    theirs.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert (tmp_path / "many" / "model.safetensors.index.json").is_file()
    logits = load(tmp_path / "one", dtype=torch.float32, device="cpu")(ids).logits
    assert torch.equal(load(tmp_path / "many", dtype=torch.float32, device="cpu")(ids).logits, logits)
    # the copy of a tied head, and the rotary tables of old Llama checkpoints
    file = tmp_path / "one" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, file)
    assert torch.equal(load(tmp_path / "one", dtype=torch.float32, device="cpu")(ids).logits, logits)


def test_saving_in_shards_replaces_what_was_there(tmp_path):
    write(tmp_path, "llama2")
    model = load(tmp_path, dtype=torch.float32, device="cpu")
    (tmp_path / "tokenizer.json").write_text("{}")
    save(model, tmp_path, shard_gib=20e3 / 2**30)
    assert not (tmp_path / "model.safetensors").exists()
    assert (tmp_path / "tokenizer.json").exists()
    AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, tensor in load(tmp_path, dtype=torch.float32, device="cpu").state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
    save(model, tmp_path)
    assert not list(tmp_path.glob("model-*"))
    assert not (tmp_path / "model.safetensors.index.json").exists()
    assert not list(tmp_path.parent.glob(f".{tmp_path.name}-*"))


def test_dtype_and_defaults(tmp_path, ids):
    write(tmp_path, "qwen3")
    model = load(tmp_path)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(p.requires_grad and not p.is_meta for p in model.parameters())
    exact = load(tmp_path, dtype=torch.float32).float()(ids.to(model.device)).logits
    # tables are made anew for the dtype, not cast: through bfloat16 and back nothing is left in them
    assert torch.equal(model.float().model.rotary_emb.cos, load(tmp_path, dtype=torch.float32).model.rotary_emb.cos)
    assert (model(ids.to(model.device)).logits - exact).abs().max() < 0.1 * exact.abs().max()
    with refused(ValueError):
        load(tmp_path, dtype=torch.float8_e4m3fn)


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any operation made."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not out.is_meta:
            self.nbytes = max(self.nbytes, out.nbytes)
        return out


def test_layers_are_quantized_as_they_arrive(tmp_path, ids):
    write(tmp_path, "llama2")
    seen = {}

    def on_linear_loaded(name, layer):
        seen[name] = layer.weight.dtype

    with Largest() as made:
        whole = load(tmp_path, device="cpu")
    assert made.nbytes <= 4 * 96 * 32  # nothing is gathered: no tensor beyond the largest matrix as it is in the file
    model = load(tmp_path, device="cpu", recipe="qfp8", on_linear_loaded=on_linear_loaded)
    linears = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "lora" not in n]
    assert seen == {name: torch.bfloat16 if name == "lm_head" else torch.float8_e4m3fn for name in linears}
    sk.apply(whole, sk.QFP8)
    assert torch.equal(model(ids).logits, whole(ids).logits)


def test_stored_weights_go_to_disk_as_fine_grained_fp8(tmp_path, ids):
    write(tmp_path / "base", "llama2")
    model = load(tmp_path / "base", device="cpu", recipe=sk.QFP8)
    with refused(CheckpointError):
        save(model, tmp_path / "fp8")
    for layer in model.modules():
        if isinstance(layer, sk.nn.linear.Linear) and layer.has_adapter:
            layer.remove_adapter()
    save(model, tmp_path / "fp8")
    quantization = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert quantization["quant_method"] == "fp8"
    assert quantization["modules_to_not_convert"] == ["lm_head"]
    again = load(tmp_path / "fp8", device="cpu")
    assert again.get_parameter("model.layers.0.mlp.up_proj.weight").dtype == torch.float8_e4m3fn
    assert torch.equal(again(ids).logits, model(ids).logits)
    edit(tmp_path / "fp8", quantization_config={"quant_method": "gptq"})
    with refused(CheckpointError):
        load(tmp_path / "fp8")


def test_all_tensors_that_do_not_fit_are_named(tmp_path):
    write(tmp_path, "llama2")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["surprise.weight"] = torch.ones(2)
    tensors["lm_head.weight"] = torch.ones(95, 32)
    save_file(tensors, file)
    with pytest.raises(CheckpointError) as error:
        load(tmp_path)
    text = str(error.value)
    assert "missing: model.layers.1.mlp.up_proj.weight, model.norm.weight" in text
    assert "extra: surprise.weight" in text
    assert "lm_head.weight [95, 32] instead of [96, 32]" in text


@pytest.mark.parametrize("keep", [4, 100, -10])
def test_truncated_file(tmp_path, keep):
    write(tmp_path, "llama2")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="damaged or cut off"):
        load(tmp_path)


def test_folders_that_hold_no_model(tmp_path):
    with refused(FileNotFoundError):
        load(tmp_path / "nowhere")
    with refused(FileNotFoundError):
        load(tmp_path)
    write(tmp_path, "llama2")
    with refused(FileNotFoundError):
        load(tmp_path / "config.json")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with refused(CheckpointError):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with refused(FileNotFoundError):
        load(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}))
    with refused(CheckpointError):
        load(tmp_path)
    index.write_text("{}")
    with refused(CheckpointError):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
        {"hidden_size": "gone"},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ],
)
def test_configs_that_are_not_supported(tmp_path, changes):
    write(tmp_path, "llama2")
    edit(tmp_path, **changes)
    with refused(CheckpointError):
        load(tmp_path)


def test_hub_ids(tmp_path, monkeypatch):
    write(tmp_path, "llama2")
    asked = []

    def fetch(repo_id, filename, *, online):
        asked.append((repo_id, filename, online))
        if not online:
            raise OSError("not in the cache")
        if not (tmp_path / filename).exists():
            raise LocalEntryNotFoundError(filename)
        return tmp_path / filename

    monkeypatch.setattr(hub, "fetch", fetch)
    monkeypatch.setattr(hub, "reachable", lambda: True)
    load("someone/tiny-llama", device="cpu")
    files = ("config.json", "hf_quant_config.json", "model.safetensors")
    assert asked == [("someone/tiny-llama", name, True) for name in files]
    asked.clear()
    edit(tmp_path, quantization_config={"quant_method": "fp8"})  # ModelOpt's own file would say the same
    with suppress(CheckpointError):
        load("someone/tiny-llama", device="cpu")
    assert [name for _, name, _ in asked] == ["config.json", "model.safetensors"]
    monkeypatch.setattr(hub, "reachable", lambda: False)
    with refused(FileNotFoundError):
        load("someone/tiny-llama")
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", None)
    with refused(FileNotFoundError):
        load("someone/tiny-llama")


def test_failed_save_leaves_the_old_model(tmp_path, monkeypatch):
    write(tmp_path / "model", "llama2")
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    model = load(tmp_path / "model", device="cpu")

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("surokit.models.folder.save_file", full_disk)
    with refused(CheckpointError):
        save(model, tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    with refused(CheckpointError):
        save(model, tmp_path / "file")


def test_save_refuses_what_it_cannot_write(tmp_path):
    with refused(TypeError):
        save(torch.nn.Linear(2, 2), tmp_path)
    odd = sk.DecoderConfig(layers=1, width=8, heads=2, kv_heads=1, vocab=8, ffn=8, qk_norm=True, mlp_bias=True)
    with refused(CheckpointError):
        save(sk.Decoder(odd), tmp_path / "odd")


def test_a_folder_above_the_right_one_is_recognised(tmp_path):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    write(tmp_path / "runs" / "a", "llama2")
    with refused(FileNotFoundError):
        load(tmp_path / "runs")
