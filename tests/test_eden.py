"""MS-EDEN: unbiased over its draws, less than half the squared error of stochastic rounding, and one rotation for two operands."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surokit as sk
from docs.measurements.rounding import ROOMY, errors
from surokit import kernels
from surokit.nn.joint import lay_layers
from surokit.nn.linear import Linear
from surokit.nn.stages import Plain, fused_linear
from surokit.product import product
from surokit.quantized import sqnr_db
from tests.refusals import refused

EDEN = sk.Quantizer(sk.E2M1, sk.NV(16), rounding="eden", hadamard=128)
STOCHASTIC = sk.Quantizer(sk.E2M1, sk.NV(16), rounding="stochastic")
NEAREST = sk.Quantizer(sk.E2M1, sk.NV(16))
DRAWS = 64


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def found() -> dict[str, dict[int, float]]:
    """The relative squared error of the mean of so many draws, of each rounding, on a Gaussian matrix."""
    quantizers: dict[str, Any] = {"eden": EDEN, "roomy": ROOMY, "stochastic": STOCHASTIC, "nearest": NEAREST}
    return {name: errors(normal(64, 512), q, (1, DRAWS)) for name, q in quantizers.items()}


def test_the_mean_of_many_draws_comes_as_near_as_an_unbiased_one_does(found: Any) -> None:
    """The squared error of a mean of n falls as 1 / n; that of nearest rounding stays."""
    assert found["eden"][DRAWS] * DRAWS == pytest.approx(found["eden"][1], rel=0.03)
    assert found["nearest"][DRAWS] == pytest.approx(found["nearest"][1], rel=1e-4)


def test_its_squared_error_is_less_than_half_of_stochastic_roundings(found: Any) -> None:
    """Quartet II reports 9.8e-3 with a correction over 128 elements, and 23.5e-3 for stochastic rounding that cuts nothing."""
    assert found["eden"][1] == pytest.approx(9.4e-3, rel=0.02)
    assert found["roomy"][1] == pytest.approx(23.5e-3, rel=0.02)
    assert found["eden"][1] < 0.41 * found["roomy"][1]
    assert found["eden"][1] < 0.51 * found["stochastic"][1]


def test_a_few_large_elements_of_a_rotation_leave_a_bias() -> None:
    """Random signs are a random rotation in the limit of many comparable elements only: the docs say so."""
    sparse = torch.zeros(4, 512)
    sparse[:, ::128], sparse[:, 1::128] = 1.0, 0.3
    error = errors(sparse, EDEN, (1, DRAWS))
    assert error[DRAWS] * DRAWS > 5 * error[1]
    assert error[DRAWS] < 2e-3


def test_signs_and_scales_are_drawn_anew_and_repeat_with_a_seed() -> None:
    x = normal(16, 256)
    torch.manual_seed(0)
    first, second = sk.quantize(x, EDEN), sk.quantize(x, EDEN)
    torch.manual_seed(0)
    again = sk.quantize(x, EDEN)
    assert all(torch.equal(a, b) for a, b in zip(first.parts, again.parts))
    assert first.rotation is not None
    assert second.rotation is not None
    assert not torch.equal(first.rotation, second.rotation)
    assert not torch.equal(first.codes, second.codes)
    same_signs = sk.quantize(x, EDEN, rotation=first.rotation)  # values are rounded to nearest, scales are not
    assert torch.equal(first.codes, same_signs.codes)
    assert not torch.equal(first.scales.view(torch.uint8), same_signs.scales.view(torch.uint8))
    seeds = [sk.quantize(x, EDEN, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(seeds[0].dequantize(), seeds[1].dequantize())
    assert not torch.equal(seeds[0].dequantize(), seeds[2].dequantize())


def test_operands_that_share_a_rotation_are_multiplied_as_they_are_and_others_are_turned_back() -> None:
    a, b = normal(32, 256), normal(24, 256, seed=1)
    A = sk.quantize(a, EDEN, seed=0)
    beside, apart = sk.quantize(b, EDEN, seed=1, rotation=A.rotation), sk.quantize(b, EDEN, seed=1)
    assert A.meets(beside)
    assert not A.meets(apart)
    for B in (beside, apart, sk.quantize(b, NEAREST)):
        exact = A.dequantize() @ B.dequantize().t()
        torch.testing.assert_close(product(A, B, torch.float32), exact, rtol=1e-4, atol=1e-3)


def test_the_second_operand_takes_the_signs_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """So no product of a layer turns an operand back, and gradients are those of codes that tensor cores would multiply."""
    turned: list[Any] = []
    monkeypatch.setattr(kernels, "rotate_drawn", lambda *args: turned.append(args))
    layer = Linear(96, 48)
    sk.apply(nn.ModuleDict({"up_proj": layer}), sk.QUARTET_II)
    x = normal(40, 96).requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
    assert not turned


def test_gradients_of_a_layer_are_unbiased() -> None:
    """The mean over many passes comes as near to dy w and dy' x as an unbiased one does."""
    layer = Linear(128, 128, bias=False)
    with torch.no_grad():
        layer.weight.copy_(normal(128, 128, seed=1))
    sk.apply(nn.ModuleDict({"up_proj": layer}), sk.QUARTET_II)
    x, dy = normal(128, 128), normal(128, 128, seed=2)
    torch.manual_seed(0)
    sums = [torch.zeros(128, 128), torch.zeros(128, 128)]
    single: list[float] = []
    exact = dy @ layer.weight.detach(), dy.t() @ x
    for _ in range(32):
        given = x.clone().requires_grad_()
        layer.zero_grad()
        layer(given).backward(dy)
        assert given.grad is not None
        assert layer.weight.grad is not None
        for total, grad in zip(sums, (given.grad, layer.weight.grad)):
            total += grad
        single = single or [relative(grad, e) for grad, e in zip((given.grad, layer.weight.grad), exact)]
    for total, once, e in zip(sums, single, exact):
        assert relative(total / 32, e) == pytest.approx(once / 32, rel=0.1)


@pytest.mark.parametrize("fusion", [sk.Fusion(joint=False), sk.Fusion()], ids=["each", "joint"])
def test_layers_that_share_an_input_share_its_signs(fusion: sk.Fusion, monkeypatch: pytest.MonkeyPatch) -> None:
    turned: list[Any] = []
    monkeypatch.setattr(kernels, "rotate_drawn", lambda *args: turned.append(args))
    layers = [Linear(128, rows, bias=False) for rows in (128, 64, 64)]
    for i, layer in enumerate(layers):
        with torch.no_grad():
            layer.weight.copy_(normal(*layer.weight.shape, seed=i))
    sk.apply(nn.ModuleList(layers), sk.QUARTET_II)
    lay_layers(layers)
    x = normal(256, 128, seed=9).requires_grad_()
    torch.manual_seed(0)
    _, parts, _ = fused_linear(Plain(x), layers, fusion)
    dys = [normal(*y.shape, seed=20 + i) for i, y in enumerate(parts)]
    torch.autograd.backward(parts, dys)
    assert x.grad is not None
    assert sqnr_db(torch.stack([dy @ layer.weight.detach() for dy, layer in zip(dys, layers)]).sum(0), x.grad) > 16.7
    for dy, layer in zip(dys, layers):
        assert layer.weight.grad is not None
        assert sqnr_db(dy.t() @ x.detach(), layer.weight.grad) > 16.7
    assert not turned


def relative(y: Tensor, exact: Tensor) -> float:
    return float((y - exact).square().sum() / exact.square().sum())


def test_a_recipe_with_it_is_compared_and_repeats_itself() -> None:
    torch.manual_seed(0)
    config = sk.DecoderConfig(layers=1, width=64, heads=2, kv_heads=1, vocab=64, ffn=96)
    model, ids = sk.Decoder(config), torch.randint(64, (2, 32))
    batch = {"input_ids": ids, "labels": ids}
    before = torch.get_rng_state()
    first, again = (sk.compare(model, batch, sk.QUARTET_II, sk.FP4.keep_last(0)) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert first.equals(again)
    means = first.groupby(["recipe", "gemm"])["sqnr_db"].mean()
    assert (means["quartet-ii"] > means["fp4"] + 0.5).all()


def test_what_it_cannot_be_joined_with_is_refused() -> None:
    for options in (
        {"hadamard": 0},
        {"hadamard": 16},
        {"scaling": sk.NV(16, 16)},
        {"scaling": sk.MX(32)},
        {"four_over_six": "mse"},
    ):
        with refused(ValueError):
            sk.Quantizer(sk.E2M1, **{"scaling": sk.NV(16), "rounding": "eden", "hadamard": 128, **options})  # type: ignore[arg-type]
    with refused(ValueError):
        sk.Quantizer(sk.E2M1, sk.NV(16), hadamard=128)
    x = normal(16, 128)
    with refused(ValueError):
        sk.quantize(x, EDEN, amax=torch.ones(1, 1))
    with refused(ValueError):
        sk.quantize(x, NEAREST, rotation=sk.quantize(x, EDEN).rotation)


def test_no_weight_is_stored_in_it() -> None:
    with refused(ValueError):
        sk.FP4.store(EDEN)
    with refused(ValueError):
        Linear(128, 16).store(EDEN)


def test_a_copy_of_a_model_draws_the_same_from_the_same_state() -> None:
    layer = Linear(64, 64)
    sk.apply(nn.ModuleDict({"up_proj": layer}), sk.QUARTET_II)
    other = copy.deepcopy(layer)
    grads = []
    for each in (layer, other):
        torch.manual_seed(3)
        each(normal(32, 64)).square().sum().backward()
        assert each.weight.grad is not None
        grads.append(each.weight.grad)
    assert torch.equal(*grads)
