"""NVFP4 in Triton: codes, block scales and the tensor's scale bit for bit as the reference; the golden vectors too."""
# mypy: allow-untyped-decorators

import re
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from safetensors.torch import load_file

from surokit.kernels.reference import hadamard
from surokit.kernels.reference import nvfp4 as reference
from surokit.kernels.triton import nvfp4
from tests.kernels.compiling import ANY, Launches, compiled, matrix
from tests.kernels.interpreter import DEVICE

pytestmark = pytest.mark.sampled

GOLDEN = Path(__file__).parents[1] / "golden"
KEY = torch.tensor([12345, -678], dtype=torch.int32)
SIGNS = torch.tensor([-9, 4321], dtype=torch.int32)  # a key of drawn ones
ERRORS = [None, "mse", "mae"]
NAN, INF = float("nan"), float("inf")


def codes(rows):
    return matrix(256, 256, torch.uint8), matrix(256 // rows, 32, torch.float8_e4m3fn)


LAUNCHES: Launches = {
    "1x16": (ANY, lambda: nvfp4.quantize(matrix(), 1)),
    "16x16": (ANY, lambda: nvfp4.quantize(matrix(), 16)),
    "amax given": (ANY, lambda: nvfp4.quantize(matrix(), 1, amax=torch.ones(1, 1))),
    "stochastic": (ANY, lambda: nvfp4.quantize(matrix(), 1, key=KEY)),
    "of a transpose": ((90, 100), lambda: nvfp4.quantize(matrix().t(), 1, key=KEY)),
    "1x16 mse": (ANY, lambda: nvfp4.quantize(matrix(), 1, "mse")),
    "16x16 mae": ((90, 120), lambda: nvfp4.quantize(matrix(), 16, "mae")),
    "float32": ((90,), lambda: nvfp4.quantize(matrix(dtype=torch.float32), 1)),
    "rotated": (ANY, lambda: nvfp4.quantize_rotated(matrix().t(), 16, KEY)),
    "rotated 32": ((90, 100), lambda: nvfp4.quantize_rotated(matrix(), 32)),
    "eden": (ANY, lambda: nvfp4.quantize_eden(matrix(), 128, KEY, KEY)),
    "eden of a transpose": ((90, 100), lambda: nvfp4.quantize_eden(matrix().t(), 128, KEY, KEY)),
    "dequantize": (ANY, lambda: nvfp4.dequantize(*codes(16), torch.ones(1, 1), 16, 512, torch.bfloat16)),
    "factors": (ANY, lambda: nvfp4.factors(*codes(1), 1, 512)),
}


def inputs(M, K, dtype=torch.bfloat16):
    """Normal rows and, among them, zeros of both signs, outliers, powers of two, halves, wide and tiny rows."""
    torch.manual_seed(1000 * M + K)
    x = torch.randn(M, K)
    for row in range(M):
        match row % 10:
            case 1:
                x[row] = 0.0
            case 2:
                x[row] = x[row].sign() * 0.0
            case 3:
                x[row] *= 50
            case 4:
                x[row] = torch.exp2(torch.arange(K) % 7 - 3.0)
            case 5:
                x[row] = (x[row] * 4).round() / 4
            case 6:
                x[row] *= torch.exp2(torch.arange(K) % 28 - 20)
            case 7:
                x[row] *= 1e-4
            case 8:
                x[row] = 2.5
    return x.to(dtype)


def same(ours, theirs):
    """Equal bits; a NaN scale is any NaN, and the codes under it mean nothing."""
    (packed, scales, scale), (their_packed, their_scales, their_scale) = (
        tuple(t.cpu() for t in q) for q in (ours, theirs)
    )
    assert packed.dtype == their_packed.dtype
    assert scales.dtype == their_scales.dtype
    torch.testing.assert_close(scale, their_scale, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(scales.float(), their_scales.float(), rtol=0, atol=0, equal_nan=True)
    assert packed.shape == their_packed.shape
    if their_scales.numel():
        nan = their_scales.float().isnan().repeat_interleave(-(-len(packed) // len(scales)), 0)[: len(packed)]
        nan = nan.repeat_interleave(8, 1)[:, : packed.shape[1]]
        assert torch.equal(packed.masked_fill(nan, 0), their_packed.masked_fill(nan, 0))


def check(x, *args, **named):
    on_device = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in named.items()}
    theirs = reference.quantize(x, *args, **named)
    same(nvfp4.quantize(x.to(DEVICE), *args, **on_device), theirs)
    return theirs


@pytest.mark.parametrize("key", [None, KEY], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("shape", [(1, 1), (33, 71), (40, 130), (16, 16)])
def test_quantize(shape, rows, error, key):
    check(inputs(*shape), rows, error, key=key)


@triton.jit
def error_kernel(x, codes, amax, errors, ROWS: tl.constexpr, C: tl.constexpr, ERROR: tl.constexpr):
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, 16 * C)[None, :]
    tile = tl.reshape(tl.load(x + row * 16 * C + column), (1, ROWS, C, 16))
    at = tl.arange(0, C)[None, :]
    total = tl.load(amax + tl.zeros([1, 1], tl.int32))
    encode = tl.div_rn(tl.full([1, 1], 1536.0, tl.float32), total)
    error = nvfp4._error(tile, tl.load(codes + at), encode, total, 1536.0, ERROR)
    tl.store(errors + at, error)


@pytest.mark.parametrize("error", ["mse", "mae"])
@pytest.mark.parametrize("rows", [1, 16])
def test_errors_of_four_over_six_are_added_in_the_references_order(rows, error):
    """The sums themselves: of the choices that follow from them a last bit decides hardly any."""
    torch.manual_seed(0)
    x = torch.randn(rows, 16 * 64)
    amax = x.abs().amax().view(1, 1)
    _, scales, _ = reference.quantize(x, rows, error)
    errors = torch.empty(1, 64, device=DEVICE)
    error_kernel[(1,)](
        x.to(DEVICE), scales.view(torch.uint8).to(DEVICE), amax.to(DEVICE), errors,
        ROWS=rows, C=64, ERROR=error, enable_fp_fusion=False,
    )  # fmt: skip
    encode = torch.div(torch.full_like(amax, 1536.0), amax)
    assert torch.equal(errors.cpu(), reference._error(reference._blocks(x, rows), scales, encode, amax, error))


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-30, 1e-37, 1e-40, 1e30, 1.7e38, 3.38e38])
@pytest.mark.parametrize("error", [None, "mse"])
@pytest.mark.parametrize("rows", [1, 16])
def test_both_ends_of_the_range(rows, error, value):
    torch.manual_seed(0)
    x = torch.randn(18, 50).clamp(-1, 1)
    x[3] *= 1e-3
    check((x * value).to(torch.bfloat16), rows, error)
    check(x * value, rows, error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("error", ERRORS)
def test_other_types(error, dtype):
    check(inputs(33, 71, dtype), 1, error)


def test_the_scale_takes_every_code():
    """A tensor amax of 2688 makes a block's scale its amax / 6: every code of E4M3, every tie between two, and beyond."""
    values = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (values[1:] + values[:-1]) / 2
    wanted = torch.cat([values, ties, ties.nextafter(torch.tensor(INF)), ties.nextafter(torch.tensor(-INF))])
    x = torch.zeros(len(wanted), 16)
    x[:, 3] = -6 * wanted
    _, scales, _ = check(x, 1, amax=torch.tensor([[2688.0]]))
    assert len(scales.float().unique()) == 0x7F


@pytest.mark.parametrize("amax", [0.0, 1e-37, 0.5, 1e3, 1e38, INF, NAN])
@pytest.mark.parametrize("rows", [1, 16])
def test_a_given_amax(rows, amax):
    check(inputs(20, 40), rows, amax=torch.tensor([[amax]]))


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("amax", [None, torch.tensor([[4.0]])], ids=["own amax", "given amax"])
@pytest.mark.parametrize("rows", [1, 16])
def test_what_is_not_finite(rows, amax, value):
    x = inputs(33, 71)
    x[4, 20] = value
    packed, scales, scale = check(x, rows, amax=amax)
    if amax is None:
        assert scale.isnan()
    else:
        assert scales.float().isnan().sum() == 1
    ours = nvfp4.dequantize(packed.to(DEVICE), scales.to(DEVICE), scale.to(DEVICE), rows, 71).cpu()
    theirs = reference.dequantize(packed, scales, scale, rows, 71)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


VIEWS = [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[::3, 5:40]]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("rows", [1, 16])
def test_any_strides(rows, view):
    x, base = view(inputs(40, 90)), view(inputs(40, 90).to(DEVICE))
    assert base.stride() == x.stride() != (x.shape[1], 1)
    same(nvfp4.quantize(base, rows, key=KEY.to(DEVICE)), reference.quantize(x, rows, key=KEY))


def test_no_rows():
    for rows in (1, 16):
        packed, scales, _ = check(torch.zeros(0, 40, dtype=torch.bfloat16), rows)
        assert nvfp4.factors(packed.to(DEVICE), scales.to(DEVICE), rows, 40).shape == (0, 40)


@pytest.mark.parametrize("key", [None, KEY], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("shape", [(1, 1), (33, 71), (70, 130)])
def test_quantize_rotated(shape, block, key):
    """Multiples of 1/8, so that the sums are exact and no order of them matters."""
    x = (inputs(*shape).float().clamp(-100, 100) * 8).round() / 8
    x = x.to(torch.bfloat16)
    on_device = None if key is None else key.to(DEVICE)
    for ours, theirs in ((x.to(DEVICE), x), (x.to(DEVICE).t(), x.t())):
        expected = reference.quantize(hadamard.rotate(theirs, block), 1, key=key)
        same(reference.quantize_rotated(theirs, block, key), expected)
        same(nvfp4.quantize_rotated(ours, block, on_device), expected)


@pytest.mark.parametrize("value", [0.0, -0.0, 2.0**-100, 2.0**100, NAN, INF])
def test_quantize_rotated_at_both_ends_of_the_range(value):
    x = (inputs(20, 40).float().clamp(-100, 100) * 8).round().mul(value if value == value and value != INF else 1.0)
    if value != value or value == INF:
        x[7, 20] = value
    x = x.to(torch.bfloat16)
    same(nvfp4.quantize_rotated(x.to(DEVICE)), reference.quantize_rotated(x))


@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("shape", [(1, 1), (33, 71), (70, 130), (0, 20)])
def test_quantize_eden(shape, block):
    """Multiples of 1/8, so that the sums of the rotation are exact and no order of them matters."""
    x = ((inputs(*shape).float().clamp(-100, 100) * 8).round() / 8).to(torch.bfloat16)
    for ours, theirs in ((x.to(DEVICE), x), (x.to(DEVICE).t(), x.t())):
        expected = reference.quantize_eden(theirs, block, SIGNS, KEY)
        same(nvfp4.quantize_eden(ours, block, SIGNS.to(DEVICE), KEY.to(DEVICE)), expected)


@pytest.mark.parametrize("value", [0.0, -0.0, 2.0**-100, 2.0**100, NAN, INF])
def test_quantize_eden_at_both_ends_of_the_range(value):
    x = (inputs(20, 200).float().clamp(-100, 100) * 8).round().mul(value if value == value and value != INF else 1.0)
    if value != value or value == INF:
        x[7, 20] = value
    x = x.to(torch.bfloat16)
    ours = nvfp4.quantize_eden(x.to(DEVICE), 128, SIGNS.to(DEVICE), KEY.to(DEVICE))
    same(ours, reference.quantize_eden(x, 128, SIGNS, KEY))


def test_every_code_under_every_scale():
    """256 scales x 16 codes, the sign of zeros too."""
    packed = torch.arange(0, 16, 2, dtype=torch.uint8)
    packed = (packed | (packed + 1) << 4).expand(256, 8).contiguous()
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1).view(torch.float8_e4m3fn)
    for columns in (16, 15):
        on_device = packed.to(DEVICE), scales.to(DEVICE)
        pairs = [(nvfp4.factors(*on_device, 1, columns), reference.factors(packed, scales, 1, columns))]
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            scale = torch.tensor([[0.37]])
            ours = nvfp4.dequantize(*on_device, scale.to(DEVICE), 1, columns, dtype)
            pairs.append((ours, reference.dequantize(packed, scales, scale, 1, columns, dtype)))
        for ours, theirs in pairs:
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0, equal_nan=True)
            finite = ~theirs.isnan()
            assert torch.equal(ours.cpu().signbit()[finite], theirs.signbit()[finite])


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("shape", [(1, 1), (33, 71), (40, 130)])
def test_dequantize(shape, rows):
    quantized = reference.quantize(inputs(*shape), rows)
    for dtype in (torch.float32, torch.bfloat16):
        ours = nvfp4.dequantize(*(t.to(DEVICE) for t in quantized), rows, shape[1], dtype)
        assert torch.equal(ours.cpu(), reference.dequantize(*quantized, rows, shape[1], dtype))
    assert torch.equal(
        nvfp4.factors(*(t.to(DEVICE) for t in quantized[:2]), rows, shape[1]).cpu(),
        reference.factors(*quantized[:2], rows, shape[1]),
    )


@pytest.mark.parametrize("case", ["mixed", "odd33x72", "ties_nvfp4", "tiny", "zero"])
@pytest.mark.parametrize("rows", [1, 16])
def test_golden(rows, case):
    golden = load_file(GOLDEN / "nvfp4.safetensors")
    packed, scales, _ = nvfp4.quantize(golden[f"{case}.input"].to(DEVICE), rows)
    assert torch.equal(packed.cpu(), golden[f"{case}.{rows}x16.codes"])
    assert torch.equal(scales.cpu().view(torch.uint8), golden[f"{case}.{rows}x16.scale"].view(torch.uint8))


@pytest.mark.parametrize("case", ["mixed", "rht64x37", "ties_nvfp4", "zero"])
def test_golden_rotated(case):
    golden = load_file(GOLDEN / "nvfp4_rht.safetensors")
    packed, scales, _ = nvfp4.quantize_rotated(golden[f"{case}.input"].to(DEVICE).t())
    assert torch.equal(packed.cpu(), golden[f"{case}.1x16.codes"])
    assert torch.equal(scales.cpu().view(torch.uint8), golden[f"{case}.1x16.scale"].view(torch.uint8))


def test_compiled_arithmetic_is_the_references():
    """Nothing fused, no fast division, nothing flushed to zero; floor's own .ftz cannot matter: its input is not negative."""
    for launch in LAUNCHES:
        for ptx in compiled()["nvfp4", launch, 90].values():
            assert "fma.rn" not in ptx
            assert "div.full" not in ptx
            assert ".ftz" not in re.sub(r"cvt\.rmi\.ftz", "", ptx)
    assert "div.rn" in compiled()["nvfp4", "1x16", 90]["quantize_kernel"]
    assert "mma.sync" in compiled()["nvfp4", "rotated", 90]["quantize_kernel"]
