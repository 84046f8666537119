"""Folders as this revision writes them: runs in the middle, a race that was stopped, models, an adapter, profiles.

What is answered is which files there are, the digest of weights, and under which names the rest stands.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import surokit as sk
from tests.answers.book import Book
from tests.answers.profiles import FILES
from tests.answers.runs import OPTIMIZERS, decoder, text_data

RUNS: dict[str, dict[str, Any]] = {
    "fp8": {"recipe": sk.FP8, "optimizer": OPTIMIZERS["adamw"]},
    "fp8-8bit": {"recipe": sk.FP8, "optimizer": OPTIMIZERS["adamw8bit"], "accumulate": 2},
    "fp8-zenflow": {"recipe": sk.FP8, "optimizer": OPTIMIZERS["zenflow"]},
    "fp8-fused": {"recipe": sk.FP8, "optimizer": OPTIMIZERS["adamw"], "fused": True},
    "bf16-zenflow": {"recipe": sk.BF16, "optimizer": OPTIMIZERS["zenflow"], "accumulate": 2},
    "bf16-offload": {"recipe": sk.BF16, "optimizer": OPTIMIZERS["offloadadamw"]},
    "fp4-lora": {"recipe": sk.NVFP4.lora(rank=4), "optimizer": OPTIMIZERS["adamw"]},
    "mxfp8": {"recipe": sk.MXFP8, "optimizer": OPTIMIZERS["adamw8bit"]},
    "qfp8-8bit": {"recipe": sk.QFP8.lora(rank=4), "optimizer": OPTIMIZERS["adamw8bit"]},
    "qfp4": {"recipe": sk.QFP4.lora(rank=4), "optimizer": OPTIMIZERS["adamw"]},
    "qnf4-zenflow": {"recipe": sk.QNF4.lora(rank=4), "optimizer": OPTIMIZERS["zenflow"]},
}
STORED = ("qfp8", "qfp4", "qnf4")


def write(book: Book, made: Path) -> None:
    """Make all of them in `made`."""
    for name, given in RUNS.items():
        book.write(f"made run {name}", lambda n=name, g=given: _run(made / n, **g))
    for name, stopped in (("race", False), ("race-stopped", True)):
        book.write(f"made {name}", lambda n=name, s=stopped: _race(made / n, s))
    book.write("made model", lambda: listed(sk.save(decoder(), made / "model")))
    for name in STORED:
        book.write(f"made model {name}", lambda n=name: _stored(made / f"model-{n}", sk.recipes[n]))
    book.write("made adapter", lambda: _adapter(made / "adapter"))
    for file in FILES:
        sk.Profile.load(file).save(made / file.name)
    (made / "gpu.json").write_text(sk.planner.GPUS["H100"].to_json(), encoding="utf-8")


def listed(folder: Path) -> dict[str, Any]:
    """Every file below a folder: weights by digest, JSON by its keys."""
    return {str(path.relative_to(folder)): _file(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def _file(path: Path) -> Any:
    if path.suffix == ".safetensors":
        return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    if path.suffix == ".json":
        return _keys(json.loads(path.read_text(encoding="utf-8")))
    if path.suffix == ".jsonl":
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return {"lines": len(lines), "keys": [list(line) for line in lines[:1]]}
    return "a file"


def _keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _keys(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_keys(each) for each in value[:1]]
    return type(value).__name__


def _run(folder: Path, recipe: Any, optimizer: Any, fused: bool = False, accumulate: int = 1) -> Any:
    model = decoder()
    if fused:
        sk.apply(model, recipe)
        sk.fuse(model, recompute="full")
    made = {"recipe": recipe, "optimizer": optimizer, "accumulate": accumulate, "schedule": sk.Cosine(2, 10)}
    session = sk.Session(model, text_data(), run_dir=folder, **made)
    session.run(3)
    session.note("in the middle")
    session.save()
    session.run(1)  # lost: it was not saved
    return listed(folder)


def _race(folder: Path, stopped: bool) -> Any:
    def stop(session: sk.Session) -> dict[str, Any]:
        if session.steps == 5:
            session.stop()
        return {}

    given: dict[str, Any] = {"meters": [stop]} if stopped else {}
    sk.race(
        {"bf16": sk.BF16, "fp8": sk.FP8},
        model=decoder(),
        data=list(text_data())[:12],
        eval=list(text_data())[:1],
        optimizer=sk.AdamW(lr=3e-3),
        schedule=sk.Cosine(2, 10),
        steps=10,
        turn_s=1e-6,
        usd_per_gpu_hour=2.0,
        live=False,
        predict=False,
        run_dir=folder,
        **given,
    )
    return listed(folder)


def _stored(folder: Path, recipe: sk.Recipe) -> Any:
    model = adapted(recipe)
    sk.merge(model, requantize=True, keep=False)
    return listed(sk.save(model, folder))


def adapted(recipe: sk.Recipe) -> sk.Decoder:
    """A decoder whose adapters do something."""
    model = decoder()
    torch.manual_seed(1)
    sk.apply(model, recipe)
    drawn = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(generator=drawn, std=0.02)
    return model


def _adapter(folder: Path) -> Any:
    return listed(sk.save_adapter(adapted(sk.QFP8.lora(rank=4)), folder, base="a base"))
