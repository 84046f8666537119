"""Compute the speed of light: the time of each module if every operator ran at the rates that the device reaches.

    light of an operator = max(FLOPs / rate of its products, bytes / bandwidth)        FLOPs and bytes as `work` counts them

Of causal attention, which `work` counts at every key, half the FLOPs take time: kernels skip the keys that a query does not see.

Rates are the ceilings of a calibration (surokit/calibration.py); without one, those of the datasheet, which few runs reach.
The light of a module is the sum over the operators that it runs itself, forward and backward, and stands beside its own
measured time; so the pseudo-rows have one as well. A share above one says that the data was in a cache, which the copy of a
calibration does not use.

A CPU computes what it calls itself: where its calls alone, at the calibrated cost of a small operator's, take longer than the
light, a module is bound by overhead, and larger or fewer operators are the remedy.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt

from surokit.hardware.gpus import Gpu, find_gpu
from surokit.hardware.rates import Rates, rates_of
from surokit.profiler.analysis.attribution import shown_path
from surokit.profiler.analysis.modules import Modules
from surokit.profiler.analysis.owners import PSEUDO, Owners
from surokit.profiler.analysis.roles import Observed, Table, table
from surokit.profiler.record.recording import RATES, Recording

Sums = npt.NDArray[np.float64]
WHOLE = "(whole step)"
_KINDS: dict[str, Any] = {"fp8": "tensor", "fp4": "nv"}  # the planner keeps rates by the tensor cores' own names


def speed_of_light(recording: Recording, modules: Table, gpu: Gpu, named_by: Recording | None = None) -> Table:
    """Return one row for each module and pseudo-row that has own time or work, with the whole step first. `named_by` is the
    recording of a step without CUDA graphs, which has the shapes of what replayed graphs do.

    Columns: module, self_ms (as the table `modules` of a profile has it), light_ms, share (light / self), bound, gflop,
    gib (of the module itself, a step). bound is "compute", "memory", on a CPU "overhead", or "unknown" where no work was
    seen; then share is None.

    Raises ValueError where no shapes were recorded, or where a rate of `gpu` that they need is not known.
    """
    found = Modules(Observed(recording), named_by)
    r = found.shaped_by
    if r is None or r.shaped is None:
        raise ValueError(
            "This profile has no shapes of a step's operators, which the speed of light needs: profile with warmup=2 or more, "
            "steps of one size, and where they are CUDA graphs take p.named_by(eager), with a profile of a step without graphs."
        )
    shaped = r.shaped
    products_R, bandwidth, launch_us = _rates(gpu)
    # an operator that multiplies in a format without a rate of its own is taken at float32's
    rate_E = np.where(shaped.rate_E < 0, RATES.index("fp32"), shaped.rate_E)
    done_E = shaped.flop_E - shaped.skipped_E if len(shaped.skipped_E) else shaped.flop_E
    compute_E = done_E / products_R[rate_E] / 1e9
    memory_E = shaped.bytes_E / bandwidth / 1e9
    light_E = np.maximum(compute_E, memory_E)
    events = shaped.timeline
    owner_E, _ = Owners(r, events).at(events.thread_E, events.start_E)
    works_E = (shaped.flop_E > 0) | (shaped.bytes_E > 0)
    computing_E = np.where(compute_E >= memory_E, light_E, 0)
    names = [shown_path(path, found.modules) for path, _ in r.modules] + list(reversed(PSEUDO))
    sums = np.zeros((len(names), 5))  # pseudo-rows from the end, as owners below zero count
    np.add.at(sums, owner_E, np.stack([light_E, computing_E, works_E, shaped.flop_E, shaped.bytes_E], axis=1))
    own: defaultdict[str, float] = defaultdict(float)
    asked: defaultdict[str, Sums] = defaultdict(lambda: np.zeros(5))
    for name, self_ms in zip(modules["module"], modules["self_ms"]):
        own[name] += self_ms
    for name, of_name in zip(names, sums):
        asked[name] = asked[name] + of_name
    overhead_ms = launch_us / 1e3 if gpu.device == "cpu" else 0.0
    every = [(name, own[name], asked[name]) for name in dict.fromkeys((*own, *asked))]
    rows = [
        _row(*row, overhead_ms) for row in [(WHOLE, sum(own.values()), sums.sum(0)), *every] if row[1] or row[2].any()
    ]
    return table("module self_ms light_ms share bound gflop gib", rows)


def _row(name: str, self_ms: float, asked: Sums, overhead_ms: float) -> tuple[object, ...]:
    light, computing, calls, flop, moved = asked.tolist()
    if not light:
        bound = "unknown"
    elif calls * overhead_ms > light:
        bound = "overhead"
    else:
        bound = "compute" if computing >= light / 2 else "memory"
    share = light / self_ms if light and self_ms else None
    return name, self_ms, light, share, bound, flop / 1e9, moved / 2**30


def _rates(gpu: Gpu) -> tuple[Sums, float, float]:
    """Return (TFLOPS by RATES, TB/s, microseconds a launch). Where only bfloat16's rate is known, float32 gets the same: no
    product in float32 is faster, so the light stays a bound. Where a CPU has only float32's rate, bfloat16 gets that."""

    half, full = rates_of(gpu, "bf16"), rates_of(gpu, "fp32")
    known = [r for r in (half, full) if isinstance(r, Rates)]
    if not known:
        raise ValueError(str(half))
    first = known[0]
    by_name = {
        "bf16": first.products[None],
        "fp32": (full if isinstance(full, Rates) else first).products[None],
        **{name: first.products[kind] for name, kind in _KINDS.items()},
    }
    return np.array([by_name[name] for name in RATES]), first.bandwidth_tb_s, first.launch_us or 0.0


def cached_gpu(device: str = "") -> Gpu:
    """Return a profile's device with its ceilings. `device` is "cpu" or a GPU's name; "" stands for this machine's first
    choice. A device that is here is calibrated once (20 seconds), and the result is kept. A GPU that is not here has its
    row of the hardware table; raises ValueError where there is none."""
    import torch

    from surokit.calibration import calibrate

    here = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    if device in ("", here):
        return calibrate()
    return calibrate("cpu") if device == "cpu" else find_gpu(device)
