"""The race beside other libraries: the same maths in all of them, turns, what is resumed, left, missing and failed, the tables."""

import csv
import json
import subprocess
import sys
from dataclasses import asdict
from typing import ClassVar

import numpy as np
import pytest
import torch

import surokit as sk
from surokit.bench import baselines, peers, results_store
from surokit.bench.__main__ import main
from surokit.bench.configurations import TINY, BenchWork
from surokit.bench.corpus import corpus
from surokit.bench.process import Failed
from surokit.bench.turns import Call, OutOfTime
from surokit.dissection import loop
from surokit.racing.statistics import steps_to
from tests.refusals import refused

WORK = BenchWork(batch=2, length=32, accumulate=2, rank=4, alpha=8.0, lr=1e-2)


# -- systems


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("race")
    ids_ST, _ = corpus(TINY["vocab"], WORK.length, WORK.batch)
    for name, rows in {"tokens": ids_ST[:-4], "held_out": ids_ST[-4:]}.items():
        np.save(folder / f"{name}.npy", rows.astype(np.int32))
    files = {name: str(folder / f"{name}.npy") for name in ("tokens", "held_out")}
    work = {"model": TINY, "weights": str(folder / "weights"), "device": "cpu", "seed": 0, "recompute": "none"}
    work |= {"settings": "equal", **asdict(WORK), **files}
    baselines.write_weights(work)
    return work


@pytest.mark.parametrize("train", ["lora", "full"])
def test_transformers_and_ours_compute_the_same_from_the_same(files, train):
    pytest.importorskip("peft")
    work = {**files, "train": train}
    losses, held_out, trained = {}, {}, {}
    for name in ("transformers", "surokit bf16"):
        worker = baselines.Racing(name, work)
        answer = worker.answer({"steps": 5})
        assert answer["steps"] == 5
        assert answer["tokens"] == 5 * WORK.tokens
        assert answer["peak_mib"] > 100
        losses[name], held_out[name] = answer["losses"], worker.answer({"evaluate": True})["loss"]
        trained[name] = worker.first["trained"]
    assert trained["transformers"] == trained["surokit bf16"]
    theirs, ours = losses.values()
    assert theirs[-1] < theirs[0] - 0.1  # something was learned
    assert ours == pytest.approx(theirs, rel=0.005)
    assert held_out["surokit bf16"] == pytest.approx(held_out["transformers"], rel=0.005)


def test_all_systems_start_from_the_same_adapters(files):
    pytest.importorskip("peft")
    first = {}
    for name in ("transformers", "surokit qfp8"):
        model = baselines.Racing(name, {**files, "train": "lora"}).runner.model
        named = ((loop.PROJECTION.findall(n), p) for n, p in model.named_parameters() if "lora_A" in n)
        first[name] = {layer: p for (layer,), p in named}
        assert all((p == 0).all() for n, p in model.named_parameters() if "lora_B" in n)
    theirs, ours = first.values()
    assert theirs.keys() == ours.keys()
    assert len(theirs) == 7 * TINY["layers"]
    assert all(torch.equal(theirs[name].float(), ours[name].float()) for name in theirs)
    assert len({p.float().sum().item() for p in theirs.values()}) == len(theirs)


def test_a_work_without_weights_gets_those_of_its_seed(files, tmp_path):
    work = {name: value for name, value in files.items() if name != "weights"}
    drawn = baselines.with_weights(work, str(tmp_path))
    assert baselines.with_weights(files, str(tmp_path)) is files
    first, second = (sk.load(w["weights"], device="cpu").state_dict() for w in (files, drawn))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_cannot_run_here_says_why(files):
    work = {**files, "train": "lora"}
    assert baselines.missing(baselines.SYSTEMS["unsloth"], work) in ("unsloth is not installed", "it needs a GPU")
    pytest.importorskip("torchao")
    assert baselines.missing(baselines.SYSTEMS["torchao float8"], work) == "it has no lora training here"
    assert baselines.missing(baselines.SYSTEMS["surokit bf16"], work) is None
    only_cuda = baselines.System(baselines.SYSTEMS["surokit bf16"].build, "", cpu=False)
    assert baselines.missing(only_cuda, work) == "it needs a GPU"


def test_a_worker_that_cannot_start_answers_in_one_line():
    argv = [sys.executable, "-m", "surokit.bench.peers", "--worker", "nobody", "{}"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["missing"].startswith("there is no system 'nobody': known are surokit bf16,")


# -- the race, with workers that are no processes


class Fake:
    """Answers as a worker: twice as fast where the name has an "s" in front; some fail."""

    started: ClassVar[list[tuple[str, int, int]]] = []
    asked: ClassVar[list[str]] = []

    def __init__(self, name, work, timeout_s, broken=()):
        self.started.append((name, work["batch"], work["accumulate"]))
        if ("start", name) in broken or ("memory", name, work["batch"]) in broken:
            raise Failed("OutOfMemoryError: CUDA out of memory" if "start" not in broken[0] else "ImportError: no")
        self.name, self.work, self.step, self.broken = name, work, 0, broken
        self.ready = {"build_s": 1.0, "trained": 7, "note": f"{name} itself", "versions": {"x": "1"}}

    def ask(self, request, timeout_s):
        if "evaluate" in request:
            return {"loss": 3.0}
        self.asked.append(self.name)
        if ("turn", self.name) in self.broken and self.step > 2:
            raise Failed("it ended")
        count = request["steps"]
        made = count + request.get("before", 0)
        losses = [5.0 - 0.1 * (self.step + i) for i in range(made)]
        self.step += made
        tokens = count * self.work["batch"] * self.work["length"] * self.work["accumulate"]
        seconds = tokens / (200.0 if self.name.startswith("s") else 100.0)
        return {"seconds": seconds, "steps": count, "tokens": tokens, "losses": losses, "peak_mib": 50.0}

    def close(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


@pytest.fixture
def fake(monkeypatch):
    """Starts a race of fakes; broken: what goes wrong."""
    pytest.importorskip("peft")
    Fake.started, Fake.asked = [], []

    def race(tmp_path, systems=("transformers", "surokit bf16", "surokit fp8"), broken=(), **keywords):
        monkeypatch.setattr(results_store, "source", lambda: "the same")
        monkeypatch.setattr(results_store, "commit", lambda: None)
        monkeypatch.setattr(baselines, "worker", lambda name, work, timeout_s: Fake(name, work, timeout_s, broken))
        settings = {"settings": ("equal",), "rounds": 2, "steps": 2, **keywords}
        return peers.run(list(systems), rehearse=True, out=tmp_path / "peers.json", **settings)

    return race


def test_systems_take_turns_with_the_baseline(fake, tmp_path):
    data = fake(tmp_path)
    t, s = "transformers", "surokit bf16"
    assert Fake.asked[:8] == [t, t, s, s, t, s, t, s]  # two to warm up each, then turns
    entries = peers.shown(data)
    assert [e["system"] for e in entries] == [t, s, "surokit fp8"]
    assert [peers.ratios(e) for e in entries] == [[1.0] * 4, [2.0] * 2, [2.0] * 2]
    assert all(len(e["losses"]) == peers.WARM_UP + 2 * (peers.AGAIN + 2) for e in entries)
    assert all(peers.agrees(e, entries[0]) for e in entries)
    assert peers.matched(entries[1], entries[0]) == 2.0
    assert data["missing"].keys() == {"unsloth", "liger"}  # if not for want of a package, then of a GPU
    assert data["left"] == []


def test_the_table_the_turns_and_the_picture(fake, tmp_path):
    data = fake(tmp_path)
    text = peers.table(data)
    assert text.startswith("A rehearsal on a processor: its numbers mean nothing.\n\n| work |")
    assert "| tiny lora equal | transformers (baseline) | 2 x 32 x 2 | 100 (100 to 100) |  |" in text
    assert (
        "| tiny lora equal | surokit bf16 | 2 x 32 x 2 | 200 (200 to 200) | 2.00 (2.00 to 2.00) | 2.00 | 50 | 1.00 |"
        in text
    )
    assert "| 0.00%, 0.00% | 3.0000 | surokit bf16 itself, x 1 |" in text
    assert "unsloth took no part: " in text
    assert (tmp_path / "peers.md").read_text() == text + "\n"
    with (tmp_path / "peers.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 + 2 + 2
    assert {row["tokens_per_s"] for row in rows if row["system"] == "surokit fp8"} == {"200.0"}
    pytest.importorskip("matplotlib")
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")
    losses, apart = peers.figure(data).axes
    assert [line.get_label() for line in losses.lines] == ["transformers", "surokit bf16", "surokit fp8"]
    assert np.asarray(losses.lines[0].get_ydata()).tolist() == data["peers"]["tiny lora equal: transformers"]["losses"]
    assert len(apart.lines) == 2


def test_another_call_goes_on_and_repeats_nothing(fake, tmp_path):
    fake(tmp_path, systems=["surokit bf16"])
    assert [name for name, *_ in Fake.started] == ["transformers", "surokit bf16"]
    Fake.started.clear()
    data = fake(tmp_path, systems=["surokit bf16", "surokit fp8"])
    assert [name for name, *_ in Fake.started] == ["transformers", "surokit fp8"]
    assert [e["system"] for e in peers.shown(data)] == ["transformers", "surokit bf16", "surokit fp8"]
    Fake.started.clear()
    fake(tmp_path, systems=["surokit bf16", "surokit fp8"])
    assert Fake.started == []
    with refused(ValueError):
        fake(tmp_path, rounds=3)


def test_what_there_is_no_time_for_is_left_and_said(fake, tmp_path):
    data = fake(tmp_path, minutes=1e-9)
    assert Fake.started == []
    assert len(data["left"]) == 3
    assert "Not raced yet, the same command goes on: tiny lora equal: transformers," in peers.table(data)
    assert fake(tmp_path)["left"] == []


def test_where_the_time_ends_between_two_races_the_baseline_is_kept(fake, tmp_path, monkeypatch):
    tried = Call.tried

    def until_fp8(self, key, need_s, work):
        if key.endswith("fp8"):
            raise OutOfTime("no time")
        return tried(self, key, need_s, work)

    monkeypatch.setattr(Call, "tried", until_fp8)
    data = fake(tmp_path)
    assert [e["system"] for e in peers.shown(data)] == ["transformers", "surokit bf16"]
    assert data["left"] == ["tiny lora equal: surokit fp8"]


def test_at_its_best_a_system_takes_the_largest_micro_batch_that_fits(fake, tmp_path):
    data = fake(tmp_path, ["surokit bf16"], settings=("best",), broken=[("memory", "surokit bf16", 4)])
    assert Fake.started == [("transformers", 4, 1), ("surokit bf16", 4, 1), ("surokit bf16", 2, 2)]
    assert data["peers"]["tiny lora best: surokit bf16"]["batch"] == "2 x 32 x 2"
    assert peers.shapes({"batch": 2, "accumulate": 4, "settings": "best"}) == [(8, 1), (4, 2), (2, 4)]
    assert peers.shapes({"batch": 2, "accumulate": 4, "settings": "equal"}) == [(2, 4)]


def test_what_fails_is_told_and_the_others_go_on(fake, tmp_path):
    data = fake(tmp_path, broken=[("start", "surokit bf16")])
    assert [e["system"] for e in peers.shown(data)] == ["transformers", "surokit fp8"]
    assert "tiny lora equal: surokit bf16 failed: ImportError: no" in peers.table(data)
    Fake.started.clear()
    fake(tmp_path, broken=[("start", "surokit bf16")])
    assert Fake.started == []


def test_a_race_that_breaks_off_leaves_no_loss_of_more_steps(fake, tmp_path):
    """The baseline took a turn more than the others by then: its loss on held-out rows would be that of a longer training."""
    data = fake(tmp_path, broken=[("turn", "surokit bf16")])
    t, broken, last = (
        data["peers"][f"tiny lora equal: {name}"] for name in ("transformers", "surokit bf16", "surokit fp8")
    )
    assert broken["failed"] == "surokit bf16, both models being in memory: it ended"
    assert (t["held_out"], last["held_out"]) == (None, 3.0)
    assert len(t["losses"]) == len(last["losses"])
    (line,) = (line for line in peers.table(data).splitlines() if "(baseline)" in line)
    assert line.split(" | ")[-2] == ""


def test_a_baseline_that_ends_is_started_again_for_the_others(fake, tmp_path):
    data = fake(tmp_path, broken=[("turn", "transformers")])
    started = [name for name, *_ in Fake.started]
    assert started == ["transformers", "surokit bf16", "transformers", "surokit fp8", "transformers"]
    text = peers.table(data)
    assert "surokit bf16 failed: transformers, both models being in memory: it ended" in text
    assert peers.shown(data) == []
    assert "transformers failed: it ended" in text


# -- what follows from the raw result


def entry(
    system="surokit bf16", model="0.6b", rate=200.0, losses=None, trained=7, baseline="unsloth", settings="equal"
):
    return {
        **{"model": model, "train": "lora", "settings": settings, "system": system, "baseline": baseline},
        **{"tokens_per_s": [rate] * 3, "baseline_tokens_per_s": [100.0] * 3, "trained": trained},
        **{"losses": losses or [5.0 - 0.1 * i for i in range(12)], "held_out": 3.0},
        **{"peak_mib": 10.0, "first_step_s": 1.0, "warm_up_s": 2.0, "batch": "2 x 2 x 2", "note": "", "versions": {}},
    }


def raw(*entries):
    found = {peers._group(e).key(e["system"]): e for e in entries}
    return {"benchmark": "peers", "rehearsal": False, "settings": {}, "environment": {"device": "H200"}, "peers": found}


def test_speed_is_matched_by_the_steps_to_a_loss():
    baseline = entry("unsloth", rate=100.0)
    slower = entry(losses=[5.0 - 0.05 * i for i in range(12)])
    # it needs all 12 steps to what the baseline has after 8, by means of four
    assert steps_to(baseline["losses"], np.mean(slower["losses"][-4:]), peers.SMOOTHED) == 8
    assert peers.matched(slower, baseline) == pytest.approx(2.0 * 8 / 12)
    assert peers.matched(entry(losses=[5.0, None] * 6), baseline) is None


def test_another_loss_is_no_speed():
    baseline = entry("unsloth", rate=100.0)
    assert "does not compute" not in peers.table(raw(baseline, entry()))
    off = [5.0, *(4.7 - 0.1 * i for i in range(1, 12))]
    text = peers.table(raw(baseline, entry(losses=off, trained=8)))
    assert "0.6b lora equal: surokit bf16 does not compute what unsloth does" in text
    assert "surokit bf16 trains 8 numbers, unsloth 7." in text
    assert not peers.agrees(entry(losses=[float("nan")] * 12), baseline)
    near = [loss * 1.015 for loss in baseline["losses"]]
    assert not peers.agrees(entry(losses=near), baseline)
    assert peers.agrees(entry("surokit fp8", losses=near), baseline)


def test_the_bar_is_the_mean_over_models_at_equal_settings():
    data = raw(
        *(entry("unsloth", model, 100.0) for model in ("0.6b", "8b")),
        *(entry("surokit bf16", model, rate) for model, rate in (("0.6b", 250.0), ("8b", 110.0))),
        entry("surokit bf16", "0.6b", 900.0, settings="best"),
        entry("surokit qfp8", "0.6b", 150.0),
        entry("surokit fp8", "0.6b", 900.0, losses=[9.0] * 12),
        entry("transformers", "0.6b", 60.0),
    )
    found = peers.over_unsloth(data)
    assert {recipe: models for recipe, (_, models) in found.items()} == {"bf16": 2, "qfp8": 1}
    assert [mean for mean, _ in found.values()] == pytest.approx([1.8, 1.5])
    assert "surokit bf16: 1.80 x Unsloth at equal settings, mean of 2 models; the bar is 1.4." in peers.table(data)


def test_bad_input_is_one_sentence():
    with refused(ValueError):
        peers.run(["nonsense"])
    with refused(ValueError):
        peers.run(models=["70b"])
    with refused(ValueError):
        peers.run(minutes=0)
    if not torch.cuda.is_available():
        with refused(RuntimeError):
            peers.run()


def test_what_would_be_raced_is_listed(monkeypatch, capsys):
    monkeypatch.setattr(peers, "_has_cuda", lambda: True)
    monkeypatch.setattr(baselines, "installed", lambda package: package not in ("unsloth", "torchao"))
    monkeypatch.setattr(baselines, "version", lambda package: "1.2")
    assert main(["peers", "--list", "--models", "0.6b", "8b", "--settings", "equal"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[:7]] == list(baselines.SYSTEMS)
    unsloth = next(line for line in lines if line.startswith("unsloth "))
    assert "no: unsloth is not installed" in unsloth
    assert "bitsandbytes 1.2" in unsloth
    assert lines[7] == "To install what is missing: pip install 'torchao==0.18.0' 'unsloth==2026.10.9' 'torch==1.2'"
    assert lines[8] == "8 races against liger, about 22 minutes on an H200 by an estimate"
    monkeypatch.setattr(baselines, "installed", lambda package: False)
    assert "Nothing can be raced: one of unsloth, liger, transformers has to be there." in peers.listing()
    assert {p for s in baselines.SYSTEMS.values() for p in s.packages} == set(baselines.WRITTEN_FOR)


# -- all of it


def test_a_rehearsal_in_processes(tmp_path):
    pytest.importorskip("peft")
    out = tmp_path / "peers.json"
    data = peers.run(["surokit bf16"], settings=("equal",), rounds=2, steps=1, rehearse=True, out=out)
    assert json.loads(out.read_text())["peers"] == data["peers"]
    baseline, ours = peers.shown(data)
    assert peers.agrees(ours, baseline)
    assert ours["held_out"] == pytest.approx(baseline["held_out"], rel=0.005)
    assert len(ours["losses"]) == peers.WARM_UP + 2 * (peers.AGAIN + 1)
    assert 0 < ours["first_step_s"] < ours["warm_up_s"]
    assert "does not compute" not in peers.table(data)
