"""A hand-made GPU trace whose every answer is known; times in microseconds.

Two optimizer steps end at 20 and 95. The first is warm-up; its kernel ends at 30, so the second step's window is 30 to
90 on the device:

    device  k1 ..30 |  k2 33-40 (stream 7)   k3 44-50 (stream 8)   copy 48-55   k5 76-90
    gaps    30-33 (launch ends at 32), 40-44 (launched at 39), 55-76 (launch ends at 75; a sync returns at 58, Python
    runs 60-69)
"""

from typing import Any

import numpy as np

from surokit.profiler.recording import Recording, SyncPoint
from surokit.profiler.timeline import Event, Kind, Timeline

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
