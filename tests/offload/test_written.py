"""Weights that somebody writes between two steps hold, as in any torch optimizer; and nothing else is taken for such a write. Two
processes with shards, and with replicas, too."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surokit as sk
from surokit.offload.written import adopt_
from surokit.racing.parking import Parking
from surokit.train import Spec
from tests.offload.ranks import halves, loss_of, make_model
from tests.offload.runs import EVERY, Run, columns, equal_trees, feed, make_grads, make_params, throttled
from tests.offload.shards import REPLICA_STEPS, REPLICAS
from tests.processes import found_by
from tests.train.ranks import RANKS

WHOLE = [(16, 20), (16,), (32, 48)]  # multiples of a vector's lanes, so that rows and columns have torch's bits
written = pytest.mark.filterwarnings("ignore:.*were written since the last step")
Params = list[nn.Parameter]


def load(params: Params) -> None:
    """As a model's load_state_dict."""
    for i, p in enumerate(params):
        p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(50 + i)))


def clamp(params: Params) -> None:
    for p in params:
        p.clamp_(-0.5, 0.5)


def average(params: Params) -> None:
    for p in params[:1]:
        p.data.add_(1)  # uncounted, and counted together with what follows
        p.lerp_(torch.zeros_like(p), 0.25)


WRITES: list[Callable[[Params], None]] = [load, clamp, average]
by_hand = pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)


@written
@by_hand
@pytest.mark.parametrize(
    "make",
    [
        lambda params: sk.OffloadAdamW(params, lr=1e-2),
        lambda params: sk.OffloadAdamW(params, lr=1e-2, link=throttled()),
        lambda params: sk.ZenFlow(params, lr=1e-2, topk_ratio=1.0),
        lambda params: sk.ZenFlow(params, lr=1e-2, topk_ratio=1.0, link=throttled()),
    ],
    ids=["offload", "offload, throttled", "hot", "hot, throttled"],
)
def test_a_write_holds_as_in_adamw_bit_for_bit(make: Callable[[Params], Any], write: Callable[[Params], None]) -> None:
    ours, theirs = make_params(WHOLE), make_params(WHOLE)
    optimizer, adamw = make(ours), sk.AdamW(theirs, lr=1e-2)
    for step in range(9):
        if step in (3, 4, 7):
            with torch.no_grad():
                write(ours)
                write(theirs)
        for params, one in ((ours, optimizer), (theirs, adamw)):
            feed(one, params, make_grads(WHOLE, step))
        for p, q in zip(ours, theirs):
            assert torch.equal(p, q), step


@written
@by_hand
def test_a_write_holds_in_cold_columns_that_no_window_defers(write: Callable[[Params], None]) -> None:
    ours, theirs = make_params(WHOLE), make_params(WHOLE)
    optimizer: Any = sk.ZenFlow(ours, lr=1e-2, topk_ratio=0.3, update_interval=1, overlap_step=False, **EVERY)
    adamw = sk.AdamW(theirs, lr=1e-2)
    for step in range(9):
        if step in (3, 4, 7):
            with torch.no_grad():
                write(ours)
                write(theirs)
        for params, one in ((ours, optimizer), (theirs, adamw)):
            feed(one, params, make_grads(WHOLE, step))
        for p, q in zip(ours, theirs):
            torch.testing.assert_close(p.detach(), q.detach(), atol=2e-6, rtol=2e-6)


@written
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap_step": False},
        {"update_interval": "auto", "max_interval": 5},
        {"full_warm_up_rounds": 4},
        {"cold_update": "time-corrected", "overlap_step": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_update_under_way_does_not_land_over_a_write_and_the_window_goes_on(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    """At every place of a window, with and without gradients; the others' updates land."""
    for at in range(5, 10):
        run = Run(dtype=dtype, link=throttled(at), **{"select_interval": 8, **options})
        for step in range(16):
            grads: list[Tensor | None] = list(make_grads(run.shapes, step, dtype))
            if step == at:
                for i in (0, 2):
                    value = torch.randn(run.shapes[i], generator=torch.Generator().manual_seed(step)).to(dtype)
                    with torch.no_grad():
                        run.params[i].copy_(value)
                    run.oracle.write(i, value)
                grads[2] = None
            run.step(grads)
            run.check()
        run.check(masters=dtype == torch.float32)


def swapped(optimizer: Any, params: Params, steps: int = 10, writes: bool = True) -> list[Tensor]:
    """Other weights are shown for an evaluation in the middle, and the own ones brought back."""
    for step in range(steps):
        if step == 6 and writes:
            kept = [p.detach().clone() for p in params]
            with torch.no_grad():
                load(params)
                for p, own in zip(params, kept):
                    p.copy_(own)
        feed(optimizer, params, make_grads(WHOLE, step, torch.bfloat16))
    return [p.detach() for p in params]


@written
@pytest.mark.parametrize(
    "spec",
    [
        sk.OffloadAdamW(lr=1e-4),
        sk.ZenFlow(lr=1e-4, topk_ratio=1.0),
        sk.ZenFlow(lr=1e-4, update_interval=3, overlap_step=False),
    ],
    ids=str,
)
def test_weights_that_were_brought_back_keep_their_masters(spec: Spec) -> None:
    """A master has more digits than the weight shows; what is shown again as it was has them still."""
    runs = [(spec.build(params), params) for params in (make_params(WHOLE, torch.bfloat16) for _ in range(2))]
    for (optimizer, params), writes in zip(runs, (False, True)):
        swapped(optimizer, params, writes=writes)
    equal_trees(runs[0][0].state_dict(), runs[1][0].state_dict())
    for p, q in zip(runs[0][1], runs[1][1]):
        assert torch.equal(p, q)


def test_a_master_is_kept_where_it_rounds_to_what_is_shown() -> None:
    master = torch.tensor([1.001, 1.001, float("nan"), 3.0])
    adopt_(master, torch.tensor([1.0, 1.5, 2.0, float("nan")], dtype=torch.bfloat16))
    assert master[:3].tolist() == [pytest.approx(1.001), 1.5, 2.0]
    assert master[3].isnan()


@pytest.mark.parametrize("name", ["OffloadAdamW", "ZenFlow"])
def test_who_takes_values_over_says_so_each_time(name: str) -> None:
    params = make_params()
    optimizer = getattr(sk, name)(params, lr=1e-2)
    for step in range(8):
        if step in (0, 3, 6):
            with torch.no_grad():
                for p in params[: step // 3]:
                    p.mul_(2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for p, g in zip(params, make_grads([tuple(p.shape) for p in params], step)):
                p.grad = g
            optimizer.step()
        found = [(str(warning.message), Path(warning.filename).name) for warning in caught]
        says = (
            f"{name}: {step // 3} of 4 parameters were written since the last step, and not by this optimizer. It takes"
        )
        if step in (3, 6):
            assert len(found) == 1
            assert found[0][0].startswith(says)
            assert found[0][1] == "test_written.py"
        else:
            assert not found, step


def test_a_warning_that_is_an_error_changes_nothing_and_comes_again() -> None:
    params = make_params()
    optimizer: Any = sk.ZenFlow(params, lr=1e-2)
    feed(optimizer, params, make_grads([tuple(p.shape) for p in params], 0))
    with torch.no_grad():
        params[0].fill_(1)
    for p in params:
        p.grad = torch.ones_like(p)
    for _ in range(2):
        with pytest.raises(UserWarning, match="were written"):
            optimizer.step()
    assert optimizer.accounts.steps == 1
    with pytest.warns(UserWarning, match="were written"):
        optimizer.step()
    assert (columns(optimizer, params[0])["w"] - 1).abs().max() < 0.1


@pytest.mark.parametrize("name", ["OffloadAdamW", "ZenFlow"])
def test_between_loading_a_state_and_the_next_step_the_state_counts(name: str) -> None:
    """In whichever order model and optimizer are loaded."""
    params = make_params(WHOLE)
    optimizer = getattr(sk, name)(params, lr=1e-2)
    for step in range(6):
        feed(optimizer, params, make_grads(WHOLE, step))
    state, shown = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in params]
    for step in range(6, 12):
        feed(optimizer, params, make_grads(WHOLE, step))
    expected = [p.detach().clone() for p in params]
    optimizer.load_state_dict(state)
    with torch.no_grad():
        for p, own in zip(params, shown):
            p.copy_(own)
    for step in range(6, 12):
        feed(optimizer, params, make_grads(WHOLE, step))
    for p, q in zip(params, expected):
        assert torch.equal(p, q)


def test_a_step_that_was_cut_short_is_no_write(monkeypatch: pytest.MonkeyPatch) -> None:
    params = make_params(WHOLE)
    optimizer: Any = sk.ZenFlow(params, lr=1e-2)
    for step in range(4):
        feed(optimizer, params, make_grads(WHOLE, step))
    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "_window_is_full", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            feed(optimizer, params, make_grads(WHOLE, 4))
    feed(optimizer, params, make_grads(WHOLE, 5))  # a warning would be an error


@pytest.mark.parametrize("name", ["OffloadAdamW", "ZenFlow"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_a_session_does_is_no_write(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Evaluation, checkpoints, twins, parking, another precision: a warning would be an error here."""
    config = sk.DecoderConfig(layers=1, width=32, heads=2, kv_heads=1, vocab=64, ffn=48)
    model = sk.Decoder(config).to(dtype)
    ids = torch.randint(64, (8, 2, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": i, "labels": i} for i in ids]
    session = sk.Session(model, data, optimizer=getattr(sk, name)(lr=1e-2), eval=data[:2], run_dir=tmp_path)
    session.run(5)
    session.evaluate()
    session.save()
    twin = session.fork()
    other = session.fork(recipe=sk.FP8)
    for each in (session, twin, other):
        each.optimizer.state_dict()
    parking = Parking({"one": session, "two": twin, "three": other})
    for at, each in (
        ("two", twin),
        ("one", session),
        ("three", other),
        ("two", twin),
        ("one", session),
        ("three", other),
    ):
        parking.bring(at)
        each.run(3)
        each.optimizer.state_dict()  # waits for the threads: here their memory is parked too
    resumed = sk.Session.resume(tmp_path, data=data)
    resumed.run(3)
    with torch.no_grad():
        next(resumed.model.parameters()).mul_(2)
    with pytest.warns(UserWarning, match=f"{name}: 1 of"):
        resumed.run(1)


# -- two processes


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return found_by("tests.offload.shards", RANKS, tmp_path_factory.mktemp("written"), 120)


@pytest.mark.parametrize("name", ["OffloadAdamW", "ZenFlow"])
def test_a_write_into_shards_holds_and_sharding_itself_is_none(name: str, ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert "error" not in found, found["error"]
        assert found[name]["quiet"] == []
        for said in found[name]["said"]:
            assert [text.split(". ")[0] for text in said] == [
                f"{name}: 5 of 5 parameters were written since the last step, and not by this optimizer"
            ]
        assert len(found[name]["said"]) == 2
        assert all(found[name]["held"])


@pytest.mark.parametrize("name", REPLICAS)
def test_replicas_of_ddp_train_as_one_process_on_the_whole_batch(name: str, ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert "error" not in found, found["error"]
    one, two = (found["replicas"][name] for found in ranks)
    model = make_model()
    optimizer = REPLICAS[name].build(model.parameters())
    for step in range(REPLICA_STEPS):
        model.zero_grad()
        for x in halves(step):
            (loss_of(model, x) / RANKS).backward()
        optimizer.step()
    for p, q, whole in zip(one, two, model.parameters()):
        assert torch.equal(p, q)
        torch.testing.assert_close(p, whole.detach(), atol=1e-5, rtol=1e-4)
