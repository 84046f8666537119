"""Write and read the tensors of a model that is divided over processes, by torch's distributed checkpoint (DCP).

A name stands for a Part (optim/parts.py): each process writes its pieces, plain tensors, and reads the pieces that it holds now,
whoever wrote them. `.metadata`, which DCP pickles, is read without letting it run code, as `weights_only=True` does for the rest.
"""

from __future__ import annotations

import importlib
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from surokit.optim.parts import Part, Place
from surokit.train.errors import CheckpointError
from surokit.train.peers import PeerError, Peers, cause_of

METADATA = ".metadata"


class _Divided:
    """A _Divided is a part as DCP asks for it."""

    def __init__(self, part: Part) -> None:
        self.part = part

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        whole = torch.Size(self.part.whole)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(piece), whole),
            )
            for chunk, piece in zip(self.__create_chunk_list__(), self.part.pieces.values())
            if piece.numel() or not whole.numel()  # a short parameter leaves nothing for the last processes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(place), piece.shape) for place, piece in self.part.pieces.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.part.pieces[tuple(index.offset or ())]


class _SavePlanner(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found: Tensor = self.state_dict[index.fqn].__get_tensor_shard__(index)
        return found


class _Reader(FileSystemReader):
    """Reads DCP's metadata, and refuses what is not a part of it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / METADATA).open("rb") as file:
            metadata: Metadata = _Unpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        return metadata


class _Unpickler(pickle.Unpickler):
    """Builds values of DCP, torch's dtypes and sizes, and nothing that runs code."""

    def find_class(self, module: str, name: str) -> Any:
        ours = module == "torch.distributed.checkpoint.metadata" or (module, name) in _ALLOWED
        if ours or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
            return found
        raise pickle.UnpicklingError(f"{module}.{name} has no place in the metadata of tensors")


_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("collections", "OrderedDict"),
}


def write_parts(folder: Path, parts: Mapping[str, Part], peers: Peers) -> None:
    """Write this process's parts into the folder, beside those of its peers. PeerError in all where one of them fails."""
    state: dict[str, Any] = {name: _Divided(part) for name, part in parts.items()}
    with _words_of_ours(peers):
        save(
            state,
            storage_writer=FileSystemWriter(folder),
            planner=_SavePlanner(),
            process_group=peers.group,
            no_dist=peers.group is None,
        )


class DividedTensors:
    """DividedTensors are the tensors of a folder that `write_parts` filled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            found = _Reader(folder).read_metadata().state_dict_metadata
        except Exception as error:  # a damaged pickle raises many kinds
            raise CheckpointError(
                f"{folder / METADATA} cannot be read ({cause_of(error)}): use another checkpoint."
            ) from error
        self._found = {name: meta for name, meta in found.items() if isinstance(meta, TensorStorageMetadata)}

    def __contains__(self, name: object) -> bool:
        return name in self._found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        return tuple(self._found[name].size)

    def dtype(self, name: str) -> torch.dtype:
        """Return the tensor's dtype."""
        return self._found[name].properties.dtype

    def chunks(self, name: str) -> dict[Place, tuple[int, ...]]:
        """Return the pieces that it was written in: their sizes by place."""
        return {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in self._found[name].chunks}

    def read(self, wanted: Mapping[str, Part], peers: Peers) -> None:
        """Fill the parts. To be called by all peers; CheckpointError in all where one of them fails."""
        state: dict[str, Any] = {name: _Divided(_filled(part)) for name, part in wanted.items()}

        def fill() -> None:
            with torch.no_grad(), _words_of_ours(peers):
                load(
                    state,
                    storage_reader=_Reader(self._folder),
                    planner=_LoadPlanner(),
                    process_group=peers.group,
                    no_dist=peers.group is None,
                )

        try:
            peers.now(fill)
        except PeerError as error:
            raise CheckpointError(f"{self._folder} cannot be read ({error}): use another checkpoint.") from error


def _filled(part: Part) -> Part:
    return Part(part.whole, {place: piece for place, piece in part.pieces.items() if piece.numel()})


@contextmanager
def _words_of_ours(peers: Peers) -> Iterator[None]:
    """Turn DCP's error, which is that of every process at once, into one sentence; keep quiet that a process is alone."""
    alone = peers.group is None
    with warnings.catch_warnings() if alone else nullcontext():  # other threads would notice
        if alone:
            warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
        try:
            yield
        except CheckpointException as error:
            rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
            raise PeerError(f"{cause_of(cause)} (rank {rank})") from error
