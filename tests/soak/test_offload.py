"""What deferral costs in quality: held-out loss of ZenFlow against AdamW over paired seeds on real text.

Each seed gives every optimizer the same weights and batches. The raw result goes to docs/measurements/deferral.json after each;
an interrupted study goes on where it stopped. It has no gate but that OffloadAdamW is AdamW: what deferral costs is told,
not promised (surokit/bench/deferral.py makes the table and the picture).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import surokit as sk
from surokit import texts
from surokit.bench.deferral import NAMES, options_of
from surokit.bench.result import write
from surokit.environment import environment

OUT = Path(__file__).parents[2] / "docs" / "measurements" / "deferral.json"
SEEDS, STEPS, LR = 5, 400, 3e-3
SETTINGS = {
    "paired seeds": SEEDS,
    "steps": STEPS,
    "model": "decoder 2 x 64, vocab 512, float32",
    "tokens a step": "4 x 64",
    "text": "Shakespeare",
    "lr": f"{LR:g}, cosine to a tenth after 20 steps",
    "hot columns": "chosen anew every 48 steps",
}


def optimizer(name: str) -> Any:
    """A specification for a name of the study."""
    options = options_of(name)
    kind, lr = options.pop("optimizer"), LR * options.pop("lr")
    select = {"select_strategy": "step", "select_interval": 48} if kind == "ZenFlow" else {}
    return getattr(sk, kind)(lr=lr, **select, **options)


def held_out_losses(seed: int, steps: int = STEPS) -> dict[str, Any]:
    tokenizer = sk.train_tokenizer(texts.SHAKESPEARE, vocab_size=512)
    config = sk.DecoderConfig(layers=2, width=64, heads=4, kv_heads=2, vocab=512, ffn=176, max_length=64)
    losses: dict[str, Any] = {"seed": seed}
    for name in NAMES:
        train, held_out = sk.text(texts.SHAKESPEARE, tokenizer, length=64, batch=4, seed=seed).split(held_out=0.05)
        torch.manual_seed(seed)
        session = sk.Session(
            sk.Decoder(config),
            train,
            optimizer=optimizer(name),
            schedule=sk.Cosine(warmup=20, steps=STEPS, floor=0.1),
            eval=held_out,
            seed=seed,
            compile=False,
        )
        session.run(steps)
        losses[name] = session.evaluate()
    return losses


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_what_deferral_costs():
    runs: list[dict[str, Any]] = []
    if OUT.exists():
        before = json.loads(OUT.read_text(encoding="utf-8"))
        runs = before["deferral"] if before["settings"] == SETTINGS and len(before["deferral"]) < SEEDS else []
    for seed in range(len(runs), SEEDS):
        runs.append(held_out_losses(seed))
        print(runs[-1], flush=True)
        study = {
            "benchmark": "held-out loss with deferred columns",
            "settings": SETTINGS,
            "environment": environment(),
            "deferral": runs,
        }
        write(study, OUT)
    for run in runs:
        assert run["offload"] == pytest.approx(run["adamw"], rel=1e-3)
