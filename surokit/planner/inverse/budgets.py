"""This module finds the memory that an answer has to fit into."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surokit import arguments

if TYPE_CHECKING:
    from surokit.planner.counts.memory import Memory
    from surokit.planner.offload.formulas import Host
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


@dataclass(frozen=True)
class Space:
    """A Space holds the memory that there is, GiB: of one GPU, and of its host (infinite where that is not known). Times are those
    on `host`, where it was given."""

    gib: float
    host_gib: float = math.inf
    host: Host | None = None

    def step_time(self, plan: Plan) -> StepTime | None:
        """Return the time of a step that ways are compared by; None for a bound, which does not know what a change costs."""
        found = plan.step_time_on(self.host) if self.host and plan.setup.offloads else plan.step_time
        return None if found is None or found.kind == "bound" else found

    def holds(self, memory: Memory) -> bool:
        return memory.gib <= self.gib and self.hosts(memory)

    def hosts(self, memory: Memory) -> bool:
        return memory.host_gib <= self.host_gib
