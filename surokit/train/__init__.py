"""Training: a Session owns a run.

session.py       Session: the step, run, evaluate, save, resume, fork
engine.py        forward, backward and update of a step, on the device alone
capture.py       the same as CUDA graphs, or why not
prefetch.py      batches to the device while it computes
optim.py         AdamW, AdamW8bit, and the specification of an optimizer without its parameters
schedule.py      Cosine
stream.py        data as an endless stream with a position
meters.py        numerics: each layer's quantization, measured during training
records.py       Record, Records: what each step measured
diagnose.py      which layer was not finite
checkpoint.py    checkpoints on disk, whole or not at all
random_state.py  the random generators' state as a value
summary.py       a run in one table
errors.py        NonFiniteError, ResumeError
"""

from surokit.train.errors import CheckpointError, NonFiniteError, ResumeError
from surokit.train.meters import numerics
from surokit.train.optim import AdamW, AdamW8bit, Spec
from surokit.train.records import Record, Records
from surokit.train.schedule import Cosine
from surokit.train.session import Evaluation, Session
from surokit.train.summary import Summary

__all__ = [
    "AdamW",
    "AdamW8bit",
    "CheckpointError",
    "Cosine",
    "Evaluation",
    "NonFiniteError",
    "Record",
    "Records",
    "ResumeError",
    "Session",
    "Spec",
    "Summary",
    "numerics",
]
