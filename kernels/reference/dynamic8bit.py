"""Define dynamic 8-bit numbers: the 256 values whose indices are codes of NF4's scales and of Adam's 8-bit moments.

For each power of ten from 1 down to 10^-6 the interval [.1, 1] times it is cut into equal parts, and the numbers are their
middles: signed 64 parts for the first and half as many each time, with both signs; unsigned twice as many. 0 and 1 complete
them. Sources: Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, 2015; bitsandbytes' create_dynamic_map.
"""

from __future__ import annotations

from functools import cache

import torch


@cache
def numbers(signed: bool) -> tuple[float, ...]:
    """Return the 256 values, ascending, each exact in float32."""
    values = [0.0, 1.0]
    for digits in range(7):
        parts = 2 ** ((6 if signed else 7) - digits)
        edges = torch.linspace(0.1, 1.0, parts + 1, dtype=torch.float32, device="cpu")
        middles = 10.0**-digits * ((edges[:-1] + edges[1:]) / 2)
        values += middles.tolist() + ((-middles).tolist() if signed else [])
    return tuple(sorted(values))
