"""The summary's arithmetic on made-up records."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import surokit as sk
from surokit.runs.records import Deferred, Record, Records
from surokit.train import Session
from surokit.train.prefetch import AHEAD
from surokit.train.run_info import Light
from surokit.train.stream import Batch
from tests.clocks import JumpingClock
from tests.refusals import refused
from tests.train.toys import VOCAB, Toy, make_batches, make_session


def feed(session: Session, wall_ms: list[float], idle: float = 0.2, tokens: int = 1000, stall_ms: float = 0.0) -> None:
    elapsed = 0.0
    for step, wall in enumerate(wall_ms, 1):
        elapsed += wall / 1e3
        values = {"loss": torch.tensor(1.0 / step), "skipped": torch.tensor(float(step == 2))}
        late = Deferred(values, {"idle_frac": idle})
        session.records.append(Record(step, 0.1, tokens, wall, stall_ms, 0.5, elapsed, late))
    list(session.records.drain())


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
    # a fifth of every step, and all of the one that was skipped
    assert summary.lost_gpu_hours == pytest.approx((0.2 * 1.48 + 0.01) / 3600)
    assert summary.lost_usd == pytest.approx(3.6 * summary.lost_gpu_hours)
    assert summary.goodput == pytest.approx(1.48 / 1.49)
    assert summary.warmup_s == pytest.approx(0.59)
    assert summary.usd_per_1e9_tokens == pytest.approx(3.6 * 1e9 / 1e5 / 3600)
    assert summary.loss == pytest.approx(0.01)
    assert summary.windows == "steps"


def test_several_gpus_cost_and_could_do_as_many_times_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"gpus_in": 4, "device_name": "H100 SXM", "light_of": Light(6e9, 1000.0, "H100 SXM")}.items():
        monkeypatch.setattr(f"surokit.train.summary.{name}", lambda _, value=value: value)
    session = make_session()
    session.processes = replace(session.processes, world=4)
    feed(session, [10.0] * 100)
    summary = session.summary(usd_per_gpu_hour=3.6)
    assert summary.tokens_per_s == pytest.approx(100_000)  # of all four
    assert summary.mfu == pytest.approx(100_000 * 6e9 / (4 * 1000e12))
    assert summary.usd_per_1e9_tokens == pytest.approx(4 * 3.6 * 1e9 / 1e5 / 3600)
    assert summary.lost_gpu_hours == pytest.approx(4 * (0.2 * 0.99 + 0.01) / 3600)
    assert summary.lost_usd == pytest.approx(3.6 * summary.lost_gpu_hours)
    assert "4 x H100 SXM" in repr(summary)


def test_the_share_of_the_peak_counts_adapters_that_no_recipe_brought(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surokit.train.run_info.device_name", lambda _: "NVIDIA H100 80GB HBM3")
    model = sk.Decoder(sk.DecoderConfig(layers=2, width=32, heads=2, kv_heads=1, vocab=VOCAB, ffn=64))
    whole = sk.plan(model, length=12).flops_per_token
    model.requires_grad_(False)
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), model)
    session = make_session(model)
    session.run(1)
    session.device = torch.device("cuda")
    assert session.recipe is None
    assert session.info.flops_per_token == sk.plan(model, length=12).flops_per_token < 0.8 * whole
    assert session.info.flops


@pytest.mark.parametrize(
    ("batches", "mean"),
    [
        ([*make_batches(1, 8, 8), *make_batches(1, 2, 32)], 20),  # as many tokens of either
        (
            [{**make_batches(1, 1, 12)[0], "documents": torch.tensor([[0, 4, 12]], dtype=torch.int32)}],
            7,
        ),  # (16 + 64) / 12
    ],
    ids=["rows of two lengths", "documents kept apart"],
)
def test_attention_is_counted_at_the_mean_length(
    batches: list[Batch], mean: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever batch came last."""
    monkeypatch.setattr("surokit.train.run_info.device_name", lambda _: "NVIDIA H100 80GB HBM3")
    model = sk.Decoder(sk.DecoderConfig(layers=2, width=32, heads=2, kv_heads=1, vocab=VOCAB, ffn=64))
    session = make_session(model, batches)
    session.run(4)
    session.device = torch.device("cuda")
    assert session.info.flops_per_token == sk.plan(model, length=mean).flops_per_token


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
        "last 1 s  1 min  10 min",
        "goodput",
        "hours lost",
        "held-out loss",
        "USD",
        "not measured",
    ):
        assert words in text
        assert words in page
    assert "<table" in page
    assert "GPU hours" not in text + page  # it ran on a CPU
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
    with refused(ValueError):
        session.summary()
    session.run(1)
    with refused(ValueError):
        session.summary(usd_per_gpu_hour=-1)


def test_the_last_second_minute_and_ten_minutes() -> None:
    session = make_session()
    feed(session, [100.0] * 7000 + [200.0] * 300)
    summary = session.summary()
    assert summary.tokens_per_s_1s == pytest.approx(5000)
    assert summary.tokens_per_s_1min == pytest.approx(5000)
    assert summary.tokens_per_s_10min == pytest.approx(5700 * 1000 / 600, rel=1e-3)
    short = make_session()
    feed(short, [100.0] * 20)
    assert math.isnan(short.summary().tokens_per_s_1min)


def test_waiting_for_data_is_no_goodput() -> None:
    session = make_session()
    feed(session, [100.0] * 20, idle=0.5, stall_ms=30.0)
    summary = session.summary()
    assert summary.goodput == pytest.approx(0.7 * 19 / 20)
    assert summary.lost_gpu_hours * 3600 == pytest.approx(0.5 * 1.9 + 0.1)


def test_evaluations_count_as_time_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = JumpingClock(time.monotonic)
    monkeypatch.setattr(time, "monotonic", clock)

    class Slow:
        def __iter__(self) -> Iterator[Batch]:
            clock.ahead_s += 1000.0
            return iter(make_batches(1))

    session = make_session(eval=Slow(), eval_every=3)
    session.run(6)
    summary = session.summary()
    assert summary.run_s - summary.step_s >= 2000.0
    assert summary.goodput < summary.step_s / summary.run_s
    assert summary.lost_gpu_hours >= 2000.0 / 3600


class Gpu:
    """Takes 100 ms a step, which the host gives it in 5 ms while it works at the two before. Time passes in nothing else."""

    def __init__(self) -> None:
        self.now = self.free = 0.0
        self.launched: deque[float] = deque()  # when the device will have done each step

    def perf_counter(self) -> float:
        return self.now

    def begin(self, *_: object) -> bool:
        while len(self.launched) >= AHEAD:
            self.now = max(self.now, self.launched.popleft())
        self.now += 0.005
        return False

    def launch(self) -> float:
        self.free = max(self.now, self.free) + 0.1
        self.launched.append(self.free)
        return self.free


@pytest.mark.parametrize("asked", [{}, {"eval_every": 3, "eval": make_batches(1)}, {"save_every": 3}])
def test_the_hosts_lead_over_the_device_is_no_free_time(
    asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu()

    class Late(Deferred):
        def __init__(self, *values: Any) -> None:
            super().__init__(*values)
            self.done = gpu.launch()

        def ready(self) -> bool:
            return gpu.now >= self.done

        def wait(self) -> dict[str, float]:
            gpu.now = max(gpu.now, self.done)
            return super().wait()

    monkeypatch.setattr("surokit.train.measuring.Deferred", Late)
    for module in ("measuring", "marks"):
        monkeypatch.setattr(f"surokit.train.{module}.time", gpu)
    session = make_session(run_dir=tmp_path / "run", **asked)
    monkeypatch.setattr(session.prefetch, "begin", gpu.begin)
    for _ in range(3):
        session.run(10)
        gpu.now += 1000.0  # between two runs
    wall_ms = session.records.column("wall_ms")
    assert list(wall_ms[2:]) == pytest.approx([100.0] * 28, rel=0.06)  # 5 ms more where the device stood still
    assert session.summary().tokens_per_s == pytest.approx(480, rel=0.03)


def test_a_fork_counts_its_own_time() -> None:
    session = make_session(eval=make_batches(1))
    session.run(20)
    twin = session.fork()
    twin.run(2)
    summary = twin.summary()
    assert summary.run_s == pytest.approx(twin.run_s)
    assert summary.step_s < session.summary().step_s


def test_steps_that_have_left_memory_are_stood_for() -> None:
    session = make_session()
    session.records = Records(capacity=50)
    feed(session, [10.0] * 100, idle=0.0)
    session.step_s, session._run_s = 1.0, 2.0  # half of the run was in steps, half of which are in memory
    summary = session.summary()
    assert summary.steps == 50
    assert (summary.step_s, summary.run_s) == pytest.approx((0.5, 1.0))
    assert summary.goodput == pytest.approx(0.5)


def test_a_summary_during_the_run() -> None:
    seen: list[float] = []

    class Asks:
        def on_step(self, record: Record) -> None:
            seen.append(session.summary().run_s)

        def on_end(self, reason: str) -> None: ...

    session = make_session()
    session.subscribe(Asks())
    session.run(4)
    session.run(4)
    assert seen == sorted(seen)
    assert seen[-1] <= session.run_s


def test_steps_that_a_restart_took_again(tmp_path: Path) -> None:
    session = make_session(run_dir=tmp_path, save_every=None)
    session.run(4)
    session.save()
    session.run(3)  # lost: nothing was saved behind them
    frame = session.records.frame()
    again = Session.resume(tmp_path, Toy(), data=make_batches())
    again.run(2)
    lost_s = float(frame["wall_ms"][4:].sum()) / 1e3
    assert again.redone_s == pytest.approx(lost_s)
    summary = again.summary()
    assert summary.run_s == pytest.approx(again.run_s + lost_s)
    assert summary.goodput < summary.step_s / (summary.step_s + lost_s)
    assert "taken again after a restart" in repr(summary)
    third = Session.resume(tmp_path, Toy(), data=make_batches())  # and once more, from the same checkpoint or the next
    assert third.redone_s >= again.redone_s
    assert "taken again" not in repr(session.summary())
