"""ZenFlow as a model that is right by looking at it: one thread, whole tensors, nothing that moves.

Every weight W [out, in] has one master w, one pair of moments m and v, all [out, in] and wide, and a clock t [in] for its
columns. A column is hot or cold, which is a flag and not a place, so that migration cannot lose anything here. What the
implementation does with threads, slots, rings and links is here three sentences:

- a hot column takes AdamW's step with each gradient;
- a cold one takes one step for a window of gradients, with their mean over the finite ones;
- W shows a cold column's new value at once or, with overlap, where the next window ends, or where the hot set changes.

The counters beside it (consumed, applied, staleness, bytes) say what the tests of the invariants need. Nothing of surokit is
imported, so that a mistake there is not repeated here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

LAG = 2  # steps from a statistic to the decision that uses it
MASTER_AND_MOMENTS = 12  # bytes of an element that changes sides


@dataclass(frozen=True)
class Settings:
    """As surokit.ZenFlow's, with the interval of selection resolved to a number of steps."""

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    eps: float = 1e-8
    topk_ratio: float = 0.1
    select_interval: int = 100
    update_interval: int | Literal["auto"] = 4
    full_warm_up_rounds: int = 0
    overlap_step: bool = True
    auto_ratio: float = 0.99
    max_interval: int = 16
    cold_update: Literal["deepspeed", "time-corrected"] = "deepspeed"
    wide: torch.dtype = torch.float64


def hot_columns(ratio: float, columns: int) -> int:
    """max(1, floor(ratio * columns)); none at a ratio of 0."""
    return 0 if ratio == 0 or columns == 0 else max(1, math.floor(ratio * columns))


def largest(scores: Tensor, count: int) -> Tensor:
    """The indices of the `count` largest; among equals the lower one."""
    return torch.sort(scores, descending=True, stable=True).indices[:count].sort().values


@dataclass(eq=False)
class Weight:
    """One parameter: what it shows (W), what it is (w, m, v, t), and what waits for it."""

    W: Tensor
    settings: Settings
    splits: bool = True  # False: hot as a whole
    weight_decay: float = 0.1
    hot: Tensor = field(init=False)

    def __post_init__(self) -> None:
        s = self.settings
        self.W = self.W.detach().clone()
        self.shape, self.splits = self.W.shape, self.splits and self.W.dim() >= 2
        self.W = self.W.reshape(self.shape[0], math.prod(self.shape[1:])) if self.splits else self.W.reshape(-1, 1)
        out, columns = self.W.shape
        self.w = self.W.to(s.wide, copy=True)
        self.m, self.v, self.acc = (torch.zeros_like(self.w) for _ in range(3))
        self.t = torch.zeros(columns, dtype=torch.int64)
        self.count = hot_columns(s.topk_ratio, columns) if self.splits else columns
        self.hot = torch.arange(columns) < self.count
        self.fresh()
        self.pending: Tensor | None = None  # cold columns' values that W does not show yet
        self.pending_columns = torch.zeros(0, dtype=torch.int64)
        self.before, self.kept = self.w, 1.0  # the masters that the pending update found, and what decay left of them
        self.pending_ages: list[int] = []
        self.scored = False
        self.scores: Tensor | None = None
        self.begun = False
        self.out = out

    def fresh(self) -> None:
        """An empty window."""
        self.acc.zero_()
        self.finite = 0
        self.rates = 0.0
        self.ages: list[int] = []

    @property
    def shown(self) -> Tensor:
        return self.W.reshape(self.shape)

    @property
    def cold(self) -> Tensor:
        return (~self.hot).nonzero().flatten()

    def adam(self, columns: Tensor, g: Tensor, lr: float, decay: float, elapsed: int = 1) -> None:
        """AdamW on some columns [out, n]: betas to the power of the elapsed steps, and a clock that counts them."""
        if columns.numel() == 0:
            return
        beta1, beta2 = (beta**elapsed for beta in self.settings.betas)
        self.t[columns] += elapsed
        t = self.t[columns].to(g.dtype) / elapsed
        m = beta1 * self.m[:, columns] + (1 - beta1) * g
        v = beta2 * self.v[:, columns] + (1 - beta2) * g * g
        self.m[:, columns], self.v[:, columns] = m, v
        size = lr / (1 - beta1**t)
        root = (v / (1 - beta2**t)).sqrt() + self.settings.eps
        self.w[:, columns] = self.w[:, columns] * (1 - lr * decay) - size * m / root

    def show(self, columns: Tensor) -> None:
        self.W[:, columns] = self.w[:, columns].to(self.W.dtype)


class Oracle:
    """The optimizer: `step(grads)` with a gradient or None for each parameter.

    Counters: step; windows that ended, by length; down, up, migrated (bytes, of each way); staleness, by steps, of gradient
    elements; consumed and applied, the sums of the gradients that came and of those in a weight, [out, in] for each weight.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        settings: Settings,
        splits: Sequence[bool] | None = None,
        decay_vectors: bool = False,
    ) -> None:
        self.settings = settings
        self.weights = [
            Weight(
                p, settings, splits is None or splits[i], settings.weight_decay if decay_vectors or p.dim() > 1 else 0.0
            )
            for i, p in enumerate(params)
        ]
        self.step_number = 0
        self.position = 0  # in the window
        self.since_selection: int | None = None  # None: there was none
        self.statistics: list[dict[int, tuple[float, float]]] = []  # of each step of the window, by weight
        self.down = self.up = self.migrated_down = self.migrated_up = 0
        self.staleness: Counter[int] = Counter()
        self.lengths: list[int] = []
        self.choices: list[int] = []  # the steps from which a new hot set held
        self.consumed = [torch.zeros_like(w.w) for w in self.weights]
        self.applied = [torch.zeros_like(w.w) for w in self.weights]

    def step(
        self, grads: Sequence[Tensor | None], lr: float | None = None, scale: float = 1.0, finite: bool = True
    ) -> None:
        s = self.settings
        lr = s.lr if lr is None else lr
        self.step_number += 1
        held = [None if g is None else self._columns(w, g) for w, g in zip(self.weights, grads)]
        wide = [None if g is None else g.to(s.wide) / scale for g in held]
        for total, w, g in zip(self.consumed, self.weights, wide):
            w.begun |= g is not None
            if g is not None and finite:
                total += g
        warm = self.step_number <= s.full_warm_up_rounds
        if not warm:
            self._select_where_due(held, finite)
        for i, (w, g) in enumerate(zip(self.weights, wide)):
            if g is None or not finite:
                continue
            now = torch.arange(w.W.shape[1]) if warm else w.hot.nonzero().flatten()
            w.adam(now, g[:, now], lr, w.weight_decay)
            w.show(now)
            self.applied[i][:, now] += g[:, now]
            self.staleness[0] += w.out * len(now)
        if warm:
            self._count_bytes(held, up=True)
        else:
            self._accumulate(held, wide, lr, finite)
        self._score(held, finite)

    def _columns(self, w: Weight, g: Tensor) -> Tensor:
        return g.detach().reshape(w.W.shape)

    def _count_bytes(self, held: Sequence[Tensor | None], up: bool) -> None:
        for w, g in zip(self.weights, held):
            if g is not None:
                self.down += w.out * len(w.cold) * g.element_size()
                self.up += w.out * len(w.cold) * w.W.element_size() * up

    # -- windows

    def _accumulate(
        self, held: Sequence[Tensor | None], wide: Sequence[Tensor | None], lr: float, finite: bool
    ) -> None:
        s = self.settings
        self._count_bytes(held, up=False)
        self.position += 1
        divided = [0 < w.count < w.W.shape[1] for w in self.weights]
        if any(there and g is not None for there, g in zip(divided, wide)):
            self.statistics.append({})
        for i, (w, g) in enumerate(zip(self.weights, wide)):
            w.ages = [age + 1 for age in w.ages]
            w.pending_ages = [age + 1 for age in w.pending_ages]
            if g is None or not finite or w.count == w.W.shape[1]:
                continue
            w.acc += g
            w.acc[:, w.hot] = 0
            w.finite += 1
            w.rates += lr
            w.ages.append(0)
            if divided[i]:
                self.statistics[-1][i] = float(g[:, w.cold].abs().mean()), float(g[:, w.hot].abs().mean())
        if self.since_selection is not None:
            self.since_selection += 1
        if not self._window_is_full():
            return
        self.lengths.append(self.position)
        self.position, self.statistics = 0, []
        if s.overlap_step:
            self._land()
        self._job(lr)
        if not s.overlap_step:
            self._land()

    def _window_is_full(self) -> bool:
        s = self.settings
        if s.update_interval != "auto":
            return self.position == s.update_interval
        if self.position >= s.max_interval:
            return True
        known = self.statistics[: max(0, len(self.statistics) - LAG)]
        ready = []
        for i, w in enumerate(self.weights):
            seen = [step[i] for step in known if i in step]
            if w.begun and 0 < w.count < w.W.shape[1]:
                ready.append(bool(seen) and sum(c for c, _ in seen) >= sum(h for _, h in seen) / len(seen))
        return bool(ready) and sum(ready) >= s.auto_ratio * len(ready)

    def _job(self, lr: float) -> None:
        """The window's Adam step of every cold column; W does not show it yet."""
        s = self.settings
        for i, w in enumerate(self.weights):
            if w.finite:
                mean = w.acc[:, w.cold] / w.finite
                w.before, w.kept = w.w.clone(), 1 - lr * w.weight_decay
                if s.cold_update == "deepspeed":
                    w.adam(w.cold, mean, lr, w.weight_decay)
                else:
                    w.adam(w.cold, mean, w.rates, w.weight_decay, elapsed=w.finite)
                self.applied[i] += w.acc
                w.pending_columns, w.pending = w.cold, w.w[:, w.cold].to(w.W.dtype)
                w.pending_ages = w.ages
            w.fresh()

    def _land(self) -> None:
        for w in self.weights:
            if w.pending is None:
                continue
            w.W[:, w.pending_columns] = w.pending
            self.up += w.pending.numel() * w.W.element_size()
            for age in w.pending_ages:
                self.staleness[age] += w.pending.numel()
            w.pending, w.pending_ages = None, []

    # -- the choice of hot columns

    def _select_where_due(self, held: Sequence[Tensor | None], finite: bool) -> None:
        s = self.settings
        first, since = self.since_selection is None, self.since_selection or 0
        if self.position != 0 or (not first and since < s.select_interval):
            return
        divided = [w for w in self.weights if 0 < w.count < w.W.shape[1]]
        if first:
            self.since_selection = 0
        if first and not any(w.scored for w in divided):  # no step of warm-up scored them: this step's own gradients do
            self._score(held, finite)
        scored = [w for w in divided if w.scored]
        if not scored:  # nothing to choose from: at the next window's end, then
            return
        for w in self.weights:
            w.pending_ages = [age + 1 for age in w.pending_ages]  # landed in this step, before its position is counted
        self._land()
        for w in scored:
            if w.scores is not None:  # of a step that is not finite there are none, and the set stays as it is
                self._choose(w, largest(w.scores, w.count))
        told = any(w.scores is not None and w.scores.sum() > 0 for w in scored)
        self.since_selection = (
            0 if told else s.select_interval
        )  # where nothing was told, at the next window's end again
        self.choices.append(self.step_number)

    def _score(self, held: Sequence[Tensor | None], finite: bool) -> None:
        for w, g in zip(self.weights, held):
            w.scored = g is not None
            w.scores = g.float().square().sum(0) if g is not None and finite else None

    def _choose(self, w: Weight, chosen: Tensor) -> None:
        new = torch.zeros_like(w.hot)
        new[chosen] = True
        entering, leaving = int((new & ~w.hot).sum()), int((w.hot & ~new).sum())
        self.migrated_up += entering * w.out * MASTER_AND_MOMENTS
        self.migrated_down += leaving * w.out * MASTER_AND_MOMENTS
        w.hot = new

    # -- writes by hand

    def write(self, i: int, value: Tensor) -> None:
        """Weight i is given other values between two steps. What still is as it rounds keeps its digits, and an update that waits
        to be shown is made on the new values."""
        w = self.weights[i]
        w.W = self._columns(w, value).clone()
        before = w.w.clone()
        late = w.pending_columns if w.pending is not None else w.pending_columns[:0]
        before[:, late] = w.before[:, late]
        same, X = before.to(w.W.dtype) == w.W, w.W.to(w.w.dtype)
        written = X.clone()
        written[:, late] = w.kept * (X - before)[:, late] + w.w[:, late]  # what both updates take off is the same
        w.w = torch.where(same, w.w, written)
        if w.pending is not None:
            w.pending = w.w[:, late].to(w.W.dtype)

    # -- what the tests ask

    def due(self) -> list[Tensor]:
        """Of each weight, the sum of the gradients that are accumulated and not applied."""
        return [w.acc.clone() for w in self.weights]
