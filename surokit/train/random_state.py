"""The state of every random generator that training draws from, as one value.

A session owns such a state: it is put in force while the session works and the caller's comes back afterwards. So a run
depends on its seed alone, whatever is done between two calls of `run`, and two sessions can take turns.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RandomState:
    """States of Python's, NumPy's (legacy), torch's CPU generator and, for a CUDA `device`, that device's generator.

    python and numpy are None in a state of torch's generators alone.
    """

    device: torch.device
    python: Any
    numpy: dict[str, Any] | None
    cpu: Tensor
    cuda: Tensor | None

    @staticmethod
    def capture(device: torch.device, torch_only: bool = False) -> RandomState:
        """The states now in force; copies, no device work. Torch's alone take 2 us, all of them 50 us."""
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        if torch_only:
            return RandomState(device, None, None, torch.get_rng_state(), cuda)
        # the global generators are what user code draws from
        numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002
        return RandomState(device, random.getstate(), numpy, torch.get_rng_state(), cuda)

    @staticmethod
    def seeded(seed: int, device: torch.device) -> RandomState:
        """The states that `seed` gives; those in force stay."""
        with kept(device):
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            torch.default_generator.manual_seed(seed)
            if device.type == "cuda":
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
            return RandomState.capture(device)

    def restore(self) -> None:
        """Puts these states in force."""
        if self.python is not None and self.numpy is not None:
            random.setstate(self.python)
            np.random.set_state(self.numpy)  # noqa: NPY002
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)

    def to_dict(self) -> dict[str, Any]:
        """Numbers, strings, tuples and tensors only: what torch.load(weights_only=True) reads."""
        assert self.numpy is not None, "only a whole state is kept"
        state = self.numpy["state"]
        numpy = {
            **self.numpy,
            "state": {"key": torch.from_numpy(state["key"].astype(np.int64)), "pos": int(state["pos"])},
        }
        return {"python": self.python, "numpy": numpy, "cpu": self.cpu, "cuda": self.cuda}

    @staticmethod
    def from_dict(data: dict[str, Any], device: torch.device) -> RandomState:
        """Inverse of `to_dict`; a CUDA state is dropped where `device` is a CPU, and missing in the other direction."""
        key = data["numpy"]["state"]["key"].numpy().astype(np.uint32)
        numpy = {**data["numpy"], "state": {"key": key, "pos": data["numpy"]["state"]["pos"]}}
        cuda = data["cuda"] if device.type == "cuda" else None
        return RandomState(device, data["python"], numpy, data["cpu"], cuda)


class OwnRandom:
    """The random state of one session: in force only while it works, when the caller's is kept."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device = device
        self._state = RandomState.seeded(seed, device)
        self._working = False

    @contextmanager
    def in_force(self) -> Iterator[None]:
        if self._working:
            yield
            return
        with kept(self._device):
            self._state.restore()
            self._working = True
            try:
                yield
            finally:
                self._working = False
                self._state = RandomState.capture(self._device)

    @property
    def state(self) -> RandomState:
        """As it is now."""
        return RandomState.capture(self._device) if self._working else self._state

    @state.setter
    def state(self, state: RandomState) -> None:
        assert not self._working, "a state is put in place between two pieces of work"
        self._state = state


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, the states that `seed` gives are in force; those before come back."""
    with kept(device):
        RandomState.seeded(seed, device).restore()
        yield


@contextmanager
def kept(device: torch.device) -> Iterator[None]:
    """Whatever happens inside, the states in force come back."""
    before = RandomState.capture(device)
    try:
        yield
    finally:
        before.restore()
