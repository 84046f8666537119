"""The rotation in Triton: against float64, its own inverse, and the layouts that projections give."""

import pytest
import torch

from surokit.kernels.reference import rope as reference
from surokit.kernels.triton import rope as kernels
from tests.kernels.compiling import ANY, Launches, matrix
from tests.kernels.interpreter import DEVICE
from tests.refusals import refused

pytestmark = pytest.mark.sampled

LAUNCHES: Launches = {
    "heads": (ANY, lambda: kernels.rotate(matrix(64, 2048).view(2, 32, 16, 128), matrix(32, 64), matrix(32, 64))),
    "back": (ANY, lambda: kernels.rotate(matrix(64, 2048).view(2, 32, 16, 128), matrix(32, 64), matrix(32, 64), True)),
}


def inputs(shape, dtype, batched=False, scale=1.0):
    generator = torch.Generator().manual_seed(shape[-1])
    B, T, _, D = shape
    x = torch.randn(shape, generator=generator).mul(scale).to(DEVICE, dtype)
    angle = torch.randn((B, T, D // 2) if batched else (T, D // 2), generator=generator)
    return x, angle.cos().to(DEVICE, dtype), angle.sin().to(DEVICE, dtype)


@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (2, 5, 3, 8), (1, 3, 4, 64), (1, 2, 40, 128), (2, 3, 2, 6)])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e-30, 1e30])
def test_rotation_and_back(shape, batched, dtype, scale):
    x, cos, sin = inputs(shape, dtype, batched, scale)
    before = x.clone()
    tolerance = 1e-6 if dtype == torch.float32 else 5e-3
    for back in (False, True):
        y = kernels.rotate(x, cos, sin, back)
        exact = reference.rotate(x.double(), cos.double(), sin.double(), back)
        assert y.dtype == dtype
        assert y.is_contiguous()
        assert (y.double() - exact).norm() <= tolerance * exact.norm()
    assert torch.equal(x, before)


def test_layouts_need_no_particular_strides():
    x, cos, sin = inputs((2, 6, 4, 16), torch.bfloat16)
    expected = kernels.rotate(x, cos, sin)
    fused = torch.cat((x, x, x), 2)[:, :, 4:8]  # cut out of q, k, v
    transposed = x.transpose(1, 2).contiguous().transpose(1, 2)
    scattered = x.transpose(0, 3).contiguous().transpose(0, 3)  # elements of a head far apart: copied first
    for layout in (fused, transposed, scattered):
        assert not layout.is_contiguous()
        assert torch.equal(kernels.rotate(layout, cos, sin), expected)
    wide_cos, wide_sin = (torch.cat((t, t), 1)[:, :8] for t in (cos, sin))
    assert torch.equal(kernels.rotate(x, wide_cos, wide_sin), expected)
    assert torch.equal(kernels.rotate(x, cos[None], sin.expand(2, 6, 8)), expected)
    assert kernels.rotate(x[:0], cos, sin).shape == (0, 6, 4, 16)
    assert kernels.rotate(x[:, :0], cos[:0], sin[:0]).shape == (2, 0, 4, 16)


@pytest.mark.parametrize("cos_shape", [(5, 8), (6, 7), (3, 6, 8), (8,), (1, 1, 6, 8)])
def test_tables_of_another_shape(cos_shape):
    x, _, sin = inputs((2, 6, 4, 16), torch.float32)
    with refused(ValueError):
        kernels.rotate(x, torch.ones(cos_shape, device=DEVICE), sin)


def test_float64_is_refused():
    x, cos, sin = inputs((1, 2, 1, 4), torch.float64)
    with refused(TypeError):
        kernels.rotate(x, cos, sin)
