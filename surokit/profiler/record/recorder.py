"""Run the tracer, part by part, the watch and the sampler while a profile runs, and cut the Recording from what they saw.

One recorder serves the outermost profile and those inside it. Its times are the host's clock.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import register_optimizer_step_pre_hook

from surokit.profiler.analysis.timeline import Kind, Timeline
from surokit.profiler.analysis.work import shaped_step
from surokit.profiler.monitoring.windows import give_way
from surokit.profiler.record import watch as watching
from surokit.profiler.record.recording import Costs, Recording, Shaped
from surokit.profiler.record.tracer import (
    LEAVES_OUT,
    RawTrace,
    Tracer,
    back_to_back,
    backward_runs,
    capturing,
    fill_queue,
    profiling,
    ranges_left,
    ranges_open,
    synchronize,
)
from surokit.profiler.record.watch import (
    Sampler,
    Watch,
    collector_watched,
    ignoring_warning,
    watched_cuda_syncs,
    watched_loader,
    watched_reads,
)

_ON_DEVICE = (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET)
_COMPILED = ("Torch-Compiled Region", "CompiledFunction")
_WITHOUT_OPERATORS = (
    "operators and kernels were not recorded and busy time is unknown; steps, modules and reads of device values were"
)
_TAKEN = "another torch profiler ran inside the block and took the recording with it"
_NEVER_BEGAN = (
    "no module was called behind the warm-up, which is where recording begins again: mark the steps with p.step(), or take "
    "warmup=0"
)


class Recorder:
    """A Recorder is started once and stopped once; in between `turn` begins a new part, and `keep` drops parts that are not
    needed."""

    def __init__(self, gpu: bool, sample: bool) -> None:
        self.watch = Watch()
        self.notes: list[str] = []
        self.over = False
        self._cuda = torch.cuda.is_available()
        self._early = self._cuda and not torch.cuda.is_initialized()
        self._tracer = Tracer(gpu and self._cuda)
        self._parts: list[RawTrace] = []
        self._gap_ns: int | None = None
        self._costs = Costs()
        self._sampler = Sampler(threading.get_ident()) if sample else None
        self.thread = threading.get_native_id()
        self._pending: bool | None = None  # whether the part that is put off records shapes
        self._overdue = False  # a step has ended since a part was put off
        self._refused = False  # whether torch's profiler could not be started at all
        self._full = False  # whether all steps were seen
        self._hooks = ExitStack()  # what stays, passively, until the block ends
        self._watching = ExitStack()  # what ends with the recording
        self._gpu = gpu
        if self._cuda and not gpu:
            self.notes.append("device activity was left out (gpu=False): times are the host's")

    def start(self, shaped: bool) -> None:
        watch, watching = self.watch, self._watching
        plain = _time_op(), _time_module(), _time_read()
        give_way()
        self._refused = not self._tracer.start(shaped)
        if self._refused:
            what = "another torch profiler is running" if profiling() else "a range of an earlier recording is open"
            self._note(f"{what}: {_WITHOUT_OPERATORS}")
        self._hooks.callback(torch_module.register_module_forward_pre_hook(self._before_module).remove)
        leaving = torch_module.register_module_forward_hook(watch.leave_module, always_call=True)
        self._hooks.callback(leaving.remove)
        if LEAVES_OUT:
            self._hooks.callback(register_optimizer_step_pre_hook(self._tracer.step_begins).remove)
        self._hooks.enter_context(ignoring_warning("Using `torch.compile"))
        watching.enter_context(watched_reads(watch))
        watching.enter_context(collector_watched(watch))
        watching.enter_context(watched_loader(watch))
        if self._cuda:
            watching.enter_context(watched_cuda_syncs(watch))
            if self._gpu:
                fill_queue()
        watch.active = True
        watched = _time_op(), _time_module(), _time_read()
        self._costs = Costs(*(max(now - before, 0.0) for now, before in zip(watched, plain)))
        watch.forget()
        if self._sampler is not None:
            watching.callback(self._sampler.stop)
            self._sampler.start()
        synchronize()
        if self._cuda and torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()  # torch has no other way to the block's own peak
        if self._tracer.running:
            self._tracer.begin()

    def turn(self, shaped: bool, at_once: bool, since_ns: int) -> RawTrace | None:
        """End a part, which is returned, and begin the next, at once or where the next module is called. Returns None, and
        does nothing, where ranges are open that the restart would break (all but the optimizer's own, when not `at_once`),
        and where no module was called since `since_ns`, so that none may be called later."""
        if self._refused or threading.get_native_id() != self.thread:
            return None
        self.resume()
        if ranges_open() > (0 if at_once else 1) or not (at_once or self.watch.called_since(since_ns)):
            return None
        part = self._end_part()
        if not self._tracer.traced:
            self._pending = shaped
        if at_once:
            self.resume()
        return part

    def step_ended(self) -> None:
        """Note that a step has ended; if a part is still put off, that step is not recorded."""
        self._overdue = self._overdue or self._pending is not None

    def resume(self) -> None:
        """Begin the part that was put off."""
        if self._pending is not None and not ranges_left():
            synchronize()
            give_way()
            if not self._tracer.start(self._pending):
                self._note(_TAKEN)
            self._pending, self._overdue = None, False

    def _before_module(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        if (self._full or self._pending is not None) and not self._elsewhere():
            if self._full:
                self._stop()
            else:
                self.resume()
        self.watch.enter_module(module, args)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    @property
    def last_part(self) -> RawTrace | None:
        return self._parts[-1] if self._parts else None

    def keep(self, wanted: Callable[[RawTrace], bool]) -> None:
        self._parts = [part for part in self._parts if wanted(part)]

    def stop(self) -> None:
        """End the recording and keep what was seen. On another thread, and inside a backward pass, which would start the
        tracer again, it ends where the next module is called or the block ends."""
        self._full = True
        if not self._elsewhere():
            self._stop()

    def _elsewhere(self) -> bool:
        return threading.get_native_id() != self.thread or backward_runs() or capturing()

    def _stop(self) -> None:
        if self.over:
            return
        if self._overdue:
            self._note(_NEVER_BEGAN)
        self.over, self._pending = True, None
        self.watch.active = False
        self._watching.close()
        self._end_part()

    def close(self) -> None:
        self._stop()
        ranges_left()  # lets go of what was recorded
        self._hooks.close()

    def _end_part(self) -> RawTrace | None:
        synchronize()
        traced, part = self._tracer.traced, self._tracer.stop()
        if part is not None:
            self._parts.append(part)
            if self._gap_ns is None:
                early = part.rows if self._tracer.gpu else []
                self._gap_ns = back_to_back([e for e in early if e.end_ns <= part.start_ns])
        elif traced:
            self._note(_TAKEN)
        return part

    # ------------------------------------------------------------------------------------------------ what was seen

    def cut(self, start_ns: int, end_ns: int, since_ns: int) -> Recording:
        """Return the recording from start to end, without the parts that ended by `since_ns`."""
        parts = [p for p in self._parts if p.end_ns > since_ns and p.start_ns < end_ns]
        if since_ns == start_ns and parts:
            start_ns = max(start_ns, parts[0].start_ns)
        module_S, start_S, end_S, thread_S = self.watch.spans()
        inside_S = (start_S >= start_ns) & (start_S <= end_ns)
        names = self.watch.module_names()
        called = {names[i][0].partition(".")[0] for i in np.unique(module_S[inside_S]).tolist()}  # whole models
        kept = [i for i, (path, _) in enumerate(names) if path.partition(".")[0] in called]
        rows = [e for p in parts for e in p.rows if e.start_ns >= max(p.start_ns, start_ns)]
        # the device lags: what was launched by the end belongs to the block, whenever it ran
        launched = {e.correlation for e in rows if e.kind == Kind.RUNTIME and e.start_ns <= end_ns}
        rows = [e for e in rows if e.start_ns <= end_ns or (e.kind in _ON_DEVICE and e.correlation in launched)]
        notes = list(self.notes)
        if any(part.shaped for part in parts):
            notes.append("recorded with the shapes of the operators, which slows small ones")
        used = self._cuda and torch.cuda.is_initialized()
        if self._early and used:
            notes.append(
                "CUDA was first used inside the block: its waits are without their lines, and the gap between kernels was not "
                "calibrated"
            )
        if self._tracer.gpu and used and not any(e.kind == Kind.KERNEL for p in self._parts for e in p.rows):
            notes.append(
                "the driver let no device activity be recorded (CUPTI refused, or in use elsewhere): times are the host's"
            )
        places, place_P, time_P = self._sampler.samples() if self._sampler else Sampler(0).samples()
        sampled_P = (time_P >= start_ns) & (time_P <= end_ns)
        collections = np.array(self.watch.collections, np.int64).reshape(-1, 2)
        start_C, end_C = collections[(collections[:, 0] >= start_ns) & (collections[:, 0] <= end_ns)].T
        timeline = Timeline.of(rows)
        if any(name.startswith(_COMPILED) for name in timeline.names):
            notes.append(
                "compiled code is one row a region: sk.profile(eager=True) runs it eagerly and shows the modules inside"
            )
        rank, world = _place_in_world()
        return Recording(
            timeline=timeline,
            start_ns=start_ns,
            end_ns=end_ns,
            modules=tuple(names[i] for i in kept),
            module_S=np.searchsorted(kept, module_S[inside_S]).astype(np.int64),
            start_S=start_S[inside_S],
            end_S=end_S[inside_S],
            thread_S=thread_S[inside_S],
            syncs=tuple(
                replace(s, file=watching.name_source(s.file))
                for s in self.watch.sync_points()
                if start_ns <= s.start_ns <= end_ns
            ),
            places=tuple((watching.name_source(file), line) for file, line in places),
            place_P=place_P[sampled_P],
            time_P=time_P[sampled_P],
            device=torch.cuda.get_device_name() if used else "cpu",
            back_to_back_ns=self._gap_ns or 1000,
            costs=replace(self._costs, sample_ns=self._sampler.cost_ns() if self._sampler else 0.0),
            peak_bytes=_peak_bytes(),
            notes=tuple(notes),
            traced=bool(parts),
            start_C=start_C,
            end_C=end_C,
            rank=rank,
            world=world,
            messages=tuple(m for part in parts for m in part.messages if start_ns <= m.start_ns <= end_ns),
        )


def _place_in_world() -> tuple[int | None, int]:
    """Return the rank of this process and how many there are, where torch.distributed runs."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if distributed else (None, 1)


def shaped_part(part: RawTrace) -> Shaped:
    """Count the FLOPs and bytes of the operators of this part."""
    inputs = part.inputs
    step = shaped_step(Timeline.of(event for event, _ in inputs), [given for _, given in inputs])
    return replace(step, messages=tuple(m for m in part.messages if m.kind == Kind.ANNOTATION))


def _peak_bytes() -> int:
    """Return the peak memory: of the device's allocator since the recording began, or of the process so far on a CPU."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _time_op() -> float:
    x = torch.zeros(1)
    return _fastest(lambda: x.add_(0))


def _time_module() -> float:
    x, module = torch.zeros(1), torch.nn.Identity()
    return _fastest(lambda: module(x))


def _time_read() -> float:
    x = torch.zeros(1)
    return _fastest(lambda: x.item())


def _fastest(run: Callable[[], object], batches: int = 25, calls: int = 40) -> float:
    """Return the nanoseconds of one call, the fastest of a few batches."""
    best = float("inf")
    for _ in range(batches):
        begin = time.perf_counter_ns()
        for _ in range(calls):
            run()
        best = min(best, (time.perf_counter_ns() - begin) / calls)
    return best
