"""This package trains models: a Session owns a run. Optimizers are in surokit/optim, what a run writes in surokit/runs.

session.py           Session: the step, run, evaluate, save, resume, fork
setup.py             what a session is made from and fed with
stream.py            data as an endless stream with a position; prefetch.py: batches to the device while it computes
engine.py            forward, backward and update of a step, on the device alone
capture.py           steps as CUDA graphs, or why not; fingerprint.py, cuda_graphs.py
compiling.py         a step that torch's compiler makes
control.py           stop, pause, save, work between two steps: what others ask of a run
background.py        a run in a thread of its own
random_state.py      the random generators' state as a value
measuring.py         measures each step: meters, time, the device's state; marks.py: moments on host and device
pace.py              what each process of several does alone, so that the slowest one is known
meters.py            numerics: each layer's quantization, measured during training
events.py            subscribers, told of each step once its values have arrived
run_status.py        what else is told of a run: what it is, how it stands, what ends it; run_info.py
lengths.py           how long the rows and documents are that tokens stand in
diagnose.py          which layer was not finite
evaluation.py        evaluation and samples, without a trace in the run
checkpointing.py     save, resume, fork: what of a session outlasts a run
checkpoint_files.py  checkpoints on disk, whole or not at all; sharded_files.py: of a model that several processes hold
saving.py            a checkpoint that is written while one waits, or beside training
resharding.py        a sharded session as parts of tensors, and from the parts that any other number of processes wrote
switching.py         another recipe in mid-run, by hand or as the recipe says
peers.py             the processes that train one model together, and agree on its checkpoints
exporting.py         a model's folder of a checkpoint
fitting.py           fit_to_time: the size and the steps that end in a given time
summary.py           a run in one table
errors.py            NonFiniteError, NoTargetsError, ResumeError
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surokit.optim.adamw import AdamW, AdamW8bit
    from surokit.optim.muon import Muon
    from surokit.optim.schedule import Cosine
    from surokit.optim.spec import Spec
    from surokit.runs.records import Record, Records
    from surokit.runs.status import RunInfo
    from surokit.train.background import Running
    from surokit.train.control import Control
    from surokit.train.errors import CheckpointError, NonFiniteError, NoTargetsError, ResumeError
    from surokit.train.evaluation import Evaluation
    from surokit.train.fitting import Fit, fit_to_time
    from surokit.train.meters import numerics
    from surokit.train.session import Session
    from surokit.train.summary import Summary

__all__ = [
    "AdamW",
    "AdamW8bit",
    "CheckpointError",
    "Control",
    "Cosine",
    "Evaluation",
    "Fit",
    "Muon",
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
    "CheckpointError": "surokit.train.errors",
    "NoTargetsError": "surokit.train.errors",
    "NonFiniteError": "surokit.train.errors",
    "ResumeError": "surokit.train.errors",
    "numerics": "surokit.train.meters",
    "AdamW": "surokit.optim.adamw",
    "AdamW8bit": "surokit.optim.adamw",
    "Muon": "surokit.optim.muon",
    "Spec": "surokit.optim.spec",
    "Record": "surokit.runs.records",
    "Records": "surokit.runs.records",
    "Cosine": "surokit.optim.schedule",
    "Evaluation": "surokit.train.evaluation",
    "Fit": "surokit.train.fitting",
    "fit_to_time": "surokit.train.fitting",
    "Session": "surokit.train.session",
    "Control": "surokit.train.control",
    "RunInfo": "surokit.runs.status",
    "Running": "surokit.train.background",
    "Summary": "surokit.train.summary",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"surokit.train has no {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value
