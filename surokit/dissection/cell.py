"""Hold what became of one cell: plain values that are written as JSON and read on any machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from surokit.places import write_whole
from surokit.statistics import Interval, bootstrap_interval, geometric_mean

FORMAT = 3  # of what is written of a cell
State = Literal["measured", "does not fit", "refused", "failed", "late"]


@dataclass(frozen=True)
class Cell:
    """A Cell is what one setting gave on one machine.

    name: the switches in which it differs from the baseline. machine: the device it ran on; origin: "" where `dissect` measured it,
    else the file that it was brought from. setting: every switch as a number, a bool or text.
    state: "measured", "does not fit", "refused" (settings contradict each other), "failed" or "late" (beyond the limit of a
        cell), and `why` in a sentence.
    work: batch, length, accumulate, gpus and tokens_per_step; weights (a digest before the first step), parameters, trained;
        changed, a sentence, where another library's engine had other weights at its first step; loss_range, by how much the
        last loss differed between rounds.
    step_ms: the mean time of a step in each round, without the profiler. losses: of each step of the first round, the warm-up's
        among them. calls: when the call began that measured each round.
    memory: bytes of a process: "rest" by term (what is held between steps), "phases" (the most in forward, backward, optimizer),
        "peak"; limit_gib.
    planned: "peak" bytes and "terms", "step_ms" (None without a calibration), "binds".
    cores_in_use: cores of this machine that others used just before or after, on a CPU.
    profile: milliseconds a step, from profiled steps: wall, busy, idle, phases, parts, activities, lost, communication.
    """

    name: str
    state: State
    setting: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""
    machine: str = ""
    origin: str = ""
    work: Mapping[str, Any] = field(default_factory=dict)
    step_ms: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    calls: tuple[str, ...] = ()
    memory: Mapping[str, Any] = field(default_factory=dict)
    planned: Mapping[str, Any] = field(default_factory=dict)
    profile: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    cores_in_use: float = 0.0

    @property
    def gpus(self) -> int:
        """Return how many processes the cell has."""
        return int(self.setting.get("gpus", 1))

    @property
    def is_measured(self) -> bool:
        return self.state == "measured"

    @property
    def ms(self) -> float | None:
        """Return the time of a step in milliseconds, without the profiler: the geometric mean of the rounds."""
        return geometric_mean(self.step_ms) if self.step_ms else None

    @property
    def tokens_per_s(self) -> Interval | None:
        """Return tokens a second of all processes, with a 95 % interval from the spread of the rounds; None where nothing was
        timed."""
        if given := self.work.get("tokens_per_s"):  # of another program, which says no more
            return Interval(float("nan"), float(given), float("nan"))
        if not self.step_ms or not self.work.get("tokens_per_step"):
            return None
        return bootstrap_interval([1e3 * self.work["tokens_per_step"] / ms for ms in self.step_ms])

    def with_round(self, found: Cell) -> Cell:
        """Return the cell with one round more; where that was not measured, with its reason."""
        if not found.is_measured:
            return replace(self, why=f"round {len(self.step_ms) + 1} was not measured: {found.why}")
        work = dict(self.work)
        if self.losses:
            ranges = (self.work.get("loss_range", 0.0), abs(found.losses[-1] - self.losses[-1]))
            work["loss_range"] = float(np.max(ranges))  # not a number where one is not
        if self.prefill_ms is not None:
            work["prefill_ms"] = [*work["prefill_ms"], *found.work["prefill_ms"]]
        return replace(
            self,
            why="",
            work=work,
            step_ms=self.step_ms + found.step_ms,
            calls=self.calls + found.calls,
            seconds=self.seconds + found.seconds,
            cores_in_use=max(self.cores_in_use, found.cores_in_use),
        )

    @property
    def prefill_ms(self) -> float | None:
        """Return the mean time of the forward over the prompts, where tokens were generated."""
        found = self.work.get("prefill_ms")
        return float(np.mean(found)) if found else None

    @property
    def output(self) -> str | None:
        """Return a digest of the tokens that were generated."""
        return self.work.get("output")

    @property
    def peak_gib(self) -> float | None:
        peak = self.memory.get("peak")
        return None if peak is None else peak / 2**30

    @property
    def planned_gib(self) -> float | None:
        peak = self.planned.get("peak")
        return None if peak is None else peak / 2**30

    @property
    def idle(self) -> float | None:
        """Return the share of a profiled step in which the device neither computed nor exchanged data."""
        return sum(self.profile["phases_idle_ms"].values()) / self.profile["wall_ms"] if self.profile else None

    @property
    def loss(self) -> float | None:
        """Return the loss of the last timed step."""
        return self.losses[-1] if self.losses else None

    def compares_with(self, other: Cell) -> bool:
        """Return whether the losses of both are of as many tokens a step."""
        if self.loss is None or other.loss is None:
            return False
        return self.work.get("tokens_per_step") == other.work.get("tokens_per_step")

    def same_output(self, other: Cell) -> bool | None:
        """Return whether both generated the same tokens; None where one has none, or their batches are of other sizes."""
        if self.output is None or other.output is None or self.work.get("batch") != other.work.get("batch"):
            return None
        return self.output == other.output

    @property
    def scale(self) -> float:
        """Return the factor from a profiled step to one without the profiler, which is faster."""
        return self.ms / self.profile["wall_ms"] if self.ms and self.profile else 1.0

    def save(self, path: Path) -> None:
        write_whole(path, as_json(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Cell:
        """Read what `save` wrote. ValueError for another file."""
        try:
            return cls.of(json.loads(path.read_text()))
        except (OSError, TypeError, AttributeError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} holds no cell of a dissection ({error}).") from error

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Cell:
        """Make one of the values that JSON gave. KeyError or TypeError where it lacks some."""
        known = {f.name for f in fields(cls)}
        values = {key: value for key, value in found.items() if key in known}
        for name in ("step_ms", "losses", "calls"):
            values[name] = tuple(values.get(name) or ())
        return cls(**values)


def as_json(values: Mapping[str, Any]) -> str:
    """Return values as JSON, numpy's numbers as Python's."""
    return json.dumps(values, indent=1, default=lambda number: number.item())
