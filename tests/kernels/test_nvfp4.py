"""NVFP4 against golden vectors and a loop over blocks with ml_dtypes' casts; what is not finite, ends of the range, exactness."""

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from surokit.kernels.reference import fp4, hadamard, nvfp4, random

FILES = ("nvfp4", "nvfp4_rht", "nvfp4_four_over_six")
GOLDEN = {s: load_file(Path(__file__).parents[1] / "golden" / f"{s}.safetensors") for s in FILES}
NAMES = [(s, n.removesuffix(".scale")) for s, g in GOLDEN.items() for n in sorted(g) if n.endswith(".scale")]
FLT_MAX = np.finfo(np.float32).max
KEY = torch.tensor([7, -8], dtype=torch.int32)


def normal(shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def raw(t):
    return t.contiguous().view(torch.uint8)


def ulps(a, b):
    """Distance in float32 steps; equal signs, so the bits of both count upwards."""
    assert a.dtype == b.dtype == torch.float32
    assert ((a.signbit() == b.signbit()) | (a == b)).all()
    return (a.abs().view(torch.int32) - b.abs().view(torch.int32)).abs().max().item()


def by_definition(x, rows, amax=None):
    """Nibbles and scale bytes, block by block with numpy's float32 scalars and ml_dtypes' casts."""
    one, x = np.float32(1), x.float().numpy()
    M, K = x.shape
    nibbles = np.zeros((M, K), np.uint8)
    scales = np.zeros((-(-M // rows), -(-K // 16)), np.uint8)
    with np.errstate(all="ignore"):
        amax = np.abs(x).max() if amax is None else np.float32(amax)
        encode = min(np.float32(2688) / amax, FLT_MAX) if amax else one
        for r, c in np.ndindex(scales.shape):
            here = slice(r * rows, (r + 1) * rows), slice(c * 16, (c + 1) * 16)
            wanted = np.abs(x[here]).max() * (encode * np.float32(1 / 6))
            scale = np.minimum(wanted, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
            inverse = min(one / (scale.astype(np.float32) * (one / encode)), FLT_MAX)
            scales[r, c] = scale.view(np.uint8)
            nibbles[here] = np.clip(x[here] * inverse, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return torch.from_numpy(nibbles), torch.from_numpy(scales)


@pytest.mark.parametrize(("stem", "name"), NAMES, ids=[f"{s}-{n}" for s, n in NAMES])
def test_golden_vectors(stem, name):
    golden = GOLDEN[stem]
    case, rows, *kind = name.split(".")
    x = golden[f"{case}.input"]
    rows = int(rows.split("x")[0])
    if stem == "nvfp4_rht":
        packed, scales, scale = nvfp4.quantize_rotated(x.t())
        x = hadamard.rotate(x.t(), 16)
    else:
        packed, scales, scale = nvfp4.quantize(x, rows, *kind)
    assert torch.equal(raw(scales), golden[f"{name}.scale"])
    assert torch.equal(packed, golden[f"{name}.codes"])
    assert torch.equal(
        scale, (golden[f"{name}.amax"].float() / (1536 if kind else 2688)).clamp(min=2.0**-128).view(1, 1)
    )
    if f"{name}.dequant" in golden:  # they round amax * scale / 2688 in another order
        assert ulps(nvfp4.dequantize(packed, scales, scale, rows, x.shape[1]), golden[f"{name}.dequant"]) <= 2


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 15), (17, 33), (35, 50)])
@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-40, 1e-37, 1e-30, 1.0, 3e4, 1e30, 7e37])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_equals_the_definition(rows, shape, size, dtype):
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    x = (normal(shape, dtype=torch.float64) * size).clamp(-limit, limit).to(dtype)
    x[0, 0] = -0.0
    M, K = shape
    packed, scales, scale = nvfp4.quantize(x, rows)
    nibbles, expected = by_definition(x, rows)
    assert packed.shape == (M, (K + 1) // 2)
    assert scale.shape == (1, 1)
    assert torch.equal(raw(scales), expected)
    assert torch.equal(packed, fp4.pack(nibbles))
    values = nvfp4.dequantize(packed, scales, scale, rows, K)
    # half a step of E2M1 (or what a scale rounded down cuts off), half a subnormal step of E2M1 and of the block's scale
    exact = x.float().double()
    step = (scales.double() * scale.double()).repeat_interleave(rows, 0).repeat_interleave(16, 1)[:M, :K]
    bound = 0.26 * exact.abs() + 0.26 * step + 6.1 * 2.0**-10 * scale.double() + 6 * 2.0**-128
    assert ((values.double() - exact).abs() <= bound).all()


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 20),
    st.integers(1, 40),
    st.integers(-100, 100),
    st.integers(0, 2**31 - 1),
    st.sampled_from([1, 16]),
    st.booleans(),
)
def test_equals_the_definition_anywhere(M, K, exponent, seed, rows, given_amax):
    x = normal((M, K), seed)
    x[0] *= 1000
    x = x * 2.0**exponent
    amax = 0.5 * x.abs().max() if given_amax else None  # half of it: the largest saturate
    packed, scales, _ = nvfp4.quantize(x, rows, amax=amax)
    nibbles, expected = by_definition(x, rows, None if amax is None else amax.item())
    assert torch.equal(raw(scales), expected)
    assert torch.equal(packed, fp4.pack(nibbles))


def test_tiles_of_the_transpose_are_the_transpose():
    x = normal((40, 70), dtype=torch.bfloat16)
    packed, scales, scale = nvfp4.quantize(x, 16)
    packed_t, scales_t, scale_t = nvfp4.quantize(x.t(), 16)
    assert torch.equal(packed_t, fp4.transpose(packed, 70))
    assert torch.equal(raw(scales_t), raw(scales.t()))
    assert torch.equal(scale, scale_t)


@pytest.mark.parametrize("rows", [1, 16])
def test_factors_are_exact(rows):
    """Every code with every scale, in float64."""
    nibbles = torch.arange(16, dtype=torch.uint8).repeat(256 * rows, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    factors = nvfp4.factors(fp4.pack(nibbles), scales, rows, 16)
    assert factors.dtype == torch.bfloat16
    exact = fp4.decode(nibbles).double() * scales.double().repeat_interleave(rows, 0)
    assert torch.equal(factors.double().nan_to_num(nan=0.123), exact.nan_to_num(nan=0.123))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dequantize_rounds_one_product(dtype):
    x = normal((33, 50))
    packed, scales, scale = nvfp4.quantize(x, 1)
    values = nvfp4.dequantize(packed, scales, scale, 1, 50, dtype)
    exact = nvfp4.factors(packed, scales, 1, 50).double() * scale.double()
    assert values.dtype == dtype
    assert torch.equal(values, exact.float().to(dtype))


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("kind", ["mse", "mae"])
@pytest.mark.parametrize("shape", [(1, 1), (20, 50), (64, 64)])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_four_over_six_takes_the_better_scale(rows, kind, shape, size):
    x = normal(shape) * size
    packed, scales, scale = nvfp4.quantize(x, rows, kind)
    values = nvfp4.dequantize(packed, scales, scale, rows, shape[1])
    block = nvfp4._blocks(x, rows).abs().amax(dim=(1, 3))
    six = block.double() / 6 / scale.double()
    # a scale is that of 6 or of 4, up to E4M3's rounding
    ratio = (scales.double() / six)[block > 0]
    fits = ((ratio - 1).abs() < 0.07) | ((ratio - 1.5).abs() < 0.1)
    assert fits.all()

    def error(values):
        difference = nvfp4._blocks(values.double() - x.double(), rows)
        return (difference**2 if kind == "mse" else difference.abs()).sum(dim=(1, 3))

    errors = []
    for factor in (1.0, 1.5):
        candidate = (six * factor).clamp(max=448).float().to(torch.float8_e4m3fn)
        y = nvfp4._blocks(x.double() / scale.double(), rows) / candidate.double()[:, None, :, None]
        q = fp4.encode(nvfp4._joined(y, *shape).float())
        errors.append(error(nvfp4.dequantize(fp4.pack(q), candidate, scale, rows, shape[1])))
    assert (error(values) <= torch.minimum(*errors) * (1 + 1e-4)).all()
    if shape == (64, 64) and rows == 1:
        assert (ratio < 1.2).any()
        assert (ratio > 1.3).any()
        assert error(values).sum() < errors[0].sum()


def test_four_over_six_reaches_the_published_accuracy():
    x = normal((512, 512))
    errors = {}
    for kind in (None, "mse", "mae"):
        for rows in (1, 16):
            values = nvfp4.dequantize(*nvfp4.quantize(x, rows, kind), rows, 512)
            errors[kind, rows] = ((values - x).norm() / x.norm()).item()
    assert errors[None, 1] == pytest.approx(0.0950, abs=0.001)
    assert errors["mse", 1] == pytest.approx(0.0868, abs=0.001)
    assert errors[None, 16] == pytest.approx(0.1115, abs=0.0015)
    assert errors["mae", 1] < errors[None, 1]
    assert errors["mse", 16] < errors[None, 16]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("kind", [None, "mse"])
@pytest.mark.parametrize("key", [None, KEY])
def test_what_is_not_finite_never_becomes_a_number(bad, rows, kind, key):
    x = normal((20, 40), dtype=torch.bfloat16)
    x[3, 17] = bad
    packed, scales, scale = nvfp4.quantize(x, rows, kind, key=key)
    assert scale.isnan().all()
    assert nvfp4.dequantize(packed, scales, scale, rows, 40).isnan().all()
    # with a given amax only its block is lost
    amax = torch.tensor(4.0)
    packed, scales, scale = nvfp4.quantize(x, rows, kind, amax, key)
    assert scale.isfinite().all()
    nan = torch.zeros(20, 40, dtype=torch.bool)
    nan[slice(3, 4) if rows == 1 else slice(0, 16), 16:32] = True
    assert torch.equal(nvfp4.dequantize(packed, scales, scale, rows, 40).isnan(), nan)
    assert torch.equal(nvfp4.factors(packed, scales, rows, 40).isnan(), nan)
    # a given amax that is not finite is no different
    for amax in (torch.tensor(math.nan), torch.tensor(math.inf)):
        assert nvfp4.dequantize(*nvfp4.quantize(torch.ones(2, 16), rows, kind, amax, key), rows, 16).isnan().all()


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("kind", [None, "mse", "mae"])
def test_zeros_no_rows_and_strides(rows, kind):
    packed, scales, scale = nvfp4.quantize(torch.tensor([[0.0, -0.0]] * 3), rows, kind)
    values = nvfp4.dequantize(packed, scales, scale, rows, 2)
    assert torch.equal(values, torch.zeros(3, 2))
    assert torch.equal(values.signbit(), torch.tensor([[False, True]] * 3))
    packed, scales, scale = nvfp4.quantize(torch.ones(0, 40), rows, kind)
    assert (packed.shape, scales.shape, scale.shape) == ((0, 20), (0, 3), (1, 1))
    assert nvfp4.dequantize(packed, scales, scale, rows, 40).shape == (0, 40)
    x = normal((60, 90))
    before = x.clone()
    strided = nvfp4.quantize(x.t()[::2, 1::3], rows, kind)
    for got, expected in zip(strided, nvfp4.quantize(x.t()[::2, 1::3].contiguous(), rows, kind)):
        assert torch.equal(raw(got), raw(expected))
    nvfp4.quantize(x, rows, kind, key=KEY)
    assert torch.equal(x, before)


def test_a_given_amax_of_the_tensor_changes_nothing():
    x = normal((8, 48))
    own = nvfp4.quantize(x, 1)
    for amax in (x.abs().max(), x.abs().max().view(1, 1), x.abs().max().double().view(1)):
        for got, expected in zip(nvfp4.quantize(x, 1, amax=amax), own):
            assert torch.equal(raw(got), raw(expected))


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("kind", [None, "mse"])
def test_stochastic_rounding(rows, kind):
    n = 20_000
    row = torch.tensor([0.0, 0.013, -0.3, 0.77, -1.1, 1.9, -2.6, 3.3, 5.2, -5.9, 6.0])
    x = row.repeat(n, 1)

    def draw(key):
        return nvfp4.dequantize(*nvfp4.quantize(x, rows, kind, key=key), rows, len(row)).double()

    values = draw(KEY)
    assert torch.equal(values, draw(KEY.clone()))
    assert not torch.equal(values, draw(KEY + 1))
    assert all(len(column.unique()) <= 2 for column in values.t())
    assert sum(len(column.unique()) == 2 for column in values.t()) >= 8
    sigma = values.std(0) / n**0.5
    assert ((values.mean(0) - row).abs() <= 4 * sigma + 1e-6)[:-1].all()


def test_draws_count_positions_of_the_operand():
    """Element (m, k) has draw m * K + k, whatever the padding."""
    x = torch.full((5, 21), 0.3)
    packed, scales, scale = nvfp4.quantize(x, 1, amax=torch.tensor(0.7), key=KEY)
    y = x / (scales[0, 0].float() * scale)
    assert len(scales.view(torch.uint8).unique()) == 1
    assert torch.equal(fp4.unpack(packed, 21), fp4.encode(y, KEY))
    assert len(packed.unique()) > 1


ROTATION = torch.tensor([3, 5], dtype=torch.int32)
ANY_SIZE = [(1.0, torch.float32), (1.0, torch.bfloat16), (1e30, torch.float32), (1e-30, torch.float32)]


@pytest.mark.parametrize("shape", [(1, 128), (5, 300), (16, 256)])
@pytest.mark.parametrize(("size", "dtype"), ANY_SIZE, ids=str)
def test_eden_equals_the_definition(shape, size, dtype):
    """Block by block with numpy's float32 scalars and ml_dtypes' casts; the scales' draws by the position of the block."""
    x = (normal(shape) * size).to(dtype)
    packed, scales, scale = nvfp4.quantize_eden(x, 128, ROTATION, KEY)
    y = hadamard.rotate_drawn(x, 128, ROTATION).float().numpy()
    M, K = y.shape
    draws = random.uniform((M, K // 16), KEY).numpy()
    nibbles, one = np.zeros((M, K), np.uint8), np.float32(1)
    reach = 6 * (16 / 17) / 0.93
    amax = np.abs(y).max()
    encode = np.float32(256 * reach) / amax
    for r, c in np.ndindex(M, K // 16):
        block = y[r, 16 * c : 16 * c + 16]
        nearest = (np.abs(block).max() * (encode * np.float32(1 / reach))).astype(ml_dtypes.float8_e4m3fn)
        s = nearest.astype(np.float32)
        codes = np.clip(block * (one / (s * (one / encode))), -6, 6).astype(ml_dtypes.float4_e2m1fn)
        nibbles[r, 16 * c : 16 * c + 16] = codes.view(np.uint8)
        long = kept = np.float32(0)
        for element, code in zip(block * encode, codes.astype(np.float32) * s):
            long, kept = long + element * element, kept + element * code
        wanted = s * (long / kept)
        below, above = neighbours(wanted)
        up = draws[r, c] >= 1 - (wanted - below) / (above - below)
        assert float(scales[r, c]) == (above if up else below)
    assert torch.equal(fp4.unpack(packed, K), torch.from_numpy(nibbles))
    assert float(scale) == np.float32(amax) / np.float32(256 * reach)


def neighbours(wanted):
    """The E4M3 numbers next to one: below or equal, and above."""
    every = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    place = np.searchsorted(every, wanted, side="right")
    return every[place - 1], every[min(place, len(every) - 1)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_eden_of_what_is_not_finite_never_becomes_a_number(bad):
    x = normal((4, 256))
    x[1, 3] = bad
    packed, scales, scale = nvfp4.quantize_eden(x, 128, ROTATION, KEY)
    assert nvfp4.dequantize(packed, scales, scale, 1, 256).isnan().all()


def test_eden_of_zeros_and_of_rows_that_vanish_beside_others():
    x = normal((3, 128))
    x[1] *= 1e-9
    x[2] = 0
    packed, scales, scale = nvfp4.quantize_eden(x, 128, ROTATION, KEY)
    y = nvfp4.dequantize(packed, scales, scale, 1, 128)
    assert y.isfinite().all()
    assert y[0].any()
    assert not y[1:].any()


def test_eden_never_reaches_the_end_of_the_scales():
    """A corrected scale stays below 448, whatever a block looks like: else its length would be cut."""
    x = torch.cat([normal((64, 128)), torch.rand(64, 128) ** 8, torch.eye(128), torch.ones(1, 128)])
    for seed in range(4):
        key = torch.tensor([seed, 1], dtype=torch.int32)
        assert nvfp4.quantize_eden(x, 128, key, KEY)[1].float().max() < 320
