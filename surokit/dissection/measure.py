"""Measure one cell: build the model as the setting says, take steps, and say how fast, with what memory, and where the time went.

This runs in a process of its own, in every one of several where they train together; the first returns the values of a Cell. Steps
are timed without the profiler; after them one step is listened to for its memory, and a few are profiled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surokit import convert
from surokit.applied import recipe_of
from surokit.dissection import memory as memories
from surokit.dissection.settings import Setting
from surokit.hardware.gpus import Gpu
from surokit.models import load
from surokit.models.config import DecoderConfig
from surokit.models.decoder import Decoder
from surokit.models.fuse import fuse
from surokit.offload import OffloadAdamW, ZenFlow, offload_activations, offload_weights
from surokit.optim.adamw import AdamW, AdamW8bit
from surokit.optim.spec import Spec
from surokit.parallel.layout import Parallel
from surokit.places import find_device
from surokit.planner import plan
from surokit.profiler import Profile, profile
from surokit.profiler.record.allocations import Meter
from surokit.racing.comparability import digest_of
from surokit.ranks import rank_here
from surokit.train.run_info import device_name
from surokit.train.session import Session
from surokit.train.setup import Vocabulary

WARM_UP = 2
PROFILED, BEFORE = 3, 2  # steps that are profiled, and those before them
GROWTH = 2
FINENESS = 8  # the search for the largest batch ends within an eighth of it
OPERATORS = 40  # rows that are kept

Source = nn.Module | DecoderConfig | str | Path | Callable[[], nn.Module]


@dataclass(frozen=True)
class Tokens:
    """A Tokens holds what all cells read, one after the other: token ids and labels as int64 [n], on the CPU.

    ids: None draws random ones of the model's vocabulary, by `seed`.
    """

    ids: Tensor | None = None
    labels: Tensor | None = None
    seed: int = 0

    def batches(self, count: int, batch: int, length: int, vocabulary: int) -> list[dict[str, Tensor]]:
        """Return so many batches {"input_ids", "labels"} of int64 [batch, length], from the beginning again where they end."""
        if self.ids is None:
            drawn = torch.Generator().manual_seed(self.seed)
            ids = torch.randint(0, vocabulary, (count * batch * length,), generator=drawn)
            labels = ids
        else:
            places = torch.arange(count * batch * length) % len(self.ids)
            ids = self.ids[places]
            labels = ids if self.labels is None else self.labels[places]
        shape = (count, batch, length)
        return [{"input_ids": i, "labels": t} for i, t in zip(ids.view(shape), labels.view(shape))]


@dataclass(frozen=True)
class Job:
    """A Job is all that a process needs to measure a cell.

    steps: that are timed. gib: the limit that the cell shall fit into. gpu: the rates of this machine, for the planned time.
    """

    setting: Setting
    source: Source
    tokens: Tokens
    steps: int
    seed: int
    lr: float
    gib: float | None
    device: str | None
    gpu: Gpu | None = None
    keep: str | None = None  # a file for the profile


def measure(job: Job) -> dict[str, Any] | None:
    """Measure a cell and return the fields of a Cell; None in all processes but the first, and where the steps were stopped."""
    began = time.monotonic()
    device = find_device(job.device, "dissect")
    gib = memories.room_gib(device, job.gib)
    found: dict[str, Any] = {"machine": device_name(device), "memory": {"limit_gib": gib}}
    session = None
    try:
        with memories.limited(device, gib):
            session, weights = _session(job, device)
            found["work"] = {"weights": weights, **_work(job, session)}
            if not run_steps(session, WARM_UP + job.steps):
                return None
    except Exception as error:
        if not memories.is_out_of_memory(error):
            raise
        config = _config_of(job.source, None if session is None else session.model)
        planned = planned_of(job.setting, config, device.type, job.gpu)
        reached = "while the model was made" if session is None else "in a step"
        found |= {"state": "does not fit", "planned": planned, "why": why_not(planned, gib, reached)}
    else:
        if not _observe(job, session, found):
            return None
        found["state"] = "measured"
    found["seconds"] = time.monotonic() - began
    return found if rank_here().is_first else None


def search(job: Job) -> int:
    """Return the largest batch that fits, 0 where not one sequence does."""
    device = find_device(job.device, "dissect")
    gib = memories.room_gib(device, job.gib)
    memories.in_pieces(device)
    one = replace(job, setting=replace(job.setting, batch=1))
    try:
        with memories.limited(device, gib):
            session, _ = _session(one, device)
            return largest(partial(_fits, session, job), planned_batch(session, job, gib))
    except Exception as error:
        if not memories.is_out_of_memory(error):
            raise
        return 0


def _observe(job: Job, session: Session, found: dict[str, Any]) -> bool:
    """Fill in what the steps were, and what one more step holds and a few more show. False where a stop ended them."""
    records = session.records
    found["work"]["tokens_per_step"] = session.tokens_per_step
    found["step_ms"] = records.column("wall_ms")[-job.steps :].tolist()
    found["losses"] = records.column("loss")[-WARM_UP - job.steps :].tolist()
    found["memory"] |= _memory(session)
    found["planned"] = _planned(session, job.gpu)
    with profile(steps=PROFILED, warmup=BEFORE) as profiled:
        ended = run_steps(session, PROFILED + BEFORE)
    if not ended:
        return False
    found["profile"] = summed(profiled)
    if job.keep and rank_here().is_first:
        profiled.save(job.keep)
    return True


def _work(job: Job, session: Session) -> dict[str, Any]:
    """Return what says whether two cells did the same work."""
    s, parameters = job.setting, list(session.model.parameters())
    return {
        "batch": s.batch,
        "length": s.length,
        "accumulate": s.accumulate,
        "gpus": s.gpus,
        "parameters": sum(p.numel() for p in parameters),
        "trained": sum(p.numel() for p in parameters if p.requires_grad),
    }


def run_steps(session: Session, steps: int) -> bool:
    """Take so many steps; False where somebody stopped them."""
    before = session.steps
    session.run(steps)
    return session.steps == before + steps


# -- the model, as the setting says


def _change(model: nn.Module, setting: Setting) -> None:
    """Change a model as the setting says, where the session does not."""
    if setting.attention in ("eager", "sdpa"):
        chosen = getattr(model, "set_attn_implementation", None)
        if chosen is None:
            raise ValueError(
                f"attention={setting.attention} chooses an implementation of transformers' models, and this is a "
                f"{type(model).__name__}: use 'math', 'flash', 'efficient' or 'cudnn'."
            )
        chosen(setting.attention)
    fused = setting.full_fusion
    if fused != fused.OFF or next(model.parameters()).is_cuda:  # where a Decoder fuses by itself
        fuse(model, fused)
    if setting.offload_weights:
        convert.apply(model, setting.full_recipe)
        offload_weights(model)


def build(source: Source) -> nn.Module:
    """Return the model of a configuration (bfloat16), a folder, or a function, or the module itself. TypeError for others."""
    if isinstance(source, DecoderConfig):
        return Decoder(source, dtype=torch.bfloat16)
    if isinstance(source, str | Path):
        return load(source, dtype=torch.bfloat16)
    made = source if isinstance(source, nn.Module) else source() if callable(source) else None
    if not isinstance(made, nn.Module):
        raise TypeError(
            f"dissect(model): {source!r} makes a {type(made).__name__}, and not a torch.nn.Module: give a function that makes "
            "a model."
        )
    return made


def _config_of(source: Source, model: nn.Module | None) -> Any:
    """Return what a plan can read: the model's configuration, or the folder; None where there is none."""
    if isinstance(source, DecoderConfig | str | Path):
        return source
    return getattr(model if model is not None else source, "config", None)


def _set_attention(setting: Setting) -> None:
    """Switch torch's attention kernels in this process."""
    named = setting.attention
    if named in ("auto", "eager", "sdpa"):
        return
    cuda = torch.backends.cuda
    for name, enable in (
        ("flash", cuda.enable_flash_sdp),
        ("efficient", cuda.enable_mem_efficient_sdp),
        ("cudnn", cuda.enable_cudnn_sdp),
    ):
        enable(name == named)
    cuda.enable_math_sdp(named == "math")


def _optimizer(setting: Setting, lr: float) -> Any:
    if isinstance(setting.optimizer, Spec):
        return setting.optimizer
    if setting.optimizer == "sgd":
        return lambda parameters: torch.optim.SGD([p for p in parameters if p.requires_grad], lr=lr)
    made = {"adamw": AdamW, "adamw8bit": AdamW8bit, "offloadadamw": OffloadAdamW, "zenflow": ZenFlow}
    return made[setting.optimizer](lr=lr)


def _session(job: Job, device: torch.device) -> tuple[Session, str]:
    """Build the session of a cell; return it with a digest of the weights that it starts from."""
    setting = job.setting
    assert isinstance(setting.batch, int)
    _set_attention(setting)
    torch.manual_seed(job.seed)  # all cells start from the same weights
    model = build(job.source).to(device)
    weights = digest_of(model.parameters())
    _change(model, setting)
    if not any(isinstance(module, nn.Embedding) for module in model.modules()):
        raise TypeError(
            f"dissect(model): a {type(model).__name__} has no embedding of tokens, so it is no decoder: give a surokit.Decoder, or "
            "a causal language model of transformers."
        )
    steps = WARM_UP + job.steps + 1 + BEFORE + PROFILED
    count = steps * setting.accumulate * setting.gpus
    parallel = None
    if setting.gpus > 1:
        parallel = Parallel(shard=setting.gpus if setting.zero else 1, reshard=setting.zero != 2)
    recipe = setting.full_recipe
    session = Session(
        model,
        job.tokens.batches(count, setting.batch, setting.length, Vocabulary.of(model).size),
        optimizer=_optimizer(setting, job.lr),
        recipe=None if recipe == recipe_of(model) else recipe,
        accumulate=setting.accumulate,
        schedule=None,
        seed=job.seed,
        compile=setting.compile,
        parallel=parallel,
    )
    if setting.offload_activations:
        offload_activations(model)
    return session, weights


# -- the largest batch


def _fits(session: Session, job: Job, batch: int) -> bool:
    """Return whether a step of this batch fits; what it took is given back."""
    batches = job.tokens.batches(job.setting.accumulate, batch, job.setting.length, session.vocabulary.size)
    try:
        float(session.step(batches).loss)
        return True
    except Exception as error:
        if not memories.is_out_of_memory(error):
            raise
        return False
    finally:
        session.model.zero_grad(set_to_none=True)
        memories.give_back(session.device)


def planned_batch(session: Session, job: Job, gib: float | None) -> int:
    try:
        return max(1, plan(session, batch=1, length=job.setting.length).largest("batch", gib=gib))
    except (ValueError, TypeError):  # what is planned is not known, or nothing fits
        return 1


def largest(fits: Callable[[int], bool], guess: int) -> int:
    """Return the largest batch that fits, within an eighth; the search starts at a guess. MemoryError where not one fits."""
    good, bad = 0, None
    size = guess
    while bad is None or bad - good > max(1, good // FINENESS):
        if fits(size):
            good = size
        else:
            bad = size
        size = (good + bad) // 2 if bad is not None else good * GROWTH
        if size == good and bad is not None:
            break
    if not good:
        raise MemoryError("not one sequence fits")
    return good


# -- what is measured


def _memory(session: Session) -> dict[str, Any]:
    """Measure one step: bytes held before it by term, and the most in each phase beyond those."""
    device = session.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    rest = memories.held(session.model, session.optimizer)
    meter = Meter(device)
    handles = [
        session.model.register_forward_pre_hook(lambda *_: meter.mark("forward")),
        session.model.register_forward_hook(lambda *_: meter.mark("backward")),
        session.optimizer.register_step_pre_hook(lambda *_: meter.mark("optimizer")),
        session.optimizer.register_step_post_hook(lambda *_: meter.mark("rest")),
    ]
    try:
        with meter.listening():
            session.run(1)
            meter.mark("end")
    finally:
        for handle in handles:
            handle.remove()
    base = 0 if device.type == "cuda" else sum(rest.values())
    phases: dict[str, int] = {}
    for name, peak in meter.peaks:
        if name != "rest":
            phases[name] = max(phases.get(name, 0), base + peak)
    return {"rest": rest, "phases": phases, "peak": max(phases.values())}


def summed(found: Profile) -> dict[str, Any]:
    """Return what a dissection shows of a profile, as plain values: milliseconds a step."""
    s = found.summary
    return {
        **{name: s[name] for name in ("wall_ms", "busy_ms", "idle_ms", "phases_ms", "comm_ms", "comm_exposed_ms")},
        **{
            name: s[name]
            for name in ("launches_per_step", "syncs_per_step", "h2d_bytes", "d2h_bytes", "steps", "activity")
        },
        "parts": found.parts.to_dict("records"),
        "ops": found.ops.head(OPERATORS)[["op", "calls", "self_ms"]].to_dict("records"),
        "other_ops_ms": float(found.ops["self_ms"].iloc[OPERATORS:].sum()),
        "kernels": found.kernels.head(OPERATORS)[["kernel", "calls", "self_ms"]].to_dict("records"),
        "lost": found.lost[["cause", "ms_per_step"]].to_dict("records"),
    }


# -- beside a plan


def _planned(session: Session, gpu: Gpu | None) -> dict[str, Any]:
    """Plan the session as it is; {} with a reason where it cannot be planned."""
    try:
        return _of_plan(plan(session, gpu=gpu))
    except (ValueError, TypeError) as error:
        return {"why": str(error)}


def planned_of(setting: Setting, config: Any, device: str, gpu: Gpu | None) -> dict[str, Any]:
    """Plan a setting from a configuration, for a model that is not there."""
    if config is None:
        return {"why": "the model's configuration is not known"}
    batch = setting.batch if isinstance(setting.batch, int) else 1
    try:
        return _of_plan(
            plan(
                config,
                gpu=gpu if gpu is not None else "cpu" if device == "cpu" else None,
                gpus=setting.gpus,
                zero=setting.zero,
                recipe=setting.full_recipe,
                batch=batch,
                length=setting.length,
                accumulate=setting.accumulate,
                recompute=setting.recompute,
                fusion=setting.fusion,
                optimizer=setting.optimizer if isinstance(setting.optimizer, str) else None,
                offload_weights=setting.offload_weights or None,
                offload_activations=setting.offload_activations or None,
            )
        )
    except (ValueError, TypeError) as error:
        return {"why": str(error)}


def _of_plan(found: Any) -> dict[str, Any]:
    terms = {term.name: term.bytes for term in found.memory.terms if term.counted and term.name != "slack"}
    estimate = found.estimate
    return {
        "peak": found.memory.peak_gib * 2**30,
        "phase": found.memory.peak_phase,
        "terms": terms,
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
