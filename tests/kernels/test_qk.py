"""Queries and keys made ready for attention: the definition against float64 autograd, and where it reads and writes."""

import pytest
import torch
from torch import Tensor

from surokit.kernels.reference import norm, qk, rope
from tests.refusals import refused

EPS = 1e-6


def example(
    B: int = 2,
    T: int = 5,
    H: int = 4,
    G: int = 2,
    D: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    batched: bool = False,
) -> tuple[Tensor, list[Tensor], list[Tensor], tuple[Tensor, Tensor], list[Tensor]]:
    """A joint projection, its parts q and k, gradients as attention gives them, cos and sin, weights."""
    generator = torch.Generator().manual_seed(B * T + H * G + D)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    joint = normal(B, T, H + 2 * G, D).to(dtype)
    angles = normal(*(B,) * batched, T, D // 2) * 3
    tables = angles.cos().to(dtype), angles.sin().to(dtype)
    weights = [(1 + normal(D) / 4).to(dtype) for _ in range(2)]
    grads = [normal(B, n, T, D).to(dtype).transpose(1, 2) for n in (H, G)]
    return joint, list(joint.split((H, G, G), dim=2)[:2]), grads, tables, weights


def exact(x: Tensor, cos: Tensor, sin: Tensor, w: Tensor | None) -> Tensor:
    if w is not None:
        x = torch.nn.functional.rms_norm(x, x.shape[-1:], w, EPS)
    x1, x2 = x.chunk(2, -1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_agrees_with_float64(normed: bool, batched: bool, dtype: torch.dtype) -> None:
    _, inputs, grads, tables, weights = example(dtype=dtype, batched=batched)
    given = weights if normed else [None, None]
    *made, rq, rk = qk.forward(*inputs, *tables, *given, EPS)
    back = qk.backward(*grads, *inputs, *tables, *given, rq, rk)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for i in range(2):
        x, w = inputs[i].double().requires_grad_(), weights[i].double().requires_grad_()
        y = exact(x, tables[0].double(), tables[1].double(), w if normed else None)
        wanted = torch.autograd.grad(y, (x, w) if normed else (x,), grads[i].double())
        for ours, theirs in zip((made[i], back[i], back[2 + i]), (y, *wanted)):
            assert ours is not None
            assert ours.dtype == dtype
            assert (ours.double() - theirs).norm() <= tolerance * theirs.norm()
        assert (back[2 + i] is None) == (not normed)


def test_is_the_two_steps_bit_for_bit() -> None:
    _, inputs, grads, tables, weights = example()
    *made, rq, rk = qk.forward(*inputs, *tables, *weights, EPS)
    back = qk.backward(*grads, *inputs, *tables, *weights, rq, rk)
    for i, r in enumerate((rq, rk)):
        flat = inputs[i].reshape(-1, 16)
        y, r_alone = norm.forward(flat, weights[i], EPS)
        assert r is not None
        assert torch.equal(r.reshape(-1, 1), r_alone)
        assert torch.equal(made[i], rope.rotate(y.view(inputs[i].shape), *tables))
        dy = rope.rotate(grads[i], *tables, back=True)
        dx, dw = norm.backward(dy.view(-1, 16), flat, weights[i], r_alone)
        assert torch.equal(back[i], dx.view(inputs[i].shape))
        assert dw is not None
        assert torch.equal(back[2 + i], dw)


def test_gradients_go_into_parts_of_a_joint_one() -> None:
    joint, inputs, grads, tables, weights = example()
    *_, rq, rk = qk.forward(*inputs, *tables, *weights, EPS)
    alone = qk.backward(*grads, *inputs, *tables, *weights, rq, rk)
    whole = torch.full_like(joint, 7.0)
    parts = whole.split((4, 2, 2), dim=2)
    back = qk.backward(*grads, *inputs, *tables, *weights, rq, rk, out=(parts[0], parts[1]), need_dw=False)
    assert back[0] is parts[0]
    assert back[2:] == (None, None)
    assert torch.equal(parts[0], alone[0])
    assert torch.equal(parts[1], alone[1])
    assert bool((parts[2] == 7).all())


def test_one_of_the_two_may_go_without_a_weight() -> None:
    _, inputs, grads, tables, (wq, _) = example()
    _, k, rq, rk = qk.forward(*inputs, *tables, wq, None, EPS)
    assert rk is None
    assert torch.equal(k, rope.rotate(inputs[1], *tables))
    back = qk.backward(*grads, inputs[0], None, *tables, wq, None, rq, None)
    assert torch.equal(back[1], rope.rotate(grads[1], *tables, back=True))
    assert back[3] is None


def test_the_gradient_of_a_norm_needs_its_input() -> None:
    _, _, grads, tables, weights = example()
    with refused(ValueError):
        qk.backward(*grads, None, None, *tables, *weights)
