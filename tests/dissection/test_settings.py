"""Which cells a grid has, and which settings contradict each other."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

import surokit as sk
from surokit.dissection.settings import BASELINE, TOGETHER, Setting, grid
from tests.refusals import refused

BASE = Setting(batch=2, length=32)
OVER: dict[str, Any] = {
    "attention": ("math", "flash"),
    "recompute": ("none", "full"),
    "recipe": ("bf16", "fp8", sk.FP4),
}


def names(over, **options):
    return [asked.name for asked in grid(over, "train", BASE, **options)]


def test_each_switch_alone_then_all_together():
    found = grid(OVER, "train", BASE)
    assert [asked.name for asked in found] == [
        BASELINE,
        "attention=flash",
        "recompute=full",
        "recipe=fp8",
        "recipe=fp4",
        TOGETHER,
    ]
    by_name = {asked.name: asked.setting for asked in found}
    base = replace(BASE, attention="math")
    assert by_name[BASELINE] == base
    assert by_name["recipe=fp8"] == replace(base, recipe="fp8")
    assert by_name[TOGETHER] == replace(base, attention="flash", recompute="full", recipe=sk.FP4)


def test_together_may_be_left_out_or_every_combination():
    assert TOGETHER not in names(OVER, together=False)
    found = names({"attention": ("math", "flash"), "recompute": ("none", "full")}, together="all")
    assert found == [BASELINE, "attention=flash", "recompute=full", "attention=flash, recompute=full"]
    assert names({"recompute": "full"}) == [BASELINE, "recompute=full"]  # one switch is together with none


def test_a_value_alone_is_set_against_the_default():
    found = grid({"optimizer": "adamw8bit"}, "train", BASE)
    assert [asked.setting.optimizer for asked in found] == ["adamw", "adamw8bit"]


def test_specifications_of_optimizers_are_values():
    first, muon = sk.AdamW(lr=1e-3), sk.Muon(lr=1e-3)
    found = grid({"optimizer": (first, muon, sk.Muon(lr=2e-3), sk.Muon(lr=1e-3))}, "train", BASE)
    assert [(asked.name, asked.setting.optimizer) for asked in found] == [
        (BASELINE, first),
        ("optimizer=Muon(lr=0.001)", muon),
        ("optimizer=Muon(lr=0.002)", sk.Muon(lr=2e-3)),
    ]
    assert names({"optimizer": muon}) == [BASELINE, "optimizer=Muon(lr=0.001)"]
    assert names({"optimizer": ("adamw", muon), "recompute": "full"})[-1] == TOGETHER
    assert names({"optimizer": "muon"}) == [BASELINE, "optimizer=muon"]


def test_amounts_of_work_cross_with_every_switch():
    found = names({"batch": (1, 4), "length": (32, 350), "fusion": ("none", "fused")})
    assert found == [
        *(BASELINE, "fusion=fused"),
        *("length=350", "length=350, fusion=fused"),
        *("batch=4", "batch=4, fusion=fused"),
        *("batch=4, length=350", "batch=4, length=350, fusion=fused"),
    ]


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("train", {"lora": 8}),
        ("train", {"recipe": "qnf4"}),
        ("tune", {"recipe": "qfp8"}),
        ("train", {"offload_weights": True, "recompute": "full"}),
        ("train", {"offload_activations": True, "recompute": "full"}),
        ("train", {"offload_weights": True, "gpus": 2}),
        ("train", {"offload_activations": True, "gpus": 3}),
        ("train", {"zero": 2}),
        ("train", {"offload_activations": True, "compile": True}),
        ("train", {"recompute": "selective"}),
        ("train", {"zero": 2, "gpus": 2, "compile": True}),
        ("train", {"optimizer": "zenflow", "compile": True}),
        ("infer", {"optimizer": "sgd"}),
        ("infer", {"engine": "trainer"}),
        ("train", {"engine": "trainer", "fusion": "fused"}),
        ("train", {"engine": "transformers", "recipe": "fp8"}),
        ("train", {"engine": "transformers", "gpus": 2}),
        ("train", {"engine": "trainer", "optimizer": "adamw8bit"}),
        ("train", {"engine": "deepspeed", "recipe": "fp8"}),
        ("train", {"engine": "deepspeed", "compile": True}),
        ("train", {"engine": "deepspeed", "optimizer": "adamw8bit"}),
        ("train", {"engine": "deepspeed", "batch": "largest"}),
        ("train", {"engine": "deepspeed", "optimizer": "zenflow", "zero": 3}),
        ("train", {"engine": "deepspeed", "optimizer": "zenflow", "accumulate": 2}),
        ("infer", {"lora": 4, "recipe": "qfp8"}),
    ],
    ids=str,
)
def test_contradictions_name_both_settings(what, changes):
    with refused(ValueError):
        replace(BASE, **changes).check(what)


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("tune", {"recipe": "qnf4", "lora": 8}),
        ("tune", {"engine": "transformers", "recipe": "qnf4", "lora": 8, "recompute": "full"}),
        ("train", {"zero": 3, "gpus": 2}),
        (
            "tune",
            {"engine": "deepspeed", "lora": 8, "gpus": 2, "zero": 3, "optimizer": "offloadadamw", "recompute": "full"},
        ),
        ("train", {"recompute": "selective", "fusion": "fused"}),
        ("train", {"offload_weights": True, "offload_activations": True}),
        ("infer", {"recipe": "qnf4", "attention": "math", "offload_weights": True}),
    ],
    ids=str,
)
def test_what_goes_together_is_let_through(what, changes):
    replace(BASE, **changes).check(what)


def test_a_contradiction_of_all_together_is_a_cell_with_its_reason():
    found = grid({"recompute": ("none", "full"), "offload_activations": (False, True)}, "train", BASE)
    (together,) = [asked for asked in found if asked.name == TOGETHER]
    assert together.refused.startswith("offload_activations=True and recompute=full contradict each other")
    assert not any(asked.refused for asked in found if asked is not together)


@pytest.mark.parametrize(
    "over",
    [
        {"flash": True},
        {"attention": "fast"},
        {"recompute": ("none", "some")},
        {"optimizer": "lion"},
        {"optimizer": torch.optim.SGD},
        {"optimizer": sk.AdamW},
        {"engine": "megatron"},
        {"batch": 0},
        {"batch": "all"},
        {"batch": True},
        {"length": 2.5},
        {"compile": "yes"},
        {"lora": -1},
        {"zero": 1},
        {"fusion": "all"},
        {"recompute": ()},
    ],
    ids=str,
)
def test_switches_and_values_that_are_not_known(over):
    with refused(ValueError):
        grid(over, "train", BASE)


def test_a_recipe_that_is_not_known():
    with pytest.raises(ValueError, match="fp9"):
        grid({"recipe": "fp9"}, "train", BASE)


def test_labels_are_plain_values():
    labels = replace(BASE, recipe=sk.FP8, optimizer=sk.AdamW(lr=1e-3), fusion=sk.Fusion()).labels()
    assert set(labels) == {field.name for field in fields(Setting)}
    assert labels["recipe"] == "fp8"
    assert labels["optimizer"] == "AdamW(lr=0.001)"
    assert all(isinstance(value, bool | int | str) for value in labels.values())


def test_gpus_are_an_amount_of_work():
    found = grid({"gpus": (2, 4), "zero": (0, 3)}, "train", BASE)
    assert [(a.name, a.setting.gpus, a.setting.zero) for a in found] == [
        *((BASELINE, 2, 0), ("zero=3", 2, 3)),
        *(("gpus=4", 4, 0), ("gpus=4, zero=3", 4, 3)),
    ]


def test_recipes_of_one_name_are_told_apart():
    over = {"recipe": (sk.QFP8, sk.QFP8.decode_once(False))}
    found = [asked.name for asked in grid(over, "infer", BASE)]
    assert found == [BASELINE, "recipe=qfp8 (keeps_decoded=False)"]
    mine = replace(sk.FP8, name="mine")
    with refused(ValueError):
        grid({"recipe": (mine, mine.keep("layers.0.*"))}, "train", BASE)


def test_recipe_and_fusion_of_a_setting():
    assert replace(BASE, recipe="qfp8", lora=4).full_recipe == sk.QFP8.lora(rank=4)
    assert replace(BASE, recompute="full").full_fusion == replace(sk.Fusion.OFF, recompute="full")
    assert replace(BASE, fusion="fused", recompute="selective").full_fusion == sk.Fusion(recompute="selective")
    assert replace(BASE, fusion=sk.Fusion().without("joint")).full_fusion == sk.Fusion().without("joint")
