"""The rotation: against complex multiplication, and its own inverse."""

import pytest
import torch

from surokit.kernels.reference import rope


@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (2, 5, 3, 8), (1, 9, 4, 64)])
@pytest.mark.parametrize("batched", [False, True])
def test_rotation_is_complex_multiplication(shape, batched):
    torch.manual_seed(0)
    B, T, _, D = shape
    x = torch.randn(shape, dtype=torch.float64)
    angle = torch.randn((B, T, D // 2) if batched else (T, D // 2), dtype=torch.float64)
    y = rope.rotate(x, angle.cos(), angle.sin())
    z = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle).unsqueeze(-2)
    torch.testing.assert_close(y, torch.cat((z.real, z.imag), -1))
    torch.testing.assert_close(rope.rotate(y, angle.cos(), angle.sin(), back=True), x)


def test_strided_input_and_bfloat16():
    torch.manual_seed(0)
    x = torch.randn(2, 4, 6, 16).transpose(1, 2)
    angle = torch.randn(6, 8)
    exact = rope.rotate(x, angle.cos(), angle.sin())
    assert torch.equal(exact, rope.rotate(x.contiguous(), angle.cos(), angle.sin()))
    low = rope.rotate(x.bfloat16(), angle.cos().bfloat16(), angle.sin().bfloat16())
    assert low.dtype == torch.bfloat16
    assert low.is_contiguous()
    assert (low.float() - exact).norm() < 5e-3 * exact.norm()
