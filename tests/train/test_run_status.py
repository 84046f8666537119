"""What a run says of itself: run.json, notes, and the conditions that end it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import surokit as sk
from surokit.runs.records import Record
from surokit.runs.status import RunInfo, read_status
from surokit.train import run_status
from surokit.train.run_info import Light
from surokit.train.session import Session
from tests.clocks import PATIENCE_S, Clock, until
from tests.refusals import refused, warned
from tests.train.toys import (
    VOCAB,
    At,
    Listener,
    Toy,
    assert_same_state,
    make_batches,
    make_session,
    whole,
)


class TestStopWhen:
    def test_a_function(self) -> None:
        def low(record: Record) -> bool:
            return record.step == 4

        listener = Listener()
        session = make_session()
        session.subscribe(listener)
        session.stop_when(low)
        session.run(8)
        assert session.steps == 4
        assert listener.of("end") == ["stopped: low at step 4"]
        session.run(4)
        assert_same_state(session, whole(8))

    def test_one_that_ends_each_run_says_how_it_goes(self) -> None:
        def low(record: Record) -> bool:
            return record.step >= 4

        listener = Listener()
        session = make_session()
        session.subscribe(listener)
        session.stop_when(low)
        for _ in range(2):
            session.run(8)
        assert listener.of("end") == [
            "stopped: low at step 4",
            "stopped: low at step 5, again: stop_when() clears it",
        ]
        session.stop_when()
        session.run(3)
        assert listener.of("end")[2:] == ["done"]

    def test_one_that_holds_now_and_then_is_not_remarked_on(self) -> None:
        listener = Listener()
        session = make_session()
        session.subscribe(listener)
        session.stop_when(lambda record: record.step % 5 == 0 and f"step {record.step}")
        for _ in range(2):
            session.run(8)
        assert listener.of("end") == ["stopped: step 5", "stopped: step 10"]

    def test_its_own_words(self) -> None:
        listener = Listener()
        session = make_session()
        session.subscribe(listener)
        session.stop_when(lambda record: f"loss {record.loss:.0f}" if record.step == 2 else False)
        session.run(8)
        assert listener.of("end") == ["stopped: loss 4"]

    def test_without_any_none(self) -> None:
        session = make_session()
        session.stop_when(lambda record: True)
        session.stop_when()
        session.run(3)
        assert session.steps == 3

    def test_nonfinite(self) -> None:
        batches = [{name: v.clamp(max=VOCAB - 2) for name, v in batch.items()} for batch in make_batches(6)]
        batches[3]["input_ids"][0, 2] = VOCAB - 1  # of which the embedding is infinite
        model = Toy()
        with torch.no_grad():
            model.embed.weight[VOCAB - 1] = torch.inf
        listener = Listener()
        session = make_session(model, batches)
        session.subscribe(listener)
        session.stop_when("nonfinite")
        with warned(UserWarning):
            session.run(20)
        assert session.steps == 4
        (reason,) = listener.of("end")
        assert reason.startswith("stopped: nonfinite at step 4, ")

    def test_diverging(self) -> None:
        listener = Listener()
        session = make_session(Toy(dropout=0.0), make_batches(1), schedule=None, optimizer=sk.AdamW(lr=1e-2))
        session.subscribe(listener)
        session.stop_when("diverging")
        session.run(60)
        assert listener.of("end") == ["done"]
        for group in session.optimizer.param_groups:
            group["lr"] = 30.0
        session.run(200)
        assert session.steps < 200
        assert listener.of("end")[1].startswith("stopped: diverging at step ")
        session.run(5)
        assert listener.of("end")[2] == "done", "it holds where the phase begins, and not on and on"

    def test_one_that_raises_is_dropped(self) -> None:
        def broken(record: Record) -> bool:
            raise ZeroDivisionError("no such thing")

        session = make_session()
        session.stop_when(broken)
        with warned(UserWarning):
            session.run(3)
        assert session.steps == 3

    def test_an_unknown_name(self) -> None:
        with refused(ValueError):
            make_session().stop_when("divergent")


class TestJournal:
    def test_run_json(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        listener, clock = Listener(), Clock()
        monkeypatch.setattr(run_status, "time", clock)
        session = make_session(run_dir=tmp_path / "run", recipe="fp8")
        session.subscribe(listener)
        (before,) = listener.of("info")
        assert (before.tokens_per_step, before.total) == (None, 20)
        session.note("before")
        session.run(3)
        session.note("after")
        status = read_status(tmp_path / "run")
        assert status is not None
        info = status.info
        assert (info.title, info.model, info.device, info.gpus) == ("fp8", "Toy", "cpu", 0)
        assert (info.total, info.tokens_per_step, info.resumes, info.pid) == (3, 48, True, os.getpid())
        assert info.run_dir == str(tmp_path / "run")
        assert "no peak" in info.peak
        assert "Q(x)Q(w)'" in info.recipe
        assert info.started == clock.time()
        assert (status.state, status.step, status.over) == ("done", 3, True)
        assert [(e["step"], e["kind"], e["text"]) for e in status.events] == [
            (0, "note", "before"),
            (3, "note", "after"),
        ]
        assert [info.tokens_per_step for info in listener.of("info")] == [None, None, 48]
        assert listener.of("note") == [(0, "before"), (3, "after")]

    def test_flops_are_told_anew_where_batches_get_longer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            "surokit.train.run_status.light_of", lambda session: Light(float(session.lengths.mean or 0), 1.0, "a GPU")
        )
        listener = Listener()
        session = make_session(data=make_batches(3, 4, 12) + make_batches(1, 4, 60))
        session.subscribe(
            SimpleNamespace(on_step=lambda record: session.info)
        )  # who asks changes nothing of what is told
        session.subscribe(listener)
        session.run(4)
        assert [info.flops_per_token for info in listener.of("info")] == [0, 0, 12, 42]

    def test_how_it_stands(self, tmp_path: Path) -> None:
        session = make_session(run_dir=tmp_path / "run", meters=[At(2, lambda s: s.control.pause())])

        def state() -> str:
            status = read_status(tmp_path / "run")
            return "" if status is None else status.state

        run = session.run(4, thread=True)
        until(lambda: state() == "paused")
        session.stop()
        run.wait()
        assert state() == "stopped: by session.stop()"
        session.stop_when(lambda record: "enough")
        session.run(4)
        assert state() == "stopped: enough"
        session = make_session(data=[], run_dir=tmp_path / "run2")
        with refused(ValueError):
            session.run(1)
        status = read_status(tmp_path / "run2")
        assert status is not None
        assert status.state.startswith("failed: ValueError: The data yields no batches")

    def test_notes_from_many_threads(self, tmp_path: Path) -> None:
        session = make_session(run_dir=tmp_path / "run")
        session.run(1)

        def note() -> None:
            for _ in range(20):
                session.note("n")

        threads = [threading.Thread(target=note) for _ in range(3)]
        for thread in threads:
            thread.start()
        session.run(20)
        for thread in threads:
            thread.join(PATIENCE_S)
        session.note("last")
        status = read_status(tmp_path / "run")
        assert status is not None
        assert len(status.events) == 61

    def test_a_note_that_meets_a_beginning(self, tmp_path: Path) -> None:
        """It says nothing of how the run stands."""

        class Late(Listener):
            def on_note(self, *_: Any) -> None:
                session.control.begin()
                session.journal.begin(None)
                session.control._state = "idle"  # as it was seen

        session = make_session(run_dir=tmp_path / "run")
        session.run(1)
        session.subscribe(Late())
        session.note("n")
        status = read_status(tmp_path / "run")
        assert status is not None
        assert status.state == "running"

    def test_what_json_does_not_know(self, tmp_path: Path) -> None:
        session = make_session(run_dir=tmp_path / "run")
        session.note(Path("a"))  # type: ignore[arg-type]
        session.run(2)
        status = read_status(tmp_path / "run")
        assert status is not None
        assert status.events[0]["text"] == "a"

    def test_notes_outlast_a_restart(self, tmp_path: Path) -> None:
        session = make_session(run_dir=tmp_path / "run")
        session.run(2)
        session.note("two")
        session.save()
        session.run(2)
        session.note("four")
        again = Session.resume(tmp_path / "run", Toy(), data=make_batches())
        again.run(1)
        status = read_status(tmp_path / "run")
        assert status is not None
        assert [e["text"] for e in status.events] == ["two"], "what came after the checkpoint did not happen"

    def test_a_model_that_cannot_be_described(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def odd(session: Session) -> None:
            raise KeyError("layers")

        monkeypatch.setattr("surokit.train.run_status.light_of", odd)
        assert make_session().info.peak == "the model's work is not known (KeyError: 'layers')"

    def test_nobody_is_described_to_nobody(self, monkeypatch: pytest.MonkeyPatch) -> None:
        session = make_session()
        monkeypatch.setattr(type(session.journal), "describe", lambda self: pytest.fail("nobody asked"))
        session.run(2)

    def test_a_dead_disk_costs_one_warning(self, tmp_path: Path) -> None:
        session = make_session(run_dir=tmp_path / "run")
        (tmp_path / "run" / "run.json").mkdir()
        with warned(UserWarning) as caught:
            session.run(3)
        assert len(caught) == 1
        assert session.steps == 3


def test_information_travels_as_plain_values() -> None:
    info = RunInfo(title="a", total=3, peak_tflops=989.0)
    assert RunInfo.from_dict({**info.to_dict(), "of tomorrow": 1}) == info
    assert RunInfo.from_dict({}) == RunInfo()
