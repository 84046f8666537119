"""ZenFlow as its users meet it: what it equals, what it promises, and what it says when something is wrong.

Every invariant of the algorithm is held against a model of it in test_invariants.py.
"""

import copy
import functools
import inspect
import io
import os
import random
import signal
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import surokit as sk
from surokit.errors import OffloadError
from surokit.kernels.reference import columns as kernels
from surokit.offload import columns as columns_module
from surokit.offload import pipeline, workers
from surokit.offload.columns import HOST, Columns
from surokit.offload.link import HostLink, ThrottledLink
from surokit.offload.rows import update_rows_
from surokit.offload.workers import Worker
from surokit.offload.zenflow import ZenFlow
from surokit.optim.spec import Spec, spec_from_dict, spec_to_dict
from tests.clocks import until
from tests.offload.runs import waits
from tests.refusals import refused

SHAPES = ((16, 20), (32, 48), (8, 3, 2), (7,))
OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-8}


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def give_gradients(params, step):
    """The same for the same step; columns differ in size."""
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        size = torch.rand(p.shape[1:], generator=generator) if p.ndim > 1 else 1.0
        p.grad = (torch.randn(p.shape, generator=generator) * size).to(p.dtype)


def train(params, optimizer, first, last, bad=(), scale=None):
    for step in range(first, last):
        give_gradients(params, step)
        optimizer.grad_scale = None if scale is None else torch.tensor(scale)
        optimizer.found_inf = torch.tensor(float(step in bad))
        optimizer.step()
    return [p.detach().clone() for p in params]


def zenflow(dtype=torch.float32, **options) -> tuple[list[nn.Parameter], ZenFlow]:
    params = parameters(dtype)
    return params, ZenFlow(params, **{**OPTIONS, **options})


def adamw(steps, skip=(), scale=1.0):
    """torch's, in float32."""
    params = parameters()
    groups = [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, **OPTIONS)
    for step in range(steps):
        give_gradients(params, step)
        for p in params:
            p.grad /= scale
        if step not in skip:
            optimizer.step()
    return [p.detach() for p in params]


def largest_difference(a, b):
    return max(float((x - y).abs().max()) for x, y in zip(a, b))


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b))


# -- what it equals


def test_with_every_column_hot_it_is_adamw_bit_by_bit():
    params, optimizer = zenflow(topk_ratio=1.0)
    found = train(params, optimizer, 0, 20)
    assert largest_difference(found, adamw(20)) < 2e-6
    for p, start, got in zip(params, parameters(), found):
        rows = start.detach().flatten(1).t().contiguous() if p.ndim > 1 else start.detach().view(1, -1)
        m, v, clocks = torch.zeros_like(rows), torch.zeros_like(rows), torch.zeros(len(rows), dtype=torch.int32)
        decay = 0.1 if p.ndim > 1 else 0.0
        for step in range(20):
            give_gradients(params, step)
            assert p.grad is not None
            g = p.grad.flatten(1).t().contiguous() if p.ndim > 1 else p.grad.view(1, -1)
            update_rows_(rows, m, v, g, clocks, **{**OPTIONS, "weight_decay": decay})
        assert torch.equal(got.flatten(1).t() if p.ndim > 1 else got.view(1, -1), rows)


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("interval", [1, 3])
def test_without_deferral_it_is_adamw_whatever_is_selected(ratio, interval):
    options = {"topk_ratio": ratio, "update_interval": 1, "overlap_step": False, "select_interval": interval}
    found = train(*zenflow(**options), 0, 30, bad=(7,), scale=2.0)
    assert largest_difference(found, adamw(30, skip=(7,), scale=2.0)) < 3e-6


def test_a_warm_up_is_adamw():
    found = train(*zenflow(topk_ratio=0.1, full_warm_up_rounds=30), 0, 12)
    assert largest_difference(found, adamw(12)) < 2e-6


def test_deferral_defers():
    params, optimizer = zenflow(topk_ratio=0.1, update_interval=4, overlap_step=True)
    start = parameters()[1].detach()
    changed = []
    for step in range(9):
        after = train(params, optimizer, step, step + 1)[1]
        changed.append(int((after != start).any(0).sum()))
    hot = 4  # of 48
    assert changed == [hot] * 7 + [48] * 2  # the first window lands where the second ends


# -- what it promises


def test_a_step_that_is_not_finite_counts_nowhere():
    params, optimizer = zenflow(update_interval=2, overlap_step=False, select_interval=2)
    train(params, optimizer, 0, 3)

    def seen():
        names = ("w_hot", "m_hot", "v_hot", "t_hot", "w", "m", "v", "t_cold", "hot", "cold")
        states = [optimizer.state[p][name] for p in params for name in names if name in optimizer.state[p]]
        return [x.detach().clone() for x in [*params, *states]]

    def not_finite():
        for p in params:
            p.grad = torch.full_like(p, torch.nan)
        optimizer.found_inf = torch.ones(())
        optimizer.step()

    before = params[0].detach().clone()
    not_finite()  # the window's second step: the first is all of it
    cold = optimizer.state[params[0]]["cold"].long()
    assert (params[0].detach() != before)[:, cold].all()
    before = seen()
    for _ in range(4):
        not_finite()
    assert same(seen(), before)
    assert all(p.isfinite().all() for p in train(params, optimizer, 8, 12))


@pytest.mark.parametrize("masked", [0, 7])
def test_a_choice_that_falls_on_a_step_that_is_not_finite_is_made_at_the_next_window_s_end(masked):
    """The first choice, and one at the end of the second window."""
    params, optimizer = zenflow(topk_ratio=0.25, update_interval=4, select_interval=8 if masked else 100)
    last = 11 if masked else 3  # step of the window that ends next
    train(params, optimizer, 0, last + 2, bad=(masked,))  # what it chooses holds from the step after it
    optimizer.drain()
    hot = [sorted(optimizer.state[p]["hot"].tolist()) for p in params[:2]]
    give_gradients(params, last)
    scores = [p.grad.square().sum(0) for p in params[:2] if p.grad is not None]
    assert hot == [sorted(x.topk(len(x) // 4).indices.tolist()) for x in scores]


@pytest.mark.parametrize("overlap", [False, True])
def test_traffic_and_ages_are_the_formula_s(overlap):
    S, k, link = 4, 0.25, ThrottledLink(5.0)
    params = [nn.Parameter(torch.randn(16, 32, dtype=torch.bfloat16))]
    optimizer = ZenFlow(params, topk_ratio=k, update_interval=S, overlap_step=overlap, select_interval=40, link=link)
    for _ in range(41):
        params[0].grad = torch.randn(16, 32, dtype=torch.bfloat16)
        optimizer.step()
    accounts, model = optimizer.accounts, params[0].nbytes
    assert accounts.model_bytes == model
    down, up = accounts.bytes["gradients"][0], accounts.bytes["weights"][1]
    assert (down, up) == (41 * (1 - k) * model, 10 * (1 - k) * model)
    moved, back = accounts.bytes["migration"]
    entered = [chosen.entered for chosen in accounts.choices[params[0]]]
    assert moved == back == sum(entered) * 16 * 12
    assert len(entered) == 2
    assert link.bytes_down == down + moved + accounts.bytes["setup"][0]
    assert link.bytes_up == up + back
    ages = {age for age, elements in accounts.staleness.items() if elements}
    assert max(ages) == (2 * S - 1 if overlap else S - 1)
    assert sum(accounts.staleness.values()) == 41 * k * 16 * 32 + 40 * (1 - k) * 16 * 32
    assert accounts.intervals == {S: 10}


@pytest.mark.parametrize("overlap", [False, True])
def test_of_masked_steps_the_ages_have_hot_elements_only(overlap):
    params, optimizer = zenflow(topk_ratio=0.25, overlap_step=overlap)
    train(params, optimizer, 0, 13, bad=range(5, 13))
    hot = sum(optimizer.state[p]["w_hot"].numel() for p in params)
    cold = sum(p.numel() for p in params) - hot
    assert optimizer.accounts.staleness.total() == 13 * hot + 5 * cold


def test_a_parameter_without_a_gradient_waits_for_its_own():
    params, optimizer = zenflow(update_interval=1, overlap_step=False, topk_ratio=0.2)
    again = parameters()
    torch_s = torch.optim.AdamW([{"params": again[:3]}, {"params": again[3:], "weight_decay": 0.0}], **OPTIONS)
    for step in range(12):
        for group, each in ((params, optimizer), (again, torch_s)):
            give_gradients(group, step)
            group[step % 3].grad = None
            each.step()
    assert largest_difference([p.detach() for p in params], [p.detach() for p in again]) < 3e-6


def test_groups_that_are_not_offloaded_and_vectors_are_hot_as_a_whole():
    params = parameters()
    optimizer = ZenFlow([{"params": params[:1], "offload": False}, {"params": params[1:]}], **OPTIONS)
    train(params, optimizer, 0, 2)
    assert "w" not in optimizer.state[params[0]]
    assert "w" not in optimizer.state[params[3]]
    assert optimizer.state[params[1]]["w"].shape == (44, 32)


def test_the_window_s_last_learning_rate_counts_for_cold_columns():
    for corrected, rate in ((False, 0.3), (True, 0.4)):
        p = nn.Parameter(torch.zeros(4, 10))
        options = {"overlap_step": False, "cold_update": "time-corrected"} if corrected else {"overlap_step": False}
        optimizer = ZenFlow([p], lr=torch.tensor(0.1), weight_decay=0.0, eps=0.0, update_interval=2, **options)
        for lr in (0.1, 0.3):
            optimizer.param_groups[0]["lr"].fill_(lr)
            p.grad = torch.ones_like(p)
            optimizer.step()
        assert p.detach()[:, 1:].tolist() == [pytest.approx([-rate] * 9)] * 4


def test_selection_happens_where_it_is_asked_for():
    def every(**options):
        return ZenFlow(parameters(), **options).select_every

    assert every() == 100
    assert every(update_interval=7) == 105  # whole windows
    assert every(steps_per_epoch=30) == 32
    assert every(select_interval=8) == 8
    assert every(select_strategy="step", select_interval=9) == 12
    assert every(select_strategy="epoch", select_interval=2, steps_per_epoch=50) == 100
    assert every(select_interval=9, update_interval="auto") == 9


# -- what a CUDA device would make the host wait for


class Reads(TorchDispatchMode):
    """Refuses what reads a value that comes from the device: told by memory, from `of` on through every operation."""

    WAIT = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_consecutive")

    def __init__(self, *of):
        super().__init__()
        self.memory = {x.untyped_storage()._cdata: x for x in of}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, torch.Tensor)]
        on_device = any(x.untyped_storage()._cdata in self.memory for x in given)
        name = func._schema.name.removeprefix("aten::")
        masks = any(x.dtype == torch.bool for x in given) and name in ("index", "index_put", "index_put_")
        if on_device and (name in self.WAIT or masks):
            raise RuntimeError(f"the host would wait for the device: {name}")
        out = func(*args, **(kwargs or {}))
        if on_device:
            written = [x for x, a in zip(args, func._schema.arguments) if a.alias_info and a.alias_info.is_write]
            for x in tree_leaves((out, written, (kwargs or {}).get("out"))):
                if isinstance(x, torch.Tensor):
                    self.memory[x.untyped_storage()._cdata] = x
        return out


class Wire(HostLink):
    """What goes down it may be read by the host."""

    def down(self, fill, to, reads=()):
        staging = torch.empty_like(to)
        fill(staging)
        return self.copy_down(staging, to)

    def copy_down(self, value, to):
        with _disable_current_modes():
            return super().copy_down(value, to)


@pytest.mark.parametrize("interval", [2, "auto"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_reads_nothing_from_the_device(interval, overlap, monkeypatch):
    def as_on_a_device(*states, betas, **options):
        kernels.update_columns_(*states, beta1=betas[0], beta2=betas[1], **options)

    monkeypatch.setattr(columns_module, "update_columns_", as_on_a_device)
    options = {
        "update_interval": interval,
        "overlap_step": overlap,
        "select_interval": 2,
        "topk_ratio": 0.3,
        "max_interval": 4,
    }
    params, optimizer = zenflow(**options, link=Wire())
    for step in range(9):
        give_gradients(params, step)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(float(step == 3))
        device = [*params, *(p.grad for p in params), optimizer.grad_scale, optimizer.found_inf]
        states = [x for state in optimizer.state.values() for name, x in state.items() if name not in HOST]
        with Reads(*device, *states) as reads:
            optimizer.step()
            with refused(RuntimeError):
                (params[0].detach() * 2).sum().item()
        assert len(reads.memory) > len(device) + len(states)
    assert sum(len(found) for found in optimizer.accounts.choices.values()) > 3


# -- delays, copies, checkpoints


@pytest.fixture
def slow_threads(monkeypatch):
    def delay():
        return random.random() * 3e-4

    monkeypatch.setattr(pipeline, "Worker", functools.partial(Worker, delay=delay))
    return delay


@pytest.mark.parametrize("interval", [1, 3, "auto"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_run_goes_on_bit_by_bit_from_any_step_however_slow_its_threads(interval, overlap, slow_threads):
    options = {
        "topk_ratio": 0.3,
        "update_interval": interval,
        "overlap_step": overlap,
        "select_interval": 6,
        "max_interval": 5,
    }
    bad, last = (5, 12), 19
    expected = train(*zenflow(**options), 0, last, bad)
    for cut in (1, 6, 13):
        params, optimizer = zenflow(**options, link=ThrottledLink(0.1, 1e-5, slow_threads, late_fill=True))
        train(params, optimizer, 0, cut, bad)
        twin_params, twin = copy.deepcopy((params, optimizer))
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        new_params, new = zenflow(**options)
        for p, saved in zip(new_params, params):
            p.data.copy_(saved)
        file.seek(0)
        new.load_state_dict(torch.load(file, weights_only=True))
        for each in ((params, optimizer), (twin_params, twin), (new_params, new)):
            assert same(train(*each, cut, last, bad), expected), cut
        optimizer.link.close()
        twin.link.close()


def test_a_state_that_does_not_fit_is_refused_and_nothing_changes():
    params, optimizer = zenflow(update_interval=2)
    train(params, optimizer, 0, 3)
    state = copy.deepcopy(optimizer.state_dict())
    with refused(ValueError):
        optimizer.load_state_dict(torch.optim.AdamW(parameters()).state_dict())
    with refused(ValueError):
        zenflow(update_interval=4)[1].load_state_dict(state)
    other = ZenFlow([nn.Parameter(torch.randn(16, 21)), *parameters()[1:]], **OPTIONS, update_interval=2)
    with refused(ValueError):
        other.load_state_dict(state)
    assert not any(other.state.values())
    other_run = train(*zenflow(update_interval=2), 0, 8)
    assert same(train(params, optimizer, 3, 8), other_run)


@pytest.mark.parametrize("stop", [3, 4, 5])
def test_a_state_of_bfloat16_weights_serves_float32_ones(stop):
    """Their cold columns are not rounded to bfloat16, in the middle of a window or with an update on its way."""
    params, low = zenflow(torch.bfloat16, update_interval=2)
    train(params, low, 0, stop)
    wide, optimizer = zenflow(update_interval=2)
    optimizer.load_state_dict(low.state_dict())
    train(wide, optimizer, stop, 10)
    optimizer.drain()
    for p in wide[:2]:
        state = optimizer.state[p]
        assert state["out"].dtype == torch.float32
        digits = p.detach()[:, state["cold"].long()]
        assert not torch.equal(digits, digits.bfloat16().float())


def test_a_specification_survives_a_checkpoint():
    spec = sk.ZenFlow(lr=1e-3, betas=(0.9, 0.99), topk_ratio=0.2, update_interval="auto", link=HostLink())
    assert isinstance(spec, Spec)
    again = spec_from_dict(spec_to_dict(spec, spec.build(parameters())))
    assert again.optimizer is ZenFlow
    assert again.options == {"lr": 1e-3, "betas": (0.9, 0.99), "topk_ratio": 0.2, "update_interval": "auto"}
    with refused(ValueError):
        spec_from_dict({"name": "Newer", "options": {}})


# -- in a session


def session(**options):
    torch.manual_seed(0)
    model = sk.Decoder(sk.DecoderConfig(layers=1, width=32, heads=2, kv_heads=1, vocab=64, ffn=48))
    ids = torch.randint(64, (8, 2, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": i, "labels": i} for i in ids]
    return sk.Session(model, data, optimizer=sk.ZenFlow(lr=1e-2, update_interval=3, select_interval=3), **options), data


def test_a_session_goes_on_from_its_checkpoint_and_has_twins(tmp_path):
    run, data = session(run_dir=tmp_path)
    run.run(7)
    run.save()
    twin = run.fork()
    for each in (run, twin):
        each.run(5)
    resumed = sk.Session.resume(tmp_path, data=data)
    resumed.run(5)
    losses = [[record.loss for record in list(each.records)[-5:]] for each in (run, twin, resumed)]
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("overlap", [False, True])
def test_an_optimizer_over_other_parameters_takes_state_over(overlap):
    options = {"update_interval": 3, "overlap_step": overlap}
    params = parameters()
    first = ZenFlow(params[:2], **OPTIONS, **options)
    train(params[:2], first, 0, 5)  # with overlap one window waits to land; another has begun
    params, first = copy.deepcopy((params, first))
    second = ZenFlow(params[1:], **{**OPTIONS, "lr": 0.0}, **options)
    second.state[params[1]] = first.state[params[1]]
    train(params[1:], second, 5, 6)
    second.drain()  # a thread writes the state of columns that change sides
    state = second.state[params[1]]
    assert torch.equal(params[1].detach()[:, state["cold"].long()], state["w"].t())
    assert max(state["t_hot"].max(), state["t_cold"].max()) >= 5
    assert all(p.isfinite().all() for p in train(params[1:], second, 6, 14))


def test_a_session_has_a_twin_with_an_adapter():
    run, _ = session()
    run.run(5)
    twin = run.fork(recipe=sk.BF16.lora(4))
    twin.run(8)
    losses = [record.loss for record in twin.records]
    assert losses[-1] < losses[0]
    assert twin.optimizer.accounts.steps == 8


# -- when something is wrong


class Broken:
    def done(self):
        return True

    def wait(self):
        raise RuntimeError("the wire broke")


class Failing(HostLink):
    """Raises in the thread that waits for the transfer number `at`."""

    def __init__(self, at):
        super().__init__()
        self.left = at

    def down(self, fill, to, reads=()):
        ticket = super().down(fill, to, reads)
        self.left -= 1
        if not self.left:
            return Broken()
        return ticket


@pytest.mark.parametrize(
    "noticed", [lambda params, optimizer: train(params, optimizer, 3, 4), lambda _, o: o.state_dict()]
)
def test_a_thread_s_error_surfaces_at_the_next_step_and_a_state_mends_it(noticed):
    params, optimizer = zenflow(
        update_interval=4, link=Failing(13)
    )  # of the first step's gradients 3, before them 3 of setup
    train(params, optimizer, 0, 2)
    state, weights = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in params]
    give_gradients(params, 2)
    optimizer.step()
    filled: Any = optimizer._window.filled
    until(filled.done)
    with refused(OffloadError):
        noticed(params, optimizer)
    with refused(OffloadError):
        train(params, optimizer, 3, 4)
    with refused(OffloadError):
        optimizer.state_dict()
    for p, before in zip(params, weights):
        p.data.copy_(before)
    optimizer.load_state_dict(state)
    assert same(train(params, optimizer, 2, 9), train(*zenflow(update_interval=4), 0, 9))


class Hanging(HostLink):
    """Transfer number `at` and what comes after it does not arrive before it is mended."""

    def __init__(self, at):
        super().__init__()
        self.left, self.mended = at, threading.Event()

    def down(self, fill, to, reads=()):
        ticket, self.left, mended = super().down(fill, to, reads), self.left - 1, self.mended

        class Never:
            done = mended.is_set

            def wait(self):
                while not mended.wait(1e-3):
                    workers.beat()

        return ticket if self.left > 0 else Never()


def test_a_state_is_loaded_at_once_where_a_transfer_hangs():
    link = Hanging(13)
    params, optimizer = zenflow(update_interval=4, link=link)
    train(params, optimizer, 0, 2)
    state, weights = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in params]
    train(params, optimizer, 2, 4)  # the accumulator waits, and AdamW for it
    optimizer.load_state_dict(state)  # or it would hang
    link.mended.set()
    with torch.no_grad():
        for p, before in zip(params, weights):
            p.copy_(before)
    assert same(train(params, optimizer, 2, 9), train(*zenflow(update_interval=4), 0, 9))


def test_a_link_of_another_device_is_refused_as_that():
    class Elsewhere(HostLink):
        def __init__(self):
            super().__init__()
            self.device = torch.device("meta")

    for kind in (ZenFlow, sk.OffloadAdamW):
        params = parameters()
        optimizer: Any = kind(params, link=Elsewhere())
        give_gradients(params, 0)
        with refused(ValueError):
            optimizer.step()


class Pressed(HostLink):
    """Presses Ctrl-C in transfer number `at`."""

    def __init__(self, at):
        super().__init__()
        self.left = at

    def down(self, fill, to, reads=()):
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGINT)
        return super().down(fill, to, reads)


@pytest.mark.parametrize("at", [1, 4, 8, 20])
def test_a_ctrl_c_during_a_step_is_raised_when_it_is_complete(at):
    params, optimizer = zenflow(update_interval=2, link=Pressed(at))
    with pytest.raises(KeyboardInterrupt):
        train(params, optimizer, 0, 20)
    done = optimizer.accounts.steps
    assert 0 < done < 20
    assert same(train(params, optimizer, done, 20), train(*zenflow(update_interval=2), 0, 20))


def test_a_second_ctrl_c_does_not_wait():
    params, optimizer = zenflow(update_interval=2, link=ThrottledLink(1.0))
    train(params, optimizer, 0, 2)

    main, gate, accumulator = threading.get_ident(), threading.Event(), optimizer._crew.accumulator

    def busy():
        while not gate.wait(0.01):
            workers.beat()

    def press():
        until(lambda: waits(main, accumulator))  # which ends with the gate only
        handler: Any = signal.getsignal(signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        until(lambda: inspect.getclosurevars(handler).nonlocals["held"])  # two at once would be one
        os.kill(os.getpid(), signal.SIGINT)

    accumulator.submit(busy)
    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        train(params, optimizer, 2, 12)
    assert not gate.is_set()
    pressing.join()
    gate.set()
    assert all(p.isfinite().all() for p in train(params, optimizer, 12, 16))
    optimizer.link.close()


def test_a_thread_that_hangs_leaves_none_that_goes_on(monkeypatch):
    params, optimizer = zenflow(update_interval=2)
    train(params, optimizer, 0, 4)
    crew = optimizer._crew
    adam: Any = crew.adam._shared

    def hangs(at_once):
        raise OffloadError("it hangs")

    monkeypatch.setattr(crew.accumulator, "close", hangs)
    optimizer.close()
    adam.thread.join(5)
    assert not adam.thread.is_alive()


class Once(ThrottledLink):
    """Its method `name` fails in the call number `at`; and then no more."""

    def __init__(self, name, at):
        super().__init__(5.0)
        self.left, inner = at, getattr(self, name)

        def fails(*args, **options):
            self.left -= 1
            if not self.left:
                raise RuntimeError("the wire broke")
            return inner(*args, **options)

        setattr(self, name, fails)


@pytest.mark.parametrize(("name", "at"), [("down", 14), ("up", 4), ("fetch", 4), ("copy_down", 7), ("fence", 9)])
def test_after_an_error_in_the_middle_of_a_step_a_state_has_to_be_loaded(name, at):
    options: dict[str, Any] = {"update_interval": 2, "select_strategy": "step", "select_interval": 4}
    params, optimizer = zenflow(**options, link=Once(name, at))
    done, state, weights = 0, {}, []

    def go_on():
        nonlocal done, state, weights
        while done < 20:
            state, weights = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in params]
            train(params, optimizer, done, done + 1)
            done += 1

    with refused(RuntimeError):
        go_on()
    for use in (lambda: train(params, optimizer, done, done + 1), optimizer.state_dict):
        with refused(OffloadError) as raised:
            use()
        assert "the wire broke" in str(raised.value.__cause__)
    optimizer.load_state_dict(state)
    with torch.no_grad():
        torch._foreach_copy_(list(params), weights)
    assert 0 < done < 14
    assert same(train(params, optimizer, done, 14), train(*zenflow(**options), 0, 14))


def test_what_is_refused_before_anything_changes_breaks_nothing():
    params, optimizer = zenflow(update_interval=2)
    late = nn.Parameter(torch.ones(4, 4))
    optimizer.add_param_group({"params": [late]})
    train(params, optimizer, 0, 3)
    late.grad = torch.ones(4, 4).to_sparse()
    with refused(ValueError):
        optimizer.step()
    late.grad = None
    assert same(train(params, optimizer, 3, 8), train(*zenflow(update_interval=2), 0, 8))


def test_memory_that_runs_out_in_the_middle_of_a_step_is_survived(monkeypatch):
    params, optimizer = zenflow(update_interval=2)
    train(params, optimizer, 0, 4)
    update, left = Columns.update_hot, [2]

    def scarce(self, *args):
        left[0] -= 1
        if not left[0]:
            raise torch.OutOfMemoryError("no room")
        return update(self, *args)

    monkeypatch.setattr(Columns, "update_hot", scarce)
    with pytest.raises(torch.OutOfMemoryError):
        train(params, optimizer, 4, 5)
    train(params, optimizer, 5, 12)
    clocks = optimizer.state[params[0]]
    assert clocks["t_cold"].max() <= 12
    assert sum(optimizer.accounts.intervals[n] * n for n in optimizer.accounts.intervals) == 12


def test_memory_that_runs_out_before_the_first_step_leaves_nothing(monkeypatch):
    params, optimizer = zenflow()
    begin, left = Columns.begin, [3]

    def scarce(self, *args):
        left[0] -= 1
        if not left[0]:
            raise torch.OutOfMemoryError("no room")
        return begin(self, *args)

    monkeypatch.setattr(Columns, "begin", scarce)
    with pytest.raises(torch.OutOfMemoryError):
        train(params, optimizer, 0, 1)
    assert not any(optimizer.state.values())
    assert same(train(params, optimizer, 0, 5), train(*zenflow(), 0, 5))


@pytest.mark.parametrize("make", [sk.ZenFlow, sk.OffloadAdamW])
def test_a_group_may_be_empty_and_numbers_numpys(make):
    params = parameters()
    optimizer = make([{"params": []}, {"params": params}], pt_reserved_cores_perc=np.float64(0.5))
    before = [p.detach().clone() for p in params]
    train(params, optimizer, 0, 2)
    assert not any(torch.equal(p, q) for p, q in zip(params, before))


@pytest.mark.parametrize(
    "options",
    [
        {"topk_ratio": 1.5},
        {"auto_ratio": -0.1},
        {"pt_reserved_cores_perc": 2},
        {"update_interval": 0},
        {"update_interval": "often"},
        {"select_interval": 0},
        {"max_interval": 0},
        {"slots": 0},
        {"slots": 2.5},
        {"max_interval": "auto"},
        {"steps_per_epoch": 0},
        {"topk_ratio": "auto"},
        {"full_warm_up_rounds": -1},
        {"full_warm_up_rounds": 1.5},
        {"select_strategy": "never"},
        {"select_strategy": "epoch"},
        {"cold_update": "late"},
        {"cold_update": "time-corrected"},
        {"offload": True},
        {"lr": -1.0},
        {"link": "pcie"},
        {"slots": True},
        {"overlap_step": "no"},
        {"offload": "no"},
        {"topk_ratio": True},
        {"betas": 0.9},
        {"lr": torch.ones((), device="meta")},
    ],
)
def test_options_out_of_range_are_named_when_they_are_given(options):
    with refused(ValueError):
        sk.ZenFlow(**options)
    with refused(ValueError):
        ZenFlow(parameters(), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"offload": "no"},
        {"topk_ratio": 0.5},
        {"slots": 2},
        {"link": None},
    ],
)
def test_options_of_a_group_are_those_that_a_group_may_have(options):
    first, *others = parameters()
    with refused(ValueError):
        ZenFlow([{"params": [first], **options}, {"params": others}])
    optimizer = ZenFlow(others)
    with refused(ValueError):
        optimizer.add_param_group({"params": [first], **options})
    optimizer.add_param_group({"params": [first], "offload": False, "lr": 1e-4})


def test_a_session_says_why_its_steps_are_not_recorded():
    from surokit.train.capture import why_not

    class OnCuda(nn.Module):
        def parameters(self, recurse: bool = True) -> Any:
            yield SimpleNamespace(device=torch.device("cuda", 0))

    assert why_not(OnCuda(), ZenFlow(parameters())) == f"ZenFlow is not recorded: {ZenFlow.not_recorded}"
    assert why_not(OnCuda()) == ""
    assert "CUDA device" in why_not(nn.Linear(2, 2), ZenFlow(parameters()))
