"""The reader and the algebra beside HolisticTraceAnalysis, on synthetic GPU traces: the same where the definitions agree."""

import contextlib
import json
import logging
import warnings

import numpy as np
import pytest

from surokit.profiler.analysis import timeline as tl
from surokit.profiler.analysis.timeline import Kind
from surokit.profiler.record.chrome_trace import read_chrome
from surokit.profiler.report.profile import Profile
from tests.profiler.traces import rank_events, write_rank

EVENTS = 60_001


def synthetic(path, count=EVENTS, seed=0):
    """A trace as torch.profiler writes them, of `count` timed events, in whole microseconds (HTA rounds others): steps of
    nested operators, each with a launch call and a kernel, a copy now and then, and communication on a second stream."""
    rng = np.random.default_rng(seed)
    host, device, network, written, call = 1_000, 1_000, 1_000, 0, 0
    with path.open("w") as file:

        def put(category, name, pid, tid, start, length, **args):
            nonlocal written
            span = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": length}
            file.write((",\n" if written else "") + json.dumps({**span, "args": args}))
            written += 1

        file.write('{"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "a GPU"}],\n')
        file.write('"distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 1},\n"traceEvents": [\n')
        while written < count - 8:
            long, work, wait = (int(n) for n in rng.integers((8, 1, 0), (30, 40, 12)))
            common = {"External id": call + 1, "Sequence number": call, "Fwd thread id": 0, "Ev Idx": 2 * call}
            put("cpu_op", "aten::linear", 7, 7, host, long, **common, **{"Input Dims": [[64, 64], [64, 64], []]})
            put("cpu_op", "aten::addmm", 7, 7, host + 1, long - 2, **common, **{"Record function id": 0})
            kind = "cudaMemcpyAsync" if call % 50 == 49 else "cudaLaunchKernel"
            both = {"External id": call + 1, "correlation": call + 1}
            put("cuda_runtime", kind, 7, 7, host + 2, 4, **both, cbid=211)
            device = max(device, host + 6) + wait
            where = {"device": 0, "context": 1, "stream": 7, **both}
            if call % 50 == 49:
                name = "Memcpy HtoD (Pageable -> Device)"
                put("gpu_memcpy", name, 0, 7, device, work, **where, bytes=4096, **{"memory bandwidth (GB/s)": 4.0})
            else:
                shape = {"grid": [64, 1, 1], "block": [128, 1, 1], "registers per thread": 32, "shared memory": 0}
                put("kernel", f"sm90_gemm_{call % 30}", 0, 7, device, work, **where, **shape, **{"warps per SM": 3.5})
            device += work
            if call % 20 == 19:
                put("cuda_runtime", "cudaLaunchKernel", 7, 7, host + 6, 1, correlation=10**7 + call, cbid=211)
                network = max(network, host + 7) + wait
                where = {"device": 0, "context": 1, "stream": 20, "correlation": 10**7 + call}
                put("kernel", "ncclDevKernel_AllReduce_Sum_bf16", 0, 20, network, 3 * work, **where)
                network += 3 * work
            host += long + int(rng.integers(0, 6))
            if call % 400 == 399:
                put("user_annotation", "Optimizer.step#AdamW.step", 7, 7, host, 5)
                host += 6
            call += 1
        while written < count:
            put("cpu_op", "aten::add", 7, 7, host, 2)
            host += 3
        file.write("\n]}\n")


def ours(path):
    """What HTA's temporal breakdown and overlap say, from the algebra: microseconds of one rank."""
    device = activities(path)
    start, end = device.start_E, device.end_E
    part = tl.breakdown(start, end, int(start.min()), int(end.max()))
    talks = device.is_named("nccl" in name for name in device.names)
    compute = device.is_kind(Kind.KERNEL) & ~talks
    both = tl.overlap(start[talks], end[talks], start[compute], end[compute])
    return {
        "idle_time(us)": part.idle_ns / 1000,
        "kernel_time(us)": part.wall_ns / 1000,
        "compute_time(us)": tl.total(start[compute], end[compute]) / 1000,
        "overlap_pctg": round(100 * both / tl.total(start[talks], end[talks]), 2),
    }


def activities(path):
    timeline = read_chrome(path).timeline
    return timeline.take(timeline.is_kind(Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET))


@pytest.fixture(scope="module")
def theirs():
    """HTA as imported once, silent: it logs every file, and pandas warns of how it is used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from hta.trace_analysis import TraceAnalysis

    def run(path, detailed=False):
        with warnings.catch_warnings(), contextlib.redirect_stderr(None):
            warnings.simplefilter("ignore")
            logging.disable(logging.WARNING)
            try:
                analysis = TraceAnalysis(trace_files={0: str(path)}, trace_dir=str(path.parent))
                temporal = analysis.get_temporal_breakdown(visualize=False)
                both = analysis.get_comm_comp_overlap(visualize=False)
                idle, _ = analysis.get_idle_time_breakdown(visualize=False) if detailed else (None, None)
            finally:
                logging.disable(logging.NOTSET)
        found = {**temporal.iloc[0], "overlap_pctg": both.comp_comm_overlap_pctg[0]}
        return (found, idle, analysis.t) if detailed else found

    return run


def test_the_same_answers(tmp_path, theirs):
    path = tmp_path / "rank0.pt.trace.json"
    synthetic(path)
    expected, found = theirs(path), ours(path)
    assert found == {name: expected[name] for name in found}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_idle_time_of_each_stream_and_time_of_each_kernel(tmp_path, theirs, seed):
    path = tmp_path / "rank0.json"
    synthetic(path, 2000, seed)
    expected, idle, traces = theirs(path, detailed=True)
    assert {name: expected[name] for name in ours(path)} == ours(path)
    device = activities(path)
    for stream, waits in idle.groupby("stream"):  # HTA divides a stream's idle time in another way; the sum is the same
        here = device.take(device.thread_E == stream)
        part = tl.breakdown(here.start_E, here.end_E, int(here.start_E.min()), int(here.end_E.max()))
        assert part.idle_ns / 1000 == waits.idle_time.sum()
    frame, symbols = traces.get_trace(0), traces.symbol_table.get_sym_table()
    of_kernel = frame[frame.stream >= 0].groupby("name").dur.sum()
    assert {symbols[n]: us for n, us in of_kernel.items()} == {
        device.names[n]: device.duration_E()[device.name_E == n].sum() / 1000 for n in np.unique(device.name_E).tolist()
    }


@pytest.mark.parametrize(
    ("rank", "overlap"), [(0, 25.0), (1, 0.0), (2, 11.11)]
)  # the all_gather's share, under the gemm
def test_communication_under_computation_of_each_rank(tmp_path, theirs, rank, overlap):
    path = write_rank(tmp_path, rank, rank_events(rank))
    s = Profile.from_trace(path).summary
    assert round(100 * (1 - s["comm_exposed_ms"] / s["comm_ms"]), 2) == theirs(path)["overlap_pctg"] == overlap
