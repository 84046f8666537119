"""Batches: order, position, split, the thread that prepares ahead."""

import math
import threading
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surokit.data.batches import Batches
from tests.refusals import refused


def numbered(sequences: int, batch: int, length: int = 4, **options) -> Batches:
    """Sequence s holds s * length, s * length + 1, ...: every token says where it came from."""
    ids_ST = np.arange(sequences * length, dtype=np.uint32).reshape(sequences, length)
    return Batches(ids_ST, batch=batch, **options)


def rows(batches) -> list[list[int]]:
    return [batch["input_ids"][:, 0].tolist() for batch in batches]


_others: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _only_this_tests_threads():
    """A session of another test file in this process may still hold an open loop: its thread is not counted here."""
    _others.clear()
    _others.update(threading.enumerate())


def workers() -> list[str]:
    new = set(threading.enumerate()) - _others
    return [thread.name for thread in new if thread.name.startswith("surokit-batches")]


# What a batch is -------------------------------------------------------------------------------------------------------


def test_a_batch_is_int64_and_labels_are_the_inputs_unshifted():
    batch = next(iter(numbered(6, 2, length=5)))
    assert batch.keys() == {"input_ids", "labels"}
    assert all(t.dtype == torch.int64 and t.shape == (2, 5) for t in batch.values())
    assert torch.equal(batch["input_ids"], batch["labels"])
    batch["labels"][:] = -100  # their own memory
    assert (batch["input_ids"] >= 0).all()


def test_labels_are_minus_100_where_not_trained_on():
    ids_ST = np.array([[3, 4, 5, 6], [7, 8, 9, 0]], dtype=np.uint16)
    trained_ST = np.array([[False, False, True, True], [False, True, False, False]])
    data = Batches(ids_ST, batch=2, shuffle=False, trained_ST=trained_ST, filled_S=np.array([4, 3]))
    (batch,) = data
    assert batch["labels"].tolist() == [[-100, -100, 5, 6], [-100, 8, -100, -100]]
    assert data.tokens == 7


@given(
    sequences=st.integers(1, 40),
    batch=st.integers(1, 8),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
)
def test_an_epoch_gives_every_sequence_at_most_once_and_whole(sequences, batch, seed, shuffle):
    if sequences < batch:
        with pytest.raises(ValueError, match="fewer than one batch"):
            numbered(sequences, batch, seed=seed, shuffle=shuffle)
        return
    data = numbered(sequences, batch, seed=seed, shuffle=shuffle)
    seen = [row for each in data for row in each["input_ids"].tolist()]
    assert len(seen) == len(data) * batch == sequences // batch * batch
    assert all(row == list(range(row[0], row[0] + 4)) and row[0] % 4 == 0 for row in seen)
    assert len({row[0] for row in seen}) == len(seen)


# Order and position ----------------------------------------------------------------------------------------------------


def test_epochs_differ_in_order_and_the_seed_decides_it():
    data, same, other = numbered(24, 2), numbered(24, 2), numbered(24, 2, seed=1)
    first, second = rows(data), rows(data)
    assert first != second
    assert sorted(chain(*first)) == sorted(chain(*second))
    assert [rows(same), rows(same)] == [first, second]
    assert rows(other) != first


def test_unshuffled_keeps_its_order_every_epoch():
    data = numbered(6, 2, shuffle=False)
    assert rows(data) == rows(data) == [[0, 4], [8, 12], [16, 20]]


@given(st.integers(0, 17), st.integers(0, 2), st.booleans())
def test_resuming_anywhere_equals_not_having_stopped(stop, seed, shuffle):
    whole = numbered(13, 2, seed=seed, shuffle=shuffle)
    uninterrupted = [row for _ in range(4) for row in rows(whole)]
    data, taken = numbered(13, 2, seed=seed, shuffle=shuffle), 0
    while taken < stop:
        for batch in data:
            assert batch["input_ids"][:, 0].tolist() == uninterrupted[taken]
            taken += 1
            if taken == stop:
                break
    resumed = numbered(13, 2, seed=seed, shuffle=shuffle)
    resumed.load_state_dict(data.state_dict())
    rest = [row for _ in range(2) for row in rows(resumed)]
    assert rest == uninterrupted[stop : stop + len(rest)]
    assert len(rest) > 6


def test_a_loop_left_early_is_continued():
    data = numbered(8, 2)
    for batch in data:
        first = batch["input_ids"][:, 0].tolist()
        break
    assert [first, *rows(data)] == rows(numbered(8, 2))


def test_the_position_counts_what_was_handed_out_not_what_was_prepared():
    data = numbered(8, 2)
    loop = iter(data)
    assert (data.state_dict()["epoch"], data.state_dict()["index"]) == (0, 0)
    for expected in [(0, 1), (0, 2), (0, 3), (1, 0)]:
        next(loop)
        assert (data.state_dict()["epoch"], data.state_dict()["index"]) == expected
    with pytest.raises(StopIteration):
        next(loop)
    assert (data.state_dict()["epoch"], data.state_dict()["index"]) == (1, 0)


def test_a_second_loop_and_a_loaded_position_end_the_first_with_an_error():
    data = numbered(8, 2)
    first = iter(data)
    next(first)
    iter(data)
    with refused(RuntimeError):
        next(first)
    loop = iter(data)
    next(loop)
    data.load_state_dict(numbered(8, 2).state_dict())
    with refused(RuntimeError):
        next(loop)
    assert rows(data) == rows(numbered(8, 2))


def test_a_fork_goes_on_from_here_and_on_its_own():
    data = numbered(8, 2)
    next(iter(data))
    twin = data.fork()
    assert twin.state_dict() == data.state_dict()
    assert rows(twin) == rows(data) == rows(numbered(8, 2))[1:]


def test_a_fork_that_restarts_begins_each_loop_anew():
    data = numbered(8, 2)
    rows(data)
    next(iter(data))
    twin, position = data.fork(restarts=True), data.state_dict()
    assert rows(twin) == rows(twin) == rows(numbered(8, 2))
    assert data.state_dict() == position


@pytest.mark.parametrize(
    "state",
    [{}, {"epoch": 0}, {"epoch": "x", "index": 0, "fingerprint": ""}, {"epoch": None, "index": 0, "fingerprint": ""}],
)
def test_what_is_not_a_position_is_refused(state):
    with refused(ValueError):
        numbered(8, 2).load_state_dict(state)


@pytest.mark.parametrize(
    "other",
    [
        numbered(8, 2, seed=1),
        numbered(8, 4),
        numbered(10, 2),
        numbered(16, 2, length=2),
        numbered(8, 2, shuffle=False),
        numbered(8, 2, trained_ST=np.ones((8, 4), dtype=np.bool_)),
    ],
)
def test_a_position_in_other_data_is_refused_and_ours_is_kept(other):
    data = numbered(8, 2)
    next(iter(data))
    before = data.state_dict()
    with refused(ValueError):
        data.load_state_dict(other.state_dict())
    assert data.state_dict() == before


def test_a_position_beyond_the_data_is_refused():
    data = numbered(8, 2)
    with refused(ValueError):
        data.load_state_dict({**data.state_dict(), "index": 4})


def test_the_fingerprint_sees_a_single_token():
    ids_ST = np.arange(32, dtype=np.uint16).reshape(8, 4)
    changed = ids_ST.copy()
    changed[7, 3] += 1
    assert Batches(ids_ST, batch=2).fingerprint == Batches(ids_ST.copy(), batch=2).fingerprint
    assert Batches(ids_ST, batch=2).fingerprint != Batches(changed, batch=2).fingerprint


# Split -----------------------------------------------------------------------------------------------------------------


@given(st.integers(2, 60), st.integers(1, 6), st.floats(0.01, 0.99))
def test_split_halves_are_disjoint_and_complete(sequences, batch, share):
    if sequences < batch:
        return
    data = numbered(sequences, batch)
    wanted = batch * max(1, math.floor(sequences * share / batch + 0.5))
    if sequences - wanted < batch:
        with pytest.raises(ValueError, match="two parts of at least one batch"):
            data.split(share)
        return
    train, held = data.split(share)
    assert held.sequences == wanted
    members = [{row for each in all_rows(half) for row in each} for half in (train, held)]
    assert not members[0] & members[1]
    assert members[0] | members[1] == {4 * s for s in range(sequences)}
    assert train.tokens + held.tokens == data.tokens


def all_rows(data: Batches) -> list[list[int]]:
    """All sequences of a part, those that an epoch leaves out included."""
    return [[int(data._ids_ST[row, 0])] for row in data._rows_S]


def test_held_out_is_the_same_for_every_seed_and_starts_at_its_beginning():
    _, held = numbered(40, 2, seed=0).split(0.2)
    _, other = numbered(40, 2, seed=5).split(0.2)
    assert rows(held) == rows(other)
    for _ in held:
        break
    assert rows(held) == rows(held) == rows(other)
    assert len(held) == 4


def test_a_position_loaded_into_the_held_out_part_counts():
    _, held = numbered(40, 2).split(0.2)
    whole = rows(held)
    for _ in held:
        break
    resumed = numbered(40, 2).split(0.2)[1]
    resumed.load_state_dict(held.state_dict())
    assert rows(resumed) == whole[1:]
    assert rows(resumed) == whole


def test_split_parts_know_themselves_apart():
    data = numbered(40, 2)
    train, held = data.split(0.2)
    assert len({data.fingerprint, train.fingerprint, held.fingerprint}) == 3
    assert train.fingerprint == numbered(40, 2).split(0.2)[0].fingerprint
    assert "held out" in repr(held)
    next(iter(train))
    assert data.state_dict()["index"] == 0


@pytest.mark.parametrize("share", [0, 1, -0.1, 1.5])
def test_split_share_out_of_range(share):
    with refused(ValueError):
        numbered(8, 2).split(share)


def test_split_of_too_little():
    with refused(ValueError):
        numbered(3, 2).split()


# The thread ------------------------------------------------------------------------------------------------------------


def test_the_thread_ends_with_the_loop_with_a_break_and_with_an_interrupt():
    data = numbered(8, 2)
    list(data)
    assert workers() == []
    for _ in data:
        assert len(workers()) == 1
        break
    assert workers() == []
    loop = iter(data)
    next(loop)
    loop.close()
    assert workers() == []

    def interrupted():
        for _ in data:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert workers() == []


def test_an_error_while_preparing_reaches_the_loop_and_the_position_stays():
    class Failing(Batches):
        def _make(self, order_S, index, pin):
            if index == 2:
                raise OSError("disk gone")
            return super()._make(order_S, index, pin)

    data = Failing(np.zeros((8, 4), dtype=np.uint16), batch=2)
    seen = []

    def loop():
        for batch in data:
            seen.append(batch)  # noqa: PERF402 - what was seen before the error counts

    with refused(OSError):
        loop()
    assert len(seen) == 2
    assert data.state_dict()["index"] == 2
    assert workers() == []


def test_the_next_batch_is_prepared_while_this_one_is_in_use():
    prepared = threading.Event()

    class Watched(Batches):
        def _make(self, order_S, index, pin):
            if index == 1:
                prepared.set()
            return super()._make(order_S, index, pin)

    loop = iter(Watched(np.zeros((8, 4), dtype=np.uint16), batch=2))
    next(loop)
    assert prepared.wait(timeout=30)
    loop.close()


def test_batches_are_pinned_where_cuda_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self + 1000)
    (batch,) = numbered(2, 2, shuffle=False)
    assert batch["input_ids"][:, 0].tolist() == [1000, 1004]
    assert batch["labels"][:, 0].tolist() == [1000, 1004]


# Bad input, words --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [0, -1, 1.5, True, "2"])
def test_batch_must_be_positive(batch):
    with refused(ValueError):
        numbered(8, batch)


@pytest.mark.parametrize("seed", [-1, 0.5, None])
def test_seed_must_be_whole(seed):
    with refused(ValueError):
        numbered(8, 2, seed=seed)


def test_repr_is_one_line_that_says_what_is_left_out():
    data = numbered(9, 2, name="book", notes=("3 documents", "last 2 tokens left out"))
    next(iter(data))
    assert repr(data) == (
        "Batches(book: 36 tokens in 9 x 4; 4 batches of 2 an epoch; 3 documents; last 2 tokens left out; "
        "1 sequence left out of each epoch; shuffled with seed 0; next: epoch 0 batch 1)"
    )
    assert len(data) == 4
    assert data.tokens == 36
