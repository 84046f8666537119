"""Find what would make a plan fit, and what binds it: each answer plans again with other arguments, and shows what that gives.

Remedies come in a fixed order: smaller parts of the same step, the optimizer's state, what is computed again, what waits on the
host, masters, and last an adapter and a stored base, which change what is trained. What a remedy puts on
the host has to fit there too, where the host's memory is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from surokit import units
from surokit.planner.counts.flops import frozen
from surokit.planner.inverse.budgets import known_memory_budget, memory_budget
from surokit.planner.inverse.recipe_choice import compare_recipes
from surokit.planner.offload.formulas import Host, asked_host
from surokit.tables import data_frame, html_table, text_table

if TYPE_CHECKING:
    import pandas as pd

    from surokit.hardware.gpus import Gpu
    from surokit.planner.counts.memory import Memory, Term
    from surokit.planner.planning import Plan
    from surokit.recipe import Lora

#: A remedy is shown where it alone takes this share of the memory away, or is part of the path.
NOTICEABLE = 0.01


@dataclass(frozen=True)
class Remedy:
    """One thing to change: `how` to write it, what it `costs`, the memory that it alone leaves, and what it takes of the host's.

    `fits` says whether GPU and host have that much, `hosted` whether the host has; of a host whose memory is not known anything.
    """

    how: str
    changes: Mapping[str, Any]
    costs: str
    gib: float
    fits: bool
    host_gib: float = 0.0
    hosted: bool = True


@dataclass(frozen=True)
class _Space:
    """Memory of one GPU, and of its host where that is known, GiB."""

    gib: float
    host_gib: float = math.inf

    def holds(self, memory: Memory) -> bool:
        return memory.gib <= self.gib and self.hosts(memory)

    def hosts(self, memory: Memory) -> bool:
        return memory.host_gib <= self.host_gib


@dataclass(frozen=True, repr=False)
class Fitting:
    """The remedies that would make a plan fit into `room_gib`: each alone, and in `path` the first that do it together.

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
        """Return whether it fits as it is."""
        return self.plan is not None and not self.path

    def table(self) -> pd.DataFrame:
        """Return a row a remedy: remedy, gib, fits, host_gib, hosted, costs."""
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
    """Return what would make the plan fit into `gib` (the GPU's own memory without it) and, where its memory is known, the host's.

    host is the one that a calibration of the plan's GPU measured, without one. Raises ValueError where the
    memory to fit into is not known, TypeError for a host that is none.
    """
    space = _space(plan, gib, host)
    memory, host_room = plan.memory, None if math.isinf(space.host_gib) else space.host_gib
    tries = tuple(_remedy(plan, space, *each) for each in _remedies(plan, space))
    path = () if space.holds(memory) else _eased(plan, _path(plan, tries, space), space)
    eased = {tuple(remedy.changes): remedy for remedy in path}
    better = plan.but(**_merged(path or tries))
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


def _space(plan: Plan, gib: float | None, host: Host | None) -> _Space:
    host = asked_host("fitting", host, plan.gpu)
    return _Space(memory_budget(plan, gib), (host and host.memory_gib) or math.inf)


def _no_way(plan: Plan, tries: Sequence[Remedy], together: Plan, space: _Space) -> str:
    """Return why no remedy suffices, and what else might."""
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


def _remedy(plan: Plan, space: _Space, how: str, changes: Mapping[str, Any], costs: str) -> Remedy:
    again = plan.but(**changes)
    memory, waits_ms = again.memory, again.time.waits_ms
    if waits_ms is not None and again.setup.offloads != plan.setup.offloads:
        costs += f"; {units.value(waits_ms, 'ms')} more a step"
    return Remedy(how, changes, costs, memory.gib, space.holds(memory), memory.host_gib, space.hosts(memory))


def _largest(plan: Plan) -> str:
    term = plan.memory.largest
    return f"{term.name} ({units.gib(term.gib)})"


def _without(plan: Plan) -> str:
    """Say what the memory leaves out, to be said beside an answer that rests on it."""
    left_out = plan.memory.left_out
    return f", without {left_out[0].partition(':')[0]}" if left_out else ""


def _merged(remedies: Sequence[Remedy]) -> dict[str, Any]:
    """Return changes together; a later remedy of the same kind (zero=2 after zero=1) replaces the earlier."""
    changes: dict[str, Any] = {}
    for remedy in remedies:
        changes.update(remedy.changes)
    return changes


def _path(plan: Plan, remedies: Sequence[Remedy], space: _Space) -> tuple[Remedy, ...]:
    """Return the first remedy that suffices, or the first that do together, none of which could be left out."""

    def fits(some: Sequence[Remedy]) -> bool:
        return space.holds(plan.but(**_merged(some)).memory)

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
    """Return the first remedies that suffice together, a later one in place of an earlier of its kind; none where all are too
    few."""
    taken: list[Remedy] = []
    for remedy in remedies:
        taken = [r for r in taken if not set(r.changes) <= set(remedy.changes)] + [remedy]
        if fits(taken):
            return taken
    return []


def _remedies(plan: Plan, space: _Space) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield (how to write it, the changes, what it costs), in the order of this file's opening."""
    s = plan.setup
    if s.training and s.logits == "whole" and s.layers == "surokit" and plan.shape is not None:
        yield "logits='fused'", {"logits": "fused"}, "nothing: the loss takes the logits a part at a time"
    if s.batch is not None and s.batch > 1:
        yield _smaller_batch(plan, space)
    if s.training and s.gpus > 1:
        for stage in range(s.zero + 1, 3):
            yield f"zero={stage}", {"zero": stage}, "no more traffic between GPUs (arXiv 1910.02054)"
    if s.training and s.optimizer == "adamw":
        yield "optimizer='adamw8bit'", {"optimizer": "adamw8bit"}, "precision: moments in 8 bits (arXiv 2110.02861)"
    if s.training and s.gpus > 1 and s.zero < 3:
        traffic = "half as much traffic between GPUs again (arXiv 1910.02054)"
        if frozen(plan.recipe):
            traffic = "traffic between GPUs: the frozen weights too, gathered in every pass"
        yield "zero=3", {"zero": 3}, traffic
    if s.training and s.recompute == "none" and s.fusion.fuses:
        yield "recompute='selective'", {"recompute": "selective"}, "time: norms and SwiGLU again"
    if s.training and s.recompute != "full" and plan.shape is not None:
        again = plan.but(recompute="full")
        share = again.compute.recompute / again.compute.model if again.compute else 0.0
        costs = f"time: {share:.0%} more FLOPs"
        if s.layers == "surokit":
            costs += "; sk.fuse(model, recompute='full')"
        yield "recompute='full'", {"recompute": "full"}, costs
    yield from _on_the_host(plan, space)
    if s.training and s.master and not frozen(plan.recipe):
        yield "master=False", {"master": False}, "precision: updates below the weights' own step are rounded away"
    yield from _smaller_weights(plan)


def _on_the_host(plan: Plan, space: _Space) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield what may wait on the host of a GPU: the optimizer's states, activations, weights."""
    s, trains = plan.setup, plan.setup.training and not frozen(plan.recipe)
    if s.device == "cpu":
        return
    if s.training and plan.shape is not None and not s.offload_activations:
        yield "offload_activations=True", {"offload_activations": True}, "time, where the link is slower than computing"
    if trains and not s.prefetch and s.optimizer in ("adamw", "adamw8bit"):
        yield "optimizer='offloadadamw'", {"optimizer": "offloadadamw"}, "time: the host's AdamW (plan.offload)"
        deferred = {"optimizer": "zenflow"}
        if plan.but(**deferred).memory.gib < plan.memory.gib:
            yield (
                "optimizer='zenflow'",
                deferred,
                "loss: deferred columns learn differently",
            )
    if s.training and plan.shape is not None and not s.prefetch and s.gpus == 1:
        changes: dict[str, Any] = {"offload_weights": True}
        costs = "time: the link, and blocks computed again (plan.streamed)"
        if trains:  # they are updated where they are
            changes["optimizer"] = s.optimizer if s.optimizer in ("adamw8bit", "none") else "adamw"
        yield _written(changes), changes, costs
        if changes.get("optimizer") == "adamw" and not space.hosts(plan.but(**changes).memory):
            changes = {**changes, "optimizer": "adamw8bit"}
            yield _written(changes), changes, f"{costs}; precision: moments in 8 bits"


def _written(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in changes.items())


def _smaller_batch(plan: Plan, space: _Space) -> tuple[str, dict[str, Any], str]:
    """Return the largest micro-batch that fits and divides the batch, or one sequence; as many tokens a step."""
    s = plan.setup
    assert s.batch is not None
    for batch in (n for n in range(s.batch // 2, 0, -1) if s.batch % n == 0):
        changes: dict[str, Any] = {"batch": batch}
        if s.training:
            changes["accumulate"] = s.accumulate * s.batch // batch
        if batch == 1 or space.holds(plan.but(**changes).memory):
            break
    return (
        _written(changes),
        changes,
        "launches: the same step in smaller parts" if s.training else "fewer sequences at a time",
    )


def _eased(plan: Plan, path: tuple[Remedy, ...], space: _Space) -> tuple[Remedy, ...]:
    """Return the path with no smaller a batch than its other remedies ask for."""
    others = _merged([remedy for remedy in path if "batch" not in remedy.changes])
    if len(path) < 2 or not any("batch" in remedy.changes for remedy in path):
        return path
    how, changes, costs = _smaller_batch(plan.but(**others), space)
    eased = _remedy(plan, space, how, changes, costs)
    return tuple(eased if "batch" in remedy.changes else remedy for remedy in path)


def _smaller_weights(plan: Plan) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield a frozen base under an adapter, and that base stored in fewer bits."""
    from surokit.recipe import BF16, QFP8, QNF4, Lora, Recipe
    from surokit.recipe import recipes as named

    own = BF16 if plan.recipe is None else plan.recipe
    if not isinstance(own, Recipe):
        return
    # the named recipe whose products these are, to which adapter and storage are added again
    base = named.get(own.name.partition("+")[0], own)
    if replace(base, name="-", storage=None, adapter=None) != replace(own, name="-", storage=None, adapter=None):
        base = own
    name = "sk.BF16" if base == BF16 else f"sk.recipes[{base.name!r}]" if named.get(base.name) == base else "yours"
    if plan.setup.training and not frozen(own):
        adapted = own.lora()
        yield f"recipe={name}.lora()", {"recipe": adapted}, "what trains: an adapter in place of all weights"
    adapter = own.adapter or Lora()
    bits = 16.0 if own.storage is None else own.storage.bits
    for storage, stored in (("QFP8", QFP8), ("QNF4", QNF4)):
        assert stored.storage is not None
        if stored.storage.bits >= bits - 1:
            continue
        lora = _lora_text(adapter) if adapter != Lora() else ""
        if own.quantized_products:
            recipe = base.store(stored).lora(adapter.rank, adapter.alpha, adapter.targets)
            how = f"{name}.store(sk.{storage}){lora or '.lora()'}"
        else:
            recipe = stored.lora(adapter.rank, adapter.alpha, adapter.targets)
            how = f"sk.{storage}{lora or ('.lora()' if plan.setup.training else '')}"
        costs = f"precision: the frozen weights in {stored.storage.bits:.3g} bits"
        trains = plan.setup.training and not frozen(own)
        yield f"recipe={how}", {"recipe": recipe}, f"{costs}; an adapter trains" if trains else costs


def _lora_text(adapter: Lora) -> str:
    """Return `.lora(...)` as one writes it, defaults left out."""
    plain = type(adapter)()
    fields = {name: value for name, value in adapter.__dict__.items() if value != getattr(plain, name)}
    return f".lora({', '.join(f'{name}={value!r}' for name, value in fields.items())})"


# -- what binds


@dataclass(frozen=True)
class Binding:
    """A term that binds, its share of the whole, and what loosens it, "" where nothing is known."""

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
    """The terms that bind a plan's memory and its time; `time` is None without a GPU and a step."""

    memory: Binding
    time: Binding | None

    def __repr__(self) -> str:
        return "\n".join(str(b) for b in (self.memory, self.time) if b is not None)

    def _repr_html_(self) -> str:
        rows = [(b.what, b.term, f"{b.share:.0%}", b.how, b.remedy) for b in (self.memory, self.time) if b is not None]
        return html_table(rows, header=("", "binds", "share", "of", "remedy"), right=(2,))


def binds(plan: Plan) -> Binds:
    """Return the term that binds the memory of one GPU, and what binds a step's time, each with its share and a remedy."""
    return Binds(_memory_binding(plan), _time_binding(plan))


def _memory_binding(plan: Plan) -> Binding:
    m = plan.memory
    term = m.largest
    loosens = ""
    for how, changes, costs in _remedies(plan, _Space(known_memory_budget(plan, None) or 0.0)):
        less = plan.but(**changes).memory
        left, (what, there) = _kind(less, term)[1], _kind(m, term)
        if left <= 0.8 * there and less.gib < m.gib:
            loosens = f"{how} leaves {units.gib(left)} of {what} ({costs})"
            break
    share = term.gib / m.gib if m.gib else 0.0
    phase = f", in its {m.peak_phase} phase" if m.peak_phase else ""
    where = "CPU" if plan.setup.device == "cpu" else "GPU"
    return Binding("memory", term.name, share, f"{units.gib(m.gib)} on one {where}{phase}", loosens)


def _kind(memory: Memory, term: Term) -> tuple[str, float]:
    """(what a term is of, GiB of all terms of it): weights, where they are weights, stored quantized."""
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
    """Return the module with the most time: mlp, of mlp.gate_proj and mlp.up_proj and the rest."""
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
