"""Planned efficiency beside published runs: the data, and the committed table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surokit.bench import scaling

ROOT = Path(__file__).parents[2]


def test_each_run_has_the_same_micro_batch_on_ascending_numbers_of_gpus() -> None:
    runs = scaling.runs()
    assert len(runs) == 18
    for rows in runs:
        gpus = [row["gpus"] for row in rows]
        assert gpus == sorted(set(gpus))
        assert len(gpus) > 1
        for name in ("batch", "length", "layers", "width", "recipe", "recompute", "zero"):
            assert len({row[name] for row in rows}) == 1
        assert all("@" in row["source"] for row in rows)


def test_the_committed_plans_are_todays() -> None:
    raw = json.loads((ROOT / "docs" / "measurements" / "scaling.json").read_text(encoding="utf-8"))
    now = scaling.run()
    assert raw["assumed"] == now["assumed"]
    for row, found in zip(raw["scaling"], now["scaling"], strict=True):
        assert (row["run"], row["gpus"], row["measured"]) == (found["run"], found["gpus"], found["measured"])
        assert row["planned"] == pytest.approx(found["planned"], rel=1e-3)
