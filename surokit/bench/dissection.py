"""Dissect training, fine-tuning and generation of a small decoder, with the switches that a processor has; "zero" is training in
two processes, with DeepSpeed beside ours, and "peft" fine-tuning with PEFT and bitsandbytes beside it.

The cells are kept in a folder, which a second call goes on from; the raw result holds them all.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surokit.statistics import ROUNDS

if TYPE_CHECKING:
    from surokit.dissection.dissection import Dissection

WIDTHS = {"width": 576, "heads": 9, "kv_heads": 3, "ffn": 1536, "max_length": 2048, "tied": True, "norm_eps": 1e-5}
LENGTH = 350  # tokens, the mean of alpaca's samples (arXiv 2311.03687)
STEPS = 4  # that are timed in each of five rounds, as many as ZenFlow has from one update to the next
#: What a model is called -> how it is described, its configuration (widths are those of SmolLM2-135M's config.json), and the GiB
#: that its largest batch may take, so that a step of it ends within seconds.
MODELS: Mapping[str, tuple[str, Mapping[str, Any], float]] = {
    "33M": ("8 layers in the widths of SmolLM2-135M, 33M parameters", {**WIDTHS, "layers": 8, "vocab": 8192}, 0.6),
    "135M": ("the shape of SmolLM2-135M", {**WIDTHS, "layers": 30, "vocab": 49152}, 3.0),
    "tiny": (
        "a tiny shape",
        {"layers": 1, "width": 64, "heads": 2, "kv_heads": 1, "ffn": 128, "vocab": 1024, "max_length": 512},
        0.2,
    ),
}
LIMITED = "limited"  # a call whose cells may take only that
#: What each kind of work is measured over: in one call after the other, into one folder.
CALLS: Mapping[str, tuple[dict[str, Any], ...]] = {
    "train": (
        {
            "over": {
                "attention": ("math", "flash"),
                "fusion": ("none", "fused"),
                "recompute": ("none", "full"),
                "recipe": ("bf16", "fp8"),
                "optimizer": ("adamw", "offloadadamw", "zenflow", "adamw8bit"),
                "engine": ("surokit", "transformers", "trainer"),
            },
            "together": False,
        },
        {"over": {"attention": ("math",), "batch": (1, 2, "largest")}, LIMITED: True},
    ),
    "zero": ({"what": "train", "over": {"zero": (0, 2, 3), "engine": ("surokit", "deepspeed")}, "together": "all"},),
    "tune": ({"over": {"recipe": ("bf16", "qfp8", "qfp4", "qnf4"), "recompute": ("none", "full")}, "together": False},),
    "peft": (
        {
            "what": "tune",
            "over": {"engine": ("surokit", "transformers"), "recipe": ("bf16", "qnf4")},
            "together": "all",
        },
    ),
    "infer": ({"over": {"recipe": ("bf16", "fp8", "qfp8", "qnf4"), "batch": (1, 4)}, "together": False},),
}


def run(what: str = "train", folder: Path | None = None, rounds: int = ROUNDS, model: str = "33M") -> dict[str, Any]:
    """Measure the cells that the folder lacks, and return the raw result of all of them. model: one of MODELS."""
    import surokit as sk
    from surokit import texts
    from surokit.environment import environment

    described, fields, gib = MODELS[model]
    config = sk.DecoderConfig(**fields)
    tokenizer = sk.train_tokenizer(texts.SHAKESPEARE, vocab_size=1024)
    data = sk.text(texts.SHAKESPEARE, tokenizer, length=LENGTH, batch=1)
    batches = list(itertools.islice(data, 60))
    with tempfile.TemporaryDirectory() as own:
        place = folder or Path(own) / what
        for call in CALLS[what]:
            asked = {"what": what, **call}
            limit = gib if asked.pop(LIMITED, False) else None
            sk.dissect(config, batches, steps=STEPS, rounds=rounds, folder=place, gib=limit, **asked)
        found = sk.Dissection.load(place)
    return {
        "benchmark": f"dissection of {what}: {described}, {LENGTH} tokens of Shakespeare a sequence",
        "settings": {
            "rounds": rounds,
            "timed steps a round": STEPS,
            "the largest batch takes at most": f"{gib:g} GiB",
        },
        "environment": environment(),
        "dissection": {"head": found.head, "cells": [asdict(cell) for cell in found.cells]},
    }


def found_in(data: Mapping[str, Any]) -> Dissection:
    """Return the dissection of a raw result."""
    from surokit.dissection.cell import FORMAT, Cell
    from surokit.dissection.dissection import Dissection

    if (written := data["dissection"]["head"].get("format")) != FORMAT:
        raise ValueError(f"The cells have the format {written}, and this package reads {FORMAT}: measure them again.")
    return Dissection([Cell.of(row) for row in data["dissection"]["cells"]], data["dissection"]["head"])


def table(data: Mapping[str, Any]) -> str:
    """Make the tables by step, phase and module in Markdown."""
    from surokit.bench.result import footer
    from surokit.dissection.report import sections

    return "\n".join([*sections(found_in(data), "####"), "", footer(data)])


def draw(data: Mapping[str, Any], path: Path) -> None:
    """Draw the picture of a raw result."""
    from surokit.bench.result import save_picture

    save_picture(found_in(data).plot(), path, digest(data))


def digest(data: Mapping[str, Any]) -> str:
    """Return the fingerprint of what the picture shows."""
    from surokit.bench.result import fingerprint

    return fingerprint(data["dissection"]["cells"])
