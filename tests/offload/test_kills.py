"""kill -9 of a session whose optimizer works in threads; a thread that dies or hangs; memory over many steps."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surokit.errors import OffloadError
from surokit.offload import pipeline
from surokit.offload.link import ThrottledLink
from surokit.offload.workers import Worker
from tests.clocks import until
from tests.offload.runs import Run
from tests.refusals import refused

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.soak)])
def test_kill_9(kills: int) -> None:
    """Resumed after each, it ends bit for bit where it would have ended."""
    command = [sys.executable, "-m", "tests.offload.killed", str(kills)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60 + 5 * kills)
    assert done.returncode == 0, done.stderr
    assert f"{kills} kills" in done.stdout
    print(done.stdout)


def trained(run: Run) -> str:
    """Steps until an error: what it said."""
    with pytest.raises(OffloadError) as caught:  # noqa: PT012
        while True:
            run.step()
    return str(caught.value)


def planted(run: Run, part: str, work: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    """Whatever thread adds up or updates rows does `work` first; not this one."""
    owners = [m for name, m in sys.modules.items() if name.startswith("surokit.offload") and hasattr(m, part)]
    inner = getattr(owners[0], part)

    def instead(*args: Any, **options: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            work()
        inner(*args, **options)

    for module in owners:
        patch.setattr(module, part, instead)


@pytest.mark.parametrize("part", ["add_rows_", "update_rows_"])
@pytest.mark.parametrize("options", [{}, {"overlap_step": False}], ids=["overlap", "no overlap"])
def test_a_thread_that_hangs_is_an_error_in_time(
    part: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    impatient = functools.partial(Worker, patience_s=0.4)
    monkeypatch.setattr(pipeline, "Worker", impatient)
    run = Run(**options)
    for _ in range(5):
        run.step()
    run.optimizer.state_dict()

    def hang() -> None:
        gate.wait()

    planted(run, part, hang, monkeypatch)
    try:
        assert "no sign of life" in trained(run)
        for use in (run.step, run.optimizer.state_dict):
            with refused(OffloadError):
                use()
    finally:
        gate.set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("which", [0, 1])
def test_a_thread_that_dies_is_an_error_in_time(which: int) -> None:
    before = set(threading.enumerate())
    run = Run()
    for _ in range(9):
        run.step()
    run.optimizer.state_dict()
    own = sorted((t for t in threading.enumerate() if t not in before), key=lambda t: t.name)
    assert len(own) == 2, own
    raised = ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(own[which].ident or 0), ctypes.py_object(SystemExit)
    )
    assert raised == 1
    assert "has died" in trained(run)


def test_threads_end_with_their_optimizer() -> None:
    before = set(threading.enumerate())
    runs = [Run() for _ in range(3)]
    for run in runs:
        for _ in range(5):
            run.step()
    started = set(threading.enumerate()) - before
    assert started
    del runs, run
    gc.collect()
    until(lambda: not any(thread.is_alive() for thread in started))


def test_a_slow_link_is_no_hanging_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that waits for a transfer lives, however long that takes."""
    monkeypatch.setattr(pipeline, "Worker", functools.partial(Worker, patience_s=0.5))
    run = Run(
        [(16, 20)], link=ThrottledLink(1.0, latency_s=1.3)
    )  # a slow link is what this is about: it really takes so long
    run.step()
    run.optimizer.state_dict()
    run.check(masters=True)


def test_a_forked_process_is_told() -> None:
    """Threads are not forked: a step there is an error at once, and the parent does not notice."""
    program = """
import os, sys, torch
from surokit.errors import OffloadError
from tests.offload.runs import Run
run = Run()
for _ in range(5):
    run.step()
child = os.fork()
if not child:
    try:
        for _ in range(5):
            run.step()
    except OffloadError as error:
        os._exit(7 if "forked" in str(error) else 8)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
for _ in range(5):
    run.step()
run.check(masters=True)
print("both")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "both\n", done.stderr


def test_a_program_ends_while_threads_work() -> None:
    """Without a word, and soon, though a job would take minutes."""
    program = """
import functools, time, torch
from surokit.offload import pipeline
from surokit.offload.link import ThrottledLink
from surokit.offload.workers import Worker
from surokit.offload.link import ThrottledLink
from surokit.offload.workers import Worker
from tests.offload.runs import Run
pipeline.Worker = functools.partial(pipeline.Worker, delay=lambda: 0.3)
run = Run([(64, 64)], link=ThrottledLink(1.0, latency_s=0.2))
for _ in range(6):
    run.step()
print("end", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


LONG = """
import gc, sys, torch
from tests.offload.runs import Run
def mib():
    for line in open("/proc/self/status"):
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
torch.set_num_threads(1)
first, steps = int(sys.argv[1]), int(sys.argv[2])
shapes = [(128, 160), (32,), (48, 64)]
run = Run(shapes, torch.bfloat16, select_interval=8, update_interval=sys.argv[3] if sys.argv[3] == "auto" else int(sys.argv[3]))
from tests.offload.runs import feed, make_grads
sets = [make_grads(shapes, step, torch.bfloat16) for step in range(40)]
def go(steps):
    for step in range(steps):
        feed(run.optimizer, run.params, sets[step % 40])
    run.optimizer.state_dict()
    gc.collect()
    return mib(), len(gc.get_objects())
go(1)  # the list of objects takes 2 MiB itself
before, after = go(first), go(steps - first)
print(*before, *after)
"""


@pytest.mark.parametrize(
    ("interval", "first", "steps", "most_mib"),
    [
        ("4", 200, 500, 4.0),
        pytest.param("4", 8_000, 18_000, 1.0, marks=[pytest.mark.soak, pytest.mark.timeout(0)]),
        pytest.param("auto", 8_000, 18_000, 1.0, marks=[pytest.mark.soak, pytest.mark.timeout(0)]),
    ],
)
def test_memory_is_flat(interval: str, first: int, steps: int, most_mib: float) -> None:
    """A step's cold gradients are 40 kB; what is remembered of 4,096 steps and 256 choices is 3 MiB, all there after 8,000."""
    command = [sys.executable, "-c", LONG, str(first), str(steps), interval]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    mib, objects, later_mib, later_objects = map(float, done.stdout.split())
    print(
        f"{mib:.1f} MiB after {first} steps, {later_mib - mib:+.1f} after {steps}; {later_objects - objects:+.0f} objects"
    )
    assert later_mib - mib < most_mib
    remembered = max(0, min(steps, 4_096) - first)  # an entry a step, up to so many
    assert later_objects - objects < remembered + 300
