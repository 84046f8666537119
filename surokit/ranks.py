"""Tell which of the processes that train together this one is, by the variables that every launcher sets.

torchrun, torchelastic, Lightning, accelerate and Slurm's wrappers agree on RANK, WORLD_SIZE and LOCAL_RANK; without them a process
is alone. They are read when somebody asks, never on import. `surokit.launch` sets SUROKIT_LAUNCH besides: a folder that all
processes of a launch and whoever started them can see.

    stop, pause, save   ask this of the run, as in its own folder (runs/requests.py)
    live.json           a rank wants a panel where the launch was asked for: {"run_dir": ...}
    restarts.jsonl      a line for each time that all processes were started anew: {"at", "rank", "kind", "why", "seconds"}
    stack-RANK.txt      the stack of every thread of a rank that hung
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FOLDER = "SUROKIT_LAUNCH"
HANG_S = "SUROKIT_HANG_S"
LIVE = "live.json"
RESTARTS = "restarts.jsonl"


@dataclass(frozen=True)
class Rank:
    """A Rank says which of the processes of a run one is.

    number: from 0 to world - 1 over all machines. local: the same on this machine, which is also the GPU's. restarts: how often
    the launcher has started the processes anew; may_restart: whether it does where one fails. folder: of the launch, None where
    none was made.
    hang_s: seconds without a step after which a process shall end itself, None for never.
    """

    number: int = 0
    world: int = 1
    local: int = 0
    restarts: int = 0
    may_restart: bool = False
    folder: Path | None = None
    hang_s: float | None = None

    @property
    def is_first(self) -> bool:
        """Return whether this process speaks for all: it writes files and shows panels."""
        return self.number == 0


def rank_here() -> Rank:
    """Return which process this one is; rank 0 of 1 where no launcher started it."""
    environment = os.environ
    folder, hang_s = environment.get(FOLDER), environment.get(HANG_S)
    return Rank(
        number=int(environment.get("RANK", 0)),
        world=int(environment.get("WORLD_SIZE", 1)),
        local=int(environment.get("LOCAL_RANK", 0)),
        restarts=int(environment.get("TORCHELASTIC_RESTART_COUNT", 0)),
        may_restart=int(environment.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0,
        folder=Path(folder) if folder else None,
        hang_s=float(hang_s) if hang_s else None,
    )


def why_restarted() -> str:
    """Return in a sentence why the processes were started anew the last time, as far as whoever did it has said."""
    here = rank_here()
    why = "A process failed."
    if here.folder is not None:
        with suppress(OSError, ValueError, KeyError, IndexError):
            lines = (here.folder / RESTARTS).read_text(encoding="utf-8").splitlines()
            why = str(json.loads(lines[-1])["why"])
    return f"{why} All processes were started anew."
