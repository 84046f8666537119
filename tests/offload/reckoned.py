"""A link whose time is reckoned: it tells what a step would take whose copies run beside its computing, and nobody waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from surokit.offload.link import Arrival, HostLink, PendingCopy


class ReckonedLink(HostLink):
    """Each direction moves one copy after the other, each in `transfer_s`. `compute` lets the device compute, `now_s` is when the
    device is done with all that it was given: it waits where it needs what has not arrived."""

    def __init__(self, transfer_s: float) -> None:
        super().__init__()
        self.transfer_s, self.now_s = transfer_s, 0.0
        self._free_s = {"up": 0.0, "down": 0.0}  # when the latest copy of each direction is over

    def compute(self, seconds: float) -> None:
        self.now_s += seconds

    def down(self, fill: Callable[[Tensor], None], to: Tensor, reads: Sequence[Tensor] = ()) -> PendingCopy:
        super().down(fill, to, reads)
        return _Reckoned(self, self._moves("down"), to)

    def fetch(self, source: Tensor) -> Arrival:
        return _Reckoned(self, self._moves("up"), super().fetch(source).land())

    def _moves(self, way: str) -> float:
        self._free_s[way] = max(self.now_s, self._free_s[way]) + self.transfer_s
        return self._free_s[way]


class _Reckoned:
    def __init__(self, link: ReckonedLink, over_s: float, copy: torch.Tensor) -> None:
        self._link, self._over_s, self._copy = link, over_s, copy

    def done(self) -> bool:
        return self._over_s <= self._link.now_s

    def wait(self) -> None:
        self._link.now_s = max(self._link.now_s, self._over_s)

    def land(self) -> Tensor:
        self.wait()
        return self._copy
