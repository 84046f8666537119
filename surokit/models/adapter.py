"""Save and load LoRA adapters in PEFT's layout (adapter_model.safetensors, adapter_config.json), merge and unmerge them.

The adapter of experts is that of PEFT's `target_parameters`: A of all experts one under another, [E r, K], B [N, r E] with the
experts as its fastest dimension. Two weights of one module are told apart by their depth: the one that comes first in the module is
`base_layer.lora_A`, the last `lora_A`.

E experts, K in_features, N out_features, r rank.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from surokit import convert
from surokit.errors import CheckpointError
from surokit.layers import OwnLayer, check_taken_over, recipe_layers
from surokit.models.folder import Tensors, Wanted, check_tensors, read_json, weight_files, write_json, written_whole
from surokit.models.gathering import is_sharded, whole, written_by_first
from surokit.nn.experts import Experts, ExpertsLinear
from surokit.nn.linear import Linear
from surokit.places import check_module, check_values, readable
from surokit.recipe import Lora, within_block

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_SUFFIXES = (".lora_A.weight", ".lora_B.weight")
_MADE_FOR = "surokit.storage"  # in the file's metadata: the storage whose error an adapter of init="loftq" began with
# settings of PEFT that change what an adapter computes, with the values that mean the plain one
_PLAIN = {
    "bias": ("none", None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "layer_replication": ([], None),
}
# initializations for which PEFT takes the first B A out of the base
_OUT_OF_BASE = ("pissa", "olora", "corda", "lora_ga")


def save_adapter(model: nn.Module, folder: str | Path, base: str | None = None) -> Path:
    """Write the model's LoRA adapter as PEFT does; returns the folder. `peft.PeftModel.from_pretrained` loads it.

    model: a Decoder, or any model whose layers `surokit.apply` adapted. base: name or folder of the base model for the
    adapter's config, by default where the model was loaded from. The files appear at once or not at all.
    Of a model that is sharded over processes all call this, and rank 0 writes.

    Warns where the adapter began with what storing the weights loses (init="loftq") and the base that it names is no folder that
    holds them as they are decoded: over others PEFT computes something else.

    Raises CheckpointError where the model has no adapter, layers have different ranks, or writing fails.
    """
    layers = _linears(model, "save_adapter")
    adapted = {name: m for name, m in layers.items() if m.has_adapter}
    if not adapted:
        if hasattr(model, "peft_config"):
            raise CheckpointError("The model's adapter is PEFT's own: write it with model.save_pretrained(folder).")
        raise CheckpointError("The model has no adapter to save: give it one with surokit.apply(model, recipe.lora()).")
    check_values(model, "save_adapter", _SUFFIXES)
    kinds = {(m.lora_rank, m.lora_alpha) for m in adapted.values()}
    if len(kinds) > 1:
        raise CheckpointError(f"The adapter has several ranks or alphas ({sorted(kinds)}): save() writes one of each.")
    rank, alpha = kinds.pop()
    named = base or getattr(model, "name_or_path", None)
    linears = {name for name, layer in layers.items() if not isinstance(layer, ExpertsLinear)}
    leaves = {name.rpartition(".")[2] for name in adapted if name in linears}
    everywhere = all(name in adapted for name in linears if name.rpartition(".")[2] in leaves)
    experts = [name for name in adapted if name not in linears]
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": named,
        "r": rank,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "target_modules": sorted(leaves if everywhere else linears & adapted.keys()),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,  # whatever A and B began with: another word would have PEFT change the base when it loads them
    }
    if experts:
        config["target_parameters"] = sorted({within_block(name) for name in experts})
    folder = Path(folder)
    fitted = sorted({layer.adapter_fits for layer in adapted.values()} - {""})
    made_for = {_MADE_FOR: "; ".join(fitted)} if fitted else {}

    def write(tensors: Iterator[tuple[str, Tensor]]) -> None:
        with written_whole(folder) as draft:
            write_json(draft / CONFIG, config)
            with readable(draft / WEIGHTS):
                save_file(dict(tensors), draft / WEIGHTS, metadata={"format": "pt", **made_for})

    tensors = (
        (f"{_PREFIX}{place}{suffix}", part.contiguous())
        for name, place in _places(adapted).items()
        for suffix, part in zip(_SUFFIXES, _written(adapted[name]))
    )
    written_by_first(is_sharded(model), tensors, write)
    if fitted and named and (is_sharded(model) or not _is_decoded(Path(named), adapted)):
        warnings.warn(
            f"The adapter makes up for what storing weights as {'; '.join(fitted)} loses, and its base {named} is not known to "
            "hold them decoded, so that PEFT computes something else over it unless it quantizes them alike: write the decoded "
            "weights with surokit.save and give their folder as the base.",
            stacklevel=2,
        )
    return folder


def _is_decoded(base: Path, adapted: Mapping[str, OwnLayer]) -> bool:
    """Return whether a base is a folder here that holds the decoded weight of the first layer whose adapter was made for it."""
    try:
        with Tensors(weight_files(base)) as tensors:
            for name, layer in adapted.items():
                if layer.adapter_fits and f"{name}.weight" in tensors:
                    held = tensors[f"{name}.weight"]
                    return torch.equal(held, layer.dense_weight(held.dtype).cpu())
    except (CheckpointError, OSError):
        pass
    return False


def load_adapter(model: nn.Module, folder: str | Path) -> None:
    """Read a LoRA adapter that we or PEFT wrote into the model's layers and freeze everything else.

    Adapters that are there already are replaced. Parameters take the dtype of the layer, the model's over a stored weight. Warns
    where the adapter began with what another storage of the weights loses (init="loftq").

    Raises FileNotFoundError for a missing folder or file, CheckpointError for tensors that do not fit the model (all are named),
    settings other than plain LoRA (rank-stabilized scaling is fine), or an initialization for which PEFT changed the base.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder}: give the folder that holds {CONFIG}.")
    config = read_json(folder / CONFIG)
    lora = _plain_lora(config, folder)
    if not (folder / WEIGHTS).is_file():
        raise FileNotFoundError(f"{folder} has no {WEIGHTS}: there is no adapter to load.")
    layers = _linears(model, "load_adapter")
    with Tensors([folder / WEIGHTS]) as tensors:
        found = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.found.items()}
        places = {name.removesuffix(s) for name in found for s in _SUFFIXES if name.endswith(s)}
        meant = tuple(config.get("target_parameters") or ())
        experts = (
            {n: m for n, m in layers.items() if isinstance(m, ExpertsLinear) and n.endswith(meant)} if meant else {}
        )
        names = {name: name for name in places & layers.keys()} | _places(experts)
        wanted: dict[str, Wanted] = {}
        for name, where in names.items():
            layer = layers[name]
            rank = lora.rank * (layer.experts if isinstance(layer, ExpertsLinear) else 1)
            wanted |= {
                f"{where}.lora_A.weight": Wanted((rank, layer.in_features)),
                f"{where}.lora_B.weight": Wanted((layer.out_features, rank)),
            }
        check_tensors(found, wanted, folder)
        if not names:
            raise CheckpointError(f"{folder / WEIGHTS} holds no adapter weights.")
        model.requires_grad_(False)
        dtype = convert.dtype_of(model)
        for name, layer in layers.items():
            if layer.has_adapter:
                layer.remove_adapter()
            if name not in names:
                continue
            layer.add_adapter(lora, dtype if layer.storage else None)
            _read(layer, *(tensors[f"{_PREFIX}{names[name]}{suffix}"] for suffix in _SUFFIXES))
            layer.adapter_fits = tensors.metadata.get(_MADE_FOR, "")
        now = "; ".join(sorted({str(layers[name].storage or "not quantized") for name in names}))
        then = tensors.metadata.get(_MADE_FOR, now)
    if then != now:
        warnings.warn(
            f"The adapter in {folder} began with what storing weights as {then} loses, and this model's are {now}: unless they are "
            "those codes, decoded, it adds a part of an error that they do not have. Load the model with the recipe that the "
            "adapter was made with.",
            stacklevel=2,
        )


def merge(model: nn.Module, requantize: bool = False, keep: bool = True) -> int:
    """Fold every adapter into its weight; returns how many. The model computes as before, without the two extra products.

    Stored weights that have an adapter are decoded and stay so, or with requantize=True are stored again as they were. keep
    holds what merging replaces, for `unmerge`: a second copy of the weights, or their codes. See `Linear.merge_adapter`.

    Raises ValueError where there is no adapter, or where an adapted layer shares its weight with an embedding.
    """
    adapted = {name: m for name, m in _linears(model, "merge").items() if m.has_adapter}
    if not adapted:
        raise ValueError("The model has no adapter to merge: give it one with surokit.apply(model, recipe.lora()).")
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    shared = [name for name, layer in adapted.items() if id(layer.weight) in embedded]
    if shared:
        raise ValueError(
            f"{', '.join(shared)} shares its weight with an embedding, which merging would change too: save the adapter apart."
        )
    for layer in adapted.values():
        layer.merge_adapter(requantize, keep)
    return len(adapted)


def unmerge(model: nn.Module) -> int:
    """Undo `merge`: weights come back bit for bit, and their adapters; returns how many.

    Raises ValueError where nothing was merged, or merged with keep=False.
    """
    merged = [layer for layer in _linears(model, "unmerge").values() if layer.can_unmerge]
    if not merged:
        raise ValueError(
            "The model has no merged adapters to take out again: merge(model, keep=True) keeps what it replaces."
        )
    for layer in merged:
        layer.unmerge_adapter()
    return len(merged)


def _places(adapted: Mapping[str, OwnLayer]) -> dict[str, str]:
    """Return under which name each adapter is written: those of one module, of experts, are nested as PEFT nests them."""
    places, outside = {}, Counter[str]()
    for name, layer in reversed(list(adapted.items())):
        place = name
        if isinstance(layer, ExpertsLinear):
            module = name.rpartition(".")[0]
            place = module + ".base_layer" * outside[module]
            outside[module] += 1
        places[name] = place
    return places


def _written(layer: OwnLayer) -> tuple[Tensor, Tensor]:
    """Return A and B as they are written."""
    if isinstance(layer, ExpertsLinear):
        return whole(layer.lora_A).flatten(0, 1), whole(layer.lora_B).permute(1, 2, 0).flatten(1)
    return whole(layer.lora_A.weight), whole(layer.lora_B.weight)


@torch.no_grad()
def _read(layer: OwnLayer, a: Tensor, b: Tensor) -> None:
    """Fill A and B of a layer from what `_written` gave."""
    if isinstance(layer, ExpertsLinear):
        layer.lora_A.copy_(a.view(layer.lora_A.shape))
        layer.lora_B.copy_(b.view(len(b), -1, layer.experts).permute(2, 0, 1))
    else:
        layer.lora_A.weight.copy_(a)
        layer.lora_B.weight.copy_(b)


def _linears(model: nn.Module, who: str) -> dict[str, OwnLayer]:
    check_module(model, who)
    check_taken_over(model, who)
    layers: dict[str, OwnLayer] = {name: m for name, m in model.named_modules() if isinstance(m, Linear)}
    experts = ((name, layer) for name, layer in recipe_layers(model) if isinstance(layer, ExpertsLinear))
    layers |= {name: layer for name, layer in experts if isinstance(layer.module, Experts)}
    if not layers:
        raise CheckpointError(
            f"{type(model).__name__} has no surokit.nn.Linear layers: surokit.apply(model, surokit.BF16) makes them."
        )
    return layers


def _plain_lora(config: dict[str, Any], folder: Path) -> Lora:
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{folder} holds an adapter of type {config.get('peft_type')}: only LORA is supported.")
    odd = [f"{key}={config[key]!r}" for key, plain in _PLAIN.items() if key in config and config[key] not in plain]
    if odd:
        raise CheckpointError(
            f"The adapter in {folder} is not a plain LoRA ({', '.join(odd)}), which is not supported."
        )
    if (init := str(config.get("init_lora_weights")).lower()).startswith(_OUT_OF_BASE):
        raise CheckpointError(
            f"The adapter in {folder} was initialized by {init}, for which PEFT changes the base: write it in PEFT with "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...), so that it fits the base as it was."
        )
    try:
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / CONFIG} lacks a usable r or lora_alpha: {error}.") from error
    if config.get("use_rslora"):  # alpha / sqrt(r) instead of alpha / r
        alpha *= rank**0.5
    targets = config.get("target_modules") or ("all",)
    return Lora(rank, alpha, (targets,) if isinstance(targets, str) else tuple(targets))
