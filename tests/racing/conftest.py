"""A small model and its text, and races that take a second."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import surokit as sk
from surokit.racing import predicted

CONFIG = sk.DecoderConfig(layers=1, width=32, heads=2, kv_heads=1, vocab=64, ffn=64, max_length=32)
Make = Callable[..., Any]


def batches(count: int = 12, rows: int = 2, length: int = 16, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Counting with a stride: there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        start, stride = (torch.randint(1, n, (rows, 1), generator=generator) for n in (64, 4))
        ids = (start + stride * torch.arange(length)) % 64
        found.append({"input_ids": ids, "labels": ids})
    return found


@pytest.fixture(scope="session")
def model() -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return sk.Decoder(CONFIG, dtype=torch.bfloat16)


def raced(net: torch.nn.Module, entries: Any = ("bf16", "fp8"), **arguments: Any) -> sk.Race:
    """sk.race on the small model; arguments win."""
    given = {"steps": 16, "live": False, "predict": False, **arguments}
    if any(not isinstance(e, sk.Session) for e in (entries.values() if isinstance(entries, dict) else entries)):
        given = {"model": net, "data": batches(), "optimizer": sk.AdamW(lr=3e-3), **given}
    return sk.race(entries, **given)


@pytest.fixture
def make(model) -> Make:
    return partial(raced, model)


@pytest.fixture(scope="session")
def long(model) -> sk.Race:
    """A race of many rounds, to be looked at only."""
    return raced(model, steps=28, turn_s=1e-6, eval=batches(2, seed=1), usd_per_gpu_hour=2.0)


def made_session(net: torch.nn.Module, recipe: Any = None, **arguments: Any) -> sk.Session:
    """A session on a copy of the small model; arguments win."""
    given = {"optimizer": sk.AdamW(lr=3e-3), "schedule": sk.Cosine(2, 16), "data": batches(), **arguments}
    return sk.Session(given.pop("model", None) or copy.deepcopy(net), given.pop("data"), recipe=recipe, **given)


@pytest.fixture
def session(model) -> Make:
    return partial(made_session, model)


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch):
    """Predictions rest on fewer calls of a layer than they should."""
    monkeypatch.setattr(predicted, "_RUN_S", 0.01)
