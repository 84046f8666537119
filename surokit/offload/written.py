"""Which weights somebody has written by hand since an optimizer's last step: a state loaded, an average swapped in, a clamp.

An optimizer with masters of its own would undo that with its next update; instead it asks here, and takes the values over. torch
counts what is done to a tensor in place. It does not count what goes around autograd, `p.data.copy_(x)` first of all, nor a
sharded parameter's `p.detach().to_local().copy_(x)`, nor a kernel of Triton's: such writes are undone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from surokit.train.optim import local


class Written:
    """Of one optimizer. Between `forget` and the next `note` no write counts: a state was loaded, or a step was cut short."""

    def __init__(self) -> None:
        self._versions: dict[Tensor, tuple[int, int]] = {}

    def note(self, params: Iterable[Tensor]) -> None:
        """These are as the optimizer left them."""
        self._versions = {p: _version(p) for p in params}

    def forget(self) -> None:
        self._versions = {}

    def found(self, optimizer: str) -> list[Tensor]:
        """Those that were written since they were noted, with a warning, so that a mistake of theirs or of ours is seen."""
        written = [p for p, version in self._versions.items() if _version(p) != version]
        if written:
            warnings.warn(
                f"{optimizer}: {len(written)} of {len(self._versions)} parameters were written since the last step, and not by "
                "this optimizer. It takes their values over; its moments stay.",
                stacklevel=6,  # found, _adopt, step, and torch's two wrappers around it
            )
        return written


def _version(p: Tensor) -> tuple[int, int]:
    """Of the parameter, and of what this process holds of it: they differ where it is sharded."""
    return p._version, local([p])[0]._version


def adopt_(master: Tensor, shown: Tensor) -> None:
    """master, float32, takes the values of `shown`, but keeps its own where they round to what is shown."""
    master.copy_(torch.where(master.to(shown.dtype) == shown, master, shown))
