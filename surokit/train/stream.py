"""A stream gives the batches that a session trains on, without end, with a position that survives a restart.

Several processes that train together read the same source, and rank r of N keeps the batches r, r + N, r + 2N ...: together they
take what one process with as many times the accumulation takes, from the same position on any number of them.

A position is (epoch, batches taken in it). Sources that have state_dict() / load_state_dict() keep it themselves; any
other re-iterable is started again with the random state that its epoch began with and moved forward batch by batch, which
reproduces lists and torch's DataLoader, shuffled or not. (Per-item randomness of a dataset is not reproduced by that.)
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from surokit.train.errors import ResumeError
from surokit.train.random_state import RandomState, kept, mixed

Batch = Mapping[str, Tensor]
Guard = Callable[[], AbstractContextManager[None]]

_HASHED_BYTES = 64 << 20
_CPU = torch.device("cpu")


class Stream:
    """A Stream gives the batches of `source`, epoch after epoch. Iterating gives the rest of the current epoch, `draw` never ends.

    source: re-iterable of dicts {"input_ids": int64 [B, T], "labels": int64 [B, T], ...}. One with fork(), as ours has,
        is read through a reader of the stream's own.
    accumulate: batches an optimizer step takes. Iterating joins as many along B: a step takes what a loop gives.
    guard, loop: contexts that the owner wants around a draw and around a whole loop over the stream.
    part: (rank, ranks), which of the batches are this process' own. Others are read and left out.
    seed: what the source draws depends on it and on the epoch alone, so that it draws the same in all processes. None lets it
        draw from the random state in force.
    """

    def __init__(
        self,
        source: Iterable[Batch],
        accumulate: int = 1,
        *,
        guard: Guard = nullcontext,
        loop: Guard = nullcontext,
        part: tuple[int, int] = (0, 1),
        seed: int | None = None,
    ) -> None:
        check_source(source)
        fork = getattr(source, "fork", None)
        self.source: Any = fork() if callable(fork) else _exact(source)
        self.accumulate = accumulate
        self.part, self.seed = part, seed
        self._own: RandomState | None = None  # what the source draws from, where it has a seed
        self.waited_ms = 0.0  # for batches, since the owner last set it to 0
        self._guard, self._loop = guard, loop
        self.on_draw: Callable[[list[Batch]], None] | None = None
        self._at = _Position(0, 0, {})
        self._iterator: Iterator[Batch] | None = None
        self._broken = False  # the iterator was left in the middle of a batch, by an error or an interrupt
        self._begun: dict[str, Any] | None = None  # the states at the start of an epoch that the last draw began
        self._taken: list[tuple[Batch, _Position]] = []  # by the last draw, each with the position after it
        self._before = self._at
        self._returned: deque[tuple[Batch, _Position]] = deque()

    @property
    def a_step(self) -> int:
        """Return how many batches a step takes, over all processes."""
        return self.accumulate * self.part[1]

    @property
    def tokens(self) -> int:
        """Return how many tokens the last draw took, over all processes."""
        return sum(batch["input_ids"].numel() for batch, _ in self._taken)

    @property
    def epoch(self) -> int:
        """Return the number of epochs begun before this one."""
        return self._at.epoch

    @property
    def index(self) -> int:
        """Return the number of batches taken from this epoch."""
        return self._at.taken

    def draw(self) -> list[Batch]:
        """Return this process' next `accumulate` batches, after a call of `on_draw` with them; where an epoch ends, the next one
        starts."""
        batches = self._group(ends=False)
        if self.on_draw is not None:
            try:
                self.on_draw(batches)
            except BaseException:
                self.give_back()
                raise
        return batches

    def give_back(self) -> None:
        """Undo the last draw, because its step did not happen: the same batches come again."""
        self._returned.extendleft(reversed(self._taken))
        self._taken, self._at = [], self._before

    def __iter__(self) -> Iterator[Batch]:
        """Yield the rest of the current epoch, `accumulate` batches joined to one dict."""
        with self._loop():
            while True:
                epoch = self.epoch
                with self._guard():
                    group = self._group(ends=True)
                if not group:
                    return
                yield join(group)
                if self.epoch != epoch:
                    return

    def __len__(self) -> int:
        """Return the number of optimizer steps an epoch; TypeError where the source has no length."""
        return len(self.source) // self.a_step

    @property
    def tokenizer(self) -> Any:
        return getattr(self.source, "tokenizer", None)

    @property
    def chat_template(self) -> str | None:
        """Return the template that rendered the data's conversations; None where it holds none, or does not say."""
        return getattr(self.source, "chat_template", None)

    @cached_property
    def fingerprint(self) -> str | None:
        return fingerprint(self.source)

    def _group(self, ends: bool) -> list[Batch]:
        """Return `accumulate` batches of this process; with `ends`, none where the epoch is over."""
        began = time.perf_counter()
        self._before, self._taken, self._begun = self._at, [], None
        try:
            for i in range(self.a_step):
                item = self._returned.popleft() if self._returned else self._from_source()
                if item is None:
                    if ends and i == 0:
                        return []
                    item = self._from_source()
                    assert item is not None
                if not self._taken:
                    self._before = self._at  # in the epoch that the first batch may have begun
                self._at = item[1]
                self._taken.append(item)
        except BaseException:
            self.give_back()
            if self._broken:
                self._undo_begun()
            raise
        finally:
            self.waited_ms += (time.perf_counter() - began) * 1e3
        rank, ranks = self.part
        return [batch for batch, _ in self._taken[rank::ranks]]

    def _from_source(self) -> tuple[Batch, _Position] | None:
        """Return the next batch of this epoch and the position after it; None where the epoch ends, and the next one begins."""
        epoch, index, start = self._at
        if self._broken:
            self._iterate_again()
        if self._iterator is None:
            start = self._begun = self._begin_epoch()
            self._at = _Position(epoch, index, start)
        assert self._iterator is not None
        self._broken = True
        with self._draws():
            batch = next(self._iterator, None)
        self._broken = False
        if batch is not None:
            if _stateful(self.source) and index + 1 == _length(self.source):
                # such a source stands at the next epoch's beginning now, so the position has to
                self._iterator = None
                return batch, _Position(epoch + 1, 0, {})
            return batch, _Position(epoch, index + 1, start)
        if index == 0:
            raise ValueError(
                "The data yields no batches: it is empty, or shorter than one batch. "
                "Give more text, a smaller length or a smaller batch."
            )
        self._iterator = None
        self._at = _Position(epoch + 1, 0, {})
        return None

    def _begin_epoch(self) -> dict[str, Any]:
        generator = getattr(self.source, "generator", None)
        if self.seed is not None:
            self._own = RandomState.seeded(mixed(self.seed, self.epoch), _CPU)
        with self._draws():
            start = {
                "random": RandomState.capture(_CPU).to_dict(),
                "generator": generator.get_state() if isinstance(generator, torch.Generator) else None,
                "source": self.source.state_dict() if _stateful(self.source) else None,
            }
            self._iterator = iter(self.source)
        return start

    @contextmanager
    def _draws(self) -> Iterator[None]:
        """Let the source draw in the block: from a state of its own, where it has a seed."""
        if self._own is None:
            yield
            return
        outside = RandomState.capture(_CPU)
        self._own.restore()
        try:
            yield
        finally:
            self._own = RandomState.capture(_CPU)
            outside.restore()

    # -- position

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch taken."""
        exact = _stateful(self.source) and not self._returned
        return {**self._at._asdict(), "source": self.source.state_dict() if exact else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a saved position. ResumeError where the source ends before it or is another one."""
        self._at = self._before = _Position(state["epoch"], state["taken"], dict(state["start"]))
        self._returned.clear()
        self._taken = []
        self._iterator, self._broken = None, False
        if state["source"] is not None and _stateful(self.source):
            self._load_source(state["source"])
            if self._at.start:  # within an epoch: go on in it, and do not take its beginning anew
                self._iterate()
        elif self._at.start:
            self._skip()

    def _load_source(self, state: Any) -> None:
        try:
            self.source.load_state_dict(state)
        except ValueError as error:
            raise ResumeError(f"The data does not take the position of the checkpoint: {error}") from error

    def _iterate_again(self) -> None:
        """Iterate the source again from the position on: a generator that raised or was interrupted is over, and would end the
        epoch."""
        self._iterator = None
        if self._at.start and _stateful(self.source):
            self._iterate()
        elif self._at.start:
            self._skip()
        self._broken = False

    def _undo_begun(self) -> None:
        """Put back the random states of an epoch that the last draw began, so that the same batches come again."""
        if not _stateful(self.source):
            self._returned.clear()  # the position is before them
            if self._at.start is self._begun:
                self._at = self._at._replace(start={})
        if self._begun is not None:
            self._put(self._begun)

    def _iterate(self) -> None:
        """Iterate a source that keeps its position itself."""
        if self.seed is not None and self._own is None:
            self._own = RandomState.from_dict(self._at.start["random"], _CPU)
        with self._draws():
            self._iterator = iter(self.source)

    def _put(self, start: Mapping[str, Any]) -> None:
        """Put in force the random states with which an epoch begins."""
        random = RandomState.from_dict(start["random"], _CPU)
        if self.seed is None:
            random.restore()
        else:
            self._own = random
        if start["generator"] is not None and hasattr(self.source, "generator"):
            self.source.generator.set_state(start["generator"])

    def _skip(self) -> None:
        start = self._at.start
        with kept(_CPU):
            self._put(start)
            if start["source"] is not None and _stateful(self.source):
                self._load_source(start["source"])
            with self._draws():
                self._iterator = iter(self.source)
                done = sum(1 for _ in islice(self._iterator, self.index))
                if done < self.index:
                    raise ResumeError(
                        f"The data ends after {done} batches and the checkpoint was made after {self.index}: "
                        "resume with the data that the run was started with."
                    )
                if not self.index and not _stateful(self.source):
                    # a loader's sampler draws when the first batch is asked for
                    self._iterator = chain(list(islice(self._iterator, 1)), self._iterator)


class _Replayed:
    """A _Replayed is a source that is read again up to where a run goes on, whatever position it keeps itself."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._source)

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict"):
            raise AttributeError(name)
        return getattr(self._source, name)


def _exact(source: Any) -> Any:
    """Return the source, if a position that it keeps is exact: that of a streaming data set of Hugging Face leaves the rows in a
    shuffle buffer out, and holds for every epoch that follows."""
    return _Replayed(source) if type(source).__module__.startswith("datasets.") and _stateful(source) else source


class _Position(NamedTuple):
    epoch: int
    taken: int
    start: dict[str, Any]  # the states with which the epoch began; empty where it has not begun


def check_source(source: Any) -> None:
    """Raise TypeError for what cannot be iterated again and again."""
    if isinstance(source, Iterator):
        raise TypeError(
            "The data is an iterator that can be read only once, so it can neither start a second epoch nor be resumed: "
            "pass a list, a DataLoader or surokit.text(...)."
        )
    if not isinstance(source, Iterable) and not hasattr(source, "__getitem__"):
        raise TypeError(f"The data must yield batches when iterated, and a {type(source).__name__} cannot be iterated.")
    if isinstance(source, Mapping):
        raise TypeError("The data must be an iterable of batches and this is one dict: put it in a list, data=[batch].")


def check_batch(batch: Any, vocabulary: int | None = None) -> None:
    """Raise ValueError or TypeError that says what a batch must look like; host work only.

    vocabulary: the model's number of tokens; ids and labels on the host must lie below it. On a GPU they are not looked at, since
    that would wait for it.
    """
    if not isinstance(batch, Mapping):
        raise TypeError(f'A batch is a dict {{"input_ids": [B, T], "labels": [B, T]}}, not a {type(batch).__name__}.')
    for name in ("input_ids", "labels"):
        value = batch.get(name)
        if value is None:
            raise ValueError(f"The batch has no tensor {name!r}; it has {', '.join(map(str, batch)) or 'nothing'}.")
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{name} of the batch is a {type(value).__name__}, and a batch holds tensors, int64 [B, T]: "
                f"torch.tensor(batch[{name!r}]) makes one of rows of equal length."
            )
    ids, labels = batch["input_ids"], batch["labels"]
    if ids.shape != labels.shape or ids.ndim != 2 or ids.numel() == 0:
        raise ValueError(
            f"input_ids {list(ids.shape)} and labels {list(labels.shape)} must have one shape [B, T] with B, T >= 1; "
            "labels are not shifted, the model does that."
        )
    if vocabulary is not None:
        _check_range("token id", ids, vocabulary, "use the tokenizer that belongs to the model")
        _check_range("label", labels, vocabulary, "a label is a token id, or -100 where nothing is to be learned")


def _check_range(what: str, values: Tensor, vocabulary: int, remedy: str) -> None:
    if values.device.type != "cpu" or values.is_floating_point():
        return
    numbers = values.numpy()
    outside = (numbers < 0) | (numbers >= vocabulary)
    if what == "label":
        outside &= numbers != -100
    if outside.any():
        raise ValueError(
            f"The batch has the {what} {numbers[outside][0]}, and the model's vocabulary goes from 0 to {vocabulary - 1:,}: "
            f"{remedy}."
        )


def join(batches: list[Batch]) -> Batch:
    """Return one dict with the batches along B; ValueError where their other sizes differ."""
    if len(batches) == 1:
        return batches[0]
    try:
        return {name: torch.cat([b[name] for b in batches]) for name in batches[0]}
    except RuntimeError as error:
        shapes = ", ".join(str(list(b["input_ids"].shape)) for b in batches)
        raise ValueError(
            f"Batches of different lengths ({shapes}) cannot be joined into one step: use session.run(), "
            "or pass session.step() a list of batches."
        ) from error


def fingerprint(source: Any) -> str | None:
    """Return a text that identifies the data: its own `fingerprint`, or a hash of a list's batches; None where it has neither."""
    own = getattr(source, "fingerprint", None)
    if isinstance(own, str):
        return own
    if not isinstance(source, (list, tuple)):
        return None
    digest = hashlib.sha256(str(len(source)).encode())
    hashed = 0
    for batch in source:
        for name in ("input_ids", "labels"):
            tensor = batch.get(name) if isinstance(batch, Mapping) else None
            if isinstance(tensor, Tensor) and hashed < _HASHED_BYTES:
                digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
                digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
                hashed += tensor.nbytes
    return digest.hexdigest()[:16]


def _stateful(source: Any) -> bool:
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")


def _length(source: Any) -> int | None:
    return len(source) if hasattr(source, "__len__") else None
