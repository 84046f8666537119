"""The corrected interpreter against torch: every code of the small formats, ties, and random float32 numbers.

The same tests run compiled on a GPU, so they also say that the correction is what the hardware does.
"""
# mypy: allow-untyped-decorators

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.interpreter import DEVICE, INTERPRETED

FP8 = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}  # and the largest finite number
SMALL = [torch.bfloat16, *FP8]


@triton.jit
def cast_kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n).to(y.dtype.element_ty), mask=at < n)


@triton.jit
def dot_kernel(a, b, y, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(y + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@triton.jit
def extremes_kernel(a, b, y, N: tl.constexpr):
    at = tl.arange(0, N)
    left, right = tl.load(a + at), tl.load(b + at)
    tl.store(y + at, tl.maximum(left, right))
    tl.store(y + N + at, tl.minimum(left, right))
    tl.store(y + 2 * N + at, tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL))
    tl.store(y + 3 * N + at, tl.clamp(left, -1.0, 1.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def add_kernel(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + at) + tl.load(x + at))


@triton.jit
def load_kernel(x, y, n, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + at, mask=at < n))


def cast(x, dtype):
    y = torch.empty(x.shape, dtype=dtype, device=DEVICE)
    cast_kernel[(triton.cdiv(x.numel(), 4096),)](x.to(DEVICE), y, x.numel(), BLOCK=4096)
    return y.cpu()


def same(a, b):
    """Equal bits, and NaN in the same places."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    nan = b.float().isnan()
    assert torch.equal(a.float().isnan(), nan)
    assert torch.equal(a.view(integers)[~nan], b.view(integers)[~nan])


def codes(dtype):
    bits = 8 * dtype.itemsize
    return torch.arange(2**bits).to(torch.int16 if bits == 16 else torch.uint8).view(dtype)


@pytest.mark.parametrize("wide", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_every_code_widens(dtype, wide):
    if dtype != torch.bfloat16 or wide == torch.float32:
        same(cast(codes(dtype), wide), codes(dtype).to(wide))


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_every_tie_and_its_neighbours(dtype):
    numbers = codes(dtype).float()
    numbers = numbers[numbers.isfinite()].unique()
    ties = (numbers[1:].double() + numbers[:-1].double()).div(2).float()
    inf = torch.tensor(float("inf"))
    x = torch.cat([ties, ties.nextafter(inf), ties.nextafter(-inf), numbers, torch.tensor([-0.0, 1e-45, -1e-45])])
    same(cast(x, dtype), x.to(dtype))


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_random_float32(dtype):
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(0))
    largest = FP8.get(dtype)
    x = torch.cat(
        [bits.to(torch.int32).view(torch.float32), torch.randn(1000) * 20, torch.tensor([float("inf"), 500, 1e5])]
    )
    clamped = x if largest is None else x.clamp(-largest, largest)
    same(cast(x, dtype), clamped.to(dtype))


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_every_bfloat16_narrows(dtype):
    x = codes(torch.bfloat16)
    same(cast(x, dtype), x.float().clamp(-FP8[dtype], FP8[dtype]).to(dtype))


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_dot(dtype):
    torch.manual_seed(0)
    a, b = torch.randn(2, 32, 32).to(dtype).to(DEVICE)
    y = torch.empty(32, 32, device=DEVICE)
    dot_kernel[(1,)](a, b, y, N=32)
    torch.testing.assert_close(y, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


def test_extremes_and_nan():
    nan = float("nan")
    a, b = torch.tensor([nan, 1.0, nan, 3.0]), torch.tensor([2.0, nan, nan, -4.0])
    y = torch.empty(4, 4, device=DEVICE)
    extremes_kernel[(1,)](a.to(DEVICE), b.to(DEVICE), y, N=4)
    expected = [torch.fmax(a, b), torch.fmin(a, b), torch.maximum(a, b), a.clamp(-1, 1)]
    same(y.cpu(), torch.stack(expected))


needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="a guard of the corrected interpreter")


@needs_interpreter
def test_arithmetic_in_a_small_format_is_refused():
    x = torch.ones(16, dtype=torch.bfloat16)
    with pytest.raises(triton.runtime.errors.InterpreterError, match="compute in float32"):
        add_kernel[(1,)](x, torch.empty_like(x), N=16)


@needs_interpreter
def test_masked_lanes_are_not_zero():
    y = torch.zeros(16)
    load_kernel[(1,)](torch.ones(16), y, 8, N=16)
    assert y[:8].eq(1).all()
    assert y[8:].isnan().all()


@needs_interpreter
@pytest.mark.parametrize("inside", [torch.zeros(15), torch.zeros(32)[:15], torch.zeros(2, 8)[:, :7]])
def test_reading_and_writing_outside_is_an_error(inside):
    with pytest.raises(triton.runtime.errors.InterpreterError, match="outside the tensors"):
        load_kernel[(1,)](inside, torch.zeros(16), 16, N=16)
    with pytest.raises(triton.runtime.errors.InterpreterError, match="outside the tensors"):
        load_kernel[(1,)](torch.zeros(16), inside, 16, N=16)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu],
)
def test_poisoned_memory_is_nan(dtype):
    like = torch.zeros(3, dtype=dtype, device=DEVICE)
    for x in (torch.empty_like(like), like.new_empty(2, 3), torch.empty(3, dtype=dtype, device=DEVICE)):
        assert x.float().isnan().all()


def test_poisoned_integers():
    assert torch.empty(3, dtype=torch.uint8).eq(255).all()
    assert torch.empty_like(torch.zeros(3, dtype=torch.int32)).eq(-1).all()
