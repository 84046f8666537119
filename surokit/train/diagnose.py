"""This module finds where a NaN comes from: it replays a step with hooks and names the first module whose numbers are not finite.

The order is that of time: weights before anything, then the outputs of modules in the forward pass, then gradients in
the backward pass. A linear layer has three products, and the place of the finding says which one it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from surokit.train.setup import computable, targets_in
from surokit.train.stream import Batch

Kind = Literal["weight", "activation", "loss", "gradient", "weight gradient", "not reproduced", "not replayed"]


@dataclass(frozen=True)
class Finding:
    """A Finding is the first place that was not finite at `step`. product: forward, grad_input or grad_weight of a linear layer."""

    step: int
    kind: Kind
    module: str
    product: str = ""

    def __str__(self) -> str:
        what = {
            "weight": f"the weight {self.module} is not finite",
            "activation": f"the output of {self.module} is the first that is not finite",
            "loss": f"the loss is not finite although every module's output is ({self.module})",
            "gradient": f"the gradient of {self.module} is the first that is not finite",
            "weight gradient": f"the gradient of the weight {self.module} is the first that is not finite",
            "not reproduced": "a replay of the batch was finite, so the cause was not found",
            "not replayed": "its weights are divided among processes, so the batch was not replayed to find the cause",
        }[self.kind]
        return f"step {self.step}: {what}" + (f" (product: {self.product})" if self.product else "")


def first_of(findings: Sequence[Finding]) -> Finding:
    """Return the first finding that names a place, else the first: each process looked at a batch of its own."""
    return next((finding for finding in findings if finding.kind != "not reproduced"), findings[0])


def find_first_bad(model: nn.Module, batches: Sequence[Batch], step: int, *, are_several: bool = False) -> Finding:
    """Run forward and backward over `batches` and name what went wrong first. Clears gradients; reads the device.

    are_several: whether other processes had batches of the step too, so that one without labels is not what went wrong.

    Buffers come back as they were; random and delayed-scaling states are the caller's to keep.
    """
    for name, parameter in model.named_parameters():
        if not _finite(parameter):
            return Finding(step, "weight", name)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    found: list[Finding] = []
    if len(batches) > 1 or are_several:  # as the step computed them
        batches = [computable(batch, targets_in(batch)) for batch in batches]
    try:
        for batch in batches:
            model.zero_grad(set_to_none=True)
            for hooks in (_all_hooks, _forward_hooks):
                try:
                    with hooks(model, step, found), warnings.catch_warnings():
                        # torch warns about module outputs that are no tensors; the loss at the top is one of them
                        warnings.simplefilter("ignore")
                        loss = model(**batch).loss
                        if not found and not _finite(loss):
                            found.append(Finding(step, "loss", type(model).__name__))
                        if not found:
                            loss.backward()
                except RuntimeError:
                    # backward hooks refuse modules whose output is changed in place; without them the weights' gradients remain
                    if hooks is _forward_hooks:
                        raise
                    continue
                break
            if not found:
                found.extend(_bad_weight_gradients(model, step))
            if found:
                return found[0]
    finally:
        model.zero_grad(set_to_none=True)
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    return Finding(step, "not reproduced", "")


@contextmanager
def _forward_hooks(model: nn.Module, step: int, found: list[Finding]) -> Iterator[None]:
    def after(name: str, module: nn.Module) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if not found and not _finite(output):
                found.append(Finding(step, "activation", name, _product(module, "forward")))

        return hook

    handles = [module.register_forward_hook(after(name, module)) for name, module in model.named_modules() if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _all_hooks(model: nn.Module, step: int, found: list[Finding]) -> Iterator[None]:
    def before(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, grad_output: Any) -> None:
            if not found and not _finite(grad_output):
                found.append(Finding(step, "gradient", f"{name}'s output"))

        return hook

    def after(name: str, module: nn.Module) -> Callable[..., None]:
        def hook(_module: nn.Module, grad_input: Any, _grad_output: Any) -> None:
            if not found and not _finite(grad_input):
                found.append(Finding(step, "gradient", f"{name}'s input", _product(module, "grad_input")))

        return hook

    def accumulated(name: str, module: nn.Module) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if not found and parameter.grad is not None and not _finite(parameter.grad):
                found.append(Finding(step, "weight gradient", name, _product(module, "grad_weight")))

        return hook

    handles: list[Any] = []
    with _forward_hooks(model, step, found):
        for name, module in model.named_modules():
            if name and (not any(module.children()) or any(True for _ in module.parameters(recurse=False))):
                handles.append(module.register_full_backward_pre_hook(before(name)))
                handles.append(module.register_full_backward_hook(after(name, module)))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                owner = model.get_submodule(name.rpartition(".")[0])
                handles.append(parameter.register_post_accumulate_grad_hook(accumulated(name, owner)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _bad_weight_gradients(model: nn.Module, step: int) -> Iterator[Finding]:
    """Yield weights' gradients that are not finite, from the loss backwards as far as the order of registration tells."""
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is not None and not _finite(parameter.grad):
            yield Finding(step, "weight gradient", name)


def _product(module: nn.Module, product: str) -> str:
    return product if isinstance(module, nn.Linear) else ""


def _finite(value: Any) -> bool:
    """Return whether every float tensor in a module's output is finite; -inf in a boolean or integer mask is no concern here."""
    if isinstance(value, Tensor):
        if not value.is_floating_point() or value.numel() == 0:
            return True
        plain = value.detach()
        if plain.element_size() == 1:  # float8 has no isfinite
            plain = plain.to(torch.float32)
        return bool(torch.isfinite(plain).all())
    if isinstance(value, Mapping):
        return all(_finite(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return all(_finite(v) for v in value)
    return True
