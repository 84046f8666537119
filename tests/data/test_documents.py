"""Documents kept apart in packed sequences: where they start, what is trained on, and that a model sees each alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import surokit as sk
from surokit.data import Tokenizer, chat, text, train_tokenizer
from surokit.data.batches import Batches, document_starts
from surokit.models.checkpoint import load
from surokit.train.stream import join
from tests.models.families import write

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXTS = ["Call me Ishmael. Some years ago", "There she blows!", "never mind how long precisely " * 4, "Aye, aye!"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["Call me Ishmael. Some years ago", "There she blows! " * 5], 280, special=SPECIAL)


@settings(max_examples=60)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12), length=st.integers(2, 7))
def test_starts_are_those_of_a_loop(lengths, length):
    whole = sum(lengths) // length
    if whole == 0:
        return
    firsts = np.cumsum([0, *lengths[:-1]])
    starts_SM = document_starts(firsts, whole, length)
    assert starts_SM.dtype == np.int32
    most = 0
    for row, starts_M in enumerate(starts_SM):
        expected = [t for t in range(length) if t == 0 or row * length + t in firsts]
        assert starts_M[: len(expected)].tolist() == expected
        assert (starts_M[len(expected) :] == length).all()
        most = max(most, len(expected))
    assert starts_SM.shape == (whole, most)


def rows(batch):
    return zip(*(batch[key].tolist() for key in ("input_ids", "labels", "position_ids", "documents")))


def test_text(tokenizer):
    data = text(TEXTS, tokenizer, length=24, batch=2, shuffle=False, documents=True)
    plain = text(TEXTS, tokenizer, length=24, batch=2, shuffle=False)
    assert data.fingerprint != plain.fingerprint
    for batch, other in zip(data, plain):
        assert torch.equal(batch["input_ids"], other["input_ids"])
        assert batch["position_ids"].dtype == torch.int64
        assert batch["documents"].dtype == torch.int32
        for ids, labels, positions, documents in rows(batch):
            starts = [t for t in range(24) if t == 0 or ids[t - 1] == 0]
            assert documents[: len(starts)] == starts
            assert set(documents[len(starts) :]) <= {24}
            assert positions == [t - max(s for s in starts if s <= t) for t in range(24)]
            assert labels == [-100 if t in starts else i for t, i in enumerate(ids)]
    assert set(next(iter(plain))) == {"input_ids", "labels"}


def test_conversations(tokenizer):
    turns = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in zip(TEXTS, TEXTS[::-1])]
    data = chat(turns * 3, tokenizer, length=160, batch=1, shuffle=False, documents=True)
    plain = chat(turns * 3, tokenizer, length=160, batch=1, shuffle=False)
    opening = tokenizer.encode("<|im_start|>user")
    several = 0
    for batch, other in zip(data, plain):
        assert torch.equal(batch["labels"], other["labels"])  # a conversation's first token is never the assistant's
        ((ids, _, positions, documents),) = rows(batch)
        starts = [t for t in range(160) if ids[t : t + len(opening)] == opening]
        assert [d for d in documents if d < 160] == starts
        assert [t for t in range(160) if positions[t] == 0] == starts
        several += len(starts) > 1
    assert several


def test_halves_and_joined_batches_have_one_shape(tokenizer):
    data = text(TEXTS * 9, tokenizer, length=16, batch=2, documents=True)
    train, held_out = data.split(0.2)
    batches = [*train, *held_out]
    assert len({batch["documents"].shape for batch in batches}) == 1
    joined = join(batches[:2])
    assert joined["documents"].shape[0] == joined["position_ids"].shape[0] == 4


def test_without_padding_or_with_one_document_there_is_one_column():
    data = Batches(np.arange(12, dtype=np.uint16).reshape(3, 4), batch=3, starts_SM=np.zeros((3, 1), np.int32))
    batch = next(iter(data))
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3]] * 3
    assert batch["documents"].tolist() == [[0]] * 3
    assert (batch["labels"][:, 0] == -100).all()


def test_a_model_sees_every_document_alone(tokenizer):
    torch.manual_seed(0)
    config = sk.DecoderConfig(layers=2, width=32, heads=4, kv_heads=2, vocab=280, ffn=48, max_length=64)
    model = sk.Decoder(config)
    batch = next(iter(text(TEXTS, tokenizer, length=24, batch=2, shuffle=False, documents=True)))
    ids, positions, labels = (batch[key] for key in ("input_ids", "position_ids", "labels"))
    with torch.no_grad():
        packed = model(ids, position_ids=positions).logits
        loss = model(ids, position_ids=positions, labels=labels).loss
        total = count = 0
        for row, documents in enumerate(batch["documents"].tolist()):
            ends = [*documents, 24]
            for first, last in zip(documents, ends[1:]):
                if last - first < 2:
                    continue
                alone = ids[row : row + 1, first:last]
                torch.testing.assert_close(packed[row, first:last], model(alone).logits[0], atol=2e-6, rtol=1e-5)
                total += model(alone, labels=alone).loss.item() * (last - first - 1)
                count += last - first - 1
    assert loss.item() == pytest.approx(total / count, rel=1e-5)


def test_transformers_keeps_documents_apart_where_it_has_no_cache(tokenizer, tmp_path):
    theirs = write(tmp_path, "qwen3")
    ours = load(tmp_path, dtype=torch.float32, device="cpu")
    batch = next(iter(text(TEXTS, tokenizer, length=24, batch=2, shuffle=False, documents=True)))
    batch["input_ids"] %= theirs.config.vocab_size
    batch["labels"] = batch["input_ids"].where(batch["labels"] >= 0, -100)
    theirs.config.use_cache = False
    with torch.no_grad():
        assert theirs(**batch).loss.item() == pytest.approx(ours(**batch).loss.item(), rel=1e-5)
        theirs.config.use_cache = True  # it asks for whole rows then: what the page says has a reason
        assert theirs(**batch).loss.item() != pytest.approx(ours(**batch).loss.item(), rel=1e-3)


def test_a_session_trains_on_documents(tokenizer):
    torch.manual_seed(0)
    config = sk.DecoderConfig(layers=1, width=32, heads=2, kv_heads=2, vocab=280, ffn=48, max_length=64)
    data = text(TEXTS * 3, tokenizer, length=24, batch=2, documents=True)
    batch = next(b for b in data.fork() if (b["position_ids"][:, 1:] == 0).any())
    record = sk.Session(sk.Decoder(config), data, recipe="bf16", schedule=None).step(batch)
    assert np.isfinite(record.loss)
    assert record.targets == (batch["labels"][:, 1:] != -100).sum()
    assert record.targets < record.tokens - 2  # every document's first token, not only the rows'


def test_a_session_keeps_documents_apart_in_a_transformers_model(tokenizer, tmp_path):
    theirs = write(tmp_path, "qwen3")
    ours = load(tmp_path, dtype=torch.float32, device="cpu")
    batch = next(iter(text(TEXTS, tokenizer, length=24, batch=2, shuffle=False, documents=True)))
    batch["input_ids"] %= theirs.config.vocab_size
    batch["labels"] = batch["input_ids"].where(batch["labels"] >= 0, -100)
    assert theirs.config.use_cache
    sessions = [sk.Session(model, [batch], eval=[batch], recipe="bf16", schedule=None) for model in (theirs, ours)]
    assert sessions[0].evaluate() == pytest.approx(sessions[1].evaluate(), rel=1e-5)
    assert sessions[0].step(batch).loss == pytest.approx(sessions[1].step(batch).loss, rel=1e-5)
