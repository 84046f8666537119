"""RMSNorm in Triton: relative error against float64, and the quantized form bit for bit against its two steps."""

import pytest
import torch

from surokit.formats import E4M3, E5M2
from surokit.kernels.reference import norm as reference
from surokit.kernels.reference import quantize
from surokit.kernels.triton import norm as kernels
from tests.kernels.compiling import ANY, FP8, Launches, compiled, matrix
from tests.kernels.interpreter import DEVICE

ONE = torch.ones(1, 1)
W = torch.ones(512, dtype=torch.bfloat16)

LAUNCHES: Launches = {
    "forward": (ANY, lambda: kernels.forward(matrix(), W, 1e-5)),
    "forward, heads": (ANY, lambda: kernels.forward(matrix(2048, 128), W[:128], 1e-6)),
    "forward, wide": (ANY, lambda: kernels.forward(matrix(16, 16384), matrix(1, 16384)[0], 1e-5)),
    "forward, float32": (ANY, lambda: kernels.forward(matrix(dtype=torch.float32), W, 1e-5)),
    "backward": (ANY, lambda: kernels.backward(matrix(), matrix(), W, torch.ones(256, 1))),
    "quantized per row": (FP8, lambda: kernels.forward_quantized(matrix(), W, 1e-5, floor=1e-12)),
    "quantized, wide": (FP8, lambda: kernels.forward_quantized(matrix(16, 16384), matrix(1, 16384)[0], 1e-5)),
    "quantized, float32": (FP8, lambda: kernels.forward_quantized(matrix(dtype=torch.float32), W, 1e-5)),
    "quantized, delayed": (FP8, lambda: kernels.forward_quantized(matrix(), W, 1e-5, E4M3, ONE, record=ONE.clone())),
    "quantized, e5m2": (ANY, lambda: kernels.forward_quantized(matrix(), W, 1e-5, E5M2, ONE)),
}

SHAPES = [(1, 1), (7, 33), (11, 512), (2, 4100)]


def inputs(T, K, *, dtype=torch.bfloat16, scale=1.0):
    generator = torch.Generator().manual_seed(T * K)
    x, dy = torch.randn(2, T, K, generator=generator).unbind()
    w = 1 + torch.randn(K, generator=generator) / 4
    return [t.to(DEVICE, dtype) for t in (x * scale, dy, w)]


def same(a, b):
    """Equal values in equal places, NaN included, and equal signs of zeros."""
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(a.float().signbit() | a.float().isnan(), b.float().signbit() | b.float().isnan())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e4, 1e15, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_and_backward(shape, scale, dtype):
    x, dy, w = inputs(shape[0], shape[1], dtype=dtype, scale=scale)
    exact = [t.double().requires_grad_() for t in (x, w)]
    expected = torch.nn.functional.rms_norm(exact[0], (shape[1],), exact[1], 1e-5)
    exact_dx, exact_dw = torch.autograd.grad(expected, exact, dy.double())
    copies = [t.clone() for t in (x, dy, w)]
    y, r = kernels.forward(x, w, 1e-5)
    dx, dw = kernels.backward(dy, x, w, r)
    torch.testing.assert_close(r, reference.forward(x, w, 1e-5)[1], rtol=1e-6, atol=0)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    # dx is a difference, and where a row has one element nothing is left of it: measured against its terms
    terms = r.double() * dy.double() * w.double()
    for ours, theirs, size in ((y, expected, expected), (dx, exact_dx, terms), (dw, exact_dw, exact_dw)):
        assert ours.dtype == dtype
        assert ours.isfinite().all()
        assert (ours.double() - theirs).norm() <= tolerance * size.norm()
    for a, b in zip(copies, (x, dy, w)):
        assert torch.equal(a, b)  # inputs are never written over


@pytest.mark.parametrize("programs", [1, 2, 3])
def test_the_gradient_of_the_weight_does_not_depend_on_the_programs(programs, monkeypatch):
    x, dy, w = inputs(50, 600, dtype=torch.float32)
    _, r = kernels.forward(x, w, 1e-5)
    monkeypatch.setattr(kernels, "_multiprocessors", lambda device: programs)
    for ours, theirs in zip(kernels.backward(dy, x, w, r), reference.backward(dy, x, w, r)):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES[:-1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("amax", [None, 4.0, 0.01, 0.0, float("inf"), float("nan")])
def test_quantized_is_forward_then_quantize(shape, dtype, amax):
    x, _, w = inputs(shape[0], shape[1], dtype=dtype)
    x[-1] *= 1e-20 if shape[0] > 1 else 1
    given = None if amax is None else torch.tensor([[amax]], device=DEVICE)
    record = torch.full((1, 1), 0.5, device=DEVICE)
    codes, scales, r = kernels.forward_quantized(x, w, 1e-5, E4M3, given, 1e-12, record)
    y, r_alone = kernels.forward(x, w, 1e-5)
    expected = quantize.quantize(y, E4M3, int(amax is None), 0, amax is None, given, 1e-12)
    same(codes, expected[0])
    same(scales, expected[1])
    assert torch.equal(r, r_alone)
    assert record.item() == max(0.5, y.abs().max().item())


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("delayed", [False, True])
def test_values_that_are_no_good_stay_visible(value, format, delayed):
    x, _, w = inputs(5, 40)
    x[2] = 0.0
    x[2, 7] = value
    given = torch.full((1, 1), 3.0, device=DEVICE) if delayed else None
    records = torch.zeros(2, 1, 1, device=DEVICE).unbind()
    ours = kernels.forward_quantized(x, w, 1e-5, format, given, record=records[0])
    theirs = reference.forward_quantized(x, w, 1e-5, format, given, record=records[1])
    for a, b in zip(ours[:2], theirs[:2]):
        same(a, b)
    same(*records)
    assert ours[0][2].float().isnan().any() == (value != 0)


def test_the_definition_is_the_two_steps():
    x, _, w = inputs(6, 40)
    record = torch.zeros(1, 1, device=DEVICE)
    codes, scales, r = reference.forward_quantized(x, w, 1e-5, floor=1e-12, record=record)
    y, r_alone = reference.forward(x, w, 1e-5)
    same(codes, quantize.quantize(y, E4M3, 1, 0, True, floor=1e-12)[0])
    assert torch.equal(r, r_alone)
    assert scales.shape == (6, 1)
    assert record.item() == y.abs().max().item()


def test_strides_and_no_rows():
    x, dy, w = inputs(9, 48)
    y, r = kernels.forward(x, w, 1e-5)
    dx, dw = kernels.backward(dy, x, w, r)
    for strided in (torch.cat((x, x), 1)[:, :48], x.t().contiguous().t()):
        assert not strided.is_contiguous()
        assert torch.equal(kernels.forward(strided, w, 1e-5)[0], y)
        assert torch.equal(kernels.forward_quantized(strided, w, 1e-5)[2], r)
        for ours, theirs in zip(kernels.backward(dy, strided, w, r), (dx, dw)):
            assert torch.equal(ours, theirs)
    row = dy[:1].expand(9, 48)  # a gradient as sum() gives it
    assert torch.equal(kernels.backward(row, x, w, r)[0], kernels.backward(row.contiguous(), x, w, r)[0])
    none = x[:0]
    assert [tuple(t.shape) for t in kernels.forward(none, w, 1e-5)] == [(0, 48), (0, 1)]
    dx, dw = kernels.backward(none, none, w, r[:0])
    assert dx.shape == none.shape
    assert not dw.any()
    assert [tuple(t.shape) for t in kernels.forward_quantized(none, w, 1e-5)] == [(0, 48), (0, 1), (0, 1)]
    given, record = torch.full((1, 1), 2.0, device=DEVICE), torch.zeros(1, 1, device=DEVICE)
    ours = kernels.forward_quantized(none, w, 1e-5, amax=given, record=record)
    for a, b in zip(ours, reference.forward_quantized(none, w, 1e-5, amax=given)):
        same(a, b)
    assert record.item() == 0


def test_errors():
    x, dy, w = inputs(4, 8)
    with pytest.raises(ValueError, match="weight of shape"):
        kernels.forward(x, w[:7], 1e-5)
    with pytest.raises(ValueError, match="equal shapes"):
        kernels.backward(dy[:3], x, w, x.new_ones(4, 1))
    with pytest.raises(TypeError, match="use kernels/reference"):
        kernels.forward(x.double(), w, 1e-5)
    with pytest.raises(ValueError, match="`amax` is one float32 number"):
        kernels.forward_quantized(x, w, 1e-5, amax=torch.ones(4, 1, device=DEVICE))
    with pytest.raises(ValueError, match="do not fit"):
        kernels.forward(x.new_ones(1, 65537), x.new_ones(65537), 1e-5)


def test_fused_and_unfused_sum_in_one_order():
    """Codes are stored in groups as wide as those of y; wider ones would change how the sum of a row is dealt out to threads."""
    for launch, group in (
        ("quantized per row", "v2.b32"),
        ("quantized, wide", "v2.b32"),
        ("quantized, float32", "b32"),
    ):
        ptx = compiled()["norm", launch, 90]["forward_rows_quantized"]
        stores = {line.split("st.global.")[1].split()[0] for line in ptx.splitlines() if "st.global." in line}
        assert stores == {"b32", group}, launch  # b32: scales and r
    assert "st.global.v4.b32" in compiled()["norm", "forward", 90]["forward_rows"]
