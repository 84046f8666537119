"""Checkpoints are written to disk whole or not at all, and found by looking.

    run_dir/checkpoints/step-000123/
        model.safetensors   every tensor of the model's state_dict, adapters included, tied ones once
        state.pt            optimizer, data position, random states, delayed-scaling state
        config.json         the model's configuration as Hugging Face has it, where it can be said so
        session.json        step, recipe, settings, what the data was, environment, size and CRC-32 of every file

Where several processes train a sharded model, all of them write, and its tensors and the optimizer's are in other files:

        __0_0.distcp ...    the pieces that each process holds, and .metadata, as torch's distributed checkpoint has them
        rank-00000.pt ...   each process's random states, delayed scales and position in its data

A checkpoint is written beside its place under another name, flushed to the disk, and renamed, by the first process when all
are done. A kill at any moment leaves either the old state of the folder or the new one; what is incomplete, or not as it was
written, is passed over when looking for the latest, and named.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from surokit.optim.parts import Part
from surokit.places import readable
from surokit.train.errors import CheckpointError, ResumeError
from surokit.train.peers import ALONE, Peers, cause_of

_NAME = re.compile(r"step-(\d+)(\.old)?")
_UNFINISHED = ".unfinished-"
_SESSION, _MODEL, _STATE, _CONFIG = "session.json", "model.safetensors", "state.pt", "config.json"
_OWN = "rank-{:05d}.pt"


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
        return self._load(self.path / _STATE)

    def _load(self, path: Path) -> dict[str, Any]:
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises half a dozen kinds for a damaged file
            raise CheckpointError(f"{path} cannot be read ({error}): use another checkpoint.") from error
        return state

    def own_state(self, rank: int) -> dict[str, Any]:
        """Return what that process alone wrote, on the CPU; {} where it wrote nothing."""
        path = self.path / _OWN.format(rank)
        return self._load(path) if path.exists() else {}

    @property
    def sharded(self) -> bool:
        """Return whether the tensors are in pieces, by torch's distributed checkpoint."""
        return bool(self.meta.get("sharded", False))

    @property
    def ranks(self) -> int:
        """Return how many processes wrote it together."""
        return int(self.meta.get("ranks", 1))

    def config(self) -> dict[str, Any] | None:
        """Return the model's configuration as Hugging Face has it, None where that cannot say it."""
        path = self.path / _CONFIG
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


@dataclass(frozen=True)
class Content:
    """A Content is all that this process writes of a checkpoint.

    tensors: the model's by name; of a model that is sharded, and then with the optimizer's, as Parts. tied: names that stand for
    another. state: the same in all processes; the first one writes it. own: this process's, None where it is alone.
    meta: JSON data with "step". config: the model's configuration as Hugging Face has it, where it can be said so.
    """

    tensors: Mapping[str, Tensor | Part]
    tied: Mapping[str, str]
    state: Mapping[str, Any]
    meta: Mapping[str, Any]
    config: Mapping[str, Any] | None = None
    own: Mapping[str, Any] | None = None
    sharded: bool = False
    dtypes: Mapping[str, str] = field(default_factory=dict)  # of the model's tensors


def save(
    folder: Path,
    model: nn.Module,
    state: Mapping[str, Any],
    meta: Mapping[str, Any],
    config: Mapping[str, Any] | None,
    keep: int | None,
) -> Path:
    """Write folder/step-N of a model that this process holds as a whole, as `write` does."""
    tensors, tied = distinct_tensors(model)
    return write(folder, Content(tensors, tied, state, meta, config, dtypes=dtypes_of(tensors)), keep)


def write(folder: Path, content: Content, keep: int | None, peers: Peers = ALONE) -> Path:
    """Write folder/step-N together with the peers and then remove the oldest beyond `keep` (None keeps all); return it.

    Nobody returns before all is there. CheckpointError in all processes where the disk does not take it in one; nothing that was
    there before is lost.
    """
    target = place_of(folder, content.meta["step"])
    unfinished = folder / f"{_UNFINISHED}{target.name}"
    try:
        peers.first(lambda: _begin(folder, unfinished))
        written = peers.agree(lambda: _write(unfinished, content, peers))
        files = {name: of for some in written for name, of in some.items()}
        peers.first(lambda: _finish(folder, unfinished, target, content, files))
    except (OSError, SafetensorError, RuntimeError) as error:
        # torch and safetensors wrap the system's error in their own kinds
        if peers.is_first:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(_cannot_save(folder, target, error)) from error
    if keep is not None and peers.is_first:
        for old in complete(folder)[:-keep]:
            _remove(old.path)
    return target


def place_of(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step is kept."""
    return folder / f"step-{step:06d}"


def _begin(folder: Path, unfinished: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _clear_unfinished(folder)
    unfinished.mkdir()


def _write(unfinished: Path, content: Content, peers: Peers) -> dict[str, tuple[int, int]]:
    """Write this process's files; return the size and checksum of each."""
    names = []
    if content.sharded:
        from surokit.train.sharded_files import METADATA, write_parts

        write_parts(unfinished, content.tensors, peers)  # type: ignore[arg-type]
        # first, since all processes have to come there; torch names the files so
        names += [path.name for path in unfinished.glob(f"__{peers.rank}_*")] + [METADATA] * peers.is_first
    elif peers.is_first:
        with readable(unfinished / _MODEL):
            save_file(content.tensors, unfinished / _MODEL, metadata={"format": "pt"})
        names.append(_MODEL)
    if content.own is not None:
        names.append(_OWN.format(peers.rank))
        torch.save(dict(content.own), unfinished / names[-1])
    if peers.is_first:
        torch.save(dict(content.state), unfinished / _STATE)
        names.append(_STATE)
        if content.config is not None:
            _write_json(unfinished / _CONFIG, content.config)
            names.append(_CONFIG)
    for name in names:
        _sync(unfinished / name)
    return {name: ((unfinished / name).stat().st_size, checksum(unfinished / name)) for name in names}


def _finish(
    folder: Path, unfinished: Path, target: Path, content: Content, files: Mapping[str, tuple[int, int]]
) -> None:
    """Write session.json and put the checkpoint in its place."""
    serial = 1 + max((c.meta["serial"] for c in complete(folder)), default=0)
    meta = {**content.meta, "serial": serial, "tied": content.tied, "dtypes": content.dtypes}
    if content.sharded:
        meta["sharded"] = True
    if content.own is not None:
        meta["ranks"] = sum(name.startswith(_OWN.partition("{")[0]) for name in files)
    meta |= {"files": {name: size for name, (size, _) in sorted(files.items())}}
    meta |= {"crc32": {name: crc for name, (_, crc) in sorted(files.items())}}
    _write_json(unfinished / _SESSION, meta)
    for path in (unfinished / _SESSION, unfinished):
        _sync(path)
    _put_in_place(unfinished, target)
    _sync(folder)


def _cannot_save(folder: Path, target: Path, error: BaseException) -> str:
    try:
        last = latest(folder)
    except OSError:
        last = None
    kept = f"the last good checkpoint is {last.path}" if last else "there is no earlier checkpoint"
    return (
        f"The checkpoint {target} could not be written: {cause_of(error)}. Training state is untouched and {kept}: "
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


def latest(folder: Path, peers: Peers = ALONE, verify: bool = False) -> Checkpoint | None:
    """Return the complete checkpoint written last, None where there is none. Its `passed_over` names damaged ones of later
    steps. All peers get the same.

    verify: whether the bytes are compared with their checksums, each process a part of them.
    """
    whole, damaged = _listed_by_all(folder, peers)
    while whole and verify and (why := altered(whole[-1], peers)):
        damaged.append(Damaged(whole.pop().path, why))
    if not whole:
        return None
    last = whole[-1]
    if not (later := sorted((d for d in damaged if d.step > last.step), key=lambda d: d.step)):
        return last
    steps = later[-1].step - last.step
    lost = f"{steps} steps of the run are lost" if steps > 1 else "1 step of the run is lost"
    return replace(
        last,
        passed_over=f"{_named(later)}. {last.path.name} was taken instead: {lost}.",
    )


def damage(folder: Path, peers: Peers = ALONE, verify: bool = False) -> str:
    """Return which checkpoints of a folder without a whole one are damaged, and how; "" where there are none."""
    whole, damaged = _listed_by_all(folder, peers)
    if verify:
        whys = [(c, altered(c, peers)) for c in whole]
        damaged += [Damaged(c.path, why) for c, why in whys if why]
        whole = [c for c, why in whys if not why]
    return "" if whole or not damaged else _named(sorted(damaged, key=lambda d: d.step))


def _listed_by_all(folder: Path, peers: Peers) -> tuple[list[Checkpoint], list[Damaged]]:
    """Return what the first process sees there, in all of them."""
    whole, damaged = peers.now(lambda: peers.first(lambda: _sorted(folder)))
    return [*whole], [*damaged]


def altered(checkpoint: Checkpoint, peers: Peers = ALONE) -> str:
    """Return which files are not as they were written, by their checksums, "" where all are; each process reads a part of them.

    A checkpoint of an older version has no checksums and is taken as it is.
    """
    sums = sorted(checkpoint.meta.get("crc32", {}).items())[peers.rank :: peers.world]

    def look() -> list[str]:
        return [name for name, crc in sums if checksum(checkpoint.path / name) != crc]

    found = sorted(name for names in peers.now(lambda: peers.agree(look)) for name in names)
    return f"{_listed(found, 3)} {'is' if len(found) == 1 else 'are'} not as it was written" if found else ""


def _named(damaged: Sequence[Damaged]) -> str:
    one = len(damaged) == 1
    names = _listed([f"{d.path.name} ({d.why})" for d in damaged], 3)
    return f"The checkpoint{'s' * (not one)} {names} {'is' if one else 'are'} damaged"


def find(path: Path, peers: Peers = ALONE, verify: bool = False) -> Checkpoint:
    """Return the checkpoint at `path`, or the latest of the run directory `path`.

    FileNotFoundError where there is nothing, CheckpointError where it is incomplete, or with `verify` not as it was written.
    """
    if not path.exists():
        raise FileNotFoundError(f"There is no run directory or checkpoint {path}.")
    if (path / _SESSION).exists() or _NAME.fullmatch(path.name):
        checkpoint = _read(path)
        why = checkpoint.why if isinstance(checkpoint, Damaged) else altered(checkpoint, peers) if verify else ""
        if isinstance(checkpoint, Damaged) or why:
            raise CheckpointError(
                f"The checkpoint {path} is incomplete ({why}): resume from its run directory to get a whole one."
            )
        return checkpoint
    last = latest(path / "checkpoints", peers, verify)
    if last is None:
        why = damage(path / "checkpoints", peers, verify)
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


def dtypes_of(tensors: Mapping[str, Tensor | Part]) -> dict[str, str]:
    """Return the dtype of each tensor or part, by name."""
    return {name: str((t.piece if isinstance(t, Part) else t).dtype) for name, t in tensors.items()}


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
            own_shapes = {name: tuple(value.shape) for name, value in own.items()}
            check_fits(checkpoint, own_shapes, dtypes_of(own), shapes)
            with torch.no_grad():
                for name in shapes:
                    own[name].copy_(file.get_tensor(tied.get(name, name)))
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read ({error}): use another checkpoint.") from error


def check_fits(
    checkpoint: Checkpoint,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, str],
    saved: Mapping[str, tuple[int, ...]],
) -> None:
    """Raise ResumeError that names every tensor of the model which is missing, left over, or of another shape or dtype.

    shapes, dtypes: the model's, by name. saved: the shapes in the checkpoint.
    """
    problems = []
    if missing := [name for name in shapes if name not in saved]:
        problems.append(f"missing from the checkpoint: {_listed(missing)}")
    if extra := [name for name in saved if name not in shapes]:
        problems.append(f"not in the model: {_listed(extra)}")
    wrong = [
        f"{name} {list(saved[name])} in the checkpoint, {list(shapes[name])} in the model"
        for name in shapes
        if name in saved and saved[name] != shapes[name]
    ]
    if wrong:
        problems.append(f"of another shape: {_listed(wrong)}")
    if problems:
        raise ResumeError(f"The model is not the one of {checkpoint.path}: {'; '.join(problems)}.")
    for name, dtype in checkpoint.meta["dtypes"].items():
        if dtypes[name] != dtype:
            raise ResumeError(
                f"The checkpoint's {name} is {dtype} and the model's {dtypes[name]}: "
                "give the model the checkpoint's dtype before resuming."
            )


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


def checksum(path: Path) -> int:
    """Return zlib.crc32 of a file's bytes."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc


def _sync(path: Path) -> None:
    """Flush to the disk itself, a folder's entries as well as a file's content."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
