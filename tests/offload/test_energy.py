"""How concentrated a gradient's energy is, and what is said where it is not."""

from __future__ import annotations

import numpy as np
import pytest

from surokit.offload.energy import Energy, WeightEnergy, curve, warning_of
from tests.refusals import refused


def weight(scores: list[float], hot: int, name: str = "w", choices: int = 4) -> WeightEnergy:
    """Chosen so often, each time alike."""
    found = curve(scores)
    share = float(found[hot - 1])
    return WeightEnergy(name, 7, len(scores), hot, share, 0, found, (share,) * choices)


FLAT = [1.0] * 100
STEEP = [900.0] + [100.0 / 99] * 99


def test_a_curve_is_the_running_share_of_the_largest() -> None:
    assert curve([1, 5, 0, 4]).tolist() == [0.5, 0.9, 1.0, 1.0]
    assert np.isnan(curve([0, 0])).all()


def test_captured_takes_as_many_columns_as_a_choice_would() -> None:
    w = weight([4.0, 3.0, 2.0, 1.0], 1)
    assert [w.captured(k) for k in (0, 0.01, 0.25, 0.49, 0.5, 1)] == [0, 0.4, 0.4, 0.4, 0.7, 1]
    with refused(ValueError):
        w.captured(1.5)


def test_concentration_goes_from_chance_to_everything() -> None:
    assert weight(FLAT, 10).concentration == pytest.approx(0)
    assert weight([1.0] * 10 + [0.0] * 90, 10).concentration == pytest.approx(1)
    assert weight(FLAT, 100).concentration == 1  # nothing is left to the host


def test_the_warning_names_flat_weights_and_a_remedy() -> None:
    steep = [weight(STEEP, 10, f"s{i}") for i in range(3)]
    assert warning_of(Energy(tuple(steep))) == ""
    said = warning_of(Energy((*steep, weight(FLAT, 10, "the.flat.one"))))
    assert "In 1 of 4 weights" in said
    assert "the.flat.one" in said
    assert "10.0% that are hot hold 10.0%" in said
    assert "in each of the last 3 choices" in said
    assert '"offload": False' in said
    wrong = warning_of(Energy(tuple(weight(FLAT, 10, f"f{i}") for i in range(5))))
    assert "f0, f1, f2 and 2 more" in wrong
    assert "ZenFlow is the wrong tool" in wrong
    assert warning_of(Energy(())) == ""


def test_the_threshold() -> None:
    """k + 0.1 (1 - k): 19 % of the energy in 10 % of the columns."""

    def of(share: float) -> WeightEnergy:
        return weight([share / 10] * 10 + [(1 - share) / 90] * 90, 10)

    assert Energy((of(0.185),)).flat()
    assert not Energy((of(0.195),)).flat()


def test_nothing_is_said_without_evidence() -> None:
    assert not weight(FLAT, 10, choices=3).judged  # the first of a model does not count
    assert weight(FLAT, 10, choices=4).flat
    assert not weight([1.0] * 90, 9).judged  # too few columns
    steep, flat = 0.5, 0.1
    for shares, told in (
        ((flat, flat, flat, flat), True),
        ((steep, flat, flat, flat), True),
        ((flat, flat, flat, steep), False),
        ((flat, steep, flat, flat), False),
    ):
        assert WeightEnergy("w", 7, 100, 10, shares[-1], 0, curve(FLAT), shares).flat == told
    few = [weight([1.0] * 64, 6, f"few {i}") for i in range(5)]
    assert warning_of(Energy(tuple(few))) == ""
    said = warning_of(Energy((*few, weight(FLAT, 10, "flat"), weight(STEEP, 10), weight(STEEP, 10))))
    assert "In 1 of 3 weights" in said
    assert "wrong tool" not in said


@pytest.mark.parametrize("columns", [128, 1024])
@pytest.mark.parametrize("rows", [16, 64, 1024])
def test_flat_columns_are_told_from_skewed_ones_under_noise(columns: int, rows: int) -> None:
    """Scores are sums of `rows` squares of normal entries. Skewed: sizes spread log-normally, so that a tenth of the columns
    holds a third of the energy or more (concentration 0.3)."""
    random = np.random.default_rng(0)

    def told_flat(spread: float) -> float:
        found = []
        for _ in range(50):
            sizes = np.exp(random.normal(0, spread, columns))
            curves = [curve(sizes * random.chisquare(rows, columns)) for _ in range(4)]
            hot = columns // 10
            shares = tuple(float(each[hot - 1]) for each in curves)
            found.append(WeightEnergy("w", 7, columns, hot, shares[-1], 0, curves[-1], shares).flat)
        return float(np.mean(found))

    assert told_flat(0.0) > 0.95
    assert told_flat(1.0) == 0


def test_tables_and_the_picture() -> None:
    energy = Energy((weight(STEEP, 10, "steep"), weight(FLAT, 10, "flat")))
    rows = energy.table().set_index("weight")
    assert rows.loc["steep", "top_1"] == pytest.approx(0.9)
    assert rows.loc["flat", "captured"] == pytest.approx(0.1)
    points = energy.curves()
    assert set(points["weight"]) == {"steep", "flat"}
    flat = points[points["weight"] == "flat"]
    np.testing.assert_allclose(flat["k"], flat["captured"])
    long = Energy((weight([1.0] * 5000, 50),)).curves()
    assert len(long) <= 100
    assert long["k"].iloc[-1] == 1
    assert "steep" in repr(energy)
    assert "<table>" in energy._repr_html_()
    assert repr(Energy(())) == "no choice of columns yet"
    with refused(ValueError):
        Energy(()).plot()


def test_the_picture_names_the_most_and_the_least_skewed_and_its_legend_has_the_lines_colours() -> None:
    middle = [weight([20.0] * 10 + [5.0] * 90, 10, f"middle {i}.weight") for i in range(3)]
    figure = Energy((weight(FLAT, 10, "flat.weight"), *middle, weight(STEEP, 10, "steep"))).plot()
    ax = figure.axes[0]
    assert [text.get_text() for text in ax.texts] == ["steep", "flat"]
    figure.draw_without_rendering()
    ticks = [label.get_text() for label in ax.get_xticklabels()]
    assert ticks == ["1 %", "2 %", "5 %", "10 %", "20 %", "50 %", "100 %"]
    assert "40 %" in [label.get_text() for label in ax.get_yticklabels()]
    legend = ax.get_legend()
    assert legend is not None
    drawn = {line.get_label(): line.get_color() for line in ax.lines if np.size(line.get_xdata()) > 1}
    keys = {text.get_text(): line for text, line in zip(legend.get_texts(), legend.get_lines())}
    assert keys.keys() == {"a weight", "not concentrated", "what is hot", "columns at random"}
    assert all(keys[name].get_color() == color for name, color in drawn.items() if name in keys)
    assert keys["a weight"].get_color() == keys["what is hot"].get_color()
    alone = Energy((weight(STEEP, 10, "steep"),)).plot().axes[0]
    assert [text.get_text() for text in alone.texts] == ["steep"]
    long = Energy((weight(STEEP, 10, "base_model." * 6 + "layers.0.up.weight"),)).plot().axes[0].texts[0].get_text()
    assert (len(long), long[0], long[-11:]) == (40, "…", "layers.0.up")
