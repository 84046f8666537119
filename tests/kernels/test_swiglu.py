"""SwiGLU's reference against float64."""

import pytest
import torch

from surokit.formats import E5M2
from surokit.kernels.reference import delayed, quantize, swiglu


@pytest.mark.parametrize("shape", [(1,), (5, 7), (2, 3, 130)])
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_backward(shape, scale, dtype):
    torch.manual_seed(0)
    gate, up, dy = (torch.randn(shape).mul(s).to(dtype) for s in (scale, 1.0, 1.0))
    exact = [t.double().requires_grad_() for t in (gate, up)]
    expected = torch.nn.functional.silu(exact[0]) * exact[1]
    exact_dgate, exact_dup = torch.autograd.grad(expected, exact, dy.double())
    copies = [t.clone() for t in (gate, up, dy)]
    y = swiglu.forward(gate, up)
    dgate, dup = swiglu.backward(dy, gate, up)
    joint, again = swiglu.backward(dy, gate, up, joint=True, values=True)
    assert torch.equal(again, y)
    torch.testing.assert_close(joint, torch.cat((dgate, dup), -1), rtol=1e-5, atol=1e-6)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    for ours, theirs in ((y, expected), (dgate, exact_dgate), (dup, exact_dup)):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).norm() <= tolerance * theirs.norm() + 1e-12
    assert all(torch.equal(a, b) for a, b in zip(copies, (gate, up, dy)))  # inputs are never written over


@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (130, 300)])
def test_codes_of_both_orientations(shape):
    torch.manual_seed(0)
    gate, up = torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16()
    y = swiglu.forward(gate, up)
    found = swiglu.forward_quantized(gate, up, E5M2, columns=128, pow2=True, both=True, values=True)
    expected = quantize.quantize_both(y, E5M2, 1, 128, True)
    for ours, theirs in zip(found, (*expected, y), strict=True):
        assert torch.equal(ours.float(), theirs.float())
    slots, twin = torch.tensor([[2.0], [-1.0]]), torch.tensor([[2.0], [-1.0]])
    found = swiglu.forward_quantized(gate, up, E5M2, in_force=slots[0], opened=slots[1], record=True, both=True)
    for ours, theirs in zip(found[:4], delayed.quantize_both(y, E5M2, twin[0], twin[1], True), strict=True):
        assert torch.equal(ours.float(), theirs.float())
    assert torch.equal(slots, twin)
    assert found[4] is None
