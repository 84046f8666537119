"""Checkpoints are written to disk whole or not at all, and found by looking.

    run_dir/checkpoints/step-000123/
        model.safetensors   every tensor of the model's state_dict, adapters included, tied ones once
        state.pt            optimizer, data position, random states, delayed-scaling state
        config.json         the model's own configuration, where it has one
        session.json        step, recipe, settings, what the data was, environment, the size of every file

A checkpoint is written beside its place under another name, flushed to the disk, and renamed. A kill at any moment leaves
either the old state of the folder or the new one; what is incomplete is passed over when looking for the latest,
and named.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from surokit.train.errors import CheckpointError, ResumeError

_NAME = re.compile(r"step-(\d+)(\.old)?")
_UNFINISHED = ".unfinished-"
_SESSION, _MODEL, _STATE, _CONFIG = "session.json", "model.safetensors", "state.pt", "config.json"


@dataclass(frozen=True)
class Checkpoint:
    """A Checkpoint is a complete one: its folder and the content of session.json."""

    path: Path
    meta: dict[str, Any]
    passed_over: str = ""  # which later ones of its folder are damaged, a sentence

    @property
    def step(self) -> int:
        return int(self.meta["step"])

    def state(self) -> dict[str, Any]:
        """Return the content of state.pt, on the CPU; tensors and plain data only."""
        try:
            state: dict[str, Any] = torch.load(self.path / _STATE, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises half a dozen kinds for a damaged file
            raise CheckpointError(f"{self.path / _STATE} cannot be read ({error}): use another checkpoint.") from error
        return state

    def config(self) -> dict[str, Any] | None:
        """Return the model's configuration, None where the model had none."""
        path = self.path / _CONFIG
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def save(
    folder: Path,
    model: nn.Module,
    state: Mapping[str, Any],
    meta: Mapping[str, Any],
    config: Mapping[str, Any] | None,
    keep: int | None,
) -> Path:
    """Write folder/step-N and then remove the oldest beyond `keep` (None keeps all).

    state: tensors, numbers, strings and containers of them. meta: JSON data with "step".
    Raises CheckpointError for a sharded model and when the disk does not take it; nothing that was there before is lost.
    """
    if any(hasattr(p, "to_local") for p in model.parameters()):  # DTensors, whose module need not be loaded
        raise CheckpointError(
            "The model is sharded over processes and a checkpoint here holds a whole one: save it with "
            "torch.distributed.checkpoint, or gather it on one process first."
        )
    target = folder / f"step-{meta['step']:06d}"
    unfinished = folder / f"{_UNFINISHED}{target.name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clear_unfinished(folder)
        unfinished.mkdir()
        tensors, tied = distinct_tensors(model)
        save_file(tensors, unfinished / _MODEL, metadata={"format": "pt"})
        torch.save(dict(state), unfinished / _STATE)
        if config is not None:
            _write_json(unfinished / _CONFIG, config)
        before = complete(folder)
        serial = 1 + max((c.meta["serial"] for c in before), default=0)
        sizes = {path.name: path.stat().st_size for path in sorted(unfinished.iterdir())}
        dtypes = {name: str(tensor.dtype) for name, tensor in tensors.items()}
        _write_json(unfinished / _SESSION, {**meta, "serial": serial, "tied": tied, "dtypes": dtypes, "files": sizes})
        for path in (*unfinished.iterdir(), unfinished):
            _sync(path)
        _put_in_place(unfinished, target)
        _sync(folder)
    except (OSError, SafetensorError, RuntimeError) as error:
        # torch and safetensors wrap the system's error in their own kinds
        shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(_cannot_save(folder, target, error)) from error
    if keep is not None:
        for old in complete(folder)[:-keep]:
            _remove(old.path)
    return target


def _cannot_save(folder: Path, target: Path, error: BaseException) -> str:
    cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
    try:
        last = latest(folder)
    except OSError:
        last = None
    kept = f"the last good checkpoint is {last.path}" if last else "there is no earlier checkpoint"
    return (
        f"The checkpoint {target} could not be written: {cause}. Training state is untouched and {kept}: "
        "free some space or mend the folder and call session.save() again."
    )


def complete(folder: Path) -> list[Checkpoint]:
    """Return the complete checkpoints of a folder in the order they were written."""
    return _sorted(folder)[0]


def _sorted(folder: Path) -> tuple[list[Checkpoint], list[Damaged]]:
    """Return the complete checkpoints of a folder in the order in which they were written, and the damaged ones by step."""
    candidates = sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name)) if folder.is_dir() else []
    found = [_read(path) for path in candidates]
    whole = [c for c in found if isinstance(c, Checkpoint)]
    whole.sort(key=lambda checkpoint: int(checkpoint.meta["serial"]))
    return whole, sorted((c for c in found if isinstance(c, Damaged)), key=lambda damaged: damaged.step)


def latest(folder: Path) -> Checkpoint | None:
    """Return the complete checkpoint written last, None where there is none. Its `passed_over` names damaged ones of later
    steps."""
    whole, damaged = _sorted(folder)
    if not whole:
        return None
    last = whole[-1]
    if not (later := [d for d in damaged if d.step > last.step]):
        return last
    steps = later[-1].step - last.step
    lost = f"{steps} steps of the run are lost" if steps > 1 else "1 step of the run is lost"
    return replace(
        last,
        passed_over=f"{_named(later)}. {last.path.name} was taken instead: {lost}.",
    )


def damage(folder: Path) -> str:
    """Return which checkpoints of a folder without a whole one are damaged, and how; "" where there are none."""
    whole, damaged = _sorted(folder)
    return "" if whole or not damaged else _named(damaged)


def _named(damaged: Sequence[Damaged]) -> str:
    one = len(damaged) == 1
    names = _listed([f"{d.path.name} ({d.why})" for d in damaged], 3)
    return f"The checkpoint{'s' * (not one)} {names} {'is' if one else 'are'} damaged"


def find(path: Path) -> Checkpoint:
    """Return the checkpoint at `path`, or the latest of the run directory `path`.

    FileNotFoundError where there is nothing, CheckpointError where it is incomplete.
    """
    if not path.exists():
        raise FileNotFoundError(f"There is no run directory or checkpoint {path}.")
    if (path / _SESSION).exists() or _NAME.fullmatch(path.name):
        checkpoint = _read(path)
        if isinstance(checkpoint, Damaged):
            raise CheckpointError(
                f"The checkpoint {path} is incomplete ({checkpoint.why}): resume from its run directory to get a whole one."
            )
        return checkpoint
    last = latest(path / "checkpoints")
    if last is None:
        why = damage(path / "checkpoints")
        raise FileNotFoundError(
            f"The run directory {path} has no complete checkpoint: {f'{why}.' if why else 'start it with session.save().'}"
        )
    return last


@dataclass(frozen=True)
class Damaged:
    """A Damaged is a checkpoint that cannot be used, and says why."""

    path: Path
    why: str

    @property
    def step(self) -> int:
        name = _NAME.fullmatch(self.path.name)
        return int(name[1]) if name else 0


def _read(path: Path) -> Checkpoint | Damaged:
    """Return a folder's checkpoint; a file that is missing or has another size than it was written with makes it a damaged one."""
    try:
        meta = json.loads((path / _SESSION).read_text(encoding="utf-8"))
        files = dict(meta["files"])
    except FileNotFoundError:
        return Damaged(path, f"{_SESSION} is missing")
    except (OSError, ValueError, KeyError, TypeError):
        return Damaged(path, f"{_SESSION} cannot be read")
    for name, size in files.items():
        try:
            there = (path / name).stat().st_size
        except OSError:
            return Damaged(path, f"{name} is missing")
        if there != size:
            return Damaged(path, f"{name} has {there:,} of {size:,} bytes")
    return Checkpoint(path, meta)


# -- the model's tensors


def distinct_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the state_dict's tensors, each storage once, and the names that stand for another: {"lm_head.weight": "..."}."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    holders: dict[tuple[Any, ...], str] = {}
    taken: dict[int, list[tuple[int, int]]] = {}  # bytes of each storage
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{name} in the model's state_dict is a {type(value).__name__}; a checkpoint holds tensors only."
            )
        storage = value.untyped_storage().data_ptr()
        key = (storage, value.storage_offset(), tuple(value.shape), tuple(value.stride()), value.dtype)
        if value.numel() and key in holders:
            tied[name] = holders[key]
            continue
        holders[key] = name
        # safetensors refuses views that overlap; those side by side in one storage it takes
        dense = value.contiguous()
        first, last = dense.data_ptr(), dense.data_ptr() + dense.nbytes
        ranges = taken.setdefault(dense.untyped_storage().data_ptr(), [])
        tensors[name] = dense.clone() if any(first < end and begin < last for begin, end in ranges) else dense
        ranges.append((first, last))
    return tensors, tied


def load_model(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Copy the checkpoint's tensors into `model`, one at a time.

    ResumeError names every tensor that is missing, left over, or of another shape or dtype; nothing is copied then.
    """
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    tied: dict[str, str] = checkpoint.meta["tied"]
    path = checkpoint.path / _MODEL
    try:
        with safe_open(path, framework="pt") as file:
            saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            shapes = {**saved, **{name: saved[source] for name, source in tied.items()}}
            _check_shapes(own, shapes, path)
            for name, dtype in checkpoint.meta["dtypes"].items():
                if str(own[name].dtype) != dtype:
                    raise ResumeError(
                        f"The checkpoint's {name} is {dtype} and the model's {own[name].dtype}: "
                        "give the model the checkpoint's dtype before resuming."
                    )
            with torch.no_grad():
                for name in shapes:
                    own[name].copy_(file.get_tensor(tied.get(name, name)))
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read ({error}): use another checkpoint.") from error


def _check_shapes(own: Mapping[str, Tensor], saved: Mapping[str, tuple[int, ...]], path: Path) -> None:
    problems = []
    if missing := [name for name in own if name not in saved]:
        problems.append(f"missing from the checkpoint: {_listed(missing)}")
    if extra := [name for name in saved if name not in own]:
        problems.append(f"not in the model: {_listed(extra)}")
    wrong = [
        f"{name} {list(saved[name])} in the checkpoint, {list(own[name].shape)} in the model"
        for name in own
        if name in saved and saved[name] != tuple(own[name].shape)
    ]
    if wrong:
        problems.append(f"of another shape: {_listed(wrong)}")
    if problems:
        raise ResumeError(f"The model is not the one of {path.parent}: {'; '.join(problems)}.")


def _listed(names: Sequence[str], most: int = 20) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# -- files


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1), encoding="utf-8")


def _put_in_place(unfinished: Path, target: Path) -> None:
    """Rename the new checkpoint; an older checkpoint of the same step stays readable as step-N.old until the new one is there."""
    old = target.with_name(target.name + ".old")
    if target.exists():
        _remove(old)
        target.rename(old)
    unfinished.rename(target)
    _remove(old)


def _remove(path: Path) -> None:
    """Remove a checkpoint: it is renamed out of sight first, so that a kill cannot leave half a checkpoint under a good name."""
    if path.exists():
        hidden = path.with_name(f"{_UNFINISHED}{path.name}-removed")
        shutil.rmtree(hidden, ignore_errors=True)
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def _clear_unfinished(folder: Path) -> None:
    for path in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    """Flush to the disk itself, a folder's entries as well as a file's content."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
