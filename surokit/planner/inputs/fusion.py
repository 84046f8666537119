"""Read which operations of a step are planned as fused: from a Fusion, or from a word for one.

sk.plan(config, fusion="fused", transposed="cached")
sk.plan(config, fusion=sk.Fusion().without("gate"))
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from surokit.fusion import OFF, Fusion
from surokit.planner.counts.flops import Recompute
from surokit.quantizer import Block, PerRow

_WORDS = {"none": OFF, "fused": Fusion()}
#: W' of a frozen quantized weight is kept from step to step ("cached"), or transposed for each product ("on the fly").
Transposed = Literal["cached", "on the fly"]


def read_fusion(fusion: Any, transposed: Transposed | None, recompute: Recompute | None) -> tuple[Fusion, Recompute]:
    """Return (the Fusion that a plan's `fusion` and `transposed` mean, what is computed again).

    Where `recompute` is None the Fusion's own is taken; the Fusion that is returned has recompute "none". Raises ValueError for
    words that are unknown, and for transposed="cached" where nothing is fused; TypeError for anything that is not a Fusion.
    """
    if isinstance(fusion, str):
        if fusion not in _WORDS:
            raise ValueError(f"fusion={fusion!r} is unknown: use {', '.join(map(repr, _WORDS))}, or a Fusion.")
        found = _WORDS[fusion]
    elif isinstance(fusion, Fusion):
        found = replace(fusion, recompute="none")
        # without fused layers, a Fusion's "selective" has nothing to compute again
        recompute = recompute or (fusion.recompute if found.fuses or fusion.recompute == "full" else "none")
    else:
        raise TypeError(f"fusion={fusion!r} is no Fusion: use 'none', 'fused', or sk.Fusion().")
    if transposed == "cached" and not found.fuses:
        raise ValueError("transposed='cached' keeps W' beside the codes of a fused step: give fusion='fused' too.")
    if transposed == "cached":
        found = replace(found, frozen="transposed")
    elif transposed == "on the fly" and found.frozen == "transposed":
        found = replace(found, frozen="codes")
    return found, recompute or "none"


def comes_quantized(quantizer: Any) -> bool:
    """True if norm and SwiGLU can write these codes themselves: with a delayed scale, a scale a row, or one a block of a row."""
    if quantizer is None or quantizer.draws or quantizer.hadamard or quantizer.format.bits != 8:
        return False
    rows = isinstance(quantizer.scaling, PerRow | Block) and quantizer.scaling.tile()[0] == 1
    return bool(quantizer.delayed) or rows
