"""A plan of a run whose recipe changes on the way counts each part for its share."""

from __future__ import annotations

from typing import Any

import pytest

import surokit as sk
from surokit import units
from tests.refusals import refused

FORWARD = sk.FP4.but(forward=sk.BF16)
CHANGING = sk.FP4.then(FORWARD, at=0.75)
RUN: dict[str, Any] = {
    "gpu": "B200",
    "batch": 2,
    "length": 2048,
    "tokens": 1e10,
    "tflops_per_gpu": 500,
    "usd_per_gpu_hour": (2, 3),
}


def plans(**changes: Any) -> tuple[sk.Plan, sk.Plan, sk.Plan]:
    whole, first, later = (
        sk.plan("qwen3-0.6b", **{**RUN, "recipe": r, **changes}) for r in (CHANGING, *CHANGING.parts)
    )
    return whole, first, later


def test_the_times_of_a_run_are_those_of_its_parts() -> None:
    whole, first, later = plans(tflops_per_gpu=None)
    assert whole.likely_days is not None
    assert first.likely_days is not None
    assert later.likely_days is not None
    for days, one, other in zip(whole.likely_days, first.likely_days, later.likely_days, strict=True):
        assert days == pytest.approx(0.75 * one + 0.25 * other)
        assert one != other
    assert whole.time.floor_days is not None
    assert whole.time.floor_days == pytest.approx(0.75 * first.time.floor_days + 0.25 * later.time.floor_days)  # type: ignore[operator]
    assert whole.step_time is not None
    assert first.step_time is not None
    assert later.step_time is not None
    assert whole.step_time.ms == pytest.approx(0.75 * first.step_time.ms + 0.25 * later.step_time.ms)
    assert whole.likely == first.likely
    assert [plan.recipe for _, plan in whole.parts] == list(CHANGING.parts)
    assert any(line.group == "a step, likely, before the recipe changes" for line in whole.lines())
    mean = f"A step likely takes {units.value(whole.step_time.ms, 'ms')} in the mean over the run ("
    assert any(said.startswith(mean) for said in whole.but(tokens=None).answers)
    assert any("after 0.75 of the steps the recipe is fp4(forward=bf16), a step" in note for note in whole.notes)


def test_products_of_a_mere_number_of_parameters_have_a_third_each() -> None:
    fp4, mixed, changing, stored = (
        sk.plan(8e9, gpu="B200", tokens=1e10, recipe=recipe) for recipe in (sk.FP4, FORWARD, CHANGING, sk.QFP8)
    )
    days = 6 * 8e9 * 1e10 / 1e12 / 86400
    assert fp4.time.floor_days == pytest.approx(days / 9000)
    assert mixed.time.floor_days == pytest.approx(days * (1 / 2250 + 2 / 9000) / 3)
    assert changing.time.floor_days == pytest.approx(days * (0.75 / 9000 + 0.25 * (1 / 2250 + 2 / 9000) / 3))
    assert stored.time.floor_days == pytest.approx(4 / 6 * days / 2250)  # the frozen base has no grad_weight
    both = "100 % of B200 dense BF16, 2250 and B200 dense FP4, 9000 TFLOPS"
    assert mixed.time.floor_how == both
    how = {line.term: line.how for line in changing.lines()}
    assert how["time, at least"] == f"{fp4.time.floor_how}, then {both}"


def test_the_memory_is_that_of_the_part_that_needs_most() -> None:
    _, first, later = plans()
    eight = sk.plan("qwen3-0.6b", **{**RUN, "recipe": sk.FP4.then(sk.BF16, at=0.9)})
    bf16 = sk.plan("qwen3-0.6b", **{**RUN, "recipe": sk.BF16})
    assert eight.memory == bf16.memory
    assert first.memory.gib < bf16.memory.gib
    assert eight.but(recipe=sk.FP4).memory == first.memory
    assert later.memory.gib <= bf16.memory.gib


def test_remedies_put_an_adapter_on_every_part() -> None:
    p = sk.plan("llama-3.1-8b", **{**RUN, "recipe": CHANGING})
    changed = [remedy.changes["recipe"] for remedy in p.fitting(gib=20).remedies if "recipe" in remedy.changes]
    assert len(changed) == 3
    assert all(part.adapter for recipe in changed for part in recipe.parts)
    assert {len(recipe.parts) for recipe in changed} == {2}
    # parts that keep other layers cannot store theirs
    keeping = p.but(recipe=sk.FP4.then(sk.FP4.keep_first(2), at=0.9)).fitting(gib=20)
    assert ["store" in remedy.how for remedy in keeping.remedies if "recipe" in remedy.changes] == [False]


def test_given_rates_leave_the_cost_as_it_is() -> None:
    whole, first, _ = plans()
    assert whole.days == pytest.approx(first.days)
    assert whole.usd == pytest.approx(first.usd)
    assert whole.usd_range == pytest.approx(first.usd_range)


def test_a_change_after_so_many_steps_needs_the_steps_of_the_run() -> None:
    steps = 1e10 / 4096
    after = sk.plan("qwen3-0.6b", **{**RUN, "recipe": sk.FP4.then(FORWARD, at=round(steps / 4))})
    assert [share for share, _ in after.parts] == pytest.approx([0.25, 0.75], abs=1e-3)
    with refused(ValueError):
        sk.plan("qwen3-0.6b", **{**RUN, "recipe": sk.FP8.then(sk.BF16, at=0.5).then(sk.FP8, at=10)})
    with refused(ValueError):
        sk.plan("qwen3-0.6b", **{**RUN, "recipe": sk.FP4.then(FORWARD, at=100), "length": None})
    never = sk.plan("qwen3-0.6b", **{**RUN, "recipe": sk.FP4.then(FORWARD, at=10**8)})
    assert (
        "The change to fp4(forward=bf16) after step 100,000,000 never comes: the run ends after 2,441,407"
        in never.answers
    )
    assert not any("never comes" in said for said in after.answers)


def test_the_most_tokens_within_a_budget_are_so_where_the_first_part_is_the_slower() -> None:
    """A guess from a longer run is too high: the slow part has less of that one."""
    for recipe in (sk.BF16.then(sk.FP8, at=20000), sk.FP8.then(sk.BF16, at=20000)):
        asked = sk.plan("llama-3.1-8b", gpu="H100", gpus=8, batch=1, length=4096, zero=3, recipe=recipe)
        found = asked.tokens_for(days=1)
        days = [likely[0] for tokens in (found, found + 10**7) if (likely := asked.but(tokens=tokens).likely_days)]
        assert days[0] <= 1 < days[1]


def test_without_tokens_the_steps_of_each_part_are_told() -> None:
    alone = sk.plan("qwen3-0.6b", **{**RUN, "recipe": sk.FP4.then(FORWARD, at=100), "tokens": None})
    assert alone.days is None
    likely = alone.but(tflops_per_gpu=None)
    each = [units.value(part.step_time.ms, "ms") for _, part in likely.parts if part.step_time]
    assert any(said.startswith(f"A step likely takes {each[0]}, then {each[1]}: ") for said in likely.answers)
    assert alone.step_time == sk.plan("qwen3-0.6b", **{**RUN, "recipe": sk.FP4, "tokens": None}).step_time


def test_a_live_session_is_planned_with_its_changes() -> None:
    config = sk.DecoderConfig(layers=2, width=64, heads=2, kv_heads=1, vocab=64, ffn=96)
    model = sk.Decoder(config)
    sk.apply(model, CHANGING)
    plan = sk.plan(model, gpu="B200", batch=1, length=64, tokens=1e6)
    assert plan.recipe == CHANGING
    assert len(plan.parts) == 2
    assert "recipe fp4 then fp4(forward=bf16) at 0.75" in repr(plan)
