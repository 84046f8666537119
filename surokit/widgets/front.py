"""This module shows the panel as a widget: a Wire's messages go to a page, and clicks there go to a run's control.

The page's part is front/panel.js and front/panel.css, plain files without a build, sent once when a widget opens; nothing is
fetched. anywidget carries them, and is imported when a widget opens.

A click must reach Python while a cell trains. JupyterLab sends widgets' messages to a subshell of the kernel (a thread of
its own), but ipykernel 7.4 moves an answer to the loop that last wrote to the widget, here the busy cell's. The panel is asked and
asks nothing, so it switches that off for its own messages (`answer_where_asked`): handlers then run in the subshell's thread.
Where there are no subshells a click arrives when the cell awaits or ends; the page notices that nobody answers and says how to stop
instead.

Two outputs stand in the cell: the widget, and below it a static picture for whoever reads the saved notebook. The picture is
renewed in mid-run, and the page's part hides it where that draws. (One output for both would be drawn anew with each picture, the
panel too.) When a run ends the widget's output becomes empty, so that the notebook holds no widget that nobody could draw; in the
open tab the panel takes the picture's place.
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from typing import Any, Protocol

from surokit.widgets import protocol
from surokit.widgets.figure import Theme
from surokit.widgets.messages import SLOTS, Wire
from surokit.widgets.picture import Bundle, bundle
from surokit.widgets.state import REPLACED, PanelState

LAST = SLOTS  # further messages at the end of a run, at most: a keyframe for each curve that is still coarse
PICTURE_S = 30.0  # how old the picture in the notebook may be while a run goes on
BY_BUTTON = "stopped: by the panel's button"
WIDGET = "application/vnd.jupyter.widget-view+json"


OVER = "This run is over."
TAKEN_OVER = "A newer panel of this run has taken over: use its buttons."


class Controls(Protocol):
    """A Controls has the methods behind the buttons; each returns at once, from any thread."""

    def stop(self, reason: str = ...) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def save(self) -> None: ...


def draws_widgets() -> bool:
    """Return whether the cell that runs came from JupyterLab or Notebook 7, and anywidget is installed.

    They are known by the cell's id, which they write into a request; nbclient and consoles do not. VS Code and Colab write it
    too, or something like it, but fetch widgets' scripts from elsewhere.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    kernel = getattr(shell, "kernel", None)
    if (
        shell is None
        or kernel is None
        or "google.colab" in sys.modules
        or any(name.startswith("__vsc") for name in shell.user_ns)
    ):
        return False
    return "cellId" in kernel.get_parent("shell").get("metadata", {}) and find_spec("anywidget") is not None


class WidgetView:
    """A WidgetView shows states in a widget that lives as long as a run; the next run opens another, in the cell that runs then.

    control: the methods behind the buttons; None: no buttons. display: IPython's, or a test's. clock: seconds, monotonic.
    """

    def __init__(
        self,
        control: Controls | None = None,
        every_s: float = 0.25,
        theme: Theme = "auto",
        display: Callable[..., Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.every_s = every_s
        self.theme: Theme = theme
        self._control = control
        self._display = display
        self._clock = clock
        self.widget: Any = None
        self._wire: Wire | None = None
        self._output: Any = None  # the widget's
        self._picture: Any = None
        self._pictured: list[str] = []  # the standings of the runs when it was drawn
        self._picture_due_s = 0.0
        self._token = ""
        self._late = OVER  # the error that answers the page of an earlier widget

    def show(self, states: Mapping[str, PanelState], final: bool) -> None:
        """Send what is new. Renew the static picture if a run's standing has changed or the picture is old. final: renew it for the
        last time, and empty the widget's output."""
        if self.widget is None:
            self._open(states)
        self.widget.control = json.dumps(self._controls(states))
        renewed = self._send(final)
        for _ in range(LAST if final else 0):  # curves that are still coarse, as those of a short run are
            if not renewed:
                break
            renewed = self._send(final)
        if final or self._standings(states) != self._pictured or self._clock() >= self._picture_due_s:
            self._picture.update(self._drawn(states), raw=True)
        if final:
            self._late = TAKEN_OVER if any(state.reason == REPLACED for state in states.values()) else OVER
            self._output.update({"text/plain": ""}, raw=True)
            self.widget = self._wire = self._output = self._picture = None

    def _send(self, final: bool) -> bool:
        """Send one message, and return whether it holds a keyframe, so that there may be more to send."""
        texts = self._wire.next(final) if self._wire is not None else {}
        with self.widget.hold_sync():  # one message
            for name, text in texts.items():
                setattr(self.widget, name, text)
        return any(name.startswith("key_") for name in texts)

    def _open(self, states: Mapping[str, PanelState]) -> None:
        if self._display is None:
            from IPython.display import display

            self._display = display
        self._token = f"surokit-{uuid.uuid4().hex[:12]}"
        self._wire = Wire(states)
        self.widget = widget = _widget_class()(token=self._token, control=json.dumps(self._controls(states)))
        widget.on_msg(lambda _widget, content, _buffers: self.on_message(widget, content))
        answer_where_asked(widget.comm)
        self._send(False)
        view = {"model_id": widget.model_id, "version_major": 2, "version_minor": 1}
        self._output = self._display({WIDGET: view, "text/plain": ""}, raw=True, display_id=True)
        self._picture = self._display(self._drawn(states), raw=True, display_id=True)

    def _drawn(self, states: Mapping[str, PanelState]) -> Bundle:
        """Return the picture as it is now, with the token by which the page's script recognizes it."""
        self._pictured = self._standings(states)
        self._picture_due_s = self._clock() + PICTURE_S
        message = bundle(shown(states), self.theme)
        return {
            **message,
            "image/svg+xml": message["image/svg+xml"].replace("<svg ", f'<svg data-panel="{self._token}" ', 1),
        }

    @staticmethod
    def _standings(states: Mapping[str, PanelState]) -> list[str]:
        return [state.standing for state in states.values()]

    def _controls(self, states: Mapping[str, PanelState]) -> dict[str, Any]:
        saves = any(state.info is not None and state.info.run_dir is not None for state in states.values())
        can = [] if self._control is None else ["stop", "pause", *(["save"] if saves else [])]
        return {"can": can, "theme": self.theme}

    def on_message(self, widget: Any, content: Any) -> None:
        """Handle a message of the page (protocol.py), and send its answer."""
        ask, n = protocol.question(content)
        error = self._late if widget is not self.widget else OVER if self._control is None else ""
        if not ask:
            return
        if ask == protocol.HELLO:
            error = error if error == TAKEN_OVER else ""
        elif self._control is not None and not error:
            try:
                self._control.stop(BY_BUTTON) if ask == "stop" else getattr(self._control, ask)()
            except Exception as failed:
                error = str(failed) or type(failed).__name__
        widget.send(protocol.answer(n, error))


def shown(states: Mapping[str, PanelState]) -> Any:
    """Return the one state if there is no other, else all of them by name: a picture is drawn of either."""
    return next(iter(states.values())) if len(states) == 1 else states


def answer_where_asked(comm: Any) -> None:
    """Let a page's message be handled in the thread that the front end sent it to, also while the cell that drew the panel runs.

    ipykernel 7.4 has no public way to say so: it asks the comm's method `_reply_subshell_for` for the thread, and takes the one
    in the message if that is None. Older ones have no such method and need nothing. If a newer one names it otherwise, a click
    waits for the cell, and the page says how to stop instead.
    """
    with suppress(AttributeError):
        if comm._reply_subshell_for is not None:
            comm._reply_subshell_for = None


@cache
def _widget_class() -> type:
    """Return the widget's class: one synchronized text for each name of the wire's, for what the buttons can do, and the token."""
    import anywidget
    import traitlets

    folder = files("surokit.widgets") / "front"
    names = ["token", "control", "head", "delta", *(f"key_{k}" for k in range(SLOTS))]
    texts: dict[str, Any] = {name: traitlets.Unicode("").tag(sync=True) for name in names}
    script, style = ((folder / name).read_text("utf-8") for name in ("panel.js", "panel.css"))
    sources = {"_esm": protocol.to_page() + script, "_css": style}
    return type("PanelWidget", (anywidget.AnyWidget,), {**sources, **texts})
