"""Describe a session's run in plain values: for panels, run.json and the summary."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from surokit import convert
from surokit.recipe import Recipe
from surokit.runs.status import RunInfo

if TYPE_CHECKING:
    from surokit.train.session import Session


class Light(NamedTuple):
    """A Light holds what a token costs and what the device could do; None where nobody knows, and `peak` says why."""

    flops_per_token: float | None
    peak_tflops: float | None
    peak: str


def describe(session: Session, total: int | None, started: float, light: Light, resumes: bool) -> RunInfo:
    """Return the RunInfo of a session. total: the step that the run is planned to end at. started: seconds since 1970. resumes:
    the next run() goes on from its end."""
    recipe = session.recipe
    return RunInfo(
        title=title_of(session),
        recipe="; ".join(filter(None, (str(recipe) if recipe else "", session.decoded))),
        numerics=session.numerics,
        model=type(session.model).__name__,
        device=device_name(session.device),
        gpus=gpus_in(session),
        total=total,
        tokens_per_step=session.tokens_per_step,
        flops_per_token=light.flops_per_token,
        peak_tflops=light.peak_tflops,
        peak=light.peak,
        flops=FLOPS if light.flops_per_token else "",
        usd_per_gpu_hour=session.usd_per_gpu_hour,
        resumes=resumes,
        run_dir=None if session.run_dir is None else str(session.run_dir),
        pid=os.getpid(),
        host=socket.gethostname(),
        started=started,
        ran_s=ran_s(session),
    )


def ran_s(session: Session) -> float:
    """Return the wall time of a session's run so far: that of run(), or of its steps if that is more, and of steps taken again."""
    return max(session.run_s, session.step_s) + session.redone_s


def title_of(session: Session) -> str:
    """Return the recipe's name, or the model's class."""
    return session.recipe.name if session.recipe else type(session.model).__name__


def numerics_of(recipe: Recipe | None, device: torch.device) -> str:
    """Return "native", or what of a recipe is emulated on the device and why; "" for bf16 and without one."""
    return "" if recipe is None or not recipe.quantized else convert.emulation(recipe, device) or "native"


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def gpus_in(session: Session) -> int:
    """Return how many GPUs take the tokens that a session counts; 0 on a CPU. Where processes are connected in another way than by
    parallel=, each counts its own."""
    return 0 if session.device.type == "cpu" else session.processes.world


def world_size() -> int:
    """Return how many processes train together with this one, itself included, whoever connected them."""
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if together else 1


def gpus_of(device: torch.device, told: int | None = None) -> int:
    """Return how many GPUs work on a run that this process is part of: as `told`, else one a process; 0 on a CPU."""
    return 0 if device.type == "cpu" else told or world_size()


FLOPS = (
    "6 FLOPs a weight and token, fewer where weights are frozen below adapters or stored quantized (frozen by hand they count "
    "as if they trained), plus causal attention; recompute does not count"
)


def light_of(session: Session) -> Light:
    """Return the model's FLOPs a token at the mean length so far, and the device's bf16 peak, whatever the recipe."""
    return _light(session.model, session.device, session.lengths.mean)


def _light(model: Any, device: torch.device, length: int | None) -> Light:
    """Return a model's FLOPs a token in rows of `length` tokens, by the convention FLOPS and with the adapters that it has, and the
    device's bf16 peak."""
    if device.type != "cuda":
        return Light(None, None, f"no peak rate is known for {device.type}")
    from surokit.planner import count_flops, find_gpu, read_shape
    from surokit.planner.inputs.introspect import read_own

    try:
        tflops, name = find_gpu(device_name(device)).peak()
        shape, _ = read_shape(model)
        recipe = read_own(model).arguments.get("recipe")
    except (ValueError, TypeError, FileNotFoundError) as error:
        return Light(None, None, str(error))
    if tflops is None:
        return Light(None, None, f"nobody vouched for a peak of {name}")
    flops = count_flops(shape, length=length, recipe=recipe).model
    return Light(float(flops), float(tflops), name)


def light_of_foreign(model: Any, device: torch.device, length: int | None) -> Light:
    """Return the Light of a model in a loop that is not ours; one that cannot be described has none."""
    found = Light(None, None, "the model's work is not known")
    for part in (model, *model.children()):  # a LightningModule holds the model that has a shape
        try:
            found = _light(part, device, length)
        except Exception as error:
            found = Light(None, None, f"the model's work is not known ({type(error).__name__}: {error})")
        if found.flops_per_token is not None:
            break
    return found


def plan_arguments(session: Session) -> dict[str, Any]:
    """Return the arguments of `surokit.plan` that a session knows; batch and length come from its last step, or from its data
    before there is one."""
    found: dict[str, Any] = {"optimizer": session.optimizer, "accumulate": session.accumulate}
    if session.graphs.state in ("on", "waiting"):
        found["graphs"] = True
    processes = session.processes
    if processes.are_several:
        # of copies that are divided, one: what each GPU holds is right, and the exchange between copies is left out
        divided = processes.layout.is_sharded
        found |= {"gpus": processes.layout.shard if divided else processes.world, "zero": processes.layout.zero}
    if session.length and len(session.records):
        sequences, rest = divmod(session.records[-1].tokens, session.length * session.data.a_step)
        return found if rest or not sequences else found | {"batch": sequences, "length": session.length}
    return found | batch_sizes(session.data.source)


def batch_sizes(source: Any) -> dict[str, int]:
    """Return rows and length of a source's batches, by its attributes or its first batch; an empty dict where it tells neither."""
    batch, length = getattr(source, "batch", None), getattr(source, "length", None)
    if isinstance(source, Sequence) and len(source) and isinstance(source[0], Mapping):
        sizes: Any = getattr(source[0].get("input_ids"), "shape", ())
        batch, length = sizes if len(sizes) == 2 else (None, None)
    return {"batch": batch, "length": length} if isinstance(batch, int) and isinstance(length, int) else {}
