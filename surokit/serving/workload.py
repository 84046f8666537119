"""Say what a server is asked: how many requests of how many tokens, and how they arrive."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Workload:
    """A Workload is a number of requests, and when each is sent.

    requests, input_tokens, output_tokens: 1000 requests of 512 tokens in one burst, as arXiv 2311.03687 sends them; every answer
        is as long as the server allows to ask for.
    rate: requests a second, which arrive at random (a Poisson process), whether or not earlier ones were answered; None is all at
        once. concurrency: as many are kept unanswered, each answer being followed by the next request; None does not bound it.
    prompts: the user's own texts, in turn, instead of random words of input_tokens.
    chat: sent as a message to chat/completions, and not as a text to completions.
    seed: of arrivals, and of prompts together with the time at which they are sent.
    """

    requests: int = 1000
    input_tokens: int = 512
    output_tokens: int = 128
    rate: float | None = None
    concurrency: int | None = None
    prompts: tuple[str, ...] = ()
    chat: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        given: object = self.prompts
        if isinstance(given, str):
            raise ValueError("Workload(prompts): give texts, as in prompts=(text,), not one text.")
        object.__setattr__(self, "prompts", tuple(self.prompts))
        for name in ("requests", "input_tokens", "output_tokens"):
            _check_count(name, getattr(self, name))
        if self.concurrency is not None:
            _check_count("concurrency", self.concurrency)
        if self.rate is not None and not (isinstance(self.rate, int | float) and 0 < self.rate < math.inf):
            raise ValueError(
                f"Workload(rate={self.rate!r}): requests a second, a number above 0, or None for one burst."
            )
        if self.rate is not None and self.concurrency is not None:
            raise ValueError(
                f"Workload(rate={self.rate:g}, concurrency={self.concurrency}): requests arrive at a rate, or as earlier ones are "
                "answered: give one of the two."
            )
        if any(not isinstance(text, str) or not text for text in self.prompts):
            raise ValueError("Workload(prompts): give texts, none of them empty.")

    def rates(self, *rates: float) -> list[Workload]:
        """Return the workload at each of these rates: a sweep."""
        return [replace(self, rate=rate, concurrency=None) for rate in rates]

    def concurrencies(self, *counts: int) -> list[Workload]:
        """Return the workload with each of these numbers of unanswered requests: a sweep."""
        return [replace(self, rate=None, concurrency=count) for count in counts]

    @property
    def name(self) -> str:
        """Return how the requests arrive, in words."""
        if self.rate is not None:
            return f"{self.rate:g} requests/s"
        return "burst" if self.concurrency is None else f"{self.concurrency} at once"

    @property
    def digest(self) -> int:
        """Return a number of what is asked, other for others."""
        return zlib.crc32(repr(self).encode())

    def arrivals(self) -> np.ndarray:
        """Return when each request is due, in seconds from the first: float64 [requests]."""
        if self.rate is None:
            return np.zeros(self.requests)
        gaps = np.random.default_rng(self.seed).exponential(1 / self.rate, self.requests)
        return np.cumsum(gaps) - gaps[0]


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"Workload({name}={value!r}): a whole number of at least 1.")


def listed(workload: Workload | Iterable[Workload]) -> list[Workload]:
    """Return one workload or several as a list. TypeError or ValueError for others."""
    found = [workload] if isinstance(workload, Workload) else list(dict.fromkeys(workload))
    if not found or not all(isinstance(each, Workload) for each in found):
        raise TypeError("serve_bench(workload): give a surokit.Workload, or several of them for a sweep.")
    return found


__all__ = ["Workload", "listed"]
