"""One packed sequence as text and HTML: every token is there, what counts is what the labels say, documents are numbered."""

import numpy as np
import pytest

from surokit.data import Batches, Tokenizer, chat, text, train_tokenizer
from tests.refusals import refused

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["Who are you? Call me Ishmael.\nuser assistant " * 3], 300, special=SPECIAL)


def said(words: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": words}]


def conversations(tokenizer, **options) -> Batches:
    return chat([said("Ishmael."), said("You & <me>.")], tokenizer, length=64, batch=1, shuffle=False, **options)


def test_a_conversation_as_text(tokenizer):
    data = conversations(tokenizer)
    example = data.example()
    asked = "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    expected = [
        (asked, False, 1),
        ("Ishmael.<|im_end|>", True, 0),
        ("\n", False, 0),
        (asked, False, 2),
        ("You & <me>.<|im_end|>", True, 0),
        ("\n", False, 0),
    ]
    assert [(run.text, run.counts, run.begins) for run in example.runs] == expected
    assert [run.tokens for run in example.runs] == [len(tokenizer.encode(run.text)) for run in example.runs]
    assert example.tokens + example.padding == 64
    lines = str(example).split("\n")
    assert lines[0] == (
        f"a list, sequence 0 of 1: {example.tokens} tokens, of which {example.counted} count in the loss and "
        f"{example.tokens - example.counted} are masked, {example.padding} of padding"
    )
    second = example.runs[3].start
    assert lines[1:3] == ["", "conversation 1, from token 0"]
    assert f"conversation 2, from token {second}" in lines
    assert [line.split() for line in lines[3:8]] == [
        ["masked", str(example.runs[0].tokens), "<|im_start|>user↵"],
        ["Who?<|im_end|>↵"],
        ["<|im_start|>assistant↵"],
        ["counts", str(example.runs[1].tokens), "Ishmael.<|im_end|>"],
        ["masked", "1", "↵"],
    ]
    assert repr(example) == str(example)


def test_html_marks_what_counts_and_escapes_the_text(tokenizer):
    html = conversations(tokenizer).example()._repr_html_()
    assert html.count("text-decoration:underline") == 2
    assert ', count">Ishmael.&lt;|im_end|&gt;</span>' in html
    assert "You &amp; &lt;me&gt;." in html
    assert "<me>" not in html
    assert "conversation 2, from token" in html


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_what_counts_is_what_the_labels_say(tokenizer, documents, train_on):
    data = conversations(tokenizer, documents=documents, train_on=train_on)
    (batch,) = data
    example = data.example()
    shown = [run.counts for run in example.runs for _ in range(run.tokens)] + [False] * example.padding
    expected = (batch["labels"][0] != -100).tolist()
    expected[0] = False  # never predicted
    assert shown == expected


def test_documents_of_a_text_begin_where_they_begin(tokenizer):
    data = text(["Call me", "Ishmael. you", "Who are you?"], tokenizer, length=6, batch=1, shuffle=False)
    documents: list[str] = []
    for run in (run for index in range(data.sequences) for run in data.example(index).runs):
        if run.begins:
            documents.append("")
        documents[-1] += run.text
    assert documents[:2] == ["Call me<|endoftext|>", "Ishmael. you<|endoftext|>"]
    assert "Who are you?<|endoftext|>".startswith(documents[2])
    first = data.example()
    assert not first.runs[0].counts  # nothing stands before it
    assert first.runs[0].tokens == 1
    assert "document 1, from token 0" in str(first)
    going_on = next(i for i in range(data.sequences) if not data.example(i).runs[0].begins)
    assert "the rest of a document that began in an earlier sequence" in str(data.example(going_on))
    assert data.state_dict()["index"] == 0  # looking moves nothing


def test_a_part_shows_its_own_sequences(tokenizer):
    data = text(["Call me Ishmael. " * 40], tokenizer, length=8, batch=2)
    train, held = data.split(0.2)
    for part in (train, held):
        batches = part.fork()
        batches.shuffle = False
        rows = [row.tolist() for batch in batches for row in batch["input_ids"]]
        shown = [tokenizer.encode("".join(run.text for run in part.example(i).runs)) for i in range(len(rows))]
        assert [tokenizer.decode(row) for row in rows] == [tokenizer.decode(ids) for ids in shown]
    with refused(IndexError):
        held.example(held.sequences)
    with refused(IndexError):
        held.example(-1)


def test_tokens_without_a_tokenizer_are_shown_as_ids():
    example = Batches(np.arange(8, dtype=np.uint16).reshape(2, 4), batch=1).example(1)
    assert [run.text for run in example.runs] == ["4", "5 6 7"]
    assert "document" not in str(example)


def test_a_decoder_that_drops_a_leading_blank_loses_none_here():
    import tokenizers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "▁a": 1, "▁b": 2}, unk_token="</s>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    words.decoder = tokenizers.decoders.Metaspace()
    data = text(["a b b"], Tokenizer(words, {"eos_token": "</s>"}), length=4, batch=1)
    assert [run.text for run in data.example().runs] == ["a", " b b</s>"]
