"""Use torchelastic's agent for one machine: it starts the processes, watches over them and starts them anew."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

LOOK_S = 0.1  # between two looks at the processes
# number of the attempt from 0; and the exit status of the ranks that were not ended by torchelastic, as far as is known
Starts = Callable[[int], None]
Failed = Callable[[int, Mapping[int, int]], None]
_NOT_SHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_ELASTIC, _EVENTS = "torch.distributed.elastic", "torchelastic-events-null"


class _Agent(LocalElasticAgent):
    def __init__(self, spec: WorkerSpec, logs: DefaultLogsSpecs, starts: Starts, failed: Failed) -> None:
        super().__init__(spec=spec, logs_specs=logs)
        self._starts, self._failed, self._attempt = starts, failed, 0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._starts(self._attempt)
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        by_themselves = self._ended()  # before torchelastic ends the others, once it sees that one has failed
        result = super()._monitor_workers(worker_group)
        if failures := result.failures:
            exits = {rank: failure.exitcode for rank, failure in failures.items()}
            self._failed(self._attempt, {rank: exits[rank] for rank in exits if rank in by_themselves} or exits)
            self._attempt += 1
        return result

    def _ended(self) -> set[int]:
        handlers: Any = getattr(self._pcontext, "subprocess_handlers", {})
        return {rank for rank, handler in handlers.items() if handler.proc.poll() is not None}


def run_processes(
    n: int, restarts: int, folder: Path, command: tuple[str, ...], starts: Starts, failed: Failed
) -> None:
    """Run `python *command` in `n` processes until all have ended, or one has failed once more often than `restarts`.

    folder: for torchelastic's own files. starts: is told of each attempt before its processes are started. failed: is told of
    each in which one failed, before the next begins; what it raises ends all.
    """
    where = RendezvousParameters("c10d", "localhost:0", uuid.uuid4().hex, 1, 1, local_addr="localhost")
    handler = get_rendezvous_handler(where)
    spec = WorkerSpec(
        role="surokit",
        local_world_size=n,
        entrypoint=sys.executable,
        args=command,
        rdzv_handler=handler,
        max_restarts=restarts,
        monitor_interval=LOOK_S,
        local_addr="localhost",
    )
    with _quiet(), _own_store():
        agent: Any = _Agent(spec, DefaultLogsSpecs(log_dir=str(folder)), starts, failed)
        try:
            agent.run()
        finally:
            with suppress(Exception):
                handler.shutdown()


@contextmanager
def _own_store() -> Iterator[None]:
    """Let each attempt have a store of its own in the block. The one that attempts share has the addresses of processes that are
    gone, and whoever reads one waits for ever."""
    before = os.environ.get(_NOT_SHARED)
    os.environ[_NOT_SHARED] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NOT_SHARED]
        else:
            os.environ[_NOT_SHARED] = before


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torchelastic's own lines to itself in the block."""
    loggers = [
        logging.getLogger(name)
        for name in (*logging.root.manager.loggerDict, _EVENTS)
        if name.startswith((_ELASTIC, _EVENTS))
    ]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL + 1)
        yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)
