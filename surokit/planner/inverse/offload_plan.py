"""Predict a plan's step with optimizer states, weights or activations on the host, and choose the optimizer to take.

The formulas are those of planner/offload. Here they get what the plan knows: the GPU's memory that a step takes in each way,
counted term by term as for any plan; a step's time without offload; the settings of the plan's own optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from surokit.planner.counts.flops import frozen
from surokit.planner.counts.memory import STATES, Memory, blocks_of, count_memory
from surokit.planner.inputs.question import Asked, check_whole
from surokit.planner.inverse.budgets import known_memory_budget
from surokit.planner.inverse.remedies import Fitting, fitting
from surokit.planner.offload.formulas import (
    GIB,
    HOT,
    OFFLOADING,
    SLOTS,
    WAYS,
    Host,
    Offload,
    Room,
    Way,
    asked_host,
    predict_offload,
)
from surokit.planner.offload.streaming import Streamed, predict_streamed
from surokit.planner.times.likely import published_host
from surokit.planner.times.roofline import why_no_estimate

if TYPE_CHECKING:
    from surokit.planner.planning import Plan

#: The optimizer of each way, as a plan calls it; without offload it is the plan's own.
_OPTIMIZERS: dict[Way, str] = {"synchronous": "offloadadamw", "zenflow": "zenflow"}
_NOTHING = 1e4  # parameters: fewer are not worth a prediction
_CLASSES = {
    "adamw": "surokit.AdamW",
    "adamw8bit": "surokit.AdamW8bit",
    "muon": "surokit.Muon",
    "none": "torch.optim.SGD",
}


def offload(plan: Plan, host: Host | None = None, **options: Any) -> Offload:
    """Predict a step with the optimizer's states on the host; see `Plan.offload`."""
    check_whole(plan.setup.division, "The optimizer's states")
    host, known = _host(plan, host, "offload")
    if plan.setup.offload_states:
        plan = plan.but(offload_states=None)  # another way to keep them there
    if plan.setup.prefetch and not frozen(plan.recipe):
        raise ValueError(
            "The optimizer's states of streamed weights are on the host already: plan.streamed() predicts that step."
        )
    trained = plan.trained_parameters / plan.setup.shards_from(1)
    if not trained:
        raise ValueError(
            "Nothing is known to train in this plan, so no optimizer has states: plan a model that trains, with its config."
        )
    options = {**plan.deferral, "gradient_bytes": round(plan.setup.trained_width), **options}
    own = plan.setup.optimizer
    without = "adamw" if own in OFFLOADING else own
    deferred = {
        "hot": options.get("topk_ratio", HOT),
        "overlap": options.get("overlap_step", True),
        "slots": options.get("slots", SLOTS),
    }
    memory = {way: _memory(plan, optimizer=_OPTIMIZERS.get(way, without), **deferred) for way in WAYS}
    options.setdefault("room", _room(plan, {way: m.gib for way, m in memory.items()}, memory["none"], host))
    states = sum(t.bytes for t in memory["none"].terms if t.name in STATES) / GIB
    found = predict_offload(
        _computing_ms(plan), trained, host, states_gib=states, without=_CLASSES.get(without, without), **options
    )
    kind, rates = _rates(plan, known)
    return replace(found, kind=kind, rates=rates)


def streamed(plan: Plan, host: Host | None = None, *, prefetch: int | None = None) -> Streamed:
    """Predict a step whose blocks' weights stay on the host; see `Plan.streamed`."""
    host, known = _host(plan, host, "streamed")
    if plan.shape is None:
        raise ValueError("A number of parameters has no blocks to stream: plan with a config or a model.")
    again = plan.but(offload_weights=prefetch or plan.setup.prefetch or True, offload_states=None)
    setup, recipe = again.setup, plan.recipe
    blocks = blocks_of(plan.shape, recipe, setup)
    assert blocks is not None
    computing_ms = _computing_ms(again, plan)
    room, memory = known_memory_budget(plan, None), again.memory
    fits = None if room is None or (memory.left_out and memory.gib <= room) else memory.gib <= room
    found = predict_streamed(
        blocks,
        host,
        compute_ms=computing_ms,
        prefetch=setup.prefetch,
        width=setup.trained_width,
        accumulate=setup.accumulate,
        training=setup.training,
        gpu_gib=memory.gib,
        host_gib=memory.host_gib,
        fits=fits,
        name="bf16" if recipe is None else recipe.name,
    )
    kind, rates = _rates(again, known)
    return replace(found, kind=kind, rates=rates)


def with_offload(asked: Asked, memory: Memory, compute_ms: float, host: Host, forward: float) -> float:
    """Return the milliseconds of a step that computes for `compute_ms`, with what its parts on the host add.

    forward: share of the computing that is forward, during which activations go down; in the rest of it they come up.
    """
    setup, width = asked.setup, asked.setup.trained_width
    activations = sum(t.bytes for t in memory.host if t.name == "activations") * setup.accumulate
    copied_ms, forward_ms = activations / (host.link_gb_s * 1e6), compute_ms * forward
    step_ms = max(forward_ms, copied_ms) + max(compute_ms - forward_ms, copied_ms)
    blocks = blocks_of(asked.subject.shape, asked.recipe, setup)
    if blocks is not None:
        found = predict_streamed(
            blocks,
            host,
            compute_ms=compute_ms,
            prefetch=setup.prefetch,
            width=width,
            accumulate=setup.accumulate,
            training=setup.training,
        )
        beside = max(found.bytes_up, found.bytes_down) / (host.link_gb_s * 1e6) + copied_ms
        step_ms = max(step_ms, beside) + found.exposed_ms + found.adam_ms
    trained = asked.trained_parameters / setup.shards_from(1)
    cold = trained * (1 - asked.deferral.get("topk_ratio", 0.0))
    if setup.optimizer in OFFLOADING and cold >= _NOTHING:
        o = predict_offload(step_ms, trained, host, gradient_bytes=round(width), **asked.deferral)
        step_ms = o.zenflow_ms if setup.optimizer == "zenflow" else o.synchronous_ms
    if setup.offload_states:  # they come up and go down while the GPU updates
        step_ms += sum(t.bytes for t in memory.host if t.name in STATES) / (host.link_gb_s * 1e6)
    return step_ms


def _host(plan: Plan, host: Any, asks: str) -> tuple[Host, bool]:
    """Return the host that was given or measured, else one as published runs had it, and whether it is known."""
    found = asked_host(asks, host, plan.gpu)
    if found is None and plan.gpu is not None and plan.gpu.ceilings is None and plan.gpu.host_gb_s is not None:
        return published_host(plan.gpu, plan.setup.gpus), False
    if found is None:
        raise ValueError(_no_host(plan, asks))
    return found, True


def _no_host(plan: Plan, asks: str) -> str:
    """Say why the host beside the plan's GPU is not known, and what to do."""
    give = "planner.Host(link_gb_s=50, adam_params_s=2e9)"
    if plan.setup.device == "cpu":
        return f"A CPU has no link to itself: {asks}() is about a GPU and its host, give gpu='H100' or the like, and {give}."
    if plan.gpu is None or plan.gpu.ceilings is None:
        return f"{asks}() needs the host's rates: give Host(link_gb_s=, adam_params_s=), or plan(gpu=sk.calibrate())."
    rates = {
        "the link": plan.gpu.ceilings.host_gb_s or plan.gpu.host_gb_s,
        "the host's AdamW": plan.gpu.ceilings.host_adam_params_s,
    }
    lacks = " and ".join(name for name, rate in rates.items() if rate is None)
    return f"{asks}() needs the host's rates, and the calibration of {plan.gpu.name} lacks {lacks}: give {give}."


def _computing_ms(plan: Plan, at_rate_of: Plan | None = None) -> float:
    """Return the milliseconds of a step without offload.

    A given rate is taken to be that of the plan `at_rate_of`, which may recompute less.
    """
    given = at_rate_of or plan
    if given.time.step_ms is not None and given.time.rate_kind == "given":
        return given.time.step_ms * (1 + _again(plan)) / (1 + _again(given))
    if plan.computing_time is None:
        raise ValueError(f"The prediction needs a step's time: {_no_time(plan)}")
    return plan.computing_time.ms


def _no_time(plan: Plan) -> str:
    """Say what a step's time lacks, and what to give."""
    wanted = [f"{name}=" for name in ("batch", "length") if getattr(plan.setup, name) is None]
    if plan.time.rate_tflops is None:
        if plan.shape is None:
            share = "gpu= with mfu=" if plan.gpu is None else "mfu="
            wanted.append(f"a rate, {share} or tflops_per_gpu=")
        elif plan.gpu is None:
            wanted.append("gpu= or tflops_per_gpu=")
    if not wanted:
        return why_no_estimate(plan.shape, plan.compute, plan.setup, plan.gpu)
    return f"give {' and '.join(filter(None, (', '.join(wanted[:-1]), wanted[-1])))}."


def _rates(plan: Plan, host_known: bool) -> tuple[str, str]:
    """Return (kind of the plan's step time, the rates that it is based on), with the plan's own labels."""
    if plan.time.rate_kind == "given" and plan.time.step_ms is not None:
        kind, rates = "prediction", "" if host_known else "the rate that was given"
    else:
        assert plan.estimate is not None, "its time was asked before"
        assert plan.computing_time is not None
        kind = plan.computing_time.kind
        rates = "rates that published runs reached" if kind == "likely" else plan.estimate.how.partition(";")[0]
    if host_known:
        return kind, rates
    return "likely" if kind == "prediction" else kind, f"{rates}, with a host as published runs had it"


def _again(plan: Plan) -> float:
    """Return the FLOPs that are recomputed, as a share of the model FLOPs."""
    return plan.compute.recompute / plan.compute.model if plan.compute else 0.0


def _memory(plan: Plan, **changes: Any) -> Memory:
    """Return the memory of the plan with changes to its setup."""
    return count_memory(plan.shape, plan.parameters, plan.asked.counted_recipe, replace(plan.setup, **changes))


def _room(plan: Plan, takes: Mapping[Way, float], memory: Memory, host: Host) -> Room:
    gib = plan.room_gib
    left_out = ""
    if memory.left_out:
        left_out = "activations, which a number of parameters does not tell: give a config"
        if plan.shape is not None:
            left_out = "activations, which take batch= and length="
    cure = ""
    if gib is not None and min(takes["synchronous"], takes["zenflow"]) > gib:
        found, asks = fitting(plan, host=host), "plan.fitting()" if host.memory_gib is None else "plan.fitting(host=)"
        cure = f"left are {_left(plan, found)}; {asks} compares them: {found.sentence}"
    return Room(gib, takes, left_out, cure)


def _left(plan: Plan, found: Fitting) -> str:
    """Say what else makes room, without anything that the host has no memory for."""
    known = not found.space.assumed
    hosted = {name for r in found.remedies if r.hosted or not known or r in found.path for name in r.changes}
    refused = {name for remedy in found.remedies for name in remedy.changes} - hosted
    offloads = (
        "offload_weights" * (not plan.setup.prefetch),
        "offload_activations" * (not plan.setup.offload_activations),
    )
    ways = [
        "recompute='full'" if plan.setup.recompute != "full" else "",
        "" if frozen(plan.recipe) else "an adapter (recipe.lora())",
        *(f"sk.{name}" for name in offloads if name and name not in refused),
        "more GPUs (zero=3)",
    ]
    return ", ".join(way for way in ways if way)
