"""The panel never holds up a run: it throttles, waits for nothing, survives its own view, and always ends with a picture."""

from __future__ import annotations

import io
import json
import math
import sys
import threading
import warnings
from typing import Any, cast
from xml.etree import ElementTree

import pytest

from surokit.runs import records
from surokit.runs.records import Record
from surokit.runs.status import RunInfo
from surokit.train.meters import GemmReading, Sample
from surokit.widgets import front
from surokit.widgets import panel as panel_module
from surokit.widgets.front import WidgetView
from surokit.widgets.panel import Panel, SvgView, TextView, best_view, in_notebook
from surokit.widgets.picture import (
    MESSAGE_BYTES,
    bundle,
    clock_time,
    cut,
    layer_lines,
    picture,
    summary_text,
    sustained_lines,
)
from surokit.widgets.state import PanelState
from tests.refusals import refused, warned
from tests.widgets.toys import Clock, Notebook, wild


class Handle:
    def __init__(self, shown):
        self.shown = shown

    def update(self, content, raw):
        assert raw
        self.shown.append(content)


class Screen:
    """Stands for IPython's `display`: every message, and the number of outputs opened."""

    def __init__(self):
        self.shown, self.outputs = [], 0

    def __call__(self, content, raw, display_id):
        assert raw
        assert display_id
        self.outputs += 1
        self.shown.append(content)
        return Handle(self.shown)


def on_its_way(step, loss):
    """A Record whose values are still on the device; they arrive when the test sets `.late.here`."""

    class Late:
        here = False

        def ready(self):
            return self.here

        def wait(self):
            assert self.here, "the panel waited for the device"
            return {"loss": loss}

    return Record(
        step=step,
        lr=1e-3,
        tokens=10,
        wall_ms=100.0,
        stall_ms=0.0,
        peak_gib=1.0,
        elapsed_s=0.1 * step,
        late=cast(records.Deferred, Late()),
    )


class CountingView:
    every_s = 0.25

    def __init__(self, cost_s=0.0, clock=None):
        self.calls, self.cost_s, self.clock = [], cost_s, clock

    def show(self, states, final):
        (state,) = states.values()
        if self.clock is not None:
            self.clock.now += self.cost_s
        self.calls.append((state.step, final))


def row(step, loss=2.0, **more):
    return {"step": step, "loss": loss, "tokens": 4096, "wall_ms": 50.0, "idle_frac": 0.03, **more}


def test_message_has_picture_and_words_and_nothing_else():
    state = PanelState("fp8", recipe="emulated", total=10)
    for step in range(1, 6):
        state.add_row(row(step))
    message = bundle(state)
    assert set(message) == {"text/plain", "image/svg+xml"}
    ElementTree.fromstring(message["image/svg+xml"])
    assert "step 5 / 10" in message["text/plain"]
    assert "loss 2.000 (EMA over 1 step)" in message["text/plain"]
    assert "81.9k tokens/s" in message["text/plain"]
    assert "idle 3.0 %" in message["text/plain"]
    for word in ("fp8", "emulated", "Loss", "EMA over 1 step", "Tokens/s", "Device idle", "81.9k", "3.0 %"):
        assert word in message["image/svg+xml"]


@pytest.mark.parametrize("steps", [0, 1, 2, 300, 1_000, 30_000])
def test_message_stays_under_its_budget(steps):
    message = bundle(wild(steps))
    ElementTree.fromstring(message["image/svg+xml"])
    assert sum(len(text.encode()) for text in message.values()) <= MESSAGE_BYTES


def test_at_most_four_pictures_a_second_and_the_last_one_always():
    clock, screen = Clock(), Screen()
    panel = Panel(PanelState(), view=SvgView(0.001, display=screen), clock=clock)
    for step in range(1, 1_001):  # ten seconds of a run
        clock.now += 0.01
        panel.on_step(row(step))
    assert 36 <= len(screen.shown) <= 41
    clock.now += 0.01
    panel.on_step(row(1_001, loss=7.0))
    before = len(screen.shown)
    panel.on_end("done")
    assert len(screen.shown) == before + 1
    assert "step 1,001" in screen.shown[-1]["text/plain"]
    assert "Done at step 1,001." in screen.shown[-1]["image/svg+xml"]
    assert screen.outputs == 1


def test_a_slow_front_end_gets_fewer_pictures_but_some():
    clock = Clock()
    view = CountingView(cost_s=0.01, clock=clock)
    panel = Panel(PanelState(), view=view, clock=clock)
    start = clock.now
    for step in range(1, 2_001):
        clock.now += 0.01
        panel.on_step(row(step))
    drawing = view.cost_s * len(view.calls)
    assert len(view.calls) >= 3
    assert drawing / (clock.now - start) <= 0.006
    stuck = CountingView(cost_s=60.0, clock=clock)
    panel = Panel(PanelState(), view=stuck, clock=clock)
    for step in range(1, 101):
        clock.now += 1.0
        panel.on_step(row(step))
    assert len(stuck.calls) > 10


def test_records_on_their_way_are_taken_in_later_and_in_order():
    clock, view = Clock(), CountingView()
    state = PanelState()
    panel = Panel(state, view=view, clock=clock)
    records = [on_its_way(step, float(step)) for step in range(1, 6)]
    for record in records:
        clock.now += 1.0
        panel.on_step(record)
    assert state.loss.count == 0
    for number in (2, 0, 1):  # the third arrives first, and waits for its elders
        records[number].late.here = True
        panel.refresh()
    assert state.loss.points() == ([1, 2, 3], [1.0, 2.0, 3.0])
    panel.on_end("interrupted")  # the last two never arrive: their steps count, their losses are left out
    assert state.step == 5
    assert state.tokens == 50
    assert state.loss.count == 3
    assert view.calls[-1] == (5, True)


def test_a_device_that_never_answers_does_not_fill_the_memory():
    clock = Clock()
    panel = Panel(PanelState(), view=CountingView(), clock=clock)
    for step in range(1, 10_001):
        clock.now += 0.01
        panel.on_step(on_its_way(step, 1.0))
    assert len(panel.run("")._waiting) <= 4097
    assert panel.state.step > 5_000


def test_a_view_that_fails_costs_one_warning_and_no_step():
    class Broken:
        every_s = 0.25

        def show(self, states, final):
            raise OSError("socket closed")

    clock, state = Clock(), PanelState()
    panel = Panel(state, view=Broken(), clock=clock)
    with warned(RuntimeWarning):
        panel.on_step(row(1))
    for step in range(2, 20):  # warnings are errors here: a second one would fail
        clock.now += 1.0
        panel.on_step(row(step))
    panel.on_end("done")
    assert state.step == 19  # what it knows stays right


def test_a_record_that_makes_no_sense_is_contained():
    panel = Panel(PanelState(), view=CountingView(), clock=Clock())
    with warned(RuntimeWarning):
        panel.on_step({"step": "three", "loss": object()})
    panel.on_end("done")


def test_an_interrupt_while_drawing_is_not_swallowed():
    class Interrupted:
        every_s = 0.25

        def show(self, states, final):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Panel(PanelState(), view=Interrupted(), clock=Clock()).on_step(row(1))


@pytest.mark.parametrize(
    ("reason", "line"),
    [
        ("done", "Done at step 3."),
        ("interrupted", "Interrupted after step 3. The next run() goes on from there."),
        ("stopped: by session.stop()", "Stopped after step 3: by session.stop(). The next run() goes on from there."),
        ("failed: OutOfMemoryError: 3 GiB", "Failed after step 3: OutOfMemoryError: 3 GiB"),
        ("stopped by a rule", "Ended after step 3: stopped by a rule"),
    ],
)
def test_the_final_picture_says_why(reason, line):
    screen = Screen()
    panel = Panel(PanelState("a", resumes=True), view=SvgView(display=screen), clock=Clock()).open()
    for step in range(1, 4):
        panel.on_step(row(step))
    panel.on_end(reason)
    for text in screen.shown[-1].values():
        assert line in text


def test_a_run_that_goes_on_opens_a_new_output_and_keeps_the_curve():
    screen, clock = Screen(), Clock()
    panel = Panel(PanelState(), view=SvgView(display=screen), clock=clock)
    panel.on_step(row(1))
    panel.on_end("interrupted")
    clock.now += 9.0
    panel.on_step(row(2))
    panel.on_end("done")
    assert screen.outputs == 2
    assert panel.state.loss.points()[0] == [1, 2]
    assert "Interrupted" not in screen.shown[-1]["text/plain"]


def test_an_open_panel_says_that_it_waits():
    screen = Screen()
    Panel(PanelState("fp8"), view=SvgView(display=screen), clock=Clock()).open()
    assert "waiting for the first step" in screen.shown[0]["image/svg+xml"]


def test_held_out_points_are_drawn():
    panel = Panel(PanelState(), view=CountingView(), clock=Clock())
    panel.on_step(row(1))
    panel.on_eval(1, 2.25)
    panel.on_end("done")
    assert "held out 2.250" in panel._repr_mimebundle_()["text/plain"]


def test_an_evaluation_after_the_end_opens_no_new_output():
    screen = Screen()
    panel = Panel(PanelState(), view=SvgView(display=screen), clock=Clock())
    panel.on_step(row(1))
    panel.on_end("done")
    panel.on_eval(1, 2.25)
    assert screen.outputs == 1
    panel.refresh()
    assert "held out 2.250" in repr(panel)


def test_a_new_plan_moves_the_end():
    panel = Panel(PanelState(total=500), view=CountingView(), clock=Clock())
    panel.on_start(60)
    panel.on_step(row(30))
    panel.refresh()
    assert "step 30 / 60" in repr(panel)
    panel.on_start(None)
    assert "step 30 ·" in repr(panel)


def test_a_resumed_run_counts_the_time_before():
    panel = Panel(PanelState(), view=CountingView(), clock=Clock())
    panel.on_step(row(501, elapsed_s=3600.0))
    panel.refresh()
    assert "1:00:00 elapsed" in repr(panel)


def test_warnings_reach_every_view():
    state = PanelState()
    state.add_row(row(1, loss=math.nan, skipped=1.0))
    assert all("skipped" in text for text in bundle(state).values())


def test_text_view_prints_lines_not_pictures():
    clock, stream = Clock(), io.StringIO()
    panel = Panel(PanelState("bf16", total=1_000), view=TextView(stream=stream), clock=clock).open()
    for step in range(1, 1_001):
        clock.now += 0.05
        panel.on_step(row(step, loss=math.nan if step == 9 else 2.0))
    panel.on_end("done")
    lines = stream.getvalue().splitlines()
    assert 10 <= len(lines) <= 13
    assert lines[0].startswith("bf16 · step 101 / 1,000")  # the first after five seconds
    assert "Done at step 1,000." in lines[-2]
    assert lines[-1] == "  ! loss not finite (NaN or infinite), at step 9"


def test_without_a_notebook_the_view_is_text(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not in_notebook()
    assert isinstance(best_view(), TextView)


@pytest.mark.parametrize(("kernel", "expected"), [(object(), True), (None, False)])
def test_a_kernel_makes_the_difference(monkeypatch, kernel, expected):
    class IPython:
        @staticmethod
        def get_ipython():
            return type("Shell", (), {"kernel": kernel})()

    monkeypatch.setitem(sys.modules, "IPython", IPython)
    assert in_notebook() == expected


def test_a_view_is_chosen_by_name(monkeypatch):
    assert isinstance(Panel(PanelState(), view="text")._view, TextView)
    assert isinstance(Panel(PanelState(), view="svg")._view, SvgView)
    assert isinstance(Panel(PanelState(), view="widget")._view, WidgetView)
    with refused(ValueError):
        Panel(PanelState(), view=cast(Any, "web"))
    monkeypatch.setattr(panel_module, "find_spec", lambda name: None)
    with refused(ModuleNotFoundError):
        Panel(PanelState(), view="widget")


class Kernel:
    """Stands for a kernel that works on a request."""

    def __init__(self, metadata):
        self.metadata = metadata

    def get_parent(self, channel):
        return {"metadata": self.metadata}


@pytest.mark.parametrize(
    ("metadata", "names", "expected"),
    [
        ({"cellId": "a"}, {}, WidgetView),  # JupyterLab, Notebook 7
        ({}, {}, SvgView),  # nbclient, papermill, a console
        ({"cellId": "a"}, {"__vsc_ipynb_file__": "/a.ipynb"}, SvgView),
    ],
)
def test_a_widget_only_where_it_is_drawn(monkeypatch, metadata, names, expected):
    shell = type("Shell", (), {"kernel": Kernel(metadata), "user_ns": names})()
    monkeypatch.setitem(sys.modules, "IPython", type("IPython", (), {"get_ipython": staticmethod(lambda: shell)}))
    assert isinstance(best_view(), expected)
    monkeypatch.setattr(front, "find_spec", lambda name: None)  # without anywidget
    assert isinstance(best_view(), SvgView)


class Asked:
    """Stands for a run's control."""

    def __init__(self):
        self.asked = []

    def __getattr__(self, name):
        if name == "save":
            raise ValueError("There is no folder.")
        return lambda *why: self.asked.append(" ".join((name, *why)))


def a_widget(**options):
    clock, notebook = Clock(), Notebook()
    view = WidgetView(display=notebook, clock=clock, **options)
    panel = Panel(PanelState("fp8", total=40), view=view, clock=clock).open()
    return panel, view, clock, notebook


def test_a_widget_opens_above_its_picture_and_ends_as_the_picture_alone():
    panel, view, clock, notebook = a_widget()
    drawn, static = notebook.outputs
    assert (set(drawn), drawn["text/plain"]) == ({front.WIDGET, "text/plain"}, "")
    assert set(static) == {"text/plain", "image/svg+xml"}
    widget = view.widget
    panel.on_start(40)
    for step in range(1, 41):
        clock.now += 1.0
        panel.on_step(row(step))
    panel.on_end("done")
    drawn, static = notebook.outputs
    assert drawn == {"text/plain": ""}  # no widget that nobody could draw
    assert set(static) == {"text/plain", "image/svg+xml"}
    assert f'data-panel="{widget.token}"' in static["image/svg+xml"]  # by which the page knows its own
    assert "Done at step 40." in static["text/plain"]
    head = json.loads(widget.head)
    assert head["final"]
    assert head["runs"][0]["ending"] == "Done at step 40."
    clock.now += 1.0
    panel.on_step(row(41))  # the run goes on: another widget, and another picture
    assert view.widget is not widget
    assert front.WIDGET in notebook.outputs[2]
    assert "step 41" in notebook.outputs[3]["text/plain"]
    assert notebook.outputs[:2] == [drawn, static]


def test_the_picture_in_the_notebook_is_the_run_at_most_half_a_minute_ago():
    panel, _, clock, notebook = a_widget()
    shown = lambda: notebook.outputs[1]["text/plain"]  # noqa: E731
    assert "waiting for the first step" in shown()
    panel.on_start(400)
    drawn: list[tuple[int, str]] = []
    for step in range(1, 101):
        clock.now += 1.0
        panel.on_step(row(step))
        if not drawn or shown() != drawn[-1][1]:
            drawn.append((step, shown()))
    assert all(f"step {step} / 400" in words for step, words in drawn)
    assert [step for step, _ in drawn] == [1, 31, 61, 91]
    panel.on_pause(True)  # how the run stands is drawn at once
    assert "step 100 / 400" in shown()
    assert "paused" in shown()
    panel.on_pause(False)
    assert "paused" not in shown()
    assert front.PICTURE_S == 30.0


def test_buttons_reach_the_control_of_the_run_that_goes_on():
    control = Asked()
    answers: list[dict[str, Any]] = []
    panel, view, _, _ = a_widget(control=control)
    widget = view.widget
    widget.send = answers.append
    for n, ask in enumerate(("hello", "pause", "resume", "save", "stop", "format the disk")):
        view.on_message(widget, {"ask": ask, "n": n})
    view.on_message(widget, "nonsense")
    assert control.asked == ["pause", "resume", "stop stopped: by the panel's button"]
    assert [a["n"] for a in answers] == [0, 1, 2, 3, 4]
    assert [a["error"] for a in answers] == ["", "", "", "There is no folder.", ""]
    panel.on_end("done")
    view.on_message(widget, {"ask": "stop", "n": 9})  # a click that comes late is no order to the next run
    assert control.asked == ["pause", "resume", "stop stopped: by the panel's button"]
    assert answers[-1] == {"n": 9, "error": "This run is over."}


def test_save_is_offered_where_there_is_a_folder():
    panel, view, clock, _ = a_widget(control=Asked())
    assert json.loads(view.widget.control)["can"] == ["stop", "pause"]
    panel.on_info(RunInfo(run_dir="runs/a"))
    clock.now += 1.0
    panel.on_step(row(1))
    assert json.loads(view.widget.control)["can"] == ["stop", "pause", "save"]
    assert json.loads(a_widget()[1].widget.control)["can"] == []


@pytest.mark.parametrize("steps", [20_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_messages_of_a_long_run_stay_in_their_budget(steps):
    panel, view, clock, _ = a_widget()
    sent, opened, widget = [], clock.now, view.widget
    widget.send_state = lambda key=None: sent.append((clock.now, {name: getattr(widget, name) for name in key or ()}))
    for step in range(1, steps + 1):
        clock.now += 0.0025
        panel.on_step(row(step, loss=2.0 + math.sin(step), lr=1e-3, grad_norm=1.0, peak_gib=3.0))
    assert len(sent) <= 4 * (clock.now - opened) + 1
    assert len(sent) > 3 * (clock.now - opened)
    assert max(len(json.dumps(texts)) for _, texts in sent) <= MESSAGE_BYTES
    held = sum(
        len(getattr(widget, name)) for name in widget.keys if name in ("head", "delta") or name.startswith("key_")
    )
    assert held < 200_000  # what a reloaded tab is given


def test_several_runs_on_one_panel_end_when_all_have():
    class View:
        every_s = 0.25

        def __init__(self):
            self.calls = []

        def show(self, states, final):
            self.calls.append(({name: state.step for name, state in states.items()}, final))

    clock, view = Clock(), View()
    panel = Panel({"a": PanelState("a"), "b": PanelState("b")}, view=view, clock=clock)
    for step in range(1, 4):
        clock.now += 1.0
        panel.run("a").on_step(row(step))
        panel.run("b").on_step(row(step))
    panel.run("a").on_end("done")
    assert not view.calls[-1][1]
    panel.run("b").on_end("done")
    assert view.calls[-1] == ({"a": 3, "b": 3}, True)
    count = len(view.calls)
    panel.refresh()  # the final picture stands
    assert len(view.calls) == count


def test_a_pause_is_run_time_as_in_the_summary():
    clock, view = Clock(), CountingView()
    panel = Panel(PanelState(), view=view, clock=clock)
    panel.on_start(10)
    clock.now += 2.0
    panel.on_pause(True)
    assert panel.state.paused
    assert len(view.calls) == 1  # shown at once
    clock.now += 100.0
    panel.on_pause(False)
    clock.now += 3.0
    panel.on_step(row(1))
    panel.on_end("done")
    assert panel.state.run_s == pytest.approx(105.0)


def test_turns_of_others_in_a_race_are_no_run_time():
    clock = Clock()
    panel = Panel(PanelState(), view=CountingView(), clock=clock)
    for resumes, run_s in ((False, 0.0), (True, 50.0)):
        panel.on_info(RunInfo(resumes=resumes))
        panel.on_start(10)
        clock.now += 50.0
        panel.on_step(row(1))
        panel.on_end("done")
        assert panel.state.run_s == pytest.approx(run_s)


def test_a_step_never_waits_for_a_thread_that_draws():
    inside, go_on = threading.Event(), threading.Event()

    class Slow:
        every_s = 0.25

        def show(self, states, final):
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                assert go_on.wait(30)

    clock = Clock()
    panel = Panel(PanelState(), view=Slow(), clock=clock)
    thread = threading.Thread(target=panel.refresh)
    thread.start()
    assert inside.wait(30)
    for step in range(1, 50):  # would hang if a step waited for the lock
        clock.now += 1.0
        panel.on_step(row(step))
    go_on.set()
    thread.join(30)
    panel.on_end("done")
    assert panel.state.step == 49


def test_repr_is_words():
    panel = Panel(PanelState("x"), view=CountingView(), clock=Clock())
    assert repr(panel) == "x · waiting for the first step"


def test_a_loss_curve_in_words():
    state = PanelState()
    for step in range(1, 200):
        state.add(step, loss=200.0 - step)
    line = summary_text(state).splitlines()[1]
    blocks = line.split()[3]
    assert len(blocks) == 48
    assert (blocks[0], blocks[-1]) == ("█", "▁")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (754, "12:34"), (11_100, "3:05:00"), (183_900, "2 d 03:05")]
)
def test_times(seconds, text):
    assert clock_time(seconds) == text


def test_cut():
    assert cut("a  b\nc", 10) == "a b c"
    assert cut("abcdefgh", 5) == "abcd…"
    assert cut("abc", 0) == ""


def test_drawing_warns_about_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bundle(wild(50))


def test_the_least_accurate_layers_are_listed_and_the_first_bad_one_stays():
    state = PanelState("run")
    sound = GemmReading(
        "model.layers.30.self_attn.with_a_long_name_indeed.q_proj", "grad_weight", 24.6, 0.0, 0.1234, 1, 1, 0, 1, 1
    )
    bad = sound._replace(layer="b", gemm="forward", sqnr_db=-math.inf, clipped=0.021, bad="2.1 % clipped")
    panel = Panel(state, view=TextView(stream=io.StringIO()))
    assert layer_lines(state) == []
    panel.on_sample(Sample(1_240, (sound, bad)))
    panel.on_sample(Sample(1_260, (sound, bad._replace(layer="c"), sound, sound)))
    lines = layer_lines(state)
    assert lines[:2] == [
        "Least accurate products, step 1,260",
        "  c forward · -inf dB · 2.1 % clipped · 12 % underflow",
    ]
    assert len(lines) == 4
    assert all(len(line) <= 80 for line in lines)
    assert lines[2].endswith("q_proj grad_weight · 24.6 dB · 0 % clipped · 12 % underflow")
    assert state.warning_lines() == ["first to go bad: b forward, step 1,240: 2.1 % clipped"]
    svg = picture(state)
    ElementTree.fromstring(svg)
    assert "Least accurate products" in svg
    assert "first to go bad: b forward" in svg
    assert len(svg) < MESSAGE_BYTES


def test_sustained_figures_are_a_line_of_picture_and_words():
    clock = Clock()
    panel = Panel(PanelState(), view=CountingView(), clock=clock)
    panel.on_start(100)
    assert sustained_lines(panel.state) == []
    for step in range(1, 101):
        clock.now += 0.1
        panel.on_step(row(step, wall_ms=100.0, tokens=100, idle_frac=0.0, stall_ms=0.0))
    clock.now += 10.0  # an evaluation
    panel.on_end("done")
    (line,) = sustained_lines(panel.state)
    assert line == "Tokens/s: 1 s 1,000, all 1,000 · goodput 50.0 % · 10 s lost"
    assert line in summary_text(panel.state)
    assert line in picture(panel.state)
    clock.now += 1000.0  # between two runs nothing is lost
    panel.on_start(200)
    clock.now += 20.0
    panel.on_end("done")
    assert sustained_lines(panel.state) == ["Tokens/s: 1 s 1,000, all 1,000 · goodput 25.0 % · 30 s lost"]


def test_lost_time_reads_in_hours_when_it_is_long():
    state = PanelState()
    for step in range(1, 5):
        state.add(step, seconds=3600.0, idle=0.25, stall=900.0)
    assert sustained_lines(state) == [
        "Steps/s: 1 s 2.78e-4, 1 min 2.78e-4, 10 min 2.78e-4, all 2.78e-4 · goodput 75.0 % · 1 h lost"
    ]
