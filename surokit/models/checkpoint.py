"""Load and save models as Hugging Face folders: config.json and safetensors.

A model is made without memory, on the meta device, and filled layer by layer from mapped files; a recipe that stores weights
quantized sees each linear layer as soon as it is there, so that high-precision and quantized weights never exist together.
Weights that a folder holds quantized stay as they are; models/layouts.py knows the formats.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surokit import convert, hub
from surokit.errors import CheckpointError
from surokit.layers import OwnLayer
from surokit.models.config import DecoderConfig
from surokit.models.decoder import MLP, Attention, Decoder
from surokit.models.deferred import Part, adapters, handed_on, twin_of
from surokit.models.expert_files import ExpertFiles, expert_files
from surokit.models.folder import (
    INDEX,
    SIDECAR,
    SINGLE,
    Tensors,
    Wanted,
    check_tensors,
    read_json,
    weight_files,
    write_json,
    write_tensors,
    written_whole,
)
from surokit.models.gathering import is_sharded, whole, written_by_first
from surokit.models.layouts import Layout, copied, layout_for, layout_of
from surokit.nn.experts import ExpertsLinear
from surokit.nn.joint import lay
from surokit.nn.linear import Linear
from surokit.places import check_dtype, check_values, find_device
from surokit.quantized import Quantized
from surokit.quantizer import Quantizer
from surokit.recipe import Lora, Recipe, find_recipe

OnLinearLoaded = Callable[[str, Linear], None]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def load(
    folder: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    recipe: Recipe | str | None = None,
    on_linear_loaded: OnLinearLoaded | None = None,
) -> Decoder:
    """Return a Decoder with the weights of a Hugging Face folder, or of a Hub id, which is fetched first.

    Reads Llama 2 and 3, SmolLM2, Mistral, Mixtral, Qwen2.5, Qwen3 and Qwen3-MoE with weights in safetensors, one file or shards,
    also quantized: fine-grained FP8, ModelOpt's NVFP4 and MXFP8, MXFP4, bitsandbytes' NF4; experts in fine-grained FP8 only.
    dtype: of the parameters. device: a CUDA GPU if there is one, unless given; on "meta" the model has no values yet, and a session
    with `parallel=`, or `surokit.parallelize`, reads them layer by layer, each process its part. recipe: as for `surokit.apply`;
    a recipe with a storage quantizes each layer and each expert while it loads. on_linear_loaded(name, layer) is called for each
    linear layer once its weight is there, a tied head excepted.

    Quantized weights stay stored as they are without a recipe, and with one that stores them the same way. A recipe with
    another storage quantizes them again, with a warning; a recipe without storage dequantizes them.

    Raises CheckpointError for an unsupported architecture, damaged files or tensors that do not fit the config (all are
    named), FileNotFoundError where there is no such folder, file or Hub repository, ValueError for a CUDA device that is not there.
    """
    recipe = find_recipe(recipe) if recipe is not None else None
    check_dtype(dtype, "load")
    path = _locate(folder)
    raw = read_json(path / "config.json")
    config = DecoderConfig.from_hf(raw)
    layout = _layout_in(path, raw)
    target = find_device(device, "load")
    model = Decoder(config, device="meta", dtype=dtype)
    model.deferred = FolderWeights(path, layout, dtype) if target.type == "meta" else None
    again: list[str] = []

    def storage_of(name: str, layer: OwnLayer) -> Quantizer | None:
        return _storage_for(recipe, config, name, layer)

    def storage_while_read(name: str, layer: OwnLayer) -> Quantizer | None:
        return None if _fitted(recipe, name) else storage_of(name, layer)  # the adapter wants what quantizing loses

    for _, _, layers in _filled(model, path, layout, target, storage_while_read):
        for name, layer in layers.items():
            storage = storage_of(name, layer)
            if storage and convert.store(name, layer, storage, _fitted(recipe, name), dtype):
                again.append(name)  # it was quantized before in another way
            if not isinstance(layer, Linear):
                continue
            if on_linear_loaded is not None:
                on_linear_loaded(name, layer)
            reader = model.get_submodule(name.rpartition(".")[0])
            if isinstance(reader, (Attention, MLP)):  # at once, so that no more than these exist twice
                lay(reader.readers, reader.fusion)
    model.model.rotary_emb.to_empty(device=target)
    if config.experts is not None:
        model.router_use.to_empty(device=target)
    if config.tied:
        model.tie_weights()
    model.name_or_path = str(folder)
    convert.came_stored(model)
    if recipe is not None:
        convert.apply(model, recipe)
    if again and recipe is not None:
        warnings.warn(
            f"{len(again)} weights of {path} are quantized in another way than {recipe.name} stores them and were quantized "
            f"again as {recipe.storage}: both roundings count. Load the unquantized model, or a recipe with their own storage.",
            stacklevel=2,
        )
    return model


def save(model: nn.Module, folder: str | Path, shard_gib: float = 5.0) -> Path:
    """Write config.json and safetensors that transformers' from_pretrained loads; returns the folder.

    Shards of at most shard_gib GiB. Stored weights keep their codes and scales: E4M3 in blocks is written as fine-grained FP8,
    NVFP4 and MXFP8 as ModelOpt's, MXFP4 as gpt-oss', NF4 as bitsandbytes'. Everything appears at once or not at all; other
    files in the folder stay. Weights keep their dtypes. A model that is sharded over processes is gathered
    tensor by tensor: all of them call this, and rank 0 writes.

    Raises TypeError for a model that is not a surokit.Decoder, CheckpointError for a model with an adapter (save_adapter
    writes it, surokit.merge folds it in), a storage that no checkpoint format has, a configuration that no
    family can express, or where writing fails.
    """
    if not isinstance(model, Decoder):
        raise TypeError(
            f"save() takes a surokit.Decoder, not a {type(model).__name__}: a model of transformers has its own "
            "save_pretrained(), for weights that are not stored quantized; save_adapter() keeps the adapter of either."
        )
    check_values(model, "save")
    linears: dict[str, OwnLayer] = {name: m for name, m in model.named_modules() if isinstance(m, Linear)}
    hf = model.config.to_hf()
    sparse = expert_files(model, model.config, hf["model_type"])
    for files in sparse.values():
        linears |= files.live
    if any(m.has_adapter for m in linears.values()):
        raise CheckpointError(
            "The model has an adapter: surokit.save_adapter() writes it apart, and surokit.merge() folds it into the "
            "weights, which save() can write."
        )
    dtype = model.model.norm.weight.dtype
    hf["dtype"] = str(dtype).removeprefix("torch.")
    layout = _layout_for(linears)
    for files in sparse.values():
        files.check_writable(layout)
    # experts by the module that readers know
    plain = [
        name.rpartition(".")[0] if isinstance(m, ExpertsLinear) else name
        for name, m in linears.items()
        if not m.storage
    ]
    kept = [*dict.fromkeys(plain)]
    if layout is not None:
        hf["quantization_config"] = layout.config(kept, dtype)
    folder = Path(folder)

    def write(tensors: Iterator[tuple[str, Tensor]]) -> None:
        with written_whole(folder) as draft:
            write_json(draft / "config.json", hf)
            if layout is not None and (sidecar := layout.sidecar(kept)):
                write_json(draft / SIDECAR, sidecar)
            write_tensors(draft, ((name, t.contiguous()) for name, t in tensors), int(shard_gib * 2**30))

    written_by_first(is_sharded(model), _written(model, layout, dtype, linears, sparse), write)
    return folder


def _written(
    model: Decoder,
    layout: Layout | None,
    dtype: torch.dtype,
    linears: Mapping[str, OwnLayer],
    sparse: Mapping[str, ExpertFiles],
) -> Iterator[tuple[str, Tensor]]:
    """Yield what is written, a few tensors at a time: of a sharded model no more are gathered."""
    stored = {
        name: Q for name, layer in linears.items() if isinstance(layer, Linear) and (Q := layer.stored) is not None
    }
    apart = {f"{name}.{held}" for name, Q in stored.items() for held in ("weight", *Q.quantizer.scaling.stored_as)}
    apart |= {"lm_head.weight"} if model.config.tied else set()
    inside = tuple(f"{path}." for path in sparse)
    for name, tensor in model.state_dict().items():
        if name not in apart and not name.startswith(inside):
            yield name, whole(tensor)
    for files in sparse.values():
        yield from files.tensors(layout, dtype)
    for name, Q in stored.items():
        assert layout is not None
        parts = tuple(whole(part) for part in Q.parts)
        yield from layout.tensors(f"{name}.weight", Quantized.of(Q.quantizer, parts, Q.shape), dtype).items()


# -- reading


class FolderWeights:
    """A FolderWeights reads the values of a model on the meta device from a folder. dtype: that it is read in."""

    def __init__(self, path: Path, layout: Layout | None, dtype: torch.dtype) -> None:
        self._path, self._layout, self._dtype = path, layout, dtype

    @torch.no_grad()
    def parts(self, model: Decoder, device: torch.device) -> Iterator[Part]:
        sparse = expert_files(model, model.config)
        experts = {name: weight for files in sparse.values() for name, weight in files.live.items()}

        def storage_of(name: str, layer: OwnLayer) -> Quantizer | None:
            return experts[name].storage

        for name, module, _ in _filled(twin_of(model), self._path, self._layout, device, storage_of):
            yield from handed_on(name, module, model)
        yield from adapters(model, device)


def _filled(
    model: Decoder,
    path: Path,
    layout: Layout | None,
    device: torch.device,
    storage_of: Callable[[str, OwnLayer], Quantizer | None],
) -> Iterator[tuple[str, nn.Module, dict[str, OwnLayer]]]:
    """Give the parameters of a model on the meta device memory on `device` and the folder's values. Yield each module that has its
    own, experts with their router as one, and the layers in it that a recipe can store.

    storage_of: quantizes each expert as it comes.
    """
    sparse = expert_files(model, model.config)
    inside = tuple(f"{path}." for path in sparse)
    with Tensors(weight_files(path)) as tensors:
        found = {name: tensor for name, tensor in tensors.found.items() if not _ignored(name, model.config, layout)}
        check_tensors(found, _wanted(model, sparse, layout, found), path)
        for name, module in model.named_modules():
            if name in sparse:
                files = sparse[name]
                files.fill_router(tensors, device)
                for path_, weight in files.live.items():
                    files.fill(weight, layout, tensors, found, device, storage_of(path_, weight))
                yield name, module, dict(files.live)
            if name.startswith((*sparse, *inside)):
                continue
            _fill(name, module, layout, tensors, found, device)
            is_layer = isinstance(module, Linear) and not (model.config.tied and module is model.lm_head)
            yield name, module, {name: module} if is_layer else {}


def _fill(
    name: str,
    module: nn.Module,
    layout: Layout | None,
    tensors: Tensors,
    found: Mapping[str, Wanted],
    device: torch.device,
) -> None:
    """Give the module's own parameters memory on `device` and their values."""
    for key, parameter in list(module.named_parameters(recurse=False)):
        full = f"{name}.{key}"
        if key == "weight" and isinstance(module, Linear) and layout and layout.holds(full, found):
            shape_NK = module.out_features, module.in_features
            module.set_stored(layout.read(full, shape_NK, tensors, device))
        elif full in found:  # all but a tied head
            setattr(module, key, nn.Parameter(copied(tensors[full], parameter.dtype, device)))


def _wanted(
    model: Decoder, sparse: Mapping[str, ExpertFiles], layout: Layout | None, found: Mapping[str, Wanted]
) -> dict[str, Wanted]:
    """Return what the files must have: the model's parameters, some of them in the layout of the quantized ones, experts apart."""
    wanted = {name: Wanted(tuple(t.shape)) for name, t in model.state_dict().items()}
    if model.config.tied:
        del wanted["lm_head.weight"]
    for path, files in sparse.items():
        wanted = {name: w for name, w in wanted.items() if not name.startswith(f"{path}.")}
        wanted |= files.wanted(layout, found)
    for name, module in model.named_modules():
        weight = f"{name}.weight"
        if isinstance(module, Linear) and layout and layout.holds(weight, found):
            del wanted[weight]
            wanted |= layout.wanted(weight, (module.out_features, module.in_features), found)
    return wanted


# scales of activations and of the KV cache, which ModelOpt calibrates
_CALIBRATED = (".input_scale", ".k_scale", ".v_scale")


def _ignored(name: str, config: DecoderConfig, layout: Layout | None) -> bool:
    """Return tensors that some checkpoints carry and no model needs: old rotary tables, the copy of a tied head, calibration."""
    if layout is not None and name.endswith(_CALIBRATED):
        return True
    return name.endswith("rotary_emb.inv_freq") or (config.tied and name.startswith("lm_head.weight"))


def _fitted(recipe: Recipe | None, name: str) -> Lora | None:
    """Return the adapter that this layer gets where it begins with what storing the weight loses."""
    lora = recipe.adapter if recipe is not None else None
    return lora if lora and lora.fits_errors and lora.meant(name) else None


def _storage_for(recipe: Recipe | None, config: DecoderConfig, name: str, layer: OwnLayer) -> Quantizer | None:
    """Return how the recipe will store this layer, so that it is quantized as it arrives and `apply` finds it done; None where it
    will not."""
    if recipe is None or recipe.storage is None or convert.skip_reason(name, layer, recipe, config.layers):
        return None
    return recipe.storage


def _layout_in(path: Path, config: Mapping[str, Any]) -> Layout | None:
    """Return the layout of a folder's quantized weights, from config.json or else ModelOpt's own file; None without any."""
    quantization = config.get("quantization_config")
    if quantization is None and (path / SIDECAR).is_file():
        quantization = {"quant_method": "modelopt", **read_json(path / SIDECAR).get("quantization", {})}
    return layout_of(quantization, path) if quantization else None


def _layout_for(linears: Mapping[str, OwnLayer]) -> Layout | None:
    """Return the one layout in which all stored weights are written; None where there are none."""
    layouts: dict[Layout, str] = {}
    for name, layer in linears.items():
        if layer.storage is None:
            continue
        layout = layout_for(layer.storage)
        if layout is None:
            raise CheckpointError(
                f"{name} is stored as {layer.storage}, for which there is no checkpoint format here: apply "
                "surokit.BF16 first."
            )
        layouts.setdefault(layout, name)
    if len(layouts) > 1:
        raise CheckpointError(
            f"{' and '.join(layouts.values())} are stored in different ways, and a checkpoint has one: apply one recipe to "
            "the whole model first."
        )
    return next(iter(layouts), None)


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
    """Return the local folder of a Hub repository's config and weights, downloaded or from the cache."""
    try:
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
    except ImportError as error:
        raise FileNotFoundError(
            f"There is no folder {repo_id}, and huggingface_hub, which could fetch it, is not installed."
        ) from error
    online = hub.reachable()
    try:
        config = hub.fetch(repo_id, "config.json", online=online)
        if read_json(config).get("quantization_config") is None:
            with suppress(EntryNotFoundError):
                hub.fetch(repo_id, SIDECAR, online=online)
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
