"""A Tape keeps account of the tensors that live at each moment of a forward and a backward, by size alone.

Autograd keeps what a backward needs, Python keeps what a variable still holds, and a gradient lives from the operation that makes
it to the one that reads it. The tape replays just that. An operation is run once forward, which makes its output and keeps
what its backward reads, and once backward, in reverse order: gradients of its inputs appear, then the gradient of its output and
what was kept are freed. The most that was held at any moment is the peak, and its parts are remembered.

Equal layers in a row are not replayed one by one: each adds the same, so the most is held at the first or at the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

#: The kinds of bytes that a moment's memory consists of.
KEPT, LOGITS, GRADIENTS, PASSING = "activations", "logits", "gradients", "workspace"


@dataclass(eq=False)
class Value:
    """A Value is a tensor: its bytes, the kind they count as, whether it needs a gradient, and how many references hold it."""

    bytes: float
    kind: str = KEPT
    needs: bool = False
    holders: int = 0


@dataclass(eq=False)
class _Gradient:
    """A _Gradient is the gradient of a value; two values share one where an addition passes it on."""

    bytes: float
    holders: int = 1


@dataclass(eq=False)
class _Step:
    """A _Step is one operation whose backward will run."""

    outputs: tuple[Value, ...]
    inputs: tuple[Value, ...]
    kept: tuple[Value, ...]
    weight: float
    scratch: float
    passes: bool
    again: Callable[[Value], Value] | None = None
    saved: tuple[Value, ...] = ()
    lump: tuple[float, float] | None = None


@dataclass
class Moment:
    """A Moment holds the most bytes of a phase, and the parts that they consist of; states that always stay are not in it."""

    phase: str
    bytes: float = -1.0
    made_of: dict[str, float] = field(default_factory=dict)


class Tape:
    """A Tape keeps account of allocations. `gradients_there` says that weight gradients are added to ones that exist already,
    `records` that a backward follows."""

    def __init__(
        self,
        *,
        gradients_there: bool = False,
        weight_share: float = 1.0,
        records: bool = True,
        most_kept: float | None = None,
    ) -> None:
        self.held: dict[str, float] = {KEPT: 0.0, LOGITS: 0.0, GRADIENTS: 0.0, PASSING: 0.0}
        self.moments: dict[str, Moment] = {}
        self.phase = "forward"
        self._there = gradients_there
        self._share = weight_share  # of a weight gradient that stays on this GPU
        self._steps: list[_Step] = []
        self._records = records
        self._most_kept = most_kept  # of activations that stay here; the others wait on the host
        self._seen_weight = 0.0
        self._saves = ""  # what the next operation saves, where a layer is computed again
        self._saving: list[Value] | None = None  # by a layer that will be computed again
        self._saved: list[Value] = []  # by a layer that is computed again now, the first last
        self._gradients: dict[Value, _Gradient] = {}

    # -- forward

    def new(self, size: float, *, kind: str = KEPT, needs: bool = False) -> Value:
        """Allocate a tensor that no operation made."""
        value = Value(size, kind, needs, 1)
        self._add(kind, size)
        return value

    def run(
        self,
        inputs: Iterable[Value],
        size: float,
        *,
        keeps: Iterable[Value] = (),
        extra: float = 0.0,
        weight: float = 0.0,
        scratch: float = 0.0,
        back_scratch: float = 0.0,
        trains: bool = False,
        passes: bool = False,
        kind: str = KEPT,
        drops: Iterable[Value] = (),
    ) -> Value:
        """Run one operation that reads `inputs`, and return its output of `size` bytes.

        keeps: inputs that backward reads; extra: bytes made for backward alone; weight: bytes of a weight's gradient; trains: it
        has a weight that trains, counted elsewhere; scratch, back_scratch: temporaries; passes: backward hands its gradient on
        without a copy; drops: values that Python no longer refers to afterwards.
        """
        sizes = (size,)
        return self._run(inputs, sizes, keeps, extra, weight, scratch, back_scratch, trains, passes, kind, drops)[0]

    def run_many(
        self,
        inputs: Iterable[Value],
        sizes: Iterable[float],
        *,
        keeps: Iterable[Value] = (),
        extra: float = 0.0,
        weight: float = 0.0,
        scratch: float = 0.0,
        back_scratch: float = 0.0,
        drops: Iterable[Value] = (),
    ) -> tuple[Value, ...]:
        """Run one operation with several outputs, whose gradients its backward takes together."""
        return self._run(inputs, sizes, keeps, extra, weight, scratch, back_scratch, False, False, KEPT, drops)

    def _run(
        self,
        inputs: Iterable[Value],
        sizes: Iterable[float],
        keeps: Iterable[Value],
        extra: float,
        weight: float,
        scratch: float,
        back_scratch: float,
        trains: bool,
        passes: bool,
        kind: str,
        drops: Iterable[Value],
    ) -> tuple[Value, ...]:
        read = tuple(inputs)
        needs = trains or weight > 0 or any(v.needs for v in read)
        saves, self._saves = self._saves, ""
        again = bool(saves and self._saved)
        with_extra = bool(extra) and saves == "all"
        if again:  # it was saved, so nothing is computed
            out, scratch = tuple([self._saved.pop() for _ in sizes]), 0.0
        else:
            out = tuple([Value(size, kind, needs, 1) for size in sizes])
            for value in out:
                self._add(kind, value.bytes)
        more = Value(extra, kind)
        if saves and self._saving is not None:
            for value in out:
                value.holders += 1
            self._saving += [*out, *([more] if with_extra else [])]
            self._add(kind, extra * with_extra)
        if needs:
            self._seen_weight += weight
        keeps_now = needs and self._records
        # the forward makes tensors for backward even where none follows, and then frees them at once
        self._touch(scratch if with_extra else scratch + extra, kind if kind == LOGITS else PASSING)
        if keeps_now:
            kept = tuple(keeps)
            if with_extra and again:
                kept = (*kept, self._saved.pop())
            elif extra:
                kept = (*kept, more)
                self._add(kind, extra)
            for value in kept:
                value.holders += 1
            self._steps.append(_Step(out, tuple(v for v in read if v.needs), kept, weight, back_scratch, passes))
        for value in drops:
            self.drop(value)
        return out

    def keep(self, value: Value) -> None:
        """Keep `value` for the backward of the operation that ran last and made it: it reads its own output."""
        step = self._steps[-1] if self._steps and self._records else None
        if step is not None and value in step.outputs:
            value.holders += 1
            step.kept = (*step.kept, value)

    def also(self, weight: float) -> None:
        """Add to the operation that ran last more weights, by the bytes of their gradients."""
        self._seen_weight += weight
        if self._records and self._steps:
            self._steps[-1].weight += weight

    def drop(self, value: Value) -> None:
        """Release one reference to a value; its bytes are freed with the last one."""
        value.holders -= 1
        if value.holders == 0:
            self._add(value.kind, -value.bytes)

    def save_next(self, what: Literal["output", "all"] = "output") -> None:
        """Save what the next operation makes, in a layer that is computed again (`recomputed`): its output, or what is made for
        backward alone too."""
        self._saves = what

    def recomputed(self, layer: Callable[[Value], Value], x: Value) -> Value:
        """Run a layer of which only the input is kept, and what it saves; backward runs it again first."""
        if not self._records:
            return layer(x)
        x.holders += 1
        self._records, self._saving = False, []
        out = layer(x)
        saved, self._records, self._saving = tuple(self._saving), True, None
        if not out.needs:
            self._release((x, *saved))
        else:
            inputs = (x,) if x.needs else ()
            self._steps.append(_Step((out,), inputs, (x,), 0.0, 0.0, False, again=layer, saved=saved))
        return out

    def repeated(self, layer: Callable[[Value], Value], x: Value, times: int) -> Value:
        """Run so many equal layers in a row: `layer` takes the input, whose reference it releases, and returns the output."""
        alone = times if times <= 3 else 2
        for _ in range(alone):
            before, weight = dict(self.held), self._seen_weight
            x = layer(x)
        if alone < times:
            rest = times - alone - 1
            kept = rest * (self.held[KEPT] - before[KEPT])
            weight = rest * (self._seen_weight - weight)
            self._seen_weight += weight
            self._add(KEPT, kept)
            out = Value(x.bytes, x.kind, x.needs, 1)
            if x.needs and self._records:
                self._steps.append(_Step((out,), (x,), (), 0.0, 0.0, True, lump=(kept, weight)))
            # the same bytes under another name
            x.holders -= 1
            if x.holders:
                self._add(KEPT, x.bytes)
            x = layer(out)
        return x

    # -- backward

    def backward(self, output: Value, size: float = 0.0) -> None:
        """Run the backward from the gradient of `output`, of `size` bytes, to the start."""
        self.phase = "backward"
        self._gradients[output] = _Gradient(size)
        self._add(PASSING, size)
        self._touch(0)
        self._unwind()

    def _unwind(self) -> None:
        while self._steps:
            self._undo(self._steps.pop())

    def _undo(self, step: _Step) -> None:
        gradient = self._gradients.pop(step.outputs[0], None)
        more: list[_Gradient] = []
        if len(step.outputs) > 1:
            more = [g for value in step.outputs[1:] if (g := self._gradients.pop(value, None)) is not None]
            gradient = gradient or (more.pop() if more else None)
        if gradient is None:  # nothing that the loss depends on
            self._release((*step.kept, *step.saved))
            return
        if step.again is not None:
            self._run_again(step, gradient)
        elif step.lump is not None:
            kept, weight = step.lump
            # their peaks lie between those of the first and the last layer, so only the sums are changed here
            self._add(KEPT, -kept)
            if not self._there:
                self._add(GRADIENTS, weight * self._share)
            self._hand_on(step.inputs[0], gradient)
        elif step.passes:
            for value in step.inputs:
                gradient.holders += 1
                self._hand_on(value, gradient)
            self._weight(step.weight)
            self._let_go(gradient)
            self._release(step.kept)
        else:
            made = [_Gradient(v.bytes) for v in step.inputs]
            for one in made:
                self._add(PASSING, one.bytes)
            self._weight(step.weight)
            self._touch(step.scratch)
            self._let_go(gradient)
            for one in more:
                self._let_go(one)
            self._release(step.kept)
            for value, one in zip(step.inputs, made):
                self._hand_on(value, one)

    def _run_again(self, step: _Step, gradient: _Gradient) -> None:
        assert step.again is not None
        (x,) = step.kept
        outer, self._steps = self._steps, []
        inside = Value(x.bytes, x.kind, x.needs, 2)
        self._saved = [*reversed(step.saved)]
        # the input is held already: by the tape, and here by its second name
        out = step.again(inside)
        self.drop(out)
        self._gradients[out] = gradient
        self._unwind()
        self._steps = outer
        found = self._gradients.pop(inside, None)
        self._release((x,))
        if found is not None:
            self._hand_on(x, found)

    def _hand_on(self, value: Value, gradient: _Gradient) -> None:
        """Give a value its gradient; a second one is added to the first, in place where nothing else holds that."""
        first = self._gradients.get(value)
        if first is None:
            self._gradients[value] = gradient
            return
        if first.holders > 1:
            total = _Gradient(value.bytes)
            self._add(PASSING, total.bytes)
            self._touch(0)
            self._let_go(first)
            self._gradients[value] = total
        else:
            self._touch(0)
        self._let_go(gradient)

    def _let_go(self, gradient: _Gradient) -> None:
        gradient.holders -= 1
        if gradient.holders == 0:
            self._add(PASSING, -gradient.bytes)

    def _release(self, kept: Iterable[Value]) -> None:
        for value in kept:
            self.drop(value)

    def _weight(self, size: float) -> None:
        if not size:
            return
        self._touch(size)
        if not self._there:
            self._add(GRADIENTS, size * self._share)

    # -- counting

    @property
    def here(self) -> dict[str, float]:
        """Return the bytes that are held by kind, without the activations that wait on the host."""
        if self._most_kept is None or self.held[KEPT] <= self._most_kept:
            return self.held
        return {**self.held, KEPT: self._most_kept}

    def _add(self, kind: str, size: float) -> None:
        self.held[kind] += size
        if size > 0:
            self._touch(0)

    def _touch(self, scratch: float, kind: str = PASSING) -> None:
        moment = self.moments.setdefault(self.phase, Moment(self.phase))
        held = self.here
        now = sum(held.values()) + scratch
        if now > moment.bytes:
            moment.bytes = now
            moment.made_of = {**held, kind: held[kind] + scratch}
