"""Say how the processes of a launch ended, with the words of the one that failed first.

When one fails, the others lose their connection to it and fail too; what they say comes after, or not at all.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from surokit.launching.child import log_name

_TIMEOUT = re.compile(r"^Timeout \(")
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$', re.M)
_THREAD = re.compile(r"^(?:Current t|T)hread 0x", re.M)
LAST = 10  # lines
COLLECTIVES = ("torch/distributed/", "surokit/parallel/")


class LaunchError(RuntimeError):
    """A process of a launch failed, was killed or hung, and the others were ended.

    rank: its number. kind: "failed", "killed", "hung" or "ended".
    """

    def __init__(self, message: str, rank: int, kind: str) -> None:
        super().__init__(message)
        self.rank, self.kind = rank, kind


@dataclass(frozen=True)
class Failure:
    """A Failure is what ended one attempt: the process that failed first, a line on why, and what else is known.

    seconds: until the processes of the next attempt were started.
    """

    rank: int
    kind: str
    line: str
    detail: str = ""
    seconds: float = 0.0

    def error(self, after: str = "") -> LaunchError:
        return LaunchError("\n".join(filter(None, (self.line + after, self.detail))), self.rank, self.kind)


def failure_in(folder: Path, restarts: int, exits: Mapping[int, int], world: int = 0) -> Failure:
    """Return why an attempt failed. restarts: its number. exits: status by rank, below 0 for a signal, in the order in which the
    agent saw them end; those that a SIGTERM ended were ended by the agent, all but the first. world: how many there are."""
    stacks = {
        int(path.stem.rpartition("-")[2]): path.read_text(errors="replace") for path in folder.glob("stack-*.txt")
    }
    hung = [rank for rank, stack in stacks.items() if _TIMEOUT.match(stack)]
    if hung:
        return _hung(stacks, hung, world)
    seen = list(exits.items())
    killed = {
        rank: -status for rank, status in seen if status < 0 and (status != -signal.SIGTERM or rank == seen[0][0])
    }
    for rank, number in killed.items():
        if number in (signal.SIGKILL, signal.SIGTERM):
            why = ", often for lack of memory" if number == signal.SIGKILL else ""
            line = f"Rank {rank} was killed by {_name_of(number)}{why}."
            return Failure(rank, "killed", line, _last_words(folder, restarts, rank))
    errors = [json.loads(path.read_text()) for path in folder.glob(f"error-{restarts}-*.json")]
    spoke = {words["rank"] for words in errors}
    for rank, status in seen:  # without a word: it lost no connection, the others lost theirs to it
        if status > 0 and rank not in spoke:
            line = f"Rank {rank} ended with status {status} and raised nothing."
            return Failure(rank, "ended", line, _last_words(folder, restarts, rank))
    if errors:
        first = min(errors, key=lambda words: words["at"])
        line = f"Rank {first['rank']} failed with {first['type']}: {first['message']}"
        return Failure(first["rank"], "failed", line, first["traceback"].rstrip())
    # after errors: a process may break off because another has failed
    for rank, number in killed.items():
        line = f"Rank {rank} was killed by {_name_of(number)}."
        return Failure(rank, "killed", line, _last_words(folder, restarts, rank))
    return Failure(0, "ended", "A process ended, and nothing is known of it.")


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # of a real-time signal
        return f"signal {number}"


def _last_words(folder: Path, restarts: int, rank: int) -> str:
    """Return the last lines that a process printed to stderr."""
    with suppress(OSError):
        text = (folder / log_name("err", restarts, rank)).read_text(errors="replace")
        return "\n".join(text.splitlines()[-LAST:])
    return ""


def _hung(stacks: Mapping[int, str], hung: list[int], world: int) -> Failure:
    # of each the main thread, which is the last that is written
    inner = {rank: _FRAME.findall(_THREAD.split(stack)[-1]) for rank, stack in sorted(stacks.items())}
    outside = [
        rank for rank, frames in inner.items() if not any(part in frame[0] for frame in frames for part in COLLECTIVES)
    ]
    rank = outside[0] if outside else min(hung)
    seconds = re.search(r"Timeout \(([\d:]+)", stacks[min(hung)])
    line = f"Rank {rank} hung: no step for {seconds[1] if seconds else 'too long'}."
    others = "The others wait for it." if outside else "All are in a collective, so who is waited for cannot be told."
    if elsewhere := [r for r in range(world) if r not in stacks]:  # a process leaves its stack within run() only
        named = f"Rank {elsewhere[0]} is" if len(elsewhere) == 1 else f"Ranks {', '.join(map(str, elsewhere))} are"
        others = f"{named} not within a session's run(), where this one waits for all: let every process make the same calls."
    return Failure(rank, "hung", f"{line} {others}", "\n".join(f"rank {r}: {_where(inner[r])}" for r in sorted(inner)))


def _where(frames: list[tuple[str, str, str]]) -> str:
    return " < ".join(f"{name} ({Path(file).name}:{line})" for file, line, name in frames[:4])
