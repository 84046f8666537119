"""What a front end holds after any message is the state: whatever was lost before, whenever it joined, in a bounded size."""

from __future__ import annotations

import json
import math
import random
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surokit.runs.status import RunInfo
from surokit.widgets.messages import MESSAGE_BYTES, NAMES, RENEW_S, RUNS, SLOTS, Wire, weight
from surokit.widgets.panel import Panel
from surokit.widgets.picture import PANES
from surokit.widgets.state import PanelState
from tests.widgets.toys import Clock


class Reader:
    """A front end: the last text of every name, read as the protocol says."""

    def __init__(self):
        self.traits = {}
        self.drawn = {}  # of each curve, what it showed last

    def take(self, message):
        self.traits.update(message)

    @property
    def head(self):
        return json.loads(self.traits["head"])

    def curves(self):
        """{(run, series): [(x, y) or (x, tokens, seconds)]}."""
        runs = [run["key"] for run in self.head["runs"]]
        shown = {}
        for entry in json.loads(self.traits["delta"])["series"]:
            of = (runs[entry["of"][0]], entry["of"][1])
            start = []
            if entry["gen"]:
                key = json.loads(self.traits.get(f"key_{entry['slot']}") or '{"gen": 0}')
                if key["gen"] != entry["gen"]:
                    shown[of] = self.drawn.get(of, [])
                    continue
                start = points(key)
            shown[of] = start + points(entry)
        self.drawn = shown
        return shown


def points(entry):
    words = {None: math.nan, "inf": math.inf, "-inf": -math.inf}
    y = [words.get(v, v) if v is None or isinstance(v, str) else v for v in entry["y"]]
    x = list(accumulate(entry["dx"]))
    assert len(x) == len(y)
    return list(zip(x, y, entry["z"])) if "z" in entry else list(zip(x, y))


def add(state, step, loss=2.5, **more):
    state.add(
        step,
        **{
            "loss": loss,
            "tokens": 4096,
            "seconds": 0.1,
            "idle": 0.03,
            "stall": 0.001,
            "lr": 1e-3,
            "grad_norm": 1.0,
            "memory": 3.0,
            **more,
        },
    )


def same(a, b):
    return math.isclose(a, b, rel_tol=6e-5) or (math.isnan(a) and math.isnan(b)) or a == b


def faithful(curve, series):
    """The reader's curve shows the state's extremes, what is not finite, its last point, and nothing that was not there."""
    known = dict(series.since())
    kept = [y for y in known.values() if math.isfinite(y)]
    told = [p[1] for p in curve if math.isfinite(p[1])]
    assert curve[-1][0] == series.last[0]
    assert same(curve[-1][1], series.last[1])
    assert all(a[0] < b[0] for a, b in pairwise(curve))
    assert bool(kept) == bool(told)
    if kept:
        assert same(min(told), min(kept))
        assert same(max(told), max(kept))
    assert any(math.isnan(y) for y in known.values()) == any(math.isnan(p[1]) for p in curve)
    assert any(math.isinf(y) for y in known.values()) == any(math.isinf(p[1]) for p in curve)


def size(message):
    return sum(weight(name, text) for name, text in message.items())


values = st.one_of(st.floats(-1e6, 1e6), st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1e-30, 1e300]))


@settings(max_examples=40, deadline=None)
@given(st.lists(values, min_size=1, max_size=600), st.integers(1, 60), st.data())
def test_any_reader_holds_the_state(losses, every, data):
    """One reader gets all messages, one loses most, one joins at the end with what the kernel holds."""
    clock, state = Clock(), PanelState("a", total=600)
    wire = Wire({"a": state}, clock)
    whole, lossy, kernel = Reader(), Reader(), Reader()
    rounds = range(0, len(losses), every)
    for start in rounds:
        for step, loss in enumerate(losses[start : start + every], start + 1):
            add(state, step, loss)
        clock.now += 0.25
        message = wire.next(final=start == rounds[-1])
        assert size(message) <= MESSAGE_BYTES
        whole.take(message)
        kernel.take(message)
        if start == rounds[-1] or data.draw(st.booleans()):
            lossy.take(message)
            lossy.curves()
        faithful(whole.curves()["a", "loss"], state.loss)
    late = Reader()
    late.take(kernel.traits)
    assert late.curves() == whole.curves() or any(map(math.isnan, losses))
    for name in NAMES:
        series = getattr(state, name)
        if name != "ruler" and series.last is not None:
            faithful(late.curves()["a", name], series)
    assert set(lossy.curves()) == set(whole.curves())


def test_a_reader_that_lost_everything_is_right_again_after_the_renewal_time():
    clock, state = Clock(), PanelState("a")
    wire, reader = Wire({"a": state}, clock), Reader()
    step = 0

    def go(seconds, heard):
        nonlocal step
        for _ in range(int(4 * seconds)):
            for _ in range(3):
                step += 1
                add(state, step, 3.0 + math.sin(step))
            clock.now += 0.25
            message = wire.next()
            if heard:
                reader.take(message)
                reader.curves()

    go(20, heard=True)
    go(60, heard=False)
    go(RENEW_S + 5, heard=True)
    for (_, name), curve in reader.curves().items():
        if name != "ruler":
            faithful(curve, getattr(state, name))


@pytest.mark.parametrize("steps", [20_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_the_budget_over_many_records(steps):
    """At most four messages a second, 20 KB each, on any clock; what arrives is the state; the wire holds nothing of its own."""
    clock, dice = Clock(), random.Random(0)
    shown = []
    reader = Reader()

    class View:
        every_s = 0.25

        def __init__(self):
            self.wire = None

        def show(self, states, final):
            self.wire = self.wire or Wire(states, clock)
            message = self.wire.next(final)
            shown.append((clock.now, (size(message), [name for name in message if name.startswith("key_")])))
            reader.take(message)

    state = PanelState("fp8", recipe="y = Q(x)Q(w)' " * 9, total=steps)
    panel = Panel(state, view=View(), clock=clock)
    for step in range(1, steps + 1):
        clock.now += dice.choice([0.0005, 0.001, 0.003])
        loss = dice.choice([math.nan, math.inf]) if step % 9_973 == 0 else 3 + dice.gauss(0, 0.2) + 20 * (step == 4_123)
        row = {"step": step, "loss": loss, "tokens": 4096, "wall_ms": 20.0, "idle_frac": dice.random(), "stall_ms": 1.0}
        panel.on_step({**row, "grad_norm": dice.random(), "lr": 1e-3, "peak_gib": 3.0, "elapsed_s": 0.02 * step})
    panel.on_end("done")
    times = [at for at, _ in shown]  # the last one may come at any time
    assert len(times) > steps / 250
    assert all(b - a >= 0.25 - 1e-9 for a, b in pairwise(times[:-1]))
    assert max(weight for _, (weight, _) in shown) <= MESSAGE_BYTES
    assert max(len(keys) for _, (_, keys) in shown) <= len(NAMES)  # at first they share a message
    curves = reader.curves()
    (run,) = {run for run, _ in curves}
    for (_, name), curve in curves.items():
        if name != "ruler":
            faithful(curve, getattr(state, name))
    assert {name for _, name in curves} == {name for name in NAMES if name != "held_out"}
    assert max(p[1] for p in curves[run, "loss"] if math.isfinite(p[1])) > 20
    assert sum(map(len, reader.traits.values())) < SLOTS * 8_000


def test_the_ruler_turns_steps_into_tokens_and_seconds():
    clock, state = Clock(), PanelState()
    wire, reader = Wire({"a": state}, clock), Reader()
    seconds = 0.0
    for step in range(1, 3_001):
        wall = 0.1 if step < 2_000 else 0.4
        seconds += wall
        add(state, step, tokens=100, seconds=wall)
        if step % 20 == 0:
            clock.now += 0.25
            reader.take(wire.next())
    ruler = reader.curves()["a", "ruler"]
    assert ruler[-1] == (3_000, 300_000, pytest.approx(seconds, rel=1e-6))
    assert len(ruler) < 400
    for at, tokens, elapsed in ruler:
        assert tokens == pytest.approx(100 * at, rel=1e-6)
        assert elapsed == pytest.approx(0.1 * min(at, 1_999) + 0.4 * max(at - 1_999, 0), rel=1e-5)


@pytest.mark.parametrize("runs", [2, 5, 16, 40])
def test_many_runs_share_the_budget(runs):
    clock = Clock()
    states = {f"run {i} " + "x" * (i % 50): PanelState(f"title {i}", recipe="long words " * 20) for i in range(runs)}
    wire, reader = Wire(states, clock), Reader()
    for step in range(1, 241):
        for i, state in enumerate(states.values()):
            add(state, step, math.nan if step % (37 + i) == 0 else 3.0 + math.sin(step * i), held_out=2.0)
        if step % 8 == 0:
            clock.now += 0.25
            message = wire.next()
            assert size(message) <= MESSAGE_BYTES
            reader.take(message)
    head, curves = reader.head, reader.curves()
    assert len(head["runs"]) == min(runs, RUNS)
    assert head["table"] is None if runs > 5 else len(head["table"]["rows"]) == runs
    for run, state in list(states.items())[:RUNS]:
        faithful(curves[run, "loss_mean"], state.loss_mean)
    for run in head["runs"]:
        told = {name for key, name in curves if key == run["key"]}
        assert told.isdisjoint(run["hidden"])
        assert told | set(run["hidden"]) == set(NAMES) or runs > 5
    assert bool(head["runs"][0]["hidden"]) == (runs == 5)


def test_the_budget_holds_where_names_and_numbers_are_long():
    """Keyframes are coarser then, and come all the same."""
    clock = Clock()
    states = {f"run {i} {'w' * 60}": PanelState("t" * 60, recipe="y " * 60, total=10**8) for i in range(RUNS)}
    wire, told = Wire(states, clock), set()
    for step in range(10**7, 10**7 + 1000):
        for i, state in enumerate(states.values()):
            wide = math.sin(step * (i + 1)) * 1.2345e5
            rates = {
                "tokens": 1_234_567 + step % 7,
                "seconds": abs(wide) / 1e3,
                "idle": 0.1234,
                "busy": 0.8,
                "launches": 9e4,
            }
            add(state, step, wide, grad_norm=abs(wide), held_out=wide, lr=1.2345e-5, memory=12.345, **rates)
            state.reason = "failed: " + "w" * 60
        if step % 20 == 0:
            clock.now += 0.25
            message = wire.next()
            assert size(message) <= MESSAGE_BYTES
            told |= {name for name in message if name.startswith("key_")}
    assert len(told) == SLOTS // RUNS * RUNS


def test_a_race_over_in_few_messages_has_its_losses_first_and_is_whole_at_its_end():
    """25 messages for 30 curves: every run's losses have a keyframe in the fourth; what is still coarse comes after the end."""
    clock = Clock()
    states = {run: PanelState(run) for run in ("bf16", "fp8", "mxfp8")}
    wire, reader = Wire(states, clock), Reader()

    def widest():
        """Steps without a point in the loss of the run that has the longest such stretch."""
        curves = reader.curves()
        return max(b[0] - a[0] for run in states for a, b in pairwise(curves[run, "loss_mean"]))

    for step in range(1, 1_001):
        for state in states.values():
            add(state, step, 3.0 + math.sin(7 * step) / 5, held_out=2.0 if step % 100 == 0 else None)
        if step % 40 == 0:
            clock.now += 0.25
            reader.take(wire.next())
            told = {tuple(entry["of"]): entry["gen"] for entry in json.loads(reader.traits["delta"])["series"]}
            assert step < 160 or all(told[run, "loss_mean"] and told[run, "loss"] for run in range(3)), step
    for _ in range(SLOTS + 1):
        message = wire.next(final=True)
        assert size(message) <= MESSAGE_BYTES
        reader.take(message)
        if not any(name.startswith("key_") for name in message):
            break
    else:
        raise AssertionError("no end of keyframes")
    assert widest() <= 4
    for (run, name), curve in reader.curves().items():
        if name != "ruler":
            faithful(curve, getattr(states[run], name))


def test_runs_come_and_go_and_start_again():
    clock, states = Clock(), {"a": PanelState(), "b": PanelState()}
    wire, reader = Wire(states, clock), Reader()

    def go(count, first=1):
        for step in range(first, first + count):
            for state in states.values():
                add(state, step, float(step))
            clock.now += 0.25
            reader.take(wire.next())

    go(200)
    del states["a"]
    go(50, 201)
    assert {run for run, _ in reader.curves()} == {"b"}
    states["b"] = PanelState()  # read again from an earlier step, as after a resume
    go(1)
    assert reader.curves()["b", "loss"] == [(1, 1.0)]
    for name in ("c", "d", "e"):
        states[name] = PanelState()
    go(60, 2)
    for run, state in states.items():
        faithful(reader.curves()[run, "loss"], state.loss)


def test_the_head_is_ready_to_show():
    state = PanelState("fp8", recipe="native", total=200)
    state.info = RunInfo(gpus=2, flops_per_token=1e9, peak_tflops=10.0, usd_per_gpu_hour=3.6)
    for step in range(1, 101):
        add(state, step, 9.0 if step == 80 else 3.0 + 0.01 * (step % 3), busy=0.9, launches=120.0)
    state.note(90, "longer sequences")
    head = json.loads(Wire({"a": state}).next()["head"])
    (run,) = head["runs"]
    assert (head["v"], head["n"], head["final"], head["axes"]) == (1, 1, False, ["steps", "tokens", "time", "usd"])
    assert [pane["name"] for pane in head["panes"]] == [pane.name for pane in PANES]
    assert [s["name"] for s in head["panes"][0]["series"]] == ["loss", "loss_mean"]
    assert (run["state"], run["phase"], run["progress"], run["tokens"]) == ("running", "converging", 0.5, 409_600)
    assert run["usd_per_s"] == pytest.approx(0.002)
    told = {figure["name"]: (figure["value"], figure["note"]) for figure in run["figures"]}
    assert told["Tokens/s"] == ("41k", "now 41k · 205 % of peak")
    assert told["Device idle"] == ("3.0 %", "data 1.0 % · between steps 2.0 % · inside steps 7.0 %")
    assert told["GPU hours"] == ("0.01", "$0.02")
    assert told["Peak memory"] == ("3 GiB", "")
    assert [(e["step"], e["kind"], e["y"]) for e in run["events"]] == [
        (80, "spike", 9.0),
        (90, "note", pytest.approx(3.0)),
    ]
    assert run["warnings"] == ["loss spike, at step 80: loss 9, usually 3.01"]
    assert "go back about 100 steps" in run["suggestion"]
    state.reason = "stopped: diverging"
    run = json.loads(Wire({"a": state}).next(final=True)["head"])["runs"][0]
    assert (run["state"], run["ending"]) == ("stopped", "Stopped after step 100: diverging.")


def test_odd_words_and_numbers_still_make_a_message():
    """Every text is JSON as a browser reads it (no NaN), in UTF-8, whatever the run is called, costs or measured."""

    def refuse(word):
        raise AssertionError(word)

    name = "half \ud800 \x1b[31mred\x00"
    state = PanelState(name, recipe=name)
    state.info = RunInfo(gpus=1, usd_per_gpu_hour=math.nan, flops_per_token=math.nan, peak_tflops=1.0)
    for step, value in enumerate([1.0, 1e300, -1e300, math.inf, -math.inf, math.nan, 5e-324], 1):
        row = {"step": step, "loss": value, "grad_norm": value, "lr": value, "idle_frac": value, "eval_loss": value}
        state.add_row({**row, "tokens": abs(value), "wall_ms": abs(value), "elapsed_s": abs(value), "peak_gib": value})
    state.note(3, name)
    state.reason = f"failed: {name}"
    message = Wire({name: state}).next(final=True)
    assert size(message) <= MESSAGE_BYTES
    for text in message.values():
        text.encode()
        json.loads(text, parse_constant=refuse)
    (run,) = json.loads(message["head"])["runs"]
    assert run["title"] == "half red"
    assert run["usd_per_s"] is None
    assert all(len(figure["value"]) < 20 for figure in run["figures"])


def test_an_empty_state_says_that_it_waits():
    message = Wire({"a": PanelState("x")}).next()
    head = json.loads(message["head"])
    assert (head["panes"], head["axes"], head["runs"][0]["state"]) == ([], ["steps"], "waiting")
    assert json.loads(message["delta"])["series"] == []
    assert json.loads(Wire({}).next()["head"])["runs"] == []
