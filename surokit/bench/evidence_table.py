"""Show what came of the study of recipes: gaps with their intervals and gates, what models can do, and both as pictures.

Everything here follows from the raw file: the same file gives the same bytes.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from surokit.bench.evidence_plan import (
    ABLE,
    ALONE,
    CONTROL,
    FROM_SCRATCH,
    FROZEN,
    GATES,
    OF_TASKS,
    OF_TEXTS,
    PROCESSOR,
    SEEDS,
    SIZES,
    TASK_SEEDS,
    TASKS,
    Run,
    at_its_rate,
    baseline_of,
    baseline_runs,
    loss_at,
    planned,
    task_of,
)
from surokit.bench.result import markdown
from surokit.bench.results_store import mixed
from surokit.statistics import Noise, paired_gap, residual_noise

ALL = "all"  # sizes together: the mean of their means
#: Kinds of runs in words.
TRAINED = {"scratch": "from scratch", "tuning": "fine-tuned", "alone": "one thing alone"}


def gaps(
    data: Mapping[str, Any], kind: str, size: str, recipe: str, step: int | None = None, text: str | None = None
) -> list[float]:
    """Return the relative gap of the held-out loss to the baseline's mean, of every seed that has both.

    step: of the training, one of the curve's; None for the last. text: one of TEXTS; None for the mean over them.
    """
    return [
        loss_at(own, step, text) / statistics.mean(loss_at(base, step, text) for base in baselines) - 1
        for own, baselines in _compared(data, kind, size, recipe)
    ]


def beside(
    data: Mapping[str, Any], kind: str, size: str, recipe: str, other: str, other_kind: str | None = None
) -> list[float]:
    """Return how much higher the held-out loss of one recipe is than another's, as a share, of every seed that has both.

    other_kind: of the other recipe's runs, where that is not `kind`.
    """
    found, differences = data["evidence"], []
    for seed in range(SEEDS[size]):
        pair = ((kind, recipe), (other_kind or kind, other))
        runs = [at_its_rate(found, of, size, each, seed) for of, each in pair]
        ended = [loss_at(found[run.key]) for run in runs if run and run.key in found]
        if len(ended) == 2:
            differences.append(ended[0] / ended[1] - 1)
    return differences


def _compared(data: Mapping[str, Any], kind: str, of: str, recipe: str) -> list[tuple[Any, list[Any]]]:
    """Return a recipe's run and those of its baseline, of a size or a task, for every seed that has the first of each."""
    found, compared = data["evidence"], []
    rates = data.get("rates", found)
    for seed in range(max(*SEEDS.values(), TASK_SEEDS)):
        own = at_its_rate(rates, kind, of, recipe, seed)
        beside = baseline_runs(rates, kind, of, recipe, seed)
        if own and beside and {own.key, beside[0].key} <= found.keys():
            compared.append((found[own.key], [found[run.key] for run in beside if run.key in found]))
    return compared


def noise(data: Mapping[str, Any], kind: str, size: str, recipe: str) -> Noise | None:
    """Return how much a gap varies between seeds; None of adapters, where each recipe's own gaps say that.

    From scratch every run varies alike, by the draws of rounding: all runs of a size tell how much, bf16's two as one recipe,
    without those that share most of their steps with another. What a seed and a recipe do to a loss is taken out before.
    """
    if kind not in ("scratch", "alone"):
        return None
    found, cells = data["evidence"], []
    rates = data.get("rates", found)
    for of, recipes in (("scratch", FROM_SCRATCH), ("alone", ALONE)):
        for each, seed in itertools.product(recipes, range(SEEDS[size])):
            run = at_its_rate(rates, of, size, each, seed)
            if run is not None and run.first_part is None and run.key in found:
                cells.append((seed, baseline_of(each) if each == CONTROL else each, math.log(loss_at(found[run.key]))))
    of_a_run = residual_noise(cells)
    compared = _compared(data, kind, size, recipe)
    factor = statistics.mean(1 + 1 / len(baselines) for _, baselines in compared) if compared else 1.0
    return Noise(of_a_run.variance * factor, of_a_run.degrees)


def accuracies(data: Mapping[str, Any], kind: str, task: str, recipe: str) -> list[float]:
    """Return how much more of a task a recipe gets right than its baseline at the end, as a share, of every seed that has both."""
    compared = _compared(data, kind, task, recipe)
    return [own["curve"][-1][-1] - base["curve"][-1][-1] for own, (base,) in compared]


def steps_to(found: Mapping[str, Any], accuracy: float) -> int | None:
    """Return at which step of a task's curve the accuracy was reached first; None where it was not."""
    return next((int(row[0]) for row in found["curve"] if row[-1] >= accuracy), None)


def rows(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each recipe and size, and one for the sizes of a recipe that have an interval, together: the mean gap with
    its interval, its spread, p-value, gate and verdict."""
    found = []
    for kind, recipes in OF_TEXTS.items():
        for recipe in recipes:
            of_sizes = {size: gaps(data, kind, size, recipe) for size in SIZES if recipe != baseline_of(recipe)}
            there = {size: (values, noise(data, kind, size, recipe)) for size, values in of_sizes.items() if values}
            gate = GATES.get(recipe) if kind != "alone" else None
            rows = {size: _row(gate, [group]) for size, group in there.items()}
            if len(there) > 1:
                known = [group for size, group in there.items() if not math.isnan(rows[size]["low"])]
                # one of several sizes is outside by chance more easily than one size is
                level = 1 - 0.05 / len(there)
                far = [size for size, group in there.items() if _row(gate, [group], level)["verdict"] == "outside"]
                for size in rows.keys() - far:
                    rows[size] |= {"verdict": rows[size]["verdict"].replace("outside", "undecided")}
                rows[ALL] = _row(gate, known or list(there.values()))
                rows[ALL] |= {"verdict": "outside"} if far else {}
            found += [{"kind": kind, "size": size, "recipe": recipe, **row} for size, row in rows.items()]
    return found


def _row(
    gate: float | None, groups: Sequence[tuple[Sequence[float], Noise | None]], level: float = 0.95
) -> dict[str, Any]:
    """Return a gap with its gate and verdict: "better" where all of the interval is below what the gate allows."""
    noises = [noise for _, noise in groups if noise]
    gap = paired_gap(*(values for values, _ in groups), level=level, noises=noises or None)
    verdict = "" if gate is None else "undecided" if math.isnan(gap.low) else gap.within(gate)
    if gate is not None and gap.high < -gate:
        verdict = "better"
    return {**gap._asdict(), "gate": gate, "verdict": verdict}


def by_recipe(data: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, dict[str, Any]]]:
    """Return the rows by kind and recipe, then by size; ALL is there too, the only size where there is one."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows(data):
        found.setdefault((row["kind"], row["recipe"]), {})[row["size"]] = row
    return {recipe: {ALL: next(iter(of_sizes.values())), **of_sizes} for recipe, of_sizes in found.items()}


def task_rows(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each task and recipe: accuracy, how far it is above the baseline's, with its interval, and the median of the
    steps to 90 % right of the seeds that got there."""
    found = []
    for kind, recipes in (("task", ABLE), ("retaught", FROZEN)):
        for task, recipe in itertools.product(TASKS, recipes):
            runs = [data["evidence"].get(Run(kind, task, recipe, seed, 0.0).key) for seed in range(TASK_SEEDS)]
            done = [run for run in runs if run]
            if not done:
                continue
            values = accuracies(data, kind, task, recipe)
            reached = sorted(step for run in done if (step := steps_to(run, 0.9)) is not None)
            found.append(
                {
                    "kind": kind,
                    "task": task,
                    "recipe": recipe,
                    "accuracy": statistics.mean(run["curve"][-1][-1] for run in done),
                    "gap": None if not values or recipe == baseline_of(recipe) else paired_gap(values),
                    "steps": statistics.median(reached) if reached else None,
                    "reached": len(reached),
                    "seeds": len(done),
                }
            )
    return found


def table_of_tasks(data: Mapping[str, Any]) -> str:
    """Make a Markdown table of the accuracies."""
    head = [
        "trained",
        "task",
        "recipe",
        "right",
        "more than bf16",
        "95 % interval",
        "p",
        "steps to 90 %",
        "seeds at 90 %",
    ]
    body = []
    for row in task_rows(data):
        gap = row["gap"]
        known = gap is not None and gap.pairs > 1
        body.append(
            [
                "from scratch" if row["kind"] == "task" else "an adapter over addition",
                row["task"],
                f"`{row['recipe']}`",
                f"{row['accuracy']:.1%}",
                "" if gap is None else f"{100 * gap.mean:+.1f} points",
                f"{100 * gap.low:+.1f} to {100 * gap.high:+.1f}" if known else "",
                f"{gap.p:.2g}" if known else "",
                "" if row["steps"] is None else f"{row['steps']:,.0f}",
                f"{row['reached']} of {row['seeds']}",
            ]
        )
    settings = dict(data["settings"].get("tasks", {}))
    if isinstance(shape := settings.get("model"), dict):
        settings["model"] = f"{shape['layers']} x {shape['width']}, {shape['heads']} heads, ffn {shape['ffn']}"
    return markdown(
        {
            "environment": _of_most_runs({**data, "evidence": _of_tasks(data)}),
            "benchmark": "tasks graded exactly",
            "settings": {"tasks": _words_of_tasks(), **settings},
        },
        head,
        body,
    )


def _of_tasks(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: run for key, run in data["evidence"].items() if run["kind"] in OF_TASKS}


def _words_of_tasks() -> str:
    return "; ".join(f"{name}: {task_of(name)}" for name in TASKS)


def table(data: Mapping[str, Any]) -> str:
    """Make Markdown tables of the gaps, and of what models can do where there are tasks."""
    tasks = f"\n\n{table_of_tasks(data)}" if task_rows(data) else ""
    return table_of_losses(data) + tasks


def table_of_losses(data: Mapping[str, Any]) -> str:
    """Make a Markdown table of the gaps, a row for each recipe: the mean of each size, and all sizes together."""
    head = ["trained", "recipe", *SIZES, "mean of sizes, 95 % interval", "SD of a seed", "p", "gate", "interval is"]
    body = []
    for (kind, recipe), of_sizes in by_recipe(data).items():
        whole = of_sizes[ALL]
        known = not math.isnan(whole["low"])
        body.append(
            [
                TRAINED[kind],
                f"`{recipe}`",
                *(_mean(of_sizes[size]) if size in of_sizes else "" for size in SIZES),
                f"{_percent(whole['mean'])} ({_percent(whole['low'])} to {_percent(whole['high'])})" if known else "",
                f"{100 * whole['spread']:.3f} %" if known else "",
                f"{whole['p']:.2g}" if known else "",
                "" if whole["gate"] is None else f"{100 * whole['gate']:g} %",
                whole["verdict"],
            ]
        )
    settings = {key: value for key, value in data["settings"].items() if isinstance(value, int | str)}
    words = (
        "held-out loss against bf16, of adapters against bf16 with an adapter, %; after ± half of its 95 % interval, in brackets "
        "how many seeds; a size without an interval is not in the mean"
    )
    made = markdown({"environment": _of_most_runs(data), "benchmark": words, "settings": settings}, head, body)
    wanted = planned(data["evidence"])
    there = len(wanted & data["evidence"].keys())
    left = [f"Not finished: {there} of {len(wanted)} runs are there."] * (there < len(wanted))
    return "\n\n".join([made, *mixed(data, data["evidence"].values()), *_processors(data), *left])


def machine_of(data: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the versions and the machine with which a run was made: those of its call where that says another."""
    calls = data.get("calls", [])
    return {**data["environment"], **(calls[run["call"]] if calls else {})}


def _of_most_runs(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the machine on which most runs were made, with the date of the last."""
    machines = [machine_of(data, run) for run in data["evidence"].values()] or [data["environment"]]
    (name, _), *_ = Counter(map(_processor, machines)).most_common(1)
    last = max(str(machine["date"]) for machine in machines)
    return {**next(machine for machine in machines if _processor(machine) == name), "date": last}


def _processor(machine: Mapping[str, Any]) -> str:
    return ", ".join(str(machine[key]) for key in PROCESSOR if machine.get(key))


def _processors(data: Mapping[str, Any]) -> list[str]:
    """Return the line that says on which processors runs were made; none where it was one."""
    made = Counter(_processor(machine_of(data, run)) for run in data["evidence"].values())
    names = [f"{name} ({count})" for name, count in made.most_common()]
    return [f"Runs were made on {' and on '.join(names)}."] * (len(names) > 1)


def _mean(row: Mapping[str, Any]) -> str:
    half = "" if math.isnan(row["low"]) else f" ± {100 * (row['high'] - row['mean']):.2f}"
    return f"{_percent(row['mean'])}{half} ({row['pairs']})" + ", outside" * (row["verdict"] == "outside")


def _percent(share: float) -> str:
    return f"{100 * share:+.3f}"
