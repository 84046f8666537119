"""AdamW with 8-bit moments in Triton: codes, scales and parameters against the definition."""
# mypy: allow-untyped-decorators

import math

import pytest
import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode

from surokit.kernels.reference import adamw8bit as reference
from surokit.kernels.triton import adamw8bit as kernels
from surokit.kernels.triton.adamw8bit import adamw8bit_, encode
from tests.kernels.compiling import ANY, Launches, matrix
from tests.kernels.interpreter import DEVICE
from tests.refusals import refused

OPTIONS = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
KEY = torch.tensor([12345, -678], dtype=torch.int32)
NAMES = ("exp_avgs", "exp_avg_sqs", "absmaxes", "absmax_sqs", "steps")


def state_of(p):
    blocks = -(-p.numel() // reference.BLOCK)
    codes = (torch.zeros(p.shape, dtype=torch.uint8, device=p.device) for _ in range(2))
    absmaxes = (torch.zeros(blocks, device=p.device) for _ in range(2))
    return dict(zip(NAMES, ([x] for x in (*codes, *absmaxes, torch.zeros((), device=p.device)))))


def launch(dtype, keys=None, tensors=1):
    p = matrix(dtype=dtype)
    states = [state_of(p) for _ in range(tensors)]
    lists = {name: [state[name][0] for state in states] for name in NAMES}
    adamw8bit_([p] * tensors, [p] * tensors, **lists, **OPTIONS, keys=keys)


LAUNCHES: Launches = {
    "many": (ANY, lambda: launch(torch.bfloat16, tensors=70)),
    "bf16": (ANY, lambda: launch(torch.bfloat16)),
    "bf16, stochastic": (ANY, lambda: launch(torch.bfloat16, [KEY])),
    "float32": (ANY, lambda: launch(torch.float32)),
}


def normal(*shape, seed=0, scale=1.0, dtype=torch.float32):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE, dtype)


@triton.jit
def encode_kernel(x, borders, codes, absmax, N: tl.constexpr, SIGNED: tl.constexpr):
    at = tl.arange(0, N)[:, None] * 256 + tl.arange(0, 256)[None, :]
    code, top = encode(tl.load(x + at), borders, SIGNED)
    tl.store(codes + at, code)
    tl.store(absmax + tl.arange(0, N), top)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_bit_for_bit(signed):
    """All borders and their neighbours, wide ranges, zeros, subnormals, huge numbers, and blocks with inf and NaN."""
    borders = reference.midpoints(signed, DEVICE)
    one = torch.ones(1, device=DEVICE)
    x = torch.stack(
        [
            torch.cat((borders, one)),
            torch.cat((borders.nextafter(one * 2), one)),
            torch.cat((borders.nextafter(-one), one)),
            normal(256),
            torch.exp(normal(256, scale=20.0)) * normal(256).sign(),
            normal(256, scale=5e37),
            normal(256, scale=1e-41),
            torch.zeros(256, device=DEVICE),
            normal(256, scale=1e-30),
            *(torch.cat((normal(255), one * bad)) for bad in (math.inf, -math.inf, math.nan)),
            *(normal(256, seed=seed) ** 3 for seed in range(4)),
            # sixteen numbers in every gap between borders
            *(torch.cat((torch.lerp(borders[:-1], borders[1:], i / 16), one, one)) for i in range(16)),
        ]
    )
    x = x if signed else x.abs()
    codes = torch.empty(x.shape, dtype=torch.uint8, device=DEVICE)
    absmax = torch.empty(len(x), device=DEVICE)
    encode_kernel[(1,)](x, borders, codes, absmax, N=len(x), SIGNED=signed)
    expected = reference.quantize(x, signed)
    torch.testing.assert_close(absmax, expected[1], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(codes, expected[0])


@pytest.mark.parametrize("shape", [(), (256,), (0, 3), (37, 129)], ids=str)
@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, None), (torch.bfloat16, 7.5)], ids=str)
@pytest.mark.parametrize("size", [0.0, 1.0, 1e-15, 1e15])
def test_equals_the_definition(shape, dtype, scale, size):
    """Each step from the definition's state. A number on a border may fall to either side: sums may be fused on a GPU."""
    ours, theirs = normal(*shape, dtype=dtype), normal(*shape, dtype=dtype)
    grad_scale = None if scale is None else torch.tensor(scale, device=DEVICE)
    mine, other = state_of(ours), state_of(theirs)
    for step in range(3):
        grad = normal(*shape, seed=step + 1, scale=size, dtype=dtype)
        for name in NAMES:
            mine[name][0].copy_(other[name][0])
        ours.copy_(theirs)
        adamw8bit_([ours], [grad], **mine, **OPTIONS, grad_scale=grad_scale)
        reference.adamw8bit_([theirs], [grad], **other, **OPTIONS, grad_scale=grad_scale)
        torch.testing.assert_close(ours, theirs, rtol=8e-3 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
        assert (ours.double() - theirs.double()).norm() <= (
            1e-3 if dtype == torch.bfloat16 else 1e-6
        ) * theirs.double().norm()
        for name in ("absmaxes", "absmax_sqs"):
            torch.testing.assert_close(mine[name][0], other[name][0], rtol=2.5e-7, atol=0)
        for name in ("exp_avgs", "exp_avg_sqs"):
            away = (mine[name][0].int() - other[name][0].int()).abs()
            assert (away <= 1).all()
            assert away.sum() <= 1e-3 * away.numel()
    assert mine["steps"][0] == 3


def test_strided_stochastic_and_masked():
    p = normal(33, 40, dtype=torch.bfloat16)
    grad, keys = normal(33, 40, seed=1, dtype=torch.bfloat16), [KEY.to(DEVICE)]
    turned = p.t().contiguous().t()
    results = []
    for x, g, function in (
        (p.clone(), grad, adamw8bit_),
        (turned, grad.t().contiguous().t(), adamw8bit_),
        (p.clone(), grad, reference.adamw8bit_),
    ):
        state = state_of(x)
        function([x], [g], **state, **OPTIONS, keys=keys)
        results.append((x, *(state[name][0] for name in NAMES)))
    for a, b in zip(results[0], results[1]):
        assert torch.equal(a, b)
    assert (results[0][0] != results[2][0]).float().mean() < 0.01
    before = [x.clone() for x in results[0]]
    x, *state = results[0]
    bad, found = torch.full_like(grad, math.nan), torch.ones((), device=DEVICE)
    adamw8bit_([x], [bad], *([s] for s in state), **OPTIONS, keys=keys, found_inf=found)
    for a, b in zip(results[0], before):
        assert torch.equal(a, b)
    adamw8bit_([x], [bad], *([s] for s in state), **OPTIONS, keys=keys)
    assert x.isnan().all()
    assert state[2].isnan().all()


def several(dtypes, sizes):
    """Lists of parameters, gradients and states of these sizes, the dtypes taken in turn; every third parameter lies oddly."""
    params, grads = [], []
    for i, size in enumerate(sizes):
        dtype = dtypes[i % len(dtypes)]
        p = normal(size + 1, seed=i, dtype=dtype)
        params.append(p[1:] if i % 3 == 2 and size % 16 else p[:-1].clone())
        grads.append(normal(size, seed=100 + i, dtype=dtype))
    states = [state_of(p) for p in params]
    return params, grads, {name: [state[name][0] for state in states] for name in NAMES}


@pytest.mark.parametrize(
    ("dtypes", "sizes", "span"),
    [
        ((torch.float32,), [256, 2304, 0, 16, 4096], 1),
        ((torch.bfloat16, torch.bfloat16, torch.float32), [0, 1, 257, 4500, 0, 2049, 300, 0], 2),
    ],
    ids=["aligned", "odd"],
)
def test_many_tensors_in_a_launch_are_as_one_by_one(dtypes, sizes, span, monkeypatch):
    """Other addresses and sizes, empty tensors at either end, more than a launch takes, several rounds of a program."""
    keys = [(KEY + i).to(DEVICE) for i in range(len(sizes))]
    params, grads, state = several(dtypes, sizes)
    alone = several(dtypes, sizes)
    for i in range(len(sizes)):
        one = {name: [tensors[i]] for name, tensors in alone[2].items()}
        adamw8bit_([alone[0][i]], [alone[1][i]], **one, **OPTIONS, keys=[keys[i]])
    monkeypatch.setattr(kernels, "TENSORS", 4)
    monkeypatch.setattr(kernels, "SPAN", span)
    monkeypatch.setattr(kernels, "PROGRAMS", 1)
    adamw8bit_(params, grads, **state, **OPTIONS, keys=keys)
    for ours, theirs in zip((params, *state.values()), (alone[0], *alone[2].values())):
        for a, b in zip(ours, theirs):
            assert torch.equal(a, b)


def test_many_tensors_take_a_few_launches_and_nothing_from_the_host(monkeypatch):
    """What a captured graph could not hold: numbers read from the device, or brought to it after the first step."""

    class Counted:
        launches = 0

        def __getitem__(self, grid):
            self.launches += 1
            return lambda *args, **options: None

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ops.append(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    ops: list[object] = []
    params, grads, state = several((torch.bfloat16,), [300] * 70)
    monkeypatch.setattr(kernels, "update_blocks", Counted())
    adamw8bit_(params, grads, **state, **OPTIONS)
    with Seen():
        adamw8bit_(params, grads, **state, **OPTIONS)
    assert kernels.update_blocks.launches == 2 * 3
    moved = [op for op in ops if op in (torch.ops.aten.lift_fresh, torch.ops.aten._local_scalar_dense)]
    # gradients and parameters that lie densely are not copied; begin_step takes a handful
    assert (moved, len(ops) < len(params)) == ([], True), ops


def test_errors_and_nothing_to_do():
    p = normal(3, 100)
    state = state_of(p)
    adamw8bit_([], [], [], [], [], [], [], **OPTIONS)
    with pytest.raises(ValueError, match="shorter|longer"):
        adamw8bit_([p], [], **state, **OPTIONS)
    with refused(ValueError):
        adamw8bit_([p], [p[:2]], **state, **OPTIONS)
    with refused(TypeError):
        adamw8bit_([p.double()], [p], **state, **OPTIONS)
    with refused(ValueError):
        adamw8bit_([p], [p], **{**state, "exp_avgs": [p]}, **OPTIONS)
    with refused(ValueError):
        adamw8bit_([p], [p], **{**state, "absmaxes": [p[0]]}, **OPTIONS)
    assert state["steps"][0] == 0
