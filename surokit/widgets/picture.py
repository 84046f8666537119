"""This module draws a state: the panel as SVG, as a line and as a few lines of text, and all of it as one display message.

These are pure functions of one `PanelState`, or of several by the names of their runs: then their losses are drawn over each other
and a table has their figures. Nothing here knows a notebook, a clock or a run. `PANES` and `figures` are what every view shows; the
SVG has room for some of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Literal, NamedTuple

from surokit.runs.smoothing import ema_words
from surokit.tables import text_table
from surokit.widgets.figure import Line, Mark, Pane, Style, Theme, figure, plain, short
from surokit.widgets.state import KINDS, REPLACED, PanelState, Runs, Series, worst

Bundle = dict[str, str]
States = PanelState | Mapping[str, PanelState]
Foot = list[tuple[Literal["note", "warning", "advice"], str]]

MESSAGE_BYTES = 20_000
SHOWN_EVENTS, SHOWN_RUNS = 12, 8
NONE = "–"
NO_STEPS, NOT_TIMED = "no steps yet", "no timed steps yet"  # the first step is no rate, nor is a race's warm-up


@dataclass(frozen=True)
class Curve:
    """A Curve names a series of a state, and says how it is drawn."""

    name: str
    label: str
    style: Style


@dataclass(frozen=True)
class PaneOf:
    """A PaneOf describes a chart and its curves. percent: y is a share, shown times 100. zero: the axis starts at 0. robust: as in
    figure.Pane."""

    name: str
    title: str
    curves: tuple[Curve, ...]
    color: int
    percent: bool = False
    zero: bool = False
    robust: bool = False


PANES = (
    PaneOf(
        "loss",
        "Loss",
        (
            Curve("loss", "each step", "faint"),
            Curve("loss_mean", "EMA", "line"),
            Curve("held_out", "held out", "dots"),
        ),
        0,
        robust=True,
    ),
    PaneOf(
        "rate",
        "Tokens/s",
        (Curve("rate", "each step", "faint"), Curve("rate_sustained", "sustained", "line")),
        2,
        zero=True,
    ),
    PaneOf(
        "idle",
        "Device idle",
        (
            Curve("idle", "each step", "faint"),
            Curve("idle_mean", "smoothed", "line"),
            Curve("idle_data", "waiting for data", "line"),
        ),
        3,
        percent=True,
        zero=True,
    ),
    PaneOf("memory", "Peak memory, GiB", (Curve("memory", "memory", "line"),), 4, zero=True),
    PaneOf("grad_norm", "Gradient norm", (Curve("grad_norm", "each step", "line"),), 5, zero=True, robust=True),
    PaneOf("lr", "Learning rate", (Curve("lr", "learning rate", "line"),), 1, zero=True),
)


class Figure(NamedTuple):
    """A Figure is a number ready to show: the pane it belongs to ("" for none), its name, its value, and a note beside it."""

    pane: str
    name: str
    value: str
    note: str = ""


def figures(state: PanelState) -> list[Figure]:
    """Return the figures of a run that are known, most important first."""
    out = []
    if state.loss_mean.last or state.loss.last:
        held_out = [f"held out {_loss(state.held_out)}"] if state.held_out.last else []
        note = " · ".join([smoothing_words(state), *held_out])
        out.append(Figure("loss", "Loss", _loss(state.loss_mean if state.loss_mean.last else state.loss), note))
    if state.rate_sustained.last:
        light = "" if state.light is None else f" · {_share(state.light)} of peak"
        out.append(Figure("rate", unit_of(state), _last(state.rate_sustained), f"now {_last(state.rate)}{light}"))
    causes = state.idle_causes
    told = " · ".join(f"{name} {_share(share)}" for name, share in causes.items() if share >= 0.0005)
    if state.idle_mean.last:
        out.append(Figure("idle", "Device idle", _percent(state.idle_mean), told or "at least"))
    elif sum(causes.values()) >= 0.005:
        out.append(Figure("idle", "Device idle", f"≥ {_share(sum(causes.values()))}", told))
    if state.memory.last:
        out.append(Figure("memory", "Peak memory", f"{short(state.memory.last[1])} GiB"))
    if state.gpu_hours is not None:
        usd = "" if state.usd is None else dollars(state.usd)
        out.append(Figure("", "GPU hours", hours(state.gpu_hours), usd))
    if state.grad_norm.last:
        out.append(Figure("grad_norm", "Gradient norm", _last(state.grad_norm)))
    if state.lr.last:
        out.append(Figure("lr", "Learning rate", _last(state.lr)))
    return out


def smoothing_words(state: PanelState) -> str:
    """Say what the shown loss is: over how many steps it is averaged, or "last step" if there is no finite average."""
    return ema_words(state.smoothing.over_steps) if state.loss_mean.last else "last step"


def phase_words(state: PanelState) -> str:
    """Return the health's phase while a run goes on and has one, else its standing."""
    return state.health.phase if state.standing == "running" and state.health.phase else state.standing


def unit_of(*states: PanelState) -> str:
    """Return the unit of the rates: "Tokens/s" if any run has counted tokens, or none has begun; else "Steps/s"."""
    begun = any(state.first_step is not None for state in states)
    return "Tokens/s" if not begun or any(state.tokens for state in states) else "Steps/s"


def hours(gpu_hours: float) -> str:
    return "< 0.01" if 0 < gpu_hours < 0.005 else f"{gpu_hours:.2f}" if gpu_hours < 10 else short(gpu_hours)


def dollars(usd: float) -> str:
    return f"${usd:,.2f}" if usd < 1000 else f"${usd:,.0f}"


def suggestion(state: PanelState) -> str:
    """Return the suggestion for the worst event; of equally bad ones, for the latest. "" if no event has one."""
    ranks = list(KINDS)
    told = [event for event in state.events if event.suggestion and event.kind in ranks]
    return min(reversed(told), key=lambda event: ranks.index(event.kind)).suggestion if told else ""


def run_table(states: Mapping[str, PanelState]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of a table of several runs' figures, a row a run; columns that no run has are left out."""
    wanted = [
        ("step", lambda s: f"{s.step:,}"),
        ("loss (EMA)", lambda s: _loss(s.loss_mean)),
        ("held out", lambda s: _loss(s.held_out)),
        (unit_of(*states.values()).lower(), lambda s: _last(s.rate_sustained)),
        ("idle", lambda s: _percent(s.idle_mean)),
        ("GiB", lambda s: _last(s.memory)),
        ("time", lambda s: clock_time(s.elapsed_s)),
        ("cost", lambda s: NONE if s.usd is None else dollars(s.usd)),
        ("", phase_words),
    ]
    columns = {name: [tell(state) for state in states.values()] for name, tell in wanted}
    columns = {name: cells for name, cells in columns.items() if set(cells) != {NONE}}
    return ["run", *columns], [[cut(run, 24), *cells] for run, *cells in zip(states, *columns.values())]


# --- messages ---


def bundle(states: States, theme: Theme = "auto") -> Bundle:
    """Return the states as one display message: the picture and the same facts in words. At most MESSAGE_BYTES long."""
    words = plain(summary_text(states))
    return {"text/plain": words, "image/svg+xml": picture(states, theme, MESSAGE_BYTES - len(words.encode()))}


def picture(states: States, theme: Theme = "auto", room: int = MESSAGE_BYTES) -> str:
    """Draw the panel as SVG: loss with its events on top, tokens/s and idle share below, warnings and the reason of the end at
    the foot; for several runs their losses and rates over each other, and a table. room: bytes it may take; curves get coarser
    to fit.
    """
    if not isinstance(states, PanelState) and len(states) == 1:
        states = next(iter(states.values()))
    for points in (1000, 300, 150, 75, 40, 20):
        svg = _one(states, theme, points) if isinstance(states, PanelState) else _several(states, theme, points)
        if len(svg.encode()) <= room:
            break
    return svg


def _span(states: Sequence[PanelState], ended: bool) -> tuple[float, float]:
    """Return the first and the last step that the axis shows."""
    first = min((float(s.first_step) for s in states if s.first_step is not None), default=0.0)
    first = 0.0 if first == 1.0 else first  # so that the axis starts with a label
    step, total = max((s.step for s in states), default=0), max((s.total or 0 for s in states), default=0)
    if ended:
        return first, max(float(step), first + 1)
    last = float(max(total, step, first + 1))
    # The frame opens at the planned length once a tenth of it has run; before, the curve would be a dot in a corner.
    if total and step - first < 0.1 * (total - first):
        last = min(first + max(10.0, 10 * (step - first)), float(total))
    return first, last


def _one(state: PanelState, theme: Theme, points: int) -> str:
    span = _span([state], state.reason is not None)
    told = {figure.pane: figure for figure in figures(state)}
    # two small ones beside each other: the rate, and the first of these that has something to show
    idle, grad_norm = PANES[2], PANES[4]
    second = idle if "idle" in told else grad_norm if "grad_norm" in told else None
    panes = []
    for pane, top, left, width, height in (
        (PANES[0], 0.0, 0.0, 1.0, 190.0),
        (PANES[1], 196.0, 0.0, 0.5 if second else 1.0, 122.0),
        (second, 196.0, 0.5, 0.5, 122.0),
    ):
        if pane is None:
            continue
        figure_ = told.get(pane.name, Figure(pane.name, pane.title, NONE))
        small = width < 1
        panes.append(
            Pane(
                figure_.name,
                [
                    _line(c, getattr(state, c.name), pane.color + (c.style == "dots"), points)
                    for c in pane.curves
                    if c.name != "idle_data" or not state.idle.last
                ],
                headline=figure_.value,
                note="at least" * (pane.name == "idle") or figure_.note.split(" · ")[-1] if small else figure_.note,
                top=top,
                left=left,
                width=width,
                height=height,
                x_range=span,
                y_range=(0.0 if pane.zero else None, None),
                percent=pane.percent,
                robust=pane.robust,
                x_ticks=4 if small else 6,
                y_ticks=4 if pane.name == "loss" else 3,
                legend=pane.name == "loss",
                marks=_marks(state) if pane.name == "loss" else (),
                empty=NOT_TIMED if pane.name == "rate" else NO_STEPS,
            )
        )
    notes = [*idle_lines(state), *layer_lines(state), *expert_lines(state), *rank_lines(state), *sustained_lines(state)]
    foot: Foot = [("note", line) for line in notes]
    for line in state.warning_lines():
        start, *rest = wrap(cut(line, 150), 78)
        foot += [("warning", start), *(("advice", part) for part in rest)]
    foot += [("advice", line) for line in wrap(suggestion(state), 78)]
    if state.reason is not None:
        foot += [("note", part) for part in wrap(cut(ending(state), 150), 78)]
    memory = f"peak {told['memory'].value} · " if "memory" in told else ""
    stands = memory + phase_words(state)
    room = 78 - len(stands)
    title = cut(state.title or "training", min(32, round(0.75 * room)))
    return figure(
        panes,
        title=f"Training run {state.title}".rstrip(),
        description=summary_line(state),
        head=(title, cut(state.recipe, max(0, room - round(1.35 * len(title)))), stands),
        sub=(progress_words(state), money_words(state)),
        alarm=phase_words(state) in ("diverging", "unstable", "failed"),
        progress=None if state.total is None else state.step / max(state.total, 1),
        foot=foot,
        theme=theme,
    )


def _several(states: Mapping[str, PanelState], theme: Theme, points: int) -> str:
    runs = list(states.items())[:SHOWN_RUNS]
    tight = points <= 150
    span = _span([state for _, state in runs], all(state.reason is not None for _, state in runs))
    curves = [(number, Curve("", run, "line"), state) for number, (run, state) in enumerate(runs)]
    if headline(states) and runs:  # a race: the baseline is drawn broad beneath, and on it first its twin, the last run
        curves = [(0, Curve("", runs[0][0], "broad"), runs[0][1]), *curves[:0:-1]]
    losses = [_line(curve, state.loss_mean, number, points) for number, curve, state in curves]
    held_out = [_line(Curve("", "", "dots"), s.held_out, number, points) for number, (_, s) in enumerate(runs)]
    rates = [_line(curve, state.rate_sustained, number, points) for number, curve, state in curves]
    marks = [mark for _, state in runs for mark in _marks(state)][-SHOWN_EVENTS:]
    panes = [
        Pane(
            "Loss",
            losses if tight else [*losses, *held_out],
            note="EMA",
            height=200,
            x_range=span,
            robust=True,
            legend=False,
            marks=marks,
        ),
        Pane(
            unit_of(*states.values()),
            rates,
            note="sustained",
            top=206,
            height=122,
            x_range=span,
            y_range=(0.0, None),
            y_ticks=3,
            legend=False,
            empty=NOT_TIMED,
        ),
    ]
    columns, rows = run_table(dict(runs))
    for name in ("GiB", "time", "idle", "held out", "step"):
        if sum(max(map(len, column)) + 2 for column in zip(columns, *rows)) > 78 and name in columns:
            at = columns.index(name)
            columns, rows = columns[:at] + columns[at + 1 :], [row[:at] + row[at + 1 :] for row in rows]
    foot: Foot = [("note", f"and {len(states) - len(runs)} more runs")] if len(states) > len(runs) else []
    for run, state in runs:
        lines = state.warning_lines()
        foot += [("warning", cut(f"{run}: {line}", 78)) for line in lines[:1]]
        foot += [("advice", cut(suggestion(state), 78))] if lines and suggestion(state) and not tight else []
    ended = sum(state.reason is not None for _, state in runs)
    return figure(
        panes,
        title=f"Training runs {', '.join(cut(run, 24) for run, _ in runs)}",
        description=" | ".join(cut(summary_line(state), 800 // len(runs)) for _, state in runs),
        head=(headline(states) or f"{len(states)} runs", "", f"{ended} ended" if ended else ""),
        table=(columns, rows, range(len(rows))) if rows else None,
        foot=foot,
        theme=theme,
    )


def headline(states: Mapping[str, PanelState]) -> str:
    """Return the headline of several runs, such as a race and its round; "" for runs without one."""
    return cut(states.headline, 60) if isinstance(states, Runs) else ""


def _line(curve: Curve, series: Series, color: int, limit: int) -> Line:
    points = series.since(limit=limit)
    return Line(curve.label, [p[0] for p in points], [p[1] for p in points], curve.style, color)


def _marks(state: PanelState) -> list[Mark]:
    """Return marks for the worst and latest events, at most SHOWN_EVENTS."""
    marks: dict[tuple[int, bool], Mark] = {}  # of one step the worst, and the words
    for event in worst((event for event in state.events if event.kind != "phase"), SHOWN_EVENTS):
        if event.kind == "note":
            mark = Mark(event.step, "note", cut(event.text, 18))
        else:
            mark = Mark(event.step, "turn" if event.kind in ("diverging", "unstable", "plateau") else "alarm")
        marks.setdefault((event.step, event.kind == "note"), mark)
    return list(marks.values())


# --- words ---


def cut(text: str, length: int) -> str:
    """Return the text in one line of at most `length` characters; what is left out leaves an ellipsis."""
    text = " ".join(plain(text).split())
    return text if len(text) <= length else text[: max(length - 1, 0)].rstrip() + "…" * (length > 0)


def _share(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.0995 else f"{100 * share:.0f} %"


def _loss(series: Series) -> str:
    """Return the last loss with three decimals, so that its digits stay in place while it moves."""
    if series.last is None:
        return NONE
    value = series.last[1]
    return f"{value:.3f}" if 0.01 <= abs(value) < 1000 else short(value, 4)


def _last(series: Series) -> str:
    return short(series.last[1]) if series.last else NONE


def _percent(series: Series) -> str:
    return f"{100 * series.last[1]:.1f} %" if series.last else NONE


def progress_words(state: PanelState) -> str:
    """Return the step, time and time left; before the first step the last note, such as that the model is being compiled."""
    if state.first_step is None:
        notes = [cut(event.text, 50) for event in state.events if event.kind == "note"]
        return " · ".join(["waiting for the first step", *notes[-1:]])
    step = f"step {state.step:,}" + (f" / {state.total:,}" if state.total else "")
    words = [step, f"{clock_time(state.elapsed_s)} elapsed"]
    eta = state.eta_s
    if eta is not None and eta > 0:
        words.append(f"{clock_time(eta)} to go")
    return " · ".join(words)


def money_words(state: PanelState) -> str:
    """Return the GPU hours and dollars so far, as far as they are known."""
    words = [] if state.gpu_hours is None else [f"{hours(state.gpu_hours)} GPU h"]
    return " · ".join(words + ([] if state.usd is None else [dollars(state.usd)]))


def idle_lines(state: PanelState) -> list[str]:
    """Return a line on where the device's idle time went; [] if nothing is known of it."""
    words = {"data": "waiting for data", "offload": "waiting for offload"}
    told = [f"{words.get(name, name)} {_share(share)}" for name, share in state.idle_causes.items() if share >= 0.0005]
    if told and told[-1].startswith("inside") and state.launches is not None:
        told[-1] += f" ({short(state.launches)} launches)"
    return [f"Idle: {', '.join(told)}"] if told else []


def expert_lines(state: PanelState) -> list[str]:
    """Return a line on how evenly routers spread the tokens of the last step; [] without experts."""
    if state.routing is None:
        return []
    most, least, balance = state.routing
    loss = "" if balance is None else f", load-balancing loss {short(balance)}"
    return [f"Experts: {short(least)} to {short(most)} of an even load{loss}"]


def rank_lines(state: PanelState) -> list[str]:
    """Return a line on the slowest of several processes, for which the others wait; [] for a single one."""
    if state.slowest is None:
        return []
    rank, slowest_ms, median_ms = state.slowest
    more = f"{slowest_ms / median_ms - 1:.0%} over the median" if median_ms > 0 else "the median takes no time"
    return [f"Ranks: {rank} is the slowest, {more} ({short(slowest_ms)} ms of data and forward)"]


def clock_time(seconds: float) -> str:
    """Return the seconds as 0:07, 12:30, 3:05:00 or 2 d 03:05."""
    whole = int(seconds + 0.5)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02d}:{minute:02d}"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minutes}:{second:02d}"


def ending(state: PanelState) -> str:
    """Say in one line why the run ended."""
    reason = state.reason or ""
    at = f"step {state.step:,}"
    if reason == "done":
        return f"Done at {at}."
    if reason == REPLACED:
        return f"A newer panel has taken over at {at}."
    way_on = " The next run() goes on from there." if state.resumes else ""
    if reason == "interrupted":
        return f"Interrupted after {at}.{way_on}"
    if reason.startswith("stopped: "):
        return cut(f"Stopped after {at}: {reason.removeprefix('stopped: ')}", 350) + f".{way_on}"
    if reason.startswith("failed"):
        return cut(f"Failed after {at}: {reason.removeprefix('failed').lstrip(': ') or 'no reason given'}", 400)
    if reason.startswith("lost: "):  # of a run that others train
        return cut(f"Last seen at {at}: {reason.removeprefix('lost: ')}", 400)
    return cut(f"Ended after {at}: {reason}", 400)


def summary_line(state: PanelState) -> str:
    """Describe the state in one line, for terminals, logs and screen readers."""
    words = [" ".join(part for part in (state.title, state.recipe) if part)] if state.title or state.recipe else []
    words.append(progress_words(state))
    if state.loss_mean.last:
        words.append(f"loss {_loss(state.loss_mean)} ({smoothing_words(state)})")
    if state.held_out.last:
        words.append(f"held out {_loss(state.held_out)}")
    if state.rate_sustained.last:
        words.append(f"{_last(state.rate_sustained)} {'tokens/s' if state.tokens else 'steps/s'}")
    causes = state.idle_causes
    if state.idle_mean.last or sum(causes.values()) >= 0.005:
        idle = _percent(state.idle_mean) if state.idle_mean.last else f"≥ {_share(sum(causes.values()))}"
        offload = causes.get("offload", 0.0)
        words.append(f"idle {idle}" + (f", for offload {_share(offload)}" if offload >= 0.005 else ""))
    if state.memory.last:
        words.append(f"peak {_last(state.memory)} GiB")
    if money := money_words(state):
        words.append(money)
    if phase_words(state) in ("paused", "plateau", "unstable", "diverging"):
        words.append(phase_words(state))
    if state.reason is not None:
        words.append(ending(state))
    return " · ".join(words)


def summary_text(states: States) -> str:
    """Describe the states in a few lines of plain text: one run's loss as a row of blocks, or several runs in a table."""
    if not isinstance(states, PanelState) and len(states) != 1:
        columns, rows = run_table(states)
        table = text_table(rows, header=columns, right=range(1, len(columns)), indent="")
        lines = ["\n".join([*([head] if (head := headline(states)) else []), table])]
        lines += [f"! {run}: {line}" for run, state in states.items() for line in state.warning_lines()]
        return "\n".join([*lines[:1], *(cut(line, 200) for line in lines[1 : 1 + 2 * SHOWN_RUNS])])
    state = states if isinstance(states, PanelState) else next(iter(states.values()))
    lines = [summary_line(state)]
    _, y = state.loss_mean.points()
    if len(y) > 1:
        lines.append(f"loss (EMA) {short(y[0])} {sparkline(y)} {short(y[-1])}")
    lines += idle_lines(state) + layer_lines(state) + expert_lines(state) + rank_lines(state) + sustained_lines(state)
    lines += [f"! {line}" for line in state.warning_lines()]
    lines += [f"  {suggestion(state)}"] if suggestion(state) else []
    notes = [event for event in state.events if event.kind == "note"]
    lines += [cut(f"note at step {notes[-1].step:,}: {notes[-1].text}", 200)] if notes else []
    return "\n".join(lines)


def sustained_lines(state: PanelState) -> list[str]:
    """Return a line with the rates over the last second, minute, ten minutes and the whole run, and with goodput and lost time if
    they are known; [] before there is a rate."""
    rates = {name: recent.rate for name, recent in state.recent.items()} | {"all": state.overall_rate}
    told = [f"{name} {short(rate)}" for name, rate in rates.items() if rate is not None]
    if not told:
        return []
    unit = "Tokens/s" if state.tokens else "Steps/s"
    goodput, lost_s = state.goodput, state.lost_s
    lost = "" if goodput is None or lost_s is None else f" · goodput {100 * goodput:.1f} % · {_lost(lost_s)} lost"
    return [f"{unit}: {', '.join(told)}{lost}"]


def _lost(seconds: float) -> str:
    return f"{short(seconds / 3600)} h" if seconds >= 360 else f"{short(seconds)} s"


def layer_lines(state: PanelState) -> list[str]:
    """Return a heading and a line for each of the layers with the least accurate products in the last sample; [] without one."""
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
    """Draw values as at most `width` block characters, from the lowest block to the full one."""
    count = min(width, len(values))
    chunks = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [sum(chunk) / len(chunk) for chunk in chunks]
    low, high = min(means), max(means)
    return "".join("▁▂▃▄▅▆▇█"[int(7.999 * (m - low) / (high - low))] if high > low else "▄" for m in means)
