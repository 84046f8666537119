"""Run threads beside the training thread: each does its jobs in order, on cores and with torch threads of its own.

Python's lock is free while torch computes, so a worker's arithmetic costs the training thread only the cores that it uses.
But every call of torch takes the lock again when it is over, and waits for it (up to 5 ms, sys.getswitchinterval) while the
training thread runs plain Python: so a job is made of few, large calls.

A worker's error is raised where its job is waited for, or at the next `check`; jobs that were submitted behind a failed one
are not done. No result depends on the clock.

A thread holds no reference to its Worker, and of a job only while it does it: when the Worker is dropped, the thread ends.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from surokit.endings import end_at_exit
from surokit.errors import OffloadError
from surokit.offload.timeline import PREFIX, WAIT, WORK, span

SLICE_S = 0.05  # a wait looks this often whether what it waits for still lives

_here = threading.local()  # .shared: of the worker whose thread this is


class _Leaving(BaseException):
    """A _Leaving ends a job whose result is not needed, or that runs at the interpreter's end."""


class _Shared:
    """A _Shared is the state that a thread and its owner both hold."""

    def __init__(self, name: str, patience_s: float) -> None:
        self.name, self.patience_s = name, patience_s
        self.pid = os.getpid()
        self.queue: SimpleQueue[Job | None] = SimpleQueue()  # its put may interrupt itself, as a finalizer does
        self.thread: threading.Thread | None = None
        self.beats = 0
        self.era = 0  # ends when an error is raised; what comes behind a failed job in its era is not done
        self.failed_era = -1
        self.failed: weakref.ref[Job] | None = None  # its error holds frames, and they the Worker
        self.leaving = self.exiting = self.gone = False
        self.ready, self.ended = _held(), _held()  # until the thread is ready, and until it is gone

    def silence(self) -> str | None:
        """Return why nothing more is to be expected of the thread; None while it lives."""
        if self.pid != os.getpid():
            return (
                "belongs to the process that this one was forked from: step an optimizer only there, or start "
                'processes by the method "spawn".'
            )
        if self.thread is None or not self.thread.is_alive():
            return "has died: make the optimizer anew and go on from a checkpoint."
        return None

    def wait(self, over: Callable[[], bool], lock: threading.Lock) -> None:
        """Wait until `over`; then `lock` is free. It waits in slices, as Ctrl-C does not end a longer wait everywhere."""
        beats, silent_s = self.beats, 0.0
        while not over():
            if lock.acquire(timeout=SLICE_S):
                lock.release()
                continue
            beat()
            if (why := self.silence()) and not over():
                raise OffloadError(f"The offload worker {self.name!r} {why}")
            # in slices of its own, and not by the clock: a process that was stopped for a while blames nobody
            silent_s = silent_s + SLICE_S if beats == self.beats else 0.0
            beats = self.beats
            if silent_s >= self.patience_s:
                raise OffloadError(
                    f"The offload worker {self.name!r} has given no sign of life for {self.patience_s:g} s: it hangs, or "
                    "the machine is overloaded or swaps. Go on from a checkpoint, with more memory or free cores."
                )

    def join(self) -> None:
        """Wait until the thread, which was asked to leave, is gone."""
        self.wait(lambda: self.gone, self.ended)
        assert self.thread is not None
        self.thread.join()

    def leave(self) -> None:
        """Ask the thread to end; safe in a finalizer, on any thread and in a forked process."""
        self.leaving = True
        self.queue.put(None)


def _held() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


class Job:
    """A Job is work that was submitted to a Worker."""

    def __init__(self, shared: _Shared, work: Callable[[], object]) -> None:
        self._shared, self._work, self._era = shared, work, shared.era
        self._over = False
        self._error: BaseException | None = None
        self._lock = _held()  # until it is over

    def done(self) -> bool:
        """Return whether it is over, done or failed; never waits."""
        return self._over

    def wait(self) -> None:
        """Wait until the job is over. Raises OffloadError if it failed, with its error as the cause; if the thread has
        died; or if the thread gave no sign of life for the worker's patience. Ctrl-C ends the wait and changes nothing."""
        if not self._over:
            with span(WAIT):
                self._shared.wait(self.done, self._lock)
        if self._error is not None:
            self.fail(self._error)

    def fail(self, error: BaseException) -> None:
        """Raise `error`, the job's own."""
        if self.unseen():
            self._shared.era += 1
        if isinstance(error, OffloadError):  # says all itself
            raise OffloadError(str(error)) from error.__cause__ or error
        raise OffloadError(
            f"The offload worker {self._shared.name!r} failed: {type(error).__name__}: {error}. What it was changing may be "
            "changed in part: go on from a checkpoint."
        ) from error

    def unseen(self) -> bool:
        """Return whether it has failed and that failure was not raised yet."""
        return self._error is not None and self._era == self._shared.era

    def do(self, delay: Callable[[], float] | None) -> None:
        """Do the work, on the worker's thread."""
        shared = self._shared
        try:
            self._permit()
            shared.beats += 1
            if delay is not None:
                time.sleep(delay())
            with span(WORK):
                self._work()
        except BaseException as error:  # whatever it is, it belongs to the thread that waits
            trace = error.__traceback__
            # without this frame, which would hold the job, as that holds the error
            self._error = error.with_traceback(trace and trace.tb_next)
            if shared.failed_era != self._era:
                shared.failed, shared.failed_era = weakref.ref(self), self._era
        finally:
            self._work = nothing  # and what it holds
            shared.beats += 1
            self._over = True
            self._lock.release()

    def _permit(self) -> None:
        shared = self._shared
        if shared.leaving:
            raise OffloadError(f"The offload worker {shared.name!r} was closed before this job began: submit it again.")
        if shared.failed_era == self._era:
            first = shared.failed() if shared.failed is not None else None
            raise OffloadError(
                f"The offload worker {shared.name!r} has not begun this job, as one before it failed: go on from a checkpoint."
            ) from (first._error if first is not None else None)


class Worker:
    """A Worker is a thread that does jobs one after the other; it starts at the first job. A copy, or an unpickled one, has
    a thread of its own.

    name: in messages and of the thread. cores: those that the thread, and torch's threads under it, are bound to, where the
    system can (Linux) and no control group shares
        out time instead; (): not bound.
    threads: torch threads of its arithmetic; those of other threads stay as they are. patience_s: after so long without a
    sign of life (a job's beginning or end, `beat`) a wait gives up. delay: gives the seconds to sleep before each job,
    called in the thread, for tests.
    """

    def __init__(
        self,
        name: str,
        cores: Sequence[int] = (),
        threads: int = 1,
        patience_s: float = 10.0,
        delay: Callable[[], float] | None = None,
    ) -> None:
        if threads < 1 or patience_s <= 0:
            raise ValueError(f"Worker: threads={threads} must be at least 1, and patience_s={patience_s} positive.")
        self.name, self.cores, self.threads = name, tuple(cores), threads
        self.patience_s, self.delay = patience_s, delay
        self._shared: _Shared | None = None
        self._jobs: deque[Job] = deque()  # not over, or failed and nobody knows
        self._leave: Callable[[], object] = nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return Worker, (self.name, self.cores, self.threads, self.patience_s, self.delay)

    def submit(self, work: Callable[[], object]) -> Job:
        """Queue `work`; jobs are done in the order of their submission, under torch.no_grad(). Raises OffloadError if the
        thread has died, or in a process that was forked from the one that it belongs to."""
        shared = self._shared or self._start()
        if why := shared.silence():
            raise OffloadError(f"The offload worker {self.name!r} {why}")
        self._forget()
        job = Job(shared, work)
        shared.queue.put(job)
        self._jobs.append(job)
        return job

    def check(self) -> None:
        """Raise the error of a job that failed, if no wait has raised it, once; or that the thread has died. Never waits."""
        self._forget()
        if self._jobs and self._jobs[0].unseen():
            self._jobs[0].wait()
        if self._shared is not None and (why := self._shared.silence()):
            raise OffloadError(f"The offload worker {self.name!r} {why}")

    def beat(self) -> None:
        """Give a sign of life, from inside long work on its thread; elsewhere it does nothing. At the interpreter's end it
        ends the work."""
        beat()

    def close(self, at_once: bool = False) -> None:
        """End the thread when the job that runs is done, or `at_once` at its next beat, where its result is not needed;
        jobs that had not begun are dropped, and their wait says so. A later submit starts another thread. Closing twice
        does nothing."""
        shared, self._shared = self._shared, None
        self._jobs.clear()
        if shared is None:
            return
        shared.exiting |= at_once
        self._leave()
        if shared.silence() is None and shared.thread is not threading.current_thread():
            shared.join()

    def _forget(self) -> None:
        while self._jobs and self._jobs[0].done() and not self._jobs[0].unseen():
            self._jobs.popleft()

    def _start(self) -> _Shared:
        shared = _Shared(self.name, self.patience_s)
        shared.thread = threading.Thread(
            target=_run,
            args=(shared, self.cores, self.threads, self.delay),
            name=f"{PREFIX}{self.name}",
            daemon=True,
        )
        leave = weakref.finalize(self, shared.leave)
        leave.atexit = False  # all are ended together then
        before = torch.get_num_threads()
        shared.thread.start()
        try:
            shared.ready.acquire()
        finally:
            # a thread sets its own number, and with it the one that new threads begin with (measured): that is set back
            torch.set_num_threads(before)
        _alive.add(shared)
        self._shared, self._leave = shared, leave
        return shared


def beat() -> None:
    """Give a sign of life of the worker whose thread calls this; on other threads it does nothing. Code that waits in a
    worker calls it."""
    shared: _Shared | None = getattr(_here, "shared", None)
    if shared is not None:
        shared.beats += 1
        if shared.exiting:
            raise _Leaving


def nothing() -> None:
    """Do nothing."""


def _run(shared: _Shared, cores: tuple[int, ...], threads: int, delay: Callable[[], float] | None) -> None:
    """Run a worker's thread. Between jobs it holds none."""
    _here.shared = shared
    try:
        try:
            _settle(cores, threads)
        finally:
            shared.ready.release()
        with torch.no_grad():
            while (job := shared.queue.get()) is not None:
                job.do(delay)
                del job
    finally:
        shared.gone = True
        shared.ended.release()


def _settle(cores: tuple[int, ...], threads: int) -> None:
    """Bind this thread, and those that it will start, to its cores, and set its number of torch threads."""
    if cores and can_bind():
        with contextlib.suppress(OSError):  # cores that were taken from the process meanwhile
            os.sched_setaffinity(0, cores)
    torch.get_num_threads()  # a thread's first call takes over the common number, and must not do so later
    torch.set_num_threads(threads)


_alive: weakref.WeakSet[_Shared] = weakref.WeakSet()


def end_all() -> None:
    """End all jobs at their next beat and wait for their threads, as long as these give signs of life: a thread that computes while
    the interpreter is taken down crashes it."""
    mine = [shared for shared in _alive if shared.silence() is None]
    for shared in mine:
        shared.exiting = True
        shared.leave()
    for shared in mine:
        with contextlib.suppress(OffloadError):  # it hangs
            shared.join()


end_at_exit(end_all)


def split_cores(reserved: float) -> tuple[list[int], list[int], list[int]]:
    """Divide the cores of this process into (the training thread's, the accumulator's, Adam's).

    reserved: share of the cores that stay with the training thread; it and each worker have at least one. Adam has three times
        as many as the accumulator, as its work is three times as long. With fewer than 3 cores the workers share.
        ValueError outside [0, 1].

    Threads of one physical core stay together where the numbers allow it. The lengths are thread counts on every system; a
    Worker binds to the cores only where that is possible and helps.
    """
    if not 0 <= reserved <= 1:
        raise ValueError(f"split_cores: reserved={reserved} must be a share of the cores, from 0 to 1.")
    cores = usable_cores()
    if len(cores) < 3:
        return cores[:1], cores[1:] or cores, cores[1:] or cores
    main = min(max(round(reserved * len(cores)), 1), len(cores) - 2)
    adam = main + max((len(cores) - main) // 4, 1)
    return cores[:main], cores[main:adam], cores[adam:]


def usable_cores() -> list[int]:
    """Return the cores that this process may use: its affinity, no more of it than a control group gives it time for, and
    of that a rank's part."""
    cores = sorted(os.sched_getaffinity(0), key=place_of) if hasattr(os, "sched_getaffinity") else []
    cores = cores or list(range(os.cpu_count() or 1))
    return _part(cores[: max(int(min(len(cores), quota_of_cores())), 1)])


def _part(cores: list[int]) -> list[int]:
    """Return a rank's part of the cores that the ranks of a machine have in common (LOCAL_RANK, LOCAL_WORLD_SIZE:
    torchrun's names). Ranks that were bound already have other cores than the process that started them, and keep all of
    theirs."""
    rank, ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    with contextlib.suppress(OSError, AttributeError):
        if os.sched_getaffinity(0) != os.sched_getaffinity(os.getppid()):
            return cores
    if not 0 <= rank < ranks:
        return cores
    return cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks] or [cores[rank % len(cores)]]


def can_bind() -> bool:
    """Return whether binding helps. Where a control group gives the time of n cores on a machine of more, every such group
    would bind to the same ones."""
    return hasattr(os, "sched_setaffinity") and quota_of_cores() >= len(os.sched_getaffinity(0))


def place_of(core: int, at: Path = Path("/sys/devices/system/cpu")) -> tuple[int, int]:
    """Return (the first thread of its physical core, itself)."""
    try:
        first = re.match(r"\d+", (at / f"cpu{core}/topology/thread_siblings_list").read_text())
    except OSError:
        first = None
    return int(first[0]) if first else core, core


def quota_of_cores(own: Path = Path("/proc/self/cgroup"), groups: Path = Path("/sys/fs/cgroup")) -> float:
    """Return how many cores' time control groups give this process; inf without such a limit. It knows both versions of
    Linux's groups; a group counts within those above it."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return math.inf
    return min((_time(folder) for line in lines for folder in _folders(line, groups)), default=math.inf)


def _folders(line: str, groups: Path) -> Iterator[Path]:
    """Yield the folders of a line of /proc/self/cgroup ("number:controllers:path"), if it is about time."""
    _, controllers, path = line.split(":", 2)
    if controllers and "cpu" not in controllers.split(","):
        return
    top = groups / "cpu" if controllers else groups
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts) + 1):
        yield top.joinpath(*parts[:depth])


def _time(folder: Path) -> float:
    """Return the cores' time of one group: cpu.max is "max 100000" or "quota period"; version 1 has a file for each, and -1
    for no limit."""
    try:
        if (both := folder / "cpu.max").exists():
            quota, period = both.read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    except (OSError, ValueError):
        return math.inf
    return math.inf if quota == "max" or int(quota) < 0 else int(quota) / int(period)
