"""Batches in which no label counts: never a loss, never an update, always said, and an error where they do not end."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import surokit as sk
from surokit.runs.health import ZEROS, Health
from surokit.runs.jsonl import read
from surokit.runs.status import read_status
from surokit.train import NoTargetsError, Session
from surokit.train.stream import Batch
from surokit.widgets.folder import RunFolder
from surokit.widgets.panel import Panel
from surokit.widgets.state import PanelState
from tests.refusals import refused
from tests.train.replay import Replays, graphed
from tests.train.toys import Toy, assert_same_state, make_batches, make_session, moments, weights


def masked(count: int, empty: range) -> list[Batch]:
    """Batches of which some have labels of -100 only."""
    batches = make_batches(count)
    for i in empty:
        batches[i]["labels"].fill_(-100)
    return batches


class Quiet(Toy):
    """Gives 0 as the mean over no label, as a Decoder does; a Toy gives NaN, as models of transformers do."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        output = super().forward(input_ids, labels)
        output.loss = torch.nan_to_num(output.loss)
        return output


def decoder(seed: int = 0) -> sk.Decoder:
    torch.manual_seed(seed)
    return sk.Decoder(sk.DecoderConfig(layers=1, width=32, heads=2, kv_heads=1, vocab=32, ffn=48))


@pytest.mark.parametrize("make", [Toy, Quiet, decoder])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_such_a_step_has_no_loss_and_changes_nothing(make: Any, accumulate: int) -> None:
    session = make_session(make(), masked(3 * accumulate, range(accumulate, 2 * accumulate)), accumulate=accumulate)
    session.run(1)
    before, state = weights(session), moments(session)
    session.run(1)
    assert all(torch.equal(value, before[name]) for name, value in weights(session).items())
    assert all(torch.equal(a, b) for a, b in zip(moments(session), state, strict=True))
    session.run(1)
    frame = session.records.frame()
    assert frame.targets.eq(0).tolist() == frame.skipped.eq(1).tolist() == [False, True, False]
    assert frame.loss.isna().tolist() == frame.grad_norm.isna().tolist() == [False, True, False]
    record = session.records[1]
    assert math.isnan(record.loss)
    assert math.isnan(record.grad_norm)
    assert (record.skipped, record.targets) == (True, 0)
    assert not session.findings, "nothing was not finite"


def test_with_graphs_as_without() -> None:
    def make() -> Session:
        return make_session(Quiet(), masked(8, range(5, 7)), optimizer=sk.AdamW(lr=torch.tensor(1e-2)), schedule=None)

    device = Replays()
    eager, graphs = make(), graphed(make(), device)
    eager.run(8)
    graphs.run(8)
    assert graphs.graphs.state == "on", graphs.graphs
    assert_same_state(eager, graphs)
    for session in (eager, graphs):
        assert np.isnan(session.records.column("loss")).tolist() == [i in (5, 6) for i in range(8)]


@pytest.mark.parametrize("graphs", [False, True])
def test_a_part_without_labels_on_a_device_leaves_the_step_as_it_is(
    graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host does not look there, so the part is computed, with a weight of 0; a Toy gives NaN as its mean."""

    def make() -> Session:
        batches = masked(16, range(3, 16, 4))
        options: dict[str, Any] = {"optimizer": sk.AdamW(lr=torch.tensor(1e-2)), "schedule": None, "accumulate": 2}
        return make_session(Toy(dropout=0), batches, **options)

    left_out, there = make(), make()
    if graphs:
        graphed(there, Replays())
    left_out.run(8)
    monkeypatch.setattr("surokit.train.session.with_targets", lambda batches: batches)
    there.run(8)
    assert there.graphs.state == ("on" if graphs else "off")
    assert np.isfinite(there.records.column("loss")).all()
    assert_same_state(left_out, there)


def test_it_is_told_everywhere(tmp_path: Path) -> None:
    session = make_session(data=masked(4, range(1, 3)), run_dir=tmp_path / "run")
    state = PanelState()
    session.subscribe(Panel(state, view="text"))
    session.run(4)
    (event,) = [e for e in session.journal.events if e["kind"] == "no_targets"]
    assert event["step"] == 2
    assert "-100" in event["text"]
    assert "template" in event["suggestion"]
    status = read_status(tmp_path / "run")
    assert status is not None
    assert event in status.events
    rows = [json.loads(line) for line in (tmp_path / "run" / "records.jsonl").read_text().splitlines()]
    assert ["loss" in row for row in rows] == [True, False, False, True]
    assert ["grad_norm" in row for row in rows] == [True, False, False, True]
    assert np.isnan(read(tmp_path / "run" / "records.jsonl")["loss"]).tolist() == [False, True, True, False]
    summary = session.summary()
    assert (summary.skipped, summary.without_targets) == (2, 2)
    assert "4, 2 skipped (2 without a label that counts)" in repr(summary)
    assert summary.goodput < 1
    folder = RunFolder(tmp_path / "run")
    folder.look()
    for shown in (state, folder.state):
        assert shown.loss.count == 2
        assert [line.split(",")[0] for line in shown.warning_lines()] == ["nothing to learn from"]
        assert [e.kind for e in shown.events] == ["no_targets"]
        assert shown.goodput is not None
        assert shown.goodput < 1


def test_goodput_counts_no_such_step() -> None:
    session = make_session(data=masked(2, range(0, 2)), max_skipped=3)
    session.run(2)
    assert session.summary().goodput == 0


def test_several_in_a_row_are_an_error_with_the_likely_cause() -> None:
    session = make_session(decoder(), masked(8, range(1, 8)), max_skipped=4)
    session.run(1)
    before = weights(session)
    with refused(NoTargetsError):
        session.run(7)
    assert session.steps == 5
    assert all(torch.equal(value, before[name]) for name, value in weights(session).items())


def test_in_ones_own_loop_too() -> None:
    session = make_session(data=masked(3, range(3)), max_skipped=3)
    batches = iter(session.data)
    for _ in range(2):
        session.step(next(batches))
    with pytest.raises(NoTargetsError):
        session.step(next(batches))


def test_single_ones_do_not_add_up() -> None:
    session = make_session(data=masked(2, range(1, 2)), max_skipped=2)
    session.run(8)
    assert session.records.column("skipped").sum() == 4


@pytest.mark.filterwarnings("ignore:A step that is not finite")
def test_steps_of_another_failure_between_end_the_row() -> None:
    batches = masked(2, range(1, 2))
    session = make_session(data=batches, max_skipped=2)
    parameter = next(session.model.parameters())
    for step in range(6):
        parameter.data[0] = (
            math.nan if step % 2 == 0 else 0.0
        )  # the even steps are not finite, the odd ones without targets
        session.step(batches[step % 2])
    assert session.records.column("skipped").sum() == 6


def test_a_run_can_be_told_to_stop_at_the_first() -> None:
    session = make_session(data=masked(5, range(2, 3)))
    session.stop_when("no_targets")
    session.run(5)
    assert session.steps == 3
    assert session.control.reason.startswith("stopped: no_targets at step 3")


def test_health_suspects_losses_that_are_exactly_zero() -> None:
    """Where nobody says how many labels count."""
    health = Health()
    events = [e for step in range(1, 40) for e in health.add(step, loss=2.0 if step < 10 else 0.0)]
    assert [(e.step, e.kind) for e in events] == [(9 + ZEROS, "no_targets")]
    assert "exactly 0" in events[0].text
    health = Health()
    assert not [e for step in range(1, 40) for e in health.add(step, loss=0.0, targets=5) if e.kind == "no_targets"]


def test_health_takes_nothing_else_from_such_a_step() -> None:
    health = Health()
    kinds = [
        e.kind
        for step in range(1, 20)
        for e in health.add(step, loss=math.nan, grad_norm=math.nan, skipped=True, targets=0)
    ]
    assert kinds == ["no_targets"]
    assert health.losses == 0
