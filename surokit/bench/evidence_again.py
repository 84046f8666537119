"""Run some of the study of recipes again, and say which figures come out as its file says."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from surokit.bench import evidence
from surokit.bench.evidence_plan import (
    OF_TASKS,
    OF_TEXTS,
    SETTINGS,
    Run,
    baseline_of,
    baseline_runs,
    run_of,
)
from surokit.bench.evidence_table import gaps, machine_of, noise
from surokit.racing.reproduced import VERSIONS, Figure, Reproduction, differences_of, plain
from surokit.statistics import Interval, Noise, paired_gap, student_t, wilson_interval

FILE = "evidence.json"
AGAIN = "evidence, run again"  # what a file of runs that were made again calls itself


def reproduce(path: Path, folder: Path, minutes: float, only: str = "", workers: int = 2) -> Reproduction:
    """Run again what fits into so many minutes, and compare. The same folder goes on where an earlier call ended.

    path: the raw file, or the folder that holds it as evidence.json. only: what the names of runs have to contain; the runs that
    they are compared with, and those below adapters, are made too. Raises ValueError for a file of another study, or of other
    settings than the code's, for a folder with anything else in it, and where no run is chosen or none ended in time.
    """
    file = path / FILE if path.is_dir() else path
    then = _read(file)
    if then["settings"] != json.loads(json.dumps(SETTINGS)):
        raise ValueError(
            f"{file} was made with other settings than this version of surokit has: check out the commit that the file names."
        )
    if folder.exists() and any(folder.iterdir()) and not _is_again(folder / FILE):
        raise ValueError(f"{folder} has content already: give --run-dir another folder for what is run again.")
    chosen = chosen_runs(then["evidence"], only)
    if not chosen:
        names = next(iter(then["evidence"]), "")
        raise ValueError(f"No run has {only!r} in its name: the file's runs are named like {names!r}.")
    folder.mkdir(parents=True, exist_ok=True)

    def can_begin(done: Mapping[str, Any]) -> Iterable[Run]:
        return [run for run in chosen if all(each.key in done for each in (run.base, run.first_part) if each in chosen)]

    now = evidence.run(folder / FILE, folder, minutes, workers, can_begin, AGAIN)
    if not now["evidence"]:
        raise ValueError(f"No run ended in {minutes:g} minutes: give more with --minutes, and the same --run-dir.")
    return compare_studies(then, now)


def _read(file: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(data["settings"], dict) or not isinstance(data["environment"], dict):
            raise TypeError
        for run in data["evidence"].values():
            run_of(run), run["held_out"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"{file} is no raw file of the study: give what `python -m surokit.bench evidence` wrote, or the folder of a race."
        ) from None
    return data


def _is_again(file: Path) -> bool:
    return file.is_file() and json.loads(file.read_text(encoding="utf-8")).get("benchmark") == AGAIN


def chosen_runs(found: Mapping[str, Mapping[str, Any]], only: str) -> list[Run]:
    """Return the runs whose names contain `only`, each behind the run below it and the one it is compared with."""
    chosen: dict[Run, None] = {}
    for run in (run_of(found[key]) for key in found if only in key):
        beside = baseline_runs(found, run.kind, run.size, run.recipe, run.seed)
        baselines = [run_of(found[each.key]) for each in beside if each.key in found]
        chosen |= dict.fromkeys(each for each in (run.base, *baselines, run) if each)
    return list(chosen)


def compare_studies(then: Mapping[str, Any], now: Mapping[str, Any]) -> Reproduction:
    """Compare two raw files: each run's held-out loss to the bit, and gaps by intervals in all of which the means of as many new
    seeds lie in 95 of 100 studies (Student's t, from the noise between the seeds of then). Of a task it is the accuracy that is
    compared, by Wilson's intervals of the problems that were right then and now: its loss, near nothing once it is learnt, may be
    any."""
    both = {key: (then["evidence"][key], new) for key, new in now["evidence"].items() if key in then["evidence"]}
    figures: list[Figure] = []
    level = 1 - 0.05 / max(1, sum(new["kind"] in OF_TASKS for _, new in both.values()))
    for key, (old, new) in both.items():
        if new["kind"] in OF_TASKS:
            figures.append(Figure(f"{key}: right", accuracy(old, level), accuracy(new, level)))
        else:
            figures.append(
                Figure(f"{key}: held-out loss", plain(old["held_out"]), plain(new["held_out"]), is_loss=True)
            )
    made = {"evidence": {key: new for key, (_, new) in both.items()}, "rates": then["evidence"]}
    sizes = dict.fromkeys(new["size"] for _, new in both.values() if new["kind"] not in OF_TASKS)
    compared = {
        (kind, size, recipe): new
        for kind, recipes in OF_TEXTS.items()
        for size, recipe in itertools.product(sizes, recipes)
        if recipe != baseline_of(recipe) and (new := gaps(made, kind, size, recipe))
    }
    for (kind, size, recipe), found in compared.items():
        level = 1 - 0.05 / len(compared)
        wanted = expected(gaps(then, kind, size, recipe), noise(then, kind, size, recipe), len(found), level)
        figures.append(
            Figure(f"{kind} {size} {recipe}: gap, %", wanted.times(100), plain(100 * statistics.mean(found)))
        )
    machines = ((machine_of(then, old), machine_of(now, new)) for old, new in both.values())
    differences = [*dict.fromkeys(each for was, here in machines for each in differences_of(was, here, VERSIONS))]
    differences += [f"code of {key}" for key, (old, new) in both.items() if old.get("source") != new.get("source")]
    differences += [f"data of {key}" for key, (old, new) in both.items() if old.get("data") != new.get("data")]
    return Reproduction(tuple(figures), tuple(differences), "Versions, machine, code and data")


def accuracy(run: Mapping[str, Any], level: float) -> Interval:
    """Return the share of its task's problems that a run had right at the end, with an interval."""
    return wilson_interval(round(run["curve"][-1][-1] * evidence.PROBLEMS), evidence.PROBLEMS, level)


def expected(values: list[float], noise: Noise | None, count: int, level: float) -> Interval:
    """Return where the mean of `count` new seeds is expected after these; no interval where nothing says how much they vary."""
    gap = paired_gap(values, noises=[noise] if noise else None)
    if math.isnan(gap.spread):
        return plain(gap.mean)
    degrees = noise.degrees if noise else gap.pairs - 1
    half = student_t((1 + level) / 2, degrees) * gap.spread * math.sqrt(1 / gap.pairs + 1 / count)
    return Interval(gap.mean - half, gap.mean, gap.mean + half)
