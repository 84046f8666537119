"""How long a linear layer's three products are planned to take: the yardstick for whether a format pays for a layer.

Each product takes the larger of FLOPs over the GPU's dense peak for its kind and bytes over its bandwidth, and each quantized
operand is read in 16 bits and written in its own once more. A product that the GPU does not compute itself is taken as
bfloat16's. Launches and the fusion of quantization into other kernels are left out. Planned, never measured.

T tokens, K in_features, N out_features.
"""

from __future__ import annotations

from typing import Any

from surokit.planner.flops import operand_bits
from surokit.planner.hardware import Gpu


def linear_seconds(recipe: Any, n: int, k: int, tokens: int, *, trains: bool, gpu: Gpu) -> float:
    """Seconds of the products on `gpu`, with the quantization of their operands. trains: the weight has a gradient.

    Raises ValueError where nobody vouched for the GPU's peak.
    """
    from surokit.recipe import ROLES

    size = {"x": tokens * k, "w": n * k, "dy": tokens * n}
    out = {"forward": tokens * n, "grad_input": tokens * k, "grad_weight": n * k}
    flop = 2.0 * n * k * tokens
    rate = (gpu.bandwidth_tb_s or float("inf")) * 1e12
    total = 0.0
    for name, roles in ROLES.items():
        if name == "grad_weight" and not trains:
            continue
        gemm = getattr(recipe, name)
        bits = operand_bits(gemm) if gpu.multiplies(gemm.kind) else 16
        tflops, _ = gpu.peak(gemm.kind)
        if tflops is None:
            raise ValueError(f"Nobody vouched for a peak of {gpu.name}: give Gpu({gpu.name!r}, bf16_tflops=...).")
        moved = sum(size[role] for role in roles) * bits / 8 + 2 * out[name]
        total += max(flop / (tflops * 1e12), moved / rate)
        total += sum(size[role] * (2 + q.bits / 8) / rate for role, q in zip(roles, (gemm.a, gemm.b)) if q)
    return total
