"""Quantize matrices to codes and scales, and turn these back to numbers.

`quantize` carries out what a `Quantizer` says and gives a `Quantized`. The arithmetic lives behind `surokit.kernels`; for each
scaling one codec below knows which of its operations to call.

Matrices are [M, K] with K the dimension that a product contracts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from surokit import kernels
from surokit.formats import BNB_FP4, E2M1, E4M3, E5M2, NF4, Format
from surokit.quantizer import MX, NV, Block, NFBlock, PerRow, PerTensor, Quantizer, Scaling

Parts: TypeAlias = tuple[Tensor, Tensor, tuple[Tensor, ...]]  # codes, scales, scales of the scales


@dataclass(frozen=True, eq=False)
class Quantized:
    """A Quantized is a quantized matrix [M, K]: x is about codes * scales (* second).

    codes: [M, K], one byte an element, or [M, ceil(K / 2)] uint8 with two codes a byte. scales: decode scales, one a tile;
    float32, E8M0 bytes (MX), E4M3 bytes (NV) or 8-bit codes (NF4, double); those of 1 x C blocks lie in memory column by column,
    as tensor cores read them (`.contiguous()` puts them in rows). second: scales of the scales, where there are any, and last the
    key of drawn signs (`rotation`).
    rows, columns: M and K. A rotated matrix holds the codes of the rotated rows, K rounded up to the rotation's width.
    """

    codes: Tensor
    scales: Tensor
    quantizer: Quantizer
    columns: int
    second: tuple[Tensor, ...] = ()
    rows: int = -1  # where the codes' own rows are not the matrix' (an odd K under NF4)

    def __post_init__(self) -> None:
        if self.rows < 0:
            object.__setattr__(self, "rows", self.codes.shape[0])

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Return the codes, the scales and the scales of the scales: all that is held."""
        return self.codes, self.scales, *self.second

    @property
    def nbytes(self) -> int:
        """Return the bytes of codes and scales."""
        return sum(t.nbytes for t in self.parts)

    @staticmethod
    def of(quantizer: Quantizer, parts: tuple[Tensor, ...], shape: tuple[int, int]) -> Quantized:
        """Put `parts` of a matrix of this shape together again. TypeError where a cast has spoilt codes or scales."""
        codes, scales, *second = parts
        if tuple(t.dtype for t in parts) != _codec_of(quantizer).held_in(quantizer):
            raise TypeError(
                f"The codes and scales of a weight stored in {quantizer} were cast (to {', '.join(str(t.dtype) for t in parts)}) "
                "and are spoilt: cast a model before surokit.apply, and shard it without MixedPrecisionPolicy(param_dtype=...)."
            )
        return Quantized(codes, scales, quantizer, shape[1], tuple(second), rows=shape[0])

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return [M, K] in `dtype` (float32 if not given): codes * scales, rounded once; a rotation is turned back."""
        dtype = dtype or torch.float32
        if not self.quantizer.hadamard:
            return self._codec.decode(self, self._width, dtype)
        rotated = self._codec.decode(self, self._width, torch.float32)
        return self._turned(rotated, back=True)[:, : self.columns].to(dtype)

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return bfloat16 factors [M, K] (of the rotated matrix) for a product, and a float32 factor [M or 1, 1] for its sums.

        They are exactly the numbers that tensor cores for the format would multiply; but NF4 and blocks whose scales are no
        powers of two are rounded to bfloat16.
        """
        return self._codec.factors(self, self._width)

    @property
    def can_multiply(self) -> bool:
        """Return whether there is a product that decodes this matrix on the way: every scaling but MX, without rotation, and of
        formats with 8 bits E4M3."""
        return self._codec.multiplies and not self.quantizer.hadamard and self.quantizer.format != E5M2

    def times(self, x_MK: Tensor) -> Tensor:
        """Return x W' [M, N] for x [M, K] and this matrix W [N, K], decoded inside the product; see `can_multiply`."""
        return self._codec.times(x_MK, self)

    @property
    def rotation(self) -> Tensor | None:
        """Return the key of the signs that this matrix was rotated by, int32 [2], or None where these were not drawn."""
        return self.second[-1] if self.quantizer.rounding == "eden" else None

    def meets(self, other: Quantized) -> bool:
        """Return whether the codes of both stand in one basis, so that they can be multiplied as they are."""
        return self.quantizer.hadamard == other.quantizer.hadamard and self.rotation is other.rotation

    @property
    def _codec(self) -> type[_Tiles]:
        return _codec_of(self.quantizer)

    @property
    def _width(self) -> int:
        """Return how many columns the codes cover: K, or K rounded up to the rotation's width."""
        return self.columns + -self.columns % (self.quantizer.hadamard or 1)

    def renamed(self, wanted: Quantizer) -> Quantized | None:
        """Return the same codes as `wanted` has them, or None where quantizing to it would be another storage.

        Codes say what their numbers are and not how they were chosen (four over six, a rule, powers of two), and tiles of 16 x 16
        may come as rows with the same scales.
        """
        have = self.quantizer
        if self.scales.is_meta:  # there is nothing to compare
            return replace(self, quantizer=wanted) if have == wanted else None
        if isinstance(wanted.scaling, NV) and wanted.scaling.rows == 16 and have == Quantizer(E2M1, NV(16)):
            scales = self.scales.view(torch.uint8)
            firsts = scales[::16]
            if not wanted.hadamard and torch.equal(firsts.repeat_interleave(16, dim=0)[: self.rows], scales):
                return replace(self, scales=firsts.contiguous().view(self.scales.dtype), quantizer=wanted)
            return None
        if not have.same_codes(wanted) or (isinstance(have.scaling, NFBlock) and have.scaling != wanted.scaling):
            return None
        narrower = wanted.scaling.pow2 and not have.scaling.pow2
        if narrower and not bool(((torch.frexp(self.scales).mantissa == 0.5) | (self.scales == 0)).all()):
            return None
        return replace(self, quantizer=wanted)

    def t(self) -> Quantized:
        """Return the quantized transpose [K, M]; only for scalings that look the same from both sides."""
        if not self.quantizer.transposable:
            raise ValueError(
                f"{self.quantizer} has other scales for the transpose: quantize the transposed tensor instead."
            )
        codes = kernels.transpose_fp4(self.codes, self.columns) if self.quantizer.packed else self.codes.t()
        return replace(self, codes=codes, scales=self.scales.t(), columns=self.rows, rows=self.columns)

    def sqnr(self, x: Tensor) -> float:
        """Return the signal-to-quantization-noise ratio against the original `x` [M, K], in dB."""
        return sqnr_db(self._of_shape(x), self.dequantize())

    def clipped(self, x: Tensor) -> float:
        """Return the share of the elements of `x` [M, K] that were cut: further beyond the format's largest number than rounding
        reaches."""
        return float(self.was_clipped(x).float().mean())

    def underflow(self, x: Tensor) -> float:
        """Return the share of the elements of `x` [M, K] that are not zero and became zero."""
        return float(self.vanished(x).float().mean())

    def was_clipped(self, x: Tensor) -> Tensor:
        """Return which elements of `x` (as rotated, where it is) were cut; on the device, without waiting for it."""
        format = self.quantizer.format
        if isinstance(format, Format):
            beyond = format.max + 2.0 ** (format.max_exponent - format.mantissa_bits - 1)
        else:
            beyond = format.max + (format.max - sorted(format.values)[-2]) / 2
        largest = self._filled_with_largest().abs()  # 0 under a scale that became 0, where everything vanished instead
        # a scale rounds, so an amax may stand a last bit above the range it defines
        return (self.rotated(x).abs().float() > largest * (beyond / format.max * (1 + 2**-20))) & (largest != 0)

    def vanished(self, x: Tensor) -> Tensor:
        """Return which elements of `x` (as rotated, where it is) became zero and were not; without waiting for the device."""
        decoded = self._codec.decode(self, self._width, torch.float32)
        return (decoded == 0) & (self.rotated(x) != 0)

    def rotated(self, x: Tensor) -> Tensor:
        """Return `x` [M, K] as it was quantized: rotated where the quantizer rotates, itself elsewhere."""
        x = self._of_shape(x)
        return self._turned(x) if self.quantizer.hadamard else x

    def _turned(self, x: Tensor, back: bool = False) -> Tensor:
        """Return `x` in the basis of the codes, or back from it."""
        if self.rotation is None:
            return kernels.rotate(x, self.quantizer.hadamard, back)
        return kernels.rotate_drawn(x, self.quantizer.hadamard, self.rotation, back)

    def _of_shape(self, x: Tensor) -> Tensor:
        """Return `x` [M, K], or the [..., K] that became it, as [M, K]."""
        if x.dim() < 2 or x.shape[-1] != self.columns or x.numel() != self.rows * self.columns:
            raise ValueError(
                f"A matrix {self.rows} x {self.columns} was quantized and is compared with one of shape {tuple(x.shape)}: "
                "pass the original."
            )
        return x.reshape(self.shape)

    def _filled_with_largest(self) -> Tensor:
        """Return the largest number that each place could express [M, K], float32."""
        byte = {E4M3: 0x7E, E5M2: 0x7B, E2M1: 0x77, NF4: 0xFF, BNB_FP4: 0x33}[self.quantizer.format]
        codes = torch.full_like(self.codes.view(torch.uint8), byte).view(self.codes.dtype)
        return self._codec.decode(replace(self, codes=codes), self._width, torch.float32)

    def __repr__(self) -> str:
        return f"Quantized({self.rows} x {self.columns}, {self.quantizer}, {self.nbytes:,} bytes)"


def quantize(
    x: Tensor,
    q: Quantizer,
    *,
    amax: Tensor | None = None,
    generator: torch.Generator | None = None,
    seed: int | None = None,
    rotation: Tensor | None = None,
) -> Quantized:
    """Quantize a matrix [M, K] (or [..., K], flattened to rows) with current scaling.

    `amax` float32, [R, C] for tiles and [1, 1] for NVFP4's tensor scale, replaces the tensor's own largest magnitudes: delayed
    scaling passes what its history says; MX and NF4 take none. `generator` or `seed` makes stochastic rounding repeatable;
    without one it draws from torch's random state. `rotation`, with rounding="eden", is that of a matrix quantized before:
    rotated by the same signs, both can be multiplied; without it the signs are drawn anew. A quantizer with a history quantizes a
    lone tensor by its own amax, since the history belongs to a layer in training. Numbers wider than float32 are rounded to it
    first.

    The result is numbers without a gradient, also where x requires one: rounding has none. Layers give theirs in training.

    NaN and inf: a scale that would have to hold one is NaN, so everything it covers decodes to NaN and nothing goes unseen.

    Raises ValueError for fewer than two dimensions, K = 0, or an amax or a rotation that nothing would use; TypeError for numbers
    that are not floating-point.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"quantize() takes a torch.Tensor, not {type(x).__name__}: convert it with torch.as_tensor().")
    if not isinstance(q, Quantizer):
        raise TypeError(
            "quantize() takes a surokit.Quantizer such as Quantizer(E4M3, PerRow()) or FP8_ROWWISE.forward.a, "
            f"not {q!r}."
        )
    if x.dim() < 2 or x.shape[-1] == 0:
        raise ValueError(f"quantize() takes a matrix [M, K], not a tensor of shape {tuple(x.shape)}: reshape it first.")
    if not x.is_floating_point() or x.itemsize < 2:
        raise TypeError(
            f"quantize() takes floating-point numbers of 16 bits or more, not {x.dtype}: convert the tensor first."
        )
    if amax is not None and isinstance(q.scaling, MX | NFBlock):
        raise ValueError(f"{q} takes each block's scale from its own elements: quantize() without amax.")
    drawn = q.rounding == "eden"
    if amax is not None and drawn:
        raise ValueError(f"{q} takes the amax of what its drawn signs give: quantize() without amax.")
    if rotation is not None and not drawn:
        raise ValueError(f"{q} draws no signs: quantize() without rotation, which is for rounding='eden'.")
    x_MK = x.detach().reshape(-1, x.shape[-1])
    M, K = x_MK.shape
    if x_MK.itemsize > 4:
        x_MK = x_MK.float()
    source = kernels.source_of_draws(generator, seed) if q.draws else None
    if drawn and rotation is None:
        rotation = kernels.new_key(x.device, source)
    key = kernels.new_key(x.device, source) if q.draws else None
    if rotation is not None and key is not None:
        codes, scales, second = _Eden.encode_drawn(x_MK, q, rotation, key)
    else:
        codec = _codec_of(q)
        codes, scales, second = (codec.encode_rotated if q.hadamard else codec.encode)(x_MK, q, amax, key)
    return Quantized(codes, scales, q, K, second, rows=M)


def quantize_both(x_MK: Tensor, q: Quantizer) -> tuple[Quantized, Quantized]:
    """Return quantize(x, q) and quantize(x', q) in one pass over x; for quantizers that say `both_in_one_pass`."""
    M, K = x_MK.shape
    codes, scales, codes_t, scales_t = _codec_of(q).encode_both(x_MK, q)
    return Quantized(codes, scales, q, K), Quantized(codes_t, scales_t, q, M)


def sqnr_db(reference: Tensor, approximation: Tensor) -> float:
    """Return 10 log10(|reference|^2 / |reference - approximation|^2), summed in float64; inf where they are equal."""
    x = reference.double()
    noise = (x - approximation.double().reshape(x.shape)).square().sum().item()
    signal = x.square().sum().item()
    return math.inf if noise == 0 else 10 * math.log10(signal / noise) if signal else -math.inf


# -- how each scaling is carried out

_CODES_IN = {
    E4M3: torch.float8_e4m3fn,
    E5M2: torch.float8_e5m2,
    E2M1: torch.uint8,
    NF4: torch.uint8,
    BNB_FP4: torch.uint8,
}


class _Tiles:
    """A float32 scale for each tile of an 8-bit format: the whole tensor, a row or a block."""

    multiplies: ClassVar[bool] = True  # whether `times` is there
    scales_in: ClassVar[tuple[torch.dtype, ...]] = (torch.float32,)  # and scales of the scales

    @classmethod
    def held_in(cls, q: Quantizer) -> tuple[torch.dtype, ...]:
        """Return the dtypes of all parts: codes, scales, scales of the scales."""
        return _CODES_IN[q.format], *cls.scales_in

    @staticmethod
    def times(x_MK: Tensor, W: Quantized) -> Tensor:
        return kernels.fp8_mm(x_MK, W.codes, W.scales, *W.quantizer.scaling.tile(), False)

    @staticmethod
    def encode(x_MK: Tensor, q: Quantizer, amax: Tensor | None, key: Tensor | None) -> Parts:
        rows, columns = q.scaling.tile()
        return *kernels.quantize(x_MK, q.format.name, rows, columns, q.scaling.pow2, amax, least_amax(q), key), ()

    @staticmethod
    def encode_both(x_MK: Tensor, q: Quantizer) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the codes and scales of x, and of x'."""
        rows, columns = q.scaling.tile()
        return kernels.quantize_both(x_MK, q.format.name, rows, columns, q.scaling.pow2, least_amax(q))

    @classmethod
    def encode_rotated(cls, x_MK: Tensor, q: Quantizer, amax: Tensor | None, key: Tensor | None) -> Parts:
        return cls.encode(kernels.rotate(x_MK, q.hadamard), q, amax, key)

    @staticmethod
    def decode(Q: Quantized, columns: int, dtype: torch.dtype) -> Tensor:
        return kernels.dequantize(Q.codes, Q.scales, *Q.quantizer.scaling.tile(), dtype)

    @classmethod
    def factors(cls, Q: Quantized, columns: int) -> tuple[Tensor, Tensor]:
        if Q.quantizer.scaling.varies_along_sum:
            return cls.decode(Q, columns, torch.bfloat16), _one(Q.codes)
        return kernels.values(Q.codes), Q.scales


class _MX(_Tiles):
    multiplies = False
    scales_in = (torch.float8_e8m0fnu,)

    @staticmethod
    def encode(x_MK: Tensor, q: Quantizer, amax: Tensor | None, key: Tensor | None) -> Parts:
        assert isinstance(q.scaling, MX)
        return *kernels.quantize_mx(x_MK, q.format.name, q.scaling.rule_for(q.format), key), ()

    @staticmethod
    def encode_both(x_MK: Tensor, q: Quantizer) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        assert isinstance(q.scaling, MX)
        return kernels.quantize_mx_both(x_MK, q.format.name, q.scaling.rule_for(q.format))

    @staticmethod
    def decode(Q: Quantized, columns: int, dtype: torch.dtype) -> Tensor:
        return kernels.dequantize_mx(Q.codes, Q.scales, columns, Q.quantizer.format.name, dtype)


class _NV(_Tiles):
    scales_in: ClassVar[tuple[torch.dtype, ...]] = torch.float8_e4m3fn, torch.float32

    @staticmethod
    def times(x_MK: Tensor, W: Quantized) -> Tensor:
        return kernels.nv_mm(x_MK, *W.parts, W.quantizer.scaling.tile()[0], W.columns, False)

    @staticmethod
    def encode(x_MK: Tensor, q: Quantizer, amax: Tensor | None, key: Tensor | None) -> Parts:
        codes, scales, scale = kernels.quantize_nv(x_MK, q.scaling.tile()[0], q.four_over_six, amax, key)
        return codes, scales, (scale,)

    @classmethod
    def encode_rotated(cls, x_MK: Tensor, q: Quantizer, amax: Tensor | None, key: Tensor | None) -> Parts:
        if amax is not None or q.scaling.tile()[0] > 1:
            return super().encode_rotated(x_MK, q, amax, key)
        codes, scales, scale = kernels.quantize_nv_rotated(x_MK, q.hadamard, key)
        return codes, scales, (scale,)

    @staticmethod
    def decode(Q: Quantized, columns: int, dtype: torch.dtype) -> Tensor:
        return kernels.dequantize_nv(Q.codes, Q.scales, Q.second[0], Q.quantizer.scaling.tile()[0], columns, dtype)

    @classmethod
    def factors(cls, Q: Quantized, columns: int) -> tuple[Tensor, Tensor]:
        return kernels.factors_nv(Q.codes, Q.scales, Q.quantizer.scaling.tile()[0], columns), Q.second[0]


class _Eden(_NV):
    scales_in = *_NV.scales_in, torch.int32

    @staticmethod
    def encode_drawn(x_MK: Tensor, q: Quantizer, rotation: Tensor, key: Tensor) -> Parts:
        codes, scales, scale = kernels.quantize_nv_eden(x_MK, q.hadamard, rotation, key)
        return codes, scales, (scale, rotation)


class _NF(_Tiles):
    @classmethod
    def held_in(cls, q: Quantizer) -> tuple[torch.dtype, ...]:
        double = isinstance(q.scaling, NFBlock) and q.scaling.double
        return (torch.uint8, torch.uint8, torch.float32, torch.float32) if double else (torch.uint8, torch.float32)

    @staticmethod
    def times(x_MK: Tensor, W: Quantized) -> Tensor:
        return kernels.nf4_mm(
            x_MK, W.codes, W.scales, list(W.second), W.rows, W.columns, False, W.quantizer.format.name
        )

    @staticmethod
    def encode(x_MK: Tensor, q: Quantizer, amax: Tensor | None, key: Tensor | None) -> Parts:
        assert isinstance(q.scaling, NFBlock)
        codes, scales, *second = kernels.quantize_nf4(x_MK, q.scaling.double, q.format.name)
        return codes, scales, tuple(second)

    @staticmethod
    def decode(Q: Quantized, columns: int, dtype: torch.dtype) -> Tensor:
        return kernels.dequantize_nf4(
            Q.codes, Q.scales, list(Q.second), Q.rows, columns, dtype, Q.quantizer.format.name
        )


_CODECS: dict[type[Scaling], type[_Tiles]] = {
    PerTensor: _Tiles,
    PerRow: _Tiles,
    Block: _Tiles,
    MX: _MX,
    NV: _NV,
    NFBlock: _NF,
}


def _codec_of(q: Quantizer) -> type[_Tiles]:
    return _Eden if q.rounding == "eden" else _CODECS[type(q.scaling)]


def least_amax(q: Quantizer) -> float:
    """Return the smallest amax: torchao keeps a row's amax above 1e-12; TransformerEngine takes tensors and blocks as they are."""
    return 1e-12 if isinstance(q.scaling, PerRow) else 0.0


def _one(like: Tensor) -> Tensor:
    return torch.ones((1, 1), dtype=torch.float32, device=like.device)
