"""Record spans of the training thread and of the threads beside it, for a table and a picture.

    with recorded() as timeline:      nothing is recorded elsewhere
        with span("compute"): ...     the threads' work and all waits are there already
        optimizer.step()
    timeline.plot()

A simulated link has a thread for each direction, so its transfers are there too. Those of a CUDA device are not: its
streams are no threads, and sk.profile shows them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from surokit.tables import data_frame

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PREFIX = "surokit-"  # of a worker's thread
WORK, WAIT = "work", "wait"
# threads as a picture calls them, from top to bottom; the direction of small values is left out
_LANES = {
    "MainThread": "training thread",
    "link down": "link, down",
    "accumulator": "accumulator",
    "adam": "Adam",
    "link up": "link, up",
}
_LEFT_OUT = "link small"
_COLORS = {"compute": "#0072B2", "update": "#56B4E9", WORK: "#009E73"}
_WAITING, _INK, _SOFT, _GRID = "#F2C9A8", "#1c1f23", "#5f6670", "#e4e7eb"


class Span(NamedTuple):
    """A Span lies between start_s and stop_s, since the recording began. Spans of one lane nest, a wait in the work that waits."""

    lane: str
    what: str
    start_s: float
    stop_s: float

    @property
    def seconds(self) -> float:
        return self.stop_s - self.start_s

    def holds(self, other: Span) -> bool:
        """Return whether `other` is a part of it, on the same lane or not."""
        return other is not self and self.start_s <= other.start_s and other.stop_s <= self.stop_s


class Timeline:
    """A Timeline holds spans in the order of their ends."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self.spans = list(spans)
        self._begun = time.perf_counter()

    def add(self, what: str, begun: float, over: float) -> None:
        """Add a span of the thread that calls this, by time.perf_counter."""
        lane = threading.current_thread().name.removeprefix(PREFIX)
        self.spans.append(Span(lane, what, begun - self._begun, over - self._begun))

    def busy_s(self, lane: str, what: str = WORK) -> float:
        """Return the seconds that `lane` spent in `what`, less its waits therein."""
        mine = [span for span in self.spans if span.lane == lane]
        doing = [span for span in mine if span.what == what]
        waits = [span for span in mine if span.what.startswith(WAIT)]
        waits = [w for w in waits if any(d.holds(w) for d in doing) and not any(o.holds(w) for o in waits)]
        return sum(span.seconds for span in doing) - sum(span.seconds for span in waits)

    def __repr__(self) -> str:
        over = max((span.stop_s for span in self.spans), default=0.0)
        lanes = len({span.lane for span in self.spans})
        return f"<Timeline of {len(self.spans)} spans on {lanes} threads, {1e3 * over:.0f} ms>"

    def table(self) -> pd.DataFrame:
        """Return a row a span: lane, what, start_s, stop_s."""
        return data_frame(self.spans, Span._fields)

    def plot(self) -> Figure:
        """Plot a row a thread, time from left to right; the figure is not yet shown."""
        return plot({"": self})


@dataclass(slots=True)
class _Open:
    timeline: Timeline
    what: str
    begun: float = 0.0

    def __enter__(self) -> None:
        self.begun = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.timeline.add(self.what, self.begun, time.perf_counter())


_recording: Timeline | None = None
_NOTHING: AbstractContextManager[None] = nullcontext()


def span(what: str) -> AbstractContextManager[None]:
    """Record the block as a span of this thread, if a recording runs."""
    timeline = _recording
    return _NOTHING if timeline is None else _Open(timeline, what)


@contextmanager
def recorded() -> Iterator[Timeline]:
    """Record the spans of all threads that end inside the block. Raises RuntimeError inside another: there is one recording
    at a time."""
    global _recording
    if _recording is not None:
        raise RuntimeError("A timeline is being recorded already: end that block first.")
    _recording = timeline = Timeline()
    try:
        yield timeline
    finally:
        _recording = None


def plot(timelines: Mapping[str, Timeline]) -> Figure:
    """Plot timelines one above the other on a common axis of time, each with its name above it; the figure is not yet
    shown. Raises ValueError where nothing was recorded."""
    from matplotlib import pyplot as plt

    ends = [each.stop_s for timeline in timelines.values() for each in timeline.spans]
    if not ends:
        raise ValueError("There is nothing to draw: take a step of an offloading optimizer inside `with recorded()`.")
    lanes = [_lanes(timeline) for timeline in timelines.values()]
    heights = [max(len(each), 1) for each in lanes]
    figure, axes = plt.subplots(
        len(lanes), 1, sharex=True, squeeze=False, height_ratios=heights, layout="constrained",
        figsize=(9.0, 1.0 + 0.42 * len(lanes) + 0.27 * sum(heights)),
    )  # fmt: skip
    figure.set_facecolor("white")
    plt.close(figure)  # the caller shows what is returned
    for ax, (name, timeline), rows in zip(axes[:, 0], timelines.items(), lanes):
        _draw(ax, timeline, rows)
        ax.set_title(name, loc="left", fontsize=10, color=_INK)
    last = axes[-1, 0]
    last.set_xlabel("milliseconds", color=_SOFT)
    last.set_xlim(0, 1e3 * max(ends))
    shown = {each.what for timeline in timelines.values() for each in timeline.spans}
    named = [(what, color) for what, color in _COLORS.items() if what in shown]
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for _, color in (*named, (WAIT, _WAITING))]
    figure.legend(
        handles, [*(what for what, _ in named), WAIT], frameon=False, labelcolor=_INK, fontsize=9, ncols=len(handles),
        loc="outside upper right",
    )  # fmt: skip
    return figure


def _lanes(timeline: Timeline) -> list[str]:
    """Return the lanes that are drawn, from top to bottom."""
    present = dict.fromkeys(span.lane for span in timeline.spans if span.lane != _LEFT_OUT)
    return [*(lane for lane in _LANES if lane in present), *(lane for lane in present if lane not in _LANES)]


def _draw(ax: Axes, timeline: Timeline, lanes: list[str]) -> None:
    # an inner span is drawn over the one around it, so the long ones first
    for each in sorted(timeline.spans, key=lambda span: -span.seconds):
        if each.lane in lanes:
            extent = [(1e3 * each.start_s, 1e3 * each.seconds)]
            ax.broken_barh(extent, (lanes.index(each.lane) - 0.36, 0.72), color=_COLORS.get(each.what, _WAITING), lw=0)
    ax.set_yticks(range(len(lanes)), [_LANES.get(lane, lane) for lane in lanes])
    ax.set_ylim(len(lanes) - 0.5, -0.5)
    ax.set_facecolor("white")
    ax.tick_params(colors=_SOFT, length=0)
    ax.grid(axis="x", color=_GRID)
    ax.set_axisbelow(True)
    ax.spines[:].set_visible(False)
