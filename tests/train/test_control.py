"""Every way to stop, pause or ask something of a run: at a step boundary, with nothing lost, and the run after it bit for bit the
one that was left alone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from surokit.runs.control import RunControl
from surokit.runs.records import Record
from surokit.train import checkpoint_files
from surokit.train.errors import CheckpointError
from surokit.train.random_state import kept, turn
from surokit.train.session import Session
from tests.clocks import PATIENCE_S, JumpingClock, until
from tests.refusals import refused, warned
from tests.train.toys import (
    ENDLESS,
    At,
    Gated,
    Listener,
    Toy,
    assert_same_state,
    interrupt_when,
    make_batches,
    make_session,
    until_asked,
    wait_for_step,
    whole,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at before each step."""
    monkeypatch.setattr(RunControl, "look_every_s", 0.0)


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
    def test_it_waits_and_goes_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = JumpingClock(time.monotonic)
        monkeypatch.setattr(time, "monotonic", clock)
        listener = Listener()
        session = make_session(meters=[At(3, lambda s: s.control.pause())])
        session.subscribe(listener)
        run = session.run(6, thread=True)
        until(lambda: session.control.state == "paused")
        until(lambda: listener.of("pause"))
        assert listener.told[-2:] == [("step", 3), ("pause", True)], "all that was measured has been told"
        looks: list[int] = []
        serve = session.control._serve

        def look() -> None:
            looks.append(session.steps)
            serve()

        monkeypatch.setattr(session.control, "_serve", look)
        until(lambda: len(looks) > 3)
        assert set(looks) == {3}
        clock.ahead_s += 1000.0
        session.control.resume()
        run.wait()
        assert listener.of("pause") == [True, False]
        assert (session.steps, session.control.state) == (6, "idle")
        assert_same_state(session, whole(6))
        wall_s = session.records.column("wall_ms").sum() / 1e3
        assert wall_s < 1000.0 < session.run_s, "a pause is no step's time, and it is the run's"
        assert session.elapsed_s == pytest.approx(wall_s)

    def test_minutes_stand_still(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = JumpingClock(time.monotonic)
        monkeypatch.setattr(time, "monotonic", clock)

        def pass_(minutes: float) -> None:
            clock.ahead_s += 60 * minutes

        session = make_session(meters=[At(2, lambda s: s.control.pause()), At(5, lambda s: pass_(90.0))])
        run = session.run(minutes=60.0, thread=True)
        until(lambda: session.control.state == "paused")
        pass_(90.0)
        session.control.resume()
        run.wait()
        assert session.steps == 5, "there was time left after the pause, and none after the fifth step"

    def test_what_others_draw_meanwhile_is_not_the_runs(self) -> None:
        session = make_session(meters=[At(3, lambda s: s.control.pause())])
        run = session.run(6, thread=True)
        until(lambda: session.control.state == "paused")
        torch.manual_seed(7)
        random.seed(7)
        drawn = torch.rand(3).tolist(), random.random()
        session.control.resume()
        run.wait()
        torch.manual_seed(7)
        random.seed(7)
        assert drawn == (torch.rand(3).tolist(), random.random())
        assert_same_state(session, whole(6))

    def test_who_sees_it_may_draw_at_once(self) -> None:
        """A pause was seen, and told, while the run's random state was still in force."""

        class Draws(Listener):
            def on_pause(self, begins: bool) -> None:
                if begins:
                    torch.rand(3)
                    random.random()

        session = make_session(meters=[At(3, lambda s: s.control.pause())])
        seen: list[str] = []

        @contextmanager
        def aside() -> Iterator[None]:
            seen.append(session.control.state)
            with original():
                yield
                seen.append(session.control.state)

        original, session.random.aside = session.random.aside, aside  # type: ignore[method-assign]
        session.subscribe(Draws())
        run = session.run(6, thread=True)
        until(lambda: session.control.state == "paused")
        session.control.resume()
        run.wait()
        assert set(seen) == {"running"}
        assert_same_state(session, whole(6))

    @pytest.mark.parametrize("how", ["evaluate", "save", "fork", "summary"])
    def test_it_is_served_while_it_waits(self, how: str, tmp_path: Path) -> None:
        session = make_session(
            run_dir=tmp_path / "run", eval=make_batches(1, seed=5), meters=[At(3, lambda s: s.control.pause())]
        )
        run = session.run(6, thread=True)
        until(lambda: session.control.state == "paused")
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
        until(lambda: session.control.state == "paused")
        session.stop()
        run.wait()
        assert session.steps == 3
        assert listener.told[-2:] == [("pause", False), ("end", "stopped: by session.stop()")]
        session.run(3)
        assert_same_state(session, whole(6))

    def test_an_interrupt_ends_it(self) -> None:
        """In a blocking run: the thread that waits is the one that signals reach."""
        session = make_session(meters=[At(3, lambda s: s.control.pause())])
        interrupt_when(lambda: session.control.state == "paused", waits=False)
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
        session = make_session(run_dir=tmp_path / "run")
        run = session.run(ENDLESS, thread=True)
        code = """
import sys
from pathlib import Path
from surokit.runs.status import read_status
from tests.clocks import until

folder = Path(sys.argv[1])

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
until(lambda: stands(f"stopped: by the file stop in {folder}"))
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
        until(lambda: session.control.state == "paused")
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
        with refused(ValueError):
            make_session().control.save()

    def test_one_that_fails_costs_a_warning(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        session = make_session(run_dir=tmp_path / "run", meters=[At(2, lambda s: s.control.save())])

        def full(*_: Any) -> None:
            raise CheckpointError("no space left.")

        monkeypatch.setattr(checkpoint_files, "write", full)
        with warned(UserWarning):
            session.run(4)
        assert session.steps == 4


class TestBetweenSteps:
    def test_at_once_where_nothing_runs(self) -> None:
        session = make_session()
        assert session.control.between_steps(threading.get_ident) == threading.get_ident()

    def test_in_the_thread_that_trains(self) -> None:
        session = make_session()
        run = session.run(ENDLESS, thread=True)
        name = session.control.between_steps(lambda: threading.current_thread().name)
        before = session.steps
        assert name == "surokit-run"
        session.stop()
        run.wait()
        assert session.steps >= before

    def test_a_blocking_run_serves_other_threads(self) -> None:
        out: list[float] = []
        thread = threading.Thread(target=lambda: out.append(session.evaluate()))
        session = make_session(eval=make_batches(1), meters=[At(2, lambda s: thread.start()), until_asked(2)])
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
        session = make_session(meters=[until_asked(2)])
        run = session.run(30, thread=True)
        until(lambda: session.steps == 2)
        with pytest.raises(ZeroDivisionError):
            session.control.between_steps(lambda: 1 / 0)
        run.wait()
        assert session.steps == 30

    def test_what_it_draws_is_not_the_runs(self) -> None:
        session = make_session(meters=[until_asked(2 * n + 2) for n in range(5)])
        run = session.run(30, thread=True)
        for n in range(5):
            wait_for_step(session, 2 * n + 2)
            session.control.between_steps(lambda: (torch.rand(3), random.random(), np.random.rand()))  # noqa: NPY002
        run.wait()
        assert_same_state(session, whole(30))

    def test_what_it_draws_is_not_another_runs(self) -> None:
        def draw() -> None:
            for _ in range(5):
                torch.rand(3)
                until(lambda: turn.wanted)  # the other would take a step

        one, two = make_session(meters=[until_asked(2 * n + 2) for n in range(5)]), make_session(seed=2)
        runs = [one.run(30, thread=True), two.run(ENDLESS, thread=True)]
        for n in range(5):
            wait_for_step(one, 2 * n + 2)
            one.control.between_steps(draw)
        two.stop()
        for run in runs:
            run.wait()
        assert_same_state(one, whole(30))
        assert_same_state(two, whole(two.steps, seed=2))

    def test_many_callers(self) -> None:
        session = make_session(eval=make_batches(1))
        run = session.run(ENDLESS, thread=True)
        out: list[float] = []
        threads = [threading.Thread(target=lambda: out.extend(session.evaluate() for _ in range(5))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        session.stop()
        run.wait()
        assert len(out) == 20
        assert_same_state(session, whole(session.steps))

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
                until(lambda: session.control._asked)

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
        until(model.reached.is_set)
        interrupt_when(lambda: session.control._asked)
        with pytest.raises(KeyboardInterrupt):
            session.control.between_steps(lambda: done.append(1))
        model.gate.set()
        run.wait()
        assert not done
        assert session.steps == 2, "the interrupt was the waiting cell's"

    def test_the_turn_is_not_given_by_who_waits(self) -> None:
        session = make_session()
        run = session.run(ENDLESS, thread=True)
        until(lambda: session.steps)
        with kept(torch.device("cpu")), refused(RuntimeError):
            session.evaluate(make_batches(1))
        session.stop()
        run.wait()


def test_asked_before_a_run_it_says_nothing_of_it() -> None:
    session = make_session()
    session.control.pause()
    session.control.stop()
    session.stop()
    session.run(3)
    assert session.steps == 3


def test_what_a_failed_run_left_open_may_end_in_any_thread() -> None:
    """The collector runs where it likes, and only the main thread may set a signal's handler."""
    before = signal.getsignal(signal.SIGINT)
    block = make_session().control.interruptible()
    block.__enter__()
    errors: list[BaseException] = []

    def end() -> None:
        try:
            block.__exit__(None, None, None)
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    assert not errors
    signal.signal(signal.SIGINT, before)
