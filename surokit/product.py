"""Multiply two quantized matrices: by tensor cores where the device has them for the format, else emulated exactly.

    y_MN = a_MK @ b_NK'        both with the contracted dimension last

The emulation multiplies what the codes stand for in bfloat16 and sums in float32. Every product of two 8-bit or 4-bit numbers
with their block scales is exact there, so the result is the tensor core's up to the order of the sums (kernels/reference/gemm.py).
Blocks whose scales are no powers of two (QFP8's) are the exception: code times scale is rounded to bfloat16.
The emulation says nothing about the format's speed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surokit import kernels
from surokit.formats import Kind
from surokit.kernels import native
from surokit.quantized import Quantized
from surokit.quantizer import Quantizer, kind_of


def product(
    a_MK: Tensor | Quantized,
    b_NK: Tensor | Quantized,
    dtype: torch.dtype,
    fast_accumulation: bool = False,
    onto: Tensor | None = None,
) -> Tensor:
    """Return [M, N] = a b' in `dtype`. An operand that is not quantized takes part in `dtype`, the other one is decoded to it.

    onto: [M, N] in `dtype`, to which the product is added in place, in the product itself where it can be (`adds_onto`).
    """
    if isinstance(a_MK, Tensor):
        a_MK = a_MK.to(dtype)
    if adds_onto(a_MK, b_NK):
        a, b = (m.dequantize(dtype) if isinstance(m, Quantized) else m.to(dtype) for m in (a_MK, b_NK))
        return kernels.mm(a, b.t()) if onto is None else kernels.addmm_(onto, a, b.t())
    assert isinstance(b_NK, Quantized)
    if isinstance(a_MK, Quantized):
        y_MN = _of_codes(a_MK, b_NK, dtype, fast_accumulation)
    else:
        y_MN = b_NK.times(a_MK)
    return y_MN if onto is None else onto.add_(y_MN)


def adds_onto(a_MK: Tensor | Quantized, b_NK: Tensor | Quantized) -> bool:
    """Return whether the product adds onto a tensor in itself. One of codes, or with a weight decoded on the way, takes passes
    more."""
    if not isinstance(b_NK, Quantized):
        return True
    return isinstance(a_MK, Tensor) and not decodes_on_the_way(a_MK, b_NK)


def _of_codes(a_MK: Quantized, b_NK: Quantized, dtype: torch.dtype, fast_accumulation: bool) -> Tensor:
    if not a_MK.meets(b_NK):  # other bases: turn both back
        return kernels.mm(a_MK.dequantize(dtype), b_NK.dequantize(dtype).t())
    kind = kind_of(a_MK.quantizer, b_NK.quantizer)
    if kind and native.available(kind, a_MK.codes.device) and a_MK.codes.numel() and b_NK.codes.numel():
        return _native(kind, a_MK, b_NK, dtype, fast_accumulation)
    (a, a_scale), (b, b_scale) = a_MK.factors(), b_NK.factors()
    return kernels.emulated_mm(a, a_scale, b, b_scale, dtype, pow2=_pow2(a_MK) and _pow2(b_NK))


FEW_TOKENS = 64


def decodes_on_the_way(x_MK: Tensor, W_NK: Quantized) -> bool:
    """Return whether a stored weight is decoded inside its product: for few tokens, as in generation, reading it is the whole
    cost."""
    small = x_MK.is_cuda and x_MK.dtype in (torch.bfloat16, torch.float16) and 0 < x_MK.shape[0] <= FEW_TOKENS
    return small and W_NK.can_multiply


def computes(a: Quantizer | None, b: Quantizer | None, device: torch.device) -> bool:
    """Return whether `device` multiplies such operands itself."""
    kind = kind_of(a, b)
    return kind is not None and native.available(kind, device)


def _pow2(Q: Quantized) -> bool:
    """Return whether what multiplies the sum is a power of two: then the sum may be rounded before."""
    return Q.quantizer.scaling.pow2 or (Q.quantizer.scaling.varies_along_sum and not Q.second)


def _native(kind: Kind, a: Quantized, b: Quantized, dtype: torch.dtype, fast: bool) -> Tensor:
    match kind:
        case "block":
            rows = b.quantizer.scaling.tile()[0]
            return native.block_mm(a.codes, a.scales, b.codes, b.scales, rows=rows, out_dtype=dtype)
        case "mx":
            return native.mx_mm(a.codes, a.scales, b.codes, b.scales, out_dtype=dtype)
        case "nv":
            rows_of = a.quantizer.scaling.tile()[0], b.quantizer.scaling.tile()[0]
            (a_scale, *_), (b_scale, *_) = a.second, b.second  # a rotation's key comes last, where there is one
            return native.nv_mm(a.codes, a.scales, a_scale, b.codes, b.scales, b_scale, rows=rows_of, out_dtype=dtype)
        case _:
            return native.scaled_mm(a.codes, a.scales, b.codes, b.scales, out_dtype=dtype, fast_accumulation=fast)
