"""Handle E2M1 in kernels: encode, decode, pack and unpack on tiles. See kernels/reference/fp4.py.

Nibbles are int32 tiles with values 0 .. 15 (sign, then magnitude); two neighbours of the last dimension share a byte, the even
one in the low nibble.
"""

import triton
import triton.language as tl


@triton.jit
def encode_nibbles(y):
    """Encode float32 numbers as nibbles: to nearest even, saturating, sign of zero kept; a NaN gets magnitude 7."""
    magnitude = tl.abs(y)
    # Each midpoint of two neighbours that is not passed takes one from the largest code. Ties go to the even code.
    code = 7 - (magnitude <= 0.25).to(tl.int32) - (magnitude < 0.75).to(tl.int32)
    code = code - (magnitude <= 1.25).to(tl.int32) - (magnitude < 1.75).to(tl.int32)
    code = code - (magnitude <= 2.5).to(tl.int32) - (magnitude < 3.5).to(tl.int32)
    code = code - (magnitude <= 5.0).to(tl.int32)
    return code | (y.to(tl.int32, bitcast=True) >> 28) & 8


@triton.jit
def decode_nibbles(nibbles):
    """Decode nibbles to float32: place exponent and mantissa in float32's fields, then multiply by 2^(127 - 1)."""
    bits = (nibbles & 7) << 22 | (nibbles & 8) << 28
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def pack_pairs(nibbles):
    """Pack nibbles [A, 2B] into bytes [A, B] (uint8)."""
    even, odd = tl.split(tl.reshape(nibbles, (nibbles.shape[0], nibbles.shape[1] // 2, 2)))
    return (even | odd << 4).to(tl.uint8)


@triton.jit
def unpack_pairs(packed):
    """Unpack bytes [A, B] into nibbles [A, 2B] (int32)."""
    packed = packed.to(tl.int32)
    return tl.reshape(tl.join(packed & 15, packed >> 4), (packed.shape[0], packed.shape[1] * 2))
