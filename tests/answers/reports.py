"""What is said of a model: what a recipe, a fusion or an offload made of it, how accurate it is, what tuning found."""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import nn

import surokit as sk
from tests.answers.book import Book, shown
from tests.answers.plans import recipes
from tests.answers.runs import decoder

IDS = torch.randint(320, (2, 24), generator=torch.Generator().manual_seed(1))
CLOCKED = ("stalls", "stall", "device_stall_ms", "threads")  # of an offload's report, what a clock had a part in
BATCH = {"input_ids": IDS, "labels": IDS}


def plain_net() -> nn.Module:
    """Linear layers of any network, odd sizes and biases among them."""
    torch.manual_seed(0)
    layers = {
        "q_proj": nn.Linear(64, 96),
        "act": nn.GELU(),
        "v_proj": nn.Linear(96, 50, bias=False),
        "norm": nn.LayerNorm(50),
        "down_proj": nn.Linear(50, 7),
        "head": nn.Linear(7, 5),
    }
    return nn.Sequential(OrderedDict(layers)).to(torch.bfloat16)


def write(book: Book) -> None:
    """All of them."""
    for name, recipe in recipes().items():
        book.write(f"apply {name} to a Decoder", lambda r=recipe: _applied(decoder(), r))
        book.write(f"apply {name} to a network", lambda r=recipe: _applied(plain_net(), r))
        book.write(f"precision {name}", lambda r=recipe: _within(r))
    for name, recipe in sk.recipes.items():
        for fusion in (sk.Fusion(), sk.Fusion(recompute="full"), sk.Fusion().without("gate"), sk.Fusion.OFF):
            book.write(f"fuse {name} {fusion}", lambda r=recipe, f=fusion: _fused(decoder(), r, f))
        book.write(f"tune {name}", lambda r=recipe: _tuned(r))
    for gpu in ("H100", "B200", None):
        book.write(f"tune for {gpu}", lambda gpu=gpu: shown(sk.tune(decoder(), BATCH, gpu=gpu, max_gap=0.002)))
    book.write("fuse a network", lambda: shown(sk.fuse(plain_net())))
    book.write("compare", lambda: sk.compare(decoder(), BATCH, *sk.recipes))
    book.write("compare nothing", lambda: sk.compare(decoder(), BATCH))
    book.write("apply what there is not", lambda: sk.apply(decoder(), "fp9"))
    book.write("merged", _merged)
    book.write("folders of models", _saved)
    book.write("quantized", _quantized)
    for optimizer in (sk.ZenFlow, sk.OffloadAdamW):
        book.write(f"offload {optimizer.__name__}", lambda o=optimizer: _offloaded(o))
    book.write("doctor", lambda: [(f.group, f.name) for f in sk.doctor().findings])
    book.write("kernels", lambda: sk.kernels.choices("cpu"))


def _applied(model: nn.Module, recipe: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    report = sk.apply(model, recipe)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    return {**shown(report), "model": str(model), "state": model.state_dict(), "trained": trained, **_products(model)}


def _products(model: nn.Module) -> dict[str, Any]:
    """A forward and a backward: the outputs, and every gradient."""
    torch.manual_seed(0)
    if isinstance(model, sk.Decoder):
        out = model(IDS, labels=IDS).loss
    else:
        out = model(torch.randn(8, 64, dtype=torch.bfloat16)).float().square().sum()
    if out.requires_grad:
        out.backward()
    return {"out": out, "gradients": {name: p.grad for name, p in model.named_parameters()}}


def _within(recipe: Any) -> dict[str, Any]:
    model = decoder()
    with torch.no_grad():
        with sk.precision(model, recipe) as inside:
            found = inside(IDS, labels=IDS).loss
        return {"inside": found, "outside": model(IDS, labels=IDS).loss, "model": str(model)}


def _fused(model: sk.Decoder, recipe: sk.Recipe, fusion: sk.Fusion) -> dict[str, Any]:
    torch.manual_seed(0)
    sk.apply(model, recipe)
    return {**shown(sk.fuse(model, fusion)), "model": str(model), "state": model.state_dict(), **_products(model)}


def _tuned(recipe: sk.Recipe) -> dict[str, Any]:
    found = sk.tune(decoder(), BATCH, recipes=[recipe], points=4)
    return {**shown(found), "plot": found.plot()}


def _merged() -> dict[str, Any]:
    found = {}
    for name, recipe in recipes().items():
        model = decoder()
        torch.manual_seed(0)
        sk.apply(model, recipe)
        if any("lora_B" in key for key, _ in model.named_parameters()):
            with torch.no_grad():
                for key, p in model.named_parameters():
                    if "lora_B" in key:
                        p.normal_(generator=torch.Generator().manual_seed(2), std=0.02)
            found[name] = [sk.merge(model), model.state_dict(), sk.unmerge(model), model.state_dict()]
    return found


def _saved() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("bf16", "fp8-block", "qfp8", "qfp4", "qnf4", "mxfp4"):
        model = decoder()
        torch.manual_seed(0)
        sk.apply(model, sk.recipes[name])
        if any("lora_B" in key for key, _ in model.named_parameters()):
            sk.merge(model, requantize=True, keep=False)
        with tempfile.TemporaryDirectory() as folder:
            sk.save(model, folder)
            files = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
            again = sk.load(folder, device="cpu")
            found[name] = {
                "files": {file: torch.frombuffer(bytearray(data), dtype=torch.uint8) for file, data in files.items()},
                "config": files["config.json"].decode(),
                "again": again.state_dict(),
                "model": str(again),
            }
    return found


def _quantized() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(160, 256, generator=generator) * torch.logspace(-6, 4, 160)[:, None]
    x[3], x[5, :16], x[7, 9] = 0, 0, 1e30
    ways: list[sk.Quantizer] = [
        *(sk.Quantizer(f, sk.PerTensor()) for f in (sk.E4M3, sk.E5M2)),
        *(sk.Quantizer(f, sk.PerRow()) for f in (sk.E4M3, sk.E5M2)),
        *(sk.Quantizer(f, sk.MX()) for f in (sk.E4M3, sk.E5M2, sk.E2M1)),
        *(sk.Quantizer(sk.E4M3, sk.Block(128, 128, pow2=pow2)) for pow2 in (True, False)),
        *(sk.Quantizer(sk.E2M1, sk.NV(16, rows)) for rows in (1, 16)),
        sk.Quantizer(sk.E2M1, sk.NV(), four_over_six="mse"),
        *(sk.Quantizer(sk.NF4, sk.NFBlock(64, double)) for double in (0, 256)),
    ]
    found: dict[str, Any] = {}
    for way in ways:
        for dtype in (torch.float32, torch.bfloat16):
            made = sk.quantize(x.to(dtype), way)
            found[f"{way} {dtype}"] = {"said": str(made), "parts": made, "decoded": made.dequantize(torch.float32)}
    return found


def _offloaded(optimizer: Any) -> dict[str, Any]:
    model = decoder()
    made = optimizer(model.parameters(), lr=1e-3)
    for _ in range(6):
        model(IDS, labels=IDS).loss.backward()
        made.step()
        made.zero_grad()
    said = made.report()
    parts = {name: value for name, value in vars(said).items() if name not in CLOCKED}
    return {"parts": parts, "state": model.state_dict()}
