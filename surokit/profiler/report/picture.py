"""Draw the pictures of a profile: one step as an inline SVG, tables with bars, two profiles side by side. They need no
script, no style sheet and no external file.

Text takes the colour of its surroundings (currentColor) and backgrounds are transparent, so the same picture reads in a
light and a dark notebook. Colours are from Okabe and Ito's palette, told apart by the colour-blind.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from surokit.profiler.analysis import timeline as tl
from surokit.profiler.analysis.roles import DATA_RANGES, OPTIMIZER_RANGES
from surokit.profiler.analysis.tables import PHASES, Table, is_operator
from surokit.profiler.analysis.timeline import Int, Kind
from surokit.profiler.record.recording import Recording
from surokit.units import three_digits

BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, MUSTARD, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#B58900",
    "#8A8A8A",
)
CAUSE_COLORS = {
    "launches": ORANGE,
    "syncs": VERMILION,
    "copies": PURPLE,
    "host": SKY,
    "offload": MUSTARD,
    "communication": GREEN,
}
IN_TURN = ("data", "copies", "forward", "backward", "optimizer", "sync", "other")  # phases as a step goes through them
PHASE_COLORS = dict(zip(PHASES, (VERMILION, MUSTARD, PURPLE, BLUE, GREEN, ORANGE, GREY)))
WIDTH, LEFT, LANE = 820, 84, 16
TICKS = 100  # reads drawn on one picture
ROWS = 12  # of the largest, in a table
LEAST_GFLOP = 1e-6  # below it, what the subtraction of sums left
ADVICE = 8  # pieces shown


@dataclass(frozen=True)
class Lane:
    """A Lane is one row of a step's picture: intervals of one colour."""

    label: str
    color: str
    start_I: Int
    end_I: Int


@dataclass(frozen=True)
class Shown:
    """A Shown holds the parts of a profile that the pictures need."""

    title: str
    recording: Recording
    windows: tuple[tuple[int, int], ...]
    summary: dict[str, Any]
    tables: dict[str, Table]
    by: str
    notes: Sequence[str]
    light: dict[str, tuple[float, str]]  # module -> share of the speed of light, its bound

    @property
    def middle(self) -> int:
        """Return the number of the step of median length."""
        return int(np.argsort([b - a for a, b in self.windows], kind="stable")[len(self.windows) // 2])


# ---------------------------------------------------------------------------------------------------------------- one step


def step_svg(shown: Shown, step: int, title: str = "", span_ns: int = 0) -> str:
    """Draw one step: what the host did, what was busy, where nothing ran and why. Time runs from left to right over the
    step, or over `span_ns` where that is longer, so that steps can be compared."""
    begin, stop = shown.windows[step]
    lanes = _lanes(shown.recording, begin, stop)
    rows = [(lane.label, [lane]) for lane in lanes]
    if shown.summary["activity"] != "unknown":  # else idle time is
        rows.append(("idle", _gap_lanes(shown, step, lanes)))
    title = title or f"step {step}, {three_digits((stop - begin) / 1e6)} ms"
    return rows_svg(title, rows, begin, stop, span_ns, _reads(shown, begin, stop))


Marks = Iterable[tuple[int, str]]  # moments, each with what its tooltip says


def rows_svg(
    title: str, rows: Sequence[tuple[str, list[Lane]]], begin: int, stop: int, span_ns: int = 0, marks: Marks = ()
) -> str:
    """Draw rows of lanes over [begin, stop), each with its label; of the lanes of a row a later one covers the earlier. `marks` are
    thin lines through all rows."""
    span = max(stop - begin, span_ns, 1)
    scale = (WIDTH - LEFT - 8) / span
    height = 22 + (LANE + 5) * len(rows) + 18
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="100%" style="max-width:{WIDTH}px" '
        f'role="img" aria-label="{escape(title)}" font-family="sans-serif" font-size="11" fill="currentColor">',
        f'<text x="0" y="12">{escape(title)}</text>',
    ]
    y = 22
    for label, row in rows:
        parts.append(f'<text x="0" y="{y + 12}">{escape(label)}</text>')
        width = (stop - begin) * scale
        parts.append(
            f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{LANE}" fill="currentColor" fill-opacity="0.07"/>'
        )
        for lane in row:
            path = _boxes(lane, begin, stop, scale, y + LANE // 2)
            if path:
                parts.append(
                    f'<path d="{path}" stroke="{lane.color}" stroke-width="{LANE}"><title>{escape(lane.label)}</title></path>'
                )
        y += LANE + 5
    for at, words in marks:
        parts.append(
            f'<path d="M{LEFT + (at - begin) * scale:.1f} 20V{y - 5}" stroke="{VERMILION}" stroke-dasharray="2 2" opacity="0.8">'
            f"<title>{escape(words)}</title></path>"
        )
    for i in range(5):
        x = LEFT + (WIDTH - LEFT - 8) * i / 4
        anchor = "start" if i == 0 else "end" if i == 4 else "middle"
        parts.append(
            f'<text x="{x:.0f}" y="{y + 10}" text-anchor="{anchor}" opacity="0.75">{three_digits(span * i / 4e6)} ms</text>'
        )
    parts.append("</svg>")
    return "".join(parts)


def _lanes(r: Recording, begin: int, stop: int) -> list[Lane]:
    """Return each lane that has something in this window, without the idle time."""
    t = r.timeline
    ops = t.is_kind(Kind.OP)
    nodes = ops & t.is_named(n.startswith("autograd::engine::evaluate_function") for n in t.names)
    ranges = t.is_kind(Kind.ANNOTATION)
    optimizer = ranges & t.is_named(n.startswith(OPTIMIZER_RANGES) for n in t.names)
    data = ranges & t.is_named(n.startswith(DATA_RANGES) for n in t.names)
    copies = t.is_kind(Kind.MEMCPY)
    device = t.is_kind(Kind.KERNEL, Kind.MEMSET)
    on_gpu = bool((device | copies).any())
    work = device if on_gpu else ops & t.is_named(is_operator(n) for n in t.names)
    names = {"data": data, "backward": nodes, "optimizer": optimizer}
    host = [Lane(n, PHASE_COLORS[n], t.start_E[chosen], t.end_E[chosen]) for n, chosen in names.items()]
    host.insert(1, Lane("forward", PHASE_COLORS["forward"], r.start_S, r.end_S))
    busy = Lane("kernels" if on_gpu else "operators", BLUE, t.start_E[work], t.end_E[work])
    moved = Lane("copies", PURPLE, t.start_E[copies], t.end_E[copies])
    seen = [lane for lane in (*host, moved) if bool(((lane.end_I > begin) & (lane.start_I < stop)).any())]
    at = len(seen) - (moved in seen)
    return [*seen[:at], busy, *seen[at:]]


def _gap_lanes(shown: Shown, step: int, lanes: list[Lane]) -> list[Lane]:
    """Draw idle time in one row: the gaps of the table in their cause's colour over all of them in grey."""
    begin, stop = shown.windows[step]
    active = [lane for lane in lanes if lane.label in ("kernels", "operators", "copies")]
    start_A = np.concatenate([lane.start_I for lane in active])
    end_A = np.concatenate([lane.end_I for lane in active])
    start, end, _ = tl.gaps(start_A, end_A, begin, stop)
    found = [Lane("idle", GREY, start, end)]
    gaps, origin = shown.tables["gaps"], shown.windows[0][0]
    for cause, color in CAUSE_COLORS.items():
        rows = [
            (origin + round(at * 1e6), origin + round((at + ms) * 1e6))
            for s, at, ms, c in zip(*(gaps[n] for n in ("step", "start_ms", "ms", "cause")))
            if s == step and c == cause
        ]
        if rows:
            spans = np.array(rows, np.int64)
            found.append(Lane(f"idle: {cause}", color, spans[:, 0], spans[:, 1]))
    return found


def _boxes(lane: Lane, begin: int, stop: int, scale: float, middle: int) -> str:
    """Draw a lane as one stroked SVG path; boxes closer than half a pixel are drawn as one, so the picture stays small.
    Positions are whole tenths of a pixel, so that the relative moves add up exactly."""
    start, end = tl.merge(*tl.clip(lane.start_I, lane.end_I, begin, stop))
    if not len(start):
        return ""
    hair = max(int(0.5 / scale), 1)
    wide, reach = tl.merge(start, end + hair)
    left = np.rint((wide - begin) * scale * 10).astype(np.int64)
    right = np.maximum(np.rint((reach - hair - begin) * scale * 10).astype(np.int64), left + 5)
    path, pen = [f"M{LEFT} {middle}"], 0
    for a, b in zip(left.tolist(), right.tolist()):
        path.append(f"m{(a - pen) / 10:g} 0h{(b - a) / 10:g}")
        pen = b
    return "".join(path)


def _reads(shown: Shown, begin: int, stop: int) -> Marks:
    """Mark where the host read a value that the table of syncs counts, with call and line."""
    counted = set(zip(*(shown.tables["syncs"][c] for c in ("file", "line", "call", "inside"))))
    reads = (s for s in shown.recording.syncs if begin <= s.start_ns < stop)
    for s in [s for s in reads if (s.file, s.line, s.call, s.inside) in counted][:TICKS]:
        yield s.start_ns, s.call + (f" at {s.file}:{s.line}" if s.file else "")


# ------------------------------------------------------------------------------------------------------- the whole profile


def profile_html(shown: Shown) -> str:
    """Show a profile as HTML: its figures, one step, its time by phase, lost time by cause, what is busy, advice and notes."""
    s, tables = shown.summary, shown.tables
    parts = [
        '<div class="surokit-profile" style="max-width:860px;overflow-x:auto">',
        f"<p><b>{escape(shown.title)}</b></p>",
        _figures(s),
        step_svg(shown, shown.middle),
        _phases(s),
    ]
    if tables["lost"]["cause"]:
        parts += ["<p><b>Lost time</b></p>", _lost_table(tables["lost"], s["activity"])]
    if shown.by == "module" and any(tables["modules"]["self_ms"]):
        parts += ["<p><b>Busy time by module</b></p>", _module_table(tables["modules"], s["busy_ms"], shown.light)]
    elif rows := largest(tables, shown.by, ROWS):
        parts += [f"<p><b>Busy time by {shown.by}</b></p>", _busy_table(rows, shown.by, s["busy_ms"])]
    advice = tables["advice"]
    if advice["advice"]:
        parts.append("<p><b>Advice</b></p><ol>")
        parts += [
            f"<li>{_code(text)} <i>(up to {three_digits(gain)} ms a step)</i></li>"
            for text, gain in list(zip(advice["advice"], advice["gain_ms"]))[:ADVICE]
        ]
        parts.append("</ol>")
    parts.append('<p style="opacity:0.75">' + "<br/>".join(escape(note) for note in shown.notes) + "</p></div>")
    return "".join(parts)


def _figures(s: dict[str, Any]) -> str:
    wall = s["wall_ms"] or 1.0
    figures = [(f"{three_digits(s['wall_ms'])} ms", "a step")]
    if s["activity"] != "unknown":
        waits = ", ".join(
            f"{w} wait {three_digits(s[f'{w}_wait_ms'])} ms" for w in ("host", "kernel", "other") if s[f"{w}_wait_ms"]
        )
        figures.append((f"{s['busy_ms'] / wall:.1%}", "busy"))
        figures.append((f"{s['idle_ms'] / wall:.1%}", "idle" + (f" ({waits})" if waits else "")))
    figures += [(number, what) for number, _, what in (words.partition(" ") for words in rates(s))]
    return "".join(
        f'<span style="display:inline-block;margin:0 1.4em .5em 0"><b style="font-size:1.15em">{escape(number)}</b> '
        f'<span style="opacity:0.75">{escape(what)}</span></span>'
        for number, what in figures
    )


def rates(s: dict[str, Any]) -> list[str]:
    """Return the figures of a summary that are no times, each as "number words", as far as they are known."""
    found = [f"{s['tokens_per_s']:,.0f} tokens/s"] if s["tokens_per_s"] else []
    if s.get("gflop_per_step"):
        found.append(f"{three_digits(s['gflop_per_step'])} GFLOP a step")
    if s.get("tflops"):
        tera = s["tflops"] >= 0.1
        found.append(f"{three_digits(s['tflops'])} TFLOP/s" if tera else f"{three_digits(1e3 * s['tflops'])} GFLOP/s")
    if s["activity"] != "unknown":
        found.append(f"{s['launches_per_step']:.0f} {'launches' if s['activity'] == 'gpu' else 'operators'} a step")
    if s["syncs_per_step"]:
        found.append(f"{three_digits(s['syncs_per_step'])} {'sync' if s['syncs_per_step'] == 1 else 'syncs'} a step")
    if s["peak_gib"]:
        whose = "process's peak so far" if s["device"] == "cpu" else "peak"
        found.append(f"{three_digits(s['peak_gib'])} GiB at the {whose}")
    return found


def _phases(s: dict[str, Any]) -> str:
    """Draw a step's time by phase: one stacked bar and its legend."""
    phases = {p: s["phases_ms"][p] for p in IN_TURN if s["phases_ms"][p] > 0}
    total = sum(phases.values())
    if not total:
        return ""
    parts, x = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 16" width="100%" '], float(LEFT)
    parts.append(f'style="max-width:{WIDTH}px" role="img" aria-label="time by phase" font-size="11" ')
    parts.append('font-family="sans-serif" fill="currentColor"><text x="0" y="11">phases</text>')
    for phase, ms in phases.items():
        width = (WIDTH - LEFT - 8) * ms / total
        parts.append(
            f'<rect x="{x:.1f}" y="2" width="{max(width, 0.3):.1f}" height="12" fill="{PHASE_COLORS[phase]}">'
            f"<title>{phase} {three_digits(ms)} ms</title></rect>"
        )
        x += width
    words = (f"{swatch(PHASE_COLORS[p])} {p} {three_digits(ms)} ms" for p, ms in phases.items())
    legend = "".join(f'<span style="display:inline-block;margin-right:1.1em">{w}</span>' for w in words)
    return "".join(parts) + f'</svg><div style="font-size:11px;margin-left:{LEFT / WIDTH:.0%}">{legend}</div>'


def _lost_table(lost: Table, activity: str) -> str:
    dollars = any(usd is not None for usd in lost.get("usd_per_day", ()))
    header = [
        "",
        "",
        "ms a step",
        "share",
        "GPU hours a day" if activity == "gpu" else "hours a day",
        *(["USD a day"] if dollars else []),
        "evidence",
    ]
    rows = []
    for i, cause in enumerate(lost["cause"]):
        usd = [f"{lost['usd_per_day'][i]:,.2f}"] if dollars else []
        ms, share = lost["ms_per_step"][i], lost["share"][i]
        figures = [_number(ms), f"{share:.1%}", f"{lost['gpu_hours_per_day'][i]:.2f}", *usd]
        rows.append(
            [
                escape(cause),
                _bar([(share, CAUSE_COLORS.get(cause, VERMILION), cause)]),
                *figures,
                escape(lost["evidence"][i]),
            ]
        )
    return _table(header, rows, left=(0, 1, len(header) - 1))


def _module_table(modules: Table, busy_ms: float, light: dict[str, tuple[float, str]]) -> str:
    """Show the rows with the most own time: forward and backward apart, their FLOPs and share of the speed of light where
    known."""
    busy = busy_ms or 1.0
    forwards, backwards = own(modules, "forward_ms"), own(modules, "backward_ms")
    order = sorted(range(len(forwards)), key=lambda i: -modules["self_ms"][i])
    shown = [i for i in order[:ROWS] if modules["self_ms"][i] > 0]
    rest = order[len(shown) :]
    gflop = own(modules, "gflop")
    flops, lights = any(gflop[i] for i in shown), any(modules["module"][i] in light for i in shown)
    legend = f"{swatch(ORANGE)} forward {swatch(GREEN)} backward"
    header = [
        "module",
        "",
        legend,
        "own ms",
        "of busy",
        *(["GFLOP"] if flops else []),
        *(["of light"] if lights else []),
    ]
    rows = []
    for i in shown:
        name, self_ms, forward, backward = modules["module"][i], modules["self_ms"][i], forwards[i], backwards[i]
        pieces = [
            (forward / busy, ORANGE, f"forward {three_digits(forward)} ms"),
            (backward / busy, GREEN, f"backward {three_digits(backward)} ms"),
        ]
        if name.startswith("(") and not backward:  # neither pass
            pieces = [(self_ms / busy, GREY, name)]
        bar = _bar(pieces)
        cells = [
            escape(short_name(name, "module", 44)),
            escape(modules["type"][i]),
            bar,
            _number(self_ms),
            f"{self_ms / busy:.1%}",
        ]
        if flops:
            cells.append(three_digits(gflop[i]) if gflop[i] >= LEAST_GFLOP else "")
        if lights:
            share, bound = light.get(name, (None, ""))
            cells.append("" if share is None else f"{share:.0%} {escape(bound)}")
        rows.append(cells)
    left_over = sum(modules["self_ms"][i] for i in rest)
    if left_over > 0:
        rows.append(
            [f"{len(rest)} more", "", "", _number(left_over), f"{left_over / busy:.1%}", *[""] * (len(header) - 5)]
        )
    return _table(header, rows, left=(0, 1, 2))


def own(modules: Table, column: str) -> list[float]:
    """Return each module's own share of a column that counts it with all below it: less that of the modules directly below."""
    names, depth, total = modules["module"], modules["depth"], modules["ms"]
    values = [value or 0.0 for value in modules[column]]
    left = list(values)
    index = {name: i for i, name in enumerate(names)}
    # the outermost module's name is not part of the paths below it: it is the one that holds the most
    roots = [i for i, d in enumerate(depth) if d == 0 and not names[i].startswith("(")]
    trunk = max(roots, key=lambda i: total[i] - modules["self_ms"][i], default=None)
    for i, name in enumerate(names):
        if depth[i] == 0:
            continue
        above = name.rpartition(".")[0]
        while above and above not in index:
            above = above.rpartition(".")[0]
        parent = index.get(above, trunk)
        if parent is not None and parent != i:
            left[parent] -= values[i]
    return [own if own > 1e-9 * value else 0.0 for own, value in zip(left, values)]  # less is rounding


def _busy_table(rows: list[tuple[str, float]], by: str, busy_ms: float) -> str:
    busy = busy_ms or 1.0
    cells = [
        [escape(short_name(name, by)), _bar([(ms / busy, BLUE, name)]), _number(ms), f"{ms / busy:.1%}"]
        for name, ms in rows
    ]
    return _table([by, "", "own ms", "of busy"], cells, left=(0, 1))


def largest(tables: dict[str, Table], by: str, count: int) -> list[tuple[str, float]]:
    """Return name and own milliseconds of the largest rows of the module, op or kernel table."""
    table = tables[{"module": "modules", "op": "ops", "kernel": "kernels"}[by]]
    pairs = sorted(zip(table[by], table["self_ms"]), key=lambda pair: -pair[1])
    return [(name, ms) for name, ms in pairs[:count] if ms > 0]


# ------------------------------------------------------------------------------------------------------------ two profiles


def difference_html(before: Shown, after: Shown, rows: list[tuple[str, float, float]]) -> str:
    """Show two profiles under each other: a step of each at one scale, lost time by cause, and the metrics of `rows`."""
    pair = (("before", before), ("after", after))
    span = max(b - a for _, shown in pair for a, b in [shown.windows[shown.middle]])
    parts = ['<div class="surokit-diff" style="max-width:860px;overflow-x:auto">']
    for word, shown in pair:
        parts.append(f'<p style="margin:.6em 0 0"><b>{word}</b> {escape(shown.title)}</p>')
        parts.append(step_svg(shown, shown.middle, span_ns=span))
    longest = max(shown.summary["wall_ms"] for _, shown in pair) or 1.0
    cells = []
    lost = [dict(zip(shown.tables["lost"]["cause"], shown.tables["lost"]["ms_per_step"])) for _, shown in pair]
    found = {**lost[0], **lost[1]}
    for cause in sorted(found, key=lambda cause: [*CAUSE_COLORS, cause].index(cause)):
        color = CAUSE_COLORS.get(cause, VERMILION)  # of the others, waits for a rank
        was, now = (each.get(cause, 0.0) for each in lost)
        for word, ms in (("before", was), ("after", now)):
            label = escape(cause) if word == "before" else ""
            change = "" if word == "before" else _change(was, now)
            cells.append([label, word, _bar([(ms / longest, color, cause)], 260), _number(ms), change])
    parts += ["<p><b>Lost to</b></p>", _table(["", "", "", "ms a step", ""], cells, left=(0, 1, 2))]
    cells = [[escape(metric), f"{a:,.4g}", f"{b:,.4g}", _change(a, b)] for metric, a, b in rows]
    parts += ["<p><b>What changed</b></p>", _table(["metric", "before", "after", "change"], cells, left=(0,)), "</div>"]
    return "".join(parts)


def _change(was: float, now: float) -> str:
    return three_digits(now - was, "+") + (f" ({(now - was) / abs(was):+,.0%})" if was else "")


# ------------------------------------------------------------------------------------------------------------------- parts


def _bar(pieces: Sequence[tuple[float, str, str]], width: int = 150) -> str:
    """Draw a stacked bar: (share in 0..1, colour, tooltip) each, of `width` pixels in all."""
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="12" role="img">']
    parts.append(f'<rect width="{width}" height="12" fill="currentColor" fill-opacity="0.07"/>')
    x = 0.0
    for share, color, words in pieces:
        length = width * min(max(share, 0.0), 1.0)
        if length > 0:
            parts.append(
                f'<rect x="{x:.1f}" width="{max(length, 0.5):.1f}" height="12" fill="{color}"><title>{escape(words)}</title></rect>'
            )
        x += length
    return "".join(parts) + "</svg>"


def _number(ms: float) -> str:
    """Format milliseconds so that they line up in a column."""
    return f"{ms:.3f}" if abs(ms) < 10 else f"{ms:.2f}" if abs(ms) < 100 else f"{ms:,.1f}"


def swatch(color: str) -> str:
    """Draw a small square of a legend."""
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect width="9" height="9" fill="{color}"/></svg>'


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int]) -> str:
    """Make an HTML table of cells that are HTML already; the columns in `left` are flush left, the others flush right."""

    def line(tag: str, cells: Sequence[str]) -> str:
        styled = (
            f'<{tag} style="text-align:{"left" if i in left else "right"};padding:.1em .6em .1em 0">{cell}</{tag}>'
            for i, cell in enumerate(cells)
        )
        return f"<tr>{''.join(styled)}</tr>"

    body = "".join(line("td", row) for row in rows)
    style = "border-collapse:collapse;font-size:12px;font-variant-numeric:tabular-nums"
    return f'<table style="{style}"><thead>{line("th", header)}</thead><tbody>{body}</tbody></table>'


def _code(text: str) -> str:
    """Convert text to HTML, with the words in backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def short_name(name: str, by: str, length: int = 60) -> str:
    """Cut a path at its beginning, and another name in its middle, since both ends of a kernel's template tell what it is."""
    head = 0 if by == "module" else length // 2
    return name if len(name) <= length else name[:head] + "..." + name[head + 3 - length :]
