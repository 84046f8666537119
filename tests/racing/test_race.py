"""Races: the same numbers as alone, equal turns in balanced order, stopping and going on, what the table says."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
import warnings
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import surokit as sk
from surokit.racing import scheduler
from surokit.racing.model_swap import storages_of
from surokit.racing.runs import rounds_of
from surokit.runs import control
from surokit.runs.health import Event, Health
from surokit.runs.status import read_status
from tests.clocks import Clock, JumpingClock, until
from tests.racing.conftest import batches, made_session
from tests.refusals import refused

RECIPES = {
    "bf16": sk.BF16,
    "fp8": sk.FP8,
    "fp4": sk.FP4,
}
ADAPTERS = {
    "bf16": sk.BF16.lora(rank=4),
    "fp8": sk.FP8.lora(rank=4),
    "qfp8": sk.QFP8.lora(rank=4),
    "qfp8 too": sk.QFP8.lora(rank=4),
}


def losses(run):
    return run.steps["loss"].tolist()


@pytest.mark.parametrize("entries", [RECIPES, ADAPTERS], ids=["full", "adapters"])
@pytest.mark.parametrize("together", [None, False], ids=["resident", "parked"])
def test_a_racers_losses_are_those_it_has_alone_bit_by_bit(make, session, entries, together):
    held_out = batches(2, seed=1)
    race = make(entries, steps=13, eval=held_out, together=together, schedule=sk.Cosine(2, 16))
    for name, recipe in entries.items():
        alone = session(recipe)
        alone.run(13)
        assert losses(race.runs[name]) == alone.records.column("loss").tolist()
        assert race.runs[name].held_out == [(13, alone.evaluate(held_out))]
    assert losses(race.runs["bf16 again"]) == losses(race.runs["bf16"])
    assert race.reason == "done"


def test_the_users_random_numbers_and_model_are_left_alone(make, model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    make()
    assert torch.rand(1) == expected
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert getattr(model, "_surokit_recipe", None) is None


def test_turns_are_equal_and_their_order_is_balanced(make):
    race = make({"bf16": sk.BF16, "fp8": sk.FP8, "too": sk.BF16}, steps=23, turn_s=1e-6)
    runs = list(race.runs.values())
    rounds = rounds_of(runs)
    assert len(rounds) == 9
    assert {(turn.untimed, turn.steps) for run in runs for turn in run.turns} == {(1, 1)}
    assert {len(run.steps) for run in runs} == {23}
    orders = []
    for number in rounds:
        began = {turn.at_s: run.name for run in runs for turn in run.turns if turn.round == number}
        orders.append([began[at_s] for at_s in sorted(began)])
    assert all(there == back[::-1] for there, back in zip(orders[::2], orders[1::2]))
    assert len({tuple(order) for order in orders}) > 2
    assert all(turn.whole and turn.tokens == 32 and turn.seconds > 0 for run in runs for turn in run.turns)


def test_steps_that_do_not_divide_are_spread(make):
    race = make(steps=16, turn_s=1e-6)
    sizes = [turn.untimed + turn.steps for turn in race.runs["fp8"].turns]
    assert race.runs["fp8"].warm_up.steps == 4
    assert sum(sizes) == 12
    assert sizes == [2] * 6
    race = make(steps=17, turn_s=1e-6)
    assert [turn.untimed + turn.steps for turn in race.runs["fp8"].turns] == [3] + [2] * 5
    race.go_on(steps=1)
    assert [(turn.untimed, turn.steps, turn.whole) for turn in race.runs["fp8"].turns[-2:]] == [
        (1, 1, True),
        (0, 1, False),  # the machine changes over in it, so that it is in no ratio
    ]
    race = make(steps=3)
    assert [(turn.untimed, turn.steps) for turn in race.runs["fp8"].turns] == [(1, 1)]


def test_there_are_twelve_rounds_also_of_runs_that_are_equally_fast(make, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(scheduler, "time", clock)

    def eighth(session):
        clock.sleep(0.125)
        return {}

    race = make(steps=127, meters=[eighth])
    assert [turn.untimed + turn.steps for turn in race.runs["fp8"].turns] == [10] * 12


def test_minutes_end_a_race_and_every_run_has_made_as_many_steps(make):
    race = make(steps=None, minutes=0.01)
    assert len({len(run.steps) for run in race.runs.values()}) == 1
    assert race.runs["bf16"].whole_turns
    race = make(steps=None, minutes=0.0, turn_s=1e-6)
    assert len(race.runs["bf16"].turns) == 1, "a round is always run"


def test_going_on(make, twenty_alone):
    race = make(steps=12)
    race.go_on(steps=8)
    assert losses(race.runs["fp8"]) == twenty_alone["fp8"]
    rounds = [turn.round for turn in race.runs["fp8"].turns]
    assert rounds == list(range(1, len(rounds) + 1))
    race.settings["turn_s"] = 1e-6
    race.go_on(minutes=0.0)
    assert len(race.runs["fp8"].steps) > 20


class StopAt:
    """Does something as a session's step is told."""

    def __init__(self, step, what):
        self.step, self.what, self.done = step, what, False

    def on_step(self, record):
        if record.step == self.step and not self.done:
            self.done = True
            self.what()

    def on_end(self, reason):
        pass


class EachStep(StopAt):
    """Does something as each step is told."""

    def __init__(self, what):
        super().__init__(0, what)

    def on_step(self, record):
        self.what()


class Evaluated(StopAt):
    """Does something once, as a session has been evaluated."""

    def __init__(self, what):
        super().__init__(0, what)

    def on_eval(self, step, loss):
        if not self.done:
            self.done = True
            self.what()


@pytest.fixture(scope="module")
def twenty_alone(model):
    """The losses of twenty steps that race with nobody."""
    found = {}
    for name, recipe in {"bf16": sk.BF16, "fp8": sk.FP8}.items():
        alone = made_session(model, recipe, schedule=sk.Cosine(1, 12))
        alone.run(20)
        found[name] = alone.records.column("loss").tolist()
    return found | {"bf16 again": found["bf16"]}


@pytest.mark.parametrize("how", ["stop", "interrupt", "file", "thread"])
def test_a_stopped_race_goes_on_as_if_nothing_had_been(make, twenty_alone, tmp_path, how, capsys):
    race = make(steps=12, run_dir=tmp_path / "race")

    def stop():
        if how == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        elif how == "file":
            (tmp_path / "race" / "stop").touch()
        elif how == "thread":
            thread = threading.Thread(target=race.stop)
            thread.start()
            thread.join()
        else:
            race.stop()

    race.sessions["fp8"].subscribe(StopAt(14, stop))
    before = signal.getsignal(signal.SIGINT)
    race.go_on(steps=8)
    assert signal.getsignal(signal.SIGINT) is before
    by_file = f"stopped: by the file stop in {tmp_path / 'race'}"
    assert race.reason == {"interrupt": "interrupted", "file": by_file}.get(how, "stopped: by race.stop()")
    assert race.runs["fp8"].steps["step"][-1] < 20
    assert not (tmp_path / "race" / "stop").exists()
    race.go_on(steps=20 - 12 - (max(len(run.steps) for run in race.runs.values()) - 12))
    assert race.reason == "done"
    for name, run in race.runs.items():
        assert losses(run)[:20] == twenty_alone[name]
        seconds = run.warm_seconds()
        assert len(seconds) == len(run.steps)
        assert np.isfinite(seconds).all()
    assert race.runs["bf16"].batches[:4]


def test_a_turn_that_was_cut_short_is_in_no_ratio(make):
    race = make(steps=12)
    race.settings["turn_s"] = 10.0  # all steps in one turn
    race.sessions["fp8"].subscribe(StopAt(16, race.stop))
    race.go_on(steps=8)
    broken = race.runs["fp8"].turns[-1]
    assert not broken.whole
    race.settings["turn_s"] = 1e-6
    race.go_on(minutes=0.0)
    rest = next(turn for turn in race.runs["fp8"].turns if turn.round == broken.round and turn is not broken)
    assert not rest.whole
    assert broken.untimed + broken.steps + rest.untimed + rest.steps == 8
    assert broken.round not in rounds_of(list(race.runs.values()))
    assert len({len(run.steps) for run in race.runs.values()}) == 1


def test_with_nothing_said_it_goes_on_to_the_steps_that_were_given(make, session, monkeypatch):
    def stop_at_9(of):
        if of.steps == 9:
            of.stop()
        return {}

    race = make(steps=20, turn_s=1e-6, meters=[stop_at_9], schedule=sk.Cosine(2, 16))
    assert race.reason.startswith("stopped: ")
    assert race.reason.endswith(", by session.stop()")
    for _ in range(10):
        if race.reason != "done":
            race.go_on()
    assert {len(run.steps) for run in race.runs.values()} == {20}
    alone = session(sk.FP8)
    alone.run(20)
    assert losses(race.runs["fp8"]) == alone.records.column("loss").tolist()
    race.go_on()
    assert len(race.runs["fp8"].steps) == 20


def test_an_interrupt_while_it_ends_is_told_and_what_is_missing_comes(make):
    race = make(steps=8, eval=batches(1, seed=1))
    race.sessions["bf16"].subscribe(Evaluated(race.stop))
    race.go_on(steps=1)
    assert race.reason == "stopped: by race.stop()"
    assert [len(run.held_out) for run in race.runs.values()] == [2, 1, 1]
    race.go_on()
    assert race.reason == "done"
    assert [len(run.held_out) for run in race.runs.values()] == [2, 2, 2]


def test_an_error_within_a_turn_leaves_all_with_equal_work(make, session):
    race = make(steps=12, schedule=sk.Cosine(2, 16))
    race.settings["turn_s"] = 10.0

    def interrupt():
        raise KeyboardInterrupt

    race.sessions["fp8"].subscribe(StopAt(15, interrupt))
    with pytest.raises(KeyboardInterrupt):
        race.go_on(steps=8)
    assert race.reason == "interrupted"
    race.settings["turn_s"] = 1e-6
    race.go_on(minutes=0.0)
    assert len({len(run.steps) for run in race.runs.values()}) == 1
    alone = session(sk.FP8)
    alone.run(len(race.runs["fp8"].steps))
    assert losses(race.runs["fp8"]) == alone.records.column("loss").tolist()


def test_an_interrupted_warm_up_has_nothing_to_go_on_with(make):
    def interrupt(session):
        if session.steps == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return {}

    with pytest.raises(KeyboardInterrupt) as caught:
        make(meters=[interrupt], steps=40)
    race: sk.Race = getattr(caught.value, "race")  # noqa: B009
    assert race.reason == "interrupted"
    assert "no result before" in repr(race)
    assert "ended in its warm-up (interrupted): race again" in repr(race)


def test_pause_holds_the_race_between_turns_and_costs_nobody_time(make, monkeypatch):
    race = make(steps=8)
    race.settings["turn_s"] = 1e-6
    clock = JumpingClock(time.monotonic)

    def sleep(seconds):  # as a race does that is paused
        clock.ahead_s += 1000.0
        race.resume()

    for module in (scheduler, control):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=clock, monotonic=clock, sleep=sleep))
    race.sessions["fp8"].subscribe(StopAt(9, race.pause))
    race.go_on(steps=8)
    assert race.reason == "done"
    turns = sorted((turn for run in race.runs.values() for turn in run.turns), key=lambda turn: turn.at_s)
    waits = [after.at_s - turn.at_s - turn.seconds for turn, after in pairwise(turns)]
    assert clock.ahead_s == 1000.0
    assert max(waits) >= 1000.0
    assert max(turn.seconds for turn in turns) < 1000.0


def test_a_session_that_is_paused_within_its_turn_waits_in_nobodys_time(make, monkeypatch):
    clocks = {name: JumpingClock(getattr(time, name)) for name in ("perf_counter", "monotonic")}
    for name, clock in clocks.items():
        monkeypatch.setattr(time, name, clock)
    race = make(steps=8)
    race.settings["turn_s"] = 10.0  # all steps in one turn
    control = race.sessions["fp8"].control

    def resume():
        until(lambda: control.state == "paused")
        for clock in clocks.values():
            clock.ahead_s += 1000.0
        control.resume()

    def pause():
        control.pause()
        threading.Thread(target=resume).start()

    race.sessions["fp8"].subscribe(StopAt(11, pause))
    race.go_on(steps=6)
    assert clocks["monotonic"].ahead_s == 1000.0
    assert sum(run.turns[-1].seconds for run in race.runs.values()) < 1000.0


def test_a_pause_is_no_part_of_the_minutes(make, monkeypatch):
    def rounds(who):
        race, clock = make(steps=8), Clock()
        race.settings["turn_steps"] = 2
        paused = {"race": race, "session": race.sessions["fp8"].control, "": None}[who]

        def sleep(seconds):
            clock.sleep(1000.0)
            paused.resume()

        time_ = SimpleNamespace(perf_counter=clock.perf_counter, monotonic=clock.monotonic, sleep=sleep)
        with monkeypatch.context() as patch:
            for module in (scheduler, control):
                patch.setattr(module, "time", time_)
            for session in race.sessions.values():
                session.subscribe(EachStep(lambda: clock.sleep(1.0)))
            if paused:
                race.sessions["fp8"].subscribe(StopAt(9, paused.pause))
            race.go_on(minutes=0.5)
        assert race.reason == "done"
        return len(rounds_of(list(race.runs.values())))

    assert rounds("race") == rounds("session") == rounds("") > 4


def test_sessions_that_train_in_threads_take_turns_all_the_same(session, capsys):
    a = session(sk.BF16)
    a.live(thread=True, view="text")
    race = sk.race({"a": a, "b": session(sk.FP8)}, steps=8, live=False, predict=False)
    assert len(race.runs["a"].steps) == 8
    assert losses(race.runs["a"]) == losses(race.runs["a again"])


def test_an_error_of_one_run_ends_the_race_and_carries_it(make, tmp_path):
    bad = [{**batch} for batch in batches()]

    class Data:
        def __iter__(self):
            yield from bad[:9]
            raise OSError("the disk is gone")

    with refused(OSError) as caught:
        make(data=Data(), run_dir=tmp_path / "race", steps=40)
    race: sk.Race = getattr(caught.value, "race")  # noqa: B009
    assert race.reason == "failed: OSError: the disk is gone"
    loaded = sk.Race.load(tmp_path / "race")
    assert loaded.reason == race.reason
    assert 5 <= len(loaded.runs["bf16"].steps) <= 9
    assert losses(loaded.runs["bf16"]) == losses(race.runs["bf16"])


def test_sessions_race_and_keep_their_settings(session):
    a = session(sk.BF16, eval=batches(2, seed=1), eval_every=3)
    b = session(sk.FP8, eval=batches(2, seed=1), eval_every=3)
    race = sk.race({"a": a, "b": b}, steps=16, live=False, predict=False)
    assert race.sessions["a"] is a
    assert a.eval_every == b.eval_every == 3
    assert [e.step for e in a.evaluations] == [16]
    assert race.runs["a again"].steps["loss"].tolist() == race.runs["a"].steps["loss"].tolist()
    a.run(3)
    assert len(race.runs["a"].steps) == 16, "what is done with a session later is no part of the race"
    assert len(a.evaluations) == 2


def test_sessions_that_began_race_on(session):
    a = session(sk.BF16)
    a.run(5)
    race = sk.race({"a": a, "b": a.fork(recipe=sk.FP8)}, steps=12, live=False, predict=False)
    assert race.runs["b"].steps["step"].tolist() == list(range(6, 18))
    assert np.isfinite(race.runs["b"].warm_seconds()).all()


def test_a_shuffled_loader_gives_all_the_same_batches(make):
    from torch.utils.data import DataLoader

    for generator in (None, torch.Generator().manual_seed(5)):
        loader: Any = DataLoader(batches(), batch_size=None, shuffle=True, generator=generator)  # type: ignore[arg-type]
        race = make(data=loader, steps=14)
        assert len({run.batches for run in race.runs.values()}) == 1


def test_a_batch_that_is_none_is_named(make):
    wrong = [{"tokens": batch["input_ids"]} for batch in batches()]
    with refused(ValueError):
        make(data=wrong)


def test_accumulated_batches(make, session):
    race = make(steps=10, accumulate=2, schedule=sk.Cosine(2, 16), predict=True)
    alone = session(sk.FP8, accumulate=2)
    alone.run(10)
    assert losses(race.runs["fp8"]) == alone.records.column("loss").tolist()
    assert race.runs["fp8"].turns[0].tokens == 64 * race.runs["fp8"].turns[0].steps


def test_a_frozen_base_is_held_once(make):
    race = make(ADAPTERS, steps=8)
    bases = {
        name: {key: p.untyped_storage()._cdata for key, p in s.model.named_parameters() if not p.requires_grad}
        for name, s in race.sessions.items()
    }
    assert bases["bf16"] == bases["fp8"] == bases["bf16 again"]
    assert bases["qfp8"] == bases["qfp8 too"]
    projections = [key for key in bases["bf16"] if key.endswith("q_proj.weight")]
    assert projections
    assert all(bases["qfp8"][key] != bases["bf16"][key] for key in projections)
    trained = [p.data_ptr() for s in race.sessions.values() for p in s.model.parameters() if p.requires_grad]
    assert len(set(trained)) == len(trained)


def test_one_model_at_a_time_is_there_where_they_are_parked(make):
    race = make(steps=8, together=False)
    held = {name: sum(s.nbytes() for s in storages_of(x).values()) for name, x in race.sessions.items()}
    assert sorted(held.values())[:2] == [0, 0]
    assert any("took turns on the device" in note for note in race.notes)
    for name in race.runs:
        here = race.bring(name)
        assert math.isfinite(here.evaluate(batches(1)))


def test_the_table_has_a_row_a_run(long):
    race = long
    frame = race.table()
    assert list(frame.index) == ["bf16", "fp8", "bf16 again"]
    assert frame.ratio["bf16"] == 1.0
    assert (frame.ratio_low <= frame.ratio).all()
    assert (frame.ratio <= frame.ratio_high).all()
    assert frame.held_out["bf16"] == frame.held_out["bf16 again"]
    assert frame.usd_to_target["bf16"] == pytest.approx(frame.s_to_target["bf16"] * 2 / 3600)
    assert frame.tokens_to_target["bf16"] == 32 * frame.steps_to_target["bf16"]
    assert frame.loss_after_an_hour.isna().all()
    assert (frame.first_step_s > 0).all()
    assert (frame.warm_up_s > frame.first_step_s).all()
    text = repr(race)
    assert "say nothing about a GPU" in text
    assert "nothing is extrapolated to an hour" in text
    assert "A/A control" in text or "not to be trusted" in text
    assert "<table>" in race._repr_html_()


def test_without_control_it_says_what_is_missing(make):
    race = make(control=False, steps=12)
    assert list(race.runs) == ["bf16", "fp8"]
    assert "no A/A control" in repr(race)


def test_a_target_that_is_given(make):
    race = make(steps=8, target_loss=0.0)
    assert race.table().s_to_target.isna().all()
    assert "not reached" in repr(race)
    assert "Target loss 0.0000 (given)" in repr(race)


@pytest.mark.parametrize("x", ["steps", "tokens", "time", "usd"])
def test_pictures(long, x):
    figure = long.plot(x)
    left, right = figure.axes
    assert [text.get_text().split()[0] for text in left.get_legend().get_texts()] == ["bf16", "fp8", "held", "target"]
    assert [text.get_text().split()[0] for text in right.get_legend().get_texts()] == ["fp8", "bf16"]
    assert len(right.get_lines()) >= 3
    assert max(right.get_xticks()) <= long.outcome.rounds, "what stands at the right of the last is no round"
    figure.draw_without_rendering()


def test_pictures_that_cannot_be_drawn(make):
    race = make(steps=8)
    with refused(ValueError):
        race.plot("minutes")
    with refused(ValueError):
        race.plot("usd")


def test_the_panel_shows_every_run_and_never_stops_a_race(make, capsys, monkeypatch):
    from surokit.widgets import panel

    make(live=True, steps=8)
    told = capsys.readouterr().err
    assert "bf16 again" in told
    assert "fp8" in told
    monkeypatch.setattr(panel.TextView, "show", lambda *_: 1 / 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        race = make(live=True, steps=8)
    assert race.reason == "done"
    assert any("stopped drawing" in str(w.message) for w in caught)


def test_predictions(make):
    race = make({"bf16": sk.BF16, "fp8": sk.FP8, "same": sk.BF16}, steps=20, predict=True)
    prediction = race.runs["fp8"].prediction
    assert prediction is not None
    assert prediction.ratio is not None, prediction.why
    assert 0 < prediction.share < 1
    assert prediction.ratio == pytest.approx(
        1 / (1 - prediction.share + prediction.share / prediction.products + prediction.quantization)
    )
    assert prediction.ratio < 1, "emulated formats cost time"
    assert race.runs["same"].prediction.ratio == 1.0
    assert race.runs["bf16"].prediction is None
    assert "of the baseline's step is products that change" in repr(race)
    assert str(sk.racing.runs.Prediction(None, why="reasons")) == "no prediction: reasons"


def test_the_folder_of_a_run_tells_of_the_race_and_not_of_its_turns(make, tmp_path):
    seen: list[tuple[str, int | None]] = []

    def look(_session):
        status = read_status(tmp_path / "race" / "bf16")
        if status is not None and status.step:
            seen.append((status.state, status.info.total))
        return {}

    race = make(steps=12, turn_s=1e-6, meters=[look], run_dir=tmp_path / "race")

    def told(name):
        status = read_status(tmp_path / "race" / name)
        assert status is not None
        return status.state, status.step, status.info.total

    assert set(seen) == {("running", 12)}
    assert [told(name) for name in ("bf16", "fp8", "bf16-again")] == [("done", 12, 12)] * 3
    seen.clear()
    race.go_on(steps=4)
    assert ("running", 16) in seen
    assert {state for state, _ in seen} == {"running"}
    assert told("fp8") == ("done", 16, 16)
    race.go_on(minutes=0.0)
    assert told("fp8") == ("done", len(race.runs["fp8"].steps), None)
    for session in race.sessions.values():
        session.run(1)
    assert told("fp8")[2] == race.sessions["fp8"].steps, "a run of its own is its own again"


class Ends:
    """What a subscriber is told of beginning and end."""

    def __init__(self):
        self.told = []

    def on_start(self, total):
        self.told.append(total)

    def on_step(self, record):
        pass

    def on_end(self, reason):
        self.told.append(reason)


def test_subscribers_are_told_of_the_race_and_not_of_its_turns(make, session):
    entries = {"bf16": session(), "fp8": session(sk.FP8)}
    ends = Ends()
    entries["fp8"].subscribe(ends)
    race = make(entries, steps=16, turn_s=1e-6, control=False)
    assert len(race.runs["fp8"].turns) > 1
    assert ends.told == [16, "done"]
    started = entries["fp8"].info.started
    race.go_on(steps=4)
    assert ends.told == [16, "done", 20, "done"]
    assert entries["fp8"].info.started > started
    entries["fp8"].run(2)
    assert ends.told[4:] == [22, "done"]


def test_a_paused_race_is_paused_for_whoever_reads_its_folders(make, tmp_path):
    race = make(steps=8, run_dir=tmp_path / "race")
    race.settings["turn_s"] = 1e-6
    seen = []

    def watch():
        until(lambda: (found := read_status(tmp_path / "race" / "bf16-again")) and found.state == "paused")
        seen.append("paused")
        race.resume()

    thread = threading.Thread(target=watch)

    def pause():
        race.pause()
        thread.start()

    race.sessions["fp8"].subscribe(StopAt(9, pause))
    race.go_on(steps=8)
    thread.join()
    assert seen == ["paused"]
    found = read_status(tmp_path / "race" / "bf16-again")
    assert found is not None
    assert found.state == "done"


def test_an_interrupt_tells_of_the_race_and_not_of_run(make, capsys):
    race = make(steps=12)
    race.sessions["fp8"].subscribe(StopAt(14, lambda: os.kill(os.getpid(), signal.SIGINT)))
    race.go_on(steps=8)
    told = capsys.readouterr().err
    assert told.count("stopping the race after this step") == 1
    assert "run()" not in told
    assert "The race ended early (interrupted): race.go_on() goes on from there." in repr(race)
    race.go_on()
    assert "ended early" not in repr(race)


def test_a_race_by_minutes_says_how_it_goes_on(make):
    def stop_at_9(session):
        if session.steps == 9:
            session.stop()
        return {}

    race = make(steps=None, minutes=0.0, turn_steps=4, meters=[stop_at_9], control=False)
    assert "): race.go_on(minutes=1) goes on from there." in repr(race)
    race.go_on(minutes=0.0)  # the other run comes to that step
    race.go_on(minutes=0.0)
    assert race.reason == "done"


def test_interrupted_in_its_last_step_its_runs_are_done_and_the_rest_can_be_made_up_for(make, tmp_path):
    made = []

    def interrupt(_session):
        made.append(1)
        if len(made) == 16:
            os.kill(os.getpid(), signal.SIGINT)
        return {}

    folder = tmp_path / "race"
    race = make(steps=8, control=False, meters=[interrupt], eval=batches(2, seed=1), run_dir=folder)
    assert race.reason == "interrupted"
    assert [len(run.steps) for run in race.runs.values()] == [8, 8]
    said = "ended after its last step, but before its held-out losses and predictions were all taken (interrupted): race.go_on()"
    assert said in repr(race)
    found = [read_status(folder / name) for name in ("bf16", "fp8")]
    assert [status and status.state for status in found] == ["done", "done"]
    race.go_on()
    assert race.reason == "done"
    assert all(run.held_out for run in race.runs.values())


def test_a_second_interrupt_ends_it_at_once(make):
    race = make(steps=12)
    race.settings["turn_s"] = 10.0
    session = race.sessions["fp8"]

    def both():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    session.subscribe(StopAt(14, both))
    with pytest.raises(KeyboardInterrupt):
        race.go_on(steps=8)
    assert race.reason == "interrupted"
    assert session.steps < 20


def test_an_interrupt_after_another_stop_is_the_first(make):
    race = make(steps=12)
    race.settings["turn_s"] = 10.0

    def both():
        race.stop()
        os.kill(os.getpid(), signal.SIGINT)

    race.sessions["fp8"].subscribe(StopAt(14, both))
    race.go_on(steps=8)
    assert race.reason == "stopped: by race.stop()"


def test_a_stop_that_comes_before_a_turns_first_step_ends_it_after_that(make, monkeypatch):
    race = make(steps=12)
    race.settings["turn_s"] = 10.0
    control = race.sessions["fp8"].control
    begin, begun = control.begin, []

    def stopped_just_before():
        begun.append(True)
        if len(begun) == 2:  # the timed steps, after the untimed one
            race.stop()
        begin()

    monkeypatch.setattr(control, "begin", stopped_just_before)
    race.go_on(steps=8)
    assert race.reason == "stopped: by race.stop()"
    assert len(race.runs["fp8"].steps) == 14


def test_a_disk_that_does_not_answer_is_no_reason_to_stop(make, tmp_path, monkeypatch):
    race = make(steps=12, run_dir=tmp_path / "race")
    exists, asked = Path.exists, []

    def unreachable(path):
        if path.name in ("stop", "pause", "save"):
            asked.append(path)
            raise PermissionError(13, "Permission denied")
        return exists(path)

    monkeypatch.setattr(Path, "exists", unreachable)
    race.go_on(steps=4)
    assert race.reason == "done"
    assert tmp_path / "race" / "stop" in asked


def test_what_stops_a_session_is_the_races_reason(make):
    race = make(steps=12)
    race.sessions["fp8"].stop_when(lambda record: "enough" if record.step == 14 else False)
    race.go_on(steps=8)
    assert race.reason == "stopped: fp8, enough"
    race.go_on(minutes=0.0)
    assert race.reason == "done"


def test_short_races_say_what_they_lack_and_count_right(make):
    for steps in (1, 2):
        with refused(ValueError):
            make(steps=steps)
    race = make(steps=3, predict=True)
    text = repr(race)
    assert "1 round of turns, each 1 timed step" in text
    assert "after a warm-up of 1 step each" in text
    assert "1 round of turns is too few" in text
    assert math.isnan(race.outcome.target)
    assert "not reached" not in text
    assert "no prediction: the race was too short for a profile of the baseline, so give steps=20 or more" in text
    assert "too short" in repr(make(steps=19, predict=True))
    assert "too short" not in repr(make(steps=20, predict=True))


def test_the_panel_has_the_phases_and_events_of_the_runs(make, monkeypatch):
    """As each run judges itself, also in its warm-up."""
    panels = []

    class Kept(scheduler._View):
        def __init__(self, *args):
            super().__init__(*args)
            panels.append(self._states)

    monkeypatch.setattr(scheduler, "_View", Kept)
    race = make(live=True, steps=30, turn_s=1e-6, control=False)
    (states,) = panels
    assert {name: state.health.phase for name, state in states.items()} == {
        name: session.journal.phase for name, session in race.sessions.items()
    }
    assert states["fp8"].health.phase == "converging"
    session = race.sessions["fp8"]
    monkeypatch.setattr(Health, "add", lambda self, step, **_: [Event(step, "spike", f"at {step}")])
    race.go_on(steps=1)
    session.run(1)
    assert [event.step for event in states["fp8"].events] == [31], "what a run does beside the race is no part of it"
