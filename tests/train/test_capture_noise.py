"""Graphs of a model whose backward gives something else each time, as cuDNN's attention does on a GPU: rounding to few bits makes
much of a little, the more the deeper a model is. They are recorded all the same, and one that is wrong still is not.

The noise is that of a GPU: one bfloat16 step, up or down, in 0.015 % of the elements of dq.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import surokit as sk
from surokit.nn import attention
from surokit.train import capture
from tests.train.replay import Replays, graphed
from tests.train.test_capture import decoder, not_captured

LAYERS = 28
SHARE = 1.5e-4
RECIPES: dict[str, sk.Recipe] = {
    name: recipe for name in dir(sk) if name.isupper() and isinstance(recipe := getattr(sk, name), sk.Recipe)
}
RECIPES |= {f"{name}, adapter": recipe.lora(rank=4) for name, recipe in RECIPES.items()}


@torch.library.custom_op("surokit_tests::a_bit_off", mutates_args=())
def _a_bit_off(x: Tensor) -> Tensor:
    """x with some elements off by their last bit, others each time; torch's generators are not asked."""
    x = x.clone()
    at = torch.randint(x.numel(), (max(1, round(SHARE * x.numel())),), generator=_OWN)
    x.view(-1).view(torch.int16)[at] ^= 1
    return x


_OWN = torch.Generator().manual_seed(0)


class _Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor) -> Tensor:
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, dq: Tensor) -> Tensor:
        return _a_bit_off(dq.contiguous())


@pytest.fixture(autouse=True)
def noisy(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = attention._causal_cpu
    monkeypatch.setattr(attention, "_causal_cpu", lambda q, *others: exact(_Noisy.apply(q), *others))


class Gaps:
    """What recording compared: (gap of the loss, of the gradients), of two eager steps and of a replay."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[float, float]] = []
        exact = capture._gaps

        def gaps(*given: Any) -> tuple[float, float]:
            self.seen.append(exact(*given))
            return self.seen[-1]

        monkeypatch.setattr(capture, "_gaps", gaps)


def _recorded(recipe: sk.Recipe, monkeypatch: pytest.MonkeyPatch, layers: int = LAYERS) -> tuple[float, float]:
    """The largest gap of gradients of two eager steps, and the replay's, of a session whose steps became graphs."""
    gaps = Gaps(monkeypatch)
    session = graphed(decoder(recipe, layers=layers))
    session.run(capture.WARMUP + 1)
    assert session.graphs.state == "on", session.graphs
    noise, gap, *others = gaps.seen  # others: of further eager steps, where the first two were alike by chance
    assert noise[0] == gap[0] == 0.0  # a forward is the same each time
    assert noise[1] > 0.0
    assert gap[1] > 0.0
    return max(between for _, between in (noise, *others)), gap[1]


@pytest.mark.soak
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_every_recipe_is_recorded_at_full_depth(recipe: sk.Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    noise, gap = _recorded(recipe, monkeypatch)
    print(f"{recipe.name}: two eager steps {noise:.3f}, a replay {gap:.3f} of a gradient's norm")


def test_noise_beyond_the_tolerance_is_no_reason_to_stay_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the test before this one is known to ask for more than two percent."""
    noise, gap = _recorded(sk.FP8_ROWWISE.lora(rank=4), monkeypatch)
    assert min(noise, gap) > capture.TOLERANCE


@pytest.mark.parametrize(("others", "state"), [((0.1,), "on"), ((0.03, 0.1), "on"), ((0.03, 0.06), "off")])
def test_noise_that_was_small_by_chance_is_looked_at_again(
    others: tuple[float, ...], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay is off by .2, two eager steps by .02, others by more; three times the most of them decides."""
    gaps = iter([0.02, 0.2, *others])
    monkeypatch.setattr(capture, "_gaps", lambda found, expected: (0.0, next(gaps)))
    session = graphed(decoder(sk.FP8.lora(rank=4)))
    with contextlib.nullcontext() if state == "on" else not_captured("the gradient of a replay is off by 0.2"):
        session.run(capture.WARMUP + 1)
    assert session.graphs.state == state
    assert next(gaps, None) is None


class Wrong(Replays):
    """A device that does something else `before` and `after` a replay."""

    before: Callable[[], Any] = staticmethod(lambda: None)
    after: Callable[[], Any] = staticmethod(lambda: None)

    def record(self, work: Callable[[], Any]) -> Callable[[], None]:
        replay = super().record(work)

        def wrong() -> None:
            self.before()
            replay()
            self.after()

        return wrong


@pytest.mark.parametrize("what", ["gradient", "loss"])
def test_a_graph_that_is_wrong_is_refused_all_the_same(what: str) -> None:
    device = Wrong()
    session = graphed(decoder(sk.QFP8.lora(rank=4), layers=8), device)
    graphs = session.engine._graphs
    assert graphs is not None
    if what == "gradient":  # of one parameter, half of it is missing
        device.after = lambda: next(iter(graphs._gradients.values())).mul_(0.5)
    else:  # half of the labels are
        device.before = lambda: next(iter(graphs._inputs.values()))["labels"][:, :16].fill_(-100)
    with not_captured(f"the {what} of a replay is off by"):
        session.run(capture.WARMUP + 1)
    assert session.graphs.state == "off"
