"""This module writes the states of one or several runs as small JSON messages, for a panel that a page draws itself.

A message is a few named JSON texts (the widget's traits). It may be lost, come late, or be the first a front end ever
sees: what a reader holds is the last text of every name, and that is all it needs.

    head      words and numbers ready to show: see below; in every message
    delta     {"n": 17, "series": [{"slot": 0, "of": [0, "loss"], "gen": 3, "dx": [...], "y": [...]}, ...]}; in every message
    key_<k>   {"slot": 0, "of": [0, "loss"], "gen": 3, "dx": [...], "y": [...]}; k = 0 ... SLOTS - 1; in a message one that is due,
              and as many as there is room for of those that were never sent or lose detail; "" while the slot is not used

The curves. `delta` names every curve there is, in the order in which they are drawn. The curve of an entry is

    what key_<slot> holds, if entry.gen > 0 and the key's gen is the same       (the keyframe: all up to some step)
    nothing,               if entry.gen is 0                                    (the curve is as short as that)
    followed by the entry's own points.                                         (all after that step, so never added up)

If the gens differ, a message was lost: keep what is drawn for the curve; its next keyframe comes soon after RENEW_S seconds, with
the first news. `of` is [number of the run in head.runs, name of the series]. `dx`: the first x, then differences, so that a
running sum gives x, in steps. `y`: numbers of five digits, null for NaN, "inf" and "-inf" for infinities. The lists are equally
long. Points are decimated, never averaged: of every stretch its lowest, its highest, its first NaN and its first infinity, each
where it was; and the last one.

The series "ruler" is no curve: it tells what a step is in tokens and in time. Its entries have `y`, tokens so far, and `z`,
seconds so far (run time without pauses), both of seven digits; in between they are straight lines.

`head`:
    v          1; n: number of the message, the same as delta's; at: its time, unix seconds; final: bool
    panes      [{"name": "loss", "title": "Loss", "color": 0, "percent": bool, "zero": bool, "robust": bool,
                 "series": [{"name": "loss", "label": "each step", "style": "faint"}, ...]}, ...],
               those that have something to show, most important first.
               style: faint | line | dots. percent: y is a share, shown times 100. zero: the axis starts at 0. robust: the first
               steps' extremes may leave the frame. color: of the palette, for a single run. The unit is in the title.
    axes       of ["steps", "tokens", "time", "usd"] those that every run knows
    runs       [run, ...], in the order of their colours:
        key, title, recipe   words. color: of the palette
        state                waiting | running | paused | done | interrupted | stopped | failed | lost | replaced
        phase                "" | warm-up | converging | plateau | unstable | diverging: the health's present phase
        line                 "step 120 / 500 · 0:12 elapsed · 0:40 to go"
        step, total (or null), tokens, seconds, progress (0..1 or null)
        usd_per_s            price of a second of run time, or null: x in dollars is seconds times this
        figures              [{"pane": "loss" or "", "name": "Loss", "value": "2.314", "note": "held out 2.412"}, ...]
        notes, warnings      sentences, the warnings worst first. suggestion: what to do about the worst, or ""
        events               [{"step": 80, "kind": "spike", "y": 9.1 or null, "text": "...", "suggestion": "..." or ""}, ...], by
                             step; y: the loss there. kind: diverging | skipped | nonfinite | no_targets | unstable | spike |
                             grad_spike | plateau | slower | note | phase
        ending               why the run ended, a sentence; "" while it runs
        hidden               names of series that found no room (many runs), if there is room for that
    headline   what several runs are together and how that stands, "race · round 3 · fp8's turn"; "" for no more than runs
    table      null, or for several runs (if there is room) {"columns": [words], "rows": [[words]]}, a row a run
    summary    everything in one line, for screen readers

A message weighs at most MESSAGE_BYTES, counted as JSON with its names, so that with the protocol around it there is room to spare.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from surokit.widgets.figure import plain
from surokit.widgets.picture import (
    PANES,
    cut,
    ending,
    expert_lines,
    figures,
    headline,
    idle_lines,
    layer_lines,
    progress_words,
    rank_lines,
    run_table,
    suggestion,
    summary_line,
    sustained_lines,
    unit_of,
)
from surokit.widgets.state import PanelState, Ruler, Series, worst

SLOTS = 32
MESSAGE_BYTES = 18_500  # of 20,000, which leaves room for the message's own header
DELTA_BYTES, KEY_BYTES = 4_500, 6_500
KEY_POINTS, COARSEST = 512, 16
# limits of (events, sentences, letters of a sentence), to be tried in turn until the head fits: figures come first
HEADS = ((12, 8, 200), (6, 3, 120), (2, 1, 80), (0, 0, 40), (0, 0, 12))
RENEW_S = 10.0
RUNS = 12  # more runs are left out
# the curves that are sent, most important first: with many runs there is no room for the last ones
NAMES = (
    "loss_mean",
    "ruler",
    "rate_sustained",
    "held_out",
    "loss",
    "idle_mean",
    "memory",
    "grad_norm",
    "rate",
    "idle",
    "idle_data",
    "lr",
)


class _Slot:
    """A _Slot is one curve's place: the end of its keyframe, when that was sent, and the points that have come after it."""

    __slots__ = ("end", "gen", "index", "name", "number", "points", "sent_s", "series")

    def __init__(self, index: int, name: str, series: Series | Ruler) -> None:
        self.index, self.name, self.series = index, name, series
        self.number = 0  # of its run
        self.gen = 0
        self.end = -float("inf")  # the last x of the keyframe
        self.sent_s = -float("inf")
        self.points: Sequence[tuple[float, ...]] = ()

    @property
    def moved(self) -> bool:
        return self.series.last is not None and self.series.last[0] > self.end


class Wire:
    """A Wire turns states into messages; the protocol stands at the top of this file.

    states: by the names of the runs; it may gain, lose and replace entries between two calls. The first RUNS are sent. clock:
    seconds, monotonic.
    """

    def __init__(self, states: Mapping[str, PanelState], clock: Callable[[], float] = time.monotonic) -> None:
        self._states = states
        self._clock = clock
        self._slots: dict[tuple[str, str], _Slot] = {}
        self._free = list(range(SLOTS - 1, -1, -1))
        self._gens = self._n = 0

    def next(self, final: bool = False) -> dict[str, str]:
        """Return the texts of the next message by the names of their traits: `head`, `delta`, and those keys that changed, at most
        MESSAGE_BYTES together. final: nothing more comes for now; the message is complete either way.
        """
        self._n += 1
        states = dict(list(self._states.items())[:RUNS])
        out = self._place(states)
        limit = self._take_points()
        due = self._due(limit)
        self._put_delta(out)
        if due:  # keyframes leave room for what has to be said, and are coarser for it where there are many runs
            self._put_head(out, states, final, HEADS[-1:])
        room = whole = min(KEY_BYTES, _left(out))
        for place, slot in enumerate(due):
            if place and slot.gen:
                break  # those that were never sent share a message; the others take turns, so that messages stay light
            if not (taken := self._renew(slot, room, whole, out)):
                break
            room -= taken
        self._put_delta(out)
        self._put_head(out, states, final, HEADS)
        for slot in due:  # the room that is left is for curves that lose detail, or soon will
            if len(slot.points) >= limit / 2 and not self._renew(slot, _left(out), KEY_BYTES, out):
                break
        self._put_delta(out)
        return out

    def _place(self, states: Mapping[str, PanelState]) -> dict[str, str]:
        """Give every curve that has points a slot, and return the keys to empty: those of curves that no longer need theirs."""
        room = SLOTS // max(len(states), 1)
        wanted: dict[tuple[str, str], Series | Ruler] = {}
        for run, state in states.items():
            wanted.update({(run, name): getattr(state, name) for name in _known(state)[:room]})
        numbers = {run: number for number, run in enumerate(states)}
        out = {}
        for of, slot in list(self._slots.items()):
            if wanted.get(of) is not slot.series:
                del self._slots[of]
                self._free.append(slot.index)
                if slot.gen:
                    out[f"key_{slot.index}"] = ""
        self._slots = {
            of: self._slots.get(of) or _Slot(self._free.pop(), of[1], series) for of, series in wanted.items()
        }
        for (run, _), slot in self._slots.items():
            slot.number = numbers[run]
        return out

    def _take_points(self) -> int:
        """Take every curve's points since its keyframe, and return how many a curve may have: those with new points share the
        delta's room."""
        slots = self._slots.values()
        moved = sum(slot.moved for slot in slots)
        limit = max(8, (DELTA_BYTES - 50 * len(slots)) // (14 * max(moved, 1)))
        for slot in slots:
            slot.points = _points(slot.series, slot.end, limit) if slot.moved else ()
        return limit

    def _due(self, limit: int) -> list[_Slot]:
        """Return the curves whose keyframes are due, the oldest first; of equally old ones the most important comes first."""
        now = self._clock()

        def is_due(slot: _Slot) -> bool:
            old = now - slot.sent_s >= RENEW_S and slot.gen > 0
            return len(slot.points) >= limit / 2 or (old and len(slot.points) > 0)

        return sorted(filter(is_due, self._slots.values()), key=lambda s: (s.sent_s, NAMES.index(s.name), s.number))

    def _renew(self, slot: _Slot, room: int, whole: int, out: dict[str, str]) -> int:
        """Put a new keyframe into the message, and return its bytes, or 0 if there is less room left than it needs. It is made
        coarser only if the whole room would not be enough for it."""
        name, limit = f"key_{slot.index}", KEY_POINTS
        while True:
            points = _points(slot.series, -float("inf"), limit)
            text = _entry(slot, self._gens + 1, points)
            if (bytes_ := weight(name, text)) <= room:
                break
            if room < whole or limit < COARSEST:
                return 0
            limit = limit * 3 // 4
        self._gens += 1
        slot.gen, slot.sent_s, slot.end, slot.points = self._gens, self._clock(), points[-1][0], ()
        out[name] = text
        return bytes_

    def _put_delta(self, out: dict[str, str]) -> None:
        entries = (_entry(slot, slot.gen, slot.points) for slot in self._slots.values())
        out["delta"] = f'{{"n":{self._n},"series":[{",".join(entries)}]}}'

    def _put_head(
        self, out: dict[str, str], states: Mapping[str, PanelState], final: bool, heads: Sequence[tuple[int, int, int]]
    ) -> None:
        """Put the head into the message, by the first of the limits in `heads` with which it fits, else by the last."""
        out.pop("head", None)
        room = _left(out)
        for events, lines, letters in heads:
            head = self._head(states, final, events, lines, letters)
            text = json.dumps(head, ensure_ascii=False, separators=(",", ":"))
            if weight("head", text) <= room:
                break
        out["head"] = text

    def _head(
        self, states: Mapping[str, PanelState], final: bool, events: int, lines: int, letters: int
    ) -> dict[str, Any]:
        shown = {name for _, name in self._slots}
        axes = ["steps"]
        if states and all(state.tokens for state in states.values()):
            axes.append("tokens")
        if states and all(state.ruler.last is not None for state in states.values()):
            axes.append("time")
        if states and all(state.usd_per_s is not None for state in states.values()):
            axes.append("usd")
        columns, rows = run_table(states) if len(states) > 1 and lines else ([], [])
        return {
            "v": 1,
            "n": self._n,
            "at": round(time.time(), 2),
            "final": final,
            "panes": [
                {
                    "name": pane.name,
                    "title": unit_of(*states.values()) if pane.name == "rate" else pane.title,
                    "color": pane.color,
                    "series": [vars(curve) for curve in pane.curves if curve.name in shown],
                    "percent": pane.percent,
                    "zero": pane.zero,
                    "robust": pane.robust,
                }
                for pane in PANES
                if any(curve.name in shown for curve in pane.curves)
            ],
            "axes": axes,
            "runs": [self._run(*run, number, events, lines, letters) for number, run in enumerate(states.items())],
            "headline": headline(self._states),
            "table": {"columns": columns, "rows": rows} if rows else None,
            "summary": cut(" | ".join(summary_line(state) for state in states.values()), 3 * letters),
        }

    def _run(self, key: str, state: PanelState, number: int, events: int, lines: int, letters: int) -> dict[str, Any]:
        notes = [
            *idle_lines(state),
            *sustained_lines(state),
            *layer_lines(state),
            *expert_lines(state),
            *rank_lines(state),
        ]
        told = figures(state)
        return {
            "key": plain(key)[:60],
            "title": cut(state.title or key, min(letters, 60)),
            "recipe": cut(state.recipe, letters),
            "color": number,
            "state": state.standing,
            "phase": state.health.phase,
            "line": progress_words(state),
            "step": state.step,
            "total": state.total,
            "tokens": state.tokens,
            "seconds": round(state.elapsed_s, 2),
            "progress": None if not state.total else round(min(state.step / state.total, 1.0), 4),
            "usd_per_s": state.usd_per_s,
            "figures": [figure._asdict() for figure in (told if lines else told[:2])],
            "notes": [cut(line, letters) for line in notes[:lines]],
            "warnings": [cut(line, letters) for line in state.warning_lines()[:lines]],
            "suggestion": cut(suggestion(state), letters) if lines else "",
            "events": _events(state, events, letters),
            "ending": cut(ending(state), letters) if state.reason is not None else "",
            "hidden": [name for name in _known(state) if (key, name) not in self._slots] if lines else [],
        }


def weight(name: str, text: str) -> int:
    """Count the bytes of a trait in a message: JSON text within JSON."""
    return len(json.dumps({name: text}, ensure_ascii=False).encode())


def _left(out: Mapping[str, str]) -> int:
    """Count the bytes that may be added to a message."""
    return MESSAGE_BYTES - sum(weight(name, text) for name, text in out.items())


def _known(state: PanelState) -> list[str]:
    """Return the names of a state's curves that have points, most important first."""
    return [name for name in NAMES if getattr(state, name).last is not None]


def _points(series: Series | Ruler, after: float, limit: int) -> Sequence[tuple[float, ...]]:
    if isinstance(series, Series):
        return series.since(after, limit)
    knots = series.since(after)
    return [*knots[: -1 : max(1, -(-len(knots) // (limit - 1)))], *knots[-1:]]


def _entry(slot: _Slot, gen: int, points: Sequence[tuple[float, ...]]) -> str:
    x = [p[0] for p in points]
    dx = ",".join([f"{a - b:.9g}" for a, b in zip(x, [0.0, *x])])
    if isinstance(slot.series, Ruler):
        y = ",".join([f"{p[1]:.7g}" for p in points]) + '],"z":[' + ",".join([f"{p[2]:.7g}" for p in points])
    else:
        y = ",".join([_number(p[1]) for p in points])
    return f'{{"slot":{slot.index},"of":[{slot.number},"{slot.name}"],"gen":{gen},"dx":[{dx}],"y":[{y}]}}'


def _number(value: float) -> str:
    if value - value == 0.0:
        return f"{value:.5g}"
    return "null" if value != value else '"inf"' if value > 0 else '"-inf"'


def _events(state: PanelState, count: int, letters: int) -> list[dict[str, Any]]:
    chosen = worst(state.events, count)
    losses = dict(state.loss.since()) if chosen else {}
    out = []
    for event in chosen:
        y = losses.get(event.step)
        out.append(
            {
                "step": event.step,
                "kind": event.kind,
                "y": y if y is not None and math.isfinite(y) else None,
                "text": cut(event.text, letters),
                "suggestion": cut(event.suggestion, letters),
            }
        )
    return out
