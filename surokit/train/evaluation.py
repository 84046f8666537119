"""A model in training is asked without a trace in the run: for its held-out loss, a sample of its text, or a reply."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from surokit.data import Tokenizer, check_vocabulary, load_tokenizer
from surokit.data.batches import Batches
from surokit.data.conversations import prompt_for_reply
from surokit.nn.evaluating import evaluating
from surokit.train.random_state import seeded
from surokit.train.setup import explained_entries, loss_of, targets_in
from surokit.train.stream import Batch

if TYPE_CHECKING:
    from surokit.train.session import Session


@dataclass(frozen=True)
class Evaluation:
    """An Evaluation holds the held-out loss after `step`, the mean over `targets` labels; wall_ms is the host's time."""

    step: int
    loss: float
    targets: int
    wall_ms: float


def evaluate(session: Session, source: Iterable[Batch]) -> Evaluation:
    """Return the loss on `source` between two steps, of our data on the same batches each time; waits for the device."""
    if isinstance(source, Batches):
        source = source.fork(restarts=True)
    began = time.perf_counter()
    device = session.device
    total = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    count = torch.zeros((), dtype=torch.int64, device=device)
    with aside(session), torch.no_grad():
        for batch, counts in _own(session, source):
            session.beat()
            session.vocabulary.check(batch)
            there = session.to_device(batch)
            targets = targets_in(there) * counts
            with session.vocabulary.explains(batch), explained_entries(session.model, batch):
                loss = loss_of(session.engine.retry_on_oom(session.model, **there))
            # a batch without labels has a mean of nothing
            total += torch.where(targets > 0, loss.to(total.dtype) * targets, 0)
            count += targets
    labels = int(session.processes.sum(count))
    session.processes.sum(total)
    if not labels:
        raise ValueError("The held-out data has no label that counts: it is empty, or all labels are -100.")
    return Evaluation(session.steps, float(total) / labels, labels, (time.perf_counter() - began) * 1e3)


def _own(session: Session, source: Iterable[Batch]) -> Iterator[tuple[Batch, int]]:
    """Yield this process' part of the batches, each with 1. All processes get as many, since they may need each other: one that
    has none of the last ones gets another's, with 0."""
    rank, ranks = session.processes.rank, session.processes.world
    batches = iter(source)
    while group := list(islice(batches, ranks)):
        yield (group[rank], 1) if rank < len(group) else (group[0], 0)


def sample(
    session: Session, prompt: str, max_new_tokens: int | None, temperature: float, seed: int, tokenizer: Any = None
) -> str:
    """Return `prompt` and how the model continues it."""
    try:
        chosen = _tokenizer(session, tokenizer)
    except TypeError:  # the data's may be anybody's, as long as it does these two things
        chosen = session.data.tokenizer
        if tokenizer is not None or not (hasattr(chosen, "encode") and hasattr(chosen, "decode")):
            raise
    ids = list(chosen.encode(prompt))
    if not ids:
        raise ValueError("The prompt has no tokens: give at least a word.")
    opening = getattr(chosen, "opening_id", None)  # with which every text begins that is trained on
    prompt_ids = ids if opening in (None, ids[0]) else [opening, *ids]
    most = _at_most(max_new_tokens, 64, session, prompt_ids)
    return str(chosen.decode(ids + _continued(session, prompt_ids, most, temperature, seed)))


def chat(
    session: Session,
    messages: Any,
    max_new_tokens: int | None,
    temperature: float,
    seed: int,
    tokenizer: Any = None,
    template: str | None = None,
) -> str:
    """Return the assistant's next turn in a conversation."""
    chosen = _tokenizer(session, tokenizer)
    if template is None and tokenizer is None:
        template = session.data.chat_template
    prompt = prompt_for_reply(messages, chosen, template)
    most = _at_most(max_new_tokens, 128, session, prompt.ids)
    new = _continued(session, prompt.ids, most, temperature, seed, prompt.end_ids)
    return prompt.reply(new, chosen)


def _tokenizer(session: Session, given: Any) -> Tokenizer:
    if given is None:
        given = session.data.tokenizer
    if given is None:
        raise ValueError(
            "The data has no tokenizer, so a prompt cannot be encoded: pass tokenizer=..., or use surokit.text(...) or "
            "surokit.chat(...) as data."
        )
    tokenizer = load_tokenizer(given)
    check_vocabulary(tokenizer, session.vocabulary.size)
    return tokenizer


def _at_most(asked: int | None, usual: int, session: Session, ids: list[int]) -> int:
    """Return the number of new tokens that was asked for, else the usual one or as many as the model takes behind `ids`; 1 where it
    takes none, which generate() refuses."""
    if asked is not None:
        return asked
    length = getattr(getattr(session.model, "config", None), "max_length", usual + len(ids))
    return max(1, min(usual, length - len(ids)))


def _continued(
    session: Session, ids: list[int], max_new_tokens: int, temperature: float, seed: int, ends: tuple[int, ...] = ()
) -> list[int]:
    """Return the tokens that the model puts behind `ids`, up to and with one of `ends` or of the model's own end tokens."""
    from surokit.models.generation import generate

    ends = (*ends, *getattr(getattr(session.model, "config", None), "eos_ids", ()))
    prompt_1T = torch.tensor([ids], dtype=torch.int64, device=session.device)
    generator = torch.Generator(session.device).manual_seed(seed)
    with aside(session), torch.no_grad():
        out_1T = generate(
            session.model, prompt_1T, max_new_tokens, temperature=temperature, generator=generator, eos_id=ends
        )
    new: list[int] = out_1T[0, len(ids) :].tolist()
    return new


@contextmanager
def aside(session: Session) -> Iterator[None]:
    """Put the model in evaluation mode and draw other random numbers in the block; both are undone afterwards."""
    with seeded(session.seed, session.device), evaluating(session.model):
        yield
