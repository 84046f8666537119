"""Processes that train together, started by a test: what each of them found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]


def found_by(module: str, ranks: int, folder: Path, timeout_s: float, *arguments: str) -> list[dict[str, Any]]:
    """Runs `python -m module rank folder arguments` for every rank, with one thread each; what each wrote to rank<n>.pt there.

    A process that a signal ends writes its stack to its log.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    processes = []
    try:
        for rank in range(ranks):
            with (folder / f"log{rank}.txt").open("w") as log:
                command = [sys.executable, "-m", module, str(rank), str(folder), *arguments]
                processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
        for process in processes:
            process.wait(timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found = []
    for rank in range(ranks):
        path = folder / f"rank{rank}.pt"
        status = processes[rank].returncode
        assert path.exists(), (
            f"rank {rank} ended with {status}, and wrote nothing:\n{(folder / f'log{rank}.txt').read_text()}"
        )
        found.append(torch.load(path))
    return found
