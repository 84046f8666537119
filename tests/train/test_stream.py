"""The stream of batches: endless, resumable, refusing what cannot be."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import surokit as sk
from surokit.data.batches import Batches
from surokit.train.errors import ResumeError
from surokit.train.setup import Vocabulary
from surokit.train.stream import Batch, Stream, check_batch, fingerprint, join
from tests.refusals import refused
from tests.train.toys import VOCAB, Toy, assert_same_state, make_batches, make_session, whole


class Loader:
    """Only iterable; knows neither its length nor its position."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


def collate(rows: list[Any]) -> Batch:
    ids = torch.stack([row[0] for row in rows])
    return {"input_ids": ids, "labels": ids}


def make_loader(generator: bool = False, seed: int = 0) -> DataLoader[Any]:
    dataset = TensorDataset(torch.arange(14 * 4).reshape(14, 4))
    own = torch.Generator().manual_seed(seed) if generator else None
    return DataLoader(dataset, batch_size=2, shuffle=True, collate_fn=collate, generator=own)


def make_text() -> Batches:
    import numpy as np

    return Batches(np.arange(15 * 4, dtype=np.uint16).reshape(15, 4), batch=2, seed=3)


SOURCES: dict[str, Callable[[], Any]] = {
    "list": make_batches,
    "iterable": lambda: Loader(make_batches()),
    "loader": make_loader,
    "loader with a generator": lambda: make_loader(generator=True),
    "ours": make_text,
}


def take(stream: Stream, draws: int) -> list[list[int]]:
    return [[int(v) for batch in stream.draw() for v in batch["input_ids"][:, 0]] for _ in range(draws)]


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("before", [0, 1, 4, 7, 9])
def test_a_position_continues(name: str, accumulate: int, before: int) -> None:
    torch.manual_seed(5)
    stream = Stream(SOURCES[name](), accumulate)
    take(stream, before)
    state = copy.deepcopy(stream.state_dict())
    random = torch.get_rng_state()
    expected = take(stream, 12)
    torch.manual_seed(99)
    fresh = Stream(SOURCES[name](), accumulate)
    fresh.load_state_dict(state)
    torch.set_rng_state(random)  # what a session restores after the position
    assert take(fresh, 12) == expected


@pytest.mark.parametrize("name", SOURCES)
def test_every_epoch_has_every_batch_once(name: str) -> None:
    stream = Stream(SOURCES[name]())
    epochs = [take(stream, 7), take(stream, 7)]
    assert sorted(epochs[0]) == sorted(epochs[1]) or name in ("ours", "loader", "loader with a generator")
    for epoch in epochs:
        rows = [row for batch in epoch for row in batch]
        assert len(rows) == len(set(rows)) or name in ("list", "iterable")
    if name.startswith(("loader", "ours")):
        assert epochs[0] != epochs[1], "shuffled anew"


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize(("accumulate", "before"), [(2, 1), (2, 2), (2, 3), (2, 4), (2, 8), (1, 7), (1, 8), (1, 15)])
def test_a_draw_given_back_comes_again(name: str, accumulate: int, before: int) -> None:
    """Also across the end of an epoch (7 batches) and behind it, and also from a position saved in between."""
    torch.manual_seed(5)
    plain = Stream(SOURCES[name](), accumulate)
    take(plain, before - 1)
    expected = take(plain, 12)
    torch.manual_seed(5)
    stream = Stream(SOURCES[name](), accumulate)
    take(stream, before)
    stream.give_back()
    state, random = copy.deepcopy(stream.state_dict()), torch.get_rng_state()
    assert take(stream, 12) == expected
    if name == "loader" and (accumulate, before) == (2, 4):
        return  # the draw began an epoch on its way, of which a position in the one before knows nothing
    for source in (SOURCES[name](), stream.source):  # one that begins, and one that is elsewhere
        fresh = Stream(source, accumulate)
        fresh.load_state_dict(state)
        torch.set_rng_state(random)  # what a session restores after the position
        assert take(fresh, 12) == expected


def test_iterating_gives_an_epoch_and_goes_on() -> None:
    stream = Stream(make_batches(5))
    first = [batch["input_ids"] for batch in stream]
    assert len(first) == 5
    for batch in stream:
        assert torch.equal(batch["input_ids"], first[0])
        break
    assert (stream.epoch, stream.index) == (1, 1)
    assert len(list(stream)) == 4, "the rest of the epoch"


def test_iterating_joins_what_a_step_takes() -> None:
    stream = Stream(make_batches(5, rows=2), accumulate=2)
    batches = list(stream)
    assert [len(b["input_ids"]) for b in batches] == [4, 4, 4], "the last one reaches into the next epoch"
    assert (stream.epoch, stream.index) == (1, 1)
    assert len(stream) == 2


def test_ours_is_read_by_a_reader_of_its_own() -> None:
    source = make_text()
    one, two = Stream(source), Stream(source)
    assert take(one, 3) == take(two, 3)
    assert source.state_dict()["index"] == 0


def test_waiting_is_measured() -> None:
    stream = Stream(make_batches())
    take(stream, 1)
    assert stream.waited_ms > 0


@pytest.mark.parametrize("source", [[], Loader([])])
def test_empty_data(source: Iterable[Batch]) -> None:
    with refused(ValueError):
        Stream(source).draw()


@pytest.mark.parametrize(
    "source",
    [
        iter(make_batches()),
        (b for b in make_batches()),
        make_batches()[0],
        3,
    ],
)
def test_what_is_no_source(source: Any) -> None:
    with refused(TypeError):
        Stream(source)


def test_data_that_became_shorter() -> None:
    stream = Stream(Loader(make_batches(7)))
    take(stream, 5)
    with refused(ResumeError):
        Stream(Loader(make_batches(3))).load_state_dict(stream.state_dict())


def test_a_source_that_refuses_the_position() -> None:
    stream = Stream(make_text())
    take(stream, 2)
    import numpy as np

    other = Stream(Batches(np.zeros((15, 4), dtype=np.uint16), batch=2, seed=3))
    with refused(ResumeError):
        other.load_state_dict(stream.state_dict())


def test_fingerprints() -> None:
    batches = make_batches()
    changed = copy.deepcopy(batches)
    changed[3]["labels"][0, 0] = -100
    assert fingerprint(batches) == fingerprint(make_batches())
    assert fingerprint(batches) != fingerprint(changed)
    assert fingerprint(batches) != fingerprint(batches[:-1])
    assert fingerprint(make_text()) == make_text().fingerprint
    assert fingerprint(Loader(batches)) is None


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        ([1, 2], TypeError),
        ({"input_ids": torch.zeros(2, 3, dtype=torch.long)}, ValueError),
        ({"input_ids": [[1]], "labels": [[1]]}, TypeError),
        ({"input_ids": torch.zeros(1, 1), "labels": np.zeros((1, 1))}, TypeError),
        ({"input_ids": torch.zeros(2, 3), "labels": torch.zeros(2, 4)}, ValueError),
        ({"input_ids": torch.zeros(3), "labels": torch.zeros(3)}, ValueError),
        ({"input_ids": torch.zeros(0, 3), "labels": torch.zeros(0, 3)}, ValueError),
    ],
)
def test_what_is_no_batch(batch: Any, error: type[Exception]) -> None:
    with refused(error):
        check_batch(batch)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("input_ids", 32),
        ("input_ids", -1),
        ("input_ids", -100),
        ("labels", 32),
        ("labels", -1),
    ],
)
def test_numbers_outside_of_the_vocabulary(name: str, value: int) -> None:
    batch = make_batches(1)[0]
    batch[name][1, 2] = value
    check_batch(batch)
    with refused(ValueError):
        check_batch(batch, VOCAB)


def test_labels_that_do_not_count_are_no_numbers_outside() -> None:
    batch = make_batches(1)[0]
    batch["labels"][:, 3:] = -100
    check_batch(batch, VOCAB)


@pytest.mark.parametrize("name", ["input_ids", "labels"])
def test_a_session_refuses_them_before_the_step(name: str) -> None:
    """In a step, and where it evaluates."""
    batches = make_batches(2)
    batches[1][name][0, 3] = VOCAB
    session = make_session(data=batches)
    with refused(ValueError):
        session.run(2)
    assert session.steps == 1
    with refused(ValueError):
        session.evaluate(batches)


class OwnTable(Toy):
    """Its tokens come from a parameter, and an embedding is there for something else."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2 * VOCAB, 16))
        self.lm_head = nn.Linear(16, 2 * VOCAB, bias=False)
        self.embed.forward = lambda ids: nn.functional.embedding(ids, self.table)  # type: ignore[assignment]


def test_what_may_be_no_vocabulary_refuses_nothing() -> None:
    batches = make_batches(2)
    batches[1]["input_ids"][0, 3] = batches[1]["labels"][0, 3] = 2 * VOCAB - 1
    session = make_session(OwnTable(), batches)
    session.run(2)
    assert session.steps == 2
    session.evaluate(batches)


@pytest.mark.parametrize(("stated", "asked"), [("get_input_embeddings", 1), ("", 2)])
def test_what_a_model_states_is_held_against_batches_before_it_is_called(stated: str, asked: int) -> None:
    class Counting(Toy):
        calls = 0

        def forward(self, *args: Any, **options: Any) -> Any:
            self.calls += 1
            return super().forward(*args, **options)

    model = Counting()
    if stated:
        object.__setattr__(model, stated, lambda: model.embed)
    batches = make_batches(2)
    batches[1]["input_ids"][0, 3] = VOCAB
    with refused(ValueError):
        make_session(model, batches).run(2)
    assert model.calls == asked


def test_another_failure_is_not_explained_by_a_guess() -> None:
    class NoRoom(OwnTable):
        def forward(self, *args: Any, **options: Any) -> Any:
            raise torch.OutOfMemoryError

    batches = make_batches(1)
    batches[0]["input_ids"][0, 3] = 2 * VOCAB - 1
    with pytest.raises(torch.OutOfMemoryError):
        make_session(NoRoom(), batches).run(1)


def test_a_decoder_states_its_vocabulary() -> None:
    config = sk.DecoderConfig(layers=1, width=16, heads=2, kv_heads=1, vocab=VOCAB, ffn=24)
    assert Vocabulary.of(sk.Decoder(config)) == Vocabulary(VOCAB, stated=True)
    assert Vocabulary.of(Toy()) == Vocabulary(VOCAB, stated=False)


def test_what_a_gpu_holds_is_not_looked_at() -> None:
    batch = {name: value.to("meta") for name, value in make_batches(1)[0].items()}
    check_batch(batch, 1)


def test_joining_different_lengths() -> None:
    with refused(ValueError):
        join([*make_batches(1, length=4), *make_batches(1, length=5)])


def test_an_interrupted_draw_comes_again() -> None:
    """A generator that is interrupted is over; the epoch is not."""

    class Data(list):  # type: ignore[type-arg]
        calls = 0

        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                Data.calls += 1
                if Data.calls in (4, 6, 19):
                    raise OSError("the disk is away for a moment")
                yield batch

    for accumulate in (1, 2):
        Data.calls = 0
        session = make_session(data=Data(make_batches()), accumulate=accumulate)
        while session.steps < 9:
            with suppress(OSError):
                session.run(9 - session.steps)
        assert_same_state(session, whole(9, accumulate=accumulate))


def test_a_shuffled_loader_whose_first_batch_fails() -> None:
    """What the beginning of an epoch drew is drawn again."""

    class Data(torch.utils.data.Dataset[Any]):
        fails = True

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            if Data.fails and session.steps == 2:
                Data.fails = False
                raise OSError("the disk is away for a moment")
            return {name: value[0] for name, value in batches[index].items()}

    batches = make_batches(8)
    Data.fails = True
    session = make_session(data=torch.utils.data.DataLoader(Data(), batch_size=4, shuffle=True))
    with refused(OSError):
        session.run(5)
    session.run(3)
    Data.fails = False
    assert_same_state(session, whole(5, data=torch.utils.data.DataLoader(Data(), batch_size=4, shuffle=True)))


# -- several processes, each with its part


class _Rows:
    """Batches of one row, each with its number."""

    @staticmethod
    def all(count: int = 26) -> list[Batch]:
        return [{"input_ids": torch.full((1, 4), i), "labels": torch.full((1, 4), i)} for i in range(count)]

    @staticmethod
    def shuffled() -> Any:
        rows: Any = [{name: t[0] for name, t in batch.items()} for batch in _Rows.all()]
        return DataLoader(rows, batch_size=1, shuffle=True)

    @staticmethod
    def streamed() -> Any:
        """A streaming data set of Hugging Face."""
        rows = [{name: t[0].tolist() for name, t in batch.items()} for batch in _Rows.all()]
        return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=3).with_format("torch").batch(1)

    @staticmethod
    def streamed_and_shuffled() -> Any:
        """The same with a buffer, whose rows its own position leaves out."""
        return _Rows.streamed().shuffle(seed=5, buffer_size=7)


def _parts(source: Callable[[], Any], ranks: int, a_step: int, state: Any = None) -> list[Stream]:
    """The streams of so many processes that take `a_step` batches a step between them, from a position on."""
    streams = [Stream(source(), a_step // ranks, part=(rank, ranks), seed=11) for rank in range(ranks)]
    for stream in streams:
        if state is not None:
            stream.load_state_dict(state)
    return streams


def _taken(streams: list[Stream], steps: int) -> list[int]:
    """The rows that steps took, in the order of the source."""
    taken: list[int] = []
    for step in range(steps):
        torch.manual_seed(step)  # what else draws is not the same in all processes, nor is it the next time
        groups = [[int(batch["input_ids"][0, 0]) for batch in stream.draw()] for stream in streams]
        taken += [row for rows in zip(*groups, strict=True) for row in rows]
    return taken


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
@pytest.mark.parametrize("source", [_Rows.all, _Rows.shuffled, _Rows.streamed, _Rows.streamed_and_shuffled])
def test_processes_take_what_one_takes_from_wherever_others_stopped(source: Callable[[], Any], ranks: int) -> None:
    expected = _taken(_parts(source, 1, 6), 11)  # 66 of 26 rows: over the ends of two epochs
    assert sorted(expected[:26]) == [*range(26)]
    streams = _parts(source, ranks, 6)
    taken = _taken(streams, 4)
    states = [stream.state_dict() for stream in streams]
    assert all(state["taken"] == states[0]["taken"] for state in states)
    for others in (2, 3, 1):  # each goes on from what the one before has left
        streams = _parts(source, others, 6, states[0])
        taken += _taken(streams, 2)
        states = [stream.state_dict() for stream in streams]
    assert taken + _taken(_parts(source, ranks, 6, states[0]), 1) == expected


def test_a_draw_that_is_given_back_comes_again_in_parts() -> None:
    stream = _parts(_Rows.all, 2, 4)[1]
    first = stream.draw()
    assert stream.tokens == 4 * 4  # of both processes
    stream.give_back()
    assert [int(b["input_ids"][0, 0]) for b in stream.draw()] == [int(b["input_ids"][0, 0]) for b in first] == [1, 3]
