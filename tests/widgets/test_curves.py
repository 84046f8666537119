"""`sk.plot_runs` and `sk.plot_errors`: the right curves, the right gap, no second picture, clear refusals."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt

from surokit.widgets.curves import plot_errors, plot_runs
from tests.refusals import refused


def run(factor=1.0, steps=200, noise=0.0, **columns):
    step = np.arange(1, steps + 1)
    batch = 1 + noise * np.sin(np.arange(steps) * 12.9898) ** 3  # the same batches in every run
    return pd.DataFrame({"step": step, "loss": 4.0 * factor * batch, **columns})


class Session:
    """Anything with records that give a frame."""

    def __init__(self, frame):
        self.records = self
        self._frame = frame

    def frame(self):
        return self._frame


def lines(axes):
    return {line.get_label(): line for line in axes.get_lines()}


def test_curves_and_gap():
    figure = plot_runs({"bf16": run(noise=0.3), "fp8": Session(run(1.02, noise=0.3)), "short": run(0.99, 50, 0.3)})
    left, right = figure.axes
    names = [label.split()[0] for label in left.get_legend_handles_labels()[1]]
    assert names == ["bf16", "fp8", "short"]
    drawn = lines(right)
    # The batches' noise of 30 % cancels: the gap is exact from the first step on.
    np.testing.assert_allclose(drawn["fp8  +2.00 %"].get_ydata(), 2.0, rtol=1e-9)
    assert len(drawn["short  -1.00 %"].get_xdata()) == 50
    assert plt.get_fignums() == []  # nothing is left for pyplot to show a second time


def test_the_smoothed_curve_keeps_up_with_a_loss_that_falls_fast():
    steps = np.arange(1, 61)
    loss = 5.0 + 2.5 * np.exp(-steps / 4)
    frame = pd.DataFrame({"step": steps, "loss": loss})
    left = plot_runs({"a": frame}, baseline=None).axes[0]
    curves = [np.asarray(line.get_ydata()) for line in left.lines]
    smoothed = next(y for y in curves if len(y) == 60 and not np.array_equal(y, loss))
    assert abs(smoothed[9] - loss[9]) < 0.3


def test_the_smoothed_curve_is_bias_corrected():
    frame = pd.DataFrame({"loss": [4.0, 2.0, math.nan, 1.0]})
    left = plot_runs({"a": frame}, baseline=None, smooth=2).axes[0]
    mean = next(line for label, line in lines(left).items() if label.startswith("a  "))
    # a = 1/2: (2), (2, 1) / 3/4, -, (1.5 / 2 + 1/2) / 7/8
    np.testing.assert_allclose(mean.get_ydata(), [4.0, 2.0 / 0.75, math.nan, 1.5 / 0.875])


def test_held_out_points_are_dots():
    held_out = np.full(200, np.nan)
    held_out[[49, 99]] = 4.5, 4.2
    left = plot_runs({"a": run(eval_loss=held_out)}, baseline=None).axes[0]
    dots = [line for line in left.get_lines() if line.get_marker() == "o"]
    assert [np.asarray(line.get_xdata()).tolist() for line in dots] == [[50, 100]]


def test_one_run_or_no_baseline_is_one_picture():
    assert len(plot_runs({"lora": run()}).axes) == 1
    assert len(plot_runs({"a": run(), "b": run(1.1)}, baseline=None).axes) == 1


def test_a_gap_of_nothing_is_not_blown_up():
    right = plot_runs({"bf16": run(), "same": run(1 + 1e-9)}).axes[1]
    low, high = right.get_ylim()
    assert low <= -0.1
    assert high >= 0.1


def test_refusals():
    with refused(ValueError):
        plot_runs({})
    with refused(ValueError):
        plot_runs({"a": run(), "b": run()})
    with refused(ValueError):
        plot_runs({"a": pd.DataFrame({"step": [1], "loss": [math.nan]})})
    with refused(ValueError):
        plot_runs({"a": pd.DataFrame({"step": [1]})})
    apart = run()
    apart["step"] += 1_000
    with refused(ValueError):
        plot_runs({"bf16": run(), "b": apart})


# -- error against layer


def errors(blocks=28, recipes=("fp8", "fp4"), gemms=("forward", "grad_input", "grad_weight")):
    names = [f"model.layers.{i}.mlp.{kind}" for i in range(blocks) for kind in ("up_proj", "down_proj")]
    rows = [
        (name, gemm, recipe, 28.0 - 12 * (recipe == "fp4") - 9 * (name == "model.layers.1.mlp.down_proj"))
        for name in names
        for gemm in gemms
        for recipe in recipes
    ]
    return pd.DataFrame(rows, columns=["layer", "gemm", "recipe", "sqnr_db"])


def drawn(ax):
    """Recipe -> dB by layer."""
    return {str(x.get_label()): np.asarray(x.get_ydata()) for x in ax.lines if not str(x.get_label()).startswith("_")}


@pytest.mark.parametrize("blocks", [2, 28, 80])
def test_errors_have_a_panel_a_product_and_the_worst_layer_by_name(blocks):
    figure = plot_errors(errors(blocks))
    assert [ax.get_title(loc="left").split()[0] for ax in figure.axes] == ["forward", "grad_input", "grad_weight"]
    for ax in figure.axes:
        assert [text.get_text() for text in ax.texts] == ["worst: model.layers.1.mlp.down_proj  7.0 dB (fp4)"]
        lines = drawn(ax)
        assert {name: len(y) for name, y in lines.items()} == {"fp8": 2 * blocks, "fp4": 2 * blocks}
        assert lines["fp8"].min() == 19.0
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["fp8", "fp4"]
    labels = [tick.get_text() for tick in figure.axes[-1].get_xticklabels()]
    assert len(labels) <= 32
    assert labels[0] == ("0.mlp.up_proj" if blocks == 2 else "0")
    figure.canvas.draw()
    boxes = [tick.get_window_extent() for tick in figure.axes[-1].get_xticklabels()]
    assert blocks == 2 or not any(a.overlaps(b) for a, b in pairwise(boxes))
    for ax in figure.axes:
        assert figure.bbox.contains(*ax.texts[0].get_window_extent().max)


def test_a_layer_that_a_recipe_keeps_breaks_its_line_and_exact_products_are_left_out():
    frame = errors(4)
    frame = frame[~((frame.recipe == "fp4") & frame.layer.str.contains("layers.3"))]
    frame.loc[frame.gemm == "grad_weight", "sqnr_db"] = math.inf
    figure = plot_errors(frame, title="mine")
    assert len(figure.axes) == 2
    assert np.isnan(drawn(figure.axes[0])["fp4"]).tolist() == [False] * 6 + [True] * 2


def test_recipes_stay_apart_without_colour():
    figure = plot_errors(errors(2, [f"r{i}" for i in range(8)]))
    lines = [line for line in figure.axes[0].lines if not str(line.get_label()).startswith("_")]
    assert len({line.get_color() for line in lines}) == len({line.get_marker() for line in lines}) == 8


def test_errors_refuse():
    with refused(ValueError):
        plot_errors(pd.DataFrame({"layer": ["a"], "gemm": ["forward"]}))
    with refused(ValueError):
        plot_errors(errors().assign(sqnr_db=math.inf))
