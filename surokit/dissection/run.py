"""Measure one cell after the other, each in processes of its own, in a folder that a second call goes on from."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from surokit.calibration import kept
from surokit.dissection import memory as memories
from surokit.dissection.cell import FORMAT, Cell
from surokit.dissection.dissection import CELLS, HEAD, PROFILES, Dissection
from surokit.dissection.job import Job, Source, Tokens, machine_of
from surokit.dissection.measure import attempt, config_of, largest, measure, search
from surokit.dissection.planned import planned_of, why_not
from surokit.dissection.settings import BASELINE, LARGEST, RANK, Asked, Setting, What, grid
from surokit.environment import cores_in_use, environment
from surokit.launching.call import packed
from surokit.launching.launch import Launch, check_outside
from surokit.launching.outcome import LaunchError
from surokit.models.config import DecoderConfig
from surokit.places import check_new, find_device, make_folder, write_whole
from surokit.racing.comparability import digest_of
from surokit.statistics import ROUNDS
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
    rounds: int = ROUNDS,
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
        several, whose tokens all cells read as one stream in the same order, cut into rows of their own batch and length.
    what: "train" trains all weights, "tune" an adapter of rank 16 (over={"lora": ...} says otherwise).
    over: switch -> values, the first being the baseline's; surokit.dissection.settings.Setting has the switches.
    together: whether a cell has every switch at its last value; "all" measures every combination.
    steps: that are timed in each cell and round, after 3 of warm-up: choose a multiple of 4 where ZenFlow is among them; in the
        first round a few more are measured for memory and profiled.
    rounds: how often all cells are measured, in turn: what a machine does at one time and not at another is in the interval then,
        and there is none with fewer than 5.
    folder: keeps the cells; a second call with the same folder measures what is missing. It returns all cells of the folder.
    limit_s: seconds of a cell in a round, beyond which it is ended. gib: memory that a cell may take, of each GPU, or of the
        processor's by all processes of the cell; the device's without it.
    lr: learning rate of optimizers that are given by name.

    A cell of zero=2 or 3 is compared with copies on as many GPUs: where `over` names no gpus, all cells take those of the machine,
    two processes where it has fewer.

    An interrupt ends the cell that is being measured, and returns those that were measured before. A cell that does not fit,
    fails or takes too long is a row with its reason; RuntimeError where the baseline fails. ValueError or TypeError, before
    anything is measured, for a switch or value that is not known, settings that contradict each other, and a folder of another
    model, data or machine.
    """
    check_outside("dissect")
    _check(what, steps, rounds, limit_s, gib)
    where = find_device(device, "dissect")
    tokens, rows, length = read_batch(batch, seed)
    sizes: Mapping[str, Source] = model if isinstance(model, Mapping) else {"": model}
    named = {"model": tuple(sizes)} if isinstance(model, Mapping) else {}
    cells = cells_of({**named, **(DEFAULT_OVER[what] if over is None else over)}, what, rows, length, where, together)
    if strange := next((asked.setting.model for asked in cells if asked.setting.model not in sizes), None):
        raise ValueError(
            f"dissect(over={{'model': {strange!r}}}): give the models as a dict of names, with one of that name."
        )
    head = _head(sizes, tokens, (rows, length), what, steps, lr, seed, where, cells[0].setting.labels())
    order = [asked.name for asked in cells]
    place = None if folder is None else Path(folder)
    found = Dissection([], {**head, "order": order}) if place is None else _opened(place, head, order)
    there = {
        cell.name: replace(cell, why="" if cell.is_measured else cell.why)  # a round that failed is tried again
        for cell in found.cells
        if not _is_stale(cell, memories.room_gib(where, gib, cell.gpus))
    }
    left = sum(_rounds_left(there.get(asked.name), rounds) for asked in cells)
    if before := sum(asked.name in there for asked in cells):
        print(f"surokit: {counted(before, 'cell')} of {len(cells)} measured before, in {place}", file=sys.stderr)
    rates, call = kept(where), datetime.now(UTC).isoformat(timespec="seconds")
    pace = _Pace(left)
    for number, asked in _turns(cells, there, rounds):
        pace.say(asked.name, number, rounds)
        cell: Cell | None = there.get(asked.name)
        if asked.refused:
            new: Cell | None = Cell(asked.name, "refused", asked.setting.labels(), asked.refused, head["machine"])
        else:
            source, profile = sizes[asked.setting.model], _profile_file(place, asked.name)
            job = Job(asked.setting, source, tokens, steps, seed, lr, gib, device, rates, profile, what)
            job = replace(job, only_timed=cell is not None)
            new = _cell(asked.name, job, limit_s, where, cell)
        if new is None:
            print("surokit: interrupted; cells that were measured are kept", file=sys.stderr)
            break
        if new.state == "failed" and new.name == BASELINE and cell is None:
            raise RuntimeError(f"dissect(): the baseline failed, so there is nothing to compare with: {new.why}")
        _check_weights(new, there.get(BASELINE))
        new = replace(new, calls=(call,) * len(new.step_ms))
        there[asked.name] = new = new if cell is None else cell.with_round(new)
        pace.done(_rounds_left(cell, rounds) - _rounds_left(new, rounds))
        if place is not None:
            _keep(new, place)
    if not there:
        raise KeyboardInterrupt
    cells_of_folder = {cell.name: cell for cell in found.cells} | there
    return Dissection(cells_of_folder.values(), found.head).in_order(found.head["order"])


def cells_of(
    over: Mapping[str, Any],
    what: What,
    batch: int = 1,
    length: int = 0,
    device: torch.device | None = None,
    together: bool | Literal["all"] = True,
) -> list[Asked]:
    """Return the cells of a grid on a device, the CPU where none is given. ValueError for what cannot be."""
    device = torch.device("cpu") if device is None else device
    stages, gpus = over.get("zero", 0), 1
    if any(stages if isinstance(stages, Iterable) and not isinstance(stages, str) else (stages,)):
        # the copies that it is compared with are as many
        if "gpus" not in over:
            gpus = max(2, torch.cuda.device_count() if device.type == "cuda" else 0)
        elif isinstance(over["gpus"], int):
            over = {**over, "gpus": (over["gpus"],)}
    base = Setting(batch=batch, length=length, lora=RANK if what == "tune" else 0, gpus=gpus)
    cells = grid(over, what, base, together)
    _check_device([asked.setting for asked in cells], device)
    return cells


def _check_device(settings: Iterable[Setting], device: torch.device) -> None:
    """Raise ValueError for a GPU with a number, where cells take several or the engine takes the first one."""
    number: int | None = device.index
    for s in settings if number is not None else ():
        if s.gpus > 1:
            raise ValueError(
                f"dissect(device='{device}'): that is one GPU, and cells with gpus > 1 take several: give 'cuda'."
            )
        if number and s.engine in ("trainer", "deepspeed"):
            raise ValueError(
                f"dissect(device='{device}'): engine={s.engine} trains on the first GPU that it sees: give 'cuda', and choose the "
                f"GPU by CUDA_VISIBLE_DEVICES={number}."
            )


def _turns(cells: Sequence[Asked], there: Mapping[str, Cell], rounds: int) -> Iterator[tuple[int, Asked]]:
    """Yield the number of a round and a cell that lacks it, every other round from the last to the first: what changes steadily
    meets all cells alike."""
    for number in range(rounds):
        for asked in cells[:: -1 if number % 2 else 1]:
            cell = there.get(asked.name)
            if cell is None or (_rounds_left(cell, rounds) and len(cell.step_ms) <= number):
                yield number, asked


def _rounds_left(cell: Cell | None, rounds: int) -> int:
    """Return how often a cell is still to be measured."""
    if cell is None:
        return rounds
    return max(0, rounds - len(cell.step_ms)) if cell.is_measured and not cell.why else 0


def _check_weights(cell: Cell, base: Cell | None) -> None:
    """Raise ValueError for a cell that started from other weights than the baseline, which is another model of the same name."""
    given = [
        one.work.get("weights")
        for one in (cell, base)
        if one is not None and one.setting.get("model") == cell.setting["model"]
    ]
    if len(set(given) - {None}) > 1:
        raise ValueError(
            f"dissect(): the cell {cell.name!r} started from other weights than the baseline: give a function that makes the same "
            "model each time, and another folder for another model."
        )


def _check(what: Any, steps: Any, rounds: Any, limit_s: Any, gib: Any) -> None:
    if what not in DEFAULT_OVER:
        raise ValueError(f"dissect(what={what!r}): {', '.join(map(repr, DEFAULT_OVER))} are known.")
    for name, value in (("steps", steps), ("rounds", rounds)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"dissect({name}={value!r}): a whole number of {name}, at least 1.")
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
    if other := next((name for one in batches for name in one if name not in ("input_ids", "labels")), None):
        raise ValueError(
            f"dissect(batch): cells cut the tokens into rows of their own, so they cannot take {other!r}: give input_ids and "
            "labels."
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
    baseline: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what all cells of a folder share, and what says whether another call asks for the same."""
    data = (
        "random tokens" if tokens.ids is None else digest_of([t for t in (tokens.ids, tokens.labels) if t is not None])
    )
    machine, here = machine_of(device), environment()
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
        "baseline": dict(baseline),
        "versions": ", ".join(f"{name} {here[name]}" for name in _VERSIONS),
        "environment": here,
    }


_ASKED = {
    "what": "another kind of work",
    "model": "another model",
    "data": "other data",
    "steps": "another number of steps",
}
_ASKED |= {
    "lr": "another learning rate",
    "seed": "another seed",
    "machine": "another machine",
    "baseline": "another baseline",
}
_ASKED |= {"versions": "other versions"}
_VERSIONS = ("surokit", "torch", "triton", "cuda")


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


def _opened(place: Path, head: Mapping[str, Any], order: Sequence[str]) -> Dissection:
    """Return what the folder holds, made where it is not there; its head gets the cells of this call. ValueError for a folder of
    something else."""
    if not (place / HEAD).exists():
        check_new(place, "dissect")
        for name in (CELLS, PROFILES):
            make_folder(place / name, "the cells of a dissection")
        write_whole(place / HEAD, json.dumps({**head, "order": list(order)}, indent=1))
    found = Dissection.load(place)
    for name, words in _ASKED.items():
        if found.head.get(name) != head[name]:
            raise ValueError(
                f"dissect(folder={str(place)!r}): the folder is of {words}, {found.head.get(name)}, and this is {head[name]}: give "
                "another folder; add() puts both in one table."
            )
    found.head["order"] = list(dict.fromkeys([*found.head["order"], *order]))
    write_whole(place / HEAD, json.dumps(found.head, indent=1))
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


def _is_stale(cell: Cell, gib: float | None) -> bool:
    """Return whether a cell is to be measured anew: it failed, or with as much memory as there is now it might be another."""
    if cell.state in ("failed", "late"):
        return True
    before = cell.memory.get("limit_gib")
    if cell.setting.get("batch") == LARGEST:
        return bool(before != gib)
    return cell.state == "does not fit" and before is not None and (gib is None or gib > before)


# -- a cell


def _cell(name: str, job: Job, limit_s: float, device: torch.device, before: Cell | None) -> Cell | None:
    """Measure a cell in processes of its own; None where it was interrupted. What goes wrong is the cell's reason.

    before: the same cell of earlier rounds, whose batch is the one that was found to be the largest.
    """
    began, setting = time.monotonic(), job.setting
    labels, used = setting.labels(), _used(device)
    try:
        if setting.batch != LARGEST:
            found = _outcome(job, limit_s, device)
        elif before is not None:
            found = _outcome(_of_batch(job, before.work["batch"]), limit_s, device)
        else:
            found = _with_largest(job, began + limit_s, device)
    except KeyboardInterrupt:
        return None
    except LaunchError as error:
        found = _ended(error, job, device)
    except TimeoutError:
        why = f"It took longer than {limit_s:g} s: raise limit_s, or give it less work."
        found = {"state": "late", "why": why, "machine": machine_of(device)}
    seconds, busy = time.monotonic() - began, round(max(used, _used(device)), 2)
    return Cell.of({**found, "name": name, "setting": labels, "seconds": seconds, "cores_in_use": busy})


def _used(device: torch.device) -> float:
    return 0.0 if device.type == "cuda" else cores_in_use()


def _outcome(job: Job, limit_s: float, device: torch.device) -> dict[str, Any]:
    """Return the fields of a Cell: what its processes measured, or what went wrong in them."""
    try:
        found: dict[str, Any] = launched(measured, job, limit_s)
        return found
    except LaunchError as error:
        return _ended(error, job, device)


def _ended(error: LaunchError, job: Job, device: torch.device) -> dict[str, Any]:
    """Return the fields of a Cell whose processes an error ended."""
    room, why = memories.room_gib(device, job.gib, job.setting.gpus), str(error).splitlines()[0]
    if not _ran_out(error):
        return {"state": "late" if error.kind == "hung" else "failed", "machine": machine_of(device), "why": why}
    planned = planned_of(job.setting, config_of(job.source), device.type, job.gpu, job.what)
    if error.kind == "killed":
        why = why_not(planned, room, "and the system ended the process")
    else:
        why = why.partition(_RAN_OUT)[2]
    none = {"state": "does not fit", "machine": machine_of(device), "memory": {"limit_gib": room}}
    return {**none, "planned": planned, "why": why}


_RAN_OUT = "failed with MemoryError: "


def _ran_out(error: LaunchError) -> bool:
    """Return whether a process ended for lack of memory: it said so, or the system ended it."""
    line = str(error).splitlines()[0]
    return (error.kind == "killed" and "SIGKILL" in line) or _RAN_OUT in line


def _of_batch(job: Job, batch: int) -> Job:
    return replace(job, setting=replace(job.setting, batch=batch))


def _with_largest(job: Job, deadline: float, device: torch.device) -> dict[str, Any]:
    """Search for the largest batch in one process, and measure it in another, whose memory is not in pieces yet."""
    batch = _searched(job, deadline)
    for _ in range(TRIES):
        found = _outcome(_of_batch(job, max(1, batch)), deadline - time.monotonic(), device)
        if batch < 2 or found["state"] != "does not fit":
            break
        batch = 3 * batch // 4  # it fitted by a little only, before memory was in pieces
    return found


def _searched(job: Job, deadline: float) -> int:
    """Return the largest batch that fits, 0 where none does. Where several processes train together, each batch is tried in new
    ones: one that runs out of memory leaves the others waiting."""
    if job.setting.gpus == 1:
        found: int = launched(searched, job, deadline - time.monotonic())
        return found

    def fits(batch: int) -> bool:
        try:
            launched(tried, _of_batch(job, batch), deadline - time.monotonic())
        except LaunchError as error:
            if not _ran_out(error):
                raise
            return False
        return True

    try:
        return largest(fits, 1)
    except MemoryError:
        return 0


def launched(function: Callable[[Job], Any], job: Job, limit_s: float) -> Any:
    """Call a function of the job in its processes and return what the first one's returns. An interrupt ends them; TimeoutError
    beyond the limit."""
    if limit_s <= 0:  # what came before has used it up
        raise TimeoutError("The processes have no time left.")
    call = packed(function, (job,), {})  # before there is a folder that its failing would leave
    running = Launch(job.setting.gpus, 0, limit_s, "none", show=False)
    late = threading.Event()

    def end() -> None:
        late.set()
        running.kill()

    ender = threading.Timer(max(0.0, limit_s), end)
    ender.daemon = True
    try:
        running.start(call)
        ender.start()
        return running.wait(saves=False)
    except BaseException as error:
        if late.is_set() and isinstance(error, RuntimeError):
            raise TimeoutError(f"The processes took longer than {limit_s:g} s.") from None
        if not isinstance(error, LaunchError):  # an interrupt before anybody waited; a launch that failed has ended
            running.kill()
        raise
    finally:
        ender.cancel()


def measured(job: Job) -> dict[str, Any] | None:
    memories.die_first()
    return measure(job)


def searched(job: Job) -> int:
    memories.die_first()
    return search(job)


def tried(job: Job) -> bool:
    memories.die_first()
    return attempt(job)


class _Pace:
    """A _Pace says which cell is measured, and how long the rest takes at the pace so far."""

    def __init__(self, left: int) -> None:
        self.left, self.spent, self.began = left, 0, time.monotonic()

    def say(self, name: str, number: int, rounds: int) -> None:
        about = ""
        if self.spent:
            about = f", about {elapsed((time.monotonic() - self.began) / self.spent * self.left)} left"
        turn = f"round {number + 1} of {rounds}, " if rounds > 1 else ""
        print(f"surokit: {turn}{counted(self.left, 'measurement')} left: {name}{about}", file=sys.stderr, flush=True)

    def done(self, count: int) -> None:
        self.left -= count
        self.spent += 1


__all__ = ["dissect"]
