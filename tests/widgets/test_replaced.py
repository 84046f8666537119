"""A panel whose run goes on in a newer one; and what the buttons need of the notebook's kernel."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from surokit.train import Session
from surokit.widgets.front import TAKEN_OVER, WidgetView, answer_where_asked
from surokit.widgets.panel import Panel
from surokit.widgets.state import PanelState
from tests.widgets.toys import Notebook

pytest.importorskip("anywidget")


class Control:
    """Stands for a run's control: takes down what it is asked."""

    def __init__(self):
        self.asked = []

    def __getattr__(self, name):
        return lambda *why: self.asked.append(name)


def opened():
    control, notebook = Control(), Notebook()
    view = WidgetView(control, display=notebook)
    panel = Panel(PanelState("fp8", total=40), view=view).open()
    widget = view.widget
    answers: list[dict[str, Any]] = []
    widget.send = answers.append
    return panel, view, widget, control, notebook, answers


def test_a_click_on_a_replaced_panel_is_told_where_the_run_is_now():
    panel, view, widget, control, notebook, answers = opened()
    panel.on_start(40)
    panel.on_step({"step": 3, "loss": 2.0, "wall_ms": 10.0})
    panel.close()
    for n, ask in enumerate(("hello", "stop", "pause", "resume", "save")):
        view.on_message(widget, {"ask": ask, "n": n})
    assert answers == [{"n": n, "error": TAKEN_OVER} for n in range(5)]
    assert control.asked == []
    head = json.loads(widget.head)
    assert (head["runs"][0]["state"], head["runs"][0]["ending"]) == (
        "replaced",
        "A newer panel has taken over at step 3.",
    )
    assert head["final"]
    assert "A newer panel has taken over at step 3." in notebook.outputs[1]["text/plain"]
    assert notebook.outputs[0] == {"text/plain": ""}


def test_a_panel_whose_run_has_ended_keeps_its_end():
    panel, view, widget, control, notebook, answers = opened()
    panel.on_step({"step": 3, "loss": 2.0, "wall_ms": 10.0})
    panel.on_end("done")
    panel.close()
    view.on_message(widget, {"ask": "hello", "n": 1})
    view.on_message(widget, {"ask": "stop", "n": 2})
    assert answers == [{"n": 1, "error": ""}, {"n": 2, "error": "This run is over."}]
    assert control.asked == []
    assert "Done at step 3." in notebook.outputs[1]["text/plain"]


def test_a_second_live_takes_over_in_the_middle_of_a_run(tiny, batch, monkeypatch):
    views: list[Any] = []

    def view(kind, control, every_s, theme):
        views.append(WidgetView(control, display=Notebook()))
        return views[-1]

    monkeypatch.setattr("surokit.widgets.panel._view", view)
    begun = threading.Event()

    def first(session):
        begun.set()
        return {}

    session = Session(tiny, [batch], schedule=None, compile=False, meters=[first])
    session.live()
    running = session.run(1_000_000, thread=True)
    begun.wait()
    widgets = [views[0].widget]
    answers: list[dict[str, Any]] = []
    session.live()
    widgets.append(views[1].widget)
    for n, (each, widget) in enumerate(zip(views, widgets)):
        widget.send = answers.append
        each.on_message(widget, {"ask": "stop", "n": n})
        assert n or running.running
    running.wait()
    assert answers == [{"n": 0, "error": TAKEN_OVER}, {"n": 1, "error": ""}]
    assert 0 < session.steps < 1_000_000


class Comm:
    """As ipykernel 7.4's: the kernel asks it which thread shall take an answer."""

    def _reply_subshell_for(self, data, default):
        return "the busy one"


def route(comm, default):
    """What ipykernel does with a message to a comm."""
    asked = getattr(comm, "_reply_subshell_for", None)
    return default if asked is None else asked({}, default)


def test_a_message_is_handled_where_the_front_end_sent_it():
    comm = Comm()
    assert route(comm, "its own") == "the busy one"
    answer_where_asked(comm)
    assert route(comm, "its own") == "its own"


def test_the_kernel_that_is_installed_asks_a_comm_by_that_name():
    comm = pytest.importorskip("ipykernel.comm.comm")
    base = pytest.importorskip("ipykernel.kernelbase")
    if not hasattr(comm.BaseComm, "_reply_subshell_for"):
        pytest.skip("this ipykernel leaves messages where they were sent")
    assert "_reply_subshell_for" in base.Kernel.shell_channel_thread_main.__code__.co_consts


@pytest.mark.parametrize(
    "comm",
    [
        None,  # no front end
        object(),  # one without the method, older or with another name, that takes no attributes
        type("Fixed", (), {"_reply_subshell_for": property(lambda self: "may not be set")})(),
    ],
    ids=["none", "renamed", "fixed"],
)
def test_where_it_cannot_be_said_the_panel_opens_all_the_same(comm):
    answer_where_asked(comm)  # and the page says how to stop: tests/browser has that
    assert not hasattr(comm, "_reply_subshell_for") or comm._reply_subshell_for == "may not be set"
