"""Define NVFP4 in plain PyTorch: E2M1 codes, an E4M3 scale for each block of 16, one float32 scale for the tensor.

    S_enc = 2688 / amax                       2688 = 6 * 448; 1 for a zero tensor
    S_blk = e4m3(block_amax * (S_enc / 6))    one rounding; may become 0, and the block with it
    q     = e2m1(x / (S_blk / S_enc))
    x'    = q S_blk scale                     scale = amax / 2688

A block is 1 x 16 or a tile of 16 x 16 (weights: W and W' get the same numbers). q S_blk has at most six significant bits, so it
is exact in bfloat16: a bfloat16 product of `factors`, times both scales, is what FP4 hardware computes.

Four over six: the codes are spaced evenly up to 4 and coarsely from there to 6, so some blocks lose less if their largest
element becomes 4. Both block scales, S_blk and the one 1.5 times as large, are tried with rounding to nearest, and the larger
one is taken where its error is strictly smaller. 256 replaces 448 everywhere to make room (2688 becomes 1536).

MS-EDEN: unbiased without rounding a single value at random, for operands of gradients. x is rotated by drawn signs and its codes
are rounded to nearest, with room for block scales to grow. What that lost of each block's length is put into its scale, which is
rounded stochastically:

    S_enc = 256 R / amax                      R = 6 (16 / 17) / 0.93, to which a block's amax is scaled: its end is cut a little
    S_blk = e4m3(block_amax * (S_enc / R))    and q from it, as above
    c     = sum (x S_enc)^2 / sum (x S_enc) (q S_blk)    over a block; 1 for one of zeros
    x'    = q e4m3_stochastic(S_blk c) scale  scale = amax / (256 R)

What is not finite: with a NaN or inf the tensor's own amax is not finite, `scale` is NaN and everything decodes to NaN. With a
given amax the block that holds it has a NaN scale and decodes to NaN. Magnitudes above a given amax saturate.
Below an amax of 7.9e-36 S_enc stops at the largest float32 and `scale` at 2^-128, its reciprocal. The factor of x stops there
too, which makes numbers below 1.8e-38 smaller still.

Shapes: M rows, K columns, R x C the grid of blocks, r x c = rows x 16 a block.
Sources: NVIDIA TransformerEngine's NVFP4 recipe, whose order of operations this keeps, as FLT_MAX's place in it; four over six:
Cook et al., 2025, in TransformerEngine's order; MS-EDEN: Panferov et al., 2026, "Quartet II" (arXiv 2601.22813), with the
correction of each block of 16, as in Algorithm 1 of its second version (its first code summed over the rotation's 128).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from surokit.formats import E2M1, E4M3

from . import fp4, hadamard
from .quantize import FLT_MAX, round_stochastic, times_tiles_, values
from .quantize import amax as tile_amax

COLUMNS = 16
EDEN_REACH = (
    E2M1.max * (16 / 17) / 0.93
)  # 16 / 17: rounding a scale makes it smaller by no more; 0.93: the least squared error
ErrorOf = Literal["mse", "mae"]


def quantize(
    x_MK: Tensor,
    rows: int,
    four_over_six: ErrorOf | None = None,
    amax: Tensor | None = None,
    key: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the packed codes uint8 [M, ceil(K/2)], block scales e4m3 [R, C], scale float32 [1, 1] (a decode multiplier).

    rows: 1 or 16, of a block. four_over_six: the error that decides, None for plain NVFP4. amax: of the tensor, one element,
    used instead of its own. key: int32 [2], rounds stochastically with its draws; None: to nearest even.
    """
    M, K = x_MK.shape
    x_RrCc = _blocks(x_MK, rows).float()
    block_amax_RC = tile_amax(x_MK, rows, COLUMNS)
    if amax is None:
        amax = block_amax_RC.amax() if x_MK.numel() else block_amax_RC.new_zeros(())
    amax = amax.float().view(1, 1)
    bound = E2M1.max * (E4M3.max if four_over_six is None else 256.0)
    encode = _encode_scale(amax, bound)
    if four_over_six is None:
        scales_RC = _block_scale(block_amax_RC * (encode * (1 / E2M1.max)), block_amax_RC)
    else:
        six_RC = torch.div(block_amax_RC, torch.full_like(amax, E2M1.max)) * encode
        scales_RC = _block_scale(six_RC, block_amax_RC)
        larger_RC = _block_scale(six_RC * 1.5, block_amax_RC)
        better_RC = _error(x_RrCc, larger_RC, encode, amax, four_over_six) < _error(
            x_RrCc, scales_RC, encode, amax, four_over_six
        )
        scales_RC = torch.where(better_RC, larger_RC.view(torch.uint8), scales_RC.view(torch.uint8)).view(
            larger_RC.dtype
        )
    y_MK = _joined(_divided(x_RrCc, scales_RC, encode), M, K)
    return fp4.pack(fp4.encode(y_MK, key)), scales_RC, _decode_scale(amax, bound)


def quantize_rotated(x_MK: Tensor, block: int = 16, key: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return `quantize` of the rotated x, whose own amax counts, in blocks of 1 x 16: an operand of grad_weight. K is filled up."""
    return quantize(hadamard.rotate(x_MK, block), 1, key=key)


def quantize_eden(x_MK: Tensor, block: int, rotation: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed codes, block scales and scale, as `quantize` does, of x rotated by the signs of `rotation`: MS-EDEN.

    block: elements of a rotation, a multiple of 16; K is filled up to whole ones. rotation, key: int32 [2] each, of the signs and
    of the draws that round block scales, one for each place of the [M, C] scales.
    """
    y_MK = hadamard.rotate_drawn(x_MK, block, rotation)
    M, K = y_MK.shape
    y_RrCc = _blocks(y_MK, 1).float()
    block_amax_RC = tile_amax(y_MK, 1, COLUMNS)
    amax = (block_amax_RC.amax() if y_MK.numel() else block_amax_RC.new_zeros(())).view(1, 1)
    bound = EDEN_REACH * 256
    encode = _encode_scale(amax, bound)
    scales_RC = _block_scale(block_amax_RC * (encode * (1 / EDEN_REACH)), block_amax_RC)
    nibbles_RrCc = fp4.encode(_divided(y_RrCc, scales_RC, encode))
    rounded_RrCc = fp4.decode(nibbles_RrCc).float() * _over_blocks(values(scales_RC).float())  # exact
    y_RrCc *= encode
    length_RC, kept_RC = _row_sums(y_RrCc * y_RrCc)[:, 0], _row_sums(y_RrCc * rounded_RrCc)[:, 0]
    corrected_RC = values(scales_RC).float() * torch.where(kept_RC == 0, 1.0, length_RC / kept_RC)
    drawn_RC = round_stochastic(corrected_RC.clamp(max=E4M3.max), E4M3, key).to(torch.float8_e4m3fn)
    return fp4.pack(_joined(nibbles_RrCc, M, K)), drawn_RC, _decode_scale(amax, bound)


def dequantize(
    packed: Tensor, scales_RC: Tensor, scale: Tensor, rows: int, columns: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return q S_blk scale [M, columns]: one product in float32 (the first is exact), rounded to `dtype`."""
    return factors(packed, scales_RC, rows, columns).float().mul_(scale).to(dtype)


def factors(packed: Tensor, scales_RC: Tensor, rows: int, columns: int) -> Tensor:
    """Return q S_blk in bfloat16 [M, columns], exactly: operands of a product to which the two tensors' scales are applied
    afterwards."""
    q_MK = fp4.decode_packed(packed, columns).contiguous()
    return times_tiles_(q_MK, values(scales_RC), rows, COLUMNS)


def _blocks(x_MK: Tensor, rows: int) -> Tensor:
    """Return [R, rows, C, 16]; edges padded with zeros, which change neither an amax nor an error."""
    M, K = x_MK.shape
    R, C = -(-M // rows), -(-K // COLUMNS)
    if M % rows or K % COLUMNS:
        x_MK = torch.nn.functional.pad(x_MK, (0, C * COLUMNS - K, 0, R * rows - M))
    return x_MK.reshape(R, rows, C, COLUMNS)


def _joined(x_RrCc: Tensor, M: int, K: int) -> Tensor:
    """Undoes `_blocks`."""
    return x_RrCc.flatten(2).flatten(0, 1)[:M, :K].contiguous()


def _encode_scale(amax: Tensor, bound: float) -> Tensor:
    """Return S_enc, by which `amax` becomes `bound`."""
    encode = torch.div(torch.full_like(amax, bound), amax).clamp(max=FLT_MAX)
    return torch.where((amax == 0) | (encode == 0), 1.0, encode)


def _decode_scale(amax: Tensor, bound: float) -> Tensor:
    """Return the scale of the tensor; NaN where its amax is not finite."""
    # amax - amax: an infinite amax gives NaN too
    return torch.div(amax, torch.full_like(amax, bound)).clamp(min=2.0**-128) + (amax - amax)


def _over_blocks(scales_RC: Tensor) -> Tensor:
    return scales_RC[:, None, :, None]


def _block_scale(wanted_RC: Tensor, block_amax_RC: Tensor) -> Tensor:
    """Return the scale rounded to E4M3; NaN where the block's amax is not finite."""
    return (wanted_RC.clamp(max=E4M3.max) + (block_amax_RC - block_amax_RC)).to(torch.float8_e4m3fn)


def _divided(x_RrCc: Tensor, scales_RC: Tensor, encode: Tensor) -> Tensor:
    """Return x over the decode scale S_blk / S_enc."""
    inverse_RC = (values(scales_RC).float() * encode.reciprocal()).reciprocal_().clamp_(max=FLT_MAX)
    return x_RrCc * _over_blocks(inverse_RC)


def _error(x_RrCc: Tensor, scales_RC: Tensor, encode: Tensor, amax: Tensor, kind: ErrorOf) -> Tensor:
    """Return the sum of the errors of each block, [R, C], in float32 and in this order: along a row from left to right; of the rows
    of a tile 0-7 and 8-15 are added, and so on by halves. Squares may overflow or vanish; then neither is strictly smaller."""
    q_RrCc = fp4.decode(fp4.encode(_divided(x_RrCc, scales_RC, encode))).float()
    # amax before 1/1536, as TransformerEngine decodes here
    q_RrCc *= _over_blocks(values(scales_RC).float() * amax * (1 / (E2M1.max * 256)))
    error = q_RrCc.sub_(x_RrCc)
    sums = _row_sums(error.square_() if kind == "mse" else error.abs_())
    while sums.shape[1] > 1:
        low, high = sums.chunk(2, dim=1)
        sums = low + high
    return sums[:, 0]


def _row_sums(x_RrCc: Tensor) -> Tensor:
    """Return the sum of each row of each block, from left to right, [R, r, C]."""
    sums = x_RrCc[..., 0].clone()
    for column in range(1, COLUMNS):
        sums += x_RrCc[..., column]
    return sums
