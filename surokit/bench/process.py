"""Run a system under measurement in a process of its own, asked in JSON lines; it cannot take the benchmark down with it.

    worker = Worker([sys.executable, "-m", "surokit.bench.worker", work], "bf16")
    worker.ready                                 the process's first line
    worker.ask({"steps": 8}, timeout_s=60)       one line to its stdin, one line from its stdout
    worker.close()

An answer is a dict. {"error": "..."} and {"missing": "..."} become a Failed, and so does a process that ends or takes too
long. The other end is `serve`, in that process.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, Self

from surokit.bench.clocks import device_clocks
from surokit.child_processes import end_with_parent

Answers = Callable[[Mapping[str, Any]], dict[str, Any]]

_END_S = 20.0  # for a process to end by itself once it is told nothing more


class Failed(RuntimeError):
    """A Failed says what a worker could not do, in one sentence. why: "late", "missing" (it cannot run here), "memory", or
    "" for the rest."""

    def __init__(self, message: str, why: Literal["", "late", "missing", "memory"] = "") -> None:
        super().__init__(message)
        self.why = why if why or "out of memory" not in message else "memory"


def left_s(until_s: float) -> float:
    """Return the seconds from now until `until_s` of time.monotonic; 0 where that is past."""
    return max(0.0, until_s - time.monotonic())


def understood(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the answer, unless it says that there is none: then raise Failed."""
    if "missing" in answer:
        raise Failed(str(answer["missing"]), "missing")
    if "error" in answer:
        raise Failed(str(answer["error"]))
    return answer


def serve(start: Callable[[], tuple[Mapping[str, Any], Answers | None]]) -> int:
    """Write the first line that `start` gives, then the answer to each line of stdin, if there is anything to ask.

    Answers go where stdout was; everything else that prints, in Python or below it, goes to stderr.
    """
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(answer: Mapping[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")

    try:
        first, answer = start()
        say(first)
        if answer is not None:
            for line in sys.stdin:
                say(answer(json.loads(line)))
    except Exception as error:
        with suppress(BrokenPipeError):
            say({"error": f"{type(error).__name__}: {error}".splitlines()[0]})
        raise
    return 0


def peak_memory(cuda: bool) -> dict[str, float]:
    """Return the MiB of this process at its fullest: the memory of tensors and the memory that the allocator had taken for
    them; on a CPU all of it."""
    if not cuda:
        import resource

        return {"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    import torch

    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"peak_mib": peak / 2**20, "reserved_mib": reserved / 2**20}


class Worker:
    """A Worker starts the process and waits for its first line, at most `timeout_s` seconds. Raises Failed.

    environment: variables of the process beside those of this one. clocks: an answer comes with "clocks", those of the GPU
    while it was worked on.
    """

    def __init__(
        self,
        argv: Sequence[str],
        name: str,
        timeout_s: float = 300.0,
        environment: Mapping[str, str] | None = None,
        clocks: bool = False,
    ) -> None:
        self.name, self._gone, self._clocks = name, False, clocks
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  what it writes to stderr: the last line explains an end
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            start_new_session=True,  # so that what it starts (a compiler's pool) can be ended with it
            env={**os.environ, **(environment or {})},
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.ready = self._answer(timeout_s)
        except BaseException:
            self.kill()
            raise

    def ask(self, request: Mapping[str, Any], timeout_s: float = 300.0) -> dict[str, Any]:
        """Return the answer to one request; raise Failed where there is none within the time, and then the process is gone."""
        assert self._process.stdin is not None
        if self._gone:
            raise Failed(f"{self.name} has ended before.")
        with device_clocks(self._clocks) as clocks:
            try:
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
            except OSError:
                raise Failed(self._ended()) from None
            answer = self._answer(timeout_s)
        return {**answer, "clocks": clocks} if self._clocks else answer

    def close(self) -> None:
        """Let the process end, and end it where it does not."""
        if self._process.stdin is not None and not self._gone:
            with suppress(OSError):  # it ended before it had read everything
                self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self.kill()

    def kill(self) -> None:
        """End the process and everything that it started."""
        if self._gone:
            return
        self._gone = True
        with suppress(ProcessLookupError):  # all of them ended before
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(_END_S)
        for pipe in (self._process.stdin, None if self._reader.is_alive() else self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        self._said.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            self.kill()
            raise Failed(f"{self.name} took longer than {timeout_s:.0f} s.", "late") from None
        if not line:
            raise Failed(self._ended())
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise Failed(f"{self.name} answered {line.strip()[:80]!r}, which is no JSON object.")
        return understood(answer)

    def _ended(self) -> str:
        status = self._process.wait()
        self._said.seek(0, os.SEEK_END)
        self._said.seek(-min(self._said.tell(), 4000), os.SEEK_END)
        lines = [line.strip() for line in self._said.read().decode(errors="replace").splitlines() if line.strip()]
        why = f": {lines[-1][:300]}" if lines else ", without a word"
        return f"{self.name} ended with exit status {status}{why}"
