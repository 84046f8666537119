"""The interval algebra against a raster: one cell a nanosecond, filled by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surokit.profiler import timeline as tl
from surokit.profiler.timeline import Event, Kind, Timeline

SPAN = 40
spans = st.lists(st.tuples(st.integers(-5, SPAN + 5), st.integers(0, 12)), max_size=12)


def columns(rows):
    start = np.array([a for a, _ in rows], np.int64)
    return start, start + np.array([n for _, n in rows], np.int64)


def raster(start, end):
    cells = np.zeros(SPAN + 40, bool)  # cell i is the nanosecond i - 20
    for a, b in zip(start.tolist(), end.tolist()):
        cells[a + 20 : b + 20] = True
    return cells


def cells_of(begin, stop):
    return slice(begin + 20, max(stop, begin) + 20)


@given(spans)
def test_merge_is_the_union(rows):
    start, end = columns(rows)
    a, b = tl.merge(start, end)
    assert (raster(a, b) == raster(start, end)).all()
    assert (a < b).all()
    assert (a[1:] > b[:-1]).all()
    assert tl.total(start, end) == raster(start, end).sum()


@given(spans, st.integers(0, SPAN), st.integers(0, SPAN))
def test_gaps_and_own_time_fill_the_window(rows, x, y):
    begin, stop = min(x, y), max(x, y)
    start, end = columns(rows)
    cells = raster(start, end)[cells_of(begin, stop)]
    gap_start, gap_end, following = tl.gaps(start, end, begin, stop)
    assert (raster(gap_start, gap_end)[cells_of(begin, stop)] == ~cells).all()
    assert (gap_end > gap_start).all()
    for stop_g, i in zip(gap_end.tolist(), following.tolist()):
        assert stop_g == (stop if i < 0 else start[i])
    own = tl.own_time(start, end, begin, stop)
    assert (own >= 0).all()
    assert own.sum() == cells.sum()


@given(spans, spans)
def test_covered_counts_cells(rows, queries):
    start, end = columns(rows)
    begin, stop = columns(queries)
    cells = raster(start, end)
    assert tl.covered(start, end, begin, stop).tolist() == [
        int(cells[cells_of(a, b)].sum()) for a, b in zip(begin.tolist(), stop.tolist())
    ]


@given(spans, st.lists(st.integers(-1, SPAN), max_size=12), st.integers(0, 4))
def test_breakdown_splits_each_idle_cell_once(rows, launches, back_to_back):
    start, end = columns(rows)
    launch_end = np.array([(launches + [-1] * len(rows))[i] for i in range(len(rows))], np.int64)
    part = tl.breakdown(start, end, 0, SPAN, launch_end, back_to_back)
    cells = raster(start, end)[cells_of(0, SPAN)]
    assert part.busy_ns == cells.sum()
    assert part.busy_ns + part.idle_ns == part.wall_ns == SPAN
    assert (part.host_wait_G + part.kernel_wait_G + part.other_wait_G == part.gap_end_G - part.gap_start_G).all()
    for g, (a, b) in enumerate(zip(part.gap_start_G.tolist(), part.gap_end_G.tolist())):
        following = int(part.next_G[g])
        launched = SPAN if following < 0 else int(launch_end[following])
        host = sum(1 for t in range(a, b) if t < launched)
        after = b - a - host
        assert part.host_wait_G[g] == host
        assert part.kernel_wait_G[g] == min(after, back_to_back)
    everything = tl.breakdown(start, end, 0, SPAN)
    assert everything.host_wait_G.sum() == everything.idle_ns


@st.composite
def nested_calls(draw, begin=0, stop=SPAN, depth=3):
    """Properly nested calls, as a call stack makes them, parents before children."""
    found, at = [], begin
    while at < stop and draw(st.booleans()):
        a = draw(st.integers(at, stop))
        b = draw(st.integers(a, stop))
        found.append((a, b))
        if depth and b > a:
            found += draw(nested_calls(a, b, depth - 1))
        at = b + draw(st.integers(0, 2))
    return found


@given(nested_calls(), st.lists(st.integers(-2, SPAN + 2), max_size=10))
def test_innermost_and_self_time_of_nested_calls(calls, points):
    calls.sort(key=lambda c: (c[0], -c[1]))
    start = np.array([a for a, _ in calls], np.int64)
    end = np.array([b for _, b in calls], np.int64)
    found = tl.innermost(start, end, np.array(points, np.int64)).tolist()
    for at, i in zip(points, found):
        around = [(b - a) for a, b in calls if a <= at < b]
        assert (i >= 0) == bool(around)
        if around:
            assert start[i] <= at < end[i]
            assert end[i] - start[i] == min(around)
    own = tl.self_time(start, end, np.zeros(len(calls), np.int64))
    assert own.sum() == raster(start, end).sum()
    assert (own >= 0).all()


@given(spans, spans, spans)
def test_partition_gives_each_cell_to_the_first_layer(a, b, c):
    layers = [(name, *columns(rows)) for name, rows in zip("abc", (a, b, c))]
    parts = tl.partition(0, SPAN, layers)
    left = np.ones(SPAN, bool)
    for name, start, end in layers:
        here = raster(start, end)[cells_of(0, SPAN)] & left
        assert parts[name] == here.sum()
        left &= ~here
    assert parts["other"] == left.sum()
    assert sum(parts.values()) == SPAN


def test_nothing_at_all():
    none = np.empty(0, np.int64)
    part = tl.breakdown(none, none, 0, 100, none)
    assert (part.busy_ns, part.idle_ns, int(part.host_wait_G.sum())) == (0, 100, 100)
    assert tl.breakdown(none, none, 5, 5).wall_ns == 0
    assert tl.innermost(none, none, np.array([1])).tolist() == [-1]
    assert tl.self_time(none, none, none).tolist() == []
    assert tl.own_time(none, none, 0, 9).tolist() == []


def test_timeline_sorts_parents_first_and_counts_damage():
    t = Timeline.of(
        [
            Event(Kind.OP, "child", 10, 20, sequence=4),
            Event(Kind.OP, "parent", 10, 30),
            Event(Kind.KERNEL, "k", 5, 6, thread=7, correlation=3, nbytes=9),
            Event(Kind.OP, "backwards clock", 50, 40),
        ]
    )
    assert [t.names[n] for n in t.name_E] == ["k", "parent", "child"]
    assert t.damaged == 1
    assert t.duration_E().tolist() == [1, 20, 10]
    again = Timeline.from_columns(t.names, t.columns())
    assert (again.columns() == t.columns()).all()
    assert len(t.take(t.is_kind(Kind.OP))) == 2
    assert t.is_named(n == "child" for n in t.names).tolist() == [False, False, True]


def test_one_million_events_stay_in_columns():
    rng = np.random.default_rng(0)
    start = np.sort(rng.integers(0, 10**9, 1_000_000))
    end = start + rng.integers(1, 2000, 1_000_000)
    part = tl.breakdown(start, end, 0, 10**9, start)
    assert part.busy_ns == tl.total(*tl.clip(start, end, 0, 10**9)) == tl.own_time(start, end, 0, 10**9).sum()
    assert part.busy_ns + part.idle_ns == 10**9


@pytest.mark.parametrize("stop", [0, 1, 17])
def test_clip_makes_outside_intervals_empty(stop):
    start, end = tl.clip(np.array([-5, 3, 30]), np.array([2, 9, 31]), 0, stop)
    assert (end >= start).all()
    assert (start >= 0).all()
    assert (end <= max(stop, 0)).all()
