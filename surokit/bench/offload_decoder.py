"""Train a decoder as a way of `bench offload` on a GPU, real steps over the real link; and find which decoders its memory
holds.

A way is a Decoder of one of Qwen3's shapes with random weights in bfloat16, on random tokens, with one of the three
optimizers. Beside its turns its steps are looked at one by one: what the device did when, what the host did meanwhile, what
memory was taken.

S steps of a window
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from surokit.bench.configurations import MODELS, TINY, BenchWork
from surokit.bench.offload_ways import CHOSEN_ONCE, CONTROL, NONE, ZENFLOW, K, counts, since
from surokit.bench.process import Failed

LR = 1e-4
LOOKED_AT = 10  # steps, at least, and whole windows
ROOM, HOST_ROOM = 0.9, 0.7  # of what is free: what plans may come to
GIB = 2**30


@dataclass(frozen=True)
class Trains:
    """A Trains is a case: a decoder of this shape, with windows of `interval` steps.

    alone: ways that are built anew for each turn, as the host's memory does not hold them beside each other. left_out: why it
    is not measured.
    """

    name: str
    shape: Mapping[str, Any]
    interval: int
    alone: tuple[str, ...] = ()
    left_out: str = ""


def cases(
    work: BenchWork,
    models: Collection[str],
    layers: int | None,
    interval: int,
    free_gib: float = math.inf,
    host_gib: float = math.inf,
) -> list[Trains]:
    """Return the decoders that are measured with so much free memory of the device and the host, one a model.

    A model that does not fit with all its layers, and that was not asked for by name, gets as many layers as there is room
    for if it is the first one; the others are left out. Raises ValueError for a model that is not known.
    """
    for model in models:
        if model not in MODELS:
            raise ValueError(f"models={list(models)}: known are {', '.join(MODELS)}.")
    found: list[Trains] = []
    for model in models or ("1.7b", "4b", "8b"):
        case = _case(work, model, layers or MODELS[model]["layers"], interval, free_gib, host_gib)
        if case.left_out and not found and not models and layers is None:
            case = _largest(work, model, interval, free_gib, host_gib) or case
        found.append(case)
    return found


def rehearsal(interval: int) -> Trains:
    return Trains(f"tiny, S = {interval}", TINY, interval)


def _largest(work: BenchWork, model: str, interval: int, free_gib: float, host_gib: float) -> Trains | None:
    smaller = (
        _case(work, model, count, interval, free_gib, host_gib) for count in range(MODELS[model]["layers"] - 1, 0, -1)
    )
    return next((case for case in smaller if not case.left_out), None)


def _case(work: BenchWork, model: str, layers: int, interval: int, free_gib: float, host_gib: float) -> Trains:
    shape = {**MODELS[model], "layers": layers}
    short = "" if layers == MODELS[model]["layers"] else f" of {layers} layers"
    case = Trains(f"{model}{short}, S = {interval}", shape, interval)
    plans = {way: planned(shape, work, way, interval) for way in (NONE, CONTROL, ZENFLOW)}
    for where, gib, free, room in (
        ("device", max(device for device, _ in plans.values()), free_gib, ROOM),
        ("host", max(host for _, host in plans.values()), host_gib, HOST_ROOM),
    ):
        if gib > room * free:
            why = f"It needs {gib:.0f} GiB of the {where} as planned, and {room:.0%} of what is free are {room * free:.0f}."
            return replace(case, left_out=why)
    if sum(host for _, host in plans.values()) > HOST_ROOM * host_gib:
        return replace(case, alone=(CONTROL, ZENFLOW))
    return case


def planned(shape: Mapping[str, Any], work: BenchWork, way: str, interval: int) -> tuple[float, float]:
    """Return the GiB of the device and of the host that a way takes, by `surokit.plan`."""
    import surokit as sk

    config = sk.DecoderConfig(**shape, max_length=work.length)
    plan = sk.plan(
        config,
        recipe="bf16",
        batch=work.batch,
        length=work.length,
        accumulate=work.accumulate,
        optimizer=optimizer_of(way, interval),
    )
    return plan.memory.gib, plan.memory.host_gib


def free_memory(device: str) -> tuple[float, float]:
    """Return the GiB that are free on the device and on the host."""
    import torch

    from surokit.profiler.record.chrome_trace import free_gib

    return torch.cuda.mem_get_info(device)[0] / GIB, free_gib()


def answers() -> bool:
    """Return whether the device still works: a kernel that failed leaves its process without one."""
    import torch

    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def optimizer_of(way: str, interval: int) -> Any:
    """Return the specification of a way's optimizer."""
    import torch

    import surokit as sk

    if way == NONE:
        return sk.AdamW(lr=LR, state_dtype=torch.float32)
    if way == CONTROL:
        return sk.OffloadAdamW(lr=LR)
    options: dict[str, Any] = {"topk_ratio": K, "update_interval": interval, **CHOSEN_ONCE}
    return sk.ZenFlow(lr=LR, **options)


class Real:
    """A Real is a way of a case. Raises Failed where memory is short."""

    def __init__(self, way: str, case: Trains, work: BenchWork, device: str) -> None:
        import torch

        self.way, self.case, self.work, self.device = way, case, work, torch.device(device)
        self.window = case.interval if way == ZENFLOW else 1
        self.model: Any = None
        self.optimizer: Any = None
        short = ""
        try:
            self.build()
            for _ in range(2 * self.window):
                self.step()
            self.over()
        except BaseException as error:
            if not isinstance(error, RuntimeError) or "memory" not in str(error):
                self.close()
                raise
            short = str(error).splitlines()[0]
        if short:  # behind the error, whose frames hold what was built
            self.close()
            raise Failed(f"{way} has not the memory it needs: {short}", "memory")

    def build(self) -> None:
        import torch

        import surokit as sk

        torch.manual_seed(0)
        config = sk.DecoderConfig(**self.case.shape, max_length=self.work.length)
        self.model = sk.Decoder(config, device=self.device, dtype=torch.bfloat16)
        if self.device.type == "cuda":
            sk.fuse(self.model)
        params = list(self.model.parameters())
        self.parameters = sum(p.numel() for p in params)
        self.optimizer = optimizer_of(self.way, self.case.interval).build(params)
        self.ids = torch.randint(config.vocab, (self.work.batch, self.work.length), device=self.device)

    def begin(self) -> None:
        self.over()

    def step(self) -> None:
        self.compute()
        self.update()

    def compute(self) -> None:
        """Run forward and backward."""
        for _ in range(self.work.accumulate):
            (self.model(input_ids=self.ids, labels=self.ids).loss / self.work.accumulate).backward()

    def update(self) -> None:
        if self.way == CONTROL:
            self.over()  # it would wait for the backward pass as well, and count that
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def over(self) -> float:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return 0.0

    def close(self) -> None:
        import gc

        import torch

        if hasattr(self.optimizer, "close"):
            self.optimizer.close()
        self.model = self.optimizer = None
        if self.device.type == "cuda":
            gc.collect()
            with contextlib.suppress(RuntimeError):  # a device that failed says it elsewhere
                torch.cuda.empty_cache()


class Clock:
    """A Clock marks points on the device's line of time: events of its main stream, or where there is none the host's clock."""

    def __init__(self, device: Any) -> None:
        self._cuda = device.type == "cuda"

    def mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, begun: Any, over: Any) -> float:
        """Return the milliseconds between two points that the device has passed."""
        return float(begun.elapsed_time(over) if self._cuda else 1e3 * (over - begun))


def looked_at(way: Real, steps: int = LOOKED_AT) -> dict[str, Any]:
    """Measure each of so many steps by itself; the number is rounded up to whole windows.

    On the device: compute_ms of forward and backward and update_ms, with the waits in there; host_ms of the host in the
    optimizer's step; reserved_mib of the allocator behind it. Beside them stand peak_mib, and the optimizer's own counts, a
    step: idle_ms of the device without work by events, bytes, the host's waits.
    """
    import torch

    cuda = way.device.type == "cuda"
    steps = math.ceil(steps / way.window) * way.window
    clock, marks, host_ms, reserved_mib = Clock(way.device), [], [], []
    way.begin()
    if cuda:
        torch.cuda.reset_peak_memory_stats(way.device)
    before = counts(way.optimizer)
    for _ in range(steps):
        marks.append([clock.mark()])
        way.compute()
        marks[-1].append(clock.mark())
        begun = time.perf_counter()
        way.update()
        host_ms.append(1e3 * (time.perf_counter() - begun))
        marks[-1].append(clock.mark())
        if cuda:
            reserved_mib.append(torch.cuda.memory_reserved(way.device) / 2**20)
    way.over()
    peak = {"peak_mib": torch.cuda.max_memory_allocated(way.device) / 2**20} if cuda else {}
    return {
        "steps": steps,
        "compute_ms": [clock.ms(begun, computed) for begun, computed, _ in marks],
        "update_ms": [clock.ms(computed, updated) for _, computed, updated in marks],
        "host_ms": host_ms,
        "reserved_mib": reserved_mib,
        **peak,
        **since(before, way, steps),
    }
