"""The state keeps what matters in bounded memory: extremes, NaNs, the right averages."""

from __future__ import annotations

import math
import pickle

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surokit.profiler.monitoring.sustained import sustain
from surokit.runs.status import RunInfo
from surokit.widgets.state import EVENTS, PanelState, Recent, Ruler, Series, _reduce, worst
from tests.refusals import refused

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
    with refused(ValueError):
        Series(4)


def test_smoothed_loss_is_over_a_fifth_of_the_steps_then_ten_then_a_fortieth():
    state = PanelState(limit=2000)
    losses = [math.nan if step == 7 else 5.0 + math.sin(step) for step in range(1, 900)]
    for step, loss in enumerate(losses, 1):
        state.add(step, loss=loss)
    mean, expected = 0.0, []
    for n, loss in enumerate(filter(math.isfinite, losses), 1):
        a = 1.0 if n <= 5 else 5 / n if n <= 50 else 1 / 10 if n <= 400 else 40 / n
        mean = (1 - a) * mean + a * loss
        expected.append(mean)
    x, y = state.loss_mean.points()
    assert x == [step for step in range(1, 900) if step != 7]
    assert y == pytest.approx(expected)
    assert state.loss.points()[0] == list(range(1, 900))


def test_the_smoothed_loss_keeps_up_with_a_run_that_begins():
    """A mean over ten steps from the first on would be 0.4 behind."""
    state = PanelState()
    for step in range(1, 13):
        state.add(step, loss=7.0 - 0.1 * step)
    assert state.loss_mean.points()[1][-1] == pytest.approx(5.8, abs=0.15)


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
        "unstable, at step 80: 3 spikes within 40 steps",
        "loss spike, at step 80: loss 9, usually 3.01",
    ]
    state.add(101, loss=math.inf)
    assert "loss not finite (NaN or infinite), 2 times, last at step 101" in state.warning_lines()
    assert [(e.step, e.kind) for e in state.events] == [
        (40, "nonfinite"),
        (60, "skipped"),
        (80, "spike"),
        (80, "unstable"),
        (101, "nonfinite"),
    ]


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
    assert (state.lost_s or 0.0) / 3600 == pytest.approx(exact.lost_gpu_hours, abs=1e-9)
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
    assert (state.goodput, state.overall_rate, state.lost_s) == (None, None, None)
    assert [recent.rate for recent in state.recent.values()] == [None] * 3


def test_rates_of_the_last_second_minute_and_ten_minutes():
    state = PanelState()
    for step in range(1, 8001):
        state.add(step, tokens=100, seconds=0.1 if step <= 7000 else 0.2)
    rates = {name: recent.rate for name, recent in state.recent.items()}
    assert (rates["1 s"], rates["1 min"]) == pytest.approx((500, 500))
    assert rates["10 min"] == pytest.approx((200 * 500 + 400 * 1000) / 600, rel=0.02)


# --- events ---


def test_the_worst_and_the_latest_events_are_kept():
    state = PanelState()
    for step in range(1, 2_001):
        state.note(step, f"note {step}")
    assert len(state.events) == EVENTS
    assert [state.events[0].step, state.events[-1].step] == [1, 2_000]
    for step in range(3_001, 4_001):  # far apart, so that each is an event
        state.add(20 * step, loss=math.nan)
    kinds = [event.kind for event in state.events]
    assert len(kinds) == EVENTS
    assert set(kinds) == {"nonfinite", "diverging"}
    assert kinds.count("diverging") == 1
    state.add(100_000, loss=1.0, skipped=True)
    assert state.events[-1].kind == "skipped"
    assert state.warnings["nonfinite"].times == 1_000
    assert [e.step for e in worst(state.events, 2)] == [60_060, 100_000]


def test_notes_are_no_warnings():
    state = PanelState()
    state.add(1, loss=1.0)
    state.note(1, "began")
    assert state.warning_lines() == []
    assert (state.events[0].kind, state.events[0].text, state.events[0].suggestion) == ("note", "began", "")


def test_how_a_run_stands():
    state = PanelState()
    standing = [state.standing]
    state.add(1, loss=1.0)
    standing.append(state.standing)
    state.paused = True
    standing.append(state.standing)
    for reason in ("done", "interrupted", "failed: ValueError: x", "stopped: diverging", "by a rule", "lost: gone"):
        state.reason = reason
        standing.append(state.standing)
    assert standing == ["waiting", "running", "paused", "done", "interrupted", "failed", "stopped", "stopped", "lost"]


# --- the ruler ---


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 100), st.floats(0.001, 10)), min_size=1, max_size=300))
def test_the_ruler_is_bounded_and_right_at_its_knots(steps):
    ruler = Ruler(16)
    known, at, tokens, seconds = {}, 0, 0, 0.0
    for gap, work, wall in steps:
        at, tokens, seconds = at + gap, tokens + work, seconds + wall
        known[at] = (tokens, seconds)
        ruler.add(at, tokens, seconds)
    knots = ruler.since()
    assert len(knots) <= 17
    assert all(known[step] == (t, s) for step, t, s in knots)
    assert knots[-1][0] == at
    assert ruler.at(at) == known[at]
    assert ruler.at(at + 100) == known[at]
    told = [ruler.at(step) for step in range(int(knots[0][0]), at + 1)]
    assert told == sorted(told)  # tokens and time never go back
    assert ruler.since(knots[-1][0]) == []


def test_the_ruler_between_its_knots():
    ruler = Ruler()
    assert ruler.at(3) == (0.0, 0.0)
    ruler.add(0, 0, 0.0)
    ruler.add(10, 1_000, 5.0)
    assert ruler.at(5) == (500, 2.5)


def test_the_ruler_of_a_state_begins_before_the_first_step():
    state = PanelState()
    for step in range(501, 511):
        state.add(step, tokens=100, seconds=2.0, elapsed=1_000.0 + 2 * (step - 500))
    assert state.ruler.at(500) == (0.0, 1_000.0)
    assert state.ruler.at(505) == (500, 1_010.0)


# --- money, light, causes ---


def test_gpu_hours_dollars_and_light():
    state = PanelState()
    for step in range(1, 11):
        state.add(step, tokens=1_000, seconds=1.0)
    assert (state.gpu_hours, state.usd, state.usd_per_s, state.light) == (None,) * 4
    state.info = RunInfo(gpus=8, flops_per_token=6e9, peak_tflops=10.0, usd_per_gpu_hour=2.0)
    assert state.gpu_hours == pytest.approx(80 / 3600)
    assert state.usd == pytest.approx(160 / 3600)
    assert state.light == pytest.approx(1_000 * 6e9 / 80e12)
    state.run_s = 20.0  # an evaluation costs too
    assert state.usd == pytest.approx(320 / 3600)
    state.info = RunInfo(gpus=0, flops_per_token=6e9, peak_tflops=0.1, usd_per_gpu_hour=2.0)  # a CPU
    assert (state.gpu_hours, state.usd) == (None, None)
    assert state.light == pytest.approx(60.0)
    assert RunInfo(gpus=1).flops_per_token is None
    state.info = RunInfo(gpus=1)
    assert (state.usd, state.light) == (None, None)


def test_idle_time_by_cause():
    state = PanelState(half_life_s=1e9)
    assert state.idle_causes == {}
    state.add(1, seconds=1.0, idle=0.5, stall=0.1)  # the first step is no rate
    for step in range(2, 12):
        state.add(step, seconds=1.0, idle=0.3, stall=0.1)
    assert state.idle_causes == {"data": pytest.approx(0.1), "between steps": pytest.approx(0.2)}
    state.add(12, seconds=1.0, idle=0.3, stall=0.1, busy=0.6, launches=70.0)
    causes = state.idle_causes
    assert sum(causes.values()) == pytest.approx(0.4)
    assert state.launches == 70.0
    waiting = PanelState()
    for step in range(1, 5):
        waiting.add(step, seconds=1.0, stall=0.25)
    assert waiting.idle_causes == {"data": pytest.approx(0.25)}
    assert list(waiting.idle_data.last or ()) == pytest.approx([4, 0.25])


def test_causes_are_no_more_than_the_idle_time():
    """The host may wait for data and for offload while the device still computes."""
    state = PanelState()
    for step in range(1, 60):
        state.add(step, seconds=0.1, idle=0.12, stall=0.03)
    assert state.idle_causes == {"data": pytest.approx(0.12), "between steps": 0.0}
    for step in range(60, 2000):
        state.add(step, seconds=0.1, idle=0.12, stall=0.004, offload=0.03)
    assert state.idle_causes == pytest.approx({"data": 0.04, "offload": 0.08, "between steps": 0.0}, rel=0.01)


def test_every_column_of_the_records_arrives():
    rows = [
        {
            "step": s,
            "loss": 3.0,
            "lr": 1e-3 / s,
            "grad_norm": math.nan if s == 5 else 2.0,
            "peak_gib": 1.0 + s,
            "wall_ms": 10.0,
        }
        for s in range(1, 10)
    ]
    rows[6] |= {"busy_frac": 0.8, "launches": 12.0}
    state = PanelState.from_records(rows)
    assert list(state.lr.last or ()) == pytest.approx([9, 1e-3 / 9])
    assert list(state.memory.last or ()) == [9, 10.0]
    assert math.isnan(state.grad_norm.points()[1][4])
    assert (state.busy, state.launches) == (0.8, 12.0)


# --- reading a series ---


@given(st.lists(values, min_size=1, max_size=400), st.integers(8, 64), st.integers(8, 40), st.integers(-1, 400))
def test_the_points_since_a_step_are_few_and_keep_what_matters(ys, capacity, limit, after):
    series = filled(ys, capacity)
    kept = series.since(after, limit)
    assert len(kept) <= limit
    known = [p for p in zip(*series.points()) if p[0] > after]
    assert all(any(x == a and (y == b or y != y) for a, b in [*known, series.last]) for x, y in kept)
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})
    assert (kept[-1][0] if kept else after) == max(len(ys) - 1, after)
    for test in (math.isnan, math.isinf):
        assert any(test(y) for _, y in known) <= any(test(y) for _, y in kept)
    finite = [y for _, y in known if math.isfinite(y)]
    if finite:
        assert {min(finite), max(finite)} <= {y for _, y in kept}


@pytest.mark.soak
def test_a_million_steps_in_the_same_memory():
    state, sizes = PanelState(total=1_000_000), {}
    for step in range(1, 1_000_001):
        loss = 3.0 + math.sin(step) + 10 * (step % 100_000 == 0)
        state.add(
            step,
            loss=loss,
            tokens=4096,
            seconds=0.01,
            idle=0.1,
            lr=1e-3,
            grad_norm=1.0 + 9 * (step % 7_000 == 0),
            memory=3.0,
        )
        if step in (20_000, 300_000, 1_000_000):
            sizes[step] = len(pickle.dumps(state))
    assert max(sizes.values()) < 250_000  # a series is between half full and full
