"""Transpose codes, [M, K] to [K, M]: the definition in plain PyTorch.

A product wants both operands contiguous along the dimension that it contracts. grad_input contracts the other dimension of W
than forward does; where W exists only as codes, W' is made by moving codes. Nothing is decoded or rounded, and the result
has memory of its own.

Shapes: M rows, K columns, in codes. 4-bit codes come two in a byte, the even one in the low nibble; an odd number of codes
leaves the last high nibble unused: whatever it holds is ignored, and zero is written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import fp4


def transpose_fp8(codes_MK: Tensor) -> Tensor:
    """Return codes_KM, contiguous and in memory of its own, for codes of one byte."""
    check_fp8(codes_MK)
    # as bytes: not every 8-bit dtype can be copied with other strides on every device
    codes_KM = codes_MK.view(torch.uint8).t().clone(memory_format=torch.contiguous_format)
    return codes_KM.view(codes_MK.dtype)


def transpose_fp4(packed_MK: Tensor, K: int) -> Tensor:
    """Return the 4-bit codes packed along M: uint8 [K, ceil(M/2)], the even row in the low nibble."""
    check_fp4(packed_MK, K)
    return fp4.transpose(packed_MK, K)


def check_fp8(codes_MK: Tensor) -> None:
    if codes_MK.dim() != 2:
        raise ValueError(
            f"Codes to transpose are a matrix, got {list(codes_MK.shape)}: flatten the leading dimensions."
        )
    if codes_MK.dtype == torch.float4_e2m1fn_x2:
        raise ValueError("float4_e2m1fn_x2 holds two codes in a byte: view it as uint8 and use transpose_fp4.")
    if codes_MK.element_size() != 1:
        raise ValueError(f"Codes to transpose have one byte each, got {codes_MK.dtype}: quantize first.")


def check_fp4(packed_MK: Tensor, K: int) -> None:
    if packed_MK.dtype != torch.uint8:
        raise ValueError(f"Packed 4-bit codes are uint8, got {packed_MK.dtype}: view them as uint8.")
    if packed_MK.dim() != 2 or packed_MK.shape[1] != (K + 1) // 2:
        raise ValueError(
            f"{K} packed 4-bit codes a row are [M, {(K + 1) // 2}], got {list(packed_MK.shape)}: give the number of codes as K."
        )
