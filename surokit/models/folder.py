"""Read and write safetensors folders in Hugging Face's layout: headers are checked, a folder is written whole or not at all.

Reading goes through memory mapping: a tensor's bytes are touched when it is copied to its place, so a model is never in memory
twice. Writing goes to a hidden folder beside the target and is moved into place when everything is on the disk.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from surokit.errors import CheckpointError
from surokit.places import readable

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SIDECAR = "hf_quant_config.json"  # ModelOpt's own copy of what config.json says of the quantization
FLOATS = ("BF16", "F16", "F32", "F64")  # dtypes as safetensors calls them


class Wanted(NamedTuple):
    """A Wanted says what a file has to have under a name."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS


class Tensors:
    """Tensors are those of one or several safetensors files by name, open and mapped but not read."""

    def __init__(self, files: list[Path]) -> None:
        self._files = []
        self._owner: dict[str, Any] = {}
        for path in files:
            try:
                opened = safe_open(path, framework="pt")
            except FileNotFoundError as error:
                raise CheckpointError(f"{path.parent} lacks {path.name}: copy or download it again.") from error
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is damaged or cut off ({error}): copy or download it again.") from error
            file = opened.__enter__()
            self._files.append(opened)
            self._owner.update(dict.fromkeys(file.keys(), file))

    @property
    def found(self) -> dict[str, Wanted]:
        """Return the shape and dtype of each tensor, from the files' headers."""
        slices = {name: file.get_slice(name) for name, file in self._owner.items()}
        return {name: Wanted(tuple(s.get_shape()), (s.get_dtype(),)) for name, s in slices.items()}

    @property
    def metadata(self) -> dict[str, str]:
        """Return what the files' headers say besides, of all of them together."""
        said: dict[str, str] = {}
        for file in dict.fromkeys(self._owner.values()):
            said |= file.metadata() or {}
        return said

    def __contains__(self, name: object) -> bool:
        return name in self._owner

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._owner[name].get_tensor(name)
        return tensor

    def __enter__(self) -> Tensors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.__exit__(kind, error, trace)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. FileNotFoundError where it is missing, CheckpointError where it is damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        near = sorted([*path.parent.glob(f"*/{path.name}"), *path.parent.glob(f"*/*/{path.name}")])
        hint = f"; did you mean {near[-1].parent}?" if near else "."
        raise FileNotFoundError(
            f"{path.parent} has no {path.name}, so it is no folder that save() or save_pretrained() wrote{hint}"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): copy or download it again.") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds a {type(data).__name__}, not an object: copy or download it again.")
    return data


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder: the single one, or the shards that the index names."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        shards = read_json(folder / INDEX).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise CheckpointError(f"{folder / INDEX} has no weight_map: copy or download it again.")
        return [folder / name for name in dict.fromkeys(shards.values())]
    if any(folder.glob("pytorch_model*.bin")):
        raise CheckpointError(
            f"{folder} holds pickled weights (pytorch_model.bin) only: save it with safetensors, for example by "
            "transformers' save_pretrained()."
        )
    raise FileNotFoundError(f"{folder} has neither {SINGLE} nor {INDEX}: there are no weights to load.")


def check_tensors(found: Mapping[str, Wanted], wanted: Mapping[str, Wanted], where: object) -> None:
    """Raise CheckpointError that names every missing and extra tensor and those of a wrong shape or dtype, or nothing."""
    both = sorted(wanted.keys() & found.keys())
    listed = {
        "missing": sorted(wanted.keys() - found.keys()),
        "extra": sorted(found.keys() - wanted.keys()),
        "wrong shape": [
            f"{name} {list(found[name].shape)} instead of {list(wanted[name].shape)}"
            for name in both
            if found[name].shape != wanted[name].shape
        ],
        "wrong dtype": [
            f"{name} {found[name].dtypes[0]} instead of {' or '.join(wanted[name].dtypes)}"
            for name in both
            if found[name].dtypes[0] not in wanted[name].dtypes
        ],
    }
    problems = [f"{kind}: {', '.join(names)}" for kind, names in listed.items() if names]
    if problems:
        raise CheckpointError(
            f"The tensors in {where} do not fit its config. {'; '.join(problems)}. Config and weights must be of one model."
        )


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """Give a fresh folder to write into; its files move into `folder` if the block ends well, and vanish if it does not.

    Every file is replaced in one piece. Other files in `folder` (a tokenizer, say) stay.
    """
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file: give a folder to save to.")
    draft: Path | None = None
    try:
        home = folder if folder.is_dir() else folder.parent  # what is above may be another disk, or another's
        home.mkdir(parents=True, exist_ok=True)
        draft = home / f".{folder.name}-{uuid.uuid4().hex[:8]}"
        draft.mkdir()
        yield draft
        for path in draft.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        _move(draft, folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"Saving to {folder} failed ({getattr(error, 'strerror', None) or error}): what was there before is untouched; check "
            "space and permissions, or choose another folder."
        ) from error
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)


def _move(draft: Path, folder: Path) -> None:
    if not folder.exists():
        draft.rename(folder)
        return
    new = {path.name for path in draft.iterdir()}
    for path in draft.iterdir():
        path.replace(folder / path.name)
    if SINGLE in new or INDEX in new:  # an older index, shards or quantization would be taken for this model's
        for stale in (*folder.glob("model-*-of-*.safetensors"), folder / SINGLE, folder / INDEX, folder / SIDECAR):
            if stale.name not in new:
                stale.unlink(missing_ok=True)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def write_tensors(folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> None:
    """Write model.safetensors, or shards of at most `shard_bytes` with their index, as transformers names them.

    Tensors are taken as they come, and no more of them held than a shard has.
    """
    shard: dict[str, Tensor] = {}
    owners: list[list[str]] = []  # the names in each shard that is written
    total, room = 0, shard_bytes

    def write(name: str) -> None:
        with readable(folder / name):
            save_file(shard, folder / name, metadata={"format": "pt"})
        owners.append([*shard])
        shard.clear()

    for name, tensor in tensors:
        if shard and tensor.nbytes > room:
            write(f"{len(owners)}.part")
            room = shard_bytes
        shard[name] = tensor
        room -= tensor.nbytes
        total += tensor.nbytes
    if not owners:
        write(SINGLE)
        return
    write(f"{len(owners)}.part")
    files = [f"model-{i:05d}-of-{len(owners):05d}.safetensors" for i in range(1, len(owners) + 1)]
    for i, file in enumerate(files):
        (folder / f"{i}.part").rename(folder / file)
    index = {name: file for file, names in zip(files, owners) for name in names}
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": index})
