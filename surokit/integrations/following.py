"""Follow the training of a Trainer that is not ours: what the callbacks for `transformers` and for Lightning share.

A `Following` has a `surokit.Live`, whose requests it passes on, and answers interrupts (Ctrl-C, a notebook's stop button) on
the main thread: the first asks for a stop at the end of the step, the second raises KeyboardInterrupt at once. A stop saves a
checkpoint first, since neither Trainer does. With several processes nothing can be asked: one process cannot stop alone.

When a training begins it says which recipe holds in the model that trains, and warns where one was applied that does not. What
health sees is on the panel, and what is grave goes to stderr at once. Steps in mid-training are profiled where that was asked
for. The time of a profile's evaluation, as that of evaluations and checkpoints, is no step's.
"""

from __future__ import annotations

import sys
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import torch

from surokit.live import Live
from surokit.profiler import Profile
from surokit.profiler import profile as profile_block
from surokit.train.errors import NoTargetsError
from surokit.train.observing import Applied, Observer, bypassed, what_is_applied
from surokit.widgets.panel import View, ViewName

GRAVE = ("nonfinite", "skipped", "no_targets", "unstable", "diverging")  # kinds of events that are told on stderr
WARMUP = 2  # steps before the profiled ones: one of them is recorded with shapes, for FLOPs


class Window:
    """A Window profiles the steps `first` to `last` of a training, both included; `profile` is the result.

    A profile that fails costs a warning, and the training goes on.
    """

    def __init__(self, first: int, last: int) -> None:
        whole = all(isinstance(step, int) and not isinstance(step, bool) for step in (first, last))
        if not whole or not 1 <= first <= last:
            raise ValueError(
                f"profile=({first!r}, {last!r}): the first and the last step to profile, counted from 1, such as (20, 25)."
            )
        self.first, self.last = first, last
        self.profile: Profile | None = None
        self._pending: Profile | None = None
        self._stack = ExitStack()
        self._over = False

    def step_begins(self, step: int) -> None:
        """Begin to record where `step`, counted from 1, is one of the window or of its warm-up."""
        if self._over or self._pending is not None or not self.first - WARMUP <= step <= self.last:
            return
        warmup = max(self.first - step, 0)
        name = f"steps {max(self.first, step):,} to {self.last:,}"
        try:
            block = profile_block(self.last + 1 - step - warmup, warmup, name=name)
            self._pending = self._stack.enter_context(block)
        except Exception as error:
            self._fail(error)

    def step_ends(self, step: int) -> None:
        """Mark the end of `step`, and make the profile behind the last one."""
        if self._pending is None:
            return
        try:
            self._pending.step()
        except Exception as error:
            self._fail(error)
        if step >= self.last:
            self.close()

    def close(self) -> None:
        """Make the profile of what was recorded."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        self._over = True
        try:
            self._stack.close()
            self.profile = pending
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._over, self._pending = True, None
        try:
            self._stack.close()
        except Exception as again:
            error.add_note(str(again))
        warnings.warn(
            f"The steps {self.first} to {self.last} are not profiled ({type(error).__name__}: {error}). Training goes on.",
            stacklevel=2,
        )


class Following:
    """A Following opens a Live when a training begins, and closes it when that ends.

    `live` is the panel of the last training, `saved` the checkpoint that its stop left, `applied` the recipe that was found in the
    model, `profile` the profile of the steps that were asked for.

    No callback of `transformers` hears that a training failed, so what it left open is closed when the next one begins.
    """

    _open_ones: ClassVar[weakref.WeakSet[Following]] = weakref.WeakSet()

    def __init__(
        self,
        title: str | None = None,
        every: float = 0.25,
        view: View | ViewName | None = "auto",
        *,
        run_dir: str | Path | None = None,
        usd_per_gpu_hour: float | None = None,
        save_on_stop: bool = True,
        interrupts: bool = True,
        profile: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        if profile is not None:
            Window(*profile)
        self.profile_steps = profile
        self.title = title
        self.every = every
        self.view = view
        self.run_dir = run_dir
        self.usd_per_gpu_hour = usd_per_gpu_hour
        self.save_on_stop = save_on_stop
        self.interrupts = interrupts
        self.live: Live | None = None
        self.saved: Path | None = None
        self._alone = True  # no other process trains with this one
        self.applied: Applied | None = None
        self._window: Window | None = None
        self._event: object = None  # of health, the last one that was looked at
        self._marked_s: float | None = None  # when what is no work of a step began; None outside of a training
        self._stack = ExitStack()
        self._training: FrameType | None = None  # the call of the Trainer that trains; None outside of a training

    @property
    def profile(self) -> Profile | None:
        """Return the profile of the steps that `profile=` names, once they are done; else None."""
        return None if self._window is None else self._window.profile

    def _open(
        self, model: Any, *, total: int | None, recipe: str, step: int, driver: str, gpus: int | None = None
    ) -> Live:
        """Open the panel of a training that begins behind `step`. driver: the module whose functions train. gpus: as for Live."""
        for other in list(Following._open_ones):
            if other is not self and not other._trains():
                other._close("ended without a word")
        if self.live is not None:  # of a training of its own that failed, say
            self.live.close("ended without a word")
        self.saved = self._event = None
        self._window = None if self.profile_steps is None else Window(*self.profile_steps)
        self.applied = what_is_applied(model) if isinstance(model, torch.nn.Module) else None
        if self.applied is not None:
            print(f"surokit: {self.applied.words}", file=sys.stderr)
            if self.applied.recipe is not None:
                recipe = "; ".join(filter(None, (self.applied.words, recipe)))
            for wrong in self.applied.wrong:
                warnings.warn(wrong, stacklevel=3)
        self.live = live = Live(
            self.title or (type(model).__name__ if model is not None else "Trainer"),
            self.every,
            total=total,
            recipe=recipe,
            usd_per_gpu_hour=self.usd_per_gpu_hour,
            run_dir=self.run_dir,
            exist="resume" if step else "new",
            view=self.view,
            buttons=self._alone,
            model=model if isinstance(model, torch.nn.Module) else None,
            gpus=gpus,
        )
        live.at_close(self._leave)
        self._training = next((f for f in _calls(sys._getframe()) if f.f_globals.get("__name__") == driver), None)
        Following._open_ones.add(self)
        self._marked_s = time.perf_counter()
        if self.interrupts and self._alone:
            live.control.driver = driver
            if self.save_on_stop:
                live.control.answer = "stopping after this step, which is saved; interrupt again to stop at once"
            self._stack.enter_context(live.control.interruptible())
        return live

    def _leave(self) -> None:
        """Take back what stands around the training."""
        self._marked_s = self._training = None
        Following._open_ones.discard(self)
        if self._window is not None:
            self._window.close()
        self._stack.close()

    def _trains(self) -> bool:
        """Return whether the call that began this training still runs, in this thread or another."""
        tops = sys._current_frames().values()
        return self._training is not None and any(f is self._training for top in tops for f in _calls(top))

    def _close(self, reason: str | None) -> None:
        """End the panel, with all that has come."""
        if self.live is not None:
            self.live.close(reason)
            self._tell_health()

    # -- a step

    def _step_begins(self, step: int) -> None:
        """Note that the work of `step` begins, and that its batches were waited for since the last mark."""
        if self.live is None or self._marked_s is None:
            return
        stall_ms = 1e3 * (time.perf_counter() - self._marked_s)
        if self._window is not None:
            with self.live.aside():
                self._window.step_begins(step)
        self.live.begin_step(stall_ms)

    def _step_ends(self, step: int, **values: float | torch.Tensor | None) -> None:
        """Log a step that was done. NoTargetsError where several in a row had no label that counts, and no other process waits."""
        assert self.live is not None
        if self.applied is not None and self.applied.recipe is not None and self._observer is not None:
            names = self._observer.never_called()
            if names:
                warnings.warn(bypassed(self.applied.recipe, names), stacklevel=3)
        try:
            self.live.log(step=step, **values)
        except NoTargetsError:
            if self._alone:  # the other processes may have labels, and would wait for this one
                raise
        finally:
            self._tell_health()
            if self._window is not None:
                with self.live.aside():
                    self._window.step_ends(step)
        self._marked_s = time.perf_counter()

    @property
    def _observer(self) -> Observer | None:
        return None if self.live is None else self.live.observer

    def _passed_s(self) -> float | None:
        """Return the seconds since the last mark, and mark this moment; None outside of a training."""
        if self._marked_s is None:
            return None
        before, self._marked_s = self._marked_s, time.perf_counter()
        return self._marked_s - before

    def _leave_out(self, name: str, step: int) -> None:
        """Leave the time since the last mark out of the steps; it is in the column `name` of the step before."""
        seconds = self._passed_s()
        if self.live is not None and seconds is not None and step > 0:
            self.live.leave_out(seconds)
            self.live.log(step=step, **{name: 1e3 * seconds})

    def _tell_health(self) -> None:
        """Say what is grave of the events that have come since the last call."""
        events = [] if self.live is None else self.live.state.events
        news = []
        for event in reversed(events):
            if event is self._event:
                break
            news.append(event)
        self._event = events[-1] if events else None
        for event in reversed(news):
            if event.kind in GRAVE:
                print(f"surokit: step {event.step:,}: {event.text}. {event.suggestion}", file=sys.stderr)

    def _tell_saved(self, path: Path, how: str) -> None:
        """Say where the checkpoint of a stop is, and how a training goes on from it."""
        self.saved = path
        if self.live is not None:
            self.live.note(f"saved {path}")
        print(f"surokit: saved {path}; {how}", file=sys.stderr)


def _calls(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a call and those around it."""
    while frame is not None:
        yield frame
        frame = frame.f_back
