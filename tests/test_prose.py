"""Every docstring of a module or public name opens with a plain sentence: not with "What ..." or the like, and with a verb.

tests/verbs.txt lists the verbs that are known.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
VERBS = ROOT / "tests" / "verbs.txt"

FORBIDDEN = re.compile(
    r"(what|of|as|whether|who|whose|which|how|where|when|the same|with|without|in|on|from|by|for|if|to)\b",
    re.IGNORECASE,
)
END = re.compile(r"(?<=[.!?])\s+(?=[^a-z\s])|\n\s*\n")  # of a sentence or a paragraph
CODE = re.compile(r"`+[^`]*`+")
# a clause that begins with one of these has a verb of its own, which is not the sentence's
CLAUSE = re.compile(
    r"[:;(]|\b(?:that|which|whose|who|where|when|what|how|whether|if|as|because|while|until|since|than)\b"
)


class Docstring(NamedTuple):
    """The first sentence of a docstring, and where it stands."""

    place: str
    sentence: str


@cache
def verbs() -> tuple[frozenset[str], frozenset[str]]:
    """Return the verbs that may open a sentence, and the forms that may stand behind a subject."""
    openers, forms = VERBS.read_text(encoding="utf-8").split("\n\n")
    words = [
        [w for line in part.splitlines() if not line.startswith("#") for w in line.split()] for part in (openers, forms)
    ]
    return frozenset(words[0]), frozenset(words[1])


def fault(sentence: str) -> str:
    """Return what is wrong with a first sentence, "" where nothing is."""
    if opening := FORBIDDEN.match(sentence):
        return f"opens with {opening[0]!r}"
    openers, forms = verbs()
    first, *rest = re.findall(r"[\w']+", CODE.sub(" x ", sentence).lower()) or [""]
    if (first in ("true", "false") and rest[:1] == ["if"]) or (first in openers and rest[:1] != ["of"]):
        return ""
    main = CLAUSE.split(CODE.sub(" x ", sentence).lower(), maxsplit=1)[0]
    if forms.intersection(re.findall(r"[\w']+", main)):
        return ""
    return "has no verb that tests/verbs.txt knows: add the verb if it is one"


def docstrings(text: str, name: str) -> Iterator[Docstring]:
    """Yield the docstrings of a module and of its public classes, functions and methods."""

    def inside(node: ast.Module | ast.ClassDef, name: str) -> Iterator[tuple[str, str | None]]:
        yield name, ast.get_docstring(node)
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and child.name[0] != "_":
                if isinstance(child, ast.ClassDef):
                    yield from inside(child, f"{name}.{child.name}")
                else:
                    yield f"{name}.{child.name}", ast.get_docstring(child)

    for place, found in inside(ast.parse(text), name):
        if found:
            yield Docstring(place, " ".join(END.split(found, maxsplit=1)[0].split()))


def test_every_docstring_opens_with_a_plain_sentence() -> None:
    faults = [
        f"{each.place}: {each.sentence!r} {why}"
        for folder in ("surokit", "kernels")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for each in docstrings(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
        if (why := fault(each.sentence))
    ]
    assert not faults, "\n".join(faults)


def test_verbs_are_listed_once_and_in_order() -> None:
    for part in VERBS.read_text(encoding="utf-8").split("\n\n"):
        words = [w for line in part.splitlines() if not line.startswith("#") for w in line.split()]
        assert words == sorted(set(words)), f"out of order or twice: {Counter(words) - Counter(sorted(set(words)))}"


@pytest.mark.parametrize(
    "sentence",
    [
        "Return the share of the step.",
        "A Recording holds everything that was observed.",
        "Weights are kept where `device` says.",
        "True if the whole interval lies above zero.",
        "Set out = src[:, index]', in out's dtype.",
        "`verify` is tried first.",
    ],
)
def test_a_plain_sentence_passes(sentence: str) -> None:
    assert not fault(sentence)


@pytest.mark.parametrize(
    ("sentence", "why"),
    [
        ("What is computed of a Recording.", "opens with 'What'"),
        ("Whether it is over; never waits.", "opens with 'Whether'"),
        ("As before the first step.", "opens with 'As'"),
        ("The same, for a file that is written soon.", "opens with 'The same'"),
        ("The step of median length.", "no verb"),
        ("The line that holds the lock.", "no verb"),
        ("Lengths: each is a multiple of 16.", "no verb"),
        ("Share of the step that is idle.", "no verb"),
        ("The result of `is_done`.", "no verb"),
    ],
)
def test_a_fragment_is_found(sentence: str, why: str) -> None:
    assert why in fault(sentence)


def test_public_docstrings_are_found() -> None:
    text = '''"""A."""

def f():
    """B. More."""

def _f():
    """C."""

class K:
    """D
    d:

    e."""

    def g(self):
        """E."""

    def __len__(self):
        """F."""

class _K:
    def h(self):
        """G."""
'''
    assert list(docstrings(text, "m")) == [("m", "A."), ("m.f", "B."), ("m.K", "D d:"), ("m.K.g", "E.")]
