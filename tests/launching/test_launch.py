"""Functions and scripts in several processes: values, words, failures, stops, and runs that go on after a process was lost."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import surokit as sk
from surokit import cli
from surokit.bench.result import write
from surokit.environment import environment
from surokit.launching.launch import Launch, threads_of_each
from surokit.launching.outcome import failure_in
from surokit.launching.output import Output
from surokit.ranks import rank_here
from surokit.runs.status import read_status
from tests.clocks import until, until_async
from tests.launching import functions
from tests.processes import ROOT
from tests.refusals import refused
from tests.train.toys import Toy, make_batches, make_session


def interrupts(*when: Callable[[], object], by: signal.Signals = signal.SIGINT) -> threading.Thread:
    """Sends the main thread the signal of Ctrl-C and of a notebook's stop button, each time that the next of these holds."""
    main = threading.main_thread().ident
    assert main is not None

    def send() -> None:
        for true in when:
            until(true)
            signal.pthread_kill(main, by)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def is_alive(process: int) -> bool:
    """Whether it runs; one that has ended and that nobody has asked for its status does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_processes_share_the_cores_that_this_one_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [threads_of_each(n) for n in (1, 2, 4, 8)] == [6, 3, 1, 1]
    assert sk.launch(os.getenv, "OMP_NUM_THREADS", gpus=2, output="none") == "3"


def test_a_function_of_ones_own_gives_back_what_the_first_process_returns(capfd: pytest.CaptureFixture[str]) -> None:
    factor = 3

    class Own:  # neither can be imported by another process
        value = 2

    def own(a: int, *, b: int) -> tuple[int, Any]:
        print("hello from", rank_here().number)
        return factor * a * b * functions.together(), Own

    value, kind = sk.launch(own, 5, b=7, gpus=2)
    assert value == 3 * 5 * 7 * 2
    assert kind.value == 2
    out, error = capfd.readouterr()
    assert "[rank 0] hello from 0\n" in out
    assert "[rank 1] hello from 1\n" in out
    assert "2 processes share the CPU" in error


def test_the_words_of_the_process_that_fails_come_first() -> None:
    with pytest.raises(sk.LaunchError) as found:
        sk.launch(functions.fails, 1, gpus=2, output="first")
    lines = str(found.value).splitlines()
    assert lines[0] == "Rank 1 failed with ArithmeticError: seven is not prime"
    assert "in fails" in str(found.value)
    assert lines[-1] == "ArithmeticError: seven is not prime"
    assert (found.value.rank, found.value.kind) == (1, "failed")


def test_what_cannot_be_carried_is_named() -> None:
    lock = threading.Lock()

    def own() -> Any:
        return lock

    with refused(TypeError):
        sk.launch(own, gpus=2)
    with refused(TypeError):
        sk.launch(functions.together, (n for n in range(3)), gpus=2)
    with Path(__file__).open() as file, refused(TypeError):
        sk.launch(functions.together, {"data": file}, gpus=2)


def test_a_value_that_cannot_leave_its_process_is_an_error_of_the_function() -> None:
    with pytest.raises(sk.LaunchError, match="Rank 0 failed with TypeError: The function returned a generator"):
        sk.launch(lambda: (n for n in range(3)), gpus=1)


@pytest.mark.parametrize("settings", [{"gpus": 0}, {"gpus": True}, {"restarts": -1}, {"hang_s": 0}, {"output": "last"}])
def test_settings_that_make_no_launch_are_refused(settings: dict[str, Any]) -> None:
    with refused(ValueError):
        sk.launch(functions.together, **settings)


def test_a_launched_process_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refused(RuntimeError):
        sk.launch(functions.together, gpus=2)


def test_a_run_goes_on_after_its_processes_were_killed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each kill loses what was done since the last checkpoint, and nothing else."""
    alone = functions.session_in(tmp_path / "alone", accumulate=2, layout=sk.Parallel())
    alone.run(functions.STEPS)
    choose = random.Random(1)
    kills = {restart: (2 + 3 * restart + choose.randrange(3), choose.randrange(2)) for restart in range(5)}
    found = sk.launch(functions.trains, tmp_path / "killed", kills, gpus=2, restarts=5)
    assert found["steps"] == functions.STEPS
    assert found["losses"] == [r.loss for r in alone.records]
    error = capfd.readouterr().err
    assert [f"Rank {rank} was killed by SIGKILL" in error for rank in (0, 1)] == [True, True]
    assert "All start anew (5 of 5)" in error
    status = read_status(tmp_path / "killed" / "run")
    assert status is not None
    notes = [event["text"] for event in status.events if event["kind"] == "note"]
    assert len(notes) == 5
    assert notes[-1].startswith(f"Rank {kills[4][1]} was killed by SIGKILL")
    steps = [
        int(row)
        for row in sk.Session.resume(
            tmp_path / "killed" / "run",
            Toy(dropout=0.0),
            data=make_batches(13),
            parallel=sk.Parallel(),
        ).records.column("step")
    ]
    assert steps == [*range(1, functions.STEPS + 1)]


def test_a_process_ends_its_threads_and_exit_functions_and_takes_no_interpreter_down(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sk.launch(functions.leaves_much_behind, tmp_path, gpus=2)
    assert {path.name for path in tmp_path.iterdir()} == {"exit0", "exit1", "thread0", "thread1"}
    out, _ = capfd.readouterr()
    assert "[rank 0] left 0\n" in out
    assert "[rank 1] left 1\n" in out


def test_a_process_lost_too_often_ends_the_launch() -> None:
    with pytest.raises(sk.LaunchError, match="Rank 1 was killed by SIGKILL, often for lack of memory") as found:
        sk.launch(functions.is_killed, 1, gpus=2, restarts=1)
    assert found.value.kind == "killed"


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_an_interrupt_lets_the_runs_save_and_end(tmp_path: Path, by: signal.Signals) -> None:
    """SIGTERM is how a scheduler ends a program."""
    thread = interrupts((tmp_path / "began").exists, by=by)
    steps, reason = sk.launch(functions.waits_for_stop, tmp_path, gpus=2)
    thread.join()
    assert reason == "stopped: interrupted"
    assert steps >= 2
    assert (tmp_path / "run" / "checkpoints" / f"step-{steps:06d}").is_dir()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_interrupt_that_comes_in_a_finalizer_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python drops an exception there."""

    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    class Terminal(io.StringIO):
        def write(self, text: str) -> int:
            if "began" in text:
                Finalized()
            return super().write(text)

    def own() -> str:
        folder = rank_here().folder
        assert folder is not None
        print("began")
        until((folder / "stop").exists)
        return (folder / "stop").read_text()

    monkeypatch.setattr("sys.stdout", Terminal())
    assert sk.launch(own, gpus=1) == "interrupted"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_ends_all_and_what_they_started(tmp_path: Path) -> None:
    def own(folder: Path) -> None:
        child = subprocess.Popen(["sleep", "1000"])
        here = rank_here()
        (folder / f"began{here.number}").write_text(f"{os.getpid()} {child.pid}")
        assert here.folder is not None
        until((here.folder / "stop").exists)
        (folder / f"heard{here.number}").touch()
        child.wait()

    heard = [tmp_path / f"heard{rank}" for rank in range(2)]
    began = [tmp_path / f"began{rank}" for rank in range(2)]
    thread = interrupts(lambda: all(path.exists() for path in began), lambda: all(path.exists() for path in heard))
    with pytest.raises(KeyboardInterrupt):
        sk.launch(own, tmp_path, gpus=2, restarts=3)
    thread.join()
    processes = [int(number) for path in began for number in path.read_text().split()]
    assert len(processes) == 4
    until(lambda: not any(map(is_alive, processes)))


def test_an_awaited_launch_that_is_cancelled_in_a_notebook_lets_its_processes_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("surokit.launching.launch.front_end", lambda: "Jupyter")

    def own() -> str:
        folder = rank_here().folder
        assert folder is not None
        until((folder / "stop").exists)
        return (folder / "stop").read_text()

    async def cell() -> tuple[Any, Any]:
        running = sk.launch(own, gpus=1, thread=True)
        task = asyncio.ensure_future(running)
        await until_async(lambda: running.goes_on)
        await asyncio.sleep(0)
        task.cancel()
        return await task, running.wait()

    assert asyncio.run(cell()) == ("interrupted", "interrupted")


def test_elsewhere_it_is_cancelled() -> None:
    """As by asyncio.timeout or a group of tasks."""

    async def program() -> Launch:
        running = sk.launch(lambda: threading.Event().wait(), gpus=1, thread=True)
        task = asyncio.ensure_future(running)
        await until_async(lambda: running.goes_on)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return running

    running = asyncio.run(program())
    assert not running.goes_on


def test_an_answer_to_the_end_of_all_is_no_failure() -> None:
    """A process that handles SIGTERM ends with a status, after another has failed."""

    def own(folder: Path) -> None:
        if rank_here().number == 0:
            signal.signal(signal.SIGTERM, lambda *_: os._exit(15))
            (folder / "ready").touch()
            threading.Event().wait()
        until((folder / "ready").exists)
        raise ValueError("the real reason")

    with tempfile.TemporaryDirectory() as folder, pytest.raises(sk.LaunchError, match="Rank 1 failed with ValueError"):
        sk.launch(own, Path(folder), gpus=2)


def test_a_process_that_ends_without_a_word_is_named_and_counted() -> None:
    def own() -> dict[str, Any]:
        here = rank_here()
        if here.restarts:
            assert here.folder is not None
            return dict(json.loads((here.folder / "restarts.jsonl").read_text()))
        if here.number == 1:
            os._exit(7)
        threading.Event().wait()
        return {}

    running = sk.launch(own, gpus=2, restarts=1, thread=True)
    told = running.wait()
    assert (told["rank"], told["kind"]) == (1, "ended")
    assert told["why"] == "Rank 1 ended with status 7 and raised nothing."
    assert [restart.line for restart in running.restarts] == [told["why"]]
    assert round(running.restarts[0].seconds, 3) == told["seconds"] > 0


def test_a_program_that_ends_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    program = """
import os, sys, threading
from pathlib import Path
import surokit as sk
from tests.clocks import until

def own(began):
    began.with_suffix(".draft").write_text(str(os.getpid()))
    began.with_suffix(".draft").rename(began)
    threading.Event().wait()

began = Path(sys.argv[1], "began")
sk.launch(own, began, gpus=1, thread=True)
until(began.exists)
"""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
        check=True,
    )
    until(lambda: not is_alive(int((tmp_path / "began").read_text())))
    assert not list(temporary.glob("surokit-launch-*"))


def test_a_launch_in_a_thread_is_waited_for_or_stopped(tmp_path: Path) -> None:
    running = sk.launch(functions.waits_for_stop, tmp_path, gpus=2, thread=True)
    until((tmp_path / "began").exists)
    assert running.goes_on
    running.stop("enough")
    steps, reason = running.wait()
    assert (steps >= 2, reason) == (True, "stopped: enough")
    assert not running.goes_on


def test_a_process_that_hangs_is_ended_with_every_stack(tmp_path: Path) -> None:
    with pytest.raises(sk.LaunchError) as found:
        sk.launch(functions.hangs, tmp_path, gpus=2, hang_s=3)
    assert str(found.value).startswith("Rank 1 hung: no step for 0:00:03. The others wait for it. The stacks are in ")
    assert "forgets_to_return" in str(found.value)
    assert (found.value.rank, found.value.kind) == (1, "hung")


def test_a_script_is_launched_from_the_shell(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nimport torch.distributed as dist\nfrom surokit.ranks import rank_here\n"
        "dist.init_process_group('gloo')\ndist.barrier()\nprint(rank_here().number, sys.argv[1:], __name__, flush=True)\n"
        "if rank_here().number: sys.exit(0)\n"  # ends at once and is waited for by nobody
        "dist.destroy_process_group()\n"
    )
    assert cli.main(["launch", "--gpus", "2", str(script), "--steps", "3"]) == 0
    out = capfd.readouterr().out
    assert "[rank 0] 0 ['--steps', '3'] __main__\n" in out
    assert "[rank 1] 1 ['--steps', '3'] __main__\n" in out
    script.write_text("raise SystemExit(3)\n")
    assert cli.main(["launch", "--gpus", "1", str(script)]) == 1
    assert "Rank 0 failed with SystemExit: 3" in capfd.readouterr().err
    assert cli.main(["launch", str(tmp_path / "none.py")]) == 2
    gc.collect()


def test_a_launch_goes_on_in_folders_of_its_own_only(tmp_path: Path) -> None:
    """A process that fails before it has claimed a folder finds an older run of that name there."""
    assert sk.launch(functions.begins_late, tmp_path, gpus=1, restarts=1) == ("run", 3)
    assert sk.launch(functions.begins_late, tmp_path, gpus=1, restarts=1) == ("run-2", 3)


def test_a_pause_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog of a launch hears from a run that waits, until it goes on."""
    beats: list[str] = []

    def beat(session: sk.Session) -> None:
        beats.append(session.control.state)
        if beats.count("paused") == 3:
            session.control.resume()

    class Pauses:
        def on_step(self, record: Any) -> None:
            if record.step == 2:
                session.control.pause()

        def on_end(self, reason: str) -> None: ...

    monkeypatch.setattr(sk.Session, "beat", beat)
    session = make_session()
    session.subscribe(Pauses())
    session.run(4)
    assert beats.count("paused") >= 3
    assert session.steps == 4


def test_a_process_that_breaks_off_because_another_failed_is_not_the_first(tmp_path: Path) -> None:
    words = {"rank": 1, "at": 5.0, "type": "ValueError", "message": "bad", "traceback": "..."}
    (tmp_path / "error-0-1.json").write_text(json.dumps(words))
    assert failure_in(tmp_path, 0, {0: -signal.SIGABRT, 1: 1}).line == "Rank 1 failed with ValueError: bad"
    assert failure_in(tmp_path, 0, {0: -signal.SIGKILL, 1: 1}).line.startswith("Rank 0 was killed by SIGKILL")
    assert failure_in(tmp_path, 1, {0: -signal.SIGABRT}).line == "Rank 0 was killed by SIGABRT."
    assert failure_in(tmp_path, 1, {0: -35}).line == "Rank 0 was killed by signal 35."


def test_a_process_that_is_not_in_a_run_is_named_where_another_waits_for_it(tmp_path: Path) -> None:
    stack = 'Timeout (0:00:03)!\nThread 0x0 (most recent call first):\n  File "/torch/distributed/c10d.py", line 3 in all_reduce\n'
    (tmp_path / "stack-0.txt").write_text(stack)
    found = failure_in(tmp_path, 0, {0: 1}, 3)
    assert found.line.startswith("Rank 0 hung: no step for 0:00:03. Ranks 1, 2 are not within a session's run()")
    assert failure_in(tmp_path, 0, {0: 1}, 2).line.startswith("Rank 0 hung: no step for 0:00:03. Rank 1 is not within")


def test_a_process_that_ends_without_a_word_is_the_first(tmp_path: Path) -> None:
    """The others lose their connection to it, or torchelastic ends them."""
    assert failure_in(tmp_path, 0, {1: 7, 0: -signal.SIGTERM}).line == "Rank 1 ended with status 7 and raised nothing."
    assert failure_in(tmp_path, 0, {1: -signal.SIGTERM, 0: -signal.SIGTERM}).line == "Rank 1 was killed by SIGTERM."
    words = {"rank": 0, "at": 5.0, "type": "RuntimeError", "message": "connection closed", "traceback": "..."}
    (tmp_path / "error-0-0.json").write_text(json.dumps(words))
    assert failure_in(tmp_path, 0, {0: 1, 1: 7}).rank == 1
    assert failure_in(tmp_path, 0, {0: 1, 1: -signal.SIGTERM}).rank == 0


def test_of_a_progress_bar_only_the_end_is_printed(tmp_path: Path) -> None:
    printed: list[str] = []
    output = Output(tmp_path, "all", lambda text, is_error: printed.append(text))
    with (tmp_path / "000-001.err").open("wb", buffering=0) as file:
        for part in (b"1 %\r", b"2 %\r3", b" %", b"\r4 %\r", b"\n\r5 %", b"\r6 %"):
            file.write(part)
            output.pump()
    assert printed == ["[rank 1] 4 %\n"]
    output.pump(end=True)
    assert printed[1:] == ["[rank 1] 6 %\n"]


@pytest.mark.soak
@pytest.mark.parametrize("layout", [sk.Parallel(shard=1), sk.Parallel()], ids=["copies", "shards"])
def test_twenty_kills_cost_nothing_but_time(layout: sk.Parallel, tmp_path: Path) -> None:
    steps = 100
    whole = sk.launch(functions.trains, tmp_path / "whole", {}, layout, steps, gpus=2)
    choose = random.Random(20)
    kills = {restart: (3 + 4 * restart + choose.randrange(4), choose.randrange(2)) for restart in range(20)}
    found = sk.launch(functions.trains, tmp_path / "killed", kills, layout, steps, gpus=2, restarts=20)
    raw = {
        "benchmark": "a run of 100 steps on 2 processes, one of which is killed 20 times",
        "environment": environment(),
        "layout": str(layout),
        "killed": [{"step": step, "rank": rank} for step, rank in kills.values()],
        "steps": found["steps"],
        "losses that differ from a run without kills": sum(a != b for a, b in zip(found["losses"], whole["losses"])),
        "seconds of steps done twice": found["seconds"],
    }
    name = "copies" if layout.shard == 1 else "shards"
    write(raw, ROOT / "docs" / "measurements" / f"kills-{name}.json")
    assert found["steps"] == steps
    assert found["losses"] == whole["losses"]
