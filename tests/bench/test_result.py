"""Raw results, the tables made of them, and that no table in the docs says anything else."""

import json
from pathlib import Path

import pytest

from surokit.bench import result
from surokit.bench.__main__ import main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def data():
    systems = [
        {"name": "a", "tokens_per_s": [100.0, 110.0, 90.0], "peak_mib": 200.0, "losses": [2.0, 1.0]},
        {
            "name": "b",
            "tokens_per_s": [200.0, 110.0, 270.0],
            "peak_mib": 100.0,
            "losses": [2.0, 1.01],
            "first_step_s": 1.5,
        },
    ]
    return result.result("made up", {"batch": 4}, systems, baseline="a")


def test_ratios_are_taken_turn_by_turn(data):
    assert result.ratios(data, "b") == [2.0, 1.0, 3.0]
    assert result.spread([3.0, 1.0, 2.0]) == (1.0, 2.0, 3.0)
    assert result.loss_gap(data, "b") == pytest.approx(0.01)


def test_the_table_shows_medians_ranges_and_where_it_was_measured(data):
    text = result.table(data)
    assert "| b | 200 (110 to 270) | 2.00 (1.00 to 3.00) | 100 | 0.50 | 1.00% | 1.5 |" in text
    assert f"torch {data['environment']['torch']}" in text
    assert data["environment"]["date"] in text


def test_a_page_is_filled_from_its_raw_file(data, tmp_path):
    result.write(data, tmp_path / "measurements" / "x.json")
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table: measurements/x.json -->\nstale\n<!-- end of table -->\nafter\n")
    assert main(["tables", str(page)]) == 0
    once = page.read_text()
    assert "stale" not in once
    assert "| b | 200" in once
    assert once.startswith("before\n")
    assert once.endswith("after\n")
    main(["tables", str(page)])
    assert page.read_text() == once


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md"])
def test_tables_in_the_docs_are_those_of_the_raw_files(page):
    path = ROOT / page
    text = path.read_text(encoding="utf-8")
    assert "<!-- table: " in text
    assert result.filled(text, path.parent) == text


def test_raw_files_carry_their_environment():
    for path in (ROOT / "docs" / "measurements").glob("*.json"):
        environment = json.loads(path.read_text(encoding="utf-8"))["environment"]
        assert {"device", "torch", "date", "surokit"} <= environment.keys()


def test_the_cost_of_watching_is_measured(tmp_path, capsys):
    out = tmp_path / "watching.json"
    assert main(["watching", "--steps", "3", "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    assert set(data["shares"]) == {"panel", "records"}
    assert all(0 < share < 1 for share in data["shares"].values())
    assert "of the run" in capsys.readouterr().out


def test_bad_input_is_one_sentence(capsys):
    assert main(["cpu", "--systems", "nonsense"]) == 2
    assert "There is no system 'nonsense': known are transformers," in capsys.readouterr().err


def test_without_a_gpu_the_gpu_benchmark_says_so(capsys):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert main(["gpu"]) == 2
    assert "There is no CUDA device" in capsys.readouterr().err
