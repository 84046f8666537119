"""What deferral costs in quality: held-out loss of ZenFlow against AdamW over paired seeds on real text.

One study of two models: one with random weights, and one that AdamW trained on another text before. Each trains at the rate that
is AdamW's best on a seed of its own. A seed gives every way the same weights and batches. A result is in the raw file when it is
there, and an interrupted study goes on where it stopped. It has no gate but that OffloadAdamW is AdamW: what deferral costs is
told, not promised (docs/measurements/deferral.py makes tables and pictures).
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import surokit as sk
from docs.measurements.deferral import BASELINE, NAMES, options_of, tuned_rate
from surokit import texts
from surokit.bench.result import write
from surokit.environment import environment

FOLDER = Path(__file__).parents[2] / "docs" / "measurements"
SEEDS, STEPS, WARMUP = 5, 400, 20
SWEEP_SEED = SEEDS  # none of those that are told
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
LENGTH, BATCH, VOCAB = 64, 4, 512
BEFORE_STEPS, BEFORE_LR = 4000, 3e-3

_OPTIONS: dict[str, dict[str, Any]] = {
    "ZenFlow": {"select_strategy": "step", "select_interval": 48},
    "OffloadAdamW": {"pt_reserved_cores_perc": 0.5},  # a thread of its own does not wait for another on a busy machine
}


@cache
def tokenizer() -> Any:
    return sk.train_tokenizer([texts.MOBY_DICK, texts.SHAKESPEARE], vocab_size=VOCAB)


def session(weights: dict[str, Any] | None, text: Path, optimizer: Any, steps: int, seed: int) -> Any:
    """weights: None are random ones of the seed."""
    train, held_out = sk.text(text, tokenizer(), length=LENGTH, batch=BATCH, seed=seed).split(held_out=0.05)
    torch.manual_seed(seed)
    model = sk.Decoder(
        sk.DecoderConfig(layers=2, width=64, heads=4, kv_heads=2, vocab=VOCAB, ffn=176, max_length=LENGTH)
    )
    if weights is not None:
        model.load_state_dict(weights)
    schedule = sk.Cosine(warmup=WARMUP, steps=steps, floor=0.1)
    return sk.Session(model, train, optimizer=optimizer, schedule=schedule, eval=held_out, seed=seed, compile=False)


def random_weights(seed: int) -> None:
    return None


@cache
def trained_weights(seed: int) -> dict[str, Any]:
    """Of a model that AdamW trained on Moby-Dick."""
    before = session(None, texts.MOBY_DICK, sk.AdamW(lr=BEFORE_LR), BEFORE_STEPS, seed)
    before.run(BEFORE_STEPS)
    weights: dict[str, Any] = before.model.state_dict()
    return weights


def trained(weights: dict[str, Any] | None, name: str, rate: float, seed: int, steps: int) -> Any:
    """A session of a way of the study, behind so many of its steps."""
    options = options_of(name)
    kind, lr = options.pop("optimizer"), rate * options.pop("lr")
    running = session(
        weights, texts.SHAKESPEARE, getattr(sk, kind)(lr=lr, **_OPTIONS.get(kind, {}), **options), STEPS, seed
    )
    running.run(steps)
    return running


def study(weights: Any, begins: str, path: Path, seeds: int = SEEDS, steps: int = STEPS) -> dict[str, Any]:
    """Measure what is missing of the file; its data. begins: `weights` in words."""
    settings = {
        "from": begins,
        "steps": steps,
        "model": f"decoder 2 x 64, vocab {VOCAB}, float32",
        "tokens a step": f"{BATCH} x {LENGTH}",
        "text": "Shakespeare",
        "lr": f"adamw's best, cosine to a tenth after {WARMUP} steps",
        "hot columns": "chosen anew every 48 steps",
    }
    data: dict[str, Any] = {"benchmark": "held-out loss with deferred columns", "settings": settings}
    data |= {"environment": environment(), "sweep": {}, "deferral": []}
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
        data = kept if kept["settings"] == settings else data
    for rate in RATES[len(data["sweep"]) :]:
        data["sweep"][f"{rate:g}"] = trained(weights(SWEEP_SEED), BASELINE, rate, SWEEP_SEED, steps).evaluate()
        write(data, path)
    rate = tuned_rate(data)
    for seed in range(seeds):
        run = next((run for run in data["deferral"] if run["seed"] == seed), None)
        if run is None:
            at_first = trained(weights(seed), BASELINE, rate, seed, 0).evaluate()
            data["deferral"].append(run := {"seed": seed, "at first": at_first, "loss": {}, "energy": {}})
        for name in NAMES:
            if name in run["loss"]:
                continue
            running = trained(weights(seed), name, rate, seed, steps)
            run["loss"][name] = running.evaluate()
            if name.startswith("zenflow"):
                run["energy"][name] = running.optimizer.report().selected_mean
            print(begins, seed, name, run["loss"][name], flush=True)
            write(data, path)
    return data


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    ("weights", "begins", "file"),
    [
        (random_weights, "random weights", "deferral.json"),
        (trained_weights, f"weights of {BEFORE_STEPS} steps on Moby-Dick", "deferral-finetuning.json"),
    ],
)
def test_what_deferral_costs(weights, begins, file):
    for run in study(weights, begins, FOLDER / file)["deferral"]:
        assert run["loss"]["offload"] == pytest.approx(run["loss"]["adamw"], rel=1e-3)
