"""Models that are divided over GPUs, tensor, pipeline and expert parallel: what one GPU holds, computes, sends, and waits for."""

from dataclasses import replace
from typing import Any

import pytest

import surokit as sk
from surokit.planner.counts.division import WHOLE, Again, Division, sent_again
from surokit.planner.counts.flops import count_flops, placements, trained_parameters
from surokit.planner.inputs.configs import read_shape
from surokit.recipe import PROJECTIONS
from tests.planner.families import fields
from tests.refusals import refused

EXPERTS = "qwen3-30b-a3b"
NOTHING = Again()
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
    first, middle, last = Division(pipeline=3).stages(shape)
    assert first.expert_layers == (1, 2)
    assert middle.expert_layers == last.expert_layers == (0, 1, 2)
    windows, _ = read_shape(fields("gemma2", num_hidden_layers=6))
    stage = Division(pipeline=2).stages(windows)[-1]
    assert [stage.window_of(i) for i in range(3)] == [windows.window_of(i) for i in range(3, 6)]


def test_a_recipe_finds_the_layers_of_a_stage_by_their_numbers_in_the_model():
    shape, _ = read_shape("llama-3-8b")
    stages = Division(pipeline=4).stages(shape)
    kept = [placements(stage, sk.FP8.keep_first(2).keep_last(3))[0].layers for stage in stages]
    assert [sorted({*range(8)} - layers) for layers in kept] == [[0, 1], [], [], [5, 6, 7]]
    lora = sk.BF16.lora(8, targets=("layers.12.*",))
    places = [placements(stage, lora)[0] for stage in stages]
    assert [(sorted(place.adapted), place.below) for place in places] == [
        ([], False),
        ([4], False),
        ([], True),
        ([], True),
    ]
    assert sum(trained_parameters(stage, 0, lora) for stage in stages) == trained_parameters(shape, 0, lora)


def test_gradients_go_through_a_stage_to_adapters_of_an_earlier_one():
    given: dict[str, Any] = {"gpus": 4, "pipeline_parallel": 4, "accumulate": 8, "logits": "fused"}
    early, late, every = (
        planned(**given, recipe=sk.BF16.lora(8, targets=targets))
        for targets in (("layers.3.*",), ("layers.30.*",), PROJECTIONS)
    )
    backward = [p.estimate.by_pass()["backward"] for p in (late, early, every)]
    assert 0 < backward[0] < backward[1] < backward[2]
    flop = {
        name: sum(row.flop for row in early.estimate.rows if (row.group, row.step) == ("products", name))
        for name in ("forward", "backward")
    }
    assert flop["backward"] == flop["forward"]  # the gradient of each product's input
    assert late.memory.gib < early.memory.gib


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


def test_a_stage_between_the_first_and_the_last_may_be_the_fullest():
    """The first blocks of a model with experts are dense: the second stage keeps a micro-batch less, and all of its experts."""
    config = fields("deepseek_v3", num_hidden_layers=16, first_k_dense_replace=3, n_routed_experts=64, vocab_size=320)
    given: dict[str, Any] = {"what": config, "gpus": 4, "pipeline_parallel": 4, "accumulate": 16, "logits": "fused"}
    shape, _ = read_shape(config)
    first, second, third, last = Division(pipeline=4).stages(shape)
    assert [Division(pipeline=4).in_flight(stage, 16) for stage in (first, second, third, last)] == [4, 3, 2, 1]
    assert first.parameters < third.parameters == second.parameters < last.parameters
    p = planned(**given)
    assert gib(p, "weights") == second.parameters * 2 / 2**30
    assert gib(p, "activations in flight") == pytest.approx(2 * gib(p, "activations"))


def test_the_last_stage_of_an_interleaved_pipeline_waits_with_several():
    whole = {"gpus": 4, "pipeline_parallel": 4, "accumulate": 16, "logits": "whole", "length": 512, "batch": 8}
    shape, _ = read_shape("llama-3-8b")
    division = Division(pipeline=4, virtual=2)
    # each stage has a micro-batch less of each of its two parts than the one before
    assert [division.in_flight(stage, 16) for stage in division.stages(shape)] == [4 + 3 / 2, 9 / 2, 7 / 2, 5 / 2]
    assert planned(**whole, virtual_stages=2).memory.gib > planned(**whole).memory.gib


def test_gpus_that_share_layers_share_what_is_made_of_weights_and_see_all_keys():
    head = [planned(gpus=t, tensor_parallel=t, logits="fused", length=8192).memory["logits"].most for t in (1, 8)]
    assert head[1] < head[0] / 6
    # a mask is over all keys, on each GPU
    given: dict[str, Any] = {"what": "mistral-7b-v0.1", "length": 8192}
    whole, half = (gib(planned(**given, gpus=t, tensor_parallel=t), "activations") for t in (1, 2))
    mask = 32 * 8192**2 * 2 / 2**30
    assert half == pytest.approx((whole - mask) / 2 + mask, rel=0.03)


def test_gpus_beyond_the_heads_of_keys_and_values_have_copies_of_them():
    config = fields("llama", hidden_size=1024, num_attention_heads=16, num_key_value_heads=2, attention_bias=False)
    alike = {**config, "num_key_value_heads": 8}
    few, many = (planned(what=what, gpus=8, tensor_parallel=8).memory for what in (config, alike))
    assert few["activations"].most == many["activations"].most
    assert few["weights"].bytes == many["weights"].bytes


@pytest.mark.parametrize("given", [{"what": "gemma-2-9b"}, {"dtype": "fp32"}], ids=["plain", "torch's"])
def test_scores_that_are_kept_are_those_of_a_share_of_the_heads_to_all_keys(given):
    whole, shared = (gib(planned(**given, gpus=t, tensor_parallel=t), "activations") for t in (1, 4))
    assert shared == pytest.approx(whole / 4, rel=0.01)


def test_zero_shards_adapters_over_all_that_have_them():
    """Not over fewer, where no expert has an adapter."""
    p = sk.plan(EXPERTS, gpus=8, expert_parallel=8, zero=1, gpu="H200", recipe=sk.BF16.lora(16, targets=("q_proj",)))
    adapters = 16 * (2048 + 4096) * 48
    assert gib(p, "optimizer") == adapters * 2 * 2 / 8 / 2**30


def test_a_stage_without_experts():
    config = fields("qwen3_moe", num_hidden_layers=8, mlp_only_layers=[6, 7])
    p = sk.plan(config, gpus=8, pipeline_parallel=4, gpu="H100", batch=1, length=64)
    assert p.estimate is not None
    assert p.estimate.by_group()["routing"] == 0  # the last stage has the head, and sets the pace


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


def sent(division: Division, shape: Any, again: Again = NOTHING, weight_gradients: bool = True) -> Any:
    """What one GPU sends for 4,096 tokens in 16 bits, over 450 GB/s in a node of 8 and 50 GB/s between nodes."""
    return division.exchange(
        shape,
        4096,
        2,
        again=again,
        weight_gradients=weight_gradients,
        peer_gb_s=450.0,
        between_gb_s=50.0,
        gpus_a_node=8,
    )


def test_what_gpus_send_each_other_between_layers():
    shape, _ = read_shape("llama-3-8b")
    row = 4096 * shape.width * 2  # bytes of 4,096 tokens
    t = sent(Division(tensor=4), shape)
    # 32 layers x (4 + 4 + 2), and embedding and head: each in forward and in backward, the head's input once more
    assert t.bytes == 3 / 4 * row * (32 * 10 + 5)
    assert t.forward_ms == pytest.approx(3 / 4 * row * (32 * 4 + 2) / 450e6)
    assert sent(Division(tensor=16), shape).forward_ms == pytest.approx(15 / 16 * row * (32 * 4 + 2) / 50e6)
    frozen = sent(Division(tensor=4), shape, sent_again("full", 1.0, early_stop=False), weight_gradients=False)
    assert frozen.bytes == 3 / 4 * row * (32 * 12 + 4)
    # torch stops before the last scatter of a block
    early = sent(Division(tensor=4), shape, sent_again("full", 0.5, early_stop=True), weight_gradients=False)
    assert early.bytes == 3 / 4 * row * (32 * 8 + 32 * 3 / 2 + 4)
    p = sent(Division(pipeline=4, virtual=2), shape)
    assert (p.bytes, p.forward_ms) == (4 * row, 2 * row / 450e6)
    experts, _ = read_shape(EXPERTS)
    routed = 4096 * experts.width * 2 * 8 * 48  # 8 experts a token, 48 layers
    e = sent(Division(expert=8), experts)
    assert e.bytes == 7 / 8 * routed * 4
    assert sent(Division(expert=8), experts, sent_again("mlp", 1.0, early_stop=True)).bytes == 7 / 8 * routed * 6
    both = sent(Division(expert=2, tensor=2), experts)
    own = 4096 * experts.width * 2
    assert both.bytes == routed / 2 / 2 * 4 + own / 2 * (48 * (2 + 16) * 2.5 + 5)
    assert sent(WHOLE, shape).bytes == 0


def test_experts_gradients_are_summed_over_the_gpus_that_have_them():
    """Reduce-scatter and all-gather over 8 nodes, in each of which a GPU has experts of its own: all over its own network card."""
    given: dict[str, Any] = {"gpu": "H100", "batch": 1, "length": 4096, "zero": 1, "between_gb_s": 50}
    far = sk.plan(EXPERTS, gpus=64, expert_parallel=8, **given).estimate
    shape, _ = read_shape(EXPERTS)
    part = Division(expert=8).stages(shape)[0]
    experts = sum(w.parameters for w in part.projections if w.kind == "expert") * 2
    others = (part.parameters - experts / 2) * 2
    over_nodes = 7 / 8 * 2 * (experts + others / 8) / 50e6
    assert far is not None
    assert far.communication.ms == pytest.approx(over_nodes + far.communication.between_layers_ms, rel=1e-3)
    here = sk.plan(EXPERTS, gpus=8, expert_parallel=8, **given).estimate  # each expert is on one GPU
    assert here is not None
    assert here.communication.ms == pytest.approx(
        7 / 8 * 2 * others / 450e6 + here.communication.between_layers_ms, rel=1e-3
    )


def test_what_is_sent_between_layers_hides_behind_each_micro_batch():
    for zero in (0, 1, 2):
        shared = [planned(gpus=8, tensor_parallel=2, zero=zero, accumulate=n).estimate for n in (1, 32)]
        late = [e.communication.waited_ms for e in shared]
        assert [e.exposed_ms for e in shared] == late  # no more than the gradients'


def test_links_that_are_not_known_are_said():
    p = planned(gpu="RTX-4090", gpus=2, tensor_parallel=2)
    assert p.estimate.communication.ms is None
    assert "give Gpu(peer_gb_s=)" in p.estimate.communication.how
    assert p.likely is None  # it would be that of a GPU that waits for nothing
    far = planned(gpus=16, tensor_parallel=8, pipeline_parallel=2)
    assert "give between_gb_s=" in far.estimate.communication.how
    assert far.likely is None
    assert far.but(between_gb_s=50).likely.step_ms > 0
    # gradients alone hide for the most part
    assert "without communication" in planned(gpus=16).likely.how


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


@pytest.mark.parametrize("more", [{"recompute": "full", "recompute_blocks": 4}, {"offload_states": True}], ids=str)
def test_questions_of_other_steps_take_back_what_does_not_go_with_them(more):
    p = planned(**more)
    host = sk.planner.Host(link_gb_s=25, adam_params_s=1e9)
    assert p.faster().ways
    assert p.but(batch=8).fitting(host=host).ways
    assert p.streamed(host).step_ms > 0
    assert p.offload(host).table().shape[0] == 3
    assert p.serving(128, 16, 1).token_ms > 0
    assert p.largest("layers") >= 4
    assert p.but(recompute=None).setup.recompute == "none"


def test_a_divided_plan_serves_as_a_whole_and_has_enough_layers():
    p = planned(gpus=4, pipeline_parallel=4)
    assert p.serving(128, 16, 1).token_ms == planned().serving(128, 16, 1).token_ms
    assert p.largest("layers") > 32
    assert p.but(virtual_stages=2).largest("layers") % 8 == 0
    assert any("shards nothing on one replica" in note for note in planned(gpus=2, tensor_parallel=2, zero=3).notes)


@pytest.mark.parametrize(
    "given",
    [
        {"what": 8e9, "gpus": 2, "tensor_parallel": 2, "layers": None},
        {"what": "qwen2.5-32b", "gpus": 5, "tensor_parallel": 5},
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


def test_a_divided_plan_is_asked_for_no_host():
    p = planned(gpus=8, tensor_parallel=2, pipeline_parallel=2)
    for ask in (p.offload, p.streamed):
        with refused(ValueError):
            ask()


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
    # what is on its way to the host are activations of blocks that are not computed again
    given: dict[str, Any] = {"batch": 8, "offload_activations": True, "recompute": "full"}
    assert planned(**given, recompute_blocks=16).memory.gib > planned(**given).memory.gib


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
