"""What a model in training is asked without a trace in the run: held-out loss, a sample of its text."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from surokit.train.random_state import seeded
from surokit.train.setup import loss_of, targets_in
from surokit.train.stream import Batch, check_batch

if TYPE_CHECKING:
    from surokit.train.session import Session


@dataclass(frozen=True)
class Evaluation:
    """Held-out loss after `step`: the mean over `targets` labels; wall_ms on the host."""

    step: int
    loss: float
    targets: int
    wall_ms: float


def evaluation(session: Session, source: Iterable[Batch]) -> Evaluation:
    """The loss on `source` between two steps; waits for the device."""
    began = time.perf_counter()
    device = session.device
    total = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    count = torch.zeros((), dtype=torch.int64, device=device)
    with aside(session), torch.no_grad():
        for batch in source:
            check_batch(batch)
            batch = session.to_device(batch)
            targets = targets_in(batch)
            loss = loss_of(session.engine.with_room(session.model, **batch))
            # a batch without labels has a mean of nothing
            total += torch.where(targets > 0, loss.to(total.dtype) * targets, 0)
            count += targets
    labels = int(count)
    if not labels:
        raise ValueError("The held-out data has no label that counts: it is empty, or all labels are -100.")
    return Evaluation(session.steps, float(total) / labels, labels, (time.perf_counter() - began) * 1e3)


def sample(session: Session, prompt: str, max_new_tokens: int, temperature: float, seed: int) -> str:
    """`prompt` and what the model makes of it."""
    tokenizer = session.data.tokenizer
    if tokenizer is None:
        raise ValueError("The data has no tokenizer, so a prompt cannot be encoded: use surokit.text(...) as data.")
    from surokit.models.generation import generate

    ids = torch.tensor([list(tokenizer.encode(prompt))], dtype=torch.int64, device=session.device)
    if not ids.numel():
        raise ValueError("The prompt has no tokens: give at least a word.")
    generator = torch.Generator(session.device).manual_seed(seed)
    with aside(session), torch.no_grad():
        out = generate(session.model, ids, max_new_tokens, temperature=temperature, generator=generator)
    return str(tokenizer.decode(out[0].tolist()))


@contextmanager
def aside(session: Session) -> Iterator[None]:
    """Evaluation mode and other random numbers, both undone afterwards."""
    training = [module for module in session.model.modules() if module.training]
    with seeded(session.seed, session.device):
        session.model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True
