"""Start a server as a process, wait until it answers, and end it."""

from __future__ import annotations

import http.client
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from surokit.child_processes import end_group, end_with_parent

LOOK_S = 0.2  # between two looks whether a server answers
_SHOWN = 12  # last lines of a log that an error repeats
_THERE_NOT = (404, 405)  # of a path that a server does not have


class ServerProcess:
    """A ServerProcess runs a server as long as its block: it is there once the block begins, and gone once it ends.

    command: a line, or a list of words; "{port}" in it becomes a free port, and has to be there unless `port` is given. ready_s:
    seconds that it may take to answer, with the time to load a model. log: the file that gets what it prints; a temporary one
    without it, gone with the block. environment: variables beside those of this process. port: instead of a free one.

    url: the address of its interface, for `serve_bench`.

    It is ready when it answers 200 at /health, or at /v1/models where it has no /health. The block's end ends all that it started;
    where this process is killed, on Linux, only the process of the command ends with it.

    ChildProcessError for a server that ends before it is ready, and a port that is taken; TimeoutError for one that is not ready in
    time. They say what it printed last. FileNotFoundError for a program that is not there; ValueError for a line without a port.
    """

    def __init__(
        self,
        command: str | Sequence[str],
        *,
        ready_s: float = 600.0,
        log: str | Path | None = None,
        environment: Mapping[str, str] | None = None,
        port: int | None = None,
    ) -> None:
        self.port = port or _free_port()
        self._given = shlex.split(command) if isinstance(command, str) else list(command)
        self.command = [word.replace("{port}", str(self.port)) for word in self._given]
        if not self.command:
            raise ValueError(
                "ServerProcess(command): give the line that starts a server, such as 'vllm serve MODEL --port {port}'."
            )
        if port is None and not any("{port}" in word for word in self._given):
            raise ValueError(
                f"ServerProcess({shlex.join(self._given)!r}): the line does not tell the server its port: write {{port}} where it "
                "belongs, or give port= the one that the server takes."
            )
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.ready_s, self.environment = ready_s, environment or {}
        self.log = None if log is None else Path(log)

    def __enter__(self) -> Self:
        if _status(f"http://127.0.0.1:{self.port}/health") is not None:
            raise ChildProcessError(
                f"ServerProcess(port={self.port}): another server answers there already: give another port."
            )
        self._place = tempfile.TemporaryDirectory(prefix="surokit-server-")
        self._log = self.log or Path(self._place.name) / "log.txt"
        with self._log.open("wb") as out:
            try:
                self._process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # so that what it starts can be ended with it
                    preexec_fn=end_with_parent,
                    env={**os.environ, **self.environment},
                )
            except FileNotFoundError:
                self._place.cleanup()
                raise FileNotFoundError(
                    f"ServerProcess({self.command[0]!r}): there is no such program here: install the server, or give its path."
                ) from None
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server and all that it started: it is asked to, and after ten seconds made to."""
        try:
            end_group(self._process, signal.SIGTERM)
        finally:
            self._place.cleanup()

    def _wait(self) -> None:
        ends = time.monotonic() + self.ready_s
        while not self._is_ready():
            if (status := self._process.poll()) is not None:
                raise ChildProcessError(
                    f"The server ended with exit status {status} before it was ready: {shlex.join(self._given)}\n{self._said()}"
                )
            if time.monotonic() > ends:
                raise TimeoutError(
                    f"The server was not ready after {self.ready_s:g} s: give ready_s= more where it loads a large model: "
                    f"{shlex.join(self._given)}\n{self._said()}"
                )
            time.sleep(LOOK_S)

    def _is_ready(self) -> bool:
        status = _status(f"http://127.0.0.1:{self.port}/health")
        if status in _THERE_NOT:
            status = _status(f"{self.url}/models")
        return status == 200

    def _said(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-_SHOWN:])


def _status(url: str) -> int | None:
    """Return the HTTP status of an address; None where nothing answers."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, http.client.HTTPException):
        return None


def _free_port() -> int:
    with socket.socket() as there:
        there.bind(("127.0.0.1", 0))
        return int(there.getsockname()[1])


__all__ = ["ServerProcess"]
