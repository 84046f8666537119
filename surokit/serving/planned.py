"""Put what a plan for serving predicts beside what was measured, under the same workloads and by the same measures."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from surokit.serving.client import Answer
from surokit.serving.point import Point
from surokit.serving.workload import Workload

if TYPE_CHECKING:
    from surokit.planner.inverse.serving import Serving
    from surokit.planner.planning import Plan


def planned(plan: Plan, workload: Workload, server: str) -> Point:
    """Return the answers that a plan predicts for a workload, as a point of the server's name.

    A request takes its prefill and then a token a step of decoding, beside as many others as are served at once: as many as are
    sent together or, at a rate, as that rate keeps in the server (Little's law), and never more than its memory holds. What finds
    no place waits. ValueError as `plan.serving` has it, and for a plan that divides the model among GPUs.
    """
    if plan.setup.division.divides:
        raise ValueError(
            "planned(): serving is planned for one GPU that holds the whole model: give a plan that is not "
            f"{plan.setup.division.words}."
        )
    if workload.prompts:
        raise ValueError(
            "planned(): prompts of your own have lengths of their own: give workload= with the input_tokens to plan for."
        )
    one = plan.serving(workload.input_tokens, workload.output_tokens, 1)
    beside = one.at(_beside(one, workload))
    prefill_ms, whole_ms = beside.prefill_batch_ms, beside.request_ms
    places = one.most or workload.requests
    answers = [
        Answer(
            number=number,
            due=sent,
            began=sent,
            sent=sent,
            done=start + whole_ms / 1e3,
            state="answered",
            chunks=(start + prefill_ms / 1e3, start + whole_ms / 1e3)[: workload.output_tokens],
            text=start + prefill_ms / 1e3,
            input_tokens=workload.input_tokens,
            output_tokens=workload.output_tokens,
            counted=True,
            finish="length",
        )
        for number, (sent, start) in enumerate(_starts(workload, places, whole_ms / 1e3))
    ]
    stated = {f"itl_p{q}_ms": beside.token_ms for q in (50, 90, 99)} if workload.output_tokens > 1 else {}
    notes = (f"planned and not measured ({one.kind}), {beside.concurrency} served at once: {beside.title}", *one.notes)
    return Point(server, workload, tuple(answers), notes=notes, stated=stated, unknown=("itl", "queue"))


def _beside(one: Serving, workload: Workload) -> int:
    """Return how many requests are served at once."""
    most = max(1, min(one.most or workload.requests, workload.requests))
    if workload.rate is None:
        return min(most, workload.concurrency or most)
    low, high = 1, most
    while (
        low < high
    ):  # the fewest that keep up with the rate: a request takes longer beside more, and they take less together
        middle = (low + high) // 2
        keeps_up = middle / one.at(middle).request_ms * 1e3 >= workload.rate
        low, high = (low, middle) if keeps_up else (middle + 1, high)
    return low


def _starts(workload: Workload, places: int, seconds: float) -> list[tuple[float, float]]:
    """Return when each request is sent, and when it finds a place."""
    due = workload.arrivals().tolist()
    workers = [0.0] * (workload.concurrency or 0)  # when each sends its next request
    free = [0.0] * min(places, workload.requests)
    found = []
    for at in due:
        sent = heapq.heappop(workers) if workers else at
        start = max(sent, heapq.heappop(free))
        heapq.heappush(free, start + seconds)
        if workload.concurrency:
            heapq.heappush(workers, start + seconds)
        found.append((sent, start))
    return found


__all__ = ["planned"]
