"""A race as a folder: read back it says the same, and it can be run again."""

from __future__ import annotations

import copy
import json
import runpy

import numpy as np
import pytest
import torch

import surokit as sk
from surokit.racing import UnequalWork
from tests.racing.conftest import batches
from tests.refusals import refused


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    race = sk.race(
        {"bf16": sk.BF16, "low fp8": sk.FP8.keep("*.q_proj")},
        model=model,
        data=batches(),
        eval=batches(1, seed=1),
        steps=16,
        turn_s=1e-6,
        optimizer=sk.AdamW(lr=3e-3),
        usd_per_gpu_hour=1.5,
        live=False,
        clip=2.0,
    )
    return race, race.save(tmp_path_factory.mktemp("race") / "saved")


def test_what_is_read_back_is_the_same(saved):
    race, folder = saved
    assert {path.name for path in folder.iterdir()} == {"race.json", "rerun.py", "bf16", "low-fp8", "bf16-again"}
    loaded = sk.Race.load(folder)
    assert repr(loaded) == repr(race)
    assert loaded.table().equals(race.table())
    assert loaded.environment == race.environment
    for x in ("time", "usd"):
        ours, theirs = race.plot(x).axes[0], loaded.plot(x).axes[0]
        for a, b in zip(ours.get_lines(), theirs.get_lines(), strict=True):
            assert np.array_equal(np.asarray(a.get_xydata()), np.asarray(b.get_xydata()), equal_nan=True)
    with refused(RuntimeError):
        loaded.go_on(minutes=1)
    assert sk.Race.load(loaded.save(folder.parent / "again")).table().equals(race.table())


def test_it_is_run_again(saved, model):
    race, folder = saved
    again = sk.Race.load(folder).rerun(model=model, data=batches(), eval=batches(1, seed=1), live=False)
    for name, run in race.runs.items():
        assert again.runs[name].steps["loss"].tolist() == run.steps["loss"].tolist()
        assert again.runs[name].batches == run.batches
    assert again.settings["session"] == {"clip": 2.0}
    assert [len(run.turns) for run in again.runs.values()] == [len(run.turns) for run in race.runs.values()]


def test_other_weights_or_data_are_refused(saved, model):
    loaded = sk.Race.load(saved[1])
    with refused(UnequalWork):
        loaded.rerun(model=model, data=batches(seed=4), eval=batches(1, seed=1), live=False)
    torch.manual_seed(9)
    other = sk.Decoder(model.config, dtype=torch.bfloat16)
    with refused(UnequalWork) as caught:
        loaded.rerun(model=other, data=batches(), live=False)
    assert "allow=('weights',)" in str(caught.value)
    again = loaded.rerun(model=other, data=batches(), live=False, allow=("weights",), steps=8)
    assert again.reason == "done"


def test_another_base_under_the_same_adapters_is_refused(make, model, tmp_path):
    loaded = sk.Race.load(make([sk.FP8.lora(rank=2)], steps=4).save(tmp_path))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.view(-1)[7] += 1
    with refused(UnequalWork):
        loaded.rerun(model=other, data=batches(), live=False)


def test_other_batches_are_told(make, model, tmp_path):
    class Unnamed:
        def __init__(self, found):
            self.found = found

        def __iter__(self):
            return iter(self.found)

    loaded = sk.Race.load(make(data=Unnamed(batches()), steps=8).save(tmp_path))
    same = loaded.rerun(model=model, data=Unnamed(batches()), live=False)
    assert not same.notes
    other = loaded.rerun(model=model, data=Unnamed(batches(seed=3)), live=False)
    assert "The batches of 'fp8' were not those of the saved race." in other.notes


def test_what_a_folder_cannot_hold_is_asked_for(make, session, model, tmp_path):
    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    race = make(steps=8, optimizer=sgd, schedule=lambda step: 1.0, meters=[lambda _: {}])
    loaded = sk.Race.load(race.save(tmp_path / "a"))
    with refused(ValueError):
        loaded.rerun(model=model, data=batches())
    with refused(ValueError):
        loaded.rerun(model=model, data=batches(), optimizer=sgd)
    with refused(ValueError):
        loaded.rerun(model=model, data=batches(), optimizer=sgd, schedule=None)
    again = loaded.rerun(model=model, data=batches(), optimizer=sgd, schedule=None, meters=(), live=False)
    assert again.runs["fp8"].steps["loss"].tolist() == race.runs["fp8"].steps["loss"].tolist()
    race = make({"a": session(), "b": session()}, steps=8)
    with refused(ValueError):
        sk.Race.load(race.save(tmp_path / "b")).rerun(model=model, data=batches())


def test_the_script(saved, monkeypatch, model, capsys):
    _, folder = saved
    text = (folder / "rerun.py").read_text(encoding="utf-8")
    assert "digest" in text
    text = text.replace("model = ...", "from __main__ import model").replace("data = ...", "from __main__ import data")
    text = text.replace("eval = ...", "from __main__ import held_out as eval")
    text = text.replace("data=data", "data=data, live=False, steps=8")
    (folder / "filled.py").write_text(text, encoding="utf-8")
    import __main__

    monkeypatch.setattr(__main__, "model", model, raising=False)
    monkeypatch.setattr(__main__, "data", batches(), raising=False)
    monkeypatch.setattr(__main__, "held_out", batches(1, seed=1), raising=False)
    runpy.run_path(str(folder / "filled.py"))
    assert capsys.readouterr().out.count("low fp8") >= 2, "both tables"
    (folder / "filled.py").unlink()


def test_a_run_dir_is_a_race_at_any_time(make, tmp_path):
    race = make(steps=12, run_dir=tmp_path / "race")
    with refused(ValueError):
        make(steps=8).save()
    loaded = sk.Race.load(tmp_path / "race")
    assert repr(loaded) == repr(race)
    lines = (tmp_path / "race" / "fp8" / "records.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 12, "each step once: the session's own records"
    race.go_on(steps=4)
    assert len(sk.Race.load(tmp_path / "race").runs["fp8"].steps) == 16
    second = make(steps=8, run_dir=tmp_path / "race")
    assert second.run_dir == tmp_path / "race-2"


def test_it_is_run_again_with_other_turns_or_for_a_time(saved, make, model, tmp_path):
    loaded = sk.Race.load(saved[1])
    given = {"model": model, "data": batches(), "eval": batches(1, seed=1), "live": False, "predict": False}
    again = loaded.rerun(**given, turn_steps=3)
    assert again.runs["bf16"].turns[0].steps == 2
    assert len(again.runs["bf16"].steps) == 16
    assert loaded.rerun(**given, minutes=0.0, turn_s=0.1, steps=8).settings["steps"] == 8
    by_time = loaded.rerun(**given, minutes=0.0, turn_steps=20)
    assert by_time.settings["steps"] is None
    assert len(by_time.runs["bf16"].steps) == 7 + 20, "a round is always run, whatever steps there were then"
    goal = make(steps=8, eval=batches(1, seed=1), until=0.001)
    assert goal.settings["turn_steps"] is not None
    assert sk.Race.load(goal.save(tmp_path)).rerun(**given, turn_s=1e-6).settings["turn_s"] == 1e-6


def test_a_race_of_sessions_keeps_all_of_their_steps(make, session, tmp_path):
    a = session(run_dir=tmp_path / "own")
    race = make({"a": a, "b": a.fork(recipe=sk.FP8)}, steps=8, turn_s=1e-6, run_dir=tmp_path / "race")
    race.go_on(steps=6)
    loaded = sk.Race.load(tmp_path / "race")
    for name, run in race.runs.items():
        assert loaded.runs[name].steps["loss"].tolist() == run.steps["loss"].tolist()
    assert repr(loaded) == repr(race)
    assert len((tmp_path / "own" / "records.jsonl").read_text(encoding="utf-8").splitlines()) == 14


def test_folders_that_hold_no_race(tmp_path, saved):
    with refused(FileNotFoundError):
        sk.Race.load(tmp_path)
    (tmp_path / "race.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="cannot be read as a race"):
        sk.Race.load(tmp_path)
    data = json.loads((saved[1] / "race.json").read_text(encoding="utf-8"))
    (tmp_path / "race.json").write_text(json.dumps({**data, "version": 99}), encoding="utf-8")
    with refused(ValueError):
        sk.Race.load(tmp_path)
