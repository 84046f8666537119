"""This module reads and writes run.json in a run's folder: what the run is, how it stands, and a heartbeat, for whoever has
nothing but the folder.

    {"info": {...}, "state": "running", "heartbeat": 1789000000.0, "step": 120, "run_s": 61.5,
     "events": [{"step": 80, "kind": "note", ...}]}

state: "running", "paused", or how the last run ended: "done", "interrupted", "stopped: <by whom or why>", "failed: <Type:
message>". Only an interrupt (Ctrl-C) is "interrupted".
heartbeat: seconds since 1970 when it was written. The training thread writes it: at the start, when a run pauses or goes on, at
the end, and between steps at most every two seconds. A step, an evaluation or a checkpoint that takes longer is silence, so
a heartbeat that is some seconds old does not mean that the run has gone.
run_s: wall time of the run so far in seconds, with evaluations, checkpoints, pauses, and steps that a resume took again.
events: what Health saw and what `session.note` said, as dicts of step, kind, text and suggestion; the last `EVENTS` of them.

It is written whole, under another name and renamed, so a reader never sees half of it. Knows no torch.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from surokit.places import write_whole
from surokit.runs.locks import Lock

FILE = "run.json"
EVERY_S = 2.0
EVENTS = 100


@dataclass(frozen=True)
class RunInfo:
    """A RunInfo says what a run is, in plain values.

    title: its name on a panel. recipe: the algebra or the name of its recipe, "" for a model as given. numerics: "native", or
    what is emulated; "" for bf16. model: the class of the model. device: a GPU's name, or "cpu". gpus: how many work on it, 0 on
    a CPU. total: the step it is planned to end at, None where it is planned by time. tokens_per_step: elements of input_ids.
    flops_per_token: of the model, forward and backward (an MFU's numerator), and peak_tflops: what one GPU could do in bf16;
    `peak` is that rate's name, or why there is none; `flops` names the convention by which flops_per_token is counted.
    usd_per_gpu_hour: as given, never assumed. resumes: the next run() goes on from where one ends, which a run in a race does not.
    started: seconds since 1970 when this run began; in a race not its turn. ran_s: wall time of the run when this was said, in
    seconds; 0 for a fork, which has no part in what its parent took.
    """

    title: str = ""
    recipe: str = ""
    numerics: str = ""
    model: str = ""
    device: str = ""
    gpus: int = 0
    total: int | None = None
    tokens_per_step: int | None = None
    flops_per_token: float | None = None
    peak_tflops: float | None = None
    peak: str = ""
    flops: str = ""
    usd_per_gpu_hour: float | None = None
    resumes: bool = False
    run_dir: str | None = None
    pid: int = 0
    host: str = ""
    started: float = 0.0
    ran_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return every field as plain numbers and strings."""
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> RunInfo:
        """Make a RunInfo of what `to_dict` gave; unknown names are ignored, missing ones take defaults. TypeError for a value of
        another type."""
        return RunInfo(**_known(RunInfo, data))


@dataclass(frozen=True)
class Status:
    """A Status holds the content of run.json."""

    info: RunInfo = field(default_factory=RunInfo)
    state: str = "running"
    heartbeat: float = 0.0
    step: int = 0
    run_s: float | None = None  # files of earlier versions do not say
    events: tuple[dict[str, Any], ...] = ()

    @property
    def over(self) -> bool:
        """Return whether the run has ended, as far as it could say so itself."""
        return self.state not in ("running", "paused")

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "events": list(self.events)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Status:
        """Make a Status of what `to_dict` gave; unknown names are ignored, missing ones take defaults. TypeError for a value of
        another type."""
        found: dict[str, Any] = {name: value for name, value in data.items() if name != "events"}
        found["info"] = RunInfo.from_dict(found.get("info") or {})
        return Status(**_known(Status, found), events=tuple(dict(event) for event in data.get("events") or ()))


def _known(kind: type[RunInfo | Status], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values in `data` that a class has fields for; TypeError where one is of another type than its field."""
    found, hints = {f.name: data[f.name] for f in fields(kind) if f.name in data}, get_type_hints(kind)
    for name, value in found.items():
        whole_for_real = isinstance(value, int) and isinstance(0.0, hints[name])
        if not (whole_for_real or isinstance(value, hints[name])):
            raise TypeError(f"{name} is {value!r} and not {hints[name]}.")
    return found


def read_status(run_dir: str | Path) -> Status | None:
    """Read run.json in a run's folder; None where there is no such file, or it holds no status."""
    try:
        data = json.loads((Path(run_dir) / FILE).read_text(encoding="utf-8"))
        return Status.from_dict(data)
    except (OSError, ValueError, TypeError, AttributeError):
        return None


class StatusFile:
    """A StatusFile keeps run.json of one run. A disk that does not take it costs one warning; training goes on.

    clock: seconds since 1970.
    """

    def __init__(self, run_dir: Path, clock: Callable[[], float] = time.time) -> None:
        self.path = run_dir / FILE
        self._clock = clock
        self._due = 0.0
        self._warned = False
        self._lock = Lock()  # a note may come from another thread

    def beat(
        self,
        info: RunInfo,
        state: str,
        step: int,
        events: Sequence[Mapping[str, Any]],
        now: bool = False,
        *,
        run_s: float | None = None,
    ) -> None:
        """Write what is given if that is due, or `now`."""
        with self._lock:
            self._beat(info, state, step, events, now, run_s)

    def _beat(
        self,
        info: RunInfo,
        state: str,
        step: int,
        events: Sequence[Mapping[str, Any]],
        now: bool,
        run_s: float | None,
    ) -> None:
        clock = self._clock()
        if not now and 0 <= self._due - clock <= EVERY_S:  # a clock that was set back does not silence it
            return
        self._due = clock + EVERY_S
        status = Status(info, state, clock, step, run_s, tuple(dict(event) for event in events[-EVENTS:]))
        try:
            write_whole(self.path, json.dumps(status.to_dict()))
        except OSError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"{self.path} cannot be written ({error.strerror}); training goes on, and who reads the folder sees an old "
                    "state of the run.",
                    stacklevel=2,
                )
