"""Result files of other clients: hand-made ones, whose figures are computed here by hand, and those in files/, which the clients
themselves wrote before guidellm's mock server (shortened to the keys that matter), beside the figures that they state."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import surokit as sk
from surokit.serving import brought, measures
from tests.refusals import refused

FILES = Path(__file__).with_name("files")


@pytest.fixture
def read(tmp_path):
    """Write objects to a file, one or a line each, and read it."""

    def read(*objects, name="result.json"):
        path = tmp_path / name
        path.write_text("\n".join(map(json.dumps, objects)))
        return brought.read(path)

    return read


def without(found, *keys):
    return {key: value for key, value in found.items() if key not in keys}


def figures(point, *names, q=0.5):
    return [point.spread(name, q).mid for name in names]


def means(point):
    """Time to the first text and per token: the means in ms."""
    whole = measures.answered(point.answers)
    return [measures.SPREADS[name](whole).mean() for name in ("ttft_text", "tpot")]


def ours(path):
    return brought.read(FILES / path)


def theirs(path):
    return [json.loads(line) for line in (FILES / path).read_text().splitlines()]


# -- vLLM


def vllm(lost=False, **changes) -> dict[str, Any]:
    """Two answers, of 3 and 5 tokens; lost: and one that failed at once, and one that broke after two chunks."""
    found: dict[str, Any] = {
        "date": "20260102-030405",
        "backend": "openai",
        "label": None,
        "model_id": "tiny",
        "num_prompts": 4 if lost else 2,
        "request_rate": 2.0,
        "burstiness": 1.0,
        "max_concurrency": None,
        "duration": 2.0,
        "completed": 2,
        "failed": 2 if lost else 0,
        "total_input_tokens": 30,
        "total_output_tokens": 8,
        "request_throughput": 1.0,
        "output_throughput": 4.0,
        "input_lens": [10, 20, 7, 7],
        "output_lens": [3, 5, 0, 0],
        "ttfts": [0.1, 0.2, 0.0, 0.3],
        "itls": [[0.05, 0.05], [0.1, 0.3], [], [0.1]],
        "start_times": [100.0, 100.5, 101.0, 101.0],
        "queue_times": [0.0, 0.25, 0.0, 0.0],
        "errors": ["", "", "Bad Gateway", 'Traceback\n  File "x"\nClientPayloadError: cut\n'],
        "median_ttft_ms": 150.0,
        "p90_ttft_ms": 190.0,
        "p99_ttft_ms": 199.0,
        "median_tpot_ms": 75.0,
        "p50_e2el_ms": 400.0,
        "median_client_queue_time_ms": 125.0,
        "p99_itl_ms": 0.0,
    }
    if not lost:
        found |= {key: found[key][:2] for key in DETAILS}
    return found | changes


DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "queue_times", "errors")


def test_vllms_answers(read):
    (point,) = read(vllm())
    assert (point.name, point.date) == ("tiny, 2 requests/s", "2026-01-02T03:04:05")
    assert point.workload == sk.Workload(requests=2, input_tokens=15, output_tokens=4, rate=2.0)
    assert figures(point, "ttft", "tpot", "itl", "e2e", "queue") == pytest.approx([150, 75, 75, 400, 125])
    assert np.isnan(point.spread("ttft_text").mid)
    # from 100.0, the first that was due, to 101.1, the last chunk
    assert point.throughput() == pytest.approx(
        {"requests_per_s": 2 / 1.1, "input_tokens_per_s": 30 / 1.1, "output_tokens_per_s": 8 / 1.1}
    )
    assert (point.count("answered"), point.short, point.delay) == (2, 0, None)
    assert point.answers[1].due == 0.25
    assert point.answers[1].sent == 0.5


def test_vllms_lost_answers_are_counted_and_its_throughput_is_kept(read):
    (point,) = read(vllm(lost=True))
    assert [a.state for a in point.answers] == ["answered", "answered", "failed", "truncated"]
    assert [a.why for a in point.answers[2:]] == ["Bad Gateway", "ClientPayloadError: cut"]
    assert figures(point, "ttft", "tpot", "e2e") == pytest.approx([150, 75, 400])
    assert point.throughput() == {"requests_per_s": 1.0, "input_tokens_per_s": 15.0, "output_tokens_per_s": 4.0}
    assert "does not say when the requests ended that were lost" in point.notes[-1]


def test_vllms_file_of_a_version_that_keeps_no_times_of_sending(read):
    (point,) = read(without(vllm(date="in May"), "start_times", "queue_times", "failed", "label"))
    assert point.date == "in May"
    assert figures(point, "ttft", "tpot", "itl") == pytest.approx([150, 75, 75])
    assert np.isnan(point.spread("queue").mid)
    assert point.throughput()["output_tokens_per_s"] == 4.0


def test_vllms_figures_alone_and_several_runs_in_a_file(read):
    """--append-result adds a line a run. 0 is what it writes where it has no value."""
    run = without(vllm(lost=True, max_concurrency=3, request_rate="inf"), *DETAILS)
    one, two = read(run, without(run | {"max_concurrency": 4, "label": "fp8"}, "failed"))
    assert [one.name, two.name] == ["tiny, 3 at once", "fp8, 4 at once"]
    assert figures(one, "ttft", "tpot", "e2e", "queue") == [150, 75, 400, 125]
    assert figures(one, "ttft", q=0.9) == [190]
    assert np.isnan(figures(one, "itl", "ttft_text", q=0.99)).all()
    for point in (one, two):
        assert [point.count(state) for state in ("answered", "failed")] == [2, 2]
        assert point.workload.requests == 4
        assert point.row()["input_tokens_per_s"] == 15.0
        assert "--save-detailed" in point.notes[-1]


def test_how_vllms_requests_arrived_is_said(read):
    (point,) = read(vllm(burstiness=0.5, max_concurrency=8))
    assert "burstiness of 0.5" in point.notes[1]
    assert point.notes[-1] == "at most 8 requests were under way at once"
    ramp = {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1, "ramp_up_end_rps": 9, "request_rate": "inf"}
    assert "the rate rose from 1 to 9 requests/s (linear)" in read(vllm(**ramp))[0].notes


def test_a_file_of_vllm_itself():
    (point,), (stated,) = ours("vllm_0.33.0.json"), theirs("vllm_0.33.0.json")
    names = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2e": "e2el", "queue": "client_queue_time"}
    for name, known in names.items():
        for q in (50, 90, 99):
            assert point.spread(name, q / 100).mid == pytest.approx(stated[f"p{q}_{known}_ms"], abs=2e-3)
    assert [a.state for a in point.answers].count("failed") == stated["failed"] == 1


# -- SGLang


def sglang(**changes):
    kept = without(vllm(), "date", "model_id", "label", "num_prompts", "failed", "start_times", "queue_times")
    return {**kept, "backend": "sglang", "total_output_tokens_retokenized": 8, **changes}


def test_sglangs_answers(read):
    (point,) = read(sglang(), name="sglang.jsonl")
    assert point.name == "sglang, 2 requests/s"
    assert figures(point, "ttft_text", "tpot", "e2e") == pytest.approx([150, 75, 400])
    assert np.isnan(figures(point, "ttft", "itl", "queue")).all()
    assert point.throughput()["requests_per_s"] == 1.0
    (chat,) = read(sglang(backend="sglang-oai-chat"))
    assert figures(chat, "itl") == pytest.approx([75])


def test_sglangs_figures_alone(read):
    point, _ = read(*[without(sglang(request_rate=float("inf")), *DETAILS)] * 2)
    assert point.name == "sglang, burst"
    assert figures(point, "ttft_text") == [150]
    assert np.isnan(figures(point, "ttft", "tpot", "e2e")).all()


def test_a_file_of_sglang_itself():
    """Its own time per token lasts to the end of the stream, so ours is a little shorter."""
    (detailed, alone), stated = ours("sglang_0.5.23.jsonl"), theirs("sglang_0.5.23.jsonl")
    for point, known in zip((detailed, alone), stated):
        for q, name in ((0.5, "median"), (0.99, "p99")):
            assert point.spread("ttft_text", q).mid == pytest.approx(known[f"{name}_ttft_ms"], abs=1e-3)
    assert 0.95 < detailed.spread("tpot").mid / stated[0]["median_tpot_ms"] < 1
    assert detailed.spread("itl").mid == pytest.approx(stated[0]["median_itl_ms"], abs=1e-3)


# -- guidellm


def request(sent, first=None, last=None, *, end, due=None, tokens=5, iterations=5, error=None, text=None):
    timings = {
        "targeted_start": sent if due is None else due,
        "first_token_iteration": first,
        "first_output_token_iteration": text,
        "last_token_iteration": last,
        "token_iterations": iterations if first else 0,
    }
    return {
        "info": {"timings": timings, "error": error},
        "request_start_time": sent,
        "request_end_time": end,
        "prompt_tokens": 12,
        "output_tokens": tokens if first else None,
        "output_metrics": {"total_tokens": tokens if first else None},
    }


def benchmark(strategy, successful=(), errored=(), incomplete=(), total=None, model="tiny", **config):
    counts = {"successful": len(successful), "errored": len(errored), "incomplete": len(incomplete)}
    return {
        "config": {"strategy": strategy, "backend": {"model": model}, **config},
        "requests": {"successful": list(successful), "errored": list(errored), "incomplete": list(incomplete)},
        "metrics": {
            "request_totals": counts | {"total": total or sum(counts.values())},
            "prompt_token_count": {"successful": {"total_sum": 1200.0}},
            "output_token_count": {"successful": {"total_sum": 500.0}},
        },
        "start_time": 1767323045.0,
        "duration": 10.0,
    }


def report(*benchmarks):
    return {"metadata": {"guidellm_version": "0.8.1"}, "benchmarks": list(benchmarks)}


POISSON = {"type_": "poisson", "rate": 2.0, "max_concurrency": 10240}
ONE, TWO = request(1000, 1000.1, 1000.3, end=1000.4), request(1001, 1001.2, 1001.6, end=1002, due=1000.5)


def test_guidellms_answers_by_our_definitions(read):
    """Its time per output token is (last - sent) / tokens, 60 and 120 ms; ours leaves the first token out: 50 and 100 ms."""
    (point,) = read(report(benchmark(POISSON, [TWO, ONE])))
    assert (point.name, point.date) == ("tiny, 2 requests/s", "2026-01-02T03:04:05+00:00")
    assert point.workload == sk.Workload(requests=2, input_tokens=12, output_tokens=5, rate=2.0)
    assert figures(point, "ttft_text", "tpot", "e2e", "queue") == pytest.approx([150, 75, 450, 250])
    assert np.isnan(figures(point, "ttft", "itl")).all()
    assert point.throughput()["requests_per_s"] == pytest.approx(2 / 2)
    assert point.answers[0].chunks == (0.1, 0.3)
    assert point.answers[0].counted


def test_guidellms_lost_requests(read):
    failed, cut = request(1002, end=1002.1, error="ReadTimeout()\nmore"), request(1003, 1003.1, 1003.2, end=1003.3)
    broken = request(1004, 1004.1, 1004.2, end=1005, error="RemoteProtocolError()")
    (point,) = read(report(benchmark(POISSON, [ONE], [failed, broken], [cut])))
    assert [(a.state, a.why) for a in point.answers] == [
        ("answered", ""),
        ("failed", "ReadTimeout()"),
        ("truncated", "guidellm ended the run"),
        ("truncated", "RemoteProtocolError()"),
    ]
    assert "guidellm ended the run with 1 request under way" in point.notes[1]


def test_guidellms_sweep_is_a_point_each(read):
    strategies = (
        {"type_": "synchronous", "max_concurrency": 1},
        {"type_": "throughput", "max_concurrency": 512},
        {"type_": "throughput", "max_concurrency": 1},
        {"type_": "concurrent", "max_concurrency": 8, "streams": 8},
        {"type_": "constant", "max_concurrency": 1, "rate": 4.0},
        {"type_": "trace", "max_concurrency": None},
    )
    points = read(report(*(benchmark(strategy, [ONE, TWO]) for strategy in strategies)))
    assert [point.workload.name for point in points] == [
        *("1 at once", "burst", "1 at once", "8 at once", "4 requests/s", "burst")
    ]
    assert [point.notes[1:] for point in points[3:]] == [
        (),
        ("requests arrived evenly, not at random", "at most 1 requests were under way at once"),
        ("requests arrived by guidellm's strategy 'trace'",),
    ]
    assert np.isnan(points[0].spread("queue").mid)


def test_guidellms_sample_of_requests(read):
    (point,) = read(report(benchmark(POISSON, [ONE], total=100)))
    assert point.workload.requests == 100
    assert point.throughput() == {"requests_per_s": 0.1, "input_tokens_per_s": 120.0, "output_tokens_per_s": 50.0}
    assert "keeps 1 of 100 requests" in point.notes[1]


def test_guidellms_other_cases(read):
    warm = benchmark(POISSON, [ONE], warmup={"percent": 0.1, "value": None}, model=None)
    (point,) = read(report(warm), name="mine.json")
    assert point.server == "mine"
    assert "warm-up" in point.notes[1]
    whole, thinking = request(1000, end=1001), request(1000, 1000.1, 1000.3, end=1001, text=1000.2)
    assert "1 answer came in one piece" in read(report(benchmark(POISSON, [whole])))[0].notes[-1]
    assert figures(read(report(benchmark(POISSON, [thinking])))[0], "ttft_text", "tpot") == pytest.approx([200, 50])
    (empty,) = read(report(benchmark(POISSON, [], [request(1000, end=1000.1, error="E")])))
    assert (empty.workload.output_tokens, empty.count("failed")) == (1, 1)
    assert "is not known" in empty.notes[-1]
    assert read(report()) == []


def test_a_file_of_guidellm_itself():
    points = ours("guidellm_0.8.1.json")
    for point, stated in zip(points, theirs("guidellm_0.8.1.json")[0]["benchmarks"]):
        metrics = {name: each["successful"] for name, each in stated["metrics"].items() if name != "request_totals"}
        text, token = means(point)
        assert text == pytest.approx(metrics["time_to_first_output_token_ms"]["mean"], abs=2e-3)
        singles = sorted(stated["requests"]["successful"], key=lambda each: each["request_start_time"])
        known = [each["inter_token_latency_ms"] for each in singles]
        assert measures.tpot_ms(measures.answered(point.answers)) == pytest.approx(known, abs=2e-3)
        assert token < metrics["time_per_output_token_ms"]["mean"]  # which includes the first token
    assert [[point.count(state) for state in ("answered", "failed", "truncated")] for point in points] == [
        [3, 1, 0],
        [4, 0, 2],
    ]


# -- AIPerf


def record(sent, ttft=None, gaps=(), *, end, error=None, issued=None, phase="profiling", cancelled=False, **more):
    values = {} if ttft is None else {"time_to_first_token": ttft, "inter_chunk_latency": list(gaps)} | more
    second = 1_000_000_000
    return {
        "metadata": {
            "request_start_ns": int((1767323045 + sent) * second),
            "request_end_ns": int((1767323045 + end) * second),
            "benchmark_phase": phase,
            "was_cancelled": cancelled,
            **({} if issued is None else {"credit_issued_ns": int((1767323045 + issued) * second)}),
        },
        "metrics": {name: {"value": value, "unit": "ms"} for name, value in values.items()},
        **({"error": {"code": 503, "message": error}} if error else {}),
    }


TOKENS = {
    "input_sequence_length": 12,
    "output_sequence_length": 3,
    "usage_prompt_tokens": 15,
    "usage_completion_tokens": 5,
}
FIRST = record(0, 100.0, [50.0, 150.0], end=0.375, issued=0, **TOKENS)
SECOND = record(1, 200.0, [100.0, 300.0], end=2, issued=0.5, **TOKENS)


def summary(**changes):
    quantiles = {"p50": 100.0, "p90": 200.0, "p99": 300.0}
    return {
        "aiperf_version": "0.13.0",
        "input_config": {
            "models": {"items": [{"name": "tiny"}]},
            "phases": [{"kind": "warmup"}, {"kind": "profiling", "type": "poisson", "rate": 3.0}],
        },
        "request_throughput": {"unit": "requests/sec", "avg": 2.0},
        "request_count": {"unit": "requests", "avg": 8.0},
        "error_request_count": {"unit": "requests", "avg": 1.0},
        "time_to_first_token": {"unit": "ms", **quantiles},
        "request_latency": {"unit": "ms", **quantiles},
        "inter_token_latency": {"unit": "ms", **quantiles},
        "inter_chunk_latency": {"unit": "ms", **quantiles},
        "input_sequence_length": {"unit": "tokens", "avg": 12.0},
        "output_sequence_length": {"unit": "tokens", "avg": 5.0},
        "start_time": "2026-01-02T03:04:05.678",
        **changes,
    }


def test_aiperfs_answers(read, tmp_path):
    """The server's count of tokens goes before that of AIPerf's own tokenizer."""
    (point,) = read(SECOND, FIRST, name="profile_export.jsonl")
    assert (point.name, point.date) == ("profile_export, burst", "2026-01-02T03:04:05+00:00")
    assert figures(point, "ttft_text", "tpot", "itl", "e2e", "queue") == pytest.approx([150, 75, 125, 450, 250])
    assert np.isnan(point.spread("ttft").mid)
    assert point.throughput() == pytest.approx(
        {"requests_per_s": 1.0, "input_tokens_per_s": 15.0, "output_tokens_per_s": 5.0}
    )
    assert "neither the model nor how requests arrived" in point.notes[1]
    (tmp_path / "profile_export_aiperf.json").write_text(json.dumps(summary()))
    assert read(SECOND, FIRST, name="profile_export.jsonl")[0].name == "tiny, 3 requests/s"


def test_aiperfs_lost_requests_and_warm_up(read):
    lost = record(2, end=2, error="overloaded\nmore"), record(3, 100.0, [50.0], end=4, error="cut")
    cancelled = record(4, end=5, cancelled=True)
    (point,) = read(FIRST, *lost, cancelled, record(-9, end=-8, phase="warmup"))
    assert [(a.state, a.why, a.status) for a in point.answers] == [
        ("answered", "", None),
        ("failed", "overloaded", 503),
        ("truncated", "cut", 503),
        ("truncated", "AIPerf cancelled it", None),
    ]
    assert point.notes[-1] == "without 1 request of its warm-up"
    assert np.isnan(point.spread("queue").mid)


def test_aiperfs_figures_alone(read):
    (point,) = read(summary())
    assert (point.name, point.date) == ("tiny, 3 requests/s", "2026-01-02T03:04:05")
    assert point.workload == sk.Workload(requests=9, input_tokens=12, output_tokens=5, rate=3.0)
    assert figures(point, "ttft_text", "tpot", "itl", "e2e", q=0.99) == [300, 300, 300, 300]
    assert np.isnan(figures(point, "ttft", "queue")).all()
    assert (point.count("answered"), point.count("failed")) == (8, 1)
    assert point.row()["output_tokens_per_s"] == 10.0


def test_aiperfs_time_per_token_counts_other_tokens_than_the_server(read):
    (point,) = read(summary(usage_completion_tokens={"unit": "tokens", "avg": 8.0}))
    assert np.isnan(point.spread("tpot").mid)
    assert point.workload.output_tokens == 8
    assert point.row()["output_tokens_per_s"] == 16.0
    assert "its tokenizer counts other tokens" in point.notes[-1]


@pytest.mark.parametrize(
    ("config", "name", "note"),
    [
        ({"models": {"items": [{"name": "a"}, {"name": "b"}]}}, "a, b, burst", ""),
        ({"endpoint": {"model_names": ["a"]}, "loadgen": {"concurrency": 4}}, "a, 4 at once", ""),
        ({"phases": [{"type": "concurrency", "concurrency": 2}]}, "result, 2 at once", ""),
        ({"phases": [{"type": "constant", "rate": 2}]}, "result, 2 requests/s", "by AIPerf's schedule 'constant'"),
        ({"phases": [{"type": "poisson"}] * 2}, "result, burst", "several phases"),
    ],
)
def test_aiperfs_settings(read, config, name, note):
    (point,) = read(summary(input_config=config, is_complete=False, incomplete_reason="stalled"))
    assert point.name == name
    assert note in " ".join(point.notes)
    assert "the run is incomplete: stalled" in point.notes


def test_aiperfs_run_in_which_nothing_was_answered(read):
    (point,) = read(without(summary(), "request_count", "request_throughput", "time_to_first_token"))
    assert (point.count("answered"), point.count("failed")) == (0, 1)
    assert np.isnan(point.throughput()["requests_per_s"])


def test_files_of_aiperf_itself():
    (point,), (alone,) = ours("aiperf_0.13.0.jsonl"), ours("aiperf_0.13.0.json")
    assert point.name == alone.name == "tiny, 2 at once"
    for name in ("ttft_text", "tpot", "itl", "e2e"):
        for q in measures.QUANTILES:
            assert point.spread(name, q).mid == pytest.approx(alone.spread(name, q).mid, abs=2e-3)
    assert [point.count(state) for state in ("answered", "failed")] == [4, 1]
    assert [alone.count(state) for state in ("answered", "failed")] == [4, 1]


# -- all of them


def test_files_of_other_clients_stand_in_one_table():
    both = sk.ServeBench.load(FILES / "vllm_0.33.0.json").add(FILES / "guidellm_0.8.1.json", server="guidellm")
    assert both.table()["server"].tolist() == ["tiny", "guidellm", "guidellm"]
    assert "measured with vLLM's benchmark" in repr(both)
    shares = both.goodput(ttft=1e6)
    assert shares.pop("tiny, 30 requests/s") == 0.8  # one of five failed
    assert np.isnan(list(shares.values())).all()  # they know no chunk without text
    assert both.goodput(ttft_text=1e6)["guidellm, 15 requests/s"] == 0.75


@pytest.mark.parametrize("run", [vllm(), sglang(), without(sglang(), *DETAILS)], ids=["vllm", "sglang", "figures"])
def test_files_without_times_of_sending_have_a_saturation_point(read, run):
    answered = {2.0: 1.99, 4.0: 3.9, 8.0: 4.0}
    run = without(run, "start_times", "queue_times", "model_id", "label") | {"tag": "tiny", "label": "tiny"}
    found = sk.ServeBench(
        read(*(run | {"request_rate": rate, "request_throughput": done} for rate, done in answered.items()))
    )
    assert found.saturation() is found.points[1]
    assert sk.ServeBench(found.points[2:]).saturation() is None


@pytest.mark.parametrize(
    "text", ['{"format": 1}', "[]", "years of work", '{"a": 1}\n{"b": 2'], ids=["keys", "list", "words", "cut"]
)
def test_another_file(tmp_path, text):
    path = tmp_path / "thesis.json"
    path.write_text(text)
    with refused(ValueError):
        sk.ServeBench.load(path)


def test_a_file_that_is_no_text(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(range(256)))
    with refused(ValueError):
        brought.read(path)


@pytest.mark.parametrize(
    "objects",
    [
        [without(vllm(), "duration")],
        [without(sglang(), "completed")],
        [report(without(benchmark(POISSON, [ONE]), "config"))],
        [FIRST, without(SECOND, "metadata")],
        [without(summary(), "input_config")],
    ],
    ids=["vllm", "sglang", "guidellm", "aiperf", "aiperf_summary"],
)
def test_a_damaged_file(read, objects):
    with refused(ValueError):
        read(*objects)


def test_a_damaged_list(read):
    with pytest.raises(ValueError, match=r"result\.json is a damaged result of vLLM, .*shorter.*--save-result"):
        read(vllm(itls=[]))
