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
from itertools import pairwise

import torch
from torch import Tensor

from surokit.formats import E2M1

from .quantize import round_stochastic

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SIGNED = VALUES + tuple(-v for v in VALUES)
# Midpoints of neighbours, and whether the midpoint itself goes to the lower code (the one with the even mantissa)
_MIDPOINTS = tuple((0.5 * (low + high), code % 2 == 0) for code, (low, high) in enumerate(pairwise(VALUES)))


def encode(y: Tensor, key: Tensor | None = None) -> Tensor:
    """Return the nibbles (uint8, 0 .. 15) of float32 numbers, to nearest even; with a key rounded stochastically after a clamp to
    +-6."""
    if key is not None:
        y = round_stochastic(y.clamp(-E2M1.max, E2M1.max), E2M1, key)
    magnitude = y.abs()
    nibbles = torch.full(y.shape, len(VALUES) - 1, dtype=torch.uint8, device=y.device)
    for midpoint, lower in _MIDPOINTS:
        # counted from above, so that a NaN, which compares with nothing, stays at the largest magnitude
        nibbles -= (magnitude <= midpoint if lower else magnitude < midpoint).view(torch.uint8)
    nibbles |= y.signbit().view(torch.uint8) << 3
    return nibbles


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
    return nibbles_MK[:, 1::2] << 4 | nibbles_MK[:, ::2]


def unpack(packed: Tensor, columns: int) -> Tensor:
    """Return the nibbles [M, columns] of `pack`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)[:, :columns]


def transpose(packed: Tensor, columns: int) -> Tensor:
    """Return the codes [M, K = columns] packed along M instead of K: uint8 [K, ceil(M/2)]."""
    return pack(unpack(packed, columns).t().contiguous())
