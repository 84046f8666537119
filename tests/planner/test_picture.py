"""The picture of memory: bars as long as the plan's memory, exact apart from approximate, the GPU's line, words that are true."""

from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex

from surokit.planner import Gpu, plan
from surokit.planner.counts.memory import GIB, Memory, Term
from surokit.planner.picture import _GROUPS, parts_of, plot_memory
from surokit.widgets.figure import PALETTE_LIGHT
from tests.planner.families import QWEN3_8B
from tests.refusals import refused

PLAN = plan(QWEN3_8B, batch=1, length=4096, gpu="H100")
RECIPES = {name: PLAN.but(recipe=name) for name in ("bf16", "fp8", "qfp8", "qfp4", "qnf4")}


def bars(figure) -> dict[float, list[Any]]:
    """Middle of the row -> its boxes from left to right."""
    rows: dict[float, list[Any]] = {}
    for box in figure.axes[0].patches:
        rows.setdefault(round(box.get_y() + box.get_height() / 2, 6), []).append(box)
    return rows


def words(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def test_bars_stack_every_counted_term_in_the_plans_order():
    figure = plot_memory(RECIPES)
    rows = bars(figure)
    assert list(rows) == list(range(len(RECIPES)))
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == list(RECIPES)
    low, high = figure.axes[0].get_ylim()
    assert low > high  # the first plan is on top
    for boxes, each in zip(rows.values(), RECIPES.values()):
        edges = [box.get_x() for box in boxes] + [boxes[-1].get_x() + boxes[-1].get_width()]
        counted = [t for t in each.memory.terms if t.counted]
        assert edges[0] == 0
        np.testing.assert_allclose(np.diff(edges), [box.get_width() for box in boxes])
        assert edges[-1] == pytest.approx(sum(t.gib for t in counted))
        approximate = sum(box.get_width() for box in boxes if box.get_hatch())
        assert approximate == pytest.approx(sum(t.gib for t in counted if not t.exact))
    assert plt.get_fignums() == []  # nothing is left for pyplot to show a second time


def test_the_total_is_what_fits_compares():
    plans = {**RECIPES, "too large": PLAN.but(batch=4), "no GPU": PLAN.but(gpu=None)}
    said = [text for text in words(plot_memory(plans)) if "GiB" in text]
    assert [text for text in said if text.endswith(", fits")] == [
        f"{each.memory.gib:.1f} GiB, fits" for each in plans.values() if each.gpu and each.fits()
    ]
    assert f"{plans['too large'].memory.gib:,.1f} GiB, too large" in said
    assert f"{plans['no GPU'].memory.gib:.1f} GiB" in said
    for name, each in RECIPES.items():
        drawn = words(plot_memory({name: each}, gib=24))
        assert f"{each.memory.gib:.1f} GiB, {'fits' if each.fits(24) else 'too large'}" in drawn


def test_what_cannot_be_counted_is_said_and_never_fits():
    figure = plot_memory({"number": plan(1e9, gpu="H100"), "huge": plan(405e9, gpu="H100")})
    small, huge = [text for text in words(figure) if "without activations" in text]
    assert "fits" not in small
    assert huge.endswith("too large")


def test_one_line_for_one_memory_and_a_mark_each_for_several():
    def drawn(figure):
        return [line.get_xdata()[0] for line in figure.axes[0].get_lines()]

    assert drawn(plot_memory(RECIPES)) == [78.7]
    assert drawn(plot_memory(RECIPES, gib=(24, 80))) == [24.0, 80.0]
    assert not any("fits" in text for text in words(plot_memory(RECIPES, gib=(24, 80))))
    # a GPU far beyond the bars would squeeze them
    assert drawn(plot_memory(RECIPES, gib=4000)) == []
    assert drawn(plot_memory({"a": PLAN, "b": PLAN.but(gpu="A100")})) == [78.7]
    own = plot_memory({"a": PLAN, "b": PLAN.but(gpu="H200")})
    assert drawn(own) == pytest.approx([78.7, 139.3])
    assert drawn(plot_memory({"a": PLAN.but(gpu=Gpu("Unknown", bf16_tflops=100))})) == []


def test_figures_inside_the_bars_are_their_parts():
    inside = [text for text in words(plot_memory({"a": PLAN}, gib=200)) if "GiB" not in text]
    wide = [part.gib for part in parts_of(PLAN.memory) if part.group != "slack" and part.gib > 12]
    assert inside == [f"{gib:.3g}" for gib in wide]


def test_small_models_are_drawn_in_mib():
    tiny = plan(QWEN3_8B | {"num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 512, "intermediate_size": 128})
    figure = plot_memory(tiny)
    assert figure.axes[0].get_xlabel().endswith("MiB")
    assert bars(figure)[0][0].get_width() == pytest.approx(tiny.memory["weights"].bytes / 2**20)


def test_groups_keep_every_byte_and_a_colour_that_eyes_can_tell():
    names = [
        "weights, stored quantized",
        "gathered layer",
        "master weights",
        "logits",
        "KV cache",
        "workspace",
        "something new",
        "slack",
    ]
    terms = [Term(name, (i + 1) * GIB, i % 2 == 0, "") for i, name in enumerate(names)]
    terms.append(Term("KV cache", GIB, True, "", counted=False))
    parts = parts_of(Memory(tuple(terms)))
    assert [(part.group, part.exact, part.gib) for part in parts] == [
        ("weights", True, 1),
        ("copies of weights", False, 2),
        ("optimizer", True, 3),
        ("logits and loss", False, 4),
        ("KV cache", True, 5),
        ("workspace", False, 6),
        ("other", True, 7),
        ("slack", False, 8),
    ]
    colors = [color.lower() for color, _ in _GROUPS.values()]
    assert len(set(colors)) == len(colors)
    assert {color.lower() for color in PALETTE_LIGHT} <= set(colors)
    shown = {to_hex(box.get_facecolor()) for box in plot_memory(RECIPES).axes[0].patches}
    assert shown <= set(colors)


def test_long_names_are_wrapped():
    figure = plot_memory({"a name that is far too long to stand beside a bar in one line": PLAN})
    label = figure.axes[0].get_yticklabels()[0].get_text()
    assert max(map(len, label.splitlines())) <= 26


@pytest.mark.parametrize(
    ("plans", "gib", "error"),
    [
        ({}, None, ValueError),
        ({"a": 8e9}, None, TypeError),
        ({"a": PLAN}, 0, ValueError),
        ({"a": PLAN}, (24, -1), ValueError),
    ],
)
def test_what_cannot_be_drawn_is_one_sentence(plans, gib, error):
    with refused(error):
        plot_memory(plans, gib=gib)
