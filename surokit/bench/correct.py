"""Check, before speed is measured, that the fast step computes the same as the plain one on this device.

    fused    loss and gradients of two micro-batches, everything fused, against nothing fused, against float32; in the smoke test
             these two are computed on the CPU, by the definitions
    graphs   steps as CUDA graphs against the same steps launched one by one: losses, gradient norms, labels that count

The model has the widths of the real one and two layers. A fused step rounds elsewhere, so its gradients are not the plain one's
bit for bit; they must not be farther from float32's, by more than CLOSER. A batch of one token repeated, and batches with fewer
labels, take turns with text: a replay that reads an old batch, an old count or an old rate shows at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import surokit as sk
from surokit.bench.configurations import Train
from surokit.convert import apply
from surokit.fusion import OFF, Fusion
from surokit.recipe import Recipe, find_recipe

CLOSER = 1.5  # times the plain step's distance from float32, for loss and for the gradient of every parameter
ELSEWHERE = 2.0  # the same where the plain step is another device's, which rounds and draws elsewhere too
ROUNDING = 2.0**-9  # relative distance that is bfloat16's own
REPLAYED = {"loss": 2e-3, "grad_norm": 2e-2, "targets": 0.0}  # relative distance of a replayed step's values
NOISE = 3.0  # times the distance of two eager runs, where additions come in another order each time
LAYERS, VOCABULARY = 2, 32768


def recipe_of(name: str, train: Train, rank: int, alpha: float = 32.0, fast_dx: bool = False) -> Recipe:
    """Return the named recipe; with an adapter, or without the one that it may bring, so that `train` is what trains.

    fast_dx: tensor cores sum the products of grad_input with the precision of forward's.
    """
    recipe = find_recipe(name)
    if fast_dx:
        recipe = replace(recipe, grad_input=replace(recipe.grad_input, fast_accumulation=True))
    return recipe.lora(rank=rank, alpha=alpha) if train == "lora" else recipe


def small(shape: Mapping[str, Any], length: int) -> sk.DecoderConfig:
    """Return the model at full width with two layers and a smaller vocabulary."""
    layers, vocab = min(LAYERS, shape["layers"]), min(VOCABULARY, shape["vocab"])
    return sk.DecoderConfig(**{**shape, "layers": layers, "vocab": vocab}, max_length=length)


def check(
    shape: Mapping[str, Any],
    recipe: str,
    train: Train,
    device: torch.device,
    rank: int,
    length: int,
    steps: int,
    definition: str | None = None,
) -> dict[str, Any]:
    """Check a step: {"fused": ..., "graphs": ...}, each with "ok" and every distance behind it; rows of `length` tokens, so
    many steps.

    definition: the device that the plain step is computed on, "cpu" for the definitions; None is `device`.
    """
    config, made = small(shape, length), recipe_of(recipe, train, rank)
    plain = device if definition is None else torch.device(definition)
    return {"fused": _fused(config, made, device, plain), "graphs": _graphs(config, made, steps, device)}


# -- fused against apart


def _fused(
    config: sk.DecoderConfig, recipe: Recipe, device: torch.device, plain_device: torch.device
) -> dict[str, Any]:
    plain_recipe = recipe_of("bf16", "lora", recipe.adapter.rank) if recipe.adapter else sk.BF16
    light_loss, light = _gradients(config, plain_recipe, OFF, torch.float32, plain_device)
    plain_loss, plain = _gradients(config, recipe, OFF, torch.bfloat16, plain_device)
    fused_loss, fused = _gradients(config, recipe, Fusion(), torch.bfloat16, device)
    fused = {name: grad.to(plain_device) for name, grad in fused.items()}
    closer = CLOSER if device == plain_device else ELSEWHERE
    far = {name: (_distance(fused[name], light[name]), _distance(plain[name], light[name])) for name in light}
    # NaN is never within a bound
    wrong = sorted(name for name, (f, p) in far.items() if not f <= closer * p + ROUNDING)
    f, p = (abs(loss / light_loss - 1) for loss in (fused_loss, plain_loss))
    ok = fused.keys() == plain.keys() == light.keys() and not wrong and f <= closer * p + ROUNDING
    worst = max(far, key=lambda name: far[name][0] / (closer * far[name][1] + ROUNDING))
    return {
        "ok": ok,
        "loss": {"float32": light_loss, "apart": plain_loss, "fused": fused_loss},
        "gradients": len(far),
        "worst": {"name": worst, "fused": far[worst][0], "apart": far[worst][1]},
        "between": max(_distance(fused[name], plain[name]) for name in plain),
        "wrong": wrong[:8],
    }


def _gradients(
    config: sk.DecoderConfig, recipe: Recipe, fusion: Fusion, dtype: torch.dtype, device: torch.device
) -> tuple[float, dict[str, Tensor]]:
    """Return the mean loss and the gradient of each parameter over two micro-batches: the second has scales from the first."""
    model = model_of(config, recipe, dtype, device)
    sk.fuse(model, fusion)
    losses = []
    for batch in _batches(config, 2, device):
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.detach())
    grads = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    return float(torch.stack(losses).mean()), grads


def model_of(config: sk.DecoderConfig, recipe: Recipe, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Make the same weights for every recipe and dtype, all of them numbers of bfloat16; adapters that add something."""
    torch.manual_seed(0)
    model = sk.Decoder(config, device=device, dtype=torch.bfloat16).to(dtype)
    torch.manual_seed(1)
    apply(model, recipe)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("lora_A.weight", "lora_B.weight")):
                std = 0.02 if "lora_B" in name else p.shape[1] ** -0.5
                p.copy_((std * torch.randn(p.shape, generator=generator)).to(torch.bfloat16))
    return model.train()


def _distance(a: Tensor, b: Tensor) -> float:
    """Return |a - b| / |b|; infinite where b is nothing and a is not."""
    gap, size = float((a - b).norm()), float(b.norm())
    return gap / size if size else (math.inf if gap else 0.0)


def _batches(config: sk.DecoderConfig, count: int, device: torch.device | str = "cpu") -> Iterator[dict[str, Tensor]]:
    """Yield batches [2, max_length] that no replay of another can be taken for: other tokens, one token only, fewer labels."""
    generator = torch.Generator().manual_seed(3)
    for i in range(count):
        ids = torch.randint(config.vocab, (2, config.max_length), generator=generator)
        if i % 3 == 2:
            ids = torch.full_like(ids, 7 + i)
        labels = ids.clone()
        labels[:, : 1 + i % 5] = -100
        yield {"input_ids": ids.to(device), "labels": labels.to(device)}


# -- replayed against launched


def _graphs(config: sk.DecoderConfig, recipe: Recipe, steps: int, device: torch.device) -> dict[str, Any]:
    runs, reason = {}, ""
    for name in ("eager", "again", "graphs"):
        model = model_of(config, recipe, torch.bfloat16, device)
        sk.fuse(model, Fusion())
        session = sk.Session(
            model,
            list(_batches(config, 2 * steps)),
            optimizer=sk.AdamW(lr=1e-3),
            accumulate=2,
            schedule=sk.Cosine(warmup=2, steps=100),
            compile=False,
            graphs="auto" if name == "graphs" else False,
        )
        run(session, steps)
        runs[name] = {column: session.records.column(column).tolist() for column in REPLAYED}
        reason = not_captured(session)
    gaps, noise = _gaps(runs["graphs"], runs["eager"]), _gaps(runs["again"], runs["eager"])
    return {
        "ok": all(gaps[column] <= max(bound, NOISE * noise[column]) for column, bound in REPLAYED.items()),
        "captured": not reason,
        "reason": reason,
        "same_bits": runs["graphs"] == runs["eager"],
        "gaps": gaps,
        "noise": noise,
        "runs": runs,
    }


def run(session: sk.Session, steps: int) -> None:
    """Take so many steps, all of them: a session catches an interrupt for itself, which is raised again here, so that a
    rehearsal in this process ends too."""
    before = session.steps
    session.run(steps)
    if session.steps < before + steps:
        raise KeyboardInterrupt


def _gaps(a: Mapping[str, list[float]], b: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the largest relative distance of each column."""
    return {name: max(abs(x - y) / max(abs(y), 1e-12) for x, y in zip(a[name], b[name])) for name in a}


def not_captured(session: sk.Session) -> str:
    """Return why the session's steps are no CUDA graphs; "" where they are."""
    return "" if session.graphs.state == "on" else session.graphs.why
