"""Ask a plan backwards for the most that fits, for GPUs, tokens, a rate or a model.

    largest(plan, "batch")               the largest batch whose memory one GPU has
    gpus_for(plan, days=30)              the fewest GPUs that are done in time
    tokens_for(plan, usd=100_000)        the tokens that a budget pays for
    parameters_for(plan, usd=100_000)    the model, and its tokens, that make the most of a budget
    rate_for(plan, days=30)              the TFLOPS that each GPU must achieve for it

Nothing here has a formula of its own. Every answer is found by planning again (`Plan.but`), so it is the inverse of the
plan by construction: the answer meets what was asked and the next whole number does not. That needs a plan that only
grows: more sequences, tokens, layers or parameters never take less memory, and more GPUs never more time. The inverse
knows no more than the plan: at a given rate, GPUs keep it in any number, unless `efficiency` says how it falls. Without a
rate, time and cost are the likely ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from surokit import arguments, units
from surokit.planner.counts.communication import Speedup
from surokit.planner.counts.flops import frozen, trained_share
from surokit.planner.inverse.budgets import memory_budget
from surokit.planner.inverse.remedies import fitting

if TYPE_CHECKING:
    from surokit.planner.inputs.introspect import LiveArguments
    from surokit.planner.inputs.shape import Shape
    from surokit.planner.planning import Plan

#: The largest numbers that a search tries: nothing larger was ever trained, so the room sets no limit where even these fit.
_MOST = {"batch": 10**9, "length": 10**9, "layers": 1024, "parameters": 10**14}
_MOST_GPUS = 10**7
# arguments.parameters takes nothing smaller for a model
_LEAST = {"parameters": 10**4}
#: Sequences and tokens of each, where memory needs activations and the plan has neither.
_BATCH, _LENGTH = 1, 2048
#: Tokens a parameter that make the most of a training budget, by the rule of thumb from Hoffmann et al. (arXiv 2203.15556).
TOKENS_PER_PARAMETER = 20


def largest(plan: Plan, what: str, *, gib: float | None = None, multiple: int = 1) -> int:
    """Return the largest batch, length, number of layers or of parameters whose memory one GPU has.

    what        "batch" (sequences on one GPU), "length" (tokens of each), "layers" (of the config, all else as it is), or
                "parameters", for plans of a number: with the activations of a typical shape, of one sequence of 2,048 tokens
                where the plan has no batch and length
    gib         memory to use, GiB; the GPU's own without it
    multiple    only multiples of this, as lengths of 128

    A length ends at the positions that a model has learned; with rotary positions it is not limited here, although the model may
    not work beyond the length in its config. Raises ValueError where not even the smallest fits (it names the largest term and a
    remedy), and where the plan lacks a figure that memory needs.
    """
    room = memory_budget(plan, gib)
    at = _varied(plan, what)
    unit = arguments.integer("multiple", multiple)
    fewest = _LEAST.get(what, 1)
    if what == "layers":  # as many as are divided, or computed again
        divided = plan.setup.division
        parts = divided.pipeline * divided.virtual
        fewest = max(fewest, parts, plan.setup.recompute_blocks or 1)
        unit = math.lcm(unit, parts if divided.virtual > 1 else 1)
    first = -(-fewest // unit)
    positions = plan.shape.positions if what == "length" and plan.shape is not None else 0
    last = (positions or _MOST[what]) // unit
    if first > last:
        raise ValueError(f"multiple={unit:,} is beyond the {positions or _MOST[what]:,} of {what} that there can be.")
    smallest = at(first * unit)
    if smallest.memory.left_out and what != "parameters":
        raise ValueError(f"The largest {what} cannot be told, the plan lacks {smallest.memory.left_out[0]}.")

    if smallest.memory.gib > room:
        least = f"{what}={first * unit:,}"
        raise ValueError(f"Not even {least} fits into {units.gib(room)}: {_why_not(smallest, room)}")
    found = solve(lambda n: at(n * unit).memory.gib - room, first, last)
    if found == last and not positions:
        raise ValueError(f"{units.gib(room)} set no limit to {what}: even {last * unit:,} fit; check gib=.")
    return unit * found


def gpus_for(
    plan: Plan,
    *,
    days: float | None = None,
    gib: float | None = None,
    usd: float | None = None,
    multiple: int = 1,
    efficiency: Callable[[int], float] | Speedup | None = None,
) -> int:
    """Return the fewest GPUs that finish within `days`, whose memory of `gib` each suffices, or both.

    gib         counts the activations of one sequence of 2,048 tokens where the plan has no batch and length
    usd         a budget that the run must also keep to; at a constant rate, cost does not depend on the number of GPUs
    multiple    only multiples of this: 8 for whole nodes
    efficiency  the share of the plan's rate that each of n GPUs keeps: a function of n, or a `fit_speedup` to measured
                rates; 1 without it

    Raises ValueError where no number of GPUs suffices, with what would help.
    """
    divided = plan.setup.division
    unit = math.lcm(arguments.integer("multiple", multiple), divided.gpus * divided.expert)
    share = _share(efficiency)
    if days is None and gib is None:
        raise ValueError(
            "gpus_for() needs something to meet: give days=, the time there is, or gib=, the memory of one GPU."
        )
    nodes = 1 if days is None else _nodes_in_time(plan, _days(days), unit, share)
    if gib is not None:
        nodes = _nodes_that_hold(plan, memory_budget(plan, gib), unit, nodes)
    if usd is not None:
        _affordable(plan.but(gpus=nodes * unit), arguments.number("usd", usd), share(nodes * unit))
    return nodes * unit


def tokens_for(
    plan: Plan, *, days: float | None = None, gpu_hours: float | None = None, usd: float | None = None
) -> int:
    """Return the most tokens with which the run stays within each budget given; a range of prices counts at its middle.

    Raises ValueError without a budget, or where the plan has no rate (or, for usd, no price) to spend it at.
    """
    budgets = _budgets(days, gpu_hours, usd)
    trial = _spending(plan, budgets)
    scale = min(budget / _figure(trial, name) for name, budget in budgets.items())
    assert trial.tokens is not None
    tokens = round(trial.tokens * scale)
    if not 1000 <= tokens <= 1e16:
        given = " and ".join(_budget_text(name, budget) for name, budget in budgets.items())
        much = "hardly any" if tokens < 1000 else "more than there is text"
        raise ValueError(f"{given} would pay for {tokens:.3g} tokens, {much}: check its unit.")

    def excess(n: int) -> float:
        again = plan.but(tokens=n)
        return max(_figure(again, name) - budget for name, budget in budgets.items())

    low = max(1000, tokens - tokens // 10**6 - 1)  # the guess is right but for rounding ...
    while low > 1000 and excess(low) > 0:  # ... and a recipe that changes after so many steps
        low = max(1000, low * 9 // 10)
    return solve(excess, low, 10**16)


def rate_for(
    plan: Plan, *, days: float | None = None, gpu_hours: float | None = None, usd: float | None = None
) -> float:
    """Return the model TFLOPS that each GPU must achieve for the run to stay within each budget given.

    Raises ValueError where that is more than the dense peaks of the plan's products allow.
    """
    budgets = _budgets(days, gpu_hours, usd)
    if plan.tokens is None:
        raise ValueError("rate_for() needs the run: give the plan tokens=.")
    # at one TFLOPS, which an unknown GPU does not refuse
    slow = plan.but(gpu=None, tflops_per_gpu=1.0, mfu=None)
    _has(slow, budgets)
    tflops = max(_figure(slow, name) / budget for name, budget in budgets.items())
    peak = _most_tflops(plan)
    if peak is not None and tflops > peak:
        given = " and ".join(_budget_text(name, budget) for name, budget in budgets.items())
        remedy = "spend more, or train on fewer tokens"
        if set(budgets) == {"days"}:
            remedy = f"it takes {math.ceil(plan.setup.gpus * tflops / peak):,} GPUs even at that peak"
        raise ValueError(
            f"{given} would take {tflops:,.4g} TFLOPS of each GPU, and the most is {peak:,.4g}, {plan.time.floor_how}: {remedy}."
        )
    return float(tflops)


def _most_tflops(plan: Plan) -> float | None:
    """Return the model TFLOPS of one GPU with each product at its own dense peak; None where that is not known."""
    if plan.flops is None or plan.time.floor_gpu_hours is None:
        return None
    return plan.flops / (plan.time.floor_gpu_hours * 3600) / 1e12


@dataclass(frozen=True)
class Optimal:
    """An Optimal holds the number of parameters and of tokens that make the most of a budget of `flops`; `how` names the law."""

    parameters: float
    tokens: float
    flops: float
    how: str

    def __str__(self) -> str:
        size, text = units.count(self.parameters), units.count(self.tokens)
        return f"{size} parameters on {text} tokens, {units.value(self.flops, 'FLOP')}: {self.how}"


def parameters_for(
    plan: Plan,
    *,
    days: float | None = None,
    gpu_hours: float | None = None,
    usd: float | None = None,
    law: Any = None,
) -> Optimal:
    """Return the compute-optimal numbers of parameters and tokens for a budget, all spent on one training run, counted as 6ND.

    `law` is a scaling law with .optimal(flops) -> (parameters, tokens); without one, 20 tokens a parameter (Hoffmann et
    al., arXiv 2203.15556). A model that will be used a lot is better smaller and trained for longer than that.
    """
    budgets = _budgets(days, gpu_hours, usd)
    if frozen(plan.recipe):
        raise ValueError(
            f"parameters_for() is about training from the start, and {plan.recipe.name} freezes the model: "
            "plan with a recipe that trains it."
        )
    trial = _spending(plan, budgets)
    assert trial.flops is not None
    flops = trial.flops * min(budget / _figure(trial, name) for name, budget in budgets.items())
    if law is None:
        parameters = math.sqrt(flops / (6 * TOKENS_PER_PARAMETER))
        tokens = TOKENS_PER_PARAMETER * parameters
        how = f"{TOKENS_PER_PARAMETER} tokens a parameter, the rule of thumb of arXiv 2203.15556"
    else:
        if not hasattr(law, "optimal"):
            raise TypeError(
                f"law={law!r} is no scaling law: give sk.CHINCHILLA, sk.KAPLAN or what sk.fit_scaling(runs) returns."
            )
        best = law.optimal(flops)
        parameters, tokens = best
        how = f"where {getattr(law, 'name', type(law).__name__)} has its lowest loss"
        if getattr(getattr(law, "law", law), "counts", "all") != "all":
            how += ", its parameters without embeddings"
        if note := getattr(best, "note", ""):
            how += f" (extrapolated: {note})"
    return Optimal(float(parameters), float(tokens), float(flops), how)


# -- one plan, varied


def _varied(plan: Plan, what: str) -> Callable[[int], Plan]:
    """Return a function that takes n and returns the plan with n of `what`."""
    if what not in _MOST:
        raise ValueError(f"largest() does not know {what!r}: ask for {', '.join(map(repr, _MOST))}.")
    shape = plan.shape
    if what == "parameters":
        if shape is not None:
            raise ValueError(
                "largest(plan, 'parameters') is for plans of a number: this one has a config, ask for its 'layers'."
            )
        filled = _with_activations(plan)
        return lambda n: _of(filled, parameters=float(n), name=f"{units.count(n)} parameters")
    if shape is None:
        raise ValueError(
            f"A number of parameters has no {what} to fit: plan with a config, or ask for the largest 'parameters'."
        )
    if what != "layers":
        return lambda n: plan.but(**{what: n})

    def deep(n: int) -> Plan:
        other = _in_layers(shape, n)
        name = f"{shape.family} of {units.count(other.parameters)} parameters in {n} layers"
        return _of(plan, shape=other, parameters=float(other.parameters), name=name, own=_own_in(plan, other))

    return deep


def _own_in(plan: Plan, other: Shape) -> LiveArguments:
    """Return what the live model of a plan would have in another number of layers: what trains of it grows as its recipe's does."""
    own, trained = plan.subject.own, plan.subject.own.trained
    assert plan.shape is not None
    return (
        own if trained is None else replace(own, trained=trained.times(trained_share(other, plan.shape, plan.recipe)))
    )


def _with_activations(plan: Plan) -> Plan:
    """Return the plan with a batch and a length, so that its memory has activations."""
    return plan.but(batch=plan.setup.batch or _BATCH, length=plan.setup.length or _LENGTH)


def _in_layers(shape: Shape, n: int) -> Shape:
    """Return the shape with n blocks; the pattern of blocks with experts or a window continues as in the second half."""

    def go_on(layers: tuple[int, ...]) -> tuple[int, ...]:
        has = [layer in layers for layer in range(shape.layers)]
        tail = has[len(has) // 2 :]
        period = next(p for p in range(1, len(tail) + 1) if all(a == b for a, b in zip(tail, tail[p:])))
        while len(has) < n:
            has.append(has[-period])
        return tuple(layer for layer in range(n) if has[layer])

    changes: dict[str, Any] = {"layers": n}
    if shape.window_layers is not None:
        changes["window_layers"] = go_on(shape.window_layers)
    if shape.experts is not None:
        routed = go_on(shape.experts.layers)
        changes["experts"] = replace(shape.experts, layers=routed) if routed else None
    return replace(shape, **changes)


def _of(plan: Plan, **subject: Any) -> Plan:
    """Plan the same question for another subject."""
    other = replace(plan.subject, **subject)
    asked = replace(plan.asked, question=replace(plan.asked.question, what=other))
    return replace(plan, asked=asked).but()


def _why_not(plan: Plan, room: float) -> str:
    """Say what takes the memory of a plan that does not fit, and what would make it fit."""
    term = plan.memory.largest
    most = f"it takes {units.gib(plan.memory.gib)}, the largest term being {term.name} ({units.gib(term.gib)})"
    return f"{most}; {fitting(plan, gib=room).sentence}."


# -- searches over whole numbers


def solve(excess: Callable[[int], float], low: int, high: int, beyond: float = math.inf) -> int:
    """Return the largest n up to `high` with excess(n) <= 0, where excess(low) <= 0 and the excess never falls.

    `beyond` is excess(high + 1) where it is known. The smallest n that suffices is found by searching over -n. Memory and time are
    close to straight lines, so the line through the two nearest points soon finds the place; every third step halves or doubles,
    which keeps the number of steps small for any other curve.
    """
    at_low, above, at_above = excess(low), high + 1, beyond
    slope, steps = 0.0, 0
    while above - low > 1:
        steps += 1
        if at_above < math.inf:
            slope = (at_above - at_low) / (above - low)
        far = low - at_low / slope if slope > 0 else math.inf
        if steps % 3 == 0 or far == math.inf:
            far = (low + above) // 2 if at_above < math.inf else 2 * low
        n = min(max(low + 1, math.floor(far)), above - 1)
        if (new := excess(n)) <= 0:
            slope = (new - at_low) / (n - low)
            low, at_low = n, new
        else:
            above, at_above = n, new
    return low


def _lowest(value: Callable[[int], float], low: int, high: int) -> int:
    """Return the n at which a `value` that falls and then rises is lowest."""
    while high > low:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if value(middle) > value(middle + 1) else (low, middle)
    return low


# -- budgets


def _days(value: Any) -> float:
    days = arguments.number("days", value)
    if days > 36525:
        raise ValueError(f"days={days:g} is more than a century: the unit is days.")
    return days


def _budgets(days: float | None, gpu_hours: float | None, usd: float | None) -> dict[str, float]:
    """Return the budgets that were given, by the name of the plan's figure."""
    budgets = {}
    if days is not None:
        budgets["days"] = _days(days)
    if gpu_hours is not None:
        budgets["gpu_hours"] = arguments.number("gpu_hours", gpu_hours)
    if usd is not None:
        budgets["usd"] = arguments.number("usd", usd)
    if not budgets:
        raise ValueError("There is no budget to keep: give days=, gpu_hours= or usd=.")
    return budgets


def _budget_text(name: str, budget: float) -> str:
    return units.value(budget, {"days": "days", "gpu_hours": "GPU hours", "usd": "USD"}[name])


def _has(plan: Plan, names: Mapping[str, float] | tuple[str, ...]) -> None:
    """Raise ValueError where the plan lacks one of these figures, which need a rate or a likely step, and a price."""
    for name in names:
        if getattr(plan, name) is not None or (
            plan.likely_days is not None and (name != "usd" or plan.price is not None)
        ):
            continue
        if plan.time.rate_tflops is None and plan.likely_days is None:
            raise ValueError(
                "How far time and money go needs a rate: give the plan tflops_per_gpu=, or mfu= with gpu=."
            )
        raise ValueError("A budget in USD needs a price: give the plan usd_per_gpu_hour=.")


def _figure(plan: Plan, name: str) -> float:
    """Return the days, GPU hours or USD of a plan: those at its rate, or the likely ones."""
    if (found := getattr(plan, name)) is not None:
        return float(found)
    assert plan.likely_days is not None
    if plan.estimate is not None and plan.estimate.communication.bytes and plan.estimate.communication.ms is None:
        raise ValueError(
            f"The likely time on {plan.setup.gpus:,} GPUs needs between_gb_s=, what each has between nodes."
        )
    days = plan.likely_days[0]
    hours = days * 24 * plan.setup.gpus
    return {"days": days, "gpu_hours": hours, "usd": hours * (plan.price.middle if plan.price else 0.0)}[name]


def _spending(plan: Plan, budgets: Mapping[str, float]) -> Plan:
    """Plan a run of 1e12 tokens that is scaled to the budgets, and check that it has the figures they are compared with."""
    trial = plan.but(tokens=1e12)
    _has(trial, budgets)
    return trial


# -- GPUs, in nodes of `unit`


def _run(plan: Plan, names: tuple[str, ...]) -> None:
    if plan.tokens is None:
        raise ValueError("The plan lacks the run: give it tokens=.")
    _has(plan, names)


def _share(efficiency: Callable[[int], float] | Speedup | None) -> Callable[[int], float]:
    """Return a function that takes n and returns the share of the rate that each of n GPUs keeps."""
    if efficiency is None:
        return lambda n: 1.0
    if isinstance(efficiency, Speedup):
        one = efficiency.rate(1)
        return lambda n: efficiency.rate(n) / (n * one)
    if not callable(efficiency):
        raise TypeError(
            f"efficiency={efficiency!r} must say it for any number of GPUs: give a function of n, or a fit_speedup()."
        )
    return lambda n: arguments.number(f"efficiency({n})", efficiency(n))


def _affordable(plan: Plan, usd: float, share: float) -> None:
    _run(plan, ("usd",))
    costs = _figure(plan, "usd") / share
    if costs > usd:
        raise ValueError(
            f"The run costs {units.value(costs, 'USD')} on {plan.setup.gpus:,} GPUs, the fewest that do, more "
            f"than {units.value(usd, 'USD')}: tokens_for(usd=) says how far that goes."
        )


def _nodes_in_time(plan: Plan, days: float, unit: int, share: Callable[[int], float]) -> int:
    _run(plan, ("days",))
    gpus = _figure(plan, "gpu_hours") / 24 / days
    if gpus > _MOST_GPUS:
        raise ValueError(
            f"{units.days(days)} would take {gpus:.3g} GPUs, more than there are: give more days, or plan fewer tokens."
        )

    @cache
    def takes(nodes: int) -> float:
        """Return the days on so many nodes, which fall with more GPUs, and may rise again where these wait for each other."""
        return _figure(plan.but(gpus=nodes * unit), "days") / share(nodes * unit)

    # more GPUs help up to a point; the first few may also lose to one, by a communication that hardly grows with more
    last, fastest = 1, 1
    while takes(last) > days:
        if 2 * last * unit > _MOST_GPUS:
            raise ValueError(
                f"No number of GPUs is done in {units.days(days)} at this efficiency, the fastest being {fastest * unit:,}: "
                "give more days, or plan fewer tokens."
            )
        if takes(2 * last) >= takes(last):
            best = _lowest(takes, max(1, last // 2), 2 * last)
            if takes(best) <= days:
                last = best
                break
            fastest = min(fastest, best, key=takes)
        last *= 2
        fastest = min(fastest, last, key=takes)
    too_few = max(1, last // 2)
    return -solve(lambda n: takes(-n) - days, -last, -too_few - 1, takes(too_few) - days)


def _nodes_that_hold(plan: Plan, room: float, unit: int, least: int) -> int:
    """Return the fewest nodes, `least` or more, whose GPUs hold their share of the model in `room` GiB each."""

    plan = _with_activations(plan)

    def excess(less: int) -> float:
        return plan.but(gpus=-less * unit).memory.gib - room

    if (too_much := excess(-least)) <= 0:
        return least
    most, zero = _MOST_GPUS // unit, plan.setup.zero
    if zero and excess(-most) <= 0:
        return -solve(excess, -most, -least - 1, too_much)
    held = plan.but(gpus=most * unit)
    reason = f"zero={zero} leaves {units.gib(held.memory.gib)} on each"
    if not zero:
        reason = f"without zero= each holds all {units.gib(held.memory.gib)}"
    raise ValueError(f"No number of GPUs of {units.gib(room)} suffices, {reason}; {fitting(held, gib=room).sentence}.")
