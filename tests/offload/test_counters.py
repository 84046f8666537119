"""What an offloading optimizer counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import surokit as sk
from surokit.offload import counters as module
from surokit.offload.counters import CAUSES, RANGE, Accounts
from surokit.offload.link import HostLink, Link
from tests.clocks import Clock


def test_a_wait_counts_for_its_cause_and_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    accounts = Accounts()
    for seconds in (0.02, 0.0, 0.01):
        with accounts.stalled("adam"):
            clock.sleep(seconds)
        with accounts.stalled("slot"):
            pass
        accounts.steps += 1
    assert accounts.stalls("adam") == pytest.approx([20, 0, 10])
    adam = accounts.stalls("adam")
    assert accounts.stall_by_cause["adam"] == pytest.approx(sum(adam))
    assert accounts.stall_ms == pytest.approx(sum(sum(accounts.stalls(cause)) for cause in CAUSES))
    assert accounts.stalls("landing") == [0.0, 0.0, 0.0]


def test_a_wait_that_fails_counts_too() -> None:
    accounts = Accounts()
    with pytest.raises(KeyboardInterrupt), accounts.stalled("slot"):
        raise KeyboardInterrupt
    assert accounts.stall_ms > 0


def test_an_unknown_cause_is_refused() -> None:
    with pytest.raises(KeyError, match="coffee"), Accounts().stalled("coffee"):
        pass


def test_waits_are_held_for_the_last_steps_only_however_many_a_step_has() -> None:
    accounts = Accounts()
    for _ in range(4200):
        for cause in ("slot", "adam", "slot"):
            with accounts.stalled(cause):
                pass
        accounts.steps += 1
    assert len(accounts._stalls) <= 4096
    assert len(accounts.stalls("slot")) == 4096
    assert min(accounts.stalls("slot")) > 0
    assert accounts.stalls("landing") == [0.0] * 4096


def test_bytes_add_up_by_kind() -> None:
    accounts = Accounts()
    accounts.moved("gradients", 10, 0)
    accounts.moved("gradients", 5, 0)
    accounts.moved("migration", 3, 4)
    assert accounts.bytes == {
        "gradients": (15, 0),
        "weights": (0, 0),
        "migration": (3, 4),
        "setup": (0, 0),
        "adopted": (0, 0),
    }


@pytest.mark.parametrize("given", [None, HostLink()])
@pytest.mark.parametrize("make", [sk.OffloadAdamW, sk.ZenFlow])
def test_what_the_device_waited_goes_on_with_the_next_link(make: Any, given: Link | None) -> None:
    """And not from below 0, where the first one had counted more."""
    p = nn.Parameter(torch.zeros(4, 8))
    optimizer: Any = make([p], link=given)
    for step in range(6):
        p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.link.waited(1.0)
        if step == 3:
            optimizer.close()
    assert 1e3 <= optimizer.device_stall_ms < 1.5e3
    assert 6e3 <= 6 * optimizer.report().device_stall_ms < 7e3


def test_a_profile_shows_waits_by_name() -> None:
    accounts = Accounts()
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile,
        accounts.stalled("landing"),
    ):
        torch.ones(3) + 1
    assert f"{RANGE}landing" in {event.key for event in profile.key_averages()}


def test_choices_are_remembered_and_the_latest_scores() -> None:
    accounts, p = Accounts(), torch.zeros(2, 4)
    for step in range(300):
        accounts.selected(step, p, torch.full((4,), float(step)), 0.5, 2, 1)
    assert len(accounts.choices[p]) == 256
    assert accounts.choices[p][-1].step == 299
    assert accounts.scores[p].tolist() == [299.0] * 4
