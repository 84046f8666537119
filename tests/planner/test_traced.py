"""What transformers' own layers hold at their true widths as on a GPU, by a trace of their code, beside the plan's replay."""

from typing import Any

import pytest
import transformers

import surokit as sk
from tests.planner.traced import checkpointed, feed_forwards_again, first_block_again, plain, trace

SIZES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama 8b": (
        transformers.LlamaConfig,
        {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    ),
    "llama 7b": (
        transformers.LlamaConfig,
        {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32},
    ),
    "qwen3 8b": (
        transformers.Qwen3Config,
        {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8},
    ),
    "mistral 7b": (
        transformers.MistralConfig,
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "sliding_window": None,
        },
    ),
    "qwen2 0.5b": (
        transformers.Qwen2Config,
        {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "use_sliding_window": False,
        },
    ),
}


#: What is computed again: (the model's code changed, the plan's arguments)
AGAIN: dict[str, tuple[Any, dict[str, Any]]] = {
    "none": (plain, {}),
    "selective": (checkpointed, {"recompute": "selective"}),
    "mlp": (feed_forwards_again, {"recompute": "mlp"}),
    "one block": (first_block_again, {"recompute": "full", "recompute_blocks": 1}),
}


@pytest.mark.parametrize(
    ("name", "again"), [*((name, "none") for name in SIZES), *(("llama 8b", again) for again in [*AGAIN][1:])]
)
def test_a_plan_holds_what_the_models_own_code_holds(name, again):
    kind, sizes = SIZES[name]
    config = kind(
        **sizes, num_hidden_layers=2, vocab_size=32000, max_position_embeddings=4096, attn_implementation="sdpa"
    )
    model = getattr(transformers, kind.__name__.replace("Config", "ForCausalLM"))
    change, recompute = AGAIN[again]
    found = trace(lambda: model(config), batch=2, length=2048, change=change)
    given: dict[str, Any] = {
        "gpu": "H100",
        "batch": 2,
        "length": 2048,
        "layers": "transformers",
        "dtype": "bf16",
        "optimizer": "sgd",
        "slack": 0.0,
        **recompute,
    }
    phases = {phase.name: phase.bytes for phase in sk.plan(config.to_dict(), **given).memory.phases}
    assert max(phases["forward"], phases["loss"]) == pytest.approx(found.phases["forward"], rel=0.01)
    assert phases["backward"] == pytest.approx(found.phases["backward"], rel=0.01)
