"""Plan a cell, to stand beside what was measured, and to say why a cell does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from surokit.dissection.settings import Setting, What
from surokit.hardware.gpus import Gpu
from surokit.planner import Plan, plan


def planned_of(setting: Setting, config: Any, device: str, gpu: Gpu | None, what: What = "train") -> dict[str, Any]:
    """Plan a setting from a configuration, for a model that is not there."""
    if config is None:
        return {"why": "the model's configuration is not known"}
    batch = setting.batch if isinstance(setting.batch, int) else 1
    given: dict[str, Any] = {
        "gpu": gpu if gpu is not None else "cpu" if device == "cpu" else None,
        "recipe": setting.full_recipe,
        "batch": batch,
        "length": setting.length,
        "fusion": setting.fusion,
        "offload_weights": setting.offload_weights or None,
    }
    if setting.engine != "surokit":
        given["layers"] = "transformers"
    if what == "infer":
        given["training"] = False
    else:
        given |= {
            **trained(setting),
            "recompute": setting.recompute,
            "offload_activations": setting.offload_activations or None,
        }
    return figures_of(lambda: plan(config, **given))


def trained(setting: Setting, is_bf16: bool = True) -> dict[str, Any]:
    """Return the arguments of a plan that say how a model is trained, by whose engine: DeepSpeed has ZeRO-2 under an optimizer on
    the host, and masters and moments in float32 of weights in bfloat16."""
    given: dict[str, Any] = {
        "gpus": setting.gpus,
        "zero": setting.zero,
        "accumulate": setting.accumulate,
        "optimizer": setting.optimizer,
    }
    if setting.engine == "deepspeed":
        given["zero"] = setting.zero or 2 * (setting.on_host and setting.gpus > 1)
        given |= {"state_dtype": "fp32", "master": True} if is_bf16 else {}
    return given


def figures_of(make: Callable[[], Plan]) -> dict[str, Any]:
    """Return what a dissection shows of a plan, or why there is none."""
    try:
        found = make()
        estimate = found.estimate
    except (ValueError, TypeError) as error:
        return {"why": str(error)}
    return {
        "peak": found.memory.peak_gib * 2**30,
        "phase": found.memory.peak_phase,
        "terms": {term.name: term.bytes for term in found.memory.terms if term.counted and term.name != "slack"},
        "step_ms": None if estimate is None else estimate.step_ms,
    }


def why_not(planned: Mapping[str, Any], gib: float | None, reached: str) -> str:
    """Say which term binds where a cell does not fit."""
    room = "the memory there is" if gib is None else f"{gib:.3g} GiB"
    terms = planned.get("terms")
    if not terms:
        return f"Memory ran out {reached}, with {room}."
    name = max(terms, key=terms.__getitem__)
    most, peak = terms[name] / 2**30, planned["peak"] / 2**30
    if gib is not None and peak < gib:
        return (
            f"Memory ran out {reached}, with {room}, although {peak:.3g} GiB are planned: scratch of products and libraries are "
            f"not in the plan; its largest term is {name}, {most:.3g} GiB."
        )
    return (
        f"Memory ran out {reached}, with {room}: {name} binds, with {most:.3g} of the {peak:.3g} GiB that are planned at the "
        f"fullest moment, in {planned['phase']}."
    )
