"""What is measured on a GPU, and the bars: complete, consistent, and named so that nothing is taken for something else."""

import dataclasses
import json

import pytest

from surokit.bench.configurations import FUSIONS, MODELS, PARTS, BenchWork, Configuration, target_of
from surokit.bench.targets import LEAST_OF_BF16, OVER_UNSLOTH, TARGETS
from surokit.fusion import Fusion
from surokit.recipe import find_recipe

CONFIGURATIONS = [c for part in PARTS.values() for c in part.configurations()]


@pytest.mark.parametrize("model", MODELS)
def test_models_have_qwen3s_number_of_parameters(model):
    shape = MODELS[model]
    heads, keys = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
    block = shape["width"] * (2 * heads + 2 * keys + 3 * shape["ffn"] + 2) + 2 * shape["head_dim"]
    embeddings = shape["vocab"] * shape["width"] * (1 if shape["tied"] else 2)
    count = shape["layers"] * block + embeddings + shape["width"]
    # as their model cards round them
    known = {"0.6b": 0.6e9, "1.7b": 1.7e9, "4b": 4.0e9, "8b": 8.2e9}
    assert count == pytest.approx(known[model], rel=0.02)


def test_every_target_is_measured_and_every_measured_recipe_is_known():
    measured = {(c.model, c.train, c.recipe) for c in CONFIGURATIONS if not c.changes and not c.peer}
    assert {(t.model, t.train, t.recipe) for t in TARGETS} == measured
    for c in CONFIGURATIONS:
        find_recipe(c.recipe)
        assert c.model in MODELS


def test_the_part_that_has_to_be_known_comes_first():
    assert list(PARTS)[:2] == ["smoke", "must"]
    first = [c.name for c in PARTS["must"].configurations()]
    systems = ("bf16", "fp8", "qfp8", "unsloth bf16")
    assert first == [f"{model} lora {system}" for model in ("0.6b", "8b") for system in systems]
    assert str(BenchWork()) == "2 x 2048 x 4"


def test_each_technique_is_switched_off_in_turn():
    names = {c.changes for c in PARTS["techniques"].configurations()}
    for name in FUSIONS:
        assert (f"without {name}",) in names
    wanted = {
        "eager",
        "torch.compile",
        "without prefetch",
        "flash attention",
        "frozen=transposed",
        "dx summed fast",
        "recompute=selective",
    }
    assert wanted <= {change for changes in names for change in changes}
    # without() knows them all, and nothing else can be switched off
    plain = Fusion().without(*FUSIONS)
    assert {f.name for f in dataclasses.fields(plain)} == {*FUSIONS, "frozen", "recompute"}
    assert not any(getattr(plain, name) for name in FUSIONS)


def test_names_tell_configurations_apart():
    for part in PARTS.values():
        for group in part.groups:
            assert len({c.system for c in group.configurations}) == len(group.configurations)
            assert not group.configurations[0].peer
    different = {c.name: c for c in CONFIGURATIONS}
    assert all(different[c.name] == c for c in CONFIGURATIONS)
    assert Configuration("8b", without=FUSIONS, graphs=False).name == "8b lora bf16, nothing fused, eager"


@pytest.mark.parametrize(
    "c", [*CONFIGURATIONS[::5], Configuration("4b", without=("gate", "qk"), optimizer="adamw8bit")]
)
def test_a_configuration_survives_json(c):
    assert Configuration.from_dict(json.loads(json.dumps(c.to_dict()))) == c


def test_what_is_checked_before_speed():
    c = Configuration("0.6b", "fp8")
    assert c.fused
    assert not c.but(without=FUSIONS).fused
    assert not c.but(compile=True).fused
    assert c.but(without=FUSIONS[1:]).fused


def bars(configuration, own_bf16=None):
    target = target_of(configuration)
    assert target is not None
    return target.bars(own_bf16)


def test_a_target_holds_for_the_plain_configuration_alone():
    c = Configuration("0.6b", "qfp8")
    assert bars(c, 100e3) == (90e3, 90e3, 125e3)
    assert bars(c) == (None, 90e3, 125e3)
    assert bars(Configuration("8b", "qnf4"), 10e3) == (5e3, 8e3, 10e3)
    assert bars(Configuration("8b", "fp8", "full")) == (9.5e3, 14e3, 17e3)
    assert target_of(c.but(graphs=False)) is None
    assert target_of(Configuration("0.6b", "bf16", peer="unsloth")) is None


def test_bars_rise():
    for target in TARGETS:
        three = [bar or 0.0 for bar in target.bars(50e3)]
        assert 0 < three[0] <= three[1] <= three[2]
        assert len(target.words()) == 3
    assert all(bar < goal for bar, goal in OVER_UNSLOTH.values())
    assert LEAST_OF_BF16 == {"qfp8": 0.9}
