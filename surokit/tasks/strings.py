"""Copy a string, and recall the value that stands behind a key."""

from __future__ import annotations

from dataclasses import dataclass
from string import ascii_letters, digits

import numpy as np

from surokit.tasks.problems import END, Drawn, Ints, ProblemTask, check_setting

_SYMBOLS = ascii_letters + digits  # lower case first


@dataclass(frozen=True)
class Copying(ProblemTask):
    """Copying asks for a string of `size` characters, each of `symbols` different ones, once more: "hdae=" is answered "hdae".

    Raises ValueError for sizes and numbers of symbols that are out of range.
    """

    size: int = 12
    symbols: int = 16

    def __post_init__(self) -> None:
        check_setting(self, "size", self.size, 1, 4096)
        check_setting(self, "symbols", self.symbols, 2, len(_SYMBOLS))

    @property
    def characters(self) -> str:
        return _SYMBOLS[: self.symbols] + "="

    @property
    def length(self) -> int:
        return 2 * self.size + 2

    def draw(self, random: np.random.Generator, count: int) -> Drawn:
        string_NS = random.integers(1, self.symbols + 1, (count, self.size))
        return _asked(string_NS, self.symbols + 1, string_NS)


@dataclass(frozen=True)
class Recall(ProblemTask):
    """Recall shows `pairs` of a key and a value and asks for the value of one key: "a7c0f7b2=f" is answered "7".

    Keys are different, out of `keys` letters; values are any of `values` digits. Associative recall, as in Ba et al.
    (arXiv:1610.06258): a model needs a head that finds the key and one that takes what follows it.

    Raises ValueError for numbers that are out of range, or fewer keys than pairs.
    """

    pairs: int = 4
    keys: int = 16
    values: int = 10

    def __post_init__(self) -> None:
        check_setting(self, "keys", self.keys, 2, len(ascii_letters))
        check_setting(self, "pairs", self.pairs, 1, self.keys)
        check_setting(self, "values", self.values, 2, len(digits))

    @property
    def characters(self) -> str:
        return ascii_letters[: self.keys] + digits[: self.values] + "="

    @property
    def length(self) -> int:
        return 2 * self.pairs + 4

    def draw(self, random: np.random.Generator, count: int) -> Drawn:
        key_NP = random.random((count, self.keys)).argsort(axis=1)[:, : self.pairs] + 1
        value_NP = random.integers(0, self.values, (count, self.pairs)) + self.keys + 1
        shown_NP2 = np.stack([key_NP, value_NP], axis=2)
        asked_N1 = random.integers(0, self.pairs, (count, 1))
        key_N1, value_N1 = (np.take_along_axis(each_NP, asked_N1, 1) for each_NP in (key_NP, value_NP))
        drawn = _asked(shown_NP2.reshape(count, -1), self.vocab - 1, np.hstack([key_N1, value_N1]))
        drawn.answers_NT[:, -3] = False  # the key is part of the question
        return drawn


def _asked(prompt_NP: Ints, equals: int, answer_NA: Ints) -> Drawn:
    """Return prompts with their answers, an equals sign between them and END behind."""
    count = len(prompt_NP)
    ids_NT = np.hstack([prompt_NP, np.full((count, 1), equals), answer_NA, np.full((count, 1), END)])
    answers_NT = np.zeros(ids_NT.shape, np.bool_)
    answers_NT[:, prompt_NP.shape[1] + 1 :] = True
    return Drawn(ids_NT, answers_NT)
