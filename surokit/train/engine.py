"""The engine of a session: forward, backward and update of one step, on the device alone.

    parts -> gradients: forward and backward of each, accumulated -> update: norm, clip, mask, optimizer

Nothing here reads the device: loss, norm and the mask of a step that is not finite stay there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from surokit import convert
from surokit.train.optim import gradient_norm
from surokit.train.setup import loss_of, targets_in
from surokit.train.stream import Batch

# torch.compile's cold start takes one to two minutes on a CPU and less on a GPU, where steps are shorter too
COMPILE_FROM_STEPS = {"cpu": 2000, "cuda": 500}


class Engine:
    """What computes the steps of one model with one optimizer.

    clip: largest norm of all gradients together; None does not clip. `forward` is the model, or its compiled form.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, clip: float | None) -> None:
        self.model, self.optimizer, self.clip = model, optimizer, clip
        self.device = next(model.parameters()).device
        self.base_rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.forward: Callable[..., Any] | None = None

    def prepare(self, steps: int, compile: bool | Literal["auto"]) -> None:
        """Before the first of so many planned steps: compiled where asked for, or where they pay for its start. Once."""
        if self.forward is None:
            pays = steps >= COMPILE_FROM_STEPS.get(self.device.type, sys.maxsize)
            wanted = pays if compile == "auto" else compile
            self.forward = torch.compile(self.model, dynamic=False) if wanted else self.model

    @property
    def compiled(self) -> bool:
        return self.forward is not None and self.forward is not self.model

    def to_device(self, batch: Batch) -> Batch:
        return {
            name: value.to(self.device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in batch.items()
        }

    def set_rate(self, factor: float | None) -> float:
        """Multiplies the rates that the optimizer began with; None leaves them. Returns the first group's.

        A tensor is filled, so that nothing that reads it recompiles.
        """
        for group, base in zip(self.optimizer.param_groups, self.base_rates):
            if factor is None:
                continue
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(base * factor)
            else:
                group["lr"] = base * factor
        first = self.optimizer.param_groups[0]["lr"]
        return self.base_rates[0] * (1.0 if factor is None else factor) if isinstance(first, Tensor) else float(first)

    def gradients(self, parts: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        """Forward and backward of all parts: (mean loss over the labels that count, their number), both on the device."""
        assert self.forward is not None
        counts = [targets_in(part) for part in parts]
        if len(parts) == 1:
            loss = loss_of(self.forward(**parts[0]))
            loss.backward()
            return loss.detach().float(), counts[0]
        total = torch.stack(counts).sum().clamp_min(1)
        mean = torch.zeros((), device=self.device)
        for part, count in zip(parts, counts):
            share = loss_of(self.forward(**part)) * (count / total)
            share.backward()
            mean += share.detach()
        return mean, total

    @torch.no_grad()
    def update(self, loss: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Clips, masks what is not finite, and steps the optimizer; loss, grad_norm, skipped and targets on the device."""
        grads = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not grads:
            raise RuntimeError(
                "No gradient reached any parameter of the optimizer: the loss does not depend on what is trained."
            )
        norm = gradient_norm(grads)
        bad = (~(norm.isfinite() & loss.isfinite())).float()
        scale = None if self.clip is None else (norm / self.clip).clamp_min(1.0)
        optimizer: Any = self.optimizer
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.grad_scale, optimizer.found_inf = scale, bad
            try:
                optimizer.step()
            finally:
                optimizer.grad_scale = optimizer.found_inf = None
        elif not bad.bool():  # an optimizer that cannot be masked: the host has to know
            if scale is not None:
                torch._foreach_div_(grads, scale)
            optimizer.step()
        else:
            convert.roll_scales(self.model)  # as a masked step does
        return {"loss": loss, "grad_norm": norm, "skipped": bad, "targets": targets}
