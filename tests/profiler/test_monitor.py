"""The monitor on loops with a made-up clock and made-up CUDA events, on a real CPU loop, and that it leaves nothing behind."""

import math
import threading
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from surokit.profiler.monitoring.device import DeviceFigures
from surokit.profiler.monitoring.monitor import WAITING, Monitor
from tests.profiler.models import Net, train
from tests.refusals import refused


@pytest.fixture(autouse=True)
def leaves_nothing_behind():
    before = len(torch_optimizer._global_optimizer_post_hooks)
    yield
    assert len(torch_optimizer._global_optimizer_post_hooks) == before
    assert not torch._C._autograd._profiler_enabled()
    assert not [t for t in threading.enumerate() if t.name == "surokit-device"]


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Device:
    """A device whose events are its own time when they were recorded; they arrive when `done` has passed them."""

    def __init__(self, monkeypatch, capturing=lambda: False):
        self.now = self.done = 0.0
        self.events: list[Any] = []
        device = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing
                device.events.append(self)

            def record(self):
                self.at = device.now

            def query(self):
                return self.at <= device.done

            def elapsed_time(self, end):
                assert self.query()
                assert end.query(), "the monitor waited for the device"
                return end.at - self.at

        for name, value in {
            "is_initialized": lambda: True,
            "is_current_stream_capturing": capturing,
            "current_device": lambda: 0,
            "get_device_name": lambda: "Made-up GPU",
            "get_device_properties": lambda index: SimpleNamespace(uuid="0"),
            "Event": Event,
            "synchronize": lambda: pytest.fail("the monitor waited for the device"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


def stepped(monitor, clock, walls_ms, tokens=None):
    for wall_ms in walls_ms:
        clock.now += wall_ms / 1e3
        monitor.step(tokens=tokens)


def test_steps_tokens_and_time_outside():
    clock = Clock()
    with Monitor(tokens=100, usd_per_gpu_hour=3600.0, every=None, clock=clock) as m:
        stepped(m, clock, [500.0] + [50.0] * 19)
        clock.now += 1.0  # an evaluation, say, behind the last step
    clock.now += 1000.0  # the loop is over
    summary = m.summary()
    s = summary.sustained
    assert (summary.steps, summary.unit, summary.name) == (20, "tokens/s", "cpu")
    assert s.tokens_per_s == pytest.approx(2000)
    assert (s.warmup_steps, s.warmup_s) == pytest.approx((2, 0.55))
    assert (s.step_s, s.run_s) == pytest.approx((1.45, 2.45))
    assert s.goodput == pytest.approx(1.45 / 2.45)
    assert s.lost_usd == pytest.approx(1.0)
    frame = m.frame()
    assert frame.columns.tolist() == ["steps", "wall_ms", "tokens", "stall_ms", "offload_ms", "device_ms", "gap_ms"]
    assert frame.wall_ms.tolist() == pytest.approx([500.0] + [50.0] * 19)
    assert frame.device_ms.isna().all()


def test_a_second_block_goes_on_and_the_time_between_is_free():
    clock = Clock()
    m = Monitor(every=None, clock=clock)
    for _ in range(2):
        with m:
            stepped(m, clock, [100.0] * 10)
        clock.now += 50.0
    summary = m.summary()
    assert (summary.steps, summary.unit) == (20, "steps/s")
    assert summary.sustained.run_s == pytest.approx(2.0)
    assert summary.sustained.tokens_per_s == pytest.approx(10)


def test_tokens_of_a_step():
    clock = Clock()
    with Monitor(every=None, clock=clock) as m:
        stepped(m, clock, [100.0] * 10, tokens=7)
    assert m.summary().sustained.tokens_per_s == pytest.approx(70)


def test_the_time_that_a_batch_takes():
    clock = Clock()

    def loader():
        for _ in range(12):
            clock.now += 0.030
            yield "batch"

    with Monitor(every=None, clock=clock) as m:
        for number, batch in enumerate(m.batches(loader())):
            assert batch == "batch"
            clock.now += 0.070
            if number % 2:  # two batches a step
                m.step()
    summary = m.summary()
    assert m.frame().stall_ms.tolist() == pytest.approx([60.0] * 6)
    assert summary.stall_ms == pytest.approx(60)
    assert summary.sustained.goodput == pytest.approx(0.7)
    assert summary.sustained.idle_frac == pytest.approx(0.3)
    assert "waiting for data" in repr(summary)
    assert math.isnan(summary.offload_ms)
    assert "offload" not in repr(summary)


@pytest.mark.parametrize("by_user", [False, True])
def test_the_time_that_an_optimizer_on_the_host_takes(by_user):
    clock = Clock()

    class Offloading(torch.optim.SGD):
        device_stall_ms = 0.0

        def step(self, closure=None):
            clock.now += 0.040
            self.device_stall_ms = 25.0
            return super().step(closure)

    def loader():
        for _ in range(8):
            clock.now += 0.010
            yield torch.ones(2)

    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = Offloading([weight])
    with Monitor(every=None, clock=clock) as m:
        for _ in m.batches(loader()):
            clock.now += 0.050
            optimizer.step()
            if by_user:
                m.step()
    summary = m.summary()
    assert m.frame().offload_ms.iloc[1:].tolist() == pytest.approx([25.0] * 7)
    assert summary.offload_ms == pytest.approx(25)
    assert summary.sustained.idle_frac == pytest.approx(0.35)
    assert summary.sustained.goodput == pytest.approx(0.65 + by_user * 0.35 / 8)  # the first m.step() knows no waits
    assert "waiting for offload" in repr(summary)
    assert "not waiting for data or offload" in repr(summary)


def test_the_end_of_the_data_ends_the_loop_and_errors_pass():
    def loader():
        yield 1
        raise OSError("disk")

    with Monitor(every=None) as m:
        assert list(m.batches([1, 2])) == [1, 2]
        with refused(OSError):
            list(m.batches(loader()))


def test_events_are_read_late_and_never_waited_for(monkeypatch):
    device, clock = Device(monkeypatch), Clock()
    with Monitor(every=None, clock=clock) as m:
        for _ in m.batches(range(6)):
            device.now += 4.0  # the gap: the device had nothing between the end of a step and this batch
            m._start.record()
            device.now += 16.0
            clock.now += 0.020
            m.step()
            device.done = device.now - 30.0  # the host runs ahead of the device
        assert m._history.steps == 3
        frame = m.frame()
        assert frame.device_ms.isna().tolist() == [True, False, False, False, True, True]
        device.done = device.now
        frame = m.frame()
    assert frame.device_ms.tolist()[1:] == pytest.approx([20.0] * 5)
    assert frame.gap_ms.tolist()[1:] == pytest.approx([4.0] * 5)
    summary = m.summary()
    assert summary.name == "Made-up GPU"
    assert (summary.gap_ms, summary.device_ms) == pytest.approx((4, 20))
    assert summary.sustained.idle_frac == pytest.approx(0.2)
    assert "gap between steps" in repr(summary)


def test_a_device_that_never_answers_does_not_fill_the_memory(monkeypatch):
    device, clock = Device(monkeypatch), Clock()
    device.done = -1.0
    with Monitor(every=None, clock=clock) as m:
        stepped(m, clock, [10.0] * (WAITING + 40))
        assert len(m._waiting) == WAITING
    frame = m.frame()
    assert len(frame) == WAITING + 40
    assert frame.device_ms.isna().all()
    assert frame.wall_ms.sum() == pytest.approx(10 * (WAITING + 40))


def test_a_device_that_failed_takes_no_figure_with_it(monkeypatch):
    device, clock = Device(monkeypatch), Clock()
    m = Monitor(every=None, clock=clock)

    def fail():
        raise RuntimeError("CUDA error: device-side assert triggered")

    with suppress(RuntimeError), m:
        stepped(m, clock, [10.0] * 3)
        device.done = -1.0
        stepped(m, clock, [10.0] * 2)
        for event in device.events:
            event.query = fail
        fail()
    assert m.summary().steps == 5
    assert m.frame().wall_ms.sum() == pytest.approx(50)


def test_no_event_inside_a_graphs_capture(monkeypatch):
    device, clock = Device(monkeypatch, capturing=lambda: True), Clock()
    with Monitor(every=None, clock=clock) as m:
        stepped(m, clock, [10.0] * 3)
    assert device.events == []
    assert m.summary().steps == 3


def test_an_optimizers_step_inside_a_graphs_capture_is_none(monkeypatch):
    monkeypatch.setattr("surokit.profiler.monitoring.monitor.capturing", lambda: True)
    with Monitor(every=None) as m:
        train(3)
    assert repr(m) == "<Monitor before the first step>"


def test_events_of_two_devices_are_no_time(monkeypatch):
    device, clock = Device(monkeypatch), Clock()

    def refuse(end):
        raise ValueError("Events must be on the same device.")

    device.done = -1.0
    with Monitor(every=None, clock=clock) as m:
        stepped(m, clock, [10.0] * 3)
        for event in device.events:
            event.elapsed_time = refuse
        device.done = 1.0
        stepped(m, clock, [10.0])
        assert m._history.steps == 4
    assert m.frame().device_ms.isna().all()


def test_a_gpu_without_nvml_is_said_once(monkeypatch):
    Device(monkeypatch)
    clock = Clock()
    with Monitor(every=None, clock=clock) as m:
        stepped(m, clock, [10.0] * 3)
        watch: Any = m._device_watch
        watch._thread.join(20)
    with m:
        stepped(m, clock, [10.0] * 3)
    (note,) = m.summary().notes
    assert note.startswith("power and clocks are not read")
    assert note in repr(m)


# ------------------------------------------------------------------------------------------------------- real loops


def test_a_step_is_an_optimizers():
    with Monitor(every=None) as m:
        train(12)
    assert m.summary().steps == 12
    assert m.frame().wall_ms.gt(0).all()


def test_an_optimizer_whose_step_calls_its_base_class_counts_once():
    class Subclass(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model = Net()
    torch.optim.AdamW(model.parameters())  # torch wraps a class's step when it is first used
    with Monitor(every=None) as m:
        train(12, model, Subclass(model.parameters()))
    assert m.summary().steps == 12


def test_of_several_optimizers_the_one_that_steps_most_often():
    model = Net()
    parts = [model.emb, model.layers, model.head]
    once, often, twin = (torch.optim.SGD(part.parameters(), lr=1e-3) for part in parts)
    with Monitor(every=None) as m:
        for step in range(12):
            model(torch.ones(1, 4, dtype=torch.int64)).sum().backward()
            for optimizer in (once, often, twin):
                if optimizer is not once or step == 0:
                    optimizer.step()
    assert m.summary().steps == 12


def test_the_users_marks_replace_the_optimizers():
    clock = Clock()
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.ones(2)
    with Monitor(every=None, clock=clock) as m:
        for _ in range(4):
            clock.now += 0.1
            optimizer.step()
            clock.now += 0.1
            m.step()
    assert m.frame().wall_ms.tolist() == pytest.approx([200.0] * 4)


def test_what_was_measured_stays_when_the_loop_raises():
    def fail(step, loss):
        if step == 4:
            raise KeyError("mine")

    m = Monitor(every=8)
    with refused(KeyError), m:
        train(9, each=fail)
    assert m.summary().steps == 5


def test_marks_outside_the_block_are_nothing():
    m = Monitor(every=None)
    m.step()
    with m:
        train(2)
    m.step()
    assert m.summary().steps == 2


def test_sampled_windows_give_an_idle_share():
    x = torch.randn(200, 200)
    with Monitor(every=6) as m:
        for _ in range(28):
            for _ in range(10):
                x @ x
            m.step()
    summary = m.summary()
    activity = summary.activity
    assert activity.windows == 4
    assert 0 < activity.idle_frac < 1  # Python is between the operators
    assert summary.sustained.idle_frac == pytest.approx(activity.idle_frac)
    assert summary.sustained.lost_gpu_hours * 3600 == pytest.approx(
        summary.sustained.run_s - summary.sustained.step_s * (1 - activity.idle_frac), rel=1e-6
    )
    text = repr(summary)
    assert "4 windows" in text
    assert "by the sampled idle share" in text


def test_a_window_does_not_outlive_the_block():
    with Monitor(every=6) as m:
        for _ in range(5):
            m.step()
        assert torch._C._autograd._profiler_enabled()
    assert m.summary().activity.windows == 0


def test_training_is_the_same_with_it():
    def weights(watched):
        torch.manual_seed(0)
        model = Net()
        if watched:
            with Monitor(every=3):
                train(8, model)
        else:
            train(8, model)
        return [p.detach().clone() for p in model.parameters()]

    for a, b in zip(weights(False), weights(True)):
        assert torch.equal(a, b)


def test_it_shows_itself():
    clock = Clock()
    m = Monitor(every=None, clock=clock)
    assert repr(m) == "<Monitor before the first step>"
    assert "before the first step" in m._repr_html_()
    with refused(ValueError):
        m.summary()
    with m:
        stepped(m, clock, [10.0] * 20)
        text, page = repr(m), m._repr_html_()  # while it runs
    for words in (
        "steps/s, sustained",
        "last 1 s  1 min  10 min",
        "p5  p50  p95",
        "drift",
        "goodput",
        "hours lost",
    ):
        assert words in text
        assert words in page
    assert "GPU hours" not in text + page  # there is none
    assert repr(m.summary()) == repr(m)


def test_all_that_a_gpu_tells_is_shown():
    clock = Clock()
    with Monitor(every=None, clock=clock) as m:
        stepped(m, clock, [10.0] * 20)
    means = {"power_w": 412.3, "sm_mhz": 1755.0, "throttled": 0.25, "pcie_rx_mib_s": 120.0, "pcie_tx_mib_s": 3.5}
    text = repr(replace(m.summary(), device=DeviceFigures(8, means, {"power cap": 0.25})))
    for words in ("412 W", "1,755 MHz", "25.0%: power cap 25.0%", "120, 3.5 MiB/s"):
        assert words in text


def test_memory_is_flat():
    clock = Clock()
    with Monitor(tokens=1, every=None, clock=clock) as m:
        size = m._history._table.nbytes
        stepped(m, clock, [1.0] * 40_000)
    assert m._history._table.nbytes == size
    assert len(m.frame()) <= len(m._history._table)
    summary = m.summary()
    assert summary.steps == 40_000
    assert summary.sustained.step_s == pytest.approx(40)
    assert summary.sustained.tokens_per_s == pytest.approx(1000)
    assert math.isnan(summary.stall_ms)


@pytest.mark.parametrize(
    "options",
    [
        {"tokens": -1.0},
        {"usd_per_gpu_hour": math.nan},
        {"every": 2},
    ],
)
def test_what_cannot_be(options):
    with refused(ValueError):
        Monitor(**options)


def test_entering_it_twice_is_an_error():
    m = Monitor(every=None)
    with m, refused(RuntimeError), m:
        pass
    with m:
        m.step()
    assert m.summary().steps == 1


def test_monitors_inside_each_other_count_apart():
    with Monitor(every=None) as outer:
        train(2)
        with Monitor(every=None) as inner:
            train(3)
    assert (outer.summary().steps, inner.summary().steps) == (5, 3)


# ----------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_level_on_a_gpu():
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    data = [torch.randn(256, 1024, device="cuda") for _ in range(60)]
    with Monitor(tokens=256, every=20) as m:
        for x in m.batches(data):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.02)
    torch.cuda.synchronize()
    summary = m.summary()
    assert summary.activity.windows == 3
    assert summary.activity.idle_frac > 0.4  # the device sleeps with the host
    assert summary.activity.launches > 30
    assert summary.device_ms == pytest.approx(summary.sustained.step_s * 1e3 / 60, rel=0.3)
    assert summary.gap_ms > 10
    assert summary.notes == () or not summary.device.means
    assert summary.device.means.get("power_w", 100.0) > 10
