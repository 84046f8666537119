"""The study of losses: which runs it takes in which order, that a run goes on where a call ended, and what its table says."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import surokit as sk
from surokit import cli
from surokit.bench import evidence, evidence_again, evidence_picture, evidence_plan, evidence_table
from surokit.bench.evidence_plan import SWITCHED, Run
from surokit.bench.result import MEASUREMENTS
from surokit.statistics import Noise, student_t
from tests.refusals import refused
from tests.train.toys import make_batches

TINY = evidence_plan.Size("1M", 2, 32, 2, 48)
FOREVER_S = 1e12


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A study of tiny runs on numbers."""
    monkeypatch.setattr(evidence_plan, "SIZES", {"1M": TINY})
    monkeypatch.setattr(evidence_plan, "RATES", {"1M": (3e-3,)})
    monkeypatch.setattr(evidence_plan, "STEPS", 16)
    monkeypatch.setattr(evidence_plan, "TUNING_STEPS", 4)
    monkeypatch.setattr(evidence, "WARMUP", 2)
    monkeypatch.setattr(evidence, "POINTS", 4)
    monkeypatch.setattr(evidence, "CHUNK", 3)
    monkeypatch.setattr(evidence, "PROBLEMS", 32)
    monkeypatch.setattr(evidence_plan, "TASK_STEPS", 8)
    monkeypatch.setattr(evidence_plan, "RETAUGHT_STEPS", 4)
    monkeypatch.setattr(evidence_plan, "OF_A_TASK", TINY)
    monkeypatch.setattr(evidence, "texts_of", texts_of)


_texts_of = evidence.texts_of


def texts_of(run: Run) -> tuple[Any, list[Any]]:
    if run.kind in evidence_plan.OF_TASKS:
        return _texts_of(run)
    held_out = [make_batches(2, seed=90 + i) for i in range(1 if run.kind == "tuning" else 2)]
    return make_batches(16, seed=run.seed), held_out


def found_for(runs: list[Run], loss: float = 3.0) -> dict[str, dict[str, Any]]:
    return {run.key: {"kind": run.kind, "held_out": loss + run.lr, "curve": [[8, loss + run.lr]]} for run in runs}


def test_rates_are_tried_before_the_seeds_of_a_size_and_chosen_by_what_came_out() -> None:
    first = list(evidence_plan.runs({}))
    assert {run.kind for run in first} == {"scratch", "task"}
    assert {run.recipe for run in first if run.kind == "scratch"} == set(evidence_plan.SWEPT)
    assert len({run.key for run in first}) == len(first)
    found = found_for([run for run in first if run.kind == "scratch"])
    then = [run for run in evidence_plan.runs(found) if run.key not in found]
    assert {run.kind for run in then} == {"scratch", "alone", "task", "tuning"}
    of_texts = [run for run in then if run.kind in ("scratch", "alone")]
    assert all(run.lr == min(evidence_plan.RATES[run.size]) for run in of_texts)
    assert {run.seed for run in of_texts if run.recipe == SWITCHED} == {0}  # it goes on from fp4
    assert {run.seed for run in then if run.kind == "tuning"} == {0}  # nothing is tuned before its base is there
    found |= found_for(then)
    rest = [run for run in evidence_plan.runs(found) if run.key not in found]
    assert {run.recipe for run in rest} == {SWITCHED, *evidence_plan.FROZEN}
    assert all(run.base is None or run.base.key in found for run in rest)
    whole = found | found_for(rest)
    assert all(run.key in whole for run in evidence_plan.runs(whole))
    seeds = {
        size: {r.seed for r in evidence_plan.runs(whole) if (r.kind, r.size) == ("scratch", size)}
        for size in evidence_plan.SIZES
    }
    assert seeds == {size: set(range(count)) for size, count in evidence_plan.SEEDS.items()}
    order = [(run.kind, run.size, run.recipe) for run in evidence_plan.runs(whole)]
    assert order.index(("scratch", "3M", "bf16")) > order.index(
        ("tuning", "1M", "qfp8")
    )  # the file says something early
    assert evidence_plan.planned(whole) == set(whole)
    for recipe, size, count in (("quartet-ii", "1M", 3), ("fp4", "1M", 8), ("mxfp8", "1M", 12), ("fp4", "3M", 4)):
        of = {
            run.seed
            for run in evidence_plan.runs(whole)
            if (run.kind, run.size, run.recipe) == ("scratch", size, recipe)
        }
        assert of == set(range(count))


def test_the_best_rate_is_that_of_the_lowest_loss_of_bf16_or_of_fp4() -> None:
    tried = evidence_plan.sweep("1M", ["fp4"])
    found = found_for(tried)
    assert evidence_plan.best_rate(found, "1M", "fp4") == tried[0].lr
    found[tried[2].key]["held_out"] = found[tried[1].key]["held_out"] = 2.0
    found[tried[1].key]["held_out"] *= 1 + 0.9 * evidence_plan.ALIKE  # as good, and lower
    for recipe in ("fp4", SWITCHED, "quartet-ii", "fp4 in mlp"):
        assert evidence_plan.best_rate(found, "1M", recipe) == tried[1].lr
    assert evidence_plan.best_rate(found, "1M", "fp8-current") is None  # bf16's are not over
    found |= found_for(evidence_plan.sweep("1M", ["bf16"]))
    assert evidence_plan.best_rate(found, "1M", "fp8-current") == min(evidence_plan.RATES["1M"])
    del found[tried[0].key]
    assert evidence_plan.best_rate(found, "1M", "fp4") is None


def test_texts_weigh_as_much_as_they_are_trained_on() -> None:
    run = {"kind": "scratch", "curve": [[8, 1.0, 4.0]]}
    assert evidence_plan.loss_at(run) == pytest.approx(0.82 * 1.0 + 0.18 * 4.0)
    assert evidence_plan.loss_at(run, text="Moby-Dick") == 4.0
    assert evidence_plan.loss_at({"kind": "task", "curve": [[8, 1.0, 0.5]]}) == 1.0
    assert sum(evidence_plan.SHARES.values()) == 1


@pytest.mark.parametrize("name", [*evidence_plan.FROM_SCRATCH, *evidence_plan.FROZEN, *evidence_plan.ALONE])
def test_every_recipe_of_the_study_is_one(name: str) -> None:
    recipe = evidence_plan.recipe_of(name)
    assert isinstance(recipe, sk.Recipe)
    if name == "fp4 in mlp":
        assert [
            recipe.kept_by(f"model.layers.0.{part}", 20) is None for part in ("self_attn.q_proj", "mlp.up_proj")
        ] == [
            False,
            True,
        ]
    if name == "fp4(forward=bf16, grad_weight=bf16)":
        assert [gemm.quantized for gemm in recipe.gemms] == [False, True, False]


def test_a_run_goes_on_where_a_call_ended(small: None, tmp_path: Path) -> None:
    run = Run("scratch", "1M", "fp4", 0, 3e-3)
    whole = evidence.train(run, tmp_path / "whole", FOREVER_S)
    assert whole is not None
    assert [row[0] for row in whole["curve"]] == [4, 8, 12, 16]
    assert whole["held_out"] == evidence_plan.loss_at(whole)
    calls = (evidence.train(run, tmp_path / "parts", 0.0) for _ in itertools.count())
    ended = [found for found in itertools.islice(calls, 20) if found is not None]
    assert ended[0]["curve"] == whole["curve"]


def test_the_recipe_that_changes_goes_on_from_its_first_part(small: None, tmp_path: Path) -> None:
    first, changing = Run("scratch", "1M", "fp4", 0, 3e-3), Run("scratch", "1M", SWITCHED, 0, 3e-3)
    assert first.forks_at == 13
    assert changing.forks_at == 0
    stayed = evidence.train(first, tmp_path / "shared", FOREVER_S)
    assert evidence.checkpoint_in(tmp_path / "shared" / changing.folder)
    shared = evidence.train(changing, tmp_path / "shared", FOREVER_S)
    alone = evidence.train(changing, tmp_path / "alone", FOREVER_S)
    assert stayed is not None
    assert shared is not None
    assert alone is not None
    assert shared["curve"] == alone["curve"][-1:]
    assert [row[0] for row in alone["curve"]] == [row[0] for row in stayed["curve"]]
    assert alone["curve"][-1] != stayed["curve"][-1]  # the change is one


def test_the_control_differs_in_its_draws_alone(small: None, tmp_path: Path) -> None:
    one, again = (
        evidence.train(Run("scratch", "1M", recipe, 0, 3e-3), tmp_path, FOREVER_S)
        for recipe in ("bf16", evidence_plan.CONTROL)
    )
    assert one is not None
    assert again is not None
    assert one["data"] == again["data"]
    assert one["curve"] != again["curve"]
    assert again["held_out"] == pytest.approx(one["held_out"], rel=0.02)


def test_an_adapter_is_tuned_over_the_run_of_its_seed(small: None, tmp_path: Path) -> None:
    evidence.train(Run("scratch", "1M", "bf16", 0, 3e-3), tmp_path, FOREVER_S)
    found = evidence.train(Run("tuning", "1M", "qnf4", 0, 1e-3, base_lr=3e-3), tmp_path, FOREVER_S)
    assert found is not None
    assert [row[0] for row in found["curve"]] == [1, 2, 3, 4]
    assert len(found["curve"][0]) == 2


def test_a_task_is_learnt_and_another_after_it(small: None, tmp_path: Path) -> None:
    first = evidence.train(Run("task", "addition", "bf16", 0, 3e-3), tmp_path, FOREVER_S)
    assert first is not None
    assert [row[0] for row in first["curve"]] == [2, 4, 6, 8]
    assert first["held_out"] == first["curve"][-1][1]
    assert 0 <= first["curve"][-1][2] <= 1
    run = Run("retaught", evidence_plan.RETAUGHT, "qfp8", 0, 3e-3, base_lr=3e-3)
    over = evidence.train(run, tmp_path, FOREVER_S)
    assert over is not None
    assert over["parameters"] > first["parameters"]


def test_the_table_of_tasks_tells_accuracies_and_steps() -> None:
    def curve(*accuracies: float) -> dict[str, Any]:
        return {"kind": "task", "curve": [[100 * (i + 1), 1.0, value] for i, value in enumerate(accuracies)]}

    runs = {Run("task", "recall", "bf16", seed, 0.0).key: curve(0.5, 0.92, 1.0) for seed in range(3)}
    runs |= {Run("task", "recall", "fp4", seed, 0.0).key: curve(0.3, 0.5, 0.9 - 0.01 * seed) for seed in range(3)}
    data = {"evidence": runs, "settings": {}, "environment": {"device": "cuda", "torch": "2", "date": "now"}}
    rows = {row["recipe"]: row for row in evidence_table.task_rows(data)}
    assert rows["bf16"]["gap"] is None
    assert rows["bf16"]["steps"] == 200
    assert rows["fp4"]["gap"].mean == pytest.approx(-0.11)
    assert (rows["fp4"]["steps"], rows["fp4"]["reached"], rows["fp4"]["seeds"]) == (300, 1, 3)
    assert "| from scratch | recall | `fp4` | 89.0% | -11.0 points |" in evidence_table.table(data)


def result_of(gaps: dict[str, list[float]]) -> dict[str, Any]:
    """A raw file of four seeds of 1M, at the first rate; the others that were tried came out worse."""
    runs = {}
    lr, *others = evidence_plan.RATES["1M"]
    for seed in range(4):
        base = 3.0 + 0.1 * seed
        for recipe, values in {"bf16": [0.0] * 4, "fp4": [0.0] * 4, **gaps}.items():
            loss = base * (1 + values[seed])
            run = Run("scratch", "1M", recipe, seed, lr)
            curve = [[1000, base + 0.5, base + 0.5], [2000, loss, loss]]
            runs[run.key] = {**asdict(run), "curve": curve, "held_out": loss}
    for recipe in evidence_plan.SWEPT:
        for rate in others:
            run = Run("scratch", "1M", recipe, 0, rate)
            runs[run.key] = {**asdict(run), "curve": [[1000, 9.5, 9.5], [2000, 9.0, 9.0]], "held_out": 9.0}
    return {
        "evidence": runs,
        "settings": evidence_plan.SETTINGS,
        "environment": {"device": "cuda", "torch": "2", "date": "now"},
    }


def at_size(data: dict[str, Any], size: str) -> dict[str, Any]:
    """The same runs as those of another size."""
    rate = f"lr {evidence_plan.RATES['1M'][0]:g}"
    mine = {key: run for key, run in data["evidence"].items() if key.endswith(rate)}
    runs = {}
    for lr in evidence_plan.RATES[size]:
        for run in mine.values():
            if lr == evidence_plan.RATES[size][0] or run["seed"] == 0:
                moved = Run("scratch", size, run["recipe"], run["seed"], lr)
                worse = 0.0 if lr == evidence_plan.RATES[size][0] else 1.0
                runs[moved.key] = {**run, **asdict(moved), "held_out": run["held_out"] + worse}
    return runs


def test_the_table_judges_paired_gaps_by_their_gates() -> None:
    data = result_of(
        {
            "fp8-current": [0.001, 0.0012, 0.0008, 0.001],
            "fp4": [0.02, 0.021, 0.019, 0.02],
            "mxfp8": [0.002, 0.0022, 0.0018, 0.0022],
            "quartet-ii": [-0.011, -0.012, -0.011, -0.012],
        }
    )
    rows = {row["recipe"]: row for row in evidence_table.rows(data)}
    assert rows["fp8-current"]["mean"] == pytest.approx(0.001)
    names = ("fp8-current", "fp4", "mxfp8", "quartet-ii")
    assert [rows[name]["verdict"] for name in names] == ["inside", "outside", "undecided", "better"]
    assert rows["mxfp8"]["p"] < rows["fp8-current"]["p"] < 0.05
    assert evidence_table.gaps(data, "scratch", "1M", "fp4", step=1000) == [0.0] * 4
    on_stories = evidence_table.gaps(data, "scratch", "1M", "fp4", text=evidence_plan.TEXTS[0])
    assert on_stories == pytest.approx([0.02, 0.021, 0.019, 0.02])
    text = evidence_table.table(data)
    assert f"Not finished: 23 of {len(evidence_plan.planned(data['evidence']))} runs are there." in text
    half = 100 * (rows["fp4"]["high"] - rows["fp4"]["mean"])
    assert f"| from scratch | `fp4` | +2.000 ± {half:.2f} (4), outside |" in text
    one = {key: run for key, run in data["evidence"].items() if "seed 0" in key}
    alone = {row["recipe"]: row for row in evidence_table.rows({**data, "evidence": one})}["fp4"]
    assert math.isnan(alone["low"])
    assert alone["verdict"] == "undecided"


def test_a_gap_is_to_the_mean_of_bf16_and_its_twin() -> None:
    fp4, twin = [0.01, 0.02, 0.0, 0.01], [0.002, -0.004, 0.0, 0.002]
    assert evidence_table.gaps(result_of({"fp4": fp4}), "scratch", "1M", "fp4") == pytest.approx(fp4)
    both = result_of({"fp4": fp4, evidence_plan.CONTROL: twin})
    to_the_mean = [(1 + mine) / (1 + other / 2) - 1 for mine, other in zip(fp4, twin, strict=True)]
    assert evidence_table.gaps(both, "scratch", "1M", "fp4") == pytest.approx(to_the_mean)
    assert evidence_table.gaps(both, "scratch", "1M", evidence_plan.CONTROL) == pytest.approx(twin)


def test_all_runs_of_a_size_say_how_much_a_gap_varies() -> None:
    """Not those that share steps with another; and a gap to two runs varies less than a gap to one."""
    gaps = {"fp4": [0.01, 0.011, 0.01, 0.011], "fp8-current": [0.0, -0.001, 0.001, 0.0]}
    few = evidence_table.noise(result_of(gaps), "scratch", "1M", "fp4")
    switched = evidence_table.noise(
        result_of(gaps | {evidence_plan.SWITCHED: [0.0, 0.1, -0.1, 0.05]}), "scratch", "1M", evidence_plan.SWITCHED
    )
    assert few is not None
    assert few == switched
    assert few.degrees == (4 - 1) * (3 - 1)
    twins = evidence_table.noise(result_of(gaps | {evidence_plan.CONTROL: [0.0] * 4}), "scratch", "1M", "fp4")
    assert twins is not None
    assert twins.degrees == few.degrees + 4
    assert twins.variance < few.variance
    assert evidence_table.noise(result_of(gaps), "tuning", "1M", "qfp8") is None


def test_one_of_three_sizes_is_outside_by_chance_more_easily_than_one() -> None:
    just = result_of({"fp8-current": [0.0041, 0.0026, 0.0041, 0.0028]})

    def verdicts(runs: dict[str, Any]) -> dict[str, str]:
        rows = evidence_table.rows({**just, "evidence": runs})
        return {row["size"]: row["verdict"] for row in rows if row["recipe"] == "fp8-current"}

    assert verdicts(just["evidence"]) == {"1M": "outside"}
    both = just["evidence"] | at_size(result_of({"fp8-current": [0.0] * 4}), "3M")
    assert verdicts(both) == {"1M": "undecided", "3M": "inside", evidence_table.ALL: "inside"}


def test_two_recipes_are_compared_with_each_other() -> None:
    data = result_of({"fp4": [0.01, 0.02, 0.0, 0.01], evidence_plan.SWITCHED: [0.0, 0.01, 0.0, 0.0]})
    found = evidence_table.beside(data, "scratch", "1M", evidence_plan.SWITCHED, "fp4")
    assert found == pytest.approx([1 / 1.01 - 1, 1.01 / 1.02 - 1, 0.0, 1 / 1.01 - 1])
    assert evidence_table.beside(data, "scratch", "3M", evidence_plan.SWITCHED, "fp4") == []


def test_the_plan_says_how_many_seeds_a_gate_takes(tmp_path: Path) -> None:
    earlier, pilot = MEASUREMENTS / "recipes.json", MEASUREMENTS / "evidence-pilot.json"
    data = evidence_plan.write_plan(earlier, pilot, tmp_path / "plan.json")
    wanted = {row["recipe"]: row["seeds"] for row in data["wanted"]}
    assert wanted["fp8-current"]["spread x 0.5"] < wanted["fp8-current"]["spread x 1"]
    assert wanted["fp4"]["spread x 1"] <= evidence_plan.SEEDS_OF["fp4"]
    assert wanted["qnf4"]["spread x 1"] == 2


def test_all_sizes_together_are_judged_where_each_has_a_spread() -> None:
    data = result_of({"fp4": [0.004, 0.006, 0.005, 0.005]})
    larger = {key: run for key, run in at_size(data, "3M").items() if "seed 0" in key}
    rows = evidence_table.rows({**data, "evidence": data["evidence"] | larger})
    found = {row["size"]: row for row in rows}
    assert math.isnan(found["3M"]["low"])
    assert found[evidence_table.ALL]["mean"] == found["1M"]["mean"]  # one seed of a size says nothing of its spread
    assert found[evidence_table.ALL]["verdict"] == "inside"


def test_the_mean_of_sizes_is_no_better_than_the_worst_size() -> None:
    data = result_of({"fp8-current": [0.0001, 0.0002, 0.0001, 0.0002]})
    worse = result_of({"fp8-current": [0.004, 0.0041, 0.0042, 0.004]})
    both = data["evidence"] | at_size(worse, "8M")
    found = evidence_table.rows({**data, "evidence": both})
    rows = {row["size"]: row for row in found if row["recipe"] == "fp8-current"}
    assert rows[evidence_table.ALL]["high"] < evidence_plan.GATES["fp8-current"]
    verdicts = [rows[size]["verdict"] for size in ("1M", "8M", evidence_table.ALL)]
    assert verdicts == ["inside", "outside", "outside"]
    assert "(4), outside |" in evidence_table.table({**data, "evidence": both})


def test_pictures_show_seeds_gates_and_growth(tmp_path: Path) -> None:
    data = result_of({"fp8-current": [0.001, 0.0012, 0.0008, 0.001], "fp4": [0.02, 0.021, 0.019, 0.02]})
    picture = evidence_picture.all_gaps(data)
    assert hasattr(picture, "number")  # pyplot has made it, and so a notebook shows it
    axes = picture.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["fp8-current", "fp4"]
    lines = {line.get_label(): line.get_xydata() for line in evidence_picture.growth(data).axes[0].get_lines()}
    assert np.asarray(lines["fp4"]) == pytest.approx(np.array([[1.024, 0.0], [2.048, 2.0]]))
    data["evidence"].pop("scratch 1M bf16 seed 0 lr 0.002")  # one of the rates that were to be tried
    for draw in (evidence_picture.all_gaps, evidence_picture.growth):
        with refused(ValueError):
            draw(data)


def test_pictures_carry_what_they_show(tmp_path: Path) -> None:
    data = result_of({"fp4": [0.02, 0.021, 0.019, 0.02]})
    for name in ("evidence.png", "growth.png"):
        evidence.draw(data, tmp_path / name)
        assert evidence.digest(data).encode() in (tmp_path / name).read_bytes()


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in this process, which knows the small sizes."""
    monkeypatch.setattr(evidence, "ProcessPoolExecutor", lambda workers, mp_context: ThreadPoolExecutor(1))


def test_a_model_whose_checkpoint_was_lost_is_trained_again_for_its_adapters(
    small: None, in_threads: None, tmp_path: Path
) -> None:
    base = Run("scratch", "1M", "bf16", 0, 3e-3)
    tuned = [Run("tuning", "1M", recipe, 0, 1e-3, base_lr=3e-3) for recipe in ("qfp8", "qfp4")]
    file = tmp_path / "evidence.json"
    evidence.run(file, tmp_path / "runs", 10, 1, lambda found: [base])
    before = json.loads(file.read_text())
    data = evidence.run(file, tmp_path / "elsewhere", 10, 1, lambda found: tuned)
    assert list(data["evidence"]) == [run.key for run in (base, *tuned)]
    assert data["evidence"][base.key] == before["evidence"][base.key]
    assert [call["cpu"] for call in data["calls"]] == [data["environment"]["cpu"]] * 2


def test_adapters_wait_for_the_end_of_a_base_that_is_trained_again(
    small: None, in_threads: None, tmp_path: Path
) -> None:
    base = Run("scratch", "1M", "bf16", 0, 3e-3)
    first, second = (Run("tuning", "1M", recipe, 0, 1e-3, base_lr=3e-3) for recipe in ("qfp8", "qfp4"))
    file = tmp_path / "evidence.json"
    evidence.run(file, tmp_path / "runs", 10, 1, lambda found: [base, *([first] if base.key in found else [])])
    assert evidence.train(base, tmp_path / "elsewhere", 0.0) is None  # a few of its steps
    whole = evidence.run(file, tmp_path / "elsewhere", 10, 1, lambda found: [base, first, second])
    assert list(whole["evidence"]) == [base.key, first.key, second.key]
    alone = evidence.train(second, tmp_path / "runs", FOREVER_S)
    assert alone is not None
    assert whole["evidence"][second.key]["curve"] == alone["curve"]

    was = json.loads(file.read_text())
    was["evidence"][base.key]["held_out"] += 1e-3  # as of another processor
    del was["evidence"][second.key]
    file.write_text(json.dumps(was))
    data = evidence.run(file, tmp_path / "third", 10, 1, lambda found: [base, first, second])
    calls = {key: run["call"] for key, run in data["evidence"].items()}
    assert calls == {base.key: 0, first.key: 2, second.key: 2}  # both adapters are over the new base


def test_the_table_names_the_processors_of_its_runs() -> None:
    data = result_of({"fp4": [0.01, 0.02, 0.0, 0.01]})
    for i, run in enumerate(data["evidence"].values()):
        run["call"] = i % 2
    calls = [{}, {"cpu": "Other", "cpu_vectors": "AVX512", "cpu_bf16": None}, {"cpu": "Third"}]
    data |= {
        "environment": {**data["environment"], "cpu": "One", "cpu_vectors": "AVX2", "cpu_bf16": None},
        "calls": calls,
    }
    assert "Runs were made on One, AVX2 (6) and on Other, AVX512 (6)." in evidence_table.table(data)
    for run in data["evidence"].values():
        run["call"] = 0
    assert "Runs were made" not in evidence_table.table(data)


def test_some_runs_of_a_study_are_run_again_and_compared(small: None, in_threads: None, tmp_path: Path) -> None:
    wanted = [Run("scratch", "1M", recipe, seed, 3e-3) for seed in range(2) for recipe in ("bf16", "fp8-current")]
    tuned = Run("tuning", "1M", "qfp8", 0, 1e-3, base_lr=3e-3)

    def can_begin(found: Mapping[str, Any]) -> list[Run]:
        return [*wanted, *([tuned] if wanted[0].key in found else [])]

    file = tmp_path / "evidence.json"
    evidence.run(file, tmp_path / "runs", 10, 1, can_begin)
    with refused(ValueError):  # whose checkpoints would be resumed at their end, and come out as they are
        evidence_again.reproduce(file, tmp_path / "runs", 10, "fp8 seed 0", 1)
    found = evidence_again.reproduce(file, tmp_path / "again", 10, "fp8 seed 0", 1)
    assert [figure.name for figure in found.figures] == [f"{run.key}: held-out loss" for run in (wanted[0], tuned)]
    assert "code" in str(found)
    assert found.holds
    assert found.is_exact
    both = evidence_again.reproduce(tmp_path, tmp_path / "again", 10, "scratch", 1)  # goes on
    gap = both.figures[-1]
    assert gap.name == "scratch 1M fp8-current: gap, %"
    assert gap.verdict == "inside"
    changed = json.loads(file.read_text())
    changed["evidence"][wanted[1].key]["curve"][-1][1] *= 1.2
    changed["evidence"][wanted[1].key] |= {"held_out": 9.0, "data": "other"}
    file.write_text(json.dumps(changed))
    differs = evidence_again.reproduce(file, tmp_path / "again", 10, "scratch", 1)
    assert not differs.holds
    assert f"data of {wanted[1].key}" in differs.differences


@pytest.mark.parametrize(
    ("change", "only", "said"),
    [
        ({"settings": {}}, "", "other settings"),
        ({"evidence": None}, "", "no raw file"),
        ({"evidence": [1]}, "", "no raw file"),
        ({}, "nothing", "nothing"),
        ({}, "", "content already"),
    ],
)
def test_a_file_that_cannot_be_run_again_is_refused(
    change: dict[str, Any], only: str, said: str, tmp_path: Path
) -> None:
    data = {key: value for key, value in (result_of({}) | change).items() if value is not None}
    file = tmp_path / "evidence.json"
    file.write_text(json.dumps(data))
    with refused(ValueError) as refusal:
        evidence_again.reproduce(file, tmp_path if "content" in said else tmp_path / "again", 1, only)
    assert said in str(refusal.value)


def test_runs_come_behind_those_below_and_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence_plan, "RATES", {"1M": (8e-3,)})
    keys = {"held_out": 1.0, "curve": []}
    runs = [
        Run("tuning", "1M", "qfp8", 0, 1e-3, 8e-3),
        Run("tuning", "1M", "bf16+lora", 0, 1e-3, 8e-3),
        Run("scratch", "1M", "bf16", 0, 8e-3),
        Run("alone", "1M", "fp4 in mlp", 0, 8e-3),
    ]
    found = {run.key: {**asdict(run), **keys} for run in runs}
    assert [run.recipe for run in evidence_again.chosen_runs(found, "qfp8")] == ["bf16", "bf16+lora", "qfp8"]
    assert [run.recipe for run in evidence_again.chosen_runs(found, "alone")] == ["bf16", "fp4 in mlp"]
    assert Run("scratch", "1M", SWITCHED, 0, 8e-3).first_part == Run("scratch", "1M", "fp4", 0, 8e-3)


def test_some_recipes_of_a_study_are_compared_at_its_rates_beside_tasks() -> None:
    """What was run again lacks the sweep, by which a rate would be chosen."""
    then = result_of({"fp8-current": [0.001, 0.0012, 0.0008, 0.001], evidence_plan.CONTROL: [0.0, 0.001, 0.0, -0.001]})
    task = Run("task", "addition", "fp8-current", 0, evidence_plan.TASK_RATE)
    then["evidence"][task.key] = {**asdict(task), "held_out": 0.1, "curve": [[1600, 0.1, 0.9]]}
    rate = evidence_plan.best_rate(then["evidence"], "1M", "bf16")
    again = {key: run for key, run in then["evidence"].items() if key == task.key or run["lr"] == rate}
    found = evidence_again.compare_studies(then, {**then, "evidence": again})
    verdicts = {figure.name: figure.verdict for figure in found.figures}
    assert verdicts["scratch 1M fp8-current: gap, %"] == "inside"
    assert verdicts["scratch 1M bf16 again: gap, %"] == "inside"
    assert found.holds


def test_of_a_task_that_is_run_again_the_accuracy_is_compared() -> None:
    """The loss of a task that was learnt is nearly nothing, and may be many times as large elsewhere."""
    runs = [Run("task", "recall", "bf16", seed, evidence_plan.TASK_RATE) for seed in range(3)]
    then = result_of({})
    then["evidence"] = {run.key: {**asdict(run), "held_out": 3e-7, "curve": [[9, 3e-7, 0.9]]} for run in runs}

    def again(*accuracies: float) -> dict[str, str]:
        made = {
            run.key: {**asdict(run), "held_out": 6e-8, "curve": [[9, 6e-8, share]]}
            for run, share in zip(runs, accuracies, strict=True)
        }
        found = evidence_again.compare_studies(then, {**then, "evidence": made})
        assert found.holds == ("outside" not in {figure.verdict for figure in found.figures})
        return {figure.name: figure.verdict for figure in found.figures}

    first, second, third = (f"{run.key}: right" for run in runs)
    assert again(0.9, 0.91, 0.88) == dict.fromkeys((first, second, third), "inside")
    assert again(0.9, 0.86, 0.8) == {first: "inside", second: "agrees", third: "outside"}


def test_a_run_is_compared_with_the_machine_of_its_call() -> None:
    then = result_of({"fp4": [0.01, 0.02, 0.0, 0.01]})
    for run in then["evidence"].values():
        run["call"] = 1
    then |= {"calls": [{}, {"cpu": "Other"}], "environment": {**then["environment"], "cpu": "One"}}
    now = {**then, "calls": [{}, {}], "environment": {**then["environment"], "cpu": "Other"}}
    assert evidence_again.compare_studies(then, now).differences == ()
    assert "cpu" in evidence_again.compare_studies(then, {**now, "calls": [{}, {"cpu": "Third"}]}).differences[0]


def test_the_twin_of_a_baseline_is_run_again_too() -> None:
    found = result_of({"fp8-current": [0.0] * 4, evidence_plan.CONTROL: [0.0] * 4})["evidence"]
    chosen = evidence_again.chosen_runs(found, "fp8-current seed 1")
    assert [run.recipe for run in chosen] == ["bf16", evidence_plan.CONTROL, "fp8-current"]


def test_the_mean_of_new_seeds_is_expected_where_it_comes_out() -> None:
    draws, held = np.random.default_rng(0), 0
    for _ in range(1000):
        values = draws.standard_normal(6)
        held += evidence_again.expected(values[:4].tolist(), None, 2, 0.95).holds(values[4:].mean())
    assert held / 1000 == pytest.approx(0.95, abs=0.02)
    assert not evidence_again.expected([0.1, 0.11, 0.09, 0.1], None, 2, 0.95).holds(0.2)
    assert not evidence_again.expected([0.1], None, 2, 0.95).known
    known = evidence_again.expected([0.1], Noise(0.01**2, 8), 2, 0.95)
    assert known.high - 0.1 == pytest.approx(student_t(0.975, 8) * 0.01 * 1.5**0.5)


def test_a_study_is_reproduced_from_the_command_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = result_of({"fp4": [0.02, 0.021, 0.019, 0.02]})
    (tmp_path / "evidence.json").write_text(json.dumps(data))
    asked: list[tuple[Any, ...]] = []

    def run(*arguments: Any) -> dict[str, Any]:
        asked.append(arguments)
        return data

    monkeypatch.setattr(evidence, "run", run)
    assert (
        cli.main(["reproduce", str(tmp_path), "--minutes", "3", "--only", "fp4", "--run-dir", str(tmp_path / "again")])
        == 0
    )
    assert asked[0][2] == 3.0
    told = capsys.readouterr().out
    assert "scratch 1M fp4: gap, %" in told
    assert "Versions, machine, code and data are those of then." in told
    assert cli.main(["reproduce", str(tmp_path / "nowhere"), "--only", "fp4"]) == 2
    assert "choose from a study" in capsys.readouterr().err


def test_the_table_of_a_finished_study_says_nothing_of_what_is_left() -> None:
    runs: dict[str, dict[str, Any]] = {}
    while left := [run for run in evidence_plan.runs(runs) if run.key not in runs]:
        for run in left:
            measured = {"tuning": [3.0], "task": [3.0, 0.5], "retaught": [3.0, 0.5]}.get(run.kind, [3.0, 3.0])
            curve = [[run.steps, *measured]]
            runs[run.key] = {**asdict(run), "curve": curve, "held_out": 3.0}
    text = evidence_table.table({**result_of({}), "evidence": runs})
    assert "Not finished" not in text
    assert text.count("| from scratch |") == len(evidence_plan.FROM_SCRATCH) - 1 + 3 * len(evidence_plan.ABLE)
