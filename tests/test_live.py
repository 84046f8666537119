"""`sk.Live` around a foreign loop: columns, late values, order, endings, bad input."""

from __future__ import annotations

import math
import signal
import sys
import threading

import numpy as np
import pytest
import torch

import surokit.live
from surokit.live import Live
from surokit.runs import control, status
from surokit.runs.control import RunControl
from surokit.runs.jsonl import read
from surokit.train import NoTargetsError
from surokit.train.observing import Observer
from surokit.train.run_info import Light, gpus_of
from surokit.widgets.folder import FileControl, RunFolder
from surokit.widgets.picture import sustained_lines
from tests import clocks
from tests.clocks import until
from tests.refusals import refused


class View:
    every_s = 0.25

    def __init__(self):
        self.steps, self.ended = [], []

    def show(self, states, final):
        (state,) = states.values()
        self.steps.append(state.step)
        if final:
            self.ended.append(state.reason)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def time(monkeypatch):
    """Passes only while a loop waits."""
    clock = clocks.Clock()
    for module in (surokit.live, control):
        monkeypatch.setattr(module, "time", clock)
    return clock


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

    def __init__(self, **options):
        self.view, self.clock = View(), Clock()
        super().__init__("mine", total=100, view=self.view, clock=self.clock, **options)


def read_status(folder):
    return status.read_status(folder)


def written_in(folder):
    return read(folder / "records.jsonl")


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
    monkeypatch.setattr(surokit.live, "Deferred", lambda values, host: SlowDevice(values, made))
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


def test_an_evaluation_after_the_end_is_no_new_loop(tmp_path):
    """As Trainers do: train(), then evaluate()."""
    view = View()
    live = Live(run_dir=tmp_path / "run", view=view)
    live.log(loss=1.0)
    live.close()
    live.log(step=1, eval_loss=torch.tensor(2.0))
    assert live.state.reason == "done"
    assert live.state.held_out.points() == ([1], [2.0])
    assert view.ended == ["done"]
    assert list(live.frame()["eval_loss"]) == [2.0]
    assert list(written_in(live.run_dir)["eval_loss"]) == [2.0]
    assert read_status(live.run_dir).state == "done"
    live.log(loss=1.0)  # a loop that goes on
    assert live.state.reason is None


def test_a_late_evaluation_after_the_end_is_waited_for(live, slow):
    live.log(loss=torch.tensor(1.0))
    live.close()
    live.log(step=1, eval_loss=torch.tensor(2.0))
    assert live.state.held_out.points() == ([1], [2.0])


def test_bad_input(live):
    live.log(step=5, loss=1.0)
    with refused(ValueError):
        live.log(step=3, loss=1.0)
    with refused(ValueError):
        live.log(loss=torch.zeros(2, 3))
    with refused(TypeError):
        live.log(loss="1.0")
    with refused(TypeError):
        live.log(grad=[1.0])
    with refused(ValueError):
        Live(every=0)
    with refused(ValueError):
        Live(gpus=0)
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


# -- what others ask of the loop


def test_a_loop_stops_when_it_is_asked(live):
    assert not live.control.stop_wanted()
    live.log(loss=1.0)
    live.control.stop()
    assert live.stop_asked
    assert live.stop_asked  # until it does
    live.close()
    assert live.view.ended == ["stopped: by live.control.stop()"]
    live.log(loss=1.0)  # the next loop
    assert not live.control.stop_wanted()
    live.close()
    assert live.view.ended == ["stopped: by live.control.stop()", "done"]


def test_a_loop_that_does_not_look_is_told_how(live):
    with refused(RuntimeError):
        live.control.stop()
    with refused(RuntimeError):
        live.control.pause()
    with refused(RuntimeError):
        live.control.save()
    assert live.stop_asked  # it was asked all the same
    assert live.save_asked
    assert not live.save_asked  # once
    live.control.stop()
    live.wait_while_paused()  # a loop that is to stop does not wait


def test_a_pause_is_no_steps_time(live, time):
    live.log(loss=1.0)
    live.wait_while_paused()  # nobody asked
    live.control.pause()

    def resume():
        assert live.state.paused
        live.clock.now += 100.0
        live.control.resume()

    time.after(100.0, resume)
    live.wait_while_paused()
    assert time.sleeps == 2000
    assert not live.state.paused
    live.clock.now += 2.0
    live.log(loss=1.0)
    assert live.frame()["wall_ms"].iloc[1] == pytest.approx(2000.0)


def test_a_stop_ends_a_pause(live, time):
    live.wait_while_paused()
    assert not live.control.stop_wanted()
    live.control.pause()
    time.after(0.1, lambda: live.control.stop("stopped: enough"))
    live.wait_while_paused()
    assert live.stop_asked
    live.close()
    assert live.view.ended == ["stopped: enough"]


def test_notes_and_health_are_on_the_panel(live):
    for step in range(1, 301):
        live.log(loss=3.0 - 0.001 * step + 0.01 * math.sin(step) + 50.0 * (step == 200))
        if step == 150:
            live.note("lr halved")
    live.close()
    events = {event.kind: event for event in live.state.events if event.kind in ("note", "spike")}
    assert (events["note"].step, events["note"].text) == (150, "lr halved")
    assert events["spike"].step == 200
    assert live.state.health.phase == "converging"


def test_goodput_is_only_told_where_waits_are(live):
    for _ in range(3):
        live.clock.now += 1.0
        live.log(loss=2.0, tokens=100)
    assert (live.state.goodput, live.state.lost_s) == (None, None)
    assert sustained_lines(live.state) == ["Tokens/s: 1 s 100, all 100"]
    live.clock.now += 1.0
    live.log(loss=2.0, tokens=100, stall_ms=500.0)
    assert live.state.goodput == 3.5 / 4
    assert sustained_lines(live.state)[0].endswith("goodput 87.5 % · 0.5 s lost")


def test_what_is_no_step_is_time_of_the_run(time, tmp_path, monkeypatch):
    monkeypatch.setattr(surokit.live, "gpus_of", lambda *_: 2)
    live = OpenLive(run_dir=tmp_path / "run", usd_per_gpu_hour=3.0)

    def told():
        return live.state.goodput, live.state.gpu_hours, live.state.usd, read_status(live.run_dir).run_s

    def over():
        live.clock.now += 20.0
        live.control.resume()

    for _ in range(2):
        live.wait_while_paused()
        live.clock.now += 10.0
        live.log(loss=2.0, stall_ms=0.0)
        with live.aside():
            live.clock.now += 70.0
        live.control.pause()
        time.after(1.0, over)
        live.wait_while_paused()
    live.close()
    assert told() == pytest.approx((0.1, 2 * 200 / 3600, 3.0 * 2 * 200 / 3600, 200.0))
    live.clock.now += 1000.0  # nothing runs
    live.log(loss=2.0, stall_ms=0.0)
    live.clock.now += 10.0
    live.log(loss=2.0, stall_ms=0.0)
    live.close()
    assert told() == pytest.approx((30 / 210, 2 * 210 / 3600, 3.0 * 2 * 210 / 3600, 210.0))
    (watched,) = surokit.watch(tmp_path / "run", follow=False, view="text").states.values()
    assert (watched.goodput, watched.gpu_hours) == pytest.approx((30 / 210, 2 * 210 / 3600))


def test_a_loop_that_goes_on_in_a_folder_goes_on_in_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr(surokit.live, "gpus_of", lambda *_: 1)

    def watched():
        (state,) = surokit.watch(tmp_path / "run", follow=False, view="text").states.values()
        return state.step, state.run_s, state.gpu_hours, state.elapsed_s

    def steps(first, last, exist):
        live = OpenLive(run_dir=tmp_path / "run", exist=exist)
        with live:
            assert exist == "new" or watched()[:2] == (5, 100.0)  # before it has a step
            for step in range(first, last + 1):
                live.clock.now += 10.0
                live.log(step=step, loss=2.0, stall_ms=0.0)
                with live.aside():
                    live.clock.now += 10.0
        return live

    steps(1, 5, "new")
    live = steps(4, 6, "resume")  # from a checkpoint behind step 3
    assert list(written_in(live.run_dir)["elapsed_s"]) == [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]
    assert (live.state.goodput, live.state.gpu_hours) == pytest.approx((0.5, 160 / 3600))
    assert watched() == pytest.approx((6, 160.0, 160 / 3600, 60.0))


def test_the_price_gives_dollars_on_a_gpu_only():
    live = Live(view=View(), usd_per_gpu_hour=2.0)
    live.log(loss=1.0)
    assert (live.info.device, live.info.gpus) == ("cpu", 0)
    assert live.state.usd is None


# -- a folder


def test_a_folder_has_what_was_logged(tmp_path):
    view, clock = View(), Clock()
    live = Live("mine", total=10, run_dir=tmp_path / "run", view=view, clock=clock)
    assert read_status(live.run_dir).state == "running"
    for step in range(1, 6):
        clock.now += 0.5
        live.log(loss=float(step) if step != 3 else math.nan, tokens=64, acc=0.5)
    live.log(step=5, eval_loss=4.5)
    live.note("here")
    live.close()
    columns = written_in(live.run_dir)
    frame = live.frame()
    for name in ("step", "loss", "tokens", "wall_ms", "elapsed_s", "acc", "eval_loss"):
        np.testing.assert_array_equal(columns[name], frame[name])
    said = read_status(live.run_dir)
    assert (said.state, said.step, said.info.title, said.info.total) == ("done", 5, "mine", 10)
    assert "here" in [event["text"] for event in said.events]
    again = Live(run_dir=tmp_path / "run", view=View())
    assert again.run_dir == tmp_path / "run-2"
    again = Live(run_dir=tmp_path / "run", exist="resume", view=View())
    again.log(step=5, loss=7.0)
    again.close()
    assert list(read(tmp_path / "run" / "records.jsonl")["loss"][3:]) == [4.0, 7.0]
    with refused(ValueError):
        Live(exist="maybe", view=View())  # type: ignore[arg-type]


def test_tokens_that_are_no_number_harm_nothing(tmp_path):
    live = Live(run_dir=tmp_path / "run", view=View())
    live.log(loss=1.0, tokens=math.nan)
    live.log(loss=2.0, tokens=3)
    live.close()
    np.testing.assert_array_equal(written_in(tmp_path / "run")["tokens"], [math.nan, 3.0])


def test_late_values_are_written_when_they_arrive(tmp_path, slow):
    live = Live(run_dir=tmp_path / "run", view=View())
    live.log(loss=torch.tensor(1.0))
    live.log(loss=torch.tensor(2.0))
    live.close()
    assert list(read(tmp_path / "run" / "records.jsonl")["loss"]) == [1.0, 2.0]


def test_files_ask_and_a_watcher_sees_it(tmp_path, monkeypatch):
    monkeypatch.setattr(RunControl, "look_every_s", 0.0)
    (tmp_path / "stop").touch()  # of an earlier run
    live = Live("mine", run_dir=tmp_path, exist="resume", view=View())
    assert not live.control.stop_wanted()
    folder = RunFolder(tmp_path)
    control = FileControl([folder])
    folder.look()
    control.save()
    control.pause()
    paused = []

    def resume():
        until(lambda: read_status(tmp_path).state == "paused")
        paused.append(True)
        control.resume()

    threading.Thread(target=resume, daemon=True).start()
    live.log(loss=1.0)
    live.wait_while_paused()
    assert paused
    assert live.save_asked
    assert not (tmp_path / "save").exists()
    control.stop()
    assert live.stop_asked
    live.close()
    folder.look()
    assert (folder.state.step, folder.state.reason, folder.over) == (1, "stopped: by watch(...).control.stop()", True)


def test_a_folder_that_does_not_answer_stops_no_loop(tmp_path, monkeypatch):
    live = Live(run_dir=tmp_path, view=View())
    exists = type(tmp_path).exists

    def stale(path, *a, **k):
        if path.name == "pause":
            raise OSError(116, "Stale file handle")
        return exists(path, *a, **k)

    monkeypatch.setattr(type(tmp_path), "exists", stale)
    assert not live.stop_asked
    live.wait_while_paused()
    live.close()


def test_a_loop_that_breaks_says_so_in_its_folder(tmp_path):
    def train():
        with Live(run_dir=tmp_path / "run", view=View()) as live:
            live.log(loss=1.0)
            raise ValueError("no data")

    with refused(ValueError):
        train()
    assert read_status(tmp_path / "run").state == "failed: ValueError: no data"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# torch says once that the mode is a prototype
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_on_a_gpu_log_does_not_sync():
    pytest.importorskip("pandas")  # for the frame, and not wherever there is a GPU
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


def test_steps_without_a_label_that_counts(tmp_path):
    with Live(run_dir=tmp_path / "run", view=View()) as live:
        for step in range(1, 6):
            live.log(loss=2.0 if step != 3 else 0.0, grad_norm=1.0, targets=torch.tensor(64 * (step != 3)))
    frame = live.frame()
    assert frame.loss.isna().tolist() == frame.grad_norm.isna().tolist() == [s == 3 for s in range(1, 6)]
    assert [e.kind for e in live.state.events] == ["no_targets"]
    assert live.state.loss.count == 4
    rows = read(tmp_path / "run" / "records.jsonl")
    assert np.isnan(rows["loss"]).tolist() == [s == 3 for s in range(1, 6)]


def test_a_loss_that_comes_later_in_such_a_step_is_none(live):
    live.log(targets=0)
    live.log(loss=0.0, step=1)
    assert live.state.loss.count == 0
    assert "loss" not in live.frame()


def test_five_steps_without_a_label_that_counts_are_an_error(live):
    live.log(loss=2.0, targets=8)
    for _ in range(4):
        live.log(loss=0.0, targets=0)
    with refused(NoTargetsError):
        live.log(loss=0.0, targets=0)
    assert len(live.frame()) == 6
    live.log(loss=2.0, targets=8)
    live.log(loss=0.0, targets=0)


def test_late_counts_are_an_error_when_they_arrive(live, slow):
    for _ in range(5):
        live.log(loss=torch.tensor(0.0), targets=torch.tensor(0))
    assert not live.state.events
    for values in slow:
        values.here = True
    with pytest.raises(NoTargetsError):
        live.log(loss=2.0, targets=4)


def test_losses_of_exactly_zero_are_suspected(live):
    for _ in range(6):
        live.clock.now += 1.0
        live.log(loss=0.0)
    assert [e.kind for e in live.state.events] == ["no_targets"]


class Words(torch.nn.Module):
    """Returns a loss as transformers' models do, and knows nothing else of them."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, input_ids, labels=None, attention_mask=None):
        return {"loss": self.weight * input_ids.float().mean()}


def test_a_model_and_its_optimizer_need_no_line_in_the_loop():
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ids = torch.full((2, 8), 3)
    mask = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])
    labels = ids.where(mask.bool(), -100)
    rows = [{"input_ids": ids, "labels": labels, "attention_mask": mask}] * 4
    live = OpenLive(model=model, optimizer=optimizer)
    with live:
        for number, batch in enumerate(live.batches(rows)):
            live.clock.now += 1.0
            model(**batch)["loss"].backward()
            if number % 2:
                optimizer.step()
                live.log(grad_norm=2.0)  # beside the step that was just taken
        live.clock.now += 1.0
        with live.aside():
            live.clock.now += 100.0
    frame = live.frame()
    assert list(frame["step"]) == [1, 2]
    assert list(frame["loss"]) == [3.0, 3.0]
    assert list(frame["tokens"]) == [26, 26]
    assert list(frame["targets"]) == [26, 26]
    assert list(frame["grad_norm"]) == [2.0, 2.0]
    assert frame["peak_gib"].gt(0).all()
    assert list(frame["wall_ms"]) == [2000.0, 2000.0]
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_the_panel_of_one_process_counts_all(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ids = torch.full((2, 8), 3)
    live = OpenLive(model=model, optimizer=optimizer)
    with live:
        for _ in range(2):
            live.clock.now += 1.0
            model(ids, labels=ids)["loss"].backward()
            optimizer.step()
        model(ids)["loss"].backward()
        live.log(tokens=7)  # that the loop says is of all already
        optimizer.step()
    assert list(live.frame()["tokens"]) == [128, 128, 7]
    assert list(live.frame()["targets"].fillna(0)) == [128, 128, 0]
    assert list(live.frame()["loss"]) == [3.0, 3.0, 3.0]
    cuda = torch.device("cuda")
    assert (gpus_of(cuda), gpus_of(cuda, 2), gpus_of(torch.device("cpu"), 2)) == (8, 2, 0)


@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize("knows_model", [False, True])
def test_what_is_logged_before_the_optimizers_step_is_that_steps(knows_model, batches):
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    live = OpenLive(model=model if knows_model else None, optimizer=optimizer)
    rows = [{"input_ids": torch.full((2, 8), number)} for number in (1, 2, 3, 4, 5)]
    with live:
        for number, batch in enumerate(live.batches(rows) if batches else rows, 1):
            loss = model(**batch)["loss"]
            loss.backward()
            live.log(loss=loss + 10, norm=number)
            if number < 5:
                optimizer.step()
            if number == 4 and (batches or knows_model):
                live.log(eval_loss=7.0)
    frame = live.frame()
    assert list(frame["step"]) == [1, 2, 3, 4]
    assert list(frame["loss"]) == [11.0, 12.0, 13.0, 14.0], "not the model's own, and nothing of a step that never came"
    assert list(frame["norm"]) == [1, 2, 3, 4]
    if batches or knows_model:
        assert list(frame["eval_loss"].fillna(0)) == [0, 0, 0, 7]


def test_a_step_may_be_numbered_before_the_optimizer_takes_it():
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with OpenLive(optimizer=optimizer) as live:
        for step in (1, 2):
            model(torch.ones(1, 2))["loss"].backward()
            live.log(step=step, loss=float(step))
            optimizer.step()
    assert live.frame()[["step", "loss"]].values.tolist() == [[1, 1], [2, 2]]


@pytest.mark.parametrize("wrong", [{"optimizer": "x"}, {"model": "x"}])
def test_what_is_no_optimizer_or_model_leaves_nothing_behind(wrong, tmp_path):
    model = Words()
    with refused(TypeError):
        Live(run_dir=tmp_path / "run", **{"model": model, **wrong})
    assert not model._forward_hooks
    assert not (tmp_path / "run").exists()


def test_waits_and_pauses_of_a_loop_are_told_apart(live):
    def slow():
        for _ in range(3):
            live.clock.now += 1.0  # until a batch is there
            yield 1

    for _ in live.batches(slow()):
        live.clock.now += 3.0
        live.log(loss=1.0)
        with live.aside():
            live.clock.now += 50.0
    frame = live.frame()
    assert list(frame["stall_ms"]) == [1000.0, 1000.0, 1000.0]
    assert list(frame["wall_ms"]) == [4000.0, 4000.0, 4000.0]
    assert list(frame["idle_frac"]) == [0.25, 0.25, 0.25]
    assert live.state.idle_causes == {"data": 0.25, "between steps": 0.0}


def test_the_work_of_a_model_is_counted_by_a_named_convention(monkeypatch):
    from surokit.train import run_info

    model = surokit.Decoder(surokit.DecoderConfig(layers=1, width=32, heads=2, kv_heads=1, vocab=16, ffn=64))
    monkeypatch.setattr(run_info, "device_name", lambda device: "NVIDIA H100 80GB HBM3")
    found = run_info.light_of_foreign(model, torch.device("cuda"), 8)
    plan = surokit.plan(model, length=8, gpu="H100")
    assert found.flops_per_token == plan.flops_per_token
    assert found.peak_tflops
    assert "causal attention" in run_info.FLOPS


def test_flops_are_told_anew_where_rows_get_longer(monkeypatch):
    monkeypatch.setattr(
        "surokit.live.light_of_foreign", lambda model, device, length: Light(float(length), 1.0, "a GPU")
    )
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    told = []
    with OpenLive(model=model, optimizer=optimizer) as live:
        for ids in (torch.ones(2, 8), torch.ones(4, 8), torch.ones(1, 48)):
            model(ids.long())["loss"].backward()
            optimizer.step()
            assert live.state.info is not None
            told.append(live.state.info.flops_per_token)
    assert told == [8, 8, 28]
    observer = Observer(model)
    model(torch.ones(1, 12).long())
    observer.see({"input_ids": torch.ones(1, 12).long(), "cu_seq_lens_q": torch.tensor([0, 4, 12])})
    assert observer.lengths.mean == 9


def test_a_loop_that_looks_can_answer_interrupts(live, capsys):
    with live.control.interruptible():
        for step in range(1, 10):
            live.log(loss=1.0)
            if step == 3:
                signal.raise_signal(signal.SIGINT)
            if live.stop_asked:
                break
    live.close()
    assert live.state.step == 3
    assert live.view.ended == ["interrupted"]
    assert "stopping after this step; interrupt again" in capsys.readouterr().err
