"""`check` puts what a plan expected beside what was measured, the worst misses first, and makes a plan that learned from it.

    plan.check(session)            a Session, a Profile, or figures of your own as a dict
    plan.check(session).recalibrated.days

A profile that recorded shapes knows the FLOPs that its operators executed. They are counted by another convention than a plan's:
attention over every key, scores that fused attention computes again, recompute; the comparison uses that convention. And it knows
what its operators would take at the planned device's rates, the speed of light, which stands beside what the modules took.

Rows compare one GPU: its share of the step, its tokens a second, its memory. An expectation keeps the kind that it has in the
plan: a prediction should be met, a bound and an optimistic estimate cannot be, and a miss of them says how far from ideal the run
was. On CUDA, sessions and profiles know the memory of tensors; on a CPU, that of the whole process, Python and its libraries
included. Only the first is compared, and corrects the plan's slack.

A recalibrated plan takes the achieved rate in place of the given one. Its slack is the old one, scaled by how much more (or less)
the tensors took than predicted: what the allocator loses to fragmentation is not in the measurement, and is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any

from surokit import units
from surokit.hardware.gpus import Gpu, find_gpu
from surokit.planner.compare.measured import Measured, ModuleCost, read_measured
from surokit.planner.inputs.configs import read_shape
from surokit.tables import data_frame, html_table, text_table

if TYPE_CHECKING:
    import pandas as pd

    from surokit.planner.planning import Plan

CLOSE = 0.10  # a miss under this share is none to speak of
_SAME = 0.02  # tokens and FLOPs of a step are counted, so they agree but for an incomplete batch
_IDLE = 0.10
_MOST_SLACK = 1.0  # the largest slack that a plan accepts; beyond it the prediction itself is wrong
_LAST = ("bound", "optimistic", "measured")  # rows that a run cannot meet, or nobody expected: below the predictions
#: Modules of an estimate and of a profile that are compared: a name for both, the estimate's modules, and the ends of the paths of
#: the profile's modules. The first that fits takes a path; a model's own time, "" here, is its loss (and a fused head).
_PLACES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    *(
        (name, (name,), (name,))
        for name in (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
        )
    ),
    ("attention and rope", ("attention", "rope"), ("self_attn", "rotary_emb")),
    ("swiglu", ("swiglu",), ("mlp", "act_fn")),
    ("norms", ("norm", "last norm"), ("norm",)),
    ("embedding", ("embedding",), ("embed_tokens",)),
    ("head and loss", ("lm_head", "loss"), ("lm_head", "", "(loss)")),
    ("optimizer", ("optimizer", "gradient norm"), ("(optimizer)", "(clip)")),
)
_OTHER = "all else"


@dataclass(frozen=True)
class CheckRow:
    """A CheckRow holds one term: expected and measured in `unit`, and their ratio.

    `kind` is that of the expectation, "measured" where there is none.
    """

    term: str
    expected: float | None
    measured: float | None
    unit: str
    kind: str
    how: str = ""

    @property
    def ratio(self) -> float | None:
        """Return measured / expected; None where either is not known."""
        return (
            None
            if self.expected is None or self.measured is None or not self.expected
            else self.measured / self.expected
        )

    @property
    def miss(self) -> float:
        """Return |log(ratio)|, which is the same for half and for double; 0 where nothing can be compared."""
        return 0.0 if not self.ratio else abs(math.log(self.ratio))


@dataclass(frozen=True, repr=False)
class Check:
    """A Check puts a plan beside a measurement. It prints as a table; `table()` is a DataFrame; `recalibrated` is the plan at what
    was measured.

    rows      the worst misses of predictions first; then bounds, and what was measured and not expected
    modules   of a profile beside an estimated step: the device's ms by module, the most ms missed first
    verdict   a sentence: what is most off, and the likely reason
    """

    plan: Plan
    measured: Measured
    rows: tuple[CheckRow, ...]
    modules: tuple[CheckRow, ...] = ()
    notes: tuple[str, ...] = ()

    def __getitem__(self, term: str) -> CheckRow:
        every = (*self.rows, *self.modules)
        for row in every:
            if row.term == term:
                return row
        raise KeyError(f"The check has no row {term!r}: there are {', '.join(r.term for r in every)}.")

    @property
    def worst(self) -> CheckRow | None:
        """Return the row whose prediction was missed by most; a bound's where nothing was predicted, None where nothing can be
        compared."""
        rows = [row for row in self.rows if row.ratio is not None]
        return next((row for row in rows if row.kind not in _LAST), rows[0] if rows else None)

    @property
    def ok(self) -> bool:
        """True if every prediction was met within a tenth."""
        return all(row.miss <= math.log1p(CLOSE) for row in self.rows if row.kind not in _LAST)

    @property
    def verdict(self) -> str:
        """Say in one sentence what is most off, and the likely reason."""
        worst = self.worst
        if worst is None or worst.ratio is None:
            return (
                "Nothing that was measured can be compared: plan with batch=, length=, and a rate or gpu=calibrate()."
            )
        said = (
            f"{units.value(worst.measured or 0.0, worst.unit)} against {units.value(worst.expected or 0.0, worst.unit)}"
        )
        if worst.kind in ("bound", "optimistic"):
            says = "its lower bound" if worst.kind == "bound" else "an optimistic estimate"
            first = f"Nothing was predicted; the {worst.term} is {units.times(worst.ratio)} times {says}, {said}"
        elif worst.miss <= math.log1p(CLOSE):
            return f"Every prediction is met within {CLOSE:.0%}; most off is the {worst.term}, {said}."
        else:
            first = f"Most off is the {worst.term}: {said}, {units.times(worst.ratio)} times the plan"
        why = _why(self, worst)
        return first + (f"; likely {why}." if why else ".")

    @property
    def tflops_per_gpu(self) -> float | None:
        """Return the model TFLOPS that one GPU reached; None where no speed was measured."""
        return _rate(self.plan, self.measured)

    @property
    def slack(self) -> float | None:
        """Return the slack at which the plan's memory would be what was measured; None where that cannot be said."""
        plan, m = self.plan, self.measured
        tensors = _tensors_gib(plan)
        if tensors is None:
            return None
        if m.reserved_gib is not None:
            return max(0.0, m.reserved_gib / tensors - 1)
        if m.peak_gib is None or m.of_process:
            return None
        return max(0.0, m.peak_gib / tensors * (1 + plan.setup.slack) - 1)

    @cached_property
    def recalibrated(self) -> Plan:
        """Return the plan at the measured rate and slack, so that its days, cost and memory follow what was measured.

        Memory beyond twice the predicted is a miss that no slack explains, and leaves the slack as it is. Raises ValueError where
        neither can be said, or where another device was measured than is planned.
        """
        if other := _other_device(self.plan, self.measured):
            raise ValueError(f"A plan cannot learn from this: {other}; plan with the device that was measured.")
        changes: dict[str, Any] = {}
        rate, gpu = self.tflops_per_gpu, self.plan.gpu
        if wrong := _too_fast(gpu, rate):
            raise ValueError(f"A plan cannot learn from this: {wrong}.")
        if rate is not None:
            changes = {"tflops_per_gpu": rate, "mfu": None}
            # far below the peak a rate is refused as a slip of the unit; as a share it is what it is
            if gpu is not None and gpu.plain_tflops and rate < (gpu.fastest_tflops or 0) / 1000:
                changes = {"tflops_per_gpu": None, "mfu": rate / gpu.plain_tflops}
        if (slack := self.slack) is not None and slack <= _MOST_SLACK:
            changes["slack"] = slack
        if not changes:
            raise ValueError("A plan cannot learn from this: neither speed nor memory of the device was measured.")
        return self.plan.but(**changes)

    def table(self) -> pd.DataFrame:
        """Return the rows as a DataFrame: group ("run" or "module"), term, expected, measured, ratio, unit, kind, how."""
        columns = ("term", "expected", "measured", "ratio", "unit", "kind", "how")
        groups = (("run", self.rows), ("module", self.modules))
        rows = [[group, *(getattr(row, c) for c in columns)] for group, those in groups for row in those]
        return data_frame(rows, ["group", *columns])

    def _cells(self, rows: tuple[CheckRow, ...]) -> list[tuple[str, ...]]:
        def text(value: float | None, unit: str) -> str:
            return "" if value is None else units.value(value, unit)

        return [
            (
                row.term,
                text(row.expected, row.unit),
                text(row.measured, row.unit),
                "" if row.ratio is None else units.times(row.ratio),
                row.kind,
                row.how,
            )
            for row in rows
        ]

    def __repr__(self) -> str:
        body = text_table(
            [*self._cells(self.rows), *self._cells(self.modules)], header=_HEADER, right=(1, 2, 3)
        ).splitlines()
        if self.modules:
            body.insert(len(self.rows) + 1, f"\n  {_BY_MODULE}")
        notes = "".join(f"\n  note: {note}" for note in self.notes)
        return f"{self._title}\n\n" + "\n".join(body) + f"\n\n  {self.verdict}{notes}"

    def _repr_html_(self) -> str:
        cells = self._cells(self.rows)
        if self.modules:
            cells += [(_BY_MODULE,), *self._cells(self.modules)]
        table = html_table(cells, header=_HEADER, right=(1, 2, 3), title=self._title)
        notes = "".join(f"<li>{escape(note)}</li>" for note in self.notes)
        return f"{table}<p>{escape(self.verdict)}</p>" + (f"<ul>{notes}</ul>" if notes else "")

    @property
    def _title(self) -> str:
        return f"Check: {self.plan.title} beside {self.measured.source}"


_BY_MODULE = "the device's time by module, the most missed first"
_HEADER = ("", "expected", "measured", "ratio", "kind", "")


def check(plan: Plan, measured: Any) -> Check:
    """Compare a plan with a Session, a Profile, or a dict of figures of one GPU.

    A dict may hold step_ms, tokens (of a step), tokens_per_s, peak_gib (tensors), reserved_gib (the allocator), flops (of a step),
    idle_frac, parameters, loss and device (a GPU's name, or "cpu").

    Raises TypeError for anything else, and ValueError, in one sentence, for figures that cannot be meant and for a measurement of
    another model or of another number of tokens a step than is planned.
    """
    m = read_measured(measured, plan.gpu)
    _same_model(plan, m, measured)
    m = _completed(plan, m)
    rows = sorted(_rows(plan, m), key=lambda row: (row.ratio is None, row.kind in _LAST, -round(row.miss, 6)))
    notes = list(m.notes)
    if other := _other_device(plan, m):
        notes.append(other)
    if (name := getattr(plan.recipe, "name", None)) and m.recipe and m.recipe not in ("as given", name):
        notes.append(f"recipe {m.recipe} was measured, {name} is planned")
    result = Check(plan, m, tuple(rows), tuple(_module_rows(plan, m)), tuple(notes))
    return replace(result, notes=(*notes, *_outlook(result)))


# -- whether the two can be compared


def _completed(plan: Plan, m: Measured) -> Measured:
    """Return the measurement with tokens a second or step time filled in from one another, where a step's tokens are known."""
    tokens = m.tokens or _tokens(plan)
    if tokens is None:
        return m
    if m.step_ms and m.tokens_per_s is None:
        return replace(m, tokens_per_s=tokens / m.step_ms * 1e3)
    if m.tokens_per_s and m.step_ms is None:
        return replace(m, step_ms=tokens / m.tokens_per_s * 1e3)
    return m


def _same_model(plan: Plan, m: Measured, measured: Any) -> None:
    """Raise ValueError where the measurement is of another model, or of another step."""
    planned = _tokens(plan)
    tokens = m.tokens
    if tokens is None and m.step_ms and m.tokens_per_s:
        tokens = m.tokens_per_s * m.step_ms / 1e3
    if planned is not None and tokens is not None and abs(tokens / planned - 1) > _SAME:
        times = f" x {plan.setup.accumulate}" if plan.setup.accumulate > 1 else ""
        raise ValueError(
            f"{_upper(m.source)} has {tokens:,.0f} tokens a step and the plan {planned:,.0f} on one GPU "
            f"({plan.setup.batch} x {plan.setup.length}{times}): compare it with plan.but(batch=..., length=..., accumulate=...) "
            "of the same step."
        )
    parameters = m.parameters
    if parameters is None and plan.shape is not None and (model := getattr(measured, "model", None)) is not None:
        try:
            parameters = read_shape(model)[0].parameters
        except (ValueError, TypeError, FileNotFoundError, AttributeError):
            return  # a model without a config that can be read: nothing to compare
    if parameters is not None and abs(parameters / plan.parameters - 1) > _SAME:
        raise ValueError(
            f"{_upper(m.source)} is of a model of {units.count(parameters)} parameters and the plan of one of "
            f"{units.count(plan.parameters)}: plan the model that was measured."
        )


def _tokens(plan: Plan) -> float | None:
    """Return one GPU's share of the tokens of a step: where several have one model together, that of each."""
    s = plan.setup
    return None if s.batch is None or s.length is None else s.batch * s.length * s.accumulate / s.division.gpus


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


# -- the rows


def _rows(plan: Plan, m: Measured) -> Iterator[CheckRow]:
    time, gpus = plan.time, plan.setup.gpus
    estimate = getattr(plan, "estimate", None)
    expected: list[tuple[str, float, str, str]] = []
    if time.step_ms is not None and time.rate_kind == "given":
        expected.append(("step", time.step_ms, "prediction", "at the given rate"))
    if estimate is not None:
        name = "step, estimated" if expected else "step"
        expected.append((name, float(estimate.step_ms), str(estimate.kind), str(estimate.how)))
    if not expected and time.floor_step_ms is not None:
        expected.append(("step", time.floor_step_ms, "bound", time.floor_how))
    for term, ms, kind, how in expected:
        yield CheckRow(term, ms, m.step_ms, "ms", kind, how)
    planned = _tokens(plan)
    if planned is not None and expected and m.tokens_per_s is not None:
        _, ms, kind, _ = expected[0]
        yield CheckRow(
            "tokens a second", planned / ms * 1e3, m.tokens_per_s, "tokens/s", kind, "of one GPU" if gpus > 1 else ""
        )
    if not expected and m.step_ms is not None:
        how = "nothing was expected: plan with batch=, length=, and a rate or gpu="
        yield CheckRow("step", None, m.step_ms, "ms", "measured", how)
    rate = _rate(plan, m)
    if rate is not None:
        yield CheckRow(
            "rate of one GPU",
            time.rate_tflops,
            rate,
            "TFLOPS",
            "prediction" if time.rate_tflops else "measured",
            "model FLOPs",
        )
    if rate is not None and time.peak_tflops and not _other_device(plan, m):
        kind = "prediction" if time.mfu else "measured"
        yield CheckRow(
            "MFU", time.mfu, rate / time.peak_tflops, "share", kind, f"of {time.peak}, {time.peak_tflops:g} TFLOPS"
        )
    if m.flops is not None:
        share = None if plan.flops_per_step is None else plan.flops_per_step / gpus
        yield CheckRow(
            "FLOPs a step", share, m.flops, "FLOP", "exact" if plan.compute else "approximate", "model FLOPs"
        )
    if m.executed is not None:
        how = "every key of attention, and what is computed again"
        yield CheckRow("FLOPs executed", _executed(plan), m.executed, "FLOP", "approximate", how)
    if m.whole is not None and m.whole.light_ms and not _other_device(plan, m):
        how = "what the profile's operators compute and move, at the rates of " + (plan.gpu.name if plan.gpu else "")
        yield CheckRow("busy time", m.whole.light_ms, m.whole.ms, "ms", "optimistic", how)
    yield from _memory_rows(plan, m)
    if m.idle_frac is not None:
        yield CheckRow("idle", None, m.idle_frac, "share", "measured", m.waits)
    if m.loss is not None:
        yield CheckRow("loss", None, m.loss, "", "measured", "a plan expects none")


def _executed(plan: Plan) -> float | None:
    """Return the FLOPs of a step on one GPU as operators count them: attention sees every key, and fused attention computes its
    scores again in the backward. None without shapes or the tokens of a step."""
    tokens, full = _tokens(plan), _every_key(plan).compute
    if tokens is None or full is None:
        return None
    again = sum(p.forward for p in full.products if p.module == "attention.scores" and p.grad_input)
    return float(full.hardware + again) * tokens


def _every_key(plan: Plan) -> Plan:
    return plan.but(attention="full")


def _module_rows(plan: Plan, m: Measured) -> list[CheckRow]:
    """Return rows of the device's time by module: the estimate's beside the profile's own times, without the modules inside."""
    estimate = getattr(plan, "estimate", None)
    if estimate is None or not m.modules:
        return []
    expected = dict(estimate.by_module())
    flop: dict[str, float] = {}
    for each in getattr(_every_key(plan).estimate, "rows", ()) if m.whole is not None else ():
        flop[each.module] = flop.get(each.module, 0.0) + each.flop
    found: dict[str, list[ModuleCost]] = {name: [] for name in (*(name for name, _, _ in _PLACES), _OTHER)}
    for own in m.modules:
        found[_place(own.path)].append(own)
    rows = []
    for name, modules in (*((name, modules) for name, modules, _ in _PLACES), (_OTHER, tuple(expected))):
        planned = sum(expected.pop(module, 0.0) for module in modules)
        asked = sum(flop.pop(module, 0.0) for module in (modules if name != _OTHER else tuple(flop)))
        ms = sum(own.ms for own in found[name])
        rows.append(CheckRow(name, planned or None, ms or None, "ms", estimate.kind, _work(found[name], asked)))
    there = [row for row in rows if row.expected or row.measured]
    return sorted(there, key=lambda row: -abs((row.measured or 0.0) - (row.expected or 0.0)))


def _work(rows: list[ModuleCost], planned_flop: float) -> str:
    """Say how much these modules computed and how much was planned, and the share of the speed of light that they reached."""
    light, ms = sum(own.light_ms or 0.0 for own in rows), sum(own.ms for own in rows if own.light_ms)
    if not light or not ms:
        return ""
    computed = sum(own.gflop or 0.0 for own in rows)
    planned = (
        "as planned"
        if abs(computed * 1e9 - planned_flop) <= _SAME * planned_flop
        else f"({planned_flop / 1e9:.3g} planned)"
    )
    return (f"{computed:.3g} GFLOP {planned}, " if computed else "") + f"{light / ms:.0%} of the speed of light"


def _place(path: str) -> str:
    for name, _, endings in _PLACES:
        for ending in endings:
            if path == ending or (
                ending and (path.endswith(f".{ending}") or (ending == "norm" and path.endswith(ending)))
            ):
                return name
    return _OTHER


def _memory_rows(plan: Plan, m: Measured) -> Iterator[CheckRow]:
    tensors = _tensors_gib(plan)
    if m.peak_gib is not None:
        if m.of_process:
            how = "with Python and its libraries, so not compared"
            if tensors is not None:
                how += f" with the {units.gib(tensors)} of tensors that are planned"
            yield CheckRow("memory, process", None, m.peak_gib, "GiB", "measured", how)
        else:
            yield CheckRow("memory, tensors", tensors, m.peak_gib, "GiB", "approximate", "without slack")
    if m.reserved_gib is not None:
        whole = None if tensors is None else tensors * (1 + plan.setup.slack)
        yield CheckRow(
            "memory, reserved", whole, m.reserved_gib, "GiB", "approximate", f"with {plan.setup.slack:.0%} slack"
        )


def _tensors_gib(plan: Plan) -> float | None:
    """Return the GiB that tensors are predicted to take at the peak; None where activations are left out, which are most of
    them."""
    if plan.memory.left_out:
        return None
    peak = getattr(plan.memory, "peak_gib", None)
    return float(peak) if peak is not None else plan.memory.gib / (1 + plan.setup.slack)


def _rate(plan: Plan, m: Measured) -> float | None:
    return None if m.tokens_per_s is None else m.tokens_per_s * plan.flops_per_token / 1e12


# -- why


def _other_device(plan: Plan, m: Measured) -> str:
    """Say that another device was measured than is planned; "" where it is the same, or either is not known."""
    gpu = plan.gpu
    if gpu is None or m.device is None:
        return ""
    if m.device == "cpu" or gpu.device == "cpu":
        same = m.device == gpu.device
    else:
        same = _is(m.device, gpu)
    return "" if same else f"{m.device} was measured, {gpu.name} is planned"


def _is(device: str, gpu: Gpu) -> bool:
    try:
        return find_gpu(device).name == gpu.name
    except ValueError:
        return device == gpu.name


def _why(result: Check, row: CheckRow) -> str:
    """Return the likeliest reason of a miss, by what else was measured; "" where nothing points to one."""
    plan, m = result.plan, result.measured
    assert row.ratio is not None
    if other := _other_device(plan, m):
        return f"because {other}"
    if row.term.startswith("memory"):
        return _why_memory(plan, m, row.ratio)
    if row.term == "FLOPs a step":
        seen = plan.compute.attention if plan.compute is not None else "none of attention"
        return f"by another convention: the plan counts attention as {seen}, and FLOP counters count every key and recompute"
    if row.term == "FLOPs executed":
        return "in work that the plan does not know, or knows and the step leaves out: p.modules has the FLOPs of each module"
    slower = row.ratio > 1 if row.unit == "ms" else row.ratio < 1
    if not slower:
        return "because the rate was given too low" if _given_tflops(plan, row) else ""
    return _why_slow(result, row)


def _given_tflops(plan: Plan, row: CheckRow) -> float | None:
    """Return the rate that the user gave, if the row's expectation is made from it; None otherwise."""
    expects = row.kind == "prediction" and row.term != "step, estimated"
    return plan.time.rate_tflops if expects and plan.time.rate_kind == "given" else None


def _why_slow(result: Check, row: CheckRow) -> str:
    plan, m = result.plan, result.measured
    if m.idle_frac is not None and m.idle_frac >= _IDLE:
        rest = f", {m.waits}" if m.waits else ": it waits for batches, launches or reads of values"
        return f"because the device idled {m.idle_frac:.0%} of the step{rest}"
    if m.emulated:
        return f"because the device has no products of its own for them ({m.emulated})"
    slower = [each for each in result.modules if (each.measured or 0.0) > (each.expected or 0.0)]
    if slower and row.kind == "prediction":
        first = slower[0]
        return (
            f"in {first.term}, {units.value(first.measured or 0.0, 'ms')} where "
            f"{units.value(first.expected or 0.0, 'ms')} were expected, the most of any module"
        )
    if row.kind in ("bound", "optimistic") and (plan.gpu is None or plan.gpu.ceilings is None):
        return "because few runs reach a datasheet's rates: plan with gpu=calibrate() for a prediction"
    rate, given = _rate(plan, m), _given_tflops(plan, row)
    if rate is not None and given is not None:
        return f"because {given:,.4g} TFLOPS were given and {rate:,.4g} were reached"
    look = "" if m.modules else ": profile a few steps, and check(profile) says where"
    return f"because layers reach less than the large products of a calibration, and the estimate leaves some work out{look}"


def _why_memory(plan: Plan, m: Measured, ratio: float) -> str:
    terms = [t for t in plan.memory.terms if not t.exact and t.counted and t.name != "slack"]
    largest = max(terms, key=lambda t: t.bytes, default=None)
    if largest is None:
        return ""
    return f"in {largest.name}, the largest approximate term ({units.gib(largest.gib)}): " + (
        "logits=, layers= and recompute= say what the run keeps" if ratio > 1 else "the run keeps less than planned"
    )


def _too_fast(gpu: Gpu | None, rate: float | None) -> str:
    """Say that a rate is above every peak of the GPU; "" where it is not."""
    if gpu is None or rate is None or gpu.fastest_tflops is None or rate <= gpu.fastest_tflops:
        return ""
    return (
        f"{rate:,.4g} TFLOPS are above {gpu.name}'s fastest dense peak of {gpu.fastest_tflops:g}, so the time is wrong: "
        "wait for the device before and after the steps (torch.cuda.synchronize())"
    )


def _outlook(result: Check) -> Iterator[str]:
    """Yield notes: what the whole run takes and costs at the measured rate, or why that cannot be said."""
    plan = result.plan
    if (slack := result.slack) is not None and slack > _MOST_SLACK:
        yield "tensors took more than any slack explains, so a recalibrated plan keeps its own: the run holds what is not planned"
    rate = result.tflops_per_gpu
    if wrong := _too_fast(plan.gpu, rate):
        yield wrong
        return
    if plan.flops is None or rate is None or _other_device(plan, result.measured):
        return
    now = result.recalibrated
    if now.days is None:
        return
    before = "" if plan.days is None else f" (planned: {units.days(plan.days)})"
    cost = "" if now.usd is None else f" and {units.value(now.usd, 'USD')}"
    yield f"at the measured rate the run takes {units.days(now.days)}{before}{cost}"
