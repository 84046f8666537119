"""What holds of every recording: the parts sum. And the exact answers of copies, communication, steps without kernels,
and who is named on a CPU."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from surokit.offload.counters import RANGE
from surokit.profiler import profile
from surokit.profiler.analysis.activities import activities_table
from surokit.profiler.analysis.roles import OFFLOAD_RANGES
from surokit.profiler.analysis.tables import CAUSES, PHASES, analyse
from surokit.profiler.analysis.timeline import Event, Kind, Timeline
from surokit.profiler.record.recording import Recording, Shaped
from tests.profiler import traces
from tests.profiler.traces import US, asked, block, program, spans

item = st.tuples(
    st.sampled_from(traces.STEPS),
    st.integers(0, 5),
    st.integers(1, 20),
    st.integers(0, 40),
    st.sampled_from([7, 8, 20]),
)
programs = st.builds(
    program, st.lists(item, max_size=30), gpu=st.booleans(), warmup=st.integers(0, 2), skew=st.sampled_from([0, 0, 9])
)


def us(values):
    return [None if v is None else round(v * 1000, 6) for v in values]


def column(table, key, value):
    return dict(zip(table[key], table[value]))


def raster(timeline, begin, stop):
    """Where any of the events runs, one truth value a nanosecond."""
    cells = np.zeros(max(stop - begin, 0), bool)
    for start, end in zip(timeline.start_E.tolist(), timeline.end_E.tolist()):
        cells[max(start - begin, 0) : max(end - begin, 0)] = True
    return cells


def with_samples(r):
    """The same recording with a sample every 7 ns, on one of three lines."""
    at = np.arange(r.start_ns, r.end_ns, 7)
    return replace(r, places=(("a.py", 1), ("a.py", 2), ("b.py", 3)), place_P=at // 5 % 3, time_P=at)


def with_shapes(r):
    """The same recording with made-up FLOPs for its operators."""
    ops = r.timeline.take(r.timeline.is_kind(Kind.OP))
    flop = np.arange(len(ops), dtype=np.int64) * 7 % 11
    return replace(r, shaped=Shaped(ops, flop, flop, np.full(len(ops), -1, np.int64)))


@settings(max_examples=150, deadline=None)
@given(programs, st.booleans())
@example(program([]), False)
@example(program([("launch", 0, 1, 40, 7), ("mark", 0, 1, 0, 7), ("launch", 0, 1, 40, 8), ("mark", 0, 1, 0, 7)]), False)
def test_parts_sum(recording, named):
    r = with_samples(with_shapes(recording))
    found = analyse(r, r if named else None)
    s, t, n = found.summary, found.tables, found.summary["steps"]
    begin, stop = found.windows[0][0], found.windows[-1][1]

    def total(values):
        return pytest.approx(sum(values), abs=1e-9)

    # wall = busy + idle, idle = its three parts, wall = phases; of each step and of the mean
    steps = t["steps"]
    assert s["wall_ms"] * n == total(steps["wall_ms"])
    assert s["wall_ms"] * n * 1e6 == pytest.approx(stop - begin)
    for k in range(n):
        row = {name: values[k] for name, values in steps.items()}
        assert min(row.values()) >= 0
        assert row["wall_ms"] == total([row["busy_ms"], row["idle_ms"]])
        assert row["idle_ms"] == total(row[f"{w}_wait_ms"] for w in ("host", "kernel", "other"))
        assert row["wall_ms"] == total(row[f"{p}_ms"] for p in PHASES)
    assert s["wall_ms"] == total(s["phases_ms"].values())
    for p in PHASES if s["activity"] != "unknown" else ():
        parts = [s[f"phases_{which}_ms"][p] for which in ("exposed", "idle", "overlapped")]
        assert min(parts) >= 0
        assert parts[0] + parts[1] <= s["phases_ms"][p] + 1e-9

    # busy and exposed time are what a raster says
    on_gpu = r.timeline.is_kind(Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET).any()
    kinds = (Kind.KERNEL, Kind.MEMCPY) if on_gpu else (Kind.OP,)
    timeline = r.timeline.take(
        r.timeline.is_kind(*kinds) & r.timeline.is_named("autograd" not in n for n in r.timeline.names)
    )
    busy = raster(timeline, begin, stop).sum()
    ran = activities_table(r)
    if s["activity"] == "unknown":  # no operator ran: no share of anything is told
        assert busy == 0
        assert ran["activity"] == []
        assert math.isnan(s["busy_ms"])
        assert t["lost"]["cause"] == []
        return
    assert s["busy_ms"] * n * 1e6 == pytest.approx(busy)
    assert min(ran["ms"]) >= 0
    assert s["wall_ms"] == total(ran["ms"])
    talks = timeline.is_named("nccl" in name for name in timeline.names)
    on_host = r.timeline.is_named(name.startswith("gloo") for name in r.timeline.names)
    talking, silent = raster(timeline.take(talks), begin, stop), raster(timeline.take(~talks), begin, stop)
    talking |= raster(r.timeline.take(on_host), begin, stop)
    assert s["comm_ms"] * n * 1e6 == pytest.approx(talking.sum())
    assert s["comm_exposed_ms"] * n * 1e6 == pytest.approx((talking & ~silent).sum())
    idle = {"exposed": talking & ~silent, "overlapped": talking & silent, "idle": ~talking & ~silent}
    for which, expected in idle.items():
        assert sum(s[f"phases_{which}_ms"].values()) * n * 1e6 == pytest.approx(expected.sum())

    # the causes
    lost = column(t["lost"], "cause", "ms_per_step")
    assert min(lost.values()) >= 0
    if s["activity"] == "gpu":
        is_copy = timeline.is_kind(Kind.MEMCPY)
        copying, rest = raster(timeline.take(is_copy), begin, stop), raster(timeline.take(~is_copy), begin, stop)
        alone = raster(timeline.take(talks), begin, stop) & ~silent
        assert sum(lost.values()) == total([s["idle_ms"], ((copying & ~rest).sum() + alone.sum()) / n / 1e6])
    else:
        rest = [lost.get(cause, 0) for cause in ("launches", "host", "offload", "communication")]
        assert sum(rest) == total([s["idle_ms"]])
    assert lost.get("communication", 0) == total([s["comm_exposed_ms"]])
    assert t["lost"]["usd_per_day"] == pytest.approx([2 * h for h in t["lost"]["gpu_hours_per_day"]])
    assert s["idle_ms"] * n == total(t["gaps"]["ms"])  # there are fewer than the table keeps
    assert lost["host"] == total(t["lines"]["ms"])

    # rows of modules, with pseudo-rows, sum to busy and to all FLOPs
    modules = t["modules"]
    own, ms = column(modules, "module", "self_ms"), column(modules, "module", "ms")
    assert s["busy_ms"] == total(own.values())
    assert modules["ms"] == pytest.approx([f + b for f, b in zip(modules["forward_ms"], modules["backward_ms"])])
    for parent, child in (("Net", "a"), ("a", "a.b")):
        if parent in ms:
            assert ms[parent] == total([own[parent], ms.get(child, 0)])
    flop = column(modules, "module", "gflop")
    if (
        s["gflop_per_step"] is None
    ):  # no operator runs in a CUDA graph, and no step without graphs says what it multiplies
        assert set(flop.values()) <= {None}
        assert any("FLOPs are unknown" in note for note in found.notes)
        return
    for parent, child, grown in zip(modules["module"], modules["module"][1:], modules["depth"][1:]):
        if grown > 0 and not child.startswith("("):  # the modules form one chain, so each holds the next
            for part in ("forward_ms", "backward_ms", "gflop"):
                value = column(modules, "module", part)
                assert value[parent] >= value[child] - 1e-12
    outermost = [v for name, v in flop.items() if name == "Net" or name.startswith("(")]
    assert s["gflop_per_step"] == total(outermost)


def test_waits_for_an_offloaded_optimizer_are_a_cause_of_their_own():
    """On a GPU: in the gap 10 to 60 a wait 20 to 40, in which the host also synchronises, and a launch call from 50. Of two copies
    under which nothing runs the one of 70 to 80 was asked for in a wait, the one of 85 to 90 was not."""
    copy = {"kind": Kind.MEMCPY, "by": "cudaMemcpyAsync", "stream": 8}
    made = [
        *asked(1, "gemm", (0, 1), (2, 10)),
        Event(Kind.ANNOTATION, f"{RANGE}adam", 20 * US, 40 * US, 1),
        Event(Kind.RUNTIME, "cudaEventSynchronize", 25 * US, 30 * US, 1, 9),
        *asked(2, "gemm", (50, 60), (60, 70)),
        Event(Kind.ANNOTATION, f"{RANGE}landing", 61 * US, 64 * US, 1),
        *asked(3, "Memcpy HtoD (Pinned -> Device)", (62, 63), (70, 80), **copy),
        *asked(4, "Memcpy HtoD (Pinned -> Device)", (65, 66), (85, 90), **copy),
        *asked(5, "gemm", (67, 68), (90, 100)),
    ]
    found = analyse(block(made, 100))
    lost = column(found.tables["lost"], "cause", "ms_per_step")
    assert dict(zip(lost, us(lost.values()))) == {"launches": 13, "syncs": 0, "copies": 9, "host": 20, "offload": 30}
    assert found.tables["offload"] == {"wait": ["adam", "landing"], "count": [1, 1], "ms": [0.02, 0.003]}
    assert "0.02 ms in waits for adam" in column(found.tables["lost"], "cause", "evidence")["offload"]
    assert column(found.tables["lines"], "line", "ms")[0] == pytest.approx(0.02)
    assert analyse(block(made[:2], 100)).tables["lost"]["cause"] == list(CAUSES)


def test_waits_for_an_offloaded_optimizer_on_a_cpu():
    """Between operators at 0 to 10 and 990 to 1000: a wait of 800 leaves 180, a long gap of the host's no more but of launches."""
    made = [
        Event(Kind.OP, "aten::mm", 0, 10 * US, 1),
        Event(Kind.ANNOTATION, f"{RANGE}slot", 100 * US, 915 * US, 1),
        Event(Kind.OP, "aten::mm", 990 * US, 1000 * US, 1),
    ]
    lost = column(analyse(block(made, 1000, device="cpu")).tables["lost"], "cause", "ms_per_step")
    assert dict(zip(lost, us(lost.values()))) == {"launches": 0, "syncs": 0, "copies": 0, "host": 165, "offload": 815}


def test_the_optimizers_and_the_profiler_mean_the_same_range():
    assert (RANGE,) == OFFLOAD_RANGES


@settings(max_examples=30, deadline=None)
@given(programs)
def test_a_gap_inside_a_graph_is_never_host_wait(recording):
    found = analyse(recording)
    device = recording.timeline.take(recording.timeline.is_kind(Kind.KERNEL, Kind.MEMCPY))
    graph: dict[int, list[int]] = {}  # the starts of the kernels of each launch
    for start, launch in zip(device.start_E.tolist(), device.correlation_E.tolist()):
        graph.setdefault(launch, []).append(start)
    first = {starts[0] for starts in graph.values()}
    inside = {start for starts in graph.values() for start in starts[1:]} - first
    gaps = found.tables["gaps"]
    for start_ms, ms, kind in zip(gaps["start_ms"], gaps["ms"], gaps["kind"]):
        end = found.windows[0][0] + round((start_ms + ms) * 1e6)
        assert end not in inside or kind != "host wait"


def test_copies_both_ways_hidden_and_exposed():
    found = analyse(traces.copies())
    s, t = found.summary, found.tables
    assert us(s[k] for k in ("wall_ms", "busy_ms", "idle_ms", "host_wait_ms")) == [100, 70, 30, 25]
    # launches: the call 13-15, then 1 + 4 of waiting; copies: calls in 3 gaps (3 + 2 + 5) and 30 exposed; host: the rest
    assert us(t["lost"]["ms_per_step"]) == [7, 0, 40, 13]
    assert {
        (d, p): (*us([m, e]), b)
        for d, p, m, e, b in zip(*(t["copies"][c] for c in ("direction", "pinned", "ms", "exposed_ms", "bytes")))
    } == {
        ("host to device", False): (5, 5, 5000),
        ("host to device", True): (20, 0, 20_000),
        ("device to host", True): (20, 15, 20_000),
        ("device to host", False): (10, 10, 5000),
    }
    assert (s["h2d_bytes"], s["d2h_bytes"]) == (25_000, 25_000)
    assert us([s["phases_ms"]["copies"]]) == [3 + 5 + 2 + 15 + 5 + 10]  # gaps in copy calls, own time


def test_communication_and_the_part_that_nothing_hides():
    found = analyse(traces.communication())
    s = found.summary
    assert us(s[k] for k in ("busy_ms", "comm_ms", "comm_exposed_ms")) == [60, 40, 20]
    # own time goes to who was there first: gemm 10-40, the all-reduce 40-70
    assert us(column(found.tables["modules"], "module", "self_ms").values()) == [30, 30]
    assert us([column(found.tables["modules"], "module", "ms")["(communication)"]]) == [30]
    assert s["launch_delay_us"] == 22  # 5, 22 and 39 us


def test_collectives_that_only_their_operator_names():
    ops = [Event(Kind.OP, "c10d::allreduce_", 0, 50 * US, 1), Event(Kind.OP, "aten::mm", 50 * US, 60 * US, 1)]
    found = analyse(block(ops, 100, device="cpu"))
    assert us(found.summary[k] for k in ("comm_ms", "comm_exposed_ms")) == [50, 50]
    launched = asked(1, "Memcpy PtoP (Device -> Device)", (10, 20), (30, 40), kind=Kind.MEMCPY)
    found = analyse(block([ops[0], *launched], 100))
    assert us([found.summary["comm_ms"]]) == [10]
    assert found.tables["modules"]["module"] == ["(communication)"]


def test_a_step_that_launches_nothing_ends_at_its_mark():
    found = analyse(traces.steps_without_kernels())
    assert [(a // US, b // US) for a, b in found.windows] == [(0, 30), (30, 40), (40, 70), (70, 80)]
    assert us(found.tables["steps"]["busy_ms"]) == [20, 0, 20, 0]


def test_an_empty_window_has_no_shares():
    found = analyse(Recording(Timeline.of([]), 5, 5))
    assert (found.summary["wall_ms"], found.summary["busy_frac"], found.summary["tflops"]) == (0, 0, None)
    assert found.tables["lost"]["share"] == []


def test_loss_clipping_and_optimizer_are_rows_of_their_own():
    found = analyse(traces.cpu_step())
    modules = found.tables["modules"]
    rows = {m: tuple(us(v)) for m, *v in zip(*(modules[c] for c in ("module", "forward_ms", "backward_ms", "self_ms")))}
    assert rows == {
        "Net": (10, 11, 0),
        "up": (10, 11, 21),  # 41-50 and the accumulation of the gradient, 51-53
        "(loss)": (7, 4, 11),  # mul and mean; 33-36 and 37-38
        "(clip)": (7, 0, 7),
        "(optimizer)": (16, 0, 16),
        "(outside modules)": (4, 0, 4),
    }
    assert us(found.summary["phases_ms"].values()) == [0, 0, 0, 29, 22, 23, 26]  # clipping 56-65 is the optimizer's
    assert modules["gflop"] == [None] * 6


def test_without_modules_the_differentiated_work_is_the_forward_pass():
    r = replace(traces.cpu_step(), modules=(), **spans())
    modules = analyse(r).tables["modules"]
    rows = dict(zip(modules["module"], us(modules["self_ms"])))
    assert rows == {"(backward)": 15, "(forward)": 17, "(clip)": 7, "(optimizer)": 16, "(outside modules)": 4}


def test_every_row_that_work_outside_modules_can_have():
    def at(t, op, sequence=-1, node=-1, kernel="k", **more):
        around = "autograd::engine::evaluate_function: XBackward0"
        inside = [Event(Kind.OP, around, t * US, (t + 3) * US, 1, sequence=node)] if node >= 0 else []
        own = Event(Kind.OP, op, t * US, (t + 3) * US, 1, -1, t + 1, sequence)
        launch, activity = asked(t + 1, kernel, (t, t + 2), (t + 3, t + 8), **more)
        return [*inside, own, replace(launch, external=t + 1), replace(activity, external=t + 1)]

    def during(name, start, end):
        return Event(Kind.ANNOTATION, name, start * US, end * US, 1)

    events = [
        during("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 9),
        *at(0, "aten::stack"),
        *at(10, "aten::copy_", kind=Kind.MEMCPY, kernel="Memcpy HtoD (Pinned -> Device)"),
        *at(20, "aten::linear", sequence=1),
        *at(30, "aten::sub", sequence=2),
        *at(40, "aten::neg", node=2),
        *at(50, "aten::mm", node=1),
        *at(60, "aten::fill_", node=77),
        *at(70, "aten::detach", kernel="ncclDevKernel_AllReduce_Sum_f32_RING_LL"),
        *at(80, "aten::linalg_vector_norm"),
        *at(90, "aten::mul_"),
        during("Optimizer.step#SGD.step", 100, 109),
        *at(100, "aten::_foreach_add_"),
        *at(110, "aten::add_"),
    ]
    found = analyse(block(events, 120, modules=(("Net", "Net"),), **spans((0, 19, 29))))
    modules = found.tables["modules"]
    rows = {m: tuple(us(v)) for m, *v in zip(*(modules[c] for c in ("module", "forward_ms", "backward_ms")))}
    assert rows == {
        "(data)": (5, 0),
        "(copies)": (5, 0),
        "Net": (5, 5),
        "(loss)": (5, 5),
        "(backward)": (0, 5),
        "(communication)": (5, 0),
        "(clip)": (10, 0),
        "(optimizer)": (5, 0),
        "(outside modules)": (5, 0),
    }
    # busy 15; of the gaps before 83, 93, 103 and 113: 2 + 1, 4 + 1 inside the clipping, 2 + 1, and 1 until the range ends
    assert us([found.summary["phases_ms"]["optimizer"]]) == [15 + 3 + 5 + 3 + 1]


def test_a_norm_before_the_backward_is_no_clipping():
    node = "autograd::engine::evaluate_function: MmBackward0"
    rows = [
        (Kind.OP, "aten::linalg_vector_norm", 10, 20, -1),
        (Kind.OP, "aten::mul_", 20, 25, -1),
        (Kind.OP, node, 30, 40, 3),
        (Kind.OP, "aten::_foreach_norm", 50, 60, -1),
        (Kind.ANNOTATION, "Optimizer.step#SGD.step", 70, 80, -1),
    ]
    ops = [Event(kind, name, a * US, b * US, 1, sequence=q) for kind, name, a, b, q in rows]
    modules = analyse(block(ops, 90, device="cpu")).tables["modules"]
    assert dict(zip(modules["module"], us(modules["ms"]))) == {"(outside modules)": 15, "(clip)": 10}


def test_a_node_belongs_to_the_last_operator_with_its_number():
    node = "autograd::engine::evaluate_function: MmBackward0"
    rows = [("aten::detach", 10, 20, 5), ("aten::mm", 30, 40, 5), (node, 50, 60, 5), ("aten::mm", 50, 60, -1)]
    ops = [Event(Kind.OP, name, a * US, b * US, 1, sequence=q) for name, a, b, q in rows]
    both = spans((0, 5, 25), (1, 25, 45))
    found = analyse(block(ops, 90, device="cpu", modules=(("A", "A"), ("B", "B")), **both))
    assert us(found.tables["modules"]["backward_ms"]) == [0, 10]


def test_a_launch_whose_thread_has_another_number_is_placed_by_its_operator():
    launch, activity, op = asked(1, "gemm", (10, 12), (20, 30), op="aten::mm")
    events = [replace(launch, thread=4711), activity, op]
    found = analyse(block(events, 50, modules=(("Net", "Net"),), **spans((0, 5, 15))))
    assert found.tables["modules"]["module"] == ["Net"]


def test_threads_do_not_mix_their_modules():
    ops = [Event(Kind.OP, "aten::mm", 10 * US, 20 * US, 1), Event(Kind.OP, "aten::mm", 20 * US, 40 * US, 2)]
    both = spans((0, 0, 50), (1, 0, 50))
    both["thread_S"] = np.array([1, 2])
    found = analyse(block(ops, 50, device="cpu", modules=(("A", "A"), ("B", "B")), **both))
    assert us(column(found.tables["modules"], "module", "self_ms").values()) == [10, 20]


def test_a_loss_is_known_by_its_name_where_no_module_is():
    rows = [("aten::mm", 0, 10), ("aten::cross_entropy_loss", 10, 30)]
    nodes = [("autograd::engine::evaluate_function: NllLossBackward0", 30, 50)]
    ops = [Event(Kind.OP, n, a * US, b * US, 1) for n, a, b in [*rows, *nodes, ("aten::nll_loss_backward", 31, 50)]]
    found = analyse(block(ops, 50, device="cpu"))
    assert us(column(found.tables["modules"], "module", "ms").values()) == [39, 10]
    assert found.tables["modules"]["module"] == ["(loss)", "(outside modules)"]


def test_flops_are_summed_by_module_and_over_the_wall():
    r = traces.cpu_step()
    ops = r.timeline
    flop = np.zeros(len(ops), np.int64)
    for name, value in (("aten::addmm", 6_000), ("aten::mm", 12_000), ("aten::_fused_adamw_", 500)):
        flop[ops.is_named(n == name for n in ops.names)] = value
    found = analyse(replace(r, shaped=Shaped(ops, flop, flop, np.zeros(len(ops), np.int64))))
    gflop = column(found.tables["modules"], "module", "gflop")
    assert gflop == pytest.approx(
        {"Net": 18e-6, "up": 18e-6, "(loss)": 0, "(clip)": 0, "(optimizer)": 0.5e-6, "(outside modules)": 0}
    )
    assert found.summary["gflop_per_step"] == pytest.approx(18.5e-6)
    assert found.summary["tflops"] == pytest.approx(18_500 / 100e-6 / 1e12)


def test_the_garbage_collector_is_evidence_of_the_host():
    r = replace(traces.cpu_step(), start_C=np.array([92 * US, 300 * US]), end_C=np.array([98 * US, 310 * US]))
    found = analyse(r)
    assert us([found.summary["collect_ms"]]) == [6]
    assert "Python's garbage collector took 0.006 ms" in found.tables["lost"]["evidence"][3]


def test_every_gap_counts_for_its_line_however_many_there_are():
    """1000 gaps of 0.2 ms, each sampled: those of line 7 are one in four, and none is among the longest 200 alone."""
    operators = [Event(Kind.OP, "aten::mm", 300 * k * US, (300 * k + 100) * US, 1) for k in range(1001)]
    sampled = np.arange(1000) * 300 * US + 150 * US
    r = block(
        operators, 300_100, device="cpu", places=(("a.py", 7), ("a.py", 8)), time_P=sampled,
        place_P=(np.arange(1000) % 4 > 0).astype(np.int64),
    )  # fmt: skip
    found = analyse(r)
    lines = found.tables["lines"]
    assert list(zip(*lines.values())) == [("a.py", 8, "", 150, 750, 0.2), ("a.py", 7, "", 50, 250, 0.2)]
    assert found.tables["lost"]["evidence"][3] == "150 ms at a.py:8; 50 ms at a.py:7"


def test_a_gap_is_shared_out_by_the_samples_in_it_and_not_by_those_in_calls():
    work = [*asked(1, "gemm", (2, 5), (10, 20)), *asked(2, "gemm", (80, 82), (90, 100))]
    work.append(Event(Kind.RUNTIME, "cudaStreamSynchronize", 15 * US, 30 * US, 1, 9))
    times = np.array([25, 40, 50, 60]) * US  # waiting at line 1, then Python at 2, 2 and 3
    places = (("a.py", 1), ("a.py", 2), ("a.py", 3))
    r = block(work, 100, places=places, time_P=times, place_P=np.array([0, 1, 1, 2]))
    lines = analyse(r).tables["lines"]
    rows = {(file, line): round(ms * 1000, 3) for file, line, ms in zip(lines["file"], lines["line"], lines["ms"])}
    # 20-55 less the wait until 30; 55-82 less the launch from 80; and 0-2, too short to be sampled
    assert rows == {("a.py", 2): 25, ("a.py", 3): 25, ("", 0): 2}


def test_a_sample_that_waited_for_pythons_lock_stands_for_the_wait():
    """Samples come every 5 ms, and later only while a line holds the lock: the second did from 5 ms on."""
    r = block(
        [Event(Kind.OP, "aten::mm", 20_000 * US, 20_001 * US, 1)], 20_001, device="cpu", places=(("a", 1), ("a", 2)),
        time_P=np.array([1, 15]) * 1_000_000, place_P=np.array([0, 1]),
    )  # fmt: skip
    lines = analyse(r).tables["lines"]
    assert column(lines, "line", "ms") == {1: 3.5, 2: 16.5}


def test_dollars_need_a_price():
    assert analyse(traces.copies()).tables["lost"]["usd_per_day"] == [None] * 4
    lost = analyse(replace(traces.copies(), usd_per_gpu_hour=3.0)).tables["lost"]
    assert lost["usd_per_day"] == pytest.approx([24 * 3 * x for x in (0.07, 0, 0.4, 0.13)])


def test_clocks_that_disagree_are_said_and_nothing_is_negative():
    made = [*asked(1, "gemm", (40, 44), (10, 30)), *asked(2, "gemm", (50, 54), (53, 60))]
    found = analyse(block(made, 100))
    assert any("1 of 2 device activities begin before" in note and "by up to 30 us" in note for note in found.notes)
    assert found.summary["launch_delay_us"] == 0
    assert found.summary["host_wait_ms"] >= 0
    assert not any("clock" in note for note in analyse(traces.copies()).notes)


def test_a_checkpointed_module_that_runs_again_in_a_backward_is_backward_work():
    node = Event(Kind.OP, "autograd::engine::evaluate_function: CheckpointFunctionBackward", 0, 50 * US, 1, sequence=9)
    ops = [node, Event(Kind.OP, "aten::mm", 10 * US, 40 * US, 1)]
    found = analyse(block(ops, 50, modules=(("Net", "Net"),), device="cpu", **spans((0, 5, 45))))
    modules = found.tables["modules"]
    assert (modules["module"], us(modules["forward_ms"]), us(modules["backward_ms"])) == (["Net"], [0], [30])


def test_a_compiled_region_is_a_row_of_the_module_that_holds_it():
    node = "autograd::engine::evaluate_function: CompiledFunctionBackward"
    ops = [
        Event(Kind.OP, "Torch-Compiled Region: 0/0", 10 * US, 40 * US, 1),
        Event(Kind.OP, "CompiledFunction", 15 * US, 40 * US, 1, sequence=3),
        Event(Kind.OP, node, 50 * US, 80 * US, 2, sequence=3),
        *asked(1, "triton_poi_fused_0", (20, 22), (30, 50)),
        Event(Kind.RUNTIME, "cuLaunchKernel", 60 * US, 62 * US, 2, 2, 77),
        Event(Kind.KERNEL, "triton_poi_fused_1", 64 * US, 90 * US, 7, 2, 77),
        Event(Kind.OP, "aten::empty", 60 * US, 62 * US, 2, -1, 77),
    ]
    found = analyse(block(ops, 100, modules=(("OptimizedModule", "OptimizedModule"),), **spans((0, 5, 45))))
    modules = found.tables["modules"]
    assert modules["module"] == ["OptimizedModule"]
    assert (us(modules["forward_ms"]), us(modules["backward_ms"])) == ([20], [26])


def repeated(r, times):
    """The recording, again and again; ids stay unique."""
    columns, span = r.timeline.columns(), r.end_ns - r.start_ns
    k = np.repeat(np.arange(times), len(r.timeline))
    table = np.tile(columns, times)
    table[2:4] += k * span
    for ids in (5, 6, 7):  # correlation, external, sequence
        table[ids] = np.where(table[ids] >= 0, table[ids] + k * (columns[ids].max() + 1), -1)
    s = np.repeat(np.arange(times), len(r.start_S)) * span
    return replace(
        r,
        timeline=Timeline.from_columns(r.timeline.names, table),
        end_ns=r.end_ns + (times - 1) * span,
        marks_ns=tuple(m + i * span for i in range(times) for m in r.marks_ns),
        module_S=np.tile(r.module_S, times),
        start_S=np.tile(r.start_S, times) + s,
        end_S=np.tile(r.end_S, times) + s,
        thread_S=np.tile(r.thread_S, times),
    )


def test_time_grows_in_proportion_to_the_events():
    kinds = ["launch", "op", "enter", "leave", "node", "launch", "copy", "launch"]
    items = [("mark", 1, 1, 1, 7), *((kinds[i % 8], 2, 5, 4, 7) for i in range(1000))]
    piece = program(items)

    def seconds(r):
        begin = time.process_time()
        analyse(r)
        return time.process_time() - begin

    small, large = repeated(piece, 16), repeated(piece, 160)
    assert len(large.timeline) > 300_000
    assert analyse(large).summary["busy_ms"] * 160 == pytest.approx(0.002 * 159)  # the last work follows the last mark
    assert seconds(large) < 40 * min(seconds(small) for _ in range(3))  # where a square grows by 100


def test_named_rows_cover_the_busy_time_of_an_ordinary_step():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(2048, 64)
    with profile(steps=3, warmup=1) as p:
        for _ in range(4):
            loss = torch.nn.functional.mse_loss(model(x), x) * 2
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    own = column(p._analysis.tables["modules"], "module", "self_ms")
    unnamed = own.get("(outside modules)", 0) + own.get("(backward)", 0)
    assert unnamed < 0.02 * p.summary["busy_ms"]
    assert {"0", "1", "2", "(loss)", "(clip)", "(optimizer)"} <= set(own)
    assert set(column(p._analysis.tables["lost"], "cause", "share")) == set(CAUSES)
