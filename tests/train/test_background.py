"""A run in a thread of its own: who waits for it, what it takes over from its caller, what others may do meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from surokit.train.random_state import kept, turn
from surokit.train.session import Session
from tests.clocks import until, until_async
from tests.refusals import refused
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
    weights,
    whole,
)


class TestThread:
    def test_evaluated_from_here_it_is_the_same_run(self) -> None:
        session = make_session(eval=make_batches(2, seed=5), meters=[until_asked(2), until_asked(5), until_asked(9)])
        run = session.run(40, thread=True)
        losses = []
        for step in (2, 5, 9):
            wait_for_step(session, step)
            losses.append(session.evaluate())
        frames = []
        while not run.wait(timeout=0.001):  # which leaves the interpreter to the run
            frames.append(session.records.frame())
        assert all((frame["step"].diff().dropna() == 1).all() for frame in frames)
        assert_same_state(session, whole(40))
        assert [e.step for e in session.evaluations] == [2, 5, 9]
        assert [e.loss for e in session.evaluations] == losses
        at = session.evaluations[1].step
        undisturbed = whole(at, eval=make_batches(2, seed=5))
        assert undisturbed.evaluate() == losses[1]

    def test_another_session_is_made_and_evaluated_meanwhile(self) -> None:
        """Both draw from the process's generators, each from a state of its own."""
        models = [Toy() for _ in range(20)]  # drawn by torch, in whose hands nothing of ours keeps the generators
        session = make_session()
        run = session.run(ENDLESS, thread=True)
        others = []
        while models:
            other = make_session(models.pop(), seed=3, eval=make_batches(1, seed=5))
            other.run(2)
            other.evaluate()
            others.append(other)
        session.stop()
        run.wait()
        assert_same_state(session, whole(session.steps))
        for other in (others[0], others[-1]):
            assert_same_state(other, whole(2, seed=3))

    def test_two_runs_in_threads(self) -> None:
        one, two = make_session(seed=1), make_session(seed=2)
        runs = [s.run(60, thread=True) for s in (one, two)]
        for run in runs:
            run.wait()
        assert_same_state(one, whole(60, seed=1))
        assert_same_state(two, whole(60, seed=2))
        assert not turn.wanted
        assert not turn.mine

    def test_one_run_at_a_time(self) -> None:
        session = make_session()
        run = session.run(ENDLESS, thread=True)
        until(lambda: session.steps)
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
            with refused(ValueError):
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
                m.setattr("surokit.train.background._callers", full if what == "caller's" else lambda device: full)
            with refused(RuntimeError):
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
        with refused(RuntimeError):
            session.run(3, thread=True)
        assert session.control.state == "idle"
        assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000000"]

    def test_waiting_for_a_while(self) -> None:
        session = make_session(model := Gated())
        run = session.run(20, thread=True)
        assert not run.wait(timeout=0.01)
        assert "running" in repr(run)
        model.gate.set()
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

        session = make_session(model := Gated(), meters=[At(1, wait)])
        run = session.run(1, thread=True)
        model.gate.set()
        run.wait()
        assert said == ["The run cannot wait for itself: call wait() from another thread."]

    def test_who_has_the_turn_does_not_wait_for_a_run(self) -> None:
        session = make_session()
        with kept(torch.device("cpu")):
            run = session.run(3, thread=True)
            with refused(RuntimeError):
                run.wait()
        assert run.wait()
        assert session.steps == 3

    def test_a_forked_process_has_no_run(self) -> None:
        session = make_session()
        run = session.run(ENDLESS, thread=True)
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
        session, listener = make_session(), Listener()
        session.subscribe(listener)
        run = session.run(ENDLESS, thread=True)
        interrupt_when(lambda: session.steps)
        assert run.wait()
        assert 0 < session.steps < ENDLESS
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
        """Other work of it opens the gate that the run waits at."""

        async def main() -> None:
            waiting = asyncio.create_task(awaited())
            await until_async(lambda: awaits)
            model.gate.set()
            await waiting

        async def awaited() -> None:
            run = session.run(50, thread=True)
            awaits.append(True)
            await run

        awaits: list[bool] = []
        session = make_session(model := Gated())
        asyncio.run(main())
        assert_same_state(session, whole(50))

    def test_a_cancelled_wait_stops_the_run(self) -> None:
        """As a notebook's interrupt of a cell that awaits."""

        async def main() -> None:
            task = asyncio.create_task(cell())
            await until_async(lambda: session.steps)
            task.cancel()
            await task
            assert task.cancelling() == 0

        async def cell() -> None:
            await session.run(ENDLESS, thread=True)
            after.append(session.steps)

        after: list[int] = []
        session = make_session()
        asyncio.run(main())
        assert after == [session.steps]
        assert 0 < session.steps < ENDLESS

    def test_a_second_one_gives_up_waiting(self) -> None:
        async def main() -> None:
            task = asyncio.create_task(cell())
            await until_async(model.reached.is_set)
            task.cancel()
            await until_async(lambda: session.control.reason)  # the first is heard
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
        with refused(ValueError):
            asyncio.run(main())


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


def test_weights_are_read_while_a_thread_trains() -> None:
    """Nothing of ours keeps others from looking; what they see may be of any moment."""
    session = make_session()
    run = session.run(ENDLESS, thread=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert weights(session)
    session.stop()
    run.wait()
