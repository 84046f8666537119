"""Figures of races that never were, with numbers that can be worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import surokit as sk
from surokit.racing.outcome import outcome
from surokit.racing.predicted import Layers, Shares, predict
from surokit.racing.runs import COLUMNS, Prediction, Run, Steps, Turn, WarmUp, read_steps, rounds_of, write_steps
from surokit.units import elapsed
from tests.refusals import refused
from tests.test_experts import made as mixture


def made(name, step_s, losses, noise=(), warm_up=4, size=4, tokens=10, idle=0.25):
    """A run with steps of `step_s`, but for each turn's factor in `noise`, whose first steps are a warm-up."""
    count = len(losses)
    columns: dict[str, Any] = {c: [math.nan] * count for c in COLUMNS}
    columns |= {"step": range(1, count + 1), "loss": losses, "tokens": [tokens] * count, "idle_frac": [idle] * count}
    columns["wall_ms"] = [1e3 * step_s] * count
    turns = []
    for i, last in enumerate(range(warm_up + size, count + 1, size)):
        seconds = (size - 1) * step_s * (noise[i % len(noise)] if noise else 1.0)
        turns.append(Turn(i + 1, 1, size - 1, last, (size - 1) * tokens, seconds, 0.0))
    return Run(name, warm_up=WarmUp(warm_up, 9.0, 12.0, step_s), turns=turns, steps=Steps(columns))


def falling(count, rate=0.01, start=5.0):
    return [start - rate * i for i in range(count)]


def changing(part_s, changes, losses, **options):
    """A run whose steps take `part_s[i]` in part i of its recipe, which begins after `changes[i - 1]` steps."""
    run = made("b", part_s[0], losses, **options)
    run.changes = list(changes)
    wall = [1e3 * part_s[run.part_at(i + 1)] for i in range(len(losses))]
    run.steps = Steps({name: wall if name == "wall_ms" else run.steps[name] for name in COLUMNS})
    run.turns = [replace(turn, seconds=sum(wall[turn.last - turn.steps : turn.last]) / 1e3) for turn in run.turns]
    return run


def test_a_recipe_that_changes_is_as_fast_as_all_of_its_steps():
    """A mean over rounds of two speeds would be that of neither, nor of the whole."""
    runs = {"a": made("a", 1.0, falling(84)), "b": changing((4.0, 2.0), (44,), falling(84))}
    found = outcome(runs, "a")
    assert found["b"].ratio.mid == pytest.approx(84 / (44 * 4 + 40 * 2))
    assert found["b"].ratio.low == pytest.approx(found["b"].ratio.high)  # no turn of a part differs from another
    assert found["b"].to_target is not None
    assert found["a"].to_target is not None
    assert found["b"].matched is not None
    assert found["b"].matched.mid == pytest.approx(found["a"].to_target[2] / found["b"].to_target[2])
    assert found["b"].tokens_per_s == pytest.approx(840 / (44 * 4 + 40 * 2))
    assert found["b"].drift == pytest.approx(0)  # within a part


def test_progress_is_told_in_tokens_where_steps_have_more_of_them():
    """At equal tokens/s, twice the tokens a step: what counts is the time to the target."""
    runs = {"a": made("a", 1.0, falling(84)), "b": made("b", 2.0, falling(84, rate=0.018), tokens=20)}
    found = outcome(runs, "a")
    assert found["b"].ratio.mid == pytest.approx(1.0)
    assert found["b"].matched is not None
    assert found["a"].to_target is not None
    assert found["b"].to_target is not None
    assert found["b"].matched.mid == pytest.approx(found["a"].to_target[2] / found["b"].to_target[2])


def test_a_turn_in_which_the_recipe_changes_is_in_no_ratio():
    runs = {"a": made("a", 1.0, falling(84)), "b": changing((4.0, 2.0), (46,), falling(84))}
    found = outcome(runs, "a")
    assert found.rounds == 19
    assert found["b"].ratio.mid == pytest.approx(84 / (46 * 4 + 38 * 2))
    assert runs["b"].changes == Run.from_dict(runs["b"].to_dict(), runs["b"].steps).changes


def test_before_a_change_has_come_the_part_so_far_counts_alone():
    runs = {"a": made("a", 1.0, falling(44)), "b": changing((4.0, 2.0), (100,), falling(44))}
    assert outcome(runs, "a")["b"].ratio == (0.25, 0.25, 0.25)


def test_ratios_and_equal_loss():
    runs = {"a": made("a", 1.0, falling(44)), "b": made("b", 0.5, falling(44, rate=0.005))}
    found = outcome(runs, "a")
    assert found.rounds == 10
    assert found.span == 4
    assert found["b"].ratio == (2.0, 2.0, 2.0)
    assert found["b"].tokens_per_s == 20.0
    # the slow learner's lowest: the mean of its last four losses
    assert found.target == pytest.approx(5.0 - 0.005 * 41.5)
    assert found["b"].to_target is not None
    assert found["b"].to_target[:3] == (44, 440, 22.0)
    assert found["a"].to_target is not None
    steps = found["a"].to_target[0]
    assert steps == math.ceil(0.005 * 41.5 / 0.01 + 1.5) + 1
    assert found["b"].matched is not None
    assert found["b"].matched.mid == pytest.approx(2.0 * steps / 44)
    assert found.at_s == 22.0
    assert found["a"].loss_at == pytest.approx(5.0 - 0.01 * (21 - 1.5))
    assert found["a"].loss_hour is None
    assert found["a"].idle_frac == pytest.approx(0.25)
    assert found.control is None
    assert found.trusted is None


def test_an_hour_is_told_where_there_was_one():
    runs = {"a": made("a", 10.0, falling(404, rate=0.001)), "b": made("b", 1.0, falling(404, rate=0.001))}
    found = outcome(runs, "a", usd_per_hour=3.0)
    assert found["b"].loss_hour is None
    assert found["a"].loss_hour == pytest.approx(5.0 - 0.001 * (359 - (found.span - 1) / 2))
    assert found["a"].to_target is not None
    assert found["a"].to_target[3] == pytest.approx(found["a"].to_target[2] * 3 / 3600)


@pytest.mark.parametrize(("bias", "trusted"), [(1.0, True), (1.3, False)])
def test_the_twin_tells_whether_to_trust(bias, trusted):
    noise = [0.98, 1.01, 1.02, 0.99, 1.0, 1.01, 0.97]
    runs = {
        "a": made("a", 1.0, falling(44), noise=noise),
        "b": made("b", 1.0, falling(44)),
        "a again": made("a again", bias, falling(44), noise=noise[::-1]),
    }
    found = outcome(runs, "a", twin="a again")
    assert found.trusted is trusted
    assert ("not to be trusted" in found.control_words()) is not trusted
    few = {name: made(name, 1.0, falling(16)) for name in runs}
    assert "3 rounds of turns are too few to trust a ratio" in outcome(few, "a", twin="a again").control_words()


def test_a_twin_without_an_interval_says_nothing_of_the_others():
    base, twin = (changing((4.0, 2.0), (76,), falling(84), noise=[1.0]) for _ in range(2))
    twin.turns = twin.turns[:-1]  # so that the second part has one turn
    runs = {"b": base, "b again": twin}
    found = outcome(runs, "b", twin="b again")
    assert found.rounds == 19
    assert found.trusted is None
    assert "since in a part of its recipe there were too few turns" in (said := found.control_words())
    assert "let the race go on" in said
    assert "not to be trusted" not in said
    few = {"b": base, "c": base, "b again": replace(twin, turns=twin.turns[:3])}
    for run in few.values():
        run.reached = 84
    said = outcome(few, "b", twin="b again", goal="held_out").control_words()
    assert "since on its twin's way to the goal there were too few turns" in said
    assert "take shorter turns" in said


def test_steps_a_day_and_the_share_of_the_clock_that_were_turns():
    runs = {"a": made("a", 1.0, falling(44)), "b": made("b", 0.5, falling(44))}
    clock_s = 0.0
    for number in range(10):
        for name, step_s in (("a", 1.0), ("b", 0.5)):
            runs[name].turns[number] = replace(runs[name].turns[number], at_s=clock_s)
            clock_s += 4 * step_s + 1.5  # for saving, and for changing over
    found = outcome(runs, "a")
    assert (found["a"].steps_per_day, found["b"].steps_per_day) == (86400, 172800)
    assert found.goodput == pytest.approx(10 * 6.0 / (clock_s - 1.5))
    assert "Steps a day" not in race_of(runs).text()  # two minutes say nothing of a day
    slow = race_of({name: made(name, step_s, falling(44)) for name, step_s in (("a", 20.0), ("b", 10.0))})
    assert "Steps a day, at this speed: a 4,320, b 8,640. 100.0% of the race's clock were turns." in slow.text()


def test_untimed_steps_count_as_those_next_to_them():
    run = made("a", 2.0, falling(12), noise=[1.0, 1.5])
    assert run.warm_seconds().tolist() == [2.0] * 8 + [3.0] * 4
    run.turns[1] = Turn(2, 1, 0, 9, 0, 0.0, 0.0, whole=False)
    run.turns.append(Turn(2, 0, 3, 12, 30, 9.0, 0.0, whole=False))
    assert run.warm_seconds().tolist() == [2.0] * 9 + [3.0] * 3
    assert rounds_of([run]) == [1]
    assert np.isnan(Run("none", steps=made("a", 1.0, falling(3)).steps).warm_seconds()).all()


def test_losses_that_are_not_finite_hide_nothing():
    losses = falling(44)
    losses[20] = math.nan
    losses[30] = math.inf
    found = outcome({"a": made("a", 1.0, falling(44)), "b": made("b", 1.0, losses)}, "a")
    assert math.isfinite(found["b"].loss)
    assert math.isfinite(found.target)
    broken = outcome({"a": made("a", 1.0, falling(44)), "b": made("b", 1.0, [math.nan] * 44)}, "a")
    assert math.isnan(broken.target)
    assert broken["b"].to_target is None
    assert broken["b"].matched is None


def test_before_every_run_has_had_a_turn():
    race = race_of({"a": made("a", 1.0, falling(2))})
    with refused(ValueError):
        _ = race.outcome
    with refused(ValueError):
        race.table()
    assert "no result" in repr(race)
    assert "no result" in race._repr_html_()


def race_of(runs: dict[str, Run], twin: str | None = None) -> sk.Race:
    return sk.Race(
        runs, "a", twin, {"target_loss": None, "usd_per_gpu_hour": 3.0, "seed": 0}, environment={"device": "cpu"}
    )


def texts(axes: Any) -> str:
    """All that is written in a picture, its legend included."""
    legend = axes.get_legend()
    return "\n".join(text.get_text() for text in [*axes.texts, *(legend.get_texts() if legend else [])])


STAGES = {
    "nothing": {"a": 0, "b": 0, "a again": 0},
    "one warms up": {"a": 3, "b": 0, "a again": 0},
    "all have warmed up": {"a": 4, "b": 4, "a again": 4},
    "one has had a turn": {"a": 8, "b": 4, "a again": 4},
    "one has not": {"a": 8, "b": 8, "a again": 4},
}


@pytest.mark.parametrize("x", ["steps", "tokens", "time", "usd"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_picture_before_every_run_has_had_a_turn(stage, x):
    steps = STAGES[stage]
    runs = {name: made(name, 1.0, falling(count)) for name, count in steps.items()}
    figure = race_of(runs, twin="a again").plot(x)
    figure.draw_without_rendering()
    left, right = figure.axes
    assert "No round is whole yet" in texts(right)
    assert "nan" not in texts(left) + texts(right)
    timed = x in ("time", "usd")  # a run's own time is known from its first turn on
    known = {name: steps[name] if not timed or steps[name] >= 8 else 0 for name in ("a", "b")}
    lines = {str(line.get_label()).split()[0]: line for line in left.get_lines()}
    assert {name: np.isfinite(lines[name].get_xdata()).sum() for name in known} == known
    note = next((text.get_text() for text in left.texts if ": no " in text.get_text()), "")
    assert note.partition(":")[0] == ", ".join(name for name, count in known.items() if not count)
    assert ('plot(x="steps") shows the losses' in note) is any(steps[name] > known[name] for name in known)


def test_a_ratio_of_too_few_rounds_says_so_wherever_it_is_shown():
    runs = {
        "a": made("a", 1.0, falling(20)),
        "b": made("b", 0.5, falling(20)),
        "a again": made("a again", 1 / 1.344, falling(20)),
    }
    runs["b"].prediction = Prediction(1.9, 0.5, 0.5, 0.1, "")
    race = race_of(runs, twin="a again")
    assert race.outcome.rounds == 4
    doubt = "too few rounds to trust"
    row = next(line for line in str(race).splitlines() if line.startswith("a again"))
    assert row.count(f"1.344 ({doubt})") == 2, "the ratio, and the one at equal loss"
    assert "4 rounds of turns are too few to trust a ratio" in repr(race)
    assert f"measured 2.00 x ({doubt})" in repr(race)
    assert f"1.344 ({doubt})" in race._repr_html_()
    assert f"a again  1.344 ({doubt})" in texts(race.plot().axes[1])
    more = race_of({name: made(name, 1.0, falling(24)) for name in runs}, twin="a again")
    assert more.outcome.rounds == 5
    assert doubt not in repr(more) + more._repr_html_() + texts(more.plot().axes[1])


def test_what_trained_the_runs_is_said():
    runs = {name: made(name, 1.0, falling(24)) for name in ("a", "b")}
    assert "Trained by" not in str(race_of(runs)), "a race of another version may not have kept it"
    for run in runs.values():
        run.work = {**run.work, "optimizer": "Muon(lr=0.02, momentum=0.95; lr=0.001, betas=(0.9, 0.95))"}
    assert "\nTrained by Muon at lr=0.02 and 0.001.\n" in str(race_of(runs))
    runs["b"].work["optimizer"] = "AdamW(lr=0.001)"
    assert "\nTrained by: a by Muon at lr=0.02 and 0.001; b by AdamW at lr=0.001.\n" in str(race_of(runs))


def test_steps_are_read_back_as_they_were(tmp_path):
    steps = made("a", 1.0, [1.0, math.nan, math.inf, 2.5]).steps
    write_steps(steps, tmp_path / "records.jsonl")
    again = read_steps(tmp_path / "records.jsonl")
    for name in COLUMNS:
        assert np.array_equal(again[name], steps[name], equal_nan=True)


def test_spans_of_time():
    assert [elapsed(s) for s in (0.04, 100, 120, 7200, math.nan)] == [
        "0.0 s",
        "100.0 s",
        "2.0 min",
        "2.0 h",
        "no time",
    ]


def test_a_model_with_experts_gets_no_prediction_and_the_reason():
    """Only linear layers are timed alone; experts hold nearly all of such a model."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), mixture("Mixtral").model.layers[0].mlp.experts)
    layers = Layers(model, 4)
    found = predict(layers, layers, Shares(), 1.0)
    assert found.ratio is None
    assert "experts" in found.why
    plain = Layers(torch.nn.Sequential(torch.nn.Linear(8, 8)), 4)
    assert "experts" not in predict(plain, plain, Shares(), 1.0).why


@pytest.mark.parametrize(
    ("base_s", "own_s", "quantizing_s", "known"),
    [(0.5, 0.6, 0.2, True), (0.5, 0.1, 0.09, False), (0.5, 23.0, 20.0, False)],
    ids=["plausible", "products take no time", "quantization takes many steps"],
)
def test_short_runs_that_a_busy_machine_disturbed_predict_nothing(base_s, own_s, quantizing_s, known):
    """A step of a second, of which half is products."""

    def layers(kind: str, *seconds: float) -> Any:
        of_layers = {"experts": False, "shapes": {"a": (8, 8)}, "kinds": {"a": kind}, "flops": {"a": 1}}
        return SimpleNamespace(**of_layers, seconds=lambda names: seconds)

    shares: Any = SimpleNamespace(products=lambda step_s: 0.5)
    found = predict(layers("fp8", own_s, quantizing_s), layers("bf16", base_s, 0.0), shares, 1.0)
    assert (found.ratio is not None) == known
    assert str(found).startswith("predicted 0.91 x: 50%" if known else "no prediction: its short runs do not fit")
    assert found.quantization == pytest.approx(quantizing_s)
