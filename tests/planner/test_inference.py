"""A plan of serving: figures by hand for small and well-known models, and what must hold of all."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from typing import Any

import pytest

import surokit as sk
from surokit import cli
from surokit.hardware.gpus import Ceilings, Gpu, find_gpu
from surokit.hardware.rates import GAP_US, LAUNCH_US
from surokit.planner import Price
from tests.planner.families import fields
from tests.refusals import refused

LLAMA_2_7B, LLAMA_3_8B, MIXTRAL = "llama-2-7b", "llama-3-8b", "mixtral-8x7b-v0.1"
TINY = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 16,
    "vocab_size": 32,
}
# products at 1e9 FLOP/s, attention too as there is no capability; 1e8 bytes/s
SLOW = Gpu("slow", memory_gib=1, bf16_tflops=1e-3, bandwidth_tb_s=1e-4)
H100_TB_S, H100_TFLOPS = 3.35, 989.0


def plan(what, **given):
    """A plan without types: figures that may be None elsewhere are numbers here."""
    return sk.plan(what, **given)


def measured(**more: float) -> Gpu:
    """An H100 whose products, bandwidth and launches were measured."""
    ceilings = Ceilings("a test", **{"bf16_tflops": 700, "bandwidth_tb_s": 3.0, **more})
    return dataclasses.replace(find_gpu("H100"), ceilings=ceilings)


def launched(s: Any, batch: int) -> float:
    """The ms that gaps between kernels, or their launches, add to a step."""
    gaps, launches = s.decoding.launches * GAP_US / 1e3, s.decoding.launches * LAUNCH_US / 1e3
    row = s.decoding.step(batch).rows[0]
    return max(gaps, launches - row.device_ms)


def test_every_figure_of_a_tiny_model_by_hand():
    s = plan(TINY, gpu=SLOW, usd_per_gpu_hour=3.6, slack=0).serving(prompt=6, output=4, concurrency=3)
    # a layer: q 8x8, k and v 4x8, o 8x8, gate and up 16x8, down 8x16, and two norms of 8
    matrices = 2 * (64 + 32 + 32 + 64 + 128 + 128 + 128)
    norms, head = 2 * 16 + 8, 32 * 8
    assert s.weight_bytes == 2 * (matrices + norms + 2 * head)
    assert s.decoding.weight_bytes(3) == 2 * (matrices + norms + head), "the embedding is looked up, not read"
    assert s.kv_token_bytes == 2 * 2 * 4 * 2
    assert s.kv_bytes == 10 * 32
    assert s.decoding.kv_bytes == 8 * 32, "at the mean length, 6 + 4 / 2"
    assert s.decoding.bytes(3) == s.decoding.weight_bytes(3) + 3 * 8 * 32
    flop = 2 * (matrices + head) + 2 * (2 * 2 * 8 * 8)  # scores and values of 2 layers, 8 keys, 2 heads of 4
    assert s.decoding.token_flop == flop
    assert s.decoding.products_ms(3) == pytest.approx(3 * flop / 1e9 * 1e3)
    assert s.decoding.memory_ms(3) == pytest.approx(s.decoding.bytes(3) / 1e8 * 1e3)
    assert s.token_ms == pytest.approx(max(s.decoding.products_ms(3), s.decoding.memory_ms(3)) + launched(s, 3))
    # causal attention: a token sees half of 6 keys on average
    assert s.prefill_flop == 6 * (2 * matrices + 2 * (2 * 2 * 8 * 3)) + 2 * head
    assert s.request_tokens_per_s == pytest.approx(1e3 / s.token_ms)
    assert s.decode_tokens_per_s == pytest.approx(3e3 / s.token_ms)
    assert s.request_ms == pytest.approx(s.prefill_batch_ms + 3 * s.token_ms)
    assert s.tokens_per_s == pytest.approx(3 * 4 / s.request_ms * 1e3)
    assert s.usd_per_million_output == pytest.approx(3.6 / (3600 * s.tokens_per_s) * 1e6)
    assert s.usd_per_million_tokens == pytest.approx(s.usd_per_million_output * 4 / 10)
    assert s.most == int((2**29 - s.weight_bytes - s.workspace_bytes) // s.kv_bytes)
    assert s.fits


@pytest.mark.parametrize(("model", "bytes_"), [(LLAMA_2_7B, 524_288), (LLAMA_3_8B, 131_072)])
def test_kv_cache_of_well_known_models(model, bytes_):
    s = plan(model, gpu="A100").serving(512, 128)
    assert s.kv_token_bytes == bytes_
    assert s.kv_bytes == 640 * bytes_
    assert s.decoding.kv_bytes == 576 * bytes_


def test_a_token_of_llama_2_7b_on_an_h100():
    s = plan(LLAMA_2_7B, gpu="H100").serving(512, 128, concurrency=1)
    read = 2 * (6_738_415_616 - 32_000 * 4096)
    assert s.decoding.weight_bytes(1) == read
    assert s.token_ms == pytest.approx((read + 576 * 524_288) / H100_TB_S / 1e9 + launched(s, 1))
    assert 0 < launched(s, 1) < 0.2 * s.token_ms
    assert s.binds == "bytes"
    products = 2 * (6_738_415_616 - 32_000 * 4096 - 65 * 4096)  # norms multiply nothing
    attention = 32 * 4 * 576 * 4096
    assert s.decoding.token_flop == products + attention
    at_35_percent = attention / (0.35 * H100_TFLOPS * 1e9)
    assert s.decoding.products_ms(1) == pytest.approx(products / (H100_TFLOPS * 1e9) + at_35_percent)


def test_the_first_token_is_the_estimate_of_a_forward_but_for_the_head():
    p = plan(LLAMA_3_8B, gpu="H100", training=False, batch=1, length=512)
    s = p.serving(512, 128, concurrency=4)
    head = sum(row.ms for row in p.estimate.rows if row.module == "lm_head")
    one = 128_256 * 4096 * 2 + (4096 + 128_256) * 2  # bytes of a head that sees one token
    assert s.prefill_ms == pytest.approx(p.estimate.step_ms - head + one / H100_TB_S / 1e9)
    assert s.prefill_flop == p.flops_per_step - 511 * 2 * 128_256 * 4096
    assert s.prefill_ms < s.prefill_batch_ms < 4 * s.prefill_ms


def test_a_tied_head_is_read_although_it_is_the_embedding():
    s = plan({**TINY, "tie_word_embeddings": True}, gpu=SLOW).serving(6, 4)
    assert s.decoding.weight_bytes(1) == s.weight_bytes


@pytest.mark.parametrize(("recipe", "bits"), [("qfp8", 8), ("qfp4", 4.5), ("qnf4", 4.127)])
def test_stored_weights_shorten_a_step_in_proportion_to_their_bytes(recipe, bits):
    full = plan(LLAMA_2_7B, gpu="H100").serving(512, 128, concurrency=1)
    bare = dataclasses.replace(sk.recipe.find_recipe(recipe), adapter=None)
    less = plan(LLAMA_2_7B, gpu="H100", recipe=bare).serving(512, 128, concurrency=1)
    ms = [s.token_ms - launched(s, 1) for s in (less, full)]
    assert ms[0] / ms[1] == pytest.approx(less.decoding.bytes(1) / full.decoding.bytes(1))
    stored = 6_738_415_616 - 2 * 32_000 * 4096 - 65 * 4096  # the head stays as it is
    saved = full.decoding.weight_bytes(1) - less.decoding.weight_bytes(1)
    assert saved == pytest.approx(stored * (16 - bits) / 8, rel=1e-3)
    assert less.most > full.most


@pytest.mark.parametrize("what", [LLAMA_2_7B, MIXTRAL, "mistral-7b-v0.1", "qwen3-30b-a3b", "gemma-2-2b"])
@pytest.mark.parametrize("gpu", ["A100", "H100"])
def test_more_at_once_is_never_slower_in_all_and_never_faster_for_one(what, gpu):
    s = plan(what, gpu=gpu, recipe="qnf4").serving(300, 100, concurrency=1)
    seen = [s.at(n) for n in (1, 2, 3, 7, 32, 150, 700, 3000)]
    for fewer, more in pairwise(seen):
        assert more.token_ms >= fewer.token_ms
        assert more.prefill_batch_ms >= fewer.prefill_batch_ms
        assert more.decode_tokens_per_s >= fewer.decode_tokens_per_s * (1 - 1e-12)
        assert more.tokens_per_s >= fewer.tokens_per_s * (1 - 1e-12)


@pytest.mark.parametrize(
    ("what", "prompt"), [(LLAMA_3_8B, 64), (LLAMA_2_7B, 16), (MIXTRAL, 200), ("qwen3-30b-a3b", 50)]
)
def test_bytes_and_products_take_equally_long_where_a_step_turns(what, prompt):
    s = plan(what, gpu="H100").serving(prompt, 16, concurrency=1, gib=1000)
    turns = s.turning_batch
    assert s.decoding.memory_ms(turns) == pytest.approx(s.decoding.products_ms(turns))
    before, after = s.at(int(turns)), s.at(int(turns) + 1)
    assert (before.binds, after.binds) == ("bytes", "products")


def test_a_long_kv_cache_keeps_a_step_bound_by_bytes():
    s = plan(LLAMA_2_7B, gpu="H100").serving(512, 128)
    assert s.turning_batch is None
    assert s.decoding.kv_bytes / H100_TB_S / 1e9 > s.decoding.token_ms
    assert s.at(10**6).binds == "bytes"
    assert any("any number of sequences" in note for note in s.notes)


def test_a_batch_reads_the_experts_that_its_tokens_choose():
    s = plan(MIXTRAL, gpu="H100").serving(512, 128, concurrency=1, gib=200)
    everything = 2 * (46_702_792_704 - 32_000 * 4096)
    experts = 2 * 32 * 8 * 3 * 4096 * 14_336
    for batch in (1, 2, 5, 64):
        distinct = 8 * (1 - (1 - 2 / 8) ** batch)
        assert s.decoding.weight_bytes(batch) == pytest.approx(everything - experts * (1 - distinct / 8))
    assert s.decoding.weight_bytes(10**6) == everything


def test_experts_are_read_as_they_are_stored():
    bare = dataclasses.replace(sk.QFP8, adapter=None)
    s = plan(MIXTRAL, gpu="H100", recipe=bare).serving(512, 128, concurrency=1)
    one = 4096 * 14_336 + 4 * (4096 // 128) * (14_336 // 128)  # codes, and a float32 for each block of 128 x 128
    assert s.decoding.expert_bytes == 32 * 8 * 3 * one
    with_adapter = plan(MIXTRAL, gpu="H100", recipe="qfp8").serving(512, 128, concurrency=1)
    more = with_adapter.decoding.expert_bytes - s.decoding.expert_bytes
    assert more == 2 * 32 * 8 * 3 * 16 * (4096 + 14_336), "adapters of experts are read with them"


def test_a_windows_cache_stops_growing():
    s = {n: plan("mistral-7b-v0.1", gpu="H100").serving(n, 1, concurrency=1) for n in (1000, 8000, 16_000)}
    assert s[1000].kv_bytes == 1001 * 131_072
    assert s[8000].kv_bytes == s[16_000].kv_bytes == 4095 * 131_072
    assert s[8000].token_ms == s[16_000].token_ms
    assert s[8000].decoding.token_flop == s[16_000].decoding.token_flop
    mixed = plan("gemma-2-2b", gpu="H100")  # every other layer has a window
    growth = mixed.serving(16_000, 1).kv_bytes - mixed.serving(8000, 1).kv_bytes
    assert growth == 8000 * 13 * 2 * 4 * 256 * 2


def test_attention_over_a_latent_multiplies_the_latent():
    config = fields("deepseek_v3")
    s, more = (plan(config, gpu="H100").serving(n, 2, concurrency=1) for n in (9, 19))
    # 3 layers, 4 heads, 10 keys more: scores over 24 + 8, values over 24
    assert more.decoding.token_flop - s.decoding.token_flop == pytest.approx(2 * 10 * 3 * 4 * (24 + 8 + 24))
    assert s.kv_token_bytes == 3 * (24 + 8) * 2


def test_what_fits_with_slack_fits_and_one_more_does_not():
    s = plan(LLAMA_3_8B, gpu="H100").serving(512, 128)
    assert s.concurrency == s.most

    def held(n: int) -> float:
        return (s.weight_bytes + s.workspace_bytes + n * s.kv_bytes) * 1.1 / 2**30

    assert held(s.most) <= 78.7 < held(s.most + 1)
    assert not s.at(s.most + 1).fits
    assert "Does not fit" in repr(s.at(s.most + 1))
    assert plan(LLAMA_3_8B, gpu="H100").serving(512, 128, concurrency=1).most == s.most
    half = plan(LLAMA_3_8B, gpu="H100").serving(512, 128, gib=40)
    assert half.most < s.most / 2
    bare = plan(LLAMA_3_8B, gpu="H100", slack=0).serving(512, 128)
    assert bare.most > s.most


def test_a_price_may_be_a_range_and_hours_may_be_idle():
    s = plan(LLAMA_3_8B, gpu="H100", usd_per_gpu_hour=Price(2, 4, "2026-11")).serving()
    low, high = s.usd_per_million_output_range
    assert high == pytest.approx(2 * low)
    assert s.usd_per_million_output == pytest.approx(3 / (3600 * s.tokens_per_s) * 1e6)
    half = plan(LLAMA_3_8B, gpu="H100", usd_per_gpu_hour=Price(2, 4), goodput=0.5).serving()
    assert half.usd_per_million_output == pytest.approx(2 * s.usd_per_million_output)
    unpriced = plan(LLAMA_3_8B, gpu="H100").serving()
    assert unpriced.usd_per_million_output is unpriced.usd_per_million_tokens is None
    assert unpriced.usd_per_million_output_range is None
    assert "cost" not in {line.group for line in unpriced.lines()}


def test_launches_count_where_they_were_measured():
    slow = plan(LLAMA_3_8B, gpu=measured(launch_us=50.0)).serving(concurrency=1)
    assert slow.kind == "prediction"
    assert slow.binds == "launches"
    assert slow.token_ms == pytest.approx(slow.decoding.launches * 50 / 1e3)
    quick = plan(LLAMA_3_8B, gpu=measured(launch_us=1.0)).serving(concurrency=1)
    assert quick.token_ms == pytest.approx(quick.decoding.memory_ms(1) + quick.decoding.launches / 1e3), "gaps of 1 us"
    graphs = plan(LLAMA_3_8B, gpu=measured(launch_us=50.0), graphs=True).serving(concurrency=1)
    assert graphs.token_ms == pytest.approx(quick.token_ms), "graphs launch nothing; the gaps stay"
    assert "launches add" in {line.term for line in slow.lines()}


def test_a_training_plan_is_planned_as_a_forward():
    training = plan(
        LLAMA_3_8B,
        gpu="H100",
        gpus=8,
        zero=3,
        tokens=1e9,
        batch=4,
        length=2048,
        accumulate=8,
        recompute="full",
        mfu=0.4,
    )
    s = training.serving(512, 128, concurrency=8)
    forward = plan(LLAMA_3_8B, gpu="H100", training=False).serving(512, 128, concurrency=8)
    assert s == dataclasses.replace(forward, notes=s.notes)
    assert s.request_ms == forward.request_ms
    assert any("8 GPUs" in note for note in s.notes)
    assert any("rate that was given" in note for note in s.notes)


def test_a_live_model_is_served_in_its_own_recipe_and_fusion():
    import torch

    config = sk.DecoderConfig(layers=2, width=64, heads=4, kv_heads=2, vocab=128, ffn=176)
    model = sk.Decoder(config, dtype=torch.bfloat16)
    sk.apply(model, sk.QFP8.lora(rank=16))
    sk.fuse(model, recompute="full")
    s = plan(model, gpu="H100").serving(32, 16)
    assert s.plan.setup.fusion.fuses
    assert s.weight_bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    assert s.kv_token_bytes == 2 * 2 * 2 * 16 * 2


def test_it_shows_itself_and_says_which_figures_are_exact():
    s = plan(LLAMA_3_8B, gpu="H100", recipe="qnf4", usd_per_gpu_hour=2).serving(512, 128, 32)
    kinds = {line.term: line.kind for line in s.lines()}
    exact = ("weights", "KV cache a token", "KV cache a sequence", "FLOPs a prompt", "bytes of KV cache", "FLOPs")
    assert {kinds[term] for term in exact} == {"exact"}
    assert {kinds[term] for term in ("workspace", "sequences that fit")} == {"approximate"}
    assert {kinds[term] for term in ("a token", "in all", "first token, alone")} == {"optimistic"}
    assert kinds["output tokens"] == "prediction"
    text, html = repr(s), s._repr_html_()
    assert text.startswith("Serving, predicted: llama of 8.03 B parameters")
    for shown in ("32 sequences at once", "131,072 bytes", "USD a million", "decodes them within the product"):
        assert shown in text
        assert shown in html
    frame = s.by_concurrency()
    assert list(frame.concurrency[:4]) == [1, 2, 4, 8]
    assert frame.concurrency.iloc[-1] == s.most
    assert list(s.table().term) == [line.term for line in s.lines()]


def test_the_command_line_asks_it(capsys):
    asked = ["plan", LLAMA_3_8B, "--gpu", "H100", "--serving", "512", "128", "--concurrency", "8"]
    assert cli.main(asked) == 0
    assert "8 sequences at once" in capsys.readouterr().out
    assert cli.main([*asked, "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)["serving"]
    assert {"group", "term", "value", "unit", "kind", "how"} == set(lines[0])


@pytest.mark.parametrize(
    ("what", "given", "asked"),
    [
        pytest.param(8e9, {"gpu": "H100"}, {}, id="a number of parameters"),
        pytest.param(LLAMA_3_8B, {}, {}, id="no GPU"),
        pytest.param(LLAMA_3_8B, {"gpu": Gpu("mine", memory_gib=80)}, {}, id="no rates"),
        pytest.param(LLAMA_3_8B, {"gpu": Gpu("mine", bf16_tflops=9, bandwidth_tb_s=1)}, {}, id="no memory"),
        pytest.param("llama-3-70b", {"gpu": "H100"}, {"concurrency": 1}, id="too large"),
        pytest.param(LLAMA_3_8B, {"gpu": "H100", "offload_weights": True}, {}, id="weights on the host"),
        pytest.param(fields("gpt2"), {"gpu": "H100"}, {"prompt": 100, "output": 29}, id="too long"),
        pytest.param(LLAMA_3_8B, {"gpu": "H100"}, {"prompt": 0}, id="no prompt"),
        pytest.param(LLAMA_3_8B, {"gpu": "H100"}, {"concurrency": 1.5}, id="half a sequence"),
    ],
)
def test_what_cannot_be_told_is_one_sentence(what, given, asked):
    with refused(ValueError):
        plan(what, **given).serving(**asked)


def test_memory_that_is_not_known_needs_a_concurrency():
    mine = Gpu("mine", bf16_tflops=9, bandwidth_tb_s=1)
    s = plan(LLAMA_3_8B, gpu=mine).serving(concurrency=4)
    assert s.most is s.fits is None
    assert list(s.by_concurrency().concurrency) == [1, 2, 4]
    assert plan(LLAMA_3_8B, gpu=mine).serving(gib=24).most > 0
    longest = plan(fields("gpt2"), gpu="H100").serving(100, 28)
    assert longest.prompt + longest.output == 128
