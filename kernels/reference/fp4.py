"""Define E2M1, the 4-bit float, in plain PyTorch: encode, decode, and two codes packed in a byte.

    code   0   1   2   3   4   5   6   7     8 .. 15: the same with the sign
    value  0  .5   1  1.5  2   3   4   6

Rounding is to nearest, ties to the code with the even mantissa; beyond 6 it saturates. There is no NaN among the codes: a NaN
gets magnitude 7, and whoever scales the codes says so in the scale. The even element lies in the low nibble.

Shapes: M rows, K columns. Sources: OCP Microscaling Formats v1.0 (values); the packing is that of torchao and
TransformerEngine.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from surokit.formats import E2M1

from .quantize import round_down_to_power_of_two, round_stochastic

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SIGNED = VALUES + tuple(-v for v in VALUES)


def encode(y: Tensor, key: Tensor | None = None) -> Tensor:
    """Return the nibbles (uint8, 0 .. 15) of numbers in float32, clamped to +-6, to nearest even; with a key stochastically.

    On a CPU torch compares one element at a time, so bits are moved instead.
    """
    y = y.float().clamp(-E2M1.max, E2M1.max)
    rounded = _rounded(y) if key is None else round_stochastic(y, E2M1, key)
    # float16 has its least normal number, 2^-14, where E2M1 has 1: its bits are then E2M1's and nine zeros (of a NaN, ones)
    bits = rounded.mul_(2.0**-14).to(torch.float16).view(torch.int16)
    nibbles = ((bits >> 9) & 7).bitwise_or_((bits >> 12).bitwise_and_(8))
    return nibbles.to(torch.uint8, memory_format=torch.contiguous_format)


def _rounded(y: Tensor) -> Tensor:
    """Return float32 numbers within +-6, rounded to E2M1's nearest, a tie to the even one; a zero keeps its sign."""
    # after adding 1.5 * 2^22 binades a float32 has no room for bits below half a binade, and the addition rounds to nearest even
    shift = round_down_to_power_of_two(y).clamp_(min=E2M1.min_normal).mul_(1.5 * 2.0**22)
    return (y + shift).sub_(shift).copysign_(y)


def decode(nibbles: Tensor) -> Tensor:
    """Return the values in bfloat16, exactly."""
    return table(SIGNED, torch.bfloat16, nibbles.device)[nibbles.int()]


def decode_packed(packed: Tensor, columns: int) -> Tensor:
    """Return the values [M, columns] of `pack`ed codes in bfloat16, exactly: decode(unpack(packed, columns))."""
    values = look_up_pairs(packed, SIGNED, torch.bfloat16)
    return values.view(packed.shape[0], 2 * packed.shape[1])[:, :columns]


def look_up_pairs(packed: Tensor, values: tuple[float, ...], dtype: torch.dtype, high_first: bool = False) -> Tensor:
    """Return values[code] for both codes of each byte, flat [2 * bytes] in `dtype`; the low nibble is the first unless
    `high_first`.

    One look-up a byte in a table of 256 pairs, each moved as one integer: a tenth of the time of a look-up a code.
    """
    whole = torch.int64 if dtype.itemsize == 4 else torch.int32
    pairs = table(_pairs(values, high_first), dtype, packed.device).view(whole)
    return pairs.index_select(0, packed.reshape(-1).int()).view(dtype)


@cache
def _pairs(values: tuple[float, ...], high_first: bool) -> tuple[float, ...]:
    """Return the 512 numbers of the 256 bytes, two a byte."""
    halves = ((byte >> 4, byte & 15) if high_first else (byte & 15, byte >> 4) for byte in range(256))
    return tuple(values[code] for pair in halves for code in pair)


@cache
def table(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a constant tensor, made once for each device: copying it there at every call would wait for the device."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


def pack(nibbles_MK: Tensor) -> Tensor:
    """Return the codes packed, uint8 [M, ceil(K/2)], the even element in the low nibble; an odd K is filled up with a zero."""
    if nibbles_MK.shape[1] % 2:
        nibbles_MK = torch.nn.functional.pad(nibbles_MK, (0, 1))
    M, K = nibbles_MK.shape
    both = nibbles_MK.reshape(-1).view(torch.int16)  # the even element in the low byte
    return (both >> 4).bitwise_or_(both).to(torch.uint8).view(M, K // 2)


def unpack(packed: Tensor, columns: int) -> Tensor:
    """Return the nibbles [M, columns] of `pack`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)[:, :columns]


def transpose(packed: Tensor, columns: int) -> Tensor:
    """Return the codes [M, K = columns] packed along M instead of K: uint8 [K, ceil(M/2)]."""
    return pack(unpack(packed, columns).t().contiguous())
