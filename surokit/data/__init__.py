"""Turn text and conversations into batches for training: `text`, `chat`.

Both tokenize a source once, group by group, and keep nothing but the tokens (two bytes each up to 65,536 ids, else four).

- `text`: every document, then the end-of-text token, in one long row that is cut into sequences. No padding. Attention
  crosses from a document into the next one, as in pre-training; the end-of-text token is what tells them apart.
  `documents=True` keeps them apart: a model that takes position_ids then sees each for itself.
- `chat`: whole conversations, several to a sequence where they fit, padded; only the assistant's tokens count in the loss.

Dimensions: S sequences, T length, N tokens.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surokit.data import conversations, sources, templates
from surokit.data.batches import Batches, check_positive, check_seed, document_starts
from surokit.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer, train_tokenizer

__all__ = ["Batches", "Tokenizer", "chat", "check_vocabulary", "load_tokenizer", "text", "train_tokenizer"]


def text(
    source: Any,
    tokenizer: Any,
    length: int = 512,
    batch: int = 8,
    *,
    seed: int = 0,
    shuffle: bool = True,
    documents: bool = False,
    column: str | None = None,
    split: str = "train",
) -> Batches:
    """Pack documents to sequences of fixed length.

    Args:
        source: a text file (documents in a .txt are separated by two or more blank lines), a .jsonl, .json or .parquet
            file, a folder of such files, a dataset id on the Hub, an object of `datasets`, or a list of texts or paths.
        tokenizer: whatever `load_tokenizer` takes.
        length: tokens a sequence.
        batch: sequences a batch.
        seed: of the order; another epoch has another order.
        shuffle: False keeps the text's order.
        documents: keep the documents of a sequence apart: none sees another, and its first token is not trained on. A model
            of transformers does that without a cache: Session tells it so, another loop has to (`use_cache=False`).
        column: of records; "text", or the only column of text, where not given.
        split: of a dataset that has splits.

    Raises:
        FileNotFoundError: no such source or tokenizer, or the Hub does not answer.
        ValueError: no text, less than one sequence or one batch of it, no such column or split, a number out of range,
            or a tokenizer without an end-of-text token.
    """
    _check_numbers(length, batch, seed)
    tokenizer = load_tokenizer(tokenizer)
    if tokenizer.eos_id is None:
        raise ValueError(
            f"the tokenizer ({tokenizer.name}) has no end-of-text token to put between documents: name one as eos_token in "
            "its tokenizer_config.json"
        )
    name, texts = sources.documents(source, column, split)
    ids_N, lengths = _tokenize(texts, tokenizer)
    count = len(lengths)
    if count == 0:
        raise ValueError(f"there is no text in {name}")
    firsts_N = np.cumsum([0, *lengths[:-1]])
    whole, rest = divmod(len(ids_N), length)
    if whole == 0:
        raise ValueError(
            f"{name} gives {len(ids_N)} tokens, fewer than one sequence of {length}: use a shorter length or more text"
        )
    notes = [f"{count:,} document{'s' * (count > 1)}"]
    if rest:
        notes.append(f"last {rest} tokens left out")
    return Batches(
        ids_N[: whole * length].reshape(whole, length),
        batch=batch,
        seed=seed,
        shuffle=shuffle,
        starts_SM=document_starts(firsts_N, whole, length) if documents else None,
        firsts_N=firsts_N,
        tokenizer=tokenizer,
        name=name,
        notes=tuple(notes),
    )


def chat(
    source: Any,
    tokenizer: Any,
    length: int = 2048,
    batch: int = 2,
    train_on: str = "assistant",
    *,
    template: str | None = None,
    seed: int = 0,
    shuffle: bool = True,
    documents: bool = False,
    column: str | None = None,
    split: str = "train",
) -> Batches:
    """Pack whole conversations into sequences that are trained on the assistant's tokens.

    A sequence takes conversations while they fit (best fit, in their order); the rest of it is the end-of-text token,
    not trained on. A conversation longer than a sequence is cut; one whose assistant speaks only behind the cut is left
    out. `repr` counts both.

    Args:
        source: records with "messages" ([{"role", "content"}]) or "conversations" ([{"from", "value"}]): a .jsonl, .json
            or .parquet file, a folder of them, a dataset id, an object of `datasets`, or a list of such records or of
            lists of messages.
        tokenizer: whatever `load_tokenizer` takes; its chat template is used.
        length: tokens a sequence.
        batch: sequences a batch.
        train_on: "assistant" (the assistant's turns with their end-of-turn token) or "all".
        template: a Jinja chat template instead of the tokenizer's; without either, ChatML. Around the assistant's part it
            may have {% generation %} ... {% endgeneration %}.
        seed, shuffle, split: as for `text`.
        documents: keep the conversations of a sequence apart, as `text` does its documents.
        column: of records; "messages", "conversations" or "conversation" where not given.

    Raises:
        FileNotFoundError: no such source or tokenizer, or the Hub does not answer.
        ValueError: no conversation, an unknown role, no assistant turn, a template that refuses, a number out of range.
    """
    _check_numbers(length, batch, seed)
    if train_on not in ("assistant", "all"):
        raise ValueError(f'train_on={train_on!r} must be "assistant" or "all"')
    tokenizer = load_tokenizer(tokenizer)
    template = conversations.template_for(tokenizer, template)
    name, values = sources.read(source, split, sources.choose_conversation(column))
    # Only compact arrays are kept: the encoded conversations of a group are dropped with the group.
    dtype = _dtype(tokenizer)
    kept: list[tuple[NDArray[Any], NDArray[np.bool_]]] = []
    cut = unheard = straddling = count = 0
    for group in _groups(((where, templates.normalise(value, where)) for where, value in values), 500):
        for encoded in conversations.encode(group, tokenizer, template, train_on):
            count += 1
            straddling += encoded.straddling
            trained_T = encoded.trained_T[:length]
            cut += len(encoded.ids_T) > length
            # The first token of a sequence is never predicted, so alone it trains nothing.
            if trained_T[1:].any():
                kept.append((encoded.ids_T[:length].astype(dtype), trained_T))
            else:
                unheard += 1
    if count == 0:
        raise ValueError(f"there is no conversation in {name}")
    if not kept:
        raise ValueError(
            f"none of the {count} conversations of {name} trains anything within {length} tokens: use a longer length"
        )
    packed = pack([len(ids_T) for ids_T, _ in kept], length)
    padding = tokenizer.eos_id if tokenizer.eos_id is not None else 0
    ids_ST = np.full((len(packed), length), padding, dtype=dtype)
    trained_ST = np.zeros((len(packed), length), dtype=np.bool_)
    filled_S = np.zeros(len(packed), dtype=np.int64)
    firsts: list[int] = []
    for row, members in enumerate(packed):
        for member in members:
            ids_T, trained_T = kept[member]
            firsts.append(row * length + int(filled_S[row]))
            here = slice(filled_S[row], filled_S[row] + len(ids_T))
            ids_ST[row, here], trained_ST[row, here] = ids_T, trained_T
            filled_S[row] += len(ids_T)
    notes = [f"{count:,} conversation{'s' * (count > 1)}"]
    if cut:
        notes.append(f"{cut} cut at {length} tokens")
    if unheard:
        notes.append(f"{unheard} left out (nothing to train on within {length} tokens)")
    if straddling:
        notes.append(f"{straddling} token{'s' * (straddling > 1)} across a turn's edge not trained on")
    return Batches(
        ids_ST,
        batch=batch,
        seed=seed,
        shuffle=shuffle,
        trained_ST=trained_ST,
        filled_S=filled_S,
        starts_SM=document_starts(np.array(firsts), len(packed), length) if documents else None,
        firsts_N=np.array(firsts),
        tokenizer=tokenizer,
        chat_template=template,
        name=name,
        notes=tuple(notes),
    )


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return which items go into which row: each item, in order, into the fullest row that still has room, else a new one.

    Args:
        lengths: of the items, each at most `capacity`.
        capacity: of a row.

    Returns:
        For each row, its items' indices in ascending order.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (room left, row), ascending; full rows are not in it
    for item, size in enumerate(lengths):
        at = bisect_left(room, (size, -1))
        if at < len(room):
            left, row = room.pop(at)
        else:
            left, row = capacity, len(rows)
            rows.append([])
        rows[row].append(item)
        if left > size:
            insort(room, (left - size, row))
    return rows


def _tokenize(documents: Iterable[str], tokenizer: Tokenizer) -> tuple[NDArray[Any], list[int]]:
    """Return all documents' ids in a row, [N], each closed by the end-of-text token, and how long each is."""
    opening = [] if tokenizer.opening_id is None else [tokenizer.opening_id]
    dtype = _dtype(tokenizer)
    parts: list[NDArray[Any]] = []
    for group in sources.chunks(documents):
        parts += [np.array([*opening, *ids, tokenizer.eos_id], dtype=dtype) for ids in tokenizer.encode_batch(group)]
    return np.concatenate(parts) if parts else np.zeros(0, dtype), [len(part) for part in parts]


def _dtype(tokenizer: Tokenizer) -> type[np.unsignedinteger[Any]]:
    return np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32


def _groups(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while group := list(islice(iterator, size)):
        yield group


def _check_numbers(length: int, batch: int, seed: int) -> None:
    check_positive("length", length)
    check_positive("batch", batch)
    check_seed(seed)
    if length < 2:
        raise ValueError("length=1 leaves nothing to predict: use at least 2")
