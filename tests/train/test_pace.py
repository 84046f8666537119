"""What each of several processes does alone in a step, by marks that a test makes; tests/parallel has four processes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from surokit.train.marks import Mark
from surokit.train.pace import Pace
from surokit.widgets.picture import rank_lines
from surokit.widgets.records_tail import COLUMNS
from surokit.widgets.state import SLOWEST, PanelState

CPU = torch.device("cpu")


class Event:
    """An event of a GPU that comes when a test says so."""

    here = True

    def __init__(self, ms: float) -> None:
        self.ms = ms

    def query(self) -> bool:
        return Event.here

    def elapsed_time(self, later: Event) -> float:
        return later.ms - self.ms


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The marks that are made, one every 2 ms of the host and every 3 ms of a device."""
    made: list[Any] = []

    def on(device: torch.device) -> Mark:
        event: Any = None if device == CPU else Event(3.0 * len(made))
        made.append(Mark(2e-3 * len(made), event))
        return made[-1]

    monkeypatch.setattr(Mark, "on", on)
    return made


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y


def test_forward_of_the_blocks_and_the_wait_for_data_are_added(marks: list[Any]) -> None:
    pace, blocks = Pace(CPU), [Block(), Block()]
    assert math.isnan(pace.say())
    x = torch.ones(1, 2)
    with pace.watch(blocks):
        for block in blocks:
            x = block(x)
    pace.waited(5.0)
    pace.waited(9.0)
    assert pace.say() == pytest.approx(2 + 2 + 7)
    blocks[0](x)
    assert len(marks) == 4  # nothing is measured between
    assert pace.say() == pytest.approx(11)


def test_what_backward_computes_again_is_left_out(marks: list[Any]) -> None:
    pace, block = Pace(CPU), Block()
    with pace.watch([block]):
        y = checkpoint(block, torch.ones(1, 2, requires_grad=True), use_reentrant=False)
        assert isinstance(y, torch.Tensor)
        y.sum().backward()
    assert len(marks) == 2


def test_nothing_waits_for_a_device(marks: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pace, block = Pace(torch.device("cuda")), Block()
    monkeypatch.setattr(Event, "here", False)
    with pace.watch([block]):
        block(torch.ones(1, 2))
    pace.waited(0.0)
    assert math.isnan(pace.say())
    monkeypatch.setattr(Event, "here", True)
    assert pace.say() == 3.0


def test_the_slowest_is_known_once_all_have_said_it() -> None:
    pace = Pace(CPU)
    pace.hear([3.0, math.nan, 4.0])
    assert pace.columns() == {}
    pace.hear([3.0, 9.0, 4.0, 4.0])
    assert pace.columns() == {"slowest_rank": 1.0, "slowest_ms": 9.0, "median_ms": 4.0}
    pace.hear([3.0, math.nan, 4.0, 4.0])
    assert pace.columns()["slowest_rank"] == 1.0


def test_the_panel_says_which_rank_is_slow() -> None:
    state = PanelState()
    assert rank_lines(state) == []
    state.add(3, slowest_rank=1.0, slowest_ms=9.0, median_ms=4.0)
    assert rank_lines(state) == ["Ranks: 1 is the slowest, 125% over the median (9 ms of data and forward)"]
    assert set(SLOWEST) <= set(COLUMNS)
