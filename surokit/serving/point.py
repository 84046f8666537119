"""Hold the answers of one server under one workload, or what another client states of them, and give their figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from surokit.serving import measures
from surokit.serving.client import Answer
from surokit.serving.driving import Delay
from surokit.serving.workload import Workload
from surokit.statistics import Interval
from surokit.units import three_digits

STATES = ("failed", "truncated", "late")


@dataclass(frozen=True)
class Point:
    """A Point is one workload on one server.

    delay: of the client itself. notes: what a reader has to know. date: when it began, by which its prompts are drawn.
    stated: figures of another client's file that keeps no single answers, by the names of `row()`. unknown: names of what its
    answers cannot say, such as "itl" where only an answer's first and last token are known, and "short" where it is not known how
    many tokens were asked for.
    """

    server: str
    workload: Workload
    answers: tuple[Answer, ...] = field(default=(), repr=False)
    delay: Delay | None = None
    notes: tuple[str, ...] = ()
    date: str = ""
    stated: Mapping[str, float] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the server and how the requests arrived."""
        return f"{self.server}, {self.workload.name}"

    def spread(self, name: str, q: float = 0.5) -> Interval:
        """Return a quantile of "ttft", "ttft_text", "tpot", "itl", "e2e" or "queue", in milliseconds, with its interval."""
        return self._spreads(name, (q,))[0]

    def _spreads(self, name: str, qs: Sequence[float]) -> list[Interval]:
        if name in self.unknown or not self.answers:
            stated = [self.stated.get(f"{name}_p{q * 100:.0f}_ms", math.nan) for q in qs]
            return [Interval(math.nan, value, math.nan) for value in stated]
        return measures.quantiles(measures.SPREADS[name](measures.answered(self.answers)), qs)

    def throughput(self) -> Mapping[str, float]:
        """Return requests_per_s, input_tokens_per_s and output_tokens_per_s."""
        found = measures.throughput(self.answers)
        return {name: self.stated.get(name, value) for name, value in found.items()}

    def count(self, state: str) -> int:
        """Return how many answers are in a state: "answered", "failed", "truncated", "late"."""
        return int(self.stated.get(state, sum(a.state == state for a in self.answers)))

    @property
    def lost(self) -> int:
        """Return how many requests have no whole answer."""
        return sum(map(self.count, STATES))

    @property
    def short(self) -> int:
        """Return how many whole answers have fewer tokens than were asked for, where that is known."""
        if "short" in self.unknown:
            return 0
        asked = self.workload.output_tokens
        return sum(a.output_tokens is not None and a.output_tokens < asked for a in measures.answered(self.answers))

    @property
    def line(self) -> str:
        """Return the point in a line: throughput, the first token, the answers that were lost."""
        found = self.throughput()
        return (
            f"{self.name}: {three_digits(found['requests_per_s'])} requests/s, "
            f"{three_digits(found['output_tokens_per_s'])} tokens/s, first token after {three_digits(self.spread('ttft').mid)} ms"
            + (f", {self.lost:,} lost" if self.lost else "")
        )

    def row(self) -> dict[str, Any]:
        """Return the figures of the point: throughput, quantiles in milliseconds, counts."""
        found: dict[str, Any] = {"server": self.server, "arrivals": self.workload.name}
        found |= {"input_tokens": self.workload.input_tokens, "output_tokens": self.workload.output_tokens}
        found |= {"requests": self.count("answered") + self.lost, **self.throughput()}
        for name in measures.SPREADS:
            for q, (low, mid, high) in zip(measures.QUANTILES, self._spreads(name, measures.QUANTILES)):
                found |= {
                    f"{name}_p{q * 100:.0f}_ms": mid,
                    f"{name}_p{q * 100:.0f}_low": low,
                    f"{name}_p{q * 100:.0f}_high": high,
                }
        found |= {state: self.count(state) for state in ("answered", *STATES)}
        return {**found, "short": self.short}


__all__ = ["STATES", "Point"]
