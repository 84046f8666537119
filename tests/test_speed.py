"""The planned speed in a report: its parts, its verdict, and that what it advises helps."""

import pytest
import torch
from torch import nn

import surokit as sk
from surokit.hardware.gpus import Gpu, find_gpu
from surokit.hardware.linear import linear_kernels, linear_times
from surokit.hardware.rates import GAP_US
from surokit.nn.experts import Experts
from tests.refusals import refused
from tests.test_experts import made

H100 = find_gpu("H100")


def net(*shapes):
    with torch.device("meta"):
        return nn.ModuleDict({f"layer{i}": nn.Linear(k, n, bias=False) for i, (n, k) in enumerate(shapes)})


def test_times_are_those_of_the_kernels():
    for recipe, stored in ((sk.BF16, False), (sk.FP8, False), (sk.MXFP8, False), (sk.QNF4, True)):
        times = linear_times(recipe, 4096, 1024, 2048, trains=not stored, gpu=H100, stored=stored)
        kernels = list(linear_kernels(recipe, 4096, 1024, 2048, trains=not stored, gpu=H100, stored=stored))
        parts = {kernel.part for kernel in kernels} & times.keys()
        assert {part for part, seconds in times.items() if seconds} == parts | {
            "quantize" for kernel in kernels if kernel.part in ("quantize", "turn", "decode")
        }
        launches = sum(kernel.launches for kernel in kernels)
        without = linear_times(recipe, 4096, 1024, 2048, trains=not stored, gpu=H100, stored=stored, gap_us=0.0)
        assert sum(times.values()) == pytest.approx(sum(without.values()) + launches * GAP_US * 1e-6)


def test_the_report_has_the_verdict_and_a_row_a_layer():
    report = sk.apply(net((8192, 8192), (8192, 4096)), sk.FP8, gpu="H100", tokens=4096)
    assert report.speed is not None
    frame = report.speed.frame().set_index("layer")
    parts = ["forward_ms", "grad_input_ms", "grad_weight_ms", "quantize_ms"]
    assert list(frame.columns) == ["tokens", "K", "N", *parts, "ms", "bf16_ms", "speed"]
    assert frame["ms"].tolist() == pytest.approx(frame[parts].sum(axis=1).tolist())
    assert frame["speed"].tolist() == pytest.approx((frame["bf16_ms"] / frame["ms"]).tolist())
    assert frame.loc["layer1", "K"] == 4096
    assert report.speed.speed == pytest.approx(frame["bf16_ms"].sum() / frame["ms"].sum())
    assert report.speed.verdict in repr(report)
    assert report.speed.verdict in report._repr_html_().replace("&quot;", '"')
    assert repr(report.speed) == report.speed.verdict


@pytest.mark.parametrize(
    "shapes",
    [
        ((8192, 8192), (8192, 256), (256, 8192)),  # small layers lose, which a number of features tells apart
        ((8192, 8192), (512, 512), (65536, 480)),  # which no number of features does
    ],
)
def test_what_the_verdict_advises_leaves_no_layer_slower(shapes):
    report = sk.apply(net(*shapes), sk.FP8, gpu="H100", tokens=4096)
    assert report.speed is not None
    assert 0 < len(report.speed.slower) < len(shapes)
    advice = report.speed.verdict.rpartition(": ")[2].removesuffix(" keeps them in bf16")
    better = sk.apply(net(*shapes), eval(advice, {"recipe": sk.FP8}), gpu="H100", tokens=4096)
    assert better.speed is not None
    assert not better.speed.slower
    assert better.converted == report.converted - len(report.speed.slower)


def test_a_recipe_that_a_gpu_emulates_is_slower_everywhere():
    report = sk.apply(net((8192, 8192), (4096, 8192)), sk.MXFP8, gpu="H100", tokens=4096)
    assert report.speed is not None
    assert report.speed.speed < 1
    assert report.speed.verdict.endswith("all lose: this recipe saves no time here")


def test_a_stored_weight_is_decoded_in_the_plan_unless_codes_are_multiplied():
    """QFP8 has products of its own where a GPU computes them."""
    speeds = {}
    for gpu in ("A100", "H100"):
        report = sk.apply(net((8192, 8192)), sk.QFP8.lora(targets=("layer0",)), gpu=gpu, tokens=4096)
        assert report.speed is not None
        speeds[gpu] = report.speed.speed
    assert speeds["A100"] < 1 < speeds["H100"]


def test_experts_share_the_tokens():
    model = made("Mixtral")
    report = sk.apply(model, sk.FP8, gpu="H100", tokens=1000)
    assert report.speed is not None
    rows = {row.layer: row for row in report.speed.rows}
    row = rows["model.layers.0.mlp.experts.down_proj"]
    assert row.tokens == 1000 * 2 / 4
    one = linear_times(sk.FP8, *row.shape_NK, 500, trains=True, gpu=H100)
    assert row.seconds == pytest.approx(4 * sum(one.values()))
    for module in model.modules():
        if isinstance(module, Experts):
            vars(module)["config"] = None
    again = sk.apply(model, sk.FP8, gpu="H100", tokens=1000)
    assert again.speed is not None
    assert len(again.speed.left_out) == 4
    assert "4 weights of experts" in again.speed.verdict


def test_without_a_gpu_nothing_is_planned(tiny):
    assert sk.apply(tiny, sk.FP8).speed is None
    assert sk.apply(tiny, sk.BF16, gpu="H100").speed is None


@pytest.mark.parametrize("gpu", ["H1000", Gpu("mine")])
def test_an_unknown_gpu_changes_nothing(tiny, gpu):
    with refused(ValueError):
        sk.apply(tiny, sk.FP8, gpu=gpu)
    assert type(tiny.lm_head) is nn.Linear


@pytest.mark.parametrize("tokens", [0, 2.5, "many"])
def test_tokens_are_a_whole_number(tiny, tokens):
    with refused((ValueError, TypeError)):
        sk.apply(tiny, sk.FP8, gpu="H100", tokens=tokens)
    assert type(tiny.lm_head) is nn.Linear
