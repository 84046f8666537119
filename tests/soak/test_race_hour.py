"""A race of an hour: what a recipe sustains, and not what it does in a sprint. Kept in docs/measurements/race-hour.

On a GPU the same command races there: `surokit race --recipes bf16 fp8-current --minutes 60 --run-dir FOLDER`.
"""

import shutil
from pathlib import Path

import pytest

import surokit as sk
from surokit import cli

OUT = Path(__file__).parents[2] / "docs" / "measurements" / "race-hour"
COMMAND = [
    "race",
    "--recipes",
    "bf16",
    "fp8-current",
    "--minutes",
    "60",
    "--layers",
    "6",
    "--width",
    "192",
    "--lr",
    "3e-3",
    "--batch",
    "32",
    "--stories",
    "30000000",
    "--run-dir",
    "race-hour",
]


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_speeds_are_sustained_for_an_hour(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(COMMAND) == 0
    race = sk.Race.load("race-hour")
    found = race.outcome
    assert found.timed_s > 45 * 60
    assert found.goodput > 0.9
    assert found.trusted
    for row in found.rows:
        assert row.steps_per_day > 0
        assert row.idle_frac < 0.1
    shutil.rmtree(OUT, ignore_errors=True)
    shutil.copytree(tmp_path / "race-hour", OUT, ignore=shutil.ignore_patterns("checkpoints", "*.lock"))
