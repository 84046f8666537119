"""A race in a thread of its own: the same numbers, what can be asked meanwhile, what it says, errors where they are awaited."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

import surokit as sk
from surokit.racing import UnequalWork, scheduler
from tests.clocks import until, until_async
from tests.racing.conftest import batches
from tests.refusals import refused


class Gate:
    """A meter that lets every run make `open` steps, and waits before the next until more are let through."""

    def __init__(self, steps: int) -> None:
        self._open, self._changed = steps, threading.Condition()
        self.reached: set[int] = set()

    def __call__(self, session):
        with self._changed:
            self.reached.add(session.steps)
            assert self._changed.wait_for(lambda: session.steps < self._open, 60)
        return {}

    def open(self, steps: int = 10**9) -> None:
        with self._changed:
            self._open = steps
            self._changed.notify_all()

    def wait(self, steps: int) -> None:
        until(lambda: steps in self.reached)


def losses(race):
    return {name: run.steps["loss"].tolist() for name, run in race.runs.items()}


@pytest.fixture(scope="module")
def alone(model):
    from tests.racing.conftest import raced

    return losses(raced(model))


def test_it_computes_what_it_computes_without_a_thread_whatever_others_draw(make, alone):
    gate = Gate(3)
    race = make(thread=True, meters=[gate])
    assert race.running
    assert race.reason == ""
    gate.wait(3)
    torch.manual_seed(5)
    drawn = torch.rand(1)
    gate.open()
    while not race.wait(0.001):
        torch.rand(7)
    assert race.reason == "done"
    assert losses(race) == alone
    torch.manual_seed(5)
    assert torch.rand(1) == drawn


def test_it_is_awaited_and_goes_on_in_a_thread(make, alone):
    async def run():
        gate = Gate(3)
        race = make(steps=12, thread=True, schedule=sk.Cosine(1, 16), meters=[gate])

        async def other_work():
            await until_async(lambda: 3 in gate.reached)
            gate.open()

        _, same = await asyncio.gather(other_work(), awaited(race))
        assert same is race
        return await race.go_on(steps=4, thread=True)

    async def awaited(race):
        return await race

    race = asyncio.run(run())
    assert losses(race) == alone
    assert not race.running
    assert race.wait(), "what is over need not be waited for"
    assert asyncio.run(awaited(make(steps=4))).reason == "done"


def test_printed_it_says_how_far_it_is(make):
    gate = Gate(3)
    race = make(thread=True, meters=[gate], turn_s=1e-6, control=False)
    gate.wait(3)
    text = str(race)
    assert text.splitlines()[0].split() == ["run", "steps", "last", "loss"]
    assert "The race goes on in its warm-up, bf16's turn: every run has made at least 1 of 16 steps." in text
    assert "A result takes a turn of every run" in text
    assert "in its warm-up" in race._repr_html_()
    gate.open(9)
    gate.wait(9)
    text = str(race)
    assert text.startswith("run ")
    assert "The race goes on in round 3" in text
    assert "2 rounds of turns" in text
    assert "The race goes on in round 3" in race._repr_html_()
    assert race.table().shape[0] == 2
    assert not race.wait(0.01)
    gate.open()
    race.wait()
    assert "goes on" not in str(race)


def test_a_pause_that_waits_for_the_turn_is_told(make):
    gate = Gate(3)
    race = make(thread=True, meters=[gate], turn_s=1e-6, control=False)
    gate.wait(3)
    race.pause()
    assert "The race goes on in its warm-up, bf16's turn, and pauses before the next turn: every run" in str(race)
    gate.open()
    until(lambda: "The race is paused in round 1: every run" in str(race))
    race.resume()
    assert "pauses" not in str(race)
    race.wait()


def test_before_every_run_has_a_step_no_number_is_told(make):
    gate = Gate(1)
    race = make(thread=True, meters=[gate], control=False)
    gate.wait(1)
    assert "The race goes on in its warm-up, bf16's turn: not every run has made a step yet." in str(race)
    gate.open()
    race.wait()


def test_what_is_there_meanwhile_is_whole(make):
    gate = Gate(3)
    race = make(thread=True, steps=24, turn_s=1e-6, meters=[gate])
    looks = 0
    while not race.wait(0.001):
        for run in race.runs.values():
            assert len({len(run.steps[name]) for name in ("step", "loss", "skipped")}) == 1
            assert not run.turns or run.turns[-1].last <= len(run.steps)
        looks += 1
        if looks == 1:
            gate.open()
    assert looks


def test_stop_pause_and_resume_come_from_the_callers_thread(make, tmp_path):
    race = make(thread=True, steps=400, turn_s=1e-6, run_dir=tmp_path / "race")
    until(lambda: race.runs["fp8"].turns)
    race.pause()
    until(lambda: "The race is paused in round" in str(race))
    before = losses(race)
    for _ in range(20):
        assert not race.wait(0.001)
        assert losses(race) == before
    race.resume()
    until(lambda: losses(race) != before)
    (tmp_path / "race" / "pause").touch()
    until(lambda: "is paused" in str(race))
    race.resume()
    assert not (tmp_path / "race" / "pause").exists()
    race.stop()
    assert race.wait()
    assert race.reason == "stopped: by race.stop()"
    assert "race.go_on() goes on from there" in str(race)
    made = len(race.runs["fp8"].steps)
    assert made < 400
    race.stop()
    race.go_on(steps=2, thread=True).wait()
    assert race.reason == "done", "what was asked of a race that rests does not hold"
    assert len({len(run.steps) for run in race.runs.values()}) == 1


def test_a_stop_before_the_thread_has_begun_holds(make, monkeypatch):
    race = make(steps=4)
    for _ in range(5):
        race.go_on(steps=50, thread=True)
        race.stop()
        race.wait()
        assert race.reason == "stopped: by race.stop()"
    assert len(race.runs["bf16"].steps) < 250


def test_stopped_in_its_warm_up_it_is_over_and_says_what_can_be_done(make):
    gate = Gate(2)
    race = make(thread=True, meters=[gate])
    gate.wait(2)
    race.stop()
    gate.open()
    assert race.wait()
    assert "ended in its warm-up (stopped: by race.stop()): race again" in str(race)
    assert "none had one" in str(race)
    with refused(RuntimeError):
        race.go_on(steps=3)


def test_one_at_a_time_and_the_sessions_are_the_races(make):
    gate = Gate(3)
    race = make(thread=True, meters=[gate])
    gate.wait(3)
    for thread in (False, True):
        with refused(RuntimeError):
            race.go_on(steps=2, thread=thread)
    with refused(RuntimeError):
        race.sessions  # noqa: B018
    with refused(RuntimeError):
        race.bring("fp8")
    gate.open()
    race.wait()
    assert race.sessions["fp8"].steps == 16


def test_errors_surface_where_they_are_awaited(make, capsys):
    broken = {"input_ids": torch.zeros(2, 16, dtype=torch.long)}
    race = make(thread=True, data=[*batches(8), broken])
    with refused(ValueError) as caught:
        race.wait()
    assert getattr(caught.value, "race") is race  # noqa: B009
    assert race.reason.startswith("failed: ValueError: ")
    assert "surokit: the race has failed, ValueError" in capsys.readouterr().err

    async def run():
        await make({"bf16": sk.BF16, "qfp8": sk.QFP8.lora(rank=2)}, thread=True)

    with refused(UnequalWork):
        asyncio.run(run())
    with refused(ValueError):
        make(steps=1, thread=True)


def test_an_interrupt_of_the_waiting_ends_the_race(make, monkeypatch, capsys):
    async def run():
        race = make(thread=True, steps=2000, turn_s=1e-6, compile=False)
        task = asyncio.ensure_future(awaited(race))
        await until_async(lambda: any(run.turns for run in race.runs.values()))
        task.cancel()
        return await task

    async def awaited(race):
        return await race

    race = asyncio.run(run())
    assert race.reason == "interrupted"
    assert "race.go_on() goes on from there" in capsys.readouterr().err


def test_an_interrupt_while_the_panel_opens_leaves_no_thread_behind(make, monkeypatch):
    def interrupted(_view):
        raise KeyboardInterrupt

    monkeypatch.setattr(scheduler._View, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(thread=True, live=True)
    assert not any(thread.name == "surokit-run" for thread in threading.enumerate())


def test_a_race_without_a_whole_round_says_what_is_known_and_what_is_missing(make):
    def stop_at_10(session):
        if session.steps == 10:
            session.stop()
        return {}

    race = make(steps=24, turn_s=10.0, meters=[stop_at_10], eval=batches(1, seed=1), predict=True)
    first = next(name for name, run in race.runs.items() if run.turns)
    others = ", ".join(name for name in race.runs if name != first)
    text = repr(race)
    assert f"before every run has had a turn: {others} had none. The race ended early" in text
    rows = [line.split() for line in text.splitlines()[1:4]]
    assert sorted(row[-2] for row in rows) == ["10", "6", "6"]
    race.go_on()
    race.go_on()
    text = repr(race)
    assert "No round is whole yet, so no ratio to the baseline is known" in text
    assert "tokens/s" in text.splitlines()[0]
    assert "steps, " in text.splitlines()[1], "what is known: the target"
    for words in (text, race._repr_html_()):
        assert "nan" not in words.lower()
        assert "0 rounds" not in words
    race.plot()
    race.go_on()
    assert race.reason == "done"
