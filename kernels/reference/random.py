"""Draw random bits from a key and a position, for stochastic rounding: every implementation draws the same.

    x = index ^ key0;  x ^= x >>> 16;  x *= 0x7FEB352D;  x ^= key1;  x ^= x >>> 15;  x *= 0x846CA68B;  x ^= x >>> 16

in wrapping 32-bit arithmetic. There is no state: a kernel needs its element's position and a key of two int32 on the device, so
the draw does not depend on how the work is cut up, and a replayed graph that draws its key afresh draws afresh. The constants
are the integer hash "lowbias32" of Chris Wellons' hash prospector (public domain).
"""

from __future__ import annotations

import torch
from torch import Tensor

_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - 2**32  # as signed 32-bit numbers


def new_key(device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """Return a key: int32 [2] on `device`, from torch's random state there (or from `generator`, on its own device)."""
    source = generator.device if generator is not None else device
    key = torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, device=source, generator=generator)
    return key.to(device, non_blocking=True)


def bits(n: int, key: Tensor) -> Tensor:
    """Return int32 [n]: 32 random bits for each of the positions 0 .. n - 1."""
    x = torch.arange(n, dtype=torch.int32, device=key.device)
    x ^= key[0]
    _xor_shift_(x, 16)
    x *= _FIRST
    x ^= key[1]
    _xor_shift_(x, 15)
    x *= _SECOND
    return _xor_shift_(x, 16)


def uniform(shape: tuple[int, ...] | torch.Size, key: Tensor) -> Tensor:
    """Return float32 in [0, 1), the upper 24 bits of each draw; positions count in row-major order."""
    drawn = bits(torch.Size(shape).numel(), key)
    drawn.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF)
    return drawn.to(torch.float32).mul_(2.0**-24).view(shape)


def _xor_shift_(x: Tensor, by: int) -> Tensor:
    """Return x ^= x >>> by; torch's shift of signed numbers drags the sign along, the mask removes it."""
    return x.bitwise_xor_(x.bitwise_right_shift(by).bitwise_and_((1 << (32 - by)) - 1))
