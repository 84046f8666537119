"""Classification: rows become prompts and words, scores are those of GLUE, generated rows follow their rules."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from torch import nn

import surokit as sk
from surokit import hub
from surokit.data import sources
from surokit.tasks import Classification, ClassScore, paraphrase, sentiment
from tests.refusals import refused

TRAIN, TEST = sentiment(300), sentiment(80, seed=1)


@pytest.fixture(scope="module")
def tokenizer():
    words = [f"sentence: sentence1: sentence2:\nlabel: {word}" for word in ("no", "yes", "negative", "positive")] * 200
    return sk.train_tokenizer([row["sentence"] for row in TRAIN] + words, vocab_size=400)


def decoder(task: Classification) -> sk.Decoder:
    torch.manual_seed(0)
    config = sk.DecoderConfig(layers=1, width=32, heads=2, kv_heads=2, ffn=64, vocab=task.vocab, max_length=task.length)
    return sk.Decoder(config)


def test_a_row_is_its_sentence_and_the_word_of_its_label(tokenizer):
    rows = [{"sentence": "the film was good", "label": 1}, {"sentence": "the film was bad", "label": 0}] * 8
    task = Classification(rows, tokenizer, test=rows[:3], length=40)
    (batch,) = task.held_out()
    ids, labels = batch["input_ids"][0], batch["labels"][0]
    assert (labels != -100).sum() == 1
    (at,) = (labels != -100).nonzero()[0].tolist()
    assert tokenizer.decode(ids[: at + 1]) == "sentence: the film was good\nlabel: yes"
    assert (ids[at + 1 :] == tokenizer.eos_id).all()
    assert tokenizer.decode([labels[at]]) == " yes"
    (trained, *_) = task.batches(16)
    assert trained["input_ids"].shape == (16, 40)
    assert ((trained["labels"] != -100).sum(1) == 1).all()
    assert "of which 1 count in the loss" in str(task.batches(16).example())


def test_a_tokenizer_that_puts_a_space_before_every_text():
    """As Llama 2's does, in its normalizer: each word alone begins with the token of that space."""
    pieces = [*"▁\n:abcdefghijklmnopqrstuvwxyz", "▁n", "▁no", "▁y", "▁ye", "▁yes", "<unk>"]
    merges = [("▁", "n"), ("▁n", "o"), ("▁", "y"), ("▁y", "e"), ("▁ye", "s")]
    model = tokenizers.models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>")
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    assert [backend.encode(f" {word}").tokens for word in ("no", "yes")] == [["▁", "▁no"], ["▁", "▁yes"]]
    rows = [{"sentence": "good", "label": 1}, {"sentence": "bad", "label": 0}] * 4
    task = Classification(rows, backend, test=rows[:2], length=40)
    (batch,) = task.held_out()
    for ids, labels, word in zip(batch["input_ids"], batch["labels"], ("yes", "no")):
        (at,) = (labels != -100).nonzero()[0].tolist()
        whole = backend.encode(f"\nlabel: {word}").ids  # as a text has them
        assert ids[: at + 1].tolist()[-len(whole) :] == whole


def test_the_longest_sentence_is_cut_first(tokenizer):
    rows = [{"sentence1": "a long film " * 30, "sentence2": "the book was dull", "label": 0}] * 4
    task = Classification(rows, tokenizer, test=rows, length=48)
    (batch,) = task.held_out()
    text = tokenizer.decode(batch["input_ids"][0])
    assert text.endswith("\nsentence2: the book was dull\nlabel: no")
    assert text.startswith("sentence1: a long film")


class Table(nn.Module):
    """Gives the words' logits that it is told, and larger ones to all other tokens."""

    def __init__(self, task: Classification, given: list[int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.task, self.given = task, given

    def forward(self, input_ids):
        logits = torch.full((*input_ids.shape, self.task.vocab), 9.0)
        for row, label in enumerate(self.given):
            for other, word in enumerate(self.task.words):
                first = self.task.tokenizer.encode(f" {word}")[0]
                logits[row, :, first] = 1.0 if other == label else -1.0
        return SimpleNamespace(logits=logits)


def test_the_largest_logit_among_the_words_is_the_label(tokenizer):
    rows = [{"sentence": f"film {n}", "label": label} for n, label in enumerate([0, 0, 0, 1, 1, 1])]
    task = Classification(rows, tokenizer, test=rows)
    model = Table(task, [0, 1, 0, 1, 1, 0])
    assert task.right(model).tolist() == [True, False, True, True, True, False]
    score = task.grade(model)
    assert score == ClassScore(4, 6, ((2, 1), (1, 2)))
    assert score.accuracy == 4 / 6


# Scores -------------------------------------------------------------------------------------------------------------------


def test_scores_are_the_formulas():
    tn, fp, fn, tp = 50, 10, 5, 35
    score = ClassScore(tn + tp, 100, ((tn, fp), (fn, tp)))
    precision, recall = tp / (tp + fp), tp / (tp + fn)
    assert score.f1.mid == pytest.approx(2 * precision * recall / (precision + recall))
    below = ((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)) ** 0.5
    assert score.matthews.mid == pytest.approx((tp * tn - fp * fn) / below)
    assert score.f1.low < score.f1.mid < score.f1.high
    assert 0.55 < score.matthews.low < score.matthews.mid < score.matthews.high < 0.85
    assert str(score).startswith("85 of 100 right, accuracy 0.850 (0.767 to 0.907), F1 0.824 (")


def test_matthews_of_several_labels_is_a_correlation_of_indicators():
    """Gorodkin's coefficient is the covariance of the labels' indicators over the root of their variances."""
    draws = np.random.default_rng(0)
    true, given = draws.integers(0, 3, 200), draws.integers(0, 3, 200)
    given[:120] = true[:120]
    confusion = np.zeros((3, 3), np.int64)
    np.add.at(confusion, (true, given), 1)
    x, y = np.eye(3)[true], np.eye(3)[given]
    x, y = x - x.mean(0), y - y.mean(0)
    expected = (x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum())
    score = ClassScore(int(np.trace(confusion)), 200, tuple(map(tuple, confusion.tolist())))
    assert score.matthews.mid == pytest.approx(expected)
    assert "F1" not in str(score)
    with refused(ValueError):
        print(score.f1)


def test_one_label_for_all_has_no_correlation():
    score = ClassScore(60, 100, ((60, 0), (40, 0)))
    assert [*score.matthews, *score.f1] == [0] * 6


# Sources ------------------------------------------------------------------------------------------------------------------


def test_rows_are_read_from_files_and_datasets_alike(tmp_path, tokenizer):
    import datasets

    table = datasets.Dataset.from_list(TRAIN)
    table.to_json(str(tmp_path / "train.jsonl"))
    given = [
        TRAIN,
        table,
        datasets.DatasetDict({"train": table}),
        tmp_path / "train.jsonl",
        str(tmp_path),
    ]
    tasks = [Classification(source, tokenizer, length=64) for source in given]
    assert len({task.batches().fingerprint for task in tasks}) == 1
    assert len({task.batches(seed=1).fingerprint for task in tasks}) == 1
    first = tasks[0]
    assert repr(first).startswith("Classification(a list: no, yes; 2")


def test_rows_with_the_same_sentences_are_on_one_side(tokenizer):
    rows = [{"sentence": f"film {n % 40}", "label": 0} for n in range(400)]
    task = Classification(rows, tokenizer, length=32)
    held = {str(row) for batch in task.held_out() for row in batch["input_ids"].tolist()}
    trained = {str(row) for batch in task.batches(1) for row in batch["input_ids"].tolist()}
    assert len(held) + len(trained) == 40
    assert not held & trained
    assert held


def test_a_part_of_the_test_rows_is_the_same_each_time(tokenizer):
    task = Classification(TRAIN, tokenizer, test=TEST, length=64)
    (part,), (again,) = task.held_out(20), task.held_out(20)
    assert torch.equal(part["input_ids"], again["input_ids"])
    assert sum(len(batch["labels"]) for batch in task.held_out(batch=32)) == 80
    model = decoder(task)
    assert len(task.right(model, problems=20)) == task.grade(model, problems=20).total == 20
    for n in (0, 81):
        with refused(ValueError):
            task.held_out(n)


def test_a_task_of_glue_has_its_columns_words_and_validation_rows(monkeypatch, tokenizer):
    import datasets

    asked = []

    def load(name, split, config):
        asked.append((name, config, split))
        rows = {"sentence": ["good", "bad"] * 3, "label": [1, 0] * 3, "idx": range(6)}
        return datasets.Dataset.from_dict(rows)

    monkeypatch.setattr(hub, "reachable", lambda: True)
    monkeypatch.setattr(sources, "load_dataset", load)
    task = Classification("glue/sst2", tokenizer)
    assert asked == [("nyu-mll/glue", "sst2", "train"), ("nyu-mll/glue", "sst2", "validation")]
    assert task.words == ("negative", "positive")
    assert task.grade(decoder(task)).total == 6
    with refused(ValueError):
        Classification("glue/stsb", tokenizer)


REFUSED: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "no rows": ([], {}),
    "no row": (["a text"], {}),
    "no sentence": ([{"text": "a", "label": 1}], {}),
    "no label": ([{"sentence": "a"}], {}),
    "a label without a word": ([{"sentence": "a", "label": 2}], {}),
    "a label that is no number": ([{"sentence": "a", "label": "yes"}], {}),
    "words that begin alike": (TRAIN, {"words": ("yes", "yes")}),
    "no rows to test": ([{"sentence": "a", "label": 1}], {}),
    "no length": (TRAIN, {"length": 0}),
    "no room": (TRAIN, {"length": 4}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rows_that_cannot_be_are_refused(case, tokenizer):
    rows, options = REFUSED[case]
    with refused(ValueError):
        Classification(rows, tokenizer, **options)


# Generated rows -----------------------------------------------------------------------------------------------------------


def test_sentiment_follows_its_rule():
    praising = "good wonderful lovely bright charming clever fine splendid moving funny fresh warm graceful witty rich"
    good = set(praising.split())
    for row in TRAIN:
        decisive = row["sentence"].split(" but ")[-1].split(" and ")[0].split()
        praises = bool(good & set(decisive)) != ("not" in decisive)
        assert praises == row["label"], row
    assert 0.4 < np.mean([row["label"] for row in TRAIN]) < 0.6
    assert any(" but " in row["sentence"] and " not " in row["sentence"] for row in TRAIN)


def test_paraphrases_keep_who_did_what():
    rows = paraphrase(400)
    for row in rows:
        first, second = row["sentence1"].split(), row["sentence2"].split()
        names = [word for word in first if word.istitle() and word not in ("Monday", "June")]
        others = [word for word in second if word.istitle() and word not in ("Monday", "June")]
        things = {first[first.index("the") + 1]}, {second[second.index("the") + 1]}
        same = names == others[::-1] and things[0] == things[1]
        assert same == bool(row["label"]), row
    assert 0.4 < np.mean([row["label"] for row in rows]) < 0.6


def test_generated_rows_depend_on_their_seed_alone():
    for make in (sentiment, paraphrase):
        assert make(20) == make(40)[:20] == json.loads(json.dumps(make(20)))
        assert make(20) != make(20, seed=1)
