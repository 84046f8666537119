"""Read a shape: from a config.json as a dict, file, folder or Hub id, from a config object, from a live model.

Each family is a row of FAMILIES: transformers' defaults for fields that a config.json lacks, which matrices have biases, which
blocks have the sliding window, and how experts and latents are named. The rows follow the model code of transformers 5 and are
tested against its models' own parameters and FLOPs; modules that only some trainers add, such as DeepSeek-V3's prediction of
further tokens, are no part of these models and are not counted. A model_type that has no row is counted as if it were a Llama,
and the plan says so; one that routes to experts in a way not known here is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surokit import arguments
from surokit.planner.inputs import catalogue
from surokit.planner.inputs.shape import Experts, Latent, Shape

_NEEDED = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
}
_GPT2_NEEDED = {"layers": "n_layer", "width": "n_embd", "heads": "n_head", "vocab": "vocab_size"}
_EXPERT_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class _Fields:
    """A _Fields looks up the fields of one config: its own, where it has them (null included), else the family's defaults."""

    def __init__(self, where: str, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.where, self.config, self.defaults = where, config, defaults

    def __call__(self, *names: str, default: Any = None) -> Any:
        """Return the value of the first of `names` that the config or the defaults have, since families differ in names."""
        for source in (self.config, self.defaults):
            for name in names:
                if name in source:
                    return source[name]
        return default

    def integer(self, *names: str) -> int:
        """Return a field that is a whole number of at least one; raise ValueError or TypeError, in a sentence, otherwise."""
        value = self(*names)
        if value is None:
            raise ValueError(f"{self.where} lacks {names[0]}: add it, or plan with the number of parameters.")
        return arguments.integer(f"{names[0]} of {self.where}", value)

    def whole(self, *names: str) -> int:
        """Return a field that is a whole number of at least zero; 0 where it is missing."""
        value = self(*names)
        return self.integer(*names) if value else 0


@dataclass(frozen=True)
class Family:
    """A Family says how configs of one model_type are read.

    The biases and `qk_norm` are a bool, or the name of the field that holds it. `windows` returns the blocks with the sliding
    window where layer_types does not name them, `experts` the routed experts; `latent` says whether attention has a latent.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool | str = "attention_bias"
    o_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    qk_norm: bool | str = False
    windows: Callable[[_Fields, int], tuple[int, ...] | None] | None = None
    experts: Callable[[_Fields, int], Experts | None] | None = None
    latent: bool = False
    needed: Mapping[str, str] = field(default_factory=lambda: _NEEDED)
    fixed: Mapping[str, Any] = field(default_factory=dict)


# -- sliding windows: the blocks that have one, None for all of them


def _all_blocks(get: _Fields, layers: int) -> tuple[int, ...] | None:
    return None


def _from_block(get: _Fields, layers: int) -> tuple[int, ...]:
    return tuple(range(get.whole("max_window_layers"), layers))


def _even_until(get: _Fields, layers: int) -> tuple[int, ...]:
    return tuple(range(0, min(layers, get.whole("max_window_layers")), 2))


def _even_blocks(get: _Fields, layers: int) -> tuple[int, ...]:
    return tuple(range(0, layers, 2))


def _all_but_every_nth(get: _Fields, layers: int) -> tuple[int, ...]:
    period = get.integer("sliding_window_pattern")
    return tuple(i for i in range(layers) if (i + 1) % period)


def _without_rope(get: _Fields, layers: int) -> tuple[int, ...]:
    rope, period = get("no_rope_layers"), get.integer("no_rope_layer_interval")
    if not rope:
        return tuple(i for i in range(layers) if (i + 1) % period == 0)
    return tuple(i for i, has_it in enumerate(_a_layer_each(get, "no_rope_layers", layers)) if not has_it)


# -- experts


def _every_block(get: _Fields, layers: int) -> Experts | None:
    """Read the experts of Mixtral and gpt-oss, where every block is routed."""
    return Experts(
        get.integer("num_local_experts", "num_experts"),
        get.integer("num_experts_per_tok", "experts_per_token"),
        get.integer("intermediate_size"),
        tuple(range(layers)),
        bias=bool(get("_expert_bias")),
        router=get("_router", default="gate"),
    )


def _every_nth_block(get: _Fields, layers: int) -> Experts | None:
    """Read Qwen's experts: every decoder_sparse_step-th block is routed but the mlp_only_layers, with a gated shared expert in the
    second generation."""
    count = get.whole("num_experts", "num_local_experts")
    step, dense = get.integer("decoder_sparse_step"), get("mlp_only_layers") or ()
    if isinstance(dense, str) or not isinstance(dense, Sequence):
        raise ValueError(f"mlp_only_layers of {get.where} is {dense!r}: give a list of the layers' numbers.")
    routed = tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)
    if not count or not routed:
        return None
    gated = bool(get("_shared"))
    return Experts(
        count,
        get.integer("num_experts_per_tok"),
        get.integer("moe_intermediate_size"),
        routed,
        shared_ffn=get.whole("shared_expert_intermediate_size") if gated else 0,
        shared_gate=gated,
        shared="shared_expert",
    )


def _after_the_first(get: _Fields, layers: int) -> Experts | None:
    """Read the experts of DeepSeek and GLM: every block after the first first_k_dense_replace is routed, with shared experts that
    every token passes."""
    routed = tuple(range(min(layers, get.whole("first_k_dense_replace")), layers))
    count = get.whole("n_routed_experts", "num_local_experts", "num_experts")
    if not count or not routed:
        return None
    inner = get.integer("moe_intermediate_size")
    return Experts(
        count, get.integer("num_experts_per_tok"), inner, routed, shared_ffn=inner * get.whole("n_shared_experts")
    )


_LLAMA = Family(mlp_bias="mlp_bias")
_MLA = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA = {"head_dim": 256, "tie_word_embeddings": True}
_QWEN_SPARSE = {"decoder_sparse_step": 1, "intermediate_size": 5632}
_DEEPSEEK_V3 = Family(
    {
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        **_MLA,
    },
    experts=_after_the_first,
    latent=True,
)

#: Families whose parameters and FLOPs are exactly those of transformers' own models. Names with an underscore are ours, for what
#: a family has whatever its configs say.
FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "smollm": _LLAMA,
    "decoder": _LLAMA,
    "granite": _LLAMA,
    "seed_oss": Family(
        {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
        o_bias="attention_out_bias",
        mlp_bias="mlp_bias",
    ),
    "mistral": Family({"num_key_value_heads": 8, "sliding_window": 4096}, False, False, windows=_all_blocks),
    "smollm3": Family(
        {
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "no_rope_layer_interval": 4,
        },
        mlp_bias="mlp_bias",
        windows=_without_rope,
    ),
    "qwen2": Family({"num_key_value_heads": 32, **_QWEN_WINDOW}, True, False, windows=_from_block),
    "qwen3": Family({"num_key_value_heads": 32, "head_dim": 128, **_QWEN_WINDOW}, qk_norm=True, windows=_from_block),
    "phi3": Family({}, False, False, windows=_all_blocks, fixed={"layout": "fused"}),
    "gemma": Family({"num_key_value_heads": 16, **_GEMMA}),
    "gemma2": Family(
        {"num_key_value_heads": 4, "sliding_window": 4096, **_GEMMA}, windows=_even_blocks, fixed={"norms": 4}
    ),
    "gemma3_text": Family(
        {"num_key_value_heads": 4, "sliding_window": 4096, "sliding_window_pattern": 6, "vocab_size": 262208, **_GEMMA},
        qk_norm=True,
        windows=_all_but_every_nth,
        fixed={"norms": 4},
    ),
    "gpt2": Family(
        {"n_positions": 1024, "n_inner": None, "tie_word_embeddings": True},
        True,
        True,
        True,
        needed=_GPT2_NEEDED,
        fixed={"layout": "gpt2", "gated": False, "norm_bias": True},
    ),
    "mixtral": Family(
        {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
        False,
        False,
        windows=_all_blocks,
        experts=_every_block,
    ),
    "qwen2_moe": Family(
        {
            "num_key_value_heads": 16,
            "qkv_bias": True,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "_shared": True,
            **_QWEN_WINDOW,
            **_QWEN_SPARSE,
        },
        "qkv_bias",
        False,
        windows=_even_until,
        experts=_every_nth_block,
    ),
    "qwen3_moe": Family(
        {
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            **_QWEN_WINDOW,
            **_QWEN_SPARSE,
            "intermediate_size": 6144,
        },
        qk_norm=True,
        windows=_all_blocks,
        experts=_every_nth_block,
    ),
    "deepseek_v2": Family(
        {
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "first_k_dense_replace": 0,
            **_MLA,
        },
        mlp_bias="mlp_bias",
        experts=_after_the_first,
        latent=True,
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "glm4_moe": Family(
        {
            "num_key_value_heads": 8,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 1,
        },
        o_bias=False,
        qk_norm="use_qk_norm",
        experts=_after_the_first,
    ),
    "gpt_oss": Family(
        {
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "attention_bias": True,
            "_expert_bias": True,
            "_router": "router",
        },
        windows=_even_blocks,
        experts=_every_block,
        fixed={"sinks": True},
    ),
}
# a model_type that has no row: what most decoders are, with the fields that say otherwise
_OTHER = Family({}, mlp_bias="mlp_bias", windows=_all_blocks)


def read_shape(what: Any) -> tuple[Shape, str]:
    """Read a Shape, a config dict, a path, a Hub id, a config object or a live model; return (shape, where it came from).

    A name of the catalogue ("llama-3.1-8b") needs nothing else. Of another Hub id ("org/name") the config.json is read, from the
    local cache where that has it. Raises ValueError for a config that lacks a field or describes another architecture,
    FileNotFoundError for a path without a config.json or an id that cannot be had, TypeError for anything else.
    """
    if isinstance(what, Shape):
        return what, "as given"
    if isinstance(what, str | Path):
        where, config = _read_text(what)
        shape, part = _from_config(config, where)
        return shape, f"from {where}{part}"
    if isinstance(what, Mapping):
        shape, part = _from_config(what, "the config")
        return shape, f"from a config{part}"
    name = type(what).__name__
    if (hasattr(what, "model_type") or hasattr(what, "hidden_size")) and callable(getattr(what, "to_dict", None)):
        shape, part = _from_config(what.to_dict(), name)
        return shape, f"from a {name}{part}"
    if hasattr(what, "layers") and hasattr(what, "width"):
        return _from_decoder(what), f"from a {name}"
    if getattr(what, "config", None) is not None:
        shape, _ = read_shape(what.config)
        return shape, f"from the config of a live {name}"
    raise TypeError(
        f"plan() cannot read a {name}: give the number of parameters (8e9), "
        "a config (dict, folder, config.json or Hub id) or a model with a .config."
    )


# -- files


def _read_text(what: str | Path) -> tuple[str, Mapping[str, Any]]:
    """Return (where it was found, the config) of a path, a name of the catalogue or a Hub id."""
    path = Path(what).expanduser()
    where = ""
    if path.is_dir():
        path = path / "config.json"
    elif not path.exists() and isinstance(what, str):
        if (model := catalogue.find(what)) is not None:
            return f"the catalogue's {model.name}", model.config
        if _HUB_ID.fullmatch(what):
            path, where = _fetched(what), what
    if not path.is_file():
        near = catalogue.nearest(str(what))
        hint = (
            ": write a number of parameters as 8e9."
            if _looks_like_count(str(what))
            else f": did you mean {near!r}, which is known without a network?"
            if near
            else ": give a folder or a config.json that is on this machine, or a Hub id such as 'Qwen/Qwen3-8B'."
        )
        raise FileNotFoundError(f"There is no {path}{hint}")
    where = where or str(path)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{where} is not valid JSON ({error}): write it again or give the sizes as a dict.") from error
    if not isinstance(config, dict):
        raise ValueError(f"{where} holds a {type(config).__name__}, not the fields of a config.json.")
    return where, config


def _looks_like_count(text: str) -> bool:
    return bool(text) and text[-1] in "kKmMbBtT" and text[:-1].replace(".", "", 1).isdigit()


def _fetched(repo_id: str) -> Path:
    """Fetch a Hub repository's config.json and return its path. The cache comes first, since a config's sizes do not change."""
    try:
        from huggingface_hub.errors import HfHubHTTPError

        from surokit import hub
    except ImportError as error:
        raise FileNotFoundError(
            f"There is no folder {repo_id}, and huggingface_hub, which could fetch its config.json, is not installed."
        ) from error
    try:
        return hub.fetch(repo_id, "config.json", online=False)
    except (OSError, ValueError, HfHubHTTPError):
        pass
    online = hub.reachable()
    if online:
        try:
            return hub.fetch(repo_id, "config.json", online=True)
        except (OSError, ValueError, HfHubHTTPError) as error:
            cause, said = "the Hub answers but does not give it (a wrong name, or one that needs a login)", error
    else:
        cause, said = "the Hub cannot be reached and the cache lacks it", None
    near = catalogue.nearest(repo_id)
    hint = f" Did you mean {near!r}, which is known without a network?" if near else ""
    raise FileNotFoundError(
        f"There is no folder {repo_id}, and no such config.json from the Hub: {cause}. Check the name, the network, or give "
        f"the sizes as a dict.{hint}"
    ) from said


# -- fields


def _from_config(config: Mapping[str, Any], where: str) -> tuple[Shape, str]:
    """Return (the shape, a phrase that says which part of the config it is, "" for all of it)."""
    part = ""
    text = config.get("text_config")
    if "hidden_size" not in config and isinstance(text, Mapping):
        tied = {k: v for k, v in config.items() if k == "tie_word_embeddings"}
        config, part = {**tied, **text}, ", its text model alone"
    kind = str(config.get("model_type") or "llama")
    family = FAMILIES.get(kind, _OTHER)
    get = _Fields(where, config, family.defaults)
    if family.experts is None:
        _refuse_experts(get, kind)
    missing = [name for name in family.needed.values() if get(name) is None]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}: add them, or plan with the number of parameters.")
    sizes = {name: get.integer(source) for name, source in family.needed.items()}
    if kind == "gpt2":
        sizes["ffn"] = get.whole("n_inner") or 4 * sizes["width"]
        sizes["positions"] = get.integer("n_positions")
    layers = sizes["layers"]
    window, window_layers = _windows(get, family, layers)
    latent = _latent(get) if family.latent else None
    experts = family.experts(get, layers) if family.experts else None
    if experts and experts.chosen > experts.count:
        raise ValueError(
            f"{where} sends a token to {experts.chosen} of {experts.count} experts: num_experts_per_tok is at most their number."
        )
    shape = _checked(
        where,
        # keys and values are made of the latent for every head
        kv_heads=sizes["heads"] if latent else get("num_key_value_heads"),
        head_dim=latent.nope + latent.rope if latent else get("head_dim"),
        tied=bool(get("tie_word_embeddings", default=False)),
        qkv_bias=_flag(get, family.qkv_bias),
        o_bias=_flag(get, family.o_bias),
        mlp_bias=_flag(get, family.mlp_bias),
        qk_norm=_flag(get, family.qk_norm),
        sliding_window=window,
        window_layers=window_layers,
        family=kind,
        experts=experts,
        latent=latent,
        **sizes,
        **family.fixed,
    )
    return shape, part


def _refuse_experts(get: _Fields, kind: str) -> None:
    for name in _EXPERT_FIELDS:
        count = get(name)
        if isinstance(count, int) and count > 1:
            known = ", ".join(name for name, family in FAMILIES.items() if family.experts)
            raise ValueError(
                f"{get.where} is a mixture of experts ({name}={count}) of a family that is not counted yet ({kind!r}; "
                f"known are {known}): plan with its active parameters, sk.plan(37e9, ...)."
            )


def _flag(get: _Fields, says: bool | str) -> bool:
    return bool(get(says, default=False)) if isinstance(says, str) else says


def _windows(get: _Fields, family: Family, layers: int) -> tuple[int | None, tuple[int, ...] | None]:
    """Return (sliding window, the blocks that have it or None for all); (None, None) where there is no window."""
    window = get("sliding_window")
    if family.windows is None or not window or not get("use_sliding_window", default=True):
        return None, None
    window = get.integer("sliding_window")
    types = get("layer_types")
    if types is None or (family.windows is _all_blocks and family is not _OTHER):
        chosen = family.windows(get, layers)
    else:
        kinds = _a_layer_each(get, "layer_types", layers)
        chosen = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    if chosen is None or len(chosen) == layers:
        return window, None
    return (window, chosen) if chosen else (None, None)


def _a_layer_each(get: _Fields, name: str, layers: int) -> Sequence[Any]:
    """Return a field that has an entry for every layer; raise ValueError where it has another number of entries."""
    values = get(name)
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ValueError(f"{name} of {get.where} is {values!r}: give a list of one entry a layer.")
    if len(values) != layers:
        raise ValueError(f"{get.where} has {layers} layers and {name} for {len(values)}: one of them is wrong.")
    return values


def _latent(get: _Fields) -> Latent:
    return Latent(
        query_rank=get.whole("q_lora_rank") or None,
        kv_rank=get.integer("kv_lora_rank"),
        nope=get.integer("qk_nope_head_dim"),
        rope=get.integer("qk_rope_head_dim"),
        value=get.integer("v_head_dim"),
    )


def _from_decoder(config: Any) -> Shape:
    """Return the shape of our own DecoderConfig, or of an object with its fields."""
    window = getattr(config, "sliding_window", None)
    blocks = getattr(config, "window_layers", None)
    experts = _experts_of(config)
    family = "decoder" if experts is None else "qwen3_moe" if getattr(config, "qk_norm", False) else "mixtral"
    return _checked(
        type(config).__name__,
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        kv_heads=getattr(config, "kv_heads", None),
        head_dim=getattr(config, "head_dim", None),
        ffn=config.ffn,
        vocab=config.vocab,
        tied=bool(getattr(config, "tied", True)),
        qkv_bias=bool(getattr(config, "qkv_bias", False)),
        o_bias=bool(getattr(config, "o_bias", False)),
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=bool(getattr(config, "qk_norm", False)),
        sliding_window=window,
        window_layers=None if window is None or blocks is None else tuple(blocks),
        family=getattr(config, "family", None) or family,
        experts=experts,
    )


def _experts_of(config: Any) -> Experts | None:
    """Return the experts of our own DecoderConfig; None where it is dense."""
    if getattr(config, "experts", None) is None:
        return None
    routed = tuple(i for i in range(config.layers) if i not in config.dense_layers)
    return Experts(config.experts, config.experts_per_token, config.expert_ffn, routed)


def _checked(
    where: str, *, kv_heads: Any, head_dim: Any, layers: Any, width: Any, heads: Any, ffn: Any, vocab: Any, **rest: Any
) -> Shape:
    sizes = {"layers": layers, "width": width, "heads": heads, "ffn": ffn, "vocab": vocab}
    sizes = {name: arguments.integer(f"{name} of {where}", value) for name, value in sizes.items()}
    groups = sizes["heads"] if kv_heads is None else arguments.integer(f"kv_heads of {where}", kv_heads)
    if sizes["heads"] % groups:
        raise ValueError(
            f"{where} has {sizes['heads']} heads and {groups} key-value heads: the first must be a multiple of the second."
        )
    if head_dim is None:
        if sizes["width"] % sizes["heads"]:
            raise ValueError(
                f"{where} has width {sizes['width']} and {sizes['heads']} heads, which does not divide: give head_dim."
            )
        head_dim = sizes["width"] // sizes["heads"]
    return Shape(kv_heads=groups, head_dim=arguments.integer(f"head_dim of {where}", head_dim), **sizes, **rest)
