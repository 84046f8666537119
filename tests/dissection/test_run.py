"""A dissection in processes of its own: its folder, what goes wrong in a cell, and what is refused before anything runs."""

import errno
import json
from dataclasses import replace
from datetime import datetime
from typing import Any, cast

import pytest
import torch
from torch import nn

import surokit as sk
from surokit.dissection import run
from surokit.dissection.cell import Cell
from surokit.dissection.job import Job, Tokens, machine_of
from surokit.dissection.settings import BASELINE, Setting
from surokit.launching.outcome import LaunchError
from tests.dissection.cells import cell
from tests.dissection.sources import fails, hangs
from tests.refusals import refused

CONFIG = sk.DecoderConfig(layers=1, width=32, heads=2, kv_heads=1, vocab=64, ffn=64, max_length=64)
HERE = machine_of(torch.device("cpu"))
OVER: dict[str, Any] = {"recompute": ("none", "full")}
OPTIONS: dict[str, Any] = {"over": OVER, "steps": 5, "rounds": 1, "device": "cpu"}
ONE = {**cell("x", step_ms=(60.0,)).__dict__, "machine": HERE}


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch):
    monkeypatch.setattr(run, "cores_in_use", lambda: 0.0)


class Later(datetime):
    """A clock on another day."""

    @classmethod
    def now(cls, tz=None):
        return datetime(2040, 1, 1, tzinfo=tz)


def job(source=CONFIG, **changes):
    return Job(Setting(batch=1, length=16, **changes), source, Tokens(), 1, 0, 1e-3, None, "cpu")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Two cells, each measured twice, in processes of its own."""
    folder = tmp_path_factory.mktemp("dissections") / "tiny"
    return sk.dissect(CONFIG, (2, 32), folder=folder, **{**OPTIONS, "rounds": 2}), folder


def test_cells_are_measured_in_processes_and_kept(measured, capsys):
    found, folder = measured
    assert [c.name for c in found.cells] == [BASELINE, "recompute=full"]
    assert [len(c.step_ms) for c in found.cells] == [2, 2]
    assert [c.work["loss_range"] for c in found.cells] == [0, 0]
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
    asked, again = [], {**ONE, "work": found[BASELINE].work}

    def launched(function, job, limit_s):
        asked.append(job.setting.recompute)
        return again

    monkeypatch.setattr(run, "launched", launched)
    assert sk.dissect(CONFIG, (2, 32), folder=folder, **OPTIONS).cells == found.cells
    assert asked == []
    (folder / "cells" / "recompute=full.json").unlink()
    sk.dissect(CONFIG, (2, 32), folder=folder, **OPTIONS)
    assert asked == ["full"]
    assert "1 cell of 2 measured before" in capsys.readouterr().err
    apart = sk.Dissection.load(folder)
    assert "recompute=full was measured in another call than the baseline" in repr(apart)
    found["recompute=full"].save(folder / "cells" / "recompute=full.json")
    assert "another call" not in repr(sk.Dissection.load(folder))


def test_all_cells_are_measured_in_turn_and_back(monkeypatch, tmp_path, capsys):
    jobs = []

    def launched(function, job, limit_s):
        jobs.append((job.setting.recompute, job.only_timed))
        return {**ONE, "step_ms": [60.0 + len(jobs)]}

    monkeypatch.setattr(run, "launched", launched)
    found = dissected(rounds=3, folder=tmp_path / "d")
    first, later = [("none", False), ("full", False)], [("full", True), ("none", True), ("none", True), ("full", True)]
    assert jobs == first + later
    assert found[BASELINE].step_ms == (61.0, 64.0, 65.0)
    assert found["recompute=full"].step_ms == (62.0, 63.0, 66.0)
    assert "3 rounds of all cells in turn, too few rounds to trust" in repr(found)
    assert "up to 1.07 times as long in one round as in another" in repr(found)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "surokit: round 1 of 3, 6 measurements left: baseline"
    assert lines[5].startswith("surokit: round 3 of 3, 1 measurement left: recompute=full, about ")
    again = dissected(rounds=4, folder=tmp_path / "d")
    assert len(jobs) == 8
    assert [len(c.step_ms) for c in again.cells] == [4, 4]


def test_a_specification_of_an_optimizer_is_kept_by_name(monkeypatch, tmp_path):
    jobs = []

    def launched(function, job, limit_s):
        jobs.append(job.setting.optimizer)
        return ONE

    monkeypatch.setattr(run, "launched", launched)
    muon = sk.Muon(lr=1e-3)
    for _ in range(2):  # a second start finds both cells
        found = dissected(over={"optimizer": ("adamw", muon)}, folder=tmp_path / "d")
        assert jobs == ["adamw", muon]
        assert found["optimizer=Muon(lr=0.001)"].setting["optimizer"] == "Muon(lr=0.001)"


def test_a_round_that_fails_leaves_those_before(monkeypatch):
    failed = LaunchError("Rank 0 failed with ValueError: no\ntraceback", 0, "failed")
    jobs = outcomes(monkeypatch, ONE, ONE, failed, ONE, ONE, ONE)
    found = dissected(rounds=2)
    assert len(jobs) == 4
    full = found["recompute=full"]
    assert full.is_measured
    assert len(full.step_ms) == 1
    assert full.why == "round 2 was not measured: Rank 0 failed with ValueError: no"
    outcomes(monkeypatch, ONE, ONE, ONE, failed)  # the baseline, in the second round
    assert [len(c.step_ms) for c in dissected(rounds=2).cells] == [1, 2]


def test_a_round_that_failed_is_tried_in_the_next_call_and_pairs_no_rounds(monkeypatch, tmp_path):
    failed = LaunchError("Rank 0 failed with ValueError: no\ntraceback", 0, "failed")
    jobs = outcomes(monkeypatch, ONE, ONE, failed)
    found = dissected(rounds=5, folder=tmp_path / "d")
    assert [len(c.step_ms) for c in found.cells] == [5, 1]
    assert len(jobs) == 7  # it is not tried again in this call
    monkeypatch.setattr(run, "datetime", Later)
    again = dissected(rounds=5, folder=tmp_path / "d")
    assert [(len(c.step_ms), c.why) for c in again.cells] == [(5, ""), (5, "")]
    speed = again.effect("full").pairs[0].speed
    assert speed is not None
    assert not speed.known


def test_a_cell_without_time_left_is_late():
    with pytest.raises(TimeoutError):
        run.launched(run.measured, job(), -1.0)


def test_the_order_of_cells_is_that_of_the_calls(monkeypatch, tmp_path):
    outcomes(monkeypatch)
    dissected(folder=tmp_path / "d")
    dissected(folder=tmp_path / "d", over={"attention": ("auto", "math")})
    names = [BASELINE, "recompute=full", "attention=math"]
    for file in sorted((tmp_path / "d" / "cells").iterdir()):  # as a copy may have them
        file.touch()
    found = sk.Dissection.load(tmp_path / "d")
    assert [c.name for c in found.cells] == names
    outcomes(monkeypatch)
    assert [c.name for c in dissected(folder=tmp_path / "d").cells] == names  # those that were not asked for too
    assert found.baseline.name == BASELINE


def test_a_model_that_is_made_anew_differently_is_refused(monkeypatch):
    other = {**ONE, "work": {**ONE["work"], "weights": "others"}}
    outcomes(monkeypatch, ONE, other)
    with refused(ValueError):
        dissected()


@pytest.mark.parametrize(
    "changes",
    [
        {"model": replace(CONFIG, layers=2)},
        {"batch": {"input_ids": torch.ones(2, 32, dtype=torch.int64)}},
        {"steps": 6},
        {"lr": 1.0},
        {"what": "tune"},
        {"over": {"recompute": ("full", "none")}},
        {"over": {"zero": (0, 2)}},
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


def test_a_trainer_in_a_process_of_its_own_trains_in_one():
    pytest.importorskip("accelerate")
    found = run.launched(run.measured, job(engine="trainer"), 600)
    assert found["state"] == "measured"
    assert "communication" not in {row["part"] for row in found["profile"]["parts"]}
    assert not [row for row in found["profile"]["activities"] if "c10d" in row["activity"]]


def test_one_of_several_that_runs_out_of_memory_ends_all():
    found = dissected(over={"gpus": (2,)}, gib=0.002)
    assert [c.state for c in found.cells] == ["does not fit"]
    assert found.cells[0].why.startswith("Memory ran out while the model was made, with 0.001 GiB")


# -- what becomes of a cell


def outcomes(monkeypatch, *found):
    """Let the processes give these, one after the other: values, or errors that are raised."""
    left = list(found)
    jobs = []

    def launched(function, job, limit_s):
        jobs.append((function.__name__, job.setting.batch))
        made = left.pop(0) if left else 1 if function is run.searched else ONE
        if isinstance(made, BaseException):
            raise made
        return made

    monkeypatch.setattr(run, "launched", launched)
    return jobs


def dissected(**options):
    return sk.dissect(CONFIG, (2, 32), **{**OPTIONS, **options})


def test_a_cell_that_fails_or_is_late_is_a_row_and_is_measured_again(monkeypatch, tmp_path):
    failed = LaunchError("Rank 0 failed with ValueError: no\ntraceback", 0, "failed")
    over = {"recompute": ("none", "full"), "attention": ("auto", "math")}
    outcomes(monkeypatch, ONE, failed, TimeoutError())
    found = dissected(folder=tmp_path / "d", over=over, together=False, limit_s=50)
    assert [(c.state, c.why) for c in found.cells] == [
        ("measured", ""),
        ("failed", "Rank 0 failed with ValueError: no"),
        ("late", "It took longer than 50 s: raise limit_s, or give it less work."),
    ]
    jobs = outcomes(monkeypatch)
    again = dissected(folder=tmp_path / "d", over=over, together=False)
    assert [c.state for c in again.cells] == ["measured"] * 3
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
    outcomes(monkeypatch, ONE, LaunchError("Rank 0 was killed by SIGSEGV.", 0, "killed"))
    assert dissected().cells[1].state == "failed"


def test_an_interrupt_keeps_the_cells_that_were_measured(monkeypatch, capsys, tmp_path):
    outcomes(monkeypatch, ONE, KeyboardInterrupt())
    found = dissected(folder=tmp_path / "d")
    assert [c.name for c in found.cells] == [BASELINE]
    assert "interrupted; cells that were measured are kept" in capsys.readouterr().err
    assert len(sk.Dissection.load(tmp_path / "d").cells) == 1
    outcomes(monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        dissected()


def test_what_did_not_fit_is_tried_again_with_more_memory(monkeypatch, tmp_path):
    none = {"state": "does not fit", "why": "Memory ran out.", "machine": HERE, "memory": {"limit_gib": 1.0}}
    outcomes(monkeypatch, none, none)
    assert {c.state for c in dissected(folder=tmp_path / "d", gib=1.0).cells} == {"does not fit"}
    assert outcomes(monkeypatch) == []
    assert {c.state for c in dissected(folder=tmp_path / "d", gib=1.0).cells} == {"does not fit"}
    jobs = outcomes(monkeypatch)
    assert {c.state for c in dissected(folder=tmp_path / "d", gib=2.0).cells} == {"measured"}
    assert len(jobs) == 2


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
    fits = {**ONE, "work": {**ONE["work"], "batch": 9}}
    jobs = outcomes(monkeypatch, 16, none, none, fits, ONE)
    first = dissected(over={"batch": ("largest",)}, rounds=2).cells[0]
    assert jobs == [("searched", "largest"), *(("measured", n) for n in (16, 12, 9)), ("measured", 9)]
    assert first.state == "measured"
    assert first.setting["batch"] == "largest"
    jobs = outcomes(monkeypatch, 0, none)
    first = dissected(over={"batch": ("largest",)}).cells[0]
    assert jobs == [("searched", "largest"), ("measured", 1)]
    assert first.state == "does not fit"
    outcomes(monkeypatch, LaunchError("Rank 0 was killed by SIGKILL, often for lack of memory.", 0, "killed"))
    assert dissected(over={"batch": ("largest",)}).cells[0].state == "does not fit"


def test_the_largest_batch_of_several_processes_is_tried_in_new_ones(monkeypatch):
    tried = []

    def launched(function, job, limit_s):
        if function is run.measured:
            return ONE
        tried.append(job.setting.batch)
        if job.setting.batch > 5:
            raise LaunchError("Rank 1 failed with MemoryError: can't allocate memory\ntraceback", 1, "failed")
        return True

    monkeypatch.setattr(run, "launched", launched)
    dissected(over={"batch": ("largest",), "gpus": (2,)})
    assert tried == [1, 2, 4, 8, 6, 5]


def test_a_combination_that_contradicts_itself_is_a_row(monkeypatch):
    outcomes(monkeypatch)
    found = dissected(over={"recompute": ("none", "full"), "offload_activations": (False, True)})
    assert found["all together"].state == "refused"
    assert "contradict each other" in found["all together"].why


def test_progress_tells_which_cell_and_how_long(monkeypatch, capsys):
    outcomes(monkeypatch)
    dissected()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "surokit: 2 measurements left: baseline"
    assert lines[1].startswith("surokit: 1 measurement left: recompute=full, about ")


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
    [{"what": "serve"}, {"steps": 0}, {"rounds": True}, {"limit_s": 0}, {"gib": -1}, {"device": "abacus"}],
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


def test_batches_with_more_than_ids_and_labels():
    ids = torch.ones(2, 4, dtype=torch.int64)
    with refused(ValueError):
        sk.dissect(CONFIG, {"input_ids": ids, "attention_mask": ids}, **OPTIONS)


def test_batches_are_one_stream_of_tokens():
    batches = [{"input_ids": torch.arange(6).view(2, 3) + 6 * i, "labels": torch.full((2, 3), -100)} for i in range(2)]
    tokens, rows, length = run.read_batch(iter(batches), 0)
    assert (rows, length) == (2, 3)
    assert tokens.ids is not None
    assert tokens.labels is not None
    assert tokens.ids.tolist() == list(range(12))
    assert set(tokens.labels.tolist()) == {-100}


def test_zero_is_compared_on_as_many_processes():
    for over, gpus in (({"zero": 2}, 2), ({"zero": (0, 3), "gpus": 4}, 4), ({"zero": (0, 2), "gpus": (2, 3)}, None)):
        counts = {asked.setting.gpus for asked in run.cells_of(over, "train")}
        assert counts == ({gpus} if gpus else {2, 3})
    assert {asked.setting.gpus for asked in run.cells_of({"gpus": 4}, "train")} == {1, 4}


@pytest.mark.parametrize("over", [{"gpus": 2}, {"engine": "deepspeed"}, {"engine": "trainer"}])
def test_a_gpu_with_a_number(over):
    with refused(ValueError):
        run.cells_of(over, "train", device=torch.device("cuda", 1))


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
