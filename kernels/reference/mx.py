"""Define the MX formats in plain PyTorch: a power-of-two scale (E8M0) for every 32 elements of a row.

    byte = exponent of the scale + 127          x ~ q 2^(byte - 127)          byte 255: NaN, and so is the whole block

Three rules for the scale of a block, amax being its largest magnitude, max and emax the format's largest number and exponent:

    floor   exponent(amax) - emax                            OCP; the largest elements may saturate
    rceil   ceil(log2(amax / max)), the quotient in float32  nothing saturates
    even    floor of amax rounded to the format's mantissa   what OCP's rule means where rounding carries

`exponent` is the exponent field of float32, so subnormals count as 2^-127, the smallest scale. A NaN or inf in a block gives 255;
so does `even` where rounding amax overflows float32 (from 1.75 * 2^127 on for E2M1), since the block could not be decoded.

Multiplying by a power of two is exact, so an element is rounded once. A partial block at the end of a row is one of zeros.

Shapes: M rows, K columns, C = ceil(K/32) blocks in a row. Sources: OCP Microscaling Formats v1.0; the rules `rceil` and `even`
as torchao has them.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from surokit.formats import E2M1, Format

from . import fp4
from .quantize import DTYPES, amax, round_stochastic, values

BLOCK = 32
Rule = Literal["floor", "rceil", "even"]


def quantize(x_MK: Tensor, format: Format, rule: Rule, key: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the codes (float8 [M, K], or packed uint8 [M, ceil(K/2)] for E2M1) and scales, float8_e8m0fnu [M, C].

    key: int32 [2], rounds stochastically with its draws; None: to nearest even.
    """
    scales_MC = _scale_bytes(amax(x_MK, 1, BLOCK), format, rule)
    # 2^(127 - byte), by its exponent field; the field would be 0 for byte 254 only, which no rule gives
    encode_MC = ((254 - scales_MC) << 23).view(torch.float32).masked_fill_(scales_MC == 255, torch.nan)
    y_MK = _scaled(x_MK, encode_MC)
    scales_MC = scales_MC.to(torch.uint8).view(torch.float8_e8m0fnu)
    if format == E2M1:
        return fp4.pack(fp4.encode(y_MK, key)), scales_MC
    y_MK.clamp_(-format.max, format.max)
    if key is not None:
        y_MK = round_stochastic(y_MK, format, key)
    return y_MK.to(DTYPES[format]), scales_MC


def quantize_both(x_MK: Tensor, format: Format, rule: Rule) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return quantize(x) and quantize(x'): codes and scales of each. Their blocks differ, so one is not the transpose of the
    other."""
    return *quantize(x_MK, format, rule), *quantize(x_MK.t(), format, rule)


def dequantize(
    codes: Tensor, scales_MC: Tensor, columns: int, format: Format, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return q 2^(byte - 127) [M, columns], rounded to `dtype`: exact wherever the dtype has the number."""
    q_MK = fp4.decode_packed(codes, columns) if format == E2M1 else values(codes)
    return _scaled(q_MK, scales_MC.float()).to(dtype)


def _scale_bytes(amax_MC: Tensor, format: Format, rule: Rule) -> Tensor:
    """Return the bytes of the scales as int32."""
    if rule == "rceil":
        # torch.div: `tensor / number` may multiply by the reciprocal, which differs in the last bit
        bits = torch.div(amax_MC, torch.full_like(amax_MC, format.max)).view(torch.int32)
        # Up to the next exponent unless it is a power of two already. Of the subnormals, 2^-127 and below have byte 0.
        exponent = (bits + (bits > 0x00400000).int() * 0x7FFFFF) >> 23
    else:
        bits = amax_MC.view(torch.int32).clamp(max=0x7F800000)  # NaN as inf: a NaN of ones only would overflow
        if rule == "even":
            bits = bits + (1 << (22 - format.mantissa_bits))
        exponent = (bits >> 23) - format.max_exponent
        amax_MC = (bits & 0x7F800000).view(torch.float32)  # inf and NaN have the largest exponent
    return exponent.clamp_(min=0).masked_fill_(~amax_MC.isfinite(), 255)


def _scaled(x_MK: Tensor, scales_MC: Tensor) -> Tensor:
    """Return x * scale in float32, each scale serving its 32 columns. A new tensor."""
    M, K = x_MK.shape
    C = scales_MC.shape[1]
    if C * BLOCK != K:
        x_MK = torch.nn.functional.pad(x_MK, (0, C * BLOCK - K))
    y_MCb = x_MK.reshape(M, C, BLOCK).float() * scales_MC.view(M, C, 1)
    return y_MCb.view(M, C * BLOCK)[:, :K].contiguous()
