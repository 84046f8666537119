"""Workloads on a clock that jumps: when requests are sent, and what is measured of all of them together."""

import dataclasses

import pytest

from surokit.serving import measures
from surokit.serving.client import Answer
from surokit.serving.driving import Delay, drive
from surokit.serving.point import Point
from surokit.serving.progress import Progress
from surokit.serving.served import ServeBench
from surokit.serving.workload import Workload, listed
from tests.serving.virtual import DONE, Server, asking, event, run

ANSWER = [0.5, event("a"), 0.1, event("b", finish="length"), event(usage=(8, 2)), DONE]


def driven(workload, answer=lambda body: ANSWER, **options):
    server, told = Server(answer), []
    kept: list[Answer] = []

    async def go():
        async with asking(server, **options) as client:
            bodies = [{"n": n} for n in range(workload.requests)]
            return await drive(
                client,
                "completions",
                bodies,
                workload,
                lambda answers, seconds: told.append((len(answers), seconds)),
                kept.append,
            )

    answers, delay = run(go())
    assert sorted(kept, key=lambda a: a.number) == answers
    return answers, delay, told, server


def test_a_burst_is_sent_at_once():
    answers, delay, told, _ = driven(Workload(requests=20))
    assert {a.sent for a in answers} == {0.0}
    assert measures.duration_s(answers) == pytest.approx(0.6)
    found = measures.throughput(answers)
    assert found == pytest.approx(
        {"requests_per_s": 20 / 0.6, "input_tokens_per_s": 160 / 0.6, "output_tokens_per_s": 40 / 0.6}
    )
    assert delay.late_p99_ms == pytest.approx(0, abs=1e-6)
    assert told
    assert told[0] == (0, pytest.approx(0.5))


def test_requests_arrive_when_they_are_due_whatever_the_server_does():
    work = Workload(requests=50, rate=10.0, seed=1)
    answers, *_ = driven(work)
    assert [a.sent for a in answers] == pytest.approx(work.arrivals().tolist(), abs=1e-6)
    gaps = work.arrivals()[1:] - work.arrivals()[:-1]
    assert gaps.mean() == pytest.approx(0.1, rel=0.4)


def test_as_many_as_said_are_unanswered():
    answers, _, _, server = driven(Workload(requests=9, concurrency=3))
    assert [round(a.sent, 6) for a in answers] == [0.0] * 3 + [0.6] * 3 + [1.2] * 3
    assert server.most <= 3
    assert measures.queue_ms(answers) == pytest.approx([0] * 9)


def test_failures_are_counted_and_in_no_time():
    answers, *_ = driven(Workload(requests=10), lambda body: (500, "no") if body["n"] % 2 else ANSWER)
    whole = measures.answered(answers)
    assert (len(answers), len(whole)) == (10, 5)
    assert measures.goodput(answers, {"ttft": 501, "tpot": 101}) == 0.5
    assert measures.goodput(answers, {"ttft": 499}) == 0
    with pytest.raises(ValueError, match="a limit is of"):
        measures.goodput(answers, {"itl": 1})


def made(number, due, done, **changes):
    chunks = {"chunks": (due + 0.1, done), "text": due + 0.1, "output_tokens": 2} | changes
    return Answer(number, due, due, due, done, "answered", **chunks)


def test_what_was_not_seen_was_not_in_time():
    one = made(0, 0.0, 9.0, chunks=(9.0,), text=None, output_tokens=1)
    assert measures.goodput([one], {"ttft_text": 1}) == 0
    assert measures.goodput([one], {"tpot": 1, "ttft": 9001}) == 1  # one token has no time per token
    assert measures.goodput([made(0, 0.0, 1.0, chunks=(), text=None)], {"e2e": 1e6}) == 0


@pytest.mark.parametrize("latency_s", [0.0, 5.0, 20.0])
def test_a_server_keeps_up_where_it_answers_as_fast_as_requests_arrive(latency_s):
    dues = Workload(requests=50, rate=2.0).arrivals().tolist()
    assert measures.kept_up([made(i, due, due + latency_s) for i, due in enumerate(dues)]) == pytest.approx(1)
    slow = [made(i, due, 1.25 * due + latency_s) for i, due in enumerate(dues)]
    assert measures.kept_up(slow) == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("lost", "keeps_up"), [(range(16, 1000, 33), True), (range(970, 1000), True), (range(940, 1000), False)]
)
def test_what_was_lost_counts_once_wherever_it_was(lost, keeps_up):
    answers = [made(i, 0.1 * i, 0.1 * i + 1) for i in range(1000)]
    answers = [dataclasses.replace(a, state="failed") if i in lost else a for i, a in enumerate(answers)]
    point = Point("a server", Workload(requests=1000, rate=10.0), tuple(answers))
    assert ServeBench([point]).saturation() == (point if keeps_up else None)


def test_a_progress_counts_whole_answers(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    progress = Progress()
    answers = {i: dataclasses.replace(made(i, i, i + 1.0), state="failed" if i % 4 else "answered") for i in range(20)}
    progress.tell_answers("2 a second", 40, answers, 10.0)
    progress.show()
    assert "5 of 40 answered, 10 s, 15 lost; 0.5 requests/s, first token after 100 ms" in capsys.readouterr().err


def test_a_client_that_is_too_busy_says_so():
    assert not Delay(0.1, 1.0, 0.5).is_saturated
    assert Delay(0.1, 50.0, 0.5).is_saturated
    assert Delay(0.1, 1.0, 0.99).is_saturated


def test_quantiles_have_intervals_that_hold_as_often_as_they_say():
    import numpy as np

    drawn = np.random.default_rng(0).exponential(1.0, (2000, 200))
    for q in (0.5, 0.9):
        held = [measures.quantiles(row, [q])[0].holds(-np.log(1 - q)) for row in drawn]
        assert 0.94 < np.mean(held) < 0.98
    assert not measures.quantiles(drawn[0][:10], [0.99])[0].known


@pytest.mark.parametrize(
    "changes",
    [
        {"requests": 0},
        {"input_tokens": 1.5},
        {"rate": 0},
        {"rate": 1.0, "concurrency": 2},
        {"concurrency": 0},
        {"prompts": ("",)},
        {"prompts": "one text"},
    ],
)
def test_workloads_that_cannot_be(changes):
    with pytest.raises(ValueError, match="Workload"):
        Workload(**changes)


def test_sweeps():
    work = Workload(requests=5)
    assert [w.name for w in work.rates(1, 2.5)] == ["1 requests/s", "2.5 requests/s"]
    assert [w.name for w in listed(work.concurrencies(1, 4))] == ["1 at once", "4 at once"]
    with pytest.raises(TypeError):
        listed([])
