"""Run some of the study of recipes again, and say which figures come out as its file says."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from surokit.bench import evidence
from surokit.bench.evidence_plan import ALONE, FROM_SCRATCH, FROZEN, SETTINGS, Run, baseline_of
from surokit.bench.evidence_table import gaps
from surokit.racing.reproduced import Figure, Reproduction, differences_of, plain
from surokit.statistics import Interval, paired_gap, student_t

FILE = "evidence.json"


def reproduce(path: Path, folder: Path, minutes: float, only: str = "", workers: int = 2) -> Reproduction:
    """Run again what fits into so many minutes, and compare. The same folder goes on where an earlier call ended.

    path: the raw file, or the folder that holds it as evidence.json. only: what the names of runs have to contain; runs below them
    count too. Raises ValueError for a file of another study, or of other settings than the code's, and where no run is chosen.
    """
    file = path / FILE if path.is_dir() else path
    try:
        then = json.loads(file.read_text(encoding="utf-8"))
        settings, found = then["settings"], then["evidence"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{file} is no raw file of the study: give what `python -m surokit.bench evidence` wrote."
        ) from None
    if settings != json.loads(json.dumps(SETTINGS)):
        raise ValueError(
            f"{file} was made with other settings than this version of surokit has: check out commit "
            f"{then['environment'].get('commit')}."
        )
    if file.resolve() == (folder / FILE).resolve():
        raise ValueError(f"{folder} holds the study itself: give --run-dir another folder.")
    chosen = chosen_runs(found, only)
    if not chosen:
        raise ValueError(f"No run has {only!r} in its name: the file's runs are named like {next(iter(found), '')!r}.")

    def can_begin(done: Mapping[str, Any]) -> Iterable[Run]:
        return [run for run in chosen if run.base is None or run.base.key in done]

    folder.mkdir(parents=True, exist_ok=True)
    now = evidence.run(folder / FILE, folder, minutes, workers, can_begin)
    return compare_studies(then, now)


def chosen_runs(found: Mapping[str, Mapping[str, Any]], only: str) -> list[Run]:
    """Return the runs whose names contain `only`, each behind the run below it; sweeps last."""
    names = [field.name for field in fields(Run)]
    named = [Run(**{name: found[key][name] for name in names}) for key in found if only in key]
    ordered = sorted(named, key=lambda run: run.kind == "sweep")
    return list(dict.fromkeys(each for run in ordered for each in (run.base, run) if each))


def compare_studies(then: Mapping[str, Any], now: Mapping[str, Any]) -> Reproduction:
    """Compare two raw files: each run's held-out loss to the bit, and gaps by the interval in which the mean of as many new seeds
    lies in 95 of 100 studies (Student's t, from the spread between the seeds of then)."""
    both = [(key, then["evidence"][key], run) for key, run in now["evidence"].items() if key in then["evidence"]]
    figures = [
        Figure(f"{key}: held-out loss", plain(old["held_out"]), plain(new["held_out"]), is_loss=True)
        for key, old, new in both
    ]
    kinds = {"scratch": FROM_SCRATCH, "tuning": FROZEN, "alone": ALONE}
    sizes = {run["size"]: None for run in now["evidence"].values()}
    for kind, recipes in kinds.items():
        for size in sizes:
            for recipe in recipes:
                new = gaps(now, kind, size, recipe) if recipe != baseline_of(recipe) else []
                if new:
                    name = f"{kind} {size} {recipe}: gap, %"
                    old = gaps(then, kind, size, recipe)
                    figures.append(Figure(name, _expected(old, len(new)), plain(100 * statistics.mean(new))))
    others = [f"data of {key}" for key, old, new in both if old.get("data") not in (None, new["data"])]
    return Reproduction(tuple(figures), (*differences_of(then["environment"], now["environment"]), *others))


def _expected(values: list[float], count: int) -> Interval:
    """Return where the mean of `count` new seeds is expected, in percent; no interval from fewer than two."""
    gap = paired_gap(values)
    if gap.pairs < 2:
        return plain(100 * gap.mean)
    half = student_t(0.975, gap.pairs - 1) * gap.spread * math.sqrt(1 / gap.pairs + 1 / count)
    return Interval(100 * (gap.mean - half), 100 * gap.mean, 100 * (gap.mean + half))
