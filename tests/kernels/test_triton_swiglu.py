"""SwiGLU in Triton: relative error against float64, and the quantized form bit for bit against its two steps."""

import pytest
import torch

from surokit.formats import E4M3, E5M2
from surokit.kernels.reference import quantize
from surokit.kernels.reference import swiglu as reference
from surokit.kernels.triton import swiglu as kernels
from tests.kernels.compiling import ANY, FP8, Launches, matrix
from tests.kernels.interpreter import DEVICE

ONE = torch.ones(1, 1)


def halves():
    """Gate and up as one product gives them."""
    return matrix(256, 1024).chunk(2, 1)


LAUNCHES: Launches = {
    "forward": (ANY, lambda: kernels.forward(matrix(), matrix())),
    "forward, halves": (ANY, lambda: kernels.forward(*halves())),
    "backward": (ANY, lambda: kernels.backward(matrix(), matrix(), matrix())),
    "quantized per row": (FP8, lambda: kernels.forward_quantized(*halves(), floor=1e-12)),
    "quantized, wide": (FP8, lambda: kernels.forward_quantized(matrix(16, 14336), matrix(16, 14336))),
    "quantized, delayed": (FP8, lambda: kernels.forward_quantized(matrix(), matrix(), E4M3, ONE, record=ONE.clone())),
    "quantized, e5m2": (ANY, lambda: kernels.forward_quantized(matrix(), matrix(), E5M2, ONE)),
}


def inputs(*shape, dtype=torch.bfloat16, scale=1.0):
    generator = torch.Generator().manual_seed(len(shape) + shape[-1])
    gate, up, dy = torch.randn(3, *shape, generator=generator).unbind()
    return [t.to(DEVICE, dtype) for t in (gate * scale, up, dy)]


def same(a, b):
    """Equal values in equal places, NaN included, and equal signs of zeros."""
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(a.float().signbit() | a.float().isnan(), b.float().signbit() | b.float().isnan())


@pytest.mark.parametrize("shape", [(1,), (5, 7), (2, 3, 530)])
@pytest.mark.parametrize("scale", [0.0, 1e-20, 1.0, 30.0, 1e4, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_and_backward(shape, scale, dtype):
    gate, up, dy = inputs(*shape, dtype=dtype, scale=scale)
    exact = [t.double().requires_grad_() for t in (gate, up)]
    expected = torch.nn.functional.silu(exact[0]) * exact[1]
    exact_dgate, exact_dup = torch.autograd.grad(expected, exact, dy.double())
    copies = [t.clone() for t in (gate, up, dy)]
    y = kernels.forward(gate, up)
    dgate, dup = kernels.backward(dy, gate, up)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    for ours, theirs in ((y, expected), (dgate, exact_dgate), (dup, exact_dup)):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).norm() <= tolerance * theirs.norm()
    for a, b in zip(copies, (gate, up, dy)):
        assert torch.equal(a, b)  # inputs are never written over


@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (3, 520)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("amax", [None, 4.0, 0.01, 0.0, float("inf"), float("nan")])
def test_quantized_is_forward_then_quantize(shape, dtype, amax):
    gate, up, _ = inputs(*shape, dtype=dtype)
    up[-1] *= 1e-20 if shape[0] > 1 else 1
    given = None if amax is None else torch.tensor([[amax]], device=DEVICE)
    record = torch.full((1, 1), 0.5, device=DEVICE)
    codes, scales = kernels.forward_quantized(gate, up, E4M3, given, 1e-12, record)
    y = kernels.forward(gate, up)
    expected = quantize.quantize(y, E4M3, int(amax is None), 0, amax is None, given, 1e-12)
    same(codes, expected[0])
    same(scales, expected[1])
    assert record.item() == max(0.5, y.abs().max().item())


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("delayed", [False, True])
def test_values_that_are_no_good_stay_visible(value, format, delayed):
    gate, up, _ = inputs(5, 40)
    gate[2], up[2] = 1.0, 0.0
    up[2, 7] = value
    given = torch.full((1, 1), 3.0, device=DEVICE) if delayed else None
    record = torch.zeros(1, 1, device=DEVICE)
    codes, scales = kernels.forward_quantized(gate, up, format, given, record=record)
    y = kernels.forward(gate, up)
    expected = quantize.quantize(y, format, int(not delayed), 0, not delayed, given)
    same(codes, expected[0])
    same(scales, expected[1])
    same(record, quantize.amax(y))
    assert record.isfinite() == (value == 0)


def test_the_definition_is_the_two_steps():
    gate, up, _ = inputs(6, 40)
    record = torch.zeros(1, 1, device=DEVICE)
    codes, scales = reference.forward_quantized(gate, up, floor=1e-12, record=record)
    y = reference.forward(gate, up)
    same(codes, quantize.quantize(y, E4M3, 1, 0, True, floor=1e-12)[0])
    assert scales.shape == (6, 1)
    assert record.item() == y.abs().max().item()


def test_strides_and_empty_tensors():
    gate, up, dy = inputs(9, 48)
    y, gradients = kernels.forward(gate, up), kernels.backward(dy, gate, up)
    both = torch.cat((gate, up), 1)
    for a, b in (both.chunk(2, 1), (gate.t().contiguous().t(), up), (gate, both[:, 48:])):
        assert torch.equal(kernels.forward(a, b), y)
        for ours, theirs in zip(kernels.backward(dy, a, b), gradients):
            assert torch.equal(ours, theirs)
        for ours, theirs in zip(kernels.forward_quantized(a, b), kernels.forward_quantized(gate, up)):
            assert torch.equal(ours.float(), theirs.float())
    one = dy[:1, :1].expand(9, 48)  # a gradient as sum() gives it
    assert torch.equal(kernels.backward(one, gate, up)[1], kernels.backward(one.contiguous(), gate, up)[1])
    for none in (gate[:0], gate[:, :0]):
        assert kernels.forward(none, none).shape == none.shape
        assert [t.shape for t in kernels.backward(none, none, none)] == [none.shape] * 2
    assert [tuple(t.shape) for t in kernels.forward_quantized(gate[:0], up[:0])] == [(0, 48), (0, 1)]
    given = torch.full((1, 1), 2.0, device=DEVICE)
    for a, b in zip(
        kernels.forward_quantized(gate[:0], up[:0], amax=given),
        reference.forward_quantized(gate[:0], up[:0], amax=given),
    ):
        same(a, b)


def test_errors():
    gate, up, _ = inputs(4, 8)
    for function in (kernels.forward, kernels.forward_quantized):
        with pytest.raises(ValueError, match="equal shapes"):
            function(gate, up[:3])
        with pytest.raises(TypeError, match="use kernels/reference"):
            function(gate.double(), up.double())
    with pytest.raises(ValueError, match="`record` is one float32 number"):
        kernels.forward_quantized(gate, up, record=torch.zeros(1, 1, dtype=torch.float64, device=DEVICE))
