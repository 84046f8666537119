"""The live panel is a subscriber that keeps a state and shows it, without ever holding up a step.

`on_step` puts the record on a list and, when a redraw is due, takes in what has resolved and sends one picture. A
record whose loss is still on its way waits on the list; nothing waits for it. Redraws are throttled by time: at most
four a second, and fewer where a picture is dear, so that drawing stays under half a percent of the run. The last
picture is always sent.

Three views of the one state. In JupyterLab and Notebook 7 a widget (`front`), drawn in the page from small messages. In other
notebooks (nbclient, VS Code, Colab) an SVG under a display id, updated in place, with the same words as plain text in the
bundle. Anywhere else a line of text every few seconds. What is left in a notebook's output is static in any case, so an
exported or reopened notebook shows the curve with no kernel and no script. A view that fails is dropped with one warning;
the run goes on.

A panel may show several runs, of a race or of run folders. Runs may train in a thread while the notebook's own thread asks for a
refresh: one draws at a time, and a step never waits for the other.
"""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, Protocol, TextIO

from surokit.widgets.figure import Theme
from surokit.widgets.front import Controls, WidgetView, draws_widgets, shown
from surokit.widgets.picture import Bundle, bundle, headline, summary_line, summary_text
from surokit.widgets.state import REPLACED, PanelState

if TYPE_CHECKING:
    from surokit.runs.health import Event, Phase

UPDATES_A_SECOND = 4
DRAWING_SHARE = 0.005  # of the run's wall time, at most
SLOWEST_S = 5.0  # between two pictures, however dear they are
WORST_LAYERS = 3
WAITING = 2048  # records whose loss is on its way; beyond it the oldest is taken in without

ViewName = Literal["auto", "widget", "svg", "text"]


class View(Protocol):
    """A View shows states, by the names of their runs. `every_s` is the shortest time between two calls of `show`, in seconds."""

    every_s: float

    def show(self, states: Mapping[str, PanelState], final: bool) -> None: ...


class Run:
    """A Run is the subscriber of one run on a panel. It can also be fed by hand: on_step(record), on_end(reason)."""

    def __init__(self, panel: Panel, state: PanelState) -> None:
        self.state = state
        self._panel = panel
        self._waiting: deque[Any] = deque()
        self._began_s: float | None = None  # when the present stretch of the run began
        self._ran_s = 0.0  # seconds of the stretches before it

    def on_info(self, info: Any) -> None:
        """Note the RunInfo that describes the run; what it had run when the first one came is no time of the panel's."""
        if self.state.info is None:
            self.state.before_s = info.ran_s
        self.state.info = info

    def on_start(self, total: int | None) -> None:
        """Note that a run begins, planned to end at step `total`; None if it is planned by time."""
        self.state.total = total
        alone = self.state.info is None or self.state.info.resumes  # in a race, the turns of others do not count
        self._began_s = self._panel.clock() if alone else None
        self._panel.tick(now=True)  # show the notes so far, such as compiling: the first step may take long

    def on_step(self, record: Any) -> None:
        """Note one step, and redraw if it is time. record: a Record, or a mapping with columns of `records.frame()`."""
        self._waiting.append(record)
        if self.state.reason is not None:
            self.state.reason, self._panel.ended = None, False  # the run goes on
        self._panel.tick(len(self._waiting) > 2 * WAITING)

    def on_eval(self, step: int, loss: float) -> None:
        """Note a held-out loss measured after `step`; after the end of a run it waits for the next picture."""
        self._waiting.append({"step": step, "eval_loss": loss})
        if self.state.reason is None:
            self._panel.tick()

    def on_sample(self, sample: Any) -> None:
        """Note what `surokit.numerics` measured in a step: its worst layers, and the first that went bad."""
        first_bad = sample.first_bad_after(self.state.first_bad)
        self.state.add_layers(sample.step, sample.worst(WORST_LAYERS), first_bad)

    def on_note(self, step: int, text: str) -> None:
        """Mark a step with a line of the user's own."""
        self.state.note(step, text)
        self._show_news()

    def on_event(self, event: Event) -> None:
        """Note an event that health does not see."""
        self.state.happened(event)
        self._show_news()

    def on_health(self, phase: Phase, events: Sequence[Event]) -> None:
        """Take the run's phase, and the events of the step that follows, from a judge outside: the panel judges no more itself."""
        self.state.take_health(phase, events)

    def _show_news(self) -> None:
        self._panel.news = True
        self._panel.tick()

    def on_pause(self, paused: bool) -> None:
        """Show at once that the run waits between two steps, or goes on. That time counts in goodput, as in `summary()`."""
        self.state.paused = paused
        self._panel.refresh()

    def on_end(self, reason: str) -> None:
        """Take in what is there and leave the final picture. reason: "done", "interrupted", "stopped: ..." or "failed: ..."."""
        self.state.reason = reason
        self.state.paused = False
        self._ran_s, self._began_s = self.run_s(), None
        self._panel.refresh()

    def run_s(self) -> float:
        """Return the seconds that the run has run so far."""
        return self._ran_s + (0.0 if self._began_s is None else self._panel.clock() - self._began_s)

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    def take_in(self, everything: bool) -> None:
        """Move what has arrived from the waiting list into the state, in order."""
        waiting, state = self._waiting, self.state
        state.run_s = max(state.run_s, self.run_s())
        while waiting:
            record = waiting[0]
            if isinstance(record, Mapping):
                state.add_row(waiting.popleft(), default_step=state.step + 1)
                continue
            ready = record.late.ready()
            if not (ready or everything or len(waiting) > WAITING):
                return
            late = record.late.wait() if ready else {}
            state.add_record(record, late)
            waiting.popleft()


class Panel:
    """A Panel shows the Session it subscribes to, `session.subscribe(Panel(state))`; one of several runs has a subscriber for each,
    `panel.run(name)`.

    states: one state, or states by the names of their runs, which may gain entries later. view: how they are shown; "auto" or None
    chooses by the front end (`best_view`). control: the methods behind the widget's buttons. clock: seconds, monotonic.
    A Panel is also a picture of its states: as the last expression of a cell it shows itself, finished runs included.
    """

    def __init__(
        self,
        states: PanelState | Mapping[str, PanelState],
        *,
        view: View | ViewName | None = "auto",
        control: Controls | None = None,
        every_s: float = 0.25,
        clock: Callable[[], float] = time.perf_counter,
        theme: Theme = "auto",
    ) -> None:
        self.states = {states.title: states} if isinstance(states, PanelState) else states
        self.clock = clock
        self.news = False  # besides the records that wait
        self.ends = True  # the picture is final once every run has ended; False: when somebody says so
        self._view: View | None = _view(view or "auto", control, every_s, theme)
        self._theme: Theme = theme
        self._runs: dict[str, Run] = {}
        self._drawing = threading.RLock()
        self._due_s = -float("inf")
        self.ended = False  # the final picture stands
        self._warned = False
        if isinstance(states, PanelState):
            run = self.run(states.title)
            self.on_info, self.on_start, self.on_step, self.on_eval = (
                run.on_info,
                run.on_start,
                run.on_step,
                run.on_eval,
            )
            self.on_sample, self.on_note, self.on_event = run.on_sample, run.on_note, run.on_event
            self.on_pause, self.on_end, self.on_health = run.on_pause, run.on_end, run.on_health

    @property
    def state(self) -> PanelState:
        """Return the first run's state."""
        return next(iter(self.states.values()))

    def run(self, name: str) -> Run:
        """Return the subscriber of the run of that name."""
        run = self._runs.get(name)
        if run is None or run.state is not self.states[name]:
            run = self._runs[name] = Run(self, self.states[name])
        return run

    def open(self) -> Panel:
        """Show the empty panel at once, where the cursor is now."""
        with self._drawing:
            self._update()
            # the cost of opening, imports above all, does not count as drawing time
            self._due_s = self.clock() + (self._view.every_s if self._view is not None else 0.0)
        return self

    def tick(self, now: bool = False) -> None:
        """Redraw if it is time and there is news. now: do not ask whether it is time. Never waits: while another thread draws, this
        call does nothing, and a later one redraws."""
        if not now and self.clock() < self._due_s:
            return
        if not (self.news or any(run.waiting for run in self._runs.values())):
            return
        if self._drawing.acquire(blocking=False):
            try:
                self._update()
            finally:
                self._drawing.release()

    def refresh(self, final: bool = False) -> None:
        """Take in the resolved records and redraw now, throttle or not; final if asked for, or once all runs have ended."""
        with self._drawing:
            self._update(final)

    def close(self) -> None:
        """Close the panel because another takes its place: the last picture says so and stays, and nothing is drawn after it."""
        with self._drawing:
            for state in self.states.values():
                state.reason = state.reason or REPLACED
            self._update(final=True)
            self._view = None

    def _update(self, final: bool = False) -> None:
        started = self.clock()
        final = final or (self.ends and bool(self.states) and all(s.reason is not None for s in self.states.values()))
        over, self.ended = self.ended and final, final
        self.news = False
        try:
            for run in list(self._runs.values()):
                run.take_in(run.state.reason is not None)
            if self._view is not None and not over:
                self._view.show(self.states, final)
        except Exception as error:
            self._view = None
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"The live panel stopped drawing ({type(error).__name__}: {error}); the run and its records go on.",
                    RuntimeWarning,
                    stacklevel=4,
                )
        every_s = self._view.every_s if self._view is not None else 1.0
        ended = self.clock()
        # A slow front end gets fewer pictures, but never less than one in five seconds.
        self._due_s = ended + max(every_s, 1.0 / UPDATES_A_SECOND, min((ended - started) / DRAWING_SHARE, SLOWEST_S))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Bundle:
        return bundle(shown(self.states), self._theme)

    def __repr__(self) -> str:
        return summary_text(shown(self.states))


# --- Views ---


def in_notebook() -> bool:
    """Return whether an IPython kernel runs this process. Imports nothing."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def best_view(every_s: float = 0.25, theme: Theme = "auto", control: Controls | None = None) -> View:
    """Return the widget where the front end draws widgets, the SVG view in other notebooks, the text view elsewhere."""
    if not in_notebook():
        return TextView()
    return WidgetView(control, every_s, theme) if draws_widgets() else SvgView(every_s, theme)


def _view(view: View | ViewName, control: Controls | None, every_s: float, theme: Theme) -> View:
    if not isinstance(view, str):
        return view
    if view == "auto":
        return best_view(every_s, theme, control)
    if view == "widget":
        if find_spec("anywidget") is None:
            raise ModuleNotFoundError('view="widget" needs anywidget: pip install anywidget, or take view="svg".')
        return WidgetView(control, every_s, theme)
    if view == "svg":
        return SvgView(every_s, theme)
    if view == "text":
        return TextView()
    raise ValueError(f'view={view!r}: it is "auto", "widget", "svg" or "text".')


class SvgView:
    """An SvgView shows an SVG under a display id. After a final picture the next `show` opens a new one, in the cell that runs."""

    def __init__(self, every_s: float = 0.25, theme: Theme = "auto", display: Callable[..., Any] | None = None) -> None:
        self.every_s = every_s
        self.theme: Theme = theme
        self._display = display
        self._handle: Any = None

    def show(self, states: Mapping[str, PanelState], final: bool) -> None:
        content = bundle(shown(states), self.theme)
        if self._handle is None:
            if self._display is None:
                from IPython.display import display

                self._display = display
            self._handle = self._display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)
        if final:
            self._handle = None


class TextView:
    """A TextView prints one line a run to stderr every few seconds, and one at the end."""

    def __init__(self, every_s: float = 5.0, stream: TextIO | None = None) -> None:
        self.every_s = every_s
        self.stream = stream

    def show(self, states: Mapping[str, PanelState], final: bool) -> None:
        if head := headline(states):
            print(head, file=self.stream or sys.stderr, flush=True)
        for state in states.values():
            if state.first_step is None and not (final and state.reason):
                continue
            line = summary_line(state)
            for warning in state.warning_lines() if final else []:
                line += f"\n  ! {warning}"
            print(line, file=self.stream or sys.stderr, flush=True)
