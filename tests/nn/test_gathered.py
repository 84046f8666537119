"""A weight that holds gathered codes, without any process group: tests/parallel/test_gather.py has those of two processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surokit as sk
from surokit import convert
from surokit.nn.gathered import Gathered, GatheredCodes
from surokit.nn.linear import Linear
from tests.refusals import refused

N, K, T = 40, 64, 12


def layer_of(recipe: sk.Recipe) -> Linear:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N))
    sk.apply(model, recipe)
    layer = model.train()[0]
    assert isinstance(layer, Linear)
    return layer


def put(layer: Linear, held: Tensor | GatheredCodes) -> Any:
    """Put what was gathered in the place of the layer's weight, as FSDP2 does."""
    p = nn.Parameter(torch.as_strided(Gathered(held, layer.weight.dtype), (N, K), (K, 1)))
    layer.register_parameter("weight", p)
    return p


def codes_of(layer: Linear) -> GatheredCodes:
    assert layer.precision is not None
    q = layer.precision.recipe.forward.b
    assert q is not None
    Q = sk.quantize(layer.weight, q)
    amax = layer.weight.detach().abs().amax().view(1, 1) if q.delayed else None
    return GatheredCodes(Q.codes, Q.scales, q, K, Q.second, N, amax)


def step(layer: Linear, tokens: int = T) -> tuple[list[Tensor], dict[str, Tensor]]:
    """y, dx and dw, and the histories of delayed scaling."""
    x = torch.randn(tokens, K, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = layer(x)
    (y * torch.linspace(-1, 2, N)).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is not None
    return [y, x.grad, layer.weight.grad], convert.scaling_state(layer)


@pytest.mark.parametrize("recipe", [sk.FP8, sk.FP8_CURRENT, sk.FP8_BLOCK], ids=str)
def test_products_of_codes_are_those_of_the_numbers(recipe: sk.Recipe) -> None:
    expected, history = step(layer_of(recipe))
    layer = layer_of(recipe)
    p = put(layer, codes_of(layer))
    found, noted = step(layer)
    assert type(p) is Gathered
    assert type(p.grad) is Tensor
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert noted.keys() == history.keys()
    assert all(torch.equal(noted[name], history[name]) for name in noted)


def test_products_of_gathered_numbers_are_those_of_the_weight() -> None:
    expected, layer = step(layer_of(sk.FP8_ROWWISE)), layer_of(sk.FP8_ROWWISE)
    put(layer, layer.weight.detach())
    assert all(torch.equal(a, b) for a, b in zip(step(layer)[0], expected[0], strict=True))


def test_no_tokens_give_a_gradient_of_zeros() -> None:
    layer = layer_of(sk.FP8_BLOCK)
    put(layer, codes_of(layer))
    y, dx, dw = step(layer, tokens=0)[0]
    assert y.shape == (0, N)
    assert dx.shape == (0, K)
    assert torch.equal(dw, torch.zeros(N, K))


def test_other_operations_on_codes_are_refused() -> None:
    """The numbers that they decode to are not those of the weight."""
    layer = layer_of(sk.FP8_BLOCK)
    p = put(layer, codes_of(layer))
    with refused(RuntimeError):
        p * 2
    with refused(RuntimeError):
        torch.cat([torch.zeros(1, K), p])
    assert "codes e4m3 128x128 blocks" in repr(p)


def test_other_operations_read_gathered_numbers() -> None:
    layer = layer_of(sk.FP8_ROWWISE)
    w = layer.weight.detach()
    p = put(layer, w)
    assert torch.equal(p * 2, w * 2)
    assert torch.equal(p.as_strided((2, 3), (K, 1)), w[:2, :3])


def test_a_cast_of_codes_is_refused() -> None:
    layer = layer_of(sk.FP8_BLOCK)
    put(layer, codes_of(layer))
    with torch.autocast("cpu", torch.bfloat16), refused(RuntimeError):
        layer(torch.ones(T, K))


def test_codes_that_other_products_want_are_refused() -> None:
    """Those of rows do not serve grad_input, and a recipe may have changed since."""
    layer = layer_of(sk.FP8_ROWWISE)
    put(layer, codes_of(layer))
    y = layer(torch.ones(T, K, requires_grad=True))
    with refused(RuntimeError):
        y.sum().backward()
