"""Find the most bytes that tensors held between marks, from torch's own allocators.

On a CPU torch's profiler reports each allocation and each release of torch's CPU allocator, so the running sum is what tensors
hold, in and between operations. The scratch of matrix products is left out: how much a product takes depends on the CPU (without
bf16 instructions oneDNN converts). On CUDA the same marks read torch.cuda.max_memory_allocated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

REST = "rest"  # what is held between steps
_MARK = "surokit.memory:"
#: Operators that are one product: what they allocate and release before they end is scratch, what they leave is a tensor.
PRODUCTS = frozenset(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm"))


class Meter:
    """A Meter finds the most bytes that were held between two marks, by the first mark's name; the last phase of a name
    counts most.

    `left` is what is still held when it stops listening.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peaks: list[tuple[str, int]] = []
        self.left = 0
        self._name: str | None = None

    def mark(self, name: str) -> None:
        """Begin the phase `name` here."""
        import torch

        if self.device.type != "cuda":
            with torch.profiler.record_function(_MARK + name):
                return
        torch.cuda.synchronize(self.device)
        if self._name is not None:
            self.peaks.append((self._name, torch.cuda.max_memory_allocated(self.device)))
        torch.cuda.reset_peak_memory_stats(self.device)
        self._name = name

    @contextmanager
    def following(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Mark the phases of steps inside the block: "forward", "backward" and "optimizer", and REST after them."""
        handles = [
            model.register_forward_pre_hook(lambda *_: self.mark("forward")),
            model.register_forward_hook(lambda *_: self.mark("backward")),
            optimizer.register_step_pre_hook(lambda *_: self.mark("optimizer")),
            optimizer.register_step_post_hook(lambda *_: self.mark(REST)),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def read(self, events: Sequence[Any]) -> None:
        """Take the phases from the events of a CPU's profile."""
        held = most = product_ends = 0
        name: str | None = None
        for event in sorted(events, key=lambda e: int(e.start_ns())):
            if event.start_ns() > product_ends:  # a product counts by what it leaves
                most = max(most, held)
            if event.name() == "[memory]":
                held += event.nbytes()
            elif event.name() in PRODUCTS:
                product_ends = max(product_ends, int(event.end_ns()))
            elif event.name().startswith(_MARK):
                if name is not None:
                    self.peaks.append((name, most))
                name, most = event.name().removeprefix(_MARK), held
        self.left = held

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Count the allocations inside the block; on a CPU only there."""
        from torch.profiler import ProfilerActivity, profile

        if self.device.type == "cuda":
            yield
            return
        # without acc_events torch 2.11 warns that it clears the events of earlier cycles, of which there are none
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as listener:
            yield
        assert listener.profiler is not None
        results = listener.profiler.kineto_results
        assert results is not None
        self.read(results.events())
