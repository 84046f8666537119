"""Session: the step and what surrounds it."""

from __future__ import annotations

import copy
import functools
import math
import os
import pickle
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import surokit as sk
from surokit.data.batches import Batches
from surokit.runs.control import RunControl
from surokit.train import Cosine, Record, Session
from surokit.train.stream import Batch
from tests.clocks import JumpingClock
from tests.refusals import refused, warned
from tests.train.toys import VOCAB, Toy, assert_same_state, make_batches, make_session, moments, weights, whole


def parents(event: Any) -> list[str]:
    names = []
    while (event := event.cpu_parent) is not None:
        names.append(event.name)
    return names


class Listener:
    def __init__(self) -> None:
        self.records: list[Record] = []
        self.evaluations: list[tuple[int, float]] = []
        self.ends: list[str] = []

    def on_step(self, record: Record) -> None:
        self.records.append(record)

    def on_eval(self, step: int, loss: float) -> None:
        self.evaluations.append((step, loss))

    def on_end(self, reason: str) -> None:
        self.ends.append(reason)


class TestStep:
    def test_equals_a_loop_by_hand(self) -> None:
        """Forward, backward, clipping, AdamW and the schedule, against torch's own pieces."""
        batches = make_batches(5)
        model = Toy(dropout=0.0)
        schedule = Cosine(warmup=2, steps=5)
        decay = [p for p in model.parameters() if p.ndim >= 2], [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": decay[0], "weight_decay": 0.1}, {"params": decay[1], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.05, betas=(0.9, 0.95), fused=True)
        losses, norms = [], []
        for step, batch in enumerate(batches):
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * schedule(step)
            loss = model(**batch).loss
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        session = make_session(Toy(dropout=0.0), batches, optimizer=sk.AdamW(lr=0.05), schedule=schedule, clip=0.2)
        session.run(5)
        assert max(norms) > 0.2, "clipping has something to do"
        np.testing.assert_allclose(session.records.column("loss"), losses, rtol=1e-5)
        np.testing.assert_allclose(session.records.column("grad_norm"), norms, rtol=1e-5)
        np.testing.assert_allclose(session.records.column("lr"), [0.05 * schedule(step) for step in range(5)])
        for a, b in zip(session.model.parameters(), model.parameters()):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    def test_it_learns(self) -> None:
        session = make_session(data=make_batches(2))
        session.run(20)
        losses = session.records.column("loss")
        assert losses[-2:].mean() < losses[:2].mean() - 0.3

    def test_the_record_of_a_step(self) -> None:
        session = make_session()
        batch = dict(make_batches(1)[0])
        batch["labels"] = batch["labels"].clone()
        batch["labels"][0, 3:6] = -100
        record = session.step(batch)
        assert record.step == session.steps == 1
        assert record.tokens == 4 * 12
        assert record.targets == 4 * 11 - 3
        assert record.loss == pytest.approx(math.log(VOCAB), rel=0.3)
        assert record.grad_norm > 0
        assert not record.skipped
        assert record.peak_gib > 0.01
        assert record.wall_ms > 0
        assert math.isnan(record.idle_frac), "a single step has nothing around it"

    def test_the_users_own_loop(self) -> None:
        mine, theirs = make_session(), make_session()
        for _ in range(2):
            for batch in mine.data:
                mine.step(batch)
        theirs.run(14)
        assert_same_state(mine, theirs)
        idle = mine.records.column("idle_frac")
        assert ((idle >= 0) & (idle < 1)).all()

    def test_what_the_users_loop_does_between_two_steps_is_the_second_ones_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = JumpingClock(time.perf_counter)
        monkeypatch.setattr(time, "perf_counter", clock)

        def later() -> list[Batch]:
            clock.ahead_s += 1000.0
            return make_batches(1)

        class Slow:
            def __iter__(self) -> Iterator[Batch]:
                return iter(later())

        session = make_session(eval=Slow(), run_dir=tmp_path / "run")
        monkeypatch.setattr("surokit.train.checkpoint_files.write", lambda *_: later() and tmp_path)

        def counts(*between: Callable[[], object]) -> bool:
            for each in between:
                each()
            return session.step(make_batches(1)[0]).wall_ms >= 1e6

        assert not counts(later)  # before the first step
        assert counts(later)  # a loader's wait, say
        assert session.records.column("idle_frac")[-1] > 0.5
        assert not counts(session.evaluate)
        assert not counts(session.save)
        assert counts(session.evaluate, later)
        assert not counts(lambda: session.run(1), later)

    @pytest.mark.parametrize("asked", [{"eval_every": 2, "eval": make_batches(1)}, {"save_every": 2}])
    def test_in_it_nothing_is_evaluated_or_saved_which_is_said_once(
        self, asked: dict[str, Any], tmp_path: Path
    ) -> None:
        session = make_session(run_dir=tmp_path / "run", **asked)
        (batch,) = make_batches(1)

        with warned(UserWarning) as said:
            session.step(batch)
        assert len(said) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            session.step(batch)
            make_session().step(batch)
            after_a_run = make_session(run_dir=tmp_path / "other", **asked)
            after_a_run.run(1)
            after_a_run.step(batch)
        assert not session.evaluations
        assert not (tmp_path / "run" / "checkpoints").exists()

    def test_accumulation_weighs_by_labels(self) -> None:
        """Parts with different numbers of labels give what the whole batch gives."""
        whole = dict(make_batches(1, rows=4)[0])
        whole["labels"] = whole["labels"].clone()
        whole["labels"][0, 1:] = -100
        whole["labels"][1, 1:9] = -100
        parts = [{name: v[i : i + 2] for name, v in whole.items()} for i in (0, 2)]
        results = []
        for accumulate, batch in ((1, whole), (2, whole), (2, parts)):
            session = make_session(Toy(dropout=0.0), accumulate=accumulate)
            results.append((session.step(batch), weights(session)))
        for record, state in results[1:]:
            assert record.loss == pytest.approx(results[0][0].loss, rel=1e-5)
            assert record.grad_norm == pytest.approx(results[0][0].grad_norm, rel=1e-5)
            assert (record.targets, record.tokens) == (results[0][0].targets, 48)
            for name, value in state.items():
                torch.testing.assert_close(value, results[0][1][name], rtol=1e-4, atol=1e-5)

    def test_a_batch_that_cannot_be_split(self) -> None:
        with refused(ValueError):
            make_session(accumulate=3).step(make_batches(1, rows=4)[0])

    @pytest.mark.parametrize("batch", [[], 3, "text"])
    def test_what_is_no_batch(self, batch: Any) -> None:
        with refused(TypeError):
            make_session().step(batch)

    def test_frozen_parameters_stay(self) -> None:
        model = Toy()
        model.embed.requires_grad_(False)
        before = model.embed.weight.detach().clone()
        session = make_session(model)
        session.run(3)
        assert torch.equal(model.embed.weight, before)
        assert model.embed.weight not in session.optimizer.state

    def test_further_entries_reach_the_model(self) -> None:
        class Weighted(Toy):
            def forward(self, input_ids: Tensor, labels: Tensor | None = None, weight: Tensor | None = None) -> Any:
                assert weight is not None
                out = super().forward(input_ids, labels)
                return SimpleNamespace(loss=out.loss * weight.mean())

        batch = dict(make_batches(1)[0])
        batch["weight"] = torch.full((4,), 2.0)
        plain, doubled = make_session(Toy(dropout=0.0)), make_session(Weighted(dropout=0.0), accumulate=2)
        assert doubled.step(batch).loss == pytest.approx(2 * plain.step(make_batches(1)[0]).loss)

    def test_a_tensor_learning_rate(self) -> None:
        floats = make_session(optimizer=sk.AdamW(lr=1e-2))
        tensors = make_session(optimizer=sk.AdamW(lr=torch.tensor(1e-2)))
        floats.run(4)
        tensors.run(4)
        assert isinstance(tensors.optimizer.param_groups[0]["lr"], Tensor)
        np.testing.assert_allclose(tensors.records.column("lr"), floats.records.column("lr"), rtol=1e-6)
        np.testing.assert_allclose(tensors.records.column("loss"), floats.records.column("loss"), rtol=1e-5)

    def test_without_schedule_the_rate_is_the_users(self) -> None:
        session = make_session(schedule=None)
        session.run(1)
        session.optimizer.param_groups[0]["lr"] = 0.5
        session.run(1)
        assert session.records.column("lr").tolist() == [0.01, 0.5]

    def test_bf16(self) -> None:
        session = make_session(Toy().bfloat16(), optimizer=sk.AdamW(lr=1e-2, state_dtype=torch.float32))
        session.run(10)
        assert {m.dtype for m in moments(session)} == {torch.float32}
        assert np.isfinite(session.records.column("loss")).all()

    @pytest.mark.parametrize("kind", ["torch fused", "torch SGD", "function"])
    def test_other_optimizers(self, kind: str) -> None:
        model = Toy()
        optimizer: Any = {
            "torch fused": lambda: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
            "torch SGD": lambda: torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
            "function": lambda: lambda params: torch.optim.RMSprop(params, lr=1e-2),
        }[kind]()
        session = make_session(model, make_batches(2), optimizer=optimizer)
        session.run(20)
        losses = session.records.column("loss")
        assert losses[-2:].mean() < losses[:2].mean()

    def test_no_gradient(self) -> None:
        class Constant(Toy):
            def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
                return SimpleNamespace(loss=torch.ones((), requires_grad=True))

        with refused(RuntimeError):
            make_session(Constant()).run(1)

    def test_a_loss_without_a_gradient(self) -> None:
        class Apart(Toy):
            def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
                return SimpleNamespace(loss=super().forward(input_ids, labels).loss.detach())

        with refused(RuntimeError):
            make_session(Apart()).run(1)

    def test_a_model_that_takes_no_batch(self) -> None:
        with refused(TypeError):
            make_session(nn.Sequential(nn.Embedding(8, 8)))

        class Anything(Toy):
            def forward(self, **batch: Tensor) -> Any:  # type: ignore[override]
                return super().forward(batch["input_ids"], batch["labels"])

        make_session(Anything()).run(1)

    @pytest.mark.parametrize("more", ["attention_mask", "weights"])
    def test_an_entry_that_the_model_does_not_take(self, more: str) -> None:
        """In a step and in an evaluation; those that it takes are handed on, and another error stays what it is."""
        config = sk.DecoderConfig(layers=1, width=16, heads=2, kv_heads=1, vocab=VOCAB, ffn=24)
        batches = [{**b, "position_ids": torch.arange(12).expand(4, 12)} for b in make_batches(2)]
        batches[1][more] = torch.ones(4, 12, dtype=torch.int64)
        session = make_session(sk.Decoder(config), batches)
        with refused(TypeError):
            session.run(2)
        assert session.steps == 1
        with refused(TypeError):
            session.evaluate(batches)

        class Wrong(Toy):
            def forward(self, input_ids: Tensor, labels: Tensor | None = None, **more: Tensor) -> Any:
                raise TypeError("of its own")

        with refused(TypeError):
            make_session(Wrong(), batches).run(1)

    def test_whoever_changes_the_call_is_trusted_with_it(self) -> None:
        class Plain(Toy):
            def forward(self, x: Tensor) -> Any:  # type: ignore[override]
                return Toy.forward(self, x, x)

        class Called(Plain):
            def __call__(self, input_ids: Tensor, labels: Tensor) -> Any:
                return super().__call__(input_ids)

        patched, hooked = Plain(), Plain()
        inner = patched.forward

        @functools.wraps(inner)
        def forward(input_ids: Tensor, labels: Tensor) -> Any:
            return inner(input_ids)

        patched.forward = forward  # type: ignore[method-assign, assignment]
        hooked.register_forward_pre_hook(lambda _, __, batch: ((batch["input_ids"],), {}), with_kwargs=True)
        for model in (patched, hooked, Called()):
            make_session(model).run(1)
        with refused(TypeError):
            make_session(Plain())

    def test_a_model_without_a_loss(self) -> None:
        class Logits(Toy):
            def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
                return super().forward(input_ids, labels).logits

        with refused(TypeError):
            make_session(Logits()).run(1)

    def test_nothing_is_read_back_in_a_step(self) -> None:
        """aten::_local_scalar_dense is what .item(), float(tensor) and bool(tensor) come down to."""
        session = make_session(accumulate=2)
        session.run(1)
        batches = session.data.draw()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
            session.step(batches)
        reads = [event for event in profile.events() or () if event.name == "aten::_local_scalar_dense"]
        # torch's fused kernel for CPU tensors reads its step counters; the one for CUDA does not
        assert {"aten::_fused_adamw_" in parents(event) for event in reads} <= {True}
        assert any(event.name == "aten::_fused_adamw_" for event in profile.events() or ())

    def test_training_mode_comes_back(self) -> None:
        session = make_session()
        session.model.eval()
        session.run(1)
        assert session.model.training


class TestRun:
    def test_steps_add_up(self) -> None:
        session = make_session()
        session.run(3)
        session.run(0)
        session.run(4)
        assert session.steps == 7
        assert session.records.column("step").tolist() == [1, 2, 3, 4, 5, 6, 7]

    def test_parts_equal_the_whole(self) -> None:
        one, two = make_session(), make_session()
        one.run(9)
        for steps in (2, 4, 3):
            two.run(steps)
        assert_same_state(one, two)

    def test_to_the_end_of_the_schedule(self) -> None:
        session = make_session()
        session.run(15)
        session.run()
        assert session.steps == 20
        with refused(ValueError):
            make_session(schedule=None).run()

    def test_minutes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = iter(np.arange(0.0, 1000.0, 1.0))
        monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))
        session = make_session()
        session.run(minutes=0.5)
        assert 5 < session.steps <= 30
        session.run(steps=2, minutes=10)
        assert session.records.column("step")[-1] == session.steps <= 32

    @pytest.mark.parametrize("how", [{"steps": -1}, {"steps": 1.5}, {"minutes": -1}, {"minutes": math.nan}])
    def test_wrong_lengths(self, how: dict[str, Any]) -> None:
        with refused(ValueError):
            make_session().run(**how)

    def test_empty_data(self) -> None:
        session = make_session(data=[])
        with refused(ValueError):
            session.run(1)

    def test_the_seed_decides(self) -> None:
        runs = [make_session(seed=seed) for seed in (1, 1, 2)]
        for session in runs:
            random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002
            session.run(4)
        a, b, c = (session.records.column("loss").tolist() for session in runs)
        assert a == b != c

    def test_the_callers_random_states_stay(self) -> None:
        session = make_session(eval=make_batches(1))
        for work in (lambda: session.run(2), lambda: session.step(make_batches(1)[0]), session.evaluate):
            random.seed(3)
            np.random.seed(3)  # noqa: NPY002
            torch.manual_seed(3)
            work()
            after = random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002
            random.seed(3)
            np.random.seed(3)  # noqa: NPY002
            torch.manual_seed(3)
            assert after == (random.random(), np.random.rand(), torch.rand(1).item())  # noqa: NPY002

    def test_two_sessions_take_turns(self) -> None:
        one, two, alone = (make_session(seed=seed) for seed in (1, 2, 1))
        for _ in range(3):
            one.run(1)
            two.run(1)
        alone.run(3)
        assert_same_state(one, alone)

    def test_idle_time_is_what_is_not_the_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = JumpingClock(time.perf_counter)
        monkeypatch.setattr(time, "perf_counter", clock)

        class Slow(list[Batch]):
            def __iter__(self) -> Any:
                for batch in super().__iter__():
                    clock.ahead_s += 1000.0
                    yield batch

        session = make_session(data=Slow(make_batches(3)))
        session.run(3)
        assert (session.records.column("stall_ms") >= 1e6).all()
        assert (session.records.column("idle_frac") > 0.5).all()
        assert (session.records.column("wall_ms") > session.records.column("stall_ms")).all()


class Boom(Exception):
    pass


class Trap(Toy):
    """Does something in forward at one call."""

    def __init__(self, at: int, work: Any) -> None:
        super().__init__()
        self.at, self.work, self.calls = at, work, 0

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        self.calls += 1
        if self.calls == self.at:
            self.work()
        return super().forward(input_ids, labels)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class TestInterrupt:
    def test_it_ends_between_steps_and_goes_on(self) -> None:
        session, listener, whole = make_session(Trap(3, interrupt)), Listener(), make_session()
        session.subscribe(listener)
        before = signal.getsignal(signal.SIGINT)
        session.run(8)
        assert session.steps == 3, "the step in the making is finished"
        assert listener.ends == ["interrupted"]
        assert signal.getsignal(signal.SIGINT) is before
        session.run(5)
        whole.run(8)
        assert_same_state(session, whole)
        assert listener.ends == ["interrupted", "done"]

    def test_a_second_one_ends_it_at_once(self) -> None:
        def twice() -> None:
            interrupt()
            interrupt()

        session, listener, whole = make_session(Trap(3, twice)), Listener(), make_session()
        session.subscribe(listener)
        with pytest.raises(KeyboardInterrupt):
            session.run(8)
        assert session.steps == 2
        assert listener.ends == ["interrupted"]
        assert all(p.grad is None for p in session.model.parameters())
        session.run(6)
        whole.run(8)
        assert_same_state(session, whole)

    def test_stop_from_a_thread(self) -> None:
        def stop() -> None:
            thread = threading.Thread(target=session.stop)
            thread.start()
            thread.join()

        session = make_session(Trap(4, stop))
        session.run(8)
        assert session.steps == 4
        session.run(2)
        assert session.steps == 6

    def test_run_in_a_thread(self) -> None:
        session = make_session()
        thread = threading.Thread(target=session.run, args=(3,))
        thread.start()
        thread.join()
        assert session.steps == 3

    def test_a_stop_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(RunControl, "look_every_s", 0.0)
        session = make_session(Trap(2, (tmp_path / "run" / "stop").touch), run_dir=tmp_path / "run")
        session.run(8)
        assert session.steps == 2
        assert not (tmp_path / "run" / "stop").exists(), "it speaks of one run"
        session.run(1)
        assert session.steps == 3

    @pytest.mark.parametrize("accumulate", [1, 3])
    def test_a_failing_step_is_undone(self, accumulate: int, tmp_path: Path) -> None:
        def boom() -> None:
            raise Boom("out of something")

        session = make_session(Trap(3 * accumulate, boom), accumulate=accumulate, run_dir=tmp_path / "run")
        whole, listener = make_session(accumulate=accumulate), Listener()
        session.subscribe(listener)
        with pytest.raises(Boom):
            session.run(8)
        assert session.steps == 2
        assert listener.ends == ["failed: Boom: out of something"]
        assert (tmp_path / "run" / "records.jsonl").read_text().count("\n") == 2, "what was measured is on disk"
        session.run(6)
        whole.run(8)
        assert_same_state(session, whole)

    def test_a_failing_update_is_undone(self) -> None:
        """As one that finds no memory for the optimizer's state: what was drawn is drawn again, and no gradient stays."""
        session, whole = make_session(), make_session()
        update = session.engine.update

        def boom(loss: Tensor, targets: Tensor) -> dict[str, Tensor]:
            session.engine.update = update  # type: ignore[method-assign]
            raise Boom("no room")

        session.run(2)
        session.engine.update = boom  # type: ignore[method-assign]
        with pytest.raises(Boom):
            session.run(6)
        assert session.steps == 2
        assert all(p.grad is None for p in session.model.parameters())
        session.run(6)
        whole.run(8)
        assert_same_state(session, whole)

    def test_a_second_one_waits_for_an_update(self) -> None:
        session, whole = make_session(), make_session()
        update = session.engine.update

        def twice(loss: Tensor, targets: Tensor) -> dict[str, Tensor]:
            interrupt()
            interrupt()
            return update(loss, targets)

        session.engine.update = twice  # type: ignore[method-assign]
        session.run(8)
        assert (session.steps, len(session.records)) == (1, 1)
        session.engine.update = update  # type: ignore[method-assign]
        session.run(7)
        whole.run(8)
        assert_same_state(session, whole)


class TestInterruptOfALoopByHand:
    """The user's own loop: an interrupt raises where it comes, but never leaves weights half updated."""

    def train(self, session: Session) -> None:
        for batch in make_batches():
            session.step(batch)

    def taken_alone(self, *at: int) -> Session:
        session = make_session()
        for i in at:
            session.step(make_batches()[i])
        return session

    def test_before_weights_change_the_step_is_undone(self) -> None:
        session = make_session(Trap(3, interrupt))
        with pytest.raises(KeyboardInterrupt):
            self.train(session)
        assert session.steps == len(session.records) == 2
        session.step(make_batches()[3])
        assert_same_state(session, self.taken_alone(0, 1, 3))

    def test_while_they_change_it_waits(self) -> None:
        session = make_session()
        update = session.engine.update

        def interrupted(loss: Tensor, targets: Tensor) -> dict[str, Tensor]:
            if session.steps == 2:
                interrupt()
            return update(loss, targets)

        session.engine.update = interrupted  # type: ignore[method-assign]
        before = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            self.train(session)
        assert session.steps == len(session.records) == 3
        assert signal.getsignal(signal.SIGINT) is before
        session.step(make_batches()[3])
        assert_same_state(session, self.taken_alone(0, 1, 2, 3))

    def test_in_a_thread_and_with_a_handler_that_is_none(self) -> None:
        session = make_session()
        thread = threading.Thread(target=session.step, args=make_batches(1))
        thread.start()
        thread.join()
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            session.step(make_batches(1)[0])
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        finally:
            signal.signal(signal.SIGINT, before)
        assert session.steps == 2


class TestObservers:
    def test_subscribers_are_told(self) -> None:
        session, listener = make_session(eval=make_batches(1, seed=9), eval_every=2), Listener()
        session.subscribe(listener)
        session.run(4)
        assert [r.step for r in listener.records] == [1, 2, 3, 4]
        assert [step for step, _ in listener.evaluations] == [2, 4]
        assert listener.ends == ["done"]

    def test_one_that_raises_is_dropped(self) -> None:
        class Broken(Listener):
            def on_step(self, record: Record) -> None:
                raise Boom("browser gone")

        session, broken, listener = make_session(), Broken(), Listener()
        session.subscribe(broken)
        session.subscribe(listener)
        with warned(UserWarning):
            session.run(3)
        assert len(listener.records) == 3
        assert broken.ends == []

    def test_meters_become_columns(self) -> None:
        def meter(session: Session) -> dict[str, Tensor | float]:
            grad = session.model.get_parameter("hidden.weight").grad
            assert grad is not None
            return {"hidden_grad": grad.norm(), "half": session.steps / 2}

        session = make_session(meters=[meter])
        session.run(3)
        assert session.records.column("half").tolist() == [0.5, 1.0, 1.5]
        assert (session.records.column("hidden_grad") > 0).all()
        assert {"half", "hidden_grad"} <= set(session.records.frame().columns)

    def test_a_meter_that_raises_is_left_out(self) -> None:
        def broken(session: Session) -> dict[str, float]:
            raise Boom("no such layer")

        session = make_session(meters=[broken])
        with warned(UserWarning):
            session.run(3)
        assert session.steps == 3

    def test_live(self, capsys: pytest.CaptureFixture[str]) -> None:
        session = make_session()
        session.live()
        session.run(3)
        shown = capsys.readouterr()
        assert "step 3 / 3" in shown.out + shown.err  # the end of this run, not of the schedule


class TestEvaluate:
    def test_mean_over_labels(self) -> None:
        held = make_batches(3, seed=5)
        held[1]["labels"][:, 2:] = -100
        held[2]["labels"][:] = -100  # nothing counts: no weight, not a NaN
        session = make_session(eval=held)
        model = copy.deepcopy(session.model).eval()
        with torch.no_grad():
            losses = [float(model(**batch).loss) for batch in held[:2]]
        expected = (losses[0] * 44 + losses[1] * 4) / 48
        assert session.evaluate() == pytest.approx(expected, rel=1e-6)
        assert session.evaluations[0].targets == 48
        assert session.evaluate(held[:1]) == pytest.approx(losses[0], rel=1e-6)

    def test_it_disturbs_nothing(self) -> None:
        held = make_batches(2, seed=5)
        quiet, noisy = make_session(), make_session(eval=held)
        noisy.model.drop.eval()  # type: ignore[union-attr]
        noisy.evaluate()
        assert not noisy.model.drop.training, "modes come back as they were"  # type: ignore[union-attr]
        noisy.model.train()
        for _ in range(3):
            quiet.run(2)
            noisy.run(2)
            assert noisy.evaluate() == noisy.evaluate()
        assert_same_state(quiet, noisy)
        assert len(noisy.records) == 6
        assert all(p.grad is None for p in noisy.model.parameters())

    def test_random_held_out_data_is_the_same_each_time(self) -> None:
        class Random:
            def __iter__(self) -> Any:
                ids = torch.randint(VOCAB, (2, 8))
                yield {"input_ids": ids, "labels": ids}

        session = make_session(eval=Random())
        assert session.evaluate() == session.evaluate()

    def test_ours_is_read_from_its_beginning_each_time(self) -> None:
        """Each epoch has its own order, and leaves out other sequences: here one of three."""
        rows_ST = np.random.default_rng(0).integers(VOCAB, size=(3, 8)).astype(np.uint16)
        held = Batches(rows_ST, batch=2)
        session = make_session(eval=held)
        first = session.evaluate()
        for _ in range(3):
            assert session.evaluate() == first
        assert held.state_dict()["index"] == held.state_dict()["epoch"] == 0
        next(iter(held))
        assert session.evaluate() == first

    def test_every_so_many_steps(self) -> None:
        session = make_session(eval=make_batches(2, seed=5), eval_every=3)
        session.run(7)
        frame = session.records.frame().set_index("step")
        assert frame["eval_loss"].dropna().index.tolist() == [3, 6]
        assert [e.step for e in session.evaluations] == [3, 6]

    def test_nothing_to_evaluate_on(self) -> None:
        with refused(ValueError):
            make_session().evaluate()
        with refused(ValueError):
            make_session().evaluate([])


class TestNotFinite:
    def poisoned(self, count: int, bad: range) -> list[Batch]:
        """Batches of which some reach the embedding's row 31, which the test makes infinite."""
        batches: list[Batch] = [{name: v.clamp(max=VOCAB - 2) for name, v in b.items()} for b in make_batches(count)]
        for i in bad:
            batches[i]["input_ids"][0, 2] = VOCAB - 1
        return batches

    def overflowing(self) -> Toy:
        """Finite weights whose forward is not, where token 31 occurs: hidden(embed(31)) overflows."""
        model = Toy(dropout=0.5)
        with torch.no_grad():
            model.embed.weight[VOCAB - 1] = 3e38
            model.hidden.weight.fill_(2.0)
            model.embed.weight[: VOCAB - 1].clamp_(-1, 1)
        return model

    @pytest.mark.parametrize("kind", ["ours", "torch fused", "any"])
    def test_a_skipped_step_changes_nothing(self, kind: str) -> None:
        model = self.overflowing()
        optimizer: Any = {
            "ours": sk.AdamW(lr=1e-3),
            "torch fused": torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
            "any": torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
        }[kind]
        session = make_session(model, self.poisoned(4, range(2, 3)), optimizer=optimizer)
        session.run(2)
        before, state = weights(session), moments(session)
        with warned(UserWarning):
            session.run(1)
        assert all(torch.equal(value, before[name]) for name, value in weights(session).items())
        assert all(torch.equal(a, b) for a, b in zip(moments(session), state, strict=True))
        session.run(1)
        assert session.records.column("skipped").tolist() == [0, 0, 1, 0]
        assert not torch.equal(weights(session)["hidden.weight"], before["hidden.weight"])
        assert all(p.isfinite().all() for p in session.model.parameters())

    def test_the_replay_disturbs_nothing(self) -> None:
        """A twin that is never told that steps were skipped goes the same way."""
        batches = self.poisoned(5, range(1, 3))
        one, two = (make_session(self.overflowing(), batches) for _ in range(2))
        two.arrivals.explain = lambda *args: two.findings.append(None)  # type: ignore[method-assign, arg-type]
        with warned(UserWarning):
            one.run(5)
        two.run(5)
        assert_same_state(one, two)
        np.testing.assert_array_equal(one.records.column("loss"), two.records.column("loss"))

    def test_the_replay_leaves_delayed_scales_alone(self) -> None:
        batches = self.poisoned(4, range(2, 3))
        one, two = (make_session(self.overflowing(), batches, recipe="fp8") for _ in range(2))
        two.arrivals.explain = lambda *args: None  # type: ignore[method-assign]
        with warned(UserWarning):
            one.run(3)
        two.run(3)
        ours, theirs = sk.convert.scaling_state(one.model), sk.convert.scaling_state(two.model)
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)

    def test_several_in_a_row_end_the_run(self, tmp_path: Path) -> None:
        session = make_session(
            self.overflowing(), self.poisoned(8, range(2, 8)), run_dir=tmp_path / "run", max_skipped=4
        )
        listener = Listener()
        session.subscribe(listener)
        session.run(2)
        before = weights(session)
        with (
            warned(UserWarning),
            refused(sk.train.NonFiniteError),
        ):
            session.run(6)
        assert session.steps == 6
        assert all(torch.equal(value, before[name]) for name, value in weights(session).items())
        assert listener.ends[-1].startswith("failed: NonFiniteError")
        assert session.save().name == "step-000006", "a checkpoint is possible"
        assert len(session.findings) == 1, "explained once in a row"

    def test_single_ones_do_not_add_up(self) -> None:
        session = make_session(self.overflowing(), self.poisoned(2, range(1, 2)), max_skipped=2)
        with warned(UserWarning):
            session.run(8)
        assert session.records.column("skipped").sum() == 4
        assert [f.step for f in session.findings] == [2, 4, 6, 8]


class TestFork:
    def test_the_same_recipe_goes_the_same_way(self) -> None:
        session = make_session(accumulate=2)
        session.run(3)
        twin = session.fork()
        session.run(5)
        before = weights(session)
        twin.run(5)
        assert_same_state(session, twin)
        assert all(torch.equal(value, before[name]) for name, value in weights(session).items()), "nothing is shared"
        assert twin.records.column("step").tolist() == [4, 5, 6, 7, 8]
        np.testing.assert_array_equal(twin.records.column("loss"), session.records.column("loss")[3:])
        np.testing.assert_array_equal(twin.records.column("lr"), session.records.column("lr")[3:])

    @pytest.mark.parametrize("recipe", ["fp8", "fp8-rowwise"])
    def test_another_recipe(self, recipe: str) -> None:
        session = make_session(recipe="bf16")
        session.run(2)
        twin = session.fork(recipe)
        assert twin.recipe is sk.recipes[recipe]
        assert session.recipe is sk.BF16
        assert_same_state(session, twin)
        session.run(3)
        twin.run(3)
        a, b = session.records.column("loss")[2:], twin.records.column("loss")
        assert (a != b).any()
        np.testing.assert_allclose(a, b, rtol=0.05)
        assert twin.records.column("targets").tolist() == session.records.column("targets")[2:].tolist()

    def test_a_delayed_recipe_keeps_its_scales(self) -> None:
        session = make_session(recipe="fp8")
        session.run(3)
        twin = session.fork()
        session.run(3)
        twin.run(3)
        assert_same_state(session, twin)

    def test_a_recipe_that_trains_other_parameters(self) -> None:
        session = make_session(recipe="bf16")
        session.run(2)
        twin = session.fork(sk.BF16.lora(rank=2, targets=("hidden",)))
        twin.run(1)
        trained = [name for name, p in twin.model.named_parameters() if p.requires_grad]
        assert trained == ["hidden.lora_A.weight", "hidden.lora_B.weight"]
        other = make_session(optimizer=lambda params: torch.optim.SGD(params, lr=0.1), recipe="bf16")
        with refused(ValueError):
            other.fork(sk.BF16.lora(rank=2, targets=("hidden",)))


class TestRecipes:
    def test_it_is_applied_once(self) -> None:
        session = make_session(recipe="fp8-rowwise")
        assert session.report is not None
        assert session.recipe is sk.FP8_ROWWISE
        again = Session(session.model, make_batches(), recipe=sk.FP8_ROWWISE)
        assert again.report is None
        session.run(2)
        assert "fp8-rowwise" in repr(session)
        assert "emulated" in session.numerics or session.numerics == "native"

    def test_evaluation_leaves_delayed_scales_alone(self) -> None:
        quiet, noisy = (make_session(recipe="fp8", eval=make_batches(2, seed=5)) for _ in range(2))
        for _ in range(2):
            quiet.run(2)
            noisy.run(2)
            noisy.evaluate()
        assert_same_state(quiet, noisy)
        ours, theirs = (sk.convert.scaling_state(s.model) for s in (quiet, noisy))
        assert ours.keys() == theirs.keys() != set()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)

    def test_an_unknown_one(self) -> None:
        with refused(ValueError):
            make_session(recipe="fp88")


class TestSettings:
    @pytest.mark.parametrize(
        ("options", "error"),
        [
            ({"accumulate": 0}, ValueError),
            ({"accumulate": True}, ValueError),
            ({"clip": 0.0}, ValueError),
            ({"clip": math.nan}, ValueError),
            ({"keep": 0}, ValueError),
            ({"max_skipped": 0}, ValueError),
            ({"schedule": 3}, TypeError),
            ({"compile": "always"}, ValueError),
            ({"eval_every": 3}, ValueError),
            ({"save_every": 3}, ValueError),
            ({"eval": iter([])}, TypeError),
            ({"exist": "maybe", "run_dir": "x"}, ValueError),
            ({"optimizer": "adam"}, TypeError),
            ({"optimizer": lambda params: None}, TypeError),
        ],
    )
    def test_wrong_ones(self, options: dict[str, Any], error: type[Exception]) -> None:
        with refused(error):
            make_session(**options)

    def test_a_model_that_is_none(self) -> None:
        with refused(TypeError):
            Session("model", make_batches())  # type: ignore[arg-type]
        with refused(ValueError):
            Session(nn.Identity(), make_batches())

    def test_an_optimizer_of_another_model(self) -> None:
        with refused(ValueError):
            make_session(optimizer=torch.optim.SGD(Toy().parameters(), lr=0.1))


class TestSample:
    def test_needs_a_tokenizer(self) -> None:
        with refused(ValueError):
            make_session().sample("once")


class TestGpu:
    """The same session on CUDA: values arrive late, nothing else differs."""

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_on_cuda(self) -> None:
        gpu, cpu = make_session(Toy(dropout=0.0).cuda()), make_session(Toy(dropout=0.0))
        gpu.run(10)
        cpu.run(10)
        np.testing.assert_allclose(gpu.records.column("loss"), cpu.records.column("loss"), rtol=1e-3)
        idle = gpu.records.column("idle_frac")
        assert np.isnan(idle[0])
        assert ((idle[1:] >= 0) & (idle[1:] <= 1)).all()
        assert gpu.evaluate(make_batches(1)) == pytest.approx(cpu.evaluate(make_batches(1)), rel=1e-3)
        twin = gpu.fork()
        gpu.run(3)
        twin.run(3)
        assert_same_state(gpu, twin)


def test_a_part_without_labels_does_not_spoil_its_step() -> None:
    class MeanOfNothing(torch.nn.Module):
        """As transformers' models: the mean over no label is NaN."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed = torch.nn.Embedding(8, 8)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            logits = self.embed(input_ids) @ self.embed.weight.t()
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
            )
            return SimpleNamespace(loss=loss)

    ids = torch.arange(8).view(1, 8)
    useful, empty = {"input_ids": ids, "labels": ids}, {"input_ids": ids, "labels": torch.full_like(ids, -100)}
    session = Session(MeanOfNothing(), [useful, empty], accumulate=2, schedule=None)
    session.run(2)
    assert session.records.column("skipped").sum() == 0
    assert session.records.column("loss")[0] == pytest.approx(float(MeanOfNothing()(**useful).loss.detach()), rel=1e-5)


def test_an_adapter_depends_on_the_sessions_seed_alone(tiny: torch.nn.Module, batch: dict[str, torch.Tensor]) -> None:
    adapters = []
    for caller_seed in (1, 2):
        model = copy.deepcopy(tiny)
        torch.manual_seed(caller_seed)
        state = torch.get_rng_state()
        Session(model, [batch], recipe=sk.QFP8.lora(rank=2), seed=0)
        assert torch.equal(torch.get_rng_state(), state)
        adapters.append(torch.cat([p.detach().flatten() for n, p in model.named_parameters() if "lora_A" in n]))
    assert torch.equal(*adapters)


def test_a_tokenizer_larger_than_the_model_is_refused(tiny: torch.nn.Module) -> None:
    from surokit import texts
    from surokit.data import text, train_tokenizer

    data = text(texts.MOBY_DICK, train_tokenizer([texts.MOBY_DICK], vocab_size=300), length=16, batch=2)
    with refused(ValueError):
        Session(tiny, data)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda session: pickle.loads(pickle.dumps(session))])
def test_a_session_is_copied(how: Callable[[Session], Session], tmp_path: Path) -> None:
    saved = make_session(run_dir=tmp_path / "run")
    saved.run(1)
    saved.save(wait=False)  # in a thread that all sessions of one process share, and no copy has
    session = make_session()
    session.run(3)
    twin = how(session)
    for each in (session, twin):
        each.run(3)
        assert_same_state(each, whole(6))
