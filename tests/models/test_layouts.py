"""Quantized weights go to disk and come back bit for bit, and others read in our folders the numbers that we compute with."""

import json
import shutil
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import surokit as sk
from surokit import hub
from surokit.errors import CheckpointError
from surokit.models.checkpoint import load, save
from surokit.models.layouts import layout_for
from surokit.nn.linear import Linear
from tests.models.families import write
from tests.models.test_checkpoint import Largest
from tests.refusals import refused, warned

MX8, MX4 = sk.Quantizer(sk.E4M3, sk.MX(32)), sk.Quantizer(sk.E2M1, sk.MX(32))
STORAGES: dict[str, Any] = {
    "qfp8": sk.QFP8.storage,
    "fp8-64x32": sk.Quantizer(sk.E4M3, sk.Block(64, 32)),
    "qfp4": sk.QFP4.storage,
    "nv-tiles": sk.Quantizer(sk.E2M1, sk.NV(16, 16)),
    "mxfp8": MX8,
    "mxfp4": MX4,
    "qnf4": sk.QNF4.storage,
    "nf4-single": sk.Quantizer(sk.NF4, sk.NFBlock(64)),
}
METHODS = {"qfp8": "fp8", "fp8-64x32": "fp8", "mxfp4": "mxfp4", "qnf4": "bitsandbytes", "nf4-single": "bitsandbytes"}
UP = "model.layers.0.mlp.up_proj"


@pytest.fixture
def ids():
    return torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(1))


def recipe_of(storage):
    return sk.BF16.store(storage)


def stored(tmp_path, storage, family="llama2", **sizes):
    """A model with stored weights, and the folder that it was saved to."""
    if not (tmp_path / "base").exists():
        write(tmp_path / "base", family, **sizes)
    model = load(tmp_path / "base", device="cpu", recipe=recipe_of(storage))
    return model, save(model, tmp_path / "saved")


def layers(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, Linear)}


def raw(part):
    return part.detach().reshape(-1).view(torch.uint8)


def same_parts(a, b):
    return all(torch.equal(raw(p), raw(q)) and p.dtype == q.dtype for p, q in zip(a.parts, b.parts, strict=True))


def header(folder, name):
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        view = file.get_slice(name)
        return view.get_dtype(), view.get_shape()


# blocks end in the middle of a row, of a byte (33 columns), or nowhere (64)
@pytest.mark.parametrize(
    "sizes", [{}, {"hidden_size": 20, "head_dim": 6, "intermediate_size": 33}, {"hidden_size": 64, "head_dim": 16}]
)
@pytest.mark.parametrize("name", STORAGES)
def test_codes_and_scales_go_round_bit_for_bit(name, sizes, tmp_path, ids):
    storage = STORAGES[name]
    model, folder = stored(tmp_path, storage, **sizes)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == METHODS.get(name, "modelopt")
    assert (folder / "hf_quant_config.json").exists() == (config["quant_method"] == "modelopt")

    same = load(folder, device="cpu", recipe=recipe_of(storage))
    plain = load(folder, device="cpu")
    for layer_name, layer in layers(model).items():
        again = layers(same)[layer_name]
        assert again.storage == layer.storage == (None if layer_name == "lm_head" else storage)
        if layer.storage is not None:
            assert same_parts(layer.stored, again.stored)
            ours, theirs = layer.stored, layers(plain)[layer_name].stored
            assert torch.equal(raw(ours.codes), raw(theirs.codes))
            assert torch.equal(ours.dequantize(), theirs.dequantize())
            assert not theirs.codes.requires_grad
        else:
            assert torch.equal(layer.weight, again.weight)
    logits = model(ids).logits
    assert torch.equal(same(ids).logits, logits)
    assert torch.equal(plain(ids).logits, logits)
    # what was read goes to disk as it came
    save(plain, tmp_path / "twice")
    first, second = load_file(folder / "model.safetensors"), load_file(tmp_path / "twice" / "model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(raw(first[key]), raw(second[key])) for key in first)


@pytest.mark.parametrize("asked", [False, True])
def test_transformers_loads_fine_grained_fp8(asked, tmp_path, ids):
    """On a CPU it dequantizes, asked to or not; in sizes up to 128 or multiples of it: it takes the blocks from the shapes."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_hidden_layers": 2}
    model, folder = stored(tmp_path, sk.QFP8.storage, **sizes)
    how = {"quantization_config": FineGrainedFP8Config(dequantize=True)} if asked else {}
    theirs, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, **how)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    weights = dict(theirs.named_parameters())
    for name, layer in layers(model).items():
        assert torch.equal(weights[f"{name}.weight"], layer.dense_weight(torch.float32)), name
    ours = load(folder, dtype=torch.float32, device="cpu", recipe=sk.BF16)
    torch.testing.assert_close(ours(ids).logits, theirs.float()(ids).logits, atol=1e-4, rtol=1e-4)


def decoded_by_bitsandbytes(codes, state):
    """As one row: bitsandbytes 0.50 gives other numbers on a CPU where rows are no multiple of the block of 64."""
    shape, state.shape = state.shape, torch.Size((1, state.shape.numel()))
    return bnb.functional.dequantize_4bit(codes, state).view(shape)


def test_transformers_loads_nf4(tmp_path, ids):
    model, folder = stored(tmp_path, sk.QNF4.storage, hidden_size=64, intermediate_size=128)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cpu")
    for name, layer in layers(model).items():
        weight = theirs.get_submodule(name).weight
        if layer.storage is None:
            assert torch.equal(weight, layer.weight)
        else:
            assert isinstance(weight, bnb.nn.Params4bit)
            decoded = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
            assert torch.equal(decoded, layer.dense_weight(torch.bfloat16))


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(48, 64), (7, 33), (48, 32), (300, 64)])
def test_bitsandbytes_decodes_the_tensors_that_we_write(double, dtype, shape):
    q = sk.Quantizer(sk.NF4, sk.NFBlock(64, double=256 if double else 0))
    Q = sk.quantize(torch.randn(shape, generator=torch.Generator().manual_seed(0)), q)
    layout = layout_for(q)
    assert layout is not None
    tensors = layout.tensors("w", Q, dtype)
    state = {key.removeprefix("w."): value for key, value in tensors.items() if key != "w"}
    state = bnb.functional.QuantState.from_dict(state, torch.device("cpu"))
    assert torch.equal(decoded_by_bitsandbytes(tensors["w"], state), Q.dequantize(dtype))


@pytest.mark.parametrize("double", [True, False])
def test_bitsandbytes_own_tensors_are_read(double, tmp_path):
    _, folder = stored(tmp_path, STORAGES["qnf4" if double else "nf4-single"])
    file = folder / "model.safetensors"
    tensors = load_file(file)
    w = torch.randn(48, 32, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    codes, state = bnb.functional.quantize_4bit(w, quant_type="nf4", blocksize=64, compress_statistics=double)
    tensors[f"{UP}.weight"] = codes
    tensors |= {f"{UP}.weight.{key}": value for key, value in state.as_dict(packed=True).items()}
    save_file(tensors, file)
    layer = layers(load(folder, device="cpu"))[UP]
    assert torch.equal(layer.dense_weight(), decoded_by_bitsandbytes(codes, state))


def e2m1(packed):
    """Numbers of packed codes, decoded by ml_dtypes: the even element lies in the low half of a byte."""
    nibbles = np.stack((packed & 15, packed >> 4), axis=-1).reshape(packed.shape[0], -1)
    return nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32)


@pytest.mark.parametrize("name", ["qfp4", "nv-tiles"])
def test_modelopt_folders_mean_what_ml_dtypes_says(name, tmp_path):
    model, folder = stored(tmp_path, STORAGES[name])
    assert header(folder, f"{UP}.weight") == ("U8", [48, 16])
    assert header(folder, f"{UP}.weight_scale") == ("F8_E4M3", [48, 2])
    assert header(folder, f"{UP}.weight_scale_2") == ("F32", [])
    tensors = load_file(folder / "model.safetensors")
    for layer_name, layer in layers(model).items():
        if layer.storage is None:
            continue
        packed, scales, scale = (tensors[f"{layer_name}.weight{end}"] for end in ("", "_scale", "_scale_2"))
        blocks = scales.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        w = e2m1(packed.numpy()) * np.repeat(blocks, 16, axis=1) * scale.numpy()
        assert np.array_equal(w, layer.dense_weight(torch.float32).numpy())
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    sidecar = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    assert (config["quant_algo"], config["group_size"], config["ignore"]) == ("W4A16_NVFP4", 16, ["lm_head"])
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == 16
    assert sidecar["quant_algo"] == config["quant_algo"]
    assert sidecar["exclude_modules"] == ["lm_head"]


def test_modelopt_mxfp8_means_what_ml_dtypes_says(tmp_path):
    model, folder = stored(tmp_path, MX8, hidden_size=64)
    tensors = load_file(folder / "model.safetensors")
    codes, scales = tensors[f"{UP}.weight"], tensors[f"{UP}.weight_scale"]
    assert (scales.dtype, list(scales.shape)) == (torch.uint8, [48, 2])
    numbers = codes.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    blocks = scales.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    w = numbers * np.repeat(blocks, 32, axis=1)
    assert np.array_equal(w, model.get_submodule(UP).dense_weight(torch.float32).numpy())


def test_transformers_decodes_mxfp4(tmp_path):
    model, folder = stored(tmp_path, MX4, hidden_size=64, intermediate_size=96)
    tensors = load_file(folder / "model.safetensors")
    assert header(folder, f"{UP}.weight_blocks") == ("U8", [96, 2, 16])
    for name, layer in layers(model).items():
        if layer.storage is not None:
            blocks, scales = tensors[f"{name}.weight_blocks"], tensors[f"{name}.weight_scales"]
            theirs = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.bfloat16)[0].t()
            assert torch.equal(theirs, layer.dense_weight())
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config == {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def test_mxfp4_under_the_names_of_layers(tmp_path, ids):
    """gpt-oss has no `.weight` in its names: its experts are parameters, not layers."""
    model, folder = stored(tmp_path, MX4)
    file = folder / "model.safetensors"
    renamed = {name.replace(".weight_", "_"): tensor for name, tensor in load_file(file).items()}
    assert f"{UP}_blocks" in renamed
    save_file(renamed, file)
    assert torch.equal(load(folder, device="cpu")(ids).logits, model(ids).logits)


def test_a_tied_head_may_be_quantized_in_the_file(tmp_path, ids):
    model, folder = stored(tmp_path, sk.QFP8.storage, family="smollm2")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = torch.zeros(96, 32, dtype=torch.float8_e4m3fn)
    tensors["lm_head.weight_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, file)
    assert torch.equal(load(folder, device="cpu")(ids).logits, model(ids).logits)


def test_a_modelopt_export_with_calibrated_scales_and_only_its_own_file(tmp_path, ids, monkeypatch):
    model, folder = stored(tmp_path, sk.QFP4.storage)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{UP}.input_scale"] = torch.tensor(0.5)
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(0.5)
    tensors[f"{UP}.weight_scale_2"] = tensors[f"{UP}.weight_scale_2"].view(1)
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    sidecar = json.loads((folder / "hf_quant_config.json").read_text())
    sidecar["quantization"]["quant_algo"] = "NVFP4"
    (folder / "hf_quant_config.json").write_text(json.dumps(sidecar))
    assert torch.equal(load(folder, device="cpu")(ids).logits, model(ids).logits)
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setattr(hub, "reachable", lambda: True)
    monkeypatch.setattr(hub, "fetch", lambda repo_id, name, online: Path(shutil.copy(folder / name, cache)))
    assert torch.equal(load("someone/tiny-nvfp4", device="cpu")(ids).logits, model(ids).logits)


def test_a_model_saved_unquantized_leaves_no_word_of_the_quantization(tmp_path, ids):
    model, folder = stored(tmp_path, sk.QFP4.storage)
    sk.apply(model, sk.BF16)
    save(model, folder)
    assert not (folder / "hf_quant_config.json").exists()
    again = load(folder, device="cpu")
    assert all(layer.storage is None for layer in layers(again).values())
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_another_storage_quantizes_again_and_says_so(tmp_path):
    model, folder = stored(tmp_path, sk.QFP8.storage)
    with warned(UserWarning):
        again = load(folder, device="cpu", recipe=sk.QFP4)
    for name, layer in layers(model).items():
        if layer.storage is not None:
            expected = sk.quantize(layer.dense_weight(torch.float32), STORAGES["qfp4"])
            assert same_parts(expected, layers(again)[name].stored)


def test_rows_that_are_no_tiles_and_scales_that_are_no_powers_of_two_are_quantized_again(tmp_path):
    for i, (have, want) in enumerate((("qfp4", "nv-tiles"), ("nf4-single", "qnf4"))):
        _, folder = stored(tmp_path / str(i), STORAGES[have])
        with warned(UserWarning):
            again = load(folder, device="cpu", recipe=recipe_of(STORAGES[want]))
        assert again.get_submodule(UP).storage == STORAGES[want]
    _, folder = stored(tmp_path / "pow2", sk.QFP8.storage)
    pow2 = sk.Quantizer(sk.E4M3, sk.Block(128, 128))
    with warned(UserWarning):
        load(folder, device="cpu", recipe=recipe_of(pow2))


def test_a_recipe_without_storage_dequantizes(tmp_path):
    model, folder = stored(tmp_path, sk.QFP4.storage)
    again = load(folder, device="cpu", recipe=sk.FP8_ROWWISE)
    for name, layer in layers(model).items():
        assert torch.equal(layers(again)[name].weight, layer.dense_weight())


@pytest.mark.parametrize("name", STORAGES)
@pytest.mark.parametrize("same", [False, True])
def test_nothing_is_decoded_or_held_twice_while_it_loads(name, same, tmp_path):
    model, folder = stored(tmp_path, STORAGES[name], hidden_size=64, intermediate_size=192)
    recipe = recipe_of(STORAGES[name]) if same else None
    with Largest() as made:
        again = load(folder, device="cpu", recipe=recipe)
    embedding = again.model.embed_tokens.weight.nbytes
    assert max(layer.weight.nbytes for layer in layers(again).values()) == embedding
    assert made.nbytes <= embedding < model.get_submodule(UP).dense_weight().nbytes
    # and what was read is no part of the mapped file
    file = folder / "model.safetensors"
    before = {key: raw(value) for key, value in again.state_dict().items()}
    file.write_bytes(bytes(len(file.read_bytes())))
    assert all(torch.equal(raw(value), before[key]) for key, value in again.state_dict().items())


def test_layers_that_a_rule_keeps_are_written_as_they_are(tmp_path, ids):
    write(tmp_path / "base", "llama2")
    recipe = recipe_of(sk.QFP4.storage).keep("layers.0.*")
    model = load(tmp_path / "base", device="cpu", recipe=recipe)
    save(model, tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert [name for name in config["ignore"] if "layers.0" not in name] == ["lm_head"]
    assert len(config["ignore"]) == 8
    assert torch.equal(load(tmp_path / "saved", device="cpu", recipe=recipe)(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("qfp8", {"weight_scale_inv": None}, r"wrong dtype: .*up_proj\.weight F8_E4M3 instead of BF16"),
        (
            "qfp8",
            {"weight_scale_inv": torch.ones(2, 2)},
            r"wrong shape: .*weight_scale_inv \[2, 2\] instead of \[1, 1\]",
        ),
        ("qfp8", {"weight": torch.ones(48, 32)}, r"wrong dtype: .*up_proj\.weight F32 instead of F8_E4M3"),
        ("qfp4", {"weight_scale": None}, r"missing: .*up_proj\.weight_scale\."),
        ("qfp4", {"weight_scale_2": None}, r"missing: .*up_proj\.weight_scale_2"),
        ("qfp4", {"weight_scale_2": torch.ones(2)}, r"weight_scale_2 \[2\] instead of \[\]"),
        ("qfp4", {"weight": torch.zeros(48, 8, dtype=torch.uint8)}, r"up_proj\.weight \[48, 8\] instead of \[48, 16\]"),
        ("qfp4", {"weight_scale": torch.ones(48, 2)}, r"wrong dtype: .*weight_scale F32 instead of F8_E4M3"),
        ("mxfp4", {"weight_scales": None}, r"missing: .*up_proj\.weight_scales"),
        ("mxfp4", {"weight_blocks": None, "weight_scales": None}, r"missing: .*up_proj\.weight\."),
        (
            "mxfp4",
            {"weight_scales": torch.zeros(48, 2, dtype=torch.uint8)},
            r"weight_scales \[48, 2\] instead of \[48, 1\]",
        ),
        ("qnf4", {"weight.absmax": torch.ones(3, dtype=torch.uint8)}, r"absmax \[3\] instead of \[24\]"),
        ("qnf4", {"weight.quant_map": torch.ones(16)}, r"other numbers in quant_map"),
        ("qnf4", {"weight.nested_quant_map": None}, r"missing: .*nested_quant_map"),
        (
            "qnf4",
            {"weight.quant_state.bitsandbytes__nf4": torch.tensor(list(b'{"quant_type": "nf4"'), dtype=torch.uint8)},
            r"up_proj\.weight\.quant_state.* is damaged",
        ),
        (
            "nf4-single",
            {
                "weight.quant_state.bitsandbytes__nf4": torch.tensor(
                    list(b'{"quant_type": "nf4", "blocksize": 128, "shape": [48, 32]}'), dtype=torch.uint8
                )
            },
            r"no NF4 weight in blocks of 64 .*'blocksize': 128",
        ),
    ],
)
def test_damaged_tensors_are_named(name, change, match, tmp_path):
    _, folder = stored(tmp_path, STORAGES[name])
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for key, value in change.items():
        if value is None:
            del tensors[f"{UP}.{key}"]
        else:
            tensors[f"{UP}.{key}"] = value
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=match):
        load(folder, device="cpu")


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "fp8", "weight_block_size": None},
        {"quant_method": "fp8", "weight_block_size": [128, 0]},
        {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]},
        {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"},
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32},
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
    ],
)
def test_other_quantizations_are_refused(config, tmp_path):
    write(tmp_path, "llama2")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    with refused(CheckpointError):
        load(tmp_path, device="cpu")


@pytest.mark.parametrize(
    "storage",
    [
        sk.Quantizer(sk.E4M3, sk.PerRow()),
        sk.Quantizer(sk.E4M3, sk.PerTensor()),
        sk.Quantizer(sk.E5M2, sk.MX(32)),
        sk.Quantizer(sk.E2M1, sk.NV(16), hadamard=16),
    ],
    ids=str,
)
def test_storages_without_a_format_are_refused(storage, tmp_path):
    write(tmp_path / "base", "llama2")
    model = load(tmp_path / "base", device="cpu", recipe=recipe_of(storage))
    with refused(CheckpointError):
        save(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_two_storages_in_one_model_are_refused(tmp_path):
    model, _ = stored(tmp_path, sk.QFP8.storage)
    layer = model.get_submodule(UP)
    layer.set_stored(sk.quantize(layer.dense_weight(), MX4))
    with refused(CheckpointError):
        save(model, tmp_path / "mixed")


@pytest.mark.parametrize("name", STORAGES)
def test_torchs_default_dtype_changes_nothing(name, tmp_path, ids):
    def run(where):
        _, folder = stored(where, STORAGES[name])
        again = load(folder, device="cpu", recipe=recipe_of(STORAGES[name]))
        return load_file(folder / "model.safetensors"), again(ids).logits

    expected, logits = run(tmp_path / "float32")
    torch.set_default_dtype(torch.bfloat16)
    try:
        shutil.copytree(tmp_path / "float32" / "base", tmp_path / "bfloat16" / "base")
        found, same = run(tmp_path / "bfloat16")
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(same, logits)
    assert found.keys() == expected.keys()
    assert all(
        found[key].dtype == expected[key].dtype and torch.equal(raw(found[key]), raw(expected[key])) for key in found
    )


@pytest.mark.parametrize("recipe", [None, sk.QFP8.lora(rank=2), sk.BF16], ids=str)
def test_weights_that_came_stored_can_train_again(recipe, tmp_path):
    _, folder = stored(tmp_path, sk.QFP8.storage)
    model = load(folder, device="cpu", recipe=recipe)
    sk.apply(model, sk.BF16)
    assert all(p.requires_grad for p in model.parameters())
