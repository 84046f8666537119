"""Stories: endless, the same for a seed, and true to themselves."""

import gzip
import re
from itertools import islice

import surokit as sk
from surokit.texts.grammar import Stories, stories
from tests.refusals import refused

NUMBERS = "no one two three four five six seven eight nine ten eleven twelve"
ONES = {word: n for n, word in enumerate(NUMBERS.split())}


def test_a_seed_gives_the_same_stories_each_time():
    some = stories(20_000, seed=3)
    assert isinstance(some, Stories)
    assert list(some) == list(some) == list(stories(20_000, seed=3))
    assert some.story(2) == next(islice(some, 2, None))
    assert not set(some) & set(stories(20_000, seed=4))
    assert list(stories(40_000, seed=3))[: len(list(some))] == list(some)


def test_there_is_as_much_as_was_asked_for():
    texts = list(stories(30_000))
    assert 30_000 <= sum(map(len, texts)) < 30_000 + 5_000
    assert sum(map(len, texts[:-1])) < 30_000


def test_a_story_stays_what_it_is():
    """It is made of `Random.random()` alone, so it is the same on every machine."""
    assert (
        stories(1)
        .story(0)
        .startswith("In Ashholm there lived a painter called Ela. She liked honey more than anything")
    )


def test_stories_do_not_repeat_and_have_many_words():
    texts = list(stories(400_000))
    assert len(set(texts)) == len(texts)
    words = re.findall(r"[A-Za-z]+", " ".join(texts))
    assert len(set(words)) > 1300
    compressed = gzip.compress("\n".join(texts).encode())
    assert 0.15 < len(compressed) / 400_000 < 0.35


def test_sums_of_coins_are_right():
    found = 0
    for story in stories(100_000):
        for before, paid, left in re.findall(r"had (\w+) coins? and paid (\w+) for [a-z]+, so (\w+) w", story):
            if before in ONES:
                found += 1
                assert ONES[before] - ONES[paid] == ONES[left], story
    assert found > 30


def test_a_thing_is_where_it_was_left():
    """Whoever has a thing in the end was the last one to get it; where nobody has it, it lies where it was put last."""
    held = lying = 0
    for story in stories(100_000):
        for name, noun in re.findall(r"(\w+) had the [\w-]+ ([\w-]+)\.", story.partition("So ended")[2]):
            held += 1
            last = [s for s in story.partition("So ended")[0].split(". ") if re.search(rf"the ([\w-]+ )?{noun}", s)]
            assert not any(
                f" the {noun} at the" in s or f" the {noun} in the" in s for s in last[-1:] if '"' not in s
            ), (
                name,
                story,
            )
        for noun, place in re.findall(r"The [\w-]+ ([\w-]+) was ((?:in|at) the .*?)\.", story.partition("So ended")[2]):
            lying += 1
            told = re.findall(
                rf"(?:{noun},? which lay|(?:hid|left|forgot|dropped) the {noun}) ((?:in|at) the [^.]*)\.", story
            )
            told += [] if told else re.findall(rf"((?:In|At) the [^.]*) lay an? [\w-]+ {noun} that", story)
            assert told[-1].lower() == place.lower(), story
    assert min(held, lying) > 30


def test_they_are_a_source_of_text():
    tokenizer = sk.train_tokenizer(sk.stories(20_000), vocab_size=400)
    data = sk.text(sk.stories(20_000), tokenizer, length=64, batch=4, documents=True)
    assert data.tokens > 4_000
    assert str(data).startswith("Batches(a Stories: ")


def test_numbers_that_cannot_be_are_refused():
    for numbers in ((0, 0), (10, -1), (1.5, 0)):
        with refused(ValueError):
            stories(*numbers)
