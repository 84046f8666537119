"""Measure one cell after the other, each in processes of its own, in a folder that a second call goes on from."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from surokit.calibration import kept
from surokit.dissection import memory as memories
from surokit.dissection.cell import Cell, State
from surokit.dissection.dissection import CELLS, FORMAT, HEAD, PROFILES, Dissection
from surokit.dissection.effect import switches_of
from surokit.dissection.job import Job, Source, Tokens, machine_of
from surokit.dissection.measure import config_of, measure, search
from surokit.dissection.planned import planned_of, why_not
from surokit.dissection.settings import BASELINE, LARGEST, RANK, Asked, Setting, What, grid
from surokit.environment import cores_in_use, environment
from surokit.launching.call import packed
from surokit.launching.launch import Launch, check_outside
from surokit.launching.outcome import LaunchError
from surokit.models.config import DecoderConfig
from surokit.places import find_device, make_folder, write_whole
from surokit.racing.comparability import digest_of
from surokit.units import counted, elapsed

LIMIT_S = 600.0
TRIES = 6  # of the largest batch, each three quarters of the one before
DEFAULT_OVER: Mapping[What, Mapping[str, Any]] = {
    "train": {"fusion": ("none", "fused"), "recompute": ("none", "full"), "optimizer": ("adamw", "adamw8bit")},
    "infer": {"recipe": ("bf16", "fp8", "qfp8", "qnf4"), "attention": ("math", "flash")},
    "tune": {"recipe": ("bf16", "qfp8", "qnf4"), "fusion": ("none", "fused"), "recompute": ("none", "full")},
}


def dissect(
    model: Source | Mapping[str, Source],
    batch: Any,
    *,
    what: What = "train",
    over: Mapping[str, Any] | None = None,
    together: bool | Literal["all"] = True,
    steps: int = 10,
    folder: str | Path | None = None,
    limit_s: float = LIMIT_S,
    gib: float | None = None,
    lr: float = 3e-4,
    seed: int = 0,
    device: str | None = None,
) -> Dissection:
    """Measure a training step with each optimization switched on alone, and with all together.

    model: a DecoderConfig or a config.json (random weights in bfloat16), a folder that `surokit.load` reads, a module on the CPU,
        or a function that makes one. Every cell builds it anew in a process of its own, with the same seed. Several sizes are a
        dict of names and models, which is the switch "model".
    batch: (sequences, tokens) draws random token ids; or batches {"input_ids": int64 [B, T], "labels": int64 [B, T]}, one or
        several, whose tokens all cells read in the same order, whatever their own batch and length.
    what: "train" trains all weights, "tune" an adapter of rank 16 (over={"lora": ...} says otherwise).
    over: switch -> values, the first being the baseline's; surokit.dissection.settings.Setting has the switches.
    together: whether a cell has every switch at its last value; "all" measures every combination.
    steps: that are timed in each cell, after 2 of warm-up; a few more are measured for memory and profiled.
    folder: keeps the cells; a second call with the same folder measures what is missing. It returns all cells of the folder.
    limit_s: seconds of a cell, beyond which it is ended. gib: memory that a cell may take; the device's without it.
    lr: learning rate of optimizers that are given by name.

    An interrupt ends the cell that is being measured, and returns those that were measured before. A cell that does not fit,
    fails or takes too long is a row with its reason; RuntimeError where the baseline fails. ValueError or TypeError, before
    anything is measured, for a switch or value that is not known, settings that contradict each other, and a folder of another
    model, data or machine.
    """
    check_outside("dissect")
    _check(what, steps, limit_s, gib)
    tokens, rows, length = read_batch(batch, seed)
    base = Setting(batch=rows, length=length, lora=RANK if what == "tune" else 0)
    sizes: Mapping[str, Source] = model if isinstance(model, Mapping) else {"": model}
    named = {"model": tuple(sizes)} if isinstance(model, Mapping) else {}
    cells = grid({**named, **(DEFAULT_OVER[what] if over is None else over)}, what, base, together)
    if strange := next((asked.setting.model for asked in cells if asked.setting.model not in sizes), None):
        raise ValueError(
            f"dissect(over={{'model': {strange!r}}}): give the models as a dict of names, with one of that name."
        )
    where = find_device(device, "dissect")
    head = _head(sizes, tokens, (rows, length), what, steps, lr, seed, where)
    found = Dissection([], head)
    place = None if folder is None else Path(folder)
    if place is not None:
        found = _opened(place, head)
    left = _left(cells, found, place, memories.room_gib(where, gib))
    if len(left) < len(cells):
        print(
            f"surokit: {counted(len(cells) - len(left), 'cell')} of {len(cells)} measured before, in {place}",
            file=sys.stderr,
        )
    rates = kept(where)
    began = time.monotonic()
    for spent, asked in enumerate(left):
        _say(asked.name, len(cells) - len(left) + spent + 1, len(cells), began, spent)
        used = 0.0 if where.type == "cuda" else cores_in_use()
        if asked.refused:
            cell: Cell | None = Cell(asked.name, "refused", asked.setting.labels(), asked.refused, head["machine"])
        else:
            source, profile = sizes[asked.setting.model], _profile_file(place, asked.name)
            job = Job(asked.setting, source, tokens, steps, seed, lr, gib, device, rates, profile, what)
            cell = _cell(asked.name, job, limit_s, where)
        if cell is None:
            print("surokit: interrupted; cells that were measured are kept", file=sys.stderr)
            break
        if cell.state == "failed" and cell.name == BASELINE:
            raise RuntimeError(f"dissect(): the baseline failed, so there is nothing to compare with: {cell.why}")
        cell = replace(cell, cores_in_use=round(used, 2))
        found = found.with_cell(cell)
        if place is not None:
            _keep(cell, place)
    if not found.cells:
        raise KeyboardInterrupt
    return found.in_order([asked.name for asked in cells])


def _check(what: Any, steps: Any, limit_s: Any, gib: Any) -> None:
    if what not in DEFAULT_OVER:
        raise ValueError(f"dissect(what={what!r}): {', '.join(map(repr, DEFAULT_OVER))} are known.")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(
            f"dissect(steps={steps!r}): a whole number of steps that are timed, at least 1; 5 give an interval."
        )
    for name, value in (("limit_s", limit_s), ("gib", gib)):
        if value is not None and not value > 0:
            raise ValueError(f"dissect({name}={value!r}): a number above 0.")


def read_batch(batch: Any, seed: int) -> tuple[Tokens, int, int]:
    """Return the tokens that all cells read, and the rows and length of the first batch. TypeError or ValueError for others."""
    if isinstance(batch, tuple) and len(batch) == 2 and all(isinstance(n, int) and n > 0 for n in batch):
        return Tokens(seed=seed), batch[0], batch[1]
    batches: Sequence[Any] = (
        [batch] if isinstance(batch, Mapping) else list(batch) if isinstance(batch, Iterable) else []
    )
    if not batches or not all(isinstance(one, Mapping) and isinstance(one.get("input_ids"), Tensor) for one in batches):
        raise TypeError(
            "dissect(batch): give (sequences, tokens), such as (2, 350), or batches {'input_ids': int64 [B, T], 'labels': int64 "
            "[B, T]}."
        )
    ids = [one["input_ids"] for one in batches]
    labels = [one.get("labels", one["input_ids"]) for one in batches]
    if any(one.ndim != 2 or one.shape != other.shape or not one.numel() for one, other in zip(ids, labels)):
        raise ValueError("dissect(batch): input_ids and labels are [B, T], both of one shape, with one token or more.")
    together = [torch.cat([one.flatten().cpu().long() for one in each]) for each in (ids, labels)]
    return Tokens(together[0], together[1], seed), ids[0].shape[0], ids[0].shape[1]


def file_name(name: str) -> str:
    """Return the file's name of a cell: its own, with what a file system may refuse replaced, and a digest where it is long."""
    plain = re.sub(r"[^\w.=+-]+", "-", name).strip("-.") or "cell"
    return (
        plain if plain == name and len(plain) < 80 else f"{plain[:80]}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
    )


def _profile_file(place: Path | None, name: str) -> str | None:
    return None if place is None else str((place / PROFILES / f"{file_name(name)}.json.gz").resolve())


# -- the folder


def _head(
    sizes: Mapping[str, Source],
    tokens: Tokens,
    shape: tuple[int, int],
    what: What,
    steps: int,
    lr: float,
    seed: int,
    device: torch.device,
) -> dict[str, Any]:
    """Return what all cells of a folder share, and what says whether another call asks for the same."""
    data = "random tokens" if tokens.ids is None else digest_of([tokens.ids])
    machine = machine_of(device)
    return {
        "format": FORMAT,
        "what": what,
        "model": ", ".join(f"{name}: " * bool(name) + described(model) for name, model in sizes.items()),
        "data": data,
        "batch": list(shape),
        "steps": steps,
        "lr": lr,
        "seed": seed,
        "machine": machine,
        "environment": environment(),
    }


_ASKED = {
    "what": "another kind of work",
    "model": "another model",
    "data": "other data",
    "steps": "another number of steps",
}
_ASKED |= {"lr": "another learning rate", "seed": "another seed", "machine": "another machine"}


def described(model: Source) -> str:
    """Describe a model in a line, the same for the same shape or source."""
    if isinstance(model, DecoderConfig):
        return str(model)
    if isinstance(model, str | Path):
        return str(Path(model).resolve() if Path(model).exists() else model)
    if isinstance(model, nn.Module):
        return f"{type(model).__name__} {digest_of(model.parameters())}"
    if callable(model):
        return f"{getattr(model, '__module__', '')}.{getattr(model, '__qualname__', repr(type(model).__name__))}"
    raise TypeError(
        f"dissect(model) takes a surokit.DecoderConfig, a folder, a torch.nn.Module or a function that makes one, not {model!r}."
    )


def _opened(place: Path, head: Mapping[str, Any]) -> Dissection:
    """Return what the folder holds, made where it is not there. ValueError for a folder of something else."""
    if not (place / HEAD).exists():
        if place.exists() and any(place.iterdir()):
            raise ValueError(f"dissect(folder={str(place)!r}): the folder holds something else; give a new one.")
        for name in (CELLS, PROFILES):
            make_folder(place / name, "the cells of a dissection")
        write_whole(place / HEAD, json.dumps(head, indent=1))
    found = Dissection.load(place)
    for name, words in _ASKED.items():
        if found.head.get(name) != head[name]:
            raise ValueError(
                f"dissect(folder={str(place)!r}): the folder is of {words}, {found.head.get(name)}, and this is {head[name]}: give "
                "another folder; add() puts both in one table."
            )
    return found


def _keep(cell: Cell, place: Path) -> None:
    try:
        cell.save(place / CELLS / f"{file_name(cell.name)}.json")
    except OSError as error:
        raise OSError(
            error.errno,
            f"dissect(folder={str(place)!r}): the cell {cell.name!r} could not be written ({error.strerror}); cells that were "
            "written are kept, so make room and call again",
        ) from error


def _left(cells: Sequence[Asked], found: Dissection, place: Path | None, gib: float | None) -> list[Asked]:
    """Return the cells that are not there yet, that failed, or that did not fit into less memory than there is now.

    ValueError where one of the same name had another setting.
    """
    there = {cell.name: cell for cell in found.cells}
    left = []
    for asked in cells:
        cell = there.get(asked.name)
        less = cell is not None and cell.state == "does not fit" and cell.memory.get("limit_gib") != gib
        if cell is None or less or cell.state in ("failed", "late"):
            left.append(asked)
        if cell is not None and switches_of(cell) != asked.setting.labels():
            raise ValueError(
                f"dissect(folder={str(place)!r}): the folder has a cell {asked.name!r} with other settings, so its baseline is "
                "another: give another folder."
            )
    return left


# -- a cell


def _cell(name: str, job: Job, limit_s: float, device: torch.device) -> Cell | None:
    """Measure a cell in processes of its own; None where it was interrupted. What goes wrong is the cell's reason."""
    began = time.monotonic()
    labels = job.setting.labels()

    def ended(state: State, why: str, **more: Any) -> Cell:
        return Cell(name, state, labels, why, machine_of(device), seconds=time.monotonic() - began, **more)

    try:
        found = _with_largest(job, limit_s) if job.setting.batch == LARGEST else launched(measured, job, limit_s)
    except KeyboardInterrupt:
        return None
    except TimeoutError as error:
        return ended("late", str(error))
    except LaunchError as error:
        if error.kind == "killed":
            planned = planned_of(job.setting, config_of(job.source), device.type, job.gpu, job.what)
            room = memories.room_gib(device, job.gib)
            why = why_not(planned, room, "and the system ended the process")
            return ended("does not fit", why, planned=planned, memory={"limit_gib": room})
        return ended("late" if error.kind == "hung" else "failed", str(error).splitlines()[0])
    return None if found is None else Cell.of({**found, "name": name, "setting": labels})


def _with_largest(job: Job, limit_s: float) -> dict[str, Any] | None:
    """Search for the largest batch in one process, and measure it in another, whose memory is not in pieces yet."""
    batch = launched(searched, job, limit_s)
    if batch is None:
        return None
    found = None
    for _ in range(TRIES):
        found = launched(measured, replace(job, setting=replace(job.setting, batch=max(1, batch))), limit_s)
        if batch < 2 or found is None or found["state"] != "does not fit":
            break
        batch = 3 * batch // 4  # it fitted by a little only, before memory was in pieces
    return found


def launched(function: Callable[[Job], Any], job: Job, limit_s: float) -> Any:
    """Call a function of the job in its processes; None where somebody stopped it, TimeoutError beyond the limit."""
    n = job.setting.processes
    call = packed(function, (job,), {})  # before there is a folder that its failing would leave
    running = Launch(n, 0, limit_s, "none", show=False)
    late = threading.Event()

    def end() -> None:
        late.set()
        running.kill()

    ender = threading.Timer(limit_s, end)
    ender.daemon = True
    try:
        running.start(call, threads=max(1, (os.cpu_count() or 1) // n))
        ender.start()
        found = running.wait()
    except RuntimeError:
        if late.is_set():
            raise TimeoutError(
                f"The cell took longer than {limit_s:g} s: raise limit_s, or give it less work."
            ) from None
        raise
    finally:
        ender.cancel()
    return None if running.was_stopped else found


def measured(job: Job) -> dict[str, Any] | None:
    memories.die_first()
    return measure(job)


def searched(job: Job) -> int:
    memories.die_first()
    return search(job)


def _say(name: str, number: int, count: int, began: float, spent: int) -> None:
    """Show which cell is measured, and how long the rest takes at the pace so far."""
    about = ""
    if spent:
        rest = (time.monotonic() - began) / spent * (count - number + 1)
        about = f", about {elapsed(rest)} left"
    print(f"surokit: cell {number} of {count}: {name}{about}", file=sys.stderr, flush=True)


__all__ = ["dissect"]
