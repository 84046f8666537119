"""The state keeps what matters in bounded memory: extremes, NaNs, the right averages."""

from __future__ import annotations

import math

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surokit.profiler.sustained import sustain
from surokit.widgets.state import PanelState, Recent, Series, _reduce

values = st.one_of(
    st.floats(-1e6, 1e6), st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 5e-324, 1.7976931348623157e308])
)


def filled(ys, limit=1000):
    series = Series(limit)
    for x, y in enumerate(ys):
        series.append(x, y)
    return series


@given(st.lists(values, max_size=400), st.integers(8, 64))
def test_bounded_and_nothing_that_matters_is_lost(ys, limit):
    series = filled(ys, limit)
    x, y = series.points()
    assert len(y) == len(series) <= limit
    assert series.count == len(ys)
    assert x == sorted(x)
    assert len(set(x)) == len(x)
    for a, b in zip(x, y):  # every point kept is a real one, at its own place
        assert ys[int(a)] == b or (math.isnan(b) and math.isnan(ys[int(a)]))
    finite = [v for v in ys if math.isfinite(v)]
    if finite:
        kept = [v for v in y if math.isfinite(v)]
        assert min(kept) == min(finite)
        assert max(kept) == max(finite)
    assert any(map(math.isnan, ys)) == any(map(math.isnan, y))
    assert any(map(math.isinf, ys)) == any(map(math.isinf, y))


@given(st.lists(st.one_of(values, st.sampled_from([1.0, 2.0])), min_size=1, max_size=300), st.integers(8, 40))
def test_what_is_kept_is_the_reduction_of_each_run(ys, limit):
    series = filled(ys, limit)
    points: list[tuple[float, float]] = list(enumerate(ys))
    span = series._span
    expected = [p for start in range(0, len(ys), span) for p in _reduce(points[start : start + span])]
    assert series.points()[0] == [x for x, _ in expected]


@given(st.lists(values, min_size=1, max_size=7))
def test_a_short_series_is_kept_whole(ys):
    assert [str(v) for v in filled(ys, 8).points()[1]] == [str(v) for v in ys]


def test_local_extremes_stay_at_their_place():
    ys = [math.sin(i / 500) for i in range(20_000)]
    for spike in (17, 4_321, 19_998):
        ys[spike] = 50.0
    x, y = filled(ys).points()
    assert [a for a, b in zip(x, y) if b == 50.0] == [17, 4_321, 19_998]


def test_memory_is_flat_in_the_length_of_the_run():
    sizes = [len(filled([float(i % 97) for i in range(n)])) for n in (2_000, 20_000, 200_000)]
    assert all(400 <= size <= 1000 for size in sizes)


def test_too_small_a_limit_is_refused():
    with pytest.raises(ValueError, match="at least 8 points"):
        Series(4)


def test_smoothed_loss_is_the_bias_corrected_average():
    state = PanelState()
    losses = [5.0, 4.0, math.nan, 3.0, 2.5]
    for step, loss in enumerate(losses, 1):
        state.add(step, loss=loss)
    # Early on a is 1/10, so this is Adam's m / (1 - 0.9^n) over the finite losses.
    m, n, expected = 0.0, 0, []
    for loss in losses:
        if math.isfinite(loss):
            m, n = 0.9 * m + 0.1 * loss, n + 1
            expected.append(m / (1 - 0.9**n))
    x, y = state.loss_mean.points()
    assert x == [1, 2, 4, 5]
    assert y == pytest.approx(expected)
    assert state.loss.points()[0] == [1, 2, 3, 4, 5]


def test_constant_loss_is_its_own_average_for_any_length():
    state = PanelState()
    for step in range(1, 3_000):
        state.add(step, loss=2.5)
    assert {round(v, 9) for v in state.loss_mean.points()[1]} == {2.5}
    assert state.warnings == {}


def test_sustained_rate_counts_a_pause_and_the_first_step_is_no_rate():
    state = PanelState(half_life_s=1e9)  # no decay: the plain ratio
    state.add(1, tokens=1000, seconds=60.0)
    for step in range(2, 12):
        state.add(step, tokens=1000, seconds=5.0 if step == 6 else 0.5)
    assert state.rate.points()[1][0] == 2000.0
    assert list(state.rate_sustained.last or ()) == pytest.approx([11, 10_000 / 9.5])
    assert state.elapsed_s == pytest.approx(69.5)
    assert state.tokens == 11_000


def test_steps_per_second_where_tokens_are_unknown():
    state = PanelState()
    for step in range(1, 5):
        state.add(step, loss=1.0, seconds=0.25)
    assert list(state.rate.last or ()) == [4, 4.0]
    assert state.tokens == 0


def test_time_left_follows_the_pace():
    state = PanelState(total=100)
    times = [state.eta_s]
    for step in range(1, 21):
        state.add(step, seconds=0.5)
    times.append(state.eta_s)
    state.reason = "done"
    times.append(state.eta_s)
    assert times == [None, pytest.approx(40.0), None]


def test_idle_share_is_weighted_by_time():
    state = PanelState(half_life_s=1e9)
    for step, (seconds, idle) in enumerate([(1.0, 0.9), (1.0, 0.0), (3.0, 0.4)], 1):
        state.add(step, seconds=seconds, idle=idle)
    assert list(state.idle_mean.last or ()) == pytest.approx([3, 0.3])


def test_warnings_name_what_happened_and_where():
    state = PanelState()
    for step in range(1, 101):
        loss = 3.0 + 0.01 * (step % 3)
        if step in (40, 60):
            loss = math.nan
        if step == 80:
            loss = 9.0
        state.add(step, loss=loss, skipped=step == 60)
    assert state.warning_lines() == [
        "step skipped, not finite: weights untouched, at step 60",
        "loss not finite (NaN or infinite), at step 40",
        "loss spike, at step 80",
    ]
    state.add(101, loss=math.inf)
    assert "loss not finite (NaN or infinite), 2 times, last at step 101" in state.warning_lines()


def test_a_skipped_step_with_a_finite_loss_is_named_too():
    state = PanelState()
    state.add(1, loss=2.0, skipped=True)  # its gradient was not finite
    assert list(state.warnings) == ["skipped"]


def test_from_a_frame_and_from_mappings_is_the_same_state():
    rows = [
        {"step": s, "loss": 4.0 / s, "tokens": 512, "wall_ms": 100.0 + s, "idle_frac": 0.1, "skipped": 0.0}
        for s in range(1, 40)
    ]
    rows[9]["eval_loss"] = 0.7
    state = PanelState.from_records(pd.DataFrame(rows), "fp8")
    other = PanelState.from_records(iter(rows), "fp8")
    for one, two in ((state, other), (other, state)):
        assert one.loss_mean.points() == two.loss_mean.points()
        assert one.rate_sustained.points() == two.rate_sustained.points()
        assert one.idle.points() == two.idle.points()
    assert state.held_out.points() == ([10], [0.7])
    assert state.step == 39
    assert state.warnings == {}


def test_the_same_step_may_come_again():
    state = PanelState()
    state.add(1, seconds=1.0)
    state.add(2, seconds=1.0)
    state.add(2, loss=3.0)
    state.add(2, held_out=3.1)
    assert (state.loss.points(), state.held_out.points()) == (([2], [3.0]), ([2], [3.1]))
    assert state.elapsed_s == 2.0


# --- sustained figures ---

steps = st.lists(
    st.tuples(
        st.floats(0.01, 20),  # seconds
        st.integers(0, 10_000),  # tokens
        st.one_of(st.none(), st.floats(0, 1)),  # idle share
        st.booleans(),  # skipped
        st.floats(0, 1),  # share that waited for a batch
    ),
    min_size=2,
    max_size=150,
)


@given(steps, st.floats(0, 100))
def test_goodput_and_lost_time_are_those_of_the_summary(run, outside_s):
    state = PanelState()
    for step, (seconds, tokens, idle, skipped, stall) in enumerate(run, 1):
        state.add(step, tokens=tokens, seconds=seconds, idle=idle, skipped=skipped, stall=stall * seconds)
    seconds, tokens, idle, skipped, stall = (list(column) for column in zip(*run))
    state.run_s = sum(seconds) + outside_s
    exact = sustain(
        [1e3 * s for s in seconds],
        tokens,
        idle_frac=[math.nan if i is None else i for i in idle],
        skipped=skipped,
        stall_ms=[1e3 * s * w for s, w in zip(seconds, stall)],
        run_s=state.run_s,
    )
    assert state.goodput == pytest.approx(exact.goodput)
    assert state.lost_s / 3600 == pytest.approx(exact.lost_gpu_hours, abs=1e-9)
    assert state.overall_rate == pytest.approx(sum(tokens[1:]) / sum(seconds[1:]))


@given(st.lists(st.tuples(st.floats(0.001, 5), st.integers(0, 1000)), max_size=300), st.sampled_from([1.0, 10.0, 60.0]))
def test_the_last_seconds_in_bounded_memory(run, span_s):
    recent = Recent(span_s)
    for seconds, work in run:
        recent.add(seconds, work)
    assert len(recent._runs) <= 66
    seconds = [s for s, _ in run]
    if sum(seconds) < span_s * (1 - 1e-6):
        assert recent.rate is None
        return
    if recent.rate is None:
        assert sum(seconds) < span_s * (1 + 1e-6)
        return
    # it is the rate of some number of last steps, which take the span and at most a run and a step more
    longest = max(seconds) + span_s / 64 + 1e-6
    total = taken = 0.0
    fitting = []
    for s, w in reversed(run):
        total, taken = total + s, taken + w
        if total >= span_s * (1 - 1e-6):
            fitting.append((total, taken / total))
    assert any(total <= span_s + longest and rate == pytest.approx(recent.rate) for total, rate in fitting)


def test_nothing_before_the_first_step():
    state = PanelState()
    assert (state.goodput, state.overall_rate, state.lost_s) == (None, None, 0.0)
    assert [recent.rate for recent in state.recent.values()] == [None] * 3


def test_rates_of_the_last_second_minute_and_ten_minutes():
    state = PanelState()
    for step in range(1, 8001):
        state.add(step, tokens=100, seconds=0.1 if step <= 7000 else 0.2)
    rates = {name: recent.rate for name, recent in state.recent.items()}
    assert (rates["1 s"], rates["1 min"]) == pytest.approx((500, 500))
    assert rates["10 min"] == pytest.approx((200 * 500 + 400 * 1000) / 600, rel=0.02)
