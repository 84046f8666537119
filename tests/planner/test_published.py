"""Orders and signs that others measured, by plan: arXiv 2311.03687 (Llama 2 on 8 GPUs), an independent replication of it on two
MI210, and a table of LLaMA-7B on 8 x A800. Absolute speeds are those of other engines, and are not asserted."""

from itertools import pairwise

import pytest

import surokit as sk
from surokit.hardware.gpus import Gpu
from surokit.planner import Host

LLAMA_7B, LLAMA_13B = "llama-2-7b", "llama-2-13b"
# AMD's data sheet: 64 GB of HBM2e at 1.6 TB/s, 181 TFLOPS of bf16 in matrix cores; PCIe 4 x16 between the cards and to the host
MI210 = Gpu("MI210", memory_gib=64, bandwidth_tb_s=1.6, bf16_tflops=181, peer_gb_s=32, host_gb_s=32)
A800 = "A100"  # with a slower link between nodes, which one node does not use
LENGTH = 350
MASTERS = {"state_dtype": "fp32", "master": True}  # as DeepSpeed keeps them


def plan(model=LLAMA_7B, gpu=MI210, batch=1, length=LENGTH, **given):
    return sk.plan(model, gpu=gpu, batch=batch, length=length, **given)


def tokens_per_s(found, step_ms=None):
    return found.estimate.tokens / (step_ms or found.computing_time.ms) * 1e3


def gib(found):
    return found.memory.peak_gib


@pytest.mark.parametrize("adam_params_s", [2e8, 1e9, 4e9])
def test_speeds_of_the_replication_have_its_order(adam_params_s):
    """Tokens/s there: recompute and quantization 1675, ZeRO-3 977, ZeRO-2 with recompute and offload 123, ZeRO-3 with both 66."""
    host = Host(link_gb_s=32, adam_params_s=adam_params_s)
    offloaded = [plan(gpus=2, zero=zero, recompute="full", optimizer="offloadadamw", **MASTERS) for zero in (2, 3)]
    speeds = [
        tokens_per_s(plan(recipe=sk.QNF4.lora(16), recompute="full")),
        tokens_per_s(plan(gpus=2, zero=3, **MASTERS)),
        *(tokens_per_s(each, each.offload(host).step_ms["synchronous"]) for each in offloaded),
    ]
    assert all(faster > slower for faster, slower in pairwise(speeds)), speeds


def test_memory_of_the_replication_has_its_order():
    """GB there: ZeRO-3 40.3, ZeRO-2 with recompute and offload 15.1, recompute and quantization 9.2, ZeRO-3 with both 4.6. ZeRO-3's
    offload moves weights too; here that is offload_weights, which is not divided. The last two are within a few percent by plan, so
    that their order is not asserted."""
    sizes = [
        gib(plan(gpus=2, zero=3, **MASTERS)),
        gib(plan(gpus=2, zero=2, recompute="full", optimizer="offloadadamw")),
        gib(plan(recipe=sk.QNF4.lora(16), recompute="full")),
    ]
    assert all(more > less for more, less in pairwise(sizes)), sizes
    assert gib(plan(offload_weights=True)) < sizes[1]


def test_what_checkpointing_and_offload_cost_on_eight_gpus():
    """LLaMA-7B, 4096 tokens, 8 x A800, ZeRO-2, batch 1: checkpointing costs 21 % of the speed, offload a further 57 %."""
    given = {"gpu": A800, "gpus": 8, "zero": 2, "length": 4096}
    plain, again = plan(**given, **MASTERS), plan(**given, **MASTERS, recompute="full")
    moved = plan(**given, recompute="full", optimizer="offloadadamw")
    offloaded_ms = moved.offload(Host(link_gb_s=20, adam_params_s=2e9)).step_ms["synchronous"]
    cost = 1 - tokens_per_s(again) / tokens_per_s(plain)
    # a forward more, of four instead of three: 25 %, less what does not grow
    assert cost == pytest.approx(0.21, abs=0.05)
    assert gib(again) < gib(plain)
    assert tokens_per_s(moved, offloaded_ms) < tokens_per_s(again)


def test_zero_divides_what_a_gpu_holds():
    copies, two, three = (plan(gpu=A800, gpus=8, zero=zero, **MASTERS) for zero in (0, 2, 3))
    assert gib(copies) > gib(two) > gib(three)
    assert tokens_per_s(two) > tokens_per_s(three)


def test_larger_batches_bring_speed_and_take_memory():
    plans = [plan(gpu=A800, gpus=8, zero=3, batch=batch) for batch in (1, 2, 8, 32)]
    assert all(tokens_per_s(a) < tokens_per_s(b) and gib(a) < gib(b) for a, b in pairwise(plans))


@pytest.mark.parametrize("recipe", [sk.BF16, sk.QNF4], ids=["LoRA", "QLoRA"])
def test_fine_tuning_of_the_larger_model_is_slower(recipe):
    """About 30 % in the article; by plan more, since the larger model has 1.93 times the products."""
    small, large = (plan(model, gpu=A800, recipe=recipe.lora(16)) for model in (LLAMA_7B, LLAMA_13B))
    assert 0.4 < tokens_per_s(large) / tokens_per_s(small) < 0.8


def test_an_adapter_has_hardly_an_optimizer():
    whole, adapter = (
        next(term.bytes for term in found.memory.terms if term.name == "optimizer")
        for found in (plan(gpu=A800), plan(gpu=A800, recipe=sk.BF16.lora(16)))
    )
    assert adapter < 0.01 * whole


def test_recompute_takes_time_and_gives_memory():
    plain, again = (plan(gpu=A800, batch=32, recompute=how) for how in ("none", "full"))
    assert gib(again) < gib(plain)
    assert tokens_per_s(again) < tokens_per_s(plain)
