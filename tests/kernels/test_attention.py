"""The blocked gradient of causal attention against float64, with small and large scores, at odd sizes."""

import pytest
import torch
from torch.nn import functional as F

from surokit.kernels.reference import attention


@pytest.mark.parametrize("T", [1, 5, 64, 300])
@pytest.mark.parametrize(("H", "G", "D"), [(4, 4, 16), (6, 2, 10), (4, 1, 64)])
@pytest.mark.parametrize("size", [1.0, 4.0])
def test_gradient(T, H, G, D, size):
    torch.manual_seed(0)
    q, do = (torch.randn(2, T, H, D).mul(s).bfloat16().transpose(1, 2) for s in (size, 1.0))
    k, v = (torch.randn(2, T, G, D).mul(s).bfloat16().transpose(1, 2) for s in (size**0.5, 1.0))
    exact = gradients(do.double(), *(t.double() for t in (q, k, v)))
    flash = gradients(do, q, k, v)
    for ours, theirs, best in zip(attention.causal_backward(do, q, k, v, D**-0.5), flash, exact):
        assert ours.dtype == torch.bfloat16
        assert ours.shape == best.shape
        assert ours.transpose(1, 2).is_contiguous()
        error, flash_error = ((t.double() - best).norm() for t in (ours, theirs))
        assert error <= max(0.005 * best.norm(), 1.4 * flash_error)


def test_groups_of_heads_make_no_difference(monkeypatch):
    torch.manual_seed(0)
    q, do = torch.randn(2, 6, 20, 8, dtype=torch.bfloat16), torch.randn(2, 6, 20, 8, dtype=torch.bfloat16)
    k, v = torch.randn(2, 3, 20, 8, dtype=torch.bfloat16), torch.randn(2, 3, 20, 8, dtype=torch.bfloat16)
    whole = attention.causal_backward(do, q, k, v, 1.0)
    monkeypatch.setattr(attention, "GROUP_BYTES", 2 * 4 * 2 * 20 * 20)
    for a, b in zip(attention.causal_backward(do, q, k, v, 1.0), whole):
        assert torch.equal(a, b)


def gradients(do, *inputs):
    q, k, v = (t.detach().requires_grad_() for t in inputs)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return torch.autograd.grad(y, (q, k, v), do)


def test_later_tokens_get_no_gradient_from_earlier_outputs():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 8, dtype=torch.bfloat16) for _ in range(3))
    do = torch.zeros_like(q)
    do[:, :, 4] = 1
    _, dk, dv = attention.causal_backward(do, q, k, v, 1.0)
    assert dk[:, :, 5:].abs().max() == 0
    assert dv[:, :, 5:].abs().max() == 0
    assert dv[:, :, :5].abs().min() > 0
