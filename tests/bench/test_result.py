"""Raw results, the tables made of them, and that no table in the docs says anything else."""

import copy
import json
from pathlib import Path

import pytest

from docs.measurements import study
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


@pytest.mark.parametrize(
    "page", ["README.md", "docs/benchmarks.md", "docs/recipes.md", "docs/speed.md", "docs/offload.md"]
)
def test_tables_in_the_docs_are_those_of_the_raw_files(page):
    path = ROOT / page
    text = path.read_text(encoding="utf-8")
    assert "<!-- table: " in text
    assert result.filled(text, path.parent) == text


@pytest.mark.parametrize(("page", "count"), [("docs/recipes.md", 1), ("docs/offload.md", 3)])
def test_pictures_in_the_docs_are_those_of_the_raw_files(page, count):
    """They carry a fingerprint of what they show: bytes differ between versions of matplotlib."""
    image = pytest.importorskip("PIL.Image")
    path = ROOT / page
    pictures = result.pictures(path.read_text(encoding="utf-8"), path.parent)
    assert len(pictures) == count
    for picture, data in pictures.items():
        with image.open(picture) as drawn:
            assert drawn.text["Description"] == result.drawn_by(data).digest(data), (
                f"python -m surokit.bench tables {page}"
            )
            assert {"Software", "Creation Time"}.isdisjoint(drawn.text)
        assert f"({picture.name})" in path.read_text(encoding="utf-8")


# -- the accuracy study


@pytest.fixture
def accuracy():
    runs = [
        {"seed": 0, "bf16": 4.0, "fp8": 4.004, "made-up": 4.4, "bf16-lora": 5.0, "qnf4": 5.1},
        {"seed": 1, "bf16": 4.2, "fp8": 4.2, "made-up": 4.2, "bf16-lora": 5.0, "qnf4": 5.2},
    ]
    intervals = {
        "fp8": {"mean": 0.0005, "low": -0.001, "high": 0.002, "gate": 0.0025},
        "made-up": {"mean": 0.05, "low": -0.01, "high": 0.11, "gate": 0.01},
        "qnf4": {"mean": 0.03, "low": 0.02, "high": 0.04, "gate": 0.015},
    }
    raw = {"study": "gap", "settings": "small", "steps": {"from scratch": 2}, "runs": runs, "intervals": intervals}
    return raw | {"environment": result.result("", {}, [], "")["environment"]}


def test_the_study_is_a_table_of_whatever_recipes_it_has(accuracy):
    text = study.table(accuracy)
    assert "| `fp8` | `bf16` | 4.1020 | +0.050 % | -0.100 to +0.200 % | 0.25 % | inside |" in text
    assert "| `made-up` | `bf16` | 4.3000 | +5.000 % | -1.000 to +11.000 % | 1 % | undecided |" in text
    assert "| `qnf4` | `bf16-lora` | 5.1500 | +3.000 % | +2.000 to +4.000 % | 1.5 % | outside |" in text
    assert "paired seeds 2, steps 2 from scratch, model: small" in text


def test_a_study_that_is_not_done_says_so(accuracy):
    text = study.table(accuracy | {"intervals": {}, "runs": accuracy["runs"][:1], "steps": 7})
    assert text.count("not known before the last seed") == 3
    assert "steps 7, " in text


def test_the_committed_study_has_the_means_of_its_runs():
    data = json.loads((ROOT / "docs" / "measurements" / "recipes.json").read_text(encoding="utf-8"))
    for name, interval in data["intervals"].items():
        gaps = study.gaps(data, name)
        assert sum(gaps) / len(gaps) == pytest.approx(interval["mean"], rel=1e-9)
        assert interval["low"] < interval["mean"] < interval["high"]


@pytest.mark.parametrize("done", [True, False])
def test_the_picture_follows_from_the_raw_file_alone(accuracy, done, tmp_path):
    if not done:
        accuracy["intervals"] = {}
    for name in ("a.png", "b.png"):
        study.draw(copy.deepcopy(accuracy), tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    axes = study.figure(accuracy).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["fp8", "made-up", "qnf4"]
    assert axes.texts[2].get_text().startswith("+3.000 %")
    other = copy.deepcopy(accuracy)
    other["runs"][0]["fp8"] += 1e-6
    assert study.digest(other) != study.digest(accuracy)


def test_a_page_gets_its_table_and_its_picture(accuracy, tmp_path):
    result.write(accuracy, tmp_path / "raw.json")
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- table: raw.json -->\n<!-- end of table -->\n<!-- figure: raw.json gaps.png -->\n![gaps](gaps.png)\n"
    )
    assert main(["tables", str(page)]) == 0
    assert "| `qnf4` | `bf16-lora` |" in page.read_text()
    drawn = (tmp_path / "gaps.png").read_bytes()
    assert main(["tables", str(page)]) == 0
    assert (tmp_path / "gaps.png").read_bytes() == drawn


def test_raw_files_carry_their_environment():
    for path in (ROOT / "docs" / "measurements").glob("*.json"):
        environment = json.loads(path.read_text(encoding="utf-8"))["environment"]
        assert {"device", "torch", "date", "surokit"} <= environment.keys()


def test_the_cost_of_watching_is_measured(tmp_path, capsys):
    out = tmp_path / "watching.json"
    assert main(["watching", "--steps", "3", "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    assert set(data["watching"]) == {"panel", "widget", "records"}
    assert all(0 < share < 1 for share in data["watching"].values())
    assert len(data["step_time_with_widget_over_without"]) == 2
    assert "of the run" in capsys.readouterr().out


def test_bad_input_is_one_sentence(capsys):
    assert main(["cpu", "--systems", "nonsense"]) == 2
    assert "There is no system 'nonsense' in the case 'train': known are transformers bf16," in capsys.readouterr().err


def test_without_a_gpu_the_gpu_benchmark_says_so(capsys):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert main(["gpu"]) == 2
    assert "There is no CUDA device" in capsys.readouterr().err
