"""The accuracy gate of training: held-out loss against BF16 over paired seeds, an equivalence test.

Each seed gives one pair of runs with the same weights and batches. The gate holds where the interval of the mean paired gap
(95 %, Student's t) lies inside it. The raw result goes to docs/measurements/recipes.json.
"""

import json
import math
import statistics
from pathlib import Path

import pytest
import torch

import surokit as sk
from surokit import texts
from surokit.environment import environment

OUT = Path(__file__).parents[2] / "docs" / "measurements" / "recipes.json"
SEEDS = range(5)
STEPS = 200
T_95 = 2.776  # Student's t, 4 degrees of freedom, two-sided
GATES = {"fp8": 0.0025, "fp8-current": 0.0025, "fp8-rowwise": 0.0025}


def held_out_losses(seed: int) -> dict[str, float]:
    """The held-out loss of every recipe after the same batches from the same weights."""
    tokenizer = sk.train_tokenizer([texts.MOBY_DICK], vocab_size=1024)
    train, held_out = sk.text(texts.MOBY_DICK, tokenizer, length=128, batch=8, seed=seed).split(held_out=0.05)
    torch.manual_seed(seed)
    config = sk.DecoderConfig(layers=3, width=128, heads=4, kv_heads=2, vocab=1024, ffn=352, max_length=128)
    bf16 = sk.Session(
        sk.Decoder(config).to(torch.bfloat16),
        train,
        optimizer=sk.AdamW(lr=3e-3),
        schedule=sk.Cosine(warmup=10, steps=STEPS),
        eval=held_out,
        recipe=sk.BF16,
        seed=seed,
    )
    sessions = {"bf16": bf16, **{name: bf16.fork(recipe=name) for name in GATES}}
    for session in sessions.values():
        session.run(STEPS)
    return {name: session.evaluate() for name, session in sessions.items()}


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_training_stays_within_the_gate():
    runs = []
    for seed in SEEDS:
        runs.append({"seed": seed, **held_out_losses(seed)})
        print(runs[-1], flush=True)
    intervals = {}
    for name in GATES:
        gaps = [run[name] / run["bf16"] - 1 for run in runs]
        mean, half = statistics.mean(gaps), T_95 * statistics.stdev(gaps) / math.sqrt(len(gaps))
        intervals[name] = {"mean": mean, "low": mean - half, "high": mean + half, "gate": GATES[name]}
    settings = "decoder 3 x 128, vocab 1024, 8 x 128 tokens a step, bf16 weights, AdamW 3e-3, Moby-Dick"
    data = {
        "study": "held-out loss gap to bf16",
        "settings": settings,
        "steps": STEPS,
        "environment": environment(),
        "runs": runs,
        "intervals": intervals,
    }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    for name, interval in intervals.items():
        assert -GATES[name] <= interval["low"], (name, interval)
        assert interval["high"] <= GATES[name], (name, interval)
