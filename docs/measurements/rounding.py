"""Show how far roundings of NVFP4 are from what they round, one draw alone and the mean of many: error and bias.

The raw file, docs/measurements/rounding.json, comes from tests/soak/test_rounding.py. The relative squared error of a mean of n
draws falls as 1 / n where the rounding is unbiased; where it stops falling, what is left is the bias. Everything here follows from
that file: the same file gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from surokit.bench.result import markdown
from surokit.formats import E2M1, E4M3
from surokit.kernels.reference.quantize import round_stochastic
from surokit.quantized import quantize
from surokit.quantizer import NV, Quantizer

Rounds = Callable[[Tensor, int], Tensor]
_X = Quantizer(E2M1, NV(16))


def _roomy(x_MK: Tensor, seed: int) -> Tensor:
    """Return one draw of stochastic rounding as Quartet II compares with: scales 17/16 as large, so that rounding one down cuts
    nothing."""
    amax, blocks = x_MK.abs().amax(), x_MK.unflatten(1, (-1, 16))
    reach = E2M1.max * 16 / 17
    scale = amax / (E4M3.max * reach)
    by_block = (blocks.abs().amax(2, keepdim=True) / reach / scale).to(torch.float8_e4m3fn).float() * scale
    key = torch.randint(2**31, (2,), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))
    drawn = round_stochastic((blocks / by_block.clamp(min=1e-30)).clamp(-E2M1.max, E2M1.max), E2M1, key)
    return (drawn * by_block).flatten(1)


ROOMY: Rounds = _roomy

#: name -> a quantizer, or a function of a matrix and a seed
ROUNDINGS: dict[str, Quantizer | Rounds] = {
    "to nearest": _X,
    "to nearest, four over six": Quantizer(E2M1, NV(16), four_over_six="mse"),
    "stochastic (`fp4`)": Quantizer(E2M1, NV(16), rounding="stochastic"),
    "stochastic, scales 17/16": ROOMY,
    "MS-EDEN (`quartet-ii`)": Quantizer(E2M1, NV(16), rounding="eden", hadamard=128),
}


def errors(x_MK: Tensor, q: Quantizer | Rounds, counts: Sequence[int]) -> dict[int, float]:
    """Return by each of the counts, ascending, |mean of so many draws - x|^2 / |x|^2; draw i has the seed i."""
    total, found = torch.zeros_like(x_MK, dtype=torch.float64), {}
    for i in range(counts[-1]):
        total += quantize(x_MK, q, seed=i).dequantize() if isinstance(q, Quantizer) else q(x_MK, i)
        if i + 1 in counts:
            found[i + 1] = float((total / (i + 1) - x_MK).square().sum() / x_MK.double().square().sum())
    return found


def table(data: Mapping[str, Any]) -> str:
    """Make a Markdown table: a row for each rounding of each kind of matrix, its error by the number of draws."""
    counts = list(next(iter(next(iter(data["rounding"].values())).values())))
    rows = [
        [
            matrix,
            name,
            *(f"{1e3 * error[n]:.3f}" for n in counts),
            f"{int(counts[-1]) * error[counts[-1]] / error['1']:.1f}",
        ]
        for matrix, by_rounding in data["rounding"].items()
        for name, error in by_rounding.items()
    ]
    words = [f"mean of {int(n):,}" if n != "1" else "one draw" for n in counts]
    return markdown(data, ["matrix", "rounding", *(f"{w}, 1e-3" for w in words), "n x last / first"], rows)
