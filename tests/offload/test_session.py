"""A session whose optimizer keeps its state on the host: records, panel, summary, profile, twins, a race."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import surokit as sk
from surokit.offload.link import ThrottledLink
from surokit.train import Record, Session
from surokit.train.capture import why_not
from surokit.widgets.picture import idle_lines
from surokit.widgets.state import PanelState
from tests.offload.runs import equal_trees
from tests.train.toys import Toy, make_batches, make_session

OPTIONS: dict[str, Any] = {
    "lr": 1e-2,
    "topk_ratio": 0.25,
    "update_interval": 2,
    "select_strategy": "step",
    "select_interval": 4,
}


def offloading(**options: Any) -> Session:
    return make_session(optimizer=sk.ZenFlow(**{**OPTIONS, **options}))


def test_records_say_how_long_the_optimizer_was_waited_for() -> None:
    session = offloading(link=ThrottledLink(0.001, latency_s=0.002))
    session.run(8)
    waited = session.records.column("offload_ms")
    assert len(waited) == 8
    assert waited.max() > 2  # weights that land take at least the link's latency
    assert session.records[-1].meters["offload_ms"] == pytest.approx(waited[-1])
    assert waited.sum() == pytest.approx(session.optimizer.accounts.stall_ms)  # type: ignore[attr-defined]
    plain = make_session()
    plain.run(2)
    assert "offload_ms" not in plain.records.names


def test_the_summary_has_a_row_for_it() -> None:
    session = offloading()
    session.run(6)
    summary = session.summary()
    assert summary.offload_ms == pytest.approx(session.records.column("offload_ms")[1:].mean())
    assert "waiting for offload" in repr(summary)
    plain = make_session()
    plain.run(2)
    assert plain.summary().offload_ms is None
    assert "offload" not in repr(plain.summary())


def test_the_panel_shows_the_share() -> None:
    state = PanelState()
    for step in range(1, 12):
        state.add_row({"step": step, "wall_ms": 100.0, "loss": 1.0, "offload_ms": 25.0})
    assert state.offload_share == pytest.approx(0.25)
    assert "Waiting for the offloaded optimizer: 25 % of the time" in idle_lines(state)
    plain = PanelState()
    plain.add_row({"step": 1, "wall_ms": 100.0, "loss": 1.0})
    plain.add_row({"step": 2, "wall_ms": 100.0, "loss": 1.0})
    assert plain.offload_share is None
    assert not any("offload" in line for line in idle_lines(plain))


def test_a_live_session_tells_its_panel() -> None:
    session, state = offloading(), PanelState()

    class Listener:
        def on_step(self, record: Record) -> None:
            state.add_record(record, record.late.wait())

        def on_end(self, reason: str) -> None:
            pass

    session.subscribe(Listener())
    session.run(5)
    assert state.offload_share is not None


def test_the_report_names_the_models_weights() -> None:
    session = offloading()
    session.run(10)
    optimizer: Any = session.optimizer
    named = {weight.name for weight in optimizer.report().energy.weights}
    assert named == {"embed.weight", "hidden.weight", "lm_head.weight"}


def test_steps_are_not_recorded_as_graphs_and_it_says_why() -> None:
    """On a CUDA device: here the device is reason enough."""
    session = offloading()
    on_cuda = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda"))]))
    assert "ZenFlow is not recorded: the optimizer's state is on the host" in why_not(on_cuda, session.optimizer)  # type: ignore[arg-type]
    assert session.graphs.state == "off"


def test_a_profile_shows_the_waiting_as_a_cause() -> None:
    session = offloading(link=ThrottledLink(0.001, latency_s=0.01), update_interval=1, overlap_step=False)
    session.run(3)
    with sk.profile(warmup=1) as p:
        session.run(4)
    lost = p.lost.set_index("cause")["ms_per_step"]
    assert lost["offload"] > 5
    assert lost["launches"] + lost["host"] + lost["offload"] == pytest.approx(p.summary["idle_ms"])
    (advice,) = p.advice[p.advice.rule == "offload"].advice
    assert "update_interval" in advice


def test_a_fork_goes_on_bit_for_bit() -> None:
    session = offloading()
    session.run(5)
    twin = session.fork()
    for each in (session, twin):
        each.run(7)
    equal_trees(dict(session.model.named_parameters()), dict(twin.model.named_parameters()))
    equal_trees(session.optimizer.state_dict(), twin.optimizer.state_dict())
    assert twin.optimizer.report().steps == 7  # type: ignore[attr-defined]  # counted anew


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = make_session(optimizer=sk.ZenFlow(**OPTIONS))
    whole.run(12)
    first = make_session(optimizer=sk.ZenFlow(**OPTIONS), run_dir=tmp_path / "run")
    first.run(5)
    first.save()
    second = Session.resume(tmp_path / "run", Toy(seed=9), data=make_batches())
    second.run(7)
    equal_trees(dict(whole.model.named_parameters()), dict(second.model.named_parameters()))
    optimizer: Any = second.optimizer
    assert {weight.name for weight in optimizer.report().energy.weights} >= {"hidden.weight"}


@pytest.mark.parametrize("together", [True, False])
def test_a_race_computes_what_a_run_alone_does(together: bool) -> None:
    """They take turns; whether they are parked between them or not, nothing is lost that is on its way."""
    alone = offloading(full_warm_up_rounds=1)
    alone.run(8)
    racing = {"one": offloading(full_warm_up_rounds=1), "two": offloading(full_warm_up_rounds=1)}
    race = sk.race(racing, steps=8, together=together, live=False, predict=False, control=False, turn_s=0.01)
    for name in racing:
        session = race.bring(name)
        equal_trees(dict(alone.model.named_parameters()), dict(session.model.named_parameters()))
