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
Failed = Callable[
    [int, Mapping[int, int]], None
]  # number of the attempt from 0, exit status of the ranks that have ended
_NOT_SHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_ELASTIC, _EVENTS = "torch.distributed.elastic", "torchelastic-events-null"


class _Agent(LocalElasticAgent):
    def __init__(self, spec: WorkerSpec, logs: DefaultLogsSpecs, failed: Failed) -> None:
        super().__init__(spec=spec, logs_specs=logs)
        self._failed, self._attempt = failed, 0

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.failures:
            self._failed(self._attempt, {rank: failure.exitcode for rank, failure in result.failures.items()})
            self._attempt += 1
        return result


def run_processes(n: int, restarts: int, folder: Path, command: tuple[str, ...], failed: Failed) -> None:
    """Run `python *command` in `n` processes until all have ended, or one has failed once more often than `restarts`.

    folder: for torchelastic's own files. failed: is told of each attempt in which one failed, before the next begins.
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
        agent: Any = _Agent(spec, DefaultLogsSpecs(log_dir=str(folder)), failed)
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
