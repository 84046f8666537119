"""Checkpoints: continuing bit for bit, surviving kills and full disks, refusing what does not belong."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

import surokit as sk
from surokit.applied import fusion_of
from surokit.data import Tokenizer
from surokit.runs.status import read_status
from surokit.train import AdamW, CheckpointError, Cosine, ResumeError, Session, checkpointing
from surokit.train import checkpoint_files as checkpoints
from surokit.train.exporting import export
from tests.refusals import refused, warned
from tests.train.test_session import Trap
from tests.train.test_stream import SOURCES, Loader
from tests.train.toys import VOCAB, Toy, assert_same_state, make_batches, make_session, weights

ROOT = Path(__file__).parents[2]


class TestContinuing:
    @pytest.mark.parametrize("accumulate", [1, 2, 3])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bfloat16, float32 moments"])
    def test_ten_steps_are_five_and_five(self, accumulate: int, dtype: str, tmp_path: Path) -> None:
        def fresh(**options: Any) -> Session:
            model = Toy(seed=1).to(getattr(torch, dtype.split(",")[0]))
            optimizer = AdamW(lr=1e-2, state_dtype=torch.float32 if "," in dtype else None)
            return make_session(model, accumulate=accumulate, optimizer=optimizer, **options)

        whole, half = fresh(), fresh(run_dir=tmp_path / "run")
        whole.run(10)
        half.run(5)
        half.save()
        torch.manual_seed(12345)
        again = Session.resume(
            tmp_path / "run", Toy(seed=2).to(next(whole.model.parameters()).dtype), data=make_batches()
        )
        assert again.steps == 5
        again.run(5)
        assert_same_state(whole, again)
        np.testing.assert_array_equal(again.records.column("loss"), whole.records.column("loss"))
        np.testing.assert_array_equal(again.records.column("grad_norm"), whole.records.column("grad_norm"))
        np.testing.assert_array_equal(again.records.column("lr"), whole.records.column("lr"))
        assert again.records.column("step").tolist() == list(range(1, 11))

    @pytest.mark.parametrize("name", SOURCES)
    @pytest.mark.parametrize("steps", [3, 7, 9])
    def test_every_kind_of_data(self, name: str, steps: int, tmp_path: Path) -> None:
        def fresh(**options: Any) -> Session:
            model = Toy(dropout=0.3)
            model.embed = nn.Embedding(64, 16, _weight=torch.linspace(-1, 1, 1024).reshape(64, 16))
            model.lm_head = nn.Linear(16, 64, bias=False)
            nn.init.constant_(model.lm_head.weight, 0.1)
            return make_session(model, SOURCES[name](), **options)

        whole, half = fresh(), fresh(run_dir=tmp_path / "run")
        whole.run(steps + 6)
        half.run(steps)
        half.save()
        again = Session.resume(tmp_path / "run", fresh().model, data=SOURCES[name]())
        again.run(6)
        assert_same_state(whole, again)

    @pytest.mark.parametrize("name", SOURCES)
    def test_after_a_failed_step_that_began_an_epoch(self, name: str, tmp_path: Path) -> None:
        def boom() -> None:
            raise RuntimeError("out of something")

        def fresh(**options: Any) -> Session:
            torch.manual_seed(7)
            model = Trap(options.pop("at", 0), boom)
            model.embed, model.lm_head = nn.Embedding(64, 16), nn.Linear(16, 64, bias=False)
            return make_session(model, SOURCES[name](), **options)

        whole, half = fresh(), fresh(at=8, run_dir=tmp_path / "run")
        with refused(RuntimeError):
            half.run(9)  # the eighth batch is the first of the second epoch
        half.save()
        twin, again = half.fork(), Session.resume(tmp_path / "run", fresh().model, data=SOURCES[name]())
        for session, steps in ((whole, 13), (twin, 6), (again, 6), (half, 6)):
            session.run(steps)
            assert_same_state(whole, session)

    @pytest.mark.parametrize("recipe", ["fp8", "fp8-rowwise", "quartet-ii"])
    def test_with_a_recipe(self, recipe: str, tmp_path: Path) -> None:
        whole, half = make_session(recipe=recipe), make_session(recipe=recipe, run_dir=tmp_path / "run")
        whole.run(8)
        half.run(4)
        half.save()
        again = Session.resume(tmp_path / "run", Toy(seed=3), data=make_batches())
        assert again.recipe == sk.recipes[recipe]
        again.run(4)
        assert_same_state(whole, again)
        ours, theirs = sk.convert.scaling_state(whole.model), sk.convert.scaling_state(again.model)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)

    def test_with_a_fusion(self, tmp_path: Path) -> None:
        def fresh(seed: int) -> sk.Decoder:
            torch.manual_seed(seed)
            config = sk.DecoderConfig(layers=2, width=32, heads=4, kv_heads=2, vocab=64, ffn=48)
            return sk.Decoder(config, dtype=torch.bfloat16)

        fusion = sk.Fusion(recompute="selective")
        models = fresh(0), fresh(0)
        for model in models:
            sk.fuse(model, fusion)
        whole, half = make_session(models[0]), make_session(models[1], run_dir=tmp_path / "run")
        whole.run(6)
        half.run(3)
        half.save()
        for given in (None, fresh(1)):
            again = Session.resume(tmp_path / "run", given, data=make_batches())
            assert fusion_of(again.model) == fusion
            again.run(3)
            assert_same_state(whole, again)

    def test_in_the_constructor(self, tmp_path: Path) -> None:
        whole, half = make_session(), make_session(run_dir=tmp_path / "run")
        whole.run(8)
        half.run(5)
        half.save()
        half.run(2)  # lost: it was not saved
        again = make_session(Toy(seed=2), run_dir=tmp_path / "run", exist="resume")
        assert again.run_dir == tmp_path / "run"
        again.run(3)
        assert_same_state(whole, again)
        assert again.records.frame()["step"].tolist() == list(range(1, 9))

    def test_resume_where_there_is_nothing_starts(self, tmp_path: Path) -> None:
        assert make_session(run_dir=tmp_path / "run", exist="resume").steps == 0

    def test_after_a_failed_step(self, tmp_path: Path) -> None:
        def boom() -> None:
            raise RuntimeError("out of something")

        session, whole = make_session(Trap(4, boom), run_dir=tmp_path / "run"), make_session()
        with refused(RuntimeError):
            session.run(8)
        session.save()
        again = Session.resume(tmp_path / "run", Toy(seed=2), data=make_batches())
        again.run(5)
        whole.run(8)
        assert_same_state(whole, again)

    def test_of_an_earlier_checkpoint_and_a_new_branch(self, tmp_path: Path) -> None:
        session = make_session(run_dir=tmp_path / "run", save_every=2, keep=3)
        session.run(6)
        again = Session.resume(tmp_path / "run" / "checkpoints" / "step-000002", Toy(), data=make_batches())
        again.run(1)
        again.save()
        assert checkpoints.find(tmp_path / "run").step == 3, "the newest is the one written last"

    def test_evaluations_and_times_come_back(self, tmp_path: Path) -> None:
        session = make_session(run_dir=tmp_path / "run", eval=make_batches(1, seed=4), eval_every=2)
        session.run(4)
        session.save()
        again = Session.resume(tmp_path / "run", Toy(), data=make_batches(), eval=make_batches(1, seed=4))
        assert again.evaluations == session.evaluations
        assert (again.tokens, again.elapsed_s, again.eval_every) == (session.tokens, session.elapsed_s, 2)
        np.testing.assert_array_equal(again.records.column("eval_loss"), session.records.column("eval_loss"))

    def test_an_optimizer_and_a_schedule_of_the_users(self, tmp_path: Path) -> None:
        def sgd(params: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD(params, lr=0.1, momentum=0.9)

        def halving(step: int) -> float:
            return 0.5**step

        whole = make_session(optimizer=sgd, schedule=halving)
        half = make_session(optimizer=sgd, schedule=halving, run_dir=tmp_path / "run")
        whole.run(6)
        half.run(3)
        half.save()
        with refused(ResumeError):
            Session.resume(tmp_path / "run", Toy(), data=make_batches())
        with refused(ResumeError):
            Session.resume(tmp_path / "run", Toy(), data=make_batches(), optimizer=sgd)
        again = Session.resume(tmp_path / "run", Toy(), data=make_batches(), optimizer=sgd, schedule=halving)
        again.run(3)
        assert_same_state(whole, again)

    @pytest.mark.parametrize("kind", [sk.AdamW, sk.ZenFlow])
    def test_options_that_are_numpys_numbers(self, kind: Any, tmp_path: Path) -> None:
        """They are written as Python's: torch reads no others from a file."""
        cosine = Cosine(warmup=np.int64(2), steps=np.int64(20), floor=np.float32(0.5))  # type: ignore[arg-type]
        options: dict[str, Any] = {"lr": np.float32(1e-2), "betas": (np.float64(0.9), 0.95)}
        if kind is sk.ZenFlow:
            options |= {"update_interval": np.int64(2), "topk_ratio": np.float64(0.25), "select_interval": 2}

        def scale(step: int) -> float:
            return np.cos(step / 20)

        cases: list[tuple[str, Any, dict[str, Any]]] = [("a", cosine, {}), ("b", scale, {"schedule": scale})]
        for name, schedule, given in cases:
            whole, half = (
                make_session(optimizer=kind(**options), schedule=schedule, run_dir=run_dir)
                for run_dir in (None, tmp_path / name)
            )
            whole.run(6)
            half.run(3)
            half.save()
            again = Session.resume(tmp_path / name, Toy(), data=make_batches(), **given)
            assert again.spec == half.spec
            again.run(3)
            assert_same_state(whole, again)


class Tied(Toy):
    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.lm_head.weight = self.embed.weight


class TestContent:
    def test_tied_weights_are_written_once(self, tmp_path: Path) -> None:
        session = make_session(Tied(), run_dir=tmp_path / "run")
        session.run(2)
        path = session.save()
        assert "lm_head.weight" not in load_file(path / "model.safetensors")
        again = Session.resume(path, Tied(seed=5), data=make_batches())
        session.run(2)
        again.run(2)
        assert_same_state(session, again)

    def test_views_of_one_tensor(self, tmp_path: Path) -> None:
        class Views(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                both = torch.arange(8.0)
                self.register_buffer("low", both[:4])
                self.register_buffer("high", both[4:])
                self.register_buffer("middle", both[2:6])
                self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())

        tensors, tied = checkpoints.distinct_tensors(Views())
        assert not tied
        assert tensors["high"].tolist() == [4, 5, 6, 7]
        assert tensors["middle"].tolist() == [2, 3, 4, 5]
        assert len({t.untyped_storage().data_ptr() for t in tensors.values()}) == 3  # low and high go as they lie
        assert all(t.is_contiguous() for t in tensors.values())
        save_file(tensors, tmp_path / "views.safetensors")
        assert load_file(tmp_path / "views.safetensors")["high"].tolist() == [4, 5, 6, 7]

    def test_what_stands_in_it(self, tmp_path: Path) -> None:
        session = make_session(run_dir=tmp_path / "run", recipe="fp8-rowwise")
        session.run(3)
        path = session.save()
        assert path == tmp_path / "run" / "checkpoints" / "step-000003"
        meta = json.loads((path / "session.json").read_text())
        assert meta["step"] == 3
        assert sk.Recipe.from_dict(meta["recipe"]) == sk.FP8_ROWWISE
        assert meta["data"] == session.data.fingerprint
        assert meta["environment"]["torch"] == torch.__version__
        assert meta["optimizer"] == {"name": "AdamW", "options": {"lr": 0.01}}
        assert meta["schedule"] == {"name": "Cosine", "warmup": 2, "steps": 20, "floor": 0.1}
        torch.load(path / "state.pt", weights_only=True)  # plain data: nothing is executed

    def test_something_that_is_no_tensor(self, tmp_path: Path) -> None:
        class Extra(Toy):
            def get_extra_state(self) -> Any:
                return {"python": object()}

            def set_extra_state(self, state: Any) -> None: ...

        session = make_session(Extra(), run_dir=tmp_path / "run")
        with refused(CheckpointError):
            session.save()


class TestKeeping:
    def test_retention(self, tmp_path: Path) -> None:
        session = make_session(run_dir=tmp_path / "run", save_every=2, keep=2)
        session.run(9)
        names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
        assert names == ["step-000008", "step-000009"], "every second step, and where the run ended"

    def test_all(self, tmp_path: Path) -> None:
        session = make_session(run_dir=tmp_path / "run", save_every=1, keep=None)
        session.run(4)
        assert len(checkpoints.complete(tmp_path / "run" / "checkpoints")) == 4

    def test_the_same_step_again(self, tmp_path: Path) -> None:
        session = make_session(run_dir=tmp_path / "run")
        session.run(1)
        session.save()
        with torch.no_grad():
            session.model.get_parameter("hidden.bias").fill_(3.0)
        path = session.save()
        assert [p.name for p in path.parent.iterdir()] == ["step-000001"]
        assert load_file(path / "model.safetensors")["hidden.bias"].eq(3.0).all()

    def test_a_kill_between_the_two_renames(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        session = make_session(run_dir=tmp_path / "run")
        session.run(1)
        path = session.save()
        path.rename(path.with_name(path.name + ".old"))
        found = checkpoints.find(tmp_path / "run")
        assert found.path.name == "step-000001.old"
        Session.resume(tmp_path / "run", Toy(), data=make_batches())
        session.run(1)
        session.save()
        assert checkpoints.find(tmp_path / "run").step == 2

    @pytest.mark.parametrize("file", ["model.safetensors", "state.pt", "session.json"])
    @pytest.mark.parametrize("damage", ["missing", "short"])
    def test_incomplete_ones_are_passed_over(self, file: str, damage: str, tmp_path: Path) -> None:
        session = make_session(run_dir=tmp_path / "run", save_every=1, keep=None)
        session.run(3)
        broken = tmp_path / "run" / "checkpoints" / "step-000003" / file
        if damage == "missing":
            broken.unlink()
        else:
            broken.write_bytes(broken.read_bytes()[:-7])
        said = rf"step-000003 \({file} (is missing|has .* bytes|cannot be read)\) is damaged. step-000002 was taken .*: 1 step of"
        with pytest.warns(UserWarning, match=said):
            again = Session.resume(tmp_path / "run", Toy(), data=make_batches())
        assert again.steps == 2
        assert [e["step"] for e in again.journal.events if e["kind"] == "note" and re.search(said, e["text"])] == [2]
        with pytest.raises(CheckpointError, match=f"incomplete .*{file}"):
            Session.resume(broken.parent, Toy(), data=make_batches())
        again.run(1)
        status = read_status(tmp_path / "run")
        assert status is not None
        assert any(re.search(said, event["text"]) for event in status.events)

    def test_steps_that_a_damaged_one_costs_are_counted(self, tmp_path: Path) -> None:
        session = make_session(run_dir=tmp_path / "run", save_every=2, keep=None)
        session.run(6)
        for step in (4, 6):
            (tmp_path / "run" / "checkpoints" / f"step-00000{step}" / "state.pt").unlink()
        with warned(UserWarning):
            again = make_session(run_dir=tmp_path / "run", exist="resume", save_every=2)
        assert again.steps == 2
        again.run(4)
        assert checkpoints.latest(tmp_path / "run" / "checkpoints") == checkpoints.find(tmp_path / "run")
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the run has written them anew
            assert Session.resume(tmp_path / "run", Toy(), data=make_batches()).steps == 6

    def test_where_all_are_damaged(self, tmp_path: Path) -> None:
        session = make_session(run_dir=tmp_path / "run", save_every=2)
        session.run(2)
        (tmp_path / "run" / "checkpoints" / "step-000002" / "state.pt").unlink()
        with refused(FileNotFoundError):
            Session.resume(tmp_path / "run", Toy(), data=make_batches())
        (tmp_path / "run" / "train.py").write_text("not of the run")
        for n in (1, 2):
            with warned(UserWarning):
                again = make_session(run_dir=tmp_path / "run", exist="resume", save_every=2)
            assert again.steps == 0
            assert "begins anew" in again.journal.events[-1]["text"]
            assert (tmp_path / "run" / f"damaged-{n}" / "checkpoints" / "step-000002").is_dir()
            again.run(3)
            assert len((tmp_path / "run" / "records.jsonl").read_text().splitlines()) == 3
            for step in (2, 3):
                (tmp_path / "run" / "checkpoints" / f"step-00000{step}" / "state.pt").unlink()
        assert (tmp_path / "run" / "train.py").exists()

    def test_the_panel_is_told_what_was_said_before_it_opened(self, tmp_path: Path) -> None:
        session = make_session()
        session.note("before")
        session.live(view="text")
        session.run(1)
        assert session._panel is not None
        assert [e.text for e in session._panel.state.events] == ["before"]

    def test_damage_of_the_same_size_is_an_error(self, tmp_path: Path) -> None:
        session = make_session(run_dir=tmp_path / "run")
        session.run(1)
        path = session.save()
        for file in ("model.safetensors", "state.pt"):
            whole = (path / file).read_bytes()
            (path / file).write_bytes(b"\xff" * len(whole))
            with pytest.raises(CheckpointError, match=file):
                Session.resume(path, Toy(), data=make_batches())
            (path / file).write_bytes(whole)

    def test_kill_9(self) -> None:
        """Children that save without a pause are killed at 25 random moments; the last good checkpoint is always whole."""
        done = subprocess.run(
            [sys.executable, "-m", "tests.train.killed"], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert "25 kills" in done.stdout


class TestFullDisk:
    @pytest.mark.parametrize("where", ["mkdir", "weights", "state", "meta", "sync", "rename"])
    @pytest.mark.parametrize("first", [True, False])
    def test_nothing_is_lost(self, where: str, first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        session, whole = make_session(run_dir=tmp_path / "run"), make_session()
        session.run(2)
        if not first:
            session.save()
        session.run(1)

        def full(*args: Any, **kwargs: Any) -> Any:
            raise OSError(28, "No space left on device")

        holder: Any
        holder, name = {
            "mkdir": (Path, "mkdir"),
            "weights": (checkpoints, "save_file"),
            "state": (torch, "save"),
            "meta": (checkpoints, "_write_json"),
            "sync": (checkpoints.os, "fsync"),  # type: ignore[attr-defined]
            "rename": (Path, "rename"),
        }[where]
        with monkeypatch.context() as patch:
            patch.setattr(holder, name, full)
            kept = "there is no earlier checkpoint" if first else "last good checkpoint is .*step-000002"
            with pytest.raises(CheckpointError, match=f"No space left on device.*{kept}"):
                session.save()
        folder = tmp_path / "run" / "checkpoints"
        assert [p.name for p in folder.glob("*")] == ([] if first else ["step-000002"])
        if not first:
            assert Session.resume(tmp_path / "run", Toy(), data=make_batches()).steps == 2
        session.run(2)
        whole.run(5)
        assert_same_state(session, whole)
        assert session.save().name == "step-000005"

    def test_what_the_writers_make_of_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """safetensors and torch wrap the system's error in their own."""
        session = make_session(run_dir=tmp_path / "run")
        session.run(1)

        def full(*args: Any, **kwargs: Any) -> Any:
            raise SafetensorError("I/O error: No space left on device (os error 28)")

        monkeypatch.setattr(checkpoints, "save_file", full)
        with refused(CheckpointError):
            session.save()

    def test_a_run_that_saves_says_so_and_can_go_on(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        session = make_session(run_dir=tmp_path / "run", save_every=2)

        def full(*args: Any, **kwargs: Any) -> Any:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(torch, "save", full)
            with pytest.raises(CheckpointError):
                session.run(4)
        assert session.steps == 2
        session.run(2)
        whole = make_session()
        whole.run(4)
        assert_same_state(session, whole)


class TestRefusing:
    @pytest.fixture
    def run_dir(self, tmp_path: Path) -> Path:
        session = make_session(run_dir=tmp_path / "run", recipe="fp8-rowwise")
        session.run(2)
        session.save()
        return tmp_path / "run"

    def test_another_recipe(self, run_dir: Path) -> None:
        with refused(ResumeError):
            Session.resume(run_dir, Toy(), data=make_batches(), recipe="fp8")
        model = Toy()
        sk.apply(model, "fp8-current")
        with refused(ResumeError):
            Session.resume(run_dir, model, data=make_batches())
        with refused(ResumeError):
            make_session(run_dir=run_dir, exist="resume")
        assert Session.resume(run_dir, Toy(), data=make_batches(), recipe=sk.FP8_ROWWISE).steps == 2

    @pytest.mark.parametrize("keep", [True, False])
    def test_whether_decoded_weights_are_kept_is_no_other_recipe(self, keep: bool, tmp_path: Path) -> None:
        recipe = sk.QFP8.lora(rank=4, targets=("hidden",))
        session = make_session(run_dir=tmp_path / "run", recipe=recipe)
        session.run(2)
        session.save()
        again = Session.resume(tmp_path / "run", Toy(), data=make_batches(), recipe=recipe.decode_once(keep))
        assert again.recipe == recipe.decode_once(keep)
        converted = Toy()
        sk.apply(converted, recipe)  # as a model is that is rebuilt
        other = Session.resume(tmp_path / "run", converted, data=make_batches(), recipe=recipe.decode_once(keep))
        assert other.recipe == recipe.decode_once(keep)
        session.run(4)
        again.run(4)
        assert_same_state(session, again)

    def test_other_data(self, run_dir: Path) -> None:
        with refused(ResumeError):
            Session.resume(run_dir, Toy(), data=make_batches(seed=1))
        with refused(ResumeError):
            Session.resume(run_dir, Toy(), data=Loader(make_batches()))

    def test_another_shape(self, run_dir: Path) -> None:
        class Other(Toy):
            def __init__(self) -> None:
                super().__init__(width=24)
                self.more = nn.Linear(2, 2).requires_grad_(False)
                del self.norm
                self.norm = nn.LayerNorm(24, elementwise_affine=False)

        model = Other()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with refused(ResumeError):
            Session.resume(run_dir, model, data=make_batches())
        with refused(ResumeError):
            Session.resume(run_dir, Toy(width=24), data=make_batches())
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    def test_missing_and_left_over_tensors_are_all_named(self, run_dir: Path) -> None:
        model = Toy()
        model.register_buffer("first", torch.zeros(1))
        model.register_buffer("second", torch.zeros(1))
        with refused(ResumeError):
            Session.resume(run_dir, model, data=make_batches())

    def test_another_dtype(self, run_dir: Path) -> None:
        with refused(ResumeError):
            Session.resume(run_dir, Toy().bfloat16(), data=make_batches())

    def test_another_optimizer(self, run_dir: Path) -> None:
        with pytest.raises(ResumeError, match="optimizer"):
            Session.resume(
                run_dir, Toy(), data=make_batches(), optimizer=lambda params: torch.optim.AdamW(list(params), lr=0.1)
            )

    def test_a_model_that_only_the_user_can_make(self, run_dir: Path) -> None:
        with refused(ResumeError):
            Session.resume(run_dir, data=make_batches())

    def test_nothing_there(self, tmp_path: Path) -> None:
        with refused(FileNotFoundError):
            Session.resume(tmp_path / "nowhere", Toy(), data=make_batches())
        make_session(run_dir=tmp_path / "run")
        with refused(FileNotFoundError):
            Session.resume(tmp_path / "run", Toy(), data=make_batches())
        with refused(ValueError):
            make_session().save()


class TestRunDirectory:
    def test_new_takes_the_next_free_name(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        names, said = [], []
        for _ in range(3):
            session = make_session(run_dir=tmp_path / "run")
            said.append(capsys.readouterr().err)
            session.run(1)
            assert session.run_dir is not None
            names.append(session.run_dir.name)
        assert names == ["run", "run-2", "run-3"]
        text = "surokit: {0}/run has content already, so this run is in {0}/run-{1}\n"
        assert said == ["", text.format(tmp_path, 2), text.format(tmp_path, 3)]

    def test_error(self, tmp_path: Path) -> None:
        make_session(run_dir=tmp_path / "run", exist="error").run(1)
        with refused(FileExistsError):
            make_session(run_dir=tmp_path / "run", exist="error")

    def test_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "run").write_text("")
        with refused(FileExistsError):
            make_session(run_dir=tmp_path / "run")

    def test_none_writes_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        make_session().run(2)
        assert list(tmp_path.iterdir()) == []

    def test_it_can_be_moved(self, tmp_path: Path) -> None:
        session = make_session(run_dir=tmp_path / "run")
        session.run(2)
        session.save()
        shutil.move(tmp_path / "run", tmp_path / "elsewhere")
        assert Session.resume(tmp_path / "elsewhere", Toy(), data=make_batches()).run_dir == tmp_path / "elsewhere"


class TestDecoder:
    """Our own model: rebuilt from the checkpoint alone, adapters and stored weights included."""

    def make(self) -> nn.Module:
        config = sk.DecoderConfig(layers=2, width=32, heads=4, kv_heads=2, vocab=VOCAB, ffn=48, max_length=64)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return sk.Decoder(config).bfloat16()

    @pytest.mark.parametrize(
        "recipe", [None, sk.FP8, sk.QFP8.lora(rank=4), sk.BF16.lora(rank=4, targets=("q_proj", "v_proj"))], ids=str
    )
    def test_ten_steps_are_five_and_five(self, recipe: Any, tmp_path: Path) -> None:
        def fresh(**options: Any) -> Session:
            torch.manual_seed(4)  # adapters are drawn when the recipe is applied
            return make_session(self.make(), recipe=recipe, accumulate=2, schedule=Cosine(2, 10), **options)

        whole, half = fresh(), fresh(run_dir=tmp_path / "run")
        whole.run(10)
        half.run(5)
        half.save()
        again = Session.resume(tmp_path / "run", data=make_batches())
        assert [p.requires_grad for p in again.model.parameters()] == [
            p.requires_grad for p in whole.model.parameters()
        ]
        again.run(5)
        assert_same_state(whole, again)
        np.testing.assert_array_equal(again.records.column("loss"), whole.records.column("loss"))

    @pytest.mark.parametrize(
        "odd",
        [
            {"experts": 4, "expert_ffn": 16},
            {"experts": 4, "dense_layers": (0,)},
            {"sliding_window": 8, "window_layers": (1,), "eos_id": (1, 2), "mlp_bias": True},
            {"qkv_bias": True, "head_dim": 16},
        ],
        ids=lambda odd: "-".join(odd),
    )
    def test_a_shape_that_hugging_face_has_no_word_for(self, odd: dict[str, Any], tmp_path: Path) -> None:
        config = sk.DecoderConfig(layers=2, width=32, heads=4, kv_heads=2, vocab=VOCAB, ffn=48, **odd)
        with pytest.raises(CheckpointError):
            config.to_hf()
        session = make_session(sk.Decoder(config), run_dir=tmp_path / "run")
        session.run(2)
        assert not (session.save() / "config.json").exists()
        again = Session.resume(tmp_path / "run", data=make_batches())
        assert again.model.config == config
        assert hash(again.model.config) == hash(config)
        for run in (session, again):
            run.run(2)
        assert_same_state(session, again)

    def test_in_float64(self, tmp_path: Path) -> None:
        session = make_session(self.make().double(), run_dir=tmp_path / "run")
        session.run(2)
        session.save()
        again = Session.resume(tmp_path / "run", data=make_batches())
        assert next(again.model.parameters()).dtype == torch.float64
        assert_same_state(session, again)
        exported = load_file(export(tmp_path / "run", tmp_path / "exported") / "model.safetensors")
        assert all(torch.equal(exported[name], p) for name, p in again.model.named_parameters())

    def test_a_checkpoint_of_before_has_the_shape_in_config_json_alone(self, tmp_path: Path) -> None:
        session = make_session(self.make(), run_dir=tmp_path / "run")
        session.run(1)
        meta = session.save() / "session.json"
        meta.write_text(
            json.dumps({name: of for name, of in json.loads(meta.read_text()).items() if name != "decoder"})
        )
        again = Session.resume(tmp_path / "run", data=make_batches())
        assert_same_state(session, again)

    @pytest.mark.parametrize(
        "own",
        [sk.BF16.lora(rank=4), sk.BF16.lora(rank=2, targets=("v_proj",)), sk.QFP8, sk.FP8_CURRENT, None],
        ids=["another alpha", "other layers", "quantized", "freezes nothing", "no recipe"],
    )
    def test_an_adapter_that_was_loaded(self, own: sk.Recipe | None, tmp_path: Path) -> None:
        """Its rank, its alpha and its layers are not those of the recipe."""
        source = self.make()
        sk.apply(source, sk.BF16.lora(rank=4, alpha=8, targets=("q_proj", "down_proj")))
        sk.save_adapter(source, tmp_path / "adapter")

        def fresh() -> nn.Module:
            model = self.make()
            if own is not None:
                sk.apply(model, own)
            sk.load_adapter(model, tmp_path / "adapter")
            return model

        session = make_session(fresh(), run_dir=tmp_path / "run")
        session.run(2)
        session.save()
        export(tmp_path / "run", tmp_path / "exported", base="base")
        settings = json.loads((tmp_path / "exported" / "adapter_config.json").read_text())
        assert (settings["r"], settings["lora_alpha"]) == (4, 8)
        assert settings["target_modules"] == ["down_proj", "q_proj"]
        plain = None if own is None else self.make()  # gets recipe and adapters
        for given in (plain, fresh(), None):
            again = Session.resume(tmp_path / "run", given, data=make_batches())
            assert again.evaluate(make_batches()) == session.evaluate(make_batches())
        session.run(2)
        again.run(2)
        assert_same_state(session, again)
        other = fresh()
        other.get_submodule("model.layers.0.self_attn.q_proj").lora_alpha = 32.0  # type: ignore[assignment]
        with refused(ResumeError):
            Session.resume(tmp_path / "run", other, data=make_batches())

    def test_fork_evaluate_and_summary(self) -> None:
        session = make_session(self.make(), recipe="bf16", eval=make_batches(2, seed=7), eval_every=2)
        session.run(4)
        twin = session.fork("fp8")
        session.run(2)
        twin.run(2)
        assert twin.evaluations[-1].loss == pytest.approx(session.evaluations[-1].loss, rel=0.05)
        assert session.summary().steps == 6

    def test_a_bad_weight_is_named(self) -> None:
        session = make_session(self.make(), max_skipped=1)
        with torch.no_grad():
            session.model.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 4] = float("nan")

        with warned(UserWarning), refused(sk.train.NonFiniteError):
            session.run(1)

    def test_an_activation_is_named(self) -> None:
        session = make_session(self.make(), max_skipped=1)
        with torch.no_grad():
            session.model.get_parameter("model.layers.1.mlp.up_proj.weight").fill_(3e38)

        with warned(UserWarning), refused(sk.train.NonFiniteError):
            session.run(1)

    def test_anybodys_tokenizer_samples(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What the data was made with, if it encodes and decodes."""

        class Letters:
            def encode(self, text: str) -> tuple[int, ...]:
                return tuple(ord(letter) % VOCAB for letter in text)

            def decode(self, ids: list[int]) -> str:
                return "".join(chr(96 + i) for i in ids)

        class Data(list[Any]):
            tokenizer = Letters()

        session = make_session(self.make(), Data(make_batches()))
        assert session.sample("abc", max_new_tokens=4).startswith("abc")
        plain = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 1, "b": 2}, unk_token="a"))
        plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        monkeypatch.setattr(Data, "tokenizer", plain)  # encodes to something else than ids, and is adapted
        assert session.sample("a b", max_new_tokens=2).startswith("a b")
        with refused(TypeError):
            session.sample("abc", tokenizer=Letters())

    def test_a_sample_begins_as_the_texts_that_were_trained_on(self) -> None:
        words = {word: i for i, word in enumerate(["<s>", "</s>", *(f"w{i}" for i in range(2, VOCAB))])}
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w2"))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        backend.add_special_tokens(["<s>", "</s>"])
        backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        tokenizer = Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"})
        data = sk.text(["w5 w6"] * 8, tokenizer, length=4, batch=2)
        assert next(iter(data))["input_ids"][0].tolist() == [0, 5, 6, 1]
        session = make_session(self.make(), data)
        for parameter in session.model.eval().parameters():
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(parameter.numel()))
        opened, bare = (sk.generate(session.model, torch.tensor([ids]), 6)[0] for ids in ([0, 5, 6], [5, 6]))
        sample = session.sample("w5 w6", 6)
        assert sample == tokenizer.decode(opened[1:]) != tokenizer.decode(bare)
        assert session.sample("<s> w5 w6", 6) == "<s> " + sample

    def test_text_to_sample(self, tmp_path: Path) -> None:
        """Text in, steps, a checkpoint in the middle of an epoch, and text out."""
        text = tmp_path / "text.txt"
        text.write_text("the cat sat on the mat and the dog sat on the cat\n\n" * 60)
        tokenizer = sk.train_tokenizer(str(text), vocab_size=300)

        def data() -> Any:
            return sk.text(str(text), tokenizer=tokenizer, length=16, batch=2).split(held_out=0.2)

        train, held_out = data()
        config = sk.DecoderConfig(
            layers=1, width=32, heads=2, kv_heads=2, vocab=tokenizer.vocab_size, ffn=48, max_length=64
        )
        torch.manual_seed(0)
        session = make_session(sk.Decoder(config), train, eval=held_out, run_dir=tmp_path / "run")
        before = session.evaluate()
        session.run(15)
        session.save()
        again = Session.resume(tmp_path / "run", data=data()[0], eval=held_out)
        session.run(15)
        again.run(15)
        assert_same_state(session, again)
        assert session.evaluate() == again.evaluate() < before
        sample = session.sample("the cat", max_new_tokens=8)
        assert sample.startswith("the cat")
        assert len(sample) > len("the cat")
        assert sample == session.sample("the cat", max_new_tokens=8)
        random = [session.sample("the cat", 8, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
        assert random[0] == random[1]
        assert_same_state(session, again)
        with refused(ValueError):
            session.sample("")
        assert weights(session).keys() == weights(again).keys()


def test_a_save_that_is_not_waited_for_follows_the_sessions_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread waits for what the current device was given: of several GPUs, that has to be the one with the copies."""
    session, current = make_session(run_dir=tmp_path / "run"), ["cpu"]
    session.run(1)

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(str(device))
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", on)
    asked: list[str] = []
    later = session.peers.later

    def noting(work: Callable[[], Any]) -> Any:
        asked.append(current[-1])
        return later(work)

    monkeypatch.setattr(session.peers, "later", noting)
    content = checkpointing.content_of(session, session.peers)
    monkeypatch.setattr("surokit.train.checkpointing.content_of", lambda *_: content)
    session.device = torch.device("cuda", 1)
    session.saving.save(wait=False)
    assert asked == ["cuda:1"]
    session.saving.wait()
