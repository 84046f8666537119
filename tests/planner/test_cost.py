"""Prices as ranges with a date, and the goodput that failures leave."""

import random

import pytest

from surokit import planner
from surokit.planner.times.cost import Price, expected_goodput
from tests.refusals import refused


def seed_case(price):
    return planner.plan(405e9, tokens=15.6e12, gpus=16000, gpu="H100", tflops_per_gpu=400, usd_per_gpu_hour=price)


def test_a_range_of_prices_gives_a_range_of_costs():
    p = seed_case((1.8, 3.2))
    assert p.usd_range == (26.325e6 * 1.8, 26.325e6 * 3.2)
    assert p.usd == 26.325e6 * 2.5
    for words in ("47.385 M", "84.24 M USD", "1.8 to 3.2 USD"):
        assert words in repr(p)
    assert seed_case(2.0).usd_range == (52.65e6, 52.65e6)
    assert "2 USD" in repr(seed_case(2.0))


def test_a_price_has_a_date_and_a_source():
    p = seed_case(Price(1.8, 3.2, date="2026-11", source="two clouds' lists"))
    assert "1.8 to 3.2 USD, 2026-11, two clouds' lists" in repr(p)
    assert planner.plan(8e9).usd_range is None


@pytest.mark.parametrize(
    ("price", "error"),
    [
        ((3.2, 1.8), ValueError),
        ((1.8,), ValueError),
        ((0, 2), ValueError),
        ((2, 5000), ValueError),
        (("1", 2), TypeError),
    ],
)
def test_prices_that_cannot_be_meant(price, error):
    with refused(error):
        seed_case(price)


def test_goodput_against_a_run_with_random_failures():
    """A run of 200,000 minutes, failures drawn from an exponential distribution, lost work counted minute by minute."""
    save, restart, mtbf_hours, gpus = 1.0, 10.0, 4000.0, 1000
    expected = expected_goodput(gpus, gpu_mtbf_hours=mtbf_hours, save_minutes=save, restart_minutes=restart)
    assert expected.mtbf_hours == 4.0
    assert expected.save_every_minutes == pytest.approx((2 * save * 240) ** 0.5)
    draw = random.Random(0)
    now, kept, every = 0.0, 0.0, expected.save_every_minutes
    for _ in range(5000):
        up = draw.expovariate(1 / 240)  # minutes until the next failure
        kept += (up // (every + save)) * every
        now += up + restart
    assert expected.share == pytest.approx(kept / now, abs=0.01)


def test_goodput_of_llama_3():
    """arXiv 2407.21783: 419 unexpected interruptions in 54 days on 16,384 GPUs, and more than 90 % effective training time."""
    mtbf = 54 * 24 / 419 * 16384
    found = expected_goodput(16384, gpu_mtbf_hours=mtbf, save_minutes=0.5, restart_minutes=5)
    assert found.mtbf_hours == pytest.approx(3.09, abs=0.01)
    assert 0.9 < found.share < 0.95


def test_a_shorter_or_longer_interval_loses_more():
    given = {"gpu_mtbf_hours": 4000.0, "save_minutes": 1.0, "restart_minutes": 10.0}
    best = expected_goodput(1000, **given)
    for factor in (0.5, 2.0):
        other = expected_goodput(1000, **given, save_every_minutes=best.save_every_minutes * factor)
        assert other.share < best.share


def test_where_nothing_would_be_left():
    with refused(ValueError):
        expected_goodput(16000, gpu_mtbf_hours=1000, save_minutes=5, restart_minutes=30)
    with refused(ValueError):
        expected_goodput(8, gpu_mtbf_hours=1000, save_minutes=0, restart_minutes=30)
