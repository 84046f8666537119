"""RMSNorm, SwiGLU, rotary embedding and attention as modules and functions: gradients, what is kept, dtypes, errors."""

import pytest
import torch
from torch.nn import functional as F

from surokit.nn.attention import attention
from surokit.nn.norm import RMSNorm, rms_norm
from surokit.nn.rope import RotaryEmbedding, apply_rope, inverse_frequencies
from surokit.nn.swiglu import swiglu
from tests.refusals import refused


def saved_bytes(fn, *inputs):
    """Bytes of distinct memory that autograd keeps, inputs apart."""
    kept = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        fn(*inputs)
    for t in inputs:
        kept.pop(t.untyped_storage().data_ptr(), None)
    return sum(kept.values())


def leaf(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def test_gradcheck():
    torch.manual_seed(0)
    # the arithmetic is float32 inside, so float64 inputs need room
    assert torch.autograd.gradcheck(rms_norm, (leaf(3, 5), leaf(5)), eps=1e-3, atol=1e-2, rtol=1e-2)
    assert torch.autograd.gradcheck(swiglu, (leaf(2, 7), leaf(2, 7)))
    cos, sin = torch.rand(4, 3, dtype=torch.float64), torch.rand(4, 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(apply_rope, (leaf(2, 4, 3, 6), cos, sin))
    assert torch.autograd.gradcheck(attention, (leaf(1, 4, 5, 6), leaf(1, 2, 5, 6), leaf(1, 2, 5, 6)))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: rms_norm(x, torch.ones(8)),
        lambda x: swiglu(x, x),
        lambda x: apply_rope(x, torch.ones(3, 4), torch.ones(3, 4)),
    ],
    ids=["norm", "swiglu", "rope"],
)
def test_a_gradient_of_the_gradient_is_an_error(fn):
    x = leaf(2, 3, 4, 8, dtype=torch.float32)
    (dx,) = torch.autograd.grad(fn(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_little_is_kept_for_backward():
    x, w, y = leaf(64, 256, dtype=torch.bfloat16), leaf(256, dtype=torch.bfloat16), leaf(64, 256, dtype=torch.bfloat16)
    assert saved_bytes(rms_norm, x, w) == 64 * 4  # a number a row
    assert saved_bytes(swiglu, x, y) == 0
    q = leaf(1, 64, 4, 32, dtype=torch.bfloat16)
    cos, sin = RotaryEmbedding(32)(64, torch.bfloat16)
    assert saved_bytes(lambda t: apply_rope(t, cos, sin), q) <= cos.untyped_storage().nbytes() * 2  # the tables
    k = leaf(1, 4, 64, 32, dtype=torch.bfloat16)
    assert saved_bytes(attention, k, k, k) == 0


def test_norm_module():
    torch.manual_seed(0)
    module = RMSNorm(12, eps=1e-3)
    x = torch.randn(2, 3, 12)
    torch.testing.assert_close(module(x), F.rms_norm(x, (12,), module.weight, 1e-3))
    assert repr(module) == "RMSNorm(12, eps=0.001)"
    assert module.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(("H", "G"), [(4, 4), (6, 2)])
def test_bfloat16_attention_equals_torch(H, G):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 40, 16, dtype=torch.bfloat16).requires_grad_() for n in (H, G, G))
    y = attention(q, k, v)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=G != H)
    assert torch.equal(y, expected)
    ours = torch.autograd.grad(y, (q, k, v), torch.ones_like(y))
    theirs = torch.autograd.grad(expected, (q, k, v), torch.ones_like(y))
    for a, b in zip(ours, theirs):
        assert (a - b).float().norm() < 0.01 * b.float().norm()


def test_attention_with_a_mask_and_without_causality():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    everything = attention(q, k, v, causal=False)
    torch.testing.assert_close(everything, F.scaled_dot_product_attention(q, k, v))
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    torch.testing.assert_close(attention(q, k, v, mask=mask), attention(q, k, v))
    torch.testing.assert_close(
        attention(q, k, v, scale=0.1), F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.1)
    )


def test_operators_are_well_formed():
    from surokit.nn import attention as module

    q, k = torch.randn(1, 4, 6, 8, dtype=torch.bfloat16), torch.randn(1, 2, 6, 8, dtype=torch.bfloat16)
    for inputs in ((q, k, k), tuple(t.requires_grad_() for t in (q, k, k.clone()))):
        torch.library.opcheck(module._causal_cpu, (*inputs, 0.3), test_utils=("test_schema", "test_faketensor"))


def test_rotary_tables():
    rope = RotaryEmbedding(8, theta=100.0, max_length=10000)
    assert not rope.state_dict()
    cos, sin = rope(6, torch.float64)
    angle = torch.arange(6)[:, None] * 100.0 ** (-torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close((cos, sin), (angle.cos().double(), angle.sin().double()), atol=1e-6, rtol=1e-6)
    # later positions equal given ones; tables grow when they must
    assert rope.cos.shape[0] == 4096
    positions = torch.arange(5000, 5006).expand(2, 6)
    late = rope(6, torch.float32, start=5000)
    assert rope.cos.shape[0] == 8192
    given = rope(6, torch.float32, position_ids=positions)
    assert given[0].shape == (2, 6, 4)
    assert torch.equal(given[0][1], late[0])
    assert torch.equal(given[1][0], late[1])
    # through bfloat16 and the meta device and back, tables are exact
    exact = rope.cos.clone()
    assert rope.bfloat16().cos.dtype == torch.bfloat16
    assert torch.equal(rope.float().cos, exact)
    assert torch.equal(rope.to("meta").to_empty(device="cpu").cos, exact)


def test_rope_scaling():
    plain = inverse_frequencies(64, 1e4)
    torch.testing.assert_close(inverse_frequencies(64, 1e4, {"rope_type": "linear", "factor": 4.0}), plain / 4)
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    scaled = inverse_frequencies(64, 1e4, scaling)
    turns = 64 * plain / (2 * torch.pi)
    assert torch.equal(scaled[turns > 4], plain[turns > 4])
    torch.testing.assert_close(scaled[turns < 1], plain[turns < 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.any()
    assert (scaled[between] < plain[between]).all()
    assert (scaled[between] > plain[between] / 8).all()
    with refused(ValueError):
        inverse_frequencies(64, 1e4, {"rope_type": "yarn", "factor": 2.0})
