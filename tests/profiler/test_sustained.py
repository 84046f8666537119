"""Sustained figures against plain loops over made-up steps, and the history that holds any run in the same memory."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surokit.profiler.monitoring.sustained import (
    WARM_UP,
    History,
    rate_of_last,
    rows,
    sustain,
    with_rows,
)
from surokit.units import number, percent
from tests.refusals import refused

steps = st.lists(
    st.tuples(
        st.floats(1, 2000),  # wall_ms
        st.floats(0, 1e5),  # tokens
        st.one_of(st.just(math.nan), st.floats(0, 1)),  # idle_frac
        st.booleans(),  # skipped
        st.floats(0, 1),  # share of the wall that was stalled
    ),
    min_size=1,
    max_size=120,
)


@given(steps, st.floats(0, 600))
def test_goodput_and_lost_time_add_up(run, outside_s):
    wall, tokens, idle, skipped, stall = (list(column) for column in zip(*run))
    stall_ms = [w * s for w, s in zip(wall, stall)]
    run_s = sum(wall) / 1e3 + outside_s
    s = sustain(wall, tokens, idle_frac=idle, skipped=skipped, stall_ms=stall_ms, run_s=run_s, usd_per_gpu_hour=2.0)
    good_ms = busy_ms = 0.0
    for w, i, bad, st_ms in zip(wall, idle, skipped, stall_ms):
        if not bad:
            good_ms += w - (st_ms if math.isnan(i) else min(st_ms, i * w))
            busy_ms += w - (st_ms if math.isnan(i) else i * w)
    assert s.run_s == pytest.approx(run_s)
    assert s.goodput == pytest.approx(good_ms / 1e3 / run_s)
    assert s.lost_gpu_hours == pytest.approx((run_s - busy_ms / 1e3) / 3600, abs=1e-9)
    assert s.lost_usd == pytest.approx(2 * s.lost_gpu_hours)
    assert -1e-9 <= s.goodput <= 1 + 1e-9
    assert s.lost_gpu_hours >= (1 - s.goodput) * run_s / 3600 - 1e-9
    assert s.tokens_per_s == pytest.approx(
        sum(tokens[s.warmup_steps :]) / sum(wall[s.warmup_steps :]) * 1e3, rel=1e-9, abs=1e-9
    )
    assert s.warmup_s == pytest.approx(sum(wall[: s.warmup_steps]) / 1e3)


@given(st.lists(st.tuples(st.floats(1, 5000), st.floats(0, 1e5)), min_size=1, max_size=60), st.floats(0.1, 60))
def test_the_last_seconds_are_the_fewest_last_steps(run, seconds):
    wall, tokens = (np.array(column) for column in zip(*run))
    rate = rate_of_last(seconds, wall, tokens)
    total = taken = 0.0
    for w, t in zip(wall[::-1], tokens[::-1]):
        total, taken = total + w, taken + t
        if total >= seconds * 1e3:
            assert rate == pytest.approx(taken / total * 1e3)
            return
    assert math.isnan(rate)


def test_windows_of_a_run_that_slows_down():
    wall = [100.0] * 6010 + [200.0] * 3000  # 10 warm-up steps, then 600 s at 10 steps/s, then 600 s at 5
    s = sustain(wall, 10.0)
    assert (s.warmup_steps, s.warmup_s) == pytest.approx((10, 1.0))
    assert (s.tokens_per_s_1s, s.tokens_per_s_1min, s.tokens_per_s_10min) == pytest.approx((50, 50, 50))
    assert s.tokens_per_s == pytest.approx(75)
    assert (s.tokens_per_s_p5, s.tokens_per_s_p50, s.tokens_per_s_p95) == pytest.approx((50, 75, 100), rel=0.35)
    assert s.windows == "windows of 1 s"
    assert s.drift == pytest.approx(-0.5)
    assert s.goodput == 1
    assert math.isnan(s.idle_frac)


def test_a_short_run_has_no_long_windows():
    s = sustain([100.0] * 50, 10.0)
    assert s.windows == "steps"
    assert s.tokens_per_s_1s == pytest.approx(100)
    assert math.isnan(s.tokens_per_s_1min)
    text = dict(rows(s))
    assert text["last 1 s  1 min  10 min"] == "100  –  –"
    assert text["tokens/s, sustained"] == "100, without the first 5 steps (0.5 s)"
    assert "USD" not in text["GPU hours lost"]


def test_a_stall_behind_a_busy_device_costs_nothing():
    """The host waited 80 ms for a batch; the device was idle for 10 ms of it."""
    s = sustain([100.0] * 20, 1.0, idle_frac=0.1, stall_ms=80.0)
    assert s.goodput == pytest.approx(0.9)
    assert s.lost_gpu_hours * 3600 == pytest.approx(0.2)


def test_time_that_is_no_step_is_lost():
    s = sustain([100.0] * 20, 1.0, idle_frac=0.0, run_s=4.0, usd_per_gpu_hour=3600.0)
    assert s.goodput == pytest.approx(0.5)
    assert s.lost_usd == pytest.approx(2.0)
    assert "2.00 USD" in dict(rows(s))["GPU hours lost"]


@pytest.mark.parametrize("wall", [[], [0.0, 0.0]])
def test_no_step_is_an_error(wall):
    with refused(ValueError):
        sustain(wall, 1.0)


@pytest.mark.parametrize("price", [-1.0, math.inf, math.nan])
def test_a_price_that_is_none(price):
    with refused(ValueError):
        sustain([1.0], 1.0, usd_per_gpu_hour=price)


def test_numbers_in_words():
    assert [number(v) for v in (0.12345, 999.4, 12345.6, math.nan)] == ["0.123", "999", "12,346", "not measured"]
    assert (percent(0.1234), percent(-0.5, "+"), percent(math.nan)) == ("12.3%", "-50.0%", "not measured")


# ----------------------------------------------------------------------------------------------------------------- history


@given(st.lists(st.floats(0, 1e6), max_size=700), st.integers(2 * WARM_UP, 64))
def test_a_history_loses_no_step_and_no_order(values, capacity):
    history = History(("wall_ms",), capacity)
    for value in values:
        history.append((value,))
    table = history.table()
    count = table["steps"].astype(int)
    assert history.steps == count.sum() == len(values)
    assert len(count) <= capacity
    assert (count[:WARM_UP] == 1).all()
    ends = np.cumsum(count)
    sums = [sum(values[a:b]) for a, b in zip([0, *ends], ends)]
    assert table["wall_ms"].tolist() == pytest.approx(sums)
    late = count[WARM_UP:]
    assert len({*late[:-1].tolist()}) <= 1  # neighbours are of one length, the last may be growing
    assert not len(late) or late[-1] <= late.max()


def test_a_long_run_keeps_its_figures():
    history, wall, tokens = History(("wall_ms", "tokens"), 256), [], []
    for step in range(20_000):
        wall.append(10.0 if step < 10_000 else 20.0)
        tokens.append(100.0)
        history.append((wall[-1], tokens[-1]))
    table = history.table()
    long, exact = sustain(table["wall_ms"], table["tokens"]), sustain(wall, tokens)
    assert long.warmup_steps == exact.warmup_steps == WARM_UP
    assert long.tokens_per_s == pytest.approx(exact.tokens_per_s)
    assert long.tokens_per_s_1min == pytest.approx(exact.tokens_per_s_1min)
    assert long.drift == pytest.approx(exact.drift, abs=0.02)
    assert (long.tokens_per_s_p5, long.tokens_per_s_p95) == pytest.approx(
        (exact.tokens_per_s_p5, exact.tokens_per_s_p95), rel=0.02
    )


def test_rows_on_their_way_are_put_behind():
    history = History(("wall_ms", "tokens"))
    history.append((1.0, 2.0))
    assert with_rows(history.table(), []) == history.table()
    table = with_rows(history.table(), [(3.0, 4.0)])
    assert {name: column.tolist() for name, column in table.items()} == {
        "steps": [1.0, 1.0],
        "wall_ms": [1.0, 3.0],
        "tokens": [2.0, 4.0],
    }


def test_a_history_without_room():
    with refused(ValueError):
        History(("wall_ms",), 19)
