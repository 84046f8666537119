"""Queries and keys normed and turned in one pass, in Triton: bit for bit the two steps where the sums of a head agree."""
# mypy: allow-untyped-decorators

import pytest
import torch

from surokit.kernels.reference import qk as reference
from surokit.kernels.triton import norm, rope
from surokit.kernels.triton import qk as kernels
from tests.kernels.compiling import ANY, Launches
from tests.kernels.interpreter import DEVICE, INTERPRETED
from tests.refusals import refused

pytestmark = pytest.mark.sampled


def example(B, T, heads, D, dtype=torch.bfloat16, device="cpu", scale=1.0, batched=False):
    """A joint projection and its parts q and k, gradients as attention gives them, tables, weights."""
    H, G = heads
    generator = torch.Generator().manual_seed(B * T + H * G + D)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    joint = (normal(B, T, H + 2 * G, D) * scale).to(device, dtype)
    angles = normal(*(B,) * batched, T, D // 2) * 3
    tables = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
    weights = [(1 + normal(D) / 4).to(device, dtype) for _ in range(2)]
    grads = [normal(B, n, T, D).to(device, dtype).transpose(1, 2) for n in (H, G)]
    return joint, joint.split((H, G, G), dim=2)[:2], grads, tables, weights


def launch(D, H=16, G=8, normed=True, dtype=torch.bfloat16, need_dw=True):
    joint, (q, k), (dq, dk), tables, weights = example(2, 64, (H, G), D, dtype)
    weights = weights if normed else [None, None]
    _, _, rq, rk = kernels.forward(q, k, *tables, *weights)
    parts = torch.empty_like(joint).split((H, G, G), dim=2)[:2]
    kernels.backward(dq, dk, q, k, *tables, *weights, rq, rk, out=parts, need_dw=need_dw)


LAUNCHES: Launches = {
    "heads of 64": (ANY, lambda: launch(64, 32, 8)),
    "heads of 128": (ANY, lambda: launch(128)),
    "heads of 128, more of them": ((90,), lambda: launch(128, 32, 8)),
    "frozen": ((90,), lambda: launch(128, need_dw=False)),
    "rotated only": ((90,), lambda: launch(128, normed=False)),
    "float32": ((90,), lambda: launch(128, dtype=torch.float32)),
}


def same(a, b):
    assert (a is None) == (b is None)
    if a is not None:
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def nearly(a, b):
    """Bit for bit in the interpreter; a compiler may join a product and a sum, or sum in the order of another tile."""
    if INTERPRETED:
        same(a, b)
    else:
        torch.testing.assert_close(a, b)


def two_steps(x, tables, w, r):
    """What norm.py and rope.py make of x, but with the 1 / rms that the sum over two halves gives."""
    if w is not None:
        x = (x.float() * r[..., None] * w.float()).to(x.dtype)
    return rope.rotate(x, *tables)


def two_steps_back(dy, x, tables, w, r):
    dy = rope.rotate(dy, *tables, back=True)
    D = dy.shape[-1]
    if w is None:
        return dy, None
    dx, dw = norm.backward(dy.view(-1, D), x.reshape(-1, D), w, r.reshape(-1, 1))
    return dx.view(dy.shape), dw


@pytest.mark.parametrize(("heads", "D"), [((1, 1), 2), ((4, 2), 16), ((5, 3), 16), ((6, 1), 10)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_is_the_two_steps(heads, dtype, D):
    joint, parts, grads, tables, weights = example(2, 3, heads, D, dtype, DEVICE, batched=D == 10)
    before = joint.clone()
    q, k, rq, rk = kernels.forward(*parts, *tables, *weights, 1e-6)
    back = kernels.backward(*grads, *parts, *tables, *weights, rq, rk)
    tolerance = 1e-6 if dtype == torch.float32 else 8e-3
    for i, (y, r) in enumerate(((q, rq), (k, rk))):
        torch.testing.assert_close(r, reference.forward(*parts, *tables, *weights, 1e-6)[2 + i], rtol=1e-6, atol=0)
        nearly(y, two_steps(parts[i], tables, weights[i], r))
        dx, dw = two_steps_back(grads[i], parts[i], tables, weights[i], r)
        for ours, theirs in ((back[i], dx), (back[2 + i], dw)):
            assert ours.dtype == dtype
            assert (ours - theirs).double().norm() <= tolerance * theirs.double().norm()
    assert torch.equal(joint, before)


@pytest.mark.parametrize("normed", [(True, True), (False, False), (True, False)], ids=str)
@pytest.mark.parametrize("need_dw", [True, False])
def test_strides_do_not_matter_and_a_joint_gradient_is_written_in_place(normed, need_dw):
    joint, parts, grads, tables, weights = example(2, 3, (4, 2), 16, device=DEVICE)
    given = [w if with_norm else None for w, with_norm in zip(weights, normed)]
    dense = [x.contiguous() for x in parts]
    alone = kernels.forward(*dense, *tables, *given)
    for ours, theirs in zip(kernels.forward(*parts, *tables, *given), alone):
        same(ours, theirs)
    q, k = (x if with_norm else None for x, with_norm in zip(parts, normed))
    expected = kernels.backward(*[g.contiguous() for g in grads], *dense, *tables, *given, *alone[2:])
    whole = torch.full_like(joint, 7.0)
    dq, dk, rest = whole.split((4, 2, 2), dim=2)
    back = kernels.backward(*grads, q, k, *tables, *given, *alone[2:], out=(dq, dk), need_dw=need_dw)
    assert back[0] is dq
    for ours, theirs in zip((dq, dk), expected):
        same(ours, theirs)
    for ours, theirs, with_norm in zip(back[2:], expected[2:], normed):
        same(ours, theirs if need_dw and with_norm else None)
    assert bool((rest == 7).all())
    tall = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in parts]  # the elements of a head lie apart
    for ours, theirs in zip(kernels.forward(*tall, *tables, *given), alone):
        same(ours, theirs)


@pytest.mark.parametrize("programs", [1, 2, 5])
def test_the_gradients_of_the_weights_do_not_depend_on_the_programs(programs, monkeypatch):
    _, parts, grads, tables, weights = example(2, 7, (4, 2), 16, torch.float32, DEVICE)
    *_, rq, rk = kernels.forward(*parts, *tables, *weights)
    expected = kernels.backward(*grads, *parts, *tables, *weights, rq, rk)
    monkeypatch.setattr(kernels, "PROGRAMS_PER_MULTIPROCESSOR", 1)
    monkeypatch.setattr(kernels, "_multiprocessors", lambda device: programs)
    back = kernels.backward(*grads, *parts, *tables, *weights, rq, rk)
    for ours, theirs in zip(back[:2], expected):
        same(ours, theirs)
    for ours, theirs in zip(back[2:], expected[2:]):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_more_heads_than_a_program_holds(monkeypatch):
    _, parts, grads, tables, weights = example(1, 3, (6, 3), 16, device=DEVICE)
    expected = kernels.forward(*parts, *tables, *weights)
    expected_back = kernels.backward(*grads, *parts, *tables, *weights, *expected[2:])
    monkeypatch.setattr(kernels, "ELEMENTS", 16)
    monkeypatch.setattr(kernels, "ELEMENTS_BACK", 16)
    ours = kernels.forward(*parts, *tables, *weights)
    for a, b in zip(ours, expected):
        nearly(a, b)
    for a, b in zip(kernels.backward(*grads, *parts, *tables, *weights, *ours[2:]), expected_back):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e15, float("inf"), float("nan")])
def test_zeros_tiny_huge_and_what_is_not_finite(scale):
    _, parts, grads, tables, weights = example(1, 3, (2, 2), 16, device=DEVICE)
    q = parts[0].clone()
    q[0, 1, 1] *= scale
    ours = kernels.forward(q, parts[1], *tables, *weights)
    theirs = reference.forward(q, parts[1], *tables, *weights)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02, equal_nan=True)
    spoilt = ours[0].isnan().any(-1)
    assert spoilt.sum() == (0 if abs(scale) < float("inf") else 1)
    back = kernels.backward(*grads, q, parts[1], *tables, *weights, *ours[2:])
    assert torch.equal(back[0].isnan().any(-1), spoilt)
    assert back[0].isinf().sum() == 0


def test_no_tokens():
    _, parts, grads, tables, weights = example(2, 0, (4, 2), 16, device=DEVICE)
    q, k, rq, rk = kernels.forward(*parts, *tables, *weights)
    assert (q.shape, k.shape, rq.shape) == ((2, 0, 4, 16), (2, 0, 2, 16), (2, 0, 4))
    back = kernels.backward(*grads, *parts, *tables, *weights, rq, rk)
    assert back[0].shape == q.shape
    assert not back[2].any()
    assert not back[3].any()


def test_errors():
    _, (q, k), (dq, dk), (cos, sin), (wq, wk) = example(2, 3, (4, 2), 16, device=DEVICE)
    with refused(ValueError):
        kernels.forward(q, k[:, :2], cos, sin, wq, wk)
    with refused(ValueError):
        kernels.forward(q, k, cos, sin, wq[:8], wk)
    with refused(ValueError):
        kernels.forward(q, k, cos[:2], sin[:2], wq, wk)
    with refused(TypeError):
        kernels.forward(q.double(), k.double(), cos, sin, wq, wk)
    *_, rq, rk = kernels.forward(q, k, cos, sin, wq, wk)
    with refused(ValueError):
        kernels.backward(dq, dk, q, None, cos, sin, wq, wk, rq, rk)
    with refused(ValueError):
        kernels.backward(dq, dk, q, k, cos, sin, wq, wk, rk, rq)
    for out in ((dk, dk), (dq, dk.float()), (dq, torch.empty_like(dk).transpose(2, 3).contiguous().transpose(2, 3))):
        with refused(ValueError):
            kernels.backward(dq, dk, q, k, cos, sin, wq, wk, rq, rk, out=out)
