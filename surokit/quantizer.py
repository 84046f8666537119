"""Describe scalings and quantizers, the values that a recipe is made of. No torch here; `quantized.py` carries them out.

A `Scaling` says which elements share a scale and what the scale is, a `Quantizer` adds the number format, the rounding and a
rotation of one operand.

Matrices are [M, K] with K the dimension that the product contracts, so a per-row scale is constant along every sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from surokit.formats import BNB_FP4, E2M1, E4M3, E5M2, FORMATS, NF4, Codebook, Format, Kind

Rule = Literal["floor", "rceil", "even"]
Error = Literal["mse", "mae"]
Rounding = Literal["nearest", "stochastic", "eden"]
EDEN_BLOCK = 128  # elements of the rotation with drawn signs that rounding="eden" needs


@dataclass(frozen=True)
class Scaling(ABC):
    """A Scaling says which elements share a scale."""

    formats: ClassVar[tuple[Format | Codebook, ...]] = (E4M3, E5M2)
    # what a stored weight's scales are called beside `weight`, in the words of its checkpoint format
    stored_as: ClassVar[tuple[str, ...]] = ("weight_scale_inv",)

    @abstractmethod
    def tile(self) -> tuple[int, int]:
        """Return how many rows and columns share a scale; 0 stands for the whole extent."""

    @property
    def pow2(self) -> bool:
        """Return whether every scale is a power of two, so that scaling rounds nothing."""
        return False

    @property
    def varies_along_sum(self) -> bool:
        """Return whether a scale changes along K and must multiply the factors and not the sum."""
        return self.tile()[1] != 0

    def check(self, q: Quantizer) -> None:
        """Raise ValueError where this scaling cannot serve the quantizer `q`."""
        if q.format not in self.formats:
            usable = " or ".join(f.name.upper() for f in self.formats)
            raise ValueError(f"There is no quantizer for {q.format} with {self}: {type(self).__name__} takes {usable}.")
        if q.four_over_six and not isinstance(self, NV):
            raise ValueError(f"four_over_six chooses between block scales of NV(16); {self} has none of these.")


@dataclass(frozen=True)
class PerTensor(Scaling):
    """PerTensor has one scale for the whole tensor. With `history`, the scale comes from the amaxes of earlier steps (delayed
    scaling)."""

    history: int = 0
    pow2: bool = False

    def tile(self) -> tuple[int, int]:
        return 0, 0

    def __str__(self) -> str:
        return "delayed per tensor" if self.history else "per tensor"


@dataclass(frozen=True)
class PerRow(Scaling):
    """PerRow has one scale a row, constant along the contracted dimension; a power of two unless pow2=False."""

    pow2: bool = True

    def tile(self) -> tuple[int, int]:
        return 1, 0

    def __str__(self) -> str:
        return "per row"


@dataclass(frozen=True)
class Block(Scaling):
    """Block has one scale for each block of rows x columns; a power of two unless pow2=False."""

    rows: int
    columns: int
    pow2: bool = True

    def __post_init__(self) -> None:
        if self.rows < 1 or self.columns < 1:
            raise ValueError(f"Block({self.rows}, {self.columns}): a block needs at least one row and one column.")

    def tile(self) -> tuple[int, int]:
        return self.rows, self.columns

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns} blocks"


@dataclass(frozen=True)
class MX(Scaling):
    """MX is OCP Microscaling: 32 elements of a row share a power of two, kept in a byte (E8M0).

    `rule` picks the power: "floor" (OCP), "rceil" (no element is clipped) or "even" (the amax rounded to the format's
    mantissa first). By default RCEIL for FP8 and EVEN for FP4.
    """

    block: int = 32
    rule: Rule | None = None
    formats: ClassVar[tuple[Format | Codebook, ...]] = (E4M3, E5M2, E2M1)
    stored_as: ClassVar[tuple[str, ...]] = ("weight_scale",)

    def __post_init__(self) -> None:
        if self.block != 32:
            raise ValueError(f"MX({self.block}): the block of the Microscaling formats has 32 elements.")
        if self.rule not in (None, "floor", "rceil", "even"):
            raise ValueError(f"MX(rule={self.rule!r}): the rules are 'floor', 'rceil' and 'even'.")

    @property
    def pow2(self) -> bool:
        return True

    def tile(self) -> tuple[int, int]:
        return 1, self.block

    def rule_for(self, format: Format | Codebook) -> Rule:
        return self.rule or ("even" if format == E2M1 else "rceil")

    def __str__(self) -> str:
        return f"MX blocks of {self.block}" + (f" ({self.rule})" if self.rule else "")


@dataclass(frozen=True)
class NV(Scaling):
    """NV is the scaling of NVFP4: an E4M3 scale for 16 elements of a row (or a 16 x 16 tile, NV(16, 16)), and a float32 scale for
    the tensor."""

    columns: int = 16
    rows: int = 1
    formats: ClassVar[tuple[Format | Codebook, ...]] = (E2M1,)
    stored_as: ClassVar[tuple[str, ...]] = ("weight_scale", "weight_scale_2")

    def __post_init__(self) -> None:
        if self.columns != 16 or self.rows not in (1, 16):
            raise ValueError(f"NV({self.columns}, {self.rows}): NVFP4's blocks are NV(16), a row's, and NV(16, 16).")

    def check(self, q: Quantizer) -> None:
        super().check(q)
        if q.rounding == "eden" and self.rows != 1:
            raise ValueError(
                "rounding='eden' corrects the scale of 16 elements of a rotated row, which a tile does not have: take NV(16)."
            )
        if q.four_over_six and q.hadamard:
            raise ValueError(
                "four_over_six and hadamard exclude each other: the choice between the two scales is made "
                "for the unrotated tensor."
            )

    def tile(self) -> tuple[int, int]:
        return self.rows, self.columns

    def __str__(self) -> str:
        return f"NV {self.rows}x{self.columns} blocks"


@dataclass(frozen=True)
class NFBlock(Scaling):
    """NFBlock lets blocks of 64 elements over the flattened tensor share their largest magnitude (QLoRA).

    `double=256` quantizes these magnitudes too: 8-bit codes with a float32 scale for 256 of them and one offset.
    """

    block: int = 64
    double: int = 0
    formats: ClassVar[tuple[Format | Codebook, ...]] = (NF4, BNB_FP4)
    stored_as: ClassVar[tuple[str, ...]] = ("weight_absmax", "weight_nested_absmax", "weight_nested_offset")

    def __post_init__(self) -> None:
        if self.block != 64 or self.double not in (0, 256):
            raise ValueError(
                f"NFBlock({self.block}, double={self.double}): blocks have 64 elements, double is 0 or 256."
            )

    def check(self, q: Quantizer) -> None:
        super().check(q)
        if q.draws or q.hadamard:
            raise ValueError(f"{q.format} stores weights: it rounds to nearest and is not rotated.")

    def tile(self) -> tuple[int, int]:
        return 1, self.block

    def __str__(self) -> str:
        return f"blocks of {self.block}" + (", double" if self.double else "")


_SCALINGS: dict[str, type[Scaling]] = {s.__name__: s for s in (PerTensor, PerRow, Block, MX, NV, NFBlock)}


@dataclass(frozen=True)
class Quantizer:
    """A Quantizer describes the format, scaling, rounding and rotation of one operand.

    rounding: "nearest" (even on ties), "stochastic" (up or down in proportion to the distance: unbiased) or, for NV(16) with
        hadamard=128, "eden" (values to nearest; each block scale makes up for what that lost and is rounded stochastically:
        unbiased over rotations, with less than half the squared error). Source: Quartet II (arXiv 2601.22813).
    hadamard: 16 or 32 rotates every so many elements along K by a randomized Hadamard transform first, which spreads
        outliers; a product of two operands that are both rotated is unchanged. 128, with "eden": its signs are drawn anew each
        time, and two operands that meet have to share them (`quantize(rotation=)`). 0: no rotation.
    four_over_six: "mse" or "mae" lets each NVFP4 block choose whether its largest element becomes 6 or 4, by that error.

    >>> Quantizer(E4M3, PerRow())
    Quantizer(e4m3 per row)
    """

    format: Format | Codebook
    scaling: Scaling
    rounding: Rounding = "nearest"
    hadamard: int = 0
    four_over_six: Error | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.format, Format | Codebook):
            raise TypeError(f"Quantizer(format) takes a format such as surokit.E4M3, not {self.format!r}.")
        if not isinstance(self.scaling, Scaling):
            raise TypeError(f"Quantizer(scaling) takes a scaling such as surokit.PerRow(), not {self.scaling!r}.")
        if self.rounding not in ("nearest", "stochastic", "eden"):
            raise ValueError(f"rounding={self.rounding!r} is unknown: use 'nearest', 'stochastic' or 'eden'.")
        if self.rounding == "eden" and (self.hadamard != EDEN_BLOCK or not isinstance(self.scaling, NV)):
            raise ValueError("rounding='eden' is for rotated NVFP4: give it NV(16) and hadamard=128.")
        if self.hadamard not in (0, 16, 32) and self.rounding != "eden":
            raise ValueError(
                f"hadamard={self.hadamard}: rotations have 16 or 32 elements, 128 with rounding='eden', 0 is none."
            )
        if self.four_over_six not in (None, "mse", "mae"):
            raise ValueError(f"four_over_six={self.four_over_six!r}: the error is 'mse' or 'mae', None turns it off.")
        if self.hadamard and self.delayed:
            raise ValueError("A delayed scale knows the amax of the unrotated tensor: use PerTensor() with hadamard=.")
        self.scaling.check(self)

    @property
    def draws(self) -> bool:
        """Return whether quantizing takes random numbers, so that each time gives other codes or scales."""
        return self.rounding != "nearest"

    def check_stores(self) -> None:
        """Raise ValueError where a weight cannot be stored so."""
        if self.rounding == "eden":
            raise ValueError(
                "rounding='eden' is for operands that are quantized anew each time, and a weight is stored once: store it in a "
                "quantizer that rounds to nearest."
            )

    @property
    def transposable(self) -> bool:
        """Return whether the transposed codes are the quantized transpose, so that one pass serves both orientations."""
        rows, columns = self.scaling.tile()
        return rows == columns and not self.draws and not self.hadamard

    @property
    def both_in_one_pass(self) -> bool:
        """Return whether a matrix and its transpose are quantized in one pass: tiles lie along K and nothing is drawn or
        rotated."""
        along = isinstance(self.scaling, PerRow | MX) or (isinstance(self.scaling, Block) and self.scaling.rows == 1)
        return along and not self.draws and not self.hadamard

    def separates(self, dimension: Literal[0, 1], sizes: Sequence[int]) -> bool:
        """Return whether parts of these sizes, one after the other along a dimension (0: rows, 1: columns), have the same codes
        when they are quantized as one matrix: no tile, rotation, draw or scale of scales may reach from one into another."""
        tile = (self.scaling.tile()[dimension], self.hadamard if dimension == 1 else 0)
        alone = isinstance(self.scaling, PerTensor | NV | NFBlock) or self.draws
        return not alone and tile[0] != 0 and not any(size % step for size in sizes for step in tile if step)

    def joins(self, dimension: Literal[0, 1], sizes: Sequence[int]) -> bool:
        """Return whether such parts may be quantized as one matrix: with the codes of each, or by scales that they share where a
        scale reaches over all of them, of the tensor or of a row. Draws and rotations stay those of each."""
        shared = isinstance(self.scaling, PerTensor | PerRow) and not self.draws and not self.hadamard
        return shared or self.separates(dimension, sizes)

    def same_codes(self, other: Quantizer) -> bool:
        """Return whether a matrix that this quantizer stored can stand where `other` would quantize it: only the scales may
        differ."""
        return (
            self.format == other.format
            and type(self.scaling) is type(other.scaling)
            and self.scaling.tile() == other.scaling.tile()
            and self.hadamard == other.hadamard == 0
        )

    @property
    def delayed(self) -> bool:
        return isinstance(self.scaling, PerTensor) and self.scaling.history > 0

    @property
    def packed(self) -> bool:
        """Return whether a byte holds two codes."""
        return self.format.bits == 4

    @property
    def bits(self) -> float:
        """Return the bits an element, scales included, of a large tensor."""
        rows, columns = self.scaling.tile()
        share = 1 / (rows * columns) if rows and columns else 0.0
        match self.scaling:
            case NFBlock(double=double) if double:
                return self.format.bits + 8 * share + 32 * share / double
            case MX() | NV():
                return self.format.bits + 8 * share
            case _:
                return self.format.bits + 32 * share

    def nbytes(self, M: int, K: int) -> int:
        """Return the bytes of a quantized matrix [M, K], scales included."""
        K += -K % (self.hadamard or 1)
        rows, columns = self.scaling.tile()
        tiles = -(-M // (rows or M)) * -(-K // (columns or K))
        codes = M * -(-K // 2) if self.packed else M * K
        match self.scaling:
            case NFBlock(block=block, double=double):  # over the flattened matrix
                blocks = -(-M * K // block)
                return -(-M * K // 2) + (blocks + 4 * -(-blocks // double) + 4 if double else 4 * blocks)
            case MX():
                return codes + tiles
            case NV():
                return codes + tiles + 4 + (8 if self.rounding == "eden" else 0)  # the key of its signs
            case _:
                return codes + 4 * tiles

    def __repr__(self) -> str:
        return f"Quantizer({self})"

    def __str__(self) -> str:
        parts = [str(self.format), str(self.scaling)]
        parts += [self.rounding] if self.draws else []
        parts += [f"H{self.hadamard}"] if self.hadamard else []
        parts += [f"4/6 {self.four_over_six}"] if self.four_over_six else []
        return " ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for checkpoints."""
        scaling = {"kind": type(self.scaling).__name__, **self.scaling.__dict__}
        return {
            "format": self.format.name,
            "scaling": scaling,
            "rounding": self.rounding,
            "hadamard": self.hadamard,
            "four_over_six": self.four_over_six,
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Quantizer:
        arguments = dict(data["scaling"])
        scaling = _SCALINGS[arguments.pop("kind")](**arguments)
        # checkpoints of the first version know neither rotation nor four over six
        rest = {key: data[key] for key in ("rounding", "hadamard", "four_over_six") if key in data}
        return Quantizer(FORMATS[data["format"]], scaling, **rest)


def kind_of(a: Quantizer | None, b: Quantizer | None) -> Kind | None:
    """Return the kind of tensor-core product for these operands, or None if there is none."""
    if a is None or b is None or a.hadamard != b.hadamard:
        return None
    if a.format == b.format == E5M2:  # tensor cores take no such pair
        return None
    eight_bits = a.format in (E4M3, E5M2) and b.format in (E4M3, E5M2)
    match a.scaling, b.scaling:
        case PerTensor(), PerTensor() if eight_bits:
            return "tensor"
        case (PerTensor() | PerRow(), PerTensor() | PerRow()) if eight_bits:
            return "row"
        # torch passes E4M3 on both sides to these and no other format
        case Block(rows=1, columns=128), Block(columns=128, rows=1 | 128) if a.format == b.format == E4M3:
            return "block"
        case MX(), MX() if a.format == b.format == E4M3:
            return "mx"
        case NV(), NV():
            return "nv"
    return None
