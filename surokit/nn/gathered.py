"""Gathered is the weight of a layer for its turn, where the model is sharded and codes were gathered in place of its numbers.

FSDP2 puts it where the parameter stands (surokit/parallel/gather.py makes it). To autograd it is a weight [N, K] of the parameter's
dtype that gets a dense gradient, and the products take what it holds (`linear_gemms.weight`). Any other operation is an error where
that is codes: the numbers that they decode to are not those of the weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surokit.quantized import Quantized
from surokit.torch_private import make_wrapper_subclass, tree_map_only


@dataclass(frozen=True, eq=False)
class GatheredCodes(Quantized):
    """GatheredCodes are those of a weight of which no process holds all numbers.

    amax: float32 [1, 1], the largest magnitude of the whole weight, where delayed scaling wants to know it.
    """

    amax: Tensor | None = None


class Gathered(Tensor):
    """A Gathered is a weight [N, K] that holds codes, or the numbers themselves; what it holds changes with each gather."""

    held: GatheredCodes | Tensor

    @staticmethod
    def __new__(cls, held: GatheredCodes | Tensor, dtype: torch.dtype) -> Gathered:
        device = held.codes.device if isinstance(held, GatheredCodes) else held.device
        made: Gathered = make_wrapper_subclass(cls, held.shape, dtype=dtype, device=device)
        return made

    def __init__(self, held: GatheredCodes | Tensor, dtype: torch.dtype) -> None:
        self.held = held

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Say what is held, and none of it: outside of the layer's turn its memory is another's."""
        what = f"codes {self.held.quantizer}" if isinstance(self.held, GatheredCodes) else "numbers"
        return f"Gathered({tuple(self.shape)}, {what}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        whole = func is torch.ops.aten.as_strided.default and tuple(args[1]) == tuple(args[0].shape)
        if whole or func is torch.ops.aten.detach.default:  # how FSDP2 makes a parameter of it
            return Gathered(args[0].held, args[0].dtype)

        def numbers(t: Gathered) -> Tensor:
            if isinstance(t.held, GatheredCodes):
                raise RuntimeError(
                    f"A weight was gathered as codes, which serve the products of its layer, and {func.name()} wants its numbers "
                    "(under autocast that is a cast): leave out communicate='codes' of surokit.Parallel."
                )
            return t.held

        args, kwargs = tree_map_only(Gathered, numbers, (args, kwargs))
        return func(*args, **kwargs)


class _OfNoTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w_NK: Tensor) -> Tensor:
        ctx.shapes = x.shape, w_NK.shape
        return x.new_zeros((*x.shape[:-1], w_NK.shape[0]))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        dx, dw_NK = (grads[0].new_zeros(shape) for shape in ctx.shapes)
        return dx, dw_NK


def of_no_tokens(x: Tensor, w_NK: Gathered) -> Tensor:
    """Return the product [..., N] of an x [..., K] without tokens, and let the weight have a gradient of zeros; nobody reads it."""
    y: Tensor = _OfNoTokens.apply(x, w_NK)
    return y
