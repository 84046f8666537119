"""Kernels of replayed CUDA graphs: never host wait between them, and named after a step without graphs."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surokit.hardware.gpus import Ceilings, Gpu
from surokit.profiler import Profile
from surokit.profiler.analysis.graphs import CELLS, align
from surokit.profiler.analysis.parts import parts_table
from surokit.profiler.analysis.tables import analyse
from surokit.profiler.analysis.timeline import Event, Kind
from surokit.profiler.record.recording import Shaped
from tests.profiler.traces import REPLAYED, US, asked, block, eager_step, replay, spans
from tests.refusals import refused


def us(values):
    return [round(v * 1000, 6) for v in values]


def rows(found):
    table = found.tables["modules"]
    return {m: tuple(us(v)) for m, *v in zip(*(table[c] for c in ("module", "forward_ms", "backward_ms", "self_ms")))}


def test_a_graph_is_one_launch_and_the_gaps_inside_it_are_the_devices():
    s = analyse(replay()).summary
    # host wait: 0-18 and 64-70; inside, 30-31 and 40-46, though the launch call lasts until 35
    assert us(s[k] for k in ("busy_ms", "host_wait_ms", "kernel_wait_ms", "other_wait_ms")) == [39, 24, 2, 5]
    assert (s["launches_per_step"], s["graph_launches_per_step"]) == (1, 1)
    assert s["launch_delay_us"] == 0
    assert analyse(eager_step()).summary["graph_launches_per_step"] == 0


def test_without_an_eager_step_a_graph_is_a_row_of_its_own():
    found = analyse(replay())
    assert rows(found) == {"(cuda graph)": (39, 0, 39)}
    assert any("(cuda graph)" in note for note in found.notes)


def test_a_graph_that_a_module_replays_is_that_modules():
    r = replay()
    inside = block(
        [], 70, timeline=r.timeline, modules=(("Net", "Net"),), module_S=np.array([0]), start_S=np.array([5 * US]),
        end_S=np.array([40 * US]), thread_S=np.array([1]),
    )  # fmt: skip
    found = analyse(inside)
    assert rows(found) == {"Net": (39, 0, 39)}
    assert not found.notes


def test_kernels_are_named_after_an_eager_step():
    found = analyse(replay(), named_by=eager_step())
    assert rows(found) == {"Net": (25, 10, 0), "a": (21, 0, 21), "b": (4, 10, 14), "(optimizer)": (4, 0, 4)}
    assert any("5 of 5 kernels in CUDA graphs are named" in note and "100%" in note for note in found.notes)
    assert us([found.summary["phases_ms"][p] for p in ("forward", "backward", "optimizer")]) == [32, 10, 4]


def test_what_only_the_replay_runs_stays_unnamed_and_is_counted():
    changed = (("gemm", 18, 30), ("new", 31, 40), ("gemm", 46, 50), ("adamw", 60, 64))
    found = analyse(replay(changed), named_by=eager_step())
    named = {"Net": (16, 0, 0), "a": (12, 0, 12), "b": (4, 0, 4), "(optimizer)": (4, 0, 4)}
    assert rows(found) == {**named, "(cuda graph)": (9, 0, 9)}
    assert any("3 of 4 kernels in CUDA graphs are named" in note and "69%" in note for note in found.notes)


def test_parts_of_a_replay_know_the_operators_of_the_eager_step():
    eager = block(
        [Event(Kind.OP, "_Stage", US, 5 * US, 1), *asked(1, "gemm", (2, 4), (5, 9), op="aten::mm")],
        10,
        modules=(("Net", "Net"), ("Net.mlp", "MLP")),
        **spans((0, 0, 9), (1, 1, 9)),
    )
    graph = replay((("gemm", 18, 30),))
    for found, ms in ((parts_table(eager), 0.004), (parts_table(graph, eager), 0.012)):
        assert dict(zip(found["part"], found["forward_ms"]))["Linear, fused"] == pytest.approx(ms)
    assert "Linear, fused" not in parts_table(graph)["part"]


def with_products(r, flop=2_000_000):
    """The recording with shapes: so many FLOPs a product."""
    products = r.timeline.is_named(n == "aten::mm" for n in r.timeline.names)
    flop_E = np.where(products, flop, 0)
    return replace(r, shaped=Shaped(r.timeline, flop_E, flop_E, flop_E * 0))


@pytest.mark.parametrize("recorded", [replay(), with_products(replay())], ids=["no shapes", "shapes of a replay"])
def test_flops_of_a_replay_are_those_of_the_eager_step(recorded):
    found = analyse(recorded, with_products(eager_step()))
    table = found.tables["modules"]
    assert dict(zip(table["module"], table["gflop"])) == pytest.approx(
        {"Net": 0.008, "a": 0.002, "b": 0.006, "(optimizer)": 0}
    )
    assert found.summary["gflop_per_step"] == pytest.approx(0.008)
    assert not any("FLOPs are unknown" in note for note in found.notes)


@pytest.mark.parametrize("eager", [None, eager_step()], ids=["alone", "named without shapes"])
def test_flops_of_a_replay_alone_are_unknown(eager):
    found = analyse(with_products(replay()), eager)
    assert found.summary["gflop_per_step"] is found.summary["tflops"] is None
    assert set(found.tables["modules"]["gflop"]) == {None}
    assert any("no operator runs in a CUDA graph" in note for note in found.notes)


def test_the_light_of_a_replay_is_that_of_the_eager_step():
    gpu = Gpu("mine", ceilings=Ceilings("today", bf16_tflops=4.0, bandwidth_tb_s=0.5))
    graph = Profile(with_products(replay()))
    named = graph.named_by(Profile(with_products(eager_step())))
    light = named.speed_of_light(gpu)
    assert dict(zip(light.module, light.gflop)) == pytest.approx(
        {"(whole step)": 0.008, "a": 0.002, "b": 0.006, "(optimizer)": 0}
    )
    with refused(ValueError):
        graph.speed_of_light(gpu)


def test_nothing_in_common_names_nothing():
    found = analyse(replay((("x", 20, 30), ("y", 30, 40))), named_by=eager_step())
    assert rows(found) == {"(cuda graph)": (20, 0, 20)}
    assert any("0 of 2 kernels" in note for note in found.notes)


def test_each_step_is_named_by_itself():
    events = []
    for k in range(3):
        t = 100 * k
        events.append(Event(Kind.RUNTIME, "cudaGraphLaunch", (t + 2) * US, (t + 4) * US, 1, k + 1))
        events += [Event(Kind.KERNEL, n, (t + a) * US, (t + b) * US, 7, k + 1) for n, a, b in REPLAYED]
    r = block(events, 300, marks_ns=(90 * US, 190 * US, 290 * US))
    found = analyse(r, named_by=eager_step())
    assert rows(found)["(optimizer)"] == (4, 0, 4)
    assert any("15 of 15 kernels" in note for note in found.notes)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(-1, 3), max_size=12))
def test_alignment_is_a_longest_common_subsequence(known, wanted):
    pairs = align(np.array(known, np.int64), np.array(wanted, np.int64)).tolist()
    found = [(i, j) for j, i in enumerate(pairs) if i >= 0]
    assert [i for i, _ in found] == sorted({i for i, _ in found})
    assert all(known[i] == wanted[j] for i, j in found)
    best = [[0] * (len(wanted) + 1) for _ in range(len(known) + 1)]
    for i, a in enumerate(known):
        for j, b in enumerate(wanted):
            best[i + 1][j + 1] = best[i][j] + 1 if a == b else max(best[i][j + 1], best[i + 1][j])
    assert len(found) == best[-1][-1]


@pytest.mark.parametrize("count", [int(CELLS**0.5) + 10])
def test_a_long_stretch_without_agreement_is_left_unnamed(count):
    known, wanted = np.arange(count), np.arange(count) + 1
    known[0] = wanted[0] = known[-1] = wanted[-1] = 0
    pairs = align(known, wanted)
    assert pairs[0] == 0
    assert pairs[-1] == count - 1
    assert (pairs[1:-1] == -1).all()
