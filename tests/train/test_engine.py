"""The engine: no value of a step comes to the host, and learning rates are the host's numbers with the device's dtype."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import surokit as sk
from surokit.train import AdamW, AdamW8bit, Cosine
from surokit.train.capture import Capture, why_not
from surokit.train.engine import Engine
from tests.refusals import refused
from tests.train.replay import NoReads, Replays
from tests.train.toys import Toy, make_batches, make_session

OPTIMIZERS: dict[str, Any] = {
    "AdamW": AdamW(lr=1e-2),
    "AdamW, stochastic": AdamW(lr=1e-2, rounding="stochastic"),
    "AdamW, float32 moments": AdamW(lr=1e-2, state_dtype=torch.float32),
    "AdamW8bit": AdamW8bit(lr=1e-2, rounding="stochastic"),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
@pytest.mark.parametrize("recipe", [None, "fp8", "fp4"])
def test_a_step_reads_nothing(optimizer: Any, recipe: Any) -> None:
    """Products that a CPU emulates in its own way are taken whole (replay.py); all else is the same on a GPU."""
    recipe = recipe and sk.recipes[recipe].keep_last(0)
    session = make_session(Toy(width=64).bfloat16(), optimizer=optimizer, recipe=recipe, accumulate=2, run_dir=None)
    session.run(2)
    batches = session.data.draw()
    with NoReads():
        record = session.step(batches)
    assert record.step == 3
    assert record.loss > 0


def test_a_read_is_noticed() -> None:
    class Reads(Toy):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
            out = super().forward(input_ids, labels)
            assert out.loss > 0
            return out

    session = make_session(Reads())
    with NoReads(), refused(RuntimeError):
        session.step(make_batches(1)[0])


@pytest.mark.parametrize(
    "call", [torch.nonzero, torch.unique, lambda t: t[t > 0], lambda t: t.tolist if t.any() else 0]
)
def test_what_counts_as_a_read(call: Any) -> None:
    with NoReads(), refused(RuntimeError):
        call(torch.ones(4))


def test_only_packed_rows_go_without_a_cache() -> None:
    """Without one transformers looks for documents, and waits for the device to find none."""

    class Caches(Toy):
        config = SimpleNamespace(use_cache=True)

        def forward(
            self, input_ids: Tensor, labels: Tensor | None = None, position_ids: Any = None, use_cache: Any = None
        ) -> Any:
            told.append(use_cache)
            return super().forward(input_ids, labels)

    told: list[Any] = []
    batch = make_batches(1)[0]
    session = make_session(Caches())
    for given in (batch, {**batch, "position_ids": torch.arange(12).repeat(len(batch["input_ids"]), 1)}):
        session.step(given)
        session.evaluate([given])
    assert told == [None, None, False, False]


class TestRates:
    def engine(self, lr: float | Tensor, device: bool) -> Engine:
        model = Toy()
        optimizer = AdamW(model.parameters(), lr=lr)
        engine = Engine(model, optimizer, 1.0, "auto", Replays() if device else None)
        engine.prepare(False)
        return engine

    def rates(self, engine: Engine) -> list[Any]:
        """What the optimizer sees in a step."""
        seen: list[Any] = []
        handle = engine.optimizer.register_step_pre_hook(
            lambda optimizer, *_: seen.extend(group["lr"] for group in optimizer.param_groups)
        )
        engine.update(*engine.eager(make_batches(1)))
        handle.remove()
        return seen

    def test_are_numbers_on_a_cpu(self) -> None:
        engine = self.engine(1e-2, device=False)
        assert engine.set_rate(0.5) == 5e-3
        assert self.rates(engine) == [5e-3, 5e-3]

    def test_are_tensors_for_the_step_alone(self) -> None:
        engine = self.engine(1e-2, device=True)
        for factor in (0.5, 0.25):
            assert engine.set_rate(factor) == 1e-2 * factor
            seen = self.rates(engine)
            assert [t.dtype for t in seen] == [torch.float32] * 2
            assert seen[0].item() == pytest.approx(1e-2 * factor, rel=1e-6)
            assert [group["lr"] for group in engine.optimizer.param_groups] == [1e-2 * factor] * 2

    def test_a_tensor_is_the_users_own(self) -> None:
        lr = torch.tensor(1e-2)
        engine = self.engine(lr, device=True)
        engine.set_rate(0.5)
        assert all(t is lr for t in self.rates(engine))
        assert lr.item() == pytest.approx(5e-3)

    @pytest.mark.parametrize("device", [False, True])
    def test_of_a_group_that_is_added_follow_the_schedule(self, device: bool) -> None:
        engine = self.engine(1e-2, device)
        engine.set_rate(0.5)
        engine.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": 1e-3})
        engine.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
        for factor in (0.5, 0.25):
            assert engine.set_rate(factor) == 1e-2 * factor
            rates = [1e-2, 1e-2, 1e-3, 1e-2]
            assert [group["lr"] for group in engine.optimizer.param_groups] == [rate * factor for rate in rates]
            assert [float(rate) for rate in self.rates(engine)] == pytest.approx([rate * factor for rate in rates])

    def test_without_a_schedule_the_users_number_holds(self) -> None:
        engine = self.engine(1e-2, device=True)
        engine.optimizer.param_groups[1]["lr"] = 1e-3
        assert engine.set_rate(None) == 1e-2
        assert [t.item() for t in self.rates(engine)] == pytest.approx([1e-2, 1e-3])


def test_a_session_with_rates_on_the_device_follows_one_with_numbers() -> None:
    """float32 against float64 learning rates: a last bit now and then."""
    one, two = (make_session(schedule=Cosine(warmup=2, steps=8)) for _ in range(2))
    two.engine = Engine(two.model, two.optimizer, two.clip, "auto", Replays())
    for session in (one, two):
        session.run(8)
    assert two.records.column("loss") == pytest.approx(one.records.column("loss"), rel=1e-5)
    assert two.records.column("lr").tolist() == one.records.column("lr").tolist()


class TestNever:
    def test_on_several_devices(self) -> None:
        model = Toy()
        model.lm_head.to("meta")
        assert why_not(model) == "the model is on several devices (cpu, meta)"

    def test_without_cuda(self) -> None:
        assert why_not(Toy()) == "CUDA graphs need a CUDA device, and the model is on cpu"

    def test_sharded(self) -> None:
        class Shard:
            device = torch.device("cuda", 0)

            def to_local(self) -> None: ...

        class Sharded(Toy):
            def parameters(self, recurse: bool = True) -> Any:
                return iter([Shard()])

        assert "sharded over processes" in why_not(Sharded())

    def test_a_reason_is_a_value(self) -> None:
        assert Capture("off", "why") == Capture("off", "why")
        assert str(Capture("off", "why")) == "off: why"
