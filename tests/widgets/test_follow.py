"""`sk.watch`: folders that others write, followed to their end: several of them, views that fail, a session's own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from surokit.widgets.follow import watch
from tests.refusals import refused, warned
from tests.widgets.toys import View, grow, line, says, small_session


def test_a_folder_that_goes_is_said(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    grow(run, line(1))
    view = View()
    seen = watch(run, view=view, every_s=0.01)
    (run / "records.jsonl").unlink()
    run.rmdir()
    view.until(lambda: view.shown[-1]["run"] == (1, f"lost: the folder {run} has gone"))
    seen.stop_following()


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
    view.until(lambda: view.shown[-1][tmp_path.name][0] == 29)
    assert view.finals == 0
    says(tmp_path, "interrupted", 29)
    assert seen.wait()
    assert view.shown[-1] == {tmp_path.name: (29, "interrupted")}
    assert view.finals == 1


def test_awaiting_follows_in_the_cell(tmp_path):
    says(tmp_path)

    async def cell():
        seen = watch(tmp_path, view=View(), every_s=0.01)
        asyncio.get_running_loop().call_soon(lambda: (grow(tmp_path, line(1)), says(tmp_path, "done", 1)))
        return await seen

    assert asyncio.run(cell()).states[tmp_path.name].reason == "done"


def test_following_can_be_stopped(tmp_path):
    grow(tmp_path, line(1))
    says(tmp_path)
    view = View()
    seen = watch(tmp_path, view=view, every_s=1e6)
    seen.stop_following()  # which waits for no further look
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
    with warned(RuntimeWarning):
        seen = watch(tmp_path, view=Broken())
    assert seen.states[tmp_path.name].step == 1


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


def test_the_words_say_a_name_once_and_the_last_note(tmp_path):
    grow(tmp_path, line(1) + line(2))
    notes = [{"step": step, "kind": "note", "text": text} for step, text in ((1, "begun"), (2, "lr halved"))]
    says(tmp_path, "done", 2, notes, title="bf16", recipe="bf16   y = x w'   dx = dy w   bf16", numerics="")
    words = repr(watch(tmp_path, view=View()))
    assert words.startswith("bf16 · step 2")
    assert words.endswith("\nnote at step 2: lr halved")


def test_errors(tmp_path):
    with refused(FileNotFoundError):
        watch(tmp_path / "nowhere")
    (tmp_path / "file.txt").write_text("")
    with refused(ValueError):
        watch(tmp_path / "file.txt")
    with refused(ValueError):
        watch(tmp_path)
    (tmp_path / "a").mkdir()
    grow(tmp_path / "a", line(1))
    (tmp_path / "b").mkdir()
    with refused(ValueError):
        watch(tmp_path / "b", follow=False)
    with refused(ValueError):
        watch()
    with refused(ValueError):
        watch(tmp_path / "a", every_s=0)


def test_watching_needs_no_torch(tmp_path):
    grow(tmp_path, line(1))
    says(tmp_path, "done", 1)
    code = f"import sys, surokit as sk; sk.watch({str(tmp_path)!r}); assert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Done at step 1" in result.stderr


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
        view.until(lambda: view.shown[-1]["run"][0] > 20)
        session.note("seen from afar")
        seen.control.pause()
        view.until(lambda: seen.states["run"].paused)
        seen.control.resume()
        view.until(lambda: not seen.states["run"].paused)
        seen.control.stop()
        assert going.wait()
    finally:
        session.stop()
    assert seen.wait()
    state, frame = seen.states["run"], session.records.frame()
    assert view.shown[-1]["run"] == (session.steps, "stopped: by watch(...).control.stop()")
    assert list(state.loss.last or ()) == [session.steps, frame["loss"].iloc[-1]]
    assert state.tokens == frame["tokens"].sum()
    assert "seen from afar" in [event.text for event in state.events]


def test_a_run_that_writes_its_first_file_is_waited_for(tmp_path):
    """A file is written under a hidden name first, so that a run's folder may hold nothing else for a moment."""
    (tmp_path / ".run.json.123").write_text("{")
    view = View()
    seen = watch(tmp_path, view=view, every_s=0.01)
    says(tmp_path, "done", 1)
    grow(tmp_path, line(1))
    assert seen.wait()
    assert view.shown[-1] == {tmp_path.name: (1, "done")}
