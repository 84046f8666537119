"""Problems: what they ask is right, tests are never trained on, and a position is found again."""

from itertools import islice

import numpy as np
import pytest
import torch

from surokit.tasks import Addition, Brackets, Copying, Problems, ProblemTask, Recall
from surokit.tasks.problems import is_test
from surokit.train.stream import Stream
from tests.refusals import refused

TASKS: list[ProblemTask] = [
    Addition(2),
    Addition(3, reverse=True),
    Copying(4, 6),
    Recall(3, 8, 5),
    Brackets(2, 10),
    Brackets(1, 14),
    Brackets(3, 12, ask="balanced"),
]
PAIRS = {"(": ")", "[": "]", "{": "}", "<": ">"}


def drawn_texts(task: ProblemTask, batches: int = 4) -> list[tuple[str, str]]:
    return [text for batch in islice(task.batches(64), batches) for text in task.texts(batch)]


def still_open(word: str) -> str | None:
    """The brackets that close what a word leaves open, in order; None where a bracket closes another kind."""
    stack: list[str] = []
    for character in word:
        if character in PAIRS:
            stack.append(PAIRS[character])
        elif not stack or stack.pop() != character:
            return None
    return "".join(reversed(stack))


# What is asked ------------------------------------------------------------------------------------------------------------


def test_sums_are_right():
    for prompt, answer in drawn_texts(Addition(3)):
        a, b = prompt.removesuffix("=").split("+")
        assert len(a) == len(b) == 3
        assert answer == f"{int(a) + int(b):04}"


def test_reversed_sums_are_right_from_the_units_on():
    for prompt, answer in drawn_texts(Addition(3, reverse=True)):
        a, b = prompt.removesuffix("=").split("+")
        assert int(answer[::-1]) == int(a[::-1]) + int(b[::-1])


def test_copies_are_right():
    texts = drawn_texts(Copying(5, 7))
    assert all(prompt == answer + "=" and len(answer) == 5 for prompt, answer in texts)
    assert {character for _, answer in texts for character in answer} == set("abcdefg")


def test_the_value_behind_the_key_is_asked_for():
    asked_at = set()
    for prompt, answer in drawn_texts(Recall(4, 9, 6)):
        shown, key = prompt.split("=")
        keys, values = shown[::2], shown[1::2]
        assert len(set(keys)) == 4
        assert values[keys.index(key)] == answer
        asked_at.add(keys.index(key))
    assert asked_at == {0, 1, 2, 3}


@pytest.mark.parametrize("kinds", [1, 2, 4])
def test_what_is_open_is_closed(kinds):
    texts = drawn_texts(Brackets(kinds, 14))
    for prompt, answer in texts:
        assert 7 <= len(prompt) - 1 < 14
        assert still_open(prompt.removesuffix("=")) == answer
    assert len({len(answer) for _, answer in texts}) > 4
    assert {character for prompt, _ in texts for character in prompt} == set("([{<"[:kinds] + ")]}>"[:kinds] + "=")


@pytest.mark.parametrize("size", [4, 14])
def test_balanced_words_are_told_from_others(size):
    texts = drawn_texts(Brackets(3, size, ask="balanced"), 10)
    for prompt, answer in texts:
        assert (still_open(prompt.removesuffix("=")) == "") == (answer == "y")
    share = sum(answer == "y" for _, answer in texts) / len(texts)
    assert 0.4 < share < 0.6


def test_a_wrong_word_has_as_many_of_each_bracket():
    """So that counting does not tell it, but where all its closing brackets are of one kind."""
    wrong = [prompt for prompt, answer in drawn_texts(Brackets(2, 12, ask="balanced")) if answer == "n"]
    mixed = [word for word in wrong if ")" in word and "]" in word and "(" in word and "[" in word]
    as_many = [word.count("(") == word.count(")") and word.count("[") == word.count("]") for word in mixed]
    assert sum(as_many) / len(wrong) > 0.8


def test_shapes_of_words_are_drawn_evenly():
    drawn = Brackets(1, 6).draw(np.random.default_rng(0), 1)
    assert drawn.ids_NT.shape == (1, 8)
    words = Brackets(2, 6, ask="balanced").draw(np.random.default_rng(0), 8000).ids_NT[:, :6] > 2  # closing ones
    shapes, counts = np.unique(words, axis=0, return_counts=True)
    assert len(shapes) == 5  # the Catalan number of 3
    assert counts.min() > 0.9 * 1600
    assert counts.max() < 1.1 * 1600


# Rows ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_a_batch_is_prompts_answers_and_ends(task):
    batch = next(iter(task.batches(16)))
    ids, labels = batch["input_ids"], batch["labels"]
    assert ids.shape == labels.shape == (16, task.length)
    assert ids.dtype == labels.dtype == torch.int64
    assert 0 <= ids.min() <= ids.max() < task.vocab
    counts = labels != -100
    assert torch.equal(labels[counts], ids[counts])
    assert not counts[:, 0].any()
    assert (counts[:, 1:].int().diff(dim=1) == 1).sum(1).max() <= 1  # an answer is in one piece
    last = task.length - 1 - counts.flip(1).int().argmax(1)
    assert (ids[torch.arange(16), last] == 0).all()
    assert all((row[at + 1 :] == 0).all() for row, at in zip(ids, last.tolist()))


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_no_test_problem_is_trained_on(task):
    tests = [text for batch in task.held_out(64) for text in task.texts(batch)]
    trained = {prompt for prompt, _ in drawn_texts(task, 40)}
    assert len(set(tests)) == 64
    assert not trained & {prompt for prompt, _ in tests}


def test_each_problem_is_on_one_side_and_both_are_reached():
    task = Addition(1)
    tests = {prompt for batch in task.held_out(7) for prompt, _ in task.texts(batch)}
    trained = {prompt for prompt, _ in drawn_texts(task, 60)}
    assert (
        len(trained) + len({f"{p[2]}+{p[0]}=" for p in tests} | tests) == 100
    )  # of all sums, a + b and b + a on one side
    assert not any(f"{prompt[2]}+{prompt[0]}=" in trained for prompt in tests)


def test_a_problem_of_eight_is_for_tests():
    identities = np.random.default_rng(0).integers(0, 50, (16000, 6))
    assert 0.115 < is_test(identities).mean() < 0.135
    assert np.array_equal(is_test(identities[:5]), is_test(identities)[:5])


def test_a_smaller_test_set_is_the_beginning_of_a_larger_one():
    task = Recall()
    (few,), (many,) = task.held_out(40), task.held_out(100)
    assert torch.equal(few["input_ids"], many["input_ids"][:40])
    assert [len(batch["labels"]) for batch in task.held_out(100, batch=64)] == [64, 36]
    few["input_ids"].zero_()
    assert torch.equal(task.held_out(40)[0]["input_ids"], many["input_ids"][:40])


def test_problems_stay_what_they_are():
    """The draws of NumPy that problems are made of: results of other machines are comparable while these are the same."""
    assert drawn_texts(Addition(3), 1)[:2] == [("850+760=", "1610"), ("511+328=", "0839")]
    assert drawn_texts(Recall(), 1)[0] == ("l7d1n3c8=d", "1")
    assert drawn_texts(Brackets(), 1)[2] == ("[]([()]()[=", "])")
    assert Copying(4).texts(Copying(4).held_out(1)[0]) == [("mege=", "mege")]


# Sources ------------------------------------------------------------------------------------------------------------------


def ids_of(source: Problems | Stream, count: int) -> list[list[list[int]]]:
    return [batch["input_ids"].tolist() for batch in islice(source, count)]


def test_a_seed_gives_its_own_batches_without_end():
    task = Copying()
    assert ids_of(task.batches(4), 3) == ids_of(task.batches(4), 3)
    assert ids_of(task.batches(4), 3) != ids_of(task.batches(4, seed=1), 3)
    batches = ids_of(task.batches(4), 50)
    assert len({str(batch) for batch in batches}) == 50


def test_a_position_is_found_again():
    source = Copying().batches(4)
    before, state = ids_of(source, 3), source.state_dict()
    twin, following = source.fork(), ids_of(source, 2)
    other = Copying().batches(4)
    other.load_state_dict(state)
    assert ids_of(twin, 2) == ids_of(other, 2) == following
    assert before + following == ids_of(Copying().batches(4), 5)


def test_a_stream_goes_on_from_its_position():
    stream = Stream(Copying().batches(4), accumulate=2)
    for _ in range(3):
        stream.draw()
    state = stream.state_dict()
    following = [batch["input_ids"].tolist() for batch in stream.draw()]
    again = Stream(Copying().batches(4), accumulate=2)
    again.load_state_dict(state)
    assert [batch["input_ids"].tolist() for batch in again.draw()] == following


def test_a_position_of_other_data_is_refused(tmp_path):
    state = Copying(4).batches(4).state_dict()
    with refused(ValueError):
        Copying(5).batches(4).load_state_dict({**state, "fingerprint": "0"})


def test_fingerprints_differ_where_batches_do():
    sources = [Copying(4).batches(4), Copying(4).batches(5), Copying(4).batches(4, seed=1), Copying(5).batches(4)]
    assert len({source.fingerprint for source in sources}) == 4
    assert sources[0].fingerprint == Copying(4).batches(4).fingerprint
    assert repr(sources[0]) == "Problems(Copying(size=4, symbols=16), batch=4, seed=0; next: batch 0)"


def test_characters_are_ids_and_back():
    tokenizer = Addition().tokenizer
    assert tokenizer.encode("12+") == [2, 3, 11]
    assert tokenizer.decode([2, 3, 11, 0, -100]) == "12+"
    with refused(ValueError):
        tokenizer.encode("12-3")


REFUSED = {
    "no digits": lambda: Addition(0),
    "too many digits": lambda: Addition(10),
    "no size": lambda: Copying(size=0),
    "too many symbols": lambda: Copying(symbols=100),
    "more pairs than keys": lambda: Recall(pairs=9, keys=8),
    "too many kinds": lambda: Brackets(kinds=5),
    "an odd size": lambda: Brackets(size=7),
    "another question": lambda: Brackets(ask="open"),  # type: ignore[arg-type]
    "nothing to exchange": lambda: Brackets(kinds=1, ask="balanced"),
    "no batch": lambda: Copying().batches(0),
    "a negative seed": lambda: Copying().batches(seed=-1),
    "no tests": lambda: Copying().held_out(0),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_cannot_be_are_refused(case):
    with refused(ValueError):
        REFUSED[case]()


def test_too_few_problems_are_refused():
    with refused(ValueError):
        Addition(1).held_out(100)
    with refused(ValueError):
        next(iter(_OnlyTests().batches(4)))


class _OnlyTests(Copying):
    """Copying of strings of which all are for tests."""

    def draw(self, random, count):
        drawn = super().draw(random, 40 * count)
        return drawn.where(np.flatnonzero(is_test(self.identity(drawn)))[:count])

    def __repr__(self) -> str:
        return "The task"

    __str__ = __repr__
