"""Transpose codes in tiles of 128 x 128; the definition stands in kernels/reference/transpose.py.

It serves where kernels/cuda/transpose.cu cannot be built: Triton needs no nvcc. A program reads rows of its tile and writes rows
of the transposed one, so that neighbouring threads have neighbouring bytes both ways; in between the tile goes through shared
memory. M rows, K columns, in codes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from surokit.kernels.reference import transpose as reference

from .fp4 import pack_pairs, unpack_pairs

BLOCK = 128  # codes of a tile's side: a row of bytes fills a line of memory


@triton.jit
def transpose_kernel(codes, out, M, K, bytes_m, bytes_k, PER_BYTE: tl.constexpr, BLOCK: tl.constexpr):
    side: tl.constexpr = BLOCK // PER_BYTE  # bytes of a row of the tile
    blocks = tl.cdiv(K, BLOCK)
    m, k = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    row, byte = m * BLOCK + tl.arange(0, BLOCK), k * side + tl.arange(0, side)
    inside = (row < M)[:, None] & (byte < bytes_k)[None, :]
    tile = tl.load(codes + row[:, None].to(tl.int64) * bytes_k + byte[None, :], mask=inside, other=0)
    tile = tl.trans(tile) if PER_BYTE == 1 else pack_pairs(tl.trans(unpack_pairs(tile)))
    row, byte = k * BLOCK + tl.arange(0, BLOCK), m * side + tl.arange(0, side)
    inside = (row < K)[:, None] & (byte < bytes_m)[None, :]
    tl.store(out + row[:, None].to(tl.int64) * bytes_m + byte[None, :], tile, mask=inside)


def transpose_fp8(codes_MK: Tensor) -> Tensor:
    """Return codes_KM, contiguous and in memory of its own, for codes of one byte."""
    reference.check_fp8(codes_MK)
    M, K = codes_MK.shape
    codes_KM = codes_MK.new_empty(K, M)
    _launch(codes_MK.view(torch.uint8), codes_KM.view(torch.uint8), M, K, 1)
    return codes_KM


def transpose_fp4(packed_MK: Tensor, K: int) -> Tensor:
    """Return the 4-bit codes packed along M: uint8 [K, ceil(M/2)], the even row in the low nibble."""
    reference.check_fp4(packed_MK, K)
    M = packed_MK.shape[0]
    packed_KM = packed_MK.new_empty(K, (M + 1) // 2)
    _launch(packed_MK, packed_KM, M, K, 2)
    return packed_KM


def _launch(codes: Tensor, out: Tensor, M: int, K: int, per_byte: int) -> None:
    """Fill `out`; both tensors are uint8, and each byte holds `per_byte` codes."""
    if out.numel():
        grid = (triton.cdiv(M, BLOCK) * triton.cdiv(K, BLOCK),)
        codes, sizes = codes.contiguous(), (out.shape[1], codes.shape[1])
        transpose_kernel[grid](codes, out, M, K, *sizes, PER_BYTE=per_byte, BLOCK=BLOCK, num_warps=8)
