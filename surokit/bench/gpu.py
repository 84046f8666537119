"""LoRA fine-tuning of a Qwen3-0.6B shape with random weights on a CUDA GPU, one recipe beside the other.

Recipes take turns (A B A B ...) on one device, each with its own model, warm-up excluded. The idle share comes from a profile
of a few steps after the timed turns. Runs where only torch, triton, numpy and safetensors are installed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

from surokit.bench.result import result

# Qwen3-0.6B: https://huggingface.co/Qwen/Qwen3-0.6B, config.json
SHAPE: dict[str, Any] = {
    "layers": 28,
    "width": 1024,
    "heads": 16,
    "kv_heads": 8,
    "head_dim": 128,
    "ffn": 3072,
    "vocab": 151936,
}
BATCH, LENGTH, ACCUMULATE, RANK = 2, 2048, 4, 16
WARM_UP = 3


def run(names: list[str], rounds: int, steps: int, layers: int | None = None) -> dict[str, Any]:
    """Run the recipes in turn and return the raw result. Raises RuntimeError without a CUDA device."""
    import torch

    import surokit as sk
    from surokit.recipe import find_recipe

    if not torch.cuda.is_available():
        raise RuntimeError("There is no CUDA device: `python -m surokit.bench cpu` runs without one.")
    shape = {**SHAPE, "layers": layers or SHAPE["layers"]}
    sessions: dict[str, sk.Session] = {}
    systems: dict[str, dict[str, Any]] = {}
    for name in names:
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = sk.Decoder(sk.DecoderConfig(**shape, tied=True, qk_norm=True, rope_theta=1e6, max_length=LENGTH))
        sessions[name] = sk.Session(
            model.to(torch.bfloat16),
            list(_batches(shape["vocab"], 8 * ACCUMULATE)),
            optimizer=sk.AdamW(lr=1e-4),
            recipe=find_recipe(name).lora(rank=RANK),
            accumulate=ACCUMULATE,
            schedule=None,
            compile=False,
        )
        systems[name] = {"name": name, "tokens_per_s": [], "losses": [], "peak_mib": 0.0}
        systems[name]["first_step_s"] = _timed(sessions[name], 1, systems[name])
        _timed(sessions[name], WARM_UP - 1, systems[name])
    tokens = BATCH * LENGTH * ACCUMULATE
    for turn in range(rounds):
        for name, session in sessions.items():
            seconds = _timed(session, steps, systems[name])
            systems[name]["tokens_per_s"].append(round(steps * tokens / seconds, 1))
        print(f"turn {turn + 1} of {rounds}", file=sys.stderr)
    for name, session in sessions.items():
        with sk.profile() as p:
            session.run(3)
        systems[name]["idle"] = p.summary["idle_ms"] / p.summary["wall_ms"]
        systems[name]["profile"] = p.summary
    settings = {
        **shape,
        "lora rank": RANK,
        "batch": f"{BATCH} x {LENGTH} x {ACCUMULATE}",
        "turns": f"{rounds} of {steps} steps",
    }
    return result("gpu: LoRA, random weights, eager", settings, list(systems.values()), names[0])


def _timed(session: Any, steps: int, system: dict[str, Any]) -> float:
    """Seconds for so many steps, the device waited for at both ends; peak memory of this session's turn."""
    import torch

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.synchronize()
    start = time.perf_counter()
    session.run(steps)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    # other sessions' weights are resident too: what this turn adds, and the weights of this session themselves
    own = sum(p.nbytes for p in session.model.parameters())
    added = torch.cuda.max_memory_allocated() - before
    system["peak_mib"] = max(system["peak_mib"], round((own + added) / 2**20, 1))
    system["losses"].append(float(session.records.column("loss")[-1]))
    return seconds


def _batches(vocab: int, count: int) -> Iterator[dict[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        ids = torch.randint(vocab, (BATCH, LENGTH), generator=generator)
        yield {"input_ids": ids, "labels": ids}
