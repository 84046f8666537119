"""NF4 in Triton: codes, scales and decoded numbers bit for bit as the reference."""

import pytest
import torch

from surokit.formats import BNB_FP4, NF4
from surokit.kernels.reference import nf4 as reference
from surokit.kernels.triton import nf4
from tests.kernels.compiling import ANY, Launches, compiled, matrix
from tests.kernels.interpreter import DEVICE


def decode(double):
    scales = torch.zeros(256, 8, dtype=torch.uint8 if double else torch.float32)
    second = (torch.zeros(8), torch.zeros(1)) if double else ()
    return nf4.dequantize(matrix(256, 256, torch.uint8), scales, second, (256, 512), torch.bfloat16)


LAUNCHES: Launches = {
    "quantize": (ANY, lambda: nf4.quantize(matrix())),
    "quantize float32": ((90,), lambda: nf4.quantize(matrix(dtype=torch.float32))),
    "quantize by another table": ((90,), lambda: nf4.quantize(matrix(), 0, BNB_FP4)),
    "single": (ANY, lambda: decode(False)),
    "double": (ANY, lambda: decode(True)),
}

SHAPES = [(1, 1), (3, 64), (37, 71), (6, 130), (70, 128)]


def inputs(M, K, dtype=torch.bfloat16):
    """Rows of every kind: normal, zeros, huge, tiny, subnormal, wide; and midpoints of codes with their neighbours."""
    torch.manual_seed(M + K)
    x = torch.randn(M, K)
    for row in range(M):
        x[row] *= (1.0, 0.0, -0.0, 1e30, 1e-30, 1e-39, 3e38)[row % 7]
        if row % 8 == 7:
            x[row] *= torch.exp2(torch.arange(K) % 28 - 14)
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def check(x, double=0, format=NF4):
    ours, theirs = nf4.quantize(x.to(DEVICE), double, format), reference.quantize(x, double, format)
    for a, b in zip((*ours[:2], *ours[2]), (*theirs[:2], *theirs[2]), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a.cpu(), b, rtol=0, atol=0, equal_nan=True)
    for dtype in (torch.float32, torch.bfloat16):
        a = nf4.dequantize(
            *(theirs[0].to(DEVICE), theirs[1].to(DEVICE)),
            tuple(t.to(DEVICE) for t in theirs[2]),
            x.shape,
            dtype,
            format,
        )
        b = reference.dequantize(*theirs, x.shape, dtype, format)
        assert a.dtype == b.dtype
        torch.testing.assert_close(a.cpu(), b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("double", [0, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_and_scales(shape, dtype, double):
    x = inputs(shape[0], shape[1], dtype)
    assert x.isfinite().all()
    check(x, double)
    check(x, double, BNB_FP4)


def test_midpoints_and_their_neighbours():
    midpoints = torch.tensor([0.5 * (a + b) for a, b in zip(NF4.values, NF4.values[1:])])
    inf = torch.tensor(float("inf"))
    x = torch.cat(
        [midpoints, midpoints.nextafter(inf), midpoints.nextafter(-inf), torch.tensor(NF4.values), torch.ones(3)]
    )
    check(x.view(1, 64))
    check(x[:61].view(1, 61).flip(1))  # a partial block divides


def test_midpoints_of_another_table():
    midpoints = torch.tensor(reference.midpoints(BNB_FP4))
    inf = torch.tensor(float("inf"))
    x = torch.cat([midpoints, midpoints.nextafter(inf), midpoints.nextafter(-inf), torch.zeros(21), torch.ones(1)])
    check(x.view(1, 64), format=BNB_FP4)
    check(x[:61].view(1, 61).flip(1), format=BNB_FP4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_block(value):
    x = inputs(4, 128)
    x[1, 70] = value
    assert nf4.quantize(x.to(DEVICE))[1].isnan().sum() == 1
    check(x)
    check(x[1:2, 66:73])  # a partial block, and half a byte that is filled up


@pytest.mark.parametrize("view", [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[::3, 5:40]])
def test_any_strides(view):
    check(view(inputs(40, 90)))


def test_full_blocks_multiply_and_a_partial_one_divides():
    """Neighbours of midpoints, which x * (1 / absmax) and x / absmax put on different sides."""
    midpoints = torch.tensor([0.5 * (a + b) for a, b in zip(NF4.values, NF4.values[1:])])
    different = 0
    for absmax in torch.rand(40, generator=torch.Generator().manual_seed(0)) + 1:
        x = midpoints * absmax
        x = torch.cat([x, x.nextafter(torch.tensor(9.0)), x.nextafter(torch.tensor(-9.0)), absmax.view(1)])
        sides = [(y[:, None] <= midpoints).sum(1) for y in (x * absmax.reciprocal(), x / absmax)]
        different += int((sides[0] != sides[1]).sum())
        check(x.view(1, -1))
        check(torch.cat([x, x[:18]]).view(1, 64))
    assert different > 10


def test_more_scales_than_a_block_of_them():
    check(inputs(132, 128), 256)


def test_no_rows():
    codes, scales, second = nf4.quantize(torch.zeros(0, 64, dtype=torch.bfloat16, device=DEVICE))
    assert codes.shape == (0, 32)
    assert scales.shape == (0, 1)
    assert nf4.dequantize(codes, scales, second, (0, 64)).shape == (0, 64)


def test_nothing_is_fused():
    """number[q] * (map[q] * scale + offset) has three roundings."""
    for launch in ("quantize", "double"):
        for ptx in compiled()["nf4", launch, 90].values():
            assert "fma.rn" not in ptx
            assert "div.full" not in ptx
            assert ".ftz" not in ptx
