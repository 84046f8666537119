"""A Fusion says which operations of a model are computed together: how a step is carried out, never what a recipe computes.

Every choice can be switched off on its own, so that what it brings can be measured:

    Fusion().without("gate", "joint")

Codes and scales are bit for bit those of the separate operations, but for one case: a scale of a tensor or a row that `joint` makes
reach over several layers is shared by them. Sums may be taken in another order or rounded less often.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal, get_args

Frozen = Literal["no", "codes", "transposed"]
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Fusion:
    """A Fusion says what is computed together, what is kept of frozen weights, and what backward computes again.

    norm: RMSNorm, the residual sum before it and the quantization after it, with the layers that read it.
    gate: SwiGLU and the quantization after it, with the layer that reads it.
    joint: layers that read one input, as one product where their weights lie side by side in memory. Where a recipe has a scale a
        tensor or a row, that of W and of dy is then the layers' common one, as in TransformerEngine's layers with several outputs.
    adapters: one product for the A of all layers that read one input; B and the layer's own product meet in its output.
    qk: the normalization of queries and keys and their rotation, in one pass.
    frozen: what is kept of a frozen weight that is quantized for its products: nothing (it is quantized every time), its codes,
        or its codes and those of its transpose, which the gradient's product reads. A stored weight is its codes already; one whose
        products take decoded values (QFP8 without native blocks) is decoded for each of them, whatever is said here.
    recompute: what backward computes again instead of keeping: nothing; the outputs of RMSNorm and SwiGLU; or a whole block,
        of which only the input is kept.

    `Fusion.OFF` fuses nothing. Raises ValueError for a word that `frozen` or `recompute` do not know, TypeError where the others
    are neither True nor False.
    """

    OFF: ClassVar[Fusion]

    norm: bool = True
    gate: bool = True
    joint: bool = True
    adapters: bool = True
    qk: bool = True
    frozen: Frozen = "codes"
    recompute: Recompute = "none"

    def __post_init__(self) -> None:
        for name, known in (("frozen", get_args(Frozen)), ("recompute", get_args(Recompute))):
            if getattr(self, name) not in known:
                raise ValueError(f"Fusion({name}={getattr(self, name)!r}): {name} is one of {', '.join(known)}.")
        for name in ("norm", "gate", "joint", "adapters", "qk"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"Fusion({name}={getattr(self, name)!r}): {name} is True or False.")

    @property
    def fuses(self) -> bool:
        """Return whether anything is computed together, or kept of frozen weights."""
        return replace(self, recompute="none") != OFF

    def without(self, *names: str) -> Fusion:
        """Return the same with these switched off: `frozen` keeps nothing then, and `recompute` computes nothing again.

        Raises ValueError for a name that is none of the fields.
        """
        off = {f.name: getattr(OFF, f.name) for f in fields(self)}
        unknown = [name for name in names if name not in off]
        if unknown:
            raise ValueError(f"A Fusion has no {', '.join(unknown)}: without() knows {', '.join(off)}.")
        return replace(self, **{name: off[name] for name in names})

    def __str__(self) -> str:
        named = [f.name for f in fields(self) if getattr(self, f.name) is True]
        named += [
            f"{name}={getattr(self, name)}" for name in ("frozen", "recompute") if getattr(self, name) not in _OFF
        ]
        return " ".join(named) or "nothing fused"


_OFF = "no", "none"
OFF = Fusion(norm=False, gate=False, joint=False, adapters=False, qk=False, frozen="no", recompute="none")
Fusion.OFF = OFF
