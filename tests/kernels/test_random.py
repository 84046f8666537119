"""Random bits against the same hash in numpy's unsigned integers; their draws are uniform, and keys and positions matter."""

import numpy as np
import pytest
import torch

from surokit.kernels.reference import random

KEYS = [(0, 0), (1, 2), (-1, 2**31 - 1), (-(2**31), 12345)]


def key(pair):
    return torch.tensor(pair, dtype=torch.int32)


def hashed(n, pair):
    key0, key1 = (np.uint32(k & 0xFFFFFFFF) for k in pair)
    x = np.arange(n, dtype=np.uint32) ^ key0
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = x ^ key1
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


@pytest.mark.parametrize("pair", KEYS)
@pytest.mark.parametrize("n", [0, 1, 1000, 70_001])
def test_bits_and_draws_equal_unsigned_arithmetic(pair, n):
    expected = hashed(n, pair)
    bits = random.bits(n, key(pair))
    assert bits.dtype == torch.int32
    assert np.array_equal(bits.numpy().view(np.uint32), expected)
    draws = random.uniform((n,), key(pair))
    assert draws.dtype == torch.float32
    assert np.array_equal(draws.numpy(), (expected >> 8).astype(np.float64) * 2.0**-24)


@pytest.mark.parametrize("pair", KEYS)
def test_draws_are_uniform(pair):
    n, bins = 2**18, 64
    draws = random.uniform((n,), key(pair)).double()
    assert draws.min() >= 0
    assert draws.max() < 1
    assert abs(draws.mean() - 0.5) < 4 * (1 / 12 / n) ** 0.5
    counts = torch.histc(draws, bins, 0, 1)
    chi2 = ((counts - n / bins) ** 2 / (n / bins)).sum()
    assert abs(chi2 - (bins - 1)) < 5 * (2 * (bins - 1)) ** 0.5
    ones = (random.bits(n, key(pair))[:, None] >> torch.arange(32)) & 1  # each bit by itself
    assert ((ones.double().mean(0) - 0.5).abs() < 5 * 0.5 / n**0.5).all()
    neighbours = torch.corrcoef(torch.stack((draws[:-1], draws[1:])))[0, 1]
    assert abs(neighbours) < 5 / n**0.5


def test_keys_draw_independently():
    """Of drawn keys; two that differ in a few bits of their second half only (a counter, say) are correlated."""
    n, source = 2**16, torch.Generator().manual_seed(0)
    draws = torch.stack([random.uniform((n,), random.new_key(torch.device("cpu"), source)) for _ in range(24)])
    correlation = torch.corrcoef(torch.cat((draws, draws.roll(1, 1))).double()) - torch.eye(2 * len(draws))
    assert correlation.abs().max() < 5 / n**0.5
    assert all((a == b).float().mean() < 0.001 for i, a in enumerate(draws) for b in draws[:i])


def test_positions_count_in_row_major_order():
    pair = key((3, 4))
    assert torch.equal(random.uniform((7, 11), pair), random.uniform((77,), pair).view(7, 11))
    assert torch.equal(random.uniform((77,), pair)[:30], random.uniform((30,), pair))
    assert random.uniform((0, 5), pair).shape == (0, 5)


def test_new_keys_follow_their_generator():
    first, second = (random.new_key(torch.device("cpu"), torch.Generator().manual_seed(s)) for s in (1, 2))
    again = random.new_key(torch.device("cpu"), torch.Generator().manual_seed(1))
    assert first.dtype == torch.int32
    assert first.shape == (2,)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert not torch.equal(random.new_key(torch.device("cpu")), random.new_key(torch.device("cpu")))
