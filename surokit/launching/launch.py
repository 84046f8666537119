"""Start a function, or a script, in several processes of this machine, show what they say, and return what the first one does.

torchelastic's agent starts the processes, watches over them and starts them anew; they are programs of their own, so that it does
not matter what this one has done with its GPU. A folder of the launch is all that both sides share (surokit/ranks.py).
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from surokit.environment import cores, front_end
from surokit.launching.call import loaded, packed
from surokit.launching.child import CALL, ENDED, SETTINGS, VALUE
from surokit.launching.outcome import Failure, LaunchError, failure_in
from surokit.launching.output import Output, Shown
from surokit.places import write_whole
from surokit.ranks import LIVE, RESTARTS, rank_here
from surokit.runs.requests import STOP
from surokit.units import counted

if TYPE_CHECKING:
    from surokit.widgets.follow import Watch

HANG_S = 600.0
LOOK_S = 0.1  # between two looks at the processes, their output and the panel


class Launch:
    """A Launch is what was started: `await` it, or call its wait(), for the value of the first process.

    restarts: one Failure for each time that the processes were started anew.
    """

    def __init__(self, processes: int, restarts: int, hang_s: float | None, shown: Shown, show: bool = True) -> None:
        if hang_s is not None and not hang_s > 0:
            raise ValueError(f"launch(hang_s={hang_s!r}): seconds, more than 0, or None to wait for ever.")
        if shown not in get_args(Shown):
            raise ValueError(f'launch(output={shown!r}): "all", "first" or "none".')
        self.restarts: list[Failure] = []
        self._n, self._max, self._hang_s = processes, restarts, hang_s
        self._folder = Path(tempfile.mkdtemp(prefix="surokit-launch-"))
        self._output = Output(self._folder, shown)
        self._show = show
        self._news: list[str] = []
        self._value: Any = None
        self._error: BaseException | None = None
        self._failure: Failure | None = None
        self._asked = self._killed = False
        self._failed_at = 0.0
        self._panel: Watch | None = None
        self._panel_of = ""
        self._over = threading.Event()  # an interrupted Thread.join() takes the thread for ended (CPython 3.11)
        self._thread = threading.Thread(target=self._run, name="surokit-launch", daemon=True)

    def start(
        self, call: bytes | None = None, script: Sequence[str] = (), is_module: bool = False, threads: int | None = None
    ) -> None:
        """Start the processes: with a call, or a script with its arguments. threads: of each on the CPU, by default its share."""
        if call is not None:
            (self._folder / CALL).write_bytes(call)
        environment = {"OMP_NUM_THREADS": str(threads or threads_of_each(self._n))}
        if sys.platform == "linux":
            environment["GLOO_SOCKET_IFNAME"] = "lo"  # the machine's own name need not be known to it
        settings = {
            "launcher": os.getpid(),
            "hang_s": self._hang_s,
            "environment": {name: value for name, value in environment.items() if name not in os.environ},
            "path": sys.path,
            "script": None if call is not None else list(script),
            "is_module": is_module,
        }
        write_whole(self._folder / SETTINGS, json.dumps(settings).encode())
        atexit.register(self.kill)  # a program that ends without waiting
        self._thread.start()

    # -- in the thread of the agent

    def _run(self) -> None:
        try:
            from surokit.launching.agent import run_processes

            command = ("-m", "surokit.launching.child", str(self._folder))
            run_processes(self._n, self._max, self._folder, command, self._starts, self._failed)
        except BaseException as error:
            self._error = error
        finally:
            self._over.set()

    def _starts(self, attempt: int) -> None:
        """Write down why processes are started anew, before they are: they read it."""
        if not attempt:
            return
        failure = self.restarts[-1] = replace(self.restarts[-1], seconds=time.monotonic() - self._failed_at)
        line = {"at": time.time(), "rank": failure.rank, "kind": failure.kind, "why": failure.line}
        with (self._folder / RESTARTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({**line, "seconds": round(failure.seconds, 3)}) + "\n")

    def _failed(self, attempt: int, exits: Mapping[int, int]) -> None:
        if self._killed:
            raise RuntimeError("The launch was ended.")  # so that nothing is started anew
        failure = failure_in(self._folder, attempt, exits, self._n)
        if attempt >= self._max:
            self._failure = failure
            return
        self._failed_at = time.monotonic()
        self.restarts.append(failure)
        for path in self._folder.glob("stack-*.txt"):
            path.unlink()
        stop = "" if failure.line.endswith((".", "!", "?")) else "."
        self._news.append(f"surokit: {failure.line}{stop} All start anew ({attempt + 1} of {self._max}).")

    # -- in the thread that waits

    def wait(self, saves: bool = True) -> Any:
        """Wait until all processes have ended; return what the first one returned.

        A first interrupt asks the runs in them to save and end, and goes on waiting; a second one, one after stop(), or the first
        where there is nothing to save, ends them at once. A SIGTERM, by which schedulers end a program, is an interrupt here,
        unless the program handles it.
        """
        try:
            with _interrupts() as heard:
                while not self._over.is_set():
                    try:
                        self._over.wait(LOOK_S)
                        self._look()
                        if heard:
                            heard.clear()
                            raise KeyboardInterrupt
                    except KeyboardInterrupt:
                        if self._asked or not saves:
                            raise
                        self._let_end()
                if heard and not self._asked:  # it came while they ended
                    self._let_end()
        except BaseException:
            self.kill()
            raise
        return self._end()

    def __await__(self) -> Generator[Any, None, Any]:
        return self._awaited().__await__()

    async def _awaited(self) -> Any:
        import asyncio

        try:
            while not self._over.is_set():
                try:
                    self._look()
                    await asyncio.sleep(LOOK_S)
                except asyncio.CancelledError:
                    if self._asked or front_end() in ("terminal", "IPython"):  # a timeout; in a notebook an interrupt
                        raise
                    task = asyncio.current_task()
                    if task is not None:
                        task.uncancel()
                    self._let_end()
        except BaseException:
            self.kill()
            raise
        return self._end()

    def _let_end(self) -> None:
        print(
            "surokit: waiting for the processes to save and end; a second interrupt ends them at once", file=sys.stderr
        )
        self.stop("interrupted")

    def stop(self, reason: str = "stopped") -> None:
        """Ask the runs in all processes to save and end after their step."""
        self._asked = True
        with suppress(FileNotFoundError):  # they have ended
            write_whole(self._folder / STOP, reason.encode())

    def kill(self) -> None:
        """End all processes, and those that they have started, at once; what was not saved is lost."""
        self._asked = self._killed = True
        with suppress(FileNotFoundError):
            (self._folder / ENDED).touch()
        deadline = time.monotonic() + 30
        while self.goes_on and time.monotonic() < deadline:
            for path in self._folder.glob("pid-*"):
                with suppress(OSError, ValueError):  # torchelastic has made each the leader of a group
                    os.killpg(int(path.read_text()), signal.SIGKILL)
            self._over.wait(LOOK_S)
        self._close()
        atexit.unregister(self.kill)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def was_stopped(self) -> bool:
        """Return whether somebody asked for an end, with stop() or an interrupt."""
        return self._asked

    @property
    def goes_on(self) -> bool:
        return self._thread.ident is not None and not self._over.is_set()

    def _look(self, end: bool = False) -> None:
        self._output.pump(end)
        while self._news:
            print(self._news.pop(0), file=sys.stderr)
        if self._show:
            self._look_for_panel()

    def _look_for_panel(self) -> None:
        with suppress(OSError, ValueError, KeyError):
            run_dir = str(json.loads((self._folder / LIVE).read_text())["run_dir"])
            if run_dir != self._panel_of:
                from surokit.widgets.follow import watch

                self._close()
                self._panel, self._panel_of = watch(run_dir), run_dir

    def _close(self) -> None:
        if self._panel is not None:
            self._panel.wait(1.0)  # it sees the end by itself
            self._panel.stop_following()
            self._panel = None

    def _end(self) -> Any:
        if self._killed:
            raise RuntimeError("The launch was ended by kill() or an interrupt, so it has no value: launch it again.")
        hung = self._failure is not None and self._failure.kind == "hung"
        if self._folder.exists():
            try:
                self._look(end=True)
                self._close()
                if (self._folder / VALUE).exists():
                    self._value = loaded((self._folder / VALUE).read_bytes())
            except BaseException as error:
                self._error = error  # for whoever asks again
                raise
            finally:
                atexit.unregister(self.kill)
                if not hung:
                    shutil.rmtree(self._folder, ignore_errors=True)
        if self._failure is not None:
            after = f" The stacks are in {self._folder}." if hung else ""
            if self.restarts:
                after += f" All had been started anew {counted(len(self.restarts), 'time')}."
            raise self._failure.error(after)
        if self._error is not None:
            raise self._error
        return self._value


def launch(
    train: Callable[..., Any],
    *args: Any,
    gpus: int | None = None,
    restarts: int = 0,
    hang_s: float | None = HANG_S,
    output: Shown = "all",
    thread: bool = False,
    **kwargs: Any,
) -> Any:
    """Call `train(*args, **kwargs)` in as many processes as `gpus`, one on each, and return what the first one's call returns.

    Works from a notebook's cell, also after its kernel has used a GPU: the function may be the cell's own, and what it closes
    over is carried along, a copy for each process. Inside it `surokit.Session(..., parallel=surokit.Parallel())` trains one model
    on all. On a machine without GPUs the processes share its CPU. Several machines are torchrun's.

    gpus: None takes all of this machine. restarts: how often all processes are started anew after one has failed, was killed or
    hung; sessions with a run_dir go on from their last checkpoint then. hang_s: seconds in which a session's run must make a
    step, else the process writes down where it is and ends; None waits for ever. output: "all" shows what every process prints,
    "first" the first one's, "none" nothing. thread: True returns a Launch at once, to be awaited, so that the panel's buttons work
    meanwhile.

    An interrupt (Ctrl-C, the notebook's stop button) lets the sessions save and end, and the call returns as after a normal end; a
    second one ends all at once. `session.live()` in the function shows the panel here.

    LaunchError with the words of the process that failed first; TypeError for what cannot be carried to another process;
    RuntimeError inside of a launched process.
    """
    check_outside("launch")
    n = processes_for(gpus, restarts)
    running = Launch(n, restarts, hang_s, output)
    try:
        running.start(packed(train, args, kwargs))
    except BaseException:
        running.kill()
        raise
    return running if thread else running.wait()


def launch_script(
    script: Sequence[str], is_module: bool, *, gpus: int | None, restarts: int, hang_s: float | None, output: Shown
) -> None:
    """Run a script, or a module, with its arguments in several processes, as `launch` calls a function."""
    check_outside("surokit launch")
    if not script:
        raise ValueError("surokit launch: give the script to run, and its arguments after it.")
    if not is_module and not Path(script[0]).is_file():
        raise FileNotFoundError(f"There is no script {script[0]}: give its path, or -m and a module's name.")
    running = Launch(processes_for(gpus, restarts), restarts, hang_s, output)
    running.start(script=script, is_module=is_module)
    running.wait()


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Yield the signals, of SIGINT and SIGTERM, that came in the block and that the program does not handle itself.

    They are noted and not raised where they come: some code in which an exception may come (a finalizer, an import, a library's
    callback) swallows it, and the interrupt would be lost. One that comes while another waits is raised.
    """
    heard: list[int] = []

    def hear(number: int, frame: Any) -> None:
        heard.append(number)
        if len(heard) > 1:
            raise KeyboardInterrupt

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
            if signal.getsignal(number) is default:
                before[number] = signal.signal(number, hear)
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_outside(who: str) -> None:
    """Raise RuntimeError inside of a launched process."""
    here = rank_here()
    if here.world > 1 or here.folder is not None:
        raise RuntimeError(
            f"{who}() was called in rank {here.number} of a launch, and processes do not start processes: run this file with "
            f"python, or call the function without {who}() under `surokit launch`."
        )


def threads_of_each(processes: int) -> int:
    """Return the threads of each of so many processes that share the cores which this one may use."""
    return max(1, cores() // processes)


def processes_for(gpus: int | None, restarts: int) -> int:
    """Return how many processes to start, and say what they share."""
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for name, value, least in (("gpus", gpus if gpus is not None else 1, 1), ("restarts", restarts, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"launch({name}={value!r}): a whole number of at least {least}.")
    n = gpus if gpus is not None else max(1, there)
    if n > 1 and not there:
        print(f"surokit: there is no GPU here, so {n} processes share the CPU", file=sys.stderr)
    elif n > there > 0:
        print(f"surokit: {n} processes share {there} GPU{'s' * (there > 1)}", file=sys.stderr)
    return n


__all__ = ["Launch", "LaunchError", "launch"]
