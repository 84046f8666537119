"""Check the device that a user names, the model that is given and the folder that is to be written, before any work is lost; write
files whole."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn


def find_device(device: torch.device | str | None, who: str) -> torch.device:
    """Return the device that is named; None is a CUDA GPU if there is one, else the CPU.

    who: the function that was asked, for the message, such as "load". ValueError for a name that torch does not know, and for a
    CUDA device that is not there.
    """
    import torch

    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(
            f"{who}(device={device!r}): torch knows no such device; give 'cuda', 'cuda:1' or 'cpu'."
        ) from None
    if found.type != "cuda":
        return found
    if not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device here"
        raise ValueError(
            f"{who}(device={str(device)!r}): {why} (torch {torch.__version__}). device='cpu' works here, and surokit doctor says "
            "what this machine has."
        )
    count = torch.cuda.device_count()
    if found.index is not None and found.index >= count:
        raise ValueError(
            f"{who}(device={str(device)!r}): there {'is 1 CUDA device' if count == 1 else f'are {count} CUDA devices'} here, "
            f"counted from 0: give 'cuda' or 'cuda:{count - 1}'."
        )
    return found


def check_module(model: object, who: str) -> None:
    """Raise TypeError for what is no torch.nn.Module. who: the function that was asked, such as "apply"."""
    from torch import nn

    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{who}() takes a model, a torch.nn.Module, not a {type(model).__name__}: load one with surokit.load()."
        )


def check_dtype(dtype: object, who: str) -> None:
    """Raise ValueError for what parameters cannot have. who: the function that was asked, such as "load"."""
    import torch

    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(
            f"{who}(dtype={dtype!r}): parameters have a floating-point torch.dtype of at least 16 bits, such as torch.bfloat16; a "
            "recipe quantizes weights."
        )


def check_values(model: nn.Module, who: str, ends: str | tuple[str, ...] = "") -> None:
    """Raise ValueError for a model with parameters on the meta device. who: the function that was asked, such as "Session". ends:
    of the names of parameters that matter. TypeError for what is no module."""
    check_module(model, who)
    name = next((name for name, p in model.named_parameters() if p.is_meta and name.endswith(ends)), None)
    if name is not None:
        raise ValueError(
            f"{who}() needs a model with values, and this {type(model).__name__} is on the meta device ({name}), which has shapes "
            "only: load it with surokit.load(), or model.to_empty(device='cpu') and fill its weights."
        )


def make_folder(folder: Path, what: str) -> None:
    """Makes the folder with its parents, if it is not there, and makes sure that files can be written in it.

    what: its part in the message, such as "run directory". PermissionError, or the OSError that the system gave, in a sentence.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(
            dir=folder
        ):  # permissions alone do not tell it: a file system may be read-only, or full
            pass
    except OSError as error:
        raise type(error)(
            error.errno,
            f"The {what} {folder} cannot be written to ({error.strerror or error}): choose a folder of yours, or have its "
            "permissions changed.",
        ) from error


def check_new(folder: Path, who: str) -> None:
    """Raise ValueError for a folder that has content. who: the function that was asked, such as "dissect"."""
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{who}(folder={str(folder)!r}): the folder holds something else; give a new one.")


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a file that whoever looks sees whole or not at all: under another name first. OSError as the system gives it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(data.encode() if isinstance(data, str) else data)
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Let a file that is written in the block have the permissions of any new one: safetensors writes for the owner alone."""
    path.touch()
    mode = path.stat().st_mode
    yield
    path.chmod(mode)
