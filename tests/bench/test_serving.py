"""The stub's times are known, and the raw results of servers make their tables and pictures."""

import json

import pytest

import surokit as sk
from surokit.bench import serving
from surokit.serving.served import described
from tests.serving.servers import Words, listening

ENVIRONMENT = {"device": "cpu", "cpu": "a processor", "cores": 2, "torch": "2", "date": "today"}


def test_the_clients_own_delay():
    data = json.loads(json.dumps(serving.run("client", "tiny")))
    rows = data["serving"]["client"]
    assert [row["answered"] for row in rows] == list(serving.CLIENT_AT_ONCE)
    # what arrives can be late, and never early
    last_ms = serving.FIRST_MS + (serving.CLIENT_TOKENS - 1) * serving.EACH_MS
    assert all(row["ttft_p50_ms"] >= serving.FIRST_MS - 1 and row["e2e_p50_ms"] >= last_ms - 1 for row in rows)
    assert len(serving.table(data).splitlines()) == 7


@pytest.mark.soak
def test_the_client_keeps_up_with_ten_thousand_requests():
    rows = serving.run("client")["serving"]["client"]
    assert rows[-1]["answered"] == 10_240
    assert rows[0]["ttft_p50_ms"] < serving.FIRST_MS + 3
    assert all(row["cpu"] < 1 for row in rows)


def test_a_raw_result_is_read_as_it_was(tmp_path):
    work = sk.Workload(requests=6, input_tokens=20, output_tokens=4)
    with listening(Words()) as url:
        found = sk.serve_bench(url, workload=work, server="words")
    points = [{**described(p), "answers": [a.line() for a in p.answers]} for p in found.points]
    data = json.loads(
        json.dumps(
            {"benchmark": "words", "settings": {"a": 1}, "environment": ENVIRONMENT, "serving": {"points": points}}
        )
    )
    assert serving.found_in(data).points == found.points
    assert serving.table(data).splitlines()[2].startswith("| words | burst | 6 |")
    serving.draw(data, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").exists()
