"""Put a model in evaluation mode for a while, and each of its modules back in the mode that it was in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode in the block; at its end every module has its own mode again, those that were frozen in
    evaluation mode too."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
