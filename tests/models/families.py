"""Tiny random checkpoints of every supported family, made by transformers."""

from pathlib import Path
from typing import Any

import torch
import transformers

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE, "head_dim": 16, "tie_word_embeddings": True}),
    "smollm2": ("Llama", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}),
    "biased-llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "linear-rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 7, "head_dim": 10}),
    "qwen2.5": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2.5-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-biased": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
}
# with experts
SPARSE: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "mixtral-window": (
        "Mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 7, "head_dim": 10},
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "qwen3-moe-some-dense": (
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "norm_topk_prob": True,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "mlp_only_layers": [0],
            "decoder_sparse_step": 1,
        },
    ),
    "qwen3-moe-every-other": (
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 6,
        },
    ),
}


def write(folder: Path, family: str, dtype: torch.dtype = torch.float32, **changes) -> Any:
    """Save a random model of `family` into `folder` and return it; norms and biases are random too."""
    name, special = {**FAMILIES, **SPARSE}[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **special, **changes})
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(mean=0.5, std=0.3)
            else:
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    return model
