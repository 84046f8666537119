"""What can go wrong in training; every message names the cause and the remedy."""

from __future__ import annotations

from surokit.errors import CheckpointError


class NonFiniteError(ArithmeticError):
    """Several steps in a row had a loss or a gradient that is inf or NaN; none of them changed the model."""


class ResumeError(CheckpointError):
    """A checkpoint does not belong to this model, recipe, optimizer or data."""


__all__ = ["CheckpointError", "NonFiniteError", "ResumeError"]
