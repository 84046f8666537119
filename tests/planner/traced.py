"""Runs a model's own forward and backward on meta tensors that say they are on a GPU, and follows what its tensors hold.

Nothing is computed and nothing allocated, so that a model of any width takes a fraction of a second; no GPU is needed. Storages are
followed by weak references, from the operation that makes one to its end. What a meta tensor does not know is said here: that it is
on a GPU, and what torch's fused attention keeps there (its inputs, its output, and a float32 a row for the log-sum-exp).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_META = torch.device("meta")
_MAKERS = (torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.tensor)


class _Says(TorchFunctionMode):
    """Meta tensors are on a device, and what is made there is a meta tensor."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = torch.device(device)

    def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        said = {
            torch.Tensor.device: self.device,
            torch.Tensor.is_cuda: self.device.type == "cuda",
            torch.Tensor.is_cpu: self.device.type == "cpu",
            torch.Tensor.is_meta: False,
        }
        if getattr(f, "__name__", "") == "__get__" and f.__self__ in said:
            return said[f.__self__]
        if f is torch.Tensor.__bool__:  # positions in one row: nothing is packed
            return True
        if f is nn.functional.scaled_dot_product_attention:
            return _Attention.apply(*args[:3])
        if kwargs.get("device") is not None or f in _MAKERS:
            kwargs["device"] = _META
        return f(*(_META if isinstance(arg, torch.device) else arg for arg in args), **kwargs)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        B, H, T, _ = q_BHTD.shape
        y_BHTD = q_BHTD.new_empty((B, T, H, v_BHTD.shape[-1])).transpose(1, 2)
        ctx.save_for_backward(q_BHTD, k_BHTD, v_BHTD, y_BHTD, q_BHTD.new_empty((B, H, T), dtype=torch.float32))
        return y_BHTD

    @staticmethod
    def backward(ctx: Any, dy_BHTD: Tensor) -> Any:
        q_BHTD, k_BHTD, v_BHTD, *_ = ctx.saved_tensors
        return tuple(torch.empty_like(t) for t in (q_BHTD, k_BHTD, v_BHTD))


@dataclass
class Traced:
    """Bytes that tensors hold: the most in each phase."""

    phases: dict[str, int] = field(default_factory=dict)
    phase: str = "forward"
    held: int = 0
    known: dict[int, Any] = field(default_factory=dict)

    def note(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return

        def ends(_: Any) -> None:
            self.held -= size
            del self.known[key]

        self.known[key] = weakref.ref(storage, ends)
        self.held += size
        self.mark(self.phase)

    def mark(self, phase: str) -> None:
        self.phase = phase
        self.phases[phase] = max(self.phases.get(phase, 0), self.held)


class _Follows(TorchDispatchMode):
    def __init__(self, traced: Traced) -> None:
        super().__init__()
        self.traced = traced

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = f(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.traced.note(leaf)
        return out


def plain(model: nn.Module) -> nn.Module:
    """Leave the model as it is."""
    return model


def feed_forwards_again(model: nn.Module) -> nn.Module:
    """Let each feed-forward be computed again."""
    for block in model.model.layers:  # type: ignore[union-attr]
        _again(block.mlp)
    return model


def first_block_again(model: nn.Module) -> nn.Module:
    """Let the first block be computed again."""
    model.config.use_cache = False  # type: ignore[union-attr]
    _again(model.model.layers[0])  # type: ignore[union-attr, index]
    return model


def _again(module: Any, **how: Any) -> None:
    """Let torch compute a module again in backward."""
    forward = partial(_said, module.forward)
    module.forward = partial(
        checkpoint,
        forward,
        use_reentrant=False,
        preserve_rng_state=False,
        determinism_check="none",  # what is kept says that it is on a GPU, what is computed again that it is not
        **how,
    )


def checkpointed(model: nn.Module) -> nn.Module:
    """Let each block save attention and every second product alone, by torch's selective checkpointing."""

    def contexts() -> Any:
        products = dict.fromkeys((False, True), 0)

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if op is torch.ops.aten.new_empty.default:  # of `_Attention`
                return CheckpointPolicy.MUST_SAVE
            if op is not torch.ops.aten.mm.default:
                return CheckpointPolicy.PREFER_RECOMPUTE
            products[context.is_recompute] += 1
            odd = products[context.is_recompute] % 2 == 1
            return CheckpointPolicy.MUST_SAVE if odd else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    model.config.use_cache = False  # type: ignore[union-attr]
    for block in model.model.layers:  # type: ignore[union-attr]
        _again(block, context_fn=contexts)
    return model


def _said(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a block in a backward too, in which no function mode is active."""
    with _Says("cuda"):
        return forward(*args, **kwargs)


def trace(
    make: Callable[[], nn.Module],
    batch: int,
    length: int,
    device: str = "cuda",
    change: Callable[[nn.Module], nn.Module] = plain,
) -> Traced:
    """Forward and backward of a transformers model in bfloat16, whose loss it computes itself."""
    with _META:
        model = change(make().to(torch.bfloat16).train())
    traced = Traced()
    with _Says(device), _Follows(traced):
        for t in (*model.parameters(), *model.buffers()):
            traced.note(t)
        ids = torch.zeros((batch, length), dtype=torch.long)
        loss = model(input_ids=ids, labels=ids).loss
        traced.mark("backward")
        loss.backward()
    return traced
