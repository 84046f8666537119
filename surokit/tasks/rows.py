"""Generate labelled sentences by a rule, in the form of GLUE's rows: a task for classification without a download.

A rule is known, so every label is right; what is to be learned is more than which words occur.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, TypeVar

T = TypeVar("T")


def _words(text: str) -> list[str]:
    return text.split()


_GOOD = _words("good wonderful lovely bright charming clever fine splendid moving funny fresh warm graceful witty rich")
_BAD = _words("bad dreadful ugly dull clumsy stupid poor boring cold tired stale bitter noisy empty weak")
_SUBJECTS = _words("film plot cast music book story meal room hotel concert play song picture dance dish")
_WEAK = _words("quite rather very truly somewhat really almost simply")
_TIMES = ("in the evening", "on Monday", "last week", "at noon", "in spring", "after the rain", "that night", "in June")
_PEOPLE = _words("Anna Ben Clara David Emma Felix Greta Hugo Ida Jonas Karin Leo Mara Nils Olga Paul")
_THINGS = _words("lamp key book coat ring map clock basket letter bell knife flute scarf drum lens rope")
_DOINGS = (
    ("gave the {2} to {1}", "{1} got the {2} from {0}"),
    ("sold the {2} to {1}", "{1} bought the {2} from {0}"),
    ("lent the {2} to {1}", "{1} borrowed the {2} from {0}"),
    ("showed the {2} to {1}", "{1} was shown the {2} by {0}"),
    ("taught {1} about the {2}", "{1} learned about the {2} from {0}"),
    ("took the {2} from {1}", "{1} lost the {2} to {0}"),
    ("sent {1} the {2}", "{1} received the {2} from {0}"),
    ("hid the {2} from {1}", "{1} could not find the {2} that {0} had hidden"),
)


def sentiment(n: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return `n` rows {"sentence", "label"}: 1 where the sentence praises, 0 where it complains.

    A word may be negated, which turns it, and of two halves with "but" between them the second one counts.
    """
    random = Random(seed)
    rows = []
    for _ in range(n):
        label = int(random.random() < 0.5)
        if random.random() < 0.5:
            halves = [_opinion(random, 1 - label), "but", _opinion(random, label)]
        else:
            halves = [_opinion(random, label), "and", _opinion(random, label)]
        if random.random() < 0.3:
            halves.append(_pick(random, _TIMES))
        rows.append({"sentence": " ".join(halves), "label": label})
    return rows


def paraphrase(n: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return `n` rows {"sentence1", "sentence2", "label"}: 1 where the second sentence says what the first one does, from the other
    person's side; 0 where the two are exchanged, or one of them or the thing is another."""
    random = Random(seed)
    rows = []
    for _ in range(n):
        giver, taker, other = random.sample(_PEOPLE, 3)
        thing, another = random.sample(_THINGS, 2)
        doing, said = _pick(random, _DOINGS)
        when = f" {_pick(random, _TIMES)}" if random.random() < 0.5 else ""
        label = int(random.random() < 0.5)
        second = said.format(giver, taker, thing)
        if not label:
            second = _pick(
                random,
                (
                    said.format(taker, giver, thing),
                    said.format(taker, giver, thing),
                    said.format(other, taker, thing),
                    said.format(giver, taker, another),
                ),
            )
        first = f"{giver} {doing.format(giver, taker, thing)}"
        rows.append({"sentence1": f"{first}{when}", "sentence2": f"{second}{when}", "label": label})
    return rows


def _opinion(random: Random, good: int) -> str:
    """Return a clause that praises, or complains: in a third of them by the negation of the other."""
    turned = random.random() < 0.34
    word = _pick(random, _GOOD if bool(good) != turned else _BAD)
    weak = f"{_pick(random, _WEAK)} " if random.random() < 0.4 else ""
    return f"the {_pick(random, _SUBJECTS)} was {'not ' if turned else ''}{weak}{word}"


def _pick(random: Random, values: Sequence[T]) -> T:
    return values[int(random.random() * len(values))]
