"""E2M1 against ml_dtypes: every bfloat16, every boundary in float32; packing and transposing against plain indexing."""

import ml_dtypes
import numpy as np
import pytest
import torch

from surokit.kernels.reference import fp4

SIGNED = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
INF = float("inf")


def cast(y):
    """Nibbles as ml_dtypes casts; it does not saturate by itself."""
    return np.clip(y.numpy(), -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)


def around(y):
    """Each number with its float32 neighbours, and the same negated."""
    y = torch.tensor(y)
    y = torch.cat((torch.nextafter(y, torch.tensor(-INF)), y, torch.nextafter(y, torch.tensor(INF))))
    return torch.cat((y, -y))


@pytest.mark.parametrize(
    "y",
    [
        torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float(),
        around([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.5, 1.0, 2.0, 4.0, 6.0]),
        torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 3,
        torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-38, 7.0, -3e38, INF, -INF]),
    ],
    ids=["every bfloat16", "boundaries", "normal", "extremes"],
)
def test_encoding_equals_ml_dtypes(y):
    y = y[~y.isnan()]
    assert np.array_equal(fp4.encode(y).numpy(), cast(y))


def test_decoding_gives_the_sixteen_values_exactly():
    values = fp4.decode(torch.arange(16, dtype=torch.uint8))
    assert values.dtype == torch.bfloat16
    assert torch.equal(values.view(torch.int16), torch.tensor(SIGNED, dtype=torch.bfloat16).view(torch.int16))
    assert torch.equal(fp4.encode(values.float()), torch.arange(16, dtype=torch.uint8))
    theirs = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert np.array_equal(values.float().numpy(), theirs)


def test_nan_has_the_largest_magnitude_and_never_becomes_zero():
    nibbles = fp4.encode(torch.tensor([float("nan"), -float("nan")]))
    assert (nibbles & 7).tolist() == [7, 7]
    assert (fp4.encode(torch.tensor([float("nan")]), torch.tensor([1, 2], dtype=torch.int32)) & 7).tolist() == [7]


@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (3, 1), (1, 2), (5, 7), (4, 8), (33, 70)])
def test_packing_puts_the_even_element_low(shape):
    M, K = shape
    nibbles = torch.randint(16, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    packed = fp4.pack(nibbles)
    assert packed.shape == (M, (K + 1) // 2)
    full = torch.zeros(M, K + K % 2, dtype=torch.uint8)
    full[:, :K] = nibbles
    assert packed.tolist() == [[row[i] + 16 * row[i + 1] for i in range(0, K, 2)] for row in full.tolist()]
    assert torch.equal(fp4.unpack(packed, K), nibbles)
    turned = fp4.transpose(packed, K)
    assert turned.shape == (K, (M + 1) // 2)
    assert turned.is_contiguous()
    assert torch.equal(turned, fp4.pack(nibbles.t()))
    assert torch.equal(fp4.unpack(turned, M), nibbles.t())


def test_packing_a_strided_matrix():
    nibbles = torch.randint(16, (9, 12), dtype=torch.uint8)[::2, 1::3]
    assert torch.equal(fp4.unpack(fp4.pack(nibbles), 4), nibbles)


@pytest.mark.parametrize("y", [0.0, -0.0, 0.1, -0.3, 0.5, 0.9, 1.3, -1.75, 2.01, 2.9, -3.7, 4.0, 5.9, 6.0, -1e-3])
def test_stochastic_rounding_is_unbiased(y):
    n = 20_000
    key = torch.tensor([5, 6], dtype=torch.int32)
    nibbles = fp4.encode(torch.full((n,), y), key)
    values = fp4.decode(nibbles).double()
    low = max(v for v in SIGNED[:8] if v <= abs(y))
    high = min(v for v in SIGNED[:8] if v >= abs(y))
    assert set(values.abs().unique().tolist()) <= {low, high}
    up = (abs(y) - low) / (high - low) if high > low else 0.0
    sigma = (high - low) * (up * (1 - up) / n) ** 0.5
    assert abs(values.mean() - y) <= 4 * sigma + 1e-7
    assert (nibbles >> 3).unique().tolist() == [int(np.signbit(y))]
    assert torch.equal(nibbles, fp4.encode(torch.full((n,), y), key.clone()))
    if 0.01 < up < 0.99:
        assert not torch.equal(nibbles, fp4.encode(torch.full((n,), y), key + 1))


def test_stochastic_rounding_saturates():
    key = torch.tensor([5, 6], dtype=torch.int32)
    assert fp4.encode(torch.tensor([6.1, 1e30, INF, -7.0, -INF]), key).tolist() == [7, 7, 7, 15, 15]


@pytest.mark.parametrize(("M", "K"), [(1, 1), (3, 7), (16, 32), (5, 0)])
def test_packed_codes_decode_to_what_each_alone_does(M, K):
    nibbles = torch.randint(16, (M, K), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed = fp4.pack(nibbles)
    expected = fp4.decode(nibbles)
    assert torch.equal(fp4.decode_packed(packed, K), expected)
    assert fp4.decode_packed(packed, K).signbit().equal(expected.signbit())
    turned = packed.t().contiguous().t()  # any layout
    assert torch.equal(fp4.decode_packed(turned, K), expected)


def test_pairs_are_looked_up_in_either_order():
    values = tuple(float(n) for n in range(16))
    packed = torch.tensor([[0x21, 0xF0]], dtype=torch.uint8)
    for dtype in (torch.float32, torch.bfloat16):
        low = fp4.look_up_pairs(packed, values, dtype)
        assert low.dtype == dtype
        assert low.tolist() == [1, 2, 0, 15]
        assert fp4.look_up_pairs(packed, values, dtype, high_first=True).tolist() == [2, 1, 15, 0]
