"""`profile()`: records what a block of PyTorch code does, whoever wrote it, and returns a Profile.

Underneath is torch.profiler (CPU, and CUDA where there is a device), read from memory, without a trace file. Beside it,
only while the block runs:
- steps through torch's global optimizer post-step hook (or `p.step()`, for code without an optimizer);
- modules through torch's global forward hooks: a host-clock time at entry and exit;
- sync points, modules' paths and the user's current line through `watch`.
All of it is removed when the block ends, also by an exception, which passes on after the profile so far is kept.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity

from surokit.profiler import watch as watching
from surokit.profiler.recording import Costs, Recording
from surokit.profiler.report import Profile
from surokit.profiler.timeline import CATEGORIES, Event, Kind, Timeline
from surokit.profiler.watch import Sampler, Watch, ignoring_warning, watched_cuda_syncs, watched_reads

_CLOCK = "surokit::clock"
_active: Capture | None = None


def profile(
    steps: int = 5, warmup: int = 3, *, tokens: float | None = None, sample: bool = True, name: str = ""
) -> Capture:
    """Profile a block: `with sk.profile() as p: ...`, then read `p` after the block.

    A step ends where an optimizer steps, or where the block calls `p.step()`. The first `warmup` steps are left out and
    recording stops after `warmup + steps`; the block itself runs to its end. A block with fewer steps uses what there
    is, and without any the block is one step.
    tokens: tokens in a step, for tokens_per_s; None takes the elements of the largest embedding lookup.
    sample: sample the user's line every 5 ms, to name the lines of long gaps.
    name: a title for the profile.
    Raises ValueError for steps < 1 or warmup < 0, and RuntimeError when another profile or torch profiler already runs.
    """
    return Capture(steps, warmup, tokens=tokens, sample=sample, name=name)


def profile_calls(
    run: Callable[[], object], steps: int = 5, warmup: int = 3, *, tokens: float | None = None, name: str = ""
) -> Profile:
    """Profile repeated calls: `warmup` calls without the profiler, then `steps` calls with it, each call a step.

    When a call raises, the exception passes on and carries the profile so far as its attribute `profile`.
    """
    capture = Capture(steps, 0, tokens=tokens, name=name)
    walls = []
    for _ in range(warmup):
        begin = time.perf_counter_ns()
        run()
        walls.append(time.perf_counter_ns() - begin)
    if walls[1:]:  # the first call also pays for what is built on first use
        capture.unprofiled_ns = int(np.median(walls[1:]))
    capture.optimizer_marks = False
    with capture as result:
        try:
            for _ in range(steps):
                run()
                result.step()
        except BaseException as error:
            error.profile = result  # type: ignore[attr-defined]
            raise
    return result


class Capture:
    """The context manager that `profile()` returns; entering it gives the Profile, which is filled when the block
    ends."""

    def __init__(
        self, steps: int, warmup: int, *, tokens: float | None = None, sample: bool = True, name: str = ""
    ) -> None:
        if steps < 1 or warmup < 0:
            raise ValueError(f"profile() needs steps >= 1 and warmup >= 0, not steps={steps}, warmup={warmup}")
        self._steps, self._warmup, self._tokens, self._name = steps, warmup, tokens, name
        self._sample = sample
        self.unprofiled_ns: int | None = None
        self.optimizer_marks = True  # whether an optimizer's step ends a step

    def __enter__(self) -> Profile:
        global _active
        if _active is not None:
            raise RuntimeError("profile blocks cannot be nested: another sk.profile() is still running; end it first")
        self._watch = Watch()
        self._marks: list[tuple[int, object]] = []
        self._counts: Counter[object] = Counter()
        self._recording: Recording | None = None
        self._costs = Costs()
        self._notes: list[str] = []
        self._thread = threading.get_native_id()
        self._stack = ExitStack()
        _active = self
        self._stack.callback(_leave)
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        self.profile = Profile._pending(self._on_user_step)
        return self.profile

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._stop(whole=True)
        finally:
            self._stack.close()
        assert self._recording is not None
        recording = self._recording
        if error is not None and not isinstance(error, GeneratorExit):
            note = f"the block ended with {type(error).__name__}: the profile holds what ran until then"
            recording = _with_note(recording, note)
        self.profile._finish(recording, self._name)

    # ------------------------------------------------------------------------------------------------ start and stop

    def _start(self) -> None:
        if torch._C._autograd._profiler_enabled():
            raise RuntimeError("a torch profiler is already running on this thread: end it before sk.profile() starts")
        cuda = torch.cuda.is_available()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        plain = _time_op(), _time_module(), _time_read()
        self._tracer = torch.profiler.profile(activities=activities)
        with _without_chatter():
            self._tracer.start()
        self._tracing = True
        # The hooks stay passive once recording has stopped; they are removed when the block ends.
        watch = self._watch
        self._stack.callback(self._abort)
        self._stack.callback(torch_module.register_module_forward_pre_hook(watch.enter_module).remove)
        self._stack.callback(torch_module.register_module_forward_hook(watch.leave_module, always_call=True).remove)
        self._stack.callback(register_optimizer_step_post_hook(self._on_optimizer_step).remove)
        self._stack.enter_context(ignoring_warning("Using `torch.compile"))
        self._stack.enter_context(watched_reads(watch))
        if cuda:
            self._stack.enter_context(watched_cuda_syncs(watch))
            self._calibrate_gap()
        watch.active = True
        watched = _time_op(), _time_module(), _time_read()
        self._costs = Costs(*(max(now - before, 0.0) for now, before in zip(watched, plain)))
        watch.forget()
        self._clock_pairs = [self._clock_pair() for _ in range(3)]
        if self._sample:
            self._sampler: Sampler | None = Sampler(threading.get_ident(), watch)
            self._stack.callback(self._sampler.stop)
            self._sampler.start()
        else:
            self._sampler = None
        _synchronize()
        self._start_ns = time.time_ns()

    def _calibrate_gap(self) -> None:
        """Short kernels behind a long one: the gaps between them are the device's own, whatever the host does."""
        if not torch.cuda.is_initialized():
            return
        with suppress(RuntimeError):
            short = torch.empty(16, device="cuda")
            torch.cuda.synchronize()
            torch.cuda._sleep(4_000_000)  # cycles: about 2 ms, and no memory
            for _ in range(64):
                short.zero_()
            torch.cuda.synchronize()

    def _clock_pair(self) -> int:
        with torch.profiler.record_function(_CLOCK):
            return time.time_ns()

    def _stop(self, whole: bool) -> None:
        """Ends the recording once; `whole` when the block itself ended."""
        if not self._tracing:
            return
        self._tracing = False
        end_ns = time.time_ns()
        self._watch.active = False
        if self._sampler is not None:
            self._sampler.stop()
        with suppress(RuntimeError):  # a device error belongs to the user's code, which has raised it already
            _synchronize()
        synced_ns = time.time_ns()
        rows: list[Event] = []
        if torch._C._autograd._profiler_enabled():
            with _without_chatter():
                self._tracer.stop()
            results = self._tracer.profiler.kineto_results if self._tracer.profiler is not None else None
            rows = list(_read_events(results.events())) if results is not None else []
        else:
            self._notes.append("another torch profiler ran inside the block and took the recording with it")
        self._recording = self._assemble(rows, synced_ns if whole else end_ns)

    def _abort(self) -> None:
        """Stops torch's profiler when the start itself failed."""
        if self._tracing and self._recording is None:
            self._tracing = False
            with _without_chatter(), suppress(RuntimeError):
                self._tracer.stop()

    # ------------------------------------------------------------------------------------------------ steps

    def _on_optimizer_step(self, optimizer: object, args: object, kwargs: object) -> None:
        if self.optimizer_marks:
            self._mark(id(optimizer))

    def _on_user_step(self) -> None:
        self._mark("user")

    def _mark(self, who: object) -> None:
        if not self._tracing:
            return
        self._marks.append((time.time_ns(), who))
        self._counts[who] += 1
        if self._counts[who] >= self._warmup + self._steps and (who == "user" or not self._counts["user"]):
            self._stop(whole=False)

    def _step_marks(self) -> tuple[int, ...]:
        """The marks of whoever marks the steps: the user's own calls, else the optimizer that stepped most often (of
        several, as in a GAN, the one that stepped last), so that a step is one turn of the loop."""
        if not self._marks:
            return ()
        most = max(self._counts.values())
        chosen = "user" if self._counts["user"] else [who for _, who in self._marks if self._counts[who] == most][-1]
        return tuple(t for t, who in self._marks if who == chosen)

    # ------------------------------------------------------------------------------------------------ what was recorded

    def _assemble(self, rows: list[Event], end_ns: int) -> Recording:
        watch, cuda = self._watch, torch.cuda.is_available()
        clocks = [e.start_ns for e in rows if e.name == _CLOCK]
        # torch's clock and the host's differ by microseconds at most; the smallest of three pairs is the offset (a
        # range starts just before).
        offset = min((host - mine for host, mine in zip(self._clock_pairs, clocks)), default=0)
        start_ns = self._start_ns - offset
        calibration = [e for e in rows if e.end_ns <= start_ns]
        rows = [e for e in rows if e.start_ns >= start_ns and e.name != _CLOCK]
        gap_ns = _back_to_back(calibration)
        if cuda and torch.cuda.is_initialized() and not any(e.kind == Kind.KERNEL for e in [*calibration, *rows]):
            self._notes.append(
                "the driver let no device activity be recorded (CUPTI refused, or in use elsewhere): times are the host's"
            )
        spans = watch.spans(offset)
        sampled = self._sampler.samples(offset) if self._sampler else ((), np.empty(0, np.int64), np.empty(0, np.int64))
        sample_ns = self._sampler.cost_ns() if self._sampler else 0.0
        marks = tuple(t - offset for t in self._step_marks())
        counted = max(len(marks), 1)
        return Recording(
            timeline=Timeline.of(rows),
            start_ns=start_ns,
            end_ns=end_ns - offset,
            marks_ns=marks,
            warmup=self._warmup,
            thread=self._thread,
            modules=watch.module_names(),
            module_S=spans[0],
            start_S=spans[1],
            end_S=spans[2],
            thread_S=spans[3],
            syncs=tuple(replace(s, file=watching.name_source(s.file)) for s in watch.sync_points(offset)),
            places=tuple((watching.name_source(file), line) for file, line in sampled[0]),
            place_P=sampled[1],
            time_P=sampled[2],
            tokens_per_step=self._tokens if self._tokens is not None else (watch.tokens / counted or None),
            device=torch.cuda.get_device_name() if cuda and torch.cuda.is_initialized() else "cpu",
            back_to_back_ns=gap_ns,
            costs=replace(self._costs, sample_ns=sample_ns),
            peak_bytes=_peak_bytes(),
            unprofiled_ns=self.unprofiled_ns,
            notes=tuple(self._notes),
        )


def _leave() -> None:
    global _active
    _active = None


def _with_note(recording: Recording, note: str) -> Recording:
    return replace(recording, notes=(*recording.notes, note))


# ----------------------------------------------------------------------------------------------------------------
# torch's events


def _read_events(events: list[Any]) -> Iterator[Event]:
    """torch's in-memory events as rows; what is of no kind of ours is skipped."""
    for e in events:
        kind = _kind(e)
        if kind is None:
            continue
        start = e.start_ns()
        on_device = kind in (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET)
        own = e.correlation_id()
        yield Event(
            kind,
            e.name(),
            start,
            start + e.duration_ns(),
            thread=e.device_resource_id(),
            correlation=own if kind == Kind.RUNTIME or on_device else -1,
            external=own if kind == Kind.OP else e.linked_correlation_id() or -1,
            sequence=e.sequence_nr(),
            nbytes=max(e.nbytes(), 0) if on_device else 0,
        )


def _kind(e: Any) -> Kind | None:
    if hasattr(e, "activity_type"):
        return CATEGORIES.get(e.activity_type())
    if e.is_user_annotation():  # older torch: the category from what the event says about itself
        return Kind.ANNOTATION if e.device_type() == torch.profiler.DeviceType.CPU else None
    name = e.name()
    if e.device_type() == torch.profiler.DeviceType.CPU:
        return Kind.RUNTIME if name.startswith(("cuda", "cu")) and "::" not in name else Kind.OP
    return Kind.MEMCPY if name.startswith("Memcpy") else Kind.MEMSET if name.startswith("Memset") else Kind.KERNEL


def _back_to_back(calibration: list[Event]) -> int:
    """Median gap between short activities behind a full queue, in nanoseconds; 1000 where none was measured."""
    device = sorted((e for e in calibration if e.kind in (Kind.KERNEL, Kind.MEMSET)), key=lambda e: e.start_ns)[-48:]
    between = [after.start_ns - before.end_ns for before, after in pairwise(device)]
    return int(np.clip(np.median(between), 100, 20_000)) if len(between) >= 16 else 1000


def _synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _peak_bytes() -> int:
    """Peak memory so far: of the device's allocator, or of the process on a CPU. No counter is reset."""
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


def _fastest(run: Callable[[], object], batches: int = 5, calls: int = 40) -> float:
    """Nanoseconds of one call, the fastest of a few batches."""
    best = float("inf")
    for _ in range(batches):
        begin = time.perf_counter_ns()
        for _ in range(calls):
            run()
        best = min(best, (time.perf_counter_ns() - begin) / calls)
    return best


@contextmanager
def _without_chatter() -> Iterator[None]:
    """torch 2.13's tracer prints "USDT:..." lines to the error stream when it starts and stops. They are caught at the
    file descriptor, the only place where C++ output can be; anything else that was printed meanwhile is passed on."""
    try:
        saved = os.dup(2)
    except OSError:  # no error stream
        yield
        return
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            caught.seek(0)
            for line in caught:
                if not line.startswith(b"USDT:"):
                    os.write(2, line)
