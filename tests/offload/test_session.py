"""A session whose optimizer keeps its state on the host: records, panel, summary, profile, twins, a race."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import surokit as sk
from surokit.offload.link import ThrottledLink
from surokit.runs.records import Deferred
from surokit.train import Record, Session
from surokit.train.capture import why_not
from surokit.train.errors import ResumeError
from surokit.widgets.picture import figures, idle_lines, summary_line
from surokit.widgets.state import PanelState
from tests.offload.runs import equal_trees
from tests.refusals import refused
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
    optimizer: Any = session.optimizer
    assert waited.sum() == pytest.approx(optimizer.link.device_stall_ms())
    assert waited.sum() <= optimizer.accounts.stall_ms  # which has the work around the waits too
    plain = make_session()
    plain.run(2)
    assert "offload_ms" not in plain.records.names


def test_waits_of_another_by_the_same_link_are_never_more_than_the_step() -> None:
    link = ThrottledLink(0.0003)
    session = make_session(optimizer=sk.OffloadAdamW(lr=1e-2, link=link))
    session.run(2)
    for _ in range(3):
        link.up(torch.zeros(20_000), lambda staging: None)  # some 250 ms that are no step's
        session.run(2)
    steps = session.records.frame()
    assert (steps["offload_ms"] <= steps["wall_ms"]).all()
    assert steps["idle_frac"].between(0, 1).all()
    assert 0 <= session.summary().goodput <= 1


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


@pytest.mark.parametrize("kind", [sk.ZenFlow, sk.OffloadAdamW])
def test_waiting_for_offload_is_idle_time_with_a_cause_and_no_goodput(kind: Any) -> None:
    session = make_session(optimizer=kind(lr=1e-2, link=ThrottledLink(0.0003)))
    session.run(16)
    steps = session.records.frame()
    share = steps["offload_ms"].sum() / steps["wall_ms"].sum()
    assert share > 0
    assert (steps["idle_frac"] >= steps["offload_ms"] / steps["wall_ms"] - 1e-9).all()
    summary = session.summary()
    assert summary.offload_ms is not None
    assert summary.idle_frac >= summary.offload_ms * (16 - summary.warmup_steps) / 1e3 / (
        summary.step_s - summary.warmup_s
    )
    assert summary.goodput <= 1 - share
    assert summary.lost_gpu_hours >= share * summary.step_s / 3600
    assert "not waiting for data or offload" in repr(summary)
    state = PanelState.from_records(steps)
    assert state.goodput is not None
    assert state.idle_mean.last is not None
    assert state.goodput <= 1 - share
    assert state.idle_mean.last[1] == pytest.approx(sum(state.idle_causes.values()))


def test_the_panel_shows_the_share() -> None:
    state = PanelState()
    for step in range(1, 12):
        state.add_row(
            {"step": step, "wall_ms": 100.0, "loss": 1.0, "idle_frac": 0.3, "stall_ms": 1.0, "offload_ms": 25.0}
        )
    causes = {"data": 0.01, "offload": 0.25, "between steps": 0.04}
    assert state.idle_causes == pytest.approx(causes)
    assert state.goodput == pytest.approx(0.74)
    assert idle_lines(state) == ["Idle: waiting for data 1.0 %, waiting for offload 25 %, between steps 4.0 %"]
    assert "idle 30.0 %, for offload 25 %" in summary_line(state)
    told = {figure.name: figure for figure in figures(state)}
    assert told["Device idle"].note == "data 1.0 % · offload 25 % · between steps 4.0 %"
    plain = PanelState()
    for step in (1, 2):
        plain.add_row({"step": step, "wall_ms": 100.0, "loss": 1.0, "idle_frac": 0.3})
    assert "offload" not in plain.idle_causes
    assert "offload" not in summary_line(plain) + str(idle_lines(plain))


def test_a_panel_that_knows_no_idle_share_shows_what_waited_at_least() -> None:
    state = PanelState()
    for step in (1, 2, 3):
        state.add_row({"step": step, "wall_ms": 100.0, "stall_ms": 10.0, "offload_ms": 30.0})
    assert state.goodput == pytest.approx(0.6)
    told = {figure.name: figure for figure in figures(state)}
    assert told["Device idle"].value == "≥ 40 %"
    assert "idle ≥ 40 %, for offload 30 %" in summary_line(state)


def test_idle_time_on_a_gpu_has_what_its_stream_waited_for() -> None:
    """Between events: 2 ms before the step, 8 ms in it, of which 4 ms were waits."""

    class At:
        def __init__(self, ms: float) -> None:
            self.ms = ms

        def elapsed_time(self, other: At) -> float:
            return other.ms - self.ms

        def synchronize(self) -> None:
            """It has happened."""

    before, start, end = (cast(torch.cuda.Event, At(ms)) for ms in (0.0, 2.0, 10.0))
    assert Deferred({}, {}, start, end, before).wait()["idle_frac"] == pytest.approx(0.2)
    assert Deferred({}, {"offload_ms": 4.0}, start, end, before).wait()["idle_frac"] == pytest.approx(0.6)
    assert Deferred({}, {"offload_ms": 40.0}, start, end, before).wait()["idle_frac"] == 1  # of steps before


def test_a_link_that_was_used_before_starts_no_account_with_its_waits() -> None:
    link = ThrottledLink(1.0)
    link.waited(100.0)
    for kind in (sk.ZenFlow, sk.OffloadAdamW):
        session = make_session(optimizer=kind(lr=1e-2, link=link))
        session.run(2)
        assert session.records.column("offload_ms").sum() < 50e3
        optimizer: Any = session.optimizer
        assert optimizer.report().device_stall_ms < 25e3


def test_a_live_session_tells_its_panel() -> None:
    session, state = offloading(), PanelState()

    class Listener:
        def on_step(self, record: Record) -> None:
            state.add_record(record, record.late.wait())

        def on_end(self, reason: str) -> None:
            pass

    session.subscribe(Listener())
    session.run(5)
    assert "offload" in state.idle_causes


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


@pytest.mark.parametrize("make", [sk.AdamW(lr=1e-2), lambda params: torch.optim.AdamW(params, lr=1e-2)])
def test_a_run_changes_from_adamw(make: Any, tmp_path: Path) -> None:
    """To OffloadAdamW with moments and the options given; to ZenFlow with the weights alone."""
    first = make_session(optimizer=make, run_dir=tmp_path / "run")
    first.run(4)
    first.save()
    options: dict[str, Any] = {"data": make_batches(), "model": Toy(seed=9)}
    second = Session.resume(tmp_path / "run", **options, optimizer=sk.OffloadAdamW(lr=1e-3, betas=(0.8, 0.9)))
    for p, q in zip(first.model.parameters(), second.model.parameters()):
        assert torch.equal(p, q)
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(first.optimizer.state[p][name], second.optimizer.state[q][name])
    assert {group["betas"] for group in second.optimizer.param_groups} == {(0.8, 0.9)}
    second.run(2)
    assert len(second.records) == 6
    with refused(ResumeError):
        Session.resume(tmp_path / "run", **options, optimizer=sk.ZenFlow(lr=1e-2))
    third = Session(second.model, make_batches(), optimizer=sk.ZenFlow(lr=1e-2))
    third.run(2)
    assert third.optimizer.report().steps == 2  # type: ignore[attr-defined]


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


def test_optimizers_race_as_sessions() -> None:
    for given in ([sk.ZenFlow(lr=1e-2)], {"adamw": sk.AdamW(torch.nn.Linear(2, 2).parameters())}):
        with refused(TypeError):
            sk.race(given, model=Toy(), data=make_batches(), steps=8)
    contenders = {
        "AdamW": make_session(optimizer=sk.AdamW(lr=1e-2)),
        "OffloadAdamW": make_session(optimizer=sk.OffloadAdamW(lr=1e-2, link=ThrottledLink(0.002))),
        "ZenFlow": offloading(link=ThrottledLink(0.002)),
    }
    race = sk.race(contenders, steps=40, live=False, control=False, turn_s=0.01, allow=("optimizer",))
    assert race.reason == "done"
    assert race.runs["ZenFlow"].prediction is not None
    assert race.runs["ZenFlow"].prediction.ratio is None
    assert "trained by another optimizer" in repr(race)
    idle = race.table().reset_index().set_index("run")["idle_frac"]
    assert idle["OffloadAdamW"] > 0  # how much of a step depends on how fast this machine computes
    equal_trees(
        dict(race.bring("AdamW").model.named_parameters()), dict(race.bring("OffloadAdamW").model.named_parameters())
    )
