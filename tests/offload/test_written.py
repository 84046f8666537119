"""Weights that somebody writes between two steps hold, as in any torch optimizer; and nothing else is taken for such a write. Two
processes with shards, and with replicas, too."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surokit as sk
from surokit.offload.link import ThrottledLink
from surokit.offload.written import sync_master_
from surokit.racing.model_swap import Parking
from surokit.train import Spec
from tests.offload.ranks import halves, loss_of, make_model
from tests.offload.runs import EVERY, Run, columns, equal_runs, equal_trees, feed, make_grads, make_params, throttled
from tests.offload.shards import REPLICA_STEPS, REPLICAS
from tests.processes import found_by
from tests.refusals import refused, warned
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


def beside_adamw(make: Callable[[Params], Any], write: Callable[[Params], None]) -> Iterator[tuple[Tensor, Tensor]]:
    """After each of nine steps, before three of which somebody writes: each parameter, and sk.AdamW's."""
    ours, theirs = make_params(WHOLE), make_params(WHOLE)
    optimizer, adamw = make(ours), sk.AdamW(theirs, lr=1e-2)
    for step in range(9):
        if step in (3, 4, 7):
            with torch.no_grad():
                write(ours)
                write(theirs)
        for params, one in ((ours, optimizer), (theirs, adamw)):
            feed(one, params, make_grads(WHOLE, step))
        yield from zip(ours, theirs)


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
    for p, q in beside_adamw(make, write):
        assert torch.equal(p, q)


@written
@by_hand
def test_a_write_holds_in_cold_columns_that_no_window_defers(write: Callable[[Params], None]) -> None:
    options: dict[str, Any] = {"topk_ratio": 0.3, "update_interval": 1, "overlap_step": False, **EVERY}
    for p, q in beside_adamw(lambda params: sk.ZenFlow(params, lr=1e-2, **options), write):
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
def test_an_update_under_way_is_made_on_what_was_written_and_the_window_goes_on(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    """At every place of a window, with and without gradients, and with a rate that is another one by then."""
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
            run.step(grads, lr=1e-2 * (1 + step % 3))
            run.check()
        run.check(masters=True)
        ages = run.oracle.staleness
        assert run.optimizer.accounts.staleness == ages
        assert run.optimizer.report().staleness == {age: ages[age] / ages.total() for age in sorted(ages)}


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
    sync_master_(master, torch.tensor([1.0, 1.5, 2.0, float("nan")], dtype=torch.bfloat16))
    assert master[:3].tolist() == [pytest.approx(1.001), 1.5, 2.0]
    assert master[3].isnan()


@pytest.mark.parametrize("name", ["OffloadAdamW", "ZenFlow"])
def test_who_takes_values_over_says_so_once(name: str) -> None:
    """However filters of warnings change meanwhile."""
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
        says = f"{name}: 1 of 4 parameters were written since the last step, and not by this optimizer. It takes"
        if step == 3:
            assert len(found) == 1
            assert found[0][0].startswith(says)
            assert found[0][0].endswith("or write less often.")
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
    with warned(UserWarning):
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


def held(optimizer: Any, params: Params) -> bool:
    """Whether a write holds over the ends of two windows, at a rate of 0."""
    with torch.no_grad():
        for p in params:
            p.fill_(7)
    for step in range(10):
        feed(optimizer, params, make_grads(WHOLE, step))
    return all(bool((p == 7).all()) for p in params)


@written
def test_a_step_that_was_cut_short_is_no_write(monkeypatch: pytest.MonkeyPatch) -> None:
    params = make_params(WHOLE)
    optimizer: Any = sk.ZenFlow(params, lr=0.0)
    for step in range(4):
        feed(optimizer, params, make_grads(WHOLE, step))
    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "_window_is_full", raising(torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            feed(optimizer, params, make_grads(WHOLE, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        feed(optimizer, params, make_grads(WHOLE, 5))
    assert held(optimizer, params)


def raising(error: type[BaseException]) -> Callable[[], Any]:
    def fails() -> Any:
        raise error

    return fails


@written
@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("name", ["OffloadAdamW", "ZenFlow"])
def test_a_write_after_a_step_that_was_refused_holds(name: str, begun: bool) -> None:
    """Before its first step too, where some parameters have their masters already."""
    params = make_params(WHOLE)
    optimizer = getattr(sk, name)(params, lr=0.0)
    for step in range(3 * begun):
        feed(optimizer, params, make_grads(WHOLE, step))
    for p, g in zip(params, make_grads(WHOLE, 3)):
        p.grad = g
    params[-1].grad = params[-1].grad.to_sparse()  # type: ignore[union-attr]
    with refused(ValueError):
        optimizer.step()
    assert held(optimizer, params)


@written
def test_a_write_of_what_began_in_a_step_that_was_refused_holds() -> None:
    params = make_params(WHOLE)
    gaps = nn.Parameter(torch.ones(8)[::2])
    optimizer: Any = sk.OffloadAdamW([*params, gaps], lr=0.0)
    for p in (*params, gaps):
        p.grad = torch.ones_like(p)
    with refused(ValueError):
        optimizer.step()
    gaps.grad = None
    assert held(optimizer, params)


# -- writes in every step


def noop(params: Params) -> None:
    for p in params:
        p.clamp_(-50, 50)


def perturb_and_restore(params: Params) -> None:
    """Sharpness-aware minimization's, without the gradient between the two."""
    kept = [p.detach().clone() for p in params]
    for p, own in zip(params, kept):
        p.add_(0.05)
        p.copy_(own)


@written
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("write", [noop, perturb_and_restore], ids=lambda write: write.__name__)
@pytest.mark.parametrize(
    "options", [{}, {"update_interval": 3}, {"update_interval": "auto", "max_interval": 5}], ids=str
)
def test_writes_in_every_step_that_change_nothing_train_as_none(
    options: dict[str, Any], write: Callable[[Params], None], dtype: torch.dtype
) -> None:
    """Cold columns too, whose updates are always under way. In low precision a master keeps its digits, but for one that the update
    found halfway between two numbers."""
    runs = [
        (params, sk.ZenFlow(params, lr=1e-2, **EVERY, **options))
        for params in (make_params(WHOLE, dtype) for _ in "ab")
    ]
    first = [p.detach().clone() for p in runs[0][0]]
    for step in range(40):
        with torch.no_grad():
            write(runs[1][0])
        for params, optimizer in runs:
            feed(optimizer, params, make_grads(WHOLE, step, dtype), lr=1e-2 * (1 + step % 3))
    for p, q, before in zip(runs[0][0], runs[1][0], first):
        if p.ndim > 1:
            one, other = (columns(optimizer, each) for each, (_, optimizer) in zip((p, q), runs))
            assert ((one["w"] - other["w"]).abs() > 1e-6).sum() <= (0 if dtype == torch.float32 else 2)
            assert torch.equal(one["hot"], other["hot"])
            assert ((p.detach() - before).abs().amax(0) > 1e-2).all()
    assert runs[0][1].report().staleness == runs[1][1].report().staleness


@written
def test_a_norm_that_an_embedding_keeps_below_a_limit_stops_no_column() -> None:
    found = []
    for limit in (None, 1e9):
        torch.manual_seed(0)
        layer = nn.Embedding(50, 32, max_norm=limit)
        optimizer: Any = sk.ZenFlow(layer.parameters(), lr=1e-2, update_interval=2)
        for _ in range(12):
            (layer(torch.arange(50)) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(layer.weight.detach())
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-6)


@written
@pytest.mark.parametrize("size", [1, 7, 40])
def test_an_update_is_made_on_a_write_in_blocks_of_any_size(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for numbers in (1 << 20, size):
        monkeypatch.setattr("surokit.offload.columns.block", lambda numbers=numbers: numbers)
        run = Run(WHOLE)
        for step in range(12):
            if step in (5, 6, 9):
                with torch.no_grad():
                    run.params[2].mul_(0.5)
            feed(run.optimizer, run.params, make_grads(WHOLE, step))
        found.append(run)
    equal_runs(*found)


# -- what is saved after a write


@written
@pytest.mark.parametrize("steps", [5, 6, 7, 8])  # every place of a window, an update under way
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "spec",
    [sk.OffloadAdamW(lr=1e-2), sk.ZenFlow(lr=1e-2), sk.ZenFlow(lr=1e-2, update_interval=3, overlap_step=False)],
    ids=str,
)
def test_a_write_is_in_what_is_saved_or_copied_before_the_next_step(spec: Spec, dtype: torch.dtype, steps: int) -> None:
    def train(run: tuple[Any, Params], start: int, stop: int) -> None:
        for step in range(start, stop):
            feed(*run, make_grads(WHOLE, step, dtype), lr=1e-2 * (1 + step % 3))

    def write(run: tuple[Any, Params], share: float) -> None:
        with torch.no_grad():
            for p in run[1]:
                p.mul_(share)

    def fresh() -> tuple[Any, Params]:
        params = make_params(WHOLE, dtype)
        return spec.build(params), params

    plain, saved, resumed = (fresh() for _ in range(3))
    for run in (plain, saved):
        train(run, 0, steps)
        write(run, 0.5)
    with torch.no_grad():
        torch._foreach_copy_(list(resumed[1]), list(saved[1]))
    resumed[0].load_state_dict(copy.deepcopy(saved[0].state_dict()))
    copied = copy.deepcopy(saved)
    shown = [p.detach().clone() for p in saved[1]]
    for run in (saved, resumed, copied):
        for p, q in zip(run[1], shown):
            assert torch.equal(p, q)
        train(run, steps, steps + 1)
    train(plain, steps, steps + 1)
    for run in (
        plain,
        saved,
        resumed,
        copied,
    ):  # and with what an update that was under way when it was saved has to be undone
        write(run, 0.9)
        if run is saved:
            run[0].state_dict()
        train(run, steps + 1, steps + 5)
    for run in (saved, resumed, copied):
        for p, q in zip(plain[1], run[1]):
            assert torch.equal(p, q)
        equal_trees(plain[0].state_dict(), run[0].state_dict())


@written
def test_a_write_after_one_that_was_saved_holds_too() -> None:
    params = make_params(WHOLE)
    for make in (sk.OffloadAdamW, sk.ZenFlow):
        optimizer: Any = make(params, lr=0.0)
        for step in range(6):
            feed(optimizer, params, make_grads(WHOLE, step))
        with torch.no_grad():
            params[0].fill_(3)
        optimizer.state_dict()
        assert held(optimizer, params)


@written
@pytest.mark.parametrize("name", ["OffloadAdamW", "ZenFlow"])
def test_a_write_is_in_a_session_s_checkpoint_and_in_its_twin(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    ids = torch.randint(64, (8, 2, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": i, "labels": i} for i in ids]
    config = sk.DecoderConfig(layers=1, width=32, heads=2, kv_heads=1, vocab=64, ffn=48)
    session = sk.Session(sk.Decoder(config), data, optimizer=getattr(sk, name)(lr=1e-2), run_dir=tmp_path)
    session.run(5)
    with torch.no_grad():
        for p in session.model.parameters():
            p.mul_(0.5)
    session.save()
    others = [session.fork(), sk.Session.resume(tmp_path, data=data)]
    for each in (session, *others):
        each.run(3)
    for other in others:
        for p, q in zip(session.model.parameters(), other.model.parameters()):
            assert torch.equal(p, q)


@written
def test_a_weight_whose_memory_is_away_is_taken_over_when_it_is_back() -> None:
    """As of a session that is parked between its turns."""
    params = make_params(WHOLE)
    optimizer: Any = sk.ZenFlow(params, lr=0.0)
    for step in range(3):
        feed(optimizer, params, make_grads(WHOLE, step))
    with torch.no_grad():
        params[0].fill_(7)
    memory, size = params[0].untyped_storage(), params[0].untyped_storage().nbytes()
    memory.resize_(0)
    optimizer.state_dict()
    memory.resize_(size)
    params[0].data.fill_(7)
    for step in range(3, 12):
        feed(optimizer, params, make_grads(WHOLE, step))
    assert (params[0] == 7).all()


# -- what it costs


@written
@pytest.mark.parametrize("name", ["OffloadAdamW", "ZenFlow"])
def test_what_came_down_for_a_write_and_the_wait_for_it_are_counted(name: str) -> None:
    params = make_params([(64, 64)])
    optimizer = getattr(sk, name)(params, lr=1e-2, link=ThrottledLink(1e-3))
    for step in range(6):
        feed(optimizer, params, make_grads([(64, 64)], step))
        if step == 4:
            with torch.no_grad():
                params[0].mul_(0.5)
            accounts = optimizer.accounts
            before, waited = dict(accounts.bytes), accounts.stall_by_cause["landing"]
            idle = optimizer.link.device_stall_ms()
            optimizer.state_dict()
    came = 4 * 64 * (64 if name == "OffloadAdamW" else 58)
    assert accounts.bytes["adopted"] == (came, 0)
    assert accounts.bytes["setup"] == before["setup"]
    assert accounts.stall_by_cause["landing"] - waited >= came / 1e6
    assert optimizer.link.device_stall_ms() - idle >= came / 1e6
    report = optimizer.report()
    assert report.adopted == pytest.approx(came / 6 / params[0].nbytes)
    assert report.as_dict()["adopted"] == report.adopted
    assert "weights written by hand" in repr(report)


@written
def test_a_write_of_what_is_hot_as_a_whole_waits_for_nothing() -> None:
    params = make_params([(64, 64)])
    groups = [{"params": params, "offload": False}, {"params": make_params([(8, 32)])}]
    optimizer: Any = sk.ZenFlow(groups, lr=1e-2)
    for _ in range(6):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.ones_like(p)
        with torch.no_grad():
            params[0].mul_(0.5)
        waited = optimizer.accounts.stall_by_cause["adam"]
        optimizer.state_dict()
        assert optimizer.accounts.stall_by_cause["adam"] == waited
        optimizer.step()
    assert optimizer.accounts.bytes["adopted"] == (0, 0)


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
    with warned(UserWarning):
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
