"""Codes of frozen weights: kept as long as they are what the products would quantize, and never where they are not wanted."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

import surokit as sk
from surokit.convert import load_scaling_state, roll_scales, scaling_state
from surokit.fusion import OFF, Fusion
from surokit.nn import linear_gemms
from surokit.nn.joint import lay_layers
from surokit.nn.stages import Plain, fused_linear
from surokit.nn.weight_cache import QuantizedWeightCache

K, ROWS = 128, (128, 256)
CODES, TRANSPOSED = Fusion(), Fusion(frozen="transposed")
RECIPES = [sk.FP8, sk.FP8_CURRENT, sk.FP8_ROWWISE, sk.FP8_BLOCK, sk.MXFP8, sk.FP4.keep_last(0), sk.MXFP4]


def frozen(recipe, dtype=torch.bfloat16):
    torch.manual_seed(0)
    layers = nn.ModuleDict({name: nn.Linear(K, n, bias=False, dtype=dtype) for name, n in zip("qk", ROWS)})
    sk.apply(layers, recipe.lora(4, targets=("q", "k")))
    for name, parameter in layers.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return layers


def transposed_of(layers):
    return list(layers["q"].frozen._transposed.values())


def step(layers, fusion, seed=0):
    """Outputs and gradients."""
    torch.manual_seed(seed)
    if fusion.joint:
        lay_layers([*layers.values()])
    x = torch.randn(24, K).to(layers["q"].lora_A.weight.dtype).requires_grad_()
    _, parts, _ = fused_linear(Plain(x), [*layers.values()], fusion)
    torch.cat(parts, -1).float().square().sum().backward()
    grads = [p.grad for p in layers.parameters() if p.grad is not None]
    layers.zero_grad()
    return [*(y.detach() for y in parts), x.grad, *grads]


@pytest.fixture
def quantized(monkeypatch):
    """Roles of the operands that are quantized, in order; stored weights that serve as they are do not count."""
    seen = []
    call = linear_gemms._Operands.__call__

    def counting(self, role, q, x, *rest):
        out = call(self, role, q, x, *rest)
        if out is not x:
            seen.append(role)
        return out

    monkeypatch.setattr(linear_gemms._Operands, "__call__", counting)
    return seen


def weights_quantized(quantized, layers, fusion=CODES):
    quantized.clear()
    step(layers, fusion)
    return quantized.count("w")


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("fusion", [CODES, TRANSPOSED, CODES.without("joint")], ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_a_frozen_weight_is_quantized_once(recipe, fusion, quantized):
    kept, never = frozen(recipe), frozen(recipe)
    for seed in range(3):
        a, b = step(kept, fusion, seed), step(never, replace(fusion, frozen="no"), seed)
        assert same(a, b)
        for model in (kept, never):
            roll_scales(model)
    again = weights_quantized(quantized, kept, fusion)
    # W' has other tiles, and is only there where it was asked for
    w_t_from_w = recipe.grad_input.b == recipe.forward.b and recipe.grad_input.b.transposable
    products_of_dx = 1 if fusion.joint and recipe.grad_input.a.joins(1, ROWS) else 2
    assert again == (0 if w_t_from_w or fusion.frozen == "transposed" else products_of_dx)


def test_what_it_costs():
    layers = frozen(sk.FP8_BLOCK)
    step(layers, CODES)
    elements, scales = K * sum(ROWS), 4 * len(ROWS) * 3 // 2
    assert layers["q"].frozen.nbytes == elements + scales
    assert layers["k"].frozen is None
    step(layers, TRANSPOSED)
    assert layers["q"].frozen.nbytes == 2 * (elements + scales)
    assert all(Q.codes.is_contiguous() for Q in transposed_of(layers))
    step(layers, OFF)
    step(layers, Fusion(frozen="no"))
    assert layers["q"].frozen is None


def change_weight(layers):
    with torch.no_grad():
        layers["k"].weight.mul_(2)


def load(layers):
    layers.load_state_dict({name: 2 * t for name, t in layers.state_dict().items()})


def load_assigned(layers):
    layers.load_state_dict({name: 2 * t for name, t in layers.state_dict().items()}, assign=True)


def merge(layers):
    layers["k"].merge_adapter()


def merge_and_back(layers):
    layers["k"].merge_adapter()
    layers["k"].unmerge_adapter()


def another_recipe(layers):
    sk.apply(layers, sk.FP8_ROWWISE.lora(4, targets=("q", "k")))


def another_parameter(layers):
    layers["q"].weight = nn.Parameter(layers["q"].weight.detach().clone(), requires_grad=False)


def moved(layers):
    layers.to(torch.float32).to(torch.bfloat16)


CHANGES = [change_weight, load, load_assigned, merge, merge_and_back, another_recipe, another_parameter, moved]


@pytest.mark.parametrize("fusion", [CODES, TRANSPOSED], ids=str)
@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_what_changes_a_weight_or_its_products_drops_them(change, fusion, quantized):
    layers, bare = frozen(sk.FP8_BLOCK), frozen(sk.FP8_BLOCK)
    step(layers, fusion), step(bare, fusion.without("frozen"))
    assert weights_quantized(quantized, layers, fusion) == 0
    change(layers), change(bare)
    assert weights_quantized(quantized, layers, fusion) > 0
    for seed in range(2):
        assert same(step(layers, fusion, seed), step(bare, fusion.without("frozen"), seed))


def test_another_tensor_at_the_same_address_is_another():
    w = nn.Parameter(torch.randn(4, 4), requires_grad=False)
    kept = QuantizedWeightCache([w], "what")
    assert kept.serves([w], "what")
    assert not kept.serves([nn.Parameter(w.detach(), requires_grad=False)], "what")


def test_memory_that_was_given_back_and_out_again_is_another():
    """Torch counts no change where `.data` is set, and the allocator likes to give the same address again, as is done here."""
    memory = bytearray(64 * 64 * 4)

    def given_out():
        return torch.frombuffer(memory, dtype=torch.float32).view(64, 64)

    w = nn.Parameter(given_out(), requires_grad=False)
    kept, address = QuantizedWeightCache([w], "what"), w.data_ptr()
    assert kept.serves([w], "what")
    w.data = torch.zeros(64, 64)
    w.data = given_out()
    assert w.data_ptr() == address
    assert not kept.serves([w], "what")
    assert not kept.serves([w], "else")
    assert not kept.serves([w, w], "what")


def test_a_weight_that_trains_has_none(quantized):
    layers = frozen(sk.FP8_BLOCK)
    step(layers, CODES)
    layers["q"].weight.requires_grad_(True)
    assert weights_quantized(quantized, layers) > 0
    assert layers["q"].frozen is None
    layers["q"].weight.requires_grad_(False)
    step(layers, CODES)
    with sk.precision(layers, "fp8-rowwise"):
        assert weights_quantized(quantized, layers) > 0
    with sk.precision(layers, "bf16"):
        assert weights_quantized(quantized, layers) == 0
        assert layers["q"].frozen is None


@pytest.mark.parametrize("recipe", [sk.FP8, sk.FP8_BLOCK], ids=lambda r: r.name)
def test_they_are_in_no_checkpoint_and_no_copy(recipe, quantized):
    layers = frozen(recipe)
    before = layers.state_dict()
    step(layers, TRANSPOSED)
    assert layers["q"].frozen.nbytes
    after = layers.state_dict()
    assert after.keys() == before.keys()
    assert layers["q"].extra_repr() == frozen(recipe)["q"].extra_repr()
    for twin in (copy.deepcopy(layers), pickle.loads(pickle.dumps(layers)), copy.copy(layers["q"])):
        for layer in twin.values() if isinstance(twin, nn.ModuleDict) else [twin]:
            assert layer.frozen is None
    assert layers["q"].frozen.nbytes  # the original goes on
    twin = copy.deepcopy(layers)
    assert same(step(twin, TRANSPOSED), step(layers, TRANSPOSED))


def test_a_sharded_model_keeps_none(monkeypatch):
    for name, value in (("is_initialized", True), ("get_world_size", 2)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    layers = frozen(sk.FP8_BLOCK)
    step(layers, TRANSPOSED)
    assert layers["q"].frozen is None


def test_nothing_is_kept_while_a_graph_is_captured(monkeypatch, quantized):
    layers, bare = frozen(sk.FP8), frozen(sk.FP8)
    monkeypatch.setattr("surokit.nn.weight_cache._capturing", lambda _: True)
    for seed in range(2):
        assert same(step(layers, TRANSPOSED, seed), step(bare, Fusion(frozen="no"), seed))
        assert layers["q"].frozen.nbytes == 0
    monkeypatch.setattr("surokit.nn.weight_cache._capturing", lambda _: False)
    step(layers, TRANSPOSED)
    assert weights_quantized(quantized, layers, TRANSPOSED) == 0
    monkeypatch.setattr("surokit.nn.weight_cache._capturing", lambda _: True)
    assert weights_quantized(quantized, layers, TRANSPOSED) == 0  # what is there is read


def test_codes_from_inference_serve_training(quantized):
    layers, bare = frozen(sk.FP8_BLOCK), frozen(sk.FP8_BLOCK)
    for model, fusion in ((layers, TRANSPOSED), (bare, Fusion(frozen="no"))):
        with torch.inference_mode():
            lay_layers([*model.values()])
            fused_linear(Plain(torch.randn(24, K).bfloat16()), [*model.values()], fusion)
    assert layers["q"].frozen.nbytes
    assert same(step(layers, TRANSPOSED), step(bare, Fusion(frozen="no")))
    assert weights_quantized(quantized, layers, TRANSPOSED) == 0


# -- delayed scaling


def test_a_history_with_other_amaxes_keeps_them_out(quantized):
    """A weight that trained before it was frozen: its scale changes as its history does."""
    layers, bare = frozen(sk.FP8), frozen(sk.FP8)
    for model in (layers, bare):
        with torch.no_grad():
            model["q"].weight.mul_(3)
        step(model, OFF)
        roll_scales(model)
        with torch.no_grad():
            model["q"].weight.div_(3)
    for seed in range(3):
        assert same(step(layers, CODES, seed), step(bare, CODES.without("frozen"), seed))
        for model in (layers, bare):
            roll_scales(model)
        assert same(scaling_state(layers).values(), scaling_state(bare).values())
    assert weights_quantized(quantized, layers) > 0


def test_amaxes_that_are_loaded_are_asked_again(quantized):
    layers = frozen(sk.FP8)
    step(layers, CODES)
    assert weights_quantized(quantized, layers) == 0
    state = scaling_state(layers)
    state["in_force"] *= 3
    state["history"][0] = state["in_force"]
    bare = frozen(sk.FP8)
    for model in (layers, bare):
        load_scaling_state(model, state)
    for seed in range(2):
        assert same(step(layers, CODES, seed), step(bare, CODES.without("frozen"), seed))
        for model in (layers, bare):
            roll_scales(model)


def test_evaluation_before_training_keeps_nothing_yet(quantized):
    layers = frozen(sk.FP8).eval()
    for _ in range(2):
        with torch.no_grad():
            fused_linear(Plain(torch.randn(24, K).bfloat16()), [*layers.values()], CODES)
    assert scaling_state(layers)["in_force"].eq(0).all()
    layers.train()
    step(layers, CODES)
    assert weights_quantized(quantized, layers) == 0
    layers.eval()
    before = scaling_state(layers)
    assert weights_quantized(quantized, layers) == 0
    assert same(before.values(), scaling_state(layers).values())


def test_a_weight_that_is_not_finite_is_seen_each_time(quantized):
    layers = frozen(sk.FP8)
    with torch.no_grad():
        layers["q"].weight[0, 0] = float("inf")
    for _ in range(2):
        assert not step(layers, CODES)[0].isfinite().any()
    assert weights_quantized(quantized, layers) > 0


# -- stored weights


@pytest.mark.parametrize("storage", [sk.QFP8, sk.QNF4], ids=lambda r: r.name)
def test_a_stored_weight_holds_its_codes_already(storage, quantized):
    layers, bare = (frozen(sk.FP8_BLOCK.store(storage)) for _ in range(2))
    step(layers, CODES)
    held = layers["q"].frozen
    assert held is None if storage is sk.QNF4 else held.nbytes == 0
    assert same(step(layers, CODES), step(bare, CODES.without("frozen")))
    got = step(layers, TRANSPOSED)
    assert same(got, step(bare, CODES.without("frozen")))
    if storage is sk.QNF4:  # codes of another format beside them would cost what storing saved
        assert layers["q"].frozen is None
        return
    assert sum(Q.codes.numel() for Q in transposed_of(layers)) == K * sum(ROWS)
    assert all(Q.codes.is_contiguous() for Q in transposed_of(layers))
    assert same(step(layers, TRANSPOSED), got)
    for each in (layers, bare):
        with torch.no_grad():
            each["k"].stored_scales[0].mul_(2)
    assert same(step(layers, TRANSPOSED), step(bare, CODES.without("frozen")))


@pytest.mark.parametrize("recipe", [sk.FP8_BLOCK, sk.FP8_BLOCK.store(sk.QFP8)], ids=lambda r: r.name)
def test_scales_of_a_transposed_view_are_turned_once(recipe, monkeypatch):
    monkeypatch.setattr(f"{__name__}.K", 640)
    layers, bare = frozen(recipe), frozen(recipe)
    never = CODES.without("frozen")
    given = []
    grad_input = linear_gemms.Products.grad_input

    def seen(self, dy_q, w_t, onto=None):
        given.append(w_t)
        return grad_input(self, dy_q, w_t, onto)

    for _ in range(2):
        assert same(step(layers, CODES), step(bare, never))
    with monkeypatch.context() as patched:
        patched.setattr(linear_gemms.Products, "grad_input", seen)
        step(layers, CODES), step(layers, CODES)
    (first, second), held = given, layers["q"].frozen
    assert not first.codes.is_contiguous()
    assert first.scales.is_contiguous()
    assert first.scales.data_ptr() == second.scales.data_ptr()
    scales = 4 * 5 * sum(ROWS) // 128
    codes = 0 if recipe.storage else K * sum(ROWS) + scales
    assert held.nbytes == codes + scales
    with torch.no_grad():
        for each in (layers, bare):
            changed = each["k"].stored_scales[0] if recipe.storage else each["k"].weight
            changed.mul_(2)
    assert same(step(layers, CODES), step(bare, never))
    assert layers["q"].frozen is not held


@pytest.mark.parametrize("recipe", [sk.QFP8, sk.QFP4, sk.QNF4.decode_once(), sk.BF16], ids=lambda r: r.name)
def test_products_that_quantize_nothing_keep_nothing(recipe):
    layers = frozen(recipe)
    step(layers, TRANSPOSED)
    assert layers["q"].frozen is None
