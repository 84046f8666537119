"""Fit what published runs reached, and judge the likely time of plans by runs that were left out of the fit.

    python -m surokit.bench published --out docs/measurements/published.json --write     fits, and writes hardware/reached.csv
    python -m surokit.bench published --runs mine.csv                                    judges the shipped factors by other runs

Each source (a file) weighs the same, however many runs it has, and the loss is robust (soft L1), since some published figures are
wrong. A run's left-out prediction comes from a fit without its source where its GPU has other sources, and without its model where
it has none; its interval is that of the other sources' runs. Files of one publisher are alike, so that a second prediction leaves
out all that the publisher has: that is how a new engine is met. Factors are held near what physics suggests where few runs say
something: `_PRIORS` has the middle of each and how far, in logs, one standard deviation is.
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
from surokit.units import counted

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

REACHED = Path(likely.__file__).parents[2] / "hardware" / "reached.csv"
SCALE = 0.08  # of a run's error in logs; from about half more on, errors count by their size and not squared
# (middle, standard deviation in logs) by term; a factor of an engine stands beside that of a GPU or an architecture
_PRIORS: Mapping[str, tuple[float, float]] = {
    "products": (1.2, 0.12),
    "tails": (0.3, 0.5),
    "short": (1.0, 0.5),
    "products of eager": (1.08, 0.1),
    "products of compiled": (1.08, 0.1),
    "attention": (2.0, 0.3),
    "attention of pytorch": (1.5, 0.3),
    "memory": (1.25, 0.12),
    "quantization": (1.3, 0.4),
    "adapter": (1.5, 0.6),
    "optimizer": (1.3, 0.4),
    "gap_us": (2.0, 0.15),
    "host_us of eager": (15.0, 0.3),
    "host_us of compiled": (8.0, 0.5),
    "host_us of fused": (6.0, 0.5),
    "link": (0.3, 0.5),
    "constant_ms": (3.0, 0.3),
}
_ENGINES = get_args(Engine)
LOW, HIGH = 0.1, 0.9
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
        if "recompute" in run.assumed and not fits(planned):
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
        kinds = sorted({likely.architecture(m.gpu) for m in runs})
        self.names = [
            *(("products", name) for name in (*gpus, "eager", "compiled")),
            *(("attention", name) for name in (*kinds, "pytorch")),
            *(("memory", name) for name in _ENGINES),
            *(
                (term, ANY)
                for term in ("tails", "short", "quantization", "adapter", "optimizer", "gap_us", "link", "constant_ms")
            ),
            *(("host_us", name) for name in _ENGINES),
        ]
        self.index = {name: i for i, name in enumerate(self.names)}
        priors = [_PRIORS.get(f"{term} of {of}") or _PRIORS[term] for term, of in self.names]
        self.middle = [math.log(middle) for middle, _ in priors]
        self.deviation = [deviation for _, deviation in priors]

    def factors(self, x: Array, runs: Sequence[Measured]) -> Factors:
        """Return the factors of runs, as arrays."""
        import numpy as np

        factors = np.exp(np.append(x, 0.0))  # the last is one, of what is not fitted
        names = [likely.names_of(m.gpu, m.run.engine) for m in runs]
        return likely.gather(lambda term, kind: factors[[self.index.get((term, each[kind]), -1) for each in names]])

    def reached(self, x: Array) -> dict[tuple[str, str], float]:
        """Return the factors as reached.csv has them; those of any GPU are the mean of the others', in logs."""
        found = {name: math.exp(value) for name, value in zip(self.names, x)}
        for term in ("products", "attention"):
            known = [found[name] for name in self.names if name[0] == term and name[1] not in (*_ENGINES, "pytorch")]
            found[term, ANY] = math.exp(sum(map(math.log, known)) / len(known))
            found[term, "fused"] = 1.0
        found["memory", ANY], found["host_us", ANY] = found["memory", "eager"], found["host_us", "eager"]
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
    middle, deviation = np.array(unknowns.middle), np.array(unknowns.deviation)

    def errors(x: Array) -> Array:
        misses = np.log(likely.step_ms(terms, unknowns.factors(x, runs))) - target
        return np.concatenate([misses / SCALE * weight, (x - middle) / deviation])

    return unknowns.reached(least_squares(errors, middle, loss="soft_l1", f_scale=1.5).x)


def predicted_ms(m: Measured, reached: Reached) -> float:
    """Return the likely ms of a run's step with these factors."""
    return float(likely.step_ms(m.terms, likely.factors_for(m.gpu, m.run.engine, reached)))


def left_out(runs: Sequence[Measured], of: Callable[[PublishedRun], str]) -> list[tuple[float, bool]]:
    """Predict each run from a fit without its like; return (likely ms, True if the fit has its GPU and engine) of each.

    of: a run's source or publisher, of which its like are all runs, or those of its model where the GPU has no other.
    """
    others = defaultdict(set)
    for m in runs:
        others[m.gpu.name].add(of(m.run))

    def group(m: Measured) -> tuple[str, str]:
        return (of(m.run), "" if len(others[m.gpu.name]) > 1 else m.run.model)

    found: dict[int, tuple[float, bool]] = {}
    for out in dict.fromkeys(map(group, runs)):
        rest = [m for m in runs if group(m) != out]
        reached, pairs = fit(rest), {(m.gpu.name, m.run.engine) for m in rest}
        for i, m in enumerate(runs):
            if group(m) == out:
                found[i] = predicted_ms(m, reached), (m.gpu.name, m.run.engine) in pairs
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
        new = [ms for ms, _ in left_out(found, lambda run: run.publisher)]
        reached |= spread(found, apart)
        spreads = [spread(found, apart, without=m.run.where) for m in found]
        pairs = Counter(f"{m.gpu.name} {m.run.engine}" for m in found)
        reached |= {("runs", pair): float(n) for pair, n in sorted(pairs.items())}
        if write:
            _write(reached)
    else:
        reached = dict(likely.read_reached(REACHED.read_text(encoding="utf-8")))
        apart = [(predicted_ms(m, reached), ("runs", f"{m.gpu.name} {m.run.engine}") in reached) for m in found]
        spreads, new = [reached] * len(found), [ms for ms, _ in apart]
    return {
        "benchmark": "published runs: likely time beside what was measured",
        "settings": {
            "runs": "surokit/planner/compare/runs.csv" if runs is None else str(runs),
            "expressed": len(found),
        },
        "environment": environment(),
        "published": [
            _row(m, predicted_ms(m, reached), *each, new_ms, ends)
            for m, each, new_ms, ends in zip(found, apart, new, spreads)
        ],
        "not expressed": dict(Counter(f"{every[i].where}: {why}" for i, why in why_not.items()).most_common()),
    }


def spread(
    runs: Sequence[Measured], apart: Sequence[tuple[float, bool]], without: str = ""
) -> dict[tuple[str, str], float]:
    """Return the low and the high end of the interval, times a likely time, for runs whose GPU and engine the fit has seen and for
    others: p10 and p90 of measured over left-out times. `without` leaves a source's runs out."""
    weight, found = weights(runs) ** 2, {}
    for of, seen in (("seen", True), ("unseen", False)):
        chosen = [i for i, m in enumerate(runs) if apart[i][1] == seen and m.run.where != without]
        ratios, w = [runs[i].ms / apart[i][0] for i in chosen], [float(weight[i]) for i in chosen]
        found["low", of], found["high", of] = quantile(ratios, w, LOW), quantile(ratios, w, HIGH)
    # few are unseen: what is known less is no surer
    found["low", "unseen"] = min(found["low", "seen"], found["low", "unseen"])
    found["high", "unseen"] = max(found["high", "seen"], found["high", "unseen"])
    return found


def _row(m: Measured, ms: float, apart_ms: float, seen: bool, new_ms: float, reached: Reached) -> dict[str, Any]:
    of = "seen" if seen else "unseen"
    assert m.plan.estimate is not None
    return {
        "line": m.line,
        "where": m.run.where,
        **{name: getattr(m.run, name) for name in ("model", "gpu", "gpus", "engine", "recipe", "batch", "length")},
        "assumed": list(m.run.assumed),
        "tokens": m.plan.estimate.tokens // (m.run.gpus or 1),
        "measured_ms": round(m.ms, 3),
        "likely_ms": round(ms, 3),
        "left_out_ms": round(apart_ms, 3),
        "without_publisher_ms": round(new_ms, 3),
        "low_ms": round(apart_ms * reached["low", of], 3),
        "high_ms": round(apart_ms * reached["high", of], 3),
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
    return markdown(data, head, rows)


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
