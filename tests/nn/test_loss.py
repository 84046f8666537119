"""The fused loss as users meet it: peak memory without whole logits, retained graphs, errors, quantized heads."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from surokit.kernels.reference import loss as reference
from surokit.nn.loss import chunked_cross_entropy, linear_cross_entropy
from tests.refusals import refused


class Live(TorchDispatchMode):
    """Bytes of the largest tensor that any operation made."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, t.nbytes)
        return out


@pytest.fixture
def problem():
    torch.manual_seed(0)
    x = torch.randn(600, 16).bfloat16().requires_grad_()
    w = torch.randn(1000, 16).mul(0.25).bfloat16().requires_grad_()
    labels = torch.randint(1000, (600,))
    labels[::5] = -100
    return x, w, labels


def test_logits_are_never_whole(problem, monkeypatch):
    x, w, labels = problem
    monkeypatch.setitem(reference.CHUNK_BYTES, "cpu", 64 * 1000 * 4)
    with Live() as live:
        linear_cross_entropy(x, w, labels).backward()
    assert (
        live.largest == 64 * 1000 * 4
    )  # a chunk in float32; whole logits would be 600 x 1000 x 2 in bfloat16 at least
    with Live() as live:
        F.cross_entropy((x @ w.t()).float(), labels).backward()
    assert live.largest == 600 * 1000 * 4
    with Live() as live:
        chunked_cross_entropy(lambda h: h @ w.t(), x, labels, 1000).backward()
    assert live.largest == 64 * 1000 * 4


def test_incoming_gradient_and_retained_graph(problem):
    x, w, labels = problem
    loss = linear_cross_entropy(x, w, labels)
    first = torch.autograd.grad(loss * 4, (x, w), retain_graph=True)
    second = torch.autograd.grad(loss, (x, w))
    for a, b in zip(first, second):
        assert torch.equal(a, b * 4)
    x.requires_grad_(False)
    frozen = torch.autograd.grad(linear_cross_entropy(x, w, labels), w)[0]
    assert torch.equal(frozen, second[1])
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(x, w, labels), loss)


def test_any_head_gives_the_same(problem):
    x, w, labels = problem
    fused = linear_cross_entropy(x, w, labels)
    expected = torch.autograd.grad(fused, (x, w))
    through = chunked_cross_entropy(lambda h: h @ w.t(), x, labels, 1000)
    torch.testing.assert_close(fused, through)
    for a, b in zip(torch.autograd.grad(through, (x, w)), expected):
        assert (a - b).float().norm() < 0.01 * b.float().norm()


def test_nothing_to_count_is_zero(problem):
    x, w, labels = problem
    nothing = torch.full_like(labels, -100)
    for loss in (linear_cross_entropy(x, w, nothing), chunked_cross_entropy(lambda h: h @ w.t(), x, nothing, 1000)):
        assert loss == 0
        assert all(g.abs().max() == 0 for g in torch.autograd.grad(loss, (x, w)))


def test_autocast(problem):
    x, w, labels = problem
    x, w = (t.detach().float().requires_grad_() for t in (x, w))
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, w, labels)
    loss.backward()
    assert loss.dtype == x.grad.dtype == w.grad.dtype == torch.float32


def test_shapes_and_dtypes_are_refused(problem):
    x, w, labels = problem
    with refused(ValueError):
        linear_cross_entropy(x.view(2, 300, 16), w, labels)
    with refused(ValueError):
        linear_cross_entropy(x, w[:, :8], labels)
    with refused(ValueError):
        linear_cross_entropy(x, w, labels[:-1])
    with refused(TypeError):
        linear_cross_entropy(x, w, labels.int())
    labels[0] = 1000
    with pytest.raises((IndexError, RuntimeError), match="index"):
        linear_cross_entropy(x, w, labels)
