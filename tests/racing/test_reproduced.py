"""A race that was run again is compared figure by figure, by the intervals that were stated."""

from __future__ import annotations

from dataclasses import replace

import surokit as sk
from surokit import cli
from surokit.racing.reproduced import Figure, Reproduction, compare_races, differences_of, plain
from surokit.statistics import Interval
from tests.racing.conftest import batches, raced
from tests.refusals import refused

RATIO = Interval(1.1, 1.2, 1.3)


def sharp(value: float) -> Interval:
    return Interval(value - 0.01, value, value + 0.01)


def test_a_figure_is_judged_by_its_interval_or_to_the_bit():
    assert Figure("ratio", RATIO, sharp(1.29)).verdict == "inside"
    assert Figure("ratio", RATIO, sharp(1.31)).verdict == "outside"
    assert Figure("ratio", RATIO, Interval(1.21, 1.31, 1.41)).verdict == "agrees"
    assert Figure("ratio", RATIO, plain(1.31)).verdict == "outside"
    assert Figure("loss", plain(2.5), plain(2.5)).verdict == "equal"
    assert Figure("loss", plain(2.5), plain(2.525), is_loss=True).verdict == "off by +1.00%"
    assert Figure("loss", plain(2.5), plain(5.0), is_loss=True).verdict == "far off by +100.00%"
    assert Figure("steps", plain(10), plain(12)).verdict == "off by +20.00%"
    assert Figure("loss", plain(0.0), plain(0.1)).verdict == "off by +inf%"
    assert Figure("loss", plain(2.5), None).verdict == "missing"
    assert Figure("steps", plain(10), plain(None)).verdict == "missing"


def test_an_interval_that_is_far_wider_than_then_tells_nothing(monkeypatch, tmp_path, capsys):
    then = Interval(0.47, 0.50, 0.54)
    noisy = Figure("fp8: tokens/s x baseline", then, Interval(0.18, 0.36, 0.69))
    assert noisy.verdict == "too noisy to tell"
    assert replace(noisy, now=Interval(0.2, 0.5, 0.7)).verdict == "too noisy to tell"
    assert replace(noisy, now=Interval(0.45, 0.55, 0.65)).verdict == "agrees"
    beyond = replace(noisy, now=Interval(0.05, 0.1, 0.35))
    assert beyond.verdict == "outside"
    (tmp_path / "evidence.json").touch()
    for figures, status in (((noisy,), 3), ((noisy, beyond), 1), ((Figure("ratio", then, sharp(0.5)),), 0)):
        found = Reproduction(figures, ())
        monkeypatch.setattr("surokit.bench.evidence_again.reproduce", lambda *_, found=found: found)
        assert cli.main(["reproduce", str(tmp_path)]) == status
        told = capsys.readouterr().out
        assert ("0.3600 (0.1800 to 0.6900)" in told) == (noisy in figures)
        assert ("more than 3 times as wide as then: run it again" in told) == (noisy in figures)


def test_what_holds_and_what_is_exact():
    ratio, loss = Figure("ratio", RATIO, plain(1.2)), Figure("loss", plain(2.5), plain(2.5), is_loss=True)
    good = Reproduction((ratio, loss), ())
    assert good.holds
    assert good.is_exact
    assert "1 of 1 figures with a stated interval are inside of it; 1 of 1 others are equal." in str(good)
    assert "No figure had an interval" in str(Reproduction((loss,), ()))
    bad = Reproduction((ratio, replace(loss, now=plain(2.52))), ("torch 2.14 for 2.13",))
    assert bad.holds
    assert not bad.is_exact
    assert "Not as it was then: torch 2.14 for 2.13." in str(bad)
    for wrong in (replace(ratio, now=plain(2.0)), replace(loss, now=plain(9.0)), replace(loss, now=None)):
        assert not Reproduction((ratio, loss, wrong), ()).holds
    assert not Reproduction((), ()).holds


def test_a_race_that_is_run_again_gives_the_same_losses(model):
    then, now = (raced(model, steps=12, turn_s=1e-6) for _ in range(2))
    found = compare_races(then, now)
    assert found.is_exact
    assert not found.differences
    names = [figure.name for figure in found.figures]
    assert "bf16: training loss" in names
    assert "fp8: tokens/s x baseline" not in names  # of too few rounds
    many = compare_races(then := raced(model, steps=24, turn_s=1e-6), then)
    assert "fp8: tokens/s x baseline" in [figure.name for figure in many.figures]
    assert many.holds
    short = compare_races(then, raced(model, {"bf16": sk.BF16}, steps=24, turn_s=1e-6))
    assert not short.holds
    assert {figure.verdict for figure in short.figures if figure.name.startswith("fp8:")} == {"missing"}
    longer = compare_races(now, raced(model, steps=16, turn_s=1e-6, seed=3))
    assert not longer.is_exact
    assert "16 steps against 12" in longer.differences
    assert "seed of bf16" in longer.differences


def test_after_other_steps_only_what_does_not_rest_on_them_is_compared(model):
    def by_minutes(turn_steps, **options):
        return raced(model, steps=None, minutes=0.0, turn_steps=turn_steps, eval=batches(1, seed=1), **options)

    then, now = by_minutes(2), by_minutes(8)
    found = compare_races(then, now)
    assert {figure.name: figure.verdict for figure in found.figures} == {
        f"{name}: training loss after 9 steps": "equal" for name in then.runs
    }
    assert found.holds
    assert "15 steps against 9" in found.differences
    assert "compared after the smaller one; left out: held-out loss, steps to the target." in str(found)
    assert "smaller one" not in str(compare_races(then, then))
    goal = {"until": 100.0, "turn_s": 1e-6}
    found = compare_races(raced(model, steps=8, eval=batches(1), **goal), by_minutes(4, until=100.0))
    assert "fp8: steps to the target" in [figure.name for figure in found.figures]
    assert "compared after the smaller one; left out: held-out loss." in str(found)


def test_of_a_ratio_at_equal_loss_that_is_not_compared_it_is_said(model):
    then, now = raced(model, steps=24, turn_s=1e-6), raced(model, steps=30, turn_s=1e-6)
    matched = then.outcome["fp8"].matched
    assert matched is not None
    assert matched.known
    found = compare_races(then, now)
    assert not [figure.name for figure in found.figures if figure.name.endswith("at equal loss")]
    assert "smaller one; left out: at equal loss, steps to the target." in str(found)


def test_versions_that_differ_are_named():
    assert differences_of({"torch": "2.13", "cores": 2}, {"torch": "2.14", "cores": 2}) == ["torch 2.14 for 2.13"]


def test_races_without_a_common_run_are_refused(model):
    then = raced(model, {"a": sk.BF16}, steps=8, turn_s=1e-6)
    with refused(ValueError):
        compare_races(then, raced(model, {"b": sk.BF16}, steps=8, turn_s=1e-6))
