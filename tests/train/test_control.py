"""Every way to stop, pause or ask something of a run: at a step boundary, with nothing lost, and the run after it bit for bit the
one that was left alone."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import surokit as sk
from surokit.train import control as module
from surokit.train import keeping
from surokit.train.errors import CheckpointError
from surokit.train.random_state import kept, turn
from surokit.train.records import Record
from surokit.train.session import Session
from surokit.train.status import RunInfo, read_status
from tests.train.toys import Toy, assert_same_state, make_batches, make_session, weights

PATIENCE_S = 30.0
ROOT = Path(__file__).parents[2]


class Listener:
    """Everything a session tells, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *args: self.told.append((name[3:], args[0] if len(args) == 1 else args))

    def on_step(self, record: Record) -> None:
        self.told.append(("step", record.step))

    def on_end(self, reason: str) -> None:
        self.told.append(("end", reason))

    def of(self, name: str) -> list[Any]:
        return [value for kind, value in self.told if kind == name]


def wait_for(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)


def interrupt_when(what: Callable[[], object]) -> None:
    """A Ctrl-C once that is so, and this thread waits."""

    def later() -> None:
        wait_for(what)
        time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=later).start()


class Gated(Toy):
    """Waits in every step until `gate` is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        self.gate.wait(PATIENCE_S)
        return super().forward(input_ids, labels)


class Slow(Toy):
    """Takes a while for a step, so that a run is still there when somebody asks something of it."""

    def __init__(self, seconds: float = 0.002) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        time.sleep(self.seconds)
        return super().forward(input_ids, labels)


class At:
    """A meter that does something at one step, in the thread that trains."""

    def __init__(self, step: int, work: Callable[[Session], object]) -> None:
        self.step, self.work = step, work

    def __call__(self, session: Session) -> dict[str, float]:
        if session.steps == self.step:
            self.work(session)
        return {}


def elsewhere(work: Callable[[], Any]) -> Any:
    """What `work` gives in another thread."""
    out: list[Any] = []
    thread = threading.Thread(target=lambda: out.append(work()))
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    return out[0]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at before each step."""
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.0)


def whole(steps: int, **options: Any) -> Session:
    """The run that nobody disturbs."""
    session = make_session(**options)
    session.run(steps)
    return session


class TestStop:
    def test_with_a_reason(self) -> None:
        listener = Listener()
        session = make_session(meters=[At(3, lambda s: s.control.stop("stopped: enough"))])
        session.subscribe(listener)
        session.run(8)
        assert session.steps == 3
        assert listener.of("end") == ["stopped: enough"]
        session.run(5)
        assert listener.of("end") == ["stopped: enough", "done"]
        assert_same_state(session, whole(8))

    def test_the_first_reason_counts(self) -> None:
        def both(session: Session) -> None:
            session.control.stop("stopped: first")
            session.stop()

        listener = Listener()
        session = make_session(meters=[At(2, both)])
        session.subscribe(listener)
        session.run(8)
        assert listener.of("end") == ["stopped: first"]

    def test_an_idle_session_is_not_stopped(self) -> None:
        session = make_session()
        session.stop()
        session.control.pause()
        session.control.resume()
        session.run(3)
        assert session.steps == 3

    def test_from_a_signal_handler(self) -> None:
        """As a scheduler's SIGTERM: it may come in anywhere, so stop() takes no lock."""
        before = signal.signal(signal.SIGTERM, lambda *_: session.stop())
        try:
            session = make_session(meters=[At(4, lambda s: os.kill(os.getpid(), signal.SIGTERM))])
            session.run(8)
        finally:
            signal.signal(signal.SIGTERM, before)
        assert session.steps == 4

    def test_a_signal_handler_that_saves_at_once(self, tmp_path: Path) -> None:
        """In the middle of a step there is nothing whole to save."""
        said: list[str] = []

        def handler(*_: Any) -> None:
            try:
                session.save()
            except RuntimeError as error:
                said.append(str(error))
                session.control.save()

        class Signals(Toy):
            def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
                if session.steps == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
                return super().forward(input_ids, labels)

        before = signal.signal(signal.SIGTERM, handler)
        try:
            session = make_session(Signals(), run_dir=tmp_path / "run")
            session.run(6)
        finally:
            signal.signal(signal.SIGTERM, before)
        assert "call session.control.save()" in said[0]
        assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000004"]

    def test_old_files_say_nothing_of_a_new_run(self, tmp_path: Path, quick: None) -> None:
        session = make_session(run_dir=tmp_path / "run")
        for name in ("stop", "pause", "save"):
            (tmp_path / "run" / name).touch()
        session.run(2)
        assert session.steps == 2
        assert not {"stop", "pause", "save", "checkpoints"} & {p.name for p in (tmp_path / "run").iterdir()}

    def test_a_checkpoint_at_the_end_all_the_same(self, tmp_path: Path) -> None:
        session = make_session(run_dir=tmp_path / "run", save_every=100, meters=[At(3, lambda s: s.stop())])
        session.run(8)
        again = Session.resume(tmp_path / "run", Toy(), data=make_batches())
        assert again.steps == 3
        again.run(5)
        assert_same_state(again, whole(8))


class TestPause:
    def test_it_waits_and_goes_on(self) -> None:
        listener = Listener()
        session = make_session(meters=[At(3, lambda s: s.control.pause())])
        session.subscribe(listener)
        run = session.run(6, thread=True)
        wait_for(lambda: session.control.state == "paused")
        wait_for(lambda: listener.of("pause"))
        assert listener.told[-2:] == [("step", 3), ("pause", True)], "all that was measured has been told"
        time.sleep(0.12)
        assert session.steps == 3
        session.control.resume()
        run.wait()
        assert listener.of("pause") == [True, False]
        assert (session.steps, session.control.state) == (6, "idle")
        assert_same_state(session, whole(6))
        wall_s = session.records.column("wall_ms").sum() / 1e3
        assert wall_s < 0.1 < session.run_s, "a pause is no step's time, and it is the run's"
        assert session.elapsed_s == pytest.approx(wall_s)

    def test_minutes_stand_still(self) -> None:
        session = make_session(Slow(0.01), meters=[At(2, lambda s: s.control.pause())])
        run = session.run(minutes=0.2 / 60, thread=True)
        wait_for(lambda: session.control.state == "paused")
        time.sleep(0.3)
        session.control.resume()
        run.wait()
        assert session.steps > 4, "there was time left"

    def test_what_others_draw_meanwhile_is_not_the_runs(self) -> None:
        session = make_session(meters=[At(3, lambda s: s.control.pause())])
        run = session.run(6, thread=True)
        wait_for(lambda: session.control.state == "paused")
        torch.manual_seed(7)
        random.seed(7)
        drawn = torch.rand(3).tolist(), random.random()
        session.control.resume()
        run.wait()
        torch.manual_seed(7)
        random.seed(7)
        assert drawn == (torch.rand(3).tolist(), random.random())
        assert_same_state(session, whole(6))

    @pytest.mark.parametrize("how", ["evaluate", "save", "fork", "summary"])
    def test_it_is_served_while_it_waits(self, how: str, tmp_path: Path) -> None:
        session = make_session(
            run_dir=tmp_path / "run", eval=make_batches(1, seed=5), meters=[At(3, lambda s: s.control.pause())]
        )
        run = session.run(6, thread=True)
        wait_for(lambda: session.control.state == "paused")
        out: Any = getattr(session, how)()
        assert session.control.state == "paused"
        session.control.resume()
        run.wait()
        undisturbed = whole(6)
        assert_same_state(session, undisturbed)
        if how == "fork":
            out.run(3)
            assert_same_state(out, undisturbed)
        elif how == "save":
            again = Session.resume(out, Toy(), data=make_batches())
            again.run(3)
            assert_same_state(again, undisturbed)

    def test_a_stop_ends_it(self) -> None:
        listener = Listener()
        session = make_session(meters=[At(3, lambda s: s.control.pause())])
        session.subscribe(listener)
        run = session.run(6, thread=True)
        wait_for(lambda: session.control.state == "paused")
        session.stop()
        run.wait()
        assert session.steps == 3
        assert listener.told[-2:] == [("pause", False), ("end", "interrupted")]
        session.run(3)
        assert_same_state(session, whole(6))

    def test_an_interrupt_ends_it(self) -> None:
        """In a blocking run: the thread that waits is the one that signals reach."""
        session = make_session(meters=[At(3, lambda s: s.control.pause())])
        interrupt_when(lambda: session.control.state == "paused")
        session.run(6)
        assert session.steps == 3
        session.run(3)
        assert_same_state(session, whole(6))

    def test_an_old_pause_does_not_hold_a_new_run(self) -> None:
        def both(session: Session) -> None:
            session.control.pause()
            session.stop()

        session = make_session(meters=[At(3, both)])
        session.run(6)
        assert session.steps == 3
        session.run(3)
        assert session.steps == 6


class TestFiles:
    def test_pause_and_save_from_another_process(self, tmp_path: Path) -> None:
        session = make_session(Slow(0.01), run_dir=tmp_path / "run")
        run = session.run(1500, thread=True)
        code = """
import sys, time
from pathlib import Path
from surokit.train.status import read_status

folder = Path(sys.argv[1])

def until(what):
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)

def stands(state):
    status = read_status(folder)
    return status is not None and status.state == state

until(lambda: stands("running"))
(folder / "pause").touch()
until(lambda: stands("paused"))
(folder / "save").touch()
until(lambda: not (folder / "save").exists())
assert list((folder / "checkpoints").glob("step-*"))
assert stands("paused")
(folder / "pause").unlink()
until(lambda: stands("running"))
(folder / "stop").touch()
until(lambda: stands("interrupted"))
assert not (folder / "stop").exists()
assert "torch" not in sys.modules
"""
        subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=True, timeout=120, cwd=ROOT)
        run.wait()
        session.run(3)
        undisturbed = whole(session.steps)
        assert_same_state(session, undisturbed)
        again = Session.resume(tmp_path / "run", Toy(), data=make_batches())
        again.run(session.steps - again.steps)
        assert_same_state(again, undisturbed)

    def test_save_in_a_blocking_run(self, tmp_path: Path, quick: None) -> None:
        session = make_session(run_dir=tmp_path / "run", meters=[At(2, lambda s: (tmp_path / "run" / "save").touch())])
        session.run(4)
        assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000002"]
        assert not (tmp_path / "run" / "save").exists()

    def test_what_cannot_be_removed_speaks_once(self, tmp_path: Path, quick: None) -> None:
        """As a file that belongs to somebody else: a folder stands for it here."""
        session = make_session(run_dir=tmp_path / "run", meters=[At(2, lambda s: (tmp_path / "run" / "save").mkdir())])
        session.run(5)
        assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000002"]
        session.run(2)
        assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000002"], "it is an old one"

    def test_resume_removes_the_file(self, tmp_path: Path, quick: None) -> None:
        session = make_session(run_dir=tmp_path / "run", meters=[At(2, lambda s: (tmp_path / "run" / "pause").touch())])
        run = session.run(4, thread=True)
        wait_for(lambda: session.control.state == "paused")
        session.control.resume()
        run.wait()
        assert not (tmp_path / "run" / "pause").exists()


class TestSave:
    def test_at_the_next_boundary(self, tmp_path: Path) -> None:
        session = make_session(run_dir=tmp_path / "run", meters=[At(3, lambda s: s.control.save())])
        session.run(6)
        assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000003"]
        again = Session.resume(tmp_path / "run", Toy(), data=make_batches())
        again.run(3)
        assert_same_state(again, session)

    def test_an_idle_session_saves_at_once(self, tmp_path: Path) -> None:
        session = make_session(run_dir=tmp_path / "run")
        session.run(2)
        session.control.save()
        assert (tmp_path / "run" / "checkpoints" / "step-000002").exists()

    def test_asked_in_the_end_itself(self, tmp_path: Path) -> None:
        class Saver(Listener):
            def on_end(self, reason: str) -> None:
                session.control.save()

        session = make_session(run_dir=tmp_path / "run")
        session.subscribe(Saver())
        session.run(3)
        assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000003"]

    def test_nowhere_to_save_to(self) -> None:
        with pytest.raises(ValueError, match=r"give Session\(run_dir=\.\.\.\)"):
            make_session().control.save()

    def test_one_that_fails_costs_a_warning(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        session = make_session(run_dir=tmp_path / "run", meters=[At(2, lambda s: s.control.save())])

        def full(*_: Any) -> None:
            raise CheckpointError("no space left.")

        monkeypatch.setattr(keeping, "save", full)
        with pytest.warns(UserWarning, match=r"not there: no space left\. Training goes on"):
            session.run(4)
        assert session.steps == 4


class TestBetweenSteps:
    def test_at_once_where_nothing_runs(self) -> None:
        session = make_session()
        assert session.control.between_steps(threading.get_ident) == threading.get_ident()

    def test_in_the_thread_that_trains(self) -> None:
        session = make_session(Slow())
        run = session.run(400, thread=True)
        name = session.control.between_steps(lambda: threading.current_thread().name)
        before = session.steps
        assert name == "surokit-run"
        session.stop()
        run.wait()
        assert session.steps >= before

    def test_a_blocking_run_serves_other_threads(self) -> None:
        out: list[float] = []
        thread = threading.Thread(target=lambda: out.append(session.evaluate()))
        session = make_session(Slow(), eval=make_batches(1), meters=[At(2, lambda s: thread.start())])
        session.run(40)
        thread.join(PATIENCE_S)
        assert out
        assert session.evaluations[0].step < 40
        assert_same_state(session, whole(40))

    def test_asked_by_the_thread_itself(self, tmp_path: Path) -> None:
        """A subscriber that saves."""

        class Saver(Listener):
            def on_step(self, record: Record) -> None:
                if record.step == 3:
                    session.save()

        session = make_session(run_dir=tmp_path / "run")
        session.subscribe(Saver())
        session.run(5)
        assert (tmp_path / "run" / "checkpoints" / "step-000003").exists()

    def test_an_exception_is_the_callers(self) -> None:
        session = make_session(Slow())
        run = session.run(30, thread=True)
        with pytest.raises(ZeroDivisionError):
            session.control.between_steps(lambda: 1 / 0)
        run.wait()
        assert session.steps == 30

    def test_what_it_draws_is_not_the_runs(self) -> None:
        session = make_session(Slow())
        run = session.run(30, thread=True)
        for _ in range(5):
            session.control.between_steps(lambda: (torch.rand(3), random.random(), np.random.rand()))  # noqa: NPY002
        run.wait()
        assert_same_state(session, whole(30))

    def test_what_it_draws_is_not_another_runs(self) -> None:
        def draw() -> None:
            for _ in range(5):
                torch.rand(3)
                time.sleep(0.003)

        one, two = make_session(Slow(0.001)), make_session(Slow(0.001), seed=2)
        runs = [session.run(100, thread=True) for session in (one, two)]
        for _ in range(5):
            one.control.between_steps(draw)
        for run in runs:
            run.wait()
        assert_same_state(one, whole(100))
        assert_same_state(two, whole(100, seed=2))

    def test_many_callers(self) -> None:
        session = make_session(Slow(0.001), eval=make_batches(1))
        run = session.run(300, thread=True)
        out: list[float] = []
        threads = [threading.Thread(target=lambda: out.extend(session.evaluate() for _ in range(5))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        run.wait()
        assert len(out) == 20
        assert_same_state(session, whole(300))

    def test_asked_while_the_run_ends(self) -> None:
        """However a call and the end of a run fall together, it is answered; runs of one step have little but ends."""
        session = make_session(eval=make_batches(1))
        over = threading.Event()
        calls = 0

        def ask() -> None:
            nonlocal calls
            while not over.is_set():
                session.evaluate()
                calls += 1

        thread = threading.Thread(target=ask)
        thread.start()
        for _ in range(150):
            session.run(1, thread=True).wait()
        over.set()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        assert calls > 10
        assert_same_state(session, whole(150))

    def test_asked_in_the_end_itself(self) -> None:
        class Ends(Listener):
            def on_end(self, reason: str) -> None:
                thread.start()
                time.sleep(0.05)

        out: list[float] = []
        session = make_session(eval=make_batches(1))
        thread = threading.Thread(target=lambda: out.append(session.evaluate()))
        session.subscribe(Ends())
        session.run(2)
        thread.join(PATIENCE_S)
        assert out

    def test_one_that_no_longer_waits(self) -> None:
        """An interrupt of the waiting takes the work back."""
        done: list[int] = []
        session = make_session(model := Gated())
        run = session.run(2, thread=True)
        interrupt_when(lambda: session.control._asked)
        with pytest.raises(KeyboardInterrupt):
            session.control.between_steps(lambda: done.append(1))
        model.gate.set()
        run.wait()
        assert not done
        assert session.steps == 2, "the interrupt was the waiting cell's"

    def test_the_turn_is_not_given_by_who_waits(self) -> None:
        session = make_session(Slow())
        run = session.run(20, thread=True)
        wait_for(lambda: session.steps)
        with kept(torch.device("cpu")), pytest.raises(RuntimeError, match="outside of another session's step"):
            session.evaluate(make_batches(1))
        run.wait()


class TestThread:
    def test_evaluated_from_here_it_is_the_same_run(self) -> None:
        session = make_session(Slow(), eval=make_batches(2, seed=5))
        run = session.run(40, thread=True)
        losses = [session.evaluate() for _ in range(3)]
        assert session.steps < 40
        frames = []
        while run.running:
            frames.append(session.records.frame())
        run.wait()
        assert all((frame["step"].diff().dropna() == 1).all() for frame in frames)
        assert_same_state(session, whole(40))
        assert [e.loss for e in session.evaluations] == losses
        at = session.evaluations[1].step
        undisturbed = whole(at, eval=make_batches(2, seed=5))
        assert undisturbed.evaluate() == losses[1]

    def test_another_session_is_made_and_evaluated_meanwhile(self) -> None:
        """Both draw from the process's generators, each from a state of its own."""
        models = [Toy() for _ in range(20)]  # drawn by torch, in whose hands nothing of ours keeps the generators
        session = make_session(Slow(0.001))
        run = session.run(300, thread=True)
        others = []
        while run.running and models:
            other = make_session(models.pop(), seed=3, eval=make_batches(1, seed=5))
            other.run(2)
            other.evaluate()
            others.append(other)
        run.wait()
        assert len(others) > 3
        assert_same_state(session, whole(300))
        for other in (others[0], others[-1]):
            assert_same_state(other, whole(2, seed=3))

    def test_two_runs_in_threads(self) -> None:
        one, two = make_session(Slow(0.001), seed=1), make_session(Slow(0.001), seed=2)
        runs = [s.run(60, thread=True) for s in (one, two)]
        for run in runs:
            run.wait()
        assert_same_state(one, whole(60, seed=1))
        assert_same_state(two, whole(60, seed=2))
        assert not turn.wanted
        assert not turn.mine

    def test_one_run_at_a_time(self) -> None:
        session = make_session(Slow())
        run = session.run(200, thread=True)
        wait_for(lambda: session.steps)
        with pytest.raises(
            RuntimeError, match=r"running already, \d+ steps? done: wait for the run that goes on, or end it"
        ):
            session.run(1)
        with pytest.raises(RuntimeError, match="running already"):
            session.step(make_batches(1)[0])
        with pytest.raises(RuntimeError, match="running already"):
            next(iter(session.data))
        session.stop()
        run.wait()
        session.run(1)

    def test_stop_right_after_the_start(self) -> None:
        session = make_session()
        run = session.run(1000, thread=True)
        session.stop()
        run.wait()
        assert session.steps < 1000

    def test_an_exception_is_not_lost(self, capsys: pytest.CaptureFixture[str]) -> None:
        def boom(_: Any) -> None:
            raise ValueError("out of something")

        listener = Listener()
        model = Toy()
        session = make_session(model, meters=[At(3, lambda s: model.register_forward_pre_hook(lambda *_: boom(0)))])
        session.subscribe(listener)
        run = session.run(8, thread=True)
        for _ in range(2):
            with pytest.raises(ValueError, match="out of something"):
                run.wait()
        assert listener.of("end") == ["failed: ValueError: out of something"]
        assert "the run has failed, ValueError: out of something" in capsys.readouterr().err
        assert "failed" in repr(run)
        assert session.steps == 3
        model._forward_pre_hooks.clear()
        session.run(5)
        assert_same_state(session, whole(8))

    @pytest.mark.parametrize("what", ["thread", "caller's", "settings"])
    def test_a_thread_that_does_not_begin(self, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: Any) -> Any:
            raise RuntimeError("can't start new thread")

        session = make_session()
        with monkeypatch.context() as m:
            if what == "thread":
                m.setattr(threading.Thread, "start", full)
            else:
                m.setattr("surokit.train.running._callers", full if what == "caller's" else lambda device: full)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                session.run(3, thread=True).wait()
        assert session.control.state == "idle"
        session.run(3)
        assert_same_state(session, whole(3))

    def test_what_was_asked_of_one_that_does_not_begin(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: Any) -> Any:
            session.control.save()
            raise RuntimeError("can't start new thread")

        session = make_session(run_dir=tmp_path / "run")
        monkeypatch.setattr(threading.Thread, "start", full)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            session.run(3, thread=True)
        assert session.control.state == "idle"
        assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000000"]

    def test_waiting_for_a_while(self) -> None:
        session = make_session(Slow(0.01))
        run = session.run(20, thread=True)
        assert not run.wait(timeout=0.01)
        assert "running" in repr(run)
        assert run.wait()
        assert run.wait(timeout=0)
        assert not run.running
        assert "over" in repr(run)

    def test_a_run_does_not_wait_for_itself(self) -> None:
        said: list[str] = []

        def wait(session: Session) -> None:
            try:
                run.wait()
            except RuntimeError as error:
                said.append(str(error))

        session = make_session(Slow(0.05), meters=[At(1, wait)])
        run = session.run(1, thread=True)
        run.wait()
        assert said == ["The run cannot wait for itself: call wait() from another thread."]

    def test_who_has_the_turn_does_not_wait_for_a_run(self) -> None:
        session = make_session(Slow())
        with kept(torch.device("cpu")):
            run = session.run(3, thread=True)
            with pytest.raises(RuntimeError, match="outside of another session's step"):
                run.wait()
        assert run.wait()
        assert session.steps == 3

    def test_a_forked_process_has_no_run(self) -> None:
        session = make_session(Slow())
        run = session.run(200, thread=True)
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            with suppress(BaseException):
                run._leave()
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert run.running
        session.stop()
        run.wait()

    def test_an_interrupt_of_the_waiting_stops_it(self) -> None:
        session, listener = make_session(Slow(0.01)), Listener()
        session.subscribe(listener)
        run = session.run(500, thread=True)
        interrupt_when(lambda: session.steps)
        assert run.wait()
        assert 0 < session.steps < 500
        assert listener.of("end") == ["interrupted"]
        steps = session.steps
        session.run(3)
        assert_same_state(session, whole(steps + 3))

    def test_gradients_are_on_whatever_the_caller_has(self) -> None:
        session = make_session()
        with torch.inference_mode():
            run = session.run(3, thread=True)
            run.wait()
        assert_same_state(session, whole(3))

    def test_autocast_is_the_callers(self) -> None:
        seen: list[bool] = []
        session = make_session(meters=[At(1, lambda s: seen.append(torch.is_autocast_enabled("cpu")))])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            session.run(1, thread=True).wait()
        session = make_session(meters=[At(1, lambda s: seen.append(torch.is_autocast_enabled("cpu")))])
        session.run(1, thread=True).wait()
        assert seen == [True, False]

    def test_the_default_device_is_the_callers(self) -> None:
        seen: list[str] = []
        session = make_session(meters=[At(1, lambda s: seen.append(torch.get_default_device().type))])
        with torch.device("meta"):
            session.run(1, thread=True).wait()
        assert seen == ["meta"]

    def test_the_number_of_threads_is_the_callers(self) -> None:
        seen: list[int] = []
        session = make_session(meters=[At(1, lambda s: seen.append(torch.get_num_threads()))])
        before = torch.get_num_threads()
        torch.set_num_threads(before + 1)
        try:
            session.run(1, thread=True).wait()
        finally:
            torch.set_num_threads(before)
        assert seen == [before + 1]

    def test_live_makes_it_the_default(self, capsys: pytest.CaptureFixture[str]) -> None:
        session = make_session()
        session.live(thread=True, usd_per_gpu_hour=2.0)
        run = session.run(3)
        assert run is not None
        run.wait()
        assert session.run(2, thread=False) is None
        assert session.info.usd_per_gpu_hour == 2.0
        assert session.steps == 5
        assert "step 3" in capsys.readouterr().err


class TestAwait:
    def test_the_loop_goes_on(self) -> None:
        async def main() -> int:
            ticks = 0

            async def tick() -> None:
                nonlocal ticks
                while True:
                    ticks += 1
                    await asyncio.sleep(0.005)

            ticking = asyncio.create_task(tick())
            await session.run(50, thread=True)
            ticking.cancel()
            return ticks

        session = make_session(Slow())
        assert asyncio.run(main()) > 3
        assert_same_state(session, whole(50))

    def test_a_cancelled_wait_stops_the_run(self) -> None:
        """As a notebook's interrupt of a cell that awaits."""

        async def main() -> None:
            task = asyncio.create_task(cell())
            while not session.steps:
                await asyncio.sleep(0.005)
            task.cancel()
            await task
            assert task.cancelling() == 0

        async def cell() -> None:
            await session.run(500, thread=True)
            after.append(session.steps)

        after: list[int] = []
        session = make_session(Slow(0.01))
        asyncio.run(main())
        assert after == [session.steps]
        assert 0 < session.steps < 500

    def test_a_second_one_gives_up_waiting(self) -> None:
        async def main() -> None:
            task = asyncio.create_task(cell())
            await asyncio.sleep(0.1)
            task.cancel()
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        runs: list[Any] = []

        async def cell() -> None:
            runs.append(session.run(3, thread=True))
            await runs[0]

        session = make_session(model := Gated())
        asyncio.run(main())
        model.gate.set()
        runs[0].wait()
        assert session.steps == 1

    def test_an_exception(self) -> None:
        async def main() -> None:
            await session.run(1, thread=True)

        session = make_session(data=[])
        with pytest.raises(ValueError, match="yields no batches"):
            asyncio.run(main())


PROCESSES = """
import asyncio, json, os, signal, sys, time
from surokit.environment import environment
from tests.train.toys import Toy, make_session

class Slow(Toy):
    def forward(self, input_ids, labels=None):
        time.sleep(0.02)
        return super().forward(input_ids, labels)

def begun(session):
    if session.steps == 3:
        print("begun", flush=True)
    return {}

for line in sys.stdin:
    code, run_dir, *outputs = json.loads(line)
    child = os.fork()
    if child:
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    signal.alarm(60)
    for number, name in enumerate(outputs, 1):
        os.dup2(os.open(name, os.O_WRONLY), number)
    session = make_session(Slow(), run_dir=run_dir, save_every=1000, meters=[begun])
    exec(code)
    break
"""


@pytest.fixture(scope="module")
def processes() -> Iterator[subprocess.Popen[str]]:
    """Has imported everything, and forks a process for each program: torch is imported once."""
    command = [sys.executable, "-c", PROCESSES]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        yield server


class Program:
    """A program that has a session and runs `code`, three steps after its run has begun."""

    def __init__(self, processes: subprocess.Popen[str], code: str, folder: Path) -> None:
        self.processes, self.run_dir = processes, folder / "run"
        outputs = [folder / "out", folder / "err"]
        for path in outputs:
            os.mkfifo(path)
        assert processes.stdin is not None
        assert processes.stdout is not None
        processes.stdin.write(json.dumps([code, *map(str, [self.run_dir, *outputs])]) + "\n")
        processes.stdin.flush()
        self.pid = int(processes.stdout.readline())
        self.out, self.err = (path.open() for path in outputs)
        assert self.out.readline() == "begun\n"

    def interrupt(self) -> None:
        os.kill(self.pid, signal.SIGINT)

    def end(self) -> tuple[int, str, str]:
        """Exit status, what is left of its output and of its errors."""
        with self.out, self.err:
            out, err = self.out.read(), self.err.read()
        assert self.processes.stdout is not None
        return int(self.processes.stdout.readline()), out, err


class TestProcess:
    """In a process of its own, where a real Ctrl-C arrives."""

    def goes_on_from(self, run_dir: Path) -> None:
        """The run that is resumed is the one that was not disturbed."""
        again = Session.resume(run_dir, Toy(), data=make_batches())
        rows = [json.loads(line)["step"] for line in (run_dir / "records.jsonl").read_text().splitlines()]
        assert rows == list(range(1, again.steps + 1)), "no record is lost"
        again.run(5)
        assert_same_state(again, whole(again.steps))

    def test_an_interrupt(self, tmp_path: Path, processes: subprocess.Popen[str]) -> None:
        program = Program(processes, "session.run(1500); print(session.steps)", tmp_path)
        program.interrupt()
        status, out, err = program.end()
        assert status == 0, err
        assert 0 < int(out) < 1500
        assert "stopping after this step" in err
        told = read_status(program.run_dir)
        assert told is not None
        assert (told.state, told.step) == ("interrupted", int(out))
        self.goes_on_from(program.run_dir)

    def test_a_second_interrupt(self, tmp_path: Path, processes: subprocess.Popen[str]) -> None:
        code = """
class Stuck(Slow):
    def forward(self, input_ids, labels=None):
        if session.steps == 5:
            print("stuck", flush=True)
            time.sleep(60)
        return super().forward(input_ids, labels)

session.model.__class__ = Stuck
try:
    session.run(1500)
except KeyboardInterrupt:
    session.save()
    print(session.steps)
"""
        program = Program(processes, code, tmp_path)
        assert program.out.readline() == "stuck\n"
        program.interrupt()
        while "stopping after this step" not in program.err.readline():
            pass
        program.interrupt()
        _, out, err = program.end()
        assert out == "5\n", err
        self.goes_on_from(program.run_dir)

    def test_a_program_that_ends(self, tmp_path: Path, processes: subprocess.Popen[str]) -> None:
        """A thread's run is stopped between two steps, saved and told."""
        code = "run = session.run(1500, thread=True)\nwhile session.steps < 5: time.sleep(0.01)"
        program = Program(processes, code, tmp_path)
        status, _, err = program.end()
        assert status == 0, err
        told = read_status(program.run_dir)
        assert told is not None
        assert told.state == "interrupted"
        self.goes_on_from(program.run_dir)

    def test_a_program_that_ends_while_its_run_waits(self, tmp_path: Path, processes: subprocess.Popen[str]) -> None:
        code = """
run = session.run(1500, thread=True)
while session.steps < 5: time.sleep(0.01)
session.control.pause()
while session.control.state != "paused": time.sleep(0.01)
"""
        program = Program(processes, code, tmp_path)
        status, _, err = program.end()
        assert status == 0, err
        self.goes_on_from(program.run_dir)

    def test_an_interrupted_program_of_asyncio(self, tmp_path: Path, processes: subprocess.Popen[str]) -> None:
        code = """
async def main():
    await session.run(1500, thread=True)
    print(session.steps)
asyncio.run(main())
"""
        program = Program(processes, code, tmp_path)
        program.interrupt()
        _, out, err = program.end()
        assert 0 < int(out) < 1500, err
        self.goes_on_from(program.run_dir)


def test_asked_before_a_run_it_says_nothing_of_it() -> None:
    session = make_session()
    session.control.pause()
    session.control.stop()
    session.stop()
    session.run(3)
    assert session.steps == 3


class TestStopWhen:
    def test_a_function(self) -> None:
        def low(record: Record) -> bool:
            return record.step == 4

        listener = Listener()
        session = make_session()
        session.subscribe(listener)
        session.stop_when(low)
        session.run(8)
        assert session.steps == 4
        assert listener.of("end") == ["stopped: low at step 4"]
        session.run(4)
        assert_same_state(session, whole(8))

    def test_one_that_ends_each_run_says_how_it_goes(self) -> None:
        def low(record: Record) -> bool:
            return record.step >= 4

        listener = Listener()
        session = make_session()
        session.subscribe(listener)
        session.stop_when(low)
        for _ in range(2):
            session.run(8)
        assert listener.of("end") == [
            "stopped: low at step 4",
            "stopped: low at step 5, again: stop_when() clears it",
        ]
        session.stop_when()
        session.run(3)
        assert listener.of("end")[2:] == ["done"]

    def test_one_that_holds_now_and_then_is_not_remarked_on(self) -> None:
        listener = Listener()
        session = make_session()
        session.subscribe(listener)
        session.stop_when(lambda record: record.step % 5 == 0 and f"step {record.step}")
        for _ in range(2):
            session.run(8)
        assert listener.of("end") == ["stopped: step 5", "stopped: step 10"]

    def test_its_own_words(self) -> None:
        listener = Listener()
        session = make_session()
        session.subscribe(listener)
        session.stop_when(lambda record: f"loss {record.loss:.0f}" if record.step == 2 else False)
        session.run(8)
        assert listener.of("end") == ["stopped: loss 4"]

    def test_without_any_none(self) -> None:
        session = make_session()
        session.stop_when(lambda record: True)
        session.stop_when()
        session.run(3)
        assert session.steps == 3

    def test_nonfinite(self) -> None:
        batches = make_batches(6)
        batches[3]["labels"][:] = -100
        listener = Listener()
        session = make_session(data=batches)
        session.subscribe(listener)
        session.stop_when("nonfinite")
        with pytest.warns(UserWarning, match="step 4"):
            session.run(20)
        assert session.steps == 4
        (reason,) = listener.of("end")
        assert reason.startswith("stopped: nonfinite at step 4, ")

    def test_diverging(self) -> None:
        listener = Listener()
        session = make_session(Toy(dropout=0.0), make_batches(1), schedule=None, optimizer=sk.AdamW(lr=1e-2))
        session.subscribe(listener)
        session.stop_when("diverging")
        session.run(60)
        assert listener.of("end") == ["done"]
        for group in session.optimizer.param_groups:
            group["lr"] = 30.0
        session.run(200)
        assert session.steps < 200
        assert listener.of("end")[1].startswith("stopped: diverging at step ")
        session.run(5)
        assert listener.of("end")[2] == "done", "it holds where the phase begins, and not on and on"

    def test_one_that_raises_is_dropped(self) -> None:
        def broken(record: Record) -> bool:
            raise ZeroDivisionError("no such thing")

        session = make_session()
        session.stop_when(broken)
        with pytest.warns(UserWarning, match="condition broken failed and no longer ends the run .*no such thing"):
            session.run(3)
        assert session.steps == 3

    def test_an_unknown_name(self) -> None:
        with pytest.raises(ValueError, match=r"stop_when\('divergent'\): one of diverging, "):
            make_session().stop_when("divergent")


class TestJournal:
    def test_run_json(self, tmp_path: Path) -> None:
        listener = Listener()
        session = make_session(run_dir=tmp_path / "run", recipe="fp8")
        session.subscribe(listener)
        (before,) = listener.of("info")
        assert (before.tokens_per_step, before.total) == (None, 20)
        session.note("before")
        session.run(3)
        session.note("after")
        status = read_status(tmp_path / "run")
        assert status is not None
        info = status.info
        assert (info.title, info.model, info.device, info.gpus) == ("fp8", "Toy", "cpu", 0)
        assert (info.total, info.tokens_per_step, info.resumes, info.pid) == (3, 48, True, os.getpid())
        assert info.run_dir == str(tmp_path / "run")
        assert "no peak" in info.peak
        assert "Q(x)Q(w)'" in info.recipe
        assert abs(info.started - time.time()) < 60
        assert (status.state, status.step, status.over) == ("done", 3, True)
        assert [(e["step"], e["kind"], e["text"]) for e in status.events] == [
            (0, "note", "before"),
            (3, "note", "after"),
        ]
        assert [info.tokens_per_step for info in listener.of("info")] == [None, None, 48]
        assert listener.of("note") == [(0, "before"), (3, "after")]

    def test_how_it_stands(self, tmp_path: Path) -> None:
        session = make_session(run_dir=tmp_path / "run", meters=[At(2, lambda s: s.control.pause())])

        def state() -> str:
            status = read_status(tmp_path / "run")
            return "" if status is None else status.state

        run = session.run(4, thread=True)
        wait_for(lambda: state() == "paused")
        session.stop()
        run.wait()
        assert state() == "interrupted"
        session.stop_when(lambda record: "enough")
        session.run(4)
        assert state() == "stopped: enough"
        session = make_session(data=[], run_dir=tmp_path / "run2")
        with pytest.raises(ValueError, match="no batches"):
            session.run(1)
        status = read_status(tmp_path / "run2")
        assert status is not None
        assert status.state.startswith("failed: ValueError: The data yields no batches")

    def test_notes_from_many_threads(self, tmp_path: Path) -> None:
        session = make_session(run_dir=tmp_path / "run")
        session.run(1)

        def note() -> None:
            for _ in range(20):
                session.note("n")

        threads = [threading.Thread(target=note) for _ in range(3)]
        for thread in threads:
            thread.start()
        session.run(20)
        for thread in threads:
            thread.join(PATIENCE_S)
        session.note("last")
        status = read_status(tmp_path / "run")
        assert status is not None
        assert len(status.events) == 61

    def test_a_note_that_meets_a_beginning(self, tmp_path: Path) -> None:
        """It says nothing of how the run stands."""

        class Late(Listener):
            def on_note(self, *_: Any) -> None:
                session.control.begin()
                session.journal.begin(None)
                session.control._state = "idle"  # as it was seen

        session = make_session(run_dir=tmp_path / "run")
        session.run(1)
        session.subscribe(Late())
        session.note("n")
        status = read_status(tmp_path / "run")
        assert status is not None
        assert status.state == "running"

    def test_what_json_does_not_know(self, tmp_path: Path) -> None:
        session = make_session(run_dir=tmp_path / "run")
        session.note(Path("a"))  # type: ignore[arg-type]
        session.run(2)
        status = read_status(tmp_path / "run")
        assert status is not None
        assert status.events[0]["text"] == "a"

    def test_notes_outlast_a_restart(self, tmp_path: Path) -> None:
        session = make_session(run_dir=tmp_path / "run")
        session.run(2)
        session.note("two")
        session.save()
        session.run(2)
        session.note("four")
        again = Session.resume(tmp_path / "run", Toy(), data=make_batches())
        again.run(1)
        status = read_status(tmp_path / "run")
        assert status is not None
        assert [e["text"] for e in status.events] == ["two"], "what came after the checkpoint did not happen"

    def test_a_model_that_cannot_be_described(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def odd(session: Session) -> None:
            raise KeyError("layers")

        monkeypatch.setattr("surokit.train.journal.light_of", odd)
        assert make_session().info.peak == "the model's work is not known (KeyError: 'layers')"

    def test_nobody_is_described_to_nobody(self, monkeypatch: pytest.MonkeyPatch) -> None:
        session = make_session()
        monkeypatch.setattr(type(session.journal), "describe", lambda self: pytest.fail("nobody asked"))
        session.run(2)

    def test_a_dead_disk_costs_one_warning(self, tmp_path: Path) -> None:
        session = make_session(run_dir=tmp_path / "run")
        (tmp_path / "run" / "run.json").mkdir()
        with pytest.warns(UserWarning, match=r"run\.json cannot be written") as caught:
            session.run(3)
        assert len(caught) == 1
        assert session.steps == 3


class TestGpu:
    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_on_a_stream_of_the_callers_with_work_beside_it(self) -> None:
        alone, session = (make_session(Toy().cuda(), eval=make_batches(1)) for _ in range(2))
        alone.run(12)
        streams: list[int] = []
        session.measuring.meters.append(At(1, lambda s: streams.append(torch.cuda.current_stream().cuda_stream)))
        stream, x = torch.cuda.Stream(), torch.ones(256, 256, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            run = session.run(12, thread=True)
        while run.running:
            x = (x @ x).clamp(max=1.0)
            session.evaluate()
        run.wait()
        assert streams == [stream.cuda_stream]
        assert session.graphs.state == alone.graphs.state
        torch.cuda.synchronize()
        assert_same_state(session, alone)


def test_an_interrupted_draw_comes_again() -> None:
    """A generator that is interrupted is over; the epoch is not."""

    class Data(list):  # type: ignore[type-arg]
        calls = 0

        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                Data.calls += 1
                if Data.calls in (4, 6, 19):
                    raise OSError("the disk is away for a moment")
                yield batch

    for accumulate in (1, 2):
        Data.calls = 0
        session = make_session(data=Data(make_batches()), accumulate=accumulate)
        while session.steps < 9:
            with suppress(OSError):
                session.run(9 - session.steps)
        assert_same_state(session, whole(9, accumulate=accumulate))


def test_a_shuffled_loader_whose_first_batch_fails() -> None:
    """What the beginning of an epoch drew is drawn again."""

    class Data(torch.utils.data.Dataset[Any]):
        fails = True

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            if Data.fails and session.steps == 2:
                Data.fails = False
                raise OSError("the disk is away for a moment")
            return {name: value[0] for name, value in batches[index].items()}

    batches = make_batches(8)
    Data.fails = True
    session = make_session(data=torch.utils.data.DataLoader(Data(), batch_size=4, shuffle=True))
    with pytest.raises(OSError, match="for a moment"):
        session.run(5)
    session.run(3)
    Data.fails = False
    assert_same_state(session, whole(5, data=torch.utils.data.DataLoader(Data(), batch_size=4, shuffle=True)))


@pytest.mark.parametrize("how", [copy.deepcopy, lambda session: pickle.loads(pickle.dumps(session))])
def test_a_session_is_copied(how: Callable[[Session], Session]) -> None:
    session = make_session()
    session.run(3)
    twin = how(session)
    for each in (session, twin):
        each.run(3)
        assert_same_state(each, whole(6))


def test_information_travels_as_plain_values() -> None:
    info = RunInfo(title="a", total=3, peak_tflops=989.0)
    assert RunInfo.from_dict({**info.to_dict(), "of tomorrow": 1}) == info
    assert RunInfo.from_dict({}) == RunInfo()


def test_weights_are_read_while_a_thread_trains() -> None:
    """Nothing of ours keeps others from looking; what they see may be of any moment."""
    session = make_session(Slow())
    run = session.run(20, thread=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert weights(session)
    run.wait()
