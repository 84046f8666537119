"""The recorded spans of an emulated device: the raw file, its table, its picture, and what they have to show."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from surokit.bench import result, spans
from surokit.bench.__main__ import main
from surokit.offload.timeline import Span

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def raw():
    """Two steps of 10 ms and an update of 4 ms, of which 3 are a wait for 2 ms of the link."""
    made_up = [
        each
        for at in (0.0, 0.014)
        for each in (
            ["MainThread", "compute", at, at + 0.01],
            ["link down", "work", at + 0.011, at + 0.013],
            ["MainThread", "wait slot", at + 0.0105, at + 0.0135],
            ["MainThread", "update", at + 0.01, at + 0.014],
        )
    ]
    data = result.result("spans of an emulated device", {"steps": 2}, [], "")
    return data | {"spans": {"no offload": [["MainThread", "compute", 0.0, 0.02]], "made up": made_up}}


def test_the_table(raw):
    rows = spans.table(raw).splitlines()
    assert "| no offload | 10 | 0 | 0 | 0 | 0 | 0 | 0 |" in rows
    assert "| made up | 14 | 1 | 3 | 2 | 0 | 0 | 0 |" in rows
    assert "steps 2; " in rows[-1]


def test_the_picture_follows_from_the_raw_file_alone(raw, tmp_path):
    for name in ("a.png", "b.png"):
        spans.draw(copy.deepcopy(raw), tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    titles = [axes.get_title(loc="left") for axes in spans.figure(raw).axes]
    assert titles == ["no offload: 10 ms a step", "made up: 14 ms a step"]
    other = copy.deepcopy(raw)
    other["spans"]["made up"][0][3] += 1e-4
    assert spans.digest(other) != spans.digest(raw)


def test_a_run_from_the_command_line(tmp_path, capsys):
    out = tmp_path / "spans.json"
    assert main(["spans", "--steps", "1", "--out", str(out)]) == 0
    assert "| OffloadAdamW |" in capsys.readouterr().out
    data = json.loads(out.read_text())
    assert [len(each) > 0 for each in data["spans"].values()] == [True] * 3
    assert main(["spans", "--steps", "0"]) == 2
    assert "at least one to record" in capsys.readouterr().err


def test_the_committed_spans_are_of_deferral():
    """Synchronously nothing of the link or of AdamW is beside the computing; with ZenFlow gradients are."""
    data = json.loads((ROOT / "docs" / "measurements" / "offload-timeline.json").read_text(encoding="utf-8"))

    def beside(way: str, lane: str) -> float:
        found = [Span(*each) for each in data["spans"][way]]
        computing = [each for each in found if each.what == "compute"]
        mine = [each for each in found if each.lane == lane and each.what == "work"]
        together = sum(max(0.0, min(a.stop_s, b.stop_s) - max(a.start_s, b.start_s)) for a in mine for b in computing)
        return together / sum(each.seconds for each in mine)

    for lane in ("link down", "adam", "link up"):
        assert beside("OffloadAdamW", lane) < 0.02
    assert beside("ZenFlow, k = 0.1, S = 4", "link down") > 0.5
    step_ms = [spans.step_ms(data, timeline) for timeline in spans.timelines(data).values()]
    assert step_ms[0] < step_ms[2] < step_ms[1]
