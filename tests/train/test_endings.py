"""How a run's end is told: by whom it was asked, and of a run in parts once."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from surokit.runs.control import RunControl
from surokit.runs.requests import reason_in
from surokit.runs.status import Status, read_status
from surokit.widgets.folder import FileControl, RunFolder
from surokit.widgets.front import WidgetView
from tests.clocks import until
from tests.train.toys import At, Listener, assert_same_state, interrupt_when, make_session, whole


def interrupt(_session: Any) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def click(asked: Any) -> None:
    """What a click on the panel's button comes to."""

    class Widget:
        answer: Any = None

        def send(self, content: dict[str, Any]) -> None:
            self.answer = content

    view = WidgetView(asked, display=lambda *_, **__: None)
    view.widget = widget = Widget()
    view.on_message(widget, {"ask": "stop", "n": 1})
    assert widget.answer == {"n": 1, "error": ""}


def status(folder: Path) -> Status:
    found = read_status(folder)
    assert found is not None
    return found


class TestWhoAsked:
    @pytest.mark.parametrize(
        ("ask", "reason"),
        [
            (interrupt, "interrupted"),
            (lambda session: session.stop(), "stopped: by session.stop()"),
            (lambda session: session.control.stop(), "stopped: by session.control.stop()"),
            (lambda session: session.control.stop("stopped: by the scheduler"), "stopped: by the scheduler"),
            (lambda session: click(session.control), "stopped: by the panel's button"),
        ],
    )
    def test_subscribers_and_the_folder_are_told(self, tmp_path: Path, ask: Any, reason: str) -> None:
        listener, session = Listener(), make_session(run_dir=tmp_path / "run", meters=[At(3, ask)])
        session.subscribe(listener)
        session.run(6)
        assert listener.of("end") == [reason]
        assert status(tmp_path / "run").state == reason
        assert session.control.reason == reason
        session.run(3)
        assert listener.of("end") == [reason, "done"]
        assert_same_state(session, whole(6))

    def test_the_first_who_asks(self) -> None:
        def both(session: Any) -> None:
            session.stop()
            session.control.stop("stopped: later")

        listener, session = Listener(), make_session(meters=[At(2, both)])
        session.subscribe(listener)
        session.run(4)
        assert listener.of("end") == ["stopped: by session.stop()"]

    def test_a_button_of_a_panel_elsewhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It writes the file `stop`, with words."""
        monkeypatch.setattr(RunControl, "look_every_s", 0.0)
        elsewhere = At(2, lambda _: click(FileControl([RunFolder(tmp_path / "run")])))
        session = make_session(run_dir=tmp_path / "run", meters=[elsewhere])
        session.run(8)
        assert session.steps == 2
        assert status(tmp_path / "run").state == "stopped: by the panel's button"

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            (b"", "stopped: by the file stop in {folder}"),
            (b" \n", "stopped: by the file stop in {folder}"),
            (b"too dear\nand slow\n", "stopped: too dear"),
            (b"\x00\x07night\xff\n", "stopped: night\ufffd"),
            (b"x" * 1000, "stopped: " + "x" * 200),
        ],
    )
    def test_a_files_first_line(self, tmp_path: Path, text: bytes, reason: str) -> None:
        (tmp_path / "stop").write_bytes(text)
        assert reason_in(tmp_path / "stop") == reason.format(folder=tmp_path)

    def test_a_file_that_cannot_be_read_is_a_stop(self, tmp_path: Path) -> None:
        assert reason_in(tmp_path / "stop") == f"stopped: by the file stop in {tmp_path}"

    def test_an_interrupt_of_the_waiting(self) -> None:
        listener, session = Listener(), make_session(meters=[At(3, lambda s: s.control.pause())])
        session.subscribe(listener)
        going = session.run(6, thread=True)
        interrupt_when(lambda: session.control.state == "paused")
        going.wait()
        assert listener.of("end") == ["interrupted"]


class TestParts:
    def test_beginning_and_end_are_told_of_the_whole(self, tmp_path: Path) -> None:
        listener, session = Listener(), make_session(run_dir=tmp_path / "run")
        session.subscribe(listener)
        session.journal.begin_group(8)
        began = status(tmp_path / "run")
        assert (began.state, began.info.total, began.info.resumes) == ("running", 8, False)
        for _ in range(4):
            session.run(2)
            now = status(tmp_path / "run")
            assert now.state == "running"
            assert (now.info.total, now.info.started, now.info.resumes) == (8, began.info.started, False)
        session.journal.end_group("done")
        assert listener.of("start") == [8]
        assert listener.of("end") == ["done"]
        told = status(tmp_path / "run")
        assert (told.state, told.step, told.info.total) == ("done", 8, 8)
        assert told.info.started == session.info.started == began.info.started
        assert_same_state(session, whole(8))

    def test_afterwards_a_run_is_its_own_again(self, tmp_path: Path) -> None:
        listener, session = Listener(), make_session(run_dir=tmp_path / "run")
        session.subscribe(listener)
        session.journal.begin_group(None)
        session.run(2)
        before = session.info.started
        session.journal.end_group("stopped: enough")
        session.run(2)
        assert listener.of("start") == [None, 4]
        assert listener.of("end") == ["stopped: enough", "done"]
        told = status(tmp_path / "run")
        assert (told.state, told.info.total, told.info.resumes) == ("done", 4, True)
        assert told.info.started > before

    def test_a_part_that_fails_is_told_by_the_whole(self) -> None:
        def fail(_session: Any) -> None:
            raise KeyboardInterrupt

        listener, session = Listener(), make_session(meters=[At(2, fail)])
        session.subscribe(listener)
        session.journal.begin_group(8)
        with pytest.raises(KeyboardInterrupt):
            session.run(4)
        assert listener.of("end") == []
        session.journal.end_group("failed: it")
        assert listener.of("end") == ["failed: it"]

    def test_a_pause_is_told_in_a_part_too(self, tmp_path: Path) -> None:
        session = make_session(run_dir=tmp_path / "run", meters=[At(2, lambda s: s.control.pause())])
        session.journal.begin_group(4)
        going = session.run(4, thread=True)
        until(lambda: status(tmp_path / "run").state == "paused")
        session.control.resume()
        going.wait()
        assert status(tmp_path / "run").state == "running"

    def test_interrupts_are_the_wholes(self) -> None:
        asked = []
        session = make_session(meters=[At(2, interrupt)])
        session.journal.begin_group(8)
        before = signal.signal(signal.SIGINT, lambda *_: asked.append(session.steps))
        try:
            session.run(4)
        finally:
            signal.signal(signal.SIGINT, before)
        assert asked == [2]
        assert session.steps == 4

    def test_a_file_between_two_parts_is_heard(self, tmp_path: Path) -> None:
        """One that was there before the whole is not."""
        session = make_session(run_dir=tmp_path / "run")
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "stop").touch()
        session.journal.begin_group(8)
        session.run(2)
        assert session.steps == 2
        (tmp_path / "run" / "stop").touch()
        session.run(2)
        assert session.steps == 2
        assert session.control.reason == f"stopped: by the file stop in {tmp_path / 'run'}"
        session.run(2)
        assert session.steps == 4
