"""An engine does the computing of a session: forward, backward and update of one step, on the device alone.

    parts -> gradients: forward and backward of each, accumulated -> update: norm, clip, mask, optimizer

Nothing here reads the device: loss, norm and the mask of a step that is not finite stay there. So on CUDA a step can be recorded
and launched as graphs (capture.py), which gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from surokit import convert
from surokit.optim.tensors import gradient_norm
from surokit.parallel.processes import ALONE
from surokit.parallel.spread import Spread
from surokit.torch_private import foreach_div_, handles_amp_scaling
from surokit.train.capture import NOT_CAPTURED, Capture, DeviceGraphs, Graphs, takes_rates, why_not
from surokit.train.compiling import end_workers, why_it_failed
from surokit.train.cuda_graphs import CudaGraphs
from surokit.train.random_state import RandomState
from surokit.train.setup import computable, device_of, loss_of, mean_over, targets_in
from surokit.train.stream import Batch

T = TypeVar("T")

NOT_COMPILED = (
    "torch.compile failed, so the run goes on without it ({}). Where that names a file of torch's compile cache, one that was cut "
    "short, delete the cache's folder and try again; compile=False does not try."
)
NO_GRADIENT = "No gradient reached any parameter of the optimizer: the loss does not depend on what is trained."


class Engine:
    """An Engine computes the steps of one model with one optimizer.

    clip: largest norm of all gradients together; None does not clip. graphs: whether steps become CUDA graphs where they can;
    `device_graphs` makes them, CUDA's own unless given. spread: the model over several processes; None where one has it alone.
    `forward` is the model, what spreads it, or a compiled form.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        clip: float | None,
        graphs: bool | Literal["auto"] = False,
        device_graphs: DeviceGraphs | None = None,
        spread: Spread | None = None,
    ) -> None:
        self.model, self.optimizer, self.clip = model, optimizer, clip
        self.spread = spread or Spread(model, ALONE)
        self.device = device_of(model)
        self.base_rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.forward: Callable[..., Any] | None = None
        self.fallbacks: list[str] = []  # messages on what runs in another way than was asked for, until they are given
        self._compiled_for: set[torch.Size] = set()
        self.wants_graphs = graphs
        self._off = "switched off" if not graphs else "" if device_graphs else why_not(model, optimizer, self.spread)
        if graphs is True and self._off:
            self.fallbacks.append(NOT_CAPTURED.format(self._off))
        self._graphs = None if self._off else Graphs(self, device_graphs or CudaGraphs(self.device))
        # float32 numbers on the device, with graphs and without, so that both give the same; groups that are added have none
        on_device = (self._graphs is not None or self.device.type == "cuda") and takes_rates(optimizer)
        self.rates = [torch.empty((), device=self.device) for _ in self.base_rates] if on_device else []

    def prepare(self, compile: bool) -> bool:
        """Choose before the first step how forward runs; return whether the step that follows compiles."""
        if self.forward is not None:
            return False
        self.forward = torch.compile(self._plain, dynamic=False) if compile else self._plain
        return self.compiled

    @property
    def _plain(self) -> nn.Module:
        return self.spread.forward

    def model_changed(self) -> None:
        """Compile and record anew, since the model computes something else from now on."""
        self.forget_compiled()
        if self._graphs is not None:
            self._graphs.begin_anew()

    def forget_compiled(self) -> None:
        """Forget what an interrupt left of a compilation, so that the next step begins it anew."""
        if self.compiled:
            self.forward = None
            self._compiled_for.clear()

    def will_compile(self, parts: Sequence[Batch]) -> bool:
        """Return whether forward will compile, because it has not met parts of these shapes."""
        return self.compiled and not {part["input_ids"].shape for part in parts} <= self._compiled_for

    @property
    def compiled(self) -> bool:
        return self.forward is not None and self.forward is not self._plain

    @property
    def capture(self) -> Capture:
        """Return whether steps run as CUDA graphs, and why."""
        return Capture("off", self._off) if self._graphs is None else self._graphs.capture

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that are trained."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def set_rate(self, factor: float | None) -> float:
        """Multiply the rates that groups of the optimizer began with, added ones too; None leaves them. Return the first group's.

        A tensor is filled, so that nothing that reads it recompiles.
        """
        groups = self.optimizer.param_groups
        self.base_rates += [float(group["lr"]) for group in groups[len(self.base_rates) :]]
        for group, base in zip(groups, self.base_rates):
            if factor is None:
                continue
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(base * factor)
            else:
                group["lr"] = float(base * factor)  # a schedule of NumPy's numbers gives another
        for group, rate in zip(groups, self.rates):
            if not _on(self.device, group["lr"]):
                rate.fill_(float(group["lr"]))
        first = groups[0]["lr"]
        return self.base_rates[0] * (1.0 if factor is None else factor) if isinstance(first, Tensor) else float(first)

    def gradients(self, parts: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        """Run forward and backward of all parts; return the mean loss over the labels that count (NaN over none) and their number,
        on the device. Both are of all processes together, and the gradients too."""
        if self._graphs is not None and self._graphs.ready(parts):
            return self._graphs.gradients(parts)
        return self._compiled(parts) if self.compiled else self.retry_on_oom(self.eager, parts)

    def _compiled(self, parts: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        """Compute the gradients by the compiled forward. Where that fails and the uncompiled model does not, the model itself is
        used from now on, and `fallbacks` says why."""
        random, compiled = RandomState.capture(self.device, torch_only=True), self.forward
        try:
            found = self.retry_on_oom(self.eager, parts)
        except Exception as error:
            why = why_it_failed(error)
        else:
            self._compiled_for.update(part["input_ids"].shape for part in parts)
            return found
        random.restore()  # out here, where the error does not hold a step's memory
        self.forward = self._plain
        try:
            found = self.retry_on_oom(self.eager, parts)
        except BaseException:
            self.forward = compiled
            raise
        self.fallbacks.append(NOT_COMPILED.format(why))
        end_workers()
        return found

    def retry_on_oom(self, work: Callable[..., T], *args: Any, **options: Any) -> T:
        """Do the work and return what it gives. Graphs that leave it no memory are given up, and it begins again with the same
        random numbers."""
        if self._graphs is None:
            return work(*args, **options)
        random = RandomState.capture(self.device, torch_only=True)
        try:
            return work(*args, **options)
        except torch.OutOfMemoryError:
            why = "they left no memory for a step that had to be eager"
            if not self.give_up_graphs(why):
                raise
            self.fallbacks.append(NOT_CAPTURED.format(why))
        random.restore()  # out here, where the error does not hold a step's memory
        return work(*args, **options)

    def give_up_graphs(self, why: str) -> bool:
        """Give up recorded CUDA graphs, with their memory, so that every later step is eager; False where there are none."""
        return self._graphs is not None and self._graphs.give_up(why)

    def eager(self, parts: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        """Compute the gradients operation by operation, as `gradients`; what others left in .grad is no part of them."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        targets, weights = self.weights(parts)
        if weights is None:
            return mean_over(self.part(parts[0]).float(), targets), targets
        mean = torch.zeros((), device=self.device)
        for i, (part, weight) in enumerate(zip(parts, weights)):
            with self.spread.accumulating(last=i == len(parts) - 1):
                mean += self.part(part, weight)
        return mean_over(self.spread.processes.sum(mean), targets), targets

    def weights(self, parts: Sequence[Batch]) -> tuple[Tensor, Tensor | None]:
        """Return the number of labels that count, in all processes, and the share that each part's mean has in the step's; None for
        a single part."""
        counts = [targets_in(part) for part in parts]
        processes = self.spread.processes
        if len(parts) == 1 and not processes.are_several:
            return counts[0], None
        total = processes.sum(torch.stack(counts).sum())
        return total, torch.stack(counts) / total.clamp_min(1)

    def part(self, batch: Batch, weight: Tensor | None = None) -> Tensor:
        """Run forward and backward of one part; return its loss, weighted and detached."""
        assert self.forward is not None
        if weight is not None:
            batch = computable(batch, weight)
        loss = loss_of(self.forward(**batch))
        if not loss.requires_grad:
            raise RuntimeError(NO_GRADIENT)
        share = loss if weight is None else loss * weight
        share.backward()
        return share.detach()

    def update(self, loss: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Step the optimizer, with gradients clipped and what is not finite masked; return loss, grad_norm, skipped and targets on
        the device."""
        norm, bad = (self._graphs.update() if self._graphs is not None else None) or self.change(loss)
        return {"loss": loss, "grad_norm": norm, "skipped": bad, "targets": targets}

    @torch.no_grad()
    def change(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Update by the gradients that are there; return their norm, and 1 where it or the loss is not finite."""
        grads = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not grads:
            raise RuntimeError(NO_GRADIENT)
        norm = gradient_norm(grads).to(self.device)  # where weights are streamed, gradients are on the host
        bad = (~(norm.isfinite() & loss.isfinite())).float()
        scale = None if self.clip is None else (norm / self.clip).clamp_min(1.0)
        optimizer: Any = self.optimizer
        if handles_amp_scaling(optimizer):
            optimizer.grad_scale, optimizer.found_inf = scale, bad
            try:
                with self._device_rates():
                    optimizer.step()
            finally:
                optimizer.grad_scale = optimizer.found_inf = None
        elif not bad.bool():  # an optimizer that cannot be masked: the host has to know
            if scale is not None:
                for device in {grad.device for grad in grads}:
                    foreach_div_([grad for grad in grads if grad.device == device], scale.to(device))
            optimizer.step()
        else:
            convert.roll_scales(self.model)  # a masked step does this too
        return norm, bad

    @contextmanager
    def _device_rates(self) -> Iterator[None]:
        """Give the optimizer its rates on the device, inside the block."""
        given = [group["lr"] for group in self.optimizer.param_groups]
        for group, rate in zip(self.optimizer.param_groups, self.rates):
            if not _on(self.device, group["lr"]):
                group["lr"] = rate
        try:
            yield
        finally:
            for group, lr in zip(self.optimizer.param_groups, given):
                group["lr"] = lr


def _on(device: torch.device, rate: Any) -> bool:
    return isinstance(rate, Tensor) and rate.device == device
