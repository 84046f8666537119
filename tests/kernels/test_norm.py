"""RMSNorm's reference against float64 and torch's own definition."""

import pytest
import torch

from surokit.kernels.reference import norm


@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (700, 512), (3, 4096)])
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e4, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_backward(shape, scale, dtype):
    torch.manual_seed(0)
    x, dy = (torch.randn(shape).mul(s).to(dtype) for s in (scale, 1.0))
    w = torch.randn(shape[1]).to(dtype)
    exact = [t.double().requires_grad_() for t in (x, w)]
    expected = torch.nn.functional.rms_norm(exact[0], (shape[1],), exact[1], 1e-5)
    exact_dx, exact_dw = torch.autograd.grad(expected, exact, dy.double())
    expected = expected.detach()
    y, r = norm.forward(x, w, 1e-5)
    assert y.dtype == dtype
    assert r.dtype == torch.float32
    dx, dw = norm.backward(dy, x, w, r)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    # dx is a difference, and where a row has one element nothing is left of it: measured against its terms
    terms = r.double() * dy.double() * w.double()
    for ours, theirs, size in ((y, expected, expected), (dx, exact_dx, terms), (dw, exact_dw, exact_dw)):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).norm() <= tolerance * size.norm()


def test_blocks_make_no_difference(monkeypatch):
    torch.manual_seed(0)
    x, dy, w = torch.randn(50, 64), torch.randn(50, 64), torch.randn(64)
    y, r = norm.forward(x, w, 1e-6)
    dx, dw = norm.backward(dy, x, w, r)
    monkeypatch.setattr(norm, "_rows", lambda T, K: 7)
    y2, r2 = norm.forward(x, w, 1e-6)
    dx2, dw2 = norm.backward(dy, x, w, r2)
    assert torch.equal(y, y2)
    assert torch.equal(r, r2)
    torch.testing.assert_close((dx, dw), (dx2, dw2))
