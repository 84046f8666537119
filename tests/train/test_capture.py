"""Steps as graphs, with the stand-in of replay.py: bit for bit the eager session, and eager with a reason where they cannot be.

Every comparison is between whole sessions: weights, moments, records. Learning rates are tensors in both, as they are on CUDA.
"""

from __future__ import annotations

import math
import random
import re
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import surokit as sk
from surokit.runs.status import read_status
from surokit.train import AdamW, AdamW8bit, Cosine, Muon, Session, cuda_graphs
from surokit.train import capture as capturing
from surokit.train.engine import Engine
from tests.refusals import refused, warned
from tests.train.replay import NoReads, Replays, graphed
from tests.train.toys import VOCAB, Toy, assert_same_state, make_batches, make_session

Make = Callable[[], Session]


def toy(**options: Any) -> Session:
    return make_session(**{"optimizer": AdamW(lr=torch.tensor(1e-2)), **options})


def decoder(recipe: Any = None, layers: int = 1, fusion: Any = None, **options: Any) -> Session:
    torch.manual_seed(0)
    config = sk.DecoderConfig(layers=layers, width=64, heads=4, kv_heads=2, vocab=64, ffn=96, qk_norm=True)
    model = sk.Decoder(config, dtype=torch.bfloat16)
    ids = [torch.randint(64, (2, 32)) for _ in range(5)]
    data = [{"input_ids": i, "labels": i} for i in ids]
    settings: dict[str, Any] = {"optimizer": AdamW(lr=torch.tensor(3e-3)), "schedule": Cosine(warmup=2, steps=20)}
    return Session(model, data, recipe=recipe, **{**settings, **options})


def llama() -> Session:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCAB,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.LlamaForCausalLM(config)
    return toy(model=model, accumulate=2)


def assert_same_run(eager: Session, graphs: Session, steps: int) -> None:
    """After so many further steps of each everything is the same, bit for bit."""
    eager.run(steps)
    graphs.run(steps)
    assert_same_state(eager, graphs)
    for name in ("loss", "lr", "grad_norm", "skipped", "targets", "tokens"):
        assert np.array_equal(eager.records.column(name), graphs.records.column(name), equal_nan=True), name


def not_captured(why: str) -> Any:
    """Where a session says that its steps are no graphs, and why."""
    return pytest.warns(UserWarning, match=re.escape(capturing.NOT_CAPTURED.split("{")[0] + why))


def pair(make: Make) -> tuple[Session, Session, Replays]:
    device = Replays()
    return make(), graphed(make(), device), device


RUNS: dict[str, Make] = {
    "dropout": toy,
    "accumulated": lambda: toy(accumulate=3),
    "unclipped": lambda: toy(clip=None, schedule=None),
    "8-bit moments": lambda: toy(model=Toy(width=64), optimizer=AdamW8bit(lr=torch.tensor(1e-2))),
    "stochastic rounding": lambda: toy(
        model=Toy().bfloat16(), optimizer=AdamW(lr=torch.tensor(1e-2), rounding="stochastic", state_dtype=torch.float32)
    ),
    "8-bit, stochastic": lambda: toy(
        model=Toy(width=64).bfloat16(), optimizer=AdamW8bit(lr=torch.tensor(1e-2), rounding="stochastic")
    ),
    "Muon": lambda: toy(optimizer=Muon(lr=torch.tensor(1e-2), ns_steps=2)),
    "Muon, stochastic": lambda: toy(
        model=Toy().bfloat16(), optimizer=Muon(lr=torch.tensor(1e-2), ns_steps=2, rounding="stochastic")
    ),
    "torch's AdamW": lambda: toy(
        optimizer=lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), fused=True, capturable=True)
    ),
    "decoder": decoder,
    "delayed scales, accumulated": lambda: decoder(sk.FP8, accumulate=2),
    "stochastic recipe": lambda: toy(model=Toy(width=32).bfloat16(), recipe=sk.FP4.keep_last(0), accumulate=2),
    "adapter on stored codes": lambda: decoder(sk.QFP8, accumulate=2),
    "fused, accumulated": lambda: fused(decoder(sk.FP8_ROWWISE.lora(rank=4), accumulate=2)),
    "fused, delayed scales": lambda: fused(decoder(sk.FP8.lora(rank=4), layers=2)),
    "recomputed": lambda: fused(decoder(sk.BF16.lora(rank=4)), recompute="full"),
    "transformers": llama,
}


def fused(session: Session, **changes: Any) -> Session:
    sk.fuse(session.model, **changes)
    return session


@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable")
@pytest.mark.parametrize("make", RUNS.values(), ids=list(RUNS))
def test_a_run_with_graphs_is_the_eager_run(make: Make) -> None:
    eager, graphs, device = pair(make)
    assert_same_run(eager, graphs, 5)
    assert graphs.graphs.state == "on", graphs.graphs
    assert graphs.graphs.why == "forward, backward and update, equal to the eager step"
    steps, parts = 5 - capturing.WARMUP, graphs.accumulate
    # each step's parts and its update; once more to check them
    assert device.launched == (steps + 1) * (parts + 1)
    assert len(device.recorded) == min(parts, 2) + 1


def test_large_gradients_are_added_where_they_come_about(monkeypatch: pytest.MonkeyPatch) -> None:
    data = [make_batches(1, length=length, seed=i)[0] for i, length in enumerate([12, 12, 8, 12, 8, 8, 12, 8])]
    runs = []
    for small in (capturing.SMALL, 0):
        monkeypatch.setattr(capturing, "SMALL", small)
        runs.append(pair(lambda: toy(data=data, accumulate=2)))
        assert_same_run(*runs[-1][:2], 12)
        assert runs[-1][1].graphs.why.startswith("forward, backward and update of 2 shapes, equal")
    together, apart = ([op for graph in device.recorded for op in graph] for _, _, device in runs)
    assert together.count("_foreach_add_") == 2 + apart.count("_foreach_add_")
    assert together.count("add_") == apart.count("add_") - 3 * 6  # one addition, not one a parameter


def test_which_parameters_get_a_gradient_may_not_depend_on_the_shape() -> None:
    class Skips(Toy):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
            x = self.embed(input_ids)
            x = self.norm(x + (self.hidden(x) if input_ids.shape[1] > 8 else 0))
            logits = self.lm_head(x)
            return SimpleNamespace(
                loss=nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())
            )

    def make() -> Session:
        return toy(model=Skips(), data=[make_batches(1, length=12 - 4 * (i % 2))[0] for i in range(6)])

    eager, graphs, _ = pair(make)
    with not_captured("which parameters get a gradient"):
        assert_same_run(eager, graphs, 8)
    assert str(graphs.graphs) == "off: which parameters get a gradient, or where, depends on the batch"


def test_what_happens_between_steps_changes_nothing() -> None:
    def seen(session: Session) -> dict[str, Tensor]:
        return {
            "largest": torch.stack(
                [p.grad.abs().amax() for p in session.model.parameters() if p.grad is not None]
            ).amax()
        }

    eager, graphs, _ = pair(lambda: toy(meters=[seen], eval=make_batches(2, seed=1), eval_every=2))
    assert_same_run(eager, graphs, 7)
    assert graphs.graphs.state == "on"
    assert graphs.records.column("largest").tolist() == eager.records.column("largest").tolist()
    assert [e.loss for e in graphs.evaluations] == [e.loss for e in eager.evaluations]
    assert all(p.grad is None for p in graphs.model.parameters())


def test_a_step_that_is_not_finite_is_masked_and_explained() -> None:
    def make() -> Session:
        data = make_batches(8)
        for number, batch in enumerate(data):
            ids = batch["input_ids"] % (VOCAB - 1)
            ids[0, 0] = VOCAB - 1 if number == 5 else 0
            batch["input_ids"].copy_(ids)
            batch["labels"].copy_(ids)
        model = Toy()
        with torch.no_grad():
            model.embed.weight[VOCAB - 1] = math.inf
        return toy(model=model, data=data)

    eager, graphs, _ = pair(make)
    with warned(UserWarning):
        assert_same_run(eager, graphs, 8)
    assert graphs.records.column("skipped").tolist() == [0, 0, 0, 0, 0, 1, 0, 0]
    assert graphs.findings == eager.findings
    assert graphs.graphs.why == "forward, backward and update, equal to the eager step"  # not anew after the search


def test_a_step_that_is_not_finite_checks_nothing() -> None:
    """The step that would be recorded: the next one is."""

    def make() -> Session:
        class Bursts(Toy):
            def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
                loss = super().forward(input_ids, labels).loss
                return SimpleNamespace(loss=loss / (input_ids[0, 0] != 1).float() ** 8)

        data = make_batches(5)
        for number, batch in enumerate(data):
            batch["input_ids"][0, 0] = int(number == capturing.WARMUP)
        return toy(model=Bursts(), data=data)

    eager, graphs, _ = pair(make)
    with warned(UserWarning):
        assert_same_run(eager, graphs, 5)
    assert graphs.records.column("skipped").tolist() == [0, 0, 1, 0, 0]
    assert graphs.graphs.why.endswith("1 step eager: not finite, so graphs could not be checked")


def test_codes_of_frozen_weights_outlive_a_search() -> None:
    """What was kept before it is still right after it: nothing is recorded anew, whoever runs forward next."""

    def make() -> Session:
        class Bursts(nn.Module):
            def __init__(self, model: nn.Module) -> None:
                super().__init__()
                self.model = model

            def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
                return SimpleNamespace(loss=self.model(input_ids, labels).loss / (input_ids[0, 0] != 1).float() ** 8)

        inner = fused(decoder(sk.FP8.lora(rank=4)))
        data: Any = inner.data.source
        for number, batch in enumerate(data):
            batch["input_ids"][0, 0] = int(number == 3)
        return Session(Bursts(inner.model), data, optimizer=AdamW(lr=torch.tensor(3e-3)), eval=data[:1], eval_every=2)

    eager, graphs, _ = pair(make)
    with warned(UserWarning):
        assert_same_run(eager, graphs, 12)
    assert graphs.graphs.why == "forward, backward and update, equal to the eager step"
    assert [e.loss for e in graphs.evaluations] == [e.loss for e in eager.evaluations]


class TestShapes:
    def test_several_share_gradients_and_update(self) -> None:
        """Parts of one step may differ in shape, too."""

        def make() -> Session:
            data = [make_batches(1, length=length, seed=i)[0] for i, length in enumerate([12, 12, 8, 12, 8, 8, 12, 8])]
            return toy(data=data, accumulate=2)

        eager, graphs, device = pair(make)
        assert_same_run(eager, graphs, 15)
        assert graphs.graphs.why.startswith("forward, backward and update of 2 shapes, equal")
        assert len(device.recorded) == 2 * 2 + 1

    def test_few_are_remembered(self) -> None:
        def make() -> Session:
            return toy(data=[make_batches(1, length=6 + i)[0] for i in range(6)])

        eager, graphs, device = pair(make)
        assert_same_run(eager, graphs, 24)
        assert len(device.recorded) == capturing.SHAPES + 1
        assert "4 steps eager: a shape beyond the 4 that are remembered" in graphs.graphs.why

    def test_a_value_in_the_batch_is_part_of_the_shape(self) -> None:
        class Scaled(Toy):
            def forward(self, input_ids: Tensor, labels: Tensor | None = None, factor: float = 1.0) -> Any:
                return SimpleNamespace(loss=super().forward(input_ids, labels).loss * factor)

        def make() -> Session:
            data: Any = [{**batch, "factor": 1.0 + i % 2} for i, batch in enumerate(make_batches(6))]
            return toy(model=Scaled(), data=data)

        eager, graphs, _ = pair(make)
        assert_same_run(eager, graphs, 9)
        assert "of 2 shapes" in graphs.graphs.why


class TestEagerStepsBetween:
    def test_watchers_see_the_steps_that_are_due(self) -> None:
        def make() -> Session:
            return toy(recipe=sk.FP8_ROWWISE, meters=[sk.numerics(every=3)])

        eager, graphs, device = pair(make)
        assert_same_run(eager, graphs, 7)
        assert "2 steps eager: hooks on Linear" in graphs.graphs.why
        assert device.launched == (7 - capturing.WARMUP - 2 + 1) * 2
        assert graphs.layers().equals(eager.layers())

    def test_hooks_are_called(self) -> None:
        called = []
        session = graphed(toy())
        session.run(4)
        handle = session.model.get_submodule("hidden").register_forward_hook(lambda *_: called.append(session.steps))
        session.run(2)
        handle.remove()
        session.run(2)
        assert called == [4, 5]
        assert "2 steps eager: hooks on Linear" in session.graphs.why

    def test_hooks_of_parameters_are_called(self) -> None:
        called = []
        session = graphed(toy())
        session.run(4)
        weight = session.model.get_parameter("hidden.weight")
        weight.register_post_accumulate_grad_hook(lambda _: called.append(session.steps))
        session.run(2)
        assert called == [4, 5]
        assert "hooks on a parameter of Linear" in session.graphs.why

    def test_autocast(self) -> None:
        eager, graphs, _ = pair(toy)
        assert_same_run(eager, graphs, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert_same_run(eager, graphs, 2)
        assert_same_run(eager, graphs, 2)
        assert "2 steps eager: autocast is on" in graphs.graphs.why

    def test_anomalies_are_looked_for(self) -> None:
        session = graphed(toy(recipe=sk.FP8_ROWWISE))
        session.run(4)
        with warned(UserWarning), torch.autograd.detect_anomaly():
            session.run(1)
        assert "1 step eager: detect_anomaly is on" in session.graphs.why

    def test_modes_see_every_operation(self) -> None:
        session = graphed(toy())
        session.run(4)
        with NoReads():
            session.step(make_batches(1)[0])
        assert "1 step eager: a mode that sees every operation is on" in session.graphs.why

    def test_gradients_that_others_left_are_no_part_of_a_step(self) -> None:
        eager, graphs, _ = pair(toy)
        clean = toy()
        for _ in range(3):
            for session in (eager, graphs):
                session.model(**make_batches(1)[0]).loss.backward()
            assert_same_run(eager, graphs, 2)
        clean.run(6)
        assert clean.records.column("grad_norm").tolist() == graphs.records.column("grad_norm").tolist()

    @pytest.mark.parametrize("what", ["evaluate", "explain"])
    def test_memory_for_other_work_is_made(self, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
        session = graphed(toy())
        session.run(4)
        forward, graphs = session.model.forward, session.engine._graphs
        assert graphs is not None

        def full(*args: Any, **options: Any) -> Any:
            if graphs._parts:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return forward(*args, **options)

        monkeypatch.setattr(session.model, "forward", full)
        if what == "evaluate":
            assert session.evaluate(make_batches(1)) > 0
        else:
            with warned(UserWarning):
                session.arrivals.explain(4, make_batches(1), session.random.state)
        assert "left no memory" in str(session.graphs)

    def test_graphs_are_given_up_when_they_are_asked_to(self) -> None:
        eager, graphs = toy(), graphed(toy())
        assert not eager.engine.give_up_graphs("they are not wanted")
        assert_same_run(eager, graphs, 4)
        assert graphs.graphs.state == "on"
        assert graphs.engine.give_up_graphs("they are not wanted")
        assert_same_run(eager, graphs, 2)
        assert str(graphs.graphs) == "off: they are not wanted"

    def test_memory_for_one_is_made(self) -> None:
        class Large(Toy):
            """Has room for an eager step where no graph is."""

            def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
                out = super().forward(input_ids, labels)
                if len(full) == 1:
                    full.append(1)
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                return out

        full: list[int] = []
        eager, graphs = toy(model=Toy(), accumulate=2), graphed(toy(model=Large(), accumulate=2))
        assert_same_run(eager, graphs, 4)
        for session in (eager, graphs):
            session.model.get_submodule("hidden").register_forward_hook(lambda *_: None)
        full.append(0)
        with not_captured("they left no memory"):
            assert_same_run(eager, graphs, 2)
        assert str(graphs.graphs) == "off: they left no memory for a step that had to be eager"

    def test_memory_that_nobody_can_make(self) -> None:
        class TooLarge(Toy):
            def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        with pytest.raises(torch.OutOfMemoryError):
            graphed(toy(model=TooLarge())).run(1)


class TestWhatChangesUnderGraphs:
    """Each of these would be lost in a graph that goes on as recorded."""

    @staticmethod
    def weight_decay(session: Session) -> None:
        session.optimizer.param_groups[0]["weight_decay"] = 0.5

    @staticmethod
    def rate(session: Session) -> None:
        session.optimizer.param_groups[0]["lr"] = torch.tensor(3e-2)

    @staticmethod
    def moments(session: Session) -> None:
        state = session.optimizer.state_dict()
        for entry in state["state"].values():
            entry["exp_avg"] = entry["exp_avg"] * 2
        session.optimizer.load_state_dict(state)

    @staticmethod
    def weights(session: Session) -> None:
        layer = session.model.get_submodule("hidden")
        layer.weight.data = layer.weight.data.clone() * 1.5  # type: ignore[operator]

    @staticmethod
    def dropout(session: Session) -> None:
        vars(session.model.get_submodule("drop"))["p"] = 0.5

    @staticmethod
    def mode(session: Session) -> None:
        session.model.get_submodule("drop").eval()

    @staticmethod
    def training(session: Session) -> None:
        session.model.get_parameter("hidden.weight").requires_grad_(False)

    @staticmethod
    def scales(session: Session) -> None:
        state = sk.convert.scaling_state(session.model)
        sk.convert.load_scaling_state(session.model, state)

    @pytest.mark.parametrize(
        "change", ["weight_decay", "rate", "moments", "weights", "dropout", "mode", "training", "scales"]
    )
    def test_is_seen(self, change: str) -> None:
        eager, graphs, _ = pair(lambda: toy(schedule=None, recipe=sk.FP8 if change == "scales" else None))
        assert_same_run(eager, graphs, 4)
        for session in (eager, graphs):
            getattr(self, change)(session)
        assert_same_run(eager, graphs, 6)
        assert graphs.graphs.state == "on"
        assert "1 step eager: weights, settings or modes changed" in graphs.graphs.why

    def test_a_frozen_weight_counts_too(self) -> None:
        """Its codes may be kept."""
        eager, graphs, _ = pair(lambda: toy(recipe=sk.FP8_ROWWISE.lora(rank=4, targets=("hidden",))))
        assert_same_run(eager, graphs, 4)
        for session in (eager, graphs):
            with torch.no_grad():
                session.model.get_parameter("hidden.weight").mul_(2)
        assert_same_run(eager, graphs, 6)
        assert "1 step eager: weights, settings" in graphs.graphs.why

    def test_a_rate_as_a_number_is_followed(self) -> None:
        session = graphed(toy(schedule=None, optimizer=AdamW(lr=1e-2)))
        session.run(5)
        before = session.model.get_parameter("hidden.weight").detach().clone()
        session.optimizer.param_groups[0]["lr"] = 0.0
        session.run(1)
        assert torch.equal(before, session.model.get_parameter("hidden.weight"))
        assert session.records.column("lr")[-1] == 0.0
        assert session.graphs.why == "forward, backward and update, equal to the eager step"

    def test_too_often_ends_it(self) -> None:
        eager, graphs, _ = pair(lambda: toy(schedule=None))
        for number in range(capturing.ANEW + 1):
            assert_same_run(eager, graphs, 4)
            for session in (eager, graphs):
                session.optimizer.param_groups[0]["weight_decay"] = 0.1 * number
        with not_captured("weights, settings or modes changed, 4 times"):
            assert_same_run(eager, graphs, 3)
        assert graphs.graphs.state == "off"
        assert "changed" in graphs.graphs.why


class Reads(Toy):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        out = super().forward(input_ids, labels)
        return out if out.loss.item() > 0 else None


class Draws(Toy):
    """Leaves its dropout out at random, as layer drop does."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        self.draw()
        return super().forward(input_ids, labels)


class Counts(Toy):
    calls = 0

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        self.calls += 1
        return super().forward(input_ids, labels)


class Sparse(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.embed.sparse = True


class OutOfMemory(Replays):
    def record(self, work: Callable[[], Any]) -> Callable[[], None]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


class Forgets(Replays):
    """A device whose replays leave something undone."""

    def record(self, work: Callable[[], Any]) -> Callable[[], None]:
        super().record(work)
        return lambda: None


class HeldFirst(Replays):
    """A loss of an earlier forward is held the first times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def rehearsal(self) -> Any:
        self.times -= 1
        if self.times >= 0:
            raise cuda_graphs.Stale("autograd waits for another stream")
        return super().rehearsal()


def test_what_passes_is_waited_for() -> None:
    eager, graphs = toy(), graphed(toy(), HeldFirst(1))
    assert_same_run(eager, graphs, 7)
    assert graphs.graphs.state == "on"
    assert graphs.graphs.why.endswith(
        "1 step eager: autograd waits for another stream, and the graphs are recorded anew"
    )
    eager, graphs = toy(), graphed(toy(), HeldFirst(99))
    with not_captured("autograd waits for another stream, 4 times"):
        assert_same_run(eager, graphs, 20)
    assert str(graphs.graphs) == f"off: autograd waits for another stream, {capturing.ANEW + 1} times"


class Disturbed(Replays):
    """Another thread waits for the whole device while the first graph is recorded."""

    disturbed = False

    def record(self, work: Callable[[], Any]) -> Callable[[], None]:
        if not self.disturbed:
            self.disturbed = True
            raise RuntimeError(f"CUDA error: {cuda_graphs.BROKEN}")
        return super().record(work)


def test_what_another_thread_breaks_is_recorded_anew() -> None:
    eager, graphs = toy(), graphed(toy(), Disturbed())
    assert_same_run(eager, graphs, 7)
    assert graphs.graphs.state == "on"
    assert "as by another thread that waits for the whole device, and the graphs are recorded anew" in graphs.graphs.why


def test_graphs_in_a_thread() -> None:
    """Recorded and replayed there, with work of another thread between two steps: the same run."""
    eager, graphs = toy(), graphed(toy())
    run = graphs.run(7, thread=True)
    for _ in range(3):
        graphs.evaluate(make_batches(1))
    run.wait()
    eager.run(7)
    assert graphs.graphs.state == "on"
    assert_same_state(eager, graphs)


def test_gradients_are_compared_one_after_the_other() -> None:
    """There may be no room for them all: 0 where every bit is the same, else the largest share of a norm."""
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    found = {a: torch.tensor([3.0, 4.0]), b: torch.tensor([0.0, 1e-4])}
    expected = {a: torch.tensor([3.0, 4.0]), b: torch.tensor([0.0, 1e-4])}
    one = torch.tensor(1.0)

    def gaps(loss: float = 1.0) -> Any:
        return capturing._gaps((torch.tensor(loss), found), (one, expected))

    assert gaps() == (0.0, 0.0)
    assert gaps(1.5) == (0.5, 0.0)
    expected[a][0] += 0.05
    assert gaps() == (0.0, pytest.approx(0.05 / expected[a].norm().item()))
    expected[a][0] = 3.0
    expected[b].neg_()  # of a tensor far below all others a thousandth of all counts
    assert gaps() == (0.0, pytest.approx(2e-4 / (1e-3 * 25**0.5), rel=1e-3))
    found[a][0] = math.nan
    assert not gaps()[1] <= capturing.TOLERANCE
    expected.clear()
    assert gaps() == (math.inf, math.inf)


def test_the_line_that_waits_is_named() -> None:
    def forward() -> None:
        raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(RuntimeError) as caught:
        forward()
    line = forward.__code__.co_firstlineno + 1
    assert cuda_graphs.reason_of(caught.value) == (
        f"the step waits for the device in test_capture.py, line {line}: something reads a value on the host, as .item() does"
    )
    assert cuda_graphs.reason_of(ValueError("odd\nand more")) == "recording failed (ValueError: odd)"


class Invalid(Replays):
    def record(self, work: Callable[[], Any]) -> Callable[[], None]:
        try:
            raise RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture.")
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


class TestRefused:
    @pytest.mark.parametrize(
        ("model", "device", "why"),
        [
            (Reads, Replays, "the step waits for the device in "),
            (lambda: Draws(random.random), Replays, "the model draws random numbers on the host"),
            (lambda: Draws(np.random.random), Replays, "the model draws random numbers on the host"),
            (Counts, Replays, "a forward changes attributes of the model"),
            (Toy, OutOfMemory, "there is not enough memory"),
            (Toy, Forgets, "the loss of a replay is off by 1 of its norm, where eager steps differ by 0"),
            (Toy, Invalid, "the step reads the random state, as torch's checkpoint does"),
        ],
    )
    def test_and_the_run_goes_on_eagerly(self, model: Any, device: type[Replays], why: str) -> None:
        eager, graphs = toy(model=model()), graphed(toy(model=model()), device())
        state = random.getstate(), np.random.get_state()  # noqa: NPY002
        eager.run(6)
        random.setstate(state[0])
        np.random.set_state(state[1])  # noqa: NPY002
        with not_captured(why):
            graphs.run(6)
        assert_same_state(eager, graphs)
        assert graphs.records.column("loss").tolist() == eager.records.column("loss").tolist()
        assert graphs.graphs.state == "off"
        assert graphs.graphs.why.startswith(why)

    def test_sparse_gradients(self) -> None:
        session = graphed(toy(model=Sparse(), optimizer=lambda p: torch.optim.SGD(p, lr=1e-2), clip=None))
        with pytest.raises((RuntimeError, NotImplementedError)):  # torch has no norm of them
            session.run(3)

    def test_an_update_that_the_host_decides(self) -> None:
        def make() -> Session:
            return toy(optimizer=lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), clip=0.1)

        eager, graphs, device = pair(make)
        assert_same_run(eager, graphs, 6)
        assert graphs.graphs.state == "on"
        assert graphs.graphs.why == (
            "forward and backward, equal to the eager step; the update is eager: SGD cannot be masked on the device, so the "
            "host reads it every step"
        )
        assert device.launched == 5

    @pytest.mark.parametrize(
        ("make", "why"),
        [
            (lambda: toy(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True)), "capturable=True only"),
            (toy, "there is no room to check it"),
        ],
    )
    def test_an_update_that_is_not_recorded(self, make: Make, why: str) -> None:
        eager, graphs = make(), graphed(make(), Replays(free=0))
        assert_same_run(eager, graphs, 5)
        assert "the update is eager: " in graphs.graphs.why
        assert why in graphs.graphs.why

    def test_the_update_of_a_group_that_was_added(self) -> None:
        """Its learning rate is the host's, and follows the schedule."""
        model = Toy()
        model.norm.bias.requires_grad_(False)
        eager = toy(model=model)
        graphs = graphed(eager.fork())
        for session in (eager, graphs):
            bias: Any = session.model.get_parameter("norm.bias").requires_grad_()
            session.optimizer.add_param_group({"params": [bias], "lr": 1e-3})
        assert_same_run(eager, graphs, 6)
        assert "parameter groups were added" in graphs.graphs.why
        assert eager.optimizer.param_groups[-1]["lr"] < 1e-3

    def test_step_hooks_of_the_optimizer(self) -> None:
        called = []
        session = toy()
        session.optimizer.register_step_post_hook(lambda *_: called.append(1))
        graphed(session).run(5)
        assert "step hooks" in session.graphs.why
        assert len(called) == 5

    def test_on_a_cpu(self) -> None:
        session = toy()
        assert str(session.graphs) == "off: CUDA graphs need a CUDA device, and the model is on cpu"
        assert "graphs" not in repr(session)

    def test_switched_off(self) -> None:
        assert str(toy(graphs=False).graphs) == "off: switched off"

    def test_who_asked_for_them_is_warned(self) -> None:
        session = toy(graphs=True)
        with not_captured("CUDA graphs need a CUDA device"):
            session.run(1)
        session.run(1)  # once is enough
        session = toy(model=Counts())
        session.engine = Engine(session.model, session.optimizer, 1.0, True, Replays())
        with not_captured("a forward changes attributes"):
            session.run(4)

    @staticmethod
    def shown(session: Session) -> list[str]:
        assert session._panel is not None
        return session._panel.state.warning_lines()

    def test_the_panel_and_the_run_s_file_say_so(self, tmp_path: Any) -> None:
        session = graphed(toy(model=Counts(), run_dir=tmp_path / "run"))
        session.live(view="text")
        with not_captured("a forward changes attributes"):
            session.run(6)
        said = capturing.NOT_CAPTURED.format(session.graphs.why)
        told = self.shown(session)
        assert told == [f"slower than asked for, at step {capturing.WARMUP}: {said}"]
        events = read_status(tmp_path / "run").events  # type: ignore[union-attr]
        assert [(e["kind"], e["text"]) for e in events] == [("slower", said)]
        session.live(view="text")  # a panel that comes later says it too
        assert self.shown(session) == told

    def test_a_setting_that_is_none(self) -> None:
        with refused(ValueError):
            toy(graphs="on")


class TestRecordingLeavesNoTrace:
    @pytest.mark.parametrize("at", range(3))
    def test_where_it_is_interrupted(self, at: int) -> None:
        class Interrupted(Replays):
            def record(self, work: Callable[[], Any]) -> Callable[[], None]:
                if len(self.recorded) == at:
                    self.recorded.append([])
                    raise KeyboardInterrupt
                return super().record(work)

        def make() -> Session:
            return toy(recipe=sk.FP8, accumulate=2)

        eager, graphs = make(), graphed(make(), Interrupted())
        with pytest.raises(KeyboardInterrupt):
            graphs.run(5)
        assert graphs.steps == capturing.WARMUP
        assert str(graphs.graphs) == "waiting: the first 2 steps of a shape are eager"
        assert all(p.grad is None for p in graphs.model.parameters())
        eager.run(capturing.WARMUP)
        assert_same_state(eager, graphs)
        assert_same_run(eager, graphs, 4)
        assert graphs.graphs.state == "on"

    def test_an_interrupt_between_two_replays(self) -> None:
        eager, graphs, _ = pair(lambda: toy(accumulate=2))
        assert_same_run(eager, graphs, 4)
        parts = graphs.engine._graphs._parts  # type: ignore[union-attr]
        key = next(key for key in parts if not key[1])
        replay, parts[key] = parts[key], interrupt
        with pytest.raises(KeyboardInterrupt):
            graphs.run(1)
        parts[key] = replay
        assert_same_run(eager, graphs, 3)


def interrupt() -> None:
    raise KeyboardInterrupt


class TestKept:
    def test_a_resumed_run_records_anew(self, tmp_path: Any) -> None:
        whole = graphed(toy(recipe=sk.FP8))
        whole.run(8)
        first = graphed(toy(recipe=sk.FP8, run_dir=tmp_path / "run"))
        first.run(5)
        first.save()
        second = toy(recipe=sk.FP8)
        resumed = Session.resume(tmp_path / "run", second.model, data=second.data.source)
        assert resumed.engine.wants_graphs == "auto"
        graphed(resumed).run(3)
        assert_same_state(whole, resumed)
        assert resumed.graphs.state == "on"

    def test_the_setting_is_kept(self, tmp_path: Any) -> None:
        session = toy(graphs=False, run_dir=tmp_path / "run")
        session.run(1)
        session.save()
        data = session.data.source
        assert str(Session.resume(tmp_path / "run", Toy(), data=data).graphs) == "off: switched off"
        assert "need a CUDA device" in Session.resume(tmp_path / "run", Toy(), data=data, graphs="auto").graphs.why
        assert str(session.fork().graphs) == "off: switched off"

    def test_a_fork_records_anew(self) -> None:
        eager, graphs, _ = pair(lambda: toy(recipe=sk.FP8))
        assert_same_run(eager, graphs, 4)
        twins = eager.fork(), graphed(graphs.fork())
        assert_same_run(*twins, 4)
        assert twins[1].graphs.state == "on"
        assert_same_run(eager, graphs, 2)


def test_an_update_that_is_wrong_by_a_bit_is_not_used() -> None:

    class Off(Replays):
        def record(self, work: Callable[[], Any]) -> Callable[[], None]:
            replay = super().record(work)
            if len(self.recorded) < 2:
                return replay

            def wrong() -> None:
                replay()
                moment = next(iter(graphs.optimizer.state.values()))["exp_avg"].view(torch.int32)
                moment[0, 0] ^= 1

            return wrong

    eager, graphs = toy(), toy()
    graphed(graphs, Off())
    assert_same_run(eager, graphs, 5)
    assert graphs.graphs.why.endswith("the update is eager: a replayed update differs from the eager one")


class FakeCuda:
    """What recording asks of torch.cuda, written down; `broken` says how a capture ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, broken: bool = False, stuck: bool = False) -> None:
        self.log: list[str] = []
        self.mode: Any = 0
        fake = self

        class Stream:
            def __init__(self, device: Any = None, name: str = "own") -> None:
                self.name = name

            def wait_stream(self, other: Stream) -> None:
                fake.log.append(f"{self.name} waits for {other.name}")

        class Graph:
            def replay(self) -> None:
                fake.log.append("replay")

            def pool(self) -> Any:
                if broken:
                    raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")

            def reset(self) -> None:
                fake.log.append("reset")

        class Context:
            def __init__(self, *args: Any, **options: Any) -> None:
                self.options = options

            def __enter__(self) -> None:
                if self.options:
                    fake.log.append(f"capture, {self.options['capture_error_mode']}")

            def __exit__(self, *args: Any) -> None:
                if self.options and broken:
                    raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

        class Generator:
            def graphsafe_set_state(self, other: Any) -> None:
                fake.log.append("generator gets another state")

            def set_state(self, state: Any) -> None:
                fake.log.append(f"generator set to {state}")

        def empty(*size: Any, **options: Any) -> Tensor:
            if stuck:
                raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
            return torch.zeros(1)

        main = Stream(name="main")
        for name, value in {
            "Stream": Stream,
            "CUDAGraph": Graph,
            "graph": Context,
            "stream": Context,
            "device": Context,
            "current_stream": lambda device: main,
            "graph_pool_handle": lambda: (0, 1),
            "get_sync_debug_mode": lambda: fake.mode,
            "set_sync_debug_mode": lambda mode: setattr(fake, "mode", mode),
            "get_rng_state": lambda device: "state",
            "default_generators": [Generator()],
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch, "empty", empty)
        monkeypatch.setattr(torch, "Generator", lambda device: None)
        monkeypatch.setattr(cuda_graphs.CudaGraphs, "mended", 0)
        for name in ("endAllocateTo", "release"):
            monkeypatch.setattr(
                torch._C, f"_cuda_{name}Pool", lambda *_, name=name: fake.log.append(name), raising=False
            )


class TestCudaGraphs:
    device = torch.device("cuda", 0)

    def test_a_rehearsal_is_where_recording_will_be(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuda = FakeCuda(monkeypatch)
        graphs = cuda_graphs.CudaGraphs(self.device)
        with graphs.rehearsal():
            assert cuda.mode == "error"
        assert cuda.mode == 0
        with pytest.raises(RuntimeError), graphs.rehearsal():
            raise RuntimeError
        assert cuda.mode == 0
        assert cuda.log == ["own waits for main", "main waits for own"] * 2

    def test_what_is_recorded_is_replayed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuda = FakeCuda(monkeypatch)
        replay = cuda_graphs.CudaGraphs(self.device).record(lambda: cuda.log.append("work"))
        replay()
        assert cuda.log == ["capture, thread_local", "work", "replay"]

    def test_a_parameter_that_is_tied_to_another_stream_is_found_before_a_capture(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        FakeCuda(monkeypatch)
        graphs = cuda_graphs.CudaGraphs(self.device)
        with refused(cuda_graphs.Stale), graphs.rehearsal():
            warnings.warn(f"{cuda_graphs.STALE} the stream of the node that produced the gradient.", stacklevel=1)
        with graphs.rehearsal():
            warnings.warn("Was said in the steps before.", stacklevel=1)
        assert not torch.is_warn_always_enabled()

    @pytest.mark.parametrize("stuck", [False, True])
    def test_a_capture_that_fails_leaves_the_generator_at_work(
        self, stuck: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cuda = FakeCuda(monkeypatch, broken=True, stuck=stuck)
        graphs = cuda_graphs.CudaGraphs(self.device)
        with refused(RuntimeError):
            graphs.record(lambda: None)
        given_back = ["release"] * (torch.__version__ < "2.13")  # from then on torch does so itself
        mended = ["generator gets another state"] * stuck + ["generator set to state"]
        assert cuda.log[1:] == ["reset", "endAllocateTo", *given_back, *mended]
        assert graphs.mended == stuck

    @pytest.mark.parametrize(
        ("version", "broken", "given_back"),
        [("2.11.0+cu128", True, 1), ("2.11.0+cu128", False, 0), ("2.13.0+cu128", True, 0)],
    )
    def test_memory_of_a_capture_that_fails_is_given_back_once(
        self, version: str, broken: bool, given_back: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An interrupt ends a capture in order, and torch gives all back itself; so do versions from 2.13 on, or leak."""
        cuda = FakeCuda(monkeypatch, broken=broken)
        monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
        with pytest.raises((RuntimeError, KeyboardInterrupt)):
            cuda_graphs.CudaGraphs(self.device).record(interrupt)
        assert cuda.log.count("release") == given_back
        assert cuda.log.index("reset") < cuda.log.index("endAllocateTo")

    def test_a_generator_that_was_mended_ends_older_graphs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of every session: they would go on drawing from the state that it had."""
        session = graphed(toy())
        session.run(4)
        monkeypatch.setattr(Replays, "mended", 1)
        session.run(4)
        assert "1 step eager: weights, settings or modes changed" in session.graphs.why
