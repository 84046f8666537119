"""Parts of a decoder: which part an operator belongs to, sums, and what was planted in one of them."""

from typing import ClassVar

import pytest
import torch
from torch import nn

import surokit as sk
from surokit.profiler.analysis.activities import activities_table
from surokit.profiler.analysis.collectives import by_size, collectives
from surokit.profiler.analysis.parts import IN_LAYERS, ORDER, part_of, parts_table
from surokit.profiler.analysis.phases import PHASES
from surokit.profiler.analysis.roles import Observed
from surokit.profiler.analysis.tables import analyse
from surokit.profiler.analysis.timeline import Event, Kind
from surokit.profiler.record.messages import Message
from tests.profiler.traces import US, block, communication, spans

CONFIG = sk.DecoderConfig(layers=2, width=64, heads=2, kv_heads=1, vocab=128, ffn=96, max_length=64, qk_norm=True)
IDS = torch.arange(64).reshape(2, 32)
LAYER = "model.layers.0"

CASES = [
    (f"{LAYER}.self_attn.q_proj", "Linear", "aten::mm", "aten::linear", "Linear q"),
    (f"{LAYER}.self_attn.q_proj.lora_A.default", "Linear", "aten::mm", "aten::linear", "Linear q"),
    (f"{LAYER}.mlp.down_proj.base_layer", "Linear4bit", "aten::mm", "aten::linear", "Linear down"),
    (f"{LAYER}.self_attn.c_attn", "Conv1D", "aten::addmm", "aten::addmm", "Linear q k v"),
    ("model.embed_tokens", "Embedding", "aten::embedding", "aten::embedding", "embedding"),
    (f"{LAYER}.input_layernorm", "LlamaRMSNorm", "aten::pow", "aten::pow", "RMSNorm"),
    ("model.rotary_emb", "LlamaRotaryEmbedding", "aten::cos", "aten::cos", "RoPE and reshaping"),
    (f"{LAYER}.self_attn", "LlamaAttention", "aten::bmm", "aten::matmul", "attention"),
    (f"{LAYER}.self_attn", "LlamaAttention", "aten::mul", "aten::scaled_dot_product_attention", "attention"),
    (f"{LAYER}.self_attn", "LlamaAttention", "void flash_fwd_kernel<...>", "", "attention"),
    (f"{LAYER}.self_attn", "LlamaAttention", "aten::neg", "aten::neg", "RoPE and reshaping"),
    (f"{LAYER}.self_attn", "LlamaAttention", "void elementwise_kernel<...>", "aten::neg", "RoPE and reshaping"),
    (f"{LAYER}.self_attn", "LlamaAttention", "nvjet_tst_128x64_64x9_1x2_h_bz_NNT", "aten::matmul", "attention"),
    (f"{LAYER}.self_attn", "LlamaAttention", "ampere_bf16_s16816gemm_bf16", "BmmBackward0", "attention"),
    (f"{LAYER}.self_attn", "LlamaSdpaAttention", "fmha_cutlassB_bf16", "", "attention"),
    (f"{LAYER}.self_attn.o_proj", "Linear", "nvjet_tst_128x64_64x9_1x2_h_bz_NNT", "MmBackward0", "Linear o"),
    (f"{LAYER}.self_attn", "Attention", "nvjet_tst_128x64_64x9_1x2_h_bz_NNT", "_Stage", "Linear, fused"),
    (f"{LAYER}.self_attn", "Attention", "void elementwise_kernel<...>", "_StageBackward", "norm and gate, fused"),
    ("Decoder", "Decoder", "nvjet_tst_128x64_64x9_1x2_h_bz_NNT", "_LinearCrossEntropy", "lm_head"),
    (f"{LAYER}.self_attn", "Attention", "aten::matmul", "_Stage", "Linear, fused"),
    (f"{LAYER}.self_attn", "Attention", "aten::rsqrt", "_Stage", "norm and gate, fused"),
    (f"{LAYER}.self_attn", "Attention", "surokit::causal_attention_cpu", "_StageBackward", "attention"),
    (f"{LAYER}.mlp", "MLP", "aten::silu", "_Stage", "SiLU and gate"),
    (f"{LAYER}.mlp.act_fn", "SiLUActivation", "aten::silu", "aten::silu", "SiLU and gate"),
    (f"{LAYER}.mlp", "LlamaMLP", "aten::mul", "aten::mul", "SiLU and gate"),
    (LAYER, "LlamaDecoderLayer", "aten::add", "aten::add", "residual sum"),
    ("lm_head", "Linear", "aten::mm", "aten::linear", "lm_head"),
    ("Linear", "Linear", "aten::mm", "aten::linear", "lm_head"),
    ("Decoder", "Decoder", "aten::mm", "_LinearCrossEntropy", "lm_head"),
    ("Decoder", "Decoder", "aten::exp_", "_LinearCrossEntropy", "loss"),
    (f"{LAYER}.mlp.gate", "TopKRouter", "aten::mm", "aten::linear", "router"),
    ("adapter.fc", "Linear", "aten::mm", "aten::linear", "Linear, other"),
    ("(outside modules)", "", "aten::add", "aten::add", "other"),
]


@pytest.mark.parametrize(("path", "kind", "operator", "outermost", "part"), CASES)
def test_an_operator_has_one_part(path, kind, operator, outermost, part):
    assert part_of(path, kind, operator, outermost) == part
    assert part in ORDER


def test_what_lies_in_a_layer():
    assert {"RMSNorm", "Linear q", "attention", "residual sum"} <= IN_LAYERS
    assert not {"embedding", "lm_head", "loss", "optimizer", "communication", "other"} & IN_LAYERS


def profiled(model):
    session = sk.Session(model, [{"input_ids": IDS, "labels": IDS}], schedule=None)
    with sk.profile(steps=2, warmup=1) as found:
        session.run(3)
    return found


def parts(found):
    return {row["part"]: row for row in found.parts.to_dict("records")}


@pytest.mark.parametrize("fuse", [None, "none", "full"])
def test_rows_sum_to_the_step(fuse):
    model = sk.Decoder(CONFIG, dtype=torch.bfloat16)
    if fuse:
        sk.fuse(model, recompute=fuse)
    found = profiled(model)
    rows = found.parts
    sums = rows[["forward_ms", "backward_ms", "idle_ms", "ms"]].sum()
    assert sums["forward_ms"] + sums["backward_ms"] == pytest.approx(found.summary["busy_ms"], rel=1e-6)
    assert sums["idle_ms"] == pytest.approx(found.summary["idle_ms"], rel=1e-6)
    assert sums["ms"] == pytest.approx(found.summary["wall_ms"], rel=1e-6)
    assert list(rows["part"]) == [part for part in ORDER if part in set(rows["part"])]
    ran = found.activities
    assert ran["ms"].min() >= 0
    assert ran["ms"].sum() == pytest.approx(found.summary["wall_ms"], rel=1e-6)
    assert ran["ms"].iloc[-1] == pytest.approx(found.summary["idle_ms"], rel=1e-6)
    expected = {"Linear, fused", "norm and gate, fused"} if fuse else {"Linear q", "Linear gate", "RMSNorm"}
    assert expected | {"embedding", "attention", "lm_head", "loss", "optimizer"} <= set(rows["part"])


class Planted(nn.Module):
    """Calls a module and does more products beside it, whose result is not used."""

    products: ClassVar[int] = 5

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, *rest):
        with torch.no_grad():
            for _ in range(self.products):
                torch.mm(torch.ones(8, 8), torch.ones(8, 8))
        return self.inner(x, *rest)


class PlantedAttention(Planted):
    pass


class PlantedMLP(Planted):
    pass


@pytest.mark.parametrize(
    ("place", "wrapper", "row"),
    [
        ("mlp.down_proj", Planted, "Linear down"),
        ("mlp", PlantedMLP, "SiLU and gate"),
        ("input_layernorm", type("PlantedRMSNorm", (Planted,), {}), "RMSNorm"),
        ("self_attn.o_proj", Planted, "Linear o"),
    ],
)
def test_planted_products_are_in_the_row_of_their_module(place, wrapper, row):
    torch.manual_seed(0)
    plain, planted = sk.Decoder(CONFIG, dtype=torch.bfloat16), sk.Decoder(CONFIG, dtype=torch.bfloat16)
    for layer in planted.model.layers:
        parent, _, name = place.rpartition(".")
        at = layer.get_submodule(parent)
        setattr(at, name, wrapper(getattr(at, name)))
    before, after = parts(profiled(plain)), parts(profiled(planted))
    # each product is three operators, two of which fill its operands; a fill is two
    extra = {part: after[part]["activities"] - before[part]["activities"] for part in before}
    assert extra[row] >= 3 * Planted.products * CONFIG.layers
    linear = {part: more for part, more in extra.items() if part.startswith("Linear") and part != row}
    assert linear == dict.fromkeys(linear, 0)


def test_a_wait_in_a_module_is_in_its_row():
    """On a faked clock: the norm's two operators take 10 us each with 30 us between them, in which the host waits."""

    def step(wait):
        return block(
            [
                Event(Kind.OP, "aten::pow", 10 * US, 20 * US, 1),
                Event(Kind.OP, "aten::rsqrt", (20 + wait) * US, (30 + wait) * US, 1),
                Event(Kind.OP, "aten::mm", (40 + wait) * US, (90 + wait) * US, 1),
            ],
            100 + wait,
            modules=(("Net", "Net"), ("Net.input_layernorm", "RMSNorm"), ("Net.q_proj", "Linear")),
            **spans((0, 5, 95 + wait), (1, 8, 32 + wait), (2, 38 + wait, 92 + wait)),
            device="cpu",
        )

    for wait in (0, 30):
        found, table = analyse(step(wait)), parts_table(step(wait))
        assert dict(zip(table["part"], table["forward_ms"])) == pytest.approx(
            {"RMSNorm": 0.02, "Linear q": 0.05, "other": 0.0}
        )
        idle = {"RMSNorm": 0.004 + wait / 1000, "Linear q": 0.004, "other": 0.022}
        assert dict(zip(table["part"], table["idle_ms"])) == pytest.approx(idle)
        assert sum(table["ms"]) == pytest.approx(found.summary["wall_ms"])


def test_a_wait_in_the_optimizer_is_idle_time_of_that_phase_alone():
    """On a faked clock: a forward of 20 us, and an optimizer of two operators of 10 us with a wait between them."""

    def step(wait):
        return block(
            [
                Event(Kind.OP, "aten::mm", 10 * US, 30 * US, 1),
                Event(Kind.ANNOTATION, "Optimizer.step#AdamW.step", 40 * US, (60 + wait) * US, 1),
                Event(Kind.OP, "aten::_foreach_mul_", 40 * US, 50 * US, 1),
                Event(Kind.OP, "aten::_foreach_add_", (50 + wait) * US, (60 + wait) * US, 1),
            ],
            100 + wait,
            modules=(("Net", "Net"),),
            **spans((0, 10, 30)),
            device="cpu",
        )

    for wait in (0, 30):
        recording = step(wait)
        table, s = activities_table(recording), analyse(recording).summary
        assert dict(zip(table["activity"], table["ms"])) == pytest.approx(
            {"aten::mm": 0.02, "aten::_foreach_mul_": 0.01, "aten::_foreach_add_": 0.01, "idle": 0.06 + wait / 1000}
        )
        assert s["phases_idle_ms"] == pytest.approx(
            {**dict.fromkeys(PHASES, 0.0), "optimizer": wait / 1000, "forward": 0.0, "other": 0.06}
        )
        assert s["phases_ms"]["optimizer"] == pytest.approx(0.02 + wait / 1000)


def test_a_wait_for_other_processes_in_a_layer_is_communication():
    """On a faked clock: the layer's sum ends at 20 us, and its process waits for a gather on another thread until 50."""
    recording = block(
        [
            Event(Kind.OP, "aten::add", 10 * US, 20 * US, 1),
            Event(Kind.ANNOTATION, "gloo:all_gather", 15 * US, 50 * US, 2),
            Event(Kind.OP, "aten::add", 50 * US, 60 * US, 1),
        ],
        60,
        modules=(("Net", "Net"), ("Net.layers.0", "Block")),
        **spans((0, 0, 60), (1, 10, 60)),
        device="cpu",
        messages=(Message(Kind.ANNOTATION, 15 * US, 50 * US, 2, "all_gather", nbytes=1500),),
        world=2,
    )
    found = parts_table(recording)
    assert dict(zip(found["part"], found["idle_ms"])) == pytest.approx(
        {"residual sum": 0.0, "communication": 0.03, "other": 0.01}
    )
    table = activities_table(recording)
    assert dict(zip(table["activity"], table["ms"])) == pytest.approx(
        {"all_gather, 3 kB": 0.03, "aten::add": 0.02, "idle": 0.01}
    )
    assert dict(zip(table["activity"], table["calls"])) == {"all_gather, 3 kB": 1, "aten::add": 2, "idle": None}
    s = analyse(recording).summary
    for column, expected in (("exposed", 0.03), ("overlapped", 0.005), ("idle", 0.01)):
        assert s[f"phases_{column}_ms"]["forward"] == pytest.approx(expected)
        assert sum(s[f"phases_{column}_ms"].values()) == pytest.approx(expected)


def test_a_collective_on_a_gpu_has_the_phase_that_asked_for_it():
    """On a faked clock: a gather that forward's hook asks for, of which 10 us of 30 run beside a kernel."""
    recording = block(
        [
            Event(Kind.RUNTIME, "cudaLaunchKernel", 2 * US, 3 * US, 1, correlation=1),
            Event(Kind.KERNEL, "gemm", 5 * US, 25 * US, 7, correlation=1),
            Event(Kind.RUNTIME, "cudaLaunchKernel", 4 * US, 5 * US, 1, correlation=2),
            Event(Kind.KERNEL, "ncclDevKernel_AllGather", 15 * US, 45 * US, 8, correlation=2),
        ],
        60,
        modules=(("Net", "Net"),),
        **spans((0, 1, 50)),
    )
    s = analyse(recording).summary
    assert s["phases_exposed_ms"] == pytest.approx({**dict.fromkeys(PHASES, 0.0), "forward": 0.02})
    assert s["phases_overlapped_ms"] == pytest.approx({**dict.fromkeys(PHASES, 0.0), "forward": 0.01})
    table = activities_table(recording)
    assert table["activity"] == ["gemm", "all_gather", "idle"]
    assert table["ms"] == pytest.approx([0.02, 0.02, s["idle_ms"]])


def test_backward_of_a_graph_that_a_node_makes_is_of_the_modules_in_it():
    """On a faked clock: a node computes a norm's module again and differentiates it, and a product of no module."""
    node = "autograd::engine::evaluate_function: "
    found = parts_table(
        block(
            [
                Event(Kind.OP, "Checkpoint", 1 * US, 3 * US, 1, sequence=7),
                Event(Kind.OP, node + "CheckpointBackward", 10 * US, 60 * US, 1, sequence=7),
                Event(Kind.OP, "aten::rsqrt", 12 * US, 16 * US, 1, sequence=1),
                Event(Kind.OP, "aten::bmm", 20 * US, 24 * US, 1, sequence=2),
                Event(Kind.OP, node + "BmmBackward0", 30 * US, 42 * US, 1, sequence=2),
                Event(Kind.OP, "BmmBackward0", 30 * US, 42 * US, 1, sequence=2),
                Event(Kind.OP, "aten::bmm", 32 * US, 40 * US, 1),
                Event(Kind.OP, node + "RsqrtBackward0", 44 * US, 52 * US, 1, sequence=1),
                Event(Kind.OP, "aten::mul", 45 * US, 50 * US, 1),
            ],
            60,
            modules=(("Net", "Net"), ("Net.self_attn", "Attention"), ("Net.input_layernorm", "RMSNorm")),
            **spans((0, 0, 6), (1, 0, 5), (2, 11, 18)),
            device="cpu",
        )
    )
    assert dict(zip(found["part"], found["backward_ms"])) == pytest.approx(
        {"RMSNorm": 0.009, "attention": 0.012, "other": 0.0}
    )


def test_autograd_and_two_threads_in_the_table_of_activities():
    """On a faked clock: a node's Python is idle, an operator has no time of those in it, and two threads are busy once."""
    table = activities_table(
        block(
            [
                Event(Kind.OP, "autograd::engine::evaluate_function: Own", 0, 50 * US, 1),
                Event(Kind.OP, "OwnBackward", 5 * US, 45 * US, 1),
                Event(Kind.OP, "aten::matmul", 10 * US, 30 * US, 1),
                Event(Kind.OP, "aten::mm", 12 * US, 28 * US, 1),
                Event(Kind.OP, "aten::add", 20 * US, 40 * US, 2),
            ],
            60,
            device="cpu",
        )
    )
    assert dict(zip(table["activity"], table["ms"])) == pytest.approx(
        {"aten::mm": 0.016, "aten::matmul": 0.004, "aten::add": 0.01, "idle": 0.03}
    )


def test_collectives_by_size():
    found = by_size(collectives(Observed(communication())))
    assert [list(row) for row in zip(*found.values())] == [["all_reduce", -1, 1.0, pytest.approx(0.04)]]


def test_work_that_grows_on_a_faked_clock_is_found_in_its_row():
    def step(longer):
        return block(
            [
                Event(Kind.OP, "aten::scaled_dot_product_attention", 10 * US, (20 + longer) * US, 1),
                Event(Kind.OP, "aten::mul", (20 + longer) * US, (26 + longer) * US, 1),
                Event(Kind.OP, "aten::silu", (30 + longer) * US, (40 + longer) * US, 1),
            ],
            100 + longer,
            modules=(("Net", "Net"), ("Net.self_attn", "Attention"), ("Net.mlp", "MLP")),
            **spans((0, 5, 95 + longer), (1, 8, 28 + longer), (2, 29 + longer, 42 + longer)),
            device="cpu",
        )

    before, after = (dict(zip(t["part"], t["forward_ms"])) for t in (parts_table(step(n)) for n in (0, 25)))
    assert before == pytest.approx(
        {"RoPE and reshaping": 0.006, "attention": 0.01, "SiLU and gate": 0.01, "other": 0.0}
    )
    assert {part for part in before if after[part] != pytest.approx(before[part])} == {"attention"}
    assert after["attention"] - before["attention"] == pytest.approx(0.025)
