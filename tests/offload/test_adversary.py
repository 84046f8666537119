"""What a user may do to an optimizer that is not in its examples: ZenFlow has to do what AdamW would, or say no."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surokit as sk
from tests.offload.oracle import hot_columns
from tests.offload.runs import EVERY, SHAPES, Run, columns, equal_trees, feed, make_grads, make_params, throttled
from tests.refusals import refused
from tests.train.toys import assert_same_state, make_session

EACH_STEP: dict[str, Any] = {"update_interval": 1, "overlap_step": False}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def zenflow(params: Any, **options: Any) -> Any:
    return sk.ZenFlow(params, **{"lr": 1e-2, **EVERY, **options})


def same(params: Any, others: Any) -> None:
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), atol=1e-6, rtol=1e-6)


def beside_adamw(
    steps: int = 10, **options: Any
) -> Iterator[tuple[int, list[nn.Parameter], list[nn.Parameter], Any, Any]]:
    """ZenFlow with windows of one and sk.AdamW over the same weights, whoever steps them; compared after every step."""
    ours, theirs = make_params(), make_params()
    optimizer, adamw = zenflow(ours, topk_ratio=0.3, **EACH_STEP, **options), sk.AdamW(theirs, lr=1e-2)
    for step in range(steps):
        yield step, ours, theirs, optimizer, adamw
        same(ours, theirs)


def both(step: int, ours: Any, theirs: Any, optimizer: Any, adamw: Any, grads: Any = None, **given: Any) -> None:
    grads = make_grads(SHAPES, step) if grads is None else grads
    for params, one in ((ours, optimizer), (theirs, adamw)):
        feed(one, params, grads, **given)


# -- gradients that are not there


@pytest.mark.parametrize(
    "options", [{}, {"overlap_step": False}, {"full_warm_up_rounds": 3}, {"update_interval": "auto"}]
)
def test_gradients_are_missing_at_random(options: dict[str, Any]) -> None:
    """A window's mean is over the gradients that there were."""
    run = Run(**{"select_interval": 8, **options})
    draw = torch.Generator().manual_seed(1)
    for step in range(30):
        grads: list[Tensor | None] = list(make_grads(SHAPES, step))
        for i in range(len(grads)):
            if torch.rand((), generator=draw) < 0.4:
                grads[i] = None
        run.step(grads)
        run.check()
    run.check(masters=True)


def test_gradients_are_missing_beside_adamw() -> None:
    for step, ours, theirs, optimizer, adamw in beside_adamw():
        grads: list[Tensor | None] = list(make_grads(SHAPES, step))
        grads[step % 4] = None
        both(step, ours, theirs, optimizer, adamw, grads)


def test_no_gradient_at_all() -> None:
    """Nothing to do, and nothing is done; the same a few steps in."""
    run = Run()
    for when in range(2):
        before = [p.detach().clone() for p in run.params]
        for _ in range(5):
            run.optimizer.step()
        if when == 0:
            assert all(torch.equal(p, q) for p, q in zip(run.params, before))
        for _ in range(6):
            feed(run.optimizer, run.params, make_grads(SHAPES, 0))


# -- parameters


def test_frozen_parameters_stay() -> None:
    params = make_params()
    params[0].requires_grad_(False)
    frozen = params[0].detach().clone()
    optimizer = zenflow(params)
    for step in range(6):
        grads: list[Tensor | None] = [None, *make_grads(SHAPES, step)[1:]]
        feed(optimizer, params, grads)
    assert torch.equal(params[0], frozen)
    assert all(p is not params[0] for group in optimizer.param_groups for p in group["params"])


def test_tied_weights_are_one_parameter() -> None:
    embed, head = nn.Embedding(20, 16), nn.Linear(16, 20, bias=False)
    head.weight = embed.weight
    model = nn.Sequential(embed, head)
    twin = copy.deepcopy(model)
    optimizer, adamw = zenflow(model.parameters(), topk_ratio=0.3, **EACH_STEP), sk.AdamW(twin.parameters(), lr=1e-2)
    ids = torch.arange(20)
    for _ in range(8):
        for one, m in ((optimizer, model), (adamw, twin)):
            m.zero_grad()
            nn.functional.cross_entropy(m(ids), ids.roll(1)).backward()
            one.step()
    assert model[0].weight is model[1].weight
    same(model.parameters(), twin.parameters())


def test_gradients_and_weights_that_are_not_contiguous() -> None:
    p = nn.Parameter(torch.randn(20, 16, generator=torch.Generator().manual_seed(0)).t())
    q = nn.Parameter(p.detach().clone().contiguous())
    optimizer, adamw = zenflow([p], topk_ratio=0.3, **EACH_STEP), sk.AdamW([q], lr=1e-2)
    for step in range(8):
        g = make_grads([(20, 16)], step)[0].t()
        p.grad, q.grad = g, g.contiguous()
        optimizer.step()
        adamw.step()
    same([p], [q])


@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 20), (20, 1), (0, 5), (5, 0), (0,), (), (1, 1, 1), (33, 17), (2, 3, 4, 5)]
)
@pytest.mark.parametrize("overlap", [False, True])
def test_shapes_at_the_edge(shape: tuple[int, ...], overlap: bool) -> None:
    run = Run([shape, (3, 7)], topk_ratio=0.5, update_interval=2, overlap_step=overlap)
    for _ in range(7):
        run.step()
        run.check()
    state = copy.deepcopy(run.optimizer.state_dict())
    equal_trees(state, run.optimizer.state_dict())


@pytest.mark.parametrize("ratio", [1e-9, 0.049, 0.05, 0.1, 0.29, 0.3, 0.7, 0.95, 0.999999, 1.0])
def test_how_many_columns_are_hot(ratio: float) -> None:
    run = Run([(4, 20), (4, 1), (4, 100)], topk_ratio=ratio)
    run.step()
    for p in run.params:
        assert len(columns(run.optimizer, p)["hot"]) == hot_columns(ratio, p.shape[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    """The master is float32."""
    run = Run(dtype=dtype)
    for _ in range(10):
        run.step()
    for p, w in zip(run.params, run.oracle.weights):
        torch.testing.assert_close(p.detach().double(), w.shown.double(), atol=1e-5, rtol=2**-10)


# -- groups


def test_groups_that_change_between_steps() -> None:
    """Rates, decay and betas are read at every step, by hot and cold alike."""
    for step, ours, theirs, optimizer, adamw in beside_adamw(12):
        for one in (optimizer, adamw):
            for group in one.param_groups:
                group["lr"] = 1e-3 * (step + 1)
                group["betas"] = (0.9, 0.95) if step < 6 else (0.8, 0.9)
                if group["weight_decay"]:
                    group["weight_decay"] = 0.1 * (step % 3 + 1)
        both(step, ours, theirs, optimizer, adamw)


def test_a_group_that_is_added() -> None:
    extra = [nn.Parameter(torch.randn(6, 9, generator=torch.Generator().manual_seed(3))) for _ in range(2)]
    extra[1].data.copy_(extra[0].data)
    for step, ours, theirs, optimizer, adamw in beside_adamw(10):
        if step == 5:
            optimizer.add_param_group({"params": [extra[0]]})
            adamw.add_param_group({"params": [extra[1]]})
        if step >= 5:
            for p in extra:
                p.grad = make_grads([(6, 9)], step)[0]
        both(step, ours, theirs, optimizer, adamw)
        same(extra[:1], extra[1:])


def test_groups_that_stay_on_the_device() -> None:
    params = make_params([(16, 20), (16, 20)])
    optimizer = sk.ZenFlow([{"params": [params[0]], "offload": False}, {"params": [params[1]]}], lr=1e-2, **EVERY)
    twin = [nn.Parameter(params[0].detach().clone())]
    adamw = sk.AdamW(twin, lr=1e-2)
    for step in range(6):
        grads = make_grads([(16, 20), (16, 20)], step)
        feed(optimizer, params, grads)
        feed(adamw, twin, grads[:1])
    same(params[:1], twin)
    assert "w" not in optimizer.state[params[0]]


def test_a_rate_in_a_tensor() -> None:
    one, other = make_params(), make_params()
    rate = torch.tensor(1e-2)
    optimizer, reference = zenflow(one, lr=rate), zenflow(other)
    for step in range(10):
        rate.fill_(1e-2 / (step + 1))
        feed(optimizer, one, make_grads(SHAPES, step))
        feed(reference, other, make_grads(SHAPES, step), lr=float(rate))
    for p, q in zip(one, other):
        assert torch.equal(p, q)


def test_under_a_scheduler_of_torch() -> None:
    for step, ours, theirs, optimizer, adamw in beside_adamw():
        if step == 0:
            schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(one, 10) for one in (optimizer, adamw)]
        both(step, ours, theirs, optimizer, adamw)
        for schedule in schedules:
            schedule.step()


def test_sparse_gradients_are_refused() -> None:
    embed = nn.Embedding(20, 8, sparse=True)
    optimizer = zenflow(embed.parameters())
    embed(torch.arange(3)).sum().backward()
    with refused(ValueError):
        optimizer.step()


def test_a_closure_that_fails_changes_nothing() -> None:
    run = Run()
    for _ in range(6):
        run.step()
    before = copy.deepcopy(run.optimizer.state_dict())

    def closure() -> float:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run.optimizer.step(closure)
    equal_trees(before, run.optimizer.state_dict())
    run.step()
    run.check(masters=True)


# -- loops


def test_two_optimizers_in_one_process() -> None:
    """Taking turns, each is what it is alone."""
    first, second = Run(seed=1, link=throttled(1)), Run(seed=2, link=throttled(2), update_interval="auto")
    for _ in range(14):
        for run in (first, second):
            run.step()
            run.check()
    for run in (first, second):
        run.check(masters=True)


def test_a_closure() -> None:
    p = nn.Parameter(torch.ones(4, 6))
    optimizer = zenflow([p])

    def closure() -> Any:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 24.0
    assert optimizer.step(closure).item() < 24.0


def test_weights_that_a_user_overwrites_in_data_come_back() -> None:
    """Where torch does not count the write: the master counts then, as in any training in mixed precision."""
    run = Run(dtype=torch.bfloat16, **EACH_STEP)
    for step in range(8):
        if step == 5:
            for p in run.params:
                p.data.fill_(7.0)
        run.step()
    run.check(masters=True)


def test_steps_in_another_thread() -> None:
    one, other = Run(), Run()
    for _ in range(12):
        one.step()

    def half() -> None:
        for _ in range(6):
            other.step()

    threads = [threading.Thread(target=half) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    for p, q in zip(one.params, other.params):
        assert torch.equal(p, q)


def test_gradients_of_nan_that_nobody_masks() -> None:
    """Without found_inf they count, as in torch; what is kept in order is kept in order."""
    run = Run()
    for step in range(12):
        grads = make_grads(SHAPES, step)
        if step == 3:
            grads[0][2, 5] = float("nan")
        feed(run.optimizer, run.params, grads)
    assert columns(run.optimizer, run.params[0])["hot"].numel() == 2
    assert torch.isfinite(run.params[2]).all()
    assert int(torch.isnan(run.params[0]).sum()) == 1


def test_clocks_that_have_faded() -> None:
    """From some update on bias corrections are 1, and clocks that differ no longer matter: torch's bits all the same."""
    params, others = make_params([(16, 20)]), make_params([(16, 20)])
    optimizer = zenflow(params, topk_ratio=0.3, betas=(0.0, 0.5), **EACH_STEP)
    adamw = torch.optim.AdamW(others, lr=1e-2, betas=(0.0, 0.5), weight_decay=0.1, fused=True)
    for step in range(70):
        grads = make_grads([(16, 20)], step)
        feed(optimizer, params, grads)
        others[0].grad = grads[0].clone()
        adamw.step()
        assert torch.equal(params[0], others[0])


def test_a_session_forks_in_the_middle_of_a_window() -> None:
    """Each goes on alone, bit for bit; so does one that is not forked."""
    optimizer = sk.ZenFlow(lr=1e-2, topk_ratio=0.25, select_strategy="step", select_interval=4)
    sessions = [make_session(optimizer=optimizer, schedule=None, compile=False) for _ in range(2)]
    for session in sessions:
        session.run(6)
    twin = sessions[0].fork()
    for session in (*sessions, twin):
        session.run(7)
    assert_same_state(sessions[0], sessions[1])
    for a, b in zip(sessions[0].model.parameters(), twin.model.parameters()):
        assert torch.equal(a, b)


def test_gradients_set_to_zero_right_after_a_step() -> None:
    """zero_grad(set_to_none=False) writes where a copy may still be reading: `feed` fills with NaN, and so does this."""
    run = Run(link=throttled(gb_s=0.01))
    for p in run.params:
        p.grad = torch.zeros_like(p)
    for step in range(9):
        grads = make_grads(SHAPES, step)
        for p, g in zip(run.params, grads):
            assert p.grad is not None
            p.grad.copy_(g)
        run.optimizer.step()
        run.oracle.step(grads)
        run.optimizer.zero_grad(set_to_none=False)
        run.check()
    run.check(masters=True)


def test_under_a_gradient_scaler() -> None:
    """torch's GradScaler hands over its scale and its found_inf."""
    one, other = make_params([(16, 20)]), make_params([(16, 20)])
    optimizer = zenflow(one, topk_ratio=0.3, **EACH_STEP)
    adamw = torch.optim.AdamW(other, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3) for _ in range(2)]
    x = torch.randn(8, 20, generator=torch.Generator().manual_seed(0))
    for step in range(9):
        for scaler, p, each in ((scalers[0], one[0], optimizer), (scalers[1], other[0], adamw)):
            p.grad = None
            size = float("inf") if step == 4 else 1.0
            loss = (x @ p.t()).square().mean() * size
            scaler.scale(loss).backward()
            scaler.step(each)
            scaler.update()
    torch.testing.assert_close(one[0].detach(), other[0].detach(), atol=1e-5, rtol=1e-5)
    assert scalers[0].get_scale() == scalers[1].get_scale()


# -- states


@pytest.mark.parametrize(
    "change",
    [
        {"topk_ratio": 0.5},
        {"update_interval": 5},
        {"update_interval": "auto"},
        {"overlap_step": False},
        {"select_interval": 16},
        {"full_warm_up_rounds": 2},
        {"cold_update": "time-corrected", "overlap_step": False},
    ],
)
def test_a_state_of_other_settings_is_refused(change: dict[str, Any]) -> None:
    """With a sentence that names what differs, and nothing has changed."""
    run = Run(select_interval=8)
    for _ in range(7):
        run.step()
    state = copy.deepcopy(run.optimizer.state_dict())
    params = make_params(seed=4)
    other = zenflow(params, **{"select_interval": 8, **change})
    for step in range(3):
        feed(other, params, make_grads(SHAPES, step))
    before = copy.deepcopy(other.state_dict())
    with refused(ValueError) as caught:
        other.load_state_dict(state)
    assert str(caught.value).endswith(".")
    equal_trees(before, other.state_dict())
    feed(other, params, make_grads(SHAPES, 3))


def test_a_state_of_another_optimizer_or_other_shapes_is_refused() -> None:
    run = Run()
    for _ in range(5):
        run.step()
    adamw_params = make_params()
    adamw = sk.AdamW(adamw_params, lr=1e-2)
    feed(adamw, adamw_params, make_grads(SHAPES, 0))
    before = copy.deepcopy(run.optimizer.state_dict())
    with refused(ValueError):
        run.optimizer.load_state_dict(adamw.state_dict())
    equal_trees(before, run.optimizer.state_dict())
    shapes = [(16, 24), *SHAPES[1:]]
    others = make_params(shapes)
    other = zenflow(others)
    feed(other, others, make_grads(shapes, 0))
    with refused(ValueError):
        run.optimizer.load_state_dict(other.state_dict())
    run.step()
    run.check(masters=True)


def test_a_state_is_taken_by_an_optimizer_that_has_run() -> None:
    """Nothing of its own past is left: jobs, slots, statistics."""
    for options in ({"select_interval": 8}, {"select_interval": 8, "update_interval": "auto"}):
        source = Run(**options)
        states = []
        for _ in range(16):
            source.step()
            states.append((copy.deepcopy(source.optimizer.state_dict()), [p.detach().clone() for p in source.params]))
        used = Run(**options, seed=3)
        for _ in range(6):
            used.step()
        for at in (2, 7, 3, 8):
            state, shown = states[at]
            used.optimizer.load_state_dict(state)
            for p, value in zip(used.params, shown):
                p.data.copy_(value)
            for step in range(at + 1, 16):
                feed(used.optimizer, used.params, make_grads(SHAPES, step))
                for p, q in zip(used.params, states[step][1]):
                    assert torch.equal(p, q), (at, step)
            equal_trees(used.optimizer.state_dict(), states[-1][0])


def test_a_state_before_the_first_step() -> None:
    one, other = make_params(), make_params()
    fresh, loaded = zenflow(one), zenflow(other)
    loaded.load_state_dict(fresh.state_dict())
    for step in range(6):
        feed(fresh, one, make_grads(SHAPES, step))
        feed(loaded, other, make_grads(SHAPES, step))
    for p, q in zip(one, other):
        assert torch.equal(p, q)


def test_a_saved_state_does_not_change_later() -> None:
    """A state that is written while training goes on, or kept in memory, is that of its step; torch's own are views."""
    run = Run()
    for _ in range(6):
        run.step()
    state = run.optimizer.state_dict()
    held = copy.deepcopy(state)
    again = run.optimizer.state_dict()
    equal_trees(held, again)


def test_options_are_checked() -> None:
    p = make_params([(4, 6)])
    wrong: list[dict[str, Any]] = [
        {"topk_ratio": -0.1},
        {"topk_ratio": 1.5},
        {"topk_ratio": float("nan")},
        {"update_interval": 0},
        {"update_interval": 2.5},
        {"update_interval": "often"},
        {"select_interval": 0},
        {"select_interval": "never"},
        {"select_strategy": "sometimes"},
        {"select_strategy": "epoch"},
        {"full_warm_up_rounds": -1},
        {"auto_ratio": 1.1},
        {"max_interval": 0},
        {"pt_reserved_cores_perc": -1},
        {"cold_update": "exact"},
        {"cold_update": "time-corrected"},
        {"steps_per_epoch": 0},
        {"offload": True},
        {"slots": 0},
        {"lr": -1.0},
        {"lr": float("nan")},
        {"betas": (0.9, 1.0)},
        {"eps": -1e-8},
        {"weight_decay": -0.1},
    ]
    for options in wrong:
        for params in ((p,), ()):
            with refused(ValueError):
                pytest.fail(f"taken: {sk.ZenFlow(*params, **options)}")
    with pytest.raises(TypeError, match="topk"):
        sk.ZenFlow(topk=0.1)


@pytest.mark.parametrize("slots", [1, 2, 7])
def test_the_ring_changes_no_number(slots: int) -> None:
    one, other = make_params(), make_params()
    small, usual = zenflow(one, slots=slots, link=throttled()), zenflow(other)
    for step in range(13):
        feed(small, one, make_grads(SHAPES, step))
        feed(usual, other, make_grads(SHAPES, step))
        for p, q in zip(one, other):
            assert torch.equal(p, q)


@pytest.mark.parametrize(
    ("strategy", "options", "steps"),
    [
        ("auto", {}, [1, 101]),
        ("auto", {"steps_per_epoch": 30}, [1, 33, 65, 97]),
        ("step", {"select_interval": 10}, list(itertools.takewhile(lambda k: k < 110, range(1, 110, 12)))),
        ("epoch", {"select_interval": 2, "steps_per_epoch": 18}, [1, 37, 73, 109]),
    ],
)
def test_when_hot_columns_are_chosen(strategy: str, options: dict[str, Any], steps: list[int]) -> None:
    """The first step from which a set holds: every so many steps or epochs, in whole windows of 4."""
    p = make_params([(2, 111)])
    optimizer: Any = sk.ZenFlow(p, lr=1e-3, select_strategy=strategy, topk_ratio=0.01, **options)
    seen = []
    hot: list[int] = [0]
    for step in range(1, 110):
        g = torch.full((2, 111), 0.1)
        g[:, step] = 1.0
        feed(optimizer, p, [g])
        optimizer.state_dict()
        now = optimizer.state[p[0]]["hot"].tolist()
        if now != hot:
            seen.append(step)
        hot = now
    assert seen == steps


# -- the synchronous control


def test_the_control_beside_adamw() -> None:
    """Masks, scales, missing gradients, other groups; saved, copied, delayed."""
    ours, theirs = make_params(), make_params()
    optimizer: Any = sk.OffloadAdamW(ours, lr=1e-2, link=throttled())
    adamw = sk.AdamW(theirs, lr=1e-2)
    for step in range(16):
        grads: list[Tensor | None] = list(make_grads(SHAPES, step))
        if step % 3 == 1:
            grads[step % 4] = None
        finite = step % 5 != 3
        if not finite:
            grads = [None if g is None else torch.full_like(g, float("nan")) for g in grads]
        both(step, ours, theirs, optimizer, adamw, grads, scale=1.0 + step % 2, finite=finite, lr=1e-2 / (1 + step))
        if step == 6:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = sk.OffloadAdamW(ours, lr=1e-2)
            optimizer.load_state_dict(state)
        if step == 9:
            ours, optimizer = copy.deepcopy((ours, optimizer))
        same(ours, theirs)


def test_the_control_with_low_precision_keeps_a_master() -> None:
    ours, wide = (
        make_params(dtype=torch.bfloat16),
        [nn.Parameter(p.detach().float()) for p in make_params(dtype=torch.bfloat16)],
    )
    optimizer, adamw = sk.OffloadAdamW(ours, lr=1e-4), sk.AdamW(wide, lr=1e-4)
    for step in range(30):
        grads = make_grads(SHAPES, step, torch.bfloat16)
        feed(optimizer, ours, grads)
        feed(adamw, wide, [g.float() for g in grads])
    for p, q in zip(ours, wide):
        torch.testing.assert_close(p.detach(), q.detach().to(torch.bfloat16), atol=0, rtol=2**-8)
        torch.testing.assert_close(optimizer.state[p]["master"].view(p.shape), q.detach(), atol=1e-6, rtol=1e-6)
