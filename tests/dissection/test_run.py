"""A dissection in processes of its own: its folder, what goes wrong in a cell, and what is refused before anything runs."""

import errno
import json
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import nn

import surokit as sk
from surokit.dissection import run
from surokit.dissection.cell import Cell
from surokit.dissection.job import Job, Tokens, machine_of
from surokit.dissection.settings import AGAIN, BASELINE, Setting
from surokit.launching.outcome import LaunchError
from tests.dissection.cells import cell
from tests.dissection.sources import fails, hangs
from tests.refusals import refused

CONFIG = sk.DecoderConfig(layers=1, width=32, heads=2, kv_heads=1, vocab=64, ffn=64, max_length=64)
HERE = machine_of(torch.device("cpu"))
OVER: dict[str, Any] = {"recompute": ("none", "full")}
OPTIONS: dict[str, Any] = {"over": OVER, "steps": 5, "device": "cpu"}


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch):
    monkeypatch.setattr(run, "cores_in_use", lambda: 0.0)


def job(source=CONFIG, **changes):
    return Job(Setting(batch=1, length=16, **changes), source, Tokens(), 1, 0, 1e-3, None, "cpu")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Three cells, each measured in a process of its own."""
    folder = tmp_path_factory.mktemp("dissections") / "tiny"
    return sk.dissect(CONFIG, (2, 32), folder=folder, **OPTIONS), folder


def test_cells_are_measured_in_processes_and_kept(measured, capsys):
    found, folder = measured
    assert [c.name for c in found.cells] == [BASELINE, "recompute=full", AGAIN]
    assert all(c.is_measured for c in found.cells)
    assert len({c.losses for c in found.cells}) == 1
    assert found["recompute=full"].peak_gib < found[BASELINE].peak_gib
    assert len({c.work["weights"] for c in found.cells}) == 1
    again = sk.Dissection.load(folder)
    assert again.cells == found.cells
    assert again.head["environment"]["torch"] == torch.__version__
    profile = sk.Profile.load(folder / "profiles" / "baseline.json.gz")
    assert profile.parts["ms"].sum() == pytest.approx(found[BASELINE].profile["wall_ms"], rel=0.02)


def test_a_second_call_measures_what_is_missing(measured, capsys, monkeypatch):
    found, folder = measured
    asked = []

    def launched(function, job, limit_s):
        asked.append(job.setting.recompute)
        return {**cell("x").__dict__, "machine": HERE}

    monkeypatch.setattr(run, "launched", launched)
    assert sk.dissect(CONFIG, (2, 32), folder=folder, **OPTIONS).cells == found.cells
    assert asked == []
    (folder / "cells" / "recompute=full.json").unlink()
    sk.dissect(CONFIG, (2, 32), folder=folder, **OPTIONS)
    assert asked == ["full"]
    assert "2 cells of 3 measured before" in capsys.readouterr().err
    found["recompute=full"].save(folder / "cells" / "recompute=full.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"model": replace(CONFIG, layers=2)},
        {"batch": {"input_ids": torch.ones(2, 32, dtype=torch.int64)}},
        {"steps": 6},
        {"lr": 1.0},
        {"what": "tune"},
        {"over": {"recompute": ("full", "none")}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_folder_of_something_else_is_refused(measured, changes):
    _, folder = measured
    given = {"model": CONFIG, "batch": (2, 32), "folder": folder, **OPTIONS, **changes}
    with pytest.raises(ValueError, match=r"give another folder|give\s+another folder"):
        sk.dissect(given.pop("model"), given.pop("batch"), **given)


def test_a_folder_with_other_things_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("words")
    with pytest.raises(ValueError, match="holds something else"):
        sk.dissect(CONFIG, (2, 32), folder=tmp_path, **OPTIONS)
    (tmp_path / "thesis.txt").rename(tmp_path / "dissection.json")
    with pytest.raises(ValueError, match="is damaged"):
        sk.Dissection.load(tmp_path)


def test_a_process_that_fails_or_hangs():
    with pytest.raises(LaunchError, match="no such weights"):
        run.launched(run.measured, job(fails), 600)
    with pytest.raises(TimeoutError, match="longer than 4 s"):
        run.launched(run.measured, job(hangs), 4)


# -- what becomes of a cell


def outcomes(monkeypatch, *found):
    """Let the processes give these, one after the other: values, or errors that are raised."""
    left = list(found)
    jobs = []

    def launched(function, job, limit_s):
        jobs.append((function.__name__, job.setting.batch))
        made = left.pop(0) if left else 1 if function is run.searched else {**cell("x").__dict__, "machine": HERE}
        if isinstance(made, BaseException):
            raise made
        return made

    monkeypatch.setattr(run, "launched", launched)
    return jobs


def dissected(**options):
    return sk.dissect(CONFIG, (2, 32), **{**OPTIONS, **options})


def test_a_cell_that_fails_or_is_late_is_a_row_and_is_measured_again(monkeypatch, tmp_path):
    one = {**cell("x").__dict__, "machine": HERE}
    failed = LaunchError("Rank 0 failed with ValueError: no\ntraceback", 0, "failed")
    outcomes(monkeypatch, one, failed, TimeoutError("The cell took"))
    found = dissected(folder=tmp_path / "d")
    assert [(c.state, c.why) for c in found.cells] == [
        ("measured", ""),
        ("failed", "Rank 0 failed with ValueError: no"),
        ("late", "The cell took"),
    ]
    jobs = outcomes(monkeypatch)
    assert [c.state for c in dissected(folder=tmp_path / "d").cells] == ["measured"] * 3
    assert len(jobs) == 2


def test_a_baseline_that_fails_ends_all(monkeypatch):
    jobs = outcomes(monkeypatch, LaunchError("Rank 0 failed with ValueError: no such model\ntraceback", 0, "failed"))
    with refused(RuntimeError):
        dissected()
    assert len(jobs) == 1


def test_a_process_that_the_system_ends_did_not_fit(monkeypatch):
    outcomes(monkeypatch, LaunchError("Rank 0 was killed by SIGKILL", 0, "killed"))
    first = dissected(gib=2).cells[0]
    assert first.state == "does not fit"
    assert first.why.startswith("Memory ran out and the system ended the process, with 2 GiB")
    assert first.planned["terms"]["activations"] > 0


def test_an_interrupt_keeps_the_cells_that_were_measured(monkeypatch, capsys, tmp_path):
    outcomes(monkeypatch, {**cell("x").__dict__, "machine": HERE}, KeyboardInterrupt())
    found = dissected(folder=tmp_path / "d")
    assert [c.name for c in found.cells] == [BASELINE]
    assert "interrupted; cells that were measured are kept" in capsys.readouterr().err
    assert len(sk.Dissection.load(tmp_path / "d").cells) == 1
    outcomes(monkeypatch, None)  # asked to stop between two steps
    with pytest.raises(KeyboardInterrupt):
        dissected()


def test_what_did_not_fit_is_tried_again_with_more_memory(monkeypatch, tmp_path):
    none = {"state": "does not fit", "why": "Memory ran out.", "machine": HERE, "memory": {"limit_gib": 1.0}}
    outcomes(monkeypatch, none, none, none)
    assert {c.state for c in dissected(folder=tmp_path / "d", gib=1.0).cells} == {"does not fit"}
    assert outcomes(monkeypatch) == []
    assert {c.state for c in dissected(folder=tmp_path / "d", gib=1.0).cells} == {"does not fit"}
    jobs = outcomes(monkeypatch)
    assert {c.state for c in dissected(folder=tmp_path / "d", gib=2.0).cells} == {"measured"}
    assert len(jobs) == 3


def test_a_full_disk_is_said_and_keeps_what_was_written(monkeypatch, tmp_path):
    outcomes(monkeypatch)
    real, room = Cell.save, [1]

    def save(self, path):
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        room.pop()
        real(self, path)

    monkeypatch.setattr(Cell, "save", save)
    with pytest.raises(OSError, match="'recompute=full' could not be written"):
        dissected(folder=tmp_path / "d")
    assert [c.name for c in sk.Dissection.load(tmp_path / "d").cells] == [BASELINE]


def test_the_largest_batch_is_found_in_one_process_and_measured_in_another(monkeypatch):
    none = {"state": "does not fit", "why": "Memory ran out.", "machine": HERE}
    fits = {**cell("x").__dict__, "machine": HERE}
    jobs = outcomes(monkeypatch, 16, none, none, fits)
    first = dissected(over={"batch": ("largest",)}).cells[0]
    assert jobs[:4] == [("searched", "largest"), *(("measured", n) for n in (16, 12, 9))]
    assert first.state == "measured"
    assert first.setting["batch"] == "largest"
    jobs = outcomes(monkeypatch, 0, none)
    first = dissected(over={"batch": ("largest",)}).cells[0]
    assert jobs[:2] == [("searched", "largest"), ("measured", 1)]
    assert first.state == "does not fit"


def test_a_combination_that_contradicts_itself_is_a_row(monkeypatch):
    outcomes(monkeypatch)
    found = dissected(over={"recompute": ("none", "full"), "offload_activations": (False, True)})
    assert found["all together"].state == "refused"
    assert "contradict each other" in found["all together"].why


def test_progress_tells_which_cell_and_how_long(monkeypatch, capsys):
    outcomes(monkeypatch)
    dissected()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "surokit: cell 1 of 3: baseline"
    assert lines[1].startswith("surokit: cell 2 of 3: recompute=full, about ")


def test_several_sizes_are_a_switch(monkeypatch):
    outcomes(monkeypatch)
    found = sk.dissect({"small": CONFIG, "large": replace(CONFIG, layers=2)}, (2, 32), **OPTIONS)
    assert [c.name for c in found.cells][:4] == [
        BASELINE,
        "recompute=full",
        "model=large",
        "model=large, recompute=full",
    ]
    with refused(ValueError):
        sk.dissect(CONFIG, (2, 32), over={"model": ("a", "b")}, device="cpu")


# -- what is refused before anything runs


@pytest.mark.parametrize(
    "changes",
    [{"what": "serve"}, {"steps": 0}, {"steps": True}, {"limit_s": 0}, {"gib": -1}, {"device": "abacus"}],
    ids=str,
)
def test_arguments(changes):
    with refused(ValueError):
        dissected(**changes)


@pytest.mark.parametrize("batch", [3, "text", [], [{"labels": 1}], {"input_ids": [1, 2]}, (0, 5), (2, 3, 4)], ids=repr)
def test_what_is_no_batch(batch):
    with refused(TypeError):
        sk.dissect(CONFIG, batch, **OPTIONS)


def test_batches_of_wrong_shapes():
    ids = torch.ones(2, 4, dtype=torch.int64)
    for one in ({"input_ids": ids, "labels": ids[:1]}, {"input_ids": ids[0]}, {"input_ids": ids[:, :0]}):
        with pytest.raises(ValueError, match="both of one shape"):
            sk.dissect(CONFIG, one, **OPTIONS)


def test_batches_are_one_stream_of_tokens():
    batches = [{"input_ids": torch.arange(6).view(2, 3) + 6 * i, "labels": torch.full((2, 3), -100)} for i in range(2)]
    tokens, rows, length = run.read_batch(iter(batches), 0)
    assert (rows, length) == (2, 3)
    assert tokens.ids is not None
    assert tokens.labels is not None
    assert tokens.ids.tolist() == list(range(12))
    assert set(tokens.labels.tolist()) == {-100}


def test_what_is_no_model():
    with refused(TypeError):
        sk.dissect(cast("Any", 12), (2, 32), **OPTIONS)


def test_models_are_described_alike_and_told_apart():
    torch.manual_seed(0)
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert run.described(one) == run.described(one) != run.described(other)
    assert run.described(fails).endswith("sources.fails")
    assert run.described(CONFIG) != run.described(replace(CONFIG, layers=2))


@pytest.mark.parametrize(
    "name", ["baseline", "batch=2, recompute=full", "a/b", "x" * 200, "..", "optimizer=AdamW(lr=0.1)"]
)
def test_names_of_cells_are_names_of_files(name, tmp_path):
    file = tmp_path / f"{run.file_name(name)}.json"
    file.write_text(json.dumps(name))
    assert file.parent == tmp_path
    assert run.file_name(name) != run.file_name(f"{name} again")
