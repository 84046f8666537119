"""Choose the implementation of an operation: this is the one door to the kernels, and it serves the best one for the device.

Every operation has its definition in `kernels/reference` (plain PyTorch, any device). Where a device has something faster
that gives the same numbers, it is taken: `ops.py` registers the operations with torch, `native.py` holds the products that
tensor cores compute themselves. `choices(device)` says what is taken and why.

Matrices are [M, K] with the contracted dimension last; scales multiply codes. R x C is the grid of tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

if not (
    Path(__file__).parent / "reference"
).is_dir():  # not a wheel: the checkout's folder kernels/ is the rest of this package
    __path__.append(str(Path(__file__).parents[2] / "kernels"))

from surokit.kernels import native
from surokit.kernels.ops import OPERATIONS, best, only_reference, serving
from surokit.kernels.reference import adamw, adamw8bit, columns, delayed, loss, matmul, norm, qk, rope, swiglu
from surokit.kernels.reference import random as draws

_ops = torch.ops.surokit


# they have no schema: torch.compile fuses the formulas of a model and an optimizer by itself, and meets no amax in force
FUSED = {
    "quantize, delayed": delayed.quantize,
    "quantize, delayed, both ways": delayed.quantize_both,
    "rms_norm": norm.forward,
    "rms_norm of a sum": norm.add_forward,
    "rms_norm, once more": norm.recompute,
    "rms_norm backward": norm.backward,
    "rms_norm, quantized": norm.forward_quantized,
    "swiglu": swiglu.forward,
    "swiglu backward": swiglu.backward,
    "swiglu, quantized": swiglu.forward_quantized,
    "rope": rope.rotate,
    "qk_norm and rope": qk.forward,
    "qk_norm and rope backward": qk.backward,
    "linear_cross_entropy": loss.forward,
    "adamw": adamw.adamw_,
    "adamw8bit": adamw8bit.adamw8bit_,
    "adamw of columns": columns.update_columns_,
    "columns gathered": columns.gather,
    "columns scattered": columns.scatter_,
}


# AdamW takes torch's fused kernel
NOT_TAKEN = {"adamw"}


@dataclass(frozen=True)
class Choice:
    """A Choice says what serves an operation on a device, and why; `missed` says why a faster form is not used."""

    op: str
    backend: str
    why: str
    missed: str = ""


def choices(device: torch.device | str | None = None) -> list[Choice]:
    """Return one row an operation for `device` (default: CUDA if there is one). ValueError for CUDA where there is none."""
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"torch {torch.__version__} finds no CUDA device here to choose for: choices('cpu') lists this machine's."
        )
    rows = [Choice("product bf16", *matmul.choice(device))]
    rows += [Choice(f"product {kind}", *native.choice(kind, device)) for kind in native.KINDS]
    functions = {op.name: op.reference for op in OPERATIONS.values()} | FUSED
    for name, function in functions.items():
        folder, _, why, missed = serving(function, device)
        why = f"{why}; no layer or optimizer takes it yet" if name in NOT_TAKEN else why
        rows.append(Choice(name, folder, why, missed))
    return rows


# -- codes and scales; the meaning of every argument stands in kernels/reference

quantize = _ops.quantize
quantize_both = _ops.quantize_both
dequantize = _ops.dequantize
quantize_mx = _ops.quantize_mx
quantize_mx_both = _ops.quantize_mx_both
dequantize_mx = _ops.dequantize_mx
quantize_nv = _ops.quantize_nv
quantize_nv_rotated = _ops.quantize_nv_rotated
quantize_nv_eden = _ops.quantize_nv_eden
dequantize_nv = _ops.dequantize_nv
factors_nv = _ops.factors_nv
quantize_nf4 = _ops.quantize_nf4
dequantize_nf4 = _ops.dequantize_nf4
rotate = _ops.rotate
rotate_drawn = _ops.rotate_drawn
transpose_fp8 = _ops.transpose_fp8
transpose_fp4 = _ops.transpose_fp4


def amax(x_MK: Tensor, rows: int = 0, columns: int = 0) -> Tensor:
    """Return the largest magnitude of each tile of rows x columns, float32 [R, C]; 0 is the whole extent."""
    return _ops.amax(x_MK, rows, columns)


def values(codes: Tensor) -> Tensor:
    """Return the numbers that float8 codes stand for, in bfloat16, exactly."""
    found: Tensor = _ops.values(codes)
    return found


def new_key(device: torch.device, generator: torch.Generator | None = None, seed: int | None = None) -> Tensor:
    """Return a key for stochastic rounding, int32 [2] on `device`: from `seed`, `generator` or torch's random state."""
    return draws.new_key(device, source_of_draws(generator, seed))


def source_of_draws(generator: torch.Generator | None = None, seed: int | None = None) -> torch.Generator | None:
    """Return the generator to draw several keys from, one begun at `seed` if that is given; None is torch's random state."""
    if seed is None:
        return generator
    if generator is not None:
        raise ValueError("Give stochastic rounding a seed or a generator, not both.")
    return torch.Generator().manual_seed(seed)


# -- products

mm, addmm_, linear = matmul.mm, matmul.addmm_, matmul.linear  # of matrices that are not quantized
through_float32, converts, converting = matmul.through_float32, matmul.converts, matmul.converting
bf16_instructions, PLAIN = matmul.bf16_instructions, matmul.PLAIN
emulated_mm = _ops.emulated_mm  # from bfloat16 factors; see kernels/reference/gemm.py
fp8_mm, nv_mm, nf4_mm = _ops.fp8_mm, _ops.nv_mm, _ops.nf4_mm  # of activations and a frozen weight, decoded on the way

__all__ = [
    "FUSED",
    "OPERATIONS",
    "PLAIN",
    "Choice",
    "addmm_",
    "amax",
    "best",
    "bf16_instructions",
    "choices",
    "converting",
    "converts",
    "linear",
    "mm",
    "new_key",
    "only_reference",
    "serving",
    "source_of_draws",
    "through_float32",
    "values",
]
