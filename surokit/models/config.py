"""Describe the shape of a decoder, and translate it from and to a Hugging Face config.json: DecoderConfig.

Six families of config describe one architecture: llama (Llama 2 and 3, SmolLM2), mistral, qwen2 (Qwen2.5), qwen3, and with
mixtures of experts mixtral and qwen3_moe. They differ in biases, QK-norm, sliding window, experts and defaults, all of which are
fields here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from surokit.errors import CheckpointError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
_SPARSE = ("mixtral", "qwen3_moe")
_QK_NORMED = ("qwen3", "qwen3_moe")
_SAME_WINDOW = ("mistral", "mixtral", "qwen3_moe")  # in every block
# what transformers assumes where a config.json is silent
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "sliding_window": 4096, "num_key_value_heads": 8},
    "qwen2": {"max_position_embeddings": 32768, "sliding_window": 4096, "num_key_value_heads": 32},
    "qwen3": {
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "num_key_value_heads": 32,
        "head_dim": 128,
    },
    "mixtral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
    },
    "qwen3_moe": {
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "router_aux_loss_coef": 0.001,
    },
}
_REQUIRED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True)
class DecoderConfig:
    """A DecoderConfig is the shape of a `Decoder`.

    layers: blocks. width: of the residual stream. heads, kv_heads: query heads and the key heads they share (GQA where fewer).
    ffn: width of the SwiGLU. head_dim: width / heads unless given. tied: the head is the embedding matrix.
    rope_scaling: None, or {"rope_type": "linear" | "llama3", ...} with the keys of a Hugging Face config.
    sliding_window: each query sees that many keys, itself included, in `window_layers` (all of them unless given).
    max_length: longest sequence in tokens. bos_id, eos_id, pad_id: special tokens, written to config.json.
    family: "llama", "mistral", "qwen2", "qwen3", "mixtral" or "qwen3_moe" as read from a checkpoint; None lets `to_hf` choose one
        that can say the rest.

    experts: in each block but `dense_layers`; None for a dense model. experts_per_token: those that a token is sent to, 2 unless
        given. expert_ffn: width of one expert, ffn unless given. norm_topk: the weights of a token's experts sum to 1. balance:
        coefficient of the load-balancing loss in training, 0.001 unless given, 0 for none.

    Raises ValueError where the numbers do not fit together.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    vocab: int
    ffn: int
    head_dim: int | None = None
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)
    norm_eps: float = 1e-5
    tied: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    window_layers: tuple[int, ...] | None = None
    max_length: int = 2048
    bos_id: int | None = None
    eos_id: int | tuple[int, ...] | None = None
    pad_id: int | None = None
    family: str | None = None
    # not hashed, and None where dense, so that a dense config is what it was before there were experts
    experts: int | None = field(default=None, hash=False)
    experts_per_token: int | None = field(default=None, hash=False)
    expert_ffn: int | None = field(default=None, hash=False)
    norm_topk: bool = field(default=True, hash=False)
    balance: float | None = field(default=None, hash=False)
    dense_layers: tuple[int, ...] = field(default=(), hash=False)

    def __post_init__(self) -> None:
        for name in ("bos_id", "eos_id", "pad_id"):
            object.__setattr__(self, name, _plain(getattr(self, name)))
        for name in ("dense_layers", "window_layers", "eos_id"):  # JSON has lists
            if not isinstance(value := getattr(self, name), int | None):
                object.__setattr__(self, name, tuple(map(_plain, value)))
        for name in (
            "layers",
            "width",
            "heads",
            "kv_heads",
            "vocab",
            "ffn",
            "max_length",
            "head_dim",
            "sliding_window",
            "experts",
            "experts_per_token",
            "expert_ffn",
        ):
            value = getattr(self, name)
            if value is None and name in ("head_dim", "sliding_window", "experts", "experts_per_token", "expert_ffn"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"DecoderConfig({name}={value!r}): a whole number of at least 1 is needed.")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"DecoderConfig(heads={self.heads}, kv_heads={self.kv_heads}): heads must be a multiple of kv_heads."
            )
        if self.head_dim is None:
            if self.width % self.heads:
                raise ValueError(
                    f"DecoderConfig(width={self.width}, heads={self.heads}): width is not a multiple of heads; give head_dim."
                )
            object.__setattr__(self, "head_dim", self.width // self.heads)
        if self.rotary_width % 2:
            raise ValueError(f"DecoderConfig(head_dim={self.head_dim}): rotary embedding needs an even head_dim.")
        if self.family is not None and self.family not in ARCHITECTURES:
            raise ValueError(f"DecoderConfig(family={self.family!r}): known are {', '.join(ARCHITECTURES)}.")
        _check_scaling(self.rope_scaling, ValueError)
        self._check_experts()

    def _check_experts(self) -> None:
        if self.experts is None:
            named = ("experts_per_token", "expert_ffn", "balance", "dense_layers")
            if given := [name for name in named if getattr(self, name) not in (None, ())]:
                raise ValueError(f"DecoderConfig({given[0]}=...) is of a model with experts: give experts.")
            return
        for name, value in (("experts_per_token", 2), ("expert_ffn", self.ffn), ("balance", 0.001)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        assert self.experts_per_token is not None
        assert self.balance is not None
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"DecoderConfig(experts={self.experts}, experts_per_token={self.experts_per_token}): a token is sent to at most "
                "all experts."
            )
        if not 0 <= self.balance < math.inf:
            raise ValueError(f"DecoderConfig(balance={self.balance!r}): a finite number >= 0.")
        if not set(self.dense_layers) < set(range(self.layers)):
            raise ValueError(
                f"DecoderConfig(layers={self.layers}, dense_layers={self.dense_layers}): numbers of blocks, and at least one block "
                "has experts."
            )

    @property
    def expert_width(self) -> int:
        """Return expert_ffn, which is not None where there are experts."""
        assert self.expert_ffn is not None
        return self.expert_ffn

    def is_sparse(self, layer: int) -> bool:
        """Return whether block `layer` has experts."""
        return self.experts is not None and layer not in self.dense_layers

    @property
    def rotary_width(self) -> int:
        """Return head_dim, which is never None once made."""
        assert self.head_dim is not None
        return self.head_dim

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Return the tokens that end a text, none where the config names none."""
        return () if self.eos_id is None else (self.eos_id,) if isinstance(self.eos_id, int) else tuple(self.eos_id)

    def window_of(self, layer: int) -> int | None:
        """Return the sliding window of block `layer`, None where it sees everything before it."""
        if self.window_layers is not None and layer not in self.window_layers:
            return None
        return self.sliding_window

    # -- Hugging Face

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> DecoderConfig:
        """Read a config.json's dict, old style (rope_theta, rope_scaling) or new (rope_parameters).

        Raises CheckpointError for an architecture, activation or RoPE scaling that is not supported, a missing field, or one that
        cannot be.
        """
        try:
            return DecoderConfig._of_hf(config)
        except CheckpointError:
            raise
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"The config has a field that cannot be: {error}") from error

    @staticmethod
    def _of_hf(config: Mapping[str, Any]) -> DecoderConfig:
        family = str(config.get("model_type") or "")
        if family not in ARCHITECTURES:
            named = config.get("architectures") or [family or "a config without model_type"]
            raise CheckpointError(
                f"The architecture {', '.join(map(str, named))} is not supported: known are "
                f"{', '.join(ARCHITECTURES.values())}."
            )
        missing = [key for key in _REQUIRED if config.get(key) is None]
        if missing:
            raise CheckpointError(f"The config lacks {', '.join(missing)}: it is not a complete config.json.")
        get = _Fields(config, _DEFAULTS[family])
        activation = get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise CheckpointError(
                f"The activation {activation!r} is not supported: the feed-forward layer is SwiGLU (silu)."
            )
        bias = bool(get("attention_bias", False))
        window, window_layers = _window(get, family)
        sparse = _experts(get, family) if family in _SPARSE else {}
        theta, scaling = _rope(get)
        eos = get("eos_token_id")
        return DecoderConfig(
            layers=get("num_hidden_layers"),
            width=get("hidden_size"),
            heads=get("num_attention_heads"),
            kv_heads=get("num_key_value_heads", get("num_attention_heads")),
            vocab=get("vocab_size"),
            ffn=get("intermediate_size"),
            head_dim=None if family == "qwen2" else get("head_dim"),
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=float(get("rms_norm_eps", 1e-6)),
            tied=bool(get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2" or bias,
            o_bias=family != "qwen2" and bias,
            mlp_bias=family == "llama" and bool(get("mlp_bias", False)),
            qk_norm=family in _QK_NORMED,
            sliding_window=window,
            window_layers=window_layers,
            max_length=get("max_position_embeddings"),
            bos_id=get("bos_token_id"),
            eos_id=tuple(eos) if isinstance(eos, list | tuple) else eos,
            pad_id=get("pad_token_id"),
            family=family,
            **sparse,
        )

    def to_hf(self) -> dict[str, Any]:
        """Return the dict of a config.json that transformers reads, version 4 and 5; `from_hf` is its inverse.

        Raises CheckpointError where no supported family can express the configuration.
        """
        family = self.family or self._choose_family()
        reason = self._unfit(family)
        if reason:
            raise CheckpointError(f"A {family} config cannot express this model: {reason}.")
        scaling = dict(self.rope_scaling) if self.rope_scaling else None
        hf: dict[str, Any] = {
            "architectures": [ARCHITECTURES[family]],
            "model_type": family,
            "vocab_size": self.vocab,
            "hidden_size": self.width,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_length,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tied,
            "attention_dropout": 0.0,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": self.rope_theta},
            "bos_token_id": self.bos_id,
            "eos_token_id": list(self.eos_id) if isinstance(self.eos_id, tuple) else self.eos_id,
            "pad_token_id": self.pad_id,
        }
        if family != "qwen2":
            hf["head_dim"] = self.head_dim
        if family in ("llama", *_QK_NORMED):
            hf["attention_bias"] = self.qkv_bias
        if family == "llama":
            hf["mlp_bias"] = self.mlp_bias
        if family in _SAME_WINDOW:
            hf["sliding_window"] = self.sliding_window
        if family in _SPARSE:
            hf["num_experts_per_tok"] = self.experts_per_token
            hf["router_aux_loss_coef"] = self.balance
            hf["output_router_logits"] = False
        if family == "mixtral":
            hf["num_local_experts"] = self.experts
        if family == "qwen3_moe":
            hf["use_sliding_window"] = self.sliding_window is not None
            hf["num_experts"] = self.experts
            hf["moe_intermediate_size"] = self.expert_ffn
            hf["norm_topk_prob"] = self.norm_topk
            hf["decoder_sparse_step"] = 1
            hf["mlp_only_layers"] = sorted(self.dense_layers)
        if family in ("qwen2", "qwen3"):
            windows = [self.window_of(i) is not None for i in range(self.layers)]
            hf["use_sliding_window"] = any(windows)
            hf["sliding_window"] = self.sliding_window
            hf["max_window_layers"] = windows.index(True) if any(windows) else self.layers
            hf["layer_types"] = ["sliding_attention" if w else "full_attention" for w in windows]
        return hf

    def _choose_family(self) -> str:
        for family in ARCHITECTURES:
            if not self._unfit(family):
                return family
        reasons = "; ".join(f"{family}: {self._unfit(family)}" for family in ARCHITECTURES)
        raise CheckpointError(f"No supported family can express this model ({reasons}).")

    def _unfit(self, family: str) -> str:
        """Return why `family` cannot express this configuration, "" where it can."""
        if (self.experts is not None) != (family in _SPARSE):
            return "it has no experts" if self.experts is None else "it has experts"
        if self.qk_norm != (family in _QK_NORMED):
            return "it has QK-norm" if self.qk_norm else "it has no QK-norm"
        if family == "qwen2":
            if not self.qkv_bias or self.o_bias:
                return "qwen2 has biases in q, k and v, and only there"
            if self.head_dim != self.width // self.heads:
                return "qwen2 has head_dim = width / heads"
        elif family in ("mistral", "mixtral"):
            if self.qkv_bias or self.o_bias:
                return f"{family} has no biases"
        elif self.qkv_bias != self.o_bias:
            return f"{family} has biases in all of q, k, v and o, or in none"
        if self.mlp_bias and family != "llama":
            return f"{family} has no biases in the feed-forward layer"
        if self.sliding_window is not None:
            if family == "llama":
                return "llama has no sliding window"
            if family in _SAME_WINDOW and self.window_layers not in (None, tuple(range(self.layers))):
                return f"{family}'s sliding window is the same in every block"
        if family == "mixtral" and (self.dense_layers or self.expert_ffn != self.ffn or not self.norm_topk):
            return "mixtral has experts of width ffn in every block, whose weights sum to 1"
        return ""


def _plain(value: Any) -> Any:
    """Return Python's own number for any other whole one, such as NumPy's, which JSON refuses to write."""
    return int(value) if isinstance(value, Integral) else value


class _Fields:
    """A config's value, else the family's default, else the one given; null counts as absent except where it says no."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.config, self.defaults = config, defaults

    def __call__(self, key: str, default: Any = None) -> Any:
        if key in self.config and (self.config[key] is not None or key == "sliding_window"):
            return self.config[key]
        if key in self.config and key == "num_key_value_heads":  # null means no grouping
            return default
        return self.defaults.get(key, default)


def _window(get: _Fields, family: str) -> tuple[int | None, tuple[int, ...] | None]:
    """Return the sliding window and the blocks that have it; (None, None) without."""
    if family == "llama":
        return None, None
    window = get("sliding_window")
    if family in ("mistral", "mixtral"):
        return window, None
    if not get("use_sliding_window", False) or window is None:
        return None, None
    if family in _SAME_WINDOW:
        return window, None
    layers = get("num_hidden_layers")
    types = get("layer_types")
    if types is None:
        first = get("max_window_layers", 28)
        chosen = tuple(range(first, layers))
    else:
        chosen = tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")
    return (window, chosen) if chosen else (None, None)


def _experts(get: _Fields, family: str) -> dict[str, Any]:
    """Return the fields of DecoderConfig that describe a mixture of experts."""
    layers = get("num_hidden_layers")
    own = [value for name in ("num_experts", "num_local_experts") if (value := get.config.get(name)) is not None]
    experts: dict[str, Any] = {
        "experts": own[0] if own else get.defaults["num_experts"],
        "experts_per_token": get("num_experts_per_tok"),
        "balance": float(get("router_aux_loss_coef")),
    }
    if family == "mixtral":
        if get("router_jitter_noise", 0.0):
            raise CheckpointError("Noise in the router is not supported: router_jitter_noise must be 0.")
        return experts
    step, dense = get("decoder_sparse_step", 1), get("mlp_only_layers") or ()
    dense_layers = tuple(i for i in range(layers) if i in dense or (i + 1) % step)
    if not experts["experts"] or len(dense_layers) == layers:
        raise CheckpointError(f"The {family} config has no block with experts: without any it is a config of qwen3.")
    expert_ffn, norm_topk = get("moe_intermediate_size"), bool(get("norm_topk_prob", False))
    return {**experts, "expert_ffn": expert_ffn, "norm_topk": norm_topk, "dense_layers": dense_layers}


def _rope(get: _Fields) -> tuple[float, dict[str, Any] | None]:
    """Return theta and scaling from either style of config."""
    rope = dict(get("rope_parameters") or {}) | dict(get("rope_scaling") or {})
    theta = float(rope.pop("rope_theta", None) or get("rope_theta") or 10000.0)
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    if float(rope.pop("partial_rotary_factor", None) or get("partial_rotary_factor") or 1.0) != 1.0:
        raise CheckpointError("A partial rotary embedding is not supported: partial_rotary_factor must be 1.")
    if kind == "default":
        return theta, None
    if kind == "llama3":
        rope.setdefault("original_max_position_embeddings", get("max_position_embeddings"))
    scaling = {"rope_type": kind, **rope}
    _check_scaling(scaling, CheckpointError)
    return theta, {"rope_type": kind, **{key: rope[key] for key in _ROPE_KEYS[kind]}}


def _check_scaling(scaling: Mapping[str, Any] | None, error: type[ValueError]) -> None:
    if scaling is None:
        return
    kind = scaling.get("rope_type")
    if kind not in _ROPE_KEYS:
        raise error(f"RoPE scaling {kind!r} is not supported: known are {', '.join(_ROPE_KEYS)}.")
    missing = [key for key in _ROPE_KEYS[kind] if key not in scaling]
    if missing:
        raise error(f"RoPE scaling {kind!r} needs {', '.join(missing)}.")
