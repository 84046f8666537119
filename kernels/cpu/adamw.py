"""Round at random on a CPU: quantize.cpp behind the name and the meaning of `stochastic_bf16` in kernels/reference/adamw.py.

Numbers among which one is not finite, other dtypes and keys are left to the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference import adamw as reference
from .library import call, is_built, is_on_cpu, is_usual_key
from .library import why as why


def stochastic_bf16(x: Tensor, key: Tensor, start: int = 0) -> Tensor:
    """Return x, float32, as bfloat16: up or down in magnitude, by the random bits of the positions from `start` on."""
    if is_on_cpu(x, torch.float32) and x.numel() and is_usual_key(key) and is_built():
        rounded = torch.empty(x.shape, dtype=torch.bfloat16)
        if call("round_bf16", x.contiguous(), x.numel(), key, start, rounded):
            return rounded
    return reference.stochastic_bf16(x, key, start)
