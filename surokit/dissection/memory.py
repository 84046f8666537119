"""Say what a process holds between two steps, and give it a limit that it shall fit into.

On a CPU the limit is one of the system's, on the bytes that the process may take (RLIMIT_DATA), so an allocation fails as it does
on a GPU, before the machine is short of memory. On CUDA it is the allocator's.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surokit.hardware.machine import machine_gib
from surokit.profiler.record.allocations import REST, Meter

_MMAP_THRESHOLD = -3  # of mallopt(3)
SHARE = 0.9  # of a CPU's memory, without a limit
_OUT = (  # the last ones are oneDNN's, which has no other words for it, and Python's and C++'s for the stack of a thread
    *("out of memory", "can't allocate memory", "cannot allocate memory", "bad_alloc", "could not create a memory"),
    *("could not create a primitive", "can't start new thread", "resource temporarily unavailable"),
)


def room_gib(device: torch.device, gib: float | None, processes: int = 1) -> float | None:
    """Return the GiB that each process of a cell may take: its share of those given, of a GPU or of the CPU, or of all there are.
    None where they are not known."""
    if device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory / 2**30
        on_each = -(-processes // torch.cuda.device_count())
        return (whole if gib is None else min(gib, whole)) / on_each
    machine = machine_gib()
    whole_gib = gib if gib is not None else None if machine is None else SHARE * machine
    return None if whole_gib is None else whole_gib / processes


@contextmanager
def limited(device: torch.device, gib: float | None) -> Iterator[None]:
    """Let this process take so many GiB beyond what it has on a CPU, or of a GPU's memory, within the block."""
    if gib is None:
        yield
        return
    if device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory / 2**30
        torch.cuda.set_per_process_memory_fraction(min(1.0, gib / whole), device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        return
    try:
        import resource
    except ImportError:  # not on every system
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = _taken() + int(gib * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard < 0 else min(most, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _taken() -> int:
    """Return the bytes that count against RLIMIT_DATA now, as Linux has them."""
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmData:"):
                return 1024 * int(line.split()[1])
    return 0


def die_first() -> None:
    """Let the system end this process before others where the machine is short of memory; on Linux, elsewhere it does nothing."""
    place = Path("/proc/self/oom_score_adj")
    if place.is_file():
        place.write_text("1000")


def in_pieces(device: torch.device) -> None:
    """Let this process return what it frees to the system at once, for a search that runs out of memory on purpose."""
    if device.type == "cpu" and sys.platform == "linux":
        with suppress(AttributeError):  # another C library than glibc
            ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 20)


def give_back(device: torch.device) -> None:
    """Return what was freed."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform == "linux":
        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, in torch or in a library below it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _OUT)


def held(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    """Return the bytes that live tensors of this process hold on the model's device, by term; each storage counts once.

    Weights that train, frozen weights with buffers, gradients, optimizer states with masters of weights, and the others.
    """
    gc.collect()
    device = next(model.parameters()).device
    parameters = list(model.parameters())
    terms: dict[str, list[Tensor]] = {
        "weights": [p for p in parameters if p.requires_grad],
        "frozen weights": [*(p for p in parameters if not p.requires_grad), *model.buffers()],
        "gradients": [p.grad for p in parameters if p.grad is not None],
        "optimizer": [] if optimizer is None else list(_tensors([optimizer.state, optimizer.param_groups])),
    }
    # type() and no isinstance, which would wake what stands in for others
    terms["others"] = [found for found in gc.get_objects() if issubclass(type(found), Tensor)]
    seen: set[int] = set()
    sizes = {}
    for name, tensors in terms.items():
        sizes[name] = 0
        for tensor in tensors:
            for address, size in _memory_of(tensor, device):
                if address not in seen:
                    seen.add(address)
                    sizes[name] += size
    return sizes


@contextmanager
def listening(
    device: torch.device,
    rest: dict[str, int],
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Iterator[tuple[Meter, dict[str, Any]]]:
    """Listen to what the block allocates: yields the meter, for marks of phases, and what is known when the block has ended.

    That is `rest`, the bytes that were held before; `phases`, the most in each; and `peak`. A model and its optimizer mark forward,
    backward and optimizer by themselves; a compiled model has no marks of its own, so that its backward counts as forward. On a CPU
    what is held at rest is added to what the meter hears.
    """
    meter, found = Meter(device), dict[str, Any]()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    marks = nullcontext() if model is None or optimizer is None else meter.following(model, optimizer)
    with marks, meter.listening():
        if model is not None:
            meter.mark("forward")
        yield meter, found
        meter.mark(REST)
        meter.mark(REST)  # a phase is there once the next has begun
    base = 0 if device.type == "cuda" else sum(rest.values())
    phases: dict[str, int] = {}
    for name, peak in meter.peaks:
        if name != REST:
            phases[name] = max(phases.get(name, 0), base + peak)
    found |= {"rest": rest, "phases": phases, "peak": max(phases.values())}


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _memory_of(tensor: Tensor, device: torch.device) -> Iterator[tuple[int, int]]:
    """Yield address and bytes of a tensor's storages there: its own, or of the local part of a divided one (FSDP2, DeepSpeed)."""
    for local in (getattr(tensor, "_local_tensor", tensor), getattr(tensor, "ds_tensor", None)):
        if local is not None:
            # one without memory refuses: a fake, sparse, uninitialized one, a wrapper, one of a trace
            with suppress(RuntimeError, ValueError):
                storage = local.untyped_storage()
                if storage.device == device and storage.data_ptr():
                    yield storage.data_ptr(), storage.nbytes()
