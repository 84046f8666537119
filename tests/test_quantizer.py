"""Quantizers against independent references, bit for bit, and against their own definition on hard inputs."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import surokit as sk
from surokit.formats import FORMATS, TENSOR_CORES, Format
from surokit.kernels.reference import quantize as ref
from surokit.quantizer import Scaling, kind_of
from tests.refusals import refused

GOLDEN = Path(__file__).parent / "golden"
STORED_MX8, STORED_MX4 = sk.Quantizer(sk.E4M3, sk.MX(32)), sk.Quantizer(sk.E2M1, sk.MX(32))
STORED_NF4 = sk.QNF4.storage


def golden_cases():
    """(file, case, mode, quantizer) for every vector of the 8-bit formats."""
    for stem in ("fp8_tensor", "fp8_rowwise", "fp8_block"):
        names = load_file(GOLDEN / f"{stem}.safetensors").keys()
        for codes in sorted(n for n in names if n.endswith(".codes")):
            case, mode = codes.split(".")[:2]
            yield pytest.param(stem, case, mode, id=f"{stem}-{case}-{mode}")


QUANTIZERS = {
    ("fp8_tensor", "e4m3"): sk.Quantizer(sk.E4M3, sk.PerTensor()),
    ("fp8_tensor", "e5m2"): sk.Quantizer(sk.E5M2, sk.PerTensor()),
    ("fp8_rowwise", "row"): sk.Quantizer(sk.E4M3, sk.PerRow()),
    ("fp8_rowwise", "column"): sk.Quantizer(sk.E4M3, sk.PerRow()),
    ("fp8_block", "1x128"): sk.Quantizer(sk.E4M3, sk.Block(1, 128)),
    ("fp8_block", "128x128"): sk.Quantizer(sk.E4M3, sk.Block(128, 128)),
}


SCALINGS = [kind(32, 64) if kind is sk.Block else kind() for kind in Scaling.__subclasses__()]
ALL = [sk.Quantizer(format, scaling) for scaling in SCALINGS for format in scaling.formats]


@pytest.mark.parametrize("q", ALL, ids=str)
def test_every_scaling_serves_the_formats_that_it_names(q):
    assert sk.Quantizer.from_dict(json.loads(json.dumps(q.to_dict()))) == q
    assert FORMATS[q.format.name] == q.format
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
    quantized = sk.quantize(x, q)
    assert quantized.nbytes == q.nbytes(*x.shape) == pytest.approx(q.bits * x.numel() / 8, rel=0.02)
    values = quantized.dequantize()
    assert torch.equal(sk.quantize(values, q).dequantize(), values) or not q.scaling.pow2
    assert (x - values).square().mean() < 0.02
    assert 0 <= quantized.clipped(x) < 0.2
    assert kind_of(q, q) in (None, *TENSOR_CORES)
    if isinstance(q.format, Format) and q.scaling.pow2:  # the codes' numbers have no more bits than the format
        assert not (torch.frexp(values)[0] * 2 ** (q.format.mantissa_bits + 1) % 1).any()


@pytest.mark.parametrize(("stem", "case", "mode"), list(golden_cases()))
def test_codes_and_scales_equal_the_reference(stem, case, mode):
    vectors = load_file(GOLDEN / f"{stem}.safetensors")
    x = vectors[f"{case}.input"]
    prefix = f"{case}.{mode}"
    quantized = sk.quantize(x.t() if mode == "column" else x, QUANTIZERS[stem, mode])
    codes, scales = quantized.codes.view(torch.uint8), quantized.scales
    if mode == "column":  # a scale for each column is a scale for each row of the transpose
        codes, scales = codes.t(), scales.t()
    if f"{prefix}.scale_inv" in vectors:
        expected = vectors[f"{prefix}.scale_inv"]
    else:
        expected = torch.reciprocal(vectors[f"{prefix}.scale"])
    assert torch.equal(scales.reshape(-1), expected.reshape(-1))
    assert torch.equal(codes, vectors[f"{prefix}.codes"])
    if f"{prefix}.dequant" in vectors:
        values = quantized.dequantize()
        assert torch.equal(values.t() if mode == "column" else values, vectors[f"{prefix}.dequant"])


@pytest.mark.parametrize("format", [sk.E4M3, sk.E5M2])
def test_decoding_every_code_equals_torch(format):
    codes = torch.arange(256, dtype=torch.uint8).view(ref.DTYPES[format])
    assert torch.equal(ref.values(codes).nan_to_num(nan=12345.0), codes.to(torch.bfloat16).nan_to_num(nan=12345.0))


@pytest.mark.parametrize(("format", "other"), [(sk.E4M3, ml_dtypes.float8_e4m3fn), (sk.E5M2, ml_dtypes.float8_e5m2)])
def test_the_cast_equals_ml_dtypes_on_every_bfloat16(format, other):
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    x = x[~x.isnan()]
    codes = ref.encode(x[None], torch.ones(1, 1), format)
    expected = np.clip(x.numpy(), -format.max, format.max).astype(other)
    assert np.array_equal(codes.view(torch.uint8).numpy()[0], expected.view(np.uint8))


@pytest.mark.parametrize(
    "scaling", [sk.PerTensor(), sk.PerRow(), sk.PerRow(pow2=False), sk.Block(1, 128), sk.Block(128, 128)]
)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (129, 257)])
@pytest.mark.parametrize("magnitude", [0.0, 1e-30, 1.0, 1e30])
def test_every_scaling_on_every_shape_and_size(scaling, shape, magnitude):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * magnitude
    values = sk.quantize(x, sk.Quantizer(sk.E4M3, scaling)).dequantize()
    assert values.shape == x.shape
    assert values.isfinite().all()
    # half a step of 2^-4 relative for normal numbers, half a subnormal step of the tile's largest below
    step = x.abs().max() * 2 * sk.E4M3.min_subnormal / sk.E4M3.max
    if magnitude >= 1:
        assert ((values - x).abs() <= x.abs() * 2**-4 + step).all()


def test_nan_stays_nan_and_only_in_its_own_tile():
    x = torch.ones(4, 8)
    x[1, 3] = float("nan")
    values = sk.quantize(x, sk.Quantizer(sk.E4M3, sk.PerRow())).dequantize()
    assert values[1].isnan().any()
    assert torch.equal(values[[0, 2, 3]], x[[0, 2, 3]])


EVERY_QUANTIZER = sorted({q for r in sk.recipes.values() for g in r.gemms for q in (g.a, g.b, r.storage) if q}, key=str)


@pytest.mark.parametrize("q", EVERY_QUANTIZER, ids=str)
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_what_is_not_a_number_never_becomes_one(q, bad):
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    x[3, 5] = bad
    assert not sk.quantize(x, q, seed=0).dequantize()[3, 5].isfinite()


@pytest.mark.parametrize("q", EVERY_QUANTIZER, ids=str)
@pytest.mark.parametrize("shape", [(0, 64), (1, 1), (3, 5), (17, 130), (33, 96)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_quantizer_takes_every_shape_and_width(q, shape, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    quantized = sk.quantize(x, q, seed=0)
    assert quantized.shape == shape
    y = quantized.dequantize(dtype)
    assert y.shape == shape
    assert y.dtype == dtype
    step = 2.0 ** -getattr(q.format, "mantissa_bits", 1)
    assert ((y - x).abs() <= (x.abs().max() if x.numel() else 0.0) * step).all()
    strided = torch.empty(shape[1], shape[0], dtype=dtype).t().copy_(x)
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(
            (p.contiguous() for p in quantized.parts), (p.contiguous() for p in sk.quantize(strided, q, seed=0).parts)
        )
    )


@pytest.mark.parametrize("q", [q for q in EVERY_QUANTIZER if q.transposable], ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (17, 130), (33, 96)])
def test_square_tiles_turn_without_rounding(q, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sk.quantize(x, q).t().dequantize(), sk.quantize(x.t(), q).dequantize())


@pytest.mark.parametrize("q", EVERY_QUANTIZER, ids=str)
@pytest.mark.parametrize("dimension", [0, 1])
def test_parts_that_separate_have_the_codes_of_the_whole(q, dimension):
    told = set()
    for step in (1, 3, 16, 32, 64, 128):
        sizes = [step, 2 * step, step]
        parts = [100.0**i * torch.randn((n, 64) if dimension == 0 else (24, n)) for i, n in enumerate(sizes)]
        told.add(q.separates(dimension, sizes))
        if q.separates(dimension, sizes):
            whole, apart = torch.cat(parts, dimension), [sk.quantize(part, q).dequantize() for part in parts]
            assert torch.equal(sk.quantize(whole, q).dequantize(), torch.cat(apart, dimension))
    whole_tensor = isinstance(q.scaling, sk.PerTensor | sk.NV | sk.NFBlock) or q.rounding == "stochastic"
    along_rows = isinstance(q.scaling, sk.PerRow) and dimension == 1
    assert (True in told) != (whole_tensor or along_rows)


@pytest.mark.parametrize("q", EVERY_QUANTIZER, ids=str)
@pytest.mark.parametrize("dimension", [0, 1])
def test_parts_that_join_have_codes_of_their_own_or_a_scale_in_common(q, dimension):
    over_all = isinstance(q.scaling, sk.PerTensor | sk.PerRow) and q.rounding == "nearest" and not q.hadamard
    for sizes in ([5, 7], [64, 128], [128, 256]):
        assert q.joins(dimension, sizes) == (over_all or q.separates(dimension, sizes))


@pytest.mark.parametrize("q", EVERY_QUANTIZER, ids=str)
def test_zeros_stay_zeros(q):
    assert (sk.quantize(torch.zeros(40, 72), q, seed=0).dequantize() == 0).all()


def test_a_seed_repeats_what_is_drawn():
    q = sk.Quantizer(sk.E2M1, sk.NV(16), rounding="stochastic")
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    first, again, other = (sk.quantize(x, q, seed=s).codes for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.manual_seed(0)
    drawn, next_draw = sk.quantize(x, q).codes, sk.quantize(x, q).codes
    assert not torch.equal(drawn, next_draw)
    with refused(ValueError):
        sk.quantize(x, q, seed=1, generator=torch.Generator())


@pytest.mark.parametrize("q", EVERY_QUANTIZER, ids=str)
def test_quantizers_survive_as_plain_data(q):
    assert sk.Quantizer.from_dict(json.loads(json.dumps(q.to_dict()))) == q


def test_a_checkpoint_of_the_first_version_still_reads():
    data = {"format": "e4m3", "scaling": {"kind": "PerRow", "pow2": True}, "rounding": "nearest"}
    assert sk.Quantizer.from_dict(data) == sk.Quantizer(sk.E4M3, sk.PerRow())


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 70),
    st.integers(1, 140),
    st.integers(0, 2**31 - 1),
    st.sampled_from([sk.PerTensor(), sk.Block(8, 8), sk.Block(128, 128)]),
)
def test_square_tiles_look_the_same_transposed(rows, columns, seed, scaling):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    q = sk.Quantizer(sk.E4M3, scaling)
    turned, direct = sk.quantize(x, q).t(), sk.quantize(x.t(), q)
    assert torch.equal(turned.codes.view(torch.uint8), direct.codes.view(torch.uint8))
    assert torch.equal(turned.scales, direct.scales)


@pytest.mark.parametrize("format", [sk.E4M3, sk.E5M2])
def test_stochastic_rounding_is_unbiased_and_follows_its_seed(format):
    x = torch.tensor([0.0, 1.03, -2.9, 3.0e-2, 17.3, 448.0, -format.min_subnormal * 0.3])
    q = sk.Quantizer(format, sk.PerTensor(), rounding="stochastic")
    one = torch.full((1, 1), format.max)  # scale 1
    draws = (
        sk.quantize(x.repeat(20_000, 1), q, amax=one, generator=torch.Generator().manual_seed(1)).dequantize().double()
    )
    again = (
        sk.quantize(x.repeat(20_000, 1), q, amax=one, generator=torch.Generator().manual_seed(1)).dequantize().double()
    )
    assert torch.equal(draws, again)
    sigma = draws.std(0) / 20_000**0.5
    assert ((draws.mean(0) - x.double()).abs() <= 4 * sigma + 1e-12).all()
    neighbours = draws.unique(dim=0)
    assert len(neighbours) > 1


def test_quantized_knows_its_size_and_its_noise():
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    quantized = sk.quantize(x, sk.Quantizer(sk.E4M3, sk.PerRow()))
    assert quantized.nbytes == 256 * 512 + 256 * 4
    assert 30 < quantized.sqnr(x) < 33
    assert sk.quantize(torch.ones(2, 2), sk.Quantizer(sk.E4M3, sk.PerRow())).sqnr(torch.ones(2, 2)) == float("inf")
    assert "256 x 512, e4m3 per row" in repr(quantized)


def test_bad_input_is_named():
    q = sk.Quantizer(sk.E4M3, sk.PerRow())
    with refused(ValueError):
        sk.quantize(torch.ones(3), q)
    with refused(TypeError):
        sk.quantize(torch.ones(3, 3, dtype=torch.int64), q)
    with refused(ValueError):
        sk.Quantizer(sk.formats.BF16_FORMAT, sk.PerRow())
    with refused(ValueError):
        sk.Quantizer(sk.E4M3, sk.PerRow(), rounding="up")  # type: ignore[arg-type]
    with refused(ValueError):
        sk.Quantizer(sk.NF4, sk.MX(32))
    with refused(ValueError):
        sk.Quantizer(sk.E2M1, sk.NV(16), hadamard=16, four_over_six="mse")
    with refused(ValueError):
        sk.Quantizer(sk.E4M3, sk.PerRow(), four_over_six="mse")
    with refused(ValueError):
        sk.Quantizer(sk.E2M1, sk.NV(16), hadamard=8)
    with refused(ValueError):
        sk.Quantizer(sk.NF4, sk.NFBlock(64), rounding="stochastic")
    with refused(ValueError):
        sk.Quantizer(sk.E4M3, sk.PerTensor(history=4), hadamard=16)
    for scaling in (lambda: sk.MX(16), lambda: sk.NV(32), lambda: sk.NV(16, 2), lambda: sk.NFBlock(32)):
        with refused(ValueError):
            scaling()
    with refused(ValueError):
        sk.MX(32, rule="ceil")  # type: ignore[arg-type]
    with refused(ValueError):
        sk.Quantizer(sk.E2M1, sk.NV(16), four_over_six="max")  # type: ignore[arg-type]
    with refused(ValueError):
        sk.quantize(torch.ones(2, 3), q).t()
    with refused(ValueError):
        sk.Block(0, 128)


@pytest.mark.parametrize("q", [q for q in EVERY_QUANTIZER if isinstance(q.scaling, sk.MX | sk.NFBlock)], ids=str)
def test_an_amax_that_nothing_would_use_is_refused(q):
    with refused(ValueError):
        sk.quantize(torch.ones(32, 64), q, amax=torch.ones(1, 1))


@pytest.mark.parametrize("q", [r.storage for r in sk.recipes.values() if r.storage] + [STORED_MX8, STORED_MX4], ids=str)
@pytest.mark.parametrize("cast", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_cast_of_stored_codes_or_scales_is_found_out(q, cast):
    model = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(64, 32, bias=False)})
    sk.apply(model, sk.Recipe("stored", storage=q))
    x = torch.ones(1, 64)
    model["up_proj"](x)
    model.to(cast)
    if q == STORED_NF4 and cast == torch.float32:  # codes are bytes and scales float32: nothing to spoil
        assert model["up_proj"](x).isfinite().all()
        return
    with refused(TypeError):
        model["up_proj"](x.to(cast))


@pytest.mark.parametrize(
    ("x", "q"),
    [
        (torch.ones(2, 4), "fp4"),
        (torch.ones(2, 4), sk.FP8),
        (torch.ones(2, 4), sk.E4M3),
        (np.ones((2, 4), dtype=np.float32), sk.FP8_ROWWISE.forward.a),
        (torch.ones(2, 4).to(torch.float8_e4m3fn), sk.FP8_ROWWISE.forward.a),
    ],
)
def test_what_cannot_be_quantized_is_named(x, q):
    with refused(TypeError):
        sk.quantize(x, q)


@pytest.mark.parametrize("q", EVERY_QUANTIZER, ids=str)
def test_a_lone_quantized_tensor_never_wants_a_gradient(q):
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    Q = sk.quantize(x, q, seed=0)
    assert not Q.dequantize().requires_grad
    assert not any(part.requires_grad for part in Q.parts)


@pytest.mark.parametrize("hadamard", [0, 16])
@pytest.mark.parametrize("figure", ["sqnr", "clipped", "underflow"])
def test_figures_are_of_the_original_and_no_other_shape(figure, hadamard):
    x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))
    Q = sk.quantize(x, sk.Quantizer(sk.E2M1, sk.NV(16), hadamard=hadamard))
    assert getattr(Q, figure)(x) == getattr(Q, figure)(x.reshape(12, 32))
    for shape in ((32, 12), (24, 16), (384,), (11, 32)):
        with refused(ValueError):
            getattr(Q, figure)(torch.ones(shape))


@pytest.mark.parametrize("rows", [1, 16])
def test_a_block_whose_scale_became_zero_vanished_and_was_not_clipped(rows):
    x = torch.full((32, 32), 1e-6)
    x[0, 0] = 1.0
    Q = sk.quantize(x, sk.Quantizer(sk.E2M1, sk.NV(16, rows)))
    zero = (Q.scales.float() == 0).sum()
    assert zero > 0
    assert Q.clipped(x) == 0
    assert Q.underflow(x) == (x.numel() - 1) / x.numel()
    given = sk.quantize(x, sk.Quantizer(sk.E2M1, sk.NV(16, rows)), amax=torch.full((1, 1), 0.01))
    assert given.clipped(x) == 1 / x.numel()  # what stands above a given amax still is
