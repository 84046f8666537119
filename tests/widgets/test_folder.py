"""A run's folder, as others see it: how the run stands, silence, what is asked of it through files."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from surokit.widgets import records_tail
from surokit.widgets.folder import FileControl, RunFolder
from surokit.widgets.picture import summary_line, summary_text
from tests.refusals import refused
from tests.widgets.toys import Clock, grow, line, says, small_session


def reason(folder):
    return folder.state.reason


def test_a_torn_end_holds_nothing_up(tmp_path):
    """As a full disk, or a kill, leaves it."""
    grow(tmp_path, line(1) + line(2)[:40])
    says(tmp_path, "failed: OSError: disk full", 2)
    folder = RunFolder(tmp_path)
    folder.look()
    assert (folder.state.step, reason(folder), folder.over) == (1, "failed: OSError: disk full", True)


def test_what_run_json_says_is_shown(tmp_path):
    grow(tmp_path, line(1) + line(2))
    note = {"step": 2, "kind": "note", "text": "lr halved", "suggestion": ""}
    says(tmp_path, "paused", 2, [note], usd_per_gpu_hour=2.0, gpus=1)
    folder = RunFolder(tmp_path)
    assert folder.look()
    state = folder.state
    assert (state.title, state.recipe, state.total, state.paused) == ("fp8", "emulated", 100, True)
    assert state.usd_per_s == pytest.approx(2.0 / 3600)
    assert [(event.step, event.text) for event in state.events] == [(2, "lr halved")]
    assert reason(folder) is None
    assert not folder.over
    assert not folder.look()
    says(tmp_path, "done", 2, [note])
    assert folder.look()
    assert (reason(folder), folder.over) == ("done", True)
    assert len(state.events) == 1
    says(tmp_path, "running", 2, [note])  # the next run()
    grow(tmp_path, line(3))
    folder.look()
    assert (reason(folder), folder.over, state.step) == (None, False, 3)


strange = [
    {"step": [1], "kind": "note", "text": "a"},
    {"step": 1, "kind": "eclipse", "text": "b"},
    {"step": 1, "kind": []},
    {},
]


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[1]", '{"info": 3}', '{"state": "done", "unknown": 1}', json.dumps({"events": strange})),
        *('{"heartbeat": "now"}', '{"heartbeat": null}', '{"state": 3}', '{"info": {"total": "many"}}'),
        json.dumps({"info": {"pid": "x", "host": socket.gethostname()}, "heartbeat": 1}),
    ],
)
def test_a_strange_run_json_does_no_harm(tmp_path, text):
    grow(tmp_path, line(1))
    (tmp_path / "run.json").write_text(text)
    folder = RunFolder(tmp_path)
    assert folder.look()
    assert folder.state.step == 1
    assert folder.state.events == []
    assert "step 1" in summary_line(folder.state)


def changes_after_silence(folder, clock):
    """Whether something new is said after 41 s without a sign; nothing is before 30."""
    folder.look()
    assert reason(folder) is None
    clock.now += 29
    folder.look()
    assert reason(folder) is None
    clock.now += 12
    return folder.look()


def test_silence_is_said_and_taken_back(tmp_path):
    clock = Clock()
    grow(tmp_path, line(1))
    says(tmp_path, clock=clock, host="elsewhere")
    folder = RunFolder(tmp_path, clock=clock)
    assert changes_after_silence(folder, clock)
    when = time.strftime("%H:%M", time.localtime(clock.now - 41))
    assert reason(folder) == (
        f"lost: no sign of life since {when} (heartbeat 40 s old): the kernel is gone or its machine sleeps"
    )
    assert f"Last seen at step 1: no sign of life since {when}" in summary_line(folder.state)
    assert not folder.over  # it may come back
    assert folder.goes_on
    clock.now += 3600
    folder.look()
    assert "(heartbeat 60 min old)" in reason(folder)
    says(tmp_path, clock=clock, host="elsewhere")
    folder.look()
    assert reason(folder) is None


def test_long_steps_are_no_silence(tmp_path):
    clock = Clock()
    grow(tmp_path, line(1, wall_ms=60_000.0))
    says(tmp_path, clock=clock, host="elsewhere")
    folder = RunFolder(tmp_path, clock=clock)
    folder.look()
    clock.now += 299
    folder.look()
    assert reason(folder) is None
    clock.now += 2
    folder.look()
    assert "no sign of life" in reason(folder)


def test_a_clock_that_differs_is_no_silence(tmp_path):
    here, there = Clock(), Clock()
    there.now -= 500
    says(tmp_path, clock=there, host="elsewhere")
    folder = RunFolder(tmp_path, clock=here)
    folder.look()
    assert "no sign of life" in reason(folder)  # nothing else is known at first
    there.now += 2
    says(tmp_path, clock=there, host="elsewhere")
    folder.look()
    assert reason(folder) is None
    here.now += 20
    folder.look()
    assert reason(folder) is None


def test_a_process_that_has_ended_is_known_to_be_gone(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    clock = Clock()
    grow(tmp_path, line(1))
    says(tmp_path, clock=clock, pid=ended.pid)
    folder = RunFolder(tmp_path, clock=clock)
    folder.look()
    when = time.strftime("%H:%M", time.localtime(clock.now))
    assert (
        reason(folder) == f"lost: its process has ended without a word; last heartbeat at {when}"
    )  # at the first look
    assert not folder.over  # until it is sure that it is none of another machine of this name
    says(tmp_path, clock=clock, pid=os.getpid())
    folder.look()
    assert reason(folder) is None
    says(tmp_path, clock=clock, pid=ended.pid)
    clock.now += 7
    folder.look()
    assert not folder.goes_on


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks /proc")
def test_a_process_that_nobody_waited_for_has_ended_too(tmp_path):
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    clock = Clock()
    grow(tmp_path, line(1))
    says(tmp_path, clock=clock, pid=zombie.pid)
    folder = RunFolder(tmp_path, clock=clock)
    folder.look()
    clock.now += 60
    try:
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is there for whoever waits for it
        folder.look()
        assert folder.over
        assert reason(folder).startswith("lost: its process has ended without a word")
    finally:
        zombie.wait()


def test_a_run_that_ended_long_ago_is_not_called_lost_while_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(records_tail, "FIRST_BYTES", 1000)
    clock = Clock()
    grow(tmp_path, "".join(line(step) for step in range(1, 100)))
    says(tmp_path, "done", 99, clock=clock)
    clock.now += 86_400
    folder = RunFolder(tmp_path, clock=clock)
    folder.look(0.0)
    assert (folder.reader.behind, reason(folder), folder.over) == (True, None, False)
    folder.look()
    assert (reason(folder), folder.over) == ("done", True)


def test_without_run_json_the_last_record_counts(tmp_path):
    grow(tmp_path, line(1))
    os.utime(tmp_path / "records.jsonl", (1e9, 1e9))
    folder = RunFolder(tmp_path)
    folder.look()
    assert reason(folder).startswith("lost: no sign of life since")
    assert "days old): without a run.json nobody says whether it has ended" in reason(folder)


def test_before_its_first_record_the_signs_of_others_count(tmp_path):
    clock = Clock()
    folder = RunFolder(tmp_path, clock=clock)
    clock.now += 60
    folder.look()
    assert reason(folder).startswith("lost: no sign of life since")  # nobody has given one
    folder.beat = clock.now  # as of its race
    assert changes_after_silence(folder, clock)
    assert reason(folder).startswith("lost: no sign of life since")


def test_buttons_write_files(tmp_path):
    says(tmp_path)
    control = FileControl([folder := RunFolder(tmp_path)])
    folder.look()
    for word in ("stop", "pause", "save"):
        getattr(control, word)()
        assert (tmp_path / word).exists()
    control.resume()
    control.resume()
    assert not (tmp_path / "pause").exists()
    says(tmp_path, "done", 1)
    grow(tmp_path, line(1))
    folder.look()
    with refused(ValueError):
        control.stop()


def test_a_folder_that_cannot_be_written_is_said(tmp_path, monkeypatch):
    says(tmp_path)

    def refuse(path, *a, **k):
        raise PermissionError(13, "Permission denied")

    control = FileControl([RunFolder(tmp_path)])
    monkeypatch.setattr(Path, "write_text", refuse)
    with refused(PermissionError):
        control.stop()


def test_goodput_is_of_the_time_that_the_run_took(tmp_path):
    grow(tmp_path, "".join(line(step, wall_ms=100.0, elapsed_s=0.1 * step, stall_ms=0.0) for step in range(1, 11)))
    says(tmp_path, step=10)
    folder = RunFolder(tmp_path)
    folder.look()
    assert (folder.state.goodput, folder.state.lost_s) == (None, None)  # nobody said how long it took
    assert "goodput" not in summary_text(folder.state)
    says(tmp_path, step=10, run_s=4.0)
    folder.look()
    assert folder.state.goodput == pytest.approx(0.25)
    assert folder.state.lost_s == pytest.approx(3.05)  # and a twentieth was idle
    grow(tmp_path, "".join(line(step, wall_ms=100.0, elapsed_s=0.1 * step, stall_ms=0.0) for step in range(11, 21)))
    folder.look()
    assert folder.state.goodput == pytest.approx(2 / 5)  # these came after what run.json says
    says(tmp_path, "done", 20, run_s=8.0)
    folder.look()
    assert folder.state.goodput == pytest.approx(0.25)


def test_an_evaluation_after_a_run_is_in_its_folder_at_once(tmp_path):
    session = small_session(tmp_path / "run")
    session.run(2)
    folder = RunFolder(tmp_path / "run")
    folder.look()
    loss = session.evaluate()
    folder.look()
    assert folder.state.held_out.points() == ([2], [loss])
    assert (reason(folder), folder.over) == ("done", True)
