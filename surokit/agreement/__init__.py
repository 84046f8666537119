"""Compare two stacks on one batch: `parity(a, b, batch)` says in one sentence whether two models do the same, and where they part.

comparing.py  the comparison: its runs, and the sentence that follows
observe.py    one run of one model, and the model as it was; a run that is disturbed by roundings
batches.py    the batch as each model takes it, and what it holds
measure.py    how far two runs lie apart, and how far rounding alone puts them
faults.py     where two models part, and why
report.py     Parity: the answer, its table and its picture

A recipe's noise is no fault: models are compared without quantized products first, and what quantizing adds is told beside it.
"""

from __future__ import annotations

from surokit.agreement.comparing import parity
from surokit.agreement.report import ModuleParity, Pair, Parity

__all__ = ["ModuleParity", "Pair", "Parity", "parity"]
