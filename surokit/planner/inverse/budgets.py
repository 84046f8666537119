"""This module finds the memory that an answer has to fit into."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surokit import arguments
from surokit.planner.offload.formulas import Host, asked_host

if TYPE_CHECKING:
    from surokit.planner.counts.memory import Memory
    from surokit.planner.planning import Plan
    from surokit.planner.times.cost import StepTime


def memory_budget(plan: Plan, gib: float | None) -> float:
    """Return the GiB to fit into: as given, or the plan's `room_gib`. Raises ValueError where neither is known, or `gib` is in
    another unit."""
    if gib is None:
        if plan.room_gib is None:
            raise ValueError("The memory to fit into is not known: give gib=80, or the plan a gpu= that has it.")
        return plan.room_gib
    room = arguments.number("gib", gib)
    # no device holds 20 TiB: bytes or MiB were meant
    if room > 20_000:
        guess = room / 1024 if room < 2e7 else room / 2**30
        raise ValueError(f"gib={room:g} is more than any GPU has: did you mean {guess:.4g} (the unit is GiB)?")
    return room


def known_memory_budget(plan: Plan, gib: float | None) -> float | None:
    """Return the GiB to fit into as `memory_budget` does; None where it is not known."""
    return plan.room_gib if gib is None else memory_budget(plan, gib)


#: GiB of the host for each GPU where its memory is not known: a DGX H100 has 2 TiB for eight (NVIDIA's user guide).
ASSUMED_HOST_GIB = 256.0


@dataclass(frozen=True)
class Space:
    """A Space holds the memory that there is, GiB: of one GPU, and of the host for each GPU. Times are those on `host`, where it
    was given; `assumed` says that the host's memory is not known."""

    gib: float
    host_gib: float = math.inf
    host: Host | None = None
    assumed: bool = True

    def step_time(self, plan: Plan) -> StepTime | None:
        """Return the time of a step that ways are compared by; None for a bound, which does not know what a change costs."""
        found = plan.step_time_on(self.host) if self.host and plan.setup.offloads else plan.step_time
        return None if found is None or found.kind == "bound" else found

    def holds(self, memory: Memory) -> bool:
        return memory.gib <= self.gib and self.hosts(memory)

    def hosts(self, memory: Memory) -> bool:
        return memory.host_gib <= self.host_gib

    def suffices(self, memory: Memory, now: Memory) -> bool:
        """True if there is as much, or no more is taken than `now` takes, which may not fit either."""
        return memory.gib <= max(self.gib, now.gib) and memory.host_gib <= max(self.host_gib, now.host_gib)


def space_of(asks: str, plan: Plan, gib: float, host: Host | None, host_gib: float | None) -> Space:
    """Return the Space of a question that the method `asks`: the host as given or measured beside the plan's GPU, its memory as
    given, as the host has it, or as assumed, but no less than the plan keeps there."""
    host = asked_host(asks, host, plan.gpu)
    known = host.memory_gib if host else None
    if host_gib is not None:  # none of the host's is an answer
        known = 0.0 if host_gib == 0 else arguments.number("host_gib", host_gib)
    if known is not None:
        return Space(gib, known, host, assumed=False)
    return Space(gib, max(ASSUMED_HOST_GIB, plan.memory.host_gib), host)
