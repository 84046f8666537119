"""Live profiles on a CPU: steps, modules, seeded faults with file and line, exceptions, and nothing left behind."""

import math
import sys
import threading
import time
import warnings

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from surokit.profiler import Profile, profile, profile_calls
from surokit.profiler.analysis.timeline import Kind
from surokit.profiler.monitoring.monitor import Monitor
from surokit.profiler.monitoring.windows import FIRST
from surokit.profiler.record import watch as watching
from surokit.profiler.record.tracer import (
    LEAVES_OUT,
    clock_offset,
    new_trace,
    read_events,
    start,
    stopped,
    without_chatter,
)
from tests.clocks import Clock
from tests.profiler.models import Net, by, line_of, row, train
from tests.refusals import refused


def hooks():
    return (
        len(torch_module._global_forward_hooks),
        len(torch_module._global_forward_pre_hooks),
        len(torch_module._global_forward_hooks_always_called),
        len(torch_optimizer._global_optimizer_post_hooks),
        torch.utils.data.dataloader._BaseDataLoaderIter.__next__,
        [t.name for t in threading.enumerate() if t.name == "surokit-sampler"],
        [f for f in warnings.filters if "sympy" not in str(f[2])],  # sympy adds one when torch first imports it
        warnings.showwarning,
    )


@pytest.fixture(autouse=True)
def leaves_nothing_behind():
    before = hooks()
    yield
    assert hooks() == before


@pytest.fixture(scope="module")
def trained():
    with profile(steps=4, warmup=2) as p:
        train(9)
    return p


def test_steps_come_from_the_optimizer(trained):
    assert (trained.summary["steps"], trained.summary["warmup"]) == (4, 2)
    assert len(trained.steps) == 4
    assert trained.summary["device"] == "cpu"
    assert "CPU: idle means time outside operators" in repr(trained)


def test_parts_sum_to_the_wall(trained):
    s = trained.summary
    assert s["busy_ms"] + s["idle_ms"] == pytest.approx(s["wall_ms"])
    assert s["host_wait_ms"] + s["kernel_wait_ms"] + s["other_wait_ms"] == pytest.approx(s["idle_ms"])
    steps = trained.steps
    assert (steps.busy_ms + steps.idle_ms).tolist() == pytest.approx(steps.wall_ms.tolist())
    phases = [c for c in steps.columns if c.endswith("_ms")][6:]
    assert steps[phases].sum(axis=1).tolist() == pytest.approx(steps.wall_ms.tolist())
    lost = dict(zip(trained.lost.cause, trained.lost.ms_per_step))
    assert lost["launches"] + lost["host"] == pytest.approx(s["idle_ms"])


def test_modules_by_path_sum_to_busy(trained):
    rows = by(trained.modules, "module")
    assert {"Net", "emb", "layers", "layers.0", "layers.0.up", "layers.1.down", "head", "(optimizer)"} <= set(
        rows.index
    )
    assert rows.self_ms.sum() == pytest.approx(trained.summary["busy_ms"])
    block = rows.loc["layers.0"]
    assert block.ms == pytest.approx(block.self_ms + rows.loc["layers.0.up", "ms"] + rows.loc["layers.0.down", "ms"])
    assert rows.loc["layers.0.up", "forward_ms"] > 0
    assert rows.loc["layers.0.up", "backward_ms"] > 0
    assert rows.loc["layers.0.up", "calls"] == 1
    assert trained.summary["phases_ms"]["forward"] > 0
    assert trained.summary["phases_ms"]["backward"] > 0
    assert trained.summary["phases_ms"]["optimizer"] > 0


def test_tokens_are_the_largest_embedding_lookup(trained):
    assert trained.summary["tokens_per_s"] == pytest.approx(16 / trained.summary["wall_ms"] * 1e3)
    with profile(tokens=1000) as p:
        train(4)
    assert p.summary["tokens_per_s"] == pytest.approx(1000 / p.summary["wall_ms"] * 1e3)


def tokens_of(p):
    return p.summary["tokens_per_s"] * p.summary["wall_ms"] / 1e3


@pytest.mark.parametrize("by_optimizer", [True, False])
def test_tokens_and_flops_are_those_of_the_measured_steps(by_optimizer, tmp_path):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for warm, measured in ((64, 4), (4, 64), (8, 8)):
        with profile(steps=2, warmup=3) as p:
            for length in (warm, warm, warm, measured, measured):
                model(torch.zeros(2, length, dtype=torch.int64)).sum().backward()
                optimizer.step()
                if not by_optimizer:
                    p.step()
        assert tokens_of(p) == pytest.approx(2 * measured)
        for kept in (p, Profile.load(p.save(tmp_path / "p.json"))):
            known = warm == measured
            assert (kept.summary["gflop_per_step"] is not None) is (kept.summary["tflops"] is not None) is known
            assert any("times the tokens of a measured step" in note for note in kept.notes) is not known


def test_a_prompt_before_the_tokens_that_follow_it_is_warm_up():
    model = Net()
    with profile(steps=3, warmup=2) as p, torch.no_grad():
        for length in (512, 1, 1, 1, 1):
            model(torch.zeros(1, length, dtype=torch.int64))
            p.step()
    assert tokens_of(p) == pytest.approx(1)
    assert p.summary["gflop_per_step"] > 0


def test_tokens_of_calls_without_gradients_count_where_no_others_do():
    model, reference = Net(), Net()
    ids = torch.zeros(2, 8, dtype=torch.int64)
    with profile(steps=2, warmup=1) as p:
        for _ in range(3):
            with torch.no_grad():
                reference(ids.repeat(1, 4))
            model(ids).sum().backward()
            p.step()
    assert tokens_of(p) == pytest.approx(16)


def test_the_peak_on_a_device_is_the_blocks(monkeypatch):
    peak = 3 * 2**30  # before the block
    fakes = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "get_sync_debug_mode": lambda: 1,
        "get_device_name": lambda: "a GPU",
        "max_memory_allocated": lambda: peak,
    }

    def reset():
        nonlocal peak
        peak = 2**30

    for name, value in (fakes | {"reset_peak_memory_stats": reset}).items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr("surokit.profiler.record.tracer.wait_for_device", lambda: None)
    with profile(steps=2, warmup=0, gpu=False) as p:
        for gib in (2, 1):
            torch.ones(2).sum()
            peak = max(peak, gib * 2**30)
            p.step()
    assert p.summary["peak_gib"] == 2
    assert "2 GiB at the peak" in repr(p)
    assert "peak_gib" in set(p.diff(p).metric)


def test_the_peak_of_a_process_is_not_compared(trained):
    assert "GiB at the process's peak so far" in repr(trained)
    assert "peak_gib" not in set(trained.diff(trained).metric)


def test_own_overhead_is_reported(trained):
    assert trained.summary["overhead_ms"] > 0
    assert trained._recording.costs.event_ns > 0
    assert "profiler's own share" in repr(trained)


def read_everything(step, loss):
    loss.item()  # item
    float(loss)  # float
    if loss > 1e9:  # bool
        raise AssertionError
    torch.stack([loss, loss]).nonzero()  # nonzero
    torch.equal(loss, loss)  # equal
    two = torch.stack([loss, loss])
    two[two > 0]  # mask


def test_seeded_syncs_are_found_with_file_and_line():
    with profile(steps=2, warmup=1) as p:
        train(3, each=read_everything)
    found = {(call, line): count for call, line, count in zip(p.syncs.call, p.syncs.line, p.syncs["count"])}
    marks = {
        "item": ".item()",
        "float": ".item()",
        "bool": ".item()",
        "nonzero": "nonzero",
        "equal": "torch.equal",
        "mask": "nonzero",
    }
    assert found == {(call, line_of(mark, __name__)): 1 for mark, call in marks.items()}
    assert set(p.syncs.file) == {__file__}
    assert p.summary["syncs_per_step"] == 6
    assert f"test_capture.py:{line_of('item', __name__)}" in "\n".join(p.advice.advice)
    assert by(p.lost, "cause").loc["syncs", "ms_per_step"] > 0


def test_a_sync_inside_a_backward_and_inside_a_library_is_the_users_line():
    class Peek(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            grad.sum().item()  # backward item
            return grad

    x = torch.ones(3, requires_grad=True)
    with profile() as p:
        Peek.apply(x).sum().backward()
        nn.utils.clip_grad_norm_([x], 1.0, error_if_nonfinite=True)  # clip
    rows = by(p.syncs, "line")
    assert rows.loc[line_of("backward item", __name__), "call"] == ".item()"
    assert rows.loc[line_of("clip", __name__), "inside"].startswith("torch/nn/utils/clip_grad.py:")


def busy_python(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass  # host work


def test_a_host_gap_is_found_with_its_line():
    def wait(step, loss):
        busy_python(0.05)

    with profile(steps=2, warmup=1) as p:
        train(3, each=wait)
    worst = row(p.gaps)
    assert worst.ms >= 50
    assert (worst.kind, worst.cause, worst.file) == ("host wait", "host", __file__)
    work = line_of("host work", __name__)
    assert worst.line in (work - 1, work)
    assert by(p.lost, "cause").loc["host", "ms_per_step"] >= 50
    assert row(p.advice).rule == "host gap"
    assert row(p.advice).gain_ms >= 30  # by samples of the line, which share the gap with what ends it
    assert p.advice.gain_ms[p.advice.rule == "host gap"].sum() >= 50


def test_waiting_for_data_is_its_own_phase():
    class Slow(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            busy_python(0.01)
            return torch.full((8,), i)

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with profile(steps=2, warmup=1) as p:
        for ids in torch.utils.data.DataLoader(Slow(), batch_size=1):
            model(ids).sum().backward()
            optimizer.step()
    assert p.summary["phases_ms"]["data"] >= 10
    assert row(p.advice).rule == "data"


def test_many_tiny_operators_are_launches():
    x = torch.zeros(2)
    with profile() as p:
        for _ in range(1000):
            x = x + 1
    assert p.summary["launches_per_step"] >= 1000
    assert ", 1000 a step" in "\n".join(p.advice[p.advice.rule == "launches"].evidence)


def test_without_an_optimizer_the_block_is_one_step():
    with profile() as p:
        Net()(torch.zeros(1, 4, dtype=torch.int64))
    assert (p.summary["steps"], p.summary["warmup"]) == (1, 0)


def test_user_marks_take_precedence():
    model = Net()
    with profile(steps=3, warmup=1) as p:
        train(1, model)
        for _ in range(6):
            model(torch.zeros(1, 4, dtype=torch.int64))
            p.step()
    assert (p.summary["steps"], p.summary["warmup"]) == (3, 1)


def test_two_optimizers_make_one_step_a_turn():
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    first, second = torch.optim.SGD(a.parameters(), lr=0.1), torch.optim.SGD(b.parameters(), lr=0.1)
    with profile(steps=5, warmup=1) as p:
        for _ in range(4):
            for net, optimizer in ((a, first), (b, second)):
                net(torch.ones(2, 4)).sum().backward()
                optimizer.step()
    assert (p.summary["steps"], p.summary["warmup"]) == (3, 1)
    assert {"Linear", "Linear#2"} <= set(p.modules.module)


def test_an_exception_passes_on_and_the_profile_is_kept():
    def fail(step, loss):
        if step == 2:
            raise ZeroDivisionError("mine")

    with refused(ZeroDivisionError), profile(steps=5, warmup=1) as p:
        train(5, each=fail)
    assert p.summary["steps"] == 2
    assert any("ZeroDivisionError" in note for note in p.notes)


def test_a_failing_analysis_does_not_hide_what_the_block_raised(monkeypatch):
    def broken(*args):
        raise KeyError("ours")

    monkeypatch.setattr(Profile, "_finish", broken)
    with pytest.raises(ZeroDivisionError, match="mine") as caught, profile():
        raise ZeroDivisionError("mine")
    assert "The profile of this block could not be made (KeyError: 'ours')." in caught.value.__notes__
    with refused(KeyError), profile():
        train(1)


def test_an_exception_inside_a_module_leaves_its_parents_right():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)
            self.outer = nn.Linear(4, 4)

        def forward(self, x):
            try:
                self.inner(torch.ones(2, 5))
            except RuntimeError:
                return self.outer(x)

    with profile() as p:
        Sometimes()(torch.ones(2, 4))
    rows = by(p.modules, "module")
    assert rows.loc["outer", "calls"] == 1
    assert rows.loc["Sometimes", "ms"] >= rows.loc["outer", "ms"] > 0


def test_the_same_profile_twice_at_once_is_refused_and_in_turn_works():
    block = profile(steps=2, warmup=0)
    with block as first:
        with refused(RuntimeError), block:
            pass
        train(2)
    with block as second:
        train(1)
    assert (first.summary["steps"], second.summary["steps"]) == (2, 1)


def inner_profile():
    with profile(steps=2, warmup=1, name="inner") as p:
        train(4)
    return p


def test_a_profile_inside_another_is_cut_from_it():
    with profile(steps=20, warmup=0) as outer:
        train(2)
        inner = inner_profile()
        assert "inside another profile" in repr(inner)
        with refused(RuntimeError):
            _ = inner.summary
        train(2, each=lambda step, loss: loss.item())
    assert (outer.summary["steps"], inner.summary["steps"]) == (4, 2)  # the optimizer that stepped most
    assert (inner.name, inner.summary["warmup"]) == ("inner", 1)
    assert not len(inner.syncs)
    assert by(inner.modules, "module").loc["layers.0.up", "calls"] == 1
    assert inner.summary["busy_ms"] + inner.summary["idle_ms"] == pytest.approx(inner.summary["wall_ms"])
    assert any("inside another profile" in note for note in inner.notes)
    assert inner._recording is not None
    assert outer._recording is not None
    assert outer._recording.start_ns <= inner._recording.start_ns < inner._recording.end_ns <= outer._recording.end_ns


def test_an_inner_profile_is_whole_though_the_outer_one_has_seen_its_steps():
    with profile(steps=2, warmup=1) as outer:
        train(1)
        with profile(steps=20, warmup=0) as inner:
            train(6)
    assert inner.summary["steps"] == 6
    assert outer.summary["steps"] == 2
    with profile(steps=1, warmup=0) as outer:
        train(2)
        inner = inner_profile()
        assert inner.summary["steps"] == 2  # the outer recording was over, so this one has its own
    assert outer.summary["steps"] == 1


def test_repeated_calls_inside_a_profile():
    with profile() as outer:
        inner = profile_calls(lambda: train(1), steps=2, warmup=1)
    assert inner.summary["steps"] == 2
    assert outer.summary["busy_ms"] > 0


def test_profiles_on_two_threads_share_one_recording():
    seen = []

    def work():
        seen.append(inner_profile())

    with profile() as outer:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert any("on another thread" in note for note in seen[0].notes + outer.notes)
    assert by(seen[0].modules, "module").loc["Net", "calls"] == 1


def test_beside_another_torch_profiler_steps_modules_and_reads_are_recorded():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as theirs:
        with profile(steps=2, warmup=1) as p:
            train(3, each=lambda step, loss: loss.item())
        torch.ones(2)
    assert any("another torch profiler is running: operators and kernels were not recorded" in n for n in p.notes)
    assert p.summary["steps"] == 2
    assert p.syncs["count"].tolist() == [1]
    assert not any("ran inside the block" in n for n in p.notes)
    assert (p.summary["activity"], math.isnan(p.summary["busy_ms"])) == ("unknown", True)
    assert p.summary["wall_ms"] > 0
    assert (len(p.lost), len(p.gaps), len(p.advice)) == (0, 0, 0)
    for shown in (repr(p), p._repr_html_()):
        assert "nan" not in shown
        assert "idle" not in shown
    assert any(e.name == "aten::linear" for e in theirs.events())
    with profile() as p:
        train(1)
    assert p.summary["busy_ms"] > 0


def test_a_profiler_inside_the_block_is_said():
    with profile() as p:
        train(1)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
            train(1)
    assert any("another torch profiler ran inside" in note for note in p.notes)
    with profile() as p:
        train(1)
    assert p.summary["busy_ms"] > 0


def test_an_open_window_of_a_monitor_gives_way():
    with Monitor(every=40) as monitor:
        for _ in range(FIRST):
            monitor.step()
        assert torch._C._autograd._profiler_enabled()
        with profile(steps=2, warmup=1) as p:
            train(3)
    assert p.summary["busy_ms"] > 0
    assert not any("another torch profiler" in note for note in p.notes)
    assert monitor.summary().activity.windows == 0


def test_a_range_that_an_earlier_recording_saw_has_to_close_first():
    with profile(steps=1, warmup=0) as first:
        with torch.profiler.record_function("mine"):
            train(1)
            first.step()
            with profile() as inside:
                train(1)
        with profile() as behind:
            train(1)
    assert any("a range of an earlier recording is open: operators" in note for note in inside.notes)
    assert inside.summary["steps"] == 1
    assert behind.summary["busy_ms"] > 0
    assert not any("earlier recording" in note for note in behind.notes)


@pytest.mark.skipif(LEAVES_OUT, reason="torch before 2.13 does not say whether a range that is kept is open")
def test_a_range_that_somebody_keeps_is_closed_all_the_same():
    kept = torch.profiler.record_function("kept")
    with profile(), kept:
        train(1)
    with profile() as p:
        train(1)
    assert p.summary["busy_ms"] > 0
    assert kept.record is not None


@pytest.mark.parametrize(
    "arguments",
    [
        {"steps": 0},
        {"steps": 2.5},
        {"steps": "5"},
        {"warmup": -1},
        {"tokens": -5},
        {"tokens": float("nan")},
        {"usd_per_gpu_hour": -1},
    ],
)
def test_bad_arguments(arguments):
    with refused(ValueError):
        profile(**arguments)


def test_a_running_profile_says_so():
    with profile() as p:
        assert "still running" in repr(p)
        with refused(RuntimeError):
            _ = p.summary
        train(1)
    with refused(RuntimeError):
        p.step()


def test_where_no_operator_ran_no_idle_share_is_told():
    """Neither in text nor on the page, with and without steps; an operator outside of the measured steps changes nothing."""
    with profile() as nothing:
        pass
    with profile(2, warmup=1) as before:
        torch.ones(3).sum()
        for _ in range(3):
            before.step()
    for p in (nothing, before):
        assert p.summary["activity"] == "unknown"
        assert len(p.lost) == len(p.advice) == 0
        for said in (repr(p), p._repr_html_()):
            assert "no torch operator was recorded in these steps" in said
            for word in ("idle  ", "lost to", "Lost time", "hours a day", "100.0%", "nan"):
                assert word not in said


def test_repeated_calls():
    model, calls = Net(), []

    def run():
        calls.append(1)
        model(torch.zeros(2, 8, dtype=torch.int64)).sum().backward()

    p = profile_calls(run, steps=4)
    assert len(calls) == 7
    whole_runs = profile_calls(lambda: train(3, model), steps=2, warmup=0)
    assert whole_runs.summary["steps"] == 2
    assert by(whole_runs.modules, "module").loc["Net", "calls"] == 3
    assert whole_runs.summary["unprofiled_ms"] is None
    assert p.summary["steps"] == 4
    assert p.summary["unprofiled_ms"] > 0
    assert by(p.modules, "module").loc["head", "calls"] == 1


def test_calls_without_the_profiler_are_timed_until_the_device_is_done(monkeypatch):
    clock, asked = Clock(), list[float]()

    def run():
        torch.ones(2).sum()
        asked.append(0.04)  # the device's work, which the call only asks for
        clock.sleep(0.001)

    def wait():
        while asked:
            clock.sleep(asked.pop())

    monkeypatch.setattr("surokit.profiler.record.capture.time", clock)
    monkeypatch.setattr("surokit.profiler.record.capture.synchronize", wait)
    p = profile_calls(run, steps=2, warmup=4)
    assert p.summary["unprofiled_ms"] == pytest.approx(41)


def test_repeated_calls_that_fail_carry_the_profile():
    turns = iter([1, 1, 0])
    with pytest.raises(ZeroDivisionError) as caught:
        profile_calls(lambda: torch.ones(2) / (1 // next(turns)), steps=3, warmup=0)
    kept = getattr(caught.value, "profile", None)
    assert isinstance(kept, Profile)
    assert kept.summary["steps"] == 2


def test_torch_compile_neither_recompiles_nor_warns():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    net = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend=backend)
    net(torch.ones(2, 4))
    with profile() as p:
        net(torch.ones(2, 4))
    net(torch.ones(2, 4))
    assert len(compiled) == 1
    assert p.summary["busy_ms"] > 0


def test_cuda_sync_warnings_become_records_and_others_pass():
    watch = watching.Watch()
    watch.active = True
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with watching.sync_warnings_to(watch):
            for _ in range(2):
                warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)  # warned
            warnings.warn("something else", stacklevel=1)
    points = list(watch.sync_points())
    assert [(p.file, p.line) for p in points] == [(__file__, line_of("warned", __name__))] * 2
    assert [str(w.message) for w in shown] == ["something else"]


def test_waits_by_name_are_noted_with_their_line():
    class Device:
        waited = 0

        @staticmethod
        def synchronize(device=None):
            Device.waited += 1
            return device

    original, watch = Device.synchronize, watching.Watch()
    watch.active = True
    with watching.waits_noted(watch, Device):
        assert Device.synchronize("cuda:1") == "cuda:1"  # waits by name
    assert Device.synchronize is original
    assert Device.waited == 1
    (point,) = watch.sync_points()
    assert (point.call, point.file, point.line) == ("Device.synchronize", __file__, line_of("waits by name", __name__))


class Told:
    """An event as older torch tells it: without an activity type."""

    def __init__(self, name, gpu=False, annotation=False):
        self._name, self._gpu, self._annotation = name, gpu, annotation

    def name(self):
        return self._name

    def device_type(self):
        return torch.profiler.DeviceType.CUDA if self._gpu else torch.profiler.DeviceType.CPU

    def is_user_annotation(self):
        return self._annotation

    def start_ns(self):
        return 5

    def duration_ns(self):
        return 7

    def correlation_id(self):
        return 3

    def linked_correlation_id(self):
        return 2

    def device_resource_id(self):
        return 1

    def sequence_nr(self):
        return -1

    def nbytes(self):
        return 8


def test_events_of_older_torch():
    told = [
        Told("aten::mm"),
        Told("cudaLaunchKernel"),
        Told("gemm", True),
        Told("Memcpy HtoD", True),
        Told("Memset", True),
    ]
    told += [Told("mine", annotation=True), Told("mine", True, True)]
    told += [Told(name, True) for name in ("Stream Sync", "Event Sync", "Context Sync", "Stream Wait Event")]
    events = [event for event, _ in read_events(told)]
    assert [e.kind for e in events] == [Kind.OP, Kind.RUNTIME, Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET, Kind.ANNOTATION]
    assert [(e.correlation, e.external) for e in events[:3]] == [(-1, 3), (3, 2), (3, 2)]


def test_the_clocks_are_compared_from_both_sides():
    """torch's clock is 1000 behind the host's. A thread that waits for a processor delays what comes behind the wait."""
    quiet = ((1100, 1300, 1500), (200, 400))
    waits_before_the_start = ((1100, 9300, 9500), (8200, 8400))
    waits_inside = ((1100, 9300, 9500), (200, 8400))
    waits_behind_the_end = ((1100, 1300, 9500), (200, 400))
    assert clock_offset([]) == 0
    assert clock_offset([quiet]) == 1000
    assert clock_offset([waits_before_the_start] * 5) == 1000
    assert clock_offset([waits_before_the_start, waits_inside, waits_behind_the_end]) == 1000


def test_torchs_warning_about_cycles_is_not_given_and_no_event_is_read_that_nobody_asks_for(monkeypatch):
    monkeypatch.setattr(torch.profiler.profiler, "_WARNINGS_SHOWN", set())  # it is given once in a process
    trace = new_trace([torch.profiler.ProfilerActivity.CPU])
    start(trace)
    torch.ones(2)
    assert len(stopped(trace, time.time_ns()).events())
    assert trace.profiler is not None
    assert trace.profiler._function_events is None


def test_the_tracers_chatter_is_dropped_and_the_rest_kept(capfd):
    import os

    with without_chatter():
        os.write(2, b"USDT:2026 profiler_start\nmine\n")
        os.write(2, b"ERROR: External init callback must run in same thread as registerClient (1 != 2)\n")
    assert capfd.readouterr().err == "mine\n"
    with profile():
        train(1)
    assert "USDT" not in capfd.readouterr().err


def test_a_frame_that_is_none_any_more_is_left_out(monkeypatch):
    """CPython 3.11 has given a function for a frame of a thread that runs; the sampler goes on."""
    asked: list[None] = []
    often = threading.Event()

    def frames():
        asked.append(None)
        if len(asked) > 2:
            often.set()
        return {1: frames}

    monkeypatch.setattr(sys, "_current_frames", frames)
    sampler = watching.Sampler(1)
    sampler.start()
    assert often.wait(60)
    sampler.stop()
    assert sampler.samples()[0] == ()
