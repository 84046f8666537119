"""MX formats in Triton: codes and scales bit for bit as the reference, in both orientations, and back."""

import re

import pytest
import torch

from surokit.formats import E2M1, E4M3, E5M2
from surokit.kernels.reference import mx as reference
from surokit.kernels.triton import mx as kernels
from tests.kernels.compiling import ANY, FP8, Launches, compiled, matrix
from tests.kernels.interpreter import DEVICE
from tests.kernels.test_triton_quantize import KEY, inputs, same

pytestmark = pytest.mark.sampled

E8M0 = torch.float8_e8m0fnu
SCALES = matrix(256, 16, torch.uint8).view(E8M0)

LAUNCHES: Launches = {
    "mxfp8": ((90,), lambda: kernels.quantize(matrix(), E4M3, "rceil")),
    "mxfp8 both": (FP8, lambda: kernels.quantize_both(matrix(), E4M3, "rceil")),
    "mxfp4": ((90,), lambda: kernels.quantize(matrix(), E2M1, "even")),
    "mxfp4 stochastic": ((90,), lambda: kernels.quantize(matrix(), E2M1, "even", KEY)),
    "mxfp4 both": (ANY, lambda: kernels.quantize_both(matrix(), E2M1, "even")),
    "mxfp8 back": (
        FP8,
        lambda: kernels.dequantize(matrix(dtype=torch.float8_e4m3fn), SCALES, 512, E4M3, torch.bfloat16),
    ),
    "mxfp4 back": (ANY, lambda: kernels.dequantize(matrix(256, 256, torch.uint8), SCALES, 512, E2M1, torch.bfloat16)),
}

FORMATS = [(E4M3, "rceil"), (E4M3, "floor"), (E5M2, "even"), (E2M1, "even"), (E2M1, "rceil"), (E2M1, "floor")]
FORMAT_IDS = [f"{format}-{rule}" for format, rule in FORMATS]


def same_codes(ours, theirs, scales, format):
    """Codes equal; in an FP4 block whose scale is NaN they mean nothing (the sign of a NaN is no one's)."""
    if format == E2M1:
        meaningless = scales.view(torch.uint8).eq(255).repeat_interleave(16, 1)[:, : theirs.shape[1]]
        ours, theirs = ours.cpu().masked_fill(meaningless, 0), theirs.masked_fill(meaningless, 0)
    same(ours, theirs)


def check(x, format, rule, key=None):
    there = x.to(DEVICE)
    expected = reference.quantize(x, format, rule, key)
    ours = kernels.quantize(there, format, rule, None if key is None else key.to(DEVICE))
    same_codes(ours[0], expected[0], expected[1], format)
    same(ours[1], expected[1])
    if key is None:
        ours = kernels.quantize_both(there, format, rule)
        expected = reference.quantize_both(x, format, rule)
        for i in (0, 2):
            same_codes(ours[i], expected[i], expected[i + 1], format)
            same(ours[i + 1], expected[i + 1])


@pytest.mark.parametrize("shape", [(1, 1), (33, 70), (130, 136), (5, 333)], ids=str)
@pytest.mark.parametrize(("format", "rule"), FORMATS, ids=FORMAT_IDS)
def test_shapes(shape, format, rule):
    check(inputs(*shape), format, rule)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(("format", "rule"), FORMATS, ids=FORMAT_IDS)
def test_dtypes(dtype, format, rule):
    check(inputs(20, 70, dtype), format, rule)


@pytest.mark.parametrize(("format", "rule"), FORMATS, ids=FORMAT_IDS)
def test_scales_where_a_rule_changes_its_exponent(format, rule):
    """Block maxima at, one ulp below and above the boundaries, for every exponent."""
    exponents = torch.arange(-149, 128, dtype=torch.float64)
    factors = torch.tensor(
        [1, 1.25, 1.5, 1.75, 1.875, 1.9375, format.max / 2**format.max_exponent], dtype=torch.float64
    )
    at = (torch.exp2(exponents)[:, None] * factors).flatten().float()
    inf = torch.tensor(float("inf"))
    top = torch.cat([at, at.nextafter(inf), at.nextafter(-inf), torch.tensor([torch.finfo(torch.float32).max])])
    top = torch.cat([top, top.new_zeros(-top.numel() % 8)]).view(-1, 8)
    x = torch.zeros(*top.shape, 32)
    x[:, :, 5] = top
    x[:, :, 9] = -top / 3
    x = x.flatten(1)
    expected = reference.quantize(x, format, rule)
    ours = kernels.quantize(x.to(DEVICE), format, rule)
    same_codes(ours[0], expected[0], expected[1], format)
    same(ours[1], expected[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("format", "rule"), FORMATS, ids=FORMAT_IDS)
def test_nan_and_inf(bad, format, rule):
    x = inputs(40, 70)
    x[0, 5], x[20, 69], x[1, 3], x[39, 40] = bad, bad, bad, bad
    check(x, format, rule)


@pytest.mark.parametrize(("format", "rule"), FORMATS, ids=FORMAT_IDS)
def test_every_nan_gives_a_block_of_nan(format, rule):
    payloads = torch.tensor([0x7F81, 0x7FC0, 0x7FFF, -1], dtype=torch.int16).view(torch.bfloat16)
    x = torch.ones(4, 64, dtype=torch.bfloat16)
    x[:, 3] = payloads
    _, scales = kernels.quantize(x.to(DEVICE), format, rule)
    assert scales.cpu().view(torch.uint8)[:, 0].eq(255).all()
    assert scales.cpu().view(torch.uint8)[:, 1].ne(255).all()


@pytest.mark.parametrize(("format", "rule"), FORMATS, ids=FORMAT_IDS)
def test_strided(format, rule):
    x = inputs(70, 150)
    for view in (x.t(), x[::2, 1::3], x[:, :1].expand(70, 40)):
        check(view, format, rule)


@pytest.mark.parametrize(("format", "rule"), FORMATS, ids=FORMAT_IDS)
def test_stochastic(format, rule):
    check(inputs(33, 71), format, rule, KEY)
    check(inputs(71, 33, torch.float32).t(), format, rule, KEY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("format", [E4M3, E5M2, E2M1], ids=str)
def test_back(format, dtype):
    """Every code, with every scale."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(32, 1).roll(7, 1)
    if format == E2M1:
        codes, columns = codes[:, :75].contiguous(), 149
    else:
        codes, columns = codes.view(reference.DTYPES[format]), 256
    blocks = -(-columns // 32)
    scales = torch.arange(32 * blocks).remainder(256).to(torch.uint8).view(32, blocks).view(E8M0)
    ours = kernels.dequantize(codes.to(DEVICE), scales.to(DEVICE), columns, format, dtype)
    same(ours, reference.dequantize(codes, scales, columns, format, dtype))


@pytest.mark.parametrize("format", [E4M3, E2M1], ids=str)
def test_no_rows(format):
    x = torch.zeros(0, 64, device=DEVICE)
    for ours, theirs in zip(
        kernels.quantize_both(x, format, "floor"), reference.quantize_both(x.cpu(), format, "floor")
    ):
        same(ours, theirs)
    assert kernels.dequantize(*kernels.quantize(x, format, "floor"), 64, format).shape == (0, 64)


def test_code():
    for (launch, arch), kernels_ptx in compiled().of("mx").items():
        for ptx in kernels_ptx.values():
            assert not re.findall(r"(?:add|sub|mul|fma|div|min|max|setp)\S*\.ftz|div\.full|div\.approx|rcp\.", ptx), (
                launch,
                arch,
            )
            assert "ld.global.v4.b32" in ptx, (launch, arch)
            if launch.startswith("mxfp8") and "back" not in launch and arch >= 90:
                assert "cvt.rn.satfinite.e4m3x2.f32" in ptx, (launch, arch)
