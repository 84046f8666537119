"""Classify sentences, in the form of GLUE: rows with a sentence, or two, and an integer label.

A row becomes text, "sentence: the film was a joy\nlabel:", and the model is trained to go on with the word of the label,
" positive". It is graded by which of the labels' words has the largest logit there.

N rows, B batch, T tokens, V vocabulary, C labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from surokit.data import Tokenizer, load_tokenizer
from surokit.data.batches import Batches, check_positive
from surokit.data.sources import from_hub, read
from surokit.statistics import Interval, percentile_interval
from surokit.tasks.grading import IGNORED, Batch, Score, Task, asked, placed
from surokit.tasks.problems import is_test

TAIL = "\nlabel:"  # behind the sentences, before the word
RESAMPLES = 2000
TESTS_AT_ONCE = 32  # the logits of a large vocabulary take room: 32 x 128 x 128,000 of them are 1 GiB in bfloat16


@dataclass(frozen=True)
class GlueTask:
    """A GlueTask holds the columns of a task of GLUE (Wang et al., arXiv:1804.07461), its labels' words, and its rows for tests."""

    columns: tuple[str, ...]
    words: tuple[str, ...]
    test: str = "validation"  # GLUE publishes no labels of its test split


GLUE = {
    "cola": GlueTask(("sentence",), ("wrong", "right")),
    "sst2": GlueTask(("sentence",), ("negative", "positive")),
    "mrpc": GlueTask(("sentence1", "sentence2"), ("different", "same")),
    "qqp": GlueTask(("question1", "question2"), ("different", "same")),
    "mnli": GlueTask(("premise", "hypothesis"), ("entailment", "neutral", "contradiction"), "validation_matched"),
    "qnli": GlueTask(("question", "sentence"), ("answer", "different")),
    "rte": GlueTask(("sentence1", "sentence2"), ("true", "false")),
    "wnli": GlueTask(("sentence1", "sentence2"), ("false", "true")),
}


@dataclass(frozen=True)
class ClassScore(Score):
    """A ClassScore counts rows by their label and by the label that the model gave them.

    confusion: [C][C], the true label first. Label 1 is what F1 is of.
    """

    confusion: tuple[tuple[int, ...], ...]

    @property
    def f1(self) -> Interval:
        """Return F1 of label 1, 2 tp / (2 tp + fp + fn), with a 95 % bootstrap interval. Raises ValueError for more than two
        labels."""
        if len(self.confusion) != 2:
            raise ValueError(
                f"F1 is of two labels, and these rows have {len(self.confusion)}: read accuracy or matthews."
            )
        return self._drawn(lambda count: _ratio(2 * count[:, 1, 1], count[:, 1].sum(1) + count[:, :, 1].sum(1)))

    @property
    def matthews(self) -> Interval:
        """Return Matthews' correlation (1975), for more than two labels Gorodkin's (2004), with a 95 % bootstrap interval."""
        return self._drawn(_matthews)

    def _drawn(self, measure: Callable[[NDArray[np.int64]], NDArray[np.float64]]) -> Interval:
        """Return a measure of the counts [*, C, C], and the ends between which it lies for rows drawn again."""
        counts = np.array(self.confusion, np.int64)
        drawn = np.random.default_rng(0).multinomial(self.total, counts.ravel() / self.total, RESAMPLES)
        low, high = percentile_interval(measure(drawn.reshape(-1, *counts.shape)))
        return Interval(low, float(measure(counts[None])[0]), high)

    def __str__(self) -> str:
        two = f", F1 {self.f1}" if len(self.confusion) == 2 else ""
        return f"{Score.__str__(self)}{two}, Matthews {self.matthews}"


def _ratio(above: NDArray[Any], below: NDArray[Any]) -> NDArray[np.float64]:
    """Return above / below, 0 where below is 0, as scikit-learn has it."""
    return np.divide(above, below, out=np.zeros(len(below)), where=below > 0)


def _matthews(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    true_C, given_C = counts.sum(2).astype(float), counts.sum(1).astype(float)
    total = true_C.sum(1)
    right = np.trace(counts, axis1=1, axis2=2)
    below = (total**2 - (given_C**2).sum(1)) * (total**2 - (true_C**2).sum(1))
    return _ratio(right * total - (true_C * given_C).sum(1), np.sqrt(below))


class Classification(Task):
    """A Classification trains a model to name the label of a sentence, or of two, by a word.

    Args:
        source: rows, as `sk.text` takes records: a .jsonl, .json or .parquet file, a folder of them, an object of `datasets`, a
            list of dicts, or a dataset id; or a task of GLUE, "glue/sst2" (cola, mrpc, qqp, mnli, qnli, rte, wnli).
        tokenizer: the model's; whatever `load_tokenizer` takes.
        test: rows for tests, of the same kinds. Where not given they are GLUE's validation rows; else one row of eight, by a hash
            of its sentences, so that rows with the same sentences are on one side.
        columns: of the sentences, in order; "sentence", or "sentence1" and "sentence2", where not given.
        words: of the labels 0, 1, ...; a word's first token stands for it. Without them "no" and "yes".
        label: the column of the labels.
        length: tokens of a sequence; longer sentences are cut, the longest first.
        split: of a source that has splits.

    Raises:
        FileNotFoundError: no such source or tokenizer, or the Hub does not answer.
        ValueError: no such column, a label without a word, words that begin with one token, no rows to train on or to test.
    """

    def __init__(
        self,
        source: Any,
        tokenizer: Any,
        *,
        test: Any = None,
        columns: Sequence[str] | None = None,
        words: Sequence[str] | None = None,
        label: str = "label",
        length: int = 128,
        split: str = "train",
    ) -> None:
        check_positive("length", length)
        self.tokenizer: Tokenizer = load_tokenizer(tokenizer)
        self._length = length
        if isinstance(source, str) and source.startswith("glue/"):
            known, source, found = _of_glue(source, split)
            columns, words = columns or known.columns, words or known.words
            test = found if test is None else test
        self.words = tuple(words or ("no", "yes"))
        self._words_C = _first_tokens(self.words, self.tokenizer)
        self.name, rows = read_rows(source, split, columns, label, len(self.words))
        if test is None:
            held_N = is_test(_identities(rows))
            rows, tests = [r for r, held in zip(rows, held_N) if not held], [r for r, held in zip(rows, held_N) if held]
        else:
            tests = read_rows(test, split, columns or list(rows[0].sentences), label, len(self.words))[1]
        for purpose, some in (("train on", rows), ("test", tests)):
            if not some:
                raise ValueError(f"{self.name} has no rows to {purpose}: give more, or rows for tests as test=.")
        self._train, self._tests = self._tokenized(rows), self._tokenized(tests)

    @property
    def vocab(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def length(self) -> int:
        return self._length

    def batches(self, batch: int = 32, seed: int = 0) -> Batches:
        """Return the training rows as shuffled batches, epoch after epoch, one row a sequence, of which the label's word alone
        counts in the loss."""
        ids_NT, at_N, _ = self._train
        trained_NT = np.arange(self.length) == at_N[:, None]
        return Batches(
            ids_NT,
            batch=batch,
            seed=seed,
            trained_ST=trained_NT,
            filled_S=at_N + 1,
            firsts_N=np.arange(len(ids_NT)) * self.length,
            tokenizer=self.tokenizer,
            name=self.name,
        )

    def held_out(self, problems: int | None = None, batch: int = TESTS_AT_ONCE) -> list[Batch]:
        """Return the test rows as batches, the first `problems` of them in an order that is always the same. Raises ValueError
        where there are fewer."""
        check_positive("batch", batch)
        ids_NT, at_N, _ = self._tests
        order_N = self._order(problems)
        ids = torch.from_numpy(ids_NT[order_N].astype(np.int64))
        word_N = torch.from_numpy(at_N[order_N])[:, None]
        labels = torch.full_like(ids, IGNORED).scatter(1, word_N, ids.gather(1, word_N))
        return [{"input_ids": i, "labels": y} for i, y in zip(ids.split(batch), labels.split(batch))]

    def right(self, model: nn.Module, problems: int | None = None, batch: int = TESTS_AT_ONCE) -> Tensor:
        given_N = self.labels_given(model, problems, batch)
        return given_N == placed(torch.from_numpy(self._tests.labels_N[self._order(problems)]), given_N.device)

    def labels_given(self, model: nn.Module, problems: int | None = None, batch: int = TESTS_AT_ONCE) -> Tensor:
        """Return the labels that `model` gives the test rows, int64 [N] on its device: those of the largest logits."""
        at_N = torch.from_numpy(self._tests.at_N[self._order(problems)])
        found = []
        with asked(model) as device:
            words_C = placed(torch.tensor(self._words_C, device="cpu"), device)
            for rows, at_B in zip(self.held_out(problems, batch), placed(at_N, device).split(batch)):
                logits_BTV = model(input_ids=placed(rows["input_ids"], device)).logits
                here_BV = logits_BTV[torch.arange(len(at_B), device=device), at_B - 1]
                found.append(here_BV[:, words_C].argmax(1))
        return torch.cat(found)

    def grade(self, model: nn.Module, problems: int | None = None, batch: int = TESTS_AT_ONCE) -> ClassScore:
        """Return how many test rows `model` labels right, and F1 and Matthews' correlation with it; waits for the device once."""
        given_N = self.labels_given(model, problems, batch).cpu().numpy()
        count = len(self.words)
        true_N = self._tests.labels_N[self._order(problems)]
        confusion = np.bincount(true_N * count + given_N, minlength=count * count).reshape(count, count)
        return ClassScore(int(np.trace(confusion)), len(true_N), tuple(map(tuple, confusion.tolist())))

    def _order(self, problems: int | None) -> NDArray[np.int64]:
        """Return which test rows are asked."""
        count = len(self._tests.at_N)
        if problems is None:
            return np.arange(count)
        check_positive("problems", problems)
        if problems > count:
            raise ValueError(f"{self.name} has {count} test rows, not {problems}: ask for fewer.")
        return np.random.default_rng(0).permutation(count)[:problems]

    def _tokenized(self, rows: Sequence[Row]) -> _Tokenized:
        """Return rows as tokens: what is shown, and right behind it the label's word."""
        opening = [] if self.tokenizer.opening_id is None else [self.tokenizer.opening_id]
        tail = self.tokenizer.encode(TAIL)
        names = list(rows[0].sentences)
        room = self._length - len(opening) - len(tail) - 1
        if room < len(names):
            raise ValueError(f"Classification(length={self._length}) leaves no room for sentences: give more.")
        parts = [
            self.tokenizer.encode_batch([f"{'' if at == 0 else chr(10)}{name}: {row.sentences[name]}" for row in rows])
            for at, name in enumerate(names)
        ]
        ids_NT = np.full((len(rows), self._length), self.tokenizer.eos_id or 0, np.uint32)
        at_N = np.zeros(len(rows), np.int64)
        for n, (row, shown) in enumerate(zip(rows, zip(*parts))):
            ids = [*opening, *chain.from_iterable(_cut(shown, room)), *tail, self._words_C[row.label]]
            ids_NT[n, : len(ids)], at_N[n] = ids, len(ids) - 1
        return _Tokenized(ids_NT, at_N, np.array([row.label for row in rows], np.int64))

    def __repr__(self) -> str:
        words, train, tests = ", ".join(self.words), len(self._train.at_N), len(self._tests.at_N)
        return f"Classification({self.name}: {words}; {train:,} rows to train on, {tests:,} to test)"


class Row(NamedTuple):
    """A Row is the sentences by the names of their columns, and the label."""

    sentences: dict[str, str]
    label: int


class _Tokenized(NamedTuple):
    """Rows as tokens [N, T], the place of each one's word [N], its label [N]."""

    ids_NT: NDArray[np.uint32]
    at_N: NDArray[np.int64]
    labels_N: NDArray[np.int64]


def read_rows(source: Any, split: str, columns: Sequence[str] | None, label: str, labels: int) -> tuple[str, list[Row]]:
    """Return a source's name and its rows. Raises as `Classification` does."""
    name, records = read(source, split, None)
    rows: list[Row] = []
    for where, record in records:
        if not isinstance(record, Mapping):
            raise ValueError(
                f"{where} holds a {type(record).__name__} where a row with sentences and a label is expected."
            )
        columns = columns or _usual_columns(record, where)
        if missing := [column for column in (*columns, label) if column not in record]:
            raise ValueError(
                f"{where} has no column {missing[0]!r}; it has {list(record)}: name them with columns= and label=."
            )
        number = record[label]
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < labels:
            raise ValueError(
                f"{where} has the label {number!r}, and there are words for 0 to {labels - 1}: give a word for each as words=."
            )
        rows.append(Row({column: str(record[column]) for column in columns}, number))
    if not rows:
        raise ValueError(f"there are no rows in {name}")
    return name, rows


def _usual_columns(record: Mapping[str, Any], where: str) -> Sequence[str]:
    for usual in (("sentence1", "sentence2"), ("sentence",)):
        if all(column in record for column in usual):
            return usual
    raise ValueError(
        f"{where} has neither sentence nor sentence1 and sentence2, but {list(record)}: name its sentences as columns=."
    )


def _of_glue(name: str, split: str) -> tuple[GlueTask, Any, Any]:
    """Return a task of GLUE by its name, "glue/sst2", its rows and those for tests."""
    short = name.removeprefix("glue/")
    if short not in GLUE:
        raise ValueError(f"There is no task {name!r} with labels in GLUE: known are {', '.join(GLUE)}.")
    rows, tests = (from_hub("nyu-mll/glue", part, short) for part in (split, GLUE[short].test))
    return GLUE[short], rows, tests


def _first_tokens(words: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    """Return the first token of each word as it stands behind TAIL: alone, some tokenizers put a space before it."""
    tail, found = tokenizer.encode(TAIL), []
    for word in words:
        ids = tokenizer.encode(f"{TAIL} {word}")
        found.append(next(one for one, before in zip_longest(ids, tail) if one != before))
    if len(set(found)) < len(found):
        raise ValueError(
            f"The words {', '.join(words)} do not all begin with a token of their own in this tokenizer ({tokenizer.name}): give "
            "others as words=."
        )
    return found


def _identities(rows: Sequence[Row]) -> NDArray[np.int64]:
    """Return numbers that are equal for equal sentences, [N, 1]."""
    digests = [blake2b("\n".join(row.sentences.values()).encode(), digest_size=8).digest() for row in rows]
    return np.frombuffer(b"".join(digests), np.int64).reshape(-1, 1)


def _cut(parts: Sequence[Sequence[int]], room: int) -> list[Sequence[int]]:
    """Return the parts, cut at their ends to `room` tokens together; the longest is cut first."""
    sizes = [len(part) for part in parts]
    while sum(sizes) > room:
        sizes[sizes.index(max(sizes))] -= 1
    return [part[:size] for part, size in zip(parts, sizes)]
