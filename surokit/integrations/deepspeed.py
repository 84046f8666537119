"""Write a session's settings as a DeepSpeed configuration: to train the same with DeepSpeed, or to compare the two.

    session.to_deepspeed("ds_config.json")
    deepspeed.initialize(model=model, config="ds_config.json")

The names are those of DeepSpeed 0.19 (deepspeed/runtime/config.py, zero/config.py and zenflow/zenflow_config.py). A warning
names each setting that behaves differently there.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from surokit.offload.adamw import OffloadAdamW
from surokit.offload.zenflow import ZenFlow
from surokit.optim.adamw import AdamW, AdamW8bit
from surokit.optim.muon import Muon

if TYPE_CHECKING:
    from surokit.train.session import Session

_PLAIN = {"SGD", "Adam", "AdamW", "Adagrad"}  # of torch, that DeepSpeed makes by these names
_OPTIONS = {"lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov"}


def configuration(session: Session, micro_batch: int | None, path: str | Path | None = None) -> dict[str, Any]:
    """Return the configuration as Session.to_deepspeed describes it. micro_batch: rows of a batch of one process."""
    if micro_batch is None:
        raise ValueError(
            "to_deepspeed() does not know how many rows a batch has before the first step: take one, or give "
            "data with a length, such as a list of batches."
        )
    optimizer = session.optimizer
    offloads = isinstance(optimizer, ZenFlow | OffloadAdamW)
    sharded = any(hasattr(p, "placements") for p in session.model.parameters())
    zero: dict[str, Any] = {"stage": 3 if sharded else 2 if offloads else 0}
    if offloads:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if isinstance(optimizer, ZenFlow):
        zero["zenflow"] = _zenflow(optimizer)
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": session.accumulate,
        "gradient_clipping": float(session.clip or 0.0),
        "zero_optimization": zero,
        **_precision(session),
        **_optimizer(optimizer, session.engine.base_rates[0]),
    }
    for sentence in _differences(session):
        warnings.warn(sentence, stacklevel=3)
    if path is not None:
        Path(path).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return found


def _zenflow(optimizer: ZenFlow) -> dict[str, Any]:
    s = optimizer.settings
    if not 0 < s["topk_ratio"] < 1:
        raise ValueError(
            f"DeepSpeed's ZenFlow takes topk_ratio between 0 and 1, and this is {s['topk_ratio']:g}: without hot columns, or with "
            "hot ones only, compare with surokit.OffloadAdamW or surokit.AdamW."
        )
    # "auto" there is one epoch of the loader that initialize() was given, whatever select_interval says: so steps, or epochs
    strategy, interval = "step", optimizer.select_every
    if s["select_strategy"] == "epoch":
        strategy, interval = "epoch", 1 if s["select_interval"] == "auto" else s["select_interval"]
    return {
        "topk_ratio": float(s["topk_ratio"]),
        "select_strategy": strategy,
        "select_interval": interval,
        "update_interval": s["update_interval"],
        "full_warm_up_rounds": s["full_warm_up_rounds"],
        "overlap_step": s["overlap_step"],
        "offload": False,
        "auto_ratio": float(s["auto_ratio"]),
        "pt_reserved_cores_perc": float(optimizer.helpers["pt_reserved_cores_perc"]),
    }


def _precision(session: Session) -> dict[str, Any]:
    dtypes = {p.dtype for p in session.model.parameters() if p.requires_grad}
    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    return {names[dtype]: {"enabled": True} for dtype in dtypes if len(dtypes) == 1 and dtype in names}


def _optimizer(optimizer: torch.optim.Optimizer, rate: float) -> dict[str, Any]:
    """Return the block "optimizer", with the options of the first parameter group and the rate it began with; empty for an
    optimizer that DeepSpeed cannot make."""
    kind = type(optimizer).__name__
    ours = isinstance(optimizer, ZenFlow | OffloadAdamW | AdamW) and not isinstance(optimizer, AdamW8bit | Muon)
    if not ours and not (kind in _PLAIN and type(optimizer).__module__.startswith("torch.")):
        return {}
    first = optimizer.param_groups[0]
    params = {name: value for name, value in first.items() if name in _OPTIONS} | {"lr": rate}
    return {
        "optimizer": {
            "type": "AdamW" if ours else kind,
            "params": {name: list(value) if isinstance(value, tuple) else value for name, value in params.items()},
        }
    }


def _differences(session: Session) -> Iterator[str]:
    """Yield the differences of DeepSpeed with these settings, a sentence each."""
    optimizer = session.optimizer
    kind = type(optimizer).__name__
    decays = {float(group.get("weight_decay") or 0.0) for group in optimizer.param_groups}
    if not _optimizer(optimizer, 0.0):
        yield f"DeepSpeed has no counterpart of {kind}: give initialize(optimizer=...) one; the configuration has none."
    elif len(decays) > 1:
        yield (
            f"Weight decay differs between parameter groups ({', '.join(f'{d:g}' for d in sorted(decays))}), and a configuration "
            "has one for all: give initialize(model_parameters=...) the groups of session.optimizer."
        )
    if session.schedule is not None:
        yield "The schedule is no part of the configuration: give initialize(lr_scheduler=...) one."
    if getattr(optimizer, "rounding", "nearest") == "stochastic":
        yield "Stochastic rounding of weights has no counterpart: DeepSpeed keeps a float32 master of them."
    if not isinstance(optimizer, ZenFlow):
        return
    s = optimizer.settings
    if session.accumulate > 1:
        yield (
            "DeepSpeed's ZenFlow takes update_interval for gradient_accumulation_steps: of "
            f"accumulate={session.accumulate} nothing is left, and each micro batch is a step. Make batches larger instead."
        )
    if s["cold_update"] == "time-corrected":
        yield 'cold_update="time-corrected" has no counterpart: cold columns train at lr / update_interval there.'
    if s["update_interval"] == "auto":
        yield (
            f"DeepSpeed has no max_interval ({s['max_interval']} here), and sets gradient accumulation to 0 with "
            'update_interval="auto": give a number.'
        )
    if s["select_strategy"] == "epoch":
        yield (
            'select_strategy="epoch" counts epochs of the loader that initialize(training_data=...) makes; without one columns '
            "are never chosen anew there."
        )
