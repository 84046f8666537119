"""Small configs of every family that the planner counts exactly, and transformers' own models of them."""

from typing import Any

#: Sizes that are published: Llama-3.2-1B and Qwen3-8B.
LLAMA_1B: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
}
SMALL: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 176,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
_ROUTED = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "smollm3": {"attention_bias": True},
    "granite": {"attention_bias": True},
    "seed_oss": {"head_dim": 32, "attention_out_bias": True, "residual_dropout": 0.0},
    "qwen2": {},
    "qwen3": {"head_dim": 32, "attention_bias": True},
    "phi3": {},
    "gemma": {"head_dim": 32},
    "gemma2": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32},
    "gpt2": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**_ROUTED, "shared_expert_intermediate_size": 80, "decoder_sparse_step": 2},
    "qwen3_moe": {**_ROUTED, "mlp_only_layers": [1], "head_dim": 32},
    "deepseek_v2": _LATENT,
    "deepseek_v3": {**_LATENT, "attention_bias": True},
    "glm4_moe": {
        "moe_intermediate_size": 48,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "use_qk_norm": True,
        "attention_bias": True,
        "head_dim": 32,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32},
}
_GPT2 = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "vocab_size": "vocab_size",
}


def fields(family: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a small model of `family`, as a dict."""
    small = {**SMALL, **FAMILIES[family], **changes}
    if family == "gpt2":
        tokens = {k: v for k, v in small.items() if k.endswith("_token_id") or k in ("tie_word_embeddings", "n_inner")}
        small = {theirs: small[ours] for ours, theirs in _GPT2.items()} | {"n_positions": 128} | tokens
    return {"model_type": family, **small}


def config_of(family: str, **changes: Any) -> Any:
    """transformers' config object of it."""
    import transformers

    given = fields(family, **changes)
    return transformers.AutoConfig.for_model(given.pop("model_type"), **given)


def model_of(config: Any) -> Any:
    """transformers' own model, with attention and experts as plain products, so that torch counts them all."""
    import transformers

    return transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
