"""MX against golden vectors, torchao as installed, and a definition in float64; NaN, ends of the range, ragged rows."""

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

from surokit.formats import E2M1, E4M3, E5M2, FORMATS
from surokit.kernels.reference import fp4, mx

GOLDEN = {s: load_file(Path(__file__).parents[1] / "golden" / f"{s}.safetensors") for s in ("mxfp8", "mxfp4")}
NAMES = [(s, n.removesuffix(".scale")) for s, g in GOLDEN.items() for n in sorted(g) if n.endswith(".scale")]
RULES = ("floor", "rceil", "even")
PAIRS = [(format, rule) for format in (E4M3, E5M2, E2M1) for rule in RULES]
NUMPY = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2, E2M1: ml_dtypes.float4_e2m1fn}


def normal(shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def raw(t):
    return t.contiguous().view(torch.uint8)


def by_definition(x, format, rule):
    """Codes (a byte an element) and scale bytes in float64, block by block."""
    M, K = x.shape
    codes, scales = np.zeros((M, K), np.uint8), np.zeros((M, -(-K // 32)), np.uint8)
    x = x.float().numpy()
    for m in range(M):
        for c in range(scales.shape[1]):
            block = x[m, 32 * c : 32 * (c + 1)].astype(np.float64)
            amax = np.abs(block).max()
            if rule == "rceil":
                fraction, e = math.frexp(np.float32(amax) / np.float32(format.max))
                e = -127 if fraction == 0 else e - (fraction == 0.5)
            else:
                if rule == "even" and amax >= 2.0**-126:  # amax rounded to the format's mantissa, half up
                    step = 2.0 ** (math.frexp(amax)[1] - 1 - format.mantissa_bits)
                    amax = math.floor(amax / step + 0.5) * step
                e = math.frexp(amax)[1] - 1 - format.max_exponent
            e = max(e, -127) if amax > 0 else -127
            scales[m, c] = e + 127
            y = np.clip(block / 2.0**e, -format.max, format.max)
            codes[m, 32 * c : 32 * (c + 1)] = y.astype(NUMPY[format]).view(np.uint8)
    return codes, scales


def unpacked(codes, columns, format):
    return fp4.unpack(codes, columns) if format == E2M1 else raw(codes)


@pytest.mark.parametrize(("stem", "name"), NAMES, ids=[n for _, n in NAMES])
def test_golden_vectors(stem, name):
    golden = GOLDEN[stem]
    case, format, rule = name.split(".")
    x, format = golden[f"{case}.input"], FORMATS[format]
    codes, scales = mx.quantize(x, format, rule)
    assert torch.equal(raw(scales), golden[f"{name}.scale"])
    expected = golden[f"{name}.codes"]
    if format == E2M1:  # the codes of a block whose scale is NaN mean nothing
        means = (golden[f"{name}.scale"] != 255).repeat_interleave(16, 1)
        assert torch.equal(codes[means], expected[means])
    else:
        assert torch.equal(raw(codes), expected)
    if f"{name}.dequant" in golden:
        values = mx.dequantize(codes, scales, x.shape[1], format)
        assert torch.equal(values.nan_to_num(nan=0.123), golden[f"{name}.dequant"].nan_to_num(nan=0.123))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(-100, 100),
    st.integers(0, 2**31 - 1),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from(PAIRS),
)
def test_equals_torchao(M, C, exponent, seed, dtype, pair):
    format, rule = pair
    x = normal((M, 32 * C), seed)
    x[0, :7] *= 100  # an outlier block
    x[-1] *= x[-1] > 0
    x = (x * 2.0**exponent).to(dtype)
    # torchao 0.18.0 is wrong, and its main branch right, in these places, which are left out:
    # - rceil: one too low where amax/max lies just above a power of two (its float32 log2 loses the rest)
    # - a block with inf has a finite scale byte; with NaN, floor and even keep the codes of its neighbours: no such input here
    # - byte 0 is encoded with another scale than it is decoded with
    amax = x.float().view(M, C, 32).abs().amax(-1)
    above = torch.div(amax, torch.full_like(amax, format.max)).view(torch.int32) & 0x7FFFFF
    right = (above == 0) | (above > 64) if rule == "rceil" else torch.ones_like(amax, dtype=torch.bool)
    elements = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2, E2M1: torch.float4_e2m1fn_x2}
    their_scales, their_codes = to_mx(x, elements[format], 32, ScaleCalculationMode(rule))
    codes, scales = mx.quantize(x, format, rule)
    assert torch.equal(raw(scales)[right], raw(their_scales)[right])
    right &= raw(scales) != 0
    ours, theirs = (raw(c).view(M, C, -1)[right] for c in (codes, their_codes))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: f"{p[0]}-{p[1]}")
@pytest.mark.parametrize("K", [1, 31, 33, 64, 70])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_equals_the_definition(pair, K, dtype):
    format, rule = pair
    sizes = torch.tensor([0.0, 1e-44, 1e-38, 1e-30, 1e-6, 1.0, 3e4, 1e30], dtype=torch.float64)
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    shape = (len(sizes), K)
    x = (normal(shape, dtype=torch.float64) * sizes[:, None]).clamp(-limit, limit).to(dtype)
    x[:, 0] *= -0.0 if K > 1 else 1.0
    codes, scales = by_definition(x, format, rule)
    ours, our_scales = mx.quantize(x, format, rule)
    assert np.array_equal(raw(our_scales).numpy(), scales)
    assert np.array_equal(unpacked(ours, shape[1], format).numpy(), codes)
    values = mx.dequantize(ours, our_scales, shape[1], format)
    assert values.shape == shape
    assert values.isfinite().all()
    if rule == "rceil":  # nothing saturates: half a step of a normal number, half the block's subnormal step
        scale = our_scales.double().repeat_interleave(32, 1)[:, : shape[1]]
        half = x.double().abs() * 2.0 ** -(format.mantissa_bits + 1) + 0.5 * format.min_subnormal * scale
        assert ((values.double() - x.float().double()).abs() <= half).all()


@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: f"{p[0]}-{p[1]}")
def test_scales_where_rules_change_their_exponent(pair):
    """amax at, one float32 below and one above every boundary, for all exponents."""
    format, rule = pair
    mantissas = [1.0, format.max / 2**format.max_exponent, 2 - 2.0 ** -(format.mantissa_bits + 1)]
    amax = torch.tensor([m * 2.0**e for m in mantissas for e in range(-149, 127)], dtype=torch.float64).float()
    up, down = (torch.nextafter(amax, torch.tensor(limit)) for limit in (math.inf, 0.0))
    x = torch.zeros(3 * len(amax), 32)
    x[:, 17] = torch.cat((down, amax, up))
    codes, scales = by_definition(x, format, rule)
    ours, our_scales = mx.quantize(x, format, rule)
    assert np.array_equal(raw(our_scales).numpy(), scales)
    assert np.array_equal(unpacked(ours, 32, format).numpy(), codes)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: f"{p[0]}-{p[1]}")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_makes_its_block_nan(pair, bad, dtype):
    format, rule = pair
    x = normal((3, 70), dtype=dtype)
    clean = mx.quantize(x, format, rule)
    x[1, 40] = x[2, 69] = bad
    codes, scales = mx.quantize(x, format, rule)
    values = mx.dequantize(codes, scales, 70, format)
    assert raw(scales)[[1, 2], [1, 2]].tolist() == [255, 255]
    nan = torch.zeros(3, 70, dtype=torch.bool)
    nan[1, 32:64] = nan[2, 64:] = True
    assert torch.equal(values.isnan(), nan)
    assert torch.equal(values[~nan], mx.dequantize(*clean, 70, format)[~nan])


def test_even_gives_nan_where_the_rounded_amax_overflows():
    x = torch.zeros(2, 32)
    x[0, 0] = 1.75 * 2.0**127
    x[1, 0] = torch.nextafter(x[0, 0], torch.tensor(0.0))
    codes, scales = mx.quantize(x, E2M1, "even")
    assert raw(scales).flatten().tolist() == [255, 252]
    values = mx.dequantize(codes, scales, 32, E2M1)
    assert values[0].isnan().all()
    assert values[1, 0] == 1.5 * 2.0**127


@pytest.mark.parametrize("format", [E4M3, E5M2, E2M1])
def test_every_code_under_every_scale(format):
    q = np.arange(2**format.bits, dtype=np.uint8)
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)[:, None]
    codes = torch.from_numpy(q).repeat(256, 1)
    codes = fp4.pack(codes) if format == E2M1 else codes.view(mx.DTYPES[format])
    scales = scales.view(torch.uint8).expand(256, -(-len(q) // 32)).contiguous().view(torch.float8_e8m0fnu)
    bytes_ = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    exact = torch.from_numpy(q.view(NUMPY[format]).astype(np.float64) * bytes_[:, None])
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        values = mx.dequantize(codes, scales, len(q), format, dtype)
        assert values.dtype == dtype
        # one rounding; torch casts float64 to bfloat16 through float32, which is exact here but for overflow
        expected = exact.float().to(dtype)
        assert torch.equal(values.nan_to_num(nan=0.123), expected.nan_to_num(nan=0.123))
    inside = (exact.abs() <= torch.finfo(torch.bfloat16).max) & (exact.abs() >= 2.0**-126)
    bf16 = mx.dequantize(codes, scales, len(q), format, torch.bfloat16).double()
    assert torch.equal(bf16[inside], exact[inside])


@pytest.mark.parametrize("format", [E4M3, E2M1])
def test_both_orientations_no_rows_and_strides(format):
    x = normal((37, 66), dtype=torch.bfloat16)
    codes, scales, codes_t, scales_t = mx.quantize_both(x, format, "rceil")
    for got, expected in zip((codes, scales), mx.quantize(x, format, "rceil")):
        assert torch.equal(raw(got), raw(expected))
    for got, expected in zip((codes_t, scales_t), mx.quantize(x.t().contiguous(), format, "rceil")):
        assert torch.equal(raw(got), raw(expected))
        assert got.is_contiguous()
    every_third = mx.quantize(x[::3, 1::2], format, "rceil")
    for got, expected in zip(every_third, mx.quantize(x[::3, 1::2].contiguous(), format, "rceil")):
        assert torch.equal(raw(got), raw(expected))
    codes, scales = mx.quantize(x[:0], format, "rceil")
    assert codes.shape == (0, 33 if format == E2M1 else 66)
    assert scales.shape == (0, 3)
    assert mx.dequantize(codes, scales, 66, format).shape == (0, 66)


@pytest.mark.parametrize("format", [E4M3, E5M2, E2M1])
def test_stochastic_rounding(format):
    n, key = 20_000, torch.tensor([7, -8], dtype=torch.int32)
    row = torch.tensor([0.0, 0.013, -0.3, 0.77, -1.1, 1.9, -2.6, 3.3, 5.2, -5.9, 6.0])
    x = row.repeat(n, 1)
    codes, scales = mx.quantize(x, format, "rceil", key)
    values = mx.dequantize(codes, scales, len(row), format).double()
    assert torch.equal(values, mx.dequantize(*mx.quantize(x, format, "rceil", key), len(row), format).double())
    sigma = values.std(0) / n**0.5
    assert ((values.mean(0) - row).abs() <= 4 * sigma + 1e-6).all()
    assert all(len(column.unique()) <= 2 for column in values.t())
    assert sum(len(column.unique()) == 2 for column in values.t()) >= 8
    other = mx.dequantize(*mx.quantize(x, format, "rceil", key + 1), len(row), format)
    assert not torch.equal(values, other.double())


def test_the_input_is_left_alone():
    x = normal((4, 64))
    before = x.clone()
    for format, rule in PAIRS:
        mx.quantize(x, format, rule)
        mx.quantize(x, format, rule, torch.tensor([1, 2], dtype=torch.int32))
    assert torch.equal(x, before)
