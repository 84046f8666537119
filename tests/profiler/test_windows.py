"""Sampled windows: exact on events and on a clock made up here; a real CPU loop shows that operators are found."""

import math
from types import SimpleNamespace

import pytest
import torch

import surokit.profiler.monitoring.windows as module
from surokit.profiler.monitoring.windows import Windows, activity, give_way, read_window
from surokit.profiler.record import tracer
from surokit.statistics import student_t
from tests.refusals import refused
from tests.train.toys import assert_same_state, make_session


def event(name, category, start_ns, took_ns):
    return SimpleNamespace(
        name=lambda: name,
        activity_type=lambda: category,
        start_ns=lambda: start_ns,
        duration_ns=lambda: took_ns,
        correlation_id=lambda: 1,
        linked_correlation_id=lambda: 0,
        device_resource_id=lambda: 7,
        sequence_nr=lambda: -1,
        nbytes=lambda: 0,
    )


def test_a_window_of_a_gpu_is_exact():
    events = [
        event("cudaLaunchKernel", "cuda_runtime", 0, 5),
        event("cuLaunchKernelEx", "cuda_driver", 10, 5),
        event("cudaGraphLaunch", "cuda_runtime", 15, 5),
        event("cudaMemcpyAsync", "cuda_runtime", 20, 5),
        event("gemm", "kernel", -50, 250),  # began before the window: 200 of it count
        event("relu", "kernel", 150, 150),  # overlaps by 50, another stream
        event("Memcpy HtoD", "gpu_memcpy", 900, 400),  # ends after it: 100 count
        event("everything", "gpu_user_annotation", 0, 1000),
        event("Stream Synchronize", "cuda_sync", 0, 1000),
    ]
    window = read_window(events, True, 212, 2, 0, 1000)
    assert (window.step, window.steps, window.launches) == (212, 2, 3)
    assert (window.wall_ms, window.busy_ms) == pytest.approx((1e-3, 400e-6))
    assert window.idle_frac == pytest.approx(0.6)


def test_a_window_of_a_cpu_is_its_operators():
    events = [
        event("aten::mm", "cpu_op", 100, 300),
        event("aten::t", "cpu_op", 150, 20),
        event("mine", "user_annotation", 0, 900),
    ]
    window = read_window(events, False, 2, 2, 0, 1000)
    assert window.busy_ms == pytest.approx(300e-6)
    assert math.isnan(window.launches)


def test_an_empty_window():
    window = read_window([], True, 2, 2, 0, 1000)
    assert (window.busy_ms, window.launches, window.idle_frac) == (0, 0, 1)


def test_students_quantiles():
    table = {1: 12.706, 2: 4.303, 4: 2.776, 5: 2.571, 6: 2.447, 10: 2.228, 30: 2.042, 120: 1.980, 10**6: 1.960}
    assert {n: round(student_t(0.975, n), 3) for n in table} == pytest.approx(table, abs=1e-9)


class Clock:
    """Time that passes only where it is told to, in place of `time` in surokit.profiler.monitoring.windows."""

    ns = 10**18

    def time_ns(self):
        return self.ns

    def perf_counter(self):
        return self.ns / 1e9

    def pass_ms(self, ms):
        self.ns += round(ms * 1e6)


def test_half_of_the_time_idle_on_a_cpu(monkeypatch):
    """Each step computes for 10 ms and waits for as long; torch's profiler really runs, on a clock of this test."""
    clock, operators = Clock(), list[SimpleNamespace]()

    def stopped(*args, **kwargs):
        real(*args, **kwargs)
        return SimpleNamespace(events=lambda: operators)

    real = tracer.stopped
    monkeypatch.setattr(module, "stopped", stopped)
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "synchronize", lambda: clock.pass_ms(1))  # a window's start and end take their time
    windows, found = Windows(every=8, steps=2), list[module.Window]()
    for step in range(1, 35):
        operators.append(event("aten::mm", "cpu_op", clock.ns, 10_000_000))
        clock.pass_ms(20)
        if (window := windows.tick(step)) is not None:
            found.append(window)
    assert [w.step for w in found] == [8, 16, 24, 32]
    assert all(w.steps == 2 and math.isnan(w.launches) for w in found)
    assert [(w.wall_ms, w.busy_ms) for w in found] == [(41.0, 20.0)] * 4  # it waits for the device before its end
    estimate = windows.estimate()
    assert estimate.windows == 4
    assert (estimate.idle_low, estimate.idle_frac, estimate.idle_high) == pytest.approx((21 / 41,) * 3)
    assert estimate.cost_s == pytest.approx(4 * 2e-3, rel=1e-3)
    assert windows.notes == []
    assert not torch._C._autograd._profiler_enabled()


def test_operators_of_a_real_loop_are_busy_time(monkeypatch):
    windows, found, counts = Windows(every=8, steps=2), list[module.Window](), list[int]()

    def read_counting(events, *args):
        counts.append(sum(event.name() == "aten::mm" for event in events))
        return read_window(events, *args)

    monkeypatch.setattr(module, "read_window", read_counting)
    x = torch.randn(300, 300)
    for step in range(1, 35):
        x @ x
        if (window := windows.tick(step)) is not None:
            found.append(window)
    assert [w.step for w in found] == [8, 16, 24, 32]
    assert counts == [2] * 4
    assert all(w.busy_ms > 0 for w in found)  # torch's times are those of the same clock
    assert windows.notes == []


def test_the_interval_is_students():
    windows = Windows(every=10)
    shares = [0.1, 0.2, 0.3, 0.2]
    for share in shares:
        windows.add(module.Window(1, 2, 10.0, 10.0 * (1 - share), 8.0))
    estimate = windows.estimate()
    half = 3.1824463 * torch.tensor(shares).std().item() / 2
    assert estimate.idle_frac == pytest.approx(0.2)
    assert (estimate.idle_low, estimate.idle_high) == pytest.approx((0.2 - half, 0.2 + half))
    assert estimate.launches == 4


def test_no_interval_from_one_window_and_no_estimate_from_none():
    windows = Windows()
    assert math.isnan(windows.estimate().idle_frac)
    windows.add(module.Window(1, 2, 10.0, 9.0, math.nan))
    estimate = windows.estimate()
    assert estimate.idle_frac == pytest.approx(0.1)
    assert math.isnan(estimate.idle_low)
    assert math.isnan(estimate.launches)


def test_another_profiler_is_left_alone():
    windows = Windows(every=4, steps=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as other:
        for step in range(1, 13):
            torch.ones(2).add(1)
            assert windows.tick(step) is None
    assert windows.notes == ["another torch profiler was running: that window was left out"]
    assert any(e.key == "aten::add" for e in other.key_averages())
    assert windows.estimate().windows == 0


def test_a_window_that_another_profiler_takes_over():
    windows = Windows(every=4, steps=1)
    windows.tick(3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        torch.ones(2).add(1)
    assert windows.tick(4) is None
    assert windows.notes == ["another torch profiler took a window over: that window was left out"]
    windows.tick(7)
    torch.ones(2).add(1)
    assert windows.tick(8) is not None


def test_a_profiler_that_does_not_start_turns_windows_off(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("no")

    monkeypatch.setattr(torch.profiler, "profile", refuse)
    windows = Windows(every=4, steps=1)
    assert [windows.tick(step) for step in range(1, 9)] == [None] * 8
    assert windows.notes == ["windows are off: RuntimeError: no"]
    assert windows.off


def test_a_driver_that_records_nothing_turns_windows_off(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(module, "synchronize", lambda: None)
    cpu = torch.profiler.ProfilerActivity.CPU  # which has no activity of a device
    monkeypatch.setattr(module, "ProfilerActivity", SimpleNamespace(CUDA=cpu))
    windows = Windows(every=4, steps=1)
    with torch.profiler.record_function("open"):
        windows.tick(3)
        torch.ones(2).add(1)
        assert windows.tick(4) is None
        assert not tracer.ranges_left()  # a GPU's window sees none
    assert windows.off
    assert "CUPTI refused" in windows.notes[0]
    assert windows.estimate().windows == 0


def test_a_dropped_window_leaves_no_profiler():
    windows = Windows(every=4, steps=2)
    windows.drop()
    windows.tick(2)
    assert torch._C._autograd._profiler_enabled()
    windows.drop()
    assert not torch._C._autograd._profiler_enabled()
    assert windows.tick(4) is None
    assert windows.estimate().windows == 0


def test_no_window_begins_while_a_range_that_an_earlier_one_saw_is_open():
    windows = Windows(every=4, steps=1)
    windows.tick(3)
    with torch.profiler.record_function("epoch"):
        torch.ones(2).add(1)
        assert windows.tick(4) is not None
        windows.tick(7)
        assert not torch._C._autograd._profiler_enabled()
        assert windows.notes == ["a range that an earlier window saw is open: that window was left out"]
    windows.tick(11)
    with torch.profiler.record_function("epoch"):
        torch.ones(2).add(1)
    assert windows.tick(12) is not None


def test_no_window_begins_inside_the_backward_pass():
    windows = Windows(every=4, steps=1)
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: windows.tick(3) and None)
    x.sum().backward()
    assert not torch._C._autograd._profiler_enabled()
    assert windows.notes == ["the optimizer steps inside the backward pass, where no window begins or ends"]


def test_no_window_begins_while_a_cuda_graph_is_recorded(monkeypatch):
    monkeypatch.setattr(module, "capturing", lambda: True)
    windows = Windows(every=4, steps=1)
    windows.tick(3)
    assert not torch._C._autograd._profiler_enabled()
    assert windows.notes == []


def test_what_fails_as_a_window_begins_leaves_no_profiler(monkeypatch):
    def fail():
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(module, "synchronize", fail)
    windows = Windows(every=4, steps=1)
    windows.tick(3)
    assert not torch._C._autograd._profiler_enabled()
    assert windows.notes == ["windows are off: RuntimeError: CUDA error"]


def test_a_window_gives_way():
    give_way()
    windows = Windows(every=4, steps=2)
    windows.tick(2)
    give_way()
    assert not torch._C._autograd._profiler_enabled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as other:
        torch.ones(2).add(1)
        assert windows.tick(4) is None
    assert any(e.key == "aten::add" for e in other.key_averages())
    windows.tick(6)
    torch.ones(2).add(1)
    assert windows.tick(8) is not None
    assert windows.notes == []


@pytest.mark.parametrize(("every", "steps"), [(2, 2), (1, 1), (5, 0), (0, 1)])
def test_windows_that_cannot_be(every, steps):
    with refused(ValueError):
        Windows(every, steps)
    with refused(ValueError):
        activity(every, steps=steps)


# -------------------------------------------------------------------------------------------------------- in a Session


def test_a_session_samples_and_trains_the_same():
    plain, sampled = make_session(), make_session(meters=[activity(every=6)])
    for session in (plain, sampled):
        session.run(14)
    assert_same_state(plain, sampled)
    busy = sampled.records.column("busy_frac")
    assert [int(step) for step in sampled.records.column("step")[busy == busy]] == [6, 12]
    assert ((busy[busy == busy] > 0) & (busy[busy == busy] <= 1)).all()
    assert "launches" not in sampled.records.names
    summary = sampled.summary()
    assert summary.sampled_idle_frac == pytest.approx(1 - busy[busy == busy].mean())
    assert "idle, sampled" in repr(summary)
    assert plain.summary().sampled_idle_frac is None
    assert "idle, sampled" not in repr(plain.summary())


def test_a_window_does_not_outlive_the_run_and_holds_no_evaluation(batch):
    session = make_session(meters=[activity(every=6)], eval=[batch])
    session.run(5)  # the window opened behind step 4
    assert not torch._C._autograd._profiler_enabled()
    session.run(4)
    assert "busy_frac" not in session.records.names
    session.run(2)
    session.evaluate()
    assert not torch._C._autograd._profiler_enabled()
    session.run(7)
    busy = session.records.column("busy_frac")
    assert session.records.column("step")[busy == busy].tolist() == [18]


def test_a_fork_gets_a_meter_of_its_own():
    session = make_session(meters=[activity(every=6)])
    (mine,), (its,) = session.measuring.meters, session.fork().measuring.meters
    assert isinstance(its, module.ActivityMeter)
    assert its is not mine
    assert its.value == activity(every=6)
