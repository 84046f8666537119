"""Fit what published runs reached, and judge the likely time of plans by runs that were left out of the fit.

    python -m surokit.bench published --out docs/measurements/published.json --write     fits, and writes hardware/reached.csv
    python -m surokit.bench published --runs mine.csv                                    judges the shipped factors by other runs

Each source (a file) weighs the same, however many runs it has, and the loss is robust (soft L1), since some published figures are
wrong. A run's left-out prediction comes from a fit without its source where its GPU has other sources, and without its model
where it has none; its interval is that of the other sources' runs. Files of one publisher are alike, so that a second prediction
leaves out all that the publisher has: that is how a new engine is met. Factors are held near what physics suggests where few runs
say something: `_PRIORS` has the middle of each and how far, in logs, one standard deviation is.
"""

from __future__ import annotations

import csv
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from surokit.bench.result import fingerprint, markdown, save_picture
from surokit.hardware.gpus import Gpu, find_gpu
from surokit.planner.compare.runs import PublishedRun, read_runs
from surokit.planner.counts.memory import Engine
from surokit.planner.planning import Plan, plan
from surokit.planner.times import likely
from surokit.planner.times.likely import ANY, Factors, Reached, Terms
from surokit.tables import markdown_table
from surokit.units import counted

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

REACHED = Path(likely.__file__).parents[2] / "hardware" / "reached.csv"
SCALE = 0.08  # of a run's error in logs
LINEAR_FROM = 1.5  # times that, errors count by their size and not squared
# (middle, standard deviation in logs) by term; a factor of an engine stands beside that of a GPU or an architecture
_PRIORS: Mapping[str, tuple[float, float]] = {
    # the largest products reach 80 to 87 % of the peak on A100 to B200, and 51 to 60 % on MI300X (ml-engineering, its table of
    # maximum achievable matmul FLOPS)
    "products": (1.2, 0.12),
    "products of MI300X": (1.8, 0.15),
    "products of MI325X": (1.8, 0.15),
    "tails": (0.3, 0.5),
    "short_inner": (1.0, 0.5),
    "products of eager": (1.08, 0.1),
    "products of compiled": (1.08, 0.1),
    # FlashAttention's papers: the second version reaches 60 % of an A100's peak and 35 % of an H100's, the third 55 to 75 % of the
    # latter, the fourth 71 % of a B200's; the first and its Triton kernel about half as much as the second
    "attention": (2.0, 0.3),
    "attention of sm80 triton": (3.0, 0.3),
    "attention of sm90 triton": (5.0, 0.3),
    "attention of sm80 sdpa": (1.7, 0.1),
    "attention of sm89 sdpa": (1.2, 0.1),
    "attention of sm90 sdpa": (3.0, 0.1),
    "attention of sm90 flash3": (1.8, 0.1),
    "attention of sm100 sdpa": (2.3, 0.1),
    "attention of sm100 flash3": (1.6, 0.1),
    "attention of sm120 sdpa": (1.3, 0.1),
    "attention of sm89 triton": (2.2, 0.3),
    "attention of sm100 triton": (5.0, 0.3),
    "attention of sm120 triton": (2.5, 0.3),
    "attention of other triton": (5.0, 0.3),
    "attention of other sdpa": (3.0, 0.3),
    "attention of other flash3": (2.5, 0.3),
    "short_keys": (0.7, 0.4),
    "memory": (1.25, 0.12),
    "quantization": (1.3, 0.4),
    "adapter": (1.5, 0.13),
    "optimizer": (1.3, 0.4),
    "gap_us": (2.0, 0.15),
    "host_us of eager": (15.0, 0.15),
    "host_us of compiled": (8.0, 0.5),
    "host_us of fused": (6.0, 0.3),
    "adapter_us": (15.0, 0.2),
    "routing_us": (300.0, 1.0),
    "waited": (1.0, 0.3),
    "hidden": (0.15, 0.7),
    "exchange": (0.7, 0.4),
    "constant_ms": (3.0, 0.3),
    "host_link": (0.75, 0.2),
    "host_adam": (4e9, 0.5),
}
_OF_ANY = (
    "tails",
    "short_inner",
    "short_keys",
    "quantization",
    "optimizer",
    "gap_us",
    "waited",
    "hidden",
    "exchange",
    "constant_ms",
    "routing_us",
    "host_link",
    "host_adam",
)
_ENGINES = get_args(Engine)
LOW, HIGH = 0.1, 0.9
_DECIDES = {"recompute", "optimizer"}  # memory; where these are not stated none is compared
_LEAST = 0.12  # of the picture's axis
_SHOWN = ("engine", "measured_ms", "left_out_ms", "low_ms", "high_ms")


@dataclass(frozen=True)
class Measured:
    """A Measured is a published run with its plan, the terms of its step, and the ms that its step took. `line`: of its file."""

    line: int
    run: PublishedRun
    plan: Plan
    gpu: Gpu
    terms: Terms
    ms: float

    @property
    def kind(self) -> str:
        """Return what the interval of its time is of (`likely.kind_of`)."""
        assert self.plan.estimate is not None
        return likely.kind_of(self.plan.estimate)


def measured(runs: Sequence[PublishedRun]) -> tuple[list[Measured], dict[int, str]]:
    """Plan the runs; return those that a plan expresses, and why it does not express the others, by their place."""
    found, why_not = [], {}
    for i, run in enumerate(runs):
        if why := run.why_not or ("" if run.tokens_per_s or run.tflops else "no speed is stated"):
            why_not[i] = why
            continue
        try:
            planned = plan(**run.arguments)
        except ValueError as error:
            why_not[i] = str(error)
            continue
        if "recompute" in run.assumed and run.recompute == "none" and not fits(planned):
            planned = planned.but(recompute="full")  # of what is not stated, what must have been
            if not fits(planned):
                why_not[i] = "it does not fit, and what was kept on the host is not stated"
                continue
        if (estimate := planned.estimate) is None:
            why_not[i] = f"the rates of {run.gpu} are not known"
            continue
        if run.tokens_per_s:
            ms = estimate.tokens / (run.gpus or 1) / run.tokens_per_s * 1e3
        else:
            ms = estimate.model_flop / (run.tflops or 1.0) / 1e9
        gpu = find_gpu(run.gpu)
        found.append(Measured(i + 2, run, planned, gpu, likely.terms_of(estimate, gpu), ms))
    return found, why_not


def fits(planned: Plan) -> bool:
    """Return whether a plan fits without its slack, by 5 %."""
    return planned.room_gib is None or (planned.memory.peak_gib or 0.0) <= 1.05 * planned.room_gib


# -- the fit


class _Unknowns:
    """An _Unknowns names the factors that are fitted, and lays them out for arrays of runs."""

    def __init__(self, runs: Sequence[Measured]) -> None:
        gpus = sorted({m.gpu.name for m in runs})
        kernels = sorted({likely.names_of(m.gpu, m.plan.setup)["kernel"] for m in runs})
        self.names = [
            *(("products", name) for name in (*gpus, "eager", "compiled")),
            *(("attention", name) for name in kernels),
            *((term, name) for term in ("memory", "adapter") for name in _ENGINES),
            *((term, ANY) for term in _OF_ANY),
            *((term, name) for term in ("host_us", "adapter_us") for name in _ENGINES),
        ]
        self.index = {name: i for i, name in enumerate(self.names)}
        priors = [_PRIORS.get(f"{term} of {of}") or _PRIORS[term] for term, of in self.names]
        self.middle = [math.log(middle) for middle, _ in priors]
        self.deviation = [deviation for _, deviation in priors]

    def factors(self, x: Array, runs: Sequence[Measured]) -> Factors:
        """Return the factors of runs, as arrays."""
        import numpy as np

        factors = np.exp(np.append(x, 0.0))  # the last is one, of what is not fitted
        names = [likely.names_of(m.gpu, m.plan.setup) for m in runs]
        return likely.gather(lambda term, kind: factors[[self.index.get((term, each[kind]), -1) for each in names]])

    def reached(self, x: Array) -> dict[tuple[str, str], float]:
        """Return the factors as reached.csv has them; those of any GPU are the mean of the others', in logs."""
        found = {name: math.exp(value) for name, value in zip(self.names, x)}
        for term in ("products", "attention"):
            known = [found[name] for name in self.names if name[0] == term and name[1] not in _ENGINES]
            found[term, ANY] = math.exp(sum(map(math.log, known)) / len(known))
        # what no run has is near its prior
        priors = {tuple(name.split(" of ")): middle for name, (middle, _) in _PRIORS.items() if " of " in name}
        found |= {(term, of): middle for (term, of), middle in priors.items() if (term, of) not in found}
        found["products", "fused"] = 1.0
        found |= {(term, ANY): found[term, "eager"] for term in ("memory", "adapter", "host_us", "adapter_us")}
        return found


def _stacked(runs: Sequence[Measured]) -> Terms:
    import numpy as np

    arrays: dict[str, Any] = {f.name: np.array([getattr(m.terms, f.name) for m in runs]) for f in fields(Terms)}
    return Terms(**arrays)


def weights(runs: Sequence[Measured]) -> Array:
    """Return the weight of each run, so that each source weighs the same; their mean square is one."""
    import numpy as np

    count = Counter(m.run.where for m in runs)
    found = np.array([count[m.run.where] ** -0.5 for m in runs])
    scaled: Array = found / np.sqrt(np.mean(found**2))
    return scaled


def fit(runs: Sequence[Measured]) -> dict[tuple[str, str], float]:
    """Fit the factors to the logs of the runs' times."""
    import numpy as np
    from scipy.optimize import least_squares

    unknowns, terms, weight = _Unknowns(runs), _stacked(runs), weights(runs)
    target = np.log([m.ms for m in runs])
    hosted = [i for i, m in enumerate(runs) if m.plan.setup.offloads]
    middle, deviation = np.array(unknowns.middle), np.array(unknowns.deviation)

    def errors(x: Array) -> Array:
        factors = unknowns.factors(x, runs)
        ms = likely.step_ms(terms, factors)
        for i in hosted:
            ms[i] = with_host(runs[i], ms[i], factors.host_link[i], factors.host_adam[i])
        misses = (np.log(ms) - target) / SCALE * weight / LINEAR_FROM
        # the soft L1 of misses alone: a prior holds, however far it is pulled
        robust = np.sign(misses) * LINEAR_FROM * np.sqrt(2 * (np.sqrt(1 + misses**2) - 1))
        return np.concatenate([robust, (x - middle) / deviation])

    return unknowns.reached(least_squares(errors, middle).x)


def predicted_ms(m: Measured, reached: Reached) -> float:
    """Return the likely ms of a run's step with these factors."""
    factors = likely.factors_for(m.gpu, m.plan.setup, reached)
    return with_host(m, float(likely.step_ms(m.terms, factors)), factors.host_link, factors.host_adam)


def with_host(m: Measured, computes_ms: float, link: float, adam: float) -> float:
    """Return the ms of a run's step that computes for so long, with what it keeps on the host, whose factors are given."""
    if not m.plan.setup.offloads:
        return computes_ms
    host = likely.likely_host(m.gpu, m.run.gpus or 1, link, adam)
    return m.plan.on_host(computes_ms, host)


def left_out(runs: Sequence[Measured], of: Callable[[PublishedRun], str]) -> list[float]:
    """Predict each run from a fit without its like; return the likely ms of each.

    of: a run's source or publisher, of which its like are all runs, or those of its model where the GPU has no other.
    """
    others = defaultdict(set)
    for m in runs:
        others[m.gpu.name].add(of(m.run))

    def group(m: Measured) -> tuple[str, str]:
        return (of(m.run), "" if len(others[m.gpu.name]) > 1 else m.run.model)

    found: dict[int, float] = {}
    for out in dict.fromkeys(map(group, runs)):
        reached = fit([m for m in runs if group(m) != out])
        found |= {i: predicted_ms(m, reached) for i, m in enumerate(runs) if group(m) == out}
    return [found[i] for i in range(len(runs))]


def quantile(values: Sequence[float], weight: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the weight lies."""
    pairs = sorted(zip(values, weight))
    total, reach = sum(weight), 0.0
    for value, part in pairs:
        reach += part
        if reach >= share * total:
            return value
    return pairs[-1][0]


# -- the judgement


def run(runs: Path | None = None, write: bool = False) -> dict[str, Any]:
    """Plan, fit and judge the published runs, or judge those of another file by the shipped factors; return the raw result."""
    from surokit.environment import environment

    if write and runs is not None:
        raise ValueError(
            "--write writes what is fitted to the runs of surokit, and --runs judges others: leave one of them out."
        )
    every = read_runs(runs)
    found, why_not = measured(every)
    if runs is None:
        reached = fit(found)
        apart = left_out(found, lambda run: run.where)
        new = left_out(found, lambda run: run.publisher)
        reached |= spread(found, apart)
        spreads = [spread(found, apart, without=m.run.where) for m in found]
        pairs = Counter(likely.pair(m.gpu, m.run.engine, m.kind) for m in found)
        reached |= {("runs", pair): float(n) for pair, n in sorted(pairs.items())}
        if write:
            _write(reached)
    else:
        reached = dict(likely.read_reached(REACHED.read_text(encoding="utf-8")))
        apart = new = [predicted_ms(m, reached) for m in found]
        spreads = [reached] * len(found)
    return {
        "benchmark": "published runs: likely time beside what was measured",
        "settings": {
            "runs": "surokit/planner/compare/runs.csv" if runs is None else str(runs),
            "expressed": len(found),
        },
        "environment": environment(),
        "published": [
            _row(m, predicted_ms(m, reached), apart_ms, new_ms, ends)
            for m, apart_ms, new_ms, ends in zip(found, apart, new, spreads)
        ],
        "printed": [*memory_rows(every)],
        "not expressed": dict(Counter(f"{every[i].where}: {why}" for i, why in why_not.items()).most_common()),
    }


def memory_rows(runs: Sequence[PublishedRun]) -> Iterator[dict[str, Any]]:
    """Yield a row for each run whose memory was printed, and whose recompute and optimizer are stated: reserved memory is planned
    with slack, allocated memory without."""
    for i, run in enumerate(runs):
        if not run.memory_gib or run.why_not or _DECIDES & set(run.assumed):
            continue
        memory = plan(**run.arguments).memory
        planned = memory.gib if run.memory == "reserved" else memory.peak_gib
        yield {
            "line": i + 2,
            "where": run.where,
            **{name: getattr(run, name) for name in ("model", "gpu", "gpus", "recipe", "recompute", "memory", "note")},
            "measured_gib": run.memory_gib,
            "planned_gib": round(planned or 0.0, 3),
        }


def spread(runs: Sequence[Measured], apart: Sequence[float], without: str = "") -> dict[tuple[str, str], float]:
    """Return the low and the high end of the interval, times a likely time: p10 and p90 of measured over left-out times.

    `without` leaves a source's runs out. A source with four times the runs weighs twice as much: how runs of one table differ is a
    part of what is asked. Models with experts, divided models and adapters have intervals of their own.
    """
    found: dict[tuple[str, str], float] = {}
    for of in (ANY, likely.ADAPTERS, likely.DIVIDED, likely.EXPERTS):
        chosen = [i for i, m in enumerate(runs) if m.run.where != without and m.kind == of]
        weight = weights([runs[i] for i in chosen])
        ratios, w = [runs[i].ms / apart[i] for i in chosen], [float(each) for each in weight]
        found |= {("low", of): quantile(ratios, w, LOW), ("high", of): quantile(ratios, w, HIGH)}
    # the divided runs are few, and no surer than others
    found["low", likely.DIVIDED] = min(found["low", likely.DIVIDED], found["low", ANY])
    found["high", likely.DIVIDED] = max(found["high", likely.DIVIDED], found["high", ANY])
    return found


def _row(m: Measured, ms: float, apart_ms: float, new_ms: float, reached: Reached) -> dict[str, Any]:
    assert m.plan.estimate is not None
    return {
        "line": m.line,
        "where": m.run.where,
        **{name: getattr(m.run, name) for name in ("model", "gpu", "gpus", "engine", "recipe", "batch", "length")},
        "assumed": list(m.run.assumed),
        "tokens": round(m.plan.estimate.tokens / (m.run.gpus or 1)),
        "measured_ms": round(m.ms, 3),
        "likely_ms": round(ms, 3),
        "left_out_ms": round(apart_ms, 3),
        "without_publisher_ms": round(new_ms, 3),
        "low_ms": round(apart_ms * reached["low", m.kind], 3),
        "high_ms": round(apart_ms * reached["high", m.kind], 3),
        "bound_ms": round(m.plan.estimate.step_ms, 3),
    }


def _write(reached: Reached) -> None:
    with REACHED.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("term", "of", "factor"))
        table.writerows((term, of, f"{value:.4g}") for (term, of), value in reached.items())


def error(row: Mapping[str, Any], of: str = "left_out_ms") -> float:
    """Return how far the likely time is from the measured one, as a share of that."""
    return abs(row[of] / row["measured_ms"] - 1)


def table(data: Mapping[str, Any]) -> str:
    """Make a Markdown table: a row a source, and one for all."""
    head = [
        "source",
        "runs",
        "error",
        "9 of 10",
        "without publisher",
        "in the fit",
        "within",
        "high / low",
        "order",
        "below the bound",
    ]
    rows = [_judged(where, [r for r in data["published"] if r["where"] == where]) for where in _sources(data)]
    stated = [r for r in data["published"] if not r["assumed"]]
    rows += [_judged("all", data["published"]), _judged("all that state every column", stated)]
    return f"{_memory_table(data)}\n\n{markdown(data, head, rows)}"


def _memory_table(data: Mapping[str, Any]) -> str:
    rows = []
    for where in sorted({row["where"] for row in data["printed"]}):
        of = [row for row in data["printed"] if row["where"] == where]
        ratios = sorted(row["planned_gib"] / row["measured_gib"] for row in of)
        middle = quantile(ratios, [1.0] * len(of), 0.5)
        kinds = " and ".join(sorted({row["memory"] for row in of}))
        rows.append([where, str(len(of)), kinds, f"{ratios[0]:.2f}", f"{middle:.2f}", f"{ratios[-1]:.2f}"])
    return markdown_table(rows, header=["source", "runs", "memory", "planned / printed, least", "median", "most"])


def draw(data: Mapping[str, Any], file: Path) -> None:
    """Draw each run's left-out prediction over its measured time, by engine, with the interval as a band."""
    import matplotlib.pyplot as plt

    rows = data["published"]
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    low, high = (sorted(row[end] / row["left_out_ms"] for row in rows)[len(rows) // 2] for end in ("low_ms", "high_ms"))
    # a run within its interval is measured at low to high times its prediction
    axes.axhspan(1 / high, 1 / low, color="0.9", label="eight of ten runs")
    axes.axhline(1.0, color="0.4", linewidth=1)
    for engine, colour, marker in zip(_ENGINES, ("#0072B2", "#E69F00", "#009E73"), "o^s"):
        of = [row for row in rows if row["engine"] == engine]
        x, y = [r["measured_ms"] / 1e3 for r in of], [r["left_out_ms"] / r["measured_ms"] for r in of]
        axes.scatter(x, y, s=12, color=colour, marker=marker, label=f"{engine}, {len(of)} runs", alpha=0.8)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="measured seconds of a step",
        ylabel="likely / measured, run left out of the fit",
    )
    axes.set_ylim(_LEAST, 2.5)
    if below := sum(row["left_out_ms"] < _LEAST * row["measured_ms"] for row in rows):
        axes.plot([], [], " ", label=f"not shown: {counted(below, 'run')} below {_LEAST:g}")
    axes.set_yticks([0.25, 0.5, 0.8, 1.0, 1.25, 2.0], ["0.25", "0.5", "0.8", "1", "1.25", "2"])
    axes.yaxis.set_minor_formatter("")
    axes.legend(frameon=False, fontsize=8)
    plt.close(figure)
    save_picture(figure, file, digest(data))


def digest(data: Mapping[str, Any]) -> str:
    """Return the fingerprint of what the picture shows."""
    return fingerprint([[row[name] for name in _SHOWN] for row in data["published"]])


def order(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return Kendall's tau between measured and left-out tokens a second of one GPU; None for fewer than five runs, and over
    several sources."""
    from scipy.stats import kendalltau

    if len(rows) < 5 or len({row["where"] for row in rows}) > 1:
        return None
    speeds = [[row["tokens"] / row[ms] for row in rows] for ms in ("measured_ms", "left_out_ms")]
    return float(kendalltau(*speeds).statistic)


def _sources(data: Mapping[str, Any]) -> Iterator[str]:
    yield from sorted({row["where"] for row in data["published"]})


def _judged(name: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    ones = [1.0] * len(rows)
    errors = [error(row) for row in rows]
    within = sum(row["low_ms"] <= row["measured_ms"] <= row["high_ms"] for row in rows) / len(rows)
    width = quantile([row["high_ms"] / row["low_ms"] for row in rows], ones, 0.5)
    return [
        name,
        str(len(rows)),
        f"{quantile(errors, ones, 0.5):.0%}",
        f"{quantile(errors, ones, 0.9):.0%}",
        *(
            f"{quantile([error(row, of) for row in rows], ones, 0.5):.0%}"
            for of in ("without_publisher_ms", "likely_ms")
        ),
        f"{within:.0%}",
        f"{width:.2f}",
        "" if (same := order(rows)) is None else f"{same:.2f}",
        str(sum(row["measured_ms"] < row["bound_ms"] for row in rows)),
    ]
