"""What the tests of ZenFlow share: random weights and gradients, an optimizer on a simulated pair of device and host beside the
oracle, what is delayed at random, and a comparison of all that both hold."""

from __future__ import annotations

import functools
import math
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, nn

import surokit as sk
from surokit.offload import pipeline, workers
from surokit.offload.link import Link, ThrottledLink
from surokit.offload.workers import Worker
from tests.clocks import until
from tests.offload.oracle import Oracle, Settings

Shape = tuple[int, ...]
# a multiple of a vector's lanes, a vector of weights, a remainder, more than two dimensions
SHAPES: list[Shape] = [(16, 20), (8,), (5, 10), (3, 2, 4)]
EVERY = {"select_strategy": "step", "select_interval": 1}
F32_GAP = 1e-5  # of weights around 1 after some dozen steps in float32 against float64


def make_params(
    shapes: Sequence[Shape] = SHAPES, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def make_grads(shapes: Sequence[Shape], step: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """Normal, with columns of differing size that change places slowly, so that a selection has something to find."""
    generator = torch.Generator().manual_seed(10_000 * seed + step)
    size = torch.Generator().manual_seed(seed + step // 7)
    grads = []
    for shape in shapes:
        g = torch.randn(shape, generator=generator)
        if len(shape) > 1:
            g = (g.flatten(1) * torch.rand(math.prod(shape[1:]), generator=size) ** 3).view(shape)
        grads.append(g.to(dtype))
    return grads


def delays(seed: int, longest_s: float = 0.004) -> Callable[[], float]:
    """Random seconds, mostly none."""
    generator = random.Random(seed)
    return lambda: generator.choice((0.0, 0.0, 0.0, generator.uniform(0, longest_s)))


@contextmanager
def slow_workers(seed: int, longest_s: float = 0.004) -> Iterator[None]:
    """Optimizers that take their first step under it have workers that wait at random before each job."""
    slow = functools.partial(Worker, delay=delays(seed, longest_s))
    with mock.patch.object(pipeline, "Worker", slow):
        yield


def throttled(seed: int = 0, gb_s: float = 1.0) -> Link:
    return ThrottledLink(gb_s, delay=delays(seed), late_fill=True)


def waits(thread: int, worker: Worker | None = None) -> bool:
    """Whether the thread of that ident is inside a wait for the worker; None: for any."""
    frame = sys._current_frames()[thread]
    inside = frame.f_code.co_name == "wait" and frame.f_code.co_filename == workers.__file__
    return inside and (worker is None or frame.f_locals["self"] is worker._shared)


def meanwhile(action: Callable[[], object]) -> None:
    """Does it in another thread once this one waits for a worker."""
    main = threading.get_ident()

    def act() -> None:
        until(lambda: waits(main))
        action()

    threading.Thread(target=act).start()


def beats_of(worker: Worker) -> Callable[[], None]:
    """Waits, each time it is called, until the worker has given another sign of life."""
    shared, seen = worker._shared, [0]
    assert shared is not None

    def another() -> None:
        until(lambda: shared.beats > seen[0])
        seen[0] = shared.beats

    return another


class Slices:
    """In place of the lock that a wait for a worker takes in slices: each slice is over when `each` returns, none by the clock."""

    def __init__(self, each: Callable[[], object]) -> None:
        self.count, self._each = 0, each

    def acquire(self, timeout: float) -> bool:
        self.count += 1
        self._each()
        return False

    def wait(self, worker: Worker, over: Callable[[], bool]) -> None:
        """What a job of the worker does in its wait."""
        assert worker._shared is not None
        worker._shared.wait(over, cast(threading.Lock, self))


class Run:
    """An optimizer over random weights that is given random gradients, and the oracle beside it."""

    def __init__(
        self,
        shapes: Sequence[Shape] = SHAPES,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        link: Link | None = None,
        **options: Any,
    ) -> None:
        self.shapes, self.dtype, self.seed = list(shapes), dtype, seed
        self.params = make_params(shapes, dtype, seed)
        self.options = options = {"lr": 1e-2, **EVERY, **options}
        self.optimizer: Any = sk.ZenFlow(self.params, link=link, **options)
        self.oracle = Oracle([p.detach() for p in self.params], settings_of(options))
        self.steps = 0

    def step(
        self,
        grads: Sequence[Tensor | None] | None = None,
        lr: float | None = None,
        scale: float | None = None,
        finite: bool = True,
    ) -> None:
        given: Sequence[Tensor | None] = (
            make_grads(self.shapes, self.steps, self.dtype, self.seed) if grads is None else grads
        )
        feed(self.optimizer, self.params, given, lr, scale, finite)
        self.oracle.step(given, lr, scale or 1.0, finite)
        self.steps += 1

    def check(self, masters: bool = False) -> None:
        """Both show the same weights; `masters`: and hold the same states, which waits for the workers."""
        for p, w in zip(self.params, self.oracle.weights):
            close(p.detach(), w.shown)
        if masters:
            for p, w in zip(self.params, self.oracle.weights):
                if w.splits and w.begun:
                    same_state(self.optimizer, p, w)


def settings_of(options: dict[str, Any]) -> Settings:
    kept = {k: v for k, v in options.items() if k in Settings.__dataclass_fields__ and k != "select_interval"}
    interval = options["select_interval"]
    if options.get("select_strategy") == "epoch":
        interval *= options["steps_per_epoch"]
    return Settings(**kept, select_interval=interval)


def feed(
    optimizer: Any,
    params: Sequence[nn.Parameter],
    grads: Sequence[Tensor | None],
    lr: float | None = None,
    scale: float | None = None,
    finite: bool = True,
) -> None:
    """One step of an optimizer with these gradients, which it may overwrite."""
    for p, g in zip(params, grads):
        p.grad = None if g is None else g.clone()
    if lr is not None:
        for group in optimizer.param_groups:
            group["lr"] = lr
    optimizer.grad_scale = None if scale is None else torch.tensor(scale)
    optimizer.found_inf = None if finite else torch.tensor(1.0)
    optimizer.step()
    optimizer.grad_scale = optimizer.found_inf = None
    for p in params:  # as a loop does
        if p.grad is not None:
            p.grad.fill_(float("nan"))
        p.grad = None


def close(a: Tensor, b: Tensor) -> None:
    if a.dtype == torch.float32:
        torch.testing.assert_close(a, b, atol=F32_GAP, rtol=F32_GAP)
    else:  # neighbours of one another, where the master lies between them
        torch.testing.assert_close(a, b, atol=F32_GAP, rtol=float(torch.finfo(a.dtype).eps))


def columns(optimizer: Any, p: nn.Parameter) -> dict[str, Tensor]:
    """w, m, v [out, in] and t [in] of a weight, whichever side its columns are on, and which are hot. Waits for the workers."""
    optimizer.state_dict()
    state = optimizer.state[p]
    hot, cold = state["hot"].cpu().long(), state["cold"].cpu().long()
    assert torch.cat((hot, cold)).sort().values.tolist() == list(range(math.prod(p.shape[1:]))), "not a partition"
    whole = {}
    for name in ("w", "m", "v", "t"):
        side = "t_hot" if name == "t" else f"{name}_hot"
        both = torch.empty(math.prod(p.shape[1:]), *state[side].shape[1:], dtype=state[side].dtype)
        both[hot] = state[side].cpu()
        if len(cold):
            both[cold] = state["t_cold" if name == "t" else name]
        whole[name] = both.t() if name != "t" else both
    whole["hot"] = hot.sort().values
    return whole


def same_state(optimizer: Any, p: nn.Parameter, w: Any) -> None:
    held = columns(optimizer, p)
    assert held["hot"].tolist() == w.hot.nonzero().flatten().tolist()
    assert held["t"].tolist() == w.t.tolist()
    for name, theirs in (("w", w.w), ("m", w.m), ("v", w.v)):
        torch.testing.assert_close(held[name].double(), theirs.double(), atol=F32_GAP, rtol=1e-4)


def equal_runs(one: Run, other: Run) -> None:
    """Bit for bit: what is shown, and all that is held."""
    for p, q in zip(one.params, other.params):
        assert torch.equal(p, q)
    equal_trees(one.optimizer.state_dict(), other.optimizer.state_dict())


def equal_trees(a: Any, b: Any, path: str = "state") -> None:
    assert type(a) is type(b), path
    if isinstance(a, Tensor):
        assert a.dtype == b.dtype, path
        assert torch.equal(a, b), path
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            equal_trees(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b)):
            equal_trees(x, y, f"{path}[{i}]")
    else:
        assert a == b or a is b, path
