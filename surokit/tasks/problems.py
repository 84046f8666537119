"""Make tasks of problems that a rule draws: a prompt and its one answer, in a few characters.

Each character is a token. Token 0 ends an answer, and fills a row behind it. Which problems are for tests is decided by a hash
of the problem alone, so no test problem is ever drawn for training, whatever the seed.

N problems, B batch, T tokens.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from surokit.data.batches import check_positive, check_seed
from surokit.tasks.grading import IGNORED, Batch, Task, right_answers

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

END = 0
TESTS = 256  # test problems, where no number is given
_TEST_SEED = 20240229  # one test set for all runs
_TEST_BITS = 3  # one problem of 2**3 is for tests
_VAIN = 20  # draws in a row that bring nothing new, before it is taken that there is no more


class Drawn(NamedTuple):
    """A Drawn holds problems: token ids [N, T], END behind each, and True where a token belongs to the answer, its END included."""

    ids_NT: Ints
    answers_NT: Bools

    def where(self, chosen: Any) -> Drawn:
        return Drawn(self.ids_NT[chosen], self.answers_NT[chosen])


@dataclass(frozen=True)
class Characters:
    """Characters are a vocabulary: the token of each is its place, from 1 on; 0 is the end of an answer, and no character."""

    characters: str

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. Raises ValueError for a character that is not in the vocabulary."""
        if unknown := set(text) - set(self.characters):
            raise ValueError(
                f"The task has no character {min(unknown)!r}: it knows {self.characters!r}, each of them a token."
            )
        return [self.characters.index(character) + 1 for character in text]

    def decode(self, ids: Sequence[int] | Tensor | Ints) -> str:
        """Return the text of ids; an end, and whatever is not in the vocabulary, is nothing."""
        known = range(1, len(self.characters) + 1)
        return "".join(self.characters[int(i) - 1] for i in ids if int(i) in known)


class ProblemTask(Task):
    """A ProblemTask draws problems, each a row of its own: a prompt, its answer, END. A frozen value; two with the same settings
    are equal."""

    @property
    @abstractmethod
    def characters(self) -> str:
        """Return the characters, in the order of their ids from 1 on."""

    @abstractmethod
    def draw(self, random: np.random.Generator, count: int) -> Drawn:
        """Draw `count` problems, those for tests and those for training alike."""

    def identity(self, drawn: Drawn) -> Ints:
        """Return numbers that are equal for equal problems, [N, K]: the prompt, unless a task says otherwise."""
        return np.where(drawn.answers_NT, END, drawn.ids_NT)

    @property
    def vocab(self) -> int:
        return len(self.characters) + 1

    @property
    def tokenizer(self) -> Characters:
        """Return what turns text into ids and back."""
        return Characters(self.characters)

    def batches(self, batch: int = 64, seed: int = 0) -> Problems:
        """Return an endless source of training batches; another seed gives other problems."""
        return Problems(self, batch, seed)

    def held_out(self, problems: int | None = None, batch: int = TESTS) -> list[Batch]:
        """Return the first `problems` test problems (256, or all where there are fewer), all different, as batches.

        Raises ValueError where there are fewer than are asked for.
        """
        check_positive("batch", batch)
        drawn = _tests(self, problems)
        return [batch_of(drawn.where(slice(at, at + batch))) for at in range(0, len(drawn.ids_NT), batch)]

    def right(self, model: nn.Module, problems: int | None = None, batch: int = TESTS) -> Tensor:
        return right_answers(model, self.held_out(problems, batch))

    def sample(self, random: np.random.Generator, count: int) -> Drawn:
        """Draw `count` problems for training. Raises ValueError where next to all there are is for tests."""
        kept: list[Drawn] = []
        missing = count
        for _ in range(_VAIN):
            drawn = self.draw(random, missing + missing // 4 + 8)
            kept.append(drawn.where(np.flatnonzero(~is_test(self.identity(drawn)))[:missing]))
            missing -= len(kept[-1].ids_NT)
            if not missing:
                return Drawn(*map(np.concatenate, zip(*kept)))
        raise ValueError(f"{self} has too few problems to train on beside those for tests: make them larger.")

    def texts(self, batch: Batch) -> list[tuple[str, str]]:
        """Return prompt and answer of each row of a batch, as text."""
        decode = self.tokenizer.decode
        answers_BT = batch["labels"] != IGNORED
        first_B = answers_BT.int().argmax(1).tolist()
        return [(decode(row[:first]), decode(row[first:])) for row, first in zip(batch["input_ids"].tolist(), first_B)]


class Problems:
    """A Problems is an endless source of training batches {"input_ids": int64 [B, T], "labels": int64 [B, T]}.

    Batch i depends on task, seed and i alone, so a position is one number. Iteration goes on from the position; `fork()` gives a
    reader of its own.
    """

    def __init__(self, task: ProblemTask, batch: int = 64, seed: int = 0) -> None:
        check_positive("batch", batch)
        check_seed(seed)
        self.task, self.batch, self.seed = task, batch, seed
        self._index = 0

    @property
    def length(self) -> int:
        return self.task.length

    @property
    def tokenizer(self) -> Characters:
        return self.task.tokenizer

    @cached_property
    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits over task, batch, seed and the first batch."""
        digest = hashlib.blake2b(repr((self.task, self.batch, self.seed)).encode(), digest_size=8)
        digest.update(self._make(0)["input_ids"].numpy().tobytes())
        return digest.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """Return the position: {"index" (batches handed out), "fingerprint"}."""
        return {"index": self._index, "fingerprint": self.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a saved position. Raises ValueError for one in other data."""
        if state.get("fingerprint") != self.fingerprint:
            raise ValueError(
                f"this position belongs to other data (fingerprint {state.get('fingerprint')}, here {self.fingerprint}): pass the "
                "same task, batch and seed as in the run that saved it"
            )
        self._index = int(state["index"])

    def fork(self) -> Problems:
        """Return an independent reader at the same position."""
        twin = Problems(self.task, self.batch, self.seed)
        twin._index = self._index
        return twin

    def __iter__(self) -> Iterator[Batch]:
        while True:
            made = self._make(self._index)
            self._index += 1
            yield made

    def _make(self, index: int) -> Batch:
        return batch_of(self.task.sample(np.random.default_rng((self.seed, index)), self.batch))

    def __repr__(self) -> str:
        return f"Problems({self.task}, batch={self.batch}, seed={self.seed}; next: batch {self._index})"


def batch_of(drawn: Drawn) -> Batch:
    """Return problems as a batch; labels are -100 on prompts and behind ends."""
    labels_BT = np.where(drawn.answers_NT, drawn.ids_NT, IGNORED)
    return {"input_ids": torch.from_numpy(drawn.ids_NT.copy()), "labels": torch.from_numpy(labels_BT)}


def is_test(identity_NK: Ints) -> Bools:
    """Return which problems are for tests: those whose hash begins with three zero bits, one of eight.

    The hash is FNV-1a over the numbers (Fowler, Noll, Vo), mixed by splitmix64's last steps (Steele, Lea and Flood, 2014).
    """
    hash_N = np.full(len(identity_NK), 0xCBF29CE484222325, np.uint64)
    for column_N in identity_NK.astype(np.uint64).T:
        hash_N = (hash_N ^ column_N) * np.uint64(0x100000001B3)
    hash_N = (hash_N ^ (hash_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hash_N = (hash_N ^ (hash_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    test_N: Bools = (hash_N ^ (hash_N >> np.uint64(31))) >> np.uint64(64 - _TEST_BITS) == 0
    return test_N


@lru_cache(maxsize=64)
def _tests(task: ProblemTask, asked: int | None) -> Drawn:
    """Return the first `asked` different test problems in the order in which they are drawn; None: TESTS, as far as there are."""
    problems = TESTS if asked is None else asked
    check_positive("problems", problems)
    random = np.random.default_rng(_TEST_SEED)
    kept: list[Drawn] = []
    seen: set[bytes] = set()
    vain = 0
    while len(seen) < problems and vain < _VAIN:
        drawn = task.draw(random, 4096)
        identity_NK = task.identity(drawn)
        before = len(seen)
        for at in np.flatnonzero(is_test(identity_NK)):
            name = identity_NK[at].tobytes()
            if name not in seen and len(seen) < problems:
                seen.add(name)
                kept.append(drawn.where([at]))
        vain = vain + 1 if len(seen) == before else 0
    if len(seen) < (1 if asked is None else problems):
        raise ValueError(
            f"{task} has {len(seen)} test problems, not {problems}: ask for fewer, or make the problems larger."
        )
    return Drawn(*map(np.concatenate, zip(*kept)))


def check_setting(task: object, name: str, value: object, least: int, most: int) -> None:
    """Raise ValueError for a setting of a task that is no whole number between `least` and `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{type(task).__name__}({name}={value!r}): a whole number from {least} to {most}.")
