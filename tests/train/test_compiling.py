"""torch.compile is asked for or left alone; where it fails the run goes on; whoever does not want to wait for it need not. What
compiles here is a stand-in, which fails, waits or is interrupted as the test says."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from surokit.train import Session
from surokit.train.compiling import Compilation, GivenUp, end_workers, why_it_failed
from tests.clocks import PATIENCE_S
from tests.refusals import refused, warned
from tests.train.toys import Listener, Toy, assert_same_state, make_batches, make_session, whole

Fault = Callable[[], None]


class Compiler:
    """Stands for torch.compile: its first call for each shape does what `fault` does, which may raise; then the model computes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fault: Fault = lambda: None) -> None:
        self.made = 0
        self.fault = fault
        monkeypatch.setattr(torch, "compile", self)

    def __call__(self, model: nn.Module, **options: Any) -> Callable[..., Any]:
        self.made += 1
        seen = set()

        def forward(**batch: Any) -> Any:
            if (shape := batch["input_ids"].shape) not in seen:
                self.fault()
                seen.add(shape)
            return model(**batch)

        return forward


def truncated() -> None:
    raise ImportError("/tmp/torchinductor/c3n2.main.so: file too short\nSet TORCHDYNAMO_VERBOSE=1 for more")


class Switch:
    """A fault that can be taken away."""

    def __init__(self, fault: Fault) -> None:
        self.on, self._fault = True, fault

    def __call__(self) -> None:
        if self.on:
            self._fault()


class TestAskedFor:
    def test_nobody_compiles_unasked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """However many steps are planned."""
        compiler = Compiler(monkeypatch)
        session = make_session(schedule=None)
        session.stop_when(lambda record: record.step == 2)
        session.run(100_000)
        assert (session.steps, compiler.made, session.engine.compiled) == (2, 0, False)

    def test_a_checkpoint_of_before_that_left_it_open_resumes(self, tmp_path: Path) -> None:
        session = make_session(run_dir=tmp_path)
        session.run(1)
        session.save()
        (meta,) = tmp_path.rglob("session.json")
        meta.write_text(json.dumps({**json.loads(meta.read_text()), "compile": "auto"}))
        assert Session.resume(tmp_path, Toy(), data=session.data.source).compile is False

    def test_whoever_asks_gets_it(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        compiler = Compiler(monkeypatch)
        session = make_session(compile=True)
        session.run(3)
        assert (compiler.made, session.engine.compiled) == (1, True)
        assert "compiling the model" in capsys.readouterr().err
        assert [e["text"].split(":")[0] for e in session.journal.events] == ["compiling the model"]


class TestFailing:
    def test_the_run_goes_on_without_and_says_so(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        Compiler(monkeypatch, truncated)
        session = make_session(compile=True, run_dir=tmp_path / "run")
        with warned(UserWarning):
            session.run(3)
        assert not session.engine.compiled
        assert_same_state(session, whole(3))  # dropout's numbers too
        assert any("file too short" in e["text"] for e in session.journal.events)
        session.save()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = Session.resume(tmp_path / "run", Toy(), data=make_batches())
            again.run(1)
        assert not again.engine.compiled, "what failed is not tried again unasked"

    def test_another_shape_may_fail(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fault = Switch(truncated)
        fault.on = False
        Compiler(monkeypatch, fault)
        session = make_session(data=[*make_batches(2), *make_batches(1, length=7)], compile=True)
        session.run(2)
        fault.on = True
        with warned(UserWarning):
            session.run(1)
        assert session.steps == 3

    def test_an_error_of_the_model_is_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Broken(Toy):
            def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
                raise ZeroDivisionError("of the model")

        Compiler(monkeypatch)
        session = make_session(Broken(), compile=True)
        with refused(ZeroDivisionError):
            session.run(1)
        assert session.engine.compiled, "nobody knows yet whether it compiles"

    def test_the_reason_is_one_line(self) -> None:
        class BackendCompilerFailed(RuntimeError):
            inner_exception = ImportError("x.so: file too short\n\nSet TORCHDYNAMO_VERBOSE=1")

        assert why_it_failed(BackendCompilerFailed("backend='inductor' raised:")) == "ImportError: x.so: file too short"
        error = RuntimeError("C++ compile error\n\nCommand:\ng++ -O3\nOutput:\nld returned 1 exit status")
        assert why_it_failed(error) == "RuntimeError: C++ compile error ... ld returned 1 exit status"
        assert why_it_failed(RuntimeError()) == "RuntimeError: no reason given"


class TestInterrupted:
    def test_the_first_interrupt_ends_it(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        fault = Switch(lambda: signal.raise_signal(signal.SIGINT))
        compiler = Compiler(monkeypatch, fault)
        session = make_session(compile=True, run_dir=tmp_path / "run")
        listener = Listener()
        session.subscribe(listener)
        session.run(5)
        assert (session.steps, listener.of("end")) == (0, ["interrupted"])
        assert "giving up the compilation" in capsys.readouterr().err
        assert session.control.state == "idle"
        fault.on = False
        session.run(5)
        assert compiler.made == 2, "what was left of the first is not used"
        assert_same_state(session, whole(5))

    def test_in_a_later_step_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fault = Switch(lambda: signal.raise_signal(signal.SIGINT))
        fault.on = False
        Compiler(monkeypatch, fault)
        data = [*make_batches(2), *make_batches(1, length=7)]
        session = make_session(data=data, compile=True)
        session.run(2)
        fault.on = True
        session.run(3)
        assert session.steps == 2
        fault.on = False
        session.run(3)
        assert_same_state(session, whole(5, data=data))

    def test_an_interrupt_after_it_waits_for_the_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Compiler(monkeypatch)

        class Interrupting(Toy):
            calls = 0

            def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
                Interrupting.calls += 1
                if Interrupting.calls == 3:
                    signal.raise_signal(signal.SIGINT)
                return super().forward(input_ids, labels)

        session = make_session(Interrupting(), compile=True)
        session.run(5)
        assert session.steps == 3

    def test_in_ones_own_loop_it_is_an_interrupt(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Compiler(monkeypatch, lambda: signal.raise_signal(signal.SIGINT))
        session = make_session(compile=True)
        with pytest.raises(KeyboardInterrupt):
            session.step(make_batches(1)[0])
        assert session.steps == 0

    @pytest.mark.parametrize("how", ["stop", "wait"])
    def test_a_run_in_a_thread(self, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """A stop from another thread, and what Running does of an interrupt of its waiting, end what would never end."""
        begun, never = threading.Event(), threading.Event()

        def endless() -> None:
            begun.set()
            while not never.wait(0.001):
                pass

        fault = Switch(endless)
        Compiler(monkeypatch, fault)
        session = make_session(compile=True)
        run = session.run(5, thread=True)
        assert begun.wait(PATIENCE_S)
        if how == "stop":
            session.stop()
        else:
            run._stop()
        assert run.wait(PATIENCE_S)
        assert (session.steps, session.control.state) == (0, "idle")
        assert session.control.reason == ("stopped: by session.stop()" if how == "stop" else "interrupted")
        fault.on = False
        session.run(5)
        assert_same_state(session, whole(5))


class TestCompilation:
    def test_outside_of_one_there_is_nothing_to_give_up(self) -> None:
        compilation = Compilation()
        compilation.give_up()
        with compilation:
            assert compilation.goes_on
        compilation.give_up()
        assert not compilation.goes_on

    def test_one_that_ends_as_it_is_given_up_counts_as_given_up(self) -> None:
        """Whatever came out of it."""
        for failing in (False, True):
            compilation = Compilation()
            given_up = threading.Event()

            def other(compilation: Compilation = compilation, given_up: threading.Event = given_up) -> None:
                compilation.give_up()
                given_up.set()

            thread = threading.Thread(target=other)

            def compile_(thread: threading.Thread = thread, given_up: threading.Event = given_up) -> None:
                with suppress(GivenUp):  # as a compiler may
                    thread.start()
                    given_up.wait(PATIENCE_S)

            with pytest.raises(GivenUp):
                self.block(compilation, compile_, failing)
            thread.join()

    def block(self, compilation: Compilation, work: Callable[[], None], failing: bool) -> None:
        with compilation:
            work()
            if failing:
                raise ValueError("the compiler's worker has gone")

    def test_it_can_be_entered_again(self) -> None:
        compilation = Compilation()
        with pytest.raises(GivenUp), compilation:
            compilation.give_up()
        with compilation:
            pass


class TestWorkers:
    @pytest.fixture
    def inductor(self, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
        """torch's own: a pool of threads that run compilers, and one of processes."""
        told: list[str] = []

        def pool() -> Any:
            return SimpleNamespace(
                shutdown=lambda wait, cancel_futures: told.append(f"threads {wait} {cancel_futures}")
            )

        pool.cache_info = lambda: SimpleNamespace(currsize=1)  # type: ignore[attr-defined]
        pool.cache_clear = lambda: told.append("threads anew")  # type: ignore[attr-defined]
        module = SimpleNamespace(
            AsyncCompile=SimpleNamespace(pool=pool),
            shutdown_compile_workers=lambda: told.append("processes"),
            told=told,
        )
        monkeypatch.setitem(sys.modules, "torch._inductor.async_compile", module)
        return module

    def test_pools_are_shut_without_waiting(self, inductor: SimpleNamespace) -> None:
        end_workers()
        assert inductor.told == ["threads False True", "threads anew", "processes"]

    def test_another_version_of_torch_does_no_harm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch._inductor.async_compile", SimpleNamespace())
        end_workers()

    def test_where_nobody_has_compiled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(sys.modules, "torch._inductor.async_compile", raising=False)
        monkeypatch.setattr("surokit.train.compiling._compilers", lambda: pytest.fail("nobody has compiled"))
        end_workers()

    @pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
    def test_compilers_below_this_process_end_and_nobody_else(self, tmp_path: Path, inductor: SimpleNamespace) -> None:
        cat = shutil.which("cat")
        assert cat is not None
        for name in ("g++", "other"):
            (tmp_path / name).symlink_to(cat)
        read, write = os.pipe()  # they wait for what never comes
        started = [subprocess.Popen([tmp_path / name], stdin=read) for name in ("g++", "other")]
        with started[0] as compiler, started[1] as other:
            end_workers()
            assert compiler.wait(PATIENCE_S) == -signal.SIGINT
            assert other.poll() is None
            os.close(write)
        os.close(read)
