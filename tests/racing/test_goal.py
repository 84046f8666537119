"""Races to a goal: judged after every round, and who has reached it rests."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import surokit as sk
from surokit.racing.goal import Goal
from tests.racing.conftest import batches
from tests.refusals import refused

TASK = sk.Copying(size=4)
HELD_OUT = batches(2, seed=1)


def test_a_run_that_has_reached_the_held_out_loss_rests(make, session):
    alone = session(sk.BF16)
    alone.run(12)
    level = alone.evaluate(HELD_OUT)
    race = make(
        {"bf16": sk.BF16, "fp4": sk.FP4.keep_last(0)},
        steps=40,
        schedule=sk.Cosine(2, 16),
        eval=HELD_OUT,
        until=level,
        turn_s=1e-6,
    )
    first = race.runs["bf16"]
    assert first.reached == 12
    assert len(first.steps) == first.reached
    assert first.goals[-1][1] <= level < min(value for _, value in first.goals[:-1])
    assert first.held_out == [(steps, value) for steps, value in first.goals]
    assert race.runs["bf16 again"].reached == first.reached
    row = race.outcome["bf16"]
    assert row.to_target is not None
    assert row.to_target[0] == first.reached
    assert row.to_target[2] == pytest.approx(first.warm_seconds().sum())
    assert race.reason == "done"


def test_what_is_not_reached_is_said(make):
    race = make(steps=16, eval=HELD_OUT, until=0.001, turn_s=1e-6)
    assert all(run.reached is None for run in race.runs.values())
    assert {len(run.steps) for run in race.runs.values()} == {16}
    assert race.outcome["fp8"].to_target is None
    assert race.outcome["fp8"].matched is None
    assert math.isnan(race.outcome.target)
    text = race.text()
    assert "The goal is a held-out loss of 0.001 or less, looked at every 2" in text
    lasts = ", ".join(f"{name} ({race.runs[name].goals[-1][1]:.4f} at last)" for name in ("bf16", "fp8", "bf16 again"))
    assert f"Not reached by {lasts}." in text
    assert "at the goal" in text
    assert text.count("not reached") == 3
    assert "at the goal" in race._repr_html_()


def test_a_race_that_is_run_again_is_judged_after_the_same_steps(make, model, tmp_path):
    race = make(steps=30, eval=HELD_OUT, until=0.001, run_dir=tmp_path / "race")
    steps = [step for step, _ in race.runs["bf16"].goals]
    assert race.settings["turn_steps"] >= 2
    loaded = sk.Race.load(tmp_path / "race")
    again = loaded.rerun(model=model, data=batches(), eval=HELD_OUT, live=False)
    assert [step for step, _ in again.runs["bf16"].goals] == steps
    assert again.runs["fp8"].goals == race.runs["fp8"].goals
    assert "sk.Race.load" in (text := (tmp_path / "race" / "rerun.py").read_text(encoding="utf-8"))
    assert "eval = ...\n" in text
    assert "data=data, eval=eval)" in text


def test_a_change_that_does_not_come_is_told(make):
    late = sk.FP8.then(sk.BF16, at=0.9)
    race = make({"bf16": sk.BF16, "late": late}, steps=30, eval=HELD_OUT, until=100.0, turn_steps=4)
    assert "'late' has not come to bf16: its recipe was to change later than in " in race.text()
    assert "has not come to" not in make({"bf16": sk.BF16, "late": late}, steps=12, turn_steps=4).text()


def fresh() -> sk.Decoder:
    torch.manual_seed(0)
    config = sk.DecoderConfig(layers=1, width=32, heads=2, kv_heads=1, vocab=TASK.vocab, ffn=64, max_length=TASK.length)
    return sk.Decoder(config, dtype=torch.bfloat16)


def on_task(**options: Any) -> sk.Race:
    given: dict[str, Any] = {"optimizer": sk.AdamW(lr=3e-3), "live": False, "predict": False, "turn_s": 1e-6, **options}
    return sk.race(["bf16", "fp8"], model=fresh(), data=TASK.batches(8), **given)


def test_an_accuracy_is_a_goal_and_a_folder_keeps_it(tmp_path: Path) -> None:
    goal = sk.Goal(1 / 64, TASK, problems=64)  # one right is enough
    race = on_task(steps=24, until=goal, run_dir=tmp_path / "race")
    run = race.runs["bf16"]
    session = race.bring("bf16")
    assert run.goals[-1][1] == TASK.grade(session.model, 64).accuracy
    assert race.goal == goal
    again = sk.Race.load(tmp_path / "race")
    assert again.goal == goal
    assert again.text() == race.text()
    assert [r.reached for r in again.runs.values()] == [r.reached for r in race.runs.values()]
    assert f"1.6% or more of {TASK} right" in race.text()
    assert race.outcome["bf16"].accuracy == run.goals[-1][1]
    assert race.table().accuracy["bf16"] == run.goals[-1][1]
    header, first = race.text().splitlines()[:2]
    assert f"{run.goals[-1][1]:.1%}".rjust(8) == first[header.index("accuracy") :][:8]
    rerun = again.rerun(model=fresh(), data=TASK.batches(8), live=False)
    assert [r.reached for r in rerun.runs.values()] == [r.reached for r in race.runs.values()]


def test_a_rerun_may_have_other_steps(tmp_path: Path) -> None:
    race = on_task(steps=12, until=sk.Goal(1.0, TASK, problems=64), run_dir=tmp_path / "race")
    rerun = race.rerun(model=fresh(), data=TASK.batches(8), steps=8, live=False)
    assert {len(run.steps) for run in rerun.runs.values()} == {8}


def test_who_has_reached_the_goal_takes_no_rounds_from_the_others() -> None:
    race = on_task(steps=28, until=sk.Goal(1.0, TASK, problems=64))
    race.runs["fp8"].turns[:] = race.runs["fp8"].turns[:2]  # as if it had been there after two rounds
    found = race.outcome
    assert found.rounds == len(race.runs["bf16 again"].turns)
    assert found["bf16 again"].ratio.known
    assert not found["fp8"].ratio.known


def test_a_picture_shows_where_the_goal_was_reached(make):
    loss = make(steps=8, eval=HELD_OUT, until=100.0, turn_s=1e-6)
    accuracy = on_task(steps=8, until=sk.Goal(1.0, TASK, problems=64))
    for run in accuracy.runs.values():
        run.reached = 6  # as if it had
    for race, height in ((loss, 100.0), (accuracy, None)):
        axes: Any = race.plot("steps").axes[0]
        assert axes.get_legend().get_texts()[-1].get_text() == "goal reached"
        marks = [line.get_xydata() for line in axes.get_lines() if line.get_marker() == "v" and len(line.get_xdata())]
        assert [mark[0][0] for mark in marks] == [race.runs[name].reached for name in ("bf16", "fp8")]
        assert all(math.isfinite(y) and (height is None or y == height) for ((_, y),) in marks)
        assert axes.get_ylim()[0] < min(mark[0][1] for mark in marks) < axes.get_ylim()[1]
    assert "goal 100.000" in [text.get_text() for text in loss.plot("steps").axes[0].texts]


def test_a_race_goes_on_to_its_goal(make):
    race = make(steps=8, eval=HELD_OUT, until=0.001, turn_s=1e-6)
    race.go_on(steps=4)
    assert race.runs["fp8"].goals[-1][0] == 12
    assert race.runs["fp8"].reached is None


def test_a_race_whose_runs_are_all_there_does_not_go_on(make):
    race = make(steps=8, eval=HELD_OUT, until=100.0, turn_s=1e-6)
    steps = {name: len(run.steps) for name, run in race.runs.items()}
    with refused(RuntimeError):
        race.go_on(steps=4)
    assert {name: len(run.steps) for name, run in race.runs.items()} == steps


def test_a_session_without_held_out_data_has_no_held_out_loss_to_reach(make, session):
    for entries in ({"a": session(), "b": session()}, {"bf16": sk.BF16, "a": session()}):
        with refused(ValueError):
            make(entries, until=3.0, **({"eval": HELD_OUT} if "bf16" in entries else {}))


def test_a_goal_that_is_none_is_refused(make):
    for wrong in (math.nan, math.inf, True):
        with refused(ValueError):
            make(eval=HELD_OUT, until=wrong)
    with refused(ValueError):
        make(until=3.0)
    with refused(ValueError):
        make(eval=HELD_OUT, until=3.0, target_loss=2.0)
    with refused(ValueError):
        Goal(1.5, TASK)
    with refused(ValueError):
        Goal(0.5, TASK, problems=10**6)
    with refused(TypeError):
        Goal(0.5, "addition")  # type: ignore[arg-type]


def test_a_task_that_is_not_made_of_plain_values_is_given_again():
    class Own(sk.Copying):
        pass

    goal = Goal(1 / 64, Own(size=4), problems=64)
    with refused(ValueError):
        Goal.from_dict(goal.to_dict())
    assert on_task(steps=12, until=goal).runs["bf16"].goals
