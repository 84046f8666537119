"""The panel on a real Session: it sees every step, the held-out points and the end."""

from __future__ import annotations

import math
import re
import time

import numpy as np
import pytest
import torch

from surokit.runs.health import Health
from surokit.runs.smoothing import LossMean
from surokit.runs.status import RunInfo
from surokit.train import Session
from surokit.widgets.curves import plot_runs
from surokit.widgets.follow import watch
from surokit.widgets.panel import Panel
from surokit.widgets.picture import figures, picture, summary_line
from surokit.widgets.state import PanelState
from tests.clocks import JumpingClock
from tests.refusals import warned
from tests.test_live import View


@pytest.fixture
def session(tiny, batch):
    return Session(tiny, [batch], eval=[batch], eval_every=4, schedule=None, compile=False)


def test_every_step_is_seen(session):
    view = View()
    panel = Panel(PanelState(), view=view)
    session.subscribe(panel)
    session.run(10)
    frame = session.records.frame()
    state = panel.state
    assert state.loss.points() == (list(range(1, 11)), frame["loss"].tolist())
    assert state.held_out.points()[0] == [4, 8]
    assert state.held_out.points()[1] == frame["eval_loss"].dropna().tolist()
    assert state.tokens == frame["tokens"].sum()
    assert state.elapsed_s == pytest.approx(frame["wall_ms"].sum() / 1e3)
    assert state.idle.count == 9
    assert view.ended == ["done"]


def test_the_panel_and_the_summary_agree(session):
    panel = Panel(PanelState(), view=View())
    session.subscribe(panel)
    session.run(10)
    summary = session.summary()
    assert panel.state.goodput == pytest.approx(summary.goodput, rel=0.1)
    assert panel.state.lost_s == pytest.approx(3600 * summary.lost_gpu_hours, rel=0.1, abs=0.02)


def test_a_panel_that_comes_later_knows_what_its_run_has_cost_before(tiny, batch, monkeypatch, tmp_path):
    clock = JumpingClock(time.monotonic)
    monkeypatch.setattr(time, "monotonic", clock)

    class Slow:
        def __iter__(self):
            clock.ahead_s += 3600.0
            return iter([batch])

    def hours(session):
        panel = Panel(PanelState(), view=View(), clock=clock)
        session.subscribe(panel)
        session.run(2)
        panel.state.info = RunInfo(gpus=2, usd_per_gpu_hour=3.0)
        hours, usd = panel.state.gpu_hours, panel.state.usd
        assert hours is not None
        assert usd == pytest.approx(3.0 * hours)
        return round(hours)

    session = Session(tiny, [batch], eval=Slow(), eval_every=2, schedule=None, run_dir=tmp_path / "run")
    session.run(4)
    assert hours(session) == 2 * 3
    session.save()
    again = Session.resume(tmp_path / "run", tiny, data=[batch], eval=Slow())
    assert hours(again) == 2 * 4
    assert round(again.summary().run_s / 3600) == 4
    (watched,) = watch(tmp_path / "run", follow=False, view="text").states.values()
    assert round(watched.run_s / 3600) == 4
    assert hours(again.fork()) == 2 * 1


def test_a_fork_pays_for_its_own_steps_alone():
    state = PanelState()
    state.info = RunInfo(gpus=1, usd_per_gpu_hour=2.0)
    for step in range(101, 106):
        state.add(step, seconds=3.6, elapsed=36_000.0 + 3.6 * (step - 100))  # goes on from its parent's
    assert (state.gpu_hours, state.usd) == pytest.approx((0.005, 0.01))


def test_panel_words_summary_and_figure_tell_one_smoothed_loss_and_how_it_is_smoothed(session):
    panel = Panel(PanelState(), view=View())
    session.subscribe(panel)
    session.run(12)
    summary = session.summary()
    told = f"{panel.state.loss_mean.points()[1][-1]:.3f}"
    assert summary.loss_mean == panel.state.smoothing.value
    assert (summary.loss_mean_steps, panel.state.smoothing.over_steps) == (2, 2)  # a fifth of the steps so far
    assert f"loss {told} (EMA over 2 steps)" in repr(panel)
    (figure,) = [figure for figure in figures(panel.state) if figure.name == "Loss"]
    assert (figure.value, figure.note.split(" · ")[0]) == (told, "EMA over 2 steps")
    assert "EMA over 2 steps" in picture(panel.state)
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in repr(summary).splitlines())
    assert rows["loss, smoothed"] == f"{summary.loss_mean:.4f} (EMA over 2 steps)"
    assert rows["loss, last step"] == f"{session.records[-1].loss:.4f}"
    drawn = plot_runs({"a": session}, baseline=None).axes[0]
    assert drawn.get_title(loc="left").startswith("Loss, EMA")
    assert f"a  {told}" in [line.get_label() for line in drawn.lines]


def test_the_smoothed_loss_of_a_long_run_is_over_a_thousand_steps_at_most():
    mean, last = LossMean(), LossMean()
    for step in range(100_000):
        loss = 3.0 + math.sin(step)
        mean.add(loss)
        if step >= 100_000 - 65_536:  # what is in memory
            last.add(loss)
    assert mean.over_steps == last.over_steps == 1000
    assert mean.value == pytest.approx(last.value, abs=1e-12)


def test_the_frame_alone_gives_the_same_panel(session):
    panel = Panel(PanelState(), view=View())
    session.subscribe(panel)
    session.run(6)
    again = PanelState.from_records(session.records.frame())
    assert again.loss_mean.points() == panel.state.loss_mean.points()
    assert again.held_out.points() == panel.state.held_out.points()
    assert again.rate_sustained.points() == panel.state.rate_sustained.points()
    assert again.elapsed_s == panel.state.elapsed_s


def test_watching_changes_nothing(tiny, batch):
    losses = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = type(tiny)()
        session = Session(model, [batch], schedule=None, compile=False)
        if watched:
            session.live()
        session.run(5)
        losses.append(session.records.column("loss"))
    np.testing.assert_array_equal(losses[0], losses[1])


def test_a_skipped_step_is_shown(session, batch):
    panel = Panel(PanelState(), view=View())
    session.subscribe(panel)
    session.run(2)
    hook = session.model.lm_head.register_forward_hook(lambda module, args, out: out * math.nan)
    with warned(UserWarning):
        session.run(1)
    hook.remove()
    session.run(1)
    assert panel.state.warning_lines() == ["step skipped, not finite: weights untouched, at step 3"]


def test_a_later_live_takes_the_place_of_an_earlier_one(session, capsys):
    session.live()
    session.live()
    session.run(3)
    assert capsys.readouterr().err.count("Done at step 3.") == 1
    session.live()
    session.run(2)
    assert capsys.readouterr().err.count("\n") == 1


def test_a_closed_panel_keeps_what_it_shows_and_draws_no_more(session):
    view = View()
    panel = Panel(PanelState(), view=view)
    session.subscribe(panel)
    session.run(2)
    shown = len(view.ended)
    panel.on_step({"step": 3, "loss": 1.0})
    panel.close()
    closed = len(view.ended)
    panel.on_step({"step": 4, "loss": 1.0})
    panel.on_end("done")
    assert (closed, len(view.ended)) == (shown + 1, closed)


@pytest.mark.parametrize("compile", [True, False])
def test_that_the_model_is_compiled_is_said_before_the_first_step(tiny, batch, monkeypatch, capsys, compile):
    monkeypatch.setattr(torch, "compile", lambda model, **_: lambda **batch: model(**batch))
    said = []

    class Reading(View):
        def show(self, states, final):
            said.append(summary_line(*states.values()))

    panel = Panel(PanelState(), view=Reading())
    session = Session(tiny, [batch], schedule=None, compile=compile)
    session.subscribe(panel.open())
    said.clear()
    for _ in range(2):
        session.run(2)
    words = "compiling the model: the first step takes longer"
    assert (words in said[0]) == compile
    assert capsys.readouterr().err.count(f"surokit: {words}") == compile


def test_without_a_notebook_live_prints_a_line(session, capsys):
    session.live()
    session.run(3)
    printed = capsys.readouterr().err
    assert "step 3" in printed
    assert "Done at step 3." in printed


def loss_at(step, bad):
    return 500.0 if step == bad else 3.0 - 0.001 * step


def spoiled(session, bad):
    """A loss at one step that none before had, seen by whoever hears of the step."""
    drain = session.records.drain

    def spoil(wait=False):
        for record in drain(wait):
            record.late._values = {**record.late.wait(), "loss": loss_at(record.step, bad)}
            yield record

    session.records.drain = spoil
    return session


def test_a_step_is_judged_once_and_the_panel_says_what_the_run_says(session, monkeypatch):
    judged: list[int] = []
    add = Health.add

    def counted(health, step, *args, **options):
        judged.append(step)
        return add(health, step, *args, **options)

    monkeypatch.setattr(Health, "add", counted)
    panel = Panel(PanelState(), view=View())
    spoiled(session, bad=60).subscribe(panel)
    session.run(100)
    assert judged == [*range(1, 101)]
    assert [(e.step, e.kind) for e in panel.state.events] == [(60, "spike")]
    assert [e.to_dict() for e in panel.state.events] == [*session.journal.events]
    assert panel.state.health.phase == session.journal.phase == "converging"
    by_hand = PanelState.from_records({"step": n, "loss": loss_at(n, bad=60), "lr": 1e-3} for n in range(1, 101))
    assert by_hand.health.phase == "converging"
    assert by_hand.events == panel.state.events
    late = Panel(PanelState(), view=View())
    session.subscribe(late)
    assert late.state.health.phase == "converging", "it is not said that the run warms up"


def test_a_picture_has_a_step_and_what_happened_in_it(session):
    seen: dict[int, list[str]] = {}

    class Seen(View):
        every_s = 0.0

        def show(self, states, final):
            (state,) = states.values()
            seen.setdefault(state.step, [event.kind for event in state.events])

    clock = iter(range(10**9))
    panel = Panel(PanelState(), view=Seen(), clock=lambda: next(clock) * 10.0)
    spoiled(session, bad=40).subscribe(panel)
    session.run(45)
    assert (seen[39], seen[40]) == ([], ["spike"])
