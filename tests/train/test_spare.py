"""Codes of W' are kept where a GPU has room for them, change no number, and are given back when memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import surokit as sk
from surokit import convert
from surokit.nn.linear import Linear
from surokit.planner import plan
from surokit.train import spare
from surokit.train.session import Session
from surokit.train.spare import Spare
from tests.train.replay import Replays, graphed

GPU = torch.device("cuda", 0)
RECIPES = {"fp8": sk.FP8.keep_small(0).lora(4), "qfp8 as native": sk.FP8_BLOCK.store(sk.QFP8).keep_small(0).lora(4)}
FUSED = sk.Fusion()
WEIGHTS = 128 * (128 + 2 * 64 + 128 + 3 * 256)  # elements of a block


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that is taken for a device with the products."""
    monkeypatch.setattr(convert, "computes", lambda a, b, device: a is not None and b is not None)


def session(recipe: sk.Recipe, fusion: sk.Fusion = FUSED) -> Session:
    torch.manual_seed(0)
    config = sk.DecoderConfig(layers=2, width=128, heads=4, kv_heads=2, vocab=64, ffn=256, qk_norm=True)
    model = sk.Decoder(config, dtype=torch.bfloat16)
    sk.fuse(model, fusion)
    ids = [torch.randint(64, (2, 32)) for _ in range(5)]
    data = [{"input_ids": i, "labels": i} for i in ids]
    made = Session(model, data, recipe=recipe, optimizer=sk.AdamW(lr=torch.tensor(3e-3)), schedule=None)
    for layer in layers(made):
        layer.keep_decoded(False)
    return made


def layers(session: Session) -> list[Linear]:
    return [m for m in session.model.modules() if isinstance(m, Linear) and m.precision is not None]


def with_room(session: Session, room: Callable[[torch.device], int] = lambda device: 1 << 40) -> Session:
    session.engine.spare = Spare(session.model, GPU, room)
    return session


def kept(session: Session) -> int:
    return sum(len(layer.frozen._transposed) for layer in layers(session) if layer.frozen is not None)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_they_are_kept_from_the_second_step_on_and_change_no_number(recipe: sk.Recipe) -> None:
    plain, other = session(recipe), with_room(session(recipe))
    other.run(1)
    assert kept(other) == 0
    assert other.engine.spare.words == "codes of W' kept: up to 0.0 GiB more"
    other.run(3)
    plain.run(4)
    assert kept(plain) == 0
    assert kept(other) > 0
    for name in ("loss", "grad_norm"):
        assert plain.records.column(name).tolist() == other.records.column(name).tolist()
    assert plan(other).setup.fusion.frozen == "transposed"
    assert plan(plain).setup.fusion.frozen == "codes"


def test_the_room_is_measured_once_and_has_to_suffice() -> None:
    for room, keeps in ((2 * WEIGHTS - 1, False), (3 * WEIGHTS, True)):
        measure = Mock(return_value=room)
        run = with_room(session(RECIPES["qfp8 as native"]), measure)
        run.run(3)
        assert bool(run.engine.spare.words) == keeps == (kept(run) > 0)
        measure.assert_called_once_with(GPU)


@pytest.mark.parametrize(
    ("recipe", "fusion"),
    [
        (sk.BF16.lora(4), sk.Fusion()),
        (sk.FP8.keep_small(0), sk.Fusion()),  # weights train
        (sk.QNF4.lora(4), sk.Fusion()),  # decoded for its products
        (RECIPES["fp8"], sk.Fusion(frozen="codes")),
        (RECIPES["fp8"], sk.Fusion.OFF),
    ],
    ids=["bf16", "all weights train", "qnf4", "codes are chosen", "nothing is fused"],
)
def test_where_there_is_nothing_to_keep_or_to_choose_nothing_is_asked(recipe: sk.Recipe, fusion: sk.Fusion) -> None:
    measure = Mock()
    run = with_room(session(recipe, fusion), measure)
    run.run(2)
    assert (run.engine.spare.words, kept(run)) == ("", 0)
    measure.assert_not_called()


def test_a_processor_is_not_asked() -> None:
    run = session(RECIPES["fp8"])
    run.run(2)
    assert (run.engine.spare.words, kept(run)) == ("", 0)


def test_they_are_given_back_before_a_step_fails_and_its_numbers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, other = session(RECIPES["fp8"]), with_room(session(RECIPES["fp8"]))
    plain.run(4)
    other.run(2)
    forward = other.model.forward

    def full(*args: Any, **options: Any) -> Any:
        if kept(other):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(*args, **options)

    monkeypatch.setattr(other.model, "forward", full)
    other.run(2)
    assert (other.engine.spare.words, kept(other)) == ("", 0)
    assert plain.records.column("loss").tolist() == other.records.column("loss").tolist()


class Short(Replays):
    """A device without memory for graphs while W' is kept."""

    def __init__(self, keeps: Callable[[], int]) -> None:
        super().__init__()
        self.keeps = keeps

    def record(self, work: Callable[[], Any]) -> Callable[[], None]:
        if self.keeps():
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().record(work)


def test_graphs_go_before_them() -> None:
    eager, other = session(RECIPES["fp8"]), session(RECIPES["fp8"])
    with_room(graphed(other, Short(lambda: kept(other))))
    other.run(8)
    eager.run(8)
    assert other.graphs.state == "on", other.graphs
    assert (other.engine.spare.words, kept(other)) == ("", 0)
    assert eager.records.column("loss").tolist() == other.records.column("loss").tolist()


def test_graphs_that_read_them_are_recorded_anew_once_they_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, other = session(RECIPES["fp8"]), with_room(graphed(session(RECIPES["fp8"])))
    other.run(4)
    assert other.graphs.state == "on"
    assert kept(other) > 0
    evaluates = other.model.forward

    def full(*args: Any, **options: Any) -> Any:
        if kept(other):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return evaluates(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(other.model, "forward", full)
        other.evaluate([{"input_ids": torch.zeros((1, 8), dtype=torch.int64), "labels": torch.zeros((1, 8)).long()}])
    assert other.engine.spare.words == ""
    other.run(5)
    eager.run(9)
    assert other.graphs.state == "on", other.graphs
    assert eager.records.column("loss").tolist() == other.records.column("loss").tolist()


def test_what_is_spare_is_the_device_without_the_peak_and_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40, 100))  # others have 10 of it
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 45)
    assert spare.spare_bytes(GPU) == 40 + (50 - 45) - 10
