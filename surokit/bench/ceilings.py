"""Measure what a device reaches at best: a copy, large products, and the products of one model's shapes.

The rates of the device are `surokit.calibrate`'s. The products are those of a forward pass over one micro-batch, in
bfloat16 and in FP8 with one scale an operand: the best that the layers of that model can reach, which is less than a large
square product does.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from surokit import calibration
from surokit.bench.result import markdown
from surokit.kernels import native


def device_ceilings(device: torch.device, seconds: float, cache: bool = False) -> dict[str, Any]:
    """Measure the device: {"gpu": the result of Gpu.to_json(), "notes": what could not be measured}, rates beside the
    datasheet's."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gpu = calibration.calibrate(device, seconds, cache, refresh=True, progress=False)
    return {"gpu": json.loads(gpu.to_json()), "notes": [str(w.message) for w in caught]}


def run(seconds: float = 20.0) -> dict[str, Any]:
    """Return the raw result of `calibrate` on the device at hand, measured anew; it is kept for later plans on this machine
    too.

    `surokit.Gpu.from_json(json.dumps(data["ceilings"]["gpu"]))` is the device for a plan on any machine.
    """
    from surokit.environment import environment

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "benchmark": "ceilings: what the device reaches",
        "settings": {"seconds": seconds},
        "environment": environment(),
        "ceilings": device_ceilings(device, seconds, cache=True),
    }


def table(data: Mapping[str, Any]) -> str:
    """Make a row a rate: the rate that was reached, the datasheet's peak where there is one, and the share."""
    gpu = data["ceilings"]["gpu"]
    reached = {name: value for name, value in gpu["ceilings"].items() if isinstance(value, int | float)}
    rows = [
        [
            name,
            f"{value:.4g}",
            f"{gpu[name]:.4g}" if name in gpu else "",
            f"{value / gpu[name]:.0%}" if name in gpu else "",
        ]
        for name, value in reached.items()
    ]
    return "\n\n".join([markdown(data, ["rate", "reached", "datasheet", "share"], rows), *data["ceilings"]["notes"]])


def products_of(shape: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the matrices of a model, (in, out) features, siblings that read one input side by side."""
    width, heads, keys = shape["width"], shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
    return {
        "q, k, v": (width, heads + 2 * keys),
        "o": (heads, width),
        "gate, up": (width, 2 * shape["ffn"]),
        "down": (shape["ffn"], width),
        "head": (width, shape["vocab"]),
    }


def model_ceilings(shape: Mapping[str, Any], tokens: int, device: torch.device, seconds: float) -> dict[str, Any]:
    """Measure the products of a model: {"tokens", "products": [{"product", "k", "n", "bf16_tflops", "fp8_tflops"}]}; fp8
    None where it is emulated."""
    fp8 = native.available("tensor", device)
    kinds = ("bf16", "fp8") if fp8 else ("bf16",)
    matrices = products_of(shape)
    rows = []
    for name, (k, n) in matrices.items():
        row: dict[str, Any] = {"product": name, "k": k, "n": n, "bf16_tflops": None, "fp8_tflops": None}
        for kind in kinds:
            call = _product(kind, tokens, k, n, device)
            each_s = calibration.median_s(call, device, seconds / len(matrices) / len(kinds))
            row[f"{kind}_tflops"] = float(f"{2 * tokens * k * n / each_s / 1e12:.4g}")
        rows.append(row)
    return {"tokens": tokens, "products": rows}


def _product(kind: str, tokens: int, k: int, n: int, device: torch.device) -> Any:
    generator = torch.Generator(device).manual_seed(0)

    def normal(rows: int) -> Tensor:
        # normal numbers, as in training: a chip's clock depends on the bits that flip
        return torch.randn(rows, k, device=device, generator=generator).to(torch.bfloat16)

    x_TK, w_NK = normal(tokens), normal(n)
    if kind == "bf16":
        return lambda: torch.mm(x_TK, w_NK.t())
    one = torch.ones(1, 1, device=device)
    x_q, w_q = x_TK.to(torch.float8_e4m3fn), w_NK.to(torch.float8_e4m3fn)
    return lambda: native.scaled_mm(x_q, one, w_q, one, out_dtype=torch.bfloat16)
