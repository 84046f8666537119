"""What short seeded runs on a CPU come to: losses, gradient norms, weights and generated text, to the bit."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import torch
from torch import nn

import surokit as sk
from surokit import texts
from tests.answers.book import Book

STEPS = 4
CONFIG = sk.DecoderConfig(layers=2, width=64, heads=4, kv_heads=2, vocab=320, ffn=96, max_length=64)
TIMES = ("tokens_per_s", "wall_ms", "idle_frac", "stall_ms", "peak_gib", "elapsed_s", "offload_ms")
OPTIMIZERS: dict[str, Any] = {
    "adamw": sk.AdamW(lr=3e-3),
    "adamw8bit": sk.AdamW8bit(lr=3e-3, rounding="stochastic"),
    "offloadadamw": sk.OffloadAdamW(lr=3e-3),
    "zenflow": sk.ZenFlow(lr=3e-3, topk_ratio=0.2, update_interval=2),
}
WAYS = ("plain", "accumulated", "fused")


@cache
def _some_text() -> tuple[list[str], Any]:
    some = [texts.SHAKESPEARE.read_text(encoding="utf-8")[:20_000]]
    return some, sk.train_tokenizer(some, vocab_size=320)


def text_data() -> Any:
    """A small text as batches, from their beginning."""
    return sk.text(*_some_text(), length=32, batch=2)


def decoder(**changes: Any) -> sk.Decoder:
    """A small decoder with the same weights each time."""
    torch.manual_seed(0)
    return sk.Decoder(CONFIG, dtype=changes.pop("dtype", torch.bfloat16))


def state(session: sk.Session) -> dict[str, Any]:
    """All that a session knows after some steps and that no clock had a part in."""
    records = session.records.frame()
    return {
        "records": records.drop(columns=[name for name in TIMES if name in records]),
        "weights": session.model.state_dict(),
        "trained": [name for name, p in session.model.named_parameters() if p.requires_grad],
        "optimizer": session.optimizer.state_dict(),
        "evaluated": session.evaluate(list(text_data())[:1]) if session.eval is None else session.evaluate(),
        "sample": session.sample("To be", 4),
    }


def run(
    recipe: Any, optimizer: Any, way: str, *, steps: int = STEPS, model: nn.Module | None = None, **given: Any
) -> Any:
    """The state after a run."""
    net = decoder() if model is None else model
    if way == "fused":
        sk.apply(net, recipe)
        sk.fuse(net, recompute="selective")
    accumulate = 2 if way == "accumulated" else 1
    made = {"schedule": sk.Cosine(2, 8), "accumulate": accumulate, "optimizer": optimizer, **given}
    session = sk.Session(net, text_data(), recipe=recipe, **made)
    session.run(steps)
    return {"session": str(session), "report": str(session.report), **state(session)}


def write(book: Book, names: tuple[str, ...] = tuple(sk.recipes)) -> None:
    """Every recipe, all weights or an adapter, every optimizer, every way; then what is asked once."""
    for name, adapter in itertools.product(names, (False, True)):
        recipe = sk.recipes[name]
        for (called, optimizer), way in itertools.product(OPTIMIZERS.items(), WAYS):
            if adapter:
                key, chosen = f"{name} lora", recipe.lora(rank=4)
            else:
                key, chosen = name, recipe
            book.write(f"{key} {called} {way}", lambda c=chosen, o=optimizer, w=way: run(c, o, w))
    _others(book)


def _others(book: Book) -> None:
    more: dict[str, dict[str, Any]] = {
        "eval": {"eval": list(text_data())[:2], "eval_every": 2},
        "no clip": {"clip": None, "schedule": None, "seed": 5},
        "numerics": {"meters": [sk.numerics(every=2)]},
        "float32 states": {"optimizer": sk.AdamW(lr=1e-3, state_dtype=torch.float32, betas=(0.9, 0.999))},
        "auto windows": {"optimizer": sk.ZenFlow(lr=1e-3, update_interval="auto", max_interval=3)},
        "time-corrected": {"optimizer": sk.ZenFlow(lr=1e-3, overlap_step=False, cold_update="time-corrected")},
        "of torch": {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)},
    }
    for name, given in more.items():
        optimizer = given.pop("optimizer", sk.AdamW(lr=3e-3))
        for recipe in (sk.BF16, sk.FP8, sk.NVFP4):
            key = f"{recipe.name} {name}"
            book.write(key, lambda r=recipe, o=optimizer, g=given: run(r, o, "plain", steps=6, **g))
    book.write("fp8 float32", lambda: run(sk.FP8, sk.AdamW(lr=1e-3), "plain", model=decoder(dtype=torch.float32)))
    for stream in (sk.offload_weights, sk.offload_activations):
        for recipe in (sk.BF16, sk.FP8, sk.QFP8.lora(rank=4)):
            book.write(f"{stream.__name__} {recipe.name}", lambda s=stream, r=recipe: _streamed(s, r))
    book.write("forks", _forks)


def _streamed(stream: Any, recipe: sk.Recipe) -> Any:
    model = decoder()
    sk.apply(model, recipe)
    stream(model)
    return run(recipe, sk.AdamW(lr=3e-3), "plain", model=model)


def _forks() -> Any:
    start = sk.Session(decoder(), text_data(), recipe=sk.BF16, optimizer=sk.AdamW(lr=3e-3), schedule=sk.Cosine(2, 8))
    start.run(2)
    forks = [start.fork(recipe=recipe) for recipe in (sk.BF16, sk.FP8, sk.NVFP4)]
    for fork in forks:
        fork.run(2)
    return [{**state(fork), "drawn": fork.sample("To be", 24, temperature=1.0, seed=3)} for fork in forks]
