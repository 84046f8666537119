"""Find the changes that make a plan fit, and its largest terms of memory and time; each change is planned, and its effect shown.

The remedies are the changes that save memory (changes.py), in their order. Whatever a remedy puts on the host has to fit there
too, where the host's memory is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surokit import units
from surokit.planner.inverse.budgets import Space, known_memory_budget, memory_budget
from surokit.planner.inverse.changes import Change, merged, saving_memory, smaller_batch
from surokit.planner.inverse.recipe_choice import compare_recipes
from surokit.planner.offload.formulas import Host, asked_host
from surokit.tables import data_frame, html_table, text_table

if TYPE_CHECKING:
    import pandas as pd

    from surokit.hardware.gpus import Gpu
    from surokit.planner.counts.memory import Memory, Term
    from surokit.planner.planning import Plan

#: A remedy is shown where it alone takes this share of the memory away, or is part of the path.
NOTICEABLE = 0.01


@dataclass(frozen=True)
class Remedy:
    """A Remedy is one change: `how` to write it, what it `costs`, the GiB that the plan takes with it alone, and the host's GiB.

    `fits` says whether GPU and host have that much, `hosted` whether the host has; a host whose memory is not known has room for
    everything.
    """

    how: str
    changes: Mapping[str, Any]
    costs: str
    gib: float
    fits: bool
    host_gib: float = 0.0
    hosted: bool = True


@dataclass(frozen=True, repr=False)
class Fitting:
    """A Fitting holds the remedies that help a plan fit into `room_gib`: each alone, and in `path` the first that suffice together.

    `plan` is the plan with the path taken, itself where it fits already, None where nothing here is enough. A remedy that saves
    nothing alone may still help beside another, as the peak moves from one part of a step to the next: it is listed only in a path.
    `host_room_gib` is the host's memory, None where it is not known.
    """

    room_gib: float
    gib: float
    remedies: tuple[Remedy, ...]
    path: tuple[Remedy, ...]
    plan: Plan | None
    sentence: str
    host_room_gib: float | None = None

    @property
    def already(self) -> bool:
        """True if the plan fits as it is."""
        return self.plan is not None and not self.path

    def table(self) -> pd.DataFrame:
        """Return the remedies as a DataFrame, one a row: remedy, gib, fits, host_gib, hosted, costs."""
        columns = ["remedy", "gib", "fits", "host_gib", "hosted", "costs"]
        return data_frame([(r.how, r.gib, r.fits, r.host_gib, r.hosted, r.costs) for r in self.remedies], columns)

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                r.how,
                units.gib(r.gib),
                "would fit" if r.fits and not self.already else "",
                units.gib(r.host_gib) if r.host_gib else "",
                "" if r.hosted else "does not fit",
                r.costs,
            )
            for r in self.remedies
        ]

    _HEADER = ("one at a time", "leaves", "", "on the host", "", "and costs")

    def _title(self) -> str:
        room = units.gib(self.room_gib)
        if self.host_room_gib is not None:
            room += f", and {units.gib(self.host_room_gib)} of the host's"
        return f"{units.gib(self.gib)} into {room}: {self.sentence}"

    def __repr__(self) -> str:
        table = [text_table(self._rows(), header=self._HEADER, right=(1, 3))] if self.remedies else []
        return "\n".join([self._title(), *table])

    def _repr_html_(self) -> str:
        return html_table(self._rows(), header=self._HEADER, right=(1, 3), title=self._title())


def fitting(plan: Plan, *, gib: float | None = None, host: Host | None = None) -> Fitting:
    """Find the changes that make the plan fit into `gib` (the GPU's own memory without it) and into the host's, where it is known.

    Without `host`, it is the one that a calibration of the plan's GPU measured. Raises ValueError where the memory to fit into is
    not known, TypeError for a host that is not a Host.
    """
    space = _space(plan, gib, host)
    memory, host_room = plan.memory, None if math.isinf(space.host_gib) else space.host_gib
    tries = tuple(_remedy(plan, space, change) for change in saving_memory(plan, space))
    path = () if space.holds(memory) else _eased(plan, _path(plan, tries, space), space)
    eased = {tuple(remedy.changes): remedy for remedy in path}
    better = plan.but(**merged(r.changes for r in path or tries))
    if space.holds(memory):
        better, sentence = plan, f"it fits as it is{_without(plan)}"
    elif path:
        together = " with ".join(remedy.how for remedy in path)
        verb = "makes" if len(path) == 1 else "make"
        sentence = f"{together} {verb} it fit ({_takes(better)}){_without(plan)}"
    else:
        sentence = _no_way(plan, tries, better, space)
    helping = tuple(r for r in tries if r.gib <= (1 - NOTICEABLE) * memory.gib or tuple(r.changes) in eased)
    enough = better if path or space.holds(memory) else None
    return Fitting(space.gib, memory.gib, helping, path, enough, sentence, host_room)


def _space(plan: Plan, gib: float | None, host: Host | None) -> Space:
    host = asked_host("fitting", host, plan.gpu)
    return Space(memory_budget(plan, gib), (host and host.memory_gib) or math.inf)


def _no_way(plan: Plan, tries: Sequence[Remedy], together: Plan, space: Space) -> str:
    """Say why no remedy suffices, and what else might."""
    cure = "take a smaller model, shorter sequences or a GPU with more memory"
    if plan.setup.training and not (plan.setup.zero == 3 and plan.setup.gpus > 1):
        cure += ", or more GPUs with zero=3"
    left = f"all remedies together leave {_takes(together)}" if tries else "there is no remedy"
    if not space.hosts(together.memory):
        return f"{left}, and the host has {units.gib(space.host_gib)}; {cure}"
    return f"{left}, the largest term being {_largest(together)}; {cure}"


def _takes(plan: Plan) -> str:
    host = f", and {units.gib(plan.memory.host_gib)} on the host" if plan.memory.host else ""
    return units.gib(plan.memory.gib) + host


def _remedy(plan: Plan, space: Space, change: Change) -> Remedy:
    again, costs = change.of(plan), change.costs
    memory, waits_ms = again.memory, again.time.waits_ms
    if waits_ms is not None and again.setup.offloads != plan.setup.offloads:
        costs += f"; {units.value(waits_ms, 'ms')} more a step"
    return Remedy(
        change.how, change.arguments, costs, memory.gib, space.holds(memory), memory.host_gib, space.hosts(memory)
    )


def _largest(plan: Plan) -> str:
    term = plan.memory.largest
    return f"{term.name} ({units.gib(term.gib)})"


def _without(plan: Plan) -> str:
    """Say what the memory leaves out, for an answer that depends on it; "" where nothing is left out."""
    left_out = plan.memory.left_out
    return f", without {left_out[0].partition(':')[0]}" if left_out else ""


def _path(plan: Plan, remedies: Sequence[Remedy], space: Space) -> tuple[Remedy, ...]:
    """Return the first remedy that suffices, or the first that suffice together, without any that is not needed."""

    def fits(some: Sequence[Remedy]) -> bool:
        return space.holds(plan.but(**merged(r.changes for r in some)).memory)

    # together, remedies that leave the recipe come before one that changes it, and with it perhaps what trains
    leaving = [r for r in remedies if "recipe" not in r.changes]
    if first := next((r for r in leaving if r.fits), None):
        return (first,)
    taken = _together(leaving, fits)
    if not taken and (other := next((r for r in remedies if r.fits), None)):
        return (other,)
    taken = taken or _together(remedies, fits)
    for remedy in reversed(taken[:-1]):
        rest = [r for r in taken if r is not remedy]
        if fits(rest):
            taken = rest
    return tuple(taken)


def _together(remedies: Sequence[Remedy], fits: Callable[[Sequence[Remedy]], bool]) -> list[Remedy]:
    """Return the first remedies that suffice together, where a later one replaces an earlier of its kind; none where all together
    do not suffice."""
    taken: list[Remedy] = []
    for remedy in remedies:
        taken = [r for r in taken if not set(r.changes) <= set(remedy.changes)] + [remedy]
        if fits(taken):
            return taken
    return []


def _eased(plan: Plan, path: tuple[Remedy, ...], space: Space) -> tuple[Remedy, ...]:
    """Return the path with the largest batch that still fits with its other remedies."""
    others = merged(r.changes for r in path if "batch" not in r.changes)
    if len(path) < 2 or not any("batch" in remedy.changes for remedy in path):
        return path
    eased = _remedy(plan, space, smaller_batch(plan.but(**others), space))
    return tuple(eased if "batch" in remedy.changes else remedy for remedy in path)


# -- what binds


@dataclass(frozen=True)
class Binding:
    """A Binding holds the largest term of memory or of time, its share of the whole, and a remedy, "" where none is known."""

    what: str
    term: str
    share: float
    how: str
    remedy: str

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.what}: {self.term}, {self.share:.0%} of {self.how}{remedy}"


@dataclass(frozen=True, repr=False)
class Binds:
    """A Binds holds the largest terms of a plan's memory and of its time; `time` is None without a GPU and a step."""

    memory: Binding
    time: Binding | None

    def __repr__(self) -> str:
        return "\n".join(str(b) for b in (self.memory, self.time) if b is not None)

    def _repr_html_(self) -> str:
        rows = [(b.what, b.term, f"{b.share:.0%}", b.how, b.remedy) for b in (self.memory, self.time) if b is not None]
        return html_table(rows, header=("", "binds", "share", "of", "remedy"), right=(2,))


def binds(plan: Plan) -> Binds:
    """Name the largest term of one GPU's memory, and what a step's time mostly goes to, each with its share and a remedy."""
    return Binds(_memory_binding(plan), _time_binding(plan))


def _memory_binding(plan: Plan) -> Binding:
    m = plan.memory
    term = m.largest
    loosens = ""
    for change in saving_memory(plan, Space(known_memory_budget(plan, None) or 0.0)):
        less = change.of(plan).memory
        left, (what, there) = _kind(less, term)[1], _kind(m, term)
        if left <= 0.8 * there and less.gib < m.gib:
            loosens = f"{change.how} leaves {units.gib(left)} of {what} ({change.costs})"
            break
    share = term.gib / m.gib if m.gib else 0.0
    phase = f", in its {m.peak_phase} phase" if m.peak_phase else ""
    where = "CPU" if plan.setup.device == "cpu" else "GPU"
    return Binding("memory", term.name, share, f"{units.gib(m.gib)} on one {where}{phase}", loosens)


def _kind(memory: Memory, term: Term) -> tuple[str, float]:
    """Return (the kind of a term, GiB of all terms of that kind): "weights, stored quantized" is of the kind weights."""
    kind = term.name.partition(",")[0]
    return kind, sum(t.gib for t in memory.terms if t.counted and t.name.partition(",")[0] == kind)


def _time_binding(plan: Plan) -> Binding | None:
    estimate = plan.estimate
    if estimate is not None:
        what, ms = max(estimate.by_bound().items(), key=lambda item: item[1])
        module = _longest(estimate.by_module())
        term, share = f"{what}, most of the time in {module}", ms / estimate.step_ms
        how = f"a step of {estimate.step_ms:,.4g} ms ({estimate.kind}: {estimate.how.partition('; ')[0]})"
    elif plan.compute is None or plan.gpu is None or plan.time.floor_step_ms is None:
        return None
    else:
        at_peak = _at_peak(plan, plan.gpu)
        module = _longest(at_peak)
        total = sum(at_peak.values())
        mine = sum(seconds for name, seconds in at_peak.items() if name.partition(".")[0] == module)
        term, share = f"the products of {module}", mine / total
        how = "the least time of a step, each product at its dense peak"
    best = next((c for c in compare_recipes(plan) if c.fastest and c.speedup and c.speedup > 1.02), None)
    remedy = ""
    if best is not None and best.recipe != plan.recipe:
        word = {"bound": "at most", "optimistic": "estimated"}.get(
            best.kind, best.kind.replace("prediction", "predicted")
        )
        remedy = f"recipe {best.name} is {word} {best.speedup:.2f} times as fast as {best.against}"
    return Binding("time", term, share, how, remedy)


def _longest(times: Mapping[str, float]) -> str:
    """Return the module with the most time, summed over its parts: mlp for mlp.gate_proj, mlp.up_proj and the rest."""
    sums: dict[str, float] = {}
    for name, time in times.items():
        module = name.partition(".")[0]
        sums[module] = sums.get(module, 0.0) + time
    return max(sums, key=lambda module: sums[module])


def _at_peak(plan: Plan, gpu: Gpu) -> dict[str, float]:
    """Return the seconds a token of each kind of product at its dense peak."""
    assert plan.compute is not None
    seconds: dict[str, float] = {}
    for p in plan.compute.products:
        for flop, kind in p.passes:
            tflops, _ = gpu.peak(kind)
            seconds[p.module] = seconds.get(p.module, 0.0) + flop / ((tflops or 1.0) * 1e12)
    return seconds
