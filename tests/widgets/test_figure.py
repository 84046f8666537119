"""Drawings are valid SVG, small, and honest about what does not fit."""

from __future__ import annotations

import itertools
import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surokit.widgets.figure import Line, Mark, Pane, figure, nice_ticks, short, thin
from tests.refusals import refused


def draw(*lines, **pane):
    return figure([Pane("Loss", lines, **pane)], title="t", description="d")


def found(pattern, text):
    match = re.search(pattern, text)
    assert match is not None
    return match[1]


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(1, 10))
def test_ticks_are_few_round_and_inside(low, span, target):
    high = low + span
    ticks = nice_ticks(low, high, target)
    assert len(ticks) <= target + 1
    slack = 1e-6 * span + 1e-9 * abs(low)
    assert all(low - slack <= t <= high + slack for t in ticks)
    assert ticks == sorted(ticks)
    gaps = [b - a for a, b in itertools.pairwise(ticks)]
    rounding = 1e-15 * (abs(low) + span)
    assert all(math.isclose(gap, gaps[0], rel_tol=1e-5, abs_tol=8 * rounding) for gap in gaps)


@pytest.mark.parametrize(
    ("low", "high", "target", "expected"),
    [
        (0, 10, 5, [0, 2, 4, 6, 8, 10]),
        (2.2, 8.4, 4, [4, 6, 8]),
        (0, 0.23, 4, [0, 0.05, 0.1, 0.15, 0.2]),
        (5, 5, 4, [5]),
    ],
)
def test_ticks(low, high, target, expected):
    assert nice_ticks(low, high, target) == pytest.approx(expected)


@pytest.mark.parametrize(("low", "high"), [(math.nan, 1), (0, math.inf), (2, 1)])
def test_ticks_refuse_what_is_no_range(low, high):
    with refused(ValueError):
        nice_ticks(low, high)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.21, "0.21"),
        (3.14159, "3.14"),
        (950, "950"),
        (1234, "1,234"),
        (18_230, "18.2k"),
        (1.25e6, "1.25M"),
        (4.1e9, "4.1G"),
        (2.1e-4, "2.1e-4"),
        (0.0026, "2.6e-3"),
        (-3.2e15, "-3.2e15"),
        (1e300, "1e300"),
        (-18_230, "-18.2k"),
        (math.nan, "NaN"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers_as_people_read_them(value, text):
    assert short(value) == text


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=300), st.integers(8, 50))
def test_thinning_keeps_extremes_and_order(ys, limit):
    xs = list(range(len(ys)))
    x, y = thin(xs, ys, limit)
    assert x == sorted(set(x))
    assert len(y) <= 1.5 * limit + 3
    finite = [v for v in ys if math.isfinite(v)]
    if finite:
        kept = [v for v in y if math.isfinite(v)]
        assert (min(kept), max(kept)) == (min(finite), max(finite))
    assert any(map(math.isnan, y)) or any(map(math.isinf, y)) or len(finite) == len(ys)


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=64), max_size=60), st.booleans())
def test_any_numbers_give_valid_svg_inside_the_frame(ys, robust):
    svg = draw(Line("a", range(len(ys)), ys, "faint"), Line("b", range(len(ys)), ys, "dots", 1), robust=robust)
    ElementTree.fromstring(svg)
    assert "nan" not in svg.lower().replace("nan)", "")
    assert "inf" not in re.sub(r">[^<]*<", "><", svg).lower()


def test_text_is_escaped_and_read_aloud():
    svg = figure([], title="a < b & c", description='say "x"', head=("<script>", "", ""), foot=[("warning", "1 < 2")])
    root = ElementTree.fromstring(svg)
    space = {"s": "http://www.w3.org/2000/svg"}
    assert root.findtext("s:title", namespaces=space) == "a < b & c"
    assert root.findtext("s:desc", namespaces=space) == 'say "x"'
    assert root.get("role") == "img"
    assert "<script" not in svg


def test_no_request_no_script_no_font():
    svg = draw(Line("a", [1, 2], [1, 2]))
    assert set(re.findall(r"https?://[^\"' ]+", svg)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<script|@import|url\(|<image|onload|@font-face", svg)


def test_every_style_rule_is_kept_inside_the_picture():
    css = found(r"<style>(.*)</style>", draw(Line("a", [1, 2], [1, 2])))
    selectors = re.findall(r"([^{}]+)\{[^{}]*\}", css.replace("@media(prefers-color-scheme:dark){", ""))
    assert selectors
    assert all(part.strip().startswith(".sk ") for rule in selectors for part in rule.split(","))


def test_themes():
    line = Line("a", [1, 2], [1, 2])
    auto, light, dark = (
        figure([Pane("p", [line])], title="", description="", theme=t) for t in ("auto", "light", "dark")
    )
    assert "prefers-color-scheme:dark" in auto
    # A plain value comes first, for viewers without variables.
    assert "fill:#ffffff;fill:var(--jp-layout-color1,#ffffff)" in auto
    assert "prefers" not in light + dark
    assert "var(" not in light + dark


def test_a_nan_breaks_the_line_and_leaves_a_cross():
    svg = draw(Line("a", [1, 2, 3, 4, 5], [1.0, 2.0, math.nan, 2.0, 1.0]))
    path = found(r'<path class="l c0" d="([^"]+)"', svg)
    assert path.count("M") == 2
    assert svg.count('class="x"') == 1


def test_a_robust_pane_marks_what_leaves_the_frame():
    ys = [3.0 + 0.01 * (i % 5) for i in range(100)]
    ys[50] = 500.0
    line = Line("a", range(100), ys, "faint")
    assert svg_marks(draw(line, robust=True)) == 1
    assert svg_marks(draw(line)) == 0


def svg_marks(svg):
    return len(re.findall(r'class="c0 o"', svg))


def test_one_point_is_a_dot_and_none_is_an_empty_frame():
    assert re.search(r'class="l c0" d="M[0-9.]+ [0-9.]+h0"', draw(Line("a", [3], [1.0])))
    ElementTree.fromstring(draw(Line("a", [], [])))
    ElementTree.fromstring(draw())


def test_marks_stand_at_their_x_and_only_inside_the_frame():
    marks = [Mark(5, "alarm"), Mark(9, "turn"), Mark(2, "note", "a < b"), Mark(8, "note", "late"), Mark(20, "alarm")]
    svg = draw(Line("a", [0, 10], [0.0, 1.0]), marks=marks)
    ElementTree.fromstring(svg)
    lines = [float(x) for x in re.findall(r'<path class="[ei]" d="M([0-9.]+) ', svg)]
    left, width = 44.0, 560.0 - 44 - 12
    assert lines == pytest.approx([left + width * x / 10 for x in (5, 9, 2, 8)], abs=0.1)
    assert re.search(r'<text class="t" x="[0-9.]+" y="39">a &lt; b</text>', svg)
    assert re.search(r'text-anchor="end">late</text>', svg)  # words do not leave the frame
    assert len(re.findall(r'<path class="v" d="M[0-9.]+ [0-9.]+h8l-4 7z"/>', svg)) == 1


def test_a_second_head_row_makes_room_for_itself():
    plain, more = (figure([Pane("p", [])], title="", description="", sub=sub) for sub in (("", ""), ("left", "")))
    heights = [int(found(r'height="(\d+)" style', svg)) for svg in (plain, more)]
    assert heights[1] - heights[0] == 18
    assert '<text class="m" x="14" y="43">left</text>' in more


def test_a_table_stands_under_the_panes_in_the_colours_of_its_runs():
    table = (["run", "loss", ""], [["a & b", "2.5", "done"], ["c", "12.25", ""]], [0, 7])
    svg = figure([Pane("p", [])], title="", description="", table=table, foot=[("advice", "so")])
    rows = {y: re.findall(rf'y="{y}"[^>]*>([^<]*)</text>', svg) for y in ("211", "229", "247")}
    assert rows == {"211": ["run", "loss"], "229": ["a &amp; b", "2.5", "done"], "247": ["c", "12.25"]}
    assert 'class="l c0" d="M14 225h10"' in svg
    assert 'class="l c1" d="M14 243h10"' in svg
    ends = [float(x) for x in re.findall(r'x="([0-9.]+)" y="2(?:29|47)" text-anchor="end">[0-9]', svg)]
    assert len(set(ends)) == 1  # numbers flush right
    assert '<text class="m" x="31" y="269">so</text>' in svg
