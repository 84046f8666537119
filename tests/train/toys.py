"""A language model of two layers with dropout, and batches for it: small enough for a step to take a millisecond."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from surokit.train import AdamW, Cosine, Session
from surokit.train.stream import Batch

VOCAB = 32


class Toy(nn.Module):
    """Embedding, hidden layer, dropout (so that random states matter), norm with a bias, head."""

    def __init__(self, seed: int = 0, width: int = 16, dropout: float = 0.1) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(VOCAB, width)
            self.hidden = nn.Linear(width, width)
            self.norm = nn.LayerNorm(width)
            self.lm_head = nn.Linear(width, VOCAB, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embed(input_ids)
        x = self.norm(x + self.drop(torch.relu(self.hidden(x))))
        logits = self.lm_head(x).float()
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return SimpleNamespace(loss=loss, logits=logits)


def make_batches(count: int = 7, rows: int = 4, length: int = 12, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    batches: list[Batch] = []
    for _ in range(count):
        ids = torch.randint(VOCAB, (rows, length), generator=generator)
        batches.append({"input_ids": ids, "labels": ids.clone()})
    return batches


def make_session(model: nn.Module | None = None, data: Any = None, **options: Any) -> Session:
    """A session on a Toy with a learning rate at which something happens; `options` win."""
    settings: dict[str, Any] = {"optimizer": AdamW(lr=1e-2), "schedule": Cosine(warmup=2, steps=20), **options}
    return Session(Toy() if model is None else model, make_batches() if data is None else data, **settings)


def weights(session: Session) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in session.model.state_dict().items()}


def moments(session: Session) -> list[Tensor]:
    """Every tensor of the optimizer's state, in a fixed order."""
    states = session.optimizer.state_dict()["state"]
    return [value.clone() for index in sorted(states) for _, value in sorted(states[index].items())]


def assert_same_state(one: Session, other: Session) -> None:
    """Weights, optimizer state and counters, bit for bit."""
    assert one.steps == other.steps
    for (name, a), b in zip(weights(one).items(), weights(other).values(), strict=True):
        assert torch.equal(a, b), name
    for a, b in zip(moments(one), moments(other), strict=True):
        assert torch.equal(a, b)
