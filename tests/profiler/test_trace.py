"""Chrome traces from torch.profiler, whole and damaged."""

import gzip
import json

import pytest
import torch

from surokit.profiler.report import Profile
from surokit.profiler.trace import read_chrome
from tests.profiler.models import train


def test_a_trace_that_torch_exported(tmp_path):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        train(4, each=lambda step, loss: loss.item())
    path = tmp_path / "trace.json"
    prof.export_chrome_trace(str(path))
    p = Profile.from_trace(path)
    assert p.summary["steps"] == 4
    assert p.summary["busy_ms"] > 0
    assert "aten::addmm" in set(p.ops.op)
    assert p.summary["syncs_per_step"] >= 0.75  # the last read comes after the last step
    (tmp_path / "trace.json.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert Profile.from_trace(tmp_path / "trace.json.gz").summary == p.summary


def test_damaged_events_are_counted_and_the_rest_is_read(tmp_path):
    good = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1.5, "dur": 2.25, "tid": "main", "args": {}}
    bad = [
        {**good, "ts": "soon"},
        {**good, "dur": None},
        {k: v for k, v in good.items() if k != "dur"},
        {**good, "dur": -5},
        7,
    ]
    path = tmp_path / "t.json"
    path.write_text(json.dumps([good, *bad, {"ph": "M", "name": "x"}]))
    recording = read_chrome(path)
    assert recording.timeline.duration_E().tolist() == [2250]
    assert any("3 damaged" in note for note in recording.notes)
    assert recording.timeline.damaged == 1
    assert Profile.from_trace(path).summary["busy_ms"] == pytest.approx(0.00225)


def test_unreadable_traces(tmp_path):
    with pytest.raises(FileNotFoundError, match="no trace at"):
        read_chrome(tmp_path / "none.json")
    (tmp_path / "cut.json").write_text('{"traceEvents": [{"ph": "X"')
    with pytest.raises(ValueError, match="not a complete Chrome trace"):
        read_chrome(tmp_path / "cut.json")
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(b'{"traceEvents": []}')[:-9])
    with pytest.raises(ValueError, match="not a complete Chrome trace"):
        read_chrome(tmp_path / "cut.json.gz")
    (tmp_path / "other.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match="no list of trace events"):
        read_chrome(tmp_path / "other.json")


def test_an_empty_trace_is_a_profile_that_says_so(tmp_path):
    (tmp_path / "empty.json").write_text('{"traceEvents": []}')
    assert any("no events" in note for note in Profile.from_trace(tmp_path / "empty.json").notes)
