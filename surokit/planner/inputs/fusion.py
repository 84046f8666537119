"""Which operations of a step are planned as one: what `surokit.fusion.Fusion` says, without torch.

A plan takes the words "none" and "fused", or a Fusion itself:

    sk.plan(config, fusion="fused", transposed="cached")
    sk.plan(config, fusion=sk.Fusion().without("gate"))
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from surokit.planner.counts.flops import Recompute


@dataclass(frozen=True)
class Fused:
    """What is computed together, and what is kept of a frozen weight that is quantized for its products.

    The fields are those of `surokit.fusion.Fusion`; `frozen` "codes" keeps the weight's codes, "transposed" those of W' too.
    """

    norm: bool = True
    gate: bool = True
    joint: bool = True
    adapters: bool = True
    qk: bool = True
    frozen: Literal["no", "codes", "transposed"] = "codes"

    def __bool__(self) -> bool:
        """Whether anything is fused, or kept."""
        return self != UNFUSED


UNFUSED = Fused(False, False, False, False, False, "no")
_WORDS = {"none": UNFUSED, "fused": Fused()}
#: What W' of a frozen quantized weight is: kept from step to step, or turned for each product.
Transposed = Literal["cached", "on the fly"]


def read_fusion(fusion: Any, transposed: Transposed | None, recompute: Recompute | None) -> tuple[Fused, Recompute]:
    """What a plan's `fusion` and `transposed` mean, and what is computed again: a Fusion's own word where `recompute` is None.

    Raises ValueError for words that are unknown, and for a W' that is to be cached where nothing is fused.
    """
    if isinstance(fusion, str):
        if fusion not in _WORDS:
            raise ValueError(f"fusion={fusion!r} is unknown: use {', '.join(map(repr, _WORDS))}, or a Fusion.")
        found = _WORDS[fusion]
    elif all(hasattr(fusion, f.name) for f in fields(Fused)):
        found = Fused(**{f.name: getattr(fusion, f.name) for f in fields(Fused)})
        recompute = recompute or getattr(fusion, "recompute", None)
    else:
        raise TypeError(f"fusion={fusion!r} is no Fusion: use 'none', 'fused', or sk.Fusion().")
    if transposed == "cached" and not found:
        raise ValueError("transposed='cached' keeps W' beside the codes of a fused step: give fusion='fused' too.")
    if transposed == "cached":
        found = replace(found, frozen="transposed")
    elif transposed == "on the fly" and found.frozen == "transposed":
        found = replace(found, frozen="codes")
    return found, recompute or "none"


def comes_quantized(quantizer: Any) -> bool:
    """Whether norm and SwiGLU can write these codes themselves: a delayed scale, a scale a row, or one a block of a row."""
    if quantizer is None or quantizer.rounding != "nearest" or quantizer.hadamard or quantizer.format.bits != 8:
        return False
    kind = type(quantizer.scaling).__name__  # the classes are the recipe's side, which the planner does not import
    return bool(quantizer.delayed) or (kind in ("PerRow", "Block") and quantizer.scaling.tile()[0] == 1)
