"""Tables, effects, cells of others, pictures and reports, of cells whose answers are known."""

import json
from dataclasses import replace

import pytest

from surokit.dissection.cell import FORMAT, Cell
from surokit.dissection.dissection import CELLS, HEAD, Dissection
from surokit.dissection.settings import BASELINE
from tests.dissection.cells import cell, profile
from tests.refusals import refused

FLASH = cell("attention=flash", (45.0,) * 6, attention="flash", peak=2**29, profile=profile(attention=5.0))
FULL = cell("recompute=full", (70.0,) * 6, losses=(5.0, 4.0), recompute="full", peak=2**28)
FP8 = cell("recipe=fp8", (50.0,) * 6, losses=(5.0, 4.25), recipe="fp8")
BIG = cell("recompute=none", state="does not fit", why="Memory ran out: activations bind.", batch="largest")


@pytest.fixture
def found():
    return Dissection([cell(BASELINE), FLASH, FULL, FP8, BIG], {"what": "train", "model": "tiny"})


def test_rates_have_an_interval_of_their_rounds():
    steady, few = cell("a"), cell("b", (60.0,) * 3)
    assert steady.tokens_per_s.mid == pytest.approx(10_000)
    assert (steady.tokens_per_s.low, steady.tokens_per_s.high) == pytest.approx((10_000, 10_000))
    assert not few.tokens_per_s.known
    spread = cell("c", (50.0, 70.0) * 5).tokens_per_s
    assert spread.low < spread.mid < spread.high
    assert BIG.tokens_per_s is None


def test_table_by_step(found):
    table = found.table().set_index("cell")
    assert list(table.index) == [c.name for c in found.cells]
    assert table.loc["attention=flash", "tokens_per_s"] == pytest.approx(600 / 0.045)
    assert table["peak_gib"].tolist()[:3] == [1.0, 0.5, 0.25]
    assert table.loc[BASELINE, "planned_gib"] == pytest.approx(1.1)
    assert table["loss_change"].tolist()[:4] == [0.0, 0.0, 0.0, 0.25]
    assert table.loc["recompute=none", "state"] == "does not fit"
    text = repr(found)
    assert "1.33 x" in text
    assert "+0.25" in text
    assert "same" in text
    assert "recompute=none: Memory ran out: activations bind." in text
    assert "does not fit" in found._repr_html_()


def test_phases_sum_to_the_step_without_the_profiler(found):
    table = found.table("phase").set_index(["cell", "phase"])
    for one in found.cells[:-1]:
        rows = table.loc[one.name]
        assert list(rows.index) == ["forward", "backward", "optimizer", "other"]
        assert rows["wall_ms"].sum() == pytest.approx(one.ms)
        assert (rows[["busy_ms", "exposed_ms", "idle_ms"]].sum(axis=1) - rows["wall_ms"]).abs().max() < 1e-9
    # of a profiled step of 65 ms, forward has 50 / 3 busy and 5 idle; backward exchanges alone for 1 and beside work for 2
    scale = 60 / 65
    forward = {"wall_ms": 50 / 3 + 5, "busy_ms": 50 / 3, "exposed_ms": 0, "idle_ms": 5, "overlapped_ms": 0}
    backward = {"wall_ms": 100 / 3, "busy_ms": 100 / 3 - 1, "exposed_ms": 1, "idle_ms": 0, "overlapped_ms": 2}
    for name, expected in (("forward", forward), ("backward", backward)):
        assert table.loc[BASELINE, name].to_dict() == pytest.approx({key: ms * scale for key, ms in expected.items()})
    assert table.loc[BASELINE, "other"].to_dict() == pytest.approx(dict.fromkeys(forward, 0.0))


def test_collectives_by_size(found):
    table = found.table("communication")
    assert len(table) == sum(c.is_measured for c in found.cells)
    assert found.table("communication", cell=BASELINE).to_dict("records") == [
        {"cell": BASELINE, "collective": "all_gather", "bytes": 4096, "calls": 2.0, "ms": 3.0}
    ]


def test_modules_and_operators_sum_to_the_step(found):
    for level in ("module", "operator"):
        table = found.table(level)
        assert list(table.columns) == [c.name for c in found.cells if c.is_measured]
        for name in table.columns:
            assert table[name].sum() == pytest.approx(found[name].ms, rel=0.02)
    one = found.table("module", cell=BASELINE).set_index("part")
    assert one.loc["attention", "ms"] == pytest.approx(25 * 60 / 65)
    assert one.loc["attention", "in"] == "DecoderLayer"
    assert one.loc["optimizer", "in"] == ""
    assert one["share"].sum() == pytest.approx(1)
    operators = found.table("operator", cell=BASELINE).set_index("operator")
    assert operators.loc["others", "ms"] == pytest.approx(9 * 60 / 65)
    assert operators.loc["all_gather, 4.1 kB", "ms"] == pytest.approx(60 / 65)
    assert operators.loc["idle", "ms"] == pytest.approx(5 * 60 / 65)


def test_tables_refuse(found):
    with refused(ValueError):
        found.table("layer")
    with refused(KeyError):
        found.table("module", cell="nobody")
    with refused(ValueError):
        found.table("module", cell="recompute=none")


def test_an_effect_says_how_much_and_where(found):
    effect = found.effect("flash")
    assert effect.switch == "attention=flash"
    (pair,) = effect.pairs
    assert pair.speed.mid == pytest.approx(60 / 45)
    assert pair.gib == pytest.approx(-0.5)
    assert pair.loss == 0
    parts = effect.parts()
    assert parts["part"].iloc[0] == "attention"
    assert parts["change_ms"].sum() == pytest.approx(45 - 60)
    row = effect.table().iloc[0]
    assert (row["without"], row["with"], row["low"]) == (BASELINE, "attention=flash", pytest.approx(60 / 45))
    assert "same loss" in repr(effect)
    assert "1.333" in effect._repr_html_()
    assert found.effect("recipe").switch == "recipe=fp8"
    assert "loss +0.25" in repr(found.effect("recipe=fp8"))


def test_an_effect_has_a_pair_for_each_combination():
    both = cell("both", (40.0,) * 6, attention="flash", recompute="full")
    found = Dissection([cell(BASELINE), FLASH, FULL, both])
    pairs = found.effect("flash").pairs
    assert [(p.without.name, p.with_it.name) for p in pairs] == [
        (BASELINE, "attention=flash"),
        ("recompute=full", "both"),
    ]


def test_an_effect_of_a_cell_that_does_not_fit_says_why():
    lacking = cell("recompute=full", state="does not fit", why="Memory ran out.", recompute="full")
    effect = Dissection([cell(BASELINE), lacking]).effect("full")
    assert effect.pairs[0].speed is None
    assert "Memory ran out." in repr(effect)


def test_an_effect_that_was_not_measured(found):
    with refused(LookupError):
        found.effect("zero=3")
    with refused(LookupError):
        Dissection([cell(BASELINE), cell("x", attention="flash", recompute="full")]).effect("flash")
    with refused(LookupError):
        Dissection([cell(BASELINE), cell("x", recipe="fp8"), cell("y", recipe="fp4")]).effect("recipe")


def test_rounds_that_differ_alike_make_no_difference(found):
    slow = (60.0, 66.0, 90.0, 60.0, 75.0)
    twice = Dissection([cell(BASELINE, slow), cell("x", tuple(ms / 2 for ms in slow), recompute="full")])
    (pair,) = twice.effect("full").pairs
    assert pair.speed == pytest.approx((2, 2, 2))
    rate = twice[BASELINE].tokens_per_s
    assert rate is not None
    assert rate.high > 1.1 * rate.low
    few = Dissection([cell(BASELINE, slow[:2]), cell("x", slow[:2], recompute="full")])
    speed = few.effect("full").pairs[0].speed
    assert speed is not None
    assert not speed.known


def test_what_is_to_be_known_stands_beside_the_table(found):
    assert "took up to 1.50 times as long in one round as in another" in repr(
        Dissection([cell(BASELINE, (60.0, 90.0, 60.0, 60.0, 60.0))])
    )
    assert "the last loss differed by up to 0.5 between rounds" in repr(
        Dissection([cell(BASELINE).with_round(cell(BASELINE, losses=(5.0, 4.5)))])
    )
    assert "other programs used the processor while attention=flash ran" in repr(
        Dissection([cell(BASELINE), replace(FLASH, cores_in_use=1.5), FULL])
    )
    other = cell("other", recompute="full")
    other.work["weights"] = "different"
    assert "did not start from the same weights" in repr(Dissection([*found.cells, other]))


def test_updates_of_zenflow_in_a_round(found):
    lazy = cell("optimizer=zenflow", optimizer="zenflow")
    for steps, said in ((10, "10 steps of a round hold more or fewer updates"), (8, "")):
        text = repr(Dissection([*found.cells, lazy], {"what": "train", "steps": steps}))
        assert ("steps of a round hold" in text) == bool(said)
        assert said in text


def test_generation_has_its_own_columns():
    def writes(name, prefill_ms, output, **changes):
        made = cell(name, **changes, tokens=2, losses=())
        profiled = {**made.profile, "prefill": profile(attention=80.0, idle=0.0)}
        return replace(made, profile=profiled, work={**made.work, "prefill_ms": prefill_ms, "output": output})

    found = Dissection(
        [
            writes(BASELINE, [120, 120], "a"),
            writes("recipe=qfp8", [60], "a", recipe="qfp8"),
            writes("recipe=fp4", [90], "b", recipe="fp4"),
        ],
        {"what": "infer"},
    )
    table = found.table().set_index("cell")
    assert table["prefill_ms"].tolist() == [120, 60, 90]
    assert table["same_output"].tolist() == [True, True, False]
    text = repr(found)
    assert "prefill ms" in text
    assert "Dissection of generation on cpu" in text
    assert text.splitlines()[4].endswith("other")
    phase = found.table("phase").set_index(["cell", "phase"]).loc[BASELINE]
    assert phase["wall_ms"].to_dict() == pytest.approx({"prefill": 120, "decode": 60})
    assert phase["idle_ms"].to_dict() == pytest.approx({"prefill": 0, "decode": 5 * 60 / 65})
    rows = found.table("module", cell=BASELINE).set_index("part")
    assert rows["prefill_ms"].sum() == pytest.approx(120)
    assert rows["ms"].sum() == pytest.approx(60)
    assert rows.loc["attention", "prefill_ms"] == pytest.approx(80)
    assert found.table("module").sum().tolist() == pytest.approx([60] * 3)


def test_the_text_is_compared_with_one_of_as_many_prompts():
    def writes(name, batch, **changes):
        made = cell(name, **changes, batch="largest")
        return replace(made, work={**made.work, "prefill_ms": [60], "output": "a" * batch, "batch": batch})

    quantized = [writes(f"recipe={name}", batch, recipe=name) for name, batch in (("qfp8", 8), ("qfp4", 4))]
    none_fits = cell(BASELINE, state="does not fit", batch="largest")
    for base, same in ((writes(BASELINE, 4), [True, None, True]), (none_fits, [None] * 3)):
        assert Dissection([base, *quantized]).table()["same_output"].tolist() == same


# -- other machines and programs


def test_another_machine_stands_beside_this_one(found):
    there = Dissection([replace(c, machine="H100", step_ms=(6.0,) * 6) for c in found.cells if c.is_measured])
    both = found.add(there)
    assert len(both.cells) == 9
    assert set(both.table()["machine"]) == {"cpu", "H100"}
    assert "attention=flash on H100" in both.table("module").columns
    assert both["attention=flash on H100"].machine == "H100"
    assert [p.with_it.machine for p in both.effect("flash").pairs] == ["cpu", "H100"]
    assert both.table().query("machine == 'H100'")["loss_change"].tolist() == [0, 0, 0, 0.25]
    with refused(ValueError):
        found.add(found)
    assert {c.machine for c in found.add(found, machine="another").cells} == {"cpu", "another"}


def test_cells_of_another_folder_were_measured_too_and_only_others_are_brought(found, tmp_path):
    (tmp_path / CELLS).mkdir()
    (tmp_path / HEAD).write_text(json.dumps({"format": FORMAT, "order": []}))
    for one in (found.baseline, replace(FLASH, origin="theirs.json")):
        replace(one, machine="H100").save(tmp_path / CELLS / f"{one.name}.json")
    states = found.add(tmp_path).table().query("machine == 'H100'").set_index("cell")["state"]
    assert states.to_dict() == {BASELINE: "measured", "attention=flash": "measured, brought"}


def test_cells_of_a_file_are_marked_as_brought(found, tmp_path):
    file = tmp_path / "theirs.json"
    rows = [
        {"name": "DeepSpeed", "tokens_per_s": 5000, "peak_gib": 3.5, "loss": 4.5},
        {"name": "other", "step_ms": [10, 12], "tokens_per_step": 600},
    ]
    file.write_text(json.dumps({"machine": "server A", "cells": rows}))
    both = found.add(file)
    theirs = both["DeepSpeed on server A"]
    assert theirs.tokens_per_s.mid == pytest.approx(5000)
    assert theirs.ms is None  # how many tokens a step has is not known
    assert (theirs.peak_gib, theirs.loss, theirs.origin) == (3.5, 4.5, str(file))
    assert both["other on server A"].step_ms == (11.0,)
    assert both["other on server A"].tokens_per_s.mid == pytest.approx(600 / 0.011)
    assert both.table()["loss_change"].isna().tolist()[-2:] == [True, True]
    assert "brought" in both.table().set_index("cell").loc["DeepSpeed", "state"]
    assert f"DeepSpeed: brought from {file}" in repr(both)


LOG = """\
  seq_length ...................................... 4096
  world_size ...................................... 8
 iteration 1/ 100 | elapsed time per iteration (ms): 9000.0 | global batch size: 16 | lm loss: 1.100000E+01 |
 iteration 2/ 100 | elapsed time per iteration (ms): 4100.0 | global batch size: 16 | lm loss: 1.050000E+01 |
 iteration 3/ 100 | elapsed time per iteration (ms): 4000.0 | global batch size: 16 | lm loss: 1.000000E+01 |
 iteration 4/ 100 | elapsed time per iteration (ms): 4200.0 | global batch size: 16 | lm loss: 9.500000E+00 |
[Rank 0] (after 4 iterations) memory (MB) | allocated: 20000 | max allocated: 30720.0 | reserved: 40000
"""


def test_a_log_of_megatron_is_read(found, tmp_path):
    file = tmp_path / "a800.log"
    file.write_text(LOG)
    brought = found.add(file)["Megatron-LM on a800"]
    assert brought.step_ms == (4100.0,)
    assert brought.tokens_per_s.mid == pytest.approx(16 * 4096 / 4.1)
    assert (brought.work["gpus"], brought.loss, brought.peak_gib) == (8, 9.5, 30)


@pytest.mark.parametrize(
    "text",
    [
        "no json",
        "[]x",
        '{"cells": [{"name": "x"}]}',
        '{"rows": []}',
        '[{"tokens_per_s": 5}]',
        LOG.replace("seq_length", "x"),
    ],
)
def test_files_that_hold_no_cells(found, tmp_path, text):
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"bad\.json"):
        found.add(file)


def test_a_file_that_is_not_there(found, tmp_path):
    with refused(FileNotFoundError):
        found.add("nowhere.json")
    with refused(FileNotFoundError):
        Dissection.load("nowhere")


# -- kept and shown


def test_a_cell_is_kept_as_it_is(tmp_path):
    for each in (FLASH, BIG):
        each.save(tmp_path / "cell.json")
        assert Cell.load(tmp_path / "cell.json") == each
    (tmp_path / "cell.json").write_text("{")
    with pytest.raises(ValueError, match="holds no cell"):
        Cell.load(tmp_path / "cell.json")


def test_the_picture_has_a_bar_a_cell_and_a_frontier(found):
    figure = found.plot()
    bars, points = figure.axes
    labels = [text.get_text() for text in bars.get_yticklabels()]
    assert len(labels) == 4
    assert labels[1].endswith("attention=flash")
    ends: dict[int, float] = {}
    for patch in bars.patches:
        at = round(patch.get_y() + patch.get_height() / 2)
        ends[at] = max(ends.get(at, 0), patch.get_x() + patch.get_width())
    assert [ends[i] for i in range(4)] == pytest.approx([100, 75, 70 / 0.6, 50 / 0.6], rel=1e-6)
    frontier = points.lines[-1].get_xydata()
    assert frontier.tolist() == [[0.25, pytest.approx(600 / 0.07)], [0.5, pytest.approx(600 / 0.045)]]
    assert [text.get_text() for text in points.texts[:-1]] == ["1", "2", "3", "4"]
    points = Dissection([*found.cells, replace(FLASH, name="much the same")]).plot().axes[1]
    assert [text.get_text() for text in points.texts[:-1]] == ["1", "2, 5", "3", "4"]


def test_a_bar_that_is_far_longer_than_the_others_is_cut_and_says_its_length(found):
    slow = cell("engine=transformers", (6000.0,) * 6, engine="transformers")
    axes = Dissection([*found.cells, slow]).plot().axes[0]
    assert axes.get_xlim()[1] < 400
    assert [text.get_text().split()[0] for text in axes.texts] == ["10,000"]
    assert not found.plot().axes[0].texts


def test_a_report_has_tables_picture_and_raw_cells(found, tmp_path):
    file = found.report(tmp_path / "report")
    text = file.read_text()
    for words in (
        "# Dissection of a training step",
        "| attention=flash | 13,333 |",
        "## By phase",
        "## By module",
        "cells.json",
    ):
        assert words in text
    assert (tmp_path / "report" / "step.png").stat().st_size > 1000
    again = Dissection([]).add(tmp_path / "report" / "cells.json")
    assert [c.name for c in again.cells] == [c.name for c in found.cells]
    assert again["attention=flash"].step_ms == FLASH.step_ms
