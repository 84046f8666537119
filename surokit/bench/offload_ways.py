"""Define the ways that `bench offload` times, and read the figures of one of them while it has its turn.

A way is a system on a device that sleeps (offload_emulated) or a decoder that trains (offload_decoder). Its turn is so many
steps on the clock, beside what its optimizer counted of the same steps.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

NONE, CONTROL, AGAIN, ZENFLOW = "none", "synchronous", "synchronous, again", "zenflow"
WAYS = (NONE, CONTROL, AGAIN, ZENFLOW)
K = 0.1
#: Hot columns are chosen in the first step, and never again.
CHOSEN_ONCE = {"select_strategy": "step", "select_interval": 10**6}
_HOST_WAITS = ("slot", "adam", "selection")


class Way(Protocol):
    """A Way is a system that takes turns. window: steps of a window."""

    optimizer: Any
    window: int
    parameters: int

    def begin(self) -> None: ...

    def step(self) -> None: ...

    def over(self) -> float:
        """Wait for the device; return the seconds to take off the clock."""
        ...

    def close(self) -> None: ...


def turn(way: Way, steps: int) -> dict[str, Any]:
    """Time so many steps: ms a step; by the optimizer's own account of the same steps the host's waits by cause and the
    device's time without work, ms a step, and bytes over the model's."""
    if way.window > 1:
        way.begin()
        for _ in range(way.window):
            way.step()
    way.begin()
    before = counts(way.optimizer)
    begun = time.perf_counter()
    for _ in range(steps):
        way.step()
    owed_s = way.over()
    took_s = time.perf_counter() - begun - owed_s
    found = {"steps": steps, "ms": 1e3 * took_s / steps, "owed_ms": 1e3 * owed_s, **since(before, way, steps)}
    drain(way.optimizer)
    return found


def counts(optimizer: Any) -> dict[str, float]:
    """Return the counts of an offloading optimizer so far; nothing for another."""
    accounts = getattr(optimizer, "accounts", None)
    if accounts is None:
        return {}
    migrated, setup = accounts.bytes["migration"], accounts.bytes["setup"]
    return {
        **{f"wait {cause}": ms for cause, ms in accounts.stall_by_cause.items()},
        "idle_ms": optimizer.link.device_stall_ms(),
        "down": optimizer.link.bytes_down - migrated[0] - setup[0],  # the link's own count
        "up": optimizer.link.bytes_up - migrated[1] - setup[1],
        "migrated": migrated[0] + migrated[1],
    }


def since(before: dict[str, float], way: Way, steps: int) -> dict[str, Any]:
    """Return the counts of so many steps since `before`, a step."""
    if not before:
        return {}
    after = counts(way.optimizer)
    per = {name: (after[name] - before[name]) / steps for name in before}
    waits = {name.removeprefix("wait "): value for name, value in per.items() if name.startswith("wait ")}
    size = way.optimizer.accounts.model_bytes
    return {
        "waits": waits,
        "idle_ms": per["idle_ms"],
        # for weights that landed: of a device that waits where its host does. A real one may have had work while the host waited
        "device_waits": max(0.0, per["idle_ms"] - sum(waits[cause] for cause in _HOST_WAITS)),
        "model_bytes": size,
        **{name: per[name] / size for name in ("down", "up", "migrated")},
    }


def drain(optimizer: Any) -> None:
    if hasattr(optimizer, "drain"):
        optimizer.drain()


def host_busy(way: Way, steps: int) -> dict[str, float]:
    """Return the seconds a step that each of the host's threads works, without its waits."""
    from surokit.offload.timeline import recorded

    way.begin()
    for _ in range(way.window - 1):
        way.step()
    with recorded() as timeline:
        for _ in range(steps):
            way.step()
        way.over()
        drain(way.optimizer)
    return {lane: timeline.busy_s(lane) / steps for lane in ("adam", "accumulator")}
