"""E2M1 in Triton: tiles encoded, decoded, packed, bit for bit as the reference."""
# mypy: allow-untyped-decorators

import torch
import triton
import triton.language as tl

from surokit.kernels.reference import fp4 as reference
from surokit.kernels.triton.fp4 import decode_nibbles, encode_nibbles, pack_pairs, unpack_pairs
from tests.kernels.interpreter import DEVICE


@triton.jit
def encode_kernel(x, y, M: tl.constexpr, K: tl.constexpr):
    row = tl.arange(0, M)[:, None]
    tl.store(
        y + row * (K // 2) + tl.arange(0, K // 2)[None, :],
        pack_pairs(encode_nibbles(tl.load(x + row * K + tl.arange(0, K)[None, :]))),
    )


@triton.jit
def decode_kernel(x, y, M: tl.constexpr, K: tl.constexpr):
    row = tl.arange(0, M)[:, None]
    nibbles = unpack_pairs(tl.load(x + row * (K // 2) + tl.arange(0, K // 2)[None, :]))
    tl.store(y + row * K + tl.arange(0, K)[None, :], decode_nibbles(nibbles))


def test_encode_and_pack():
    midpoints = torch.tensor(
        [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 1e-45, 3e38]
    )
    inf = torch.tensor(float("inf"))
    x = torch.cat([midpoints, midpoints.nextafter(inf), midpoints.nextafter(-inf), inf.view(1), torch.randn(200) * 3])
    x = torch.cat([x, -x, torch.tensor([float("nan")])])
    x = torch.cat([x, x.new_zeros(1024 - x.numel())]).view(16, 64)
    packed = torch.empty(16, 32, dtype=torch.uint8, device=DEVICE)
    encode_kernel[(1,)](x.to(DEVICE), packed, M=16, K=64)
    assert torch.equal(packed.cpu(), reference.pack(reference.encode(x)))


def test_every_byte_unpacks_and_decodes():
    packed = torch.arange(256, dtype=torch.uint8).view(4, 64)
    y = torch.empty(4, 128, device=DEVICE)
    decode_kernel[(1,)](packed.to(DEVICE), y, M=4, K=128)
    expected = reference.decode(reference.unpack(packed, 128)).float()
    assert torch.equal(y.cpu().view(torch.int32), expected.view(torch.int32))  # the sign of zero too
