"""Add two numbers: "037+518=" is answered "0555", or with the digits reversed "730+815=" is answered "5550"."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from surokit.tasks.problems import END, Drawn, Ints, ProblemTask, check_setting

_PLUS, _EQUALS = 11, 12


@dataclass(frozen=True)
class Addition(ProblemTask):
    """Addition asks for the sum of two numbers of `digits` digits each, written with leading zeros; the sum has one digit more.

    reverse: all numbers are written from their units on, so that no digit of the sum needs a carry that comes after it; Lee et al.
    (arXiv:2307.03381) found such sums far easier to learn. a + b and b + a are one problem: both are for tests, or neither.

    Raises ValueError for digits that are not between 1 and 9.
    """

    digits: int = 3
    reverse: bool = False

    def __post_init__(self) -> None:
        check_setting(self, "digits", self.digits, 1, 9)

    @property
    def characters(self) -> str:
        return "0123456789+="

    @property
    def length(self) -> int:
        return 3 * self.digits + 4

    def draw(self, random: np.random.Generator, count: int) -> Drawn:
        n = self.digits
        a_N, b_N = random.integers(0, 10**n, (2, count))
        sign_N1 = np.ones((count, 1), np.int64)
        numbers = _digits(a_N, n), _digits(b_N, n), _digits(a_N + b_N, n + 1)
        a_ND, b_ND, sum_ND = (each_ND[:, ::-1] if self.reverse else each_ND for each_ND in numbers)
        parts = a_ND, _PLUS * sign_N1, b_ND, _EQUALS * sign_N1, sum_ND, END * sign_N1
        ids_NT = np.concatenate(parts, axis=1)
        return Drawn(ids_NT, np.broadcast_to(np.arange(self.length) >= 2 * n + 2, ids_NT.shape))

    def identity(self, drawn: Drawn) -> Ints:
        """Return the digits of both numbers, in an order that does not depend on which is first."""
        n = self.digits
        a_ND, b_ND = drawn.ids_NT[:, :n], drawn.ids_NT[:, n + 1 : 2 * n + 1]
        place_D = 16 ** np.arange(n)[::-1]
        swapped_N1 = (a_ND @ place_D > b_ND @ place_D)[:, None]
        return np.where(swapped_N1, np.hstack([b_ND, a_ND]), np.hstack([a_ND, b_ND]))


def _digits(values_N: Ints, digits: int) -> Ints:
    """Return the ids of the decimal digits, the first one first, [N, D]."""
    return values_N[:, None] // 10 ** np.arange(digits)[::-1] % 10 + 1
