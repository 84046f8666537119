"""Measure answers by one definition each: time to the first token, per token, between tokens, of the whole request; throughput.

The definitions are those of vLLM's benchmark (vllm/benchmarks/serve.py and lib/endpoint_request_func.py) unless a name says
otherwise; DEFINITIONS has them in words, for the foot of a table. Times in answers are seconds, in results milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surokit.serving.client import Answer
from surokit.statistics import Interval

Floats = NDArray[np.float64]

DEFINITIONS: Mapping[str, str] = {
    "ttft": "time to the first token: from sending to the first chunk with a choice, also one that holds a role and no text",
    "ttft_text": "the same to the first chunk with text",
    "tpot": "time per output token: from the first chunk to the last, over the output tokens less one",
    "itl": "time between two chunks that follow each other, of all requests together; a chunk may hold several tokens",
    "e2e": "from sending to the last chunk with a choice",
    "queue": "from when a request was due to its sending: what the client waited for a free connection, in none of the others",
}
QUANTILES = (0.5, 0.9, 0.99)


def ttft_ms(answers: Sequence[Answer]) -> Floats:
    """Return the time to the first token of each answer that has one: float64 [answers]."""
    return _ms([a.chunks[0] - a.sent for a in answers if a.chunks])


def ttft_text_ms(answers: Sequence[Answer]) -> Floats:
    return _ms([a.text - a.sent for a in answers if a.text is not None])


def e2e_ms(answers: Sequence[Answer]) -> Floats:
    return _ms([a.chunks[-1] - a.sent for a in answers if a.chunks])


def tpot_ms(answers: Sequence[Answer]) -> Floats:
    """Return the time per output token of each answer with more than one: float64."""
    return _ms([tpot_s(a) for a in answers if a.chunks and (a.output_tokens or 0) > 1])


def tpot_s(answer: Answer) -> float:
    return (answer.chunks[-1] - answer.chunks[0]) / ((answer.output_tokens or 0) - 1)


def itl_ms(answers: Sequence[Answer]) -> Floats:
    """Return the times between chunks, of all answers together: float64 [chunks - answers]."""
    return _ms([b - a for answer in answers for a, b in zip(answer.chunks, answer.chunks[1:])])


def queue_ms(answers: Sequence[Answer]) -> Floats:
    return _ms([a.sent - a.due for a in answers])


SPREADS = {
    "ttft": ttft_ms,
    "ttft_text": ttft_text_ms,
    "tpot": tpot_ms,
    "itl": itl_ms,
    "e2e": e2e_ms,
    "queue": queue_ms,
}


def _ms(seconds: Sequence[float]) -> Floats:
    return 1e3 * np.asarray(seconds, np.float64)


def duration_s(answers: Sequence[Answer]) -> float:
    """Return the seconds from the first request's due time to the end of the last answer."""
    return max((a.done for a in answers), default=0.0) - min((a.due for a in answers), default=0.0)


def throughput(answers: Sequence[Answer]) -> dict[str, float]:
    """Return requests, input and output tokens a second: of whole answers, over the whole duration."""
    whole, seconds = answered(answers), duration_s(answers)
    if not seconds:
        return {"requests_per_s": math.nan, "input_tokens_per_s": math.nan, "output_tokens_per_s": math.nan}
    return {
        "requests_per_s": len(whole) / seconds,
        "input_tokens_per_s": sum(a.input_tokens or 0 for a in whole) / seconds,
        "output_tokens_per_s": sum(a.output_tokens or 0 for a in whole) / seconds,
    }


def kept_up(answers: Sequence[Answer]) -> float:
    """Return how fast requests that were answered were, over how fast they arrived: from the first to the last of each. What was
    lost is in neither. nan for fewer than two answers, and where they do not say when they were due."""
    whole = answered(answers)
    done, due = [a.done for a in whole], [a.due for a in whole]
    if len(whole) < 2 or not (arrived := max(due) - min(due)) or not (took := max(done) - min(done)):
        return math.nan
    return arrived / took


def answered(answers: Sequence[Answer]) -> list[Answer]:
    """Return the whole answers: times are measured of these alone, the others are counted."""
    return [a for a in answers if a.state == "answered"]


def goodput(answers: Sequence[Answer], limits_ms: Mapping[str, float]) -> float:
    """Return the share of all requests whose answer is whole and within every limit. limits_ms: of ttft, ttft_text, tpot, e2e."""
    check_limits(limits_ms)
    good = [a for a in answered(answers) if all(_within(a, name, limit) for name, limit in limits_ms.items())]
    return len(good) / len(answers) if answers else math.nan


def check_limits(limits_ms: Mapping[str, float]) -> None:
    """Raise ValueError for a limit of what a single answer does not have."""
    if unknown := [name for name in limits_ms if name not in _OF_ONE]:
        raise ValueError(f"goodput: a limit is of {', '.join(_OF_ONE)}, not {unknown[0]!r}.")


_OF_ONE = ("ttft", "ttft_text", "tpot", "e2e")


def _within(answer: Answer, name: str, limit_ms: float) -> bool:
    values = SPREADS[name]([answer])
    if not len(values):  # one token has no time per token; what was not seen was not in time
        return name == "tpot" and answer.output_tokens == 1
    return bool(values[0] <= limit_ms)


def quantiles(values: Floats, qs: Sequence[float], level: float = 0.95) -> list[Interval]:
    """Return quantiles, each with the interval that holds the true one in at least `level` of samples of independent values.

    A quantile is numpy's (linear between neighbors); the ends are order statistics by the binomial distribution of how many
    values lie below the true quantile (Conover, Practical Nonparametric Statistics, 3.2). They are nan where so few values
    cannot say it.
    """
    if not len(values):
        return [Interval(math.nan, math.nan, math.nan)] * len(qs)
    ordered = np.sort(values)
    return [_quantile(ordered, q, level) for q in qs]


def _quantile(ordered: Floats, q: float, level: float) -> Interval:
    low, high = _ranks(len(ordered), q, level)
    mid = float(np.quantile(ordered, q))
    if low < 0 or high >= len(ordered):
        return Interval(math.nan, mid, math.nan)
    return Interval(float(ordered[low]), mid, float(ordered[high]))


@cache
def _ranks(n: int, q: float, level: float) -> tuple[int, int]:
    """Return the places of the order statistics around a quantile; -1 or n where there is none."""
    k = np.arange(n + 1)
    logs = _log_factorials(n)
    with np.errstate(divide="ignore"):
        mass = np.exp(logs[n] - logs[k] - logs[n - k] + k * math.log(q) + (n - k) * math.log1p(-q))
    below, tail = np.cumsum(mass), (1 - level) / 2
    low = int(np.searchsorted(below, tail, side="right")) - 1  # P(fewer than low + 1 lie below) <= tail
    high = int(np.searchsorted(below, 1 - tail, side="left"))
    return low, high


@cache
def _log_factorials(n: int) -> Any:
    return np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, n + 1)))))


__all__ = [
    "DEFINITIONS",
    "QUANTILES",
    "SPREADS",
    "answered",
    "check_limits",
    "duration_s",
    "goodput",
    "kept_up",
    "quantiles",
    "throughput",
]
