"""The Hadamard transform in Triton: bit for bit where every order of the sums gives the same, close where it does not."""

import pytest
import torch

from surokit.kernels.reference import hadamard as reference
from surokit.kernels.triton import hadamard, nvfp4
from tests.kernels.compiling import ANY, Launches, compiled, matrix
from tests.kernels.interpreter import DEVICE
from tests.refusals import refused

pytestmark = pytest.mark.sampled

KEY = torch.tensor([12345, -678], dtype=torch.int32)

LAUNCHES: Launches = {
    "16": (ANY, lambda: hadamard.rotate(matrix(), 16)),
    "16, of a transpose": (ANY, lambda: hadamard.rotate(matrix().t(), 16)),
    "32 back": (ANY, lambda: hadamard.rotate(matrix(), 32, back=True)),
    "float32": (ANY, lambda: hadamard.rotate(matrix(dtype=torch.float32), 16)),
    "float16": (ANY, lambda: hadamard.rotate(matrix(dtype=torch.float16), 64)),
    "drawn": (ANY, lambda: hadamard.rotate_drawn(matrix(), 128, KEY)),
    "drawn, back": (ANY, lambda: hadamard.rotate_drawn(matrix().t(), 16, KEY, back=True)),
}

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def same(ours, theirs):
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    integers = torch.int32 if ours.dtype == torch.float32 else torch.int16
    assert torch.equal(ours.cpu().view(integers), theirs.view(integers))  # the sign of a zero too


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("signs", [None, KEY], ids=["fixed", "drawn"])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (33, 71), (70, 128), (3, 200)])
def test_exact_where_the_sums_are(shape, dtype, block, signs, back):
    """Integers times one power of two: float32 holds every partial sum."""
    torch.manual_seed(0)
    on_device = None if signs is None else signs.to(DEVICE)
    for scale in (1.0, 0.0, -0.0) + ((2.0**-7,) if dtype == torch.float16 else (2.0**-100, 2.0**100)):
        x = (torch.randint(-127, 128, shape) * scale).to(dtype)
        same(rotated(hadamard, x.to(DEVICE), block, on_device, back), rotated(reference, x, block, signs, back))


def rotated(by, x, block, signs, back=False):
    return by.rotate(x, block, back) if signs is None else by.rotate_drawn(x, block, signs, back)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["normal", "wide", "huge", "tiny"])
def test_close_to_float64(kind, dtype):
    torch.manual_seed(0)
    x = torch.randn(33, 71, dtype=torch.float64)
    if kind == "wide":
        x *= torch.randn(33, 71).mul(3).exp2()
    else:
        x *= {"normal": 1.0, "huge": 1e3 if dtype == torch.float16 else 1e37, "tiny": 1e-36}[kind]
    x = x.to(dtype)
    ours = hadamard.rotate(x.to(DEVICE), 16).cpu().double()
    exact = reference.rotate(x.double(), 16)
    size = exact.unflatten(1, (-1, 16)).norm(dim=2, keepdim=True).expand(-1, -1, 16).flatten(1)
    step = torch.finfo(dtype)
    bound = exact.abs() * step.eps / 2 + size * 2.0**-20 + step.smallest_normal * step.eps
    assert ((ours - exact).abs() <= bound).all()


@pytest.mark.parametrize("view", [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[::3, 5:40]])
def test_any_strides(view):
    torch.manual_seed(0)
    x = torch.randint(-127, 128, (70, 90)).to(torch.bfloat16)
    same(hadamard.rotate(view(x.to(DEVICE)), 16), reference.rotate(view(x), 16))


def test_what_is_not_finite_stays_in_its_block():
    inf = float("inf")
    x = torch.ones(4, 48, dtype=torch.bfloat16)
    x[0, 3], x[1, 20], x[2, 32], x[2, 33] = float("nan"), inf, inf, -inf
    ours, theirs = hadamard.rotate(x.to(DEVICE), 16).cpu(), reference.rotate(x, 16)
    assert theirs.isfinite().sum() == 4 * 48 - 3 * 16
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_no_rows_and_other_types():
    assert hadamard.rotate(torch.zeros(0, 20, dtype=torch.bfloat16, device=DEVICE), 16).shape == (0, 32)
    for rotate in (hadamard.rotate, nvfp4.quantize_rotated):
        for dtype, block in ((torch.float64, 16), (torch.float32, 256), (torch.float32, 24)):
            with refused(ValueError):
                rotate(torch.zeros(2, 16, dtype=dtype, device=DEVICE), block)


def test_tensor_cores_rotate():
    for (launch, _), ptx in compiled().of("hadamard").items():
        assert ("mma.sync" in ptx["rotate_kernel"]) == (launch != "float32")  # which would be TF32
    assert {arch for _, arch in compiled().of("hadamard")} == set(ANY)
