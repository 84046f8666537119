"""Describe number formats: how many bits, which range, which step, and which tensor cores multiply them.

A `Format` is a value: range and step follow from the bits, nothing is typed in twice. There is no torch here, so that the
planner can use the same values. Sources: OCP 8-bit Floating Point Specification (E4M3 and E5M2), OCP Microscaling
Formats v1.0 (E2M1, E8M0), IEEE 754 and bfloat16 for the rest.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Format:
    """A Format is a binary floating-point format with sign, exponent and mantissa bits.

    `specials` says what the top of the code space holds: "ieee" an exponent for inf and NaN (E5M2, bf16), "nan" one code
    for NaN and no inf (E4M3), "none" only numbers (E2M1).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    specials: Literal["ieee", "nan", "none"] = "ieee"
    signed: bool = True

    @property
    def bits(self) -> int:
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def max_exponent(self) -> int:
        """Return the exponent of the largest finite number (8 for E4M3, 15 for E5M2, 2 for E2M1)."""
        top = 2**self.exponent_bits - 1 - self.bias
        return top - 1 if self.specials == "ieee" or not self.mantissa_bits else top

    @property
    def max(self) -> float:
        """Return the largest finite number."""
        steps = 2**self.mantissa_bits
        # E4M3 gives the last mantissa of the top exponent to NaN
        last = steps - 2 if self.specials == "nan" and self.mantissa_bits else steps - 1
        return float(2.0**self.max_exponent * (1 + last / steps))

    @property
    def min_normal(self) -> float:
        return float(2.0 ** (1 - self.bias)) if self.mantissa_bits else float(2.0**-self.bias)

    @property
    def min_subnormal(self) -> float:
        """Return the smallest number above zero; a format without mantissa bits has no subnormals."""
        return float(self.min_normal * 2.0**-self.mantissa_bits)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Codebook:
    """A Codebook is a format whose codes are indices into a table of numbers."""

    name: str
    values: tuple[float, ...]

    @property
    def bits(self) -> int:
        return (len(self.values) - 1).bit_length()

    @property
    def max(self) -> float:
        """Return the largest number of the table."""
        return max(self.values)

    @property
    def ascending(self) -> tuple[int, ...]:
        """Return the codes in the order of their numbers; of two codes for zero the first."""
        first = {value: code for code, value in reversed(list(enumerate(self.values)))}
        return tuple(first[value] for value in sorted(first))

    def __str__(self) -> str:
        return self.name


E4M3 = Format("e4m3", 4, 3, specials="nan")
E5M2 = Format("e5m2", 5, 2)
E2M1 = Format("e2m1", 2, 1, specials="none")
E8M0 = Format("e8m0", 8, 0, specials="nan", signed=False)
BF16_FORMAT = Format("bf16", 8, 7)
FP32_FORMAT = Format("fp32", 8, 23)

# QLoRA's NormalFloat (Dettmers et al., 2023), the values of bitsandbytes: quantiles of a normal distribution, scaled to [-1, 1]
NF4 = Codebook(
    "nf4",
    (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
)

# twelfths, rounded to float32 as bitsandbytes has them: midpoints depend on it
_BNB_MAGNITUDES: tuple[float, ...] = struct.unpack(
    "8f", struct.pack("8f", *(n / 12 for n in (0, 1 / 16, 8, 12, 4, 6, 2, 3)))
)
# what bitsandbytes calls FP4: a sign and three bits, which are not those of E2M1
BNB_FP4 = Codebook("bnb_fp4", (*_BNB_MAGNITUDES, *(-m for m in _BNB_MAGNITUDES)))

FORMATS: dict[str, Format | Codebook] = {
    f.name: f for f in (E4M3, E5M2, E2M1, E8M0, NF4, BNB_FP4, BF16_FORMAT, FP32_FORMAT)
}


#: A product that tensor cores compute, by the scaling of its two operands: float8 with a scale a tensor or a row, float8 in
#: 1 x 128 and 128 x 128 blocks, float8 in MX blocks, NVFP4. MXFP4 has no kind: torch has no product for it on NVIDIA devices.
Kind = Literal["tensor", "row", "block", "mx", "nv"]


@dataclass(frozen=True)
class TensorCores:
    """TensorCores compute a kind of product: on NVIDIA GPUs of compute capability `first` to `last`, and a CUDA version at
    least."""

    name: str
    bits: int  # of the operands: which peak such a product has
    first: tuple[int, int]
    last: tuple[int, int] | None = None
    cuda: tuple[int, int] | None = None

    def on(self, capability: tuple[int, int]) -> bool:
        """Return whether GPUs of this compute capability have them."""
        return self.first <= capability and (self.last is None or capability <= self.last)

    @property
    def where(self) -> str:
        """Return the capabilities in words: "compute capability 8.9 and up"."""
        words = f"compute capability {self.first[0]}.{self.first[1]}" + ("" if self.last else " and up")
        return words + (f", CUDA {self.cuda[0]}.{self.cuda[1]}" if self.cuda else "")

    def __str__(self) -> str:
        return f"{self.name} ({self.where})"


_FLOAT8 = TensorCores("float8 tensor cores", 8, (8, 9))
#: Source: cuBLAS documentation, and the checks of torch.nn.functional.scaled_mm.
TENSOR_CORES: dict[Kind, TensorCores] = {
    "tensor": _FLOAT8,
    "row": _FLOAT8,
    "block": TensorCores("float8 block scales", 8, (9, 0), last=(9, 0), cuda=(12, 9)),
    "mx": TensorCores("Microscaling tensor cores", 8, (10, 0)),
    "nv": TensorCores("NVFP4 tensor cores", 4, (10, 0)),
}
