"""What a plan predicts of a workload: its own figures, as answers that wait where the server is full."""

import dataclasses

import pytest

import surokit as sk
from surokit.serving import measures
from surokit.serving.planned import planned
from tests.planner.families import QWEN3_8B
from tests.refusals import refused

PLAN = sk.plan(QWEN3_8B, gpu="H100")
WORK = sk.Workload(requests=64, input_tokens=512, output_tokens=128)
SAID = PLAN.serving(512, 128, 8)


def test_a_closed_load_is_the_plans_own_figures():
    point = planned(PLAN, dataclasses.replace(WORK, concurrency=8), "planned")
    assert point.throughput()["output_tokens_per_s"] == pytest.approx(SAID.tokens_per_s)
    assert point.spread("ttft").mid == pytest.approx(SAID.prefill_batch_ms)
    assert point.spread("tpot").mid == pytest.approx(SAID.token_ms)
    assert point.spread("itl", 0.99).mid == pytest.approx(SAID.token_ms)
    assert point.spread("e2e").mid == pytest.approx(SAID.request_ms)


def test_what_finds_no_place_waits():
    most = SAID.most or 0
    work = dataclasses.replace(WORK, requests=2 * most)
    answers = planned(PLAN, work, "planned").answers
    full = SAID.at(most)
    firsts = measures.ttft_ms(answers)
    assert firsts[:most] == pytest.approx([full.prefill_batch_ms] * most)
    assert firsts[most:] == pytest.approx([full.request_ms + full.prefill_batch_ms] * most)
    closed = planned(PLAN, dataclasses.replace(work, concurrency=2 * most), "planned")
    assert [a.sent for a in closed.answers] == [0.0] * 2 * most


def test_at_a_rate_as_many_are_served_as_it_keeps_in_the_server():
    slow = planned(PLAN, dataclasses.replace(WORK, rate=0.01), "planned")
    assert slow.spread("tpot").mid == pytest.approx(SAID.at(1).token_ms)
    assert slow.spread("ttft").mid == pytest.approx(SAID.prefill_ms)


def test_requests_that_all_come_within_no_time_are_a_burst_however_they_are_called():
    found = [
        planned(PLAN, dataclasses.replace(WORK, **how), "planned")
        for how in ({}, {"rate": 1e9}, {"concurrency": WORK.requests}, {"concurrency": 10 * WORK.requests})
    ]
    for name in ("ttft", "tpot", "e2e"):
        assert [p.spread(name).mid for p in found] == pytest.approx([found[0].spread(name).mid] * 4)


def test_prompts_of_ones_own_are_not_planned():
    with refused(ValueError):
        planned(PLAN, sk.Workload(prompts=("one",)), "planned")


def test_a_plan_of_several_gpus_says_that_its_figures_are_of_one():
    whole = sk.plan(QWEN3_8B, gpu="H100", gpus=8)
    point = planned(whole, WORK, "planned")
    assert "each of the 8 GPUs serves by itself and holds the whole model: figures are of one" in point.notes
    for divided in (whole.but(tensor_parallel=4), whole.but(pipeline_parallel=4)):
        with refused(ValueError):
            planned(divided, WORK, "planned")


def test_it_stands_beside_what_was_measured():
    measured = sk.ServeBench([planned(PLAN, WORK, "vLLM")])
    both = measured.planned(PLAN)
    assert both.table()["server"].tolist() == ["vLLM", "planned"]
    assert "not measured" in repr(both)


def test_what_all_points_of_a_server_share_is_said_once():
    found = sk.ServeBench([planned(PLAN, WORK, "vLLM")]).planned(
        sk.plan(QWEN3_8B, gpu="H100", gpus=8), workload=WORK.concurrencies(1, 8)
    )
    notes = "\n".join(found.notes)
    assert notes.count("rates of the datasheet") == 1
    assert "all: rates of the datasheet" in notes
    assert notes.count("figures are of one") == 1
    assert "planned: each of the 8 GPUs" in notes
    assert "planned, 8 at once: planned and not measured" in notes
