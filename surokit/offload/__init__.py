"""Keep optimizer state, weights or activations on the host, and move them to the device when they are needed.

    zenflow.py     ZenFlow: most columns of a weight are updated by the host, beside the device's next steps
    adamw.py       OffloadAdamW: the synchronous control, which waits for the host every step
    columns.py     the state of one weight's columns on both sides; pipeline.py: slots and jobs of the threads; windows.py: how long
    rows.py        AdamW on columns stored as rows, and the choice of its kernels
    link.py        transfers between host and device; workers.py: threads that work beside the training thread
    weights.py     a model's weights, streamed block by block; activations.py: the tensors that autograd saves for backward
    forwards.py    what these two share: a forward around a module's own
    counters.py    the counters; report.py, energy.py: the reports made from them; timeline.py: spans of all threads

Importing this loads none of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_NAMES = {
    "ZenFlow": "zenflow",
    "OffloadAdamW": "adamw",
    "offload_weights": "weights",
    "offload_activations": "activations",
}
__all__ = list(_NAMES)


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(import_module(f"surokit.offload.{_NAMES[name]}"), name)
    raise AttributeError(f"surokit.offload has no {name!r}")
