"""This file has the errors that are worth catching by name. Each message says the cause and the remedy."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written as asked: wrong tensors, damaged files, an unsupported model."""


class OffloadError(RuntimeError):
    """Work beside the training thread failed or stopped: a host update, or a copy between host and device. The error in the
    thread, where there is one, is its `__cause__`."""
