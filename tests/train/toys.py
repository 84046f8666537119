"""A language model of two layers with dropout, and batches for it: small enough for a step to take a millisecond. And what
disturbs a run of it: slow and gated models, meters that act at a step, a listener, patience."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from surokit.train import AdamW, Cosine, Session
from surokit.train.records import Record
from surokit.train.stream import Batch

VOCAB = 32
PATIENCE_S = 30.0


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


def wait_for(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)


def interrupt_when(what: Callable[[], object]) -> None:
    """A Ctrl-C once that is so, and this thread waits."""

    def later() -> None:
        wait_for(what)
        time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=later).start()


class Gated(Toy):
    """Waits in every step until `gate` is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        self.gate.wait(PATIENCE_S)
        return super().forward(input_ids, labels)


class Slow(Toy):
    """Takes a while for a step, so that a run is still there when somebody asks something of it."""

    def __init__(self, seconds: float = 0.002) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        time.sleep(self.seconds)
        return super().forward(input_ids, labels)


class At:
    """A meter that does something at one step, in the thread that trains."""

    def __init__(self, step: int, work: Callable[[Session], object]) -> None:
        self.step, self.work = step, work

    def __call__(self, session: Session) -> dict[str, float]:
        if session.steps == self.step:
            self.work(session)
        return {}


def whole(steps: int, **options: Any) -> Session:
    """The run that nobody disturbs."""
    session = make_session(**options)
    session.run(steps)
    return session
