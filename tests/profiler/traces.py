"""Hand-made traces whose every answer is known, in microseconds; and `program`, which makes a recording from a list of
what a program did, for properties that hold of all recordings.

The first trace, `gpu_recording`: two optimizer steps end at 20 and 95. The first is warm-up; its kernel ends at 30, so
the second step's window is 30 to 90 on the device:

    device  k1 ..30 |  k2 33-40 (stream 7)   k3 44-50 (stream 8)   copy 48-55   k5 76-90
    gaps    30-33 (launch ends at 32), 40-44 (launched at 39), 55-76 (launch ends at 75; a sync returns at 58, Python
    runs 60-69)
"""

import json
from typing import Any

import numpy as np

from surokit.profiler.analysis.timeline import Event, Kind, Timeline
from surokit.profiler.record.recording import Recording, SyncPoint

US = 1000
EVENTS = [
    # kind, name, start, end, thread or stream, correlation, external, sequence, bytes
    (Kind.OP, "aten::mm", 0, 10, 1, -1, 1, -1, 0),
    (Kind.RUNTIME, "cudaLaunchKernel", 2, 6, 1, 101, 1, -1, 0),
    (Kind.KERNEL, "gemm", 8, 30, 7, 101, 1, -1, 0),
    (Kind.ANNOTATION, "Optimizer.step#AdamW.step", 15, 20, 1, -1, -1, -1, 0),
    (Kind.OP, "aten::add", 24, 34, 1, -1, 2, 11, 0),
    (Kind.RUNTIME, "cudaLaunchKernel", 26, 32, 1, 102, 2, -1, 0),
    (Kind.KERNEL, "add", 33, 40, 7, 102, 2, -1, 0),
    (Kind.OP, "aten::mm", 36, 42, 1, -1, 3, 12, 0),
    (Kind.RUNTIME, "cudaLaunchKernel", 37, 39, 1, 103, 3, -1, 0),
    (Kind.KERNEL, "gemm", 44, 50, 8, 103, 3, -1, 0),
    (Kind.OP, "aten::_local_scalar_dense", 45, 60, 1, -1, 4, -1, 0),
    (Kind.RUNTIME, "cudaMemcpyAsync", 46, 47, 1, 104, 4, -1, 0),
    (Kind.MEMCPY, "Memcpy DtoH (Device -> Pageable)", 48, 55, 7, 104, 4, -1, 4096),
    (Kind.RUNTIME, "cudaStreamSynchronize", 47, 58, 1, 105, 4, -1, 0),
    (Kind.OP, "autograd::engine::evaluate_function: AddBackward0", 69, 77, 1, -1, 5, 11, 0),
    (Kind.OP, "aten::mul", 70, 76, 1, -1, 6, -1, 0),
    (Kind.RUNTIME, "cudaLaunchKernel", 71, 75, 1, 106, 6, -1, 0),
    (Kind.KERNEL, "mul", 76, 90, 7, 106, 6, -1, 0),
    (Kind.ANNOTATION, "Optimizer.step#AdamW.step", 80, 95, 1, -1, -1, -1, 0),
    (Kind.RUNTIME, "cudaEventQuery", 85, 86, 1, 107, -1, -1, 0),
]


def events():
    return [Event(kind, name, a * US, b * US, *rest) for kind, name, a, b, *rest in EVENTS]


def gpu_recording(**changes):
    spans = np.array([(0, 22, 43, 1), (1, 23, 35, 1)], np.int64)  # module, start, end, thread
    made: dict[str, Any] = {
        "timeline": Timeline.of(events()),
        "start_ns": 0,
        "end_ns": 95 * US,
        "marks_ns": (20 * US, 95 * US),
        "warmup": 1,
        "thread": 1,
        "modules": (("Net", "Net"), ("Net.a", "Linear")),
        "module_S": spans[:, 0],
        "start_S": spans[:, 1] * US,
        "end_S": spans[:, 2] * US,
        "thread_S": spans[:, 3],
        "syncs": (SyncPoint(45 * US, 60 * US, 1, ".item()", "cuda", "/home/me/train.py", 7),),
        "places": (("/home/me/train.py", 8),),
        "place_P": np.array([0, 0], np.int64),
        "time_P": np.array([62 * US, 66 * US], np.int64),
        "tokens_per_step": 600.0,
        "device": "a GPU",
    }
    return Recording(**(made | changes))


def asked(number, name, call, runs, *, kind=Kind.KERNEL, by="cudaLaunchKernel", stream=7, op="", nbytes=0):
    """The events of one piece of device work: its launch call on the host, around it an operator, and the activity."""
    launch = Event(Kind.RUNTIME, by, call[0] * US, call[1] * US, 1, number, number if op else -1)
    made = [launch, Event(kind, name, runs[0] * US, runs[1] * US, stream, number, number if op else -1, nbytes=nbytes)]
    return [*made, Event(Kind.OP, op, call[0] * US, call[1] * US, 1, -1, number)] if op else made


def block(events, end, **changes):
    """A recording of one step from 0 to `end` microseconds."""
    made: dict[str, Any] = {
        "timeline": Timeline.of(events),
        "start_ns": 0,
        "end_ns": end * US,
        "thread": 1,
        "device": "a GPU",
    }
    return Recording(**(made | changes))


def spans(*rows, unit=US):
    """Fields of a Recording for module spans: (module, start, end) in microseconds, on thread 1."""
    table = np.array([(m, a * unit, b * unit, 1) for m, a, b in rows], np.int64).reshape(-1, 4)
    table = table[np.lexsort((-table[:, 2], table[:, 1]))]
    return dict(zip(("module_S", "start_S", "end_S", "thread_S"), table.T))


def communication():
    """An all-reduce from 30 to 70 on its own stream, under which compute runs from 30 to 40 and from 50 to 60."""
    return block(
        [
            *asked(1, "gemm", (2, 5), (10, 40)),
            *asked(2, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", (6, 8), (30, 70), stream=20),
            *asked(3, "add", (9, 11), (50, 60)),
        ],
        100,
    )


def copies():
    """Both directions, pinned and pageable; the pinned upload runs under a kernel, the others (partly) alone."""
    copy = {"kind": Kind.MEMCPY, "by": "cudaMemcpyAsync"}
    return block(
        [
            *asked(1, "Memcpy HtoD (Pageable -> Device)", (2, 12), (5, 10), nbytes=5000, **copy),
            *asked(2, "gemm", (13, 15), (20, 60)),
            *asked(3, "Memcpy HtoD (Pinned -> Device)", (16, 18), (30, 50), stream=8, nbytes=20_000, **copy),
            *asked(4, "Memcpy DtoH (Device -> Pinned)", (19, 21), (55, 75), stream=9, nbytes=20_000, **copy),
            *asked(5, "Memcpy DtoH (Device -> Pageable)", (22, 90), (80, 90), nbytes=5000, **copy),
        ],
        100,
    )


GRAPH_MODULES = (("Net", "Net"), ("Net.a", "Linear"), ("Net.b", "Linear"))


def eager_step():
    """What a graph is captured from: gemm by Net.a, gemm by Net.b, its backward, an optimizer's update."""
    node = Event(Kind.OP, "autograd::engine::evaluate_function: MmBackward0", 30 * US, 40 * US, 1, sequence=2)
    return block(
        [
            *asked(1, "gemm", (2, 4), (5, 9), op="aten::mm"),
            *asked(2, "gelu", (6, 8), (10, 12), op="aten::gelu"),
            Event(Kind.OP, "aten::mm", 12 * US, 18 * US, 1, sequence=2),
            *asked(3, "gemm", (13, 15), (16, 20), op="aten::mm"),
            node,
            *asked(4, "gemm_nt", (32, 34), (36, 44), op="aten::mm"),
            Event(Kind.ANNOTATION, "Optimizer.step#AdamW.step", 50 * US, 60 * US, 1),
            *asked(5, "adamw", (52, 54), (56, 58), op="aten::_fused_adamw_"),
        ],
        70,
        modules=GRAPH_MODULES,
        **spans((0, 1, 20), (1, 1, 9), (2, 11, 19)),
    )


REPLAYED = (("gemm", 18, 30), ("gelu", 31, 40), ("gemm", 46, 50), ("gemm_nt", 50, 60), ("adamw", 60, 64))


def replay(kernels=REPLAYED):
    """One launch (10 to 35, longer than its first kernels take) that runs several kernels."""
    launch = Event(Kind.RUNTIME, "cudaGraphLaunch", 10 * US, 35 * US, 1, 1)
    return block([launch, *(Event(Kind.KERNEL, n, a * US, b * US, 7, 1) for n, a, b in kernels)], 70)


def steps_without_kernels():
    """Four steps that end at 20, 40, 60 and 80; only the first and the third launch a kernel."""
    made = [*asked(1, "gemm", (5, 7), (10, 30)), *asked(2, "gemm", (45, 47), (50, 70))]
    return block(made, 80, marks_ns=(20 * US, 40 * US, 60 * US, 80 * US))


def cpu_step():
    """A step on a CPU, operator by operator: a linear layer, a loss outside it, the backward, clipping, an optimizer."""
    node = "autograd::engine::evaluate_function: "
    rows = [
        (Kind.OP, "aten::linear", 10, 20, 1),
        (Kind.OP, "aten::addmm", 12, 20, 2),
        (Kind.OP, "aten::mul", 22, 25, 3),
        (Kind.OP, "aten::mean", 26, 30, 4),
        (Kind.OP, "aten::ones_like", 30, 31, -1),
        (Kind.OP, node + "MeanBackward0", 32, 36, 4),
        (Kind.OP, "aten::div", 33, 36, -1),
        (Kind.OP, node + "MulBackward0", 36, 38, 3),
        (Kind.OP, "aten::mul", 37, 38, -1),
        (Kind.OP, node + "AddmmBackward0", 40, 50, 2),
        (Kind.OP, "aten::mm", 41, 50, -1),
        (Kind.OP, node + "torch::autograd::AccumulateGrad", 50, 54, -1),
        (Kind.OP, "aten::add_", 51, 53, -1),
        (Kind.OP, "aten::_foreach_norm", 56, 60, -1),
        (Kind.OP, "aten::clamp", 61, 62, -1),
        (Kind.OP, "aten::_foreach_mul_", 63, 65, -1),
        (Kind.ANNOTATION, "Optimizer.step#AdamW.step", 70, 90, -1),
        (Kind.OP, "aten::_fused_adamw_", 72, 88, -1),
        (Kind.OP, "aten::zeros", 92, 95, -1),
    ]
    made = [Event(kind, name, a * US, b * US, 1, -1, -1, sequence) for kind, name, a, b, sequence in rows]
    modules = (("Net", "Net"), ("Net.up", "Linear"))
    return block(made, 100, modules=modules, device="cpu", **spans((0, 5, 21), (1, 8, 20)))


# ---------------------------------------------------------------------------------------------------------------- ranks

CLOCKS = (0, 250, -40)  # us to add to a rank's times for those of the first
GEMM = (40, 60, 30)
GATHERED = {0: (10, 20), 2: (15, 20)}  # ranks of the small group -> from when to when
STEP = 100


def rank_events(rank, steps=2, noted="operator", numbered=True, skipped=False):
    """The events of one of three ranks, as torch writes them, each rank on a clock of its own. On the first rank's clock, from a
    step's begin, in microseconds:

        rank 0   gemm 5-45   all_reduce 45-75                  add 75-90    a small all_gather 10-20, under the gemm
        rank 1   gemm 5-65                    all_reduce 65-75 add 75-90
        rank 2   gemm 5-35   all_reduce 35-75                  add 75-90    the all_gather 15-20

    noted: which event says what a collective is, "" for none. numbered: whether it has its number. skipped: whether the first
    all_reduce is lacking.
    """
    events, number = [], 0

    def put(category, name, start, length, thread, **args):
        ts = start - CLOCKS[rank] + 1000
        span = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": ts, "dur": length}
        events.append({**span, "args": args})

    def kernel(name, at, start, end, stream, note=None):
        nonlocal number
        number += 1
        both = {"correlation": number, "External id": number}
        if note:
            put("cpu_op", "c10d::some_", at, 1, 77, **{"External id": number + 1000})
            put("cpu_op", "record_param_comms", at, 1, 77, **both, **(note if noted == "operator" else {}))
        put("cuda_runtime", "cudaLaunchKernel", at, 1, 77, **both)
        where = {"device": 0, "context": 1, "stream": stream}
        put("kernel", name, start, end - start, stream, **where, **both, **(note or {} if noted == "kernel" else {}))

    def note(name, group, ranks, elements, dtype, sequence):
        found = {"Collective name": name, "In msg nelems": elements[0], "Out msg nelems": elements[1], "dtype": dtype}
        found |= {"Process Group Name": group, "Process Group Ranks": str(ranks)}
        return found | ({"Seq": sequence} if numbered else {})

    put("cpu_op", "aten::zeros", -10, 1, 77)  # the first step begins as long after the last kernel as the others
    for step in range(steps):
        at = STEP * step
        end = at + 5 + GEMM[rank]
        kernel("gemm", at + 1, at + 5, end, 7)
        if rank in GATHERED:
            begin, stop = (at + moment for moment in GATHERED[rank])
            asked = note("_allgather_base", "1", [0, 2], (100, 200), "Float", step)
            kernel("ncclDevKernel_AllGather_RING_LL", at + 2, begin, stop, 21, asked)
        if step or not skipped:
            asked = note("allreduce", "0", [0, 1, 2], (1000, 1000), "BFloat16", step)
            kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", at + 3, end, at + 75, 20, asked)
        kernel("add", at + 4, at + 75, at + 90, 7)
        put("user_annotation", "Optimizer.step#AdamW.step", at + 85, 7, 77)
    return events


def write_rank(folder, rank, events, knows_rank=True):
    """Write a trace file of one rank, as torch's handler names it."""
    info = {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 3}} if knows_rank else {}
    path = folder / f"rank{rank}.pt.trace.json"
    head = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "a GPU"}], **info}
    path.write_text(json.dumps({**head, "traceEvents": events}))
    return path


# ---------------------------------------------------------------------------------------------------------------- any

STEPS = (
    "op",
    "launch",
    "copy",
    "graph",
    "nccl",
    "gloo",
    "sync",
    "enter",
    "leave",
    "node",
    "data",
    "optimizer",
    "wait",
    "collect",
    "mark",
)


GLOO_THREAD = 50


def program(items, gpu=True, warmup=0, skew=0):
    """A recording of a program. Each item is (what, pause before it, its length on the host, on the device, stream); the
    device runs each stream in order. `skew`: by how much the device's clock is behind."""
    made, calls, marks, collected = [], [], [], []
    free: dict[int, int] = {}  # stream -> when it ends
    open_modules: list[tuple[int, int]] = []
    now, number, sequence = 0, 0, 0

    def device(kind, name, call, length, stream, count=1):
        nonlocal number
        number += 1
        made.append(Event(Kind.RUNTIME, call, start, end, 1, number, number))
        made.append(Event(Kind.OP, "aten::some", start, end, 1, -1, number, sequence))
        for _ in range(count):
            begin = max(free.get(stream, 0), start + 1)
            free[stream] = begin + length
            if gpu:
                made.append(
                    Event(kind, name, begin - skew, begin - skew + length, stream, number, number, nbytes=8 * length)
                )

    for what, pause, length, busy, stream in items:
        start, end = now + pause, now + pause + length
        now = end
        sequence += 1
        match what:
            case "op":
                made.append(Event(Kind.OP, "aten::add", start, end, 1, sequence=sequence))
                made.append(Event(Kind.OP, "aten::copy_", start, start + length // 2, 1))
            case "launch":
                device(Kind.KERNEL, "gemm", "cudaLaunchKernel", busy, stream)
            case "copy":
                device(Kind.MEMCPY, "Memcpy HtoD (Pageable -> Device)", "cudaMemcpyAsync", busy, stream)
            case "graph":
                device(Kind.KERNEL, "gemm", "cudaGraphLaunch", busy, stream, 3)
            case "nccl":
                device(Kind.KERNEL, "ncclDevKernel_AllGather", "cudaLaunchKernel", busy, stream)
            case "gloo":
                free[GLOO_THREAD] = start + busy
                made.append(Event(Kind.ANNOTATION, "gloo:all_reduce", start, start + busy, GLOO_THREAD))
            case "sync":
                now = end = max([end, *free.values()])
                made.append(Event(Kind.RUNTIME, "cudaStreamSynchronize", start, end, 1, 10**6 + sequence))
            case "enter":
                open_modules.append((len(open_modules) % 3, start))
            case "leave" if open_modules:
                calls.append((*open_modules.pop(), end))
            case "node":
                name = "autograd::engine::evaluate_function: MulBackward0"
                made.append(Event(Kind.OP, name, start, end, 1 + stream % 2, sequence=sequence // 2))
                made.append(Event(Kind.OP, "aten::mul", start, end, 1 + stream % 2, -1, 10**5 + sequence))
            case "data":
                made.append(Event(Kind.ANNOTATION, "enumerate(DataLoader)#_SingleProcess", start, end, 1))
            case "optimizer":
                made.append(Event(Kind.ANNOTATION, "Optimizer.step#AdamW.step", start, end, 1))
            case "wait":
                made.append(Event(Kind.ANNOTATION, "surokit.offload.wait landing", start, end + 1, 1))
                device(Kind.MEMCPY, "Memcpy HtoD (Pinned -> Device)", "cudaMemcpyAsync", busy, stream)
            case "collect":
                collected.append((start, end))
            case "mark":
                marks.append(end)
    calls += [(m, a, now) for m, a in reversed(open_modules)]
    gc = np.array(collected, np.int64).reshape(-1, 2)
    return Recording(
        Timeline.of(made),
        0,
        max([now, *free.values()]),
        tuple(marks),
        warmup,
        1,
        (("Net", "Net"), ("Net.a", "Block"), ("Net.a.b", "Linear")),
        **spans(*calls, unit=1),
        start_C=gc[:, 0],
        end_C=gc[:, 1],
        usd_per_gpu_hour=2.0,
        back_to_back_ns=3,
    )
