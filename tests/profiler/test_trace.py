"""Chrome traces: from torch.profiler and other tools, whole, damaged and cut off; and out and back exactly."""

import codecs
import gc
import gzip
import json
import tracemalloc
from dataclasses import replace
from zlib import crc32

import numpy as np
import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surokit.profiler.analysis.timeline import Event, Kind, Timeline
from surokit.profiler.record import chrome_trace, trace_stream
from surokit.profiler.record.chrome_trace import read_chrome, write_chrome
from surokit.profiler.record.recording import pack
from surokit.profiler.report.profile import Profile
from tests.profiler.models import train
from tests.profiler.test_hta import synthetic
from tests.profiler.test_timeline import nested_calls
from tests.profiler.traces import gpu_recording
from tests.refusals import refused

GOOD = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1.5, "dur": 2.25, "pid": 1, "tid": "main", "args": {}}
SIX = [
    {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
    *(
        {**GOOD, "ts": 10 * k + 0.125, "name": f"op {k}", "args": {"Input Dims": [[2, 3], []], "n": {"a": 1}}}
        for k in range(6)
    ),
]


@pytest.fixture
def written(tmp_path):
    """Writes text, bytes or a JSON value as a file and reads it as a trace."""

    def run(content, name="t.json", **options):
        if not isinstance(content, (str, bytes)):
            content = json.dumps(content)
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return read_chrome(tmp_path / name, **options)

    return run


def rows(timeline):
    """Each event with its name, in the timeline's order."""
    return [(timeline.names[row[1]], *row[:1], *row[2:]) for row in timeline.columns().T.tolist()]


def has_note(recording, text):
    return any(text in note for note in recording.notes)


# ------------------------------------------------------------------------------------------------ torch's own


def test_a_trace_that_torch_exported(tmp_path):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as prof:
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
    recording = read_chrome(path)
    assert len(recording.timeline) == len(json.loads(path.read_text())["traceEvents"]) - left_out(path)
    live = {(e.name(), e.start_ns(), e.duration_ns()) for e in prof.profiler.kineto_results.events()}
    timeline = recording.timeline
    read = zip(timeline.name_E.tolist(), timeline.start_E.tolist(), timeline.duration_E().tolist())
    assert {(timeline.names[n], start, length) for n, start, length in read} <= live  # to the nanosecond, since 1970


def test_a_step_of_a_trace_is_one_turn_of_the_loop(written):
    def turn(k, *names):
        return [
            {**GOOD, "cat": "user_annotation", "name": f"Optimizer.step#{name}", "ts": 100 * k + start, "dur": length}
            for name, start, length in names
        ]

    gan = "Adam.step", 40, 10
    critic = "SGD.step", 80, 10
    both = [{**GOOD, "ts": 0}, *(e for k in range(3) for e in turn(k, gan, critic))]
    assert written(both).marks_ns == (90_000, 190_000, 290_000)
    often = [*both, *turn(0, ("Adam.step", 20, 10))]
    assert written(often).marks_ns == (30_000, 50_000, 150_000, 250_000)
    inside = "AdamW.step", 82, 5  # a class whose step calls its parent's
    nested = [{**GOOD, "ts": 0}, *(e for k in range(3) for e in turn(k, inside, critic))]
    assert written(nested).marks_ns == (90_000, 190_000, 290_000)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_an_optimizers_counters_are_no_reads_of_the_device(written, on_gpu):
    def event(category, name, start, length, **args):
        return {**GOOD, "cat": category, "name": name, "ts": start, "dur": length, "args": args}

    read = "aten::_local_scalar_dense"
    counters = [event("cpu_op", read, 110 + 2 * k, 1) for k in range(20)]
    device = [
        event("cuda_runtime", "cudaLaunchKernel", 92, 4, correlation=1),
        event("kernel", "gemm", 96, 20, correlation=1, stream=7),
        event("cuda_runtime", "cudaStreamSynchronize", 202, 50, correlation=2),
    ]
    recording = written(
        [
            event("cpu_op", "aten::mm", 90, 8),
            event("user_annotation", "Optimizer.step#AdamW.step", 100, 80),
            *counters,
            event("cpu_op", read, 200, 60),  # of the loss, on the device where there is one
            *(device if on_gpu else []),
        ]
    )
    assert [(s.call, s.end_ns - s.start_ns) for s in recording.syncs] == [(".item()", 60_000)]


def left_out(path):
    kept = ("cpu_op", "user_annotation")
    return sum(e.get("cat") not in kept or e["ph"] != "X" for e in json.loads(path.read_text())["traceEvents"])


# ------------------------------------------------------------------------------------------------ damage


def test_damaged_events_are_counted_and_the_rest_is_read(written, tmp_path):
    bad = [
        {**GOOD, "ts": "soon"},
        {**GOOD, "dur": None},
        {k: v for k, v in GOOD.items() if k != "dur"},
        {**GOOD, "dur": -5},
        {**GOOD, "ts": float("nan")},
        {**GOOD, "dur": float("inf")},
        {**GOOD, "ts": 1e300},
        {**GOOD, "cat": ["cpu_op"]},
        {**GOOD, "args": "none"},
        {**GOOD, "args": {"correlation": 2**70}},
        {**GOOD, "tid": {}},
        7,
    ]
    recording = written([GOOD, *bad, {"ph": "M", "name": "x"}, GOOD])
    assert recording.timeline.duration_E().tolist() == [2250, 2250]
    assert recording.timeline.damaged == len(bad)
    p = Profile.from_trace(tmp_path / "t.json")
    assert p.summary["busy_ms"] == pytest.approx(0.00225)
    assert any("12 damaged events" in note for note in p.notes)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "  \n",
        b"\x1f\x8b",
        bytes(range(256)) * 9,
        "7",
        '{"a": 1}',
        '{"traceEvents": 3}',
        '{"traceEv',
        "{7}",
        '{"a" 7}',
        '{"a": ' + "[" * 100_000,
    ],
)
def test_what_is_no_trace_is_refused(written, content):
    with refused(ValueError):
        written(content)


def test_no_file_and_no_unit(tmp_path, written):
    for path in (tmp_path / "none.json", tmp_path):
        with refused(FileNotFoundError):
            read_chrome(path)
    with refused(ValueError):
        written([GOOD], unit="ms")


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("style", [{}, {"separators": (",", ":")}, {"indent": 1}])
@pytest.mark.parametrize("piece", [50, 400, 1 << 16])
def test_a_trace_cut_off_anywhere_gives_every_event_before_the_cut(written, monkeypatch, style, piece, zipped):
    monkeypatch.setattr(trace_stream, "PIECE", piece)
    head = '{"schemaVersion": 1, "traceEvents": '
    text = head + json.dumps(SIX, **style) + ', "traceName": "x"}'
    whole = rows(written(text).timeline)
    assert [name for name, *_ in whole] == [f"op {k}" for k in range(6)]
    ends, at = [], len(head) + 1  # where each event's text ends
    for _ in SIX:
        at = text.index("{", at)
        at = json.JSONDecoder().raw_decode(text, at)[1]
        ends.append(at)
    close = text.index("]", at)
    for cut in range(len(head) + 1, len(text), 11 if zipped else 5):
        data = text[:cut].encode()
        recording = written(gzip.compress(data)[:-8] if zipped else data)
        complete = sum(end <= cut for end in ends)
        assert rows(recording.timeline) == whole[: max(complete - 1, 0)]
        assert has_note(recording, f"ends before its list of events does: {complete} complete") == (cut <= close)
        assert recording.timeline.damaged == 0


def test_a_gzip_stream_cut_or_broken_in_the_middle(written, tmp_path):
    synthetic(tmp_path / "whole.json", 5000)
    data = gzip.compress((tmp_path / "whole.json").read_bytes())
    for broken in (data[: len(data) // 2], data[: len(data) // 2] + b"!" * (len(data) // 2)):
        recording = written(broken, "t.json.gz")
        assert 1500 < len(recording.timeline) < 3500
        assert has_note(recording, "ends before its list of events does")
        assert (recording.timeline.damaged == 0) or broken.endswith(b"!")  # what follows a break is anything


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_damage_anywhere_loses_little_and_never_fails_otherwise(written, data):
    text = json.dumps({"schemaVersion": 1, "traceEvents": SIX, "after": [{"a": 1}, {"b": 2}]})
    whole = [(f"op {k}", Kind.OP, 10_000 * k + 125, 10_000 * k + 2375, crc32(b"main"), -1, -1, -1, 0) for k in range(6)]
    at = data.draw(st.integers(0, len(text) - 1))
    junk = data.draw(st.text('{}[],:"\\ x0-', max_size=3))
    drop = data.draw(st.integers(0, 4))
    try:
        found = rows(written(text[:at] + junk + text[at + drop :]).timeline)
    except ValueError:
        assert at <= text.index("[")  # the list itself is gone
    else:
        before = [row for row in whole if at > text.index("}}}", text.index(row[0])) + 3]
        assert set(before) <= set(found)
        assert len(found) <= 6


def test_a_damaged_event_costs_only_itself(written):
    good = [json.dumps({**GOOD, "ts": k}) for k in range(4000)]
    bad = ['{"ph": "X", "cat": "cpu_op", "ts": soon}', '{"ph": "X", "name": "\\q"}', '{"ph" "X"}', "{]}"]
    lines = good.copy()
    for k, text in enumerate(bad):
        lines.insert(900 * (k + 1), text)
    recording = written("[" + ",\n".join(lines) + "]")
    assert len(recording.timeline) == 4000
    assert recording.timeline.damaged == 4
    assert not has_note(recording, "ends before")
    last = written("[" + ",\n".join([*good[:3], bad[0]]) + "]")
    assert (len(last.timeline), last.timeline.damaged) == (3, 1)
    assert not has_note(last, "ends before")


# ------------------------------------------------------------------------------------------------ forms


def forms():
    events = json.dumps(SIX)
    after = '"stackFrames": {"1": {"name": "f"}}, "list": [{"a": 1}, {"b": 2}]'
    yield "a list", events
    yield "an object", f'{{"traceEvents": {events}}}'
    yield "members around", f'{{"a": [1, {{"traceEvents": 2}}], "x": "]}}", "traceEvents": {events}, {after}}}'
    yield "lines", "[\n" + ",\n".join(json.dumps(e) for e in SIX) + "\n]"
    yield "a comma too many", "[" + ",".join(json.dumps(e) for e in SIX) + ",\n]"
    yield "indented", json.dumps(SIX, indent=4)
    yield "boundaries inside events", json.dumps([*SIX, {"ph": "i", "args": {"x": [{"a": 1}, {"b": 2}]}}])
    yield "NaN", json.dumps([*SIX, {"ph": "C", "args": {"x": float("nan"), "y": -float("inf")}}])
    yield "a control character", events.replace("Input Dims", "Input\tDims")
    yield "damaged before", f'{{"deviceProperties": [{{"name": \\}}], "traceEvents": {events}}}'
    yield "damaged after", f'{{"traceEvents": {events}, "traceName": "C:\\Users\\me"}}'
    yield "a BOM", codecs.BOM_UTF8 + events.encode()
    yield "UTF-16", events.encode("utf-16")
    yield "bytes that are no text", events.encode().replace(b"python", b"p\xff\xfe")
    half = len(events) // 2
    yield "two gzip streams", gzip.compress(events[:half].encode()) + gzip.compress(events[half:].encode())
    yield "padding", gzip.compress(events.encode()) + bytes(64)


@pytest.mark.parametrize("piece", [1, 7, 200, 1 << 16])
@pytest.mark.parametrize(("form", "content"), [pytest.param(*form, id=form[0]) for form in forms()])
def test_every_form_gives_the_same_events(written, monkeypatch, form, content, piece):
    monkeypatch.setattr(trace_stream, "PIECE", piece)
    expected = [(f"op {k}", Kind.OP, 10_000 * k + 125, 10_000 * k + 2375) for k in range(6)]
    recording = written(content)
    assert [row[:4] for row in rows(recording.timeline)] == expected
    assert recording.timeline.damaged == 0
    assert not has_note(recording, "ends before")


def test_an_empty_trace_is_a_profile_that_says_so(tmp_path):
    for text in ('{"traceEvents": []}', "[]", "[ ]\n"):
        (tmp_path / "empty.json").write_text(text)
        assert any(
            "no torch operator was recorded" in note for note in Profile.from_trace(tmp_path / "empty.json").notes
        )


def test_long_values_among_the_members(written, monkeypatch):
    monkeypatch.setattr(trace_stream, "PIECE", 1000)
    frames = {str(k): {"name": "f" * 50, "parent": k - 1} for k in range(3000)}
    device = [{"id": 0, "name": "a GPU", "more": frames}]
    assert written({"stackFrames": frames, "deviceProperties": device, "traceEvents": SIX}).device == "a GPU"


# ------------------------------------------------------------------------------------------------ units


def test_times_are_microseconds_whatever_is_displayed(written):
    whole = {**GOOD, "ts": 5, "dur": 7}
    for shown in ("ms", "ns"):
        assert written({"displayTimeUnit": shown, "traceEvents": [GOOD]}).timeline.end_E.tolist() == [3750]
        recording = written({"displayTimeUnit": shown, "traceEvents": [whole]})
        assert recording.timeline.end_E.tolist() == [12_000]
        assert has_note(recording, "unit='ns'") == (shown == "ns")
    assert not has_note(written({"displayTimeUnit": "ns", "schemaVersion": 1, "traceEvents": [whole]}), "unit=")
    assert written([whole], unit="ns").timeline.end_E.tolist() == [12]
    since_1970 = written([{**whole, "ts": 1_790_000_000_123_456_789}])
    assert since_1970.timeline.end_E.tolist() == [1_790_000_000_123_456_796]
    assert has_note(since_1970, "are nanoseconds")
    beyond = written([{**whole, "ts": 3 * 10**17}, whole], unit="us").timeline
    assert (beyond.end_E.tolist(), beyond.damaged) == ([12_000], 1)


def test_nanoseconds_of_large_microseconds_are_kept(written):
    text = json.dumps([{**GOOD, "ts": "@"}, {**GOOD, "ts": 1_711_000_000_000_009, "dur": 1}])
    recording = written(text.replace('"@"', "1711000000000001.123"))
    assert recording.timeline.start_E.tolist() == [1_711_000_000_000_001_123, 1_711_000_000_000_009_000]
    assert recording.timeline.duration_E().tolist() == [2250, 1000]


def test_base_time_is_added(written):
    base = 1_790_000_000_000_000_001
    expected = [base + 1500]
    assert written({"baseTimeNanoseconds": base, "traceEvents": [GOOD]}).timeline.start_E.tolist() == expected
    assert written({"traceEvents": [GOOD], "baseTimeNanoseconds": base}).timeline.start_E.tolist() == expected
    for odd in (0, -1, 2**70, "then", None, 1.5):
        assert written({"baseTimeNanoseconds": odd, "traceEvents": [GOOD]}).timeline.start_E.tolist() == [1500]


# ------------------------------------------------------------------------------------------------ other tools


@given(st.lists(nested_calls(), min_size=1, max_size=3), st.randoms())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_beginnings_and_ends_are_the_same_spans(written, threads, random):
    spans, bounds = [], []
    for tid, calls in enumerate(threads):
        calls = [(a, b) for a, b in calls if b > a]
        one = {"cat": "cpu_op", "pid": 1, "tid": tid}
        for a, b in calls:
            spans.append({**one, "ph": "X", "name": f"{b - a} long", "ts": a, "dur": b - a})
        moments = [(b, 0, -a, {**one, "ph": "E", "ts": b}) for a, b in calls]  # ends before beginnings, the inner first
        moments += [(a, 1, -b, {**one, "ph": "B", "ts": a, "name": f"{b - a} long"}) for a, b in calls]
        bounds.append([event for *_, event in sorted(moments, key=lambda m: m[:3])])
    mixed = []
    while any(bounds):  # threads interleave, each in its own order
        mixed.append(random.choice([lane for lane in bounds if lane]).pop(0))
    assert sorted(rows(written(mixed).timeline)) == sorted(rows(written(spans).timeline))
    assert written(mixed).timeline.damaged == 0


def test_a_beginning_without_end_and_an_end_without_beginning(written):
    one = {"cat": "cpu_op", "pid": 1, "tid": 1}
    events = [
        {**one, "ph": "E", "ts": 1},
        {**one, "ph": "B", "ts": 2, "name": "never ends"},
        {**one, "ph": "B", "ts": 3, "name": "aten::mm", "args": {"Sequence number": 9}},
        {"ph": "E", "pid": 1, "tid": 1, "ts": 5},
        {**one, "ph": "B", "ts": "soon", "name": "no time"},
        {**one, "pid": 2, "ph": "B", "ts": 4, "name": "another process"},
        {"ph": "B", "pid": 3, "tid": 1, "ts": 1, "name": "no category"},
        {"ph": "E", "pid": 3, "tid": 1, "ts": 2},
    ]
    recording = written(events)
    assert rows(recording.timeline) == [("aten::mm", Kind.OP, 3000, 5000, 1, -1, -1, 9, 0)]
    assert recording.timeline.damaged == 4


def test_categories_and_fields_of_old_torch(written):
    old = [
        {**GOOD, "cat": "Operator", "tid": 4, "args": {"External id": 3}},
        {
            **GOOD,
            "cat": "Runtime",
            "name": "cudaLaunchKernel",
            "tid": 4,
            "args": {"external id": 3, "correlation": "8"},
        },
        {**GOOD, "cat": "Kernel", "tid": "stream 7", "args": {"stream": 7, "external id": 3, "correlation": 8}},
        {**GOOD, "cat": "Memcpy", "args": {"stream": "7", "bytes": 99}},
        {**GOOD, "cat": "Trace", "name": "PyTorch Profiler (0)"},
    ]
    found = sorted(row[1:2] + row[4:] for row in rows(written(old).timeline))
    assert found == [(0, 4, -1, 3, -1, 0), (1, 4, 8, 3, -1, 0), (2, 7, 8, 3, -1, 0), (3, 7, -1, -1, -1, 99)]


def test_threads_may_be_words(written):
    threads = {row[4] for row in rows(written([GOOD, {**GOOD, "tid": "loader"}, {**GOOD, "tid": None}]).timeline)}
    assert len(threads) == 3


def test_jax_names_its_streams_and_no_categories(written):
    def label(kind, pid, name, **more):
        return {"ph": "M", "name": f"{kind}_name", "pid": pid, "args": {"name": name}, **more}

    labels = [
        label("process", 1, "/device:GPU:0"),
        label("thread", 1, "Stream #18(Compute)", tid=18),
        label("thread", 1, "XLA Ops", tid=19),
        label("process", 2, "/device:TPU:0"),
        label("thread", 2, "XLA Ops", tid=3),
        label("process", 9, "/host:CPU"),
        {"ph": "M", "name": "thread_name"},
    ]
    event = {"ph": "X", "ts": 1, "dur": 2, "args": {"correlation_id": 5}}
    events = [
        {**event, "pid": 1, "tid": 18, "name": "fusion"},
        {**event, "pid": 1, "tid": 18, "name": "MemcpyD2H"},
        {**event, "pid": 1, "tid": 19, "name": "fusion"},  # derived from the stream: it would count twice
        {**event, "pid": 2, "tid": 3, "name": "dot"},
        {**event, "pid": 9, "tid": 1, "name": "python"},
    ]
    recording = written({"displayTimeUnit": "ns", "traceEvents": [*labels, *events]})
    kinds = [(name, kind) for name, kind, *_ in sorted(rows(recording.timeline))]
    assert kinds == [("MemcpyD2H", Kind.MEMCPY), ("dot", Kind.KERNEL), ("fusion", Kind.KERNEL)]
    assert recording.timeline.correlation_E.tolist() == [5, 5, 5]
    assert has_note(recording, "2 devices")


def test_a_trace_of_other_things_says_so(written):
    assert has_note(written([{**GOOD, "cat": "toplevel"}, {**GOOD, "cat": "blink"}]), "categories: blink, toplevel")


def test_a_device_clock_that_is_behind_is_said_and_no_wait_is_negative(tmp_path):
    host = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "dur": 5}
    kernel = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "dur": 10}
    events = []
    for k in range(4):
        events.append({**host, "ts": 100 * k + 50, "args": {"correlation": k}})
        events.append({**kernel, "ts": 100 * k + (20 if k else 60), "args": {"stream": 7, "correlation": k}})
    (tmp_path / "t.json").write_text(json.dumps(events))
    p = Profile.from_trace(tmp_path / "t.json")
    assert any("3 of 4" in note and "30 us" in note and "clock" in note for note in p.notes)
    assert all(p.summary[f"{wait}_wait_ms"] >= 0 for wait in ("host", "kernel", "other"))


# ------------------------------------------------------------------------------------------------ size


def test_a_trace_over_the_limit_is_refused_with_its_size(tmp_path):
    path = tmp_path / "t.json"
    synthetic(path, 5000)
    zipped = tmp_path / "t.json.gz"
    zipped.write_bytes(gzip.compress(path.read_bytes()))
    size = path.stat().st_size / 2**30
    assert trace_stream.uncompressed_bytes(path) == trace_stream.uncompressed_bytes(zipped) == path.stat().st_size
    for file in (path, zipped):
        with refused(ValueError):
            read_chrome(file, limit_gib=0.001)
        assert len(read_chrome(file, limit_gib=size * 1.01).timeline) == 5000


def test_the_size_of_many_gzip_streams_is_estimated_from_all(tmp_path):
    parts = [(f"{k} " * 500).encode() for k in range(300)]
    (tmp_path / "t.gz").write_bytes(b"".join(map(gzip.compress, parts)))
    assert trace_stream.uncompressed_bytes(tmp_path / "t.gz") == sum(map(len, parts))


def test_free_memory_is_the_limit_otherwise(monkeypatch, written):
    assert 0 < chrome_trace.free_gib() <= psutil.virtual_memory().total / 2**30
    monkeypatch.setattr(chrome_trace, "free_gib", lambda: 1e-9)
    with refused(ValueError):
        written([GOOD])


def test_reading_takes_no_more_memory_than_the_text_has(tmp_path):
    path = tmp_path / "t.json"
    synthetic(path, 30_000)
    assert gc.isenabled()
    tracemalloc.start()
    recording = read_chrome(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert gc.isenabled()
    assert len(recording.timeline) == 30_000
    assert peak < path.stat().st_size


def test_progress_is_shown_for_large_files(written, monkeypatch, capsys):
    written([GOOD])
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(trace_stream, "TALK_FROM", 1000)
    monkeypatch.setattr(trace_stream, "PIECE", 500)
    written([GOOD] * 100)
    shown = capsys.readouterr().err
    assert shown.startswith("reading t.json: 5 %\r")
    assert shown.endswith("reading t.json: 100 %\n")


# ------------------------------------------------------------------------------------------------ out and back


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_what_was_written_is_read_back_exactly(tmp_path, name):
    events = [
        Event(
            Kind.OP, 'aten::mm "x"\n', 1_790_000_000_000_000_001, 1_790_000_000_000_000_003, 77, external=4, sequence=5
        ),
        Event(Kind.KERNEL, "k<µ>", 1_790_000_000_000_999_999, 1_790_000_000_001_000_000, 7, correlation=9),
        Event(Kind.MEMCPY, "Memcpy HtoD", 1_790_000_000_002_000_000, 1_790_000_000_002_000_000, 7, nbytes=4096),
        Event(Kind.ANNOTATION, "Optimizer.step#AdamW.step", 3, 5, -1),
        Event(Kind.OP, "backwards", 9, 8),
    ]
    for recording in (gpu_recording(), gpu_recording(timeline=Timeline.of(events), notes=("as it was",))):
        write_chrome(tmp_path / name, recording, ((0, 5000),))
        again = read_chrome(tmp_path / name)
        assert rows(again.timeline) == rows(recording.timeline)
        assert again.timeline.damaged == recording.timeline.damaged
        none = Timeline.of(())
        assert pack(replace(again, timeline=none)) == pack(replace(recording, timeline=none))


def test_a_profile_survives_the_way_through_perfetto(tmp_path):
    p = Profile(gpu_recording())
    p.to_perfetto(tmp_path / "t.json")
    again = Profile.from_trace(tmp_path / "t.json")
    assert again.summary == p.summary
    assert again.modules.equals(p.modules)
    document = json.loads((tmp_path / "t.json").read_text())
    shown = {e["cat"] for e in document["traceEvents"] if e["ph"] == "X"}
    assert {"cpu_op", "kernel", "module", "step"} <= shown
    stored = document["surokit"]
    for other in ({"timeline": "of a version to come"}, {**stored, "places": []}, {**stored, "back_to_back_ns": [[1]]}):
        (tmp_path / "t.json").write_text(json.dumps({**document, "surokit": other}))
        foreign = Profile.from_trace(tmp_path / "t.json")  # a trace like another
        assert foreign.summary["busy_ms"] > 0
        assert any("is damaged" in note for note in foreign.notes)


def test_writing_streams(tmp_path):
    count = 30_000
    at = np.arange(count)
    columns = np.stack([0 * at, at % 9, 10 * at, 10 * at + 7, 0 * at, -1 + 0 * at, -1 + 0 * at, -1 + 0 * at, 0 * at])
    recording = gpu_recording(timeline=Timeline.from_columns(tuple("abcdefghi"), columns))
    tracemalloc.start()
    write_chrome(tmp_path / "t.json", recording, ())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2.5 * columns.nbytes < (tmp_path / "t.json").stat().st_size * 2
    assert (read_chrome(tmp_path / "t.json").timeline.columns() == recording.timeline.columns()).all()
