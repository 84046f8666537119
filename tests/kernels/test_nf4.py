"""NF4 against golden vectors and bitsandbytes as installed, both levels; what is not finite, ragged ends, the rounding rule."""

import math
from pathlib import Path

import bitsandbytes.functional as bnb
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from surokit.formats import BNB_FP4, NF4
from surokit.kernels.reference import nf4
from surokit.kernels.reference.dynamic8bit import numbers
from tests.refusals import refused

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "nf4.safetensors")
NAMES = sorted(n.removesuffix(".dequant") for n in GOLDEN if n.endswith(".dequant"))
NUMBERS = torch.tensor(NF4.values)


def normal(shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def nibbles(codes, elements):
    codes = codes.flatten()
    return torch.stack((codes >> 4, codes & 15), 1).flatten()[:elements].long()


def shapes(M, K):
    """Of codes and scales: by rows where a row is whole bytes and whole blocks, else flat."""
    codes = (M, K // 2) if K % 2 == 0 else (1, -(-M * K // 2))
    return codes, (M, K // 64) if K % 64 == 0 else (1, -(-M * K // 64))


@pytest.mark.parametrize("name", NAMES)
def test_golden_vectors(name):
    case, mode = name.split(".")
    x = GOLDEN[f"{case}.input"]
    codes, scales, second = nf4.quantize(x, 256 if mode == "double" else 0)
    assert torch.equal(codes.flatten(), GOLDEN[f"{name}.codes"])
    if mode == "single":
        assert torch.equal(scales.flatten(), GOLDEN[f"{name}.absmax"])
    else:
        assert torch.equal(second[0], GOLDEN[f"{name}.absmax_scale"])
        assert torch.equal(second[1], GOLDEN[f"{name}.absmax_offset"])
        if case != "zero":  # there all scales are equal, and what is left of them has scale 0: its codes mean nothing
            assert torch.equal(scales.flatten(), GOLDEN[f"{name}.absmax_codes"])
    assert torch.equal(nf4.dequantize(codes, scales, second, tuple(x.shape)), GOLDEN[f"{name}.dequant"])


def test_tables_are_those_of_the_vectors():
    assert torch.equal(NUMBERS, GOLDEN["codebook"])
    assert torch.equal(torch.tensor(numbers(signed=True)), GOLDEN["dynamic_map"])
    assert list(numbers(signed=True)) == sorted(set(numbers(signed=True)))


def against_bitsandbytes(x, double, format=NF4):
    M, K = x.shape
    codes, scales, second = nf4.quantize(x, 256 if double else 0, format)
    assert (codes.shape, scales.shape) == shapes(M, K)
    theirs, state = bnb.quantize_4bit(
        x.contiguous(),
        blocksize=64,
        quant_type=format.name.removeprefix("bnb_"),
        compress_statistics=double,
        quant_storage=torch.uint8,
    )
    # its FP4 has two zeros, and which one it takes differs between processors and GPUs
    numbers_of = torch.tensor(format.values)
    assert torch.equal(numbers_of[nibbles(codes, M * K)], numbers_of[nibbles(theirs, M * K)])
    assert format == BNB_FP4 or torch.equal(codes.flatten(), theirs.flatten())
    if double:
        assert torch.equal(second[0], state.state2.absmax)
        assert torch.equal(second[1][0], state.offset)
        nearly_equal(nf4.quantize(x, 0, format)[1].flatten() - state.offset, second[0], scales.flatten(), state.absmax)
        scales = state.absmax.view(scales.shape)
    else:
        assert second == ()
        assert torch.equal(scales.flatten(), state.absmax)
    values = nf4.dequantize(codes, scales, second, (M, K), x.dtype, format)
    assert values.dtype == x.dtype
    # as one row: release 0.50.2 decodes with wrong scales where an even row is no multiple of 64
    state.shape = (1, M * K)
    assert torch.equal(values, bnb.dequantize_4bit(theirs, state).view(M, K))


def nearly_equal(x, absmax, ours, theirs):
    """Codes of scales are the nearest; on a CPU bitsandbytes looks up the nearest of a grid of 65,536 points instead."""
    values = torch.tensor(numbers(signed=True), dtype=torch.float64)
    absmax = absmax.double().repeat_interleave(256)[: len(x)]
    y = (x.double() / absmax)[absmax > 0]  # codes with scale 0 mean nothing
    ours, theirs = ((y - values[codes.long()[absmax > 0]]).abs() for codes in (ours, theirs))
    nearest, next_nearest = (y[:, None] - values).abs().topk(2, largest=False).values.T
    assert (ours <= nearest + 1e-7).all()
    assert (theirs <= nearest + 2 / 65535).all()
    assert (ours == theirs)[
        next_nearest > nearest + 2 / 65535
    ].all()  # a grid has its own opinion of what is halfway only


@pytest.mark.parametrize(
    "shape", [(1, 64), (1, 1), (3, 5), (2, 96), (5, 63), (16, 128), (7, 65), (130, 128), (301, 57)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("format", [NF4, BNB_FP4], ids=str)
def test_equals_bitsandbytes(shape, dtype, double, format):
    against_bitsandbytes(normal(shape, dtype=dtype), double, format)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 200),
    st.integers(-100, 100),
    st.integers(0, 2**31 - 1),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)
def test_equals_bitsandbytes_anywhere(M, K, exponent, seed, dtype, double):
    x = normal((M, K), seed)
    x[0] *= 1000
    against_bitsandbytes((x * 2.0**exponent).to(dtype), double)


@pytest.mark.parametrize("double", [0, 256])
@pytest.mark.parametrize("shape", [(0, 64), (0, 5), (1, 1), (3, 43), (4, 64), (9, 130)])
@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-37, 1e-30, 1.0, 3e4, 1e36])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_nearest_number_of_the_table(double, shape, size, dtype):
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    x = (normal(shape, dtype=torch.float64) * size).clamp(-limit, limit).to(dtype)
    before = x.clone()
    codes, scales, second = nf4.quantize(x, double)
    assert torch.equal(x, before)
    assert tuple(codes.shape) == shapes(*shape)[0]
    assert tuple(scales.shape) == shapes(*shape)[1]
    single = nf4.quantize(x)[1].flatten()
    exact = x.float().double().flatten()
    blocks = torch.nn.functional.pad(exact.abs(), (0, -len(exact) % 64)).view(-1, 64)
    assert torch.equal(single.double(), blocks.amax(1))
    values = nf4.dequantize(codes, scales, second, shape)
    assert values.shape == shape
    assert values.isfinite().all()
    absmax = single.double().repeat_interleave(64)[: len(exact)]
    usable = absmax >= 1e-38  # below, the quotient is taken with this
    distance = (exact[:, None] / absmax[:, None] - NUMBERS.double()).abs()[usable]
    chosen = distance.gather(1, nibbles(codes, len(exact))[usable][:, None])[:, 0]
    assert (chosen <= distance.amin(1) + 1e-6).all()
    if not double:
        assert torch.equal(values.flatten(), NUMBERS[nibbles(codes, len(exact))] * absmax.float())
        assert ((values.flatten().double() - exact).abs() <= 0.152 * absmax + 1e-38).all()


def test_the_table_of_the_other_format_is_that_of_bitsandbytes():
    assert torch.equal(torch.tensor(BNB_FP4.values), bnb.get_4bit_type("fp4", device="cpu"))
    assert [BNB_FP4.values[code] for code in BNB_FP4.ascending] == sorted(set(BNB_FP4.values))
    assert NF4.ascending == tuple(range(16))


def test_midpoints_of_the_other_format_go_where_bitsandbytes_puts_them():
    middles = torch.tensor(nf4.midpoints(BNB_FP4))
    inf = torch.tensor(math.inf)
    x = torch.cat((middles, middles.nextafter(inf), middles.nextafter(-inf), torch.zeros(21), torch.ones(1)))
    against_bitsandbytes(x.view(1, 64), False, BNB_FP4)


def test_midpoints_go_to_the_lower_code():
    middles = (0.5 * (NUMBERS[:-1].double() + NUMBERS[1:].double())).float()
    below, above = (torch.nextafter(middles, torch.tensor(limit)) for limit in (-2.0, 2.0))
    for y, expected in ((below, range(15)), (middles, range(15)), (above, range(1, 16))):
        x = torch.zeros(1, 64)
        x[0, :15], x[0, 63] = y, 1.0
        assert nibbles(nf4.quantize(x)[0], 15).tolist() == list(expected)


def test_full_blocks_multiply_by_the_reciprocal_and_the_partial_one_divides():
    absmax = normal((4000,)).abs() + 0.5
    middles = (0.5 * (NUMBERS[:-1].double() + NUMBERS[1:].double())).float()
    x = torch.cat([torch.nextafter(absmax * middles[3], torch.tensor(limit)) for limit in (-9.0, 9.0)])
    absmax = absmax.repeat(2)
    divided, multiplied = (3 + (y > middles[3]).long() for y in (x / absmax, x * (1 / absmax)))
    differ = (divided != multiplied).nonzero()[:20, 0]
    assert len(differ) == 20
    for i in differ:
        row = torch.zeros(1, 66)
        row[0, 0] = row[0, 64] = x[i]
        row[0, 1] = row[0, 65] = absmax[i]
        codes = nibbles(nf4.quantize(row)[0], 66)
        assert (codes[0], codes[64]) == (multiplied[i], divided[i])
        against_bitsandbytes(row, False)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [(0, 3), (1, 69)])
def test_what_is_not_finite_never_becomes_a_number(bad, place):
    x = normal((2, 70), dtype=torch.bfloat16)
    clean = nf4.dequantize(*nf4.quantize(x), (2, 70))
    x[place] = bad
    codes, scales, second = nf4.quantize(x)
    values = nf4.dequantize(codes, scales, second, (2, 70)).flatten()
    first = (place[0] * 70 + place[1]) // 64 * 64
    lost = torch.zeros(140, dtype=torch.bool)
    lost[first : first + 64] = True
    assert torch.equal(values.isnan(), lost)
    assert torch.equal(values[~lost], clean.flatten()[~lost])
    # the mean of the scales is shared by all
    assert nf4.dequantize(*nf4.quantize(x, 256), (2, 70)).isnan().all()


@pytest.mark.parametrize("double", [0, 256])
def test_non_contiguous_and_equal_scales(double):
    x = normal((90, 60))[::2, 1::3].t()
    for got, expected in zip(nf4.quantize(x, double)[:2], nf4.quantize(x.contiguous(), double)[:2]):
        assert torch.equal(got, expected)
    ones = torch.ones(5, 64)
    assert torch.equal(nf4.dequantize(*nf4.quantize(ones, double), (5, 64)), ones)


def test_accuracy_on_normal_numbers():
    x = normal((256, 1024))
    error = {d: ((nf4.dequantize(*nf4.quantize(x, d), (256, 1024)) - x).norm() / x.norm()).item() for d in (0, 256)}
    assert error[0] == pytest.approx(0.0947, abs=0.004)
    assert error[256] == pytest.approx(error[0], rel=0.01)


def test_other_lengths_of_double_quantization_are_refused():
    with refused(ValueError):
        nf4.quantize(torch.ones(1, 64), 64)
