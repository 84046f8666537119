"""The summary's arithmetic on made-up records."""

from __future__ import annotations

import math

import pytest
import torch

import surokit as sk
from surokit.train import Session
from surokit.train.records import Late, Record
from tests.train.toys import make_batches, make_session


def feed(session: Session, wall_ms: list[float], idle: float = 0.2, tokens: int = 1000) -> None:
    elapsed = 0.0
    for step, wall in enumerate(wall_ms, 1):
        elapsed += wall / 1e3
        values = {"loss": torch.tensor(1.0 / step), "skipped": torch.tensor(float(step == 2))}
        late = Late(values, {"idle_frac": idle})
        session.records.append(Record(step, 0.1, tokens, wall, 0.0, 0.5, elapsed, late))
    list(session.records.harvest())


def test_steady() -> None:
    session = make_session()
    feed(session, [500.0, *[10.0] * 99])  # the first step is slow: warm-up
    summary = session.summary(usd_per_gpu_hour=3.6)
    assert (summary.steps, summary.warmup_steps, summary.skipped, summary.tokens) == (100, 10, 1, 100_000)
    for rate in (summary.tokens_per_s, summary.tokens_per_s_p5, summary.tokens_per_s_p50, summary.tokens_per_s_p95):
        assert rate == pytest.approx(100_000)
    assert summary.drift == pytest.approx(0)
    assert summary.idle_frac == pytest.approx(0.2)
    assert summary.step_s == pytest.approx(1.49)
    assert summary.lost_gpu_hours == pytest.approx(0.2 * 1.49 / 3600)
    assert summary.usd_per_1e9_tokens == pytest.approx(3.6 * 1e9 / 1e5 / 3600)
    assert summary.loss == pytest.approx(0.01)
    assert summary.windows == "steps"


def test_spread_and_drift() -> None:
    session = make_session()
    feed(session, [10.0] * 60 + [20.0] * 50)
    summary = session.summary()
    assert summary.drift == pytest.approx(-0.5)
    assert (summary.tokens_per_s_p5, summary.tokens_per_s_p95) == pytest.approx((50_000, 100_000))
    assert summary.tokens_per_s == pytest.approx(100 * 1000 / 1.5)


def test_windows_of_a_second() -> None:
    session = make_session()
    feed(session, [250.0] * 10 + [200.0, 300.0] * 50)
    summary = session.summary()
    assert summary.windows == "windows of 1 s"
    assert summary.tokens_per_s_p5 == pytest.approx(summary.tokens_per_s_p95) == pytest.approx(4000)


def test_no_peak_is_invented_on_a_cpu() -> None:
    session = make_session()
    session.run(3)
    summary = session.summary()
    assert summary.mfu is None
    assert "cpu" in summary.peak
    assert summary.usd_per_1e9_tokens is None


def test_it_shows_itself() -> None:
    session = make_session(recipe=sk.FP8_ROWWISE, eval=make_batches(1, seed=4))
    session.run(4)
    session.evaluate()
    summary = session.summary(usd_per_gpu_hour=2)
    text, page = repr(summary), summary._repr_html_()
    for words in (
        "fp8-rowwise",
        "tokens/s, sustained",
        "without the first step",
        "held-out loss",
        "USD",
        "not measured",
    ):
        assert words in text
        assert words in page
    assert "<table" in page
    assert summary.as_dict()["recipe"] == "fp8-rowwise"
    assert summary.numerics


def test_a_single_step() -> None:
    session = make_session()
    session.run(1)
    summary = session.summary()
    assert summary.warmup_steps == 0
    assert math.isnan(summary.drift)
    assert summary.tokens_per_s > 0


def test_nothing_yet_and_no_price() -> None:
    session = make_session()
    with pytest.raises(ValueError, match="before the first step"):
        session.summary()
    session.run(1)
    with pytest.raises(ValueError, match="price"):
        session.summary(usd_per_gpu_hour=-1)
