"""Models that are divided over GPUs, tensor, pipeline and expert parallel: what one GPU holds, computes, sends, and waits for."""

from dataclasses import replace
from typing import Any

import pytest

import surokit as sk
from surokit.planner.counts.division import WHOLE, Division
from surokit.planner.counts.flops import count_flops
from surokit.planner.inputs.configs import read_shape
from tests.planner.families import fields
from tests.refusals import refused

EXPERTS = "qwen3-30b-a3b"
DENSE: dict[str, Any] = {"what": "llama-3-8b", "gpu": "H100", "batch": 1, "length": 4096, "layers": "transformers"}


def planned(**given: Any) -> Any:
    return sk.plan(**{**DENSE, **given})


def gib(plan: Any, *names: str) -> float:
    """The GiB of these terms at their own fullest."""
    return sum(term.most_gib for term in plan.memory.terms if term.name in names)


# -- what a GPU holds and computes


@pytest.mark.parametrize("what", ["llama-3-8b", "qwen3-8b", EXPERTS, fields("gpt2"), fields("phi3")], ids=str)
def test_parts_of_a_layer_make_the_whole(what):
    shape, _ = read_shape(what)
    t = 2
    part = Division(tensor=t).narrow(shape)
    whole, one = (count_flops(s, length=512) for s in (shape, part))
    kept = {p.module: p.forward for p in whole.products if p.module.endswith((".gate", "router"))}  # on every GPU
    again = sum(p.forward for p in one.products if p.module in kept)
    assert t * (one.forward - again) + sum(kept.values()) == pytest.approx(whole.forward, rel=1e-3)
    twice = sum(w.parameters for w in shape.projections if w.name.endswith((".gate", "router")))  # and norms, positions
    twice += shape.small_parameters + shape.positions * shape.width
    assert shape.parameters <= t * part.parameters <= shape.parameters + (t - 1) * twice


def test_stages_of_a_pipeline_make_the_whole():
    shape, _ = read_shape("llama-3-8b")
    first, last = Division(pipeline=2).stages(shape)
    assert (first.has_embedding, first.has_head) == (True, False)
    assert (last.has_embedding, last.has_head) == (False, True)
    assert first.parameters + last.parameters == shape.parameters + shape.width  # both count a last norm
    flops = [count_flops(stage, length=512).forward for stage in (first, last)]
    assert sum(flops) == count_flops(shape, length=512).forward
    assert Division().stages(shape) == (shape,)
    tied, _ = read_shape("qwen3-0.6b")
    assert all(stage.matrices_of_words == 1 for stage in Division(pipeline=2).stages(tied))


def test_stages_keep_the_pattern_of_their_layers():
    shape, _ = read_shape(fields("deepseek_v2", num_hidden_layers=9, first_k_dense_replace=1))
    first, last = Division(pipeline=3).stages(shape)
    assert first.expert_layers == (1, 2)
    assert last.expert_layers == (0, 1, 2)
    windows, _ = read_shape(fields("gemma2", num_hidden_layers=6))
    stage = Division(pipeline=2).stages(windows)[-1]
    assert [stage.window_of(i) for i in range(3)] == [windows.window_of(i) for i in range(3, 6)]


def test_a_gpu_has_its_part_of_the_experts():
    shape, _ = read_shape(EXPERTS)
    part = Division(expert=8).stages(shape)[0]
    assert part.experts is not None
    assert (part.experts.here, part.experts.count) == (16, 128)
    apart = shape.parameters - sum(w.parameters for w in shape.projections if w.kind == "expert") * 7 / 8
    assert part.parameters == apart
    # a token passes as many, wherever they are
    assert count_flops(part, length=512).forward == count_flops(shape, length=512).forward


# -- memory


def test_tensor_parallel_gpus_share_weights_states_and_activations():
    whole, shared = planned(), planned(gpus=4, tensor_parallel=4)
    for name in ("weights", "gradients", "optimizer", "activations"):
        assert gib(shared, name) == pytest.approx(gib(whole, name) / 4, rel=0.01), name
    assert gib(shared, "gathered tokens") == 2 * 4096 * 4096 * 2 / 2**30


def test_the_first_stage_keeps_micro_batches_in_flight():
    one = planned(gpus=4, pipeline_parallel=4, accumulate=1, logits="fused")
    many = planned(gpus=4, pipeline_parallel=4, accumulate=16, logits="fused")
    kept = gib(many, "activations")
    assert gib(many, "activations in flight") == pytest.approx(3 * kept)
    assert gib(one, "activations in flight") == 0
    assert gib(planned(gpus=4, pipeline_parallel=4, accumulate=2), "activations in flight") == pytest.approx(kept)
    turns = planned(gpus=4, pipeline_parallel=4, accumulate=16, virtual_stages=2, logits="fused")
    assert gib(turns, "activations in flight") == pytest.approx((3 + 3 / 2) * kept)
    # the last stage, with whole logits of a large vocabulary, may be the fullest
    assert "activations in flight" not in [t.name for t in planned(gpus=2, pipeline_parallel=2, batch=8).memory.terms]


def test_zero_shards_what_experts_leave():
    """An expert's states are sharded over the GPUs that have it: over all GPUs, nothing of an expert's is held twice."""
    given: dict[str, Any] = {"gpus": 8, "gpu": "H200", "batch": 1, "length": 2048}
    apart = sk.plan(EXPERTS, expert_parallel=8, zero=1, **given)
    together = sk.plan(EXPERTS, zero=1, **given)
    assert gib(apart, "optimizer") == pytest.approx(gib(together, "optimizer"))
    assert gib(apart, "weights") < gib(together, "weights") / 5
    half = sk.plan(EXPERTS, expert_parallel=4, zero=1, **given)
    assert gib(half, "optimizer") == pytest.approx(gib(together, "optimizer"))


# -- time


def test_a_pipeline_fills_and_empties():
    fill = {m: planned(gpus=4, pipeline_parallel=4, accumulate=m).estimate.fill for m in (1, 4, 32)}
    assert fill == {1: 4.0, 4: 1.75, 32: 1 + 3 / 32}
    e = planned(gpus=4, pipeline_parallel=4, accumulate=8).estimate
    updates = e.by_pass()["optimizer"]
    assert e.bubble_ms == pytest.approx(3 / 8 * (e.device_ms + e.gaps_ms - updates))
    assert sum(e.by_bound().values()) == pytest.approx(e.step_ms)
    assert "bubble" in str(planned(gpus=4, pipeline_parallel=4, accumulate=8))
    assert planned(gpus=4, pipeline_parallel=4, accumulate=8, virtual_stages=4).estimate.fill == 1 + 3 / 32
    likely = {m: planned(gpus=4, pipeline_parallel=4, accumulate=m).likely for m in (1, 32)}
    assert likely[1].step_ms * 32 > 2.5 * likely[32].step_ms


def test_a_step_has_the_tokens_of_its_replicas():
    p = planned(gpus=8, tensor_parallel=2, pipeline_parallel=2, accumulate=4)
    assert p.setup.replicas == 2
    assert p.flops_per_step == p.flops_per_token * 2 * 4 * 4096
    assert p.estimate.tokens == 2 * 4 * 4096
    assert p.estimate.model_flop == pytest.approx(p.flops_per_step / 8)
    assert "2 x" not in p.title
    assert "1 x 4096 x 4 tokens a step and replica" in p.title


def test_a_divided_step_takes_its_share_of_the_products():
    whole, shared = planned(), planned(gpus=2, tensor_parallel=2)
    flop = [sum(row.flop for row in p.estimate.rows) for p in (whole, shared)]
    assert flop[1] == pytest.approx(flop[0] / 2, rel=1e-3)
    norms = [sum(row.bytes for row in p.estimate.rows if row.module == "norm") for p in (whole, shared)]
    assert norms[1] == norms[0] / 2
    assert shared.likely.step_ms < whole.likely.step_ms < 2 * shared.likely.step_ms
    assert shared.estimate.speed_of_light < 1


def test_what_gpus_send_each_other_between_layers():
    shape, _ = read_shape("llama-3-8b")
    links: dict[str, Any] = {"peer_gb_s": 450.0, "between_gb_s": 50.0, "gpus_a_node": 8}
    row = 4096 * shape.width * 2  # bytes of 4,096 tokens
    t = Division(tensor=4).exchange(shape, 4096, 2, gpus=4, again=False, weight_gradients=True, **links)
    # 32 layers x (4 + 4 + 2), and the head's input: in forward, and twice in backward
    assert t.bytes == 3 / 4 * row * (32 * 10 + 3)
    assert t.forward_ms == pytest.approx(3 / 4 * row * (32 * 4 + 1) / 450e6)
    frozen = Division(tensor=4).exchange(shape, 4096, 2, gpus=4, again=True, weight_gradients=False, **links)
    assert frozen.bytes == 3 / 4 * row * (32 * 12 + 2)
    p = Division(pipeline=4).exchange(shape, 4096, 2, gpus=16, again=False, weight_gradients=True, **links)
    assert (p.bytes, p.forward_ms) == (2 * row, row / 50e6)  # over two nodes
    experts, _ = read_shape(EXPERTS)
    e = Division(expert=8).exchange(experts, 4096, 2, gpus=8, again=False, weight_gradients=True, **links)
    assert e.bytes == 7 / 8 * 4096 * experts.width * 2 * 8 * 48 * 4
    assert WHOLE.exchange(shape, 4096, 2, gpus=8, again=False, weight_gradients=True, **links).bytes == 0


def test_experts_gradients_are_summed_over_fewer_gpus():
    shape, _ = read_shape(EXPERTS)
    part = Division(expert=8).stages(shape)[0]
    share = sum(w.parameters for w in part.projections if w.kind == "expert") / part.parameters
    assert Division(expert=8).shared(part, 8) == pytest.approx(1 - share)  # each expert is on one GPU
    assert Division(expert=4).shared(part, 8) == pytest.approx(1 - share * (1 - (1 / 2) / (7 / 8)))
    assert WHOLE.shared(shape, 8) == 1


def test_links_that_are_not_known_are_said():
    sent = planned(gpu="RTX-4090", gpus=2, tensor_parallel=2).estimate.communication
    assert sent.ms is None
    assert "give Gpu(peer_gb_s=)" in sent.how
    far = planned(gpus=16, tensor_parallel=16).estimate.communication
    assert "give between_gb_s=" in far.how
    assert "without communication" in planned(gpus=16, tensor_parallel=16).likely.how


def test_likely_times_of_experts_say_how_unsure_they_are():
    given: dict[str, Any] = {"gpu": "B200", "gpus": 8, "batch": 4, "length": 4096, "accumulate": 16}
    p: Any = sk.plan(EXPERTS, expert_parallel=8, zero=1, recipe="mxfp8", engine="fused", **given)
    dense: Any = sk.plan("qwen3-8b", zero=1, engine="fused", **given)
    assert p.likely.spread[1] > 1.5 * dense.likely.spread[1]
    # 9.7 s were published with 26.04, and others half or twice that
    assert p.likely.step_ms == pytest.approx(9700, rel=0.25)
    assert p.estimate.by_group()["routing"] > 0
    assert dense.estimate.by_group()["routing"] == 0


def test_other_engines_quantize_a_weight_once_a_step():
    """Transformer Engine keeps the codes until the weight is updated; ours are made for each micro-batch."""

    def quantized(accumulate: int, **given: Any) -> float:
        e = planned(recipe="fp8", accumulate=accumulate, **given).estimate
        return float(sum(row.bytes for row in e.rows if row.part == "quantize"))

    assert quantized(8, engine="fused") < 8 * quantized(1, engine="fused")
    assert quantized(8, engine="eager") == pytest.approx(8 * quantized(1, engine="eager"))


# -- asked backwards, and refused


def test_questions_keep_the_division():
    p = planned(gpus=4, tensor_parallel=4, tokens=1e9)
    assert p.gpus_for(gib=24) % 4 == 0
    assert p.largest("batch") > planned().but(gpu="H200").largest("batch")
    fitting = planned(gpus=4, tensor_parallel=2, batch=16).fitting()
    assert fitting.ways
    assert all("offload" not in way.how for way in fitting.ways)
    assert p.recipes(["bf16", "fp8"]).speedup.iloc[-1] > 1


@pytest.mark.parametrize(
    "given",
    [
        {"what": 8e9, "gpus": 2, "tensor_parallel": 2, "layers": None},
        {"tensor_parallel": 2},
        {"gpus": 6, "tensor_parallel": 4},
        {"gpus": 24, "tensor_parallel": 3},
        {"gpus": 64, "pipeline_parallel": 64},
        {"gpus": 4, "pipeline_parallel": 4, "virtual_stages": 16},
        {"gpus": 4, "virtual_stages": 2},
        {"gpus": 4, "expert_parallel": 4},
        {"what": EXPERTS, "gpus": 3, "expert_parallel": 3},
        {"what": EXPERTS, "gpus": 4, "expert_parallel": 8},
        {"gpus": 2, "tensor_parallel": 2, "training": False},
        {"gpus": 2, "tensor_parallel": 2, "fusion": "fused", "layers": "surokit"},
        {"gpus": 2, "tensor_parallel": 2, "offload_activations": True},
        {"gpus": 2, "pipeline_parallel": 2, "optimizer": "zenflow"},
        {"gpus": 2, "tensor_parallel": 0},
        {"gpus": 2, "tensor_parallel": 1.5},
    ],
    ids=str,
)
def test_what_cannot_be_divided_is_refused(given):
    with refused((ValueError, TypeError)):
        planned(**given)


# -- what is computed again, and what the GPU reads from its host


def test_some_blocks_are_computed_again():
    none, some, every = (
        planned(recompute=how, recompute_blocks=blocks) for how, blocks in ((None, None), ("full", 8), ("full", None))
    )
    assert some.compute.recompute == every.compute.recompute // 4
    assert none.likely.step_ms < some.likely.step_ms < every.likely.step_ms
    assert every.memory.gib < some.memory.gib < none.memory.gib
    kept = [gib(p, "activations") for p in (none, some, every)]
    assert kept[1] == pytest.approx(kept[0] * 3 / 4 + kept[2] / 4, rel=0.01)
    assert planned(recompute="full", recompute_blocks=32).setup == every.setup


def test_feed_forwards_are_computed_again():
    p = planned(recompute="mlp")
    again = [product.module for product in p.compute.products if product.recompute]
    assert again == ["mlp.gate_proj", "mlp.up_proj"]  # torch stops before the last
    assert planned(recompute="full").memory.gib < p.memory.gib < planned().memory.gib


@pytest.mark.parametrize(
    "given",
    [
        {"recompute_blocks": 4},
        {"recompute": "full", "recompute_blocks": 64},
        {"recompute": "full", "recompute_blocks": 4, "offload_weights": True},
        {"what": 8e9, "recompute": "full", "recompute_blocks": 4, "layers": None},
    ],
    ids=str,
)
def test_blocks_that_cannot_be_computed_again_are_refused(given):
    with refused(ValueError):
        planned(**given)


def test_states_that_the_gpu_reads_from_its_host():
    here, there = planned(master=True), planned(master=True, offload_states=True)
    moved = gib(here, "optimizer", "master weights")
    assert gib(there, "optimizer", "master weights") == 0
    assert there.memory.host_gib == pytest.approx(moved)
    host = sk.planner.Host(link_gb_s=25, adam_params_s=1e9)
    waits = there.step_time_on(host).ms - here.step_time.ms
    assert waits == pytest.approx(moved * 2**30 / 25e6, rel=1e-6)
    assert there.likely.step_ms > here.likely.step_ms
    assert "the optimizer's states on the host" in str(there)
    # by the ways of plan.offload() they are somewhere else
    assert there.offload(host).table().equals(here.offload(host).table())
    sharded = planned(gpus=4, zero=1, offload_states=True)
    assert sharded.memory.host_gib == pytest.approx(planned(offload_states=True).memory.host_gib / 4)


def test_only_inputs_of_blocks_wait_on_the_host():
    kept, inputs, every = (planned(offload_activations=what) for what in (None, "inputs", True))
    assert inputs.memory.host_gib == 32 * 4096 * 4096 * 2 / 2**30
    assert every.memory.gib < inputs.memory.gib < kept.memory.gib
    assert kept.likely.step_ms <= inputs.likely.step_ms < every.likely.step_ms
    assert "inputs of blocks on the host" in str(inputs)


@pytest.mark.parametrize(
    "given",
    [
        {"offload_states": True, "optimizer": "sgd"},
        {"offload_states": True, "optimizer": "zenflow"},
        {"offload_states": True, "gpu": "cpu"},
        {"offload_states": True, "training": False},
        {"offload_states": True, "offload_weights": True},
        {"offload_activations": "outputs"},
    ],
    ids=str,
)
def test_states_that_are_not_there_are_refused(given):
    with refused(ValueError):
        planned(**given)


def test_a_divided_plan_says_so():
    said = str(planned(gpus=8, tensor_parallel=4, zero=1))
    assert "tensor parallel over 4 GPUs" in said
    assert "every GPU is taken to hold all states" not in said
    assert replace(WHOLE, expert=2).words == "expert parallel over 2 GPUs"
