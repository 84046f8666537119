"""Show one packed sequence as a person reads it: its text, which tokens count in the loss, where documents begin.

Prints as text, and is static HTML in a notebook. What counts is read off the labels of the batch itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from surokit.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Run:
    """A Run is tokens in a row that all count in the loss, or all do not.

    Attributes:
        start: the first token's place in the sequence.
        tokens: how many there are.
        counts: whether they count in the loss.
        text: theirs; the ids where there is no tokenizer.
        begins: the number in the sequence, from 1 on, of the document that begins here, else 0.
    """

    start: int
    tokens: int
    counts: bool
    text: str
    begins: int = 0


@dataclass(frozen=True)
class Example:
    """An Example is one packed sequence, as `Batches.example` returns it; `print` gives text, a notebook shows HTML.

    Attributes:
        title: which sequence of which data.
        runs: the tokens in order, padding left out.
        padding: tokens at the end that only fill the sequence.
        unit: "document" or "conversation"; "" where it is not known where they begin.
    """

    title: str
    runs: tuple[Run, ...]
    padding: int
    unit: str

    @property
    def tokens(self) -> int:
        """Return the number of tokens that are not padding."""
        return sum(run.tokens for run in self.runs)

    @property
    def counted(self) -> int:
        """Return the number of tokens that count in the loss."""
        return sum(run.tokens for run in self.runs if run.counts)

    @property
    def line(self) -> str:
        """Return the numbers in one line."""
        padding = f", {self.padding:,} of padding" if self.padding else ""
        return (
            f"{self.title}: {self.tokens:,} tokens, of which {self.counted:,} count in the loss and "
            f"{self.tokens - self.counted:,} are masked{padding}"
        )

    def _heading(self, run: Run) -> str:
        """Return the line above a run that begins a document, or goes on with one; "" above other runs."""
        if run.begins:
            return f"{self.unit} {run.begins}, from token {run.start}"
        goes_on = run.start == 0 and self.unit
        return f"the rest of a {self.unit} that began in an earlier sequence" if goes_on else ""

    def __str__(self) -> str:
        lines = [self.line]
        width = len(f"{max((run.tokens for run in self.runs), default=0):,}")
        for run in self.runs:
            if heading := self._heading(run):
                lines += ["", heading]
            marks = f"{'counts' if run.counts else 'masked'} {run.tokens:>{width},}  "
            for part in _lines(run.text):
                lines.append("  " + marks + part)
                marks = " " * len(marks)
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = [f"<div>{escape(self.line)}</div>"]
        for run in self.runs:
            if heading := self._heading(run):
                parts.append(f'<div style="margin-top:.6em;font-weight:bold">{escape(heading)}</div>')
            # The colours are seen on a light and on a dark page; underlined, they are not all that tells.
            style = "background:rgba(46,160,67,.25);text-decoration:underline" if run.counts else "opacity:.65"
            what = f"{run.tokens:,} token{'s' * (run.tokens > 1)}, {'count' if run.counts else 'masked'}"
            text = "\n".join(_lines(run.text)) + "\n" * run.text.endswith("\n")
            parts.append(f'<span style="{style}" title="{what}">{escape(text)}</span>')
        body = "".join(parts[1:])
        return (
            f"{parts[0]}<div>Underlined: counts in the loss. Pale: masked. ↵: a line break.</div>"
            f'<div style="white-space:pre-wrap;font-family:monospace;max-height:40em;overflow:auto">{body}</div>'
        )


def look_at(
    ids_T: NDArray[np.int64],
    labelled_T: NDArray[np.bool_],
    firsts: Sequence[int],
    *,
    padding: int,
    tokenizer: Tokenizer | None,
    unit: str,
    title: str,
) -> Example:
    """Return the example of one sequence.

    Args:
        ids_T: token ids without padding, [T].
        labelled_T: True where the label is the token, [T].
        firsts: places of documents' first tokens, ascending.
        padding, tokenizer, unit, title: as in Example.
    """
    counts_T = labelled_T.copy()
    counts_T[:1] = False  # nothing stands before the first token to predict it from
    changes = np.flatnonzero(counts_T[1:] != counts_T[:-1]) + 1
    edges = sorted({0, *firsts, *changes.tolist(), len(ids_T)})
    numbers = {first: number for number, first in enumerate(firsts, 1)}
    texts = _texts(ids_T, edges, numbers, tokenizer)
    runs = tuple(
        Run(start, end - start, bool(counts_T[start]), text, numbers.get(start, 0))
        for (start, end), text in zip(pairwise(edges), texts)
    )
    return Example(title, runs, padding, unit)


def _texts(
    ids_T: NDArray[np.int64], edges: Sequence[int], firsts: dict[int, int], tokenizer: Tokenizer | None
) -> Iterator[str]:
    """Yield the text between each two edges. A decoder may drop a text's first blank, so a run is what its document grows by."""
    begin, before = 0, ""
    for start, end in pairwise(edges):
        if tokenizer is None:
            yield " ".join(map(str, ids_T[start:end].tolist()))
            continue
        if start in firsts:
            begin, before = start, ""
        text = tokenizer.decode(ids_T[begin:end])
        whole = text.startswith(before)
        yield text[len(before) :] if whole else tokenizer.decode(ids_T[start:end])
        before = text


def _lines(text: str) -> list[str]:
    """Return the lines of a text, each with a sign for the line break that ends it."""
    lines = text.split("\n")
    return [f"{line}↵" for line in lines[:-1]] + ([lines[-1]] if lines[-1] or len(lines) == 1 else [])
