"""One linear layer under every recipe: accuracy gates, what it saves, adapters, stored weights."""

import copy

import pytest
import torch
from torch.nn import functional as F

import surokit as sk
from surokit.nn import linear_gemms
from surokit.nn.linear import Linear
from surokit.nn.linear_gemms import Precision
from surokit.quantized import sqnr_db
from surokit.recipe import Lora

# without the blocks that a recipe keeps: one layer is the last block of its model
RECIPES = [r.keep_last(0) for r in sk.recipes.values() if r.quantized_products]


def gaussian(*shape, seed, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(layer, x, dy):
    """y, dx, dw of one forward and backward."""
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad


def with_recipe(recipe, n, k, dtype=torch.bfloat16):
    layer = Linear(k, n, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(gaussian(n, k, seed=1))
    sk.apply(torch.nn.ModuleDict({"up_proj": layer}), recipe)
    return layer


# dB of forward, grad_input, grad_weight measured with plain torch on Gaussian 2048 x 1024 x 1024; a recipe 1 dB below is wrong
GATES = {
    "fp8": (28.5, 24.6, 24.6),
    "fp8-current": (28.5, 24.6, 24.6),
    "fp8-rowwise": (28.6, 28.5, 28.8),
    "fp8-block": (28.5, 28.5, 28.5),
    "mxfp8": (28.5, 28.5, 28.5),
    "fp4": (16.7, 15.0, 15.2),
    "mxfp4": (16.05, 14.2, 14.2),
    "quartet-ii": (18.2, 17.2, 17.2),
}
STORED_GATES = {"qfp8": 31.5, "qfp4": 21.2, "qnf4": 20.7}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda v: getattr(v, "name", str(v)))
def test_products_reach_their_accuracy(recipe):
    T, K, N = 2048, 1024, 1024
    x, dy = gaussian(T, K, seed=0), gaussian(T, N, seed=2)
    layer = with_recipe(recipe, N, K)
    y, dx, dw = run(layer, x, dy)
    w = layer.weight.detach()
    exact = x.float() @ w.float().t(), dy.float() @ w.float(), dy.float().t() @ x.float()
    for got, reference, gate in zip((y, dx, dw), exact, GATES[recipe.name]):
        assert sqnr_db(reference, got) > gate - 0.5


@pytest.mark.parametrize("name", STORED_GATES)
def test_a_stored_weight_reaches_its_accuracy(name):
    x = gaussian(512, 1024, seed=0)
    layer = with_recipe(sk.BF16, 1024, 1024)
    w = layer.weight.detach().clone()
    layer.store(sk.recipes[name].storage)
    assert sqnr_db(x.float() @ w.float().t(), layer(x)) > STORED_GATES[name] - 0.3


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda v: getattr(v, "name", str(v)))
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (17, 33, 65)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_equal_their_definition(recipe, shape, dtype):
    """y, dx and dw from dequantized operands and one float32 product: what the layer's shortcuts must not change."""
    T, N, K = shape
    x, dy = gaussian(T, K, seed=0, dtype=dtype), gaussian(T, N, seed=2, dtype=dtype)
    layer = with_recipe(recipe, N, K, dtype)
    torch.manual_seed(0)  # keys are drawn in this order: x for dw, dy for dx, dy for dw, w for dx
    y, dx, dw = run(layer, x, dy)
    w = layer.weight.detach()
    torch.manual_seed(0)

    def q(quantizer, m, beside=None):
        return sk.quantize(m, quantizer, rotation=beside.rotation if beside is not None else None)

    def times(a, b):
        if not a.quantizer.hadamard:
            return a.dequantize() @ b.dequantize().t()
        (a, a_scale), (b, b_scale) = a.factors(), b.factors()  # in the rotated basis, padding included
        return (a.float() * a_scale) @ (b.float() * b_scale).t()

    f, i, g = recipe.forward, recipe.grad_input, recipe.grad_weight
    x_t, dy_q = q(g.b, x.t()), q(i.a, dy)
    dy_t = q(g.a, dy.t(), x_t)
    expected = times(q(f.a, x), q(f.b, w)), times(dy_q, q(i.b, w.t(), dy_q)), times(dy_t, x_t)
    for got, reference in zip((y, dx, dw), expected):
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), reference, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def saved_bytes(layer, x):
    """Bytes that forward keeps for backward, apart from parameters."""
    kept = {}

    def pack(t):
        if all(t.untyped_storage().data_ptr() != p.untyped_storage().data_ptr() for p in layer.parameters()):
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = layer(x)
    assert y.requires_grad
    return sum(kept.values())


T_, K_ = 256, 512
KEPT = {
    "bf16": 2 * T_ * K_,
    "fp8": T_ * K_ + 4,
    "fp8-current": T_ * K_ + 4,
    "fp8-rowwise": T_ * K_ + 4 * K_,
    "fp8-block": T_ * K_ + 4 * K_ * T_ // 128,
    "mxfp8": T_ * K_ + K_ * T_ // 32,
    "fp4": T_ * K_ // 2 + K_ * T_ // 16 + 4,
    "mxfp4": T_ * K_ // 2 + K_ * T_ // 32,
    "quartet-ii": T_ * K_ // 2 + K_ * T_ // 16 + 4 + 8,  # the key of the signs too
}


@pytest.mark.parametrize("recipe", [sk.BF16, *RECIPES], ids=lambda v: v.name)
def test_operands_are_kept_at_their_own_width(recipe):
    layer = with_recipe(recipe, 128, K_)
    assert saved_bytes(layer, gaussian(T_, K_, seed=0).requires_grad_()) == KEPT[recipe.name]


@pytest.mark.parametrize("recipe", [sk.FP8, sk.FP8_ROWWISE, sk.QFP8], ids=lambda v: getattr(v, "name", str(v)))
def test_a_frozen_weight_keeps_no_activation(recipe):
    layer = with_recipe(recipe.lora(rank=4, targets=("up_proj",)), 128, 256)
    layer.remove_adapter()
    assert saved_bytes(layer, gaussian(64, 256, seed=0).requires_grad_()) == 0


def test_the_gradient_passes_a_frozen_quantized_layer():
    layer = with_recipe(sk.QFP8.lora(rank=4, targets=("up_proj",)), 96, 160)
    codes = layer.weight.detach().clone()
    x, dy = gaussian(32, 160, seed=0), gaussian(32, 96, seed=2)
    with torch.no_grad():
        layer.lora_B.weight.copy_(gaussian(96, 4, seed=5))
    x.requires_grad_()
    layer(x).backward(dy)
    w = layer.dense_weight().float()
    a, b = layer.lora_A.weight.float(), layer.lora_B.weight.float()
    effective = w + (32 / 4) * (b @ a)
    assert sqnr_db(dy.float() @ effective, x.grad) > 40
    assert layer.weight.grad is None
    assert torch.equal(layer.weight.view(torch.uint8), codes.view(torch.uint8))
    assert layer.lora_A.weight.grad.abs().sum() > 0
    assert layer.lora_B.weight.grad.abs().sum() > 0


def test_an_adapter_starts_as_nothing_and_merges_exactly():
    layer = with_recipe(sk.BF16, 24, 40, torch.float32)
    x = gaussian(5, 40, seed=0, dtype=torch.float32)
    before = layer(x)
    layer.add_adapter(Lora(rank=4, alpha=8.0))
    assert torch.equal(layer(x), before)
    with torch.no_grad():
        layer.lora_B.weight.normal_()
    adapted = layer(x)
    assert not torch.allclose(adapted, before)
    layer.merge_adapter()
    assert not layer.has_adapter
    torch.testing.assert_close(layer(x), adapted, rtol=1e-4, atol=1e-4)


def test_bias_and_leading_dimensions():
    layer = Linear(32, 16, bias=True)
    sk.apply(torch.nn.ModuleDict({"up_proj": layer}), sk.FP8_ROWWISE)
    x = gaussian(2, 3, 32, seed=0, dtype=torch.float32)
    y = layer(x)
    assert y.shape == (2, 3, 16)
    assert sqnr_db(F.linear(x, layer.weight, layer.bias), y) > 25


def test_autocast_computes_in_its_dtype():
    layer = with_recipe(sk.FP8_ROWWISE, 16, 32, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(gaussian(4, 32, seed=0, dtype=torch.float32))
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert layer.weight.grad.dtype == torch.float32


def test_a_plain_layer_is_a_torch_linear():
    ours, theirs = Linear(8, 4, bias=True), torch.nn.Linear(8, 4)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(ours.state_dict())
    x = gaussian(3, 8, seed=0, dtype=torch.float32)
    assert torch.equal(ours(x), theirs(x))
    assert repr(ours) == "Linear(in_features=8, out_features=4, bias=True)"
    assert "recipe=fp8-rowwise" in repr(with_recipe(sk.FP8_ROWWISE, 4, 8))


def test_blocks_along_the_sum_are_supported_in_a_recipe_by_hand():
    q = sk.Quantizer(sk.E4M3, sk.Block(1, 128))
    w = sk.Quantizer(sk.E4M3, sk.Block(128, 128))
    recipe = sk.Recipe("block", forward=sk.Gemm(q, w), grad_input=sk.Gemm(q, w), grad_weight=sk.Gemm(q, q))
    x, dy = gaussian(256, 256, seed=0), gaussian(256, 256, seed=2)
    layer = with_recipe(recipe, 256, 256)
    y, dx, dw = run(layer, x, dy)
    w_ = layer.weight.detach().float()
    for got, reference in zip((y, dx, dw), (x.float() @ w_.t(), dy.float() @ w_, dy.float().t() @ x.float())):
        assert sqnr_db(reference, got) > 27.5


def test_layers_can_be_copied_and_pickled(tmp_path):
    layer = with_recipe(sk.FP8, 16, 32)
    twin = copy.deepcopy(layer)
    assert isinstance(twin.precision, Precision)
    assert twin.precision.scales is not layer.precision.scales


@pytest.mark.parametrize("recipe", [*RECIPES, *(sk.recipes[n] for n in STORED_GATES)], ids=lambda r: r.name)
@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32)])
def test_no_tokens_give_no_output_and_no_gradient(recipe, shape):
    layer = with_recipe(recipe.lora(rank=2, targets=("up_proj",)) if recipe.storage else recipe, 16, 32)
    x = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    assert y.shape == (*shape[:-1], 16)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape
    if not recipe.storage:
        assert (layer.weight.grad == 0).all()


def test_nothing_is_quantized_for_a_gradient_that_nobody_wants(monkeypatch):
    layer = with_recipe(sk.FP4.keep_last(0), 32, 64)
    seen = []

    def watched(x, q, amax=None):
        seen.append(q)
        return sk.quantize(x, q, amax=amax)

    monkeypatch.setattr(linear_gemms, "quantize", watched)
    x = gaussian(16, 64, seed=0)
    with torch.no_grad():
        layer(x)
    assert len(seen) == 2  # x and w
    layer(x)
    assert len(seen) == 5  # and x rotated, for grad_weight


def test_a_second_derivative_is_refused():
    layer = with_recipe(sk.FP8_CURRENT, 16, 32)
    x = gaussian(4, 32, seed=0).requires_grad_()
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.square().sum().backward()
