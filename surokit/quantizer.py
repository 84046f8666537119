"""Scalings, quantizers and quantized matrices: the values that a recipe is made of.

A `Scaling` says which elements share a scale, a `Quantizer` adds the number format and the rounding, a `Quantized` is what
comes out: codes and decode scales. The arithmetic lives in `kernels/reference/quantize.py`; this file only dispatches.

Matrices are [M, K] with K the dimension that the product contracts, so a per-row scale is constant along every sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from surokit.formats import E4M3, E5M2, FORMATS, Format

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class PerTensor:
    """One scale for the whole tensor. With `history`, the scale comes from the amaxes of earlier steps (delayed scaling)."""

    history: int = 0
    pow2: bool = False

    def tile(self) -> tuple[int, int]:
        return 0, 0

    def __str__(self) -> str:
        return "delayed per tensor" if self.history else "per tensor"


@dataclass(frozen=True)
class PerRow:
    """One scale a row, constant along the contracted dimension; a power of two unless pow2=False."""

    pow2: bool = True

    def tile(self) -> tuple[int, int]:
        return 1, 0

    def __str__(self) -> str:
        return "per row"


@dataclass(frozen=True)
class Block:
    """One scale for each block of rows x columns; a power of two unless pow2=False."""

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


Scaling = PerTensor | PerRow | Block
_SCALINGS: dict[str, type[PerTensor] | type[PerRow] | type[Block]] = {
    "PerTensor": PerTensor,
    "PerRow": PerRow,
    "Block": Block,
}


@dataclass(frozen=True)
class Quantizer:
    """Format, scaling and rounding of one operand.

    >>> Quantizer(E4M3, PerRow())
    Quantizer(e4m3 per row)
    """

    format: Format
    scaling: Scaling
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        if self.format not in (E4M3, E5M2):
            raise ValueError(f"There is no quantizer for the format {self.format}: use E4M3 or E5M2.")
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"rounding={self.rounding!r} is unknown: use 'nearest' or 'stochastic'.")

    @property
    def transposable(self) -> bool:
        """Whether the transposed codes are the quantized transpose, so that one pass serves both orientations."""
        rows, columns = self.scaling.tile()
        return rows == columns and self.rounding == "nearest"

    @property
    def delayed(self) -> bool:
        return isinstance(self.scaling, PerTensor) and self.scaling.history > 0

    def __repr__(self) -> str:
        return f"Quantizer({self})"

    def __str__(self) -> str:
        return f"{self.format} {self.scaling}" + (" stochastic" if self.rounding == "stochastic" else "")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for checkpoints."""
        scaling = {"kind": type(self.scaling).__name__, **self.scaling.__dict__}
        return {"format": self.format.name, "scaling": scaling, "rounding": self.rounding}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Quantizer:
        arguments = dict(data["scaling"])
        return Quantizer(FORMATS[data["format"]], _SCALINGS[arguments.pop("kind")](**arguments), data["rounding"])


@dataclass(frozen=True, eq=False)
class Quantized:
    """Codes [M, K] and decode scales [R, C] (float32, one for each tile): x is about codes * scales."""

    codes: Tensor
    scales: Tensor
    quantizer: Quantizer

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """[M, K] in `dtype` (float32 if not given): codes * scales, rounded once."""
        import torch

        from surokit import kernels

        return kernels.dequantize(self.codes, self.scales, self.quantizer.scaling.tile(), dtype or torch.float32)

    def t(self) -> Quantized:
        """The quantized transpose [K, M]; only for scalings that look the same from both sides."""
        if not self.quantizer.transposable:
            raise ValueError(
                f"{self.quantizer} has other scales for the transpose: quantize the transposed tensor instead."
            )
        return replace(self, codes=self.codes.t(), scales=self.scales.t())

    def sqnr(self, x: Tensor) -> float:
        """Signal-to-quantization-noise ratio against the original `x` [M, K], in dB."""
        return sqnr_db(x, self.dequantize())

    def clipped(self, x: Tensor) -> float:
        """Share of the elements of `x` [M, K] that lie beyond the largest number their scale can express."""
        from surokit import kernels

        largest = kernels.spread(self.scales, x, self.quantizer.scaling.tile()) * self.quantizer.format.max
        # a scale rounds, so an amax may stand a last bit above the range it defines
        return float((x.abs().float() > largest * (1 + 2**-20)).float().mean())

    def underflow(self, x: Tensor) -> float:
        """Share of the elements of `x` [M, K] that are not zero and became zero."""
        return float(((self.dequantize() == 0) & (x != 0)).float().mean())

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.codes.shape))
        return f"Quantized({shape}, {self.quantizer}, {self.nbytes:,} bytes)"


def quantize(
    x: Tensor, q: Quantizer, *, amax: Tensor | None = None, generator: torch.Generator | None = None
) -> Quantized:
    """Quantize a matrix [M, K] (or [..., K], flattened to rows) with current scaling.

    `amax` [R, C] float32 replaces the tensor's own largest magnitudes: delayed scaling passes what its history says.
    `generator` feeds stochastic rounding. A quantizer with a history quantizes a lone tensor by its own amax, since the
    history belongs to a layer in training.
    """
    from surokit import kernels

    if x.dim() < 2:
        raise ValueError(f"quantize() takes a matrix [M, K], not a tensor of shape {tuple(x.shape)}: reshape it first.")
    if not x.is_floating_point():
        raise TypeError(f"quantize() takes floating-point numbers, not {x.dtype}: convert the tensor first.")
    codes, scales = kernels.quantize(
        x.reshape(-1, x.shape[-1]),
        q.format,
        q.scaling.tile(),
        pow2=q.scaling.pow2,
        amax=amax,
        stochastic=q.rounding == "stochastic",
        generator=generator,
    )
    return Quantized(codes, scales, q)


def sqnr_db(reference: Tensor, approximation: Tensor) -> float:
    """10 log10(|reference|^2 / |reference - approximation|^2), summed in float64; inf where they are equal."""
    import math

    x = reference.double()
    noise = (x - approximation.double().reshape(x.shape)).square().sum().item()
    signal = x.square().sum().item()
    return math.inf if noise == 0 else 10 * math.log10(signal / noise) if signal else -math.inf
