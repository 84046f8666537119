"""Models from and to Hugging Face folders: config.json and safetensors.

A model is made without memory, on the meta device, and filled layer by layer from mapped files; a recipe that stores weights
quantized sees each linear layer as soon as it is there, so that high-precision and quantized weights never exist together.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surokit import convert, hub
from surokit.errors import CheckpointError
from surokit.formats import E4M3
from surokit.models.config import DecoderConfig
from surokit.models.decoder import Decoder
from surokit.models.folder import (
    INDEX,
    SINGLE,
    Tensors,
    check_shapes,
    read_json,
    weight_files,
    write_json,
    write_tensors,
    written_whole,
)
from surokit.nn.linear import Linear
from surokit.quantized import Quantized
from surokit.quantizer import Block, Quantizer
from surokit.recipe import Recipe, find_recipe

OnLinearLoaded = Callable[[str, Linear], None]

_FP8_BLOCK = 128
_FP8_STORAGE = Quantizer(E4M3, Block(_FP8_BLOCK, _FP8_BLOCK, pow2=False))
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def load(
    folder: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    recipe: Recipe | str | None = None,
    on_linear_loaded: OnLinearLoaded | None = None,
) -> Decoder:
    """A Decoder with the weights of a Hugging Face folder, or of a Hub id, which is fetched first.

    Reads Llama 2 and 3, SmolLM2, Mistral, Qwen2.5 and Qwen3 with weights in safetensors, one file or shards, and fine-grained FP8
    (128 x 128 blocks), which stays stored as it is. dtype: of the parameters. device: a CUDA GPU if there is one, unless given.
    recipe: as for `surokit.apply`; a recipe with a storage quantizes each layer while it loads. on_linear_loaded(name,
    layer) is called for each linear layer once its weight is there, a tied head excepted.

    Raises CheckpointError for an unsupported architecture, damaged files or tensors that do not fit the config (all are
    named), FileNotFoundError where there is no such folder, file or Hub repository.
    """
    recipe = find_recipe(recipe) if recipe is not None else None
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(
            f"load(dtype={dtype}): parameters are bfloat16, float16 or float32; recipe= quantizes weights."
        )
    path = _locate(folder)
    raw = read_json(path / "config.json")
    config = DecoderConfig.from_hf(raw)
    _check_quantization(raw.get("quantization_config"), path)
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = Decoder(config, device="meta", dtype=dtype)
    callbacks = [c for c in (_storing(recipe, config), on_linear_loaded) if c]
    with Tensors(weight_files(path)) as tensors:
        found = {name: shape for name, shape in tensors.shapes.items() if not _ignored(name, config)}
        check_shapes(found, _wanted(model, found), path)
        for name, module in model.named_modules():
            _fill(name, module, tensors, found, target)
            if isinstance(module, Linear) and not (config.tied and module is model.lm_head):
                for callback in callbacks:
                    callback(name, module)
    model.model.rotary_emb.to_empty(device=target)
    if config.tied:
        model.tie_weights()
    model.name_or_path = str(folder)
    if recipe is not None:
        convert.apply(model, recipe)
    return model


def save(model: nn.Module, folder: str | Path, shard_gib: float = 5.0) -> Path:
    """Write config.json and safetensors that transformers' from_pretrained loads; returns the folder.

    Shards of at most shard_gib GiB. Stored FP8 weights are written as fine-grained FP8. Everything appears at once or not at
    all; other files in the folder stay. Weights keep their dtypes.

    Raises TypeError for a model that is not a surokit.Decoder, CheckpointError for a model with an adapter (save_adapter
    writes it, Linear.merge_adapter folds it in), a configuration that no family can express, or where writing fails.
    """
    if not isinstance(model, Decoder):
        raise TypeError(
            f"save() takes a surokit.Decoder, not a {type(model).__name__}: a model of transformers has its own "
            "save_pretrained(), for weights that are not stored quantized; save_adapter() keeps the adapter of either."
        )
    linears = {name: m for name, m in model.named_modules() if isinstance(m, Linear)}
    if any(m.has_adapter for m in linears.values()):
        raise CheckpointError(
            "The model has an adapter: surokit.save_adapter() writes it apart, and merge_adapter() of each layer folds it "
            "into weights that save() can write."
        )
    hf = model.config.to_hf()
    hf["dtype"] = str(model.model.norm.weight.dtype).removeprefix("torch.")
    stored = {name for name, m in linears.items() if m.storage is not None}
    if stored:
        hf["quantization_config"] = _quantization_config(linears, stored)
    tensors = {name: t.detach().contiguous() for name, t in model.state_dict().items()}
    if model.config.tied:
        del tensors["lm_head.weight"]
    folder = Path(folder)
    with written_whole(folder) as draft:
        write_json(draft / "config.json", hf)
        write_tensors(draft, tensors, int(shard_gib * 2**30))
    return folder


# -- reading


def _fill(name: str, module: nn.Module, tensors: Tensors, found: dict[str, Any], device: torch.device) -> None:
    """Give the module's own parameters memory on `device` and their values."""
    for key, parameter in list(module.named_parameters(recurse=False)):
        full = f"{name}.{key}"
        if full not in found:  # a tied head
            continue
        if f"{full}_scale_inv" in found:
            assert isinstance(module, Linear)
            codes, scales = tensors[full], tensors[f"{full}_scale_inv"]
            if codes.dtype != torch.float8_e4m3fn:
                raise CheckpointError(f"{full} is {codes.dtype}, with scales it should be float8_e4m3fn.")
            codes, scales = _copied(codes, codes.dtype, device), _copied(scales, torch.float32, device)
            module.set_stored(Quantized(codes, scales, _FP8_STORAGE, module.in_features))
        else:
            setattr(module, key, nn.Parameter(_copied(tensors[full], parameter.dtype, device)))


def _copied(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of its own: what comes from a mapped file would change with the file."""
    return torch.empty(tensor.shape, dtype=dtype, device=device).copy_(tensor)


def _wanted(model: Decoder, found: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors a file must have; FP8 scales where the file has them."""
    wanted = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    if model.config.tied:
        del wanted["lm_head.weight"]
    for name, module in model.named_modules():
        scales = f"{name}.weight_scale_inv"
        if isinstance(module, Linear) and scales in found:
            wanted[scales] = tuple(-(-n // _FP8_BLOCK) for n in (module.out_features, module.in_features))
    return wanted


def _ignored(name: str, config: DecoderConfig) -> bool:
    """Tensors that some checkpoints carry and no model needs: old rotary tables, the copy of a tied head."""
    return name.endswith("rotary_emb.inv_freq") or (config.tied and name == "lm_head.weight")


def _storing(recipe: Recipe | None, config: DecoderConfig) -> OnLinearLoaded | None:
    """Quantizes a weight for storage where the recipe will, so that `apply` finds it done."""
    if recipe is None or recipe.storage is None:
        return None
    storage = recipe.storage

    def store(name: str, layer: Linear) -> None:
        if not convert.why_kept(name, layer, recipe, config.layers):
            layer.store(storage)

    return store


def _check_quantization(quantization: dict[str, Any] | None, path: Path) -> None:
    if quantization is None:
        return
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if method != "fp8" or list(block or ()) != [_FP8_BLOCK, _FP8_BLOCK]:
        raise CheckpointError(
            f"The weights in {path} are quantized ({method}, blocks {block}): only fp8 in blocks of 128 x 128 is supported. "
            "Load the unquantized model and give a recipe."
        )


# -- writing


def _quantization_config(linears: dict[str, Linear], stored: set[str]) -> dict[str, Any]:
    for name in stored:
        if linears[name].storage != _FP8_STORAGE:
            raise CheckpointError(
                f"{name} is stored as {linears[name].storage}, for which there is no checkpoint format here: apply "
                "surokit.BF16 first."
            )
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [_FP8_BLOCK, _FP8_BLOCK],
        "modules_to_not_convert": [name for name in linears if name not in stored],
    }


# -- finding


def _locate(folder: str | Path) -> Path:
    path = Path(folder).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise FileNotFoundError(f"{path} is a file: give the folder that holds config.json and the weights.")
    if isinstance(folder, str) and _HUB_ID.fullmatch(folder):
        return _fetch(folder)
    raise FileNotFoundError(f"There is no folder {path}: give a folder with config.json and safetensors, or a Hub id.")


def _fetch(repo_id: str) -> Path:
    """The local folder of a Hub repository's config and weights, downloaded or from the cache."""
    try:
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
    except ImportError as error:
        raise FileNotFoundError(
            f"There is no folder {repo_id}, and huggingface_hub, which could fetch it, is not installed."
        ) from error
    online = hub.reachable()
    try:
        config = hub.fetch(repo_id, "config.json", online=online)
        try:
            hub.fetch(repo_id, SINGLE, online=online)
        except EntryNotFoundError:
            index = read_json(hub.fetch(repo_id, INDEX, online=online))
            for shard in dict.fromkeys(index["weight_map"].values()):
                hub.fetch(repo_id, shard, online=online)
    except (OSError, EntryNotFoundError, HfHubHTTPError) as error:
        cause = "the Hub answers but does not give it" if online else "the Hub cannot be reached and the cache lacks it"
        raise FileNotFoundError(
            f"There is no folder {repo_id}, and no such model from the Hub: {cause}. Check the name, the network, or give a folder."
        ) from error
    return config.parent
