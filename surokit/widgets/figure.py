"""This module draws line charts as SVG text, without a plotting library.

The live panel redraws a few times a second inside the process that trains, so a drawing has to cost about a
millisecond, weigh a few kilobytes and need nothing but a browser: no plotting library, no script, no font, no request.
The functions are pure: they take lines and return a string.

The picture stands alone (an `<img>`, a reopened notebook, a file) and inline in a page. Colours come from three layers,
each overriding the one before: plain light values, `prefers-color-scheme: dark`, and JupyterLab's theme variables where
the picture sits inside its page. A viewer that knows neither keeps the first. Lines use the Okabe-Ito colours, which
stay apart for the common kinds of colour blindness.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

Theme = Literal["auto", "light", "dark"]
Style = Literal["line", "broad", "faint", "dots"]  # broad: a pale line that others may lie on

# Okabe and Ito (2008), in the order in which lines take them: light background, dark background.
PALETTE_LIGHT = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B58900", "#56B4E9")
PALETTE_DARK = ("#56B4E9", "#F0813A", "#2DC39A", "#E39BC4", "#F0C24B", "#8FB8DE")

_HUGE = 1e100  # larger values fit on no axis; they are drawn at the edge
# a terminal's colour codes, and characters that no XML may hold: one in an error's text and the whole picture is refused
_UNFIT = re.compile("\x1b\\[[0-9;?]*[a-zA-Z]|[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Line:
    """A Line is one series of a pane. `x` and `y` have equal length and x ascends; a non-finite y breaks the line and leaves a
    cross.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: Style = "line"
    color: int = 0


@dataclass(frozen=True)
class Mark:
    """A Mark shows that something happened at `x`: a hairline with a triangle (alarm), a diamond (turn for the worse) or words
    (note)."""

    x: float
    kind: Literal["alarm", "turn", "note"]
    text: str = ""


@dataclass(frozen=True)
class Pane:
    """A Pane is one chart: a headline number, its lines, and the place it takes (`left`, `width` in shares of the figure's width,
    heights in px).
    """

    title: str
    lines: Sequence[Line]
    headline: str = ""
    note: str = ""
    left: float = 0.0
    width: float = 1.0
    top: float = 0.0
    height: float = 150.0
    x_range: tuple[float, float] | None = None
    y_range: tuple[float | None, float | None] = (None, None)
    percent: bool = False
    robust: bool = (
        False  # the first steps' extremes may leave the frame (marked by a triangle) so that the rest can be read
    )
    x_ticks: int = 6
    y_ticks: int = 4
    legend: bool = True
    marks: Sequence[Mark] = ()
    empty: str = "no steps yet"  # said in the place of an axis, where no line has a point


def nice_ticks(low: float, high: float, target: int = 5) -> list[float]:
    """Return at most `target + 1` round numbers (1, 2, 2.5 or 5 times a power of ten apart) inside [low, high], ascending.

    Equal ends give that one number. Raises ValueError for ends that are not finite or in the wrong order.
    """
    if not (math.isfinite(low) and math.isfinite(high)) or low > high:
        raise ValueError(f"ticks need finite ends in order, got {low} and {high}; drop non-finite values first")
    if low == high:
        return [low]
    span = high - low
    if not 0.0 < span / max(target, 1) < math.inf or span / max(abs(low), abs(high)) < 1e-12:
        return [low]  # nothing between the ends can be told apart (or told at all)
    power = 10.0 ** math.floor(math.log10(span / max(target, 1)))
    ticks: list[float] = []
    for step in (power, 2 * power, 2.5 * power, 5 * power, 10 * power, 20 * power):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        ticks = [i * step for i in range(first, last + 1)]
        if len(ticks) <= target + 1:
            break
    return ticks


def plain(text: str) -> str:
    """Return the text without characters that cannot be shown: colour codes, other control characters, lone surrogates."""
    return _UNFIT.sub("", text)


def _escaped(text: str) -> str:
    return escape(plain(text))


def short(value: float, digits: int = 3) -> str:
    """Return a number as people read it: 950, 18.2k, 1.25M, 3.41, 0.00021 as 2.1e-4; non-finite values by name."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    size = abs(value)
    for bound, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if bound <= size < 1e15:
            scale = 1e3 if unit == "k" else bound
            return f"{_significant(value / scale, digits)}{unit}"
    if size >= 1e15 or 0 < size < 1e-2:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{_trim(mantissa)}e{int(exponent)}"
    return _significant(value, digits)


def _significant(value: float, digits: int) -> str:
    whole = len(str(int(abs(value))))
    if abs(value) < 1:
        whole = 1
    return _trim(f"{value:,.{max(digits - whole, 0)}f}")


def _trim(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def _tick_labels(ticks: Sequence[float], percent: bool) -> list[str]:
    """Return the labels of one axis, with equally many decimals, so that 3, 3.5, 4 reads 3.0, 3.5, 4.0."""
    scale, unit = (100.0, "%") if percent else (1.0, "")
    top = max((abs(t) * scale for t in ticks), default=0.0)
    for bound, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if top >= bound and not percent:
            scale, unit = (1e-3 if letter == "k" else 1 / bound), letter
            break
    values = [t * scale for t in ticks]
    if top and top < 1e-3:
        return [short(v, 2) for v in values]
    decimals = 0
    while decimals < 6 and any(abs(v - round(v, decimals)) > 1e-9 * max(top * scale, 1e-3) for v in values):
        decimals += 1
    # Adding 0.0 turns -0.0 into 0.0.
    return [(f"{round(v, decimals) + 0.0:,.{decimals}f}" + (unit if v or percent else "")) for v in values]


def thin(x: Sequence[float], y: Sequence[float], limit: int) -> tuple[list[float], list[float]]:
    """Return at most about `limit` of the points: of each run of neighbours the lowest, the highest and the first non-finite, in
    order.
    """
    count = len(y)
    if count <= limit:
        return list(x), list(y)
    run = math.ceil(2 * count / limit)
    keep: list[int] = []
    for start in range(0, count, run):
        indices = range(start, min(start + run, count))
        finite = [i for i in indices if math.isfinite(y[i])]
        chosen = {min(finite, key=y.__getitem__), max(finite, key=y.__getitem__)} if finite else set()
        if len(finite) < len(indices):
            chosen.add(next(i for i in indices if not math.isfinite(y[i])))
        keep += sorted(chosen)
    return [x[i] for i in keep], [y[i] for i in keep]


def _limits(pane: Pane) -> tuple[float, float]:
    """Return the y range: the ends that the pane fixes, else the data's own with a margin; a robust pane may cut off the highest
    two percent.
    """
    finite = [v for line in pane.lines for v in line.y if abs(v) < _HUGE]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    if pane.robust and len(finite) >= 20:
        ordered = sorted(finite)
        usual = ordered[int(0.98 * (len(ordered) - 1))]
        if high - usual > 2 * (usual - low) > 0:
            high = usual + 0.2 * (usual - low)
    fixed_low, fixed_high = pane.y_range
    low = low if fixed_low is None else fixed_low
    high = high if fixed_high is None else fixed_high
    air = 0.07 * (high - low)
    if air <= 1e-9 * max(abs(low), abs(high)) + 1 / _HUGE:  # one value: give it a frame of its own size
        air = 0.05 * abs(high) + 1 / _HUGE if abs(high) > 1e3 / _HUGE else 0.5
    low = low - air if fixed_low is None else low
    high = high + air if fixed_high is None else high
    return (low, high) if high > low else (low, low + 1.0)


def _path(points: Iterable[tuple[float, float] | None]) -> str:
    """Return an SVG path in tenths of a pixel, relative after each move: the shortest plain text for a line. None lifts the
    pen.
    """
    parts: list[str] = []
    x0 = y0 = 0
    pen_down = False
    for point in points:
        if point is None:
            pen_down = False
            continue
        x1, y1 = round(point[0] * 10), round(point[1] * 10)
        if pen_down:
            parts.append(f"l{(x1 - x0) / 10:g} {(y1 - y0) / 10:g}")
        else:
            parts.append(f"M{x1 / 10:g} {y1 / 10:g}")
            pen_down = True
        x0, y0 = x1, y1
    return "".join(parts).replace(" -", "-")


def _text(x: float, y: float, text: str, kind: str, anchor: str = "") -> str:
    align = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}"{align}>{_escaped(text)}</text>'


def draw_pane(pane: Pane, width: float) -> str:
    """Return the SVG group of one pane in a figure `width` px wide."""
    margin_left, margin_right, head, foot = 44.0, 12.0, 30.0, 18.0
    left = pane.left * width + margin_left
    right = (pane.left + pane.width) * width - margin_right
    top, bottom = pane.top + head, pane.top + pane.height - foot
    edge = pane.left * width + 14.0

    # One flowing text, so that the words keep their distance in any font.
    parts = [("n", pane.title), ("h", pane.headline), ("m", pane.note)]
    spans = "".join(
        f'<tspan class="{kind}" dx="{8 * (i > 0)}">{_escaped(text)}</tspan>'
        for i, (kind, text) in enumerate(parts)
        if text
    )
    out = ["<g>", f'<text x="{edge:g}" y="{pane.top + 17:g}">{spans}</text>']

    ends = [x for line in pane.lines for x in (*line.x[:1], *line.x[-1:])]
    x_low, x_high = pane.x_range or (min(ends, default=0.0), max(ends, default=1.0))
    if x_high <= x_low:
        x_high = x_low + 1.0
    y_low, y_high = _limits(pane)
    x_scale, y_scale = (right - left) / (x_high - x_low), (bottom - top) / (y_high - y_low)

    y_ticks = nice_ticks(y_low, y_high, pane.y_ticks) if ends else []
    for value, label in zip(y_ticks, _tick_labels(y_ticks, pane.percent)):
        y = bottom - (value - y_low) * y_scale
        out.append(f'<path class="g" d="M{left:.1f} {y:.1f}H{right:.1f}"/>')
        out.append(_text(left - 6, round(y + 3.5, 1), label, "t", "end"))
    if not ends:
        out.append(_text(round((left + right) / 2, 1), round((top + bottom) / 2, 1), pane.empty, "m", "middle"))
    x_ticks = [t for t in nice_ticks(x_low, x_high, pane.x_ticks) if t == round(t)] if ends else []
    for value, label in zip(x_ticks, _tick_labels(x_ticks, False)):
        x = left + (value - x_low) * x_scale
        at_end = right - x < 12
        out.append(
            _text(
                round(right + 2 if at_end else x, 1), round(bottom + 14, 1), label, "t", "end" if at_end else "middle"
            )
        )
    out.append(f'<path class="a" d="M{left:.1f} {bottom:.1f}H{right:.1f}"/>')

    frame = (left, right, top, bottom)
    out += [_draw_line(line, frame, (x_low, x_scale), (y_low, y_scale)) for line in pane.lines]
    out += [_draw_mark(mark, frame, (x_low, x_scale)) for mark in pane.marks if x_low <= mark.x <= x_high]
    if pane.legend:
        out.append(_legend(pane.lines, right, pane.top + 17))
    out.append("</g>")
    return "".join(out)


def _draw_line(
    line: Line,
    frame: tuple[float, float, float, float],
    x_map: tuple[float, float],
    y_map: tuple[float, float],
) -> str:
    left, right, top, bottom = frame
    (x_low, x_scale), (y_low, y_scale) = x_map, y_map
    # Points a pixel, beyond which nothing more can be seen: every point is paid for in bytes.
    density = {"faint": 0.65, "line": 0.4, "broad": 0.4, "dots": 0.07}[line.style]
    xs, ys = thin(line.x, line.y, max(16, int(density * (right - left))))
    points: list[tuple[float, float] | None] = []
    crosses: list[tuple[float, float]] = []
    above: list[tuple[float, float]] = []
    for x_value, y_value in zip(xs, ys):
        x = left + (x_value - x_low) * x_scale
        if not left - 0.5 <= x <= right + 0.5:
            points.append(None)
            continue
        if not math.isfinite(y_value):
            points.append(None)
            crosses.append((x, top + 5))
            continue
        y = bottom - (y_value - y_low) * y_scale
        if y < top - 0.5 and line.style == "faint":
            above.append((x, top))
        points.append((x, min(max(y, top), bottom)))

    color = f"c{line.color % len(PALETTE_LIGHT)}"
    out = []
    if line.style == "dots":
        dots = "".join(f"M{p[0]:.1f} {p[1]:.1f}h0" for p in points if p)
        out.append(f'<path class="r" d="{dots}"/><path class="d {color}" d="{dots}"/>' if dots else "")
    else:
        path = _path(points)
        kind = {"faint": "s", "broad": "w"}.get(line.style, "l")
        alone = len([p for p in points if p]) == 1
        out.append(f'<path class="{kind} {color}" d="{path}{"h0" if alone else ""}"/>' if path else "")
    # Marks are few on purpose: the warning line under the figure carries the count.
    for x, y in crosses[:: max(1, len(crosses) // 24)]:
        out.append(f'<path class="x" d="M{x - 3:.1f} {y - 3:.1f}l6 6m0-6l-6 6"/>')
    for x, y in above[:: max(1, len(above) // 24)]:
        out.append(f'<path class="{color} o" d="M{x:.1f} {y:.1f}l3 5h-6z"/>')
    return "".join(out)


def _draw_mark(mark: Mark, frame: tuple[float, float, float, float], x_map: tuple[float, float]) -> str:
    left, right, top, bottom = frame
    x = round(left + (mark.x - x_map[0]) * x_map[1], 1)
    if mark.kind == "note":
        late = x > (left + right) / 2
        words = _text(x - 4 if late else x + 4, top + 9, mark.text, "t", "end" if late else "")
        return f'<path class="i" d="M{x:g} {top:g}V{bottom:g}"/>{words}'
    glyph = f"M{x - 4:g} {top - 7:g}h8l-4 7z" if mark.kind == "alarm" else f"M{x:g} {top - 8:g}l4 4-4 4-4-4z"
    return f'<path class="e" d="M{x:g} {top:g}V{bottom:g}"/><path class="v" d="{glyph}"/>'


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], colors: Sequence[int], top: float, width: float
) -> str:
    """Draw a table's cells as SVG text: the first column on the left, after its run's colour, the others flush right, spread over
    the width."""
    sizes = [max(map(len, column)) * 6.6 for column in zip(columns, *rows)]
    gap = (width - 28 - 16 - sum(sizes)) / max(len(columns) - 1, 1)
    ends = [30 + sum(sizes[: i + 1]) + gap * i for i in range(len(columns))]
    out = []
    for number, row in enumerate([columns, *rows]):
        y = top + 13 + 18 * number
        if number:
            color = colors[number - 1] % len(PALETTE_LIGHT)
            out.append(f'<path class="l c{color}" d="M14 {y - 4:g}h10"/>')
        for i, cell in ((i, cell) for i, cell in enumerate(row) if cell):
            kind = "m" if not number else "y"
            out.append(_text(30, y, cell, kind) if not i else _text(round(ends[i], 1), y, cell, kind, "end"))
    return "".join(out)


def _legend(lines: Sequence[Line], right: float, y: float) -> str:
    """Draw the names of the lines as SVG text, right-aligned in the pane's head; "" for a single line, which needs none."""
    shown = [line for line in lines if len(line.x)]
    if len(shown) < 2:
        return ""
    spans = []
    for number, line in enumerate(shown):
        mark = "●" if line.style == "dots" else "━"
        weight = ' fill-opacity=".45"' if line.style == "faint" else ""
        color = f"f{line.color % len(PALETTE_LIGHT)}"
        gap = ' dx="12"' if number else ""
        spans.append(
            f'<tspan class="{color}"{weight}{gap}>{mark}</tspan><tspan class="m" dx="4">{_escaped(line.label)}</tspan>'
        )
    return f'<text x="{right:g}" y="{y:g}" text-anchor="end">{"".join(spans)}</text>'


def _css(theme: Theme) -> str:
    """Return the style sheet, with colours in layers (see the top of this file). Every rule starts with `.sk`, so that an inline
    picture leaves its page alone.
    """

    def layer(background: str, strong: str, weak: str, grid: str, warn: str, palette: Sequence[str]) -> str:
        def themed(selector: str, prop: str, value: str, variable: str) -> str:
            override = f";{prop}:var({variable},{value})" if theme == "auto" else ""
            return f".sk {selector}{{{prop}:{value}{override}}}"

        return "".join(
            [
                themed(".b", "fill", background, "--jp-layout-color1"),
                themed(".r", "stroke", background, "--jp-layout-color1"),
                themed(".h,.sk .k,.sk .y", "fill", strong, "--jp-content-font-color1"),
                themed(".n,.sk .m,.sk .t", "fill", weak, "--jp-content-font-color2"),
                themed(".g,.sk .p", "stroke", grid, "--jp-border-color2"),
                themed(".a", "stroke", weak, "--jp-content-font-color3"),
                themed(".i", "stroke", weak, "--jp-content-font-color2"),
                f".sk .x,.sk .e{{stroke:{warn}}}.sk .v{{fill:{warn}}}",
                *(f".sk .c{i}{{stroke:{c}}}.sk .f{i}{{fill:{c}}}" for i, c in enumerate(palette)),
            ]
        )

    shape = (
        ".sk text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,Arial,sans-serif;font-size:12px}"
        ".sk .h{font-size:17px;font-weight:600}.sk .k{font-size:14px;font-weight:600}"
        ".sk .n{font-size:13px}.sk .t{font-size:11px}"
        ".sk path{fill:none;stroke-linejoin:round;stroke-linecap:round}"
        ".sk .g,.sk .a{stroke-width:1;shape-rendering:crispEdges}.sk .p{stroke-width:4}.sk .q{stroke-width:4}"
        ".sk .l{stroke-width:2}.sk .w{stroke-width:6;stroke-opacity:.45}.sk .s{stroke-width:1.2;stroke-opacity:.42}"
        ".sk .e,.sk .i{stroke-dasharray:2 3;stroke-opacity:.6}.sk path.v{stroke:none}"
        ".sk .d{stroke-width:6}.sk .r{stroke-width:9}.sk .x{stroke-width:2}.sk .o{stroke-width:1.5}"
    )
    light = layer("#ffffff", "#1c1f23", "#5f6670", "#e4e7eb", "#C4380D", PALETTE_LIGHT)
    dark = layer("#16181c", "#eceef1", "#a2a9b4", "#30353d", "#FF8A5C", PALETTE_DARK)
    if theme == "light":
        return shape + light
    if theme == "dark":
        return shape + dark
    return f"{shape}{light}@media(prefers-color-scheme:dark){{{dark}}}"


def figure(
    panes: Sequence[Pane],
    *,
    title: str,
    description: str,
    head: tuple[str, str, str] = ("", "", ""),
    progress: float | None = None,
    foot: Sequence[tuple[Literal["note", "warning", "advice"], str]] = (),
    sub: tuple[str, str] = ("", ""),
    alarm: bool = False,
    table: tuple[Sequence[str], Sequence[Sequence[str]], Sequence[int]] | None = None,
    width: int = 560,
    theme: Theme = "auto",
) -> str:
    """Draw a whole picture as SVG text.

    panes: placed by their own `top` and `left`, below the head line. head: (name, more about it, how it stands) on top, the last
    as a warning if `alarm`. sub: a second row under it, left and right. progress: 0..1 for a thin bar under the head, None for no
    bar. table: columns, rows, and of each row its colour's number. foot: lines of text below, as ("note" | "warning" | "advice",
    text). title, description: what a screen reader says. width: of the drawing in px; it shrinks with the page, and is made to be
    read at 480. theme: "auto" follows the reader's system.
    """
    head_height = 62.0 if any(sub) else 44.0
    body = max((pane.top + pane.height for pane in panes), default=0.0)
    table_top = head_height + body + 4
    foot_top = table_top + (18 * (len(table[1]) + 1) + 4 if table else 0)
    height = round(foot_top + 18 * len(foot) + (10 if foot else 4))
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="sk" role="img" viewBox="0 0 {width} {height}"'
        f' width="{width}" height="{height}" style="max-width:100%;height:auto">'
        f"<title>{_escaped(title)}</title><desc>{_escaped(description)}</desc>"
        f"<style>{_css(theme)}</style>",
        f'<rect class="b" width="{width}" height="{height}" rx="8"/>',
        f'<text x="14" y="24"><tspan class="k">{_escaped(head[0])}</tspan>'
        f'<tspan class="m" dx="8">{_escaped(head[1])}</tspan></text>',
        _text(width - 12, 24, head[2], "v" if alarm else "m", "end"),
        *(_text(14, 43, text, "m") for text in sub[:1] if text),
        *(_text(width - 12, 43, text, "m", "end") for text in sub[1:] if text),
    ]
    if progress is not None:
        start, end = 16.0, width - 14.0
        done = start + (end - start) * min(max(progress, 0.0), 1.0)
        out.append(f'<path class="p" d="M{start:g} {head_height - 7:g}H{end:g}"/>')
        out.append(f'<path class="q c0" d="M{start:g} {head_height - 7:g}H{done:.1f}"/>')
    out.append(f'<g transform="translate(0 {head_height:g})">')
    out += [draw_pane(pane, width) for pane in panes]
    out.append("</g>")
    if table:
        out.append(_table(*table, table_top, width))
    for row, (kind, text) in enumerate(foot):
        y = foot_top + 13 + 18 * row
        if kind == "warning":
            out.append(f'<path class="v" d="M14 {y:g}h11l-5.5-10z"/>')
            out.append(_text(31, y, text, "v"))
        elif kind == "advice":
            out.append(_text(31, y, text, "m"))
        else:
            out.append(_text(14, y, text, "m"))
    out.append("</svg>")
    return "".join(out)
