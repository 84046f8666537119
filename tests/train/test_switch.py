"""A run that goes over to another recipe: when it does, that nothing else changes, and that a resumed run does the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import surokit as sk
from surokit.applied import recipe_of
from surokit.parallel.layout import Parallel
from surokit.runs.status import read_status
from surokit.train import Cosine, ResumeError, Session
from surokit.train.setup import check_changes
from tests.refusals import refused
from tests.train.replay import Replays, graphed
from tests.train.test_capture import assert_same_run, toy
from tests.train.toys import Listener, Toy, assert_same_state, make_batches, make_session

FORWARD = sk.FP4.keep_last(0).but(forward=sk.BF16)
# rounds stochastically; and has a past, which begins anew with each part
CHANGING = {
    "fp4": sk.FP4.keep_last(0).then(FORWARD, at=3),
    "delayed": sk.FP8.then(sk.FP8_CURRENT, at=3).then(sk.FP8, at=5),
    "to bf16": sk.MXFP8.then(sk.BF16, at=0.15),  # of 20 steps
}


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """A group of processes that is this one alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make(recipe: Any, **options: Any) -> Session:
    return make_session(Toy(width=32).bfloat16(), recipe=recipe, **options)


def losses(session: Session) -> list[float]:
    return [record.loss for record in session.records]


@pytest.mark.parametrize("name", CHANGING)
def test_a_run_does_what_a_fork_at_that_step_does(name: str) -> None:
    recipe = CHANGING[name]
    first, second = recipe.parts[:2]
    session, alone = make(recipe), make(first)
    session.run(2)
    assert session.recipe_now == first
    assert f"(the next step in {first.name}, {second.name} after step 3)" in repr(session)
    session.run(1)
    assert session.recipe_now == second  # whose first step comes next
    assert f"(the next step in {second.name}" in repr(session)
    session.run(1)
    alone.run(3)
    forked = alone.fork(second)
    forked.run(1)
    assert losses(session) == losses(alone) + losses(forked)
    assert_same_state(session, forked)
    assert session.recipe == recipe
    assert session.recipe_now == second
    assert session.summary().recipe == recipe.name


@pytest.mark.parametrize("name", CHANGING)
@pytest.mark.parametrize("steps", [2, 3, 4, 5])
def test_a_resumed_run_does_the_same(name: str, steps: int, tmp_path: Path) -> None:
    whole, part = make(CHANGING[name]), make(CHANGING[name], run_dir=tmp_path / "run")
    whole.run(7)
    part.run(steps)
    part.save()
    again = Session.resume(tmp_path / "run", Toy(seed=2, width=32).bfloat16(), data=make_batches())
    again.run(7 - steps)
    assert_same_state(whole, again)
    np.testing.assert_array_equal(again.records.column("loss"), whole.records.column("loss"))
    status = read_status(tmp_path / "run")
    assert status is not None
    notes = [event["text"] for event in status.events if event["kind"] == "note"]
    assert notes == [f"the next step is the first in {part.name}" for part in CHANGING[name].parts[1:]]


def test_a_switch_is_part_of_the_recipe_from_then_on(tmp_path: Path) -> None:
    def switched(session: Session) -> Session:
        session.run(3)
        session.switch(FORWARD)
        return session

    planned = make(CHANGING["fp4"])
    by_hand = switched(make(sk.FP4.keep_last(0), run_dir=tmp_path / "run"))
    assert by_hand.recipe == CHANGING["fp4"]
    assert by_hand.recipe_now == FORWARD
    by_hand.save()
    planned.run(6)
    by_hand.run(3)
    assert_same_state(planned, by_hand)
    again = Session.resume(tmp_path / "run", Toy(seed=2, width=32).bfloat16(), data=make_batches())
    assert again.recipe_now == FORWARD
    again.run(3)
    assert_same_state(planned, again)


def test_a_switch_takes_the_place_of_what_was_to_come() -> None:
    session = make(CHANGING["delayed"])
    session.run(4)
    session.switch("fp8-rowwise")
    assert session.recipe == sk.FP8.then(sk.FP8_CURRENT, at=3).then(sk.FP8_ROWWISE, at=4)
    session.switch(sk.MXFP8)  # nothing was computed in rowwise
    assert session.recipe == sk.FP8.then(sk.FP8_CURRENT, at=3).then(sk.MXFP8, at=4)
    session.run(3)
    assert session.recipe_now == sk.MXFP8
    assert recipe_of(session.model) == session.recipe


def test_a_fork_goes_on_in_the_part_that_computes() -> None:
    session = make(CHANGING["fp4"])
    session.run(4)
    twin = session.fork()
    assert twin.recipe_now == FORWARD
    session.run(2)
    twin.run(2)
    assert_same_state(session, twin)
    assert session.fork(sk.BF16).recipe_now == sk.BF16
    late = session.fork(sk.FP8.then(sk.MXFP8, at=2))  # six steps are done
    late.run(1)
    assert late.recipe_now == sk.MXFP8


def test_stored_weights_and_adapters_stay() -> None:
    recipe = sk.FP8_BLOCK.store(sk.QFP8).lora(rank=4, targets=("hidden",))
    session = make(recipe.then(recipe.but(forward=sk.BF16), at=2))
    frozen = {name: p.clone() for name, p in session.model.named_parameters() if not p.requires_grad}
    trained = [name for name, p in session.model.named_parameters() if p.requires_grad]
    session.run(4)
    assert [name for name, p in session.model.named_parameters() if p.requires_grad] == trained
    assert all(torch.equal(session.model.get_parameter(name), p) for name, p in frozen.items())


def test_what_a_user_has_made_trainable_stays_so() -> None:
    recipe = sk.QFP8.lora(rank=4, targets=("hidden",))
    model = Toy(width=32).bfloat16()
    sk.apply(model, recipe.then(recipe.but(forward=sk.FP8_BLOCK), at=2))
    model.norm.requires_grad_(True)
    session = make_session(model)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert "norm.weight" in trained
    session.run(4)
    assert session.recipe_now == recipe.but(forward=sk.FP8_BLOCK)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == trained


def test_a_script_that_is_started_again_goes_on_with_what_was_switched(tmp_path: Path) -> None:
    whole = make(sk.FP8_CURRENT)
    first = make(sk.FP8_CURRENT, run_dir=tmp_path / "run")
    for session in (whole, first):
        session.run(3)
        session.switch(sk.MXFP8)
        session.run(1)
    first.save()
    again = make(sk.FP8_CURRENT, run_dir=tmp_path / "run", exist="resume")
    assert again.recipe == first.recipe
    assert again.recipe_now == sk.MXFP8
    whole.run(3)
    again.run(3)
    assert_same_state(whole, again)
    for other in (sk.FP8_ROWWISE, sk.FP8_CURRENT.then(sk.MXFP8, at=9)):
        with refused(ResumeError):
            make(other, run_dir=tmp_path / "run", exist="resume")


def test_a_run_is_not_resumed_with_other_changes_than_it_was_given(tmp_path: Path) -> None:
    begun = make(sk.FP8_CURRENT.then(sk.BF16, at=9), run_dir=tmp_path / "run")
    begun.run(2)
    begun.save()
    with refused(ResumeError):
        make(sk.FP8_CURRENT.then(sk.MXFP8, at=3), run_dir=tmp_path / "run", exist="resume")
    assert make(begun.recipe, run_dir=tmp_path / "run", exist="resume").recipe == begun.recipe


def test_another_precision_for_a_while_leaves_a_change_that_was_made_meanwhile() -> None:
    session = make(sk.FP8_CURRENT.then(sk.FP8_ROWWISE, at=1))
    with sk.precision(session.model, "bf16"):
        session.run(2)
    layer = session.model.get_submodule("hidden")
    assert layer.precision.recipe == sk.FP8_ROWWISE  # type: ignore[union-attr]


def test_a_model_that_the_user_gave_to_each_process_goes_over(one_process: None) -> None:
    """DistributedDataParallel stands around the model that the recipe was applied to."""
    model = Toy(width=32).bfloat16()
    sk.apply(model, sk.FP8_CURRENT.then(sk.BF16, at=1))
    session = make_session(DistributedDataParallel(model))
    assert session.recipe == sk.FP8_CURRENT.then(sk.BF16, at=1)
    session.run(2)
    assert session.recipe_now == sk.BF16
    assert model.get_submodule("hidden").precision is None


def test_weights_that_are_sharded_go_over_with_their_adapters(one_process: None) -> None:
    adapted = sk.FP8_CURRENT.lora(rank=2, targets=("hidden",))
    after = adapted.but(forward=sk.BF16)
    model = Toy(width=32).bfloat16()
    sk.apply(model, adapted.then(after, at=2))
    fully_shard(model.get_submodule("hidden"))
    session = make_session(model)
    session.run(3)
    assert session.recipe_now == after
    assert any(type(p).__name__ == "DTensor" for p in model.parameters())
    with pytest.raises(ValueError, match="sharded already"):
        sk.apply(model, sk.FP8_CURRENT.lora(rank=4, targets=("hidden",)))


def test_a_switch_that_is_refused_leaves_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    session = make(sk.FP8_CURRENT)
    session.run(1)

    def refuse(*_: object) -> None:
        raise ValueError("This cannot be applied.")

    with monkeypatch.context() as patch:
        patch.setattr("surokit.convert.apply", refuse)
        with pytest.raises(ValueError, match="cannot be applied"):
            session.switch(sk.MXFP8)
    assert session.recipe == sk.FP8_CURRENT
    session.run(1)
    session.switch(sk.FP8_CURRENT)  # in which it is
    assert session.recipe == sk.FP8_CURRENT


def test_panels_are_told() -> None:
    session, heard = make(sk.FP8_CURRENT.then(sk.BF16, at=2)), Listener()
    session.subscribe(heard)
    assert session.numerics == "emulated on cpu"
    session.run(4)
    assert heard.of("note") == [(2, "the next step is the first in bf16")]
    assert [info.numerics for info in heard.of("info")][-1] == ""  # it is bf16 now
    assert session.numerics == ""


def test_graphs_are_recorded_anew() -> None:
    recipe = sk.FP8_CURRENT.then(sk.FP8_ROWWISE, at=5)
    eager, device = toy(model=Toy(width=32).bfloat16(), recipe=recipe), Replays()
    graphs = graphed(toy(model=Toy(width=32).bfloat16(), recipe=recipe), device)
    assert_same_run(eager, graphs, 5)
    states = []
    for steps in (0, 1, 4):
        assert_same_run(eager, graphs, steps)
        states.append(graphs.graphs.state)
    assert states == ["on", "waiting", "on"]


def test_a_race_has_runs_that_change(tmp_path: Path) -> None:
    recipe = sk.FP8_CURRENT.then(sk.BF16, at=0.5)
    race = sk.race(
        ["bf16", recipe],
        model=Toy(width=32).bfloat16(),
        data=make_batches(),
        optimizer=sk.AdamW(lr=1e-2),
        steps=8,
        turn_s=0.01,
        control=False,
        run_dir=tmp_path,
    )
    with refused(ValueError):
        sk.race(["bf16", recipe], model=Toy(width=32), data=make_batches(), minutes=0.01)
    session = race.sessions[recipe.name]
    assert session.recipe == recipe
    assert session.run_length is not None
    wanted = sk.BF16 if session.steps > recipe.later[0].step(session.run_length) else sk.FP8_CURRENT
    assert session.recipe_now == wanted
    assert sk.Race.load(tmp_path).runs[recipe.name].recipe == recipe.to_dict()


def test_what_cannot_change_is_refused() -> None:
    with refused(ValueError):
        make(sk.FP4.then(FORWARD, at=0.9), schedule=None)
    with refused(ValueError):
        check_changes(Toy(), sk.FP8.then(sk.BF16, at=2), 20, Parallel(shard=2, communicate="codes"))
    check_changes(Toy(), sk.FP8.then(sk.BF16, at=2), 20, Parallel(shard=2))
    compiled: Any = torch.compile(Toy(), backend="eager")
    with refused(ValueError):
        check_changes(nn.Sequential(compiled), sk.FP8.then(sk.BF16, at=2), 20, Parallel())
    with refused(ValueError):
        make(sk.FP8.then(sk.BF16, at=0.5).then(sk.FP8, at=3))
    session = make(sk.FP8_CURRENT)
    with refused(ValueError):
        session.switch(sk.QFP8)
    with refused(ValueError):
        make_session().switch("fp8")
    with refused(ValueError):
        session.switch("fp9")
    assert session.recipe == sk.FP8_CURRENT
    session.run(1)
    assert make(sk.FP4.then(FORWARD, at=0.9), schedule=Cosine(warmup=1, steps=10)).run_length == 10
