"""The invariants of stall-free offload, each by its number.

What an optimizer should do is told by tests/offload/oracle.py, by torch.optim.AdamW or by arithmetic; the device pair is
simulated by a throttled link whose copies, and workers whose jobs, take random times. Arithmetic of one column is the same
wherever it happens, so that "bitwise" means torch's fused kernel on each column.
"""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import surokit as sk
from surokit import texts
from surokit.errors import OffloadError
from surokit.offload import pipeline
from surokit.offload.link import HostLink, PendingCopy
from surokit.offload.workers import Job, Worker
from tests.clocks import until
from tests.offload.oracle import Oracle, hot_columns
from tests.offload.ranks import CASES, halves, loss_of, make_model, options_of
from tests.offload.ranks import STEPS as RANK_STEPS
from tests.offload.runs import (
    SHAPES,
    Run,
    Shape,
    close,
    columns,
    equal_runs,
    equal_trees,
    feed,
    make_grads,
    make_params,
    settings_of,
    slow_workers,
    throttled,
    waits,
)
from tests.processes import found_by
from tests.refusals import refused
from tests.train.ranks import RANKS

NO_OVERLAP: dict[str, Any] = {"overlap_step": False}
EACH_STEP: dict[str, Any] = {"update_interval": 1, "overlap_step": False}
LR = 1e-2
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class ByColumn:
    """torch's fused AdamW in float32 with each column of a weight as a tensor of its own, shown in the weights' dtype."""

    def __init__(self, params: list[nn.Parameter], lr: float = LR, weight_decay: float = 0.1) -> None:
        self.shown = [p.detach().clone() for p in params]
        self.masters = []
        groups = []
        for p in self.shown:
            rows = p.flatten(1).t().float() if p.dim() > 1 else p.float()[None]
            own = [nn.Parameter(row.clone()) for row in rows]
            self.masters.append(own)
            groups.append({"params": own, "weight_decay": weight_decay if p.dim() > 1 else 0.0})
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=True)

    def step(self, grads: list[Tensor | None], lr: float | None = None) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] if lr is None else lr
        for shown, own, g in zip(self.shown, self.masters, grads):
            rows = None if g is None else g.flatten(1).t().float() if shown.dim() > 1 else g.float()[None]
            for i, row in enumerate(own):
                row.grad = None if rows is None else rows[i].clone()
        self.optimizer.step()
        for shown, own in zip(self.shown, self.masters):
            whole = torch.stack([row.detach() for row in own])
            shown.copy_((whole.t() if shown.dim() > 1 else whole[0]).reshape(shown.shape))


def follows_adamw(steps: int = 12, dtype: torch.dtype = torch.float32, bitwise: bool = True, **options: Any) -> Run:
    """A run that shows what AdamW shows, after every step."""
    run = Run(dtype=dtype, **options)
    adamw = ByColumn(run.params)
    for step in range(steps):
        grads = make_grads(run.shapes, step, dtype)
        run.step(grads, LR * (1 + step % 3))
        adamw.step(list(grads), LR * (1 + step % 3))
        for p, shown in zip(run.params, adamw.shown):
            if bitwise:
                assert torch.equal(p, shown)
            else:
                torch.testing.assert_close(p.detach(), shown, atol=1e-6, rtol=1e-6)
    return run


# -- 1 to 5: where it has to be AdamW


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("overlap", [False, True])
def test_01_all_hot_is_adamw_bitwise(dtype: torch.dtype, overlap: bool) -> None:
    follows_adamw(dtype=dtype, topk_ratio=1.0, overlap_step=overlap)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.3, 0.99])
def test_02_windows_of_one_are_adamw_for_any_selection(ratio: float, dtype: torch.dtype) -> None:
    """State migrates with its column: bit for bit, more than the 1e-6 that is promised."""
    run = follows_adamw(dtype=dtype, topk_ratio=ratio, link=throttled(), **EACH_STEP)
    if ratio:
        assert run.oracle.migrated_down > 0


def test_02_scaled_gradients_too() -> None:
    run = Run(topk_ratio=0.3, **EACH_STEP)
    adamw = ByColumn(run.params)
    for step in range(12):
        grads = make_grads(run.shapes, step)
        run.step(grads, scale=4.0 if step % 2 else None)
        adamw.step([g / 4.0 if step % 2 else g for g in grads])
    for p, shown in zip(run.params, adamw.shown):
        assert torch.equal(p, shown)


def test_03_zeroing_moments_at_a_selection_is_not_adamw() -> None:
    """What test 2 would miss if it could not see: the reference implementation's reselection."""
    run = Run(shapes=[(16, 20)], topk_ratio=0.3, **EACH_STEP)
    adamw = ByColumn(run.params)
    for step in range(30):
        if step:
            columns(run.optimizer, run.params[0])  # waits
            state = run.optimizer.state[run.params[0]]
            for name in ("m_hot", "v_hot"):
                state[name].zero_()
        grads = make_grads(run.shapes, step)
        feed(run.optimizer, run.params, grads)
        adamw.step(list(grads))
    assert float((run.params[0] - adamw.shown[0]).detach().abs().max()) > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_04_nothing_hot_is_synchronous_offload_is_adamw(dtype: torch.dtype) -> None:
    """Bit for bit where a tensor's end is a column's: torch's kernel rounds what is left over of a tensor otherwise."""
    shapes: list[Shape] = [(16, 20), (32, 6), *SHAPES]
    run = follows_adamw(dtype=dtype, shapes=shapes, topk_ratio=0.0, **EACH_STEP)
    control = make_params(shapes, dtype)
    optimizer = sk.OffloadAdamW(control, lr=LR, link=throttled())
    for step in range(12):
        feed(optimizer, control, make_grads(shapes, step, dtype), LR * (1 + step % 3))
    for p, q in zip(run.params, control):
        close(p.detach(), q.detach())
        if p.shape[0] % 16 == 0:
            assert torch.equal(p, q)


@pytest.mark.parametrize("overlap", [False, True])
def test_05_warm_up_all_the_way_is_adamw(overlap: bool) -> None:
    follows_adamw(full_warm_up_rounds=12, topk_ratio=0.2, overlap_step=overlap, link=throttled())


# -- 6 to 9: gradients, their age, their bytes


@pytest.mark.parametrize("overlap", [False, True])
def test_06_gradients_are_conserved(overlap: bool) -> None:
    """With beta1 = 0 a first moment is the gradient it was given. Whole numbers: every sum is exact."""
    interval, steps = 4, 30
    run = Run(
        [(16, 20)], betas=(0.0, 0.95), topk_ratio=0.3, update_interval=interval, overlap_step=overlap, select_interval=8
    )
    consumed, applied = torch.zeros(16, 20), torch.zeros(16, 20)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        g = torch.randint(-8, 9, (16, 20), generator=generator).float()
        run.step([g])
        consumed += g
        held = columns(run.optimizer, run.params[0])
        hot, cold = held["hot"], run.oracle.weights[0].cold
        applied[:, hot] += held["m"][:, hot]
        if (step + 1) % interval == 0:
            applied[:, cold] += interval * held["m"][:, cold]
            assert torch.equal(consumed, applied)
        assert torch.equal(consumed, applied + run.oracle.due()[0].float())
    accounts = run.optimizer.accounts
    landed = sum(accounts.staleness.values())
    assert landed == sum(run.oracle.staleness.values())


@pytest.mark.parametrize(("overlap", "oldest"), [(False, 3), (True, 7)])
def test_07_age_of_a_gradient(overlap: bool, oldest: int) -> None:
    """An impulse in a column is seen in the weights so many steps later: counted from outside."""
    ages: Counter[int] = Counter()
    for at in range(4):
        run = Run([(16, 20)], weight_decay=0.0, topk_ratio=0.1, overlap_step=overlap, select_interval=100)
        first, hot_ones = torch.zeros(16, 20), [3, 4]
        first[:, hot_ones] = 1.0
        run.step([first])  # chooses
        for step in range(1, 16):
            g = torch.zeros(16, 20)
            if step == 4 + at:
                g[:, :] = 1.0
            before = run.params[0].detach().clone()
            run.step([g])
            changed = (run.params[0].detach() != before).any(0)
            if step == 4 + at:
                assert changed[hot_ones].all()
            if changed[7]:
                ages[step - 4 - at] += 1
                break
    assert sorted(ages) == list(range(oldest - 3, oldest + 1))


@pytest.mark.parametrize("overlap", [False, True])
def test_07_the_histogram_is_the_oracles(overlap: bool) -> None:
    run = Run(overlap_step=overlap, select_interval=12, full_warm_up_rounds=2)
    for _ in range(31):
        run.step()
    assert dict(run.optimizer.accounts.staleness) == dict(run.oracle.staleness)
    assert max(run.oracle.staleness) == (7 if overlap else 3)


@pytest.mark.parametrize(("ratio", "interval", "traffic"), [(0.1, 4, 1.125), (0.25, 2, 1.125), (0.0, 1, 2.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_08_bytes_moved(ratio: float, interval: int, traffic: float, dtype: torch.dtype) -> None:
    link = throttled()
    run = Run([(16, 40), (8, 40)], dtype, link=link, topk_ratio=ratio, update_interval=interval, overlap_step=False)
    for _ in range(12):
        run.step()
    model = sum(p.nbytes for p in run.params)
    o, moved = run.oracle, run.optimizer.accounts.bytes
    assert moved["gradients"] == (o.down, 0)
    assert moved["weights"] == (0, o.up)
    assert moved["migration"] == (o.migrated_down, o.migrated_up)
    assert (o.down + o.up) / 12 / model == traffic
    at_first = sum(p.nbytes - p.nbytes // 40 * hot_columns(ratio, 40) for p in run.params)  # masters are made of these
    assert moved["setup"] == (at_first, 0)
    assert link.bytes_down == o.down + o.migrated_down + at_first
    assert link.bytes_up == o.up + o.migrated_up
    assert (o.migrated_down > 0) == (ratio > 0)
    told = run.optimizer.report()
    assert told.model_bytes == model
    assert told.traffic == pytest.approx(traffic, rel=1e-12)
    assert told.expected == pytest.approx(traffic, rel=1e-12)


def test_09_one_step_windows_with_overlap_are_delayed_adam() -> None:
    """W after step k is AdamW's after step k - 1, and the gradients are the same: none of W here."""
    run = Run([(16, 20)], topk_ratio=0.0, update_interval=1, overlap_step=True)
    adamw = ByColumn(run.params)
    before = run.params[0].detach().clone()
    for step in range(8):
        run.step()
        assert torch.equal(run.params[0], before)
        adamw.step(list(make_grads(run.shapes, step)))
        assert not torch.equal(run.params[0], adamw.shown[0])
        before = adamw.shown[0].clone()


# -- 10 to 12: threads, and states that are kept

VARIANTS: dict[str, dict[str, Any]] = {
    "overlap": {"topk_ratio": 0.2, "select_interval": 8},
    "no overlap": {"topk_ratio": 0.2, "select_interval": 8, "overlap_step": False},
    "auto": {"topk_ratio": 0.2, "select_interval": 8, "update_interval": "auto", "max_interval": 9},
    "time-corrected": {"topk_ratio": 0.2, "overlap_step": False, "cold_update": "time-corrected", "select_interval": 4},
    "warm-up": {"topk_ratio": 0.2, "select_interval": 4, "full_warm_up_rounds": 3},
}
STEPS = 26


@pytest.mark.parametrize("name", VARIANTS)
def test_10_bitwise_the_same_under_delays(name: str) -> None:
    plain = Run(dtype=torch.bfloat16, **VARIANTS[name])
    shown = []
    for step in range(STEPS):
        plain.step(finite=step % 7 != 5)
        shown.append([p.detach().clone() for p in plain.params])
    for seed in range(2):
        with slow_workers(seed):
            slow = Run(dtype=torch.bfloat16, link=throttled(seed, gb_s=0.05), **VARIANTS[name])
            for step in range(STEPS):
                slow.step(finite=step % 7 != 5)
                for p, q in zip(slow.params, shown[step]):
                    assert torch.equal(p, q), (seed, step)
            equal_runs(plain, slow)


class Watching(HostLink):
    """A copy upwards reads its source until it is waited for, or asked for the third time whether it is done; then it sees whether
    the source has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = self.watched = 0
        self.reading: list[Callable[[], None]] = []

    def up(self, source: Tensor, take: Callable[[Tensor], None]) -> PendingCopy:
        before, link = source.clone(), self
        super().up(source, take)

        def look() -> None:
            link.changed += not torch.equal(source, before)
            link.watched += 1
            link.reading.remove(look)

        class Copying:
            asked = 0

            def done(self) -> bool:
                self.asked += 1
                if self.asked == 3:
                    look()
                return self.asked >= 3

            def wait(self) -> None:
                if self.asked < 3:
                    self.asked = 3
                    look()

        self.reading.append(look)
        return Copying()


def test_10_what_travels_up_is_not_written_meanwhile() -> None:
    link = Watching()
    run = Run([(16, 20)], link=link, update_interval=1, select_interval=3)
    for _ in range(12):
        run.step()
    run.check(masters=True)
    for look in list(link.reading):
        look()
    assert link.watched > 12
    assert link.changed == 0


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_step_is_the_oracles(name: str, dtype: torch.dtype) -> None:
    with slow_workers(3):
        run = Run(dtype=dtype, link=throttled(3, gb_s=0.2), **VARIANTS[name])
        for step in range(STEPS):
            run.step(lr=LR * (1 + step % 3), scale=1.0 + step % 2, finite=step not in (9, 17))
            run.check(masters=step % 5 == 4)
        run.check(masters=True)


def test_11_one_job_in_flight() -> None:
    """However slow the host, a second Adam job is not submitted before the first is done: here there are no others."""
    submitted: list[Job] = []
    inner, main = Worker.submit, threading.get_ident()

    class Slow(Worker):
        def submit(self, work: Callable[[], object]) -> Job:
            if self.name != "adam":
                return inner(self, work)
            assert all(job.done() for job in submitted)

            def slow() -> None:
                until(lambda: waits(main))  # as slow as can be: until somebody has to wait
                work()

            submitted.append(inner(self, slow))
            return submitted[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "Worker", Slow)
        run = Run(update_interval=1, topk_ratio=0.0)
        for _ in range(12):
            run.step()
        assert len(submitted) == 12
        submitted[-1].wait()


def test_11_waiting_twice_changes_nothing() -> None:
    run = Run()
    for _ in range(7):
        run.step()
    before = [p.detach().clone() for p in run.params]
    first = copy.deepcopy(run.optimizer.state_dict())
    equal_trees(first, run.optimizer.state_dict())
    assert all(torch.equal(p, q) for p, q in zip(run.params, before))


@pytest.mark.parametrize("part", ["add_rows_", "update_rows_"])
def test_11_an_error_in_a_thread_is_raised_by_a_step(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run([(16, 20)])
    run.step()
    run.optimizer.state_dict()

    def broken(*args: Any, **options: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ZeroDivisionError("planted")
        inner(*args, **options)

    owners = [
        m for m in sys.modules.values() if getattr(m, "__name__", "").startswith("surokit.offload") and hasattr(m, part)
    ]
    inner = getattr(owners[0], part)
    for module in owners:
        monkeypatch.setattr(module, part, broken)

    def steps() -> None:
        while True:
            run.step()

    with pytest.raises(OffloadError) as caught:
        steps()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def disturbed(work: Callable[[], None], line: int, disturb: Callable[[], None]) -> BaseException | None:
    """Does the work, and `disturb` before the so-manyth line that it reaches in surokit/offload; what it raised."""
    left = [line]

    def local(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                sys.settrace(None)
                disturb()
        return local

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        return local if "/surokit/offload/" in frame.f_code.co_filename else None

    sys.settrace(trace)
    try:
        work()
    except BaseException as error:
        return error
    finally:
        sys.settrace(None)
    assert left[0] > 0, "nothing was raised"
    return None


@pytest.mark.parametrize("at", [0, 3, 4, 7, 8])
def test_11_a_ctrl_c_is_raised_when_the_step_is_complete(at: int) -> None:
    """At lines all over a step: the first, a window's end, a selection. It counts as any other step, or has not begun."""
    plain = Run(shapes=[(16, 20), (8,)], select_interval=8)
    for _ in range(at + 6):
        plain.step()
    reached = 0
    for line in itertools.count(1, 41):
        run = Run(shapes=[(16, 20), (8,)], select_interval=8)
        for _ in range(at):
            run.step()
        error = disturbed(run.step, line, lambda: signal.raise_signal(signal.SIGINT))
        assert error is None or isinstance(error, KeyboardInterrupt)
        done = run.optimizer.accounts.steps
        assert done in ((at, at + 1) if line < 10 else (at + 1,)), line
        run.optimizer.grad_scale = run.optimizer.found_inf = None
        for step in range(done, at + 6):
            feed(run.optimizer, run.params, make_grads(run.shapes, step))
        equal_runs(plain, run)
        if error is None:
            break
        reached += 1
    assert reached > 3


def check_consistent(run: Run) -> None:
    """What holds between any two steps: a partition, hot columns that show their master, windows of all weights together."""
    counts = set()
    for p in run.params:
        if p.dim() < 2:
            continue
        held = columns(run.optimizer, p)
        assert all(torch.isfinite(held[name]).all() for name in ("w", "m", "v"))
        assert torch.equal(p.detach().flatten(1)[:, held["hot"]], held["w"][:, held["hot"]].to(p.dtype))
        counts.add(tuple(run.optimizer.state[p]["counts"].tolist()))
    assert len(counts) == 1


class Planted(BaseException):
    """Not an error that anybody expects."""


def before_it_was_noted(error: BaseException | None) -> bool:
    """Whether an error was raised where a step notes, last of all, what it wrote: the next one takes that for somebody else's."""
    frames = traceback.extract_tb(None if error is None else error.__traceback__)
    return any("_written.note" in (frame.line or "") for frame in frames if frame.filename.endswith("zenflow.py"))


@pytest.mark.parametrize("part", range(2))
def test_11_any_exception_leaves_a_consistent_state_or_one_that_says_so(part: int) -> None:
    """At lines all over the steps of two windows and a selection: all go on as one that took the state over; or none does, and
    a state can be loaded."""
    options: dict[str, Any] = {"lr": 1e-2, "select_strategy": "step", "select_interval": 4, "topk_ratio": 0.3}
    went_on = said_so = 0
    for line in itertools.count(1 + 20 * part, 41):
        run = Run([(16, 20), (8,), (5, 10)], dtype=torch.bfloat16, **options)
        at = 4 + line % 5
        for _ in range(at):
            run.step()
        earlier = copy.deepcopy(run.optimizer.state_dict())
        shown = [p.detach().clone() for p in run.params]

        def raise_it() -> None:
            raise Planted

        error = disturbed(run.step, line, raise_it)
        assert error is None or isinstance(error, Planted)
        run.optimizer.grad_scale = run.optimizer.found_inf = None
        try:
            with pytest.warns(UserWarning, match="were written since") if before_it_was_noted(error) else nullcontext():
                feed(run.optimizer, run.params, make_grads(run.shapes, 50, torch.bfloat16))
        except OffloadError:
            said_so += 1
            with refused(OffloadError):
                run.optimizer.state_dict()
            run.optimizer.load_state_dict(earlier)
            for p, value in zip(run.params, shown):
                p.data.copy_(value)
        else:
            went_on += 1
        for step in range(2):
            feed(run.optimizer, run.params, make_grads(run.shapes, 51 + step, torch.bfloat16))
        check_consistent(run)
        twin_params = [nn.Parameter(p.detach().clone()) for p in run.params]
        twin = sk.ZenFlow(twin_params, **options)
        twin.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        for step in range(9):
            for optimizer, params in ((run.optimizer, run.params), (twin, twin_params)):
                feed(optimizer, params, make_grads(run.shapes, 60 + step, torch.bfloat16))
        for p, q in zip(run.params, twin_params):
            assert torch.equal(p, q), line
        if error is None:
            break
    assert went_on > 3
    assert said_so < went_on


@pytest.mark.parametrize("name", VARIANTS)
def test_12_saved_and_restored_at_any_step(name: str) -> None:
    """Mid-window and with a job pending; through torch.save; and the one that was saved goes on as if it had not been."""
    whole, saved = Run(dtype=torch.bfloat16, **VARIANTS[name]), Run(dtype=torch.bfloat16, **VARIANTS[name])
    ends = 24
    copies: list[tuple[int, bytes, list[Tensor]]] = []
    for step in range(ends):
        whole.step(finite=step % 7 != 5)
        saved.step(finite=step % 7 != 5)
        stream = io.BytesIO()
        torch.save(saved.optimizer.state_dict(), stream)
        copies.append((step + 1, stream.getvalue(), [p.detach().clone() for p in saved.params]))
    equal_runs(whole, saved)
    for at, state, shown in copies[:: 3 if name == "overlap" else 5]:
        resumed = Run(dtype=torch.bfloat16, seed=5, **VARIANTS[name])
        resumed.seed = 0
        for p, value in zip(resumed.params, shown):
            p.data.copy_(value)
        resumed.optimizer.load_state_dict(torch.load(io.BytesIO(state), weights_only=True))
        for step in range(at, ends):
            grads = make_grads(resumed.shapes, step, torch.bfloat16)
            feed(resumed.optimizer, resumed.params, grads, finite=step % 7 != 5)
        equal_runs(whole, resumed)


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))], ids=["deepcopy", "pickle"]
)
def test_12_a_copy_in_the_middle_of_a_window(how: Callable[[Any], Any]) -> None:
    """Both go on, alone."""
    whole = Run(select_interval=8)
    for step in range(20):
        whole.step()
        if step + 1 in (3, 6, 8, 9):
            params, optimizer = how((whole.params, whole.optimizer))
            reference = Run(select_interval=8)
            for other in range(20):
                feed(reference.optimizer, reference.params, make_grads(SHAPES, other))
                if other > step:
                    feed(optimizer, params, make_grads(SHAPES, other))
            for p, q in zip(params, reference.params):
                assert torch.equal(p, q)
            equal_trees(optimizer.state_dict(), reference.optimizer.state_dict())
    whole.check(masters=True)


# -- 13 to 17: what counts where


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.5, 0.999, 1.0])
def test_13_hot_and_cold_are_a_partition(ratio: float) -> None:
    run = Run(topk_ratio=ratio, update_interval=2)
    for _ in range(7):
        run.step()
        for p in run.params:
            if p.dim() > 1:
                assert len(columns(run.optimizer, p)["hot"]) == hot_columns(ratio, p[0].numel())


def test_14_the_rates() -> None:
    """Hot columns take each step's rate; cold ones that of their window's last step, or with time correction the sum."""
    rates = [LR * (1 + step) for step in range(4)]
    for how, factor in (("deepspeed", rates[3]), ("time-corrected", sum(rates))):
        run = Run([(16, 20)], weight_decay=0.0, topk_ratio=0.1, cold_update=how, **NO_OVERLAP)
        before = run.params[0].detach().clone()
        g = torch.ones(16, 20)
        for lr in rates:
            run.step([g], lr)
        moved = before - run.params[0].detach()
        torch.testing.assert_close(moved[:, :2], torch.full((16, 2), sum(rates)), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(moved[:, 2:], torch.full((16, 18), factor), atol=1e-6, rtol=1e-5)


def test_15_the_decay_of_cold_columns() -> None:
    """Without a gradient nothing but decay: wd lr once for a window, or with time correction wd times the sum of rates."""
    rates = [0.1, 0.2, 0.3, 0.4]
    for how, left in (("deepspeed", 1 - 0.5 * 0.4), ("time-corrected", 1 - 0.5 * 1.0)):
        run = Run([(16, 20)], weight_decay=0.5, topk_ratio=0.1, cold_update=how, **NO_OVERLAP)
        before = run.params[0].detach().clone()
        for lr in rates:
            run.step([torch.zeros(16, 20)], lr)
        torch.testing.assert_close(run.params[0].detach()[:, 2:], before[:, 2:] * left)
        hot = torch.tensor(1.0)
        for lr in rates:
            hot = hot * (1 - 0.5 * lr)
        torch.testing.assert_close(run.params[0].detach()[:, :2], before[:, :2] * hot)


@pytest.mark.parametrize("name", VARIANTS)
def test_16_one_scale_for_hot_and_cold(name: str) -> None:
    """Gradients that are to be divided by a power of two are those gradients, divided: bit for bit, each step its own scale."""
    one, other = Run(**VARIANTS[name]), Run(**VARIANTS[name])
    for step in range(20):
        scale = 2.0 ** (step % 5)
        grads = make_grads(one.shapes, step)
        one.step(grads, scale=scale)
        feed(other.optimizer, other.params, [g / scale for g in grads])
        if name == "overlap" and step % 4 == 3:
            continue
    held, expected = one.optimizer.state, other.optimizer.state
    for p, q in zip(one.params, other.params):
        assert torch.equal(p, q)
        assert held[p].keys() == expected[q].keys()


def test_16_a_huge_scale() -> None:
    """The gradients all but vanish, in float32 as for the oracle; nothing overflows."""
    run = Run(dtype=torch.bfloat16)
    for step in range(12):
        run.step(scale=1e30 if step in (4, 5) else None)
        run.check()
    run.check(masters=True)


@pytest.mark.parametrize("name", VARIANTS)
def test_17_a_step_that_is_not_finite_counts_in_neither(name: str) -> None:
    """Gradients of NaN, at each place: the first step, inside a window, its end, before and at a selection, a whole window."""
    for bad in ({0}, {3, 8}, {1, 4, 7}, {4, 5, 6, 7}, {0, 1, 2, 3, 4, 5, 6, 7, 8}):
        run = Run(**VARIANTS[name])
        for step in range(14):
            grads = make_grads(run.shapes, step)
            if step in bad:
                for g in grads:
                    g.view(-1)[:: step + 1] = float("nan") if step % 2 else float("inf")
            run.step(grads, scale=float("nan") if step in bad else 2.0, finite=step not in bad)
            assert all(torch.isfinite(p).all() for p in run.params)
            run.check()
        run.check(masters=True)


# -- 18 to 23


def test_18_auto_never_exceeds_its_maximum() -> None:
    for most in (1, 2, 5):
        run = Run(update_interval="auto", max_interval=most, topk_ratio=0.1)
        for _ in range(20):
            run.step()
        assert run.oracle.lengths
        assert max(run.oracle.lengths) <= most
        run.check(masters=True)


def test_18_auto_by_hand() -> None:
    """Equal means are enough after one step, which is known two steps later; where cold gradients are small, the maximum."""
    for size, length in ((1.0, 3), (1e-3, 6)):
        run = Run(
            [(16, 20)], update_interval="auto", max_interval=6, topk_ratio=0.05, select_interval=100, **NO_OVERLAP
        )
        ends = []
        for step in range(12):
            g = torch.full((16, 20), size)
            g[:, 7] = 1.0
            before = run.params[0].detach().clone()
            run.step([g])
            if bool((run.params[0].detach() != before)[:, 3].any()):
                ends.append(step + 1)
        assert ends == list(range(length, 13, length))


@pytest.mark.parametrize(("scale", "length"), [(1.0, 4), (0.1, 6)])
def test_18_auto_compares_gradients_as_they_are_applied(scale: float, length: int) -> None:
    """.9 and .1 of cold columns add up to the hot ones' mean of 1; not so where the second step counts ten times as much."""
    run = Run([(16, 20)], update_interval="auto", max_interval=6, topk_ratio=0.05, select_interval=100, **NO_OVERLAP)
    for step, size in enumerate((0.9, 0.1, 0.0, 0.0, 0.0, 0.0)[:length]):
        g = torch.full((16, 20), size)
        g[:, 0] = 1.0
        before = run.params[0].detach().clone()
        run.step([g], scale=scale if step == 1 else 1.0)
        ended = bool((run.params[0].detach() != before)[:, 3].any())
        assert ended == (step + 1 == length)


def test_19_a_selection_has_its_share_of_the_energy() -> None:
    """The columns that are hot from a step on hold at least their share of the scored step's squared norm."""
    run = Run([(16, 20), (8, 31)], topk_ratio=0.2, update_interval=2)
    for step in range(20):
        grads = make_grads(run.shapes, step)
        run.step(grads)
        scored = grads if step == 0 else make_grads(run.shapes, step - 1)
        if step + 1 in run.oracle.choices:
            for p, g in zip(run.params, scored):
                hot = columns(run.optimizer, p)["hot"]
                energy = g.square().sum(0)
                assert energy[hot].sum() / energy.sum() >= len(hot) / g.shape[1]
                assert energy[hot].min() >= energy.sort().values[-len(hot)]
    assert len(run.oracle.choices) > 5


def test_19_ties_go_to_the_lower_column() -> None:
    run = Run([(16, 20)], topk_ratio=0.3)
    g = torch.zeros(16, 20)
    g[:, [2, 5, 6, 11, 13, 17, 19]] = 1.0
    g[:, 6] = 2.0
    run.step([g])
    assert columns(run.optimizer, run.params[0])["hot"].tolist() == [2, 5, 6, 11, 13, 17]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_21_masters_stay_bit_identical_without_a_rate(weight_decay: float) -> None:
    with slow_workers(1):
        run = Run(
            dtype=torch.bfloat16, lr=0.0, weight_decay=weight_decay, topk_ratio=0.3, update_interval=1, link=throttled()
        )
        start = [p.detach().float() for p in run.params]
        for step in range(4):  # masters between bfloat16 numbers
            feed(run.optimizer, run.params, make_grads(run.shapes, step, torch.bfloat16), lr=1e-3)
    masters = {i: columns(run.optimizer, p)["w"] for i, p in enumerate(run.params) if p.dim() > 1}
    assert not torch.equal(masters[0], start[0])
    moves = 0
    hot: list[int] = []
    for step in range(4, 30):
        feed(run.optimizer, run.params, make_grads(run.shapes, step, torch.bfloat16), lr=0.0)
        held = columns(run.optimizer, run.params[0])
        moves += held["hot"].tolist() != hot
        hot = held["hot"].tolist()
        for i, master in masters.items():
            assert torch.equal(columns(run.optimizer, run.params[i])["w"], master)
    assert moves > 3


# -- properties


def any_history(draw: Callable[[Any], Any]) -> None:
    """Every step shows what the oracle shows, and holds what it holds in the end."""
    sizes = st.sampled_from([1, 2, 3, 7, 16, 17, 33])
    weights = st.one_of(st.tuples(sizes, sizes), st.tuples(sizes), st.tuples(sizes, st.just(2), st.just(3)))
    shapes: list[Shape] = draw(st.lists(weights, min_size=1, max_size=3))
    overlap = draw(st.booleans())
    options: dict[str, Any] = {
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16])),
        "topk_ratio": draw(st.sampled_from([0.0, 0.05, 0.1, 0.5, 0.9, 1.0])),
        "update_interval": draw(st.sampled_from([1, 2, 3, 4, 7, "auto"])),
        "max_interval": draw(st.integers(1, 5)),
        "select_interval": draw(st.integers(1, 9)),
        "full_warm_up_rounds": draw(st.sampled_from([0, 0, 1, 5])),
        "overlap_step": overlap,
        "cold_update": "deepspeed" if overlap else draw(st.sampled_from(["deepspeed", "time-corrected"])),
        "auto_ratio": draw(st.sampled_from([0.3, 0.99])),
        "betas": draw(st.sampled_from([(0.9, 0.95), (0.0, 0.5)])),
        "weight_decay": draw(st.sampled_from([0.0, 0.1])),
        "seed": draw(st.integers(0, 100)),
    }
    run = Run(shapes, link=throttled(gb_s=10.0) if draw(st.booleans()) else None, **options)
    for step in range(draw(st.integers(1, 14))):
        grads: list[Tensor | None] = list(make_grads(run.shapes, step, run.dtype, run.seed))
        if draw(st.integers(0, 9)) == 0:
            grads[draw(st.integers(0, len(grads) - 1))] = None
        run.step(grads, lr=draw(st.sampled_from([1e-2, 0.0, 3e-2])), finite=draw(st.integers(0, 7)) > 0)
        run.check()
        then = draw(st.sampled_from(["go on"] * 8 + ["restore", "copy"]))
        if then == "restore":
            state = copy.deepcopy(run.optimizer.state_dict())
            run.optimizer = sk.ZenFlow(run.params, **run.options)
            run.optimizer.load_state_dict(state)
        elif then == "copy":
            run.params, run.optimizer = copy.deepcopy((run.params, run.optimizer))
    run.check(masters=True)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_shape_ratio_interval_and_history(data: st.DataObject) -> None:
    any_history(data.draw)


@pytest.mark.soak
@pytest.mark.timeout(0)
@settings(max_examples=2000, deadline=None)
@given(st.data())
def test_any_history_under_delays(data: st.DataObject) -> None:
    with slow_workers(data.draw(st.integers(0, 1000)), longest_s=0.002):
        any_history(data.draw)


# -- a real model on a real text


def decoder(dtype: torch.dtype) -> tuple[nn.Module, Iterator[Any]]:
    torch.manual_seed(0)
    tokenizer = sk.train_tokenizer([texts.SHAKESPEARE], vocab_size=270)
    config = sk.DecoderConfig(layers=1, width=32, heads=2, kv_heads=1, vocab=270, ffn=48, max_length=32)
    return sk.Decoder(config, dtype=dtype), iter(sk.text(texts.SHAKESPEARE, tokenizer, length=32, batch=4, seed=0))


@pytest.mark.parametrize(("dtype", "overlap"), [(torch.float32, True), (torch.bfloat16, False)])
def test_a_decoder_on_shakespeare_is_the_oracles(dtype: torch.dtype, overlap: bool) -> None:
    model, batches = decoder(dtype)
    params = [p for p in model.parameters() if p.requires_grad]
    options = {"lr": 1e-2, "topk_ratio": 0.1, "overlap_step": overlap, "select_strategy": "step", "select_interval": 4}
    with slow_workers(0):
        optimizer: Any = sk.ZenFlow(params, link=throttled(), **options)
        oracle = Oracle([p.detach() for p in params], settings_of(options))
        losses = []
        for _ in range(14):
            loss = model(**next(batches)).loss
            loss.backward()
            losses.append(loss.item())
            grads = [None if p.grad is None else p.grad.clone() for p in params]
            norm = torch.stack([g.float().norm() for g in grads if g is not None]).norm()
            scale = float(norm.clamp_min(1.0))
            feed(optimizer, params, grads, scale=scale)
            oracle.step(grads, scale=float(torch.tensor(scale)))
            for p, w in zip(params, oracle.weights):
                close(p.detach(), w.shown)
    assert losses[-1] < losses[0] - 0.5


# -- 20: two processes


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found, by case."""
    return found_by("tests.offload.ranks", RANKS, tmp_path_factory.mktemp("zenflow"), TIMEOUT_S)


@pytest.mark.parametrize("case", CASES)
def test_20_all_ranks_select_the_same_columns(case: str, ranks: list[dict[str, Any]]) -> None:
    """And those of a single process with the whole weights and the whole batch; and what they train is what that trains."""
    errors = [found.get(case, {}).get("error", "") for found in ranks]
    assert not any(errors), "\n".join(errors)
    one, two = (found[case] for found in ranks)
    assert one["hot"] == two["hot"]
    assert len({str(hot) for hot in one["hot"]}) > 2
    model = make_model()
    params = list(model.parameters())
    oracle = Oracle([p.detach() for p in params], settings_of(options_of(case)))
    for step in range(RANK_STEPS):
        model.zero_grad()
        losses = [loss_of(model, x) / RANKS for x in halves(step)]
        sum(losses).backward()  # type: ignore[union-attr]
        oracle.step([p.grad for p in params])
        assert one["hot"][step] == [w.hot.nonzero().flatten().tolist() for w in oracle.weights if w.splits]
        for p, w, shown in zip(params, oracle.weights, one["shown"][step]):
            torch.testing.assert_close(shown, w.shown, atol=2e-5, rtol=1e-4)
            p.data.copy_(w.shown)
    assert one["resumed"]
    assert two["resumed"]


# -- 23; 22 needs a GPU and is test_22_no_step_synchronizes in tests/gpu/test_offload.py


def test_23_what_a_selection_moves_between_processes(ranks: list[dict[str, Any]]) -> None:
    """One float32 a column, where gathering gradients would move a column: 1 / out of a weight. In other steps nothing."""
    weights = [p for p in make_model().parameters() if p.dim() > 1]
    scores = sum(p.shape[1] * 4 for p in weights)
    assert all(4 * p.shape[1] / p.nbytes == 1 / p.shape[0] for p in weights)
    for found in ranks:
        chosen = [step + 1 for step, moved in enumerate(found["no overlap"]["exchanged"]) if moved]
        assert chosen == [1, *range(4, RANK_STEPS + 1, 4)]
        assert set(found["no overlap"]["exchanged"]) == {0, scores}


def test_23_what_a_selection_moves_to_the_host() -> None:
    """An index and a clock of each hot column, and a share."""
    link = throttled()
    run = Run([(16, 20)], link=link, select_interval=4, topk_ratio=0.2)
    small = []
    for _ in range(12):
        before = link.bytes_small
        run.step()
        small.append(link.bytes_small - before)
    assert small == [36, 0, 0, 36, 0, 0, 0, 36, 0, 0, 0, 36]
