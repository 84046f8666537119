"""The pictures: what is drawn where, in which colour, small and well-formed whatever the recording."""

import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest

from surokit.profiler.analysis.tables import PHASES
from surokit.profiler.analysis.timeline import Event, Kind, Timeline
from surokit.profiler.record.capture import profile
from surokit.profiler.report.picture import BLUE, CAUSE_COLORS, GREY, IN_TURN, LEFT, VERMILION, WIDTH, own, short_name
from surokit.profiler.report.profile import Profile
from tests.profiler.models import train
from tests.profiler.traces import events, gpu_recording

SVG = "{http://www.w3.org/2000/svg}"
ROOM = WIDTH - LEFT - 8


def strokes(svg):
    """Title -> (colour, [(left, right)] in pixels) of everything that a step's picture draws with strokes."""
    found = {}
    for path in ET.fromstring(svg).iter(f"{SVG}path"):
        moves = path.get("d", "").split("m")[1:]
        if not moves:
            continue
        x, boxes = float(LEFT), []
        for move in moves:
            gap, length = move.split(" 0h")
            boxes.append((x + float(gap), x + float(gap) + float(length)))
            x = boxes[-1][1]
        found[path.findtext(f"{SVG}title")] = (path.get("stroke"), boxes)
    return found


def at(us):
    """Pixels of a moment of the hand-made step, which runs from 30 to 90 us."""
    return LEFT + ROOM * (us - 30) / 60


def test_a_step_is_drawn_where_it_happened():
    drawn = strokes(Profile(gpu_recording()).timeline(0))
    color, kernels = drawn["kernels"]
    assert color == BLUE
    assert np.array(kernels) == pytest.approx(
        np.array([(at(33), at(40)), (at(44), at(50)), (at(76), at(90))]), abs=0.11
    )
    assert drawn["copies"][1] == [pytest.approx((at(48), at(55)), abs=0.11)]
    assert drawn["idle"][0] == GREY
    assert np.array(drawn["idle"][1]) == pytest.approx(
        np.array([(at(30), at(33)), (at(40), at(44)), (at(55), at(76))]), abs=0.11
    )


def test_idle_time_has_the_colour_of_its_cause():
    drawn = strokes(Profile(gpu_recording()).timeline(0))
    color, boxes = drawn["idle: syncs"]
    assert color == CAUSE_COLORS["syncs"]
    assert boxes == [pytest.approx((at(55), at(76)), abs=0.11)]
    assert drawn["idle: launches"][0] == CAUSE_COLORS["launches"]


def test_reads_of_the_table_are_marked_with_their_line():
    svg = ET.fromstring(Profile(gpu_recording()).timeline(0))
    (mark,) = (p for p in svg.iter(f"{SVG}path") if p.get("stroke-dasharray"))
    assert mark.get("stroke") == VERMILION
    assert float(mark.get("d", "")[1:].split()[0]) == pytest.approx(at(45), abs=0.1)
    assert mark.findtext(f"{SVG}title") == ".item() at /home/me/train.py:7"


def dense(count):
    """As many short kernels as a large trace has, launched by as many operators."""
    rows = []
    for k in range(count):
        start = 1000 * k
        rows.append(Event(Kind.OP, f"aten::op{k % 40}", start, start + 700, 1, external=k + 1))
        rows.append(Event(Kind.RUNTIME, "cudaLaunchKernel", start + 100, start + 300, 1, k + 1, k + 1))
        rows.append(Event(Kind.KERNEL, f"kernel_{k % 40}", start + 400, start + 900 - k % 7, 7, k + 1, k + 1))
    return Timeline.of(rows)


def test_a_profile_of_many_events_stays_under_100_kb():
    count = 20_000
    p = Profile(gpu_recording(timeline=dense(count), end_ns=1000 * count, marks_ns=()))
    html = p._repr_html_()
    ET.fromstring(html)
    assert len(html) < 100_000
    # half of it is busy, and boxes of one pixel must not make it look full
    left_out = sum(b - a for a, b in strokes(p.timeline(0))["kernels"][1])
    assert left_out > 0.5 * ROOM


def test_shapes_that_no_step_has_are_drawn_too():
    for recording in (
        gpu_recording(timeline=Timeline.of([])),
        gpu_recording(timeline=Timeline.of([]), end_ns=0, marks_ns=()),
    ):
        ET.fromstring(Profile(recording)._repr_html_())


@pytest.mark.parametrize("by", ["module", "op", "kernel"])
def test_busy_time_by_what_was_asked_for(by):
    p = Profile(gpu_recording())
    p.by = by
    html = p._repr_html_()
    assert f"Busy time by {by}" in html
    assert {"module": "Linear", "op": "aten::", "kernel": "gemm"}[by] in html


def modules(*rows):
    """A module table of (module, depth, forward_ms, backward_ms, ms, self_ms)."""
    columns = ("module", "depth", "forward_ms", "backward_ms", "ms", "self_ms")
    return {name: [row[i] for row in rows] for i, name in enumerate(columns)}


def test_own_time_is_that_of_a_module_less_its_childrens():
    table = modules(
        ("Net", 0, 10.0, 20.0, 30.0, 3.0),
        ("layers.0", 2, 6.0, 14.0, 20.0, 4.0),
        ("layers.0.up", 3, 4.0, 8.0, 12.0, 12.0),
        ("layers.0.act.inner", 4, 1.0, 3.0, 4.0, 4.0),
        ("head", 1, 3.0, 4.0, 7.0, 7.0),
        ("CrossEntropyLoss", 0, 1.0, 0.0, 1.0, 1.0),
        ("(optimizer)", 0, 5.0, 0.0, 5.0, 5.0),
    )
    assert own(table, "forward_ms") == [1.0, 1.0, 4.0, 1.0, 3.0, 1.0, 5.0]
    assert own(table, "backward_ms") == [2.0, 3.0, 8.0, 3.0, 4.0, 0.0, 0.0]
    assert own(table, "ms") == table["self_ms"]
    thirds = modules(("Net", 0, 0.1 + 0.2, 0.0, 0.3, 0.0), ("a", 1, 0.1, 0.0, 0.1, 0.1), ("b", 1, 0.2, 0.0, 0.2, 0.2))
    assert own(thirds, "forward_ms") == [0.0, 0.1, 0.2]  # what rounding leaves is nothing


def test_own_time_of_a_recording_sums_to_its_self_time():
    with profile(steps=2, warmup=2) as p:
        train(4)
    table = p._analysis.tables["modules"]
    passes = zip(own(table, "forward_ms"), own(table, "backward_ms"))
    assert [f + b for f, b in passes] == pytest.approx(table["self_ms"])
    assert sum(own(table, "gflop")) == pytest.approx(p.summary["gflop_per_step"])


def test_a_share_of_the_speed_of_light_is_shown_where_it_is_known():
    p = Profile(gpu_recording())
    assert "of light" not in p._repr_html_() + repr(p)
    p._light = {"module": ["a", "Net"], "share": [0.42, None], "bound": ["memory", "unknown"]}
    assert "42% memory" in p._repr_html_()
    assert "of light" in repr(p)
    assert "42%" in next(line for line in repr(p).splitlines() if line.startswith("  a "))


def test_long_names_are_shortened_where_they_say_least():
    kernel = (
        "void at::native::vectorized_elementwise_kernel<4, "
        + "at::native::functor<float>, " * 9
        + "std::array<char*, 3ul> >"
    )
    shown = short_name(kernel, "kernel")
    assert len(shown) == len(short_name(kernel, "module")) == 60
    assert shown.startswith("void at::native::vectorized_el...")
    assert shown.endswith("std::array<char*, 3ul> >")
    assert short_name("model.layers.0.mlp.up", "module", 14) == "...rs.0.mlp.up"
    renamed = [replace(e, name=kernel) if e.name == "gemm" else e for e in events()]
    p = Profile(gpu_recording(timeline=Timeline.of(renamed)))
    p.by = "kernel"
    assert max(map(len, repr(p).splitlines())) < 200
    assert "void at::native::vectorized_el..." in repr(p)


def test_phases_are_drawn_in_the_order_of_a_step():
    assert sorted(IN_TURN) == sorted(PHASES)
    html = Profile(gpu_recording())._repr_html_()
    at = [html.index(f"<title>{phase} ") for phase in ("copies", "forward", "backward", "sync", "other")]
    assert at == sorted(at)


def test_advice_is_numbered_and_its_code_is_code():
    html = Profile(gpu_recording())._repr_html_()
    assert "<li><code>.item()</code> at train.py:7 waits" in html
    assert "`" not in html
