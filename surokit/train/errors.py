"""These errors say what can go wrong in training; every message names the cause and the remedy."""

from __future__ import annotations

from surokit.errors import CheckpointError


class NonFiniteError(ArithmeticError):
    """Several steps in a row had a loss or a gradient that is inf or NaN; none of them changed the model."""


class NoTargetsError(ValueError):
    """There was nothing to learn in several steps in a row: no label counted, all of them are -100."""

    def __init__(self, steps: int) -> None:
        super().__init__(
            f"No label counted in {steps} steps in a row (all of them are -100), so nothing was learned and the weights are as "
            "before. The likely cause is a mask that covers every token, or a chat template in which the assistant's part is "
            "not found: look at one batch's labels, and for sk.chat at repr(data), which says how much is trained on."
        )


class ResumeError(CheckpointError):
    """A checkpoint does not belong to this model, recipe, optimizer or data."""


__all__ = ["CheckpointError", "NoTargetsError", "NonFiniteError", "ResumeError"]
