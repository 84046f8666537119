"""The live panel: a subscriber that keeps a `PanelState` and shows it, without ever holding up a step.

`on_step` puts the record on a list and, when a redraw is due, takes in what has resolved and sends one picture. A
record whose loss is still on its way waits on the list; nothing waits for it. Redraws are throttled by time: at most
four a second, and fewer where a picture is dear, so that drawing stays under half a percent of the run. The last
picture is always sent.

Two views of the one state. In a notebook (JupyterLab, nbclient, VS Code): an SVG under a display id, updated in place,
with the same words as plain text in the bundle; what is left in the output is static, so an exported or reopened
notebook shows the curve with no kernel and no script. Anywhere else: a line of text every few seconds. A view that
fails is dropped with one warning; the run goes on.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from textwrap import wrap
from typing import Any, Literal, Protocol, TextIO

from surokit.widgets.figure import Line, Pane, Theme, figure, short
from surokit.widgets.state import PanelState, Series

Bundle = dict[str, str]

UPDATES_A_SECOND = 4
MESSAGE_BYTES = 20_000
DRAWING_SHARE = 0.005  # of the run's wall time, at most
WORST_LAYERS = 3
WAITING = 2048  # records whose loss is on its way; beyond it the oldest is taken in without


class View(Protocol):
    """Where a state is shown. `every_s` is the shortest time between two calls of `show`."""

    every_s: float

    def show(self, state: PanelState, final: bool) -> None: ...


class Panel:
    """Subscribes to a Session: `session.subscribe(Panel(state))`. Plain enough to be fed by hand: on_step(record),
    on_end(reason).

    view: a View, or None to choose by what is running (`best_view`). clock: seconds, monotonic.
    A Panel is also a picture of its state: as the last expression of a cell it shows itself, finished runs included.
    """

    def __init__(
        self,
        state: PanelState,
        *,
        view: View | None = None,
        every_s: float = 0.25,
        clock: Callable[[], float] = time.perf_counter,
        theme: Theme = "auto",
    ) -> None:
        self.state = state
        self._view: View | None = view if view is not None else best_view(every_s, theme)
        self._clock = clock
        self._theme: Theme = theme
        self._waiting: deque[Any] = deque()
        self._due_s = -float("inf")
        self._began_s: float | None = None  # of the run that goes on
        self._ran_s = 0.0  # of those before it
        self._warned = False

    def open(self) -> Panel:
        """Show the empty panel at once, where the cursor is now."""
        self._update(final=False)
        return self

    def on_start(self, total: int | None) -> None:
        """The run that begins now is planned to end at step `total`; None where it is planned by time."""
        self.state.total = total
        self._began_s = self._clock()

    def on_step(self, record: Any) -> None:
        """Note one step and redraw if it is time. record: a Record, or a mapping with columns of `records.frame()`."""
        self._waiting.append(record)
        if self.state.reason is not None:
            self.state.reason = None  # the run goes on
        self.tick()

    def tick(self) -> None:
        """Redraw if it is time and there is news."""
        if self._waiting and (self._clock() >= self._due_s or len(self._waiting) > 2 * WAITING):
            self._update(final=False)

    def on_eval(self, step: int, loss: float) -> None:
        """Note a held-out loss measured after `step`; after the end of a run it waits for the next picture."""
        self._waiting.append({"step": step, "eval_loss": loss})
        if self.state.reason is None:
            self.tick()

    def on_sample(self, sample: Any) -> None:
        """Note what `surokit.numerics` measured in a step: its worst layers, and the first that went bad."""
        first_bad = sample.first_bad_after(self.state.first_bad)
        self.state.add_layers(sample.step, sample.worst(WORST_LAYERS), first_bad)

    def on_end(self, reason: str) -> None:
        """Take in what is there and leave the final picture. reason: "done", "interrupted" or "failed: ..."."""
        self.state.reason = reason
        self._ran_s, self._began_s = self._run_s(), None
        self._update(final=True)

    def refresh(self) -> None:
        """Take in the resolved records and redraw now, whatever the throttle says."""
        self._update(final=self.state.reason is not None)

    def _update(self, final: bool) -> None:
        started = self._clock()
        self.state.run_s = self._run_s()
        try:
            self._take_in(final)
            if self._view is not None:
                self._view.show(self.state, final)
        except Exception as error:
            self._view = None
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"The live panel stopped drawing ({type(error).__name__}: {error}); the run and its records go on.",
                    RuntimeWarning,
                    stacklevel=3,
                )
        every_s = self._view.every_s if self._view is not None else 1.0
        ended = self._clock()
        # A slow front end gets fewer pictures, but never less than one in five seconds.
        self._due_s = ended + max(every_s, 1.0 / UPDATES_A_SECOND, min((ended - started) / DRAWING_SHARE, 5.0))

    def _run_s(self) -> float:
        return self._ran_s + (0.0 if self._began_s is None else self._clock() - self._began_s)

    def _take_in(self, everything: bool) -> None:
        """Move what has arrived from the waiting list into the state, in order."""
        waiting, state = self._waiting, self.state
        while waiting:
            record = waiting[0]
            if isinstance(record, Mapping):
                state.add_row(waiting.popleft(), default_step=state.step + 1)
                continue
            ready = record.late.ready()
            if not (ready or everything or len(waiting) > WAITING):
                return
            late = record.late.wait() if ready else {}
            state.add(
                record.step,
                loss=late.get("loss"),
                tokens=record.tokens,
                seconds=record.wall_ms / 1e3,
                elapsed=record.elapsed_s,
                idle=late.get("idle_frac"),
                skipped=late.get("skipped", 0.0) != 0.0,
                stall=record.stall_ms / 1e3,
            )
            waiting.popleft()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Bundle:
        return bundle(self.state, self._theme)

    def __repr__(self) -> str:
        return summary_text(self.state)


# --- Views ---


def front_end() -> Literal["notebook", "text"]:
    """Where output goes: "notebook" when an IPython kernel runs this process, else "text". Imports nothing."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return "notebook" if getattr(shell, "kernel", None) is not None else "text"


def best_view(every_s: float = 0.25, theme: Theme = "auto") -> View:
    """The SVG view in a notebook, the text view elsewhere."""
    return SvgView(every_s, theme) if front_end() == "notebook" else TextView()


class SvgView:
    """An SVG under a display id. After a final picture the next `show` opens a new one, in the cell that goes on."""

    def __init__(self, every_s: float = 0.25, theme: Theme = "auto", display: Callable[..., Any] | None = None) -> None:
        self.every_s = every_s
        self.theme: Theme = theme
        self._display = display
        self._handle: Any = None

    def show(self, state: PanelState, final: bool) -> None:
        content = bundle(state, self.theme)
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
    """One line every few seconds on stderr, and one at the end."""

    def __init__(self, every_s: float = 5.0, stream: TextIO | None = None) -> None:
        self.every_s = every_s
        self.stream = stream

    def show(self, state: PanelState, final: bool) -> None:
        if state.first_step is None and not final:
            return
        line = summary_line(state)
        for warning in state.warning_lines() if final else []:
            line += f"\n  ! {warning}"
        print(line, file=self.stream or sys.stderr, flush=True)


# --- What a state looks like ---


def bundle(state: PanelState, theme: Theme = "auto") -> Bundle:
    """The state as one display message: the picture and the same facts in words. At most MESSAGE_BYTES long."""
    return {"text/plain": summary_text(state), "image/svg+xml": picture(state, theme)}


def picture(state: PanelState, theme: Theme = "auto") -> str:
    """The panel as SVG: loss on top, tokens/s and idle share below, warnings and the reason of the end at the foot."""
    first = float(state.first_step or 0)
    first = 0.0 if first == 1.0 else first  # so that the axis starts with a label
    last = float(max(state.total or 0, state.step, first + 1))
    # The frame opens at the planned length once a tenth of it has run; before, the curve would be a dot in a corner.
    if state.total and state.reason is None and state.step - first < 0.1 * (state.total - first):
        last = first + max(10.0, 10 * (state.step - first))
        last = min(last, float(state.total))
    if state.reason is not None:
        last = max(float(state.step), first + 1)
    span = (first, last)

    held_out = f"held out {_loss(state.held_out)}" if state.held_out.last else ""
    panes = [
        Pane(
            "Loss",
            [
                _line("each step", state.loss, "faint", 0),
                _line("smoothed", state.loss_mean, "line", 0),
                _line("held out", state.held_out, "dots", 1),
            ],
            headline=_loss(state.loss_mean),
            note=held_out,
            height=190,
            x_range=span,
            robust=True,
        )
    ]
    has_idle = len(state.idle) > 0
    unit = "Tokens/s" if state.tokens else "Steps/s"
    panes.append(
        Pane(
            unit,
            [_line("each step", state.rate, "faint", 2), _line("sustained", state.rate_sustained, "line", 2)],
            headline=_last(state.rate_sustained),
            note=f"sustained, now {_last(state.rate)}" if len(state.rate) else "",
            top=196,
            width=0.5 if has_idle else 1.0,
            height=122,
            x_range=span,
            y_range=(0.0, None),
            x_ticks=4 if has_idle else 6,
            y_ticks=3,
            legend=False,
        )
    )
    if has_idle:
        panes.append(
            Pane(
                "Device idle",
                [_line("each step", state.idle, "faint", 3), _line("smoothed", state.idle_mean, "line", 3)],
                headline=_percent(state.idle_mean),
                note="at least",
                top=196,
                left=0.5,
                width=0.5,
                height=122,
                x_range=span,
                y_range=(0.0, None),
                percent=True,
                x_ticks=4,
                y_ticks=3,
                legend=False,
            )
        )
    foot: list[tuple[Literal["note", "warning"], str]] = [
        ("note", line) for line in [*layer_lines(state), *sustained_lines(state)]
    ]
    for line in state.warning_lines():
        head, *rest = wrap(cut(line, 150), 78)
        foot += [("warning", head), *(("note", part) for part in rest)]
    if state.reason is not None:
        foot.append(("note", cut(ending(state), 80)))
    progress = None if state.total is None else state.step / max(state.total, 1)
    return figure(
        panes,
        title=f"Training run {state.title}".rstrip(),
        description=summary_line(state),
        head=(
            cut(state.title or "training", 32),
            cut(state.recipe, 44 - min(len(state.title), 32)),
            _progress_words(state),
        ),
        progress=progress,
        foot=foot,
        theme=theme,
    )


def _line(label: str, series: Series, style: Literal["line", "faint", "dots"], color: int) -> Line:
    x, y = series.points()
    return Line(label, x, y, style, color)


def cut(text: str, length: int) -> str:
    """The text in one line of at most `length` characters; what is left out leaves an ellipsis."""
    text = " ".join(text.split())
    return text if len(text) <= length else text[: max(length - 1, 0)].rstrip() + "…" * (length > 0)


def _loss(series: Series) -> str:
    """The last loss with three decimals, so that its digits stay in place while it moves."""
    if series.last is None:
        return "–"
    value = series.last[1]
    return f"{value:.3f}" if 0.01 <= abs(value) < 1000 else short(value, 4)


def _last(series: Series) -> str:
    return short(series.last[1]) if series.last else "–"


def _percent(series: Series) -> str:
    return f"{100 * series.last[1]:.1f} %" if series.last else "–"


def _head(state: PanelState) -> tuple[str, str, str]:
    """Name, recipe and progress in one line, what is longest cut first: about 74 characters fit."""
    progress = _progress_words(state)
    title = cut(state.title or "training", 24)
    return title, cut(state.recipe, 72 - len(progress) - round(1.3 * len(title))), progress


def _progress_words(state: PanelState) -> str:
    if state.first_step is None:
        return "waiting for the first step"
    step = f"step {state.step:,}" + (f" / {state.total:,}" if state.total else "")
    words = [step, f"{clock_time(state.elapsed_s)} elapsed"]
    eta = state.eta_s
    if eta is not None and eta > 0:
        words.append(f"{clock_time(eta)} to go")
    return " · ".join(words)


def clock_time(seconds: float) -> str:
    """Seconds as 0:07, 12:30, 3:05:00 or 2 d 03:05."""
    whole = int(seconds + 0.5)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02d}:{minute:02d}"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minutes}:{second:02d}"


def ending(state: PanelState) -> str:
    """One line on why the run ended."""
    reason = state.reason or ""
    at = f"step {state.step:,}"
    if reason == "done":
        return f"Done at {at}."
    if reason == "interrupted":
        return f"Interrupted after {at}." + (" The next run() goes on from there." if state.resumes else "")
    if reason.startswith("failed"):
        return cut(f"Failed after {at}: {reason.removeprefix('failed').lstrip(': ') or 'no reason given'}", 400)
    return cut(f"Ended after {at}: {reason}", 400)


def summary_line(state: PanelState) -> str:
    """The state in one line: for terminals, logs and screen readers."""
    words = [" ".join(part for part in (state.title, state.recipe) if part)] if state.title or state.recipe else []
    words.append(_progress_words(state))
    if state.loss_mean.last:
        words.append(f"loss {_loss(state.loss_mean)}")
    if state.held_out.last:
        words.append(f"held out {_loss(state.held_out)}")
    if state.rate_sustained.last:
        words.append(f"{_last(state.rate_sustained)} {'tokens/s' if state.tokens else 'steps/s'}")
    if state.idle_mean.last:
        words.append(f"idle {_percent(state.idle_mean)}")
    if state.reason is not None:
        words.append(ending(state))
    return " · ".join(words)


def summary_text(state: PanelState) -> str:
    """The state as plain text of a few lines, with the loss as a row of blocks."""
    lines = [summary_line(state)]
    _, y = state.loss_mean.points()
    if len(y) > 1:
        lines.append(f"loss {short(y[0])} {sparkline(y)} {short(y[-1])}")
    lines += layer_lines(state) + sustained_lines(state)
    lines += [f"! {line}" for line in state.warning_lines()]
    return "\n".join(lines)


def sustained_lines(state: PanelState) -> list[str]:
    """Rates over the last second, minute and ten minutes and over all, goodput and lost time in a line; [] before there are."""
    rates = {name: recent.rate for name, recent in state.recent.items()} | {"all": state.overall_rate}
    told = [f"{name} {short(rate)}" for name, rate in rates.items() if rate is not None]
    if state.goodput is None or not told:
        return []
    unit = "Tokens/s" if state.tokens else "Steps/s"
    return [f"{unit}: {', '.join(told)} · goodput {100 * state.goodput:.1f} % · {_lost(state.lost_s)} lost"]


def _lost(seconds: float) -> str:
    return f"{short(seconds / 3600)} h" if seconds >= 360 else f"{short(seconds)} s"


def layer_lines(state: PanelState) -> list[str]:
    """The layers with the least accurate products in the last sample, one line each under a heading; [] without a meter."""
    if not state.layers:
        return []
    lines = [f"Least accurate products, step {state.layers_step:,}"]
    for name, figures in state.layers:
        kept = 74 - len(figures)
        # the end of a long path says more than its beginning
        name = name if len(name) <= kept else "…" + name[len(name) - kept + 1 :]
        lines.append(f"  {name} · {figures}")
    return lines


def sparkline(values: list[float], width: int = 48) -> str:
    """Values as at most `width` block characters, low to high."""
    count = min(width, len(values))
    chunks = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [sum(chunk) / len(chunk) for chunk in chunks]
    low, high = min(means), max(means)
    return "".join("▁▂▃▄▅▆▇█"[int(7.999 * (m - low) / (high - low))] if high > low else "▄" for m in means)
