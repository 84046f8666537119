"""Grade a model on a task: how many of its test problems come out right.

A model is asked in evaluation mode, in few forwards over many problems, and waited for once at the end. It is left as it was:
training mode, random states, gradients.

B batch, T tokens, N problems.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from surokit.data.batches import check_positive
from surokit.nn.evaluating import evaluating
from surokit.statistics import Interval, wilson_interval
from surokit.train.random_state import seeded

if TYPE_CHECKING:
    from surokit.train.session import Session

Batch = dict[str, Tensor]
IGNORED = -100


@dataclass(frozen=True)
class Score:
    """A Score says how many of `total` test problems came out right."""

    correct: int
    total: int

    @property
    def accuracy(self) -> float:
        """Return the share that is right."""
        return self.correct / self.total

    @property
    def interval(self) -> Interval:
        """Return the accuracy with its 95 % interval (Wilson's)."""
        return wilson_interval(self.correct, self.total)

    def __str__(self) -> str:
        return f"{self.correct} of {self.total} right, accuracy {self.interval}"


class Task(ABC):
    """A Task gives batches to train on, a fixed set of test problems, and the grade of a model on them.

    No test problem is ever in a training batch. `vocab` ids and `length` tokens are what a model has to take:
    `DecoderConfig(vocab=task.vocab, max_length=task.length, ...)`.
    """

    @property
    @abstractmethod
    def vocab(self) -> int:
        """Return the number of token ids."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Return the tokens of a sequence."""

    @abstractmethod
    def batches(self, batch: int = 64, seed: int = 0) -> Any:
        """Return a source of training batches, as Session takes it: labels are -100 on everything but the answer."""

    @abstractmethod
    def held_out(self, problems: int | None = None, batch: int = 256) -> list[Batch]:
        """Return the test problems as batches, the same ones each time; `Session(eval=...)` takes them for a held-out loss."""

    @abstractmethod
    def right(self, model: nn.Module, problems: int | None = None, batch: int = 256) -> Tensor:
        """Return which test problems come out right, bool [N] on the model's device; nothing waits for that."""

    def grade(self, model: nn.Module, problems: int | None = None, batch: int = 256) -> Score:
        """Return how many test problems `model` gets right; waits for the device once.

        Args:
            model: a surokit.Decoder, or any module whose forward(input_ids=...) returns an object with `.logits` [B, T, V], as
                those of transformers do. It is asked in evaluation mode and left as it was.
            problems: test problems; None takes the task's usual number.
            batch: problems a forward.
        """
        right_N = self.right(model, problems, batch)
        return Score(int(right_N.sum()), len(right_N))

    def meter(self, every: int = 50, problems: int | None = None, name: str = "accuracy") -> Grading:
        """Return a meter for Session(meters=[...]), which grades every so many steps; the records then have the column `name`."""
        return Grading(self, every, problems, name)


@dataclass(frozen=True)
class Grading:
    """A Grading grades a session's model every `every` steps, without waiting for the device: a column `name` of the records,
    empty in the steps between. Its time counts in the step's."""

    task: Task
    every: int = 50
    problems: int | None = None
    name: str = "accuracy"

    def __post_init__(self) -> None:
        check_positive("every", self.every)
        self.task.held_out(
            self.problems
        )  # refused here where there are not as many: a run goes on without a meter that fails

    def __call__(self, session: Session) -> Mapping[str, Tensor]:
        if session.steps % self.every:
            return {}
        return {self.name: self.task.right(session.model, self.problems).float().mean()}

    def reached(self, accuracy: float) -> Reached:
        """Return a condition for `session.stop_when`: it ends the run once a grade is at least `accuracy`.

        Raises ValueError where that is no share.
        """
        if not 0 < accuracy <= 1:
            raise ValueError(f"reached({accuracy}): an accuracy is a share above 0 and at most 1, for example 0.95.")
        return Reached(self, accuracy)


@dataclass(frozen=True)
class Reached:
    """A Reached is a function of a Record, for `session.stop_when`: it gives a reason once what `meter` found is at least
    `accuracy`. The session needs that meter."""

    meter: Grading
    accuracy: float

    def __call__(self, record: Any) -> str:
        name = self.meter.name
        found = record.meters.get(name, 0.0)
        return f"{name} {found:.3f} at step {record.step}" if found >= self.accuracy else ""


@contextmanager
def asked(model: nn.Module) -> Iterator[torch.device]:
    """Put the model in evaluation mode, without gradients and with random numbers of its own, inside the block; give its device."""
    device = next(model.parameters()).device
    with seeded(0, device), torch.no_grad(), evaluating(model):
        yield device


def placed(values: Tensor, device: torch.device) -> Tensor:
    """Return values of the host on a device, without waiting for it."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def right_answers(model: nn.Module, batches: Iterable[Batch]) -> Tensor:
    """Return for each row of the batches whether every token that has a label is the likeliest one, bool [N] on the device.

    The tokens before it are the right ones each time (teacher forcing), and yet this is whether greedy decoding writes the answer:
    as long as it has written the answer's tokens it has been given the same tokens, and at the first other one both are wrong.
    """
    with asked(model) as device:
        found = []
        for batch in batches:
            logits_BTV = model(input_ids=placed(batch["input_ids"], device)).logits
            labels_BT = placed(batch["labels"], device)[:, 1:]
            found.append(((logits_BTV[:, :-1].argmax(-1) == labels_BT) | (labels_BT == IGNORED)).all(1))
    return torch.cat(found)
