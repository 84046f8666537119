"""This file knows what was applied to a live model, and what the session that trains it says of its steps. No torch here.

`apply` notes its recipe here and `fuse` its fusion; what keeps a part of a model on the host is a `HostForward`, and a Session is a
`Trainer`. So a plan can read a model without knowing those who changed it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from surokit.fusion import Fusion
from surokit.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn

_RECIPE, _PART = "_surokit_recipe", "_surokit_recipe_part"


def is_adapter(name: str) -> bool:
    """Return whether a module or parameter path belongs to an adapter: `lora_A`, `lora_B`, PEFT's `lora_embedding_A` and so on."""
    return any(part.startswith("lora_") for part in name.split("."))


def in_copies(model: Any) -> Any:
    """Return the model of which DistributedDataParallel has a copy in each process, and any other as it is."""
    return model.module if type(model).__name__ == "DistributedDataParallel" else model


def note_recipe(model: nn.Module, recipe: Recipe, part: int = 0) -> None:
    """Remember the recipe that was applied to a model and which of its parts computes; `recipe_of` and `part_of` return them."""
    setattr(in_copies(model), _RECIPE, recipe)
    setattr(in_copies(model), _PART, part)


def recipe_of(model: nn.Module) -> Recipe | None:
    """Return the recipe that `apply` gave this model last, or None."""
    found = getattr(in_copies(model), _RECIPE, None)
    return found if isinstance(found, Recipe) else None


def part_of(model: nn.Module) -> int:
    """Return which part of its recipe a model computes in; 0 where the recipe does not change."""
    part: int = getattr(in_copies(model), _PART, 0)
    return part


def fusion_of(model: nn.Module) -> Fusion | None:
    """Return the fusion that `fuse` gave this model last, or None."""
    return next((f for m in model.modules() if isinstance(f := getattr(m, "fusion", None), Fusion)), None)


class HostStream(ABC):
    """A HostStream copies a part of a model between host and device.

    keeps: which part. prefetch: how many blocks of weights, or copies of activations, are fetched ahead.
    """

    keeps: Literal["weights", "activations"]
    prefetch: int


class HostForward(ABC):
    """A HostForward stands around a module's own forward, as its attribute `forward`, and uses a stream until it is `removed`."""

    stream: HostStream
    removed: bool


def host_streams(model: nn.Module) -> Iterator[HostStream]:
    """Yield the streams in use by the modules of a model, from the outside in."""
    for module in model.modules():
        forward = vars(module).get("forward")
        while forward is not None:
            if isinstance(forward, HostForward) and not forward.removed:
                yield forward.stream
            forward = getattr(forward, "__wrapped__", None)


class Trainer(ABC):
    """A Trainer trains a model and can be asked for the arguments of a plan: a Session is one.

    model: the module that it trains. compile: whether torch's compiler makes its steps.
    """

    model: nn.Module
    compile: bool

    @abstractmethod
    def plan_arguments(self) -> Mapping[str, Any]:
        """Return arguments of `surokit.plan` that its steps have: optimizer, accumulate, and where known graphs, batch, length."""
