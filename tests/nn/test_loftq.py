"""Adapters that begin with what quantizing a weight lost, against torch's singular value decomposition."""

from typing import Any

import pytest
import torch

import surokit as sk
from surokit.nn.linear import Linear
from surokit.nn.loftq import added_up, take_up
from surokit.quantized import quantize
from surokit.recipe import Lora

STORED = {"qfp8": sk.QFP8.storage, "qfp4": sk.QFP4.storage, "qnf4": sk.QNF4.storage}
every_storage = pytest.mark.parametrize("storage", STORED.values(), ids=STORED)


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fitted(error_NK, rank, scale=1.0, dtype=torch.float32):
    """A as a layer has it at first, B zero, and both as they are fitted."""
    N, K = error_NK.shape
    a, b = gaussian(rank, K, seed=9).to(dtype), torch.zeros(N, rank, dtype=dtype)
    return a, b, take_up(error_NK, a, b, scale)


@pytest.mark.parametrize("shape", [(48, 96), (96, 48), (64, 64)], ids=str)
def test_it_is_the_best_approximation_of_its_rank(shape):
    error, rank, scale = gaussian(*shape), 8, 2.0
    a, b, taken = fitted(error, rank, scale)
    U, S, V = torch.linalg.svd(error.double(), full_matrices=False)
    best = U[:, :rank] @ torch.diag(S[:rank]) @ V[:rank]
    torch.testing.assert_close(scale * (b @ a).double(), best, atol=1e-4, rtol=0)
    # a row of A is as long as one that is drawn, and its largest number is positive; B has the rest, alpha / rank divided out
    drawn = Linear(shape[1], 1)
    drawn.add_adapter(Lora(64))
    torch.testing.assert_close(
        drawn.lora_A.weight.norm(dim=1).square().mean(), a.norm(dim=1).square().mean(), rtol=0.1, atol=0
    )
    torch.testing.assert_close(a @ a.t(), torch.eye(rank) / 3, rtol=0, atol=1e-5)
    torch.testing.assert_close(b.norm(dim=0).double(), 3**0.5 * S[:rank] / scale, rtol=1e-4, atol=0)
    assert (a.gather(1, a.abs().argmax(1, keepdim=True)) > 0).all()
    # Eckart and Young: no other matrix of this rank leaves less than the rest of the singular values
    least = float((S[rank:] ** 2).sum())
    assert taken.before == pytest.approx(float((S**2).sum()), rel=1e-5)
    assert taken.after == pytest.approx(least, rel=1e-5)
    assert taken.share == pytest.approx(1 - least / taken.before, rel=1e-5)


def test_small_and_large_errors_are_fitted_alike():
    error = gaussian(32, 48)
    shares = [fitted(error * size, 4)[2].share for size in (1e-15, 1.0, 1e15)]
    assert shares == pytest.approx([shares[1]] * 3, rel=1e-5)


def test_what_the_error_does_not_fill_can_still_learn():
    error = gaussian(32, 3) @ gaussian(3, 48, seed=1)
    before = fitted(torch.zeros(32, 48), 8)
    a, b, taken = fitted(error, 8)
    torch.testing.assert_close(b @ a, error, atol=1e-4, rtol=0)
    assert taken.share == pytest.approx(1, abs=1e-9)
    assert torch.equal(a[3:], before[0][3:])  # as a layer draws it
    assert not b[:, 3:].any()
    assert a.abs().sum(1).all()
    wider = fitted(gaussian(5, 48), 8)  # a rank above the weight's sides
    assert wider[2].share == pytest.approx(1, abs=1e-9)
    assert torch.equal(wider[0][5:], before[0][5:])


@pytest.mark.parametrize("number", [0.0, float("nan"), float("inf")])
def test_an_error_that_is_none_leaves_an_ordinary_adapter(number):
    error = torch.zeros(32, 48)
    error[3, 5] = number
    a, b, taken = fitted(error, 4)
    assert torch.equal(a, gaussian(4, 48, seed=9))
    assert not b.any()
    assert (taken.before, taken.after, taken.share) == (0, 0, 0)


@every_storage
def test_a_layer_comes_nearer_to_its_weight(storage):
    weight = gaussian(96, 128).bfloat16()
    layer: Any = Linear(128, 96, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(weight)
    layer.store(storage)
    codes = [part.clone() for part in layer.stored.parts]
    layer.add_adapter(Lora(16, 8.0), original=weight)
    assert all(torch.equal(p.view(torch.uint8), q.view(torch.uint8)) for p, q in zip(codes, layer.stored.parts))
    assert all(
        torch.equal(p.view(torch.uint8), q.view(torch.uint8)) for p, q in zip(codes, quantize(weight, storage).parts)
    )
    error = weight.double() - layer.stored.dequantize().double()
    delta = 0.5 * layer.lora_B.weight.detach().double() @ layer.lora_A.weight.detach().double()
    S = torch.linalg.svdvals(error)
    least = float((S[16:] ** 2).sum())
    left = float((error - delta).square().sum())
    assert layer.taken_up.after == pytest.approx(left, rel=1e-3)
    assert least <= left < 1.001 * least  # A and B are rounded to bfloat16
    assert 0.4 < layer.taken_up.share < 0.7
    assert layer.lora_A.weight.dtype == layer.lora_B.weight.dtype == torch.bfloat16
    assert layer.lora_A.weight.requires_grad
    # and so do its results
    x = gaussian(64, 128, seed=3).bfloat16()
    plain = x.double() @ weight.double().t()
    with torch.no_grad():
        near = (layer(x).double() - plain).square().sum()
        layer.remove_adapter()
        far = (layer(x).double() - plain).square().sum()
    assert near < 0.7 * far
    assert layer.taken_up is None


def test_several_weights_are_added_up():
    parts = [fitted(gaussian(24, 24, seed=seed), 2)[2] for seed in (1, 2)]
    both = added_up(parts)
    assert both.before == parts[0].before + parts[1].before
    assert min(p.share for p in parts) < both.share < max(p.share for p in parts)
    assert added_up([]).share == 0
