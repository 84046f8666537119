"""Compute linear + cross-entropy in one operation: a tokens x vocabulary matrix never exists, in forward or in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from surokit.kernels import best
from surokit.kernels.reference import loss as reference

IGNORED = reference.IGNORED


def linear_cross_entropy(x_TK: Tensor, w_VK: Tensor, labels_T: Tensor) -> Tensor:
    """Compute the mean cross-entropy (0-d, float32) of the logits x w' against the labels that are not -100.

    x [T, K], w [V, K] of one dtype, labels [T] int64. The logits live in chunks of at most 2,048 tokens; both gradients are
    made in forward, chunk by chunk, and backward only scales them. Without gradients only the loss is computed.

    If every label is -100 the loss is 0 (torch.nn.functional.cross_entropy gives NaN) and so are the gradients. A label
    outside 0..V-1 other than -100 cannot be refused without reading it on the host: on a CPU torch raises an index error, on
    CUDA a device-side assertion.
    """
    if x_TK.ndim != 2 or w_VK.ndim != 2 or labels_T.ndim != 1:
        raise ValueError(
            f"linear_cross_entropy takes x [T, K], w [V, K] and labels [T], not {_shape(x_TK)}, {_shape(w_VK)} and "
            f"{_shape(labels_T)}: flatten batch and time first."
        )
    if x_TK.shape[1] != w_VK.shape[1] or x_TK.shape[0] != labels_T.shape[0]:
        raise ValueError(
            f"x {_shape(x_TK)}, w {_shape(w_VK)} and labels {_shape(labels_T)} do not fit: x and w share their last "
            "dimension, x and labels their first."
        )
    if labels_T.dtype != torch.int64:
        raise TypeError(f"Labels are int64, not {labels_T.dtype}: use labels.long().")
    if torch.is_autocast_enabled(x_TK.device.type):
        dtype = torch.get_autocast_dtype(x_TK.device.type)
        x_TK, w_VK = x_TK.to(dtype), w_VK.to(dtype)
    loss: Tensor = _LinearCrossEntropy.apply(x_TK, w_VK, labels_T)
    return loss


def _shape(x: Tensor) -> list[int]:
    return list(x.shape)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, w_VK: Tensor, labels_T: Tensor) -> Tensor:
        forward = reference.forward if torch.compiler.is_compiling() else best(reference.forward, x_TK.device)
        loss, dx_TK, dw_VK = forward(x_TK, w_VK, labels_T, *ctx.needs_input_grad[:2])
        ctx.save_for_backward(dx_TK, dw_VK)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:
        # not in place: a second backward over a retained graph must find them unscaled
        return *(g if g is None else g * dloss.to(g.dtype) for g in ctx.saved_tensors), None


def chunked_cross_entropy(
    head: Callable[[Tensor], Tensor], x_TK: Tensor, labels_T: Tensor, vocabulary: int, random: bool = True
) -> Tensor:
    """Compute the same loss through any head x [C, K] -> logits [C, V], for heads that are more than a weight (quantized, adapted).

    A chunk's logits are computed again in backward instead of kept. random: the head may draw random numbers, and draws the
    same ones then; keeping their state is nothing that a CUDA graph can hold.
    """
    # in float32, their logarithms and a gradient
    itemsize = 4 if x_TK.device.type == "cpu" else 12
    rows = reference.chunk_rows(len(labels_T), vocabulary, x_TK.device.type, itemsize)
    total = x_TK.new_zeros((), dtype=torch.float32)
    for x_CK, labels_C in zip(x_TK.split(rows), labels_T.split(rows)):
        total = total + checkpoint(_summed, head, x_CK, labels_C, use_reentrant=False, preserve_rng_state=random)
    return total / (labels_T != IGNORED).sum().clamp(min=1)


def _summed(head: Callable[[Tensor], Tensor], x_CK: Tensor, labels_C: Tensor) -> Tensor:
    return F.cross_entropy(head(x_CK).float(), labels_C, ignore_index=IGNORED, reduction="sum")
