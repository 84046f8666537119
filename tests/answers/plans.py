"""What the planner answers: forwards, backwards, beside a measurement, drawn, and refused."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

import surokit as sk
from surokit import planner
from tests.answers.book import Book, shown
from tests.planner.families import FAMILIES, LLAMA_1B, QWEN3_8B, fields

HOST = planner.Host(link_gb_s=50, adam_params_s=2e9, memory_gib=512)
MINE = planner.Gpu(
    "mine",
    memory_gib=96,
    bandwidth_tb_s=4.0,
    bf16_tflops=1000,
    fp8_tflops=2000,
    fp4_tflops=4000,
    capability=(10, 0),
    host_gb_s=60,
    peer_gb_s=400,
    watts=800,
    ceilings=planner.Ceilings(
        "by hand",
        bf16_tflops=700,
        fp32_tflops=60,
        fp8_tflops=1300,
        fp4_tflops=2500,
        bandwidth_tb_s=3.5,
        launch_us=4,
        host_gb_s=50,
        peer_gb_s=300,
        host_adam_params_s=2e9,
        host_accumulate_params_s=5e9,
    ),
)
SERVER = planner.Gpu("server", memory_gib=512, device="cpu")
CPU = planner.Gpu(
    "a processor",
    memory_gib=64,
    device="cpu",
    ceilings=planner.Ceilings("by hand", bf16_tflops=1.5, fp32_tflops=1.0, bandwidth_tb_s=0.1, launch_us=2),
)
KNOWN = (  # a few of the catalogue's, as people write them
    *("llama-3.1-8b", "Qwen/Qwen3-30B-A3B", "mistral-7b-v0.1", "mixtral-8x7b-v0.1", "gemma-2-9b-it", "SmolLM2-135M"),
    *("Llama-2-7b-chat-hf", "qwen2.5-7b-instruct", "Qwen3-0.6B", "gemma-3-1b-pt", "llama-3.1-405b", "gemma-7b"),
)
RECOMPUTE: tuple[Any, ...] = ("none", "selective", "full")
STEP: dict[str, Any] = {"batch": 2, "length": 2048, "gpu": "H100"}
RUN: dict[str, Any] = {**STEP, "tokens": 1e9, "mfu": 0.4, "usd_per_gpu_hour": 2.0}


def recipes() -> dict[str, Any]:
    """Every recipe, plain, with an adapter, and stored in other formats."""
    found: dict[str, Any] = dict(sk.recipes)
    for name, recipe in sk.recipes.items():
        found[f"{name} lora"] = recipe.lora(rank=8)
        found[f"{name} lora q v"] = recipe.lora(rank=4, targets=("q_proj", "v_proj"))
        found[f"{name} kept"] = recipe.keep_first(1).keep_last(2).keep("*.down_proj").also("lm_head")
        found[f"{name} small kept"] = recipe.keep_small(1024)
        for storage in ("qfp8", "qfp4", "qnf4"):
            found[f"{name} stored {storage}"] = recipe.store(sk.recipes[storage]).lora()
    return found


def write(book: Book) -> None:
    """All of them."""
    _facts(book)
    _forwards(book)
    _backwards(book)
    _live(book)
    _scaling(book)
    _functions(book)
    _refused(book)
    _at_random(book)


def planned(what: Any, **given: Any) -> Any:
    """A plan, all of its numbers and all that it shows."""
    plan = sk.plan(what, **given)
    return {**shown(plan), "lines": plan.lines(), "fits": _or_why(plan.fits), **_broken_down(plan)}


def _broken_down(plan: sk.Plan) -> dict[str, Any]:
    estimate = plan.estimate
    by = (
        {}
        if estimate is None
        else {n: getattr(estimate, n)() for n in ("by_bound", "by_group", "by_pass", "by_module")}
    )
    rows = None if estimate is None else estimate.table()
    return {"gemms": _or_why(plan.gemms), "modules": _or_why(plan.modules), "rows": rows, **by}


def _or_why(ask: Any) -> Any:
    try:
        return ask()
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def _facts(book: Book) -> None:
    for name, recipe in recipes().items():
        book.write(f"recipe {name}", partial(shown, recipe))
    for name, gpu in planner.GPUS.items():
        book.write(f"gpu {name}", lambda gpu=gpu: {**shown(gpu), "json": gpu.to_json()})
    for law in (sk.KAPLAN, sk.CHINCHILLA, sk.CHINCHILLA_REPLICATED):
        book.write(f"law {law.name}", partial(shown, law))


def _forwards(book: Book) -> None:
    def ask(key: str, what: Any, **given: Any) -> None:
        book.write(f"plan {key}", partial(planned, what, **given))

    for family in FAMILIES:
        what = fields(family)
        step = {"batch": 2, "length": 128, "gpu": "H100"}
        ask(f"{family}", what, **step)
        ask(f"{family} alone", what)
        ask(f"{family} run", what, **step, tokens=1e9, mfu=0.3, gpus=8, zero=3)
        ask(f"{family} recompute", what, **step, recompute="full", optimizer="adamw8bit")
        ask(f"{family} selective", what, **step, recompute="selective", layers="transformers", master=True)
        ask(f"{family} transformers", what, **step, layers="transformers", attention="full", recipe="fp8")
        ask(f"{family} fused", what, **step, fusion="fused", recipe="qfp8", graphs=True)
        ask(f"{family} inference", what, **step, training=False, recipe="qnf4")
        ask(f"{family} on a CPU", what, **{**step, "gpu": CPU}, recipe="fp8-current")
        ask(f"{family} streamed", what, **step, offload_weights=2, recipe="qfp4", optimizer="adamw")
    for name in KNOWN:
        ask(f"{name}", name, **STEP)
        ask(f"{name} lora", name, **{**STEP, "gpu": "A100"}, recipe=sk.QNF4.lora(rank=16), tokens=1e8, mfu=0.35)
    for name, recipe in recipes().items():
        ask(f"recipe {name}", QWEN3_8B, **RUN, recipe=recipe)
        ask(
            f"recipe {name} fused",
            QWEN3_8B,
            **{**STEP, "gpu": "B200"},
            recipe=recipe,
            fusion="fused",
            transposed="cached",
        )
    for name in planner.GPUS:
        for recipe in ("bf16", "fp8", "fp4"):
            ask(f"gpu {name} {recipe}", LLAMA_1B, batch=2, length=1024, gpu=name, recipe=recipe, tokens=1e9)
    for optimizer in ("adamw", "adamw8bit", "sgd", "zenflow", "offloadadamw"):
        for state in (None, "fp32"):
            for zero in (0, 1, 2, 3):
                given = {"optimizer": optimizer, "state_dtype": state, "zero": zero, "gpus": 8, "master": zero == 2}
                ask(f"optimizer {optimizer} {state} zero {zero}", QWEN3_8B, **STEP, **given)
    for ours in (
        sk.ZenFlow(topk_ratio=0.2, update_interval=8),
        sk.ZenFlow(overlap_step=False),
        sk.AdamW8bit(lr=1e-4),
    ):
        ask(f"optimizer {ours}", LLAMA_1B, **STEP, optimizer=ours)
        ask(f"optimizer {ours} mine", LLAMA_1B, **{**STEP, "gpu": MINE}, optimizer=ours, tokens=1e9)
    for gpus in (1, 2, 8, 16, 1024):
        for between in (None, 50.0):
            ask(
                f"{gpus} GPUs, {between} GB/s",
                LLAMA_1B,
                **{**RUN, "gpu": MINE},
                gpus=gpus,
                zero=2,
                between_gb_s=between,
            )
    for length in (1, 2, 127, 4096, 131072):
        for recompute in ("none", "selective", "full"):
            ask(f"length {length} {recompute}", LLAMA_1B, batch=1, length=length, gpu="H100", recompute=recompute)
    for dtype in ("bf16", "fp16", "fp32"):
        for gpu in ("T4", "V100", "H100", MINE, SERVER, "cpu"):
            name = gpu if isinstance(gpu, str) else gpu.name
            ask(f"dtype {dtype} on {name}", LLAMA_1B, batch=1, length=512, gpu=gpu, dtype=dtype)
    for fusion in ("none", "fused", sk.Fusion(), sk.Fusion().without("gate"), sk.Fusion(recompute="full")):
        for graphs in (None, True):
            ask(
                f"fusion {fusion} graphs {graphs}",
                LLAMA_1B,
                batch=1,
                length=512,
                gpu=MINE,
                fusion=fusion,
                graphs=graphs,
            )
    for weights in (True, 3):
        for activations in (None, True):
            for accumulate in (1, 4):
                given = {"offload_weights": weights, "offload_activations": activations, "accumulate": accumulate}
                ask(f"offload {weights} {activations} x {accumulate}", LLAMA_1B, **{**RUN, "gpu": MINE}, **given)
    for n in (1e6, 124e6, "8e9", 70e9, 405e9):
        ask(f"number {n}", n)
        ask(f"number {n} run", n, **RUN, gpus=64, zero=3)
        ask(f"number {n} lora", n, batch=1, length=4096, gpu="H200", recipe="qfp8")
    price = sk.Price(1.8, 3.2, date="2026-11", source="an example")
    ask("the case of the docs", 405e9, tokens=15.6e12, gpus=16000, gpu="H100", tflops_per_gpu=400, usd_per_gpu_hour=2.0)
    ask("a price that is a range", LLAMA_1B, **{**RUN, "usd_per_gpu_hour": price}, goodput=0.9, slack=0.05)
    ask("whole logits", LLAMA_1B, **RUN, logits="whole", slack=0)
    ask("a config of ours", sk.DecoderConfig(layers=3, width=64, heads=4, kv_heads=2, vocab=512, ffn=96), **STEP)


def _backwards(book: Book) -> None:
    plans: dict[str, dict[str, Any]] = {
        "lora": {**RUN, "recipe": sk.QFP8.lora(rank=16)},
        "full": {**RUN, "recompute": "full", "state_dtype": "fp32", "master": True},
        "large": {**STEP, "batch": 8, "length": 8192, "recipe": "fp8"},
        "fused": {**STEP, "gpu": MINE, "fusion": "fused", "recipe": "fp4", "tokens": 1e9},
        "many": {**RUN, "gpus": 64, "zero": 3, "between_gb_s": 50},
        "server": {"batch": 1, "length": 512, "gpu": SERVER, "tflops_per_gpu": 1.0, "tokens": 1e8},
        "zenflow": {**RUN, "gpu": MINE, "mfu": None, "optimizer": sk.ZenFlow(update_interval=8)},
    }
    subjects: dict[str, Any] = {"qwen": QWEN3_8B, "llama": LLAMA_1B, "moe": fields("qwen3_moe"), "number": 8e9}
    for subject, what in subjects.items():
        for name, given in plans.items():
            made = book.write(f"backwards {subject} {name}", partial(planned, what, **given))
            if made is not None:
                _questions(book, f"{subject} {name}", sk.plan(what, **given))
    plan = sk.plan(QWEN3_8B, **RUN)
    book.write("plot", plan.plot)
    several = {"a": plan, "b": plan.but(batch=4), "c": plan.but(recipe="qfp8"), "d": plan.but(offload_weights=True)}
    book.write("plot of several", lambda: sk.plot_memory(several))
    book.write("plot of several in 60 GiB", lambda: sk.plot_memory(several, 60))
    for changes in (
        {"batch": 4},
        {"recipe": None, "mfu": None},
        {"gpu": "B200"},
        {"optimizer": "adamw8bit", "length": 1},
    ):
        book.write(f"but {changes}", lambda changes=changes: shown(plan.but(**changes)))


def _questions(book: Book, name: str, plan: sk.Plan) -> None:
    def ask(key: str, question: Any) -> None:
        book.write(f"{name}: {key}", question)

    for what in ("batch", "length", "layers", "parameters"):
        ask(f"largest {what}", partial(plan.largest, what))
        ask(f"largest {what} of 64 in 40", partial(plan.largest, what, gib=40, multiple=64))
    for goals in ({"days": 1}, {"gib": 40}, {"usd": 100}, {"days": 0.1, "usd": 1000}):
        ask(f"GPUs for {goals}", partial(plan.gpus_for, **goals))
    for budget in ({"days": 1}, {"gpu_hours": 100}, {"usd": 100}):
        ask(f"tokens for {budget}", partial(plan.tokens_for, **budget))
        ask(f"rate for {budget}", partial(plan.rate_for, **budget))
        for law in (sk.CHINCHILLA_REPLICATED, sk.KAPLAN):
            ask(
                f"parameters for {budget} by {law.name}", lambda b=budget, w=law: shown(plan.parameters_for(law=w, **b))
            )
    ask("recipes", plan.recipes)
    ask("recipes of three", lambda: plan.recipes(["bf16", "fp8", sk.QNF4.lora()], gib=40))
    for host in (None, HOST):
        ask(f"fitting {host is None}", lambda host=host: shown(plan.fitting(host=host)))
        ask(f"offload {host is None}", lambda host=host: shown(plan.offload(host)))
        ask(f"streamed {host is None}", lambda host=host: shown(plan.streamed(host)))
    ask("fitting in 24 GiB", lambda: shown(plan.fitting(gib=24, host=HOST)))
    ask("offload with options", lambda: shown(plan.offload(HOST, topk_ratio=0.05, update_interval=2)))
    ask("streamed, three ahead", lambda: shown(plan.streamed(HOST, prefetch=3)))
    ask("faster", lambda: shown(plan.faster()))
    ask("faster in 24 GiB", lambda: shown(plan.faster(gib=24)))
    ask("binds", lambda: shown(plan.binds()))
    ask("deferral", lambda: plan.deferral)
    measured: tuple[Mapping[str, float], ...] = (
        {"step_ms": 214.0, "peak_gib": 21.9},
        {"tokens_per_s": 9000.0, "reserved_gib": 30.0},
        {"flops": 3e19, "step_ms": 100.0, "tokens": 4096},
        {"stem_ms": 1.0},
    )
    for figures in measured:
        ask(f"check {figures}", lambda figures=figures: shown(plan.check(figures)))


def _live(book: Book) -> None:
    config = sk.DecoderConfig(layers=2, width=64, heads=4, kv_heads=2, vocab=128, ffn=176)
    ids = torch.zeros(2, 32, dtype=torch.int64)
    for name, recipe in {
        "plain": None,
        "fp8": sk.FP8,
        "qfp8": sk.QFP8.lora(rank=4),
        "qnf4": sk.QNF4.lora(rank=4),
    }.items():
        for fused in (False, True):
            torch.manual_seed(0)
            model = sk.Decoder(config, dtype=torch.bfloat16)
            if recipe is not None:
                sk.apply(model, recipe)
            if fused:
                sk.fuse(model, recompute="selective")
            key = f"live {name} {'fused' if fused else 'eager'}"
            book.write(key, partial(planned, model, batch=2, length=64, gpu="H100"))
            book.write(f"{key} on a CPU", partial(planned, model, batch=2, length=64, gpu=CPU))
            optimizer = sk.AdamW8bit(lr=1e-4) if fused else sk.ZenFlow(lr=1e-4)
            session = sk.Session(model, [{"input_ids": ids, "labels": ids}] * 4, optimizer=optimizer, accumulate=2)
            book.write(f"{key} session", partial(planned, session, gpu="H100", tokens=1e6))


def _scaling(book: Book) -> None:
    for law in (sk.KAPLAN, sk.CHINCHILLA, sk.CHINCHILLA_REPLICATED):
        for n, d in ((1e9, 20e9), (405e9, 15.6e12), (1e5, 1e7), (1e9, None), (None, 1e10)):
            book.write(f"{law.name}: loss {n} {d}", lambda law=law, n=n, d=d: shown(law.loss(n, d)))
        for c in (1e18, 5.76e23, 1e26):
            book.write(f"{law.name}: optimal {c}", lambda law=law, c=c: shown(law.optimal(c)))
        for loss in (2.1, 2.4, 3.0):
            book.write(f"{law.name}: tokens for {loss}", lambda law=law, loss=loss: shown(law.tokens_for(loss, 1e9)))
            book.write(f"{law.name}: size for {loss}", lambda law=law, loss=loss: shown(law.parameters_for(loss, 1e11)))
        plan = sk.plan(LLAMA_1B, tokens=2e10)
        book.write(f"{law.name}: a plan", lambda law=law, p=plan: [law.count(p), law.loss(p, p.tokens), law.optimal(p)])

    def made(seed: int, sizes: tuple[float, ...], lengths: tuple[float, ...], noise: float) -> list[dict[str, float]]:
        drawn = random.Random(seed)
        return [
            {
                "parameters": n,
                "tokens": d,
                "loss": (1.8 + 480 / n**0.35 + 2000 / d**0.37) * math.exp(drawn.gauss(0, noise)),
            }
            for n in sizes
            for d in lengths
        ]

    sizes, lengths = (20e6, 60e6, 200e6, 600e6), (0.5e9, 2e9, 8e9, 32e9)
    cases = {
        "16 runs": made(0, sizes, lengths, 0.003),
        "9 runs": made(1, sizes[:3], lengths[:3], 0.01),
        "exact": made(0, sizes, lengths, 0.0),
        "of sizes": made(2, (*sizes, 1e9, 3e9, 5e9, 9e9), lengths[:1], 0.003),
        "of lengths": made(3, sizes[:1], (*lengths, 5e10, 7e10, 1e11, 2e11), 0.003),
        "too few": made(0, sizes[:2], lengths[:2], 0.003),
        "in proportion": [
            {"parameters": n, "tokens": 20 * n, "loss": 2 + 400 / n**0.3} for n in range(10**7, 10**8, 10**7)
        ],
    }
    for name, runs in cases.items():
        fit = book.write(f"fit {name}", lambda runs=runs: shown(sk.fit_scaling(runs)))
        if fit is not None:
            found: Any = fit["parts"]
            book.write(f"fit {name}: runs", found.runs_table)
            book.write(f"fit {name}: plot", found.plot)
            book.write(
                f"fit {name}: losses", lambda f=found: [shown(f.loss(n, d)) for n, d in ((6e8, 12e9), (7e9, 140e9))]
            )
            book.write(f"fit {name}: optimal", lambda f=found: shown(f.optimal(1e22)))
            book.write(f"fit {name}: tokens", lambda f=found: shown(f.tokens_for(2.5, 6e8)))
    book.write("fit with the paper's threshold", lambda: shown(sk.fit_scaling(cases["16 runs"], huber=1e-3)))


def _functions(book: Book) -> None:
    rates = {1: 100.0, 2: 190.0, 4: 350.0, 8: 600.0}
    book.write("efficiency", lambda: planner.efficiency(rates))
    book.write("speedup", lambda: shown(planner.fit_speedup(rates)))
    book.write("speedup of two", lambda: shown(planner.fit_speedup({1: 100.0, 8: 640.0})))
    book.write("loss at doublings", lambda: planner.loss_at_doublings(rates))
    book.write(
        "goodput", lambda: planner.expected_goodput(16384, gpu_mtbf_hours=5e4, save_minutes=0.5, restart_minutes=5)
    )
    for case in ((405e9, 15.6e12, "H100", 30.84e6), (8.03e9, 15e12, "H100", 1.46e6), (70e9, 15e12, "H100", 1e5)):
        book.write(f"judge {case}", lambda case=case: shown(planner.judge_hours(*case)))
    book.write("gain", lambda: [planner.recipe_gain(100, 60, 1.8, 5), planner.recipe_gain(100, 60, 0.5)])
    for compute in (90.0, 360.0):
        for given in ({}, {"update_interval": 1}, {"overlap_step": False}, {"topk_ratio": 0.5, "slots": 5}):
            key = f"predict offload {compute} {given}"
            book.write(key, lambda c=compute, g=given: shown(planner.predict_offload(c, 1.7e9, HOST, **g)))
    for family in FAMILIES:
        book.write(f"shape {family}", lambda f=family: planner.read_shape(fields(f)))
        shape, _ = planner.read_shape(fields(family))
        for recompute in RECOMPUTE:
            counted = partial(planner.count_flops, shape, length=96, recompute=recompute)
            book.write(f"FLOPs {family} {recompute}", counted)
    for name in ("H100", "nvidia h100 80gb hbm3", "cpu", "H1000", ""):
        book.write(f"find {name!r}", lambda name=name: planner.find_gpu(name))


def _refused(book: Book) -> None:
    asked: list[tuple[Any, dict[str, Any]]] = [
        (405, {}),
        (-1, {}),
        (True, {}),
        ("lama-3.1-8b", {}),
        ({"model_type": "llama"}, {}),
        ({**LLAMA_1B, "model_type": "unheard-of"}, STEP),
        ({**LLAMA_1B, "model_type": "some_moe", "num_experts": 4}, STEP),
        (None, {}),
        *((LLAMA_1B, {**RUN, **wrong}) for wrong in WRONG),
    ]
    for what, given in asked:
        told = {k: v for k, v in given.items() if RUN.get(k) is not v}
        book.write(f"refused {str(what)[:40]} {told} {len(given)}", partial(planned, what, **given))


WRONG: tuple[dict[str, Any], ...] = (
    {"mfu": 40},
    {"mfu": 0.4, "tflops_per_gpu": 400},
    {"mfu": None, "tflops_per_gpu": 400e12},
    {"mfu": 0.4, "gpu": None},
    {"gpu": "H1000"},
    {"gpu": 3},
    {"gpus": 0},
    {"gpus": 1.5},
    {"batch": 0},
    {"length": -1},
    {"tokens": 1},
    {"goodput": 90},
    {"zero": 4},
    {"slack": -1},
    {"recipe": "fp9"},
    {"optimizer": "adam"},
    {"dtype": "int3"},
    {"recompute": "some"},
    {"attention": "half"},
    {"logits": "none"},
    {"layers": "mine"},
    {"transposed": "always"},
    {"fusion": "all"},
    {"graphs": 1},
    {"graphs": True, "gpu": "cpu", "mfu": None},
    {"accumulate": 0},
    {"offload_weights": -1},
    {"offload_activations": 2},
    {"between_gb_s": 5e10},
    {"usd_per_gpu_hour": -2},
    {"usd_per_gpu_hour": (3, 2)},
    {"training": False, "recompute": "full"},
    {"state_dtype": "fp3"},
)


def _at_random(book: Book, count: int = 250) -> None:
    """Arguments drawn together, so that what only meets in pairs is asked as well."""
    axes: dict[str, list[Any]] = {
        "gpu": ["H100", "B200", "A100", "RTX 4090", "T4", MINE, CPU, None],
        "recipe": [None, None, *recipes().values()],
        "batch": [1, 3, 16, None],
        "length": [64, 1000, 8192, None],
        "tokens": [None, 1e9],
        "gpus": [1, 1, 8, 256],
        "optimizer": [None, "adamw8bit", "sgd", "zenflow", "offloadadamw", sk.ZenFlow(topk_ratio=0.3)],
        "state_dtype": [None, None, "fp32", "bf16"],
        "dtype": [None, None, "fp32", "fp16"],
        "master": [False, False, True],
        "zero": [0, 0, 1, 2, 3],
        "recompute": [None, None, "full", "selective"],
        "fusion": [None, None, "fused", sk.Fusion().without("norm")],
        "graphs": [None, None, True],
        "transposed": [None, None, "cached", "on the fly"],
        "layers": [None, None, "transformers"],
        "logits": [None, None, "whole"],
        "accumulate": [None, None, 3],
        "training": [True, True, True, False],
        "offload_weights": [None, None, None, True, 2],
        "offload_activations": [None, None, None, True],
        "between_gb_s": [None, 40.0],
    }
    subjects = [*(fields(family) for family in FAMILIES), LLAMA_1B, QWEN3_8B, "llama-3.1-8b", 8e9]
    drawn = random.Random(0)
    for i in range(count):
        what = drawn.choice(subjects)
        given = {name: drawn.choice(values) for name, values in axes.items()}
        book.write(f"at random {i}", partial(planned, what, **{k: v for k, v in given.items() if v is not None}))
