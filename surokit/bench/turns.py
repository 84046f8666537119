"""Let systems take turns, A B A B: every comparison of times here is made so.

    with closing(Turns(start)) as turns:
        for number, name in turns.rounds(("ours", "theirs"), 4):
            answer = turns.opened(name, until_s).take(8, until_s)

A system is a process, or an object that answers like one. It is started and warmed up when its first turn comes, and then
waits while others run. Where the device has no room for all of them at once, some are built anew for each of their turns. A
`Call` is the time that there is: work that does not fit into it is left to another call, and work that a system cannot do
is kept in words. The request of a turn, and the part of its answer that is stored, are the benchmark's own.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from typing import Any, Generic, Protocol, TypeVar

from surokit.bench.process import Failed, left_s


class OutOfTime(Exception):
    """An OutOfTime ends this call before the next measurement; nothing is lost."""


class System(Protocol):
    """A System answers requests: process.Worker, or a system in this process."""

    ready: dict[str, Any]

    def ask(self, request: Mapping[str, Any], timeout_s: float = ...) -> dict[str, Any]: ...

    def close(self) -> None: ...


class Running:
    """A Running is a system after its first step and its warm-up, with all its losses and its peaks of memory. Raises
    Failed.

    until_s, of time.monotonic, is when it has to have answered. steady: steps behind the warm-up that say how long one
    takes.
    """

    def __init__(self, system: System, warm_up: int, until_s: float, steady: int = 0) -> None:
        self.system = system
        self.losses: list[float] = []
        self.clocks: dict[str, float] = {}  # of the GPU in the last answer, where a process tells them
        self.peak_mib = self.reserved_mib = self.each_s = 0.0
        with ExitStack() as failing:
            failing.callback(system.close)
            self.first_step_s: float = self.take(1, until_s)["seconds"]
            self.warm_up_s: float = self.take(max(1, warm_up - 1), until_s)["seconds"]  # behind the first step
            self.warm_up_steps = len(self.losses)
            if steady:
                self.each_s = self.take(steady, until_s)["seconds"] / steady
            failing.pop_all()

    def take(self, steps: int, until_s: float, **more: Any) -> dict[str, Any]:
        """Take so many steps, and return the system's answer."""
        answer = self.system.ask({"steps": steps, **more}, left_s(until_s))
        self.losses += answer["losses"]
        self.clocks = answer.get("clocks", {})
        self.peak_mib = max(self.peak_mib, answer["peak_mib"])
        self.reserved_mib = max(self.reserved_mib, answer.get("reserved_mib", 0.0))
        return answer

    def close(self) -> None:
        self.system.close()


class Closes(Protocol):
    def close(self) -> None: ...


K = TypeVar("K", bound=Hashable)
S = TypeVar("S", bound=Closes)


class Turns(Generic[K, S]):
    """Turns holds open systems by name.

    start: (name, until when) -> a system that is warm; it may raise Failed. alone: names of those that are built anew for each
    turn; None where none may be, since the training of a system so far counts.
    """

    def __init__(self, start: Callable[[K, float], S], alone: Collection[K] | None = None) -> None:
        self.open: dict[K, S] = {}
        self._start, self._alone, self._crowded = start, alone, False
        self._dropped: set[K] = set()

    def opened(self, name: K, until_s: float) -> S:
        """Return the open system of that name, or a new one; where there is no room for it beside others, all are alone
        from here on."""
        if name not in self.open:
            try:
                self.open[name] = self._start(name, until_s)
            except Failed as problem:
                if problem.why != "memory" or self._alone is None or not self.open:
                    raise
                self._crowded = True
                self.close()
                self.open[name] = self._start(name, until_s)
        return self.open[name]

    def rounds(self, names: Iterable[K], count: int) -> Iterator[tuple[int, K]]:
        """Yield (round, name of the system whose turn it is): A B A B, without those that are dropped on the way."""
        for number, name in product(range(count), names):
            if name not in self._dropped:
                yield number, name
                if self.alone(name):
                    self.close(name)

    def alone(self, name: K) -> bool:
        return self._crowded or name in (self._alone or ())

    def drop(self, name: K) -> None:
        """Drop a system, which takes no more turns."""
        self._dropped.add(name)
        self.close(name)

    def close(self, name: K | None = None) -> None:
        """Close the system of that name, or all."""
        for each in list(self.open) if name is None else [name]:
            if each in self.open:
                self.open.pop(each).close()


@dataclass(frozen=True)
class Call:
    """A Call is the time of one call. ends_s, of time.monotonic: when nothing new is begun; work that was begun may take
    grace_s more.

    late_s: work that takes so much longer than it should has failed.
    """

    ends_s: float
    grace_s: float = 0.0
    late_s: float = math.inf

    def tried(self, key: str, need_s: float | None, work: Callable[[float], Mapping[str, Any]]) -> dict[str, Any]:
        """Return the result of `work(until_s)`, or {"left_out": why} if something is missing here, or {"failed": why}.

        Raises OutOfTime if fewer than `need_s` seconds are left (None: the work was begun before), and if the work may only have
        lacked time.
        """
        left, last_s = left_s(self.ends_s), self.ends_s + self.grace_s
        if need_s is not None and (left < need_s or not left):
            raise OutOfTime(f"Next is {key}, about {need_s:.0f} s, and {left:.0f} s are left.")
        print(key, file=sys.stderr, flush=True)
        until_s = min(last_s, time.monotonic() + (need_s or 0.0) + self.late_s)
        try:
            return dict(work(until_s))
        except Failed as problem:
            if problem.why == "late" and until_s >= last_s:
                raise OutOfTime(f"{key} did not end within this call.") from None
            print(f"{key}: {problem}", file=sys.stderr, flush=True)
            return {"left_out" if problem.why == "missing" else "failed": str(problem)}
