"""How concentrated a gradient's energy is, and what is said where it is not."""

from __future__ import annotations

import numpy as np
import pytest

from surokit.offload.energy import Energy, WeightEnergy, curve, warning_of


def weight(scores: list[float], hot: int, name: str = "w") -> WeightEnergy:
    found = curve(scores)
    return WeightEnergy(name, 7, len(scores), hot, float(found[hot - 1]), 0, found)


FLAT = [1.0] * 100
STEEP = [900.0] + [100.0 / 99] * 99


def test_a_curve_is_the_running_share_of_the_largest() -> None:
    assert curve([1, 5, 0, 4]).tolist() == [0.5, 0.9, 1.0, 1.0]
    assert np.isnan(curve([0, 0])).all()


def test_captured_takes_as_many_columns_as_a_choice_would() -> None:
    w = weight([4.0, 3.0, 2.0, 1.0], 1)
    assert [w.captured(k) for k in (0, 0.01, 0.25, 0.49, 0.5, 1)] == [0, 0.4, 0.4, 0.4, 0.7, 1]
    with pytest.raises(ValueError, match=r"captured\(k=1.5\)"):
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
    legend = energy.plot().axes[0].get_legend()
    assert legend is not None
    assert {text.get_text() for text in legend.get_texts()} >= {"not concentrated", "columns at random"}
    assert repr(Energy(())) == "no choice of columns yet"
    with pytest.raises(ValueError, match="no choice of columns to draw"):
        Energy(()).plot()
