"""The rotation against its definition in float64 and the golden vectors; it is orthogonal, and `back` undoes it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from surokit.kernels.reference import hadamard, random

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "nvfp4_rht.safetensors")
CASES = sorted(n.removesuffix(".rotated") for n in GOLDEN if n.endswith(".rotated"))


def exact(x, block):
    """diag(s) H / sqrt(b) entry by entry: H has -1 where row and column share an odd number of bits."""
    signs = hadamard.SIGNS * (block // 16)
    matrix = torch.tensor(
        [[signs[i] * (-1) ** (i & j).bit_count() for j in range(block)] for i in range(block)], dtype=torch.float64
    )
    x = torch.nn.functional.pad(x.double(), (0, -x.shape[1] % block))
    return (x.view(-1, block) @ matrix / block**0.5).view(x.shape)


@pytest.mark.parametrize("name", CASES)
def test_golden_vectors(name):
    x = GOLDEN[f"{name.split('.')[0]}.input"]
    rotated = hadamard.rotate(x.t(), 16)
    assert torch.equal(rotated.view(torch.int16), GOLDEN[f"{name}.rotated"].view(torch.int16))


def test_signs_and_matrix_are_those_of_the_vectors():
    signs = next(v for n, v in GOLDEN.items() if n.endswith("signs"))
    matrix = next(v for n, v in GOLDEN.items() if n.endswith("matrix"))
    assert tuple(signs.tolist()) == hadamard.SIGNS
    assert torch.equal(hadamard.rotate(torch.eye(16), 16), matrix)


@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("shape", [(0, 16), (1, 1), (3, 32), (5, 70), (33, 16)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_definition_and_inverse(block, shape, dtype, size):
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * size).to(dtype)
    before = x.clone()
    y = hadamard.rotate(x, block)
    assert y.dtype == dtype
    assert y.shape == (shape[0], -(-shape[1] // block) * block)
    expected = exact(x, block)
    scale = x.abs().double().max().item() if x.numel() else 0.0
    eps = torch.finfo(dtype).eps
    least = torch.finfo(dtype).smallest_normal * eps
    # one rounding of the result, and sums in float32 or better
    assert (
        (y.double() - expected).abs() <= 0.5 * (eps * expected.abs() + least) + min(block * eps, 1e-6) * scale
    ).all()
    back = hadamard.rotate(y, block, back=True)[:, : shape[1]]
    assert ((back.double() - x.double()).abs() <= 4 * (eps * scale + least) * block**0.5).all()
    assert torch.equal(x, before)


@pytest.mark.parametrize("block", [16, 32])
def test_bfloat16_is_rounded_once(block):
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert (hadamard.rotate(x, block) == exact(x, block).bfloat16()).double().mean() > 0.999


def test_a_product_does_not_change():
    a, b = (torch.randn(7, 48, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in (1, 2))
    torch.testing.assert_close(hadamard.rotate(a, 16) @ hadamard.rotate(b, 16).t(), a @ b.t(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [0.0, -0.0, 1e30, 1e37, 1e-37])
def test_ends_of_the_range(size):
    x = torch.full((2, 32), size).bfloat16()
    y = hadamard.rotate(x, 16)
    torch.testing.assert_close(y.double(), exact(x, 16), rtol=2**-8, atol=0)
    assert not y[y == 0].signbit().any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_block(bad):
    x = torch.ones(2, 32)
    x[1, 3] = bad
    finite = hadamard.rotate(x, 16).isfinite()
    assert not finite[1, :16].any()
    assert finite[0].all()
    assert finite[1, 16:].all()


def test_non_contiguous():
    x = torch.randn(32, 9).t()
    assert torch.equal(hadamard.rotate(x, 16), hadamard.rotate(x.contiguous(), 16))


KEYS = [torch.tensor([7, -8], dtype=torch.int32), torch.tensor([1, 2**31 - 1], dtype=torch.int32)]


@pytest.mark.parametrize("key", KEYS, ids=["one", "other"])
def test_drawn_signs_are_the_highest_bits_of_draws(key):
    signs = hadamard.drawn_signs(128, key)
    drawn = random.uniform((128,), key)
    assert torch.equal(signs, torch.where(drawn >= 0.5, -1, 1))
    assert 40 < (signs == 1).sum() < 88


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_rotation_by_drawn_signs_is_that_of_the_signed_rows(dtype):
    a = torch.randn(7, 300, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    key = KEYS[0]
    y = hadamard.rotate_drawn(a, 128, key)
    assert y.shape == (7, 384)
    assert y.dtype == dtype
    signed = torch.nn.functional.pad(a, (0, 84)).double().view(-1, 128) * hadamard.drawn_signs(128, key)
    H = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(128)] for i in range(128)], dtype=torch.float64)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), (signed @ H / 128**0.5).view(7, 384), rtol=4 * eps, atol=8 * eps)
    back = hadamard.rotate_drawn(y, 128, key, back=True)[:, :300]
    torch.testing.assert_close(back.double(), a.double(), rtol=0.0, atol=32 * eps)
    b = torch.randn(5, 300, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)
    if dtype == torch.float64:
        torch.testing.assert_close(y @ hadamard.rotate_drawn(b, 128, key).t(), a @ b.t(), rtol=1e-12, atol=1e-12)
        assert not torch.allclose(y @ hadamard.rotate_drawn(b, 128, KEYS[1]).t(), a @ b.t(), rtol=0.1)
