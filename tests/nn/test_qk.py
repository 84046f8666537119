"""Queries and keys in one pass: what the separate norms and rotations give, from one tensor or three, with every gradient."""

import pytest
import torch
from torch import Tensor, nn

from surokit.fusion import OFF, Fusion
from surokit.kernels.triton import qk as kernels
from surokit.nn import qk
from surokit.nn.norm import RMSNorm
from surokit.nn.qk import split_heads
from surokit.nn.rope import RotaryEmbedding
from tests.kernels.interpreter import INTERPRETED, correct, poisoned

B, T, H, G, D = 2, 10, 4, 2, 8
SIZES = (H * D, G * D, G * D)


def norms(eps=(1e-5, 1e-5), dtype=torch.float32):
    made = RMSNorm(D, eps[0]), RMSNorm(D, eps[1])
    for i, norm in enumerate(made):
        nn.init.normal_(norm.weight, 1.0, 0.3, generator=torch.Generator().manual_seed(i))
        norm.to(dtype)
    return made


def tables(dtype=torch.float32, positions=False, doubled=False) -> tuple[Tensor, Tensor]:
    cos, sin = RotaryEmbedding(D, max_length=32)(T, dtype, torch.arange(T).flip(0).expand(B, -1) if positions else None)
    if doubled:  # as transformers has them, halves of [B, T, D]
        cos, sin = torch.cat((cos, cos), -1)[..., : D // 2], torch.cat((sin, sin), -1)[..., : D // 2]
    return cos, sin


def computed(fusion, joint, normed, dtype=torch.float32, table=None, eps=(1e-5, 1e-5), frozen=False):
    """q, k, v, and the gradients of x, wq and wk of a weighted sum of them."""
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(B, T, sum(SIZES), generator=draw).to(dtype).requires_grad_()
    whole = x * 1
    made = norms(eps, dtype) if normed else None
    if frozen and made:
        for norm in made:
            norm.requires_grad_(False)
    parts = whole.split(SIZES, -1) if joint else tuple(p.contiguous() for p in whole.split(SIZES, -1))
    cos, sin = table or tables(dtype)
    q, k, v = split_heads(parts, whole if joint else None, D, cos, sin, made, fusion)
    sums = [(y * torch.randn(y.shape, generator=draw).to(dtype)).float().sum() for y in (q, k, v)]
    torch.stack(sums).sum().backward()
    grads = [norm.weight.grad for norm in made] if made and not frozen else []
    return [q.detach(), k.detach(), v.detach(), x.grad, *grads]


@pytest.mark.parametrize("joint", [False, True], ids=["apart", "joint"])
@pytest.mark.parametrize("normed", [False, True], ids=["rotated", "normed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["row", "positions", "doubled"])
def test_as_the_separate_steps(joint, normed, dtype, kind):
    table = tables(dtype, kind != "row", kind == "doubled")
    expected = computed(OFF, False, normed, dtype, table)
    ours = computed(Fusion(), joint, normed, dtype, table)
    assert len(ours) == len(expected) == (6 if normed else 4)
    for a, b in zip(ours, expected):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_shapes_and_memory():
    q, k, v, *_ = computed(Fusion(), True, True)
    assert (q.shape, k.shape, v.shape) == ((B, T, H, D), (B, T, G, D), (B, T, G, D))
    assert q.is_contiguous() and k.is_contiguous()  # noqa: PT018
    assert v.stride() == (T * sum(SIZES), sum(SIZES), D, 1)  # where it was
    assert computed(Fusion(), True, False)[2].is_contiguous()  # copied out, so that q and k before the rotation can go


@pytest.mark.parametrize("joint", [False, True], ids=["apart", "joint"])
def test_what_backward_keeps(joint):
    x = torch.randn(B, T, sum(SIZES), requires_grad=True)
    whole = x * 1
    held: list[Tensor] = []

    def pack(t):
        held.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        split_heads(whole.split(SIZES, -1), whole if joint else None, D, *tables(), None, Fusion())
    assert sum(t.numel() for t in held) == 2 * T * D // 2  # the tables


@pytest.mark.parametrize("joint", [False, True])
def test_a_gradient_of_the_gradient_is_an_error(joint):
    x = torch.randn(B, T, sum(SIZES), requires_grad=True)
    q, _, _ = split_heads(x.split(SIZES, -1), x if joint else None, D, *tables(), norms(), Fusion())
    (dx,) = torch.autograd.grad(q.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_frozen_norms_and_two_epsilons():
    for options in ({"frozen": True}, {"eps": (1e-5, 1e-2)}):
        for a, b in zip(computed(Fusion(), True, True, **options), computed(OFF, False, True, **options)):
            torch.testing.assert_close(a, b)


def test_hooks_of_the_norms():
    made, seen = norms(), list[Tensor]()

    def hook(module, args, output):
        seen.append(output)
        return output * 2

    made[0].register_forward_hook(hook)
    x = torch.randn(B, T, sum(SIZES))
    q, _, _ = split_heads(x.split(SIZES, -1), x, D, *tables(), made, Fusion())
    made[0]._forward_hooks.clear()
    plain, _, _ = split_heads(x.split(SIZES, -1), x, D, *tables(), made, Fusion())
    assert len(seen) == 1
    torch.testing.assert_close(q, 2 * plain)


def test_without_gradients_and_of_one_token():
    x = torch.randn(3, 1, sum(SIZES))
    cos, sin = RotaryEmbedding(D, max_length=32)(1, torch.float32, None, 7)
    with torch.no_grad():
        ours = split_heads(x.split(SIZES, -1), x, D, cos, sin, norms(), Fusion())
        theirs = split_heads(x.split(SIZES, -1), None, D, cos, sin, norms(), OFF)
    for a, b in zip(ours, theirs):
        assert torch.equal(a, b)


@pytest.mark.skipif(
    not INTERPRETED, reason="compiled kernels are tested on their device, in tests/kernels and tests/gpu"
)
@pytest.mark.parametrize("joint", [False, True], ids=["apart", "joint"])
@pytest.mark.parametrize("normed", [False, True], ids=["rotated", "normed"])
def test_through_triton(joint, normed, monkeypatch):
    """The kernels take what is handed to them, and write every element of the joint gradient."""
    correct()
    monkeypatch.setattr(qk, "best", lambda function, device: getattr(kernels, function.__name__))
    table = tables(doubled=True)
    with poisoned():
        ours = computed(Fusion(), joint, normed, table=table)
    for a, b in zip(ours, computed(OFF, False, normed, table=table)):
        torch.testing.assert_close(a, b)
