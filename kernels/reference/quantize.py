"""Quantize and dequantize with one scale for each tile: the definition in plain PyTorch.

Every scaling of an 8-bit format is a tiling of the operand: the whole tensor, a row, or a block of rows x columns. So there
is one implementation: take the largest magnitude of each tile, make a scale from it, multiply, clamp, cast.

Two scales with one meaning each: the *encode* scale multiplies x before the cast, the *decode* scale multiplies the codes
afterwards. Tensors named `scale` are encode scales, `scale_inv` decode scales, both float32.

Shapes: M rows, K columns (K is the dimension that a product contracts), R x C the grid of tiles.

Sources: NVIDIA TransformerEngine's current, delayed and block scaling (a zero amax gives scale 1) and torchao's
ROWWISE recipe (power-of-two scales, amax not below 1e-12).
"""

from __future__ import annotations

import torch
from torch import Tensor

from surokit.formats import E4M3, E5M2, Format

from .random import uniform

DTYPES: dict[Format, torch.dtype] = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
FLT_MAX = torch.finfo(torch.float32).max


def quantize(
    x_MK: Tensor,
    format: Format,
    rows: int = 0,
    columns: int = 0,
    pow2: bool = False,
    amax: Tensor | None = None,
    floor: float = 0.0,
    key: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the codes [M, K] in the format's dtype and decode scales [R, C] float32, which lie in memory as those of
    `empty_scales`.

    rows, columns: of a tile, 0 for the whole extent. pow2: scales are powers of two. amax [R, C]: used instead of the
    tiles' own. floor: the least amax that counts. key: int32 [2], rounds stochastically with its draws; None: to nearest even.
    """
    if amax is None:
        amax = _amax(x_MK, rows, columns)
    scale = encode_scale(amax, format, pow2, floor)
    scale_inv = empty_scales(x_MK, rows, columns).copy_(decode_scale(scale, amax))
    return encode(x_MK, scale, format, rows, columns, key), scale_inv


def quantize_both(
    x_MK: Tensor, format: Format, rows: int = 0, columns: int = 0, pow2: bool = False, floor: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return quantize(x) and quantize(x'), each as codes and decode scales: [M, K], [R, C], [K, M], [R', C']."""
    given = format, rows, columns, pow2, None, floor
    return *quantize(x_MK, *given), *quantize(x_MK.t(), *given)


def empty_scales(x_MK: Tensor, rows: int, columns: int) -> Tensor:
    """Decode scales [R, C] to be filled. Those of parts of a row lie column by column, as tensor cores read them."""
    R, C = grid_of_tiles(x_MK, rows, columns)
    if rows == 1 and C > 1:
        return x_MK.new_empty((C, R), dtype=torch.float32).t()
    return x_MK.new_empty((R, C), dtype=torch.float32)


def grid_of_tiles(x_MK: Tensor, rows: int, columns: int) -> tuple[int, int]:
    """Return the tiles [R, C] that cover a matrix, 0 standing for the whole extent."""
    M, K = x_MK.shape
    return (M + rows - 1) // rows if rows else 1, (K + columns - 1) // columns if columns else 1


def tile_shape(x_MK: Tensor, rows: int, columns: int) -> tuple[int, int]:
    """Return the rows and columns of a tile, 0 standing for the whole extent."""
    return rows or max(1, x_MK.shape[0]), columns or max(1, x_MK.shape[1])


def _tiles(x_MK: Tensor, rows: int, columns: int) -> Tensor:
    """Return a view [R, rows, C, columns]; edges padded with zeros, which never change an amax."""
    M, K = x_MK.shape
    rows, columns = tile_shape(x_MK, rows, columns)
    if M % rows or K % columns:
        x_MK = torch.nn.functional.pad(x_MK, (0, -K % columns, 0, -M % rows))
    return x_MK.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))


def amax(x_MK: Tensor, rows: int = 0, columns: int = 0) -> Tensor:
    """Return the largest magnitude of each tile, float32 [R, C]; NaN where a tile holds one."""
    if x_MK.numel() == 0:
        M, K = x_MK.shape
        grid = -(-M // rows) if rows else 1, -(-K // columns) if columns else 1
        return x_MK.new_zeros(grid, dtype=torch.float32)
    if rows == 0 and columns == 0:
        low, high = torch.aminmax(x_MK)  # one pass and no temporary
        return torch.maximum(-low, high).abs().float().view(1, 1)  # zeros have no sign in an amax
    # floats without their signs are in the order of their bits, NaN last, and torch takes the maximum of integers in a sixth of
    # the time
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x_MK.element_size()]
    magnitude = x_MK.view(whole).bitwise_and(torch.iinfo(whole).max)
    tiles_RrCc = _tiles(magnitude, rows, columns)
    rows_RCc = tiles_RrCc[:, 0] if rows == 1 else tiles_RrCc.amax(dim=1)
    return rows_RCc.amax(dim=-1).contiguous().view(x_MK.dtype).float()


def encode_scale(amax_RC: Tensor, format: Format, pow2: bool, floor: float = 0.0) -> Tensor:
    """Return format.max / amax, float32. A zero or infinite amax gives 1 (or FLT_MAX where the division overflows).

    `floor` is the least amax that counts. `pow2` rounds the scale down to a power of two, so that scaling is exact.
    """
    amax_RC = amax_RC.clamp(min=floor) if floor else amax_RC
    # torch.div and not `format.max / tensor`: the latter multiplies by a reciprocal and differs in the last bit
    scale_RC = torch.div(torch.full_like(amax_RC, format.max), amax_RC)
    scale_RC = scale_RC.clamp(max=FLT_MAX)
    if pow2:
        scale_RC = round_down_to_power_of_two(scale_RC)
    usable = (amax_RC > 0) & (amax_RC < float("inf"))
    return torch.where(usable | amax_RC.isnan(), scale_RC, 1.0)


def round_down_to_power_of_two(x: Tensor) -> Tensor:
    """Clear the sign and the mantissa bits of normal float32 numbers: 2^floor(log2 |x|); 0 of subnormal ones, inf of NaN."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def decode_scale(scale_RC: Tensor, amax_RC: Tensor) -> Tensor:
    """Return the reciprocal, rounded once; NaN where the amax is infinite, so that an inf never becomes a plausible number."""
    return torch.reciprocal(scale_RC) + (amax_RC - amax_RC)


def spread(scale_RC: Tensor, like_MK: Tensor, rows: int, columns: int) -> Tensor:
    """Broadcast tile scales so that they multiply `like_MK`; stays [1, 1], [M, 1] or [1, K] where that suffices."""
    M, K = like_MK.shape
    rows, columns = tile_shape(like_MK, rows, columns)
    if rows > 1 and scale_RC.shape[0] > 1:
        scale_RC = scale_RC.repeat_interleave(rows, 0)[:M]
    if columns > 1 and scale_RC.shape[1] > 1:
        scale_RC = scale_RC.repeat_interleave(columns, 1)[:, :K]
    return scale_RC


_amax = amax  # a parameter of `quantize` has the same name


def encode(
    x_MK: Tensor, scale_RC: Tensor, format: Format, rows: int = 0, columns: int = 0, key: Tensor | None = None
) -> Tensor:
    """Return the codes [M, K] in the format's dtype: x * scale, clamped to the format's range, rounded to nearest even (or
    stochastically).

    The clamp comes first because casts to float8 do not saturate in every torch version. NaN stays NaN.
    """
    y_MK = x_MK.float() * spread(scale_RC, x_MK, rows, columns)
    y_MK = y_MK.clamp_(-format.max, format.max)
    if key is not None:
        y_MK = round_stochastic(y_MK, format, key)
    return y_MK.to(DTYPES[format]).contiguous()


def round_stochastic(y: Tensor, format: Format, key: Tensor) -> Tensor:
    """Round in-range float32 numbers up or down with P(up) = (|y| - low) / (high - low): unbiased. NaN stays NaN."""
    step = round_down_to_power_of_two(y).clamp_(min=format.min_normal).mul_(2.0**-format.mantissa_bits)
    steps = y.abs().div_(step)  # a power of two: exact
    rounded = steps.add_(uniform(y.shape, key)).floor_().mul_(step)
    return rounded.clamp_(max=format.max).copysign_(y)


def decode(
    codes_MK: Tensor, scale_inv_RC: Tensor, rows: int = 0, columns: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return codes * scale_inv in float32, rounded to `dtype`. Exact in bfloat16 where the scales are powers of two."""
    return times_tiles_(values(codes_MK).float(), scale_inv_RC, rows, columns).to(dtype)


def times_tiles_(y_MK: Tensor, scale_RC: Tensor, rows: int, columns: int) -> Tensor:
    """Return y times `spread` of the scales, in place; scales are not written out for every row of their tiles."""
    rows, columns = tile_shape(y_MK, rows, columns)
    scale_RK = spread(scale_RC, y_MK, 1, columns)
    if rows == 1 or len(scale_RC) == 1:
        return y_MK.mul_(scale_RK)
    full = len(y_MK) // rows
    y_MK[: full * rows].unflatten(0, (full, rows)).mul_(scale_RK[:full, None])
    y_MK[full * rows :].mul_(scale_RK[full:])
    return y_MK


def values(codes: Tensor) -> Tensor:
    """Return the codes' own values in bfloat16, exactly (8 exponent and 7 mantissa bits hold both float8 formats).

    On a CPU torch converts float8 one element at a time; moving the bits as int16 takes a third of the time and gives the
    same numbers for all 256 codes.
    """
    if codes.device.type != "cpu":
        return codes.to(torch.bfloat16)
    bits = codes.view(torch.int8).to(torch.int16)  # sign-extended
    if codes.dtype == torch.float8_e5m2:
        return bits.bitwise_left_shift_(8).view(torch.float16).to(torch.bfloat16)
    # sign, and the seven bits of exponent and mantissa in the low end of bfloat16's exponent
    bits.bitwise_left_shift_(4).bitwise_and_(-0x7810)
    # NaN is all ones: adding one carries into bit 11, and fifteen times that bit fills the exponent
    carry = bits.add(0x10).bitwise_and_(0x800)
    # 2^(127 - 7) restores the bias, subnormals included
    return bits.add_(carry, alpha=15).view(torch.bfloat16).mul_(2.0**120)
