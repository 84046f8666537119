"""RMSNorm's reference against float64 and torch's own definition."""

import pytest
import torch

from surokit.formats import E4M3
from surokit.kernels.reference import delayed, norm, quantize


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


@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (700, 512)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_residual_stream(shape, dtype):
    """x + delta goes to the norm and on along the stream; its gradient comes from both."""
    torch.manual_seed(0)
    x, delta, dy, residual = (torch.randn(shape).to(dtype) for _ in range(4))
    w = torch.randn(shape[1]).to(dtype)
    total, y, r = norm.add_forward(x, delta, w, 1e-5)
    assert torch.equal(total, x + delta)
    exact = total.double().requires_grad_()
    expected = torch.nn.functional.rms_norm(exact, (shape[1],), w.double(), 1e-5)
    (exact_dx,) = torch.autograd.grad([expected, exact], exact, [dy.double(), residual.double()])
    dx, dw = norm.backward(dy, total, w, r, residual)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    terms = (r.double() * dy.double() * w.double()).norm() + residual.double().norm()
    assert (y.double() - expected).norm() <= tolerance * expected.norm()
    assert (dx.double() - exact_dx).norm() <= tolerance * terms
    assert (dx.dtype, y.dtype, total.dtype) == (dtype,) * 3
    assert torch.equal(dw, norm.backward(dy, total, w, r)[1])
    frozen = norm.backward(dy, total, w, r, residual, need_dw=False)
    assert torch.equal(frozen[0], dx)
    assert frozen[1] is None
    assert torch.equal(norm.recompute(total, w, r), y)


def test_blocks_make_no_difference(monkeypatch):
    torch.manual_seed(0)
    x, dy, w = torch.randn(50, 64), torch.randn(50, 64), torch.randn(64)
    y, r = norm.forward(x, w, 1e-6)
    dx, dw = norm.backward(dy, x, w, r, dy)
    monkeypatch.setattr(norm, "_rows", lambda T, K: 7)
    y2, r2 = norm.forward(x, w, 1e-6)
    dx2, dw2 = norm.backward(dy, x, w, r2, dy)
    assert torch.equal(y, y2)
    assert torch.equal(y, norm.recompute(x, w, r))
    assert torch.equal(r, r2)
    torch.testing.assert_close((dx, dw), (dx2, dw2))


@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (37, 300)])
def test_codes_of_both_orientations(shape):
    torch.manual_seed(0)
    x, delta, w = torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16(), torch.randn(shape[1]).bfloat16()
    total, y, r = norm.add_forward(x, delta, w, 1e-5)
    for slots in (None, torch.tensor([[0.0], [-1.0]])):
        twin = None if slots is None else slots.clone()
        scaling = {"columns": 16} if slots is None else {"in_force": slots[0], "opened": slots[1], "record": True}
        found = norm.forward_quantized(x, w, 1e-5, delta=delta, values=True, both=True, **scaling)
        if slots is None or twin is None:
            expected = quantize.quantize_both(y, E4M3, 1, 16)
        else:
            expected = delayed.quantize_both(y, E4M3, twin[0], twin[1], True)
            assert torch.equal(slots, twin)
            assert torch.equal(found[2].float(), found[0].float().t())
        for ours, theirs in zip(found, (*expected, r, total, y), strict=True):
            assert torch.equal(ours.float(), theirs.float())
        assert found[2].is_contiguous()
