"""Predictions: every row of the targets' table, at rates that are said, and nothing in them that was measured."""

import json
import re
from pathlib import Path

import pytest

from surokit.bench import predicted as bench
from surokit.bench.configurations import MODELS, BenchWork, Configuration
from surokit.bench.targets import ESTIMATES, TARGETS, Target
from surokit.planner import find_gpu
from tests.refusals import refused

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def data():
    return bench.run()


def rows_of(data, gpu):
    return {(row["model"], row["train"], row["recipe"]): row for row in data["predicted"] if row["gpu"] == gpu}


def test_there_is_a_row_for_every_target_on_both_gpus(data):
    wanted = {(t.model, t.train, t.recipe) for t in TARGETS}
    for gpu in bench.DEVICES:
        assert set(rows_of(data, gpu)) == wanted
    assert len(data["predicted"]) == len(bench.DEVICES) * len(TARGETS)


def test_assumed_rates_are_slower_than_large_products_and_these_than_peaks(data):
    names = ("tokens_per_s", "tokens_per_s at large products' rates", "tokens_per_s at peak rates")
    for row in data["predicted"]:
        low, middle, high = (row[name] for name in names)
        assert 0 < low < middle < high
        assert 0 < row["mfu"] < 1.5  # of the bf16 peak, which products in fp8 may pass
        assert sum(row["ms by phase"].values()) == pytest.approx(row["step_ms"], rel=1e-3)
        assert row["tokens_per_s"] == pytest.approx(BenchWork().tokens / row["step_ms"] * 1e3)
        assert row["kernels"] < row["kernels unfused"]


def test_another_estimate_stands_beside_the_predictions_that_it_is_of(data):
    """It is of one H200 alone, and of rows that are there."""
    found = {
        key: row["estimated k tokens/s"] for key, row in rows_of(data, "H200").items() if "estimated k tokens/s" in row
    }
    assert found == {key: list(span) for key, span in ESTIMATES.items()}
    assert not any("estimated k tokens/s" in row for row in rows_of(data, "H100").values())
    assert re.search(r"\| H200 \| 8b \| lora \| `fp8` (\| [\d.]+ ){3}\| 17 to 20 \|", bench.table(data))
    labels = [line.get_label() for line in bench.figure(data).axes[0].lines]
    assert "estimated by a reader" in labels


@pytest.fixture
def measured(tmp_path):
    """A file of `bench gpu` with two figures, one of which is doubtful."""
    found = {}
    for recipe, rates, more in (
        ("bf16", [98e3, 100e3, 104e3], {}),
        ("fp8", [50e3], {"unchecked": "why", "graphs": "hooks"}),
    ):
        c = Configuration("0.6b", recipe)
        for number, rate in enumerate(rates):
            about = {"group": "g", "round": number, "name": c.name, "configuration": c.to_dict()}
            found[f"turn/{recipe}/{number}"] = {"what": "turn", "tokens_per_s": rate, **about, **more}
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({"rehearsal": False, "environment": {"device": "NVIDIA H200"}, "gpu": found}))
    return path


def test_what_was_measured_stands_beside_its_prediction(measured, data, tmp_path):
    beside = bench.run(measured=measured)
    rows = rows_of(beside, "H200")
    assert rows["0.6b", "lora", "bf16"]["measured"] == {"tokens_per_s": 100e3, "least": 98e3, "most": 104e3}
    assert sum("measured" in row for row in beside["predicted"]) == 2
    text = bench.table(beside)
    assert "| H200 | 0.6b | lora | `bf16` | 100.0 (98.0 to 104.0) |" in text
    assert "| 50.0 (50.0 to 50.0) **UNCHECKED** **NO CUDA GRAPHS** |" in text
    assert "| H100 | 0.6b | lora | `bf16` | not measured |" in text
    assert "measured k tokens/s" not in bench.table(data)
    said = [text.get_text() for text in bench.figure(beside).axes[0].texts]
    assert said == ["  measured", "  measured, unchecked, no CUDA graphs"]
    assert not list(bench.figure(data).axes[0].texts)
    bench.draw(beside, tmp_path / "picture.png")
    assert bench.digest(beside) != bench.digest(data)


@pytest.mark.parametrize(
    "change",
    [
        {"rehearsal": True},
        {"environment": {"device": "NVIDIA A100"}},
        {"gpu": None},
    ],
)
def test_what_is_no_measurement_of_a_predicted_device_is_refused(measured, change):
    measured.write_text(json.dumps({**json.loads(measured.read_text()), **change}))
    with refused(ValueError):
        bench.run(measured=measured)


def test_a_row_by_hand(data):
    """The products of the 8B model's LoRA step: forward and the gradient of the input, at 622 TFLOPS, but for the first block's."""
    model, row = MODELS["8b"], rows_of(data, "H200")["8b", "lora", "bf16"]
    K, F, q, kv = (
        model["width"],
        model["ffn"],
        model["heads"] * model["head_dim"],
        model["kv_heads"] * model["head_dim"],
    )
    block, read = K * (q + 2 * kv) + K * q + 3 * K * F, K * (q + 2 * kv)
    flop = 2 * BenchWork().tokens * (2 * model["layers"] * block - read)
    assert row["ms by group"]["products"] == pytest.approx(flop / 622e12 * 1e3, rel=0.01)
    gaps = row["ms by phase"]["gaps"]
    assert gaps == pytest.approx(row["kernels"] * 1e-3)


def test_bars_stand_beside_the_h200_alone(data):
    rows = rows_of(data, "H200")
    assert all("bars" in row for row in rows.values())
    assert not any("bars" in row for row in rows_of(data, "H100").values())
    assert rows["8b", "lora", "fp8"]["bars"] == {"gate": 11_600, "target": 18_000, "stretch": 22_800}
    own = rows["0.6b", "lora", "bf16"]["tokens_per_s"]
    assert rows["0.6b", "lora", "qfp8"]["bars"]["gate"] == pytest.approx(0.9 * own)
    assert rows["0.6b", "lora", "qnf4"]["bars"]["stretch"] == own


def test_what_does_not_fit_is_planned_with_recompute(data):
    full = rows_of(data, "H100")["8b", "full", "bf16"]
    assert (full["recompute"], full["fits"]) == ("full", True)
    assert full["gib"] < 80
    assert full["ms by phase"]["recompute"] > 0
    assert {row["recompute"] for row in rows_of(data, "H200").values()} == {"none"}
    # and where nothing makes it fit there is no speed
    target = Target("8b", "full", "bf16", 1, 1, 1)
    none = bench._row(target, find_gpu("L4"))
    assert none["fits"] is False
    assert none["tokens_per_s"] is None
    text = bench.table({**data, "predicted": [none]})
    assert "does not fit" in text


def test_the_table_calls_itself_a_prediction_and_names_what_it_assumes(data):
    table = bench.table(data)
    assert "predicted by the planner, not measured" in table
    assert "Every figure is a prediction" in table
    assert "`0.9 x BF16` is a share of what the same model makes in BF16" in table
    assert all(f"- {name}: {words}" in table for name, words in data["assumed"].items())
    assert all(words in table for words in ("622 TFLOPS", "1 us after each kernel", "overlap: none"))
    assert "measured" not in table.replace("not measured", "")
    lines = table.splitlines()
    both = re.findall(r"(?m)(?:^\|.*\n?)+", table)
    assert [len(text.splitlines()) for text in both] == [2 + len(data["predicted"])] * 2
    assert all(len({line.count("|") for line in text.splitlines()}) == 1 for text in both)
    last = [name.strip() for name in lines[0].split("|")].index("predicted to reach")
    passed = dict(zip(TARGETS, (line.split("|")[last].strip() for line in lines[2:])))
    rows = rows_of(data, "H200")
    for target, word in passed.items():
        row = rows[target.model, target.train, target.recipe]
        names = [name for name, bar in row["bars"].items() if row["tokens_per_s"] >= bar]
        assert word == (names[-1] if names else "none")


def test_w_transposed_is_weighed(data):
    row = rows_of(data, "H200")["8b", "lora", "qfp8"]
    assert 6 < row["W' cached"]["adds_gib"] < 8
    assert 0 < row["W' cached"]["saves_ms"] < 0.05 * row["step_ms"]
    assert rows_of(data, "H200")["8b", "lora", "bf16"]["W' cached"] == {"adds_gib": 0, "saves_ms": 0}


def test_the_committed_predictions_are_todays(data):
    raw = json.loads((ROOT / "docs" / "measurements" / "predicted.json").read_text(encoding="utf-8"))
    assert raw["assumed"] == data["assumed"]
    for row, now in zip(raw["predicted"], data["predicted"], strict=True):
        key = row["gpu"], row["model"], row["train"], row["recipe"]
        assert key == (now["gpu"], now["model"], now["train"], now["recipe"])
        for name in ("step_ms", "gib", "kernels", "kernels unfused"):
            assert row[name] == pytest.approx(now[name], rel=1e-3), (key, name)
