"""AdamW in Triton: against the definition and scalar arithmetic, for every mixture of dtypes, masked and scaled."""
# mypy: allow-untyped-decorators

import math

import pytest
import torch
import triton
import triton.language as tl

from surokit.kernels.reference.adamw import adamw_ as reference
from surokit.kernels.reference.adamw import stochastic_bf16 as reference_rounding
from surokit.kernels.triton.adamw import adamw_, rounded_bf16
from tests.kernels.compiling import ANY, Launches, matrix
from tests.kernels.interpreter import DEVICE
from tests.kernels.test_adamw import by_hand
from tests.refusals import refused

OPTIONS = {"lr": 0.03, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
B, F = torch.bfloat16, torch.float32


KEY = torch.tensor([12345, -678], dtype=torch.int32)


def launch(*dtypes, keys=None):
    p, grad, m, v = (matrix(dtype=dtype) for dtype in dtypes)
    adamw_([p, p], [grad, grad], [m, m], [v, v], [torch.zeros(()), torch.zeros(())], **OPTIONS, keys=keys)


LAUNCHES: Launches = {
    "bf16": (ANY, lambda: launch(B, B, B, B)),
    "bf16 with float32 moments": (ANY, lambda: launch(B, B, F, F)),
    "bf16, stochastic": (ANY, lambda: launch(B, B, F, F, keys=[KEY, KEY])),
    "float32": (ANY, lambda: launch(F, F, F, F)),
}


def tensors(shape, dtypes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    p, grad, m, v = (torch.randn(shape, generator=generator) for _ in range(4))
    return [t.to(DEVICE, dtype) for t, dtype in zip((p, grad, m / 10, v.square() / 100), dtypes)]


@pytest.mark.parametrize("scale", [1.0, 7.5])
@pytest.mark.parametrize("grads", [[0.0] * 4, [1.0, -2.0, 0.5], [1e-12, 3e-9], [1e15, 1.0, -1e15], [0.3] * 20])
def test_equals_scalar_arithmetic(grads, scale):
    p, m, v, t = (torch.full((1, 1), x, device=DEVICE) for x in (0.7, 0.0, 0.0, 0.0))
    for grad in grads:
        g = torch.tensor([[grad]], device=DEVICE)
        adamw_([p], [g], [m], [v], [t.view(())], **OPTIONS, grad_scale=torch.tensor(scale, device=DEVICE))
    expected = by_hand(0.7, grads, scale)
    assert (p.item(), m.item(), v.item()) == pytest.approx(expected, rel=2e-5, abs=1e-30)
    assert t.item() == len(grads)


@pytest.mark.parametrize("dtypes", [(F, F, F, F), (B, B, B, B), (B, B, F, F), (F, B, B, F), (B, F, F, B)], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (33, 71)], ids=str)
def test_equals_the_definition(dtypes, shape):
    """Three steps: float32 to its last digits, a bfloat16 to its own last place, which one rounding decides."""
    ours, theirs = ([tensors(shape, dtypes, seed) for seed in (1, 2)] for _ in range(2))
    steps, their_steps = ([torch.tensor(x, device=DEVICE) for x in (0.0, 999.0)] for _ in range(2))
    lr = torch.tensor(0.03, device=DEVICE)
    for step in range(3):
        for t, function, counters in ((ours, adamw_, steps), (theirs, reference, their_steps)):
            for i, group in enumerate(t):
                group[1].copy_(tensors(shape, dtypes, 10 * step + i)[1])
            function(*(list(column) for column in zip(*t)), counters, **{**OPTIONS, "lr": lr})
    assert steps == their_steps == [3.0, 1002.0]
    for a, b in zip((x for group in ours for x in group), (x for group in theirs for x in group)):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-2 if a.dtype == B else 1e-5, atol=1e-3 if a.dtype == B else 1e-6)
        assert (a.double() - b.double()).norm() <= (2e-3 if a.dtype == B else 2e-6) * b.double().norm()


@pytest.mark.parametrize("dtype", [F, B], ids=str)
@pytest.mark.parametrize("found", [1.0, 0.0, math.nan])
def test_a_mask_keeps_every_bit(dtype, found):
    p, grad, m, v = tensors((3, 5), [dtype] * 4)
    t = torch.tensor(4.0, device=DEVICE)
    before = [x.clone() for x in (p, m, v, t)]
    if found:
        grad.fill_(math.nan)
    adamw_([p], [grad], [m], [v], [t], **OPTIONS, found_inf=torch.tensor(found, device=DEVICE))
    for x, old in zip((p, m, v, t), before):
        assert torch.equal(x, old) == bool(found)


def test_a_first_step_that_is_masked():
    p, grad, m, v = tensors((3, 5), [F] * 4)
    t, before = torch.tensor(0.0, device=DEVICE), p.clone()
    adamw_([p], [grad], [m], [v], [t], **OPTIONS, found_inf=torch.tensor(1.0, device=DEVICE))
    assert torch.equal(p, before)
    assert t == 0


@pytest.mark.parametrize("betas", [(0.0, 0.0), (0.0, 0.999), (0.9, 0.0)])
def test_betas_at_the_edge(betas):
    ours, theirs = tensors((4, 6), [F] * 4), tensors((4, 6), [F] * 4)
    options = {**OPTIONS, "beta1": betas[0], "beta2": betas[1]}
    adamw_(*([x] for x in ours), [torch.tensor(0.0, device=DEVICE)], **options)
    reference(*([x] for x in theirs), [torch.tensor(0.0, device=DEVICE)], **options)
    # the definition's 1 - 0.999 in float32 is 5e-5 off
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@triton.jit
def round_kernel(x, y, key, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, rounded_bf16(tl.load(x + at, mask=at < n, other=0.0), at, key), mask=at < n)


def test_stochastic_rounding_is_the_reference_s_bit_for_bit():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (5000,), generator=generator).to(torch.int32).view(torch.float32)
    edges = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 3.4e38, -3.4e38, 1e-45, 1.0])
    x = torch.cat((bits, torch.randn(5000, generator=generator), edges)).to(DEVICE)
    y = torch.empty_like(x, dtype=B)
    key = KEY.to(DEVICE)
    round_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, key, x.numel(), BLOCK=1024)
    torch.testing.assert_close(y, reference_rounding(x, key), rtol=0, atol=0, equal_nan=True)


def test_stochastic_steps():
    """The same draws as the definition; where a last bit of float32 differs, a number here and there takes its other neighbour."""
    dtypes = (B, B, F, F)
    keys = [KEY.to(DEVICE) + i for i in range(2)]
    ours, theirs, plain = ([tensors((33, 71), dtypes, seed) for seed in (1, 2)] for _ in range(3))
    for t, function, k in ((ours, adamw_, keys), (theirs, reference, keys), (plain, adamw_, None)):
        steps = [torch.tensor(5.0, device=DEVICE) for _ in range(2)]
        function(*(list(column) for column in zip(*t)), steps, **OPTIONS, keys=k)
    for a, b, nearest in zip(ours, theirs, plain):
        assert (a[0] != b[0]).float().mean() < 0.01
        assert 0.2 < (a[0] != nearest[0]).float().mean() < 0.8
        torch.testing.assert_close(a[0], b[0], rtol=2**-7, atol=0)
    assert not torch.equal(ours[0][0], ours[1][0])


def test_strided_tensors_are_updated_in_place():
    plain = tensors((6, 10), [F] * 4)
    strided = [torch.cat((x, x), 1)[:, :10] for x in plain]
    strided[0] = plain[0].t().contiguous().t()
    for group in (plain, strided):
        adamw_(*([x] for x in group), [torch.tensor(2.0, device=DEVICE)], **OPTIONS)
    for a, b in zip(strided, plain):
        assert not a.is_contiguous()
        assert torch.equal(a, b)


def test_errors_and_nothing_to_do():
    p, grad, m, v = tensors((2, 3), [F] * 4)
    t = [torch.tensor(0.0, device=DEVICE)]
    adamw_([], [], [], [], [], **OPTIONS)
    with pytest.raises(ValueError, match="shorter|longer"):
        adamw_([p], [], [m], [v], t, **OPTIONS)
    with refused(ValueError):
        adamw_([p], [grad[:1]], [m], [v], t, **OPTIONS)
    with refused(TypeError):
        adamw_([p.double()], [grad], [m], [v], t, **OPTIONS)
    assert t[0] == 0
