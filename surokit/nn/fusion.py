"""Find which fusion holds for a module that reads x: the one that was chosen, where it can be carried out at all."""

from __future__ import annotations

import torch

from surokit.fusion import OFF, Fusion

__all__ = ["OFF", "Fusion", "fusion_for"]
_ALL = Fusion()


def fusion_for(chosen: Fusion | None, x: torch.Tensor) -> Fusion:
    """Return the Fusion for a module that reads x: the chosen one; without a choice all of it on CUDA and nothing elsewhere.

    Nothing is fused under torch.compile, which fuses by itself, under autocast, which would cast in between, and on tensors
    without data.
    """
    fusion = chosen if chosen is not None else _ALL if x.is_cuda else OFF
    off = fusion is OFF or fusion == OFF  # a value: one that was read from a checkpoint is another object
    if off or x.is_meta or torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):
        return OFF
    return fusion
