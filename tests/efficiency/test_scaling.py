"""Efficiency, and the loss at each doubling with its parts: exact on numbers that are made up; on processes, its structure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import surokit as sk
from surokit.efficiency.scaling import Loss, Rate, Scaling
from tests.launching.functions import trains_for_scale
from tests.refusals import refused

# a rank has 1,000 tokens a step throughout: 100 ms alone; of 125 ms on two, 10 move data, 5 wait, 8 compute more, 2 are the rest
WEAK = Scaling(
    [
        Rate(1, 10_000, 1000, communication_ms=0, waiting_ms=0, computing_ms=90),
        Rate(2, 16_000, 2000, communication_ms=10, waiting_ms=5, computing_ms=98),
        Rate(4, 32_000, 4000, communication_ms=10, waiting_ms=5, computing_ms=98),
    ],
    "a device",
)


def test_efficiency_is_of_the_smallest_number() -> None:
    assert [WEAK.efficiency(n) for n in (1, 2, 4)] == pytest.approx([1, 0.8, 0.8])
    assert Scaling.of({2: 100, 8: 300}).efficiency(8) == pytest.approx(0.75)


def test_a_loss_is_divided_into_what_grew() -> None:
    doubled, again = WEAK.losses
    assert doubled.total == pytest.approx(0.2)
    assert [doubled.communication, doubled.waiting] == pytest.approx([10 / 125, 5 / 125])
    assert doubled.smaller_batches == 0
    assert doubled.rest == pytest.approx(10 / 125)  # 8 ms of computing, 2 of nothing that is named
    assert again == Loss(2, 4, 0.0, 0.0, 0.0, 0.0, 0.0)


def test_computing_that_grows_with_fewer_tokens_is_called_so() -> None:
    strong = Scaling([Rate(1, 10_000, 1000, 0, 0, 100), Rate(2, 12_500, 1000, 10, 0, 70)])
    (loss,) = strong.losses
    assert loss.total == pytest.approx(0.375)  # 80 ms where 50 were hoped for
    assert loss.communication == pytest.approx(10 / 80)
    assert loss.smaller_batches == pytest.approx(20 / 80)
    assert loss.rest == pytest.approx(0, abs=1e-12)


def test_chance_calls_no_batch_smaller() -> None:
    (loss,) = Scaling([Rate(1, 10_000, 1000, 0, 0, 100), Rate(2, 16_000, 1998, 10, 0, 115)]).losses
    assert loss.smaller_batches == 0
    assert loss.rest == pytest.approx(loss.total - 10 / (1e3 * 1998 / 16_000))


def test_rates_of_another_machine_have_no_parts() -> None:
    found = Scaling.of({1: 1000, 2: 1900, 4: 3500}, tokens_per_step=512, device="4 of another")
    assert [loss.total for loss in found.losses] == pytest.approx([0.05, 1 - 3500 / 3800])
    assert all(loss.communication is None for loss in found.losses)
    assert "4 of another" in repr(found)
    assert found[4].step_ms == pytest.approx(4 * 512 / 3.5)


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    file = WEAK.save(tmp_path / "new" / "scaling.json")
    found = Scaling.load(file)
    assert (found.rates, found.device) == (WEAK.rates, WEAK.device)
    file.write_text(json.dumps({"rates": 3}))
    with pytest.raises(ValueError, match="holds no rates that Scaling.save wrote"):
        Scaling.load(file)


def test_it_is_shown_as_table_frame_and_picture() -> None:
    assert "80.0%" in repr(WEAK)
    assert "<table" in WEAK._repr_html_()
    assert list(WEAK.frame()["gpus"]) == [1, 2, 4]
    rates, losses = WEAK.plot().axes
    assert [text.get_text() for text in rates.texts] == ["80%", "80%"]
    legend = losses.get_legend()
    assert legend is not None
    assert {text.get_text() for text in legend.get_texts()} == {"communication", "waiting", "rest"}


CONFIG = sk.DecoderConfig(layers=4, width=1024, heads=8, kv_heads=8, vocab=32000, ffn=2816, max_length=2048)


def planned_on(gpus: int) -> sk.Plan:
    between = 1.0 if gpus > 8 else None
    return sk.plan(CONFIG, gpus=gpus, gpu="H100", zero=3, batch=1, length=2048, between_gb_s=between)


def test_more_gpus_are_planned_and_called_so(tmp_path: Path) -> None:
    """A slow link between machines: all of its time is added to what was measured."""
    measured = Scaling.of({4: 400_000, 8: 720_000}, device="8 x H100")
    found = measured.planned(planned_on, (16, 32))
    assert [rate.planned for rate in found.rates] == [False, False, True, True]
    here, more = planned_on(8).estimate, planned_on(16).estimate
    assert here is not None
    assert more is not None
    us = 1e6 * 8 / 720_000 + 1e3 * (more.step_ms - here.step_ms) / 2048
    assert found[16].tokens_per_s == pytest.approx(1e6 * 16 / us)
    assert found.efficiency(16) < 0.8 * found.efficiency(8)
    assert found[16].step_ms == pytest.approx(us * 2048 / 1e3)
    assert "16, planned" in repr(found)
    assert list(found.frame()["planned"]) == [False, False, True, True]
    legend = found.plot().axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["ideal", "measured", "planned"]
    assert Scaling.load(found.save(tmp_path / "scaling.json")).rates == found.rates
    again = found.planned(planned_on, (16,))
    assert again[16] == found[16]  # from what was measured, not from a plan
    assert len(again.rates) == 3


def test_plans_of_fewer_gpus_or_without_a_time_are_refused() -> None:
    measured = Scaling.of({8: 720_000})
    for gpus in ((), (8, 16)):
        with refused(ValueError):
            measured.planned(planned_on, gpus)
    with refused(ValueError):
        measured.planned(lambda n: sk.plan(7e9, gpus=n), (16,))


def test_numbers_that_are_no_rates_are_refused() -> None:
    with refused(ValueError):
        Rate(0, 100)
    with refused(ValueError):
        Rate(1, 0)
    with refused(ValueError):
        Scaling([])
    with refused(ValueError):
        Scaling.of({1: 5}).__class__([Rate(1, 5), Rate(1, 6)])
    with refused(ValueError):
        sk.scale(trains_for_scale, gpus=(2, 2))
    with refused(KeyError):
        WEAK[3]


def test_a_function_is_measured_on_the_numbers_that_are_missing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Scaling([Rate(1, 1000.0, 48.0, 0.0, 0.0, 40.0)], "cpu").save(tmp_path / "scaling.json")
    found = sk.scale(trains_for_scale, 24, gpus=(1, 2), folder=tmp_path)
    assert [rate.gpus for rate in found.rates] == [1, 2]
    assert found[1].tokens_per_s == 1000.0
    two = found[2]
    assert two.tokens_per_step == 2 * 48
    parts = (two.communication_ms, two.waiting_ms, two.computing_ms)
    assert all(part is not None and part >= 0 for part in parts)
    assert two.step_ms is not None
    assert sum(filter(None, parts)) <= two.step_ms
    assert Scaling.load(tmp_path / "scaling.json").rates == found.rates
    assert "measuring 2 processes" in capfd.readouterr().err


def test_a_step_has_the_mean_of_all_steps_tokens() -> None:
    found = sk.scale(trains_for_scale, 24, (12, 24), gpus=(1,))
    assert found[1].tokens_per_step == (4 * 12 + 4 * 24) / 2, "not those of the last step that was profiled"


def test_a_function_that_returns_no_session_is_told() -> None:
    with pytest.raises(sk.LaunchError, match="TypeError: scale\\(train\\): the function returns the session"):
        sk.scale(lambda: 3, gpus=(1,))
