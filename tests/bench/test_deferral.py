"""The study of deferral: what its names stand for, what follows from its raw file, and that it goes on where it stopped."""

import copy
import json
from types import SimpleNamespace
from typing import Any

import pytest

from docs.measurements import deferral
from tests.soak import test_offload as soak


@pytest.fixture
def data():
    runs = [
        {"seed": 0, "at first": 6.0, "loss": {"adamw": 2.0, "offload": 2.0, "zenflow k=.1 S=4": 2.02}},
        {"seed": 1, "at first": 7.0, "loss": {"adamw": 4.0, "offload": 4.0, "zenflow k=.1 S=4": 4.12}},
    ]
    for run, share in zip(runs, (0.2, 0.3)):
        run["energy"] = {"zenflow k=.1 S=4": share}
    return {
        "benchmark": "made up",
        "settings": {"from": "nothing"},
        "environment": {"device": "cpu", "cpu": "some", "cores": 2},
        "sweep": {"0.001": 3.0, "0.002": 2.5, "0.004": 2.75},
        "deferral": runs,
    }


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adamw", {"optimizer": "AdamW", "lr": 1.0}),
        ("adamw lr x0.5", {"optimizer": "AdamW", "lr": 0.5}),
        ("offload", {"optimizer": "OffloadAdamW", "lr": 1.0}),
        (
            "zenflow k=.05 S=8 overlap lr x4",
            {"optimizer": "ZenFlow", "lr": 4.0, "topk_ratio": 0.05, "update_interval": 8}
            | {"overlap_step": True, "cold_update": "deepspeed"},
        ),
        (
            "zenflow k=.3 S=4 time-corrected",
            {"optimizer": "ZenFlow", "lr": 1.0, "topk_ratio": 0.3, "update_interval": 4}
            | {"overlap_step": False, "cold_update": "time-corrected"},
        ),
    ],
)
def test_a_name_says_what_is_trained(name, options):
    assert deferral.options_of(name) == options


def test_the_rate_is_the_sweeps_best(data):
    assert deferral.tuned_rate(data) == 0.002


def test_the_table_has_gaps_of_pairs_and_the_energy(data):
    assert deferral.gaps(data, "zenflow k=.1 S=4") == pytest.approx([0.01, 0.03])
    mean, low, high = deferral.interval(data, "zenflow k=.1 S=4")
    assert (mean, high - mean) == pytest.approx((0.02, 12.7062 * 0.01))  # Student's t of one degree, s / sqrt(2) = 0.01
    assert mean - low == pytest.approx(high - mean)
    text = deferral.table(data)
    assert "| adamw | 3.0000 |  |  |  |" in text
    assert "| zenflow k=.1 S=4 | 3.0700 | +2.00% | -10.71% to +14.71% | 25.0% |" in text
    assert "made up; from nothing, paired seeds 2; " in text
    assert "before the first step: 6.5000. AdamW's on another seed: 3.0000 at 0.001, 2.5000 at 0.002" in text


def test_a_study_that_is_not_done_has_a_table_of_what_there_is(data):
    data["deferral"][1]["loss"] = {"adamw": 4.0}
    data["deferral"][1]["energy"] = {}
    assert deferral.gaps(data, "zenflow k=.1 S=4") == pytest.approx([0.01])
    assert "| zenflow k=.1 S=4 | 2.0200 | +1.00% | +nan% to +nan% | 20.0% |" in deferral.table(data)


def test_the_picture_follows_from_what_was_measured(data, tmp_path):
    for run in data["deferral"]:
        run["loss"] = {name: run["loss"]["adamw"] * (1 + i / 100) for i, name in enumerate(deferral.NAMES)}
    for name in ("a.png", "b.png"):
        deferral.draw(copy.deepcopy(data), tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert "from nothing" in deferral.figure(data).axes[0].get_title(loc="left")


class Study:
    """Stands for the training of the study: what was asked for, and losses that follow from it."""

    def __init__(self):
        self.asked: list[tuple[Any, ...]] = []

    def trained(self, weights, name, rate, seed, steps):
        self.asked.append((weights, name, rate, seed, steps))
        loss = 2.0 + abs(rate - 2e-3) + seed
        report = SimpleNamespace(selected_mean=0.25)
        return SimpleNamespace(evaluate=lambda: loss, optimizer=SimpleNamespace(report=lambda: report))


def test_a_study_goes_on_where_it_stopped(monkeypatch, tmp_path):
    whole, first, rest = Study(), Study(), Study()
    path, other = tmp_path / "raw.json", tmp_path / "other.json"

    def weights(seed):
        return {"seed": seed}

    monkeypatch.setattr(soak, "trained", whole.trained)
    data = soak.study(weights, "made up", other, seeds=2, steps=3)
    tuned = [asked for asked in whole.asked if asked[3] == soak.SWEEP_SEED]
    assert [(name, rate) for _, name, rate, _, _ in tuned] == [("adamw", rate) for rate in soak.RATES]
    assert {rate for _, _, rate, seed, _ in whole.asked if seed < 2} == {2e-3}
    assert all(at_first == {"seed": seed} for at_first, _, _, seed, _ in whole.asked)

    def stopping(*arguments):
        if len(first.asked) == 20:
            raise KeyboardInterrupt
        return first.trained(*arguments)

    monkeypatch.setattr(soak, "trained", stopping)
    with pytest.raises(KeyboardInterrupt):
        soak.study(weights, "made up", path, seeds=2, steps=3)
    monkeypatch.setattr(soak, "trained", rest.trained)
    again = soak.study(weights, "made up", path, seeds=2, steps=3)
    assert first.asked + rest.asked == whole.asked
    assert again["deferral"] == data["deferral"] == json.loads(path.read_text())["deferral"]
    assert set(again["deferral"][0]["loss"]) == set(deferral.NAMES)
    assert set(again["deferral"][0]["energy"]) == {name for name in deferral.NAMES if name.startswith("zenflow")}


def test_another_study_does_not_go_on_with_it(monkeypatch, tmp_path):
    study = Study()
    monkeypatch.setattr(soak, "trained", study.trained)
    for begins in ("random weights", "trained ones"):
        soak.study(lambda seed: None, begins, tmp_path / "raw.json", seeds=1, steps=3)
    assert study.asked[len(study.asked) // 2 :] == study.asked[: len(study.asked) // 2]
