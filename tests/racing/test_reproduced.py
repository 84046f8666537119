"""A race that was run again is compared figure by figure, by the intervals that were stated."""

from __future__ import annotations

import math
from dataclasses import replace

import surokit as sk
from surokit.racing.reproduced import Figure, Reproduction, compare_races, differences_of, plain
from surokit.statistics import Interval
from tests.racing.conftest import raced
from tests.refusals import refused

RATIO = Interval(1.1, 1.2, 1.3)


def test_a_figure_is_judged_by_its_interval_or_to_the_bit():
    assert Figure("ratio", RATIO, 1.29).verdict == "inside"
    assert Figure("ratio", RATIO, 1.31).verdict == "outside"
    assert Figure("loss", plain(2.5), 2.5).verdict == "equal"
    assert Figure("loss", plain(2.5), 2.525).verdict == "off by +1.00%"
    assert Figure("loss", plain(None), 2.5).verdict == "not comparable"
    assert Figure("loss", plain(2.5), math.nan).verdict == "not comparable"


def test_what_holds_and_what_is_exact():
    ratio, loss = Figure("ratio", RATIO, 1.2), Figure("loss", plain(2.5), 2.5)
    good = Reproduction((ratio, loss), ())
    assert good.holds
    assert good.is_exact
    assert "1 of 1 figures with a stated interval are inside of it; 1 of 1 others are equal." in str(good)
    bad = Reproduction((replace(ratio, now=2.0), replace(loss, now=2.6)), ("torch 2.14 for 2.13",))
    assert not bad.holds
    assert not bad.is_exact
    assert "Not as it was then: torch 2.14 for 2.13." in str(bad)


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
    longer = compare_races(now, raced(model, steps=16, turn_s=1e-6, seed=3))
    assert not longer.is_exact
    assert "16 steps against 12" in longer.differences
    assert "seed of bf16" in longer.differences


def test_versions_that_differ_are_named():
    assert differences_of({"torch": "2.13", "cores": 2}, {"torch": "2.14", "cores": 2}) == ["torch 2.14 for 2.13"]


def test_races_without_a_common_run_are_refused(model):
    then = raced(model, {"a": sk.BF16}, steps=8, turn_s=1e-6)
    with refused(ValueError):
        compare_races(then, raced(model, {"b": sk.BF16}, steps=8, turn_s=1e-6))
