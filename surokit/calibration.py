"""Measure in seconds the rates that this machine really reaches, so that a plan's times need no guess: `calibrate`.

    gpu = sk.calibrate()                          # measured once, then read from the user's cache folder
    sk.plan(model, gpu=gpu, batch=8, length=2048)

A datasheet's peak is a bound that no program reaches. A few short measurements give ceilings that programs do reach:

    bf16, fp32, fp8    a large square product, 2 n^3 FLOP; fp8 only where the device multiplies it itself
    bandwidth          a copy that fits no cache, bytes read and bytes written
    launch             host time of one small kernel's launch; on a CPU of one small operator's call
    host link          a pinned copy to the device and one back: the slower of the two counts
    peer link          a copy to another GPU, where there is one
    host AdamW         torch's fused AdamW on the host, float32: what an offloaded optimizer pays a parameter
    host sums          bfloat16 gradients added to float32 sums: what it pays in the steps between two updates

Each figure is the median of repeated measurements; of a product the best over sizes. A part that fails or is interrupted is
None, which a warning and `ceilings.measured` say. The clock's state, the power limit and other programs are part of
what is measured, so calibrate on the machine as it will train.

The torch half of surokit/hardware/gpus.py, whose values it makes; the planner itself knows no torch.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surokit.environment import cores, cpu_model, float32_precision, front_end
from surokit.hardware.gpus import GPUS, Ceilings, Gpu, find_gpu
from surokit.hardware.machine import machine_gib
from surokit.kernels import addmm_, native
from surokit.places import write_whole
from surokit.torch_private import fused_adamw_

_VERSION = 4  # of the measurements: a change of what is measured makes cached figures stale
SIZES = {"cpu": (256, 512, 1024, 2048), "cuda": (2048, 4096, 8192)}  # of square products
COPY_BYTES = {"cpu": 256 * 2**20, "cuda": 2**30}
_LINK_BYTES = 256 * 2**20
_LAUNCHES = 500  # under the 1024 that a CUDA stream queues before the host waits
ADAM_PARAMS = 32 * 2**20  # 512 MiB of states: a processor's last cache may hold 256, and an offloaded model fits none
_SUM_BLOCK = 1 << 17  # gradients that a thread widens at a time, as an offloading optimizer does
_REPEATS = 3  # at least, whatever the time given

Measure = Callable[[torch.device, float], float]


@dataclass(frozen=True)
class RateMeasurement:
    """A RateMeasurement is one measurement: the field of Ceilings that it fills, its name, and the devices that it applies to."""

    field: str
    words: str
    measure: Measure
    applies: Callable[[torch.device], bool] = lambda device: True


def calibrate(
    device: str | torch.device | None = None,
    seconds: float = 20.0,
    cache: bool | str | Path = True,
    *,
    refresh: bool = False,
    progress: bool = True,
) -> Gpu:
    """Measure a device: its row of the hardware table, where it has one, with its own memory, and `ceilings` beside the peaks.

    device      "cuda", "cuda:1", "cpu"; the GPU if there is one without it
    seconds     about how long to measure, over all parts; a minimum of repeats is kept
    cache       True keeps the result in the user's cache folder, for this machine, device and version of torch; a folder keeps it
                there; False neither reads nor writes
    refresh     measures again although a result is kept
    progress    shows one line while it measures

    A CPU's name is "cpu: <its model>, <n> cores"; it and a GPU that the table does not know have no peaks, so no MFU: their
    ceilings only. An interrupt ends the measuring; what was measured until then is returned, and not cached. Raises ValueError for
    a device that is not there, or seconds that are not above zero.
    """
    where = _device(device)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
        raise ValueError(f"seconds={seconds!r} must be a number above zero: 20 is usual.")
    key = _key(where)
    file = None if cache is False else _file(cache_folder() if cache is True else Path(cache), key)
    if file is not None and not refresh and (kept := read_kept(file, key, seconds)) is not None:
        return kept
    gpu, complete = _measure(row_of(where), where, seconds, progress)
    if file is not None and complete:
        write_kept(file, key, seconds, gpu)
    return gpu


def kept(device: torch.device) -> Gpu | None:
    """Return what `calibrate` measured of this device before, in another program too; None where it did not."""
    where = _device(device)
    return read_kept(_file(cache_folder(), key := _key(where)), key, 20.0)


# -- the measurements


def _measure(row: Gpu, where: torch.device, seconds: float, progress: bool) -> tuple[Gpu, bool]:
    """Measure all parts; return (the row with its ceilings, False if the measuring was cut short)."""
    parts = [part for part in PARTS if part.applies(where)]
    figures: dict[str, float] = {}
    missing: list[str] = []
    complete = True
    for number, part in enumerate(parts, 1):
        try:
            with _line(f"calibrating {row.name}: {part.words} ({number} of {len(parts)})", progress):
                # four digits are all that a clock is worth
                figures[part.field] = float(f"{part.measure(where, seconds / len(parts)):.4g}")
        except KeyboardInterrupt:
            complete = False
            missing += [f"{each.words} (interrupted)" for each in parts[number - 1 :]]
            break
        except (
            RuntimeError,
            MemoryError,
            NotImplementedError,
        ) as error:  # out of memory, or a product that is not there
            missing.append(f"{part.words} ({str(error).strip().partition(chr(10))[0] or type(error).__name__})")
        finally:
            if where.type == "cuda":
                torch.cuda.empty_cache()
    what = f"{datetime.date.today().isoformat()}, torch {torch.__version__}"
    if where.type == "cpu":
        threads = torch.get_num_threads()
        what += f", {threads} thread{'' if threads == 1 else 's'}"
    if missing:
        what += f"; without {', '.join(missing)}"
        warnings.warn(
            f"calibrate() could not measure everything of {row.name}: without {', '.join(missing)}.", stacklevel=3
        )
    return replace(row, ceilings=Ceilings(what, **figures)), complete


def _product(dtype: torch.dtype) -> Measure:
    def measure(device: torch.device, seconds: float) -> float:
        def multiply(n: int) -> Callable[[], object]:
            a_nn, b_nn = (_normal(n, device).to(dtype) for _ in range(2))
            out_nn = torch.empty_like(a_nn)
            return lambda: addmm_(out_nn, a_nn, b_nn.t(), beta=0.0)  # as layers multiply

        return best_product(multiply, device, seconds)

    return measure


def _fp8(device: torch.device, seconds: float) -> float:
    """Multiply two E4M3 matrices with a scale each, result in bfloat16."""

    def multiply(n: int) -> Callable[[], object]:
        a_nn, b_nn = (_normal(n, device).to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones(1, 1, device=device)
        return lambda: native.scaled_mm(a_nn, one, b_nn, one, out_dtype=torch.bfloat16)

    return best_product(multiply, device, seconds)


def _normal(n: int, device: torch.device) -> Tensor:
    """Draw normal numbers, which training has too, from an own generator: a chip's clock depends on the bits that flip."""
    return torch.randn(n, n, device=device, generator=torch.Generator(device).manual_seed(0))


def best_product(multiply: Callable[[int], Callable[[], object]], device: torch.device, seconds: float) -> float:
    """Measure products of several sizes and return the best TFLOPS; sizes whose one product would take all the time are skipped."""
    sizes = SIZES[device.type]
    best, left = 0.0, seconds
    for n in sizes:
        call = multiply(n)
        started = time.perf_counter()
        each_s = median_s(call, device, left / 2 if n != sizes[-1] else left)
        left -= time.perf_counter() - started
        best = max(best, 2 * n**3 / each_s / 1e12)
        if 8 * each_s * (_REPEATS + 1) > left:  # the next size takes eight times as long
            break
    return best


def _bandwidth(device: torch.device, seconds: float) -> float:
    """Return the TB/s of a copy on the device; bytes read and bytes written count."""
    size = COPY_BYTES[device.type]
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / median_s(lambda: target.copy_(source), device, seconds) / 1e12


def _launch(device: torch.device, seconds: float) -> float:
    """Return the microseconds of host time for one small operator, called many times in a row."""
    x = torch.zeros(8, device=device)

    def launches() -> None:
        for _ in range(_LAUNCHES):
            x.add_(1.0)

    launches()
    times_s: list[float] = []
    until = time.perf_counter() + min(seconds, 1.0)
    while len(times_s) < _REPEATS or time.perf_counter() < until:
        _wait(device)
        started = time.perf_counter()
        launches()
        times_s.append(time.perf_counter() - started)
    return statistics.median(times_s) / _LAUNCHES * 1e6


def _host_link(device: torch.device, seconds: float) -> float:
    """Return the GB/s of a pinned copy, in the slower direction."""
    host = torch.empty(_LINK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    there = torch.empty(_LINK_BYTES, dtype=torch.uint8, device=device)

    def copy_s(target: Tensor, source: Tensor) -> float:
        return median_s(lambda: target.copy_(source, non_blocking=True), device, seconds / 2)

    return _LINK_BYTES / max(copy_s(there, host), copy_s(host, there)) / 1e9


def _peer_link(device: torch.device, seconds: float) -> float:
    """Return the GB/s of a copy to another GPU of the node."""
    here = device.index or 0
    other = torch.device("cuda", 0 if here else 1)
    source = torch.zeros(_LINK_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty(_LINK_BYTES, dtype=torch.uint8, device=other)
    return _LINK_BYTES / median_s(lambda: target.copy_(source, non_blocking=True), device, seconds) / 1e9


def _host_adam(device: torch.device, seconds: float) -> float:
    """Return the parameters a second of torch's fused AdamW on the host, everything in float32.

    It calls the kernel itself, since torch.optim loads its compiler before the first step.
    """
    p, grad, m, v = (torch.full((ADAM_PARAMS,), 1e-3) for _ in range(4))
    step = torch.ones(())

    def update() -> None:
        fused_adamw_(
            [p],
            [grad],
            [m],
            [v],
            [],
            [step],
            lr=1e-3,
            beta1=0.9,
            beta2=0.95,
            weight_decay=0.1,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    return ADAM_PARAMS / median_s(update, torch.device("cpu"), seconds)


def _host_accumulate(device: torch.device, seconds: float) -> float:
    """Return how many bfloat16 gradients a second are added to a sum in float32 on the host: widened in parts that stay in a
    cache."""
    sums = torch.zeros(ADAM_PARAMS)
    grads = torch.full((ADAM_PARAMS,), 1e-3, dtype=torch.bfloat16)
    wide = torch.empty(_SUM_BLOCK * torch.get_num_threads())
    parts = list(zip(sums.split(len(wide)), grads.split(len(wide))))

    def add() -> None:
        for total, grad in parts:
            total.add_(wide[: len(grad)].copy_(grad))

    return ADAM_PARAMS / median_s(add, torch.device("cpu"), seconds)


PARTS = (
    RateMeasurement("bf16_tflops", "bf16 products", _product(torch.bfloat16)),
    RateMeasurement("fp32_tflops", "fp32 products", _product(torch.float32)),
    RateMeasurement("fp8_tflops", "fp8 products", _fp8, lambda device: native.available("tensor", device)),
    RateMeasurement("bandwidth_tb_s", "bandwidth", _bandwidth),
    RateMeasurement("launch_us", "launches", _launch),
    RateMeasurement("host_gb_s", "host link", _host_link, lambda device: device.type == "cuda"),
    RateMeasurement(
        "peer_gb_s", "peer link", _peer_link, lambda device: device.type == "cuda" and torch.cuda.device_count() > 1
    ),
    RateMeasurement("host_adam_params_s", "host AdamW", _host_adam),
    RateMeasurement("host_accumulate_params_s", "host sums", _host_accumulate),
)


# -- timing


def median_s(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the median seconds of one call, after one that does not count, for `seconds` and at least a few times.

    On a GPU it makes several calls between two waits, so that a wait's own time does not count.
    """
    call()
    _wait(device)
    started = time.perf_counter()
    call()
    _wait(device)
    once_s = max(time.perf_counter() - started, 1e-7)
    calls = max(1, min(100, int(0.02 / once_s))) if device.type == "cuda" else max(1, min(1000, int(0.002 / once_s)))
    times_s: list[float] = []
    until = time.perf_counter() + seconds
    while len(times_s) < _REPEATS or (time.perf_counter() < until and len(times_s) < 1000):
        started = time.perf_counter()
        for _ in range(calls):
            call()
        _wait(device)
        times_s.append((time.perf_counter() - started) / calls)
    return statistics.median(times_s)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- what is known without measuring


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device={device!r} is none that torch knows: give 'cuda', 'cuda:1' or 'cpu'.") from None
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r}: a calibration measures 'cuda' or 'cpu'.")
    if where.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # "cuda" is the current one
    index = where.index if ":" in str(where) else torch.cuda.current_device() if count else 0
    if index >= count:
        raise ValueError(
            f"device={device!r} is not there, torch finds {count} GPUs: calibrate('cpu') measures the processor."
        )
    return torch.device("cuda", index)


def row_of(where: torch.device) -> Gpu:
    """Return the device's row of the hardware table, with the memory that it really has; without a row, what torch says of it."""
    if where.type == "cpu":
        n = cores()
        name = f"cpu: {cpu_model()}, {n} core{'' if n == 1 else 's'}"
        return Gpu(name, memory_gib=machine_gib(), source="this machine", device="cpu")
    properties = torch.cuda.get_device_properties(where)
    memory_gib = round(properties.total_memory / 2**30, 2)
    try:
        return replace(find_gpu(properties.name), memory_gib=memory_gib, usable_gib=memory_gib)
    except ValueError:
        capability = None if torch.version.hip else (properties.major, properties.minor)
        return Gpu(
            properties.name,
            memory_gib=memory_gib,
            capability=capability,
            source="torch's properties of the device; no row in the table",
        )


# -- the kept result


def _key(where: torch.device) -> dict[str, Any]:
    """Return everything that a kept result depends on; where any of it changes, the device is measured again."""
    key = {
        "version": _VERSION,
        "machine": platform.node(),
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "device": where.type,
        "matmul": float32_precision(),
    }
    if where.type == "cuda":
        key |= {"gpu": torch.cuda.get_device_name(where), "index": where.index, "cuda": torch.version.cuda}
    return key


def cache_folder() -> Path:
    """Return surokit's folder in the user's cache folder, whose place depends on the platform."""
    system = platform.system()
    if system == "Windows":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif system == "Darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "surokit" / "calibration"


def _file(folder: Path, key: dict[str, Any]) -> Path:
    name = re.sub(r"[^A-Za-z0-9]+", "-", str(key.get("gpu", "cpu"))).strip("-")
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    return folder / f"{name}-{digest}.json"


def read_kept(file: Path, key: dict[str, Any], seconds: float) -> Gpu | None:
    """Read the kept result; None where it is of another key, was measured for less time, or its file is damaged.

    The datasheet's row is today's, so that a corrected table reaches a machine that was calibrated before.
    """
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["key"] != key or kept["seconds"] < seconds:
            return None
        gpu = Gpu.from_json(kept["gpu"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    row = GPUS.get(gpu.name)
    if row is None:
        return gpu
    return replace(row, ceilings=gpu.ceilings, memory_gib=gpu.memory_gib, usable_gib=gpu.usable_gib)


def write_kept(file: Path, key: dict[str, Any], seconds: float, gpu: Gpu) -> None:
    """Write a result, whole or not at all. Warns where the folder cannot be written."""
    text = json.dumps({"key": key, "seconds": seconds, "gpu": gpu.to_json()}, indent=1)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, text)
    except OSError as error:
        warnings.warn(f"calibrate() could not keep its result, and will measure again: {error}.", stacklevel=3)


# -- the line


@contextmanager
def _line(text: str, progress: bool) -> Iterator[None]:
    """Show one line while a part is measured, and clear it afterwards; show nothing where no terminal or notebook is."""
    shown = progress and (sys.stderr.isatty() or front_end() != "terminal")
    if not shown:
        yield
        return
    sys.stderr.write(f"\r{text}")
    sys.stderr.flush()
    try:
        yield
    finally:
        sys.stderr.write("\r" + " " * len(text) + "\r")
        sys.stderr.flush()
