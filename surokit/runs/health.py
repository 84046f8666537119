"""This module says how a run is doing: its phase, and what went wrong, from the numbers that every step has anyway.

    health = Health()
    for record in records:
        for event in health.add(record.step, loss=record.loss, grad_norm=record.grad_norm, lr=record.lr):
            print(event.step, event.text, event.suggestion)
    health.phase   # "warm-up", "converging", "plateau", "unstable" or "diverging"

The rules. Means are plain over the first steps and exponential after them, over about MEAN_STEPS = 33 steps (a decay of 0.97, that
of ZClip, Kumar et al. 2025), the variance about the mean over 100. No rule but the first looks at the first 25 losses.

no_targets  a step in which no label counts; where nobody says how many do, 5 losses in a row that are exactly 0. Said as rarely as
            the next ones.
nonfinite, skipped   a loss or a gradient norm that is NaN or infinite, a step that was masked. One event for all that are at most
            10 steps apart, and so for the two below.
spike       a loss above its mean by 7 standard deviations, or the third in a row above it by 4; and by a tenth of the mean.
            Deviations are taken from the running mean, corrected for its lag, not from that of a window, so that the fall at the
            start of a short run hides nothing. What is further than 4 enters mean and variance as if it were at 4.
grad_spike  the same rule for the logarithm of the gradient norm, and at least twice its mean.
unstable    3 such events within 200 steps; over when 200 steps had none.
diverging   20 losses in a row whose mean over 10 steps is above the lowest mean so far, or the start's, by a fifth and by 3
            standard deviations; over when half of that distance is left. A loss counts as at most four times as far. Also 3
            steps in a row that are not finite.
plateau     the straight line through the last three quarters of the losses falls by less than 0.35 % over half of them, with two
            standard errors in favour of progress, and by less than two standard errors: what noise leaves no doubt of is progress,
            however slow. After at least 200 losses. A power law as slow as (steps)^-0.05 falls by 3 % there. The phase has an
            event only while the learning rate is known and above half of its highest: below, it is an end.
warm-up     the learning rate has only risen so far, or there are fewer than 25 losses.

The distances are ours: docs/measurements/health.json has what they say of sound and of spoiled runs. The
suggestion at a spike is the practice of PaLM (Chowdhery et al. 2022): go back about 100 steps and pass over some batches.

Plain numbers, no torch; bounded memory; a few microseconds a step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Phase = Literal["", "warm-up", "converging", "plateau", "unstable", "diverging"]
Kind = Literal[
    "spike",
    "grad_spike",
    "nonfinite",
    "skipped",
    "no_targets",
    "plateau",
    "diverging",
    "unstable",
    "slower",
    "phase",
    "note",
]

FIRST = 25
MEAN_STEPS, DEVIATION_STEPS, LEVEL_STEPS = 33, 100, 10
SIGMAS, ROW_SIGMAS, ROW = 7.0, 4.0, 3
SPIKE_SHARE, GRAD_FACTOR = 0.1, 2.0
APART = 10
UNSTABLE_EVENTS, UNSTABLE_STEPS = 3, 200
DIVERGED_SHARE, DIVERGED_SIGMAS, DIVERGED_CAP, DIVERGED_STEPS, NONFINITE_STEPS = 0.2, 3.0, 4.0, 20, 3
PLATEAU_FIRST, PLATEAU_GAIN, PLATEAU_LR = 200, 0.0035, 0.5
BLOCKS = 64
ZEROS = 5


@dataclass(frozen=True, slots=True)
class Event:
    """An Event tells in a sentence what happened at `step`, and what can be done about it ("" where nothing need be)."""

    step: int
    kind: Kind
    text: str
    suggestion: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Health:
    """A Health follows one run. It is fed a step at a time, in order; values that are not known are left out."""

    def __init__(self) -> None:
        self.phase: Phase = ""
        self.losses = 0  # finite ones so far
        self._loss, self._norm = _Usual(), _Usual()
        self._level = self._best = self._best_sd = 0.0
        self._above = self._bad = self._zeros = 0
        self._diverging = self._unstable = self._plateau = False
        self._rising = True
        self._lr = self._lr_top = 0.0
        self._last: dict[str, int] = {}
        self._episodes: deque[int] = deque(maxlen=UNSTABLE_EVENTS)
        self._blocks: list[tuple[int, float, float]] = []  # losses, their sum, the sum of their squares
        self._span, self._open, self._sum, self._squares = 4, 0, 0.0, 0.0

    def add(
        self,
        step: int,
        *,
        loss: float | None = None,
        grad_norm: float | None = None,
        lr: float | None = None,
        skipped: bool = False,
        targets: float | None = None,
    ) -> Sequence[Event]:
        """Take in what step `step` measured and return the events that it causes, mostly none."""
        events: list[Event] = []
        if targets == 0:
            loss = grad_norm = None
            skipped = False
            self._no_targets(events, step, "no label counts in this step (all are -100)")
        elif loss is not None:
            self._zeros = self._zeros + 1 if loss == 0.0 and targets is None else 0
            if self._zeros >= ZEROS:
                self._no_targets(events, step, f"the loss is exactly 0 for {self._zeros} steps: does any label count?")
        bad_loss = loss is not None and loss - loss != 0.0
        if skipped or bad_loss or (grad_norm is not None and grad_norm - grad_norm != 0.0):
            self._nonfinite(events, step, skipped, bad_loss)
        elif loss is not None or grad_norm is not None:
            self._bad = 0
        if lr is not None and lr != self._lr:
            self._rising = self._rising and lr > self._lr
            self._lr = lr
            if lr > self._lr_top:
                self._lr_top = lr
        elif lr is not None and self.losses > 1:
            self._rising = False
        if grad_norm is not None and 0.0 < grad_norm < math.inf and self._norm.add(math.log(grad_norm), _GRAD_LEAST):
            usually = math.exp(min(self._norm.before, 700.0))
            self._spike(events, step, "grad_spike", f"gradient norm {grad_norm:.3g}, usually {usually:.3g}")
        if loss is not None and not bad_loss:
            usual = self._loss
            if usual.add(loss, SPIKE_SHARE * abs(usual.mean)):
                self._spike(events, step, "spike", f"loss {loss:.4g}, usually {usual.before:.4g}")
            self._follow(events, step, loss)
        if self._unstable and step - self._episodes[-1] > UNSTABLE_STEPS:
            self._unstable = False
        if self.phase == "converging" and not (self._diverging or self._unstable or self._plateau):
            return events  # the usual case
        phase = self._present()
        if phase != self.phase:
            if phase == "converging" and self.phase not in ("", "warm-up"):
                events.append(Event(step, "phase", f"converging again, after {self.phase}"))
            self.phase = phase
        return events

    def _present(self) -> Phase:
        if self._diverging:
            return "diverging"
        if self._unstable:
            return "unstable"
        if self.losses < FIRST or (self._rising and self._lr_top > 0.0):
            return "warm-up" if self.losses or self._lr_top else ""
        return "plateau" if self._plateau else "converging"

    def _episode(self, kind: str, step: int) -> bool:
        """Note an event and return whether it is the first of its kind for more than APART steps."""
        last = self._last.get(kind)
        self._last[kind] = step
        return last is None or step - last > APART

    def _spike(self, events: list[Event], step: int, kind: Literal["spike", "grad_spike"], what: str) -> None:
        if self._episode(kind, step):
            advice = (
                "If it does not come down: go back about 100 steps and pass over some batches; or clip gradients lower."
            )
            events.append(
                Event(step, kind, what, advice if kind == "spike" else "Look at the batch; clip gradients lower.")
            )
            self._shaken(events, step)

    def _nonfinite(self, events: list[Event], step: int, skipped: bool, loss: bool) -> None:
        self._bad += 1
        if self._episode("nonfinite", step):
            what = "loss" if loss else "gradient norm" if not skipped else "loss or gradients"
            text = f"{what} not finite (NaN or infinite)" + ("; the step was left out" if skipped else "")
            advice = (
                "Weights are untouched; many of these: lower the learning rate or keep more layers in bf16."
                if skipped
                else "Go back to a checkpoint before it; lower the learning rate, or keep more layers in bf16."
            )
            events.append(Event(step, "skipped" if skipped else "nonfinite", text, advice))
            self._shaken(events, step)
        if self._bad >= NONFINITE_STEPS and not self._diverging and not skipped:
            self._diverge(events, step, f"{self._bad} steps in a row are not finite")

    def _no_targets(self, events: list[Event], step: int, text: str) -> None:
        if self._episode("no_targets", step):
            advice = (
                "Look at the labels: a mask that covers everything, or a chat template that marks no assistant's part."
            )
            events.append(Event(step, "no_targets", text, advice))

    def _shaken(self, events: list[Event], step: int) -> None:
        """Count one more thing that a steady run does not do."""
        if self._episodes and step - self._episodes[-1] <= APART:
            return  # a spike of the loss and of the gradient are one
        self._episodes.append(step)
        if not self._unstable and len(self._episodes) == UNSTABLE_EVENTS and step - self._episodes[0] <= UNSTABLE_STEPS:
            self._unstable = True
            text = f"{UNSTABLE_EVENTS} spikes within {step - self._episodes[0]} steps"
            events.append(
                Event(step, "unstable", text, "Lower the learning rate or lengthen its warm-up; clip gradients.")
            )

    def _diverge(self, events: list[Event], step: int, why: str) -> None:
        self._diverging = True
        advice = "Stop, go back to a checkpoint before it, and lower the learning rate."
        events.append(Event(step, "diverging", why, advice))

    def _follow(self, events: list[Event], step: int, loss: float) -> None:
        self.losses = n = self.losses + 1
        usual = self._loss
        if n < FIRST:
            self._level += (loss - self._level) / min(n, LEVEL_STEPS)
            if n <= 5:
                self._best = self._level
        else:
            if usual.mean < self._best:
                self._best, self._best_sd = usual.mean, math.sqrt(usual.variance)
            near = self._best + DIVERGED_SHARE * abs(self._best)
            if loss < near and self._level < near and not self._diverging:  # the usual case
                self._level += (loss - self._level) / LEVEL_STEPS
                self._above = 0
            else:
                self._rise(events, step, loss)
        self._open += 1
        self._sum += loss
        self._squares += loss * loss
        if self._open == self._span:
            self._close(events, step)

    def _rise(self, events: list[Event], step: int, loss: float) -> None:
        """Follow a loss that is not close to its best, or was not: does it stay up?"""
        best = self._best
        far = max(DIVERGED_SHARE * abs(best), DIVERGED_SIGMAS * (self._best_sd or math.sqrt(self._loss.variance)))
        # capped, so that one loss out of all bounds is a spike and no more
        self._level += (min(loss, best + DIVERGED_CAP * far) - self._level) / LEVEL_STEPS
        if self._level <= best + far:
            self._above = 0
            if self._diverging and self._level < best + far / 2:
                self._diverging = False
            return
        self._above += 1
        if self._above >= DIVERGED_STEPS and not self._diverging:
            self._diverge(events, step, f"loss {loss:.4g}, at best {best:.4g}, for {self._above} steps")

    def _close(self, events: list[Event], step: int) -> None:
        """Close a block of losses that is full, and test whether there is still progress."""
        blocks = self._blocks
        blocks.append((self._open, self._sum, self._squares))
        self._open, self._sum, self._squares = 0, 0.0, 0.0
        if len(blocks) == BLOCKS:
            self._blocks = blocks = [_joined(blocks[i : i + 2]) for i in range(0, BLOCKS, 2)]
            self._span *= 2
        if self.losses < PLATEAU_FIRST:
            return
        part = 3 * len(blocks) // 8
        n, late, late_var = _moments(blocks[-part:])
        _, _, early_var = _moments(blocks[-2 * part : -part])
        # over n losses after n others the slope's standard error is sqrt(12 / (2 n)^3) of the losses' deviation
        gain, error = -part * _slope(blocks[-2 * part :]), math.sqrt(0.75 * (late_var + early_var) / n)
        least = PLATEAU_GAIN * abs(late)
        if not self._plateau and not self._above and gain < 2 * error and -least < gain + 2 * error < least:
            self._plateau = True
            if self._present() == "plateau" and 0.0 < PLATEAU_LR * self._lr_top <= self._lr:
                text = f"loss {late:.4g}, no lower than over the {n:,} steps before"
                advice = "Lower the learning rate (decay it now); if the loss is near its start, check labels and data."
                events.append(Event(step, "plateau", text, advice))
        elif self._plateau and gain - error > least:
            self._plateau = False


class _Usual:
    """A _Usual keeps the running mean and variance of a value, and says whether the next one is far above."""

    __slots__ = ("before", "count", "lag", "mean", "row", "variance")

    def __init__(self) -> None:
        self.count = self.row = 0  # row: how many in a row are above by ROW_SIGMAS
        self.mean = self.variance = self.before = 0.0
        self.lag = 0.0  # how far values are above the mean on average: below zero while they fall

    def add(self, value: float, least: float) -> bool:
        """Take in a finite value; return whether it is above the mean by `least` and by SIGMAS standard deviations, or is the
        ROW-th or a later one in a row that is above by ROW_SIGMAS."""
        self.count = n = self.count + 1
        above = value - self.mean - self.lag
        far = False
        if n > FIRST and above > least and above * above > ROW_SIGMAS * ROW_SIGMAS * self.variance:
            if not self.row:
                self.before = self.mean + self.lag
            self.row += 1
            far = self.row >= ROW or above * above > SIGMAS * SIGMAS * self.variance
            above = min(above, max(ROW_SIGMAS * math.sqrt(self.variance), least))
        else:
            self.row = 0
        if n == 1:
            self.mean = value
            return False
        share = 1.0 / n if n < MEAN_STEPS else 1.0 / MEAN_STEPS
        self.mean += share * (above + self.lag)
        self.lag += share * above
        self.variance += (above * above - self.variance) / (n - 1 if n < DEVIATION_STEPS else DEVIATION_STEPS)
        return far


_GRAD_LEAST = math.log(GRAD_FACTOR)


def _joined(blocks: Sequence[tuple[int, float, float]]) -> tuple[int, float, float]:
    return sum(b[0] for b in blocks), sum(b[1] for b in blocks), sum(b[2] for b in blocks)


def _moments(blocks: Sequence[tuple[int, float, float]]) -> tuple[int, float, float]:
    """Return number, mean and variance of the losses in blocks."""
    n, total, squares = _joined(blocks)
    mean = total / n
    return n, mean, max(squares / n - mean * mean, 0.0)


def _slope(blocks: Sequence[tuple[int, float, float]]) -> float:
    """Return the rise from one block to the next of the least-squares line through the means of blocks of one size."""
    count = len(blocks)
    middle = (count - 1) / 2
    return sum((i - middle) * total / n for i, (n, total, _) in enumerate(blocks)) * 12 / (count**3 - count)
