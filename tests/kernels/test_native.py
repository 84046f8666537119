"""Products for tensor cores without the tensor cores.

Three checks stand in for the hardware: torch's own rules for the arguments (its checks for CUDA, on tensors without data), an
independent formula for the layout of the scales, and a product on the CPU that reads the arguments as the hardware would.
"""

from unittest import mock

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import surokit as sk
from surokit import kernels
from surokit import product as products
from surokit.kernels import native
from surokit.kernels.reference import fp4
from surokit.quantized import Quantized, quantize, sqnr_db
from surokit.quantizer import MX, NV, Block, PerRow, PerTensor, kind_of

E4M3 = torch.float8_e4m3fn
SHAPES = [(1, 1, 1), (1, 17, 5), (16, 32, 16), (33, 70, 129), (130, 300, 257), (128, 640, 256)]  # M, K, N

PAIRS = {
    "tensor": (sk.Quantizer(sk.E4M3, PerTensor()), sk.Quantizer(sk.E4M3, PerTensor())),
    "tensor e5m2": (sk.Quantizer(sk.E5M2, PerTensor()), sk.Quantizer(sk.E4M3, PerTensor())),
    "row": (sk.Quantizer(sk.E4M3, PerRow()), sk.Quantizer(sk.E4M3, PerRow())),
    "row and tensor": (sk.Quantizer(sk.E4M3, PerRow()), sk.Quantizer(sk.E4M3, PerTensor())),
    "block": (sk.Quantizer(sk.E4M3, Block(1, 128)), sk.Quantizer(sk.E4M3, Block(128, 128))),
    "block, rows": (sk.Quantizer(sk.E4M3, Block(1, 128)), sk.Quantizer(sk.E4M3, Block(1, 128))),
    "mx": (sk.Quantizer(sk.E4M3, MX()), sk.Quantizer(sk.E4M3, MX())),
    "nv": (sk.Quantizer(sk.E2M1, NV()), sk.Quantizer(sk.E2M1, NV())),
    "nv tiles": (sk.Quantizer(sk.E2M1, NV()), sk.Quantizer(sk.E2M1, NV(16, 16))),
}
each_pair = pytest.mark.parametrize("pair", PAIRS.values(), ids=list(PAIRS))


def gaussian(M, K, seed=0):
    """Rows and columns of different size, so that a scale in the wrong place shows."""
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(seed))
    return (x * torch.exp2(torch.arange(M)[:, None] % 7 - 3.0) * torch.exp2(torch.arange(K) // 16 % 5 - 2.0)).bfloat16()


def native_product(a, b, dtype=torch.float32):
    kind = kind_of(a.quantizer, b.quantizer)
    assert kind is not None
    return products._native(kind, a, b, dtype, False)


# -- the layout of the scales


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (129, 5), (300, 13), (256, 8)])
@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e8m0fnu], ids=str)
def test_swizzled_scales_stand_where_the_hardware_reads_them(shape, dtype):
    M, C = shape
    scales = torch.randint(1, 120, (M, C), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    ours = native.swizzled(scales.view(dtype))
    assert ours.dtype == dtype
    assert ours.is_contiguous()
    tiles_across = -(-C // 4)
    expected = [0] * (-(-M // 128) * tiles_across * 512)
    for r in range(M):
        for c in range(C):
            tile = (r // 128) * tiles_across + c // 4
            expected[tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4] = int(scales[r, c])
    assert ours.view(torch.uint8).tolist() == expected


def test_a_scale_for_sixteen_rows_is_repeated():
    scales = torch.arange(6, dtype=torch.uint8).view(2, 3).view(E4M3)
    assert native.each_row(scales, 16, 20).view(torch.uint8)[:, 1].tolist() == [1] * 16 + [4] * 4


# -- torch's own rules


def without_data(t):
    """The same shape and strides on the meta device, where torch applies its rules for CUDA."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


@each_pair
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_torch_takes_the_arguments(pair, shape, dtype):
    M, K, N = shape
    a, b = quantize(gaussian(M, K), pair[0]), quantize(gaussian(N, K), pair[1])
    a, b = (Quantized.of(Q.quantizer, tuple(without_data(t) for t in Q.parts), Q.shape) for Q in (a, b))
    y = native_product(a, b, dtype)
    assert (y.shape, y.dtype, y.device.type) == ((M, N), dtype, "meta")


def test_torch_refuses_what_the_layouts_are_for():
    """The checks of the test above do look: scales that are not laid out are an error."""
    codes = torch.empty(256, 256, dtype=E4M3, device="meta")
    scales = torch.empty(256, 2, device="meta")
    one = F.ScalingType.BlockWise1x128
    with pytest.raises(RuntimeError, match="stride"):
        F.scaled_mm(codes, codes.t(), scales, one, scales, one)
    e8m0 = torch.empty(256, 8, dtype=torch.float8_e8m0fnu, device="meta")
    with pytest.raises(RuntimeError, match="swizzle"):
        F.scaled_mm(codes, codes.t(), e8m0, F.ScalingType.BlockWise1x32, e8m0, F.ScalingType.BlockWise1x32)


# -- the numbers


def unswizzled(flat, rows, columns):
    """[rows, columns] float64 from the hardware's order, one scale at a time."""
    across = -(-columns // 4)
    r, c = torch.arange(rows)[:, None], torch.arange(columns)[None]
    place = ((r // 128) * across + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4
    return flat.flatten()[place].float().double()


def hardware(
    mat_a, mat_b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a=None, swizzle_b=None, output_dtype=None, **_
):
    """What torch.nn.functional.scaled_mm computes on a device that has such products."""
    assert mat_b.t().is_contiguous()

    def operand(codes_MK, scales, recipe):
        scales, recipes = ([x] if not isinstance(x, list) else x for x in (scales, recipe))
        if codes_MK.dtype == torch.float4_e2m1fn_x2:
            packed = codes_MK.view(torch.uint8)
            values = fp4.decode(fp4.unpack(packed, 2 * packed.shape[1])).double()
        else:
            values = codes_MK.float().double()
        M, K = values.shape
        kinds = F.ScalingType
        match recipes[0]:
            case kinds.BlockWise1x128:
                assert scales[0].shape == (M, K // 128)
                return values * scales[0].double().repeat_interleave(128, 1)
            case kinds.BlockWise128x128:
                each = scales[0].double().t()[:, : K // 128]
                return values * each.repeat_interleave(128, 0).repeat_interleave(128, 1)
            case kinds.BlockWise1x32:
                return values * unswizzled(scales[0], M, K // 32).repeat_interleave(32, 1)
            case kinds.BlockWise1x16:
                return values * unswizzled(scales[0], M, K // 16).repeat_interleave(16, 1) * scales[1].double()

    return (operand(mat_a, scale_a, recipe_a) @ operand(mat_b.t(), scale_b, recipe_b).t()).to(output_dtype)


@pytest.mark.parametrize("name", ["block", "block, rows", "mx", "nv", "nv tiles"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_arguments_say_the_same_product_as_the_emulation(name, shape):
    M, K, N = shape
    a, b = quantize(gaussian(M, K), PAIRS[name][0]), quantize(gaussian(N, K, seed=1), PAIRS[name][1])
    exact = a.dequantize(torch.float32).double() @ b.dequantize(torch.float32).double().t()
    with mock.patch.object(F, "scaled_mm", hardware):
        y = native_product(a, b)
    assert y.shape == (M, N)
    assert sqnr_db(exact, y) > 120
    assert sqnr_db(exact, products.product(a, b, torch.float32)) > 100  # which is emulated here


@pytest.mark.parametrize("product", ["grad_input", "grad_weight"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_operands_that_drawn_signs_rotated_are_multiplied_too(monkeypatch, product, shape):
    """What tensor cores multiply is the rotated matrices; the key of the signs, which is kept with the scales, is no factor."""
    M, K, N = shape
    gemm = getattr(sk.QUARTET_II, product)
    a = quantize(gaussian(M, K), gemm.a, seed=2)
    b = quantize(gaussian(N, K, seed=1), gemm.b, seed=3, rotation=a.rotation)
    (x, x_scale), (w, w_scale) = a.factors(), b.factors()
    exact = (x.double() * x_scale) @ (w.double() * w_scale).t()
    monkeypatch.setattr(native, "available", lambda kind, device: kind == "nv")
    monkeypatch.setattr(F, "scaled_mm", hardware)
    assert sqnr_db(exact, products.product(a, b, torch.float32)) > 120


class Called(TorchDispatchMode):
    """Names of the operations that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["block", "block, rows"])
@pytest.mark.parametrize(("M", "copies"), [(256, 0), (16, 0), (250, 1), (1, 1)])
@pytest.mark.parametrize("K", [512, 1024])
def test_scales_of_blocks_are_copied_only_to_pad_them(name, M, copies, K):
    a, b = quantize(gaussian(M, K), PAIRS[name][0]), quantize(gaussian(256, K, seed=1), PAIRS[name][1])
    seen: dict[str, torch.Tensor] = {}

    def scaled_mm(mat_a, mat_b, scale_a, recipe_a, scale_b, recipe_b, output_dtype, **_):
        seen.update(a=scale_a, b=scale_b)
        return mat_a.new_empty((len(mat_a), mat_b.shape[1]), dtype=output_dtype)

    with mock.patch.object(F, "scaled_mm", scaled_mm), Called() as called:
        native_product(a, b, torch.bfloat16)
    assert seen["a"].stride(0) == 1
    assert seen["b"].data_ptr() == b.scales.data_ptr()
    assert (seen["a"].data_ptr() == a.scales.data_ptr()) == (not copies)
    assert called.names.count("constant_pad_nd") == 2 * copies  # codes and scales
    assert "clone" not in called.names


@pytest.mark.parametrize("name", ["block", "block, rows"])
def test_products_of_blocks_are_never_summed_fast(name):
    """cuBLAS refuses it, and a recipe may ask for it: products with a scale a tensor or a row do as it says."""
    a, b = quantize(gaussian(32, 256), PAIRS[name][0]), quantize(gaussian(32, 256, seed=1), PAIRS[name][1])
    with mock.patch.object(F, "scaled_mm", side_effect=hardware) as called:
        products._native("block", a, b, torch.bfloat16, fast=True)
    assert not called.call_args.kwargs.get("use_fast_accum")


@pytest.mark.parametrize("name", ["block", "nv tiles"])
def test_a_transposed_weight_is_laid_out_too(name):
    """grad_input multiplies w', whose codes and scales are views of those of w."""
    q_dy, q_w = PAIRS[name]
    dy, w = quantize(gaussian(20, 150), q_dy), quantize(gaussian(150, 70, seed=1), q_w)
    exact = dy.dequantize(torch.float32).double() @ w.dequantize(torch.float32).double()
    with mock.patch.object(F, "scaled_mm", hardware):
        y = native_product(dy, w.t())
    assert sqnr_db(exact, y) > 120


def test_a_scale_of_nan_reaches_the_result_and_nothing_else():
    x = gaussian(33, 70)
    x[3, 5] = float("nan")
    q = PAIRS["mx"][0]
    a, b = quantize(x, q), quantize(gaussian(17, 70, seed=1), q)
    with mock.patch.object(F, "scaled_mm", hardware):
        y = native_product(a, b)
    assert y.isnan().all(1).tolist() == [row == 3 for row in range(33)]
    assert not y[:3].isnan().any()


# -- what is native


@pytest.mark.parametrize(
    "pair",
    [
        (sk.Quantizer(sk.E5M2, MX()), sk.Quantizer(sk.E4M3, MX())),
        (sk.Quantizer(sk.E4M3, Block(1, 128)), sk.Quantizer(sk.E5M2, Block(128, 128))),
        (sk.Quantizer(sk.E5M2, PerTensor()), sk.Quantizer(sk.E5M2, PerTensor())),
        (sk.Quantizer(sk.E2M1, MX()), sk.Quantizer(sk.E2M1, MX())),
        (sk.Quantizer(sk.E4M3, Block(64, 64)), sk.Quantizer(sk.E4M3, Block(64, 64))),
    ],
    ids=str,
)
def test_pairs_that_torch_does_not_multiply_have_no_kind(pair):
    assert kind_of(*pair) is None


@pytest.mark.parametrize(
    ("capability", "cuda", "expected"),
    [
        ((8, 0), "13.0", set()),
        ((8, 9), "12.8", {"tensor", "row"}),
        ((9, 0), "12.8", {"tensor", "row"}),
        ((9, 0), "12.9", {"tensor", "row", "block"}),
        ((10, 0), "13.0", {"tensor", "row", "mx", "nv"}),
        ((12, 0), "13.0", {"tensor", "row", "mx", "nv"}),
    ],
)
def test_a_device_is_asked_for_what_it_has(capability, cuda, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    device = torch.device("cuda", 0)
    assert {kind for kind in native.KINDS if native.available.__wrapped__(kind, device)} == expected
    assert not native.available.__wrapped__("tensor", torch.device("cpu"))
    assert "has no" in native.choice("nv", torch.device("cpu"))[1]


def test_where_triton_cannot_launch_the_reference_serves_and_says_why(monkeypatch):
    """An image without a C compiler imports Triton and fails at the first launch."""
    from surokit.kernels import ops
    from surokit.kernels.reference import quantize
    from surokit.kernels.triton import transpose as probe

    def fails(*_):
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    monkeypatch.setattr(probe, "transpose_fp8", fails)
    ops.fault_of_triton.cache_clear()
    ops.first_serving.cache_clear()
    try:
        served = ops.first_serving(quantize.quantize, torch.device("cuda", 0), ("triton",))
        assert (served.folder, served.function) == ("reference", quantize.quantize)
        assert served.why == served.missed == "Triton cannot launch here (RuntimeError: Failed to find C compiler.)"
    finally:
        ops.fault_of_triton.cache_clear()
        ops.first_serving.cache_clear()


def test_triton_is_tried_on_the_device_that_it_is_asked_of(monkeypatch):
    """It launches on the current one; tried there with memory of another, it would fail and never serve."""
    from surokit.kernels import ops
    from surokit.kernels.triton import transpose as probe

    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", lambda device: mock.MagicMock(__enter__=lambda _: current.append(device)))
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    monkeypatch.setattr(probe, "transpose_fp8", lambda _: None)
    ops.fault_of_triton.cache_clear()
    try:
        assert ops.fault_of_triton(torch.device("cuda", 1)) == ""
        assert current == [torch.device("cuda", 1)]
    finally:
        ops.fault_of_triton.cache_clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a CUDA device")
def test_choices_for_a_device_that_is_not_there_are_refused():
    with pytest.raises(ValueError, match=r"finds no CUDA device here.*choices\('cpu'\)"):
        kernels.choices("cuda")
    backends = {choice.op: choice.backend for choice in kernels.choices()}
    assert backends.pop("product bf16") in ("torch", "float32")
    assert set(backends.values()) <= {"emulated", "cpu", "reference"}
    assert backends["product nv"] == "emulated"
    assert backends["rms_norm"] == "reference"


def test_a_gpu_older_than_the_kernels_runs_the_definitions_and_says_why(monkeypatch):
    """Compute capability 7.5, as the free T4 of a hosted notebook: nothing of ours is even tried there."""
    from surokit.kernels import best, choices, ops
    from surokit.kernels.reference import quantize

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    monkeypatch.setattr(
        ops, "fault_of_triton", lambda device: pytest.fail("Triton was launched on a GPU it does not know.")
    )
    caches = (ops.first_serving, native.available)
    for cached in caches:
        cached.cache_clear()
    try:
        rows = {row.op: row for row in choices("cuda")}
        assert {row.backend for row in rows.values()} == {"reference", "emulated"}
        assert rows["amax"].why == "kernels/triton/quantize needs compute capability 8.9"
        assert rows["rms_norm"].why == "kernels/triton/norm needs compute capability 8.0"
        assert "kernels/cuda/transpose needs compute capability 8.0" in rows["transpose_fp8"].why
        assert rows["product tensor"].backend == "emulated"
        assert best(quantize.quantize, torch.device("cuda")) is quantize.quantize
    finally:
        for cached in caches:
            cached.cache_clear()
