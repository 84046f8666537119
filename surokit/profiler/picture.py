"""The pictures of a profile: one step as an inline SVG, and bars. No script, no style sheet, no external file.

Text takes the colour of its surroundings (currentColor) and backgrounds are transparent, so the same picture reads in a
light and a dark notebook. Colours are from Okabe and Ito's palette, told apart by the colour-blind.
"""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np

from surokit.profiler import timeline as tl
from surokit.profiler.analysis import PHASES, is_operator
from surokit.profiler.recording import Recording
from surokit.profiler.timeline import Int, Kind

BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, YELLOW, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#F0E442",
    "#8A8A8A",
)
CAUSE_COLORS = {"launches": ORANGE, "syncs": VERMILION, "copies": PURPLE, "host": SKY}
PHASE_COLORS = dict(zip(PHASES, (VERMILION, YELLOW, PURPLE, ORANGE, GREEN, BLUE, GREY)))
WIDTH, LEFT, LANE = 820, 92, 18


def step_svg(recording: Recording, window: tuple[int, int], title: str) -> str:
    """One step: what the host did, what was busy, and where nothing ran. Time from left to right over the window."""
    begin, stop = window
    lanes = _lanes(recording, begin, stop)
    height = 26 + (LANE + 6) * len(lanes) + 24
    scale = (WIDTH - LEFT - 8) / max(stop - begin, 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="100%" style="max-width:{WIDTH}px" '
        f'role="img" aria-label="{escape(title)}" font-family="sans-serif" font-size="11" fill="currentColor">',
        f'<text x="0" y="13">{escape(title)}</text>',
    ]
    y = 22
    for label, color, start, end in lanes:
        parts.append(f'<text x="0" y="{y + 13}">{escape(label)}</text>')
        parts.append(
            f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - 8}" height="{LANE}" fill="currentColor" fill-opacity="0.06"/>'
        )
        path = _bars(start, end, begin, stop, scale, y)
        if path:
            parts.append(f'<path d="{path}" fill="{color}"><title>{escape(label)}</title></path>')
        y += LANE + 6
    for i in range(5):
        x = LEFT + (WIDTH - LEFT - 8) * i / 4
        anchor = "start" if i == 0 else "end" if i == 4 else "middle"
        parts.append(
            f'<text x="{x:.0f}" y="{y + 11}" text-anchor="{anchor}" opacity="0.75">{(stop - begin) * i / 4e6:.3g} ms</text>'
        )
    parts.append("</svg>")
    return "".join(parts)


def _lanes(r: Recording, begin: int, stop: int) -> list[tuple[str, str, Int, Int]]:
    """Label, colour and intervals of each lane that has something in this window."""
    t = r.timeline
    ops = t.is_kind(Kind.OP)
    nodes = ops & t.is_named(n.startswith("autograd::engine::evaluate_function") for n in t.names)
    ranges = t.is_kind(Kind.ANNOTATION)
    optimizer = ranges & t.is_named(n.startswith("Optimizer.") for n in t.names)
    data = ranges & t.is_named(n.startswith(("enumerate(DataLoader)", "data:")) for n in t.names)
    kernels, copies = t.is_kind(Kind.KERNEL, Kind.MEMSET), t.is_kind(Kind.MEMCPY)
    on_gpu = bool((kernels | copies).any())
    work = kernels | copies if on_gpu else ops & t.is_named(is_operator(n) for n in t.names)
    gap_start, gap_end, _ = tl.gaps(t.start_E[work], t.end_E[work], begin, stop)
    lanes = [
        ("data", PHASE_COLORS["data"], t.start_E[data], t.end_E[data]),
        ("forward", PHASE_COLORS["forward"], r.start_S, r.end_S),
        ("backward", PHASE_COLORS["backward"], t.start_E[nodes], t.end_E[nodes]),
        ("optimizer", PHASE_COLORS["optimizer"], t.start_E[optimizer], t.end_E[optimizer]),
        ("kernels" if on_gpu else "operators", BLUE, t.start_E[work & ~copies], t.end_E[work & ~copies]),
        ("copies", PURPLE, t.start_E[copies], t.end_E[copies]),
        ("idle", VERMILION, gap_start, gap_end),
    ]
    always = ("kernels", "operators", "idle")
    return [lane for lane in lanes if lane[0] in always or bool(((lane[3] > begin) & (lane[2] < stop)).any())]


def _bars(start_I: Int, end_I: Int, begin: int, stop: int, scale: float, y: int) -> str:
    """One SVG path of boxes; boxes closer than a third of a pixel are drawn as one, so the picture stays small."""
    start, end = tl.clip(start_I, end_I, begin, stop)
    start, end = tl.merge(start, end)
    if not len(start):
        return ""
    hair = max(int(0.34 / scale), 1)
    wide, reach = tl.merge(start, end + hair)
    x = LEFT + (wide - begin) * scale
    width = np.maximum((reach - hair - wide) * scale, 0.3)
    return "".join(f"M{a:.1f} {y}h{w:.1f}v{LANE}h-{w:.1f}z" for a, w in zip(x.tolist(), width.tolist()))


def bars_svg(rows: list[tuple[str, float, str, str]], label: str, name_width: int = 190, room: int = 360) -> str:
    """Horizontal bars: (name, share in 0..1, colour, text). `name_width` and `room` are pixels for the name and the longest bar."""
    if not rows:
        return ""
    height = 20 * len(rows) + 4
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="100%" style="max-width:{WIDTH}px" '
        f'role="img" aria-label="{escape(label)}" font-family="sans-serif" font-size="11" fill="currentColor">'
    ]
    for i, (name, share, color, text) in enumerate(rows):
        y = 20 * i
        length = room * min(max(share, 0.0), 1.0)
        parts.append(f'<text x="0" y="{y + 14}">{escape(_tail(name, name_width // 6))}</text>')
        parts.append(
            f'<rect x="{name_width}" y="{y + 3}" width="{room}" height="14" fill="currentColor" fill-opacity="0.06"/>'
        )
        parts.append(f'<rect x="{name_width}" y="{y + 3}" width="{length:.1f}" height="14" fill="{color}"/>')
        parts.append(
            f'<text x="{name_width + room + 8}" y="{y + 14}">{escape(_head(text, (WIDTH - name_width - room) // 6))}</text>'
        )
    parts.append("</svg>")
    return "".join(parts)


def _tail(text: str, length: int) -> str:
    return text if len(text) <= length else "..." + text[3 - length :]


def _head(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


def profile_html(
    title: str, step: str, summary: dict[str, Any], tables: dict[str, Any], by: str, notes: list[str]
) -> str:
    """The whole picture of a profile: step, lost time, the `by` table's largest rows, advice and notes."""
    parts = ['<div class="surokit-profile" style="max-width:820px">', f"<p><b>{escape(title)}</b></p>", step]
    lost = tables["lost"]
    parts.append("<p>Lost time</p>")
    parts.append(
        bars_svg(
            [
                (cause, share, CAUSE_COLORS[cause], f"{ms:.3g} ms a step, {share:.1%}: {evidence}")
                for cause, ms, share, evidence in zip(*(lost[c] for c in ("cause", "ms_per_step", "share", "evidence")))
            ],
            "lost time by cause",
            LEFT,
            240,
        )
    )
    rows = largest(tables, by, 10)
    if rows:
        busy = summary["busy_ms"] or 1.0
        parts.append(f"<p>Busy time by {escape(by)}</p>")
        parts.append(
            bars_svg(
                [(name, ms / busy, BLUE, f"{ms:.3g} ms, {ms / busy:.1%} of busy") for name, ms in rows],
                f"busy time by {by}",
            )
        )
    advice = tables["advice"]
    if advice["advice"]:
        parts.append("<p>Advice</p><ol>")
        for text, gain in list(zip(advice["advice"], advice["gain_ms"]))[:6]:
            parts.append(f"<li>{escape(text)} <i>(up to {gain:.3g} ms a step)</i></li>")
        parts.append("</ol>")
    parts.append('<p style="opacity:0.75">' + "<br/>".join(escape(note) for note in notes) + "</p>")
    parts.append("</div>")
    return "".join(parts)


def largest(tables: dict[str, Any], by: str, count: int) -> list[tuple[str, float]]:
    """Name and own milliseconds of the largest rows of the module, op or kernel table."""
    table = tables[{"module": "modules", "op": "ops", "kernel": "kernels"}[by]]
    pairs = sorted(zip(table[by], table["self_ms"]), key=lambda pair: -pair[1])
    return [(name, ms) for name, ms in pairs[:count] if ms > 0]
