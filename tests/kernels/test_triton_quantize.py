"""Tile scalings in Triton: codes and scales bit for bit as the reference, for every tiling, input and orientation."""

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from surokit.formats import E4M3, E5M2
from surokit.kernels.reference import quantize as reference
from surokit.kernels.triton import quantize as kernels
from tests.kernels.compiling import ANY, FP8, Launches, compiled, matrix
from tests.kernels.interpreter import DEVICE
from tests.refusals import refused

pytestmark = pytest.mark.sampled

ONE = torch.ones(1, 1)
KEY = torch.tensor([12345, -678], dtype=torch.int32)

# every kernel for all its architectures, further variants for one
LAUNCHES: Launches = {
    "tensor": ((90,), lambda: kernels.quantize(matrix(), E4M3)),
    "tensor e5m2": (FP8, lambda: kernels.quantize(matrix(), E5M2)),
    "tensor, amax given": (FP8, lambda: kernels.quantize(matrix(), E4M3, amax=ONE, record=ONE.clone())),
    "1x128, amax given": ((90,), lambda: kernels.quantize(matrix(), E4M3, 1, 128, amax=torch.ones(256, 4))),
    "tensor both": ((90,), lambda: kernels.quantize_both(matrix(), E4M3)),
    "row": (FP8, lambda: kernels.quantize(matrix(), E4M3, 1, 0, True, floor=1e-12)),
    "row stochastic": ((90,), lambda: kernels.quantize(matrix(), E4M3, 1, 0, True, key=KEY)),
    "long row": ((90,), lambda: kernels.quantize(matrix(16, 32768), E4M3, 1, 0, True)),
    "row both": (FP8, lambda: kernels.quantize_both(matrix(), E4M3, 1, 0, True)),
    "1x128": ((90,), lambda: kernels.quantize(matrix(), E4M3, 1, 128, True)),
    "1x128 both": (FP8, lambda: kernels.quantize_both(matrix(), E4M3, 1, 128, True)),
    "128x128": ((90,), lambda: kernels.quantize(matrix(), E4M3, 128, 128, True)),
    "128x128 both": (FP8, lambda: kernels.quantize_both(matrix(), E4M3, 128, 128, True)),
    "amax": (ANY, lambda: [kernels.amax(matrix(), *tile) for tile in ((0, 0), (1, 0), (0, 1), (128, 128))]),
    "decode": (
        FP8,
        lambda: kernels.decode(matrix(dtype=torch.float8_e4m3fn), torch.ones(2, 4), 128, 128, torch.bfloat16),
    ),
}

TILES = [(0, 0), (1, 0), (0, 1), (1, 128), (128, 128), (1, 32), (16, 16), (25, 17), (3, 0), (0, 9)]
SHAPES = [(1, 1), (33, 70), (130, 136)]


def inputs(M, K, dtype=torch.bfloat16):
    """Rows of every kind: normal, zeros of both signs, huge, tiny, subnormal, ties, wide range."""
    generator = torch.Generator().manual_seed(M * 1000 + K)
    x = torch.randn(M, K, generator=generator, dtype=torch.float64)
    for row in range(M):
        match row % 9:
            case 1:
                x[row] = 0.0
            case 2:
                x[row] = x[row].sign() * 0.0
            case 3:
                x[row] *= 1e30
            case 4:
                x[row] *= 1e-30
            case 5:
                x[row] *= 1e-41
            case 6:
                x[row] = (x[row] * 8).round() / 8 * 28
            case 7:
                x[row] *= torch.exp2(torch.arange(K) % 28 - 14)
            case 8:
                x[row] = 3e38
    if dtype == torch.float16:
        x = x.clamp(-6e4, 6e4)
    return x.to(dtype)


def same(ours, theirs):
    """The same shapes, dtypes and bits; any NaN is as good as another."""
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    ours, nan = ours.cpu(), theirs.float().isnan()
    assert torch.equal(ours.float().isnan(), nan)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[theirs.element_size()]
    bits = [t.contiguous().view(integers).masked_fill(nan, 0) for t in (ours, theirs)]
    assert torch.equal(*bits), f"{(bits[0] != bits[1]).sum()} of {nan.numel()} differ"


def strides(t):
    """Those that say where an element is."""
    return [stride for size, stride in zip(t.shape, t.stride()) if size > 1]


def check(x, format, tile, pow2=True, floor=0.0, both=True, **named):
    on_device = {name: t.to(DEVICE) for name, t in named.items()}
    x_there = x.to(DEVICE)
    ours = kernels.quantize(x_there, format, *tile, pow2, floor=floor, **on_device)
    theirs = reference.quantize(x, format, *tile, pow2, floor=floor, **named)
    if both:
        ours += kernels.quantize_both(x_there, format, *tile, pow2, floor)
        theirs += reference.quantize_both(x, format, *tile, pow2, floor)
    for a, b in zip(ours, theirs):
        same(a, b)
    for a, b in zip(ours[1::2], theirs[1::2]):  # scales
        assert strides(a) == strides(b)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tilings(shape, tile):
    check(inputs(*shape), E4M3, tile)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tile", [*TILES, (1, 256)], ids=str)
def test_scales_lie_in_memory_as_torch_is_told(tile, shape):
    """Of parts of a row one column after the other, as tensor cores read them, else in rows; also where x is turned."""
    for x in (inputs(*shape), inputs(*shape[::-1]).t()):
        check(x, E4M3, tile)
        with FakeTensorMode() as mode:
            told = torch.ops.surokit.quantize_both(mode.from_tensor(x), "e4m3", *tile, True)[1::2]
        for ours, fake in zip(reference.quantize_both(x, E4M3, *tile, True)[1::2], told):
            assert (ours.shape, strides(ours)) == (fake.shape, strides(fake))
            assert ours.t().is_contiguous() if tile[0] == 1 and tile[1] else ours.is_contiguous()
            assert ours.shape[1] > 1 or ours.stride(1) == 1  # so that its bytes can be viewed


def test_every_element_a_tile():
    check(inputs(4, 3), E4M3, (1, 1))


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("tile", [(0, 0), (1, 0), (1, 128), (128, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_dtypes_formats_scales(dtype, tile, pow2):
    check(inputs(20, 130, dtype), E5M2, tile, pow2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("tile", [(0, 0), (1, 0), (0, 1), (1, 32), (16, 16)], ids=str)
@pytest.mark.parametrize("pow2", [False, True])
def test_nan_and_inf(bad, tile, pow2):
    x = inputs(33, 70)
    x[0, 5] = bad
    x[20, 69] = bad
    x[1, 3] = bad
    check(x, E4M3, tile, pow2)
    all_bits = torch.tensor(0x7FFF, dtype=torch.int16).view(torch.bfloat16)
    x[10, 10] = all_bits  # the NaN with the largest payload
    check(x, E4M3, tile, pow2)


@pytest.mark.parametrize("tile", [(0, 0), (1, 0), (1, 128), (128, 128)], ids=str)
def test_strided(tile):
    x = inputs(70, 150)
    for view in (x.t(), x[::2, 1::3], x[3:40, 5:77], x[:, :1].expand(70, 20)):
        check(view, E4M3, tile)


@pytest.mark.parametrize("floor", [1e-12, 1e-20])
def test_least_amax(floor):
    check(inputs(33, 70) * 1e-6, E4M3, (1, 0), True, floor)
    check(inputs(33, 70).float()[4:6] * 1e-10, E4M3, (0, 0), False, floor)


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("tile", [(0, 0), (1, 0), (1, 128), (128, 128), (5, 7)], ids=str)
def test_stochastic(format, tile):
    check(inputs(33, 70), format, tile, both=False, key=KEY)
    check(inputs(33, 70, torch.float32).t(), format, tile, False, both=False, key=KEY)


def test_stochastic_in_long_rows(monkeypatch):
    x = inputs(9, 200)
    x[3, 199] = float("nan")
    monkeypatch.setattr(kernels, "LONGEST", 64)
    check(x, E4M3, (1, 0), both=False, key=KEY)
    check(x, E4M3, (1, 0), both=False)


@pytest.mark.parametrize("tile", [(0, 0), (1, 0), (0, 1), (16, 16), (1, 32)], ids=str)
def test_amax_given(tile):
    x = inputs(33, 70)
    given = reference.amax(x, *tile).mul(0.4)
    for amax in (given, given.t().contiguous().t()):
        check(x, E4M3, tile, False, both=False, amax=amax)
    check(x, E4M3, tile, False, both=False, amax=given, key=KEY)


@pytest.mark.parametrize("before", [0.0, 2.0, 1e38, float("inf")])
@pytest.mark.parametrize(
    "x", [torch.randn(3, 5), torch.zeros(2, 2), torch.full((9, 9), float("nan")), torch.randn(200, 300) * 9]
)
def test_a_pass_records_the_amax(x, before):
    record = torch.full((1, 1), before, device=DEVICE)
    one = torch.ones(1, 1)
    codes, scales = kernels.quantize(x.to(DEVICE), E4M3, amax=one.to(DEVICE), record=record)
    expected = reference.quantize(x, E4M3, amax=one)
    same(codes, expected[0])
    same(scales, expected[1])
    same(record, torch.maximum(reference.amax(x), torch.full((1, 1), before)).abs())


def test_recording_needs_a_scale():
    with refused(ValueError):
        kernels.quantize(torch.zeros(2, 2), E4M3, record=torch.zeros(1, 1))


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_amax(tile):
    for x in (inputs(33, 70), inputs(20, 40).t(), inputs(20, 20, torch.float64)):
        same(kernels.amax(x.to(DEVICE), *tile), reference.amax(x, *tile))
    x = inputs(20, 20)
    x[3, 4], x[7, 7] = float("nan"), float("inf")
    same(kernels.amax(x.to(DEVICE), *tile), reference.amax(x, *tile))


@pytest.mark.parametrize("tile", [(0, 0), (1, 0), (0, 1), (64, 0)], ids=str)
def test_amax_of_tiles_that_several_programs_share(tile):
    for x in (inputs(130, 70), inputs(3, 5000, torch.float32), inputs(1000, 33)):
        same(kernels.amax(x.to(DEVICE), *tile), reference.amax(x, *tile))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_decode(tile, dtype):
    codes = torch.arange(256, dtype=torch.uint8).repeat(9).view(32, 72)[:, :70]
    for format in (torch.float8_e4m3fn, torch.float8_e5m2):
        scales = torch.rand_like(reference.amax(torch.zeros(32, 70), *tile)) + 0.01
        for c, s in (
            (codes.view(format), scales),
            (codes.view(format).t().contiguous().t(), scales.t().contiguous().t()),
        ):
            same(kernels.decode(c.to(DEVICE), s.to(DEVICE), *tile, dtype), reference.decode(c, s, *tile, dtype))


@pytest.mark.parametrize("tile", [(0, 0), (1, 0), (1, 128), (128, 128), (5, 7)], ids=str)
def test_no_rows(tile):
    x = torch.zeros(0, 64)
    check(x, E4M3, tile, both=False)
    same(kernels.amax(x.to(DEVICE), *tile), reference.amax(x, *tile))
    codes, _, codes_t, _ = kernels.quantize_both(x.to(DEVICE), E4M3, *tile)
    assert (codes.shape, codes_t.shape) == ((0, 64), (64, 0))


def quantizing_ptx(arch):
    """PTX of every launch that casts to E4M3."""
    for (launch, built_for), ptx in compiled().of("quantize").items():
        if built_for == arch and launch not in ("amax", "decode", "tensor e5m2"):
            yield "".join(ptx.values())


@pytest.mark.parametrize("arch", [90, 100, 120])
def test_float8_is_converted_in_one_step(arch):
    found = list(quantizing_ptx(arch))
    assert len(found) >= (5 if arch == 90 else 3)
    for ptx in found:
        assert "cvt.rn.satfinite.e4m3x2.f32" in ptx


def test_what_sm_89_converts_in_two_steps_is_rounded_before():
    """If this fails, Triton converts directly there too, and `round_nearest` may go."""
    for ptx in quantizing_ptx(89):
        assert "cvt.rn.satfinite.e4m3x2.f16x2" in ptx


def test_arithmetic_is_exact_and_memory_is_wide():
    for (launch, arch), kernels_ptx in compiled().of("quantize").items():
        for name, ptx in kernels_ptx.items():
            # subnormals count (`floor`, of numbers that are not negative, may flush), and divisions round correctly
            assert not re.findall(r"(?:add|sub|mul|fma|div|min|max|setp)\S*\.ftz|div\.full|div\.approx|rcp\.", ptx), (
                launch,
                name,
                arch,
            )
            assert "ld.global.v4.b32" in ptx, (launch, name, arch)
            if name not in ("amax_kernel", "amax_both_kernel"):
                assert "st.global.v4.b32" in ptx, (launch, name, arch)
