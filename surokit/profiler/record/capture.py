"""Record what a block of PyTorch code does, whoever wrote it, and return a Profile: `profile()`.

Underneath is torch.profiler (`tracer`), read from memory, without a trace file. Beside it, only while the block runs:
- steps through torch's global optimizer post-step hook (or `p.step()`, for code without an optimizer);
- modules through torch's global forward hooks: a host-clock time at entry and exit;
- sync points, modules' paths, the garbage collector, the data loader and the user's current line through `watch`.
All of it is removed when the block ends, also by an exception, which passes on after the profile so far is kept.

The tracer starts anew in the warm-up, and its earlier events are dropped once a step was measured. One warm-up step is recorded
with the shapes of its operators, which slows a small step by a quarter: from it come FLOPs and bytes. Where `p.step()` marks
the steps it is the last, and the tracer starts anew right there. An optimizer marks a step inside a range of torch's own, over
which the tracer cannot start anew (`tracer` says why); it does so where the next module is called, and the step before the
last of the warm-up has the shapes, so that all measured steps are whole.

A profile inside a running one has no tracer of its own: it is cut from the outer recording when the outer block ends.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from enum import IntEnum
from itertools import pairwise
from numbers import Integral, Real
from types import TracebackType
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.flop_counter import flop_registry

from surokit.profiler.record.recorder import Recorder, shaped_part
from surokit.profiler.record.recording import Recording, Shaped
from surokit.profiler.record.settings import optimizer_setting, torch_settings
from surokit.profiler.record.tracer import RawTrace, capturing, synchronize
from surokit.profiler.record.watch import on_optimizer_step
from surokit.profiler.report.profile import Profile

_USER = "user"  # who marks a step by p.step(); optimizers are known by their id
_active: Capture | None = None  # the block that records


def profile(
    steps: int = 5,
    warmup: int = 3,
    *,
    tokens: float | None = None,
    sample: bool = True,
    name: str = "",
    gpu: bool = True,
    eager: bool = False,
    usd_per_gpu_hour: float | None = None,
) -> Capture:
    """Profile a block: `with sk.profile() as p: ...`, then read `p` after the block.

    A step ends where an optimizer steps, or where the block calls `p.step()`. The first `warmup` steps are left out; of two
    or more, one is recorded with the shapes of its operators, for FLOPs. Recording stops after `warmup + steps`, the block
    itself runs to its end. A block with fewer steps uses what there is, and without any the block is one step.

    tokens: tokens in a step, for tokens_per_s; None takes the elements of the largest embedding lookup in each call of a model.
    Calls without gradients (a reference model, an evaluation) do not count where others have them.
    sample: sample the user's line every 5 ms, to name the lines of long gaps.
    name: a title for the profile.
    gpu: False leaves device activity out, where the driver or another tool stands in the way: times are then the host's.
    eager: set torch.compile aside inside the block, so that the modules inside compiled code get rows of their own.
    usd_per_gpu_hour: a price, for what lost time costs.

    Inside another profile's block it is read when that one ends. Where a torch profiler already runs, steps, modules and
    reads of device values are recorded, without operators and kernels, and the profile says so. Raises ValueError for
    steps < 1, warmup < 0, tokens <= 0 or a negative price, and RuntimeError when the same block is entered while it runs.
    """
    return Capture(
        steps,
        warmup,
        tokens=tokens,
        sample=sample,
        name=name,
        gpu=gpu,
        eager=eager,
        usd_per_gpu_hour=usd_per_gpu_hour,
    )


def profile_calls(
    run: Callable[[], object],
    steps: int = 5,
    warmup: int = 3,
    *,
    tokens: float | None = None,
    name: str = "",
    gpu: bool = True,
    eager: bool = False,
    usd_per_gpu_hour: float | None = None,
) -> Profile:
    """Profile repeated calls, each a step: `warmup` calls, then `steps` that count. The first warm-up call is for what is
    built on first use, the last is recorded with shapes, and those between are timed without the profiler, each until the device
    is done.

    When a call raises, the exception passes on; once the profiler ran it carries the profile so far as its attribute
    `profile`. The other arguments and errors are those of `profile`.
    """
    capture = Capture(
        steps, min(warmup, 1), tokens=tokens, name=name, gpu=gpu, eager=eager, usd_per_gpu_hour=usd_per_gpu_hour
    )
    capture.optimizer_marks = False
    walls = []
    for _ in range(warmup - 1):
        synchronize()
        begin = time.perf_counter_ns()
        run()
        synchronize()  # a call on a GPU returns before its work is done
        walls.append(time.perf_counter_ns() - begin)
    if walls[1:]:
        capture.unprofiled_ns = int(np.median(walls[1:]))
    with capture as result:
        try:
            for _ in range(min(warmup, 1) + steps):
                run()
                result.step()
        except BaseException as error:
            error.profile = result  # type: ignore[attr-defined]
            raise
    return result


_ELSEWHERE = (
    "the steps ran on another thread than the profile, and their operators were not recorded: enter sk.profile() on the thread "
    "that trains"
)


_TOO_FEW = "FLOPs are unknown: they come from a warm-up step, and need warmup=2 or more"
_NOT_WHOLE = (
    "FLOPs are unknown: the steps multiply before they call a module, which is where shapes begin to be recorded; mark the steps "
    "with p.step()"
)
_PRODUCTS = frozenset(str(operator).replace(".", "::") for operator in flop_registry)


class _Stage(IntEnum):
    """A stage says which part of the block the tracer records."""

    EARLY = 0
    SHAPED = 1  # the last warm-up step
    MEASURED = 2


class _Mark(NamedTuple):
    """A mark holds the end of a step and the begin of the next: between them lies the profiler's own work, which belongs to
    neither."""

    at_ns: int
    next_ns: int
    who: object
    thread: int
    tokens: tuple[int, int]  # so far


class Capture:
    """A Capture is the context manager that `profile()` returns; entering it gives the Profile, which is filled when the
    block ends."""

    def __init__(
        self,
        steps: int,
        warmup: int,
        *,
        tokens: float | None = None,
        sample: bool = True,
        name: str = "",
        gpu: bool = True,
        eager: bool = False,
        usd_per_gpu_hour: float | None = None,
    ) -> None:
        if not (_whole(steps) and _whole(warmup) and steps >= 1 and warmup >= 0):
            raise ValueError(
                f"profile() needs whole numbers steps >= 1 and warmup >= 0, not steps={steps!r}, warmup={warmup!r}"
            )
        if tokens is not None and not (_number(tokens) and tokens > 0):
            raise ValueError(f"tokens are those of a step, a number above zero, and cannot be {tokens!r}")
        if usd_per_gpu_hour is not None and not (_number(usd_per_gpu_hour) and usd_per_gpu_hour >= 0):
            raise ValueError(f"usd_per_gpu_hour is a price in dollars and cannot be {usd_per_gpu_hour!r}")
        self._steps, self._warmup, self._tokens, self._name = steps, warmup, tokens, name
        self._sample, self._gpu, self._eager, self._usd = sample, gpu, eager, usd_per_gpu_hour
        self._open = False
        self.unprofiled_ns: int | None = None
        self.optimizer_marks = True  # whether an optimizer's step ends a step

    def __enter__(self) -> Profile:
        if self._open:
            raise RuntimeError("this profile is already running: make another with sk.profile() for a block inside it")
        global _active
        self._marks: list[_Mark] = []
        self._counts: Counter[object] = Counter()
        self._optimizers: dict[int, str] = {}
        self._settings: dict[str, str] = {}
        self._notes: list[str] = []
        self._end_ns: int | None = None  # once all steps were seen, or the block has ended
        self._thread = threading.get_native_id()
        self._lock = threading.RLock()
        self._inner: list[Capture] = []
        self._before = _active
        self._outer = None if _active is None or _active._recorder.over else _active
        self._recorder: Recorder
        self._leader: object = None  # who decides where warm-up ends
        self._stage = _Stage.SHAPED if self._warmup == 1 + self.optimizer_marks else _Stage.EARLY
        self._shaped: tuple[RawTrace, bool, int] | None = None  # and whether p.step() marked it, and its tokens
        with ExitStack() as stack:
            if self._eager:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                self._notes.append("profiled eagerly: torch.compile was set aside in this block")
            if self._outer is not None:
                self._recorder = self._outer._recorder
                self._recorder.resume()
                self._outer._inner.append(self)
                synchronize()
            else:
                self._recorder = Recorder(self._gpu, self._sample)
                stack.callback(self._recorder.close)
                self._recorder.start(self._stage == _Stage.SHAPED)
                _active = self
            stack.callback(on_optimizer_step(self._on_optimizer_step).remove)
            self._stack = stack.pop_all()
        self._open = True
        self.profile = Profile._pending(self._on_user_step)
        if self._outer is not None:
            self.profile._too_early = (
                "this profile is inside another profile: it is cut from that one and read when that one ends"
            )
        self._tokens_before = self._part_tokens = self._recorder.watch.tokens
        self._start_ns = time.time_ns()
        return self.profile

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        global _active
        self._open = False
        if error is not None and not isinstance(error, GeneratorExit):
            self._notes.append(f"the block ended with {type(error).__name__}: the profile holds what ran until then")
        if self._end_ns is None:
            synchronize()
            self._end(time.time_ns())
        if self._outer is not None:
            self._stack.close()
            self._outer._stop_when_full()
            return
        try:
            self._stack.close()
        finally:
            _active = self._before
            for block in (self, *self._inner):
                block._finish(error)
            self._recorder.keep(lambda part: False)
            self._shaped = None

    # ------------------------------------------------------------------------------------------------ steps

    def _on_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if capturing():
            return  # recorded into a CUDA graph, which is no step yet
        if id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = optimizer_setting(optimizer)
        if self.optimizer_marks:
            self._mark(id(optimizer))

    def _on_user_step(self) -> None:
        self._mark(_USER)

    def _mark(self, who: object) -> None:
        now = time.time_ns()
        with self._lock:
            if self._end_ns is not None:
                return
            self._counts[who] += 1
            if not self._settings:  # while they still are as the profiled code made them
                self._settings = torch_settings()
            if self._outer is None:
                if who == self._leader:
                    self._recorder.step_ended()
                self._advance(who, now)
            tokens = self._recorder.watch.tokens
            self._marks.append(_Mark(now, time.time_ns(), who, threading.get_native_id(), tokens))
            if self._counts[who] >= self._warmup + self._steps and (who == _USER or not self._counts[_USER]):
                self._end(now)
                if self._outer is None:
                    self._stop_when_full()

    def _advance(self, who: object, now: int) -> None:
        """Begin the part that follows this mark. The first optimizer to come that far leads; `p.step()` takes over and
        begins its own warm-up."""
        if who == _USER and self._leader != _USER:
            self._stage = self._stage if self._leader is None else _Stage.EARLY
            self._leader, self._shaped = who, None
        if self._leader not in (None, who):
            return
        count, measured_from = self._counts[who], self._warmup - (who != _USER)
        if self._stage < _Stage.MEASURED and 1 <= measured_from == count:
            self._begin(_Stage.MEASURED, who, now)
        elif self._stage < _Stage.MEASURED and 1 <= measured_from - 1 == count:
            self._stage = _Stage.EARLY
            self._begin(_Stage.SHAPED, who, now)
        elif self._stage == _Stage.MEASURED and count == self._warmup + 1:  # a step was measured: drop the warm-up
            self._recorder.keep(lambda part: any(block._saw(part) for block in self._inner))

    def _begin(self, stage: _Stage, who: object, now: int) -> None:
        if any(block._end_ns is None for block in self._inner):  # theirs has to be whole
            return
        since_ns = self._marks[-1].next_ns if self._marks else self._start_ns
        part = self._recorder.turn(shaped=stage == _Stage.SHAPED, at_once=who == _USER, since_ns=since_ns)
        if part is not None:
            before, self._part_tokens = self._part_tokens, self._recorder.watch.tokens
            if (
                self._stage == _Stage.SHAPED and part.start_ns < now
            ):  # else no module was called, and the step not recorded
                self._shaped = part, who == _USER, _tokens_between(before, self._part_tokens)
            self._stage, self._leader = stage, who

    def _saw(self, part: RawTrace) -> bool:
        return self._start_ns < part.end_ns and (self._end_ns is None or part.start_ns < self._end_ns)

    def _step_marks(self) -> list[_Mark]:
        """Return the marks that end the steps: the user's own calls, else those of the optimizer that stepped most often
        (of several, as in a GAN, the one that stepped last), so that a step is one turn of the loop."""
        most = max(self._counts.values(), default=0)
        often = [mark.who for mark in self._marks if self._counts[mark.who] == most]
        chosen = _USER if self._counts[_USER] else often[-1] if often else None
        return [mark for mark in self._marks if mark.who == chosen]

    # ------------------------------------------------------------------------------------------------ the end

    def _end(self, at_ns: int) -> None:
        self._settings = self._settings or torch_settings()
        self._end_ns = at_ns
        self._end_tokens = self._recorder.watch.tokens

    def _stop_when_full(self) -> None:
        with self._lock:
            if self._end_ns is not None and all(block._end_ns is not None for block in self._inner):
                self._recorder.stop()

    def _finish(self, raised: BaseException | None) -> None:
        if self._end_ns is None:
            self._notes.append("the outer profile ended first: this one holds what ran until then")
            self._end(time.time_ns())
        try:
            self.profile._finish(self._cut(), self._name)
        except Exception as error:
            if raised is None:
                raise
            # what the user's code raised must not be hidden behind it
            raised.add_note(f"The profile of this block could not be made ({type(error).__name__}: {error}).")

    def _cut(self) -> Recording:
        assert self._end_ns is not None
        marks, warmup = self._step_marks(), self._warmup
        measured = len(marks) > warmup
        since_ns = marks[warmup - 1].next_ns if measured and warmup else self._start_ns
        recording = self._recorder.cut(self._start_ns, self._end_ns, since_ns)
        notes = [*recording.notes, *self._notes]
        if self._outer is not None:
            notes.append("inside another profile, whose recording it is cut from")
        thread = Counter(mark.thread for mark in marks).most_common(1)[0][0] if marks else self._thread
        if thread != self._recorder.thread:
            notes.append(_ELSEWHERE)
        tokens = self._tokens_of_a_step(marks)
        shaped, by_optimizer = self._shaped_part(marks, tokens), bool(marks) and marks[0].who != _USER
        moments = tuple(mark.next_ns for mark in marks[:-1]) + tuple(mark.at_ns for mark in marks[-1:])
        if shaped is None and measured and warmup < 2:
            notes.append(_TOO_FEW)
        elif shaped is not None and by_optimizer and warmup > 2 and _multiplies_early(recording, moments[warmup:]):
            shaped = None
            notes.append(_NOT_WHOLE)
        settings = self._settings | {
            "optimizer": "; ".join(self._optimizers.values()),
            "autocast": self._recorder.watch.autocast,
            "loader": self._recorder.watch.loader,
        }
        return replace(
            recording,
            marks_ns=moments,
            warmup=warmup,
            thread=thread,
            traced=recording.traced and thread == self._recorder.thread,
            tokens_per_step=self._tokens if self._tokens is not None else tokens or None,
            unprofiled_ns=self.unprofiled_ns,
            notes=tuple(notes),
            shaped=shaped,
            settings=tuple(settings.items()),
            usd_per_gpu_hour=self._usd,
        )

    def _tokens_of_a_step(self, marks: list[_Mark]) -> float:
        """Return the mean over the measured steps; without marks, or with a single one, the block is the step."""
        if len(marks) < 2:
            return _tokens_between(self._tokens_before, self._end_tokens)
        skipped = min(self._warmup, len(marks) - 1)
        before = marks[skipped - 1].tokens if skipped else self._tokens_before
        return _tokens_between(before, marks[-1].tokens) / (len(marks) - skipped)

    def _shaped_part(self, marks: list[_Mark], tokens: float) -> Shaped | None:
        """Return the step with shapes; `tokens` are those of a measured step."""
        if self._shaped is not None:
            part, by_user, seen = self._shaped
            size = seen / tokens if tokens else float(not seen)
            return replace(shaped_part(part), size=size) if by_user == (marks[0].who == _USER) else None
        whole = not marks and self._outer is None and self._stage == _Stage.SHAPED  # the block is the step
        last = self._recorder.last_part
        return shaped_part(last) if whole and last is not None else None


def _tokens_between(before: tuple[int, int], after: tuple[int, int]) -> int:
    """Return the tokens that were looked up with gradients, or where there were none, without."""
    without, with_gradients = (there - here for here, there in zip(before, after))
    return with_gradients or without


def _whole(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral)


def _number(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)


def _multiplies_early(recording: Recording, marks_ns: tuple[int, ...]) -> bool:
    """Return whether a product runs in one of these steps before its first module: a shaped step begins there and lacks it."""
    t, calls_S = recording.timeline, np.sort(recording.start_S)
    products = np.array([name in _PRODUCTS for name in t.names], bool)
    product_E = t.start_E[products[t.name_E]]
    for begin, end in pairwise(marks_ns):
        first, call = (times[np.searchsorted(times, begin) :][:1] for times in (product_E, calls_S))
        if len(first) and first[0] < min(end, *call):
            return True
    return False
