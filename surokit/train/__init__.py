"""Training: a Session owns a run.

session.py       Session: the step, run, evaluate, save, resume, fork
control.py       stop, pause, save, work between two steps: what others ask of a run
running.py       a run in a thread of its own
locks.py         a lock for values that are copied
engine.py        forward, backward and update of a step, on the device alone
capture.py       the same as CUDA graphs, or why not
prefetch.py      batches to the device while it computes
optim.py         AdamW, AdamW8bit, and the specification of an optimizer without its parameters
schedule.py      Cosine
fitting.py       fit_to_time: the size and the steps that end in a given time
stream.py        data as an endless stream with a position
measuring.py     what each step measured: meters, time, the device's state
meters.py        numerics: each layer's quantization, measured during training
records.py       Record, Records: the numbers of each step
lines.py         the lines of a run's records.jsonl, without torch
telling.py       subscribers, told of each step once its values have arrived
journal.py       what else is told of a run: what it is, how it stands, what ends it
describe.py      RunInfo of a session
smoothing.py     the smoothed loss that is told, without torch
status.py        RunInfo and run.json, without torch
health.py        phases and events of a run, from its numbers
diagnose.py      which layer was not finite
looking.py       evaluation and samples, without a trace in the run
keeping.py       save, resume, fork: what of a session outlasts a run
checkpoint.py    checkpoints on disk, whole or not at all
random_state.py  the random generators' state as a value
summary.py       a run in one table
errors.py        NonFiniteError, NoTargetsError, ResumeError
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surokit.train.control import Control
    from surokit.train.errors import CheckpointError, NonFiniteError, NoTargetsError, ResumeError
    from surokit.train.fitting import Fit, fit_to_time
    from surokit.train.looking import Evaluation
    from surokit.train.meters import numerics
    from surokit.train.optim import AdamW, AdamW8bit, Spec
    from surokit.train.records import Record, Records
    from surokit.train.running import Running
    from surokit.train.schedule import Cosine
    from surokit.train.session import Session
    from surokit.train.status import RunInfo
    from surokit.train.summary import Summary

__all__ = [
    "AdamW",
    "AdamW8bit",
    "CheckpointError",
    "Control",
    "Cosine",
    "Evaluation",
    "Fit",
    "NoTargetsError",
    "NonFiniteError",
    "Record",
    "Records",
    "ResumeError",
    "RunInfo",
    "Running",
    "Session",
    "Spec",
    "Summary",
    "fit_to_time",
    "numerics",
]

# A name is imported when it is first used: what only reads a run's folder needs no torch.
_MODULES = {
    "CheckpointError": "errors",
    "NoTargetsError": "errors",
    "NonFiniteError": "errors",
    "ResumeError": "errors",
    "numerics": "meters",
    "AdamW": "optim",
    "AdamW8bit": "optim",
    "Spec": "optim",
    "Record": "records",
    "Records": "records",
    "Cosine": "schedule",
    "Evaluation": "looking",
    "Fit": "fitting",
    "fit_to_time": "fitting",
    "Session": "session",
    "Control": "control",
    "RunInfo": "status",
    "Running": "running",
    "Summary": "summary",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"surokit.train has no {name!r}")
    value = getattr(import_module(f"surokit.train.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
