"""The benchmark of what measuring costs: its arithmetic, and a short run of a small loop."""

import json

import pytest

from surokit.bench import overhead, result
from surokit.bench.__main__ import main
from surokit.train.errors import NonFiniteError

TINY = {"layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "vocab": 64, "ffn": 48}


@pytest.fixture(scope="module")
def data():
    return overhead.run(3, 3, shape=TINY, length=16)


def test_every_way_takes_its_turns(data):
    ways = {way["name"]: way for way in data["overhead"]}
    assert set(ways) == set(overhead.NOTES)
    assert all(len(way["turns_ms"]) == 3 and min(way["turns_ms"]) > 0 for way in ways.values())
    assert ways[overhead.PLAIN]["overhead"] == ways[overhead.PLAIN]["low"] == 0
    assert {name: ways[name]["bar"] for name in overhead.BARS} == overhead.BARS
    assert all(way["low"] <= way["overhead"] <= way["high"] for way in ways.values())
    # a profiler that starts and stops has something to do; nothing has not
    assert ways["torch.profiler"]["start_stop_ms"] > ways[overhead.PLAIN]["start_stop_ms"]
    assert ways["sk.profile"]["start_stop_ms"] > ways[overhead.PLAIN]["start_stop_ms"]
    assert data["mark_us"] > 0


def test_a_window_is_scaled_to_its_distance():
    turns = {
        overhead.PLAIN: [100.0, 100.0, 100.0],
        "sampled windows": [150.0, 140.0, 160.0],
        "always-on": [101.0, 99.0, 102.0],
    }
    sampled = overhead.row_of("sampled windows", turns, [1.0, 2.0, 3.0], steps=4)
    assert sampled["overhead"] == pytest.approx(0.5 * 4 / 200)
    assert (sampled["low"], sampled["high"]) == pytest.approx((0.4 * 4 / 200, 0.6 * 4 / 200))
    assert sampled["start_stop_ms"] == 2
    assert overhead.row_of("always-on", turns, [0.0], steps=4)["overhead"] == pytest.approx(0.01)


def test_the_interval_is_of_the_median():
    values = [0.0] * 20 + [1.0] * 20 + [0.5] * 61
    assert overhead.interval(values) == (0.5, 0.5)
    low, high = overhead.interval([float(v) for v in range(101)])
    assert 30 < low < 45 < 55 < high < 70


def test_the_table(data, tmp_path):
    text = overhead.table(data)
    assert "| always-on | " in text
    assert "| < 0.5% |" in text
    assert "A step takes" in text
    raw = tmp_path / "overhead.json"
    result.write(data, raw)
    page = result.filled("<!-- table: overhead.json -->\n<!-- end of table -->", tmp_path)
    assert overhead.table(json.loads(raw.read_text())) in page


@pytest.mark.parametrize("arguments", [["--rounds", "1"], ["--steps", "2"], ["--steps", "13"]])
def test_turns_that_cannot_be(arguments, capsys):
    assert main(["overhead", *arguments]) == 2
    assert "at least 2 rounds and 3 to 12 steps" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_is_told_in_a_line(monkeypatch, capsys):
    def diverges(**turns):
        raise NonFiniteError("5 steps in a row were not finite.")

    monkeypatch.setattr(overhead, "run", diverges)
    assert main(["overhead"]) == 2
    assert capsys.readouterr().err == "surokit.bench: 5 steps in a row were not finite.\n"
    monkeypatch.setattr(overhead, "run", lambda **turns: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # a fault of ours has its traceback
        main(["overhead"])


def test_the_command(monkeypatch, data, tmp_path, capsys):
    asked = []

    def run(**turns):
        asked.append(turns)
        return data

    monkeypatch.setattr(overhead, "run", run)
    out = tmp_path / "raw.json"
    assert main(["overhead", "--rounds", "5", "--out", str(out)]) == 0
    assert asked == [{"rounds": 5, "steps": 4}]
    assert "always-on" in capsys.readouterr().out
    assert json.loads(out.read_text())["step_ms"] == data["step_ms"]
