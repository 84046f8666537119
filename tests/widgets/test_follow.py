"""`sk.watch`: folders that others write, read as they grow: resumes, torn lines, replaced files, silence, buttons, errors."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import surokit as sk
from surokit.train.records import read
from surokit.train.status import RunInfo, StatusFile
from surokit.widgets import growing
from surokit.widgets.folder import FileControl, RunFolder
from surokit.widgets.follow import watch
from surokit.widgets.growing import Reader
from surokit.widgets.picture import summary_line, summary_text
from surokit.widgets.state import PanelState

SERIES = ("loss", "loss_mean", "held_out", "rate", "rate_sustained", "idle", "lr", "grad_norm", "memory")


class View:
    """Keeps what it is shown."""

    every_s = 0.0

    def __init__(self):
        self.shown, self.finals = [], 0

    def show(self, states, final):
        self.shown.append({name: (state.step, state.reason) for name, state in states.items()})
        self.finals += final


class Clock:
    def __init__(self, now=1_790_000_000.0):
        self.now = now

    def __call__(self):
        return self.now


def line(step, loss=None, **more):
    loss = 5.0 - 0.001 * step + 0.1 * math.sin(step) if loss is None else loss
    row = {"step": step, "lr": 1e-3, "tokens": 128, "wall_ms": 10.0 + step % 7, "stall_ms": 0.1, "peak_gib": 1.5}
    row |= {"elapsed_s": 0.012 * step, "loss": loss, "grad_norm": 1.0 + step % 3, "skipped": 0.0, "idle_frac": 0.05}
    return json.dumps(row | more) + "\n"


def grow(folder, text):
    with (folder / "records.jsonl").open("a") as file:
        file.write(text)


def says(folder, state="running", step=0, events=(), clock=time.time, now=True, run_s=None, **info):
    known: dict[str, Any] = {
        "title": "fp8",
        "numerics": "emulated",
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "total": 100,
    }
    StatusFile(folder, clock).beat(RunInfo(**known | info), state, step, events, now=now, run_s=run_s)


def picture(state):
    """Everything that a view draws."""
    curves = {name: getattr(state, name).points() for name in SERIES}
    return curves, state.tokens, state.step, state.elapsed_s, state.overall_rate, state.goodput, state.warning_lines()


def expected(path):
    """The same from the file as a resumed session reads it."""
    columns = read(path)
    state = PanelState()
    for i in range(len(columns["step"])):
        row = {name: float(column[i]) for name, column in columns.items()}
        state.add_row({name: value for name, value in row.items() if value == value or name == "loss"})
    return state


def reason(folder):
    return folder.state.reason


def same(a, b):
    return repr(picture(a)) == repr(picture(b))  # NaN is itself here


# -- the reader


def test_a_file_is_read_as_it_grows(tmp_path):
    reader = Reader(tmp_path / "records.jsonl")
    with pytest.raises(FileNotFoundError):
        reader.read()
    grow(tmp_path, line(1) + line(2))
    assert reader.read()
    assert not reader.read()
    torn = line(3)
    grow(tmp_path, torn[:20])
    assert not reader.read()
    assert reader.state.step == 2
    grow(tmp_path, torn[20:] + '{"step": 3, "eval_loss": 4.5}\n')
    assert reader.read()
    assert reader.state.held_out.points() == ([3], [4.5])
    assert same(reader.state, expected(reader.path))


def test_a_line_that_a_kill_cut_short_is_passed_over(tmp_path):
    grow(tmp_path, line(1) + line(2)[:30] + "\n" + line(2) + "[]\n\n" + '{"loss": 1}\n' + line(3, loss="NaN"))
    reader = Reader(tmp_path / "records.jsonl")
    reader.read()
    assert reader.state.loss.points()[0] == [1, 2, 3]
    assert reader.state.warning_lines() == ["loss not finite (NaN or infinite), at step 3"]
    assert same(reader.state, expected(reader.path))


def test_a_look_ends_however_fast_the_file_grows(tmp_path, monkeypatch):
    grow(tmp_path, line(1))
    reader = Reader(tmp_path / "records.jsonl")
    take = reader._take

    def meanwhile(data, left):
        take(data, left)
        assert reader.state.step < 10, "it never ends"
        grow(tmp_path, line(reader.state.step + 1))

    monkeypatch.setattr(reader, "_take", meanwhile)
    assert reader.read()
    assert reader.state.step == 1
    assert reader.behind
    assert reader.read()
    assert reader.state.step == 2


def test_a_torn_end_holds_nothing_up(tmp_path):
    """As a full disk, or a kill, leaves it."""
    grow(tmp_path, line(1) + line(2)[:40])
    says(tmp_path, "failed: OSError: disk full", 2)
    folder = RunFolder(tmp_path)
    folder.look()
    assert (folder.state.step, reason(folder), folder.over) == (1, "failed: OSError: disk full", True)


operations = st.lists(
    st.one_of(
        st.tuples(st.just("steps"), st.integers(1, 30)),
        st.tuples(st.just("resume"), st.integers(1, 40)),
        st.tuples(st.just("eval"), st.just(0)),
        st.tuples(st.just("torn"), st.integers(1, 40)),
        st.tuples(st.just("nan"), st.just(0)),
        st.tuples(st.just("read"), st.just(0)),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(operations=operations, columns=st.booleans())
def test_whatever_is_written_it_shows_what_a_resume_would_read(operations, columns, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    path = folder / "records.jsonl"
    path.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growing, "FIRST_BYTES", 300 if columns else 1 << 18)
        patch.setattr(growing, "BLOCK_BYTES", 2000)
        patch.setattr(growing, "COPIES", 4)
        reader, step, written, evaluated = Reader(path), 0, 0, 0
        for kind, number in operations:
            if kind == "steps":
                for _ in range(number):
                    step += 1
                    grow(folder, line(step, loss=4.0 + random.Random(step + number).random()))
            elif kind == "resume":
                step = max(0, step - number)
            elif kind == "eval" and step == written and step != evaluated:  # of two at a step the panel shows both
                evaluated = step
                grow(folder, json.dumps({"step": step, "eval_loss": 3.0 + step / 100}) + "\n")
            elif kind == "torn":
                grow(folder, line(step + 1)[:number] + "\n")
            elif kind == "nan":
                step += 1
                grow(folder, line(step, loss="NaN", skipped=1.0))
            elif kind == "read":
                reader.read()
            written = step if kind in ("steps", "nan") else written
        looks = 0
        while reader.behind:  # block by block, as a look that has no more time does
            reader.read(budget_s=0.0)
            looks += 1
            assert looks < 1000
        assert same(reader.state, expected(path))


def test_a_resume_goes_back_to_a_copy_not_to_the_beginning(tmp_path, monkeypatch):
    monkeypatch.setattr(growing, "FIRST_BYTES", 1000)
    monkeypatch.setattr(growing, "BLOCK_BYTES", 10_000)
    grow(tmp_path, "".join(line(step) for step in range(1, 2001)))
    reader = Reader(tmp_path / "records.jsonl")
    reader.read()
    size = reader.offset
    taken, take = [], reader._take

    def counted(data, left):
        taken.append(len(data))
        take(data, left)

    monkeypatch.setattr(reader, "_take", counted)
    grow(tmp_path, "".join(line(step, loss=1.0) for step in range(1900, 1950)))
    reader.read()
    assert sum(taken) < 0.25 * size
    assert len(reader._copies) <= growing.COPIES + 1
    assert reader.state.step == 1949
    assert same(reader.state, expected(reader.path))


@pytest.mark.parametrize("longer", [False, True], ids=["shorter", "longer"])
def test_a_file_that_was_replaced_is_read_anew(tmp_path, longer):
    grow(tmp_path, "".join(line(step) for step in range(1, 20)))
    reader = Reader(tmp_path / "records.jsonl")
    reader.read()
    other = "".join(line(step, loss=2.0) for step in range(1, 40 if longer else 5))
    (tmp_path / "records.jsonl").write_text(other)
    assert reader.read()
    assert reader.state.loss.points()[1] == [2.0] * (39 if longer else 4)


def test_a_copy_of_the_same_file_is_not_read_anew(tmp_path):
    """As rsync and its like put a new file in the place of the old one each time."""
    grow(tmp_path, "".join(line(step) for step in range(1, 20)))
    reader = Reader(tmp_path / "records.jsonl")
    reader.read()
    state = reader.state
    new = tmp_path / "new"
    new.write_text(reader.path.read_text() + line(20))
    new.replace(reader.path)
    reader.read()
    assert reader.state is state
    assert state.step == 20
    assert state.loss.count == 20


def test_a_long_file_keeps_its_extremes_and_its_sums(tmp_path, monkeypatch):
    count = 30_000
    rng = random.Random(0)
    losses = [5.0 - 3.0 * step / count + 0.1 * rng.random() for step in range(1, count + 1)]
    losses[4_321], losses[12_345] = 99.0, 0.001
    rows = [line(step, loss=loss) for step, loss in enumerate(losses, 1)]
    rows[20_000] = line(20_001, loss="NaN", skipped=1.0)
    for step in range(1000, count + 1, 1000):
        rows[step - 1] += json.dumps({"step": step, "eval_loss": 5.0 - step / count}) + "\n"
    grow(tmp_path, "".join(rows))
    whole = Reader(tmp_path / "records.jsonl")
    whole.read()
    assert whole._fold == 2  # and yet nothing is folded: all of it is recent enough
    for name, value in {
        "FOLDED": 1000,
        "RECENT_BYTES": 100_000,
        "BLOCK_BYTES": 1 << 20,
        "FIRST_BYTES": 1 << 16,
    }.items():
        monkeypatch.setattr(growing, name, value)
    folded = Reader(tmp_path / "records.jsonl")
    folded.read()
    assert folded._fold > 20
    a, b = folded.state, whole.state
    assert (a.step, a.tokens, a.held_out.points()) == (b.step, b.tokens, b.held_out.points())
    assert a.elapsed_s == pytest.approx(b.elapsed_s)
    assert a.overall_rate == pytest.approx(b.overall_rate)
    assert a.goodput == pytest.approx(b.goodput)
    points = dict(zip(*a.loss.points()))
    assert points[4_322] == 99.0
    assert points[12_346] == 0.001
    assert math.isnan(points[20_001])
    assert a.loss_mean.points()[1][-1] == pytest.approx(b.loss_mean.points()[1][-1], rel=0.01)
    assert a.rate_sustained.points()[1][-1] == pytest.approx(b.rate_sustained.points()[1][-1], rel=1e-3)
    assert min(a.rate.points()[1]) == min(b.rate.points()[1])
    assert max(a.rate.points()[1]) == max(b.rate.points()[1])
    assert a.loss.points()[0] == sorted(a.loss.points()[0])


def test_what_later_lines_add_to_a_step_is_folded_with_it(tmp_path, monkeypatch):
    """As callbacks write: the loss in a line of its own, after the step."""
    rng = random.Random(0)
    losses = [3.0 + rng.random() for _ in range(4000)]
    rows = []
    for step, loss in enumerate(losses, 1):
        rows.append(json.dumps({"step": step, "wall_ms": 10.0, "elapsed_s": 0.01 * step, "tokens": 64}) + "\n")
        if step % 5 == 0:
            rows.append(json.dumps({"step": step, "loss": loss, "lr": 1e-3, "eval_loss": loss + 1}) + "\n")
    grow(tmp_path, "".join(rows))
    whole = Reader(tmp_path / "records.jsonl")
    whole.read()
    for name, value in {"FIRST_BYTES": 10_000, "RECENT_BYTES": 20_000, "BLOCK_BYTES": 50_000, "FOLDED": 100}.items():
        monkeypatch.setattr(growing, name, value)
    folded = Reader(tmp_path / "records.jsonl")
    folded.read()
    assert folded._fold > 10
    a, b = folded.state, whole.state
    known = losses[4::5]
    points = dict(zip(*a.loss.points()))
    assert points[5 * known.index(max(known)) + 5] == max(known)
    assert points[5 * known.index(min(known)) + 5] == min(known)
    assert (a.tokens, a.step, a.lr.last, a.held_out.last) == (b.tokens, b.step, b.lr.last, b.held_out.last)
    assert a.held_out.count == b.held_out.count == 800
    assert a.overall_rate == pytest.approx(b.overall_rate)


def test_the_end_of_a_long_file_is_never_folded(tmp_path, monkeypatch):
    """Not even where one block holds all that is left."""
    grow(tmp_path, "".join(line(step) for step in range(1, 3001)))
    monkeypatch.setattr(growing, "FIRST_BYTES", 20_000)
    monkeypatch.setattr(growing, "RECENT_BYTES", 100_000)
    monkeypatch.setattr(growing, "FOLDED", 100)
    monkeypatch.setattr(growing, "BLOCK_BYTES", 200_000)
    reader = Reader(tmp_path / "records.jsonl")
    reader.read()
    assert reader._fold > 10
    assert list(reader.state.loss.last or ()) == [3000, json.loads(line(3000))["loss"]]
    assert 400 < reader.state.health.losses < 2000


def test_without_pyarrow_it_reads_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(growing, "FIRST_BYTES", 2000)
    grow(tmp_path, "".join(line(step) for step in range(1, 200)))
    with_it = Reader(tmp_path / "records.jsonl")
    with_it.read()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    without = Reader(tmp_path / "records.jsonl")
    without.read()
    assert same(with_it.state, without.state)


# -- a folder


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


def test_silence_is_said_and_taken_back(tmp_path):
    clock = Clock()
    grow(tmp_path, line(1))
    says(tmp_path, clock=clock, host="elsewhere")
    folder = RunFolder(tmp_path, clock=clock)
    folder.look()
    assert reason(folder) is None
    clock.now += 29
    folder.look()
    assert reason(folder) is None
    clock.now += 12
    assert folder.look()
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

    def gone():
        folder.look()
        return folder.over

    try:
        until(gone)
        assert reason(folder).startswith("lost: its process has ended without a word")
    finally:
        zombie.wait()


def test_a_run_that_ended_long_ago_is_not_called_lost_while_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(growing, "FIRST_BYTES", 1000)
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


def test_a_folder_that_goes_is_said(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    grow(run, line(1))
    view = View()
    seen = watch(run, view=view, every_s=0.01)
    (run / "records.jsonl").unlink()
    run.rmdir()
    until(lambda: view.shown[-1]["run"] == (1, f"lost: the folder {run} has gone"))
    seen.stop_following()


# -- watching


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def test_a_run_that_is_over_is_shown_at_once(tmp_path):
    grow(tmp_path, line(1) + line(2))
    says(tmp_path, "done", 2)
    view = View()
    seen = watch(tmp_path, view=view)
    assert view.shown == [{tmp_path.name: (2, "done")}]
    assert (view.finals, seen.following, seen.over) == (1, False, True)
    assert "Done at step 2" in repr(seen)
    assert seen.wait()


def test_a_run_is_followed_to_its_end_without_blocking(tmp_path):
    says(tmp_path)
    view = View()
    seen = watch(tmp_path, view=view, every_s=0.01)
    assert seen.following
    assert view.shown[0] == {tmp_path.name: (0, None)}
    for step in range(1, 30):
        grow(tmp_path, line(step))
        time.sleep(0.002)
    until(lambda: view.shown[-1][tmp_path.name][0] == 29)
    assert view.finals == 0
    says(tmp_path, "interrupted", 29)
    assert seen.wait(20)
    assert view.shown[-1] == {tmp_path.name: (29, "interrupted")}
    assert view.finals == 1


def test_awaiting_follows_in_the_cell(tmp_path):
    says(tmp_path)

    async def cell():
        seen = watch(tmp_path, view=View(), every_s=0.01)
        asyncio.get_running_loop().call_later(0.05, lambda: (grow(tmp_path, line(1)), says(tmp_path, "done", 1)))
        return await seen

    assert asyncio.run(cell()).states[tmp_path.name].reason == "done"


def test_following_can_be_stopped(tmp_path):
    grow(tmp_path, line(1))
    says(tmp_path)
    view = View()
    seen = watch(tmp_path, view=view, every_s=60.0)
    began = time.monotonic()
    seen.stop_following()
    assert time.monotonic() - began < 5
    assert not seen.following
    assert view.finals == 1
    assert not any((tmp_path / name).exists() for name in ("stop", "pause", "save"))


def test_several_runs_are_told_apart_by_their_paths(tmp_path):
    for recipe in ("bf16", "fp8"):
        (tmp_path / recipe / "run").mkdir(parents=True)
        grow(tmp_path / recipe / "run", line(1) + line(2))
        says(tmp_path / recipe / "run", "done", 2)
    view = View()
    watch(tmp_path / "bf16" / "run", tmp_path / "fp8" / "run", tmp_path / "fp8/../fp8/run", view=view)
    assert list(view.shown[0]) == ["bf16/run", "fp8/run"]


def test_a_view_that_fails_is_dropped_with_one_warning(tmp_path):
    class Broken(View):
        def show(self, states, final):
            raise ZeroDivisionError("no pen")

    grow(tmp_path, line(1))
    says(tmp_path, "done", 1)
    with pytest.warns(RuntimeWarning, match="stopped drawing .ZeroDivisionError: no pen"):
        seen = watch(tmp_path, view=Broken())
    assert seen.states[tmp_path.name].step == 1


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
    with pytest.raises(ValueError, match="There is no run to stop: as far as its folder says, it is over"):
        control.stop()


def test_a_folder_that_cannot_be_written_is_said(tmp_path, monkeypatch):
    says(tmp_path)

    def refuse(path, *a, **k):
        raise PermissionError(13, "Permission denied")

    control = FileControl([RunFolder(tmp_path)])
    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(
        PermissionError, match="cannot be reached: .*stop cannot be written from here .Permission denied"
    ):
        control.stop()


def test_a_folder_of_runs_stands_for_them(tmp_path):
    for name in ("fp8", "bf16", "pictures"):
        (tmp_path / name).mkdir()
    (tmp_path / "race.json").write_text("{}")
    for name in ("fp8", "bf16"):
        grow(tmp_path / name, line(1) + line(2))
        says(tmp_path / name, "done", 2)
    view = View()
    seen = watch(tmp_path, tmp_path / "fp8", view=view)
    assert list(view.shown[0]) == ["bf16", "fp8"]
    assert seen.reasons == {"bf16": "done", "fp8": "done"}


def test_a_run_that_ended_is_told_from_one_that_is_lost(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for name, state, pid in (("a", "stopped: plateau", 0), ("b", "running", ended.pid), ("c", "running", os.getpid())):
        (tmp_path / name).mkdir()
        grow(tmp_path / name, line(1))
        says(tmp_path / name, state, 1, pid=pid)
    reasons = watch(tmp_path, follow=False, view=View()).reasons
    assert (reasons.pop("b") or "").startswith("lost: its process has ended")
    assert reasons == {"a": "stopped: plateau", "c": None}


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


def test_the_words_say_a_name_once_and_the_last_note(tmp_path):
    grow(tmp_path, line(1) + line(2))
    notes = [{"step": step, "kind": "note", "text": text} for step, text in ((1, "begun"), (2, "lr halved"))]
    says(tmp_path, "done", 2, notes, title="bf16", recipe="bf16   y = x w'   dx = dy w   bf16", numerics="")
    words = repr(watch(tmp_path, view=View()))
    assert words.startswith("bf16 · step 2")
    assert words.endswith("\nnote at step 2: lr halved")


def test_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"There is no folder .*nowhere: give the run_dir"):
        watch(tmp_path / "nowhere")
    (tmp_path / "file.txt").write_text("")
    with pytest.raises(ValueError, match=r"file.txt is a file"):
        watch(tmp_path / "file.txt")
    with pytest.raises(ValueError, match=r"is not the folder of a run: it has neither records.jsonl nor run.json\.$"):
        watch(tmp_path)
    (tmp_path / "a").mkdir()
    grow(tmp_path / "a", line(1))
    (tmp_path / "b").mkdir()
    with pytest.raises(ValueError, match=r"No step is written in .*b yet: the run has not begun\. With follow=True"):
        watch(tmp_path / "b", follow=False)
    with pytest.raises(ValueError, match="needs the folder of a run"):
        watch()
    with pytest.raises(ValueError, match="seconds and positive"):
        watch(tmp_path / "a", every_s=0)


def test_watching_needs_no_torch(tmp_path):
    grow(tmp_path, line(1))
    says(tmp_path, "done", 1)
    code = f"import sys, surokit as sk; sk.watch({str(tmp_path)!r}); assert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Done at step 1" in result.stderr


# -- a session's own folder, followed while it trains


def small_session(run_dir):
    import torch

    torch.manual_seed(0)
    ids = torch.randint(64, (2, 16))
    model = sk.Decoder(sk.DecoderConfig(layers=1, width=32, heads=2, kv_heads=1, vocab=64, ffn=48))
    batches = [{"input_ids": ids, "labels": ids}]
    return sk.Session(model, batches, schedule=None, eval=batches, run_dir=run_dir, compile=False)


def test_an_evaluation_after_a_run_is_in_its_folder_at_once(tmp_path):
    session = small_session(tmp_path / "run")
    session.run(2)
    folder = RunFolder(tmp_path / "run")
    folder.look()
    loss = session.evaluate()
    folder.look()
    assert folder.state.held_out.points() == ([2], [loss])
    assert (reason(folder), folder.over) == ("done", True)


def test_goodput_is_that_of_the_summary(tmp_path):
    session = small_session(tmp_path / "run")
    session.run(3)
    session._run_s += 100.0  # as if it had been paused
    session.run(3)
    state = watch(tmp_path / "run", view=View()).states["run"]
    summary = session.summary()
    assert summary.goodput < 0.5
    assert state.goodput == pytest.approx(summary.goodput)
    assert state.lost_s == pytest.approx(3600 * summary.lost_gpu_hours)


def test_a_session_is_followed_and_stopped_through_its_folder(tmp_path):
    session = small_session(tmp_path / "run")
    view = View()
    seen = watch(tmp_path / "run", view=view, every_s=0.02)
    going = session.run(100_000, thread=True)
    try:
        until(lambda: view.shown[-1]["run"][0] > 20, 60)
        session.note("seen from afar")
        seen.control.pause()
        until(lambda: seen.states["run"].paused)
        seen.control.resume()
        until(lambda: not seen.states["run"].paused)
        seen.control.stop()
        assert going.wait(30)
    finally:
        session.stop()
    assert seen.wait(20)
    state, frame = seen.states["run"], session.records.frame()
    assert view.shown[-1]["run"] == (session.steps, "interrupted")
    assert list(state.loss.last or ()) == [session.steps, frame["loss"].iloc[-1]]
    assert state.tokens == frame["tokens"].sum()
    assert "seen from afar" in [event.text for event in state.events]
