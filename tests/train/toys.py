"""A language model of two layers with dropout, and batches for it: small enough for a step to take a millisecond. And what
disturbs a run of it: a gated model, meters that act at a step, a listener."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from surokit.runs.records import Record
from surokit.train import AdamW, Cosine, Session
from surokit.train.stream import Batch
from tests.clocks import PATIENCE_S, main_thread_waits, until

VOCAB = 32
ENDLESS = 1_000_000  # steps of a run that somebody will end


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


class Listener:
    """Everything a session tells, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *args: self.told.append((name[3:], args[0] if len(args) == 1 else args))

    def on_step(self, record: Record) -> None:
        self.told.append(("step", record.step))

    def on_end(self, reason: str) -> None:
        self.told.append(("end", reason))

    def of(self, name: str) -> list[Any]:
        return [value for kind, value in self.told if kind == name]


def wait_for_step(session: Session, step: int) -> None:
    until(lambda: session.steps == step)


def interrupt_when(what: Callable[[], object], waits: bool = True) -> None:
    """A Ctrl-C once that is so and, where `waits`, the main thread waits."""

    def later() -> None:
        until(lambda: what() and (main_thread_waits() or not waits))
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=later).start()


class Gated(Toy):
    """Waits in every step until `gate` is open; `reached` says that one does."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.reached = threading.Event(), threading.Event()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        self.reached.set()
        self.gate.wait(PATIENCE_S)
        return super().forward(input_ids, labels)


class At:
    """A meter that does something at one step, in the thread that trains."""

    def __init__(self, step: int, work: Callable[[Session], object]) -> None:
        self.step, self.work = step, work

    def __call__(self, session: Session) -> dict[str, float]:
        if session.steps == self.step:
            self.work(session)
        return {}


def until_asked(step: int) -> At:
    """A meter that holds the run in that step until somebody asks something of it."""
    return At(step, lambda session: until(lambda: session.control._news))


def whole(steps: int, **options: Any) -> Session:
    """The run that nobody disturbs."""
    session = make_session(**options)
    session.run(steps)
    return session
