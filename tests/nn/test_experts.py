"""The experts of transformers' models under recipes, stored and with adapters: as their own forward, and as layers of their own."""

import copy
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import surokit as sk
from surokit.nn import experts as module_of_experts
from surokit.nn.experts import Experts, Routing, adopt_experts, is_experts, unsupported
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


def adapted(module: Any, zero: bool = False, rank: int = 4) -> Experts:
    experts = adopt_experts(module)
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
    monkeypatch.setattr(module_of_experts, "_has_grouped_product", lambda device: True)
    monkeypatch.setattr(module_of_experts._ExpertByExpert, "apply", None)
    monkeypatch.setattr(Routing, "rows", property(lambda _: pytest.fail("the host asks for sizes")))
    at_once = run(experts, x, index, weights)
    assert at_once.keys() == one_by_one.keys()
    for name, expected in one_by_one.items():
        torch.testing.assert_close(at_once[name], expected, rtol=2e-2, atol=2e-2, msg=lambda m: f"{name}: {m}")  # noqa: B023
    assert not at_once["dx"][1].any()  # no expert has it


def test_a_gradient_that_repeats_one_number(monkeypatch):
    monkeypatch.setattr(module_of_experts, "_has_grouped_product", lambda device: True)
    module = made(dtype=torch.bfloat16)
    up, _ = projections(module)
    x = gaussian(12, H, seed=3, dtype=torch.bfloat16).requires_grad_()
    up(x, Routing.of(torch.arange(12).remainder(E).view(12, 1), E)).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_odd_sizes_go_one_by_one(monkeypatch):
    monkeypatch.setattr(module_of_experts, "_has_grouped_product", lambda device: True)
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
