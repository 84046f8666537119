"""Products with frozen, quantized weights: the decoded tiles bit for bit, the products by relative error, both directions."""

from typing import Any

import pytest
import torch

from surokit.formats import BNB_FP4, E4M3, NF4
from surokit.kernels.reference import gemm as reference
from surokit.kernels.reference import nf4, nvfp4
from surokit.kernels.reference.quantize import decode, quantize
from surokit.kernels.triton import gemm
from tests.kernels.compiling import ANY, Launches, compiled, matrix
from tests.kernels.interpreter import DEVICE
from tests.refusals import refused

pytestmark = pytest.mark.sampled

CODES = (matrix(512, 256, torch.uint8), matrix(32, 32, torch.float8_e4m3fn), torch.ones(1, 1))
SCALES = (matrix(512, 8, torch.uint8), (torch.ones(16), torch.ones(1)), (512, 512))
TILES = (matrix(512, 512, torch.float8_e4m3fn), torch.ones(4, 4), 128, 128)

LAUNCHES: Launches = {
    "nvfp4": (ANY, lambda: gemm.dequantize_mm_nvfp4(matrix(), *CODES, 16)),
    "nvfp4 transposed": (ANY, lambda: gemm.dequantize_mm_nvfp4(matrix(), *CODES, 16, True)),
    "nf4": (ANY, lambda: gemm.dequantize_mm_nf4(matrix(), CODES[0], *SCALES)),
    "nf4 transposed": (ANY, lambda: gemm.dequantize_mm_nf4(matrix(), CODES[0], *SCALES, True)),
    "fp8": (ANY, lambda: gemm.dequantize_mm_fp8(matrix(), *TILES)),
    "fp8 transposed": (ANY, lambda: gemm.dequantize_mm_fp8(matrix(), *TILES, True)),
    "few tokens": (ANY, lambda: gemm.dequantize_mm_nvfp4(matrix(8), *CODES, 16)),
}


def put(*tensors):
    """On the device, inside tuples too."""
    return tuple(
        put(*t) if isinstance(t, tuple) else t.to(DEVICE) if isinstance(t, torch.Tensor) else t for t in tensors
    )


class Storage:
    """A weight quantized for storage, with its product in both implementations and what it decodes to."""

    def __init__(self, format, w_NK):
        self.shape = tuple(w_NK.shape)
        self.name = format[0]
        self.options: dict[str, Any] = {}
        K = self.shape[1]
        if self.name == "nvfp4":
            self.arguments = (*nvfp4.quantize(w_NK, format[1]), format[1])
            self.decoded = nvfp4.dequantize(*self.arguments, K)
        elif self.name == "nf4":
            table = format[2] if len(format) > 2 else NF4
            self.arguments = (*nf4.quantize(w_NK, format[1], table), self.shape)
            self.decoded = nf4.dequantize(*self.arguments, format=table)
            self.options = {"format": table}
        else:
            self.arguments = (*quantize(w_NK, E4M3, *format[1]), *format[1])
            self.decoded = decode(*self.arguments)

    def product(self, module, x, transposed=False):
        odd = {"columns": self.shape[1]} if self.name == "nvfp4" and transposed else {}
        arguments = put(*self.arguments) if module is gemm else self.arguments
        return getattr(module, f"dequantize_mm_{self.name}")(
            x, *arguments, transposed=transposed, **odd, **self.options
        )


FORMATS: list[tuple[Any, ...]] = [("nvfp4", 1), ("nvfp4", 16), ("nf4", 0), ("nf4", 256), ("nf4", 256, BNB_FP4)]
FORMATS += [("fp8", tile) for tile in ((128, 128), (0, 0), (1, 0), (1, 32), (16, 16))]
each_format = pytest.mark.parametrize("format", FORMATS, ids=str)


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight(N, K):
    """Rows of different size, zeros among them."""
    return (
        gaussian(N, K, seed=1) * torch.exp2(torch.arange(N) % 9 - 4.0)[:, None] * (torch.arange(N) % 7 != 3)[:, None]
    ).bfloat16()


def difference(ours, exact):
    return (ours.cpu().double() - exact).norm() / exact.norm()


@each_format
@pytest.mark.parametrize("shape", [(1, 1), (33, 71), (130, 200), (40, 192)])
def test_tiles_are_decoded_bit_for_bit(shape, format):
    """The product with the identity is the weight."""
    N, K = shape
    storage = Storage(format, weight(N, K))
    expected = storage.decoded.bfloat16()
    for transposed, size, target in ((False, K, expected.t()), (True, N, expected)):
        x = torch.eye(size, dtype=torch.bfloat16)
        assert torch.equal(storage.product(gemm, x.to(DEVICE), transposed).cpu(), target)
        assert torch.equal(storage.product(reference, x, transposed), target)


@each_format
@pytest.mark.parametrize("shape", [(1, 40, 71), (17, 130, 200), (150, 33, 128)])
def test_products(shape, format):
    T, N, K = shape
    storage = Storage(format, weight(N, K))
    exact_NK = storage.decoded.double()
    for transposed, size, w in ((False, K, exact_NK.t()), (True, N, exact_NK)):
        for dtype in (torch.bfloat16, torch.float16):
            x = gaussian(T, size).to(dtype)
            ours = storage.product(gemm, x.to(DEVICE), transposed)
            assert ours.dtype == dtype
            assert difference(ours, x.double() @ w) < 0.005
            assert difference(storage.product(reference, x, transposed), x.double() @ w) < 0.005


@each_format
@pytest.mark.parametrize("size", [0.0, 2.0**-60, 2.0**60])
def test_both_ends_of_the_range(size, format):
    storage = Storage(format, weight(20, 70) * size)
    x = gaussian(5, 70).bfloat16()
    ours, exact = storage.product(gemm, x.to(DEVICE)), x.double() @ storage.decoded.double().t()
    assert (ours.cpu().double() - exact).norm() <= 0.005 * exact.norm()


@each_format
@pytest.mark.parametrize("view", [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[::3]])
def test_any_strides(view, format):
    x = view(gaussian(30, 40).bfloat16())
    storage = Storage(format, weight(20, x.shape[1]))
    base = view(gaussian(30, 40).bfloat16().to(DEVICE))
    assert torch.equal(storage.product(gemm, base), storage.product(gemm, base.contiguous()))


def test_nan_stays_in_its_row():
    w = weight(20, 128)
    w[6, 100] = float("nan")
    for format in (("nvfp4", 1), ("nf4", 0), ("fp8", (1, 0))):
        storage = Storage(format, w)
        y = storage.product(gemm, torch.ones(3, 128, dtype=torch.bfloat16, device=DEVICE)).cpu()
        if format[0] == "nvfp4":  # its scale is of the whole tensor
            assert y.isnan().all()
        else:
            assert y.isnan().nonzero()[:, 1].unique().tolist() == [6]


@each_format
def test_no_tokens(format):
    storage = Storage(format, weight(20, 70))
    for transposed, columns in ((False, 20), (True, 70)):
        x = torch.zeros(0, 90 - columns, dtype=torch.bfloat16, device=DEVICE)
        assert storage.product(gemm, x, transposed).shape == (0, columns)


def test_clear_errors():
    storage = Storage(("fp8", (0, 0)), weight(20, 70))
    with refused(TypeError):
        storage.product(gemm, torch.zeros(2, 70, device=DEVICE))
    with refused(ValueError):
        storage.product(gemm, torch.zeros(2, 69, dtype=torch.bfloat16, device=DEVICE))
    with refused(ValueError):
        storage.product(gemm, torch.zeros(2, 70, dtype=torch.bfloat16, device=DEVICE), transposed=True)


def test_tensor_cores_multiply():
    opcodes = {80: "mma.sync", 89: "mma.sync", 90: "wgmma", 100: "tcgen05.mma", 120: "mma.sync"}
    for (launch, arch), kernels_ptx in compiled().of("gemm").items():
        ptx = kernels_ptx["dequantize_mm_kernel"]
        assert ("mma.sync" if launch == "few tokens" else opcodes[arch]) in ptx
        assert "fma.rn" not in ptx
    assert {arch for _, arch in compiled().of("gemm")} == set(opcodes)
