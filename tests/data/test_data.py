"""text and chat: what is packed, what is left out, what is refused."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surokit.data import Tokenizer, chat, pack, text, train_tokenizer
from surokit.texts import MOBY_DICK, SHAKESPEARE
from tests.refusals import refused

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["Call me Ishmael. Some years ago", "There she blows! " * 5], 280, special=SPECIAL)


def stream(data) -> list[int]:
    """All tokens of unshuffled batches, in order."""
    return [i for batch in data for row in batch["input_ids"].tolist() for i in row]


# text ------------------------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(documents=st.lists(st.text(max_size=30), max_size=12), length=st.integers(2, 9))
def test_packing_keeps_every_token_in_order_but_the_last_few(tokenizer, documents, length):
    whole = [i for d in documents if d.strip() for i in [*tokenizer.encode(d), 0]]
    if len(whole) < length:
        with pytest.raises(ValueError, match="no text in|fewer than one sequence"):
            text(documents, tokenizer, length=length, batch=1)
        return
    data = text(documents, tokenizer, length=length, batch=1, shuffle=False)
    kept = len(whole) // length * length
    assert stream(data) == whole[:kept]
    assert data.tokens == kept
    assert (f"last {len(whole) - kept} tokens left out" in repr(data)) == (len(whole) > kept)


def test_a_real_text_has_one_end_of_text_a_chapter_and_two_bytes_a_token(tokenizer):
    data = text(MOBY_DICK, tokenizer, length=64, batch=4, shuffle=False)
    assert data._ids_ST.dtype == np.uint16
    assert 134 <= stream(data).count(0) <= 136
    assert "136 documents" in repr(data)
    assert data.name == "moby_dick.txt"
    assert "Call me Ishmael." in tokenizer.decode(next(iter(data.fork()))["input_ids"][0])
    assert data.tokenizer is tokenizer


def test_a_large_vocabulary_takes_four_bytes():
    import tokenizers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "whale": 70_000}, unk_token="</s>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    data = text(["whale whale whale"], words, length=4, batch=1)
    assert data._ids_ST.dtype == np.uint32
    assert stream(data) == [70_000, 70_000, 70_000, 0]


def test_a_begin_of_text_token_opens_every_document_where_the_tokenizer_wants_one(tokenizer):
    import tokenizers

    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    opening = Tokenizer(backend, {"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>"})
    ids = tokenizer.encode("There she blows!")
    assert stream(text(["There she blows!"] * 2, opening, length=len(ids) + 2, batch=2)) == [1, *ids, 0] * 2


def test_the_fingerprint_is_of_text_tokenizer_and_numbers(tokenizer):
    def fingerprint(source=SHAKESPEARE, tok=tokenizer, **changed):
        return text(source, tok, **{"length": 32, "batch": 2, **changed}).fingerprint

    other = train_tokenizer(["something else entirely"], 280, special=SPECIAL)
    assert fingerprint() == fingerprint(str(SHAKESPEARE))
    different = [fingerprint(MOBY_DICK), fingerprint(tok=other), fingerprint(length=16), fingerprint(batch=4)]
    different += [fingerprint(seed=1), fingerprint(shuffle=False)]
    assert len({fingerprint(), *different}) == 7


def test_a_tokenizer_is_taken_from_a_path(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    assert (
        text(SHAKESPEARE, str(tmp_path), length=32).fingerprint == text(SHAKESPEARE, tokenizer, length=32).fingerprint
    )


@pytest.mark.parametrize("source", [[], [""], [" \n"], "empty.txt"])
def test_empty_text(tokenizer, tmp_path, source):
    if source == "empty.txt":
        source = tmp_path / source
        source.write_text("\n\n")
    with refused(ValueError):
        text(source, tokenizer)


def test_text_shorter_than_a_sequence_or_a_batch(tokenizer):
    with refused(ValueError):
        text(["Call me Ishmael."], tokenizer)
    with refused(ValueError):
        text(["Call me Ishmael."], tokenizer, length=4)


@pytest.mark.parametrize(
    "options",
    [
        {"length": 0},
        {"length": 1},
        {"length": 8.0},
        {"batch": -2},
        {"seed": "a"},
    ],
)
def test_numbers_out_of_range_are_refused_before_anything_is_read(options):
    with refused(ValueError):
        text("not looked at", "not looked at", **options)
    with refused(ValueError):
        chat("not looked at", "not looked at", **options)


def test_a_tokenizer_without_an_end_of_text_token():
    import tokenizers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    with refused(ValueError):
        text(["a a a"], words, length=2, batch=1)


def test_importing_the_data_modules_is_light():
    heavy = ["datasets", "pandas", "pyarrow", "tokenizers", "transformers", "huggingface_hub", "jinja2", "IPython"]
    code = f"import sys, surokit.data, surokit.texts; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# chat ------------------------------------------------------------------------------------------------------------------


def said(n: int, words: str = "There she blows!") -> dict[str, list[dict[str, str]]]:
    return {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": words}]}


def conversation_ids(tokenizer: Tokenizer, n: int, words: str = "There she blows!") -> tuple[list[int], list[int]]:
    """Ids and labels of `said`, put together by hand."""
    question = tokenizer.encode(f"<|im_start|>user\n{n}?<|im_end|>\n<|im_start|>assistant\n")
    answer, rest = tokenizer.encode(f"{words}<|im_end|>"), tokenizer.encode("\n")
    return [*question, *answer, *rest], [-100] * len(question) + answer + [-100] * len(rest)


def test_conversations_are_packed_whole_and_only_the_assistant_is_trained_on(tokenizer):
    data = chat([said(1), said(2), said(3)], tokenizer, length=100, batch=1, shuffle=False)
    parts = [conversation_ids(tokenizer, n) for n in (1, 2, 3)]
    ids, labels = (sum((part[k] for part in parts), []) for k in (0, 1))  # noqa: RUF017 - three short lists
    assert len(ids) <= 100
    (batch,) = data
    assert batch["input_ids"].tolist() == [ids + [0] * (100 - len(ids))]
    assert batch["labels"].tolist() == [labels + [-100] * (100 - len(ids))]
    assert data.tokens == len(ids)
    trained = sum(label >= 0 for label in labels)
    assert f"{trained / len(ids):.0%} trained on; 3 conversations" in repr(data)


def test_train_on_all(tokenizer):
    data = chat([said(1), {"messages": [{"role": "user", "content": "alone"}]}], tokenizer, 100, 1, train_on="all")
    (batch,) = data
    ids, labels = batch["input_ids"][0], batch["labels"][0]
    assert labels[: data.tokens].equal(ids[: data.tokens])
    assert (labels[data.tokens :] == -100).all()


@pytest.mark.parametrize("form", ["jsonl", "dataset", "list", "lists", "sharegpt", "parquet"])
def test_every_kind_of_source_gives_the_same_batches(tokenizer, tmp_path, form):
    import datasets

    records = [said(n) for n in range(6)]
    sharegpt = [
        {
            "conversations": [
                {"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in ms
            ]
        }
        for ms in (record["messages"] for record in records)
    ]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, records)))
    datasets.Dataset.from_list(records).to_parquet(tmp_path / "chat.parquet")
    source = {
        "jsonl": tmp_path / "chat.jsonl",
        "parquet": tmp_path / "chat.parquet",
        "dataset": datasets.Dataset.from_list(records),
        "list": records,
        "lists": [record["messages"] for record in records],
        "sharegpt": sharegpt,
    }[form]
    assert chat(source, tokenizer, 64, 1).fingerprint == chat(records, tokenizer, 64, 1).fingerprint


def test_long_conversations_are_cut_and_counted_and_unheard_ones_left_out(tokenizer):
    unheard = {"messages": [{"role": "user", "content": "why? " * 50}, {"role": "assistant", "content": "so"}]}
    data = chat([said(1), said(2, "There she blows! " * 50), unheard], tokenizer, length=60, batch=2, shuffle=False)
    assert "3 conversations; 2 cut at 60 tokens; 1 left out (nothing to train on within 60 tokens)" in repr(data)
    (batch,) = data
    ids, labels = conversation_ids(tokenizer, 2, "There she blows! " * 50)
    assert batch["input_ids"][1].tolist() == ids[:60]
    assert batch["labels"][1].tolist() == labels[:60]
    with refused(ValueError):
        chat([unheard], tokenizer, length=60, batch=1)


def test_chat_batches_resume_and_split(tokenizer):
    records = [said(n, "There she blows! " * (n % 5 + 1)) for n in range(40)]
    data = chat(records, tokenizer, length=64, batch=2)
    next(iter(data))
    again = chat(records, tokenizer, length=64, batch=2)
    again.load_state_dict(data.state_dict())
    assert next(iter(again))["labels"].equal(next(iter(data))["labels"])
    train, held = data.split(0.2)
    assert train.tokens + held.tokens == data.tokens


@given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 30))
def test_pack_places_every_item_once_and_never_overfills(lengths, capacity):
    rows = pack(lengths, capacity)
    assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
    sums = [sum(lengths[item] for item in row) for row in rows]
    assert all(0 < total <= capacity for total in sums)
    assert all(row == sorted(row) for row in rows)
    # Two rows that would fit into one are never both opened: at most one row is half empty.
    assert sum(total <= capacity // 2 for total in sums) <= 1


def test_no_conversation(tokenizer):
    with refused(ValueError):
        chat([], tokenizer)


def test_train_on_must_be_known(tokenizer):
    with refused(ValueError):
        chat([said(1)], tokenizer, train_on="user")


def test_the_column_of_conversations(tokenizer):
    turns = said(1)["messages"]
    named = chat([{"talk": turns}], tokenizer, 64, 1, column="talk")
    assert named.fingerprint == chat([{"conversation": turns}], tokenizer, 64, 1).fingerprint
    with refused(ValueError):
        chat([{"talk": turns}], tokenizer)
    with refused(ValueError):
        chat([{"talk": turns}], tokenizer, column="tlak")
