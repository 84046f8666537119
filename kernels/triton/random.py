"""Draw the random bits of kernels/reference/random.py inside a kernel: from a position and a key, without any state.

x = index ^ key0;  x ^= x >>> 16;  x *= 0x7FEB352D;  x ^= key1;  x ^= x >>> 15;  x *= 0x846CA68B;  x ^= x >>> 16
"""

import triton
import triton.language as tl


@triton.jit
def random_bits(index, key0, key1):
    """Draw 32 random bits (uint32) for each position. index: any integers, of which the low 32 bits count; key: two int32."""
    x = index.to(tl.uint32) ^ key0.to(tl.uint32, bitcast=True)
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= key1.to(tl.uint32, bitcast=True)
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def random_uniform(index, key0, key1):
    """Draw float32 numbers in [0, 1) from the upper 24 random bits."""
    return (random_bits(index, key0, key1) >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
