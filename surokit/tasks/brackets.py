"""Close open brackets, or say whether all are balanced: Dyck languages.

N problems, S characters of a word, K kinds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from surokit.tasks.problems import END, Bools, Drawn, Ints, ProblemTask, check_setting

_OPENING, _CLOSING = "([{<", ")]}>"


@dataclass(frozen=True)
class Brackets(ProblemTask):
    """Brackets asks about words of the Dyck language with `kinds` kinds of brackets and `size` characters.

    ask: "closing" shows the beginning of a word, half of it at least, and asks for the brackets that close what is open, in
    order: "([{}[]=" is answered "])". "balanced" shows a whole word, in half of the problems with two closing brackets exchanged
    (one changed, where all are of one kind), so that it is not balanced any more, and asks for "y" or "n".

    The shape of a word is drawn uniformly from all balanced ones (Arnold and Sleep, 1980). Raises ValueError for numbers out of
    range, and for one kind with ask="balanced", since exchanging has no effect there.
    """

    kinds: int = 2
    size: int = 16
    ask: Literal["closing", "balanced"] = "closing"

    def __post_init__(self) -> None:
        check_setting(self, "kinds", self.kinds, 1, len(_OPENING))
        check_setting(self, "size", self.size, 2, 1024)
        if self.size % 2:
            raise ValueError(f"Brackets(size={self.size}): a balanced word has an even number of characters.")
        if self.ask not in ("closing", "balanced"):
            raise ValueError(f'Brackets(ask={self.ask!r}): "closing" or "balanced".')
        if self.ask == "balanced" and self.kinds == 1:
            raise ValueError(
                'Brackets(kinds=1, ask="balanced"): take two kinds at least, for brackets to be exchanged.'
            )

    @property
    def characters(self) -> str:
        return _OPENING[: self.kinds] + _CLOSING[: self.kinds] + ("=" if self.ask == "closing" else "=yn")

    @property
    def length(self) -> int:
        return self.size + (2 if self.ask == "closing" else 3)

    def draw(self, random: np.random.Generator, count: int) -> Drawn:
        depth_NS, kind_NS, close_NS = _words(random, count, self.size, self.kinds)
        if self.ask == "closing":
            return self._cut(random, depth_NS, kind_NS, close_NS)
        wrong_N = random.random(count) < 0.5
        kind_NS[wrong_N] = _exchanged(random, kind_NS[wrong_N], close_NS[wrong_N], self.kinds)
        equals = 2 * self.kinds + 1
        answer_N3 = np.stack([np.full(count, equals), equals + 1 + wrong_N, np.full(count, END)], axis=1)
        ids_NT = np.hstack([self._ids(kind_NS, close_NS), answer_N3])
        return Drawn(ids_NT, np.broadcast_to(np.arange(self.length) > self.size, ids_NT.shape))

    def _ids(self, kind_NS: Ints, close_NS: Bools) -> Ints:
        ids_NS: Ints = kind_NS + 1 + self.kinds * close_NS
        return ids_NS

    def _cut(self, random: np.random.Generator, depth_NS: Ints, kind_NS: Ints, close_NS: Bools) -> Drawn:
        """Cut each word, and close what is open there. What is open at depth d is the last bracket that opened to d."""
        count, size = kind_NS.shape
        ids_NS = self._ids(kind_NS, close_NS)
        cut_N1 = random.integers(size // 2, size, (count, 1))
        shown_NS = np.arange(size) < cut_N1
        ids_NT = np.zeros((count, self.length), np.int64)
        ids_NT[:, :size] = np.where(shown_NS, ids_NS, END)
        np.put_along_axis(ids_NT, cut_N1, 2 * self.kinds + 1, 1)
        open_N = np.take_along_axis(depth_NS, cut_N1 - 1, 1)[:, 0]
        for depth in range(1, int(open_N.max(initial=0)) + 1):
            opened_NS = shown_NS & ~close_NS & (depth_NS == depth)
            last_N1 = size - 1 - opened_NS[:, ::-1].argmax(1)[:, None]
            rows_M = np.flatnonzero(open_N >= depth)
            kind_N = np.take_along_axis(kind_NS, last_N1, 1)[:, 0]
            ids_NT[rows_M, cut_N1[rows_M, 0] + 1 + open_N[rows_M] - depth] = kind_N[rows_M] + 1 + self.kinds
        at_T = np.arange(self.length)
        return Drawn(ids_NT, (at_T > cut_N1) & (at_T <= cut_N1 + 1 + open_N[:, None]))


def _words(random: np.random.Generator, count: int, size: int, kinds: int) -> tuple[Ints, Ints, Bools]:
    """Draw balanced words: the depth behind each character, its kind, and whether it closes, each [N, S].

    At depth d with r characters to come, (d + 2)(r - d) / (2 r (d + 1)) of all words that go on from there open a bracket.
    """
    drawn_NS: NDArray[np.float64] = random.random((count, size))
    kind_NS = random.integers(0, kinds, (count, size))
    depth_NS = np.zeros((count, size), np.int64)
    close_NS = np.zeros((count, size), np.bool_)
    depth_N = np.zeros(count, np.int64)
    open_kind_ND = np.zeros((count, size // 2 + 2), np.int64)
    rows_N = np.arange(count)
    for at in range(size):
        rest = size - at
        opens_N = drawn_NS[:, at] < (depth_N + 2) * (rest - depth_N) / (2 * rest * (depth_N + 1))
        kind_NS[:, at] = np.where(opens_N, kind_NS[:, at], open_kind_ND[rows_N, depth_N])
        depth_N = depth_N + np.where(opens_N, 1, -1)
        open_kind_ND[rows_N[opens_N], depth_N[opens_N]] = kind_NS[opens_N, at]
        depth_NS[:, at], close_NS[:, at] = depth_N, ~opens_N
    return depth_NS, kind_NS, close_NS


def _exchanged(random: np.random.Generator, kind_NS: Ints, close_NS: Bools, kinds: int) -> Ints:
    """Return the kinds with those of two closing brackets that differ exchanged; where all are of one kind, with one changed."""
    order_NS = np.where(close_NS, random.random(kind_NS.shape), 2.0)
    first_N1 = order_NS.argmin(1)[:, None]
    first_kind_N1 = np.take_along_axis(kind_NS, first_N1, 1)
    order_NS[kind_NS == first_kind_N1] += 4.0
    second_N1 = order_NS.argmin(1)[:, None]
    alone_N1 = np.take_along_axis(order_NS, second_N1, 1) >= 2.0
    other_N1 = (first_kind_N1 + random.integers(1, kinds, first_kind_N1.shape)) % kinds
    second_kind_N1 = np.take_along_axis(kind_NS, second_N1, 1)
    out_NS = kind_NS.copy()
    np.put_along_axis(out_NS, first_N1, np.where(alone_N1, other_N1, second_kind_N1), 1)
    np.put_along_axis(out_NS, second_N1, np.where(alone_N1, np.take_along_axis(out_NS, second_N1, 1), first_kind_N1), 1)
    return out_NS
