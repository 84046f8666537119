"""The interval algebra against a raster: one cell a nanosecond, filled by hand."""

import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surokit.profiler.analysis import timeline as tl
from surokit.profiler.analysis.timeline import Event, Kind, Timeline

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


@given(st.lists(nested_calls(), min_size=1, max_size=3), st.lists(st.integers(-2, SPAN + 2), max_size=10))
def test_innermost_and_self_time_of_nested_calls(threads, points):
    calls = sorted(
        ((a, b, thread) for thread, found in enumerate(threads) for a, b in found), key=lambda c: (c[0], -c[1])
    )
    start, end, thread = np.array(calls, np.int64).reshape(-1, 3).T
    own = np.zeros(len(calls), np.int64)
    for number in range(len(threads)):
        here = np.flatnonzero(thread == number)
        found = tl.innermost(start[here], end[here], np.array(points, np.int64)).tolist()
        for at, i in zip(points, found):
            around = [b - a for a, b, t in calls if t == number and a <= at < b]
            assert (i >= 0) == bool(around)
            if around:
                assert start[here][i] <= at < end[here][i]
                assert end[here][i] - start[here][i] == min(around)
        for cell in range(-5, SPAN + 20):  # each nanosecond of a thread belongs to the innermost call
            around = [i for i in here if start[i] <= cell < end[i]]
            if around:
                own[max(around)] += 1
    assert tl.self_time(start, end, thread).tolist() == own.tolist()


@given(spans, st.lists(st.integers(-7, SPAN + 20), max_size=10))
def test_innermost_of_any_intervals_is_the_one_that_started_last(rows, points):
    start, end = columns(rows)
    for at, i in zip(points, tl.innermost(start, end, np.array(points, np.int64)).tolist()):
        around = [(start[j], -end[j]) for j in range(len(rows)) if start[j] <= at < end[j]]
        assert ((start[i], -end[i]) if i >= 0 else None) == max(around, default=None)


@pytest.mark.parametrize("count", [1, 2, 3, 63, 64, 65, 200])
@pytest.mark.parametrize("length", [3, 100, 3000])
def test_innermost_among_many(count, length):
    rng = np.random.default_rng(count)
    start = rng.integers(0, 1000, count)
    end = start + rng.integers(0, length, count)
    at = rng.integers(-10, 1100, 300)
    for t, i in zip(at.tolist(), tl.innermost(start, end, at).tolist()):
        around = [(start[j], -end[j]) for j in range(count) if start[j] <= t < end[j]]
        assert ((start[i], -end[i]) if i >= 0 else None) == max(around, default=None)


@given(spans, spans)
def test_overlap_counts_the_cells_of_both(a, b):
    both = raster(*columns(a)) & raster(*columns(b))
    assert tl.overlap(*columns(a), *columns(b)) == tl.overlap(*columns(b), *columns(a)) == both.sum()


def test_calls_nested_ten_thousand_deep():
    depth = 10_000
    start, end = np.arange(depth), 2 * depth - np.arange(depth)
    assert tl.self_time(start, end, np.zeros(depth, np.int64)).tolist() == [2] * (depth - 1) + [end[-1] - start[-1]]
    at = np.array([0, depth - 1, depth, 2 * depth - 1, 2 * depth])
    assert tl.innermost(start, end, at).tolist() == [0, depth - 1, depth - 1, 0, -1]


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


def every_function(names, columns):
    """All of the algebra over one set of columns, with the sums that have to agree."""
    t = Timeline.from_columns(names, columns)
    start, end, stop = t.start_E, t.end_E, int(t.end_E.max())
    host = t.is_kind(Kind.OP)
    part = tl.breakdown(start, end, 0, stop, start)
    busy = tl.total(start, end)
    assert part.busy_ns == busy == tl.own_time(start, end, 0, stop).sum()
    assert part.busy_ns + part.idle_ns == stop
    assert tl.covered(start, end, np.array([0]), np.array([stop])) == busy
    own = tl.self_time(start[host], end[host], t.thread_E[host])
    assert own.sum() == sum(
        tl.total(start[host & (t.thread_E == n)], end[host & (t.thread_E == n)]) for n in np.unique(t.thread_E[host])
    )
    around = tl.innermost(start, end, end)
    inside = around >= 0
    assert (start[around[inside]] <= end[inside]).all()
    assert (end[around[inside]] > end[inside]).all()
    return tl.overlap(start[host], end[host], start[~host], end[~host])


def many(count):
    """Columns of `count` events in no order: operators with two levels of children on four threads, and kernels."""
    rng = np.random.default_rng(0)
    each = count // 4
    at = np.arange(each) * 1000
    launched = at + rng.integers(200, 1500, each)
    start = np.concatenate((at, at + 100, at + 150, launched))
    end = np.concatenate((at + 900, at + 500, at + 300, launched + rng.integers(1, 2000, each)))
    kind = np.repeat([Kind.OP, Kind.OP, Kind.OP, Kind.KERNEL], each).astype(np.int64)
    thread = np.concatenate([at // 1000 % 4] * 3 + [np.full(each, 7)])
    ids = np.arange(4 * each)
    return np.stack([kind, ids % 50, start, end, thread, ids, ids, ids, 0 * ids])[:, rng.permutation(4 * each)]


@pytest.mark.parametrize("count", [200_000, pytest.param(1_000_000, marks=pytest.mark.soak)])
def test_many_events_in_bounded_time_and_memory(count):
    names, columns = tuple(f"n{i}" for i in range(50)), many(count)

    def seconds(run):
        begin = time.process_time()
        run()
        return time.process_time() - begin

    sort = min(seconds(lambda: np.lexsort((-columns[3], columns[2]))) for _ in range(3))  # this machine's speed
    assert min(seconds(lambda: every_function(names, columns)) for _ in range(2)) < 25 * sort
    columns = many(200_000)
    tracemalloc.start()
    every_function(names, columns)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * columns.nbytes


@pytest.mark.parametrize("stop", [0, 1, 17])
def test_clip_makes_outside_intervals_empty(stop):
    start, end = tl.clip(np.array([-5, 3, 30]), np.array([2, 9, 31]), 0, stop)
    assert (end >= start).all()
    assert (start >= 0).all()
    assert (end <= max(stop, 0)).all()
