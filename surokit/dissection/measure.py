"""Measure one cell, in a process of its own, or in every one of several that train together; the first returns the values of a
Cell.

Steps are timed without the profiler; after them one is listened to for its memory, and a few are profiled.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from surokit.dissection import memory as memories
from surokit.dissection.foreign import Foreign
from surokit.dissection.generating import Generating
from surokit.dissection.job import Job, Source, machine_of
from surokit.dissection.planned import planned_of, why_not
from surokit.dissection.training import Training
from surokit.dissection.work import Work
from surokit.models.config import DecoderConfig
from surokit.places import find_device
from surokit.ranks import rank_here

GROWTH = 2
FINENESS = 8  # the search for the largest batch ends within an eighth of it


def measure(job: Job) -> dict[str, Any] | None:
    """Measure a cell and return the fields of a Cell; None in all processes but the first.

    MemoryError in one of several processes that does not fit, with the words of the cell: the others wait for it, and have to end
    with it.
    """
    began = time.monotonic()
    device = device_of(job)
    gib = memories.room_gib(device, job.gib, job.setting.gpus)
    found: dict[str, Any] = {"machine": machine_of(device), "memory": {"limit_gib": gib}}
    run: Work | None = None
    try:
        with memories.limited(device, gib):
            run = _run_of(job, device)
            found["work"] = run.facts()
            took = run.steps()
        found |= {**took, "work": {**found["work"], **took.get("work", {})}}
        if not job.only_timed:
            observed = run.observe()
            found |= {**observed, "memory": {**found["memory"], **observed["memory"]}}
    except Exception as error:
        if not memories.is_out_of_memory(error):
            raise
        config = config_of(job.source) or getattr(getattr(run, "model", None), "config", None)
        planned = planned_of(job.setting, config, device.type, job.gpu, job.what)
        reached = "while the model was made" if run is None else "in a step"
        why = why_not(planned, gib, reached)
        if job.setting.gpus > 1:
            raise MemoryError(why) from error
        found |= {"state": "does not fit", "planned": planned, "why": why}
    else:
        found["state"] = "measured"
    found["seconds"] = time.monotonic() - began
    return found if rank_here().is_first else None


def attempt(job: Job) -> bool:
    """Take one step, and return True; MemoryError where it does not fit."""
    device = device_of(job)
    try:
        with memories.limited(device, memories.room_gib(device, job.gib, job.setting.gpus)):
            run = _run_of(job, device)
            run.attempt(run.batch)
    except Exception as error:
        if not memories.is_out_of_memory(error):
            raise
        raise MemoryError(str(error)) from error
    return True


def search(job: Job) -> int:
    """Return the largest batch that fits into one process, 0 where not one sequence does."""
    device = device_of(job)
    gib = memories.room_gib(device, job.gib)
    memories.in_pieces(device)
    try:
        with memories.limited(device, gib):
            run = _run_of(replace(job, setting=replace(job.setting, batch=1)), device)
            return largest(run.fits, run.planned_batch(gib))
    except Exception as error:
        if not memories.is_out_of_memory(error):
            raise
        return 0


def device_of(job: Job) -> torch.device:
    """Return the device of this process, a GPU with its number, which some of torch's functions ask for."""
    device = find_device(job.device, "dissect")
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device


def _run_of(job: Job, device: torch.device) -> Work:
    if job.what == "infer":
        return Generating(job, device)
    return Training(job, device) if job.setting.engine == "surokit" else Foreign(job, device)


def config_of(source: Source) -> Any:
    """Return what a plan can read of a model that is not there: its configuration, or the folder; None where there is none."""
    return source if isinstance(source, DecoderConfig | str | Path) else getattr(source, "config", None)


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
