"""Find the changes that make a plan fit, and its largest terms of memory and time; each change is planned, and its effect shown.

The remedies are the changes that save memory (changes.py). The ways are the sets of one or two of them, and where there is none of
three, that make the plan fit, those with the least time of a step first; a set has more than another only where it is faster. A
model that is divided over the plan's GPUs is a plan of its own, with remedies of its own: one, or where none suffices ZeRO and one
more. Whatever a remedy puts on the host has to fit there too. What changes the recipe, and with it what trains, is taken where
nothing else suffices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Any

from surokit import units
from surokit.planner.inverse.budgets import Space, known_memory_budget, memory_budget, space_of
from surokit.planner.inverse.changes import Change, dividing, merged, saving_memory, smaller_batch
from surokit.planner.inverse.recipe_choice import compare_recipes, label_of
from surokit.planner.inverse.speedups import LEAST_GAIN, FasterWay, faster
from surokit.tables import data_frame, html_table, text_table

if TYPE_CHECKING:
    import pandas as pd

    from surokit.hardware.gpus import Gpu
    from surokit.planner.counts.memory import Memory, Term
    from surokit.planner.offload.formulas import Host
    from surokit.planner.planning import Plan
    from surokit.planner.times.cost import StepTime

#: A remedy is shown where it alone takes this share of the memory away, or is part of a way.
NOTICEABLE = 0.01
_MOST_TOGETHER = 3  # remedies that are tried in every set
_SHOWN = 8  # ways that a Fitting prints


@dataclass(frozen=True)
class Remedy:
    """A Remedy is one change: `how` to write it, what it `costs`, the GiB that the plan takes with it alone, and those of the host
    for each GPU; in a way that divides the model the divided plan is meant.

    `fits` says whether GPU and host have that much, `hosted` whether the host has. `step_ms` is the time of a step with it, None
    where that is not known.
    """

    how: str
    changes: Mapping[str, Any]
    costs: str
    gib: float
    fits: bool
    host_gib: float = 0.0
    hosted: bool = True
    step_ms: float | None = None


@dataclass(frozen=True)
class FittingWay:
    """A FittingWay holds remedies that make a plan fit together, the plan with them, and the time of its step, None where that is
    not known."""

    remedies: tuple[Remedy, ...]
    plan: Plan
    time: StepTime | None = None

    @property
    def how(self) -> str:
        """Return the remedies as a user types them."""
        return ", ".join(remedy.how for remedy in self.remedies)

    @property
    def gib(self) -> float:
        """Return the GiB of one GPU that the plan takes."""
        return self.plan.memory.gib

    @property
    def host_gib(self) -> float:
        """Return the GiB of the host for each GPU that the plan takes."""
        return self.plan.memory.host_gib

    @property
    def changes(self) -> Mapping[str, Any]:
        """Return the arguments that the remedies change: `plan.but(**way.changes)` is the way's plan."""
        return merged(remedy.changes for remedy in self.remedies)

    @property
    def trains_the_same(self) -> bool:
        """True if no remedy changes the recipe."""
        return not any("recipe" in remedy.changes for remedy in self.remedies)

    @property
    def step_ms(self) -> float | None:
        """Return the ms of a step; None where they are not known."""
        return None if self.time is None else self.time.ms

    @property
    def interval_ms(self) -> tuple[float | None, float | None]:
        """Return the ms of a step that nine of ten runs exceed, and one of ten; None where `step_ms` is not the likely time."""
        likely = self.plan.likely
        return (likely.low_ms, likely.high_ms) if likely and likely.step_ms == self.step_ms else (None, None)


@dataclass(frozen=True, repr=False)
class Fitting:
    """A Fitting holds the remedies that help a plan fit into `room_gib`: each alone, and in `ways` those that suffice together.

    The fastest way is the first, and `path` are its remedies; ways without a known time come last, in the order of their costs.
    `plan` is the plan with the path taken, itself where it fits already, None where nothing here is enough. A remedy that saves
    nothing alone may still help beside another, as the peak moves from one part of a step to the next: it is listed only in a way.
    `space` holds the memory of GPU and host to fit into. `kind` is that of the times.
    """

    space: Space
    gib: float
    remedies: tuple[Remedy, ...]
    ways: tuple[FittingWay, ...]
    plan: Plan | None
    sentence: str
    kind: str = ""

    @property
    def room_gib(self) -> float:
        """Return the GiB of one GPU to fit into."""
        return self.space.gib

    @property
    def path(self) -> tuple[Remedy, ...]:
        """Return the remedies of the first way; none where the plan fits, or nothing is enough."""
        return self.ways[0].remedies if self.ways else ()

    @property
    def already(self) -> bool:
        """True if the plan fits as it is."""
        return self.plan is not None and not self.path

    @cached_property
    def faster_still(self) -> tuple[tuple[FittingWay, tuple[FasterWay, ...]], ...]:
        """Return which of the ways that are printed becomes the fastest, each with what makes it so, one on top of the other: by
        what trains alike (fusing, CUDA graphs), and with another recipe; none that is no faster than the first way."""
        space, host_gib = self.space, None if self.space.assumed else self.space.host_gib
        ways = [way for way in self.ways[:_SHOWN] if way.time and way.plan.setup.training]
        tries = [(way, faster(way.plan, gib=space.gib, host=space.host, host_gib=host_gib)) for way in ways]
        alike = [(way, quicker.taken) for way, quicker in tries if quicker.taken]
        recipe = [(way, quicker.counted) for way, quicker in tries if quicker.in_recipe]
        found: list[tuple[FittingWay, tuple[FasterWay, ...]]] = []
        least = self.ways[0].step_ms if ways else None
        for options in (alike, recipe):
            best = min(options, key=lambda option: option[1][-1].step_ms, default=None)
            if best and least and best[1][-1].step_ms < least:
                # a recipe on top of the same says that too
                found = [*(other for other in found if other[0] is not best[0]), best]
                least = best[1][-1].step_ms
        return tuple(found)

    def table(self) -> pd.DataFrame:
        """Return the remedies as a DataFrame, one a row: remedy, gib, step_ms, fits, host_gib, hosted, costs."""
        columns = ["remedy", "gib", "step_ms", "fits", "host_gib", "hosted", "costs"]
        rows = [(r.how, r.gib, r.step_ms, r.fits, r.host_gib, r.hosted, r.costs) for r in self.remedies]
        return data_frame(rows, columns)

    def together(self) -> pd.DataFrame:
        """Return the ways as a DataFrame, one a row, the fastest first: way, step_ms, low_ms, high_ms, gib, host_gib, costs.

        From low_ms to high_ms are eight of ten runs, where `step_ms` is a likely time. What makes one way slower than it is likely
        to be makes the others slower too: their order is surer than their times.
        """
        rows = [
            {
                "way": w.how,
                "step_ms": w.step_ms,
                **dict(zip(("low_ms", "high_ms"), w.interval_ms)),
                "gib": w.gib,
                "host_gib": w.host_gib,
                "costs": "; ".join(r.costs for r in w.remedies),
            }
            for w in self.ways
        ]
        return data_frame(rows, ["way", "step_ms", "low_ms", "high_ms", "gib", "host_gib", "costs"])

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                r.how,
                units.gib(r.gib),
                _ms(r.step_ms),
                "would fit" if r.fits and not self.already else "",
                _if_any(r.host_gib),
                "" if r.hosted else "does not fit",
                r.costs,
            )
            for r in self.remedies
        ]

    def _ways(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [
            (w.how, units.gib(w.gib), _ms(w.step_ms), _if_any(w.host_gib)) for w in self.ways[:_SHOWN]
        ]
        more = len(self.ways) - _SHOWN
        return [*rows, (f"and {more} more: .together()", "", "", "")] if more > 0 else rows

    @property
    def _host_header(self) -> str:
        used = any(r.host_gib for r in self.remedies) or any(w.host_gib for w in self.ways)
        return "host, for each GPU" if used else ""

    @property
    def _header(self) -> tuple[str, ...]:
        return ("one at a time", "takes", "a step", "", self._host_header, "", "and costs")

    @property
    def _ways_header(self) -> tuple[str, ...]:
        where = ", on this host" * (self.space.host is not None)
        time = f"a step ({self.kind}{where})" if self.kind else ""
        return ("what fits, the fastest first", "takes", time, self._host_header)

    def _title(self) -> str:
        room = units.gib(self.room_gib)
        if self._host_header or not self.space.assumed:
            room += f", and {units.gib(self.space.host_gib)} of the host's for each GPU"
            room += " (assumed: give host_gib=)" * self.space.assumed
        return f"{units.gib(self.gib)} into {room}: {self.sentence}"

    def _faster_lines(self) -> list[str]:
        lines = []
        for way, changes in self.faster_still:
            steps = ", then ".join([f"{way.how}: {_ms(way.step_ms)}", *(f"{c.how}: {_ms(c.step_ms)}" for c in changes)])
            recipe = " (a race tells whether it trains as well)" * ("recipe" in changes[-1].changes)
            lines.append(f"faster still: {steps}{recipe}")
        return lines

    def __repr__(self) -> str:
        ways = [text_table(self._ways(), header=self._ways_header, right=(1, 2, 3))] if self.ways else []
        quicker = [f"  {line}" for line in self._faster_lines()]
        table = [text_table(self._rows(), header=self._header, right=(1, 2, 4))] if self.remedies else []
        return "\n".join([self._title(), *ways, *quicker, *table])

    def _repr_html_(self) -> str:
        ways = html_table(self._ways(), header=self._ways_header, right=(1, 2, 3), title=self._title())
        if not self.ways:
            return html_table(self._rows(), header=self._header, right=(1, 2, 4), title=self._title())
        return ways + html_table(
            self._rows(), header=self._header, right=(1, 2, 4), title="; ".join(self._faster_lines())
        )


def fitting(
    plan: Plan, *, gib: float | None = None, host: Host | None = None, host_gib: float | None = None
) -> Fitting:
    """Find the changes that make the plan fit into `gib` (the GPU's own memory without it) and into the host's.

    host        its rates; without it those that a calibration of the plan's GPU measured, else those of published runs
    host_gib    GiB of the host for each GPU, in place of the host's own `memory_gib`; 256 are assumed where neither is known

    Raises ValueError where the memory to fit into is not known, TypeError for a host that is not a Host.
    """
    space, memory = space_of("fitting", plan, memory_budget(plan, gib), host, host_gib), plan.memory
    tries = tuple(_remedy(plan, space, change) for change in saving_memory(plan, space))
    divided = [(_remedy(plan, space, change), part) for change, part in dividing(plan)]
    ways = () if space.holds(memory) else _fastest([*_ways(plan, tries, space), *_divided_ways(plan, divided, space)])
    ways = tuple(way for way in ways if way.trains_the_same) or ways
    enough = plan if space.holds(memory) else ways[0].plan if ways else None
    if enough is plan:
        sentence = f"it fits as it is{_without(plan)}"
    elif enough is not None:
        verb = "makes" if len(ways[0].remedies) == 1 else "make"
        sentence = f"{ways[0].how} {verb} it fit ({_takes(enough)}){_without(plan)}"
    else:
        sentence = _no_way(plan, tries, plan.but(**merged(r.changes for r in tries)), space)
    helping = tuple(_helping(plan, (*tries, *(r for r, _ in divided)), ways))
    kind = next((way.time.kind for way in ways if way.time is not None), "")
    return Fitting(space, memory.gib, helping, ways, enough, sentence, kind)


def _helping(plan: Plan, remedies: Sequence[Remedy], ways: Sequence[FittingWay]) -> Iterator[Remedy]:
    """Yield the remedies that are part of a way, or leave noticeably less memory than the plan and than a part of their changes."""
    in_ways = {_written(remedy) for way in ways for remedy in way.remedies}
    for remedy in remedies:
        less = [other.gib for other in remedies if other.changes.items() < remedy.changes.items()]
        if _written(remedy) in in_ways or remedy.gib <= (1 - NOTICEABLE) * min(less, default=plan.memory.gib):
            yield remedy


def _written(remedy: Remedy) -> str:
    """Return how a remedy is written, a smaller batch of any size alike: a way has the one that fits beside the others."""
    return "batch" if "batch" in remedy.changes else remedy.how


def _no_way(plan: Plan, tries: Sequence[Remedy], together: Plan, space: Space) -> str:
    """Say why no remedy suffices, and what else might."""
    cure = "take a smaller model, shorter sequences or a GPU with more memory"
    if plan.setup.training and not (plan.setup.zero == 3 and plan.setup.replicas > 1):
        cure += ", or more GPUs with zero=3"
    left = f"all remedies together leave {_takes(together)}" if tries else "there is no remedy"
    if not space.hosts(together.memory):
        return f"{left}, and the host has {units.gib(space.host_gib)}{' (assumed)' * space.assumed}; {cure}"
    return f"{left}, the largest term being {_largest(together)}; {cure}"


def _takes(plan: Plan) -> str:
    if not plan.memory.host:
        return units.gib(plan.memory.gib)
    each = " for each GPU" if plan.setup.gpus > 1 else ""
    return f"{units.gib(plan.memory.gib)}, and {units.gib(plan.memory.host_gib)} on the host{each}"


def _remedy(plan: Plan, space: Space, change: Change) -> Remedy:
    again, costs = change.of(plan), change.costs
    memory, waits_ms, time = again.memory, again.time.waits_ms, space.step_time(again)
    if waits_ms is not None and again.setup.offloads != plan.setup.offloads:
        costs += f"; {units.value(waits_ms, 'ms')} more a step"
    return Remedy(
        change.how,
        change.arguments,
        costs,
        memory.gib,
        space.holds(memory),
        memory.host_gib,
        space.hosts(memory),
        None if time is None else time.ms,
    )


def _if_any(gib: float) -> str:
    return units.gib(gib) if gib else ""


def _ms(value: float | None) -> str:
    return "" if value is None else units.value(value, "ms")


def _largest(plan: Plan) -> str:
    term = plan.memory.largest
    return f"{term.name} ({units.gib(term.gib)})"


def _without(plan: Plan) -> str:
    """Say what the memory leaves out, for an answer that depends on it; "" where nothing is left out."""
    left_out = plan.memory.left_out
    return f", without {left_out[0].partition(':')[0]}" if left_out else ""


def _fastest(ways: Sequence[FittingWay]) -> tuple[FittingWay, ...]:
    """Return the ways, those with the least time of a step first, without those that change more than another and gain hardly
    anything, or change the same and gain nothing; those whose time is not known last, as they come."""

    def ms(way: FittingWay) -> float:
        return math.inf if way.step_ms is None else way.step_ms

    def no_better(way: FittingWay, other: FittingWay) -> bool:
        if set(other.changes) < set(way.changes):
            return ms(other) <= (1 + LEAST_GAIN) * ms(way)
        if set(other.changes) != set(way.changes) or way.time is None or other.time is None:
            return False
        takes, others = (ms(way), way.gib, way.host_gib), (ms(other), other.gib, other.host_gib)
        return others != takes and all(a <= b for a, b in zip(others, takes))

    return tuple(sorted((way for way in ways if not any(no_better(way, other) for other in ways)), key=ms))


def _ways(plan: Plan, remedies: Sequence[Remedy], space: Space) -> list[FittingWay]:
    """Return the ways to make the plan fit: those that leave the recipe; where there is none, one change that does not, or what
    suffices with it."""
    leaving = [remedy for remedy in remedies if "recipe" not in remedy.changes]
    if found := _enough(plan, leaving, space):
        return found
    changing = [remedy for remedy in remedies if "recipe" in remedy.changes]
    if found := _sets(plan, changing, space, most=1):
        return found[:1]
    return [way for remedy in changing for way in _beside(plan, remedy, space)]


def _beside(plan: Plan, remedy: Remedy, space: Space) -> Iterator[FittingWay]:
    """Yield the ways that have a change of the recipe, which does not suffice alone, and what does beside it."""
    part = plan.but(**remedy.changes)
    others = [_remedy(part, space, c) for c in saving_memory(part, space) if "recipe" not in c.arguments]
    for way in _enough(part, others, space):
        yield FittingWay((remedy, *way.remedies), way.plan, way.time)


def _enough(plan: Plan, remedies: Sequence[Remedy], space: Space) -> list[FittingWay]:
    """Return the small sets of remedies that suffice, or where there are none those that do all together."""
    taken = _together(plan, remedies, space)
    return (_sets(plan, remedies, space) or [taken]) if taken else []


def _divided_ways(plan: Plan, divided: Sequence[tuple[Remedy, Plan]], space: Space) -> Iterator[FittingWay]:
    """Yield the ways to make a divided model fit: as it is, with one remedy that leaves the recipe, or with ZeRO and another where
    none suffices.

    Of each kind of division the fewest parts that fit by themselves are the last, since more send and wait more.
    """
    found: set[str] = set()
    for division, part in divided:
        kind = next(iter(division.changes))
        if kind in found:
            continue
        if space.holds(part.memory):
            found.add(kind)
            yield FittingWay((division,), part, space.step_time(part))
            continue
        changes = [change for change in saving_memory(part, space) if "recipe" not in change.arguments]
        sets: list[tuple[Change, ...]] = [(change,) for change in changes if space.holds(change.of(part).memory)]
        if not sets:
            sharded = [change for change in changes if "zero" in change.arguments]
            pairs = [(zero, change) for zero in sharded[-1:] for change in changes if change not in sharded]
            sets = [pair for pair in pairs if space.holds(part.but(**merged(c.arguments for c in pair)).memory)]
        for some in sets:
            arguments = merged(change.arguments for change in some)
            eased, parts = part.but(**arguments), division.changes[kind]
            alone = replace(division, how=f"{kind}={parts}", changes={kind: parts})
            # a smaller batch has the division's micro-batches in its own
            first = alone if "accumulate" in arguments else division
            yield FittingWay((first, *(_remedy(part, space, c) for c in some)), eased, space.step_time(eased))


def _sets(plan: Plan, remedies: Sequence[Remedy], space: Space, most: int = _MOST_TOGETHER) -> list[FittingWay]:
    """Return the sets of one or two remedies that make the plan fit, and where there are none of up to `most`."""
    found: list[FittingWay] = []
    for size in range(1, most + 1):
        if found and size > 2:
            break
        for chosen in combinations(range(len(remedies)), size):
            names = [name for i in chosen for name in remedies[i].changes]
            if len(set(names)) < len(names):
                continue
            way = _way(plan, [remedies[i] for i in chosen], space)
            # fusion= and recompute= are a remedy each, and one together
            if space.holds(way.plan.memory) and way.changes not in [other.changes for other in found]:
                found.append(way)
    return found


def _together(plan: Plan, remedies: Sequence[Remedy], space: Space) -> FittingWay | None:
    """Return the first remedies that suffice together, where a later one replaces an earlier of its kind, without any that is not
    needed, or that the host has no memory for; None where all together do not suffice."""

    def memory(some: Sequence[Remedy]) -> Memory:
        return plan.but(**merged(r.changes for r in some)).memory

    def fits(some: Sequence[Remedy]) -> bool:
        return space.holds(memory(some))

    def gathered(careful: bool) -> list[Remedy]:
        taken: list[Remedy] = []
        for remedy in remedies:
            more = [r for r in taken if not set(r.changes) <= set(remedy.changes)] + [remedy]
            taken = more if not careful or space.suffices(memory(more), plan.memory) else taken
            if fits(taken):
                return taken
        return []

    # what the host has no memory for may have with a later one; else it is left out
    if not (taken := gathered(careful=False) or gathered(careful=True)):
        return None
    for remedy in reversed(taken[:-1]):
        rest = [r for r in taken if r is not remedy]
        if fits(rest):
            taken = rest
    return _way(plan, taken, space)


def _way(plan: Plan, chosen: Sequence[Remedy], space: Space) -> FittingWay:
    """Return the way of these remedies, with the largest batch that fits beside the others."""
    others = [r.changes for r in chosen if "batch" not in r.changes]
    if 0 < len(others) < len(chosen):
        eased = _remedy(plan, space, smaller_batch(plan.but(**merged(others)), space))
        chosen = [eased if "batch" in r.changes else r for r in chosen]
    eased_plan = plan.but(**merged(r.changes for r in chosen))
    return FittingWay(tuple(chosen), eased_plan, space.step_time(eased_plan))


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
    best, own = next((c for c in compare_recipes(plan) if c.fastest), None), plan.step_time or plan.computing_time
    remedy = ""
    if best and own and best.step_ms and best.kind == own.kind and own.ms > 1.02 * best.step_ms:
        word = {"bound": "at most", "optimistic": "estimated"}.get(
            best.kind, best.kind.replace("prediction", "predicted")
        )
        planned = "bf16" if plan.recipe is None else label_of(plan.recipe)
        planned += " as planned" * (planned == best.name)
        remedy = f"recipe {best.name} is {word} {own.ms / best.step_ms:.2f} times as fast as {planned}"
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
