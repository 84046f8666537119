"""The synchronous control: AdamW in float32 to the last bit, whatever travels how, and never a step late."""

from __future__ import annotations

import copy
import math
import pickle
import random
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surokit as sk
from surokit.errors import OffloadError
from surokit.offload import adamw
from surokit.offload.adamw import OffloadAdamW
from surokit.offload.link import Arrival, HostLink, PendingCopy, ThrottledLink
from tests.clocks import PATIENCE_S
from tests.refusals import refused, warned

B, F = torch.bfloat16, torch.float32
SHAPES = [(40, 70), (513,), (130, 33), (7, 3, 5), (1,), (64, 64)]
OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-8}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parameters(dtype: torch.dtype = F, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    return [nn.Parameter(normal(*shape, seed=i).to(dtype)) for i, shape in enumerate(shapes)]


def give_gradients(params: Sequence[Tensor], step: int) -> None:
    for i, p in enumerate(params):
        p.grad = normal(*p.shape, seed=1000 * step + i).to(p.dtype)


def train_wide_beside(
    params: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
    wide: Sequence[Tensor],
    other: torch.optim.Optimizer,
    steps: range,
) -> None:
    """Both, with the same gradients: those of `wide` in float32."""
    for step in steps:
        give_gradients(params, step)
        for p, q in zip(params, wide):
            assert p.grad is not None
            q.grad = p.grad.float()
        optimizer.step()
        other.step()


def train(params: Sequence[Tensor], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        give_gradients(params, step)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        optimizer.step()


def everything(params: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [value for p in params for _, value in sorted(optimizer.state[p].items())]
    return [*(p.detach() for p in params), *states]


def equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs))


@pytest.fixture
def small_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dozen of a step instead of one."""
    monkeypatch.setattr(adamw, "LEAST_BYTES", 2048)
    monkeypatch.setattr(adamw, "TRANSFERS", 12)


# -- numbers


@pytest.mark.parametrize("scale", [None, 3.0])
def test_is_adamw_bit_for_bit(scale: float | None, small_transfers: None) -> None:
    ours, theirs = parameters(), parameters()
    mine, other = OffloadAdamW(ours, **OPTIONS), sk.AdamW(theirs, **OPTIONS)
    for optimizer in (mine, other):
        optimizer.grad_scale = None if scale is None else torch.tensor(scale)
        optimizer.found_inf = None if scale is None else torch.tensor(0.0)
    for step in range(6):
        train(ours, mine, range(step, step + 1))
        train(theirs, other, range(step, step + 1))
        assert equal(ours, theirs), "each step, when it returns"
    assert len(mine._transfers) > 6
    for p, q in zip(ours, theirs):
        assert torch.equal(mine.state[p]["master"], p)
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(mine.state[p][name], other.state[q][name])


@pytest.mark.parametrize("dtype", [B, torch.float16], ids=str)
def test_low_precision_has_a_float32_master(dtype: torch.dtype, small_transfers: None) -> None:
    """The weight is a float32 AdamW's, rounded, and no update is too small for it."""
    ours = parameters(dtype)
    wide = [nn.Parameter(p.detach().to(F, copy=True)) for p in ours]
    mine, other = OffloadAdamW(ours, **OPTIONS), sk.AdamW(wide, **OPTIONS)
    for step in range(8):
        give_gradients(ours, step)
        for p, q in zip(ours, wide):
            assert p.grad is not None
            q.grad = p.grad.float()
        mine.step()
        other.step()
    for p, q in zip(ours, wide):
        assert torch.equal(mine.state[p]["master"], q)
        assert torch.equal(p, q.detach().to(dtype))


def test_dtypes_and_groups_side_by_side(small_transfers: None) -> None:
    def groups(ps: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": ps[:2], "weight_decay": 0.0}, {"params": ps[2:], "lr": 3e-3, "betas": (0.8, 0.9)}]

    ours = [*parameters(B)[:3], *parameters()[3:]]
    wide = [nn.Parameter(p.detach().to(F, copy=True)) for p in ours]
    mine, other = OffloadAdamW(groups(ours), **OPTIONS), sk.AdamW(groups(wide), **OPTIONS)
    train_wide_beside(ours, mine, wide, other, range(4))
    assert equal([mine.state[p]["master"] for p in ours], wide)


def test_gradients_that_come_and_go() -> None:
    """A parameter without a gradient keeps everything, its count of steps included."""
    ours, theirs = parameters(), parameters()
    mine, other = OffloadAdamW(ours, **OPTIONS), sk.AdamW(theirs, **OPTIONS)
    for step in range(5):
        for params, optimizer in ((ours, mine), (theirs, other)):
            give_gradients(params, step)
            params[step % 3].grad = None
            optimizer.step()
    assert equal(ours, theirs)
    assert [float(mine.state[p]["step"]) for p in ours] == [3, 3, 4, 5, 5, 5]
    for p in ours:
        p.grad = None
    mine.step()
    assert equal(ours, theirs)


@pytest.mark.parametrize("found", [1.0, math.nan])
def test_a_masked_step_changes_nothing(found: float, small_transfers: None) -> None:
    params = parameters(B)
    optimizer = OffloadAdamW(params, **OPTIONS, link=ThrottledLink(5.0))
    train(params, optimizer, range(2))
    before = [t.clone() for t in everything(params, optimizer)]
    for p in params:
        p.grad = torch.full_like(p, math.nan)
    optimizer.found_inf = torch.tensor(found)
    optimizer.step()
    assert equal(everything(params, optimizer), before)
    optimizer.found_inf = torch.tensor(0.0)
    train(params, optimizer, range(2, 3))
    again = parameters(B)
    other = OffloadAdamW(again, **OPTIONS)
    train(again, other, range(3))
    assert equal(everything(params, optimizer), everything(again, other))


def test_a_rate_in_a_tensor() -> None:
    ours, theirs, rate = parameters(), parameters(), torch.tensor(0.0)
    mine, other = OffloadAdamW(ours, **{**OPTIONS, "lr": rate}), sk.AdamW(theirs, **OPTIONS)
    for step in range(3):
        rate.fill_(0.5**step)
        other.param_groups[0]["lr"] = other.param_groups[1]["lr"] = 0.5**step
        for params, optimizer in ((ours, mine), (theirs, other)):
            give_gradients(params, step)
            optimizer.step()
    assert equal(ours, theirs)


def test_a_closure() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = OffloadAdamW([p], lr=0.1, weight_decay=0.0)

    def loss() -> float:
        optimizer.zero_grad()
        value = p.square().sum()
        value.backward()
        return float(value.detach())

    assert optimizer.step(loss) == 3.0
    torch.testing.assert_close(p.detach(), torch.full((3,), 0.9))


def test_weights_in_any_dense_order_and_empty_ones(small_transfers: None) -> None:
    turned, channels = normal(50, 30).t(), normal(4, 6, 8, 9).to(memory_format=torch.channels_last)
    ours = [nn.Parameter(t) for t in (turned, channels, torch.empty(0, 5))]
    theirs = [nn.Parameter(t.contiguous()) for t in (turned, channels, torch.empty(0, 5))]
    assert not ours[0].is_contiguous()
    mine, other = OffloadAdamW(ours, **OPTIONS), sk.AdamW(theirs, **OPTIONS)
    train(ours, mine, range(3))  # their gradients are contiguous
    train(theirs, other, range(3))
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=0, atol=0)
    assert mine.state[ours[0]]["master"].shape == (50, 30)


@pytest.mark.parametrize("loaded", [False, True])
def test_a_model_that_takes_another_memory_format(loaded: bool) -> None:
    """Its states follow."""
    shapes = [(4, 6, 8, 9), (5, 5)]
    ours, theirs = parameters(shapes=shapes), parameters(shapes=shapes)
    mine, other = OffloadAdamW(ours, **OPTIONS), OffloadAdamW(theirs, **OPTIONS)
    train(theirs, other, range(6))
    train(ours, mine, range(3))
    if loaded:
        mine.load_state_dict(mine.state_dict())
    ours[0].data = ours[0].data.to(memory_format=torch.channels_last)
    train(ours, mine, range(3, 4))
    ours[1].data = ours[1].data.t().contiguous().t()
    with torch.no_grad():
        ours[1].mul_(1.0)
    with warned(UserWarning):  # of the write, which is taken over in the new order
        train(ours, mine, range(4, 5))
    mine = copy.deepcopy(mine)
    ours = [p for group in mine.param_groups for p in group["params"]]
    ours[0].data = ours[0].data.contiguous()
    train(ours, mine, range(5, 6))
    assert not ours[1].is_contiguous()
    for p, q in zip(ours, theirs):
        assert torch.equal(p, q)
    assert torch.equal(mine.state[ours[0]]["exp_avg"], other.state[theirs[0]]["exp_avg"])
    assert torch.equal(mine.state[ours[1]]["exp_avg"].t(), other.state[theirs[1]]["exp_avg"])


def test_a_weight_with_gaps() -> None:
    p = nn.Parameter(normal(6, 10)[:, :4])
    optimizer = OffloadAdamW([p])
    p.grad = torch.ones(6, 4)
    with refused(ValueError):
        optimizer.step()


# -- what travels


class Logged(HostLink):
    """Says in which order it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.largest = 0

    def down(self, fill: Callable[[Tensor], None], to: Tensor, reads: Sequence[Tensor] = ()) -> PendingCopy:
        self.log.append("down")
        self.largest = max(self.largest, to.nbytes)
        return super().down(fill, to, reads)

    def fetch(self, source: Tensor) -> Arrival:
        self.log.append("fetch")
        arrival, log = super().fetch(source), self.log

        class Told:
            done, wait = arrival.done, arrival.wait

            def land(self) -> Tensor:
                log.append("land")
                return arrival.land()

        return Told()


def test_both_ways_at_once_and_three_transfers_each(small_transfers: None) -> None:
    """Gradients go down two transfers ahead of the update, weights up right behind it, landing before that memory serves again."""
    params, link = parameters(), Logged()
    optimizer = OffloadAdamW(params, **OPTIONS, link=link)
    train(params, optimizer, range(1))
    link.log.clear()
    train(params, optimizer, range(1, 2))
    n = len(optimizer._transfers)
    assert n > 6
    expected = ["down", "down"]
    for i in range(n):
        expected += ["land"] * (i >= 3) + ["fetch"] * (i > 0) + ["down"] * (i + 2 < n)
    assert link.log == [*expected, "fetch", "land", "land", "land"]
    assert len(optimizer._down + optimizer._up) == 6


def test_transfers_are_equal_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    params, link = parameters(B, [(300, 70), (64,), (1000, 33)]), Logged()
    optimizer = OffloadAdamW(params, **OPTIONS, link=link)
    monkeypatch.setattr(adamw, "LEAST_BYTES", 0)
    train(params, optimizer, range(1))
    sizes = [t.numel for t in optimizer._transfers]
    assert adamw.TRANSFERS <= len(sizes) <= adamw.TRANSFERS + 3
    assert sum(sizes) == sum(p.numel() for p in params)
    for transfer in optimizer._transfers:
        assert all(piece.start % 64 == 0 for piece in transfer.pieces), "where torch's kernel begins a vector"
    monkeypatch.setattr(adamw, "TRANSFER_BYTES", 4096)
    bounded, link = OffloadAdamW(params, **OPTIONS, link=Logged()), Logged()
    bounded._given_link = link
    train(params, bounded, range(1))
    assert 0 < link.largest <= 4096
    assert max(t.nbytes for t in bounded._down + bounded._up) <= 4096


@pytest.mark.parametrize("seed", range(3))
def test_delays_change_no_bit(seed: int, small_transfers: None) -> None:
    drawn = random.Random(seed)
    link = ThrottledLink(1.0, delay=lambda: drawn.random() * 2e-3, late_fill=True)
    ours, theirs = parameters(B), parameters(B)
    mine, other = OffloadAdamW(ours, **OPTIONS, link=link), OffloadAdamW(theirs, **OPTIONS)
    mine._worker.delay = lambda: drawn.random() * 2e-3
    for step in range(3):
        train(ours, mine, range(step, step + 1))
        for p in ours:
            assert p.grad is not None
            p.grad.fill_(math.nan)  # the next backward pass may write at once
    train(theirs, other, range(3))
    assert equal(everything(ours, mine), everything(theirs, other))


def test_what_the_report_says(small_transfers: None) -> None:
    params, link = parameters(B), HostLink()
    optimizer = OffloadAdamW(params, **OPTIONS, link=link)
    train(params, optimizer, range(4))
    report = optimizer.report()
    size = sum(p.nbytes for p in params)
    assert (report.model_bytes, link.bytes_down, link.bytes_up) == (size, 5 * size, 4 * size)
    assert (report.down, report.up, report.traffic, report.expected) == (1.0, 1.0, 2.0, 2.0)
    assert (report.steps, report.windows, report.staleness, report.staleness_bound) == (4, 4, {0: 1.0}, 0)
    assert report.hot_share == 0
    assert report.device_bytes == 0
    assert report.host_bytes >= 6 * size, "three float32 states of two-byte weights"
    assert {"training", "adam"} == set(report.threads)
    assert optimizer.stall_ms > 0
    assert "OffloadAdamW" in repr(report)


# -- state


@pytest.mark.parametrize("dtype", [F, B], ids=str)
def test_goes_on_from_a_state_bit_for_bit(dtype: torch.dtype, small_transfers: None) -> None:
    params = parameters(dtype)
    optimizer = OffloadAdamW(params, **OPTIONS)
    train(params, optimizer, range(3))
    saved, weights = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in params]
    again = [nn.Parameter(weight.clone()) for weight in weights]
    train(params, optimizer, range(3, 6))
    resumed = OffloadAdamW(again, lr=0.5)
    train(again, resumed, range(7))  # of its own, which loading replaces
    with torch.no_grad():
        torch._foreach_copy_(list(again), weights)
    resumed.load_state_dict(saved)
    train(again, resumed, range(3, 6))
    assert equal(everything(again, resumed), everything(params, optimizer))
    assert resumed.accounts.steps == 3
    fresh = [nn.Parameter(torch.zeros_like(p)) for p in params]
    third = OffloadAdamW(fresh)
    third.load_state_dict(saved)  # the states were not the loaded optimizer's own
    train(fresh, third, range(3, 6))
    assert equal(everything(fresh, third), everything(params, optimizer)), "weights are their masters"


def test_saving_changes_nothing() -> None:
    results = []
    for saves in (False, True):
        params = parameters(B)
        optimizer = OffloadAdamW(params, **OPTIONS)
        for step in range(4):
            train(params, optimizer, range(step, step + 1))
            if saves:
                optimizer.state_dict()
        results.append(everything(params, optimizer))
    assert equal(*results)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_goes_on_by_itself(how: str) -> None:
    params = parameters(B)
    optimizer = OffloadAdamW(params, **OPTIONS, link=ThrottledLink(5.0))
    train(params, optimizer, range(2))
    both = (params, optimizer)
    twins, twin = copy.deepcopy(both) if how == "deepcopy" else pickle.loads(pickle.dumps(both))
    before = [t.clone() for t in everything(params, optimizer)]
    train(twins, twin, range(2, 5))
    assert equal(everything(params, optimizer), before)
    train(params, optimizer, range(2, 5))
    assert equal(everything(params, optimizer), everything(twins, twin))
    assert isinstance(twin.link, ThrottledLink)
    assert twin.link is not optimizer.link


def test_states_that_do_not_fit() -> None:
    params = parameters(shapes=[(4, 6)])
    optimizer = OffloadAdamW(params)
    zenflow: Any = sk.ZenFlow(params)
    train(params, zenflow, range(1))
    with refused(ValueError):
        optimizer.load_state_dict(zenflow.state_dict())
    for other_state in (optimizer.state_dict(), sk.AdamW(params).state_dict()):
        with refused(ValueError):
            zenflow.load_state_dict(other_state)
    large = [nn.Parameter(normal(80, 80))]
    eight = sk.AdamW8bit(large)
    train(large, eight, range(1))
    with refused(ValueError):
        OffloadAdamW(large).load_state_dict(eight.state_dict())
    other = parameters(shapes=[(4, 7)])
    made = OffloadAdamW(other)
    train(other, made, range(1))
    with refused(ValueError):
        optimizer.load_state_dict(made.state_dict())
    for nothing in (None, {}, {"model": 1}):
        with refused(ValueError):
            optimizer.load_state_dict(nothing)  # type: ignore[arg-type]


def test_goes_on_from_the_state_of_adamw_bit_for_bit_and_that_from_its() -> None:
    """Saved at once and loaded again, too; whatever the weight's order in memory."""
    ours, theirs = ([*parameters(), nn.Parameter(normal(20, 30).t())] for _ in range(2))
    first, second = sk.AdamW(theirs, **OPTIONS), OffloadAdamW(ours)
    train(theirs, first, range(3))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    second.load_state_dict(copy.deepcopy(second.state_dict()))
    with torch.no_grad():
        torch._foreach_copy_(list(ours), list(theirs))  # the weights of the next step count
    train(ours, second, range(3, 6))
    train(theirs, first, range(3, 6))
    assert equal(ours, theirs)
    whole = ours[:-1]
    third, fourth = OffloadAdamW(whole), sk.AdamW(whole, **OPTIONS)
    third.state.update({p: second.state[p] for p in whole})
    fourth.load_state_dict(copy.deepcopy({**third.state_dict(), "param_groups": fourth.state_dict()["param_groups"]}))
    assert fourth.state[whole[0]].keys() == {"step", "exp_avg", "exp_avg_sq"}
    train(whole, fourth, range(6, 8))
    train(theirs, first, range(6, 8))
    assert equal(whole, theirs[:-1])


def test_goes_on_from_the_state_of_torch_s_adamw_in_low_precision() -> None:
    """Its moments are those of the weights' dtype, and are widened; masters are the weights of the next step."""
    params, wide = parameters(B), parameters()
    plain = torch.optim.AdamW(params, **OPTIONS)
    train(params, plain, range(3))
    ours, reference = OffloadAdamW([{"params": params}]), sk.AdamW([{"params": wide}])
    ours.load_state_dict(copy.deepcopy(plain.state_dict()))
    reference.load_state_dict(copy.deepcopy(plain.state_dict()))
    with torch.no_grad():
        torch._foreach_copy_(list(wide), list(params))
    train_wide_beside(params, ours, wide, reference, range(3, 6))
    assert equal([ours.state[p]["master"] for p in params], wide)


@pytest.mark.parametrize("make", [OffloadAdamW, sk.AdamW])
@pytest.mark.parametrize("copied", [False, True])
def test_goes_on_from_the_state_of_torch_s_adamw_over_the_same_iterable(make: Any, copied: bool) -> None:
    """Its one group has all parameters in their order, frozen ones and those without a gradient too."""
    ours, theirs = parameters(), parameters()
    for params in (ours, theirs):
        params[2].requires_grad_(False)
    plain = torch.optim.AdamW(theirs, **{**OPTIONS, "weight_decay": 0.0, "eps": 1e-6}, fused=True)

    def both(step: int) -> None:
        for params, optimizer in ((ours, mine), (theirs, plain)):
            give_gradients(params, step)
            params[2].grad = params[0].grad = None
            optimizer.step()

    mine = plain
    both(0)
    ours = [nn.Parameter(p.detach().clone(), p.requires_grad) for p in theirs]
    mine = make(iter(ours), **{**OPTIONS, "lr": 1.0, "weight_decay": 0.0})
    if copied:
        ours, mine = copy.deepcopy((ours, mine))
    plain.param_groups[0]["lr"] = 3e-3
    mine.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert [(len(g["params"]), g["lr"], g["eps"]) for g in mine.param_groups] == [(3, 3e-3, 1e-6), (2, 3e-3, 1e-6)]
    for step in range(1, 4):
        both(step)
    assert equal(ours, theirs)


@pytest.mark.parametrize("make", [OffloadAdamW, sk.AdamW])
def test_of_a_state_that_is_taken_up_the_decay_stays_here(make: Any) -> None:
    params = parameters()
    plain = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.3)
    train(params, plain, range(1))
    optimizer = make(params, weight_decay=0.2)
    optimizer.load_state_dict(plain.state_dict())
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.2, 0.0]
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.2, 0.0]


@pytest.mark.parametrize("make", [OffloadAdamW, sk.AdamW])
def test_and_where_all_parameters_are_matrices(make: Any) -> None:
    params = parameters(shapes=[(4, 6), (6, 4)])
    plain = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.3)
    train(params, plain, range(1))
    optimizer, given = make(params, weight_decay=0.2), make([{"params": params}], weight_decay=0.2)
    for each in (optimizer, given):
        each.load_state_dict(plain.state_dict())
    assert [(g["weight_decay"], g["lr"]) for g in optimizer.param_groups] == [(0.2, 1e-2)]
    assert given.param_groups[0]["weight_decay"] == 0.3, "groups are taken as they are"
    own = make(params, weight_decay=0.1)
    own.load_state_dict(optimizer.state_dict())
    assert own.param_groups[0]["weight_decay"] == 0.2, "of its own state all options count"


@pytest.mark.parametrize("make", [OffloadAdamW, sk.AdamW])
def test_groups_of_a_state_that_are_others(make: Any) -> None:
    params = [nn.Parameter(normal(16)), nn.Parameter(normal(1, 16))]
    turned = torch.optim.AdamW([{"params": [p]} for p in params])
    train(params, turned, range(1))
    optimizer = make(params)
    with refused(ValueError):
        optimizer.load_state_dict(turned.state_dict())
    with refused(ValueError):
        make([{"params": params}]).load_state_dict(optimizer.state_dict())
    with refused(ValueError):
        optimizer.load_state_dict(torch.optim.AdamW([*params, nn.Parameter(normal(2))]).state_dict())
    assert not optimizer.state


@pytest.mark.parametrize(
    "make", [lambda: parameters(B), lambda: [nn.Parameter(normal(6, 4).t())]], ids=["bf16", "turned"]
)
def test_masters_are_not_dropped_silently(make: Callable[[], list[nn.Parameter]]) -> None:
    params = make()
    optimizer = OffloadAdamW(params)
    train(params, optimizer, range(1))
    with refused(ValueError):
        sk.AdamW(params).load_state_dict(optimizer.state_dict())


# -- what fails


class Interrupting(HostLink):
    def fetch(self, source: Tensor) -> Arrival:
        if self.bytes_up == 0:
            signal.raise_signal(signal.SIGINT)
        return super().fetch(source)


def test_an_interrupt_waits_for_the_step(small_transfers: None) -> None:
    ours, theirs = parameters(), parameters()
    mine, other = OffloadAdamW(ours, **OPTIONS, link=Interrupting()), OffloadAdamW(theirs, **OPTIONS)
    with pytest.raises(KeyboardInterrupt):
        train(ours, mine, range(1))
    train(ours, mine, range(1, 3))
    train(theirs, other, range(3))
    assert equal(everything(ours, mine), everything(theirs, other))


class Breaking(HostLink):
    """Fails at the transfer that `left` counts down to."""

    left = -1

    def fetch(self, source: Tensor) -> Arrival:
        self.left -= 1
        if self.left == 0:
            raise OffloadError("the cable is out")
        return super().fetch(source)


def test_a_step_that_was_cut_short(small_transfers: None) -> None:
    params, link = parameters(), Breaking()
    optimizer = OffloadAdamW(params, **OPTIONS, link=link)
    train(params, optimizer, range(2))
    saved, weights = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in params]
    link.left = 3
    with refused(OffloadError):
        train(params, optimizer, range(2, 3))
    for use in (optimizer.step, optimizer.state_dict, lambda: copy.deepcopy(optimizer)):
        with refused(OffloadError):
            use()
    optimizer.load_state_dict(saved)
    with torch.no_grad():
        torch._foreach_copy_(list(params), weights)
    train(params, optimizer, range(2, 4))
    again = parameters()
    other = OffloadAdamW(again, **OPTIONS)
    train(again, other, range(4))
    assert equal(everything(params, optimizer), everything(again, other))


def test_a_state_is_loaded_after_the_thread_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, though the thread still hangs."""
    params = parameters()
    optimizer = OffloadAdamW(params, **OPTIONS)
    train(params, optimizer, range(2))
    state, weights = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in params]
    over, mended = threading.Event(), list[bool]()
    with monkeypatch.context() as patch:
        patch.setattr(optimizer._worker._shared, "patience_s", 0.1)
        patch.setattr(adamw, "fused_adamw_", lambda *_, **__: mended.append(over.wait(PATIENCE_S)))
        with refused(OffloadError):
            train(params, optimizer, range(2, 3))
        optimizer.load_state_dict(state)
        assert not mended, "it waited for the thread"
        over.set()
    with torch.no_grad():
        torch._foreach_copy_(list[Tensor](params), weights)
    train(params, optimizer, range(2, 4))
    straight = parameters()
    train(straight, OffloadAdamW(straight, **OPTIONS), range(4))
    assert equal(params, straight)


def test_memory_that_runs_out_before_a_step_changes_nothing() -> None:
    class Scarce(HostLink):
        scarce = True

        def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            if dtype == torch.uint8 and self.scarce:  # a transfer's
                raise MemoryError
            return super().buffer(shape, dtype)

    params, link = parameters(), Scarce()
    optimizer = OffloadAdamW(params, **OPTIONS, link=link)
    with pytest.raises(MemoryError):
        train(params, optimizer, range(1))
    link.scarce = False
    train(params, optimizer, range(2))
    again = parameters()
    other = OffloadAdamW(again, **OPTIONS)
    train(again, other, range(2))
    assert equal(everything(params, optimizer), everything(again, other))


def test_an_error_in_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters()
    optimizer = OffloadAdamW(params, **OPTIONS)

    def out_of_memory(*_: Any, **__: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(adamw, "fused_adamw_", out_of_memory)
    give_gradients(params, 0)
    with refused(OffloadError):
        optimizer.step()
    monkeypatch.undo()
    with refused(OffloadError):
        optimizer.step()


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1.0},
        {"betas": (0.9, 1.0)},
        {"weight_decay": -0.1},
        {"pt_reserved_cores_perc": 1.5},
        {"pt_reserved_cores_perc": "half"},
        {"link": "pcie"},
        {"lr": torch.ones((), device="meta")},
    ],
)
def test_options(options: dict[str, Any]) -> None:
    for make in (lambda: OffloadAdamW(**options), lambda: OffloadAdamW(parameters(), **options)):
        with refused(ValueError):
            make()


def test_what_cannot_be_offloaded_is_refused_with_a_reason() -> None:
    waves = nn.Parameter(torch.ones(2, 3, dtype=torch.complex64))
    waves.grad = torch.ones_like(waves)
    with refused(ValueError):
        OffloadAdamW([waves]).step()
    table = nn.Embedding(5, 4, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with refused(ValueError):
        OffloadAdamW(table.parameters()).step()


def test_a_specification() -> None:
    spec: Any = OffloadAdamW(lr=3e-4, pt_reserved_cores_perc=0.5)
    assert repr(spec) == "OffloadAdamW(lr=0.0003, pt_reserved_cores_perc=0.5)"
    params = parameters()
    optimizer = spec.build(params)
    assert isinstance(optimizer, OffloadAdamW)
    train(params, optimizer, range(1))
    with pytest.raises(TypeError, match="topk_ratio"):
        OffloadAdamW(topk_ratio=0.1)  # type: ignore[call-arg]


def test_the_reserved_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        adamw, "split_cores", lambda share: ([0, 1], [2], [3, 4, 5]) if share else ([0], [1], [2, 3, 4, 5])
    )
    assert OffloadAdamW(parameters())._worker.cores == (0, 1, 2, 3, 4, 5), "by default nobody else computes meanwhile"
    reserved = OffloadAdamW(parameters(), pt_reserved_cores_perc=0.3)._worker
    assert (reserved.cores, reserved.threads) == ((2, 3, 4, 5), 4)


# -- shards


def test_a_sharded_parameter_is_updated_where_its_shard_is() -> None:
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))

        def shard(local: Tensor) -> DTensor:
            return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

        local, alone = normal(8, 6).to(B), nn.Parameter(normal(8, 6).to(B))
        p = nn.Parameter(shard(local))
        ours, theirs = OffloadAdamW([p], **OPTIONS), OffloadAdamW([alone], **OPTIONS)
        for step in range(3):
            grad = normal(8, 6, seed=step).to(B)
            p.grad, alone.grad = shard(grad.clone()), grad
            ours.step()
            theirs.step()
        assert p.shape == (16, 6)
        assert torch.equal(p.to_local(), alone)  # type: ignore[attr-defined]
        assert equal([ours.state[p][k] for k in adamw.STATES], [theirs.state[alone][k] for k in adamw.STATES])
    finally:
        destroy_process_group()
