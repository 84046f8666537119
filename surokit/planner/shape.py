"""The shape of a decoder as the planner sees it: the numbers of config.json that decide FLOPs and bytes.

Covers the dense Llama family (Llama, Mistral, SmolLM2, Qwen2.5, Qwen3): RMSNorm, rotary positions, grouped-query
attention and a three-matrix SwiGLU. Everything else is read from the caller by the names of its fields, so no model
code is imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surokit.planner import arguments

# Families whose layers are exactly the ones counted here; another model_type is counted as if it were one, and the plan says so.
FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "smollm", "decoder"})
# What transformers takes where a config.json is silent and the sizes do not say it.
_DEFAULTS: dict[str, dict[str, int]] = {
    "mistral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}
_EXPERT_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True)
class Weight:
    """One kind of weight matrix [n, k], present `count` times, of which a token passes `active` (all without a router)."""

    name: str
    n: int
    k: int
    count: int
    active: int = -1

    def __post_init__(self) -> None:
        if self.active < 0:
            object.__setattr__(self, "active", self.count)

    @property
    def parameters(self) -> int:
        return self.n * self.k * self.count


@dataclass(frozen=True)
class Shape:
    """Sizes of a dense Llama-family decoder.

    `width` is the hidden size, `ffn` the inner size of the SwiGLU, `kv_heads` the key and value heads of grouped-query
    attention.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    family: str = "llama"

    @property
    def query_width(self) -> int:
        """heads x head_dim, the width of attention's products (d_attn)."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def projections(self) -> tuple[Weight, ...]:
        """The seven matrices of a layer, which recipes quantize and adapters go on."""
        d, q, kv, f = self.width, self.query_width, self.kv_width, self.ffn
        sizes = {
            "self_attn.q_proj": (q, d),
            "self_attn.k_proj": (kv, d),
            "self_attn.v_proj": (kv, d),
            "self_attn.o_proj": (d, q),
            "mlp.gate_proj": (f, d),
            "mlp.up_proj": (f, d),
            "mlp.down_proj": (d, f),
        }
        return tuple(Weight(name, n, k, self.layers) for name, (n, k) in sizes.items())

    @property
    def head(self) -> Weight:
        """The output matrix; the embedding itself where they are tied."""
        return Weight("lm_head", self.vocab, self.width, 1)

    @property
    def projection_parameters(self) -> int:
        return sum(w.parameters for w in self.projections)

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.width

    @property
    def lookup_parameters(self) -> int:
        """Parameters that are only looked up, never multiplied: the embedding, unless the head is tied to it."""
        return 0 if self.tied else self.embedding_parameters

    @property
    def small_parameters(self) -> int:
        """Norm weights and biases."""
        layer = 2 * self.width + (2 * self.head_dim if self.qk_norm else 0)
        layer += self.query_width + 2 * self.kv_width if self.qkv_bias else 0
        layer += self.width if self.o_bias else 0
        layer += 2 * self.ffn + self.width if self.mlp_bias else 0
        return self.layers * layer + self.width

    @property
    def parameters(self) -> int:
        """All parameters, a tied matrix counted once."""
        heads = 1 if self.tied else 2
        return self.projection_parameters + heads * self.embedding_parameters + self.small_parameters


def read_shape(what: Any) -> tuple[Shape, str]:
    """(shape, where it came from) of a config dict, a path, a config object or a live model.

    Raises ValueError for a config that lacks a field or describes another architecture, FileNotFoundError for a path
    without a config.json, TypeError for anything else.
    """
    if isinstance(what, str | Path):
        path, config = _read_file(what)
        return _from_hf(config, str(path)), f"from {path}"
    if isinstance(what, Mapping):
        return _from_hf(what, "the config"), "from a config"
    if hasattr(what, "hidden_size") and callable(getattr(what, "to_dict", None)):
        return _from_hf(what.to_dict(), type(what).__name__), f"from a {type(what).__name__}"
    if hasattr(what, "layers") and hasattr(what, "width"):
        return _from_decoder(what), f"from a {type(what).__name__}"
    if getattr(what, "config", None) is not None:
        shape, _ = read_shape(what.config)
        return shape, f"from the config of a live {type(what).__name__}"
    raise TypeError(
        f"plan() cannot read a {type(what).__name__}: give the number of parameters (8e9), "
        "a config (dict, folder or config.json) or a model with a .config."
    )


def _read_file(what: str | Path) -> tuple[Path, Mapping[str, Any]]:
    path = Path(what)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        hint = (
            ": write a number of parameters as 8e9."
            if _looks_like_count(str(what))
            else ": give a folder or a config.json that is on this machine."
        )
        raise FileNotFoundError(f"There is no {path}{hint}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): write it again or give the sizes as a dict.") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, not the fields of a config.json.")
    return path, config


def _looks_like_count(text: str) -> bool:
    return bool(text) and text[-1] in "kKmMbBtT" and text[:-1].replace(".", "", 1).isdigit()


def _from_hf(config: Mapping[str, Any], where: str) -> Shape:
    if "hidden_size" not in config and isinstance(config.get("text_config"), Mapping):
        config = config["text_config"]
    for field in _EXPERT_FIELDS:
        experts = config.get(field)
        if isinstance(experts, int) and experts > 1:
            raise ValueError(
                f"{where} is a mixture of experts ({field}={experts}), whose shapes are not counted yet: "
                "plan with its active parameters, sk.plan(37e9, ...)."
            )
    needed = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    missing = [field for field in needed if config.get(field) is None]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}: add them, or plan with the number of parameters.")
    family = str(config.get("model_type") or "llama")
    config = {**_DEFAULTS.get(family, {}), **config}
    bias = bool(config.get("attention_bias", False))
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    return _checked(
        where,
        layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config.get("num_key_value_heads"),
        head_dim=config.get("head_dim"),
        ffn=config["intermediate_size"],
        vocab=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bias or family == "qwen2",
        o_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        sliding_window=None if window is None else arguments.integer("sliding_window", window),
        family=family,
    )


def _from_decoder(config: Any) -> Shape:
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
        sliding_window=getattr(config, "sliding_window", None),
        family=getattr(config, "family", None) or "decoder",
    )


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
