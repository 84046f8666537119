"""A race as others see it that read its folder: one picture of all runs, how the race stands, and buttons that reach it."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import surokit as sk
from surokit.racing import scheduler
from surokit.runs import control
from surokit.widgets.folder import RaceFolder, RunFolder, race_words
from surokit.widgets.messages import Wire
from surokit.widgets.picture import picture, summary_text
from tests.clocks import JumpingClock, until
from tests.racing.conftest import raced
from tests.racing.test_race import StopAt
from tests.racing.test_threads import Gate
from tests.refusals import refused

KEPT = Path(__file__).parents[2] / "docs" / "measurements" / "race"


class View:
    """Keeps the headline of every picture."""

    every_s = 0.01

    def __init__(self):
        self.heads = []

    def show(self, states, final):
        self.heads.append(states.headline)


@pytest.fixture(scope="module")
def over(model, tmp_path_factory):
    """The folder of a race that is over."""
    return raced(model, steps=8, turn_s=1e-6, run_dir=tmp_path_factory.mktemp("races") / "a").run_dir


def test_a_race_that_is_over_is_one_picture_with_its_names_in_order(over):
    view = View()
    seen = sk.watch(over, view=view)
    assert seen.over
    assert list(seen.states) == ["bf16", "fp8", "bf16 again"]
    assert [state.title for state in seen.states.values()] == ["bf16", "fp8", "bf16 again"]
    assert [state.step for state in seen.states.values()] == [8, 8, 8]
    assert set(seen.reasons.values()) == {"done"}
    assert view.heads[-1] == "race · over after round 3"
    assert summary_text(seen.states).startswith("race · over after round 3\nrun ")
    assert ">race · over after round 3<" in picture(seen.states)
    assert json.loads(Wire(seen.states).next()["head"])["headline"] == "race · over after round 3"


def test_a_race_that_goes_on_is_followed_paused_and_stopped_through_its_folder(make, tmp_path):
    gate = Gate(2)
    race = make(thread=True, steps=4000, turn_s=1e-6, run_dir=tmp_path / "a", meters=[gate], compile=False)
    gate.wait(2)
    view = View()
    seen = sk.watch(tmp_path / "a", view=view, every_s=0.02)
    assert view.heads[-1].startswith("race · warm-up")
    gate.open()
    until(lambda: any(head.startswith("race · round ") and head.endswith("'s turn") for head in view.heads))
    assert set(seen.states) == {"bf16", "fp8", "bf16 again"}
    seen.control.pause()
    until(lambda: view.heads[-1].startswith("race · paused in round "))
    until(lambda: "paused" in str(race))
    before = (tmp_path / "a" / "race.json").stat().st_mtime_ns if (tmp_path / "a" / "race.json").exists() else 0
    seen.control.save()
    seen.control.resume()
    until(
        lambda: (tmp_path / "a" / "race.json").exists() and (tmp_path / "a" / "race.json").stat().st_mtime_ns > before
    )
    seen.control.stop("stopped: by somebody")
    assert race.wait(30)
    assert race.reason == "stopped: by somebody"
    assert seen.wait(30)
    assert view.heads[-1].startswith("race · over in round ")
    assert view.heads[-1].endswith(": stopped: by somebody")
    assert set(seen.reasons.values()) == {"stopped: by somebody"}
    with refused(ValueError):
        seen.control.stop()


def test_how_a_race_ended_is_known_once_its_runs_are_over(make, over, tmp_path, monkeypatch):
    race = make(steps=8, run_dir=tmp_path / "a")
    told = []

    class Last:
        def on_step(self, record):
            pass

        def on_end(self, reason):
            told.append(json.loads((tmp_path / "a" / "turn.json").read_text(encoding="utf-8"))["state"])

    for session in race.sessions.values():
        session.subscribe(Last())
    race.go_on(steps=2)
    assert told == ["done"] * 3

    shutil.copytree(over, tmp_path / "b")
    turn = tmp_path / "b" / "turn.json"
    ended = turn.read_text(encoding="utf-8")
    turn.write_text(json.dumps({**json.loads(ended), "state": "running", "turn": "fp8"}))
    look = RunFolder.look

    def ends_meanwhile(folder, budget_s):
        turn.write_text(ended)
        return look(folder, budget_s)

    monkeypatch.setattr(RunFolder, "look", ends_meanwhile)
    view = View()
    assert sk.watch(tmp_path / "b", view=view).over
    assert view.heads[-1] == "race · over after round 3"


def test_whatever_fails_at_its_end_the_others_are_told(make, tmp_path, monkeypatch):
    race = make(steps=8, run_dir=tmp_path / "a", live=True)
    told = []

    def fails(*_):
        raise ZeroDivisionError("a fault at the end")

    monkeypatch.setattr(race, "save", fails)
    monkeypatch.setattr(race.sessions["bf16"].journal, "end_group", fails)
    monkeypatch.setattr("surokit.racing.scheduler._View.end", lambda view, reasons: told.append(reasons))
    with pytest.raises(ZeroDivisionError):
        race.go_on(steps=2)
    assert json.loads((tmp_path / "a" / "turn.json").read_text(encoding="utf-8"))["state"] == "done"
    states = {
        path.parent.name: json.loads(path.read_text(encoding="utf-8"))["state"]
        for path in (tmp_path / "a").glob("*/run.json")
    }
    assert states == {"bf16": "running", "fp8": "done", "bf16-again": "done"}
    assert told == [dict.fromkeys(race.runs, "done")]


def test_what_was_saved_elsewhere_while_it_went_on_is_over(make, tmp_path):
    gate = Gate(3)
    race = make(thread=True, meters=[gate], control=False)
    gate.wait(3)
    race.save(tmp_path / "copy")
    gate.open()
    race.wait()
    view = View()
    seen = sk.watch(tmp_path / "copy", view=view, follow=False)
    assert seen.over
    assert view.heads[-1] == "race · over in warm-up: saved while it went on"
    assert set(seen.reasons.values()) == {"saved while it went on"}


def test_runs_that_are_not_there_yet_are_waited_for(over, tmp_path):
    here = tmp_path / "b"
    here.mkdir()
    turn = json.loads((over / "turn.json").read_text(encoding="utf-8"))
    (here / "turn.json").write_text(json.dumps({**turn, "state": "running", "round": 0, "turn": "bf16"}))
    view = View()
    seen = sk.watch(here, view=view, every_s=0.02)
    assert not seen.over
    assert not seen.states
    for folder in ("bf16", "fp8", "bf16-again"):
        shutil.copytree(over / folder, here / folder)
    (here / "turn.json").write_text(json.dumps(turn))
    assert seen.wait(30)
    assert list(seen.states) == ["bf16", "fp8", "bf16 again"]
    assert view.heads[0] == "race · warm-up · bf16's turn"


def test_two_races_keep_their_names_apart(over, tmp_path):
    shutil.copytree(over, tmp_path / "b")
    view = View()
    seen = sk.watch(over, tmp_path / "b", tmp_path / "b" / "fp8", view=view)
    assert list(seen.states)[::3] == ["a/bf16", "b/bf16"]
    assert len(seen.states) == 6
    assert view.heads[-1] == "a: race · over after round 3 | b: race · over after round 3"


def test_a_process_that_is_gone_is_told_as_lost_and_a_broken_file_says_nothing(over, tmp_path):
    shutil.copytree(over, tmp_path / "b")
    for path in (tmp_path / "b").glob("*/run.json"):
        run = json.loads(path.read_text(encoding="utf-8"))
        run |= {"state": "running", "info": {**run["info"], "pid": 2**22 + 1}}
        path.write_text(json.dumps(run))
    turn = json.loads((tmp_path / "b" / "turn.json").read_text(encoding="utf-8")) | {"state": "running"}
    (tmp_path / "b" / "turn.json").write_text(json.dumps(turn))
    view = View()
    sk.watch(tmp_path / "b", view=view, follow=False)
    assert view.heads[-1] == "race · lost in round 3"
    race = RaceFolder(tmp_path / "b")
    (tmp_path / "b" / "turn.json").write_text('{"runs": [')
    assert not race.look()
    assert race.round == 3
    (tmp_path / "b" / "turn.json").unlink()
    race.look()
    assert race.state == "done"
    with refused(ValueError):
        RaceFolder(tmp_path)


def test_sessions_that_write_no_run_json_are_alive_while_their_race_is(make, session, tmp_path):
    race = make({"a": session(), "b": session(sk.FP8)}, steps=8, turn_s=1e-6, run_dir=tmp_path / "race")
    race.go_on(steps=6)
    view = View()
    seen = sk.watch(race.run_dir, view=view)
    assert [state.step for state in seen.states.values()] == [14, 14, 14]
    assert set(seen.reasons.values()) == {"done"}
    for path in race.run_dir.glob("*/records.jsonl"):
        os.utime(path, (0, 0))
    turn = race.run_dir / "turn.json"
    turn.write_text(json.dumps({**json.loads(turn.read_text(encoding="utf-8")), "state": "running", "turn": "b"}))
    assert set(sk.watch(race.run_dir, view=view, follow=False).reasons.values()) == {None}
    assert view.heads[-1].endswith("b's turn")
    os.utime(turn, (0, 0))
    sk.watch(race.run_dir, view=view, follow=False)
    assert view.heads[-1].startswith("race · lost in round ")


def test_a_race_that_pauses_gives_signs_of_life(make, tmp_path, monkeypatch):
    race = make(steps=8, run_dir=tmp_path)
    turn, told = tmp_path / "turn.json", []
    clock = JumpingClock(time.monotonic)

    def sleep(seconds):
        clock.ahead_s += 1.0
        if turn.exists():
            told.append(json.loads(turn.read_text(encoding="utf-8"))["state"])
            turn.unlink()
        if len(told) == 2 or clock.ahead_s > 10.0:
            race.resume()

    for module in (scheduler, control):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=clock, monotonic=clock, sleep=sleep))
    race.sessions["fp8"].subscribe(StopAt(9, race.pause))
    race.go_on(steps=2)
    assert told == ["paused"] * 2


def test_words():
    assert race_words("running", 2, "fp8") == "race · round 2 · fp8's turn"
    assert race_words("running", 0, "") == "race · warm-up"
    assert race_words("failed: ValueError: no", 2, "") == "race · over in round 2: failed: ValueError: no"


def test_the_race_that_the_docs_show_loads_and_its_table_is_on_the_page():
    race = sk.Race.load(KEPT)
    assert race.reason == "done"
    assert list(race.runs) == ["bf16", "fp8", "fp4", "bf16 again"]
    assert {len(run.steps) for run in race.runs.values()} == {150}
    docs = KEPT.parents[1]
    assert repr(race) in (docs / "racing.md").read_text(encoding="utf-8")
    assert repr(race).splitlines() == json.loads((KEPT / "race.json").read_text(encoding="utf-8"))["table"]
    assert len(race.plot().axes) == 2
    seen = sk.watch(KEPT, view=View())
    assert set(seen.reasons.values()) == {"done"}, "without a run.json the race says how they ended"
