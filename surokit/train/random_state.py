"""This module keeps the state of every random generator that training draws from, as one value.

A session owns such a state: it is put in force while the session works and the caller's comes back afterwards. So a run
depends on its seed alone, whatever is done between two calls of `run`, and two sessions can take turns.

The process has one lock for this (`turn`), whatever devices the sessions train on. A GPU has a generator of its own, but every step
may draw from the host's as well: a shuffled DataLoader, a model that skips layers or masks tokens, a meter, a function of the user.
Python's, NumPy's and torch's CPU generator are the process's, and nothing says for whom they draw; so only one session's Python
runs at a time. What a GPU computes needs no lock: a step launches its work, and while it waits for its device the lock is free
(`waiting`), so that sessions on several devices compute at the same time, each at its own pace.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RandomState:
    """A RandomState holds the states of Python's, NumPy's (legacy), torch's CPU generator and, for a CUDA `device`, that device's
    generator.

    python and numpy are None in a state of torch's generators alone.
    """

    device: torch.device
    python: Any
    numpy: dict[str, Any] | None
    cpu: Tensor
    cuda: Tensor | None

    @staticmethod
    def capture(device: torch.device, torch_only: bool = False) -> RandomState:
        """Return the states now in force; copies, no device work. Torch's alone take 2 us, all of them 50 us."""
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        if torch_only:
            return RandomState(device, None, None, torch.get_rng_state(), cuda)
        # the global generators are what user code draws from
        numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002
        return RandomState(device, random.getstate(), numpy, torch.get_rng_state(), cuda)

    @staticmethod
    def seeded(seed: int, device: torch.device) -> RandomState:
        """Return the states that `seed` gives; those in force stay."""
        with kept(device):
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            torch.default_generator.manual_seed(seed)
            if device.type == "cuda":
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
            return RandomState.capture(device)

    def restore(self) -> None:
        """Put these states in force."""
        if self.python is not None and self.numpy is not None:
            random.setstate(self.python)
            np.random.set_state(self.numpy)  # noqa: NPY002
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)

    def to_dict(self) -> dict[str, Any]:
        """Return the states as numbers, strings, tuples and tensors, which torch.load(weights_only=True) reads."""
        assert self.numpy is not None, "only a whole state is kept"
        state = self.numpy["state"]
        numpy = {
            **self.numpy,
            "state": {"key": torch.from_numpy(state["key"].astype(np.int64)), "pos": int(state["pos"])},
        }
        return {"python": self.python, "numpy": numpy, "cpu": self.cpu, "cuda": self.cuda}

    @staticmethod
    def from_dict(data: dict[str, Any], device: torch.device) -> RandomState:
        """Make a RandomState of what `to_dict` gave; a CUDA state is dropped where `device` is a CPU, and None the other way
        round."""
        key = data["numpy"]["state"]["key"].numpy().astype(np.uint32)
        numpy = {**data["numpy"], "state": {"key": key, "pos": data["numpy"]["state"]["pos"]}}
        cuda = data["cuda"] if device.type == "cuda" else None
        return RandomState(device, data["python"], numpy, data["cpu"], cuda)


def mixed(seed: int, number: int) -> int:
    """Return a seed that depends on both; `seed` itself for number 0."""
    return (
        seed
        if number == 0
        else int(np.random.SeedSequence((seed % 2**64, number)).generate_state(1, np.uint64)[0] >> 1)
    )


class Turn:
    """A Turn goes to one thread at a time, in the order in which they came. The one that has it may take it again.

    The generators are the process's. A thread that puts a state of its own in force has the turn while it lasts, so that sessions
    in several threads do not draw from each other's.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        self._waiting: deque[tuple[int, threading.Lock]] = deque()

    @property
    def wanted(self) -> bool:
        """Return whether a thread waits for the turn."""
        return bool(self._waiting)

    @property
    def mine(self) -> bool:
        """Return whether this thread has the turn."""
        return self._owner == threading.get_ident()

    def __enter__(self) -> None:
        """Wait for the turn; an interrupt ends the waiting."""
        place = self._come()
        try:
            if place is not None:
                place[1].acquire()
        except BaseException:
            with self._lock:
                if not self.mine:
                    self._waiting = deque(other for other in self._waiting if other is not place)
            if self.mine:  # it was given at that moment
                self.__exit__()
            raise

    def enter(self) -> BaseException | None:
        """Wait for the turn, whatever comes; return an interrupt that came meanwhile."""
        place, interrupt = self._come(), None
        while place is not None and not self.mine:
            try:
                place[1].acquire()
            except BaseException as error:
                interrupt = error
        return interrupt

    def _come(self) -> tuple[int, threading.Lock] | None:
        """Take the turn at once and return None; where it is another's, join those that wait and return the place."""
        me = threading.get_ident()
        with self._lock:
            if self._owner in (me, None):
                self._owner, self._depth = me, self._depth + 1
                return None
            place = me, threading.Lock()
            place[1].acquire()
            self._waiting.append(place)
            return place

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth:
                return
            self._owner = None
            if self._waiting:
                self._owner, gate = self._waiting.popleft()
                self._depth = 1
                gate.release()


turn = Turn()


class OwnRandom:
    """An OwnRandom holds the random state of one session: in force only while it works; the caller's is kept meanwhile."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device = device
        self._state = RandomState.seeded(seed, device)
        self._callers: RandomState | None = None  # while this one is in force
        self._shared = False
        self._held: RandomState | None = None

    @contextmanager
    def in_force(self, shared: bool = False) -> Iterator[None]:
        """Put the session's state in force inside the block.

        shared: other threads go on meanwhile, and what they draw from torch's generators is undone where that is possible.
        """
        if self._callers is not None:
            yield
            return
        with turn:
            self._put()
            self._shared = shared
            try:
                yield
            finally:
                self._shared = False
                self._leave()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Put the caller's state in force inside the block, where others may put theirs. Does nothing where it is so already."""
        if self._callers is None:
            yield
            return
        self._leave()
        turn.__exit__()
        try:
            yield
        finally:
            interrupt = turn.enter()
            self._put()
            if interrupt is not None:
                raise interrupt

    def _put(self) -> None:
        self._callers = RandomState.capture(self._device)
        self._state.restore()

    def _leave(self) -> None:
        self.restore()
        callers, self._callers, self._state = self._callers, None, RandomState.capture(self._device)
        assert callers is not None
        callers.restore()

    def yield_lock(self) -> bool:
        """Let others that wait for their turn have it, between two steps; return whether any did."""
        if not turn.wanted:
            return False
        with self.aside():
            pass
        return True

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let others have their turn, and draw, in the block: a wait for the device."""
        with self.aside() if self._shared or turn.wanted else nullcontext():
            yield

    def snapshot(self) -> None:
        """Keep torch's generators before a wait in which other threads may draw; `restore` undoes that. Takes some microseconds."""
        if self._shared:
            self._held = RandomState.capture(self._device, torch_only=True)

    def restore(self) -> None:
        if self._held is not None:
            self._held.restore()
            self._held = None

    @property
    def state(self) -> RandomState:
        """Return the state as it is now."""
        self.restore()
        return RandomState.capture(self._device) if self._callers is not None else self._state

    @state.setter
    def state(self, state: RandomState) -> None:
        assert self._callers is None, "a state is put in place between two pieces of work"
        self._state = state


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Put the states that `seed` gives in force inside the block; those before come back."""
    with kept(device):
        RandomState.seeded(seed, device).restore()
        yield


@contextmanager
def kept(device: torch.device) -> Iterator[None]:
    """Restore the states in force after the block, whatever happens in it. No other session draws meanwhile."""
    with turn:
        before = RandomState.capture(device)
        try:
            yield
        finally:
            before.restore()
