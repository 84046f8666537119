"""Systems in turns: whose turn it is, who stays, what a call has time for. The benchmarks' own tests go through all of it too."""

import math
from contextlib import closing

import pytest

from surokit.bench.process import Failed
from surokit.bench.turns import Call, OutOfTime, Running, Turns
from tests.refusals import refused


class System:
    """Answers at once; `room` systems may be open together, and `broken` is what its answers are."""

    open = 0

    def __init__(self, name="a", room=9, broken=None):
        if System.open >= room:
            raise Failed("CUDA out of memory")
        System.open += 1
        self.name, self.broken, self.ready = name, broken, {}

    def ask(self, request, timeout_s=0.0):
        if self.broken:
            raise self.broken
        steps = request["steps"]
        return {"seconds": steps / 2, "losses": [1.0] * steps, "peak_mib": 5.0 * steps, "before": request.get("before")}

    def close(self):
        System.open -= 1


@pytest.fixture(autouse=True)
def _none_open(monkeypatch):
    monkeypatch.setattr(System, "open", 0)
    yield
    assert System.open == 0


def take_turns(turns, names="abc", count=2, drop=()):
    said = []
    with closing(turns):
        for number, name in turns.rounds(names, count):
            turns.opened(name, 60.0)
            said.append(f"{name}{number} {''.join(turns.open)}")
            if name in drop:
                turns.drop(name)
    return said


def test_turns_go_round_and_systems_stay():
    assert take_turns(Turns(lambda name, until_s: System(name))) == [
        "a0 a",
        "b0 ab",
        "c0 abc",
        "a1 abc",
        "b1 abc",
        "c1 abc",
    ]


def test_what_is_dropped_is_closed_and_has_no_turn_again():
    assert take_turns(Turns(lambda name, until_s: System(name)), drop="b") == [
        "a0 a",
        "b0 ab",
        "c0 ac",
        "a1 ac",
        "c1 ac",
    ]


def test_some_are_built_anew_for_each_turn():
    turns = Turns(lambda name, until_s: System(name), alone="bc")
    assert take_turns(turns) == ["a0 a", "b0 ab", "c0 ac", "a1 a", "b1 ab", "c1 ac"]


def test_without_room_all_are_alone_unless_what_they_learned_counts():
    crowded = Turns(lambda name, until_s: System(name, room=2), alone=())
    assert take_turns(crowded) == ["a0 a", "b0 ab", "c0 c", "a1 a", "b1 b", "c1 c"]
    with refused(Failed):
        take_turns(Turns(lambda name, until_s: System(name, room=2)))
    with refused(Failed):
        take_turns(Turns(lambda name, until_s: System(name, room=0), alone=()))


def test_a_system_runs_once_it_is_warm():
    running = Running(System(), 5, math.inf, steady=3)
    assert (running.first_step_s, running.warm_up_s, running.each_s, running.warm_up_steps) == (0.5, 2.0, 0.5, 5)
    assert running.take(2, math.inf, before=1)["before"] == 1
    assert (len(running.losses), running.peak_mib, running.reserved_mib) == (10, 20.0, 0.0)
    running.close()
    with refused(Failed):
        Running(System(broken=Failed("it broke")), 5, math.inf)


def fails(why):
    def work(until_s):
        raise Failed("no", why)

    return work


def test_a_call_has_so_much_time(monkeypatch, capsys):
    monkeypatch.setattr("surokit.bench.turns.time.monotonic", lambda: 100.0)
    monkeypatch.setattr("surokit.bench.process.time.monotonic", lambda: 100.0)
    call = Call(ends_s=160.0, grace_s=10.0, late_s=30.0)
    assert call.tried("a", 20.0, lambda until_s: {"until": until_s}) == {"until": 150.0}
    assert call.tried("a", 55.0, lambda until_s: {"until": until_s}) == {"until": 170.0}  # with grace
    with refused(OutOfTime):
        call.tried("b", 61.0, lambda until_s: {})
    over = Call(ends_s=100.0, grace_s=10.0)
    with pytest.raises(OutOfTime):
        over.tried("b", 0.0, lambda until_s: {})
    assert over.tried("b", None, lambda until_s: {"until": until_s}) == {"until": 110.0}  # was begun before
    assert call.tried("c", 20.0, fails("missing")) == {"left_out": "no"}
    assert call.tried("c", 20.0, fails("memory")) == {"failed": "no"}
    assert call.tried("c", 20.0, fails("late")) == {"failed": "no"}  # later than it should be
    with refused(OutOfTime):
        call.tried("d", 55.0, fails("late"))
    assert capsys.readouterr().err.splitlines()[-2:] == ["c: no", "d"]
