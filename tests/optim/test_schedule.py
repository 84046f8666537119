"""Cosine: its corners, and as plain data."""

from __future__ import annotations

import math

import pytest

from surokit.optim.schedule import schedule_from_dict, schedule_to_dict
from surokit.train import Cosine
from tests.refusals import refused


def test_corners() -> None:
    schedule = Cosine(warmup=10, steps=110, floor=0.1)
    assert schedule(0) == pytest.approx(0.1)
    assert schedule(9) == schedule(10) == 1.0
    assert schedule(60) == pytest.approx(0.55)
    assert schedule(110) == schedule(10**6) == pytest.approx(0.1)


def test_falls_all_the_way_and_is_a_cosine() -> None:
    schedule = Cosine(warmup=0, steps=100, floor=0.0)
    factors = [schedule(step) for step in range(101)]
    assert factors == sorted(factors, reverse=True)
    assert factors[25] == pytest.approx((1 + math.cos(math.pi / 4)) / 2)


@pytest.mark.parametrize("options", [{"warmup": -1}, {"warmup": 10, "steps": 10}, {"floor": 1.5}])
def test_wrong_options(options: dict[str, float]) -> None:
    with refused(ValueError):
        Cosine(**options)  # type: ignore[arg-type]


def test_as_plain_data_and_back() -> None:
    schedule = Cosine(warmup=3, steps=7, floor=0.2)
    assert schedule_from_dict(schedule_to_dict(schedule)) == schedule
    assert schedule_from_dict(schedule_to_dict(None)) is None
    with refused(ValueError):
        schedule_from_dict(schedule_to_dict(lambda step: 1.0))
