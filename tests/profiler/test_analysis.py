"""Exact answers for the hand-made trace, and recordings that say little."""

import json
import math
from dataclasses import fields, replace

import numpy as np
import pytest

from surokit.profiler.analysis.tables import analyse, is_operator
from surokit.profiler.analysis.timeline import Event, Kind, Timeline
from surokit.profiler.record.recording import Recording, Shaped, pack, unpack
from surokit.profiler.report.advice import advise
from tests.profiler.traces import US, events, gpu_recording


@pytest.fixture(scope="module")
def found():
    return analyse(gpu_recording())


def us(values):
    return [round(v * 1000, 6) for v in values]


def rows(table, *columns):
    return list(zip(*(table[c] for c in columns)))


def test_summary_of_the_hand_made_trace(found):
    s = found.summary
    names = ("wall_ms", "busy_ms", "idle_ms", "host_wait_ms", "kernel_wait_ms", "other_wait_ms")
    assert us(s[n] for n in names) == [60, 32, 28, 22, 3, 3]
    assert found.windows == ((30 * US, 90 * US),)
    assert (s["steps"], s["warmup"], s["activity"], s["device"]) == (1, 1, "gpu", "a GPU")
    assert (s["launches_per_step"], s["syncs_per_step"], s["h2d_bytes"], s["d2h_bytes"]) == (3, 1, 0, 4096)
    assert s["tokens_per_s"] == pytest.approx(600 / 60e-6)


def test_lost_time_by_cause(found):
    lost = found.tables["lost"]
    assert lost["cause"] == ["launches", "syncs", "copies", "host"]
    # launches: 2 + 1 before k2, 1 + 3 before k3, 1 before k5; syncs: 55-60 and, the queue being dry, 69-75 less Python;
    # copies: 50-55 exposed
    assert us(lost["ms_per_step"]) == [8, 11, 5, 9]
    assert lost["share"] == pytest.approx([8 / 60, 11 / 60, 5 / 60, 9 / 60])
    assert lost["gpu_hours_per_day"] == pytest.approx([24 * x for x in lost["share"]])
    assert "train.py:7" in lost["evidence"][1]
    assert "train.py:8" in lost["evidence"][3]


def test_modules_are_found_through_launches_and_sequence_numbers(found):
    table = found.tables["modules"]
    assert [
        (m, c, *us([f, b, t, o]))
        for m, c, f, b, t, o in rows(table, "module", "calls", "forward_ms", "backward_ms", "ms", "self_ms")
    ] == [
        ("Net", 1, 13, 14, 27, 6),
        ("a", 1, 7, 14, 21, 21),
        ("(copies)", 0, 5, 0, 5, 5),
    ]
    assert sum(us(table["self_ms"])) == pytest.approx(32)


def test_gaps_syncs_copies_kernels(found):
    t = found.tables
    gaps = [
        (*us([s, ms]), k, c, f, line, n)
        for s, ms, k, c, f, line, n in rows(t["gaps"], "start_ms", "ms", "kind", "cause", "file", "line", "next")
    ]
    assert gaps == [
        (25, 21, "host wait", "syncs", "/home/me/train.py", 8, "mul"),
        (10, 4, "other wait", "launches", "", 0, "gemm"),
        (0, 3, "host wait", "launches", "", 0, "add"),
    ]
    assert [(f, n, c, k, *us([ms])) for f, n, c, k, ms in rows(t["syncs"], "file", "line", "call", "count", "ms")] == [
        ("/home/me/train.py", 7, ".item()", 1, 15)
    ]
    assert [
        (*r[:3], *us(r[3:4]), *r[4:]) for r in rows(t["copies"], "direction", "count", "bytes", "ms", "pinned")
    ] == [("device to host", 1, 4096, 7, False)]
    assert {k: (c, *us([o])) for k, c, o in rows(t["kernels"], "kernel", "calls", "self_ms")} == {
        "add": (1, 7),
        "gemm": (1, 6),
        "mul": (1, 14),
    }


def test_phases_divide_the_wall(found):
    # sync: 55-60 of the last gap; other: Python 60-69; backward: 69-90; forward: what came before the copy
    phases = {k: round(v * 1000, 6) for k, v in found.summary["phases_ms"].items()}
    assert phases == {"sync": 5, "data": 0, "copies": 5, "optimizer": 0, "backward": 21, "forward": 20, "other": 9}


def test_advice_names_the_line(found):
    advice = advise(found.summary, found.tables)
    by_rule = dict(zip(advice["rule"], rows(advice, "advice", "gain_ms", "file", "line")))
    text, gain, file, line = by_rule["sync"]
    assert "train.py:7" in text
    assert (round(gain * 1000, 6), file, line) == (11, "/home/me/train.py", 7)
    assert "pageable copy" in by_rule
    assert advice["gain_ms"] == sorted(advice["gain_ms"], reverse=True)


def test_a_wait_that_nobody_recorded_is_still_a_sync():
    found = analyse(gpu_recording(syncs=()))
    assert found.tables["syncs"]["call"] == ["cudaStreamSynchronize"]
    assert us(found.tables["lost"]["ms_per_step"])[1] == 11


def test_a_sync_noted_at_its_start_takes_the_wait_that_follows():
    noted = replace(gpu_recording().syncs[0], start_ns=46 * US + 500, end_ns=46 * US + 500, call="cuda sync")
    table = analyse(gpu_recording(syncs=(noted,))).tables["syncs"]
    assert rows(table, "call", "line", "count") == [("aten::_local_scalar_dense", 7, 1)]
    assert us(table["ms"]) == [11.5]


def test_an_unknown_launch_is_not_blamed_on_the_host():
    known = [e for e in events() if e.name != "cudaLaunchKernel"]
    s = analyse(gpu_recording(timeline=Timeline.of(known))).summary
    assert s["host_wait_ms"] == 0
    assert us([s["idle_ms"]]) == [28]


def test_a_second_stream_is_not_counted_twice():
    both = [Event(Kind.KERNEL, "a", 0, 100, 7, 1), Event(Kind.KERNEL, "b", 50, 150, 8, 2)]
    found = analyse(Recording(Timeline.of(both), 0, 200))
    assert us([found.summary["busy_ms"]]) == [0.15]
    assert us(found.tables["kernels"]["self_ms"]) == [0.1, 0.05]


def test_cpu_idle_is_host_wait_split_into_launches_and_host():
    ops = [
        Event(Kind.OP, "aten::a", 0, 100_000),
        Event(Kind.OP, "aten::b", 150_000, 300_000),
        Event(Kind.OP, "aten::c", 900_000, 1_000_000),
    ]
    inner = [Event(Kind.OP, "aten::d", 20_000, 60_000)]
    found = analyse(Recording(Timeline.of(ops + inner), 0, 1_000_000))
    s, lost = found.summary, found.tables["lost"]
    assert us(s[n] for n in ("busy_ms", "idle_ms", "host_wait_ms")) == [350, 650, 650]
    assert us(lost["ms_per_step"]) == [50, 0, 0, 600]
    assert dict(rows(found.tables["ops"], "op", "self_ms"))["aten::a"] == pytest.approx(0.06)
    assert s["launches_per_step"] == 3


def test_wrappers_that_hide_python_do_not_count_as_work():
    assert is_operator("aten::mm")
    assert is_operator("mylib::custom")
    assert is_operator("Torch-Compiled Region: 0/0")
    assert not is_operator("autograd::engine::evaluate_function: MulBackward0")
    assert not is_operator("torch::autograd::AccumulateGrad")
    assert not is_operator("MyFunctionBackward")


def test_an_optimizers_counters_and_a_loaders_seed_are_no_sync_points_on_a_cpu():
    read = gpu_recording().syncs[0]
    ops = Timeline.of([Event(Kind.OP, "aten::a", 0, 95 * US)])
    own = ("surokit/offload/columns.py:235", "surokit/optim/adamw.py:206", "surokit/kernels/reference/gemm.py:44")
    insides = ("", "torch/optim/adam.py:12", "torch/utils/data/dataloader.py:693", *own)
    reads = tuple(replace(read, device="cpu", inside=inside) for inside in insides)
    found = analyse(Recording(ops, 0, 95 * US, syncs=reads))
    assert found.tables["syncs"]["line"] == [7]
    assert found.summary["syncs_per_step"] == 1


@pytest.mark.parametrize("marks", [(), (5,), (5, 9), (0, 5, 200)])
def test_an_empty_recording_is_said_and_has_every_table(marks):
    found = analyse(Recording(Timeline.of([]), 0, 10, marks))
    assert [note for note in found.notes if "steps were seen" not in note] == [
        "no torch operator was recorded in these steps, so their busy and idle time are not known: "
        "the work was done outside of torch, or in another thread or process"
    ]
    assert found.summary["activity"] == "unknown"
    assert math.isnan(found.summary["busy_ms"])
    assert list(found.tables["lost"].values()) == [[]] * 6
    advise(found.summary, found.tables)


def test_too_few_steps_for_the_warmup_are_said():
    ops = Timeline.of([Event(Kind.OP, "aten::a", k * 10, k * 10 + 5) for k in range(3)])
    found = analyse(Recording(ops, 0, 30, (10, 20, 30), warmup=7))
    assert (found.summary["steps"], found.summary["warmup"]) == (1, 2)
    assert any("3 steps were seen" in note for note in found.notes)


def test_a_recording_is_what_it_was_after_storage():
    ops = Timeline.of([Event(Kind.OP, "aten::mm", 0, 9)])
    one = np.array([5], np.int64)
    made = gpu_recording(
        shaped=Shaped(ops, one, one + 1, one * 0),
        start_C=one,
        end_C=one + 3,
        settings=(("threads", "2"),),
        usd_per_gpu_hour=2.5,
        notes=("a note",),
    )
    back = unpack(json.loads(json.dumps(pack(made))))

    def same(a, b):
        if isinstance(a, (Timeline, Shaped)):
            return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
        return np.array_equal(a, b) and a.dtype == b.dtype if isinstance(a, np.ndarray) else a == b

    assert [f.name for f in fields(made) if not same(getattr(made, f.name), getattr(back, f.name))] == []


def test_fields_that_an_older_file_lacks_take_their_defaults():
    stored = pack(gpu_recording())
    for name in ("shaped", "start_C", "end_C", "settings", "usd_per_gpu_hour"):
        del stored[name]
    found = analyse(unpack(stored))
    assert found.summary["gflop_per_step"] is None
    assert found.tables["lost"]["usd_per_day"] == [None] * 4
    assert found.summary["collect_ms"] == 0
