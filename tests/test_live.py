"""`sk.Live` around a foreign loop: columns, late values, order, endings, bad input."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch

import surokit.live
from surokit.live import Live


class View:
    every_s = 0.25

    def __init__(self):
        self.steps, self.ended = [], []

    def show(self, state, final):
        self.steps.append(state.step)
        if final:
            self.ended.append(state.reason)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class SlowDevice:
    """Stands for values on their way from a device: they arrive when the test says so."""

    def __init__(self, values, made):
        self.values = {name: float(value) for name, value in values.items()}
        self.here = False
        made.append(self)

    def ready(self):
        return self.here

    def wait(self):
        self.here = True
        return self.values


class OpenLive(Live):
    """A Live whose view and clock a test can reach."""

    def __init__(self):
        self.view, self.clock = View(), Clock()
        super().__init__("mine", total=100, view=self.view, clock=self.clock)


@pytest.fixture
def live():
    return OpenLive()


@pytest.fixture
def slow(monkeypatch):
    """Every tensor counts as one on a device."""

    def sort(name, value, known, coming):
        if isinstance(value, torch.Tensor):
            coming.setdefault(value.device, {})[name] = value.detach()
        else:
            known[name] = float(value)

    made: list[SlowDevice] = []
    monkeypatch.setattr(surokit.live, "Late", lambda values, host: SlowDevice(values, made))
    monkeypatch.setattr(surokit.live, "_sort", sort)
    return made


def test_a_loop(live):
    weight = torch.ones((), requires_grad=True)
    for step in range(1, 11):
        live.clock.now += 0.5
        live.log(loss=weight * step, tokens=4096, lr=np.float32(0.25), extra=torch.tensor([7]))
    live.close()
    frame = live.frame()
    assert list(frame["step"]) == list(range(1, 11))
    assert list(frame["loss"]) == [float(s) for s in range(1, 11)]
    assert set(frame["tokens"]) == {4096.0}
    assert set(frame["wall_ms"]) == {500.0}
    assert frame["elapsed_s"].iloc[-1] == 5.0
    assert set(frame["lr"]) == {0.25}
    assert set(frame["extra"]) == {7.0}
    assert live.state.rate_sustained.last[1] == pytest.approx(8192)
    assert live.view.ended == ["done"]
    assert live.view.steps[-1] == 10


def test_a_cpu_tensor_is_read_before_it_changes(live):
    total = torch.zeros(())
    for _ in range(3):
        total += 1.0
        live.log(loss=total)
    assert list(live.frame()["loss"]) == [1.0, 2.0, 3.0]


def test_steps_may_be_numbered_and_added_to(live):
    live.log(step=10, loss=1.0)
    live.log(step=20, tokens=5)
    live.log(step=20, loss=2.0, eval_loss=2.5)
    live.log(loss=3.0)
    live.close()
    frame = live.frame()
    assert list(frame["step"]) == [10, 20, 21]
    assert list(frame["loss"]) == [1.0, 2.0, 3.0]
    assert frame["eval_loss"].iloc[1] == 2.5
    assert live.state.held_out.points() == ([20], [2.5])


def test_nothing_waits_for_the_device(live, slow):
    for step in range(1, 6):
        live.clock.now += 1.0
        live.log(loss=torch.tensor(float(step)), tokens=8)
    assert not any(value.here for value in slow)
    assert "loss" not in live.frame()
    assert list(live.frame()["tokens"]) == [8.0] * 5
    assert live.state.step == 0
    slow[1].here = True  # out of order: the second waits for the first
    live.clock.now += 10.0
    live.log(tokens=8)
    assert live.state.step == 0
    slow[0].here = True
    live.log(tokens=8)
    live.clock.now += 10.0
    live.log(tokens=8)
    assert live.state.loss.points() == ([1, 2], [1.0, 2.0])
    live.close()  # now it waits
    assert live.state.loss.points() == ([1, 2, 3, 4, 5], [1.0, 2.0, 3.0, 4.0, 5.0])
    assert list(live.frame()["loss"].fillna(-1)) == [1.0, 2.0, 3.0, 4.0, 5.0, -1, -1, -1]


@pytest.mark.parametrize(
    ("error", "reason"),
    [(KeyboardInterrupt(), "interrupted"), (ValueError("no data"), "failed: ValueError: no data")],
)
def test_a_with_block_that_breaks_says_why(error, reason):
    view = View()

    def train():
        with Live(view=view) as live:
            live.log(loss=1.0)
            raise error

    with pytest.raises(type(error)):
        train()
    assert view.ended == [reason]


def test_a_with_block_ends_once():
    view = View()
    with Live(view=view) as live:
        live.log(loss=1.0)
    live.close("twice")
    assert view.ended == ["done"]


def test_a_loop_that_goes_on_after_close(live):
    live.clock.now += 1.0
    live.log(loss=1.0)
    live.close()
    live.clock.now += 1_000.0  # coffee is no training time
    live.log(loss=1.0)
    live.clock.now += 1.0
    live.log(loss=1.0)
    live.close()
    assert live.view.ended == ["done", "done"]
    assert live.frame()["elapsed_s"].iloc[-1] == 2.0
    assert math.isnan(live.frame()["wall_ms"].iloc[1])


def test_bad_input(live):
    live.log(step=5, loss=1.0)
    with pytest.raises(ValueError, match=r"log\(step=3\) after step 5: steps only go up"):
        live.log(step=3, loss=1.0)
    with pytest.raises(ValueError, match=r"loss=tensor of shape \(2, 3\).*one element"):
        live.log(loss=torch.zeros(2, 3))
    with pytest.raises(TypeError, match=r"loss='1.0'.*a number"):
        live.log(loss="1.0")
    with pytest.raises(TypeError, match=r"grad=list.*a number"):
        live.log(grad=[1.0])
    with pytest.raises(ValueError, match="seconds and positive"):
        Live(every=0)
    live.log(loss=2.0)  # a refused call leaves nothing behind
    assert list(live.frame()["step"]) == [5, 6]


def test_not_a_number_is_a_warning_not_an_error(live):
    live.log(loss=torch.tensor(math.nan))
    live.close()
    assert live.state.warning_lines() == ["loss not finite (NaN or infinite), at step 1"]


class Shell:
    """An IPython shell's event hooks."""

    def __init__(self):
        self.callbacks = []
        self.events = self

    def register(self, name, callback):
        assert name == "post_run_cell"
        self.callbacks.append(callback)

    def unregister(self, name, callback):
        self.callbacks.remove(callback)


class Result:
    def __init__(self, error=None):
        self.error_in_exec, self.error_before_exec = error, None


def test_a_cell_that_fails_ends_the_panel(monkeypatch):
    shell = Shell()
    monkeypatch.setitem(sys.modules, "IPython", type("IPython", (), {"get_ipython": staticmethod(lambda: shell)}))
    view = View()
    live = Live(view=view)
    live.log(loss=1.0)
    live.log(loss=2.0)
    shell.callbacks[0](Result())  # a cell that ends well: the latest picture, the run may go on
    assert view.steps[-1] == 2
    assert view.ended == []
    shell.callbacks[0](Result(ZeroDivisionError("division by zero")))
    assert view.ended == ["failed: ZeroDivisionError: division by zero"]
    assert shell.callbacks == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_log_does_not_sync():
    live = Live(view=View())
    x = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):  # warm-up: the pinned buffers
        live.log(loss=(x @ x).mean())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            live.log(loss=(x @ x).mean(), tokens=4096)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    live.close()
    assert live.state.loss.count == 40
    assert live.frame()["loss"].notna().all()
