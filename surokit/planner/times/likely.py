"""Predict how long a step is likely to take, and how sure that is, from what published runs reached.

The estimate of roofline.py is what a step could take: each kernel at the datasheet's rate. A likely step has its rows at the rates
that published runs of the same kind of GPU and engine reached, and adds what stands between kernels:

    device  products x p + attention x a + bytes x m + gap x kernels, each factor fitted
    p       grows with t / number of waves of tiles of a product (at most t), and with s / length that it contracts
    step    (device^4 + host^4)^(1/4) + c x communication + k        host: a time a launch; the longer of the two decides

Factors are of a kind of GPU (products), of an architecture (attention), and of an engine: "eager" PyTorch, "compiled" by
torch.compile, or "fused" by hand. `python -m surokit.bench published` fits them to the runs of compare/runs.csv and writes
hardware/reached.csv. The interval from `low_ms` to `high_ms` holds eight of ten runs: nine of ten take longer than `low_ms`, one
of ten longer than `high_ms`, by the errors of runs that were left out of the fit.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any

from surokit.hardware.gpus import Gpu
from surokit.planner.counts.memory import Engine
from surokit.planner.times.roofline import Estimate

ANY = "any"  # in reached.csv: of what no published run has
_OTHER = "other"  # architecture of GPUs without a compute capability
_PRODUCTS = ("forward", "grad_input", "grad_weight")
_TILE = 128 * 256  # outputs that one multiprocessor computes at a time, in the kernels of large products
_SMS = 132  # of a GPU whose number is not known
_STEP = 128  # of the contracted length


@dataclass(frozen=True)
class Terms:
    """A Terms holds what a step's time is made of, in ms at the datasheet's rates.

    products        of linear layers and the head; `unhidden`: bytes of these beyond their FLOPs; `tails` over the number of waves
                    of tiles, at most one; `short` over the contracted length, in steps of 128
    attention       FLOPs at the rate of plain products
    launches        number of kernels; `launched`: of these by the host, none in CUDA graphs
    """

    products: float = 0.0
    tails: float = 0.0
    short: float = 0.0
    unhidden: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    quantization: float = 0.0
    adapter: float = 0.0
    optimizer: float = 0.0
    launches: float = 0.0
    launched: float = 0.0
    communication: float = 0.0


@dataclass(frozen=True)
class Factors:
    """A Factors holds what the terms of a step are multiplied by on one kind of GPU with one engine.

    gap_us, host_us     microseconds a kernel: between two on the device, and on the host for its launch
    link                share of the communication that the step waits for
    constant_ms         of a step, whatever it does
    """

    products: Any
    tails: Any
    short: Any
    attention: Any
    memory: Any
    quantization: Any
    adapter: Any
    optimizer: Any
    gap_us: Any
    host_us: Any
    link: Any
    constant_ms: Any


@dataclass(frozen=True)
class Likely:
    """A Likely is the time of an optimizer step on one GPU that published runs make likely, in ms: `step_ms`, and from `low_ms` to
    `high_ms` eight of ten runs.

    tokens, model_flop  of the step, over all GPUs and on one
    how                 what the factors were fitted to, in words
    """

    step_ms: float
    low_ms: float
    high_ms: float
    tokens: int
    model_flop: float
    how: str

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens a second over all GPUs."""
        return self.tokens / self.step_ms * 1e3

    @property
    def tflops(self) -> float:
        """Return the model TFLOPS that one GPU reaches."""
        return self.model_flop / self.step_ms / 1e9

    @property
    def spread(self) -> tuple[float, float]:
        """Return (low, high) over the likely time."""
        return self.low_ms / self.step_ms, self.high_ms / self.step_ms


def likely_step(estimate: Estimate, gpu: Gpu, engine: Engine) -> Likely:
    """Return the likely time of a step that was estimated at a datasheet's rates. Raises ValueError where rates were measured,
    which predict by themselves."""
    if gpu.ceilings is not None:
        raise ValueError(f"The rates of {gpu.name} were measured: its estimate is a prediction already.")
    reached = _reached()
    ms = float(step_ms(terms_of(estimate, gpu), factors_for(gpu, engine, reached)))
    seen, low, high = interval(gpu, engine, reached)
    runs = "runs" if seen != 1 else "run"
    how = (
        f"fitted to {seen} published {runs} of {gpu.name}, {engine}"
        if seen
        else f"no published run of {gpu.name}, {engine}"
    )
    if estimate.communication.bytes and estimate.communication.ms is None:
        how += ", without communication, whose rate is not known"
    return Likely(ms, ms * low, ms * high, estimate.tokens, estimate.model_flop, how)


def terms_of(estimate: Estimate, gpu: Gpu) -> Terms:
    """Sum the rows of an estimate by what they are multiplied by."""
    found = dict.fromkeys((f.name for f in fields(Terms)), 0.0)
    for row in estimate.rows:
        found["launches"] += row.launches
        if row.group in ("products", "head and loss") and row.part in _PRODUCTS:
            found["products"] += row.compute_ms
            found["tails"] += row.compute_ms * min(1.0, (gpu.sms or _SMS) * _TILE / (row.outputs or 1.0))
            found["short"] += row.compute_ms * _STEP / (row.inner or 1.0)
            found["unhidden"] += max(0.0, row.memory_ms - row.compute_ms)
        elif row.group == "attention":
            found["attention"] += row.flop / estimate.rates.products[None] / 1e9
        elif row.group in ("quantization", "adapter", "optimizer"):
            found[row.group] += row.device_ms
        else:
            found["elementwise"] += row.device_ms
    found["launched"] = 0.0 if estimate.rates.graphs else found["launches"]
    found["communication"] = estimate.communication.ms or 0.0
    return Terms(**found)


def step_ms(t: Terms, f: Factors) -> Any:
    """Return the ms of a step; terms and factors may be arrays of runs."""
    device = (
        (t.products + t.tails * f.tails + t.short * f.short) * f.products
        + t.attention * f.attention
        + (t.elementwise + t.unhidden) * f.memory
        + t.quantization * f.quantization
        + t.adapter * f.adapter
        + t.optimizer * f.optimizer
        + t.launches * f.gap_us / 1e3
    )
    host = t.launched * f.host_us / 1e3
    return (device**4 + host**4) ** 0.25 + t.communication * f.link + f.constant_ms


# -- what was reached


#: (term, what it is of): factor
Reached = Mapping[tuple[str, str], float]


def factors_for(gpu: Gpu, engine: Engine, reached: Reached) -> Factors:
    """Return the factors of a kind of GPU and an engine; of a GPU without a published run, those of any."""
    names = names_of(gpu, engine)
    return gather(lambda term, kind: reached.get((term, names[kind]), reached[term, ANY]))


def names_of(gpu: Gpu, engine: Engine) -> Mapping[str, str]:
    """Return the names that factors have in reached.csv, by what a factor is of."""
    return {
        "gpu": gpu.name,
        "architecture": architecture(gpu),
        "engine": engine,
        "attention": "fused" if engine == "fused" else "pytorch",
        ANY: ANY,
    }


def gather(of: Callable[[str, str], Any]) -> Factors:
    """Put factors together; `of` returns that of a term, and of what (`names_of`)."""
    return Factors(
        products=of("products", "gpu") * of("products", "engine"),
        tails=of("tails", ANY),
        short=of("short", ANY),
        attention=of("attention", "architecture") * of("attention", "attention"),
        memory=of("memory", "engine"),
        quantization=of("quantization", ANY),
        adapter=of("adapter", ANY),
        optimizer=of("optimizer", ANY),
        gap_us=of("gap_us", ANY),
        host_us=of("host_us", "engine"),
        link=of("link", ANY),
        constant_ms=of("constant_ms", ANY),
    )


def architecture(gpu: Gpu) -> str:
    """Return the name that attention's factor has for a GPU: the major number of its compute capability, "other" without."""
    return _OTHER if gpu.capability is None else f"sm{gpu.capability[0]}0"


def interval(gpu: Gpu, engine: Engine, reached: Reached) -> tuple[int, float, float]:
    """Return (number of published runs of this GPU and engine, low, high): the last two times a likely time are its p10 and p90."""
    seen = int(reached.get(("runs", f"{gpu.name} {engine}"), 0))
    of = "seen" if seen else "unseen"
    return seen, reached["low", of], reached["high", of]


@cache
def _reached() -> Reached:
    return read_reached(files("surokit.hardware").joinpath("reached.csv").read_text(encoding="utf-8"))


def read_reached(text: str) -> Reached:
    """Read a table of factors: term, of, factor."""
    return {(row["term"], row["of"]): float(row["factor"]) for row in csv.DictReader(io.StringIO(text))}
