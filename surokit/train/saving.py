"""A Saving writes a session's checkpoints: while it waits, or from copies in a thread while training goes on.

The copies have the values of the moment of asking, of tensors on the CPU too; those of a GPU come to pinned memory behind the work
that was launched before, and no step waits for them. One checkpoint is written at a time. What fails in the thread is told
between two steps, and raised where the next checkpoint is asked for or the run ends.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surokit.optim.parts import Part
from surokit.train import checkpoint_files as checkpoints
from surokit.train import checkpointing
from surokit.train.errors import CheckpointError
from surokit.train.peers import Peers

if TYPE_CHECKING:
    from surokit.train.session import Session


class Saving:
    """A Saving keeps the checkpoint of one session that is on its way, if there is one."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._pending: Future[Path] | None = None
        self._told = False
        self.saved_at: int | None = None  # the step of the last checkpoint that is there, or is on its way

    def save(self, wait: bool = True) -> Path:
        """Write a checkpoint of the session as it is now; return its folder, which is there later where `wait` is False.

        CheckpointError where the disk does not take it, or did not take the one before, which was not waited for.
        """
        self.wait()
        session = self._session
        peers = session.peers
        content, folder = peers.together(lambda: (checkpointing.content_of(session, peers), self._folder(peers)))
        folder = peers.now(lambda: peers.first(lambda: folder))
        if wait:
            path = peers.now(lambda: checkpoints.write(folder, content, session.keep, peers))
            self.saved_at = session.steps
            return path
        content = replace(content, tensors=_copy(content.tensors), state=_copy(content.state), own=_copy(content.own))
        keep = session.keep

        def work() -> Path:
            try:
                return checkpoints.write(folder, content, keep, peers)
            except CheckpointError as error:
                if not threading.main_thread().is_alive():  # there is nobody left who would hear of it
                    print(f"surokit: {error}", file=sys.stderr, flush=True)
                raise

        # the thread waits for what the current device has been given: the copies are on the session's
        with torch.cuda.device(session.device) if session.device.type == "cuda" else nullcontext():
            self._pending = peers.later(work)
        self._told, self.saved_at = False, session.steps
        return checkpoints.place_of(folder, session.steps)

    def _folder(self, peers: Peers) -> Path:
        run_dir = self._session.run_dir
        if run_dir is None and peers.is_first:
            raise ValueError("There is nowhere to save to: give Session(run_dir=...).")
        return (run_dir or Path()) / "checkpoints"

    def wait(self) -> None:
        """Wait until the checkpoint that is on its way is there; CheckpointError where it could not be written."""
        pending = self._pending
        if pending is None:
            return
        self.finish()
        self._pending = None
        if pending.exception() is not None:
            self.saved_at = None
        pending.result()

    def finish(self) -> None:
        """Wait as `wait` does and only tell of an error, which the next save raises."""
        if self._pending is not None:
            self._pending.exception()
            self.tell()

    def tell(self) -> None:
        """Say in a note and a warning that the thread failed, if it did and nobody was told yet. Does not wait."""
        pending = self._pending
        if pending is None or self._told or not pending.done():
            return
        if (error := pending.exception()) is not None:
            self._told = True
            self._session.note(str(error))
            warnings.warn(str(error), stacklevel=3)


def _copy(value: Any) -> Any:
    """Copy all tensors in a value to the host; a GPU's are there when what is launched by now is done."""
    if isinstance(value, Part):
        return Part(value.whole, {place: _copy(piece) for place, piece in value.pieces.items()})
    if isinstance(value, Tensor):
        if not value.is_cuda:
            return value.detach().clone()
        return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value.detach(), non_blocking=True)
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copy(item) for item in value)
    return value
