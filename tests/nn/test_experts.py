"""The experts of transformers' models under recipes, stored and with adapters: as their own forward, and as layers of their own."""

import copy
import io
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import surokit as sk
from surokit.nn import experts as module_of_experts
from surokit.nn.delayed import DelayedScales, banks_of
from surokit.nn.experts import Experts, Routing, adopt_experts, is_experts, unsupported
from surokit.nn.linear import Linear
from surokit.nn.linear_gemms import Precision
from surokit.quantized import quantize
from surokit.recipe import Lora
from tests.refusals import refused

E, H, WIDTH = 5, 32, 24

# each kind of experts that transformers has: (model, class)
FAMILIES = {
    "mixtral": "MixtralExperts",
    "qwen2_moe": "Qwen2MoeExperts",
    "qwen3_moe": "Qwen3MoeExperts",
    "deepseek_v2": "DeepseekV2Experts",
    "deepseek_v3": "DeepseekV3Experts",
    "olmoe": "OlmoeExperts",
    "gpt_oss": "GptOssExperts",  # transposed, with biases, gate and up in turns
    "nemotron_h": "NemotronHExperts",  # without a gate
    "aria": "AriaExperts",  # transposed
}
KINDS = ("mixtral", "gpt_oss", "nemotron_h", "aria")
RECIPES = [r.keep_last(0) for r in sk.recipes.values() if r.quantized_products]
STORAGES = {name: storage for name, r in sk.recipes.items() if (storage := r.storage) is not None}
STORAGES["mx"] = sk.Quantizer(sk.E4M3, sk.MX(32))


def gaussian(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def made(
    family: str = "mixtral", dtype: torch.dtype = torch.float32, sizes: tuple[int, int, int] = (E, H, WIDTH)
) -> Any:
    """A module of transformers, as its models make it."""
    experts, hidden, width = sizes
    config = SimpleNamespace(
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), experts),
        **dict.fromkeys(("hidden_size", "moe_hidden_size"), hidden),
        **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), width),
        **dict.fromkeys(("hidden_act", "mlp_hidden_act"), "silu"),
        moe_latent_size=None,
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
        post_norm_eps=1e-6,
        _experts_implementation="eager",
    )
    names = {**FAMILIES, "muse_spark": "MuseSparkExperts"}
    kind = getattr(import_module(f"transformers.models.{family}.modeling_{family}"), names[family])
    experts_of = kind(config)
    for i, (name, parameter) in enumerate(experts_of.named_parameters()):
        parameter.data = gaussian(*parameter.shape, seed=i, dtype=dtype) * (1.0 if "bias" in name else hidden**-0.5)
    return experts_of


def routed(tokens: int = 12, choices: int = 2, experts: int = E, seed: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Whom a router sends the tokens to, and with which weights."""
    scores = gaussian(tokens, experts, seed=seed).softmax(-1)
    weights, index = scores.topk(choices)
    return index, weights


def run(module: Any, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, seed: int = 9) -> dict[str, Any]:
    """y and the gradients of everything."""
    x, weights = x.detach().clone().requires_grad_(), weights.detach().to(x.dtype).clone().requires_grad_()
    module.zero_grad()
    y = module(x, index, weights)
    y.backward(gaussian(*y.shape, seed=seed, dtype=y.dtype))
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "dx": x.grad, "dweights": weights.grad, **grads}


def assert_alike(ours: dict[str, Any], theirs: dict[str, Any], dtype: torch.dtype = torch.float64) -> None:
    for name, expected in theirs.items():
        tolerance = 1e-10 if dtype == torch.float64 else 2e-5
        torch.testing.assert_close(ours[name], expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}")  # noqa: B023


def projections(module: Any) -> Any:
    return adopt_experts(module).projections.values()


def pickled(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)  # Python's own pickles of float8 tensors cannot be read
    file.seek(0)
    return torch.load(file, weights_only=False)


def adapted(module: Any, zero: bool = False, rank: int = 4) -> Experts:
    experts = adopt_experts(module)
    torch.manual_seed(0)
    for i, projection in enumerate(experts.projections.values()):
        projection.add_adapter(Lora(rank, 8.0))
        if not zero:
            b = projection.lora_B
            b.data = gaussian(*b.shape, seed=20 + i, dtype=b.dtype) * 0.1
    return experts


# -- what they are


def test_a_module_without_anything_computes_as_it_did():
    module = made()
    x, (index, weights) = gaussian(12, H, seed=3), routed()
    before = run(module, x, index, weights)
    experts = adopt_experts(module)
    assert experts is module
    assert adopt_experts(module) is module
    assert isinstance(module, Experts)
    assert type(module).__name__ == "MixtralExperts"
    assert is_experts(module)
    after = run(module, x, index, weights)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_what_cannot_be_adopted_says_why():
    assert unsupported(made()) == ""
    assert unsupported(nn.Linear(2, 2)) == "no experts of transformers"
    module = made("muse_spark")
    assert is_experts(module)
    with refused(ValueError):
        adopt_experts(module)
    module = made()
    module._is_expert_parallel = True
    with refused(ValueError):
        adopt_experts(module)
    module = made()
    module.scale = nn.Parameter(torch.ones(1))
    with refused(ValueError):
        adopt_experts(module)
    module = made()
    for parameter in module.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(torch.float8_e4m3fn)
    with refused(ValueError):
        adopt_experts(module)


# -- the same numbers as transformers' own forward


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_of_zeros_changes_nothing(family, dtype):
    module, x, (index, weights) = made(family, dtype), gaussian(12, H, seed=3, dtype=dtype), routed()
    theirs = run(module, x, index, weights)
    experts = adapted(copy.deepcopy(module), zero=True)
    ours = run(experts, x, index, weights)
    assert_alike(ours, theirs, dtype)
    for name, grad in ours.items():
        assert grad.any() != name.startswith("lora_A"), name  # B is zero, so A has no gradient yet
    assert ours["y"].dtype == theirs["y"].dtype


ROUTES = {
    "all to one": torch.full((12, 1), 3),
    "one idle": torch.tensor([[0, 1], [1, 3], [3, 4], [4, 0]] * 3),
    "some to none": torch.tensor([[0, E], [E, E], [2, 4]] * 4),
    "all to none": torch.full((12, 2), E),
    "three choices": routed(choices=3)[0],
    "no tokens": torch.empty((0, 2), dtype=torch.int64),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("family", ["mixtral", "nemotron_h", "aria"])
def test_wherever_the_router_sends_them(family, route):
    index = ROUTES[route]
    weights = gaussian(*index.shape, seed=5).sigmoid()
    x = gaussian(len(index), H, seed=3, dtype=torch.float64)
    module = made(family, torch.float64)
    ours = run(adapted(copy.deepcopy(module), zero=True), x, index, weights)
    hit_E = torch.zeros(E + 1, dtype=torch.bool).index_fill(0, index.flatten(), value=True)[:E]
    for name in ours.keys() & {"up_proj", "gate_up_proj", "down_proj"}:
        assert torch.equal(ours[name].flatten(1).any(1), hit_E)
    if not hit_E.any():  # theirs have no gradients then
        assert all(ours[name].shape == x.shape and not ours[name].any() for name in ("y", "dx"))
    elif family != "nemotron_h" or route != "some to none":  # which theirs cannot do
        assert_alike(ours, run(module, x, index, weights))


def test_arguments_come_by_name_too():
    x, (index, weights) = gaussian(12, H, seed=3), routed()
    for family, names in (
        ("mixtral", ("top_k_weights", "top_k_index")),
        ("gpt_oss", ("routing_weights", "router_indices")),
    ):
        experts = adapted(made(family))
        by_name = experts(**dict(zip(names, (weights, index))), hidden_states=x)
        assert torch.equal(by_name, experts(x, index, weights))


# -- torch's grouped product


@pytest.mark.parametrize("family", KINDS)
def test_all_experts_at_once_are_each_on_its_own(family, monkeypatch):
    """What runs on a CUDA device without asking for sizes; torch computes it on a CPU too."""
    experts = adapted(made(family, torch.bfloat16), rank=8)
    x, index, weights = (
        gaussian(12, H, seed=3, dtype=torch.bfloat16),
        ROUTES["some to none"],
        gaussian(12, 2, seed=5).sigmoid(),
    )
    one_by_one = run(experts, x, index, weights)
    monkeypatch.setattr(module_of_experts, "has_grouped_product", lambda device: True)
    monkeypatch.setattr(Routing, "rows", property(lambda _: pytest.fail("the host asks for sizes")))
    at_once = run(experts, x, index, weights)
    assert at_once.keys() == one_by_one.keys()
    for name, expected in one_by_one.items():
        torch.testing.assert_close(at_once[name], expected, rtol=2e-2, atol=2e-2, msg=lambda m: f"{name}: {m}")  # noqa: B023
    assert not at_once["dx"][1].any()  # no expert has it


def test_a_gradient_that_repeats_one_number(monkeypatch):
    monkeypatch.setattr(module_of_experts, "has_grouped_product", lambda device: True)
    module = made(dtype=torch.bfloat16)
    up, _ = projections(module)
    x = gaussian(12, H, seed=3, dtype=torch.bfloat16).requires_grad_()
    up(x, Routing.of(torch.arange(12).remainder(E).view(12, 1), E)).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_odd_sizes_go_one_by_one(monkeypatch):
    monkeypatch.setattr(module_of_experts, "has_grouped_product", lambda device: True)
    module, (index, weights) = made(dtype=torch.bfloat16, sizes=(E, 20, 9)), routed()
    assert not any(projection.groups(torch.bfloat16) for projection in projections(module))
    x = gaussian(12, 20, seed=3, dtype=torch.bfloat16)
    theirs = run(made(dtype=torch.float64, sizes=(E, 20, 9)), x.double(), index, weights)
    ours = run(adapted(module, zero=True), x, index, weights)
    torch.testing.assert_close(ours["y"].double(), theirs["y"], rtol=5e-2, atol=5e-2)


# -- stored weights


def merged(projection: Any, adapters: dict[str, torch.Tensor]) -> torch.Tensor:
    """The weights [E, N, K] in float64, with their adapters, as the parameter lies."""
    name, scale = projection.name, projection.lora_alpha / projection.lora_rank
    w = projection.dense_weight(torch.float64).detach()
    w = w + scale * adapters[f"lora_B.{name}"] @ adapters[f"lora_A.{name}"]
    return w.transpose(-2, -1) if projection.transposed else w


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("family", KINDS)
def test_stored_weights_are_those_that_were_decoded(family, storage):
    """Against float64, with adapters: outputs, and gradients of the tokens, the router's weights and the adapters."""
    module = made(family, torch.float64)
    plain, x, (index, weights) = copy.deepcopy(module), gaussian(12, H, seed=3, dtype=torch.float64), routed()
    weights = weights.double()
    for projection in projections(module):
        projection.store(STORAGES[storage])
    experts = adapted(module)
    for projection in projections(module):
        projection.lora_A.data, projection.lora_B.data = projection.lora_A.double(), projection.lora_B.double()
    ours = run(experts, x, index, weights)

    adapters = {n: p.detach().clone().requires_grad_() for n, p in experts.named_parameters() if n.startswith("lora_")}
    replaced = {projection.name: merged(projection, adapters) for projection in projections(module)}
    x_, weights_ = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = torch.func.functional_call(plain, replaced, (x_, index, weights_))
    y.backward(gaussian(*y.shape, seed=9, dtype=torch.float64))
    theirs = {"y": y.detach(), "dx": x_.grad, "dweights": weights_.grad, **{n: a.grad for n, a in adapters.items()}}
    assert_alike(ours, theirs)
    biases = {f"{projection.name}_bias" for projection in projections(module) if projection.bias is not None}
    assert ours.keys() == theirs.keys() | biases  # nothing else has a gradient: what is stored is frozen


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("family", ["mixtral", "aria"])
def test_codes_are_those_of_each_expert(family, storage):
    quantizer = STORAGES[storage]
    module = made(family)
    before = {projection.name: projection.dense_weight().detach().clone() for projection in projections(module)}
    for projection in projections(module):
        projection.store(quantizer)
        assert projection.storage == quantizer
        assert projection.stored is not None
        for Q, w in zip(projection.stored, before[projection.name], strict=True):
            expected = quantize(w, quantizer)
            assert Q.shape == expected.shape == (projection.out_features, projection.in_features)
            for part, other in zip(Q.parts, expected.parts, strict=True):
                assert torch.equal(part.view(torch.uint8), other.contiguous().view(torch.uint8))
        decoded = projection.dense_weight(torch.float32)
        assert torch.equal(decoded, torch.stack([Q.dequantize() for Q in projection.stored]))
        assert projection.nbytes == sum(Q.nbytes for Q in projection.stored)
        # a part of a checkpoint, and back to numbers
        projection.set_stored(projection.stored)
        assert torch.equal(projection.dense_weight(torch.float32), decoded)
        projection.set_dense(decoded, requires_grad=True)
        assert projection.storage is None
        assert projection.requires_grad
        assert torch.equal(projection.dense_weight(), decoded)
    assert module.state_dict().keys() == made(family).state_dict().keys()
    assert all(a.shape == b.shape for a, b in zip(module.parameters(), made(family).parameters()))


@pytest.mark.parametrize("storage", STORAGES)
def test_scales_are_an_experts_own(storage):
    module, other = made(), made()
    other.down_proj.data[2] *= 1000
    (_, down), (_, changed) = projections(module), projections(other)
    for projection in (down, changed):
        projection.store(STORAGES[storage])
    for expert, (Q, R) in enumerate(zip(down.stored, changed.stored)):
        same = [torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(Q.parts, R.parts)]
        assert all(same) == (expert != 2)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_decoded_weights_can_be_kept(family, storage, grouped, monkeypatch):
    """The same numbers, decoded once; all experts at once where a device does that."""
    dtype = torch.bfloat16
    experts, x, (index, weights) = made(family, dtype), gaussian(12, H, seed=3, dtype=dtype), routed()
    for projection in projections(experts):
        projection.store(STORAGES[storage])
    adapted(experts, rank=8)
    expected = run(experts, x, index, weights)
    for projection in projections(experts):
        assert projection.decodes
        assert not projection.keeps_now
        projection.keep_decoded(True)
        assert projection.keeps_now
    if grouped:
        monkeypatch.setattr(module_of_experts, "has_grouped_product", lambda device: True)
        monkeypatch.setattr(Routing, "rows", property(lambda _: pytest.fail("the host asks for sizes")))
    ours = run(experts, x, index, weights)
    for name, value in expected.items():
        assert grouped or torch.equal(ours[name], value)
        torch.testing.assert_close(ours[name], value, rtol=2e-2, atol=2e-2)
    down = experts.projections["down_proj"]
    kept = down.decoded_weight(dtype)
    assert kept is down.decoded_weight(dtype)
    assert torch.equal(kept, down.dense_weight(dtype))
    down.set_stored([down.stored_of(0)] * E)
    assert torch.equal(down.decoded_weight(dtype), down.dense_weight(dtype))
    assert pickled(experts).projections["down_proj"].kept is None
    experts.load_state_dict(experts.state_dict())
    assert down.kept is None


def test_names_of_what_is_stored():
    module = made("gpt_oss")
    up, down = projections(module)
    up.store(STORAGES["qfp8"])
    down.store(STORAGES["qfp4"])
    adapted(module)
    assert [*module.state_dict()] == [
        "gate_up_proj",
        "gate_up_proj_bias",
        "down_proj",
        "down_proj_bias",
        "gate_up_proj_scale_inv",
        "down_proj_scale",
        "down_proj_scale_2",
        "lora_A.gate_up_proj",
        "lora_A.down_proj",
        "lora_B.gate_up_proj",
        "lora_B.down_proj",
    ]
    assert {name: tuple(part.shape) for name, part in module.state_dict().items() if "scale" in name} == {
        "gate_up_proj_scale_inv": (E, 1, 1),
        "down_proj_scale": (E, H, -(-WIDTH // 16)),
        "down_proj_scale_2": (E, 1, 1),
    }
    assert up.weight.shape == (E, 2 * WIDTH, H)  # codes of [N, K], whichever way the numbers lay
    twin = made("gpt_oss")
    for projection, held in zip(projections(twin), (up, down)):
        projection.store(held.storage)
    adapted(twin, zero=True)
    twin.load_state_dict({name: t.clone() for name, t in module.state_dict().items()})
    x, (index, weights) = gaussian(12, H, seed=3), routed()
    assert torch.equal(twin(x, index, weights), module(x, index, weights))


# -- quantized products


def bank_for(recipe: sk.Recipe, slots: int) -> DelayedScales | None:
    delayed = any(q is not None and q.delayed for gemm in recipe.gemms for q in (gemm.a, gemm.b))
    return DelayedScales(4, slots, None, torch.device("cpu")) if delayed else None


def with_recipe(module: Any, recipe: sk.Recipe) -> Experts:
    """The experts with a recipe's products, each weight with slots of its own."""
    experts = adopt_experts(module)
    held = [*experts.projections.values()]
    bank = bank_for(recipe, sum(projection.slots for projection in held))
    for i, projection in enumerate(held):
        projection.precision = Precision(recipe, bank, i * projection.slots)
    if bank is not None:
        bank.layers.add(experts)
    return experts


def layers_of(projection: Any) -> list[Linear]:
    """A Linear for each expert, with the weight and recipe that the expert has, and histories of all of them."""
    layers = []
    recipe = projection.precision.recipe
    bank = bank_for(recipe, projection.slots)
    for expert in range(projection.experts):
        layer = Linear(projection.in_features, projection.out_features, bias=projection.bias is not None)
        if projection.storage is None:
            w = projection.dense_weight()[expert].detach().clone()
            layer.weight = nn.Parameter(w, requires_grad=projection.requires_grad)
        else:
            layer.set_stored(projection.stored_of(expert))
        if projection.bias is not None:
            layer.bias = nn.Parameter(projection.bias[expert].detach().clone())
        layer.precision = Precision(recipe, bank, 3 * expert)
        layers.append(layer)
    return layers


def assert_as_layers(projection: Any, x: torch.Tensor, index: torch.Tensor, autocast: bool = False) -> None:
    """y, dx, dw and the bias' gradient of rows that are sorted by expert already, bit for bit; two steps."""
    routing = Routing.of(index, projection.experts).cut()
    layers: list[Any] = layers_of(projection)
    for step in range(2):
        ours, theirs = [x.clone().requires_grad_() for _ in range(2)]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            torch.manual_seed(0)  # signs of rotations
            y = projection(ours, routing, record=True)
            torch.manual_seed(0)
            each = [(layers[expert](theirs[rows]), expert, rows) for expert, rows in routing.rows]
        dy = gaussian(*y.shape, seed=9 + step, dtype=y.dtype)
        projection.module.zero_grad()
        torch.manual_seed(0)  # draws of stochastic rounding
        y.backward(dy)
        torch.manual_seed(0)
        for part, _, rows in each:
            part.backward(dy[rows])
        for part, expert, rows in each:
            assert torch.equal(y[rows], part)
            if projection.bias is not None:
                torch.testing.assert_close(
                    projection.bias.grad[expert], layers[expert].bias.grad, rtol=2**-7, atol=1e-5
                )
        assert ours.grad is not None
        assert theirs.grad is None or torch.equal(ours.grad, theirs.grad)
        assert (theirs.grad is None) == (len(x) == 0)
        if projection.requires_grad:
            dw = projection.weight.grad.transpose(-2, -1) if projection.transposed else projection.weight.grad
            for expert, layer in enumerate(layers):
                grad = layer.weight.grad
                assert torch.equal(dw[expert], grad) if grad is not None else not dw[expert].any()
                layer.weight.grad = None
        for layer in layers:
            layer.zero_grad()
        scales, other = projection.precision.scales, layers[0].precision.scales
        if scales is not None:
            for bank in (scales, other):
                bank.roll()
            first = projection.precision.first_slot
            for name, state in other.state_dict().items():
                assert torch.equal(scales.state_dict()[name][..., first : first + projection.slots], state)
        x = x * 3


COUNTS = (0, 1, 15, 16, 17)  # tokens of each expert; what is no multiple of 16 is padded for tensor cores
UNEVEN = torch.cat([torch.full((n, 1), expert) for expert, n in enumerate(COUNTS)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_products_are_those_of_a_layer_for_each_expert(recipe, family, dtype):
    experts = with_recipe(made(family, dtype), recipe)
    for projection in experts.projections.values():
        assert_as_layers(projection, gaussian(len(UNEVEN), projection.in_features, seed=3, dtype=dtype), UNEVEN)


@pytest.mark.parametrize("recipe", [sk.FP8, sk.MXFP8], ids=lambda r: r.name)
@pytest.mark.parametrize("route", ["all to one", "some to none", "all to none", "no tokens"])
def test_products_wherever_the_router_sends_them(recipe, route):
    experts = with_recipe(made(dtype=torch.bfloat16), recipe)
    index = ROUTES[route].flatten().sort().values.view(-1, 1)
    rows = int((index < E).sum())
    for projection in experts.projections.values():
        assert_as_layers(projection, gaussian(rows, projection.in_features, seed=3, dtype=torch.bfloat16), index)


@pytest.mark.parametrize("recipe", [sk.FP8_BLOCK.store(sk.QFP8), sk.FP8_ROWWISE.store(sk.QNF4)], ids=lambda r: r.name)
@pytest.mark.parametrize("family", KINDS)
def test_products_over_stored_weights(recipe, family):
    experts = with_recipe(made(family, torch.bfloat16), recipe)
    for projection in experts.projections.values():
        projection.store(recipe.storage)
        assert_as_layers(
            projection, gaussian(len(UNEVEN), projection.in_features, seed=3, dtype=torch.bfloat16), UNEVEN
        )


@pytest.mark.parametrize("recipe", [sk.FP8, sk.FP8_ROWWISE, sk.FP8_BLOCK.store(sk.QFP8)], ids=lambda r: r.name)
def test_autocast_is_that_of_a_layer(recipe):
    experts = with_recipe(made("gpt_oss"), recipe)
    for projection in experts.projections.values():
        if recipe.storage is not None:
            projection.store(recipe.storage)
        assert_as_layers(projection, gaussian(len(UNEVEN), projection.in_features, seed=3), UNEVEN, autocast=True)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_adapters_under_autocast_are_cast_and_keep_their_dtype(family):
    experts, x, (index, weights) = adapted(made(family)), gaussian(12, H, seed=3), routed()
    exact = run(experts, x, index, weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert experts.projections["down_proj"](x[:, :WIDTH], Routing.of(index[:6], E)).dtype == torch.bfloat16
        ours = run(experts, x, index, weights)
    assert ours.keys() == exact.keys()
    for name, value in exact.items():
        assert ours[name].dtype == torch.float32
        assert 0 < (ours[name] - value).norm() < 0.03 * value.norm(), name


def test_the_host_asks_for_sizes_once(monkeypatch):
    experts = with_recipe(adapted(made(dtype=torch.bfloat16)), sk.FP8)
    asked = []
    real = torch.Tensor.tolist

    def asking(t: torch.Tensor) -> Any:
        asked.append(t.shape)
        return real(t)

    monkeypatch.setattr(torch.Tensor, "tolist", asking)
    run(experts, gaussian(12, H, seed=3, dtype=torch.bfloat16), *routed())
    assert asked == [(E,)]


@pytest.mark.parametrize("family", KINDS)
def test_the_whole_is_what_transformers_makes_of_such_layers(family):
    """Gate, the router's weights and the sum over two experts: bit for bit, with layers in place of theirs."""
    experts = with_recipe(made(family), sk.FP8_ROWWISE)
    up, down = (layers_of(projection) for projection in experts.projections.values())
    x, (index, weights) = gaussian(12, H, seed=3), routed()
    ours = run(experts, x, index, weights)
    x_, weights_ = x.clone().requires_grad_(), weights.clone().to(x.dtype).requires_grad_()
    gate = getattr(experts, "_apply_gate" if experts.has_gate else "act_fn")
    y = torch.zeros_like(x)
    for expert in range(E):
        token, choice = torch.where(index == expert)
        h = up[expert](x_[token])
        h = down[expert](gate(h))
        y = y.index_add(0, token, h * weights_[token, choice, None])
    y.backward(gaussian(*y.shape, seed=9))
    assert torch.equal(ours["y"], y)
    torch.testing.assert_close(ours["dx"], x_.grad)
    torch.testing.assert_close(ours["dweights"], weights_.grad)


def test_a_precision_is_for_one_weight():
    """The other one is computed as ever."""
    module, x, (index, weights) = made(dtype=torch.float64), gaussian(12, H, seed=3, dtype=torch.float64), routed()
    theirs = run(module, x, index, weights)["y"]
    _, down = projections(module)
    down.precision = Precision(sk.FP8_ROWWISE)
    ours = run(module, x, index, weights)["y"]
    assert 0 < (ours - theirs).norm() / theirs.norm() < 0.1


# -- delayed scaling


def test_an_expert_without_tokens_keeps_its_history():
    experts = with_recipe(made(dtype=torch.bfloat16), sk.FP8)
    down = experts.projections["down_proj"]
    (bank,) = banks_of(experts)
    optimizer = torch.optim.SGD(experts.parameters(), lr=0.0)
    x = gaussian(12, H, seed=3, dtype=torch.bfloat16)
    for index, times in ((torch.arange(12).remainder(E).view(12, 1), 1), (torch.full((12, 1), 3), 4)):
        for i in range(times):
            run(experts, x * (i + 2), index, torch.ones(12, 1))
            optimizer.step()
    steps = bank.cursor_S.view(2, E, 3)
    assert steps[:, 3].eq(5).all()
    assert steps[:, [0, 1, 2, 4]].eq(1).all()
    seen = bank.history_HS.view(4, 2, E, 3)
    for expert in (0, 1, 2, 4):
        rows = torch.arange(12).remainder(E) == expert
        assert seen[0, 0, expert, 0] == (x[rows] * 2).abs().max()
        assert seen[0, 1, expert, 1] == down.weight[expert].abs().max()
        assert not seen[1:, :, expert].any()
    assert bank.in_force_S[9] == x.abs().max() * 5


def test_only_training_records():
    experts = with_recipe(made(dtype=torch.bfloat16), sk.FP8)
    (bank,) = banks_of(experts)
    x, (index, weights) = gaussian(12, H, seed=3, dtype=torch.bfloat16), routed()
    with torch.no_grad():
        experts(x, index, weights)
    experts.eval()
    run(experts, x, index, weights)
    assert (bank.open_S < 0).all()
    experts.train()
    run(experts, x, index, weights)
    assert (bank.open_S > 0).any()


# -- copies and what is kept


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, copy.copy], ids=lambda f: f.__name__)
@pytest.mark.parametrize("recipe", [sk.FP8, sk.QNF4, sk.QFP8], ids=lambda r: r.name)
def test_a_copy_is_one_of_its_own(recipe, copied):
    experts = with_recipe(made("gpt_oss", torch.bfloat16), recipe)
    if recipe.storage is not None:
        for projection in experts.projections.values():
            projection.store(recipe.storage)
        adapted(experts)
    x, (index, weights) = gaussian(12, H, seed=3, dtype=torch.bfloat16), routed()
    weights = weights.bfloat16()
    run(experts, x, index, weights)
    for bank in banks_of(experts):
        bank.roll()
    twin = copied(experts)
    assert type(twin) is type(experts)
    assert twin.state_dict().keys() == experts.state_dict().keys()
    assert all(projection.module is twin for projection in twin.projections.values())
    assert all(projection.module is experts for projection in experts.projections.values())
    assert torch.equal(twin(x, index, weights), experts(x, index, weights))
    if copied is not copy.copy:  # which shares its parameters
        before = [bank.state_dict() for bank in banks_of(experts)]
        for parameter in twin.parameters():
            parameter.data.zero_()
        assert experts(x, index, weights).any()
        run(twin, x, index, weights)
        assert len(banks_of(twin)) == len(before)
        for bank in banks_of(twin):
            bank.roll()
        after = [bank.state_dict() for bank in banks_of(experts)]
        assert all(torch.equal(a[name], b[name]) for a, b in zip(before, after) for name in a if name != "open")


def test_a_model_goes_when_its_last_name_does():
    import gc
    import weakref

    experts = with_recipe(adapted(made()), sk.FP8_ROWWISE)
    held, gone = experts.projections["down_proj"], weakref.ref(experts)
    gc.disable()  # nothing goes around in a circle
    try:
        del experts
        assert gone() is None
    finally:
        gc.enable()
    with refused(ReferenceError):
        _ = held.weight


def saved_bytes(experts: Any, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> int:
    """Bytes that forward keeps for backward, apart from parameters."""
    kept = {}
    own = {p.untyped_storage().data_ptr() for p in experts.parameters()}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        experts(x, index, weights)
    return sum(kept.values())


def test_frozen_weights_keep_no_x_and_get_no_gradient():
    x, (index, weights) = gaussian(64, H, seed=3, dtype=torch.bfloat16).requires_grad_(), routed(64)
    trained, frozen = (with_recipe(made(dtype=torch.bfloat16), sk.FP8_ROWWISE) for _ in range(2))
    frozen.requires_grad_(False)
    rows = 64 * 2 * (H + WIDTH)  # codes of x, a byte each
    assert saved_bytes(trained, x, index, weights) - saved_bytes(frozen, x, index, weights) >= rows
    grads = run(frozen, x, index, weights)
    assert grads.keys() == {"y", "dx", "dweights"}


# -- adapters


def test_an_adapter_is_drawn_for_each_expert():
    up, _ = projections(module := made())
    torch.manual_seed(0)
    up.add_adapter(Lora(4, 8.0))
    assert up.has_adapter
    assert (up.lora_rank, up.lora_alpha) == (4, 8.0)
    assert up.lora_A.dtype == torch.float32
    for a_rK in up.lora_A:  # Kaiming-uniform over K, whatever the rank
        assert 0.9 * H**-0.5 < a_rK.abs().max() <= H**-0.5
    assert not torch.equal(up.lora_A[0], up.lora_A[1])
    first = up.lora_A.detach().clone()
    torch.manual_seed(0)
    up.add_adapter(Lora(4, 8.0))
    assert torch.equal(up.lora_A, first)
    assert not up.lora_B.any()
    assert all(
        any(part.startswith("lora_") for part in n.split(".")) for n, _ in module.named_parameters() if "lora" in n
    )
    assert module.state_dict().keys() == {*made().state_dict(), "lora_A.gate_up_proj", "lora_B.gate_up_proj"}
    up.remove_adapter()
    assert not up.has_adapter
    assert module.state_dict().keys() == made().state_dict().keys()


@pytest.mark.parametrize("storage", [None, "qfp8", "qnf4"])
@pytest.mark.parametrize("family", ["mixtral", "aria"])
def test_adapters_merge_and_come_out_again(family, storage):
    module, x, (index, weights) = made(family), gaussian(12, H, seed=3), routed()
    for projection in projections(module):
        if storage:
            projection.store(STORAGES[storage])
    experts = adapted(module)
    for projection in projections(module):
        projection.lora_A.data, projection.lora_B.data = projection.lora_A.float(), projection.lora_B.float()
    with torch.no_grad():
        before = experts(x, index, weights)
        state = {name: t.clone() for name, t in experts.state_dict().items()}
        for requantize in (False, True) if storage else (False,):
            for projection in projections(module):
                projection.merge_adapter(requantize)
                assert projection.can_unmerge
                assert (projection.storage is not None) == requantize
            assert not any("lora" in name for name in experts.state_dict())
            after = experts(x, index, weights)
            assert (after - before).norm() < (0.2 if requantize else 1e-5) * before.norm()
            for projection in projections(module):
                projection.unmerge_adapter()
            assert experts.state_dict().keys() == state.keys()
            for name, t in experts.state_dict().items():
                assert torch.equal(t.view(torch.uint8), state[name].view(torch.uint8)), name


def test_what_was_not_merged_does_not_come_out():
    experts = adapted(made())
    down = experts.projections["down_proj"]
    with refused(ValueError):
        down.unmerge_adapter()
    down.merge_adapter()
    down.add_adapter(Lora(2, 2.0))
    with refused(ValueError):
        down.unmerge_adapter()


def test_one_expert_of_what_is_not_stored():
    up, _ = projections(module := made())
    assert up.stored is None
    with refused(ValueError):
        up.stored_of(0)
    assert str(module).count("experts=5") == 2


# -- in a model


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute"
)  # torch's compiler looks at it, after a call that it does not trace
def test_torch_compile_calls_them_and_gets_the_same():
    experts = with_recipe(adapted(made(dtype=torch.bfloat16)), sk.FP8_ROWWISE)
    plain = made(dtype=torch.bfloat16)
    x, (index, weights) = gaussian(12, H, seed=3, dtype=torch.bfloat16), routed()
    for module in (experts, adopt_experts(plain)):
        expected = run(module, x, index, weights)
        compiled = torch.compile(lambda *args, m=module: m(*args) * 1.0, backend="eager")
        y = compiled(x, index, weights.to(x.dtype))
        assert torch.equal(y, expected["y"])
        module.zero_grad()
        y.backward(gaussian(*y.shape, seed=9, dtype=y.dtype))
        assert all(p.grad is not None and torch.equal(p.grad, expected[n]) for n, p in module.named_parameters())


@pytest.mark.parametrize("recipe", [sk.FP8, sk.QFP8], ids=lambda r: r.name)
def test_a_model_of_transformers_trains_with_them(recipe):
    from torch.utils.checkpoint import checkpoint
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=32,
        hidden_size=H,
        intermediate_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
    )
    torch.manual_seed(0)
    model: Any = MixtralForCausalLM(config)
    ids = torch.arange(32).view(2, 16)
    before = model(input_ids=ids, labels=ids).loss
    found = [module for module in model.modules() if is_experts(module)]
    assert len(found) == 2
    for module in found:
        with_recipe(module, recipe)
        if recipe.storage is not None:
            model.requires_grad_(False)
            for projection in projections(module):
                projection.store(recipe.storage)
                projection.add_adapter(recipe.adapter, torch.float32)
    after = model(input_ids=ids, labels=ids).loss
    assert abs(after - before) < 0.01
    assert len(banks_of(model)) == (2 if recipe is sk.FP8 else 0)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(8):
        loss = checkpoint(lambda: model(input_ids=ids, labels=ids).loss, use_reentrant=False)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < after - 0.1
    assert all(bank.cursor == 8 for bank in banks_of(model))
