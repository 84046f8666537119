"""A session's settings as a DeepSpeed configuration, checked by DeepSpeed's own classes where it is installed."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import surokit as sk
from surokit.train import Session
from tests.refusals import refused, warned
from tests.train.toys import Toy, make_session

ZENFLOW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.0}


def quietly(session: Session, **options: Any) -> dict[str, Any]:
    """The configuration; a warning fails the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return session.to_deepspeed(**options)


def zenflow(**options: Any) -> Session:
    return make_session(optimizer=sk.ZenFlow(**{**ZENFLOW, **options}), schedule=None)


def test_a_zenflow_session(tmp_path: Path) -> None:
    session = zenflow(topk_ratio=0.05, update_interval=8, full_warm_up_rounds=2, pt_reserved_cores_perc=0.25)
    found = quietly(session, path=tmp_path / "ds.json")
    assert json.loads((tmp_path / "ds.json").read_text()) == found
    assert found == {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "zenflow": {
                "topk_ratio": 0.05,
                "select_strategy": "step",
                "select_interval": 104,  # 100, rounded up to whole windows
                "update_interval": 8,
                "full_warm_up_rounds": 2,
                "overlap_step": True,
                "offload": False,
                "auto_ratio": 0.99,
                "pt_reserved_cores_perc": 0.25,
            },
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0}},
    }


def test_other_optimizers() -> None:
    offloaded = quietly(make_session(optimizer=sk.OffloadAdamW(lr=1e-3, weight_decay=0.0), schedule=None, clip=None))
    assert offloaded["zero_optimization"] == {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
    assert offloaded["gradient_clipping"] == 0.0
    plain = quietly(make_session(Toy().to(torch.bfloat16), optimizer=sk.AdamW(weight_decay=0.0), schedule=None))
    assert plain["zero_optimization"] == {"stage": 0}
    assert plain["bf16"] == {"enabled": True}
    momentum = make_session(optimizer=lambda params: torch.optim.SGD(params, 0.5, momentum=0.9), schedule=None)
    block = quietly(momentum)["optimizer"]
    assert (block["type"], block["params"]["lr"], block["params"]["momentum"]) == ("SGD", 0.5, 0.9)


def test_the_rate_is_the_one_before_the_schedule() -> None:
    session = make_session(optimizer=sk.ZenFlow(**ZENFLOW))
    session.run(1)
    with warned(UserWarning):
        assert session.to_deepspeed()["optimizer"]["params"]["lr"] == 1e-3


@pytest.mark.parametrize(
    ("options", "block", "words"),
    [
        ({"select_strategy": "step", "select_interval": 40}, {"select_strategy": "step", "select_interval": 40}, ""),
        ({"steps_per_epoch": 30, "update_interval": 1}, {"select_strategy": "step", "select_interval": 30}, ""),
        (
            {"select_strategy": "epoch", "select_interval": 2, "steps_per_epoch": 30},
            {"select_strategy": "epoch", "select_interval": 2},
            r"counts epochs of the loader that initialize\(training_data=...\) makes",
        ),
        ({"update_interval": "auto"}, {"update_interval": "auto"}, "DeepSpeed has no max_interval"),
        (
            {"cold_update": "time-corrected", "overlap_step": False},
            {"overlap_step": False},
            "time-corrected.* no counterpart",
        ),
    ],
)
def test_what_selects_and_updates(options: dict[str, Any], block: dict[str, Any], words: str) -> None:
    session = zenflow(**options)
    if words:
        with warned(UserWarning):
            found = session.to_deepspeed()
    else:
        found = quietly(session)
    assert found["zero_optimization"]["zenflow"].items() >= block.items()


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_session(optimizer=sk.ZenFlow(lr=1e-3), schedule=None),
        lambda: make_session(optimizer=sk.ZenFlow(**ZENFLOW), schedule=None, accumulate=2),
        lambda: make_session(optimizer=sk.AdamW(weight_decay=0.0, rounding="stochastic"), schedule=None),
        lambda: make_session(optimizer=sk.AdamW8bit(), schedule=None),
        lambda: make_session(optimizer=sk.Muon(), schedule=None),
    ],
)
def test_what_is_different_there_is_said(make: Any) -> None:
    with warned(UserWarning):
        make().to_deepspeed()


def test_what_has_no_counterpart_at_all() -> None:
    with refused(ValueError):
        zenflow(topk_ratio=0.0).to_deepspeed()
    batches = [{"input_ids": torch.zeros(2, 4, dtype=torch.int64), "labels": torch.zeros(2, 4, dtype=torch.int64)}]

    class Shapeless:
        def __iter__(self) -> Any:
            return iter(batches)

    with refused(ValueError):
        make_session(data=Shapeless(), optimizer=sk.AdamW()).to_deepspeed()


def test_deepspeed_takes_it() -> None:
    DeepSpeedConfig = pytest.importorskip("deepspeed.runtime.config").DeepSpeedConfig
    for session in (
        zenflow(update_interval=8, full_warm_up_rounds=3),
        zenflow(select_strategy="epoch", steps_per_epoch=30, update_interval="auto"),
        make_session(optimizer=sk.OffloadAdamW(weight_decay=0.0), schedule=None, accumulate=2),
        make_session(Toy().to(torch.bfloat16), optimizer=sk.AdamW(weight_decay=0.0), schedule=None),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = session.to_deepspeed()
        read = DeepSpeedConfig(dict(found))
        assert read.zero_config.stage == found["zero_optimization"]["stage"]
        assert read.gradient_clipping == found["gradient_clipping"]
        assert read.gradient_accumulation_steps == session.accumulate
        assert read.optimizer_params == found["optimizer"]["params"]
        if block := found["zero_optimization"].get("zenflow"):
            assert {name: getattr(read.zero_config.zenflow, name) for name in block} == block
        if "offload_optimizer" in found["zero_optimization"]:
            assert read.zero_config.offload_optimizer.device == "cpu"
