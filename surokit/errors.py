"""Errors that are worth catching by name. Each message says the cause and the remedy."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written as asked: wrong tensors, damaged files, an unsupported model."""
