"""A real Ctrl-C, and a program that ends, in a process of its own: the run is stopped, saved and told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import surokit as sk
from surokit.runs.status import read_status
from surokit.train.session import Session
from tests.train.toys import ENDLESS, Toy, assert_same_state, make_batches, whole

ROOT = Path(__file__).parents[2]

PROCESSES = """
import asyncio, json, os, signal, sys, threading
from surokit.environment import environment
from tests.train.toys import ENDLESS, Toy, make_session
from tests.clocks import until

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
    session = make_session(run_dir=run_dir, save_every=1000, meters=[begun])
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
        program = Program(processes, "session.run(ENDLESS); print(session.steps)", tmp_path)
        program.interrupt()
        status, out, err = program.end()
        assert status == 0, err
        assert 0 < int(out) < ENDLESS
        assert "stopping after this step" in err
        told = read_status(program.run_dir)
        assert told is not None
        assert (told.state, told.step) == ("interrupted", int(out))
        self.goes_on_from(program.run_dir)

    def test_a_second_interrupt(self, tmp_path: Path, processes: subprocess.Popen[str]) -> None:
        code = """
class Stuck(Toy):
    def forward(self, input_ids, labels=None):
        if session.steps == 5:
            print("stuck", flush=True)
            threading.Event().wait(60)
        return super().forward(input_ids, labels)

session.model.__class__ = Stuck
try:
    session.run(ENDLESS)
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
        code = "run = session.run(ENDLESS, thread=True)\nuntil(lambda: session.steps >= 5)"
        program = Program(processes, code, tmp_path)
        status, _, err = program.end()
        assert status == 0, err
        told = read_status(program.run_dir)
        assert told is not None
        assert told.state == "stopped: the program ended"
        self.goes_on_from(program.run_dir)

    @pytest.mark.parametrize("kind", [sk.OffloadAdamW, sk.ZenFlow])
    def test_a_program_that_ends_with_an_offloading_optimizer(
        self, kind: Any, tmp_path: Path, processes: subprocess.Popen[str]
    ) -> None:
        """The threads beside the run do their work until it has ended."""
        code = f"""
import surokit as sk
session = make_session(run_dir=run_dir, save_every=1000, meters=[begun], optimizer=sk.{kind.__name__}(lr=1e-2))
run = session.run(ENDLESS, thread=True)
until(lambda: session.steps >= 5)
"""
        program = Program(processes, code, tmp_path)
        status, _, err = program.end()
        assert (status, err) == (0, "")
        told = read_status(program.run_dir)
        assert told is not None
        assert told.state == "stopped: the program ended"
        again = Session.resume(program.run_dir, Toy(), data=make_batches())
        again.run(5)
        assert_same_state(again, whole(again.steps, optimizer=kind(lr=1e-2)))

    def test_what_a_run_uses_ends_after_it(self, tmp_path: Path, processes: subprocess.Popen[str]) -> None:
        """Also where it is first used, and its module imported, while the run goes on, as in a race that builds its sessions."""
        code = """
from surokit.endings import end_at_exit
run = session.run(ENDLESS, thread=True)
until(lambda: session.steps >= 5)
end_at_exit(lambda: print("the run goes on" if run.running else "the run has ended"))
"""
        status, out, err = Program(processes, code, tmp_path).end()
        assert (status, out, err) == (0, "the run has ended\n", "")

    def test_a_program_that_ends_while_its_run_waits(self, tmp_path: Path, processes: subprocess.Popen[str]) -> None:
        code = """
run = session.run(ENDLESS, thread=True)
until(lambda: session.steps >= 5)
session.control.pause()
until(lambda: session.control.state == "paused")
"""
        program = Program(processes, code, tmp_path)
        status, _, err = program.end()
        assert status == 0, err
        self.goes_on_from(program.run_dir)

    def test_an_interrupted_program_of_asyncio(self, tmp_path: Path, processes: subprocess.Popen[str]) -> None:
        code = """
async def main():
    await session.run(ENDLESS, thread=True)
    print(session.steps)
asyncio.run(main())
"""
        program = Program(processes, code, tmp_path)
        program.interrupt()
        _, out, err = program.end()
        assert 0 < int(out) < ENDLESS, err
        self.goes_on_from(program.run_dir)
