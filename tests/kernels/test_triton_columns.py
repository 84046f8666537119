"""Columns of a weight in Triton: against the definition, bit for bit in the interpreter, for every dtype, order and shape."""
# ruff: noqa: E741

import math

import pytest
import torch

from surokit.kernels.reference import columns as reference
from surokit.kernels.triton import columns as kernels
from tests.kernels.compiling import ANY, Launches, compiled, matrix
from tests.kernels.interpreter import DEVICE, INTERPRETED
from tests.refusals import refused

OPTIONS = {"lr": 0.03, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
B, F = torch.bfloat16, torch.float32


def launch(dtype, O=256, I=512, C=64, order=torch.int32, **options):
    index, clocks = torch.zeros(C, dtype=order), torch.zeros(C, dtype=torch.int32)
    states = (matrix(C, O, F) for _ in range(3))
    kernels.update_columns_(matrix(O, I, dtype), matrix(O, I, dtype), index, *states, clocks, **{**OPTIONS, **options})


SCALARS = {"lr": torch.zeros(()), "grad_scale": torch.ones(()), "found_inf": torch.zeros(())}
LAUNCHES: Launches = {
    "bf16, all on the device": (ANY, lambda: launch(B, **SCALARS)),  # first: compiled for each, and read below
    "bf16": (ANY, lambda: launch(B)),
    "bf16, any number of columns": (ANY, lambda: launch(B, C=51, order=torch.int64, **SCALARS)),
    "bf16, one column": (ANY, lambda: launch(B, O=4096, I=1, C=1, **SCALARS)),
    "float32": (ANY, lambda: launch(F, **SCALARS)),
    "gathered": (ANY, lambda: kernels.gather(matrix(), torch.zeros(64, dtype=torch.int32), matrix(64, 256))),
    "gathered, widened": (
        ANY,
        lambda: kernels.gather(matrix(), torch.zeros(64, dtype=torch.int32), matrix(64, 256, F)),
    ),
    "scattered": (ANY, lambda: kernels.scatter_(matrix(), torch.zeros(64, dtype=torch.int32), matrix(64, 256))),
    "scattered, rounded": (
        ANY,
        lambda: kernels.scatter_(matrix(), torch.zeros(64, dtype=torch.int32), matrix(64, 256, F)),
    ),
}


def weight(O, I, dtype=B, seed=0):
    return torch.randn(O, I, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def some(I, C, dtype=torch.int32, seed=0):
    return torch.randperm(I, generator=torch.Generator().manual_seed(seed))[:C].to(DEVICE, dtype)


def states(W, index, clocks):
    generator = torch.Generator().manual_seed(7)
    w = W.t()[index.long()].float() + 1e-4
    m, v = (torch.randn(w.shape, generator=generator).to(DEVICE) for _ in range(2))
    return [w.contiguous(), m / 10, v.square() / 100, torch.tensor(clocks, dtype=torch.int32, device=DEVICE)]


def same(ours, theirs):
    """Equal in the interpreter; a GPU fuses a product and a sum into one rounding."""
    if INTERPRETED:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    else:
        rtol, atol = (2**-7, 1e-3) if ours.dtype == B else (1e-5, 1e-6)
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("dtype", [F, B, torch.float16], ids=str)
@pytest.mark.parametrize(("O", "I", "C"), [(70, 90, 40), (5, 7, 3), (3000, 2, 1), (64, 64, 64), (1, 1, 1)])
def test_equals_the_definition(O, I, C, dtype):
    W, index = weight(O, I, dtype), some(I, C, torch.int64 if C == 3 else torch.int32)
    ours = [W, *states(W, index, [(0, 1, 7, 5000)[i % 4] for i in range(C)])]
    theirs = [x.clone() for x in ours]
    options = {**OPTIONS, "lr": torch.tensor(0.03, device=DEVICE), "grad_scale": torch.tensor(3.0, device=DEVICE)}
    for step in range(2):
        g = weight(O, I, dtype, seed=step + 1)
        for function, x in ((kernels.update_columns_, ours), (reference.update_columns_, theirs)):
            function(x[0], g, index, *x[1:], **options)
    for mine, other in zip(ours, theirs):
        same(mine, other)


def test_a_rate_on_the_host_or_the_device():
    results = []
    for lr in (0.03, torch.tensor(0.03, device=DEVICE), torch.tensor(0.03, device=DEVICE, dtype=torch.float64)):
        W, index = weight(9, 11), some(11, 4)
        x = [W, *states(W, index, [0] * 4)]
        kernels.update_columns_(x[0], weight(9, 11, seed=1), index, *x[1:], **{**OPTIONS, "lr": lr})
        results.append(x)
    for other in results[1:]:
        for a, b in zip(results[0], other):
            same(a, b)


@pytest.mark.parametrize("found", [1.0, math.nan, 0.0])
def test_a_mask_keeps_every_bit(found):
    W, index = weight(130, 9), some(9, 4)
    x = [W, *states(W, index, [0, 1, 2, 3])]
    before = [t.clone() for t in x]
    g = torch.full_like(W, math.nan if found else 1.0)
    for _ in range(2):
        kernels.update_columns_(x[0], g, index, *x[1:], **OPTIONS, found_inf=torch.tensor(found, device=DEVICE))
    for new, old in zip(x, before):
        assert torch.equal(new, old) == bool(found)


def test_clocks_advance_once_an_update_whatever_the_grid():
    """Of many programs for a column, the last one counts, and leaves the counters as it found them."""
    O, C = 300, 70
    W, index = weight(O, C), some(C, C)
    x = [W, *states(W, index, list(range(C)))]
    for step in range(3):
        kernels.update_columns_(x[0], weight(O, C, seed=step), index, *x[1:], **OPTIONS)
        assert x[-1].tolist() == [t + step + 1 for t in range(C)]
    assert all(not counters.any() for counters in kernels._counters.values())


@pytest.mark.parametrize("which", ["weight", "gradient", "both"])
def test_transposed_memory(which):
    W, g, index = weight(40, 50), weight(40, 50, seed=1), some(50, 30)
    expected, x = [W.clone(), *states(W, index, [1] * 30)], [W.clone(), *states(W, index, [1] * 30)]
    kernels.update_columns_(expected[0], g, index, *expected[1:], **OPTIONS)
    if which != "gradient":
        x[0] = x[0].t().contiguous().t()
    turned = g if which == "weight" else g.t().contiguous().t()
    kernels.update_columns_(x[0], turned, index, *x[1:], **OPTIONS)
    for a, b in zip(x, expected):
        same(a, b)


@pytest.mark.parametrize(("src", "out"), [(B, B), (B, F), (F, B), (F, F), (torch.float16, F)], ids=str)
@pytest.mark.parametrize(("O", "I", "C"), [(70, 90, 40), (5, 7, 3), (2100, 1, 1)])
def test_gather_and_scatter(O, I, C, src, out):
    W, index = weight(O, I, src), some(I, C)
    rows, expected = (torch.empty(C, O, dtype=out, device=DEVICE) for _ in range(2))
    kernels.gather(W, index, rows)
    reference.gather(W, index, expected)
    assert torch.equal(rows, expected)
    back, expected = W.clone().zero_(), W.clone().zero_()
    kernels.scatter_(back, index, rows)
    reference.scatter_(expected, index, rows)
    assert torch.equal(back, expected)


def test_nothing_to_do():
    empty = torch.empty(0, 5, device=DEVICE)
    index, clocks = some(3, 0), torch.empty(0, dtype=torch.int32, device=DEVICE)
    W = weight(5, 3)
    kernels.update_columns_(W, W, index, empty, empty, empty, clocks, **OPTIONS)
    kernels.gather(W, index, empty)
    kernels.scatter_(W, index, empty)
    assert torch.equal(W, weight(5, 3))
    # a shard without rows: its columns are counted as everywhere
    clocks, empty = torch.tensor([3, 4], dtype=torch.int32, device=DEVICE), torch.empty(2, 0, device=DEVICE)
    nothing = weight(0, 3)
    kernels.update_columns_(nothing, nothing, some(3, 2), empty, empty, empty, clocks, **OPTIONS)
    assert clocks.tolist() == [4, 5]
    masked = torch.tensor(1.0, device=DEVICE)
    kernels.update_columns_(nothing, nothing, some(3, 2), empty, empty, empty, clocks, **OPTIONS, found_inf=masked)
    assert clocks.tolist() == [4, 5]


def test_errors():
    W, index = weight(4, 6), some(6, 2)
    w, m, v, clocks = states(W, index, [0, 0])
    for change, error in (
        ({"g_OI": W[:2]}, ValueError),
        ({"g_OI": W.double()}, TypeError),
        ({"index_C": index.to(torch.int16)}, ValueError),
        ({"index_C": index[None]}, ValueError),
        ({"m_CO": m[:1]}, ValueError),
        ({"v_CO": v.t().contiguous().t()}, ValueError),
        ({"w_CO": w.to(B)}, TypeError),
        ({"clocks_C": clocks.float()}, ValueError),
        ({"clocks_C": clocks[:1]}, ValueError),
    ):
        given = {"W_OI": W, "g_OI": W, "index_C": index, "w_CO": w, "m_CO": m, "v_CO": v, "clocks_C": clocks}
        with refused(error):
            kernels.update_columns_(**{**given, **change}, **OPTIONS)
    with refused(ValueError):
        kernels.gather(W, index, w.t())
    with refused(TypeError):
        kernels.scatter_(W, index, clocks)


# -- as compiled


@pytest.mark.parametrize("arch", ANY)
def test_states_travel_in_16_bytes_and_nothing_is_launched_twice(arch):
    ptx = compiled()["columns", "bf16, all on the device", arch]
    assert set(ptx) == {"update_tile"}
    code = ptx["update_tile"]
    wide = sum(code.count(f"ld.global.{form}") for form in ("v4.b32", "v4.f32"))
    assert wide == 12, "3 states, 2,048 numbers in 128 threads, 4 in a load"
    assert code.count("ld.global.b16") == 16, "a thread's elements of the gradient, and none of the weight"
    assert code.count("atom.") == 1
