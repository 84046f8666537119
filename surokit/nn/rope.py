"""Rotary position embedding makes its tables once, outside the step, and keeps nothing but them for backward.

The tables are neither parameters nor buffers: they follow the module's device and dtype but are made anew from the
configuration, so a model that went through bfloat16 and back has exact ones, and no checkpoint holds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from surokit.kernels import best
from surokit.kernels.reference import rope as reference

_FIRST_LENGTH = 4096  # tables start no longer than this and double when a longer sequence comes


class RotaryEmbedding(nn.Module):
    """A RotaryEmbedding gives cos and sin [T, E] for the positions 0..T-1 or for given ones; E = head_dim / 2.

    `scaling` is None or a dict as in a Hugging Face config: {"rope_type": "linear", "factor": ...} or {"rope_type":
    "llama3", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}.
    """

    def __init__(
        self,
        head_dim: int,
        theta: float = 10000.0,
        max_length: int = 2048,
        scaling: dict[str, Any] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.head_dim, self.theta, self.max_length, self.scaling = head_dim, theta, max_length, scaling
        probe = torch.empty(0, device=device, dtype=dtype)
        self._build(min(max_length, _FIRST_LENGTH), probe.device, probe.dtype)

    def forward(
        self, T: int, dtype: torch.dtype, position_ids: Tensor | None = None, start: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin [T, E] from position `start` on, or [B, T, E] for position_ids [B, T]."""
        needed = self.max_length if position_ids is not None else start + T
        if needed > self.cos.shape[0]:
            length = max(needed, min(2 * self.cos.shape[0], self.max_length))
            self._build(length, self.cos.device, self.cos.dtype)
        if position_ids is not None:
            cos, sin = self.cos[position_ids], self.sin[position_ids]
        else:
            cos, sin = self.cos[start : start + T], self.sin[start : start + T]
        return cos.to(dtype), sin.to(dtype)

    def _build(self, length: int, device: torch.device, dtype: torch.dtype) -> None:
        frequencies_E = inverse_frequencies(self.head_dim, self.theta, self.scaling).to(device)
        positions_T = torch.arange(length, device=device, dtype=torch.float32)
        angles_TE = torch.outer(positions_T, frequencies_E)
        self.cos, self.sin = angles_TE.cos().to(dtype), angles_TE.sin().to(dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        super()._apply(fn, recurse)
        probe = fn(self.cos[:0])
        if (probe.device, probe.dtype) != (self.cos.device, self.cos.dtype):
            self._build(self.cos.shape[0], probe.device, probe.dtype)
        return self

    def extra_repr(self) -> str:
        kind = f", {self.scaling['rope_type']}" if self.scaling else ""
        return f"head_dim={self.head_dim}, theta={self.theta:g}, max_length={self.max_length}{kind}"


def inverse_frequencies(head_dim: int, theta: float, scaling: dict[str, Any] | None = None) -> Tensor:
    """Return the radians a position [E], float32: theta^(-2i / head_dim), then scaled.

    "linear" divides by the factor. "llama3" (Llama 3.1, section 3.2, as released) divides the frequencies whose wavelength
    exceeds original length / low_freq_factor, leaves those below original length / high_freq_factor, and blends between.
    """
    index_E = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float()
    frequencies_E = 1.0 / (theta ** (index_E / head_dim))
    kind = (scaling or {}).get("rope_type", "default")
    if scaling is None or kind == "default":
        return frequencies_E
    factor = scaling["factor"]
    if kind == "linear":
        return frequencies_E / factor
    if kind != "llama3":
        raise ValueError(f"RoPE scaling {kind!r} is not supported: use one of default, linear, llama3.")
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns_E = scaling["original_max_position_embeddings"] * frequencies_E / (2 * math.pi)
    keep_E = ((turns_E - low) / (high - low)).clamp(0, 1)
    return keep_E * frequencies_E + (1 - keep_E) * frequencies_E / factor


def apply_rope(x_BTHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn every pair (i, i + D/2) of x [B, T, H, D] by its position's angle; cos and sin [T, E] or [B, T, E]."""
    if torch.compiler.is_compiling():
        x1, x2 = x_BTHD.chunk(2, dim=-1)
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)
    y: Tensor = _Rotate.apply(x_BTHD, cos, sin)
    return y


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return best(reference.rotate, x.device)(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return best(reference.rotate, dy.device)(dy, cos, sin, back=True), None, None
